"""Bytes of model states on each rank, from parameter counts alone: the arithmetic of the state plan.

Follows the rows of ``StatePlan``: parameters, gradients, optimizer states (master weights where parameters have 16
bits, and two moments in fp32), plus what one unit needs while it is in use. Activations, logits and the CUDA context
are not in it. Counts are elements, results are bytes. Nothing of the engine is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ds_hf.config import load_config
from ds_hf.config.optimizer_traits import traits_of
from ds_hf.config.plan import Placement, StatePlan, StateSpec, plan_states

__all__ = [
    "ModelSize",
    "StateBytes",
    "estimate_states",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "measure",
]

ITEM_NBYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
UNITS_IN_USE = 2  # the one that computes and the one that is being gathered


@dataclass(frozen=True)
class ModelSize:
    """Parameter counts of a model.

    Attributes:
        total: elements of all parameters, tied ones once.
        trainable: elements of those that get gradients.
        largest_unit: elements of the largest set that is gathered together.
    """

    total: int
    trainable: int
    largest_unit: int


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one rank: rows that lie on its device, and the sum of what lies in host memory."""

    parameters: int
    gradients: int
    optimizer: int
    in_use: int
    host: int

    @property
    def device(self) -> int:
        """Everything on the device."""
        return self.parameters + self.gradients + self.optimizer + self.in_use


