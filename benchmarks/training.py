"""Step time, tokens/s and memory of training a Llama: ds_hf against DeepSpeed, FSDP2 and no engine at all.

    torchrun --nproc-per-node 2 benchmarks/training.py --model 1b3 --stage 3 --micro-batch 4 --seq 2048 \\
        --engines ds_hf,deepspeed,fsdp2,floor --deepspeed-path /folder/with/deepspeed --json FILE

All engines train the same model from the same seed on the same tokens in bf16 with fp32 masters and AdamW, and take
turns: ``--rounds`` times each is built, warmed up, timed and destroyed. *floor* is forward and backward of the bf16
model on one device's share, without masters, communication or update: what no engine can beat. The loss of every step
is kept, so that a step which is fast and wrong shows. FSDP2 at stage 2 keeps parameters gathered after forward.
*ds_hf-nccl* gathers by NCCL also where GPUs can copy from each other (``ds_hf.peer_copies``), *ds_hf-copies*
copies small buffers too, *ds_hf-whole* keeps fp32 masters whole (``ds_hf.split_masters``), *ds_hf-fp8* multiplies in
fp8 (*-rows*: with a scale for each row, *-torchao*: by torchao's layers).

``--deepspeed-path`` is put in front of everything else, so that the real DeepSpeed has the name; ds_hf itself is
imported as ``ds_hf``. On a machine without GPUs the same runs over gloo, to try the script.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

LR, BETAS, EPS, DECAY, CLIP, SEED = 1e-4, (0.9, 0.95), 1e-8, 0.1, 1.0, 1234
STRETCH = 8  # steps timed together: training does not wait for the device after each
# hidden, intermediate, layers, heads, key-value heads, vocabulary
MODELS = {
    "tiny": (64, 172, 2, 4, 4, 512),
    "0b37": (1024, 2816, 24, 16, 16, 32000),
    "1b3": (2048, 5504, 24, 16, 16, 32000),
    "2b7": (2560, 6912, 32, 32, 32, 32000),
    "6b7": (4096, 11008, 32, 32, 32, 32000),
    "8b": (4096, 14336, 32, 32, 8, 128256),  # Llama 3's
}


def make_model(args: argparse.Namespace, dtype: torch.dtype) -> nn.Module:
    """The model, on this process's device, with the same values for the same seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, intermediate, layers, heads, kv_heads, vocabulary = MODELS[args.model]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=max(args.seq, 128),
        use_cache=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(SEED)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(args.device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    if args.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if getattr(args, "lora", 0):  # other scripts make models with fewer arguments
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=args.lora, target_modules="all-linear"))
    return model.train()


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """One group for all: every engine then does the same arithmetic."""
    return [{"params": [p for p in model.parameters() if p.requires_grad]}]


# -- engines ------------------------------------------------------------------------------------------------------


class Contender(ABC):
    """One way of training; built for each round and freed after it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args

    @abstractmethod
    def step(self, batches: list[Tensor]) -> Tensor:
        """One optimizer step over ``batches`` (micro-batches ``[micro-batch, seq]``); returns the mean loss."""

    def finish(self) -> None:  # noqa: B027 - most leave nothing
        """Wait for what the last step left to be done beside the next one."""

    def free(self) -> None:
        """Let go of everything."""
        self.__dict__.clear()


class Floor(Contender):
    """Forward and backward alone."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.model = make_model(args, torch.bfloat16)
        if args.compile:
            compile_blocks(self.model)

    def step(self, batches: list[Tensor]) -> Tensor:
        losses = []
        for ids in batches:
            loss = self.model(input_ids=ids, labels=ids).loss
            (loss / len(batches)).backward()
            losses.append(loss.detach())
        self.model.zero_grad(set_to_none=True)
        return torch.stack(losses).mean()


class DsHf(Contender):
    """This project's engine."""

    own: ClassVar[dict[str, Any]] = {}

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        import ds_hf

        model = self.convert(make_model(args, torch.float32))
        groups = parameter_groups(model)
        self.engine, *_ = ds_hf.initialize(model=model, model_parameters=groups, config=self.config())

    def convert(self, model: nn.Module) -> nn.Module:
        """What others make of the model before."""
        return model

    def config(self) -> dict[str, Any]:
        """Its file."""
        own = {**self.own, **({"compile": "blocks"} if self.args.compile else {})}
        return {
            **engine_config(self.args),
            "optimizer": {"type": "AdamW", "params": adam_parameters()},
            "ds_hf": own,
        }

    def step(self, batches: list[Tensor]) -> Tensor:
        return deepspeed_step(self.engine, batches)

    def finish(self) -> None:
        self.engine._finish_update()

    def free(self) -> None:
        self.engine.destroy()
        super().free()


class DsHfNccl(DsHf):
    """The same without copies between the GPUs."""

    own: ClassVar[dict[str, Any]] = {"peer_copies": False}


