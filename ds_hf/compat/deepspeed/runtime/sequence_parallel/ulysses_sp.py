"""ALST's tiles under DeepSpeed's names (``deepspeed.runtime.sequence_parallel.ulysses_sp``).

They are called as ``TiledMLP.apply(...)``, as autograd functions are, with DeepSpeed's arguments in its order. What
differs: the gradients of weights are summed over tiles in fp32 and given to autograd once, ``compute_params`` may be
left out (``None``) at every stage of ZeRO, every tensor that needs a gradient gets one, and ``TiledFusedLogitsLoss``
multiplies the gradients of weights, too, by the one that comes to the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ds_hf.deepspeed_api.sequence.loader import UlyssesSPDataLoaderAdapter
from ds_hf.deepspeed_api.sequence.ulysses import UlyssesSPAttentionHF
from ds_hf.engine.modules.tiling.compute import bounds, compute_tiles
from ds_hf.engine.modules.tiling.loss import tiled_loss

__all__ = [
    "SequenceTiledCompute",
    "TiledFusedLogitsLoss",
    "TiledMLP",
    "UlyssesSPAttentionHF",
    "UlyssesSPDataLoaderAdapter",
    "sequence_tiled_compute",
]


def sequence_tiled_compute(
    fn: Callable[..., Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, Any],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Sequence[nn.Parameter] | None = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> Tensor:
    """``fn(**kwargs_to_shard, **kwargs_to_pass)``, tile by tile along dim 1 of ``kwargs_to_shard``.

    Args:
        seqlen: length of that dim. shards: number of tiles.
        grad_requiring_tensor_key: the key of a tensor that needs a gradient; others that do get theirs too.
        compute_params: weights that ``fn`` reads.
        output_unshard_dimension: where the outputs of tiles are joined; 0: they are stacked, as losses are.
        output_reduction: ``None``, "mean" or "sum", of the joined output.

    Raises:
        KeyError: there is no ``grad_requiring_tensor_key``.
        ValueError: ``output_reduction`` is something else, or a tensor to shard is not ``seqlen`` long.
    """
    return SequenceTiledCompute.apply(
        fn,
        seqlen,
        shards,
        list(kwargs_to_shard),
        list(kwargs_to_pass),
        grad_requiring_tensor_key,
        compute_params,
        output_unshard_dimension,
        output_reduction,
        *kwargs_to_shard.values(),
        *kwargs_to_pass.values(),
    )


class SequenceTiledCompute(torch.autograd.Function):
    """``sequence_tiled_compute`` with keys and values apart, for ``apply``."""

    @classmethod
    def apply(
        cls,
        fn: Callable[..., Tensor],
        seqlen: int,
        shards: int,
        keys_to_shard: Sequence[str],
        keys_to_pass: Sequence[str],
        grad_requiring_tensor_key: str,
        compute_params: Sequence[nn.Parameter] | None,
        output_unshard_dimension: int,
        output_reduction: str | None,
        *args: Any,
    ) -> Tensor:
        """See ``sequence_tiled_compute``."""
        if output_reduction not in (None, "mean", "sum"):
            raise ValueError(f"unknown value {output_reduction}: valid values are: none/mean/sum")
        keys = [*keys_to_shard, *keys_to_pass]
        if grad_requiring_tensor_key not in keys:
            raise KeyError(f"grad_requiring_tensor_key {grad_requiring_tensor_key!r} is none of {keys}")
        given = dict(zip(keys, args, strict=True))
        split = [key for key in keys_to_shard if isinstance(given[key], Tensor)]
        for key in split:
            if given[key].dim() < 2 or given[key].shape[1] != seqlen:
                raise ValueError(f"{key} of shape {tuple(given[key].shape)} has no dim 1 of {seqlen} to shard")
        whole = [key for key in keys_to_pass if isinstance(given[key], Tensor) and not _is_weight(given[key])]
        rest = {key: value for key, value in given.items() if key not in split and key not in whole}

        def of_tile(tiles: list[Tensor], passed: list[Tensor]) -> Tensor:
            return fn(**dict(zip(split, tiles, strict=True)), **dict(zip(whole, passed, strict=True)), **rest)

        output = compute_tiles(
            of_tile,
            [given[key] for key in split],
            [given[key] for key in whole],
            _weights(compute_params, given.values()),
            cuts=bounds(seqlen, shards),
            dim=1,
            join=output_unshard_dimension or None,
        )
        if output_reduction is None:
            return output
        return output.mean() if output_reduction == "mean" else output.sum()


class TiledMLP(torch.autograd.Function):
    """An MLP, tile by tile: ``TiledMLP.apply(fn, self, x, shards, compute_params)``."""

    @classmethod
    def apply(
        cls,
        fn: Callable[[Any, Tensor], Tensor],
        self: Any,
        x: Tensor,
        shards: int,
        compute_params: Sequence[nn.Parameter] | None = None,
    ) -> Tensor:
        """``fn(self, x)``, tile by tile along the last dim but one, forward and again in backward.

        Args:
            fn: as a rule the forward that the class of ``self`` had.
            x: ``[batch, seqlen, hidden]`` or ``[seqlen, hidden]``.
            shards: number of tiles.
            compute_params: weights that ``fn`` reads, by default those of ``self``.
        """
        dim = x.dim() - 2
        return compute_tiles(
            lambda tiles, _: fn(self, tiles[0]),
            [x],
            [],
            _weights(compute_params, [self]),
            cuts=bounds(x.shape[dim], shards),
            dim=dim,
            join=dim,
        )


class TiledFusedLogitsLoss(torch.autograd.Function):
    """A loss over logits that never exist at once: ``TiledFusedLogitsLoss.apply(fn, self, x, y, ...)``."""

    @classmethod
    def apply(
        cls,
        fn: Callable[..., Tensor],
        self: Any,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        shards: int,
        compute_params: Sequence[nn.Parameter] | None,
        output_reduction: str,
    ) -> Tensor:
        """The mean or sum over tiles of ``fn(self, x, y)``, or ``fn(self, x, y, mask)``.

        Gradients are computed in forward. A mean over tiles is that over tokens only where every tile counts as many.

        Args:
            x: ``[batch, seqlen, ...]``, what gradients go back to. y: the labels. mask: ``[batch, seqlen]``.
            fn: gets them with both dims in one.
            compute_params: weights that ``fn`` reads. With ZeRO-3 read them as attributes of their module in the
                model's forward, so that they are gathered once and not for each tile.

        Raises:
            ValueError: shapes that do not belong together, or another ``output_reduction``.
        """
        _check_loss_inputs(x, y, mask, output_reduction)
        tensors = [tensor.reshape(-1, *tensor.shape[2:]) for tensor in (x, y, mask) if tensor is not None]
        return tiled_loss(
            lambda *tiles: fn(self, *tiles),
            tensors,
            _weights(compute_params, []),
            shards,
            mean=output_reduction == "mean",
        )


def _check_loss_inputs(x: Tensor, y: Tensor, mask: Tensor | None, reduction: str) -> None:
    if reduction not in ("mean", "sum"):
        raise ValueError(f'unknown reduction {reduction}: valid values are: "mean"/"sum"')
    for name, tensor in (("x", x), ("y", y)):
        if tensor.dim() < 2:
            raise ValueError(f"{name} must be at least 2D [batch_size, seq_len, ...]")
    if x.shape[:2] != y.shape[:2]:
        raise ValueError("x and y batch/seq dims must match")
    if mask is not None and mask.dim() != 2:
        raise ValueError(f"mask must be 2D [batch_size, seq_len], but got {mask.dim()}")
    if mask is not None and mask.shape != x.shape[:2]:
        raise ValueError("mask shape must match x and y batch/seq")


def _is_weight(value: Any) -> bool:
    return isinstance(value, nn.Parameter)


def _weights(compute_params: Iterable[nn.Parameter] | None, among: Iterable[Any]) -> list[nn.Parameter]:
    """What autograd is told of: ``compute_params``, or else the parameters of the modules ``among`` the arguments."""
    if compute_params is not None:
        return [param for param in compute_params if param is not None]
    modules = [value for value in among if isinstance(value, nn.Module)]
    return [param for module in modules for param in module.parameters()]
