"""The ``deepspeed`` name: thin re-exports of ds_hf under the module names that HF libraries and scripts import.

Nothing is implemented here. What ds_hf does not have is absent, and asking for it says so (``_missing``). A real
DeepSpeed earlier on ``sys.path`` hides this package.
"""

from __future__ import annotations

from ds_hf.hf.autoload import install as _install_hooks

from ds_hf import Engine as DeepSpeedEngine
from ds_hf import add_config_arguments, initialize
from ds_hf.engine.dist.accelerator import get_accelerator
from ds_hf.engine.dist.process_group import init_distributed
from ds_hf.errors import ConfigError as DeepSpeedConfigError

from . import _missing, accelerator, checkpoint, comm, ops, runtime, utils
from .runtime import zero
from .utils import log_dist, logger

__version__ = "0.19.8+ds.hf"
version = __version__
__all__ = [
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "accelerator",
    "add_config_arguments",
    "checkpoint",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "log_dist",
    "logger",
    "ops",
    "runtime",
    "utils",
    "zero",
]
__getattr__ = _missing.missing(__name__)

_missing.install()
_install_hooks()
