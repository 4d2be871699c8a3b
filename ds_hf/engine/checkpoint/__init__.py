"""Checkpoints: safetensors and one JSON manifest, indexed by parameter name and flat offset.

Any world size, stage, offload and dtype loads any other. ``save`` and ``load`` are what the engine calls,
``zero_to_fp32`` owns reading the format and is copied into every checkpoint, ``consolidate`` makes whole state dicts.
"""
