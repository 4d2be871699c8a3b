"""``python -m deepspeed.launcher.launch``: DeepSpeed's per-host starter, as clusters' own scripts call it.

``--world_info`` is base64 of ``{"host": [slot, ...]}`` in rank order; ``--node_rank`` says which of them this host is.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import json
import sys
from collections.abc import Sequence
from typing import Any

from ds_hf.launcher.errors import LaunchError
from ds_hf.launcher.hostfile import check_host_name
from ds_hf.launcher.node import check_can_start, run_node
from ds_hf.launcher.options import DEFAULT_PORT
from ds_hf.launcher.resources import gpu_count
from ds_hf.launcher.spec import NodeSpec
from ds_hf.log import complain

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this host's processes; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        world = _world(options.world_info)
        if not 0 <= options.node_rank < len(world):
            raise LaunchError(f"--node_rank is {options.node_rank}, and --world_info has {len(world)} hosts")
        if options.module and options.no_python:
            raise LaunchError("--module and --no_python are both given\n  fix: give one of them")
        spec = _spec(options, world)
        check_can_start(spec)
        return run_node(spec, options.node_rank)
    except LaunchError as error:
        complain(error)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="deepspeed.launcher.launch", description="Start the processes of one host.")
    parser.add_argument("--node_rank", type=int, default=0)
    parser.add_argument("--master_addr", default="127.0.0.1")
    parser.add_argument("--master_port", type=int, default=DEFAULT_PORT)
    parser.add_argument("--world_info", required=True)
    for name in ("--module", "--no_python", "--no_local_rank", "--bind_cores_to_rank", "--quiet"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("--save_pid", type=int, default=0)
    parser.add_argument("--enable_each_rank_log", default="None")
    parser.add_argument("--bind_core_list", default="")
    parser.add_argument("--log_level", default="info", help="accepted; has no effect")
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return parser


def _world(text: str) -> dict[str, list[int]]:
    try:
        world = json.loads(base64.urlsafe_b64decode(text))
    except (ValueError, binascii.Error) as error:
        raise LaunchError(
            f"--world_info cannot be read: {error}\n  fix: base64 of JSON, {{host: [slot, ...]}}"
        ) from None
    if not isinstance(world, dict) or not world:
        raise LaunchError("--world_info names no host\n  fix: base64 of JSON, {host: [slot, ...]}")
    for host, slots in world.items():
        whole = isinstance(slots, list) and slots and all(type(slot) is int and slot >= 0 for slot in slots)
        if not whole or check_host_name(host):
            raise LaunchError(
                f"--world_info: {host!r}: {slots!r} is not a host with slots\n  fix: {{host: [slot, ...]}}"
            )
    return world


def _spec(options: Any, world: dict[str, list[int]]) -> NodeSpec:
    log_dir = options.enable_each_rank_log
    return NodeSpec(
        run_id="launch",  # the same on every host, which start independently
        hosts=list(world),
        slots=list(world.values()),
        command=[options.training_script, *options.training_script_args],
        master_addr=options.master_addr,
        master_port=options.master_port,
        set_devices=gpu_count() > 0,
        module=options.module,
        no_python=options.no_python,
        local_rank_argument=not options.no_local_rank,
        log_dir=None if log_dir == "None" else log_dir,
        pid_file_of=options.save_pid,
        bind_cores=options.bind_core_list if options.bind_cores_to_rank else None,
        quiet=options.quiet,
    )


if __name__ == "__main__":
    sys.exit(main())
