"""Creating, reusing and refusing the default process group."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from ds_hf.engine.comm import process_group
from ds_hf.engine.comm.discovery import discover
from ds_hf.engine.comm.process_group import DistributedError, Rendezvous, find_rendezvous
from tests.helpers.distributed import free_port, run_distributed, run_torchrun

LAUNCH = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "1234"}


def test_nothing_set_is_one_process() -> None:
    assert find_rendezvous({}) == Rendezvous(0, 1)
    assert find_rendezvous({"WORLD_SIZE": "1"}) == Rendezvous(0, 1)


def test_what_torchrun_sets() -> None:
    assert find_rendezvous(LAUNCH) == Rendezvous(1, 2, "node0", 1234)
    assert find_rendezvous({k: v for k, v in LAUNCH.items() if k != "MASTER_PORT"}, port=7) == Rendezvous(
        1, 2, "node0", 7
    )


def test_arguments_win_over_the_environment() -> None:
    assert find_rendezvous(LAUNCH, rank=3, world_size=4) == Rendezvous(3, 4, "node0", 1234)


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR"])
def test_partial_environment_names_what_is_missing(missing: str) -> None:
    env = {key: value for key, value in LAUNCH.items() if key != missing}
    with pytest.raises(DistributedError, match=f"^{missing} not set.*torchrun"):
        find_rendezvous(env)


def test_all_that_is_missing_is_named_at_once() -> None:
    with pytest.raises(DistributedError, match=r"^RANK, MASTER_ADDR not set"):
        find_rendezvous({"WORLD_SIZE": "2"})


def test_numbers_are_checked() -> None:
    with pytest.raises(DistributedError, match="RANK is 'one'"):
        find_rendezvous({**LAUNCH, "RANK": "one"})
    with pytest.raises(DistributedError, match="RANK is 2 but WORLD_SIZE is 2"):
        find_rendezvous({**LAUNCH, "RANK": "2"})


def test_mpirun_variables_serve_where_torchruns_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "5")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "8")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "1")
    assert process_group.get_local_rank() == 1
    env = {**os.environ, **discover(os.environ), "MASTER_ADDR": "a"}
    assert find_rendezvous(env) == Rendezvous(5, 8, "a", 29500)


def alone() -> list[float]:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    process_group.init_distributed("gloo")
    process_group.init_distributed("gloo")  # a second call is nothing
    tensor = torch.ones(2)
    process_group.all_reduce(tensor)
    process_group.barrier()
    group = process_group.new_group([0])
    process_group.broadcast(tensor, 0, group=group)
    assert (process_group.get_rank(), process_group.get_world_size(), process_group.get_local_rank()) == (0, 1, 0)
    assert process_group.get_world_group().size() == 1
    return tensor.tolist()


def test_one_process_needs_no_environment() -> None:
    assert run_distributed(alone, 1, backend=None) == [[1.0, 1.0]]


def pair() -> float:
    process_group.init_distributed("gloo", timeout=timedelta(seconds=200))
    group = process_group.get_world_group()
    process_group.init_distributed("gloo")
    assert process_group.get_world_group() is group
    tensor = torch.full((1,), float(process_group.get_rank() + 1))
    process_group.all_reduce(tensor)
    return tensor.item()


def test_two_processes_from_the_environment() -> None:
    assert run_distributed(pair, 2, backend=None) == [3.0, 3.0]


def by_url() -> int:
    rank, port = int(os.environ.pop("RANK")), os.environ.pop("MASTER_PORT")
    os.environ.pop("MASTER_ADDR")
    process_group.init_distributed("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    return process_group.get_world_size()


def test_two_processes_by_init_method() -> None:
    assert run_distributed(by_url, 2, backend=None) == [2, 2]


def reuses() -> bool:
    group = torch.distributed.group.WORLD
    process_group.init_distributed("nccl")  # whatever is asked for: there is one already
    return torch.distributed.group.WORLD is group


def test_an_existing_group_is_reused() -> None:
    assert run_distributed(reuses, 1, backend="gloo") == [True]


def unreachable() -> str:
    os.environ.update(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    try:
        process_group.init_distributed("gloo", timeout=timedelta(seconds=1))
    except DistributedError as error:
        return str(error)
    return "no error"


def test_failed_rendezvous_tells_where_it_looked() -> None:
    (text,) = run_distributed(unreachable, 1, backend=None)
    assert "could not create the gloo process group as rank 1 of 2 at 127.0.0.1:" in text
    assert "that every rank was started" in text


def unreachable_url() -> str:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    url = f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises(DistributedError, match=f"as rank 1 of 2 at {url}: "):
        process_group.init_distributed("gloo", timeout=timedelta(seconds=1), init_method=url, rank=1, world_size=2)
    return url


def test_failed_rendezvous_by_init_method_names_it() -> None:
    run_distributed(unreachable_url, 1, backend=None)


def not_there() -> str:
    with pytest.raises(DistributedError, match="dist_init_required=False") as failure:
        process_group.init_distributed(dist_init_required=False)
    with pytest.raises(DistributedError, match="there is no process group yet"):
        process_group.get_world_group()
    return str(failure.value)


def test_group_that_was_promised_and_is_not_there() -> None:
    assert "init_distributed()" in run_distributed(not_there, 1, backend=None)[0]


@pytest.mark.parametrize(("ending", "alive"), [("", "False"), ("raise ValueError('gone wrong')", "True")])
def test_worker_threads_end_before_the_interpreter(ending: str, alive: str) -> None:
    code = (
        "import atexit, torch.distributed as dist\n"
        "atexit.register(lambda: print(dist.is_initialized()))\n"
        "from ds_hf.engine.comm import process_group\n"
        f"process_group.init_distributed('gloo')\n{ending}"
    )
    env = {key: value for key, value in os.environ.items() if key not in LAUNCH}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.stdout.strip() == alive, done.stderr
    assert (done.returncode == 0) == (not ending)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are listed where there is /proc")
def test_threads_of_gloo_end_before_python_does(tmp_path: Path) -> None:
    """One that frees a tensor when the interpreter is gone aborts the process, one run in hundreds."""
    run_torchrun(Path(__file__).with_name("ending_script.py"), str(tmp_path), env={"CUDA_VISIBLE_DEVICES": ""})
    for rank in ("0", "1"):
        assert "gloo" not in (tmp_path / rank).read_text()


class Captured:
    def __init__(self) -> None:
        self.found: list[bool] = []

    def release(self) -> None:
        self.found.append(torch.distributed.is_initialized())


def released() -> list[list[bool]]:
    kept, gone = Captured(), Captured()
    found, lost = kept.found, gone.found
    process_group.release_before_shutdown(kept)
    process_group.release_before_shutdown(gone)
    del gone
    process_group.destroy_process_group()
    return [found, lost]


def test_what_was_captured_is_released_while_the_group_lives() -> None:
    """NCCL destroys no communicator whose collectives are in a CUDA graph."""
    assert run_distributed(released, 1) == [[[True], []]]


def test_an_unknown_host_is_named_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "_RESOLVE_S", 0.0)
    for address in ("no.such.host.invalid", "a" * 300, "x\0y"):
        with pytest.raises(DistributedError, match=r"MASTER_ADDR is .*no known host"):
            process_group._resolve(address)
    process_group._resolve("127.0.0.1")


def test_nccl_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(DistributedError, match="the backend nccl needs a GPU"):
        process_group._local_device({"LOCAL_RANK": "0"})
