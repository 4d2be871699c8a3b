"""The mesh of processes: how many there are along each axis, from everything that says something about it.

The sizes come from the file, from an ``mpu``, a topology, ``mesh_param`` and accelerate's ``ParallelismConfig``. Each
makes claims. Sources that disagree, sizes that do not multiply to the number of processes and features that are missing
are faults, and all are found at once. Pure but for calling the functions of an ``mpu`` or a topology.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ds_hf.config.plan import plan_states
from ds_hf.config.types.root import AXES, MeshShape
from ds_hf.errors import ConfigError, Fault

if TYPE_CHECKING:
    from ds_hf.config.types import Config

__all__ = [
    "MODEL",
    "MODEL_TOPOLOGY",
    "TOPOLOGY",
    "Claim",
    "MeshShape",
    "divides_layers",
    "find_mesh",
    "given_claims",
    "is_sequence_mpu",
    "mesh_shape",
    "refuse_beside_pipelines",
    "require_features",
    "tensor_notes",
]

MPU, MESH_PARAM, MODEL = "initialize(mpu=...)", "initialize(mesh_param=...)", "initialize(model=...)"
TOPOLOGY = "topology"  # of a PipelineModule, whose author has divided the layers along its model axis
MODEL_TOPOLOGY = "model.topology()"  # of another model
_ENVIRONMENT = "environment"
_NAMES = {
    "pipe": "pipeline-parallel",
    "data": "data-parallel",
    "sequence": "sequence-parallel",
    "context": "context-parallel",
    "tensor": "tensor-parallel",
    "expert": "expert-parallel",
    "inner": "inner (hierarchical ZeRO)",
    "model": "model-parallel",
}
_FEATURES = {  # that the engine does not have
    "context": "context parallelism",
    "expert": "expert parallelism",
}


@dataclass(frozen=True)
class Claim:
    """What one source says about the size of one axis.

    Attributes:
        axis: of ``AXES``, or ``"expert"``, ``"inner"``, ``"context"``, ``"model"`` (pipe x tensor).
        size: at least 1; for ``inner`` 1 is a size too, elsewhere it says that the axis is not used.
        source: as users know it.
        pointer: where faults about it are shown: the key of the file, or the argument.
    """

    axis: str
    size: int
    source: str
    pointer: str

    def __str__(self) -> str:
        return f"{self.size} ({self.source})"


def mesh_shape(config: Config, world: int, given: Sequence[Claim] = ()) -> MeshShape:
    """The mesh of ``world`` processes that the configuration and ``given`` ask for.

    Args:
        config: a configuration whose single values are legal.
        world: number of processes.
        given: what else says something, see ``given_claims``.

    Raises:
        ConfigError: with all faults.
    """
    shape, faults = _resolve([*_file_claims(config), *given], world)
    if faults:
        raise ConfigError(faults, config.source)
    return shape


def find_mesh(config: Config, world: int, given: Sequence[Claim]) -> tuple[MeshShape, list[Fault]]:
    """The mesh, and what is wrong about it and about what was given: sources that disagree, sizes that do not fit the
    ``world`` (0: unknown, which fits everything), features that are missing."""
    claims = [*_file_claims(config), *given]
    missing = _missing_features(claims) + _nothing_divided(config, claims) + _beside_pipelines(config, claims)
    missing += _beside_experts(claims)
    shape, faults = _resolve(claims, 0 if missing else world)
    return shape, missing + faults


def divides_layers(config: Config, given: Sequence[Claim]) -> bool:
    """Whether the engine is to cut layers over the tensor axis: the file or accelerate asks for the axis, and the
    model is not divided already."""
    tensor = [claim for claim in (*_file_claims(config), *given) if claim.axis == "tensor" and claim.size > 1]
    asked = any(claim.pointer not in (MPU, MODEL, TOPOLOGY, MODEL_TOPOLOGY) for claim in tensor)
    return asked and not any(claim.pointer == MODEL for claim in tensor)


def tensor_notes(config: Config) -> list[tuple[str, str]]:
    """Keys that say how layers are shared, with what they lack, in a file that does not say that they are."""
    section = config.tensor_parallel
    if any(claim.axis == "tensor" for claim in _file_claims(config)):
        return []
    given = {
        "ds_hf.tensor_sequence_parallel": config.ds_hf.tensor_sequence_parallel,
        "tensor_parallel.vocab_parallel_lm_head": section.vocab_parallel_lm_head,
        "tensor_parallel.partition_config": section.partition_config is not None,
        "tensor_parallel.preset_model": section.preset_model is not None,
    }
    lacks = (
        "no effect without tensor_parallel.autotp_size above 1, unless the script says it (tp_size of a "
        "ParallelismConfig, tp_model_init)"
    )
    return [(name, lacks) for name, value in given.items() if value]


# -- sources ------------------------------------------------------------------------------------------------------


def _file_claims(config: Config) -> list[Claim]:
    """Keys of the file that are not at their "off" value."""
    zero, tensor = config.zero_optimization, config.tensor_parallel
    stages, experts = config.pipeline.stages, config.expert_parallel
    found = [
        ("tensor", tensor.autotp_size if tensor.autotp_size > 1 else None, "tensor_parallel.autotp_size"),
        ("tensor", tensor.tp.tp_size if tensor.tp.tp_size > 1 else None, "tensor_parallel.tp.tp_size"),
        ("sequence", config.sequence_parallel_size if config.sequence_parallel_size > 1 else None, ""),
        ("data", config.data_parallel_size, "data_parallel_size"),
        ("pipe", stages if isinstance(stages, int) and stages > 1 else None, "pipeline.stages"),
        ("expert", experts.autoep_size if experts.enabled else None, "expert_parallel.autoep_size"),
        ("inner", zero.mics_shard_size if zero.mics_shard_size > 0 else None, _MICS),
        ("inner", zero.zero_hpz_partition_size if zero.zero_hpz_partition_size > 1 else None, _HPZ),
    ]
    named = [(axis, size, key or "sequence_parallel_size") for axis, size, key in found if size is not None]
    return [Claim(axis, size, key, "/" + key.replace(".", "/")) for axis, size, key in named]


_MICS, _HPZ = "zero_optimization.mics_shard_size", "zero_optimization.zero_hpz_partition_size"


def given_claims(
    *,
    mpu: Any = None,
    mesh_param: Any = None,
    topology: Any = None,
    environ: Mapping[str, str] | None = None,
) -> list[Claim]:
    """What is said outside the file.

    Args:
        mpu: a Megatron-style object or module, see ``_MPU_SIZES``.
        mesh_param: (data-parallel size, sequence-parallel size).
        topology: of a DeepSpeed ``ProcessTopology``'s form: ``get_axis_names()``, ``get_dim(axis)``.
        environ: accelerate's ``PARALLELISM_CONFIG_*``, which count where ``ACCELERATE_USE_PARALLELISM_CONFIG`` is true.

    Raises:
        ConfigError: with everything that is no size, or has another form.
    """
    faults: list[Fault] = []
    claims = [
        *(_mpu_claims(mpu, faults) if mpu is not None else ()),
        *(_param_claims(mesh_param, faults) if mesh_param else ()),
        *(_topology_claims(topology, faults) if topology is not None else ()),
        *_environment_claims(environ or {}, faults),
    ]
    if faults:
        raise ConfigError(faults, "initialize()")
    return claims


# What the interfaces in use have: Megatron-LM's old and new names, DeepSpeed's pipeline grid, Ulysses. An object that
# answers by ``__getattr__`` does not list them; what else it lists is found by its form.
_MPU_SIZES = {
    "get_tensor_model_parallel_world_size": "tensor",
    "get_slice_parallel_world_size": "tensor",
    "get_model_parallel_world_size": "model",
    "get_pipeline_model_parallel_world_size": "pipe",
    "get_pipe_parallel_world_size": "pipe",
    "get_sequence_parallel_world_size": "sequence",
    "get_context_parallel_world_size": "context",
    "get_expert_model_parallel_world_size": "expert",
    "get_data_parallel_world_size": "data",
}
_FORM = re.compile(r"get_(?!(?:\w+_)?data_)\w+_parallel_world_size")


def _mpu_claims(mpu: Any, faults: list[Fault]) -> Iterator[Claim]:
    if is_sequence_mpu(mpu):  # its names of model parallelism mean the same group
        name = "get_sequence_parallel_world_size"
        size = _size(getattr(mpu, name)(), f"mpu.{name}()", MPU, faults)
        if size is not None:
            yield Claim("sequence", size, f"mpu.{name}()", MPU)
        return
    if not callable(getattr(mpu, "get_data_parallel_group", None)):
        message = f"{type(mpu).__name__} has no get_data_parallel_group(), which an mpu needs"
        faults.append(Fault(MPU, message, "leave mpu= out where all processes are data-parallel"))
    listed = [name for name in dir(mpu) if _FORM.fullmatch(name) and name not in _MPU_SIZES]
    tensor = 1
    for name in (*_MPU_SIZES, *listed):
        function = getattr(mpu, name, None)
        if not callable(function):
            continue
        try:
            value = function()
        except (AssertionError, TypeError):  # Megatron's for a group that was never made; one that needs arguments
            continue
        if value is None:
            continue
        size = _size(value, f"mpu.{name}()", MPU, faults)
        axis = _MPU_SIZES.get(name, name.removeprefix("get_").removesuffix("_parallel_world_size"))
        if size is None or (name in listed and (size == 1 or (size == tensor and "tensor" in axis))):
            continue  # Megatron-core's combinations: tensor and context, experts' tensor
        tensor = max(tensor, size) if axis in ("tensor", "model") else tensor
        yield Claim(axis, size, f"mpu.{name}()", MPU)


def is_sequence_mpu(mpu: Any) -> bool:
    """Whether it divides sequences and nothing else, as DeepSpeed's module ``parallel_state_sp`` does."""
    has_sequence = callable(getattr(mpu, "get_sequence_parallel_world_size", None))
    return has_sequence and not callable(getattr(mpu, "get_data_parallel_group", None))


