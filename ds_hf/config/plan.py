"""The state plan: where each row of model states lives. The only place that reads the number of the ZeRO stage.

The model states of the ZeRO paper (arXiv:1910.02054) are three rows - parameters, gradients, optimizer states -
and each has a placement over the data-parallel axis, a device and a dtype. Everything in the engine follows this
table and never asks for the stage.

========  ==========  ==========================================  ================
stage     parameters  gradients                                   optimizer states
========  ==========  ==========================================  ================
0         replicated  partial sums until the boundary, then whole  replicated
1         replicated  partial sums until the boundary              sharded
2         replicated  sharded every micro-batch                    sharded
3         sharded     sharded every micro-batch                    sharded
========  ==========  ==========================================  ================

What is divided is divided over all replicas of a parameter, or *over inner*: over neighbouring processes among them, as
a rule those of a host.

==========================================================  ==========  =======================
asked for by                                                parameters  gradients and optimizer
==========================================================  ==========  =======================
the stage alone                                             replicas    replicas
``mics_shard_size``, accelerate's ``dp_shard_size``         inner       inner
``zero_hpz_partition_size`` (stage 3)                       inner       replicas
==========================================================  ==========  =======================
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal

from ds_hf.dtypes import canonical

if TYPE_CHECKING:
    from ds_hf.config.types import Config

__all__ = [
    "SAFE_MODULES",
    "NonFiniteMode",
    "Over",
    "Placement",
    "StatePlan",
    "StateSpec",
    "is_parameter_sharded",
    "nonfinite_mode",
    "plan_states",
]

NonFiniteMode = Literal["warn", "skip", "error"]
Over = Literal["replicas", "inner"]

# Classes whose gradients travel in the dtype of torch_autocast unless the configuration names others.
SAFE_MODULES = tuple(
    f"torch.nn.modules.{name}" for name in ("linear.Linear", "conv.Conv1d", "conv.Conv2d", "conv.Conv3d")
)


class Placement(Enum):
    """How one row of model states lies over the data-parallel axis."""

    REPLICATED = "replicated"
    SHARDED = "sharded"
    PARTIAL = "partial"  # gradients only: every rank holds its own unreduced sum


@dataclass(frozen=True)
class StateSpec:
    """One row of the table.

    Attributes:
        placement: over the data-parallel axis.
        device: ``"device"`` (where the model computes), ``"cpu"`` or ``"nvme"``.
        dtype: torch's dtype name, or ``None`` for "as the module has it" (gradients: as the parameters).
        over: the processes over which it is divided where it is: all replicas, or an inner part of them.
        bits: of the numbers as which it travels between processes; ``None`` for values of its dtype.
    """

    placement: Placement
    device: str = "device"
    dtype: str | None = None
    over: Over = "replicas"
    bits: int | None = None


@dataclass(frozen=True)
class StatePlan:
    """The table for one engine.

    Attributes:
        parameters, gradients, optimizer: the three rows; ``optimizer`` covers master weights and moments, and its
            dtype is that of the masters.
        moments: dtype name of the optimizer's moments.
        communication_dtype: dtype name in which gradients are reduced, ``None`` for the parameters' dtype ...
        narrow_modules: ... but those of parameters of these classes, which are reduced in that of ``autocast``.
        autocast: dtype name of the ``torch.autocast`` in which the engine runs the model, ``None`` for none.
        whole_below: where parameters are sharded, those of fewer elements stay whole, 0 for none ...
        whole_in_all: ... as long as they are not more elements than this together.
        may_split_masters: where the device updates bf16 parameters that lie there, with fp32 masters, only the half of
            each master that its parameter lacks is kept, if the optimizer's rule can.
        joins_blocks: small blocks of the model are communicated several together.
        inner: processes over which rows are divided that are so over "inner"; ``None`` where none is.
        block: elements that share a scale, where rows travel in few bits.
        first_hop: neighbours that add up such gradients before they travel further: 1 for none, "auto" for the
            processes of a host.
        loco: (share of the old error, sums after which it is forgotten), where rounding is made up for.
    """

    parameters: StateSpec
    gradients: StateSpec
    optimizer: StateSpec
    moments: str = "float32"
    communication_dtype: str | None = None
    narrow_modules: tuple[str, ...] = ()
    autocast: str | None = None
    whole_below: int = 0
    whole_in_all: int = 0
    may_split_masters: bool = False
    joins_blocks: bool = False
    inner: int | None = None
    block: int = 256
    first_hop: int | Literal["auto"] = "auto"
    loco: tuple[float, int] | None = None

    @property
    def scales_loss(self) -> bool:
        """Gradients pass through fp16, whose range needs a loss scale."""
        return "float16" in (self.parameters.dtype, self.autocast)

    @property
    def shards_parameters(self) -> bool:
        return self.parameters.placement is Placement.SHARDED

    @property
    def shards_optimizer(self) -> bool:
        return self.optimizer.placement is Placement.SHARDED

    def shards(self, over: Over, processes: int) -> int:
        """Into how many shards a row is divided, with so many replicas."""
        return processes if over == "replicas" or self.inner is None else min(self.inner, processes)

    @property
    def reduces_every_micro_batch(self) -> bool:
        """Gradients are reduced in each backward, so skipping the reduction (``no_sync``) is impossible."""
        return self.gradients.placement is Placement.SHARDED


_PERSISTENCE = "/zero_optimization/stage3_param_persistence_threshold"
_PLACEMENTS = {
    0: (Placement.REPLICATED, Placement.PARTIAL, Placement.REPLICATED),
    1: (Placement.REPLICATED, Placement.PARTIAL, Placement.SHARDED),
    2: (Placement.REPLICATED, Placement.SHARDED, Placement.SHARDED),
    3: (Placement.SHARDED, Placement.SHARDED, Placement.SHARDED),
}


def stages_with(**rows: Placement) -> tuple[int, ...]:
    """The stages at which the rows ``parameters``, ``gradients`` and ``optimizer``, those given, lie so."""
    names = ("parameters", "gradients", "optimizer")
    return tuple(
        stage
        for stage, placements in _PLACEMENTS.items()
        if all(rows.get(name, placement) is placement for name, placement in zip(names, placements, strict=True))
    )


def less_divided(rows: Iterable[Placement]) -> tuple[int, ...]:
    """The stages that divide fewer rows than these."""
    divided = list(rows).count(Placement.SHARDED)
    return tuple(stage for stage, each in _PLACEMENTS.items() if each.count(Placement.SHARDED) < divided)


def dtype_name(value: str | None) -> str | None:
    """Torch's name of a DeepSpeed dtype word (``"bf16"`` -> ``"bfloat16"``)."""
    return None if value is None else canonical(value.lower())


