"""Rules across several keys, applied to a typed configuration whose single values are legal.

With ``plan.py`` this is the place that may look at the ZeRO stage.

``check_optimizer`` checks the name and the keyword arguments of ``optimizer`` against what the optimizer takes.

The arguments of ds_hf's own optimizers stand in the schema (``x-arguments``). Other classes of torch.optim are asked
for their signature; torch is imported only then.
"""

from __future__ import annotations

import difflib
import inspect
import re
from typing import Any

from ds_hf.config.optimizer_traits import ONE_BIT
from ds_hf.config.schema import Node, escape, load_schema, nearest
from ds_hf.config.source import Draft
from ds_hf.config.sparsity import (
    direction_error,
    global_blocks_error,
    local_windows_error,
    positive_error,
    windows_error,
)
from ds_hf.config.types.root import Config
from ds_hf.config.types.zero import OffloadOptimizerSection, OffloadParamSection

__all__ = ["check_optimizer", "check_rules"]

_OF_DATA = {"data_efficiency", "curriculum_learning", "progressive_layer_drop"}


def check_rules(config: Config, draft: Draft) -> None:
    """Collect combinations that cannot work."""
    _precision(config, draft)
    _data_types(config, draft)
    _autocast(config, draft)
    if not draft.faulty("/zero_optimization/stage"):
        _hysteresis(config, draft)
        _masters(config, draft)
        _offload(config, draft)
        _offload_details(config, draft)
        _hierarchy(config, draft)
        _wire(config, draft)
    _gradients(config, draft)
    _nonfinite(config, draft)
    _schedule(config, draft)
    _sparse_attention(config, draft)
    _hybrid_engine(config, draft)
    _activation_budget(config, draft)
    _padding(config, draft)
    _tiles(config, draft)
    _fp8(config, draft)
    _qat(config, draft)
    if config.zero_optimization.zenflow is not None and not draft.faulty("/zero_optimization/stage"):
        from ds_hf.config.zenflow import check_zenflow  # few files have the section

        check_zenflow(config, draft)
    if "expert_parallel" in draft.tree:
        from ds_hf.config.experts import check_experts

        check_experts(config, draft)
    if not _OF_DATA.isdisjoint(draft.tree):
        from ds_hf.config.data_efficiency import check_data

        check_data(config, draft)
    if "compression_training" in draft.tree:
        from ds_hf.config.compression import check_compression

        check_compression(config, draft)


def _precision(config: Config, draft: Draft) -> None:
    fp16, bf16 = config.fp16, config.bf16
    if fp16.enabled and bf16.enabled:
        draft.fault("/bf16/enabled", "fp16 and bf16 are both enabled", "disable one; bf16 needs no loss scaling")
    if config.amp.enabled and (fp16.enabled or bf16.enabled or config.zero_optimization.stage > 0):
        draft.fault("/amp/enabled", "amp excludes fp16, bf16 and ZeRO", "remove amp")
    dynamic = fp16.enabled and fp16.loss_scale == 0
    for key, value in (("loss_scale_window", fp16.loss_scale_window), ("min_loss_scale", fp16.min_loss_scale)):
        if value <= 0 and dynamic:
            draft.fault(f"/fp16/{key}", f"{key} {value} is too small for dynamic loss scaling", "give more than 0")
        elif value < 0:
            reason = "the loss scale is fixed" if fp16.enabled else "fp16 is not enabled"
            draft.warn(f"/fp16/{key}", f"no effect: {reason}", "give more than 0, or remove it")


def _hysteresis(config: Config, draft: Draft) -> None:
    fp16 = config.fp16
    if not fp16.enabled or fp16.loss_scale or config.zero_optimization.stage > 0:
        return
    message = "no effect at stage 0, as in DeepSpeed: every overflow halves the loss scale there"
    if fp16.hysteresis not in (1, type(fp16)().hysteresis):
        draft.warn("/fp16/hysteresis", message, "remove it, or choose stage 1, 2 or 3")
    if fp16.consecutive_hysteresis:
        draft.warn("/fp16/consecutive_hysteresis", message, "remove it, or choose stage 1, 2 or 3")


