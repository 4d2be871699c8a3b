"""Masks of whole sequences.

transformers' models make their masks with functions of ``transformers.masking_utils``, from ``attention_mask``,
``position_ids`` (packed documents) and the layer's kind (sliding windows, chunks). In the forward of a bound model
these functions are given what they would be given without sequence parallelism: the whole of both, gathered once a
forward, and the number of tokens of the whole. So the mask is that of the undivided model, whatever the model and the
core. DeepSpeed drops masks instead, and documents then attend to each other.

Rotary embeddings whose frequencies follow the length (``dynamic``, ``longrope``) take it for the largest position that
they are given, so they are given that of the whole.

The balance of experts is a product of two means over all tokens, so it, too, is taken of the whole: from the routers'
logits of all parts.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from ds_hf.deepspeed_api.sequence.division import SequenceDivision, forward_now, forward_of
from ds_hf.engine.parallel.sequence.losses import gather
from ds_hf.inference.static import CACHE_NAMES, given_cache
from ds_hf.log import warn_once

__all__ = ["use_whole_lengths", "use_whole_masks"]

_FUNCTIONS = (
    "create_causal_mask",
    "create_bidirectional_mask",
    "create_sliding_window_causal_mask",
    "create_bidirectional_sliding_window_mask",
    "create_chunked_causal_mask",
    "create_masks_for_generate",
)
_BALANCE = "load_balancing_loss_func"
_LARGE = 1 << 30  # bytes
_DONE = "_ds_hf_whole_masks"
_OWN = ("or_mask_function", "and_mask_function")  # functions of token indices, and of tensors of a part of them


def use_whole_masks(model: nn.Module) -> None:
    """Have the code of ``model``'s classes make whole masks for bound models."""
    for name in {type(module).__module__ for module in model.modules()}:
        code = sys.modules.get(name)
        for function in _FUNCTIONS:
            original = getattr(code, function, None)
            if original is not None and not hasattr(original, _DONE):
                setattr(code, function, _whole(original))
        balance = getattr(code, _BALANCE, None)
        if balance is not None and not hasattr(balance, _DONE):
            setattr(code, _BALANCE, _balance_of_the_whole(balance))


def _whole(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)
    takes = next((name for name in CACHE_NAMES if name in signature.parameters), None)

    @wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        if takes is not None:  # code of other releases than transformers' own has another name for it
            kwargs = {takes if name in CACHE_NAMES else name: value for name, value in kwargs.items()}
        given = signature.bind_partial(*args, **kwargs).arguments
        division = forward_of(given.get("config"))
        if division is None or not division.active:
            return original(*args, **kwargs)
        extra = given.pop("kwargs", {})
        mask = original(**_of_the_whole(given, division), **extra)
        if isinstance(mask, Tensor) and mask.ndim == 4 and mask.nbytes >= _LARGE:
            warn_once(
                f"the mask of {mask.shape[-1]} tokens takes {mask.nbytes / 2**30:.1f} GiB on every process, for packed "
                f"documents, padding or a sliding window with {division.core!r}: flash attention needs none "
                "(attn_implementation='flash_attention_2')"
            )
        return mask

    setattr(make, _DONE, True)
    return make


def use_whole_lengths(model: nn.Module) -> list[Any]:
    """Have rotary embeddings of ``model`` whose frequencies follow the length see that of the whole.

    Returns:
        handles of the hooks.
    """
    hooks: list[Any] = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", "")
        kinds = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
        if kinds & {"dynamic", "longrope"}:
            hooks.append(module.register_forward_pre_hook(_with_last_position, with_kwargs=True))
            hooks.append(module.register_forward_hook(_without_last_position, with_kwargs=True))
    return hooks


def _with_last_position(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """One position more, the largest of the whole sequence: ``[..., tokens + 1]``."""
    division = forward_now()
    if division is None or not division.active:
        return None
    given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    local = given["position_ids"]
    last = division.whole(local, "position_ids").amax(-1, keepdim=True)
    return (), {**given, "position_ids": torch.cat([local, last], -1)}


def _without_last_position(module: nn.Module, args: Any, kwargs: dict[str, Any], angles: Any) -> Any:
    division = forward_now()
    if division is None or not division.active:
        return None
    return tuple(each[..., :-1, :] for each in angles) if isinstance(angles, tuple) else angles[..., :-1, :]


def _balance_of_the_whole(original: Callable[..., Any]) -> Callable[..., Any]:
    """Its gradient is summed over the processes of a sequence, as that of every loss of the whole."""

    @wraps(original)
    def compute(gate_logits: Any, *args: Any, **kwargs: Any) -> Any:
        division = forward_now()
        if division is None or not division.active or not isinstance(gate_logits, tuple) or not gate_logits:
            return original(gate_logits, *args, **kwargs)
        given = inspect.signature(original).bind(gate_logits, *args, **kwargs).arguments
        mask, layers = given.get("attention_mask"), torch.stack(gate_logits)  # [layers, batch * tokens, experts]
        if mask is not None:
            layers = torch.unflatten(layers, 1, tuple(mask.shape))
            given["attention_mask"] = division.whole(mask, "attention_mask")
        whole = gather(layers, division.axis, dim=layers.ndim - 2, what="routers' logits")
        given["gate_logits"] = tuple(whole.reshape(len(layers), -1, layers.shape[-1]))
        return original(**given)

    setattr(compute, _DONE, True)
    return compute


def _of_the_whole(given: dict[str, Any], division: SequenceDivision) -> dict[str, Any]:
    """Arguments for the whole sequence.

    Raises:
        ValueError: what cannot be told of it.
    """
    for name in _OWN:
        if given.get(name) is not None:
            raise ValueError(
                f"this model adds a mask of its own ({name}), made from the part of the sequence that is here: it "
                "cannot be trained with sequence parallelism"
            )
    if given.get("encoder_hidden_states") is not None:
        raise ValueError(
            "cross-attention cannot be divided: sequence parallelism is for decoders and for encoders alone"
        )
    _, cache = given_cache(given)
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError(
            "sequence parallelism has no cache of earlier tokens: call generate() with disable_in_eval=True and the "
            "model in eval mode"
        )
    found = dict(given)
    name = "inputs_embeds" if "inputs_embeds" in given else "input_embeds"
    embeds: Tensor = given[name]
    tokens = embeds.shape[1]
    whole = tokens * division.axis.world_size
    found[name] = embeds[:, :1, :1].detach().expand(-1, whole, -1)
    for key in ("attention_mask", "position_ids", "block_sequence_ids"):
        local = given.get(key)
        if isinstance(local, Tensor) and local.ndim == 2 and local.shape[-1] == tokens:
            found[key] = division.whole(local, key)
        elif isinstance(local, Tensor) and local.shape[-1] != whole:
            raise ValueError(
                f"{key} has shape {list(local.shape)}, and this process has {tokens} of {whole} tokens: give it as "
                f"[batch, {tokens}], or [batch, {whole}]"
            )
    if given.get("cache_position") is not None:  # transformers before 5.20 counts queries by it
        found["cache_position"] = torch.arange(whole, device=embeds.device)
    return found
