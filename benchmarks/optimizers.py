"""How fast the optimizer kernels are: the whole job, from the 16-bit gradient to the 16-bit parameter.

    python benchmarks/optimizers.py --device cuda --numel 500000000 --json optimizers.json
    python benchmarks/optimizers.py --device cpu --numel 64000000 --threads 2 --deepspeed /path/to/its/venv/bin/python

Contenders do the same job: ds_hf's kernels, torch's fused kernels with the casts they need, and DeepSpeed's optimizers
with theirs, in a process of another interpreter (``--deepspeed``), since ds_hf takes the name. All take turns within
one run, and the median over the rounds counts. Tensors of small jobs rotate, so that none of them stays in a cache.

Bytes are those that the job cannot avoid: 28 an element for Adam and LAMB (gradient 2, master and two moments read and
written, parameter 2), 20 for Lion, Adagrad and SGD with momentum, 2 for the norm. ``share_of_copy`` divides by what a
device copy of 14 bytes an element reaches in the same run; on the CPU by STREAM triad on the same threads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Job = Callable[[int], None]
LR, BETAS, EPS, DECAY = 1e-4, (0.9, 0.95), 1e-8, 0.1
BYTES = {
    "adamw": 28,
    "adamw+clip": 28,
    "lamb": 28,
    "lion": 20,
    "adagrad": 20,
    "sgd": 20,
    "norm": 2,
    "copy": 28,
    "triad": 12,
}
ROTATE = 512 * 2**20  # bytes that the rotating sets take together at least
# Llama's matrices at hidden size 2048: what LAMB's segments look like
SHAPES = (2048 * 2048, 2048 * 2048, 5504 * 2048, 5504 * 2048, 2048)


class Tensors:
    """Rotating sets of gradient, master, moments and 16-bit parameter, ``[numel]`` each."""

    def __init__(self, numel: int, device: str) -> None:
        self.numel, self.device = numel, device
        self.sets = max(1, min(64, -(-ROTATE // (28 * numel)))) if numel else 1
        generator = torch.Generator(device).manual_seed(0)
        like = {"device": device, "dtype": torch.float32}
        self.masters = [torch.randn(numel, generator=generator, **like).mul_(0.02) for _ in range(self.sets)]
        self.first = [torch.zeros(numel, **like) for _ in range(self.sets)]
        self.second = [torch.zeros(numel, **like) for _ in range(self.sets)]
        self.grads = [torch.randn(numel, generator=generator, **like).mul_(1e-3).bfloat16() for _ in range(self.sets)]
        self.params = [master.bfloat16() for master in self.masters]
        self.wide = torch.empty(numel, **like)  # the others' gradient in fp32, allocated once
        self.step = torch.ones((), **like)

    def at(self, index: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Gradient, master, first and second moment, parameter of the set whose turn it is."""
        i = index % self.sets
        return self.grads[i], self.masters[i], self.first[i], self.second[i], self.params[i]


def segments(numel: int) -> list[int]:
    """Sizes of the parameters that a flat tensor of ``numel`` elements is made of."""
    sizes: list[int] = []
    while (left := numel - sum(sizes)) > 0:
        sizes.append(min(left, SHAPES[len(sizes) % len(SHAPES)]))
    return sizes


# -- contenders ---------------------------------------------------------------------------------------------------


