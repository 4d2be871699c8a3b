"""``--deepspeed auto``: the smallest stage and offload whose model states fit, with the figures that say so.

The choice falls when the arguments are parsed, if the command line names a model whose config can be read offline (then
``zero.Init`` can still build it sharded); otherwise when the Trainer has its model. Every rank computes the same
choice: free memory is the least over the ranks. Only one rank prints.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from ds_hf.config import load_config
from ds_hf.config.plan import plan_states
from ds_hf.config.presets import preset
from ds_hf.engine.comm import process_group
from ds_hf.engine.zero.estimate import ModelSize, StateBytes, estimate_states, measure
from ds_hf.errors import ConfigError
from ds_hf.hf.accelerate_state import has_accelerator
from ds_hf.hf.autoload import wrap
from ds_hf.hf.source import AUTO
from ds_hf.host import available_memory, local_world_size
from ds_hf.log import logger

__all__ = [
    "ALONE",
    "Memory",
    "PresetChoice",
    "Shared",
    "adapts",
    "apply_preset",
    "choose",
    "choose_at_parse_time",
    "choose_with_model",
    "free_device_memory",
    "gib",
    "model_on_command_line",
    "precision",
    "say",
    "shared_by",
    "sixteen_bits",
    "wrap_integration",
]

# Smallest first; a stage without offload comes before any offload, which costs time at every step.
CANDIDATES = ("zero0", "zero1", "zero2", "zero3", "zero2-offload", "zero3-offload")
INFERENCE = "zero3"  # the only one that transformers evaluates with when there was no training
STATES_SHARE = 0.7  # of the free memory; the rest is for activations, logits and buffers
ADAPTERS = 50  # they are taken for this part of a model: rank 64 of all linear layers of 7 B
MODEL_FLAGS = ("model_name_or_path", "config_name", "model")


@dataclass(frozen=True)
class Memory:
    """Free bytes for one rank."""

    device: int
    host: int


@dataclass(frozen=True)
class Shared:
    """How many processes share each layer, and each sequence."""

    layers: int = 1
    sequences: int = 1


ALONE = Shared()


@dataclass(frozen=True)
class PresetChoice:
    """The preset that was chosen, and the need of each candidate that was looked at."""

    preset: str
    fits: bool
    needs: dict[str, StateBytes]


def wrap_integration(module: ModuleType) -> None:
    """Hook of ``transformers.integrations.deepspeed``: the last moment, when the Trainer has its model."""

    def decide_first(wrapped: Callable[..., Any], hf_config: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        choose_with_model(hf_config, *args, **kwargs)
        return wrapped(*args, **kwargs)

    wrap(module, "HfTrainerDeepSpeedConfig.trainer_config_finalize", decide_first)


def choose_at_parse_time(arguments: Any) -> None:
    """Choose now, if the command line tells which model it will be."""
    size = _measure_named(model_on_command_line(sys.argv[1:]))
    if size is not None and adapts(sys.argv[1:]):
        size = replace(size, trainable=size.total // ADAPTERS)
    if size is not None:
        _settle(arguments, arguments.hf_deepspeed_config, size)


def choose(
    size: ModelSize, memory: Memory, world_size: int, *, dtype: str, accumulates: bool, offload: bool
) -> PresetChoice:
    """The first candidate that fits into ``memory``, or the last one if none does."""
    needs: dict[str, StateBytes] = {}
    for name in CANDIDATES:
        if "offload" in name and not offload:
            continue
        try:
            config = load_config({**preset(name), **precision(dtype)}, allow_auto=True, check_batch=False)
        except ConfigError as error:  # what this version of ds_hf cannot do is no candidate
            logger.debug("auto: %s is left out: %s", name, error)
            continue
        needs[name] = estimate_states(
            plan_states(config), size, world_size, module_dtype="float32", accumulates=accumulates
        )
        if needs[name].device <= STATES_SHARE * memory.device and needs[name].host <= STATES_SHARE * memory.host:
            return PresetChoice(name, True, needs)
    return PresetChoice(next(reversed(needs)), False, needs)


def model_on_command_line(argv: Sequence[str]) -> str | None:
    """The model that one of the usual flags names."""
    found: dict[str, str] = {}
    for position, word in enumerate(argv):
        flag, given, value = word.partition("=")
        if not flag.startswith("--"):
            continue
        if not given and position + 1 < len(argv):
            value = argv[position + 1]
        if value and not value.startswith("-"):
            found[flag[2:].replace("-", "_")] = value
    return next((found[flag] for flag in MODEL_FLAGS if flag in found), None)


def adapts(argv: Sequence[str]) -> bool:
    """Whether TRL's flag asks for adapters, which are made when the choice has fallen."""
    flag = next((position for position, word in enumerate(argv) if word.replace("-", "_") == "__use_peft"), None)
    if flag is None:
        return any(word.lower().replace("-", "_") == "__use_peft=true" for word in argv)
    return argv[flag + 1 : flag + 2] not in (["False"], ["false"], ["0"])


def choose_with_model(hf_config: Any, arguments: Any, model: Any, num_training_steps: int) -> None:
    """Choose now, unless that was possible before."""
    plugin = arguments.deepspeed_plugin
    if arguments.deepspeed != AUTO or getattr(plugin, "ds_hf_choice", None) is not None:
        return
    if not num_training_steps:
        apply_preset(plugin, hf_config, INFERENCE)
        say(f"{INFERENCE}, the only one that transformers evaluates with where nothing is trained")
    else:
        _settle(arguments, hf_config, measure(model))


