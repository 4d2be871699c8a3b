"""Checks the name and the keyword arguments of ``optimizer`` against what the optimizer takes.

The arguments of ds_hf's own optimizers stand in the schema (``x-arguments``). Other classes of torch.optim are asked
for their signature; torch is imported only then.
"""

from __future__ import annotations

import difflib
import inspect
from typing import Any

from ds_hf.config.draft import Draft
from ds_hf.config.parse import escape
from ds_hf.config.schema import Node, load_schema, nearest
from ds_hf.config.types.root import Config

__all__ = ["check_optimizer"]


def check_optimizer(config: Config, draft: Draft) -> None:
    """Collect faults of ``optimizer.type`` and ``optimizer.params``."""
    section = config.optimizer
    if section is None or draft.faulty("/optimizer/type"):
        return
    name = section.type
    if name.lower() in _type_node()["x-unsupported-values"]:
        return  # status.py says why.
    own: dict[str, list[str]] = _type_node()["x-arguments"]
    params = draft.get(("optimizer", "params"))
    params = params if isinstance(params, dict) else {}
    torch_adam = name.lower() in ("adam", "adamw") and params.get("torch_adam") is True
    known = own.get("torch_adam" if torch_adam else name.lower()) or _torch_arguments(name, draft)
    if known is None:
        return
    shown = f"{name} with torch_adam" if torch_adam else name
    for key in params:
        pointer = f"/optimizer/params/{escape(key)}"
        if key not in known and not any(fault.pointer == pointer for fault in draft.faults):
            only_torch = not torch_adam and name.lower() in ("adam", "adamw") and key in own["torch_adam"]
            fix = 'set "torch_adam": true, or remove it' if only_torch else nearest(key, ("optimizer", "params"), known)
            draft.fault(pointer, f'{shown} takes no argument "{key[:60]}"', fix)


def _type_node() -> Node:
    node: Node = load_schema()["properties"]["optimizer"]["properties"]["type"]
    return node


def _torch_arguments(name: str, draft: Draft) -> list[str] | None:
    """Names of the arguments of ``torch.optim.<name>``; None, with a fault, when there is no such class."""
    try:
        import torch.optim as optim
    except ImportError:
        return None
    classes: dict[str, Any] = {
        key.lower(): cls
        for key, cls in vars(optim).items()
        if inspect.isclass(cls) and issubclass(cls, optim.Optimizer) and cls is not optim.Optimizer
    }
    like = {"muadam": "adam", "muadamw": "adamw", "musgd": "sgd"}.get(name.lower(), name.lower())  # of the package mup
    if like in classes:
        name = like
    if name.lower() in classes:
        return [key for key in inspect.signature(classes[name.lower()]).parameters if key not in ("params", "self")]
    names = {"lamb": "Lamb", "lion": "Lion", "muon": "Muon", **{key: cls.__name__ for key, cls in classes.items()}}
    names = {key: names[key] for key in sorted(names) if key not in _type_node()["x-unsupported-values"]}
    near = [names[key] for key in difflib.get_close_matches(name.lower()[:60], names, n=2, cutoff=0.5)]
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    draft.fault("/optimizer/type", f'there is no optimizer "{name[:60]}"', f"{hint}Known: {', '.join(names.values())}")
    return None
