"""Models, data, and what one process of plain torch makes of them: the right answers of the matrix. No ds_hf here.

In 16 bits the weights that compute are 16-bit ones, and fp32 masters of those that train add up fp32 sums of 16-bit
gradients; losses are multiplied by 256 in fp16. That is mixed precision in its usual form, without an engine.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from tests.contract.matrix.cells import Cell

__all__ = [
    "ADAMW",
    "CLIP",
    "LENGTH",
    "MIDDLE",
    "STEPS",
    "Run",
    "build",
    "data",
    "groups",
    "prompt",
    "run",
    "shifted",
    "unfreeze",
]

STEPS, MIDDLE, SAMPLES, LENGTH, VOCABULARY, NEW = 4, 2, 2, 8, 32, 4
CLIP = 0.5  # below every norm here
SCALE = 256.0
# An eps of the gradients' size: steps follow their size as well as their sign, so a wrong factor shows in the weights,
# and elements whose gradient is rounding do not move by whole steps.
ADAMW: dict[str, Any] = {"lr": 2e-2, "betas": (0.9, 0.999), "eps": 1e-2}
DECAY = 0.05
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _llama(seed: int, **more: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    tokens = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    config = LlamaConfig(
        **sizes, **heads, **tokens, initializer_range=0.25, attn_implementation="sdpa", use_cache=False, **more
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


def _experts() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 32}
    experts = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 16, "norm_topk_prob": True}
    tokens = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False}
    config = Qwen3MoeConfig(
        **sizes, **heads, **experts, **tokens, initializer_range=0.25, attn_implementation="sdpa", use_cache=False
    )
    torch.manual_seed(3)  # of which no norm in the training is a multiple of the first: that multiplies rounding
    return Qwen3MoeForCausalLM(config)


def build(kind: str) -> list[Any]:
    """The models of a combination, with the same values on every call."""
    if kind == "experts":
        return [_experts()]
    model = _llama(0, tie_word_embeddings=kind == "tied")
    if kind in ("frozen", "unfrozen"):
        for part in (model.model.embed_tokens, model.model.layers[0].mlp):
            for param in part.requires_grad_(False).parameters():
                param.later = kind == "unfrozen"
    if kind == "twice":
        model.model.layers[1] = model.model.layers[0]
        # told to transformers, which saves no shared weights that it does not know of
        model._tied_weights_keys = {r"model\.layers\.1\.": "model.layers.0."}
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        names = ["q_proj", "v_proj", "down_proj"]
        made = LoraConfig(r=4, lora_alpha=8, target_modules=names, init_lora_weights=False, task_type="CAUSAL_LM")
        return [get_peft_model(model, made)]
    if kind not in ("two", "activation", "encoder"):
        return [model]
    second = _llama(7, tie_word_embeddings=False)
    if kind == "activation":
        for mine, other in zip(second.model.layers, model.model.layers, strict=True):
            mine.mlp.act_fn = other.mlp.act_fn
        second.model.rotary_emb = model.model.rotary_emb
    if kind == "encoder":
        second.model.embed_tokens = model.model.embed_tokens.requires_grad_(False)
    return [model, second]


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, norms do not: what the Trainer makes too. What will be unfrozen is listed from the start."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad or getattr(p, "later", False)]
    return [
        {"params": [p for name, p in named if "norm" not in name], "weight_decay": DECAY},
        {"params": [p for name, p in named if "norm" in name], "weight_decay": 0.0},
    ]


def unfreeze(model: nn.Module) -> None:
    """What trains in the second half."""
    for param in model.parameters():
        if getattr(param, "later", False):
            param.requires_grad_(True)


def data(processes: int, accumulation: int) -> tuple[Tensor, Tensor]:
    """Ids and labels ``[step, micro-batch, process, sample, position]``; labels count in unequal numbers."""
    generator = torch.Generator().manual_seed(3)
    shape = (STEPS, accumulation, processes, SAMPLES)
    ids = torch.randint(2, VOCABULARY, (*shape, LENGTH), generator=generator)
    masked = torch.randint(1, LENGTH - 2, shape, generator=generator)
    return ids, torch.where(torch.arange(LENGTH) < masked[..., None], -100, ids)


def held_out(processes: int) -> tuple[Tensor, Tensor]:
    """``[2, process, sample, position]`` to evaluate."""
    ids, labels = data(processes, 1)
    return (ids.flip(-1)[:2, 0] + 1) % VOCABULARY, torch.where(labels[:2, 0] == -100, -100, labels[:2, 0])


def prompt() -> Tensor:
    return torch.tensor([[5, 9, 3], [7, 2, 11]])


def generating() -> dict[str, Any]:
    """Arguments of ``generate``: without a cache, for a block that is used twice has one place in it."""
    return {
        "input_ids": prompt(),
        "attention_mask": torch.ones_like(prompt()),
        "max_new_tokens": NEW,
        "do_sample": False,
        "use_cache": False,
    }


def shifted(labels: Tensor) -> Tensor:
    """Labels of the following positions, as parts of a sequence need them."""
    return nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]


@dataclass
class Run:
    """Numbers of one model: of each step, and its weights before and after."""

    before: dict[str, Tensor]
    names: dict[str, str]  # of every parameter, those of tied ones among them: the first name of the same one
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    masters: dict[str, Tensor] = field(default_factory=dict)  # in fp32, of the weights that train
    evaluated: float | None = None
    generated: Tensor | None = None
    middle: Any = None  # the model after half of the steps, to judge what others generated


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().float().clone() for name, param in model.named_parameters()}


def loss_of(model: Any, ids: Tensor, labels: Tensor, items: Any = None) -> Tensor:
    more = {} if items is None else {"num_items_in_batch": items}
    return model(input_ids=ids, labels=labels, **more).loss  # type: ignore[no-any-return]


@cache
def run(kind: str, which: int, processes: int, accumulation: int, clip: int, precision: str, by_tokens: bool) -> Run:
    """Train model ``which`` of a kind.

    Args:
        by_tokens: a step's loss is the mean over all of its tokens, as the Trainer's is, and so is that of what is
            evaluated at once; else that of the means of its micro-batches.
    """
    return train(build(kind)[which], data(processes, accumulation), clip, precision, by_tokens)


def train(model: Any, batches: tuple[Tensor, Tensor], clip: int, precision: str, by_tokens: bool) -> Run:
    """One process; the loop of ``run``."""
    first: dict[nn.Parameter, str] = {}
    names = {name: first.setdefault(p, name) for name, p in model.named_parameters(remove_duplicate=False)}
    found = Run(_values(model), names)
    dtype, scale = DTYPES[precision], SCALE if precision == "fp16" else 1.0
    made = groups(model)
    params = [p for group in made for p in group["params"]]
    masters = {p: p.detach().clone().requires_grad_() for p in params}
    for param in model.parameters():  # buffers stay as they are
        param.data = param.data.to(dtype)
    rule = torch.optim.AdamW([{**group, "params": [masters[p] for p in group["params"]]} for group in made], **ADAMW)
    for step, (ids, labels) in enumerate(zip(*batches, strict=True)):
        if step == MIDDLE:
            _look(model, found, ids.shape[1], by_tokens)
            unfreeze(model)
        items = (labels[..., 1:] != -100).sum() if by_tokens else None
        parts = ids.shape[0] * ids.shape[1]
        total = 0.0
        for x, y in zip(ids.flatten(0, 1), labels.flatten(0, 1), strict=True):
            loss = loss_of(model, x, y, items) / (1 if by_tokens else parts)
            (loss * scale).backward()
            total += float(loss.detach())
            for param, master in masters.items():
                if param.grad is not None:
                    grad = param.grad.float() / scale
                    master.grad = grad if master.grad is None else master.grad + grad
                    param.grad = None
        found.losses.append(total)
        found.norms.append(float(nn.utils.clip_grad_norm_(masters.values(), CLIP if clip else 1e9)))
        rule.step()
        rule.zero_grad()
        for param, master in masters.items():
            param.data.copy_(master.data)
    found.weights = _values(model)
    found.masters = {name: masters[p].detach() for name, p in model.named_parameters() if p in masters}
    return found


@torch.no_grad()
def _look(model: Any, found: Run, processes: int, by_tokens: bool) -> None:
    model.eval()
    losses = []
    for ids, labels in zip(*held_out(processes), strict=True):  # what the processes evaluate at once
        items = (labels[..., 1:] != -100).sum() if by_tokens else None
        shares = [float(loss_of(model, x, y, items)) for x, y in zip(ids, labels, strict=True)]
        losses.append(sum(shares) / (1 if by_tokens else processes))
    found.evaluated = sum(losses) / len(losses)
    found.generated = model.generate(**generating())
    found.middle = copy.deepcopy(model)
    model.train()


def expected(cell: Cell, which: int, precision: str | None = None) -> Run:
    """What model ``which`` of a combination has to be."""
    by_tokens = cell.client == "trainer" and which == 0  # the second one is trained by a callback's own loop
    return run(cell.model, which, cell.data, cell.accumulation, cell.clip, precision or cell.precision, by_tokens)
