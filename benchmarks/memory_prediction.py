"""Predicted against measured peak memory: ``ds_hf.memory`` against a real engine on real GPUs, cell after cell.

    python benchmarks/memory_prediction.py --json FILE --budget 300
    torchrun --nproc-per-node 2 benchmarks/memory_prediction.py --json FILE --budget 300

    torchrun --nproc-per-node 2 benchmarks/memory_prediction.py --only offload "stage 3" --json FILE --budget 40

Each cell builds a model with random weights on the GPU, trains three steps, and takes
``torch.cuda.max_memory_allocated()`` of the third. All cells run in one process, in an order that mixes the kinds, the
slow ones last (30 cells take 70 s on an H100): what the budget (seconds) cuts off are cells with offload. A cell that
fails is reported and the next one runs; with several processes it ends the run, since the others may wait for ever.
``--only TEXT ...`` takes cells whose name has one of the texts; ``--list`` prints the names and the predictions and
needs no GPU; without a GPU the tiny cell alone is trained, to try the script, and nothing is measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hf import initialize
from ds_hf.memory import Prediction, Predictor, Workload
from ds_hf.memory.models import example_inputs

GIB, STEPS = 1 << 30, 3
MODELS = {
    "tiny": "llama:hidden=64,layers=2,heads=4,kv_heads=4,intermediate=172,vocab=512",
    "llama-0.4b": "llama:hidden=1024,layers=24,heads=16,kv_heads=16,intermediate=2816,vocab=32000",
    "llama-1.3b": "llama:hidden=2048,layers=24,heads=16,kv_heads=16,intermediate=5504,vocab=32000",
    "llama-2.7b": "llama:hidden=2560,layers=32,heads=32,kv_heads=32,intermediate=6912,vocab=32000",
    "qwen2-0.5b": "qwen2:hidden=896,layers=24,heads=14,kv_heads=2,intermediate=4864,vocab=151936,tied=true",
    "gpt2-medium": "gpt2:n_embd=1024,n_layer=24,n_head=16",
    "bert-large": "bert:hidden=1024,layers=24,heads=16,intermediate=4096",
    "t5-base": "t5:d_model=768,d_ff=3072,num_layers=12,num_heads=12",
}


@dataclass(frozen=True)
class Cell:
    """One configuration."""

    model: str
    stage: int
    micro: int
    seq: int
    checkpointing: bool = False
    dtype: str = "bf16"
    accumulation: int = 1
    offload: str = "none"  # or optimizer, all: to the CPU
    optimizer: str = "AdamW"
    attention: str | None = None
    keeps_outputs: bool = False

    @property
    def name(self) -> str:
        words = [self.model, f"stage {self.stage}", f"{self.micro}x{self.seq}", self.dtype]
        words += ["checkpointing"] * self.checkpointing + [f"x{self.accumulation}"] * (self.accumulation > 1)
        words += [f"offload {self.offload}"] * (self.offload != "none") + [self.optimizer] * (self.optimizer != "AdamW")
        words += [self.attention] * (self.attention is not None) + ["keeps outputs"] * self.keeps_outputs
        return ", ".join(map(str, words))

    def config(self) -> dict[str, Any]:
        """DeepSpeed's configuration."""
        params: dict[str, Any] = {"lr": 1e-5} | ({"momentum": 0.9} if self.optimizer == "SGD" else {})
        zero: dict[str, Any] = {"stage": self.stage}
        if self.offload != "none":
            zero["offload_optimizer"] = {"device": "cpu"}
        if self.offload == "all":
            zero["offload_param"] = {"device": "cpu"}
        config = {
            "train_micro_batch_size_per_gpu": self.micro,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": 1.0,
            "optimizer": {"type": self.optimizer, "params": params},
            "zero_optimization": zero,
        }
        if self.dtype == "fp16":  # a scale that never overflows: a skipped step makes no moments
            return config | {"fp16": {"enabled": True, "loss_scale": 128}}
        return config | ({"bf16": {"enabled": True}} if self.dtype == "bf16" else {})

    def workload(self) -> Workload:
        """What a micro-batch is."""
        return Workload(
            micro_batch=self.micro,
            seq_len=self.seq,
            gradient_checkpointing=self.checkpointing,
            attention=self.attention,
            keeps_outputs=self.keeps_outputs,
        )


