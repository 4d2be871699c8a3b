"""Packed weights: what is not floating point (quantized weights), sharded as the bytes that it is.

A quantized weight is an integer parameter (bitsandbytes, HQQ), bytes that call themselves floating point (bitsandbytes
with ``bnb_4bit_quant_storage``), fp8, or a tensor that wraps others (torchao). Behind each there are plain tensors, its
*parts*. Invariants: no byte is ever cast; packed weights do not train; where parameters are replicated they are left as
they were. An ``PackedBuffer`` is ``[nbytes]`` in uint8, and the parts are views of it in their own dtype and strides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ds_hf.engine.comm import collectives
from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.zero.at_rest import is_ordinary
from ds_hf.engine.zero.buffer import FlatBuffer, _mark, buffers_of, unshard
from ds_hf.engine.zero.layout import Fragment, Slot
from ds_hf.engine.zero.replicas import Replicas
from ds_hf.engine.zero.storage import ShardStorage
from ds_hf.errors import ConfigError
from ds_hf.log import warn_once

__all__ = [
    "PackedBuffer",
    "check_packed",
    "is_packed",
    "move_packed",
    "packed_parts",
    "quantized_elsewhere",
    "shards_packed",
    "tell_quantized_elsewhere",
]


def is_packed(param: Tensor) -> bool:
    """Whether the values of ``param`` are no plain floating-point numbers."""
    narrow = param.dtype.itemsize < 2  # integers, and fp8: a number in it means nothing without its scale
    return _is_wrapped(param) or narrow or not param.is_floating_point() or hasattr(param, "quant_state")


def _is_plain(param: Tensor) -> bool:
    return is_ordinary(param) and not hasattr(param, "quant_state")


def _is_wrapped(param: Tensor) -> bool:
    """A tensor of a class of its own, and not a class of parameters over a plain tensor."""
    return not is_ordinary(param) and type(param.data) is not Tensor


def quantized_elsewhere(model: nn.Module) -> str | None:
    """The first parameter that a library keeps in few bits, which alone knows how to write it: bitsandbytes has its
    scales beside the parameter, torchao several tensors in one."""
    return next((n for n, p in model.named_parameters() if type(p) is not nn.Parameter and is_packed(p)), None)


def tell_quantized_elsewhere(model: nn.Module) -> None:
    """Where values are handed out by name: those of few bits are not all that a reader needs."""
    if (name := quantized_elsewhere(model)) is not None:
        warn_once(
            f"{name} and weights like it are handed out as they lie, in few bits; of bitsandbytes' the scales are not "
            "among what is named: load the base of the run again, with the adapters on it"
        )


def packed_parts(param: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The plain tensors behind ``param``, of any shape and dtype, with the path of each in it; ``""`` for itself."""
    if not is_traceable_wrapper_subclass(param):
        yield "", param
        return
    for name in param.__tensor_flatten__()[0]:
        for path, part in packed_parts(getattr(param, name)):
            yield f"{name}.{path}" if path else name, part


def shards_packed(param: Tensor) -> bool:
    """Whether sharding ``param`` would free memory: bitsandbytes keeps its 8-bit weights a second time."""
    if type(param).__name__ == "Int8Params":
        warn_once(
            "bitsandbytes keeps 8-bit weights beside the parameters, so they cannot be sharded: every process holds "
            "all of them. 4-bit weights (load_in_4bit=True) are sharded; with 8-bit ones ZeRO stage 2 is just as good"
        )
        return False
    return True


def move_packed(model: nn.Module, device: torch.device, *, sharded: bool) -> None:
    """Put packed parameters on ``device`` as their own classes do: scales and the like have to follow.

    Plain integers that are to be sharded stay: each buffer copies its own, so the device never holds all of them.
    """
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is None or not is_packed(param) or (sharded and _is_plain(param)):
                continue
            if param.device != device:
                if id(param) not in moved:
                    new = param.to(device)
                    new = new if isinstance(new, nn.Parameter) else nn.Parameter(new, requires_grad=False)
                    # what the engine knows of a parameter, as its place in a whole one, is written on it
                    new.__dict__.update({key: value for key, value in vars(param).items() if key not in vars(new)})
                    moved[id(param)] = new
                module._parameters[name] = moved[id(param)]