def _data_types(config: Config, draft: Draft) -> None:
    types, enabled = config.data_types, [name for name in ("fp16", "bf16") if getattr(config, name).enabled]
    sections = [draft.tree.get(name) for name in ("fp16", "bf16")]
    open_yet = any(isinstance(section, dict) and section.get("enabled") == "auto" for section in sections)
    own = enabled[0] if enabled else "fp32"
    if types.param_dtype is not None and types.param_dtype != own and not open_yet:
        message = f"data_types.param_dtype is {types.param_dtype}, and fp16 and bf16 make the parameters {own}"
        draft.fault("/data_types/param_dtype", message, "remove it, and enable fp16, bf16 or neither")
    if types.buffer_dtype is not None and not enabled and not open_yet:
        message = "no effect: buffers are cast only where fp16 or bf16 is enabled"
        draft.warn("/data_types/buffer_dtype", message, "remove it, or enable one of them")


def _autocast(config: Config, draft: Draft) -> None:
    section, base = config.torch_autocast, "/torch_autocast"
    if not section.enabled:
        return
    if section.dtype == "fp32":
        draft.warn(
            f"{base}/dtype",
            "no effect: autocast to fp32 does not lower any precision",
            'give "bf16", or remove the block',
        )
    for index, name in enumerate(section.lower_precision_safe_modules or ()):
        if not all(part.isidentifier() for part in name.split(".")) or "." not in name:
            message = f'"{name}" is not a class with its package'
            draft.fault(f"{base}/lower_precision_safe_modules/{index}", message, 'write it as "torch.nn.Linear"')
    for name, enabled in (("fp16", config.fp16.enabled), ("bf16", config.bf16.enabled)):
        if enabled and (section.dtype or "bf16") not in (name, "fp32"):
            message = f"autocast computes in {section.dtype or 'bf16'} with parameters in {name}"
            draft.warn(f"{base}/dtype", message, f'give "{name}", or disable {name} to keep the parameters in fp32')


def _masters(config: Config, draft: Draft) -> None:
    stage, fp16, bf16 = config.zero_optimization.stage, config.fp16, config.bf16
    if fp16.fp16_master_weights_and_grads and stage == 0:
        _needs_stage(draft, "/fp16/fp16_master_weights_and_grads", "fp16_master_weights_and_grads")
    if bf16.bf16_master_weights_and_grads and stage == 0:
        _needs_stage(draft, "/bf16/bf16_master_weights_and_grads", "bf16_master_weights_and_grads")
    if bf16.bf16_optimizer_states and not bf16.bf16_master_weights_and_grads:
        fix = "enable bf16_master_weights_and_grads or remove bf16_optimizer_states"
        draft.fault("/bf16/bf16_optimizer_states", "bf16_optimizer_states needs bf16_master_weights_and_grads", fix)


def _needs_stage(draft: Draft, pointer: str, name: str) -> None:
    draft.fault(pointer, f"{name} needs ZeRO stage 1, 2 or 3, and the stage is 0", "set zero_optimization.stage")


def _offload(config: Config, draft: Draft) -> None:
    zero = config.zero_optimization
    base = "/zero_optimization"
    blocks: list[tuple[str, OffloadOptimizerSection | OffloadParamSection]] = [
        ("offload_optimizer", zero.offload_optimizer)
    ]
    if zero.stage == 3:
        blocks.append(("offload_param", zero.offload_param))
    elif zero.offload_param.device != "none" and draft.get(("zero_optimization", "stage")) != "auto":
        message = f"no effect: parameters are offloaded at stage 3 alone, and the stage is {zero.stage}"
        draft.warn(f"{base}/offload_param", message, 'set "stage": 3, or remove it')
    if zero.offload_optimizer.device != "none" and zero.stage == 0:
        fix = 'set "stage": 2, or remove offload_optimizer'
        draft.fault(f"{base}/offload_optimizer", "offload_optimizer needs stage 1, 2 or 3, and the stage is 0", fix)
    for name, block in blocks:
        if block.device == "nvme" and block.nvme_path in (None, "", "none"):  # "none" is accelerate's
            draft.fault(
                f"{base}/{name}/nvme_path", f"{name} to nvme needs nvme_path", 'add "nvme_path": "/a/fast/folder"'
            )
    if not zero.compute_grad_norm and zero.stage not in (1, 2):
        message = f"compute_grad_norm = false needs stage 1 or 2, and the stage is {zero.stage}"
        draft.fault(f"{base}/compute_grad_norm", message, "remove it")


