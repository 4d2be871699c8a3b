"""The optimizer's states seen parameter by parameter, although the optimizer holds stretches of flat masters.

Three kinds of state: *moments* have one value for each element and can be cut anywhere; *scalars* (``step``) hold for
every parameter of the stretch; what is neither (factored moments, histories) is *irregular* and only fits a stretch
that covers exactly the same elements. Codes that are whole numbers are no moments where the same state has the scales
of their blocks (the 8 bits of bitsandbytes): both are irregular. Moments in tensors that pack such codes themselves
(torchao's) are saved as the numbers that they stand for, and *packed* beside them: the pieces that saved them go on
with the same codes. *Objects* of an optimizer's own package (GaLore's and APOLLO's projectors) are saved as the name of
their class and their attributes, and made of them without running their code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

from ds_hf.checkpoint.format import SavedCut
from ds_hf.engine.checkpoint.live import Checkpointable, cut_in, names_of
from ds_hf.engine.optim.base import StreamingOptimizer
from ds_hf.engine.optim.sharded import Segment, ShardedOptimizer
from ds_hf.engine.zero.buffer import FlatBuffer
from ds_hf.engine.zero.layout import Fragment
from ds_hf.errors import CheckpointError

__all__ = ["SCRIPTS_OWN", "OwnedPiece", "decode_scalar", "kinds", "made", "pieces", "plain", "segments_of", "unpacked"]

# Options of a group that are the script's and in no checkpoint: which positions have gradients (1-bit optimizers).
SCRIPTS_OWN = ("exp_avg_mask",)


@dataclass(frozen=True)
class OwnedPiece:
    """The part of one parameter that this rank owns, and the stretch that updates it."""

    name: str
    fragment: Fragment
    segment: Segment
    cut: SavedCut | None

    @property
    def where(self) -> tuple[Any, ...]:
        """``(name, start, numel)``, and for an element of a slice its cut."""
        cut = () if self.cut is None else (self.cut.dim, self.cut.ranges)
        return self.name, self.fragment.start, self.fragment.numel, *cut


@dataclass(frozen=True)
class Kinds:
    """States of one segment, sorted by kind."""

    moments: dict[str, Tensor]
    scalars: dict[str, Any]
    irregular: dict[str, Any]
    packed: dict[str, dict[str, Any]] = field(default_factory=dict)
    objects: dict[str, dict[str, Any]] = field(default_factory=dict)


def segments_of(optimizer: ShardedOptimizer, buffer: FlatBuffer) -> list[Segment]:
    """The segments that lie in ``buffer``."""
    return next((s for gradient, s in optimizer.segments.items() if gradient.buffer is buffer), [])


def pieces(engine: Checkpointable, buffer: FlatBuffer) -> Iterator[OwnedPiece]:
    """Every piece of the buffer's parameters that this rank's optimizer updates, in order."""
    optimizer = engine.optimizer
    assert optimizer is not None
    segments = iter(segments_of(optimizer, buffer))
    segment = next(segments, None)
    names = names_of(engine, buffer)
    for fragment in buffer.layout.fragments(buffer.axis.rank, whole=optimizer.whole):
        while segment is not None and segment.end <= fragment.shard_start:
            segment = next(segments, None)
        assert segment is not None
        assert segment.start <= fragment.shard_start
        index = fragment.slot.index
        yield OwnedPiece(names[index], fragment, segment, cut_in(buffer.params[index]))


def kinds(optimizer: ShardedOptimizer, segment: Segment) -> Kinds:
    """Sort the segment's states."""
    found = Kinds({}, {}, {})
    for key, value in optimizer.state.get(segment.param, {}).items():
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape == segment.param.shape:
            found.moments[key] = value
            if is_traceable_wrapper_subclass(value):
                names, context = value.__tensor_flatten__()
                inner = {name: getattr(value, name) for name in names}
                found.packed[key] = {"class": _full_name(type(value)), "inner": inner, "context": context}
        elif value is None or isinstance(value, bool | int | float | str) or _is_scalar(value):
            found.scalars[key] = value
        elif _is_object_of(optimizer, type(value)):
            found.objects[key] = {"class": _full_name(type(value)), "attributes": dict(vars(value))}
        else:
            found.irregular[key] = value
    if found.irregular:
        codes = [key for key, value in found.moments.items() if not value.is_floating_point()]
        found.irregular.update((key, found.moments.pop(key)) for key in codes)
    return found


