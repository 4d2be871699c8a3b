"""Whole weights with linear layers in 8 or 4 bits, or with two of four values left, for transformers and vLLM to read.

The layout is ``pack-quantized`` of compressed-tensors: codes of a row packed into int32 beside one scale for each group
of its columns, symmetric around zero. The grid is the one on which torchao's ``IntxFakeQuantizeConfig`` rounds while a
model trains (``[-2^(b-1), 2^(b-1) - 1]``, the scale ``max |w| / (2^b - 1) * 2``, in the weights' dtype), so what was
trained on it is written as it was trained. Writing takes no other library, reading takes compressed-tensors.

Invariant: one weight at a time is in memory, and a stretch of its rows in 32 bits.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ds_hf.checkpoint.pretrained import Spec, floating
from ds_hf.checkpoint.source import Source, Weight
from ds_hf.errors import CheckpointError
from ds_hf.log import logger

__all__ = ["FewBits", "group_size_for", "own_grids", "pack", "plan", "round_to_bits", "trained_for", "two_of_four"]

GROUP_SIZES = (128, 64, 32)  # that vLLM's kernels have, the smallest file first
_AT_ONCE = 2**24  # elements that are rounded at a time
_PROBED = 4  # rows that tell whether a weight lies on grids


# -- numbers -----------------------------------------------------------------------------------------------------------


def round_to_bits(weight: Tensor, bits: int, group_size: int, *, keeps: bool = False) -> tuple[Tensor, Tensor]:
    """Codes and scales of the nearest values on the grid.

    Args:
        weight: ``[rows, columns]`` of a floating-point dtype.
        group_size: columns that share a scale; it divides their number.
        keeps: groups that lie on a grid of so many codes already, see ``own_grids``, keep it.

    Returns:
        codes: int8, as ``weight``.
        scales: ``[rows, columns / group_size]`` in the dtype of ``weight``; ``codes * scales`` is the value.
    """
    groups = weight.reshape(weight.shape[0], -1, group_size)
    least = torch.finfo(weight.dtype).smallest_normal
    scales = (groups.abs().amax(dim=2) / ((2**bits - 1) / 2)).clamp(min=least)
    if keeps:
        own = own_grids(weight, bits, group_size)
        scales = torch.where(own > 0, own, scales)
    codes = torch.round(groups.float() * scales.float().reciprocal().unsqueeze(2))
    codes = codes.clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return codes.to(torch.int8).flatten(1), scales


def own_grids(weight: Tensor, bits: int, group_size: int) -> Tensor:
    """Scales of groups whose values are multiples of one number already, at most ``2^(bits - 1)`` times; 0 for others.

    What another library has rounded, or ``compression_training``, is so written without loss. bf16 has too few digits
    to tell 8 bits.

    Returns:
        ``[rows, columns / group_size]`` in the dtype of ``weight``.
    """
    most, groups = 2 ** (bits - 1), weight.float().reshape(weight.shape[0], -1, group_size)
    peak = groups.abs().amax(dim=2)
    found = torch.where(peak == 0, torch.finfo(weight.dtype).smallest_normal, 0.0)  # zeros lie on any
    near = most * torch.finfo(weight.dtype).eps + 1e-4
    if near > 0.2:
        return torch.zeros_like(found, dtype=weight.dtype)
    for steps in range(most, 0, -1):
        scale = peak / steps
        multiples = groups / scale.unsqueeze(2)
        codes = multiples.round()
        lies = ((multiples - codes).abs().amax(dim=2) <= near) & (codes.amax(dim=2) < most) & (found == 0)
        found = torch.where(lies, scale, found)
    return found.to(weight.dtype)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes of a row one after another in int32, the first in the lowest bits, each plus ``2^(bits - 1)``.

    Args:
        codes: int8 ``[rows, columns]``.
        bits: 8 or 4.

    Returns:
        int32 ``[rows, ceil(columns * bits / 32)]``.
    """
    codes = functional.pad(codes, (0, -codes.shape[1] % (32 // bits)), value=-(2 ** (bits - 1)))
    parts = (codes + torch.tensor(2 ** (bits - 1)).to(torch.int8)).view(torch.uint8)  # 127 + -128 is 255 in a byte
    if bits == 4:
        parts = parts[:, ::2] | (parts[:, 1::2] << 4)
    return parts.contiguous().view(torch.int32)  # little-endian, as the files are


def two_of_four(weight: Tensor) -> Tensor:
    """``weight`` with zeros for the two smallest of every four values in a row, which is the pattern 2:4.

    Args:
        weight: ``[rows, columns]``, of which 4 divides the columns.
    """
    fours = weight.reshape(weight.shape[0], -1, 4)
    kept = fours.abs().topk(2, dim=2).indices
    return torch.zeros_like(fours).scatter_(2, kept, fours.gather(2, kept)).flatten(1)


# -- what is written ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FewBits:
    """How the weights of a checkpoint are written; see ``plan``.

    Attributes:
        bits: of linear layers: 8, 4, or ``None``, as they are.
        group_size: columns with one scale; ``None``: one scale a row.
        sparse: two of four values of the same layers are left.
        layers: names of these layers.
        ignored: names of the linear layers that stay as they are.
        others: how many they are, by reason.
    """

    bits: int | None
    group_size: int | None
    sparse: bool
    layers: frozenset[str]
    ignored: tuple[str, ...]
    trained: bool = False  # for these bits: what it was rounded to is known
    others: Mapping[str, int] = field(default_factory=dict)

    def _layer(self, weight: Weight) -> str | None:
        name = weight.name.removesuffix(".weight")
        return name if name != weight.name and name in self.layers else None

    def specs(self, weight: Weight, dtype: torch.dtype | None) -> list[Spec]:
        """What ``tensors`` is going to yield; values that are not integers are in ``dtype``."""
        own, name = floating(dtype, weight.dtype), self._layer(weight)
        if name is None or self.bits is None:
            return [Spec(weight.name, weight.shape, own)]
        rows, columns = weight.shape
        return [
            Spec(f"{name}.weight_packed", (rows, -(-columns * self.bits // 32)), torch.int32),
            Spec(f"{name}.weight_scale", (rows, columns // (self.group_size or columns)), own),
            Spec(f"{name}.weight_shape", (2,), torch.int64),
        ]

    def tensors(self, weight: Weight, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """The tensors that ``specs`` announces."""
        name, value = self._layer(weight), weight.read()
        if name is None:
            yield weight.name, value
            return
        # rounded as the model has it, whose dtype may have fewer digits than what the checkpoint keeps
        value = value.detach().to("cpu", floating(dtype, weight.dtype))
        if self.sparse:
            value = two_of_four(value)
        if self.bits is None:
            yield weight.name, value
            return
        columns = value.shape[1]
        packed, scales = [], []
        group, step = self.group_size or columns, max(1, _AT_ONCE // columns)
        keeps = not self.trained and bool((own_grids(value[:_PROBED], self.bits, group) > 0).all())
        for start in range(0, value.shape[0], step):
            codes, scale = round_to_bits(value[start : start + step], self.bits, group, keeps=keeps)
            packed.append(pack(codes, self.bits))
            scales.append(scale)
        yield f"{name}.weight_packed", torch.cat(packed)
        yield f"{name}.weight_scale", torch.cat(scales)
        yield f"{name}.weight_shape", torch.tensor(value.shape)

    @property
    def section(self) -> dict[str, Any]:
        """For ``config.json``."""
        if self.bits is None:
            return {}
        by_group = {"strategy": "group", "group_size": self.group_size}
        weights = {
            "num_bits": self.bits, "type": "int", "symmetric": True, "dynamic": False,
            **(by_group if self.group_size else {"strategy": "channel", "group_size": None}),
        }  # fmt: skip
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        section = {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": list(self.ignored), "kv_cache_scheme": None,
        }  # fmt: skip
        return {"quantization_config": section}

    @property
    def text(self) -> str:
        """What is in few bits and what is not."""
        scale = f"one scale for {self.group_size} columns" if self.group_size else "one scale a row"
        how = [f"in {self.bits} bits, {scale}"] if self.bits else []
        how += ["two of four values left"] if self.sparse else []
        others = ", ".join(f"{count} {why}" for why, count in self.others.items())
        return f"{len(self.layers)} linear layers {' and '.join(how)}" + (f"; as they were: {others}" if others else "")


class Trained(NamedTuple):
    """What weights were rounded to while they were trained; the fields are those of ``FewBits`` and of ``plan``."""

    bits: int
    group_size: int | None
    exclude: tuple[str, ...]


def trained_for(source: Source) -> Trained | None:
    """What ``ds_hf.qat`` was while the checkpoint was trained, ``None`` where it was not there."""
    features = source.common.get("features")
    kept = features.get("qat") if isinstance(features, dict) else None
    if not isinstance(kept, dict):
        return None
    bits, group, exclude = kept.get("bits"), kept.get("group_size"), kept.get("exclude")
    if not isinstance(bits, int) or not isinstance(group, int | None) or not isinstance(exclude, list):
        return None
    return Trained(bits, group, tuple(map(str, exclude)))


def group_size_for(layers: Mapping[str, tuple[int, int]], bits: int, asked: int | None) -> int | None:
    """Columns that share a scale.

    Args:
        layers: ``[rows, columns]`` of each.
        asked: by the user; 0 is a scale a row, ``None`` the largest that fits 4 bits, and a scale a row for 8.

    Returns:
        ``None`` for a scale a row.

    Raises:
        CheckpointError: it does not divide the columns of a layer.
    """
    if asked == 0 or (asked is None and bits == 8):
        return None
    fitting = [size for size in GROUP_SIZES if not any(columns % size for _, columns in layers.values())]
    if asked is None:
        if fitting:
            return fitting[0]
        name, (_, columns) = next((n, s) for n, s in layers.items() if s[1] % GROUP_SIZES[-1])
        raise CheckpointError(
            f"groups of {GROUP_SIZES[-1]} do not divide the {columns} columns of {name}: give --group-size a divisor, "
            "or 0 for one scale a row, or leave such layers out (--exclude)"
        )
    for name, (_, columns) in layers.items():
        if columns % asked:
            instead = f"{', '.join(map(str, fitting))} fit all layers" if fitting else "0 is one scale a row"
            raise CheckpointError(f"--group-size {asked} does not divide the {columns} columns of {name}: {instead}")
    return asked


def plan(
    source: Source,
    linear: Mapping[str, str],
    bits: int | None,
    *,
    group_size: int | None = None,
    sparse: bool = False,
    exclude: Collection[str] = (),
    known: Collection[str] | None = None,
) -> FewBits:
    """Which layers of ``source`` are written how.

    Args:
        linear: names of the model's linear layers, each with why it stays as it is, ``""`` if it need not.
        group_size: see ``group_size_for``.
        exclude: regular expressions; layers whose names have one stay as they are.
        known: names of the model's tensors; matrices of other names would be lost as it is loaded.

    A checkpoint that was trained for these bits (``ds_hf.qat``) brings the groups and what is left out.

    Raises:
        CheckpointError: a layer's weights are not there, or do not divide; none is left.
    """
    for pattern in exclude:
        if not any(re.search(pattern, name) for name in linear):
            some = ", ".join(list(linear)[:3])
            raise CheckpointError(f"--exclude {pattern}: it is in no linear layer's name; there are {some}, ...")
    trained = trained_for(source)
    if trained is not None and bits is not None:
        if bits == trained.bits and group_size is None:
            group_size = trained.group_size or 0
        if (bits, group_size or None) != (trained.bits, trained.group_size):
            logger.warning(
                "%s was trained to be rounded to %d bits, %s: what it has learned is not what is written",
                source.folder, trained.bits, f"groups of {trained.group_size}" if trained.group_size else "rows",
            )  # fmt: skip
        exclude = [*exclude, *trained.exclude]
    if trained is not None and sparse and "compression" not in source.common["features"]:
        logger.warning(
            "%s was trained to be rounded to %d bits with all of its values, and half of them are left out: train with "
            "compression_training.sparse_pruning too, or write it without --sparse", source.folder, trained.bits,
        )  # fmt: skip
    shapes = {weight.name: weight.shape for weight in source.weights()}
    why = {
        name: "excluded" if any(re.search(each, name) for each in exclude) else kept for name, kept in linear.items()
    }
    layers: dict[str, tuple[int, int]] = {}
    for name in (name for name, kept in why.items() if not kept):
        shape = shapes.get(f"{name}.weight")
        if shape is None or len(shape) != 2:
            raise CheckpointError(
                f"{source.folder} has no matrix {name}.weight, which the model of config.json has: its weights have "
                "other names. Merge adapters first (merge_and_unload); where files on the Hub have other names than "
                "the model, convert a checkpoint of it and not such a folder"
            )
        layers[name] = (shape[0], shape[1])
    strange = [name for name, shape in shapes.items() if known is not None and name not in known and len(shape) > 1]
    if strange and bits is not None:
        raise CheckpointError(
            f"{source.folder}: {strange[0]} and {len(strange) - 1} more have other names than in the model (experts "
            "one by one): beside packed weights transformers does not find them. Convert a checkpoint of ds_hf, whose "
            "names are the model's"
        )
    if not layers:
        reasons = ", ".join(sorted({kept for kept in why.values() if kept}))
        raise CheckpointError(
            f"{source.folder}: no linear layer is left that could be written so ({reasons or 'the model has none'})"
        )
    for name, (_, columns) in layers.items():
        if sparse and columns % 4:
            raise CheckpointError(f"--sparse 2:4: 4 does not divide the {columns} columns of {name}: --exclude it")
    size = None if bits is None else group_size_for(layers, bits, group_size)
    kept = [name for name, reason in why.items() if reason]
    counts: dict[str, int] = {}
    for name in kept:
        counts[why[name]] = counts.get(why[name], 0) + 1
    stacks = sum(len(shape) == 3 and ".experts." in name for name, shape in shapes.items())
    counts.update({"stacks of experts": stacks} if stacks else {})
    as_trained = trained is not None and (trained.bits, trained.group_size) == (bits, size)
    return FewBits(bits, size, sparse, frozenset(layers), tuple(kept), as_trained, counts)
