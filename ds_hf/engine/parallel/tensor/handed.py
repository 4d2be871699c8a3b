"""Hidden states that are handed from one block to the next while each process has a part of their tokens: a script that
gets hold of them (by a forward hook, or as an attribute) has a part as well, and a loss on it has another gradient than
one on the whole. Silently, as nothing of the model's own graph tells of it.

Invariant: the gradient that arrives at such hidden states is, bit for bit and at the same address, the one that the
next block gave back. Autograd makes another tensor when it adds what comes from elsewhere, since that one is held here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ds_hf.engine.parallel.tensor.functions import pass_on

__all__ = ["Handed"]


class Handed:
    """Hidden states of a part of the tokens, ``[..., tokens, hidden]``, and what of their gradient is known.

    Args:
        part: what a block gave, in a call that makes gradients.
        fault: raises for a gradient that is none of the next block's, with what to do.
        unseen: nothing is said before ``to_next`` was called.
    """

    __slots__ = ("_backward", "_given", "_unseen", "fault")

    def __init__(self, part: Tensor, fault: Callable[[], None], *, unseen: bool = False) -> None:
        self.fault, self._unseen = fault, unseen
        self._backward, self._given = -1, list[Tensor]()
        if part.requires_grad:
            part.register_hook(self._arrived)  # type: ignore[no-untyped-call]

    def to_next(self, part: Tensor) -> Tensor:
        """``part`` as the next block gets it."""
        if torch.is_grad_enabled() and part.requires_grad:
            self._unseen = False
            return pass_on(part, self._passed)
        self._unseen = True  # a reentrant checkpoint computes the block again, of a tensor of its own
        return part

    def _passed(self, grad: Tensor) -> None:
        if self._backward != (now := torch._C._current_graph_task_id()):
            self._backward, self._given = now, []
        self._given.append(grad)

    def _arrived(self, grad: Tensor) -> None:
        given, self._given = self._given, []
        if self._unseen or grad.is_meta:
            return
        if self._backward != torch._C._current_graph_task_id():
            given = []
        if len(given) == 1 and given[0].data_ptr() == grad.data_ptr():
            return
        if len(given) < 2 or not _is_sum(grad, given):
            self.fault()


def _is_sum(grad: Tensor, given: list[Tensor]) -> bool:
    """Of blocks that were given the same hidden states, in whatever order autograd added theirs up."""
    total = torch.stack([each.double() for each in given])
    apart = (grad.double() - total.sum(0)).norm()
    return bool(apart <= 4 * len(given) * torch.finfo(grad.dtype).eps * total.abs().sum(0).norm())
