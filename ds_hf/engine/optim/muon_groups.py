"""Which parameters Muon updates, and the groups of the JSON's optimizer "Muon".

DeepSpeed's rule: a parameter of two or more dims whose name has neither "embed" nor "lm_head" in it. The answer is
written on the parameter as ``use_muon``; a value that stands there already is the user's and is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from ds_hf.engine.optim.muon import MuonWithAuxAdam
from ds_hf.engine.optim.muon_heads import head_rows, mark_heads
from ds_hf.engine.zero.buffer import logical_shape
from ds_hf.log import log_once, warn_once

__all__ = ["mark_matrices", "muon_of_json"]

_NOT_BY_NAME = ("embed", "lm_head")
_MUON_KEYS = ("lr", "momentum", "weight_decay", "ns_method")
_ADAM_KEYS = ("lr", "betas", "eps", "weight_decay")


def mark_matrices(model: nn.Module, *, heads: bool = False) -> None:
    """Write ``use_muon`` on every parameter of ``model`` that has no such mark yet; with ``heads`` also which rows are
    those of attention heads."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    counts = {True: 0, False: 0}
    for name, param in model.named_parameters():
        marked: Any = param
        if not hasattr(marked, "use_muon"):
            by_name = not any(part in name.lower() for part in _NOT_BY_NAME)
            marked.use_muon = by_name and len(logical_shape(param)) >= 2
            if marked.use_muon and id(param) in tables and param.requires_grad:
                warn_once(
                    f"{name} is the weight of an embedding, but Muon takes it for an ordinary matrix, as DeepSpeed "
                    'does when "embed" is not in the name: set use_muon = False on the parameter to give it to AdamW'
                )
        if param.requires_grad:
            counts[bool(marked.use_muon)] += logical_shape(param).numel()
    if heads:
        mark_heads(model)
    log_once(f"Muon updates {counts[True]} elements in matrices, AdamW updates the other {counts[False]}")


def muon_of_json(
    params: Iterable[Any],
    lr: float | None = None,
    momentum: float = 0.95,
    weight_decay: float = 0.0,
    ns_method: str = "gram",
    muon_lr: float | None = None,
    adam_lr: float | None = None,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-10,
    adam_w_mode: bool = True,
    torch_adam: bool = False,
    fp32_optimizer_states: bool = True,
    per_head_muon: bool = False,
) -> MuonWithAuxAdam:
    """The optimizer "Muon" with DeepSpeed's keys over ``params``, whose matrices are marked or go by their shape.

    Each given group becomes up to two, with the group's own settings before ``muon_lr`` or ``adam_lr``, and these
    before ``lr``; matrices whose rows are heads, which ``per_head_muon`` has marked, make one more a size of head.
    ``torch_adam`` and ``fp32_optimizer_states`` choose among implementations of DeepSpeed's.
    """
    shared = {"momentum": momentum, "weight_decay": weight_decay, "ns_method": ns_method, "betas": betas, "eps": eps}
    rates = {True: lr if muon_lr is None else muon_lr, False: lr if adam_lr is None else adam_lr}
    given = list(params)
    groups = [item for item in given if isinstance(item, dict)]
    loose = [item for item in given if not isinstance(item, dict)]
    groups += [{"params": loose}] if loose else []
    split = []
    for index, group in enumerate(groups):
        prefix = group.get("name") or (f"group{index}" if len(groups) > 1 else None)
        for use_muon, label, keys in ((True, "muon", _MUON_KEYS), (False, "adam", _ADAM_KEYS)):
            settings = {key: shared[key] for key in keys if key != "lr"}
            if rates[use_muon] is not None:
                settings["lr"] = rates[use_muon]
            settings.update({key: group[key] for key in keys if key in group})
            chosen = [p for p in _listed(group) if _uses_muon(p) is use_muon]
            heads = {id(p): (head_rows(p) if use_muon else None) or 0 for p in chosen}
            for rows in sorted(set(heads.values())):
                alike = [p for p in chosen if heads[id(p)] == rows]
                kind = f"{label}-heads-of-{rows}" if rows else label
                name = f"{prefix}-{kind}-params" if prefix else f"{kind}-params"
                split.append({"params": alike, "use_muon": use_muon, "name": name, **settings})
    return MuonWithAuxAdam(split, adam_w_mode=adam_w_mode)


def _listed(group: Mapping[str, Any]) -> list[Tensor]:
    params = group["params"]
    return [params] if isinstance(params, Tensor) else list(params)


def _uses_muon(param: Tensor) -> bool:
    return bool(getattr(param, "use_muon", len(logical_shape(param)) >= 2))
