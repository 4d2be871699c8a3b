"""``initialize``, as DeepSpeed has it: which configuration, the process group, and an engine with DeepSpeed's names.

In a *rehearsal* of a training script something that only looks takes the engine's place: ``ds-hf memory train.py`` runs
the script until it would train, to learn its model, configuration and first batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from ds_hf.config import load_config
from ds_hf.config.types import Config
from ds_hf.deepspeed_api import groups
from ds_hf.deepspeed_api.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO
from ds_hf.deepspeed_api.checkpoint.tensor_info import collect_autotp_universal_checkpoint_info
from ds_hf.deepspeed_api.engine import Engine
from ds_hf.deepspeed_api.optimizer import EngineOptimizer
from ds_hf.deepspeed_api.pipeline import PipelineEngine
from ds_hf.deepspeed_api.sequence.division import release
from ds_hf.deepspeed_api.tensor_parallel import ASKED, asked_of, set_autotp_mode
from ds_hf.engine.builder import build_engine, training_ranks
from ds_hf.engine.comm.process_group import init_distributed
from ds_hf.engine.comm.together import building
from ds_hf.engine.optim.sharded import ShardedOptimizer
from ds_hf.engine.parallel.pipeline.module import StageModule
from ds_hf.errors import ConfigError

__all__ = ["initialize", "is_rehearsed", "rehearsing"]


StandIn = Callable[..., tuple[Any, Any, Any, Any]]
_stand_in: ContextVar[StandIn | None] = ContextVar("ds_hf_rehearsal", default=None)


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[Engine, ShardedOptimizer | None, Any, Any]:
    """Make ``model`` train as the configuration says (DeepSpeed's ``initialize``). All ranks call it.

    Args:
        args: object whose ``deepspeed_config`` names the configuration file, when ``config`` is not given.
        model: the model; it stays the same object and is changed in place. Of a ``PipelineModule`` the engine is a
            ``PipelineEngine``.
        optimizer: a torch optimizer over the model's parameters, or a function from parameters to one; overrides the
            configuration's.
        model_parameters: parameters or parameter groups for the configuration's optimizer; default all that train.
        training_data: a dataset; the returned loader gives this rank its micro-batches.
        lr_scheduler: a scheduler built on ``optimizer``, or a function from the optimizer to one; the engine steps it.
        mpu: Megatron-style object for a model whose layers its author has divided over processes
            (``get_data_parallel_*``, ``get_model_parallel_*`` or ``get_tensor_model_parallel_*``).
        mesh_param: (data-parallel size, sequence-parallel size): processes that read different samples, and that share
            each sequence. Attention of a model of transformers is divided over the latter; other models do that
            themselves, with ``deepspeed.sequence.layer.DistributedAttention``.
        dist_init_required: ``False``: the process group must already exist.
        collate_fn: for ``training_data``.
        config: path, dict, JSON text, base64 or preset name; ``config_params`` is the same, older name.

    Returns:
        engine, optimizer, data loader, scheduler; each but the engine may be ``None``.

    Raises:
        ConfigError: the configuration, or its combination with the arguments, is wrong.
    """
    if model is None or not isinstance(model, nn.Module):
        raise ConfigError(f"initialize() needs model=, an nn.Module; got {type(model).__name__}")
    compiled = type(model).__name__ == "OptimizedModule"
    if compiled:  # torch.compile(model): its graphs would have the hooks inside
        model = cast(nn.Module, model._orig_mod)
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    if (stand_in := _stand_in.get()) is not None:
        if isinstance(model, StageModule):
            raise ConfigError(
                "`ds-hf memory` predicts no pipelines yet: predict the model without stages", "PipelineModule"
            )
        source = _config_source(args, config, config_params)
        return stand_in(model=model, optimizer=optimizer, config=source, data=training_data)
    asked = asked_of(model, mpu) if any(ASKED in vars(module) for module in model.modules()) else None
    claims = [] if asked is None else asked.claims
    moe = _moe_of(model)
    claims += moe.expert_claims(model) if moe else []
    with building("initialize()", training_ranks(model, mpu, mesh_param, claims)):
        source = _config_source(args, config, config_params)
        if asked is not None:
            asked.check(load_config(source, check_batch=False))
        engine = build_engine(
            model,
            source,
            optimizer=optimizer,
            model_parameters=model_parameters,
            training_data=training_data,
            lr_scheduler=lr_scheduler,
            mpu=mpu,
            mesh_param=mesh_param,
            collate_fn=collate_fn,
            compiled=compiled,
            claims=claims,
            engine_type=PipelineEngine if isinstance(model, StageModule) else Engine,
            optimizer_type=EngineOptimizer,
            prepare=_prepare_compression,
        )
        _follow_compression(model, engine)
        engine.mpu = model.mpu() if isinstance(model, StageModule) else mpu
        engine.tp_size_asked = 0 if asked is None else asked.size
        if engine.autotp_size() > 0:
            set_autotp_mode(training=True)
            setattr(engine.module, UNIVERSAL_CHECKPOINT_INFO, collect_autotp_universal_checkpoint_info(engine.module))
        groups.latest = engine.mesh
        if moe or max(engine.mesh.shape.sequence, engine.mesh.shape.expert) > 1:
            groups.make_groups(moe.expert_sizes(model) if moe else ())
        _divide_sequences(model, engine)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


_COMPRESSION = "ds_hf.compression.compress"  # imported where a file, or a script, asks for it


def _prepare_compression(settings: Config, model: nn.Module, optimizer: Any, given: Any) -> Any:
    """Layers that compress, where the file has the section; the parameters to train."""
    if "compression_training" not in settings.resolved and _COMPRESSION not in sys.modules:
        return given
    from ds_hf.compression.compress import prepare_model

    return prepare_model(settings, model, optimizer, given)


def _follow_compression(model: nn.Module, engine: Engine) -> None:
    """Let the schedule of a model that is compressed follow the engine."""
    if _COMPRESSION not in sys.modules:
        return
    from ds_hf.compression import schedule

    if (found := schedule.schedule_of(model)) is not None:
        schedule.attach(engine, found)


def _moe_of(model: nn.Module) -> Any:
    """What knows DeepSpeed's layers of experts; ``None`` where ``model`` has none, and no parameter says so."""
    made = any("deepspeed_experts" in module._modules for module in model.modules())
    if not made and all(getattr(param, "allreduce", True) for param in model.parameters()):
        return None
    from ds_hf.deepspeed_api.moe import layer

    return layer


def _divide_sequences(model: nn.Module, engine: Engine) -> None:
    """Attention of transformers over the processes that share a sequence, or whole sequences again."""
    if engine.mesh.shape.sequence == 1:
        if "ds_hf.deepspeed_api.sequence.ulysses" in sys.modules:  # which alone divides any
            release(model)
        return
    from ds_hf.deepspeed_api.sequence.ulysses import divide_for_engine

    try:
        divide_for_engine(model, engine.mesh.axis("sequence"))
    except ValueError as error:
        engine.destroy()
        raise ConfigError(str(error), "initialize(model=...)") from error


def _config_source(args: Any, config: Any, config_params: Any) -> Any:
    """The one configuration among the three ways of giving it."""
    named = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    if config is not None and config_params is not None:
        raise ConfigError("give config= or config_params=, not both: they are the same argument")
    given = config if config is not None else config_params
    if given is not None and named is not None and given != named:
        raise ConfigError(f"the configuration is given twice: config= and args.deepspeed_config ({named}); drop one")
    if given is None and named is None:
        raise ConfigError("no configuration: give initialize(config=...), or --deepspeed_config on the command line")
    return named if given is None else given


def is_rehearsed() -> bool:
    """Whether a script is only looked at: by one process, however many the training is to have."""
    return _stand_in.get() is not None


@contextmanager
def rehearsing(stand_in: StandIn) -> Iterator[None]:
    """Inside, ``initialize`` calls ``stand_in`` with ``initialize``'s keyword arguments and returns what it returns."""
    token = _stand_in.set(stand_in)
    try:
        yield
    finally:
        _stand_in.reset(token)
