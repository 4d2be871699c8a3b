"""Whether a checkpoint has all states of the parameters that were trained; reads no tensor.

What parameters have after a step is known of common rules; of others, that those of one group have the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ds_hf.checkpoint.deepspeed.read_universal import STATES
from ds_hf.checkpoint.format import SavedParameter
from ds_hf.checkpoint.manifest import Manifest
from ds_hf.checkpoint.source import CheckpointKind, Source
from ds_hf.config.optimizer_traits import traits_of

__all__ = ["bound_names", "incomplete", "lacking_states", "place_of"]

# What these keep of every element from the first step on.
_ADAM = ["exp_avg", "exp_avg_sq"]
_ALWAYS = {
    **dict.fromkeys(("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam", "FusedLamb"), _ADAM),
    **dict.fromkeys(("FusedLion", "DeepSpeedCPULion"), _ADAM[:1]),
}
_KEPT = frozenset((*_ADAM, "max_exp_avg_sq"))


def incomplete(source: Source) -> list[str]:
    """``lacking_states`` where no engine tells the rule. Other libraries have classes of the same names as torch, so
    what is known of ours counts where nothing else is kept."""
    saved = list(source.manifest.parameters.values())
    rule = str((source.manifest.extra.get("optimizer") or {}).get("class", "")) or _by_options(source)
    known = rule in _ALWAYS and all(_KEPT.issuperset(each.moments) for each in saved)
    return list(lacking_states(source, saved, rule, known=known))


def _by_options(source: Source) -> str:
    """Files of DeepSpeed may not name the class: of those with moments, Lion's alone have no ``eps``."""
    groups = source.common.get("param_groups") or [{}]
    options = groups[0] if isinstance(groups, list) and isinstance(groups[0], dict) else {}
    return ("Adam" if "eps" in options else "FusedLion") if "betas" in options else ""


def lacking_states(source: Source, parameters: Iterable[SavedParameter], rule: str, *, known: bool) -> Iterator[str]:
    """What is missing of each parameter.

    Args:
        rule: class of the optimizer.
        known: it is ours or torch's, whose states this module knows.
    """
    always = _ALWAYS.get(rule, []) if known else []
    bound = set() if known and _is_elementwise(rule) else bound_names(source.manifest, rule)
    saved = {each.name: each for each in parameters if each.trainable and each.numel}
    for names in source.manifest.extra.get("groups") or [list(saved)]:
        members = [saved[name] for name in names if name in saved and _was_stepped(source, saved[name])]
        wanted = {*always, *(state for each in members if each.shape for state in each.moments)}
        counted = any("step" in each.scalars for each in members)
        for each in members:
            kept = {*each.moments, *each.scalars}
            lacking = sorted(wanted - kept) if each.name not in bound else []
            lacking += ["step"] if counted and "step" not in kept else []
            if lacking:
                yield (
                    f"{place_of(source, each, lacking[0])} is missing: {each.name} was trained, and without its "
                    f"{lacking[0]} would go on with zeros"
                )


def bound_names(manifest: Manifest, optimizer: str) -> set[str]:
    """Parameters whose state only fits the pieces it was made for: those of groups that keep different states for
    different shapes. Rules that treat elements alike keep the same for all."""
    irregular: dict[str, set[str]] = {}
    for entry in manifest.extra.get("irregular") or ():
        irregular.setdefault(str(entry[1]), set()).add("irregular")
    bound: set[str] = set()
    for names in manifest.extra.get("groups") or ():
        known = [name for name in names if name in manifest.parameters]
        kept = {
            frozenset(manifest.parameters[name].moments) | irregular.get(name, set())
            for name in known
            if len(manifest.parameters[name].shape) > 0  # one number: its moments are kept among the scalars
        }
        if (
            (len(kept) > 1 and not _is_elementwise(optimizer))
            or any("irregular" in states for states in kept)
            or "adafactor" in optimizer.lower()
        ):
            bound.update(known)
    return bound


def _is_elementwise(rule: str) -> bool:
    """Whether a class of this name keeps the same of every element that it has updated."""
    return rule in _ALWAYS or traits_of(rule).elementwise


def _was_stepped(source: Source, saved: SavedParameter) -> bool:
    """Whether an optimizer has updated it; ours have no states of a parameter that was frozen until now."""
    step = saved.scalars.get("step")
    number = step[1] if isinstance(step, list) else step
    if number is not None:
        return bool(number)
    if source.kind is CheckpointKind.DS_HF:
        return bool(saved.moments)
    counters = source.manifest.extra.get("counters") or {}
    return bool(counters.get("global_steps", 0) > counters.get("skipped_steps", 0))


def place_of(source: Source, saved: SavedParameter, state: str) -> str:
    """The file that a state would be in, or what it is called in the folder."""
    if source.kind is CheckpointKind.UNIVERSAL:
        return f"{source.folder}/{STATES}/{saved.name}/{state}.pt"
    return f"{source.folder}: {state} of {saved.name}"
