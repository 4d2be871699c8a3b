"""The two slow links of docs/profiling.md: what the report says of a run, and the same run with what it suggests.

    sudo python benchmarks/slow_link_report.py [--rounds 2]

Two network namespaces with a process of one thread each, as in slow_link.py: needs Linux, root, `ip` and `tc`. 2.1 M
parameters in fp32. The files take turns, so that each has its share of whatever else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1]))

from benchmarks.slow_link import Hosts, missing  # noqa: E402

WIDTH, DEPTH, STEPS = 256, 4, 12
CASES: dict[str, tuple[int, list[dict[str, Any]]]] = {  # Mbit/s, and the files that take turns
    "the wrong stage": (
        200,
        [{"gradient_accumulation_steps": 4, "zero_optimization": {"stage": stage}} for stage in (3, 1)],
    ),
    "fewer bits": (
        50,
        [{"zero_optimization": {"stage": 1}}, {"zero_optimization": {"stage": 1}, "ds_hf": {"wire": {"gradients": 8}}}],
    ),
}


def work(file: str) -> None:
    """A process: train as ``file`` says."""
    import torch

    import ds_hf
    from tests.helpers.models import TinyLM, token_batches

    torch.set_num_threads(1)
    torch.manual_seed(0)
    engine = ds_hf.initialize(model=TinyLM(width=WIDTH, depth=DEPTH), config=file)[0]
    while engine.global_steps < STEPS:
        engine.backward(engine(token_batches(1, 16)))
        engine.step()
    engine.destroy()


def measure(hosts: Hosts, config: dict[str, Any], folder: Path) -> Any:
    """Train with ``config`` on both hosts; the verdict of its report."""
    from ds_hf.profile.report import write_report

    folder.mkdir()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        **config,
        "ds_hf": {**config.get("ds_hf", {}), "report": str(folder), "report_steps": "all"},
    }
    file = folder / "ds.json"
    file.write_text(json.dumps(config))
    started = []
    try:
        for rank, (name, link) in enumerate(zip(hosts.names, hosts.links, strict=True)):
            environ = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            environ |= {"MASTER_ADDR": "10.251.0.1", "MASTER_PORT": "29779", "GLOO_SOCKET_IFNAME": link}
            words = ["ip", "netns", "exec", name, sys.executable, str(HERE), "--worker", str(file)]
            environ = {**os.environ, **environ, "OMP_NUM_THREADS": "1"}
            started.append(subprocess.Popen(words, env=environ, stdout=subprocess.DEVNULL))
        if [process.wait(300) for process in started] != [0, 0]:
            raise RuntimeError("a process failed: see above")
    finally:
        for process in started:
            process.kill()
            process.wait()
    return write_report(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
        return
    if reason := missing():
        sys.exit(f"slow_link_report: {reason}")
    with Hosts() as hosts, tempfile.TemporaryDirectory() as scratch:
        for case, (rate, files) in CASES.items():
            hosts.limit(rate)
            print(f"\n{case}, {rate} Mbit/s", flush=True)
            for turn in range(options.rounds):
                for number, config in enumerate(files):
                    verdict = measure(hosts, config, Path(scratch) / f"{case[-4:]}{turn}{number}")
                    a = verdict.analysis
                    shown = ", ".join(f"{kind} {a.kinds.get(kind, 0.0) * 1e3:,.0f}" for kind in ("gather", "reduction"))
                    print(f"{json.dumps(config):90s} step {a.seconds * 1e3:,.0f} ms: {shown}", flush=True)
                    if turn == 0 and number == 0:
                        print(*(f"    {line}" for line in verdict.lines()), sep="\n", flush=True)


if __name__ == "__main__":
    main()
