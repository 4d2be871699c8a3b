"""``load_config``: sources, leniency, older names, defaults, provenance, warnings."""

from __future__ import annotations

import base64
import dataclasses
import enum
import json
import logging
import math
import pickle
from collections import OrderedDict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from ds_hf import log
from ds_hf.config import Config, ConfigError, load_config
from ds_hf.config.plan import plan_states
from ds_hf.config.schema import schema_text, walk
from ds_hf.config.types import OptimizerSection, OriginKind

BATCH = {"train_micro_batch_size_per_gpu": 1}


def load(tree: dict[str, Any], **kwargs: Any) -> Config:
    return load_config({**BATCH, **tree}, world_size=1, **kwargs)


def refused(tree: dict[str, Any], **kwargs: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        load(tree, **kwargs)
    return {fault.pointer: fault.message for fault in caught.value.faults}


def test_every_kind_of_source_gives_the_same_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {**BATCH, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    text = json.dumps(tree)
    path = tmp_path / "ds.json"
    path.write_text(text)
    (tmp_path / "utf16.json").write_bytes(text.encode("utf-16"))
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    sources: list[Any] = [tree, OrderedDict(tree), MappingProxyType(tree), path, str(path), text, "\n" + text, encoded]
    sources += [encoded.rstrip("="), tmp_path / "utf16.json"]
    configs = [load_config(source, world_size=1) for source in sources]
    assert all(
        dataclasses.replace(config, source="") == dataclasses.replace(configs[0], source="") for config in configs
    )
    assert configs[3].source == str(path)


def test_the_given_dict_is_not_changed() -> None:
    tree = {**BATCH, "zero_optimization": {"stage": 2, "cpu_offload": True, "reduce_bucket_size": 5e8}}
    before = json.dumps(tree)
    config = load_config(tree, world_size=1)
    assert json.dumps(tree) == before
    config.resolved["zero_optimization"]["stage"] = 0
    assert json.dumps(tree) == before


@pytest.mark.parametrize(
    "source", [None, 3, 2.5, b"{}", [], ["zero2"], object(), {1, 2}, "", "  ", "a" * 5000, "\0", "zero9"]
)
def test_other_sources_are_refused(source: object) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(source, world_size=1)
    assert caught.value.faults[0].fix


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\x80\x81\x00\xff" * 10)
    (tmp_path / "ds_config.json").write_text("{}")
    for path, word in [
        (tmp_path, "folder"),
        (tmp_path / "binary", "not text"),
        (tmp_path / "ds_confg.json", "no file"),
    ]:
        with pytest.raises(ConfigError, match=word) as caught:
            load_config(path, world_size=1)
    assert "did you mean ds_config.json" in str(caught.value)


def test_dicts_that_are_no_json() -> None:
    class Device(str, enum.Enum):
        CPU = "cpu"

    cycle: dict[str, Any] = dict(BATCH)
    cycle["zero_optimization"] = cycle
    assert "contains itself" in refused({"zero_optimization": cycle})["/zero_optimization/zero_optimization"]
    assert "is a int" in refused({1: 2})[""]  # type: ignore[dict-item]
    assert "cannot be written as JSON" in refused({"gradient_clipping": object()})["/gradient_clipping"]
    assert "far too large" in refused({"train_batch_size": 10**5000})["/train_batch_size"]
    zero = {"stage": 3, "offload_param": {"device": Device.CPU, "nvme_path": Path("/x")}}
    config = load({"zero_optimization": zero})
    assert config.resolved["zero_optimization"]["offload_param"] == {"device": "cpu", "nvme_path": "/x"}
    assert type(config.zero_optimization.offload_param.device) is str


def test_defaults_are_those_of_deepspeed() -> None:
    config = load({})
    assert config.gradient_clipping == 1.0
    assert config.zero_optimization.stage == 0
    assert config.bf16.check_grad_overflow is True
    assert config.fp16.initial_scale_power == 16
    assert config.zero_optimization.offload_optimizer.device == "none"
    assert config.zero_optimization.offload_optimizer.pin_memory is True
    assert config.optimizer is None
    assert config.scheduler is None
    assert config.steps_per_print is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.gradient_clipping = 2.0  # type: ignore[misc]


def test_what_accelerate_and_the_trainer_send_is_accepted_silently() -> None:
    none = {"device": "none", "nvme_path": None}
    config = load(
        {
            "steps_per_print": math.inf,
            "fp16": {"enabled": False, "auto_cast": True},
            "bf16": {"enabled": False},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": 0, "offload_optimizer": none, "offload_param": none},
        }
    )
    assert config.steps_per_print == math.inf
    assert config.warnings == ()


def test_numbers_and_booleans_as_texts_give_one_warning() -> None:
    config = load({"gradient_clipping": "0.5", "zero_optimization": {"stage": "2"}, "bf16": {"enabled": "true"}})
    assert (config.gradient_clipping, config.zero_optimization.stage, config.bf16.enabled) == (0.5, 2, True)
    assert len(config.warnings) == 1
    assert all(name in config.warnings[0].message for name in ("gradient_clipping", "stage", "bf16.enabled"))


def test_integral_floats_and_fractions_of_the_prefetch_size() -> None:
    config = load({"zero_optimization": {"reduce_bucket_size": 5e7, "stage3_prefetch_bucket_size": 943718.4}})
    assert config.zero_optimization.reduce_bucket_size == 50_000_000
    assert type(config.zero_optimization.reduce_bucket_size) is int
    assert config.zero_optimization.stage3_prefetch_bucket_size == 943718
    assert (
        "fraction"
        in refused({"zero_optimization": {"reduce_bucket_size": 0.5}})["/zero_optimization/reduce_bucket_size"]
    )


def test_fixed_words_in_any_letter_case_and_synonyms() -> None:
    config = load(
        {
            "gradient_allreduce_op": "Mean",
            "communication_data_type": "BFloat16",
            "checkpoint": {"tag_validation": "FAIL"},
        }
    )
    assert (config.gradient_allreduce_op, config.communication_data_type) == ("mean", "bf16")
    assert config.checkpoint.tag_validation == "Fail"


def test_keys_with_dots_are_ignored_with_a_warning() -> None:
    config = load({"zero_optimization.reduce_bucket_size": 1, "zero_optimization": {"stage": 1}})
    assert [warning.pointer for warning in config.warnings] == ["/zero_optimization.reduce_bucket_size"]
    assert "/nothing.here" in refused({"nothing.here": 1})


@pytest.mark.parametrize(
    ("tree", "path", "value"),
    [
        ({"zero_optimization": True}, "zero_optimization.stage", 1),
        ({"zero_optimization": False}, "zero_optimization.stage", 0),
        ({"zero_optimization": True, "allgather_size": 5e7}, "zero_optimization.allgather_bucket_size", 50_000_000),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, "zero_optimization.offload_optimizer.device", "cpu"),
        (
            {"zero_optimization": {"stage": 2, "cpu_offload": False}},
            "zero_optimization.offload_optimizer.device",
            "none",
        ),
        (
            {"zero_optimization": {"stage": 3, "cpu_offload_param": True}},
            "zero_optimization.offload_param.device",
            "cpu",
        ),
        ({"zero_optimization": {"stage": 3, "cpu_offload_params": 1}}, "zero_optimization.offload_param.device", "cpu"),
        (
            {"zero_optimization": {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True}},
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
            True,
        ),
        ({"fp16_enabled": True}, "fp16.enabled", True),
        ({"fp16": True}, "fp16.enabled", True),
        ({"fp16": {"enabled": True}, "loss_scale": 128}, "fp16.loss_scale", 128.0),
        ({"bfloat16": {"enabled": "true"}}, "bf16.enabled", True),
        ({"bfloat16": True}, "bf16.enabled", True),
        ({"bf16": {"check_overflow": False}}, "bf16.check_grad_overflow", False),
        ({"fp32_allreduce": True}, "communication_data_type", "fp32"),
        ({"aio": {"thread_count": 4}}, "aio.intra_op_parallelism", 4),
        ({"elasticity": {"prefer_large_batch": False}}, "elasticity.prefer_larger_batch", False),
        ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 0.5}}}, "gradient_clipping", 0.5),
    ],
)
def test_older_names_work(tree: dict[str, Any], path: str, value: object) -> None:
    config = load(tree)
    found: Any = config
    for key in path.split("."):
        found = getattr(found, key)
    assert found == value
    assert type(found) is type(value)
    older = [w for w in config.warnings if "older" in w.message or "2020" in w.message]
    assert older
    assert len({warning.pointer for warning in older}) == len(older), "one warning each"


