"""Activation checkpointing under DeepSpeed's names: torch's non-reentrant checkpoint, with tracked random states.

``deepspeed.checkpointing`` is one ``ActivationCheckpointing``, made at first use. Invariant: a recomputation draws the
same random numbers as the forward it repeats, from torch's generators and from every state of the tracker, and leaves
the tracker as it found it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ds_hf.config import load_config
from ds_hf.deepspeed_api.accelerator import get_accelerator
from ds_hf.engine.modules.activations.attach import Offloading
from ds_hf.engine.modules.activations.offload import ActivationOffload
from ds_hf.errors import ConfigError
from ds_hf.log import logger, warn_once

__all__ = [
    "ActivationCheckpointing",
    "RngTracker",
    "activation_checkpointing",
    "checkpoint_function",
    "non_reentrant_checkpoint",
]

MODEL_PARALLEL = "model-parallel-rng"
TENSOR_PARALLEL_SEED_OFFSET = 2718  # as Megatron and DeepSpeed have it, so that seeded runs can be compared


class RngTracker:
    """Named states of the device's generator; ``fork`` runs a block on one of them."""

    def __init__(self) -> None:
        self.states: dict[str, torch.Tensor] = {}
        self.seeds: set[int] = set()

    def reset(self) -> None:
        """Forget all states."""
        self.states, self.seeds = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """The states by name, as a copy of the dictionary."""
        return dict(self.states)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Replace all states."""
        self.states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Make a state from ``seed``; the generator itself stays as it is.

        Raises:
            ValueError: the name or the seed is taken.
        """
        if seed in self.seeds:
            raise ValueError(f"seed {seed} already belongs to a state of the tracker; give each state its own seed")
        if name in self.states:
            raise ValueError(f"the tracker already has a state {name!r}")
        device = get_accelerator()
        kept = device.get_rng_state()
        device.manual_seed(seed)
        self.states[name] = device.get_rng_state()
        self.seeds.add(seed)
        device.set_rng_state(kept)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draw from the state ``name`` inside, which keeps where it stopped.

        Raises:
            KeyError: there is no such state.
        """
        if name not in self.states:
            raise KeyError(f"the tracker has no state {name!r}: add() it, or call model_parallel_cuda_manual_seed()")
        device = get_accelerator()
        kept = device.get_rng_state()
        device.set_rng_state(self.states[name])
        try:
            yield
        finally:
            self.states[name] = device.get_rng_state()
            device.set_rng_state(kept)


class ActivationCheckpointing:
    """What ``deepspeed.checkpointing`` keeps: its settings and the tracker.

    Attributes:
        in_host_memory: keep the inputs of checkpointed functions in host memory until backward.
        synchronize: wait for the device before and after each checkpointed function.
        profile: log how long each takes.
        partitions, contiguous, num_layers: what was asked for; nothing depends on it.
        mpu: what ``configure`` was given. configured: whether it was called.
    """

    def __init__(self) -> None:
        self.tracker = RngTracker()
        self.in_host_memory = self.synchronize = self.profile = False
        self.partitions = self.contiguous = False
        self.num_layers: int | None = None
        self.mpu: Any = None
        self.configured = False
        self._moved: ActivationOffload | None = None

    def configure(
        self,
        mpu_: Any = None,
        deepspeed_config: Any = None,
        partition_activations: bool | None = None,
        contiguous_checkpointing: bool | None = None,
        num_checkpoints: int | None = None,
        checkpoint_in_cpu: bool | None = None,
        synchronize: bool | None = None,
        profile: bool | None = None,
    ) -> None:
        """Take the settings of the configuration's ``activation_checkpointing``; arguments that are given win.

        Raises:
            ConfigError: activations should be partitioned over model-parallel processes, which ds_hf does not do.
        """
        section = _section(deepspeed_config)
        self.mpu = mpu_
        self.in_host_memory = _first(checkpoint_in_cpu, section and section.cpu_checkpointing)
        self.synchronize = _first(synchronize, section and section.synchronize_checkpoint_boundary)
        self.profile = _first(profile, section and section.profile)
        self.partition_activations_in_checkpoint(
            _first(partition_activations, section and section.partition_activations)
        )
        self.contiguous = _first(contiguous_checkpointing, section and section.contiguous_memory_optimization)
        if self.contiguous:
            warn_once("contiguous_checkpointing has no effect: torch's allocator keeps what is checkpointed")
        self.configured = True

    def is_configured(self) -> bool:
        """Whether ``configure`` was called."""
        return self.configured

    def reset(self) -> None:
        """Between two iterations DeepSpeed empties its buffers here; torch's checkpoint keeps none."""

    def checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``function(*args)`` without its activations, which backward computes again."""
        run = _Replay(function, self)
        through = Offloading(checkpoint, self._offload()) if self.in_host_memory else checkpoint
        return through(run, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)

    def _offload(self) -> ActivationOffload:
        """To the host and back, of the present device."""
        device = torch.device(get_accelerator().current_device_name())
        if self._moved is None or self._moved.device != device:
            self._moved = ActivationOffload(device)
        self._moved.alike = self.num_layers or 1
        return self._moved

    def partition_activations_in_checkpoint(self, partition_activation: bool) -> None:
        """Accept what changes nothing: with one model-parallel process there is nothing to partition.

        Raises:
            ConfigError: there are several.
        """
        size = 1 if self.mpu is None else int(self.mpu.get_model_parallel_world_size())
        if partition_activation and size > 1:
            raise ConfigError(
                f"partition_activations over {size} model-parallel ranks is not supported yet: use checkpoint_in_cpu"
            )
        self.partitions = partition_activation

    def set_num_layers(self, nlayers: int) -> None:
        """Only contiguous checkpointing wants to know."""
        self.num_layers = nlayers

    def model_parallel_cuda_manual_seed(self, seed: int) -> None:
        """Seed the device alike on all data-parallel ranks, and the tracker's state apart by model-parallel rank."""
        rank = 0 if self.mpu is None else int(self.mpu.get_model_parallel_rank())
        get_accelerator().manual_seed(seed)
        self.model_parallel_reconfigure_tp_seed(seed + TENSOR_PARALLEL_SEED_OFFSET + rank)

    def model_parallel_reconfigure_tp_seed(self, seed: int) -> None:
        """Start the model-parallel state anew from ``seed``."""
        self.tracker.reset()
        self.tracker.add(MODEL_PARALLEL, seed)

    def get_cuda_rng_tracker(self) -> RngTracker:
        """The tracker of random states."""
        return self.tracker


