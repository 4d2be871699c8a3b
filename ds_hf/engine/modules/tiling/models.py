"""Tiles and chunked losses for unmodified models (``ds_hf.tiled_mlp``, ``ds_hf.chunked_loss``), and losses of heads
whose vocabulary is cut over the tensor axis.

MLPs are found by what they are: modules inside a list of blocks whose class is called so, that take one tensor and hold
linear layers and what treats positions apart. Causal language models are those of transformers, by the names that all
of them have: ``get_output_embeddings``, ``loss_function`` and a forward with ``labels``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ds_hf.engine.modules.compiling import StandIn
from ds_hf.engine.modules.tiling.compute import bounds, compute_tiles
from ds_hf.engine.modules.tiling.logits import DeferredHead, PartialHead, PartialLogits
from ds_hf.engine.modules.tiling.loss import causal_lm_loss
from ds_hf.engine.parallel.tensor.styles import ColwiseGathered
from ds_hf.engine.zero.unit import in_backward
from ds_hf.log import log_once, warn_once

__all__ = ["ChunkedLoss", "PartialLoss", "TiledMlps", "attach", "chunks_loss", "tiles_of"]

_CLASS = re.compile(r"(MLP|Mlp|FeedForward|FFN|LayerFF|DenseActDense)$")
_MIXES = (
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._BatchNorm,
    nn.Embedding,
    nn.MultiheadAttention,
    nn.RNNBase,
)  # positions, or takes something else
_LARGE_VOCABULARY = 65_536  # from Llama 3 on; fp32 logits of 8,192 positions take 2 GiB and more
_LEAST_POSITIONS = 8192  # with fewer in a tile, adding up weight gradients takes more than 3 % of its products' time


def attach(engine: Any) -> None:
    """Tile the MLPs, and chunk the loss, of an engine's model, if the configuration says so. Where its head is cut, the
    loss is computed without gathering the logits, unless ``vocab_parallel_lm_head`` is false."""
    own = engine.settings.ds_hf
    if own.tiled_mlp is not None:
        engine.hooks.handles.append(TiledMlps(engine.module, own.tiled_mlp))
    if chunks_loss(own.chunked_loss, engine.module):
        if own.chunked_loss == "auto":
            log_once(
                "the loss is computed in chunks of the sequence: the head is frozen, and has "
                f"{_LARGE_VOCABULARY:,} words or more (ds_hf.chunked_loss)"
            )
        chunked = ChunkedLoss(engine.module)
        engine.hooks.handles.append(chunked)
        if own.chunked_loss == "auto":
            engine.events.step_hooks.append(chunked.after_step)
    elif engine.settings.tensor_parallel.vocab_parallel_lm_head is not False:
        engine.hooks.handles.append(PartialLoss(engine.module))


def chunks_loss(asked: bool | Literal["auto"], model: nn.Module) -> bool:
    """Whether the loss of ``model`` is computed in chunks: "auto" where it trains adapters under a frozen head with a
    large vocabulary, so that no gradient of the head has to wait for backward."""
    if asked != "auto":
        return asked
    if not any("lora_A" in module._modules for module in model.modules()):
        return False
    heads = [_head(module) for module in model.modules() if _is_causal_lm(module)]
    return any(
        type(head) is nn.Linear and head.out_features >= _LARGE_VOCABULARY and not head.weight.requires_grad
        for head in heads
    )


# -- MLPs -----------------------------------------------------------------------------------------------------------


def tiles_of(x: Tensor, tiles: int | Literal["auto"]) -> int:
    """Into how many tiles ``x`` (``[..., length, hidden]``) is cut; "auto": so that one holds as many positions as
    ``hidden``, and 8,192 at least."""
    if tiles == "auto":
        tiles = -(-(x.numel() // max(x.shape[-1], 1)) // max(x.shape[-1], _LEAST_POSITIONS))
    return max(min(tiles, x.shape[-2]), 1)


class TiledMlps:
    """Computes the MLPs of ``model`` in tiles until ``remove``."""

    def __init__(self, model: nn.Module, tiles: int | Literal["auto"]) -> None:
        self.modules: list[tuple[nn.Module, StandIn, Any]] = []
        eagerly: Callable[..., Any] = torch.compiler.disable  # a compiled block has a break there
        for module in _mlps(model):
            usual = module.__dict__.get("forward")
            call = eagerly(_Tiled(module, module.forward, tiles))
            stand_in = module.__dict__["forward"] = StandIn(module, "forward", call)
            self.modules.append((module, stand_in, usual))
        if not self.modules:
            warn_once(
                f"tiled_mlp has no effect: {type(model).__name__} has no MLPs of one input in its blocks; "
                "TiledMLP of deepspeed.runtime.sequence_parallel.ulysses_sp tiles others by hand"
            )

    @property
    def note(self) -> str:
        """For the line with which a run begins."""
        return "MLPs in tiles" if self.modules else ""

    def remove(self) -> None:
        """Give the modules their own forward back."""
        for module, stand_in, usual in self.modules:
            if module.__dict__.get("forward") is stand_in:
                del module.__dict__["forward"]
                if usual is not None:
                    module.__dict__["forward"] = usual
        self.modules.clear()


class _Tiled:
    """``forward(x)`` of ``module``, in tiles."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any], tiles: int | Literal["auto"]) -> None:
        self.module, self.forward, self.tiles = module, forward, tiles

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else next(iter(kwargs.values()), None)
        if len(args) + len(kwargs) != 1 or not isinstance(x, Tensor) or x.dim() < 2:
            return self.forward(*args, **kwargs)
        tiles, dim = tiles_of(x, self.tiles), x.dim() - 2
        if tiles == 1:
            return self.forward(x)
        return compute_tiles(
            lambda parts, _: self.forward(parts[0]),
            [x],
            [],
            [*self.module.parameters()],
            cuts=bounds(x.shape[dim], tiles),
            dim=dim,
            join=dim,
        )


