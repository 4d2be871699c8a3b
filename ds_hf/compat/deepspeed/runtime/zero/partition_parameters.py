"""``deepspeed.runtime.zero.partition_parameters``: a window on ``ds_hf.engine.zero.init``.

transformers *replaces* ``zero_wrapper_for_fp_tensor_constructor`` in this module while ``zero.Init`` starts. ``Init``
looks the name up among its own globals, so reading and writing here must reach there.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from ds_hf.engine.zero.external import register_external_parameter
from ds_hf.engine.zero.gather import GatheredParameters

from ds_hf.deepspeed_api.accelerator import get_accelerator
from ds_hf.engine.zero import init as _init

from ..._missing import missing

__all__ = ["GatheredParameters", "get_accelerator", "register_external_parameter"]

_explain = missing(__name__)


class _Window(ModuleType):
    """Forwards every name that ``ds_hf.engine.zero.init`` has, for reading and for writing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_init, name) if hasattr(_init, name) else _explain(name)

    def __setattr__(self, name: str, value: object) -> None:
        if hasattr(_init, name):
            setattr(_init, name, value)
        else:
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Window