def cells() -> list[Cell]:
    """Models and shapes that fit 80 GB, each a few seconds."""
    found: list[Cell] = []
    shapes = ((1, 512), (4, 2048), (8, 1024))
    for index, (model, (micro, seq), checkpointing) in enumerate(
        (m, s, c) for m in ("llama-0.4b", "llama-1.3b") for s in shapes for c in (False, True)
    ):
        found.append(Cell(model, (2, 3, 0, 1)[index % 4], micro, seq, checkpointing))
    others = [
        Cell("llama-0.4b", 0, 2, 1024, accumulation=4),
        Cell("llama-0.4b", 2, 2, 1024, accumulation=4),
        Cell("llama-1.3b", 1, 2, 1024, True, accumulation=2),
        Cell("llama-1.3b", 3, 2, 1024, True, accumulation=4),
        Cell("llama-0.4b", 0, 1, 512, dtype="fp32"),
        Cell("llama-0.4b", 2, 4, 1024, dtype="fp32"),
        Cell("llama-0.4b", 3, 4, 1024, True, dtype="fp32"),
        Cell("llama-0.4b", 2, 4, 1024, dtype="fp16"),
        Cell("qwen2-0.5b", 2, 4, 1024),
        Cell("qwen2-0.5b", 3, 4, 1024, True),
        Cell("qwen2-0.5b", 0, 1, 4096),
        Cell("qwen2-0.5b", 3, 2, 4096, True),
        Cell("gpt2-medium", 2, 8, 1024),
        Cell("gpt2-medium", 3, 8, 1024, True),
        Cell("gpt2-medium", 2, 4, 1024, attention="eager"),
        Cell("bert-large", 1, 16, 512),
        Cell("bert-large", 3, 16, 512, True),
        Cell("t5-base", 2, 8, 512),
        Cell("llama-1.3b", 2, 2, 1024, offload="optimizer"),
        Cell("llama-1.3b", 3, 2, 1024, True, offload="optimizer"),
        Cell("llama-0.4b", 3, 4, 1024, offload="all"),
        Cell("llama-2.7b", 2, 2, 2048, True),
        Cell("llama-1.3b", 2, 2, 1024, optimizer="Lion"),
        Cell("llama-0.4b", 2, 4, 1024, optimizer="SGD"),
        Cell("llama-0.4b", 2, 4, 1024, keeps_outputs=True),
        Cell("llama-0.4b", 3, 4, 1024, attention="eager"),
    ]
    mixed = [cell for pair in zip(found, others, strict=False) for cell in pair]
    # Stable: page-locking host memory takes ten seconds and more, everything else about two.
    return sorted(mixed + found[len(others) :] + others[len(found) :], key=_slow)


def _slow(cell: Cell) -> int:
    return (cell.offload != "none") * 2 + (cell.model == "llama-2.7b" or cell.accumulation > 1)


def predict(cell: Cell, world_size: int) -> tuple[Predictor, Prediction, float]:
    """The predictor, what it says, and the seconds that took."""
    start = time.perf_counter()
    predictor = Predictor(MODELS[cell.model], cell.workload())
    known = {"device_memory": torch.cuda.get_device_properties(0).total_memory} if torch.cuda.is_available() else {}
    prediction = predictor.predict(cell.config(), world_size=world_size, **known)
    return predictor, prediction, time.perf_counter() - start


def measure(cell: Cell, predictor: Predictor, device: torch.device) -> dict[str, int]:
    """Bytes of the third step; nothing where there is no GPU."""
    model = _real(cell, predictor, device)
    engine, *_ = initialize(model=model, config=cell.config(), model_parameters=model.parameters())
    inputs = {name: _filled(value, device) for name, value in example_inputs(model, cell.workload()).items()}
    cuda = device.type == "cuda"
    try:
        for step in range(STEPS):
            if step == STEPS - 1 and cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            for _ in range(cell.accumulation):
                _micro_batch(engine, inputs, cell.keeps_outputs)
        if not cuda:
            return {}
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return {
            "allocated": torch.cuda.max_memory_allocated(),
            "requested": int(torch.cuda.memory_stats().get("requested_bytes.all.peak", 0)),
            "reserved": torch.cuda.max_memory_reserved(),
            "device_used": total - free,
        }
    finally:
        engine.destroy()


def _micro_batch(engine: Any, inputs: dict[str, Any], keeps_outputs: bool) -> None:
    outputs = engine(**inputs)
    loss = outputs.loss
    if not keeps_outputs:
        del outputs
    engine.backward(loss)
    engine.step()


def _real(cell: Cell, predictor: Predictor, device: torch.device) -> Any:
    """The predictor's model again, with values."""
    like: Any = predictor.model
    options = {"attn_implementation": cell.attention} if cell.attention else {}
    torch.manual_seed(0)
    with device:
        model = type(like)._from_config(like.config, **options)
    if cell.checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()
    return model.train()


def _filled(value: Any, device: torch.device) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.is_floating_point():
        return torch.rand(value.shape, dtype=value.dtype, device=device)
    return torch.randint(2, 500, value.shape, dtype=value.dtype, device=device)


# -- the run ------------------------------------------------------------------------------------------------------


