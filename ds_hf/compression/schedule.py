"""When methods act: a function of the step alone, but for the masks and ranges that layers keep.

An engine is listened to: after each of its steps, and before the first call of its model and the first one after a
checkpoint was loaded, layers are brought to its step. So a mask is chosen by the weights that training, or a
checkpoint, has given them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ds_hf.compression.compressed import Compressed
from ds_hf.compression.scopes import PRUNINGS, Group
from ds_hf.config.types.compression import (
    CompressionTrainingSection,
    QuantizedWeightsSection,
    SparsePruningSection,
)
from ds_hf.engine.comm import collectives
from ds_hf.engine.engine import CoreEngine
from ds_hf.engine.events import Observer
from ds_hf.engine.zero.gather import GatheredParameters
from ds_hf.engine.zero.hooks import Hook
from ds_hf.errors import ConfigError
from ds_hf.log import log_once, logger, warn_once

__all__ = ["CompressionSchedule", "attach", "bits_at", "ratio_at", "schedule_of"]

_KEPT = "_ds_hf_compression"  # of the model that was given to ``init_compression``


def bits_at(step: int, start: int, target: int, period: int) -> tuple[int, int]:
    """(bits, first step with them), ``step`` counted from the first quantized one: a bit less after ``period`` steps,
    after twice as many, four times as many, as in DeepSpeed's mixture of quantization."""
    bits, since, change = start, 0, period
    if period <= 0:
        return target, 0
    while bits > target and step >= change:
        bits, since, change = bits - 1, change, change * 2
    return bits, since


def ratio_at(step: int, section: SparsePruningSection, ratio: float) -> float:
    """The share of weights kept in ``step``, which is not before the schedule begins: ``ratio``, or on its way from
    ``schedule_offset`` to ``schedule_offset_end`` by the third power (arXiv:1710.01878), each
    ``schedule_offset_stride`` steps."""
    shared = section.shared_parameters
    begin, end, stride = shared.schedule_offset, shared.schedule_offset_end, shared.schedule_offset_stride
    if end is None or end <= begin or step >= end:
        return ratio
    at = begin + (step - begin) // stride * stride
    return 1 - (1 - ratio) * (1 - (1 - (at - begin) / (end - begin)) ** 3)


class _Bits(NamedTuple):
    """How weights are quantized in a step: bits, how much of them is still as it was, the step where rounding is by
    chance (else 0), whether changes are told."""

    bits: int
    left: float
    step: int
    told: bool


def _acts_at(group: Group, step: int) -> _Bits | float | None:
    """What a group's layers do in ``step``: weights of so many bits, a share that is kept (1 of what has none), or
    nothing yet."""
    section, since = group.section, step - group.section.shared_parameters.schedule_offset
    if since < 0:
        return None
    if isinstance(section, QuantizedWeightsSection):
        shared, params = section.shared_parameters, group.params
        target = params["target_bits"]
        bits, first = bits_at(since, params.get("start_bits") or target, target, params.get("quantization_period", 1))
        mixing = shared.fp16_mixed_quantize
        left = max(0.0, 1 - mixing.quantize_change_ratio * (since - first)) if mixing.enabled else 0.0
        return _Bits(bits, left, step if shared.rounding == "stochastic" else 0, shared.quantize_verbose)
    if isinstance(section, SparsePruningSection):
        return ratio_at(step, section, group.ratio)
    return group.ratio if group.method in PRUNINGS else 1.0


