"""What travels in few bits: DeepSpeed's keys and ds_hf's, and combinations that cannot work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ds_hf.config import load_config
from ds_hf.config.explain import summary, wire_notes
from ds_hf.config.plan import plan_states
from ds_hf.config.wire_seconds import wire_seconds
from ds_hf.errors import ConfigError
from ds_hf.measure.links import MeasuredLinks

LOCO = {"zeropp_loco_param": {}}


def config(stage: int, zero: dict[str, Any], wire: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    own = {} if wire is None else {"ds_hf": {"wire": wire}}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, **zero},
        **own,
        **more,
    }


@pytest.mark.parametrize(
    ("stage", "zero", "wire", "bits"),
    [
        (3, {}, None, (None, None)),
        (3, {"zero_quantized_weights": True}, None, (8, None)),
        (3, {"zero_quantized_gradients": True}, None, (None, 4)),
        (2, {"zero_quantized_gradients": True}, {"gradients": 8}, (None, 8)),
        (1, {}, {"gradients": 4}, (None, 4)),
        (3, {"zero_quantized_gradients": True, "zero_quantized_weights": True}, {"gradients": 16}, (8, None)),
        (3, {"zero_quantized_weights": True}, {"parameters": 16}, (None, None)),
        (3, {}, {"parameters": 8, "gradients": 8}, (8, 8)),
    ],
)
def test_bits(stage: int, zero: dict[str, Any], wire: dict[str, Any] | None, bits: tuple[int, int]) -> None:
    plan = plan_states(load_config(config(stage, zero, wire), world_size=4))
    assert (plan.parameters.bits, plan.gradients.bits) == bits
    assert (plan.optimizer.bits, plan.loco, plan.first_hop) == (None, None, "auto")


def test_what_has_no_effect_is_told() -> None:
    def told(stage: int, zero: dict[str, Any], wire: dict[str, Any]) -> list[str]:
        return [warning.pointer for warning in load_config(config(stage, zero, wire), world_size=8).warnings]

    hop, block = "/ds_hf/wire/first_hop", "/ds_hf/wire/block"
    assert told(2, {}, {"first_hop": 4, "block": 512}) == [hop, block]
    assert told(3, {"zero_quantized_weights": True}, {"first_hop": 4, "block": 512}) == [hop]
    assert told(2, {}, {"first_hop": 4, "block": 512, "gradients": 8}) == []


def test_feedback_and_hops() -> None:
    zero = {"zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.5}}
    plan = plan_states(load_config(config(2, zero, {"first_hop": 4, "block": 512}), world_size=8))
    assert (plan.loco, plan.first_hop, plan.block) == ((0.5, 1024), 4, 512)


@pytest.mark.parametrize(
    ("tree", "pointer", "words"),
    [
        (config(2, {"zero_quantized_weights": True}), "/zero_optimization/zero_quantized_weights", ("stage 2", "3")),
        (config(0, {"zero_quantized_gradients": True}), "/zero_optimization/zero_quantized_gradients", ("OneBitAdam",)),
        (config(0, {}, {"gradients": 8}), "/ds_hf/wire/gradients", ("stage 0",)),
        (
            config(0, {}, {"gradients": 8}, optimizer={"type": "OneBitAdam", "params": {"lr": 1e-3}}),
            "/ds_hf/wire/gradients",
            ("remove it", "OneBitAdam sends"),
        ),
        (config(2, {}, {"gradients": 1}), "/ds_hf/wire/gradients", ("fix: choose 16, 8, 4",)),
        (config(1, {}, {"parameters": 8}), "/ds_hf/wire/parameters", ("stage 1",)),
        (config(3, LOCO), "/zero_optimization/zeropp_loco_param", ("zero_quantized_gradients",)),
        (
            config(2, {"zero_quantized_gradients": True, **LOCO}, {"gradients": 16}),
            "/zero_optimization/zeropp_loco_param",
            ("as they are",),
        ),
        (config(2, {}, {"gradients": 8}, gradient_allreduce_op="sum"), "/gradient_allreduce_op", ("mean",)),
        (config(2, {"mics_shard_size": 2}, {"gradients": 8}), "/ds_hf/wire/gradients", ("zero_hpz_partition_size",)),
    ],
)
def test_what_cannot_work_is_a_fault(tree: dict[str, Any], pointer: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(tree, world_size=4)
    assert pointer in str(error.value)
    assert all(word in str(error.value) for word in words)


def test_explain_says_what_is_saved_and_what_it_costs() -> None:
    assert wire_notes(load_config(config(3, {}), world_size=4)) == []
    zero = {"zero_quantized_gradients": True, "zero_quantized_weights": True, **LOCO}
    tree = load_config(config(3, zero, bf16={"enabled": True}), world_size=4)
    gradients, parameters, feedback, last = wire_notes(tree)
    assert "0.52 bytes an element instead of 2 (3.9 times fewer)" in gradients
    assert "1.02 bytes an element instead of 2 (2.0 times fewer)" in parameters
    assert "2 bytes an element" in feedback
    assert "NVLink nothing is gained" in last
    assert "gradients in 4 bits and parameters in 8 bits between processes" in summary(tree)
    one_bit = config(0, {}, optimizer={"type": "OneBitAdam", "params": {"freeze_step": 10}})
    first, _ = wire_notes(load_config(one_bit, world_size=4))
    assert "32 times fewer" in first


def test_seconds_on_links_that_were_measured() -> None:
    links = MeasuredLinks("a CPU", between=1e9, processes=4, hosts=2, backend="gloo", packed=1e10, day="2026-11-25")
    zero = {"zero_quantized_gradients": True, "zero_quantized_weights": True}
    tree = load_config(config(3, zero, bf16={"enabled": True}, gradient_accumulation_steps=2), world_size=4)
    text = wire_seconds(tree, links)
    # gradients twice, weights four times, three quarters of each element leave a process
    saved = 0.75 * (2 * (2 - 4 / 8 - 4 / 256) + 4 * (2 - 8 / 8 - 4 / 256))
    assert f"waits {saved:.2g} s less for bytes and packs for 0.6 s: {saved - 0.6:.2g} s are gained" in text
    assert "4 processes on 2 hosts over gloo, 1 GB/s each; 2026-11-25" in text
    assert "are lost" in wire_seconds(tree, replace(links, between=1e11))
    one_bit = config(0, {}, optimizer={"type": "OneBitAdam", "params": {"freeze_step": 10}}, bf16={"enabled": True})
    text = wire_seconds(load_config(one_bit, world_size=4), links)
    assert f"waits {1.5 * (2 - 1 / 8 - 4 / 4096):.2g} s less" in text
    neighbours = wire_seconds(tree, MeasuredLinks("a GPU", neighbours=4e11))
    assert "from GPU to GPU of this host, 400 GB/s" in neighbours
    assert "ds_hf.cli doctor" in neighbours
    assert "has measured no link" in wire_seconds(tree, MeasuredLinks("a CPU"))
