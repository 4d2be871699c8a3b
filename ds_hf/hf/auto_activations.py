"""``--deepspeed auto``, once the Trainer has model and data: what is done about activations.

The states' choice leaves a share of the memory for activations without knowing them. Here one step over the longest
samples is traced without values (``ds_hf.memory``), and the first way that fits is taken: activations are kept,
computed again, or computed again from inputs in host memory; each with the stage that was chosen and with those that
divide more, before anything is offloaded. Every rank computes the same from the least free memory and the longest
sample of all ranks.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ds_hf.config.presets import preset
from ds_hf.engine.comm import process_group
from ds_hf.engine.observe.probes.trial.survey import is_checkpointing
from ds_hf.hf.accelerate_state import has_accelerator
from ds_hf.hf.auto import (
    ALONE,
    CANDIDATES,
    Shared,
    apply_preset,
    free_device_memory,
    gib,
    precision,
    say,
    shared_by,
    sixteen_bits,
)
from ds_hf.memory import Predictor, UnpredictableError, Workload

__all__ = [
    "KEPT",
    "OFFLOADED",
    "RECOMPUTED",
    "ActivationChoice",
    "Lengths",
    "fit",
    "lengths_of",
    "over_ranks",
    "settle_activations",
]

KEPT, RECOMPUTED, OFFLOADED = "kept", "computed again in backward", "computed again, from inputs in host memory"
FILL = 0.95  # of the free memory: predictions are within a tenth, and mostly too high
LOOKED_AT = 256  # samples
SCAN_SECONDS = 1.0


@dataclass(frozen=True)
class ActivationChoice:
    """Attributes:
    preset, activations: what was chosen. fits: whether that fits, or only comes nearest.
    needs: bytes of the device by (preset, activations), of what was looked at.
    """

    preset: str
    activations: str
    fits: bool
    needs: dict[tuple[str, str], int]


@dataclass(frozen=True)
class Lengths:
    """Tokens of the samples that were looked at: of the shortest and the longest of all ranks, and the mean of the
    rank where it is least."""

    least: int
    mean: int
    most: int


def settle_activations(trainer: Any, lengths: Lengths | None, reason: str) -> bool:
    """Choose, write the choice into arguments, plugin and model, and say it on one rank.

    Args:
        lengths, reason: what ``lengths_of`` found.

    Returns:
        Whether the model's activations could be looked at, and are kept.
    """
    if lengths is None:
        say(f"activations are not looked at: {reason}")
        return False
    arguments, plugin = trainer.args, trainer.args.deepspeed_plugin
    micro, shared = arguments.per_device_train_batch_size, shared_by(arguments)
    longest = -(-lengths.most // shared.sequences) * shared.sequences  # collators pad to what divides
    try:
        found = fit(
            trainer.model,
            plugin.ds_hf_choice.preset,
            Workload(micro_batch=micro, seq_len=longest),
            room=_room(trainer.model),
            processes=process_group.get_world_size() if process_group.is_initialized() else 1,
            dtype=sixteen_bits(arguments),
            accumulates=arguments.gradient_accumulation_steps > 1,
            offload=has_accelerator(),
            recomputed=bool(arguments.gradient_checkpointing) or is_checkpointing(trainer.model),
            shared=shared,
        )
    except UnpredictableError as error:
        say(f"activations are not looked at: {error}")
        return False
    _apply(trainer, found)
    say(_report(found, f"{micro} x {longest} tokens"))
    return found.activations == KEPT


def fit(
    model: Any,
    smallest: str,
    workload: Workload,
    *,
    room: int,
    processes: int,
    dtype: str,
    accumulates: bool,
    offload: bool,
    recomputed: bool,
    shared: Shared = ALONE,
) -> ActivationChoice:
    """The first way of those from ``smallest`` on whose peak is at most ``FILL`` of ``room`` bytes, or the least.

    Args:
        recomputed: the user asked for gradient checkpointing.
        shared: what several of ``processes`` compute together.

    Raises:
        UnpredictableError: the model does not run without values.
    """
    needs: dict[tuple[str, str], int] = {}
    predictors: dict[bool, Predictor] = {}
    for name, activations in _ways(smallest, model, offload=offload, recomputed=recomputed):
        again = activations != KEPT
        if again not in predictors:
            checkpointing = again if getattr(model, "supports_gradient_checkpointing", False) else None
            predictors[again] = Predictor(
                model, Workload(workload.micro_batch, workload.seq_len, gradient_checkpointing=checkpointing)
            )
        config = _settings(name, activations, workload.micro_batch, dtype, accumulates, shared)
        found = predictors[again].predict(config, world_size=processes, device_memory=room)
        # without an accelerator there is nothing but tensors: no context of CUDA, no caching allocator
        needs[name, activations] = found.device_total if has_accelerator() else found.device_peak
        if needs[name, activations] <= FILL * room:
            return ActivationChoice(name, activations, True, needs)
    name, activations = min(needs, key=lambda way: needs[way])
    return ActivationChoice(name, activations, False, needs)


def _ways(smallest: str, model: Any, *, offload: bool, recomputed: bool) -> Iterator[tuple[str, str]]:
    """What to look at, cheapest first."""
    kinds = [] if recomputed else [KEPT]
    if recomputed or getattr(model, "supports_gradient_checkpointing", False):
        kinds += [RECOMPUTED, OFFLOADED] if offload else [RECOMPUTED]
    presets = CANDIDATES[CANDIDATES.index(smallest) :]
    if any(hasattr(param, "ds_id") for param in model.parameters()):  # zero.Init has divided it
        presets = tuple(name for name in presets if name.startswith("zero3"))
    on_device = [name for name in presets if "offload" not in name]
    for kind in kinds:
        yield from ((name, kind) for name in on_device)
    for kind in kinds if offload else []:
        yield from ((name, kind) for name in presets if "offload" in name)


def _settings(name: str, activations: str, micro: int, dtype: str, several: bool, shared: Shared) -> dict[str, Any]:
    return {
        **preset(name),
        **precision(dtype),
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": 1 + several,
        "train_batch_size": "auto",
        "activation_checkpointing": {"cpu_checkpointing": activations == OFFLOADED},
        "tensor_parallel": {"autotp_size": shared.layers if shared.layers > 1 else 0},
        "sequence_parallel_size": shared.sequences,
    }


def _apply(trainer: Any, found: ActivationChoice) -> None:
    arguments, plugin = trainer.args, trainer.args.deepspeed_plugin
    hf_config = plugin.hf_ds_config
    if found.preset != plugin.ds_hf_choice.preset:
        apply_preset(plugin, hf_config, found.preset)
    if found.activations == KEPT:
        return
    if not arguments.gradient_checkpointing:
        arguments.gradient_checkpointing = True
        options = {"use_reentrant": False, **(arguments.gradient_checkpointing_kwargs or {})}
        trainer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    if found.activations == OFFLOADED:
        section = hf_config.config.setdefault("activation_checkpointing", {})
        section["cpu_checkpointing"] = True


def _room(model: Any) -> int:
    """Free bytes of the device, with those that the model takes there already; the least over the ranks."""
    held = sum(param.nbytes for param in model.parameters() if param.is_cuda)
    return free_device_memory().device + over_ranks(held, process_group.ReduceOp.MIN)


def lengths_of(dataset: Any) -> tuple[Lengths | None, str]:
    """Of some hundred samples that lie evenly, over all ranks; ``None`` where one knows no length, and why."""
    found: list[int] = []
    reason = "the data set is a stream, or there is none"
    if isinstance(dataset, Sized) and hasattr(dataset, "__getitem__") and len(dataset):
        reason = "samples of the data set have no input_ids"
        end, step = time.monotonic() + SCAN_SECONDS, max(1, len(dataset) // LOOKED_AT)
        with _random_numbers_kept():
            for index in range(0, len(dataset), step):
                try:
                    tokens = _tokens(dataset[index])
                except Exception as error:  # training may never ask for it; if it does, it says so itself
                    reason = f"sample {index} of the data set cannot be read ({type(error).__name__}: {error})"
                    found = []
                    break
                found.append(tokens or 0)
                if tokens is None or time.monotonic() > end:
                    break
    most = max(found, default=0)
    if not over_ranks(most, process_group.ReduceOp.MIN):
        return None, "another process knows no length of its samples" if most else reason
    least = over_ranks(min(found), process_group.ReduceOp.MIN)
    mean = over_ranks(sum(found) // len(found), process_group.ReduceOp.MIN)
    return Lengths(least, mean, over_ranks(most, process_group.ReduceOp.MAX)), reason


def _tokens(sample: Any) -> int | None:
    """Of one sample, whose ids are flat or have further dimensions in front; ``None`` where it has no ids."""
    ids = sample.get("input_ids") if isinstance(sample, Mapping) else None
    shape = getattr(ids, "shape", None)
    if shape is not None:
        return int(shape[-1]) if len(shape) else None
    while isinstance(ids, list | tuple) and ids and isinstance(ids[0], list | tuple):
        ids = ids[0]
    return len(ids) if isinstance(ids, Sized) else None


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """Samples may draw: training draws what it would have drawn."""
    import numpy as np

    python, numbers = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(python)
    np.random.set_state(numbers)


def over_ranks(value: int, op: Any) -> int:
    """``value`` reduced over all processes, on all of them. Collective."""
    if not process_group.is_initialized():
        return value
    found = torch.tensor([value], dtype=torch.int64, device="cuda" if torch.cuda.is_available() else "cpu")
    process_group.all_reduce(found, op=op)
    return int(found)


def _report(found: ActivationChoice, batch: str) -> str:
    words = [f"activations of {batch} are {found.activations}"]
    if len({name for name, _ in found.needs}) > 1:
        words[0] += f", {found.preset}"
    looked_at = ", ".join(f"{name} {activations}: {gib(need)}" for (name, activations), need in found.needs.items())
    verdict = "the first that fits" if found.fits else "NOTHING FITS, this comes nearest; try a smaller micro-batch"
    return f"{words[0]}: {verdict} (predicted on the device: {looked_at})"
