"""Whether a tensor is ``act(gate) * up``, by what autograd's graph says of it: then these two tell its values.

Torch's own operations are known, and Liger's functions, which do both. What has hooks is used in other ways, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_hf.engine.ops.rows import Activation

__all__ = ["Half", "activation_between"]

_LIGER: dict[str, Activation] = {
    "LigerSiLUMulFunctionBackward": "silu",
    "LigerGELUMulFunctionBackward": "gelu_tanh",
}


class Half(NamedTuple):
    """What a layer gave, ``[..., width]``, with its place in the graph and its version at that time."""

    out: Tensor
    edge: tuple[Any, int]
    version: int

    @classmethod
    def of(cls, out: Tensor) -> Half:
        return cls(out, (out.grad_fn, out.output_nr), out._version)

    def is_as_it_was(self) -> bool:
        return self.out._version == self.version and (self.out.grad_fn, self.out.output_nr) == self.edge


def activation_between(x: Tensor, gate: Half, up: Half) -> Activation | None:
    """``act`` where ``x`` is ``act(gate) * up`` and nothing else asks for its gradient or keeps its values elsewhere.

    Where saved tensors go through hooks (checkpointed blocks, activations in host memory) it is not looked at: what the
    first operation has saved went through them already.
    """
    node: Any = x.grad_fn
    if node is None or _is_watched(x) or x._version:
        return None
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return None
    for half in (gate, up):
        if half.out.shape != x.shape or half.out.dtype is not x.dtype or not half.is_as_it_was():
            return None
    edges = node.next_functions
    if (act := _LIGER.get(node.name())) is not None:
        scales = (getattr(node, name, 1.0) for name in ("gate_multiplier", "down_multiplier"))
        return act if edges[:2] == (gate.edge, up.edge) and all(scale == 1.0 for scale in scales) else None
    if node.name() != "MulBackward0" or len(edges) != 2 or edges[0][0] is None or edges[1] != up.edge:
        return None
    of_act = node._raw_saved_self
    if of_act.unpack_hook is not None or _is_watched(of_act.data):
        return None  # with hooks of its own it was saved in a checkpointed part that ended before this layer
    if of_act.data._version:
        return None  # written without autograd, which has no node for it: clamped, scaled
    act = _of(edges[0][0])
    return act if act is not None and edges[0][0].next_functions[0] == gate.edge else None


def _is_watched(x: Tensor) -> bool:
    """Whether its gradient goes elsewhere, too."""
    return bool(x._backward_hooks or x.retains_grad)


def _of(node: Any) -> Activation | None:
    if node.name() == "SiluBackward0":
        return "silu"
    if node.name() == "GeluBackward0":
        return "gelu_tanh" if node._saved_approximate == "tanh" else "gelu"
    return None