def ds_hf_jobs(t: Tensors) -> dict[str, Job]:
    """The kernels of ds_hf."""
    from ds_hf.engine.ops import library as ops

    adam = {"lr": LR, "beta1": BETAS[0], "beta2": BETAS[1], "eps": EPS, "weight_decay": DECAY}
    lamb = {"eps_inside_sqrt": False, "bias_correction": True, "min_coeff": 0.01, "max_coeff": 10.0}
    sizes = segments(t.numel)

    def scale_and_skip(grad: Tensor) -> Tensor:
        return ops.norm_control([grad], scale=1.0, max_norm=1.0, checked=False)[:2]

    def adamw(index: int, clip: bool = False) -> None:
        g, p, m, v, out = t.at(index)
        ops.adam_([p], [g], [m], [v], [out], [t.step], scale_and_skip(g) if clip else None, **adam)

    def lamb_(index: int) -> None:
        g, p, m, v, out = (tensor.split(sizes) for tensor in t.at(index))
        ops.lamb_(p, g, m, v, out, [t.step] * len(sizes), None, **adam, **lamb)

    def lion(index: int) -> None:
        g, p, m, _, out = t.at(index)
        ops.lion_([p], [g], [m], [out], None, lr=LR, beta1=BETAS[0], beta2=BETAS[1], weight_decay=DECAY)

    def adagrad(index: int) -> None:
        g, p, m, _, out = t.at(index)
        ops.adagrad_([p], [g], [m], [out], [t.step], None, lr=LR, lr_decay=0.0, eps=EPS, weight_decay=0.0)

    def sgd(index: int) -> None:
        g, p, m, _, out = t.at(index)
        ops.sgd_(
            [p],
            [g],
            [m],
            [out],
            None,
            lr=LR,
            momentum=0.9,
            dampening=0.0,
            weight_decay=0.0,
            nesterov=False,
            first=False,
        )

    def norm(index: int) -> None:
        ops.squared_norm([t.at(index)[0]])

    return {
        "adamw": adamw,
        "adamw+clip": lambda index: adamw(index, clip=True),
        "lamb": lamb_,
        "lion": lion,
        "adagrad": adagrad,
        "sgd": sgd,
        "norm": norm,
    }


def torch_jobs(t: Tensors) -> dict[str, Job]:
    """torch's fused kernels, with the casts from and to 16 bits around them."""
    beta1, beta2 = BETAS

    def adamw(index: int, clip: bool = False) -> None:
        g, p, m, v, out = t.at(index)
        wide = t.wide.copy_(g)
        if clip:
            norm = torch.linalg.vector_norm(wide)
            wide.mul_((1.0 / (norm + 1e-6)).clamp(max=1.0))
        torch._fused_adamw_(
            [p], [wide], [m], [v], [], [t.step], lr=LR, beta1=beta1, beta2=beta2, weight_decay=DECAY, eps=EPS,
            amsgrad=False, maximize=False,
        )  # fmt: skip
        out.copy_(p)

    def adagrad(index: int) -> None:
        g, p, m, _, out = t.at(index)
        torch._fused_adagrad_(
            [p], [t.wide.copy_(g)], [m], [t.step], lr=LR, lr_decay=0.0, weight_decay=0.0, eps=EPS, maximize=False
        )
        out.copy_(p)

    def sgd(index: int) -> None:
        g, p, m, _, out = t.at(index)
        torch._fused_sgd_(
            [p], [t.wide.copy_(g)], [m], weight_decay=0.0, momentum=0.9, lr=LR, dampening=0.0, nesterov=False,
            maximize=False, is_first_step=False,
        )  # fmt: skip
        out.copy_(p)

    def norm(index: int) -> None:
        torch.linalg.vector_norm(t.at(index)[0], dtype=torch.float32)

    return {
        "adamw": adamw,
        "adamw+clip": lambda index: adamw(index, clip=True),
        "adagrad": adagrad,
        "sgd": sgd,
        "norm": norm,
    }