def estimate_states(
    plan: StatePlan,
    size: ModelSize,
    world_size: int,
    *,
    module_dtype: str = "float32",
    accumulates: bool = False,
    split_masters: bool = False,
) -> StateBytes:
    """What one of ``world_size`` ranks holds at most, apart from activations.

    Args:
        plan: the state plan of the configuration.
        size: parameter counts.
        world_size: number of ranks.
        module_dtype: torch's name of the dtype of the model's parameters, where the plan leaves it to the model.
        accumulates: whether gradients of several micro-batches are summed (in fp32, unless the plan says otherwise).
        split_masters: only the half of each master is kept that a bf16 parameter lacks, where the plan allows it.
    """
    parameter = ITEM_NBYTES[plan.parameters.dtype or module_dtype]
    communicated = ITEM_NBYTES[plan.communication_dtype] if plan.communication_dtype else parameter
    kept = ITEM_NBYTES[plan.gradients.dtype or "float32"] if accumulates else communicated
    # masters of the parameters' own dtype are the parameters
    master = ITEM_NBYTES["float32"] if parameter < ITEM_NBYTES[plan.optimizer.dtype or "float32"] else 0
    if split_masters and plan.may_split_masters and (plan.parameters.dtype or module_dtype) == "bfloat16":
        master -= parameter
    moments = traits_of("AdamW").moments * ITEM_NBYTES[plan.moments]

    values = _held(plan, plan.parameters, size.total, world_size)
    if plan.parameters.over != plan.optimizer.over and plan.shards_parameters:  # the first shard, beside the second
        values += -(-size.trainable // world_size)
    rows = {
        "parameters": (plan.parameters, values * parameter),
        "gradients": (plan.gradients, _held(plan, plan.gradients, size.trainable, world_size) * kept),
        "optimizer": (plan.optimizer, _held(plan, plan.optimizer, size.trainable, world_size) * (master + moments)),
    }
    device = {name: 0 if _is_away(spec) else nbytes for name, (spec, nbytes) in rows.items()}
    host = sum(nbytes for spec, nbytes in rows.values() if _is_away(spec) and spec.device == "cpu")
    return StateBytes(**device, in_use=_in_use(plan, size, world_size, parameter, communicated), host=host)


def _held(plan: StatePlan, spec: StateSpec, numel: int, world_size: int) -> int:
    return -(-numel // plan.shards(spec.over, world_size)) if spec.placement is Placement.SHARDED else numel


def _is_away(spec: StateSpec) -> bool:
    """In host memory or on NVMe."""
    # Partial sums are made where the model computes, whatever becomes of them at the boundary.
    return spec.device != "device" and spec.placement is not Placement.PARTIAL


def _in_use(plan: StatePlan, size: ModelSize, world_size: int, parameter: int, communicated: int) -> int:
    """Whole units on the device: gathered parameters, and a gradient on its way to its shard."""
    nbytes = 0
    if plan.shards_parameters and (world_size > 1 or plan.parameters.device != "device"):
        nbytes += UNITS_IN_USE * size.largest_unit * parameter
    if plan.gradients.placement is Placement.SHARDED and (world_size > 1 or plan.gradients.device != "device"):
        nbytes += size.largest_unit * communicated
    return nbytes


def measure(model: Any) -> ModelSize:
    """Count the parameters of a torch module; it may lie on the meta device or be sharded."""
    # Only this function needs torch: with counts at hand it is not paid for.
    from ds_hf.engine.zero.buffer import logical_shape
    from ds_hf.engine.zero.planning import make_units

    counts = {param: logical_shape(param).numel() for param in model.parameters()}
    return ModelSize(
        total=sum(counts.values()),
        trainable=sum(numel for param, numel in counts.items() if param.requires_grad),
        largest_unit=max((sum(counts[param] for param in unit.params) for unit in make_units(model)), default=0),
    )


# -- under DeepSpeed's names: bf16 with fp32 optimizer states; host bytes of a node, device bytes of a GPU -------------


def _needs(size: ModelSize, gpus: int, nodes: int, host_factor: float, zero: dict[str, Any]) -> tuple[int, int]:
    config = load_config({"bf16": {"enabled": True}, "zero_optimization": zero}, check_batch=False)
    needs = estimate_states(plan_states(config), size, gpus * nodes)
    return int(needs.host * gpus * host_factor), needs.device


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """(host bytes of a node, device bytes of a GPU) of stage 2."""
    size = ModelSize(total_params, total_params, 0)
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu" if cpu_offload else "none"}}
    return _needs(size, num_gpus_per_node, num_nodes, additional_buffer_factor, zero)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """(host bytes of a node, device bytes of a GPU, device bytes of the largest unit in use) of stage 3.

    Without ``zero_init`` every process builds the whole model in host memory first, which is then the larger need.
    """
    size = ModelSize(total_params, total_params, largest_layer_params)
    zero = {
        "stage": 3,
        "offload_optimizer": {"device": "cpu" if cpu_offload else "none"},
        "offload_param": {"device": "cpu" if cpu_offload and cpu_offload_params else "none"},
    }
    host, device = _needs(size, num_gpus_per_node, num_nodes, additional_buffer_factor, zero)
    if not zero_init:
        host = max(host, int(total_params * ITEM_NBYTES["float32"] * num_gpus_per_node * additional_buffer_factor))
    return host, device, UNITS_IN_USE * largest_layer_params * ITEM_NBYTES["bfloat16"]


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the needs of stage 2 with and without offload, from a parameter count."""
    _print_head(ModelSize(total_params, total_params, 0), num_gpus_per_node, num_nodes)
    for offload in (True, False):
        host, device = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        _print_row(host, device, f"offload_optimizer={'cpu' if offload else 'none'}")


def estimate_zero2_model_states_mem_needs_all_live(
    model: Any, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the needs of stage 2 with and without offload, for a model."""
    total = measure(model).total
    estimate_zero2_model_states_mem_needs_all_cold(total, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the needs of stage 3 with every combination of offload and ``zero.Init``, from parameter counts."""
    _print_head(ModelSize(total_params, total_params, largest_layer_params), num_gpus_per_node, num_nodes)
    for optimizer, params, zero_init in _zero3_choices():
        host, device, _ = estimate_zero3_model_states_mem_needs(
            total_params,
            largest_layer_params,
            num_gpus_per_node,
            num_nodes,
            optimizer,
            params,
            zero_init,
            additional_buffer_factor,
        )
        names = ["none", "cpu"]
        _print_row(
            host, device, f"offload_param={names[params]}, offload_optimizer={names[optimizer]}, zero.Init={zero_init}"
        )


def estimate_zero3_model_states_mem_needs_all_live(
    model: Any, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the needs of stage 3 with every combination of offload and ``zero.Init``, for a model."""
    size = measure(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        size.total, size.largest_unit, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def _zero3_choices() -> Iterator[tuple[bool, bool, bool]]:
    for optimizer, params in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            yield optimizer, params, zero_init


def _print_head(size: ModelSize, gpus: int, nodes: int) -> None:
    unit = f", largest unit {size.largest_unit / 1e6:.0f} M" if size.largest_unit else ""
    sys.stdout.write(
        f"Model states of {size.total / 1e6:.0f} M parameters{unit}, on {nodes} x {gpus} GPUs, without activations:\n"
        "  host of a node | each GPU | settings\n"
    )


def _print_row(host: int, device: int, settings: str) -> None:
    sys.stdout.write(f"  {host / 2**30:10.2f}GiB | {device / 2**30:5.2f}GiB | {settings}\n")
