"""Blocks that the file says are compiled, without inductor's compile times."""

from __future__ import annotations

from ds_hf import Engine

__all__ = ["BACKEND", "with_quick_backend"]

BACKEND = "aot_eager_decomp_partition"  # divides forward and backward as inductor does, and compiles nothing


def with_quick_backend(engine: Engine) -> Engine:
    """The file's blocks are compiled when they are called first: until then the backend may change."""
    for module in engine.compiler.compiled:
        del module.__dict__["forward"]
    engine.compiler.compiled.clear()
    engine.compile(backend=BACKEND)
    return engine