def plan_states(config: Config) -> StatePlan:
    """Fill the table from a validated configuration (DeepSpeed keys ``zero_optimization``, ``fp16``, ``bf16``,
    ``communication_data_type``, ``data_types``, ``torch_autocast``). Pure: reads nothing but ``config``."""
    zero = config.zero_optimization
    parameters, gradients, optimizer = _PLACEMENTS[zero.stage]
    parameter_dtype = "bfloat16" if config.bf16.enabled else "float16" if config.fp16.enabled else None
    parameter_device = _device(zero.offload_param.device) if parameters is Placement.SHARDED else "device"
    optimizer_device = _device(zero.offload_optimizer.device)
    inner, parameters_over, others_over = _inside(config)
    narrow = config.bf16.enabled and config.bf16.bf16_master_weights_and_grads
    accumulation_dtype = dtype_name(config.data_types.grad_accum_dtype) or ("bfloat16" if narrow else None)
    section = config.torch_autocast
    autocast = (dtype_name(section.dtype) or "bfloat16") if section.enabled and section.dtype != "fp32" else None
    wire, loco = config.ds_hf.wire, zero.zeropp_loco_param
    safe = SAFE_MODULES if section.lower_precision_safe_modules is None else section.lower_precision_safe_modules
    return StatePlan(
        parameters=StateSpec(parameters, parameter_device, parameter_dtype, parameters_over, _parameter_bits(config)),
        gradients=StateSpec(
            gradients,
            "cpu" if optimizer_device == "nvme" else optimizer_device,
            accumulation_dtype,
            others_over,
            _gradient_bits(config),
        ),
        optimizer=StateSpec(optimizer, optimizer_device, "bfloat16" if narrow else "float32", others_over),
        moments="bfloat16" if narrow and config.bf16.bf16_optimizer_states else "float32",
        communication_dtype=dtype_name(_communication_dtype(config, parameter_dtype)),
        narrow_modules=safe if autocast else (),
        autocast=autocast,
        whole_below=zero.stage3_param_persistence_threshold if config.is_given(_PERSISTENCE) else 0,
        whole_in_all=zero.stage3_model_persistence_threshold,
        may_split_masters=config.ds_hf.split_masters is not False
        and not narrow
        and parameter_dtype != "float16"
        and parameter_device == "device"
        and optimizer_device != "nvme",
        joins_blocks=config.ds_hf.join_blocks and parameter_device == "device" and optimizer_device != "nvme",
        inner=inner,
        block=wire.block,
        first_hop=wire.first_hop,
        loco=None if loco is None else (loco.err_beta, loco.reset_T),
    )


