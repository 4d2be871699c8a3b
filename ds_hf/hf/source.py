"""What ``--deepspeed`` and ``HfDeepSpeedConfig`` may be given, checked, as the plain dict that transformers keeps."""

from __future__ import annotations

import copy
from typing import Any

from ds_hf.config import Config, load_config
from ds_hf.config.written import AsWritten

__all__ = ["AUTO", "PROVISIONAL", "checked_config", "plain_config"]

AUTO = "auto"
# What "auto" stands for until the model is known: sharded optimizer states suit every model, and no model has to be
# built under zero.Init for them.
PROVISIONAL = "zero1"


def checked_config(source: Any, world_size: int | None = None) -> Config:
    """Read and check ``source``; "auto" values stay, because the Trainer fills them later. What elasticity chooses is
    filled in for ``world_size`` processes, or those that a launcher has started.

    Raises:
        ConfigError: with every fault found.
    """
    source = PROVISIONAL if source == AUTO else source
    return load_config(source, world_size=world_size, allow_auto=True, check_batch=False)


def plain_config(source: Any, world_size: int | None = None) -> dict[str, Any]:
    """``source``, checked, as a dict of its own: comments gone, presets spelt out, old names replaced; what was written
    goes with it."""
    tree = copy.deepcopy(checked_config(source, world_size).resolved)
    tensor = tree.get("tensor_parallel")
    if isinstance(tensor, dict) and tensor.get("autotp_size") == 0:  # off, by which Trainer.get_tp_size() divides
        del tensor["autotp_size"]
    group = tensor.get("tp") if isinstance(tensor, dict) else None
    if isinstance(group, dict) and group.get("tp_size", 1) > 1:  # transformers and accelerate look at the other alone
        tree["tensor_parallel"].setdefault("autotp_size", group["tp_size"])
    return AsWritten.of(tree, PROVISIONAL if source == AUTO else source)
