"""Builds the optimizer of the JSON's ``optimizer`` section: ds_hf's own classes, or any fitting one of torch.optim.

Names are matched without regard to case. Adam and AdamW are the fused class with decoupled weight decay, as in
DeepSpeed, unless ``torch_adam`` is set. Whatever cannot work is refused with what to use instead.

The keys of ``params`` are those of a constructor and not of a schema: ``param_faults`` checks them against its
signature, all at once; for the ``scheduler`` section too.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from ds_hf.engine.optim.adagrad import DeepSpeedCPUAdagrad, FusedAdagrad
from ds_hf.engine.optim.adam import DeepSpeedCPUAdam, FusedAdam
from ds_hf.engine.optim.lamb import FusedLamb
from ds_hf.engine.optim.lion import DeepSpeedCPULion, FusedLion
from ds_hf.engine.optim.muon_groups import muon_of_json
from ds_hf.engine.optim.onebit.adam import OnebitAdam
from ds_hf.engine.optim.onebit.lamb import OnebitLamb
from ds_hf.engine.optim.onebit.zero_one import ZeroOneAdam
from ds_hf.errors import ConfigError, Fault
from ds_hf.log import warn_once

__all__ = ["accepted_params", "build_optimizer", "nearest", "optimizer_names", "param_faults"]

_HIDDEN = ("params", "model_params", "deepspeed")  # constructor parameters that are not the JSON's

# By the lower-case type: the function of mup, and the class of torch whose arguments it takes.
_MUP: Mapping[str, tuple[str, type[torch.optim.Optimizer]]] = {
    "muadam": ("MuAdam", torch.optim.Adam),
    "muadamw": ("MuAdamW", torch.optim.AdamW),
    "musgd": ("MuSGD", torch.optim.SGD),
}
_ONE_BIT: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "onebitadam": OnebitAdam,
    "zerooneadam": ZeroOneAdam,
    "onebitlamb": OnebitLamb,
}
_REFUSED: Mapping[str, tuple[str, str]] = {
    "lbfgs": ("LBFGS evaluates the loss several times in one step, which engine.step() cannot do", "use AdamW"),
    "sparseadam": ("SparseAdam needs sparse gradients, and ds_hf keeps them dense", "use AdamW"),
}


def build_optimizer(
    section_type: str, params: Mapping[str, Any] | None, param_groups: Iterable[Any], *, offloaded: bool = False
) -> torch.optim.Optimizer:
    """The optimizer that ``optimizer: {type: section_type, params: params}`` asks for, over ``param_groups``.

    Args:
        offloaded: the states rest off the device, where DeepSpeed takes its classes for the CPU, of the same rules.

    Raises:
        ConfigError: unknown or refused type, unknown, unresolved or wrong parameters; every one of them is named.
    """
    options = dict(params or {})
    name = section_type.lower()
    if name in _REFUSED:
        problem, fix = _REFUSED[name]
        raise ConfigError([Fault("/optimizer/type", f"{section_type}: {problem}", fix)])
    param_groups = list(param_groups)
    if name in _MUP:
        return _of_mup(name, section_type, options, param_groups)
    cls: Callable[..., torch.optim.Optimizer]
    if name in ("adam", "adamw"):
        cls = _choose_adam(name, options, offloaded)
    elif name == "lion":
        cls = DeepSpeedCPULion if _for_cpu(options, offloaded) else FusedLion
    elif name == "lamb":
        cls = FusedLamb
    elif name in _ONE_BIT:
        cls = _ONE_BIT[name]
    elif name == "muon":
        cls = muon_of_json
    elif name == "adagrad":
        # Not torch's class: it makes its state at construction, for whole parameters instead of shards.
        cls = DeepSpeedCPUAdagrad if offloaded and "lr_decay" not in options else FusedAdagrad
    else:
        cls = _torch_class(section_type)
    return _construct(cls, section_type, options, param_groups)


def _of_mup(name: str, section_type: str, options: dict[str, Any], param_groups: list[Any]) -> torch.optim.Optimizer:
    """mup's function: torch's optimizer over groups whose learning rates follow the widths of the model."""
    function, cls = _MUP[name]
    try:
        make = getattr(importlib.import_module("mup"), function)
    except ImportError as error:
        fault = Fault("/optimizer/type", f"{section_type} comes from the package mup ({error})", "pip install mup")
        raise ConfigError([fault]) from error
    unmarked = sum(not hasattr(p, "infshape") for group in param_groups for p in _params_of(group))
    if unmarked:
        message = f"{unmarked} parameters have no base shape, from which {section_type} takes their learning rates"
        fix = "call mup.set_base_shapes(model, base) before initialize()"
        raise ConfigError([Fault("/optimizer/type", message, fix)])
    accepted = inspect.signature(cls).parameters
    needed = {key: accepted[key].default for key in ("lr", "weight_decay") if key not in options}
    return _construct(make, section_type, {**needed, **options}, param_groups, like=cls)


def _params_of(group: Any) -> list[Any]:
    return list(group["params"]) if isinstance(group, dict) else [group]


def optimizer_names() -> list[str]:
    """Every ``optimizer.type`` that ``build_optimizer`` takes, in torch's spelling."""
    return sorted(
        {
            *("Lamb", "Lion", "Muon", "OneBitAdam", "ZeroOneAdam", "OneBitLamb"),
            *(cls.__name__ for key, cls in _torch_classes().items() if key not in _REFUSED),
        }
    )


