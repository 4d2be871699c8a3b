"""Every way to offload on a CUDA device: states in page-locked memory, streamed, on the device by ratio, in files."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from ds_hf import initialize
from ds_hf.engine.offload.link import HostLink
from ds_hf.engine.optim import offloading, stream_share
from ds_hf.engine.optim.host_store import HostPlace, HostStore
from ds_hf.engine.optim.stream_share import AutoShare
from ds_hf.engine.zero.storage import DeviceGradientStorage
from tests.contract.test_parity import ADAMW, CLIP, MICRO, batches, model
from tests.engine.offload.test_host_store import not_made
from tests.helpers.distributed import run_distributed
from tests.helpers.parity import full_weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CPU = {"device": "cpu"}


def train(stage: int, accumulation: int, zero: dict[str, Any], own: dict[str, Any]) -> tuple[list[float], Any]:
    """Losses, and places of units."""
    trained = model()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},  # type: ignore[call-overload]
        "zero_optimization": {"stage": stage, **zero},
        "ds_hf": {"offload": own},
    }
    engine, *_ = initialize(model=trained, config=config)
    losses = []
    for step in batches(accumulation, torch.distributed.get_world_size()):
        for micro in step:
            loss = engine(micro[torch.distributed.get_rank()].to(engine.device))
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
    store = engine.optimizer.store
    places = list(store.places.values()) if isinstance(store, HostStore) else None
    if isinstance(store, HostStore):
        optimizer, streamed = engine.optimizer, {b for b, p in store.places.items() if p is HostPlace.STREAMED}
        assert all(optimizer.masters[b].is_pinned() for b, place in store.places.items() if place is HostPlace.HOST)
        here = not (zero.get("offload_param") or {})
        assert all(optimizer.low_bits[b].is_pinned() for b in streamed if here)
        for gradient in optimizer.segments:
            stays = gradient.buffer in streamed or store.places[gradient.buffer] is HostPlace.DEVICE
            assert isinstance(gradient.storage, DeviceGradientStorage) == stays
    engine.destroy()
    return losses, places


def ways(folder: str) -> None:
    nvme = {"device": "nvme", "nvme_path": folder}
    files = {"offload_optimizer": nvme, "offload_param": {**nvme, "max_in_cpu": 0}}
    for accumulation in (1, 4):
        plain, _ = train(2, accumulation, {}, {})
        for stage, zero, own, wanted in [
            (1, {"offload_optimizer": CPU}, {"stream": 0.0}, {HostPlace.HOST}),
            (1, {"offload_optimizer": CPU}, {}, {HostPlace.HOST}),  # auto: too small a model for more
            (2, {"offload_optimizer": CPU}, {"stream": 1.0}, {HostPlace.STREAMED}),
            (2, {"offload_optimizer": CPU}, {"stream": 0.4}, {HostPlace.STREAMED, HostPlace.HOST}),
            (3, {"offload_optimizer": {**CPU, "ratio": 0.6}}, {"stream": 0.0}, {HostPlace.DEVICE, HostPlace.HOST}),
            (
                3,
                {"offload_optimizer": CPU, "offload_param": CPU},
                {"stream": 0.5},
                {HostPlace.STREAMED, HostPlace.HOST},
            ),
            (2, {"offload_optimizer": CPU}, {"ratio": "auto"}, {HostPlace.DEVICE}),  # this model always fits
            (3, {"offload_param": CPU}, {}, None),
            (3, files, {}, None),
        ]:
            losses, places = train(stage, accumulation, zero, own)
            assert losses == pytest.approx(plain, rel=1e-2), (stage, accumulation, zero, own)
            assert (None if places is None else set(places)) == wanted, (stage, zero, own)


@pytest.mark.parametrize("world", [1, 2])
def test_every_way_trains_alike(world: int, tmp_path: Any) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} CUDA devices, found {torch.cuda.device_count()}")
    run_distributed(ways, world, str(tmp_path), timeout=300, backend="nccl")


def memory(stage: int) -> tuple[int, int]:
    """Bytes on the device after a step, without and with offload."""
    found = []
    for zero in ({}, {"offload_optimizer": CPU}):
        trained = model()
        before = torch.cuda.memory_allocated()
        config = {
            "train_micro_batch_size_per_gpu": MICRO,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": stage, **zero},
            "ds_hf": {"offload": {"stream": 0.0}},
        }
        engine, *_ = initialize(model=trained, config=config)
        for step in batches(1, 1)[:3]:
            engine.backward(engine(step[0][0].to(engine.device)))
            engine.step()
        torch.cuda.synchronize()
        found.append(torch.cuda.memory_allocated() - before)
        engine.destroy()
        del engine, trained
    return found[0], found[1]


def test_states_are_not_on_the_device() -> None:
    (numbers,) = run_distributed(memory, 1, 2, timeout=120, backend="nccl")
    numel = sum(p.numel() for p in model().parameters())
    assert numbers[0] - numbers[1] > 11 * numel  # of 12 bytes


def offloaded(
    own: dict[str, Any], stage: int = 2, **zero: Any
) -> tuple[list[torch.Tensor], list[float], set[HostPlace]]:
    """Parameters and losses of some steps with states in host memory, and the places of units."""
    trained = model()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},  # type: ignore[call-overload]
        "zero_optimization": {"stage": stage, "offload_optimizer": CPU, **zero},
        "ds_hf": {"offload": own},
    }
    engine, *_ = initialize(model=trained, config=config)
    losses = []
    for (micro,) in batches(1, torch.distributed.get_world_size())[:3]:
        loss = engine(micro[torch.distributed.get_rank()].to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    weights = [value.cpu() for value in full_weights(trained).values()]
    places = set(getattr(engine.optimizer.store, "places", {}).values())
    engine.destroy()
    return weights, losses, places


def as_on_the_device(stage: int) -> None:
    plain, expected, _ = offloaded({}, stage, offload_optimizer={"device": "none"})
    for room in (1 << 30, 1):  # gradients wait on the device, or come from host memory
        stream_share.slots_room = lambda _, room=room: room  # type: ignore[misc, assignment]
        offloading.slots_room = stream_share.slots_room
        weights, losses, places = offloaded({"stream": 1.0}, stage)
        assert places == {HostPlace.STREAMED}
        assert losses == expected
        assert all(torch.equal(a, b) for a, b in zip(weights, plain, strict=True))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_update_is_that_of_states_on_the_device(stage: int, world: int) -> None:
    """The same kernel, over split masters: bit for bit."""
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} CUDA devices, found {torch.cuda.device_count()}")
    run_distributed(as_on_the_device, world, stage, timeout=120, backend="nccl")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_that_is_not_made_changes_nothing(stage: int, world: int) -> None:
    """The host does not know of it when it queues the update."""
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} CUDA devices, found {torch.cuda.device_count()}")
    run_distributed(not_made, world, stage, timeout=120, backend="nccl")


def does_not_wait() -> list[bool]:
    """Whether the host knew what became of each step when ``step`` returned."""
    known = []
    trained = model()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},  # type: ignore[call-overload]
        "zero_optimization": {"stage": 2, "offload_optimizer": CPU},
        "ds_hf": {"offload": {"stream": 1.0}},
    }
    engine, *_ = initialize(model=trained, config=config)
    for (micro,) in batches(1, 1)[:4]:
        engine.backward(engine(micro[0].to(engine.device)))
        torch.cuda._sleep(500_000_000)  # a quarter of a second or more
        engine.step()
        known.append(engine.optimizer.outcome_known)
    assert engine.skipped_steps == 0
    engine.destroy()
    return known


def test_the_host_does_not_wait_for_backward() -> None:
    """What the GPU updates is queued while it computes. The first step makes the moments, the second larger slots."""
    (known,) = run_distributed(does_not_wait, 1, timeout=60, backend="nccl")
    assert known[2:] == [False, False]


@pytest.mark.parametrize("numel", [0, 1, 1000, (128 << 20) + 1, 400_000_003])
def test_parts_arrive(numel: int) -> None:
    """By a link that lets others between: every byte, in both directions."""
    link = HostLink(torch.device("cuda"), yielding=True)
    source = torch.randint(0, 256, (numel,), dtype=torch.uint8, device="cuda")
    host, back = torch.empty(numel, dtype=torch.uint8, pin_memory=True), torch.zeros_like(source)
    down = link.down(host, source)
    link.up(back, host, after=down).on_stream()
    assert torch.equal(back, source)
    assert torch.equal(host, source.cpu())
    link.close()


@pytest.mark.parametrize("way", ["up", "down"])
def test_copies_of_others_get_between(way: str) -> None:
    """A number that somebody looks at does not wait for all states that are on their way."""
    link, numel = HostLink(torch.device("cuda"), yielding=True), 512 << 20
    device, host = (
        torch.empty(numel, dtype=torch.uint8, device="cuda"),
        torch.empty(numel, dtype=torch.uint8).pin_memory(),
    )
    number, seen = torch.ones(1, device="cuda"), torch.zeros(1).pin_memory()
    torch.cuda.synchronize()
    for _ in range(6):
        arrival = link.up(device, host) if way == "up" else link.down(host, device, kept=True)
    for _ in range(4):
        if way == "up":
            number.copy_(seen, non_blocking=True)
        else:
            seen.copy_(number, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    assert not arrival._event.query(), "it waited for all of them"
    link.close()


def auto() -> tuple[bool, list[float]]:
    """Whether units were streamed once sizes allowed it, and the speeds that were measured then."""
    plain, expected, places = offloaded({"stream": 0.0})
    assert places == {HostPlace.HOST}
    for own in ({}, {"stream": "auto"}):
        same, losses, places = offloaded(own)
        assert losses == expected
        assert places == {HostPlace.HOST}, "the model is small"
        assert all(torch.equal(a, b) for a, b in zip(same, plain, strict=True))

    speeds: list[float] = []
    measure = AutoShare._speed

    def noted(self: AutoShare, link: HostLink) -> float:
        speeds.append(measure(self, link))
        return speeds[-1]

    AutoShare._speed = noted  # type: ignore[method-assign]
    stream_share.LEAST_STATES = 1
    _, losses, places = offloaded({})
    assert losses == pytest.approx(expected, rel=1e-2)  # another kernel
    return HostPlace.STREAMED in places, speeds


@pytest.mark.alone
@pytest.mark.parametrize("world", [1, 2])
def test_auto_streams_where_the_link_is_fast(world: int) -> None:
    """And changes nothing for a small model."""
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} CUDA devices, found {torch.cuda.device_count()}")
    found = run_distributed(auto, world, timeout=240, backend="nccl")
    speeds = [speed for _, (speed,) in found]
    assert [streamed for streamed, _ in found] == [min(speeds) >= stream_share._LEAST_SPEED] * world, speeds


def seconds_to_measure() -> float:
    from ds_hf.engine.comm.mesh import Axis

    device = torch.device("cuda", torch.cuda.current_device())
    auto, link = AutoShare(device, Axis(None, 0, 1)), HostLink(device)
    before = torch.cuda.memory_allocated()
    found = []
    for _ in range(3):
        start = time.perf_counter()
        auto._speed(link)
        found.append(time.perf_counter() - start)
    assert torch.cuda.memory_allocated() == before
    return min(found)


@pytest.mark.alone
def test_measuring_the_link_is_quick() -> None:
    (seconds,) = run_distributed(seconds_to_measure, 1, timeout=60, backend="nccl")
    assert seconds < 0.2
