"""What ``ds-hf doctor`` tells: versions, devices, who serves the name ``deepspeed``, who computes each operator.

Links, memory, disk and known-bad combinations come from ``hardware``, ``between`` and ``known_bad``. Looks and reports;
changes nothing but the file that keeps the figures of links (and one that it writes, reads and deletes to time the
disk), compiles nothing unless it is started as several processes, and never fails because something is missing.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ds_hf import host
from ds_hf.doctor import between, hardware
from ds_hf.doctor.hardware import ListedGpu
from ds_hf.doctor.known_bad import KnownMachine, problems, this_machine
from ds_hf.doctor.releases import installed
from ds_hf.launcher.handover import real_deepspeed
from ds_hf.measure.links import MeasuredLinks, links_file, save_links
from ds_hf.printable import counted

__all__ = ["DoctorReport", "Fact", "Operator", "examine", "take_part"]

_SLOW_LINK = 40e9  # bytes a second: less is PCIe, over which the sums of each layer take longer than the layer


@dataclass(frozen=True)
class Fact:
    """One line: what it is about, what was found, and what to do if it is not well."""

    name: str
    value: str
    fix: str = ""


@dataclass(frozen=True)
class Operator:
    """Who computes one operator on one kind of device; ``reason`` says why it is not a kernel of ds_hf."""

    name: str
    device: str
    implementation: str
    reason: str = ""


@dataclass(frozen=True)
class DoctorReport:
    """All of it."""

    facts: list[Fact] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"facts": [vars(fact) for fact in self.facts], "operators": [vars(op) for op in self.operators]}


def examine(folder: Path | None = None) -> DoctorReport:
    """Look at this machine and this environment; ``folder`` is whose disk is timed, None for none."""
    versions = Fact("versions", f"Python {platform.python_version()}, " + ", ".join(map(" ".join, installed().items())))
    gpus = hardware.gpus()
    machine = this_machine(gpus, hardware.shm_nbytes(), host.total_memory())
    facts = [versions, _deepspeed(), _cpu(), _files(), *_devices(), *_links(gpus), *_groups(machine), *_memory(gpus)]
    if folder is not None:
        facts.append(_disk(folder))
    facts += [Fact("problem", text, fix) for text, fix in problems(machine)]
    return DoctorReport(facts, _operators())


def take_part() -> bool:
    """In a launch of several, what all but the first process do: help to time the link. Whether this is one of them."""
    if between.rank() == 0:
        return False
    links, _ = _between()
    if links is not None and os.environ["LOCAL_RANK"] == "0":  # for explain on this host
        _keep(links)
    return True


def _deepspeed() -> Fact:
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:
        fix = f"put {Path(__file__).parent.parent / 'compat'} on PYTHONPATH, or reinstall ds-hf with pip"
        return Fact("deepspeed", "the name is not served: transformers will not use ds_hf", fix)
    folder = real_deepspeed()
    if folder is None:
        return Fact("deepspeed", "served by ds_hf")
    fix = (
        "to let the Trainer and accelerate use ds_hf: pip uninstall deepspeed; then, if the name is gone, "
        "reinstall ds-hf with --force-reinstall --no-deps"
    )
    return Fact("deepspeed", f"a real DeepSpeed at {folder}; `import ds_hf` works beside it", fix)


def _cpu() -> Fact:
    from ds_hf.engine.ops import cpu

    cores = len(os.sched_getaffinity(0))
    reason = cpu.available()
    if reason:
        return Fact("CPU", f"{cores} cores; no kernel library, torch computes", reason)
    threads = counted(cpu.threads(), "thread", "threads")
    return Fact("CPU", f"{counted(cores, 'core', 'cores')}; kernels for {cpu.instruction_set()}, {threads} a process")


def _files() -> Fact:
    from ds_hf.engine.offload import aio

    reason = aio.available()
    if reason:
        return Fact("NVMe offload", "not there", reason)
    queue = aio.Aio(depth=1)
    kind = "io_uring" if queue.uses_uring else "threads: the kernel, or this container, has no io_uring"
    queue.close()
    return Fact("NVMe offload", kind)


def _devices() -> list[Fact]:
    import torch

    from ds_hf.engine.ops import cuda

    if not torch.cuda.is_available():
        return [Fact("GPU", "none: processes meet through gloo and compute on the CPU")]
    facts = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        size = f"{device.total_memory / 2**30:.0f} GiB, sm_{device.major}{device.minor}"
        facts.append(Fact(f"GPU {index}", f"{device.name}, {size}"))
    reason = cuda.available()
    facts.append(
        Fact("CUDA kernels", "not usable, torch computes" if reason else "compiled at first use", reason or "")
    )
    return facts


def _groups(machine: KnownMachine) -> list[Fact]:
    import torch.distributed as dist

    names = [name for name in ("nccl", "gloo", "mpi") if dist.is_backend_available(name)]
    facts = [Fact("collectives", ", ".join(names))]
    if machine.nccl is not None:
        settings = [f"{name}={value}" for name, value in sorted(machine.env.items()) if name.startswith("NCCL_")]
        facts.append(Fact("NCCL", ", ".join([".".join(map(str, machine.nccl)), *settings])))
    return facts


def _links(gpus: list[ListedGpu]) -> list[Fact]:
    text = hardware.links() if len(gpus) > 1 else ""
    facts = [Fact("links", text)] if text else []
    speed = hardware.neighbour_speed()
    if speed is not None:
        slow = speed < _SLOW_LINK
        fix = "keep tensor_parallel.autotp_size at 1: ZeRO sends less" if slow else ""
        facts.append(Fact("neighbours", f"{speed / 1e9:.0f} GB/s from GPU 0 to GPU 1 (tensor parallelism)", fix))
    links, fact = _between() if between.started_as_several() else (MeasuredLinks(between.device_name()), None)
    if fact is not None:
        facts.append(fact)
    if links is not None and (problem := _keep(replace(links, neighbours=speed or 0.0))):
        facts.append(problem)
    return facts


def _between() -> tuple[MeasuredLinks | None, Fact | None]:
    try:
        links = between.measure_between()
    except (RuntimeError, ValueError) as error:  # torch's own errors are the former
        reason = str(error).splitlines()[0]
        return None, Fact("processes", f"do not meet: {reason}", "start the same command on all hosts at once")
    return links, Fact("processes", f"{links}, {links.latency * 1e3:.2g} ms a collective")


def _keep(links: MeasuredLinks) -> Fact | None:
    """Save ``links``; what is wrong if that cannot be."""
    try:
        save_links(links)
    except OSError as error:
        return Fact("figures of links", f"not kept: {links_file()}: {error.strerror}", "set XDG_CACHE_HOME")
    return None


def _memory(gpus: list[ListedGpu]) -> list[Fact]:
    available, total = host.available_memory(), host.total_memory()
    facts = [Fact("memory", f"{available / 2**30:.1f} of {total / 2**30:.1f} GiB free")]
    for gpu in gpus:
        facts.append(Fact(f"memory {gpu.index}", f"{gpu.free_mib / 1024:.1f} of {gpu.total_mib / 1024:.1f} GiB free"))
    return facts


def _disk(folder: Path) -> Fact:
    try:
        speed = hardware.disk_speed(folder)
    except OSError as error:
        return Fact("disk", f"{folder}: {error.strerror}", "give a folder that can be written: --disk FOLDER")
    free = shutil.disk_usage(folder).free / 2**30
    return Fact(
        "disk", f"{folder}: writes {speed.write / 1e6:.0f}, reads {speed.read / 1e6:.0f} MB/s, {free:.0f} GiB free"
    )


def _operators() -> list[Operator]:
    import torch

    from ds_hf.engine.ops import blocks, library

    found = []
    for name in (*library.OPS, *blocks.OPS):
        choose = blocks.choose if name in blocks.OPS else library.choose
        for device in ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",):
            _, reason = choose(torch.device(device))
            kind = "plain torch" if reason else {"cuda": "CUDA kernel", "cpu": "C++ kernel"}[device]
            found.append(Operator(f"ds_hf::{name}", device, kind, reason or ""))
    return found
