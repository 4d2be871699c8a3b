"""Checks a JSON ``params`` object against the signature of the class that it is for; all faults at once.

Used for the ``optimizer`` and ``scheduler`` sections, whose keys are those of a constructor and not of a schema.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ds_hf.errors import Fault

__all__ = ["accepted_params", "nearest", "param_faults"]


def accepted_params(cls: Callable[..., Any], hidden: Collection[str]) -> dict[str, inspect.Parameter]:
    """The constructor's parameters that JSON may set: all but ``hidden``."""
    return {key: p for key, p in inspect.signature(cls).parameters.items() if key not in hidden}


def nearest(key: str, names: Collection[str]) -> str | None:
    """The name that ``key`` most probably stands for: one it contains, else the most similar one."""
    contained = [name for name in names if name in key]  # DeepSpeed's tutorial: post_cycle_decay_step_size
    near = contained or difflib.get_close_matches(key, list(names), n=1)
    return max(near, key=len) if near else None


def param_faults(
    section: str, name: str, params: Mapping[str, Any], accepted: Mapping[str, inspect.Parameter]
) -> list[Fault]:
    """Unresolved "auto", unknown and missing keys of ``/section/params``, in that order."""
    where = f"/{section}/params"
    faults = [
        Fault(f"{where}/{key}", 'is still "auto"', "only the HF Trainer and accelerate fill it in; give a value")
        for key, value in params.items()
        if isinstance(value, str) and value == "auto"
    ]
    for key in params:
        if key not in accepted:
            near = nearest(key, accepted)
            fix = (f"did you mean {near}? " if near else "") + f"accepted: {', '.join(accepted)}"
            faults.append(Fault(f"{where}/{key}", f"{name} has no such parameter", fix))
    for key, parameter in accepted.items():
        if parameter.default is inspect.Parameter.empty and key not in params:
            faults.append(Fault(where, f"{name} needs {key}, which is missing", f"add {key}"))
    return faults