def _param_claims(mesh_param: Any, faults: list[Fault]) -> Iterator[Claim]:
    sizes = tuple(mesh_param) if isinstance(mesh_param, Sequence) else ()
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        message = f"{mesh_param!r:.60} is not a mesh"
        faults.append(Fault(MESH_PARAM, message, "give (data-parallel size, sequence-parallel size)"))
        return
    yield Claim("data", sizes[0], "mesh_param[0]", MESH_PARAM)
    yield Claim("sequence", sizes[1], "mesh_param[1]", MESH_PARAM)


def _topology_claims(topology: Any, faults: list[Fault]) -> Iterator[Claim]:
    pointer, axes = TOPOLOGY, {"model": "tensor"}
    for name in topology.get_axis_names():
        axis = axes.get(name, name)
        if axis not in AXES:
            faults.append(Fault(pointer, f"it has an axis {name!r:.40}", "its axes are pipe, data, sequence and model"))
        elif (size := _size(topology.get_dim(name), f"topology.get_dim({name!r})", pointer, faults)) is not None:
            yield Claim(axis, size, f"topology.get_dim({name!r})", pointer)


def _environment_claims(environ: Mapping[str, str], faults: list[Fault]) -> Iterator[Claim]:
    """accelerate writes them at launch. Both data-parallel sizes together ask for hierarchical ZeRO."""
    if environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() != "true":
        return
    sizes = {}
    for name in ("DP_REPLICATE", "DP_SHARD", "TP", "CP", "SP"):
        variable = f"PARALLELISM_CONFIG_{name}_SIZE"
        text = environ.get(variable, "1")
        sizes[name] = _size(int(text) if text.isdecimal() else text, variable, _ENVIRONMENT, faults) or 1
    for name, axis in (("TP", "tensor"), ("CP", "context"), ("SP", "sequence")):
        if sizes[name] > 1:
            yield Claim(axis, sizes[name], f"PARALLELISM_CONFIG_{name}_SIZE", _ENVIRONMENT)
    replicas, shards = sizes["DP_REPLICATE"], sizes["DP_SHARD"]
    if replicas * shards > 1:
        source = "PARALLELISM_CONFIG_DP_REPLICATE_SIZE x PARALLELISM_CONFIG_DP_SHARD_SIZE"
        yield Claim("data", replicas * shards, source, _ENVIRONMENT)
    if replicas > 1 and shards > 1:
        yield Claim("inner", shards, "PARALLELISM_CONFIG_DP_SHARD_SIZE", _ENVIRONMENT)


