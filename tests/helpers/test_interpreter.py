"""``python`` and ``torchrun`` of tests answer as real processes do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.distributed import DistributedFailure
from tests.helpers.interpreter import python, torchrun

CASES = {
    "print": "import sys; print('out', sys.argv, __name__); print('err', file=sys.stderr)",
    "code": "import sys; sys.exit(3)",
    "words": "import sys; sys.exit('in words')",
    "nothing": "raise SystemExit",
    "modules": "import sys; class_ = type('A', (), {}); print(sys.modules['__main__'].class_ is class_)",
    "end": "import atexit, threading, time; atexit.register(lambda: print('last'))\n"
    "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start(); print('first')",
    "places": "import os, sys; print(os.getcwd(), os.environ['ONE'], 'RANK' in os.environ)\n"
    "print(sys.path[0] in ('', os.getcwd()))",
    "children": "import subprocess, sys; subprocess.run(['sh', '-c', 'echo child; echo wrong >&2'])",
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_as_an_interpreter(case: str, tmp_path: Path) -> None:
    words, env = ["-c", CASES[case], "a b", "--c"], {**os.environ, "ONE": "1"}
    wanted = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=tmp_path, env=env, check=False
    )
    found = python(*words, cwd=tmp_path, env=env)
    assert (found.returncode, found.stdout, found.stderr) == (wanted.returncode, wanted.stdout, wanted.stderr)


def test_scripts_and_modules(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, beside\nprint(beside.VALUE, sys.argv[1:], __name__, __file__)\nraise KeyError('x')\n"
    )
    found = python(script, "a")
    assert (found.returncode, found.stdout) == (1, f"7 ['a'] __main__ {script}\n")
    assert found.stderr.startswith("Traceback (most recent call last):\n")
    assert found.stderr.endswith(f"File \"{script}\", line 3, in <module>\n    raise KeyError('x')\nKeyError: 'x'\n")
    assert python("-m", "beside", cwd=tmp_path).returncode == 0


def test_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "print(f'{os.environ[\"RANK\"]} of {dist.get_world_size()} {sys.argv[1:]} {os.environ[\"ONE\"]}\\n', end='')\n"
        "if sys.argv[1] == 'fail' and dist.get_rank() == 1: raise ValueError('on purpose')\n"
        "dist.barrier(); dist.destroy_process_group()\n"
    )
    said = torchrun(script, "well", env={"ONE": "1"})
    assert sorted(said.splitlines()) == ["0 of 2 ['well'] 1", "1 of 2 ['well'] 1"]
    with pytest.raises(DistributedFailure, match="ValueError: on purpose"):
        torchrun(script, "fail", env={"ONE": "1"})
