"""``deepspeed.utils.zero_to_fp32``: one fp32 state dict out of a checkpoint."""

from ds_hf.checkpoint.files import get_checkpoint_files, get_model_state_file, get_model_state_files, get_optim_files
from ds_hf.checkpoint.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    convert_zero_checkpoint_to_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
    to_torch_tensor,
)

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "convert_zero_checkpoint_to_state_dict",
    "get_checkpoint_files",
    "get_fp32_state_dict_from_zero_checkpoint",
    "get_model_state_file",
    "get_model_state_files",
    "get_optim_files",
    "load_state_dict_from_zero_checkpoint",
    "to_torch_tensor",
]
