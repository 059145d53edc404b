"""Every use of Flower's private packages: imports, attributes, and functions of Flower that are replaced by ours.

Flower 1.41 offers none of this publicly, so a newer one may rename any of it. tests/flower/test_compat.py has a test
for each symbol. This module does not import PyTorch: SuperLink and SuperNode do without it.
"""

# ruff: noqa: F401  imported for other modules

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from flwr.app import Message, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.cli.flower_config import read_superlink_connection
from flwr.cli.install import install_from_fab
from flwr.cli.utils import init_http_client_from_connection
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode, SubStatus
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.control_pb2 import ListNodesRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    ActivateNodeResponse,
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
    PushMessagesResponse,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest, SendNodeHeartbeatResponse
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ConfirmMessageReceivedResponse,
    ObjectTree,
    PullObjectRequest,
    PullObjectResponse,
    PushObjectRequest,
    PushObjectResponse,
)
from flwr.proto.recorddict_pb2 import RecordDict as RecordDictProto
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    AcquireTaskResponse,
    PullAppMessagesRequest,
    PushTaskOutputRequest,
)
from flwr.server.superlink.linkstate import LinkState
from flwr.supercore import log
from flwr.supercore.constant import TASK_TYPE_TO_APPIO_API_ADDRESS_ARG, TASK_TYPE_TO_COMMAND, TaskType
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.inflatable.inflatable_object import get_object_head_values_from_object_content as object_head
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.state.alembic import utils as migrations
from flwr.supercore.superexec import run_superexec as superexec
from flwr.supercore.superexec.executor import SubprocessExecutor
from flwr.supercore.superexec.executor.types import ExecutionSpec, LaunchResult
from flwr.superlink.cli import flower_superlink
from flwr.superlink.grid import HttpGrid
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.supernode import start_client_internal as supernode_loop
from flwr.supernode.cli.flower_supernode import flower_supernode
from flwr.supernode.runtime import run_clientapp as clientapp

BACKOFF = 0.05  # seconds until a part that is not there yet is asked for again, doubled up to 5; Flower begins with 1

# Flower has no option for these, so they are replaced: module -> names.
REPLACED: dict[ModuleType, tuple[str, ...]] = {
    fleet_handlers: (
        "activate_node",
        "send_node_heartbeat",
        "push_messages",
        "push_object",
        "pull_messages",
        "pull_object",
        "confirm_message_received",
    ),
    migrations: ("build_alembic_config",),
    supernode_loop: ("time", "pull_objects"),
    superexec: ("RuntimeHttpClient", "get_executor"),
    clientapp: (
        "install_from_fab",
        "pull_and_inflate_object_from_tree",
        "get_load_client_app_fn",
        "push_message",
    ),
}


def replace(module: ModuleType, name: str, value: Any) -> None:
    """Replace a function of Flower in this process; raises if this Flower does not have it there."""
    if name not in REPLACED[module] or not hasattr(module, name):
        raise RuntimeError(f"this Flower has no {module.__name__}.{name}; install the version that fednh needs")
    setattr(module, name, value)


def original(module: ModuleType, name: str) -> Callable[..., Any]:
    """A function of Flower that is going to be replaced."""
    function: Callable[..., Any] = getattr(module, name)
    return function


def runtime_client(grid: HttpGrid) -> RuntimeHttpClient:
    """The connection of a ServerApp's grid to its SuperLink."""
    return grid._runtime_client


def set_message_id(message: Message, name: str) -> None:
    """Flower sets it only in messages that it has assembled itself."""
    message.metadata.__dict__["_message_id"] = name


def pack(content: RecordDict) -> bytes:
    """Records as bytes, to be stored."""
    packed: bytes = recorddict_to_proto(content).SerializeToString()
    return packed


def unpack(data: bytes) -> RecordDict:
    """The inverse of `pack`."""
    return recorddict_from_proto(RecordDictProto.FromString(data))
