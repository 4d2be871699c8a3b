"""Models that do what real ones do to a ZeRO engine, each with its loss; used by ``test_architectures``.

Every class takes no argument and every forward takes a float batch ``[samples, WIDTH]``. Widths are odd on purpose:
shards then cut parameters in the middle, and some ranks own nothing of the small ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.utils import ModelOutput

__all__ = ["WIDTH", "ZOO", "Case"]

WIDTH = 7


def mean_square(output: Tensor) -> Tensor:
    return (output - 0.5).square().mean()


class Layer(nn.Module):
    """Residual block whose backward needs its weights."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Three alike blocks between an input and an output layer of the root."""

    block: Callable[..., nn.Module] = Layer

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(3))
        self.outlet = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Any:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


# -- frozen -------------------------------------------------------------------------------------------------------


def frozen(*prefixes: str, only: bool = False) -> Callable[[], nn.Module]:
    """``Stack`` with the named parameters frozen (or all others, with ``only``)."""

    def make() -> nn.Module:
        model = Stack()
        for name, param in model.named_parameters():
            param.requires_grad_(any(name.startswith(p) for p in prefixes) == only)
        return model

    return make


class LoraLayer(Layer):
    """Frozen base weights, trained low-rank additions."""

    def __init__(self) -> None:
        super().__init__()
        for param in self.parameters():
            param.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, WIDTH) * 0.1)
        self.b = nn.Parameter(torch.randn(WIDTH, 2) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(F.linear(x, self.a), self.b)


class LoraStack(Stack):
    block = LoraLayer

    def __init__(self) -> None:
        super().__init__()
        for param in (*self.inlet.parameters(), *self.outlet.parameters()):
            param.requires_grad_(False)


class PromptLayer(Layer):
    """A frozen weight applied to a trained prompt: its backward comes after the gradient of the input is known."""

    def __init__(self) -> None:
        super().__init__()
        for param in self.parameters():
            param.requires_grad_(False)
        self.prompt = nn.Parameter(torch.randn(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        prompt = super().forward(self.prompt).tanh()
        return super().forward(x) + prompt


class PromptStack(Stack):
    block = PromptLayer


class DetachedUse(Layer):
    """Uses a weight also without its gradient: autograd needs it after the gradient is complete."""

    def forward(self, x: Tensor) -> Tensor:
        early = F.linear(x, self.down.weight.detach().t())
        return super().forward(x) + F.linear(early.tanh(), self.down.weight.detach())


class DetachedStack(Stack):
    block = DetachedUse


class StraightThrough(nn.Module):
    """Trained only by its scale; the weight itself is read through detach()."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(torch.sin(x), self.weight.detach())
        return x + F.linear(y.cos() * self.scale, self.weight)


class StraightThroughStack(Stack):
    block = StraightThrough


# -- tied and shared ----------------------------------------------------------------------------------------------


class TiedBlocks(Stack):
    """The first and the last block share a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].down.weight = self.blocks[0].down.weight


class TiedToRoot(Stack):
    """A block's bias is also the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = self.blocks[1].up.bias

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift.sum() * 0.1


class Albert(nn.Module):
    """One block called three times, between others."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Layer(), Layer()])
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for index in (0, 0, 1, 0):
            block = self.blocks[index]
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class FrozenAlbert(Albert):
    """The shared block is frozen: each call needs it in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)


# -- activation checkpointing -------------------------------------------------------------------------------------


class Checkpointed(Stack):
    def __init__(self, reentrant: bool, make: Callable[[], nn.Module] = Stack) -> None:
        super().__init__()
        self.inner = make()
        del self.inlet, self.blocks, self.outlet
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner.inlet(x)
        if self.reentrant:
            x = x.requires_grad_() if x.is_leaf else x
        for block in self.inner.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.inner.outlet(x)


# -- outputs ------------------------------------------------------------------------------------------------------


@dataclass
class Pair:
    hidden: Tensor
    label: str = "x"


class Plain:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Slotted:
    __slots__ = ("hidden",)

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


@dataclass
class HiddenOutput(ModelOutput):
    hidden: Tensor | None = None


def output_stack(wrap: Callable[[Tensor], Any], unwrap: Callable[[Any], Tensor]) -> Callable[[], nn.Module]:
    """A stack whose blocks, and the root, return ``wrap(tensor)``."""

    class Wrapped(Layer):
        def forward(self, x: Tensor) -> Any:
            return wrap(super().forward(x))

    class WrappedStack(Stack):
        block = Wrapped

        def forward(self, x: Tensor) -> Any:
            x = self.inlet(x)
            for block in self.blocks:
                x = unwrap(block(x))
            return wrap(self.outlet(x))

    return WrappedStack


class InPlace(Stack):
    """Changes the blocks' outputs in place, as fused residuals do."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
            x.mul_(0.5)
            x[:, 0] += 1.0
        return self.outlet(x)


class SideLayer(Layer):
    """Leaves an auxiliary loss on itself, as routers do."""

    def forward(self, x: Tensor) -> Tensor:
        self.extra = self.up(x).square().mean()
        return super().forward(x)


class SideChannel(Stack):
    block = SideLayer

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum() + sum(block.extra for block in self.blocks)


# -- ways to call -------------------------------------------------------------------------------------------------


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Stack()
        self.encoder.outlet = nn.Linear(WIDTH, WIDTH)
        self.decoder = Stack()

    def forward(self, x: Tensor, encoded: Tensor | None = None) -> Tensor:
        encoded = self.encoder(x) if encoded is None else encoded
        return self.decoder(encoded + x)


class WithMethods(Stack):
    def features(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return x


def encoder_first(model: Any, x: Tensor) -> Tensor:
    module = getattr(model, "module", model)
    return mean_square(model(x, module.encoder(x)))


def root_never_called(model: Any, x: Tensor) -> Tensor:
    module = getattr(model, "module", model)
    return mean_square(module.outlet(module.features(x)))


def around_the_root(model: Any, x: Tensor) -> Tensor:
    module = getattr(model, "module", model)
    return mean_square(model(x)) + mean_square(module.blocks[1](x)) + mean_square(module.outlet(x))


def siamese(model: Any, x: Tensor) -> Tensor:
    return F.mse_loss(model(x), model(x.flip(0) * 0.5) + 1.0)


def with_eval_between(model: Any, x: Tensor) -> Tensor:
    loss = mean_square(model(x))
    with torch.no_grad():
        model(x)
    with torch.inference_mode():
        model(x)
    return loss


def with_forward_between(model: Any, x: Tensor) -> Tensor:
    model(x)  # never goes backward
    return mean_square(model(x))


# -- layers of torch ----------------------------------------------------------------------------------------------


class TorchLayers(nn.Module):
    """Layers that reach into their children, hold their weights elsewhere or compute them."""

    def __init__(self) -> None:
        super().__init__()
        width = 8
        self.inlet = nn.Linear(WIDTH, width)
        layer = nn.TransformerEncoderLayer(width, 2, 11, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.lstm = nn.LSTM(width, 5, num_layers=2, batch_first=True)
        self.weighted = nn.utils.parametrizations.weight_norm(nn.Linear(5, 5))
        self.conv = nn.Conv1d(5, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(self.inlet(x)[None])
        x, _ = self.attention(x, x, x)
        x, _ = self.lstm(x)
        return self.conv(self.weighted(x).transpose(1, 2))


class BatchNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(2)))
        self.register_buffer("temporary", torch.full((WIDTH,), 2.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x) * self.temporary


class Hierarchy(nn.Module):
    """Lists of lists, as in Swin: units of very different size."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(Layer() for _ in range(count)) for count in (1, 2))
        self.joints = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for stage, joint in zip(self.stages, self.joints, strict=True):
            for layer in stage:
                x = layer(x)
            x = joint(x)
        return x


# -- odd parameters -----------------------------------------------------------------------------------------------


class OddParameters(nn.Module):
    """0-dim, empty, one-element, integer and unused parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.one = nn.Parameter(torch.ones(1))
        self.codes = nn.Parameter(torch.arange(WIDTH * WIDTH, dtype=torch.int8).view(WIDTH, WIDTH), requires_grad=False)
        self.blocks = nn.ModuleList(Layer() for _ in range(2))
        self.frozen_scalar = nn.Parameter(torch.tensor(0.25), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.codes.to(x.dtype) * 0.01)
        for block in self.blocks:
            x = block(x)
        return x / self.temperature * self.one + self.nothing.sum() + self.frozen_scalar


class MixedDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, WIDTH).double()
        self.blocks = nn.ModuleList(Layer() for _ in range(2))
        self.frozen_half = nn.Linear(WIDTH, WIDTH).bfloat16().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.wide(x.double()).float()
        for block in self.blocks:
            x = block(x)
        return self.frozen_half(x.bfloat16()).float()


class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(13, WIDTH, sparse=True)
        self.blocks = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.table((x[:, 0].abs() * 5).long() % 13)
        for block in self.blocks:
            x = block(x)
        return x


@dataclass(frozen=True)
class Case:
    """A model and how its loss is computed."""

    make: Callable[[], nn.Module]
    loss: Callable[[Any, Tensor], Tensor] = lambda model, x: mean_square(model(x))


def _unwrapped(unwrap: Callable[[Any], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    return lambda model, x: mean_square(unwrap(model(x)))


_OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda x: (None, (x,)), lambda o: o[1][0]),
    "dict": (lambda x: {"a": 1, "b": [x]}, lambda o: o["b"][0]),
    "dataclass": (Pair, lambda o: o.hidden),
    "model_output": (lambda x: HiddenOutput(hidden=x), lambda o: o.hidden),
    "plain_object": (Plain, lambda o: o.hidden),
    "slotted_object": (Slotted, lambda o: o.hidden),
}

ZOO: dict[str, Case] = {
    "stack": Case(Stack),
    "frozen_biases": Case(frozen("inlet.bias", "blocks.0.up.bias", "blocks.2.up.bias")),
    "frozen_first": Case(frozen("inlet", "blocks.0", "blocks.1")),
    "frozen_middle_block": Case(frozen("blocks.1")),
    "frozen_last": Case(frozen("blocks.2", "outlet")),
    "only_inlet_trains": Case(frozen("inlet", only=True)),
    "only_outlet_trains": Case(frozen("outlet", only=True)),
    "lora": Case(LoraStack),
    "prompt": Case(PromptStack),
    "detached_use": Case(DetachedStack),
    "straight_through": Case(StraightThroughStack),
    "tied_blocks": Case(TiedBlocks),
    "tied_to_root": Case(TiedToRoot),
    "albert": Case(Albert),
    "albert_reentrant": Case(lambda: Albert(True)),
    "albert_nonreentrant": Case(lambda: Albert(False)),
    "frozen_albert": Case(FrozenAlbert),
    "checkpoint_reentrant": Case(lambda: Checkpointed(True)),
    "checkpoint_nonreentrant": Case(lambda: Checkpointed(False)),
    "checkpoint_reentrant_lora": Case(lambda: Checkpointed(True, LoraStack)),
    "checkpoint_nonreentrant_lora": Case(lambda: Checkpointed(False, LoraStack)),
    "checkpoint_nonreentrant_frozen": Case(lambda: Checkpointed(False, frozen("inlet", "blocks.1"))),
    "checkpoint_reentrant_tied": Case(lambda: Checkpointed(True, TiedBlocks)),
    **{f"output_{name}": Case(output_stack(*pair), _unwrapped(pair[1])) for name, pair in _OUTPUTS.items()},
    "in_place": Case(InPlace),
    "side_channel": Case(SideChannel),
    "encoder_decoder": Case(EncoderDecoder),
    "encoder_called_first": Case(EncoderDecoder, encoder_first),
    "root_never_called": Case(WithMethods, root_never_called),
    "around_the_root": Case(Stack, around_the_root),
    "siamese": Case(Stack, siamese),
    "siamese_lora": Case(LoraStack, siamese),
    "eval_between": Case(Stack, with_eval_between),
    "eval_between_lora": Case(LoraStack, with_eval_between),
    "forward_without_backward": Case(Stack, with_forward_between),
    "torch_layers": Case(TorchLayers),
    "batch_norm": Case(BatchNormed),
    "hierarchy": Case(Hierarchy),
    "odd_parameters": Case(OddParameters),
    "mixed_dtypes": Case(MixedDtypes),
    "sparse_embedding": Case(SparseEmbedding),
}
