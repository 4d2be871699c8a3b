"""Sums over bytes that find damage and can be added: the checksum of a file, and the digest of a tensor cut anywhere.

Bytes are little-endian words ``w[0], w[1], ...`` of 64 bits, zeros added at the end; ``m = w ^ (w >> 32)``, so that the
same flip in two words never cancels in the high half alone. The sum is ``(Σ m[i], Σ (i + 1) m[i])`` modulo 2**64: the
first finds every change within one word, the second words that changed places. A part that starts at word ``start``
has the sum of its place, so the parts of a tensor add up to the sum of the whole, however it is cut.

Measured on one core at 5 GB/s, where zlib.crc32 does 2.0, sha256 1.6 and blake2b 0.6; the disk wrote 1.0.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_hf.checkpoint.boxes import boxes
from ds_hf.checkpoint.format import SavedCut
from ds_hf.host import rank_cores
from ds_hf.regular_files import open_regular

__all__ = ["Checksum", "add", "checksum_of_file", "hexadecimal", "sum_of_bytes", "sum_of_slice", "sum_of_tensor"]

Sum = tuple[int, int]

WORD = 8  # bytes
_ROW = 2**15  # words that are summed at a time: they fit into the second-level cache
_DEVICE_ROW = 2**23  # the same on an accelerator, where few large steps are best
_MASK = 2**64 - 1
_READ = 2**20  # bytes read at a time: what is summed is still in the cache
_PART = 2**25  # bytes of a file that one thread reads
_THREADS = 16


def add(left: Sum, right: Sum) -> Sum:
    """The sum of both parts."""
    return (left[0] + right[0]) & _MASK, (left[1] + right[1]) & _MASK


def hexadecimal(value: Sum) -> str:
    """32 digits."""
    return f"{value[0] & _MASK:016x}{value[1] & _MASK:016x}"


def sum_of_bytes(data: Any, start: int = 0) -> Sum:
    """The sum of a buffer whose first word is word ``start`` of the whole."""
    octets = np.frombuffer(data, dtype=np.uint8)
    whole = octets.size // WORD * WORD
    first, second = _sum_of_words(octets[:whole].view("<u8"), start)
    if whole < octets.size:
        tail = int.from_bytes(octets[whole:].tobytes(), "little")
        tail ^= tail >> 32
        first, second = add((first, second), (tail, (start + whole // WORD + 1) * tail))
    return first, second


def _sum_of_words(words: Any, start: int) -> Sum:
    """Row by row: the sum of each row gives the coarse position, the sum of each column the fine one."""
    if words.size <= _ROW:
        mixed = words ^ (words >> 32)
        first = int(mixed.sum())
        return first, (int((mixed * np.arange(1, words.size + 1, dtype=np.uint64)).sum()) + start * first) & _MASK
    rows = -(-words.size // _ROW)
    columns, mixed = np.zeros(_ROW, np.uint64), np.empty(_ROW, np.uint64)
    totals = np.empty(rows, np.uint64)
    for index in range(rows):
        row = words[index * _ROW : (index + 1) * _ROW]
        part = mixed[: row.size]
        np.right_shift(row, 32, out=part)
        np.bitwise_xor(part, row, out=part)
        np.add(columns[: row.size], part, out=columns[: row.size])
        totals[index] = part.sum()
    first = int(totals.sum())
    coarse = int((totals * np.arange(rows, dtype=np.uint64)).sum())
    fine = int((columns * np.arange(1, _ROW + 1, dtype=np.uint64)).sum())
    return first, (coarse * _ROW + fine + start * first) & _MASK


def sum_of_tensor(tensor: Tensor, start: int = 0) -> Sum:
    """The sum of a contiguous tensor's bytes, on its device; ``start`` is the place of its first byte in the whole.

    Bytes and place must be whole words, but for the end of the last part.
    """
    assert start % WORD == 0
    octets = tensor.detach().reshape(-1).view(torch.uint8)
    if octets.device.type == "cpu":
        return sum_of_bytes(octets.numpy(), start // WORD)
    if octets.numel() % WORD or octets.storage_offset() % WORD:  # the latter: a slice of a caller's bytes
        octets = torch.cat([octets, octets.new_zeros(-octets.numel() % WORD)])
    return _sum_on_device(octets.view(torch.int64), start // WORD)


def _sum_on_device(words: Tensor, start: int) -> Sum:
    """As ``_sum_of_words``; signed integers wrap around in the same way."""
    sums = words.new_zeros(2)
    for low in range(0, words.numel(), _DEVICE_ROW):
        row = words[low : low + _DEVICE_ROW]
        mixed = row ^ ((row >> 32) & 0xFFFFFFFF)
        sums[0] += mixed.sum()
        sums[1] += (mixed * torch.arange(start + low + 1, start + low + 1 + row.numel(), device=row.device)).sum()
    first, second = sums.tolist()
    return first & _MASK, second & _MASK


def sum_of_slice(tensor: Tensor, shape: Sequence[int], cut: SavedCut | None, start: int = 0) -> Sum | None:
    """The sum that elements of a slice have in the whole parameter, on the tensor's device.

    Args:
        tensor: elements ``start`` to ``start + numel`` of the flattened slice, contiguous.
        shape: of the whole.

    Returns:
        ``None`` where the slice is not made of whole words, as three columns of a 16-bit matrix.
    """
    flat, size = tensor.detach().reshape(-1), tensor.element_size()
    if cut is None:
        return sum_of_tensor(flat, start * size)
    inner = math.prod(shape[cut.dim + 1 :])
    row = shape[cut.dim] * inner
    total: Sum = (0, 0)
    for box in boxes(shape, cut, start, start + flat.numel()):  # rows of runs that are contiguous in the whole as well
        (first, last), (low, high), (left, right) = box.ranges
        run, offset = (high - low) * (right - left), box.offset - start
        place = first * row + low * inner + left
        places = (place, run, offset, *((row, box.strides[0]) if last - first > 1 else ()))
        if any(number * size % WORD for number in places):
            return None
        rows = flat.as_strided((last - first, run), (box.strides[0], 1), flat.storage_offset() + offset)
        total = add(total, _sum_of_rows(rows, place * size, row * size))
    return total


def _sum_of_rows(rows: Tensor, start: int, step: int) -> Sum:
    """The sum of ``[rows, run]``, the first of which is byte ``start`` of the whole and each other ``step`` further."""
    count, nbytes = rows.shape[0], rows.shape[1] * rows.element_size()
    if count == 1 or nbytes >= _ROW * WORD:
        parts = (sum_of_tensor(row, start + index * step) for index, row in enumerate(rows))
        return functools.reduce(add, parts)
    if rows.storage_offset() * rows.element_size() % WORD:
        rows = rows.contiguous()
    words = rows.view(torch.int64)
    sums, places = words.new_zeros(2), torch.arange(1, words.shape[1] + 1, device=words.device)
    block = (_ROW if words.device.type == "cpu" else _DEVICE_ROW) // words.shape[1]
    for low in range(0, count, block):
        part = words[low : low + block]
        mixed = part ^ ((part >> 32) & 0xFFFFFFFF)
        totals = mixed.sum(1)
        starts = torch.arange(low, low + part.shape[0], device=words.device) * (step // WORD) + start // WORD
        sums[0] += totals.sum()
        sums[1] += (mixed.sum(0) * places).sum() + (totals * starts).sum()
    first, second = sums.tolist()
    return first & _MASK, second & _MASK


class Checksum:
    """The sum of a stream of bytes, whatever the sizes of its parts."""

    def __init__(self) -> None:
        self._sum: Sum = (0, 0)
        self._rest = b""
        self._words = 0

    def update(self, data: Any) -> None:
        """The next bytes, a buffer of single bytes."""
        view = memoryview(data)
        if self._rest:
            missing = min(WORD - len(self._rest), len(view))
            self._rest += bytes(view[:missing])
            view = view[missing:]
            if len(self._rest) < WORD:
                return
            self._take(self._rest)
        whole = len(view) // WORD * WORD
        self._take(view[:whole])
        self._rest = bytes(view[whole:])

    def _take(self, words: Any) -> None:
        self._sum = add(self._sum, sum_of_bytes(words, self._words))
        self._words += len(words) // WORD

    def text(self) -> str:
        """The checksum so far, as the manifest has it."""
        return hexadecimal(add(self._sum, sum_of_bytes(self._rest, self._words)))


def checksum_of_file(path: Path) -> str:
    """The checksum of a whole file, read once by as many threads as this rank has cores.

    Raises:
        OSError: it cannot be read, or ended early.
    """
    with open_regular(path) as file:
        descriptor = file.fileno()
        nbytes = os.fstat(descriptor).st_size
        threads = min(_THREADS, len(rank_cores()), -(-nbytes // _PART) or 1)
        with ThreadPoolExecutor(threads) as pool:
            ends = range(0, nbytes, _PART)
            parts = pool.map(lambda start: _sum_of_part(descriptor, start, min(start + _PART, nbytes)), ends)
            total = functools.reduce(add, parts, (0, 0))
    return hexadecimal(total)


def _sum_of_part(descriptor: int, start: int, end: int) -> Sum:
    """Bytes ``start`` to ``end`` of a file; ``start`` is a multiple of the word."""
    total, buffer = (0, 0), bytearray(min(_READ, end - start))
    while start < end:
        view = memoryview(buffer)[: min(_READ, end - start)]
        filled = 0
        while filled < len(view) and (count := os.preadv(descriptor, [view[filled:]], start + filled)):
            filled += count
        if filled < len(view):
            raise OSError(f"the file ended at byte {start + filled}")
        total = add(total, sum_of_bytes(view, start // WORD))
        start += filled
    return total
