"""What sequence parallelism needs of a model and a batch, told before anything is trained."""

from __future__ import annotations

import inspect
import itertools
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hf.deepspeed_api.sequence.division import SequenceDivision
from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.parallel.sequence.heads import plan_heads
from ds_hf.errors import DsHfError
from ds_hf.log import warn_once

__all__ = [
    "PACKED",
    "batch_faults",
    "check_called",
    "check_model",
    "compare_parts",
    "counts_mask",
    "looks_packed",
    "tell_of_positions",
]

_EAGER = ("eager", "paged|eager")
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx", "max_length_q", "max_length_k")


def check_model(model: Any, config: Any, core: str, processes: int) -> None:
    """Whether attention of transformers' model can be divided over so many processes.

    Args:
        model: ``None`` where there is only its configuration so far.

    Raises:
        ValueError: with the reason and what to do.
    """
    if isinstance(model, nn.Module) and not any(
        hasattr(sys.modules.get(type(module).__module__), "ALL_ATTENTION_FUNCTIONS") for module in model.modules()
    ):
        raise ValueError(
            f"no layer of {type(model).__name__} takes its attention from transformers (ALL_ATTENTION_FUNCTIONS): "
            "sequence parallelism would not reach it. Wrap it in deepspeed.sequence.layer.DistributedAttention"
        )
    if core in _EAGER:
        raise ValueError(
            f"{core} attn_implementation isn't supported by Ulysses sequence parallelism: its masks take memory with "
            "the square of the sequence. Load the model with attn_implementation='sdpa', 'flash_attention_2' or "
            "another flash attention"
        )
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    name = type(model if model is not None else config).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} has cross-attention, which cannot be divided: sequence parallelism is for decoders")
    kinds = set(getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ())
    if other := sorted(kinds - _ATTENTION):
        raise ValueError(
            f"Sequence parallelism does not support layers of type {', '.join(other)} ({name}): they carry a state "
            "along the sequence, which each part would begin anew. Take a model of attention layers, or sp_size=1"
        )
    if getattr(text, "alibi", False):
        raise ValueError(f"{name} adds ALiBi to attention, made from a part of the sequence: it cannot be divided")
    if isinstance(model, nn.Module) and _counts_tokens(model):
        raise ValueError(
            f"{name} counts its position_ids from the tokens that are no padding, beginning at another number than 0: "
            "each part of a sequence would begin anew. Take a model with position_ids from 0 on, or sp_size=1"
        )
    if isinstance(model, nn.Module) and (taken := _numbers_alone(model)):
        raise ValueError(
            f"{taken}, so each part of a sequence would be numbered from 0 on: sequence parallelism needs a model "
            "whose positions are those of position_ids. Take another one, or sp_size=1"
        )
    heads = getattr(text, "num_attention_heads", None)
    if isinstance(heads, int):
        kv_heads = getattr(text, "num_key_value_heads", None)
        plan_heads(heads, kv_heads if isinstance(kv_heads, int) else heads, processes)


def _counts_tokens(model: nn.Module) -> bool:
    """As RoBERTa's embeddings do."""
    name = "create_position_ids_from_input_ids"
    return any(
        hasattr(sys.modules.get(type(module).__module__), name) or hasattr(module, name) for module in model.modules()
    )


def _numbers_alone(model: nn.Module) -> str:
    """What of transformers' model numbers the tokens that it sees, whatever ``position_ids`` are; "" for nothing."""
    from transformers import PreTrainedModel

    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if models and not any("position_ids" in inspect.signature(each.forward).parameters for each in models):
        return f"{type(models[0]).__name__} takes no position_ids"
    for module in model.modules():
        names = getattr(inspect.unwrap(type(module).forward), "__code__", check_model.__code__).co_names
        if "ALL_ATTENTION_FUNCTIONS" not in names or "arange" not in names:
            continue
        if getattr(module, "attn_temperature_tuning", True) and not getattr(module, "use_rope", False):  # of Llama 4
            return f"{type(module).__name__} counts tokens by itself"
    return ""


def counts_mask(model: nn.Module) -> bool:
    """``model`` numbers the tokens that ``attention_mask`` shows, where it gets no ``position_ids``: OPT, BioGPT."""
    return any(
        isinstance(module, nn.Embedding) and "attention_mask" in inspect.signature(module.forward).parameters
        for module in model.modules()
    )


