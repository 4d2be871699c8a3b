"""What generating takes, predicted on the meta device, against the weights and caches of real engines."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from ds_hf import init_inference
from ds_hf.engine.modules.quantized.format import WeightFormat
from ds_hf.engine.zero.packed import move_packed
from ds_hf.memory.inference import cached_bytes, predict_inference
from ds_hf.memory.models import build, without_values
from ds_hf.memory.prediction import UnpredictableError, Workload
from tests.helpers.generating import GREEDY, left_padded, small_model
from tests.memory.measuring import LiveStorages


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


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=2048)).to(torch.bfloat16)


@pytest.mark.parametrize("dtype", ["bf16", "int8", "int4"])
def test_weights_on_their_way_to_host_memory(dtype: str) -> None:
    """Here the device is the host, so what waits there and what is laid out are in one memory."""
    model = llama()
    need = predict_inference(without_values(model), dtype, batch=1, prompt=8, new=8, offload=True)
    tracker = LiveStorages()
    for tensor in (*model.parameters(), *model.buffers()):
        tracker.add(tensor)
    with tracker:
        engine = init_inference(model, dtype=dtype, zero={"stage": 3, "offload_param": {"device": "cpu"}})
    engine.destroy()
    assert max(need.loading["host"], need.host + need.loading["device"]) == pytest.approx(tracker.peak, rel=0.1)
    assert need.host_peak == max(need.host, need.loading["host"])


@pytest.mark.parametrize("dtype", ["bf16", "int8", "int4"])
def test_weights_on_their_way_to_a_device(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers go up one by one: the device, here without values, never holds the model in 16 bits. Packing takes nothing
    beside its result there, as the kernels do."""

    def pack(form: WeightFormat, weight: torch.Tensor) -> torch.Tensor:
        nbytes = form.blocks.nbytes(weight.shape[1])
        return torch.empty(len(weight), nbytes, dtype=torch.int8, device=weight.device)

    model = llama()
    need = predict_inference(without_values(model), dtype, batch=1, prompt=8, new=8)
    monkeypatch.setattr(WeightFormat, "pack", pack)
    monkeypatch.setattr("ds_hf.inference.engine.compute_device", lambda: torch.device("meta"))
    tracker = LiveStorages("meta")
    with tracker:
        init_inference(model, dtype=dtype)
    assert need.loading["device"] == pytest.approx(tracker.peak, rel=0.1)
    assert need.device_peak == max(need.device_total, need.loading["device"] + need.device["CUDA context"])
    assert need.host == 0
    assert need.loading["host"] == sum(t.numel() * t.element_size() for t in (*llama().parameters(), *model.buffers()))


def test_packed_shards_come_to_the_device_buffer_by_buffer() -> None:
    layer = torch.nn.Linear(4, 4, bias=False)
    layer.weight = torch.nn.Parameter(torch.zeros(4, 8, dtype=torch.int8), requires_grad=False)
    move_packed(layer, torch.device("meta"), sharded=True)
    assert layer.weight.device.type == "cpu"
    move_packed(layer, torch.device("meta"), sharded=False)
    assert layer.weight.is_meta


def test_a_model_without_a_cache() -> None:
    with pytest.raises(UnpredictableError, match="keeps no cache"):
        cached_bytes(without_values(small_model("mamba")), 2)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("vit:hidden=32,layers=1,heads=2,intermediate=32", "ViTForImageClassification does not generate"),
        ("llama:hidden=64,layers=1,heads=4,kv_heads=3,vocab=64", "does not run without values .* must match"),
    ],
)
def test_what_does_not_generate_is_told_from_what_keeps_no_cache(source: str, text: str) -> None:
    with pytest.raises(UnpredictableError, match=text):
        cached_bytes(build(source, Workload()), 2)


def test_experts_whose_products_are_grouped() -> None:
    token, _ = cached_bytes(build("mixtral:hidden=64,layers=2,heads=8,vocab=64", Workload()), 2)
    assert token == 2 * 2 * 64 * 2, "keys and values of two layers in 16 bits"


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
