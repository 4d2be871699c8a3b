"""What the checkpoint tests train: a tiny model with everything that makes checkpoints hard, and views of its states.

Tied, frozen, 0-dim and uneven parameters, two parameter groups, buffers (one not persistent), dropout on request.
Every rank gets the same batch, so that runs at different world sizes see the same gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ds_hf
from ds_hf.engine.zero.access import safe_get_full_fp32_param, safe_get_full_optimizer_state
from ds_hf.engine.zero.gather import GatheredParameters

VOCABULARY = 11
WIDTH = 6


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.mean.lerp_(x.detach().float().mean((0, 1)).to(self.mean.dtype), 0.1)
        return x + self.dropout(torch.tanh(self.linear(self.norm(x))))


class Model(nn.Module):
    def __init__(self, dropout: float = 0.0, tied: bool = True, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(1.25))
        self.frozen = nn.Parameter(torch.linspace(-1, 1, VOCABULARY), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x) * self.scale + self.frozen
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def config(stage: int, dtype: str = "fp32", **more: Any) -> dict[str, Any]:
    content: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 1e-2}},
        "gradient_clipping": 1.0,
    }
    if dtype == "bf16":
        content["bf16"] = {"enabled": True}
    elif dtype == "fp16":
        content["fp16"] = {"enabled": True, "initial_scale_power": 9, "loss_scale_window": 2}
    if dtype.endswith("offload"):
        content["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    return {**content, **more}


def build(content: dict[str, Any], model: nn.Module | None = None, seed: int = 0, **arguments: Any) -> Any:
    """An engine over a model initialized from ``seed``."""
    torch.manual_seed(seed)
    model = Model() if model is None else model
    if not {"optimizer", "model_parameters"} & arguments.keys() and "optimizer" in content:
        decayed = [p for p in model.parameters() if p.dim() > 1 and p.requires_grad]
        plain = [p for p in model.parameters() if p.dim() <= 1 and p.requires_grad]
        arguments["model_parameters"] = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    return ds_hf.initialize(model=model, config=content, **arguments)[0]


@contextlib.contextmanager
def engine_of(*arguments: Any, **keywords: Any) -> Iterator[Any]:
    """``build``, destroyed at the end."""
    engine = build(*arguments, **keywords)
    try:
        yield engine
    finally:
        engine.destroy()


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


def states(engine: Any) -> dict[str, Any]:
    """Everything that a checkpoint must bring back, whole, by name. Collective."""
    found: dict[str, Any] = {}
    for name, param in engine.module.named_parameters():
        with GatheredParameters([param]):
            found[name] = param.detach().float().clone()
        if param.requires_grad and engine.optimizer is not None:
            found[f"{name}/master"] = safe_get_full_fp32_param(param)
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"{name}/{key}"] = safe_get_full_optimizer_state(param, key)
    for name, value in engine.module.named_buffers():
        if not name.endswith("scratch"):
            found[name] = value.clone()
    found["counters"] = (engine.global_steps, engine.global_samples, engine.skipped_steps, engine.micro_steps)
    if engine.optimizer is not None:
        found["groups"] = [{k: v for k, v in g.items() if k != "params"} for g in engine.optimizer.param_groups]
        found["steps"] = sorted({float(state["step"]) for state in engine.optimizer.state.values()})
        scaler = engine.optimizer.loss_scaler.state_dict()  # how it moves is the configuration's, and the stage's
        found["loss scaler"] = {key: value for key, value in scaler.items() if key != "settings"}
    if engine.lr_scheduler is not None:
        found["scheduler"] = engine.lr_scheduler.state_dict()
    return found


def differences(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """Names whose values are not the very same."""

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return a.dtype == b.dtype and torch.equal(a, b)
        return type(a) is type(b) and bool(a == b)

    return [key for key in {**left, **right} if key not in left or key not in right or not same(left[key], right[key])]


def save_trained(folder: Path, stage: int, dtype: str, steps: int = 3, **keywords: Any) -> dict[str, Any]:
    """Train, save into ``folder``, train on; what the states were and the losses after."""
    with engine_of(config(stage, dtype)) as engine:
        train(engine, steps)
        engine.save_checkpoint(folder, **keywords)
        found = states(engine)
        return {"states": found, "losses": train(engine, 3, steps), "after": states(engine)}


def load_and_train(folder: Path, stage: int, dtype: str, steps: int = 3) -> dict[str, Any]:
    """Load into an engine that was initialized otherwise and has trained already; then as ``save_trained``."""
    with engine_of(config(stage, dtype), seed=7) as engine:
        train(engine, 1, 50)
        path, _ = engine.load_checkpoint(folder)
        assert path is not None
        found = states(engine)
        return {"states": found, "losses": train(engine, 3, steps), "after": states(engine)}


def on_both(calls: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    """Several calls in one set of processes, which are slow to start."""
    return [function(*arguments) for function, arguments in calls]
