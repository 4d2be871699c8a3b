"""The C++ libraries under the sanitizers: builds csrc's test programs and runs ctest."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[3] / "csrc"


def _run(*command: str | Path) -> str:
    environment = os.environ | {"CTEST_OUTPUT_ON_FAILURE": "1", "UBSAN_OPTIONS": "print_stacktrace=1"}
    environment.pop("OMP_NUM_THREADS", None)
    done = subprocess.run([str(part) for part in command], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_sanitizers_find_nothing(tmp_path: Path) -> None:
    if shutil.which("cmake") is None or shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("needs cmake and a C++ compiler")
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    options = ["-DDS_HF_SANITIZE=address,undefined", "-DDS_HF_TESTS=ON", "-DCMAKE_CXX_FLAGS_RELEASE=-O0"]
    _run("cmake", "-S", CSRC, "-B", tmp_path, *generator, *options)
    _run("cmake", "--build", tmp_path, "--target", "test_cpu", "--parallel", "2")
    report = _run("ctest", "--test-dir", tmp_path, "--no-tests=error", "-R", "cpu")
    assert "100% tests passed" in report


@pytest.mark.timeout(300)
@pytest.mark.parametrize("sanitizers", ["address,undefined", pytest.param("thread", marks=pytest.mark.slow)])
def test_the_sanitizers_find_nothing_in_aio(tmp_path: Path, sanitizers: str) -> None:
    if shutil.which("cmake") is None or shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("needs cmake and a C++ compiler")
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    options = [f"-DDS_HF_SANITIZE={sanitizers}", "-DDS_HF_TESTS=ON", "-DCMAKE_CXX_FLAGS_RELEASE=-O0"]
    _run("cmake", "-S", CSRC, "-B", tmp_path, *generator, *options)
    _run("cmake", "--build", tmp_path, "--target", "test_aio")
    report = _run("ctest", "--test-dir", tmp_path, "--no-tests=error", "-R", "aio")
    assert "100% tests passed" in report
