"""A quarter of the tests with the oldest and a newer release of torch and transformers, another one each week.

Each release is installed as ``make setup TORCH=...`` does, some minutes and six gigabytes, in a copy that is removed
afterwards. The rest of ``make test`` runs with these releases by hand; docs/compatibility.md says when it last did.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest

from tests.helpers.slices import PARTS

pytestmark = [pytest.mark.slow, pytest.mark.minutes(11), pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
RELEASES = {"oldest": {"TORCH": "2.11.0", "TRANSFORMERS": "5.17.0"}, "newer": {"TORCH": "2.14.1"}}
INSTALL_S, TEST_MINUTES = 480, 5
SPACE = 16 * 2**30  # six gigabytes of libraries, and what pip unpacks beside them


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Path]:
    """A copy of what git knows here."""
    if shutil.disk_usage(tmp_path).free < SPACE:
        pytest.skip("another release of torch wants 16 GiB of disk")
    folder = tmp_path / "checkout"
    cloned = subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], capture_output=True, text=True, check=False)
    if cloned.returncode:
        pytest.skip(f"this is no clone: {cloned.stderr.strip()[-200:]}")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def made(folder: Path, words: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run the command ``words`` in ``folder``, without the variables of this run of the tests."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "DS_HF_"))}
    environment.pop("PYTHONPATH", None)
    return subprocess.run(
        ["timeout", str(int(seconds)), *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("release", RELEASES)
def test_a_quarter_of_the_tests_passes_with_another_release(release: str, checkout: Path) -> None:
    chosen = [f"{name}={version}" for name, version in RELEASES[release].items()]
    library = "ds_hf/engine/ops/_lib/BUILD.txt"
    setup = made(checkout, ["make", "setup", library, *chosen], INSTALL_S)
    if setup.returncode:
        pytest.skip(f"{' '.join(chosen)} cannot be installed here in {INSTALL_S} s: {setup.stderr.strip()[-300:]}")
    binaries = next(checkout.glob(".venv-*")) / "bin"
    week = datetime.now(timezone.utc).isocalendar().week
    part = f"{week % PARTS + 1}/{PARTS}"
    words = [str(binaries / "pytest"), "-q", "-n", "2", "--dist", "worksteal", "-m", "not slow and not gpu"]
    found = made(checkout, [*words, "--slice", part, "--minutes", str(TEST_MINUTES)], 60 * TEST_MINUTES + 600)
    assert found.returncode == 0, found.stdout[-6000:]
    passed = re.search(r"(\d+) passed", found.stdout)
    assert passed is not None
    assert int(passed[1]) > 100, found.stdout[-2000:]