def _offload_details(config: Config, draft: Draft) -> None:
    """Settings of an offload that is not there."""
    base, zero, own = "/zero_optimization", config.zero_optimization, config.ds_hf.offload
    optimizer, param = zero.offload_optimizer, zero.offload_param
    blocks: list[tuple[str, OffloadOptimizerSection | OffloadParamSection, tuple[str, ...]]] = [
        ("offload_optimizer", optimizer, ("nvme_path", "buffer_count"))
    ]
    if zero.stage == 3 or param.device == "none":  # else the whole block was warned of
        blocks.append(("offload_param", param, ("nvme_path", "buffer_count", "max_in_cpu")))
    nvme = [name for name, block, _ in blocks if block.device == "nvme"]
    for name, block, keys in blocks:
        for key in keys if name not in nvme else ():
            if getattr(block, key) not in (getattr(type(block)(), key), "none"):
                draft.warn(f"{base}/{name}/{key}", f'no effect: the device of {name} is "{block.device}", not "nvme"')
    if config.aio != type(config.aio)() and not nvme:
        draft.warn("/aio", "no effect: nothing is offloaded to NVMe")
    streams = own.stream not in ("auto", 0.0)  # asked for; "auto" is 0 where it has no effect
    if optimizer.device != "cpu":
        reason = f'no effect: the device of offload_optimizer is "{optimizer.device}", not "cpu"'
        if optimizer.ratio < 1:
            draft.warn(f"{base}/offload_optimizer/ratio", reason)
        if own.ratio is not None or own.delayed or streams:
            draft.warn("/ds_hf/offload", reason)
    elif own.delayed and streams:
        message = "stream has no effect where the update is delayed: nothing would run beside it"
        draft.warn("/ds_hf/offload/stream", message, "remove one of the two")


def _hierarchy(config: Config, draft: Draft) -> None:
    """States divided over a part of the processes, at stages that do not divide them."""
    zero, base = config.zero_optimization, "/zero_optimization"
    if draft.get(("zero_optimization", "stage")) == "auto":
        return
    if zero.zero_hpz_partition_size > 1 and zero.stage != 3:
        message = f"no effect: parameters are divided at stage 3 alone, and the stage is {zero.stage}"
        draft.warn(f"{base}/zero_hpz_partition_size", message, 'set "stage": 3, or remove it')
    if zero.mics_shard_size > 0 and zero.stage == 0:
        message = "no effect: nothing is divided at stage 0"
        draft.warn(f"{base}/mics_shard_size", message, 'set "stage": 3, or remove it')


def _wire(config: Config, draft: Draft) -> None:
    """What travels in few bits, where it is not divided or summed in another way."""
    zero, wire, base = config.zero_optimization, config.ds_hf.wire, "/zero_optimization"
    own = wire.gradients is not None
    narrow_gradients = wire.gradients in (8, 4) if own else zero.zero_quantized_gradients
    narrow_weights = wire.parameters == 8 if wire.parameters is not None else zero.zero_quantized_weights
    gradients = "/ds_hf/wire/gradients" if own else f"{base}/zero_quantized_gradients"
    weights = "/ds_hf/wire/parameters" if wire.parameters is not None else f"{base}/zero_quantized_weights"
    stage_is_open = draft.get(("zero_optimization", "stage")) == "auto"
    if narrow_weights and zero.stage != 3 and not stage_is_open:
        message = f"parameters are whole on every process at stage {zero.stage}: none are gathered that could be packed"
        draft.fault(weights, message, 'set "stage": 3, or remove it')
    if narrow_gradients and zero.stage == 0 and not stage_is_open:
        message = "gradients are not divided at stage 0, and the sum in few bits gives each process its part"
        fix = 'set "stage": 1, or take "OneBitAdam" as the optimizer, which is for stage 0'
        if config.optimizer is not None and config.optimizer.type.lower() in ONE_BIT:
            fix = f"remove it: {config.optimizer.type} sends momenta in one bit as it is"
        draft.fault(gradients, message, fix)
    if narrow_gradients and config.gradient_allreduce_op == "sum":
        message = '"sum" does not work with gradients in few bits, which are averaged where they are unpacked'
        draft.fault("/gradient_allreduce_op", message, 'use "mean" and scale the learning rate')
    if narrow_gradients and zero.mics_shard_size > 0 and zero.stage > 0:
        message = "with mics_shard_size each host has all shards, which are summed once more between hosts in 16 bits"
        draft.fault(gradients, message, "use zero_hpz_partition_size in place of mics_shard_size")
    if zero.zeropp_loco_param is not None and not narrow_gradients:
        message = "LoCo makes up for what gradients in few bits lose, and here they travel as they are"
        draft.fault(f"{base}/zeropp_loco_param", message, 'add "zero_quantized_gradients": true, or remove it')
    if wire.first_hop != "auto" and not narrow_gradients:
        draft.warn("/ds_hf/wire/first_hop", "no effect: gradients do not travel in few bits", 'add "gradients": 8')
    if wire.block != type(wire)().block and not (narrow_gradients or narrow_weights):
        draft.warn("/ds_hf/wire/block", "no effect: nothing travels in few bits", 'add "gradients": 8')


