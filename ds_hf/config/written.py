"""What a user wrote, kept beside what others make of it."""

from __future__ import annotations

import copy
import os
from typing import Any

from ds_hf.config.source import read_source

__all__ = ["AsWritten", "as_written"]


class AsWritten(dict[str, Any]):
    """A configuration on its way through transformers and accelerate, which fill it in, with what the user wrote.

    A copy is one too; pickled (as in ``training_args.bin``) it is a plain dict, which needs no ds_hf to be read.

    Attributes:
        written: as the user spelt it, with each "auto". file: that it came from, absolute, or "".
    """

    written: dict[str, Any]
    file: str

    @classmethod
    def of(cls, tree: dict[str, Any], source: object) -> AsWritten:
        """``tree``, which was made of ``source``."""
        result = cls(tree)
        if isinstance(source, AsWritten):
            result.written, result.file = source.written, source.file
        else:
            found = read_source(source)
            result.written, result.file = found.tree, _file(found.name)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> AsWritten:
        result = type(self)({key: copy.deepcopy(value, memo) for key, value in self.items()})
        result.written, result.file = self.written, self.file
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def as_written(config: dict[str, Any], source: str) -> tuple[dict[str, Any], str]:
    """What the user wrote, and into which file ("": none).

    Args:
        config: of the engine. source: that it was read from, as ``Config.source`` has it.
    """
    if isinstance(config, AsWritten):
        return config.written, config.file
    file = _file(source)
    return (read_source(source).tree, file) if file else (config, "")


def _file(name: str) -> str:
    return os.path.abspath(name) if os.path.isfile(name) else ""