def _for_cpu(options: Mapping[str, Any], offloaded: bool) -> bool:
    """Whether DeepSpeed's class for the CPU is meant: it alone has the first option, and lacks the second."""
    return "fp32_optimizer_states" in options or (offloaded and "set_grad_none" not in options)


def _choose_adam(name: str, options: dict[str, Any], offloaded: bool) -> Callable[..., torch.optim.Optimizer]:
    """Pick the class and turn DeepSpeed's switches in ``options`` into that class's parameters."""
    decoupled = options.pop("adam_w_mode", True)
    if name == "adamw" and not decoupled:
        warn_once('optimizer.params.adam_w_mode: false has no effect on type "AdamW"; use type "Adam" for L2 decay')
        decoupled = True
    if options.pop("torch_adam", False):
        return torch.optim.AdamW if decoupled else torch.optim.Adam
    if _for_cpu(options, offloaded):
        options["adamw_mode"] = decoupled
        return DeepSpeedCPUAdam
    options["adam_w_mode"] = decoupled
    return FusedAdam


def _torch_classes() -> dict[str, type[torch.optim.Optimizer]]:
    found = {}
    for name, cls in vars(torch.optim).items():
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer:
            found[name.lower()] = cls
    return found


def _torch_class(section_type: str) -> Callable[..., torch.optim.Optimizer]:
    cls = _torch_classes().get(section_type.lower())
    if cls is not None:
        return cls
    near = nearest(section_type.lower(), [name.lower() for name in optimizer_names()])
    fix = (f"did you mean {near}? " if near else "") + f"known: {', '.join(optimizer_names())}"
    raise ConfigError([Fault("/optimizer/type", f"there is no optimizer {section_type!r}", fix)])


def _construct(
    cls: Callable[..., torch.optim.Optimizer],
    section_type: str,
    options: dict[str, Any],
    param_groups: list[Any],
    like: type[torch.optim.Optimizer] | None = None,
) -> torch.optim.Optimizer:
    """``like``: the class whose arguments ``cls`` takes, where that is a function."""
    accepted = accepted_params(like or cls, _HIDDEN)
    shown = {key: value for key, value in options.items() if key != "max_grad_norm"}
    faults = param_faults("optimizer", section_type, shown, accepted)
    if "max_grad_norm" in options:
        problem = "clipping is not a parameter of the optimizer"
        faults.append(
            Fault("/optimizer/params/max_grad_norm", problem, 'move it to the top level: "gradient_clipping"')
        )
    if faults:
        raise ConfigError(faults)
    options = {key: _as_tuple(value, accepted[key]) for key, value in options.items()}
    try:
        return cls(param_groups, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError([Fault("/optimizer/params", f"{section_type}: {error}")]) from error


def _as_tuple(value: Any, parameter: inspect.Parameter) -> Any:
    """JSON has lists and writes 1.0 as 1; torch wants tuples of floats for betas and the like."""
    if isinstance(parameter.default, tuple) and isinstance(value, list):
        return tuple(float(item) if isinstance(item, int) else item for item in value)
    return value


# -- a JSON ``params`` object against a constructor --------------------------------------------------------------------


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
    faults += [
        Fault(f"{where}/{key}", f"{name} takes {_kind(accepted[key])}, not {type(value).__name__}", "give one")
        for key, value in params.items()
        if isinstance(value, str | dict) and value != "auto" and key in accepted and _kind(accepted[key])
    ]
    for key, parameter in accepted.items():
        if parameter.default is inspect.Parameter.empty and key not in params:
            faults.append(Fault(where, f"{name} needs {key}, which is missing", f"add {key}"))
    return faults


def _kind(parameter: inspect.Parameter) -> str:
    """What a default shows to be wanted; torch's classes look at some of their arguments in the first step only."""
    default = parameter.default
    return "true or false" if isinstance(default, bool) else "a number" if isinstance(default, int | float) else ""
