"""The ``deepspeed`` name: ds_hf under the module names that HF libraries and scripts import.

What ds_hf itself uses lies there and is handed on; what this name alone offers lies in the module where DeepSpeed's
users import it, and other addresses of it hand it on. What neither has is absent, and asking for it says so
(``_missing``). A real DeepSpeed earlier on ``sys.path`` hides this package.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import Any as _Any

from ds_hf.hf.autoload import install as _install_hooks

from ds_hf import Engine as DeepSpeedEngine
from ds_hf import Engine as DeepSpeedHybridEngine
from ds_hf import add_config_arguments, initialize
from ds_hf.deepspeed_api.config import DeepSpeedConfig
from ds_hf.deepspeed_api.accelerator import get_accelerator
from ds_hf.engine.comm.process_group import init_distributed
from ds_hf.deepspeed_api.inference import DeepSpeedInferenceConfig, default_inference_config, init_inference
from ds_hf.deepspeed_api.pipeline import DualPipeVModule, PipelineEngine, PipelineModule
from ds_hf.deepspeed_api.pipeline import PipelineEngine as DualPipeVEngine
from ds_hf.deepspeed_api.tensor_parallel import set_autotp_mode, tp_model_init
from ds_hf.errors import ConfigError as DeepSpeedConfigError
from ds_hf.inference.engine import InferenceEngine

from . import _missing, accelerator, checkpoint, comm, constants, git_version_info, launcher, moe, monitor, ops
from . import inference, module_inject
from . import pipe, profiling
from . import runtime, utils
from .git_version_info import git_branch as __git_branch__
from .git_version_info import git_hash as __git_hash__
from .git_version_info import version
from .runtime import DeepSpeedOptimizer, zero
from .runtime.activation_checkpointing import checkpointing
from .runtime.config import ADAM_OPTIMIZER, LAMB_OPTIMIZER
from .runtime.dataloader import DeepSpeedDataLoader
from .utils import OnDevice, log_dist, logger

__version__ = "0.19.8+ds.hf"
__version_major__ = 0
__version_minor__ = 19
__version_patch__ = 8
dist = comm
__all__ = [
    "ADAM_OPTIMIZER",
    "LAMB_OPTIMIZER",
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedDataLoader",
    "DeepSpeedEngine",
    "DeepSpeedHybridEngine",
    "DeepSpeedInferenceConfig",
    "DeepSpeedOptimizer",
    "DualPipeVEngine",
    "DualPipeVModule",
    "InferenceEngine",
    "OnDevice",
    "PipelineEngine",
    "PipelineModule",
    "accelerator",
    "add_config_arguments",
    "checkpoint",
    "checkpointing",
    "comm",
    "constants",
    "default_inference_config",
    "dist",
    "get_accelerator",
    "git_version_info",
    "inference",
    "init_distributed",
    "init_inference",
    "initialize",
    "launcher",
    "log_dist",
    "logger",
    "module_inject",
    "moe",
    "monitor",
    "ops",
    "pipe",
    "profiling",
    "runtime",
    "set_autotp_mode",
    "tp_model_init",
    "utils",
    "zero",
]
_absent = _missing.missing(__name__)


def __getattr__(name: str) -> _Any:
    """``deepspeed.compression`` is imported when it is asked for: engines look at it from then on. So is
    ``deepspeed.elasticity``, which few files ask for."""
    return _import_module(f"{__name__}.{name}") if name in ("compression", "elasticity") else _absent(name)


_missing.install(__name__)
_install_hooks()
