"""The server itself is hostile, with a good signature: it asks a site for more than its site.toml allows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, MetricRecord

from fednh.config import dump
from fednh.errors import Refused, UserError
from fednh.flower.deploy.scaffold import site_toml
from fednh.flower.protocol import Order
from fednh.flower.site_config import METRICS, Allow, Policy, read_policy
from fednh.methods import METHODS
from tests.helpers.hostile import Scene, config_of, everything, problem, question

SECRET = "Zaphod"  # it is everywhere in the site's table but in its name
TABLE = "\n".join(
    ["patient,age,sex,diagnosis", *(f"{SECRET} {n},{n},{'mf'[n % 2]},{('ill', 'well')[n % 2]}" for n in range(30))]
)
COLUMNS = {"data.columns": {"age": "number", "sex": ["f", "m"]}, "data.classes": ["ill", "well"]}


@pytest.fixture
def table(tmp_path: Path) -> Scene:
    """A site whose owner allows two columns of its table, and says which one is the label."""
    (tmp_path / "t.csv").write_text(TABLE)
    return Scene(tmp_path, data=f"csv:{tmp_path}/t.csv", label="diagnosis", columns="age, sex")


def with_line(config: str, section: str, line: str) -> str:
    assert f"\n[{section}]\n" in config
    return config.replace(f"\n[{section}]\n", f"\n[{section}]\n{line}\n")


# --- what may be read ------------------------------------------------------------------------------------------------


def test_what_the_owner_allows_is_read(table: Scene) -> None:
    assert table.asked(config_of(**COLUMNS)) == ""


ASKED: dict[str, tuple[dict[str, Any], str]] = {
    "another column": ({"data.columns": {"patient": [f"{SECRET} 1"]}}, "'patient', which may not be read"),
    "no columns": ({}, "data.columns must name the columns"),
    "values that are not there": ({**COLUMNS, "data.classes": ["other", "well"]}, "own log says why"),
    "a number that is none": ({**COLUMNS, "data.columns": {"sex": "number"}}, "own log says why"),
    "few classes": ({**COLUMNS, "data.classes": ["well", "good"]}, "own log says why"),
    "too few samples": ({**COLUMNS, "partition.min_samples": 1000}, "own log says why"),
}


@pytest.mark.parametrize("case", ASKED)
def test_nothing_else_is_read_and_no_word_of_it_is_quoted(case: str, table: Scene) -> None:
    settings, words = ASKED[case]
    reply = table.deliver(table.signed(question(dump(config_of(**settings)))))
    assert words in problem(reply)
    told = everything(reply)
    for secret in (SECRET, "patient,", "diagnosis", str(table.folder), "'ill'", "'m'"):
        assert secret not in told.replace("names 'patient'", "")


def test_the_label_is_the_sites_to_say(table: Scene) -> None:
    """With data.label = "patient" every name was a class name. Where site.toml says a label, it is that one."""
    reply = table.deliver(table.signed(question(dump(config_of(**COLUMNS, **{"data.label": "patient"})))))
    assert problem(reply) == ""
    assert SECRET not in everything(reply)
    del table.nodes[11]["label"]
    said = table.asked(config_of(**COLUMNS, **{"data.label": "patient"}))
    assert said == "refused: data.label = 'patient': which column that is, this site's site.toml says (label =)"
    assert table.asked(config_of(**COLUMNS, **{"data.site": "patient"})).startswith("refused: data.site = 'patient'")


def test_columns_need_the_owners_word(table: Scene) -> None:
    del table.nodes[11]["columns"]
    assert "site.toml does not say which columns may be read" in table.asked(config_of(**COLUMNS))


@pytest.mark.parametrize("broken", [f'"{SECRET}', f"{SECRET}\n{SECRET},1,2", f"{SECRET}\x00,\xff"])
def test_an_unreadable_table_is_not_quoted(broken: str, table: Scene, caplog: pytest.LogCaptureFixture) -> None:
    (table.folder / "t.csv").write_bytes(TABLE.encode() + b"\n" + broken.encode("latin-1"))
    reply = table.deliver(table.signed(question(dump(config_of(**COLUMNS)))))
    assert "own log says why" in problem(reply)
    assert SECRET not in everything(reply)
    assert "t.csv" in caplog.text, "the owner is told"


@pytest.mark.parametrize(
    "source", ["csv:/etc/passwd", "npz:/etc/passwd", "py:os:getcwd", "folder:/etc", "hf:x", "/etc"]
)
def test_a_site_with_a_part_of_a_public_set_reads_nothing_else(source: str, tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    plain = dump(config_of())
    reply = scene.deliver(scene.signed(question(plain.replace('name = "digits"', f'name = "{source}"'))))
    assert "is not read here" in problem(reply)
    assert "root" not in everything(reply)


def test_the_public_set_may_be_fixed(tmp_path: Path) -> None:
    scene = Scene(tmp_path, set="digits")
    assert scene.asked(config_of()) == ""
    said = scene.asked(dump(config_of()).replace('name = "digits"', 'name = "spiral"'))
    assert said == "refused: data.name = 'spiral' is not read here; this site has a part of digits"


def test_nobody_learns_which_files_there_are(tmp_path: Path) -> None:
    """model.weights told whether a file exists, data.dir and federation.folder named folders."""
    (tmp_path / "there").write_text("x")
    scene, plain = Scene(tmp_path), dump(config_of())
    said = {scene.asked(with_line(plain, "model", f'weights = "{tmp_path}/{n}"')) for n in ("there", "missing")}
    assert said == {"refused: model.weights: this site starts from no file; its site.toml names none (weights =)"}
    for section, line in (("data", 'dir = "/root"'), ("federation", 'folder = "/root"\ntest = "csv:/etc/passwd"')):
        assert scene.asked(with_line(plain, section, line)) == ""


def test_paths_of_the_server_stay_there() -> None:
    applied = Policy().applied(
        {"data": {"name": "digits", "dir": "/x"}, "federation": {"folder": "/x", "test": "/x", "key": "/x"}}, None
    )
    assert "/x" not in str(applied)


def test_only_a_part_of_a_public_set_is_merged_with_its_test_samples() -> None:
    """A site's own test part stays a test part, whatever the server says."""
    asked = {"data": {"name": "digits", "merge_test": True}}
    assert Policy().applied(asked, None)["data"] == {"name": "digits", "merge_test": True}
    assert "merge_test" not in Policy().applied(asked, "npz:/own.npz")["data"]


