"""What a prediction takes and gives: a workload, and bytes by part on device, host and disk.

All figures are bytes of one process. Parts of the device are those at the moment of its peak, so that they add up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ds_hf.errors import DsHfError

__all__ = ["Prediction", "UnpredictableError", "Workload"]


class UnpredictableError(DsHfError):
    """Memory cannot be predicted from what was given; the text says what is missing."""


@dataclass(frozen=True)
class Workload:
    """What one process computes in one micro-batch.

    Attributes:
        micro_batch: samples; a configuration's own number goes before it.
        seq_len: tokens of each sample; of encoder-decoder models on both sides.
        gradient_checkpointing: recompute each block in backward; ``None``: as the model has it.
        attention: transformers' ``attn_implementation``; ``None``: as the model has it.
        optimizer: the optimizer where the configuration names none (the Trainer's default is AdamW).
        keeps_outputs: the training loop holds the model's outputs, logits too, during backward (``out = engine(...)``);
            the Trainer does not.
        inputs: keyword arguments of the model's forward, of which shapes and dtypes count; they go before
            ``seq_len`` and the dimension of the batch is replaced by ``micro_batch``.
    """

    micro_batch: int = 1
    seq_len: int = 2048
    gradient_checkpointing: bool | None = None
    attention: str | None = None
    optimizer: str = "AdamW"
    keeps_outputs: bool = False
    inputs: Mapping[str, Any] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name in ("micro_batch", "seq_len"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise UnpredictableError(f"{name} is {value!r}: give a whole number of at least 1")


@dataclass(frozen=True)
class Prediction:
    """Bytes of one process.

    Attributes:
        device: parts of what tensors take at the moment of the peak.
        moment: when that is: ``"initialize"``, ``"forward"``, ``"backward"`` or ``"step"``.
        outside: parts of the device that tensors do not take: the CUDA context, NCCL, what the caching allocator holds
            and cannot use.
        host: parts in host memory that training keeps, and ``"loading"``: what the model takes before it is sharded.
        pinned: how much of ``host`` is page-locked.
        disk: parts on NVMe.
        micro_batch, world_size: what it was predicted for.
        streamed_share: of the states in host memory, the share that the GPU updates.
        stages: of a pipeline, each stage; this is the one that takes most.
    """

    device: Mapping[str, int]
    moment: str
    outside: Mapping[str, int]
    host: Mapping[str, int]
    pinned: int
    disk: Mapping[str, int]
    micro_batch: int
    world_size: int
    streamed_share: float = 0.0
    stages: tuple[Prediction, ...] = ()

    @property
    def device_peak(self) -> int:
        """The most that tensors take: ``torch.cuda.max_memory_allocated()``."""
        return sum(self.device.values())

    @property
    def device_total(self) -> int:
        """What the device must have: the tensors' peak and what lies outside."""
        return self.device_peak + sum(self.outside.values())

    @property
    def host_total(self) -> int:
        """Host memory while training: ``host`` without loading, or loading where that is more."""
        loading = self.host.get("loading", 0)
        return max(sum(self.host.values()) - loading, loading)

    @property
    def disk_total(self) -> int:
        return sum(self.disk.values())

    def as_json(self) -> dict[str, Any]:
        """Plain numbers, all in bytes."""
        found = {
            "micro_batch": self.micro_batch,
            "world_size": self.world_size,
            "device": {
                "total": self.device_total,
                "tensors_peak": self.device_peak,
                "moment": self.moment,
                "parts": dict(self.device),
                "outside": dict(self.outside),
            },
            "host": {"total": self.host_total, "pinned": self.pinned, "parts": dict(self.host)},
            "disk": {"total": self.disk_total, "parts": dict(self.disk)},
        }
        return found | ({"stages": [stage.as_json() for stage in self.stages]} if self.stages else {})
