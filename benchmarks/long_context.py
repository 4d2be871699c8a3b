"""Long sequences: what activations in host memory, tiles and chunked losses save and cost, with peers in the same run.

    python benchmarks/long_context.py --parts peak,offload,longest --deepspeed-path /folder/with/deepspeed --json FILE
    torchrun --nproc-per-node 2 benchmarks/long_context.py --parts sp --json FILE
    python benchmarks/long_context.py --cpu                     # the same with small shapes and no GPU: a check

Engines take turns as in ``benchmarks/training.py``, whose models, data and timing these are. All of them checkpoint
every block, but those of the part budget. What stands behind a plus is added to it:

    ds_hf+offload       ds_hf.offload_activations       ds_hf+hf-offload  transformers' enable(offload=True)
    ds_hf+tiles         ds_hf.tiled_mlp: 4              ds_hf+trl         TRL's OffloadActivations
    ds_hf+loss          ds_hf.chunked_loss              ds_hf+sp          sequences over all processes;
                                                        ds_hf+whole       as long, each on one process
    ds_hf+sp+nccl       the same without ds_hf.peer_copies
    ds_hf+compile       ds_hf.compile: "blocks"     ds_hf+budget=0.8  ds_hf.activation_memory_budget
    deepspeed+alst      its TiledMLP and TiledFusedLogitsLoss
    deepspeed+alst+offload                              with its CheckpointHiddenStatesOffload

Parts:

    peak      1.35 B, 4 x 2048: peak and step of ds_hf, with the loss, with tiles too; FSDP2; DeepSpeed
    budget    1.35 B, 4 x 2048: eager, checkpointed, compiled, and compiled under budgets of activations
    offload   1.35 B, 1 x 8192, and 2.7 B, 1 x 16384: a step with each way of offloading activations
    longest   8 B on one GPU, ``--budget`` GB of it: the longest of ``--lengths`` that trains, and what was short.
              States in host memory in bf16 (64 GB of it), the activations on top.
    sp        two GPUs that share two sequences of 16384, against one whole sequence on each; under torchrun
"""

from __future__ import annotations

import argparse
import contextlib
import gc
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

training.MODELS["small"] = (64, 172, 4, 4, 4, 512)
TILES = 4
OWN: dict[str, dict[str, Any]] = {
    "offload": {"offload_activations": True},
    "tiles": {"tiled_mlp": TILES},
    "loss": {"chunked_loss": True},
    "compile": {"compile": "blocks"},
    "nccl": {"peer_copies": False},
    **{f"budget={share}": {"compile": "blocks", "activation_memory_budget": share} for share in (0.8, 0.6, 0.4)},
}
PEAK = "ds_hf,ds_hf+loss,ds_hf+tiles+loss,ds_hf+offload+tiles+loss,fsdp2"
BUDGETS = "ds_hf,ds_hf+checkpointed,ds_hf+compile,ds_hf+compile+loss," + ",".join(
    f"ds_hf+budget={share}+loss" for share in (0.8, 0.6, 0.4)
)
SHARED = "ds_hf+whole,ds_hf+sp,ds_hf+sp+nccl,ds_hf+sp+offload+loss"
# Of one part: model, micro-batch, length, engines.
ROWS: dict[str, list[tuple[str, int, int, str]]] = {
    "peak": [
        ("1b3", 4, 2048, "ds_hf,ds_hf+loss,ds_hf+tiles+loss,ds_hf+offload+tiles+loss,fsdp2,deepspeed,deepspeed+alst")
    ],
    "offload": [
        ("1b3", 1, 8192, "ds_hf,ds_hf+offload,ds_hf+hf-offload,ds_hf+trl,fsdp2,deepspeed,deepspeed+alst+offload"),
        ("2b7", 1, 16384, "ds_hf,ds_hf+offload,ds_hf+hf-offload,fsdp2"),
    ],
    "sp": [("1b3", 2, 8192, SHARED)],
    "budget": [("1b3", 4, 2048, BUDGETS)],
}
SMALL: dict[str, list[tuple[str, int, int, str]]] = {
    "peak": [("small", 2, 256, PEAK)],
    "offload": [("small", 4, 1024, "ds_hf,ds_hf+offload,fsdp2")],
    "sp": [("small", 2, 256, SHARED)],
    "budget": [("small", 2, 256, BUDGETS)],
}
LONGEST = "ds_hf,ds_hf+offload+tiles+loss,deepspeed+alst+offload"


