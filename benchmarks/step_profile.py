"""Where the time of a training step goes: kernels and copies by stream and kind, and when the main stream idles.

    torchrun --nproc-per-node 2 benchmarks/step_profile.py --model 1b3 --stage 2 --engines ds_hf

Takes the arguments of ``benchmarks/training.py``, whose engines, models and data these are, and with engines that are
named as there (``ds_hf+stream=auto``) those of ``benchmarks/offload.py``, with ``--tensor`` those of
``benchmarks/tensor_parallel.py``. Rank 0's GPU is shown, and how busy the main stream of the others is: a GPU that is
faster waits for one that is slower. All times are milliseconds of one step, on average over those profiled. Where much
passes between host and device, the last but one also comes in slices.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import training
from torch.profiler import ProfilerActivity, profile

WARM_UP, STEPS = 5, 4
SHOWN, LEAST_GAP_US = 28, 20
SLICE_US, LEAST_COPIED = 20_000, 1 << 30  # bytes of a step
WAYS = {"HtoD": "up", "DtoH": "down"}

Event = dict[str, Any]


def events_of(name: str, args: argparse.Namespace) -> list[Event]:
    """What ran on this rank's GPU in ``STEPS`` steps."""
    engine = training.ENGINES[name](args)
    data = [training.tokens(args, step) for step in range(WARM_UP + STEPS)]
    for batches in data[:WARM_UP]:
        engine.step(batches)
    torch.cuda.synchronize()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for batches in data[WARM_UP:]:
            engine.step(batches)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        found = json.loads(path.read_text())["traceEvents"]
    engine.free()
    return [event for event in found if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]


def show(name: str, events: list[Event]) -> None:
    """Print the table."""
    took: dict[tuple[int, str], list[float]] = collections.defaultdict(list)
    for event in events:
        took[event["args"].get("stream"), event["name"][:70]].append(event["dur"])
    streams: dict[int, float] = collections.defaultdict(float)
    for (stream, _), times in took.items():
        streams[stream] += sum(times)
    busiest = sorted(streams.items(), key=lambda item: -item[1])
    span = max(e["ts"] + e["dur"] for e in events) - min(e["ts"] for e in events)
    print(f"== {name}: {span / STEPS / 1e3:.1f} ms a step; streams: ", end="")
    print(", ".join(f"{stream}: {total / STEPS / 1e3:.1f}" for stream, total in busiest))
    for (stream, kind), times in sorted(took.items(), key=lambda item: -sum(item[1]))[:SHOWN]:
        print(f"  stream {stream:<3} {sum(times) / STEPS / 1e3:8.2f} ms {len(times) / STEPS:7.1f} x  {kind}")
    main = main_stream(events)
    gaps, end, last = [], 0.0, ""
    for event in sorted((e for e in events if e["args"].get("stream") == main), key=lambda e: e["ts"]):
        if end and event["ts"] - end > LEAST_GAP_US:
            gaps.append((event["ts"] - end, last, event["name"]))
        if event["ts"] + event["dur"] > end:
            end, last = event["ts"] + event["dur"], event["name"]
    print(f"  gaps over {LEAST_GAP_US} us on stream {main}: {sum(gap for gap, *_ in gaps) / STEPS / 1e3:.2f} ms")
    for gap, before, after in sorted(gaps, reverse=True)[:10]:
        print(f"    {gap:6.0f} us after {before[:45]} before {after[:45]}")


def slices(events: list[Event]) -> list[tuple[float, float, float]]:
    """Of the last step but one: share of each slice in which the main stream is busy, and GB/s up and down in it.

    A copy counts where it was on its way, evenly.
    """
    main = main_stream(events)
    begin, end = min(e["ts"] for e in events), max(e["ts"] + e["dur"] for e in events)
    length = (end - begin) / STEPS
    begin, end = end - 2 * length, end - length
    found = [[0.0, 0.0, 0.0] for _ in range(int((end - begin) // SLICE_US) + 1)]
    for event in events:
        way = next((way for kind, way in WAYS.items() if kind in event["name"]), "")
        if not way and event["args"].get("stream") != main:
            continue
        column = ["", "up", "down"].index(way)
        amount = event["args"].get("bytes", 0) / max(event["dur"], 1e-3) / 1e3 if way else 1.0
        first, last = event["ts"] - begin, event["ts"] + event["dur"] - begin
        for index in range(max(0, int(first // SLICE_US)), min(len(found), int(last // SLICE_US) + 1)):
            inside = min(last, (index + 1) * SLICE_US) - max(first, index * SLICE_US)
            found[index][column] += amount * max(0.0, inside) / SLICE_US
    return [(busy, up, down) for busy, up, down in found]


def show_copies(events: list[Event]) -> None:
    """What passes between host and device, if it is much."""
    for kind, way in WAYS.items():
        copies = [event for event in events if kind in event["name"] and "bytes" in event["args"]]
        nbytes, took = sum(e["args"]["bytes"] for e in copies) / STEPS, sum(e["dur"] for e in copies) / STEPS
        if nbytes < LEAST_COPIED:
            return
        print(f"  {way}: {nbytes / 1e9:.2f} GB in {took / 1e3:.1f} ms, {nbytes / took / 1e3:.1f} GB/s while it lasts")
    print(f"  the last step but one in slices of {SLICE_US // 1000} ms: main stream busy, GB/s up, down")
    for index, (busy, up, down) in enumerate(slices(events)):
        print(f"    {index * SLICE_US // 1000:6d} {busy:6.0%} {up:6.1f} {down:6.1f}")


def main_stream(events: list[Event]) -> int:
    """The stream that computes most."""
    streams: dict[int, float] = collections.defaultdict(float)
    for event in events:
        streams[event["args"].get("stream")] += event["dur"] if event["cat"] == "kernel" else 0
    return max(streams, key=streams.__getitem__)


def busy_ms(events: list[Event]) -> float:
    """Milliseconds a step in which the main stream runs something."""
    main = main_stream(events)
    return sum(float(event["dur"]) for event in events if event["args"].get("stream") == main) / STEPS / 1e3


def main() -> None:
    if any("+" in word for word in sys.argv):
        importlib.import_module("offload")  # its engines and arguments take the place of training's
    if "--tensor" in sys.argv:
        sys.argv[sys.argv.index("--tensor")] = "--stage=1"
        importlib.import_module("tensor_parallel").install()
    args = training.parse()
    if not torch.cuda.is_available():
        raise SystemExit("this needs GPUs: on a CPU, profile the loop of benchmarks/training.py itself")
    training.connect(args)
    for name in args.engines.split(","):
        events = events_of(name, args)
        busy: list[float | None] = [None] * dist.get_world_size()
        dist.all_gather_object(busy, busy_ms(events))
        if dist.get_rank() == 0:
            show(name, events)
            show_copies(events)
            print("  main stream busy on each rank: " + ", ".join(f"{each:.1f} ms" for each in busy))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
