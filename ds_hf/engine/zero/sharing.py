"""Parameters that the models of several engines of one process have in common: a frozen encoder of an actor and a
critic, the layers under another head, the whole model of an engine that was made before.

A parameter lies in one flat buffer, whatever the number of engines. A new engine takes over what it trains; what it
does not train stays in the buffers of an engine that lives on, and is used there. An engine has ended when another one
trains a parameter that it trained itself. Modules without parameters (activations, losses) belong to no engine.

What decides is the place of each parameter (``home_of``), never the modules: they may be shared or copied at will.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from ds_hf.engine.zero.buffer import FlatBuffer, home_of
from ds_hf.engine.zero.unit import Unit
from ds_hf.errors import ConfigError

__all__ = ["Sharing", "Succession", "is_trained", "link", "plan_sharing"]


class User(Protocol):
    """An engine, as its hooks know it."""

    @property
    def uses(self) -> Collection[int]:
        """Ids of the parameters of its model."""

    @property
    def trains(self) -> Collection[int]:
        """Ids of those that it updates."""

    def end(self, succession: Succession, by: Any) -> None:
        """Another engine, ``by``, trains its parameters from now on."""

    def relink(self) -> None:
        """Some of its parameters lie elsewhere from now on."""


@dataclass(frozen=True)
class Succession:
    """What another engine took over of one that has ended.

    Attributes:
        name: one of the parameters.
        count: how many of those that the ended engine trained.
        wholly: all parameters of its model are in the other one's, which has hooks on them: it may still be called.
    """

    name: str
    count: int
    wholly: bool

    def __str__(self) -> str:
        more = f" and {self.count - 1} more" if self.count > 1 else ""
        return (
            f"another engine was made for parameters of this engine later ({self.name}{more}), and trains them since: "
            "this one has ended. Use the new engine. For two engines that both train, give each model parameters of "
            "its own (copy.deepcopy of the part before initialize()), or let only one of them have the common part in "
            "its optimizer"
        )


@dataclass(frozen=True)
class Sharing:
    """What a new engine and those that there are do with parameters that both have.

    Attributes:
        ended: engines that have ended.
        others: those that live on.
        elsewhere: ids of parameters that stay in buffers of theirs.
    """

    ended: Mapping[User, Succession] = field(default_factory=dict)
    others: Sequence[User] = ()
    elsewhere: Collection[int] = ()


def plan_sharing(params: Sequence[Tensor], trained: Collection[int], names: Mapping[int, str]) -> Sharing:
    """Decide before anything is made; changes nothing.

    Args:
        params: of the new engine's model.
        trained: ids of those that it will update.
        names: by id.

    Raises:
        ConfigError: the new engine has divided what another one trains whole, and does not train it.
    """
    known = {id(param) for param in params}
    users = {user: None for param in params if (home := home_of(param)) is not None for user in home.buffer.users}
    ended: dict[User, Succession] = {}
    for user in users:
        taken = [key for key in names if key in trained and key in user.trains]
        whole = known.issuperset(user.uses)
        if taken or (whole and not user.trains):
            first = taken[0] if taken else next(key for key in names if key in user.uses)
            ended[user] = Succession(names[first], max(len(taken), 1), whole)
    others = [user for user in users if user not in ended]
    for user in others:
        _check_left(params, user, names)
    elsewhere = {
        id(param)
        for param in params
        if id(param) not in trained
        and (home := home_of(param)) is not None
        and any(user not in ended for user in home.buffer.users)
    }
    return Sharing(ended, others, elsewhere)


def _check_left(params: Sequence[Tensor], user: User, names: Mapping[int, str]) -> None:
    """What ``user`` goes on training lies in its buffers still, and not in parts that were made for a new engine."""
    for param in params:
        home = home_of(param)
        if id(param) in user.trains and (home is None or user not in home.buffer.users):
            raise ConfigError(
                f"{names[id(param)]} was divided over processes for this engine, and another engine, which has the "
                "whole of it, trains it: give the files of both the same expert_parallel and tensor_parallel, or "
                "each model parameters of its own (copy.deepcopy before initialize())",
                "initialize(model=...)",
            )


def link(units: Sequence[Unit], *, shards: bool) -> list[FlatBuffer]:
    """Give each unit the buffers in which its parameters lie now.

    Args:
        shards: the engine's parameters are shards between uses.

    Returns:
        those that have to stay gathered: they have parameters of other models too, serve several units, or are shards
        where this engine's parameters are whole. The first are in no unit: to checkpoints their parameters are such as
        lie in none.
    """
    known = {id(param) for unit in units for param in (*unit.params, *unit.whole)}
    seen: set[FlatBuffer] = set()
    held: dict[FlatBuffer, None] = {}
    for unit in units:
        homes = dict.fromkeys(h.buffer for p in (*unit.params, *unit.whole) if (h := home_of(p)) is not None)
        ordered = [*(b for b in unit.buffers if b in homes), *(b for b in homes if b not in unit.buffers)]
        unit.buffers = []
        for buffer in ordered:
            ours = buffer.keeps_all and all(id(param) in known for param in buffer.owners)
            if not ours or buffer in seen or (buffer.sharded and not shards):
                held[buffer] = None
            if ours and buffer not in seen:
                unit.buffers.append(buffer)
            seen.add(buffer)
    return list(held)


def is_trained(param: Tensor) -> bool:
    """Whether some engine updates ``param``."""
    home = home_of(param)
    return home is not None and not home.buffer.frozen
