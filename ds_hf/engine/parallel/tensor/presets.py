"""``tensor_parallel.preset_model``: rules for families of models, in the form of ``partition_config.layer_specs``.

The names are DeepSpeed's. Where its rule for a fused weight takes queries, keys and values for equally wide, the sizes
come from the model's configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["PRESETS", "preset_specs", "widths_of_heads"]

Spec = Mapping[str, Any]


def _pair(column: str, row: str) -> list[Spec]:
    """A layer that is cut by its outputs, and the one that takes them."""
    return [
        {"patterns": [rf".*\.{column}\.weight$"], "partition_type": "column"},
        {"patterns": [rf".*\.{row}\.weight$"], "partition_type": "row"},
    ]


def _whole(name: str, style: str = "") -> Spec:
    return {"patterns": [rf".*\.{name}\.weight$"], "partition_type": "skip", "style": style}


def _packed(name: str, sizes: Any) -> Spec:
    shape = [sizes, -1]
    return {"patterns": [rf".*\.{name}\.weight$"], "partition_type": "column", "shape": shape, "partition_dim": 0}


_LLAMA = [*_pair(r"self_attn\.[qkv]_proj", r"self_attn\.o_proj"), *_pair(r"mlp\.(up|gate)_proj", r"mlp\.down_proj")]
_BLOOM = _pair(r"self_attention\.query_key_value", r"self_attention\.dense")
_EXPERT = r"block_sparse_moe\.experts\.\d+"

PRESETS: dict[str, list[Spec]] = {
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "bloom": [*_BLOOM, *_pair(r"mlp\.dense_h_to_4h", r"mlp\.dense_4h_to_h")],
    "chatglm": [
        _packed(r"self_attention\.query_key_value", 3),
        {"patterns": [r".*\.self_attention\.dense\.weight$"], "partition_type": "row"},
        _packed(r"mlp\.dense_h_to_4h", 2),
        {"patterns": [r".*\.mlp\.dense_4h_to_h\.weight$"], "partition_type": "row"},
    ],
    "mixtral": [
        *_LLAMA[:2],
        *_pair(rf"{_EXPERT}\.w[13]", rf"{_EXPERT}\.w2"),
        _whole(r"block_sparse_moe\.gate"),
    ],
    "deepseek_v2": [
        _whole(r"self_attn\.kv_a_proj_with_mqa", "mla_kv_a_proj"),
        _whole(r"self_attn\.q_a_proj"),
        *_pair(r"self_attn\.(q_proj|q_b_proj|kv_b_proj)", r"self_attn\.o_proj"),
        *_pair(r"mlp\.experts\.\d+\.(up|gate)_proj", r"mlp\.experts\.\d+\.down_proj"),
        *_pair(r"mlp\.shared_experts\.(up|gate)_proj", r"mlp\.shared_experts\.down_proj"),
        _whole(r"mlp\.gate"),
    ],
    "phi3": [
        _packed(r"self_attn\.qkv_proj", 3),
        {"patterns": [r".*\.self_attn\.o_proj\.weight$"], "partition_type": "row"},
        _packed(r"mlp\.gate_up_proj", 2),
        {"patterns": [r".*\.mlp\.down_proj\.weight$"], "partition_type": "row"},
    ],
}


def preset_specs(name: str, config: Any) -> list[Spec]:
    """The rules of one preset for a model of this configuration."""
    specs = PRESETS[name]
    sizes = widths_of_heads(config)
    if sizes is None:
        return list(specs)
    return [{**spec, "shape": [sizes, -1]} if spec.get("shape") == [3, -1] else spec for spec in specs]


def widths_of_heads(config: Any) -> list[int] | None:
    """How wide queries, keys and values are."""
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        return None
    keys = getattr(config, "num_key_value_heads", None) or getattr(config, "multi_query_group_num", None) or heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return [heads * width, keys * width, keys * width]