class CompressionSchedule:
    """Which methods act in which step, of one model.

    Attributes:
        model: the module that was given to ``init_compression``.
        section: the file's.
        groups: of all methods, with their layers.
        training_steps: the step that the layers are in.
        chosen: of each mask, "layer what", the share that it keeps.
        engine: the last one that trained the model; of no copy.
    """

    def __init__(self, model: nn.Module, section: CompressionTrainingSection, groups: list[Group]) -> None:
        self.model, self.section, self.groups = model, section, groups
        self.engine: weakref.ref[CoreEngine] | None = None
        self.training_steps = 0
        self.chosen: dict[str, float] = {}
        self._left: dict[int, _Bits | float | None] = {}  # by a group's place, what its layers were brought to

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "engine": None}

    def layers(self, group: Group) -> Iterator[tuple[str, Compressed]]:
        """Name and layer of each in ``group``."""
        for name in group.layers:
            layer = self.model.get_submodule(name)
            assert isinstance(layer, Compressed)
            yield name, layer

    def step(self, step_zero_check: bool = False) -> None:
        """One step more (DeepSpeed's name, for loops without an engine).

        Args:
            step_zero_check: bring layers to the present step, and count none.
        """
        if not step_zero_check:
            self.training_steps += 1
            self.update_ranges([static.seen for static in self.ranged()])
        self.go_to(self.training_steps)

    def go_to(self, step: int, *, again: bool = False) -> None:
        """Bring all layers to ``step``. Collective where parameters are sharded and masks are to be chosen.

        Args:
            again: layers may be other than this has left them: weights were loaded.
        """
        self.training_steps = step
        for index, group in enumerate(self.groups):
            acts = _acts_at(group, step)
            if self._left.get(index) == acts and not again:
                continue
            if isinstance(acts, _Bits):
                self._set_bits(group, acts)
            elif isinstance(acts, float) and (what := PRUNINGS.get(group.method)) is not None:
                self._choose(group, what, acts, again)
            self._switch(group, acts is not None)
            self._left[index] = acts

    def _switch(self, group: Group, acts: bool) -> None:
        """Scores train while their masks act: before that they have no gradient, and weight decay would change them."""
        for _, layer in self.layers(group):
            setattr(layer, f"{group.method}_enabled", acts)
            scores = getattr(layer, f"{PRUNINGS.get(group.method)}_mask_scores", None)
            if scores is not None and scores.requires_grad != acts:
                scores.requires_grad_(acts)

    def _set_bits(self, group: Group, now: _Bits) -> None:
        for name, layer in self.layers(group):
            if now.told and layer.weight_quantization_enabled and layer.weight_bits != now.bits:
                log_once(f"{name} has weights of {now.bits} bits from step {self.training_steps + 1} on")
            layer.weight_bits, layer.step = now.bits, now.step
            if now.left == 0 and layer.mixed is None:
                continue
            if layer.mixed is None:
                layer.mixed = torch.tensor(now.left, device=layer.weight.device)
            else:
                layer.mixed.fill_(now.left)

    def _choose(self, group: Group, what: str, ratio: float, again: bool) -> None:
        for name, layer in self.layers(group):
            key = f"{name} {what}"
            if layer.has_scores(what) or (self.chosen.get(key) == ratio and not again):
                continue
            if layer.keeps_more(what, ratio):  # a mask that was loaded with the weights may be this share's already
                with torch.no_grad(), GatheredParameters([layer.weight]):
                    layer.choose_mask(what, ratio)
            self.chosen[key] = ratio

    # -- ranges ---------------------------------------------------------------------------------------------------

    def ranged(self) -> list[Any]:
        """What keeps the ranges of inputs that are quantized now by a static one."""
        return [
            layer.activation_quantizer
            for group in self.groups
            if group.method == "activation_quantization"
            for _, layer in self.layers(group)
            if layer.activation_quantization_enabled and layer.has_static_range
        ]

    def update_ranges(self, seen: list[Tensor]) -> None:
        """Move the ranges of ``ranged()`` towards what was ``seen`` since the last time, ``[2]`` each."""
        with torch.no_grad():
            for static, new in zip(self.ranged(), seen, strict=True):
                static.update(new)

    # -- the end --------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """As after the last step: all methods act, with their last bits and ratios."""
        late = [group.method for group in self.groups if not self._is_reached(group)]
        if late:
            logger.warning(
                "%s had not begun, or not reached its end, after %d steps: applied now, without training",
                ", ".join(dict.fromkeys(late)),
                self.training_steps,
            )
        self.go_to(max(self.training_steps, 1 << 60), again=True)

    def _is_reached(self, group: Group) -> bool:
        shared = group.section.shared_parameters
        end = getattr(shared, "schedule_offset_end", None) or shared.schedule_offset
        if isinstance(group.section, QuantizedWeightsSection):
            target = group.params["target_bits"]
            start, period = group.params.get("start_bits") or target, group.params.get("quantization_period", 1)
            return self.training_steps >= end and bits_at(self.training_steps - end, start, target, period)[0] == target
        return self.training_steps >= end and not self._is_behind(group)

    def _is_behind(self, group: Group) -> bool:
        """Whether masks are those of an earlier step, as where weights of one were loaded by themselves."""
        what = PRUNINGS.get(group.method)
        return what is not None and any(
            not layer.has_scores(what) and layer.keeps_more(what, group.ratio) for _, layer in self.layers(group)
        )

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints; masks and ranges are the layers' buffers."""
        return {"training_steps": self.training_steps, "chosen": dict(self.chosen)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; ``go_to`` follows."""
        self.training_steps, self.chosen = int(state["training_steps"]), dict(state["chosen"])


# -- of models and engines ---------------------------------------------------------------------------------------------


def keep(model: nn.Module, schedule: CompressionSchedule) -> None:
    """``model`` was initialised for compression."""
    vars(model)[_KEPT] = schedule


def forget(model: nn.Module) -> None:
    """It no longer is."""
    vars(model).pop(_KEPT, None)


def schedule_of(model: nn.Module) -> CompressionSchedule | None:
    """The schedule of ``model``, or of what it wraps; ``None`` where ``init_compression`` was not called."""
    found: CompressionSchedule | None = next((vars(m)[_KEPT] for m in model.modules() if _KEPT in vars(m)), None)
    return found


class compression_scheduler(CompressionSchedule):  # noqa: N801
    """DeepSpeed's name: the schedule of a model that ``init_compression`` was given, for loops without an engine.

    Args:
        model: the model.
        compression_config: the section ``compression_training``, or a file that has it.
    """

    def __init__(self, model: nn.Module, compression_config: Any) -> None:
        section, found = read_section(compression_config), schedule_of(model)
        if found is None or found.section != section:
            raise ConfigError(
                "compression_scheduler() of a model that init_compression() was not given with this section"
            )
        super().__init__(found.model, section, found.groups)
        self.engine = found.engine
        self.compression_config = compression_config
        keep(found.model, self)
        self.go_to(0)


def read_section(source: Any) -> CompressionTrainingSection:
    """``compression_training`` of whatever a configuration may be given as, or the section alone."""
    from ds_hf.config import load_config

    if isinstance(source, CompressionTrainingSection):
        return source
    known = CompressionTrainingSection.__dataclass_fields__
    if isinstance(source, dict) and source and set(source) <= set(known):
        source = {"compression_training": source}
    return load_config(source, check_batch=False, allow_auto=True).compression_training


class _Listener(Observer):
    """Brings the layers to the engine's step."""

    def __init__(self, engine: CoreEngine, schedule: CompressionSchedule) -> None:
        self.engine, self.schedule = engine, schedule
        self.due = True
        self.handle = engine.module.register_forward_pre_hook(Hook(self), prepend=True)
        self._recompute(engine.plan.shards_parameters)
        self.uncalled: dict[str, RemovableHandle] = {}
        if not (engine.settings.ds_hf.compile or engine.settings.ds_hf.capture):
            self._watch()

    def _recompute(self, on: bool) -> None:
        for group in self.schedule.groups:
            for _, layer in self.schedule.layers(group):
                layer.recomputes = on

    def _watch(self) -> None:
        """See in the first step which layers are called."""
        for group in self.schedule.groups:
            for name, layer in self.schedule.layers(group):
                if name not in self.uncalled:
                    self.uncalled[name] = layer.register_forward_pre_hook(Hook(partial(self._called, name)))

    def _called(self, name: str, *args: Any) -> None:
        if name in self.uncalled:
            self.uncalled.pop(name).remove()

    def _tell_uncalled(self) -> None:
        if self.uncalled:
            warn_once(
                f"compression_training: {', '.join(list(self.uncalled)[:3])} ({len(self.uncalled)} layers) were not "
                "called in the first step. If the model reads their weights by itself, it computes with ones that are "
                "not compressed: leave them out of modules. Experts that got no token are no fault"
            )
        for handle in self.uncalled.values():
            handle.remove()
        self.uncalled.clear()

    def __call__(self, *args: Any) -> None:
        if self.due:
            self.due = False
            self.schedule.go_to(self.engine.global_steps, again=True)

    def after_step(self, engine: Any) -> None:
        """Ranges of all processes' inputs, and the next step's methods."""
        self._tell_uncalled()
        ranged = self.schedule.ranged()
        if ranged:
            seen = torch.stack([static.seen for static in ranged])
            collectives.all_reduce_max(seen, self.engine.mesh.world, "ranges of static activations")
            self.schedule.update_ranges(list(seen.unbind()))
        self.due = False
        self.schedule.go_to(self.engine.global_steps)

    def state_dict(self) -> dict[str, Any]:
        return self.schedule.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.schedule.load_state_dict(state)
        self.due = True

    def close(self) -> None:
        self.handle.remove()
        if schedule_of(self.schedule.model) is self.schedule:
            self._recompute(False)
        for handle in self.uncalled.values():
            handle.remove()


def attach(engine: CoreEngine, schedule: CompressionSchedule) -> None:
    """Let ``schedule`` follow the steps of ``engine``."""
    listener, schedule.engine = _Listener(engine, schedule), weakref.ref(engine)
    engine.kept["compression"] = listener
    engine.events.add(listener)
    engine.events.step_hooks.insert(0, listener.after_step)
    counts: dict[str, int] = {}
    for group in schedule.groups:
        counts[group.method] = counts.get(group.method, 0) + len(group.layers)
    told = ", ".join(f"{method} of {count} layers" for method, count in counts.items())
    if told:
        log_once(
            f"compression_training: {told}. What is saved is not compressed before redundancy_clean(engine) in the end"
        )
