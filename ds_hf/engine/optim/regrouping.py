"""Parameter groups that a script edits after ``initialize``.

What the groups hold are stretches of the masters, one for several parameters, and not the model's own. A parameter of
the model that a script puts into a group moves there, wherever it was, and one that was in none joins. All else that
is done to the lists says nothing about a parameter, and is refused with its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ds_hf.engine.optim.segments import fragments_of
from ds_hf.engine.optim.sharded import ShardedOptimizer
from ds_hf.engine.zero.buffer import logical_shape
from ds_hf.engine.zero.packed import is_packed
from ds_hf.errors import DsHfError
from ds_hf.log import warn_once

__all__ = ["regroup"]

_HOW = (
    "After initialize() the groups hold stretches of several parameters, not the model's own. To move a parameter to "
    "another group, or to add one, append the model's to the list: optimizer.param_groups[1]['params'].append("
    "model.head.weight); to stop training one, freeze it: requires_grad_(False)"
)


def regroup(
    optimizer: ShardedOptimizer, waiting: Mapping[int, int], params: Iterable[nn.Parameter], name: Callable[[Any], str]
) -> dict[int, int]:
    """Let the segments be those of the groups as they are now.

    Args:
        waiting: of each parameter that is listed and has no states yet its group, by ``id``.
        params: all of the model.
        name: of a parameter.

    Returns:
        the parameters that wait now.

    Raises:
        DsHfError: what was done to the groups cannot be followed; nothing has changed then.
    """
    inner = optimizer.optimizer
    groups, places = inner.param_groups, _places(optimizer.listed, inner.param_groups)
    model = {id(param): param for param in params}
    moved = _moved(optimizer, groups, model, name)
    masters = {id(p): p for gradient in optimizer.groups for p in gradient.buffer.params}
    given: list[list[Any]] = [[] for _ in groups]
    for place, before in zip(places, optimizer.given, strict=True):
        for param in before:
            if id(param) in moved:
                continue
            if place is not None:
                given[place].append(param)
            elif id(param) in masters:
                raise DsHfError(f"the parameter group of {name(param)} is gone, and no other lists it. {_HOW}")
    for key, place in moved.items():
        given[place].append(model[key])
    group_of = {id(param): place for place, params in enumerate(given) for param in params}
    _check_segments(optimizer, groups, places, moved, name)
    for group in groups:
        for option, value in inner.defaults.items():
            group.setdefault(option, value)
    optimizer.regroup(given, group_of)
    joined = [key for key in moved if key not in masters]
    return {key: group_of[key] for key in dict.fromkeys([*waiting, *joined]) if key in group_of}


def _moved(
    optimizer: ShardedOptimizer,
    groups: Sequence[dict[str, Any]],
    model: Mapping[int, nn.Parameter],
    name: Callable[[Any], str],
) -> dict[int, int]:
    """The group of each of the model's parameters that are in the lists, by ``id``."""
    segments = {id(s.param) for ss in optimizer.segments.values() for s in ss}
    moved: dict[int, int] = {}
    for place, group in enumerate(groups):
        for param in group["params"]:
            if id(param) in segments:
                continue
            what = f"param_groups[{place}]['params'] was given a tensor of shape {tuple(logical_shape(param))} that is"
            if id(param) not in model:
                raise DsHfError(
                    f"{what} no parameter of the engine's model: one that was made after initialize() needs an engine "
                    "that knows it (engine.destroy(), and initialize() with all parameters), or an optimizer of its own"
                )
            if is_packed(param) or not param.is_floating_point():
                raise DsHfError(f"{what} quantized, and does not train: train adapters on it")
            if id(param) in moved:
                raise DsHfError(
                    f"{name(param)} was put into parameter groups {moved[id(param)]} and {place}: choose one"
                )
            moved[id(param)] = place
    return moved


def _check_segments(
    optimizer: ShardedOptimizer,
    groups: Sequence[dict[str, Any]],
    places: Sequence[int | None],
    moved: Mapping[int, int],
    name: Callable[[Tensor], str],
) -> None:
    """Stretches are where they were, but for those all of whose parameters are elsewhere now."""
    now = {id(param): place for place, group in enumerate(groups) for param in group["params"]}
    for segments in optimizer.segments.values():
        for segment, inside in fragments_of(segments, whole=optimizer.policy.whole):
            params = [segment.gradient.buffer.params[fragment.slot.index] for fragment in inside]
            left = [param for param in params if id(param) not in moved]
            place = now.get(id(segment.param))
            if left and place != places[segment.group]:
                others = f" and {len(left) - 1} other parameters" if left[1:] else ""
                where = "is in no parameter group any more" if place is None else f"was put into group {place}"
                raise DsHfError(f"the stretch of {name(left[0])}{others} {where}. {_HOW}")
    if not moved and len(groups) == len(optimizer.given):
        warn_once(
            "a list of parameters in optimizer.param_groups was replaced by one that holds the same, so nothing "
            f"changes. {_HOW}"
        )


def _places(listed: Sequence[tuple[dict[str, Any], Any, Any]], groups: Sequence[dict[str, Any]]) -> list[int | None]:
    """Where each of the groups is by now; one that was replaced where as many are there is where it was."""
    now = {id(group): place for place, group in enumerate(groups)}
    alike = len(groups) == len(listed)
    return [now.get(id(group), place if alike else None) for place, (group, _, _) in enumerate(listed)]
