"""Fixtures of the tests of real scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat.common import save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Llama."""
    return save_tiny_model(tmp_path_factory.mktemp("model"))
