"""``deepspeed.elasticity.elasticity``: the functions and errors, the numbers that batches are scaled by."""

from ds_hf.config.elasticity import (
    HIGHLY_COMPOSITE,
    ElasticityConfig,
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
    compute_elastic_config,
    elasticity_enabled,
    ensure_immutable_elastic_config,
)
from ds_hf.config.elasticity import best_batch as get_best_candidates
from ds_hf.config.elasticity import scaled_batches as get_candidate_batch_sizes
from ds_hf.config.elasticity import sizes_of as get_valid_gpus

HCN_LIST = list(HIGHLY_COMPOSITE)

__all__ = [
    "HCN_LIST",
    "ElasticityConfig",
    "ElasticityConfigError",
    "ElasticityError",
    "ElasticityIncompatibleWorldSize",
    "compute_elastic_config",
    "elasticity_enabled",
    "ensure_immutable_elastic_config",
    "get_best_candidates",
    "get_candidate_batch_sizes",
    "get_valid_gpus",
]
