"""Sparse attention in a model of transformers, without a change to it.

transformers looks attention up by name when a layer runs (``AttentionInterface``), and the mask of a batch, too. Both
registries are found through the model, so that nothing here imports transformers. Masks are made by transformers'
own functions, so padding on either side, packed documents, sliding windows and caches mean what they mean there; the
layout is one more condition. Its rows and columns are positions in the sequence of the batch.
"""

from __future__ import annotations

import copy
import sys
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ds_hf.config.types import Config
from ds_hf.engine.modules.sparse.attention import attention
from ds_hf.engine.modules.sparse.block_layout import TILE
from ds_hf.engine.modules.sparse.choice import Patterns
from ds_hf.errors import ConfigError
from ds_hf.log import log_once

__all__ = ["prepare_attention"]

KEY = "ds_hf.sparse_attention"


@dataclass(frozen=True)
class _Heads:
    """Which heads of ``total`` are computed here: tensor parallelism divides them first, then those that share a
    sequence divide what is left, while they do (evaluation may be undivided).

    Attributes:
        tensor, sequence: (place of this process, processes).
    """

    total: int
    tensor: tuple[int, int] = (0, 1)
    sequence: tuple[int, int] = (0, 1)

    def first(self, count: int) -> int:
        """The first of ``count`` heads.

        Raises:
            ConfigError: it is none of the numbers of heads that there can be here.
        """
        (rank, parts), (place, shares) = self.tensor, self.sequence
        for known, start in (
            (self.total, 0),
            (self.total // parts, rank * (self.total // parts)),
            (self.total // parts // shares, (rank * shares + place) * (self.total // parts // shares)),
        ):
            if count == known:
                return start
        raise ConfigError(f"{KEY}: attention has {count} heads here, and the model {self.total}; remove the key")


def prepare_attention(settings: Config, model: nn.Module, **divided: tuple[int, int]) -> None:
    """Make the model's attention sparse, where the configuration asks for it.

    Args:
        divided: ``tensor`` and ``sequence``: (place of this process, processes) among those that divide the heads.

    Raises:
        ConfigError: the model's attention cannot be replaced, or the pattern is impossible.
    """
    asked = settings.ds_hf.sparse_attention
    if asked is False:
        return
    inner = _transformers_model(model)
    _own_configurations(model)
    text = inner.config.get_text_config()
    _check_model(inner, text, everything=asked == "all")
    try:
        patterns = Patterns(settings.sparse_attention, text.num_attention_heads)
    except ValueError as error:
        raise ConfigError(f"sparse_attention: {error}") from error
    name = _register(patterns, _Heads(text.num_attention_heads, **divided), everything=asked == "all")
    inner.set_attn_implementation(_for_text(inner, text, name))
    log_once(f"sparse attention: {settings.sparse_attention.mode}, blocks of {settings.sparse_attention.block} tokens")


# -- which model --------------------------------------------------------------------------------------------------


def _transformers_model(model: nn.Module) -> Any:
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    for module in model.modules() if modeling is not None else ():
        if isinstance(module, modeling.PreTrainedModel):
            return module
    raise ConfigError(
        f"{KEY} needs a model of transformers, and this is a {type(model).__name__}: call SparseSelfAttention of "
        "deepspeed.ops.sparse_attention in its attention layers, and remove the key"
    )


def _own_configurations(model: nn.Module) -> None:
    """Give the model's modules copies of their configurations: the attention's name is written there, and another model
    may have been made of the same object."""
    kind = sys.modules["transformers.configuration_utils"].PretrainedConfig
    copies: dict[int, Any] = {}  # so that one that is inside another stays so
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, kind):
                vars(module)[name] = copy.deepcopy(value, copies)


def _check_model(model: Any, text: Any, *, everything: bool) -> None:
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError(f"{KEY}: {name} is an encoder-decoder, and layouts are of self-attention; remove the key")
    if not model._can_set_attn_implementation():
        raise ConfigError(
            f"{KEY}: {name} computes its attention itself (eager) and not through transformers' AttentionInterface, so "
            "it cannot be replaced; remove the key"
        )
    for feature, key in (("attn_logit_softcapping", "softcapping of scores"), ("output_attentions", "attention maps")):
        if getattr(text, feature, None):
            raise ConfigError(
                f"{KEY}: there are no {key} ({feature}) with sparse attention; unset it, or remove the key"
            )
    if everything:
        return
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if getattr(text, "sliding_window", None) else "full_attention"]
    if "full_attention" not in kinds:
        raise ConfigError(
            f'{KEY} is true, which leaves sliding windows alone, and every layer of {name} has one: give "all" to have '
            "the pattern within the windows"
        )