@pytest.mark.parametrize(
    ("tree", "off"),
    [
        (
            {"zero_optimization": {"stage": 1, "cpu_offload": False, "offload_optimizer": {"device": "cpu"}}},
            "cpu_offload",
        ),
        ({"communication_data_type": "fp32", "fp32_allreduce": False}, "fp32_allreduce"),
    ],
)
def test_an_older_name_that_is_off_says_nothing_beside_the_newer_one(tree: dict[str, Any], off: str) -> None:
    config = load(tree)
    assert config.zero_optimization.offload_optimizer.device == ("cpu" if off == "cpu_offload" else "none")
    assert config.communication_data_type == (None if off == "cpu_offload" else "fp32")
    (warning,) = (one for one in config.warnings if off in one.pointer)
    assert "switched off" in warning.message


def test_pinning_of_2021_goes_to_the_blocks_that_are_there() -> None:
    zero = {"stage": 3, "cpu_offload": True, "cpu_offload_use_pin_memory": False}
    config = load({"zero_optimization": zero})
    assert config.zero_optimization.offload_optimizer.pin_memory is False
    assert config.zero_optimization.offload_param.pin_memory is True


def test_older_names_of_schedules_and_optimizers() -> None:
    scheduler = {
        "type": "OneCycle",
        "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "post_cycle_decay_step_size": 7},
    }
    optimizer = {"type": "Adam", "params": {"lr": 1, "adamw_mode": False}}
    config = load({"scheduler": scheduler, "optimizer": optimizer})
    assert config.scheduler is not None
    assert config.optimizer is not None
    assert config.scheduler.params["decay_step_size"] == 7
    assert config.optimizer.params == {"lr": 1, "adam_w_mode": False}