def plain(state: Tensor) -> Tensor:
    """The numbers of a moment that may be packed."""
    return state.dequantize() if is_traceable_wrapper_subclass(state) and hasattr(state, "dequantize") else state


def unpacked(packed: dict[str, Any], device: torch.device) -> Tensor | None:
    """What ``Kinds.packed`` describes, where its class has been imported; nothing is imported for it."""
    classes: list[Any] = [Tensor]
    for each in classes:
        classes += each.__subclasses__()
        if _full_name(each) == packed.get("class") and hasattr(each, "__tensor_unflatten__"):
            inner = {name: value.to(device) for name, value in packed["inner"].items()}
            return each.__tensor_unflatten__(inner, packed["context"], None, None)  # type: ignore[no-any-return]
    return None


def made(optimizer: ShardedOptimizer, saved: dict[str, Any], device: torch.device) -> Any:
    """The object that ``Kinds.objects`` describes, with its tensors on ``device``; nothing of its class runs.

    Raises:
        CheckpointError: the optimizer's package, as it has been imported, has no such class.
    """
    name = str(saved.get("class"))
    for module in [module for known, module in sys.modules.items() if known == name.rpartition(".")[0]]:
        kind = vars(module).get(name.rpartition(".")[2])
        if isinstance(kind, type) and _full_name(kind) == name and _is_object_of(optimizer, kind):
            found: Any = object.__new__(kind)
            vars(found).update(tree_map_only(Tensor, lambda value: value.to(device), saved["attributes"]))
            return found
    raise CheckpointError(
        f"the optimizer's state in the checkpoint has a {name}, which the package of "
        f"{type(optimizer.optimizer).__name__} does not have here: install the release that saved it, or load with "
        "load_optimizer_states=False"
    )


def _is_object_of(optimizer: ShardedOptimizer, kind: type) -> bool:
    """Whether attributes are all that there is of objects of ``kind``, a class of the optimizer's package."""
    package = type(optimizer.optimizer).__module__.split(".")[0]
    plain_object = [getattr(kind, name) is getattr(object, name) for name in ("__reduce__", "__reduce_ex__", "__new__")]
    bare = not hasattr(kind, "__setstate__") and getattr(object, "__getstate__", None) is getattr(
        kind, "__getstate__", None
    )
    return kind.__module__.split(".")[0] == package and all(plain_object) and bare and kind.__dictoffset__ != 0


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0 and not value.is_complex()


def decode_scalar(optimizer: ShardedOptimizer, segment: Segment, key: str, value: Any) -> Any:
    """What ``scalars.encode_scalar`` gave, on the device where the optimizer wants it.

    Raises:
        CheckpointError: it is not what it should be.
    """
    if key == "step" and not isinstance(value, list) and type(optimizer.optimizer).__module__.startswith("torch.optim"):
        value = ["float32", value]  # torch counts in tensors, and would fail at the next step
    if not isinstance(value, list):
        return value
    dtype = getattr(torch, str(value[0]), None) if len(value) == 2 else None
    if not isinstance(dtype, torch.dtype) or isinstance(value[1], bool) != (dtype is torch.bool):
        raise CheckpointError(f"the checkpoint's manifest has {value!r} as optimizer state {key!r}")
    if not isinstance(value[1], int | float):
        raise CheckpointError(f"the checkpoint's manifest has {value!r} as optimizer state {key!r}")
    group = optimizer.param_groups[segment.group]
    # torch keeps counters on the host unless a fused or captured kernel reads them; ds_hf's own beside the master.
    beside = group.get("fused") or group.get("capturable") or isinstance(optimizer.optimizer, StreamingOptimizer)
    return torch.tensor(value[1], dtype=dtype, device=segment.param.device if beside else "cpu")