class DsHfCopies(DsHf):
    """The same with copies for small buffers too."""

    def __init__(self, args: argparse.Namespace) -> None:
        from ds_hf.engine.comm import peers

        usual, peers.LEAST_COPIED_NBYTES = peers.LEAST_COPIED_NBYTES, 0
        try:
            super().__init__(args)
        finally:
            peers.LEAST_COPIED_NBYTES = usual


class DsHfWhole(DsHf):
    """The same with whole fp32 masters beside the 16-bit parameters."""

    own: ClassVar[dict[str, Any]] = {"split_masters": False}


class DsHfCaptured(DsHf):
    """The same with its blocks in CUDA graphs."""

    own: ClassVar[dict[str, Any]] = {"capture": "blocks"}


class DsHfPadded(DsHf):
    """The same with sequences padded around them to eighths of the longest."""

    def config(self) -> dict[str, Any]:
        found = super().config()
        found["ds_hf"] |= {"capture": "blocks", "capture_pad_to_multiple_of": self.args.seq // 8}
        return found


class DsHfFp8(DsHf):
    """The same with linear layers that multiply in fp8."""

    own: ClassVar[dict[str, Any]] = {"fp8": {"smallest": 0}}


class DsHfFp8Rows(DsHf):
    """The same with a scale for each row."""

    own: ClassVar[dict[str, Any]] = {"fp8": {"smallest": 0, "recipe": "rowwise"}}


class DsHfFp8Torchao(DsHf):
    """The same with torchao's layers, as accelerate's ``mixed_precision="fp8"`` gives them to an engine."""

    def convert(self, model: nn.Module) -> nn.Module:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name("tensorwise")
        return convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name != "lm_head")


class DeepSpeed(Contender):
    """The real one."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        import deepspeed

        if "+ds.hf" in deepspeed.__version__:
            raise RuntimeError("the name deepspeed is served by ds_hf: give --deepspeed-path")
        config = engine_config(args)
        if args.buckets == "hf":  # what transformers fills in for "auto"
            hidden = MODELS[args.model][0]
            config["zero_optimization"] |= {
                "reduce_bucket_size": hidden * hidden,
                "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
                "stage3_param_persistence_threshold": 10 * hidden,
            }
        model = make_model(args, torch.float32)
        optimizer = None
        if args.device == "cpu":  # no compiler run for a trial of the script
            optimizer = torch.optim.AdamW(model.parameters(), **adam_parameters())
            config["zero_force_ds_cpu_optimizer"] = False
        else:
            config["optimizer"] = {"type": "AdamW", "params": adam_parameters()}
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            model_parameters=None if optimizer else [p for p in model.parameters() if p.requires_grad],
            config=config,
        )
        if args.compile:
            self.engine.compile()

    def step(self, batches: list[Tensor]) -> Tensor:
        return deepspeed_step(self.engine, batches)

    def free(self) -> None:
        self.engine.destroy()
        super().free()


class Fsdp2(Contender):
    """torch's fully_shard, block by block, with torch's fused AdamW."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        self.model: Any = make_model(args, torch.float32)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        offload = CPUOffloadPolicy() if args.offload == "cpu" else OffloadPolicy()
        options: dict[str, Any] = {
            "mp_policy": policy,
            "offload_policy": offload,
            "reshard_after_forward": args.stage == 3,
        }
        if args.compile:
            compile_blocks(self.model)
        for block in self.model.model.layers:
            fully_shard(block, **options)
        fully_shard(self.model, **options)
        fused = args.offload != "cpu" or args.device == "cpu"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=fused, **adam_parameters())

    def step(self, batches: list[Tensor]) -> Tensor:
        losses = []
        for index, ids in enumerate(batches):
            self.model.set_requires_gradient_sync(index == len(batches) - 1 or self.args.stage >= 2)
            loss = self.model(input_ids=ids, labels=ids).loss
            (loss / len(batches)).backward()
            losses.append(loss.detach())
        if self.args.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).mean()


ENGINES: dict[str, type[Contender]] = {
    "ds_hf": DsHf,
    "ds_hf-nccl": DsHfNccl,
    "ds_hf-copies": DsHfCopies,
    "ds_hf-whole": DsHfWhole,
    "ds_hf-captured": DsHfCaptured,
    "ds_hf-padded": DsHfPadded,
    "ds_hf-fp8": DsHfFp8,
    "ds_hf-fp8-rows": DsHfFp8Rows,
    "ds_hf-fp8-torchao": DsHfFp8Torchao,
    "deepspeed": DeepSpeed,
    "fsdp2": Fsdp2,
    "floor": Floor,
}


