"""External parameters: a module's forward uses a parameter that another module holds.

DeepSpeed's ``register_external_parameter``. The registration is kept on the module, so it may be made before or
after ``initialize``; the hooks of ``hooks.py`` gather the parameter's unit for the module's forward and backward.
"""

from __future__ import annotations

from torch import nn

__all__ = ["external_parameters", "register_external_parameter", "unregister_external_parameter"]

_MARK = "_ds_external_parameters"


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Gather ``parameter`` whenever ``module`` runs, though another module holds it.

    Raises:
        RuntimeError: ``parameter`` is not an ``nn.Parameter``.
    """
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError(f"register_external_parameter takes an nn.Parameter, not {type(parameter).__name__}")
    external = module.__dict__.setdefault(_MARK, {})
    if id(parameter) in external:
        return
    external[id(parameter)] = parameter
    attach = module.__dict__.get("_ds_attach_external")  # set by the hooks of a live engine
    if attach is not None:
        attach(module, parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo ``register_external_parameter``.

    Raises:
        RuntimeError: it was not registered.
    """
    external = module.__dict__.get(_MARK, {})
    if external.pop(id(parameter), None) is None:
        raise RuntimeError("the parameter is not registered as an external parameter of this module")


def external_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Parameters registered with ``module``."""
    return list(module.__dict__.get(_MARK, {}).values())
