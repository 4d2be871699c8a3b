"""One decoding step over buffers that stay where they are, so that it can be captured in a CUDA graph.

The step reads the last token, computes with a static cache, chooses the next token and writes it: nothing of it is on
the host, and a replay is one launch. Whatever differs from step to step (token, position, mask, how far the cache is
filled) lies in tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["DecodingStep", "TokenChoice"]

_WARM_UP = 2  # the first compiles and tunes kernels, the second makes libraries' workspaces


class TokenChoice:
    """How the next token is chosen from logits: transformers' own processors, then the best or a drawn one.

    Args:
        processors: of logits; none of them may look at the tokens so far.
        sample: draw; else the best.
        eos: ``[n]`` int64, tokens that end a sequence, or ``None``.
        pad: 0-dimensional int64, what follows an end.
    """

    def __init__(self, processors: Any, sample: bool, eos: Tensor | None, pad: Tensor | None) -> None:
        self.processors, self.sample, self.eos, self.pad = processors, sample, eos, pad

    def __call__(self, logits: Tensor, finished: Tensor) -> Tensor:
        """Next tokens ``[B]`` for fp32 ``logits`` ``[B, vocabulary]``; ``finished`` ``[B]`` is brought up to date."""
        scores = self.processors(None, logits) if len(self.processors) else logits
        if self.sample:
            # As torch.multinomial draws one of each row, with the same numbers, but without its look at the values
            # from the host, which cannot be captured.
            chances = torch.softmax(scores, dim=-1)
            token = torch.argmax(chances / torch.empty_like(chances).exponential_(1), dim=-1)
        else:
            token = torch.argmax(scores, dim=-1)
        if self.eos is None:
            return token
        if self.pad is not None:
            token = torch.where(finished, self.pad, token)
        finished |= (token[:, None] == self.eos).any(dim=1)
        return token


class DecodingStep:
    """Buffers of one shape of batch, the step over them, and its captured graph.

    Args:
        forward: the model's call.
        names: what ``forward`` calls the tokens, the mask over the cache ``[B, length]``, and the cache.
        cache: a static cache of ``length`` positions.
        choice: how tokens are chosen.
        batch: rows ``B``.
        length: positions of the cache.
        filled_only: the cache gives out the positions that are filled, so the model is shown the mask of those; for
            steps that are not captured.
        positions: whether ``forward`` takes ``position_ids``.
        constants: other arguments of ``forward``; their tensors are copied, and filled anew for each prompt.
        device: of everything here.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        names: tuple[str, str, str],
        cache: Any,
        choice: TokenChoice,
        *,
        batch: int,
        length: int,
        filled_only: bool,
        positions: bool,
        constants: Mapping[str, Any],
        device: torch.device,
    ) -> None:
        self.forward, self.names, self.cache, self.choice = forward, names, cache, choice
        self.filled_only = filled_only

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.token = zeros(batch, 1)
        self.mask = zeros(batch, length)
        self.place = zeros(1)  # where in the cache the token goes
        self.positions = zeros(batch, 1) if positions else None
        self.written = zeros(batch, length + 1)
        self.count = zeros(1)  # tokens written
        self.finished = torch.zeros(batch, dtype=torch.bool, device=device)
        self.constants = _copied(constants)
        self.graph: torch.cuda.CUDAGraph | None = None

    def begin(self, token: Tensor, mask: Tensor | None, filled: int, position: Tensor | None, finished: Tensor) -> None:
        """A new batch of prompts, of which the first ``token`` ``[B]`` is known and the cache holds ``filled``
        positions; ``mask`` ``[B, filled]`` is 0 where they are padding, ``position`` ``[B, 1]`` the token's."""
        self.token.copy_(token[:, None])
        self.mask.zero_()
        self.mask[:, :filled] = 1 if mask is None else mask[:, :filled]
        self.place.fill_(filled)
        if self.positions is not None and position is not None:
            self.positions.copy_(position)
        self.written.zero_()
        self.written[:, 0] = token
        self.count.fill_(1)
        self.finished.copy_(finished)

    def refill(self, constants: Mapping[str, Any]) -> None:
        """Put the tensors of ``constants`` in place of the last prompt's."""
        for mine, other in _pairs(self.constants, constants):
            mine.copy_(other)

    def __call__(self) -> None:
        """Compute the next token."""
        if self.graph is not None:
            self.graph.replay()
        else:
            self._step()

    def _step(self) -> None:
        tokens, mask, cache = self.names
        self.mask.index_fill_(1, self.place, 1)
        shown = self.mask[:, : int(self.place) + 1] if self.filled_only else self.mask
        inputs = {**self.constants, tokens: self.token, mask: shown, cache: self.cache}
        if self.positions is not None:
            inputs["position_ids"] = self.positions
        logits = self.forward(**inputs, use_cache=True, return_dict=True).logits
        token = self.choice(logits[:, -1].to(copy=True, dtype=torch.float32), self.finished)
        self.written.index_copy_(1, self.count, token[:, None])
        self.token.copy_(token[:, None])
        self.count.add_(1)
        self.place.add_(1)
        if self.positions is not None:
            self.positions.add_(1)

    def capture(self, pool: Any, settled: Callable[[], AbstractContextManager[Any]]) -> None:
        """Capture the step, between ``begin`` and the first call. Random states and buffers are left as they were."""
        with settled(), self._undone():
            aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(_WARM_UP):
                    with self._undone():
                        self._step()
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._step()
        self.graph = graph

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """What a step changes is put back at the end; the cache's values need not be, as the mask hides them."""
        changed = [self.token, self.mask, self.place, self.written, self.count, self.finished, *lengths_of(self.cache)]
        changed += [self.positions] if self.positions is not None else []
        before = [tensor.clone() for tensor in changed]
        drawn = torch.cuda.get_rng_state(self.token.device) if self.choice.sample else None
        try:
            yield
        finally:
            for tensor, value in zip(changed, before, strict=True):
                tensor.copy_(value)
            if drawn is not None:
                torch.cuda.set_rng_state(drawn, self.token.device)


def lengths_of(cache: Any) -> list[Tensor]:
    """How far each layer of a static cache is filled."""
    cache = getattr(cache, "self_attention_cache", cache)
    return [layer.cumulative_length for layer in cache.layers]


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with tensors of their own, also inside mappings (encoder outputs)."""
    return {name: _copy(value) for name, value in values.items()}


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return type(value)(**_copied(value))
    return value


def _pairs(mine: Mapping[str, Any], others: Mapping[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
    for name, value in mine.items():
        if isinstance(value, Tensor):
            yield value, others[name]
        elif isinstance(value, Mapping):
            yield from _pairs(value, others[name])
