"""No rank ever holds the model: host and device memory while a model in several files is loaded at stage 3."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.compat import stage3_code as code
from tests.compat.common import WORLD, run_user_code

STAGE3 = "Stage 3 models"
MIB = 1 << 20
# fp32: 12 blocks of 4.9 MiB, with embeddings 60 MiB
SIZES = {
    "hidden_size": 320,
    "intermediate_size": 880,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "tie_word_embeddings": False,
}
BLOCK = (4 * 320 * 320 + 3 * 320 * 880) * 4
SLACK = 6 * MIB  # Python's own objects, allocator

needs_two = pytest.mark.skipif(WORLD < 2, reason="one process has to hold the whole model")


class Peak:
    """Largest memory of this process while it is watched, above what it had before: bytes."""

    host = 0
    device = 0


def anonymous() -> int:
    """Bytes of memory of this process that no file backs: pages of a mapped file belong to the system."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


@contextmanager
def watched() -> Iterator[Peak]:
    """Watch the memory of this process."""
    peak, done = Peak(), threading.Event()
    before = anonymous()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()

    def sample() -> None:
        while not done.wait(0.0005):
            peak.host = max(peak.host, anonymous() - before)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()
        peak.host = max(peak.host, anonymous() - before)
        if torch.cuda.is_available():
            peak.device = torch.cuda.max_memory_allocated()


def load_and_initialize(folder: Path) -> dict[str, tuple[int, int]]:
    """Peaks of loading and of initialize(), host and device."""
    import deepspeed
    from transformers import AutoModelForCausalLM

    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed goes back at once, so that peaks are ours
    deepspeed.init_distributed()
    with code.under_stage3() as settings:
        AutoModelForCausalLM.from_pretrained(folder / "warm")  # imports, caches, sockets
        with watched() as loading:
            model = AutoModelForCausalLM.from_pretrained(folder / "model")
        with watched() as starting:
            # blocks as small as these would be joined, up to 80 MiB
            engine = code.initialize(model, {**settings, "ds_hf": {"join_blocks": False}})
        engine.destroy()
    return {"loading": (loading.host, loading.device), "starting": (starting.host, starting.device)}


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[int, int]]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("memory")
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.save_pretrained(folder / "model", max_shard_size="10MB")
    assert len(list((folder / "model").glob("*.safetensors"))) >= 6
    assert sum(p.nbytes for p in model.parameters()) > 60e6
    LlamaForCausalLM(LlamaConfig(**code.LLAMA)).save_pretrained(folder / "warm")
    return run_user_code(load_and_initialize, folder)


@needs_two
@pytest.mark.feature(STAGE3, "no rank ever holds the model", pain="P15")
def test_no_rank_ever_holds_the_model_while_it_is_loaded(peaks: list[dict[str, tuple[int, int]]]) -> None:
    model = 12 * BLOCK + 2 * 1000 * 320 * 4
    for rank in peaks:
        host, device = rank["loading"]
        assert (device or host) < model / WORLD + BLOCK + SLACK, rank
        assert host < model / WORLD + BLOCK + SLACK, rank


@needs_two
@pytest.mark.feature(STAGE3, "no rank ever holds the model", pain="P15")
def test_initialize_needs_a_few_blocks_more_than_the_shards(peaks: list[dict[str, tuple[int, int]]]) -> None:
    for rank in peaks:
        host, device = rank["starting"]
        # new shards are made block by block, and the old ones freed: a block gathered, staged, and its shards
        assert host < 4 * BLOCK + SLACK, rank
        assert device < (12 * BLOCK + 2 * 1000 * 320 * 4) / WORLD + 4 * BLOCK + SLACK, rank
