"""METHODS: every method by name. The command line's choices, the docs and the parametrised tests derive from it."""

from __future__ import annotations

from fednh.methods.afl import AFL
from fednh.methods.base import Method
from fednh.methods.creff import CReFF
from fednh.methods.ditto import Ditto
from fednh.methods.fedala import FedALA
from fednh.methods.fedas import FedAS
from fednh.methods.fedavg import FedAvg
from fednh.methods.fedbabu import FedBABU
from fednh.methods.fedbn import FedBN
from fednh.methods.fedcgs import FedCGS
from fednh.methods.fedcof import FedCOF
from fednh.methods.fedcp import FedCP
from fednh.methods.feddbe import FedDBE
from fednh.methods.feddyn import FedDyn
from fednh.methods.fedetf import FedETF
from fednh.methods.fedgela import FedGELA
from fednh.methods.fedlc import FedLC
from fednh.methods.fedloge import FedLoGe
from fednh.methods.fedncm import FedNCM
from fednh.methods.fednh import FedNH
from fednh.methods.fedpac import FedPAC
from fednh.methods.fedper import FedPer
from fednh.methods.fedprior import FedPrior
from fednh.methods.fedproto import FedProto
from fednh.methods.fedprox import FedProx
from fednh.methods.fedrep import FedRep
from fednh.methods.fedrod import FedROD
from fednh.methods.fedtgp import FedTGP
from fednh.methods.feduh import FedUH
from fednh.methods.feduv import FedUV
from fednh.methods.fedvls import FedVLS
from fednh.methods.floco import Floco
from fednh.methods.gpfl import GPFL
from fednh.methods.lgfedavg import LGFedAvg
from fednh.methods.local import Local
from fednh.methods.moon import MOON
from fednh.methods.mrmtl import MRMTL
from fednh.methods.pfedfda import PFedFDA
from fednh.methods.scaffold import Scaffold

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
    "fedprox": FedProx,
    "scaffold": Scaffold,
    "fedbn": FedBN,
    "fedetf": FedETF,
    "fedlc": FedLC,
    "fedprior": FedPrior,
    "feddbe": FedDBE,
    "fedala": FedALA,
    "fedgela": FedGELA,
    "fedpac": FedPAC,
    "fedloge": FedLoGe,
    "pfedfda": PFedFDA,
    "fedvls": FedVLS,
    "fedncm": FedNCM,
    "afl": AFL,
    "fedcof": FedCOF,
    "fedcgs": FedCGS,
    "lgfedavg": LGFedAvg,
    "fedtgp": FedTGP,
    "moon": MOON,
    "feddyn": FedDyn,
    "mrmtl": MRMTL,
    "feduv": FedUV,
    "fedcp": FedCP,
    "gpfl": GPFL,
    "fedas": FedAS,
    "floco": Floco,
}

__all__ = ["METHODS", "Method"]
