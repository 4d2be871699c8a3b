"""Gradients that are elsewhere.

Between backward and the step the gradients of sharded plans are not in ``.grad``, and torch's clipping of nothing is
silent. One parameter of a buffer is of a class that tells who asks for it then (``GradientWatch``). So it is after the
step where another call than ``step()`` makes it, as accelerate's ``backward()`` does.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Sequence
from itertools import chain
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ds_hf.engine.zero.at_rest import Noticed, Released, name_of
from ds_hf.engine.zero.pending import Pending
from ds_hf.log import warn_once

__all__ = ["GradientWatch"]

_STEP = "_ds_step_made_by"  # on a parameter: the call that has made the step, which was not step()
_GRAD = vars(torch._C.TensorBase)["grad"]
_CLIPPING = torch.nn.utils.clip_grad.__name__
_AWARE = ("torch", "ds_hf", "accelerate", "transformers")  # what these find without values they leave to the engine


def _read_grad(param: Tensor) -> Tensor | None:
    grad: Tensor | None = _GRAD.__get__(param)
    if grad is None:
        reader = sys._getframe(1)
        name = str(reader.f_globals.get("__name__"))
        if name == _CLIPPING or name.partition(".")[0] not in _AWARE:
            _tell_no_gradient(param, reader if name == _CLIPPING else None)
        elif name.startswith("torch.") and reader.f_code.co_name == "zero_grad" and not hasattr(param, _STEP):
            warn_once(
                f"zero_grad() between backward() and step() drops nothing (said once, for {name_of(param)}): in this "
                "configuration gradients are in shards or another dtype, not in `.grad`, and the step is made with "
                "them. Call engine.optimizer.zero_grad() to drop them",
                about="gradients that are elsewhere",
            )
    return grad


def _tell_no_gradient(param: Tensor, clipping: FrameType | None) -> None:
    clips = float(getattr(param._ds_home.buffer.states, "policy").max_norm)  # type: ignore[attr-defined]  # noqa: B009
    while clipping is not None and "parameters" not in clipping.f_locals:  # a comprehension
        clipping = clipping.f_back
    wanted = None if clipping is None else clipping.f_locals.get("max_norm")
    made_by: str = getattr(param, _STEP, "")
    when = f"after {made_by}" if made_by else "between backward() and step()"
    why = "that call has made the step" if made_by else _ELSEWHERE
    if clipping is not None and wanted == clips:
        warn_once(
            f"{clipping.f_code.co_name}() returns 0 {when} (said once): {why}. The step clips at {clips:g} all the "
            "same, by the gradient_clipping of the configuration; after it the norm is engine.get_global_grad_norm()",
            about="norms of gradients that are elsewhere",
        )
        return
    what = "`.grad` is None" if clipping is None else f"{clipping.f_code.co_name}() changes nothing"
    how = f"model.backward(loss) in place of {made_by}, then " if made_by else ""
    warn_once(
        f"{what} {when} (said once, for {name_of(param)}): {why}. The engine clips at its gradient_clipping, "
        f'{clips:g} (0: never); write "gradient_clipping": {float(wanted or clips or 1.0):g} in the configuration to '
        "have the norm of all gradients clipped at that. To read or change single gradients (as clip_grad_value_ does) "
        f"call {how}deepspeed.utils.safe_get_full_grad(param) and safe_set_full_grad(param, value)"
        f"{', and model.step()' if made_by else ''}",
        about="gradients that are elsewhere",
    )


_ELSEWHERE = "in this configuration gradients are in shards or another dtype, not in `.grad`"


class _Watched(nn.Parameter):
    """A parameter whose gradient is elsewhere."""

    grad = property(_read_grad, _GRAD.__set__, _GRAD.__delete__)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        self.__class__ = nn.Parameter  # type: ignore[assignment]  # torch's own makes one of the same class
        return copy.deepcopy(self, memo)


class _WatchedAtRest(Released):
    """As ``_Watched``, and at rest."""

    grad = property(_read_grad, _GRAD.__set__, _GRAD.__delete__)


class _WatchedPending(Pending):
    """As ``_Watched``, and on its way."""

    grad = property(_read_grad, _GRAD.__set__, _GRAD.__delete__)
    arrived = _Watched


_WATCHING: dict[type, type[nn.Parameter]] = {
    nn.Parameter: _Watched,
    Noticed: _WatchedAtRest,
    Released: _WatchedAtRest,
    Pending: _WatchedPending,
}


class GradientWatch:
    """Tells who reads the ``.grad`` of a parameter: in the first steps of the first of each buffer, then of all in
    turns, one every ``EVERY`` backwards.

    Args:
        made_by: the call that has made the step when this begins, with whose name it is told.

    Attributes:
        pause: for so many backwards there is nothing to begin.
        watched: the parameters, while there is something to end.
    """

    EVERY = 16

    def __init__(self, made_by: str = "") -> None:
        self.made_by = made_by
        self.pause = 0
        self.watched: list[nn.Parameter] = []
        self._steps, self._turn = 3, 0

    def begin(self, buffers: Iterable[Sequence[nn.Parameter]]) -> None:
        """Gradients of the parameters of ``buffers`` are complete, and elsewhere or used."""
        if self._steps:
            chosen = [params[0] for params in buffers]
            self._steps -= 1
        else:
            every = list(chain.from_iterable(buffers))
            chosen = [every[self._turn % len(every)]] if every else []
            self._turn += 1
        self.pause = 0 if self._steps else self.EVERY - 1
        for param in chosen:
            if type(param) in _WATCHING:
                param.__class__ = _WATCHING[type(param)]
                if self.made_by:
                    setattr(param, _STEP, self.made_by)
                self.watched.append(param)

    def end(self) -> None:
        """Before the step, or when gradients are dropped; parameters are ordinary, or notice reads until their use."""
        for param in self.watched:
            vars(param).pop(_STEP, None)
            for ordinary, watching in _WATCHING.items():
                if type(param) is watching:
                    param.__class__ = ordinary
        self.watched.clear()
