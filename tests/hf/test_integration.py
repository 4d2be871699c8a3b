"""Sizes that the Trainer fills in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import BertConfig, EncoderDecoderConfig
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

AUTO = {
    "stage": 3,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
}


def _finalized(config: Any) -> dict[str, Any]:
    made = HfTrainerDeepSpeedConfig({"zero_optimization": dict(AUTO)})
    args = SimpleNamespace(get_warmup_steps=lambda steps: 0, deepspeed_plugin=None, deepspeed="file")
    made.trainer_config_finalize(args, SimpleNamespace(config=config), 10)
    found: dict[str, Any] = made.config["zero_optimization"]
    return found


def _bert(width: int) -> BertConfig:
    return BertConfig(vocab_size=8, hidden_size=width, num_hidden_layers=1, num_attention_heads=4, intermediate_size=8)


@pytest.mark.parametrize("config", [_bert(32), EncoderDecoderConfig.from_encoder_decoder_configs(_bert(16), _bert(32))])
def test_sizes_follow_the_widest_part(config: Any) -> None:
    found = _finalized(config)
    assert found["reduce_bucket_size"] == 32 * 32
    assert found["stage3_prefetch_bucket_size"] == int(0.9 * 32 * 32)
    assert found["stage3_param_persistence_threshold"] == 320


def test_defaults_hold_where_no_width_is_known() -> None:
    assert _finalized(SimpleNamespace(layers=1)) == {"stage": 3}
