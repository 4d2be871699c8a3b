"""``managed_gradient_accumulation: false``: every ``step()`` takes what the backwards since the last one left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_hf import Engine, initialize
from ds_hf.errors import DsHfError
from ds_hf.log import logger
from tests.contract.test_behaviour import SGD, check, model, tokens
from tests.helpers.distributed import run_distributed
from tests.helpers.logs import Lines
from tests.helpers.models import TinyLM, token_batches
from tests.helpers.parity import Outcome, base_config, sgd, weight_error

GROUPS = (3, 1, 4)  # micro-batches of each step; the file says 2


def config(stage: int, **more: Any) -> dict[str, Any]:
    unmanaged = {"managed_gradient_accumulation": False, "gradient_accumulation_steps": 2, "optimizer": SGD}
    return base_config(stage, **{**unmanaged, **more})


def collectives(engine: Engine) -> int:
    kinds = [operation for operation, *_ in engine.axis.log.entries]
    return kinds.count("all-reduce") + kinds.count("reduce-scatter")


def any_number(stage: int, raw: bool = False, **more: Any) -> Outcome:
    """Of micro-batches a step; the loss of each is halved, as the file says."""
    reference, trained = model(), model()
    theirs = sgd(reference)
    engine, *_ = initialize(model=trained, config=config(stage, **more))
    assert not engine.managed_gradient_accumulation()
    rank, world = dist.get_rank(), dist.get_world_size()
    samples = 0
    for length, group in zip(GROUPS, tokens(len(GROUPS), 4), strict=True):
        theirs.zero_grad()
        for micro in group[:length]:
            for share in micro:
                (reference(share) / world / 2).backward()
            loss = engine(micro[rank])
            loss.backward() if raw else engine.backward(loss)
            assert not engine.is_gradient_accumulation_boundary()
        assert engine.begun_micro_batches == length
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), float("inf"))
        theirs.step()
        engine.step()
        samples += length * world  # of micro-batches of one sample, as the file says
        assert (engine.global_samples, engine.begun_micro_batches) == (samples, 0)
        assert engine.get_global_grad_norm() == pytest.approx(float(norm), rel=1e-5)
    assert engine.global_steps == engine.micro_steps == len(GROUPS)
    error = weight_error(trained, reference)
    engine.destroy()
    return Outcome(error, 0.0, 0.0)


def by_raw_backwards(stage: int) -> Outcome:
    return any_number(stage, raw=True)


@pytest.mark.parametrize("world", [1, 2])
def test_any_number_of_micro_batches(world: int) -> None:
    check(world, any_number, by_raw_backwards)


def offloaded() -> float:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    return any_number(2, zero_optimization=zero, optimizer={"type": "SGD", "params": SGD["params"]}).worst


def test_sums_in_host_memory() -> None:
    assert max(run_distributed(offloaded, 2)) < 1e-5


def reductions(stage: int) -> list[int]:
    """How many a step of each number of micro-batches takes."""
    engine, *_ = initialize(model=model(), config=config(stage))
    found = []
    for length in (1, 1, 3):
        for batch in token_batches(length, 2, 6, vocab=19):
            engine.backward(engine(batch))
        engine.axis.log.entries.clear()
        engine.step()
        found.append(collectives(engine))
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 1])
def test_what_is_kept_whole_is_reduced_once_by_step(stage: int) -> None:
    for found in run_distributed(reductions, 2, stage):
        assert found[0] > 1
        assert len(set(found)) == 1


def boundary_seen_by_hooks() -> list[bool]:
    engine, *_ = initialize(model=model(), config=config(1))
    seen = []
    engine.optimizer.register_step_pre_hook(lambda *_: seen.append(engine.is_gradient_accumulation_boundary()))
    for _ in range(2):
        engine.backward(engine(token_batches(2, 6, vocab=19)))
        engine.step()
    engine.destroy()
    return seen


def test_step_is_the_boundary_while_it_runs() -> None:
    assert boundary_seen_by_hooks() == [True, True]


def test_the_caller_cannot_set_a_boundary_as_well() -> None:
    engine, *_ = initialize(model=model(), config=config(0))
    with pytest.raises(DsHfError, match=r"engine\.step\(\) is the boundary there"):
        engine.set_gradient_accumulation_boundary(True)
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_zero_grad_drops_what_was_accumulated(stage: int) -> None:
    first, second = token_batches(2, 2, 6, vocab=19)
    norms = []
    for dropped in (True, False):
        engine, *_ = initialize(model=model(), config=config(stage))
        if dropped:
            engine.backward(engine(first))
            engine.zero_grad()
        engine.backward(engine(second))
        assert engine.begun_micro_batches == 1
        engine.step()
        norms.append(engine.get_global_grad_norm())
        engine.destroy()
    assert norms[0] == norms[1]


class Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return torch.full((6,), index % 19)


def test_a_checkpoint_amid_an_accumulation_begins_it_anew(tmp_path: Path) -> None:
    def start() -> Any:
        engine, _, loader, _ = initialize(
            model=TinyLM(vocab=19, width=12, depth=1), config=config(2), training_data=Numbers()
        )
        return engine, iter(loader)

    engine, batches = start()
    seen = []
    for index in range(5):
        batch = next(batches)
        seen.append(batch[0, 0].item())
        engine.backward(engine(batch))
        if index == 2:
            engine.step()
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    engine, batches = start()
    engine.load_checkpoint(tmp_path)
    assert (engine.global_steps, engine.global_samples, engine.micro_steps) == (1, 3, 1)
    again = next(iter(engine.training_dataloader))
    assert again[0, 0].item() == seen[3]
    engine.destroy()


def test_a_range_test_makes_its_own_steps() -> None:
    """Of two micro-batches, as the file says; then the caller's count again."""
    engine, *_ = initialize(model=model(), config=config(2))
    made = list(token_batches(16, 2, 6, vocab=19))
    result = engine.lr_range_test(made, num_steps=10, seeds=1, confirm_steps=3, max_lr=100)
    assert result.sweeps[0].lrs
    assert (engine.global_steps, engine.micro_steps, engine.begun_micro_batches) == (0, 0, 0)
    for batch in made[:3]:
        engine.backward(engine(batch))
    engine.step()
    assert (engine.global_steps, engine.global_samples) == (1, 3)
    engine.destroy()