# DeepSpeed's name of the field -> the key, which is the field's alias in its models (0.18.9, 0.19.6 and 0.19.8).
OWN_NAMES: dict[str, tuple[str, Any]] = {
    "zero_optimization.prefetch_bucket_size": ("stage3_prefetch_bucket_size", 7),
    "zero_optimization.param_persistence_threshold": ("stage3_param_persistence_threshold", 7),
    "zero_optimization.model_persistence_threshold": ("stage3_model_persistence_threshold", 7),
    "zero_optimization.max_live_parameters": ("stage3_max_live_parameters", 7),
    "zero_optimization.max_reuse_distance": ("stage3_max_reuse_distance", 7),
    "zero_optimization.gather_16bit_weights_on_model_save": ("stage3_gather_16bit_weights_on_model_save", True),
    "zero_optimization.module_granularity_threshold": ("stage3_module_granularity_threshold", 7),
    "zero_optimization.use_all_reduce_for_fetch_params": ("stage3_use_all_reduce_for_fetch_params", True),
    "zero_optimization.allgather_sequential": ("stage3_allgather_sequential", True),
    "tensor_parallel.tensor_parallel": ("tp", {"tp_size": 1, "tp_grain_size": 1}),
    "tensor_parallel.replace_with_kernel_inject": ("kernel_inject", True),
}


@pytest.mark.parametrize("name", OWN_NAMES)
def test_the_name_that_deepspeed_has_for_a_field_is_as_good_as_its_alias(name: str) -> None:
    section, _, own = name.partition(".")
    alias, value = OWN_NAMES[name]
    by_own, by_alias = load({section: {own: value}}), load({section: {alias: value}})
    assert by_own == by_alias  # but for warnings, which name the key in both
    assert by_own.resolved == by_alias.resolved == {**by_alias.resolved, section: {alias: value}}
    assert [fault.message for fault in by_own.warnings] == [fault.message for fault in by_alias.warnings]
    assert load({section: {own: value, alias: value}}).resolved == by_alias.resolved
    other = not value if isinstance(value, bool) else {"tp_size": 1} if isinstance(value, dict) else 8
    (told,) = refused({section: {own: value, alias: other}}).values()
    assert told.startswith(f"{name} and {alias} are two names of one setting, and say ")


def test_the_schema_has_each_own_name_of_deepspeed() -> None:
    found = {".".join(path): node["x-alias-of"] for path, node in walk() if "x-alias-of" in node}
    assert found == {name: alias for name, (alias, _) in OWN_NAMES.items()}
    for name, (_, value) in OWN_NAMES.items():  # what an editor reads
        section, _, own = name.partition(".")
        raw = Draft202012Validator(json.loads(schema_text()))
        assert raw.is_valid({section: {own: value}})
        assert not raw.is_valid({section: {own: []}})


