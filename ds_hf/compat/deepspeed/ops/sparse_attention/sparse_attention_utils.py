"""``SparseAttentionUtils``: BERT and RoBERTa of transformers with sparse self-attention and longer sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ds_hf.engine.modules.sparse.layouts import SparsityConfig
from ds_hf.inference.static import given_cache
from ds_hf.log import logger

from .bert_sparse_self_attention import BertSparseSelfAttention

__all__ = ["SparseAttentionUtils"]

_RESERVED = {"bert": 0, "roberta": 2}  # first positions that are no position of a token


class _LayerAttention(BertSparseSelfAttention):
    """What a layer of transformers calls ``attention.self``: other arguments, a tuple, and masks in three forms."""

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        if given_cache(kwargs)[1] is not None or kwargs.get("encoder_hidden_states") is not None:
            raise ValueError("sparse self-attention takes neither past keys nor another sequence: it is for encoders")
        return super().forward(hidden_states, _of_keys(attention_mask, hidden_states)), None


def _of_keys(mask: Tensor | None, hidden: Tensor) -> Tensor | None:
    """The mask of padding, ``[batch, tokens]``, to be added to scores.

    transformers gives sdpa a bool ``[batch, 1, tokens, tokens]`` whose rows are alike, eager numbers to add alike,
    and flash attention ``[batch, tokens]`` of 0 and 1; older models ``[batch, 1, 1, tokens]`` of numbers to add.
    """
    if mask is None:
        return None
    if mask.dim() == 4:
        mask = mask[:, 0, 0]
        if mask.is_floating_point():
            return mask
    return torch.zeros_like(mask, dtype=hidden.dtype).masked_fill(mask == 0, float("-inf"))


class SparseAttentionUtils:
    """Functions that adapt a pretrained encoder, under DeepSpeed's names."""

    @staticmethod
    def extend_position_embedding(model: Any, max_position: int) -> Any:
        """``model``, a BERT or RoBERTa with a head, with learned positions repeated up to ``max_position``.

        Raises:
            ValueError: another model, or ``max_position`` is not more than it has.
        """
        kind, encoder = _encoder(model)
        reserved, embeddings = _RESERVED[kind], encoder.embeddings
        table = embeddings.position_embeddings
        have = table.weight.shape[0] - reserved
        if max_position <= have:
            raise ValueError(f"max_position is {max_position}, and the model has {have} positions already")
        repeats = -(-max_position // have)
        with torch.no_grad():
            first, positions = table.weight[:reserved], table.weight[reserved:]
            table.weight.data = torch.cat([first, positions.repeat(repeats, 1)[:max_position]])
        table.num_embeddings = max_position + reserved
        for name, values in (("position_ids", torch.arange(max_position + reserved)), ("token_type_ids", None)):
            buffer = getattr(embeddings, name, None)
            if isinstance(buffer, Tensor):
                long = torch.zeros(max_position + reserved, dtype=torch.long) if values is None else values
                setattr(embeddings, name, long.expand(1, -1).to(buffer.device))
        model.config.max_position_embeddings = max_position + reserved
        logger.info("position embeddings extended from %d to %d", have, max_position)
        return model

    @staticmethod
    def update_tokenizer_model_max_length(tokenizer: Any, max_position: int) -> Any:
        """``tokenizer``, which truncates at ``max_position`` tokens from now on."""
        tokenizer.model_max_length = max_position
        tokenizer.init_kwargs["model_max_length"] = max_position
        return tokenizer

    @staticmethod
    def replace_model_self_attention_with_sparse_self_attention(
        model: Any, max_position: int, sparsity_config: SparsityConfig | None = None
    ) -> Any:
        """``model``, a BERT or RoBERTa with a head, whose layers attend by a pattern; weights stay the same tensors.

        Args:
            max_position: longest sequence, without RoBERTa's two reserved positions.
            sparsity_config: for the model's heads; default ``FixedSparsityConfig``.

        Raises:
            ValueError: another model.
        """
        kind, encoder = _encoder(model)
        model.config.max_position_embeddings = max_position + _RESERVED[kind]
        _replace(model.config, encoder.encoder.layer, sparsity_config, max_position)
        return model

    @staticmethod
    def replace_self_attention_layer_with_sparse_self_attention_layer(
        config: Any, layers: Any, sparsity_config: SparsityConfig | None = None
    ) -> Any:
        """``layers``, each with ``attention.self.{query, key, value}``, with sparse self-attention in their place."""
        return _replace(config, layers, sparsity_config, int(config.max_position_embeddings))

    @staticmethod
    def pad_to_block_size(
        block_size: int,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        pad_token_id: int,
        model_embeddings: nn.Module | None,
    ) -> tuple[int, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Pad a batch on the right to a multiple of ``block_size``; call it before the embeddings.

        Args:
            input_ids, attention_mask, token_type_ids, position_ids: ``[batch, tokens]``; padded with ``pad_token_id``,
                0, 0 and ``pad_token_id``.
            inputs_embeds: ``[batch, tokens, hidden]``; padded with what ``model_embeddings`` makes of ``pad_token_id``.

        Returns:
            the number of tokens added, and the five in the same order; those that are None stay so.
        """
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None:
            raise ValueError("pad_to_block_size needs input_ids or inputs_embeds")
        added = -given.shape[1] % block_size
        if not added:
            return 0, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds
        if inputs_embeds is not None:
            if model_embeddings is None:
                raise ValueError("pad_to_block_size needs model_embeddings to pad inputs_embeds")
            shape = (inputs_embeds.shape[0], added)
            padding = torch.full(shape, pad_token_id, dtype=torch.long, device=inputs_embeds.device)
            inputs_embeds = torch.cat([inputs_embeds, model_embeddings(padding)], dim=1)

        def padded(tensor: Tensor | None, value: int) -> Tensor | None:
            return None if tensor is None else functional.pad(tensor, (0, added), value=value)

        return (
            added,
            padded(input_ids, pad_token_id),
            padded(attention_mask, 0),
            padded(token_type_ids, 0),
            padded(position_ids, pad_token_id),
            inputs_embeds,
        )

    @staticmethod
    def unpad_sequence_output(pad_len: int, sequence_output: Tensor) -> Tensor:
        """``[batch, tokens, hidden]`` without the last ``pad_len`` tokens."""
        return sequence_output[:, :-pad_len] if pad_len > 0 else sequence_output


def _encoder(model: Any) -> tuple[str, Any]:
    for kind in _RESERVED:
        if hasattr(model, kind):
            return kind, getattr(model, kind)
    raise ValueError(
        f"{type(model).__name__} has no .bert and no .roberta, the two kinds of model that this changes; any model of "
        'transformers gets sparse attention from the configuration: "ds_hf": {"sparse_attention": true}'
    )


def _replace(config: Any, layers: Any, sparsity_config: SparsityConfig | None, longest: int) -> Any:
    block = 16 if sparsity_config is None else sparsity_config.block
    for layer in layers:
        old = layer.attention.self
        new = _LayerAttention(config, sparsity_config, max_seq_length=-(-longest // block) * block)
        new.query, new.key, new.value = old.query, old.key, old.value
        new.train(old.training)
        new.sparse_self_attention.to(old.query.weight.device)
        layer.attention.self = new
    return layers
