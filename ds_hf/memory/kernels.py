"""What CUDA does otherwise than the meta device: the fused kernels it picks, and the memory that kernels take inside.

``AsOnCuda`` sends attention, dropout and softmax to the operators that torch uses on a GPU, so that they save for
backward what they save there: flash attention keeps no scores, dropout keeps one byte an element.
``workspace`` knows scratch memory that no tensor of the program shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["AsOnCuda", "autocast_of_meta", "workspace"]

_HALVES = (torch.float16, torch.bfloat16)
_FLASH_HEAD = 256  # the widest head of flash attention
_ALIGNED = 16  # elements of a mask's row
_aten = torch.ops.aten
_FLASH_BACKWARD = _aten._scaled_dot_product_flash_attention_backward.default
_EFFICIENT_BACKWARD = _aten._scaled_dot_product_efficient_attention_backward.default


@contextmanager
def autocast_of_meta() -> Iterator[None]:
    """``autocast("meta")``, which torch refuses and models write as their tensors' device, does nothing, by whatever
    name they imported it."""
    own = torch.autocast.__init__

    @wraps(own)
    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        if device_type == "meta":  # that of the CPU does not reach tensors of the meta device
            own(self, "cpu", enabled=False)
        else:
            own(self, device_type, *args, **kwargs)

    torch.autocast.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = own  # type: ignore[method-assign]


class AsOnCuda(TorchFunctionMode):
    """Takes torch's choices for CUDA, on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and args[0].is_meta:
            return _attention(*args, **kwargs)
        if func is F.dropout and args[0].is_meta:
            return _dropout(*args, **kwargs)
        if func is F.softmax and args[0].is_meta and args[0].dtype in _HALVES and kwargs.get("dtype") is torch.float32:
            dim = kwargs["dim"] if "dim" in kwargs else args[1]
            return torch._softmax(args[0], dim, True)  # without a copy in fp32
        return func(*args, **kwargs)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """[B, H, S, D] each; flash, memory-efficient or plain attention, as torch picks for these arguments."""
    head = query.shape[-1]
    scale = 1 / math.sqrt(head) if scale is None else scale
    same_width = query.shape[-1] == key.shape[-1] == value.shape[-1]
    heads, shared = query.shape[-3], key.shape[-3]
    same_heads = heads == shared
    if shared != value.shape[-3] or not (same_heads or shared == 1 or (enable_gqa and heads % shared == 0)):
        raise ValueError(f"{heads} heads of queries do not go with {shared} of keys and {value.shape[-3]} of values")
    if query.dim() == 4 and attn_mask is None and query.dtype in _HALVES and same_width and head <= _FLASH_HEAD:
        spare = -head % 8
        if spare:
            query, key, value = (F.pad(tensor, (0, spare)) for tensor in (query, key, value))
        flash = _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
        result: Tensor = flash[0]
        return result[..., :head] if spare else result
    # Fused kernels read a row's numbers side by side; T5's position bias lay otherwise up to transformers 5.17.
    if attn_mask is not None and attn_mask.stride(-1) != 1 and same_heads and not is_causal:
        return _plain(query, key, value, attn_mask, dropout_p, scale)
    if query.dim() == 4 and same_heads:
        bias = _bias(query, key, attn_mask)
        efficient = _aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
        )
        return efficient[0]  # type: ignore[no-any-return]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _plain(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, dropout_p: float, scale: float) -> Tensor:
    """One operator after another, in fp32; of all scores backward needs what softmax and dropout gave."""
    wide = [tensor.float() if tensor.dtype in _HALVES else tensor for tensor in (query, key, value)]
    scores = (wide[0] * math.sqrt(scale)) @ (wide[1] * math.sqrt(scale)).transpose(-2, -1)
    shares = _dropout(torch.softmax(scores.add_(bias), -1), dropout_p)
    return (shares @ wide[2]).to(query.dtype)


def _bias(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
    """The mask as numbers, broadcast without being copied where its rows begin at whole vectors."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -math.inf)
    length = key.shape[-2]
    if length % _ALIGNED and mask.shape[-1] == length:
        mask = F.pad(mask, (0, -length % _ALIGNED))[..., :length]  # a copy, which backward keeps
    return mask.expand(*query.shape[:3], length)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """One byte an element is kept for backward."""
    if not training or p == 0:
        return input
    result: Tensor = torch.native_dropout(input, p, True)[0]
    return input.copy_(result) if inplace else result


def workspace(func: Any, args: Any) -> int:
    """Bytes that the kernel of ``func`` takes while it runs, beside its inputs and results."""
    if func is _FLASH_BACKWARD or func is _EFFICIENT_BACKWARD:
        query, key = args[1], args[2]
        return _attention_backward(query, key)
    return 0


def _attention_backward(query: Tensor, key: Tensor) -> int:
    """The query's gradient is summed in fp32, rows and heads rounded up to whole tiles; grouped heads are expanded."""
    batch, heads, length, head = query.shape
    rows, width = -(-length // 128) * 128, -(-head // 32) * 32
    nbytes = batch * heads * rows * (width + 1) * 4
    if key.shape[1] != heads:
        nbytes += 2 * batch * heads * key.shape[2] * head * key.element_size()
    return nbytes
