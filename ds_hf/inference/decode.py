"""``Decoder``: ``model.generate`` of a Hugging Face model, with a static cache and a captured step.

transformers prepares everything (configuration, encoder, processors of logits, stopping) and computes the prompt;
only its loop over tokens is replaced, through ``custom_generate``. What the loop cannot do goes to transformers as it
is, with one line that says why. Weights are read where they lie: they may change in place between calls, and where one
has moved its graphs are captured again.
"""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ds_hf.engine.comm.process_group import release_before_shutdown
from ds_hf.engine.zero.packed import packed_parts
from ds_hf.inference.static import CACHE_NAMES, cache_of, fill, given_cache, shape_of, static_cache
from ds_hf.inference.step import DecodingStep, TokenChoice
from ds_hf.inference.supported import Unsupported, check_cache, check_choice, check_mode, refusal, stops
from ds_hf.log import log_once, logger

__all__ = ["Decoded", "Decoder", "cache_length"]

_LOOK_EVERY = 8  # steps on a GPU between two looks at whether all sequences have ended
_COMPILED_SHAPES = 64  # torch's limit of 8 shapes counts over all lengths and batch sizes


@dataclass(frozen=True)
class Decoded:
    """What the last call of ``generate`` did.

    Attributes:
        way: ``"graph"``, ``"static"`` (static cache, no graph) or ``"transformers"``.
        compiled: whether the step was compiled.
        steps: decoding steps that were computed, without the prompt's.
        cache_length: positions of the static cache, 0 where there was none.
        why: of ``"transformers"``: the reason.
    """

    way: str
    compiled: bool = False
    steps: int = 0
    cache_length: int = 0
    why: str = ""


