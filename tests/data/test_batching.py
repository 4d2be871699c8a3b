"""Packs and rates against what DeepSpeed 0.19.8 gives (``packs.json``, numbers alone)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr import (
    VariableBatchSizeLR,
    batch_by_seqlens,
    lr_scheduler_for_variable_batch_size,
    scale_lr,
)

from ds_hf.errors import ConfigError

TABLE = json.loads((Path(__file__).parent / "packs.json").read_text())
LENGTHS = TABLE["lengths"]


@pytest.mark.parametrize("case", TABLE["cases"], ids=lambda case: "-".join(map(str, case["arguments"]))[:60])
def test_packs_are_those_of_deepspeed_and_the_last_sample_too(case: dict[str, Any]) -> None:
    packs, sizes, longest = batch_by_seqlens(LENGTHS, **case["arguments"])
    found = [[number, samples] for number, samples in packs]
    more = [sample for _, samples in found for sample in samples]
    less = [sample for _, samples in case["packs"] for sample in samples]
    assert found[:-1] == case["packs"][:-1]
    assert more[: len(less)] == less  # DeepSpeed leaves the last sample of the order out
    assert len(more) - len(less) <= 1
    assert sizes[:-1] == case["sizes"][:-1]
    assert longest[:-1] == case["longest"][:-1]
    assert sum(sizes) == len(more)
    assert all(sum(LENGTHS[sample] for sample in samples) <= case["arguments"]["max_tokens"] for _, samples in packs)


@pytest.mark.parametrize(("base", "size", "method", "wanted"), TABLE["rates"])
def test_rates_are_scaled_as_in_deepspeed(base: int, size: int, method: str, wanted: float) -> None:
    assert scale_lr(base, size, 0.1, method) == pytest.approx(wanted)


def test_another_method_is_refused() -> None:
    with pytest.raises(ValueError, match="linear, sqrt or none, not 'cube'"):
        scale_lr(1, 2, 0.1, "cube")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_tokens": 4}, "no sample fits a budget of 4 tokens: the shortest has [0-9]"),
        ({"max_tokens": 4000, "effective_batch_size": 8}, "90 samples make 2 packs of 4000 tokens"),
        ({"max_tokens": 4, "seqlens": []}, "no samples to put together: the data set is empty"),
        ({"max_tokens": 200, "sequence_picking_order": "long"}, "dataloader, random or seqlen, not 'long'"),
    ],
)
def test_budgets_that_do_not_fit_are_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        batch_by_seqlens(**{"seqlens": LENGTHS, **arguments})


def test_a_schedule_follows_sizes_and_resumes() -> None:
    def make() -> tuple[Any, VariableBatchSizeLR]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        base = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return optimizer, lr_scheduler_for_variable_batch_size(4, [4, 8, 2], None, base)

    optimizer, schedule = make()
    rates = [schedule.get_last_lr()[0]]
    for _ in range(4):
        optimizer.step()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.1, 0.05 * 2, 0.025 / 2, 0.0125, 0.00625 * 2])
    other, again = make()
    again.load_state_dict(schedule.state_dict())
    assert other.param_groups[0]["lr"] == pytest.approx(rates[-1])
    other.step()
    again.step()
    assert other.param_groups[0]["lr"] == pytest.approx(0.003125 / 2)
    fixed = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    constant = VariableBatchSizeLR(fixed, 4, [8, 4], lr_scaling_method="sqrt")
    assert constant.get_lr()[0] == pytest.approx(0.1 * 2**0.5)
    constant.step()
    assert constant.get_lr()[0] == pytest.approx(0.1)


def test_rates_that_are_logged_before_the_schedule_goes_on_are_those_of_the_step() -> None:
    """As the Trainer does it, which leaves ``step`` out where the optimizer's step was skipped."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    base = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    place, used, logged = 0, [], []
    schedule = VariableBatchSizeLR(base, 4, [4, 8, 2], position=lambda: place)
    for skipped in (False, True, True, False, False):
        used.append(optimizer.param_groups[0]["lr"])
        place += 1
        schedule.rescale(ahead=True)
        logged.append(schedule.get_last_lr()[0])
        if not skipped:
            optimizer.step()
            schedule.step()
    assert logged == used == pytest.approx([0.1, 0.1, 0.025, 0.05, 0.05])


def test_rates_that_something_else_sets_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = VariableBatchSizeLR(optimizer, 4, [4, 8, 2])
    schedule.step()
    optimizer.add_param_group({"params": torch.nn.Parameter(torch.ones(1)), "lr": 0.3})
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.15])
    assert not caplog.records
    optimizer.param_groups[0]["lr"] = 0.7
    schedule.step()
    assert "something else has set the rates of the optimizer" in caplog.text
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1, 0.3])
