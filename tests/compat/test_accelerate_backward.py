"""``accelerator.backward()`` makes the step with DeepSpeed: where gradients are added up or dropped, by what they are
divided, and what is told."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import DummyOptim, DummyScheduler
from torch import Tensor

from ds_hf.config.plan import StatePlan
from ds_hf.hf.accelerate_loop import begin
from ds_hf.log import forget_said
from tests.compat.accelerate_user import DEVICE, LR, MICRO, Regressor, fresh_start, loader, loss_of, plain_batches
from tests.compat.common import WORLD, run_user_code
from tests.compat.test_accelerate_prepare import STAGES, config
from tests.helpers.logs import Lines

STEPS = 3


def prepared(stage: int) -> Any:
    fresh_start()
    settings = {**config(stage), "gradient_clipping": 0.0}
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings))
    model = Regressor()
    adam = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    return accelerator, *accelerator.prepare(model, adam, loader(2 * STEPS * MICRO * accelerator.num_processes))


def adding_up() -> Any:
    """Micro-batches, and the two losses of a batch, of which all but the last are inside ``no_sync()``."""
    found = {}
    for stage in STAGES:
        accelerator, model, optimizer, batches = prepared(stage)
        for index, batch in enumerate(batches):
            with accelerator.no_sync(model):
                accelerator.backward(loss_of(model, batch) / 2)
                if index % 2 == 0:
                    accelerator.backward(model(batch[0]).square().mean() / 2)
            if index % 2:
                accelerator.backward(model(batch[0]).square().mean() / 2)
                optimizer.step()
                optimizer.zero_grad()
        found[stage] = {name: value.cpu() for name, value in (accelerator.get_state_dict(model) or {}).items()}
        accelerator.free_memory()
    fresh_start()
    return found


def alone() -> dict[str, Tensor]:
    """The same in torch, on one process."""
    model = Regressor().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    for index, batch in enumerate(plain_batches(WORLD, 2 * STEPS * MICRO * WORLD)):
        ((loss_of(model, batch) + model(batch[0]).square().mean()) / 2).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.cpu() for name, value in model.state_dict().items()}


def test_gradients_of_no_sync_are_added_up_at_every_stage() -> None:
    expected = alone()
    found = run_user_code(adding_up)[0]
    for stage in STAGES:
        for name, value in expected.items():
            torch.testing.assert_close(found[stage][name], value, rtol=1e-4, atol=1e-6, msg=f"stage {stage}, {name}")


def telling(way: str, stage: int = 1) -> list[str]:
    forget_said()
    lines = Lines(logging.WARNING)
    logging.getLogger("ds_hf").addHandler(lines)
    accelerator, model, optimizer, batches = prepared(stage)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # as the Trainer's: it takes step() for its own
    for index, batch in enumerate(batches):
        loss = loss_of(model, batch)
        loss.backward() if way == "no steps" else accelerator.backward(loss)
        if way == "two losses":
            accelerator.backward(model(batch[0]).square().mean())
        if way == "the norm":
            accelerator.clip_grad_norm_(model.parameters(), math.inf, norm_type=1)
        if way == "a part":
            accelerator.clip_grad_norm_(model.head.parameters(), math.inf)
        if way == "torch's clipping":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        if way == "the module's":
            model.zero_grad()
        if way != "some steps" or index % 2:
            optimizer.step()
        optimizer.zero_grad()
    logging.getLogger("ds_hf").removeHandler(lines)
    accelerator.free_memory()
    fresh_start()
    return [text for text in lines.texts if "accelerator." in text]


def all_ways() -> dict[str, list[str]]:
    ways = ("as usual", "two losses", "some steps", "no steps", "the norm", "a part", "the module's")
    clipped = {f"clipped {stage}": telling("torch's clipping", stage) for stage in (0, 1, 3)}
    return {way: telling(way) for way in ways} | clipped


def test_several_backwards_for_a_step_are_told() -> None:
    found = run_user_code(all_ways)
    assert found[0]["as usual"] == found[0]["the module's"] == []
    for stage in (0, 1, 3):
        (told,) = found[0][f"clipped {stage}"]
        assert "clip_grad_norm_() changes nothing after accelerator.backward()" in told
        assert '"gradient_clipping": 0.05' in told
    for way in ("two losses", "some steps"):
        (told,) = found[0][way]
        assert "called once for 2 calls" in told
    assert "in place of loss.backward()" in found[0]["no steps"][0]
    assert "the norm of order 1" in found[0]["the norm"][0]
    assert "all but 4 of the model's trained parameters" in found[0]["a part"][0]
    assert not any(found[1].values())


def trained(accelerator: Any, model: Any) -> dict[str, Tensor]:
    found = {name: value.cpu() for name, value in (accelerator.get_state_dict(model) or {}).items()}
    accelerator.free_memory()
    return found


def mean_of_other_numbers(stage: int) -> dict[str, Tensor]:
    """Two micro-batches a step, then four: said by the Accelerator, which divides by what it says now."""
    accelerator, model, optimizer, batches = prepared(stage)
    for steps in (2, 4):
        accelerator.gradient_accumulation_steps = steps
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
    return trained(accelerator, model)


def by_closures(stage: int) -> dict[str, Tensor]:
    accelerator, model, optimizer, batches = prepared(stage)
    for batch in batches:

        def closure(batch: Any = batch) -> Tensor:
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            return loss

        assert float(optimizer.step(closure).detach()) >= 0
    return trained(accelerator, model)


def against_another(stage: int) -> dict[str, Tensor]:
    """A model whose loss the other is trained by, which has it dropped by ``zero_grad()`` before its own."""
    accelerator, model, optimizer, batches = prepared(stage)
    judging = Accelerator()
    judge = Regressor(seed=1)
    judge, its_optimizer = judging.prepare(judge, torch.optim.AdamW(judge.parameters(), lr=LR, weight_decay=0.0))
    for batch in batches:
        accelerator.backward((model(batch[0])[:, None] * judge(batch[0])).mean())
        optimizer.step()
        optimizer.zero_grad()
        its_optimizer.zero_grad()
        judging.backward(loss_of(judge, batch))
        its_optimizer.step()
        its_optimizer.zero_grad()
    found = trained(judging, judge)
    accelerator.free_memory()
    return found


def as_without(stages: tuple[int, ...]) -> Any:
    found = {stage: [work(stage) for work in (mean_of_other_numbers, by_closures, against_another)] for stage in stages}
    fresh_start()
    return found


def alone_as_well() -> list[dict[str, Tensor]]:
    found = []
    batches = plain_batches(WORLD, 2 * STEPS * MICRO * WORLD)
    for groups, seed in (((2, 4), 0), ((1,), 0), ((1,), 1)):
        model = Regressor(seed).to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
        for steps in groups:
            for index, batch in enumerate(batches):
                (loss_of(model, batch) / steps).backward()
                if (index + 1) % steps == 0 or index + 1 == len(batches):
                    optimizer.step()
                    optimizer.zero_grad()
        found.append({name: value.cpu() for name, value in model.state_dict().items()})
    return found


def test_a_loop_means_what_it_means_without_deepspeed() -> None:
    """Micro-batches a step that change, closures, and ``zero_grad()`` of what another model's loss gave."""
    expected = alone_as_well()
    for stage, found in run_user_code(as_without, (1, 3))[0].items():
        for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            for name, value in theirs.items():
                torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-6, msg=f"{stage} {index} {name}")


