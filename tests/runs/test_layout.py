"""The layouts of run folders, federations' folders and sites' folders are decided in one file each."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from fednh.flower.layout import FederationFolder, SiteFolder, StateFolder
from fednh.runs.layout import CheckpointLayout, RunLayout, client_state

SOURCE = Path(__file__).parents[2] / "src/fednh"
OWNERS = {SOURCE / "runs/layout.py", SOURCE / "flower/layout.py"}


def names() -> set[str]:
    """Every name that a layout gives to a file or a folder."""
    calls = (node for owner in OWNERS for node in ast.walk(ast.parse(owner.read_text())) if isinstance(node, ast.Call))
    words = [call.args[0] for call in calls if getattr(call.func, "id", "") == "Inside"]
    return {part for word in words if isinstance(word, ast.Constant) for part in Path(str(word.value)).parts}


def spelled(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The texts of a module that are no sentences; those that are joined to a path begin with a slash."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            yield node.lineno, node.value
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and isinstance(node.right, ast.Constant):
            yield node.lineno, f"/{node.right.value}"


def test_nobody_else_spells_a_name_of_a_layout() -> None:
    known = names()
    assert {"config.toml", "summary.json", ".lock", "site.toml", "orders.pub", "models", "key", "ca.crt"} <= known
    files = "|".join(re.escape(name) for name in sorted(known) if "." in name[1:])
    anywhere = re.compile(rf"(^|[/*])({files}|client-\*.*|.*round-\*.*)$|[a-z]\.round-")
    wrong = []
    for path in sorted(set(SOURCE.rglob("*.py")) - OWNERS):
        for line, text in spelled(ast.parse(path.read_text())):
            if anywhere.search(text) or set(text.split("/")[1:]) & known:
                wrong.append(f"{path.relative_to(SOURCE)}:{line}: {text}")
    assert not wrong, "\n".join(wrong)


def test_a_run_folder_is_laid_out_as_ever(tmp_path: Path) -> None:
    run = RunLayout(tmp_path)
    assert str(RunLayout.summary_file) == "summary.json"
    assert run.personal_model(7) == tmp_path / "models/personal/client-000007.safetensors"
    assert client_state(run.clients, 12, 3) == tmp_path / "clients/client-000012.round-000003.safetensors"
    saved = CheckpointLayout(run.checkpoints)
    assert saved.manifest(10) == tmp_path / "checkpoints/round-000010.json"
    assert saved.server_of(saved.manifest(10)) == tmp_path / "checkpoints/server.round-000010.safetensors"
    assert (run.started, run.finished, run.clients_with_models()) == (False, False, {})
    for client in (10, 2):
        run.personal_model(client).parent.mkdir(parents=True, exist_ok=True)
        run.personal_model(client).touch()
    assert list(run.clients_with_models()) == [2, 10]


def test_a_federation_and_its_sites_are_laid_out_as_ever(tmp_path: Path) -> None:
    fed = FederationFolder(tmp_path / "fed")
    assert fed.ca_key == tmp_path / "fed-authority/ca.key"
    assert fed.site("a").public_key == tmp_path / "fed/sites/a/key.pub"
    assert fed.trial_site("a").state == tmp_path / "fed/trial/a/state"
    assert FederationFolder.of_orders_key(fed.orders_key).path == fed.path
    for site in (fed.site("b"), fed.site("a"), fed.trial_site("c")):
        site.path.mkdir(parents=True)
        site.node_config.touch()
    fed.site("b").public_key.touch()
    assert [site.name for site in fed.all_sites()] == ["a", "b"]
    assert [site.name for site in fed.trial_sites()] == ["c"]
    assert [site.name for site in fed.sites_with_keys()] == ["b"]
    assert SiteFolder(tmp_path / "fed/sites/a").name == "a"


def test_what_a_site_keeps_is_laid_out_as_ever(tmp_path: Path) -> None:
    """Names that a folder cannot have get a checksum (CRC-32 of the name) behind what is left of them."""
    home = StateFolder(tmp_path)
    kept = home.kept("digits", "north")
    assert kept.state(7) == tmp_path / "digits/north/state.round-000007.safetensors"
    assert home.ledger_file == tmp_path / "ledger.jsonl"
    assert kept.answer(7, "ab") == tmp_path / "digits/north/answer.round-000007.ab.safetensors"
    assert kept.round_of(kept.answer(7, "ab")) == 7
    assert home.audit_file("../x") == tmp_path / "audit/_x-1fb8ad98.jsonl"
    kept.path.mkdir(parents=True)
    for round_ in (10, 9):
        kept.state(round_).touch()
    kept.personal_model.touch()
    assert list(kept.states()) == [9, 10]
    assert home.personal_models("digits") == [tmp_path / "digits/north/personal.safetensors"]
