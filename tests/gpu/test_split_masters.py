"""Split masters on GPUs: chosen by themselves, the same training as with whole ones, in less memory."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from ds_hf.engine.ops.split_master import split_fp32
from ds_hf.engine.zero.access import safe_get_full_fp32_param
from tests.gpu.test_overlap import data, engine_of, step
from tests.helpers.distributed import run_distributed
from tests.helpers.parity import full_weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
WORLDS = [1] + [2] * (torch.cuda.device_count() > 1)


def train(stage: int, split: bool | str) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor], int, int]:
    """Losses, masters, weights, bytes allocated between steps, and elements that this rank updates."""
    engine = engine_of(stage, width=512, blocks=3, ds_hf={"split_masters": split})
    assert bool(engine.optimizer.low_bits) == (split is not False)
    losses = [step(engine, data(256, 512, number)).item() for number in range(12)]
    gc.collect()
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    numel = sum(master.numel() for master in engine.optimizer.masters.values())
    masters = {}
    for name, param in engine.module.named_parameters():
        master = safe_get_full_fp32_param(param)
        assert master is not None
        masters[name] = master.cpu()
    weights = {name: value.cpu() for name, value in full_weights(engine.module).items()}
    engine.destroy()
    return losses, masters, weights, allocated, numel


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_is_the_same(stage: int, world: int) -> None:
    whole = run_distributed(train, world, stage, False, timeout=120, backend="nccl")
    halved = run_distributed(train, world, stage, "auto", timeout=120, backend="nccl")
    for before, after in zip(whole, halved, strict=True):
        assert after[0] == pytest.approx(before[0], rel=0.05)  # a tie changes a parameter, and so what follows
        assert after[0][0] == before[0][0]
        for name, master in after[1].items():
            difference = (master - before[1][name]).abs().mean()
            assert difference < 1e-4, (name, difference)  # the steps come to 5e-3 together
            assert torch.equal(split_fp32(master)[0], after[2][name]), name
        assert before[4] == after[4]
        assert before[3] - after[3] == pytest.approx(2 * after[4], rel=0.02)
