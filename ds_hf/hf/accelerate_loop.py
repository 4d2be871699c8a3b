"""What a loop of accelerate's calls: ``backward()``, which makes the step with DeepSpeed, ``no_sync()``,
``clip_grad_norm_()``, and the optimizer's ``step()`` and ``zero_grad()``, which accelerate leaves empty.

They mean what they mean without DeepSpeed where that can be had, and say so where it cannot.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from types import ModuleType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ds_hf.config.plan import StatePlan
from ds_hf.engine.zero.grad_watch import GradientWatch
from ds_hf.hf.autoload import wrap
from ds_hf.log import warn_once

__all__ = ["begin", "counting_kept", "wrap_loop", "wrap_steps"]

_ADDING = "_ds_hf_adding"  # of an engine: whether accelerate's no_sync() is open
_MADE = "_ds_hf_steps_made"  # of the optimizer of an engine that accelerate drives: steps since optimizer.step()
_WATCH = "_ds_hf_used_gradients"  # of the same: tells who looks for gradients after the step
_ADDED_UP = "_ds_hf_added_up"  # of an engine: the number of micro-batches a step that accelerate gave it last
_BEFORE = "_ds_hf_before"  # of that state: the number before an Accelerator that was given none, and what it set
_TRAINED = "_ds_hf_trained"  # of accelerate's state of gradients, which all Accelerators share: engines that train


def wrap_steps(module: ModuleType) -> None:
    """Part of the hook of ``accelerate.utils.deepspeed``: a loop that calls ``optimizer.step()`` has called it for
    torch's schedulers, wherever the engine makes the step; and ``accelerator.backward()``, which makes the step, makes
    none inside ``no_sync()``, divides by as many micro-batches as accelerate counts, and is told where it is called for
    a step more than once, or not at all."""
    step = module.DeepSpeedOptimizerWrapper.step
    gradients = importlib.import_module("accelerate.state").GradientState

    @wraps(step)
    def called(wrapper: Any, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()  # it calls accelerator.backward(), which makes the step
        inner = getattr(getattr(wrapper, "optimizer", None), "optimizer", None)
        if isinstance(inner, torch.optim.Optimizer):
            inner._opt_called = True  # type: ignore[attr-defined]
        _tell_of_steps(wrapper.optimizer, gradients().sync_gradients)
        _watch(wrapper.optimizer, made=False)
        step(wrapper)
        return loss

    def drop(wrapped: Callable[..., Any], wrapper: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What another Accelerator's loss gave (a generator's, to its discriminator) goes, as without DeepSpeed."""
        if gradients().sync_gradients and _may_drop(wrapper.optimizer):
            wrapper.optimizer.reducer.clear()
        return wrapped(*args, **kwargs)

    def counted(wrapped: Callable[..., Any], wrapper: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = {"sync_gradients": True, **dict(zip(("loss", "sync_gradients"), args, strict=False)), **kwargs}
        given["sync_gradients"] &= not vars(wrapper.engine).get(_ADDING, False)
        _add_up(wrapper.engine, gradients().num_steps)
        _watch(wrapper.engine.optimizer, made=False)
        result = wrapped(**given)
        state = vars(wrapper.engine.optimizer)
        state[_MADE] = state.get(_MADE, 0) + bool(given["sync_gradients"])
        _watch(wrapper.engine.optimizer, made=given["sync_gradients"])
        return result

    module.DeepSpeedOptimizerWrapper.step = called  # schedules take it out of the method
    wrap(module, "DeepSpeedEngineWrapper.backward", counted)
    wrap(module, "DeepSpeedOptimizerWrapper.zero_grad", drop)


def _tell_of_steps(optimizer: Any, synced: bool) -> None:
    """``optimizer.step()`` is called: ``accelerator.backward()`` has made one step since the last call, and where
    accelerate makes a step no gradients wait for one."""
    state = vars(optimizer)
    made, waiting = state.get(_MADE, 0), synced and _waiting(optimizer)
    state.update({_MADE: 0} if made else {})
    if made > 1:
        warn_once(
            f"optimizer.step() is called once for {made} calls of accelerator.backward(), each of which has made a "
            "step with DeepSpeed: gradients of several calls are not added up, and a step that is left out is made "
            "all the same. Add losses up and call backward() once; to accumulate, give "
            "Accelerator(gradient_accumulation_steps=...) and use accelerator.accumulate(model), or call "
            "backward() inside accelerator.no_sync(model) for all but the last"
        )
    if made == 0 and waiting:
        warn_once(
            "optimizer.step() makes no step with DeepSpeed, accelerator.backward() does, and there are gradients "
            "that came otherwise, which update nothing. Call accelerator.backward(loss), of the Accelerator that "
            "prepared the model, in place of loss.backward()"
        )


def _watch(optimizer: Any, *, made: bool) -> None:
    """Tell who looks for gradients from now on, as torch's clipping does, where ``accelerator.backward()`` has ``made``
    the step with them; until ``optimizer.step()``."""
    if not made and _WATCH not in vars(optimizer):
        return
    watch: GradientWatch = vars(optimizer).setdefault(_WATCH, GradientWatch("accelerator.backward()"))
    watch.end()
    watch.pause -= made
    if made and watch.pause < 0:
        watch.begin(buffer.buffer.params for buffer in optimizer.reducer.buffers)


def _waiting(optimizer: Any) -> bool:
    """Whether an engine's optimizer has gradients that no step has used."""
    return getattr(getattr(optimizer, "reducer", None), "backwards", 0) > 0


def _may_drop(optimizer: Any) -> bool:
    """Whether ``zero_grad()`` drops gradients that wait: those of a loop that calls the engine's own ``backward()`` and
    ``step()``, and accumulates by itself, stay, for accelerate has let it call this after each micro-batch."""
    if not _waiting(optimizer):
        return False
    accumulation = optimizer.reducer.accumulation
    return _MADE in vars(optimizer) or (accumulation.forced is None and accumulation.begun(0) == 0)


def _add_up(engine: Any, micro_batches: int) -> None:
    """Have ``engine`` divide losses by what accelerate, which says where steps are made, counts since the last call."""
    if vars(engine).setdefault(_ADDED_UP, micro_batches) != micro_batches:
        vars(engine)[_ADDED_UP] = micro_batches
        engine.set_train_batch_size(engine.train_micro_batch_size_per_gpu() * micro_batches * engine.dp_world_size)


def wrap_loop(module: ModuleType) -> None:
    """Part of the hook of ``accelerate.accelerator``: ``accumulate()`` of several models asks each for its stage, and
    what the engine does otherwise than it was asked is told."""

    def of_its_own_stage(wrapped: Callable[..., Any], accelerator: Any, args: Any, kwargs: Any) -> Any:
        """accelerate takes the stage of the plugin that is selected now, and several models have one each: one whose
        gradients are sharded reduces them in every backward, whatever the others do."""
        model = args[0] if args else kwargs.get("model")
        plan = getattr(model, "plan", None)
        if not isinstance(plan, StatePlan):
            return wrapped(*args, **kwargs)
        return _adding(model, nullcontext() if plan.reduces_every_micro_batch else wrapped(*args, **kwargs))

    def tell_of_clipping(wrapped: Callable[..., Any], accelerator: Any, args: Any, kwargs: Any) -> Any:
        """accelerate only asks for the norm, of the model that was prepared last, when the step has been made."""
        given = dict(zip(("parameters", "max_norm", "norm_type"), args, strict=False)) | kwargs
        listed = given["parameters"]
        params = given["parameters"] = [listed] if isinstance(listed, Tensor) else list(listed)
        engine = next((model for model in accelerator._models if params and _trains(model, params[0])), None)
        if engine is None:
            return wrapped(**given)
        wanted, clips = float(given.get("max_norm", math.inf)), float(engine.optimizer.clip_grad)
        if math.isfinite(wanted) and not math.isclose(wanted, clips, rel_tol=1e-6):
            warn_once(
                f"accelerator.clip_grad_norm_(..., {wanted:g}) comes after the step, which accelerator.backward() "
                f"makes with DeepSpeed: the engine clips at its gradient_clipping, {clips:g} (0 is never). Set "
                f'"gradient_clipping": {wanted:g} in the configuration, or '
                f"DeepSpeedPlugin(gradient_clipping={wanted:g})"
            )
        kind = float(given.get("norm_type", 2))
        missing = len({id(p) for p in engine.parameters() if p.requires_grad} - {id(p) for p in params})
        if kind != 2 or missing:
            asked = (
                f"the norm of order {kind:g}" if kind != 2 else f"all but {missing} of the model's trained parameters"
            )
            warn_once(
                f"accelerator.clip_grad_norm_() was asked for {asked}: with DeepSpeed the engine clips by the 2-norm "
                "of all gradients together, and returns that"
            )
        return engine.get_global_grad_norm()

    def of_this_model(wrapped: Callable[..., Any], accelerator: Any, args: Any, kwargs: Any) -> Any:
        """accelerate drives the engine that was prepared first, also where the loss is of another one."""
        _count_on(accelerator)
        result = wrapped(*args, **kwargs)
        driven = getattr(getattr(accelerator, "deepspeed_engine_wrapped", None), "engine", None)
        others = [model for model in accelerator._models if driven is not None and model is not driven]
        if accelerator.sync_gradients and any(_waiting(getattr(model, "optimizer", None)) for model in others):
            warn_once(
                "accelerator.backward() makes the step of the model that was prepared first, and this loss has given "
                "gradients to one that the same Accelerator prepared later, which does not move. Prepare each model "
                "that trains by an Accelerator of its own, and call that one's backward()"
            )
        return result

    def as_before(wrapped: Callable[..., Any], accelerator: Any, args: Any, kwargs: Any) -> Any:
        _count_on(accelerator)
        return wrapped(*args, **kwargs)

    wrap(module, "Accelerator._do_sync", as_before)
    wrap(module, "Accelerator.backward", of_this_model)
    wrap(module, "Accelerator.clip_grad_norm_", tell_of_clipping)
    wrap(module, "Accelerator.no_sync", of_its_own_stage)


@contextmanager
def _adding(engine: Any, context: Any) -> Iterator[None]:
    """``accelerator.backward()`` adds gradients up and makes no step, as without DeepSpeed, also where they are reduced
    every time."""
    outside = vars(engine).get(_ADDING, False)
    vars(engine)[_ADDING] = True
    try:
        with context:
            yield
    finally:
        vars(engine)[_ADDING] = outside


def _trains(model: Any, param: Tensor) -> bool:
    """Whether ``model`` is an engine that has ``param``, and updates."""
    updates = getattr(getattr(model, "optimizer", None), "clip_grad", None) is not None
    return updates and any(each is param for each in model.parameters())


@contextmanager
def counting_kept(accelerator: Any, given: Sequence[Any]) -> Iterator[None]:
    """``prepare()`` of a model that only evaluates (a teacher) has no say in how many micro-batches a step has, which
    accelerate takes from the file that it prepares and counts for all models together."""
    content, count = accelerator.deepspeed_plugin.deepspeed_config, accelerator.gradient_accumulation_steps
    trains = "optimizer" in content or any(hasattr(each, "param_groups") or _is_placeholder(each) for each in given)
    if trains or not any(isinstance(each, nn.Module) for each in given):
        yield
        return
    if not isinstance(content.get("train_batch_size"), int):
        content["gradient_accumulation_steps"] = count
    try:
        yield
    finally:
        accelerator.gradient_accumulation_steps = count


@contextmanager
def counting_noted(accelerator: Any, says: bool) -> Iterator[None]:
    """``Accelerator()`` sets how many micro-batches a step has for all, to one where nothing ``says`` how many: that is
    for the model that it prepares, and models that train go on as before where it prepares none."""
    from accelerate.state import GradientState

    state = vars(GradientState())
    before = state.get("plugin_kwargs", {}).get("num_steps")
    yield
    after = accelerator.gradient_accumulation_steps
    trained = any(not engine.destroyed for engine in state.get(_TRAINED, ()))
    if trained and before != after:
        state[_BEFORE] = None if says else (before, after)


def _count_on(accelerator: Any) -> None:
    """A micro-batch begins: what an ``Accelerator()`` that has prepared no model that trains has set is undone."""
    before, after = vars(accelerator.gradient_state).pop(_BEFORE, None) or (None, None)
    if before is None or accelerator.gradient_accumulation_steps != after:
        return
    accelerator.gradient_accumulation_steps = before
    warn_once(
        f"an Accelerator that was made after models were prepared set the micro-batches of a step to {after} for all "
        f"models, and was given no number: they go on with {before}. To change it, give that Accelerator "
        "gradient_accumulation_steps"
    )


def begin(accelerator: Any, given: Sequence[Any], prepared: Sequence[Any]) -> None:
    """``prepare()`` has made an engine of what it was given: note how many micro-batches a step has, and tell what its
    placeholder of an optimizer says and the file's optimizer does not."""
    for each in prepared:
        if isinstance(getattr(each, "plan", None), StatePlan) and each.optimizer is not None:
            _tell_of_counts(accelerator, each)
    for each in given:
        if _is_placeholder(each):
            _tell_of_placeholder(each, accelerator.deepspeed_config.get("optimizer", {}).get("params", {}))
        elif type(each).__name__ == "DummyScheduler" and each.lr_scheduler_callable is None:
            _tell_of_schedule(accelerator, each, accelerator.deepspeed_config.get("scheduler", {}).get("params", {}))


def _is_placeholder(given: Any) -> bool:
    return type(given).__name__ == "DummyOptim"


def _tell_of_counts(accelerator: Any, engine: Any) -> None:
    """``engine`` begins with so many micro-batches a step, and so do those that train beside it from now on."""
    vars(accelerator.gradient_state).pop(_BEFORE, None)
    count = vars(engine)[_ADDED_UP] = accelerator.gradient_accumulation_steps
    trained: WeakSet[Any] = vars(accelerator.gradient_state).setdefault(_TRAINED, WeakSet())
    if others := {vars(other)[_ADDED_UP] for other in trained if not other.destroyed} - {count}:
        warn_once(
            f"accelerate counts micro-batches for all models together, and prepare() says {count} a step now: models "
            f"that were prepared before, with {', '.join(map(str, sorted(others)))}, make their steps alike. Say "
            "the same gradient_accumulation_steps in all files"
        )
    trained.add(engine)


def _tell_of_placeholder(dummy: Any, params: Mapping[str, Any]) -> None:
    """accelerate takes the rate and the weight decay where the file has "auto" for them, and nothing else."""
    usual = {"lr": 0.001, "weight_decay": 0}  # what it has when nothing is given
    said = {"lr": dummy.lr, "weight_decay": dummy.weight_decay, **dummy.kwargs}
    other = {
        key: value
        for key, value in said.items()
        if value != usual.get(key) and _plain(params, key) != _plain(said, key)
    }
    if other:
        warn_once(
            f"DummyOptim was given {', '.join(f'{key}={value!r}' for key, value in other.items())}: the optimizer of "
            f"the configuration does not take that, its params are {dict(params)}. Write it there; lr and weight_decay "
            'may be "auto", to be taken from DummyOptim'
        )


def _tell_of_schedule(accelerator: Any, dummy: Any, params: Mapping[str, Any]) -> None:
    """accelerate takes both numbers of steps where the file has "auto" for them."""
    said = dict(dummy.kwargs)
    if dummy.warmup_num_steps:  # 0 is what it has when nothing is given
        said["warmup_num_steps"] = dummy.warmup_num_steps
    if dummy.total_num_steps is not None:
        share = 1 if accelerator.split_batches else accelerator.num_processes
        said["total_num_steps"] = math.ceil(dummy.total_num_steps / share)
    other = {key: value for key, value in said.items() if key in params and _plain(params, key) != _plain(said, key)}
    if other:
        warn_once(
            f"DummyScheduler was given {', '.join(f'{key}={value!r}' for key, value in other.items())} (its "
            "total_num_steps divided by the processes), and the scheduler of the configuration says otherwise, which "
            f'counts: {dict(params)}. Numbers of steps may be "auto" there, to be taken from DummyScheduler'
        )


def _plain(values: Mapping[str, Any], key: str) -> Any:
    value = values.get(key)
    return list(value) if isinstance(value, tuple) else value
