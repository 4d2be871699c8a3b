"""Loading a checkpoint into an engine of any world size, stage, offload and dtype.

Order: rank 0 finds the folder -> all check that it is whole, undamaged and fits, before anything is changed -> each
rank reads the fragments that it owns, by then from the page cache -> the weights are synced. A failure on any
rank is raised on every rank, and between two meetings no collective is issued.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from ds_hf.checkpoint.deepspeed.read_universal import LATEST as LATEST_UNIVERSAL
from ds_hf.checkpoint.format import LATEST, MANIFEST
from ds_hf.checkpoint.formats import kind_of, lacks_metadata, named_by_latest, open_folder
from ds_hf.checkpoint.manifest import Manifest
from ds_hf.checkpoint.places import find_folder, folder_of
from ds_hf.checkpoint.plain import restore
from ds_hf.checkpoint.source import CheckpointKind, Source
from ds_hf.checkpoint.tensors import TensorFiles, in_form_of
from ds_hf.checkpoint.vocabulary import padded
from ds_hf.engine.checkpoint.agreement import collect, share, together
from ds_hf.engine.checkpoint.exact import Restored, check_restored
from ds_hf.engine.checkpoint.finding import undamaged, whole_or_newest
from ds_hf.engine.checkpoint.frozen import tell_base
from ds_hf.engine.checkpoint.holders import Holders, find_holders
from ds_hf.engine.checkpoint.live import (
    Checkpointable,
    cut_in,
    extra_states,
    flat_buffers,
    loose_parameters,
    module_buffers,
    names_of,
    restore_data_position,
    restore_random_states,
    tell_adapters,
    world_of,
)
from ds_hf.engine.checkpoint.restore import (
    check_options,
    check_pieces,
    check_rule,
    check_states,
    restore_feedback,
    restore_groups,
    restore_states,
)
from ds_hf.engine.checkpoint.resume import (
    Fit,
    RankStates,
    check_common,
    check_extra,
    check_fit,
    check_tied,
    identity_of,
    model_shapes,
    naming,
    rank_states,
    same_for_all,
)
from ds_hf.engine.optim.sharded import ShardedOptimizer
from ds_hf.engine.optim.stepping import sync_weights
from ds_hf.engine.zero.buffer import FlatBuffer, home_of, unshard
from ds_hf.errors import CheckpointError, CheckpointPlaceError
from ds_hf.log import logger

__all__ = ["load_checkpoint"]

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class _Wanted:
    """What the caller asked for."""

    strict: bool
    optimizer: bool
    scheduler: bool
    counters: bool


def _outside_of_inference(load: Callable[P, R]) -> Callable[P, R]:
    """What is loaded inside ``torch.inference_mode()`` is written to in training."""

    @wraps(load)
    def loaded(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_inference_mode_enabled():
            return load(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return load(*args, **kwargs)

    return loaded


@_outside_of_inference
def load_checkpoint(
    engine: Checkpointable,
    load_dir: str | Path,
    tag: str | None = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: Callable[..., Any] | None = None,
) -> tuple[str | None, dict[str, Any]]:
    """Read what ``save_checkpoint`` of ds_hf or of DeepSpeed wrote. All ranks call it.

    Args:
        tag: default what the file ``latest`` names.
        load_module_strict: names that only one of model and checkpoint has are an error, otherwise a warning.
        load_optimizer_states: moments, groups' options, loss scaler and random state too, not only weights.
        load_module_only: weights and nothing else.
        custom_load_fn: called as ``custom_load_fn(src=state_dict, dst=module)`` with everything gathered, instead of
            loading the weights by name; masters are then made from the weights. Of a parameter that this process holds
            a slice of, ``src`` has that slice.

    Returns:
        the checkpoint's folder (``None``, with a warning, when there is none) and the client state.

    Raises:
        CheckpointError: it is incomplete, damaged or does not fit the model.
        CheckpointPlaceError: ``load_dir`` or ``tag`` cannot be one.
    """
    axis = world_of(engine)
    wanted = _Wanted(
        strict=load_module_strict,
        optimizer=load_optimizer_states and not load_module_only and engine.optimizer is not None,
        scheduler=load_lr_scheduler_states and not load_module_only and engine.lr_scheduler is not None,
        counters=not load_module_only,
    )
    folder: Path | None = None
    asked = {"tag": tag, "load_module_strict": load_module_strict, "load_optimizer_states": load_optimizer_states,
             "load_lr_scheduler_states": load_lr_scheduler_states, "load_module_only": load_module_only,
             "custom_load_fn": custom_load_fn is not None}  # fmt: skip
    with together(axis, f"finding a checkpoint in {load_dir}") as meeting:
        meeting.bring(asked)
        root = folder_of(load_dir, "load_dir")
        folder = _find(root, tag, engine.settings.checkpoint.load_universal) if axis.rank == 0 else None
    for rank, other in enumerate(meeting.brought):
        if other != meeting.brought[0]:
            key = next(key for key in asked if other[key] != meeting.brought[0][key])
            raise CheckpointError(
                f"load_checkpoint() was called with {key}={meeting.brought[0][key]!r} on rank 0 and {other[key]!r} on "
                f"rank {rank}: all ranks load the same"
            )
    folder = share(axis, folder)
    if folder is None:
        return None, {}
    if engine.settings.ds_hf.checkpoint.verify != "sizes" and (folder / MANIFEST).is_file():
        folder = undamaged(axis, root, folder, named=tag is not None or folder == root)
    holders = find_holders(engine)
    with together(axis, f"checking {folder}"):
        identity = identity_of(folder)
        source, fit, ranks = _open(engine, holders, folder, wanted, custom_load_fn is not None)
    same_for_all(axis, source.manifest)
    _clear(engine)
    # The parameters of one pipeline stage may be the only ones that wait for states.
    if wanted.optimizer and any(collect(axis, engine.unfreezing.give_places_to(_with_states(fit)))):
        holders = find_holders(engine)
        with together(axis, f"checking {folder}"):
            check_pieces(engine, source.manifest, fit)
    manifest, common, files = source.manifest, source.common, source.files
    if custom_load_fn is None:
        with together(axis, f"reading {folder}"):
            _read_weights(engine, fit, files)
            _read_rest_of_weights(engine, fit, files)
        _publish(engine)
    else:
        _load_custom(engine, manifest, files, custom_load_fn)
    with together(axis, f"reading {folder} (the engine has a part of it now)"):
        with naming(folder):
            _set_extra_states(engine, common["extra_state"])
            _read_rest(engine, source, fit, ranks, wanted)
        if identity_of(folder) != identity:
            raise CheckpointError(f"{folder} was replaced or removed by another run while it was read: load again")
    if wanted.optimizer:
        restore_feedback(engine, ranks.own, folder)
    if custom_load_fn is None:
        restored = Restored(wanted.optimizer, wanted.scheduler, wanted.counters)
        check_restored(engine, holders, manifest, fit, restored)
    _follow_batches(engine, common, wanted)
    return str(folder), common["client_state"]


# -- before anything is changed -------------------------------------------------------------------------------------


def _find(root: Path, tag: str | None, universal: bool) -> Path | None:
    """The checkpoint's folder; ``None``, with a warning, where there is none to load.

    Args:
        universal: what ``latest_universal`` names goes first, as DeepSpeed's ``checkpoint.load_universal`` asks for.
    """
    if root.exists() and not root.is_dir():
        raise CheckpointError(f"{root} is a file and not the folder of checkpoints")
    if tag is None and (kind_of(root) is not None or lacks_metadata(root)):
        return root
    named = named_by_latest(root, universal=universal)
    if tag is None and named is None:
        if universal:
            raise CheckpointPlaceError(
                f"checkpoint.load_universal is set, and {root / LATEST_UNIVERSAL} does not exist: give "
                "load_checkpoint() a tag, or the folder that ds_to_universal has written"
            )
        logger.warning("no checkpoint loaded: %s does not exist; give load_checkpoint() a tag", root / LATEST)
        return None
    folder = find_folder(root, None if tag is None else str(tag), named or LATEST)
    if tag is None and kind_of(folder) in (None, CheckpointKind.DS_HF):
        return whole_or_newest(root, folder)
    if folder.is_dir():
        return folder
    logger.warning("no checkpoint loaded: %s does not exist", folder)
    return None


def _open(
    engine: Checkpointable, holders: Holders, folder: Path, wanted: _Wanted, custom: bool
) -> tuple[Source, Fit, RankStates]:
    source = open_folder(folder)
    source = padded(source, model_shapes(engine)[0])
    manifest, common = source.manifest, source.common
    if holders.rank == 0:  # once is enough, and there may be thousands of files
        source.check(sums=False)  # of which each rank compares its share, see finding
    check_extra(manifest)
    check_common(source)
    for key in ("client_state", "lr_scheduler", "extra_state"):
        common[key] = restore(common.get(key), key)
    common["features"] = restore(common.get("features", {}), "features")
    fit = check_fit(engine, holders, manifest, strict=wanted.strict and not custom, lenient_names=custom)
    if holders.rank == 0:
        if not custom:
            check_tied(engine, source, strict=wanted.strict)
        tell_adapters(engine, manifest.extra.get("scalings", {}))
        tell_base(engine, manifest.extra.get("frozen", {}), manifest.excluded)
    if wanted.optimizer:
        _check_optimizer(engine, manifest, common)
        check_states(engine, source, fit)
        check_pieces(engine, manifest, fit)
        ranks = rank_states(engine, source)
        if ranks.own is not None and "param_groups" in ranks.own and engine.optimizer is not None:
            check_options(engine.optimizer, ranks.own["param_groups"], f"{folder}, rank {holders.rank}")
        return source, fit, ranks
    return source, fit, RankStates(None, [])


def _with_states(fit: Fit) -> list[str]:
    """The parameters that were trained, also those that may be frozen here until later."""
    return [name for name, saved in fit.parameters.items() if saved.value_state == "master" or saved.moments]


def _check_optimizer(engine: Checkpointable, manifest: Manifest, common: dict[str, Any]) -> None:
    assert engine.optimizer is not None
    saved = common.get("param_groups")
    if isinstance(saved, list) and manifest.extra.get("written_by", {}).get("deepspeed"):
        saved = common["param_groups"] = _without_experts(saved, len(engine.optimizer.param_groups))
    if not isinstance(saved, list) or not all(isinstance(group, dict) for group in saved):
        lacking = "was saved without an optimizer"
        if manifest.extra.get("written_by", {}).get("deepspeed"):  # whose file of the model does not say which
            lacking = (
                "has no states of an optimizer, which lie in *_optim_states.pt: copy these too, or, if there are none"
            )
        raise CheckpointError(f"{manifest.folder} {lacking}: load it with load_optimizer_states=False")
    check_rule(engine.optimizer, manifest)
    check_options(engine.optimizer, saved, str(manifest.folder))


def _without_experts(saved: list[Any], live: int) -> list[Any]:
    """DeepSpeed needs groups of their own for experts, with the options of the others; there may be none here."""
    others = [group for group in saved if not (isinstance(group, dict) and group.get("moe"))]
    return others if len(saved) != live == len(others) else saved


# -- weights --------------------------------------------------------------------------------------------------------


def _clear(engine: Checkpointable) -> None:
    """Drop gradients and gathered parameters: both belong to the weights that go."""
    for param in engine.module.parameters():
        param.grad = None
    if engine.optimizer is not None:
        engine.optimizer.reducer.clear()
    for unit in engine.units:
        unit.open_calls.clear()
        unit.release()


@torch.no_grad()
def _read_weights(engine: Checkpointable, fit: Fit, files: TensorFiles) -> None:
    """Fill masters, or values where nothing is updated, with what this rank owns."""
    for buffer in flat_buffers(engine):
        master = None if engine.optimizer is None else engine.optimizer.master(buffer)
        whole = master is not None and engine.optimizer is not None and engine.optimizer.whole
        target = buffer.owned(whole=False) if master is None else master
        if _read_by_all(engine, buffer):
            _read_into(buffer.full, engine, buffer, fit, files, whole=True)
            if target.data_ptr() == buffer.owned(whole=whole).data_ptr():
                continue
        _read_into(target, engine, buffer, fit, files, whole=whole)
        if master is not None and engine.optimizer is not None:
            engine.optimizer.write_master(buffer, master)


def _read_into(
    target: Tensor, engine: Checkpointable, buffer: FlatBuffer, fit: Fit, files: TensorFiles, *, whole: bool
) -> None:
    names = names_of(engine, buffer)
    for fragment in buffer.layout.fragments(buffer.axis.rank, whole=whole):
        saved = fit.parameters.get(names[fragment.slot.index])
        if saved is not None:
            start, part = buffer.piece_of(target, fragment)
            order, cut = buffer.order_of(fragment.slot), cut_in(buffer.params[fragment.slot.index])
            if buffer.dtype is torch.uint8 and files.holds_bytes(saved):  # of older versions, as they lie here
                files.fill(part.view(target.dtype), saved, saved.value_state, fragment.start, cut)
            elif order:
                lying = files.value(saved, cut=cut).permute(order).reshape(-1)
                part.copy_(in_form_of(part, lying[start : start + part.numel()]))
            else:
                files.fill(part, saved, saved.value_state, start, cut)


def _read_by_all(engine: Checkpointable, buffer: FlatBuffer) -> bool:
    """Whether each rank reads the parameters whole: from the page cache that is faster than from each other by gloo.

    Not where they are rounded from masters, which must happen once and on one rank.
    """
    alike = buffer.dtype == torch.float32 or engine.optimizer is None or not engine.optimizer.updates(buffer)
    return alike and not buffer.sharded and buffer.axis.world_size > 1 and buffer.full.device.type == "cpu"


@torch.no_grad()
def _read_rest_of_weights(engine: Checkpointable, fit: Fit, files: TensorFiles) -> None:
    """What is in no flat buffer."""
    loose = loose_parameters(engine)
    for name, param in loose.items():
        if name in fit.parameters:
            value = in_form_of(param, files.value(fit.parameters[name], cut=cut_in(param)))
            _write(param, value.reshape(param.shape))  # a slice of a stack of parts has a dimension more
    for buffer in dict.fromkeys(home.buffer for param in loose.values() if (home := home_of(param)) is not None):
        buffer.gather()
        buffer.write_back()  # of another engine that has some of these parameters too
    for name, value in module_buffers(engine.module)[0].items():
        if name in fit.buffers:
            _write(value, files.buffer(fit.buffers[name]))


def _write(target: Tensor, values: Tensor) -> None:
    if torch._debug_has_internal_overlap(target) == 1:  # expanded: each element in memory is several of it
        target.data = torch.empty(target.shape, dtype=target.dtype, device=target.device)
    target.copy_(values)


def _set_extra_states(engine: Checkpointable, saved: dict[str, Any]) -> None:
    for name, child in extra_states(engine.module).items():
        if name in saved:
            child.set_extra_state(saved[name])


def _publish(engine: Checkpointable) -> None:
    """Make the parameters follow what was read. Collective."""
    for buffer in flat_buffers(engine):
        _publish_buffer(engine, buffer)


@torch.no_grad()
def _publish_buffer(engine: Checkpointable, buffer: FlatBuffer) -> None:
    if _read_by_all(engine, buffer):
        sync_weights([buffer], whole=True)
    elif engine.optimizer is not None and engine.optimizer.updates(buffer):
        engine.optimizer.masters_changed(buffer)
    else:
        sync_weights([buffer], whole=False)
    if buffer.states is not None and buffer.states is not engine.optimizer:
        buffer.states.values_changed(buffer)  # another engine trains it


def _load_custom(engine: Checkpointable, manifest: Manifest, files: TensorFiles, load: Callable[..., Any]) -> None:
    """Give the user's function the whole state dict and the gathered module."""
    buffers = flat_buffers(engine)
    with unshard(buffers):
        with together(world_of(engine), f"custom_load_fn on {manifest.folder}"):
            dtypes = {name: buffer.dtype for buffer in buffers for name in names_of(engine, buffer)}
            cuts = {
                name: cut_in(param)
                for buffer in buffers
                for name, param in zip(names_of(engine, buffer), buffer.params, strict=True)
            }
            state = {
                name: files.value(saved, dtypes.get(name), cuts.get(name))
                for name, saved in manifest.parameters.items()
            }
            state.update({name: files.buffer(saved) for name, saved in manifest.buffers.items()})
            state.update({alias: state[name] for alias, name in manifest.tied.items() if name in state})
            load(src=state, dst=engine.module)
        for buffer in buffers:
            buffer.write_back()


