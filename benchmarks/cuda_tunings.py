"""For choosing how a CUDA optimizer kernel is shaped (``Tunings`` in ds_hf/engine/ops/cuda_launch.py); needs a GPU.

    python benchmarks/cuda_tunings.py lamb_stream --vary held=3,4 --vary threads=736,992 --json tunings.json

Every combination of what is varied is set against the tuning in use: its results are checked, then all take turns at
the jobs of ``optimizers.py`` within one run, and the median over the rounds counts. ``share_of_copy`` is as there.
Tunings that do not compile, do not fit or are wrong are named and left out; one that never ends ends the run.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from optimizers import BYTES, Tensors, copy_jobs, ds_hf_jobs, seconds

from ds_hf.engine.ops import cuda, cuda_lamb, cuda_launch
from ds_hf.engine.ops.cuda_launch import Gpu, Tuning
from tests.helpers import ops_cases as cases

JOBS = {
    "update": ["adamw", "adamw+clip"],
    "norm": ["norm", "adamw+clip"],
    "lamb": ["lamb"],
    "lamb_fused": ["lamb"],
    "lamb_stream": ["lamb"],
}
# Tails, many entries, one that is larger than what the chip keeps.
NUMELS = [4097, 0, 1_000_003, 7, *[2048] * 60, 30_000_001]


def candidates(now: Tuning, varied: list[str]) -> dict[str, Tuning]:
    """The tuning in use and, by what differs, all combinations of ``varied``: ``["held=3,4", ...]``."""
    names, texts = zip(*(each.split("=") for each in varied), strict=True) if varied else ((), ())
    found = {"in use": now}
    for values in product(*([int(value) for value in text.split(",")] for text in texts)):
        own = dict(zip(names, values, strict=True))
        if (tuning := replace(now, **own)) != now:
            found[" ".join(f"{name}={value}" for name, value in own.items())] = tuning
    return found


def refused(*_: Any, **__: Any) -> None:
    raise RuntimeError("it does not fit: another kernel would be taken")


# Of cuda_lamb, so that LAMB of all sizes takes one kernel.
ONLY: dict[str, dict[str, Any]] = {
    "lamb": {"STREAMED_NUMEL": -1, "_fused": lambda *_: False},
    "lamb_fused": {"STREAMED_NUMEL": -1, "lamb_moments_": refused},
    "lamb_stream": {"STREAMED_NUMEL": 1 << 60, "_fused": refused},
}


@contextmanager
def used(machine: Gpu, kind: str, tuning: Tuning) -> Iterator[None]:
    """``tuning`` for the kernels of ``kind``."""
    tunings = replace(machine.tunings, **{kind: tuning})
    faulthandler.dump_traceback_later(90, exit=True)  # blocks that wait for what never comes
    with ExitStack() as stack:
        stack.callback(faulthandler.cancel_dump_traceback_later)
        stack.enter_context(patch.object(machine, "tunings", tunings))
        for name, other in ONLY.get(kind, {}).items():
            stack.enter_context(patch.object(cuda_lamb, name, other))
        yield


def check(kind: str) -> None:
    """Raises if results are wrong, or others the second time."""
    first, again = (cases.make(NUMELS, "cuda", grad=torch.bfloat16, out=torch.bfloat16) for _ in range(2))
    if kind == "norm":
        cases.check_norm(cuda, first.grads)
    elif kind == "update":
        cases.check_update(cuda, "adamw", first)
        cases.call_update(cuda, "adamw", again, None)
    else:
        cases.check_lamb(cuda, first, fused=True)
        cases.call_lamb(cuda, again, None, fused=True)
    assert all(map(torch.equal, first.written(), again.written())), "not the same bits the second time"


def measure(machine: Gpu, kind: str, tunings: dict[str, Tuning], numel: int, rounds: int) -> list[dict[str, Any]]:
    """A record for each tuning and job."""
    tensors = Tensors(numel, "cuda")
    jobs, copy = ds_hf_jobs(tensors), copy_jobs(tensors)["copy"]
    times: dict[tuple[str, str], list[float]] = {}
    for turn in range(rounds + 1):
        for name, tuning in tunings.items():
            with used(machine, kind, tuning):
                for job in JOBS[kind]:
                    times.setdefault((name, job), []).append(seconds(jobs[job], "cuda", 20 if turn else 3))
        times.setdefault(("", "copy"), []).append(seconds(copy, "cuda", 20 if turn else 3))
    middle = {key: statistics.median(values[1:]) for key, values in times.items()}  # the first warms up
    copied = middle.pop(("", "copy")) / BYTES["copy"]
    return [
        {
            "kind": kind,
            "tuning": name,
            "op": job,
            "numel": numel,
            "us": round(own * 1e6, 2),
            "share_of_copy": round(copied * BYTES[job] / own, 3),
        }
        for (name, job), own in middle.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=JOBS)
    parser.add_argument("--vary", action="append", default=[], metavar="NAME=NUMBER,...", help="a field of Tuning")
    parser.add_argument("--numel", default="1000000,16000000,500000000")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available() or (reason := cuda.available()):
        parser.error("there is no CUDA device" if not torch.cuda.is_available() else str(reason))
    machine = cuda_launch.gpu(torch.cuda.current_device())
    try:
        tunings = candidates(getattr(machine.tunings, args.kind), args.vary)
    except (TypeError, ValueError) as error:
        parser.error(f"--vary {' '.join(args.vary)}: {error}")
    for name, tuning in list(tunings.items()):
        print(f"checking {name}", flush=True)
        try:
            with used(machine, args.kind, tuning):
                check(args.kind)
        except Exception as error:
            print(f"  left out: {str(error).strip()[:300]}")
            del tunings[name]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, median of {args.rounds} rounds")
    records = []
    for numel in map(int, args.numel.split(",")):
        found = measure(machine, args.kind, tunings, numel, args.rounds)
        torch.cuda.empty_cache()
        for row in sorted(found, key=lambda row: (row["op"], row["us"])):
            print(f"{row['op']:11} {numel:>11} {row['us']:>10.2f} us {row['share_of_copy']:>7.1%}  {row['tuning']}")
        records += found
    if args.json:
        args.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
