"""How long checkpoints take: seconds that training is blocked, seconds until all is on disk, seconds to load.

    python benchmarks/checkpoint.py --json checkpoint.json --deepspeed /path/to/its/venv/bin/python

Contenders save and load the same states (fp32 weights, masters where they keep their own, two moments of AdamW) on
``--world-size`` gloo processes: ds_hf at once and in the background, torch.distributed.checkpoint with ``save`` and
``async_save`` of the same model under DDP, DeepSpeed in another interpreter (``--deepspeed``), since ds_hf takes the
name. Each keeps its processes for the whole run; all take turns, a fresh folder each time, and the median over the
rounds counts. "blocked" ends when the call returns, "durable" when everything is on disk: what the others have not
synced themselves (DeepSpeed nothing) is synced for them. "load" reads what was just written, from the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

Times = dict[str, float]  # seconds
JOBS = {"ds_hf": ("save", "async", "load"), "torch": ("save", "async", "load"), "deepspeed": ("save", "load")}
SETTINGS = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    "zero_allow_untested_optimizer": True,
}


def make_model(numel: int) -> nn.Module:
    """Square layers with ``numel`` parameters in all."""
    width = 1024
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(max(1, round(numel / width**2)))))


def train(model: Any, step: Callable[[Any], None]) -> None:
    """One step, so that there are moments."""
    loss = model(torch.randn(1, 1024)).square().mean()
    step(loss)


def synced(folder: Path) -> None:
    """Until every file of ``folder`` is on disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


class Engines:
    """ds_hf, or DeepSpeed where it is installed."""

    def __init__(self, name: str, numel: int) -> None:
        if name == "ds_hf":
            import ds_hf as library

            extra = {"ds_hf": {"checkpoint": {"async": True}}}
        else:
            import deepspeed as library

            extra = {}
        self.own = name == "ds_hf"
        model = make_model(numel)
        self.engine = library.initialize(model=model, model_parameters=model.parameters(), config=SETTINGS)[0]
        train(self.engine, self._step)
        self.later: Any = None
        if self.own:
            model = make_model(numel)
            self.later = library.initialize(
                model=model, model_parameters=model.parameters(), config={**SETTINGS, **extra}
            )[0]
            train(self.later, lambda loss: (self.later.backward(loss), self.later.step()))

    def _step(self, loss: Any) -> None:
        self.engine.backward(loss)
        self.engine.step()

    def save(self, folder: Path) -> Times:
        began = time.perf_counter()
        self.engine.save_checkpoint(str(folder))
        blocked = time.perf_counter() - began
        if not self.own:
            synced(folder)
        return {"blocked": blocked, "durable": time.perf_counter() - began}

    def async_(self, folder: Path) -> Times:
        began = time.perf_counter()
        self.later.save_checkpoint(str(folder))
        blocked = time.perf_counter() - began
        self.later.wait_for_checkpoint()
        return {"blocked": blocked, "durable": time.perf_counter() - began}

    def load(self, folder: Path) -> Times:
        began = time.perf_counter()
        path, _ = self.engine.load_checkpoint(str(folder))
        assert path is not None
        return {"load": time.perf_counter() - began}


class Torch:
    """torch.distributed.checkpoint of a DDP model and its AdamW: what a user of plain torch has."""

    def __init__(self, numel: int) -> None:
        model = make_model(numel)
        self.model = nn.parallel.DistributedDataParallel(model) if dist.get_world_size() > 1 else model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True)
        train(self.model, lambda loss: (loss.backward(), self.optimizer.step()))
        self.group = dist.new_group(backend="gloo")

    def _states(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, folder: Path) -> Times:
        import torch.distributed.checkpoint as dcp

        began = time.perf_counter()
        dcp.save(self._states(), checkpoint_id=folder)
        blocked = time.perf_counter() - began
        synced(folder)
        return {"blocked": blocked, "durable": time.perf_counter() - began}

    def async_(self, folder: Path) -> Times:
        import torch.distributed.checkpoint as dcp

        began = time.perf_counter()
        future: Any = dcp.async_save(self._states(), checkpoint_id=folder, process_group=self.group)
        blocked = time.perf_counter() - began
        future.result()
        synced(folder)
        return {"blocked": blocked, "durable": time.perf_counter() - began}

    def load(self, folder: Path) -> Times:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        began = time.perf_counter()
        states = self._states()
        dcp.load(states, checkpoint_id=folder)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
        )
        return {"load": time.perf_counter() - began}


# -- processes ------------------------------------------------------------------------------------------------------


