"""Parameters that are used outside the module that holds them.

``register_external_parameter`` is DeepSpeed's: a module's forward uses a parameter that another one holds. The
registration is kept on the module, so it may be made before or after ``initialize``; the hooks of ``hooks.py`` gather
the parameter's unit for the module's forward and backward.

``watch`` finds out by itself: ``hidden @ self.lm_head.weight.t()``, as fused losses do. A leaf of the model that is a
unit by itself tells the hooks when one of its parameters is read by name while none of its calls is open; they gather
the unit until the model's call is over. Parameters inside blocks are read too often: a ``__getitem__`` in Python costs
the host as much as half a view. A block is watched from the first function of torch on that gets one of its parameters
at rest (``at_rest.Noticed``): its ``forward`` was called, or a module in it, and not the block. That is noticed in the
first calls of a model in training and in evaluation, and after a forward that failed for want of it.

What is computed of parameters between calls of the model, as a penalty on weights, sees nothing: ``check_graph`` and
``explain_empty`` say so where a graph shows it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ds_hf.engine.zero.at_rest import name_of
from ds_hf.engine.zero.unit import Unit
from ds_hf.errors import DsHfError

__all__ = [
    "ExternalParameters",
    "check_graph",
    "explain_empty",
    "explain_uncalled",
    "external_parameters",
    "notice_anew",
    "read_by",
    "register_external_parameter",
    "unregister_external_parameter",
    "unwatch",
    "watch",
]

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
    for attach in module.__dict__.get("_ds_attach_external", ()):  # set by the hooks of live engines
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


# -- weights that are read by name -------------------------------------------------------------------------------------


class _Watched(dict[str, nn.Parameter | None]):
    """``module._parameters`` that tells of reads outside the module's own calls. Its copies are those of ``given``.

    Only ``module.weight`` and its like come through here; ``parameters()``, ``state_dict()`` and ``.get()`` do not.

    Args:
        given: what the module had; it may have a way of its own to read (``dtensor``).

    Attributes:
        told: the units of the engines that use the module, each with what it is to call.
    """

    __slots__ = ("given", "read", "told")

    def __init__(self, given: dict[str, nn.Parameter | None]) -> None:
        super().__init__(given)
        self.given = given
        self.told: dict[Unit, Callable[[Unit, Any], None]] = {}
        self.read: Callable[[str, Any], Any] | None = getattr(given, "read", None)

    def __getitem__(self, name: str) -> nn.Parameter | None:
        param = super().__getitem__(name)
        for unit, on_read in self.told.items():
            if not unit.depth:
                on_read(unit, param)
        return param if self.read is None else self.read(name, param)

    def restored(self) -> dict[str, nn.Parameter | None]:
        """What the module had, with the parameters that it has now."""
        self.given.clear()
        self.given.update(self)
        return self.given

    def __reduce__(self) -> tuple[Any, ...]:
        return (dict, (dict(self),)) if type(self.given) is dict else self.restored().__reduce__()  # type: ignore[return-value]


def watch(unit: Unit, on_read: Callable[[Unit, Tensor | None], None], *, blocks: bool = False) -> bool:
    """Have ``on_read`` called when a parameter of ``unit``, of any shape and dtype, is read by name while no call of
    ``unit`` is open.

    Code that is being compiled breaks its graph there: what the reader gathers is no part of a graph.

    Args:
        blocks: also of a unit that has modules inside.

    Returns:
        whether the unit is watched: it is sharded, and a module without children or one of ``blocks``.
    """
    if not unit.name or not unit.sharded or (not blocks and any(True for _ in unit.module.children())):
        return False
    eagerly: Callable[[Callable[..., None]], Any] = torch.compiler.disable
    for module in _holders(unit):
        if not isinstance(module._parameters, _Watched):
            module.__dict__["_parameters"] = _Watched(module._parameters)
        module._parameters.told[unit] = eagerly(on_read)  # type: ignore[attr-defined]
    return True


def unwatch(unit: Unit) -> None:
    """Undo ``watch``. With the last unit a module gets an ordinary ``_parameters`` again, unless it was replaced by
    something else."""
    for module in _holders(unit):
        if isinstance(watched := module._parameters, _Watched):
            watched.told.pop(unit, None)
            if not watched.told:
                module.__dict__["_parameters"] = watched.restored()


def read_by(module: nn.Module, read: Callable[[str, Any], Any] | None) -> None:
    """Have what reads a parameter of ``module`` by name get what ``read`` makes of its name and the parameter; ``None``
    ends that."""
    watched = module._parameters
    if not isinstance(watched, _Watched):
        if read is None:
            return
        watched = module.__dict__["_parameters"] = _Watched(watched)
    watched.read = read
    if read is None and not watched.told:
        module.__dict__["_parameters"] = watched.restored()


def _holders(unit: Unit) -> list[nn.Module]:
    """The modules of ``unit`` that have parameters of their own."""
    return [inner for module in unit.modules for inner in module.modules() if inner._parameters]


# -- names under which other libraries look ----------------------------------------------------------------------------


class ExternalParameters:
    """``module.ds_external_parameters()``: pairs of a name and a parameter registered with ``module``."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((str(id(param)), param) for param in external_parameters(self.module))


# -- between calls of the model ---------------------------------------------------------------------------------------

# in texts of torch
_EMPTY_OPERAND = re.compile(
    r"\[0\] but expected|compatible with \[0\]|tensor [ab] \(0\)|shape \[0\]|vec \(0\)|must be a matrix"
)
_PENALTY = (
    "between calls of the model, so a penalty on weights is made of nothing there. Compute it inside `with "
    "deepspeed.zero.GatheredParameters(list(model.parameters())):`, before the model is called, or with backward() in "
    "the block too"
)


def check_graph(param: Tensor) -> None:
    """A parameter that is here now was in no graph that began when it was at rest.

    Raises:
        DsHfError: it was.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return  # inside torch.func, whose levels have no such graph
    known = getattr(get_gradient_edge(param).node, "_input_metadata", ())
    if known and tuple(known[0].shape) != tuple(param.shape):
        raise DsHfError(
            f"{name_of(param)} was in a computation with gradients: at ZeRO stage 3 its values are not here {_PENALTY}"
        )


def explain_uncalled(error: RuntimeError, units: Iterable[Unit]) -> None:
    """Of a forward: say so with ``error`` if it looks as if it came of parameters at rest, and notice the next use."""
    if _EMPTY_OPERAND.search(str(error)):
        notice_anew(units)
        if sys.version_info >= (3, 11):
            error.add_note(
                "ds_hf: if the empty tensor is a parameter: at ZeRO stage 3 it has values only while the block that "
                "holds it is called. Other uses are noticed in the first calls of the model in training and in "
                "evaluation, and in the next one. Call the block, or deepspeed.zero.register_external_parameter(model, "
                "parameter) before training"
            )


def notice_anew(units: Iterable[Unit]) -> None:
    """Have what is inside blocks be noticed when it is used at rest (``at_rest.Noticed``), as in the first calls."""
    for buffer in (buffer for unit in units for buffer in unit.buffers if buffer.rests_as.noticed is not None):
        buffer.hold.turns = 0
        for param in buffer.params:
            if type(param) is buffer.rests_as:
                param.__class__ = buffer.rests_as.noticed  # type: ignore[assignment]


def explain_empty(error: RuntimeError) -> None:
    """Of backward.

    Raises:
        DsHfError: it looks as if it came of parameters at rest.
    """
    if _EMPTY_OPERAND.search(str(error)):
        raise DsHfError(f"{error}. Parameters of ZeRO stage 3 have no values {_PENALTY}") from error
