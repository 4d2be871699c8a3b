"""A model of DeepSpeed's layers of experts, and the same in plain torch: loops over tokens and experts."""

from __future__ import annotations

import math
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hf.deepspeed_api.moe.layer import MoE

__all__ = ["Net", "Plain", "batch", "fill", "loss_of"]

WIDTH = 8


def expert() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, WIDTH))


class Block(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.linear, self.moe = nn.Linear(WIDTH, WIDTH), layer

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        result, aux, _ = self.moe(self.linear(x))
        return x + result, aux


class Net(nn.Module):
    """Three blocks: of one, two and three experts a token, with tokens dropped, a residual, and nothing dropped.

    Args:
        sizes: over how many processes each layer is divided.
    """

    def __init__(self, sizes: tuple[int, int, int], layer: Any = MoE) -> None:
        super().__init__()
        kinds: list[dict[str, Any]] = [
            {"num_experts": 4, "k": 1, "capacity_factor": 0.8, "min_capacity": 1, "use_rts": False},
            {"num_experts": 4, "k": 2, "use_residual": True, "top2_2nd_expert_sampling": False, "min_capacity": 1},
            {"num_experts": 8, "k": 3, "drop_tokens": False},
        ]
        layers = [layer(WIDTH, expert(), ep_size=size, **kind) for size, kind in zip(sizes, kinds, strict=True)]
        self.blocks = nn.ModuleList(Block(each) for each in layers)

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for block in self.blocks:
            x, aux = block(x)
            total = total + aux
        return x.square().mean() + 0.1 * total


class Plain(nn.Module):
    """One process computes ``MoE``; its parameters have the same names."""

    def __init__(self, hidden: int, each: nn.Module, num_experts: int, ep_size: int, k: int, **settings: Any) -> None:
        super().__init__()
        whole = MoE(hidden, each, num_experts, k=k, **settings)
        self.k, self.settings = k, settings
        for name, child in whole.named_children():
            setattr(self, name, child)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, list[int]]:
        moe, settings = self.deepspeed_moe, self.settings
        experts = list(moe.experts.deepspeed_experts)
        count, tokens = len(experts), x.reshape(-1, x.shape[-1])
        gates = torch.softmax(tokens @ moe.gate.wg.weight.T, 1)
        ranked = gates.argsort(1, descending=True)[:, : self.k].tolist()
        factor = settings.get("capacity_factor", 1.0) * self.k
        room = max(math.ceil(len(tokens) / count * factor), settings.get("min_capacity", 4))
        if not settings.get("drop_tokens", True):
            room = len(tokens)
        taken, kept = [0] * count, [[] for _ in tokens]
        # Of tokens for which one expert has too few places, those are taken that torch.topk takes of equal ones.
        wanted = torch.nn.functional.one_hot(torch.tensor(ranked, device=x.device)[:, 0], count)
        lucky = wanted.topk(min(room, len(tokens)), dim=0).indices.T.tolist()
        for place in range(self.k):  # all first choices come before all second ones
            for token, choices in enumerate(ranked):
                goes = token in lucky[choices[0]] if self.k == 1 else taken[choices[place]] < room
                if goes:
                    kept[token].append(choices[place])
                taken[choices[place]] += 1
        first = torch.zeros(count, dtype=x.dtype, device=x.device)
        for choices in ranked:
            for each in choices if self.k > 2 else choices[:1]:
                first[each] += 1 / len(tokens)
        aux = (gates.mean(0) * first).sum() * count / (self.k if self.k > 2 else 1)
        rows = []
        for token, choices in enumerate(kept):
            weights = [gates[token, each] for each in choices]
            if self.k > 1 and weights:
                weights = [weight / sum(weights) for weight in weights]
            row = sum((w * experts[e](tokens[token]) for w, e in zip(weights, choices, strict=True)), 0 * tokens[token])
            rows.append(row)
        result = torch.stack(rows).view_as(x)
        if hasattr(self, "mlp"):
            shares = torch.softmax(self.coefficient(x), -1)
            result = result * shares[..., :1] + self.mlp(x) * shares[..., 1:]
        return result, aux, taken


def fill(model: nn.Module) -> None:
    """Values that follow from the names, which are those of the whole model: also where this process has a part."""
    named = dict(model.named_modules())
    for name, param in model.named_parameters():
        head, found, rest = name.partition("deepspeed_experts.")
        if found:
            experts = named[head.rstrip(".")]
            local, dot, tail = rest.partition(".")
            rank = dist.get_rank() % experts.ep_size if experts.ep_size > 1 else 0
            name = f"{head}{found}{rank * experts.num_local_experts + int(local)}{dot}{tail}"
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        with torch.no_grad():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64) * 0.4)


def batch(number: int, tokens: int = 10) -> Tensor:
    return torch.randn(2, tokens, WIDTH, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x)
    return loss
