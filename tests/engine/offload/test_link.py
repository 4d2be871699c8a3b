"""Copies in parts. That others' copies get between, and that every byte arrives, is seen on a GPU (tests/gpu)."""

from __future__ import annotations

import pytest
import torch

from ds_hf.engine.offload import link
from ds_hf.engine.offload.link import HostLink, _Direction

CPU = torch.device("cpu")


@pytest.mark.parametrize(("numel", "parts"), [(0, 1), (1000, 1), (1001, 2), (7000, 7), (7001, 8)])
def test_parts(numel: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_PART", 1000)
    target, source = torch.zeros(numel, dtype=torch.uint8), torch.arange(numel).to(torch.uint8)
    found = _Direction(CPU, yielding=True)._parts(target, source)
    assert len(found) == parts
    for to, of in found:
        assert to.nbytes == of.nbytes <= 1000
        to.copy_(of)
    assert torch.equal(target, source)
    assert len(_Direction(CPU, yielding=False)._parts(target, source)) == 1


def test_a_part_is_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_PART", 1000)
    wide = torch.zeros(600, dtype=torch.float32)
    assert [to.numel() for to, _ in _Direction(CPU, yielding=True)._parts(wide, wide)] == [200, 200, 200]


def test_without_a_gpu_copies_are_done_at_once() -> None:
    for way in (HostLink(CPU), HostLink(CPU, yielding=True)):
        target, source = torch.zeros(5), torch.ones(5)
        way.up(target, source).on_host()
        assert torch.equal(target, source)
        way.down(target, 2 * source).on_stream()
        assert torch.equal(target, 2 * source)
        assert way.fetch(source)[0] is source
        way.close()