def test_another_batch_size_divides_raw_backwards_too() -> None:
    """Where the engine counts: ``set_train_batch_size`` changes by what losses are divided, whoever runs backward."""
    batch = token_batches(2, 6, vocab=19)
    norms = []
    for raw in (False, True):
        engine, *_ = initialize(model=model(), config=base_config(2, optimizer=SGD, gradient_accumulation_steps=2))
        engine.set_train_batch_size(4)
        for _ in range(4):
            loss = engine(batch)
            loss.backward() if raw else engine.backward(loss)
            engine.step()
        norms.append(engine.get_global_grad_norm())
        assert engine.global_steps == 1
        engine.destroy()
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def counted_anew() -> list[list[int]]:
    """Micro-batches after which the weights changed: 2 to a step, then 4, then 1, and 3 from amid a step on."""
    engine, *_ = initialize(model=model(), config=base_config(2, optimizer=SGD, gradient_accumulation_steps=2))
    logger.addHandler(lines := Lines())
    batch, found = token_batches(2, 6, vocab=19), []
    for total, micro_batches in [(2, 4), (4, 4), (1, 2), (2, 1), (3, 2)]:
        engine.set_train_batch_size(total)
        stepped = []
        for number in range(1, micro_batches + 1):
            before = engine.global_steps
            engine.backward(engine(batch))
            engine.step()
            stepped += [number] * (engine.global_steps - before)
        found.append(stepped)
    engine.destroy()
    logger.removeHandler(lines)
    return [*found, [sum("change from 2 to 3 amid a step" in text for text in lines.texts)]]


def test_another_batch_size_begins_to_count_where_it_is_set() -> None:
    (found,) = run_distributed(counted_anew, 1)
    assert found == [[2, 4], [4], [1, 2], [], [2], [1]]