def test_values_by_own_names_are_checked_and_converted_like_others() -> None:
    config = load(
        {"zero_optimization": {"stage": 3, "prefetch_bucket_size": 0.5e6, "param_persistence_threshold": "9"}}
    )
    zero = config.zero_optimization
    assert (zero.stage3_prefetch_bucket_size, zero.stage3_param_persistence_threshold) == (500_000, 9)
    assert plan_states(config).whole_below == 9
    wrong = {"stage": 3, "max_live_parameters": -1, "prefetch_bucket_size": "many"}
    assert sorted(refused({"zero_optimization": wrong})) == [
        "/zero_optimization/max_live_parameters",
        "/zero_optimization/prefetch_bucket_size",
    ]
    zero = load({"zero_optimization": {"stage": 3, "param_persistence_threshold": "auto"}}).zero_optimization
    assert zero.stage3_param_persistence_threshold == 100_000


def test_comments_and_foreign_sections_of_clients_files_are_ignored_with_a_warning() -> None:
    """As in LLaMA-Factory's ``ds_z2_autotp_config.json`` and ``ds_z3_fp8_config.json``."""
    foreign = {"comms_config": {"verbose": False}, "monitor_config": {"enabled": True, "csv_monitor": {}}}
    tree = {"_comment": "see the manual", "zero_optimization": {"stage": 2, "//": 1, "comment": []}, **foreign}
    config = load(tree)
    assert config.resolved == load({"zero_optimization": {"stage": 2}}).resolved
    assert {fault.pointer: fault.message for fault in config.warnings} == {
        "/_comment": "ignored: taken for a comment",
        "/zero_optimization/~1~1": "ignored: taken for a comment",
        "/zero_optimization/comment": "ignored: taken for a comment",
        "/comms_config": "ignored: DeepSpeed has no such key, and reads comms_logger",
        "/monitor_config": "ignored: DeepSpeed has no such key, and reads tensorboard, wandb, comet and csv_monitor",
    }
    assert list(refused({"commentary": 1, "optimizer": {"type": "Adam", "_note": ""}})) == ["/commentary"]
    assert "_note" in str(refused({"optimizer": {"type": "Adam", "params": {"lr": 1, "_note": ""}}}))


def test_one_bit_optimizers_correct_no_bias() -> None:
    config = load({"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "bias_correction": True}}})
    assert [fault.pointer for fault in config.warnings] == ["/optimizer/params/bias_correction"]


def test_grad_hooks_of_the_documentation_is_ignored_with_a_warning() -> None:
    config = load({"zero_optimization": {"grad_hooks": True}})
    assert "DeepSpeed's code has no such key" in config.warnings[0].message


@pytest.mark.parametrize(
    "tree",
    [
        {"zero_optimization": {"reduce_bucket_size": 1000}},
        {"zero_optimization": {"overlap_comm": False}},
        {"zero_optimization": {"round_robin_gradients": True}},
        {"timers": {"throughput": {"synchronized": False}}},
        {"activation_checkpointing": {"partition_activations": True}},
        {"graph_harvesting": True},
        {"autotuning": {"enabled": True}},
        {"pipeline": {"seed_layers": True}},
        {"aio": {"queue_depth": 32}},
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "buffer_count": 9}}},
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "max_in_cpu": 9}}},
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none", "ratio": 0.5}}},
        {"zero_optimization": {"stage": 2}, "ds_hf": {"offload": {"stream": 0.5}}},
        {"vocabulary_size": 100},
        {"datastates_ckpt": {"host_cache_size": 4}},
        {"checkpoint": {"writer": {"type": "fast"}}},
        {"prescale_gradients": True, "gradient_predivide_factor": 2.0},
    ],
)
def test_settings_without_effect_warn_once_with_a_reason(tree: dict[str, Any]) -> None:
    warnings = load(tree).warnings
    assert len(warnings) == 1
    assert warnings[0].message.startswith("no effect: ")
    assert warnings[0].pointer.startswith("/" + list(tree)[-1])


