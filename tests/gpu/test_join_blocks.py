"""Small blocks that are communicated together, on GPUs: the same training, in fewer collectives, and no memory kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.zero.test_join_blocks import fewer_collectives, frozen_blocks, memory_comes_back, resume
from tests.helpers.distributed import run_distributed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.mark.parametrize("check", [fewer_collectives, memory_comes_back, frozen_blocks])
def test_on_gpus(check: Any) -> None:
    run_distributed(check, 2, timeout=120, backend="nccl")


def test_checkpoints_go_both_ways(tmp_path: Any) -> None:
    run_distributed(resume, 2, str(tmp_path), timeout=120, backend="nccl")
