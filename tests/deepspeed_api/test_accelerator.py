"""The accelerator of this machine, and the CPU one everywhere."""

from __future__ import annotations

import gc
import mmap
import time

import pytest
import torch

from ds_hf.deepspeed_api.accelerator import CpuAccelerator, get_accelerator


def test_the_same_object_each_time() -> None:
    assert get_accelerator() is get_accelerator()
    assert get_accelerator().kind == ("cuda" if torch.cuda.is_available() else "cpu")


def test_cpu_device() -> None:
    cpu = CpuAccelerator()
    assert (cpu.device_name(), cpu.device_name(1), cpu.current_device_name()) == ("cpu", "cpu", "cpu")
    assert (cpu.device_count(), cpu.is_available()) == (1, True)
    assert torch.zeros(2, device=cpu.current_device()).device.type == "cpu"  # an index would name an accelerator
    assert cpu.is_bf16_supported()
    assert cpu.on_accelerator(torch.ones(1))
    assert torch.float32 in cpu.supported_dtypes()


def test_cpu_random_state_round_trip() -> None:
    cpu = CpuAccelerator()
    cpu.manual_seed(11)
    assert cpu.initial_seed() == 11
    state = cpu.get_rng_state()
    first = torch.rand(3)
    cpu.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)


def test_cpu_streams_and_events() -> None:
    cpu = CpuAccelerator()
    start, end = cpu.Event(enable_timing=True), cpu.Event(enable_timing=True)
    with cpu.stream(cpu.Stream()), cpu.device(0):
        began = time.monotonic()
        start.record(cpu.current_stream())
        time.sleep(0.02)
        end.record()
    cpu.synchronize()
    assert end.query()
    assert 15 < start.elapsed_time(end) <= (time.monotonic() - began) * 1e3


def test_cpu_memory_is_that_of_the_process_and_the_machine() -> None:
    cpu = CpuAccelerator()
    gc.collect()
    before = cpu.memory_allocated()
    # Pages straight from the kernel: a tensor may get memory that an earlier test's allocator kept resident.
    with mmap.mmap(-1, 64 * 2**20) as block:
        block.write(bytes(len(block)))
        assert cpu.memory_allocated() - before >= 60 * 2**20
        assert cpu.max_memory_allocated() >= len(block)
    assert 0 < cpu.available_memory() <= cpu.total_memory()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_device() -> None:
    cuda = get_accelerator()
    assert cuda.current_device_name() == f"cuda:{torch.cuda.current_device()}"
    assert cuda.device_name(0) == "cuda:0"
    before = cuda.memory_allocated()
    block = torch.ones(2**20, device="cuda")
    assert cuda.memory_allocated() - before >= block.numel() * 4
    assert cuda.available_memory() <= cuda.total_memory()
    cuda.synchronize()
