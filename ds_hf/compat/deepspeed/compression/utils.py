"""``deepspeed.compression.utils``."""

from ds_hf.compression.quantizers import (
    AsymQuantizer,
    BinaryQuantizer,
    SymQuantizer,
    TernaryQuantizer,
    TopKBinarizer,
)

__all__ = ["AsymQuantizer", "BinaryQuantizer", "SymQuantizer", "TernaryQuantizer", "TopKBinarizer"]
