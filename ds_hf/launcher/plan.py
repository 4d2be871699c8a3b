"""What ``--dry-run`` prints: comments that a person reads and commands that can be run as they stand."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from ds_hf.launcher.options import LaunchOptions
from ds_hf.launcher.spec import NodeSpec
from ds_hf.printable import counted

__all__ = ["plan_lines"]


def plan_lines(
    spec: NodeSpec, options: LaunchOptions, starts: Sequence[tuple[Sequence[str], dict[str, str], str]]
) -> list[str]:
    """The lines of the plan; ``starts``: hosts, environment and command line of each start, none for this machine."""
    hosts = len(spec.hosts)
    lines = [f"# {counted(spec.world_size, 'process', 'processes')} on {counted(hosts, 'host', 'hosts')}"]
    for node, (host, slots) in enumerate(zip(spec.hosts, spec.slots, strict=True)):
        first = spec.first_rank(node)
        kind = "GPU" if spec.set_devices else "slot"
        ids = ",".join(spec.devices.get(str(slot), str(slot)) for slot in slots)
        lines.append(f"# host {host}: ranks {first}-{first + len(slots) - 1} on {kind} {ids}")
    lines.append(
        f"# they meet at {spec.master_addr}:{spec.master_port}" + (", if the checks find no better" if starts else "")
    )
    if spec.env:
        lines.append(f"# in {spec.cwd} with {', '.join(sorted(spec.env))}")
    for node in range(hosts) if hosts <= 2 else [0]:
        lines.append(f"# on host {spec.hosts[node]} as: {shlex.join(_torchrun(spec, node))}")
    for names, env, command in starts:
        lines += [
            "",
            f"# start {', '.join(names)}",
            *(f"{name}={shlex.quote(value)} \\" for name, value in env.items()),
        ]
        lines.append(command)
    return lines


def _torchrun(spec: NodeSpec, node: int) -> list[str]:
    """The same start in torchrun's words, for reading."""
    words = [sys.executable, "-m", "torch.distributed.run"]
    if spec.min_nodes:
        words += [f"--nnodes={spec.min_nodes}:{len(spec.hosts)}", "--rdzv-backend=c10d"]
        words += [f"--rdzv-endpoint={spec.master_addr}:{spec.master_port}"]
    else:
        words += [f"--nnodes={len(spec.hosts)}", f"--node-rank={node}"]
        words += [f"--master-addr={spec.master_addr}", f"--master-port={spec.master_port}"]
    words += [f"--nproc-per-node={len(spec.slots[node])}", f"--max-restarts={spec.max_restarts}"]
    words += ["--module"] * spec.module + ["--no-python"] * spec.no_python
    rank = ["--local_rank=N"] if spec.local_rank_argument else []
    return [*words, spec.command[0], *rank, *spec.command[1:]]
