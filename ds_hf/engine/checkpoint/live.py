"""What checkpoints need of an engine, so that this package never imports the engine.

Names of parameters are those of ``module.named_parameters()`` when the engine was built, the first one of tied names;
wrappers that torch.compile puts around blocks later (``_orig_mod``) are no part of a name.

Gradients are not saved, so an accumulation that is under way begins anew after loading: the position in the data that
is saved is the one where it began.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ds_hf.checkpoint.format import SavedCut
from ds_hf.config.plan import StatePlan
from ds_hf.engine.accumulation import Accumulation, BatchSizes
from ds_hf.engine.comm.mesh import Axis, Mesh
from ds_hf.engine.optim.sharded import ShardedOptimizer
from ds_hf.engine.optim.unfreezing import Unfreezing
from ds_hf.engine.zero.buffer import FlatBuffer, home_of
from ds_hf.engine.zero.cut import cut_of
from ds_hf.engine.zero.packed import packed_parts
from ds_hf.engine.zero.param_names import is_resized
from ds_hf.engine.zero.unit import Unit
from ds_hf.errors import CheckpointError
from ds_hf.log import logger, warn_once

__all__ = [
    "Checkpointable",
    "adapter_names",
    "adapter_scalings",
    "aliases",
    "check_names",
    "cut_in",
    "data_position",
    "extra_states",
    "flat_buffers",
    "is_left_out",
    "loose_parameters",
    "module_buffers",
    "names_now",
    "names_of",
    "parameter_name",
    "random_states",
    "restore_data_position",
    "restore_random_states",
    "tell_adapters",
    "world_of",
]


class Checkpointable(Protocol):
    """The engine as checkpoints see it."""

    module: nn.Module
    units: list[Unit]
    axis: Axis
    mesh: Mesh
    optimizer: ShardedOptimizer | None
    unfreezing: Unfreezing
    lr_scheduler: Any
    plan: StatePlan
    settings: Any
    param_names: dict[int, str]
    global_steps: int
    global_samples: int
    skipped_steps: int
    batch: BatchSizes
    accumulation: Accumulation
    training_dataloader: Any
    step_hooks: list[Any]
    kept: dict[str, Any]

    @property
    def checkpoint_writer(self) -> Any:
        """A ``background.BackgroundWriter``, which imports this."""

    @property
    def begun_micro_batches(self) -> int:
        """Micro-batches whose gradients wait for a step."""


def world_of(engine: Checkpointable) -> Axis:
    """All processes: those that a checkpoint is of."""
    return engine.mesh.world


def cut_in(param: Tensor) -> SavedCut | None:
    """Which slice of the whole parameter this process has, as manifests say it; ``None`` for the whole."""
    cut = cut_of(param)
    return None if cut is None else SavedCut(cut.dim, cut.ranges)


def _plain(name: str) -> str:
    return name.replace("_orig_mod.", "")


def parameter_name(engine: Checkpointable, param: Tensor, otherwise: str = "") -> str:
    """First name of ``param``; ``otherwise`` for one that came after the engine was built."""
    return engine.param_names.get(id(param), _plain(otherwise))


def names_now(engine: Checkpointable) -> dict[int, str]:
    """By the id of each parameter that is in the model now: its first name, if it still has that, or one of those that
    it has got since. Adapters that were merged and unloaded are in it no more, and what they were around is renamed."""
    found: dict[int, str] = {}
    for name, whole in engine.module.named_parameters(remove_duplicate=False):
        for path, param in {"": whole, **dict(packed_parts(whole))}.items():
            known = _plain(f"{name}.{path}" if path else name)
            if id(param) not in found or known == parameter_name(engine, param):
                found[id(param)] = known
    return found


def flat_buffers(engine: Checkpointable) -> list[FlatBuffer]:
    """Every flat buffer, in an order that all ranks share."""
    return [buffer for unit in engine.units for buffer in unit.buffers]


def names_of(engine: Checkpointable, buffer: FlatBuffer) -> Sequence[str]:
    """Names of the buffer's parameters, in layout order."""
    return [parameter_name(engine, param) for param in buffer.params]


def is_left_out(engine: Checkpointable, params: Iterable[Tensor], exclude_frozen: bool) -> bool:
    """Whether a checkpoint without frozen parameters has nothing of ``params``, which are stored together.

    What has trained stays in it: an adapter that is switched off for a while is frozen, too.
    """
    if not exclude_frozen or any(param.requires_grad or is_resized(param) for param in params):
        return False
    homes = [home for param in params if (home := home_of(param)) is not None]
    return engine.optimizer is None or not any(engine.optimizer.updates(home.buffer) for home in homes)


