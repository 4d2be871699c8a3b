"""Errors that ds_hf raises for its users.

Everything derives from ``DsHfError``. That is also an ``AssertionError``, because DeepSpeed asserts where it is used
wrongly, and ``ConfigError``, ``CheckpointPlaceError`` and ``LossError`` also a ``ValueError``: code that catches those
keeps working.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ds_hf.printable import printable

__all__ = [
    "SHOWN_FAULTS",
    "CheckpointError",
    "CheckpointPlaceError",
    "ConfigError",
    "DivergenceError",
    "DsHfError",
    "Fault",
    "LossError",
    "LossScaleError",
    "NonFiniteError",
    "OffloadError",
]


# Of a configuration with more faults than these, which is some other kind of file, the rest is counted.
SHOWN_FAULTS = 20


class DsHfError(RuntimeError, AssertionError):
    """Base of all errors raised on purpose by ds_hf; what they quote of files cannot steer a terminal."""

    def __str__(self) -> str:
        return printable(super().__str__())


@dataclass(frozen=True)
class Fault:
    """One thing wrong in a configuration.

    Attributes:
        pointer: JSON pointer (RFC 6901) of the value, ``""`` for the whole file.
        message: what is wrong.
        fix: what to do about it, as an instruction; may be empty.
        line: 1-based line in the source text, when there is a source text.
    """

    pointer: str
    message: str
    fix: str = ""
    line: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", printable(self.message))
        object.__setattr__(self, "fix", printable(self.fix))

    @property
    def place(self) -> str:
        """The pointer for people: long keys in it shortened."""
        keys = [key if len(key) <= 60 else f"{key[:57]}..." for key in self.pointer.split("/")]
        return "/".join(keys if len(keys) <= 10 else [*keys[:5], "...", *keys[-4:]])

    def __str__(self) -> str:
        where = printable(self.place) or "(top level)"
        at = f" (line {self.line})" if self.line is not None else ""
        fix = f"\n      fix: {self.fix}" if self.fix else ""
        return f"{where}{at}: {self.message}{fix}"


class ConfigError(DsHfError, ValueError):
    """A configuration is wrong; lists every fault found, not only the first.

    Attributes:
        faults: all faults, in file order.
        source: file name or description of where the configuration came from.
    """

    def __init__(self, faults: Sequence[Fault] | str, source: str = "config") -> None:
        self.faults: tuple[Fault, ...] = (Fault("", faults),) if isinstance(faults, str) else tuple(faults)
        self.source = source
        count = len(self.faults)
        head = f"{source}: {count} fault{'s' if count != 1 else ''}"
        lines, last = [], ""
        for number, fault in enumerate(self.faults[:SHOWN_FAULTS], 1):
            again = len(fault.fix) > 40 and fault.fix == last
            lines.append(f"  {number}. {replace(fault, fix='as above') if again else fault}")
            last = fault.fix
        more = [f"  ... and {count - SHOWN_FAULTS} more"] if count > SHOWN_FAULTS else []
        super().__init__("\n".join([head, *lines, *more]))

    def __reduce__(
        self,
    ) -> tuple[type[ConfigError], tuple[tuple[Fault, ...], str]]:  # else the text is taken for a fault
        return type(self), (self.faults, self.source)


class CheckpointError(DsHfError):
    """A checkpoint is missing, incomplete, damaged or does not fit the model."""


class CheckpointPlaceError(CheckpointError, ValueError):
    """What was given as the folder or the tag of a checkpoint cannot be one."""


class LossError(DsHfError, ValueError):
    """What was given to ``backward`` is not one number with a graph behind it."""


class LossScaleError(DsHfError):
    """The fp16 loss scale is at its minimum and gradients still overflow (DeepSpeed key ``fp16.min_loss_scale``)."""


class NonFiniteError(DsHfError):
    """A gradient norm is infinite or NaN, and ``ds_hf.nonfinite`` is "error"; no weight was changed."""


class DivergenceError(DsHfError):
    """Ranks do not issue the same collectives; the text says where they parted and where each of them is."""


class OffloadError(DsHfError):
    """Offloaded states cannot be kept, written or read; names the file, or the memory that was asked for."""


class PipelineError(DsHfError, RuntimeError):
    """A pipeline is used in a way that it cannot be, or its stages do not agree (``deepspeed.pipe``)."""
