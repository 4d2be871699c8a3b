"""When a collective goes to NCCL itself, and what NCCL is given then.

NCCL is played by functions that note their arguments, by a C library, and between processes by gloo;
tests/gpu/test_nccl.py has the real one.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_hf.engine.dist import collectives, nccl
from ds_hf.engine.dist.mesh import Axis
from ds_hf.engine.dist.nccl import Communicator
from tests.gpu import test_nccl as on_gpus
from tests.helpers.distributed import run_distributed

STREAM = 0x7F99_8877_6655
COMMUNICATOR = 0x7F11_2233_4455
DTYPES = {torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9}


class OnGpu:
    """What ``of`` looks at of a tensor on a GPU."""

    is_cuda = True

    def __init__(self, dtype: torch.dtype = torch.float32, index: int = 0) -> None:
        self.dtype, self.index = dtype, index

    def get_device(self) -> int:
        return self.index


def noting(**results: int) -> tuple[Any, list[tuple[Any, ...]]]:
    """A library that notes what is called, and the notes. ``results`` are of functions that fail."""
    notes: list[tuple[Any, ...]] = []

    def function(name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            notes.append((name, *args))
            if name in nccl._TEXTS:
                return {"ncclGetErrorString": b"invalid usage", "ncclGetLastError": b"odd count\n"}[name]
            return results.get(name, 0)

        return call

    return SimpleNamespace(**{name: function(name) for name in nccl._SIGNATURES}), notes


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
    for name in nccl._SWITCHES:
        monkeypatch.delenv(name, raising=False)
    nccl._library.cache_clear()
    yield
    nccl._library.cache_clear()


# -- what goes to NCCL itself -------------------------------------------------------------------------------------


class Backend:
    """Plays ``dist.ProcessGroupNCCL``, whose communicator is ``pointer``."""

    def __init__(self, pointer: int = COMMUNICATOR, blocking: int = -(2**31)) -> None:
        self.pointer = pointer
        self.aborted = False
        self.options = SimpleNamespace(config=SimpleNamespace(blocking=blocking))

    def _comm_ptr(self) -> int:
        if self.aborted:
            raise dist.DistBackendError("NCCL communicator was aborted")
        return self.pointer

    @staticmethod
    def get_runtime_nccl_version() -> tuple[int, ...]:
        return 2, 28, 7


class Group:
    """Plays a process group."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def _get_backend(self, device: torch.device) -> Any:
        assert device.type == "cuda"
        if self.backend is None:
            raise RuntimeError("No backend type associated with device type cuda")
        return self.backend

    def size(self) -> int:
        return 2