def nonfinite_mode(config: Config) -> NonFiniteMode:
    """What happens to a step whose gradient norm is not finite (``ds_hf.nonfinite``): as it says, or else "skip" where
    a loss scale or ``bf16.check_grad_overflow`` needs that, and "warn" where DeepSpeed checks nothing."""
    checked = plan_states(config).scales_loss or (config.bf16.enabled and config.bf16.check_grad_overflow)
    return config.ds_hf.nonfinite or ("skip" if checked else "warn")


def is_parameter_sharded(config: Config) -> bool:
    """Whether parameters are sharded, for code that runs before an engine exists (``zero.Init``)."""
    return plan_states(config).shards_parameters


def _inside(config: Config) -> tuple[int | None, Over, Over]:
    """How many processes are "inner", and over what parameters and the other rows are divided: "replicas" too for
    rows that are not divided."""
    zero, mesh = config.zero_optimization, config.mesh
    second = zero.zero_hpz_partition_size > 1
    asked = max(zero.mics_shard_size, zero.zero_hpz_partition_size if second else 0)  # before the mesh is known
    inner = mesh.inner if mesh is not None else asked if asked > 0 else None
    if inner is None or zero.stage == 0 or (second and zero.stage != 3):
        return None, "replicas", "replicas"
    return inner, "inner" if zero.stage == 3 else "replicas", "replicas" if second else "inner"


def _gradient_bits(config: Config) -> int | None:
    """``ds_hf.wire.gradients`` before ``zero_quantized_gradients``, which is 4 bits."""
    given = config.ds_hf.wire.gradients
    bits = given if given is not None else 4 if config.zero_optimization.zero_quantized_gradients else 16
    return None if bits == 16 or config.zero_optimization.stage == 0 else bits


def _parameter_bits(config: Config) -> int | None:
    """``ds_hf.wire.parameters`` before ``zero_quantized_weights``, which is 8 bits."""
    given = config.ds_hf.wire.parameters
    bits = given if given is not None else 8 if config.zero_optimization.zero_quantized_weights else 16
    return None if bits == 16 or config.zero_optimization.stage != 3 else bits


def _communication_dtype(config: Config, parameter_dtype: str | None) -> str | None:
    """``communication_data_type``; without it, ``seq_parallel_communication_data_type`` where sequences are divided,
    which never narrows what is fp32 by being left at fp32."""
    if config.communication_data_type is not None or config.mesh is None or config.mesh.sequence == 1:
        return config.communication_data_type
    given = config.seq_parallel_communication_data_type
    return None if given == "fp32" and parameter_dtype is None else given


def _device(name: str | None) -> str:
    return name if name in ("cpu", "nvme") else "device"
