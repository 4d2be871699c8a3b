"""What generating takes, predicted on the meta device, against the weights and caches of real engines."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from ds_hf import init_inference
from ds_hf.memory.inference import cached_bytes, predict_inference
from ds_hf.memory.models import without_values
from ds_hf.memory.prediction import UnpredictableError
from tests.helpers.generating import GREEDY, left_padded, small_model


def kept(cache: Any) -> int:
    """Bytes of a static cache."""
    parts = [cache] if not hasattr(cache, "self_attention_cache") else [cache.self_attention_cache]
    parts += [cache.cross_attention_cache] if hasattr(cache, "cross_attention_cache") else []
    layers = [layer for part in parts for layer in part.layers]
    return sum(t.numel() * t.element_size() for layer in layers for t in (layer.keys, layer.values))


@pytest.mark.parametrize(("name", "dtype"), [("llama", "fp32"), ("mistral", "int8"), ("gpt2", "int4"), ("t5", "bf16")])
def test_weights_and_cache(name: str, dtype: str) -> None:
    model = small_model(name, dtype=torch.bfloat16 if dtype.startswith("int") else torch.float32)
    inputs = left_padded()
    need = predict_inference(without_values(model), dtype, batch=3, prompt=11, new=24)
    engine = init_inference(model, dtype=dtype, replace_with_kernel_inject=True)
    engine.generate(**inputs, **GREEDY)
    tensors = [*model.parameters(), *model.buffers()]
    assert need.device["weights"] == pytest.approx(sum(t.numel() * t.element_size() for t in tensors), rel=0.02)
    (step,) = engine.decoder._steps.values()
    assert need.device["cache"] == pytest.approx(kept(step.cache), rel=0.1)
    assert need.host == 0
    assert need.device_total == sum(need.device.values())


def test_host_memory_and_shared_layers() -> None:
    model = without_values(small_model("llama"))
    whole = predict_inference(copy.deepcopy(model), "bf16", batch=1, prompt=8, new=8)
    host = predict_inference(copy.deepcopy(model), "bf16", batch=1, prompt=8, new=8, offload=True)
    assert host.host == whole.device["weights"]
    assert host.device["weights"] == whole.device["weights"]  # two blocks: both are there at a time
    half = predict_inference(model, "bf16", batch=1, prompt=8, new=8, tp=2)
    assert 0.5 <= half.device["weights"] / whole.device["weights"] < 0.8
    assert half.device["cache"] * 2 == whole.device["cache"]


def test_a_model_without_a_cache() -> None:
    with pytest.raises(UnpredictableError, match="keeps no cache"):
        cached_bytes(without_values(small_model("mamba")), 2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "int8", "int4"])
def test_the_peak_on_a_gpu(dtype: str) -> None:
    """All that torch allocates, within 10 %."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 12, "num_attention_heads": 16}
    with torch.device("cuda"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32000)).to(torch.bfloat16)
    need = predict_inference(without_values(model), dtype, batch=8, prompt=512, new=512)
    engine = init_inference(model, dtype=dtype, enable_cuda_graph=True, max_out_tokens=1024)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    tokens = torch.randint(3, 32000, (8, 512), device="cuda")
    engine.generate(tokens, **{**GREEDY, "max_new_tokens": 512})
    predicted = need.device_total - need.device["CUDA context"]
    assert predicted == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.1)
