"""The learning-rate search against a grid: six small tasks, each seconds of one processor.

For each task: ``engine.lr_range_test`` suggests a rate; a full training is made at each rate of a 12-point grid, at the
suggestion, and at what fastai's (valley) and Lightning's (steepest) rules say of the same curves. All trainings have a
warm-up of 6 % and a linear decay, other initial weights and orders than the search had, and their held-out loss is the
mean over the seeds. A rate is good when its loss is within 2 % of the best of the grid.

    python benchmarks/lr_range.py --json FILE
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ds_hf
from ds_hf.lr import LrResult

WITHIN = 0.02
SEEDS = (101, 102)
POINTS = 12
RULES = ("ds_hf", "valley", "steepest")
Batch = tuple[Tensor, Tensor]


@dataclass
class Task:
    """A data set, a model and an optimizer.

    Attributes:
        train, held_out: inputs and targets, ``[samples, ...]``.
        make: the model, which returns its loss for (inputs, targets).
        lowest: first rate of the grid, whose points are half a decade apart.
    """

    name: str
    train: Batch
    held_out: Batch
    make: Callable[[], nn.Module]
    optimizer: dict[str, Any]
    batch: int
    steps: int
    lowest: float = 1e-5
    settings: dict[str, Any] = field(default_factory=dict)

    def grid(self) -> list[float]:
        return [self.lowest * 10 ** (0.5 * index) for index in range(POINTS)]

    def batches(self, seed: int) -> Iterator[Batch]:
        """Without end, every sample once a pass."""
        generator = torch.Generator().manual_seed(seed)
        inputs, targets = self.train
        while True:
            order = torch.randperm(len(inputs), generator=generator)
            for chosen in order[: len(order) // self.batch * self.batch].view(-1, self.batch):
                yield inputs[chosen], targets[chosen]

    def engine(self, seed: int) -> Any:
        torch.manual_seed(seed)
        config = {
            "train_micro_batch_size_per_gpu": self.batch,
            "zero_optimization": {"stage": 2},
            "optimizer": self.optimizer,
            **self.settings,
        }
        return ds_hf.initialize(model=self.make(), config=config)[0]


class WithLoss(nn.Module):
    """A network and what its output is compared by."""

    def __init__(self, net: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self.net(inputs), targets)


# -- tasks ----------------------------------------------------------------------------------------------------------


def linear_regression() -> Task:
    """Inputs of very different variance and a noisy target, SGD."""
    generator = torch.Generator().manual_seed(1)
    scales = torch.logspace(0, -1.5, 32)
    truth = torch.randn(32, 1, generator=generator) / scales[:, None]
    inputs = torch.randn(6000, 32, generator=generator) * scales
    targets = inputs @ truth + 2 * torch.randn(6000, 1, generator=generator)
    make = lambda: WithLoss(nn.Linear(32, 1), F.mse_loss)  # noqa: E731
    sgd = {"type": "SGD", "params": {"lr": 0.01}}
    return Task("linear regression, SGD", *_split(inputs, targets), make, sgd, 32, 300, 1e-4)


def logistic_regression() -> Task:
    """Ten overlapping classes, Adam."""
    generator = torch.Generator().manual_seed(2)
    targets = torch.randint(0, 10, (8000,), generator=generator)
    inputs = torch.randn(10, 40, generator=generator)[targets] * 0.5 + torch.randn(8000, 40, generator=generator)
    make = lambda: WithLoss(nn.Linear(40, 10), F.cross_entropy)  # noqa: E731
    adam = {"type": "Adam", "params": {"lr": 1e-3}}
    return Task("logistic regression, Adam", *_split(inputs, targets), make, adam, 64, 300)


def mlp() -> Task:
    """What another network says, with noise, AdamW."""
    torch.manual_seed(3)
    teacher = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    inputs = torch.randn(10000, 16)
    with torch.no_grad():
        for param in teacher.parameters():
            param.mul_(3)
        targets = teacher(inputs) + torch.randn(10000, 1)
    make = lambda: WithLoss(  # noqa: E731
        nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1)), F.mse_loss
    )
    adamw = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}}
    return Task("MLP on a teacher's answers, AdamW", *_split(inputs, targets), make, adamw, 64, 400)


def digits() -> Task:
    """8 x 8 digits with a tenth of the labels wrong, a small convolutional net, SGD with momentum."""
    from sklearn.datasets import load_digits

    data = load_digits()
    generator = torch.Generator().manual_seed(4)
    order = torch.randperm(len(data.target), generator=generator)
    inputs = torch.tensor(data.images / 16, dtype=torch.float32)[order, None]
    targets = torch.tensor(data.target)[order]
    wrong = torch.rand(len(targets), generator=generator) < 0.1
    targets[wrong] = torch.randint(0, 10, (int(wrong.sum()),), generator=generator)

    def make() -> nn.Module:
        net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(256, 10),
        )  # fmt: skip
        return WithLoss(net, F.cross_entropy)

    sgd = {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}}
    return Task("digits, convolutions, SGD with momentum", *_split(inputs, targets), make, sgd, 32, 250, 1e-4)


class CharGru(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 32)
        self.gru = nn.GRU(32, 64, batch_first=True)
        self.head = nn.Linear(64, vocabulary)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.gru(self.embedding(inputs))[0])
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def char_lm() -> Task:
    """Python's own sources, character by character, a GRU with AdamW and clipping."""
    adamw = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}}
    tokens = _source_bytes(32)
    task = Task(
        "characters of Python, GRU, AdamW", *_split(tokens[:, :-1], tokens[:, 1:]), lambda: CharGru(128), adamw, 8, 200
    )
    task.settings = {"gradient_clipping": 1.0}
    return task


class LlamaLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=128, hidden_size=48, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=64,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(input_ids=inputs).logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def llama() -> Task:
    """The same text, a Llama of two layers with AdamW and clipping."""
    adamw = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1, "betas": [0.9, 0.95]}}
    tokens = _source_bytes(32)
    task = Task("characters of Python, Llama, AdamW", *_split(tokens[:, :-1], tokens[:, 1:]), LlamaLoss, adamw, 8, 200)
    task.settings = {"gradient_clipping": 1.0}
    return task


TASKS = {task.__name__: task for task in (linear_regression, logistic_regression, mlp, digits, char_lm, llama)}


def _source_bytes(length: int) -> Tensor:
    """Stretches of Python's standard library, ``[samples, length + 1]``, in ASCII."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("[a-h]*.py")))[:600_000]
    tokens = torch.tensor([min(byte, 127) for byte in text])
    rows = tokens[: len(tokens) // (length + 1) * (length + 1)].view(-1, length + 1)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(5))]


def _split(inputs: Tensor, targets: Tensor) -> tuple[Batch, Batch]:
    """Four fifths to train on, and up to 1024 samples held out."""
    cut = len(inputs) * 4 // 5
    return (inputs[:cut], targets[:cut]), (inputs[cut:][:1024], targets[cut:][:1024])


# -- measuring ------------------------------------------------------------------------------------------------------


def suggest(task: Task) -> LrResult:
    engine = task.engine(seed=0)
    try:
        return engine.lr_range_test(task.batches(seed=0), total_steps=task.steps)
    finally:
        engine.destroy()


def trained(task: Task, lr: float) -> float:
    """Held-out loss after a full training, the mean over the seeds; infinite when it diverged."""
    losses = []
    for seed in SEEDS:
        engine = task.engine(seed)
        warm = max(1, math.ceil(0.06 * task.steps))
        for step, batch in zip(range(task.steps), task.batches(seed), strict=False):
            height = min((step + 1) / warm, (task.steps - step) / (task.steps - warm))
            for group in engine.optimizer.param_groups:
                group["lr"] = lr * height
            loss = engine(*batch)
            if not math.isfinite(float(loss.detach())):
                break
            engine.backward(loss)
            engine.step()
        engine.eval()
        with torch.no_grad():
            parts = [engine(x, y) for x, y in zip(*(part.split(256) for part in task.held_out), strict=True)]
            losses.append(float(torch.stack(parts).mean()))
        engine.destroy()
    mean = sum(losses) / len(losses)
    return mean if math.isfinite(mean) else math.inf


def measure(task: Task, known: dict[str, Any]) -> dict[str, Any]:
    started = time.perf_counter()
    result = suggest(task)
    search_s = time.perf_counter() - started
    earlier = {lr: math.inf if loss is None else loss for lr, loss in known.get(task.name, {}).get("grid", [])}
    grid = earlier or {lr: trained(task, lr) for lr in task.grid()}
    best = min(grid.values())
    rates = dict(zip(RULES, (result.lr, result.marks.valley, result.marks.steepest), strict=True))
    losses = {rule: math.inf if lr is None else trained(task, lr) for rule, lr in rates.items()}
    return {
        "task": task.name,
        "steps": task.steps,
        "grid": [[lr, _json(loss)] for lr, loss in grid.items()],
        "best": best,
        "best_lr": min(grid, key=lambda lr: grid[lr]),
        "rules": {
            rule: {"lr": rates[rule], "loss": _json(loss), "over_best": _json(loss / best - 1)}
            for rule, loss in losses.items()
        },
        "interval": list(result.interval),
        "search_updates": result.updates,
        "search_s": round(search_s, 2),
        "grid_updates": POINTS * task.steps,
    }


def _json(value: float) -> float | None:
    return value if math.isfinite(value) else None


def show(row: dict[str, Any]) -> None:
    rules = row["rules"]
    cells = []
    for rule in rules.values():
        over = "diverged" if rule["over_best"] is None else f"{rule['over_best']:+.1%}"
        cells.append(f"{rule['lr'] or math.nan:9.2e} {over:>9}")
    print(
        f"{row['task']:<42} {row['best_lr']:9.2e} {row['best']:8.4f}  {'  '.join(cells)}  {row['search_updates']:>5}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--task", choices=TASKS, action="append", help="only this one; may be repeated")
    parser.add_argument(
        "--grid", type=Path, help="take the grid's losses, which no rule changes, from this earlier file"
    )
    args = parser.parse_args()
    known = {row["task"]: row for row in json.loads(args.grid.read_text())["tasks"]} if args.grid else {}
    names = args.task or list(TASKS)
    if "digits" in names and importlib.util.find_spec("sklearn") is None:
        parser.error("the digits come from scikit-learn: pip install scikit-learn, or name other tasks with --task")
    torch.set_num_threads(1)
    print(f"{'task':<42} {'best lr':>9} {'loss':>8}  {'ds_hf':>19}  {'valley':>19}  {'steepest':>19}  updates")
    rows: list[dict[str, Any]] = []
    started = time.perf_counter()
    for name in names:
        rows.append(measure(TASKS[name](), known))
        show(rows[-1])
        figures = {
            "command": f"python benchmarks/lr_range.py {' '.join(sys.argv[1:])}".strip(),
            "torch": torch.__version__,
            "seconds": round(time.perf_counter() - started),
            "within": {rule: sum(_is_good(row["rules"][rule]) for row in rows) for rule in RULES},
            "tasks": rows,
        }
        if args.json:  # after each task: a run that is cut off leaves what it has
            args.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(f"within {WITHIN:.0%} of the best of the grid, of {len(rows)} tasks: {figures['within']}")


def _is_good(rule: dict[str, Any]) -> bool:
    return rule["over_best"] is not None and rule["over_best"] <= WITHIN


if __name__ == "__main__":
    main()
