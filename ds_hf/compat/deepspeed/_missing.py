"""What ds_hf lacks says so: sentences for the names and modules of DeepSpeed that are not here.

``missing(module)`` is the ``__getattr__`` of a module; ``AbsentModules`` answers for whole modules. Neither makes a
name exist: ``hasattr`` stays False and the import still fails, only with a sentence that helps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

HELP = (
    "the name deepspeed is served by ds_hf here. Remove what uses it, or install DeepSpeed itself, which then takes "
    "the name over"
)


def missing(module: str) -> Callable[[str], NoReturn]:
    """A ``__getattr__`` for ``module`` that explains which name ds_hf does not have."""

    def __getattr__(name: str) -> NoReturn:
        raise AttributeError(
            f"ds_hf does not provide {module}.{name} (yet); {HELP}", name=name, obj=sys.modules.get(module)
        )

    return __getattr__


class AbsentModules(MetaPathFinder):
    """Last finder on the meta path; explains imports below ``deepspeed`` that nothing else could serve."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raise the sentence for what lies below ``deepspeed``, and leave everything else alone."""
        if fullname.startswith("deepspeed.") and not fullname.endswith(".__main__"):
            # With name=None the import system lets the message through; with the module's name it would replace it.
            raise ModuleNotFoundError(f"ds_hf does not provide {fullname} (yet); {HELP}")
        return None


def install() -> None:
    """Put the finder at the end of the meta path, once."""
    if not any(type(finder).__name__ == AbsentModules.__name__ for finder in sys.meta_path):
        sys.meta_path.append(AbsentModules())
