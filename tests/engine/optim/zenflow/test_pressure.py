"""When columns that wait weigh as much as those that do not."""

from __future__ import annotations

import pytest
import torch

from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.optim.zenflow.columns import Columns
from ds_hf.engine.optim.zenflow.pressure import Pressure
from ds_hf.engine.zero.layout import FlatLayout
from tests.helpers.distributed import run_distributed

LAYOUT = FlatLayout([torch.Size((2, 4)), torch.Size((2, 4))], 1)
COLUMNS = Columns(LAYOUT, list(LAYOUT.fragments(0)))
CHOSEN = torch.tensor([True, False, False, False] * 2)


def axis() -> Axis:
    world = torch.distributed
    return Axis(world.group.WORLD, world.get_rank(), world.get_world_size())


def answers(steps: int, ratio: float) -> list[bool]:
    """One matrix has chosen columns three times as large as the others, the other five times."""
    pressure = Pressure(ratio)
    sums = torch.tensor([3.0, 1, 1, 1, 5, 1, 1, 1]) / torch.distributed.get_world_size()
    found = []
    for number in range(steps):
        scale = 2.0 ** (-number)  # a loss scale that changes counts for nothing
        pressure.take([(COLUMNS, sums / scale, CHOSEN)], axis(), torch.tensor([scale, 0.0]))
        found.append(pressure.due)
    pressure.forget()
    assert not pressure.due
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_due_when_enough_matrices_press(world: int) -> None:
    for ratio, after in ((0.5, 3), (0.99, 5)):
        for found in run_distributed(answers, world, 6, ratio, timeout=30):
            assert found == [number >= after for number in range(1, 7)]
