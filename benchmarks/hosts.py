"""Two "hosts" on one machine with GPUs: what goes between them goes over sockets, and is counted.

    python benchmarks/hosts.py --hosts 2 --json FILE -- --model 1b3 --micro-batch 4 --seq 2048 --stage 3 \\
        --engines ds_hf,ds_hf+hpz,ds_hf+qwz,ds_hf+qgz,ds_hf+zero++,ds_hf+mics
    python benchmarks/hosts.py --hosts 2 --experts --json FILE -- --model qwen3 --layers 6 --stage 2 \\
        --engines ds_hf+local,ds_hf+inside,ds_hf+ep

Each host is a ``torchrun`` of its own that sees its share of the GPUs. NCCL is told different ``NCCL_HOSTID``s, so that
within a host it copies through the GPUs' links and between hosts through the loopback interface, whose counters give
the bytes; so does the engine, as a process cannot see the other host's GPUs. The rest is ``training.py``, or with
``--experts`` ``experts.py``, whose options come after ``--``.

Ways of this script, beside those: *+hpz* keeps a second shard of 16-bit weights within a host, *+qwz* sends weights in
8 bits, *+qgz* gradients, *+zero++* all three, *+mics* divides states within a host alone, *+1bit* is 1-bit Adam at
stage 0 after its warm-up; *ds_hf2* is stage 2; *+inside* divides experts within a host, *+ep* over all.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve()


def sent() -> int:
    """Bytes that the loopback interface has sent."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split(":")[1].split()[8])
    raise LookupError("there is no interface lo")


# -- a process --------------------------------------------------------------------------------------------------------


def counted(base: Any) -> Any:
    """``base``, with the bytes a host sent in a step of those that are timed."""

    class Counted(base):  # type: ignore[misc]
        calls, first, found = 0, 0, 0.0

        def step(self, batches: Any) -> Any:
            if self.calls == self.args.warmup:  # the device is at rest
                self.first = sent()
            self.calls += 1
            return super().step(batches)

        def free(self) -> None:
            steps = self.calls - self.args.warmup
            Counted.found = (sent() - self.first) / max(steps, 1) / int(os.environ["DS_HF_HOSTS"])
            super().free()

    return Counted


def worker(experts: bool) -> None:
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    sys.path.insert(0, str(HERE.parent))
    import experts as moe
    import training

    local = int(os.environ["LOCAL_WORLD_SIZE"])
    wires: dict[str, dict[str, Any]] = {
        "hpz": {"zero_hpz_partition_size": local},
        "qwz": {"zero_quantized_weights": True},
        "qgz": {"zero_quantized_gradients": True},
        "mics": {"mics_shard_size": local},
    }
    wires["zero++"] = {key: value for name in ("hpz", "qwz", "qgz") for key, value in wires[name].items()}
    ways = {f"ds_hf+{name}": {"zero_optimization": keys} for name, keys in wires.items()}
    ways["ds_hf2"] = {"zero_optimization": {"stage": 2}}
    ways["ds_hf+inside"] = {"expert_parallel": {"enabled": True, "autoep_size": local}}
    known = moe.ENGINES if experts else training.ENGINES
    for name, keys in ways.items():
        known[name] = moe.with_config(training.DsHf, **keys)
    known["ds_hf+1bit"] = one_bit(training)
    for name, kind in known.items():
        known[name] = counted(kind)
    turn = training.turn

    def with_bytes(name: str, args: argparse.Namespace) -> dict[str, Any]:
        found = turn(name, args)
        return {**found, "more": {"sent_mb": round(known[name].found / 1e6, 1)}}

    training.turn = with_bytes
    if experts:
        moe.main()
    else:
        training.main()


def one_bit(training: Any) -> Any:
    """1-bit Adam, at stage 0."""

    class OneBit(training.DsHf):  # type: ignore[misc]
        def config(self) -> dict[str, Any]:
            config: dict[str, Any] = super().config()
            params = {**config["optimizer"]["params"], "freeze_step": 2}
            config["zero_optimization"] = {"stage": 0}
            config["gradient_clipping"] = 0.0
            return {**config, "optimizer": {"type": "OneBitAdam", "params": params}}

    return OneBit


# -- the parent -------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--each", type=int, default=0, help="processes of a host; 0 for a GPU each")
    parser.add_argument("--experts", action="store_true")
    parser.add_argument("--timeout", type=float, default=590)
    parser.add_argument("--json", type=Path)
    own, rest = sys.argv[1:], []
    if "--" in own:
        place = own.index("--")
        own, rest = own[:place], own[place + 1 :]
    args = parser.parse_args(own)
    gpus = torch.cuda.device_count()
    each = args.each or gpus // args.hosts
    if each < 1:
        parser.error("there are no GPUs; --each says how many processes a host has on the CPU")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    options = [*rest, *(["--json", str(args.json)] if args.json else [])]
    running = []
    with contextlib.ExitStack() as stack:
        for host in range(args.hosts):
            mine = range(host * each, (host + 1) * each)
            environment = {
                **os.environ,
                "CUDA_VISIBLE_DEVICES": ",".join(map(str, mine)) if gpus else "",
                "NCCL_HOSTID": f"host{host}",
                "NCCL_IB_DISABLE": "1",
                "NCCL_SOCKET_IFNAME": "lo",
                "NCCL_NVLS_ENABLE": "0",
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                "DS_HF_HOSTS": str(args.hosts),
                "DS_HF_WORKER": "experts" if args.experts else "training",
            }
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(args.hosts)]
            command += ["--node-rank", str(host), "--nproc-per-node", str(each)]
            command += ["--master-addr", "127.0.0.1", "--master-port", str(port), str(HERE), *options]
            process = subprocess.Popen(command, env=environment)
            stack.callback(process.kill)
            running.append(process)
        codes = [process.wait(args.timeout) for process in running]
    if any(codes):
        raise SystemExit(f"the hosts ended with {codes}")
    if args.json:
        for row in json.loads(args.json.read_text())["records"]:
            print(f"{row['name']:<14} {row.get('step_ms', 0):9.1f} ms {row.get('sent_mb', 0):9.1f} MB a host and step")


if __name__ == "__main__":
    if "DS_HF_WORKER" in os.environ:
        worker(os.environ["DS_HF_WORKER"] == "experts")
    else:
        main()
