"""The tensors of a checkpoint: what is asked for is read, from whatever files and slices it lies in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ds_hf.checkpoint.boxes import boxes
from ds_hf.checkpoint.format import SavedBuffer, SavedCut, SavedFragment, SavedParameter
from ds_hf.dtypes import torch_dtype
from ds_hf.errors import CheckpointError
from ds_hf.regular_files import open_regular

__all__ = ["StoredTensor", "TensorFiles", "in_form_of"]

_READ_AT_ONCE = 2**24  # elements of a fragment that is cut otherwise than what is wanted


def in_form_of(target: Tensor, values: Tensor) -> Tensor:
    """``values`` in the dtype and shape of ``target``. Where parameters were sharded, older versions saved integers,
    fp8 and complex values as uint8 (wider ones in one row): such bytes are reinterpreted, not converted."""
    if values.dtype is torch.uint8 and values.shape == (target.nbytes,) != target.shape:
        return values.view(target.dtype).view(target.shape)
    narrow = {target.dtype, values.dtype} - {torch.uint8}
    bytewise = target.dtype != values.dtype and len(narrow) == 1 and all(d.is_floating_point for d in narrow)
    return values.view(target.dtype) if bytewise and max(map(Tensor.element_size, (target, values))) == 1 else values


class TensorFiles:
    """The safetensors files of one folder, opened as they are needed; only what is asked for is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._handles: dict[str, Any] = {}
        self._pieces: dict[tuple[str, str], StoredTensor] = {}

    def piece(self, file: str, key: str) -> StoredTensor:
        """One tensor of one file, not read yet."""
        found = self._pieces.get((file, key))
        if found is None:
            path = self.folder / file
            try:
                if file not in self._handles:
                    open_regular(path).close()  # says what is wrong; safetensors says that there is no such file
                    self._handles[file] = safe_open(path, framework="pt")
                found = self._pieces[file, key] = StoredTensor(path, key, self._handles[file].get_slice(key))
            except (OSError, SafetensorError, ValueError, MemoryError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from None
        return found

    def fill(
        self, target: Tensor, parameter: SavedParameter, state: str, start: int = 0, cut: SavedCut | None = None
    ) -> None:
        """Read elements ``start`` to ``start + target.numel()`` of a state into the flat ``target``, in its dtype.

        Args:
            cut: the slice of the parameter whose elements are counted, however those in the files are cut.
        """
        end = start + target.numel()
        if parameter.order:
            target.copy_(self._in_order(parameter, state, cut, target.dtype).reshape(-1)[start:end])
            return
        for fragment in parameter.fragments:
            if fragment.cut != cut:
                self._fill_from_slice(target, parameter, state, fragment, start, cut)
                continue
            low, high = max(start, fragment.start), min(end, fragment.start + fragment.numel)
            if low < high:
                shift = fragment.offset - fragment.start
                values = self.piece(fragment.file, parameter.states[state]).read(low + shift, high + shift)
                target[low - start : high - start].copy_(in_form_of(target, values))

    def _in_order(self, parameter: SavedParameter, state: str, cut: SavedCut | None, dtype: torch.dtype) -> Tensor:
        """The whole of a state, or a slice, with its dims in the order of the model."""

        def permuted(cut: SavedCut | None) -> SavedCut | None:
            return None if cut is None else replace(cut, dim=order.index(cut.dim))

        order = parameter.order
        shape = tuple(parameter.shape[dim] for dim in order)
        fragments = tuple(replace(each, cut=permuted(each.cut)) for each in parameter.fragments)
        lying = replace(parameter, shape=shape, fragments=fragments, order=())
        wanted = permuted(cut)
        value = torch.empty(shape if wanted is None else wanted.shape(shape), dtype=dtype)
        self.fill(value.view(-1), lying, state, 0, wanted)
        return value.permute([order.index(dim) for dim in range(len(order))])

    def _fill_from_slice(
        self,
        target: Tensor,
        parameter: SavedParameter,
        state: str,
        fragment: SavedFragment,
        start: int,
        cut: SavedCut | None,
    ) -> None:
        """Copy what a fragment and ``target`` both have of the whole, box by box."""
        shape, dims = parameter.shape, [each.dim for each in (cut, fragment.cut) if each is not None]
        wanted = list(boxes(shape, cut, start, start + target.numel(), *dims))
        shift, end = fragment.offset - fragment.start, fragment.start + fragment.numel
        for low in range(fragment.start, end, _READ_AT_ONCE):
            held = boxes(shape, fragment.cut, low, min(low + _READ_AT_ONCE, end), *dims)
            pairs = [(box, into, part) for box in held for into in wanted if (part := box.part(into)) is not None]
            if not pairs:
                continue
            first = min(box.place(part) for box, _, part in pairs)
            last = max(box.place([(high - 1, high) for _, high in part]) for box, _, part in pairs)
            values = self.piece(fragment.file, parameter.states[state]).read(first + shift, last + 1 + shift)
            for box, into, part in pairs:
                into.view(target, start, part).copy_(box.view(in_form_of(target, values), first, part))

    def value(self, parameter: SavedParameter, dtype: torch.dtype | None = None, cut: SavedCut | None = None) -> Tensor:
        """The whole parameter, or a slice, in its shape; floating-point values in ``dtype`` if given."""
        key = parameter.states[parameter.value_state]
        stored = torch_dtype(parameter.dtype) or dtype or torch.float32  # of what has no elements, and is in no file
        if parameter.fragments:
            stored = self.piece(parameter.fragments[0].file, key).dtype
        if dtype is not None and stored.is_floating_point:
            stored = dtype
        shape = parameter.shape if cut is None else cut.shape(parameter.shape)
        value = torch.empty(shape, dtype=stored)
        self.fill(value.view(-1), parameter, parameter.value_state, 0, cut)
        return value

    def holds_bytes(self, parameter: SavedParameter) -> bool:
        """Whether it lies in a flat buffer of bytes, as older versions saved integers, fp8 and complex values."""
        key = parameter.states[parameter.value_state]
        found = key.startswith("flat.") and parameter.fragments
        return bool(found) and self.piece(parameter.fragments[0].file, key).dtype is torch.uint8

    def buffer(self, buffer: SavedBuffer) -> Tensor:
        """A buffer of the module."""
        return self.piece(buffer.file, buffer.key).whole()


class StoredTensor:
    """One tensor in one file."""

    def __init__(self, path: Path, key: str, view: Any) -> None:
        self.path, self.key, self._view = path, key, view
        self.shape = tuple(view.get_shape())

    @property
    def dtype(self) -> torch.dtype:
        """Dtype on disk."""
        return self.read(0, 0).dtype

    def check_length(self, stop: int) -> None:
        """Raise ``CheckpointError`` if there are no ``stop`` flat elements."""
        if len(self.shape) != 1 or stop > self.shape[0]:
            raise CheckpointError(
                f"{self.path}: tensor {self.key} has shape {self.shape}, the manifest expects {stop} flat elements"
            )

    def read(self, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` of a flat tensor."""
        self.check_length(stop)
        return self._guard(lambda: self._view[start:stop])

    def whole(self) -> Tensor:
        """All of it."""
        return self._guard(lambda: self._view[:] if self.shape else self._view[...])

    def _guard(self, read: Any) -> Tensor:
        try:
            return read()  # type: ignore[no-any-return]
        except (OSError, SafetensorError, ValueError, RuntimeError, MemoryError) as error:
            raise CheckpointError(f"{self.path}: tensor {self.key} cannot be read: {error}") from None
