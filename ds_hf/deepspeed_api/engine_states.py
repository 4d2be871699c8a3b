"""What DeepSpeed users do with an engine's states and reductions beside training, and the objects they look for."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_hf.checkpoint.files import tensors_name
from ds_hf.config.plan import SAFE_MODULES, dtype_name
from ds_hf.deepspeed_api.config import DeepSpeedConfig
from ds_hf.deepspeed_api.throughput import ThroughputTimer
from ds_hf.engine.engine import CoreEngine
from ds_hf.engine.observe.timers import SynchronizedWallClockTimer
from ds_hf.engine.offload.parking import Parking
from ds_hf.engine.zero.second_shard import SecondShard

__all__ = ["StatesNames"]


class StatesNames(CoreEngine):
    """A part of ``Engine``."""

    mpu: Any = None  # what initialize() was given

    @cached_property
    def parking(self) -> Parking:
        """Storages that ``offload_states`` has taken away."""
        return Parking()

    @cached_property
    def _config(self) -> DeepSpeedConfig:
        """The configuration as ``deepspeed.DeepSpeedConfig``."""
        return DeepSpeedConfig.of(self.settings, self.mesh.shape.data)

    def _get_optimizer_ckpt_name(self, checkpoints_path: str | Path, tag: str, expp_rank: int = 0) -> str:
        """The file that this process's optimizer states are in; processes of experts have no others."""
        return str(Path(checkpoints_path) / str(tag) / tensors_name(self.mesh.world.rank))

    def checkpoint_on_signal(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: dict[str, Any] | Callable[[], dict[str, Any]] | None = None,
        signals: Sequence[str] = ("SIGTERM", "SIGUSR1"),
    ) -> bool:
        """Save when a scheduler has asked a process to end. All ranks call it after each ``step()``, and once before
        the first one, from which on the signals are noted instead of ending the process.

        Args:
            save_dir, tag: as of ``save_checkpoint``.
            client_state: what ``load_checkpoint`` gives back, or a function that makes it when it is needed.
            signals: names; they count whichever process gets one.

        Returns:
            Whether the checkpoint is whole and training is to end; the same on all ranks.

        Raises:
            CheckpointError: it could not be written whole.
            DsHfError: this is not the main thread, or there is no such signal.
        """
        found = vars(self).get("_ds_signalled")
        if found is None:
            from ds_hf.engine.checkpoint.signals import SignalledCheckpoint

            found = self.__dict__["_ds_signalled"] = SignalledCheckpoint(self, signals)
        ended: bool = found(save_dir, tag, client_state)
        return ended

    @property
    def basic_optimizer(self) -> Any:
        """The optimizer behind ``engine.optimizer``."""
        return None if self.optimizer is None else self.optimizer.optimizer

    @cached_property
    def timers(self) -> SynchronizedWallClockTimer:
        """The engine's where the configuration asks for a breakdown (``breakdown.py``), and the user's own."""
        breakdown = self._breakdown
        return SynchronizedWallClockTimer() if breakdown is None else breakdown.timers

    @property
    def _breakdown(self) -> Any:
        """What times the engine's phases, if anything does."""
        return next((each for each in self.events.observers if hasattr(each, "timers")), None)

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Milliseconds of the latest micro-batch (``fwd_microstep``, ...) and step (``fwd``, ``bwd``, ``step``), where
        ``wall_clock_breakdown`` asks for them."""
        return {} if self._breakdown is None else dict(self._breakdown.latest)

    @cached_property
    def tput_timer(self) -> ThroughputTimer:
        """For the user's own use, with the engine's batch: the engine does not start it."""
        return ThroughputTimer(batch_size=self.batch.micro * self.batch.accumulation_steps)

    def bf16_optimizer_states(self) -> bool:
        return self.settings.bf16.bf16_optimizer_states

    def torch_autocast_enabled(self) -> bool:
        return self.settings.torch_autocast.enabled

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """Dtype of the autocast regions; ``None`` when there are none and the configuration names none."""
        name = dtype_name(self.settings.torch_autocast.dtype) or self.plan.autocast
        return None if name is None else getattr(torch, name)

    def torch_autocast_lower_precision_safe_modules(self) -> list[str]:
        """Names of the classes whose parameters' gradients are reduced in that dtype."""
        given = self.settings.torch_autocast.lower_precision_safe_modules
        return list(SAFE_MODULES if given is None else given)

    # -- reductions -----------------------------------------------------------------------------------------------

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Reduce what the backwards so far left, where the present micro-batch reduces at all. Collective.

        ``bucket_size`` is DeepSpeed's: gradients travel in units.
        """
        if self.accumulation.at_boundary or self.plan.reduces_every_micro_batch:
            self.reducer.finish()
            self.reducer.show()

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None] | None) -> None:
        """Call ``hook`` with each reduced gradient, this rank's part of a block, flat; it may change it in place."""
        for buffer in self.reducer.buffers:
            buffer.hook = hook

    # -- states that leave the device --------------------------------------------------------------------------------

    def offload_states(
        self,
        include: Container[str] | None = None,
        device: str = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Free device memory between two steps: copy states to host memory until ``reload_states()``.

        Args:
            include: some of ``OffloadStateTypeEnum``; default all. Masters that are the parameters themselves (fp32)
                go with ``lp_params``.
            device: ``"cpu"``.
            pin_memory: page-locked host memory.
            non_blocking: accepted; the copies are waited for, since their memory is freed.

        An engine without an optimizer (a reward or reference model, a teacher) has ``lp_params`` alone.

        Raises:
            ValueError: another device.
        """
        if device != "cpu":
            raise ValueError(f"offload_states() takes states to host memory: device is 'cpu', not {device!r}")
        self._finish_update()
        self.reducer.take_back()
        self._give_back_weights()
        for name, tensors in self._states_by_name().items():
            if include is None or name in include:
                self.parked.add(name)
                self.parking.park((t for t in tensors if t.device.type != "cpu"), pinned=pin_memory)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what ``offload_states`` took away."""
        self.parking.restore(non_blocking=non_blocking)
        self.parked.clear()
        for gradient in self.reducer.buffers:
            gradient.partial = gradient.partial  # in the stream's memory again
        self.reducer.show()

    def state_devices(self, state: str) -> set[torch.device]:
        """Where the states of a name of ``OffloadStateTypeEnum`` are now."""
        away = state in self.parked
        return {torch.device("cpu") if away else tensor.device for tensor in self._states_by_name()[state]}

    def _give_back_weights(self) -> None:
        """Gathered weights, and their memory that generation keeps."""
        if "generating" in vars(self):
            self.generating.release()
        for unit in self.units:
            unit.release()

    def _states_by_name(self) -> dict[str, list[Tensor]]:
        buffers = [buffer for unit in self.units for buffer in unit.buffers if buffer.gathering.region is None]
        values = [buffer.shard if buffer.sharded else buffer.full for buffer in buffers]
        values += [storage.values for buffer in buffers if isinstance(storage := buffer.shard_storage, SecondShard)]
        own = {buffer.shard.untyped_storage().data_ptr() for unit in self.units for buffer in unit.buffers}
        optimizer = self.optimizer
        masters = [] if optimizer is None else [*optimizer.masters.values(), *optimizer.low_bits.values()]
        inner = {} if optimizer is None else optimizer.optimizer.state
        states = [value for state in inner.values() for value in state.values()]
        apart = {} if optimizer is None else optimizer.store.kept_apart()
        states += apart.get("optim_states", ())
        masters += apart.get("hp_params", ())
        return {
            "optim_states": [t for t in states if isinstance(t, Tensor) and t.dim()],
            "hp_params": [t for t in masters if t.untyped_storage().data_ptr() not in own],
            "lp_params": values,
            "lp_grads": [g for buffer in self.reducer.buffers for g in (buffer.owned, buffer.partial) if g is not None],
            "contiguous_grad_buffer": [],
        }
