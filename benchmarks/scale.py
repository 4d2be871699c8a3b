"""What one rank of many processes costs its host: time to build and to step, memory, and the manifest of a checkpoint.

    OMP_NUM_THREADS=1 python benchmarks/scale.py --worlds 8,64,512,1024 --rounds 5 --json FILE

One process for each number of processes trains as rank 0 of so many, on torch's fake process group, which sends
nothing. They take turns, ``--rounds`` times, so ratios are of times of the same minutes; the shortest round counts.

The model has the units and parameters of Llama-2-7B (32 layers, 291 parameters) and a 32nd of its width: what the host
does depends on the number of units, parameters and collectives, not on elements. Blocks are not joined and matrices are
divided, as at full width. torch's fake all-gather and reduce-scatter go through all processes (at 1,024 processes 2.4
and 0.8 ms for a block's); in their place stand two to which the others bring zeros, for the time of the real ones is
the network's. The other ranks' parts of the checkpoint are made by the engine's own code with each rank put in its
place; their tensors are not written.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
import torch.distributed as dist
import training
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_hf.checkpoint.tensors import TensorFiles
from ds_hf.engine.comm import collectives, mesh

THIN = (128, 344, 32, 4, 4, 1000)  # hidden, intermediate, layers, heads, key and value heads, vocabulary
NORMS = 1000  # parameters with fewer elements stay whole, as DeepSpeed's threshold of 100,000 leaves norms of 4,096
STEPS = 3  # timed together
WARM_UP = 3
WAYS = {"stage 1": (1, None), "stage 2": (2, None), "stage 3": (3, None), "HSDP, inner 8": (3, 8)}


# -- one rank -----------------------------------------------------------------------------------------------------


class Rank:
    """Rank 0 of ``world``; its public methods are what the parent asks for."""

    def __init__(self, world: int, layers: int) -> None:
        training.MODELS["7b-thin"] = (*THIN[:2], layers, *THIN[3:])
        mesh.open_board = lambda *_: None  # memory shared by the ranks of a host: the fake store keeps nothing
        collectives._all_gather, collectives._reduce_scatter = _own_part_arrives, _own_part_stays
        dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
        self.world = world
        self.ids = torch.randint(0, 500, (1, 8))
        self.engine: Any = None

    def build(self, stage: int, inner: int | None) -> float:
        """Seconds of ``initialize``."""
        import ds_hf

        if self.engine is not None:
            self.engine.destroy()
            self.engine = None
        gc.collect()
        settings = SimpleNamespace(model="7b-thin", seq=8, device="cpu", checkpointing=False)
        model = training.make_model(settings, torch.float32)
        began = time.perf_counter()
        self.engine, *_ = ds_hf.initialize(model=model, config=_config(stage, inner))
        return time.perf_counter() - began

    def steps(self, count: int) -> float:
        """Milliseconds of one step, on average."""
        began = time.perf_counter()
        for _ in range(count):
            loss = self.engine(input_ids=self.ids, labels=self.ids).loss
            self.engine.backward(loss)
            self.engine.step()
        return (time.perf_counter() - began) / count * 1e3

    def calls(self) -> int:
        """Python functions called in a step."""
        count = 0

        def note(_frame: Any, event: str, _argument: Any) -> None:
            nonlocal count
            count += event == "call"

        gc.disable()  # finalizers come when they like
        sys.setprofile(note)
        self.steps(1)
        sys.setprofile(None)
        gc.enable()
        return count

    def memory(self, stage: int, inner: int | None) -> dict[str, int]:
        """Bytes after a few steps: what Python holds, tensors, and by how much the process has grown."""
        process = psutil.Process()
        resident = process.memory_info().rss
        tracemalloc.start()
        self.build(stage, inner)
        self.steps(WARM_UP)
        gc.collect()
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors()}
        return {"python": held, "tensors": sum(storages.values()), "grown": process.memory_info().rss - resident}

    def manifest(self) -> dict[str, float]:
        """Bytes of a checkpoint's manifest and of one rank's report, and seconds to make, write, read, and plan."""
        from ds_hf.checkpoint.format import MANIFEST
        from ds_hf.checkpoint.manifest import read_manifest, sealed
        from ds_hf.checkpoint.reports import complete
        from ds_hf.engine.checkpoint.describe import describe
        from ds_hf.engine.checkpoint.holders import find_holders
        from ds_hf.engine.checkpoint.live import flat_buffers
        from ds_hf.engine.checkpoint.resume import check_fit
        from ds_hf.engine.checkpoint.states import pieces

        engine = self.engine
        reports = [_report(engine, rank) for rank in range(self.world)]
        times = [time.perf_counter()]
        content = complete(describe(engine, "global_step3", "common.pt"), reports)
        times.append(time.perf_counter())
        with tempfile.TemporaryDirectory() as name:
            path = Path(name) / MANIFEST
            path.write_text(sealed(content), "utf-8")
            nbytes = path.stat().st_size
            with path.open("rb+") as file:
                os.fsync(file.fileno())
            times.append(time.perf_counter())
            manifest = read_manifest(name)
            times.append(time.perf_counter())
            fit = check_fit(engine, find_holders(engine), manifest, strict=True)
            files = _Plan(Path(name))
            for buffer in flat_buffers(engine):
                for piece in pieces(engine, buffer):
                    saved, target = fit.parameters[piece.name], torch.empty(piece.fragment.numel)
                    for state in saved.states:
                        files.fill(target, saved, state, piece.fragment.start, piece.cut)
            times.append(time.perf_counter())
        report = len(json.dumps(dataclasses.asdict(reports[self.world // 2]), default=str))
        spans = [later - sooner for sooner, later in itertools.pairwise(times)]
        names = ("complete_s", "write_s", "read_s", "plan_s")
        return {"nbytes": nbytes, "report_nbytes": report, **dict(zip(names, spans, strict=True))}


def _config(stage: int, inner: int | None) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": NORMS}
    if inner is not None:
        zero["mics_shard_size"] = inner
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": training.adam_parameters()},
        "zero_optimization": zero,
        "steps_per_print": 10**9,
        "ds_hf": {"join_blocks": False, "hang_timeout": 0},
    }


def _own_part_arrives(full: Tensor, shard: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """An all-gather to which the others bring zeros."""
    own = shard.clone()
    full.zero_()
    rank = dist.get_rank(group)
    full[rank * own.numel() : (rank + 1) * own.numel()].copy_(own)
    return SimpleNamespace(wait=lambda: None) if async_op else None


def _own_part_stays(shard: Tensor, full: Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
    """A reduce-scatter to which the others bring zeros."""
    begin = dist.get_rank(group) * shard.numel()
    shard.copy_(full[begin : begin + shard.numel()])
    return SimpleNamespace(wait=lambda: None) if async_op else None


def _tensors() -> Iterator[Tensor]:
    for each in gc.get_objects():
        if issubclass(type(each), Tensor):
            yield each


class _Plan(TensorFiles):
    """Finds what to read where, and reads zeros."""

    def piece(self, file: str, key: str) -> Any:
        """Of any file."""
        return SimpleNamespace(read=lambda start, stop: torch.zeros(stop - start))


def _report(engine: Any, rank: int) -> Any:
    """What the rank would report of its part, made by the engine's own code with this process in its place."""
    from ds_hf.checkpoint.digest import digests_of
    from ds_hf.checkpoint.files import model_states_name, optimizer_states_name, tensors_name
    from ds_hf.checkpoint.reports import RankReport
    from ds_hf.engine.checkpoint.contents import live_entries
    from ds_hf.engine.checkpoint.holders import Holders
    from ds_hf.engine.checkpoint.live import flat_buffers, random_states, world_of

    report, before = RankReport(), [buffer.axis for buffer in flat_buffers(engine)]
    holders = Holders(dataclasses.replace(world_of(engine), rank=rank), alike=True)
    try:
        for buffer in flat_buffers(engine):
            buffer.axis = dataclasses.replace(buffer.axis, rank=rank)
        entries = live_entries(engine, holders, report, [])
    finally:
        for buffer, axis in zip(flat_buffers(engine), before, strict=True):
            buffer.axis = axis
    for entry in entries.values():
        for stretch in entry.stretches:
            report.sums.setdefault(stretch.name, {})[stretch.state] = rank, rank
    names = [tensors_name(rank), optimizer_states_name(rank, bf16=True)]
    names += [model_states_name(rank, sharded=engine.plan.shards_parameters)]
    report.files = dict.fromkeys(names, 10**9)
    report.checksums = dict.fromkeys(names, "0" * 32)
    report.rng = digests_of(random_states())
    report.options = [digests_of({k: v for k, v in g.items() if k != "params"}) for g in engine.optimizer.param_groups]
    return report