def _activation_budget(config: Config, draft: Draft) -> None:
    own, pointer = config.ds_hf, "/ds_hf/activation_memory_budget"
    if own.activation_memory_budget is None:
        return
    if not own.compile:
        message = "activation_memory_budget is for the compiler, and no block is compiled"
        draft.fault(pointer, message, 'add "compile": "blocks" to ds_hf, or remove it')
    elif config.activation_checkpointing.cpu_checkpointing or own.offload_activations:
        message = "no effect: checkpointed blocks, whose inputs go to host memory, keep nothing else to choose from"
        draft.warn(pointer, message, "remove it, or do without gradient checkpointing and this offload")


def _padding(config: Config, draft: Draft) -> None:
    own = config.ds_hf
    if own.capture_pad_to_multiple_of is not None and not own.capture:
        message = "no effect: sequences are padded around captured blocks, and none is captured"
        draft.warn("/ds_hf/capture_pad_to_multiple_of", message, 'add "capture": "blocks" to ds_hf, or remove it')


def _tiles(config: Config, draft: Draft) -> None:
    if config.ds_hf.tensor_sequence_parallel and config.ds_hf.tiled_mlp not in (None, 1):
        message = "tiles are stretches of whole sequences, and with tensor_sequence_parallel each process has a part"
        draft.fault("/ds_hf/tiled_mlp", message, "remove one of the two")


def _fp8(config: Config, draft: Draft) -> None:
    section, base = config.ds_hf.fp8, "/ds_hf/fp8"
    if section is None or not section.enabled:
        return
    autocast = config.torch_autocast.enabled and config.torch_autocast.dtype in ("bf16", None)
    open_yet = draft.get(("bf16", "enabled")) == "auto"
    if not (config.bf16.enabled or autocast or open_yet):
        draft.fault(base, "layers that multiply in fp8 give bf16, and the model computes in another dtype",
                    'set "bf16": {"enabled": true}, or remove fp8')  # fmt: skip
    _patterns(section.exclude, base, draft)
    if section.keep_weights is True and (section.recipe == "rowwise" or config.zero_optimization.stage == 3):
        why = (
            "rows' scales differ in backward" if section.recipe == "rowwise" else "stage 3 gives weights back after use"
        )
        draft.warn(f"{base}/keep_weights", f"no effect: {why}", "remove it")


def _qat(config: Config, draft: Draft) -> None:
    section, base = config.ds_hf.qat, "/ds_hf/qat"
    if section is None or not section.enabled:
        return
    _patterns(section.exclude, base, draft)
    if config.ds_hf.fp8 is not None and config.ds_hf.fp8.enabled:
        draft.fault(base, "a layer cannot round to few bits and multiply in fp8", "remove ds_hf.qat or ds_hf.fp8")


def _patterns(exclude: tuple[str, ...], base: str, draft: Draft) -> None:
    for index, pattern in enumerate(exclude):
        try:
            re.compile(pattern)
        except re.error as error:
            draft.fault(f"{base}/exclude/{index}", f"no regular expression: {error}", "see Python's module re")


