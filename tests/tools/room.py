"""The fast loop of one room: its tests that are not slow, the contract tests that concern it, and mypy of the package.

make test-room ROOM=engine/zero
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"

# What else concerns a room, by the beginning of its name: the shortest tests of ``tests/contract`` that go through it.
CONTRACTS = {
    "config": ["contract/test_bytes.py"],
    "checkpoint": ["contract/test_mesh_checkpoints.py"],
    "engine/checkpoint": ["contract/test_mesh_checkpoints.py"],
    "engine/comm": ["contract/test_collectives_recorded.py"],
    "engine/modules": ["contract/test_behaviour_hf.py"],
    "engine/offload": ["contract/test_offload.py"],
    "engine/ops": ["contract/test_narrow.py"],
    "engine/optim": ["contract/test_collectives_recorded.py", "contract/test_tensorwise.py"],
    "engine/parallel/sequence": ["contract/test_sequence_parity.py"],
    "engine/parallel/tensor": ["contract/test_tensor_parallel.py"],
    "engine/zero": ["contract/test_collectives_recorded.py", "contract/test_bytes.py"],
}


def rooms() -> list[str]:
    """Folders of ``tests`` that mirror a folder of ``ds_hf``."""
    folders = (path.relative_to(TESTS).as_posix() for path in sorted(TESTS.rglob("*")) if path.is_dir())
    return [name for name in folders if (ROOT / "ds_hf" / name / "__init__.py").exists()]


def paths_of(room: str) -> list[str]:
    """Paths for pytest.

    Raises:
        SystemExit: with a sentence, where there is no such room.
    """
    if room not in rooms():
        said = f"{room!r} is no room" if room else "ROOM says which one"
        raise SystemExit(f"{said}: make test-room ROOM=engine/zero, or one of {', '.join(rooms())}")
    contracts = [test for name, tests in CONTRACTS.items() if f"{room}/".startswith(f"{name}/") for test in tests]
    return [f"tests/{name}" for name in [room, *contracts]]


def main(room: str) -> int:
    """Both at once: mypy takes one process, and the tests wait for others half of the time."""
    paths = paths_of(room)
    types = subprocess.Popen([sys.executable, "-m", "mypy"], cwd=ROOT)
    options = ["-q", "-n", "3", "--dist", "worksteal", "-m", "not slow and not gpu"]
    tested = subprocess.run([sys.executable, "-m", "pytest", *options, *paths], cwd=ROOT).returncode
    return types.wait() or tested


if __name__ == "__main__":
    sys.exit(main(sys.argv[1].strip("/") if len(sys.argv) > 1 else ""))
