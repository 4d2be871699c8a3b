"""The parity matrix on CUDA with NCCL: the same code as on CPU, one process a GPU.

The tolerance is wider than on the CPU: the reference adds up in another order there, and Adam's first steps amplify
the last bit of small gradients.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.contract.test_parity import ACCUMULATION, CLIPS, DTYPES, STAGES, check, reference, train_cells
from tests.helpers.distributed import run_distributed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_cells(world: int, stage: int, dtype: str) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} CUDA devices, found {torch.cuda.device_count()}")
    results = run_distributed(train_cells, world, stage, dtype, timeout=300, backend="nccl")
    for cell in product(ACCUMULATION, CLIPS):
        check([result[cell] for result in results], reference(*cell, world, "cuda"), dtype, 2e-5, cell)
