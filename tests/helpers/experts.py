"""Small mixtures of experts of transformers, and what one process with plain torch makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["FAMILIES", "FEW", "batches_of", "build", "loss_of", "planned", "reference_run", "section"]

_SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 2,
    "expert_ffn_hidden_size": 24, "num_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_top_k": 2, "moe_k": 2, "n_group": 1, "topk_group": 1, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 0, "moe_layer_start_index": 0,
    "n_shared_experts": 1, "shared_expert_intermediate_size": 24, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "num_dense_layers": 0, "sliding_window": 16,
}  # fmt: skip
_MLA = {"num_key_value_heads": 4}
_OWN: dict[str, dict[str, Any]] = {
    "axk1": _MLA, "axk2": _MLA, "deepseek_v2": _MLA, "deepseek_v3": _MLA, "deepseek_v32": _MLA, "glm4_moe_lite": _MLA,
    "glm_moe_dsa": _MLA, "mistral_large4": _MLA, "mistral4": {**_MLA, "head_dim": 16}, "dots3_note": _MLA,
    "granitemoehybrid": {
        "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8,
        "layer_types": ["attention", "mamba"],
    },
    "zaya": {"num_experts_per_tok": 1},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
    "gemma4": {
        "enable_moe_block": True, "top_k_experts": 2, "hidden_size_per_layer_input": 8, "global_head_dim": 8,
        "vocab_size_per_layer_input": 96, "num_global_key_value_heads": 2,
    },
    "hy_v4_vl": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
    "sarvam_mla": {**_MLA, "head_dim": 16},
}  # fmt: skip
FEW = ("mixtral", "gpt_oss", "deepseek_v3", "aria", "qwen3_moe", "jamba")
# Those that compute in fp32 whatever the model's dtype are beam, inkling2, inkling2_loop, muse_spark, nemotron_h and
# openai_privacy_filter.
FAMILIES = (
    *FEW,
    *[
        "afmoe",
        "axk1",
        "axk2",
        "bailing_hybrid",
        "cohere2_moe",
        "deepseek_v2",
        "deepseek_v32",
        "deepseek_v4",
        "dots1",
        "dots3_note",
        "ernie4_5_moe",
        "exaone_moe",
        "flex_olmo",
        "flint",
        "gemma4",
        "glm4_moe",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "granitemoe",
        "granitemoe_swa",
        "granitemoehybrid",
        "granitemoeshared",
        "hunyuan_v1_moe",
        "hy_v3",
        "hy_v4",
        "hy_v4_vl",
        "inkling",
        "kimi_linear",
        "kolibri1",
        "laguna",
        "lara_mini",
        "lfm2_moe",
        "mellum",
        "mimo_v2_flash",
        "minimax",
        "minimax_m2",
        "minimax_m3_vl",
        "mistral4",
        "mistral_large4",
        "olmoe",
        "phimoe",
        "qwen2_moe",
        "qwen3_5_moe",
        "qwen3_next",
        "qwen3_vl_moe",
        "qwen4_exp",
        "sarvam_mla",
        "sarvam_moe",
        "solar_open",
        "zaya",
    ],
)


def planned(kinds: Sequence[str]) -> tuple[str, ...]:
    """Those that the installed release of transformers has, with a plan for their experts."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    def has_plan(kind: str) -> bool:
        names = [name for name in (f"{kind}_text", kind) if name in CONFIG_MAPPING]
        return any(getattr(CONFIG_MAPPING[name], "base_model_ep_plan", None) for name in names)

    return tuple(kind for kind in kinds if has_plan(kind))


def build(kind: str, **more: Any) -> nn.Module:
    """A model of some 50,000 parameters with four experts, the same for the same arguments."""
    from transformers import AutoModel, AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(0)
    problem: Exception = KeyError(kind)
    for name in (f"{kind}_text", kind):
        for loads in (AutoModelForCausalLM, AutoModel) if name in CONFIG_MAPPING else ():
            config = CONFIG_MAPPING[name](**{**_SMALL, **_OWN.get(kind, {}), **more})
            config._experts_implementation = more.get("experts", "eager")  # grouped products have no fp64
            try:
                with torch.device("meta"):
                    numel = sum(param.numel() for param in loads.from_config(config).parameters())
                if numel > 6e6:  # a model of text and images, whose text is in a configuration of its own
                    continue
                torch.manual_seed(0)
                model: nn.Module = loads.from_config(config).train()
            except ValueError as error:
                problem = error
                continue
            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
            return model
    raise problem


def loss_of(model: nn.Module, ids: Tensor, seed: int = 0) -> Tensor:
    """A scalar in the model's dtype: losses of transformers are fp32."""
    torch.manual_seed(seed)  # some routers draw
    found = model(input_ids=ids, use_cache=False)
    values = getattr(found, "logits", None)
    values = found.last_hidden_state if values is None else values
    weights = torch.linspace(-1, 1, values.shape[-1], dtype=values.dtype, device=values.device)
    return (values * weights).pow(2).mean()


def batches_of(steps: int, accumulation: int, processes: int) -> list[list[Tensor]]:
    """For each step the batches of all micro-batches and processes, a process's every ``processes`` apart."""
    generator = torch.Generator().manual_seed(5)
    drawn = lambda: torch.randint(3, 90, (2, 8), generator=generator)  # noqa: E731
    return [[drawn() for _ in range(accumulation * processes)] for _ in range(steps)]


def section(size: int, **more: Any) -> dict[str, Any]:
    return {"enabled": True, "autoep_size": size, **more}


def reference_run(
    kind: str,
    steps: Sequence[Sequence[Tensor]],
    dtype: torch.dtype,
    clip: float,
    device: str = "cpu",
    made: Callable[[], nn.Module] | None = None,
    **adamw: Any,
) -> dict[str, Any]:
    """Plain torch on one process, of ``made`` where it is given: losses, norms and weights."""
    model = (build(kind) if made is None else made()).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), **adamw)
    losses, norms = [], []
    for batches in steps:
        for ids in batches:
            loss = loss_of(model, ids.to(device))
            losses.append(float(loss))
            (loss / len(batches)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "weights": {name: p.detach() for name, p in model.named_parameters()}}
