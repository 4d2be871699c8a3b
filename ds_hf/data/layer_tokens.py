"""Random layer-token drop: which tokens a layer keeps, and what it is given of everything else.

A layer that keeps ``keep`` of ``positions`` tokens is called with those rows of the hidden states, in order, and with
what belongs to them of positions, rotary embeddings and masks (DeepSpeed gives it the first rows' rotary embeddings, so
that a token has another position in such a layer). The others pass it by.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_hf.errors import DsHfError

__all__ = ["draw", "put", "select", "take"]

_ROTARY = ("position_embeddings", "rotary_pos_emb", "freqs_cis")


def draw(batch: int, positions: int, keep: int, seed: int, device: torch.device) -> Tensor:
    """int64 ``[batch, keep]``: the places of the tokens that are kept, rising; for the same seed the same."""
    generator = torch.Generator(device).manual_seed(seed)
    order = torch.rand(batch, positions, generator=generator, device=device).topk(keep, dim=-1).indices
    return order.sort(dim=-1).values


def take(hidden: Tensor, places: Tensor, dim: int = 1) -> Tensor:
    """Rows of ``hidden`` at ``places`` (``[batch, keep]``): ``[batch, positions, ...]``, or with ``dim`` 0
    ``[positions, batch, ...]``."""
    return hidden.gather(dim, _expanded(hidden, places, dim))


def put(hidden: Tensor, rows: Tensor, places: Tensor, dim: int = 1) -> Tensor:
    """``hidden`` with ``rows`` at ``places``; another tensor."""
    return hidden.scatter(dim, _expanded(hidden, places, dim), rows.to(hidden.dtype))


def _expanded(hidden: Tensor, places: Tensor, dim: int) -> Tensor:
    shaped = places if dim == 1 else places.t()
    shaped = shaped.reshape(*shaped.shape, *(1 for _ in hidden.shape[2:]))
    return shaped.expand(*shaped.shape[:2], *hidden.shape[2:])


def select(name: str, value: Any, places: Tensor, positions: int, mask: str | None = None) -> Any:
    """Of an argument of a layer, what belongs to the tokens at ``places``.

    Args:
        name: of the argument.
        mask: the name of the attention mask, where that does not say so itself.

    Raises:
        DsHfError: it has something for each position, and what that is cannot be told.
    """
    if name in _ROTARY:
        parts = value if isinstance(value, tuple | list) else (value,)
        found = [_rows(name, part, places, positions, value_dims=1) for part in parts]
        return type(value)(found) if isinstance(value, tuple | list) else found[0]
    if type(value).__name__ == "BlockMask":
        raise DsHfError(
            "random_ltd cannot take rows of a BlockMask (flex_attention): load the model with "
            'attn_implementation="sdpa", or remove random_ltd'
        )
    if not isinstance(value, Tensor):
        return value
    if name == mask or "mask" in name:
        return _mask(value, places, positions)
    if name == "position_ids":
        return _rows(name, value, places, positions, value_dims=0)
    if name.startswith("cu_seq") or (name != "cache_position" and value.ndim >= 2 and positions in value.shape):
        raise DsHfError(
            f"random_ltd does not know how to take the kept tokens' part of {name} {tuple(value.shape)}, which a layer "
            "is given: it knows masks, position_ids and position_embeddings. Leave this layer out of "
            "random_ltd_layer_id, or remove random_ltd"
        )
    return value


def _rows(name: str, value: Any, places: Tensor, positions: int, value_dims: int) -> Any:
    """``[..., batch or 1, positions, *values]`` at ``places``."""
    if not isinstance(value, Tensor):
        return value
    dim = value.ndim - 1 - value_dims
    if dim < 1 or value.shape[dim] != positions or value.shape[dim - 1] not in (1, places.shape[0]):
        raise DsHfError(f"random_ltd: {name} {tuple(value.shape)} has no place for each of {positions} tokens")
    shape = list(value.shape)
    shape[dim - 1] = places.shape[0]
    index = places.reshape(*(1 for _ in shape[: dim - 1]), *places.shape, *(1 for _ in range(value_dims)))
    shape[dim] = places.shape[1]
    return value.expand(*shape[:dim], positions, *shape[dim + 1 :]).gather(dim, index.expand(shape))


def _mask(value: Tensor, places: Tensor, positions: int) -> Tensor:
    """``[batch, positions]``, ``[batch, queries, keys]`` or ``[batch, heads, queries, keys]``; any may be 1."""
    value = value.expand(places.shape[0], *value.shape[1:])
    for dim in range(max(1, value.ndim - 2), value.ndim):
        if value.shape[dim] == positions:
            index = places.reshape(
                places.shape[0], *(places.shape[1] if each == dim else 1 for each in range(1, value.ndim))
            )
            shape = [places.shape[1] if each == dim else size for each, size in enumerate(value.shape)]
            value = value.gather(dim, index.expand(shape))
    return value
