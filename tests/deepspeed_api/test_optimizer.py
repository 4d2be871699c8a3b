"""What DeepSpeed's users read from ``engine.optimizer`` and its loss scaler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hf import Engine, initialize
from ds_hf.engine.optim.loss_scaler import DynamicLossScaler, NoLossScaler, StaticLossScaler
from ds_hf.engine.zero.access import safe_get_full_fp32_param, safe_get_full_grad
from tests.helpers.distributed import run_distributed
from tests.helpers.parity import base_config, full_weights

STAGES = (0, 1, 2, 3)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(5))
        self.second = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.first * x).sum() * 2 + self.second.sum() * 3


def make(stage: int, **more: Any) -> Engine:
    model = Two()
    groups = [{"params": [model.first], "lr": 0.5}, {"params": [model.second], "lr": 0.25}]
    return initialize(model=model, model_parameters=groups, config=base_config(stage, **more))[0]


def gradients(stage: int) -> None:
    engine, rank = make(stage), dist.get_rank()
    optimizer = engine.optimizer
    assert optimizer is not None
    assert optimizer.averaged_gradients == {}
    assert [[p.ds_shape if stage == 3 else p.shape for p in g] for g in optimizer.bit16_groups] == [[(5,)], [(3,)]]
    engine.backward(engine(torch.arange(5.0)))
    parts = optimizer.get_fp32_grad_partitions()
    expected = [[0.0, 2.0, 4.0], [6.0, 8.0, 0.0]][rank]
    assert {g: {i: t.tolist() for i, t in of.items()} for g, of in parts.items()} == {
        0: {0: expected},
        1: {0: [[3.0, 3.0], [3.0, 0.0]][rank]},
    }
    norms = [norm.item() for norm in optimizer._get_norm_groups()]
    assert norms == pytest.approx([120**0.5, 27**0.5])
    if stage:
        views = optimizer.averaged_gradients
        assert {index: len(of) for index, of in views.items()} == {0: 1, 1: 1}
        for of in views.values():
            of[0].fill_(1.0)
        for param in (engine.module.first, engine.module.second):
            gradient = safe_get_full_grad(param)
            assert gradient is not None
            assert gradient.eq(1.0).all()
    engine.step()
    assert optimizer.averaged_gradients == {}
    assert optimizer._global_grad_norm == engine.get_global_grad_norm()


def masters(stage: int) -> None:
    engine = make(stage, bf16={"enabled": True})
    optimizer = engine.optimizer
    assert optimizer is not None
    for _ in range(2):
        engine.backward(engine(torch.arange(5.0)))
        engine.step()
    flats, groups = optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups
    assert len(flats) == len(groups)
    assert {float(optimizer.state[flat]["step"]) for flat in flats} <= {2.0}
    assert sum(flat.numel() for flat in flats) <= 48
    weights = full_weights(engine.module)
    with torch.no_grad():
        for flat in optimizer.single_partition_of_fp32_groups:
            flat.fill_(4.0)
    optimizer.update_lp_params()
    assert all(value.eq(4.0).all() for value in full_weights(engine.module).values())
    assert not weights["first"].eq(4.0).any()
    if stage < 3:
        with torch.no_grad():
            engine.module.first.fill_(8.0)
        optimizer.refresh_fp32_params()
        master = safe_get_full_fp32_param(engine.module.first)
        assert master is not None
        assert master.tolist() == [8.0] * 5
    assert optimizer.partition_count == [dist.get_world_size() if stage else 1] * 2
    assert not optimizer.cpu_offload


def scales(stage: int) -> None:
    optimizer = make(stage, fp16={"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}).optimizer
    assert optimizer is not None
    assert optimizer.needs_scaler()
    for holder in (optimizer, optimizer.loss_scaler, optimizer.loss_scale_config):
        found = [getattr(holder, name) for name in ("dynamic_loss_scale", "cur_scale", "cur_iter", "scale_window")]
        assert found == [True, 256.0, 0, 2]
    optimizer.loss_scale = 64.0
    assert (optimizer.loss_scaler.scale, optimizer.custom_loss_scaler) == (64.0, False)
    for wrong, words in ((float("inf"), "must be finite"), (0.0, "must be greater than 0")):
        with pytest.raises(ValueError, match=words):
            optimizer.override_loss_scale(wrong)
    optimizer.override_loss_scale(32.0)
    assert (optimizer.cur_scale, optimizer.dynamic_loss_scale, optimizer.external_loss_scale) == (32.0, False, 32.0)
    optimizer.clip_grad = 0.5
    assert optimizer.clip_grad == 0.5


def every_stage() -> None:
    for stage in STAGES:
        print("stage", stage)
        gradients(stage)
        masters(stage)
        scales(stage)


def test_what_users_read() -> None:
    run_distributed(every_stage, 2, timeout=100)


def test_names_of_the_scalers() -> None:
    scaler = DynamicLossScaler(16.0, 2, 1, min_loss_scale=4.0, ends_at_minimum=False)
    for expected in (8.0, 4.0, 4.0):
        scaler.update(True)
        assert scaler.cur_scale == expected
    assert (scaler.cur_iter, scaler.last_overflow_iter, scaler.cur_hysteresis, scaler.min_scale) == (3, 2, 1, 4.0)
    assert (StaticLossScaler(8.0).loss_scale, StaticLossScaler(8.0).dynamic_loss_scale) == (8.0, False)
    assert [s.use_grad_scaling for s in (scaler, StaticLossScaler(8.0), NoLossScaler())] == [True, True, False]


def test_at_stage_0_in_fp32_it_is_the_users_own() -> None:
    model = nn.Linear(4, 4)
    given = torch.optim.AdamW(model.parameters(), lr=0.1)
    _, optimizer, *_ = initialize(model=model, optimizer=given, config={"train_micro_batch_size_per_gpu": 1})
    assert optimizer == given
    assert given == optimizer
    assert hash(optimizer) == hash(given)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer != torch.optim.AdamW(nn.Linear(4, 4).parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert schedule.get_last_lr() == [0.05]


@pytest.mark.parametrize("section", [{"zero_optimization": {"stage": 1}}, {"bf16": {"enabled": True}}])
def test_otherwise_it_is_not(section: dict[str, Any]) -> None:
    model = nn.Linear(4, 4)
    given = torch.optim.AdamW(model.parameters(), lr=0.1)
    config = {"train_micro_batch_size_per_gpu": 1, **section}
    _, optimizer, *_ = initialize(model=model, optimizer=given, config=config)
    assert optimizer != given
    assert not isinstance(optimizer, torch.optim.AdamW)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.optimizer is given
