"""Indexed files: what is written is read, and what is damaged is named."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import MMapIndexedDataset, MMapIndexedDatasetBuilder
from deepspeed.runtime.data_pipeline.data_sampling.utils import close_mmap_dataset_builder, create_mmap_dataset_builder

from ds_hf.data.index_files import find_fit_int_dtype, read_numbers
from ds_hf.errors import DsHfError


def write(path: Path, dtype: object = np.int32) -> MMapIndexedDataset:
    builder = MMapIndexedDatasetBuilder(f"{path}.bin", dtype)
    builder.add_item(torch.tensor([1, 2, 3]))
    builder.end_document()
    builder.add_items([np.array([], dtype=np.int64), np.array([9])])
    builder.end_document()
    builder.finalize(f"{path}.idx")
    return MMapIndexedDataset(str(path))


def test_items_documents_and_slices(tmp_path: Path) -> None:
    found = write(tmp_path / "one")
    assert [item.tolist() for item in found[0:3]] == [[1, 2, 3], [], [9]]
    assert found[0].dtype == np.int32
    assert found.get(0, offset=1, length=1).tolist() == [2]
    assert (found.doc_idx.tolist(), found.sizes.tolist(), len(found), found.size(2)) == ([0, 1, 3], [3, 0, 1], 3, 1)
    assert MMapIndexedDataset.exists(tmp_path / "one")
    assert not MMapIndexedDataset.exists(tmp_path / "two")
    assert pickle.loads(pickle.dumps(found))[2].tolist() == [9]
    with pytest.raises(ValueError, match="leave the step out"):
        found[0:3:2]


def test_bytes_are_those_of_the_format(tmp_path: Path) -> None:
    write(tmp_path / "one")
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 3, 3)
    sizes, offsets = struct.pack("<3i", 3, 0, 1), struct.pack("<3q", 0, 12, 12)
    assert (tmp_path / "one.idx").read_bytes() == head + sizes + offsets + struct.pack("<3q", 0, 1, 3)
    assert (tmp_path / "one.bin").read_bytes() == struct.pack("<4i", 1, 2, 3, 9)


def test_files_are_merged(tmp_path: Path) -> None:
    write(tmp_path / "one", torch.int64)
    builder = create_mmap_dataset_builder(str(tmp_path / "all"), np.int64)
    builder.add_item_numpy(np.array([7, 7], dtype=np.int16))
    builder.merge_file_(tmp_path / "one")
    close_mmap_dataset_builder(builder, str(tmp_path / "all"))
    found = MMapIndexedDataset(tmp_path / "all")
    assert [item.tolist() for item in found[0:4]] == [[7, 7], [1, 2, 3], [], [9]]
    assert found.doc_idx.tolist() == [0, 2, 4, 4]
    other = MMapIndexedDatasetBuilder(tmp_path / "other.bin", np.uint8)
    with pytest.raises(DsHfError, match="has items of int64, and this file of uint8"):
        other.merge_file_(tmp_path / "one")


def test_the_smallest_dtype() -> None:
    pairs = [(0, 255), (0, 256), (0, 2**32 - 1), (0, 2**32), (-1, 127), (-129, 0), (-1, 2**31)]
    wanted = [np.uint8, np.uint16, np.uint32, np.uint64, np.int8, np.int16, np.int64]
    assert [find_fit_int_dtype(*pair) for pair in pairs] == wanted


def test_numbers_of_samples(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.array([3.5, 1.0]))
    assert read_numbers(tmp_path / "lengths.npy").tolist() == [3.5, 1.0]
    np.save(tmp_path / "square.npy", np.ones((2, 2)))
    with pytest.raises(DsHfError, match="one number for each sample is needed"):
        read_numbers(tmp_path / "square.npy")
    write(tmp_path / "one")
    with pytest.raises(DsHfError, match="has items of 3 numbers"):
        read_numbers(tmp_path / "one")


def test_what_is_damaged_is_named(tmp_path: Path) -> None:
    write(tmp_path / "one")
    index, numbers = tmp_path / "one.idx", tmp_path / "one.bin"
    whole = index.read_bytes()
    numbers.write_bytes(numbers.read_bytes()[:8])
    with pytest.raises(DsHfError, match=r"one.bin has 8 of the 16 bytes"):
        MMapIndexedDataset(tmp_path / "one")
    index.write_bytes(whole[:-8])
    with pytest.raises(DsHfError, match=r"one.idx ends after"):
        MMapIndexedDataset(tmp_path / "one")
    index.write_bytes(b"TNTIDX")
    with pytest.raises(DsHfError, match="is not an index of this kind"):
        MMapIndexedDataset(tmp_path / "one")
    with pytest.raises(DsHfError, match=r"two.idx cannot be read: No such file"):
        MMapIndexedDataset(tmp_path / "two")
    with pytest.raises(DsHfError, match="take whole numbers"):
        MMapIndexedDatasetBuilder(tmp_path / "three.bin", np.float32)


def test_an_index_of_other_numbers_is_named(tmp_path: Path) -> None:
    write(tmp_path / "one")
    write(tmp_path / "wide", np.int64)
    (tmp_path / "wide.idx").write_bytes((tmp_path / "one.idx").read_bytes())  # half of the bytes would be read
    with pytest.raises(DsHfError, match=r"wide.bin has 32 bytes, and not the 16 that its index names"):
        MMapIndexedDataset(tmp_path / "wide")
    whole = (tmp_path / "one.idx").read_bytes()
    (tmp_path / "one.idx").write_bytes(whole[:34] + struct.pack("<i", -3) + whole[38:])
    with pytest.raises(DsHfError, match=r"one.idx is damaged: it has an item of -3 numbers"):
        MMapIndexedDataset(tmp_path / "one")
    (tmp_path / "empty.npy").touch()
    with pytest.raises(DsHfError, match=r"empty.npy cannot be read"):
        read_numbers(tmp_path / "empty.npy")
    with open(tmp_path / "several.npy", "wb") as file:
        np.savez(file, lengths=np.ones(3))
    with pytest.raises(DsHfError, match="has several arrays"):
        read_numbers(tmp_path / "several.npy")
