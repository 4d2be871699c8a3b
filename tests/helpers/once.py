"""What tests of one file share, made once, though workers of pytest-xdist may each have some of them."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["made_once"]


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[], Any]) -> Any:
    """What ``make`` returned, which JSON has to hold, in whichever worker it was called."""
    base = factory.getbasetemp()
    place = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"{name}.json"
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
        if not place.exists():
            place.write_text(json.dumps(make()))
        return json.loads(place.read_text())
