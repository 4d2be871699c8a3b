"""Whether a checkpoint fits a model: names and shapes, found out before anything is changed.

Tied names are the same parameter: a name that only one side has is no difference if its tied partner is there.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_hf.checkpoint.zero_to_fp32 import Manifest, SavedBuffer, SavedParameter
from ds_hf.engine.checkpoint.holders import Holders
from ds_hf.engine.checkpoint.interface import (
    Checkpointable,
    aliases,
    flat_buffers,
    loose_parameters,
    module_buffers,
    names_of,
)
from ds_hf.engine.zero.cut import whole_shape
from ds_hf.errors import CheckpointError
from ds_hf.log import logger

__all__ = ["Fit", "check_fit", "model_shapes"]

_LISTED = 10  # names in a message


@dataclass(frozen=True)
class Fit:
    """What the checkpoint has for the model's names; a name that is missing keeps its present value."""

    parameters: dict[str, SavedParameter]
    buffers: dict[str, SavedBuffer]


def check_fit(
    engine: Checkpointable, holders: Holders, manifest: Manifest, *, strict: bool, lenient_names: bool = False
) -> Fit:
    """Match names and compare shapes.

    Args:
        strict: names that only one side has are an error; otherwise a warning.
        lenient_names: neither names nor shapes are compared, because a function of the user places the weights.

    Raises:
        CheckpointError: it lists every name and shape that does not fit.
    """
    shapes, frozen = model_shapes(engine)
    buffers, tied_buffers = module_buffers(engine.module)
    buffers = {name: value for name, value in buffers.items() if name not in holders.own}
    further = {**aliases(engine), **tied_buffers}
    partners: dict[str, list[str]] = {}
    for alias, name in further.items():
        partners.setdefault(name, []).append(alias)

    def find(name: str) -> str | None:
        """The checkpoint's first name of the model's ``name``."""
        for candidate in (name, *partners.get(name, ())):
            place: str = manifest.tied.get(candidate, candidate)
            if place in manifest.parameters or place in manifest.buffers:
                return place
        return None

    places = {name: find(name) for name in (*shapes, *buffers)}
    fit = Fit(
        {name: manifest.parameters[place] for name, place in places.items() if place in manifest.parameters},
        {name: manifest.buffers[place] for name, place in places.items() if place in manifest.buffers},
    )
    if lenient_names:
        return fit
    _check_shapes(manifest, shapes, {name: tuple(b.shape) for name, b in buffers.items()}, fit)
    left_out = manifest.excluded & {*frozen, *buffers}
    missing = [n for n, place in places.items() if place is None and n not in left_out]
    known = {*places, *further, *holders.own}
    used = {place for place in places.values() if place is not None}
    for name in holders.names:  # what only other processes have
        known.add(name)
        used.add(manifest.tied.get(name, name))
    saved = [*manifest.parameters, *manifest.buffers]
    unexpected = [n for n in saved if n not in known and n not in used]
    _report(manifest, missing, unexpected, strict, holders.rank)
    return fit


def model_shapes(engine: Checkpointable) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Whole shapes of all parameters, and the names of those that nothing updates."""
    shapes: dict[str, tuple[int, ...]] = {}
    frozen: set[str] = set()
    for buffer in flat_buffers(engine):
        for name, slot, param in zip(names_of(engine, buffer), buffer.layout.slots, buffer.params, strict=True):
            shapes[name] = tuple(whole_shape(param, slot.shape))
            if buffer.frozen:
                frozen.add(name)
    for name, loose in loose_parameters(engine).items():
        shapes[name] = tuple(whole_shape(loose, loose.shape))
        frozen.add(name)
    return shapes, frozen


def _check_shapes(
    manifest: Manifest, shapes: dict[str, tuple[int, ...]], buffers: dict[str, tuple[int, ...]], fit: Fit
) -> None:
    saved = {n: p.shape for n, p in fit.parameters.items()} | {n: b.shape for n, b in fit.buffers.items()}
    wrong = [
        f"{name}: {list(shape)} in the model, {list(saved[name])} in the checkpoint"
        for name, shape in {**shapes, **buffers}.items()
        if name in saved and saved[name] != shape
    ]
    if wrong:
        raise CheckpointError(
            f"{manifest.folder} does not fit the model; shapes differ: {_listed(wrong, '; ')}. Build the model with "
            "the checkpoint's sizes (a vocabulary: resize_token_embeddings() before initialize()), or place the "
            "weights yourself with custom_load_fn"
        )


def _report(manifest: Manifest, missing: list[str], unexpected: list[str], strict: bool, rank: int) -> None:
    parts = []
    if missing:
        parts.append(f"missing in the checkpoint: {_listed(missing)}")
    if unexpected:
        parts.append(f"not in the model: {_listed(unexpected)}")
    if parts and strict:
        raise CheckpointError(
            f"{manifest.folder} does not fit the model; {'; '.join(parts)} (load_module_strict=False loads the rest)"
        )
    if parts and rank == 0:
        logger.warning("%s: %s", manifest.folder, "; ".join(parts))


def _listed(names: list[str], separator: str = ", ") -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return separator.join(names[:_LISTED]) + more
