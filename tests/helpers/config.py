"""Settings that several tests share."""

from __future__ import annotations

from hypothesis import strategies as st

from fednh.config import Config, load

FAST = {
    "creff": {"method.match_steps": 5, "method.retrain_epochs": 5},
    "fedetf": {"method.turns": 1, "method.turn_epochs": 1},
    "floco": {"method.tau": 1, "method.endpoints": 3},  # places from the first round on
}


def small(method: str, **more: object) -> Config:
    """Digits on five clients, of which three train in each of three rounds."""
    settings = {
        "method.name": method,
        "partition.clients": 5,
        "participation.rate": 0.6,
        "rounds": 3,
        "train.epochs": 1,
        "train.batch_size": 64,
        "model.args": {"hidden": [16]},
        "eval.every": 2,
        "workers": 1,
        **FAST.get(method, {}),
        **more,
    }
    return load("digits", settings)


BAD = {
    "method.name=fednhh": "did you mean 'fednh'",
    "method.rho=1.2": "method.rho = 1.2 should be less than 1",
    "method.rho=high": "method.rho = 'high'",
    "method.lambda=1": "method.lambda is not a hyper-parameter of fednh",
    "method.aggregation=total": "'uniform', 'count' or 'sum'",
    "method=3": "method is a value, not a section|method = 3",
    "rounds=0": "rounds = 0 should be greater than or equal to 1",
    "rounds=ten": "rounds = 'ten'",
    "rounds=1.5": "rounds = 1.5",
    "seed=-1": "seed = -1",
    "workers=-2": "workers = -2",
    "participation.rate=0": "participation.rate = 0",
    "participation.rate=1.5": "participation.rate = 1.5",
    "participation.dropout=2": "participation.dropout = 2",
    "participation.dropout=1": "participation.dropout = 1",
    "partition.name=dirichlt": "partition.name = 'dirichlt'",
    "partition.beta=0": "partition.beta = 0",
    "partition.beta=nan": "partition.beta = nan",
    "partition.beta=inf": "partition.beta = inf",
    "partition.clients=0": "partition.clients = 0",
    "train.lr=-0.1": "train.lr = -0.1",
    "train.momentum=1": "train.momentum = 1",
    "train.epochs=0": "train.epochs = 0",
    "train.batch_size=0": "train.batch_size = 0",
    "train.learning_rate=0.1": "train.learning_rate is not a setting",
    "eval.clients=0": "eval.clients = 0 should be 'active', 'all' or a number",
    "eval.clients=some": "eval.clients = 'some'",
    "eval.every=-1": "eval.every = -1",
    "checkpoint.every=-5": "checkpoint.every = -5",
    "store.memory=lots": "store.memory = 'lots' should be a number of bytes",
    "store.memory=150%": "store.memory = '150%'",
    "on_error=ignore": "on_error = 'ignore'",
    "aggregator=mode": "aggregator = 'mode'",
    "trim=0.5": "trim = 0.5",
    "rouns=3": "did you mean 'rounds'",
    "data.nam=digits": "did you mean 'data.name'",
    "data.augment=rotate": "data.augment = 'rotate'",
    "rounds.x=1": "rounds is a value, not a section",
}

leaf = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.lists(st.integers(), max_size=2)
)
keys = st.sampled_from([*Config.model_fields, "name", "every", "rho", "memory", "x"]) | st.text(max_size=6)
