"""Tokens divided between the cut layers of blocks, as Megatron-LM's sequence parallelism has them (Korthikanti et al.
2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2): the key
``ds_hf.tensor_sequence_parallel``.

Between the sum behind one cut layer and the copy before the next every process of the tensor axis computes the same:
norms, residuals, and what they keep for backward. Here each has its part of the tokens there. The sum leaves each
process its own tokens (reduce-scatter), and what has cut layers inside gathers them first; both together send what the
all-reduce of the whole did.

=========================================  =======================================================================
child of a block                           what it computes with
=========================================  =======================================================================
has cut layers, or is of an unknown kind   all tokens: it gathers its input, and leaves its own tokens of the output
norm, dropout, activation                  this process's tokens; its parameters have a part of their gradient
=========================================  =======================================================================

The first block of a list divides what it is given and the last one gathers what it gives, so the model around them sees
whole hidden states. Between two blocks hidden states carry the shape of the whole, by which a block knows them, also
where a checkpoint around it computes it again in backward. A block that is given whole ones elsewhere (the first ones
were dropped or ran without gradients, a script calls it by itself, or backward with what a reentrant checkpoint kept)
divides and gathers them for itself alone. Without gradients (evaluation, generation) nothing is divided. Tokens are
those of all samples in one row, so only their number has to divide, and if it does not the last process computes some
zeros more.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.parallel.tensor.functions import DividedTokens, Place, gather_tokens, split_tokens
from ds_hf.engine.parallel.tensor.handed import Handed
from ds_hf.engine.parallel.tensor.styles import (
    AllReduced,
    Colwise,
    ColwiseGathered,
    CutModule,
    Experts,
    Rowwise,
    RowwiseSplit,
    derived_class,
    place_of,
)
from ds_hf.engine.zero.cut import is_cut
from ds_hf.engine.zero.hooks import Hook
from ds_hf.engine.zero.leaf import is_container
from ds_hf.engine.zero.planning import find_blocks
from ds_hf.engine.zero.replicas import is_summed_over_tensor, sum_over_tensor
from ds_hf.engine.zero.unit import in_backward
from ds_hf.errors import ConfigError, DsHfError, Fault
from ds_hf.log import warn_once

__all__ = ["POINTER", "divide_tokens", "is_cache"]

POINTER = "/ds_hf/tensor_sequence_parallel"
_FIX = "remove tensor_sequence_parallel; tensor parallelism itself does not need it"
_ROUNDING = 4  # units of the last place by which a block's output may differ from that of all tokens, relative norm


_LIBRARIES = {"accelerate", "ds_hf", "peft", "torch", "transformers"}  # whose hooks take no means of hidden states


class _Line:
    """A list of blocks.

    Attributes:
        tokens: what they compute with now.
        enabled: an engine that was destroyed leaves the blocks as they are, and the next one may not divide tokens.
        inside: how many calls are under way of modules that the list is in.
        running: the shape of whole hidden states while they are on their way through the blocks.
        marked: parameters that compute with a part of the tokens, and what was known of their gradients before.
        parts: modules that give a part of the tokens, by name, and whether they are given one, too.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis, self.tokens, self.enabled = axis, DividedTokens(), True
        self.inside = 0
        self.running: tuple[int, ...] | None = None
        self.marked: list[tuple[nn.Parameter, bool | None]] = []
        self.parts: dict[str, tuple[nn.Module, bool]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> _Line:
        return self

    def mark(self, param: nn.Parameter) -> None:
        self.marked.append((param, is_summed_over_tensor(param)))
        sum_over_tensor(param)

    def switch(self, on: bool) -> None:
        for param, before in self.marked:
            sum_over_tensor(param, parts=True if on else before)
        self.enabled = on

    def tell_of_hooks(self) -> None:
        """What a user's hook computes of hidden states, to log it as a rule, would silently be that of a part."""
        for name, (module, given) in self.parts.items() if self.enabled and torch.is_grad_enabled() else ():
            hooks = (*module._forward_hooks.values(), *(module._forward_pre_hooks.values() if given else ()))
            for hook in hooks:
                if not isinstance(hook, Hook) and getattr(hook, "__module__", "").split(".")[0] not in _LIBRARIES:
                    warn_once(
                        f"a forward hook ({getattr(hook, '__qualname__', type(hook).__qualname__)}) on {name} sees "
                        f"one of {self.axis.world_size} parts of the tokens, another on each process, while the model "
                        "trains with ds_hf.tensor_sequence_parallel (said once): a mean is that of the part. Put it on "
                        "what is around the blocks, or average over the processes",
                        about="hooks that see parts of the tokens",
                    )
                    return


class _Here:
    """Where a block or a branch is: ``place``, in ``line``; whether a branch ``splits`` what it computed."""

    def __init__(self, line: _Line, name: str, *, first: bool = False, last: bool = False, splits: bool = False):
        self.line, self.first, self.last, self.splits, self.tried = line, first, last, splits, False
        self.place = Place(line.axis, name, [None], line.tokens)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Here:
        return self

    def refuse_loss(self) -> None:
        """
        Raises:
            ConfigError: something beside the model's own blocks computed with hidden states that this block gave.
        """
        raise _unfit(
            self,
            "gave hidden states of a part of the tokens, and a loss was computed of them beside the next block's (a "
            "forward hook, hidden states that were kept): it, and its gradient, would be of that part alone",
        )


class TokensBlock(CutModule):
    """A block that is given this process's tokens, and gives them."""

    _ds_here: _Here

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        here = self._ds_here
        line = here.line
        if not line.enabled:
            return super().__call__(*args, **kwargs)
        compiling = torch.compiler.is_compiling()
        again = not compiling and in_backward()  # for a checkpoint around it: no next block follows
        hidden = _input(here, args, kwargs)
        shape = (None if here.first else line.running) if compiling else _whole_shape(hidden)
        alone = False
        if shape is not None and not compiling:
            hidden = _take(hidden, self)
            args, kwargs = _with_input(hidden, args, kwargs)
        if shape is None:
            if not torch.is_grad_enabled():
                return super().__call__(*args, **kwargs)
            shape = tuple(hidden.shape[:-1])
            alone = not here.first or not line.inside or again
            if not again and not compiling and line.running is not None:
                raise _unfit(here, "is not given what the block before it gave, but what the model computed of it")
            if not alone:
                line.running = shape
            args, kwargs = _with_input(split_tokens(hidden, here.place), args, kwargs)
        # As an argument, so that a block which is computed again in backward has it, too.
        kwargs["_ds_shape"] = shape
        if here.tried or "forward" not in vars(self):
            found = super().__call__(*args, **kwargs)
        else:
            with torch.compiler.set_stance("force_eager"):  # what is compiled later is tried out first
                found = super().__call__(*args, **kwargs)
        part = _output(found)
        handed = None if compiling else Handed(part, here.refuse_loss)
        if not alone and not here.last:
            if handed is not None:
                _remember(part, shape, handed)
            return found
        if not alone and not again:
            line.running = None
        part = part if handed is None else handed.to_next(part)
        return _with_output(gather_tokens(part, here.place, shape), found)

    def forward(self, *args: Any, _ds_shape: tuple[int, ...] | None = None, **kwargs: Any) -> Any:
        if _ds_shape is None:
            return super().forward(*args, **kwargs)
        here = self._ds_here
        tokens = here.line.tokens
        tokens.shape = _ds_shape
        if not torch.compiler.is_compiling():
            args, kwargs = _with_input(_take(_input(here, args, kwargs)), args, kwargs)
        if here.tried or torch.compiler.is_compiling() or _has_past(self, args, kwargs):
            try:
                return super().forward(*args, **kwargs)
            finally:  # a checkpoint stops what it computes again by an exception when it has what it needs
                tokens.shape = tokens.gathered = None
        here.tried = True
        hidden = _input(here, args, kwargs)
        devices = [hidden.device] if hidden.is_cuda else []
        drawn = torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in devices]
        try:
            found = super().forward(*args, **kwargs)
        except (RuntimeError, ValueError, IndexError) as error:
            if isinstance(error, torch.OutOfMemoryError | DsHfError):
                raise
            raise _unfit(here, f"does not compute with a part of the tokens ({error})") from error
        finally:
            tokens.shape = tokens.gathered = None
        with torch.random.fork_rng(devices=devices):  # it draws the same again
            torch.set_rng_state(drawn[0])
            for device, state in zip(devices, drawn[1], strict=True):
                torch.cuda.set_rng_state(state, device)
            _compare(here, self, super().forward, args, kwargs, _output(found), _ds_shape)
        return found


