"""Whether a tensor is ``silu(gate) * up``, by what autograd's graph says of it: then these two tell its values.

Torch's own operations are known, and Liger's function, which does both. What has hooks is used in other ways, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Half", "is_gated"]


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


def is_gated(x: Tensor, gate: Half, up: Half) -> bool:
    """Whether ``x`` is ``silu(gate) * up`` and nothing else asks for its gradient or keeps its values elsewhere.

    Where saved tensors go through hooks (checkpointed blocks, activations in host memory) it is not looked at: what the
    first operation has saved went through them already.
    """
    node = x.grad_fn
    if node is None or x._backward_hooks or x.retains_grad or x._version:
        return False
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return False
    for half in (gate, up):
        if half.out.shape != x.shape or half.out.dtype is not x.dtype or not half.is_as_it_was():
            return False
    edges: Any = node.next_functions
    name = node.name()
    if name == "LigerSiLUMulFunctionBackward":
        own: Any = node
        scales = getattr(own, "gate_multiplier", 1.0), getattr(own, "down_multiplier", 1.0)
        return scales == (1.0, 1.0) and edges[:2] == (gate.edge, up.edge)
    if name != "MulBackward0" or len(edges) != 2 or edges[0][0] is None or edges[0][0].name() != "SiluBackward0":
        return False
    return bool(edges[1] == up.edge and edges[0][0].next_functions[0] == gate.edge)
