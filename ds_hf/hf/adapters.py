"""PEFT makes adapters around weights that ``from_pretrained`` has sharded at ZeRO stage 3.

LoRA's own initialisations gather what they read; other methods (DeLoRA's norms, OSF's and FRoD's decompositions, shapes
in LoHa) read weights that are not here. So these open themselves while adapters are put in.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from ds_hf.engine.zero.building import opening
from ds_hf.hf.autoload import wrap

__all__ = ["wrap_tuners"]


def wrap_tuners(module: ModuleType) -> None:
    """Hook of ``peft.tuners.tuners_utils``."""
    wrap(module, "BaseTuner.__init__", _with_whole_weights)  # some look at all weights before they put adapters in
    wrap(module, "BaseTuner.inject_adapter", _with_whole_weights)


def _with_whole_weights(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    model = args[0] if args else kwargs["model"]
    with opening(list(model.parameters())):
        return wrapped(*args, **kwargs)
