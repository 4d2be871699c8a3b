"""Checks the name and the keyword arguments of ``optimizer`` against what the optimizer takes.

Adam and AdamW take the names in the schema. Other classes of torch.optim are asked for their signature; torch is
imported only then.
"""

from __future__ import annotations

import difflib
import inspect
from typing import Any

from ds_hf.config.draft import Draft
from ds_hf.config.schema import Node, load_schema, nearest
from ds_hf.config.types.root import Config

__all__ = ["check_optimizer"]

_ADAM = {"adam", "adamw"}
# Optimizers that ds_hf has itself; their arguments need no torch to be known.
_OWN: dict[str, list[str]] = {
    "lion": ["lr", "betas", "weight_decay"],
    "adagrad": ["lr", "eps", "weight_decay", "lr_decay", "initial_accumulator_value", "foreach", "maximize"],
}


def check_optimizer(config: Config, draft: Draft) -> None:
    """Collect faults of ``optimizer.type`` and ``optimizer.params``."""
    section = config.optimizer
    if section is None or draft.faulty("/optimizer/type"):
        return
    node: Node = load_schema()["properties"]["optimizer"]["properties"]
    refused = node["type"]["x-unsupported-values"]
    name = section.type
    if name.lower() in refused:
        return  # status.py says why.
    if name.lower() in _ADAM:
        known = [key for key, child in node["params"]["properties"].items() if not child.get("deprecated")]
    elif name.lower() in _OWN:
        known = _OWN[name.lower()]
    else:
        found = _torch_arguments(name, draft)
        if found is None:
            return
        known = found
    for key in draft.get(("optimizer", "params")) or {}:
        if key not in known:
            fix = nearest(key, ("optimizer", "params"), known)
            draft.fault(f"/optimizer/params/{key}", f'{name} takes no argument "{key}"', fix)


def _torch_arguments(name: str, draft: Draft) -> list[str] | None:
    """Names of the arguments of ``torch.optim.<name>``; None, with a fault, when there is no such class."""
    try:
        import torch.optim as optim
    except ImportError:
        return None
    cls: Any = getattr(optim, name, None)
    if not (inspect.isclass(cls) and issubclass(cls, optim.Optimizer)) or cls is optim.Optimizer:
        refused = load_schema()["properties"]["optimizer"]["properties"]["type"]["x-unsupported-values"]
        names = [
            key for key, value in vars(optim).items() if inspect.isclass(value) and issubclass(value, optim.Optimizer)
        ]
        names = sorted({*names, "Lion"} - {"Optimizer"})
        names = [key for key in names if key.lower() not in refused]
        close = {key.lower(): key for key in names}
        near = [close[key] for key in difflib.get_close_matches(name.lower()[:60], close, n=2, cutoff=0.5)]
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        draft.fault("/optimizer/type", f'there is no optimizer "{name[:60]}"', f"{hint}Known: {', '.join(names)}")
        return None
    return [key for key in inspect.signature(cls).parameters if key not in ("params", "self")]
