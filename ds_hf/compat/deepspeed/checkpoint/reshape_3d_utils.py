"""``deepspeed.checkpoint.reshape_3d_utils``: the mesh of a checkpoint."""

from .reshape_utils import (
    flatten_dp_dimension,
    get_model_3d_descriptor,
    get_model_3d_descriptor_from_metadata,
    model_3d_desc,
    unflatten_dp_dimension,
)

__all__ = [
    "flatten_dp_dimension",
    "get_model_3d_descriptor",
    "get_model_3d_descriptor_from_metadata",
    "model_3d_desc",
    "unflatten_dp_dimension",
]
