"""Vocabularies that a model pads: DeepSpeed's universal checkpoints hold them without the rows that fill a multiple.

Megatron-LM pads embeddings to a multiple that depends on the number of tensor-parallel processes. The rows that are
missing for this model are zeros, as in DeepSpeed, in the weights and the moments alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ds_hf.checkpoint.format import SavedCut, SavedFragment, SavedParameter
from ds_hf.checkpoint.source import MappedFiles, Source

__all__ = ["padded"]

_KEY = "padding of the vocabulary"


def padded(source: Source, shapes: Mapping[str, tuple[int, ...]]) -> Source:
    """``source`` with its vocabularies as large as ``shapes`` of the model say, where that is more."""
    names = source.manifest.extra.get("vocabulary") or ()
    found: dict[str, SavedParameter] = {}
    for name in names:
        saved, shape = source.manifest.parameters.get(name), shapes.get(name)
        if saved is None or not shape or len(shape) != len(saved.shape) or shape[1:] != saved.shape[1:]:
            continue
        if saved.shape[0] < shape[0] and isinstance(source.files, MappedFiles):
            found[name] = _padded(saved, shape, source.files)
    if not found:
        return source
    return replace(source, manifest=replace(source.manifest, parameters={**source.manifest.parameters, **found}))


class _Zeros:
    """A tensor that takes no memory until some of it is read."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self._numel, self._dtype = numel, dtype

    def get_shape(self) -> list[int]:
        return [self._numel]

    def __getitem__(self, place: slice) -> Tensor:
        start, stop, _ = place.indices(self._numel)
        return torch.zeros(max(0, stop - start), dtype=self._dtype)


def _padded(saved: SavedParameter, shape: tuple[int, ...], files: MappedFiles) -> SavedParameter:
    rows = shape[0] - saved.shape[0]
    numel, width = rows * math.prod(shape[1:]), math.prod(shape[1:])
    file = f"{_KEY} of {saved.name}"
    for key in saved.states.values():
        dtype = files.piece(saved.fragments[0].file, key).dtype if saved.fragments else torch.float32
        files.add(file, key, _Zeros(numel, dtype))
    cut = saved.fragments[0].cut if saved.fragments else None
    if cut is None:
        return replace(saved, shape=shape, fragments=(*saved.fragments, SavedFragment(file, saved.numel, 0, numel)))
    if cut.dim != 0:  # slices of columns: each lacks its part of the rows
        more, ends = [], {fragment.cut: fragment.start + fragment.numel for fragment in saved.fragments}
        for of, end in ends.items():
            assert of is not None
            more.append(SavedFragment(file, end, 0, rows * (of.numel(shape) // shape[0]), of))
        return replace(saved, shape=shape, fragments=(*saved.fragments, *more))
    last = SavedFragment(file, 0, 0, rows * width, SavedCut(0, ((saved.shape[0], rows),)))
    return replace(saved, shape=shape, fragments=(*saved.fragments, last))
