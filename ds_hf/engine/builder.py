"""``build_engine``: the only place that wires parts of different layers together. What it is given and could only train
without is refused here.

Order: configuration -> process group -> axis -> plan -> units and masters -> optimizer -> engine -> scheduler, data.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from inspect import signature
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ds_hf.config import load_config
from ds_hf.config.mesh import MODEL_TOPOLOGY, TOPOLOGY, Claim, divides_layers, given_claims, is_sequence_mpu
from ds_hf.config.plan import StatePlan, plan_states
from ds_hf.config.types import Config
from ds_hf.config.types.root import MeshShape
from ds_hf.engine.comm.comms_logger import comms_logger
from ds_hf.engine.comm.mesh import Mesh, watch_for_hangs
from ds_hf.engine.comm.mpu import check_same_groups
from ds_hf.engine.comm.together import Building, building
from ds_hf.engine.engine import CoreEngine
from ds_hf.engine.features import attach_features, is_monitored
from ds_hf.engine.modules.quantized.settings import quantize_by_settings
from ds_hf.engine.modules.sparse.models import prepare_attention
from ds_hf.engine.observe.monitor import open_monitors
from ds_hf.engine.optim.build import build_optimizer
from ds_hf.engine.optim.muon_groups import mark_matrices
from ds_hf.engine.optim.schedules.build import build_scheduler
from ds_hf.engine.optim.sharded import ShardedOptimizer
from ds_hf.engine.parallel.data import build_dataloader, dealt_to_data
from ds_hf.engine.parallel.likeness import (
    describe_listed,
    describe_model,
    describe_scheduler,
    describe_settings,
    describe_users_modules,
)
from ds_hf.engine.parallel.pipeline.module import StageModule
from ds_hf.engine.parallel.tensor.divide import check_whole, divide
from ds_hf.engine.parallel.tensor.tokens import divide_tokens
from ds_hf.engine.parts import make_parts
from ds_hf.engine.zero.buffer import home_of
from ds_hf.engine.zero.cut import is_cut
from ds_hf.engine.zero.packed import is_packed
from ds_hf.engine.zero.replicas import expert_processes
from ds_hf.errors import ConfigError
from ds_hf.host import known_processes, local_world_size
from ds_hf.log import set_log_level_from_string, warn_once
from ds_hf.measure.protocol import TRIAL_ENV
from ds_hf.measure.saving import LR_ENV
from ds_hf.printable import counted

__all__ = ["WORTH_SAYING", "build_engine", "training_ranks", "whole_model_advice"]

E = TypeVar("E", bound=CoreEngine)
F = TypeVar("F", bound=Callable[..., Any])
Prepare = Callable[[Config, nn.Module, Any, Iterable[Any] | None], Iterable[Any] | None]


def _repeatable(build: F) -> F:
    """In a trial of the autotuner, which makes further engines of the same arguments with other keys."""

    @wraps(build)
    def run(model: nn.Module, source: Any, **given: Any) -> CoreEngine:
        if not os.environ.get(TRIAL_ENV):
            return cast(CoreEngine, build(model, source, **given))
        from ds_hf.engine.observe.probes.trial.further import Given

        kept = Given(given)
        engine: CoreEngine = build(model, source, **kept.arguments)
        engine.remake = lambda config: build(model, config, **kept.again())
        return engine

    return cast(F, run)


@_repeatable
def build_engine(
    model: nn.Module,
    source: Any,
    *,
    optimizer: Any,
    model_parameters: Iterable[Any] | None,
    training_data: Any,
    lr_scheduler: Any,
    mpu: Any,
    mesh_param: Any,
    collate_fn: Callable[[list[Any]], Any] | None,
    compiled: bool,
    claims: Sequence[Claim] = (),
    engine_type: type[E],
    optimizer_type: type[ShardedOptimizer],
    prepare: Prepare | None = None,
) -> E:
    """An engine that trains ``model`` as ``source`` says; the process group exists. Collective.

    Args:
        source: whatever ``load_config`` takes.
        compiled, claims: compile the model's blocks, whatever ``source`` says; what else is known of the mesh.
        engine_type, optimizer_type: what to make, ``CoreEngine`` and ``ShardedOptimizer`` or classes derived from them.
        prepare: changes the model first, and gives the parameters to train. Others: as ``initialize`` takes them.

    Raises:
        ConfigError: the configuration, or its combination with the arguments, is wrong.
    """
    with building("initialize()", training_ranks(model, mpu, mesh_param, claims)) as others:
        claims = _all_claims(model, mpu, mesh_param, claims)
        settings, plan, shape, divides = _load(source, model, mpu, claims, compiled=compiled)
        others.compare(describe_settings(settings, optimizer, model_parameters, lr_scheduler))
        model_parameters = _compare_models(others, model, mpu, optimizer, model_parameters)
        mesh = _make_mesh(settings, shape, model, mpu, divides=divides)
        if settings.log_level is not None:
            set_log_level_from_string(settings.log_level)
        watch_for_hangs(mesh, settings.ds_hf.hang_timeout)
        record = _recording(settings.ds_hf.report)
        if settings.comms_logger.enabled:
            comms_logger.configure(settings.comms_logger)
        _check_scheduler(optimizer, lr_scheduler)
        if settings.ds_hf.sparse_attention:
            prepare_attention(settings, model, **_shares_of_heads(mesh))
        monitor = _monitors(settings, mesh, silent=_is_measured(model))
        model_parameters = _divide(settings, mesh, model, optimizer, model_parameters, layers=divides)
        inner = _make_optimizer(settings, model, optimizer, model_parameters, prepare)
        _quantize(settings, plan, model, inner)
        others.meet()  # collectives begin here
        if advice := _advice(plan, mesh, model.parameters()):
            warn_once(advice)
        parts = make_parts(
            settings, plan, mesh, model, inner, optimizer_type, whole_batches=isinstance(model, StageModule)
        )
        engine = engine_type(model, source if isinstance(source, dict) else settings.resolved, settings, parts, monitor)
        engine.lr_scheduler = _make_scheduler(settings, inner, lr_scheduler, others)
        if training_data is not None:
            engine.training_dataloader = _loader_of(engine, training_data, collate_fn, trains=inner is not None)
        attach_features(engine)
        record(engine)
        return engine


def _loader_of(engine: CoreEngine, data: Any, collate_fn: Callable[[list[Any]], Any] | None, *, trains: bool) -> Any:
    """Of ``initialize``'s data; where batches are of a budget of tokens, learning rates follow their sizes."""
    if engine.settings.data_efficiency.batches_by_tokens:
        from ds_hf.engine.parallel.budgets import budget_loader, follow_sizes

        loader: Any = budget_loader(engine.settings, engine.mesh, engine.batch, data, collate_fn)
        if trains:
            engine.lr_scheduler = follow_sizes(engine, loader)
    elif engine.settings.data_efficiency.samples_by_metrics:
        from ds_hf.engine.parallel.sampling import sampled_loader

        loader = sampled_loader(engine.settings, engine.mesh, engine.batch, data, collate_fn)
    else:
        loader = build_dataloader(
            data,
            batch_size=engine.batch.micro,
            collate_fn=collate_fn,
            drop_last=engine.settings.dataloader_drop_last,
            rank=engine.mesh.sample_rank,
            world_size=engine.mesh.shape.data,
            shuffles=not isinstance(engine.module, StageModule),  # as in DeepSpeed, whose pipelines read data in order
        )
    return dealt_to_data(loader, engine.mesh)