# -- the rest -------------------------------------------------------------------------------------------------------


def _read_rest(
    engine: Checkpointable,
    source: Source,
    fit: Fit,
    ranks: RankStates,
    wanted: _Wanted,
) -> None:
    """Optimizer, scheduler, counters and random state; local to this rank."""
    manifest, common = source.manifest, source.common
    if wanted.optimizer and engine.optimizer is not None:
        restore_states(engine, fit, source, ranks.irregular)
        options = _known_options(engine.optimizer, source)
        if ranks.own is not None:  # with what each rank counts for itself
            options = ranks.own.get("param_groups", options)
        restore_groups(engine.optimizer, options)
        _restore_scaler(engine, common.get("loss_scaler"))
        if ranks.own is not None:
            restore_random_states(ranks.own.get("rng", {}))
    if wanted.scheduler:
        if _schedule_of(engine, common["lr_scheduler"]) is None:
            logger.warning(
                "%s holds no state of a learning-rate scheduler: it starts from the beginning", manifest.folder
            )
        else:
            engine.lr_scheduler.load_state_dict(_schedule_of(engine, common["lr_scheduler"]))
    if wanted.counters:
        counters = manifest.extra.get("counters", {})
        engine.global_steps = int(counters.get("global_steps", 0))
        engine.global_samples = int(counters.get("global_samples", 0))
        engine.skipped_steps = int(counters.get("skipped_steps", 0))
        engine.accumulation.resume(int(counters.get("micro_steps", 0)))
        restore_data_position(engine, common.get("data"))
        for name, feature in engine.kept.items():
            if name in common["features"]:
                feature.load_state_dict(common["features"][name])
            else:
                logger.warning("%s holds no state of %s: it follows from the step alone", manifest.folder, name)


