"""The house does not grow without a reason beside the figure (``budget.txt``)."""

from __future__ import annotations

import pytest

from tests.helpers.distributed import run_distributed
from tests.tools.budget import TABLE, lowered, measure, over, raised, read_limits
from tests.tools.trace_files import CONFIG, PHASES, trace_linear


def test_rooms_files_classes_and_names() -> None:
    figures = measure()
    assert len(figures) > 60
    told = over(figures, read_limits(TABLE.read_text()))
    assert not told, "\n".join(["python -m tests.tools.budget says:", *told])


def test_files_of_a_phase() -> None:
    traces = run_distributed(trace_linear, 2, CONFIG, timeout=120)[0]
    figures = {("phase", phase): (len(traces[phase].files),) for phase in PHASES}
    told = over(figures, read_limits(TABLE.read_text()))
    assert not told, "\n".join([*told, *(f"{phase}: {sorted(traces[phase].files)}" for phase in PHASES)])


def test_what_grows_is_told_and_what_shrinks_written_down() -> None:
    table = "# words\nroom zero 3 400  # a reason\nfile old.py 500\nphase step 20\n"
    assert read_limits(table)["room", "zero"] == (3, 400)
    assert over({("room", "zero"): (3, 400)}, read_limits(table)) == []
    (told,) = over({("room", "zero"): (3, 401)}, read_limits(table))
    assert "room zero is 3 401, and at most 3 400" in told
    (told,) = over({("homes", "Axis"): (2,)}, read_limits(table))
    assert "has no line" in told
    assert lowered(table, {("room", "zero"): (4, 300)}) == "# words\nroom zero 3 300  # a reason\nphase step 20\n"
    grown = raised(table, {("room", "zero"): (3, 410), ("file", "new.py"): (460,), ("homes", "Axis"): (2,)}, "a key")
    assert grown == (
        "# words\nroom zero 3 410  # a key\nfile old.py 500\nfile new.py 460  # a key\nphase step 20\n"
        "homes Axis 2  # a key\n"
    )
    with pytest.raises(ValueError, match="two lines for room zero"):
        read_limits("room zero 3 400\nroom zero 3 401\n")
    with pytest.raises(ValueError, match="no KIND NAME NUMBERS"):
        read_limits("room zero")
