"""What a checkpoint of ds_hf is made of: the names of its files, and what the manifest says of each tensor.

manifest.json: for each parameter its shape, the tensor key of each state ("master" or "weight", moments), and
``fragments`` [file, start in the parameter, start in the tensor, numel]; all figures are elements, tensors are flat.
In version 2 a model-parallel run may have saved slices: ``cuts`` lists [dim, [[first index, indices], ...]], a fragment
of a slice has the number of its cut as a fifth figure, and its start counts in the flattened slice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

__all__ = [
    "FORMAT",
    "LATEST",
    "MANIFEST",
    "ORDERED_VERSION",
    "SCRIPT",
    "SLICED_VERSION",
    "VERSION",
    "SavedBuffer",
    "SavedCut",
    "SavedFragment",
    "SavedParameter",
]

FORMAT = "ds_hf checkpoint"
VERSION = 1  # of a checkpoint without slices, which the first version of ds_hf reads as well
SLICED_VERSION = 2
ORDERED_VERSION = 3  # has parameters whose dims lie in another order
MANIFEST = "manifest.json"
LATEST = "latest"
SCRIPT = "zero_to_fp32.py"


@dataclass(frozen=True)
class SavedCut:
    """A slice of a parameter: ``(first index, number of indices)`` of one dim, in the order in which they lie there."""

    dim: int
    ranges: tuple[tuple[int, int], ...]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each range begins in the slice, and last where the slice ends."""
        return (0, *itertools.accumulate(count for _, count in self.ranges))

    @property
    def length(self) -> int:
        """Indices of ``dim`` in the slice."""
        return self.starts[-1]

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Of the slice of a parameter whose shape is ``whole``."""
        return (*whole[: self.dim], self.length, *whole[self.dim + 1 :])

    def numel(self, whole: Sequence[int]) -> int:
        """Elements of the slice."""
        return math.prod(self.shape(whole))


@dataclass(frozen=True)
class SavedFragment:
    """Elements ``start`` to ``start + numel`` of a parameter: ``offset`` elements into a flat tensor of ``file``.

    With a ``cut`` they are elements of that slice, flattened.
    """

    file: str
    start: int
    offset: int
    numel: int
    cut: SavedCut | None = None


@dataclass(frozen=True)
class SavedParameter:
    """One parameter; ``states`` maps "master", "weight", "exp_avg", ... to tensor keys.

    With an ``order``, elements of fragments are counted in the parameter with its dims permuted so.
    """

    name: str
    shape: tuple[int, ...]
    trainable: bool
    states: dict[str, str]
    fragments: tuple[SavedFragment, ...]
    scalars: dict[str, Any]
    order: tuple[int, ...] = field(default=(), kw_only=True)
    dtype: str = field(default="", kw_only=True)  # of its values; formats that do not say so leave it to their tensors

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def value_state(self) -> str:
        """The state that holds the value most exactly."""
        return "master" if "master" in self.states else "weight"

    @property
    def moments(self) -> list[str]:
        """Optimizer states with one value for each element."""
        return [state for state in self.states if state not in ("master", "weight")]


@dataclass(frozen=True)
class SavedBuffer:
    """A buffer of the module, whole."""

    name: str
    shape: tuple[int, ...]
    file: str
    key: str
