"""The commands of docs/features.md, in their order."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.helpers.pictures import paint, sentence_encoder
from tests.helpers.process import fednh

PAGE = Path(__file__).parents[2] / "docs/features.md"


@pytest.mark.soak
def test_the_commands_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDNH_CACHE", str(tmp_path / "cache"))
    paint(Path("photos"), each=6)
    sentence_encoder(tmp_path / "encoder")
    rows = [f"{('goal match', 'soup salt')[i % 2]},{'ab'[i % 2]},{'ns'[i // 2 % 2]}" for i in range(48)]
    Path("notes.csv").write_text("note,topic,site\n" + "\n".join(rows) + "\n")
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    assert len(lines) == 10
    for line in lines:
        args = shlex.split(line)[1:]
        short = ["--rounds", "1", "--epochs", "1"] if args[0] == "run" else []
        ended = fednh([*args, *short], tmp_path / "out")
        assert ended.code == 0, (line, ended.stderr)
