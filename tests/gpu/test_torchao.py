"""``init_inference`` with torchao's weights on a GPU: near bf16, small, decoded by compiled steps in graphs."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from ds_hf import init_inference
from ds_hf.engine.modules.quantized.layers import is_quantized
from tests.helpers.generating import GREEDY

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def model_of() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=4096)).to("cuda", torch.bfloat16)


# Plain rounding of this model's layers to 15 steps a group of 128 is 0.35 off.
@pytest.mark.parametrize(("dtype", "error"), [("int8", 0.05), ("int4", 0.38)])
def test_torchaos_weights(dtype: str, error: float) -> None:
    pytest.importorskip("torchao")
    tokens = torch.randint(3, 4096, (2, 40), generator=torch.Generator().manual_seed(1)).cuda()
    gc.collect()  # an engine of the test before
    before = torch.cuda.memory_allocated()
    model = model_of()
    whole = torch.cuda.memory_allocated() - before
    with torch.no_grad():  # a graph would keep the weights
        exact = model(tokens).logits.float()
    engine = init_inference(model, dtype=dtype, replace_with_kernel_inject=True)
    torch._C._cuda_clearCublasWorkspaces()
    assert not is_quantized(model.model.layers[0].mlp.up_proj)  # by torchao, and not by the blocks
    assert is_quantized(model.model.embed_tokens)
    held = torch.cuda.memory_allocated() - before - exact.nbytes
    assert held < whole * (0.55 if dtype == "int8" else 0.33)
    found = engine(tokens).logits.float()
    assert 0 < (found - exact).norm() / exact.norm() < error
    settings = {**GREEDY, "max_new_tokens": 16}
    ours = engine.generate(tokens, **settings)
    assert engine.decoder is not None
    assert engine.decoder.last.way == "graph"
    assert engine.decoder.last.compiled
    theirs = model.generate(tokens, **settings)
    assert (ours[:, 40:44] == theirs[:, 40:44]).all()  # rounding of compiled kernels may tell later ones apart
    engine.destroy()