class TokensBranch(CutModule):
    """A part of a block that is given this process's tokens, and computes with those of all."""

    _ds_here: _Here

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # not forward, which kernels of others replace (Liger)
        here = self._ds_here
        tokens = here.line.tokens
        shape = tokens.shape
        if shape is None:
            return super().__call__(*args, **kwargs)
        part = _input(here, args, kwargs)
        if tokens.gathered is None or tokens.gathered[0] is not part:
            tokens.gathered = (part, gather_tokens(part, here.place, shape), None)
        args, kwargs = _with_input(tokens.gathered[1], args, kwargs)
        found = super().__call__(*args, **kwargs)
        return _with_output(split_tokens(_output(found), here.place), found) if here.splits else found


_WHOLE = "_ds_whole_shape"  # on hidden states between two blocks: shape of the whole, and version of what they are
_HANDED = "_ds_handed"


def _remember(part: Tensor, shape: tuple[int, ...], handed: Handed) -> None:
    setattr(part, _WHOLE, (shape, None if part.is_inference() else part._version))
    setattr(part, _HANDED, handed)


def _take(hidden: Tensor, block: nn.Module | None = None) -> Tensor:
    """``hidden`` as ``block`` is given it, or as its forward is where hooks before that look at it."""
    handed = getattr(hidden, _HANDED, None)
    if handed is None:
        return hidden
    hidden = handed.to_next(hidden)
    if block is not None and any(not isinstance(hook, Hook) for hook in block._forward_pre_hooks.values()):
        setattr(hidden, _HANDED, Handed(hidden, handed.fault, unseen=True))
    return hidden


