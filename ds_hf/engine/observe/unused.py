"""``ignore_unused_parameters: false``: a step for which a trained parameter got no gradient is an error.

It is found at the step, before anything is updated, and not in a backward: each micro-batch may use other parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_hf.engine.events import Observer, Phase
from ds_hf.errors import ConfigError, DsHfError, Fault

__all__ = ["attach"]

_SHOWN = 5


class _Unused(Observer):
    """Sees which parameters backwards reach."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.reached = set[str]()
        self._hooks = [
            param.register_post_accumulate_grad_hook(lambda _, name=name: self.reached.add(name))
            for name, param in engine.module.named_parameters()
            if param.requires_grad
        ]

    def on_phase(self, name: Phase, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if name != "step" or not self.engine.is_gradient_accumulation_boundary():
            return
        trained = [name for name, param in self.engine.module.named_parameters() if param.requires_grad]
        unused = [name for name in trained if name not in self.reached]
        self.reached.clear()
        if unused:
            more = f" and {len(unused) - _SHOWN} more" if len(unused) > _SHOWN else ""
            raise DsHfError(
                f"no gradient reached {', '.join(unused[:_SHOWN])}{more} in this step: nothing that the loss is made "
                'of uses them. Freeze them, or remove "ignore_unused_parameters": false from zero_optimization'
            )

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def attach(engine: Any) -> None:
    """Let steps of ``engine`` end so.

    Raises:
        ConfigError: captured blocks, which write gradients without telling.
    """
    if engine.settings.ds_hf.capture:
        message = "no effect on captured blocks, whose gradients come without a sign of it"
        place = "/zero_optimization/ignore_unused_parameters"
        raise ConfigError([Fault(place, message, "remove it, or ds_hf.capture")])
    engine.events.add(_Unused(engine))
