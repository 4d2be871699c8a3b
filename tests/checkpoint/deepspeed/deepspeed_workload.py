"""The tiny model that real DeepSpeed trained for the fixtures; needs torch alone, as DeepSpeed's venv imports it too.

Two parameter groups, tied weights, a frozen weight, a buffer, sizes that no world size divides: what makes the flat
files of DeepSpeed hard to read. Every rank gets the same batch, so that world sizes see the same gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH = 11, 6
STEPS_BEFORE, STEPS_AFTER = 3, 4

CASES = [  # stage, dtype, world size
    *((stage, "fp32", world) for stage in (1, 2, 3) for world in (1, 2)),
    *((stage, dtype, 2) for stage in (1, 2, 3) for dtype in ("bf16", "fp16")),
    (1, "bf16-accumulating-fp32", 2),  # another optimizer class of DeepSpeed, BF16_Optimizer
    (3, "fp32-sub-groups", 2),  # several flat tensors a parameter group
    (0, "fp32", 1),
]


class TinyModel(nn.Module):
    """Embedding tied to the head, two linear layers, one frozen bias, one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.first = nn.Linear(WIDTH, 7)
        self.second = nn.Linear(7, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.linspace(-1, 1, VOCABULARY), requires_grad=False)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        x = self.embedding(tokens)
        x = self.norm(x + self.second(torch.tanh(self.first(x))))
        logits = self.head(x) + self.frozen
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay for matrices only."""
    trained = [p for p in model.parameters() if p.requires_grad]
    numel = [getattr(p, "ds_numel", p.numel()) for p in trained]
    wide = [p for p, n in zip(trained, numel, strict=True) if n > WIDTH + 1]
    narrow = [p for p, n in zip(trained, numel, strict=True) if n <= WIDTH + 1]
    return [{"params": wide}, {"params": narrow, "weight_decay": 0.0}]


def config(stage: int, dtype: str) -> dict[str, Any]:
    """What both DeepSpeed and ds_hf are given."""
    content: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 1e-2}},
        "gradient_clipping": 1.0,
    }
    if dtype.endswith("sub-groups"):
        content["zero_optimization"]["sub_group_size"] = 30
    if dtype.endswith("accumulating-fp32"):
        content["data_types"] = {"grad_accum_dtype": "fp32"}
    if dtype.startswith("bf16"):
        content["bf16"] = {"enabled": True}
    elif dtype == "fp16":
        content["fp16"] = {"enabled": True, "initial_scale_power": 9, "loss_scale_window": 2}
    return content


def train(engine: Any, steps: int, start: int = 0) -> list[float]:
    """Losses of ``steps`` steps on batches that depend only on their number."""
    losses = []
    for number in range(start, start + steps):
        tokens = torch.randint(0, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(1000 + number))
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def case_name(stage: int, dtype: str, world_size: int) -> str:
    return f"stage{stage}-{dtype}-world{world_size}"
