"""Fixtures of the tests of real scripts, and the options that keep the table of docs/compatibility.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat import table
from tests.compat.common import save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Llama."""
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("compatibility")
    group.addoption("--write-table", action="store_true", help="write the table of docs/compatibility.md; run nothing")
    group.addoption("--record", metavar="MACHINE", help="note outcomes under this column of the table")
    group.addoption("--record-file", type=Path, default=table.RECORDS, help="where --record notes them")


def pytest_configure(config: pytest.Config) -> None:
    machine = config.getoption("record", None)  # None also where this file is loaded after the options were read
    if machine:
        recorder = table.Recorder(machine, config.getoption("record_file"))
        config.pluginmanager.register(recorder)


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.getoption("write_table", False):
        table.write(session.items)
        session.items.clear()