def _size(value: Any, source: str, pointer: str, faults: list[Fault]) -> int | None:
    try:
        size = operator.index(value)
    except TypeError:
        faults.append(Fault(pointer, f"{source} gives {value!r:.60}, not a number"))
        return None
    if size < 1:
        faults.append(Fault(pointer, f"{source} gives {size}, which is not a number of processes"))
        return None
    return size


# -- the shape ----------------------------------------------------------------------------------------------------


def require_features(claims: Sequence[Claim]) -> None:
    """Refuse claims that need what the engine does not have.

    Raises:
        ConfigError: with all of them.
    """
    if faults := _missing_features(claims):
        raise ConfigError(faults, "arguments")


def refuse_beside_pipelines(config: Config, claims: Sequence[Claim]) -> None:
    """Refuse what does not go together with the stages of a pipeline.

    Raises:
        ConfigError: with all of it.
    """
    if faults := _beside_pipelines(config, [*_file_claims(config), *claims]):
        raise ConfigError(faults, config.source)


def _missing_features(claims: Sequence[Claim]) -> list[Fault]:
    """Faults of the claims that need what the engine does not have."""
    faults = []
    pipelined = any(claim.pointer == TOPOLOGY for claim in claims)
    for claim in claims:
        known = claim.axis in ("data", "sequence", "inner", "model")
        known = known or (claim.axis == "tensor" and claim.pointer != MODEL_TOPOLOGY)
        known = known or (claim.axis == "pipe" and pipelined)
        known = known or (claim.axis == "expert" and claim.pointer != MPU)
        if known or claim.size == 1:
            continue
        if claim.axis == "pipe":
            message = f"{claim.source} is {claim.size}, and the model is not a PipelineModule"
            if claim.pointer == MPU:
                message, fix = f"{message}: nothing would pass from one stage to the next", _STAGES_FIX
            else:
                message, fix = f"{message}: a file alone divides no layers", _PIPELINE_FIX
            faults.append(Fault(claim.pointer, message, fix))
            continue
        what = _FEATURES.get(claim.axis, f"{claim.axis.replace('_', ' ')} parallelism")
        if claim.axis == "context" and claim.pointer == _ENVIRONMENT:
            fix = "cp_size is for FSDP2: take sp_size instead, which divides sequences here"
        elif claim.pointer == MPU:
            fix = (
                f"the {claim.size} parts would train and be saved apart from each other: give an mpu whose size is 1 "
                "here. ZeRO stage 3 divides the model over all data-parallel processes. Where the model has to be "
                "parallel in this way, install DeepSpeed itself"
            )
        else:
            fix = "remove it, so that every process is data-parallel"
        what = "tensor parallelism" if claim.axis == "tensor" else what
        faults.append(Fault(claim.pointer, f"{claim.source} is {claim.size}: {what} is not supported yet", fix))
    return faults


