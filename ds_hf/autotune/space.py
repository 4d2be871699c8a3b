"""The search space: which keys are free, which values they may take, and which batches keep the global batch.

The rule for free keys, as a user sees it: a key that the file does not have, or has as "auto", is free; a value that
the file (or the script's command line) gives is kept, unless ``--tune KEY`` names it; ``--fix KEY`` keeps any key. The
division of the global batch into micro-batch and accumulation is free, their product with the world size is not.
Keys that change what is computed (dtype of communication) are free only when named. Keys that ds_hf reads and does not
act upon (``x-status`` of the schema) are no axes.
"""

from __future__ import annotations

import copy
import difflib
import functools
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ds_hf.autotune.command import Command
from ds_hf.autotune.division import EXPERTS, HPZ, MICS, PIPE, SEQUENCE, TENSOR, TOKENS, AxisSizes, MeshDivision
from ds_hf.autotune.options import Metric, Options
from ds_hf.config.load import examine
from ds_hf.config.mesh import mesh_shape, refuse_beside_pipelines
from ds_hf.config.schema import load_schema
from ds_hf.config.types import Config
from ds_hf.errors import ConfigError

__all__ = [
    "FreeKey",
    "Setting",
    "Space",
    "can_follow",
    "check_names",
    "config_of",
    "divides_as_given",
    "examined",
    "freed_by",
    "key_of",
    "label_of",
    "points",
    "told_up_front",
]

Setting = dict[str, Any]  # axis name -> value

MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"
FACTORS = frozenset({MICRO, STEPS})  # of a process's share
STAGE = "zero_optimization.stage"
OFFLOAD_OPTIMIZER = "zero_optimization.offload_optimizer.device"
OFFLOAD_PARAM = "zero_optimization.offload_param.device"
RATIO = "zero_optimization.offload_optimizer.ratio"
COMPILE = "ds_hf.compile"
CAPTURE = "ds_hf.capture"
FP8 = "ds_hf.fp8"
CHECKPOINTING = "gradient_checkpointing"
ACTIVATIONS = "activation_checkpointing.cpu_checkpointing"
CHUNKED_LOSS = "ds_hf.chunked_loss"
COMMUNICATION = "communication_data_type"
BUDGET, TILES = "ds_hf.activation_memory_budget", "ds_hf.tiled_mlp"
QUANTIZED_WEIGHTS = "zero_optimization.zero_quantized_weights"
QUANTIZED_GRADIENTS = "zero_optimization.zero_quantized_gradients"
WORKERS = "dataloader_num_workers"  # no axis: batches that are replayed say nothing of it (``workers``)


@dataclass(frozen=True)
class FreeKey:
    """One free key.

    Attributes:
        name: dotted key of the file, or of the script's arguments (``gradient_checkpointing``).
        values: what it may be; the first is the default.
        named_only: changes results, or seldom pays: free only when the user names it.
        device_only: pays only where device and host are not the same memory.
    """

    name: str
    values: tuple[Any, ...]
    named_only: bool = False
    device_only: bool = False


AXES = (
    FreeKey(STAGE, (0, 1, 2, 3)),
    FreeKey(OFFLOAD_OPTIMIZER, ("none", "cpu"), device_only=True),
    FreeKey(OFFLOAD_PARAM, ("none", "cpu"), device_only=True),
    FreeKey(RATIO, (1.0, 0.75, 0.5, 0.25), device_only=True),
    FreeKey("zero_optimization.stage3_prefetch_bucket_size", (50_000_000, 0), named_only=True),
    FreeKey("zero_optimization.stage3_max_live_parameters", (1_000_000_000, 100_000_000), named_only=True),
    FreeKey(COMPILE, (False, "blocks"), device_only=True),
    FreeKey(CAPTURE, (False, "blocks"), named_only=True, device_only=True),
    FreeKey(FP8, (False, True), named_only=True, device_only=True),  # changes what is computed
    FreeKey(CHECKPOINTING, (False, True)),
    FreeKey(ACTIVATIONS, (False, True), device_only=True),
    FreeKey(CHUNKED_LOSS, (False, True), device_only=True),
    FreeKey(COMMUNICATION, (None, "bf16", "fp32"), named_only=True),
    FreeKey(TENSOR, (1,), device_only=True),  # other values: ``division.Sizes``
    FreeKey(TOKENS, (False, True), device_only=True),
    FreeKey(SEQUENCE, (1,), named_only=True, device_only=True),
    FreeKey(EXPERTS, (0,), device_only=True),
    FreeKey(PIPE, (1,)),
    FreeKey(BUDGET, (None, 0.8, 0.5), named_only=True, device_only=True),
    FreeKey(TILES, (False, "auto"), named_only=True, device_only=True),
    FreeKey(MICS, (-1,), named_only=True),
    FreeKey(HPZ, (1,), named_only=True),
    FreeKey(QUANTIZED_WEIGHTS, (False, True), named_only=True),  # change what is computed
    FreeKey(QUANTIZED_GRADIENTS, (False, True), named_only=True),
)
# What the engine alone reads: between settings that differ in these, processes need not start again. Not offload, by
# which accelerate chooses an optimizer, nor what decides which processes read the same samples.
_OF_THE_ENGINE = (STAGE, COMPILE, CAPTURE, FP8, CHECKPOINTING, ACTIVATIONS, CHUNKED_LOSS, BUDGET, TILES)
_OF_STAGE_3 = (OFFLOAD_PARAM, MICS, HPZ, QUANTIZED_WEIGHTS)

