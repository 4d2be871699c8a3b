"""transformers' own caches on a GPU through ``init_inference``: in host memory, and of few bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.cache_utils import Cache

from ds_hf import init_inference
from tests.helpers.generating import GREEDY, left_padded, small_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

HOST = {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}}
WAYS: list[dict[str, Any]] = [{}, {"replace_with_kernel_inject": True}, {"zero": HOST}]


def prompts() -> dict[str, torch.Tensor]:
    return {key: value.cuda() for key, value in left_padded().items()}


@pytest.fixture
def _copies_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.17 fetches keys that are still on their way to host memory; later ones wait for them, as here."""
    prefetch = Cache.prefetch

    def after_what_was_queued(self: Cache, *args: Any, **kwargs: Any) -> None:
        self.prefetch_stream.wait_stream(torch.cuda.default_stream())
        prefetch(self, *args, **kwargs)

    monkeypatch.setattr(Cache, "prefetch", after_what_was_queued)


@pytest.mark.usefixtures("_copies_in_order")
@pytest.mark.parametrize("options", WAYS, ids=["plain", "static", "host"])
@pytest.mark.parametrize("cache", ["offloaded", "offloaded_static"])
def test_a_cache_in_host_memory(cache: str, options: dict[str, Any]) -> None:
    """Keys and values come back as they were: the tokens are those of a cache that stays."""
    plain = small_model("llama").cuda()
    expected = plain.generate(**prompts(), **GREEDY)
    engine = init_inference(small_model("llama"), dtype="fp32", **options)
    settings = {**GREEDY, "cache_implementation": cache}
    assert torch.equal(engine.generate(**prompts(), **settings), expected)
    engine.destroy()


@pytest.mark.parametrize("options", WAYS, ids=["plain", "static", "host"])
@pytest.mark.parametrize("backend", ["quanto", "hqq"])
def test_a_cache_of_few_bits(backend: str, options: dict[str, Any]) -> None:
    """What the model itself says with one, which is not what it says without."""
    pytest.importorskip("optimum.quanto" if backend == "quanto" else "hqq")
    form = {"backend": backend, "nbits": 4, "q_group_size": 16, "residual_length": 8}
    settings = {**GREEDY, "cache_implementation": "quantized", "cache_config": form}
    plain = small_model("llama").cuda()
    exact, expected = plain.generate(**prompts(), **GREEDY), plain.generate(**prompts(), **settings)
    assert not torch.equal(exact, expected)
    engine = init_inference(small_model("llama"), dtype="fp32", **options)
    assert torch.equal(engine.generate(**prompts(), **settings), expected)
    engine.destroy()