class Decoder:
    """Generates with one model, again and again.

    Args:
        model: of transformers, or a PEFT model around one.
        capture: capture steps in CUDA graphs where the model is on a GPU.
        compiled: compile the step by ``torch.compile`` before it is captured .
        max_length: refuse prompt and new tokens together beyond so many; ``None``: the model's own limits.
        settled: makes a context in which a step is captured: weights are complete and need no hooks.
        keep: how many shapes of batch keep their cache and graph.

    Attributes:
        last: what the last call did.
        clock: given each step of a decoding, which it calls; ``None`` to call them at once.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        capture: bool = True,
        compiled: bool = False,
        max_length: int | None = None,
        settled: Callable[[], AbstractContextManager[Any]] = nullcontext,
        keep: int = 4,
    ) -> None:
        self.model, self.capture, self.compiled, self.max_length = model, capture, compiled, max_length
        self.settled, self.keep = settled, keep
        self.last = Decoded("transformers")
        self.clock: Callable[[Callable[[], None]], None] | None = None
        self._steps: OrderedDict[Any, DecodingStep] = OrderedDict()
        self._addresses: tuple[Any, ...] = ()
        self._compiled_call: Callable[..., Any] | None = None
        self._pool: Any = None

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """``model.generate``: the same arguments, the same tokens.

        Raises:
            ValueError: the prompt and the new tokens do not fit into ``max_length``.
        """
        self._check_room(*_asked(self.model, args, kwargs))
        why = refusal(self.model, args, kwargs)
        if why is None:
            try:
                return self.model.generate(*args, custom_generate=self._decode, **kwargs)  # type: ignore[operator]
            except Unsupported as error:
                why = str(error)
        self.last = Decoded("transformers", why=why)
        log_once(f"generate: {why}, so transformers decodes with its own cache and without CUDA graphs")
        return self.model.generate(*args, **kwargs)  # type: ignore[operator]

    def release(self) -> None:
        """Give back caches and graphs; the next call makes new ones."""
        self._steps.clear()
        self._addresses, self._pool = (), None

    @torch.no_grad()
    def _decode(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **inputs: Any,
    ) -> Tensor:
        """What transformers calls in place of its loop; ``input_ids`` ``[B, prompt]``, tokens ``[B, prompt + new]``."""
        check_mode(generation_config)
        limit, ends = stops(stopping_criteria)
        pad = generation_config._pad_token_tensor
        device = model.device
        choice = TokenChoice(
            logits_processor,
            bool(generation_config.do_sample),
            None if ends is None else ends.to(device),
            None if pad is None else pad.to(device),
        )
        check_choice(logits_processor)
        check_cache(given_cache(inputs)[1])
        new = max(1, limit - input_ids.shape[1])  # one is made whatever the limit, as in transformers
        self._check_room(input_ids.shape[1], new)
        state, logits = _prompt(model, input_ids, inputs)
        finished = torch.zeros(input_ids.shape[0], dtype=torch.bool, device=device)
        first = choice(logits, finished)
        if new == 1:
            self.last = Decoded("static")
            return torch.cat([input_ids, first[:, None].to(input_ids.device)], dim=1)
        compiled = self.compiled and not generation_config.disable_compile
        step = self._begun(model, state, choice, first, finished, new, compiled)
        call = step if self.clock is None else functools.partial(self.clock, step)
        taken = _run(step, new - 1, call)
        self.last = Decoded(
            "graph" if step.graph is not None else "static", step.forward is not model, taken, step.mask.shape[1]
        )
        tokens = _trimmed(step.written[:, : taken + 1], choice.eos)
        return torch.cat([input_ids, tokens.to(input_ids.device)], dim=1)

    def _check_room(self, prompt: int, new: int) -> None:
        if self.max_length is not None and prompt + new > self.max_length:
            raise ValueError(
                f"a prompt of {prompt} tokens and {new} new ones make {prompt + new}, and the cache has room for "
                f"{self.max_length}: raise max_out_tokens, or give a shorter prompt or max_new_tokens"
            )

    def _begun(
        self, model: Any, state: _State, choice: TokenChoice, first: Tensor, finished: Tensor, new: int, compiled: bool
    ) -> DecodingStep:
        """The step for this shape of batch, made or found, with the prompt in it."""
        addresses = _addresses(self.model)
        if addresses != self._addresses:
            if self._steps:
                logger.debug("generate: weights have moved, the decoding step is captured again")
            self.release()
            self._addresses = addresses
        length = cache_length(state.filled + new, self.max_length)
        key: tuple[Any, ...] = (
            length,
            shape_of(state.cache),
            _shape(state.constants),
            state.position is not None,
            compiled,
        )
        key += (choice_key(choice), model.training, _autocast(first.device))
        step = self._steps.pop(key, None)
        fresh = step is None
        if step is None:
            while len(self._steps) >= self.keep:
                self._steps.popitem(last=False)
            filled_only = not self._captures(first.device)
            step = DecodingStep(
                self._call(model, compiled),
                state.names,
                static_cache(state.cache, length, filled_only=filled_only),
                choice,
                batch=first.shape[0],
                length=length,
                filled_only=filled_only,
                positions=state.position is not None,
                constants=state.constants,
                device=first.device,
            )
        step.refill(state.constants)
        fill(step.cache, state.cache)
        step.begin(first, state.mask, state.filled, state.position, finished)
        if fresh and self._captures(first.device):
            self._captured(step, model)
        self._steps[key] = step
        return step

    def _captures(self, device: torch.device) -> bool:
        return self.capture and device.type == "cuda"

    def _call(self, model: Any, compiled: bool) -> Callable[..., Any]:
        if not compiled:
            return model  # type: ignore[no-any-return]
        if self._compiled_call is None:
            from ds_hf.engine.modules.compiling import tell_of_the_wait

            # Products with one row become reductions then, which read weights as fast as memory gives them.
            # Those of one input (queries, keys, values; gate and up) share a kernel: 0.88 of the time.
            settings = {"coordinate_descent_tuning": True, "combo_kernels": True}
            tuned: dict[str, Any] | None = settings if model.device.type == "cuda" else None
            tell_of_the_wait("call of generate")
            self._compiled_call = torch.compile(model.__call__, dynamic=False, options=tuned)
        return self._compiled_call

    def _captured(self, step: DecodingStep, model: Any) -> None:
        """Capture ``step``; without the compiler where that fails, and not at all where capturing does."""
        import torch._dynamo

        self._pool = self._pool or torch.cuda.graph_pool_handle()
        tries = [step.forward] if step.forward is model else [step.forward, model]
        for forward in tries:
            step.forward = forward
            try:
                with torch._dynamo.config.patch(recompile_limit=_COMPILED_SHAPES):
                    step.capture(self._pool, self.settled)
                release_before_shutdown(self)  # layers that processes share have collectives
                return
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception as error:  # of the compiler, or of an operator that cannot be captured
                what = "compiled" if forward is not model else "captured in a CUDA graph"
                first = (str(error).strip() or type(error).__name__).splitlines()[0]
                log_once(f"generate: the decoding step cannot be {what}: {first}", logging.WARNING)
        step.forward = model


@dataclass
class _State:
    """What is known after the prompt: ``mask`` ``[B, filled]``, ``position`` ``[B, 1]`` of the next token."""

    cache: Any
    filled: int
    mask: Tensor | None
    position: Tensor | None
    names: tuple[str, str, str]
    constants: dict[str, Any]


def _prompt(model: Any, input_ids: Tensor, inputs: dict[str, Any]) -> tuple[_State, Tensor]:
    """Compute the prompt as transformers does; the state behind it and the last logits ``[B, vocabulary]`` in fp32."""
    prepared = model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **inputs)
    outputs = model(**prepared, return_dict=True)
    logits = outputs.logits[:, -1].to(copy=True, dtype=torch.float32)
    cache, device = cache_of(outputs), logits.device
    both = model.config.is_encoder_decoder
    tokens, shown = ("decoder_input_ids", "decoder_attention_mask") if both else ("input_ids", "attention_mask")
    position = inputs.get("position_ids")
    if position is not None and (both or position.dim() != 2):
        raise Unsupported("its positions have more than one dimension")
    kept = ("encoder_outputs", "attention_mask", "logits_to_keep") if both else ("logits_to_keep",)
    ours = {"use_cache", "position_ids", "inputs_embeds", "attention_mask", "output_attentions"}
    ours |= {"output_hidden_states", tokens, shown, *CACHE_NAMES, *kept}
    other = next((name for name, value in inputs.items() if name not in ours and value is not None), None)
    if other is not None:
        raise Unsupported(f"{other} is given")
    mask = inputs.get(shown)
    state = _State(
        cache,
        int(cache.get_seq_length()),
        None if mask is None else mask.to(device),
        None if position is None else position[:, -1:].to(device) + 1,
        (tokens, shown, given_cache(prepared)[0]),
        {name: inputs[name] for name in kept if inputs.get(name) is not None},
    )
    return state, logits


def _run(step: DecodingStep, most: int, call: Callable[[], None]) -> int:
    """At most ``most`` steps by ``call``; how many there were. On a GPU the host looks behind: it may be a few more."""
    if step.choice.eos is None:
        for _ in range(most):
            call()
        return most
    if step.token.device.type != "cuda":
        taken = 0
        while taken < most and not bool(step.finished.all()):
            call()
            taken += 1
        return taken
    ended = torch.zeros((), dtype=torch.bool, pin_memory=True)
    told: torch.cuda.Event | None = None
    for taken in range(most):
        if taken % _LOOK_EVERY == 0:
            if told is not None:
                told.synchronize()
                if bool(ended):
                    return taken
            ended.copy_(step.finished.all(), non_blocking=True)
            told = torch.cuda.Event()  # type: ignore[no-untyped-call]
            told.record()
        call()
    return most


def _trimmed(tokens: Tensor, eos: Tensor | None) -> Tensor:
    """``tokens`` ``[B, n]`` up to the step in which the last sequence ended."""
    if eos is None:
        return tokens.clone()
    ends = (tokens[:, :, None] == eos).any(dim=2)
    lengths = torch.where(ends.any(dim=1), ends.int().argmax(dim=1) + 1, tokens.shape[1])
    return tokens[:, : int(lengths.max())].clone()


def _asked(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """Tokens of the prompt and new ones, as far as a call says so itself. An encoder's are in no cache of this."""
    given = (*args[:1], kwargs.get("inputs"), kwargs.get("input_ids"))
    prompts = [value.shape[1] for value in given if isinstance(value, Tensor) and value.dim() == 2]
    config = args[1] if len(args) > 1 else kwargs.get("generation_config")
    new = kwargs.get("max_new_tokens") or getattr(config, "max_new_tokens", None)
    both = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return (prompts[0] if prompts and not both else 0), new or 0


