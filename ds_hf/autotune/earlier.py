"""What earlier searches have measured of the same model on the same machine.

The user's cache has a file for each model, machine and version (``$XDG_CACHE_HOME/ds_hf/autotune``, or ``~/.cache``):
the points of each setting, with its whole configuration as the name, so that another file of the user's finds them too.
A machine is not as fast every day. What both searches measured, the user's file before all, says by how much times are
to be scaled; where there is nothing of the kind they are left out. To the cost model they are launches that were made,
with wider errors, so that a search begins where the last one ended.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import ds_hf
from ds_hf.autotune.space import CHECKPOINTING, Setting, config_of
from ds_hf.host import user_cache
from ds_hf.log import logger
from ds_hf.regular_files import read_object, replace_file

if TYPE_CHECKING:
    from ds_hf.autotune.study import Search

__all__ = ["earlier_file", "forget", "recall", "remember"]

VERSION = 1
MOST = 400  # points in a file, the latest
ERROR = 0.05  # of the logarithm of a time, beside what it had: it is another day's
WORST = 0.05  # what is known less well, of a machine that does other things too, is not kept
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_FACTS = ("total", "trainable", "module_dtype", "device", "world_size", "processes", "optimizer", "torch", "memory")

Size = tuple[int, int, int]  # micro-batch, accumulation, processes that read different samples


class _Known(NamedTuple):
    """One measured size of a setting. ``error``: of the logarithm of ``seconds``."""

    name: str
    size: Size
    seconds: float
    error: float


def earlier_file(search: Search) -> Path:
    """Where searches like this one keep what they measured."""
    facts, survey = search.own.events["facts"], search.own.events.get("survey", {})
    about = {name: facts.get(name) for name in _FACTS}
    about["class"] = (facts.get("model") or {}).get("class")
    about["shapes"] = {name: shape[1:] for name, shape in (survey.get("shapes") or {}).items()}
    about["versions"] = [VERSION, ds_hf.__version__]
    return user_cache() / "autotune" / f"{_digest(about)}.json"


def forget(search: Search) -> None:
    """Remove what earlier searches left."""
    earlier_file(search).unlink(missing_ok=True)


def remember(search: Search) -> None:
    """Add what this search measured. That it cannot be written is told, and is no fault."""
    path = earlier_file(search)
    here = {(known.name, known.size): known for known in _measured(search) if known.error <= WORST}
    kept = [known for known in _read(path) if (known.name, known.size) not in here]
    rows = [list(known) for known in (*kept, *here.values())][-MOST:]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps({"version": VERSION, "points": rows}) + "\n")
    except OSError as error:
        logger.warning("what was measured is not kept for the next search: %s: %s", path, error.strerror or error)


def recall(search: Search) -> list[tuple[Setting, list[tuple[int, int, float, float]]]]:
    """Settings of this search that earlier ones measured, with sizes, seconds as of today, and their errors."""
    known = _read(earlier_file(search))
    here = {(each.name, each.size): each.seconds for each in _measured(search)}
    both = [math.log(here[each.name, each.size] / each.seconds) for each in known if (each.name, each.size) in here]
    if not both:
        return []
    scale, by_name = math.exp(statistics.median(both)), dict[str, list[_Known]]()
    for each in known:
        by_name.setdefault(each.name, []).append(each)
    found = []
    for setting in search.space.settings():
        data = search.data(setting)
        sizes = [
            (each.size[0], each.size[1], each.seconds * scale, math.hypot(each.error, ERROR))
            for each in by_name.get(_name_of(search, setting), ())
            if each.size[2] == data
        ]
        if sizes and setting != search.own.setting:
            found.append((setting, sizes))
    return found


def _measured(search: Search) -> list[_Known]:
    found = []
    for record in search.launched():
        name = _name_of(search, record.setting)
        for point in record.points:
            error = point.error or (point.high - point.low) / (4 * point.seconds)  # 95 % are four errors
            found.append(_Known(name, (point.micro, point.accumulation, point.data), point.seconds, error))
    return found


def _name_of(search: Search, setting: Setting) -> str:
    """Of the whole configuration, without the batch."""
    tree = {key: value for key, value in config_of(search.space.tree, setting).items() if key not in _BATCH}
    on = bool(setting.get(CHECKPOINTING, search.own.events["facts"].get("checkpointing")))
    return _digest({"config": tree, "checkpointing": on})


def _digest(content: Mapping[str, Any]) -> str:
    return blake2b(json.dumps(content, sort_keys=True, default=str).encode(), digest_size=12).hexdigest()


def _read(path: Path) -> list[_Known]:
    """What is there; a file that holds something else is told and counts as empty."""
    if not os.path.lexists(path):
        return []
    try:
        tree = read_object(path)
        rows = tree["points"] if tree.get("version") == VERSION else []
        return [_known(*row) for row in rows]
    except (OSError, ValueError, TypeError, LookupError) as error:
        logger.warning("%s does not hold what an earlier search measured (%s): --forget begins anew", path, error)
        return []


def _known(name: Any, size: Any, seconds: Any, error: Any) -> _Known:
    micro, accumulation, data = map(int, size)
    found = _Known(str(name), (micro, accumulation, data), float(seconds), float(error))
    if not (min(found.size) > 0 and 0 < found.seconds < math.inf and 0 <= found.error < math.inf):
        raise ValueError(f"{found} was never measured")
    return found
