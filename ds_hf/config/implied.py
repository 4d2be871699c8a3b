"""Sections of DeepSpeed's that ask for what ds_hf has under keys of its own: those keys are filled in.

``compile.deepcompile``: DeepSpeed puts gathers and reductions into one graph with the model. Here blocks are compiled,
and they go on beside it outside of graphs; its offloads are those of ZeRO. ``nebula`` writes checkpoints in the
background, as ``ds_hf.checkpoint.async`` does. What is given under ds_hf's own keys is left as it is.
"""

from __future__ import annotations

import json
from typing import Any

from ds_hf.config.schema import Path, dotted, pointer_of
from ds_hf.config.source import Draft
from ds_hf.config.types.root import Origin, OriginKind

__all__ = ["imply"]

_BLOCKS = (
    'blocks are compiled, and gathers and reductions go on beside them (ds_hf.compile is "blocks"), where DeepSpeed '
    "puts all of it into one graph"
)
_SWITCHES = {  # of offloads: what they are here, and the stages that have it
    "offload_opt_states": (("zero_optimization", "offload_optimizer", "device"), "cpu", (1, 2, 3)),
    "offload_parameters": (("zero_optimization", "offload_param", "device"), "cpu", (3,)),
    "offload_activation": (("activation_checkpointing", "cpu_checkpointing"), True, (0, 1, 2, 3)),
}
_PASSES = {  # that divide the model: what has to say over how many processes
    "autosp": (("sequence_parallel_size",),),
    "autotp": (("tensor_parallel", "autotp_size"), ("tensor_parallel", "tp", "tp_size")),
}


def imply(draft: Draft) -> None:
    """Fill in what ``compile`` and ``nebula`` ask for."""
    if isinstance(section := draft.tree.get("compile"), dict):
        _deepcompile(draft, section)
    if isinstance(section := draft.tree.get("nebula"), dict) and section.get("enabled") is True:
        message = "checkpoints are written in the background into the folder that save_checkpoint is given"
        message = f"{message} (ds_hf.checkpoint.async is true), and not by Nebula"
        _set(draft, ("ds_hf", "checkpoint", "async"), True, "nebula.enabled", message)


def _deepcompile(draft: Draft, section: dict[str, Any]) -> None:
    stage = draft.get(("zero_optimization", "stage")) or 0
    on = section.get("deepcompile") is True
    if on:
        _set(draft, ("ds_hf", "compile"), "blocks", "compile.deepcompile", _BLOCKS)
    for key, (path, value, stages) in _SWITCHES.items():
        if section.get(key) is not True:
            continue
        pointer = f"/compile/{key}"
        if not on:
            draft.warn(pointer, "no effect: compile.deepcompile is not true")
        elif stage in stages:
            message = f"{dotted(path)} is set to {str(value).lower()}: all of it, not what memory lacks"
            _set(draft, path, value, f"compile.{key}", message)
        elif stage != "auto":
            draft.warn(pointer, f"no effect: it is for ZeRO stage {' or '.join(map(str, stages))}, and this is {stage}")
    passes = section.get("passes")
    for index, name in enumerate(passes if on and isinstance(passes, list) else ()):
        sizes = _PASSES.get(name, ()) if isinstance(name, str) else ()
        if sizes and not any(_more_than_one(draft.get(path)) for path in sizes):
            message = f"the pass {name} divides the model, and nothing says over how many processes"
            draft.fault(f"/compile/passes/{index}", message, f"set {dotted(sizes[0])}, or remove it")


def _more_than_one(value: Any) -> bool:
    return type(value) is int and value > 1


def _set(draft: Draft, path: Path, value: Any, because: str, message: str) -> None:
    """Fill in a key and say so; what the file says by that key itself is kept, and told where it is another value."""
    there = draft.get(path)
    if there is None and not draft.faulty(pointer_of(path)):
        draft.put(path, value, Origin(OriginKind.DERIVED, because))
    elif there != value:
        message = f"no effect: {dotted(path)} is {json.dumps(there)}, which is kept"
    draft.warn(pointer_of(tuple(because.split("."))), message)