_PIPELINE_FIX = (
    "give initialize() a deepspeed.pipe.PipelineModule (of a model of transformers: "
    "PipelineModule.from_transformers(model, num_stages=...)), or remove the key; the Trainer trains no pipelines"
)


_STAGES_FIX = (
    "give initialize() a deepspeed.pipe.PipelineModule of your layers with topology="
    "PipeModelDataParallelTopology(num_pp, num_mp, num_dp), beside which the mpu may stay. A loop of your "
    "own that sends activations from stage to stage is not trained"
)


def _beside_pipelines(config: Config, claims: Sequence[Claim]) -> list[Fault]:
    """Faults of what does not go together with the stages of a pipeline."""
    if not any(claim.axis == "pipe" and claim.size > 1 and claim.pointer == TOPOLOGY for claim in claims):
        return []
    faults = []
    if plan_states(config).shards_parameters:
        message = (
            "ZeRO stage 3 with a pipeline: each micro-batch would gather all layers of its stage once more, and a "
            "stage holds no more than its own layers anyway"
        )
        faults.append(Fault("/zero_optimization/stage", message, "use stage 1 or 2, or no PipelineModule"))
    for claim in claims:
        if claim.axis in ("sequence", "expert", "inner") and claim.size > 1:
            message = (
                f"{claim.source} is {claim.size}: {_NAMES[claim.axis]} processes inside a pipeline are not supported"
            )
            faults.append(Fault(claim.pointer, message, "remove it, or use no PipelineModule"))
    return faults