def check_packed(model: nn.Module, *, sharded: bool) -> None:
    """Refuse what cannot be trained.

    Raises:
        ConfigError: a quantized weight trains, or cannot be taken apart to be sharded; it names the parameter.
    """
    for name, param in model.named_parameters():
        if not is_packed(param):
            continue
        kind = f"{name} is a {type(param).__name__}" if type(param) is not nn.Parameter else f"{name} is {param.dtype}"
        if param.requires_grad and param.is_complex():
            raise ConfigError(
                f"{kind}: complex parameters do not train in flat buffers of real numbers. Keep the parameter as real "
                "pairs, nn.Parameter(torch.view_as_real(values)), and compute with torch.view_as_complex(self.name)"
            )
        if param.requires_grad:
            raise ConfigError(
                f"{kind} and requires a gradient, but quantized weights do not train: freeze it "
                "(requires_grad_(False)) and train adapters on it (peft.LoraConfig)"
            )
        if sharded and _is_wrapped(param) and not is_traceable_wrapper_subclass(param):
            raise ConfigError(
                f"{kind}, a quantized weight that ds_hf cannot take apart to shard it: use ZeRO stage 2 "
                '("zero_optimization": {"stage": 2}), where each process keeps the frozen weights whole'
            )


class PackedBuffer(FlatBuffer):
    """Bytes of the parts of packed parameters.

    Args:
        owners: the parameters of the model.
    """

    def __init__(
        self,
        owners: Sequence[nn.Parameter],
        axis: Axis,
        *,
        device: torch.device,
        shard_storage: ShardStorage | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        parts = [part for owner in owners for _, part in packed_parts(owner)]
        self._forms = [(part.dtype, part.shape, _dense_strides(part)) for part in parts]
        self._owner_shapes = [owner.shape for owner in owners]
        super().__init__(
            parts,  # type: ignore[arg-type]  # of torchao's weights: plain tensors, used like parameters here
            axis,
            dtype=torch.uint8,
            device=device,
            sharded=True,
            shard_storage=shard_storage,
            replicas=replicas,
        )
        self.owners = tuple(owners)
        self.placeholders = tuple(torch.empty(0, dtype=dtype, device=device) for dtype, _, _ in self._forms)

    def _stored_shapes(self) -> list[torch.Size]:
        """Of one-byte numbers their own; else a row of bytes."""
        forms = zip(self.params, self._forms, strict=True)
        return [s if d.itemsize == 1 else torch.Size([part.numel() * d.itemsize]) for part, (d, s, _) in forms]

    def form_of(self, slot: Slot) -> tuple[torch.dtype, torch.Size]:
        return self._forms[slot.index][:2]

    def order_of(self, slot: Slot) -> tuple[int, ...]:
        _, shape, strides = self._forms[slot.index]
        order = sorted(range(len(shape)), key=lambda dim: -strides[dim])
        lying = torch.empty(tuple(shape[dim] for dim in order), device="meta").stride()
        plain = strides == torch.empty(shape, device="meta").stride() or lying != tuple(strides[dim] for dim in order)
        return () if plain else tuple(order)

    def piece_of(self, flat: Tensor, fragment: Fragment) -> tuple[int, Tensor]:
        """``[numel]`` in the dtype of each: shards end between elements, at multiples of 16 bytes."""
        dtype = self._forms[fragment.slot.index][0]
        start, piece = super().piece_of(flat, fragment)
        return start // dtype.itemsize, piece.view(dtype)

    @torch.no_grad()
    def adopt(self, *, synchronize: bool = True) -> Tensor:
        staged = torch.zeros(self.layout.numel, dtype=torch.uint8, device=self.device)
        with unshard(buffers_of(self.owners)):
            for part, view in zip(self.params, self._views_of(staged), strict=True):
                view.copy_(part.data)
        if synchronize:
            collectives.broadcast(staged, self.replicas.axis, what=self.labels.weights)
        self._place(staged)
        return staged

    def _views_of(self, flat: Tensor) -> Iterator[Tensor]:
        for slot, (dtype, shape, strides) in zip(self.layout.slots, self._forms, strict=True):
            yield flat[slot.offset : slot.end].view(-1).view(dtype).as_strided(shape, strides)

    def _make_views(self) -> None:
        self.views = tuple(self._views_of(self.full))
        self._memory.own_users = self._memory.users()

    def give_up(self, param: Tensor) -> None:
        self._gone.update(id(part) for _, part in packed_parts(param))
        super().give_up(param)

    def _mark_params(self) -> None:
        for owner, shape in zip(self.owners, self._owner_shapes, strict=True):
            _mark(owner, self, Slot(-1, shape, 0, shape.numel()))


def _dense_strides(part: Tensor) -> tuple[int, ...]:
    """The strides of ``part`` if its elements fill a stretch of memory, else those of a contiguous tensor."""
    expected = 1
    for stride, length in sorted(zip(part.stride(), part.shape, strict=True)):
        if length != 1 and stride != expected:
            return torch.empty(part.shape, device="meta").stride()
        expected *= length
    return part.stride()
