"""The names by which DeepSpeed users ask an engine about itself: thin reads of its settings and counters.

Kept apart so that ``engine.py`` shows only how training goes. Nothing here changes state that training depends on.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_hf.engine.checkpoint import save as checkpoint_save
from ds_hf.engine.zero.buffer import unshard

if TYPE_CHECKING:
    from ds_hf.config.plan import StatePlan
    from ds_hf.config.types import Config
    from ds_hf.engine.accumulation import Accumulation, BatchSizes
    from ds_hf.engine.optim.sharded import ShardedOptimizer
    from ds_hf.engine.zero.unit import Unit

__all__ = ["EngineFacade"]


class EngineFacade:
    """Mixed into ``Engine``."""

    if TYPE_CHECKING:
        module: nn.Module
        settings: Config
        plan: StatePlan
        optimizer: ShardedOptimizer | None
        accumulation: Accumulation
        batch: BatchSizes
        units: list[Unit]
        compute_dtype: torch.dtype | None
        lr_scheduler: Any

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or name == "module":
                raise
        try:
            return getattr(module, name)
        except AttributeError:
            raise AttributeError(f"neither the engine nor {type(module).__name__} has an attribute {name!r}") from None

    # -- settings -------------------------------------------------------------------------------------------------

    def train_batch_size(self) -> int:
        return self.batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.batch.micro

    def gradient_accumulation_steps(self) -> int:
        return self.accumulation.steps

    def gradient_clipping(self) -> float:
        return self.settings.gradient_clipping

    def zero_optimization(self) -> bool:
        return self.plan.shards_optimizer

    def zero_optimization_stage(self) -> int:
        return self.settings.zero_optimization.stage

    def zero_optimization_partition_weights(self) -> bool:
        return self.plan.shards_parameters

    def zero_optimization_partition_gradients(self) -> bool:
        return self.plan.reduces_every_micro_batch

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        return self.settings.zero_optimization.stage3_gather_16bit_weights_on_model_save

    def fp16_enabled(self) -> bool:
        return self.settings.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        return self.settings.bf16.enabled

    def steps_per_print(self) -> float | None:
        return self.settings.steps_per_print

    def optimizer_name(self) -> str | None:
        return None if self.settings.optimizer is None else self.settings.optimizer.type

    def scheduler_name(self) -> str | None:
        return None if self.settings.scheduler is None else self.settings.scheduler.type

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model's parameters."""
        if self.compute_dtype is not None:
            return self.compute_dtype
        return next((p.dtype for p in self.module.parameters() if p.is_floating_point()), torch.float32)

    get_data_types = dtype

    # -- state ----------------------------------------------------------------------------------------------------

    @property
    def micro_steps(self) -> int:
        """Micro-batches finished."""
        return self.accumulation.micro_steps

    @micro_steps.setter
    def micro_steps(self, value: int) -> None:
        self.accumulation.micro_steps = value

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group."""
        return [] if self.optimizer is None else [group["lr"] for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """Momentum (or Adam's betas) of each parameter group."""
        if self.optimizer is None:
            return []
        return [group.get("betas", group.get("momentum")) for group in self.optimizer.param_groups]

    def loss_scale(self) -> float:
        """Present fp16 loss scale, 1 without."""
        return 1.0 if self.optimizer is None else self.optimizer.loss_scaler.scale

    def dynamic_loss_scale(self) -> bool:
        return self.fp16_enabled() and not self.settings.fp16.loss_scale

    # -- weights --------------------------------------------------------------------------------------------------

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """The model's state dict as this rank holds it (sharded parameters are empty)."""
        state: dict[str, Tensor] = self.module.state_dict()
        if exclude_frozen_parameters:
            for name, param in self.module.named_parameters(remove_duplicate=False):
                if not param.requires_grad:
                    state.pop(name, None)
        return state

    def load_module_state_dict(self, state_dict: dict[str, Tensor], strict: bool = True) -> None:
        """Load whole weights, the same on every rank, into the model and the masters behind it. Collective."""
        buffers = [buffer for unit in self.units for buffer in unit.buffers]
        with unshard(buffers):
            self.module.load_state_dict(state_dict, strict=strict)
            for buffer in buffers:
                buffer.write_back()

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> Any:
        """Whole weights on rank 0's CPU, ``None`` elsewhere. Collective.

        Raises:
            ValueError: ``stage3_gather_16bit_weights_on_model_save`` is off.
        """
        if self.plan.shards_parameters and not self.zero_gather_16bit_weights_on_model_save():
            raise ValueError(
                "the whole weights are not gathered on save: set "
                "zero_optimization.stage3_gather_16bit_weights_on_model_save to true, or use save_checkpoint() and "
                "zero_to_fp32.py"
            )
        return checkpoint_save.consolidated_state_dict(self, exclude_frozen_parameters)

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write whole weights in the model's dtype; ``False`` when sharded weights may not be gathered."""
        return checkpoint_save.save_16bit_model(self, save_dir, save_filename, exclude_frozen_parameters)

    save_fp16_model = save_16bit_model

    def compile(self, backend: Any = "inductor", compile_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Compile the forward of each repeated block; the hooks stay outside of the compiled code."""
        options = {**(compile_kwargs or {}), **kwargs}
        for unit in self.units:
            if unit.name:
                unit.module.forward = torch.compile(unit.module.forward, backend=backend, **options)