# -- contenders -----------------------------------------------------------------------------------------------------


def ours(ways: list[str]) -> type[training.Contender]:
    """ds_hf with ``ways`` of its own, or a peer's way of offloading activations put around the same engine."""

    class Ours(training.DsHf):
        own = {key: value for way in ways for key, value in OWN.get(way, {}).items()}  # noqa: RUF012

        def __init__(self, args: argparse.Namespace) -> None:
            self.together = dist.get_world_size() if "whole" in ways else 1
            more = {"seq": args.seq * self.together, "checkpointing": args.checkpointing or "checkpointed" in ways}
            super().__init__(argparse.Namespace(**{**vars(args), **more}))
            model = self.engine.module
            if "hf-offload" in ways:
                model.activation_checkpointing_enable({"use_reentrant": False}, offload=True)
            self.around: Callable[[], Any] = contextlib.nullcontext
            if "trl" in ways:
                from trl.models.activation_offloading import get_act_offloading_ctx_manager

                context = get_act_offloading_ctx_manager(model, use_pin_memory=args.device != "cpu")
                self.around = lambda: context

        def step(self, batches: list[Tensor]) -> Tensor:
            with self.around():
                return super().step([ids.reshape(-1, ids.shape[1] * self.together) for ids in batches])

    return Ours


class Shared(training.Contender):
    """ds_hf with every sequence divided over all processes: each micro-batch is as long as all of theirs together."""

    ways: list[str] = []  # noqa: RUF012

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        import ds_hf
        from ds_hf.deepspeed_api.sequence.ulysses import UlyssesSPAttentionHF

        self.world = dist.get_world_size()
        whole = argparse.Namespace(**{**vars(args), "seq": args.seq * self.world})
        model = training.make_model(whole, torch.float32)
        mpu = UlyssesSPAttentionHF.register_with_transformers(model, None, self.world, args.micro_batch)
        config = training.engine_config(args)
        config["ds_hf"] = {key: value for way in self.ways for key, value in OWN.get(way, {}).items()}
        config["optimizer"] = {"type": "AdamW", "params": training.adam_parameters()}
        config["sequence_parallel_size"] = self.world
        self.engine, *_ = ds_hf.initialize(
            model=model, model_parameters=training.parameter_groups(model), config=config, mpu=mpu
        )

    def step(self, batches: list[Tensor]) -> Tensor:
        """This process's part of sequences that are made of the samples of all."""
        parts = []
        for ids in batches:
            places = torch.arange(ids.shape[1], device=ids.device) + dist.get_rank() * ids.shape[1]
            labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
            loss = self.engine(
                input_ids=ids, shift_labels=labels, labels=labels, position_ids=places.expand_as(ids)
            ).loss
            self.engine.backward(loss)
            self.engine.step()
            parts.append(loss.detach())
        return torch.stack(parts).mean()

    def finish(self) -> None:
        self.engine._finish_update()

    def free(self) -> None:
        self.engine.destroy()
        super().free()


class Alst(training.DeepSpeed):
    """Real DeepSpeed with its tiles in the model; with ``offload`` its context for activations."""

    ways: list[str] = []  # noqa: RUF012

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, TiledMLP
        from transformers.models.llama import modeling_llama

        self.llama, self.usual = modeling_llama.LlamaMLP, modeling_llama.LlamaMLP.forward
        usual, model = self.usual, self.engine.module

        def mlp(layer: Any, x: Tensor) -> Tensor:
            weights = [layer.down_proj.weight, layer.gate_proj.weight, layer.up_proj.weight]
            return TiledMLP.apply(usual, layer, x, TILES, weights)

        def loss(head: Any, x: Tensor, y: Tensor) -> Tensor:
            return torch.nn.functional.cross_entropy(head(x).float(), y, ignore_index=-100)

        def forward(input_ids: Tensor, labels: Tensor) -> Any:
            hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state
            y = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
            weights = [model.lm_head.weight]
            return SimpleNamespace(
                loss=TiledFusedLogitsLoss.apply(loss, model.lm_head, hidden, y, None, TILES, weights, "mean")
            )

        modeling_llama.LlamaMLP.forward = mlp
        model.forward = forward
        self.around: Callable[[], Any] = contextlib.nullcontext
        if "offload" in self.ways:
            from deepspeed.runtime.activation_checkpointing.offload_activations import CheckpointHiddenStatesOffload

            context = CheckpointHiddenStatesOffload()
            self.around = lambda: context

    def step(self, batches: list[Tensor]) -> Tensor:
        with self.around():
            return super().step(batches)

    def free(self) -> None:
        self.llama.forward = self.usual
        super().free()