def deepspeed_jobs(t: Tensors) -> dict[str, Job]:
    """DeepSpeed's own optimizers; each is built once for each rotating set."""
    jobs: dict[str, Job] = {}
    cuda = t.device != "cpu"

    def job(name: str, build: Callable[[list[Tensor]], Any], clip: bool = False, split: bool = False) -> None:
        optimizers = []
        for i in range(t.sets):
            pieces = t.masters[i].split(segments(t.numel)) if split else [t.masters[i]]
            optimizers.append(build([torch.nn.Parameter(piece) for piece in pieces]))

        def run(index: int) -> None:
            g, p, _, _, out = t.at(index)
            wide = t.wide.copy_(g)
            if clip:
                norm = torch.linalg.vector_norm(wide)
                wide.mul_((1.0 / (norm + 1e-6)).clamp(max=1.0))
            optimizer = optimizers[index % t.sets]
            params = optimizer.param_groups[0]["params"]
            for param, grad in zip(params, wide.split([q.numel() for q in params]), strict=True):
                param.grad = grad
            optimizer.step()
            out.copy_(p)

        try:
            run(0)
        except Exception as error:
            print(f"DeepSpeed's {name} does not run here: {error}".splitlines()[0], file=sys.stderr)
        else:
            jobs[name] = run

    if cuda:
        from deepspeed.ops.adam import FusedAdam
        from deepspeed.ops.lamb import FusedLamb
        from deepspeed.ops.lion import FusedLion

        job("adamw", lambda p: FusedAdam(p, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY))
        job("adamw+clip", lambda p: FusedAdam(p, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY), clip=True)
        job("lamb", lambda p: FusedLamb(p, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY), split=True)
        job("lion", lambda p: FusedLion(p, lr=LR, betas=BETAS, weight_decay=DECAY))
    else:
        from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        from deepspeed.ops.lion import DeepSpeedCPULion

        job("adamw", lambda p: DeepSpeedCPUAdam(p, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY))
        job("adamw+clip", lambda p: DeepSpeedCPUAdam(p, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY), clip=True)
        job("lion", lambda p: DeepSpeedCPULion(p, lr=LR, betas=BETAS, weight_decay=DECAY))
        job("adagrad", lambda p: DeepSpeedCPUAdagrad(p, lr=LR, eps=EPS))
    return jobs


def copy_jobs(t: Tensors) -> dict[str, Job]:
    """What memory can do: a copy of 14 bytes an element (28 moved), and STREAM triad."""
    if t.device == "cpu":
        return {"triad": lambda i: torch.add(t.at(i)[2], t.at(i)[3], alpha=3.0, out=t.at(i)[1])}
    source = [torch.empty(14 * t.numel, dtype=torch.uint8, device=t.device) for _ in range(t.sets)]
    target = [torch.empty_like(each) for each in source]
    return {"copy": lambda i: target[i % t.sets].copy_(source[i % t.sets])}


# -- timing -------------------------------------------------------------------------------------------------------


def seconds(job: Job, device: str, calls: int) -> float:
    """Device time of one call, over ``calls`` in a row; on a GPU they are queued before the first one starts."""
    if device == "cpu":
        began = time.perf_counter()
        for index in range(calls):
            job(index)
        return (time.perf_counter() - began) / calls
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(20_000_000)  # some 10 ms, in which the host gets ahead
    begin.record()
    for index in range(calls):
        job(index)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


class Here:
    """A contender of this process."""

    def __init__(self, jobs: dict[str, Job], device: str) -> None:
        self.jobs, self.device = jobs, device

    def seconds(self, op: str, calls: int) -> float:
        return seconds(self.jobs[op], self.device, calls)


