"""Keys of ``expert_parallel`` that cannot be, or say something against each other, whatever the model is."""

from __future__ import annotations

from ds_hf.config.source import Draft
from ds_hf.config.types.root import Config

__all__ = ["check_experts"]

_BASE = "/expert_parallel"
_CHILDREN = ("router_pattern", "expert_pattern", "shared_experts_pattern", "shared_experts_gate_pattern")
_WEIGHTS = ("expert_w1", "expert_w2", "expert_w3")


def check_experts(config: Config, draft: Draft) -> None:
    """Collect them; of a section that is off, too, for it is to be switched on one day."""
    section = config.expert_parallel
    if draft.faulty(_BASE):
        return
    for key in (*_CHILDREN, *_WEIGHTS, "num_experts_attr", "top_k_attr"):
        name = getattr(section, key)
        if name is not None and not name.isidentifier():
            message = f"{name!r:.80} is not the name of one attribute"
            draft.fault(f"{_BASE}/{key}", message, "give the name that it has in its module, without dots and patterns")
    given = [key for key in _WEIGHTS if getattr(section, key) is not None]
    for index, key in enumerate(given):
        if other := next((each for each in given[:index] if getattr(section, each) == getattr(section, key)), None):
            message = f"{key} and {other} are both {getattr(section, key)!r:.80}"
            draft.fault(f"{_BASE}/{key}", message, "name each weight once; gate and up in one weight are expert_w1")
    for key in ("top_k", "routed_scaling_factor"):
        value = getattr(section, key)
        if isinstance(value, str) and value != "auto":
            draft.fault(f"{_BASE}/{key}", f"{value!r:.80} is neither a number nor auto", "remove it: the model says it")
        elif not isinstance(value, str) and value <= 0:
            draft.fault(f"{_BASE}/{key}", f"{value} is not above 0", "remove it: the model says it")
    groups, limited = section.num_expert_groups, section.num_limited_groups
    if (groups is None) != (limited is None):
        there, lacking = ("num_expert_groups", "num_limited_groups")[:: 1 if limited is None else -1]
        draft.fault(f"{_BASE}/{there}", f"{there} says nothing without {lacking}", f"add {lacking}, or remove both")
    elif groups is not None and limited is not None and not 1 <= limited <= groups:
        message = f"a token cannot use {limited} of {groups} groups"
        draft.fault(f"{_BASE}/num_limited_groups", message, f"give 1 to {max(groups, 1)}")
    if section.gate_up_impl == "fused" and not section.use_grouped_mm:
        message = "a product of gate and up is a grouped one, which use_grouped_mm switches off"
        draft.fault(f"{_BASE}/gate_up_impl", message, "remove one of the two")
    if section.row_weighting_impl == "fused":
        message = "rows are weighted within DeepEP alone in that way, and there is no DeepEP here"
        draft.fault(f"{_BASE}/row_weighting_impl", message, "remove it: rows are weighted where experts compute")
