"""Bytes of settings by ``ds_hf.memory``, where the model of the trials is one that transformers can build from its
configuration: it is traced on the meta device, in this process, with the batch that the script fed.

The trace knows what the plan's arithmetic does not: when units are gathered, gradients reduced and activations freed,
and what offload leaves in host memory. Micro-batches between the smallest and the largest are interpolated.

A large model takes seconds for each way in which activations are kept, and a space has tens of them: what is not traced
in the time that there is for it counts as unpredictable.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from threading import Event, Thread
from typing import Any

from ds_hf.autotune.division import PIPE, SEQUENCE, MeshDivision, division_of, model_class
from ds_hf.errors import ConfigError
from ds_hf.memory import Prediction, Predictor, UnpredictableError, Workload
from ds_hf.memory.models import with_length
from ds_hf.memory.pricing import DEVICE_MEMORY

__all__ = ["Footprint", "RefusedError", "TracedAhead"]

Wanted = tuple[list[tuple[int, int]], Iterable[tuple[Mapping[str, Any], bool]]]

SIXTEEN = {"bfloat16": "bf16", "float16": "fp16"}


class RefusedError(UnpredictableError):
    """The engine takes this model with other settings, but not with these."""


class Footprint:
    """The model of one search, traced.

    Args:
        facts, found: the events "facts" and "survey" of the user's own launch.
        sizes: (micro-batch, accumulation) that will be asked for.

    Attributes:
        seconds: left for tracing what is asked for. thread: traces meanwhile, and alone.

    Raises:
        UnpredictableError: the model is not known, or what transformers builds is another one.
    """

    def __init__(self, facts: Mapping[str, Any], found: Mapping[str, Any], sizes: Sequence[tuple[int, int]]) -> None:
        self.seconds = math.inf
        self.thread: Thread | None = None
        self._stopped = Event()
        self.world = int(facts.get("processes") or facts["world_size"])
        self._own = division_of(facts)
        self._device_memory = int(facts.get("memory") or DEVICE_MEMORY)
        probed = {int(numel) for name in ("plain", "checkpointed") for numel in found.get(name) or ()}
        self.micros = sorted({micro for micro, _ in sizes} | probed | {1})
        self._dtype = SIXTEEN.get(str(facts.get("module_dtype")))
        self._predictors = {on: _predictor(facts, found, on) for on in (False, True) if not on or _can(facts)}
        self._known: dict[Any, dict[int, Prediction] | RefusedError] = {}

    def predict(self, tree: Mapping[str, Any], micro: int, accumulation: int, *, checkpointing: bool) -> Prediction:
        """One process' bytes; precision left to "auto" in ``tree`` is what the engine said.

        Raises:
            RefusedError: these settings are an error for this model.
            UnpredictableError: the model does not run without values, the micro-batch was not foreseen, or there is no
                time to trace it.
        """
        busy = self.thread is not None and self.thread.is_alive()
        start = time.monotonic()
        known = self._trace(tree, accumulation, checkpointing=checkpointing, can=not busy and self.seconds > 0)
        self.seconds -= time.monotonic() - start
        if micro not in known:
            raise UnpredictableError(f"micro-batch {micro} was not foreseen")
        return known[micro]

    def longest(
        self,
        tree: Mapping[str, Any],
        micro: int,
        accumulation: int,
        room: int,
        step: int,
        *,
        checkpointing: bool,
    ) -> int:
        """Tokens of the longest sequences that take ``room`` bytes of a process at most; 0 if ``step`` take more.

        Args:
            step: for each process that shares a sequence.

        Raises:
            UnpredictableError: as ``predict``.
        """
        if self.seconds <= 0:
            raise UnpredictableError("it is not traced yet")
        start, settings = time.monotonic(), self._settings(tree, accumulation > 1)
        try:
            return self._predictors[checkpointing].longest_sequence(
                settings, world_size=self.world, micro_batch=micro, device_memory=room, exact=False, multiple=step
            )
        finally:
            self.seconds -= time.monotonic() - start

    def trace_all(self, settings: Iterable[tuple[Mapping[str, Any], bool]]) -> None:
        """Of trees with checkpointing or without, beside other work; those without an answer are passed over."""

        def trace() -> None:
            for (tree, checkpointing), accumulation in itertools.product(settings, (1, 2)):  # the second takes no time
                if self._stopped.is_set():
                    return
                with contextlib.suppress(UnpredictableError):  # said again where it is asked for
                    self._trace(tree, accumulation, checkpointing=checkpointing)

        self.thread = Thread(target=trace)  # a daemon is cut off inside torch as Python ends, which aborts the process
        self.thread.start()

    def close(self) -> None:
        """End what traces, after the setting that it is at."""
        self._stopped.set()
        if self.thread is not None:
            self.thread.join()

    def _trace(
        self, tree: Mapping[str, Any], accumulation: int, *, checkpointing: bool, can: bool = True
    ) -> dict[int, Prediction]:
        """By micro-batch.

        Args:
            can: trace it, if it is not known.
        """
        several = accumulation > 1  # all that memory knows of it
        key = (json.dumps(tree, sort_keys=True), several, checkpointing)
        if key not in self._known:
            if not can:
                raise UnpredictableError("it is not traced yet")
            settings = self._settings(tree, several)
            predictor = self._predictors[checkpointing]
            try:
                self._known[key] = predictor.predict_each(
                    settings, self.micros, world_size=self.world, device_memory=self._device_memory
                )
            except ConfigError as error:
                self._known[key] = RefusedError("; ".join(fault.message for fault in error.faults))
        known = self._known[key]
        if isinstance(known, RefusedError):
            raise known
        return known

    def _settings(self, tree: Mapping[str, Any], several: bool) -> dict[str, Any]:
        """What the predictor takes, without a micro-batch; ``several`` of them a step."""
        tree = {name: value for name, value in tree.items() if name != "$schema"}
        settings = {**self._with_precision(tree), "gradient_accumulation_steps": 1 + several}
        settings["train_batch_size"] = settings["train_micro_batch_size_per_gpu"] = "auto"
        _divide_as_own(settings, self._own)
        return settings

    def _with_precision(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """With the 16-bit section on that "auto" turned out to be."""
        section = tree.get(self._dtype or "", {})
        if section.get("enabled") != "auto":
            return dict(tree)
        return {**tree, str(self._dtype): {**section, "enabled": True}}


class TracedAhead:
    """Traces the model for every setting from the first launch on, the user's own first.

    Only where launches compute on GPUs: elsewhere it would take processors from what is measured.

    Args:
        wanted: of the events "facts" and "survey", by name: (micro-batch, accumulation) and (tree, checkpointing) that
            will be asked for, the user's own first.
    """

    def __init__(self, wanted: Callable[[dict[str, Any]], Wanted]) -> None:
        self._wanted = wanted
        self._facts: dict[str, Any] = {}
        self._found: Future[Footprint] | None = None
        self._thread: Thread | None = None
        self._footprint: Footprint | None = None

    def on_event(self, event: dict[str, Any]) -> None:
        """Of the first launch."""
        if event["event"] == "facts":
            self._facts = event
        elif event["event"] == "survey" and self._facts.get("cuda"):
            self._found = Future()
            self._thread = Thread(target=self._trace, args=(self._found, self._facts, event))
            self._thread.start()

    def _trace(self, found: Future[Footprint], facts: dict[str, Any], survey: dict[str, Any]) -> None:
        try:
            sizes, settings = self._wanted({"facts": facts, "survey": survey})
            footprint, (own, *others) = Footprint(facts, survey, sizes), list(settings)
            self._footprint = footprint
            footprint.predict(own[0], *sizes[0], checkpointing=own[1])
            footprint.trace_all(others)
            found.set_result(footprint)
        except BaseException as error:
            found.set_exception(error)

    def take(self) -> Footprint | None:
        """The footprint, once; ``None`` if no launch said what is needed.

        Raises:
            UnpredictableError: as ``Footprint``.
        """
        found, self._found = self._found, None
        return None if found is None else found.result()

    def close(self) -> None:
        """End what traces."""
        if self._thread is not None:
            self._thread.join()
        if self._footprint is not None:
            self._footprint.close()


def _can(facts: Mapping[str, Any]) -> bool:
    return bool(facts["can_checkpoint"])


def _divide_as_own(tree: dict[str, Any], own: MeshDivision) -> None:
    """Sizes that the script gives and the file does not."""
    tree.setdefault(SEQUENCE, own.sequence)
    if own.pipe > 1:
        section, _, key = PIPE.partition(".")
        tree[section] = {key: own.pipe, **(tree.get(section) or {})}
    if own.tensor > 1:
        tree["tensor_parallel"] = {"autotp_size": own.tensor, **(tree.get("tensor_parallel") or {})}


def _predictor(facts: Mapping[str, Any], found: Mapping[str, Any], checkpointing: bool) -> Predictor:
    import torch

    kind, config = model_class(facts)
    inputs, own = found.get("inputs"), division_of(facts)
    if not inputs:
        raise UnpredictableError("the model's batch is not known by name")
    with torch.device("meta"):
        tensors = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in inputs.items()}
    workload = Workload(
        gradient_checkpointing=checkpointing if _can(facts) else None,
        attention=facts["model"]["attention"],
        optimizer=facts["optimizer"] or "AdamW",
        inputs=tensors,
    )
    length = tensors["input_ids"].shape[1] if "input_ids" in tensors and tensors["input_ids"].dim() == 2 else 0
    if length:  # of a whole sequence, of which the batch has this process's part
        whole = with_length(tensors, length, length * own.sequence)
        workload = dataclasses.replace(workload, seq_len=length * own.sequence, inputs=whole)
    predictor = Predictor(config, workload)
    predictor.streams = bool(facts["cuda"])
    total = sum(param.numel() for param in predictor.model.parameters())
    expected = total if "pipe" in facts else facts.get("whole_total", facts["total"])  # a stage has a part
    if total != expected or not all(param.requires_grad for param in predictor.model.parameters()):
        raise UnpredictableError(f"the script's {kind.__name__} is not as its configuration says: {total} parameters")
    if facts["trainable"] != facts["total"]:
        raise UnpredictableError("parts of the model are frozen")
    return predictor
