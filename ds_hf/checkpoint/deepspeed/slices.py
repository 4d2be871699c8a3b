"""How the slices that DeepSpeed's tensor-parallel ranks have of a parameter make up the whole.

Checkpoints say it in ``universal_checkpoint_info``, which AutoTP writes and Megatron-DeepSpeed puts into the client
state: lists of patterns for names of parameters. Without a match slices follow one another in dimension 0. The order in
which lists are asked is that of DeepSpeed's ``ds_to_universal``, and so is what they mean.

Where a checkpoint lacks it, a file ``universal_checkpoint_info.json`` of the same content can be put beside its files.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_hf.checkpoint.cuts import Cut
from ds_hf.checkpoint.deepspeed.affine import VERSION as AFFINE_VERSION
from ds_hf.checkpoint.deepspeed.affine import AffineMap, parse_affine_map
from ds_hf.checkpoint.deepspeed.layout import count_of
from ds_hf.checkpoint.deepspeed.pickles import SubparamShape
from ds_hf.checkpoint.format import SavedCut
from ds_hf.checkpoint.trust.pickled import reading
from ds_hf.config.patterns import may_take_long
from ds_hf.errors import CheckpointError
from ds_hf.regular_files import read_regular

__all__ = ["INFO", "RULES_FILE", "SlicePlace", "SliceRules", "given_info"]

INFO = "universal_checkpoint_info"
RULES_FILE = "universal_checkpoint_info.json"

_LISTS = (
    "tp_replicated_parameter_patterns",
    "parameter_to_average_patterns",
    "parameter_with_2_sub_params_cat_dim_0",
    "parameter_with_row_parallelism_patterns",
    "vocabulary_parameter_patterns",
)
_REPLICATED, _AVERAGED, _TWO_PARTS, _ROWS, _VOCABULARY = _LISTS
_PIPELINE = "pipeline_replicated_parameter_patterns"
_WIDTHS_SINCE = 0.4  # universal_checkpoint_version from which widths of sub-parameters are written


@dataclass(frozen=True)
class SlicePlace:
    """Where the slices of a parameter lie in the whole of ``shape``.

    Attributes:
        cuts: of each tensor-parallel rank; ``None``: what it has is the whole.
        kept: elements at the start of each flattened slice that belong to the whole; the others pad the vocabulary.
        keys: what DeepSpeed's universal folders say beside the whole tensor.
        same: all ranks hold the same values.
        made: ``made(flat slices, state)`` is the whole where it is not made of cuts.
    """

    shape: tuple[int, ...]
    cuts: tuple[SavedCut | None, ...]
    kept: tuple[int, ...]
    keys: dict[str, Any] = field(default_factory=dict)
    same: bool = False
    made: Callable[[Sequence[Tensor], str], Tensor] | None = None

    def merge(self, slices: Sequence[Tensor], state: str) -> Tensor:
        """The whole of the ranks' slices of one state ("master", "exp_avg", ...), in any shapes.

        Raises:
            ValueError: ranks that are to hold the same hold different values.
        """
        if self.made is not None:
            return self.made([held.reshape(-1) for held in slices], state).view(self.shape)
        if self.same and not all(torch.equal(held, slices[0]) for held in slices[1:]):
            raise ValueError("it is to be the same on all tensor-parallel ranks, which hold different values")
        whole = torch.empty(self.shape, dtype=slices[0].dtype)
        for held, cut, kept in zip(slices, self.cuts, self.kept, strict=True):
            flat = held.reshape(-1)[:kept]
            if cut is not None:
                place = Cut(cut.dim, cut.ranges, torch.Size(self.shape))
                place.put(whole, flat.view(place.shape))
            elif self.same or len(slices) == 1:
                return flat.view(self.shape).clone()
        return whole


def given_info(folder: Path, info: Any) -> Any:
    """``info`` of the checkpoint, or what lies beside its files."""
    path = folder / RULES_FILE
    if not path.exists():
        return info
    with reading(path):
        return json.loads(read_regular(path, 2**26))


class SliceRules:
    """What ``universal_checkpoint_info`` says, checked.

    Args:
        where: the checkpoint, for messages.
        tensor: number of tensor-parallel ranks.
        assumed: a missing ``info`` is taken for an empty one.

    Raises:
        CheckpointError: it is missing and there are several ranks, or is not as DeepSpeed writes it.
    """

    def __init__(self, info: Any, where: Path, tensor: int, *, assumed: bool = False) -> None:
        self.where, self.tensor = where, tensor
        if info is None and tensor > 1 and not assumed:
            raise self._fail(
                f"it was saved by {tensor} tensor-parallel ranks and has no {INFO}, which says how their slices make "
                f"whole parameters. Put a file {RULES_FILE} beside its files, such as "
                '{"tp_replicated_parameter_patterns": [".*norm.*", ".*embed_tokens.*"], '
                '"parameter_with_row_parallelism_patterns": [".*o_proj.weight", ".*down_proj.weight"]}; all others are '
                "taken for slices of dimension 0"
            )
        if info is not None and not isinstance(info, Mapping):
            raise self._fail(f"{INFO} is a {type(info).__name__}")
        self.info: dict[str, Any] = dict(info or {})
        self._lists = {key: _Patterns(self._texts(self.info.get(key) or [], key), self._fail) for key in _LISTS}
        self.pipeline = _Patterns(self._texts(self.info.get(_PIPELINE) or [], _PIPELINE), self._fail)
        unsupported = self.info.get("autotp_unsupported_parameter_patterns") or {}
        if isinstance(unsupported, Mapping) and unsupported and tensor > 1:
            name, reason = next(iter(unsupported.items()))
            text = f"the slices of {str(name)[:200]} cannot be put together: {reason!s:.500}"
            raise self._fail(f"DeepSpeed says that {text}")
        version = self.info.get("universal_checkpoint_version", 0.0)
        if isinstance(version, bool) or not isinstance(version, int | float):
            raise self._fail(f"universal_checkpoint_version is {version!r:.80}")
        self.version = float(version)
        parts = self._list(self.info.get("parameter_with_sub_params") or [])
        self._parts = [self._sub_params(entry) for entry in parts]
        self._affine = self._affine_maps()

    def _fail(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {reason}")

    def _list(self, value: Any) -> list[Any]:
        if not isinstance(value, list | tuple):
            raise self._fail(f"{INFO} has a {type(value).__name__} where a list is expected")
        return list(value)

    def _texts(self, value: Any, key: str) -> list[str]:
        found = self._list(value)
        if not all(isinstance(text, str) for text in found):
            raise self._fail(f"{key} of {INFO} holds what is not a pattern")
        return found

    def _sub_params(self, entry: Any) -> tuple[_Patterns, SubparamShape]:
        content = vars(entry) if isinstance(entry, SubparamShape) else entry
        if not isinstance(content, Mapping):
            raise self._fail(f"parameter_with_sub_params of {INFO} holds a {type(content).__name__}")
        try:
            patterns = self._texts(content["patterns"], "parameter_with_sub_params")
            shape = tuple(
                tuple(count_of(n) for n in size) if isinstance(size, list | tuple) else _size_or_any(size)
                for size in self._list(content["shape"])
            )
            dim = count_of(content["partition_dim"])
        except (KeyError, TypeError, ValueError) as error:
            raise self._fail(f"parameter_with_sub_params of {INFO} is not as DeepSpeed writes it: {error}") from None
        if dim >= len(shape) or sum(size == -1 for size in shape) > 1:
            raise self._fail(f"parameter_with_sub_params of {INFO} has shape {shape!r:.200} and partition_dim {dim}")
        return _Patterns(patterns, self._fail), SubparamShape(patterns, shape, dim)

    def _affine_maps(self) -> _Patterns:
        entry = self.info.get("affine_map") or {}
        if not isinstance(entry, Mapping):
            raise self._fail(f"affine_map of {INFO} is a {type(entry).__name__}")
        version, maps = entry.get("version", AFFINE_VERSION), entry.get("params", {})
        if not isinstance(version, int) or version > AFFINE_VERSION or not isinstance(maps, Mapping):
            raise self._fail(f"affine_map of {INFO} has version {version!r:.80}; version {AFFINE_VERSION} is read")
        return _Patterns(self._texts(list(maps), "affine_map"), self._fail)

    # -- one parameter --------------------------------------------------------------------------------------------

    def place(self, name: str, slices: Sequence[tuple[int, ...]]) -> SlicePlace:
        """Of a parameter of which the tensor-parallel ranks hold ``slices`` (their shapes).

        Raises:
            CheckpointError: they do not tile a whole.
        """
        try:
            place = self._place(name, slices)
            place = self._without_padding(name, place, slices)
        except ValueError as error:
            raise self._fail(f"{name} {[list(shape) for shape in slices]!s:.200}: {error}") from None
        if math.prod(place.shape) > sum(math.prod(shape) for shape in slices):
            raise self._fail(f"{name} is to have more elements than its slices")
        return place

    def _place(self, name: str, slices: Sequence[tuple[int, ...]]) -> SlicePlace:
        matched = {key: patterns.match(name) for key, patterns in self._lists.items()}
        part = next(((shape, text) for patterns, shape in self._parts if (text := patterns.match(name))), None)
        affine = self._affine.match(name)
        full = tuple(math.prod(shape) for shape in slices)
        if affine is not None and self.tensor > 1:
            found = parse_affine_map(self.info["affine_map"]["params"][affine], self.tensor)
            if any(math.prod(held) != numel for held, numel in zip(found.slices, full, strict=True)):
                raise ValueError("its affine map is of slices of other shapes")
            return _affine_place(found, full)
        if matched[_REPLICATED] or matched[_AVERAGED]:
            if any(shape != slices[0] for shape in slices):
                raise ValueError("it is to be the same on all tensor-parallel ranks, which have different shapes of it")
            average = not matched[_REPLICATED] and len(slices) > 1
            nothing = (None,) * len(slices)
            return SlicePlace(slices[0], nothing, full, same=not average, made=_average if average else None)
        if matched[_TWO_PARTS]:
            return self._two_parts(slices, full)
        if part is not None:
            return self._packed(*part, slices, full)
        dim = 1 if matched[_ROWS] else 0
        return SlicePlace(_joined(slices, dim), _one_after_another(slices, dim), full, {"cat_dim": dim})

    def _two_parts(self, slices: Sequence[tuple[int, ...]], full: tuple[int, ...]) -> SlicePlace:
        whole = _joined(slices, 0)
        if any(shape[0] % 2 for shape in slices):
            raise ValueError("it is to be of two matrices, and a slice has an odd number of rows")
        halves = [shape[0] // 2 for shape in slices]
        starts = [sum(halves[:rank]) for rank in range(len(halves))]
        cuts = [
            SavedCut(0, ((start, half), (start + sum(halves), half)))
            for start, half in zip(starts, halves, strict=True)
        ]
        return SlicePlace(whole, _none_if_one(cuts), full, {"cat_dim": 0, "param_n_sub_params": 2})

    def _packed(
        self, part: SubparamShape, text: str, slices: Sequence[tuple[int, ...]], full: tuple[int, ...]
    ) -> SlicePlace:
        """Matrices packed along ``partition_dim`` of a view of the parameter, of each of which ranks have a part."""
        dim, total = part.partition_dim, sum(full)
        sizes = part.shape[dim]
        if not isinstance(sizes, tuple):  # versions before 0.4 may give their number
            length = sum(shape[dim] if dim < len(shape) else 0 for shape in slices)
            if sizes < 1 or length % sizes:
                raise ValueError(f"it is to be of {sizes} equal parts, which its {length} indices of dim {dim} are not")
            sizes = (length // sizes,) * sizes
        widths = self._widths(text, sizes)
        logical = [sum(n) if isinstance(n, tuple) else n for n in part.shape]
        logical[dim] = sum(sizes)
        if -1 in logical:
            known = math.prod(n for n in logical if n != -1)
            if known == 0 or total % known:
                raise ValueError(f"its {total} elements do not have the shape {logical}")
            logical[logical.index(-1)] = total // known
        if math.prod(logical) != total:
            raise ValueError(f"its {total} elements do not have the shape {logical}")
        for rank, numel in enumerate(full):
            held = math.prod(logical[:dim]) * sum(row[rank] for row in widths) * math.prod(logical[dim + 1 :])
            if held != numel:
                raise ValueError(f"rank {rank} holds {numel} elements, and the widths of its parts are {held}")
        ranges = _ranges_of_parts(sizes, widths, self.tensor)
        normal = SubparamShape(list(part.patterns), (*part.shape[:dim], tuple(sizes), *part.shape[dim + 1 :]), dim)
        whole, at, repeats = _as_stored(slices, logical, dim)
        length = sum(sizes)
        spread = [
            tuple((row * length + first, count) for row in range(repeats) for first, count in of_rank)
            for of_rank in ranges
        ]
        cuts = [SavedCut(at, of_rank) if of_rank else None for of_rank in spread]
        return SlicePlace(whole, _none_if_one(cuts), full, {"sub_param_shape": normal})

    def _widths(self, text: str, sizes: Sequence[int]) -> list[list[int]]:
        if self.tensor == 1:
            return [[size] for size in sizes]
        if self.version < _WIDTHS_SINCE:
            uneven = [size for size in sizes if size % self.tensor]
            if uneven:
                raise ValueError(f"its parts of {uneven} indices do not divide by {self.tensor}, and have no widths")
            return [[size // self.tensor] * self.tensor for size in sizes]
        known = self.info.get("sub_param_shard_widths")
        widths = known.get(text) if isinstance(known, Mapping) else None
        if not isinstance(widths, list | tuple) or len(widths) != len(sizes):
            raise ValueError("sub_param_shard_widths does not have the widths of its parts")
        found = [[count_of(n) for n in row] if isinstance(row, list | tuple) else [] for row in widths]
        if any(len(row) != self.tensor or sum(row) != size for row, size in zip(found, sizes, strict=True)):
            raise ValueError("sub_param_shard_widths does not fit its parts and the number of tensor-parallel ranks")
        return found

    def _without_padding(self, name: str, place: SlicePlace, slices: Sequence[tuple[int, ...]]) -> SlicePlace:
        """A vocabulary without the rows that pad it to a multiple."""
        if not self._lists[_VOCABULARY].match(name):
            return place
        rows = count_of(self.info.get("original_vocab_size"))
        keys = {**place.keys, "vocab_tensor": True}
        if not place.shape or rows >= place.shape[0] or place.made is not None:
            return SlicePlace(place.shape, place.cuts, place.kept, keys, place.same, place.made)
        cuts, kept = [], []
        for cut, held in zip(place.cuts, slices, strict=True):
            if cut is None or cut.dim != 0:
                cuts.append(cut)
                kept.append(rows * math.prod(held[1:]))
                continue
            (first, count), *more = cut.ranges
            if more:
                raise ValueError("it is a vocabulary of several parts")
            left = max(0, min(count, rows - first))
            cuts.append(SavedCut(0, ((first, left),)) if left else None)
            kept.append(left * math.prod(held[1:]))
        return SlicePlace((rows, *place.shape[1:]), tuple(cuts), tuple(kept), keys, place.same)

    def unused(self) -> list[str]:
        """Patterns that have matched no parameter."""
        known = [*self._lists.values(), *(patterns for patterns, _ in self._parts)]
        return sorted({text for patterns in known for text in patterns.unused})


def _affine_place(found: AffineMap, full: tuple[int, ...]) -> SlicePlace:
    if found.replicated:
        return SlicePlace(found.shape, (None,) * len(full), full, same=True)
    cuts = found.cuts()
    if cuts is not None and not _overlap(cuts):
        return SlicePlace(found.shape, cuts, tuple(n if cut else 0 for n, cut in zip(full, cuts, strict=True)))
    return SlicePlace(found.shape, (None,) * len(full), full, made=found.rebuild)


def _overlap(cuts: Sequence[SavedCut | None]) -> bool:
    """Whether ranks hold the same indices, as of key and value heads that are fewer than ranks."""
    ranges = sorted(pair for cut in cuts if cut is not None for pair in cut.ranges)
    return any(first + count > start for (first, count), (start, _) in itertools.pairwise(ranges))


def _average(slices: Sequence[Tensor], state: str) -> Tensor:
    total = slices[0].clone()
    for other in slices[1:]:
        total = total + other
    return total / len(slices)


def _size_or_any(value: Any) -> int:
    return -1 if value == -1 and not isinstance(value, bool) else count_of(value)


def _joined(slices: Sequence[tuple[int, ...]], dim: int) -> tuple[int, ...]:
    first = slices[0]
    if len(slices) == 1:
        return first
    if dim >= len(first):
        raise ValueError(f"its slices are to follow one another in dimension {dim}, which they do not have")
    if any(shape[:dim] != first[:dim] or shape[dim + 1 :] != first[dim + 1 :] for shape in slices):
        raise ValueError(f"its slices differ in more than dimension {dim}")
    return (*first[:dim], sum(shape[dim] for shape in slices), *first[dim + 1 :])


def _one_after_another(slices: Sequence[tuple[int, ...]], dim: int) -> tuple[SavedCut | None, ...]:
    if len(slices) == 1:
        return (None,)
    sizes = [shape[dim] for shape in slices]
    starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
    return tuple(SavedCut(dim, ((start, size),)) if size else None for start, size in zip(starts, sizes, strict=True))


def _none_if_one(cuts: Sequence[SavedCut | None]) -> tuple[SavedCut | None, ...]:
    return (None,) if len(cuts) == 1 else tuple(cuts)


def _ranges_of_parts(
    sizes: Sequence[int], widths: Sequence[Sequence[int]], ranks: int
) -> list[tuple[tuple[int, int], ...]]:
    """Of each rank its range of each part; ranks that have nothing of a part have no range of it."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    begin = 0
    for size, row in zip(sizes, widths, strict=True):
        for rank in range(ranks):
            if row[rank]:
                found[rank].append((begin + sum(row[:rank]), row[rank]))
        begin += size
    return [tuple(ranges) for ranges in found]


