"""What looks at a finished engine, or changes how it runs its module: one row each, and a room of its own that is
entered where the configuration, the mesh or the environment asks for it.

``ds_hf.report`` is not among them: its processes agree on a folder before anything is built, see ``builder``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

from torch.nn.modules.batchnorm import _NormBase

from ds_hf.config.types import Config
from ds_hf.engine.engine import CoreEngine
from ds_hf.measure.protocol import TRIAL_ENV
from ds_hf.measure.saving import LR_ENV, MEASURING, being_measured

__all__ = ["FEATURES", "Feature", "attach_features", "is_monitored"]


class Feature(NamedTuple):
    """One of them.

    Attributes:
        wanted: whether this engine has it.
        attach: module in ``ds_hf.engine`` and function, which is given the engine.
    """

    name: str
    wanted: Callable[[CoreEngine], object]
    attach: str


def _prints(engine: CoreEngine) -> bool:
    return engine.mesh.world.rank == 0


def _speaks(engine: CoreEngine) -> bool:
    """Of what is only measured the tools speak."""
    return _prints(engine) and not any(map(os.environ.get, MEASURING))


def _generates(engine: CoreEngine) -> bool:
    return any(callable(getattr(type(module), "generate", None)) for module in engine.module.modules())


def _packs(engine: CoreEngine) -> bool:
    """Models of transformers, which may be given several documents in a row."""
    return engine.optimizer is not None and hasattr(getattr(engine.module, "config", None), "use_cache")


def _trains(engine: CoreEngine) -> bool:
    """What is measured is whole batches, whatever the step."""
    return engine.optimizer is not None and not being_measured()


def _norms(engine: CoreEngine) -> bool:
    several = engine.optimizer is not None and engine.mesh.replicas.world_size > 1
    return several and any(isinstance(module, _NormBase) for module in engine.module.modules())


def _adapts(engine: CoreEngine) -> bool:
    """Layers of adapters, which are known by their parts: peft need not be there."""
    return engine.optimizer is not None and any("lora_A" in m._modules for m in engine.module.modules())


def _tiles(engine: CoreEngine) -> bool:
    own = engine.settings.ds_hf
    chunks = own.chunked_loss is True or (own.chunked_loss == "auto" and _adapts(engine))
    return own.tiled_mlp is not None or chunks or engine.mesh.shape.tensor > 1


def is_monitored(settings: Config) -> bool:
    """Whether one of the monitors is on, on some process."""
    return any(each.enabled for each in (settings.tensorboard, settings.wandb, settings.csv_monitor, settings.comet))


def _writes(engine: CoreEngine) -> bool:
    return is_monitored(engine.settings) and engine.optimizer is not None and engine.monitor.writes


# In this order: what comes later sees what came before it.
FEATURES = (
    Feature(
        "sequences exchanged by copies between GPUs",
        lambda e: e.mesh.shape.sequence > 1 and e.settings.ds_hf.peer_copies and e.device.type == "cuda",
        "comm.peers:attach_exchanges",
    ),
    Feature("monitors", _writes, "observe.monitor.feed:attach"),
    Feature(
        "times, memory and operations of phases",
        lambda e: e.settings.wall_clock_breakdown or e.settings.memory_breakdown or e.settings.flops_profiler.enabled,
        "observe.breakdown:attach",
    ),
    Feature(
        "the balance of experts",
        lambda e: e.settings.expert_parallel.enabled and e.optimizer is not None,
        "observe.experts:attach",
    ),
    Feature(
        "the first batch compared over the tensor axis",
        lambda e: e.mesh.shape.tensor > 1 and not e.mesh.is_given,
        "parallel.tensor.same_batch:attach",
    ),
    Feature(
        "whole parameters that compute with a part of the activations",
        lambda e: e.mesh.shape.tensor > 1 and not e.mesh.is_given and e.optimizer is not None,
        "parallel.tensor.partial:attach",
    ),
    Feature(
        "rules of division, tried out",
        lambda e: e.mesh.shape.tensor > 1 and not e.mesh.is_given,
        "parallel.tensor.tried:attach",
    ),
    Feature(
        "settings compared over processes",
        lambda e: e.optimizer is not None and e.mesh.world.world_size > 1,
        "parallel.likeness:attach",
    ),
    Feature(
        "columns that are chosen again",
        lambda e: e.settings.zero_optimization.zenflow is not None and e.optimizer is not None,
        "optim.zenflow.epochs:attach",
    ),
    Feature(
        "parameters without a gradient",
        lambda e: not e.settings.zero_optimization.ignore_unused_parameters and e.optimizer is not None,
        "observe.unused:attach",
    ),
    Feature(
        "running statistics of each process",
        _norms,
        "observe.statistics:attach",
    ),
    Feature("packed documents", _packs, "modules.documents:attach"),
    Feature(
        "a curriculum by length",
        lambda e: (e.settings.data_efficiency.enabled or e.settings.curriculum_learning.enabled) and _trains(e),
        "modules.curriculum:attach",
    ),
    Feature(
        "dropped tokens",
        lambda e: e.settings.data_efficiency.enabled and _trains(e),
        "modules.token_drop:attach",
    ),
    Feature(
        "batches of a budget of tokens, which a script may not have taken",
        lambda e: e.settings.data_efficiency.enabled and _trains(e),
        "parallel.budgets:attach",
    ),
    Feature(
        "activations in host memory",
        lambda e: e.settings.activation_checkpointing.cpu_checkpointing or e.settings.ds_hf.offload_activations,
        "modules.activations:attach",
    ),
    Feature(
        "tiled MLPs, chunked losses, losses of cut heads",
        _tiles,
        "modules.tiling:attach",
    ),
    Feature("Python's collector off", lambda e: e.settings.disable_python_gc, "observe.python_gc:attach"),
    Feature(
        "adapters that are computed together",
        lambda e: e.settings.ds_hf.fused_lora and _adapts(e),
        "modules.adapters:attach",
    ),
    Feature("generation", _generates, "modules.generation:attach"),
    Feature(
        "blocks that are left out",
        lambda e: e.settings.progressive_layer_drop.enabled and _trains(e),
        "modules.layer_drop:attach",
    ),
    Feature(
        "products in fp8",
        lambda e: e.settings.ds_hf.fp8 and e.settings.ds_hf.fp8.enabled and e.optimizer is not None,
        "modules.fp8:attach",
    ),
    Feature(
        "layers that round as they train",
        lambda e: e.settings.ds_hf.qat and e.settings.ds_hf.qat.enabled and e.optimizer is not None,
        "modules.qat:attach",
    ),
    # Also where the file asks for neither: a block's own compile() leads to the engine from the start.
    Feature("compiled and captured blocks", lambda e: True, "modules.compiling:attach"),
    Feature("the line with which it begins", _speaks, "observe.progress:introduce"),
    Feature("what it prints of steps", _prints, "observe.progress:attach"),
    Feature(
        "the LR finder's run",
        lambda e: os.environ.get(LR_ENV),
        "observe.probes.learning_rate.script:attach",
    ),
    Feature("the autotuner's trial", lambda e: os.environ.get(TRIAL_ENV), "observe.probes.trial:attach"),
)


def attach_features(engine: CoreEngine) -> None:
    """Give ``engine`` all that it is to have."""
    for feature in FEATURES:
        if feature.wanted(engine):
            module, function = feature.attach.split(":")
            getattr(import_module(f"ds_hf.engine.{module}"), function)(engine)