_SAME = {  # say the same
    ACTIVATIONS: ("ds_hf.offload_activations",),
    TENSOR: ("tensor_parallel.tp.tp_size",),
    EXPERTS: ("expert_parallel.enabled",),
}


class Space:
    """The free axes of one search, and the settings that they span.

    Args:
        cuda, can_checkpoint: of the device and the model.
        checkpoints: the script's model checkpoints its blocks as it is.
        can_chunk: it computes a loss over a vocabulary that can be computed in chunks.
        division: of the processes in the user's own launch. sizes: other divisions that they and the model allow.

    Attributes:
        axes: free keys. own: the user's setting.
        kept: keys that stay as they are, with the reason. divides: whether the global batch may be divided otherwise.
    """

    def __init__(
        self,
        config: Config,
        command: Command,
        options: Options,
        *,
        cuda: bool,
        can_checkpoint: bool,
        checkpoints: bool = False,
        can_chunk: bool = False,
        division: MeshDivision | None = None,
        sizes: AxisSizes | None = None,
    ) -> None:
        self.tree = config.resolved
        self.from_preset = config.source.startswith("preset ")  # whose values are a start, and no choice of the user's
        self.division, self.sizes = division or MeshDivision(), sizes or AxisSizes()
        self.command = command
        self.checkpoints, self.can_chunk = checkpoints, can_chunk
        self.kept: dict[str, str] = {}
        self._settings: list[Setting] | None = None
        axes = [replace(axis, values=self.sizes.values.get(axis.name, axis.values)) for axis in AXES]
        mute = {name for name in (EXPERTS, PIPE) if name not in self.sizes.values and name not in options.tune}
        if self.division.tensor == 1 and len(self.sizes.values.get(TENSOR, ())) < 2 and TOKENS not in options.tune:
            mute.add(TOKENS)
        axes = [axis for axis in axes if axis.name not in mute]  # of models without
        self.named, self.divides = options.tune, not divides_as_given(options)
        self.axes = [axis for axis in axes if self._is_free(axis, options, cuda=cuda, can_checkpoint=can_checkpoint)]
        self.own: Setting = {axis.name: self._own(axis) for axis in self.axes}
        self.axes = [
            axis if self.own[axis.name] in axis.values else FreeKey(axis.name, (*axis.values, self.own[axis.name]))
            for axis in self.axes
        ]

    def _is_free(self, axis: FreeKey, options: Options, *, cuda: bool, can_checkpoint: bool) -> bool:
        named = axis.name in options.tune or ("all" in options.tune and not axis.named_only)
        reason = ""
        if axis.name == CHECKPOINTING:
            if not can_checkpoint:
                reason = "the model has no gradient checkpointing"
            elif axis.name not in self.command.mappings:
                reason = "the script has no option for it (autotuning.arg_mappings names one)"
            elif self.command.given(axis.name) is not None and not named:
                reason = "given on the command line"
        elif not _has_effect(axis.name):
            reason = "ds_hf does not act upon it"
        elif axis.name == CHUNKED_LOSS and not self.can_chunk:
            reason = "only causal language models of transformers have such a loss"
        elif axis.name == ACTIVATIONS and not (
            self.checkpoints or (can_checkpoint and CHECKPOINTING in self.command.mappings)
        ):
            reason = "the model checkpoints nothing"
        elif any(self._given(name) for name in (axis.name, *_SAME.get(axis.name, ()))) and not named:
            reason = "given in the file"
        elif axis.name == PIPE and PIPE not in self.sizes.values:
            reason = "the model is no PipelineModule"
        elif axis.name == PIPE and PIPE not in self.command.mappings and not named:
            reason = "free only when named by --tune, of a script that takes its stages from the file"
        elif axis.name in self.sizes.why_not:
            reason = self.sizes.why_not[axis.name]
        elif axis.name == TENSOR and not self.command.is_trainer and not named:
            reason = "free only when named by --tune: the script itself gives processes that share layers equal samples"
        if not reason and axis.device_only and not cuda and axis.name not in options.tune:
            reason = "has no effect without an accelerator"
        if not reason and axis.name in options.fix:
            reason = "--fix"
        if not reason and not named:
            if axis.named_only:
                reason = "free only when named by --tune"
            elif options.fast and axis.name != STAGE:
                reason = "autotuning.fast"
        if reason:
            self.kept[axis.name] = reason
        return not reason

    def _given(self, name: str) -> bool:
        """Whether the file gives a value to the key."""
        value = _get(self.tree, name)
        return value is not None and value != "auto" and not self.from_preset

    def _own(self, axis: FreeKey) -> Any:
        """The user's value of the axis."""
        if axis.name == CHECKPOINTING:
            return bool(self.command.given_flag(CHECKPOINTING))
        value = _get(self.tree, axis.name)
        if axis.name == PIPE:
            return self.division.pipe  # the script says it
        if axis.name == TENSOR:
            value = value or None  # 0: off
        if axis.name == EXPERTS and _get(self.tree, "expert_parallel.enabled"):
            value = value or 1
        return axis.values[0] if value is None or value == "auto" else value

    def settings(self) -> Iterator[Setting]:
        """Every legal setting once, the user's own first."""
        if self._settings is None:
            self._settings = list(self._legal())
        yield from self._settings

    def _legal(self) -> Iterator[Setting]:
        seen: set[str] = set()
        spanned = (
            dict(zip(self.own, values, strict=True))
            for values in itertools.product(*(axis.values for axis in self.axes))
        )
        for setting in itertools.chain([self.own], spanned):
            plain = self.plain(setting)
            key = key_of(plain)
            if key not in seen and self.is_legal(plain):
                seen.add(key)
                yield plain

    def plain(self, setting: Setting) -> Setting:
        """``setting`` with keys that nothing reads at their defaults: two that do the same are one."""
        result = dict(setting)
        stage = result.get(STAGE, _get(self.tree, STAGE) or 0)
        offload = result.get(OFFLOAD_OPTIMIZER, _get(self.tree, OFFLOAD_OPTIMIZER))
        for axis in self.axes:
            acts = {
                RATIO: offload == "cpu",
                ACTIVATIONS: result.get(CHECKPOINTING, self.checkpoints),
                BUDGET: result.get(COMPILE, _get(self.tree, COMPILE))
                and not result.get(CHECKPOINTING, self.checkpoints),
                QUANTIZED_GRADIENTS: stage >= 2,
                TOKENS: result.get(TENSOR, self.division.tensor) > 1,
            }.get(axis.name, stage == 3 or not (axis.name in _OF_STAGE_3 or "stage3_" in axis.name))
            if not acts:
                result[axis.name] = axis.values[0]
        return result

    def is_legal(self, setting: Setting) -> bool:
        """Whether ds_hf takes the configuration."""
        try:
            config = examined(self.tree, setting)
            if {TENSOR, SEQUENCE, EXPERTS, MICS, HPZ, PIPE} & set(setting):
                division = self.division.of(setting)
                if division.tensor > 1 and setting.get(EXPERTS, 0) > 1:
                    return False
                mesh_shape(config, self.division.data * self.division.shared, division.claims)
                refuse_beside_pipelines(config, division.claims)
                together = division.sequence * division.tensor  # stages may be on several hosts
                return division == self.division or self.sizes.on_host % together == 0
        except ConfigError:
            return False
        return True


