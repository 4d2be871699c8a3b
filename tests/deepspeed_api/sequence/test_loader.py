"""``UlyssesSPDataLoaderAdapter``: parts of batches, their order, passes, resuming, and what cannot be divided."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from ds_hf import initialize
from ds_hf.deepspeed_api.sequence.loader import UlyssesSPDataLoaderAdapter
from ds_hf.log import logger
from tests.compat.trainer_code import tiny_llama
from tests.helpers.distributed import run_distributed
from tests.helpers.logs import Lines

Batch = dict[str, Any]


def batch(first: int, tokens: int = 6, rows: int = 1) -> Batch:
    ids = torch.arange(first, first + rows * tokens).view(rows, tokens)
    return {"input_ids": ids, "labels": ids.clone(), "name": f"batch {first}"}


class Loader:
    """Batches of this process; counts what it was told."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches, self.dataset, self.batch_sampler, self.epoch = batches, "data", "sampler", -1
        self.place = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        while self.place < len(self.batches):
            self.place += 1
            yield dict(self.batches[self.place - 1])
        self.place = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def adapter(batches: list[Batch] | Any) -> UlyssesSPDataLoaderAdapter:
    loader = Loader(batches) if isinstance(batches, list) else batches
    return UlyssesSPDataLoaderAdapter(loader, dist.get_rank(), dist.group.WORLD, dist.get_world_size(), "cpu")


def plain(found: Batch) -> dict[str, Any]:
    return {key: value.tolist() if isinstance(value, Tensor) else value for key, value in found.items()}


def parts() -> list[Any]:
    """Two passes over two batches on each of two processes; the second batch of process 1 is longer."""
    rank = dist.get_rank()
    batches = [batch(100 * rank), batch(100 * rank + 50, tokens=6 + 2 * rank, rows=1 + rank)]
    divided = adapter(batches)
    assert len(divided) == 4
    assert (divided.dataset, divided.batch_sampler) == ("data", "sampler")
    divided.set_epoch(3)
    assert divided.dl.epoch == 3
    first, second = [plain(each) for each in divided], [plain(each) for each in divided]
    assert first == second
    return first


def test_every_batch_is_shared() -> None:
    first, second = run_distributed(parts, 2)
    assert [found["name"] for found in first] == ["batch 0", "batch 100", "batch 50", "batch 150"]
    assert [found["name"] for found in second] == [found["name"] for found in first]
    assert first[0]["input_ids"] == [[0, 1, 2]]
    assert first[0]["position_ids"] == [[0, 1, 2]]
    assert first[0]["shift_labels"] == [[1, 2, 3]]
    assert second[0]["input_ids"] == [[3, 4, 5]]
    assert second[0]["position_ids"] == [[3, 4, 5]]
    assert second[0]["shift_labels"] == [[4, 5, -100]]
    assert "labels" not in first[0]
    assert first[3]["input_ids"] == [[150, 151, 152, 153], [158, 159, 160, 161]]
    assert second[3]["shift_labels"] == [[155, 156, 157, -100], [163, 164, 165, -100]]


def more_entries() -> Batch:
    found = batch(0)
    found["position_ids"] = torch.tensor([[0, 1, 2, 0, 1, 2]])  # two documents
    found["pixels"] = torch.arange(12, dtype=torch.bfloat16).view(1, 6, 2)
    found["attention_mask"] = torch.ones(1, 6, dtype=torch.bool)
    found["cu_seq_lens_q"] = torch.tensor([0, 3, 6])
    return next(adapter([found]))


def test_other_entries() -> None:
    first, second = run_distributed(more_entries, 2)
    assert second["position_ids"].tolist() == [[0, 1, 2]]
    assert second["pixels"].dtype is torch.bfloat16
    assert second["pixels"].tolist() == [[[6, 7], [8, 9], [10, 11]]]
    assert first["attention_mask"].tolist() == [[True] * 3]
    assert second["cu_seq_lens_q"].tolist() == [0, 3, 6]  # of the whole sequence


def in_training_order() -> list[Any]:
    """A pass that was left after three of eight micro-batches goes on there; so does one that skipped them."""
    rank = dist.get_rank()
    batches = [batch(100 * rank + 10 * index) for index in range(4)]
    divided = adapter(batches)
    running = iter(divided)
    begun = [next(running)["name"] for _ in range(3)]
    state = divided.state_dict()
    rest = [each["name"] for each in running]
    again = adapter(batches)
    again.load_state_dict(state)
    resumed = [each["name"] for each in again]
    skipping = adapter(batches).skipping(1, Loader(batches[1:]))
    skipped = [each["name"] for each in skipping]
    assert [each["name"] for each in again] == begun + rest  # the next pass is whole
    return [rest, resumed, skipped]


