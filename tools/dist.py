"""`make dist`: build the package, look into it, and use it as a stranger would, far from this repository.

The wheel is installed into a new environment outside the repository, with base dependencies alone. There the README's
commands are run, and what needs an extra must say so in one sentence. Each extra then comes alone, in an environment
laid over the first one, so that torch is installed once: what needs it works, what needs another one says so.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import time
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.parser import Parser
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import dedent

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FOR_DEVELOPERS = ("dev", "docs")
EXTRAS = [name for name in PROJECT["optional-dependencies"] if name not in FOR_DEVELOPERS]
SHORT = "--rounds 1 --epochs 1 --clients 4 --quiet"

# What needs an extra: commands that work with it and are refused without it. README's runs are there by then.
NEEDS = {
    "report": [
        "figure list runs/first",
        "figure curves runs -o curves.svg",
        "report runs -o report.html",
        "evaluate runs/first --data digits -o measured",
        "spiral --epochs 1 --rounds 1 --out spiral",
    ],
    "flower": [
        "federation certs fed",
        "federation status fed",
    ],
    "ray": [f"run digits --backend ray {SHORT} --out made/ray"],
    "tables": [
        "inspect --data csv:table.csv --set data.label=kind",
        f"run --data csv:table.csv --set data.label=kind {SHORT} --out made/table",
    ],
    "hf": ["inspect --data hf:./saved --set data.label=kind"],
    "onnx": ["export runs/first -o model.onnx"],
    "tensorboard": [f"run digits --track tensorboard {SHORT} --out made/tensorboard"],
    "mlflow": [f"run digits --track mlflow {SHORT} --out made/mlflow"],
    "wandb": [
        f"run digits --track wandb {SHORT} --out made/wandb",
        f"sweep digits --method fednh --track wandb {SHORT} --out made/sweep",
    ],
    "timm": [
        "run --data folder:photos --partition site --set data.size=32 --set model.name=timm:lcnet_035 "
        "--set model.norm=local --rounds 1 --epochs 1 --quiet --out made/timm"
    ],
    "backbones": [
        "features folder:photos --model efficientnet_lite0 --size 32 -o features.npz",
        "run --data folder:photos --partition site --set model.name=efficientnet_lite0 --set model.frozen=body "
        "--set features.size=32 --rounds 1 --epochs 1 --quiet --out made/frozen",
    ],
    "privacy": [f"run digits --set privacy.level=sample --set privacy.epsilon=8 {SHORT} --out made/private"],
    "text": ["features csv:texts.csv --model sentence:encoder --text note --set data.label=kind -o texts.npz"],
}
BUILDS = {"timm": "torchvision"}  # what an extra brings in a build for one kind of torch: with another it says so
REFUSED_ONLY = {  # they need a federation that runs, or a run to go on with: tried where the extra is absent
    "flower": [
        "federation up fed --local",
        "federation serve fed",
        "federation run fed",
        "federation join fed/sites/site-0 --server 127.0.0.1:1",
        "federation approve fed/sites/site-0 0",
    ],
    "tables": ["inspect --data parquet:table.parquet"],
    "tensorboard": ["resume runs/first --track tensorboard"],
    "mlflow": ["resume runs/first --track mlflow"],
    "wandb": ["resume runs/first --track wandb"],
}
PREPARE = {  # what the commands are about, made in the folder where they run
    "base": """
        import numpy as np, pathlib
        from PIL import Image
        from sklearn.datasets import load_digits
        images, labels = load_digits(return_X_y=True)
        for i in range(240):
            site = ("art", "cartoon", "photo", "sketch")[i % 4]
            path = pathlib.Path(f"photos/{site}/digit-{labels[i]}/{i}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((images[i].reshape(8, 8) * 15.9).astype(np.uint8)).save(path)
        rows = [f"{i % 7},{i % 5},{'ab'[i % 2]}" for i in range(400)]
        pathlib.Path("table.csv").write_text("x,y,kind\\n" + "\\n".join(rows) + "\\n")
        rows = [f"word {i % 5},{'ab'[i % 2]}" for i in range(40)]
        pathlib.Path("texts.csv").write_text("note,kind\\n" + "\\n".join(rows))
        pathlib.Path("saved").mkdir()
        pathlib.Path("encoder").mkdir()
    """,
    "hf": """
        import datasets
        rows = {"x": [float(i % 7) for i in range(400)], "kind": ["ab"[i % 2] for i in range(400)]}
        datasets.Dataset.from_dict(rows).save_to_disk("saved")
    """,
    "text": """
        from pathlib import Path
        from sentence_transformers import SentenceTransformer, models
        from transformers import BertConfig, BertModel, BertTokenizerFast
        Path("vocab.txt").write_text("\\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "word"]))
        sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
        BertModel(BertConfig(vocab_size=6, **sizes)).save_pretrained("bert")
        BertTokenizerFast("vocab.txt").save_pretrained("bert")
        bert = models.Transformer("bert")
        SentenceTransformer(modules=[bert, models.Pooling(8)]).save("encoder")
    """,
}


PROGRAMS = {  # what a stranger does in Python, after the commands
    "base": """
        import fednh, numpy
        (label,) = fednh.load_model("runs/first").predict(numpy.zeros((1, 8, 8, 1), numpy.uint8))
    """,
    "report": """
        import json, matplotlib
        matplotlib.use("agg")
        cells = json.load(open("notebooks/ten-minutes.ipynb"))["cells"]
        exec("\\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"))
    """,
}


EACH = """
    import json, os, runpy, shlex, sys, tempfile
    import torch
    for command in json.loads(sys.argv[1]):
        with tempfile.TemporaryFile() as errors:
            child = os.fork()
            if child == 0:
                os.dup2(errors.fileno(), 2)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                sys.argv = ["fednh", *shlex.split(command)]
                runpy.run_module("fednh", run_name="__main__")
                sys.exit(0)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            errors.seek(0)
            print(json.dumps([code, errors.read().decode()]), flush=True)
"""


@dataclass
class Report:
    """What was checked; a failure does not stop the rest."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)

    def check(self, ok: bool, what: str, why: str = "") -> bool:
        print(f"{'ok  ' if ok else 'FAIL'} {what}" + ("" if ok else f"\n     {why}"), flush=True)
        if ok:
            self.passed += 1
        else:
            self.failed.append(what)
        return ok


@dataclass(frozen=True)
class Place:
    """An environment, and the folder that its commands run in."""

    name: str
    env: Path
    folder: Path

    @property
    def python(self) -> Path:
        return self.env / "bin/python"

    def run(self, *words: str, seconds: float = 600) -> subprocess.CompletedProcess[str]:
        """A command there; nothing of this repository or this user's home is in reach."""
        home = self.folder.parent / "home"
        kept = {key: value for key, value in os.environ.items() if key in ("LANG", "TMPDIR", "NO_COLOR")}
        around = {**kept, "HOME": str(home), "PATH": f"{self.env / 'bin'}:/usr/bin:/bin"}
        return subprocess.run(
            words,
            cwd=self.folder,
            env=around,
            capture_output=True,
            text=True,
            timeout=seconds,
            stdin=subprocess.DEVNULL,
        )

    def fednh(self, command: str) -> subprocess.CompletedProcess[str]:
        return self.run(str(self.python), "-m", "fednh", *shlex.split(command))

    def execute(self, program: str, *args: str) -> subprocess.CompletedProcess[str]:
        return self.run(str(self.python), "-c", dedent(program), *args)

    def each_fednh(self, commands: list[str]) -> list[tuple[int, str]]:
        """Exit code and errors of each command. Torch is imported once: importing is most of what a refusal takes."""
        told = self.execute(EACH, json.dumps(commands))
        if told.returncode != 0:
            raise RuntimeError(f"{self.name}: the commands could not be run: {told.stderr[-800:]}")
        return [(code, errors) for code, errors in map(json.loads, told.stdout.splitlines())]

    def install(self, *what: str) -> None:
        """With this machine's own settings of pip, and the versions that were tested.

        The pip that runs is this environment's, and nothing is compiled before it is used: both save minutes.
        """
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "--quiet", "--disable-pip-version-check"]
        told = ["install", "--no-compile", "--constraint", str(ROOT / "constraints.txt")]
        subprocess.run([*pip, *told, *what], check=True, cwd=self.folder)


