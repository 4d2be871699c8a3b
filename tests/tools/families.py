"""Every causal language model of transformers under a feature, against plain torch on one process.

    python -m tests.tools.families stage3 [--only llama,phi3] [--json FILE]

Each model type of ``AutoModelForCausalLM`` is made small by the names of its configuration's fields, and takes two
steps of SGD in fp32: by plain torch, and by an engine of two processes that both have the same batch. Compared are
losses, gradients' norms and, where they are not divided, weights. A type that cannot be made small by this is skipped,
one that the engine refuses is named with the reason. Twenty types share a start of the processes; a start that ends in
an error is repeated type by type. Some ten minutes a feature on two cores.

Gemma 4's gradients of adapters of values differ by 1e-3 in fp32, and not in fp64: norms of small values magnify
rounding. Phi-MoE's routers draw numbers, others for a part of the tokens.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from ds_hf import PipelineModule, initialize
from ds_hf.engine.comm.mesh import axis_of
from ds_hf.engine.parallel.sequence.losses import gather
from ds_hf.engine.zero.gather import GatheredParameters
from ds_hf.errors import DsHfError
from tests.helpers.distributed import DistributedFailure, run_distributed

FEATURES: dict[str, dict[str, Any]] = {
    "stage3": {},
    "adapters": {"ds_hf": {"fused_lora": True}},
    "chunked_loss": {"zero_optimization": {"stage": 2}, "ds_hf": {"chunked_loss": True}},
    "tiles": {"zero_optimization": {"stage": 2}, "ds_hf": {"tiled_mlp": 3}},
    "sequence": {"zero_optimization": {"stage": 2}, "sequence_parallel_size": 2},
    "pipeline": {"zero_optimization": {"stage": 0}, "gradient_accumulation_steps": 2},
    "tensor": {"zero_optimization": {"stage": 0}, "tensor_parallel": {"autotp_size": 2}},
    "compiled_tensor": {
        "zero_optimization": {"stage": 0},
        "tensor_parallel": {"autotp_size": 2},
        "ds_hf": {"compile": "blocks"},
    },
    "divided_tokens": {
        "zero_optimization": {"stage": 0},
        "tensor_parallel": {"autotp_size": 2},
        "ds_hf": {"tensor_sequence_parallel": True},
    },
}
TOKENS, STEPS, RATE, TOLERANCE, TOGETHER = 24, 2, 0.05, 5e-6, 20
# What a field whose name is found by the expression becomes, if it is larger: the first that is found counts.
SIZES = tuple(
    (re.compile(expression), value)
    for expression, value in (
        ("vocab_size", 96),
        ("num_(key_value|kv)_heads$|num_global_key_value", 2),
        ("heads?$|nhead$", 4),
        ("head_dim$|d_kv$", 8),
        ("lora_rank$", 16),
        ("moe_intermediate|expert_ffn|shared_expert_intermediate", 24),
        ("intermediate|ffn_dim|ffn_hidden|mlp_dim|d_ff$|d_inner$|n_inner$|dim_feedforward", 48),
        ("hidden_size_per_layer_input|state_size|d_state|mamba_n_heads|mamba_d_head", 8),
        ("hidden_size$|d_model$|embed_dim$|hidden_dim$|n_embd$|^dim$|embedding_size$|projection_dim$|width$", 32),
        ("layers$|n_layer$|depth$|num_blocks$|num_hidden_groups", 2),
        ("num_experts$|num_local_experts|n_routed_experts", 4),
        ("experts_per_tok|moe_top_?k|moe_k$|top_k_experts", 2),
        ("n_group$|topk_group$", 1),
        ("max_position|n_positions|max_source|max_target|max_seq|seq_len", 64),
        ("image_size$|img_size", 32),
        ("^patch_size$", 8),
        ("num_mel_bins|sliding_window", 16),
        ("first_k_dense|moe_layer_start|num_dense_layers|pad_token_id", 0),
        ("bos_token_id", 1),
        ("eos_token_id", 2),
    )
)


def small(config_class: Any) -> dict[str, Any]:
    """Arguments of a small configuration, with those of the configurations inside."""
    whole = config_class()
    found: dict[str, Any] = {}
    for name, value in whole.to_dict().items():
        inside = getattr(whole, name, None)
        if hasattr(inside, "to_dict"):
            found[name] = small(type(inside))
        elif isinstance(value, float) and "drop" in name:
            found[name] = 0.0
        elif isinstance(value, int) and not isinstance(value, bool):
            size = next((size for expression, size in SIZES if expression.search(name)), value)
            if size < value:
                found[name] = size
    return found | ({"pad_token_id": 0} if hasattr(whole, "pad_token_id") else {})


def build(kind: str) -> nn.Module:
    """A model of at most six million parameters in fp32 that computes a loss, the same each time.

    Raises:
        Exception: whatever transformers makes of sizes that do not fit.
    """
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    make: Callable[..., nn.Module] = AutoModelForCausalLM.from_config
    config_class, problem = CONFIG_MAPPING[kind], Exception()
    arguments = small(config_class)
    for more in ({}, {"num_key_value_heads": 4}, {"num_key_value_heads": 4, "head_dim": 16}):
        for attention in ({"attn_implementation": "sdpa"}, {}):
            try:
                config = config_class(**{**arguments, **more})
                config.use_cache = False
                with torch.device("meta"):
                    numel = sum(p.numel() for p in make(config, **attention).parameters())
                if numel > 6e6:
                    raise ValueError(f"{numel} parameters")
                torch.manual_seed(0)
                model = make(config, **attention).float().train()
                loss = model(input_ids=batch(0), labels=batch(0)).loss
                loss.backward()
                model.zero_grad()
                copy.deepcopy(model)
                if bool(loss.isfinite()):
                    return model
            except Exception as error:
                problem = error
    raise problem


def batch(step: int) -> Tensor:
    return torch.randint(3, 90, (2, TOKENS), generator=torch.Generator().manual_seed(step))


def shifted(ids: Tensor) -> Tensor:
    return F.pad(ids, (0, 1), value=-100)[:, 1:]


def of_sequence(model: Callable[..., Any], ids: Tensor, part: slice) -> Tensor:
    """The sum of the losses of a part, over the tokens of the whole."""
    labels, places = shifted(ids), torch.arange(TOKENS).expand(2, -1)
    logits = model(input_ids=ids[:, part], position_ids=places[:, part], shift_labels=labels[:, part]).logits
    losses = F.cross_entropy(logits.flatten(0, 1), labels[:, part].flatten(), ignore_index=-100, reduction="sum")
    return losses / (labels != -100).sum()


def train(feature: str, kind: str) -> dict[str, Any]:
    """What became of one type: ``skipped`` or ``refused`` with the reason, or the farthest that something is off."""
    try:
        model = build(kind)
        if feature == "adapters":
            import peft

            torch.manual_seed(1)
            given = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
            model = peft.get_peft_model(model, given)
            model(input_ids=batch(0), labels=batch(0))  # some layers cannot have adapters
    except Exception as error:
        return {"skipped": f"{type(error).__name__}: {str(error)[:100]}"}
    plain = copy.deepcopy(model)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=RATE)
    half = slice(TOKENS // 2 * dist.get_rank(), TOKENS // 2 * (dist.get_rank() + 1))
    found: list[list[float]] = [[], []]
    try:
        if feature == "pipeline":
            model = PipelineModule.from_transformers(model, num_stages=2)
        engine = initialize(model=model, config={**settings, **FEATURES[feature]})[0]
        for step in range(STEPS):
            ids = batch(step)
            for net, losses in zip((plain, engine), found, strict=True):
                torch.manual_seed(step)  # some routers draw
                if feature == "pipeline" and net is engine:
                    loss = engine.train_batch(iter([{"input_ids": ids, "labels": ids}] * 2))
                elif feature != "sequence":
                    loss = net(input_ids=ids, labels=ids).loss
                elif net is plain:
                    loss = of_sequence(net, ids, slice(None))
                else:
                    loss = gather(of_sequence(net, ids, half)[None], axis_of(None, "sequence")).sum()
                if net is engine:
                    if feature != "pipeline":
                        engine.backward(loss)
                        engine.step()
                    norm = engine.get_global_grad_norm() or 0.0
                else:
                    optimizer.zero_grad()
                    loss.backward()
                    norm = float(get_total_norm([p.grad for p in plain.parameters() if p.grad is not None]))
                    optimizer.step()
                losses += [float(loss.detach()), norm]
    except (DsHfError, ValueError) as error:
        return {"refused": " ".join(str(error).split())[:300]}
    off = max(abs(one - other) / max(abs(one), 1e-6) for one, other in zip(*found, strict=True))
    if feature != "pipeline" and "tensor_parallel" not in FEATURES[feature]:
        expected = dict(plain.named_parameters())
        with GatheredParameters(list(engine.module.parameters())):
            for name, param in engine.module.named_parameters():
                off = max(off, float((param - expected[name]).detach().abs().max()))
    engine.destroy()
    return {"class": type(plain).__name__, "off": off}


def train_all(feature: str, kinds: list[str]) -> dict[str, dict[str, Any]]:
    torch.set_num_threads(1)
    return {kind: train(feature, kind) for kind in kinds}


def rows_of(feature: str, kinds: list[str]) -> dict[str, dict[str, Any]]:
    """Of several types; those that end their processes are taken one by one."""
    try:
        return run_distributed(train_all, 2, feature, kinds, timeout=30.0 + 5 * len(kinds))[0]  # type: ignore[no-any-return]
    except DistributedFailure as error:
        if len(kinds) == 1:
            return {kinds[0]: {"failed": str(error)}}
        return {name: row for kind in kinds for name, row in rows_of(feature, [kind]).items()}


def main(arguments: list[str]) -> int:
    """Prints a line for each type that was refused, failed or is off; returns whether one failed or is off."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("feature", choices=list(FEATURES))
    parser.add_argument("--only", help="types, with commas")
    parser.add_argument("--json", type=Path, help="where the rows go")
    args = parser.parse_args(arguments)
    kinds = args.only.split(",") if args.only else list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    rows: dict[str, dict[str, Any]] = {}
    for first in range(0, len(kinds), TOGETHER):
        rows |= rows_of(args.feature, kinds[first : first + TOGETHER])
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1))
    bad = {kind for kind, row in rows.items() if "failed" in row or row.get("off", 0.0) > TOLERANCE}
    for kind, row in rows.items():
        if kind in bad or "refused" in row:
            print(f"{kind:24s} {row.get('refused') or row.get('failed', '')[-600:] or row['off']}")
    counts = {word: sum(word in row for row in rows.values()) for word in ("skipped", "refused", "failed")}
    alike = len(rows) - len(bad | {kind for kind, row in rows.items() if "refused" in row or "skipped" in row})
    print(
        f"{args.feature}: {alike} as plain torch, {len(bad)} not;",
        ", ".join(f"{counts[word]} {word}" for word in counts),
    )
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
