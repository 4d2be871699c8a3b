"""``deepspeed.accelerator.real_accelerator``: the device of this process."""

from ds_hf.deepspeed_api.accelerator import get_accelerator, is_current_accelerator_supported

__all__ = ["get_accelerator", "is_current_accelerator_supported"]
