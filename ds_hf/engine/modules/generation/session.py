"""``Generation``: what surrounds every call of ``generate`` on an engine's model.

``run`` is ``engine.generate``: evaluation mode, the engine's autocast, LoRA merged, random numbers of its own.
``around`` is for ``model.generate`` (the Trainer, TRL): transformers' semantics as they are. Both hold the whole
weights, so ranks run alone; where these do not fit, or experts are divided, ranks that have finished run on with the
others.

A forward without a graph leaves training no trace: units record no use, the order of prefetches stays, gradients and
counters are not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from ds_hf.config.types import HybridEngineSection
from ds_hf.engine.casting import cast_floats
from ds_hf.engine.modules.generation.adapters import merged
from ds_hf.engine.modules.generation.footprint import call_nbytes, check_cache_place, positions_of, prompt_shape
from ds_hf.engine.modules.generation.random_stream import RandomStream
from ds_hf.engine.modules.generation.weights import WholeWeights
from ds_hf.engine.zero.hooks import UnitHooks
from ds_hf.engine.zero.replicas import expert_processes
from ds_hf.errors import DsHfError

__all__ = ["FastDecoder", "Generation", "attach", "generation_for", "generation_of"]

_MARK = "_ds_generation"
_SYNCED_GPUS = 5  # position of the argument of transformers' generate, after self

Call = Callable[..., Any]


class FastDecoder(Protocol):
    """Makes ``model.generate`` of one model fast; calls it by itself where it cannot."""

    def generate(self, *args: Any, **kwargs: Any) -> Any: ...
    def release(self) -> None: ...


class Generation:
    """Of one engine.

    Args:
        module: its model.
        weights: of its units.
        hooks: told of a forward that ended in an exception.
        ready: raises where the model cannot run.
        device: where it computes.
        dtype: to which inputs are cast, ``None`` for as they are.
        autocast: its dtype in the engine's forward, if any.
        section: ``hybrid_engine``.
        longest: prompt and new tokens at most, where the configuration says so.

    Attributes:
        make_decoder: what decodes a model's tokens; ``None``: transformers alone.
    """

    def __init__(
        self,
        module: nn.Module,
        weights: WholeWeights,
        hooks: UnitHooks,
        ready: Callable[[], None],
        *,
        device: torch.device,
        dtype: torch.dtype | None,
        autocast: torch.dtype | None,
        section: HybridEngineSection,
        longest: int | None,
    ) -> None:
        self.module, self.weights, self.longest = module, weights, longest
        self.make_decoder: Callable[[nn.Module], FastDecoder] | None = None
        self._hooks, self._ready = hooks, ready
        self._device, self._dtype, self._autocast = device, dtype, autocast
        self._section = section
        self._random = RandomStream(device)
        self._decoders: dict[int, FastDecoder] = {}
        weights.keep_memory(section.enable_cuda_graph and not section.release_inference_cache)
        self._depth = 0
        self._decoding = False
        self._fused: ExitStack | None = None

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the model is no engine's

    # -- calls ----------------------------------------------------------------------------------------------------

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``engine.generate``.

        Raises:
            DsHfError: the model has no ``generate``, its weights are parked, or the call is longer than
                ``hybrid_engine.max_out_tokens``.
        """
        generate = getattr(self.module, "generate", None)
        if not callable(generate):
            raise DsHfError(
                f"engine.generate() calls generate() of the model, and {type(self.module).__name__} has none: give a "
                "model of transformers with a language-model head"
            )
        more = self._begin(self.module, args, kwargs)
        if self._dtype is not None:
            args, kwargs = cast_floats(args, self._dtype), cast_floats(kwargs, self._dtype)
        with ExitStack() as around:
            around.enter_context(self._random.drawn_from())
            around.enter_context(_evaluating(self.module))
            around.enter_context(self._cast())
            whole = around.enter_context(self.weights.held(more))
            if whole and kwargs.get("adapter_names") is None:
                around.enter_context(merged(self.module))
            around.enter_context(self._calling())
            return generate(*args, **kwargs)  # which comes back to ``around``

    def around(self, model: nn.Module, generate: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``model.generate``, where ``generate`` is transformers' own and ``model`` the engine's or inside it."""
        if self._depth:
            return self._decode(model, generate, args, kwargs)
        with self.weights.held(self._begin(model, args, kwargs)), self._calling():
            return self._decode(model, generate, args, kwargs)

    @contextmanager
    def session(self, keep: bool) -> Iterator[bool]:
        """The whole weights stay here for all calls inside, if they fit. Collective.

        Yields:
            whether they do.
        """
        self._ready()
        with self.weights.held(keep=keep) as whole:
            yield whole
        if whole and not keep and not self.weights.stay_in_place:
            self._release_decoders()  # their graphs read memory that is gone

    def release(self) -> None:
        """Give back caches, graphs, and the weights' memory that a session kept."""
        self._release_decoders()
        self.weights.give_back()

    def fuse(self) -> None:
        """Merge LoRA until ``unfuse``; the weights must be whole. Nothing happens where it is merged."""
        if self._fused is None:
            with ExitStack() as stack:
                stack.enter_context(self.weights.held())
                stack.enter_context(merged(self.module))
                self._fused = stack.pop_all()

    def unfuse(self) -> None:
        """Undo ``fuse``, to the bit."""
        fused, self._fused = self._fused, None
        if fused is not None:
            fused.close()

    # -- parts of a call ------------------------------------------------------------------------------------------

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Refuse what cannot be; the bytes that the call takes beside the weights."""
        self._ready()
        check_cache_place(model, kwargs, self._device)
        if self.longest is not None:
            prompt, positions = prompt_shape(args, kwargs)[1], positions_of(model, args, kwargs)
            if positions > self.longest:
                raise DsHfError(
                    f"a prompt of {prompt} tokens and {positions - prompt} new ones make {positions}, and "
                    f"hybrid_engine.max_out_tokens is {self.longest}: raise it, or give a shorter prompt or "
                    "max_new_tokens"
                )
        parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
        return call_nbytes(model, args, kwargs, torch.float32 if parameter is None else parameter.dtype)

    def _decode(self, model: nn.Module, generate: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = self._in_step(args, kwargs)
        decoder = None if self._decoding else self._decoder_of(model)
        if decoder is None:
            return generate(*args, **kwargs)
        self._decoding = True
        try:
            return decoder.generate(*args, **kwargs)
        finally:
            self._decoding = False

    @contextmanager
    def _calling(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        except BaseException:
            self._hooks.reset()
            raise
        finally:
            self._depth -= 1
            if self._section.release_inference_cache and not self._depth:
                self._release_decoders()

    def _decoder_of(self, model: nn.Module) -> FastDecoder | None:
        """``None`` under autocast, where a graph would keep casts of weights, and where weights are not whole."""
        if self.make_decoder is None or torch.is_autocast_enabled(self._device.type) or not self.weights.are_whole:
            return None
        if id(model) not in self._decoders:
            self._decoders[id(model)] = self.make_decoder(model)
        return self._decoders[id(model)]

    def _in_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """``synced_gpus`` as it has to be: ranks go on together only where a forward communicates.

        transformers and Seq2SeqTrainer take it to be so from the stage in a configuration; Whisper's own generate says
        that it is not.
        """
        together = self.weights.runs_in_step
        if len(args) > _SYNCED_GPUS or not (self.weights.sharded or together):
            return kwargs
        return {**kwargs, "synced_gpus": together}

    def _cast(self) -> AbstractContextManager[Any]:
        kind = self._device.type
        if self._autocast is not None:
            return torch.autocast(kind, dtype=self._autocast, cache_enabled=False)
        return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()

    def _release_decoders(self) -> None:
        for decoder in self._decoders.values():
            decoder.release()


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards each module is in the mode in which it was."""
    training = [child for child in module.modules() if child.training]
    for child in training:
        child.training = False
    try:
        yield
    finally:
        for child in training:
            child.training = True


# -- an engine's ---------------------------------------------------------------------------------------------------


def attach(engine: Any) -> None:
    """Have ``generate`` of the model of ``engine`` find its ``generating``, until the engine is destroyed."""
    _ = engine.generating  # made now


def generation_for(engine: Any) -> Generation:
    """What becomes ``engine.generating``, which its model finds from now on."""
    settings, plan = engine.settings, engine.plan
    section = settings.hybrid_engine if settings.hybrid_engine.enabled else HybridEngineSection()
    limited = section.enabled and settings.is_given("/hybrid_engine/max_out_tokens")
    generation = Generation(
        engine.module,
        WholeWeights(
            engine.units,
            engine.mesh.world,
            engine.device,
            whole=section.pin_parameters,
            exchanges=any(expert_processes(param) > 1 for param in engine.module.parameters()),
        ),
        engine.hooks,
        engine._require_weights,
        device=engine.device,
        dtype=engine.compute_dtype,
        autocast=None if plan.autocast is None else getattr(torch, plan.autocast),
        section=section,
        longest=section.max_out_tokens if limited else None,
    )
    engine.hooks.handles.append(_Marks(engine.module, generation))
    return generation


def generation_of(model: nn.Module) -> Generation | None:
    """Of the live engine whose model, or a part of it, is ``model``."""
    found: Generation | None = model.__dict__.get(_MARK)
    return found


class _Marks:
    """By which modules that generate find the engine; ``remove`` takes them away."""

    def __init__(self, model: nn.Module, generation: Generation) -> None:
        self._generation = generation
        self._marked = [module for module in model.modules() if callable(getattr(type(module), "generate", None))]
        for module in self._marked:
            module.__dict__[_MARK] = generation

    def remove(self) -> None:
        for module in self._marked:
            if module.__dict__.get(_MARK) is self._generation:
                del module.__dict__[_MARK]
        self._generation.unfuse()
        self._generation.release()