def build(report: Report) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    for old in DIST.glob("fednh-*"):
        old.unlink()
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(DIST), str(ROOT)], check=True, stdout=subprocess.PIPE
    )
    (sdist,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    told = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel)], capture_output=True, text=True
    )
    report.check(told.returncode == 0, "twine check --strict", told.stdout)
    return sdist, wheel


def tracked(*below: str) -> set[str]:
    """The files of this repository that are under version control, or would be."""
    listing = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", *below]
    names = subprocess.run(listing, check=True, capture_output=True, text=True).stdout.splitlines()
    return {name for name in names if (ROOT / name).is_file()}


def contents(report: Report, sdist: Path, wheel: Path) -> str:
    """Whether all is in there, and nothing else; returns the version."""
    version = wheel.name.split("-")[1]
    inside = set(zipfile.ZipFile(wheel).namelist())
    info = f"fednh-{version}.dist-info"
    wanted = {name.removeprefix("src/") for name in tracked("src/fednh")}
    wanted |= {f"{info}/licenses/LICENSE", f"{info}/licenses/NOTICE"}
    report.check(wanted <= inside, f"the wheel has all {len(wanted)} files", f"missing: {sorted(wanted - inside)}")
    marks = {"fednh/py.typed", *(f"fednh/{part}" for part in ("config/presets/digits.toml", "report/web"))}
    missing = [mark for mark in marks if not any(name.startswith(mark) for name in inside)]
    report.check(not missing, "presets, report assets and the type marker are in the wheel", f"missing: {missing}")
    strange = {name for name in inside - wanted if not name.startswith(f"{info}/")}
    report.check(not strange, "the wheel has nothing else", f"strange: {sorted(strange)}")
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    needed = tracked("src", "tests", "docs") | {"README.md", "LICENSE", "NOTICE", "pyproject.toml", "constraints.txt"}
    report.check(needed <= packed, "the sdist has source, tests and documents", f"missing: {sorted(needed - packed)}")
    return version


