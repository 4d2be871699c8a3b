"""The rows of ``ds-hf memory``: one configuration at every stage, with and without offload."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ds_hf.errors import ConfigError
from ds_hf.memory.prediction import Prediction, UnpredictableError
from ds_hf.memory.predictor import Predictor

__all__ = ["Machine", "Row", "offload_rank", "parse_bytes", "rows", "sized"]

_UNITS = {"": 1 << 30, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
# what is offloaded -> the keys of "zero_optimization"; at which stages
_OFFLOADS: dict[str, tuple[dict[str, str], tuple[int, ...]]] = {
    "-": ({}, (0, 1, 2, 3)),
    "optimizer to cpu": ({"offload_optimizer": "cpu"}, (1, 2, 3)),
    "all to cpu": ({"offload_optimizer": "cpu", "offload_param": "cpu"}, (3,)),
    "optimizer to nvme": ({"offload_optimizer": "nvme"}, (3,)),
    "all to nvme": ({"offload_optimizer": "nvme", "offload_param": "nvme"}, (3,)),
}


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        stage: ZeRO stage.
        offload: what lies elsewhere, ``"-"`` for nothing.
        config: what was predicted for.
        prediction: at the micro-batch asked for; ``None`` when ds_hf refuses the configuration.
        refused: why.
        fits: whether device and host have room.
        largest: the largest micro-batch that fits the device.
        longest: the longest sequence that does, where it was asked for.
        chosen: it is what the given configuration says.
    """

    stage: int
    offload: str
    config: dict[str, Any]
    prediction: Prediction | None
    refused: str
    fits: bool
    largest: int
    chosen: bool
    longest: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain values; bytes."""
        return {
            "stage": self.stage,
            "offload": self.offload,
            "zero_optimization": self.config.get("zero_optimization", {}),
            "chosen": self.chosen,
            "fits": self.fits,
            "largest_micro_batch": self.largest,
            **({} if self.longest is None else {"longest_sequence": self.longest}),
            "refused": self.refused or None,
            "prediction": None if self.prediction is None else self.prediction.as_json(),
        }


@dataclass(frozen=True)
class Machine:
    """What there is: bytes of a device and of a host, processes in all and on one host."""

    device_memory: int
    host_memory: int | None
    world_size: int
    processes_per_host: int

    def has_room(self, prediction: Prediction) -> bool:
        """Whether device and host suffice."""
        host = prediction.host_total * min(self.processes_per_host, self.world_size)
        return prediction.device_total <= self.device_memory and (self.host_memory is None or host <= self.host_memory)


def rows(
    predictor: Predictor,
    config: dict[str, Any],
    machine: Machine,
    micro_batch: int | None,
    *,
    largest: bool = True,
    longest: bool = False,
) -> Iterator[Row]:
    """``config`` at every stage and offload; its own row is marked.

    Args:
        config: resolved as far as it is; batch keys that contradict the number of processes are dropped.
        micro_batch: samples; default the configuration's, else the workload's.
        largest: look for the largest micro-batch; else it stays 0, and a row is known much sooner.
        longest: look for the longest sequence, too.
    """
    chosen = _own(config)
    for stage in range(4):
        for offload, (keys, stages) in _OFFLOADS.items():
            if stage in stages:
                variant = _variant(config, stage, keys)
                row = _row(predictor, variant, (stage, offload), machine, micro_batch, chosen)
                row = sized(predictor, row, machine) if largest else row
                if longest and row.prediction is not None:
                    room, world = machine.device_memory, machine.world_size
                    tokens = predictor.longest_sequence(
                        variant, world_size=world, micro_batch=micro_batch, device_memory=room, exact=row.chosen
                    )
                    row = replace(row, longest=tokens)
                yield row


def _row(
    predictor: Predictor,
    config: dict[str, Any],
    name: tuple[int, str],
    machine: Machine,
    micro_batch: int | None,
    chosen: tuple[int, str],
) -> Row:
    world, memory = machine.world_size, machine.device_memory
    try:
        prediction = predictor.predict(config, world_size=world, micro_batch=micro_batch, device_memory=memory)
    except ConfigError as error:
        return Row(*name, config, None, error.faults[0].message, False, 0, name == chosen)
    return Row(*name, config, prediction, "", machine.has_room(prediction), 0, name == chosen)


def sized(predictor: Predictor, row: Row, machine: Machine) -> Row:
    """With its largest micro-batch, which is exact for the user's own row."""
    if row.prediction is None:
        return row
    world, memory = machine.world_size, machine.device_memory
    most = predictor.largest_micro_batch(row.config, world_size=world, device_memory=memory, exact=row.chosen)
    return replace(row, largest=most)


def _own(config: dict[str, Any]) -> tuple[int, str]:
    """The row that ``config`` itself is."""
    zero = config.get("zero_optimization") or {}
    stage = int(zero.get("stage", 0))
    keys = {}
    offloads_all = stage in _OFFLOADS["all to cpu"][1]
    for name in ("offload_optimizer", "offload_param") if offloads_all else ("offload_optimizer",):
        device = (zero.get(name) or {}).get("device", "none")
        if device in ("cpu", "nvme"):
            keys[name] = device
    return stage, next((label for label, (wanted, _) in _OFFLOADS.items() if wanted == keys), "-")


def _variant(config: dict[str, Any], stage: int, keys: dict[str, str]) -> dict[str, Any]:
    variant = copy.deepcopy(config)
    zero = dict(variant.get("zero_optimization") or {})
    given = {name: dict(zero.pop(name, None) or {}) for name in ("offload_optimizer", "offload_param")}
    for name, device in keys.items():
        path = {"nvme_path": "/nvme"} if device == "nvme" else {}
        zero[name] = path | given[name] | {"device": device}
    if stage != 3:
        zero = {key: value for key, value in zero.items() if not key.startswith(("stage3_", "zero_hpz_"))}
    if stage == 0:
        zero.pop("mics_shard_size", None)
    variant["zero_optimization"] = zero | {"stage": stage}
    return variant


def offload_rank(name: str) -> int:
    """How much ``name`` offloads, for comparisons."""
    return list(_OFFLOADS).index(name)


def parse_bytes(text: str) -> int:
    """``"80GiB"``, ``"80GB"``, ``"512MiB"``; a bare number is GiB.

    Raises:
        UnpredictableError: it is none of these.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS or float(match[1]) == 0:
        raise UnpredictableError(f"{text!r} is not a valid amount of memory: give e.g. 80GiB, 24GB or 40960MiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])
