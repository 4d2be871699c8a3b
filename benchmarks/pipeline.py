"""Pipelines: idle share of each stage, peers, lengths that change, and what a micro-batch costs the host.

    OMP_NUM_THREADS=1 python benchmarks/pipeline.py --stages 2 --micro-batches 4,8,16 --rounds 5 --json FILE

One process for each stage, by gloo. In each round the ways take turns, so ratios are of times of the same minutes;
medians count. Ways: ``ds_hf`` (1F1B), ``chunks`` (ds_hf with two chunks a stage), ``dualpipev`` (two chunks, folded),
``torch`` (Schedule1F1B of torch.distributed.pipelining over the same layers, with the optimizer of torch), and
``deepspeed``, if ``--deepspeed FOLDER`` names where ``pip install --target`` has put it.

With ``--device cuda`` all is in bf16 over NCCL; torch then has bf16 parameters, which is less work for its optimizer.
*idle* is there what is left of a batch's time without forward and backward of the stage's layers by themselves, so the
optimizer's step counts as idle, and the other measurements below are left out.

``--data D --tensor T`` has D pipelines side by side whose layers T processes share, S x D x T processes in all; others
than ds_hf have D x T pipelines, with the same samples for all together.

- *idle*: which part of a batch the stage spent in neither forward nor backward, against the *bubble* of the schedule:
  of 1F1B ``(S - 1) / (M + S - 1)``, of DualPipeV (M at least 2 S) ``(2 S - 2.5) / (3 M + 2 S - 2.5)``.
- *idle, asleep*: the same, of layers that sleep for 20 ms in forward and 40 in backward. They need no core, so what
  else runs on the machine matters little, and any number of stages will do.
- *changing*: seconds a token where each batch has another length, against batches padded to the longest; and processor
  time a token.
- *overhead*: milliseconds of processor time of the main thread for a micro-batch of layers that compute next to
  nothing, without what forward, loss and backward of these layers take by themselves. It does not depend on load;
  *wall* is all of the batch, as it was.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

SEED = 7
ASLEEP = 0.02  # seconds of a forward


class Block(nn.Module):
    """A residual MLP, about ``12 width^2`` multiplications a token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 6 * width), nn.Linear(6 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))


class _Asleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        time.sleep(ASLEEP)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        time.sleep(2 * ASLEEP)
        return grads[0]


class Asleep(nn.Module):
    """Takes time and no processor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden: Tensor) -> Tensor:
        return _Asleep.apply(hidden * self.weight)  # type: ignore[no-any-return,no-untyped-call]


class Scale(nn.Module):
    """Takes next to nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.weight


PARTITION = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*up\.weight$"], "partition_type": "column"},
        {"patterns": [r".*down\.weight$"], "partition_type": "row"},
    ],
}


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels).square().mean()


