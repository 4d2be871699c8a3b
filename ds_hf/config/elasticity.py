"""Elasticity (the key ``elasticity``): a global batch that many numbers of processes can make.

DeepSpeed's schemes 0.1 and 0.2. A global batch is a multiple of a micro-batch size, or of the least common multiple of
all of them, by a highly composite number: one with more divisors than any smaller number. Of these batches, none above
``max_train_batch_size``, the one is taken that most numbers of processes divide. Scheme 0.1 knows processes, each of
which reads samples of its own. Scheme 0.2 counts whole nodes, knows processes that hold one model together, and takes
another batch where the number of processes does not divide that one.

``compute_elastic_config`` is what schedulers and clients call, as in DeepSpeed 0.19.6; ``elastic_keys`` fills in the
batch keys of a configuration.
"""

from __future__ import annotations

import bisect
import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ds_hf.config.types.parallel import ElasticitySection
from ds_hf.errors import DsHfError
from ds_hf.log import logger

__all__ = [
    "HIGHLY_COMPOSITE",
    "SCHEDULED",
    "ElasticBatch",
    "ElasticityConfig",
    "ElasticityConfigError",
    "ElasticityError",
    "ElasticityIncompatibleWorldSize",
    "best_batch",
    "by_nodes",
    "by_processes",
    "compute_elastic_config",
    "elasticity_enabled",
    "ensure_immutable_elastic_config",
    "largest_micro",
    "listed",
    "scaled_batches",
    "scheme_of",
    "sizes_of",
]

# OEIS A002182, as far as DeepSpeed goes.
HIGHLY_COMPOSITE = (
    1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120, 20160,
    25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400, 665280, 720720,
)  # fmt: skip
SCHEDULED = "DEEPSPEED_ELASTICITY_CONFIG"  # the section as the scheduler read it
_OLDEST = (0, 3, 8)  # version of DeepSpeed that can be asked for
_SHOWN = 12  # sizes in a message


class ElasticityError(DsHfError):
    """Base of the errors about elasticity."""


class ElasticityConfigError(ElasticityError, ValueError):
    """The section ``elasticity`` is missing, off or wrong."""


class ElasticityIncompatibleWorldSize(ElasticityError, ValueError):
    """The number of processes is none of those that make the global batch."""


@dataclass(frozen=True)
class ElasticBatch:
    """A global batch and who can make it.

    Attributes:
        total: samples of a step.
        sizes: data-parallel sizes that make it, in order.
        micro: samples that each process sends through the model at once; 0 where the size is not known.
        kept: whether other sizes make the same batch; False for one that scheme 0.2 found for a size outside of them.
    """

    total: int
    sizes: tuple[int, ...]
    micro: int = 0
    kept: bool = True

    def steps(self, size: int) -> int:
        """Micro-batches of a step on each of ``size`` data-parallel processes."""
        return self.total // (self.micro * size)


# -- the schemes -------------------------------------------------------------------------------------------------------


