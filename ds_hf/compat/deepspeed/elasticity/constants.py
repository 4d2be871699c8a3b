"""``deepspeed.elasticity.constants``: keys of the section and their defaults."""

from ds_hf.config.elasticity import SCHEDULED as DEEPSPEED_ELASTICITY_CONFIG
from ds_hf.config.types.parallel import ElasticitySection as _Section

_default = _Section()

ELASTICITY = "elasticity"
LATEST_ELASTICITY_VERSION = 0.2
MINIMUM_DEEPSPEED_VERSION = "0.3.8"
ENABLED, ENABLED_DEFAULT = "enabled", _default.enabled
MAX_ACCEPTABLE_BATCH_SIZE, MAX_ACCEPTABLE_BATCH_SIZE_DEFAULT = "max_train_batch_size", _default.max_train_batch_size
MICRO_BATCHES, MICRO_BATCHES_DEFAULT = "micro_batch_sizes", list(_default.micro_batch_sizes)
MIN_GPUS, MIN_GPUS_DEFAULT = "min_gpus", _default.min_gpus
MAX_GPUS, MAX_GPUS_DEFAULT = "max_gpus", _default.max_gpus
MIN_TIME, MIN_TIME_DEFAULT = "min_time", _default.min_time
NUM_GPUS_PER_NODE, NUM_GPUS_PER_NODE_DEFAULT = "num_gpus_per_node", _default.num_gpus_per_node
MODEL_PARALLEL_SIZE, MODEL_PARALLEL_SIZE_DEFAULT = "model_parallel_size", _default.model_parallel_size
PREFER_LARGER_BATCH, PREFER_LARGER_BATCH_DEFAULT = "prefer_larger_batch", _default.prefer_larger_batch
IGNORE_NON_ELASTIC_BATCH_INFO = "ignore_non_elastic_batch_info"
IGNORE_NON_ELASTIC_BATCH_INFO_DEFAULT = _default.ignore_non_elastic_batch_info
VERSION, VERSION_DEFAULT = "version", _default.version

__all__ = [
    "DEEPSPEED_ELASTICITY_CONFIG",
    "ELASTICITY",
    "ENABLED",
    "ENABLED_DEFAULT",
    "IGNORE_NON_ELASTIC_BATCH_INFO",
    "IGNORE_NON_ELASTIC_BATCH_INFO_DEFAULT",
    "LATEST_ELASTICITY_VERSION",
    "MAX_ACCEPTABLE_BATCH_SIZE",
    "MAX_ACCEPTABLE_BATCH_SIZE_DEFAULT",
    "MAX_GPUS",
    "MAX_GPUS_DEFAULT",
    "MICRO_BATCHES",
    "MICRO_BATCHES_DEFAULT",
    "MINIMUM_DEEPSPEED_VERSION",
    "MIN_GPUS",
    "MIN_GPUS_DEFAULT",
    "MIN_TIME",
    "MIN_TIME_DEFAULT",
    "MODEL_PARALLEL_SIZE",
    "MODEL_PARALLEL_SIZE_DEFAULT",
    "NUM_GPUS_PER_NODE",
    "NUM_GPUS_PER_NODE_DEFAULT",
    "PREFER_LARGER_BATCH",
    "PREFER_LARGER_BATCH_DEFAULT",
    "VERSION",
    "VERSION_DEFAULT",
]
