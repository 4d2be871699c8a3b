"""The two hosts, with a hostfile and a ``deepspeed`` command of this checkout."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.system.hosts import Hosts, two_hosts


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("hosts")) as made:
        (made.folder / "hostfile").write_text("host-a slots=2  # the first\nhost-b slots=2\n")
        command = made.folder / "bin" / "deepspeed"
        code = "import sys; sys.argv[0] = 'deepspeed'; from ds_hf.cli.launch import deepspeed_main; deepspeed_main()"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}" "$@"\n')
        command.chmod(0o755)
        yield made