def scaled_batches(bases: Iterable[int], most: int) -> list[int]:
    """Of each base the largest highly composite multiple that is at most ``most``, in order; a larger base has none."""
    fitting = (base for base in bases if base <= most)
    return sorted({base * HIGHLY_COMPOSITE[bisect.bisect(HIGHLY_COMPOSITE, most // base) - 1] for base in fitting})


def sizes_of(batch: int, micros: Iterable[int], least: int, most: int) -> list[int]:
    """Numbers of processes from ``least`` to ``most`` that make ``batch`` in whole steps of one of ``micros``."""
    found: set[int] = set()
    for whole in {batch // micro for micro in micros if batch % micro == 0}:
        small = [size for size in range(1, math.isqrt(whole) + 1) if whole % size == 0]
        found.update(small, (whole // size for size in small))
    return sorted(size for size in found if least <= size <= most)


def best_batch(
    batches: Iterable[int], micros: Sequence[int], least: int, most: int, larger: bool
) -> tuple[int, list[int]]:
    """The batch with most sizes, and these; of batches with equally many the larger or the smaller one."""
    found = [(batch, sizes_of(batch, micros, least, most)) for batch in batches]
    return max(found, key=lambda each: (len(each[1]), each[0] if larger else -each[0]))


def _best(micros: Sequence[int], most_samples: int, least: int, most: int, larger: bool) -> ElasticBatch:
    if too_large := sorted({micro for micro in micros if micro > most_samples}):
        raise ElasticityConfigError(
            f"the micro-batch sizes {listed(too_large)} are more than the largest global batch, {most_samples}"
        )
    batches = scaled_batches([*micros, math.lcm(*micros)], most_samples)
    total, sizes = best_batch(batches, micros, least or 1, most or most_samples // min(micros), larger)
    return ElasticBatch(total, tuple(sizes))


def by_processes(section: ElasticityConfig) -> ElasticBatch:
    """Scheme 0.1."""
    most = section.max_acceptable_batch_size
    return _best(section.micro_batches, most, section.min_gpus, section.max_gpus, section.prefer_larger_batch_size)


def by_nodes(section: ElasticityConfig, processes: int) -> ElasticBatch:
    """Scheme 0.2; ``processes`` 0 leaves the micro-batch open."""
    per_node, together = section.num_gpus_per_node, section.model_parallel_size
    if per_node % together:
        raise ElasticityError(
            f"{together} processes hold a model together (model_parallel_size), and do not divide the {per_node} of a "
            "node (num_gpus_per_node)"
        )
    micros, most, larger = section.micro_batches, section.max_acceptable_batch_size, section.prefer_larger_batch_size
    models = per_node // together
    if max(micros) > most // models:
        raise ElasticityConfigError(
            f"a node with {models} processes that read samples of their own, of micro-batches of {max(micros)}, makes "
            f"{max(micros) * models} samples a step, and the largest global batch is {most}"
        )
    by_node = _best(micros, most // models, section.min_gpus // per_node, section.max_gpus // per_node, larger)
    total, sizes = by_node.total * models, tuple(nodes * models for nodes in by_node.sizes)
    if not processes or processes // together in sizes:
        return ElasticBatch(total, sizes, _first_micro(micros, total, processes // together, larger))
    size = processes * models // per_node
    choices = [most // (micro * size) * micro * size for micro in micros] if size else [0]
    total = max(choices) if larger else min(choices)
    if total == 0:
        raise ElasticityIncompatibleWorldSize(
            f"{processes} processes with micro-batches of {listed(micros)} make no global batch of at most {most}"
        )
    return ElasticBatch(total, (size,), _first_micro(micros, total, size, larger), kept=False)


def _first_micro(micros: Sequence[int], total: int, size: int, larger: bool) -> int:
    fitting = [micro for micro in micros if size and total // size % micro == 0]
    return (max(fitting) if larger else fitting[0]) if fitting else 0


def largest_micro(micros: Iterable[int], total: int, size: int) -> int:
    return max(micro for micro in micros if total // size % micro == 0)


def listed(values: Sequence[int]) -> str:
    shown = [str(value) for value in values[:_SHOWN]]
    more = f", ... ({len(values)} in all)" if len(values) > _SHOWN else ""
    return ", ".join(shown) + more


# -- DeepSpeed's functions ---------------------------------------------------------------------------------------------


class ElasticityConfig:
    """The section as an object with DeepSpeed's attributes.

    Raises:
        ElasticityConfigError: a value is missing or impossible.
    """

    def __init__(self, param_dict: dict[str, Any]) -> None:
        if not isinstance(param_dict, dict):
            raise ElasticityConfigError(f"a section of elasticity is a dict, and this is a {type(param_dict).__name__}")
        given = dict(param_dict)
        default = ElasticitySection()
        self.enabled: bool = given.get("enabled", False)
        for key in ("max_train_batch_size", "micro_batch_sizes"):
            if self.enabled and key not in given:
                raise ElasticityConfigError(f"elasticity is enabled and {key} is missing from the section")
        self.max_acceptable_batch_size: int = given.get("max_train_batch_size", default.max_train_batch_size)
        micros = given.get("micro_batch_sizes", list(default.micro_batch_sizes))
        if not isinstance(micros, list | tuple) or not micros:
            raise ElasticityConfigError(f"micro_batch_sizes is {micros!r}, and has to be a list such as [2, 4]")
        if bad := [micro for micro in micros if type(micro) is not int or micro < 1]:
            raise ElasticityConfigError(f"micro_batch_sizes has {bad[0]!r}: each is a whole number of 1 or more")
        self.micro_batches: list[int] = list(micros)
        for key in ("min_gpus", "max_gpus", "model_parallel_size", "num_gpus_per_node", "min_time"):
            value, least = given.get(key, getattr(default, key)), 0 if key == "min_time" else 1
            if value < least:
                raise ElasticityConfigError(f"{key} is {value}, and has to be at least {least}")
            setattr(self, key, value)
        if self.max_gpus < self.min_gpus:
            raise ElasticityConfigError(f"min_gpus {self.min_gpus} is more than max_gpus {self.max_gpus}")
        self.version: float | str = given.get("version", default.version)
        self.prefer_larger_batch_size: bool = given.get(
            "prefer_larger_batch", given.get("prefer_large_batch", default.prefer_larger_batch)
        )
        self.ignore_non_elastic_batch_info: bool = given.get("ignore_non_elastic_batch_info", False)

    min_gpus: int
    max_gpus: int
    model_parallel_size: int
    num_gpus_per_node: int
    min_time: int

    def repr(self) -> dict[str, Any]:
        """All attributes."""
        return self.__dict__

    def __repr__(self) -> str:
        return json.dumps(self.__dict__, sort_keys=True, indent=4)


def elasticity_enabled(ds_config: dict[str, Any]) -> bool:
    """Whether the section is there and switched on."""
    return bool((ds_config.get("elasticity") or {}).get("enabled", False))


def ensure_immutable_elastic_config(runtime_elastic_config_dict: dict[str, Any]) -> None:
    """Compare the section with the one that a scheduler read (the environment's DEEPSPEED_ELASTICITY_CONFIG).

    Raises:
        ElasticityConfigError: largest batch, micro-batch sizes or version differ.
    """
    if SCHEDULED not in os.environ:
        logger.info(
            "%s is not set: nothing says by which elasticity a scheduler changes the number of processes", SCHEDULED
        )
        return
    try:
        scheduled = ElasticityConfig(json.loads(os.environ[SCHEDULED]))
    except ValueError as error:
        raise ElasticityConfigError(
            f"the environment variable {SCHEDULED} does not hold an elasticity section: {error}"
        ) from None
    given = ElasticityConfig(runtime_elastic_config_dict)
    names = {
        "max_acceptable_batch_size": "max_train_batch_size",
        "micro_batches": "micro_batch_sizes",
        "version": "version",
    }
    for attribute, key in names.items():
        ours, theirs = getattr(given, attribute), getattr(scheduled, attribute)
        if ours != theirs:
            raise ElasticityConfigError(
                f"{key} is {ours} in the configuration and was {theirs} for the scheduler ({SCHEDULED}): they have to "
                "agree on the numbers of processes"
            )


def compute_elastic_config(
    ds_config: dict[str, Any], target_deepspeed_version: str, world_size: int = 0, return_microbatch: bool = False
) -> tuple[int, list[int]] | tuple[int, list[int], int]:
    """The global batch of an elastic training and the numbers of processes that make it.

    Args:
        ds_config: a configuration with ``elasticity``.
        target_deepspeed_version: that the training will run under; 0.3.8 at least.
        world_size: data-parallel processes; 0 where that is open. Scheme 0.2 then takes WORLD_SIZE of the environment.
        return_microbatch: also without ``world_size``, by WORLD_SIZE.

    Returns:
        Samples of a step and data-parallel sizes; with ``world_size`` or ``return_microbatch`` also the micro-batch.

    Raises:
        ValueError: ``ds_config`` is no dict.
        ElasticityConfigError: the section is missing, off or wrong.
        ElasticityIncompatibleWorldSize: the processes do not make the batch.
        ElasticityError: of the version.
    """
    if not isinstance(ds_config, dict):
        raise ValueError(f"ds_config is a {type(ds_config).__name__} and has to be a dict")
    if "elasticity" not in ds_config:
        raise ElasticityConfigError('the configuration has no section "elasticity"')
    if not elasticity_enabled(ds_config):
        raise ElasticityConfigError('elasticity is off: add "enabled": true to its section')
    section = ElasticityConfig(ds_config["elasticity"])
    version = scheme_of(section)
    if _numbers(target_deepspeed_version) < _OLDEST:
        raise ElasticityError(
            f"DeepSpeed {target_deepspeed_version} is older than 0.3.8, the first that knows elasticity"
        )
    size = world_size
    if size <= 0 and (return_microbatch or version == 0.2):
        size = _from_environment(version)
    batch = by_processes(section) if version == 0.1 else by_nodes(section, size)
    sizes = list(batch.sizes)
    if world_size <= 0 and not return_microbatch:
        return batch.total, sizes
    if world_size <= 0 and version == 0.2:
        return batch.total, sizes, batch.micro
    if size not in sizes:
        raise ElasticityIncompatibleWorldSize(
            f"{size} data-parallel processes do not make the global batch of {batch.total}; these do: {listed(sizes)}"
        )
    return batch.total, sizes, largest_micro(section.micro_batches, batch.total, size)


def scheme_of(section: ElasticityConfig) -> float:
    version = float(section.version)
    if section.model_parallel_size > 1 and version != 0.2:
        raise ElasticityConfigError(
            f"scheme {version} of elasticity has no model-parallel processes (model_parallel_size "
            f"{section.model_parallel_size}): version 0.2 has"
        )
    if version not in (0.1, 0.2):
        raise ElasticityConfigError(f"elasticity.version is {version}, and must be 0.1 or 0.2")
    return version


def _numbers(version: str) -> tuple[int, ...]:
    """Leading numbers of a version: ``0.19.8+cu`` is (0, 19, 8)."""
    found = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        found.append(int(digits))
    return tuple(found)


def _from_environment(version: float) -> int:
    text = os.environ.get("WORLD_SIZE", "")
    if not text.isdecimal() or int(text) < 1:
        raise ElasticityConfigError(
            f"scheme {version} needs the number of processes here: give world_size, or set WORLD_SIZE (it is {text!r})"
        )
    return int(text)
