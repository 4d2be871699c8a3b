"""Of ``ds-hf doctor``: combinations that are known to fail, hang or be slow, each with what to do.

A rule is a function of ``KnownMachine`` that returns what is wrong and the fix, or None. Rules look at what was found
and ask nothing themselves, so that each is tested with a made-up machine.
"""

from __future__ import annotations

import os
import platform
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from packaging.specifiers import SpecifierSet

from ds_hf.doctor import releases
from ds_hf.doctor.hardware import ListedGpu

__all__ = ["RULES", "KnownMachine", "problems", "this_machine"]

GIB = 1 << 30


@dataclass(frozen=True)
class KnownMachine:
    """What the rules look at."""

    gpus: list[ListedGpu] = field(default_factory=list)
    torch_gpus: int = 0
    torch_cuda: str | None = None
    nccl: tuple[int, ...] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    shm_nbytes: int | None = None
    memory_nbytes: int = 0
    kernel: str = ""
    host_address: str | None = None
    memlock: int = -1
    installed: Mapping[str, str] = field(default_factory=dict)
    declared: Mapping[str, str] = field(default_factory=dict)
    lacking: Mapping[str, Sequence[str]] = field(default_factory=dict)


Rule = Callable[[KnownMachine], "tuple[str, str] | None"]


def this_machine(gpus: list[ListedGpu], shm_nbytes: int | None, memory_nbytes: int) -> KnownMachine:
    """Look at the one we are on."""
    import resource

    import torch

    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = None
    return KnownMachine(
        gpus=gpus,
        torch_gpus=torch.cuda.device_count(),
        torch_cuda=torch.version.cuda,
        nccl=nccl,
        env=os.environ,
        shm_nbytes=shm_nbytes,
        memory_nbytes=memory_nbytes,
        kernel=platform.release(),
        host_address=address,
        memlock=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        installed=releases.installed(),
        declared=releases.declared(),
        lacking=releases.lacking(),
    )


def problems(machine: KnownMachine) -> list[tuple[str, str]]:
    """What is wrong, each with its fix."""
    return [found for rule in RULES if (found := rule(machine)) is not None]


def _torch_without_cuda(m: KnownMachine) -> tuple[str, str] | None:
    if m.gpus and m.torch_cuda is None:
        return f"{len(m.gpus)} GPUs, and torch is a build for the CPU", "install torch for CUDA from pytorch.org"
    return None


def _hidden_gpus(m: KnownMachine) -> tuple[str, str] | None:
    visible = m.env.get("CUDA_VISIBLE_DEVICES")
    if m.gpus and visible is not None and m.torch_cuda and m.torch_gpus == 0:
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides all {len(m.gpus)} GPUs", "unset it, or name GPUs that exist"
    return None


def _old_driver(m: KnownMachine) -> tuple[str, str] | None:
    if m.gpus and m.torch_cuda and m.torch_gpus == 0 and "CUDA_VISIBLE_DEVICES" not in m.env:
        found = f"torch for CUDA {m.torch_cuda} cannot use the GPUs under driver {m.gpus[0].driver}"
        return found, "update the driver, or install a torch for an older CUDA"
    return None


def _small_shm(m: KnownMachine) -> tuple[str, str] | None:
    if m.shm_nbytes is not None and m.shm_nbytes < GIB:
        found = f"/dev/shm has {m.shm_nbytes / 2**20:.0f} MiB: NCCL and data loaders with workers fail (bus error)"
        return found, "start the container with --shm-size=8g or --ipc=host"
    return None


def _old_kernel(m: KnownMachine) -> tuple[str, str] | None:
    version = re.match(r"(\d+)\.(\d+)", m.kernel)
    if version and (int(version[1]), int(version[2])) < (5, 5):
        return f"Linux {m.kernel}: processes are known to hang on kernels before 5.5", "update the kernel"
    return None