def check_called(division: SequenceDivision, model: nn.Module) -> None:
    """After the first forward: every layer's attention was divided.

    Raises:
        ValueError: some layer computed attention over a part of the sequence alone.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers = getattr(text, "num_hidden_layers", None)
    if isinstance(layers, int) and division.calls < layers:
        raise ValueError(
            f"only {division.calls} of {layers} layers of {type(model).__name__} called attention "
            f"{division.core!r} of transformers: the others would see a part of the sequence alone. Load the model "
            f"with attn_implementation={division.core!r}, and do not replace its attention"
        )


def looks_packed(batch: dict[str, Any]) -> str:
    """Which entry says that documents are packed, "" where none does."""
    for name in PACKED:
        if batch.get(name) is not None:
            return name
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dtype != torch.bool and not mask.is_floating_point() and mask.numel():
        return "attention_mask" if int(mask.max()) > 1 else ""
    return ""


def batch_faults(
    batch: dict[str, Any], positions: Tensor, mask: Tensor | None, tokens: int, division: SequenceDivision
) -> str:
    """What is wrong about a forward with this part of the sequence, "" where nothing is.

    Args:
        positions: of all processes, ``[..., tokens of all]``; mask: of all, ``[batch, tokens of all]``.
    """
    n = division.axis.world_size
    if division.seq_length is not None and tokens * n != division.seq_length:
        return (
            f"this batch has {tokens * n} tokens in a sequence, and seq_length is {division.seq_length}: give "
            "seq_length_is_variable=True"
        )
    if division.counts_mask and mask is not None and bool(((mask > 0) & (positions >= mask.cumsum(-1))).any()):
        return (
            "position_ids count the padding on the left, which this model does not: give position_ids that begin at 0 "
            "with the first token, as (attention_mask.cumsum(-1) - 1).clamp(min=0)"
        )
    if batch.get("labels") is None or batch.get("shift_labels") is not None:
        return ""
    starts = positions.reshape(-1, positions.shape[-1])[:, tokens::tokens]
    before = positions.reshape(-1, positions.shape[-1])[:, tokens - 1 : -1 : tokens]
    if bool((starts == before + 1).any()):
        return (
            "labels without shift_labels: the model would shift them inside each part, and the last token of a part "
            "has its label in the next one. Shift before dividing, as UlyssesSPDataLoaderAdapter does, and give "
            "shift_labels"
        )
    return ""


def tell_of_positions(positions: Tensor, processes: int) -> None:
    """Say it where every process has positions of a whole sequence: each computes all of it then."""
    parts = torch.unflatten(positions, -1, (processes, -1))
    if processes > 1 and bool((parts == parts[..., :1, :]).all()):
        warn_once(
            "every process of a sequence has the same position_ids, so each computes whole sequences and none is "
            "divided: give each its part, as UlyssesSPDataLoaderAdapter does"
        )


def compare_parts(batch: dict[str, Any], tokens: Tensor, axis: Axis) -> None:
    """With the first batch: what the processes of a sequence have are parts of the same sequences. Collective.

    Tokens tell it where labels are the next tokens inside the parts: then the label at the end of a part is the first
    token of the next one.

    Raises:
        DsHfError: on all of them, of the first that does not fit.
    """
    labels = batch.get("shift_labels")
    entries = {name: tuple(value.shape[:2]) for name, value in batch.items() if isinstance(value, Tensor)}
    mine: dict[str, Any] = {"entries": entries, "tokens": tuple(tokens.shape[:2])}
    if isinstance(labels, Tensor) and labels.shape == tokens.shape and not tokens.is_floating_point():
        next_ones, left_out = labels[:, :-1] == tokens[:, 1:], labels[:, :-1] < 0
        follows = bool((next_ones & ~left_out).any()) and bool((next_ones | left_out).all())
        mine |= {"follows": follows, "first": tokens[:, 0].tolist(), "last": labels[:, -1].tolist()}
    every: list[dict[str, Any]] = [{}] * axis.world_size
    dist.all_gather_object(every, mine, group=axis.group)
    for rank, (one, other) in enumerate(itertools.pairwise(every)):
        ranks = f"ranks {axis.global_rank(rank)} and {axis.global_rank(rank + 1)} share sequences"
        if one["tokens"] != other["tokens"]:
            raise DsHfError(
                f"{ranks} and were given {one['tokens']} and {other['tokens']} tokens (batch, length): parts of a "
                f"sequence have the same size. {_HOW}"
            )
        odd = {k for k in {**one["entries"], **other["entries"]} if one["entries"].get(k) != other["entries"].get(k)}
        if odd:
            raise DsHfError(f"{ranks}, and {', '.join(sorted(odd))} of their batches are not alike. {_HOW}")
        if not one.get("follows") or "first" not in other:
            continue
        apart = [r for r, (a, b) in enumerate(zip(one["last"], other["first"], strict=True)) if a not in (b, -100)]
        if apart:
            raise DsHfError(
                f"{ranks}, and sequence {apart[0]} of their first batch does not go on from one to the other: the "
                f"label of the last token on the first of them is {one['last'][apart[0]]}, and the next token on the "
                f"other is {other['first'][apart[0]]}. {_HOW}"
            )


_HOW = (
    "Their loader has to give all of them the same samples, of which each takes its part in the order of ranks: as "
    "UlyssesSPDataLoaderAdapter, the Trainer and accelerate do"
)