def items_of(args: argparse.Namespace, micro_batches: int, length: int, width: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator(args.device).manual_seed(SEED)
    batch = args.batch if args.way != "deepspeed" else args.batch // args.tensor
    size = (batch, length, width)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    values = torch.randn((micro_batches, 2, *size), generator=generator, device=args.device, dtype=dtype)
    return [(inputs, labels) for inputs, labels in values]


# -- ways ---------------------------------------------------------------------------------------------------------


def engine_way(
    args: argparse.Namespace, micro_batches: int, width: int, kind: type[nn.Module], *, chunks: int = 1
) -> tuple[Callable[..., Any], Any]:
    """``run(items)`` of ds_hf, or of DeepSpeed where that is what ``deepspeed`` imports."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    if args.way == "deepspeed":
        deepspeed.init_distributed(dist.get_backend())  # it asks for that; the group of torch stays
    layers = [LayerSpec(kind, width) for _ in range(count_of(args, kind, chunks))]
    where: dict[str, Any] = {"num_stages": args.stages}
    if args.tensor > 1 and args.way != "deepspeed":
        from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

        where = {"topology": PipeModelDataParallelTopology(num_pp=args.stages, num_mp=args.tensor, num_dp=args.data)}
    if args.way == "dualpipev":
        where["folded"] = True
    if chunks > 1:
        where["chunks"] = chunks
    module = PipelineModule(layers, **where, loss_fn=loss_of, partition_method="uniform")
    replicas = args.data * (1 if args.way != "deepspeed" else args.tensor)
    config: dict[str, Any] = {
        "train_batch_size": args.batch * micro_batches * args.data,
        "train_micro_batch_size_per_gpu": args.batch * args.data // replicas,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": args.device == "cpu"}},
        "bf16": {"enabled": args.device == "cuda"},
        "zero_optimization": {"stage": 0},
    }
    if args.way != "deepspeed":
        config["ds_hf"] = {"pipeline": {"chunks": chunks, "check_batches": False}}
        if args.tensor > 1:
            config["tensor_parallel"] = {"autotp_size": args.tensor, "partition_config": PARTITION}
    engine, *_ = deepspeed.initialize(model=module, config=config)

    def run(items: list[Any]) -> None:
        if args.way == "deepspeed":
            engine.reset_activation_shape()
        engine.train_batch(iter(items))

    return run, engine


def chunks_of(way: str) -> int:
    """Parts of the model that a stage has."""
    return 2 if way in ("chunks", "dualpipev") else 1


def count_of(args: argparse.Namespace, kind: type[nn.Module], chunks: int) -> int:
    """Layers in all."""
    return int(args.layers) if kind is Block else int(args.stages) * chunks


def layers_of(args: argparse.Namespace, count: int, width: int, kind: type[nn.Module]) -> nn.Module:
    with torch.device(args.device):
        layers = nn.Sequential(*(kind(width) for _ in range(count)))
    return layers.to(args.device, torch.bfloat16 if args.device == "cuda" else torch.float32)


def torch_way(
    args: argparse.Namespace, micro_batches: int, width: int, kind: type[nn.Module]
) -> tuple[Callable[..., Any], Any]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, each = dist.get_rank(), count_of(args, kind, 1) // args.stages
    module = layers_of(args, each, width, kind)
    stage = PipelineStage(module, rank, args.stages, torch.device(args.device))
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=args.device == "cuda")

    def run(items: list[Any]) -> None:
        inputs, labels = (torch.cat([item[place] for item in items]) for place in (0, 1))
        given = (inputs,) if rank == 0 else ()
        losses: list[Tensor] = []
        schedule.step(*given, **({"target": labels, "losses": losses} if rank == args.stages - 1 else {}))
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack(losses).mean().detach().float() if losses else torch.zeros((), device=args.device)
        dist.broadcast(loss, args.stages - 1)  # train_batch gives it to all stages, too

    return run, None


def make(
    args: argparse.Namespace, micro_batches: int, width: int, kind: type[nn.Module] = Block
) -> tuple[Callable[..., Any], Any]:
    torch.manual_seed(SEED)
    with torch.device(args.device):  # of many GPUs' processes each has one core: values are drawn on the device
        if args.way == "torch":
            return torch_way(args, micro_batches, width, kind)
        return engine_way(args, micro_batches, width, kind, chunks=chunks_of(args.way))


def end(engine: Any) -> None:
    if hasattr(engine, "destroy"):
        engine.destroy()


def timed(args: argparse.Namespace, run: Callable[..., Any], items: list[Any]) -> float:
    dist.barrier()
    wait(args)
    begun = time.perf_counter()
    run(items)
    wait(args)
    dist.barrier()
    return time.perf_counter() - begun


def wait(args: argparse.Namespace) -> None:
    if args.device == "cuda":
        torch.cuda.synchronize()


def alone(args: argparse.Namespace, items: list[Any]) -> float:
    """Seconds of forward and backward of one stage's layers over all micro-batches, without sending anything."""
    layers = layers_of(args, args.layers // args.stages, args.width, Block)

    def run(items: list[Any]) -> None:
        for inputs, labels in items:
            loss_of(layers(inputs.requires_grad_()), labels).backward()  # type: ignore[no-untyped-call]

    run(items)
    seconds = torch.tensor(statistics.median(timed(args, run, items) for _ in range(args.repeats)), device=args.device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


# -- one process ----------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """What one way takes, once."""
    found: dict[str, Any] = {}
    for micro_batches in args.counts:
        run, engine = make(args, micro_batches, args.width)
        items = items_of(args, micro_batches, args.length, args.width)
        run(items)
        times, idle = [], []
        for _ in range(args.repeats):
            times.append(timed(args, run, items))
            if args.device == "cpu" and hasattr(engine, "executor"):
                idle.append(engine.executor.idle_share)
        found[f"M={micro_batches}"] = {
            "seconds": statistics.median(times),
            "idle": statistics.median(idle) if idle else None,
        }
        end(engine)
        del run, engine
        if args.world > args.stages:
            continue
        if args.device == "cpu":
            found[f"M={micro_batches}"]["asleep"] = asleep(args, micro_batches)
        else:
            seconds = statistics.median(times)
            found[f"M={micro_batches}"]["idle"] = max(0.0, 1 - alone(args, items) / seconds)
    if args.device == "cuda" or args.world > args.stages:
        return found
    if args.way != "torch":  # whose lengths cannot change
        found["changing"] = changing(args)
    found["overhead"] = overhead(args)
    return found


def asleep(args: argparse.Namespace, micro_batches: int) -> float:
    """Idle share of a stage whose layers sleep."""
    run, engine = make(args, micro_batches, 8, Asleep)
    items = items_of(args, micro_batches, 4, 8)
    run(items)
    seconds = min(timed(args, run, items) for _ in range(2))
    end(engine)
    return 1 - 3 * ASLEEP * micro_batches * chunks_of(args.way) / seconds


def overhead(args: argparse.Namespace, micro_batches: int = 16) -> dict[str, float]:
    """Milliseconds a micro-batch."""
    run, engine = make(args, micro_batches, 8, Scale)
    items = items_of(args, micro_batches, 4, 8)
    run(items)
    walls, threads = [], []
    for _ in range(20):
        dist.barrier()
        before, begun = time.thread_time(), time.perf_counter()
        run(items)
        threads.append(time.thread_time() - before)
        walls.append(time.perf_counter() - begun)
    end(engine)
    layer, bare = nn.Sequential(*(Scale(8) for _ in range(chunks_of(args.way)))), []
    for _ in range(20):
        before = time.thread_time()
        for inputs, labels in items:
            loss_of(layer(inputs), labels).backward()  # type: ignore[no-untyped-call]
        bare.append(time.thread_time() - before)
    each = 1e3 / micro_batches
    own = statistics.median(threads) - statistics.median(bare)
    return {"ms": own * each, "wall ms": statistics.median(walls) * each}


def changing(args: argparse.Namespace) -> dict[str, float]:
    run, engine = make(args, 8, args.width)
    lengths = [args.length * part // 8 for part in (4, 8, 5, 7, 6, 8, 4, 6)]
    batches = [items_of(args, 8, length, args.width) for length in lengths]
    padded = [items_of(args, 8, max(lengths), args.width) for _ in lengths]
    run(batches[0])
    found = {}
    tokens = args.batch * 8 * sum(lengths)
    for name, each, count in (("own", batches, tokens), ("padded", padded, args.batch * 8 * max(lengths) * 8)):
        before = time.process_time()
        found[name] = sum(timed(args, run, items) for items in each) / count
        found[f"{name}, processor"] = (time.process_time() - before) / count
    end(engine)
    return found


def worker(args: argparse.Namespace) -> None:
    faulthandler.dump_traceback_later(args.timeout * 0.9, exit=True)  # where it stands, if it comes to no end
    torch.set_num_threads(1)
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    found = measure(args)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    if dist.get_rank() == 0:
        Path(args.out).write_text(json.dumps(every))
    dist.barrier()
    os._exit(0)


# -- the parent -----------------------------------------------------------------------------------------------------


def run_way(args: argparse.Namespace, way: str) -> list[dict[str, Any]]:
    """What each stage found."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    root = Path(__file__).resolve().parents[1]
    path = [str(root), args.deepspeed if way == "deepspeed" else str(root / "ds_hf" / "compat")]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(args.world)}
    environment |= {"PYTHONPATH": os.pathsep.join(path[::-1]), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": args.device}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, __file__, *sys.argv[1:], "--way", way, "--out", str(out)]
        stages = [
            subprocess.Popen(
                command,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(args.world)
        ]
        try:
            errors = [stage.communicate(timeout=args.timeout)[1] for stage in stages]
        finally:
            for stage in stages:
                stage.kill()
        if not out.exists():
            raise RuntimeError(f"{way} failed:\n" + "\n".join(error[-1500:] for error in errors))
        found: list[dict[str, Any]] = json.loads(out.read_text())
        return found


def summarise(args: argparse.Namespace, rounds: dict[str, list[list[dict[str, Any]]]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for way, found in rounds.items():
        row: dict[str, Any] = {}
        for count in args.counts:
            key, idle = f"M={count}", 3 * (args.stages - 1) / chunks_of(way)
            idle = 2 * args.stages - 2.5 if way == "dualpipev" else idle
            bubble = idle / (3 * count + idle)
            row[key] = {"ms": round(statistics.median(each[0][key]["seconds"] for each in found) * 1e3, 1)}
            row[key]["bubble"] = round(bubble, 3)
            if "asleep" in found[0][0][key]:
                row[key]["idle, asleep"] = round(statistics.median(each[0][key]["asleep"] for each in found), 3)
            if way != "ds_hf" and "ds_hf" in rounds:
                pairs = zip(rounds["ds_hf"], found, strict=False)  # of this round too, once both are there
                ratio = [own[0][key]["seconds"] / other[0][key]["seconds"] for own, other in pairs]
                row[key]["ds_hf / this"] = round(statistics.median(ratio), 3)
            if found[0][0][key]["idle"] is not None:
                idle = [statistics.median(each[stage][key]["idle"] for each in found) for stage in range(args.stages)]
                row[key]["idle"] = [round(share, 3) for share in idle]
        for name in ("ms", "wall ms") if "overhead" in found[0][0] else ():
            worst = [max(stage["overhead"][name] for stage in each) for each in found]
            row[f"overhead {name}"] = round(statistics.median(worst), 3)
        if "changing" in found[0][0]:
            for name in ("", ", processor"):
                ratio = [each[0]["changing"][f"own{name}"] / each[0]["changing"][f"padded{name}"] for each in found]
                row[f"changing / padded, a token{name}"] = round(statistics.median(ratio), 3)
        table[way] = row
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--data", type=int, default=1)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--micro-batches", default="4,8,16")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5, help="batches timed in a round")
    parser.add_argument("--ways", default="ds_hf,chunks,torch")
    parser.add_argument("--deepspeed", help="folder into which DeepSpeed was installed with pip --target")
    parser.add_argument("--timeout", type=float, default=600)
    parser.add_argument("--json", help="where to write the table")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.world = args.stages * args.data * args.tensor
    args.counts = [int(count) for count in args.micro_batches.split(",")]
    if args.way:
        worker(args)
        return
    ways = args.ways.split(",") + (["deepspeed"] if args.deepspeed else [])
    rounds: dict[str, list[Any]] = {way: [] for way in ways}
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    if args.device == "cuda":
        machine = f"{args.world} x {torch.cuda.get_device_name()}, torch {torch.__version__}"
    for _ in range(args.rounds):
        for way in ways:
            begun = time.perf_counter()
            try:
                rounds[way].append(run_way(args, way))
            except (RuntimeError, subprocess.TimeoutExpired) as error:  # the others' figures are worth keeping
                print(f"{way}: {error}", file=sys.stderr)
            done = {name: found for name, found in rounds.items() if found}
            table = {"machine": machine, **(summarise(args, done) if done else {})}
            print(f"{way} took {time.perf_counter() - begun:.0f} s", file=sys.stderr)
            if args.json:
                Path(args.json).write_text(json.dumps(table, indent=2) + "\n")
    print(json.dumps(table, indent=2))


if __name__ == "__main__":
    main()