def _shares_of_heads(mesh: Mesh) -> dict[str, tuple[int, int]]:
    """This process's place and the size, of each axis that divides attention heads."""
    axes = {name: mesh.axis(name) for name in ("tensor", "sequence") if getattr(mesh.shape, name) > 1}
    return {name: (axis.rank, axis.world_size) for name, axis in axes.items()}


def _recording(folder: str | None) -> Callable[[CoreEngine], Any]:
    """What records an engine for a report into ``folder``; without one, none of its code is loaded. Collective.

    Raises:
        ConfigError: on every process, where one cannot write there.
    """
    if folder is None:
        return lambda engine: None
    from ds_hf.engine.observe.report import attach as report

    path = report.agree_on_folder(folder)
    return lambda engine: report.attach(engine, path)


def _monitors(settings: Config, mesh: Mesh, *, silent: bool) -> Callable[[], Any]:
    """Gives the monitors: those that are on are opened here, where a fault is one of the configuration. Collective."""
    if silent or not is_monitored(settings):
        return partial(open_monitors, settings, mesh.world, silent=True)
    opened = open_monitors(settings, mesh.world)
    return lambda: opened


def _is_measured(model: nn.Module) -> bool:
    """Whether this is a run of the autotuner or the LR finder."""
    if os.environ.get(LR_ENV) and isinstance(model, StageModule):
        raise ConfigError(
            "the LR finder runs forward and backward of an engine by itself, which are parts of train_batch() here: "
            "find the rate with a model without stages",
            "PipelineModule",
        )
    return bool(os.environ.get(TRIAL_ENV) or os.environ.get(LR_ENV))


