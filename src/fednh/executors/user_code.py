"""A user's own modules on other machines: their source travels, so that nothing need be copied there by hand.

What is installed (in site-packages) must be installed on every machine; what lies anywhere else, such as a method in
the current folder, is sent as text and imported from there.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType

Sources = dict[str, tuple[str, str, bool]]  # module -> its file, its text, and whether it is a package


def gather() -> Sources:
    """The modules of this process that were read from a file outside of Python's own folders and of this package."""
    found: Sources = {}
    installed = tuple(
        Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")
    )
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        origin = getattr(spec, "origin", None)
        if name.partition(".")[0] in ("fednh", "__main__") or spec is None or not str(origin).endswith(".py"):
            continue
        file = Path(str(origin))
        if not file.is_file() or any(file.resolve().is_relative_to(folder) for folder in installed):
            continue
        if "site-packages" in file.parts or "dist-packages" in file.parts:
            continue
        found[name] = str(file), file.read_text(encoding="utf-8"), spec.submodule_search_locations is not None
    return found


def install(sources: Sources) -> None:
    """Have these modules imported from their texts; those that were installed so before are replaced."""
    for finder in [finder for finder in sys.meta_path if isinstance(finder, _Finder)]:
        sys.meta_path.remove(finder)
    if sources:
        sys.meta_path.insert(0, _Finder(sources))


class _Finder(MetaPathFinder):
    def __init__(self, sources: Sources):
        self.sources = sources

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in self.sources:
            file, _, package = self.sources[name]
            return spec_from_loader(name, _Text(self.sources), origin=file, is_package=package)
        if any(other.startswith(f"{name}.") for other in self.sources):  # a folder without __init__.py
            spec = ModuleSpec(name, None, is_package=True)
            return spec
        return None


class _Text(Loader):
    def __init__(self, sources: Mapping[str, tuple[str, str, bool]]):
        self.sources = sources

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        file, text, _ = self.sources[module.__name__]
        module.__file__ = file
        exec(compile(text, file, "exec"), module.__dict__)
