"""``DistributedAttention``: ``deepspeed.sequence.layer``, for models that call their own attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hf.engine.comm.mesh import Axis, axis_of
from ds_hf.engine.parallel.sequence.exchange import Exchange, exchange
from ds_hf.engine.parallel.sequence.heads import shares_of

__all__ = ["DistributedAttention", "SeqAllToAll", "apply_rotary_pos_emb", "single_all_to_all"]

# Groups of heads of the last exchange for tokens, where they do not divide: the way back is not told, as in DeepSpeed.
_LAST: WeakKeyDictionary[dist.ProcessGroup, int | None] = WeakKeyDictionary()
_HEADS = 2  # dimension of heads; the sequence is the other of 0 and 1 than the batch


class DistributedAttention(nn.Module):
    """Local attention over all tokens of a part of the heads.

    Tensors are ``[sequence, batch, heads, dim]`` or ``[batch, sequence, heads, dim]``, as ``batch_dim_idx`` says, with
    this process's part of the sequence; ``local_attention`` gets the whole of it and a part of the heads. Where heads
    do not divide, the first processes have one group of query, key and value heads more.

    Args:
        local_attention: called as ``(query, key, value, *args, **kwargs)``.
        sequence_process_group: the processes that share the sequence.
        scatter_idx: dimension of the heads; gather_idx: DeepSpeed's name of the sequence dimension, which follows from
            ``batch_dim_idx``.
        sp_stream: DeepSpeed overlaps its exchanges on it; q, k and v are one exchange here, which has nothing to
            overlap.
        num_kv_heads: groups of heads that stay together, read from ``key`` by default.
    """

    def __init__(
        self,
        local_attention: Callable[..., Any],
        sequence_process_group: dist.ProcessGroup,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
    ) -> None:
        super().__init__()
        self.local_attn = local_attention
        self.spg = sequence_process_group
        self.scatter_idx, self.gather_idx = scatter_idx, gather_idx
        self.num_kv_heads = num_kv_heads
        self.sp_stream = sp_stream

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_dim_idx: int,
        rotary_pos_emb: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """What ``local_attention`` gives, back with this process's part of the sequence and all heads.

        Args:
            batch_dim_idx: 0 or 1, the dimension of the batch.
            rotary_pos_emb: (cos, sin) of all tokens, ``[sequence, 1, 1, dim]`` before their first two dimensions are
                swapped; for the query and key of all tokens.
        """
        axis, sequence = axis_of(self.spg, "sequence"), 1 - batch_dim_idx
        kv_heads = self.num_kv_heads if self.num_kv_heads is not None else key.shape[_HEADS]
        uneven = any(each.shape[_HEADS] % axis.world_size for each in (query, key, value))
        shares = [
            shares_of(each.shape[_HEADS], kv_heads, axis.world_size) if uneven else None for each in (query, key, value)
        ]
        ways = [Exchange(_HEADS, sequence, share) for share in shares]
        query, key, value = exchange((query, key, value), ways, axis, "heads of DistributedAttention")
        if rotary_pos_emb is not None:
            cos, sin = (each.permute(1, 0, 2, 3) for each in rotary_pos_emb)
            query, key = apply_rotary_pos_emb(query, cos, sin), apply_rotary_pos_emb(key, cos, sin)
        context = self.local_attn(query, key, value, *args, **kwargs)
        flat = context.ndim == 3
        if flat:  # [sequence, batch, heads * dim], as Megatron's attention gives it
            context = context.unflatten(-1, (query.shape[_HEADS], -1))
        way = Exchange(sequence, _HEADS, None, shares[0])
        (context,) = exchange((context,), way, axis, "context of DistributedAttention")
        return context.flatten(_HEADS) if flat else context


class SeqAllToAll:
    """DeepSpeed's ``_SeqAllToAll``: its ``apply`` exchanges one tensor."""

    @staticmethod
    def apply(
        group: dist.ProcessGroup,
        input: Tensor,
        scatter_idx: int,
        gather_idx: int,
        batch_dim_idx: int,
        stream: Any = None,
        handle: Any = None,
        type: Any = None,
        is_fwd: bool = True,
        num_kv_heads: int | None = None,
    ) -> Tensor:
        """``single_all_to_all``, differentiable."""
        return single_all_to_all(input, scatter_idx, gather_idx, batch_dim_idx, group, num_kv_heads=num_kv_heads)


def single_all_to_all(
    input: Tensor,
    scatter_idx: int,
    gather_idx: int,
    batch_dim_idx: int,
    group: dist.ProcessGroup,
    async_op: bool = False,
    handle: Any = None,
    type: Any = None,
    num_kv_heads: int | None = None,
) -> Tensor:
    """Exchange heads for tokens (``scatter_idx`` 2) or back (below 2); differentiable.

    Args:
        input: ``[batch, sequence, heads, dim]``, or with the first two swapped where ``batch_dim_idx`` is 1.
        num_kv_heads: groups of heads that stay together. On the way back, by default those of the last way there.

    Raises:
        AssertionError: ``async_op``; DeepSpeed's overlap is nothing that one exchange of q, k and v needs.
    """
    assert not async_op, "async_op is not supported: exchange q, k and v with DistributedAttention, in one all-to-all"
    axis: Axis = axis_of(group, "sequence")
    sequence, heads = 1 - batch_dim_idx, input.shape[_HEADS]
    if scatter_idx >= 2:
        kv = num_kv_heads if num_kv_heads is not None else heads
        shares = shares_of(heads, kv, axis.world_size) if kv % axis.world_size or heads % axis.world_size else None
        way = Exchange(_HEADS, sequence, shares)
        _LAST[group] = None if shares is None else kv
    else:
        shares = None
        num_kv_heads = _LAST.get(group) if num_kv_heads is None else num_kv_heads
        if num_kv_heads is not None and num_kv_heads % axis.world_size:
            mine = shares_of(num_kv_heads, num_kv_heads, axis.world_size)[axis.rank]
            shares = shares_of(num_kv_heads * (heads // mine), num_kv_heads, axis.world_size)
        way = Exchange(sequence, _HEADS, None, shares)
    (result,) = exchange((input,), way, axis, "heads" if scatter_idx >= 2 else "context")
    return result


def apply_rotary_pos_emb(t: Tensor, freqs_cos: Tensor, freqs_sin: Tensor) -> Tensor:
    """Rotary position embedding of the first dimensions of ``t``, as many as ``freqs_cos`` has (arXiv 2104.09864)."""
    dim = freqs_cos.shape[-1]
    turned, rest = t[..., :dim], t[..., dim:]
    first, second = turned.chunk(2, -1)
    turned = turned * freqs_cos + torch.cat((-second, first), -1) * freqs_sin
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned
