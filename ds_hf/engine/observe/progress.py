"""What an engine says of itself: two lines when it is built, and those that ``steps_per_print`` asks for.

Rank 0 speaks. The first goes to the log, as information; what the user asked for goes to standard output.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from ds_hf.log import logger, say

if TYPE_CHECKING:
    from ds_hf.engine.engine import CoreEngine
    from ds_hf.engine.observe.model_flops import Tokens

__all__ = ["attach", "precisions"]

_SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


def attach(engine: CoreEngine) -> None:
    """Announce ``engine`` and arrange what its settings ask to be printed (``dump_state``, ``steps_per_print``)."""
    if engine.mesh.world.rank != 0:
        return
    _announce(engine)
    if engine.settings.dump_state:
        say(f"configuration of the engine:\n{json.dumps(engine.settings.resolved, indent=2)}")
    every = engine.settings.steps_per_print
    if every is not None and math.isfinite(every):
        throughput = engine.settings.timers.throughput.enabled
        tokens = None
        if throughput:
            from ds_hf.engine.observe.model_flops import Tokens

            engine.events.add(tokens := Tokens(engine))
        engine.step_hooks.append(_Progress(max(int(every), 1), throughput, tokens))


def _announce(engine: CoreEngine) -> None:
    """transformers' own tests look for the words "DeepSpeed info"."""
    plan = engine.plan
    where = "" if plan.optimizer.device == "device" else f" on {plan.optimizer.device}"
    logger.info(
        "DeepSpeed info: ds_hf engine, %d processes, %d units, %s parameters; "
        "parameters %s, gradients %s, optimizer states %s%s",
        engine.mesh.world.world_size,
        len(engine.units),
        f"{sum(unit.numel for unit in engine.units):,}",
        plan.parameters.placement.value,
        plan.gradients.placement.value,
        plan.optimizer.placement.value,
        where,
    )
    logger.info("precision: %s", ", ".join(f"{row} {dtypes}" for row, dtypes in precisions(engine).items()))


def precisions(engine: CoreEngine) -> dict[str, str]:
    """In which dtype each row of the model states is kept, sent and summed; rows that there are not are left out."""
    buffers = [buffer for unit in engine.units for buffer in unit.buffers]
    reduced = engine.reducer.buffers
    optimizer = engine.optimizer
    table: dict[str, Iterable[torch.dtype]] = {
        "parameters": (buffer.dtype for buffer in buffers if not buffer.frozen),
        "frozen parameters": (buffer.dtype for buffer in buffers if buffer.frozen),
        "gradients": (gradient.buffer.dtype for gradient in reduced),
        "reduced in": (gradient.dtype for gradient in reduced),
        "accumulated in": (gradient.policy.accumulation_dtype for gradient in reduced),
        "master weights": ()
        if engine.optimizer is None
        else map(engine.optimizer.master_dtype, engine.optimizer.masters),
        "moments": () if optimizer is None else optimizer.moment_dtypes,
        "buffers": (buffer.dtype for buffer in engine.module.buffers() if buffer.is_floating_point()),
    }
    named = {row: sorted({_SHORT.get(dtype, str(dtype)) for dtype in dtypes}) for row, dtypes in table.items()}
    return {row: " and ".join(dtypes) for row, dtypes in named.items() if dtypes}


class _Progress:
    """A line every so many steps; with ``throughput`` it says how many samples and tokens a second were trained since
    the last, and which share of the matrix rate that is (MFU).

    The first step is not counted, for it compiles, allocates and records what later ones use.
    """

    def __init__(self, every: int, throughput: bool, tokens: Tokens | None = None) -> None:
        self._every, self._throughput, self._tokens = every, throughput, tokens
        self._samples, self._since = 0, 0.0

    def __call__(self, engine: CoreEngine) -> None:
        if self._since:
            self._samples += engine.step_samples
        elif self._throughput:
            engine.get_global_grad_norm()  # waits for the device
            self._since = time.perf_counter()
            if self._tokens is not None:
                self._tokens.drop()
        if engine.global_steps % self._every == 0:
            self._say(engine)

    def _say(self, engine: CoreEngine) -> None:
        norm = engine.get_global_grad_norm()  # now it is known whether the schedule stays advanced
        assert engine.optimizer is not None
        lr = ", ".join(f"{group['lr']:.3g}" for group in engine.optimizer.param_groups)
        line = (
            f"step {engine.global_steps}: lr [{lr}], grad norm {norm:.3g}, skipped {engine.skipped_steps}, "
            f"loss scale {engine.optimizer.loss_scaler.scale:g}"
        )
        if self._samples:
            now = time.perf_counter()
            line += f", {self._samples / (now - self._since):.4g} samples/s"
            if self._tokens is not None:
                line += self._tokens.said(now - self._since, self._samples)
            self._samples, self._since = 0, now
        say(line)