class Apart:
    """A contender's processes, which answer ``job folder`` with the times of the slowest, a line each."""

    def __init__(self, name: str, python: str, args: argparse.Namespace) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        env["WORLD_SIZE"] = env["LOCAL_WORLD_SIZE"] = str(args.world_size)
        if name == "deepspeed":
            env["PYTHONPATH"] = args.deepspeed_path
            env["DS_ACCELERATOR"] = "cpu"
            env["PATH"] = os.pathsep.join([str(Path(python).parent), env["PATH"]])
        command = [python, __file__, "--worker", name, "--numel", str(args.numel)]
        self.ranks = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(args.world_size)
        ]
        for rank in self.ranks:
            next(line for line in self._lines(rank) if line.startswith("ready"))

    def _lines(self, rank: Any) -> Iterator[str]:
        while line := rank.stdout.readline():
            yield line
        raise RuntimeError("a process of a contender ended")

    def run(self, job: str, folder: Path) -> Times:
        for rank in self.ranks:
            rank.stdin.write(f"{job} {folder}\n")
            rank.stdin.flush()
        answers = [next(ln for ln in self._lines(rank) if ln.startswith("times")) for rank in self.ranks]
        times = [json.loads(answer.removeprefix("times")) for answer in answers]
        return {key: max(t[key] for t in times) for key in times[0]}

    def close(self) -> None:
        for rank in self.ranks:
            rank.stdin.close()
        for rank in self.ranks:
            rank.wait(60)


def work(name: str, numel: int) -> None:
    """One process of a contender."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if name == "deepspeed":
        import deepspeed

        deepspeed.init_distributed("gloo")
    contender: Any = Torch(numel) if name == "torch" else Engines(name, numel)
    print("ready", flush=True)
    for line in sys.stdin:
        job, folder = line.split()
        dist.barrier()
        times = getattr(contender, "async_" if job == "async" else job)(Path(folder))
        dist.barrier()
        print("times", json.dumps(times), flush=True)
    os._exit(0)


def measure(args: argparse.Namespace) -> dict[tuple[str, str], dict[str, list[float]]]:
    """Let all take turns."""
    pythons = {"ds_hf": sys.executable, "torch": sys.executable, "deepspeed": args.deepspeed}
    contenders = {name: Apart(name, python, args) for name, python in pythons.items() if python}
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as root:
        for number in range(args.rounds + 1):  # the first warms up: libraries, host memory
            for name, contender in contenders.items():
                for job in JOBS[name]:
                    folder = Path(root) / name / ("save" if job == "load" else job)
                    if job != "load":
                        shutil.rmtree(folder, ignore_errors=True)
                        subprocess.run(["sync"], check=False)
                    for key, value in contender.run(job, folder).items():
                        if number:
                            found.setdefault((name, job), {}).setdefault(key, []).append(value)
                    nbytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
                    found.setdefault((name, job), {})["bytes"] = [nbytes]
    for contender in contenders.values():
        contender.close()
    return found


def records(found: dict[tuple[str, str], dict[str, list[float]]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """A line for each contender and job, with ratios to the others' best at the same thing."""
    middle = {
        (name, job, key): statistics.median(values)
        for (name, job), times in found.items()
        for key, values in times.items()
    }

    def ratio(name: str, job: str, key: str, other: str, other_job: str) -> float | None:
        own, others = middle.get((name, job, key)), middle.get((other, other_job, key))
        return None if own is None or others is None else round(own / others, 3)

    rows = []
    for (name, job), times in found.items():
        nbytes = times["bytes"][0]
        row: dict[str, Any] = {"name": name, "job": job, "world_size": args.world_size, "bytes": int(nbytes)}
        for key in ("blocked", "durable", "load"):
            if key in times:
                row[key] = round(middle[name, job, key], 4)
                row[f"{key}_spread"] = round((max(times[key]) - min(times[key])) / middle[name, job, key], 3)
        seconds = row.get("durable", row.get("load", 1.0))
        row["gbs"] = round(nbytes / seconds / 1e9, 3)
        key = "load" if job == "load" else "blocked"
        row["ratio_to_torch"] = ratio(name, job, key, "torch", "load" if job == "load" else "save")
        row["ratio_to_torch_async"] = None if job == "load" else ratio(name, job, key, "torch", "async")
        row["ratio_to_deepspeed"] = ratio(name, job, key, "deepspeed", "load" if job == "load" else "save")
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=24_000_000, help="parameters; 12 bytes of states each")
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None, help="where to write; default: the temporary folder")
    parser.add_argument("--deepspeed", metavar="PYTHON", default="", help="interpreter that has DeepSpeed")
    parser.add_argument("--deepspeed-path", default="", help="PYTHONPATH of that interpreter")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", choices=tuple(JOBS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args.numel)
        return
    rows = records(measure(args), args)
    print(f"torch {torch.__version__}, {args.numel} parameters, {args.world_size} processes, median of {args.rounds}")
    head = f"{'':<10} {'job':<6} {'MB':>7} {'blocked s':>10} {'durable s':>10} {'load s':>8} {'GB/s':>6}"
    print(head + "  x torch, its async, DeepSpeed")
    for row in rows:
        cells = [f"{row[key]:.3f}" if key in row else "-" for key in ("blocked", "durable", "load")]
        ratios = [row[f"ratio_to_{key}"] for key in ("torch", "torch_async", "deepspeed")]
        print(
            f"{row['name']:<10} {row['job']:<6} {row['bytes'] / 1e6:>7.1f} {cells[0]:>10} {cells[1]:>10} {cells[2]:>8} "
            f"{row['gbs']:>6.2f}  {', '.join('-' if r is None else f'{r:.2f}' for r in ratios)}"
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