def told_up_front(space: Space) -> list[str]:
    """What may change, and what the user's own words keep and how that is freed."""
    free = [axis.name for axis in space.axes if len(axis.values) > 1]
    named = [f"{name} (where the model lets it)" for name in space.named if name not in (*free, WORKERS, MICRO, "all")]
    division = ["the division of the global batch"] if space.divides else []
    said = [f"may change: {', '.join([*free, *named, *division]) or 'nothing'}"]
    kept = [name for name, why in space.kept.items() if why.startswith("given ")]
    if kept:
        said.append(f"your file keeps: {', '.join(kept)} (--tune NAME frees one of them, --tune all each)")
    if space.command.loads_as_it_is:
        said.append(
            "the script's own loader makes its micro-batches, so they stay: the option that sets them, in "
            '"autotuning": {"arg_mappings": {"train_micro_batch_size_per_gpu": "--NAME"}} of the file, frees them'
        )
    elif space.divides and "train_micro_batch_size_per_gpu" not in space.command.mappings:
        said.append(
            "the script's own loader has to take its micro-batches from the file (training_data of initialize(), or "
            "engine.train_micro_batch_size_per_gpu()); where it does not, --fix train_micro_batch_size_per_gpu"
        )
    if space.from_preset:
        said.append("the values of a preset are where the search starts, and may change (--fix NAME keeps one)")
    return said