def test_settings_at_their_defaults_or_switched_off_are_silent() -> None:
    config = load(
        {
            "zero_optimization": {
                "reduce_bucket_size": 5e8,
                "overlap_comm": True,
                "mics_shard_size": -1,
                "zenflow": None,
            },
            "tensorboard": {"enabled": False, "output_path": "x"},
            "flops_profiler": {"enabled": False, "profile_step": 7},
            "activation_checkpointing": {"partition_activations": False},
            "elasticity": {"enabled": False},
            "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}},
            "tensor_parallel": {"autotp_size": 0},
            "hybrid_engine": {"enabled": False, "max_out_tokens": 128},
            "pipeline": {"stages": "auto"},
            "timers": {"throughput": {"enabled": False}},
            "comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["all_reduce"]},
            "data_types": {"keep_in_fp32_modules": "auto"},
        }
    )
    assert config.warnings == ()


def test_auto_is_kept_where_the_trainer_fills_it() -> None:
    tree = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "bf16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
    }
    config = load_config(tree, allow_auto=True, world_size=2)
    assert config.resolved == tree
    assert (config.train_batch_size, config.bf16.enabled, config.gradient_clipping) == (None, False, 1.0)
    assert config.zero_optimization.reduce_bucket_size == 500_000_000
    assert config.provenance["/bf16/enabled"].kind is OriginKind.AUTO
    assert config.warnings == ()
    assert len(refused(tree)) == 6
    overlap = {"zero_optimization": {"overlap_comm": "auto"}}
    assert "/zero_optimization/overlap_comm" in refused(overlap, allow_auto=True)


def test_auto_of_sizes_that_follow_from_the_model_needs_nobody_to_fill_it() -> None:
    """TRL gives ``initialize`` the reference model with the file of the policy, before the Trainer fills these in."""
    sizes = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    config = load({"zero_optimization": {"stage": 3, **dict.fromkeys(sizes, "auto")}})
    plain = load({"zero_optimization": {"stage": 3}})
    assert config.zero_optimization == plain.zero_optimization
    assert not any(config.is_given(f"/zero_optimization/{size}") for size in sizes)


def test_auto_of_other_sizes_is_their_default() -> None:
    """As in the files that OpenRLHF makes, for DeepSpeed leaves such values out."""
    sizes = ("allgather_bucket_size", "sub_group_size", "stage3_model_persistence_threshold")
    limits = ("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_module_granularity_threshold")
    left_out = {"zero_optimization": {"stage": 3, **dict.fromkeys(sizes + limits, "auto")}}
    assert load(left_out).zero_optimization == load({"zero_optimization": {"stage": 3}}).zero_optimization
    assert not load(left_out).warnings


def test_what_is_asked_for_and_is_so_is_not_told() -> None:
    """DeepSpeed-Chat's files ask for torch's linear function, and no other is here."""
    assert not load({"zero_optimization": {"stage": 3, "memory_efficient_linear": False}}).warnings


def test_auto_that_accelerate_fills() -> None:
    zero: dict[str, Any] = {"stage": "auto", "offload_param": {"device": "auto", "nvme_path": "auto"}}
    zero["stage3_gather_16bit_weights_on_model_save"] = "auto"
    config = load({"zero_optimization": zero}, allow_auto=True)
    assert (config.zero_optimization.stage, config.zero_optimization.offload_param.device) == (0, "none")
    assert str(config.provenance["/zero_optimization/stage"]) == "filled by accelerate"
    assert len(refused({"zero_optimization": zero})) == 4


def test_zero_init_needs_no_batch_keys() -> None:
    config = load_config({"train_batch_size": 7, "gradient_accumulation_steps": 2}, check_batch=False)
    assert config.train_batch_size == 7
    assert load_config({}, check_batch=False).train_micro_batch_size_per_gpu is None


