"""Sequences padded to a few lengths around each block: CUDA graphs are of one shape each, and lengths are many.

Padding stands behind a sequence, and what a block gives of it is cut off, so the rest of the model and its loss see
each batch as it is. That is right where no position looks at later ones, as in causal attention, or where a mask says
which are there. Each block is tried out before it is given padding: what it computes of a sequence must stay the same
to the bit whatever stands behind it.

Invariants
- Padded positions repeat the last one, so they are as finite as it, and their gradients are zeros.
- A block whose inputs have no clear length, or that does not pass its trial, gets them as they are, which is told.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from ds_hf.log import warn_once

__all__ = ["Padded", "Padding"]

_MOST_PLANS = 32  # of one block
_CLOSE = 0.05  # of what a block adds to its input; other lengths have other kernels

_WHOLE = {torch.int32, torch.int64}

Leaves = list[Any]
Dims = tuple[int, ...]


class _Forward(Protocol):
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class _Unclear(Exception):
    """Why inputs cannot be padded."""


class Padded(NamedTuple):
    """A block's inputs with padding.

    Attributes:
        lengths: of each tensor of what the block gives, the dimensions along the sequence.
        own: the length of the sequence.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    lengths: tuple[Dims, ...]
    own: int

    def cut(self, found: Any) -> Any:
        """What the block gave, of the sequence alone."""
        leaves, tree = tree_flatten(found)
        return tree_unflatten(
            [_cut(leaf, dims, self.own) for leaf, dims in zip(leaves, self.lengths, strict=True)], tree
        )


class _Plan(NamedTuple):
    """How inputs of one kind are padded.

    Attributes:
        roles: of each leaf of the inputs.
        lengths: as of ``Padded``.
        parts: the modules inside, whose hooks would see padding.
    """

    roles: tuple[_Role | None, ...]
    lengths: tuple[Dims, ...]
    parts: tuple[nn.Module, ...]