def _divide(
    settings: Config,
    mesh: Mesh,
    model: nn.Module,
    optimizer: Any,
    model_parameters: Iterable[Any] | None,
    *,
    layers: bool,
) -> Iterable[Any] | None:
    """Leave of the model what this process holds of it, where its DTensors, layers or stages are divided; the
    parameters to train."""
    model_parameters = _adopt_dtensors(model, mesh, optimizer, model_parameters)
    model_parameters = _adopt_torchaos(model, optimizer, model_parameters)
    if mesh.shape.tensor == 1 and any(is_cut(param) for param in model.parameters()):
        check_whole(model)
    if layers:
        divide(model, mesh, settings.tensor_parallel, optimizer)
        divide_tokens(model, mesh.axis("tensor"), wanted=settings.ds_hf.tensor_sequence_parallel)
    elif settings.ds_hf.tensor_sequence_parallel:
        warn_once("ds_hf.tensor_sequence_parallel has no effect: the engine does not divide layers over processes here")
    if settings.expert_parallel.enabled:
        from ds_hf.engine.parallel.experts.divide import divide_experts

        divide_experts(model, mesh, settings.expert_parallel, optimizer)
    elif any(expert_processes(param) > 1 for param in model.parameters()):
        from ds_hf.engine.parallel.experts.divide import check_places

        check_places(model, mesh)
    if mesh.shape.expert > 1:
        from ds_hf.engine.parallel.experts.separate import place_experts

        place_experts(model, mesh)
    if isinstance(model, StageModule):
        return _set_chunks(model, settings.ds_hf.pipeline.chunks, optimizer, model_parameters)
    if settings.ds_hf.pipeline.chunks > 1:
        warn_once(f"ds_hf.pipeline.chunks has no effect: {type(model).__name__} is not a PipelineModule")
    return model_parameters


def _all_claims(model: nn.Module, mpu: Any, mesh_param: Any, known: Sequence[Claim]) -> list[Claim]:
    """What everything but the configuration says of the mesh."""
    topology = getattr(model, "topology", None)
    topology = topology() if callable(topology) else None
    if not hasattr(topology, "get_axis_names"):
        topology = None
    claims = [*known, *given_claims(mpu=mpu, mesh_param=mesh_param, topology=topology, environ=os.environ)]
    if isinstance(model, StageModule) and model.data_is_left:
        claims = [claim for claim in claims if (claim.pointer, claim.axis) != (TOPOLOGY, "data")]
    if not isinstance(model, StageModule):
        claims = [replace(claim, pointer=MODEL_TOPOLOGY) if claim.pointer == TOPOLOGY else claim for claim in claims]
    if (room := _dtensor_room(model)) is not None:
        claims += room.dtensor_claims(model)
    return claims


def training_ranks(model: nn.Module, mpu: Any, mesh_param: Any, known: Sequence[Claim]) -> list[int]:
    """The processes that train ``model`` together; all where that cannot be told, which is a fault later."""
    try:
        return _training_ranks(mpu, _all_claims(model, mpu, mesh_param, known))
    except ConfigError:
        return list(range(dist.get_world_size()))


def _training_ranks(mpu: Any, claims: Sequence[Claim]) -> list[int]:
    if mpu is not None and all(claim.size == 1 or claim.axis == "data" for claim in claims):
        return dist.get_process_group_ranks(mpu.get_data_parallel_group())  # the others may train something else
    return list(range(dist.get_world_size()))


