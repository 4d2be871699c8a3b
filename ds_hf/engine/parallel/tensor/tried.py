"""Rules of the file, tried out at the first call: whether what lies between cut layers makes of parts of their outputs
the parts of what it makes of whole ones.

A rule cannot know how a model reads what a layer gives. Where gate and up are one matrix, a half of it is not half of
both, and sizes fit all the same: training would go on with other numbers. So each kind of module with cut layers is
computed twice before its first call, with random numbers in place of what layers that are cut by their outputs give:
all of them, and this process's part. What layers that are cut by their inputs are given then has to be a part of the
same. No weights of cut layers are read, and nothing is sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from ds_hf.engine.parallel.tensor.divide import WHOLE_COUNTS
from ds_hf.engine.parallel.tensor.heads import layer_of
from ds_hf.engine.parallel.tensor.plan import Slicing
from ds_hf.engine.parallel.tensor.presets import widths_of_heads
from ds_hf.engine.parallel.tensor.rules import POINTER
from ds_hf.engine.parallel.tensor.styles import (
    AlibiPart,
    Colwise,
    ColwiseGathered,
    CutModule,
    Rowwise,
    RowwiseSplit,
    Style,
    place_of,
)
from ds_hf.engine.parallel.tensor.tokens import is_cache
from ds_hf.engine.zero.cut import Cut, cut_of
from ds_hf.engine.zero.hooks import Hook
from ds_hf.engine.zero.leaf import holder_of
from ds_hf.engine.zero.planning import find_blocks
from ds_hf.engine.zero.unit import tensors_in
from ds_hf.errors import ConfigError, Fault
from ds_hf.log import log_once

__all__ = ["attach"]

_FAR = 0.05  # relative norm; other features differ by more than 1
_SKIP = 'leave these layers whole ("partition_type": "skip"), or give rules that fit how it reads them'


@dataclass
class _Layer:
    """A cut linear layer: its path, and the outputs, or inputs, that are here."""

    name: str
    module: nn.Module
    cut: Cut

    @property
    def gives_part(self) -> bool:
        """It is cut by its outputs, and does not gather them."""
        return isinstance(self.module, Colwise) and not isinstance(self.module, ColwiseGathered)

    @property
    def others(self) -> int:
        """How many features the dimension that is not cut has."""
        return self.cut.whole[1 - self.cut.dim]

    def part(self, whole: Tensor, cut: Cut | None = None) -> Tensor:
        return torch.cat([whole.narrow(-1, *each) for each in (cut or self.cut).ranges], -1)


def attach(engine: Any) -> None:
    """Try out each kind of module with cut layers when it is first called; what is wrong is raised there."""
    model: nn.Module = engine.module
    section = engine.settings.tensor_parallel
    own = section.partition_config is not None or section.preset_model is not None
    planned = next((type(each) for each in model.modules() if not type(each).__module__.startswith("peft.")), nn.Module)
    if own or not planned.__module__.startswith("transformers."):  # whose plans know their models
        _Waiting(model, _kinds(model)).watch()


class _Waiting:
    """Modules that have not been called yet, by path, with their cut layers."""

    def __init__(self, model: nn.Module, kinds: dict[str, list[_Layer]]) -> None:
        self.model, self.kinds = model, kinds
        self._trying = False
        self._stances: list[Any] = []
        self._handles: dict[str, Any] = {}

    def watch(self) -> None:
        for name in self.kinds:
            first = Hook(partial(self._before, name))
            module = self.model.get_submodule(name)
            self._handles[name] = module.register_forward_pre_hook(first, with_kwargs=True)
        if self.kinds:
            self._around = [
                self.model.register_forward_pre_hook(Hook(self._eagerly)),
                self.model.register_forward_hook(Hook(self._as_before), always_call=True),
            ]

    def _before(self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._trying or torch.compiler.is_compiling() or not _fits_a_trial(args, kwargs):
            return
        self._handles.pop(name).remove()
        self._trying = True
        try:
            _try(self.model, name, self.kinds.pop(name), args, kwargs)
        finally:
            self._trying = False

    def _eagerly(self, *_: Any) -> None:
        """What is compiled later is tried out first."""
        if torch.compiler.is_compiling():
            return
        if self.kinds:
            self._stances.append(torch.compiler.set_stance("force_eager"))
        else:  # here, as torch goes through the hooks themselves where a forward ends in an error, and would hide it
            for handle in self._around:
                handle.remove()

    def _as_before(self, *_: Any) -> None:
        while self._stances:
            self._stances.pop().__exit__(None, None, None)


def _kinds(model: nn.Module) -> dict[str, list[_Layer]]:
    """The smallest modules of blocks that hold layers cut by their inputs together with those cut by their outputs, or
    the one without the other, of each kind the first: by path, with their cut layers."""
    modules = dict(model.named_modules())
    blocks = [f"{name}." for name, _ in find_blocks(model)]
    layers = [*_linears(modules)]
    columns = [layer for layer in layers if layer.gives_part]
    around = set[str]()
    for row in layers:
        if isinstance(row.module, Rowwise):
            around.add(_around(row, columns, modules))
    for column in columns:
        if not any(column.name.startswith(f"{name}.") for name in around):
            around.add(holder_of(modules, layer_of(column.name)))
    kinds: dict[Any, tuple[str, list[_Layer]]] = {}
    for name in modules:  # in the model's order
        if name in around and any(f"{name}.".startswith(block) for block in blocks):
            inside = [layer for layer in layers if layer.name.startswith(f"{name}.")]
            kind = (
                type(modules[name]),
                *((layer.name.removeprefix(name), layer.cut.whole, layer.cut.ranges) for layer in inside),
            )
            kinds.setdefault(kind, (name, inside))
    return dict(kinds.values())


def _around(row: _Layer, columns: Sequence[_Layer], modules: Mapping[str, nn.Module]) -> str:
    """The smallest module with ``row`` and a layer that is cut by its outputs; else what holds ``row``."""
    first = name = holder_of(modules, layer_of(row.name))
    while name:
        if any(column.name.startswith(f"{name}.") for column in columns):
            return name
        name = holder_of(modules, name)
    return first


def _linears(modules: Mapping[str, nn.Module]) -> Iterator[_Layer]:
    for name, module in modules.items():
        if isinstance(module, Colwise | Rowwise) and getattr(module, "_ds_heads", None) is None:
            cut = None if (weight := module._parameters.get("weight")) is None else cut_of(weight)
            if cut is not None and len(cut.whole) == 2:
                yield _Layer(name, module, cut)


def _fits_a_trial(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """It has tokens with values, and attends to no keys of an earlier call."""
    caches = [value for value in (*args, *kwargs.values()) if hasattr(value, "get_seq_length")]
    first = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
    empty = first is None or first.is_meta or not first.numel()
    return not empty and not any(cache.get_seq_length() for cache in caches)


# -- a trial -------------------------------------------------------------------------------------------------------


class _StandIn(nn.Module):
    """In the place of a cut layer, whose attributes it has."""

    def __init__(self, layer: nn.Module, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.__dict__.update(layer=layer, call=call)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = self.__dict__["call"](x)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)


_Given = list[tuple[_Layer | None, Tensor]]


class _Trial:
    """One module, and what its cut layers stand for."""

    def __init__(self, model: nn.Module, module: Any, layers: Sequence[_Layer], args: Any, kwargs: Any) -> None:
        self.model, self.module, self.layers = model, module, layers
        self.args = tuple(None if is_cache(value) else value for value in args)
        self.kwargs = {key: None if is_cache(value, key) else value for key, value in kwargs.items()}
        if "use_cache" in self.kwargs:
            self.kwargs["use_cache"] = False

    def whole(self) -> _Given:
        """What layers that are cut by their inputs are given of whole outputs."""
        with _whole_counts(self.module):
            return self._run(lambda layer, whole: whole)

    def parts(self, cuts: Mapping[str, Cut | None]) -> _Given:
        """The same of parts, of layers in ``cuts`` those."""
        return self._run(lambda layer, whole: layer.part(whole, cuts.get(layer.name)))

    def agrees(self, whole: _Given, parts: _Given) -> bool:
        if [layer for layer, _ in whole] != [layer for layer, _ in parts]:
            return False
        for (layer, expected), (_, found) in zip(whole, parts, strict=True):
            if layer is not None and not isinstance(layer.module, RowwiseSplit):
                if expected.shape[-1] != layer.cut.whole[layer.cut.dim]:
                    return False
                expected = layer.part(expected)
            if found.shape != expected.shape:
                return False
            expected, found = (torch.nan_to_num(each.double(), 0.0, 0.0, 0.0) for each in (expected, found))
            if not float((found - expected).norm()) <= _FAR * float(expected.norm()):
                return False
        return True

    @torch.no_grad()
    def _run(self, given: Callable[[_Layer, Tensor], Tensor]) -> _Given:
        rows: _Given = []
        calls: dict[str, int] = defaultdict(int)

        def column(layer: _Layer, x: Tensor) -> Tensor:
            calls[layer.name] += 1
            seed = 1000 * calls[layer.name] + self.layers.index(layer)
            whole = _numbers((*x.shape[:-1], layer.cut.whole[layer.cut.dim]), x, layer, seed)
            return given(layer, whole) if layer.gives_part else whole

        def row(layer: _Layer, x: Tensor) -> Tensor:
            rows.append((layer, x))
            return x.new_zeros(*x.shape[:-1], layer.others)

        with _in_place(self.module, self.layers, column, row), torch.random.fork_rng(devices=[]):
            forward = vars(self.module).get("forward") or type(self.module).forward.__get__(self.module)
            found = forward(*self.args, **self.kwargs)
        if not any(isinstance(layer.module, Rowwise) for layer in self.layers):
            rows += [(None, tensor) for tensor in [*tensors_in(found)][:1]]
        return rows


def _numbers(shape: tuple[int, ...], x: Tensor, layer: _Layer, seed: int) -> Tensor:
    """The same whenever they are asked for; drawn from no generator of the training's."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    generator = torch.Generator(x.device).manual_seed(seed)
    return torch.rand(shape, generator=generator, device=x.device, dtype=torch.float32).mul(2).sub(1).to(dtype)


