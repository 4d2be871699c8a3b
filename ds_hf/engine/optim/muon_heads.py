"""Which rows of a matrix are an attention head's (``optimizer.params.per_head_muon``).

Muon then makes each head's rows orthogonal by themselves, so that heads with large gradients do not decide for others
(Kimi K3, arXiv 2607.24653, section 2.5; GLM-5, arXiv 2602.15763). Heads are rows of the projections that make queries,
keys and values, also of one matrix for all three, in whatever order it has them; of the output projection they are
columns, and it stays whole. A name proves nothing: the number of rows must be what the model's configuration says.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ds_hf.engine.zero.buffer import logical_shape
from ds_hf.engine.zero.cut import whole_shape
from ds_hf.errors import ConfigError, Fault
from ds_hf.log import log_once

__all__ = ["head_rows", "mark_heads"]

_QUERIES = ("q_proj", "query", "q_lin", "wq", "q", "q_b_proj")
_KEYS_AND_VALUES = ("k_proj", "v_proj", "key", "value", "k_lin", "v_lin", "wk", "wv", "k", "v")
_LATENT = ("kv_b_proj",)  # keys and values of multi-head latent attention
_TOGETHER = ("qkv_proj", "query_key_value", "Wqkv", "qkv", "c_attn")
_NO_HEADS = ("linear", "delta", "mamba", "conv")  # in the name of a class: rows are divided otherwise


def mark_heads(model: nn.Module) -> None:
    """Write ``muon_num_heads`` and ``muon_head_dim`` on the weights whose rows are those of attention heads.

    Raises:
        ConfigError: there are none, so that the key would do nothing.
    """
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    found: dict[int, list[str]] = {}
    for owner_name, owner in model.named_modules():
        kind = type(owner).__name__.lower()
        if "attention" not in kind or any(word in kind for word in _NO_HEADS):
            continue
        for name, module in owner.named_children():
            weight: Any = getattr(module, "weight", None)
            if weight is None or type(module).__name__ == "Conv1D" or not getattr(weight, "use_muon", False):
                continue
            shape = logical_shape(weight)
            rows = _rows_of_a_head(name, tuple(whole_shape(weight, shape)), owner, config)
            if rows and shape[0] % rows == 0:  # tensor parallelism leaves whole heads
                weight.muon_head_dim, weight.muon_num_heads = rows, shape[0] // rows
                found.setdefault(rows, []).append(f"{owner_name}.{name}")
    if not found:
        message = (
            "no projection of queries, keys or values was found whose rows are those of the model's heads "
            "(num_attention_heads, num_key_value_heads, head_dim): the key would do nothing"
        )
        fix = "remove it, or set muon_num_heads on the weights before initialize()"
        if any(head_rows(param) for param in model.parameters()):
            return  # the script has marked them
        raise ConfigError([Fault("/optimizer/params/per_head_muon", message, fix)])
    told = [f"{len(names)} matrices with {rows} rows a head (such as {names[0]})" for rows, names in found.items()]
    log_once(f"Muon makes heads orthogonal one by one: {', '.join(told)}")


def head_rows(param: Any) -> int | None:
    """Rows of a head of ``param``, where it is marked (``muon_num_heads``).

    Raises:
        ValueError: the heads do not divide the rows, or it is no matrix.
    """
    heads = getattr(param, "muon_num_heads", None)
    if heads is None:
        return None
    shape = logical_shape(param)
    width = getattr(param, "muon_head_dim", None)
    if width and len(shape) == 2 and shape[0] % width == 0:
        return int(width)  # also of a part of the rows, which has fewer heads
    if len(shape) != 2 or heads < 1 or shape[0] % heads:
        raise ValueError(f"the rows of a parameter of shape {tuple(shape)} are no {heads} heads: see muon_num_heads")
    return int(shape[0]) // int(heads)


def _rows_of_a_head(name: str, shape: tuple[int, ...], owner: nn.Module, config: Any) -> int:
    """Rows of a head, 0 where the shape is not what the name and the configuration say."""
    queries = _number(config, "num_attention_heads", "n_head", "num_heads", "n_heads")
    if len(shape) != 2 or not queries:
        return 0
    keys = _number(config, "num_key_value_heads", "num_kv_heads") or queries
    hidden = _number(config, "hidden_size", "n_embd", "d_model", "dim")
    width = _number(config, "head_dim", "d_kv") or _number(owner, "head_dim") or hidden // queries
    nope, rope, values = (_number(config, key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    if name in _LATENT:
        return nope + values if nope and shape[0] == queries * (nope + values) else 0
    if name in _QUERIES:
        if nope and shape[0] == queries * (nope + rope):
            return nope + rope
        return width if width and shape[0] == queries * width else 0
    if name in _KEYS_AND_VALUES:
        return width if width and shape[0] == keys * width else 0
    if name in _TOGETHER:
        return width if width and shape[0] == (queries + 2 * keys) * width else 0
    return 0


def _number(place: Any, *names: str) -> int:
    return next((value for name in names if type(value := getattr(place, name, None)) is int and value > 0), 0)