def _compare_models(
    others: Building, model: nn.Module, mpu: Any, optimizer: Any, listed: Iterable[Any] | None
) -> Iterable[Any] | None:
    """Whether all processes have the same; ``listed`` parameters come back, to be read again."""
    listed = list(listed) if isinstance(listed, Iterator) else listed
    described = describe_model(model) | describe_listed(model, optimizer, listed)
    others.compare(described, _same_model(model, mpu), doubtful=describe_users_modules(model))
    return listed


def _same_model(model: nn.Module, mpu: Any) -> list[int] | None:
    """The processes that were given the same modules, ``None`` for all: where its author divided it, replicas have."""
    if isinstance(model, StageModule):
        return model.mpu().dp_group
    if mpu is not None and not is_sequence_mpu(mpu):
        return dist.get_process_group_ranks(mpu.get_data_parallel_group())
    cut = next((param for param in model.parameters() if is_cut(param) or expert_processes(param) > 1), None)
    return None if cut is None else [dist.get_rank()]


def _load(
    source: Any, model: nn.Module, mpu: Any, claims: Sequence[Claim], *, compiled: bool
) -> tuple[Config, StatePlan, MeshShape, bool]:
    """The configuration, its plan, the sizes of the mesh that it and everything else ask for, and whether the engine
    divides the model over the tensor axis. Nothing is sent."""
    processes = len(_training_ranks(mpu, claims))
    settings = load_config(source, world_size=processes, given=claims)
    if compiled:
        settings = replace(settings, ds_hf=replace(settings.ds_hf, compile="blocks"))
    assert settings.mesh is not None
    plan, shape = plan_states(settings), settings.mesh
    if plan.inner is None:  # asked for at a stage that does not
        shape = replace(shape, inner=None)
    elif (here := known_processes()) is not None:
        _warn_of_hosts(plan.inner, here // shape.tensor)
    _warn_of_one_host(plan, processes)
    if shape.sequence > 1 and (here := known_processes()) is not None:
        _warn_of_divided_sequences(shape.sequence * shape.tensor, here)
    divides = divides_layers(settings, claims)
    if divides and isinstance(model, StageModule):
        _refuse_whole_models(settings)
    return settings, plan, shape, divides


def _make_mesh(settings: Config, shape: MeshShape, model: nn.Module, mpu: Any, *, divides: bool) -> Mesh:
    """The groups of all axes. Collective."""
    if isinstance(model, StageModule):
        if model.data_is_left and shape.tensor > 1:
            model.share_layers(shape.tensor)
        grid = model.mpu()
        if mpu is not None and mpu is not grid:
            check_same_groups(mpu, grid.dp_group, grid.slice_group)
        if divides:
            grid.mesh.leave_layers_to_engine()
        return grid.mesh
    mesh = Mesh(shape) if mpu is None else Mesh.given(mpu, shape, divided=not divides)
    mesh.sums_sequence = settings.ds_hf.sequence_gradients == "sum"
    mesh.data_before_experts = settings.use_data_before_expert_parallelism
    return mesh


def _refuse_whole_models(settings: Config) -> None:
    """What looks for layers of a whole model; on all stages, of which some would find them."""
    if settings.ds_hf.tensor_sequence_parallel:
        raise ConfigError(
            "tokens are divided from the first block of a model to its last, and a process of a pipeline has one "
            "stage: remove the key",
            "/ds_hf/tensor_sequence_parallel",
        )
    if settings.tensor_parallel.vocab_parallel_lm_head:
        raise ConfigError(
            "it looks for the output layer of a whole model, and a process of a pipeline has one stage: give rules for "
            "the embedding and the output layer in tensor_parallel.partition_config",
            "/tensor_parallel/vocab_parallel_lm_head",
        )


def _warn_of_divided_sequences(together: int, here: int) -> None:
    """Say it where processes that share a sequence lie on several hosts that have ``here`` each."""
    if here and here % together:
        sizes = [size for size in range(1, here + 1) if here % size == 0]
        warn_once(
            f"sequences are divided over groups of {together} processes, and a host has {here}: what each attention "
            "layer exchanges, four times q, k and v in a step, goes between hosts; give a "
            f"sequence-parallel size that divides {here} ({', '.join(map(str, sizes))}), and ZeRO the rest"
        )


def _warn_of_one_host(plan: StatePlan, processes: int) -> None:
    """Say it where nothing goes over a slow link that could be packed."""
    if (plan.parameters.bits or plan.gradients.bits) and processes == known_processes() and torch.cuda.is_available():
        warn_once(
            "gradients or parameters in few bits gain nothing here: all processes are on one host, whose GPUs exchange "
            "16 bits faster than they pack them; remove zero_quantized_weights, zero_quantized_gradients and ds_hf.wire"
        )


def _set_chunks(
    model: StageModule, chunks: int, optimizer: Any, model_parameters: Iterable[Any] | None
) -> Iterable[Any] | None:
    """Divide the model as ``ds_hf.pipeline.chunks`` asks, if it is not; the parameters to train."""
    if chunks == 1 or chunks == model.chunks or model.num_stages == 1:
        return model_parameters
    given = {id(each[-1] if isinstance(each, tuple) else each) for each in model_parameters or ()}
    some = model_parameters is not None and any(p.requires_grad and id(p) not in given for p in model.parameters())
    if isinstance(optimizer, Optimizer) or some:
        raise ConfigError(
            f"other layers come to this process than those that the optimizer, or the choice, was made of: "
            f"make the model as PipelineModule(..., chunks={chunks}) first",
            "/ds_hf/pipeline/chunks",
        )
    model.repartition(chunks)
    return None


def _warn_of_hosts(inner: int, here: int) -> None:
    """Say it where groups of ``inner`` replicas do not fit hosts that have ``here`` each."""
    if here and max(inner, here) % min(inner, here):
        warn_once(
            f"states are divided over groups of {inner} processes, and a host has {here}: some groups lie on two "
            f"hosts, and what they gather goes between them; give a size that divides {here}, or a multiple of it"
        )


def _dtensor_room(model: nn.Module) -> Any:
    """``zero.dtensor``, if ``model`` has any: who made a DTensor has imported torch's room for them, which takes a
    second."""
    theirs = sys.modules.get("torch.distributed.tensor")
    if theirs is None or not any(isinstance(param, theirs.DTensor) for param in model.parameters()):
        return None
    from ds_hf.engine.zero import dtensor

    return dtensor


def _adopt_dtensors(
    model: nn.Module, mesh: Mesh, optimizer: Any, model_parameters: Iterable[Any] | None
) -> Iterable[Any] | None:
    """Make ordinary parameters of the model's DTensors, also in the optimizer and the groups that were made of them."""
    if (room := _dtensor_room(model)) is None:
        return model_parameters
    adopted = room.adopt_dtensors(model, mesh)
    adopted.put_into(optimizer)
    given: Iterable[Any] | None = adopted.now_all(model_parameters)
    return given


def _adopt_torchaos(model: nn.Module, optimizer: Any, model_parameters: Iterable[Any] | None) -> Iterable[Any] | None:
    """The same of weights that torchao casts for FSDP2's gathers (``enable_fsdp_float8_all_gather``, which accelerate
    sets)."""
    wrapper = getattr(sys.modules.get("torchao.float8.fsdp_utils"), "WeightWithDynamicFloat8CastTensor", None)
    if wrapper is None or not any(isinstance(param, wrapper) for param in model.parameters()):
        return model_parameters
    from ds_hf.engine.modules.fp8 import adopt_wrapped

    adopted = adopt_wrapped(model, wrapper)
    adopted.put_into(optimizer)
    return adopted.now_all(model_parameters)


# -- optimizer and scheduler --------------------------------------------------------------------------------------


def _make_optimizer(
    settings: Config,
    model: nn.Module,
    optimizer: Any,
    model_parameters: Iterable[Any] | None,
    prepare: Prepare | None,
) -> Optimizer | None:
    """The inner optimizer, still over the model's own parameters."""
    if prepare is not None:
        model_parameters = prepare(settings, model, optimizer, model_parameters)
    if optimizer is not None and settings.optimizer is not None:
        warn_once(f"the optimizer given to initialize() replaces the configuration's {settings.optimizer.type!r}")
    if isinstance(optimizer, Optimizer):
        _check_optimizer(optimizer)
        return optimizer
    if optimizer is None and settings.optimizer is None:
        return None
    groups = _listed_groups(model, model_parameters)
    if callable(optimizer):
        return _called(optimizer, groups)
    if optimizer is not None:
        raise ConfigError(f"optimizer= takes a torch.optim.Optimizer or a function, not {type(optimizer).__name__}")
    assert settings.optimizer is not None
    if settings.optimizer.type.lower() == "muon":
        mark_matrices(model, heads=bool((settings.optimizer.params or {}).get("per_head_muon")))
    offloaded = settings.zero_optimization.offload_optimizer.device != "none"
    return build_optimizer(settings.optimizer.type, settings.optimizer.params, groups, offloaded=offloaded)


def _quantize(settings: Config, plan: StatePlan, model: nn.Module, inner: Optimizer | None) -> None:
    """Frozen parameters that an optimizer lists, and that are bytes now, cannot be unfrozen: it lists them no more."""
    asked = settings.weight_quantization
    if not (
        asked.quantized_initialization
        or asked.post_init_quant
        or settings.zero_optimization.zero_quantized_nontrainable_weights
    ):
        return
    whole = {id(param) for param in model.parameters()}
    quantize_by_settings(settings, model, trains=inner is not None, dtype=plan.parameters.dtype)
    quantized = whole.difference(id(param) for param in model.parameters())
    for group in inner.param_groups if quantized and inner is not None else ():
        group["params"] = [param for param in group["params"] if id(param) not in quantized]


def _check_optimizer(optimizer: Optimizer) -> None:
    """An optimizer that only calls others, or goes through a list of its own, would update nothing: what those hold is
    not what the engine fills."""
    name = type(optimizer).__name__
    closure = signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigError(
            f"{name}.step() computes losses again by a closure, several times a step, and an engine has them from "
            "backward alone: give an optimizer that makes its step of one gradient"
        )
    listed = {id(param) for group in optimizer.param_groups for param in group["params"]}
    beside = {key: value for key, value in vars(optimizer).items() if key not in ("param_groups", "state", "defaults")}
    if held := [key for key, value in beside.items() if _holds(value, listed)]:
        warn_once(
            f"{name} keeps parameters beside its param_groups (in {', '.join(held)}). The engine gives gradients to "
            "what the groups list, which are masters and shards of them: what step() updates by way of the others does "
            "not train"
        )
    own = {id(group) for group in optimizer.param_groups}
    for name, part in vars(optimizer).items():
        if isinstance(part, Optimizer) and not any(id(group) in own for group in part.param_groups):
            raise ConfigError(
                f"{type(optimizer).__name__} passes its parameters on to another optimizer ({name}: "
                f"{type(part).__name__}), whose parameters the engine does not know: share the parameter groups "
                "between them, or give one optimizer with several groups"
            )


def _holds(value: Any, listed: set[int], depth: int = 2) -> bool:
    """Whether a parameter that is listed is in ``value``, or in containers of it."""
    if isinstance(value, Tensor):
        return id(value) in listed
    parts = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
    return (
        depth > 0 and isinstance(parts, (list, tuple, set)) and any(_holds(part, listed, depth - 1) for part in parts)
    )


def _check_scheduler(optimizer: Any, lr_scheduler: Any) -> None:
    """A finished scheduler changes the rates of the optimizer it was built on: that one has to be given, too."""
    if isinstance(lr_scheduler, LRScheduler) and not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"lr_scheduler= is a {type(lr_scheduler).__name__} on an optimizer of its own, which the engine does not "
            "step: give that optimizer as optimizer=, or a function from the optimizer to the scheduler"
        )


