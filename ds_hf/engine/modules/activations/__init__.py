"""Inputs of checkpointed functions in host memory: where they lie, their ways down and up, and the models' blocks."""

from __future__ import annotations

from ds_hf.engine.modules.activations.attach import attach

__all__ = ["attach"]
