"""``deepspeed.runtime.data_pipeline.data_routing.basic_layer``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ds_hf.data.layer_tokens import draw, put, select, take
from ds_hf.data.token_schedule import RandomLTDScheduler

__all__ = ["RandomLayerTokenDrop"]


class RandomLayerTokenDrop(nn.Module):
    """A layer that computes with some of the tokens while it trains, for loops without an engine.

    Args:
        layer: takes hidden states first, and the rest by name.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.random_ltd_layer = layer
        self.random_ltd_scheduler: RandomLTDScheduler | None = None
        self.random_ltd_layer_id = 0
        self._dim, self._mask = 1, None

    def init_config(self, config: Mapping[str, Any], scheduler: RandomLTDScheduler, random_ltd_layer_id: int) -> None:
        """Drop tokens from now on, as many as ``scheduler`` says."""
        self.random_ltd_scheduler, self.random_ltd_layer_id = scheduler, random_ltd_layer_id
        self._mask = config.get("model_mask_name")
        self._dim = 0 if config.get("hidden_state_order") == "seq_batch_dim" else 1

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        """What the layer gives, with the other tokens as they came."""
        positions, batch = hidden_states.shape[self._dim], hidden_states.shape[1 - self._dim]
        scheduler = self.random_ltd_scheduler
        if scheduler is None or not self.training or scheduler.get_current_seq() >= positions:
            return self.random_ltd_layer(hidden_states, **kwargs)
        seed = int(torch.randint(1 << 31, ()))  # of torch's stream, so that a recomputation draws the same
        places = draw(batch, positions, scheduler.get_current_seq(), seed, hidden_states.device)
        kwargs = {name: select(name, value, places, positions, self._mask) for name, value in kwargs.items()}
        output = self.random_ltd_layer(take(hidden_states, places, self._dim), **kwargs)
        if isinstance(output, Tensor):
            return put(hidden_states, output, places, self._dim)
        return type(output)([put(hidden_states, output[0], places, self._dim), *output[1:]])