def _schedule_of(engine: Checkpointable, saved: Any) -> Any:
    """The state of a schedule; where one followed the sizes of batches, and none does now, of that inside of it."""
    if isinstance(saved, dict) and "base_lr_scheduler" in saved and not hasattr(engine.lr_scheduler, "unscaled"):
        return saved["base_lr_scheduler"]
    return saved


def _follow_batches(engine: Checkpointable, common: dict[str, Any], wanted: _Wanted) -> None:
    """Rates that follow the sizes of batches (``dynamic_batching``) were saved for the batch that came next then: now
    another may come, or batches may have one size. This is after what was restored has been compared."""
    rates = None
    if wanted.optimizer and engine.optimizer is not None:
        groups, schedule = engine.optimizer.param_groups, common["lr_scheduler"]
        saved = common["features"].get("dynamic_batching", {}).get("rates")
        if saved is None and isinstance(schedule, dict):  # of a run before these were kept beside it
            saved = schedule.get("unscaled")
        for group, rate in zip(groups, saved or (), strict=False):
            group["lr"] = rate
        rates = [group["lr"] for group in groups]
    if wanted.counters and "dynamic_batching" in engine.kept:
        engine.kept["dynamic_batching"].resume(rates)


def _known_options(optimizer: ShardedOptimizer, source: Source) -> list[dict[str, Any]]:
    """Options of the saved groups; of another library's optimizer those that this one has too."""
    saved: list[dict[str, Any]] = source.common["param_groups"]
    if source.kind is CheckpointKind.DS_HF:
        return saved
    pairs = zip(saved, optimizer.param_groups, strict=True)
    return [{key: value for key, value in group.items() if key in live} for group, live in pairs]


def _restore_scaler(engine: Checkpointable, saved: Any) -> None:
    """A scaler of another kind (another precision) starts anew."""
    assert engine.optimizer is not None
    scaler = engine.optimizer.loss_scaler
    if isinstance(saved, dict) and saved.get("kind") == type(scaler).__name__:
        scaler.load_state_dict(saved["state"])
