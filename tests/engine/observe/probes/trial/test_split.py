"""What the time of a step is made of, by the names of a GPU's kernels and copies. Real steps: ``test_driver``."""

from __future__ import annotations

import pytest

from ds_hf.engine.observe.probes.trial.split import _is_communication, covered


@pytest.mark.parametrize(
    ("name", "talks"),
    [
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", True),
        ("Memcpy PtoP (Device -> Device)", True),
        ("void c10d::symmetric_memory::barrier_kernel(unsigned int**, int, int, int, unsigned long)", True),
        ("Memcpy HtoD (Pinned -> Device)", True),
        ("Memcpy DtoD (Device -> Device)", False),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", False),
        ("gloo:all_gather", True),
    ],
)
def test_what_counts_as_communication(name: str, talks: bool) -> None:
    assert _is_communication(name) is talks


def test_overlaps_count_once() -> None:
    assert covered([(0, 4), (2, 6), (10, 11), (3, 5)]) == 7
