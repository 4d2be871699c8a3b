"""``compression_training``: DeepSpeed's public examples, what is refused and what it says; the older section."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from ds_hf.config import load_config
from ds_hf.config.compression import bits_reached, compression_notes
from ds_hf.errors import ConfigError

BATCH = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 32}
BASE = "/compression_training/"


def quantized(bits: int, modules: list[str], groups: int = 1, **shared: Any) -> dict[str, Any]:
    return {
        "shared_parameters": {
            "enabled": True,
            "quantizer_kernel": False,
            "schedule_offset": 0,
            "quantize_groups": groups,
            "quantize_verbose": False,
            "quantization_type": "symmetric",
            "quantize_weight_in_forward": True,
            "rounding": "nearest",
            "fp16_mixed_quantize": {"enabled": False, "quantize_change_ratio": 0.1},
            **shared,
        },
        "different_groups": {
            "wq1": {
                "params": {"start_bits": bits, "target_bits": bits, "quantization_period": 0},
                "modules": modules,
            }
        },
    }


INPUTS = {
    "shared_parameters": {
        "enabled": True,
        "quantization_type": "symmetric",
        "range_calibration": "dynamic",
        "schedule_offset": 0,
    },
    "different_groups": {"aq1": {"params": {"bits": 8}, "modules": ["attention.self", "intermediate", "output.dense"]}},
}
PRUNED = {
    "sparse_pruning": {
        "shared_parameters": {"enabled": True, "schedule_offset": 2000, "method": "l1"},
        "different_groups": {"sp1": {"params": {"dense_ratio": 0.5}, "modules": ["attention.self"]}},
    },
    "row_pruning": {
        "shared_parameters": {"enabled": True, "schedule_offset": 2000, "method": "topk"},
        "different_groups": {
            "rp1": {
                "params": {"dense_ratio": 0.5},
                "modules": ["intermediate.dense"],
                "related_modules": [["layer.\\w+.output.dense"]],
            }
        },
    },
    "head_pruning": {
        "shared_parameters": {"enabled": True, "schedule_offset": 2000, "method": "topk", "num_heads": 12},
        "different_groups": {
            "rp1": {
                "params": {"dense_ratio": 0.5},
                "modules": ["attention.output.dense"],
                "related_modules": [["self.query", "self.key", "self.value"]],
            }
        },
    },
}
REDUCED = {
    "enabled": True,
    "keep_number_layer": 5,
    "module_name_prefix": "bert.encoder.layer",
    "teacher_layer": [2, 4, 6, 8, 10],
    "other_module_name": ["bert.pooler", "bert.embeddings", "classifier"],
}
GPT2 = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
BERT = ["attention.self", "intermediate", "word_embeddings", "output.dense"]


def two_widths(wide: list[str], narrow: list[str]) -> dict[str, Any]:
    """8 bits for some layers, 4 for others."""
    section, other = quantized(8, wide, 48), quantized(4, narrow)
    section["different_groups"]["wq2"] = other["different_groups"]["wq1"]
    return section


# The structure of DeepSpeedExamples' compression/*/config, at its main branch.
EXAMPLES: dict[str, dict[str, Any]] = {
    "XTC, layers reduced": {"layer_reduction": REDUCED},
    "XTC, binary": {"layer_reduction": REDUCED, "weight_quantization": quantized(1, BERT), **PRUNED},
    "W1A8": {
        "weight_quantization": quantized(1, BERT, 64, quantize_weight_in_forward=False),
        "activation_quantization": INPUTS,
    },
    "ZeroQuant W8A8": {"weight_quantization": quantized(8, BERT, 48), "activation_quantization": INPUTS},
    "ZeroQuant W4/8A8": {
        "weight_quantization": two_widths(
            ["attention.self", "attention.output"], ["intermediate", r"layer.\w+.output"]
        ),
        "activation_quantization": INPUTS,
    },
    "structural pruning": PRUNED,
    "GPT-2 W8A8": {
        "weight_quantization": quantized(8, GPT2, 64),
        "activation_quantization": {
            **INPUTS,
            "different_groups": {"aq1": {"params": {"bits": 8}, "modules": GPT2}},
        },
    },
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_files_of_deepspeeds_examples_are_read(name: str) -> None:
    config = load_config({**BATCH, "compression_training": EXAMPLES[name]}, world_size=1)
    section = config.compression_training
    assert section.acts
    enabled = {key for key in EXAMPLES[name] if key != "layer_reduction"}
    assert {method for method, _ in section.methods()} == enabled
    assert not config.warnings
    lines = list(compression_notes(config))
    assert len(lines) == sum(len(content.get("different_groups", [None])) for content in EXAMPLES[name].values())


def test_snip_is_refused_with_what_to_choose() -> None:
    section = copy.deepcopy(PRUNED)
    section["sparse_pruning"]["shared_parameters"]["method"] = "snip_momentum"  # type: ignore[index]
    with pytest.raises(ConfigError, match="neural-compressor") as caught:
        load_config({**BATCH, "compression_training": section}, world_size=1)
    (fault,) = caught.value.faults
    assert fault.pointer == f"{BASE}sparse_pruning/shared_parameters/method"
    assert '"topk"' in fault.fix


def group(method: str, params: dict[str, Any], shared: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    shared = {"enabled": True, "schedule_offset": 0, **(shared or {})}
    return {method: {"shared_parameters": shared, "different_groups": {"a/b": {"params": params, **more}}}}


GROUP = "different_groups/a~1b/"
SHARED = "shared_parameters/"


@pytest.mark.parametrize(
    ("section", "pointer", "message"),
    [
        (group("weight_quantization", {}), f"weight_quantization/{GROUP}params/target_bits", "missing"),
        (
            group("weight_quantization", {"start_bits": 4, "target_bits": 8}),
            f"weight_quantization/{GROUP}params/start_bits",
            "below target_bits 8",
        ),
        (
            group("weight_quantization", {"target_bits": 2}, {"quantization_type": "asymmetric"}),
            f"weight_quantization/{GROUP}params/target_bits",
            "around zero",
        ),
        (
            group("weight_quantization", {"target_bits": 1}, {"rounding": "stochastic"}),
            f"weight_quantization/{GROUP}params/target_bits",
            "nothing is rounded",
        ),
        (group("weight_quantization", {"target_bits": 17}), f"weight_quantization/{GROUP}params/target_bits", "large"),
        (group("activation_quantization", {}), f"activation_quantization/{GROUP}params/bits", "missing"),
        (group("row_pruning", {"dense_ratio": 1.5}), f"row_pruning/{GROUP}params/dense_ratio", "too large"),
        (group("row_pruning", {"dense_ratio": 0}), f"row_pruning/{GROUP}params/dense_ratio", "nothing would be kept"),
        (
            group("sparse_pruning", {}, {"schedule_offset": 9, "schedule_offset_end": 4}),
            f"sparse_pruning/{SHARED}schedule_offset_end",
            "before it begins at 9",
        ),
        (
            group("sparse_pruning", {}, {"schedule_offset_end": 4, "method": "topk"}),
            f"sparse_pruning/{SHARED}schedule_offset_end",
            "learned",
        ),
        (
            group("sparse_pruning", {}, {"block_pattern": "4x1"}),
            f"sparse_pruning/{SHARED}block_pattern",
            "no pattern N:M",
        ),
        (
            group("sparse_pruning", {}, {"block_pattern": "4:2"}),
            f"sparse_pruning/{SHARED}block_pattern",
            "N below M",
        ),
        (
            group("sparse_pruning", {}, {"block_pattern": "2:4", "method": "topk"}),
            f"sparse_pruning/{SHARED}block_pattern",
            "by magnitude",
        ),
        (
            group("sparse_pruning", {"dense_ratio": 0.3}, {"block_pattern": "2:4"}),
            f"sparse_pruning/{GROUP}params/dense_ratio",
            "keeps 0.5",
        ),
        (group("head_pruning", {}), f"head_pruning/{SHARED}num_heads", "told apart"),
        (group("row_pruning", {}, modules=["fc("]), f"row_pruning/{GROUP}modules/0", "no pattern"),
        (group("row_pruning", {}, modules=[]), f"row_pruning/{GROUP}modules", "no modules"),
        (
            group("row_pruning", {}, modules=["a", "b"], related_modules=[["c"]]),
            f"row_pruning/{GROUP}related_modules",
            "2 patterns, and related_modules 1",
        ),
        (
            group("row_pruning", {}, modules=["a"], related_modules=["c"]),
            f"row_pruning/{GROUP}related_modules",
            "list of lists",
        ),
        ({"layer_reduction": {"enabled": True, "teacher_layer": [1]}}, "layer_reduction/module_name_prefix", "missing"),
        ({"layer_reduction": {**REDUCED, "teacher_layer": []}}, "layer_reduction/teacher_layer", "no layer"),
        ({"layer_reduction": {**REDUCED, "keep_number_layer": 4}}, "layer_reduction/keep_number_layer", "names 5"),
        (
            {"layer_reduction": {**REDUCED, "teacher_layer": [-1, 1, 2, 3, 4]}},
            "layer_reduction/teacher_layer",
            "from 0",
        ),
    ],
)
def test_what_cannot_be_is_refused_where_it_is(section: dict[str, Any], pointer: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({**BATCH, "compression_training": section}, world_size=1)
    faults = [fault for fault in caught.value.faults if fault.pointer == BASE + pointer]
    assert faults, caught.value
    assert message in faults[0].message
    assert faults[0].fix


SCHEDULER = {"type": "WarmupDecayLR", "params": {"total_num_steps": 50, "warmup_num_steps": 5}}


@pytest.mark.parametrize(
    ("section", "pointer"),
    [
        (group("row_pruning", {}, {"schedule_offset": 50}), f"row_pruning/{SHARED}schedule_offset"),
        (group("sparse_pruning", {}, {"schedule_offset_end": 60}), f"sparse_pruning/{SHARED}schedule_offset_end"),
        (
            group("weight_quantization", {"start_bits": 8, "target_bits": 4, "quantization_period": 7}),
            f"weight_quantization/{GROUP}params/quantization_period",
        ),
    ],
)
def test_a_schedule_that_ends_after_the_training_is_refused(section: dict[str, Any], pointer: str) -> None:
    file = {**BATCH, "optimizer": {"type": "AdamW"}, "scheduler": SCHEDULER, "compression_training": section}
    with pytest.raises(ConfigError) as caught:
        load_config(file, world_size=1)
    assert [fault.pointer for fault in caught.value.faults] == [BASE + pointer]
    assert "50" in caught.value.faults[0].message
    longer = {**file, "scheduler": {**SCHEDULER, "params": {"total_num_steps": 61}}}
    assert load_config(longer, world_size=1).compression_training.acts


def test_the_target_is_reached_after_periods_that_double() -> None:
    assert bits_reached({"start_bits": 8, "target_bits": 4, "quantization_period": 7}) == 56
    assert bits_reached({"start_bits": 8, "target_bits": 8, "quantization_period": 7}) == 0
    assert bits_reached({"start_bits": 8, "target_bits": 4, "quantization_period": 0}) == 0


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("tensor_parallel", {"autotp_size": 2}, "divided"),
        ("ds_hf", {"fp8": True}, "fp8"),
        ("ds_hf", {"qat": {"weights": 4}}, "qat rounds"),
    ],
)
def test_what_excludes_it_is_said(key: str, value: Any, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        load_config({**BATCH, "compression_training": EXAMPLES["W1A8"], key: value}, world_size=2)


# -- quantize_training ------------------------------------------------------------------------------------------------

MOQ = {
    "enabled": True,
    "quantize_verbose": True,
    "quantizer_kernel": True,
    "quantize_type": "symmetric",
    "quantize_bits": {"start_bits": 12, "target_bits": 6},
    "quantize_schedule": {"quantize_period": 400, "schedule_offset": 3},
    "quantize_groups": 8,
    "fp16_mixed_quantize": {"enabled": True, "quantize_change_ratio": 0.01},
}


def test_mixture_of_quantization_becomes_weight_quantization_and_says_so() -> None:
    config = load_config({**BATCH, "quantize_training": MOQ}, world_size=1)
    section = config.compression_training.weight_quantization
    shared = section.shared_parameters
    assert (shared.enabled, shared.schedule_offset, shared.quantize_groups) == (True, 3, 8)
    assert (shared.fp16_mixed_quantize.enabled, shared.fp16_mixed_quantize.quantize_change_ratio) == (True, 0.01)
    (only,) = section.different_groups.values()
    assert only == {
        "params": {"start_bits": 12, "target_bits": 6, "quantization_period": 400},
        "modules": ["*"],
    }
    (warning,) = config.warnings
    assert warning.pointer == "/quantize_training"
    assert "compression_training.weight_quantization" in warning.message


def test_its_algorithm_is_read_from_either_place() -> None:
    algorithm = {"quantize_algo": {"q_type": "asymmetric", "rounding": "stochastic"}}
    shared = load_config(
        {**BATCH, "quantize_training": {"enabled": True, **algorithm}}, world_size=1
    ).compression_training.weight_quantization.shared_parameters
    assert (shared.quantization_type, shared.rounding) == ("asymmetric", "stochastic")


def test_switched_off_it_is_nothing() -> None:
    config = load_config({**BATCH, "quantize_training": {"enabled": False}}, world_size=1)
    assert not config.compression_training.acts


@pytest.mark.parametrize(
    ("change", "pointer", "word"),
    [
        ({"eigenvalue": {"enabled": True}}, "/quantize_training/eigenvalue", "curvature"),
        ({"quantise_groups": 4}, "/quantize_training/quantise_groups", "unknown key"),
        ({"quantize_bits": {"first": 3}}, "/quantize_training/quantize_bits/first", "unknown key"),
        ({"quantize_bits": 8}, "/quantize_training/quantize_bits", "no object"),
        (
            {"quantize_groups": 0},
            "/compression_training/weight_quantization/shared_parameters/quantize_groups",
            "too small",
        ),
    ],
)
def test_faults_in_it(change: dict[str, Any], pointer: str, word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({**BATCH, "quantize_training": {**MOQ, **change}}, world_size=1)
    assert any(fault.pointer == pointer and word in fault.message for fault in caught.value.faults), caught.value