def adapter_names(module: nn.Module) -> frozenset[str]:
    """Names of the PEFT adapters on ``module``, also of those that do not train now; they are parts of their
    parameters' names."""
    configs = getattr(module, "peft_config", None)
    return frozenset(configs) if isinstance(configs, dict) else frozenset()


def adapter_scalings(module: nn.Module) -> dict[str, float]:
    """What PEFT's layers multiply their adapters with, by layer and adapter: no weight of a checkpoint has it in it."""
    return {
        f"{name}.{adapter}": float(scaling)
        for name, layer in module.named_modules()
        if hasattr(layer, "merged_adapters") and isinstance(known := getattr(layer, "scaling", None), dict)
        for adapter, scaling in known.items()
        if isinstance(scaling, int | float)
    }


def tell_adapters(engine: Checkpointable, scalings: Mapping[str, float]) -> None:
    """Say where adapters that are loaded are not what they were: ``scalings`` are those of the checkpoint."""
    own = adapter_scalings(engine.module)
    other = [name for name, scaling in scalings.items() if not math.isclose(own.get(name, scaling), scaling)]
    if other:
        logger.warning(
            "the adapter %s and %d others were trained with a scaling of %g and have one of %g here, so what is loaded "
            "is another model: give lora_alpha, r and use_rslora as they were", other[0], len(other) - 1,
            scalings[other[0]], own[other[0]],
        )  # fmt: skip
    merged = [name for name, module in engine.module.named_modules() if getattr(module, "merged_adapters", None)]
    if merged:
        logger.warning(
            "adapters are merged into the weights of %s and %d other layers, which go on as if they were in what is "
            "loaded now: call unmerge_adapter() before load_checkpoint()", merged[0], len(merged) - 1,
        )  # fmt: skip


def loose_parameters(engine: Checkpointable) -> dict[str, Tensor]:
    """Parameters that live in no unit: quantized ones - the plain tensors behind them - and those added later.

    Whole on every rank. Also some that another engine has too, whose buffers stay gathered (``zero.sharing``).
    """
    placed = {id(param) for buffer in flat_buffers(engine) for param in buffer.owners}
    for param in engine.module.parameters():
        if id(param) not in placed and (home := home_of(param)) is not None:
            home.buffer.gather()  # after a step of the other engine it may be on its way
    return {
        parameter_name(engine, part, f"{name}.{path}" if path else name): part
        for name, param in engine.module.named_parameters()
        if id(param) not in placed
        for path, part in packed_parts(param)
    }


def check_names(engine: Checkpointable) -> None:
    """Raise ``CheckpointError`` where values by name could be those that the engine has or those that the model has by
    now: a name went to another tensor, or a parameter was resized. What the names no longer mean is told."""
    _tell_merged(engine)
    now: dict[str, Tensor] = {_plain(name): t for name, t in engine.module.named_parameters(remove_duplicate=False)}
    now.update(_persistent(engine.module))
    for buffer in flat_buffers(engine):
        for name, slot, param in zip(names_of(engine, buffer), buffer.layout.slots, buffer.params, strict=True):
            if name in now and engine.param_names.get(id(now[name])) != name:
                raise CheckpointError(
                    f"{name} is another tensor in the model than in the engine, which goes on with that of initialize()"
                    ": build another engine around the changed model. save_16bit_model() and export_pretrained() write "
                    "what the model has now"
                )
            if not buffer.sharded and param.shape != buffer.form_of(slot)[1]:
                raise CheckpointError(
                    f"{name} was {list(slot.shape)} in initialize() and is {list(param.shape)} now: resize a model "
                    "before it has an engine, or build another engine"
                )


def _tell_merged(engine: Checkpointable) -> None:
    """Say where a checkpoint has adapters beside weights that they are merged into: loaded, they would count twice."""
    hint = "Save it before adapters are merged; save_16bit_model() and export_pretrained() write what the model has now"
    merged = [name for name, module in engine.module.named_modules() if getattr(module, "merged_adapters", None)]
    if merged:
        warn_once(
            f"adapters are merged into the weights of {merged[0]} and {len(merged) - 1} other layers, and this "
            f"checkpoint has both: a model that loads it would have them twice. {hint}. unmerge_adapter() takes them "
            "out again"
        )
    now = names_now(engine)
    for buffer in flat_buffers(engine):
        for name, param in zip(names_of(engine, buffer), buffer.params, strict=True):
            if now.get(id(param), name) != name:
                warn_once(
                    f"{name} is {now[id(param)]} in the model by now, and in this checkpoint has the name of "
                    "initialize(), beside what the model had then: where adapters were merged into it "
                    "(merge_and_unload()), a model that is built as that one was and loads this would have them twice. "
                    f"{hint}"
                )
                return


