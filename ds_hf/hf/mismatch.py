"""Settings given twice, in the JSON file and as a training argument, with different values: all of them at once.

transformers compares the same pairs, but only when training starts, after the model has been loaded. That is left so
where the settings are a dict of the program's own.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ds_hf.config import Config
from ds_hf.errors import Fault

__all__ = ["find_mismatches"]


@dataclass(frozen=True)
class Pair:
    """One setting under both names; ``argument`` is what a user would change on the command line."""

    pointer: str
    argument: str
    value: Callable[[Any], Any]


def _train_batch_size(arguments: Any) -> int:
    per_step: int = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    return per_step * int(os.environ.get("WORLD_SIZE") or 1)


def _warmup_steps(arguments: Any) -> int | None:
    """The number of warm-up steps, where it does not depend on the length of the run."""
    steps = arguments.warmup_steps
    if (steps and steps < 1) or getattr(arguments, "warmup_ratio", None):
        return None
    return max(1, int(steps or 0))


BATCH_PAIRS = (
    Pair(
        "/train_micro_batch_size_per_gpu",
        "--per_device_train_batch_size",
        lambda a: a.per_device_train_batch_size,
    ),
    Pair(
        "/train_batch_size",
        "--per_device_train_batch_size x --gradient_accumulation_steps x world size",
        _train_batch_size,
    ),
)
PAIRS = (
    Pair("/gradient_accumulation_steps", "--gradient_accumulation_steps", lambda a: a.gradient_accumulation_steps),
    Pair("/gradient_clipping", "--max_grad_norm", lambda a: a.max_grad_norm),
    Pair("/optimizer/params/lr", "--learning_rate", lambda a: a.learning_rate),
    Pair("/optimizer/params/betas", "--adam_beta1, --adam_beta2", lambda a: [a.adam_beta1, a.adam_beta2]),
    Pair("/optimizer/params/eps", "--adam_epsilon", lambda a: a.adam_epsilon),
    Pair("/optimizer/params/weight_decay", "--weight_decay", lambda a: a.weight_decay),
    Pair("/scheduler/params/warmup_max_lr", "--learning_rate", lambda a: a.learning_rate),
    Pair("/scheduler/params/warmup_num_steps", "--warmup_steps", _warmup_steps),
    Pair("/scheduler/params/total_num_steps", "--max_steps", lambda a: a.max_steps if a.max_steps > 0 else None),
    Pair("/fp16/enabled", "--fp16", lambda a: bool(a.fp16 or a.fp16_full_eval)),
    Pair("/bf16/enabled", "--bf16", lambda a: bool(a.bf16 or a.bf16_full_eval)),
)


def find_mismatches(config: Config, arguments: Any) -> list[Fault]:
    """All settings of ``config`` that contradict ``arguments`` (a TrainingArguments), as faults."""
    return list(_compare(config, arguments))


def _compare(config: Config, arguments: Any) -> Iterator[Fault]:
    pairs = PAIRS if arguments.auto_find_batch_size else (*BATCH_PAIRS, *PAIRS)
    for pair in pairs:
        in_file = _at(config.resolved, pair.pointer)
        in_arguments = pair.value(arguments)
        if in_file is None or in_file == "auto" or in_arguments is None or _same(in_file, in_arguments):
            continue
        if pair.pointer == "/train_batch_size" and (in_file * _shared(config) == in_arguments or _is_rehearsed()):
            continue  # processes that share layers, or a sequence, read the same samples; how many is not known yet
        origin = config.provenance.get(pair.pointer)
        yield Fault(
            pair.pointer,
            f"{in_file!r} in {config.source}, but {in_arguments!r} from {pair.argument}{_by_default(pair, arguments)}",
            f'write "auto" in the file, or give the same value to {pair.argument}',
            origin.line if origin is not None else None,
        )


def _is_rehearsed() -> bool:
    from ds_hf.deepspeed_api.initialize import is_rehearsed

    return is_rehearsed()


def _shared(config: Config) -> int:
    section = config.tensor_parallel
    return max(section.autotp_size, section.tp.tp_size, 1) * config.sequence_parallel_size


def _at(tree: Mapping[str, Any], pointer: str) -> Any:
    value: Any = tree
    for key in pointer[1:].split("/"):
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(_same(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)


def _by_default(pair: Pair, arguments: Any) -> str:
    """Says so when the argument was not given: people look for it on their command line."""
    defaults = {field.name: field.default for field in dataclasses.fields(arguments)}
    names = [name.removeprefix("--") for name in pair.argument.replace(",", " ").split() if name.startswith("--")]
    if all(name in defaults and getattr(arguments, name) == defaults[name] for name in names):
        return " (its default)"
    return ""
