"""What goes into a rollout and comes out of it (``deepspeed.runtime.rollout.base``, DeepSpeed 0.19.8)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

__all__ = ["RolloutBatch", "RolloutConfig", "RolloutEngine", "RolloutRequest", "SamplingConfig"]


@dataclass
class RolloutConfig:
    """``engine``: who samples; ``use_graph_capture``: decode greedily by a captured graph."""

    engine: str = "hybrid_engine"
    use_graph_capture: bool = False


@dataclass
class SamplingConfig:
    """How to sample; ``temperature`` 0 is greedy, ``top_k`` of 0 or less keeps all tokens.

    ``continuous_batch_size``: so many prompts are decoded at a time, and the next begins where one ends (greedy only).
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    n_samples_per_prompt: int = 1
    continuous_batch_size: int | None = None


@dataclass
class RolloutRequest:
    """Prompts, padded on the left.

    Attributes:
        prompt_ids: ``[B, T]`` tokens.
        prompt_attention_mask: ``[B, T]``, 1 on tokens of the prompt.

    Raises:
        ValueError: the shapes are others.
    """

    prompt_ids: Tensor
    prompt_attention_mask: Tensor

    def __post_init__(self) -> None:
        _check(self.prompt_ids, self.prompt_attention_mask, "prompt_ids", "prompt_attention_mask", "[B, T_p]")


@dataclass
class RolloutBatch:
    """Prompts and responses, ``B' = B * n_samples_per_prompt``.

    Attributes:
        input_ids: ``[B', T + R]`` tokens, padded on both sides.
        attention_mask: ``[B', T + R]``, 1 on tokens.
        response_start_idx: ``[B']``, where responses begin.

    Raises:
        ValueError: the shapes are others.
    """

    input_ids: Tensor
    attention_mask: Tensor
    response_start_idx: Tensor

    def __post_init__(self) -> None:
        _check(self.input_ids, self.attention_mask, "input_ids", "attention_mask", "[B, T]")
        rows = self.input_ids.shape[0]
        if self.response_start_idx.shape != (rows,):
            raise ValueError(
                f"response_start_idx must be 1-D of length {rows}; got {tuple(self.response_start_idx.shape)}"
            )

    @property
    def batch_size(self) -> int:
        """``B'``."""
        return int(self.input_ids.shape[0])

    @property
    def seq_len(self) -> int:
        """``T + R``."""
        return int(self.input_ids.shape[1])


def _check(ids: Tensor, mask: Tensor, name: str, mask_name: str, shape: str) -> None:
    if ids.dim() != 2:
        raise ValueError(f"{name} must be 2-D {shape}; got {tuple(ids.shape)}")
    if mask.shape != ids.shape:
        raise ValueError(f"{mask_name} shape {tuple(mask.shape)} does not match {name} {tuple(ids.shape)}")


class RolloutEngine(ABC):
    """Samples of the model that is trained."""

    name: str = "base"

    @abstractmethod
    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """Prompts and responses in one tensor."""

    @abstractmethod
    def sync_weights(self, step: int) -> None:
        """Bring the weights of ``step`` to the sampling engine, where that is a separate one."""

    def shutdown(self) -> None:
        """Give back what sampling holds."""
        return
