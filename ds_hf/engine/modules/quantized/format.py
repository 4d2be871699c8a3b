"""How a weight is written in blocks: ``BlockFormat`` row by row, with a middle of each block where it is asymmetric."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_hf.engine.ops.blocks import BlockFormat
from ds_hf.errors import ConfigError, Fault

__all__ = ["WeightFormat", "format_of"]


@dataclass(frozen=True)
class WeightFormat:
    """DeepSpeed's ``num_bits``, ``group_size``, ``symmetric`` and ``group_dim``.

    Attributes:
        bits: 8 or 4.
        group: weights that share a scale, neighbours along ``dim``.
        symmetric: numbers stand for multiples of the scale around zero; else around the middle between a group's least
            and greatest weight, for 4 bytes more a group.
        dim: 1 for groups of one output of a linear layer, 0 for groups of one input.
    """

    bits: int = 8
    group: int = 64
    symmetric: bool = True
    dim: int = 1

    @property
    def blocks(self) -> BlockFormat:
        return BlockFormat(self.bits, self.group)

    def pack(self, weight: Tensor) -> Tensor:
        """``weight``, ``[rows, columns]``, as int8 ``[rows, bytes]``, of the transposed one where ``dim`` is 0."""
        if weight.is_meta:
            numel = weight.shape[self.dim]
            nbytes = self.blocks.nbytes(numel) + (0 if self.symmetric else 4 * -(-numel // self.group))
            return weight.new_empty(weight.shape[1 - self.dim], nbytes, dtype=torch.int8)
        rows = (weight.t() if self.dim == 0 else weight).contiguous()
        if rows.dtype is torch.float64:
            rows = rows.float()
        middles = None
        if not self.symmetric:
            middles, rows = self._centred(rows.float())
        packed = self.blocks.write(rows)
        if middles is not None:
            packed = torch.cat([packed, middles.view(torch.uint8)], dim=1)
        return packed.view(torch.int8)

    def unpack(self, packed: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """The weight of ``shape``, in ``dtype``."""
        if dtype is torch.float64:
            return self.unpack(packed, shape, torch.float32).double()
        rows, numel = packed.shape[0], shape[self.dim]
        values = torch.empty(rows, numel, dtype=dtype, device=packed.device)
        if packed.is_meta:  # predictions
            return values.t() if self.dim == 0 else values
        raw = packed.view(torch.uint8)
        own = self.blocks.nbytes(numel)
        self.blocks.read(raw if self.symmetric else raw[:, :own].contiguous(), values)
        if not self.symmetric:
            middles = raw[:, own:].contiguous().view(torch.float32)
            values += middles.repeat_interleave(self.group, dim=1)[:, :numel].to(dtype)
        return values.t() if self.dim == 0 else values

    def _centred(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The middle of each group, ``[rows, groups]``, and what the weights differ from it by."""
        numel = rows.shape[1]
        padding = -numel % self.group
        groups = torch.nn.functional.pad(rows, (0, padding), value=0.0).view(len(rows), -1, self.group)
        if padding:  # the last group's least and greatest are of what is there
            groups[:, -1, self.group - padding :] = rows[:, -1:]
        least, greatest = groups.aminmax(dim=-1)
        middles = ((least + greatest) / 2).contiguous()
        return middles, (groups - middles[..., None]).view(len(rows), -1)[:, :numel].contiguous()


def format_of(options: Mapping[str, Any], pointer: str) -> WeightFormat:
    """The format that a ``quantized_initialization`` asks for.

    Raises:
        ConfigError: unknown keys, or values without a matching format.
    """
    known = {"num_bits": 8, "group_size": 64, "group_dim": 1, "symmetric": True}
    faults = [
        Fault(f"{pointer}/{key}", f"unknown key {key!r}", f"known here: {', '.join(known)}")
        for key in options
        if key not in known
    ]
    given = {**known, **{key: value for key, value in options.items() if key in known}}
    if given["num_bits"] not in (4, 8):
        faults.append(Fault(f"{pointer}/num_bits", f"{given['num_bits']!r} bits", "give 8 or 4"))
    size = given["group_size"]
    if type(size) is not int or size % 64 or not 64 <= size <= 4096:
        faults.append(Fault(f"{pointer}/group_size", f"a group of {size!r}", "give a multiple of 64, at most 4096"))
    if given["group_dim"] not in (0, 1) or type(given["group_dim"]) is not int:
        faults.append(Fault(f"{pointer}/group_dim", f"dimension {given['group_dim']!r}", "give 0 or 1"))
    if type(given["symmetric"]) is not bool:
        faults.append(Fault(f"{pointer}/symmetric", f"{given['symmetric']!r} is no boolean", "give true or false"))
    if faults:
        raise ConfigError(faults, "weight_quantization")
    return WeightFormat(given["num_bits"], size, given["symmetric"], given["group_dim"])
