"""What the engine costs the host: Python, launches and stream calls, in microseconds a parameterised module and pass.

    python benchmarks/host_cost.py --model 0b37 --micro-batch 1 --seq 512 --stages 1,2,3 --json FILE

One process trains as one of two ranks whose process group does nothing, so that no rank is waited for and all
that is left is this host's work. With a batch so small that the device waits for the host, a step's time over that of
forward and backward alone (*floor*, of the bf16 model) is the engine's. Both take turns, ``--rounds`` times; the
shortest round counts, for other programs only ever add. Gathers are copies on the device, as between GPUs of one host;
``--nccl`` leaves them to the process group. Half of the weights never arrive, so the losses mean nothing. ``--alone``
also measures with every block for itself (``ds_hf.join_blocks``).

On a CPU ``--model t24 --seq 8`` with one thread is so small that next to all of it is Python.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import training
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_hf.engine import parts
from ds_hf.engine.comm.peers import Peers

training.MODELS["t24"] = (64, 172, 24, 4, 4, 512)
STEPS = 5  # timed together
WARM_UP = 5


def own_memory(numel: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Both ranks' memory, here."""
    return [torch.zeros(numel, dtype=dtype, device=device) for _ in range(2)]


def milliseconds(step: Callable[[], None], device: str) -> float:
    """Of one step, on average over ``STEPS``."""
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(STEPS):
        step()
    synchronize(device)
    return (time.perf_counter() - begin) / STEPS * 1e3


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def measure(args: argparse.Namespace, stage: int, *, joined: bool) -> dict[str, Any]:
    """One row."""
    import ds_hf

    settings = SimpleNamespace(**{**vars(args), "stage": stage})
    ids = torch.randint(0, 500, (args.micro_batch, args.seq), device=args.device)
    plain: Any = training.make_model(settings, torch.bfloat16)
    config = training.engine_config(settings)  # type: ignore[arg-type]
    config["optimizer"] = {"type": "AdamW", "params": training.adam_parameters()}
    config["ds_hf"] = {**config.get("ds_hf", {}), "join_blocks": joined}
    model = training.make_model(settings, torch.float32)
    modules = sum(any(True for _ in module.parameters(recurse=False)) for module in model.modules())
    engine, *_ = ds_hf.initialize(model=model, config=config)

    def floor() -> None:
        plain(input_ids=ids, labels=ids).loss.backward()
        plain.zero_grad(set_to_none=True)

    def step() -> None:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()

    for _ in range(WARM_UP):
        floor()
        step()
    rounds = [(milliseconds(floor, args.device), milliseconds(step, args.device)) for _ in range(args.rounds)]
    engine.destroy()
    least, ours = (min(column) for column in zip(*rounds, strict=True))
    return {
        "stage": stage,
        "joined": joined,
        "floor_ms": round(least, 2),
        "engine_ms": round(ours, 2),
        "modules": modules,
        "us_per_module_and_pass": round((ours - least) * 1e3 / 2 / modules, 1),
        "rounds_ms": [[round(value, 2) for value in row] for row in rounds],
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=training.MODELS, default="0b37")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--stages", default="1,2,3")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--alone", action="store_true", help="also with every block for itself")
    parser.add_argument("--nccl", action="store_true", help="gathers by the process group")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.checkpointing = args.compile = False
    args.accumulation, args.clip, args.offload = 1, training.CLIP, "none"
    args.device = "cuda:0" if torch.cuda.is_available() else "cpu"
    return args


def main() -> None:
    args = parse()
    if args.device == "cpu":
        print("no GPU: this tries the script; on a CPU the computation is most of a step", file=sys.stderr)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    if not args.nccl:
        parts.open_peers = lambda axis, device, comm_stream: Peers(
            axis, comm_stream, lambda numel, dtype: own_memory(numel, dtype, args.device), lambda channel: None
        )
    ways = (True, False) if args.alone else (True,)
    rows = [measure(args, int(stage), joined=joined) for stage in args.stages.split(",") for joined in ways]
    print(f"{'stage':>5} {'blocks':>7} {'floor ms':>9} {'engine ms':>10} {'x floor':>8} {'us a module and pass':>21}")
    for row in rows:
        ratio = row["engine_ms"] / row["floor_ms"]
        blocks = "joined" if row["joined"] else "alone"
        print(
            f"{row['stage']:>5} {blocks:>7} {row['floor_ms']:>9.1f} {row['engine_ms']:>10.1f} {ratio:>8.2f} "
            f"{row['us_per_module_and_pass']:>21.1f}"
        )
    if args.json:
        where = torch.cuda.get_device_name() if args.device != "cpu" else "CPU"
        about = {"device": where, "torch": torch.__version__, "arguments": sys.argv[1:]}
        args.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