def test_provenance_tells_where_each_value_came_from(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{\n"train_batch_size": 8,\n"zero_optimization": {\n"stage": 2,\n"cpu_offload": true}}')
    origins = load_config(path, world_size=2).provenance
    assert str(origins["/zero_optimization/stage"]) == "line 4"
    assert (
        str(origins["/zero_optimization/offload_optimizer/device"])
        == "renamed from zero_optimization.cpu_offload, line 5"
    )
    assert str(origins["/gradient_clipping"]) == "default"
    assert "train_batch_size with world size 2" in str(origins["/train_micro_batch_size_per_gpu"])
    assert "/optimizer/params/lr" not in origins


def test_warnings_are_one_log_message_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    log.forget_said()
    monkeypatch.setattr(log.logger, "propagate", True)
    with caplog.at_level(logging.WARNING, logger="ds_hf"):
        for _ in range(2):
            zero = {"round_robin_gradients": True}
            load({"disable_allgather": True, "zero_optimization": zero, "fp16_enabled": True})
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert "disable_allgather, zero_optimization.round_robin_gradients: no effect: whole units" in message


def test_all_faults_come_at_once_in_file_order() -> None:
    text = '{\n"train_batch_size": 0,\n"stage": 2,\n"fp16": {"enabled": "auto"},\n"optimizer": {"type": "Adm"}\n}'
    with pytest.raises(ConfigError) as caught:
        load_config(text, world_size=1)
    assert [fault.line for fault in caught.value.faults] == [2, 3, 4, 5]
    assert isinstance(caught.value, ValueError)
    assert str(caught.value).startswith("JSON text: 4 faults")


def test_optimizers_of_torch_are_checked_by_their_signature() -> None:
    config = load({"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}}})
    assert config.optimizer is not None
    assert config.optimizer.type == "SGD"
    for name in ("adam", "ADAMW", "Lion", "adagrad", "RMSprop"):
        assert load({"optimizer": {"type": name, "params": {"lr": 0.1}}}).warnings == ()
    assert load({"optimizer": {"type": "sgd", "params": {"lr": 0.1}}}).optimizer == OptimizerSection("sgd", {"lr": 0.1})
    adam: dict[str, Any] = {"type": "Adam", "params": {"lr": 1, "torch_adam": True, "fused": True}}
    assert load({"optimizer": adam}).warnings == ()
    adam["params"] = {"fused": True}
    assert "takes no argument" in refused({"optimizer": adam})["/optimizer/params/fused"]
    adam["params"] = {"torch_adam": True, "bias_correction": False}
    assert "with torch_adam takes no" in refused({"optimizer": adam})["/optimizer/params/bias_correction"]
    assert (
        "takes no argument" in refused({"optimizer": {"type": "Lion", "params": {"eps": 1}}})["/optimizer/params/eps"]
    )
    assert "no optimizer" in refused({"optimizer": {"type": "lr_scheduler"}})["/optimizer/type"]


def test_rules_do_not_fault_what_a_wrong_value_caused() -> None:
    faults = refused({"zero_optimization": {"stage": 5, "offload_param": {"device": "cpu"}}})
    assert list(faults) == ["/zero_optimization/stage"]


def test_a_long_warm_up_is_a_warning_because_accelerate_divides_the_total() -> None:
    scheduler = {"type": "WarmupDecayLR", "params": {"total_num_steps": 5, "warmup_num_steps": 10}}
    assert "never ends" in load({"scheduler": scheduler}).warnings[0].message


def test_optimizer_states_go_to_files_at_every_stage_that_divides_them() -> None:
    block = {"device": "nvme", "nvme_path": "/fast"}
    for stage in (1, 2, 3):
        config = load({"zero_optimization": {"stage": stage, "offload_optimizer": block}})
        assert plan_states(config).optimizer.device == "nvme"
    assert set(refused({"zero_optimization": {"stage": 0, "offload_optimizer": block}})) == {
        "/zero_optimization/offload_optimizer"
    }
    without = refused({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}})
    assert set(without) == {"/zero_optimization/offload_optimizer/nvme_path"}


def test_an_error_that_another_process_raised_says_the_same() -> None:
    with pytest.raises(ConfigError) as failure:
        load({"gradient_clippin": 1.0, "zero_optimization": {"stage": 7}})
    again = pickle.loads(pickle.dumps(failure.value))
    assert str(again) == str(failure.value)
    assert (again.faults, again.source) == (failure.value.faults, failure.value.source)
    assert len(again.faults) == 2


def test_dicts_that_hardly_end_and_texts_with_a_nul(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_hf.config.source._MOST_VALUES", 10_000)
    wide: list[Any] = [1]
    for _ in range(40):
        wide = [wide, wide]
    with pytest.raises(ConfigError, match="more than 10000 values"):
        load_config({"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"betas": wide}}})
    path = tmp_path / "config.json"
    path.write_text('{"train_batch_size": 1, "csv_monitor": {"enabled": true, "output_path": "a\\u0000b"}}')
    for source in (path, {"train_batch_size": 1, "csv_monitor": {"output_path": "a\0b"}}):
        with pytest.raises(ConfigError, match=r"/csv_monitor/output_path: the text has a NUL character"):
            load_config(source)
