"""Block formats: values as small numbers with an fp32 scale a block, for exchanges and for what rests.

``reference_blocks.py`` says what the bytes are; the CPU's library and the GPU's kernels make the same. The operators
``torch.ops.ds_hf.to_blocks_`` and ``from_blocks_`` are defined here, checked and given to the one that computes, as
library.py does it for the optimizers.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ds_hf.engine.ops import library, reference_blocks
from ds_hf.log import log_once

__all__ = ["OPS", "BlockFormat", "choose", "from_blocks_", "to_blocks_"]

_FLOATING = (torch.float32, torch.bfloat16, torch.float16)
_LARGEST = 4096
OPS = ("to_blocks_", "from_blocks_")


@dataclass(frozen=True)
class BlockFormat:
    """How values are written.

    Attributes:
        bits: of a number: 8, 4 or 1.
        numel: values that share a scale: a multiple of 64, at most 4096.

    Raises:
        ValueError: another number of bits, or a block of another size.
    """

    bits: int
    numel: int = 256

    def __post_init__(self) -> None:
        if self.bits not in (8, 4, 1):
            raise ValueError(f"block formats have 8, 4 or 1 bits, not {self.bits}")
        if self.numel % 64 or not 0 < self.numel <= _LARGEST:
            raise ValueError(f"a block has a multiple of 64 elements, at most {_LARGEST}, not {self.numel}")

    def nbytes(self, numel: int) -> int:
        """Of a row of ``numel`` values: its numbers, padded to 4 bytes, and 4 bytes for each scale."""
        return -(-numel * self.bits // 32) * 4 + 4 * -(-numel // self.numel)

    def empty(self, rows: int, numel: int, device: torch.device) -> Tensor:
        """Memory for so many rows: uint8 ``[rows, nbytes]``."""
        return torch.empty(rows, self.nbytes(numel), dtype=torch.uint8, device=device)

    def write(
        self,
        values: Tensor,
        feedback: Tensor | None = None,
        *,
        gain: float = 1.0,
        beta: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """``values``, floating-point ``[rows, numel]``, in blocks, uint8 ``[rows, nbytes]``; see
        ``reference_blocks.to_blocks_``."""
        if out is None:
            out = self.empty(values.shape[0], values.shape[1], values.device)
        to_blocks_(out, values, feedback, bits=self.bits, block=self.numel, gain=gain, beta=beta)
        return out

    def read(self, blocks: Tensor, out: Tensor, *, before: Tensor | None = None, factor: float = 1.0) -> Tensor:
        """The values of ``blocks``, uint8 ``[rows, nbytes]``, into ``out``, ``[rows, numel]``; see
        ``reference_blocks.from_blocks_``."""
        from_blocks_(out, blocks, before, bits=self.bits, block=self.numel, factor=factor)
        return out


def to_blocks_(
    out: Tensor, values: Tensor, feedback: Tensor | None, *, bits: int, block: int, gain: float = 1.0, beta: float = 0.0
) -> None:
    """``reference_blocks.to_blocks_``, checked, by the kernels of the device.

    Raises:
        ValueError: sizes that do not belong together, tensors on several devices, not contiguous or not aligned.
        TypeError: dtypes that the formats do not take.
    """
    run: Any = _to_blocks if _is_eager(out, values) else torch.ops.ds_hf.to_blocks_
    run(out, values, feedback, bits=bits, block=block, gain=gain, beta=beta)


def from_blocks_(
    out: Tensor, blocks: Tensor, before: Tensor | None, *, bits: int, block: int, factor: float = 1.0
) -> None:
    """``reference_blocks.from_blocks_``, checked, by the kernels of the device; raises as ``to_blocks_`` does."""
    run: Any = _from_blocks if _is_eager(out, blocks) else torch.ops.ds_hf.from_blocks_
    run(out, blocks, before, bits=bits, block=block, factor=factor)


def choose(device: torch.device) -> tuple[ModuleType, str | None]:
    """The module that computes on ``device``, and why it is the reference if it is."""
    _, reason = library.choose(device)
    if reason is not None:
        return reference_blocks, reason
    module = importlib.import_module(f"ds_hf.engine.ops.{device.type}_blocks")
    reason = module.available()
    return (reference_blocks, reason) if reason else (module, None)


def _to_blocks(
    out: Tensor, values: Tensor, feedback: Tensor | None, *, bits: int, block: int, gain: float = 1.0, beta: float = 0.0
) -> None:
    form = BlockFormat(bits, block)
    _check("to_blocks_", form, out, values, [] if feedback is None else [feedback])
    if len(values) != len(out):
        raise ValueError(f"to_blocks_: {len(values)} rows of values and {len(out)} of blocks")
    if values.numel() == 0:
        return
    module = _chosen("to_blocks_", out.device)
    torch.autograd.graph.increment_version([out] if feedback is None else [out, feedback])
    module.to_blocks_(out, values, feedback, bits=bits, block=block, gain=gain, beta=beta)


def _from_blocks(
    out: Tensor, blocks: Tensor, before: Tensor | None, *, bits: int, block: int, factor: float = 1.0
) -> None:
    form = BlockFormat(bits, block)
    _check("from_blocks_", form, blocks, out, [] if before is None else [before])
    if out.numel() == 0:
        return
    if len(blocks) == 0 or len(blocks) % len(out):
        raise ValueError(f"from_blocks_: {len(blocks)} rows of blocks are not as many for each of {len(out)} rows")
    module = _chosen("from_blocks_", out.device)
    torch.autograd.graph.increment_version(out)
    module.from_blocks_(out, blocks, before, bits=bits, block=block, factor=factor)


def _chosen(name: str, device: torch.device) -> ModuleType:
    module, reason = choose(device)
    if reason:
        log_once(f"ds_hf::{name} on {device.type} runs in plain torch: {reason}")
    return module


def _check(name: str, form: BlockFormat, blocks: Tensor, values: Tensor, others: Sequence[Tensor]) -> None:
    for tensor in (values, *others):
        if tensor.dtype not in _FLOATING:
            raise TypeError(f"{name}: values are float32, bfloat16 or float16, not {tensor.dtype}")
        if tensor.dim() != 2 or tensor.shape != values.shape:
            raise ValueError(f"{name}: values and what belongs to them are [rows, numel], not {list(tensor.shape)}")
    if blocks.dtype is not torch.uint8 or blocks.dim() != 2:
        raise TypeError(f"{name}: blocks are uint8 [rows, bytes], not {blocks.dtype} {list(blocks.shape)}")
    if blocks.shape[1] != form.nbytes(values.shape[1]):
        raise ValueError(
            f"{name}: a row of {values.shape[1]} values has {form.nbytes(values.shape[1])} bytes, not {blocks.shape[1]}"
        )
    for tensor in (blocks, values, *others):
        if tensor.device != values.device or not tensor.is_contiguous():
            raise ValueError(f"{name}: all tensors must be contiguous and on {values.device}")
    if blocks.numel() and blocks.data_ptr() % 4:
        raise ValueError(f"{name}: blocks must begin at a multiple of 4 bytes")


def _is_eager(*tensors: Tensor) -> bool:
    return not torch.compiler.is_compiling() and all(type(tensor) is Tensor for tensor in tensors)


_FORM = "int bits, int block"
library.define(
    "to_blocks_",
    f"(Tensor(a!) out, Tensor values, Tensor(b!)? feedback, *, {_FORM}, float gain=1.0, float beta=0.0) -> ()",
    _to_blocks,
    ("out", "feedback"),
)
library.define(
    "from_blocks_",
    f"(Tensor(a!) out, Tensor blocks, Tensor? before, *, {_FORM}, float factor=1.0) -> ()",
    _from_blocks,
    ("out",),
)