def metadata(wheel: Path) -> str:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    return archive.read(name).decode()


def index_page(wheel: Path) -> str:
    """The README as the wheel carries it, which is what a package index shows."""
    return str(Parser().parsestr(metadata(wheel)).get_payload())


def links(report: Report, wheel: Path) -> None:
    """No link of the index page is relative; those into the repository lead to files that are there."""
    text = re.sub(r"^```.*?^```$", "", index_page(wheel), flags=re.MULTILINE | re.DOTALL)
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)]*)\)", text)]
    relative = [target for target in targets if not target.startswith("https://")]
    report.check(not relative, "no link of the index page is relative", f"relative: {relative}")
    if repository := os.environ.get("FEDNH_REPOSITORY"):
        inside = [target.removeprefix(repository).split("/", 3)[3] for target in targets if repository in target]
        dead = sorted(set(inside) - tracked())
        report.check(bool(inside) and not dead, f"{len(inside)} links lead into the repository", f"dead: {dead}")


def readme_commands(wheel: Path) -> Iterator[str]:
    """The commands that the index page shows for a first run and for data of one's own."""
    text = index_page(wheel)
    for title in ("A first run of your own", "Your own data"):
        section = text.partition(f"## {title}\n")[2].partition("\n## ")[0]
        for line in "\n".join(re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL)).splitlines():
            if line.startswith("fednh "):
                yield line.partition("#")[0].removeprefix("fednh ").strip()


def extra_of(command: str) -> str | None:
    """The extra that a command of the README needs."""
    return {"report": "report", "figure": "report", "export": "onnx", "federation": "flower"}.get(command.split()[0])


def refused(report: Report, place: Place, needs: list[tuple[str, str]]) -> None:
    """Each command, beside the extra that it needs and that is not there."""
    ends = place.each_fednh([command for command, _ in needs])
    for (command, extra), (code, errors) in zip(needs, ends, strict=True):
        last = errors.strip().rpartition("\n")[2]  # notices about the data may come first
        ok = code == 2 and f"pip install 'fednh[{extra}]'" in last and "Traceback" not in errors
        report.check(ok, f"{place.name}: {command}: says that it needs {extra}", f"{code}: {errors[-500:]}")


def works(report: Report, place: Place, command: str) -> None:
    began = time.monotonic()
    ended = place.fednh(command)
    took = f"{time.monotonic() - began:.0f} s"
    report.check(ended.returncode == 0, f"{place.name}: fednh {command} ({took})", ended.stderr[-800:])