def _mlps(model: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for blocks in model.modules():
        if isinstance(blocks, nn.ModuleList):
            for module in blocks.modules():
                if module not in inside and _is_mlp(module):
                    found.append(module)
                    inside.update(module.modules())
    return found


def _is_mlp(module: nn.Module) -> bool:
    if not _CLASS.search(type(module).__name__) or any(isinstance(child, _MIXES) for child in module.modules()):
        return False
    if any(isinstance(child, nn.ModuleList) or name.endswith("experts") for name, child in module.named_modules()):
        return False  # which tokens go to which is looked at, and counted, for all of them
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    params = list(inspect.signature(type(module).forward).parameters.values())[1:]
    needed = [param for param in params if param.default is param.empty]
    return len(needed) == 1 and needed[0].kind in kinds and any(_is_linear(child) for child in module.modules())


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"  # what GPT-2 of transformers has


# -- losses ---------------------------------------------------------------------------------------------------------


class ChunkedLoss:
    """Computes the training loss of the causal language models in ``model`` without all logits, until ``remove``.

    Attributes:
        looked: logits of a training step were looked at that its loss had done without.
    """

    def __init__(self, model: nn.Module) -> None:
        self.looked = False
        self.models = [_CausalLM(module, self._defer, _Loss) for module in model.modules() if _is_causal_lm(module)]
        if not self.models:
            warn_once(
                f"chunked_loss has no effect: {type(model).__name__} is not a causal language model of transformers "
                "with transformers' own loss"
            )

    @property
    def note(self) -> str:
        """For the line with which a run begins."""
        return "loss in chunks" if any(m.handles and not _is_watched(m.head) for m in self.models) else ""

    def _defer(self, head: nn.Module) -> DeferredHead | None:
        """What takes the place of ``head`` while its loss is chunked; ``None``: nothing."""
        plain = type(head) is nn.Linear or (isinstance(head, ColwiseGathered) and isinstance(head, nn.Linear))
        return DeferredHead(head, self._look) if plain else None

    def _look(self) -> None:
        self.looked = True

    def after_step(self, engine: Any) -> None:
        """Of a loss that was not asked to be chunked: a script that looks at logits has the model's own from now on,
        for it pays their product twice and their memory all the same.

        Processes decide by themselves. Where the head is divided they gather it in another order then, but there a look
        gathers it as well, so all of them have to look.
        """
        if self.looked and self.models:
            self.remove()
            log_once(
                "the loss is the model's own from the next step on: outputs.logits of a training step was looked at, "
                'for which a loss in chunks computes the head a second time ("ds_hf": {"chunked_loss": true} keeps the '
                "chunks, false never begins)"
            )

    def remove(self) -> None:
        """Give the models their own loss and head back."""
        for model in self.models:
            model.remove()
        self.models.clear()


class PartialLoss:
    """Computes the training loss of the causal language models in ``model`` whose head is cut over the tensor axis from
    the logits that each process has, until ``remove``. Nothing changes for others.

    ``outputs.logits`` of a training step is gathered when something looks at it, which all processes of the axis have
    to do; in evaluation, and without labels, it is gathered as ever.
    """

    def __init__(self, model: nn.Module) -> None:
        self.models: list[_CausalLM] = []
        if any(isinstance(module, ColwiseGathered) for module in model.modules()):
            cut = [m for m in model.modules() if _is_causal_lm(m) and isinstance(_head(m), ColwiseGathered)]
            self.models = [_CausalLM(module, PartialHead, _PartialLoss) for module in cut]

    def remove(self) -> None:
        """Give the models their own loss and head back."""
        for model in self.models:
            model.remove()
        self.models.clear()


def _head(module: nn.Module) -> Any:
    return module.get_output_embeddings()  # type: ignore[operator]


class _CausalLM:
    """One model; its head is deferred while it computes a training loss.

    Args:
        deferred: what stands for the head then, if anything does.
        loss: takes the place of the model's own, which it is given.
    """

    def __init__(self, module: nn.Module, deferred: Callable[[Any], Any], loss: Callable[[Any], Any]) -> None:
        self.module = module
        self.head: Any = _head(module)
        self.deferred = deferred
        self.name = next((name for name, child in module.named_children() if child is self.head), "")
        self.had, usual = module.__dict__.get("_loss_function"), module.loss_function
        self.loss = module.__dict__["_loss_function"] = loss(usual)
        self.place = list(inspect.signature(type(module).forward).parameters).index("labels") - 1
        self.handles: list[Any] = []
        if deferred(self.head) is not None and self.name:
            self.handles = [
                module.register_forward_pre_hook(self._before, with_kwargs=True),
                module.register_forward_hook(self._after, always_call=True),
            ]

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        labels = kwargs.get("labels", args[self.place] if len(args) > self.place else None)
        if labels is None or not module.training or not torch.is_grad_enabled() or in_backward():
            return
        if _is_watched(self.head):
            warn_once(
                f"the loss is computed of all logits: {self.name} has hooks, or another forward, which would not see "
                "the logits of a part. Take them off the head, or put them on the model"
            )
        else:
            module.__dict__[self.name] = self.deferred(self.head)  # found before the module of that name

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        module.__dict__.pop(self.name, None)

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        if self.module.__dict__.get("_loss_function") is self.loss:
            del self.module.__dict__["_loss_function"]
            if self.had is not None:
                self.module.__dict__["_loss_function"] = self.had


class _Loss:
    """``causal_lm_loss`` in place of transformers'; a copy of the model has its own again."""

    def __init__(self, given: Callable[..., Any]) -> None:
        self.given = self.__wrapped__ = given

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return causal_lm_loss(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        return _itself, (self.given,)


class _PartialLoss(_Loss):
    """The same for logits of a cut head. Others get the model's own, and so do those in fp64, which that computes in
    fp32: it would not be the same to the last digit."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        logits = kwargs["logits"] if "logits" in kwargs else args[0]
        partial = isinstance(logits, PartialLogits) and logits.dtype is not torch.float64
        loss: Tensor = (causal_lm_loss if partial else self.given)(*args, **kwargs)
        return loss


def _is_watched(head: nn.Module) -> bool:
    """Whether something of others sees, or changes, what a head gives."""
    own: dict[str, Any] = head.__dict__
    before = [*own["_forward_pre_hooks"].values(), *own["_forward_hooks"].values()]
    after = own["_backward_hooks"] or own["_backward_pre_hooks"]
    return "forward" in own or bool(after) or not all(map(_is_ours, before))


def _is_ours(hook: Any) -> bool:
    """An engine's hooks look at calls, and not at what they give."""
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("ds_hf.")


def _itself(given: Any) -> Any:
    return given


def _is_causal_lm(module: nn.Module) -> bool:
    head = getattr(module, "get_output_embeddings", None)
    if not callable(head) or not isinstance(head(), nn.Module):
        return False
    if "labels" not in inspect.signature(type(module).forward).parameters:
        return False
    return getattr(getattr(module, "loss_function", None), "__name__", "") == "ForCausalLMLoss"
