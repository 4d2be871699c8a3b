"""``deepspeed.launcher``: what schedulers' scripts import, and the per-host starter that they run."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_resource_functions(tmp_path: Path) -> None:
    from deepspeed.launcher import constants, runner

    (tmp_path / "hosts").write_text("a slots=2\nb slots=3\n")
    pool = runner.fetch_hostfile(str(tmp_path / "hosts"))
    assert dict(pool) == {"a": 2, "b": 3}
    assert runner.fetch_hostfile(str(tmp_path / "none")) is None
    assert dict(runner.parse_inclusion_exclusion(pool, "b:2,0@a", "")) == {"a": [0, 1], "b": [0, 2]}
    assert dict(runner.parse_resource_filter({"a": [0, 1], "b": [0]}, exclude_str="a:0@b")) == {"a": [1]}
    assert runner.parse_resource_filter({"a": [0, 1]}, exclude_str="a") == {}
    assert runner._parse_hostfile(["a slots=2\n", "\n", "# b slots=1\n", "c slots=4\n"]) == {"a": 2, "c": 4}
    with pytest.raises(ValueError, match="no slot 7"):  # DeepSpeed raises ValueError, too
        runner.parse_resource_filter({"a": [0]}, include_str="a:7")
    assert (runner.DLTS_HOSTFILE, runner.DEEPSPEED_ENVIRONMENT_NAME) == ("/job/hostfile", ".deepspeed_env")
    assert (constants.PDSH_LAUNCHER, constants.SLURM_LAUNCHER) == ("pdsh", "slurm")
    assert json.loads(base64.urlsafe_b64decode(runner.encode_world_info({"a": [0]}))) == {"a": [0]}


def launch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/ds_hf/compat:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "deepspeed.launcher.launch", *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


_SAYS = """
import os, sys
os.write(1, f"{os.environ['RANK']} {os.environ['WORLD_SIZE']} {sys.argv[1:]}\\n".encode())  # at once, to a shared pipe
"""


@pytest.mark.slow
def test_the_starter_of_one_host(tmp_path: Path) -> None:
    from deepspeed.launcher.runner import encode_world_info

    from tests.helpers.distributed import free_port

    (tmp_path / "s.py").write_text(_SAYS)
    world = encode_world_info({"localhost": [0, 1]})
    done = launch(
        tmp_path, f"--world_info={world}", "--node_rank=0", f"--master_port={free_port()}", "s.py", "--x", "1"
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{n} 2 ['--local_rank={n}', '--x', '1']" for n in range(2)]


@pytest.mark.parametrize("world", ["None", "e30=", "eyJhIjpbXX0=", "eyItb1giOlswXX0="])
def test_worlds_that_are_none(world: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ds_hf.launcher.one_host import main

    assert main([f"--world_info={world}", "s.py"]) == 2
    assert "--world_info" in capsys.readouterr().err
