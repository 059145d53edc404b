"""METHODS: every method by name. The command line's choices, the docs and the parametrised tests derive from it."""

from __future__ import annotations

from fednh.methods.base import Method
from fednh.methods.creff import CReFF
from fednh.methods.ditto import Ditto
from fednh.methods.fedavg import FedAvg
from fednh.methods.fedbabu import FedBABU
from fednh.methods.fednh import FedNH
from fednh.methods.fedper import FedPer
from fednh.methods.fedproto import FedProto
from fednh.methods.fedrep import FedRep
from fednh.methods.fedrod import FedROD
from fednh.methods.feduh import FedUH
from fednh.methods.local import Local

METHODS: dict[str, type[Method]] = {
    "fednh": FedNH,
    "feduh": FedUH,
    "fedavg": FedAvg,
    "local": Local,
    "fedper": FedPer,
    "fedrep": FedRep,
    "fedbabu": FedBABU,
    "ditto": Ditto,
    "fedproto": FedProto,
    "fedrod": FedROD,
    "creff": CReFF,
}

__all__ = ["METHODS", "Method"]
