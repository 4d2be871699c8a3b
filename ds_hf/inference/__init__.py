"""Models that only compute: decoding, ``init_inference``, ZeRO-Inference.

How it works is in docs/design/inference.md.
"""
