"""What the cost model asks of a model before it can predict anything: measured once, in the first trial.

Activation bytes of one more sample with and without gradient checkpointing, operations of one sample, and the bandwidth
of a collective. Nothing is guessed from the names of a model's settings.
"""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from ds_hf import host
from ds_hf.dtypes import name_of
from ds_hf.engine.modules.own_loss import ignores_items
from ds_hf.engine.observe.flops import products
from ds_hf.engine.observe.probes.trial.alone import why_not_alone
from ds_hf.engine.observe.probes.trial.batches import Batch, inputs_of, resized, shapes_of, tensors_in
from ds_hf.engine.parallel.pipeline.module import StageModule
from ds_hf.engine.zero.buffer import logical_shape
from ds_hf.engine.zero.cut import whole_shape
from ds_hf.engine.zero.estimate import measure

if TYPE_CHECKING:
    from ds_hf.engine.engine import CoreEngine
    from ds_hf.engine.observe.probes.trial.replay import Emit, Replay

__all__ = ["facts", "is_checkpointing", "set_checkpointing", "survey", "survey_pipeline", "tokens_in"]

BANDWIDTH_NBYTES = 32 << 20
PROBES = (1, 3)  # samples: two sizes give the slope


def facts(engine: CoreEngine, total_memory: int | None) -> dict[str, Any]:
    """What is known when the engine is made.

    ``total`` is what this process holds where layers are cut, ``whole_total`` all of the model. ``world_size`` counts
    the replicas of a parameter, ``data`` the processes that read different samples.
    """
    size = measure(engine.module)
    cuda = engine.device.type == "cuda"
    optimizer = engine.optimizer
    return {
        "total": size.total,
        "whole_total": _whole(engine.module),
        "trainable": size.trainable,
        "largest_unit": size.largest_unit,
        "units": len(engine.units),
        "module_dtype": _dtype(engine),
        "world_size": engine.axis.world_size,
        "processes": engine.mesh.world.world_size,
        "on_host": host.local_world_size(),
        "data": engine.mesh.shape.data,
        "sequence": engine.mesh.shape.sequence,
        "tensor": engine.mesh.shape.tensor,
        **({"pipe": engine.mesh.shape.pipe} if isinstance(engine.module, StageModule) else {}),
        "micro": engine.batch.micro,
        "accumulation": engine.batch.accumulation_steps,
        "train_batch": engine.batch.train,
        "optimizer": None if optimizer is None else type(optimizer.optimizer).__name__,
        "device": torch.cuda.get_device_name(engine.device) if cuda else "cpu",
        "cuda": cuda,
        "memory": total_memory,
        "can_checkpoint": hasattr(engine.module, "gradient_checkpointing_enable"),
        "checkpointing": is_checkpointing(engine.module),
        "torch": torch.__version__,
        "model": _model(engine.module),
        "cores": len(os.sched_getaffinity(0)) // host.local_world_size(),
        "host_memory": host.total_memory() // host.local_world_size(),
    }


def _whole(module: torch.nn.Module) -> int:
    return sum(whole_shape(param, logical_shape(param)).numel() for param in module.parameters())


def _model(module: Any) -> dict[str, Any] | None:
    """What a model of transformers can be built from again, or the whole of a stage; ``None`` for other modules."""
    module = getattr(module, "whole", module)
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "to_json_string") or not type(module).__module__.startswith("transformers."):
        return None
    try:
        found: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    except TypeError:  # something of the script's own in it
        return None
    attention = getattr(config, "_attn_implementation", None)
    return {"class": type(module).__name__, "config": found, "attention": attention}


def _dtype(engine: CoreEngine) -> str:
    counts: dict[torch.dtype, int] = {}
    for unit in engine.units:
        for buffer in unit.buffers:
            counts[buffer.dtype] = counts.get(buffer.dtype, 0) + buffer.layout.numel
    dtype = max(counts, key=lambda key: counts[key], default=torch.float32)
    return name_of(dtype)


def set_checkpointing(engine: CoreEngine, on: bool) -> bool:
    """Switch gradient checkpointing of the model. False where it has no such switch."""
    module: Any = engine.module
    names = [f"{kind}_checkpointing_{'enable' if on else 'disable'}" for kind in ("activation", "gradient")]
    switch = next((getattr(module, name) for name in names if hasattr(module, name)), None)  # transformers renamed them
    if switch is None:
        return not on
    was = is_checkpointing(module)
    if on and not was:
        vars(module)["_hooks_without_checkpointing"] = _input_hooks(module)
    switch()
    if was and not on:  # of adapters they have gradients go through the first block, which a start without has not
        own = vars(module).get("_hooks_without_checkpointing", {})
        for hook, hooked in _input_hooks(module).items():
            if hook not in own:
                del hooked._forward_hooks[hook]
    if on and getattr(getattr(module, "config", None), "use_cache", False):
        module.config.use_cache = False
    return True