@contextmanager
def _in_place(
    module: nn.Module,
    layers: Sequence[_Layer],
    column: Callable[[_Layer, Tensor], Tensor],
    row: Callable[[_Layer, Tensor], Tensor],
) -> Iterator[None]:
    """``module`` in evaluation mode, without hooks of others inside of it, and with functions as its cut layers."""
    every = [*module.modules()]
    training = [each.training for each in every]
    hooks = [(each._forward_hooks, dict(each._forward_hooks)) for each in every if each is not module]
    known = {id(layer.module): layer for layer in layers}
    owners = [
        (owner, key, child)
        for owner in every
        for key, child in owner._modules.items()
        if child is not None and id(child) in known
    ]
    try:
        for each in every:
            each.training = False
        for mine, _ in hooks:
            for number in [number for number, hook in mine.items() if not isinstance(hook, Hook)]:
                del mine[number]
        for owner, key, child in owners:
            layer = known[id(child)]
            of = column if isinstance(layer.module, Colwise) else row
            owner._modules[key] = _StandIn(child, partial(of, layer))
        yield
    finally:
        for owner, key, child in owners:
            owner._modules[key] = child
        for mine, before in hooks:
            mine.clear()
            mine.update(before)
        for each, value in zip(every, training, strict=True):
            each.training = value


