"""Of ``ds-hf doctor``: whether the installed releases of torch and Hugging Face's libraries are ones that ds_hf fits.

Three questions of each: is it in the range that ds-hf declares, has it every name that ds_hf imports from it, and do
the hooks on it find what they wrap. The names are read from ds_hf's own source, so there is no list that ages, and the
answers hold for releases that come later.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.metadata
from collections.abc import Collection, Iterator
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement

import ds_hf
from ds_hf.hf import autoload

__all__ = ["declared", "installed", "lacking"]

PACKAGES = ("ds-hf", "torch", "transformers", "accelerate", "peft", "trl", "datasets", "optuna", "cuda-core")
_READ = ("torch", "transformers", "accelerate", "peft", "trl")  # whose insides ds_hf knows


def installed() -> dict[str, str]:
    """Versions of what is here."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def declared() -> dict[str, str]:
    """The versions that ds-hf asks for, also of what only its tests need (TRL, PEFT)."""
    try:
        lines = importlib.metadata.requires("ds-hf") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    needs = (Requirement(line) for line in lines)
    return {need.name: str(need.specifier) for need in needs if need.name in PACKAGES}


def lacking() -> dict[str, list[str]]:
    """What ds_hf does not find in a release, by package. Imports nearly all that ds_hf ever imports from them."""
    found: dict[str, list[str]] = {}
    for target, reason in autoload.unfit_hooks().items():
        found.setdefault(target.partition(".")[0], []).append(f"{target} ({reason})")
    for module, name in _imports(Path(ds_hf.__file__).parent):
        if not _has(module, name):
            found.setdefault(module.partition(".")[0], []).append(f"{module}.{name}")
    return found


@functools.cache
def _imports(folder: Path) -> list[tuple[str, str]]:
    """Modules and names of every ``from module import name``, but those that may fail."""
    here = [name for name in _READ if find_spec(name) is not None]
    trees = (ast.parse(path.read_bytes()) for path in folder.rglob("*.py"))
    return sorted({found for tree in trees for found in _imports_in(tree, here)})


def _imports_in(tree: ast.AST, packages: Collection[str]) -> Iterator[tuple[str, str]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr | ast.Try) or getattr(getattr(node, "test", 0), "id", "") == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in packages:
            yield from ((node.module, alias.name) for alias in node.names)
        yield from _imports_in(node, packages)


def _has(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name) or bool(importlib.import_module(f"{module}.{name}"))
    except Exception:  # whatever a library does while it is imported, ds_hf cannot have the name
        return False
