"""What the engine costs the host at two commits: processor time of a step, as a ratio of turns taken in one run.

    python -m tests.tools.compare_host_cost 88fbf40 [HEAD]

One process for each commit measures with its own ``benchmarks/host_cost.py``; they take turns, ``ROUNDS`` times, each
beginning every other time, and the shortest step of each counts. Times are of the process (``time.process_time``), so
other programs disturb them less; where they still do, the number of function calls in a step is the same each time.
"""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

STAGES, ROUNDS = (0, 1, 2, 3), 6
ARGUMENTS = ["--model", "t24", "--seq", "8", "--rounds", "20"]


def child_main(folder: str) -> None:
    """Of the commit in ``folder``: measures the stage that each line of standard input names."""
    sys.path.insert(0, f"{folder}/benchmarks")
    sys.argv = ["host_cost.py", *ARGUMENTS]
    import host_cost
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    host_cost.STEPS = 1  # the shorter, the more often a step is not disturbed
    host_cost.time = SimpleNamespace(perf_counter=time.process_time)
    timed, calls = host_cost.milliseconds, [0]

    def counted(step: Any, device: str) -> float:
        if step.__name__ == "step" and not calls[0]:
            with cProfile.Profile() as profile:
                step()
            calls[0] = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
        return float(timed(step, device))

    host_cost.milliseconds = counted
    args = host_cost.parse()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        calls[0] = 0
        row = host_cost.measure(args, int(line), joined=True)
        print(json.dumps({**row, "calls": calls[0]}), file=answers, flush=True)


class Child:
    """A process that measures ``commit``."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        environment = {**os.environ, "PYTHONPATH": f"{folder}:{folder}/ds_hf/compat", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--child", str(folder)],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        stack.callback(self.process.wait, 60)
        stack.callback(self.process.kill)
        self.least: dict[int, float] = {}
        self.calls: dict[int, int] = {}

    def turn(self, stage: int) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{stage}\n")
        self.process.stdin.flush()
        row: dict[str, Any] = json.loads(self.process.stdout.readline())
        self.calls[stage] = row["calls"]
        self.least[stage] = min(self.least.get(stage, float("inf")), row["engine_ms"])


def main() -> None:
    from tests.tools.compare_commits import checked_out  # not in the children: older commits have no such module

    commits = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "HEAD"
    with tempfile.TemporaryDirectory() as root, ExitStack() as stack:
        folders = [stack.enter_context(checked_out(commit, Path(root, f"{i}"))) for i, commit in enumerate(commits)]
        before, after = (Child(folder, stack) for folder in folders)
        for number in range(ROUNDS):
            for stage in STAGES:
                for child in (before, after) if number % 2 else (after, before):
                    child.turn(stage)
    print(f"| stage | {commits[0]}: ms, calls of a step | {commits[1]} | ratios |\n|---|---|---|---|")
    for stage in STAGES:
        (old, calls), (new, now) = ((child.least[stage], child.calls[stage]) for child in (before, after))
        ratios = f"{new / old:.3f}, {now / calls:.3f}"
        print(f"| {stage} | {old:.2f}, {calls:,} | {new:.2f}, {now:,} | {ratios} |")


if __name__ == "__main__":
    child_main(sys.argv[2]) if sys.argv[1] == "--child" else main()
