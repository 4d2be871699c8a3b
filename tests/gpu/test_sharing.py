"""Two engines whose models share modules, and what is unfrozen in training, on GPUs: as plain torch on one CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.optim.test_unfreezing import OTHERS, SOME, _cases
from tests.engine.zero.test_sharing import KINDS, one_reaches_through_the_other, two_engines
from tests.helpers.distributed import run_distributed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def every_kind(folder: str) -> None:
    for kind in KINDS:
        for stages in ((3, 3), (0, 3), (3, 1), (2, 2)):
            two_engines(kind, stages, stages[1] == 3, 2, f"{folder}/{kind}{stages[0]}{stages[1]}")
    for stages in ((3, 3), (1, 0), (2, 3)):
        one_reaches_through_the_other(stages, True, 2, False)


def test_two_engines(tmp_path: Path) -> None:
    run_distributed(every_kind, 2, str(tmp_path), timeout=120, backend="nccl")


def test_unfrozen_in_training() -> None:
    # Muon's products are in bf16 on a GPU: it is compared on CPUs
    cases = [case for case in SOME + OTHERS if case[1] != "Muon"]
    run_distributed(_cases, 2, cases, timeout=120, backend="nccl")