def _gradients(config: Config, draft: Draft) -> None:
    pointer = "/gradient_allreduce_op"
    if config.gradient_allreduce_op == "sum":
        reasons = {
            "ZeRO stage 3": config.zero_optimization.stage == 3,
            "zenflow": config.zero_optimization.zenflow is not None,
            "compile.deepcompile": config.compile.deepcompile,
        }
        for name, present in reasons.items():
            if present:
                draft.fault(pointer, f'"sum" does not work with {name}', 'use "mean" and scale the learning rate')
    if config.prescale_gradients and config.gradient_predivide_factor != 1:
        message = "no effect: prescale_gradients divides by the whole world size beforehand"
        draft.warn("/gradient_predivide_factor", message, "remove one of the two")


def _nonfinite(config: Config, draft: Draft) -> None:
    """``ds_hf.nonfinite`` against what checks gradients already."""
    mode, pointer = config.ds_hf.nonfinite, "/ds_hf/nonfinite"
    section = config.torch_autocast
    scaled = config.fp16.enabled or (section.enabled and section.dtype == "fp16")
    if scaled and mode in ("warn", "error"):
        message = f'"{mode}" does not work with fp16, whose loss scale is found by skipping steps that overflow'
        draft.fault(pointer, message, 'remove it, or give "skip"')
    checked = draft.get(("bf16", "check_grad_overflow"))
    if config.bf16.enabled and mode is not None and isinstance(checked, bool) and checked is (mode == "warn"):
        message = f'"{mode}" contradicts bf16.check_grad_overflow, which is {str(checked).lower()}'
        draft.fault(pointer, message, "remove one of the two")


def _schedule(config: Config, draft: Draft) -> None:
    if config.scheduler is None:
        return
    params = config.scheduler.params
    total, warmup = params.get("total_num_steps"), params.get("warmup_num_steps", 1000)
    if isinstance(total, int) and isinstance(warmup, int) and warmup > total:
        message = f"warmup_num_steps {warmup} is more than total_num_steps {total}: the warm-up never ends"
        draft.warn("/scheduler/params/warmup_num_steps", message, f"give at most {total}")
    low, high = params.get("cycle_min_lr"), params.get("cycle_max_lr")
    if isinstance(low, list) and isinstance(high, list) and len(low) != len(high):
        message = f"cycle_min_lr has {len(low)} elements and cycle_max_lr {len(high)}"
        draft.fault("/scheduler/params/cycle_max_lr", message, "give both one element for each parameter group")


def _sparse_attention(config: Config, draft: Draft) -> None:
    """A pattern that contradicts itself, and one that nothing reads."""
    section, base = config.sparse_attention, "/sparse_attention"
    given = draft.tree.get("sparse_attention")
    if not isinstance(given, dict):
        return
    if draft.faulty(f"{base}/mode") or any(draft.faulty(f"{base}/{key}") for key in given):
        return
    horizontal = section.horizontal_global_attention and section.mode in ("fixed", "variable")
    errors = {"horizontal_global_attention": direction_error(section.attention, horizontal)}
    if section.mode == "fixed":
        local, global_ = section.num_local_blocks, section.num_global_blocks
        errors["num_global_blocks"] = positive_error("num_global_blocks", global_) or windows_error(
            local, global_, section.num_different_global_patterns, section.different_layout_per_head
        )
    if section.mode == "variable":
        errors["local_window_blocks"] = local_windows_error(section.local_window_blocks)
    if section.mode in ("variable", "bslongformer"):
        starts, ends = section.global_block_indices, section.global_block_end_indices
        errors["global_block_indices"] = global_blocks_error(starts, ends)
    for key, error in errors.items():
        if error is not None:
            draft.fault(f"{base}/{key}", error, "see docs/configuration/sparse_attention.md")
    if config.ds_hf.sparse_attention is False:
        message = "read by scripts only, which build SparseSelfAttention of it: the engine changes no attention"
        draft.warn(base, message, 'for a model of transformers add "ds_hf": {"sparse_attention": true}')


def _hybrid_engine(config: Config, draft: Draft) -> None:
    """Tensor parallelism in generation alone, and settings of a section that is off."""
    section, base = config.hybrid_engine, "/hybrid_engine"
    if section.enabled and section.inference_tp_size not in (1, config.tensor_parallel.autotp_size):
        message = f"layers are shared by {section.inference_tp_size} processes in generation alone"
        fix = f'set "tensor_parallel": {{"autotp_size": {section.inference_tp_size}}}, or remove it'
        draft.fault(f"{base}/inference_tp_size", message, fix)
    if section.enabled and section.enable_cuda_graph and section.release_inference_cache:
        message = "no effect: release_inference_cache gives the graph back after each call, which captures it anew"
        draft.warn(f"{base}/enable_cuda_graph", message, "remove one of the two")