def freed_by(name: str, reason: str) -> str:
    """The option that frees a kept key; empty where none does."""
    if reason == "--fix":
        return f"leave out --fix {name}"
    by_name = ("given in the file", "given on the command line", "of no use without", "free only when", "autotuning.f")
    return f"--tune {name}" if reason.startswith(by_name) else ""


def check_names(options: Options) -> None:
    """Whether every key that ``--tune`` and ``--fix`` name is one.

    Raises:
        ConfigError: one is not; with the nearest that is.
    """
    known = [*(axis.name for axis in AXES), WORKERS]
    fixable = [*known, *sorted(FACTORS, reverse=True)]
    for name, names in (*((n, [*known, MICRO, "all"]) for n in options.tune), *((n, fixable) for n in options.fix)):
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            nearest = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{name!r} cannot be tuned or fixed{nearest} There are: {', '.join(names)}")


def examined(tree: Mapping[str, Any], setting: Setting) -> Config:
    """What ds_hf makes of ``tree`` with ``setting``; the space and the cost model ask the same.

    Raises:
        ConfigError: it does not take it.
    """
    return _examined(json.dumps(config_of(tree, setting)))


@functools.lru_cache(maxsize=256)  # as a rule all of a space; each has some 40 KB
def _examined(text: str) -> Config:
    return examine(json.loads(text), world=None, allow_auto=True)


def config_of(tree: Mapping[str, Any], setting: Setting) -> dict[str, Any]:
    """``tree`` with the values of ``setting``; keys at their default are left out unless the file had them."""
    result = copy.deepcopy(dict(tree))
    result.pop("autotuning", None)
    defaults = {axis.name: axis.values[0] for axis in AXES}
    for name, value in setting.items():
        if name == CHECKPOINTING or (
            _get(result, name) is None and value == defaults.get(name) and name not in (STAGE, PIPE)
        ):
            continue
        if name == EXPERTS:
            result["expert_parallel"] = {
                **(result.get("expert_parallel") or {}), "enabled": value > 0, "autoep_size": max(value, 1)
            }  # fmt: skip
            continue
        *path, last = name.split(".")
        section = result
        for key in path:
            if not isinstance(section.get(key), dict):
                section[key] = {}
            section = section[key]
        if value is None:
            section.pop(last, None)
        else:
            section[last] = value
    return result


def divides_as_given(options: Options) -> bool:
    """Whether ``--fix`` keeps one factor of the global batch, and with it the other."""
    return not FACTORS.isdisjoint(options.fix)


