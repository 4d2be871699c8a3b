"""Whose ``deepspeed`` an import finds: ds_hf's stand-in, or a real DeepSpeed, which comes first on ``sys.path``.

Found by its place, without importing it: ``find_spec`` of a top-level name runs no code of the package.

``import ds_hf as deepspeed`` finds the modules of the stand-in below ``ds_hf``: the same objects, and such also where a
real DeepSpeed has the name. ``ds_hf.checkpoint`` and other rooms that are called like a module of
DeepSpeed stay what they are, and hand on what that one has besides. docs/design/names.md says how.
"""

from __future__ import annotations

import functools
import sys
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["beside_real", "name_of_deepspeed", "real_deepspeed", "spec_of_deepspeed"]

_FACTS = ("__git_branch__", "__git_hash__")  # that DeepSpeed has and ds_hf has not
_ROOMS = ("checkpoint", "compression", "inference", "launcher")  # of ds_hf, and modules that DeepSpeed always has


def real_deepspeed() -> Path | None:
    """The folder of a DeepSpeed that is not ds_hf's stand-in, if that is what ``import deepspeed`` would find."""
    try:
        spec = find_spec("deepspeed")
    except ValueError:  # a module without a spec was put there
        return None
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).resolve().parent
    ours = Path(__file__).resolve().parent / "compat"
    return None if folder.is_relative_to(ours) else folder


def beside_real() -> str:
    """One line for who installed ds_hf where a real DeepSpeed is; empty where there is none."""
    folder = real_deepspeed()
    if folder is None:
        return ""
    fix = "`pip uninstall deepspeed` and a reinstall of ds-hf hand the name over"
    return f"the real DeepSpeed at {folder} still serves the name deepspeed, and ds_hf does not; {fix}"


def _folder() -> Path:
    """Of the stand-in."""
    return Path(__file__).resolve().parent / "compat" / "deepspeed"


@functools.cache
def _home() -> str:
    """The name under which this process has the stand-in."""
    ours = _folder() / "__init__.py"
    loaded = sys.modules.get("deepspeed")
    try:
        spec = loaded.__spec__ if loaded is not None else find_spec("deepspeed")
    except ValueError:
        spec = None
    found = spec is not None and spec.origin is not None and Path(spec.origin).resolve() == ours
    return "deepspeed" if found else "ds_hf.compat.deepspeed"


def name_of_deepspeed(module: str, name: str) -> Any:
    """``name`` of the stand-in's module that is called like ``module`` of ds_hf, which has no such name itself.

    Raises:
        AttributeError: that one has none either; or it is a module of ds_hf, which has to be imported.
    """
    own = sys.modules[module]
    if name.startswith("_") and name not in _FACTS:
        raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name, obj=own)
    if hasattr(own, "__path__") and PathFinder.find_spec(f"{module}.{name}", own.__path__) is not None:
        if module == "ds_hf" and name in _ROOMS:
            return import_module(f"{module}.{name}")
        raise AttributeError(f"module {module!r} has no attribute {name!r} before it is imported", name=name, obj=own)
    return getattr(import_module(_home() + module.removeprefix("ds_hf")), name)


def spec_of_deepspeed(name: str) -> ModuleSpec | None:
    """How to import ``name``, below ``ds_hf``, as a second name of a module of the stand-in, if there is such a one.

    Raises:
        ModuleNotFoundError: DeepSpeed has it and the stand-in has not.
    """
    if name.startswith("ds_hf.compat."):
        return None
    parent, _, last = name.rpartition(".")
    of_parent = sys.modules[parent].__name__
    home = of_parent if of_parent != parent else _home() + parent.removeprefix("ds_hf")
    # By its file, if it has one: Python holds its lock of all imports here, which another thread's import may wait for.
    by_file = PathFinder.find_spec(f"{home}.{last}", [str(_folder().joinpath(*home.removeprefix(_home()).split(".")))])
    if by_file is not None and by_file.loader is not None:
        return ModuleSpec(name, _SecondName(by_file.name), origin=by_file.origin)
    there = vars(import_module(home)).get(last)  # deepspeed.zero is an attribute, and no module of that name
    found = there.__spec__ if isinstance(there, ModuleType) else find_spec(f"{home}.{last}")
    return None if found is None else ModuleSpec(name, _SecondName(found.name), origin=found.origin)


class _SecondName(Loader):
    """Loads a module under a second name: the same object."""

    def __init__(self, first: str) -> None:
        self.first = first

    def create_module(self, spec: ModuleSpec) -> None:
        """Python's own, which is replaced below."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the module in place of the new, empty one: Python returns what is there."""
        sys.modules[module.__name__] = import_module(self.first)

    def get_code(self, name: str) -> Any:
        """For ``python -m``, as of the module itself."""
        spec = find_spec(self.first)
        return None if spec is None else spec.loader.get_code(self.first)  # type: ignore[union-attr]
