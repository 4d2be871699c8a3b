"""Divided tokens that travel by copies: the numbers of collectives to the bit, in compiled blocks, too."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_hf.engine.comm import peer_exchanges
from ds_hf.engine.comm.peer_exchanges import PeerExchanges
from tests.contract.test_divided_tokens import KEY, engine_of, gradients_of
from tests.engine.comm.test_peer_exchanges import exchanges_in_files
from tests.helpers.compiled import with_quick_backend
from tests.helpers.distributed import run_distributed
from tests.helpers.tensor import build


def gradients(folder: str, compiled: bool, copied: bool) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Whole gradients, and how often copies gathered and summed."""
    peer_exchanges.LEAST_EXCHANGED_NBYTES = 0
    model: Any = build("llama", use_cache=False)
    engine = engine_of(model, "llama", 2, 2, KEY | ({"compile": "blocks"} if compiled else {}))
    axis, counts = engine.mesh.axis("tensor"), {"all_gather": 0, "reduce_scatter": 0}
    copies = exchanges_in_files(axis, folder)
    if copied:
        axis.log.exchanges = weakref.ref(copies)
        count(copies, counts)
    if compiled:
        with_quick_backend(engine)
    found = gradients_of(engine)[1]
    if compiled:
        assert engine.compile_report().breaks == {}
        assert engine.compile_report().graphs
    engine.destroy()
    return found, counts


def count(copies: PeerExchanges, counts: dict[str, int]) -> None:
    def counting(name: str, method: Any) -> Any:
        def call(*args: Any) -> Any:
            counts[name] += 1
            return method(*args)

        return call

    for name in counts:
        setattr(copies, name, counting(name, getattr(copies, name)))


def both(folder: str, compiled: bool) -> tuple[dict[str, int], list[str]]:
    """Calls of copies, and gradients that are not those of collectives."""
    expected, none = gradients(folder, compiled, copied=False)
    found, counts = gradients(folder, compiled, copied=True)
    assert set(none.values()) == {0}
    return counts, [name for name, value in expected.items() if not torch.equal(found[name], value)]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_copies_change_no_bit(tmp_path: Path, compiled: bool) -> None:
    for counts, others in run_distributed(both, 2, str(tmp_path), compiled, timeout=120):
        assert others == []
        # forward and backward of 3 micro-batches: 2 blocks, in each 2 gathers and 2 sums before and behind cut layers
        assert counts["all_gather"] >= 3 * 2 * 4
        assert counts["reduce_scatter"] >= 3 * 2 * 4