def _beside_experts(claims: Sequence[Claim]) -> list[Fault]:
    """Faults of what does not go together with experts that are divided."""
    size = max((claim.size for claim in claims if claim.axis == "expert"), default=1)
    faults = []
    for claim in claims if size > 1 else ():
        if claim.axis == "expert":
            continue
        if claim.axis == "tensor" and claim.size > 1:
            message = f"{claim.source} is {claim.size} and experts are divided over {size} processes"
            fix = "divide layers or experts: a tensor-parallel plan divides each expert as well"
        elif claim.axis == "inner":
            message = f"{claim.source} is {claim.size}, and experts are divided over {size} of the same processes"
            fix = "remove one of them: divided experts are held by fewer processes already"
        elif claim.pointer == MPU and claim.axis != "sequence":
            message = f"the groups of processes are those of an mpu, and experts are divided over {size}"
            fix = "leave mpu= out"
        else:
            continue
        faults.append(Fault(claim.pointer, message, fix))
    return faults


def _nothing_divided(config: Config, claims: Sequence[Claim]) -> list[Fault]:
    """Faults where accelerate is asked to shard and the stage divides nothing; of keys of the file the rules tell."""
    if plan_states(config).shards_optimizer:
        return []
    return [
        Fault(claim.pointer, f"{claim.source} is {claim.size}, and ZeRO stage 0 divides nothing", _STAGE_FIX)
        for claim in claims
        if claim.axis == "inner" and claim.pointer == _ENVIRONMENT
    ]


_STAGE_FIX = "set zero_optimization.stage to 1, 2 or 3, or leave dp_shard_size out"


