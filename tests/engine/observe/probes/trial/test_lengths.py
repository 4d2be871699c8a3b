"""The longest sequences in an engine: what grows, what is tried, and that what was found fits and more does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_hf import initialize
from ds_hf.engine.observe.probes.trial.batches import Batch
from ds_hf.engine.observe.probes.trial.driver import attach
from ds_hf.engine.observe.probes.trial.lengths import find_longest, length_of, lengthened
from tests.engine.observe.probes.trial.test_driver import events_of, requested
from tests.helpers.distributed import run_distributed

VOCABULARY, WIDTH, OWN = 50, 32, 64


@pytest.mark.parametrize("most", [None, 700, 900, 5000])
@pytest.mark.parametrize("longest", [0, 40, 100, 820, 1500, 4000])
@pytest.mark.parametrize("first", [128, 800, 4096])
@pytest.mark.parametrize("known", [False, True])
def test_the_longest_is_found(most: int | None, longest: int, first: int, known: bool) -> None:
    tried: list[int] = []

    def fits(tokens: int) -> bool:
        tried.append(tokens)
        return tokens <= longest

    found = find_longest(fits, first, 16, most, known=known)
    best = min(longest, most or longest)
    assert found <= best
    assert len(tried) == len(set(tried)) <= 14
    assert most is None or max(tried) <= most
    if best >= 100:
        assert found >= best / 1.03 - 16, tried
    if known and first <= longest <= 1.1 * first and most is None:  # a prediction that is right takes few steps
        assert len(tried) <= 6


def test_what_is_as_long_as_the_tokens_grows() -> None:
    tokens = torch.arange(6).view(2, 3)
    mask, weights = torch.ones(2, 1, 3, 3), torch.ones(2, 5)
    batch = Batch((), {"input_ids": tokens, "position_ids": tokens % 3, "mask": mask, "weights": weights, "n": 3}, 2)
    assert length_of(batch) == 3
    found = lengthened(batch, 7).kwargs
    assert found["input_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 0], [3, 4, 5, 3, 4, 5, 3]]
    assert found["position_ids"].tolist() == [list(range(7))] * 2
    assert found["mask"].shape == (2, 1, 7, 7)
    assert found["weights"] is weights
    assert lengthened(batch, 2).kwargs["input_ids"].tolist() == [[0, 1], [3, 4]]
    assert length_of(Batch((torch.ones(2, 3),), {}, 2)) is None


class Net(nn.Module):
    """Keeps its hidden states: 4 bytes x width for each token and block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return {"loss": hidden.square().mean()}


def _longest(stage: int, folder: str, values: dict[str, Any]) -> None:
    torch.manual_seed(1)
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
              "zero_optimization": {"stage": stage}, "optimizer": {"type": "AdamW"}}  # fmt: skip
    engine = initialize(model=Net(), config=config)[0]
    attach(engine, requested(folder, memory_limit=1 << 20, **values))
    engine(input_ids=torch.arange(2 * OWN).view(2, OWN) % VOCABULARY)
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
def test_it_fits_and_the_next_length_does_not(stage: int, tmp_path: Path) -> None:
    """Two processes, 1 MiB: own division and single samples in the first launch; at stage 3 more launches."""

    def points(name: str, **values: Any) -> dict[int, dict[str, Any]]:
        (tmp_path / name).mkdir()
        run_distributed(_longest, 2, stage, str(tmp_path / name), values, timeout=60)
        events = events_of(tmp_path / name)
        assert [e["own"] for e in events if e["event"] == "length"] == [OWN]
        return {e["micro"]: e for e in events if e["event"] == "point"}

    own = points("own", own_axis=True, length=0)
    assert own.keys() == {2, 1}
    assert all(point["peak"] <= 1 << 20 for point in own.values())
    assert own[1]["length"] == pytest.approx(2 * own[2]["length"], rel=0.06)
    if stage == 0:
        return  # later launches search in the same way
    again = points("again", points=((1, 4),), length=own[1]["length"])
    assert again[1]["length"] == pytest.approx(own[1]["length"], rel=0.04)
    longest = max(own[1]["length"], again[1]["length"])
    exactly = points("exactly", points=((1, 4),), length=longest, exactly=True)
    assert (exactly[1]["outcome"], exactly[1]["length"]) == ("ok", longest)
    more = points("more", points=((1, 4),), length=int(longest * 1.06), exactly=True)
    assert more[1]["outcome"] == "oom"


def _without_tokens(folder: str) -> None:
    engine = initialize(model=nn.Linear(4, 1), config={"train_batch_size": 2, "optimizer": {"type": "AdamW"}})[0]
    attach(engine, requested(folder, own_axis=True, length=0))
    engine(torch.ones(1, 4))
    engine.destroy()


def test_a_batch_without_tokens(tmp_path: Path) -> None:
    run_distributed(_without_tokens, 2, str(tmp_path), timeout=60)
    (said,) = [e["why"] for e in events_of(tmp_path) if e["event"] == "length"]
    assert said == "the batch has no tokens, which are whole numbers of [samples, tokens]"