def _for_text(model: Any, text: Any, name: str) -> Any:
    """The argument of ``set_attn_implementation`` that leaves encoders of images and sound as they are."""
    if text is model.config:
        return {"": name} if model.config.sub_configs else name
    for key in model.config.sub_configs:
        if getattr(model.config, key) is text:
            return {key: name}
    raise ConfigError(f"{KEY}: the text model of {type(model).__name__} was not found; remove the key")


# -- what transformers calls --------------------------------------------------------------------------------------


def _register(patterns: Patterns, heads: _Heads, *, everything: bool) -> str:
    """Names for one pattern: another model may have another."""
    said = f"{patterns.section} {heads} {everything}"
    name = f"ds_hf_sparse_{zlib.crc32(said.encode()):08x}"
    eagerly: Any = torch.compiler.disable  # a layout is looked up by length, which is no part of a graph
    modeling, masking = sys.modules["transformers.modeling_utils"], sys.modules["transformers.masking_utils"]
    modeling.ALL_ATTENTION_FUNCTIONS.register(name, eagerly(_Forward(patterns, heads, everything=everything).__call__))
    masking.ALL_MASK_ATTENTION_FUNCTIONS.register(name, make_mask)
    return name


def make_mask(**kwargs: Any) -> Any:
    """The mask of a batch: a BlockMask for whole sequences on a GPU, else bool ``[batch, 1, queries, keys]``."""
    masking = sys.modules["transformers.masking_utils"]
    queries, keys = kwargs["q_length"], kwargs["kv_length"]
    kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    tiled = str(kwargs.get("device", "cpu")).startswith("cuda") and queries == keys >= TILE
    mask = (masking.flex_attention_mask if tiled else masking.sdpa_mask)(**kwargs)
    mask._ds_hf_starts = (kwargs.get("q_offset", 0), kwargs.get("kv_offset", 0))
    return mask


class _Forward:
    """An attention function of transformers, for one pattern."""

    def __init__(self, patterns: Patterns, heads: _Heads, *, everything: bool) -> None:
        self.patterns, self.heads, self.everything = patterns, heads, everything

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        position_bias: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Returns ``[batch, queries, heads, head_dim]``; attention maps there are none."""
        if softcap is not None or s_aux is not None:
            raise ConfigError(
                f"{KEY}: {type(module).__name__} has {'softcapping' if softcap is not None else 'attention sinks'}, "
                "which sparse attention lacks; remove the key"
            )
        starts = getattr(attention_mask, "_ds_hf_starts", (key.shape[2] - query.shape[2], 0))
        layout = None
        if self._is_sparse(module, kwargs.get("sliding_window")):
            tokens = int(max(starts[0] + query.shape[2], starts[1] + key.shape[2]))
            layer, count = int(getattr(module, "layer_idx", None) or 0), query.shape[1]
            layout = self.patterns.layout(tokens, layer, self.heads.first(count), count)
        keep, bias = _mask_arguments(attention_mask)
        causal = kwargs.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        out = attention(
            query,
            key,
            value,
            layout,
            keep=keep,
            bias=bias if position_bias is None else (*bias, position_bias),
            causal=bool(causal and attention_mask is None and query.shape[2] > 1),
            scale=scaling,
            dropout=dropout,
            starts=starts,
        )
        return out.transpose(1, 2).contiguous(), None

    def _is_sparse(self, module: nn.Module, window: Any) -> bool:
        if "cross" in type(module).__name__.lower() or getattr(module, "is_cross_attention", False):
            return False
        if self.everything:
            return True
        kinds, layer = getattr(getattr(module, "config", None), "layer_types", None), getattr(module, "layer_idx", None)
        return window is None if kinds is None or layer is None else bool(kinds[layer] == "full_attention")


def _mask_arguments(mask: Any) -> tuple[tuple[Any, ...], tuple[Tensor, ...]]:
    """``keep`` and ``bias``: a mask that a script made itself may be of numbers to add."""
    if mask is None:
        return (), ()
    if isinstance(mask, Tensor) and mask.is_floating_point():
        return (), (mask,)
    return (mask,), ()