def deepspeed_step(engine: Any, batches: list[Tensor]) -> Tensor:
    """The loop of DeepSpeed's API."""
    losses = []
    for ids in batches:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def engine_config(args: argparse.Namespace) -> dict[str, Any]:
    """The JSON file of both ds_hf and DeepSpeed."""
    zero: dict[str, Any] = {"stage": args.stage}
    if args.offload == "cpu":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": args.device != "cpu"}
    return {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_accumulation_steps": args.accumulation,
        "gradient_clipping": args.clip,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "steps_per_print": 10**9,
    }


def adam_parameters() -> dict[str, Any]:
    return {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}


def compile_blocks(model: Any) -> None:
    """Each repeated block by itself, as FSDP2's users do."""
    for block in model.model.layers:
        block.compile()


# -- timing -------------------------------------------------------------------------------------------------------


def tokens(args: argparse.Namespace, step: int) -> list[Tensor]:
    """This rank's micro-batches of a step."""
    vocabulary = MODELS[args.model][5]
    shape = (args.accumulation, dist.get_world_size(), args.micro_batch, args.seq)
    generator = torch.Generator().manual_seed(SEED + step)
    # a narrow range, so that there is something to learn
    ids = torch.randint(0, min(vocabulary, 1000), shape, generator=generator)[:, dist.get_rank()]
    least = getattr(args, "shortest", None) or args.seq
    lengths = torch.randint(least, args.seq + 1, (args.accumulation,), generator=generator).tolist()
    return [each[:, :length] for each, length in zip(ids.to(args.device, non_blocking=True), lengths, strict=True)]


def synchronize(args: argparse.Namespace) -> None:
    if args.device != "cpu":
        torch.cuda.synchronize()


