"""ds_hf trains HuggingFace models with ZeRO from a DeepSpeed JSON file.

Importing it does no work: the names below are loaded at first use, and so are DeepSpeed's, for which scripts ``import
ds_hf as deepspeed`` (``stand_in``). The design begins in docs/design/index.md.
"""

from __future__ import annotations

import sys
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
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        from ds_hf.stand_in import name_of_deepspeed

        value = name_of_deepspeed("ds_hf", name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


class _DeepspeedsModules:
    """Finders for modules below ``ds_hf`` that are DeepSpeed's: ``import ds_hf.ops.adam``.

    The first one comes before Python's own finders and answers for modules below such a module: they would find the
    same files and make second modules of them. The last one answers for names that no other finder knows.
    """

    def __init__(self, last: bool) -> None:
        self.last = last

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> Any:
        """``None`` for everything else."""
        if not fullname.startswith("ds_hf."):
            return None
        parent = fullname.rpartition(".")[0]
        below_a_second_name = sys.modules[parent].__name__ != parent
        if below_a_second_name is self.last:
            return None
        from ds_hf.stand_in import spec_of_deepspeed

        return spec_of_deepspeed(fullname)


if not any(type(finder).__name__ == _DeepspeedsModules.__name__ for finder in sys.meta_path):
    sys.meta_path.insert(0, _DeepspeedsModules(last=False))
    sys.meta_path.append(_DeepspeedsModules(last=True))
