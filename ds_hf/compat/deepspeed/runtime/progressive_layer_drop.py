"""``deepspeed.runtime.progressive_layer_drop``."""

from ds_hf.data.layer_keeping import ProgressiveLayerDrop

__all__ = ["ProgressiveLayerDrop"]