def _listed_groups(model: nn.Module, model_parameters: Iterable[Any] | None) -> list[dict[str, Any]]:
    """Parameter groups with what trains, and with what is frozen and could."""
    given = list(model.parameters() if model_parameters is None else model_parameters)
    if not (given and isinstance(given[0], dict)):
        given = [{"params": [p[1] if isinstance(p, tuple) else p for p in given]}]
    kept = [{**group, "params": list(filter(_can_train, _listed(group["params"])))} for group in given]
    trains = any(p.requires_grad for group in kept for p in group["params"])
    if not trains and not (isinstance(model, StageModule) and model.trains_anywhere):
        raise ConfigError("no parameter requires a gradient: there is nothing to optimize")
    if isinstance(model, StageModule):  # groups have the same numbers on all stages, some of which may train nothing
        return kept
    return [group for group in kept if group["params"]]


def _can_train(param: Tensor) -> bool:
    return param.requires_grad or (param.is_floating_point() and not is_packed(param))


def _called(function: Callable[..., Optimizer], groups: list[dict[str, Any]]) -> Optimizer:
    """What ``function`` makes of what trains now. The frozen parameters of each group are listed, too, where it keeps
    the groups: some optimizers take no parameters of certain shapes, or make states at once."""
    trained = [{**group, "params": [p for p in group["params"] if p.requires_grad]} for group in groups]
    given = [[id(p) for p in group["params"]] for group in trained]
    optimizer = function(trained)
    if isinstance(optimizer, Optimizer):
        _check_optimizer(optimizer)
    made = getattr(optimizer, "param_groups", [])
    if given == [[id(p) for p in group["params"]] for group in made]:
        for group, listed in zip(made, groups, strict=True):
            group["params"] = [*group["params"], *(p for p in listed["params"] if not p.requires_grad)]
    return optimizer


