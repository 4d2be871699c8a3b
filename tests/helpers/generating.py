"""Small models of transformers that generate, with weights large enough that their tokens vary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["GREEDY", "MODELS", "left_padded", "small_model"]

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", SIZES),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**SIZES, "head_dim": 16}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**SIZES, "sliding_window": 8}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4}),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 128, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4},
    ),
    "bloom": ("BloomForCausalLM", "BloomConfig", {"vocab_size": 128, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "mamba": ("MambaForCausalLM", "MambaConfig", {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2}),
}
GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def small_model(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """The model called ``name`` in evaluation mode, the same for the same arguments."""
    import transformers

    model_class, config_class, sizes = MODELS[name]
    extra = {"decoder_start_token_id": 0} if name == "t5" else {}
    config = getattr(transformers, config_class)(**sizes, **extra, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    torch.manual_seed(seed)
    model: nn.Module = getattr(transformers, model_class)(config)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.mul_(12)
    return model.eval().to(dtype)


def left_padded(batch: int = 3, length: int = 11, seed: int = 5) -> dict[str, Tensor]:
    """Prompts ``[batch, length]`` of which the first begins with four tokens of padding."""
    tokens = torch.randint(3, 128, (batch, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(tokens)
    mask[0, :4] = tokens[0, :4] = 0
    return {"input_ids": tokens, "attention_mask": mask}
