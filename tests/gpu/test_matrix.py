"""The combinations of tests/contract/test_matrix.py against one process of plain torch, on two and on four GPUs.

Other ones each day, as ``DS_HF_MATRIX_SEED`` says; it is in what a failure prints.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.contract.matrix.cells import covering
from tests.contract.test_matrix import ASKED, TODAY, check

GPUS = torch.cuda.device_count()
PARTS = 10  # at a time, in processes of their own

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")]


@pytest.mark.skipif(not ASKED, reason="DS_HF_MATRIX names no combination")
def test_asked() -> None:
    check(ASKED, "nccl")


@pytest.mark.skipif(bool(ASKED), reason="DS_HF_MATRIX asks for others")
@pytest.mark.parametrize("part", range(PARTS))
def test_every_pair(part: int) -> None:
    print(f"DS_HF_MATRIX_SEED={TODAY}")
    check(list(covering(TODAY)[part::PARTS]), "nccl")


@pytest.mark.skipif(bool(ASKED), reason="DS_HF_MATRIX asks for others")
@pytest.mark.skipif(GPUS < 4, reason="needs four GPUs")
@pytest.mark.parametrize("part", range(PARTS // 2))
def test_two_of_each_mesh(part: int) -> None:
    print(f"DS_HF_MATRIX_SEED={TODAY}")
    check([replace(cell, copies=2) for cell in covering(TODAY)[2 * part :: PARTS]], "nccl")
