"""Which models of transformers have their sequences divided, and over which processes.

A model is *bound* to a ``SequenceDivision``: each of its modules then finds it when transformers calls attention, and
whatever makes a mask inside its forward. Other models of the process, which share transformers' functions and perhaps
the very configuration, are not touched. A division outlives no model.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.parallel.sequence.losses import gather_whole

__all__ = [
    "SequenceDivision",
    "bind",
    "division_inside",
    "division_of",
    "forward_begins",
    "forward_ends",
    "forward_now",
    "forward_of",
    "release",
]

_modules: WeakKeyDictionary[nn.Module, SequenceDivision] = WeakKeyDictionary()
_forwards: list[SequenceDivision] = []  # of bound models that are computing, the innermost last


@dataclass(eq=False)
class SequenceDivision:
    """How one model's sequences are divided.

    Attributes:
        core: name of the attention that computes, as transformers has it.
        axis: the processes that share a sequence.
        disable_in_eval: in evaluation every process has whole sequences, unless the call that runs has parts.
        by_positions: the core finds packed documents by ``position_ids``, as flash attention does.
        counts_mask: the model would number the tokens that ``attention_mask`` shows.
        seq_length: of all sequences, ``None`` where it varies.
        model: the model; configs: its configuration and those inside; names: of its modules, by identity.
        calls: attention layers that were called in this forward; ``checked``: a forward has been looked at.
        hooks: on the model. parts: the call that runs has parts of sequences, in evaluation too.
    """

    core: str
    axis: Axis
    disable_in_eval: bool = False
    seq_length: int | None = None
    by_positions: bool = False
    counts_mask: bool = False
    model: weakref.ref[nn.Module] | None = None
    configs: list[Any] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    calls: int = 0
    checked: bool = False
    hooks: list[Any] = field(default_factory=list)
    parts: bool = False

    @property
    def active(self) -> bool:
        """Sequences are divided now."""
        model = None if self.model is None else self.model()
        return not self.disable_in_eval or self.parts or model is None or model.training

    def whole(self, local: Tensor, what: str) -> Tensor:
        """The parts of all processes, along the last dimension; kept with ``local``, from which a forward asks
        again."""
        known = getattr(local, _WHOLE, None)
        if known is not None and known[0] == local._version:
            return known[1]  # type: ignore[no-any-return]
        whole = gather_whole(local, self.axis, local.ndim - 1, what)
        keep(local, whole)
        return whole


_WHOLE = "_ds_hf_whole"


def keep(local: Tensor, whole: Tensor) -> None:
    """Have ``SequenceDivision.whole`` give ``whole`` for this very tensor, until it is written to."""
    setattr(local, _WHOLE, (local._version, whole))


def bind(model: nn.Module, division: SequenceDivision) -> None:
    """Divide the sequences of ``model``; how it, or a model in it or around it, was divided before counts no longer.
    Other models that share modules with it (an activation, a rotary embedding, an encoder) stay as they are."""
    release(model)
    division.model = weakref.ref(model)
    for name, module in model.named_modules():
        _modules[module] = division
        division.names[id(module)] = name
        config = getattr(module, "config", None)
        if config is not None and not any(config is known for known in division.configs):
            division.configs.append(config)


def release(model: nn.Module) -> None:
    """Sequences of ``model`` are whole again."""
    modules = set(model.modules())
    found = {_modules[module] for module in modules if module in _modules}
    released = {division for division in found if _is_nested(division, model, modules)}
    for division in released:
        for hook in division.hooks:
            hook.remove()
    for module in modules:
        if _modules.get(module) in released:
            del _modules[module]


def _is_nested(division: SequenceDivision, model: nn.Module, modules: set[nn.Module]) -> bool:
    """Its model is ``model``, in it or around it, and does not only share modules with it."""
    other = None if division.model is None else division.model()
    return other is None or other in modules or id(model) in division.names


def division_of(module: nn.Module) -> SequenceDivision | None:
    """Of the model that ``module`` is in: of several, of that which is computing, or was divided last."""
    now = forward_now()
    return now if now is not None and id(module) in now.names else _modules.get(module)


def division_inside(model: nn.Module) -> SequenceDivision | None:
    """Of a model that ``model`` was put around."""
    modules = set(model.modules())
    found = (_modules[module] for module in modules if module in _modules)
    return next((each for each in found if each.model is not None and each.model() in modules), None)


def forward_begins(module: nn.Module, args: Any) -> None:
    """A hook before the forward of a model of transformers that is bound, or is inside one."""
    if (division := division_of(module)) is not None:
        _forwards.append(division)


def forward_ends(module: nn.Module, args: Any, output: Any) -> None:
    """The hook after it, also where it raised."""
    if _forwards and _forwards[-1] is division_of(module):
        _forwards.pop()


def forward_now() -> SequenceDivision | None:
    """Of the bound model that is computing."""
    return _forwards[-1] if _forwards else None


def forward_of(config: Any) -> SequenceDivision | None:
    """Of the bound model that is computing, if this very object is its configuration or that of a model inside."""
    division = _forwards[-1] if _forwards else None
    return division if division is not None and any(config is known for known in division.configs) else None
