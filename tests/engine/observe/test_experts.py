"""The share of the fullest expert: what monitors are told of all processes, and a router that has collapsed."""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import ds_hf
from ds_hf.engine.observe import experts as balance
from tests.helpers.compiled import with_quick_backend
from tests.helpers.distributed import run_distributed
from tests.helpers.experts import batches_of, build, loss_of, section
from tests.helpers.logs import Lines


def train(folder: str, size: int, collapsed: bool) -> tuple[list[list[int]], list[str]]:
    """Counts of routes by layer on this process, and what was warned of."""
    balance.STEPS = 2
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ds_hf").addHandler(handler)
    model = build("olmoe", num_experts=8, num_local_experts=8)
    routed: list[list[int]] = []
    for module in model.modules():
        if hasattr(module, "experts"):

            def note(_: Any, args: Any, out: Any) -> Any:
                chosen = torch.arange(2).expand_as(out[2]) if collapsed else out[2]
                routed.append(torch.bincount(chosen.flatten(), minlength=8).tolist())
                return out[0], out[1], chosen

            module.gate.register_forward_hook(note)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-6}},
        "zero_optimization": {"stage": 1},
        "expert_parallel": section(size),
        "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "run"},
    }
    engine, *_ = ds_hf.initialize(model=model, config=config)
    for batches in batches_of(2, 1, 2):
        engine.backward(loss_of(engine, batches[engine.axis.rank]))
        engine.step()
    engine.destroy()
    return routed, [each for each in said if "router" in each]


@pytest.mark.parametrize("size", [1, 2])
def test_monitors_are_told_of_all_processes(size: int, tmp_path: Path) -> None:
    ranks = run_distributed(train, 2, str(tmp_path), size, False, timeout=60)
    layers = [torch.tensor([row for routed, _ in ranks for row in routed[index::2]]).sum(0) for index in range(2)]
    wanted = max(float(layer.max() / (layer.sum() / 2)) for layer in layers)
    rows = list(csv.reader((tmp_path / "run" / "Train_Experts_fullest_share.csv").open()))
    assert [float(value) for _, value in rows[-1:]] == [pytest.approx(wanted)]
    rows = list(csv.reader((tmp_path / "run" / "Train_Experts_unused.csv").open()))
    assert float(rows[-1][1]) == sum(int((layer == 0).sum()) for layer in layers)
    assert ranks[0][1] == []


def test_a_router_that_has_collapsed_is_told(tmp_path: Path) -> None:
    first, second = run_distributed(train, 2, str(tmp_path), 2, True, timeout=60)
    assert len(first[1]) == 2  # one a layer
    assert "sends 100% of all tokens to expert 0, and 25% would be even" in first[1][0]
    assert second[1] == []


def test_numbers_that_stand_for_no_expert() -> None:
    counter = balance._Counter(4, torch.device("cpu"))
    chosen = torch.tensor([[-1, 2], [4, 0], [2, 9], [-7, 3]])
    counter.count(torch.nn.Module(), (torch.zeros(4, 8), chosen), {})
    assert (counter.row.tolist(), int(counter.top)) == ([1, 0, 2, 1, 4], 2)


def uncalled(skips: bool) -> list[str]:
    """The second block may not call its experts; they train as in evaluation."""
    logging.getLogger("ds_hf").addHandler(lines := Lines())
    model: Any = build("mixtral")
    if skips:
        model.model.layers[1].mlp.forward = lambda hidden: hidden
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, "expert_parallel": section(2)}
    engine, *_ = ds_hf.initialize(model=model, config=config)
    engine.eval()
    for batches in batches_of(2, 1, 2):
        engine.backward(loss_of(engine, batches[engine.axis.rank]))
        engine.step()
    engine.destroy()
    return [text for text in lines.texts if "no token came to" in text]


def test_experts_that_are_not_called_are_told() -> None:
    assert run_distributed(uncalled, 2, False, timeout=60) == [[], []]
    first, second = run_distributed(uncalled, 2, True, timeout=60)
    assert len(first) == 1
    assert first[0].startswith("no token came to model.layers.1.mlp.experts and 0 other layers")
    assert second == []


def compiled() -> list[tuple[int, dict[str, int], list[dict[str, Any]], list[float]]]:
    """Graphs, breaks, the routes told, and losses: of blocks, and of checkpointed blocks."""
    torch.set_num_threads(1)
    found = []
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-4}},
        "zero_optimization": {"stage": 3},
        "expert_parallel": section(1),
        "ds_hf": {"compile": "blocks"},
    }
    for checkpointed in (False, True):
        torch._dynamo.reset()
        model: Any = build("qwen3_moe", experts="grouped_mm")
        model.config.use_cache = False
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        engine = with_quick_backend(ds_hf.initialize(model=model, config=config)[0])
        losses = []
        for batches in batches_of(2, 1, 1):
            loss = loss_of(engine, batches[0].to(engine.device))
            losses.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
        (counted,) = (each for each in engine.events.observers if isinstance(each, balance.Balance))
        report = engine.compiler.report()
        found.append((report.graphs, report.breaks, counted.told(), losses))
        engine.destroy()
    return found


def test_checkpointed_blocks_are_compiled_and_counted() -> None:
    """A checkpoint is a part of the block's graph, and what is noted in it may not break that."""
    ((plain, checkpointed),) = run_distributed(compiled, 1, timeout=100)
    assert checkpointed[:2] == plain[:2] == (1, {})
    assert [(layer["top"], sum(layer["routes"])) for layer in plain[2]] == [(2, 2 * 2 * 16)] * 2
    assert checkpointed[2] == plain[2]
    assert checkpointed[3] == pytest.approx(plain[3], rel=1e-6)