# -- optimizers --------------------------------------------------------------------------------------------------------


def check_optimizer(config: Config, draft: Draft) -> None:
    """Collect faults of ``optimizer.type`` and ``optimizer.params``."""
    section = config.optimizer
    if section is None or draft.faulty("/optimizer/type"):
        return
    name = section.type
    if name.lower() in _type_node()["x-unsupported-values"]:
        return  # check.py says why.
    _one_bit(config, draft)
    own: dict[str, list[str]] = _type_node()["x-arguments"]
    params = draft.get(("optimizer", "params"))
    params = params if isinstance(params, dict) else {}
    torch_adam = name.lower() in ("adam", "adamw") and params.get("torch_adam") is True
    known = own.get("torch_adam" if torch_adam else name.lower()) or _torch_arguments(name, draft)
    if known is None:
        return
    shown = f"{name} with torch_adam" if torch_adam else name
    for key in params:
        pointer = f"/optimizer/params/{escape(key)}"
        if key not in known and not any(fault.pointer == pointer for fault in draft.faults):
            only_torch = not torch_adam and name.lower() in ("adam", "adamw") and key in own["torch_adam"]
            fix = 'set "torch_adam": true, or remove it' if only_torch else nearest(key, ("optimizer", "params"), known)
            draft.fault(pointer, f'{shown} takes no argument "{key[:60]}"', fix)


def _one_bit(config: Config, draft: Draft) -> None:
    """What 1-bit optimizers send is not divided."""
    assert config.optimizer is not None
    name, stage = config.optimizer.type, config.zero_optimization.stage
    if name.lower() not in ONE_BIT:
        return
    if "bias_correction" in (config.optimizer.params or {}):
        draft.warn("/optimizer/params/bias_correction", f"no effect: {name} never corrects a bias, as in DeepSpeed")
    if stage > 0 and draft.get(("zero_optimization", "stage")) != "auto":
        message = (
            f"{name}, a 1-bit optimizer, is for ZeRO stage 0, and the stage is {stage}: where states are divided, "
            "weights travel after each step too, and a bit a momentum saves less than half"
        )
        fix = 'set "stage": 0, or keep the stage with AdamW and "ds_hf": {"wire": {"gradients": 8}}'
        draft.fault("/optimizer/type", message, fix)
    if config.gradient_allreduce_op == "sum":
        draft.fault("/gradient_allreduce_op", f"{name} averages momenta", 'use "mean" and scale the learning rate')


def _type_node() -> Node:
    node: Node = load_schema()["properties"]["optimizer"]["properties"]["type"]
    return node


def _torch_arguments(name: str, draft: Draft) -> list[str] | None:
    """Names of the arguments of ``torch.optim.<name>``; None, with a fault, when there is no such class."""
    try:
        import torch.optim as optim
    except ImportError:
        return None
    classes: dict[str, Any] = {
        key.lower(): cls
        for key, cls in vars(optim).items()
        if inspect.isclass(cls) and issubclass(cls, optim.Optimizer) and cls is not optim.Optimizer
    }
    like = {"muadam": "adam", "muadamw": "adamw", "musgd": "sgd"}.get(name.lower(), name.lower())  # of the package mup
    if like in classes:
        name = like
    if name.lower() in classes:
        return [key for key in inspect.signature(classes[name.lower()]).parameters if key not in ("params", "self")]
    own = ("Lamb", "Lion", "Muon", "OneBitAdam", "ZeroOneAdam", "OneBitLamb")
    names = {**{key.lower(): key for key in own}, **{key: cls.__name__ for key, cls in classes.items()}}
    names = {key: names[key] for key in sorted(names) if key not in _type_node()["x-unsupported-values"]}
    near = [names[key] for key in difflib.get_close_matches(name.lower()[:60], names, n=2, cutoff=0.5)]
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    draft.fault("/optimizer/type", f'there is no optimizer "{name[:60]}"', f"{hint}Known: {', '.join(names.values())}")
    return None
