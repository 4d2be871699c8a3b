"""What ds_hf lacks says so: sentences for the names and modules of DeepSpeed that are not here.

``missing(module)`` is the ``__getattr__`` that each module below ``deepspeed`` gets when it is imported, if it has none
of its own (``ExplainedModules``); ``AbsentModules`` answers for whole modules, and for names in ``from ... import``.
None of them makes a name exist: ``hasattr`` stays False and the import still fails, only with a sentence that tells
whether DeepSpeed has the name and what to take here. ``names.txt`` lists the names of DeepSpeed 0.19.8, a module a line
(``*module``: and all public names of that one).
"""

from __future__ import annotations

import difflib
import functools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import NoReturn

HELP = (
    "the name deepspeed is served by ds_hf here. Remove what uses it, or install DeepSpeed itself, which then takes "
    "the name over"
)

# What to take here instead, by the longest name that fits.
INSTEAD = {
    "deepspeed.DeepSpeedTransformerConfig": "the model of transformers as it is",
    "deepspeed.DeepSpeedTransformerLayer": "the model of transformers as it is",
    "deepspeed.autotuning": "the command `ds-hf autotune`",
    "deepspeed.elasticity.DSElasticAgent": "torchrun --nnodes MIN:MAX, or the command `deepspeed --elastic_training`",
    "deepspeed.elasticity.elastic_agent": "torchrun --nnodes MIN:MAX, or the command `deepspeed --elastic_training`",
    "deepspeed.inference": "deepspeed.init_inference, to serve many requests vLLM or transformers' generate_batch",
    "deepspeed.launcher": "the command `deepspeed` (docs/command-line.md)",
    "deepspeed.linear": "LoRA of peft",
    "deepspeed.moe": "a mixture-of-experts model of transformers",
    "deepspeed.runtime.checkpoint_engine": "TorchCheckpointEngine, or `ds_hf.checkpoint.async` for the engine's own",
    "deepspeed.runtime.zero.MiCS_Init": "deepspeed.zero.Init",
    "deepspeed.runtime.zero.mics": "deepspeed.zero.Init",
    "deepspeed.zero.MiCS_Init": "deepspeed.zero.Init",
}


def missing(module: str) -> Callable[[str], NoReturn]:
    """A ``__getattr__`` for ``module`` that explains which name ds_hf does not have."""
    # A module that calls itself a package makes ``from module import name`` ask the finder below, whose sentence
    # reaches the user; otherwise Python puts its own in place of it.
    vars(sys.modules[module]).setdefault("__path__", [])

    def __getattr__(name: str) -> NoReturn:
        raise AttributeError(_sentence(module, name), name=name, obj=sys.modules.get(module))

    return __getattr__


def explain(module: str, name: str) -> str:
    """Why there is no ``module.name``, and what there is."""
    module = module.removeprefix("ds_hf.compat.")  # where a real DeepSpeed has the name, and ds_hf is imported as one
    full = f"{module}.{name}"
    known = _deepspeed_has(module, name)
    here = _nearest(module, name, misspelt=not known)
    if not known:
        near = f"; did you mean {here}?" if here else ""
        return f"there is no {full} in DeepSpeed or in ds_hf, which serves the name deepspeed here{near}"
    instead = _instead(full)
    hint = f" Take {instead} instead." if instead else f" The nearest thing here is {here}." if here else ""
    return f"ds_hf does not provide {full} (yet), which DeepSpeed has.{hint} Note: {HELP}"


def _sentence(module: str, name: str) -> str:
    if name.startswith("__"):  # asked for by Python's own machinery, often, and never shown
        return f"module {module!r} has no attribute {name!r}"
    return explain(module, name)


@functools.cache
def _names() -> dict[str, frozenset[str]]:
    """DeepSpeed's names by module; ``*module`` stands for the public ones of that module."""
    lines = (line.partition(":") for line in Path(__file__).with_name("names.txt").read_text().splitlines())
    return {module: frozenset(names.split()) for module, _, names in lines}


def _deepspeed_has(module: str, name: str) -> bool:
    """Now, or in an earlier version whose scripts are still about (``INSTEAD``)."""
    full = f"{module}.{name}"
    return full in INSTEAD or full in _names() or _names_in(module, name, frozenset())


def _names_in(module: str, name: str, passed: frozenset[str]) -> bool:
    found = _names().get(module, frozenset())
    if name in found:
        return True
    others = {entry[1:] for entry in found if entry.startswith("*")} - passed
    return not name.startswith("_") and any(_names_in(other, name, passed | {module}) for other in others)


def _instead(full: str) -> str | None:
    while full != "deepspeed":
        if full in INSTEAD:
            return INSTEAD[full]
        full = full.rpartition(".")[0]
    return None


def _nearest(module: str, name: str, *, misspelt: bool) -> str | None:
    """The same name elsewhere; else one that differs by underscores in front and letter case, or, where there is no
    such name in DeepSpeed, by a slip: what is only called alike does something else."""
    wanted = name.strip("_").lower()
    offered = {
        key: [entry for entry in vars(found).get("__all__", vars(found)) if not entry.startswith("_")]
        for key, found in sorted(sys.modules.items())
        if found is not None and (key == "deepspeed" or key.startswith("deepspeed."))
    }
    for key, names in offered.items():
        if name in names and (not _is_module(key, name) or key.split(".")[-1] == module.split(".")[-1]):
            return vars(sys.modules[key])[name].__name__ if _is_module(key, name) else f"{key}.{name}"
    for keys, cutoff in (([module] if module in offered else [], 0.8), (list(offered), 0.9)):
        homes = {
            entry.lower(): f"{key}.{entry}"
            for key in reversed(keys)
            for entry in offered[key]
            if key == module or not _is_module(key, entry)
        }
        if close := difflib.get_close_matches(wanted, homes, n=1, cutoff=cutoff if misspelt else 1.0):
            return homes[close[0]]
    return None


def _is_module(key: str, name: str) -> bool:
    return isinstance(vars(sys.modules[key])[name], ModuleType)


class AbsentModules(MetaPathFinder):
    """Last finder on the meta path; explains imports below ``deepspeed`` that nothing else could serve."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raise the sentence for what lies below ``deepspeed``, and leave everything else alone."""
        if fullname.startswith("deepspeed.") and not fullname.endswith(".__main__"):
            module, _, name = fullname.rpartition(".")
            # With name=None the import system lets the message through; with the module's name it would replace it.
            raise ModuleNotFoundError(explain(module, name))
        return None


class ExplainedModules(MetaPathFinder):
    """First finder on the meta path, for modules below ``deepspeed``: they say which names they lack."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What Python's own finder of files finds."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname.startswith("deepspeed.") else None
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _explain_in(module.__name__)


def _explain_in(module: str) -> None:
    vars(sys.modules[module]).setdefault("__getattr__", missing(module))


def install(package: str) -> None:
    """Put the finders on the meta path, once; modules that are there explain what they lack as well."""
    if package == "deepspeed" and not any(type(finder).__name__ == AbsentModules.__name__ for finder in sys.meta_path):
        sys.meta_path.append(AbsentModules())
        sys.meta_path.insert(0, ExplainedModules())
    for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
        _explain_in(name)
