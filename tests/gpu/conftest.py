"""Tests that measure have the GPUs for themselves, whatever the number of workers: the others wait meanwhile."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _gpus(request: pytest.FixtureRequest) -> Iterator[None]:
    """A lock on a file, which ends with its process: shared by most tests, held alone by those marked ``alone``.

    Who wants it goes through a door first. Who wants it alone holds the door until it has the lock, so that tests that
    begin later cannot keep it waiting for ever.
    """
    kind = fcntl.LOCK_EX if request.node.get_closest_marker("alone") else fcntl.LOCK_SH
    path = Path(tempfile.gettempdir()) / f"ds_hf-gpus-{os.getuid()}"
    with path.with_suffix(".door").open("w") as door, path.open("w") as gpus:
        fcntl.flock(door, kind)
        fcntl.flock(gpus, kind)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield
        fcntl.flock(gpus, fcntl.LOCK_UN)  # processes that were forked from this one still have the file open
