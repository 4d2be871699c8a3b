"""What a search is asked for: defaults, then DeepSpeed's ``autotuning`` section, then the command line."""

from __future__ import annotations

import dataclasses
import difflib
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from ds_hf.config.types import Config, OriginKind
from ds_hf.errors import ConfigError

__all__ = ["GOALS", "Metric", "Options", "gib", "nbytes_of", "seconds_of"]

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|)$")
_NBYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?$", re.IGNORECASE)


class Metric(str, Enum):
    """What is to be best; latency and memory are smaller when better. ``BATCH``: samples that all devices hold at
    once. ``LENGTH``: tokens of a sequence."""

    THROUGHPUT = "throughput"
    LATENCY = "latency"
    FLOPS = "flops"
    MEMORY = "memory"
    BATCH = "largest-batch"
    LENGTH = "longest-sequence"

    @property
    def maximize(self) -> bool:
        return self in (Metric.THROUGHPUT, Metric.FLOPS, Metric.BATCH, Metric.LENGTH)

    @property
    def is_timed(self) -> bool:
        """Whether it is made of seconds, which differ from launch to launch."""
        return self not in (Metric.MEMORY, Metric.BATCH, Metric.LENGTH)

    @property
    def unit(self) -> str:
        units = {"throughput": "samples/s", "latency": "s/step", "flops": "FLOPS/device", "memory": "bytes"}
        return units.get(self.value, "samples at once" if self is Metric.BATCH else "tokens a sequence")


# What a person wants, by what is measured. On devices that are given, the fastest file is the cheapest.
GOALS = {**{metric.value: metric for metric in Metric}, "tokens": Metric.THROUGHPUT, "cost": Metric.THROUGHPUT}

# Names of the command line, by those here.
NAMED = {
    "goal": "metric",
    "output": "results_dir",
    "force": "overwrite",
    "device_memory": "memory_limit",
    "num_gpus": "processes",
}


