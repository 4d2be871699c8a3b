"""The batch keys that elasticity fills in on the way of a configuration to ``Config``, and what it says about them."""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds_hf.config.elasticity import (
    ElasticBatch,
    ElasticityConfig,
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
    by_nodes,
    by_processes,
    ensure_immutable_elastic_config,
    largest_micro,
    listed,
    scheme_of,
)
from ds_hf.config.source import Draft
from ds_hf.config.triple import KEYS, WorldSize
from ds_hf.config.types.root import Config, MeshShape, Origin, OriginKind
from ds_hf.errors import ConfigError

__all__ = ["ElasticConfigFaults", "ElasticSizeFaults", "elastic_notes", "resolve_elastic"]


class ElasticConfigFaults(ConfigError, ElasticityConfigError):
    """All faults of a configuration, of which some are about elasticity."""


class ElasticSizeFaults(ConfigError, ElasticityIncompatibleWorldSize):
    """All faults of a configuration, one of which is that the number of processes does not fit."""


def resolve_elastic(config: Config, draft: Draft, world: WorldSize, mesh: MeshShape | None) -> None:
    """Fill in the batch keys of ``draft.tree``, or collect the fault.

    Args:
        config: typed, with an enabled section. world: of which the value 0 leaves the keys as they are.
        mesh: in it, ``None`` where it has faults.
    """
    section, base = config.elasticity, "/elasticity"
    given = _given(draft)
    draft.raised = ElasticConfigFaults
    if draft.faulty(base) or (mesh is None and world.value):
        return
    try:
        ensure_immutable_elastic_config(given)
        batch = _chosen(ElasticityConfig(given), mesh)
    except ElasticityIncompatibleWorldSize as error:
        draft.raised = ElasticSizeFaults
        draft.fault(f"{base}/max_train_batch_size", str(error), "raise it, or train on fewer processes")
        return
    except ElasticityError as error:
        draft.fault(
            base,
            str(error),
            "add what is missing, or change it: `ds-hf config explain` then shows what is chosen for which number",
        )
        return
    if not batch.sizes:
        message = f"no number of processes from {section.min_gpus} to {section.max_gpus} makes a global batch"
        draft.fault(base, message, "change min_gpus, max_gpus or micro_batch_sizes")
        return
    if mesh is None:
        return
    size = mesh.data
    if size not in batch.sizes:
        draft.raised = ElasticSizeFaults
        message = f"{size} data-parallel processes do not make the global batch of {batch.total} ({world.origin})"
        fix = f'train on {listed(_near(batch.sizes, size))}, or set "version": 0.2, which takes another batch'
        draft.fault(base, message, fix)
        return
    if not batch.kept:
        kept = _chosen(ElasticityConfig(given), None)
        message = (
            f"the {size} data-parallel processes are none of {listed(kept.sizes)}, which make {kept.total} samples a "
            f"step: here it is {batch.total}, and a run that changes between the two has another global batch"
        )
        draft.warn(base, message, 'set "version": 0.1 to have it refused')
    if _cannot_grow():
        message = (
            "a host that comes to torchrun --nnodes MIN:MAX would end the run: the agents do not tell it where to meet"
        )
        draft.warn(base, message, "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun, on every host")
    micro = largest_micro(section.micro_batch_sizes, batch.total, size)
    values = (batch.total, micro, batch.total // (micro * size))
    _put(draft, values, size)


def _cannot_grow() -> bool:
    """Whether this is a process of an elastic torchrun whose agents share the store they met in: up to torch 2.13 at
    least, one that stays first keeps that store's address and does not write it down for the next meeting."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    given = [after for word, after in itertools.pairwise(words) if word == "--nnodes"]
    given += [word.partition("=")[2] for word in words if word.startswith("--nnodes=")]
    return any(":" in word and len(set(word.split(":"))) > 1 for word in given)


def _given(draft: Draft) -> dict[str, Any]:
    given = draft.tree.get("elasticity")
    assert isinstance(given, dict)
    return given


def _chosen(section: ElasticityConfig, mesh: MeshShape | None) -> ElasticBatch:
    """The batch for a mesh; without one that of the sizes that share a batch."""
    together = section.model_parallel_size
    if scheme_of(section) == 0.1 and mesh is not None and mesh.model > 1:
        raise ElasticityConfigError(
            f"scheme 0.1 of elasticity has no model-parallel processes, and the mesh is {mesh}: take version 0.2 with "
            f"model_parallel_size {mesh.model}"
        )
    if mesh is not None and mesh.model != together:
        raise ElasticityConfigError(
            f"model_parallel_size is {together}, and {mesh.model} processes hold a model together ({mesh})"
        )
    if scheme_of(section) == 0.2:
        return by_nodes(section, 0 if mesh is None else mesh.data * together)
    return by_processes(section)


def _near(sizes: Sequence[int], size: int) -> list[int]:
    """Some of ``sizes`` around ``size``."""
    place = bisect.bisect(sizes, size)
    return list(sizes[max(0, place - 4) : place + 4])


def _put(draft: Draft, values: tuple[int, int, int], size: int) -> None:
    """The batch keys; another number that stands there is a fault, unless the section says that it may be ignored."""
    shown = f"{values[0]} = {values[1]} x {values[2]} x {size} processes"
    origin = Origin(OriginKind.DERIVED, f"elasticity with {size} data-parallel processes")
    for key, value in zip(KEYS, values, strict=True):
        there = draft.tree.get(key)
        if type(there) is int and there != value:
            message = f"elasticity chooses the batch ({shown}), and {key} is {there}"
            if not _given(draft).get("ignore_non_elastic_batch_info", False):
                fix = f'remove {key}, or set "ignore_non_elastic_batch_info": true in elasticity'
                draft.fault(f"/{key}", message, fix)
                continue
            draft.warn(f"/{key}", f"no effect: {message}", "remove it")
        draft.put((key,), value, origin)


def elastic_notes(config: Config) -> list[str]:
    """What elasticity does on how many processes, a line each; none where it is off."""
    section = config.elasticity
    if not section.enabled:
        return []
    given = {"enabled": True, **config.resolved["elasticity"]}
    batch = _chosen(ElasticityConfig(given), None)
    notes = [f"elasticity: {batch.total} samples a step on {listed(batch.sizes)} data-parallel processes"]
    for size in _near(batch.sizes, config.mesh.data if config.mesh is not None else batch.sizes[0]):
        micro = largest_micro(section.micro_batch_sizes, batch.total, size)
        notes.append(f"  {size:>4} processes: {batch.total // (micro * size)} micro-batches of {micro} a step")
    return notes
