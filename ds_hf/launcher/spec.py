"""What one host must know to do its part: made once by the front, carried as one word, read by ``node``.

The word is URL-safe base64 of JSON, so that arguments and variables with spaces, quotes, newlines, ``$`` or ``%`` pass
through ssh, pdsh, mpirun, srun and any login shell unchanged: there is nothing in it for them to read.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import os
from dataclasses import asdict, dataclass, field

from ds_hf.launcher.errors import LaunchError

__all__ = ["GRACE_ENV", "GRACE_S", "NodeSpec", "decode", "encode"]

GRACE_S = 8.0  # of a process whose run has failed
GRACE_ENV = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # torchrun's
MAX_WORD_NBYTES = 120 * 1024  # Linux takes 128 KiB an argument


def _grace() -> float:
    """Seconds that processes have which are asked to end, for a last checkpoint: as Kubernetes, Slurm and torchrun."""
    text = os.environ.get(GRACE_ENV, "30")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise LaunchError(f"{GRACE_ENV} is {text!r}\n  fix: seconds above 0, such as 120")
    return seconds


@dataclass(frozen=True)
class NodeSpec:
    """One run, the same for every host.

    Attributes:
        hosts: names, in rank order.
        slots: ids of the slots of each host (GPU numbers, or just processes).
        devices: what CUDA_VISIBLE_DEVICES calls the slots of this machine where they are no numbers; else empty.
        command: script and its arguments.
        env: variables set on every host.
        cwd: folder on every host; None leaves the one the process starts in.
        any_port: ``master_port`` was not asked for: another will do.
        min_nodes: > 0 makes the run elastic between this and ``max_nodes`` (0: the number of hosts).
        asked_grace: see ``grace``.
        bind_cores: ``""`` for all cores, a list such as ``0-3,8`` for these, None for no binding.
    """

    run_id: str
    hosts: list[str]
    slots: list[list[int]]
    command: list[str]
    master_addr: str = "127.0.0.1"
    master_port: int = 29500
    any_port: bool = False
    env: dict[str, str] = field(default_factory=dict)
    devices: dict[str, str] = field(default_factory=dict)
    set_devices: bool = True
    cwd: str | None = None
    module: bool = False
    no_python: bool = False
    local_rank_argument: bool = True
    max_restarts: int = 0
    min_nodes: int = 0
    max_nodes: int = 0
    prefix: bool = False
    log_dir: str | None = None
    pid_file_of: int = 0
    bind_cores: str | None = None
    quiet: bool = False
    asked_grace: float = field(default_factory=_grace)

    @property
    def grace(self) -> float:
        """Seconds between SIGTERM and the end of a process that is still there. Of several hosts another one may have
        failed, which ends all of them soon."""
        return self.asked_grace if len(self.hosts) == 1 or self.min_nodes else GRACE_S

    @property
    def world_size(self) -> int:
        """Number of processes of the whole run."""
        return sum(map(len, self.slots))

    def first_rank(self, node: int) -> int:
        """Global rank of the first process of host number ``node``."""
        return sum(len(slots) for slots in self.slots[:node])


def encode(spec: NodeSpec) -> str:
    """``spec`` as one word of letters, digits, ``-``, ``_`` and ``=``."""
    text = json.dumps(asdict(spec), ensure_ascii=True, separators=(",", ":"))
    word = base64.urlsafe_b64encode(text.encode("ascii")).decode("ascii")
    if len(word) > MAX_WORD_NBYTES:
        raise LaunchError(
            f"arguments and environment take {len(word) >> 10} KiB, and a command line takes {MAX_WORD_NBYTES >> 10}"
            "\n  fix: shorten .deepspeed_env (accelerate appends to it at each launch) or --export"
        )
    return word


def decode(word: str) -> NodeSpec:
    """The inverse of ``encode``."""
    try:
        return NodeSpec(**json.loads(base64.urlsafe_b64decode(word.encode("ascii"))))
    except (ValueError, TypeError, UnicodeError, binascii.Error) as error:
        raise LaunchError(f"damaged description of the run: {error}\n  fix: the same ds_hf on every host") from None