def _whole_shape(hidden: Tensor) -> tuple[int, ...] | None:
    """Of which whole hidden states these are what a block gave; ``None`` for all others."""
    shape, version = getattr(hidden, _WHOLE, (None, None))
    return shape if version is None or hidden._version == version else None


def _input(here: _Here, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    hidden = args[0] if args else kwargs.get("hidden_states")
    if not (isinstance(hidden, Tensor) and hidden.is_floating_point() and hidden.dim() >= 2):
        raise _unfit(here, "is not given hidden states first")
    return hidden


def _with_input(
    hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((hidden, *args[1:]), kwargs) if args else ((), {**kwargs, "hidden_states": hidden})


def _output(found: Any) -> Tensor:
    return cast(Tensor, found[0] if isinstance(found, tuple | list) else found)


def _with_output(hidden: Tensor, found: Any) -> Any:
    return (hidden, *found[1:]) if isinstance(found, tuple | list) else hidden


def _unfit(here: _Here, what: str) -> ConfigError:
    return ConfigError([Fault(POINTER, f"{here.place.name} {what}", _FIX)], "tensor parallelism")


def is_cache(value: Any, name: str = "") -> bool:
    """Of keys and values: what a block puts into it stays there, so a comparison must not."""
    return value is not None and (
        name in ("past_key_values", "past_key_value", "layer_past") or hasattr(value, "get_seq_length")
    )


def _has_past(block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether it attends to keys of an earlier call, without which it would compute something else."""
    caches = [value for value in args[1:] if is_cache(value)]
    caches += [value for name, value in kwargs.items() if is_cache(value, name)]
    layers = (getattr(module, "layer_idx", None) for module in block.modules())
    layer = next((layer for layer in layers if isinstance(layer, int)), 0) if caches else 0
    return any(not hasattr(cache, "get_seq_length") or cache.get_seq_length(layer) > 0 for cache in caches)


@torch.no_grad()
def _compare(
    here: _Here,
    block: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    found: Tensor,
    shape: tuple[int, ...],
) -> None:
    """A block's first output, ``found``, with that of whole hidden states: its code may know of other tokens.

    Raises:
        ConfigError: they differ, and so they do on all processes.
    """
    if found.is_meta or any(
        not isinstance(hook, Hook) for module in block.modules() for hook in module._forward_hooks.values()
    ):
        return  # they record what a block computes, and would see it twice
    hidden = gather_tokens(_input(here, args, kwargs).detach(), here.place, shape)
    once = {key: value for key, value in kwargs.items() if not is_cache(value, key)}
    if "use_cache" in once:
        once["use_cache"] = False
    args, once = _with_input(hidden, tuple(None if is_cache(value) else value for value in args), once)
    expected = _output(forward(*args, **once))
    all_found = gather_tokens(found.detach(), here.place, shape)  # without the zeros that fill the last part
    far = ((all_found - expected).double().norm() / expected.double().norm()).item()
    if not far <= max(_ROUNDING * torch.finfo(found.dtype).eps, 1e-4):
        raise _unfit(here, f"computes something else with a part of the tokens: {far:.2g} of its output differs")


# -- which modules are which ---------------------------------------------------------------------------------------


def divide_tokens(model: nn.Module, axis: Axis, *, wanted: bool) -> None:
    """Divide the tokens between the cut layers of ``model``, in place, or stop doing so. After ``divide``.

    Raises:
        ConfigError: it has no blocks with cut layers, or they cannot be divided so.
    """
    lines = {here.line for module in model.modules() if (here := module.__dict__.get("_ds_here")) is not None}
    for line in lines:
        line.switch(wanted)
    if lines or not wanted:
        return
    lists: dict[str, list[tuple[str, nn.Module]]] = {}
    for name, block in find_blocks(model):
        lists.setdefault(name.rpartition(".")[0], []).append((name, block))
    modules = dict(model.named_modules())
    divided = {holder: blocks for holder, blocks in lists.items() if any(_cut_inside(block) for _, block in blocks)}
    if not divided:
        fault = Fault(POINTER, "the model has no repeated blocks with layers that are cut", "remove the key")
        raise ConfigError([fault], "tensor parallelism")
    for holder, blocks in divided.items():
        line = _Line(axis)
        _watch(line, holder, modules)
        _refuse_recording(line, holder, modules)
        for name, block in blocks:
            here = _Here(line, name, first=block is blocks[0][1], last=block is blocks[-1][1])
            _refuse_dropout(here, block)
            _divide_block(here, block)


def _divide_block(here: _Here, block: nn.Module) -> None:
    line, name = here.line, here.place.name
    line.parts[name] = (block, True)
    for param in block._parameters.values():
        if param is not None:
            line.mark(param)
    for key, child in block.named_children():
        inside = _Here(line, f"{name}.{key}")
        if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            raise _unfit(inside, f"is a {type(child).__name__}, of which nothing says what each part is given")
        if _is_per_token(child):
            line.parts[inside.place.name] = (child, True)
            for param in child.parameters():
                line.mark(param)
            continue
        rows = _rows_of(child)
        whole_sums = any(isinstance(module, Experts | AllReduced) for module in child.modules())
        scatters = len(rows) == 1 and not whole_sums
        if scatters:
            owner, layers = rows.popitem()
            _scatter(line, owner, layers)
            named = child.named_modules(prefix=inside.place.name)
            line.parts |= {path: (module, False) for path, module in named if module in (child, owner)}
        layer = getattr(child, "base_layer", child)
        if isinstance(layer, Rowwise) and not isinstance(layer, RowwiseSplit):
            continue  # a layer of the block's own, whose input is what another one computed with all tokens
        keeps = isinstance(layer, Colwise) and not isinstance(layer, ColwiseGathered)
        inside.splits = not scatters and not keeps
        for module in child.modules():
            if (place := place_of(module)) is not None:
                place.tokens = line.tokens
        _become(child, TokensBranch, inside)
    _become(block, TokensBlock, here)


def _scatter(line: _Line, owner: nn.Module, layers: list[nn.Module]) -> None:
    """Leave this process's tokens of the sum behind ``owner``; what is added to it there, biases and adapters, are."""
    for layer in layers:
        place = place_of(layer)
        assert place is not None
        place.tokens, place.scatters = line.tokens, True
    for param in owner.parameters():
        if not is_cut(param):
            line.mark(param)


def _rows_of(branch: nn.Module) -> dict[nn.Module, list[nn.Module]]:
    """Its layers that are cut by their inputs, by the module that adds adapters to one, or themselves."""
    found: dict[nn.Module, list[nn.Module]] = {}
    named = {name: module for name, module in branch.named_modules() if isinstance(module, Rowwise)}
    modules = dict(branch.named_modules())
    for name, module in named.items():
        owner = re.sub(r"(^|\.)(base_layer|lora_A\.[^.]*)$", "", name)
        found.setdefault(modules[owner], []).append(module)
    return found


def _become(module: nn.Module, base: type[CutModule], here: _Here) -> None:
    if base is TokensBlock and "forward" in vars(module):
        raise _unfit(here, "has a forward that was put into it, and not that of its class")
    module.__dict__["_ds_here"] = here
    module.__class__ = derived_class(base, type(module))


def _cut_inside(block: nn.Module) -> bool:
    return any(place_of(module) is not None for module in block.modules())


def _is_per_token(module: nn.Module) -> bool:
    """Whether it computes with each token by itself, and is known to."""
    kind = type(module)
    if any(True for _ in module.children()) or place_of(module) is not None:
        return False
    if any(param.dim() > 1 for param in module.parameters()):
        return False
    torchs = (nn.Dropout, nn.Identity, nn.LayerNorm, nn.RMSNorm)
    activation = kind.__module__ in ("torch.nn.modules.activation", "transformers.activations")
    return (
        isinstance(module, torchs)
        or activation
        or re.search(r"(RMS|Layer)_?Norm|LayerScale", kind.__name__) is not None
    )


def _refuse_dropout(here: _Here, block: nn.Module) -> None:
    """Every process would draw the same for its own tokens."""
    found = [
        f"{name}.p"
        for name, module in block.named_modules()
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 and "lora_dropout" not in name
    ]
    for name, module in (("", block), *block.named_children()):
        found += [
            f"{name}.{key}".lstrip(".")
            for key, value in vars(module).items()
            if "drop" in key and "att" not in key and isinstance(value, float) and value > 0
        ]
    if found:
        raise _unfit(
            here, f"drops elements ({', '.join(found[:3])}), and processes would drop the same ones of their own tokens"
        )


def _watch(line: _Line, holder: str, modules: Mapping[str, nn.Module]) -> None:
    """Look that hidden states which entered the blocks of ``holder`` come out of them before the model goes on."""

    def begin(module: nn.Module, args: Any) -> None:
        line.inside, line.running = line.inside + 1, None
        line.tell_of_hooks()

    def end(module: nn.Module, args: Any, output: Any) -> None:
        running, line.running, line.inside = line.running, None, max(0, line.inside - 1)
        if running is None or in_backward():
            return
        what = (
            f"the last block of {holder} was not called behind the first one (layers dropped, an early exit, another "
            "order), and the model goes on with a part of the tokens"
        )
        error = sys.exc_info()[1] if output is None else None
        if error is None:
            raise ConfigError([Fault(POINTER, what, _FIX)], "tensor parallelism")
        if hasattr(error, "add_note") and not isinstance(error, torch.OutOfMemoryError | DsHfError):
            error.add_note(
                f"{POINTER}: between blocks of {holder} and behind them hidden states were a part of the "
                f"tokens. If that is the cause (or {what}), {_FIX}."
            )

    names = [holder]
    while names[-1]:
        names.append(names[-1].rpartition(".")[0])
    for module in dict.fromkeys(modules[name] for name in names):
        if not is_container(module):
            module.register_forward_pre_hook(Hook(begin))
            module.register_forward_hook(Hook(end), always_call=True)


def _refuse_recording(line: _Line, holder: str, modules: Mapping[str, nn.Module]) -> None:
    """Hidden states that a model of transformers keeps of its blocks would be parts."""
    names = [holder]
    while names[-1]:
        names.append(names[-1].rpartition(".")[0])
    model = next((modules[name] for name in names if hasattr(modules[name], "config")), None)
    if model is None:
        return

    def look(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        asked = kwargs.get("output_hidden_states")
        asked = getattr(module.config, "output_hidden_states", False) if asked is None else asked
        if asked and line.enabled and torch.is_grad_enabled():
            raise ConfigError(
                "hidden states of blocks are asked for (output_hidden_states) in a training step, and each process has "
                "a part of their tokens: remove the one or the other",
                POINTER,
            )

    model.register_forward_pre_hook(Hook(look), with_kwargs=True)