def program_works(report: Report, place: Place) -> None:
    if place.name in PROGRAMS:
        ended = place.execute(PROGRAMS[place.name])
        report.check(ended.returncode == 0, f"{place.name}: its program in Python", ended.stderr[-800:])


def lacking(place: Place) -> list[str]:
    """The extras that are not there: one may bring the packages of another."""
    told = place.run(str(place.python), "-c", "from fednh import extras as e; print(*filter(e.installed, e.MODULES))")
    return [extra for extra in EXTRAS if extra not in told.stdout.split()]


def base(report: Report, place: Place, wheel: Path, version: str) -> None:
    """Base dependencies alone: the README's commands, Python, and every refusal."""
    place.install(str(wheel))
    where = place.run(str(place.python), "-c", "import fednh; print(fednh.__file__)").stdout
    report.check(str(place.env) in where, "the package that runs is the installed one", where)
    for words in (["fednh"], [str(place.python), "-m", "fednh"]):
        told = place.run(*words, "--version").stdout.strip()
        report.check(told == f"fednh {version}", f"{Path(words[0]).name} {' '.join(words[1:])} --version: {told}")
    prepared = place.execute(PREPARE["base"])
    report.check(prepared.returncode == 0, "base: data for the commands are there", prepared.stderr)
    for command in readme_commands(wheel):
        if extra := extra_of(command):
            refused(report, place, [(command, extra)])
        else:
            works(report, place, command)
    program_works(report, place)
    works(report, place, "federation init fed --sites 2")
    works(report, place, "notebooks notebooks")
    there = lacking(place)
    report.check(there == EXTRAS, "base: no extra is there", f"lacking: {there}")
    commands = {extra: (*NEEDS[extra], *REFUSED_ONLY.get(extra, ())) for extra in EXTRAS}
    refused(report, place, [(command, extra) for extra in EXTRAS for command in commands[extra]])


def fits(place: Place, extra: str) -> bool:
    """Whether what the extra brings can be imported beside this torch."""
    return extra not in BUILDS or place.run(str(place.python), "-c", f"import {BUILDS[extra]}").returncode == 0


def unfit(report: Report, place: Place, command: str) -> None:
    told = place.fednh(command)
    said = told.returncode == 2 and "which cannot be imported here" in told.stderr and "Traceback" not in told.stderr
    report.check(said, f"{place.name}: says that it does not fit this torch: fednh {command}", told.stderr[-500:])


def with_extra(report: Report, place: Place, wheel: Path, below: Place, extra: str) -> None:
    """One extra alone, over the base: what needs it works, what needs another one says so."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = below.env / "lib" / version / "site-packages"
    (place.env / "lib" / version / "site-packages/base.pth").write_text(f"{packages}\n")
    place.install(f"fednh[{extra}] @ {wheel.as_uri()}")
    if extra in PREPARE:
        prepared = place.execute(PREPARE[extra])
        report.check(prepared.returncode == 0, f"{extra}: data for the commands are there", prepared.stderr[-500:])
    there = lacking(place)
    report.check(extra not in there, f"{extra}: it is there")
    for command in NEEDS[extra]:
        (works if fits(place, extra) else unfit)(report, place, command)
    program_works(report, place)
    refused(report, place, [(NEEDS[other][0], other) for other in there])


def place_in(outside: Path, name: str) -> Place:
    folder = outside / "work"
    folder.mkdir(exist_ok=True)
    (outside / "home").mkdir(exist_ok=True)
    venv.create(outside / name)
    return Place(name, outside / name, folder)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tools/dist.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--extras", default=",".join(EXTRAS), metavar="A,B", help="only these, after the base")
    asked = [extra for extra in parser.parse_args().extras.split(",") if extra]
    report = Report()
    untold = [extra for extra in EXTRAS if extra not in NEEDS]
    report.check(not untold, "every extra has a command that needs it", f"add them to NEEDS: {untold}")
    sdist, wheel = build(report)
    version = contents(report, sdist, wheel)
    links(report, wheel)
    with TemporaryDirectory(prefix="fednh-dist-") as outside:
        first = place_in(Path(outside), "base")
        base(report, first, wheel, version)
        for extra in asked:
            with_extra(report, place_in(Path(outside), extra), wheel, first, extra)
    for what in report.failed:
        print(f"FAIL {what}")
    print(f"{report.passed} passed, {len(report.failed)} failed")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
