"""Random states of one rank: torch's on host and device, Python's and numpy's, in what ``weights_only`` can load."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_hf.errors import CheckpointError

__all__ = ["random_states", "restore_random_states"]


def random_states() -> dict[str, Any]:
    """The present states."""
    name, keys, *rest = np.random.get_state()
    states: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(saved: Any) -> None:
    """Bring back what ``random_states`` gave, so that dropout and shuffling go on as they would have.

    Raises:
        CheckpointError: it is not what it should be.
    """
    if not isinstance(saved, dict):
        raise CheckpointError(f"the checkpoint's random states are a {type(saved).__name__} instead of a dict")
    try:
        if isinstance(saved.get("cpu"), Tensor):
            torch.set_rng_state(saved["cpu"])
        if isinstance(saved.get("cuda"), Tensor) and torch.cuda.is_available():
            torch.cuda.set_rng_state(saved["cuda"])
        if "python" in saved:
            random.setstate(saved["python"])
        if "numpy" in saved:
            name, keys, *rest = saved["numpy"]
            np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    except (AttributeError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint's random states are not what was saved: {error}") from error