def cache_length(positions: int, limit: int | None = None) -> int:
    """Positions of the static cache for ``positions`` that are needed: a quarter of the next lower power of two more
    at most, so that near lengths share a graph; ``limit`` where that is less."""
    grain = max(64, (1 << (positions.bit_length() - 1)) // 4)
    length = -(-positions // grain) * grain
    return length if limit is None else max(positions, min(length, limit))


def choice_key(choice: TokenChoice) -> tuple[Any, ...]:
    """What two choices that may share a graph have in common."""
    processors = tuple(
        (type(p).__name__, *sorted((k, _plain(v)) for k, v in vars(p).items())) for p in choice.processors
    )
    return processors, choice.sample, _plain(choice.eos), _plain(choice.pad)


def _plain(value: Any) -> str:
    return repr(value.tolist() if isinstance(value, Tensor) else value)


def _shape(values: Mapping[str, Any]) -> tuple[Any, ...]:
    found: list[Any] = []
    for name, value in values.items():
        if isinstance(value, Tensor):
            found.append((name, value.shape, value.dtype))
        elif isinstance(value, Mapping):
            found.append((name, _shape(value)))
        else:
            found.append((name, value))
    return tuple(found)


def _autocast(device: torch.device) -> tuple[Any, ...]:
    on = torch.is_autocast_enabled(device.type)
    return on, torch.get_autocast_dtype(device.type) if on else None


def _addresses(model: nn.Module) -> tuple[Any, ...]:
    """Where everything lies that a graph reads, and which adapters are merged."""
    tensors = tuple(part.data_ptr() for t in (*model.parameters(), *model.buffers()) for _, part in packed_parts(t))
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "merged_adapters")]
    adapters = tuple((tuple(m.merged_adapters), m.disable_adapters, tuple(m.active_adapters)) for m in layers)
    return tensors, adapters