class Padding:
    """That of one engine's blocks.

    Args:
        multiple: of which padded lengths are multiples.
    """

    def __init__(self, multiple: int) -> None:
        self.multiple = multiple
        self._known: set[int] = set()
        self._plans: dict[nn.Module, dict[Any, _Plan | None]] = {}
        self._kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # masks and rotations, which blocks share

    def lengths(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[int]:
        """Those to which a block's inputs may be padded, the best first: the next multiple, and longer ones that are
        known. None for inputs of such a length, and where there are no hidden states."""
        hidden = hidden_of(args, kwargs)
        if hidden is None or hidden.shape[1] < 2 or hidden.shape[1] % self.multiple == 0:
            return
        least = -(-hidden.shape[1] // self.multiple) * self.multiple
        yield least
        yield from sorted(known for known in self._known if known > least)

    def of(
        self, module: nn.Module, own: _Forward, args: tuple[Any, ...], kwargs: dict[str, Any], length: int
    ) -> Padded | None:
        """The inputs of ``module``, whose forward is ``own``, padded to ``length``; ``None`` where they cannot be."""
        hidden = hidden_of(args, kwargs)
        assert hidden is not None
        now = hidden.shape[1]
        leaves, tree = tree_flatten((args, kwargs))
        plan = self._plan(module, own, args, kwargs, (tree, tuple(_kind(leaf, now) for leaf in leaves)))
        if plan is None:
            return None
        self._known.add(length)
        padded = [
            leaf if role is None else self._padded(leaf, role, length - now)
            for leaf, role in zip(leaves, plan.roles, strict=True)
        ]
        new_args, new_kwargs = tree_unflatten(padded, tree)
        return Padded(new_args, new_kwargs, plan.lengths, now)

    def _plan(
        self, module: nn.Module, own: _Forward, args: tuple[Any, ...], kwargs: dict[str, Any], kind: Any
    ) -> _Plan | None:
        plans = self._plans.setdefault(module, {})
        try:
            known = plans.get(kind)
            parts = tuple(module.modules())[1:] if known is None else known.parts
            if any(part._forward_hooks or part._forward_pre_hooks for part in parts):  # also before a trial
                raise _Unclear("hooks of its parts, such as those that record attention, would see padding")
            if kind not in plans:
                if len(plans) == _MOST_PLANS:
                    raise _Unclear(f"its inputs are of more than {_MOST_PLANS} kinds")
                plans[kind] = None
                roles = _roles(module, own, args, kwargs)
                lengths = _try(module, own, args, kwargs, roles)
                plans[kind] = _Plan(roles, lengths, parts)
        except _Unclear as error:
            warn_once(
                f"{type(module).__name__}: sequences are not padded for captured blocks "
                f'("capture_pad_to_multiple_of": {self.multiple}): {error}. Blocks are captured for the first shapes '
                "that come, and compute eagerly with others"
            )
            return None
        return plans[kind]

    def _padded(self, leaf: Tensor, role: _Role, more: int) -> Tensor:
        if leaf.requires_grad:
            return role.padded(leaf, more)
        of = (leaf._version, role, more)
        kept: tuple[Any, Tensor] | None = self._kept.get(leaf)  # type: ignore[no-untyped-call]
        if kept is None or kept[0] != of:
            self._kept[leaf] = kept = of, role.padded(leaf, more)
        return kept[1]


def _kind(leaf: Any, length: int) -> Any:
    """What of a leaf a plan depends on: of tensors the shape, whatever the length."""
    if isinstance(leaf, Tensor):
        return tuple(-1 if size == length else size for size in leaf.shape), leaf.dtype
    if leaf is None or isinstance(leaf, bool | str):
        return leaf
    return type(leaf)


# -- what of the inputs goes along the sequence ------------------------------------------------------------------------


class _Role(NamedTuple):
    """Of a tensor, the dimensions along the sequence: ``repeated`` ones continue with the last position, and
    ``masked`` says of the last that what is added is not to be seen."""

    repeated: Dims
    masked: bool

    def padded(self, x: Tensor, more: int, noise: torch.Generator | None = None) -> Tensor:
        """``x``, of any shape and dtype, with ``more`` positions; with ``noise`` floating ones hold random numbers."""
        for dim in self.repeated:
            last = x.detach().narrow(dim, x.shape[dim] - 1, 1)
            shape = [more if each == dim else size for each, size in enumerate(x.shape)]
            behind = last.expand(shape)
            if noise is not None and x.is_floating_point() and not self.masked:
                peak = 1 + x.detach().abs().amax()
                behind = peak * torch.randn(shape, generator=noise, device=x.device, dtype=x.dtype)
            x = torch.cat([x, behind], dim)
        if self.masked:
            unseen = -torch.inf if x.is_floating_point() else 0  # also where a row sees nothing, which is all -3e38
            x = torch.cat([x, x.new_full((*x.shape[:-1], more), unseen)], -1)
        return x


def hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """A block's hidden states, ``[batch, length, features]`` in a floating dtype, if that is what it is given first."""
    found = args[0] if args else kwargs.get("hidden_states")
    return found if isinstance(found, Tensor) and found.dim() == 3 and found.is_floating_point() else None


def _roles(module: nn.Module, own: _Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Role | None, ...]:
    """The role of each leaf of the inputs.

    Raises:
        _Unclear: of one it cannot be said.
    """
    hidden = hidden_of(args, kwargs)
    assert hidden is not None
    names = [*inspect.signature(own).parameters, *("more inputs" for _ in args)]
    given = [*zip(names, args, strict=False), *kwargs.items()]
    roles: list[_Role | None] = []
    for name, leaf in ((name, leaf) for name, value in given for leaf in tree_leaves(value)):
        if leaf is hidden:
            roles.append(_Role((1,), masked=False))
        elif isinstance(leaf, Tensor):
            roles.append(_role(name, leaf, *hidden.shape[:2]))
        elif leaf is None or isinstance(leaf, bool | int | float | str | torch.dtype):
            roles.append(None)
        else:
            hint = ": model.config.use_cache = False" if "past_key_value" in name else ""
            raise _Unclear(f"it is given a {type(leaf).__name__}{hint}")
    return tuple(roles)


def _role(name: str, x: Tensor, batch: int, length: int) -> _Role | None:
    """That of an input of shape ``x.shape``, any dtype; ``None`` for what has no length."""
    along = tuple(dim for dim, size in enumerate(x.shape) if size == length)
    if not along:
        if x.numel() > 1 and x.dtype in _WHOLE:
            raise _Unclear(f"{name} says in another way where sequences end")
        return None
    if x.dim() > 1 and (x.dtype is torch.bool or "mask" in name or "bias" in name):
        return _mask(name, x, batch, length)
    if x.dim() > 1 and batch == length and 0 in along:
        along = along[1:]
    if x.dim() == 3 and along[:1] == (1,):
        along = (1,)
    if len(along) != 1:
        raise _Unclear(f"it is not clear which dimension of {name}, {list(x.shape)}, is the sequence's")
    return _Role(along, masked=False)


def _mask(name: str, x: Tensor, batch: int, length: int) -> _Role:
    """That of a mask or of what is added to scores, ``[..., queries, keys]``, or ``[batch, keys]`` in whole numbers."""
    last, rows = x.shape[-1] == length, x.shape[-2] == length
    if x.dim() == 2 and x.shape[0] in (1, batch):
        if x.is_floating_point():
            raise _Unclear(f"{name} may be added or multiplied")
        return _Role((), masked=last)
    if any(size == length for size in x.shape[1:-2]):
        raise _Unclear(f"it is not clear which dimensions of {name}, {list(x.shape)}, are the sequence's")
    return _Role((x.dim() - 2,) if rows else (), masked=last)


# -- whether what stands behind a sequence changes anything ------------------------------------------------------------


@torch.no_grad()
def _try(
    module: nn.Module, own: _Forward, args: tuple[Any, ...], kwargs: dict[str, Any], roles: tuple[_Role | None, ...]
) -> tuple[Dims, ...]:
    """The dimensions along the sequence of what ``own`` gives.

    Raises:
        _Unclear: what stands behind a sequence changes it, or something beside it.
    """
    leaves, tree = tree_flatten((args, kwargs))
    hidden = hidden_of(args, kwargs)
    assert hidden is not None
    length, device = hidden.shape[1], hidden.device

    def computed(noise: torch.Generator | None, training: bool) -> Leaves:
        """Of twice the length."""
        given = [
            leaf if role is None else role.padded(leaf, length, noise) for leaf, role in zip(leaves, roles, strict=True)
        ]
        more_args, more_kwargs = tree_unflatten(given, tree)
        with _mode(module, training), _same_draws(device):
            return tree_leaves(own(*more_args, **more_kwargs))

    with _unchanged(module):
        try:
            with _mode(module, training=False):  # without dropout, whose numbers depend on the length
                plain = tree_leaves(own(*args, **kwargs))
            longer, repeated = computed(None, training=False), computed(None, training=True)
            noisy = computed(torch.Generator(device).manual_seed(0), training=True)
        except Exception as error:
            raise _Unclear(f"it fails with twice the length ({type(error).__name__}: {error})") from error
    if not len(plain) == len(longer) == len(repeated) == len(noisy):
        raise _Unclear("what it gives has no clear form")
    return tuple(
        _along(*each, hidden) if isinstance(each[0], Tensor) else _same(*each)
        for each in zip(plain, longer, repeated, noisy, strict=True)
    )


def _along(plain: Tensor, longer: Tensor, repeated: Any, noisy: Any, hidden: Tensor) -> Dims:
    """The dimensions along the sequence of what a block gives: of ``hidden``, of twice its length, and that in training
    with padding of two kinds."""
    length = hidden.shape[1]
    if not all(isinstance(each, Tensor) and each.shape == longer.shape for each in (repeated, noisy)):
        raise _Unclear("what it gives in training has another form")
    if plain.dim() != longer.dim():
        raise _Unclear("what it gives has no clear form")
    dims = tuple(dim for dim in range(plain.dim()) if plain.shape[dim] != longer.shape[dim])
    if any((plain.shape[dim], longer.shape[dim]) != (length, 2 * length) for dim in dims):
        raise _Unclear("what it gives has no clear length")
    if not torch.equal(_cut(repeated, dims, length), _cut(noisy, dims, length)):
        raise _Unclear("what it computes of a position depends on later ones")
    if repeated.isnan().any():
        raise _Unclear("what it computes of padding is no number")
    own = _cut(longer, dims, length)
    added = plain.double() - hidden.double() if plain.shape == hidden.shape else plain.double()
    error = torch.where(own == plain, 0.0, own.double() - plain.double()).norm()
    if error > _CLOSE * added.norm() + torch.finfo(hidden.dtype).eps * plain.double().norm():
        raise _Unclear("what it computes depends on the length of the sequence")
    return dims


def _same(plain: Any, *others: Any) -> Dims:
    if any(isinstance(other, Tensor) or other != plain for other in others):
        raise _Unclear(f"it gives a {type(plain).__name__}, and something else in training")
    return ()


def _same_draws(device: torch.device) -> AbstractContextManager[None]:
    """Afterwards random numbers go on as if none had been drawn."""
    if device.type == "cpu":
        return torch.random.fork_rng([])
    return torch.random.fork_rng([device], device_type=device.type)


@contextmanager
def _mode(module: nn.Module, training: bool) -> Iterator[None]:
    """``module`` in evaluation, or as it trains but for its linear layers, whose scales in fp8 are of all positions."""
    modes = {part: part.training for part in module.modules()}
    try:
        for part, mode in modes.items():
            part.training = mode and training and not isinstance(part, nn.Linear)
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """What parts of ``module`` keep beside their weights is put back afterwards.

    Raises:
        _Unclear: something was changed: padding would count there.
    """
    kept = [(part, {k: v for k, v in vars(part).items() if isinstance(v, Tensor)}) for part in module.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        changed = [buffer.copy_(before) for buffer, before in buffers if not torch.equal(buffer, before)]
        for part, before in kept:
            now = {k: v for k, v in vars(part).items() if isinstance(v, Tensor)}
            if now.keys() != before.keys() or any(now[key] is not before[key] for key in before):
                changed += now.values()
                for key in now:
                    del part.__dict__[key]
                part.__dict__.update(before)
    if changed:
        raise _Unclear("it keeps what it has seen beside what it gives")


def _cut(leaf: Any, dims: Dims, length: int) -> Any:
    for dim in dims:
        leaf = leaf.narrow(dim, 0, length)
    return leaf
