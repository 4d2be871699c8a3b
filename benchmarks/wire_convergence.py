"""What is learnt with fewer bytes on the wire: loss over bytes on the demo's text, beside Adam, LAMB and torch's hooks.

    ip netns add wire; ip -n wire link set lo up    # counters of its own; as root
    ip netns exec wire python -m torch.distributed.run --nproc-per-node 2 benchmarks/wire_convergence.py OUT.jsonl \
        ["Adam;1-bit Adam" ["1,2,3"]]    # which runs, which seeds

A small Llama over bytes of the standard library's source, fp32, three seeds. Bytes are what the interface ``lo`` sent,
for both processes together. A line a run: losses of steps, bytes by then, loss on held-out text at the end.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from transformers import LlamaConfig, LlamaForCausalLM

import ds_hf
from examples.train_lm import source_files

STEPS, FREEZE, BATCH, LENGTH, LR = 300, 60, 4, 128, 2e-3
BETAS = [0.9, 0.99]
Run = dict[str, Any]


def wire(stage: int, zero: Run | None = None, **keys: Any) -> Run:
    return {"zero_optimization": {"stage": stage, **(zero or {})}, "ds_hf": {"wire": keys}}


def one_bit(name: str, **params: Any) -> Run:
    return {"optimizer": {"type": name, "params": {"lr": LR, "betas": BETAS, **params}}}


def in_fp8(**keys: Any) -> Run:
    """Products in fp8 by 32 bits, as this needs no GPU."""
    run = wire(3, **keys)
    return {**run, **BF16, "ds_hf": {**run["ds_hf"], "fp8": {"emulate": True, "smallest": 0}}}


BF16 = {"bf16": {"enabled": True}}
LAMB = {"lr": 1e-2, "max_coeff": 10.0}
LOCO = {"zero_quantized_gradients": True, "zeropp_loco_param": {}}
RUNS: dict[str, Run] = {
    "Adam": wire(0),
    "Adam, stage 3": wire(3),
    "8-bit weights (qwZ)": wire(3, parameters=8),
    "8-bit gradients (qgZ)": wire(2, gradients=8),
    "4-bit gradients (qgZ)": wire(2, gradients=4),
    "4-bit gradients, LoCo": wire(2, LOCO),
    "8-bit weights and gradients": wire(3, gradients=8, parameters=8),
    "bf16, stage 3": {**wire(3), **BF16},
    "bf16, 8-bit weights": {**wire(3, parameters=8), **BF16},
    "fp8, stage 3": in_fp8(),
    "fp8, 8-bit weights": in_fp8(parameters=8),
    "1-bit Adam": one_bit("OneBitAdam", freeze_step=FREEZE),
    "0/1 Adam": one_bit(
        "ZeroOneAdam", var_freeze_step=FREEZE, var_update_scaler=FREEZE, local_step_scaler=60, local_step_clipper=4
    ),
    "0/1 Adam, var_update_scaler 16": one_bit(
        "ZeroOneAdam", var_freeze_step=FREEZE, local_step_scaler=60, local_step_clipper=4
    ),
    "LAMB": one_bit("Lamb", **LAMB),
    # What the 1-bit rules are in their warm-up, as in their papers and in DeepSpeed.
    "Adam, no bias correction": one_bit("Adam", bias_correction=False),
    "LAMB, no bias correction": one_bit("Lamb", bias_correction=False, **LAMB),
    "1-bit LAMB": one_bit("OneBitLamb", freeze_step=FREEZE, **LAMB),
    "torch DDP": {"hook": None},
    "torch DDP, bf16 hook": {"hook": "bf16"},
    "torch DDP, powerSGD rank 2": {"hook": "powerSGD"},
}


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, **sizes))


def text(*, held_out: bool) -> Tensor:
    joined = b"".join(Path(path).read_bytes() for path in source_files(held_out=held_out)[:60])
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8)


def batch(of: Tensor, generator: torch.Generator) -> Tensor:
    starts = torch.randint(0, len(of) - LENGTH, (BATCH,), generator=generator)
    return torch.stack([of[start : start + LENGTH] for start in starts.tolist()]).long()


def sent() -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split(":")[1].split()[8])
    return 0


def rate(step: int) -> float:
    """A share of the learning rate: up in 30 steps, then down to a tenth."""
    return min(1.0, (step + 1) / 30) * (1 - 0.9 * step / STEPS)


def ours(made: nn.Module, run: Run) -> tuple[nn.Module, Callable[[Tensor, float], float]]:
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "Adam", "params": {"lr": LR, "betas": BETAS}},
        **run,
    }
    engine, *_ = ds_hf.initialize(model=made, config=config)
    base = [group["lr"] for group in engine.optimizer.param_groups]

    def step(ids: Tensor, share: float) -> float:
        for group, lr in zip(engine.optimizer.param_groups, base, strict=True):
            group["lr"] = lr * share
        loss = engine(ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return engine, step


def _in_bf16(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """What ``bf16_compress_hook`` does, which torch has for NCCL alone."""
    narrow = bucket.buffer().bfloat16().div_(dist.get_world_size())
    work: Any = dist.all_reduce(narrow, async_op=True)
    found: torch.futures.Future[Tensor] = work.get_future().then(lambda future: future.value()[0].float())
    return found


_in_bf16.__annotations__.clear()  # torch compares them with its classes, and here they are texts


def torchs(made: nn.Module, run: Run) -> tuple[nn.Module, Callable[[Tensor, float], float]]:
    ddp = nn.parallel.DistributedDataParallel(made)
    if run["hook"] == "bf16":
        ddp.register_comm_hook(None, _in_bf16)
    elif run["hook"] == "powerSGD":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=FREEZE)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=LR, betas=(BETAS[0], BETAS[1]), weight_decay=0.0)

    def step(ids: Tensor, share: float) -> float:
        optimizer.param_groups[0]["lr"] = LR * share
        loss = ddp(ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return ddp, step


def train(name: str, seed: int, data: Tensor, held_out: Tensor) -> Run:
    module, step = (torchs if "hook" in RUNS[name] else ours)(model(seed), RUNS[name])
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    losses, nbytes = [], []
    dist.barrier()
    begin, first = time.perf_counter(), sent()
    for index in range(STEPS):
        loss = step(batch(data, generator), rate(index))
        losses.append(loss)
        if index % 10 == 9:
            nbytes.append(sent() - first)
    seconds = time.perf_counter() - begin
    module.eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        final = [float(module(ids, labels=ids).loss) for ids in (batch(held_out, generator) for _ in range(32))]
    found = torch.tensor([sum(final) / len(final), *losses], dtype=torch.float64)
    dist.all_reduce(found)
    held, *mean = (found / dist.get_world_size()).tolist()
    if hasattr(module, "destroy"):
        module.destroy()
    every = [sum(mean[i : i + 10]) / 10 for i in range(0, STEPS, 10)]
    return {"run": name, "seed": seed, "held_out": held, "losses": every, "nbytes": nbytes, "seconds": seconds}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data, held_out = text(held_out=False), text(held_out=True)
    wanted = sys.argv[2].split(";") if len(sys.argv) > 2 and sys.argv[2] else list(RUNS)
    for seed in map(int, sys.argv[3].split(",") if len(sys.argv) > 3 else "123"):
        for name in wanted:
            row = train(name, seed, data, held_out)
            if dist.get_rank() == 0:
                print(f"{name:32s} seed {seed}: {row['held_out']:.4f}, {row['nbytes'][-1] / 1e6:.1f} MB", flush=True)
                with open(sys.argv[1], "a") as file:
                    file.write(json.dumps(row) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
