"""Which models of transformers have their sequences divided, and over which processes.

A model is *bound* to a ``Division``: each of its modules then finds it when transformers calls attention, and its
configuration when transformers makes a mask. Other models of the process, which share transformers' functions, are not
touched. A division outlives no model.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.sequence.losses import gather_whole

__all__ = ["Division", "bind", "division_of", "division_of_config", "release"]

_modules: WeakKeyDictionary[nn.Module, Division] = WeakKeyDictionary()
_configs: dict[int, weakref.ref[Division]] = {}  # configurations compare by value and cannot be keys


@dataclass(eq=False)
class Division:
    """How one model's sequences are divided.

    Attributes:
        core: name of the attention that computes, as transformers has it.
        axis: the processes that share a sequence.
        disable_in_eval: in evaluation every process has whole sequences.
        by_positions: the core finds packed documents by ``position_ids``, as flash attention does.
        seq_length: of all sequences, ``None`` where it varies.
        model: the model; configs: its configuration and those inside; names: of its modules, by identity.
        calls: attention layers that were called in this forward; ``checked``: a forward has been looked at.
        hooks: on the model.
    """

    core: str
    axis: Axis
    disable_in_eval: bool = False
    seq_length: int | None = None
    by_positions: bool = False
    model: weakref.ref[nn.Module] | None = None
    configs: list[Any] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    calls: int = 0
    checked: bool = False
    hooks: list[Any] = field(default_factory=list)

    @property
    def active(self) -> bool:
        """Sequences are divided now."""
        model = None if self.model is None else self.model()
        return not self.disable_in_eval or model is None or model.training

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
    """Have ``Division.whole`` give ``whole`` for this very tensor, until it is written to."""
    setattr(local, _WHOLE, (local._version, whole))


def bind(model: nn.Module, division: Division) -> None:
    """Divide the sequences of ``model``; what its modules were bound to before counts no longer."""
    release(model)
    division.model = weakref.ref(model)
    for name, module in model.named_modules():
        _modules[module] = division
        division.names[id(module)] = name
        config = getattr(module, "config", None)
        if config is not None and not any(config is known for known in division.configs):
            division.configs.append(config)
            _configs[id(config)] = weakref.ref(division)


def release(model: nn.Module) -> None:
    """Sequences of ``model`` are whole again."""
    for division in {_modules[module] for module in model.modules() if module in _modules}:
        for hook in division.hooks:
            hook.remove()
        for config in division.configs:
            if division_of_config(config) is division:
                del _configs[id(config)]
    for module in model.modules():
        _modules.pop(module, None)


def division_of(module: nn.Module) -> Division | None:
    """Of the model that ``module`` is in."""
    return _modules.get(module)


def division_of_config(config: Any) -> Division | None:
    """Of the model whose configuration this very object is."""
    reference = _configs.get(id(config))
    division = None if reference is None else reference()
    return division if division is not None and any(config is known for known in division.configs) else None