@contextmanager
def _whole_counts(module: nn.Module) -> Iterator[None]:
    """Numbers of heads and widths as they were before the layers were cut."""
    counted = [each for each in module.modules() if WHOLE_COUNTS in vars(each)]
    local = [(each, {key: vars(each)[key] for key in vars(each)[WHOLE_COUNTS]}) for each in counted]
    alibi: list[tuple[nn.Module, type[nn.Module]]] = [
        (each, type(each)) for each in module.modules() if isinstance(each, AlibiPart)
    ]
    try:
        for each, _ in local:
            vars(each).update(vars(each)[WHOLE_COUNTS])
        for part, _ in alibi:
            part.__class__ = _own_class(part)
        yield
    finally:
        for each, counts in local:
            vars(each).update(counts)
        for part, made in alibi:
            part.__class__ = made


# -- what is said --------------------------------------------------------------------------------------------------


def _try(model: nn.Module, name: str, layers: Sequence[_Layer], args: Any, kwargs: Any) -> None:
    """
    Raises:
        ConfigError: what is between the cut layers of a module would compute something else.
    """
    module = model.get_submodule(name)
    trial, error = _Trial(model, module, layers, args, kwargs), ""
    try:
        whole = trial.whole()
    except Exception as raised:  # it looks at layers in ways of its own
        log_once(f"{name}: the rules for its layers are taken at their word, for it cannot be tried out ({raised})")
        return
    try:
        if trial.agrees(whole, trial.parts({})):
            return
    except torch.OutOfMemoryError:
        return
    except Exception as raised:
        error = str(raised)
    shown = ", ".join(dict.fromkeys(layer_of(layer.name) for layer in layers))
    what = f"does not compute with a part of {shown} ({error})"
    if not error:
        what = f"computes something else with a part of {shown}: outputs are cut in other parts than it reads"
    fix = next(_better(trial, whole), _SKIP)
    fault = Fault(f"{POINTER}/partition_config", f"{name} (a {_own_class(module).__name__}) {what}", fix)
    raise ConfigError([fault], "tensor parallelism")


