"""Steps between two "hosts" over a slow link: bytes by the interface's counters, time by the clock.

    sudo python benchmarks/slow_link.py [--rates 100 200 1000] [--ranks 2] [--out FILE.jsonl]

Two network namespaces with some processes each, a veth pair between them and tc's token bucket on both ends: needs
Linux, root, `ip` and `tc`. Each way trains the same 4.2 M parameters in bf16 over gloo. Bytes are compared with the
formula of a ring or of direct sends; times with those of an open link plus what the bytes take at the rate.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ELEMENTS, WARM, STEPS = 4 * 1024 * 1024, 3, 5
OPEN = 10_000  # Mbit/s
Config = dict[str, Any]


def missing() -> str | None:
    """Why there can be no such link here."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{', '.join(absent)} is not installed (iproute2)" if absent else None


def ways(ranks: int) -> dict[str, tuple[Config, float]]:
    """Configurations, and the bytes an element that a host sends in a step; ``ranks`` on each of two hosts."""
    world, eight, four = 2 * ranks, 1 + 4 / 256, 0.5 + 4 / 256
    one = 1 / 8 + 4 / 4096
    crossing = ranks * ranks / world  # rows that a host sends the other, over the rows of a tensor
    ring = 2 * (world - 1) / world * 2

    def zero(stage: int, keys: Config | None = None, **wire: Any) -> Config:
        return {"zero_optimization": {"stage": stage, **(keys or {})}, "ds_hf": {"wire": wire}}

    def optimizer(name: str, **params: Any) -> Config:
        return {"optimizer": {"type": name, "params": {"lr": 1e-3, **params}}}

    again = 1 - 1 / (ELEMENTS >> 20)  # the last layer of a forward stays for backward
    gathered = (world - 1) / world * 2  # of 16 bits in a ring
    packed = (world - 1) / world * eight
    # Gloo reduce-scatters by an all-reduce; two processes send each other what that one keeps, of so small gradients.
    summed = gathered if world == 2 else ring
    return {
        "Adam, stage 0 (all-reduce of bf16)": (optimizer("Adam"), ring),
        "1-bit Adam, stage 0": (optimizer("OneBitAdam", freeze_step=1), crossing * one + (world - 1) / world * one),
        "stage 2 (bf16)": (zero(2), summed + gathered),
        "stage 2, 8-bit gradients, one hop": (zero(2, gradients=8, first_hop=1), crossing * eight + gathered),
        "stage 2, 8-bit gradients, two hops": (zero(2, gradients=8), ranks / world * eight + gathered),
        "stage 2, 4-bit gradients, two hops": (zero(2, gradients=4), ranks / world * four + gathered),
        "stage 3 (bf16)": (zero(3), summed + (1 + again) * gathered),
        "stage 3, 8-bit weights": (zero(3, parameters=8), summed + (1 + again) * packed),
        "stage 3, 8-bit weights and gradients": (
            zero(3, parameters=8, gradients=8),
            ranks / world * eight + (1 + again) * packed,
        ),
    }


# -- a process ---------------------------------------------------------------------------------------------------------


def sent(interface: str) -> int:
    """Bytes that the interface has sent."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith(f"{interface}:"):
            return int(line.split(":")[1].split()[8])
    raise LookupError(interface)


def work(ranks: int) -> None:
    """Run every way; rank 0 prints a line of JSON for each."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import ds_hf

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    interface = os.environ["GLOO_SOCKET_IFNAME"]

    class Model(nn.Module):
        _no_split_modules = ("Linear",)

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(ELEMENTS >> 20))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                hidden = layer(hidden).relu()
            return hidden.float().square().mean()

    for name, (keys, expected) in ways(ranks).items():
        torch.manual_seed(0)
        adam = {"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}
        config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, **adam, **keys}
        engine, *_ = ds_hf.initialize(model=Model(), config=config)
        seconds, nbytes = [], []
        for step in range(WARM + STEPS):
            dist.barrier()
            before, begin = sent(interface), time.perf_counter()
            engine.backward(engine(torch.randn(1, 1024, dtype=torch.bfloat16)))
            engine.step()
            for unit in engine.units:
                for buffer in unit.buffers:
                    if not buffer.sharded:
                        buffer.gather()  # what was left for the next forward
            dist.barrier()
            if step >= WARM:
                seconds.append(time.perf_counter() - begin)
                nbytes.append((sent(interface) - before) / ELEMENTS)
        engine.destroy()
        if dist.get_rank() == 0:
            row = {"way": name, "bytes": statistics.median(nbytes), "formula": expected}
            print(json.dumps({**row, "seconds": statistics.median(seconds)}), flush=True)
    dist.destroy_process_group()


