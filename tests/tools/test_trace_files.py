"""What ``trace_files`` says of the sources, as far as it is a rule (CONTRIBUTING.md)."""

from __future__ import annotations

from tests.tools.trace_files import core_files, long_functions


def test_no_function_of_the_core_is_longer_than_a_screen() -> None:
    assert len(core_files()) > 50
    assert long_functions() == []