def _consumer_p2p(m: KnownMachine) -> tuple[str, str] | None:
    cards = [gpu.name for gpu in m.gpus if re.search(r"RTX 40[0-9]0", gpu.name)]
    if len(cards) > 1 and m.env.get("NCCL_P2P_DISABLE") != "1":
        return f"{cards[0]}: such cards have no direct access to each other; NCCL may hang", "export NCCL_P2P_DISABLE=1"
    return None


def _blocking_launches(m: KnownMachine) -> tuple[str, str] | None:
    if m.env.get("CUDA_LAUNCH_BLOCKING") == "1":
        return "CUDA_LAUNCH_BLOCKING=1: nothing overlaps, which is several times slower", "unset it after debugging"
    return None


def _debug_collectives(m: KnownMachine) -> tuple[str, str] | None:
    if m.env.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        return "TORCH_DISTRIBUTED_DEBUG=DETAIL checks every collective: slow", "unset it after debugging"
    return None


def _slow_nccl(m: KnownMachine) -> tuple[str, str] | None:
    names = [name for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE") if m.env.get(name) == "1"]
    if names and len(m.gpus) > 1 and not any(re.search(r"RTX 40[0-9]0", gpu.name) for gpu in m.gpus):
        return f"{', '.join(names)}=1: NCCL takes a slower way", "unset them if they were set for debugging"
    return None


def _loopback_name(m: KnownMachine) -> tuple[str, str] | None:
    if m.host_address is None:
        found = "the name of this host has no address: gloo finds no other host"
        return found, "put the name into /etc/hosts, or export GLOO_SOCKET_IFNAME"
    if m.host_address.startswith("127.") and "GLOO_SOCKET_IFNAME" not in m.env:
        found = f"the name of this host is {m.host_address}: on several hosts gloo waits for ever"
        return found, "correct /etc/hosts, or export GLOO_SOCKET_IFNAME=eth0 (only for several hosts)"
    return None


def _little_host_memory(m: KnownMachine) -> tuple[str, str] | None:
    total = sum(gpu.total_mib for gpu in m.gpus) << 20
    if total and m.memory_nbytes < total / 2:
        found = f"{m.memory_nbytes / GIB:.0f} GiB of memory beside {total / GIB:.0f} GiB on GPUs"
        return found, "offload to the CPU will not hold much; ds-hf memory shows how much"
    return None


def _locked_memory(m: KnownMachine) -> tuple[str, str] | None:
    if m.gpus and 0 <= m.memlock < 64 << 20:
        return f"ulimit -l is {m.memlock >> 10} KiB: InfiniBand and io_uring cannot pin", "ulimit -l unlimited"
    return None


def _undeclared_release(m: KnownMachine) -> tuple[str, str] | None:
    outside = [
        name
        for name, version in m.installed.items()
        if name in m.declared and not SpecifierSet(m.declared[name]).contains(version, prereleases=True)
    ]
    if not outside:
        return None
    found = ", ".join(f"{name} {m.installed[name]}" for name in outside)
    wanted = " ".join(f"'{name}{m.declared[name]}'" for name in outside)
    return f"{found}: ds-hf is not made for so old a release", f"pip install {wanted}"


def _unfit_release(m: KnownMachine) -> tuple[str, str] | None:
    if not m.lacking:
        return None
    found = "; ".join(f"{name} {m.installed.get(name, '')} lacks {_few(names)}" for name, names in m.lacking.items())
    return f"{found}: what needs it fails or is off", "take another release of it, or a newer ds-hf"


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


RULES: tuple[Rule, ...] = (
    _torch_without_cuda,
    _hidden_gpus,
    _old_driver,
    _small_shm,
    _old_kernel,
    _consumer_p2p,
    _blocking_launches,
    _debug_collectives,
    _slow_nccl,
    _loopback_name,
    _little_host_memory,
    _locked_memory,
    _undeclared_release,
    _unfit_release,
)
