"""Which rows of a matrix are an attention head's (``optimizer.params.per_head_muon``).

Muon then makes each head's rows orthogonal by themselves, so that heads with large gradients do not decide for others
(Kimi K3, arXiv 2607.24653, section 2.5; GLM-5, arXiv 2602.15763). Heads are rows of the projections that make queries,
keys and values, also of one matrix for all three, in whatever order it has them; of the output projection they are
columns, and it stays whole. A name proves nothing: the number of rows must be what the module, or the configuration
nearest above it, says.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ds_hf.engine.zero.buffer import logical_shape
from ds_hf.engine.zero.cut import whole_shape
from ds_hf.errors import ConfigError, Fault
from ds_hf.log import log_once, warn_once

__all__ = ["head_rows", "mark_heads"]

_QUERIES = ("q_proj", "query", "q_lin", "wq", "q", "q_b_proj")
_KEYS_AND_VALUES = ("k_proj", "v_proj", "key", "value", "k_lin", "v_lin", "wk", "wv", "k", "v")
_LATENT = ("kv_b_proj",)  # keys and values of multi-head latent attention
_TOGETHER = ("qkv_proj", "query_key_value", "Wqkv", "qkv", "c_attn")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_heads")
_WIDTHS = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
_NO_HEADS = ("linear", "delta", "mamba", "conv")  # in the name of a class: rows are divided otherwise


def mark_heads(model: nn.Module) -> None:
    """Write ``muon_num_heads`` and ``muon_head_dim`` on the weights whose rows are those of attention heads.

    Weights that go by such a name and stay whole are told.

    Raises:
        ConfigError: there are none that train, so that the key would do nothing.
    """
    configs: dict[str, Any] = {}
    found: dict[int, list[str]] = {}
    whole = []
    for owner_name, owner in model.named_modules():
        above = configs.get(owner_name.rpartition(".")[0])
        config = configs[owner_name] = getattr(owner, "config", None) or above  # a tower's before the whole model's
        kind = type(owner).__name__.lower()
        if "attention" not in kind or any(word in kind for word in _NO_HEADS):
            continue
        for name, module in owner.named_children():
            weight: Any = getattr(module, "weight", None)
            if not getattr(weight, "use_muon", False) or not weight.requires_grad or head_rows(weight):
                continue
            shape = logical_shape(weight)
            rows = _rows_of_a_head(name, tuple(whole_shape(weight, shape)), owner, config)
            if type(module).__name__ != "Conv1D" and rows and shape[0] % rows == 0:  # tensor parallelism: whole heads
                weight.muon_head_dim, weight.muon_num_heads = rows, shape[0] // rows
                found.setdefault(rows, []).append(f"{owner_name}.{name}")
            elif name in (*_QUERIES, *_KEYS_AND_VALUES, *_LATENT, *_TOGETHER):
                whole.append(f"{owner_name}.{name}")
    if not found:
        message = (
            "no projection of queries, keys or values that trains was found whose rows are those of the model's heads "
            "(num_attention_heads, num_key_value_heads, head_dim): the key would do nothing"
        )
        fix = "remove it, or set muon_num_heads on the weights before initialize()"
        if any(head_rows(param) for param in model.parameters()):
            return  # the script has marked them
        raise ConfigError([Fault("/optimizer/params/per_head_muon", message, fix)])
    told = [f"{len(names)} matrices with {rows} rows a head (such as {names[0]})" for rows, names in found.items()]
    log_once(f"Muon makes heads orthogonal one by one: {', '.join(told)}")
    if whole:
        warn_once(
            f"per_head_muon: {len(whole)} matrices (such as {whole[0]}) stay whole, for their rows are not those of "
            "the heads that the module or its configuration names: set muon_num_heads on the weights"
        )


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
    """Rows of a head, 0 where the shape is not what the name says with the numbers of the module or the configuration.

    What a module says of itself counts first: encoders and decoders, towers, and layers of one model differ.
    """
    if len(shape) != 2:
        return 0
    config = getattr(config, "text_config", None) or config
    queries = [*_numbers(owner, _HEADS), *_numbers(config, _HEADS)]
    if not queries:
        return 0
    keys = [each for place in (owner, config) for each in _numbers(place, _KEY_HEADS) or _numbers(place, _HEADS)]
    width = next(iter(_numbers(owner, _WIDTHS)), 0) or next(iter(_numbers(config, ("head_dim", "d_kv"))), 0)
    if not width:
        width = next(iter(_numbers(config, ("hidden_size", "n_embd", "d_model", "dim"))), 0) // queries[0]
    nope, rope, values = (
        next(iter(_numbers(config, (key,))), 0) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    if name in _LATENT:
        return nope + values if nope and shape[0] in [heads * (nope + values) for heads in queries] else 0
    if name in _QUERIES and nope and shape[0] in [heads * (nope + rope) for heads in queries]:
        return nope + rope
    rows = {
        _QUERIES: [heads * width * gates for heads in queries for gates in (1, 2)],  # with a gate beside each head
        _KEYS_AND_VALUES: [heads * width for heads in keys],
        _TOGETHER: [(heads + 2 * each) * width for heads in queries for each in keys],
    }
    return width if any(name in names and shape[0] in fits for names, fits in rows.items()) else 0


def _numbers(place: Any, names: tuple[str, ...]) -> list[int]:
    """What ``place`` says by any of ``names``; a configuration whose layers differ says nothing for all of them."""
    found = []
    for name in names:
        try:
            value = getattr(place, name, None)
        except RuntimeError:
            continue
        if type(value) is int and value > 0:
            found.append(value)
    return found