class _Replay:
    """Calls a function; from the second call on, with the tracker as the first call found it."""

    def __init__(self, function: Callable[..., Any], owner: ActivationCheckpointing) -> None:
        self.function, self.owner = function, owner
        self.found: dict[str, torch.Tensor] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tracker = self.owner.tracker
        now = tracker.get_states()
        if self.found is None:
            self.found = now
            with self._watched("forward"):
                return self.function(*args, **kwargs)
        tracker.set_states(self.found)
        try:
            with self._watched("recomputation"):
                return self.function(*args, **kwargs)
        finally:
            tracker.set_states(now)

    @contextmanager
    def _watched(self, what: str) -> Iterator[None]:
        if not (self.owner.synchronize or self.owner.profile):
            yield
            return
        device = get_accelerator()
        device.synchronize()
        start = time.perf_counter()
        yield
        device.synchronize()
        if self.owner.profile:
            name = getattr(self.function, "__name__", type(self.function).__name__)
            logger.info("checkpoint %s: %s took %.2f ms", name, what, (time.perf_counter() - start) * 1e3)


def _section(config: Any) -> Any:
    if config is None:
        return None
    return load_config(config, allow_auto=True, check_batch=False).activation_checkpointing


def _first(given: bool | None, configured: bool | None) -> bool:
    return bool(configured if given is None else given)


@functools.cache
def activation_checkpointing() -> ActivationCheckpointing:
    """The one of this process."""
    return ActivationCheckpointing()


# Two names of one function, which scripts tell apart: DeepSpeed's first one is reentrant.
checkpoint_function = activation_checkpointing().checkpoint
non_reentrant_checkpoint = activation_checkpointing().checkpoint
