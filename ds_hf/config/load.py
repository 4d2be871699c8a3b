"""``load_config``: from anything a user may give to a frozen ``Config``, or one ``ConfigError`` with all faults.

The order matters: values are brought to their plain form before older keys move, keys move before the schema is
applied, and rules across keys see only values that are legal by themselves.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence

from ds_hf.config.build import build, provenance
from ds_hf.config.check import check
from ds_hf.config.draft import Draft, in_order
from ds_hf.config.mesh import Claim, MeshShape, find_mesh
from ds_hf.config.normalise import normalise
from ds_hf.config.optimizers import check_optimizer
from ds_hf.config.rename import rename
from ds_hf.config.report import log_warnings
from ds_hf.config.rules import check_rules
from ds_hf.config.source import read_source
from ds_hf.config.status import check_status
from ds_hf.config.triple import WorldSize, resolve_batch
from ds_hf.config.types.root import Config
from ds_hf.errors import ConfigError, Fault

__all__ = ["examine", "load_config"]


def load_config(
    source: object,
    *,
    world_size: int | None = None,
    allow_auto: bool = False,
    check_batch: bool = True,
    given: Sequence[Claim] = (),
) -> Config:
    """Read, check and complete a DeepSpeed configuration.

    Args:
        source: path, dict, JSON text, url-safe base64 of JSON text, or the name of a preset.
        world_size: processes; found from torch.distributed or the launcher when None. Unless the file or ``given``
            says otherwise, all of them are data-parallel.
        allow_auto: "auto" may stay on the keys that the Trainer fills, and counts as the default.
        check_batch: complete and check the batch triple and the mesh of processes.
        given: sizes of the mesh that are said elsewhere, see ``mesh.given_claims``.

    Raises:
        ConfigError: with every fault found.
    """
    if world_size is not None and (type(world_size) is not int or world_size < 1):
        raise ConfigError(
            [Fault("", f"world_size {world_size!r} is not possible", "give the number of processes")], "argument"
        )
    world = WorldSize.find(world_size) if check_batch else None
    config = examine(source, world=world, allow_auto=allow_auto, given=given)
    log_warnings(config)
    return config


def examine(source: object, *, world: WorldSize | None, allow_auto: bool, given: Sequence[Claim] = ()) -> Config:
    """``load_config`` without the log; ``world`` None skips the batch triple and the mesh."""
    draft = Draft.of(read_source(source), allow_auto)
    normalise(draft)
    rename(draft)
    normalise(draft)
    check(draft)
    legal = draft.without_faults()
    typed = build(legal, draft.name)
    check_rules(typed, draft)
    check_optimizer(typed, draft)
    check_status(draft, legal)
    mesh = None
    if world is not None:
        mesh = _mesh(typed, draft, world, given)
        resolve_batch(draft, legal, world.divided(mesh))
    if draft.faults:
        draft.refuse()
    return dataclasses.replace(
        build(draft.tree, draft.name),
        mesh=mesh,
        resolved=copy.deepcopy(draft.tree),
        provenance=provenance(draft),
        warnings=tuple(in_order(draft.warnings)),
    )


def _mesh(config: Config, draft: Draft, world: WorldSize, given: Sequence[Claim]) -> MeshShape | None:
    """The mesh, ``None`` where it has faults (which the draft collects) or the number of processes is unknown."""
    shape, faults = find_mesh(config, world.value, given)
    for fault in faults:
        if not (fault.pointer.startswith("/") and draft.faulty(fault.pointer)):  # a refused key needs no second reason
            draft.fault(fault.pointer, fault.message, fault.fix)
    return shape if world.value and not faults else None
