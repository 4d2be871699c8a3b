"""Training with offloaded states: ds_hf's ways against DeepSpeed, FSDP2, torchao and no offload, in one run.

    python benchmarks/offload.py --model 2b7 --stage 2 --micro-batch 4 --seq 2048 --checkpointing \\
        --engines ds_hf,ds_hf+stream=0.3,ds_hf+auto,ds_hf+none,deepspeed,fsdp2,torchao,floor \\
        --deepspeed-path /folder/with/deepspeed --nvme /fast/disk --json FILE

Engines take turns as in ``benchmarks/training.py``, whose models, data, timing and columns these are; several GPUs with
``torchrun --nproc-per-node N``. What stands behind a plus is how ds_hf offloads:

    ds_hf                 optimizer states in host memory, updated there
    ds_hf+stream=SHARE    that share of them is updated by the GPU; auto: as ds_hf decides where it is not said
    ds_hf+ratio=SHARE     that share is in host memory, the rest on the GPU
    ds_hf+auto            what fits moves to the GPU
    ds_hf+delayed         updates are one step late
    ds_hf+param           parameters in host memory too (stage 3)
    ds_hf+nvme            states and parameters on NVMe (stage 3, --nvme); ds_hf+states-nvme: the states alone
    ds_hf+none            no offload
    deepspeed, deepspeed+nvme, deepspeed+none; fsdp2 (CPUOffloadPolicy); torchao (CPUOffloadOptimizer); floor

``--narrow`` keeps masters and moments in bf16 (ds_hf and DeepSpeed), for models whose fp32 states exceed the host.
The largest ones on one H100 with 128 GB of host memory and 64 GB of disk, and what ``ds-hf memory`` says of them:

    --model 13b --narrow --checkpointing --engines ds_hf            104 GB of host memory, 34 GB of the GPU
    --model 9b --narrow --checkpointing --stage 3 --nvme DIR --engines ds_hf+states-nvme    54 GB of disk, 25 GB of GPU
    --model 6b7 --narrow --checkpointing --stage 3 --nvme DIR --engines ds_hf+nvme          54 GB of disk, 7 GB of GPU
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import training
from torch import Tensor, nn

from ds_hf.host import rank_cores

training.MODELS["9b"] = (4608, 12288, 34, 36, 36, 32000)  # --narrow: 54 GB of states
training.MODELS["13b"] = (5120, 13824, 40, 40, 40, 32000)


def config_of(args: argparse.Namespace, way: str) -> dict[str, Any]:
    """The JSON file, for ds_hf and DeepSpeed."""
    pin = args.device != "cpu"
    cpu: dict[str, Any] = {"device": "cpu", "pin_memory": pin}
    nvme: dict[str, Any] = {"device": "nvme", "nvme_path": args.nvme, "pin_memory": pin}
    name, _, value = way.partition("=")
    zero: dict[str, Any] = {"stage": args.stage}
    own: dict[str, Any] = {}
    if name == "nvme":
        zero |= {"offload_optimizer": nvme, "offload_param": {**nvme, "max_in_cpu": 0}}
    elif name == "states-nvme":
        zero["offload_optimizer"] = nvme
    elif name != "none":
        zero["offload_optimizer"] = cpu
        own = {"stream": 0.0} | {"auto": {"ratio": "auto"}, "delayed": {"delayed": True}}.get(name, {})
        if name == "stream":
            own["stream"] = value if value == "auto" else float(value or 0)
        if name == "ratio":
            zero["offload_optimizer"]["ratio"] = float(value)
        if name == "param":
            zero["offload_param"] = dict(cpu)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_accumulation_steps": args.accumulation,
        "gradient_clipping": args.clip,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": training.adam_parameters()},
        "steps_per_print": 10**9,
    }
    if args.narrow:
        config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    if "nvme" in name:
        config["aio"] = {"block_size": 1 << 20, "queue_depth": 32, "intra_op_parallelism": 2}
    if own:
        config["ds_hf"] = {"offload": own}
    return config


class DsHf(training.Contender):
    """This project's engine."""

    def __init__(self, args: argparse.Namespace, way: str) -> None:
        super().__init__(args)
        import ds_hf

        model = training.make_model(args, torch.float32)
        self.engine, *_ = ds_hf.initialize(
            model=model, model_parameters=training.parameter_groups(model), config=config_of(args, way)
        )

    def step(self, batches: list[Tensor]) -> Tensor:
        return training.deepspeed_step(self.engine, batches)

    def finish(self) -> None:
        self.engine._finish_update()

    def free(self) -> None:
        self.engine.destroy()
        super().free()


class DeepSpeed(training.Contender):
    """The real one."""

    def __init__(self, args: argparse.Namespace, way: str) -> None:
        super().__init__(args)
        import deepspeed

        if "+ds.hf" in deepspeed.__version__:
            raise RuntimeError("the name deepspeed is served by ds_hf: give --deepspeed-path")
        model, config = training.make_model(args, torch.float32), config_of(args, way)
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = None
        if args.device == "cpu":  # no compiler run for a trial of the script
            del config["optimizer"]
            config["zero_force_ds_cpu_optimizer"] = False
            optimizer = torch.optim.AdamW(parameters, **training.adam_parameters())
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, model_parameters=None if optimizer else parameters, config=config
        )

    def step(self, batches: list[Tensor]) -> Tensor:
        return training.deepspeed_step(self.engine, batches)

    def free(self) -> None:
        self.engine.destroy()
        super().free()


