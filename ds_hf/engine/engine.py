"""The engine: ``loss = engine(batch)``, ``engine.backward(loss)``, ``engine.step()``.

It owns the counters and the order of things; gathers and reductions happen in the hooks of ``zero``, the update in
``optim.sharded``, files in ``checkpoint``. It never asks which ZeRO stage it runs: ``builder`` gave it
parts that already follow the state plan.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property, partial, wraps
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn

from ds_hf.config.types import Config
from ds_hf.engine.accumulation import BatchSizes
from ds_hf.engine.casting import autocast_of, cast_floats, hint_at_buffers
from ds_hf.engine.checkpoint import load as checkpoint_load
from ds_hf.engine.checkpoint import save as checkpoint_save
from ds_hf.engine.checkpoint.background import BackgroundWriter
from ds_hf.engine.events import Phase
from ds_hf.engine.modules.compiling import ModuleCompiler, blocks_of, compiler_of, tell_of_compilation
from ds_hf.engine.modules.generation import Generation, generation_for
from ds_hf.engine.optim.outcome import LastStep
from ds_hf.engine.optim.sharded import ShardedOptimizer
from ds_hf.engine.parts import EngineParts
from ds_hf.engine.zero.external import explain_empty, explain_uncalled
from ds_hf.errors import DsHfError, LossError, NonFiniteError
from ds_hf.log import logger, warn_once

__all__ = ["CoreEngine"]

_PARKED = "offload_states() has moved states of this engine away: call reload_states() first"
_NO_OPTIMIZER = "no optimizer: initialize(), or accelerate's prepare(), takes one with the model, or the file names it"


F = TypeVar("F", bound=Callable[..., Any])
Gives = Callable[[], Any]
_NOTHING = nullcontext()


def _phase(name: Phase) -> Callable[[F], F]:
    """A method of the engine is one of its phases."""

    def decorate(method: F) -> F:
        @wraps(method)
        def run(self: CoreEngine, *args: Any, **kwargs: Any) -> Any:
            if not self.events.watched:
                return method(self, *args, **kwargs)
            return self.events.run(name, partial(method, self), args, kwargs)

        return cast(F, run)

    return decorate


class CoreEngine(nn.Module):
    """Trains ``module`` as the configuration says; ``deepspeed_api.engine.Engine`` adds DeepSpeed's names.

    Attributes:
        module: the user's model, the same object.
        optimizer: the sharded optimizer, ``None`` for an engine that only infers.
        lr_scheduler: scheduler that the engine steps, ``None`` when the user steps their own.
        config: the configuration as the plain dict that was given.
        settings: the same, validated and typed.
        plan: where each row of the model states lives.
        events: what watches the engine listens here.
        monitor: writes events where the configuration says; users may give it theirs.
        kept: what features keep in checkpoints, by name: objects with ``state_dict`` and ``load_state_dict``.
        step_hooks: called with the engine after each optimizer step; users may append theirs.
        remake: in a trial of the autotuner, makes another engine of ``initialize``'s arguments and a configuration.
        global_steps: optimizer steps tried; ``skipped_steps`` of them were skipped for an overflow.
    """

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise DsHfError(
            "an engine cannot be copied or pickled: it shares its states with the other processes. Copy engine.module "
            "(at ZeRO stage 3 inside deepspeed.zero.GatheredParameters) and call deepspeed.initialize for the copy, or "
            "write engine.save_checkpoint(folder)"
        )

    def __init__(
        self, module: nn.Module, config: dict[str, Any], settings: Config, parts: EngineParts, monitor: Gives
    ) -> None:
        super().__init__()
        self.module = module
        self.config = config
        self.settings = settings
        self.batch = BatchSizes.of(settings)
        self.plan, self.mesh, self.axis, self.device = parts.plan, parts.mesh, parts.mesh.replicas, parts.device
        self.units, self.reducer, self.hooks = parts.units, parts.reducer, parts.hooks
        self.unfreezing = parts.unfreezing
        self.compute_dtype = parts.compute_dtype
        self.param_names = parts.param_names
        self.optimizer: ShardedOptimizer | None = parts.optimizer
        self.lr_scheduler: Any = None
        self.accumulation = parts.accumulation
        self.training_dataloader: Any = None
        self.parked: set[str] = set()  # states that offload_states() has moved away
        self.global_steps = self.global_samples = 0
        self.last_step = LastStep()
        self.step_samples = 0  # of the last step, of all processes
        self.events = parts.events
        self.step_hooks: list[Callable[[CoreEngine], None]] = self.events.step_hooks
        self.kept: dict[str, Any] = {}
        self.remake: Callable[[dict[str, Any]], CoreEngine] | None = None
        self._open_monitor = monitor
        self._destroyed = False
        if self.optimizer is not None:
            self.optimizer.before_overflow = self.settle_step  # bound late: the engine steps it, and it asks
        self.hooks.install(module)

    @cached_property
    def monitor(self) -> Any:
        """Where loss and learning rate are written."""
        return self._open_monitor()

    @cached_property
    def generating(self) -> Generation:
        """What surrounds calls of ``generate``."""
        return generation_for(self)

    @cached_property
    def checkpoint_writer(self) -> BackgroundWriter:
        """Writes checkpoints in the background, and knows of the latest."""
        return BackgroundWriter(self.mesh.world)

    @cached_property
    def compiler(self) -> ModuleCompiler:
        """Compiles modules, and knows which are."""
        return compiler_of(self)

    # -- training -------------------------------------------------------------------------------------------------

    @_phase("forward")
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, under ``torch.autocast`` if the configuration says so and not under a caller's;
        floating-point inputs are cast to its dtype where that is 16-bit."""
        self._require_weights()
        self.hooks.reset()
        if self.compute_dtype is not None:
            args, kwargs = cast_floats(args, self.compute_dtype), cast_floats(kwargs, self.compute_dtype)
        try:
            casts = self.plan.autocast is not None or torch.is_autocast_enabled(self.device.type)
            with autocast_of(self.plan, self.device) if casts else _NOTHING:
                return self._modules["module"](*args, **kwargs)  # type: ignore[misc]  # past __getattr__
        except RuntimeError as error:
            hint_at_buffers(error, self.module, self.compute_dtype)
            if self.hooks.shards:
                explain_uncalled(error, self.units)
            raise

    @_phase("backward")
    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **kwargs: Any) -> Tensor:
        """Backward of one micro-batch; gradients are reduced as the plan says.

        Args:
            loss: 0-dim tensor (or one element).
            scale_wrt_gas: divide by ``gradient_accumulation_steps``, so that the step sees the mean.

        Returns:
            the loss after that division, without the loss scale.

        Raises:
            LossError: ``loss`` is not one number with a graph behind it.

        When it fails (out of memory), the gradients of the unfinished step are dropped; training may go on.
        """
        self._require_alive()
        _check_loss(loss)
        if scale_wrt_gas and self.accumulation.steps > 1:
            loss = loss / self.accumulation.steps
        if self.optimizer is None:
            loss.backward(retain_graph=retain_graph, **kwargs)  # type: ignore[no-untyped-call]
            self._release_units()
            return loss
        try:
            with self.hooks.driving():
                self._scaled(loss).backward(retain_graph=retain_graph, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if self.hooks.shards:
                explain_empty(error)
            raise
        for listen in self.events.on_loss:
            listen(loss, 1.0)
        return loss

    def scale(self, loss: Tensor, retain_graph: bool = False) -> Tensor:
        """``loss`` times the loss scale, for a ``.backward()`` of one's own: ``engine.scale(loss).backward()``.

        ``retain_graph`` is DeepSpeed's; what a graph needs is gathered for every backward through it.

        A ``.backward()`` that is not the engine's divides by ``gradient_accumulation_steps`` by itself.

        Raises:
            DsHfError: the engine has no optimizer.
            LossError: ``loss`` is not one number with a graph behind it.
        """
        self._require_alive()
        _check_loss(loss)
        for listen in self.events.on_loss:
            listen(loss, 1 / self.accumulation.steps)
        scaled = self._scaled(loss)
        self.reducer.await_backward(scaled)
        return scaled

    def _scaled(self, loss: Tensor) -> Tensor:
        if self.optimizer is None:
            raise DsHfError(_NO_OPTIMIZER)
        self.optimizer.nonfinite.losses.append(loss.detach())
        scale = self.optimizer.loss_scaler.scale
        return loss.float() * scale if scale != 1.0 else loss  # fp32: an fp16 loss times 2**16 would overflow

    @_phase("step")
    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a micro-batch; at the boundary update the weights, unless a gradient overflowed.

        The learning-rate schedule advances only when the weights did.
        """
        self._require_states()
        if self.optimizer is None:
            raise DsHfError(_NO_OPTIMIZER)
        if self.reducer.suspended:
            raise DsHfError(
                "step() inside no_sync() or coalesce_grad_reduction(): the gradients of this step were not reduced yet"
            )
        boundary = self.accumulation.updates
        self.settle_step()
        self.last_step.applied = False
        if boundary:
            self.step_samples = self.accumulation.samples(self.batch, self.reducer.backwards)
            self.accumulation.stepping = True
            self.optimizer.nonfinite.begin(self.global_steps + 1)
            self.hooks.let_graphs_go()
            try:
                self.optimizer.step()
            except NonFiniteError:
                self.accumulation.micro_steps += 1  # its gradients are gone: the next accumulation begins
                raise
            finally:
                self.accumulation.stepping = False
            self.global_steps += 1
            self.global_samples += self.step_samples
            if self.last_step.advance(self.optimizer, self.lr_scheduler, **(lr_kwargs or {})):
                self.settle_step()
        self.accumulation.micro_steps += 1
        if boundary:
            for hook in self.step_hooks:
                hook(self)

    def settle_step(self) -> None:
        """Find out whether the last step was applied, if that is still open, and tell what listens."""
        applied = self.last_step.learn(self.optimizer)
        if applied is None:
            return
        if not applied:
            self.hooks.skip_step()
        if not applied and self.mesh.world.rank == 0:
            assert self.optimizer is not None
            scaler = self.optimizer.loss_scaler
            scale = f"; loss scale now {scaler.scale:g}" if scaler.use_grad_scaling else ""
            logger.warning(
                "step %d skipped: a gradient is inf or nan (%d skipped so far%s)",
                self.global_steps, self.last_step.skipped, scale,
            )  # fmt: skip
        for listen in self.events.on_outcome:
            listen()

    @property
    def skipped_steps(self) -> int:
        """Steps that were skipped because a gradient was inf or nan."""
        self.settle_step()
        return self.last_step.skipped

    @skipped_steps.setter
    def skipped_steps(self, value: int) -> None:
        self.last_step.skipped = value

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the coming backward and step end an accumulation; holds until set again.

        Raises:
            DsHfError: the configuration has ``managed_gradient_accumulation: false``.
        """
        self.accumulation.force(is_boundary)

    @property
    def begun_micro_batches(self) -> int:
        """Micro-batches whose gradients wait for a step."""
        return self.accumulation.begun(self.reducer.backwards)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the present micro-batch ends with an optimizer step."""
        return self.accumulation.at_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside keep their gradients on this rank; the first one outside reduces the sum.

        Raises:
            DsHfError: the plan shards gradients, so each backward has to reduce.
        """
        if self.plan.reduces_every_micro_batch:
            raise DsHfError(
                "no_sync() cannot be used where gradients are sharded (ZeRO stages 2 and 3): they are reduced in every "
                "backward; use stage 0 or 1, or leave no_sync() out"
            )
        with self.reducer.suspending("no_sync()"):
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Backwards inside keep their gradients on this rank; the end of the block reduces the sum, at every stage.

        For several backwards that make one step: one reduction instead of one for each, and until then the whole
        unreduced gradient in memory. ``step`` comes after the block. Where the block ends in an exception nothing is
        reduced: the gradients of the unfinished step are dropped, and training may go on.

        Raises:
            DsHfError: inside itself or ``no_sync()``, without an optimizer, or with ``managed_gradient_accumulation:
                false``, where ``step`` alone reduces.
        """
        self._require_alive()
        if self.optimizer is None:
            raise DsHfError(_NO_OPTIMIZER)
        if not self.settings.managed_gradient_accumulation:
            raise DsHfError(
                "coalesce_grad_reduction() with managed_gradient_accumulation: false: backwards are added up there, "
                "and engine.step() reduces the sum; leave the block out, or the key"
            )
        with self.reducer.suspending("coalesce_grad_reduction()"):
            try:
                yield
            except BaseException:
                self.hooks.abandon()
                raise
        self.reducer.reduce_held()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear what parameters hold in ``.grad``, what backwards inside ``no_sync`` left for this rank alone, and
        where one backward makes a step, the gradient that it gave.

        Sums over several micro-batches stay, which is told: ``step`` clears them, or ``engine.optimizer.zero_grad()``.
        """
        if self.reducer.accumulates and not self.reducer.held:
            warn_once(
                "engine.zero_grad() within an accumulation keeps the gradients of the micro-batches before it (said "
                "once): the step is made of all. Leave it out, or call engine.optimizer.zero_grad() to drop them",
                about="gradients of an accumulation",
            )
        self.reducer.take_back()
        for param in self.module.parameters():
            param.grad = None
        if self.reducer.held or not self.accumulation.keeps_sums:
            self.reducer.clear()

    def get_global_grad_norm(self) -> float | None:
        """L2 norm of all gradients of the last step, before clipping, without the loss scale; ``None`` before it."""
        self.settle_step()
        return None if self.optimizer is None else self.optimizer.grad_norm()

    def was_step_applied(self) -> bool:
        """Whether the last ``step`` changed the weights."""
        self.settle_step()
        return self.last_step.applied

    def _finish_update(self) -> None:
        """Nothing of a step is outstanding. Collective."""
        self.unfreezing.tidy()
        if self.optimizer is not None:
            self.optimizer.settle()

    # -- files ----------------------------------------------------------------------------------------------------

    @_phase("save_checkpoint")
    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | float | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        client_sd: dict[str, Any] | None = None,
    ) -> bool:
        """Write everything that training needs to go on, into ``save_dir/tag``. All ranks call it.

        When it returns the checkpoint is on disk. With ``ds_hf.checkpoint.async`` it returns when everything is copied
        to host memory: training may go on, but a crash still loses this checkpoint, and the one before it is the last
        that loads. Remove no older checkpoint before ``wait_for_checkpoint`` has returned.

        Args:
            tag: name of the checkpoint; default ``global_step`` and the number of steps.
            client_state: what ``load_checkpoint`` gives back; ``client_sd`` is the same, as the first tutorial had it.
            save_latest: make it the one that ``load_checkpoint`` takes by default.
            exclude_frozen_parameters: leave out what does not train.

        Raises:
            CheckpointError: it, or the one before in the background, could not be written whole; what was there before
                is left as it was.
            ValueError: ``client_state`` and ``client_sd`` are both given.
        """
        self._require_states()
        self.settle_step()
        if self.optimizer is not None:
            self.optimizer.look_back(wait=True)
        if client_state is not None and client_sd is not None:
            raise ValueError("client_state and client_sd are the same argument: give one")
        self._finish_update()
        state = client_sd if client_state is None else client_state
        name = None if tag is None else str(tag)  # scripts use losses and step numbers as tags
        return checkpoint_save.save_checkpoint(self, save_dir, name, state, save_latest, exclude_frozen_parameters)

    def wait_for_checkpoint(self) -> None:
        """Return when the checkpoint that is being written in the background is on disk. All ranks call it.

        ``save_checkpoint``, ``load_checkpoint``, ``destroy``, the end of ``Trainer.train()`` and the end of Python wait
        too. ``engine.checkpoint_writer.busy`` tells without waiting.

        Raises:
            CheckpointError: it could not be written.
        """
        self.checkpoint_writer.wait()

    @_phase("load_checkpoint")
    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | float | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Read what ``save_checkpoint`` wrote, at any world size, stage and offload. All ranks call it.

        Returns:
            the checkpoint's folder (``None`` when there is none) and the client state.

        Raises:
            CheckpointError: it is incomplete, damaged or does not fit the model.
        """
        self._require_states()
        if self.optimizer is not None:
            self.optimizer.forget_failure()
        self.settle_step()
        self._finish_update()
        self.wait_for_checkpoint()
        return checkpoint_load.load_checkpoint(
            self,
            load_dir,
            None if tag is None else str(tag),
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states,
            load_module_only,
            custom_load_fn,
        )

    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
        **kwargs: Any,
    ) -> None:
        """Compile the forward of each repeated block with ``torch.compile``; what ZeRO does stays outside.

        A model without such blocks is compiled whole, or in the parts that are gathered apart.
        After two steps the log tells how many graphs and graph breaks there are, see ``compile_report``.

        Raises:
            ValueError: ``schedule`` (of DeepCompile's passes) or compiled autograd is asked for.
        """
        if schedule is not None or compiled_autograd_enabled:
            raise ValueError("engine.compile() compiles blocks: it takes no schedule and no compiled autograd")
        if tell_of_compilation not in self.step_hooks:
            self.step_hooks.append(tell_of_compilation)
        for block in blocks_of(self.units, self.module):
            self.compiler.compile(block, backend=backend, **(compile_kwargs or {}), **kwargs)

    # -- life -----------------------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Remove all hooks and free gradients, masters and moments; the module can be initialized again. At stage 3 its
        weights stay in parts until then.

        Raises:
            CheckpointError: a checkpoint was being written in the background, and that failed.
        """
        if self._destroyed:
            return
        self._destroyed = True
        with ExitStack() as last:  # all of them, whatever one of them raises; the last first
            last.callback(self._free)
            if "checkpoint_writer" in self.__dict__:
                last.callback(self.checkpoint_writer.close)
            last.callback(self.events.close)

    def collect_python_gc(self) -> int:
        """Collect Python's cycles of objects, which ``disable_python_gc`` leaves to the caller; how many there were."""
        return gc.collect()

    def _free(self) -> None:
        self.hooks.remove()
        if "compiler" in self.__dict__:
            self.compiler.remove()
        self._release_units()
        self.reducer.free()
        self.unfreezing.free()
        for unit in self.units:
            for buffer in unit.buffers:
                buffer.states = None if buffer.states is self.optimizer else buffer.states
                if not buffer.sharded:
                    buffer.gather()  # what is on its way arrives
        if self.optimizer is not None:
            self.optimizer.free()
        self.optimizer = self.lr_scheduler = self.training_dataloader = None
        self.step_hooks.clear()

    @property
    def destroyed(self) -> bool:
        """Whether ``destroy`` was called."""
        return self._destroyed

    def _release_units(self) -> None:
        for unit in self.units:
            unit.release()

    def _require_alive(self, *, to_train: bool = True) -> None:
        if self._destroyed:
            raise DsHfError("this engine was destroyed; call initialize() again")
        if self.hooks.succession is not None and (to_train or not self.hooks.may_be_called):
            raise DsHfError(str(self.hooks.succession))

    def _require_weights(self) -> None:
        self._require_alive(to_train=False)
        if "lp_params" in self.parked:
            raise DsHfError(_PARKED)

    def _require_states(self) -> None:
        self._require_alive()
        if self.parked:
            raise DsHfError(_PARKED)


def _check_loss(loss: Any) -> None:
    if isinstance(loss, Tensor) and loss.is_complex():
        raise LossError(f"backward() takes a real number, but the loss is {loss.dtype}: take its absolute or real part")
    if not isinstance(loss, Tensor):
        raise LossError(f"backward() takes the loss tensor, not {type(loss).__name__}")
    if loss.numel() != 1:
        raise LossError(f"backward() takes one number, but the loss has shape {tuple(loss.shape)}: reduce it first")
    if not loss.requires_grad:
        raise LossError("the loss has no graph: it was computed under no_grad, or no parameter requires a gradient")
