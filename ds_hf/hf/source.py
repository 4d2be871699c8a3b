"""What ``--deepspeed`` and ``HfDeepSpeedConfig`` may be given, checked, as the plain dict that transformers keeps."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from ds_hf.config import Config, load_config
from ds_hf.config.written import AsWritten

__all__ = ["AUTO", "PROVISIONAL", "checked_config", "fill_sizes", "plain_config"]

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
    tree.setdefault("zero_optimization", {"stage": 0})  # DeepSpeed's default, without which accelerate stops
    tensor = tree.get("tensor_parallel")
    if isinstance(tensor, dict) and tensor.get("autotp_size") == 0:  # off, by which Trainer.get_tp_size() divides
        del tensor["autotp_size"]
    group = tensor.get("tp") if isinstance(tensor, dict) else None
    if isinstance(group, dict) and group.get("tp_size", 1) > 1:  # transformers and accelerate look at the other alone
        tree["tensor_parallel"].setdefault("autotp_size", group["tp_size"])
    return AsWritten.of(tree, PROVISIONAL if source == AUTO else source)


def fill_sizes(config: Any, own: Any, searched: Sequence[str] = ("",)) -> None:
    """Sizes that are "auto" of models made of several: transformers and accelerate look for a width in the parts
    ``searched`` of the model's configuration ``own`` ("" is its top), and stop without one. Here it is that of the
    widest part; without any, DeepSpeed's defaults hold."""
    places = [getattr(own, part, None) if part else own for part in searched]
    if any(getattr(place, name, None) for place in places for name in ("hidden_size", "hidden_sizes")):
        return
    width = _width(own)
    sizes = {
        "reduce_bucket_size": width**2,
        "stage3_prefetch_bucket_size": width**2 * 9 // 10,
        "stage3_param_persistence_threshold": 10 * width,
    }
    section = config.config.get("zero_optimization") or {}
    for key in [key for key in sizes if section.get(key) == AUTO]:
        if width:
            section[key] = sizes[key]
        else:
            del section[key]


def _width(config: Any) -> int:
    """The largest width of a model's configuration and those inside it, 0 where none is known."""
    found = [getattr(config, name, 0) for name in ("hidden_size", "d_model", "n_embd")]
    inside = [each for each in getattr(config, "__dict__", {}).values() if hasattr(each, "to_diff_dict")]
    return max([0, *(each for each in found if isinstance(each, int)), *map(_width, inside)])