def test_weights_of_the_sites_own(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from fednh.federated.setup import build_federation
    from fednh.seeding import torch_rng

    config = config_of()
    save_file(build_federation(config).net.init(torch_rng(1, "other")), tmp_path / "w.safetensors")
    scene = Scene(tmp_path, weights=str(tmp_path / "w.safetensors"))
    assert scene.asked(with_line(dump(config), "model", 'weights = "pretrained"')) == ""


# --- what may be run -------------------------------------------------------------------------------------------------

EVIL = "from pathlib import Path\nPath('harm').touch()\n"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('name = "mlp"', 'name = "evil_module:Net"'),
        ('name = "mlp"', 'name = "subprocess:Popen"'),
        ('name = "fedavg"', 'name = "evil_module:Method"'),
        ('name = "mlp"', "name = 3"),
        ('name = "fedavg"', "name = [1]"),
    ],
)
def test_nothing_is_imported_that_is_not_listed(
    old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil_module.py").write_text(EVIL)
    monkeypatch.chdir(tmp_path)
    said = Scene(tmp_path).asked(dump(config_of()).replace(old, new))
    assert "is not allowed at this site" in said
    assert "evil_module" not in sys.modules
    assert not (tmp_path / "harm").exists()


def test_what_is_listed_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "listed_nets.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, num_classes, hidden=()):\n"
        "        super().__init__()\n"
        "        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU())\n"
        "        self.head = nn.Linear(8, num_classes)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    scene = Scene(tmp_path, **{"allow.models": "mlp, listed_nets:Net", "allow.methods": "fedavg"})
    assert scene.asked(dump(config_of()).replace('name = "mlp"', 'name = "listed_nets:Net"')) == ""
    assert "method.name = 'fednh' is not allowed" in scene.asked(config_of(**{"method.name": "fednh"}))
    assert "model.name = 'conv2' is not allowed" in scene.asked(dump(config_of()).replace('"mlp"', '"conv2"'))


def test_built_in_methods_are_allowed_unless_listed() -> None:
    for method in METHODS:
        Policy().applied({"method": {"name": method}}, None)
        with pytest.raises(Refused, match="is not allowed"):
            Policy(allow=Allow(methods=("other",))).applied({"method": {"name": method}}, None)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rounds": 11}, "rounds = 11 is more than the 10"),
        ({"train.epochs": 4}, "train.epochs = 4 is more than the 3"),
        ({"method.name": "fedrep", "method.head_epochs": 4}, "method.head_epochs = 4 is more than the 3"),
        ({"federation.name": "other"}, "federation.name = 'other' is not the federation of this site"),
        ({"federation.min_clients": 1}, "federation.min_clients = 1, and this site takes part only with 2"),
    ],
)
def test_limits_of_a_config(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    rules = {"allow.rounds": 10, "allow.epochs": 3, "allow.sites": 2, "federation": "fednh"}
    scene = Scene(tmp_path, **rules)
    assert scene.asked(config_of()) == ""
    assert words in scene.asked(config_of(**settings))


def test_creff_trains_at_the_server() -> None:
    toml = '[method]\nname = "creff"\nretrain_epochs = 300\n[train]\nepochs = 5\n'
    assert Policy(allow=Allow(epochs=10)).config(toml, None).method["retrain_epochs"] == 300


def test_rounds_are_counted_whatever_the_server_calls_them(tmp_path: Path) -> None:
    scene, config = Scene(tmp_path, **{"allow.rounds": 2}), config_of()
    assert [problem(scene.ordered(config, Order(client=client, round=1))) for client in (0, 1)] == ["", ""]
    said = problem(scene.ordered(config, Order(client=2, round=1)))
    assert "has trained 2 rounds, and its site.toml allows no more" in said
    assert problem(scene.ordered(config, Order(client=0, evaluate=2, last=1))) == "", "evaluating goes on"
    assert "round 3 is beyond the 2" in problem(scene.ordered(config, Order(client=0, evaluate=3)))


def test_a_site_does_not_train_alone(tmp_path: Path) -> None:
    """Alone, the average is its own upload."""
    scene, config = Scene(tmp_path, **{"allow.sites": 2}), config_of()
    said = problem(scene.ordered(config, Order(client=0, round=1, sites=1)))
    assert said == "refused: the round has 1 sites, and this site trains only with 2 or more"
    assert problem(scene.ordered(config, Order(client=0, round=1, sites=2))) == ""


# --- what may leave --------------------------------------------------------------------------------------------------


def test_only_metrics_that_are_listed_leave(tmp_path: Path) -> None:
    order, config = Order(client=0, round=2, evaluate=1, last=0), config_of(**{"diagnostics.gradient_norm": True})
    seen = []
    for allowed in (None, "pm_l", ""):
        rule = {} if allowed is None else {"allow.metrics": allowed}
        reply = Scene(tmp_path / str(allowed), **rule).ordered(config, order)
        assert problem(reply) == ""
        seen.append({n: set(r) for n, r in reply.content.items() if isinstance(r, MetricRecord)})
    who = {"client", "round"}
    everywhere = {"facts": {*who, "samples", "loss_sum", "gradient_norm"}}
    assert seen == [
        {**everywhere, "figures": {"samples", "pm_v", "pm_l", "per_class"}},
        {"facts": who, "figures": {"pm_l"}},
        {"facts": who},
    ]


def test_a_federation_trains_without_the_metrics_of_one_site(tmp_path: Path) -> None:
    """The server can do without them; the loss is that of the site that tells it."""
    import json

    from tests.helpers.federation import serve

    scene = Scene(tmp_path, **{"allow.metrics": ""})
    config = config_of(**{"participation.rate": 1.0, "eval.every": 1})
    watcher = serve(config, scene.wire, tmp_path / "run", identity=scene.server)
    assert [row["clients"] for row in watcher.records] == [[0, 1], [0, 1]]
    facts = [
        reply.content["facts"] for request, reply in scene.wire.seen if reply is not None and "facts" in reply.content
    ]
    assert [set(row) for row in facts if row["client"] == 0] == [{"client", "round"}] * 3  # type: ignore[index]
    told = next(row for row in facts if row["client"] == 1 and row["round"] == 1)  # type: ignore[index]
    assert watcher.records[0]["train_loss"] == told["loss_sum"] / told["samples"]  # type: ignore[index, operator]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [row["client"] for row in summary["clients"] if row["pm_l"] is not None] == [1]


# --- site.toml itself ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({"allow.rounds": 0}, "allow.rounds is 0, not a whole number of 1 or more"),
        ({"allow.epochs": True}, "allow.epochs is True, not a whole number of 1 or more"),
        ({"allow.sites": "3"}, "allow.sites is '3', not a whole number of 1 or more"),
        ({"allow.methods": 3}, "allow.methods is 3, not a text"),
        ({"allow.samples": 0}, "allow.samples is 0, not a whole number of 1 or more"),
        ({"allow.parameters": "10"}, "allow.parameters is '10', not a whole number of 1 or more"),
        ({"allow.counts": "no"}, "allow.counts is 'no', not true or false"),
        ({"allow.metrics": "loss, accuracy"}, "allow.metrics has 'accuracy'; metrics are samples, loss"),
        ({"allow.privacy": "dp"}, "allow.privacy is 'dp', not one of none, sample"),
    ],
)
def test_rules_that_cannot_hold_are_refused(node: dict[str, Any], words: str, tmp_path: Path) -> None:
    """A rule that nobody enforces would be worse than none: the site does nothing until it is corrected."""
    with pytest.raises(UserError, match=words):
        read_policy(node)
    assert Scene(tmp_path, **node).asked(config_of()).startswith("UserError")


