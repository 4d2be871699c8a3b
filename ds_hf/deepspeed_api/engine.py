"""The engine as users hold it: that of ``ds_hf.engine`` with the names by which DeepSpeed's users ask it about itself.

Most are thin reads of settings and counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ds_hf.config.types import Config
from ds_hf.data.sampler import DeepSpeedDataSampler
from ds_hf.deepspeed_api.engine_data import DataNames, tell_loaders
from ds_hf.deepspeed_api.engine_generation import GenerationNames
from ds_hf.deepspeed_api.engine_settings import SettingsNames
from ds_hf.deepspeed_api.engine_states import StatesNames
from ds_hf.deepspeed_api.optimizer import ParameterOffload
from ds_hf.deepspeed_api.sequence.division import release
from ds_hf.engine.accumulation import BatchSizes
from ds_hf.engine.checkpoint import save as checkpoint_save
from ds_hf.engine.checkpoint.export import export_engine
from ds_hf.engine.comm.process_group import get_local_rank
from ds_hf.engine.engine import Gives
from ds_hf.engine.observe.probes.learning_rate.feeding import range_test
from ds_hf.engine.observe.progress import EngineSummary, summary_of
from ds_hf.engine.parallel.data import build_dataloader, dealt_to_data
from ds_hf.engine.parallel.sampling import SampledLoader, sampled_loader
from ds_hf.engine.parts import EngineParts
from ds_hf.engine.zero.buffer import unshard
from ds_hf.engine.zero.loading import own_parts
from ds_hf.lr import LrOptions, LrResult

if TYPE_CHECKING:
    from ds_hf.engine.modules.compiling import CompileReport

__all__ = ["Engine"]


class Engine(SettingsNames, StatesNames, GenerationNames, DataNames):
    """Trains ``module`` as the configuration says.

    Attributes:
        module: the user's model, the same object.
        optimizer: the sharded optimizer, ``None`` for an engine that only infers.
        lr_scheduler: scheduler that the engine steps, ``None`` when the user steps their own.
        config: the configuration as the plain dict that was given.
        settings: the same, validated and typed.
        plan: where each row of the model states lives.
        monitor: writes events where the configuration says; users may give it theirs.
        global_steps: optimizer steps tried; ``skipped_steps`` of them were skipped for an overflow.
    """

    def __init__(
        self, module: nn.Module, config: dict[str, Any], settings: Config, parts: EngineParts, monitor: Gives
    ) -> None:
        super().__init__(module, config, settings, parts, monitor)
        if self.optimizer is not None and self.plan.shards_parameters:
            self.optimizer.parameter_offload = ParameterOffload(module)  # type: ignore[attr-defined]  # for TRL

    def destroy(self) -> None:
        """Remove all hooks and free gradients, masters and moments; the module can be initialized again, and its
        sequences are whole."""
        release(self.module)
        super().destroy()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or name == "module":
                raise
        try:
            return getattr(module, name)
        except AttributeError:
            raise AttributeError(f"neither the engine nor {type(module).__name__} has an attribute {name!r}") from None

    # -- settings -------------------------------------------------------------------------------------------------

    def summary(self) -> EngineSummary:
        """What this engine is: the line with which a run begins, as a value; ``.table()`` says where its bytes go."""
        return summary_of(self)

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
        """Below stage 3 it is asked of models that tensor parallelism has divided, whose slices are always gathered."""
        gathers = self.settings.zero_optimization.stage3_gather_16bit_weights_on_model_save
        return gathers or (self.mesh.shape.model > 1 and not self.plan.shards_parameters)

    def fp16_enabled(self) -> bool:
        return self.settings.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        return self.settings.bf16.enabled

    def steps_per_print(self) -> float | None:
        return self.settings.steps_per_print

    def get_batch_info(self) -> tuple[int, int, int]:
        """Global batch, micro-batch of a process, accumulation steps."""
        return self.batch.train, self.batch.micro, self.accumulation.steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch from the next step on, by accumulating more or fewer micro-batches.

        Raises:
            ValueError: it is not a multiple of micro-batch x data-parallel processes.
        """
        train_batch_size = _samples("train_batch_size", train_batch_size)
        per_micro_batch = self.batch.micro * self.mesh.shape.data
        if train_batch_size < 1 or train_batch_size % per_micro_batch:
            raise ValueError(
                f"train_batch_size {train_batch_size} is not a multiple of {per_micro_batch} "
                f"(micro-batch {self.batch.micro} x {self.mesh.shape.data} processes)"
            )
        steps = train_batch_size // per_micro_batch
        self.batch = BatchSizes(train_batch_size, self.batch.micro, steps)
        self.accumulation.change(steps)
        tell_loaders(self)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Say that the caller's micro-batches have another size now; accumulation stays."""
        micro_batch_size = _samples("micro_batch_size", micro_batch_size)
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size is at least 1, not {micro_batch_size}")
        steps = self.accumulation.steps
        self.batch = BatchSizes(micro_batch_size * steps * self.mesh.shape.data, micro_batch_size, steps)
        tell_loaders(self)

    @property
    def global_rank(self) -> int:
        """Rank among all processes."""
        return dist.get_rank()

    @property
    def local_rank(self) -> int:
        """Rank among the processes of this machine (``LOCAL_RANK``)."""
        return get_local_rank()

    @property
    def world_size(self) -> int:
        """Number of all processes."""
        return dist.get_world_size()

    @property
    def dp_world_size(self) -> int:
        """Number of processes that read different samples."""
        return self.mesh.shape.data

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

    def autotp_size(self) -> int:
        """Number of processes that share each layer; 0 where nothing asks for it."""
        shared = self.mesh.shape.tensor if self.mesh.shape.tensor > 1 and not self.mesh.is_given else 0
        return max(shared, self.settings.tensor_parallel.autotp_size, self.tp_size_asked)

    @property
    def micro_steps(self) -> int:
        """Micro-batches finished."""
        return self.accumulation.micro_steps

    @micro_steps.setter
    def micro_steps(self, value: int) -> None:
        self.accumulation.micro_steps = value

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group."""
        self.settle_step()
        return [] if self.optimizer is None else [group["lr"] for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """Momentum (or Adam's betas) of each parameter group."""
        self.settle_step()
        if self.optimizer is None:
            return []
        return [group.get("betas", group.get("momentum")) for group in self.optimizer.param_groups]

    def loss_scale(self) -> float:
        """Present fp16 loss scale, 1 without."""
        return 1.0 if self.optimizer is None else self.optimizer.loss_scaler.scale

    def dynamic_loss_scale(self) -> bool:
        return self.plan.scales_loss and not (self.fp16_enabled() and self.settings.fp16.loss_scale)

    def empty_partition_cache(self) -> None:
        """Give back the memory of gathered parameters that stay between uses (where parameters are sharded)."""
        self._finish_update()
        for unit in self.units:
            unit.release()

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:
        """A loader of this rank's batches, as ``initialize(training_data=...)`` returns one.

        Args:
            batch_size: of one process; default the micro-batch.
            route: accepted for DeepSpeed's sake; a loader for evaluation shards in the same way.

            data_sampler: of this process: samples, or whole micro-batches (``DeepSpeedDataSampler``). Without one the
                loader brings its own, which shards and resumes, or which chooses by the configuration's metrics.
        """
        if data_sampler is not None:
            return self._sampled(dataset, batch_size, data_sampler, collate_fn, num_local_io_workers or 0, pin_memory)
        if route == "train" and self.settings.data_efficiency.samples_by_metrics:
            return dealt_to_data(sampled_loader(self.settings, self.mesh, self.batch, dataset, collate_fn), self.mesh)
        loader = build_dataloader(
            dataset,
            batch_size or self.batch.micro,
            collate_fn,
            self.settings.dataloader_drop_last,
            self.mesh.sample_rank,
            self.mesh.shape.data,
            num_local_io_workers or 0,
            pin_memory,
        )
        return dealt_to_data(loader, self.mesh)

    def _sampled(
        self, dataset: Any, batch_size: int | None, sampler: Any, collate_fn: Any, workers: int, pin_memory: bool
    ) -> DataLoader[Any]:
        options = {
            "collate_fn": collate_fn,
            "num_workers": workers,
            "pin_memory": pin_memory and self.device.type == "cuda",
        }
        if isinstance(sampler, DeepSpeedDataSampler):
            return SampledLoader(dataset, sampler, **options)
        last = self.settings.dataloader_drop_last
        return DataLoader(dataset, batch_size or self.batch.micro, sampler=sampler, drop_last=last, **options)

    # -- learning rate --------------------------------------------------------------------------------------------

    def lr_range_test(
        self,
        batches: Iterable[Any],
        *,
        held_out: Iterable[Any] | None = None,
        loss_of: Callable[[Any, Any], Tensor] | None = None,
        options: LrOptions | None = None,
        **changes: Any,
    ) -> LrResult:
        """Find a learning rate by range tests and short trainings; the engine is unchanged afterwards. Collective.

        Args:
            batches: this rank's micro-batches: mappings of the model's keywords, sequences of its arguments, or one.
            held_out: others to judge by; by default the last of ``batches`` are set aside.
            loss_of: gives the loss of ``(engine, batch)`` where the model does not return it.
            options: see ``ds_hf.lr.LrOptions``; ``changes`` to single ones of them.

        Returns:
            ``lr``, ``interval``, the curves, and ``advice()`` with schedules.

        Raises:
            DsHfError: there are too few batches, the call comes inside an accumulation, or every rate diverges.
        """
        chosen = replace(LrOptions() if options is None else options, **changes)
        return range_test(self, batches, held_out, loss_of, chosen)

    # -- weights --------------------------------------------------------------------------------------------------

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """The model's state dict as this rank holds it (sharded parameters are empty)."""
        self._require_alive(to_train=False)
        state: dict[str, Tensor] = self.module.state_dict()
        if exclude_frozen_parameters:
            for name, param in self.module.named_parameters(remove_duplicate=False):
                if not param.requires_grad:
                    state.pop(name, None)
        return state

    def load_module_state_dict(self, state_dict: dict[str, Tensor], strict: bool = True) -> None:
        """Load whole weights, the same on every rank, into the model and the masters behind it. Collective.

        Of layers and experts that processes divide each takes its part; a part, as the model's own ``state_dict()`` on
        this process has it, is taken as it is.
        """
        self._require_alive()
        buffers = self.hooks.used_buffers
        with unshard(buffers):
            self.module.load_state_dict(own_parts(self.module, state_dict), strict=strict)
            for buffer in buffers:
                buffer.write_back()

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> Any:
        """Whole weights on rank 0's CPU, ``None`` elsewhere. Collective. Who calls it wants them, whatever the
        configuration says of saves: OpenRLHF's has nothing about it."""
        self._require_alive()
        adapters = exclude_frozen_parameters and any(not param.requires_grad for param in self.module.parameters())
        self._finish_update()
        state = checkpoint_save.consolidated_state_dict(self, exclude_frozen_parameters)
        if adapters:
            self.hooks.keep_root()
        return state

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> Any:
        """The same of a model that stage 3, tensor or expert parallelism has divided. Collective.

        Raises:
            ValueError: neither has.
        """
        if not self.plan.shards_parameters and self.mesh.shape.model == 1 and self.mesh.shape.expert == 1:
            raise ValueError(
                "consolidated_16bit_state_dict is only applicable to cases where weights are partitioned, "
                "including Zero Stage 3 and tensor parallelism."
            )
        return self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write whole weights in the model's dtype; ``False`` when sharded weights may not be gathered."""
        self._require_alive()
        self._finish_update()
        return checkpoint_save.save_16bit_model(self, save_dir, save_filename, exclude_frozen_parameters)

    save_fp16_model = save_16bit_model

    def export_pretrained(
        self,
        save_dir: str | Path,
        *,
        dtype: torch.dtype | None = None,
        max_shard_size: str | int | None = "5GB",
        merged: bool = False,
    ) -> None:
        """Write sharded safetensors and the model's configuration for ``from_pretrained``, at every stage. Collective.

        At most one unit is gathered at a time. ``dtype`` is that of the weights, by default the model's. ``merged``:
        PEFT's active adapters are added to their weights, and the names are those of the model without them.

        Raises:
            CheckpointError: on every rank, when it could not be written, or adapters cannot be merged.
        """
        self._require_alive()
        export_engine(self, save_dir, dtype=dtype, max_shard_size=max_shard_size, merged=merged)

    @property
    def is_compiled(self) -> bool:
        """Whether modules of the model are compiled."""
        return bool(self.compiler.compiled)

    def compile_report(self) -> CompileReport:
        """Compiled modules, graphs and graph breaks so far."""
        return self.compiler.report()


def _samples(name: str, value: float) -> int:
    """A size of a batch as an integer, which 8.0 is as well."""
    if isinstance(value, bool) or not isinstance(value, Real) or float(value) % 1 != 0:
        raise ValueError(f"{name} is a whole number of samples, not {value!r}")
    return int(value)
