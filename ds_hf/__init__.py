"""ds_hf trains HuggingFace models with ZeRO from a DeepSpeed JSON file.

Importing it does no work: the names below are loaded at first use. The design begins in docs/design/index.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_hf.config import Config, load_config
    from ds_hf.deepspeed_api.arguments import add_config_arguments
    from ds_hf.deepspeed_api.engine import Engine
    from ds_hf.deepspeed_api.inference import init_inference
    from ds_hf.deepspeed_api.initialize import initialize
    from ds_hf.engine.comm.process_group import init_distributed
    from ds_hf.engine.zero.gather import GatheredParameters
    from ds_hf.engine.zero.init import Init
    from ds_hf.errors import CheckpointError, ConfigError, DsHfError

__all__ = [
    "CheckpointError",
    "Config",
    "ConfigError",
    "DsHfError",
    "Engine",
    "GatheredParameters",
    "Init",
    "__version__",
    "add_config_arguments",
    "init_distributed",
    "init_inference",
    "initialize",
    "load_config",
]

__version__ = "0.2.0"

_HOMES = {
    "CheckpointError": "ds_hf.errors",
    "Config": "ds_hf.config",
    "ConfigError": "ds_hf.errors",
    "DsHfError": "ds_hf.errors",
    "Engine": "ds_hf.deepspeed_api.engine",
    "GatheredParameters": "ds_hf.engine.zero.gather",
    "Init": "ds_hf.engine.zero.init",
    "add_config_arguments": "ds_hf.deepspeed_api.arguments",
    "init_distributed": "ds_hf.engine.comm.process_group",
    "init_inference": "ds_hf.deepspeed_api.inference",
    "initialize": "ds_hf.deepspeed_api.initialize",
    "load_config": "ds_hf.config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ds_hf' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
