"""Words for dtypes, as configurations, files and messages have them; torch is imported by ``torch_dtype`` alone."""

from __future__ import annotations

from typing import Any

__all__ = ["SHORT", "canonical", "name_of", "torch_dtype"]

SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_FULL = {"fp32": "float32", "float": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}


def canonical(word: str) -> str:
    """torch's own name: ``"bfloat16"`` for ``"bf16"`` and ``"torch.bfloat16"``; other words as they are."""
    name = word.removeprefix("torch.")
    return _FULL.get(name, name)


def name_of(dtype: object) -> str:
    """``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(word: object) -> Any:
    """``torch.bfloat16`` for ``"bfloat16"``, ``"torch.bfloat16"`` and ``"bf16"``; ``None`` for what is no dtype."""
    import torch

    found = getattr(torch, canonical(word), None) if isinstance(word, str) else None
    return found if isinstance(found, torch.dtype) and name_of(found) == canonical(str(word)) else None