def run(cell: Cell, device: torch.device, world_size: int) -> dict[str, Any]:
    """One row of the result; never raises."""
    row: dict[str, Any] = {"name": cell.name, **asdict(cell)}
    start = time.perf_counter()
    try:
        predictor, prediction, seconds = predict(cell, world_size)
        row |= {"predicted": prediction.as_json(), "predicted_s": round(seconds, 2)}
        row |= {"measured": measure(cell, predictor, device)}
        if row["measured"]:
            row["error"] = prediction.device_peak / row["measured"]["allocated"] - 1
    except Exception as error:  # the next cell may work
        row["failed"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    row["seconds"] = round(time.perf_counter() - start, 2)
    return row


def describe(row: dict[str, Any]) -> str:
    """A line of the table."""
    if "failed" in row:
        return f"{row['name']:<62} failed: {row['failed'][:90]}"
    predicted = row["predicted"]["device"]["tensors_peak"] / GIB
    if not row.get("measured"):
        return f"{row['name']:<62} {predicted:7.2f}"
    measured, reserved = row["measured"]["allocated"] / GIB, row["measured"]["reserved"] / GIB
    mark = "" if abs(row["error"]) <= 0.1 else "  <-- more than 10 %"
    figures = f"{predicted:7.2f} {measured:7.2f} {row['error']:+7.1%} {reserved:7.2f} {row['seconds']:5.1f}"
    return f"{row['name']:<62} {figures}{mark}"


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures over all cells that were measured."""
    errors = [abs(row["error"]) for row in rows if "error" in row]
    return {
        "cells": len(errors),
        "failed": sum("failed" in row for row in rows),
        "within_10_percent": sum(error <= 0.1 for error in errors),
        "mean_error": sum(errors) / len(errors) if errors else None,
        "largest_error": max(errors, default=None),
    }


def main() -> None:
    """Run, print, write."""
    args = arguments()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    chosen = [cell for cell in cells() if not args.only or any(text in cell.name for text in args.only)]
    if args.list:
        for cell in chosen:
            _, prediction, _ = predict(cell, world)
            print(describe({"name": cell.name, "predicted": prediction.as_json()}), prediction.moment, flush=True)
        return
    cuda = torch.cuda.is_available()
    if not cuda:
        print("no GPU: the tiny cell is trained to try the script, nothing is measured", file=sys.stderr)
        chosen = [Cell("tiny", 2, 2, 64, checkpointing, accumulation=2) for checkpointing in (False, True)]
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    warm_up(chosen, device)
    rank = int(os.environ.get("RANK", "0"))
    rows: list[dict[str, Any]] = []
    start = time.perf_counter()
    if rank == 0:
        print(f"{'GiB':<62} {'predict':>7} {'measure':>7} {'error':>7} {'reserv.':>7} {'s':>5}", flush=True)
    for cell in chosen:
        if _over(start, args.budget, device, world):
            break
        rows.append(run(cell, device, world))
        if rank == 0:
            print(describe(rows[-1]), flush=True)
            _write(args.json, rows, world, len(chosen))
        if world > 1 and "failed" in rows[-1]:
            print(f"rank {rank}: a cell failed, so the run ends: {rows[-1]['failed']}", file=sys.stderr)
            break
    if rank == 0:
        print(json.dumps(summary(rows)))
    if dist.is_initialized():
        dist.destroy_process_group()


def warm_up(chosen: list[Cell], device: torch.device) -> None:
    """The process group, cuBLAS and the kernels that are compiled at first use are there before the first cell."""
    if chosen:
        dtype = chosen[0].dtype
        run(replace(Cell("tiny", 2, 1, 64), dtype=dtype), device, int(os.environ.get("WORLD_SIZE", "1")))


def _over(start: float, budget: float, device: torch.device, world: int) -> bool:
    """Whether the time is up, on all processes at once."""
    over = torch.tensor([time.perf_counter() - start > budget], dtype=torch.int32, device=device)
    if world > 1:
        dist.all_reduce(over, op=dist.ReduceOp.MAX)
    return bool(over.item())


def _write(path: str | None, rows: list[dict[str, Any]], world: int, wanted: int) -> None:
    if path is None:
        return
    import transformers

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    about = {
        "device": device,
        "world_size": world,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cells_wanted": wanted,
    }
    Path(path).write_text(json.dumps({**about, "summary": summary(rows), "rows": rows}, indent=1), "utf-8")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the result to this file, after every cell")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds; no cell starts after them")
    parser.add_argument("--only", nargs="+", default=[], help="cells whose name has one of these texts")
    parser.add_argument("--list", action="store_true", help="print names and predictions, run nothing")
    return parser.parse_args()


if __name__ == "__main__":
    main()