def contender(name: str) -> type[training.Contender]:
    """The class of an engine's name."""
    engine, *ways = name.split("+")
    if engine == "ds_hf" and "sp" in ways:
        return type("Shared", (Shared,), {"ways": ways})
    if engine == "ds_hf":
        return ours(ways)
    if "alst" in ways:
        return type("Alst", (Alst,), {"ways": ways})
    return training.ENGINES[engine]


# -- rows in turns ----------------------------------------------------------------------------------------------------


def measure(part: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every row of a part: all engines in turns."""
    found = []
    rows = [(args.row[0], int(args.row[1]), int(args.row[2]), args.row[3])] if args.row else None
    for model, micro_batch, length, engines in rows or (SMALL if args.cpu else ROWS)[part]:
        names = [name for name in engines.split(",") if args.deepspeed_path or not name.startswith("deepspeed")]
        training.ENGINES.update({name: contender(name) for name in names})
        row = argparse.Namespace(
            model=model, micro_batch=micro_batch, seq=length, stage=args.stage, accumulation=1, clip=1.0,
            checkpointing=part != "budget", compile=False, offload="none", buckets="default", engines=",".join(names),
            steps=args.steps, warmup=2 if args.cpu else 4, rounds=args.rounds, device=args.device,
            side_by_side=args.side_by_side,
        )  # fmt: skip
        records = training.measure(row)
        found.append({"part": part, "model": model, "micro_batch": micro_batch, "length": length, "records": records})
        show(found[-1])
    return found


def show(row: dict[str, Any]) -> None:
    """A table for a person; the first engine is what the others are compared with."""
    if dist.get_rank():
        return
    records = row["records"]
    first = records[0].get("step_ms")
    print(f"\n{row['part']}: {row['model']}, {row['micro_batch']} x {row['length']}")
    print(f"{'':<28} {'step ms':>9} {'x first':>8} {'peak GiB':>9} {'first loss':>11} {'last':>8}")
    for record in records:
        if "step_ms" not in record:
            print(f"{record['name']:<28} failed: {record['error']}")
            continue
        times = f"{record['step_ms'] / first:.3f}" if first else "-"
        losses = record["losses"]
        print(
            f"{record['name']:<28} {record['step_ms']:>9.1f} {times:>8} {record['peak_gib']:>9.2f} "
            f"{losses[0]:>11.4f} {losses[-1]:>8.4f}"
        )


# -- the longest sequence -------------------------------------------------------------------------------------------


def longest(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One step at each length, until one fails, for each engine."""
    if args.device != "cpu":
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(args.budget * 1e9 / whole, 1.0))
    lengths = [int(length) for length in args.lengths.split(",")]
    found = []
    for name in LONGEST.split(","):
        if name.startswith("deepspeed") and (args.cpu or not args.deepspeed_path):
            continue
        steps, bound = [], "the longest length tried"
        engine: Any = None
        try:
            engine = Longest.made(name, args, max(lengths))
            for length in lengths:
                steps.append(engine.try_length(length))
                say(f"longest: {name} {steps[-1]}")
        except Exception as error:
            bound = f"{type(error).__name__}: {error}".splitlines()[0]
        if engine is not None:
            engine.free()
        del engine
        gc.collect()
        if args.device != "cpu":
            torch.cuda.empty_cache()
        record = {"name": name, "longest": steps[-1]["length"] if steps else 0, "bound": bound, "steps": steps}
        say(f"longest: {name}: {record['longest']} tokens; bounded by {bound}")
        found.append(record)
    return [{"part": "longest", "model": "small" if args.cpu else "8b", "budget_gb": args.budget, "records": found}]