@dataclass(frozen=True)
class Options:
    """Settings of one search.

    Attributes:
        results_dir: everything is written there. budget: seconds for the whole search. trials: launches at most.
        price: of an hour of one device, in any currency: what a million samples cost is told.
        tune, fix: keys made free, or kept, against the rule of ``space``.
        memory_limit: bytes that count as each device's memory.
        processes: per host; ``None``: one a GPU, or one. launcher: words put before the script instead of torchrun.
        low_batch, high_batch: interval for the global batch; ``None`` keeps the script's own.
        low_micro, high_micro: limits of the micro-batch. micros: sizes measured a launch.
        patience: launches without gain after which it ends.
        trial_timeout, stall_timeout: seconds for a launch, and without any sign of life.
        arg_mappings: configuration keys to options of the script, and ``sequence_length`` to the one that sets it.
        length_option: of the script, which sets the length of a sequence, for ``Metric.LENGTH``.
        sampler: "model_based", "random", "gridsearch" (DeepSpeed's words), or "exhaustive": all, for comparison.
        forget: drop what earlier searches of this model on this machine measured, in place of beginning with it.
        lr: then search a learning rate with the result (``ds_hf.autotune.lr``).
        confirm: run the user's file and the result once more, as the user would, for the figures in the report.
    """

    results_dir: Path = Path("autotuning_results")
    budget: float = 1800.0
    trials: int = 50
    metric: Metric = Metric.THROUGHPUT
    price: float | None = None
    tune: tuple[str, ...] = ()
    fix: tuple[str, ...] = ()
    memory_limit: int | None = None
    processes: int | None = None
    launcher: tuple[str, ...] = ()
    low_batch: int | None = None
    high_batch: int | None = None
    low_micro: int = 1
    high_micro: int = 1024
    micros: int = 3
    patience: int = 5
    trial_timeout: float = 900.0
    stall_timeout: float = 300.0
    steps: int = 20
    point_seconds: float = 20.0
    seed: int = 0
    length_option: str | None = None
    sampler: str = "model_based"
    fast: bool = False
    confirm: bool = True
    lr: bool = False
    forget: bool = False
    overwrite: bool = False
    arg_mappings: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Texts do as well, as on the command line.

        Raises:
            ConfigError: one of them says nothing.
        """
        if not isinstance(self.metric, Metric) and self.metric not in GOALS:
            raise ConfigError(f"unknown goal {self.metric!r}: {', '.join(GOALS)}")
        if self.metric == "cost" and self.price is None:
            raise ConfigError("--goal cost needs --price, of an hour of one device")
        readers: dict[str, Callable[[Any], Any]] = {
            "results_dir": Path,
            "metric": lambda goal: goal if isinstance(goal, Metric) else GOALS[goal],
            "memory_limit": lambda amount: nbytes_of(amount) if isinstance(amount, str) else amount,
            **dict.fromkeys(("tune", "fix"), lambda keys: (keys,) if isinstance(keys, str) else tuple(keys)),
            "launcher": lambda words: tuple(shlex.split(words) if isinstance(words, str) else words),
            **dict.fromkeys(
                ("budget", "trial_timeout", "stall_timeout"),
                lambda seconds: seconds_of(seconds) if isinstance(seconds, str) else seconds,
            ),
        }
        for name, read in readers.items():
            object.__setattr__(self, name, read(getattr(self, name)))

    def changed(self, **changes: Any) -> Options:
        """These with others, by the names of fields or of the command line (``NAMED``).

        Raises:
            ConfigError: there is none of a name, or a value says nothing.
        """
        values = {NAMED.get(name, name): value for name, value in changes.items()}
        known = [each.name for each in dataclasses.fields(self)]
        for name in values:
            if name not in known:
                close = difflib.get_close_matches(name, [*known, *NAMED], 1)
                hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
                raise ConfigError(f"a search has no option {name!r}: {hint}")
        return dataclasses.replace(self, **values)

    def with_section(self, config: Config) -> Options:
        """These options under what the user wrote in ``autotuning``: values there win over defaults only."""
        section = config.autotuning
        given = {
            pointer.removeprefix("/autotuning/")
            for pointer, origin in config.provenance.items()
            if pointer.startswith("/autotuning/") and origin.kind is OriginKind.USER
        }
        values: dict[str, Any] = {
            "results_dir": Path(section.results_dir),
            "metric": Metric(section.metric),
            "tuner_num_trials": section.tuner_num_trials,
            "tuner_early_stopping": section.tuner_early_stopping,
            "max_train_batch_size": section.max_train_batch_size,
            "min_train_batch_size": section.min_train_batch_size,
            "max_train_micro_batch_size_per_gpu": section.max_train_micro_batch_size_per_gpu,
            "min_train_micro_batch_size_per_gpu": section.min_train_micro_batch_size_per_gpu,
            "num_tuning_micro_batch_sizes": section.num_tuning_micro_batch_sizes,
            "tuner_type": section.tuner_type,
            "fast": section.fast,
        }
        changed = {_FIELDS[key]: value for key, value in values.items() if key in given}
        if section.arg_mappings:
            changed["arg_mappings"] = {key: str(value) for key, value in section.arg_mappings.items()}
        defaults = Options()
        return dataclasses.replace(
            self, **{name: value for name, value in changed.items() if getattr(self, name) == getattr(defaults, name)}
        )


_FIELDS = {
    "results_dir": "results_dir",
    "metric": "metric",
    "tuner_num_trials": "trials",
    "tuner_early_stopping": "patience",
    "max_train_batch_size": "high_batch",
    "min_train_batch_size": "low_batch",
    "max_train_micro_batch_size_per_gpu": "high_micro",
    "min_train_micro_batch_size_per_gpu": "low_micro",
    "num_tuning_micro_batch_sizes": "micros",
    "tuner_type": "sampler",
    "fast": "fast",
}


def seconds_of(text: str) -> float:
    """ "90s", "10m" or "1.5h" in seconds.

    Raises:
        ConfigError: it is none of these, or nothing.
    """
    match = _DURATION.match(text.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"{text!r} is not a valid duration: write 90s, 10m or 1.5h")
    if not match[2]:
        raise ConfigError(f"{text!r} has no unit: write {match[1]}s, {match[1]}m or {match[1]}h")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def nbytes_of(text: str) -> int:
    """ "2GiB", "500MB" or "80g" in bytes; k, m, g, t alone are binary.

    Raises:
        ConfigError: it is none of these, or nothing.
    """
    match = _NBYTES.match(text.strip())
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"{text!r} is not a valid amount of memory: write 2GiB or 500MB")
    decimal = text.strip().lower().endswith("b") and not match[3] and bool(match[2])
    power = "kmgt".index(match[2].lower()) + 1 if match[2] else 0
    return int(float(match[1]) * (1000 if decimal else 1024) ** power)


def gib(nbytes: float) -> str:
    """Bytes for people."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.2f} {name}" if name == "GiB" else f"{nbytes / unit:.1f} {name}"
    return f"{nbytes / 2**10:.1f} KiB"
