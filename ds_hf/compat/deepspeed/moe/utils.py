"""``deepspeed.moe.utils``: experts among parameters, and parameter groups of their own for them.

A parameter of an expert is marked with ``allreduce = False`` and says in ``group_name`` how many processes divide its
layer. The engine goes by the layers and takes groups as they are, so a model trains without this.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from ds_hf.deepspeed_api.moe.layer import MoE

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
    """Whether ``m`` has DeepSpeed's layers of experts, and how many experts the first has."""
    first = next((module for module in m.modules() if isinstance(module, MoE)), None)
    return first is not None, 0 if first is None else first.num_experts


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
    max_group_size: int | float | None = 178956971,
) -> list[dict[str, Any]]:
    """The groups without their experts, then groups of these: one for each name of theirs (``ep_size_N``) and group
    that they come from, with the settings of that, ``"moe": True`` and no more than ``max_group_size`` elements (one
    parameter may have more).

    Args:
        param_groups: each has a ``"name"`` where there are experts; they are changed.

    Raises:
        ValueError: ``param_groups`` is neither a group nor a list of them, or a group with experts has no name.
    """
    if isinstance(param_groups, dict):
        param_groups = [param_groups]
    if not isinstance(param_groups, (list, tuple)):
        raise ValueError(f"parameter groups are a dict or a list of dicts, not a {type(param_groups).__name__}")
    found = list[dict[str, Any]]()
    for group in param_groups:
        group["params"], experts = split_params_into_shared_and_expert_params(group["params"])
        if experts and "name" not in group:
            raise ValueError('a parameter group with experts has no "name": give each group one of its own')
        for name in dict.fromkeys(param.group_name for param in experts):  # type: ignore[attr-defined]
            alike = [param for param in experts if param.group_name == name]  # type: ignore[attr-defined]
            for part in _parts(alike, max_group_size):
                found.append({**group, "name": name, "moe": True, "params": part})
    return [*param_groups, *found]


def _parts(params: list[Tensor], most: int | float | None) -> list[list[Tensor]]:
    """``params`` in their order, divided into lists of at most ``most`` elements; as in DeepSpeed the first is empty if
    one parameter alone has more."""
    room = float("inf") if most is None else float(most)
    parts, left = [list[Tensor]()], room
    for param in params:
        numel = int(getattr(param, "ds_numel", param.numel()))
        if numel > left:
            parts.append([])
            left = room
        parts[-1].append(param)
        left -= numel
    return parts


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
