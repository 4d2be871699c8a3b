"""Small models for tests of tensor parallelism, and what one process makes of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

__all__ = ["KINDS", "PARTITION", "Fused", "batches_of", "build", "reference_run", "whole"]

VOCABULARY, WIDTH, LENGTH = 64, 32, 10


class Attention(nn.Module):
    """Fused queries, keys and values as GPT-2's; more queries than keys."""

    def __init__(self, heads: int, keys: int) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = heads, keys, WIDTH // heads
        # a bias of keys has no gradient but rounding, which Adam would follow
        self.qkv = nn.Linear(WIDTH, (heads + 2 * keys) * self.head_dim, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads, keys, width = self.num_heads, self.num_key_value_heads, self.head_dim
        q, k, v = self.qkv(x).split([heads * width, keys * width, keys * width], -1)
        q, k, v = (t.unflatten(-1, (-1, width)).transpose(1, 2) for t in (q, k, v))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Packed(nn.Module):
    """Gate and up in one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(WIDTH, 2 * 48, bias=True)
        self.down = nn.Linear(48, WIDTH, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(silu(gate) * up)  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(8, 4)
        self.mlp_norm, self.mlp = nn.LayerNorm(WIDTH), Packed()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Fused(nn.Module):
    """A GPT of its own kind: no plan, fused layers with biases, a cut vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=True)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(x)
        if labels is None:
            return logits
        return cross_entropy(logits[:, :-1].flatten(0, 1).float().to(logits.dtype), labels[:, 1:].flatten())


PARTITION = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*qkv\.weight$"], "partition_type": "column", "shape": [[32, 16, 16], -1], "partition_dim": 0},
        {"patterns": [r".*gate_up\.weight$"], "partition_type": "column", "shape": [2, -1]},
        {"patterns": [r".*\.(out|down)\.weight$"], "partition_type": "row"},
        {"patterns": [r"embed\.weight$"], "partition_type": "column", "partition_dim": 0},
        {"patterns": [r"lm_head\.weight$"], "partition_type": "column", "gather_output": True},
    ],
}


GPT2 = {
    "layer_specs": [
        {"patterns": [r".*attn\.c_attn\.weight$"], "partition_type": "column", "shape": [-1, [32, 32, 32]]},
        {"patterns": [r".*mlp\.c_fc\.weight$"], "partition_type": "column"},
        {"patterns": [r".*c_proj\.weight$"], "partition_type": "row"},
    ],
}
DEEPSEEK = {  # latent attention, with a dense and a sparse layer
    "num_hidden_layers": 2,
    "num_key_value_heads": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


# Kinds of model and heads of keys; Qwen3 has norms of heads, and computes them in fp32.
FEW = {"few": ("qwen3", 2), "few, in fp64": ("Starcoder2", 2), "one, in fp64": ("Starcoder2", 1)}
GEMMA4 = {  # two heads of keys in the first layer; one in the second, whose values they are; others' in the last two
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 4,
    "global_head_dim": 8,
    "attention_k_eq_v": True,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
}


def build(kind: str, **more: Any) -> nn.Module:
    """A model with the same values on every process: of transformers, or ``Fused``."""
    import transformers

    torch.manual_seed(0)
    if kind in FEW:
        kind, keys = FEW[kind]
        more = {"num_key_value_heads": keys, **more}
    if kind == "fused":
        return Fused()
    if kind == "gpt2":
        small = {"n_embd": WIDTH, "n_layer": 2, "n_head": 8, "n_positions": 64, "vocab_size": VOCABULARY}
        small |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**small))
    name = {"llama": "Llama", "qwen3": "Qwen3", "mistral": "Mistral", "phi3": "Phi3", "mixtral": "Mixtral"}.get(
        kind, kind
    )
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "attn_implementation": "sdpa",
        "pad_token_id": 3,
        "initializer_range": 0.15,  # about 1 / sqrt(WIDTH): the usual 0.02 is for models a hundred times as wide
        "max_position_embeddings": 64,
        **({"head_dim": 4} if kind == "qwen3" else {}),
        **({"num_local_experts": 4, "router_jitter_noise": 0.0} if kind == "mixtral" else {}),
        **({"attn_implementation": "eager"} if kind in ("GraniteSWA", "Bloom") else {}),
        **(DEEPSEEK if kind == "DeepseekV2" else {}),
        **(GEMMA4 if kind == "Gemma4" else {}),
        **more,
    }
    config = getattr(transformers, f"{name}{'Text' if kind == 'Gemma4' else ''}Config")(**settings)
    config._experts_implementation = "eager"  # others have no fp64
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    return model


KINDS = ("llama", "qwen3", "mistral", "fused")


def tensor_section(kind: str, size: int) -> dict[str, Any]:
    """``tensor_parallel`` of the configuration."""
    if kind == "Bloom":
        return {"autotp_size": size, "preset_model": "bloom"}
    rules = {"fused": PARTITION, "gpt2": GPT2}.get(kind)
    return {"autotp_size": size, **({} if rules is None else {"partition_config": rules})}


def loss_of(model: Any, ids: Tensor) -> Tensor:
    found = model(input_ids=ids, labels=ids)
    return found if isinstance(found, Tensor) else found.loss  # type: ignore[no-any-return]


def batches_of(steps: int, accumulation: int, data: int) -> Tensor:
    """``[steps, accumulation, data, samples, tokens]``."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(4, VOCABULARY, (steps, accumulation, data, 2, LENGTH), generator=generator)


def reference_run(
    kind: str,
    accumulation: int,
    clip: float,
    data: int,
    steps: int,
    optimizer: Any,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, gradient norms and weights of one process with plain torch."""
    model = build(kind).to(device, dtype)
    rule = optimizer(model.parameters())
    losses, norms = [], []
    for step in batches_of(steps, accumulation, data):
        rule.zero_grad()
        total = 0.0
        for ids in step.flatten(0, 1).to(device):
            loss = loss_of(model, ids) / (accumulation * data)
            loss.backward()
            total += float(loss.detach())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip or 1e9)))
        rule.step()
        losses.append(total)
    return losses, norms, {name: param.detach().cpu() for name, param in model.named_parameters()}


def whole(values: dict[str, Tensor], model: nn.Module, axis: Any) -> dict[str, Tensor]:
    """Local ``values`` by parameter's name, each made whole over the tensor axis. Collective."""
    import torch.distributed as dist

    from ds_hf.engine.zero.cut import cut_of

    found, params = {}, dict(model.named_parameters())
    for name, value in values.items():
        cut = cut_of(params[name])
        if cut is None:
            found[name] = value.clone()
            continue
        parts: list[Any] = [None] * axis.world_size
        dist.all_gather_object(parts, (cut, value), group=axis.group)
        found[name] = torch.zeros(cut.whole, dtype=value.dtype)
        for each, part in parts:
            each.put(found[name], part)
    return found
