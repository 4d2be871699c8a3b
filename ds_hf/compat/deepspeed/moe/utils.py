"""``deepspeed.moe.utils`` for models without DeepSpeed's expert layers, which scripts ask before they know.

DeepSpeed marks a parameter of its experts with ``allreduce = False``: each process has experts of its own. ds_hf trains
experts as transformers writes them, alike on all processes, so such a mark is refused and nothing is split.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from ds_hf.errors import ConfigError

__all__ = [
    "configure_moe_param_groups",
    "has_moe_layers",
    "is_moe_param",
    "is_moe_param_group",
    "split_params_grads_into_shared_and_expert_params",
    "split_params_into_different_moe_groups_for_optimizer",
    "split_params_into_shared_and_expert_params",
]


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether ``m`` has DeepSpeed's expert layers, and how many experts: there are no such layers here."""
    return False, 0


def is_moe_param(param: Tensor) -> bool:
    """Whether ``param`` is marked as one that the processes do not share."""
    return not getattr(param, "allreduce", True)


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Whether the group says that it is one of experts."""
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(params: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Those that all processes share, and those that are marked as experts."""
    listed = list(params)
    return [p for p in listed if not is_moe_param(p)], [p for p in listed if is_moe_param(p)]


def split_params_grads_into_shared_and_expert_params(group: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients, in their parameters' dtype, of shared and of expert parameters."""
    shared, experts = split_params_into_shared_and_expert_params(p for p in group if p.grad is not None)
    return _gradients(shared), _gradients(experts)


def _gradients(params: list[Tensor]) -> list[Tensor]:
    return [p.grad.to(p.dtype) for p in params if p.grad is not None]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | tuple[dict[str, Any], ...] | list[dict[str, Any]],
    max_group_size: int | float = 178956971,
) -> list[dict[str, Any]]:
    """The groups as a list, each with its parameters as a list; without experts there is nothing to split.

    Raises:
        ValueError: ``param_groups`` is neither a group nor a list of them.
        ConfigError: a parameter is marked as an expert.
    """
    if isinstance(param_groups, dict):
        param_groups = [param_groups]
    if not isinstance(param_groups, (list, tuple)):
        raise ValueError(f"parameter groups are a dict or a list of dicts, not a {type(param_groups).__name__}")
    for group in param_groups:
        group["params"], experts = split_params_into_shared_and_expert_params(group["params"])
        if experts:
            raise ConfigError(
                f"{len(experts)} parameters are marked as experts of single processes (allreduce = False), the first "
                f"of shape {tuple(experts[0].shape)}: expert parallelism is not supported yet. Use a mixture-of-"
                "experts model of transformers, whose experts ZeRO divides like all weights"
            )
    return list(param_groups)


def configure_moe_param_groups(model_parameters: list[Any]) -> list[dict[str, Any]]:
    """One named group of parameters, or the groups that are given.

    Raises:
        TypeError: there is something else in the list.
    """
    for entry in model_parameters:
        if not isinstance(entry, (Tensor, dict)):
            raise TypeError(f"an optimizer takes parameters or groups of them, not a {type(entry).__name__}")
    if isinstance(model_parameters[0], dict):
        if any("moe" in group for group in model_parameters):
            return model_parameters
        return split_params_into_different_moe_groups_for_optimizer(model_parameters)
    return split_params_into_different_moe_groups_for_optimizer({"params": model_parameters, "name": "dense-params"})