def _resolve(claims: Sequence[Claim], world: int) -> tuple[MeshShape, list[Fault]]:
    """The shape, and sources that disagree or sizes that do not fit ``world``: without such faults the shape counts."""
    faults, sizes = [], {}
    for axis in dict.fromkeys(claim.axis for claim in claims):
        about = [claim for claim in claims if claim.axis == axis]
        sizes[axis] = about[0].size
        if len({claim.size for claim in about}) > 1:
            faults.append(_disagreement(_NAMES.get(axis, axis), about))
    both = [claim for claim in claims if claim.axis == "inner"]
    if len({claim.source == _HPZ for claim in both}) > 1:
        message = f"{' and '.join(str(claim) for claim in both)} divide states in two different ways"
        faults.append(Fault(both[-1].pointer, message, "give one of them"))
    model = sizes.pop("model", None)
    if model is not None:
        sizes.setdefault("tensor", model // sizes.get("pipe", 1) or 1)
        if model != sizes["tensor"] * sizes.get("pipe", 1):
            about = [claim for claim in claims if claim.axis in ("model", "pipe", "tensor")]
            faults.append(_disagreement("model-parallel", about, " (pipe x tensor)"))
    if faults:
        return MeshShape(), faults
    fixed = {axis: sizes.get(axis, 1) for axis in AXES if axis != "data"}
    rest = math.prod(fixed.values())
    shape = MeshShape(data=sizes.get("data", max(world // rest, 1)), **fixed)
    if world and shape.processes != world:
        return shape, [_product_fault(claims, shape, world, free="data" not in sizes)]
    shape = replace(shape, expert=sizes.get("expert", 1), inner=sizes.get("inner"))
    whole = shape.data * shape.sequence
    for axis in ("expert", "inner") if world else ():
        part = sizes.get(axis, 1)
        if whole % part:
            faults.append(_part_fault(next(c for c in claims if c.axis == axis), shape, whole))
    return replace(shape, inner=None) if shape.inner == whole else shape, faults


def _disagreement(name: str, about: Sequence[Claim], note: str = "") -> Fault:
    values = [str(claim) for claim in about]
    listed = f"{', '.join(values[:-1])} and {values[-1]}"
    pointer = about[0].pointer
    return Fault(pointer, f"the {name} size{note} is given as {listed}", "make them agree, or leave all but one out")


def _product_fault(claims: Sequence[Claim], shape: MeshShape, world: int, *, free: bool) -> Fault:
    """Sizes that do not multiply to the number of processes, with the meshes nearest to what was asked for."""
    about = [c for c in claims if c.axis in (*AXES, "model") and (c.size > 1 or c.axis == "data")]
    said = " x ".join(f"{_NAMES[axis]} {c}" for axis, c in {c.axis: c for c in about}.items())
    product = shape.pipe * shape.sequence * shape.tensor if free else shape.processes
    relation = f"does not divide the {world}" if free else f"is {product}, and there are {world}"
    near = "".join(f"\n           {each}" for each in _nearby(shape, world, free=free))
    return Fault(about[0].pointer, f"{said} {relation} processes", f"use one of these:{near}")


def _nearby(shape: MeshShape, world: int, *, free: bool) -> list[str]:
    """Meshes of ``world`` processes that change as little as possible of the sizes in ``shape``."""
    asked = {axis: size for axis in AXES if (size := getattr(shape, axis)) > 1 or axis == "data"}
    divisors = [size for size in range(1, world + 1) if world % size == 0]
    others = [axis for axis in asked if axis != "data"]
    found = []
    for sizes in itertools.product(divisors, repeat=len(others)):
        data, left = divmod(world, math.prod(sizes))
        if left == 0:
            found.append({"data": data, **dict(zip(others, sizes, strict=True))})

    def distance(sizes: dict[str, int]) -> tuple[int, float]:
        counted = [axis for axis in asked if not (free and axis == "data")]
        changed = sum(sizes[axis] != asked[axis] for axis in counted)
        return changed, sum(abs(math.log(sizes[axis] / asked[axis])) for axis in counted)

    return [str(MeshShape(**sizes)) for sizes in sorted(found, key=distance)[:4]]


def _part_fault(claim: Claim, shape: MeshShape, whole: int) -> Fault:
    sizes = [size for size in range(1, whole + 1) if whole % size == 0]
    near = sorted(sizes, key=lambda size: abs(math.log(size / claim.size)))[:3]
    message = f"{claim.source} {claim.size} does not divide the {whole} processes that hold the same states ({shape})"
    return Fault(claim.pointer, message, f"set it to {' or '.join(str(size) for size in sorted(near))}")