class Apart:
    """A contender of another interpreter, which answers ``op calls`` with seconds, a line each."""

    def __init__(self, python: str, args: argparse.Namespace) -> None:
        command = [python, __file__, "--worker", "--device", args.device, "--numel", str(args.numel)]
        command += ["--threads", str(args.threads)]
        path = os.pathsep.join([str(Path(python).parent), os.environ["PATH"]])
        env = {**os.environ, "PATH": path, "DS_SKIP_CUDA_CHECK": "1"}
        if args.deepspeed_path:
            env["PYTHONPATH"] = args.deepspeed_path
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.jobs: list[str] = []
        for line in self._lines():
            if line.startswith("jobs"):
                self.jobs = line.split()[1:]
                break

    def _lines(self) -> Iterator[str]:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():  # not `yield from`, which closes the pipe when it is dropped
            yield line
        raise RuntimeError("the process of the other interpreter ended")

    def seconds(self, op: str, calls: int) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{op} {calls}\n")
        self.process.stdin.flush()
        return next(float(line.split()[1]) for line in self._lines() if line.startswith("seconds"))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def work(args: argparse.Namespace) -> None:
    """The other interpreter's side of ``Apart``."""
    jobs = deepspeed_jobs(Tensors(args.numel, args.device))
    print("jobs", *jobs, flush=True)
    for line in sys.stdin:
        op, calls = line.split()
        print("seconds", seconds(jobs[op], args.device, int(calls)), flush=True)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Let all contenders take turns at every operation."""
    tensors = Tensors(args.numel, args.device)
    contenders: dict[str, Here | Apart] = {
        "memory": Here(copy_jobs(tensors), args.device),
        "ds_hf": Here(ds_hf_jobs(tensors), args.device),
        "torch": Here(torch_jobs(tensors), args.device),
    }
    if args.deepspeed:
        contenders["deepspeed"] = Apart(args.deepspeed, args)
    times: dict[tuple[str, str], list[float]] = {}
    chosen = set(args.ops.split(",")) if args.ops else set(BYTES)
    pairs = [
        (name, op)
        for op in BYTES
        for name, c in contenders.items()
        if op in c.jobs and op in chosen | {"copy", "triad"}
    ]
    for name, op in pairs:
        contenders[name].seconds(op, 3)  # warm up
    for _ in range(args.rounds):
        for name, op in pairs:
            times.setdefault((name, op), []).append(contenders[name].seconds(op, args.calls))
    for contender in contenders.values():
        if isinstance(contender, Apart):
            contender.close()
    return [record(name, op, args, times) for name, op in pairs]


def record(name: str, op: str, args: argparse.Namespace, times: dict[tuple[str, str], list[float]]) -> dict[str, Any]:
    """One line of the table."""
    middle = {key: statistics.median(values) for key, values in times.items()}
    memory = "copy" if args.device == "cuda" else "triad"
    speed = {key: BYTES[key[1]] * args.numel / value / 1e9 for key, value in middle.items()}
    own = middle[name, op]

    def ratio(other: str) -> float | None:
        return round(middle[other, op] / own, 3) if (other, op) in middle else None

    return {
        "name": name,
        "op": op,
        "numel": args.numel,
        "ms": round(own * 1e3, 4),
        "gbs": round(speed[name, op], 1),
        "share_of_copy": round(speed[name, op] / speed["memory", memory], 3),
        "ratio_to_torch": ratio("torch"),
        "ratio_to_deepspeed": ratio("deepspeed"),
        "spread": round((max(times[name, op]) - min(times[name, op])) / own, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--numel", type=int, default=64_000_000)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: as many as torch uses")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=0, help="calls in a row; 0: 20 on a GPU, 2 on the CPU")
    parser.add_argument("--ops", default="", help="only these, e.g. adamw,lamb")
    parser.add_argument("--deepspeed", metavar="PYTHON", default="", help="interpreter that has DeepSpeed")
    parser.add_argument("--deepspeed-path", default="", help="PYTHONPATH of that interpreter")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.numel < 1:
        parser.error("--numel must be at least 1")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --device cpu")
    args.calls = args.calls or (20 if args.device == "cuda" else 2)
    args.threads = args.threads or torch.get_num_threads()
    torch.set_num_threads(args.threads)
    os.environ["DS_HF_CPU_THREADS"] = str(args.threads)
    if args.worker:
        work(args)
        return
    records = measure(args)
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"{args.threads} CPU threads"
    print(f"{where}, torch {torch.__version__}, {args.numel} elements, median of {args.rounds} rounds")
    print(f"{'':<10} {'op':<11} {'ms':>9} {'GB/s':>8} {'of copy':>8} {'x torch':>8} {'x DeepSpeed':>12}")
    for row in records:
        ratios = [f"{row[key]:.2f}" if row[key] else "-" for key in ("ratio_to_torch", "ratio_to_deepspeed")]
        print(
            f"{row['name']:<10} {row['op']:<11} {row['ms']:>9.3f} {row['gbs']:>8.1f} {row['share_of_copy']:>8.2f} "
            f"{ratios[0]:>8} {ratios[1]:>12}"
        )
    if args.json:
        args.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