def test_a_rule_with_a_slip_of_the_pen_is_refused(tmp_path: Path) -> None:
    assert Scene(tmp_path, **{"allow.round": 3}).asked(config_of()).startswith("UserError")


@pytest.mark.parametrize("own", [True, False])
def test_a_new_sites_rules_allow_just_what_was_agreed(own: bool, tmp_path: Path) -> None:
    """The file that init writes, as Flower reads it."""
    from flwr.common.config import parse_config_args

    more = {**COLUMNS, "data.label": "diagnosis", "data.name": "own"} if own else {}
    config = config_of(**more, **{"method.name": "fedrep", "method.head_epochs": 3, "model.name": "mlp"})
    text = site_toml({"site": "a", "state": "s", **({"data": "csv:/t.csv"} if own else {})}, config)
    (tmp_path / "site.toml").write_text(text)
    rules = read_policy(parse_config_args([str(tmp_path / "site.toml")]))
    assert (rules.label, rules.columns) == (("diagnosis", ("age", "sex")) if own else (None, None))
    assert (rules.federation, rules.set) == ("fednh", None if own else "digits")
    allow = rules.allow
    assert (allow.methods, allow.models, allow.rounds, allow.epochs, allow.sites) == (("fedrep",), ("mlp",), 2, 3, 2)
    assert (allow.samples, allow.counts, allow.parameters) == (10, False, 100_000_000)
    assert set(METRICS) - set(rules.allow.metrics) == {"gradient_norm", "novelty", *(["per_class"] if own else [])}
    source = "csv:/t.csv" if own else None
    rules.config(dump(config), source)
    for key, value in (("rounds", 3), ("train.epochs", 4), ("method.name", "fedavg"), ("federation.min_clients", 1)):
        with pytest.raises(Refused):
            rules.config(dump(config_of(**{**more, "method.name": "fedrep", "model.name": "mlp", key: value})), source)