class TorchAo(training.Contender):
    """torchao's optimizer with states and update on the CPU, over a bf16 model with fp32 masters of its own making."""

    def __init__(self, args: argparse.Namespace, way: str) -> None:
        super().__init__(args)
        from torchao.optim import CPUOffloadOptimizer

        if dist.get_world_size() > 1:
            raise RuntimeError("torchao's offload optimizer is for one process here")
        self.model: nn.Module = training.make_model(args, torch.float32)
        self.autocast = torch.autocast(torch.device(args.device).type, dtype=torch.bfloat16)
        self.optimizer = CPUOffloadOptimizer(
            self.model.parameters(), torch.optim.AdamW, fused=True, **training.adam_parameters()
        )

    def step(self, batches: list[Tensor]) -> Tensor:
        losses = []
        for ids in batches:
            with self.autocast:
                loss = self.model(input_ids=ids, labels=ids).loss
            (loss / len(batches)).backward()
            losses.append(loss.detach())
        self.optimizer.step()  # gradients are on the host already: it cannot clip them
        self.optimizer.zero_grad()
        return torch.stack(losses).mean()


def make(name: str) -> Any:
    """The constructor of one engine."""
    engine, _, way = name.partition("+")
    own = {"ds_hf": DsHf, "deepspeed": DeepSpeed, "torchao": TorchAo}
    if engine in own:
        return lambda args: own[engine](args, way)
    return training.ENGINES[engine]


def forget_host_peak() -> None:
    """Let the kernel count this process's largest resident memory anew."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def host_peak_gib() -> float:
    """Largest resident memory of this process, page-locked memory included, since it was forgotten."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return round(int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 2**20, 3)


def cpu_threads(engine: Any) -> int:
    """Threads of the update on the CPU."""
    optimizer = getattr(getattr(engine, "engine", None), "optimizer", None)
    worker = getattr(getattr(optimizer, "store", None), "worker", None)
    return int(getattr(worker, "threads", torch.get_num_threads()))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=training.MODELS, default="2b7")
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=2)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--clip", type=float, default=training.CLIP)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--narrow", action="store_true")
    parser.add_argument("--nvme", default="", help="folder on the NVMe disk")
    parser.add_argument("--engines", default="ds_hf,ds_hf+stream=0.3,ds_hf+auto,ds_hf+none,fsdp2,floor")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=4, help="at least 3: ds_hf+auto moves states after the second")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=0, help="of the CPU, default all cores; ds_hf takes 3/4 of them")
    parser.add_argument("--deepspeed-path", default="")
    parser.add_argument("--json", type=training.Path)
    args = parser.parse_args()
    args.compile, args.offload, args.buckets = False, "cpu", "default"
    known = {"ds_hf", "deepspeed", "torchao", *training.ENGINES}
    for name in args.engines.split(","):
        if name.partition("+")[0] not in known:
            parser.error(f"no engine {name}; there are {', '.join(sorted(known))}")
        if "nvme" in name and not args.nvme:
            parser.error(f"{name} needs --nvme")
    training.ENGINES.update({name: make(name) for name in args.engines.split(",")})
    return args


def turn(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """As training's, with the memory of the host and the threads of the update."""
    torch.set_num_threads(args.threads or len(rank_cores()))  # OMP_NUM_THREADS=1 must not decide the comparison
    forget_host_peak()
    before, threads = host_peak_gib(), []
    make_engine = training.ENGINES[name]

    def made(args: argparse.Namespace) -> Any:
        engine = make_engine(args)
        threads.append(cpu_threads(engine))
        return engine

    training.ENGINES[name] = made  # type: ignore[assignment]
    try:
        found = _turn(name, args)
    finally:
        training.ENGINES[name] = make_engine
    found["more"] = {"host_peak_gib": host_peak_gib(), "host_before_gib": before, "cpu_threads": threads[0]}
    if dist.get_rank() == 0:
        print(f"{name}: {min(found['times']) * 1e3:.0f} ms, {found['more']}", file=sys.stderr)
    return found


def show(records: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """The table, with each step's time over that of DeepSpeed, of ds_hf without offload, and of the floor."""
    others = ("deepspeed", "ds_hf+none", "floor")
    base = {
        name: next((r["step_ms"] for r in records if r["name"] == name and "step_ms" in r), None) for name in others
    }
    titles = ("step ms", "tokens/s", "GPU GiB", "host GiB", "threads", "x deeps.", "x none", "x floor", "first", "last")
    print(f"{'':<20}" + "".join(f"{title:>10}" for title in titles))
    for row in records:
        if "step_ms" not in row:
            print(f"{row['name']:<20}failed: {row['error']}")
            continue
        ratios = ["-" if base[name] is None else f"{row['step_ms'] / base[name]:.2f}" for name in others]
        cells = (
            f"{row['step_ms']:.1f}",
            f"{row['tokens_per_s']:.0f}",
            f"{row['peak_gib']:.2f}",
            f"{row['host_peak_gib']:.2f}",
            str(row["cpu_threads"]),
            *ratios,
            f"{row['losses'][0]:.4f}",
            f"{row['losses'][-1]:.4f}",
        )
        print(f"{row['name']:<20}" + "".join(f"{cell:>10}" for cell in cells))


_turn = training.turn
training.turn, training.show = turn, show
training.parse = parse

if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    logging.getLogger("ds_hf").setLevel(logging.INFO)  # what was found out about disk, memory and threads
    training.main()
