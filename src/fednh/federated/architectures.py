"""Networks that differ by client: the server's state then holds what each architecture has of its own.

A method is written for one network (methods/base.py). It says in `by_architecture` which names of the server's state
belong to a network (FedNH: body and scale); all others are shared by clients of every architecture (prototypes). The
server's state has the first under the architecture's name, "cnn/body.conv1.weight", and the others as they are. A hook
is given a view of it: what is shared, and what is of one architecture, by plain names. So hooks need not know:

    init         each architecture's view by itself; what is shared starts as the first one's
    broadcast    of each view; a client receives that of its own architecture
    aggregate    each view whose clients uploaded something of it, with the mean over these clients of what is its own
                 and the mean over all clients of what is shared; an architecture without an upload stays as it is

After `aggregate` all views must agree on what is shared, to the bit: a method that breaks this is stopped.

Where all clients have one network, every function here is the method's own hook.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fednh.errors import ConfigError, RunError
from fednh.federated import checks
from fednh.federated.aggregate import Accumulator, accumulator
from fednh.federated.checks import TensorSpecs
from fednh.methods import Method
from fednh.methods.fit import is_frozen
from fednh.models import Net
from fednh.seeding import torch_rng
from fednh.tree import Tree, Uploads, canonical, has_prefix, size

MARK = "/"  # between an architecture's name and that of its tensor


def initial_state(method: Method, net: Net, seed: int, device: str = "cpu") -> Tree:
    """The server's state before the first round with one network; anyone who has the config can compute it."""
    initial = method.init(net, torch_rng(seed, "init"))
    return {name: value.to(device) for name, value in canonical(initial).items()}


