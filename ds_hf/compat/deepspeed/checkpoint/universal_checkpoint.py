"""``deepspeed.checkpoint.universal_checkpoint``: a parameter's part of what a universal checkpoint holds whole.

``load_checkpoint`` of ds_hf does not go this way; these are for code that loads into DeepSpeed's own fragments.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ds_hf.checkpoint.deepspeed.pickles import SubparamShape, load_any
from ds_hf.deepspeed_api.checkpoint.constants import (
    CAT_DIM,
    FP32_WEIGHT_KEY,
    PARAM,
    PARAM_N_SUB_PARAMS,
    SUB_PARAM_SHAPE,
    VOCAB_TENSOR,
)

__all__ = ["SubparamShape", "enable_universal_checkpoint", "load_hp_checkpoint_state"]


def load_hp_checkpoint_state(
    self: Any, folder: str, tp_rank: int, tp_world_size: int, ep_rank: int = 0, ep_size: int = 1
) -> Any:
    """Read the states in ``folder`` (``zero/<parameter>``) into the fragment of ``self`` that this rank owns.

    The master is copied to ``self._hp_mapping.get_hp_fragment()``, other states come into its ``optim_fragment``.

    Args:
        self: a parameter with DeepSpeed's ``_hp_mapping``.

    Returns:
        the optimizer's step, ``None`` where there is no file of it.

    Raises:
        AssertionError: a state has another number of elements than the parameter.
        NotImplementedError: experts are divided over several ranks.
    """
    if ep_size > 1:
        raise NotImplementedError("experts that are divided over ranks are not loaded from universal checkpoints")
    mapping = self._hp_mapping
    mapping.optim_fragment = {}
    step = None
    for path in sorted(Path(folder).glob("*.pt")):
        key = re.sub(r"\.pt$", "", path.name)
        content = load_any(path)
        if key == "step":
            step = content
            continue
        said = content if isinstance(content, dict) else {PARAM: content}
        part = _part(self, said, tp_rank, tp_world_size, str(path)).flatten()
        address = mapping.lp_fragment_address
        fragment = part.narrow(0, address.start, address.numel)
        if key == FP32_WEIGHT_KEY:
            target = mapping.get_hp_fragment()
            if target.numel() != address.numel:
                raise AssertionError(f"Load checkpoint {key} dst numel {target.numel()} != src numel {address.numel}")
            target.data.copy_(fragment.data)
        else:
            mapping.optim_fragment[key] = fragment.clone().detach()
    return step


def _part(param: Any, said: dict[str, Any], rank: int, size: int, path: str) -> Tensor:
    """What a tensor-parallel rank has of a whole tensor: it is cut as it was put together."""
    whole: Tensor = said[PARAM]
    if whole.shape == param.shape:  # the same on all ranks
        return whole
    if said.get(VOCAB_TENSOR, False):
        missing = param.shape[0] * size - whole.shape[0]
        if missing < 0:
            raise AssertionError(f"Vocab tensor padded size {param.shape[0] * size} < universal size {whole.shape[0]}")
        whole = functional.pad(whole, (0, 0, 0, missing), "constant", 0)
    if whole.numel() != size * param.numel():
        raise AssertionError(
            f"Loading {path} full param numel {whole.numel()} != tensor slice numel {param.numel()} * tp_world_size "
            f"{size}"
        )
    packed, dim = said.get(SUB_PARAM_SHAPE), said.get(CAT_DIM, 0)
    if packed is not None:
        dim = packed.partition_dim
        sizes = packed.shape[dim]
        sizes = sizes if isinstance(sizes, tuple) else (sizes,)
        view = whole.view([sum(n) if isinstance(n, tuple) else n for n in packed.shape])
        return torch.cat([part.chunk(size, dim)[rank] for part in torch.split(view, list(sizes), dim)], dim)
    parts = whole.chunk(said.get(PARAM_N_SUB_PARAMS, 1), dim)
    return torch.cat([part.chunk(size, dim)[rank] for part in parts], dim)


def enable_universal_checkpoint(param_list: Iterable[Tensor]) -> None:
    """Give each parameter the method ``load_hp_checkpoint_state``."""
    for param in param_list:
        param.load_hp_checkpoint_state = types.MethodType(load_hp_checkpoint_state, param)  # type: ignore[attr-defined]
