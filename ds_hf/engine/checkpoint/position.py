"""Where training stands in its data: the state of ``engine.training_dataloader``.

Gradients are not saved, so an accumulation that is under way begins anew after loading: the position that is saved is
the one where it began.
"""

from __future__ import annotations

from typing import Any

from ds_hf.engine.checkpoint.interface import Checkpointable
from ds_hf.errors import CheckpointError

__all__ = ["data_position", "restore_data_position"]


def data_position(engine: Checkpointable) -> dict[str, Any] | None:
    """The loader's state, ``None`` without one."""
    loader = engine.training_dataloader
    if not hasattr(loader, "state_dict"):
        return None
    state = dict(loader.state_dict())
    begun = engine.begun_micro_batches
    handed_out = begun * engine.batch.micro * engine.mesh.shape.data
    if begun and state.get("samples", 0) >= handed_out:  # else it began in the epoch before, which is over
        state["samples"] -= handed_out
    return state


def restore_data_position(engine: Checkpointable, saved: Any) -> None:
    """Let the next pass over the loader begin where ``saved`` stood.

    Raises:
        CheckpointError: it is not a position.
    """
    loader = engine.training_dataloader
    if saved is None or not hasattr(loader, "load_state_dict"):
        return
    keys = ("epoch", "samples", "seed")
    if not isinstance(saved, dict) or not all(type(saved.get(k)) is int and saved[k] >= 0 for k in keys[:2]):
        raise CheckpointError(f"the checkpoint's position in the data is {saved!r} instead of {', '.join(keys)}")
    if type(saved.get("seed")) is not int:
        raise CheckpointError(f"the checkpoint's position in the data has no seed: {saved!r}")
    loader.load_state_dict(saved)