def _serve(world: int, layers: int) -> None:
    """Answer the parent, one line of JSON a question."""
    told, sys.stdout = sys.stdout, sys.stderr
    rank = Rank(world, layers)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        told.write(json.dumps(getattr(rank, name)(*arguments)) + "\n")
        told.flush()


# -- all of them --------------------------------------------------------------------------------------------------


class Child:
    """A process that is one rank of ``world``."""

    def __init__(self, world: int, layers: int) -> None:
        command = [sys.executable, __file__, "--serve", str(world), "--layers", str(layers)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, name: str, *arguments: Any) -> Any:
        """Call a method of ``Rank``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"a rank ended with exit code {self._process.wait()}; its error stands above")
        return json.loads(answer)

    def end(self) -> None:
        """No more questions."""
        self._process.communicate()


def measure(worlds: list[int], layers: int, rounds: int, ways: list[str]) -> list[dict[str, Any]]:
    """One row for each way to divide states and number of processes."""
    children = {world: Child(world, layers) for world in worlds}
    rows = []
    for way in ways:
        builds: dict[int, list[float]] = {world: [] for world in worlds}
        for _ in range(2):
            for world, child in children.items():
                builds[world].append(child.ask("build", *WAYS[way]))
        steps: dict[int, list[float]] = {world: [] for world in worlds}
        for child in children.values():
            child.ask("steps", WARM_UP)
        for _ in range(rounds):
            for world, child in children.items():
                steps[world].append(child.ask("steps", STEPS))
        for world, child in children.items():
            row = {"way": way, "world": world, "initialize_s": min(builds[world]), "step_ms": min(steps[world])}
            row |= {"ratio": row["step_ms"] / min(steps[worlds[0]]), "rounds_ms": steps[world]}
            row |= {"calls": child.ask("calls")}
            if WAYS[way][1] is None:
                row["manifest"] = child.ask("manifest")
            row["memory"] = child.ask("memory", *WAYS[way])
            rows.append(row)
            print(_line(row), flush=True)
    for child in children.values():
        child.end()
    return rows


def _line(row: dict[str, Any]) -> str:
    memory, made = row["memory"], row.get("manifest")
    text = f"{row['way']:<14} {row['world']:>5} {row['initialize_s']:>8.2f} {row['step_ms']:>8.1f} {row['ratio']:>6.2f}"
    text += f" {row['calls']:>8} {memory['tensors'] / 2**20:>8.1f} {memory['python'] / 2**20:>8.1f}"
    if made:
        text += f" {made['report_nbytes'] / 2**10:>7.1f} {made['nbytes'] / 2**20:>8.2f} {made['complete_s']:>6.2f}"
        text += f" {made['write_s']:>6.2f} {made['read_s']:>6.2f} {made['plan_s']:>6.2f}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default="8,64,512,1024", help="the first is what the others are compared with")
    parser.add_argument("--ways", default=",".join(WAYS).replace("HSDP, inner 8", "HSDP"))
    parser.add_argument("--layers", type=int, default=THIN[2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        _serve(args.serve, args.layers)
        return
    ways = [way for way in WAYS if way.split(",")[0] in args.ways.split(",")]
    print(
        f"{'':<14} {'world':>5} {'init s':>8} {'step ms':>8} {'ratio':>6} {'calls':>8} {'tensors':>8} {'python':>8}",
        end="",
    )
    print(f" {'report':>7} {'manifest':>8} {'compl.':>6} {'write':>6} {'read':>6} {'plan s':>6}")
    print(f"{'':<45} {'':>8} {'MiB':>8} {'MiB':>8} {'KiB':>7} {'MiB':>8}")
    rows = measure([int(world) for world in args.worlds.split(",")], args.layers, args.rounds, ways)
    if args.json:
        about = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        about |= {"torch": torch.__version__, "arguments": sys.argv[1:], "threads": torch.get_num_threads()}
        args.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
