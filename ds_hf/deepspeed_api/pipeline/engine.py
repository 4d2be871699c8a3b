"""``PipelineEngine`` as DeepSpeed's users know it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hf.config.types import Config
from ds_hf.deepspeed_api.activation_checkpointing import non_reentrant_checkpoint
from ds_hf.deepspeed_api.engine import Engine
from ds_hf.engine.accumulation import WholeBatches
from ds_hf.engine.comm import collectives
from ds_hf.engine.engine import CoreEngine, Gives
from ds_hf.engine.parallel.data import RepeatingLoader, ShardedLoader
from ds_hf.engine.parallel.pipeline.batches import pull
from ds_hf.engine.parallel.pipeline.executor import BatchOutcome, Executor
from ds_hf.engine.parallel.pipeline.module import StageModule
from ds_hf.engine.parallel.pipeline.schedule import bubble
from ds_hf.engine.parts import EngineParts
from ds_hf.errors import ConfigError, PipelineError
from ds_hf.log import say

__all__ = ["PipelineEngine"]


class PipelineEngine(Engine):
    """Trains a ``PipelineModule``: ``train_batch`` runs all micro-batches of a step through the stages.

    Attributes:
        grid: the topology, as an ``mpu``.
        stage_id, num_stages, prev_stage, next_stage: of this process.
        is_pipe_parallel, is_data_parallel, is_model_parallel: whether there are several processes along that axis.
        agg_train_loss: what the last ``train_batch`` returned. agg_additional_losses: by name, the means of what
            ``module.get_additional_losses()`` gave.
        executor: runs the batches; ``idle_share`` of the last one.
    """

    module: StageModule
    accumulation: WholeBatches

    def __init__(
        self, module: nn.Module, config: dict[str, Any], settings: Config, parts: EngineParts, monitor: Gives
    ) -> None:
        super().__init__(module, config, settings, parts, monitor)
        assert isinstance(self.module, StageModule)
        self.grid = self.module.mpu()
        shape = self.mesh.shape
        self.num_stages, self.stage_id = shape.pipe, self.mesh.stage_rank
        self.prev_stage, self.next_stage = self.stage_id - 1, self.stage_id + 1
        self.is_pipe_parallel, self.is_data_parallel = shape.pipe > 1, shape.data > 1
        self.is_model_parallel = shape.tensor > 1
        if not settings.pipeline.use_reentrant:
            self.module.activation_checkpoint_func = non_reentrant_checkpoint
        interval = settings.pipeline.activation_checkpoint_interval
        if interval:
            self.module.set_checkpoint_interval(interval)
        if self.module.folded and self.is_pipe_parallel and self.micro_batches < 2 * self.num_stages:
            raise ConfigError(
                f"DualPipeV needs gradient_accumulation_steps >= 2 * {self.num_stages}, got {self.micro_batches}: give "
                "more, or a PipelineModule",
                "/gradient_accumulation_steps",
            )
        if self.module.chunks > 1 and not self.module.folded and self.micro_batches % self.num_stages:
            raise ConfigError(
                f"{self.micro_batches} micro-batches a step are not a multiple of the {self.num_stages} stages, which "
                f"{self.module.chunks} chunks a stage need: change gradient_accumulation_steps, or give 1 chunk",
                "/ds_hf/pipeline/chunks",
            )
        self.executor = Executor(self, self.module)
        self.data_iterator: Iterator[Any] | None = None
        self.batch_fn: Callable[[Any], Any] | None = getattr(module, "pair_of", None)
        self.agg_train_loss: Tensor | None = None
        self.agg_additional_losses: dict[str, Tensor] | None = None
        self._compared = False

    # -- what it is -----------------------------------------------------------------------------------------------

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return self.accumulation.steps

    @property
    def micro_batch_size(self) -> int:
        """Samples of a micro-batch."""
        return self.batch.micro

    def is_first_stage(self) -> bool:
        """Whether this process reads the inputs."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Whether this process computes the loss."""
        return self.stage_id == self.module.loss_stage

    def get_pipeline_parallel_rank(self) -> int:
        """The stage of this process."""
        return self.stage_id

    def set_has_attention_mask(self, value: bool) -> None:
        """Accepted for DeepSpeed's sake: masks are tensors like others."""
        if not isinstance(value, bool):
            raise TypeError(f"set_has_attention_mask() takes a bool, not {type(value).__name__}")

    def reset_activation_shape(self) -> None:
        """Accepted for DeepSpeed's sake: shapes may change at any time."""

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the present backward is the last one of a step, or the step itself is running."""
        return self.accumulation.at_boundary

    def _reentrant_activation_checkpointing(self) -> bool:
        """Whether DeepSpeed would recompute layers by its reentrant function; here none needs gradients of inputs."""
        func = self.module.activation_checkpoint_func
        return self.module.activation_checkpoint_interval > 0 and func is not non_reentrant_checkpoint

    # -- data -----------------------------------------------------------------------------------------------------

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Read one pass of ``loader`` from now on (``RepeatingLoader`` gives more); other stages ignore it."""
        if self.is_first_stage() or self.is_last_stage():
            self.training_dataloader = loader
            self.data_iterator = iter(loader)

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        """Read from ``iterator`` from now on; stages that read no data ignore it."""
        if self.is_first_stage() or self.is_last_stage():
            self.training_dataloader = None
            self.data_iterator = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """``fn`` makes a pair (inputs, labels) of each item."""
        self.batch_fn = fn

    def _iterator(self) -> Iterator[Any] | None:
        if self.data_iterator is None and self.training_dataloader is not None:
            self.data_iterator = iter(RepeatingLoader(self.training_dataloader))
        if self.data_iterator is not None and not hasattr(self.data_iterator, "__next__"):
            self.data_iterator = iter(self.data_iterator)  # DeepSpeed's users give loaders too
        return self.data_iterator

    def _pull(self, iterator: Iterator[Any] | None, count: int, *, compare: bool) -> list[Any]:
        reads = self.is_first_stage() or self.is_last_stage()
        own = self.training_dataloader if compare else None
        which = partial(_taken, own) if isinstance(own, ShardedLoader) else None
        return pull(iterator, count, self.batch_fn, self.mesh, self.device, reads=reads, compare=compare, which=which)

    # -- batches --------------------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train one batch: ``gradient_accumulation_steps`` items of each pipeline, then a step. All processes call it.

        Args:
            data_iter: of pairs (inputs, labels), each a tensor or a tuple of tensors, on the first and the last stage;
                default what was set before, or the ``training_data`` of ``initialize``, again and again.

        Returns:
            the mean loss of all micro-batches of all pipelines, fp32, the same on every process.

        Raises:
            StopIteration: on all processes alike, where one has fewer items left; nothing is trained then.
            PipelineError: the stages do not fit each other.
        """
        self._require_states()
        if not torch.is_grad_enabled():
            raise RuntimeError("train_batch() requires gradients enabled. Use eval_batch() instead.")
        if self.optimizer is None:
            raise PipelineError("train_batch() of an engine without an optimizer: use eval_batch()")
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self.module.train()
        compare = not self._compared and self.settings.ds_hf.pipeline.check_batches
        items = self._pull(self._iterator(), self.micro_batches, compare=compare)
        self._compared = True
        outcome = self.executor.train(items, self.micro_batches)
        self.agg_train_loss = self._mean_loss(outcome)
        for listen in self.events.on_loss:
            listen(self.agg_train_loss, 1.0)
        self.accumulation.micro_steps += self.micro_batches - 1
        CoreEngine.step(self)
        self._report()
        return self.agg_train_loss

    def eval_batch(
        self,
        data_iter: Iterator[Any] | None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Forward of one batch without gradients. All processes call it.

        Args:
            data_iter: as for ``train_batch``; the iterator for training stays.
            return_logits: also return what the last layer gave for the last micro-batch, on the last stage.
            compute_loss: call the ``loss_fn``; otherwise the outputs take the place of losses.
            reduce_output: ``"avg"``: the mean over micro-batches and pipelines; ``None``: a list.
            bcast_loss: give the mean loss to all stages; otherwise the last one alone has it.
            num_micro_batches: default as many as training has.

        Raises:
            StopIteration, PipelineError: as ``train_batch``.
        """
        self._require_alive()
        self.module.eval()
        count = self.micro_batches if num_micro_batches is None else num_micro_batches
        if data_iter is not None and not hasattr(data_iter, "__next__"):
            data_iter = iter(data_iter)
        items = self._pull(data_iter, count, compare=False)
        outcome = self.executor.evaluate(items, count, compute_loss=compute_loss)
        found: Any = outcome.losses if self.is_last_stage() else None
        if reduce_output is not None:
            if reduce_output.lower() != "avg":
                raise ValueError(f'reduce_output is "avg" or None, not {reduce_output!r:.40}')
            found = self._reduced(outcome.losses) if self.is_last_stage() else None
            if compute_loss and bcast_loss:
                found = self._from_last_stage(found)
        return (found, outcome.outputs) if return_logits else found

    def _mean_loss(self, outcome: BatchOutcome) -> Tensor:
        """Over micro-batches and pipelines, on all processes; additional losses with it. One collective."""
        names = sorted(self.module.get_additional_losses() or {})
        values = torch.zeros(1 + len(names), device=self.device)
        shape = self.mesh.shape
        if self.is_last_stage() and (shape.tensor == 1 or self.mesh.axis("tensor").rank == 0):
            total = torch.stack([loss.float().reshape(()) for loss in outcome.losses]).sum()
            further = [outcome.further[name].float().reshape(()) for name in names if name in outcome.further]
            values = torch.stack([total, *further]) / (self.micro_batches * shape.data)
        collectives.all_reduce_sum(values, self.mesh.world, "the loss")
        self.agg_additional_losses = dict(zip(names, values[1:], strict=True)) if names else None
        return values[0].clone()

    def _reduced(self, losses: list[Any]) -> Any:
        """The mean over micro-batches and pipelines, of each of several."""
        if not isinstance(losses[0], Tensor):
            return [self._reduced(list(column)) for column in zip(*losses, strict=True)]
        total = torch.stack(losses).sum(0) / len(losses)
        return collectives.all_reduce_sum(total, self.mesh.replicas, "the loss") / self.mesh.replicas.world_size

    def _from_last_stage(self, value: Any) -> Any:
        """What the last stage has, on all of them."""
        axis = self.mesh.axis("pipe")
        if axis.world_size == 1:
            return value
        last = self.module.loss_stage
        source = axis.global_rank(last)
        shapes: list[Any] = [_shapes(value)]
        with axis.log("broadcast", "the form of the loss"):
            dist.broadcast_object_list(shapes, source, group=axis.group, device=self.device)
        single = isinstance(shapes[0], tuple)
        listed = [value] if single else value
        if value is None:
            listed = [torch.empty(shape, device=self.device) for shape in ([shapes[0]] if single else shapes[0])]
        listed = [each.float().contiguous() for each in listed]
        for each in listed:
            collectives.broadcast(each, axis, last, "the loss")
        return listed[0] if single else listed

    def _report(self) -> None:
        """Which part of the batch each stage had nothing to compute, where ``wall_clock_breakdown`` asks for times."""
        if not (self.settings.wall_clock_breakdown and self.is_pipe_parallel):
            return
        axis = self.mesh.axis("pipe")
        shares = torch.zeros(axis.world_size, device=self.device)
        shares[axis.rank] = self.executor.idle_share
        collectives.all_reduce_sum(shares, axis, "idle shares")
        if self.mesh.world.rank == 0:
            share = bubble(self.micro_batches, self.num_stages, self.module.chunks, folded=self.module.folded)
            text = " | ".join(f"stage {stage}: {share:.1%}" for stage, share in enumerate(shares.tolist()))
            say(f"idle | {text} | bubble of the schedule: {share:.1%}")

    # -- weights --------------------------------------------------------------------------------------------------

    def load_module_state_dict(self, state_dict: dict[str, Tensor], strict: bool = True) -> None:
        """Load whole weights, the same on every rank, of which each stage takes its own. Collective.

        Raises:
            RuntimeError: ``strict``, and this stage has weights that are not there.
        """
        own = self.module.state_dict().keys()
        super().load_module_state_dict({name: value for name, value in state_dict.items() if name in own}, strict)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> tuple[str | None, dict[str, Any]]:
        """As of every engine, at any number of stages; data of ``initialize`` go on where they stood."""
        found = super().load_checkpoint(*args, **kwargs)
        if isinstance(self.training_dataloader, ShardedLoader):
            self.data_iterator = None
        return found

    def destroy(self) -> None:
        """As of every engine."""
        self.executor.links.log.close()
        super().destroy()

    # -- what a pipeline has not ----------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises ``PipelineError``: ``train_batch`` and ``eval_batch`` run a pipeline."""
        raise PipelineError("Only train_batch() is accessible in pipeline mode: forward() is a part of it")

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises ``PipelineError``."""
        raise PipelineError("Only train_batch() is accessible in pipeline mode: backward() is a part of it")

    def step(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises ``PipelineError``."""
        raise PipelineError("Only train_batch() is accessible in pipeline mode: step() is a part of it")

    def no_sync(self) -> NoReturn:
        """Raises ``PipelineError``."""
        raise PipelineError("no_sync() of a pipeline: train_batch() reduces gradients once, in its last backward")

    coalesce_grad_reduction = no_sync

    def lr_range_test(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises ``PipelineError``."""
        raise PipelineError(
            "lr_range_test() of a pipeline: it calls forward and backward of the engine, which are parts of "
            "train_batch() here; find the rate with a smaller model without stages"
        )


def _taken(loader: ShardedLoader) -> Any:
    """Which items a loader of the engine's has given: their indices follow from it, whatever the values are."""
    dataset: Any = loader.dataset
    return [loader.state_dict(), len(dataset) if hasattr(dataset, "__len__") else -1]


def _shapes(value: Any) -> Any:
    """A tuple of sizes of a tensor, a list of them of several, ``None`` of nothing."""
    if value is None:
        return None
    return tuple(value.shape) if isinstance(value, Tensor) else [tuple(each.shape) for each in value]