# -- two hosts ---------------------------------------------------------------------------------------------------------


class Hosts:
    """Two namespaces joined by a link."""

    def __init__(self) -> None:
        self.names = [f"slow{os.getpid()}{end}" for end in "ab"]
        self.links = [f"sl{os.getpid() % 100000}{end}" for end in "ab"]

    def __enter__(self) -> Hosts:
        for name in self.names:
            self._run("ip", "netns", "add", name)
        (a, b), (one, other) = self.names, self.links
        self._run("ip", "link", "add", one, "netns", a, "type", "veth", "peer", "name", other, "netns", b)
        for number, (name, link) in enumerate(zip(self.names, self.links, strict=True), start=1):
            self._run("ip", "-n", name, "addr", "add", f"10.251.0.{number}/24", "dev", link)
            for each in (link, "lo"):
                self._run("ip", "-n", name, "link", "set", each, "up")
        return self

    def __exit__(self, *error: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def limit(self, rate: int) -> None:
        """Let the link carry ``rate`` Mbit/s each way."""
        for name, link in zip(self.names, self.links, strict=True):
            bucket = ("rate", f"{rate}mbit", "burst", "256kb", "latency", "200ms")
            self._run("tc", "-n", name, "qdisc", "replace", "dev", link, "root", "tbf", *bucket)

    def measure(self, ranks: int, timeout: float) -> list[Config]:
        """What rank 0 prints; processes end with this call."""
        started = []
        try:
            for rank in range(2 * ranks):
                host = rank // ranks
                environ = {
                    **os.environ,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(2 * ranks),
                    "LOCAL_RANK": str(rank % ranks),
                    "LOCAL_WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": "10.251.0.1",
                    "MASTER_PORT": "29777",
                    "GLOO_SOCKET_IFNAME": self.links[host],
                    "OMP_NUM_THREADS": "1",
                }
                words = ["ip", "netns", "exec", self.names[host], sys.executable, str(HERE), "--worker", str(ranks)]
                out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
                started.append(subprocess.Popen(words, env=environ, stdout=out, text=True))
            printed, _ = started[0].communicate(timeout=timeout)
            if started[0].returncode:
                raise RuntimeError("a process failed: see above")
            return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
        finally:
            for process in started:
                process.kill()
                process.wait()

    @staticmethod
    def _run(*words: str) -> None:
        subprocess.run(words, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=int, nargs="+", default=[100, 200, 1000], help="Mbit/s")
    parser.add_argument("--ranks", type=int, default=2, help="processes on each host")
    parser.add_argument("--timeout", type=float, default=600)
    parser.add_argument("--out", type=Path, help="append lines of JSON")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
        return
    if reason := missing():
        sys.exit(f"slow_link: {reason}")
    with Hosts() as hosts:
        own: dict[str, float] = {}
        for rate in (OPEN, *options.rates):
            hosts.limit(rate)
            print(f"\n{rate} Mbit/s, two hosts of {options.ranks} processes", flush=True)
            for row in hosts.measure(options.ranks, options.timeout):
                if rate == OPEN:
                    own[row["way"]] = row["seconds"]
                row["predicted"] = own[row["way"]] + row["bytes"] * ELEMENTS * 8e-6 / rate
                row |= {"rate": rate, "ranks": options.ranks, "elements": ELEMENTS}
                print(
                    f"{row['way']:40s} {row['bytes']:6.3f} B/element (formula {row['formula']:6.3f})"
                    f"   {row['seconds']:7.3f} s (bytes say {row['predicted']:7.3f})",
                    flush=True,
                )
                if options.out is not None:
                    with options.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
