"""The table of ``make test-room`` names rooms and tests that there are."""

from __future__ import annotations

import pytest

from tests.tools.room import CONTRACTS, ROOT, paths_of, rooms


def test_rooms_and_their_contracts() -> None:
    assert {"engine/zero", "engine/optim", "engine/observe/report", "checkpoint", "config"} <= set(rooms())
    assert not [name for name in CONTRACTS if not (ROOT / "ds_hf" / name).is_dir()]
    assert not [path for room in rooms() for path in paths_of(room) if not (ROOT / path).exists()]
    assert "tests/contract/test_collectives_recorded.py" in paths_of("engine/optim/schedules"), "with the rooms inside"


@pytest.mark.parametrize("room", ["", "engine/zer0", "contract"])
def test_what_is_no_room(room: str) -> None:
    with pytest.raises(SystemExit, match=r"ROOM=engine/zero, or one of .*checkpoint, .*engine/zero"):
        paths_of(room)