@dataclass(frozen=True)
class Architectures:
    """A run's networks by name, and the method's hooks for a server that works with clients of all of them."""

    method: Method
    nets: Mapping[str, Net]

    @property
    def several(self) -> bool:
        return len(self.nets) > 1

    @property
    def net(self) -> Net:
        """The only network, or the first: classes, features and samples are alike for all."""
        return next(iter(self.nets.values()))

    # --- names -------------------------------------------------------------------------------------------------

    def view(self, tree: Tree, name: str) -> Tree:
        """The part of a tree that is shared or of this architecture, by the names that hooks know."""
        if not self.several:
            return tree
        rows = ((self._owner(each), each, value) for each, value in tree.items())
        return {each.removeprefix(owner + MARK): value for owner, each, value in rows if owner in ("", name)}

    def named(self, tree: Tree, name: str) -> Tree:
        """A tree of one architecture by the server's names: the inverse of `view`."""
        if not self.several:
            return tree
        own = self.method.by_architecture or ()
        return {f"{name}{MARK}{each}" if has_prefix(each, own) else each: value for each, value in tree.items()}

    def _owner(self, tensor: str) -> str:
        """The architecture that has a tensor of the server's, empty if it is shared."""
        first, mark, _ = tensor.partition(MARK)
        return first if mark and first in self.nets else ""

    def _joined(self, trees: Mapping[str, Tree]) -> Tree:
        """Trees of single architectures as one; what is shared is the first one's."""
        whole: Tree = {}
        for name, tree in trees.items():
            whole = {**self.named(tree, name), **whole}
        return dict(sorted(whole.items()))

    # --- hooks -------------------------------------------------------------------------------------------------

    def init(self, seed: int, device: str = "cpu") -> Tree:
        """The server's state before the first round."""
        alone = {name: initial_state(self.method, net, seed, device) for name, net in self.nets.items()}
        if not self.several:
            return next(iter(alone.values()))
        self._check_shared_form(alone)
        whole = self._joined(alone)
        self._check_start(alone, whole)
        return whole

    def enroll(self, initial: Tree, name: str) -> Tree:
        return self.method.enroll(self.view(initial, name))

    def broadcast(self, server: Tree) -> Tree:
        """What travels down to all clients together; each receives its `view`."""
        if not self.several:
            return self.method.broadcast(server)
        return self._joined({name: self.method.broadcast(self.view(server, name)) for name in self.nets})

    def bytes_down(self, down: Tree, clients: Sequence[str]) -> int:
        """How much clients of these architectures receive."""
        sizes = {name: size(self.view(down, name)) for name in self.nets}
        return sum(sizes[name] for name in clients)

    def accumulator(self, rule: str, server: Tree, trim: float, reference: float = 0) -> Accumulator:
        """What averages a round's uploads, which have the server's names (`named`)."""
        if not self.several:
            return accumulator(rule, server, trim, self.method, reference)
        return _ByArchitecture(lambda: accumulator(rule, server, trim, self.method, reference), self._owner)

    def aggregate(self, server: Tree, uploads: Uploads) -> Tree:
        if not self.several:
            return self.method.aggregate(server, uploads)
        average = uploads.mean()
        here = {owner for owner in map(self._owner, average) if owner}
        took = [name for name in self.nets if name in here] or [next(iter(self.nets))]
        made = {
            name: self.method.aggregate(self.view(server, name), replace(uploads, average=self.view(average, name)))
            for name in took
        }
        self._check_agreement(made)
        return {**server, **self._joined(made)}

    def global_models(self, server: Tree) -> dict[str, Tree]:
        """The global model of each architecture; none where the method makes none."""
        models = {name: self.method.global_model(self.view(server, name)) for name in self.nets}
        return {name: model for name, model in models.items() if model is not None}

    def frozen(self, server: Tree) -> Tree:
        """The part of the server's state that no network trains."""
        return self._joined(
            {
                name: {n: v for n, v in self.view(server, name).items() if is_frozen(n, net.frozen)}
                for name, net in self.nets.items()
            }
        )

    def problem(self, server: Tree) -> str | None:
        return next(filter(None, (self.method.problem(self.view(server, name)) for name in self.nets)), None)

    # --- checks ------------------------------------------------------------------------------------------------

    def declared_uploads(self, initial: Tree) -> dict[str, TensorSpecs]:
        """What an upload of a client of each architecture looks like, by the names that hooks know."""
        return {
            name: checks.declared_upload(self.method, net, self.view(initial, name)) for name, net in self.nets.items()
        }

    def uploaded(self, declared: Mapping[str, TensorSpecs]) -> set[str]:
        """The names of all uploads, as the server has them."""
        own = self.method.by_architecture or ()
        mark = {name: f"{name}{MARK}" if self.several else "" for name in self.nets}
        return {mark[name] * has_prefix(each, own) + each for name, form in declared.items() for each in form}

    def check_uploads(self, name: str, declared: Mapping[str, TensorSpecs]) -> None:
        """Refuse a method that looks at single uploads of what only clients of one architecture have."""
        own = [
            each for form in declared.values() for each in form if has_prefix(each, self.method.by_architecture or ())
        ]
        if self.several and self.method.upload.single and own:
            raise ConfigError(
                f"method {name} compares the uploads of all clients, and {own[0]} differs by model.name; give all "
                f"clients one network"
            )

    def _check_shared_form(self, alone: Mapping[str, Tree]) -> None:
        """Refuse networks whose shared parts do not fit together."""
        own = self.method.by_architecture or ()
        forms = {
            name: checks.form_of({each: value for each, value in tree.items() if not has_prefix(each, own)})
            for name, tree in alone.items()
        }
        first, *others = forms
        for other in others:
            if problem := checks.form_problem(forms[other], forms[first]):
                raise ConfigError(
                    f"{type(self.method).__name__} shares what the networks {first} and {other} do not have in common: "
                    f"{problem}"
                )

    def _check_start(self, alone: Mapping[str, Tree], whole: Tree) -> None:
        """Refuse a method whose clients would start from something else where they know their own network alone."""
        for name, tree in alone.items():
            view, down = self.view(whole, name), self.method.broadcast(self.view(whole, name))
            told = {each: value for each, value in view.items() if each not in down}
            kept, theirs = self.method.enroll(view), self.method.enroll(tree)
            for each, value in {**told, **kept}.items():
                if not torch.equal(value, theirs[each] if each in kept else tree[each]):
                    raise ConfigError(
                        f"{type(self.method).__name__}: {each} starts as {name} has it and is shared by all networks, "
                        f"but is not sent; add it to by_architecture"
                    )

    def _check_agreement(self, made: Mapping[str, Tree]) -> None:
        """What is shared may not depend on what is one architecture's own."""
        own = self.method.by_architecture or ()
        (first, tree), *others = made.items()
        for other, its in others:
            for each, value in its.items():
                if not has_prefix(each, own) and not torch.equal(value, tree[each]):
                    raise RunError(
                        f"invariant broken by {type(self.method).__name__}: {each} is shared by all clients, and "
                        f"{first} and {other} disagree on it; add it to by_architecture"
                    )


class _ByArchitecture:
    """An accumulator each for what is shared, of all uploads, and for what is an architecture's, of its clients'."""

    rule = None  # an upload is divided here

    def __init__(self, make: Callable[[], Accumulator], owner: Callable[[str], str]):
        self.make, self.owner = make, owner
        self.parts = {"": make()}

    @property
    def count(self) -> int:
        return self.parts[""].count

    def add(self, upload: Tree, samples: int, clients: int = 1, place: int | None = None) -> None:
        split: dict[str, Tree] = {"": {}}
        for name, value in upload.items():
            split.setdefault(self.owner(name), {})[name] = value
        for owner, part in split.items():
            self.parts.setdefault(owner, self.make()).add(part, samples, clients, place)

    def uploads(self) -> Uploads:
        """The averages together; single uploads, where they are kept, have what is shared."""
        shared = self.parts[""].uploads()
        own = [part.uploads().mean() for owner, part in sorted(self.parts.items()) if owner]
        return replace(shared, average={name: value for part in (shared.mean(), *own) for name, value in part.items()})
