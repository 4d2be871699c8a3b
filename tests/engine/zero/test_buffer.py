"""Flat buffers by themselves: where values are when the buffer is gathered, released, held, written to and given up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_hf.engine.comm.mesh import Axis, axis_of
from ds_hf.engine.zero.buffer import BufferState, FlatBuffer, ParamStatus, buffers_of, home_of, logical_shape, unshard
from ds_hf.errors import DsHfError
from tests.helpers.distributed import run_distributed

CPU = torch.device("cpu")
SHAPES = [(3, 5), (20,), (4, 4)]


def values() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(*shape, generator=generator) for shape in SHAPES]


def make(axis: Axis, *, sharded: bool, dtype: torch.dtype = torch.float32, seed: float = 0.0) -> FlatBuffer:
    params = [nn.Parameter(value + seed) for value in values()]
    buffer = FlatBuffer(params, axis, dtype=dtype, device=CPU, sharded=sharded)
    buffer.adopt()
    return buffer


def equal(buffer: FlatBuffer) -> bool:
    return all(torch.equal(param.data, value) for param, value in zip(buffer.params, values(), strict=True))


def on_two() -> None:
    rank, axis = dist.get_rank(), axis_of(None)
    buffer = make(axis, sharded=True, seed=float(rank))  # rank 0's values count
    layout = buffer.layout
    low, high = layout.shard_range(rank)
    assert buffer.state is BufferState.RELEASED
    assert all(param.numel() == 0 for param in buffer.params), "using one is an error"
    assert [logical_shape(param) for param in buffer.params] == list(map(torch.Size, SHAPES))
    assert buffer.nbytes == (high - low) * 4

    buffer.gather()
    assert equal(buffer)
    assert torch.equal(buffer.shard, buffer.full[low:high])
    saved = buffer.params[0].data.t()  # as autograd saves it
    storage = buffer.full.untyped_storage().data_ptr()
    buffer.release()
    assert buffer.full.untyped_storage().nbytes() == 0
    buffer.gather()
    assert torch.equal(saved, values()[0].t()), "filled again in the same storage"
    assert storage != 0
    assert {param.ds_status for param in buffer.params} == {ParamStatus.AVAILABLE}  # type: ignore[attr-defined]

    # held: a release waits for the end of the context
    with unshard([buffer]):
        buffer.release()
        assert buffer.state is BufferState.GATHERED
        with torch.no_grad():
            buffer.params[1].data.fill_(float(rank + 5))
        buffer.write_back(source_rank=1)
    assert buffer.state is BufferState.RELEASED
    buffer.gather()
    assert torch.equal(buffer.params[1].data, torch.full((20,), 6.0)), "rank 1's"

    # the optimizer writes the shard: what is gathered is stale
    buffer.owned(whole=False, fresh=True).fill_(float(rank))
    buffer.refresh()
    assert buffer.state is BufferState.RELEASED
    buffer.gather()
    places = torch.arange(layout.numel) // layout.shard_numel
    for slot, param in zip(layout.slots, buffer.params, strict=True):
        assert torch.equal(param.data, slot.of(places.float()))

    buffer.detach()
    assert home_of(buffer.params[0]) is None
    assert all(param.shape == shape for param, shape in zip(buffer.params, SHAPES, strict=True))


def test_a_buffer_divided_over_two_processes() -> None:
    run_distributed(on_two, 2)


def test_one_process_copies_nothing() -> None:
    buffer = make(Axis(None, 0, 1), sharded=True)
    assert buffer.aliased
    assert buffer.state is BufferState.RELEASED
    buffer.gather()
    assert equal(buffer)
    assert buffer.full.data_ptr() == buffer.shard.data_ptr()
    assert buffer.nbytes == buffer.layout.numel * 4


def test_replicated_parameters_are_views_from_the_beginning() -> None:
    buffer = make(Axis(None, 0, 1), sharded=False)
    assert equal(buffer)
    buffer.release()
    assert equal(buffer), "nothing is released"
    buffer.full.zero_()
    assert all(not param.any() for param in buffer.params)
    assert buffers_of(buffer.params) == [], "only divided ones are gathered"


def test_values_come_in_the_widest_dtype() -> None:
    params = [nn.Parameter(value) for value in values()]
    buffer = FlatBuffer(params, Axis(None, 0, 1), dtype=torch.bfloat16, device=CPU, sharded=False)
    exact = buffer.adopt()
    assert exact.dtype is torch.float32
    for slot, value, param in zip(buffer.layout.slots, values(), params, strict=True):
        assert torch.equal(slot.of(exact), value)
        assert torch.equal(param.data, value.bfloat16())


def test_a_parameter_that_was_moved_is_found() -> None:
    buffer = make(Axis(None, 0, 1), sharded=False)
    buffer.check_views()
    buffer.params[2].data = buffer.params[2].data.clone()
    with pytest.raises(DsHfError, match=r"a parameter of shape \(4, 4\) no longer lives where the engine keeps it"):
        buffer.check_views()


def test_another_buffer_takes_parameters_over() -> None:
    first = make(Axis(None, 0, 1), sharded=True)
    second = FlatBuffer(first.params[:1], Axis(None, 0, 1), dtype=torch.float32, device=CPU, sharded=True)
    second.adopt()
    second.gather()
    first.release(force=True)
    assert torch.equal(first.params[0].data, values()[0]), "the first one does not touch it any more"
    assert first.params[1].numel() == 0
    homes: list[Any] = [home_of(param) for param in first.params]
    assert [home.buffer for home in homes] == [second, first, first]