def test_what_a_placeholder_says_and_the_file_does_not_is_told() -> None:
    forget_said()
    written = {"lr": 0.01, "betas": [0.8, 0.9]}
    accelerator = SimpleNamespace(gradient_accumulation_steps=1, deepspeed_config={"optimizer": {"params": written}})
    lines = Lines(logging.WARNING)
    logging.getLogger("ds_hf").addHandler(lines)
    begin(accelerator, [DummyOptim([], lr=0.01, betas=(0.8, 0.9))], [])
    assert lines.texts == []
    begin(accelerator, [DummyOptim([], lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)], [])
    logging.getLogger("ds_hf").removeHandler(lines)
    (told,) = lines.texts
    assert "weight_decay=0.1, eps=1e-06" in told


@pytest.mark.parametrize(("given", "told"), [(10, []), (24, ["warmup_num_steps=5", "total_num_steps=12"])])
def test_a_schedule_that_the_file_contradicts_is_told(given: int, told: list[str]) -> None:
    """The file's numbers counted without a word."""
    forget_said()
    params = {"warmup_num_steps": 2, "total_num_steps": 5}
    accelerator = SimpleNamespace(
        gradient_accumulation_steps=1, deepspeed_config={"scheduler": {"params": params}}, num_processes=2,
        split_batches=False,
    )  # fmt: skip
    lines = Lines(logging.WARNING)
    logging.getLogger("ds_hf").addHandler(lines)
    begin(accelerator, [DummyScheduler(None, total_num_steps=given, warmup_num_steps=5 if told else 2)], [])
    logging.getLogger("ds_hf").removeHandler(lines)
    assert len(lines.texts) == bool(told)
    assert all(each in lines.texts[0] for each in told)


class Engine:
    plan, optimizer, destroyed = object.__new__(StatePlan), object(), False


def test_a_model_with_another_number_of_micro_batches_is_told() -> None:
    """accelerate makes steps of all models by the number of the one that was prepared last."""
    forget_said()
    counts, engines, shared = (2, 2, 3), [Engine(), Engine(), Engine()], SimpleNamespace()
    lines = Lines(logging.WARNING)
    logging.getLogger("ds_hf").addHandler(lines)
    told = []
    for count, engine in zip(counts, engines, strict=True):
        begin(SimpleNamespace(gradient_accumulation_steps=count, gradient_state=shared), [], [engine])
        told.append(len(lines.texts))
    logging.getLogger("ds_hf").removeHandler(lines)
    assert told == [0, 0, 1]
    assert "says 3 a step now: models that were prepared before, with 2, " in lines.texts[0]
