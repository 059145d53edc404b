"""What the server keeps for single clients: their records, made by `Method.records`.

A record holds tensors that one client receives in place of the broadcast's tensors of the same names; whoever has none
receives the broadcast as it is. So a message has one form, whoever it is for, and costs the same. A checkpoint holds
the records in the server's file, under the clients' numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

from fednh.core.tree import Tree, prefix

Records = Mapping[int, Tree]  # client -> its record
PART = "records"  # where records lie in a checkpoint


def received(down: Tree, records: Records, client: int) -> Tree:
    """What the client receives: the broadcast, with what its record has in place of it."""
    return {**down, **records.get(client, {})}


def joined(server: Tree, records: Records) -> Tree:
    """The server's state and all records as one Tree."""
    return server | {n: v for k, record in records.items() for n, v in prefix(f"{PART}.{k}", record).items()}


def parted(state: Tree) -> tuple[Tree, dict[int, Tree]]:
    """The server's state and the records: the inverse of `joined`."""
    server: Tree = {}
    records: dict[int, Tree] = {}
    for name, value in state.items():
        part, _, rest = name.partition(".")
        if part != PART:
            server[name] = value
            continue
        client, _, own = rest.partition(".")
        records.setdefault(int(client), {})[own] = value
    return server, records
