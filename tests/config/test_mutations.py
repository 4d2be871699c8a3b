"""A hundred configurations, each a valid one with one thing broken: each is refused, at the right place, with the right
word, and by nothing but ``ConfigError``."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from ds_hf.config import ConfigError, load_config

_DELETE = object()

VALID: dict[str, Any] = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "steps_per_print": 100,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
    },
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 100, "warmup_num_steps": 10}},
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale_window": 1000},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu"},
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "checkpoint": {"tag_validation": "Warn"},
}

Z = "/zero_optimization"
OFFO = Z + "/offload_optimizer"
OFFP = Z + "/offload_param"
PARAMS = "/optimizer/params"
SPARSE = "/sparse_attention/"
SCHED = "/scheduler/params"

# (pointer to set, value, expected word in message or fix[, pointer of the fault when it is another one])
MUTATIONS: list[tuple[Any, ...]] = [
    # misspelt keys
    ("/train_batchsize", 8, "train_batch_size"),
    ("/train_micro_batch_size_per_gpus", 8, "train_micro_batch_size_per_gpu"),
    ("/gradient_accumulation_step", 8, "gradient_accumulation_steps"),
    ("/gradient_cliping", 1.0, "gradient_clipping"),
    ("/gradient-clipping", 1.0, "gradient_clipping"),
    ("/Zero_Optimization", {}, "zero_optimization"),
    ("/zero_optimisation", {"stage": 2}, "zero_optimization"),
    ("/optimiser", {}, "optimizer"),
    ("/shceduler", {}, "scheduler"),
    ("/bf_16", {"enabled": True}, "bf16"),
    ("/foo", 1, "unknown"),
    ("/", 1, "unknown"),
    ("/fp16/enable", True, "enabled"),
    ("/fp16/loss_scale_windows", 5, "loss_scale_window"),
    ("/fp16/initial_scale", 5, "initial_scale_power"),
    ("/bf16/check_grad_overflows", True, "check_grad_overflow"),
    (Z + "/stages", 2, "stage"),
    (Z + "/overlap_com", True, "overlap_comm"),
    (Z + "/reduce_bucketsize", 5, "reduce_bucket_size"),
    (Z + "/stage3_prefetch_bucket", 5, "stage3_prefetch_bucket_size"),
    (Z + "/offload_optimiser", {}, "offload_optimizer"),
    (OFFO + "/devices", "cpu", "device"),
    (OFFO + "/pin_memroy", True, "pin_memory"),
    (OFFP + "/nvmepath", "/x", "nvme_path"),
    ("/checkpoint/tag_validate", "Warn", "tag_validation"),
    (
        "/activation_checkpointing",
        {"partition_activation": True},
        "partition_activations",
        "/activation_checkpointing/partition_activation",
    ),
    ("/aio", {"blocksize": 1}, "block_size", "/aio/blocksize"),
    ("/optimizer/param", {}, "params"),
    ("/optimizer/lr", 1.0, "optimizer.params"),
    (PARAMS + "/learning_rate", 1.0, "lr"),
    (PARAMS + "/weightdecay", 1.0, "weight_decay"),
    (PARAMS + "/beta", [0.9, 0.9], "betas"),
    (PARAMS + "/momentum", 0.9, "AdamW takes no argument"),
    (SCHED + "/warmup_steps", 5, "warmup_num_steps"),
    (SCHED + "/cycle_min_lr", 5, "unknown"),
    ("/ds_hf", {"compat_schedule": "strict"}, "compat_schedules", "/ds_hf/compat_schedule"),
    # keys of another place or another tool
    ("/stage", 2, "zero_optimization"),
    ("/offload_optimizer", {"device": "cpu"}, "zero_optimization"),
    ("/zero_stage", 2, "zero_optimization.stage"),
    ("/learning_rate", 1e-4, "optimizer.params.lr"),
    ("/max_grad_norm", 1.0, "gradient_clipping"),
    ("/per_device_train_batch_size", 1, "train_micro_batch_size_per_gpu"),
    (Z + "/fp16", {}, "top level"),
    (Z + "/gradient_clipping", 1.0, "top level"),
    ("/bf16/stage", 2, "zero_optimization"),
    # wrong types
    ("/train_batch_size", True, "boolean"),
    ("/train_batch_size", 16.5, "fraction"),
    ("/train_batch_size", "sixteen", "integer"),
    ("/train_batch_size", [16], "list"),
    ("/train_batch_size", {}, "integer"),
    ("/gradient_clipping", "high", "number"),
    ("/gradient_clipping", None, "null"),
    ("/gradient_clipping", True, "boolean"),
    ("/bf16/enabled", "yes", "true or false"),
    ("/bf16/enabled", 2, "true or false"),
    ("/bf16/enabled", None, "null"),
    ("/bf16", "on", "object"),
    ("/fp16", [], "object"),
    ("/optimizer", "AdamW", "object"),
    ("/optimizer", None, "object"),
    ("/optimizer/type", 3, "string"),
    (PARAMS, [], "object"),
    (PARAMS + "/lr", "fast", "number"),
    (PARAMS + "/lr", True, "number"),
    (PARAMS + "/betas", 0.9, "list"),
    (PARAMS + "/betas", [0.9], "few"),
    (PARAMS + "/betas", [0.9, "x"], "number", PARAMS + "/betas/1"),
    ("/scheduler/type", 3, "choose"),
    (SCHED + "/total_num_steps", "many", "integer"),
    (SCHED + "/warmup_type", "cosine", "linear"),
    ("/zero_optimization", 2, "object"),
    ("/zero_optimization", "stage3", "object"),
    (Z + "/stage", "two", "integer"),
    (Z + "/stage", True, "boolean"),
    (OFFO, "cpu", "object"),
    (OFFO + "/device", True, "choose"),
    (OFFP, ["cpu"], "object"),
    (Z + "/leaf_module", {"classes": [1]}, "string", Z + "/leaf_module/classes/0"),
    ("/steps_per_print", "often", "number"),
    # wrong values
    (SCHED + "/warmup_max_lr", -7, "at least 0"),
    (
        "/scheduler",
        {"type": "WarmupCosineLR", "params": {"total_num_steps": 9, "cos_min_ratio": -1}},
        "at least 0",
        SCHED + "/cos_min_ratio",
    ),
    (
        "/scheduler",
        {"type": "LRRangeTest", "params": {"lr_range_test_step_rate": -1}},
        "at least 0",
        SCHED + "/lr_range_test_step_rate",
    ),
    (
        "/scheduler",
        {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_max_mom": [1]}},
        "less than 1",
        SCHED + "/cycle_max_mom/0",
    ),
    (SCHED + "/warmup_max_lr", [], "too few"),
    (SCHED + "/warmup_max_lr", None, "null"),
    (SCHED + "/warmup_max_lr", [0.1, -0.1], "at least 0", SCHED + "/warmup_max_lr/1"),
    (SCHED + "/warmup_min_lr", -1e-9, "at least 0"),
    ("/train_batch_size", 0, "at least 1"),
    ("/train_micro_batch_size_per_gpu", -1, "at least 1"),
    ("/gradient_accumulation_steps", 0, "at least 1"),
    ("/gradient_clipping", -1.0, "at least 0"),
    ("/gradient_clipping", float("nan"), "finite"),
    ("/gradient_clipping", float("inf"), "0 clips nothing"),
    ("/steps_per_print", 0, "more than 0"),
    ("/steps_per_print", float("-inf"), "finite"),
    ("/train_batch_size", 2**70, "64 bits"),
    (Z + "/stage", 4, "at most 3"),
    (Z + "/stage", -1, "at least 0"),
    (OFFO + "/device", "gpu", "cpu"),
    (OFFO + "/device", "cuda:0", "choose"),
    (OFFO + "/ratio", 1.5, "at most 1"),
    ("/communication_data_type", "fp8", "fp16"),
    ("/gradient_allreduce_op", "max", "mean"),
    ("/checkpoint/tag_validation", "Abort", "Ignore"),
    ("/fp16/loss_scale", -1, "at least 0"),
    ("/data_types", {"grad_accum_dtype": "fp64"}, "fp32", "/data_types/grad_accum_dtype"),
    ("/optimizer/type", "AdmaW", "AdamW"),
    ("/optimizer/type", "SDG", "SGD"),
    ("/scheduler/type", "WarmupLr2", "WarmupLR"),
    ("/scheduler/type", "CosineAnnealing", "choose"),
    ("/ds_hf", {"compat_schedules": "loose"}, "strict", "/ds_hf/compat_schedules"),
    # missing parts
    ("/optimizer/type", _DELETE, "missing"),
    ("/scheduler/type", _DELETE, "missing"),
    (SCHED + "/total_num_steps", _DELETE, "missing"),
    ("/scheduler", {"type": "OneCycle", "params": {"cycle_min_lr": 0.1}}, "cycle_max_lr", SCHED + "/cycle_max_lr"),
    ("/scheduler", {"type": "OneCycle"}, "cycle_min_lr", SCHED),
    # "auto" that nobody fills
    ("/train_batch_size", "auto", "auto"),
    ("/bf16/enabled", "auto", "auto"),
    (Z + "/stage", "auto", "auto"),
    (Z + "/overlap_comm", "auto", "auto"),
    (OFFO + "/buffer_count", "auto", "auto"),
    (OFFO + "/device", "auto", "auto"),
    (OFFO + "/pin_memory", "auto", "auto"),
    (PARAMS + "/lr", "auto", "auto"),
    (SCHED + "/total_num_steps", "auto", "auto"),
    ("/fp16/loss_scale", "auto", "auto"),
    # combinations
    ("/fp16/enabled", True, "both", "/bf16/enabled"),
    (Z + "/stage", 0, "stage", OFFO),
    ("/gradient_allreduce_op", "sum", "stage 3"),
    (Z + "/compute_grad_norm", False, "stage 1 or 2"),
    ("/train_batch_size", 17, "world size"),
    ("/gradient_accumulation_steps", 3, "24 = 4 x 3 x 2", "/train_batch_size"),
    ("/bf16/bf16_optimizer_states", True, "bf16_master_weights_and_grads"),
    (Z + "/cpu_offload", True, "both are set"),
    (Z + "/stage3_gather_fp16_weights_on_model_save", True, "both are set"),
    (PARAMS + "/max_grad_norm", 1.0, "both are set"),
    ("/bfloat16", {"enabled": True}, "both are set"),
    ("/fp16_enabled", True, "both are set"),
    ("/elasticity", {"enabled": True}, "max_train_batch_size is missing"),
    (
        "/elasticity",
        {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [2]},
        "elasticity chooses",
        "/train_batch_size",
    ),
    # known, not implemented, and it would change the training
    (OFFP, {"device": "nvme"}, "nvme_path", OFFP + "/nvme_path"),
    ("/ds_hf", {"wire": {"parameters": 4}}, "16, 8 or null", "/ds_hf/wire/parameters"),
    ("/ds_hf", {"wire": {"gradients": 1}}, "16, 8, 4 or null", "/ds_hf/wire/gradients"),
    ("/ds_hf", {"wire": {"block": 100}}, "multiple", "/ds_hf/wire/block"),
    ("/ds_hf", {"wire": {"first_hop": 0}}, "at least 1", "/ds_hf/wire/first_hop"),
    (Z + "/zero_hpz_partition_size", 8, "does not divide the 2"),
    (Z + "/mics_shard_size", 8, "does not divide the 2"),
    (Z + "/zenflow", {"select_strategy": "step"}, "needs a number", Z + "/zenflow/select_interval"),
    (Z + "/zenflow", {"topk_ratio": 1.5}, "at most 1", Z + "/zenflow/topk_ratio"),
    (Z + "/zenflow", {"update_interval": 0}, "at least 1", Z + "/zenflow/update_interval"),
    (Z + "/zeropp_loco_param", {"err_beta": 0.5}, "zero_quantized_gradients"),
    ("/tensor_parallel", {"autotp_size": 4}, "does not divide the 2", "/tensor_parallel/autotp_size"),
    ("/sequence_parallel_size", 3, "does not divide the 2"),
    ("/expert_parallel", {"enabled": True, "autoep_size": 3}, "does not divide the 2", "/expert_parallel/autoep_size"),
    ("/pipeline", {"stages": 2}, "pipeline", "/pipeline/stages"),
    ("/amp", {"enabled": True, "opt_level": "O1"}, "apex"),
    (
        "/torch_autocast",
        {"enabled": True, "lower_precision_safe_modules": ["torch.nn.Linear", "Linear"]},
        "torch.nn.Linear",
        "/torch_autocast/lower_precision_safe_modules/1",
    ),
    ("/torch_autocast", {"enabled": True, "dtype": "int8"}, "bf16", "/torch_autocast/dtype"),
    ("/compile", {"deepcompile": True, "passes": ["autotp"]}, "divides the model", "/compile/passes/0"),
    ("/curriculum_learning", {"enabled": True}, "needs min_difficulty", "/curriculum_learning/min_difficulty"),
    ("/progressive_layer_drop", {"enabled": True, "theta": 0}, "above 0", "/progressive_layer_drop/theta"),
    (
        "/compression_training",
        {"weight_quantization": {"shared_parameters": {"enabled": True}}},
        "no group",
        "/compression_training/weight_quantization/different_groups",
    ),
    (
        "/quantize_training",
        {"enabled": True, "eigenvalue": {"enabled": True}},
        "curvature",
        "/quantize_training/eigenvalue",
    ),
    ("/eigenvalue", {"enabled": True}, "curvature"),
    ("/weight_quantization", {"num_bits": 4}, "quantized_initialization", "/weight_quantization/num_bits"),
    ("/sparse_attention", {"mode": "diagonal"}, "bigbird", "/sparse_attention/mode"),
    ("/sparse_attention", {"num_global_blocks": 3}, "multiple of num_global_blocks", SPARSE + "num_global_blocks"),
    ("/sparse_attention", {"num_global_blocks": 0}, "at least 1", SPARSE + "num_global_blocks"),
    ("/sparse_attention", {"num_different_global_patterns": 2}, "per_head", SPARSE + "num_global_blocks"),
    (
        "/sparse_attention",
        {"attention": "unidirectional", "horizontal_global_attention": True},
        "looks ahead",
        SPARSE + "horizontal_global_attention",
    ),
    (
        "/sparse_attention",
        {"mode": "variable", "local_window_blocks": [0]},
        "positive number",
        SPARSE + "local_window_blocks",
    ),
    (
        "/sparse_attention",
        {"mode": "bslongformer", "global_block_indices": [3], "global_block_end_indices": [3]},
        "are none",
        SPARSE + "global_block_indices",
    ),
    ("/ds_hf", {"sparse_attention": "some"}, "all", "/ds_hf/sparse_attention"),
    (
        "/hybrid_engine",
        {"enabled": True, "inference_tp_size": 2},
        "in generation alone",
        "/hybrid_engine/inference_tp_size",
    ),
    ("/hybrid_engine", {"enabled": True, "max_out_tokens": 0}, "at least", "/hybrid_engine/max_out_tokens"),
    ("/nebula", {"enabled": "often"}, "true or false", "/nebula/enabled"),
    ("/data_types", {"param_dtype": "fp16"}, "make the parameters", "/data_types/param_dtype"),
    ("/fp16/fp16_master_weights_and_grads", True, "not supported"),
    ("/ds_hf", {"stochastic_rounding": "often"}, "true or false", "/ds_hf/stochastic_rounding"),
    ("/ds_hf", {"compile": "everything"}, "blocks", "/ds_hf/compile"),
    ("/optimizer", {"type": "Lamb", "params": {"betta": 1}}, "Lamb takes no", PARAMS + "/betta"),
    ("/optimizer", {"type": "OneBitAdam", "params": {"lr": 1e-3}}, "1-bit", "/optimizer/type"),
    ("/optimizer", {"type": "Muon", "params": {"ns_steps": 6}}, "Muon takes no", PARAMS + "/ns_steps"),
    ("/optimizer", {"type": "Muon", "params": {"ns_method": "fast"}}, "gram", PARAMS + "/ns_method"),
    ("/optimizer", {"type": "AdamW", "params": {"per_head_muon": True}}, "takes no", PARAMS + "/per_head_muon"),
    ("/optimizer", {"type": "LBFGS"}, "closure", "/optimizer/type"),
    ("/optimizer", {"type": "SGD", "params": {"lr": 0.1, "betas": [0.9, 0.9]}}, "SGD takes no", PARAMS + "/betas"),
]


def _mutated(pointer: str, value: Any) -> dict[str, Any]:
    tree = copy.deepcopy(VALID)
    *parents, last = pointer[1:].split("/")
    node = tree
    for key in parents:
        node = node[key]
    if value is _DELETE:
        del node[last]
    else:
        node[last] = value
    return tree


def test_there_are_at_least_a_hundred_mutations_of_a_valid_configuration() -> None:
    assert len(MUTATIONS) >= 100
    assert len({(case[0], repr(case[1])) for case in MUTATIONS}) == len(MUTATIONS)
    config = load_config(VALID, world_size=2)
    assert config.zero_optimization.stage == 3
    assert config.warnings == ()


@pytest.mark.parametrize(
    "case", MUTATIONS, ids=lambda case: f"{case[0]}={'deleted' if case[1] is _DELETE else case[1]}"[:70]
)
def test_mutation_is_refused_where_it_is_and_says_why(case: tuple[Any, ...]) -> None:
    pointer, value, word = case[:3]
    expected = case[3] if len(case) > 3 else pointer
    with pytest.raises(ConfigError) as caught:
        load_config(_mutated(pointer, value), world_size=2)
    found = [fault for fault in caught.value.faults if fault.pointer == expected]
    assert found, str(caught.value)
    assert any(word in fault.message + " " + fault.fix for fault in found), str(caught.value)
    assert all(fault.fix for fault in caught.value.faults), str(caught.value)


# Broken texts: (text, word, line)
TEXTS: list[tuple[str, str, int | None]] = [
    ("", "nothing in it", None),
    ("   \n // only a comment\n", "nothing in it", None),
    ("[1, 2]", "a list", 1),
    ('{"a": 1', "ends inside an object", 1),
    ('{"optimizer": {"betas": [0.9, 0.999}\n}', "comma", 1),
    ('{\n"stage": 1 "x": 2}', "comma", 2),
    ('{\n"bf16": {"enabled": True}}', "write true", 2),
    ('{\n"scheduler": None}', "write null", 2),
    ('{"a" 1}', 'expected ":"', 1),
    ('{"a":}', "expected a value", 1),
    ('{"a": "unclosed}', "never closed", 1),
    ("{'''a''': 1, /* open", "never closed", 1),
    ('{"a": "\\q"}', "escape", 1),
    ('{"a": 1}}', "more text", 1),
    ('{"train_batch_size": 8,\n"train_batch_size": 16}', "in line 1", 2),
    ('{"zero_optimization": {"stage": 1,\n "stage": 2}, "train_batch_size": 8}', "in line 1", 2),
    ("{" + '"a": {' * 100 + "}" * 101, "deeper", 1),
    ("[" * 5000, "deeper", 1),
    ('{"a": ' + "9" * 5000 + "}", "digits", 1),
    ('{"train_batch_size": NaN}', "finite", 1),
    ('{"gradient_clipping": 1e999, "train_batch_size": 8}', "finite", 1),
    ('{\n\n  "train_batch_size": 8,\n  "stage": 3\n}', "move it", 4),
]


@pytest.mark.parametrize(("text", "word", "line"), TEXTS, ids=[repr(text[:30]) for text, _, _ in TEXTS])
def test_broken_text_is_refused_with_its_line(text: str, word: str, line: int | None, tmp_path: Any) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, world_size=1)
    found = [fault for fault in caught.value.faults if word in fault.message + " " + fault.fix]
    assert found, str(caught.value)
    assert found[0].line == line
    assert caught.value.source == str(path)
