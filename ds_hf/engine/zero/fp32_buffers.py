"""Buffers that stay in fp32 in a model of 16 bits: ``data_types.keep_in_fp32_modules``, and the lists of transformers.

The bias by which DeepSeek-V3 and its kin choose experts is such a buffer: its values differ by less than bf16 can tell.
Plain ``from_pretrained`` keeps it in fp32; under ``zero.Init`` tensors are made in 16 bits, and what is loaded into
them is rounded. Parameters that are listed follow the model, as in DeepSpeed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["buffers_to_keep_in_fp32", "keep_buffers_in_fp32", "keep_in_fp32_pattern", "lists_of", "regular"]

_SIXTEEN_BITS = (torch.float16, torch.bfloat16)


def lists_of(module: nn.Module, dtype: torch.dtype | None) -> set[str]:
    """What the class of ``module`` itself wants in fp32 beside parameters of ``dtype``."""
    names = set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    if dtype is torch.float16:
        names |= set(getattr(module, "_keep_in_fp32_modules", None) or ())
    return names


def keep_in_fp32_pattern(
    module: nn.Module, setting: str | Sequence[str] | None, dtype: torch.dtype | None
) -> re.Pattern[str] | None:
    """What the names of buffers that stay in fp32 have in them; ``None`` if there are none.

    Args:
        setting: "auto" for the lists of the model and of models in it, or patterns in which ``*`` is any text.
        dtype: of the parameters; nothing is kept beside others than 16-bit ones.
    """
    if dtype not in _SIXTEEN_BITS:
        return None
    if setting is not None and setting != "auto":
        parts = {regular(name) for name in setting}
    else:
        parts = set()
        for path, child in module.named_modules():
            within = rf"^{re.escape(path)}\..*" if path else ""
            parts |= {within + regular(name) for name in lists_of(child, dtype)}
    return re.compile("|".join(sorted(parts))) if parts else None


def regular(name: str) -> str:
    """The regular expression of one pattern."""
    return name.replace("*", ".*")


def buffers_to_keep_in_fp32(module: nn.Module, pattern: re.Pattern[str]) -> list[Tensor]:
    """The floating-point buffers, of any shape and dtype, whose full names have ``pattern`` in them."""
    named = module.named_buffers(remove_duplicate=False)
    return [buffer for name, buffer in named if buffer.is_floating_point() and pattern.search(name)]


def keep_buffers_in_fp32(module: nn.Module, pattern: re.Pattern[str]) -> int:
    """Cast those buffers to fp32 in place; how many were something else."""
    narrow = [b for b in buffers_to_keep_in_fp32(module, pattern) if b.dtype != torch.float32]
    for buffer in narrow:
        buffer.data = buffer.data.float()
    return len(narrow)