def test_a_pass_that_was_left_goes_on() -> None:
    for rest, resumed, skipped in run_distributed(in_training_order, 2):
        assert len(rest) == 5
        assert resumed == rest
        assert skipped == rest


def skipped_by_accelerate() -> list[Any]:
    from accelerate import skip_first_batches
    from accelerate.state import PartialState

    PartialState(cpu=True)
    rank = dist.get_rank()
    data = [{"input_ids": torch.arange(4) + 10 * index + 100 * rank} for index in range(6)]
    divided = adapter(DataLoader(data, batch_size=1))  # type: ignore[arg-type]
    names = [int(each["input_ids"][0, 0]) // 10 for each in divided]
    return [names, [int(each["input_ids"][0, 0]) // 10 for each in skip_first_batches(divided, 5)]]


def test_accelerate_skips_micro_batches() -> None:
    for names, skipped in run_distributed(skipped_by_accelerate, 2):
        assert len(names) == 12
        assert skipped == names[5:]


def refused(changes: list[Callable[[Batch], Any]]) -> list[str]:
    said = []
    for change in changes:
        found = batch(0)
        if dist.get_rank() == 1:
            change(found)
        with pytest.raises(ValueError) as caught:
            next(adapter([found]))
        said.append(str(caught.value))
    return said


def odd(found: Batch) -> None:
    found.update(batch(0, tokens=5))


def packed(found: Batch) -> None:
    found["seq_idx"] = torch.tensor([[0, 0, 0, 1, 1, 1]])


def wide(found: Batch) -> None:
    found["attention_mask"] = torch.ones(1, 1, 6, 6)


def empty(found: Batch) -> None:
    found.pop("input_ids")


def test_batches_that_cannot_be_divided_are_refused_everywhere() -> None:
    for length, documents, shape, tokens in run_distributed(refused, 2, [odd, packed, wide, empty]):
        assert "rank 1: batch's seqlen=5 isn't divisible by sp-size=2: pad to a multiple of it" in length
        assert "`position_ids` where documents are packed, as seq_idx says" in documents
        assert "attention_mask's shape [1, 1, 6, 6] must match input_ids's shape [1, 6]" in shape
        assert "a batch needs input_ids, or inputs_embeds" in tokens


def uneven_ends() -> int:
    return len(list(adapter([batch(0)] * (1 + dist.get_rank()))))


def test_the_shortest_loader_ends_the_pass() -> None:
    assert run_distributed(uneven_ends, 2) == [2, 2]


def of_an_engine() -> list[list[int]]:
    """What three loaders of an engine hand out, each once: first tokens of parts."""
    rows = [batch(20 * index)["input_ids"][0] for index in range(3)]
    model = tiny_llama()
    given = {"train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": 2, "zero_optimization": {"stage": 1}}
    given["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3}}
    engine, _, loader, _ = initialize(model=model, config=given, training_data=rows, collate_fn=collate)
    found = []
    for each in (loader, engine.deepspeed_io(rows, collate_fn=collate), engine.deepspeed_io(rows, data_sampler=[2])):
        each.collate_fn = collate
        divided = adapter(each)
        parts = [int(part["input_ids"][0, 0]) for part in divided]
        assert len(parts) == len(divided)
        found.append(sorted(parts))
    engine.destroy()
    return found


def collate(rows: list[Tensor]) -> Batch:
    return {"input_ids": torch.stack(rows), "labels": torch.stack(rows)}


def test_the_loaders_of_an_engine_are_divided_once() -> None:
    first, second = run_distributed(of_an_engine, 2, timeout=30)
    assert first == [[0, 20, 40], [0, 20, 40], [40, 40]]  # a sampler of the script's own is of each process
    assert second == [[3, 23, 43], [3, 23, 43], [43, 43]]


def given_the_same() -> tuple[list[list[int]], list[str], list[list[int]]]:
    logger.addHandler(lines := Lines())
    own = adapter([batch(12 * dist.get_rank())])
    list(own)
    assert not lines.texts
    repeated = [plain(each)["input_ids"][0] for each in adapter([batch(0), batch(6)])]
    loader = Loader([batch(0), batch(6)])
    loader.same_in_sequence = True  # type: ignore[attr-defined]
    once = [plain(each)["input_ids"][0] for each in adapter(loader)]
    logger.removeHandler(lines)
    return repeated, lines.texts, once


def test_the_same_batch_of_all_processes_is_told() -> None:
    for rank, (repeated, said, once) in enumerate(run_distributed(given_the_same, 2, timeout=30)):
        assert len(repeated) == 4
        assert once == [[3 * rank, 3 * rank + 1, 3 * rank + 2], [6 + 3 * rank, 7 + 3 * rank, 8 + 3 * rank]]
        assert [text for text in said if "gave UlyssesSPDataLoaderAdapter the same batch" in text] == said
        assert len(said) == (1 if rank == 0 else 0)
