"""Linear layers whose weights are torchao's tensors: on a GPU its products read 8 or 4 bits and no 16-bit copy.

int8 has a scale a row, and the compiler fuses the cast into the product. int4 has a scale and a middle for 64
neighbours, in the tiles of torch's own kernel (CUDA, compute capability 8.0, bf16). Inductor's settings of the process
are left alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Container
from typing import Any

import torch
from torch import nn

from ds_hf.engine.zero.packed import is_packed
from ds_hf.log import log_once

__all__ = ["has_torchao", "quantize_by_torchao"]

_GROUP = 64


def has_torchao() -> bool:
    """Whether it is installed."""
    return importlib.util.find_spec("torchao") is not None


@torch.no_grad()
def quantize_by_torchao(
    model: nn.Module, bits: int, tied: Container[int] = frozenset(), device: torch.device | None = None
) -> list[str]:
    """Quantize linear layers of ``model``; the names of those that are done.

    Where torchao cannot (another version, a missing library, a dtype or a device without a kernel) it stops with one
    line, and the other layers are as they were.

    Args:
        bits: 8 or 4.
        tied: ``id`` of parameters that stay.
        device: where each layer goes first, so that few of them are there in 16 bits at a time.
    """
    done: list[str] = []
    layers = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not is_packed(module.weight) and id(module.weight) not in tied
    ]
    try:
        ao: Any = importlib.import_module("torchao.quantization")
        config = _config(ao, bits)
        for name, module in layers:
            module.to(device)
            ao.quantize_(module, config, filter_fn=lambda *_: True)
            if is_packed(module.weight):  # it leaves rows that are no multiple of the group
                done.append(name)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # whatever its versions raise: ImportError, TypeError, AssertionError, ...
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        log_once(f"torchao does not quantize to {bits} bits here, ds_hf's blocks are used: {first}", logging.WARNING)
    return done


def _config(ao: Any, bits: int) -> Any:
    if bits == 8:
        return ao.Int8WeightOnlyConfig(set_inductor_config=False)
    tiles = "tile_packed_to_4d"  # torchao's default format needs another library
    return ao.Int4WeightOnlyConfig(group_size=_GROUP, int4_packing_format=tiles, set_inductor_config=False)
