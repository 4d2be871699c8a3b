"""Models that only compute: decoding, ``init_inference``, ZeRO-Inference."""
