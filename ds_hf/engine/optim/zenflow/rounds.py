"""What each step of ZenFlow does: whether all is updated, whether what was put off is, whether columns are chosen.

Rounds are steps that are made: those that overflow are not counted. They are counted in the first parameter group, so
that a run that is resumed does not warm up again; how long ago columns were chosen is not kept, for a checkpoint ends
that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["ROUNDS", "Round", "Rounds"]

ROUNDS = "zenflow_rounds"  # the key in the group


@dataclass(frozen=True)
class Round:
    """One step.

    Attributes:
        full: the host updates everything with this step's gradients.
        updates: the host updates all with the mean of the gradients since it did so last.
        ranks: this step's gradients choose the columns of the next steps.
    """

    full: bool
    updates: bool
    ranks: bool


class Rounds:
    """The order of rounds.

    Args:
        warm_up: so many full ones at the start, at least one, for its gradients choose.
        update_every: steps between updates; ``None``: when it is said that one is due.

    Attributes:
        choose_every: steps between choices, 0 for one choice alone.
    """

    def __init__(self, warm_up: int, update_every: int | None, choose_every: int) -> None:
        self._warm_up, self._update_every = warm_up, update_every
        self.choose_every = choose_every
        self._chosen: int | None = None  # rounds since columns were chosen
        self._updated = 0  # rounds since the last update

    @property
    def automatic(self) -> bool:
        """When updates are due depends on gradients."""
        return self._update_every is None

    def ranks_next(self, group: dict[str, Any]) -> bool:
        """Whether the coming round chooses. ``group``: the first parameter group."""
        if self._chosen is None:
            return int(group.get(ROUNDS, 0)) + 1 >= self._warm_up
        return 0 < self.choose_every <= self._chosen + 1

    def advance(self, group: dict[str, Any], *, due: bool) -> Round:
        """The coming round, which is made now.

        Args:
            due: what was put off weighs as much as what was not, see ``Pressure``.
        """
        full, ranks = self._chosen is None, self.ranks_next(group)
        group[ROUNDS] = int(group.get(ROUNDS, 0)) + 1
        self._updated += 1
        updates = not full and (ranks or due or self._updated == self._update_every)
        if not full:
            assert self._chosen is not None
            self._chosen += 1
        if ranks:
            self._chosen = 0
        if full or updates:
            self._updated = 0
        return Round(full, updates, ranks)

    def forget(self) -> None:
        """There are no chosen columns any more: the next round is a full one."""
        self._chosen, self._updated = None, 0