def turn(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Build, warm up, time and free one engine."""
    gc.enable()
    gc.collect()
    if args.device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    engine = ENGINES[name](args)
    losses, times = [], []
    data = [tokens(args, step) for step in range(args.warmup + args.steps)]
    losses += [engine.step(batches) for batches in data[: args.warmup]]
    engine.finish()
    synchronize(args)
    built = time.perf_counter() - began
    gc.collect()
    gc.disable()  # a collection of everything that was imported takes as long as a step, and comes where it will
    for stretch in stretches(data, args):
        took, found = timed(engine, stretch, args)
        times.append(took)
        losses += found
    peak = torch.cuda.max_memory_allocated() if args.device != "cpu" else 0
    reserved = torch.cuda.max_memory_reserved() if args.device != "cpu" else 0
    engine.free()
    del engine
    gc.collect()
    return of_all_ranks(times, losses, peak, reserved, built)


def stretches(data: list[Any], args: argparse.Namespace) -> list[list[Any]]:
    """What is timed at once: each begins and ends with a device at rest, and all are alike."""
    length = args.steps // -(-args.steps // STRETCH)
    return [data[first : first + length] for first in range(args.warmup, len(data) - length + 1, length)]


def timed(engine: Contender, stretch: list[Any], args: argparse.Namespace) -> tuple[float, list[Tensor]]:
    """Seconds a step, and losses."""
    dist.barrier()
    start = time.perf_counter()
    losses = [engine.step(batches) for batches in stretch]
    engine.finish()
    synchronize(args)
    return (time.perf_counter() - start) / len(stretch), losses


def of_all_ranks(times: list[float], losses: list[Tensor], peak: int, reserved: int, built: float) -> dict[str, Any]:
    mean_losses = torch.stack(losses).float()
    dist.all_reduce(mean_losses)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (times, peak, reserved))
    # a step takes as long as its slowest rank
    slowest = [max(rank[0][index] for rank in everyone) for index in range(len(times))]
    return {
        "times": slowest,
        "peak": max(rank[1] for rank in everyone),
        "reserved": max(rank[2] for rank in everyone),
        "ready_s": built,
        "losses": (mean_losses / dist.get_world_size()).tolist(),
    }


def measure_side_by_side(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All engines are there at once and take turns after each stretch, so that a host whose speed changes meanwhile is
    the same one for all; peaks are not told apart, and 0."""
    names = args.engines.split(",")
    data = [tokens(args, step) for step in range(args.warmup + args.steps)]
    engines: dict[str, Contender] = {}
    times: dict[str, list[float]] = {}
    losses: dict[str, list[Tensor]] = {}
    built: dict[str, float] = {}
    for name in names:
        began = time.perf_counter()
        engine = engines[name] = ENGINES[name](args)
        times[name], losses[name] = [], [engine.step(batches) for batches in data[: args.warmup]]
        engine.finish()
        synchronize(args)
        built[name] = time.perf_counter() - began
    gc.collect()
    gc.disable()
    for _ in range(args.rounds):
        for stretch in stretches(data, args):
            for name in names:
                took, found = timed(engines[name], stretch, args)
                times[name].append(took)
                losses[name] += found
    gc.enable()
    turns = {name: [of_all_ranks(times[name], losses[name], 0, 0, built[name])] for name in names}
    for engine in engines.values():
        engine.free()
    return summarise(turns, args)


def measure(
    args: argparse.Namespace, after: Callable[[list[dict[str, Any]]], None] = lambda records: None
) -> list[dict[str, Any]]:
    """All engines in turn, ``--rounds`` times; ``after`` gets what is known after each, for runs that are cut off."""
    if getattr(args, "side_by_side", False):
        records = measure_side_by_side(args)
        after(records)
        return records
    names = args.engines.split(",")
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(args.rounds):
        for name in names:
            if turns[name] and "error" in turns[name][-1]:
                continue
            try:
                turns[name].append(turn(name, args))
            except Exception as error:  # the others' figures are worth keeping
                turns[name].append({"error": f"{type(error).__name__}: {error}".splitlines()[0]})
                traceback.clear_frames(error.__traceback__)  # they hold the model
            after(summarise(turns, args))
    return summarise(turns, args)


def summarise(turns: dict[str, list[dict[str, Any]]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """A record of each engine that has had a turn."""
    mean = (args.seq + (getattr(args, "shortest", None) or args.seq)) / 2
    per_step = args.micro_batch * args.accumulation * dist.get_world_size() * mean
    records = []
    for name, each in turns.items():
        done = [found for found in each if "error" not in found]
        failed = [found["error"] for found in each if "error" in found]
        if not each:
            continue
        record: dict[str, Any] = {"name": name, "error": failed[0] if failed else None}
        if done:
            step = statistics.median(value for found in done for value in found["times"])
            record |= {
                "step_ms": round(step * 1e3, 3),
                "tokens_per_s": round(per_step / step, 1),
                "peak_gib": round(max(found["peak"] for found in done) / 2**30, 3),
                "reserved_gib": round(max(found["reserved"] for found in done) / 2**30, 3),
                "ready_s": round(max(found["ready_s"] for found in done), 2),
                "round_ms": [round(statistics.median(found["times"]) * 1e3, 3) for found in done],
                "losses": [round(loss, 5) for loss in done[0]["losses"]],
                **done[0].get("more", {}),
            }
        records.append(record)
    return records


def show(records: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """The table for a person."""
    ours = next((row.get("step_ms") for row in records if row["name"] == "ds_hf"), None)
    print(f"{'':<10} {'step ms':>9} {'tokens/s':>10} {'peak GiB':>9} {'x ds_hf':>8} {'first loss':>10} {'last':>8}")
    for row in records:
        if "step_ms" not in row:
            print(f"{row['name']:<10} failed: {row['error']}")
            continue
        ratio = f"{row['step_ms'] / ours:.2f}" if ours else "-"
        print(
            f"{row['name']:<10} {row['step_ms']:>9.1f} {row['tokens_per_s']:>10.0f} {row['peak_gib']:>9.2f} {ratio:>8} "
            f"{row['losses'][0]:>10.4f} {row['losses'][-1]:>8.4f}"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="1b3")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=2)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--shortest", type=int, help="lengths of batches are drawn from this one to --seq")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--clip", type=float, default=CLIP)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--compile", action="store_true", help="each block compiled")
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters on all linear layers")
    parser.add_argument("--offload", choices=("none", "cpu"), default="none")
    parser.add_argument("--buckets", choices=("default", "hf"), default="default", help="of DeepSpeed")
    parser.add_argument("--engines", default="ds_hf,fsdp2,floor", help=f"of {','.join(ENGINES)}, in this order")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--side-by-side", action="store_true", help="all engines at once, in turns of a few steps")
    parser.add_argument("--deepspeed-path", default="")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    unknown = set(args.engines.split(",")) - set(ENGINES)
    if unknown:
        parser.error(f"no engine {', '.join(sorted(unknown))}; there are {', '.join(ENGINES)}")
    return args


def connect(args: argparse.Namespace) -> None:
    """Join the other processes, if there are any; sets ``args.device``."""
    if args.deepspeed_path:
        sys.path.insert(0, args.deepspeed_path)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    args.device = f"cuda:{local}" if torch.cuda.is_available() else "cpu"
    if torch.cuda.is_available():
        torch.cuda.set_device(local)
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")


def main() -> None:
    args = parse()
    connect(args)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    about = {"machine": f"{dist.get_world_size()} x {where}", "torch": torch.__version__, "date": time.strftime("%F")}

    def write(records: list[dict[str, Any]]) -> None:
        if args.json and dist.get_rank() == 0:
            args.json.write_text(json.dumps({**about, "arguments": sys.argv[1:], "records": records}, indent=1) + "\n")

    records = measure(args, write)
    if dist.get_rank() == 0:
        print(f"{about['machine']}, torch {torch.__version__}: {' '.join(sys.argv[1:])}")
        show(records, args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
