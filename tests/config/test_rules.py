"""Rules across keys, and the line in which ``explain`` sums a configuration up."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import pytest

from ds_hf.config import ConfigError, check, load_config
from ds_hf.config.explain import rows, summary
from ds_hf.config.plan import plan_states

BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}


@pytest.mark.parametrize(
    ("section", "beside", "warned", "said"),
    [
        ({}, {}, "", "fp32 under autocast to bf16"),
        ({"dtype": "fp32"}, {}, "no effect", "fp32 under autocast to fp32"),
        ({}, BF16, "", "bf16 under autocast to bf16"),
        ({}, FP16, "parameters in fp16", "fp16 under autocast to bf16"),
        ({"dtype": "fp16"}, BF16, "parameters in bf16", "bf16 under autocast to fp16"),
    ],
)
def test_autocast_beside_other_formats(section: dict[str, Any], beside: dict[str, Any], warned: str, said: str) -> None:
    tree = {"train_batch_size": 1, "torch_autocast": {"enabled": True, **section}, **beside}
    config = load_config(tree, world_size=1)
    messages = [f"{fault.pointer} {fault.message}" for fault in config.warnings]
    assert len(messages) == bool(warned)
    assert all(text.startswith("/torch_autocast/dtype ") and warned in text for text in messages)
    assert said in summary(config)


@pytest.mark.parametrize(
    ("stage", "fp16", "warned"),
    [
        (0, {"hysteresis": 4}, "/fp16/hysteresis"),
        (0, {"consecutive_hysteresis": True}, "/fp16/consecutive_hysteresis"),
        (0, {"hysteresis": 2}, ""),
        (0, {"hysteresis": 4, "loss_scale": 8}, ""),
        (1, {"hysteresis": 4, "consecutive_hysteresis": True}, ""),
    ],
)
def test_hysteresis_has_no_effect_at_stage_0(stage: int, fp16: dict[str, Any], warned: str) -> None:
    zero = {"zero_optimization": {"stage": stage}}
    config = load_config({"train_batch_size": 1, "fp16": {"enabled": True, **fp16}, **zero}, world_size=1)
    assert [fault.pointer for fault in config.warnings] == [warned] * bool(warned)


def offload(own: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    zero = {"stage": 2, "offload_optimizer": {"device": device}}
    return {"train_batch_size": 1, "zero_optimization": zero, "ds_hf": {"offload": own}}


@pytest.mark.parametrize(
    ("own", "stream"),
    [({}, "auto"), ({"stream": "auto"}, "auto"), ({"stream": 0}, 0.0), ({"stream": 0.3}, 0.3), ({"stream": 1}, 1.0)],
)
def test_stream_is_a_share_or_auto(own: dict[str, Any], stream: Any) -> None:
    config = load_config(offload(own), world_size=1)
    assert config.ds_hf.offload.stream == stream
    assert type(config.ds_hf.offload.stream) is type(stream)
    assert config.warnings == ()


@pytest.mark.parametrize(
    ("stream", "message", "fix"),
    [
        ("fast", '"fast" is a string; expected a number or "auto"', 'give a number or "auto" (default "auto")'),
        (True, 'true is a boolean; expected a number or "auto"', 'give a number or "auto" (default "auto")'),
        (1.5, "1.5 is too large", "give at most 1"),
        (-0.1, "-0.1 is too small", "give at least 0"),
    ],
)
def test_stream_is_nothing_else(stream: Any, message: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(offload({"stream": stream}), world_size=1)
    (fault,) = caught.value.faults
    assert (fault.pointer, fault.message, fault.fix) == ("/ds_hf/offload/stream", message, fix)


@pytest.mark.parametrize(
    ("own", "device", "warned"),
    [
        ({"delayed": True}, "cpu", ""),
        ({"delayed": True, "stream": "auto"}, "cpu", ""),
        ({"delayed": True, "stream": 0.0}, "cpu", ""),
        ({"delayed": True, "stream": 0.3}, "cpu", "/ds_hf/offload/stream"),
        ({"stream": "auto"}, "none", ""),
        ({"stream": 0.0}, "none", ""),
        ({"stream": 0.3}, "none", "/ds_hf/offload"),
        ({"ratio": 0.5}, "none", "/ds_hf/offload"),
        ({"delayed": True}, "none", "/ds_hf/offload"),
    ],
)
def test_only_what_was_asked_for_can_be_without_effect(own: dict[str, Any], device: str, warned: str) -> None:
    config = load_config(offload(own, device), world_size=1)
    assert [fault.pointer for fault in config.warnings] == ([warned] if warned else [])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("block", [{"device": "cpu"}, {"device": "nvme"}, {"device": "nvme", "max_in_cpu": 5}])
def test_parameters_are_offloaded_at_stage_3_and_elsewhere_it_is_a_warning(stage: int, block: dict[str, Any]) -> None:
    path = {"nvme_path": "/fast"} if stage == 3 and block["device"] == "nvme" else {}
    zero = {"stage": stage, "offload_param": {**block, **path}}
    config = load_config({"train_batch_size": 1, "zero_optimization": zero}, world_size=1)
    warned = [(fault.pointer, fault.message, fault.fix) for fault in config.warnings]
    notes = {row.key: row.note for row in rows(config)}
    device = notes["zero_optimization.offload_param.device"]
    if stage == 3:
        assert (warned, device) == ([], "")
        assert f"parameters on {block['device']}" in summary(config)
        return
    message = f"no effect: parameters are offloaded at stage 3 alone, and the stage is {stage}"
    assert warned == [("/zero_optimization/offload_param", message, 'set "stage": 3, or remove it')]
    assert device == message
    assert "parameters on" not in summary(config)
    assert plan_states(config).parameters.device == "device"


def test_parameter_offload_while_the_stage_is_open() -> None:
    zero = {"stage": "auto", "offload_param": {"device": "cpu"}}
    assert load_config({"zero_optimization": zero}, allow_auto=True, check_batch=False).warnings == ()


def test_aio_is_of_no_use_where_only_ignored_parameters_go_to_nvme() -> None:
    zero = {"stage": 1, "offload_param": {"device": "nvme"}}
    config = load_config(
        {"train_batch_size": 1, "aio": {"intra_op_parallelism": 3}, "zero_optimization": zero}, world_size=1
    )
    assert [fault.pointer for fault in config.warnings] == ["/zero_optimization/offload_param", "/aio"]


def test_torch_adam_beside_params_is_a_warning() -> None:
    optimizer = {"type": "Adam", "params": {"lr": 0.1}, "torch_adam": True}
    config = load_config({"train_batch_size": 1, "optimizer": optimizer}, world_size=1)
    (warning,) = config.warnings
    assert warning.pointer == "/optimizer/torch_adam"
    assert "beside params" in warning.message
    assert config.optimizer is not None
    assert config.optimizer.params == {"lr": 0.1}


@pytest.mark.parametrize("key", ["loss_scale_window", "min_loss_scale"])
@pytest.mark.parametrize(
    ("fp16", "reason"),
    [({"enabled": True, "loss_scale": 128}, "fixed"), ({"enabled": False}, "not enabled"), ({}, "not")],
)
def test_negative_figures_of_a_scale_that_does_not_move(key: str, fp16: dict[str, Any], reason: str) -> None:
    config = load_config({"train_batch_size": 1, "fp16": {**fp16, key: -1}}, world_size=1)
    assert [fault.pointer for fault in config.warnings] == [f"/fp16/{key}"]
    assert reason in config.warnings[0].message
    with pytest.raises(ConfigError, match="too small for dynamic"):
        load_config({"train_batch_size": 1, "fp16": {"enabled": True, key: -1}}, world_size=1)


FLOODS: dict[str, Any] = {
    "top": {f"key_{i}": i for i in range(20000)},
    "section": {"zero_optimization": {f"stage3_key_{i}": i for i in range(20000)}},
    "optimizer": {"optimizer": {"type": "AdamW", "params": {f"lr{i}": 1 for i in range(20000)}}},
    "values": {"zero_optimization": {"leaf_module": {"classes": [1] * 20000}}},
    "auto": {f"key_{i}": "auto" for i in range(20000)},
    "not finite": {f"key_{i}": float("nan") for i in range(20000)},
    "text": json.dumps({f"key_{i}": i for i in range(20000)}),
    "twice": "{" + ", ".join(f'"key{i // 2}": 1' for i in range(20000)) + "}",
    "no texts": {i: i for i in range(20000)},
}


@pytest.mark.parametrize("kind", FLOODS)
def test_twenty_thousand_faults_are_a_page(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []

    def nearest(key: str, *rest: Any) -> str:
        looked.append(key)
        return "remove it"

    monkeypatch.setattr(check, "nearest", nearest)
    with pytest.raises(ConfigError) as caught:
        load_config(FLOODS[kind], world_size=1)
    assert len(str(caught.value)) < 4000
    assert "... and 31 more" in str(caught.value)
    assert "the check ended after 50 faults" in str(caught.value)  # among those that are shown
    assert len(looked) <= 50  # what takes the time: 7 ms each


LONG = "x" * 100_000


@pytest.mark.parametrize(
    "tree",
    [
        {LONG: 1},
        {LONG: float("nan")},
        {LONG: "auto"},
        {"zero_optimization": {LONG: {LONG: [float("inf")]}}},
        {"optimizer": {"type": "AdamW", "params": {LONG: 1}}},
        {"optimizer": {"type": LONG}},
        {"scheduler": {"type": LONG}},
        {"scheduler": {"type": "WarmupLR", "params": {LONG: 1}}},
        {(LONG,): 1},
        f'{{"{LONG}": 1, "{LONG}": 2}}',
        f'{{"{LONG}" 1}}',
        {"fp16": {LONG: object()}},
    ],
    ids=lambda tree: f"{len(str(tree))} characters",
)
def test_no_long_key_is_repeated(tree: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(tree, world_size=1)
    assert len(str(caught.value)) < 1500
    assert all(len(fault.message) + len(fault.fix) < 1000 for fault in caught.value.faults)


def test_a_long_key_in_a_warning_is_shortened(caplog: pytest.LogCaptureFixture) -> None:
    load_config({"train_batch_size": 1, f"fp16.{LONG}": 1}, world_size=1)
    assert "a key with a dot" in caplog.text
    assert len(caplog.text) < 1000


@pytest.mark.parametrize(
    ("zero", "warned"),
    [
        ({"stage": 0, "mics_shard_size": 2}, "no effect: nothing is divided at stage 0"),
        ({"stage": 2, "zero_hpz_partition_size": 2}, "no effect: parameters are divided at stage 3 alone"),
        ({"stage": 3, "mics_shard_size": 2, "mics_hierarchical_params_gather": True}, "no effect: NCCL finds the way"),
        ({"stage": 1, "mics_shard_size": 2}, ""),
        ({"stage": "auto", "mics_shard_size": 2}, ""),
    ],
)
def test_states_divided_inside_at_stages_that_do_not(zero: dict[str, Any], warned: str) -> None:
    tree = {"train_batch_size": 4, "zero_optimization": zero}
    found = load_config(tree, world_size=4, allow_auto=True)
    assert len(found.warnings) == bool(warned)
    assert all(warned in warning.message for warning in found.warnings)


@pytest.mark.parametrize(
    ("zero", "said"),
    [
        ({"stage": 3, "mics_shard_size": 2}, "states divided over groups of 2"),
        ({"stage": 3, "zero_hpz_partition_size": 2}, "parameters once more divided over groups of 2"),
        ({"stage": 2, "zero_hpz_partition_size": 2}, ""),
        ({"stage": 3, "mics_shard_size": 4}, ""),
    ],
)
def test_explain_tells_of_groups(zero: dict[str, Any], said: str) -> None:
    found = summary(load_config({"train_batch_size": 4, "zero_optimization": zero}, world_size=4))
    assert said in found
    assert ("groups of" in found) is bool(said)


@pytest.mark.parametrize("budget", [-0.1, 1.5, "half"])
def test_a_budget_of_activations_is_a_fraction(budget: Any) -> None:
    own = {"compile": "blocks", "activation_memory_budget": budget}
    with pytest.raises(ConfigError, match="activation_memory_budget"):
        load_config({"train_batch_size": 1, "ds_hf": own}, world_size=1)


def test_a_budget_of_activations_is_for_compiled_blocks() -> None:
    with pytest.raises(ConfigError) as raised:
        load_config({"train_batch_size": 1, "ds_hf": {"activation_memory_budget": 0.8}}, world_size=1)
    (fault,) = raised.value.faults
    assert fault.pointer == "/ds_hf/activation_memory_budget"
    assert fault.fix == 'add "compile": "blocks" to ds_hf, or remove it'


@pytest.mark.parametrize("beside", [False, True])
def test_a_budget_beside_activations_in_host_memory(beside: bool) -> None:
    own = {"compile": "blocks", "activation_memory_budget": 0, "offload_activations": beside}
    config = load_config({"train_batch_size": 1, "ds_hf": own}, world_size=1)
    assert config.ds_hf.activation_memory_budget == 0
    assert ["checkpointed blocks" in fault.message for fault in config.warnings] == [True] * beside


@pytest.mark.parametrize("captured", [False, True])
def test_padding_is_for_captured_blocks(captured: bool) -> None:
    own = {"capture_pad_to_multiple_of": 128, **({"capture": "blocks"} if captured else {})}
    config = load_config({"train_batch_size": 1, "ds_hf": own}, world_size=1)
    assert config.ds_hf.capture_pad_to_multiple_of == 128
    told = [("/ds_hf/capture_pad_to_multiple_of", 'add "capture": "blocks" to ds_hf, or remove it')]
    assert [(fault.pointer, fault.fix) for fault in config.warnings] == ([] if captured else told)
    with pytest.raises(ConfigError, match="capture_pad_to_multiple_of"):
        load_config({"train_batch_size": 1, "ds_hf": {**own, "capture_pad_to_multiple_of": 0}}, world_size=1)


def test_a_pattern_that_only_scripts_read_is_told() -> None:
    tree: dict[str, Any] = {"train_batch_size": 1, "sparse_attention": {"mode": "bigbird", "num_random_blocks": 2}}
    assert [(fault.pointer, fault.fix) for fault in load_config(tree).warnings] == [
        ("/sparse_attention", 'for a model of transformers add "ds_hf": {"sparse_attention": true}')
    ]
    used = load_config({**tree, "ds_hf": {"sparse_attention": "all"}})
    assert used.warnings == ()
    assert used.sparse_attention.num_random_blocks == 2
    assert used.sparse_attention.global_block_indices == (0,)


@pytest.mark.parametrize(("tiles", "refused"), [(None, False), (1, False), (2, True), ("auto", True)])
def test_tiles_beside_divided_tokens(tiles: Any, refused: bool) -> None:
    own = {"tensor_sequence_parallel": True, "tiled_mlp": tiles}
    tree = {"train_batch_size": 1, "tensor_parallel": {"autotp_size": 2}, "ds_hf": own}
    with pytest.raises(ConfigError, match="/ds_hf/tiled_mlp: tiles are") if refused else nullcontext():
        assert load_config(tree, world_size=2).ds_hf.tiled_mlp == tiles