def _listed(params: Any) -> list[Tensor]:
    return [params] if isinstance(params, Tensor) else list(params)


def _make_scheduler(settings: Config, inner: Optimizer | None, given: Any, others: Building) -> Any:
    """The scheduler that the engine steps: the argument before the configuration's."""
    named = None if settings.scheduler is None else settings.scheduler.type
    if given is not None and named is not None:
        warn_once(f"the lr_scheduler given to initialize() replaces the configuration's {named!r}")
    if callable(given) and not hasattr(given, "step"):
        made = given(inner)
        others.compare(describe_scheduler(made))
        return made
    if given is not None:
        return given
    if settings.scheduler is None or named is None or inner is None:
        return None
    return build_scheduler(named, settings.scheduler.params, inner, mode=settings.ds_hf.compat_schedules)


# -- advice on what works but takes more than it needs -----------------------------------------------------------------

WORTH_SAYING = 1 << 30  # bytes a process: below, the memory does not matter


def _advice(plan: StatePlan, mesh: Mesh, params: Iterable[Tensor]) -> str | None:
    if plan.shards_parameters:
        return whole_model_advice(params, mesh.replicas.world_size)
    return _other_file_advice(params)


def whole_model_advice(params: Iterable[Tensor], world_size: int, *, worth_saying: int = WORTH_SAYING) -> str | None:
    """A message if ``params``, about to be sharded over ``world_size`` processes, are whole in each of them."""
    nbytes = sum(param.numel() * param.element_size() for param in params if home_of(param) is None)
    if world_size == 1 or nbytes < worth_saying:
        return None
    local = local_world_size()
    return (
        f"every process built the whole model ({_gib(nbytes)}; {local} processes on this host: {_gib(nbytes * local)}) "
        f"before it was sharded; a shard is {_gib(nbytes / world_size)}. To load shards only, create the "
        "TrainingArguments before from_pretrained(); without the Trainer keep `dschf = "
        "HfDeepSpeedConfig(ds_config)` in a variable while loading; a model of your own goes under "
        "`with deepspeed.zero.Init(config_dict_or_path=ds_config):`"
    )


def _other_file_advice(params: Iterable[Tensor]) -> str | None:
    """A message if some of ``params`` are sharded by ``zero.Init``, and the engine that takes them now shards none."""
    homes = [home for param in params if (home := home_of(param)) is not None]
    count = sum(home.buffer.sharded and not home.buffer.param_names for home in homes)  # in no engine before
    if not count:
        return None
    return (
        f"{counted(count, 'parameter', 'parameters')} of the model were built in parts, as for ZeRO stage 3, and this "
        "configuration keeps them whole: they train as they are, but random weights are drawn in another order there. "
        "Construct the model after its own TrainingArguments: until then transformers builds (parts of) models as the "
        "last ones ask, those of an earlier Trainer"
    )


def _gib(nbytes: float) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB" if nbytes >= 1 << 27 else f"{nbytes / (1 << 20):.1f} MiB"