def points(options: Options, data: int, own: tuple[int, int], own_data: int | None = None) -> list[tuple[int, int]]:
    """(micro-batch, accumulation steps) that keep the global batch, or stay in the interval for it, ascending.

    Args:
        data: processes that read different samples.
        own: the user's, with ``own_data`` such processes (default: as many).
    """
    share, rest = divmod(own[0] * own[1] * (own_data or data), data)
    if rest:
        return []
    high, interval = options.high_micro, options.low_batch is not None or options.high_batch is not None
    if MICRO in options.fix and not interval:
        return [] if share % own[0] else [(own[0], share // own[0])]
    if STEPS in options.fix and not interval:
        return [] if share % own[1] else [(share // own[1], own[1])]
    if options.metric is Metric.LENGTH:  # the fewer samples, the longer ones
        return points(replace(options, metric=Metric.THROUGHPUT), data, own, own_data)[:1]
    if not interval and options.metric is Metric.BATCH:
        micros = sorted({own[0], *(2**power for power in range(high.bit_length()))})  # the global batch grows with them
        return [(micro, max(1, share // micro)) for micro in micros if options.low_micro <= micro <= high]
    if not interval:
        return [
            (micro, share // micro)
            for micro in range(1, share + 1)
            if share % micro == 0 and (options.low_micro <= micro <= high or micro == own[0])
        ]
    lowest = -(-(options.low_batch or 1) // data)
    highest = (options.high_batch or share * data) // data
    micros = sorted({own[0], *(2**power for power in range(highest.bit_length()))})
    micros = [own[0]] if MICRO in options.fix else [micro for micro in micros if options.low_micro <= micro <= high]
    found = [(micro, own[1] if STEPS in options.fix else highest // micro) for micro in micros if micro <= highest]
    return [(micro, steps) for micro, steps in found if lowest <= micro * steps <= highest]


def can_follow(there: Setting, setting: Setting) -> bool:
    """Whether processes that measured ``there`` can make an engine of ``setting``: it may divide experts that are
    whole, and what is divided stays so."""
    names = (there.keys() | setting.keys()) - {*_OF_THE_ENGINE, EXPERTS}
    experts = there.get(EXPERTS, 0)
    return all(there.get(name) == setting.get(name) for name in names) and experts in (0, 1, setting.get(EXPERTS, 0))


def key_of(setting: Setting) -> str:
    """A text that is the same for equal settings."""
    return ";".join(f"{name}={setting[name]!r}" for name in sorted(setting))


def label_of(setting: Setting) -> str:
    """A setting in a few words, for tables and plots."""
    words = []
    if STAGE in setting:
        words.append(f"stage {setting[STAGE]}")
    host = [
        name
        for key, name in ((OFFLOAD_OPTIMIZER, "optimizer"), (OFFLOAD_PARAM, "parameters"))
        if setting.get(key) == "cpu"
    ]
    if host:
        words.append(f"{' and '.join(host)} on host")
    if setting.get(CHECKPOINTING):
        words.append("checkpointing")
    if setting.get(ACTIVATIONS):
        words.append("activations on host")
    if setting.get(CHUNKED_LOSS):
        words.append("loss in chunks")
    words += [f"{name} parallel {setting[key]}" for key, name in ((TENSOR, "tensor"), (SEQUENCE, "sequence"))
              if setting.get(key, 1) > 1]  # fmt: skip
    if setting.get(TOKENS):
        words.append("its tokens divided")
    if PIPE in setting:
        words.append(f"pipeline of {setting[PIPE]}")
    if experts := setting.get(EXPERTS):
        words.append(f"experts over {experts}" if experts > 1 else "experts together")
    if setting.get(COMPILE):
        words.append("compiled")
    if setting.get(CAPTURE):
        words.append("captured")
    if setting.get(FP8):
        words.append("in fp8")
    if setting.get(COMMUNICATION):
        words.append(f"communicates {setting[COMMUNICATION]}")
    named = {STAGE, OFFLOAD_OPTIMIZER, OFFLOAD_PARAM, CHECKPOINTING, ACTIVATIONS, CHUNKED_LOSS, COMPILE, CAPTURE, FP8,
             COMMUNICATION, TENSOR, TOKENS, SEQUENCE, EXPERTS, PIPE}  # fmt: skip
    defaults = {axis.name: axis.values[0] for axis in AXES}
    words += [
        f"{name.rpartition('.')[2]} {value}"
        for name, value in setting.items()
        if name not in named and value != defaults.get(name)
    ]
    return ", ".join(words) or "as in the file"


def _get(tree: Mapping[str, Any], name: str) -> Any:
    value: Any = tree
    for key in name.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value


def _has_effect(name: str) -> bool:
    """Whether the schema says that ds_hf acts upon the key."""
    node: Any = load_schema()
    for key in name.split("."):
        node = node["properties"][key]
        if node.get("x-status", "implemented") != "implemented":
            return False
    return True
