"""The configuration of ``init_inference``: DeepSpeed's keys, checked against ``inference_config.schema.json``.

A file, a dict and keyword arguments hold the same keys; what both say must be the same. Values that JSON cannot hold
(dtypes, process groups, classes) are taken out before the check and put back after it.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping
from importlib import resources
from types import SimpleNamespace
from typing import Any

import torch

from ds_hf.config.check import check_against
from ds_hf.config.load import grouped
from ds_hf.config.source import ConfigSource, Draft, read_source
from ds_hf.dtypes import SHORT, canonical
from ds_hf.errors import ConfigError, Fault
from ds_hf.log import warn_once

__all__ = ["DTYPES", "InferenceConfig", "dtype_name_of", "load_inference_config"]

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_NAMES = {**SHORT, "qint8": "int8"}
_OBJECTS = (("mpu",), ("tensor_parallel", "mpu"), ("tensor_parallel", "tp_group"), ("ep_group",), ("ep_mp_group",))
_SOURCE = "init_inference"


@functools.cache
def _schema() -> dict[str, Any]:
    text = (resources.files("ds_hf") / "schemas" / "inference_config.schema.json").read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


class InferenceConfig(SimpleNamespace):
    """Every key of the schema as an attribute, sections as namespaces (DeepSpeed's ``DeepSpeedInferenceConfig``).

    Raises:
        ConfigError: a key or a value is wrong; all faults at once.
    """

    def __init__(self, **values: Any) -> None:
        tree, objects = _apart(values)
        draft = Draft.of(ConfigSource(_SOURCE, tree), allow_auto=False)
        _rename(draft)
        check_against(draft, _schema())
        if draft.faults:
            draft.refuse()
        for message, warnings in grouped(tuple(draft.warnings)):
            warn_once(f"{_SOURCE}: {', '.join(w.place[1:].replace('/', '.') for w in warnings)}: {message}")
        super().__init__(**vars(_section(_schema(), draft.tree)))
        for path, value in objects.items():
            holder: Any = self
            for key in path[:-1]:
                holder = getattr(holder, key)
            setattr(holder, path[-1], value)
        self.given = frozenset(draft.tree)  # keys that were not left to their defaults
        self._check()

    def _check(self) -> None:
        faults = []
        if self.checkpoint_config.checkpoint_dir and self.checkpoint:
            faults.append(Fault("/checkpoint_config/checkpoint_dir", "checkpoint is given as well", "keep one"))
        if self.quant_bits is None and "quant" in self.given and vars(self.quant)["weight"].num_bits == 4:
            faults.append(Fault("/quant/weight/num_bits", f"dtype is {self.dtype}", 'set "dtype": "int8"'))
        if self.enable_cuda_graph and self.zero.get("stage") == 3:
            message = "weights that come block by block have no address that a graph could keep"
            faults.append(Fault("/enable_cuda_graph", message, "remove it, or zero"))
        if faults:
            raise ConfigError(faults, _SOURCE)

    @property
    def quant_bits(self) -> int | None:
        """Bits of the weights, ``None`` where they are not quantized."""
        if self.dtype == "int4":
            return 4
        return int(self.quant.weight.num_bits) if self.dtype == "int8" and self.quant.enabled else None

    def dict(self) -> dict[str, Any]:
        """Keys and values; sections as dicts."""
        return {key: dict(vars(v)) if isinstance(v, SimpleNamespace) else v for key, v in vars(self).items()}


def load_inference_config(config: Any, kwargs: Mapping[str, Any]) -> InferenceConfig:
    """What ``config`` (path, JSON text or dict) and ``kwargs`` say together.

    Raises:
        ConfigError: it is wrong, or they say different things.
    """
    if config is not None and not isinstance(config, str | Mapping) and not hasattr(config, "__fspath__"):
        raise ConfigError(f"'config' argument expected string or dictionary, got {type(config)}", _SOURCE)
    values = dict(config) if isinstance(config, Mapping) else {} if config is None else read_source(config).tree
    for key in values.keys() & kwargs.keys():
        if values[key] != kwargs[key]:
            message = f"Conflicting argument '{key}' in 'config':{values[key]} and kwargs:{kwargs[key]}"
            raise ConfigError(message, _SOURCE)
    return InferenceConfig(**{**values, **kwargs})


def dtype_name_of(value: Any) -> Any:
    """``"bf16"`` for ``torch.bfloat16``, ``"torch.bfloat16"`` and ``"bfloat16"``; other values as they are."""
    text = canonical(str(value).lower()) if isinstance(value, torch.dtype | str) else value
    return _NAMES.get(text, text) if isinstance(text, str) else text


def _apart(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[tuple[str, ...], Any]]:
    """Values as JSON has them, and by path those that it cannot hold."""
    aliases = _schema()["x-aliases"]
    tree = {key: dict(value) if isinstance(value, Mapping) else value for key, value in values.items()}
    objects: dict[tuple[str, ...], Any] = {}
    if "dtype" in tree:
        tree["dtype"] = dtype_name_of(tree["dtype"])
    if isinstance(tree.get("moe"), bool):
        tree["moe"] = {"ep_size": 1} if not tree["moe"] else {"enabled": True, "ep_size": 2}
    for path in _OBJECTS:
        holder = tree
        for key in path[:-1]:
            short = next((old for old, new in aliases.items() if new == key and old in tree), key)
            holder = tree.get(short) if isinstance(tree.get(short), dict) else {}  # type: ignore[assignment]
        value = holder.pop(path[-1], None)
        if value is not None:
            objects[path if len(path) > 1 or path[0] != "mpu" else ("tensor_parallel", "mpu")] = value
    for name in ("injection_policy", "injection_dict"):
        policy = tree.pop(name, None)
        if policy is not None:
            objects[("injection_policy",)] = policy
    return copy.deepcopy(tree), objects


def _rename(draft: Draft) -> None:
    """Move values of older keys; what belongs to other products gets a sentence."""
    schema = _schema()
    for old, new in schema["x-aliases"].items():
        if old in draft.tree:
            value = draft.tree.pop(old)
            if new in draft.tree and draft.tree[new] != value:
                draft.fault(f"/{old}", f"{old} is an older name of {new}, which says something else", "keep one")
            draft.tree[new] = value
    for old, (section, key) in schema["x-moved"].items():
        if old in draft.tree:
            value = draft.tree.pop(old)
            held = draft.tree.setdefault(section, {})
            if isinstance(held, dict) and held.setdefault(key, value) != value:
                draft.fault(
                    f"/{old}", f"{old} is an older name of {section}.{key}, which says something else", "keep one"
                )
    for key, whose in schema["x-elsewhere"].items():
        if key in draft.tree:
            fix = "serve with vLLM, or with transformers' generate_batch; init_inference generates in this process"
            draft.fault(f"/{key}", f"{key} {whose}, which ds_hf does not have", fix)
            draft.tree.pop(key)


def _section(node: Mapping[str, Any], tree: Mapping[str, Any]) -> SimpleNamespace:
    found = SimpleNamespace()
    for key, child in node["properties"].items():
        value = tree.get(key, copy.deepcopy(child.get("default")))
        setattr(found, key, _section(child, tree.get(key) or {}) if "properties" in child else value)
    return found


def __getattr__(name: str) -> Any:
    """What ``deepspeed.inference.config`` has besides, for ``import ds_hf as deepspeed``."""
    from ds_hf.stand_in import name_of_deepspeed

    return name_of_deepspeed(__name__, name)