def _input_hooks(module: torch.nn.Module) -> dict[int, torch.nn.Module]:
    """What transformers and PEFT let inputs of checkpointed blocks require gradients with; they do not remove it."""
    return {
        key: each
        for each in module.modules()
        for key, hook in each._forward_hooks.items()
        if getattr(hook, "__name__", "").startswith("make_inputs_require_grad")
    }


def is_checkpointing(module: torch.nn.Module) -> bool:
    """Whether gradient checkpointing is on; the second name of transformers is the older one, and warns."""
    names = ("is_activation_checkpointing", "is_gradient_checkpointing")
    return bool(next((getattr(module, name) for name in names if hasattr(module, name)), False))


def survey(replay: Replay, emit: Emit) -> None:
    """Measure, and emit one event. All ranks call it."""
    engine = replay.engine
    found: dict[str, Any] = {
        "shapes": shapes_of(replay.batch),
        "inputs": inputs_of(replay.batch if replay.worst is None else replay.worst),
        "sample_numel": _sample_numel(replay.batch),
        "bandwidth": _bandwidth(engine),
    }
    if "num_items_in_batch" in replay.batch.kwargs and ignores_items(engine.module):
        found["means"] = True  # whose sum, and so each gradient, grows with the accumulation steps
    if why := why_not_alone(replay):
        emit("together", why=why)
    before = is_checkpointing(engine.module)
    found["resident"] = replay.meter.at_rest()
    for on in (False, True):
        if not set_checkpointing(engine, on):
            continue
        found["checkpointed" if on else "plain"] = _peaks(replay)
    set_checkpointing(engine, False)
    found["flops"] = _flops(replay)
    set_checkpointing(engine, before)
    emit("survey", **found)


def tokens_in(args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tokens among what the first stage of a pipeline is given; nothing on others."""
    return [tensor for tensor in tensors_in(*args) if tensor.dim() == 2 and not tensor.is_floating_point()][:1]


def survey_pipeline(engine: CoreEngine, fed: list[torch.Tensor], emit: Emit) -> None:
    """As ``survey``, of what a pipeline shows: no batch is replayed there. All ranks call it."""
    found: dict[str, Any] = {"bandwidth": _bandwidth(engine), "plain": {}, "checkpointed": {}}
    if fed:
        shape = list(fed[0].shape)
        found["shapes"] = {"input_ids": shape}
        found["inputs"] = dict.fromkeys(("input_ids", "labels"), (shape, "int64"))
    emit("survey", **found)


def _peaks(replay: Replay) -> dict[str, int]:
    """Peak bytes by number of samples; a size that does not fit is left out."""
    peaks: dict[str, int] = {}
    for numel in PROBES:
        fine, peak = replay.fits(replay.batch if replay.worst is None else replay.worst, numel, 1)
        if not fine:
            break
        peaks[str(numel)] = peak
    return peaks


def _sample_numel(batch: Batch) -> int:
    """Elements of one sample's largest input: tokens of a text."""
    numels = [
        torch.Size(shape).numel() // batch.numel
        for shape in shapes_of(batch).values()
        if shape and shape[0] == batch.numel
    ]
    return max(numels, default=1)


def _flops(replay: Replay) -> int | None:
    """Operations of forward and backward of one sample; ``None`` where it cannot be counted."""
    counter = FlopCounterMode(display=False, custom_mapping=products())
    try:
        with torch.compiler.set_stance("force_eager"), counter:
            replay.step(resized(replay.batch, 1), 1)
    except torch.OutOfMemoryError:
        return None
    return int(counter.get_total_flops())


def _bandwidth(engine: CoreEngine) -> float | None:
    """Bytes a second of an all-reduce, counted as a ring moves them: 2 (n - 1) / n of the tensor."""
    axis = engine.axis if engine.axis.world_size > 1 else engine.mesh.world  # those that share layers
    if axis.world_size == 1:
        return None
    tensor = torch.zeros(BANDWIDTH_NBYTES // 4, device=engine.device)
    best = float("inf")
    for _ in range(4):
        _settle(engine)
        start = time.perf_counter()
        dist.all_reduce(tensor, group=axis.group)
        _settle(engine)
        best = min(best, time.perf_counter() - start)
    moved = BANDWIDTH_NBYTES * 2 * (axis.world_size - 1) / axis.world_size
    slowest = torch.tensor(
        [best], dtype=torch.float64 if engine.device.type == "cpu" else torch.float32, device=engine.device
    )
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=axis.group)
    return moved / float(slowest)


def _settle(engine: CoreEngine) -> None:
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)