def aliases(engine: Checkpointable, now: Mapping[int, str] | None = None) -> dict[str, str]:
    """Further names of tied parameters, each with the first name, or that of ``now`` (``names_now``)."""
    found = {}
    for name, param in engine.module.named_parameters(remove_duplicate=False):
        first = parameter_name(engine, param, name) if now is None else now[id(param)]
        if _plain(name) != first:
            found[_plain(name)] = first
    return found


def module_buffers(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Persistent buffers by first name, and further names of shared ones with the first name."""
    first: dict[int, str] = {}
    buffers: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    for name, buffer in _persistent(module):
        known = first.setdefault(id(buffer), name)
        if known == name:
            buffers[name] = buffer
        else:
            tied[name] = known
    return buffers, tied


def extra_states(module: nn.Module) -> dict[str, nn.Module]:
    """Modules that keep something of their own in a state dict (``get_extra_state``), by the key it has there."""
    return {
        _plain(f"{prefix}._extra_state" if prefix else "_extra_state"): child
        for prefix, child in module.named_modules()
        if type(child).get_extra_state is not nn.Module.get_extra_state
    }


def _persistent(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, child in module.named_modules(remove_duplicate=False):
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set:
                yield _plain(f"{prefix}.{name}" if prefix else name), buffer


# -- the position in the data ------------------------------------------------------------------------------------------


def data_position(engine: Checkpointable) -> dict[str, Any] | None:
    """The loader's state, ``None`` without one."""
    loader = engine.training_dataloader
    if not hasattr(loader, "state_dict"):
        return None
    state = dict(loader.state_dict())
    begun = engine.begun_micro_batches
    handed_out = begun * engine.batch.micro * engine.mesh.shape.data
    if begun and state.get("samples", 0) >= handed_out:  # else it began in the epoch before, which is over
        state["samples"] -= handed_out
    return state


def restore_data_position(engine: Checkpointable, saved: Any) -> None:
    """Let the next pass over the loader begin where ``saved`` stood.

    Raises:
        CheckpointError: it is not a position.
    """
    loader = engine.training_dataloader
    if saved is None or not hasattr(loader, "load_state_dict"):
        return
    keys = ("epoch", "samples", "seed")
    if not isinstance(saved, dict) or not all(type(saved.get(k)) is int and saved[k] >= 0 for k in keys[:2]):
        raise CheckpointError(f"the checkpoint's position in the data is {saved!r} instead of {', '.join(keys)}")
    if type(saved.get("seed")) is not int:
        raise CheckpointError(f"the checkpoint's position in the data has no seed: {saved!r}")
    live = loader.state_dict()
    if ("packs" in saved) != ("packs" in live):
        logger.warning(
            "the checkpoint's position in the data counts %s, and the loader's batches are of another kind "
            "(dynamic_batching): its epoch %d is read from the beginning",
            "packs" if "packs" in saved else "samples",
            saved["epoch"],
        )
        saved = {**live, "epoch": saved["epoch"], "samples": 0}
    loader.load_state_dict(saved)


# -- random states, in what ``weights_only`` can load ------------------------------------------------------------------


def random_states() -> dict[str, Any]:
    """The present states."""
    name, keys, *rest = np.random.get_state()
    states: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(saved: Any) -> None:
    """Bring back what ``random_states`` gave, so that dropout and shuffling go on as they would have.

    Raises:
        CheckpointError: it is not what it should be.
    """
    if not isinstance(saved, dict):
        raise CheckpointError(f"the checkpoint's random states are a {type(saved).__name__} instead of a dict")
    try:
        if isinstance(saved.get("cpu"), Tensor):
            torch.set_rng_state(saved["cpu"])
        if isinstance(saved.get("cuda"), Tensor) and torch.cuda.is_available():
            torch.cuda.set_rng_state(saved["cuda"])
        if "python" in saved:
            random.setstate(saved["python"])
        if "numpy" in saved:
            name, keys, *rest = saved["numpy"]
            np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    except (AttributeError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint's random states are not what was saved: {error}") from error
