"""``init_inference`` against the model itself: tokens, dtypes, 8 and 4 bits, weights in host memory, times."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion

from ds_hf import init_inference
from ds_hf.engine.modules.generation.footprint import check_cache_place
from ds_hf.engine.modules.quantized.layers import values_of_blocks
from ds_hf.errors import ConfigError, DsHfError
from ds_hf.inference.engine import InferenceEngine
from tests.helpers.experts import build
from tests.helpers.generating import GREEDY, left_padded, small_model

HOST = {"stage": 3, "offload_param": {"device": "cpu"}}


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gpt2", "t5"])
def test_tokens_are_the_models(name: str) -> None:
    model, inputs = small_model(name), left_padded()
    expected = model.generate(**inputs, **GREEDY).tolist()
    for options in ({}, {"replace_with_kernel_inject": True}, {"enable_cuda_graph": True}):
        engine = init_inference(model, dtype=torch.float32, **options)
        assert isinstance(engine, InferenceEngine)
        assert engine.module is model
        assert engine.generate(**inputs, **GREEDY).tolist() == expected
        engine.destroy()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_for_32_tokens(dtype: str) -> None:
    model = small_model("llama")
    engine = init_inference(copy.deepcopy(model), dtype=dtype, replace_with_kernel_inject=True)
    half = model.to(engine.dtype)
    settings = {**GREEDY, "max_new_tokens": 32}
    for param in engine.module.parameters():
        assert param.dtype == engine.dtype
    engine.module.model.rotary_emb.to(engine.dtype)  # as .to() has done with the other's
    assert engine.generate(**left_padded(), **settings).tolist() == half.generate(**left_padded(), **settings).tolist()


def test_forward_is_the_models_without_gradients() -> None:
    model, inputs = small_model("llama"), left_padded()
    engine = init_inference(model, dtype="fp32")
    out = engine(**inputs)
    assert not out.logits.requires_grad
    assert torch.equal(out.logits, model(**inputs).logits)
    assert engine.config is model.config  # other names are the model's
    assert engine.device == model.device
    assert not engine.training


@pytest.mark.feature(
    "generation", "ZeRO-Inference: stage 3 without an optimizer, weights in host memory, 16, 8, 4 bits"
)
def test_weights_in_host_memory() -> None:
    model, inputs = small_model("qwen3"), left_padded()
    expected = model.generate(**inputs, **GREEDY).tolist()
    engine = init_inference(model, dtype="fp32", zero=HOST, replace_with_kernel_inject=True)
    assert engine.generate(**inputs, **GREEDY).tolist() == expected
    assert all(param.numel() == 0 for param in model.model.layers.parameters())
    engine.destroy()
    for bits in ("int8", "int4"):
        whole = init_inference(small_model("qwen3", dtype=torch.bfloat16), dtype=bits)
        host = init_inference(small_model("qwen3", dtype=torch.bfloat16), dtype=bits, zero=HOST)
        assert torch.equal(host(**inputs).logits, whole(**inputs).logits)
        host.destroy()


@pytest.mark.parametrize(("dtype", "share"), [("int8", 0.55), ("int4", 0.32)])
def test_weights_of_few_bits_are_small_and_near(dtype: str, share: float) -> None:
    model, inputs = small_model("llama", dtype=torch.bfloat16), left_padded()
    whole = sum(p.numel() * 2 for p in model.parameters())
    exact = model(**inputs).logits.float()
    engine = init_inference(model, dtype=dtype)
    assert engine.dtype is torch.bfloat16
    found = engine(**inputs).logits.float()
    assert sum(p.numel() * p.element_size() for p in model.parameters()) < share * whole
    error = (found - exact).norm() / exact.norm()
    assert 0 < error < (0.1 if dtype == "int8" else 0.7)
    assert engine.generate(**inputs, **GREEDY).shape[1] == 35


def test_prompts_and_answers_that_do_not_fit() -> None:
    engine = init_inference(small_model("llama"), dtype="fp32", max_out_tokens=20)
    with pytest.raises(RuntimeError, match="Input with size 30 exceeds maximum length of 20"):
        engine.generate(**left_padded(length=30), **GREEDY)
    assert engine.generate(**left_padded(), **GREEDY).shape[1] == 35  # no static cache: the model's own limits
    engine = init_inference(small_model("llama"), dtype="fp32", max_out_tokens=20, replace_with_kernel_inject=True)
    with pytest.raises(RuntimeError, match=r"11 tokens and 24 new ones make 35.*raise max_out_tokens"):
        engine.generate(**left_padded(), **GREEDY)


def test_beams() -> None:
    model, inputs = small_model("llama"), left_padded()
    settings = {**GREEDY, "num_beams": 2, "max_new_tokens": 5}
    expected = model.generate(**inputs, **settings).tolist()
    engine = init_inference(model, dtype="fp32", replace_with_kernel_inject=True)
    assert engine.generate(**inputs, **settings).tolist() == expected
    engine = init_inference(model, dtype="fp32", enable_cuda_graph=True)
    with pytest.raises(NotImplementedError, match=r"num_beams is 2.*remove num_beams, or enable_cuda_graph"):
        engine.generate(**inputs, **settings)


def test_times_of_calls_and_of_tokens() -> None:
    engine = init_inference(small_model("llama"), dtype="fp32")
    with pytest.raises(AssertionError, match="model profiling is not enabled"):
        engine.model_times()
    engine.profile_model_time()
    engine(**left_padded())
    engine(**left_padded())
    times = engine.model_times()
    assert len(times) == 2
    assert all(time > 0 for time in times)
    assert engine.model_times() == []
    engine.generate(**left_padded(), **GREEDY)
    assert len(engine.model_times()) == 24
    engine.destroy()
    engine(**left_padded())
    assert engine._model_times == []


def test_transformers_own_caches() -> None:
    """``cache_implementation`` of a call is transformers' business."""
    model, inputs = small_model("llama"), left_padded()
    expected = model.generate(**inputs, **GREEDY).tolist()
    engine = init_inference(model, dtype="fp32", replace_with_kernel_inject=True)
    for cache in ("dynamic", "static"):
        assert engine.generate(**inputs, **GREEDY, cache_implementation=cache).tolist() == expected
    for cache in ("offloaded", "offloaded_static", "offloaded_hybrid"):
        with pytest.raises(DsHfError, match=f"cache_implementation is '{cache}'.*the model is on the CPU: remove it"):
            engine.generate(**inputs, **GREEDY, cache_implementation=cache)


