"""``deepspeed.runtime.activation_checkpointing.offload_activations``: marked tensors in host memory, by a context.

For training loops that use no engine. With one, ``activation_checkpointing.cpu_checkpointing`` in the JSON does the
same, and nothing has to be entered.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ds_hf.engine.modules.activations.offload import ActivationOffload, Offloaded

__all__ = [
    "CheckpointActivationOffloadStats",
    "CheckpointHiddenStatesOffload",
    "get_checkpoint_hidden_states_offloading_ctx_manager",
    "patch_gradient_checkpointing_layer_marker",
]


@dataclass
class CheckpointActivationOffloadStats:
    """What a ``CheckpointHiddenStatesOffload`` has done since it was entered."""

    saved_tensors_seen: int = 0
    marked_tensors: int = 0
    offloaded_tensors: int = 0
    restored_tensors: int = 0
    skipped_marked_tensors: int = 0
    kept_last_tensors: int = 0
    offloaded_bytes: int = 0
    restored_bytes: int = 0


class _Reference:
    """A marked tensor that autograd saved: still here, or offloaded."""

    def __init__(self, tensor: Tensor) -> None:
        self.here: Tensor | None = tensor
        self.saved: Offloaded | None = None
        self.told = False


class CheckpointHiddenStatesOffload(saved_tensors_hooks):
    """Inside, marked tensors that autograd saves are kept in host memory until backward asks for them.

    The first argument of each checkpointed ``GradientCheckpointingLayer`` of transformers is marked by itself; others
    with ``mark``. Tensors on the CPU, weights, views that overlap and small tensors stay.

    Args:
        use_pin_memory: page-lock the host memory.
        use_streams: copy beside the computation.
        min_offload_bytes: smaller tensors stay.
        max_fwd_stash_count: tensors on their way down that may be alive on the device; the last one always is.
        max_cpu_buffer_pool_count: accepted; host memory is kept for the next forward.
        keep_last_count: the newest stay on the device, for backward begins with them.

    Raises:
        ValueError: a count is negative.
        RuntimeError: it is entered inside itself.
    """

    def __init__(
        self,
        use_pin_memory: bool = True,
        use_streams: bool = True,
        min_offload_bytes: int = 1024,
        max_fwd_stash_count: int = 2,
        max_cpu_buffer_pool_count: int = 64,
        keep_last_count: int = 1,
    ) -> None:
        counts = {
            "keep_last_count": keep_last_count,
            "max_fwd_stash_count": max_fwd_stash_count,
            "max_cpu_buffer_pool_count": max_cpu_buffer_pool_count,
            "min_offload_bytes": min_offload_bytes,
        }
        for name, value in counts.items():
            if value < 0:
                raise ValueError(f"{name} must be >= 0, got {value}")
        self.use_pin_memory, self.use_streams, self.min_offload_bytes = use_pin_memory, use_streams, min_offload_bytes
        self.max_fwd_stash_count, self.max_cpu_buffer_pool_count = max_fwd_stash_count, max_cpu_buffer_pool_count
        self.keep_last_count = keep_last_count
        self.stats = CheckpointActivationOffloadStats()
        self._offload: ActivationOffload | None = None
        self._marked: dict[int, int] = {}
        self._last: deque[_Reference] = deque()
        super().__init__(self._pack, self._unpack)

    def mark(self, tensor: Tensor) -> None:
        """Offload ``tensor`` the next time that autograd saves it."""
        self._marked[id(tensor)] = self._marked.get(id(tensor), 0) + 1
        self.stats.marked_tensors += 1

    def reset(self) -> None:
        """Forget marks and counts."""
        self.stats = CheckpointActivationOffloadStats()
        self._marked.clear()
        self._last.clear()

    def _consume_mark(self, tensor: Tensor) -> bool:
        count = self._marked.pop(id(tensor), 0)
        if count > 1:
            self._marked[id(tensor)] = count - 1
        return count > 0

    def _pack(self, tensor: Tensor) -> Any:
        self.stats.saved_tensors_seen += 1
        if not self._consume_mark(tensor):
            return tensor
        if tensor.device.type == "cpu" or not self._for(tensor).takes(tensor):
            self.stats.skipped_marked_tensors += 1
            return tensor
        reference = _Reference(tensor)
        self._last.append(reference)
        while len(self._last) > self.keep_last_count:
            self._move(self._last.popleft())
        return reference

    def _for(self, tensor: Tensor) -> ActivationOffload:
        if self._offload is None or self._offload.device != tensor.device:
            self._offload = ActivationOffload(
                tensor.device,
                pinned=self.use_pin_memory,
                least_nbytes=self.min_offload_bytes,
                beside=self.use_streams,
            )
        return self._offload

    def _move(self, reference: _Reference) -> None:
        tensor = reference.here
        assert tensor is not None
        offload = self._for(tensor)
        offload.in_flight_nbytes = self.max_fwd_stash_count * tensor.nbytes
        reference.saved, reference.here = offload.save(tensor), None
        self.stats.offloaded_tensors += 1
        self.stats.offloaded_bytes += tensor.nbytes

    def _unpack(self, saved: Any) -> Any:
        if not isinstance(saved, _Reference):
            return saved
        if saved.here is not None:
            self.stats.kept_last_tensors += not saved.told
            saved.told = True
            return saved.here
        assert saved.saved is not None
        assert self._offload is not None
        tensor = self._offload.fetch(saved.saved)
        if not saved.told:
            self.stats.restored_tensors += 1
            self.stats.restored_bytes += tensor.nbytes
            saved.told = True
        return tensor

    def __enter__(self) -> None:
        if self in _marker.stack:
            raise RuntimeError(
                "CheckpointHiddenStatesOffload is not re-entrant; use a separate instance for a nested context"
            )
        self.reset()
        _marker.enter(self)
        try:
            super().__enter__()
        except BaseException:
            _marker.leave(self)
            raise

    def __exit__(self, *args: object) -> None:
        try:
            super().__exit__(*args)
        finally:
            self._marked.clear()
            self._last.clear()
            _marker.leave(self)


def get_checkpoint_hidden_states_offloading_ctx_manager(
    use_pin_memory: bool = True,
    use_streams: bool = True,
    min_offload_bytes: int = 1024,
    max_fwd_stash_count: int = 2,
    max_cpu_buffer_pool_count: int = 64,
    keep_last_count: int = 1,
) -> CheckpointHiddenStatesOffload:
    """``CheckpointHiddenStatesOffload`` with the same arguments."""
    return CheckpointHiddenStatesOffload(
        use_pin_memory=use_pin_memory,
        use_streams=use_streams,
        min_offload_bytes=min_offload_bytes,
        max_fwd_stash_count=max_fwd_stash_count,
        max_cpu_buffer_pool_count=max_cpu_buffer_pool_count,
        keep_last_count=keep_last_count,
    )


def patch_gradient_checkpointing_layer_marker() -> None:
    """Let transformers' checkpointed layers mark their input, until the process ends.

    Raises:
        RuntimeError: transformers is missing, or has no ``GradientCheckpointingLayer`` (it came with 4.52).
    """
    _marker.install()
    _marker.stays = True


class _Marker(threading.local):
    """Replaces ``GradientCheckpointingLayer.__call__`` for as long as a context is open.

    Attributes:
        stack: the open contexts of this thread; the last one gets the marks.
    """

    def __init__(self) -> None:
        self.stack: list[CheckpointHiddenStatesOffload] = []
        self.stays = False
        self._call: Callable[..., Any] | None = None
        self._own: Any = None

    def enter(self, context: CheckpointHiddenStatesOffload) -> None:
        with contextlib.suppress(RuntimeError):  # no transformers: the caller marks
            self.install()
        self.stack.append(context)

    def leave(self, context: CheckpointHiddenStatesOffload) -> None:
        if context in self.stack:
            self.stack.remove(context)
        if not self.stack and not self.stays:
            self._remove()

    def install(self) -> None:
        if self._call is not None:
            return
        try:
            from transformers import GradientCheckpointingLayer
        except ImportError as error:
            raise RuntimeError("marking the inputs of checkpointed layers needs transformers >= 4.52") from error
        usual = GradientCheckpointingLayer.__call__
        self._own = GradientCheckpointingLayer.__dict__.get("__call__")  # in releases that have one in the class

        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            context, states = self.stack[-1] if self.stack else None, args[0] if args else None
            checkpointed = (
                layer.training and torch.is_grad_enabled() and getattr(layer, "gradient_checkpointing", False)
            )
            if context is None or not checkpointed or not isinstance(states, Tensor):
                return usual(layer, *args, **kwargs)
            context.mark(states)
            try:
                return usual(layer, *args, **kwargs)
            finally:
                context._consume_mark(states)  # ids come again: one that nothing saved must not stay

        self._call = call
        setattr(GradientCheckpointingLayer, "__call__", call)  # noqa: B010  mypy knows better than to assign a method

    def _remove(self) -> None:
        if self._call is None:
            return
        from transformers import GradientCheckpointingLayer

        if GradientCheckpointingLayer.__dict__.get("__call__") is self._call:
            del GradientCheckpointingLayer.__call__
            if self._own is not None:
                setattr(GradientCheckpointingLayer, "__call__", self._own)  # noqa: B010
        self._call = self._own = None


_marker = _Marker()