class Longest:
    """An engine whose states are in host memory, in bf16 where that is possible."""

    def __init__(
        self, args: argparse.Namespace, engine: Any, around: Callable[[], Any], free: Callable[[], None]
    ) -> None:
        self.args, self.engine, self.around, self.free = args, engine, around, free

    @classmethod
    def made(cls, name: str, args: argparse.Namespace, length: int) -> Longest:
        kind, *ways = name.split("+")
        row = argparse.Namespace(
            model="small" if args.cpu else "8b", seq=length, device=args.device, checkpointing=True, stage=args.stage,
            micro_batch=1, accumulation=1, clip=1.0, offload="cpu", compile=False, buckets="default",
        )  # fmt: skip
        config = training.engine_config(row)
        config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        if kind == "deepspeed":
            del config["bf16"]["bf16_optimizer_states"]
            made = _AlstLongest(row, config, ways)
            return cls(args, made.engine, made.around, made.free)
        import ds_hf

        config["ds_hf"] = {key: value for way in ways for key, value in OWN[way].items()}
        if "tiles" in ways:
            config["ds_hf"]["tiled_mlp"] = "auto"
        config["optimizer"] = {"type": "AdamW", "params": training.adam_parameters()}
        model = training.make_model(row, torch.bfloat16)
        engine, *_ = ds_hf.initialize(model=model, config=config)
        return cls(args, engine, contextlib.nullcontext, engine.destroy)

    def try_length(self, length: int) -> dict[str, Any]:
        """One step; its time and peak."""
        ids = torch.randint(0, 500, (1, length), device=self.args.device)
        training.synchronize(self.args)
        if self.args.device != "cpu":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        with self.around():
            loss = training.deepspeed_step(self.engine, [ids])
        training.synchronize(self.args)
        seconds = time.perf_counter() - start
        peak = torch.cuda.max_memory_allocated() / 2**30 if self.args.device != "cpu" else 0.0
        return {"length": length, "s": round(seconds, 2), "peak_gib": round(peak, 2), "loss": round(float(loss), 4)}


class _AlstLongest(Alst):
    """``Alst`` with a configuration of its own."""

    def __init__(self, args: argparse.Namespace, config: dict[str, Any], ways: list[str]) -> None:
        self.ways = ways
        usual, training.engine_config = training.engine_config, lambda args: config
        made, training.make_model = training.make_model, lambda args, dtype: made(args, torch.bfloat16)
        try:
            super().__init__(args)
        finally:
            training.engine_config, training.make_model = usual, made


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


# -- command line -----------------------------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="", help="of peak,budget,offload,longest,sp; default the first three")
    parser.add_argument("--row", nargs=4, metavar=("MODEL", "MICRO", "LENGTH", "ENGINES"), help="instead of the part's")
    parser.add_argument("--cpu", action="store_true", help="small shapes, without a GPU")
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--steps", type=int, default=0, help="timed, of each engine; default 10, with --cpu 2")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--side-by-side", action="store_true", help="all engines at once, in turns of a few steps")
    parser.add_argument("--budget", type=float, default=80.0, help="GB of GPU memory for the part longest")
    parser.add_argument("--lengths", default="", help="of the part longest; default 32768 to 524288")
    parser.add_argument("--deepspeed-path", default="")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.steps = args.steps or (2 if args.cpu else 10)
    args.lengths = args.lengths or ("512,1024" if args.cpu else "32768,65536,131072,262144,393216,524288")
    return args


def main() -> None:
    args = parse()
    if args.cpu:
        torch.cuda.is_available = lambda: False
    training.connect(args)
    rows: list[dict[str, Any]] = []
    for part in (args.parts or "peak,offload,longest").split(","):
        rows += longest(args) if part == "longest" else measure(part, args)
    if dist.get_rank() == 0 and args.json:
        where = "CPU" if args.cpu else torch.cuda.get_device_name()
        about = {
            "machine": f"{dist.get_world_size()} x {where}",
            "torch": torch.__version__,
            "date": time.strftime("%F"),
        }
        args.json.write_text(json.dumps({**about, "arguments": sys.argv[1:], "rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
