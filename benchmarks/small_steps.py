"""Step time of a small model with all engines alive at once, in turns of three steps.

    torchrun --nproc-per-node 2 benchmarks/small_steps.py --model tiny --seq 128 --stage 2 --rounds 60 \\
        --engines ds_hf,deepspeed,floor --deepspeed-path /folder/with/deepspeed

``training.py`` builds one engine after another, and what a shared machine does in between is taken for a difference of
the engines: the same one varies by a fifth. Here it falls on all alike. Of each, milliseconds of a step on rank 0: the
median, the least, and the processor's time. The options are those of ``training.py``.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time

import torch
import torch.distributed as dist
import training

TOGETHER = 3  # steps of a turn


def main() -> None:
    args = training.parse()
    training.connect(args)
    engines = {name: training.ENGINES[name](args) for name in args.engines.split(",")}
    steps = args.warmup + TOGETHER * args.rounds
    data = iter([training.tokens(args, step) for step in range(steps * len(engines))])
    for engine in engines.values():
        for _ in range(args.warmup):
            engine.step(next(data))
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    gc.collect()
    gc.disable()
    for _ in range(args.rounds):
        for name, engine in engines.items():
            for _ in range(TOGETHER):
                batches = next(data)
                dist.barrier()
                wall, cpu = time.perf_counter(), time.process_time()
                engine.step(batches)
                engine.finish()
                training.synchronize(args)
                times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    records = [row(name, values) for name, values in times.items()]
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} processes, torch {torch.__version__}: {' '.join(sys.argv[1:])}")
        for record in records:
            print("{name:<10} median {median:8.2f}   least {least:8.2f}   processor {processor:8.2f}".format(**record))
        if args.json:
            about = {"torch": torch.__version__, "date": time.strftime("%F"), "arguments": sys.argv[1:]}
            args.json.write_text(json.dumps({**about, "records": records}, indent=1) + "\n")
    dist.destroy_process_group()


def row(name: str, values: list[tuple[float, float]]) -> dict[str, str | float]:
    wall, cpu = ([1e3 * value for value in column] for column in zip(*values, strict=True))
    return {
        "name": name,
        "median": round(statistics.median(wall), 2),
        "least": round(min(wall), 2),
        "processor": round(statistics.median(cpu), 2),
    }


if __name__ == "__main__":
    main()