class World:
    """A process with NCCL and ``backend``'s group, of which torch knows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, version: int = 22807) -> None:
        self._patch = monkeypatch
        library, self.notes = noting()

        def get_version(address: int) -> int:
            ctypes.c_int.from_address(address).value = version
            return 0

        library.ncclGetVersion = get_version
        self.library = library
        monkeypatch.setattr(dist, "ProcessGroupNCCL", Backend, raising=False)
        monkeypatch.setattr(nccl, "_torchs_symbols", lambda: self.library)

    def axis(self, backend: Any) -> Axis:
        group: Any = Group(backend)
        self._patch.setitem(nccl._world.pg_map, group, ("nccl", None))
        return Axis(group, 0, 2)


def of(axis: Axis, *tensors: Any) -> Communicator | None:
    return nccl.of(axis, *tensors)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_tensors_on_the_current_gpu(world: World) -> None:
    axis = world.axis(Backend())
    for dtype in DTYPES:
        assert of(axis, OnGpu(dtype)) is not None
    assert of(axis, OnGpu(torch.bfloat16), OnGpu(torch.float32)) is of(axis, OnGpu())
    for others in ([torch.zeros(1)], [OnGpu(torch.int64)], [OnGpu(), OnGpu(torch.bool)], [OnGpu(index=1)]):
        assert of(axis, *others) is None
        assert of(axis, OnGpu(), *others) is None


def test_this_torch_has_no_nccl_for_the_cpu() -> None:
    if not torch.cuda.is_available():
        assert nccl._library() is None


def test_the_first_collective_is_torchs(world: World) -> None:
    backend = Backend(pointer=0)
    axis = world.axis(backend)
    assert of(axis, OnGpu()) is None
    backend.pointer = COMMUNICATOR
    found = of(axis, OnGpu())
    assert found is not None
    assert found._present == COMMUNICATOR


def test_a_communicator_that_is_gone(world: World) -> None:
    backend = Backend()
    axis = world.axis(backend)
    found = of(axis, OnGpu())
    assert found is not None
    backend.pointer = COMMUNICATOR + 64
    assert of(axis, OnGpu()) is found
    assert found._present == COMMUNICATOR + 64, "no pointer is kept"
    backend.aborted = True
    assert of(axis, OnGpu()) is None
    assert found._present == 0


def test_a_group_that_is_gone(world: World) -> None:
    axis = world.axis(Backend())
    assert of(axis, OnGpu()) is not None
    del nccl._world.pg_map[axis.group]  # type: ignore[arg-type]
    assert of(axis, OnGpu()) is None
    assert of(Axis(None, 0, 2), OnGpu()) is None, "no default group"
    assert of(world.axis(Backend()), OnGpu()) is not None, "another group"


def test_groups_are_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(nccl._communicators)
    with monkeypatch.context() as patch:
        world = World(patch)
        axis = world.axis(Backend())
        of(axis, OnGpu())
        assert len(nccl._communicators) == before + 1
    del axis, world, patch
    assert len(nccl._communicators) == before


def test_other_backends(world: World) -> None:
    class Wrapper(Backend):
        """Checks collectives, say."""

    for backend in (None, object(), Wrapper()):
        assert of(world.axis(backend), OnGpu()) is None


@pytest.mark.parametrize("name", nccl._SWITCHES)
def test_switches_of_torch(world: World, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    assert of(world.axis(Backend()), OnGpu()) is None
    monkeypatch.setenv(name, "0")
    assert of(world.axis(Backend()), OnGpu()) is not None


def test_communicators_that_do_not_block(world: World) -> None:
    assert of(world.axis(Backend(blocking=0)), OnGpu()) is None
    assert of(world.axis(Backend(blocking=1)), OnGpu()) is not None


def test_debug_level(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "get_debug_level", lambda: nccl.DebugLevel.DETAIL)
    assert of(world.axis(Backend()), OnGpu()) is None
    monkeypatch.setattr(nccl, "get_debug_level", lambda: nccl.DebugLevel.INFO)
    assert of(world.axis(Backend()), OnGpu()) is not None


@pytest.mark.parametrize("name", nccl._SIGNATURES)
def test_missing_symbols(world: World, name: str) -> None:
    delattr(world.library, name)
    assert of(world.axis(Backend()), OnGpu()) is None


def test_a_library_that_is_not_loaded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise OSError("cannot open shared object file")

    monkeypatch.setattr(nccl, "_torchs_symbols", missing)
    assert of(world.axis(Backend()), OnGpu()) is None


@pytest.mark.parametrize("version", [22806, 22900, 2807])
def test_another_version_of_nccl(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    assert of(World(monkeypatch, version).axis(Backend()), OnGpu()) is None


def test_a_torch_that_does_not_tell_its_version(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Backend, "get_runtime_nccl_version")
    assert of(world.axis(Backend()), OnGpu()) is None


# -- what NCCL is given -------------------------------------------------------------------------------------------


def communicator(**results: int) -> tuple[Communicator, list[tuple[Any, ...]]]:
    library, notes = noting(**results)
    found = Communicator(library, lambda: COMMUNICATOR, 2)
    assert found.ready()
    return found, notes


@pytest.mark.parametrize("dtype", DTYPES)
def test_arguments(dtype: torch.dtype) -> None:
    full, shard = torch.zeros(6, dtype=dtype), torch.zeros(3, dtype=dtype)
    direct, notes = communicator()
    direct.all_gather(full, shard)
    direct.reduce_scatter(shard, full, average=False)
    direct.reduce_scatter(shard, full, average=True)
    to, code = (COMMUNICATOR, STREAM), DTYPES[dtype]
    assert notes == [
        ("ncclAllGather", shard.data_ptr(), full.data_ptr(), 3, code, *to),
        ("ncclReduceScatter", full.data_ptr(), shard.data_ptr(), 3, code, 0, *to),
        ("ncclReduceScatter", full.data_ptr(), shard.data_ptr(), 3, code, 4, *to),
    ]


def several() -> tuple[list[Tensor], list[Tensor]]:
    shards = [torch.zeros(3), torch.zeros(5, dtype=torch.bfloat16)]
    return [shard.new_zeros(2 * shard.numel()) for shard in shards], shards


def test_a_group_of_calls() -> None:
    fulls, shards = several()
    direct, notes = communicator()
    direct.all_gather_each(fulls, shards)
    assert [note[0] for note in notes] == ["ncclGroupStart", "ncclAllGather", "ncclAllGather", "ncclGroupEnd"]
    assert [note[3:5] for note in notes[1:3]] == [(3, 7), (5, 9)]


@pytest.mark.parametrize("failing", ["ncclGroupStart", "ncclAllGather", "ncclGroupEnd"])
def test_a_group_that_fails_is_ended(failing: str) -> None:
    direct, notes = communicator(**{failing: 5})
    with pytest.raises(dist.DistBackendError, match=r"^NCCL group of all-gathers: invalid usage: odd count$"):
        direct.all_gather_each(*several())
    names = [note[0] for note in notes]
    assert names.count("ncclGroupEnd") == (failing != "ncclGroupStart")
    assert names.count("ncclAllGather") == {"ncclGroupStart": 0, "ncclAllGather": 1, "ncclGroupEnd": 2}[failing]
    assert ("ncclGetErrorString", 5) in notes


def test_a_group_is_ended_after_an_error_of_ours() -> None:
    fulls, shards = several()
    direct, notes = communicator()
    with pytest.raises(AssertionError):
        direct.all_gather_each(fulls, [shards[0], shards[1].float()])
    assert [note[0] for note in notes] == ["ncclGroupStart", "ncclAllGather", "ncclGroupEnd"]


def test_errors() -> None:
    full, shard = torch.zeros(6), torch.zeros(3)
    direct, _ = communicator(ncclAllGather=4, ncclReduceScatter=1)
    with pytest.raises(RuntimeError, match=r"^NCCL all-gather: invalid usage: odd count$"):
        direct.all_gather(full, shard)
    with pytest.raises(dist.DistBackendError, match=r"^NCCL reduce-scatter: invalid usage"):
        direct.reduce_scatter(shard, full, average=True)


def test_calls_that_are_still_in_progress() -> None:
    direct, notes = communicator(ncclAllGather=7, ncclGroupEnd=7)
    states = [7, 7, 0]

    def state(pointer: int, address: int) -> int:
        assert pointer == COMMUNICATOR
        ctypes.c_int.from_address(address).value = states.pop(0)
        return 0

    direct._library.ncclCommGetAsyncError = state
    direct.all_gather_each(*several())
    assert not states
    assert [note[0] for note in notes].count("ncclAllGather") == 2
    states[:] = [7, 6]
    with pytest.raises(dist.DistBackendError):
        direct.all_gather(torch.zeros(6), torch.zeros(3))


@pytest.mark.parametrize(
    ("full", "shard"),
    [
        (torch.zeros(6), torch.zeros(4)),
        (torch.zeros(6), torch.zeros(3, dtype=torch.float64)),
        (torch.zeros(12)[::2], torch.zeros(3)),
    ],
)
def test_tensors_that_do_not_fit(full: Tensor, shard: Tensor) -> None:
    direct, notes = communicator()
    with pytest.raises(AssertionError):
        direct.all_gather(full, shard)
    with pytest.raises(AssertionError):
        direct.reduce_scatter(shard, full, average=False)
    assert not notes


SOURCE = """
#include <stddef.h>
#include <stdio.h>
static char last[200] = "nothing";
int ncclGetVersion(int *version) { *version = 22807; return 0; }
int ncclGroupStart(void) { return 0; }
int ncclGroupEnd(void) { return 0; }
int ncclCommGetAsyncError(void *comm, int *state) { *state = 0; return 0; }
const char *ncclGetErrorString(int result) { return "invalid argument"; }
const char *ncclGetLastError(void *comm) { return last; }
int ncclAllGather(const void *from, void *to, size_t count, int type, void *comm, void *stream) {
    snprintf(last, sizeof last, "%p %p %zu %d %p %p", from, to, count, type, comm, stream);
    return 4;
}
int ncclReduceScatter(const void *from, void *to, size_t count, int type, int op, void *comm, void *stream) {
    snprintf(last, sizeof last, "%p %p %zu %d %d %p %p", from, to, count, type, op, comm, stream);
    return 4;
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_arguments_arrive_in_c(tmp_path: Path) -> None:
    """The addresses whole, through the declared signatures."""
    (tmp_path / "nccl.c").write_text(SOURCE)
    path = tmp_path / "libnccl.so.2"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(path), str(tmp_path / "nccl.c")], check=True)
    direct = Communicator(nccl._declared(ctypes.CDLL(str(path))), lambda: COMMUNICATOR, 2)
    assert direct.ready()
    full, shard = torch.zeros(6), torch.zeros(3)
    to = f"{COMMUNICATOR:#x} {STREAM:#x}"
    with pytest.raises(dist.DistBackendError) as failure:
        direct.all_gather(full, shard)
    assert str(failure.value) == (
        f"NCCL all-gather: invalid argument: {shard.data_ptr():#x} {full.data_ptr():#x} 3 7 {to}"
    )
    with pytest.raises(dist.DistBackendError) as failure:
        direct.reduce_scatter(shard, full, average=True)
    assert str(failure.value) == (
        f"NCCL reduce-scatter: invalid argument: {full.data_ptr():#x} {shard.data_ptr():#x} 3 7 4 {to}"
    )
    direct._library.ncclAllGather = lambda *args: 0
    direct.all_gather_each([full, full], [shard, shard])


