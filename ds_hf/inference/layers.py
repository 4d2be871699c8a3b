"""Layers divided over processes for inference, by the same cuts as in training.

Rules come from the model's own plan. Where it has none, they come from ``injection_policy``, DeepSpeed's list of the
layers whose outputs are summed (all other linear layers of the block are cut by their outputs), or from the table of
families below.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from ds_hf.config.types.parallel import TensorParallelSection, TPPartitionSection
from ds_hf.config.types.root import MeshShape
from ds_hf.engine.comm.mesh import Mesh
from ds_hf.engine.comm.process_group import init_distributed
from ds_hf.engine.parallel.tensor.divide import divide
from ds_hf.engine.parallel.tensor.styles import is_transposed
from ds_hf.errors import ConfigError

__all__ = ["divide_layers"]

_SOURCE = "init_inference(tensor_parallel=...)"


def _pair(column: str, row: str, **fused: Any) -> list[dict[str, Any]]:
    return [
        {"patterns": [rf".*\.{column}\.weight$"], "partition_type": "column", **fused},
        {"patterns": [rf".*\.{row}\.weight$"], "partition_type": "row"},
    ]


# Families without a plan in transformers, by ``model_type``.
FAMILIES: dict[str, list[dict[str, Any]]] = {
    "gpt2": [
        *_pair(r"attn\.c_attn", r"attn\.c_proj", shape=[3, -1], partition_dim=0),
        *_pair(r"mlp\.c_fc", r"mlp\.c_proj"),
    ],
    "opt": [*_pair(r"self_attn\.[qkv]_proj", r"self_attn\.out_proj"), *_pair("fc1", "fc2")],
    "t5": [
        *_pair(r"(SelfAttention|EncDecAttention)\.[qkv]", r"(SelfAttention|EncDecAttention)\.o"),
        *_pair(r"DenseReluDense\.wi(_[01])?", r"DenseReluDense\.wo"),
    ],
}
FAMILIES["mt5"] = FAMILIES["umt5"] = FAMILIES["t5"]


def divide_layers(model: nn.Module, config: Any) -> Mesh:
    """Cut ``model`` over ``tensor_parallel.tp_size`` consecutive processes; collective. Needs a process group, or the
    environment of a launcher.

    Raises:
        ConfigError: the processes, the heads or the layers do not divide, or nothing says how the layers do.
    """
    size = config.tensor_parallel.tp_size
    init_distributed()
    world = dist.get_world_size()
    if world % size:
        raise ConfigError(
            f"tp_size is {size} and there are {world} processes: start a multiple of {size} "
            f"(deepspeed --num_gpus {size} script.py)",
            _SOURCE,
        )
    _check_group(config.tensor_parallel, size)
    mesh = Mesh(MeshShape(data=world // size, tensor=size))
    divide(model, mesh, section_for(model, config))
    return mesh


def _check_group(section: Any, size: int) -> None:
    group = section.tp_group
    if group is None and section.mpu is not None:
        of_mpu = getattr(section.mpu, "get_model_parallel_group", None) or getattr(
            section.mpu, "get_tensor_model_parallel_group", None
        )
        group = of_mpu() if of_mpu is not None else None
    if group is None:
        return
    ranks, first = dist.get_process_group_ranks(group), dist.get_rank() // size * size
    if ranks != list(range(first, first + size)):
        raise ConfigError(
            f"the group that was given is ranks {ranks}, and tp_size {size} takes consecutive ones", _SOURCE
        )


def section_for(model: nn.Module, config: Any) -> TensorParallelSection:
    """The rules, in the form that training has them."""
    policy = config.injection_policy
    specs = (
        list(_by_policy(model, policy, config.injection_policy_tuple))
        if policy or config.injection_policy_tuple
        else []
    )
    kind = str(getattr(getattr(model, "config", None), "model_type", ""))
    if not specs and not _has_plan(model):
        specs = FAMILIES.get(kind, [])
    if not specs:
        return TensorParallelSection()
    return TensorParallelSection(partition_config=TPPartitionSection(use_default_specs=False, layer_specs=tuple(specs)))


def _has_plan(model: Any) -> bool:
    base = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    return bool(base or getattr(model, "_tp_plan", None))


def _by_policy(model: nn.Module, policy: Any, names: Iterable[str] | None) -> Iterator[dict[str, Any]]:
    """Rules of DeepSpeed's policy: ``{class of a block: ("attn.out", "mlp.down")}``."""
    if policy is not None and not isinstance(policy, Mapping):
        raise ConfigError("injection_policy is a dict: {class of a block: names of layers}", _SOURCE)
    entries = dict(policy or {})
    for block in entries.values():
        if not isinstance(block, str | list | tuple):
            raise ConfigError(
                f"injection_policy names a {getattr(block, '__name__', block)}: DeepSpeed's policy classes replace "
                "blocks by its kernels, which are not here; give the names of the layers whose outputs are summed",
                _SOURCE,
            )
    blocks = [
        (path, module, _names(entries[kind]) if kind is not None else _names(names or ()))
        for path, module in model.named_modules()
        if (kind := next((k for k in entries if isinstance(k, type) and isinstance(module, k)), None)) is not None
        or (not entries and path == "")
    ]
    if not blocks:
        raise ConfigError(f"no module of the model is a {', '.join(map(str, entries))} (injection_policy)", _SOURCE)
    for path, block, rows in blocks:
        for name, child in block.named_modules():
            if not (isinstance(child, nn.Linear) or is_transposed(child)) or (not path and name.endswith("lm_head")):
                continue
            full = f"{path}.{name}" if path else name
            row = any(name == each or name.endswith(f".{each}") for each in rows)
            yield {"patterns": [f"^{re.escape(full)}.weight$"], "partition_type": "row" if row else "column"}


def _names(given: Any) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)
