"""Settings that a script changes after ``initialize`` on some processes alone: a rate, what is frozen, clipping.

Each process would go on with its own, and no collective shows it. So before some steps the first process leaves its
settings in the store of the process group, and the others compare theirs of that step when they find them there:
nothing is sent beside training, and no process waits for another.
"""

from __future__ import annotations

import contextlib
import json
import weakref
import zlib
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch.distributed as dist

from ds_hf.engine.comm.together import difference, open_store
from ds_hf.engine.parallel.likeness import plain_texts
from ds_hf.log import warn_once

__all__ = ["Drift", "attach"]

_MOST = 64  # steps between comparisons; at first each comes after twice as many
_TRAINS = "which train"
_NEVER = 0


def attach(engine: Any) -> None:
    """Compare the settings of ``engine``, which is being built, with those of the processes that should have the
    same."""
    axis = engine.mesh.replicas if engine.mesh.shape.pipe > 1 or engine.mesh.is_given else engine.mesh.world
    store = open_store()
    if store is not None and axis.world_size > 1:
        drift = Drift(engine, store, [axis.global_rank(rank) for rank in range(axis.world_size)])
        engine.unfreezing.compare_settings = drift.look


class Drift:
    """Of one engine on one process.

    Args:
        store: of this engine alone.
        ranks: processes whose settings are the same.
    """

    def __init__(self, engine: Any, store: Any, ranks: Sequence[int]) -> None:
        self._engine, self._store, self._first, self._rank = weakref.ref(engine), store, ranks[0], dist.get_rank()
        self._step = self._gap = 0
        self._due = 1
        self._mine: tuple[str, dict[str, str]] | None = None  # waits for the first process'
        self._left: list[str] = []

    def look(self) -> int:
        """Before a step; before which later one it wants to look again, as a number of steps."""
        engine, self._step = self._engine(), self._step + self._gap
        self._gap = _NEVER
        if engine is None:
            return self._gap
        with contextlib.suppress(RuntimeError):  # the store is gone, and with it the process that kept it
            if self._mine is not None and self._store.check([self._mine[0]]):
                self._compare(engine, *self._mine)
                self._mine = None
            if self._step >= self._due - 1:
                self._due += min(self._due, _MOST)
                self._take(engine, f"{self._first}/{self._step}")
            self._gap = 1 if self._mine is not None else self._due - 1 - self._step
        return self._gap

    def _take(self, engine: Any, key: str) -> None:
        mine = settings_of(engine)
        if self._rank != self._first:
            self._mine = key, mine
            return
        self._store.set(key, zlib.compress(json.dumps(mine).encode()))
        self._left.append(key)
        if len(self._left) > 8:  # no process is so far behind
            self._store.delete_key(self._left.pop(0))

    def _compare(self, engine: Any, key: str, mine: dict[str, str]) -> None:
        first = json.loads(zlib.decompress(self._store.get(key)))
        if first == mine:
            return
        names = list(engine.param_names.values())
        first, mine = (_by_name(each, names) for each in (first, mine))
        warn_once(
            f"before step {int(key.partition('/')[2]) + 1}: {difference(first, mine, self._first, self._rank)}. Each "
            "process trains with its own (said once), so that their parts of the model do not fit together: let the "
            "script change settings on all processes alike, or none",
            about="settings that part",
            everywhere=True,
        )


def settings_of(engine: Any) -> dict[str, str]:
    """What a script may change, as it is now."""
    optimizer = engine.optimizer
    assert optimizer is not None
    found = {"gradient_clipping": repr(optimizer.policy.max_norm), "loss scale": repr(optimizer.loss_scaler.scale)}
    found |= {"gradient_accumulation_steps": repr(engine.accumulation.steps), "batch": repr(tuple(engine.batch))}
    found["model.training"] = repr(engine.module.training)
    options = {*optimizer.defaults, "lr", "initial_lr"} - {"params"}
    for number, (group, params) in enumerate(zip(optimizer.param_groups, optimizer.given, strict=False)):
        chosen = {name: value for name, value in group.items() if name in options}
        found |= {f"param_groups[{number}].{name}": text for name, text in plain_texts(chosen)}
        names = repr(sorted(engine.param_names.get(id(param), "") for param in params))
        digest = blake2b(names.encode(), digest_size=4).hexdigest()
        found[f"param_groups[{number}]['params']"] = f"{len(params)} parameters ({digest})"
    trains = {id(param): param.requires_grad for param in engine.module.parameters()}
    found[_TRAINS] = "".join(str(int(trains.get(key, False))) for key in engine.param_names)
    return found


def _by_name(settings: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """With an entry for each parameter in the place of one for all."""
    flags = zip(names, settings[_TRAINS], strict=False)
    rest = {name: text for name, text in settings.items() if name != _TRAINS}
    return {**rest, **{f"{name}.requires_grad": str(flag == "1") for name, flag in flags}}
