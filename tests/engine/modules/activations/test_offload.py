"""Inputs of checkpointed functions in host memory: the same numbers, and what is alive in between."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_hf.engine.modules.activations import arena as arena_module
from ds_hf.engine.modules.activations.arena import Arena
from ds_hf.engine.modules.activations.attach import Offloading
from ds_hf.engine.modules.activations.offload import ActivationOffload
from ds_hf.engine.offload import memory
from ds_hf.errors import OffloadError
from tests.helpers.live_bytes import LiveBytes, lies_in

BLOCKS, ROWS, WIDTH = 6, 2048, 16
NBYTES = ROWS * WIDTH * 4
WEIGHTS_NBYTES = BLOCKS * 4 * (2 * 2 * WIDTH * WIDTH + 3 * WIDTH)


class Block(nn.Module):
    """Keeps five times its input for backward, unless it is checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def blocks() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(BLOCKS))


def offload(**more: Any) -> ActivationOffload:
    options = {"least_nbytes": 1, "in_flight_nbytes": 0, "alike": BLOCKS, **more}
    return ActivationOffload(torch.device("cpu"), **options)


def run(layers: nn.ModuleList, through: Callable[..., Any], *, reentrant: bool = False, **more: Any) -> list[Tensor]:
    """Loss, the input's gradient and the parameters'."""
    torch.manual_seed(1)
    start = torch.randn(ROWS, WIDTH, requires_grad=True)
    x = start * 1.0
    for layer in layers:
        x = through(layer, x, use_reentrant=reentrant)
    loss = x.square().mean()
    loss.backward(**more)
    grads = [p.grad.clone() for p in layers.parameters() if p.grad is not None]
    layers.zero_grad()
    assert start.grad is not None
    return [loss.detach(), start.grad, *grads]


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
@pytest.mark.parametrize("in_flight", [0, 3 * NBYTES, 100 * NBYTES])
def test_the_numbers_are_those_without(reentrant: bool, in_flight: int) -> None:
    layers, moved = blocks(), offload(in_flight_nbytes=in_flight)
    plain = run(layers, checkpoint, reentrant=reentrant)
    for _ in range(3):
        found = run(layers, Offloading(checkpoint, moved), reentrant=reentrant)
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert moved.kept_nbytes == 3 * BLOCKS * NBYTES
    assert moved.arena.nbytes == BLOCKS * NBYTES  # asked for once


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
def test_live_bytes(reentrant: bool) -> None:
    """After forward one input is left of all; in backward one more comes up, and the peak is lower by the others."""
    layers, found = blocks(), {}
    for name in ("plain", "offload"):
        moved = offload()
        through = Offloading(checkpoint, moved) if name == "offload" else checkpoint
        moved.arena.take(BLOCKS * NBYTES, alike=1, what="all of them")
        whole = moved.arena._pieces[0].memory
        live = LiveBytes(lambda tensor, whole=whole: not lies_in(tensor, whole))
        with live:
            x = torch.ones(ROWS, WIDTH, requires_grad=True) * 1.0
            for layer in layers:
                x = through(layer, x, use_reentrant=reentrant)
            loss = x.mean()
            del x
            gc.collect()
            after, live.peak = live.now(), 0
            loss.backward()
            found[name] = (after, live.peak)
            del loss
            gc.collect()
            assert live.now() <= 2 * WEIGHTS_NBYTES + 64, "nothing is left but the weights and their gradients"
        layers.zero_grad()
    saved = (BLOCKS - 1) * NBYTES
    assert abs(found["plain"][0] - found["offload"][0] - saved) < 0.02 * saved
    assert found["plain"][1] - found["offload"][1] >= (BLOCKS - 3) * NBYTES


def test_views_strides_and_overlaps() -> None:
    """What is saved comes back with the strides that it had; what shows values twice stays."""
    moved = offload()
    base = torch.randn(4, 8, 16)
    for view in (base[1:3], base[:, ::2], base.transpose(0, 2), base[..., 3], base.view(-1)[5:]):
        back = moved.fetch(moved.save(view))
        assert back.stride() == view.stride()
        assert torch.equal(back, view)
    copies = [view.clone() for view in (base[1:3], base[:, ::2], base.transpose(0, 2), base[..., 3])]
    saved = []
    for view in (base[1:3], base[:, ::2], base.transpose(0, 2), base[..., 3]):
        saved.append(moved.save(view.detach()))
    strides = [each.stride for each in saved]
    del view
    base.add_(1)  # the original is not what was saved any more
    for each, values, stride in zip(saved, copies, strides, strict=True):
        back = moved.fetch(each)
        assert back.stride() == stride
        assert torch.equal(back, values)
    assert not moved.takes(torch.ones(1, 8).expand(4, 8))
    assert not moved.takes(torch.arange(9.0).as_strided((4, 3), (2, 1)))
    assert moved.takes(torch.ones(4, 8)[:, ::2])