def _better(trial: _Trial, whole: _Given) -> Iterator[str]:
    """Rules for one of the layers with which the module computes as it does whole."""
    config = getattr(trial.module, "config", None) or getattr(trial.model, "config", None)
    columns: dict[str, list[_Layer]] = defaultdict(list)  # a layer, with its adapter
    for each in trial.layers:
        if each.gives_part:
            columns[layer_of(each.name)].append(each)
    for name, parts in columns.items():
        outputs = parts[0].cut.whole[parts[0].cut.dim]
        for sizes in _ways(outputs, widths_of_heads(config)):
            if not _fits(trial, whole, {each.name: _cut(each, sizes) for each in parts}):
                continue
            if len(sizes) == 1:
                yield f'leave "shape" out of the rule for {name}'
            else:
                told = len(sizes) if len(set(sizes)) == 1 else list(sizes)
                yield f'give the rule for {name} "shape": [{told}, -1]'


def _fits(trial: _Trial, whole: _Given, cuts: Mapping[str, Cut | None]) -> bool:
    try:
        return None not in cuts.values() and trial.agrees(whole, trial.parts(cuts))
    except Exception:  # these parts are not what it reads, either
        return False


def _cut(layer: _Layer, sizes: tuple[int, ...]) -> Cut | None:
    place = place_of(layer.module)
    assert place is not None
    size = place.axis.world_size
    if any(each % size for each in sizes):
        return None
    way = Slicing(layer.name, layer.module, Style(), {"weight": (layer.cut.dim, sizes)})
    return way.cut("weight", layer.cut.whole, place.axis.rank, size)


def _ways(outputs: int, heads: Sequence[int] | None) -> Iterator[tuple[int, ...]]:
    """How outputs may lie in a weight: as one, in equal parts, or queries, keys and values."""
    yield (outputs,)
    yield from ((outputs // count,) * count for count in (2, 3) if not outputs % count)
    if heads is not None and sum(heads) == outputs:
        yield tuple(heads)


def _own_class(module: nn.Module) -> type[nn.Module]:
    return cast(type[nn.Module], next(cls for cls in type(module).__mro__ if not issubclass(cls, CutModule)))
