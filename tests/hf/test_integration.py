"""Sizes that the Trainer fills in."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, EncoderDecoderConfig
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from ds_hf.hf import integration
from ds_hf.hf.source import fill_sizes

AUTO = {
    "stage": 3,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
}


def _finalized(config: Any, **more: Any) -> dict[str, Any]:
    made = HfTrainerDeepSpeedConfig({"zero_optimization": {**AUTO, **more}})
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


@pytest.mark.parametrize("stage", [2, 3])
def test_nothing_is_left_for_accelerate_where_it_sees_no_width(stage: int) -> None:
    clip = SimpleNamespace(text_config=_bert(32), vision_config=_bert(16))
    found = _finalized(clip, stage=stage)
    assert found == {
        "stage": stage,
        "reduce_bucket_size": 32 * 32,
        "stage3_prefetch_bucket_size": int(0.9 * 32 * 32),
        "stage3_param_persistence_threshold": 320,
    }


@pytest.mark.parametrize("config", [SimpleNamespace(layers=1), SimpleNamespace(hidden_size=None)])
def test_defaults_hold_where_no_width_is_known(config: Any) -> None:
    assert _finalized(config) == {"stage": 3}


@pytest.mark.parametrize("config", [EncoderDecoderConfig.from_encoder_decoder_configs(_bert(16), _bert(32)), None])
def test_accelerates_own_loop_needs_no_width_at_the_top(config: Any) -> None:
    made = HfDeepSpeedConfig({"zero_optimization": dict(AUTO)})
    model = nn.Linear(2, 2)
    model.config = config  # type: ignore[assignment]
    fill_sizes(made, model.config)
    assert made.config["zero_optimization"].get("reduce_bucket_size") == (32 * 32 if config else None)
    assert "auto" not in made.config["zero_optimization"].values()


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_what_trl_forces_at_stage_three_is_undone(keep: bool, stage: int) -> None:
    model = nn.Sequential(nn.Linear(2, 2, dtype=torch.bfloat16))
    model.lora_A = nn.Linear(2, 1, dtype=torch.bfloat16)
    block: Any = model[0]
    block._gradient_checkpointing_func = partial(checkpoint, use_reentrant=True, preserve_rng_state=False)
    model.peft_config = model.config = {}  # type: ignore[assignment]
    config = HfTrainerDeepSpeedConfig(
        {"zero_optimization": {"stage": stage}, "ds_hf": {"trl_workarounds": keep}, "bf16": {"enabled": False}}
    )
    arguments = type("SFTConfig", (), {"__module__": "trl.trainer.sft_config"})()
    arguments.gradient_checkpointing_kwargs = {"use_reentrant": True}
    integration._finalize(lambda *args: None, config, (arguments, model, 3), {})
    left = keep or stage < 3
    assert arguments.gradient_checkpointing_kwargs == {"use_reentrant": left}
    assert block._gradient_checkpointing_func.keywords == {"use_reentrant": left, "preserve_rng_state": False}
    assert model.lora_A.weight.dtype is (torch.bfloat16 if left else torch.float32)
    assert block.weight.dtype is torch.bfloat16