def test_a_static_cache_in_host_memory_is_not_compiled_where_torch_crashes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, gpu = small_model("llama"), torch.device("cuda")
    for version, given, expected in (
        ("2.11.0+cu130", {}, True),
        ("2.11.0", {"disable_compile": True}, True),
        ("2.13.0", {}, None),
    ):
        monkeypatch.setattr(torch, "__version__", TorchVersion(version))
        for cache in ("offloaded_static", "offloaded_hybrid"):
            kwargs = {"cache_implementation": cache, **given}
            check_cache_place(model, kwargs, gpu)
            assert kwargs.get("disable_compile") is expected
        kwargs = {"cache_implementation": "offloaded"}
        check_cache_place(model, kwargs, gpu)
        assert "disable_compile" not in kwargs


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"replace_with_kernel_inject": True}, {"zero": HOST}], ids=str)
def test_quantized_caches(options: dict[str, Any]) -> None:
    """By quanto, where it is installed: what the model itself says with one."""
    pytest.importorskip("optimum.quanto")
    model, inputs = small_model("llama"), left_padded()
    form = {"backend": "quanto", "nbits": 4, "q_group_size": 16, "residual_length": 8}
    settings = {**GREEDY, "cache_implementation": "quantized", "cache_config": form}
    exact, expected = model.generate(**inputs, **GREEDY), model.generate(**inputs, **settings)
    assert not torch.equal(exact, expected)  # the cache has lost something
    engine = init_inference(model, dtype="fp32", **options)
    assert torch.equal(engine.generate(**inputs, **settings), expected)
    engine.destroy()


def test_what_cannot_be_prepared_is_told() -> None:
    with pytest.raises(ConfigError, match=r"needs a model.*got str"):
        init_inference("llama")  # type: ignore[arg-type]
    model = small_model("llama")
    init_inference(model, dtype="int8")
    with pytest.raises(ConfigError, match="is quantized already, and would be quantized again"):
        init_inference(model, dtype="int8")
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"no values.*give checkpoint="):
        init_inference(empty, dtype="fp32")
    with pytest.raises(ConfigError, match="zero is stage 2"):
        init_inference(small_model("llama"), zero={"stage": 2})


def test_a_module_that_is_no_model_of_transformers() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(3, 4)
    expected = model(x)
    engine = init_inference(model, {"dtype": "fp32", "replace_with_kernel_inject": True})
    assert torch.equal(engine(x), expected)
    assert not hasattr(engine, "generate")


@pytest.mark.parametrize(
    ("kind", "experts", "bits"), [("gpt_oss", "grouped_mm", 4), ("qwen3_moe", "eager", 4), ("mixtral", "grouped_mm", 8)]
)
def test_stacked_experts_rest_in_few_bits(kind: str, experts: str, bits: int) -> None:
    """Tokens are those of the values that the blocks stand for, whatever holds the weights."""
    options: dict[str, Any] = {"dtype": "int8", "quant": {"weight": {"num_bits": bits}}}
    sizes = {"experts": experts, "hidden_size": 64, "num_experts": 8, "num_local_experts": 8}
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    made, plain = (build(kind, **sizes).to(torch.bfloat16).eval() for _ in range(2))
    whole = sum(p.numel() for n, p in made.named_parameters() if ".experts." in n and p.dim() == 3)
    engine = init_inference(made, **options)
    # rows of 24 to 64 numbers, each with a scale of 4 bytes
    assert sum(p.nbytes for n, p in made.named_parameters() if ".experts." in n and p.dim() == 3) < whole * (
        bits / 8 + 0.17
    )
    readable = values_of_blocks(made)
    for param, other in zip(plain.parameters(), made.parameters(), strict=True):
        param.data.copy_(readable(other, other))
    for ids in (torch.tensor([[3]]), torch.arange(3, 11).view(2, 4)):
        expected = plain.generate(ids, **settings).tolist()
        assert engine.generate(ids, **settings).tolist() == expected
        for more in ({"zero": HOST}, {"enable_cuda_graph": True}):
            other = init_inference(build(kind, **sizes).to(torch.bfloat16).eval(), **options, **more)
            assert other.generate(ids, **settings).tolist() == expected
            other.destroy()