def _settle(arguments: Any, hf_config: Any, size: ModelSize) -> None:
    memory = free_device_memory()
    dtype = sixteen_bits(arguments)
    world_size = process_group.get_world_size() if process_group.is_initialized() else 1
    accumulates = arguments.gradient_accumulation_steps > 1
    offload = has_accelerator()  # elsewhere host and device are the same memory
    shared = shared_by(arguments)
    part = ModelSize(*(-(-count // shared.layers) for count in (size.total, size.trainable, size.largest_unit)))
    holders = max(world_size // shared.layers, 1)
    choice = choose(part, memory, holders, dtype=dtype, accumulates=accumulates, offload=offload)
    apply_preset(arguments.deepspeed_plugin, hf_config, choice.preset)
    arguments.deepspeed_plugin.ds_hf_choice = choice
    if not process_group.is_initialized() or process_group.get_rank() == 0:
        sys.stderr.write(_report(choice, size, memory, world_size, dtype, shared) + "\n")


def say(text: str) -> None:
    """What was chosen, on one rank."""
    if not process_group.is_initialized() or process_group.get_rank() == 0:
        sys.stderr.write(f"ds_hf: --deepspeed auto: {text}\n")


def apply_preset(plugin: Any, hf_config: Any, name: str) -> None:
    """Write the preset's ZeRO section where transformers and accelerate look for it.

    That is also the copy that an Accelerator made of the provisional one (``dschf``): ``is_deepspeed_zero3_enabled()``,
    and with it generation, counted parameters and PEFT, look there alone.
    """
    for held in (hf_config, getattr(plugin, "dschf", None)):
        if held is not None:
            held.config["zero_optimization"] = preset(name)["zero_optimization"]
            held.set_stage_and_offload()
    plugin.zero_stage = hf_config.get_value("zero_optimization.stage")
    plugin.offload_optimizer_device = hf_config.get_value("zero_optimization.offload_optimizer.device", "none")
    plugin.offload_param_device = hf_config.get_value("zero_optimization.offload_param.device", "none")
    plugin.zero3_init_flag = hf_config.is_zero3()


def shared_by(arguments: Any) -> Shared:
    """What the arguments' ``ParallelismConfig`` says, the only place where a run without a file says it."""
    given = getattr(arguments, "parallelism_config", None)
    return Shared(getattr(given, "tp_size", None) or 1, getattr(given, "sp_size", None) or 1)


def sixteen_bits(arguments: Any) -> str:
    """The dtype that the arguments ask for."""
    return "bfloat16" if arguments.bf16 else "float16" if arguments.fp16 else "float32"


def precision(dtype: str) -> dict[str, Any]:
    """The sections of a configuration."""
    return {"bf16": {"enabled": dtype == "bfloat16"}, "fp16": {"enabled": dtype == "float16"}}


def _measure_named(name: str | None) -> ModelSize | None:
    """Size of the model of this name, from its config alone; None if that cannot be had offline."""
    if name is None:
        return None
    try:
        import transformers

        config = transformers.AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False)
        architecture = next(iter(config.architectures or ()), None)
        model_class = getattr(transformers, architecture, None) if architecture else None
        with torch.device("meta"):
            model = model_class(config) if model_class else transformers.AutoModel.from_config(config)  # type: ignore[no-untyped-call]
        return measure(model)
    except Exception as error:  # any reason will do: the choice then waits for the Trainer
        logger.info("auto: %s cannot be measured yet (%s); deciding when the Trainer has its model", name, error)
        return None


def free_device_memory() -> Memory:
    """Free bytes for each rank: the least over all ranks, so that all of them decide alike."""
    host = available_memory() // local_world_size()
    device = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else host
    free = torch.tensor([device, host], dtype=torch.int64, device="cuda" if torch.cuda.is_available() else "cpu")
    if process_group.is_initialized():
        process_group.all_reduce(free, op=process_group.ReduceOp.MIN)
    return Memory(int(free[0]), int(free[1]))


def _report(choice: PresetChoice, size: ModelSize, memory: Memory, world_size: int, dtype: str, shared: Shared) -> str:
    room = STATES_SHARE * memory.device
    why = "the smallest that fits" if choice.fits else "NOTHING FITS, this one comes nearest"
    total, trainable = (f"{count / 1e6:,.1f} M" for count in (size.total, size.trainable))
    processes = f"{world_size} process{'es' if world_size > 1 else ''}"
    for count, what in ((shared.layers, "layer"), (shared.sequences, "sequence")):
        processes += f", {count} to a {what}" if count > 1 else ""
    lines = [
        f"ds_hf: --deepspeed auto takes {choice.preset}: {why}",
        f"  model: {total} parameters ({trainable} trainable), {dtype}, {processes}",
        f"  free for each process: {gib(memory.device)} on its device, {gib(memory.host)} of host memory",
        f"  of which {STATES_SHARE:.0%} for model states ({gib(room)} on the device), the rest for activations",
        "  model states of each process (device + host):",
    ]
    for name, need in choice.needs.items():
        verdict = "too large" if name != choice.preset or not choice.fits else "fits"
        lines.append(f"    {name:<14} {gib(need.device):>12} + {gib(need.host):>12}   {verdict}")
    return "\n".join(lines)


def gib(nbytes: float) -> str:
    """For people."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
