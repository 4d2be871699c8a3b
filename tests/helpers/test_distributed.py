"""The helper itself: results by rank, the first failure, time limits, no leftovers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.helpers.distributed import NICE, DistributedFailure, run_distributed, run_torchrun


def _sum_of_ranks(scale: float) -> tuple[int, float]:
    import torch
    import torch.distributed as dist

    value = torch.tensor(float(dist.get_rank()) * scale)
    dist.all_reduce(value)
    return dist.get_rank(), value.item()


def _fail_on(rank: int) -> None:
    import torch.distributed as dist

    if dist.get_rank() == rank:
        raise ValueError("the reason")
    dist.barrier()


def _hang_after_starting_a_child(pid_file: str) -> None:
    if os.environ["RANK"] == "0":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(pid_file).write_text(str(child.pid))
    time.sleep(600)


def _die() -> None:
    os._exit(7)


def _late_for_the_store() -> int:
    from torch.distributed import TCPStore

    global store  # as that of a process group, it lives as long as the process
    rank = int(os.environ["RANK"])
    store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, is_master=rank == 0)
    if rank == 1:
        time.sleep(1)  # rank 0 has long returned
        return rank * store.add("key", 1)  # asks, and waits for the answer
    return rank


def _skip() -> None:
    pytest.skip("not here")


def test_returns_results_by_rank() -> None:
    assert run_distributed(_sum_of_ranks, 3, 2.0) == [(0, 6.0), (1, 6.0), (2, 6.0)]


def test_spawned_ranks_work_too() -> None:
    assert run_distributed(_sum_of_ranks, 2, scale=1.0, start_method="spawn") == [(0, 1.0), (1, 1.0)]


def test_reports_the_rank_that_failed() -> None:
    with pytest.raises(DistributedFailure, match=r"rank 1 of 2 raised: ValueError: the reason(.|\n)*_fail_on"):
        run_distributed(_fail_on, 2, 1)


def test_reports_a_rank_that_died() -> None:
    with pytest.raises(DistributedFailure, match="died: exit code 7"):
        run_distributed(_die, 1)


def test_time_limit_shows_stacks_and_kills_everything(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with pytest.raises(DistributedFailure, match=r"not finished after 6 s(.|\n)*_hang_after_starting_a_child"):
        run_distributed(_hang_after_starting_a_child, 2, str(pid_file), timeout=6, patience=1, backend=None)
    pid = int(pid_file.read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_rank_that_is_done_stays_until_its_peers_are() -> None:
    assert run_distributed(_late_for_the_store, 2, backend=None) == [0, 1]


def test_skip_inside_a_rank_skips_the_test() -> None:
    with pytest.raises(pytest.skip.Exception, match="not here"):
        run_distributed(_skip, 1)


@pytest.mark.slow
def test_torchrun_time_limit_kills_the_workers(tmp_path: Path) -> None:
    script = tmp_path / "hang.py"
    script.write_text(
        "import os, time\nopen(f'{os.environ[\"RANK\"]}.pid', 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    with pytest.raises(DistributedFailure, match="not finished after 12 s"):
        run_torchrun(script, world_size=2, timeout=12, patience=1, cwd=tmp_path)
    pids = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


def test_torchrun_returns_the_output(tmp_path: Path) -> None:
    script = tmp_path / "hello.py"
    script.write_text("import os, sys\nsys.stdout.write(f'hello from {os.environ[\"RANK\"]}\\n')\n")  # in one piece
    output = run_torchrun(script, world_size=2)
    assert "hello from 0" in output
    assert "hello from 1" in output


def urgency() -> list[int]:
    import torch.distributed as dist

    dist.new_group([0, 1])
    tasks = [task for task in Path("/proc/self/task").iterdir() if (task / "comm").read_text() == "gloo_tcp_loop\n"]
    return [os.getpriority(os.PRIO_PROCESS, 0), *(os.getpriority(os.PRIO_PROCESS, int(task.name)) for task in tasks)]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads have names on Linux")
@pytest.mark.skipif(torch.__version__ < "2.12", reason="gloo gives its threads no names")
def test_threads_that_wait_for_sockets_leave_the_cores_to_others() -> None:
    for first, *others in run_distributed(urgency, 2):
        assert others
        assert set(others) == {first + NICE}
