"""The parity matrix on CUDA with NCCL: the same code as on CPU, one process a GPU.

The tolerance is wider than on the CPU: the reference adds up in another order there, and Adam's first steps amplify
the last bit of small gradients.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.contract.test_parity import ACCUMULATION, CLIPS, DTYPES, STAGES, check, reference, train
from tests.helpers.distributed import run_distributed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(
    ("world", "stage", "dtype", "accumulation", "clip"),
    list(product((1, 2), STAGES, DTYPES, ACCUMULATION, CLIPS)),
    ids=lambda value: str(value),
)
def test_cell(world: int, stage: int, dtype: str, accumulation: int, clip: float) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} CUDA devices, found {torch.cuda.device_count()}")
    results = run_distributed(train, world, stage, dtype, accumulation, clip, timeout=180, backend="nccl")
    check(results, reference(accumulation, clip, world, "cuda"), dtype, 2e-5)