def _as_stored(slices: Sequence[tuple[int, ...]], logical: Sequence[int], dim: int) -> tuple[tuple[int, ...], int, int]:
    """Shape of the whole as the model has it, the dimension of it that is cut, and how often the parts come in that.

    Parts may be described of a view, such as [experts, 2 x inner, width] of a matrix [experts x 2 x inner, width].
    """
    first = slices[0]
    if len(slices) == 1:
        return first, 0, 1
    before, after = math.prod(logical[:dim]), math.prod(logical[dim + 1 :])
    for at in range(len(first)):
        outer, inner = math.prod(first[:at]), math.prod(first[at + 1 :])
        if inner == after and outer and before % outer == 0:
            repeats = before // outer
            return (*first[:at], repeats * logical[dim], *first[at + 1 :]), at, repeats
    raise ValueError(f"its slices are no parts of the shape {list(logical)}")


class _Patterns:
    """Regular expressions for names; those that are one name are looked up and not tried."""

    def __init__(self, texts: Sequence[str], fail: Callable[[str], CheckpointError]) -> None:
        self.unused = set(texts)
        self._names: dict[str, str] = {}
        self._others: list[tuple[str, re.Pattern[str]]] = []
        self._fail = fail
        for text in texts:
            name = _only_name(text)
            if name is not None:
                self._names[name] = text
                continue
            try:
                self._others.append((text, re.compile(text)))
            except (re.error, RecursionError, OverflowError) as error:
                raise fail(f"{INFO}: {text!r:.200} is not a pattern: {error}") from None

    def match(self, name: str) -> str | None:
        """The pattern that matches; two are a fault, as in DeepSpeed."""
        found = [self._names[name]] if name in self._names else []
        for text, pattern in self._others:
            if may_take_long(text, (name,)):
                raise self._fail(f"{INFO}: matching {text!r:.200} may take very long: write a simpler pattern")
            if pattern.match(name) is not None:
                found.append(text)
        if len(found) > 1:
            raise self._fail(f"{INFO}: more than one pattern of a list matches {name}: {found!s:.300}")
        self.unused.difference_update(found)
        return found[0] if found else None


def _only_name(text: str) -> str | None:
    if not re.fullmatch(r"\^(?:\w|\\[.\-])*\$", text):
        return None
    return text[1:-1].replace("\\", "")
