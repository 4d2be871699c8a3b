"""The sizes of the process mesh."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["AXES", "MeshShape"]

AXES = ("pipe", "data", "sequence", "tensor")  # outer to inner: tensor-parallel processes have consecutive ranks


@dataclass(frozen=True)
class MeshShape:
    """How many processes there are along each axis.

    Attributes:
        pipe: stages of a pipeline.
        data: processes that read different samples.
        sequence: processes that share each sample.
        tensor: processes that share each layer.
        expert: processes that share the experts, a part of data x sequence.
        inner: processes over which hierarchical ZeRO divides states, a part of data x sequence; ``None`` for all.
    """

    pipe: int = 1
    data: int = 1
    sequence: int = 1
    tensor: int = 1
    expert: int = 1
    inner: int | None = None

    @property
    def processes(self) -> int:
        """In all."""
        return self.pipe * self.data * self.sequence * self.tensor

    @property
    def model(self) -> int:
        """Processes that hold different parts of one model: pipe x tensor."""
        return self.pipe * self.tensor

    def __str__(self) -> str:
        sizes = {axis: getattr(self, axis) for axis in AXES}
        return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1 or axis == "data")
