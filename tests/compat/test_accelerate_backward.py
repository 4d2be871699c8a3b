"""``accelerator.backward()`` makes the step with DeepSpeed: where gradients are added up, and what is told."""

from __future__ import annotations

import logging
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from torch import Tensor

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


def telling(way: str) -> list[str]:
    forget_said()
    lines = Lines(logging.WARNING)
    logging.getLogger("ds_hf").addHandler(lines)
    accelerator, model, optimizer, batches = prepared(1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # as the Trainer's: it takes step() for its own
    for index, batch in enumerate(batches):
        accelerator.backward(loss_of(model, batch))
        if way == "two losses":
            accelerator.backward(model(batch[0]).square().mean())
        if way != "some steps" or index % 2:
            optimizer.step()
        optimizer.zero_grad()
    logging.getLogger("ds_hf").removeHandler(lines)
    accelerator.free_memory()
    fresh_start()
    return [text for text in lines.texts if "accelerator.backward()" in text]


def all_ways() -> dict[str, list[str]]:
    return {way: telling(way) for way in ("as usual", "two losses", "some steps")}


def test_several_backwards_for_a_step_are_told() -> None:
    found = run_user_code(all_ways)
    assert found[0]["as usual"] == []
    for way in ("two losses", "some steps"):
        (told,) = found[0][way]
        assert "called once for 2 calls" in told
    assert not any(found[1].values())
