"""DeepSpeed's context for marked tensors."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from deepspeed.runtime.activation_checkpointing.offload_activations import CheckpointHiddenStatesOffload, _Reference
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GradientCheckpointingLayer


class Layer(GradientCheckpointingLayer):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states.sin() * hidden_states


def layer() -> Layer:
    made = Layer()
    made.gradient_checkpointing = True
    made._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    return made.train()


def test_checkpointed_layers_are_marked_inside_and_nowhere_else() -> None:
    usual = GradientCheckpointingLayer.__call__
    offload = CheckpointHiddenStatesOffload(min_offload_bytes=0)
    x = torch.randn(4, 8, requires_grad=True)
    with offload:
        layer()(x).sum().backward()
        with pytest.raises(RuntimeError, match="not re-entrant"):
            offload.__enter__()
    layer()(x)
    assert GradientCheckpointingLayer.__call__ is usual
    stats = offload.stats
    assert (stats.marked_tensors, stats.skipped_marked_tensors, stats.offloaded_tensors) == (1, 1, 0)
    with pytest.raises(ValueError, match="keep_last_count must be >= 0"):
        CheckpointHiddenStatesOffload(keep_last_count=-1)


def test_the_newest_stay_and_the_others_move() -> None:
    """What ``mark`` does to tensors of a device, shown by moving those of the CPU."""
    offload = CheckpointHiddenStatesOffload(min_offload_bytes=0, keep_last_count=2)
    references = []
    for _ in range(5):
        reference = _Reference(torch.randn(4, 8))
        references.append((reference, reference.here.clone() if reference.here is not None else None))
        offload._last.append(reference)
        while len(offload._last) > offload.keep_last_count:
            offload._move(offload._last.popleft())
    assert offload.stats.offloaded_tensors == 3
    for reference, values in reversed(references):
        assert values is not None
        assert torch.equal(offload._unpack(reference), values)
    assert (offload.stats.restored_tensors, offload.stats.kept_last_tensors) == (3, 2)
    linear = nn.Linear(2, 2)
    assert offload._unpack(linear.weight) is linear.weight
