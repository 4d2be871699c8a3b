"""Sums over bytes, digests of states, and that a load which did not bring back what was saved says so."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

import ds_hf
from ds_hf.checkpoint.checksum import (
    Checksum,
    _sum_on_device,
    add,
    checksum_of_file,
    hexadecimal,
    sum_of_bytes,
    sum_of_slice,
    sum_of_tensor,
)
from ds_hf.checkpoint.digest import digest_of
from ds_hf.checkpoint.format import SavedCut
from ds_hf.checkpoint.verify import verify
from ds_hf.engine.checkpoint import load as load_module
from ds_hf.errors import CheckpointError
from tests.engine.checkpoint.workload import Model, build, config, engine_of, train
from tests.helpers.distributed import run_distributed

MASK = 2**64 - 1


def plainly(data: bytes, start: int = 0) -> tuple[int, int]:
    """The definition, word by word."""
    padded = data + bytes(-len(data) % 8)
    words = [int.from_bytes(padded[i : i + 8], "little") for i in range(0, len(padded), 8)]
    mixed = [word ^ (word >> 32) for word in words]
    return sum(mixed) & MASK, sum((start + i + 1) * m for i, m in enumerate(mixed)) & MASK


@given(st.binary(max_size=300), st.integers(0, 2**40))
def test_sum_is_what_it_says(data: bytes, start: int) -> None:
    assert sum_of_bytes(data, start) == plainly(data, start)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_sums_of_slices_add_up(dtype: torch.dtype, dim: int) -> None:
    """However a parameter is cut, and each slice into fragments, at whole words."""
    source = random.Random(dim)
    shape = [8, 16, 24]
    whole = torch.frombuffer(bytearray(source.randbytes(8 * 16 * 24 * dtype.itemsize)), dtype=dtype).view(shape)
    step = 8 if dim == 2 else 1
    for _ in range(20):
        ends = sorted(source.sample(range(step, shape[dim], step), 3 if dim != 2 else 2))
        ranges = [(low, high - low) for low, high in zip([0, *ends], [*ends, shape[dim]], strict=True)]
        source.shuffle(ranges)
        total = (0, 0)
        for cut in (SavedCut(dim, tuple(ranges[:2])), SavedCut(dim, tuple(ranges[2:]))):
            flat = torch.cat([whole.narrow(dim, first, count) for first, count in cut.ranges], dim).reshape(-1)
            middle = source.randrange(0, flat.numel(), 16)
            for start, part in ((0, flat[:middle]), (middle, flat[middle:])):
                found = sum_of_slice(part, shape, cut, start)
                assert found is not None
                total = add(total, found)
        assert total == sum_of_tensor(whole)


def test_slices_that_are_no_whole_words_have_no_sum() -> None:
    for shape, cut, dtype in [
        ([6, 3], SavedCut(0, ((0, 3),)), torch.float32),
        ([4, 6], SavedCut(1, ((0, 3),)), torch.bfloat16),
        ([4, 5], SavedCut(1, ((0, 4),)), torch.float32),
    ]:
        part = torch.ones(cut.numel(shape), dtype=dtype)
        assert sum_of_slice(part, shape, cut) is None
    assert sum_of_slice(torch.ones(6), [1, 9], SavedCut(1, ((0, 6),))) == sum_of_tensor(torch.ones(6))


def test_sums_of_long_and_of_many_short_rows() -> None:
    for shape, cut in [([3, 2**18], SavedCut(1, ((2**17, 2**17),))), ([2**17, 8], SavedCut(1, ((2, 4),)))]:
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        kept = torch.zeros_like(whole)
        ((first, count),) = cut.ranges
        kept[:, first : first + count] = whole[:, first : first + count]
        assert sum_of_slice(whole[:, first : first + count].reshape(-1), shape, cut) == sum_of_tensor(kept)


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 2**18 - 1, 2**18, 2**18 + 8, 3 * 2**18 + 13])
def test_sums_of_many_rows_and_on_devices(numel: int) -> None:
    data = random.Random(numel).randbytes(numel)
    expected = plainly(data, 5)
    assert sum_of_bytes(data, 5) == expected
    words = torch.frombuffer(bytearray(data + bytes(-numel % 8)) or bytearray(8), dtype=torch.int64)
    assert _sum_on_device(words, 5) == expected
    stream, rest = Checksum(), memoryview(data)
    source = random.Random(1)
    while rest:
        size = source.randrange(1, 100_000)
        stream.update(rest[:size])
        rest = rest[size:]
    assert stream.text() == hexadecimal(plainly(data))


@given(st.lists(st.integers(0, 40), max_size=5))
def test_parts_add_up_however_they_are_cut(cuts: list[int]) -> None:
    values = torch.arange(700, dtype=torch.float32).sin()
    places = sorted({0, 700, *(16 * cut for cut in cuts)})
    total = (0, 0)
    for low, high in itertools.pairwise(places):
        total = add(total, sum_of_tensor(values[low:high], 4 * low))
    assert total == sum_of_tensor(values)


def test_every_small_change_is_found() -> None:
    """Each bit, words that change places, and pairs of equal flips (two signs), which plain sums miss."""
    data = bytearray(random.Random(3).randbytes(256))
    original = sum_of_bytes(data)
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        assert sum_of_bytes(changed) != original
        changed[(bit // 8 + 16) % 256] ^= 1 << bit % 8  # the same bit two words on
        assert sum_of_bytes(changed) != original
    for low in range(0, 248, 8):
        swapped = bytearray(data)
        swapped[low : low + 8], swapped[low + 8 : low + 16] = data[low + 8 : low + 16], data[low : low + 8]
        assert sum_of_bytes(swapped) != original
    values = torch.randn(64)
    turned = values.clone()
    turned[[3, 7]] *= -1
    assert sum_of_tensor(values) != sum_of_tensor(turned)


def test_checksum_of_a_file(tmp_path: Path) -> None:
    data = random.Random(0).randbytes(5_000_003)
    (tmp_path / "f").write_bytes(data)
    assert checksum_of_file(tmp_path / "f") == hexadecimal(plainly(data))


def test_digest_of_values() -> None:
    assert digest_of({"a": 1, "b": [2.0, None]}) == digest_of({"b": (2.0, None), "a": 1})
    assert digest_of(float("nan")) == digest_of(float("nan"))
    assert digest_of(torch.tensor(2.5)) == digest_of(2.5)
    different = [0, 0.0, -0.0, False, None, "0", "", [], {}, [[]], ["a", "b"], ["ab"], {"a": 1}, {"a": 1.0}]
    different += [torch.zeros(2), torch.zeros(2, 1), torch.zeros(2, dtype=torch.float64)]
    assert len({digest_of(value) for value in different}) == len(different)


# -- of checkpoints -------------------------------------------------------------------------------------------------


def _digests_of(folder: Path, stage: int, dtype: str) -> dict[str, Any]:
    with engine_of(config(stage, dtype)) as engine:
        train(engine, 2)
        engine.save_checkpoint(folder)
    found: dict[str, Any] = json.loads((folder / "global_step2/manifest.json").read_text())["digest"]
    return found


def _at_each_stage(folder: Path) -> list[dict[str, Any]]:
    return [_digests_of(folder / str(stage), stage, "fp32") for stage in (0, 1, 3)]


def test_tensor_digests_depend_on_neither_stage_nor_world_size(tmp_path: Path) -> None:
    """Every rank has the same batch and the halves of a sum are exact, so the runs have the same bits."""
    alone = _digests_of(tmp_path / "alone", 2, "fp32")["tensors"]
    by_stage = run_distributed(_at_each_stage, 2, tmp_path / "two")[0]
    assert set(alone["embedding.weight"]) == {"master:float32", "exp_avg:float32", "exp_avg_sq:float32"}
    assert set(alone["frozen"]) == {"weight:float32"}
    assert set(alone["blocks.0.calls"]) == {"buffer:int64"}
    assert len({text for states in alone.values() for text in states.values()}) > 30
    assert [digests["tensors"] == alone for digests in by_stage] == [True] * 3
    assert all(len(digests["rng"]) == 2 for digests in by_stage)


def _load_elsewhere(folder: Path) -> list[str]:
    """Loads at other layouts, each checked by digest: a wrong sum would raise."""
    loaded = []
    for stage, dtype in ((1, "bf16"), (3, "bf16"), (2, "bf16offload"), (0, "fp32"), (3, "fp16")):
        with engine_of(config(stage, dtype), seed=9) as engine:
            loaded.append(engine.load_checkpoint(folder)[0])
    return loaded


def test_loads_at_another_layout_are_checked_too(tmp_path: Path) -> None:
    with engine_of(config(2, "bf16")) as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path)
    for loaded in run_distributed(_load_elsewhere, 2, tmp_path):
        assert loaded == [str(tmp_path / "global_step2")] * 5


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[tuple[Any, Path]]:
    with engine_of(config(2)) as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path)
        yield engine, tmp_path


def _edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    manifest = folder / "global_step2/manifest.json"
    content = json.loads(manifest.read_text())
    content.pop("checksum", None)  # of the manifest itself
    change(content)
    manifest.write_text(json.dumps(content))


def _edit_digest(folder: Path, *path: Any) -> None:
    """Another digest than was saved, as if something else had been restored."""

    def turn_round(content: dict[str, Any]) -> None:
        place = content["digest"]
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = place[path[-1]][::-1]

    _edit(folder, turn_round)


@pytest.mark.parametrize(
    ("path", "named"),
    [
        (("tensors", "blocks.1.linear.weight", "master:float32"), r"blocks\.1\.linear\.weight \(master\)"),
        (("tensors", "embedding.weight", "exp_avg:float32"), r"embedding\.weight \(exp_avg\)"),
        (("tensors", "blocks.0.mean", "buffer:float32"), r"blocks\.0\.mean \(buffer\)"),
        (("rng", 0, "cpu"), "random state 'cpu' of rank 0"),
        (("rng", 0, "numpy"), "random state 'numpy' of rank 0"),
        (("groups", 0, 1, "lr"), "lr of parameter group 1"),
        (("loss_scaler", 1), "the loss scaler"),
        (("lr_scheduler", 1), "the learning-rate scheduler"),
    ],
)
def test_what_was_not_restored_is_named(saved: tuple[Any, Path], path: tuple[Any, ...], named: str) -> None:
    engine, folder = saved
    engine.load_checkpoint(folder)
    _edit_digest(folder, *path)
    with pytest.raises(CheckpointError, match=f"what was restored is not what was saved: {named}. The engine"):
        engine.load_checkpoint(folder)


def test_a_fault_in_the_reader_is_found(saved: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """One element of one moment, the step count of one parameter, a number in the scheduler."""
    engine, folder = saved
    read = load_module.restore_states

    def badly(engine: Any, *arguments: Any) -> None:
        read(engine, *arguments)
        segment = next(iter(engine.optimizer.state.values()))
        segment["exp_avg"].view(-1)[3] += 1e-6
        segment["step"] += 1

    monkeypatch.setattr(load_module, "restore_states", badly)
    with pytest.raises(CheckpointError, match=r"\(exp_avg\), .* \(step\)"):
        engine.load_checkpoint(folder)


def test_without_the_check_it_loads(saved: tuple[Any, Path]) -> None:
    _, folder = saved
    _edit_digest(folder, "tensors", "embedding.weight", "exp_avg:float32")
    with engine_of(config(2, ds_hf={"checkpoint": {"verify": "sizes"}})) as engine:
        assert engine.load_checkpoint(folder)[0] is not None


def test_another_configuration_is_no_difference(tmp_path: Path) -> None:
    """What load_checkpoint leaves to the configuration: how the scaler moves, which schedule it is."""
    with engine_of(config(2, "fp16")) as engine:
        train(engine, 3)
        engine.save_checkpoint(tmp_path)
        scale = engine.loss_scale()
    other = config(3, fp16={"enabled": True, "initial_scale_power": 4, "loss_scale_window": 7, "hysteresis": 3})
    other["scheduler"] = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 90}}
    other["optimizer"]["params"]["lr"] = 0.5
    with engine_of(other) as engine:
        assert engine.load_checkpoint(tmp_path)[0] is not None
        assert engine.loss_scale() == scale


@pytest.mark.parametrize("damage", [[], {"tensors": []}, {"tensors": {"a": "b"}}, {"tensors": {"a": {"b": "zz"}}}])
def test_digests_that_are_none(saved: tuple[Any, Path], damage: Any) -> None:
    engine, folder = saved
    _edit(folder, lambda content: content.update(digest=damage))
    with pytest.raises(CheckpointError, match="the digests in the manifest cannot be read"):
        engine.load_checkpoint(folder)


def test_checkpoints_without_digests_load(saved: tuple[Any, Path]) -> None:
    """As versions before wrote them."""
    engine, folder = saved
    _edit(folder, lambda content: [content.pop(key) for key in ("digest", "checksums", "written_at")])
    assert engine.load_checkpoint(folder)[0] is not None
    assert verify(folder) == []


# -- random states and the position in the data ---------------------------------------------------------------------


def test_random_states_of_python_and_numpy_come_back(saved: tuple[Any, Path]) -> None:
    engine, folder = saved
    engine.save_checkpoint(folder)
    expected = [random.random(), np.random.rand(), torch.rand(()).item()]
    engine.load_checkpoint(folder)
    assert [random.random(), np.random.rand(), torch.rand(()).item()] == expected


class Tokens(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((5,), index % 11)


def _loop(folder: Path, steps: int, more: int, accumulation: int) -> tuple[list[Any], list[Any]]:
    """Batches and losses of the ``more`` micro-batches after a checkpoint at ``steps``, straight and resumed."""
    settings = config(2, gradient_accumulation_steps=accumulation)

    def start() -> Any:
        torch.manual_seed(0)
        return ds_hf.initialize(model=Model(dropout=0.2), config=settings, training_data=Tokens())

    def run(engine: Any, loader: Any, count: int) -> list[Any]:
        seen: list[Any] = []
        while len(seen) < count:
            for batch in loader:
                loss = engine(batch)
                engine.backward(loss)
                engine.step()
                seen.append((batch[:, 0].tolist(), loss.item()))
                if len(seen) == count:
                    break
        return seen

    engine, _, loader, _ = start()
    seen: list[Any] = []
    for batch in loader:  # one pass may not be left and begun again: that would be the next epoch
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        seen.append((batch[:, 0].tolist(), loss.item()))
        if len(seen) == steps:
            engine.save_checkpoint(folder)
        if len(seen) == steps + more:
            break
    engine.destroy()
    engine, _, loader, _ = start()
    run(engine, loader, 3)
    engine.load_checkpoint(folder)
    again = run(engine, loader, more)
    engine.destroy()
    return seen[steps:], again


@pytest.mark.parametrize(("steps", "world_size"), [(4, 1), (3, 2)])
def test_the_plain_loop_goes_on_at_the_next_batch(tmp_path: Path, steps: int, world_size: int) -> None:
    for straight, resumed in run_distributed(_loop, world_size, tmp_path, steps, 3, 1):
        assert len(straight) == 3
        assert resumed == straight


def test_an_accumulation_that_was_under_way_begins_anew(tmp_path: Path) -> None:
    """Saved after 5 micro-batches of 2 a step: gradients are not kept, so the fifth comes again."""
    _, resumed = run_distributed(_loop, 1, tmp_path, 5, 3, 2)[0]
    straight = run_distributed(_loop, 1, tmp_path / "straight", 4, 3, 2)[0][0]
    assert [batch for batch, _ in resumed] == [batch for batch, _ in straight]


def test_a_position_that_is_none(tmp_path: Path) -> None:
    with engine_of(config(2), training_data=Tokens()) as engine:
        for bad in ([], {"epoch": -1, "samples": 0, "seed": 0}, {"epoch": 0, "samples": True, "seed": 0}):
            with pytest.raises(CheckpointError, match="position in the data"):
                load_module.restore_data_position(engine, bad)


def test_engines_without_a_loader_pass_over_the_position(tmp_path: Path) -> None:
    with engine_of(config(2), training_data=Tokens()) as engine:
        next(iter(engine.training_dataloader))
        engine.save_checkpoint(tmp_path)
    other = build(config(2))
    assert other.load_checkpoint(tmp_path)[0] is not None
    other.destroy()