# -- between processes --------------------------------------------------------------------------------------------


def library_over_gloo(group: dist.ProcessGroup) -> Any:
    """NCCL's functions for memory of the CPU: they see addresses and no tensors."""
    library, _ = noting()
    dtypes = {code: dtype for dtype, code in DTYPES.items()}

    def at(address: int, numel: int, dtype: torch.dtype) -> Tensor:
        memory = (ctypes.c_char * (numel * dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=dtype)

    def gathered(source: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(source) for _ in range(2)]
        dist.all_gather(parts, source.clone(), group=group)
        return parts

    def all_gather(source: int, target: int, count: int, code: int, pointer: int, stream: int) -> int:
        assert (pointer, stream) == (COMMUNICATOR, STREAM)
        parts = gathered(at(source, count, dtypes[code]))
        at(target, 2 * count, dtypes[code]).copy_(torch.cat(parts))
        return 0

    def reduce_scatter(source: int, target: int, count: int, code: int, op: int, pointer: int, stream: int) -> int:
        assert (pointer, stream) == (COMMUNICATOR, STREAM)
        parts = gathered(at(source, 2 * count, dtypes[code]))
        total = sum(part.chunk(2)[group.rank()] for part in parts)
        at(target, count, dtypes[code]).copy_(total * 0.5 if op == 4 else total)
        return 0

    library.ncclAllGather, library.ncclReduceScatter = all_gather, reduce_scatter
    return library


def play(first: int = COMMUNICATOR) -> None:
    """Tensors pass for a GPU's, and gloo for NCCL, whose communicator is ``first`` at a group's first collective."""
    original = nccl.of

    def opened(group: dist.ProcessGroup) -> Communicator:
        pointers = [first]
        pointer = lambda: pointers.pop() if pointers else COMMUNICATOR  # noqa: E731
        return Communicator(library_over_gloo(group), pointer, group.size())

    def of(axis: Axis, *tensors: Tensor) -> Communicator | None:
        return original(axis, *(OnGpu(tensor.dtype) for tensor in tensors))  # type: ignore[arg-type]

    nccl._open, nccl.of = opened, of  # type: ignore[assignment]
    torch._C._cuda_getDevice = lambda: 0
    torch._C._cuda_getCurrentRawStream = lambda index: STREAM  # type: ignore[attr-defined]
    collectives._is_nccl = lambda tensor, axis: nccl.of(axis, tensor) is not None


def played(function: Callable[..., Any], *args: Any, first: int = COMMUNICATOR) -> Any:
    play(first)
    return function(*args)


def test_the_same_bits() -> None:
    run_distributed(played, 2, on_gpus.compare_all, "cpu", timeout=120)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_training_is_the_same(stage: int) -> None:
    for direct, possible in run_distributed(played, 2, on_gpus.train_both_ways, stage, "cpu", timeout=120):
        assert direct == possible >= 3


def test_groups_come_and_go(tmp_path: Path) -> None:
    found = run_distributed(played, 2, on_gpus.come_and_go, str(tmp_path), "cpu", "gloo", first=0, timeout=120)
    assert found == [[False, True] * 6] * 2


def test_time_of_the_host() -> None:
    for found in run_distributed(played, 2, on_gpus.host_microseconds, "cpu", timeout=120):
        assert len(found) == 3
