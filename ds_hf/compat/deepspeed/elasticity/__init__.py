"""``deepspeed.elasticity``: a global batch that many numbers of processes make, for schedulers and clients."""

from . import config, constants, elasticity, utils
from .constants import ELASTICITY, ENABLED, ENABLED_DEFAULT
from .elasticity import compute_elastic_config, elasticity_enabled, ensure_immutable_elastic_config
from .utils import is_torch_elastic_compatible

__all__ = [
    "ELASTICITY",
    "ENABLED",
    "ENABLED_DEFAULT",
    "compute_elastic_config",
    "config",
    "constants",
    "elasticity",
    "elasticity_enabled",
    "ensure_immutable_elastic_config",
    "is_torch_elastic_compatible",
    "utils",
]
