"""What it costs when every process built the whole model though its parameters are sharded, and how to avoid it."""

from __future__ import annotations

import os
from collections.abc import Iterable

from torch import Tensor

from ds_hf.engine.zero.buffer import home_of

__all__ = ["WORTH_SAYING", "whole_model_advice"]

WORTH_SAYING = 1 << 30  # bytes a process: below, the memory does not matter


def whole_model_advice(params: Iterable[Tensor], world_size: int, *, worth_saying: int = WORTH_SAYING) -> str | None:
    """A message if ``params``, about to be sharded over ``world_size`` processes, are whole in each of them."""
    nbytes = sum(param.numel() * param.element_size() for param in params if home_of(param) is None)
    if world_size == 1 or nbytes < worth_saying:
        return None
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return (
        f"every process built the whole model ({_gib(nbytes)}; {local} processes on this host: {_gib(nbytes * local)}) "
        f"before it was sharded; a shard is {_gib(nbytes / world_size)}. To load shards only, create the "
        "TrainingArguments before from_pretrained(); without the Trainer keep `dschf = "
        "HfDeepSpeedConfig(ds_config)` in a variable while loading; a model of your own goes under "
        "`with deepspeed.zero.Init(config_dict_or_path=ds_config):`"
    )


def _gib(nbytes: float) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB" if nbytes >= 1 << 27 else f"{nbytes / (1 << 20):.1f} MiB"
