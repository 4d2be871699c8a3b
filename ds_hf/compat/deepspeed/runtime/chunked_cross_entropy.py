"""``deepspeed.runtime.chunked_cross_entropy``."""

from __future__ import annotations

from ds_hf.deepspeed_api.chunked_cross_entropy import (
    BACKENDS,
    ChunkedCausalLMLoss,
    chunked_cross_entropy,
    install_chunked_causal_lm_loss,
    triton_backend_available,
)

from .._missing import missing

__all__ = [
    "BACKENDS",
    "ChunkedCausalLMLoss",
    "chunked_cross_entropy",
    "install_chunked_causal_lm_loss",
    "triton_backend_available",
]
__getattr__ = missing(__name__)