def test_what_stays() -> None:
    moved = offload(least_nbytes=1024)
    weight = nn.Parameter(torch.ones(64, 64))
    assert not moved.takes(weight)
    assert not moved.takes(weight.view(-1))
    assert not moved.takes(torch.ones(255))
    assert moved.takes(torch.ones(256))


def test_an_input_of_every_block_has_one_copy() -> None:
    """As an encoder's states in a decoder. It is alive all the time, so it does not come up again either."""
    moved, through = offload(), Offloading(checkpoint, moved_of := offload())
    del moved
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Bilinear(WIDTH, WIDTH, WIDTH) for _ in range(3))
    states = (torch.randn(ROWS, WIDTH, requires_grad=True)) * 1.0

    def both(through: Callable[..., Any]) -> list[Tensor]:
        x = torch.ones(ROWS, WIDTH, requires_grad=True) * 1.0
        for layer in layers:
            x = through(layer, x, states.view_as(states), use_reentrant=False)
        x.mean().backward(retain_graph=True)
        grads = [p.grad.clone() for p in layers.parameters() if p.grad is not None]
        layers.zero_grad()
        return grads

    plain = both(checkpoint)
    found = both(through)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert moved_of.kept_nbytes == (3 + 1) * NBYTES


def test_a_tensor_of_every_block_comes_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = offload()
    tensor = torch.randn(8, 8)
    values = tensor.clone()
    one, other = moved.save(tensor), moved.save(tensor.view_as(tensor))
    assert one is other
    moved.save(torch.randn(8, 8))  # the first is let go of
    del tensor
    first, second = moved.fetch(one), moved.fetch(other)
    assert first is second
    assert one.here is None, "nobody asks for it again"
    assert torch.equal(first, values)


def test_backward_twice() -> None:
    layers, moved = blocks(), offload()
    through = Offloading(checkpoint, moved)
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    y = x * 1.0
    for layer in layers:
        y = through(layer, y, use_reentrant=False)
    loss = y.square().mean()
    loss.backward(retain_graph=True)
    assert x.grad is not None
    once = x.grad.clone()
    loss.backward()
    torch.testing.assert_close(x.grad, 2 * once, rtol=0, atol=0)


def test_recomputation_stays() -> None:
    """A checkpoint inside a checkpointed function runs once more in backward: it moves nothing then."""
    moved = offload()
    through = Offloading(checkpoint, moved)
    inner, outer = Block(), Block()

    def nested(x: Tensor) -> Tensor:
        return through(inner, outer(x), use_reentrant=False)  # type: ignore[no-any-return]

    x = torch.ones(ROWS, WIDTH, requires_grad=True) * 1.0
    loss = through(nested, x, use_reentrant=False).mean()
    before = moved.kept_nbytes
    loss.backward()
    assert moved.kept_nbytes == before


def test_memory_is_asked_for_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.host, "available_memory", lambda: BLOCKS * NBYTES - 1)
    layers = blocks()
    calls = []
    layers[0].register_forward_hook(lambda *args: calls.append(args))
    with pytest.raises(OffloadError, match=r"activations in host memory need .* GiB"):
        run(layers, Offloading(checkpoint, offload()))
    assert not calls, "not one block ran"


def test_an_arena_of_changing_lengths_stays_small() -> None:
    arena = Arena(pinned=False)
    page = memory.PAGE
    for length in (1, 3, 2, 5, 4, 6, 1):
        taken = [arena.take(length * page, alike=4 - index, what="it") for index in range(4)]
        assert len({id(each) for each in taken}) == 4
        views = [each.view(length * page, torch.uint8) for each in taken]
        for index, view in enumerate(views):
            view.fill_(index)
        assert [int(view.unique()) for view in views] == list(range(4)), "they do not overlap"
        del taken, views
    assert arena.nbytes <= 1.5 * 4 * 6 * page
    assert all(piece.idle for piece in arena._pieces if piece.collect() is None)
    assert arena_module.round_up(1) == page


def test_a_forward_without_backward_is_forgotten() -> None:
    layers, moved = blocks(), offload()
    for _ in range(3):
        x = torch.ones(ROWS, WIDTH, requires_grad=True) * 1.0
        for layer in layers:
            x = Offloading(checkpoint, moved)(layer, x, use_reentrant=False)
        del x
    assert moved.arena.nbytes == BLOCKS * NBYTES
