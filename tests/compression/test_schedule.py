"""Bits and ratios over steps; loops without an engine; checkpoints at the same stage, another one, and uncompressed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_hf import initialize
from ds_hf.compression import compression_scheduler, init_compression
from ds_hf.compression.compressed import unpack
from ds_hf.compression.schedule import bits_at, ratio_at
from ds_hf.config.types.compression import SparsePruningSection, SparsePruningShared
from ds_hf.engine.zero.gather import GatheredParameters
from tests.compression.common import STEPS, batches, config, logged, method, net, run
from tests.helpers.distributed import run_distributed


def test_bits_become_fewer_after_periods_that_double() -> None:
    bits = [bits_at(step, 8, 5, 10)[0] for step in (0, 9, 10, 19, 20, 39, 40, 1000)]
    assert bits == [8, 8, 7, 7, 6, 6, 5, 5]
    assert bits_at(25, 8, 5, 10) == (6, 20)
    assert bits_at(0, 8, 5, 0) == (5, 0)


def test_the_share_that_is_kept_falls_by_the_third_power_at_each_stride() -> None:
    section = SparsePruningSection(
        SparsePruningShared(enabled=True, schedule_offset=10, schedule_offset_end=50, schedule_offset_stride=10)
    )
    shares = [ratio_at(step, section, 0.2) for step in (10, 19, 20, 30, 49, 50, 60)]
    expected = [1.0, 1.0, *(1 - 0.8 * (1 - (1 - done) ** 3) for done in (0.25, 0.5, 0.75)), 0.2, 0.2]
    assert shares == pytest.approx(expected)


SECTION: dict[str, Any] = {
    "weight_quantization": method(
        {"start_bits": 6, "target_bits": 4, "quantization_period": 1}, ["fc"], schedule_offset=1
    ),
    "activation_quantization": method({"bits": 6}, ["fc"], range_calibration="static", schedule_offset=1),
    "sparse_pruning": method({"dense_ratio": 0.3}, ["fc"], schedule_offset=2),
    "row_pruning": method({"dense_ratio": 0.5}, ["fc1"], schedule_offset=2),
}


def test_a_loop_without_an_engine_has_the_engines_numbers() -> None:
    file = config(SECTION)
    engine = initialize(model=init_compression(net(), file), config=file)[0]
    expected = run(engine, batches(1))
    model = init_compression(net(), file)
    scheduler = compression_scheduler(model, file["compression_training"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    losses = []
    for step in batches(1):
        loss = model(step[0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-5)
    assert scheduler.training_steps == STEPS


def test_what_is_zero_stays_zero_on_the_way() -> None:
    way = method({"dense_ratio": 0.1}, ["fc2"], schedule_offset=0, schedule_offset_end=5, schedule_offset_stride=1)
    model = init_compression(net(), config({"sparse_pruning": way}))
    engine = initialize(model=model, config=config({"sparse_pruning": way}))[0]
    before = torch.ones(8, 16, dtype=torch.bool)
    counts = []
    for step in batches(1):
        run(engine, step[None])
        mask = unpack(model.fc2.sparse_pruning_mask, torch.Size((8, 16)))
        assert not (mask & ~before).any()
        counts.append(int(mask.sum()))
        before = mask
    assert counts == [72, 38, 21, 14, 13, 13]


def test_bits_are_told_where_that_is_asked() -> None:
    section = {
        "weight_quantization": method(
            {"start_bits": 6, "target_bits": 5, "quantization_period": 2}, ["fc1"], quantize_verbose=True
        )
    }
    engine = initialize(model=net(), config=config(section))[0]
    with logged() as lines:
        run(engine, batches(1))
    assert [line for line in lines if "bits" in line] == ["fc1 has weights of 5 bits from step 5 on"]


# -- checkpoints -------------------------------------------------------------------------------------------------------


def state(model: Any) -> dict[str, Tensor]:
    with GatheredParameters(model.parameters()):
        found = {name: param.detach().clone() for name, param in model.named_parameters()}
    return {**found, **{name: buffer.clone() for name, buffer in model.named_buffers() if "seen" not in name}}


def saved(folder: str, stage: int, first: int) -> tuple[list[float], dict[str, Tensor]]:
    """Trains ``first`` steps, saves, and goes on to the end: losses after the checkpoint, and the end."""
    file, data = config(SECTION, stage), batches(2)
    engine = initialize(model=init_compression(net(), file), config=file)[0]
    run(engine, data[:first], dist.get_rank())
    engine.save_checkpoint(folder)
    losses = run(engine, data[first:], dist.get_rank())
    end = state(engine.module)
    engine.destroy()
    return losses, end


def resumed(folder: str, stage: int, first: int) -> tuple[list[float], dict[str, Tensor]]:
    file, data = config(SECTION, stage), batches(2)
    model = net()
    with torch.no_grad():
        model.fc2.weight.zero_()  # a mask that is chosen by it would be another one
    engine = initialize(model=model, config=file)[0]
    engine.load_checkpoint(folder)
    losses = run(engine, data[first:], dist.get_rank())
    return losses, state(engine.module)


@pytest.mark.parametrize(("before", "after"), [(0, 3), (3, 1), (2, 2)])
@pytest.mark.parametrize("first", [2, 4])
def test_a_run_that_resumes_goes_on(before: int, after: int, first: int, tmp_path: Path) -> None:
    expected = run_distributed(saved, 2, str(tmp_path), before, first)
    for (losses, end), (told, kept) in zip(
        run_distributed(resumed, 2, str(tmp_path), after, first), expected, strict=True
    ):
        assert losses == pytest.approx(told, rel=1e-5)
        assert end.keys() == kept.keys()
        for name, value in end.items():
            torch.testing.assert_close(value, kept[name], rtol=1e-5, atol=1e-6, msg=name)


def uncompressed(folder: str) -> None:
    engine = initialize(model=net(), config=config({}, 1))[0]
    run(engine, batches(2)[:4], dist.get_rank())
    engine.save_checkpoint(folder)


def pruned_later(folder: str) -> tuple[Tensor, Tensor]:
    section = {"sparse_pruning": method({"dense_ratio": 0.25}, ["fc2"], schedule_offset=0)}
    model = net()
    engine = initialize(model=model, config=config(section, 3))[0]
    engine.load_checkpoint(folder, load_module_strict=False)  # it has no masks
    with GatheredParameters(model.parameters()):
        loaded = model.fc2.weight.detach().clone()
    run(engine, batches(2)[4:5], dist.get_rank())
    return loaded, unpack(model.fc2.sparse_pruning_mask, loaded.shape)


def test_a_checkpoint_that_was_not_compressed_is_pruned_by_its_weights(tmp_path: Path) -> None:
    run_distributed(uncompressed, 2, str(tmp_path))
    for loaded, mask in run_distributed(pruned_later, 2, str(tmp_path)):
        assert mask.sum() == 32
        assert loaded.abs()[mask].min() > loaded.abs()[~mask].max()


def test_a_mask_of_the_middle_goes_on_to_the_end() -> None:
    """A state dict that was saved on the way, in a loop that begins again."""
    way = method({"dense_ratio": 0.25}, ["fc2"], schedule_offset=0, schedule_offset_end=4, schedule_offset_stride=1)
    file = config({"sparse_pruning": way})
    first = init_compression(net(), file)
    compression_scheduler(first, file).go_to(2)
    early = {name: value.clone() for name, value in first.state_dict().items()}
    before = unpack(early["fc2.sparse_pruning_mask"], torch.Size((8, 16)))
    model = init_compression(net(), file)
    scheduler = compression_scheduler(model, file)
    model.load_state_dict(early)
    counts = []
    for _ in range(5):
        scheduler.step()
        mask = unpack(model.fc2.sparse_pruning_mask, torch.Size((8, 16)))
        assert not (mask & ~before).any()
        counts.append(int(mask.sum()))
    assert 32 < before.sum() == counts[0] < 128
    assert counts[1:] == [before.sum(), 34, 32, 32]