@pytest.mark.parametrize("name", METHODS)
def test_the_rules_of_a_new_site_allow_every_method_that_was_agreed(name: str, tmp_path: Path) -> None:
    from flwr.common.config import parse_config_args

    config = config_of(**{"method.name": name, "model.name": "mlp"})
    (tmp_path / "site.toml").write_text(site_toml({"site": "a", "state": "s"}, config))
    rules = read_policy(parse_config_args([str(tmp_path / "site.toml")]))
    assert rules.config(dump(config), None).method == config.method
    assert rules.allow.counts == (name == "fedpac" or METHODS[name].training_free)


def test_flower_takes_a_node_config_as_we_write_it(tmp_path: Path) -> None:
    from flwr.common.config import parse_config_args
    from flwr.common.serde import user_config_from_proto, user_config_to_proto

    file = tmp_path / "site.toml"
    file.write_text('site = "a"\n[allow]\nrounds = 3\nmethods = "fedavg, fednh"\n')
    node = user_config_from_proto(user_config_to_proto(parse_config_args([str(file)])))
    assert node == {"site": "a", "allow.rounds": 3, "allow.methods": "fedavg, fednh"}


def test_a_hostile_config_is_one_sentence(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    for toml in ("x = ", "a = " + "[" * 5000, "method = 3", "[model]\nname = 'mlp'\n[model.args]\nhidden = ['x']"):
        said = scene.asked(toml)
        assert said
        assert "Traceback" not in said
        assert len(said) < 300


def test_an_order_of_nonsense_is_one_word(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    content = question(dump(config_of()))
    content["order"] = ConfigRecord({"client": "x"})
    reply = scene.deliver(scene.signed(content, kind="train", round_=1, site="a"))
    assert problem(reply) == "ValueError; the site's own log says more"
