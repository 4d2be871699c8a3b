"""Pickled files of a stranger: no code runs, and no figure in them takes memory that the file does not have."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_hf.engine.checkpoint.pickled import FrugalUnpickler, check_pickled, read_pickled
from ds_hf.errors import CheckpointError
from tests.engine.checkpoint.hostile import archive


class _Evil:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


def _saved(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def _pickle_of(path: Path, content: bytes) -> Path:
    """A file of ``torch.save`` with a pickle of our own."""
    plain = _saved(path, {"a": torch.zeros(3)}).read_bytes()
    path.write_bytes(archive(plain, lambda _: content))
    return path


def _stored(numel: int, kind: str = "FloatStorage") -> bytes:
    """A pickle of ``{"a": tensor}`` whose storage says ``numel``."""
    storage = b"(" + _text("storage") + f"ctorch\n{kind}\n".encode() + _text("0") + _text("cpu") + _long(numel) + b"tQ"
    numbers = b"K\x00K\x03\x85K\x01\x85\x89ccollections\nOrderedDict\n)R"
    return b"\x80\x02}" + _text("a") + b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + numbers + b"tRs."


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<L", len(text)) + text.encode()


def _long(number: int) -> bytes:
    content = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(content)]) + content


def test_pickle_by_hand_is_read(tmp_path: Path) -> None:
    """The forged pickles below are refused for what they claim and not for how they are written."""
    assert read_pickled(_pickle_of(tmp_path / "x.pt", _stored(3)))["a"].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("numel", [2, 4, 2**28, 2**62, 2**64, -1])
def test_storage_that_claims_more_than_it_has(tmp_path: Path, numel: int) -> None:
    with pytest.raises(CheckpointError, match=r"x\.pt cannot be read: its storage '0' claims"):
        read_pickled(_pickle_of(tmp_path / "x.pt", _stored(numel)))


@pytest.mark.parametrize(
    "call",
    [
        b"c__builtin__\nbytearray\n(I1000000000000\ntR.",
        b"ctorch\nFloatStorage\n(I1000000000000\ntR.",
        b"ctorch.storage\nUntypedStorage\n(I1000000000000\ntR.",
        b"ctorch\nFloatTensor\n(I1000000000000\ntR.",
        b"ctorch\nTensor\n(I1000000\nI1000000\ntR.",
        b"\x80\x05\x96" + struct.pack("<Q", 10**12) + b"x.",
        b"c_codecs\nencode\n(S'x'\nS'zlib_codec'\ntR.",
    ],
)
def test_calls_for_memory(tmp_path: Path, call: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"x\.pt cannot be read"):
        check_pickled(_pickle_of(tmp_path / "x.pt", call))


def test_the_frugal_unpickler() -> None:
    """The one in C would take 34 GB for the first, and makes 1 TB of zeros before it finds the second too short."""
    assert FrugalUnpickler(io.BytesIO(b"\x80\x02Nr\xff\xff\xff\x7f.")).load() is None
    with pytest.raises(KeyError):
        FrugalUnpickler(io.BytesIO(b"\x80\x05\x96" + struct.pack("<Q", 10**12) + b"x.")).load()


def test_expanded_tensors(tmp_path: Path) -> None:
    small, large = torch.zeros(1).expand(10**6), torch.zeros(1).expand(10**9)
    assert read_pickled(_saved(tmp_path / "x.pt", {"a": small}))["a"].shape == (10**6,)
    with pytest.raises(CheckpointError, match="far larger than the file"):
        read_pickled(_saved(tmp_path / "y.pt", {"a": large}))


@pytest.mark.parametrize("target", ["os.system", "builtins.eval", "pathlib.Path.touch"])
def test_no_code_runs(tmp_path: Path, target: str) -> None:
    path, mark = tmp_path / "x.pt", tmp_path / "ran"
    call: tuple[Any, ...] = {
        "os.system": (os.system, f"touch {mark}"),
        "builtins.eval": (eval, f"open({str(mark)!r}, 'w')"),
        "pathlib.Path.touch": (Path.touch, mark),
    }[target]
    with pytest.raises(CheckpointError, match=r"x\.pt cannot be read"):
        read_pickled(_saved(path, {"a": _Evil(*call)}))
    assert not mark.exists()


def test_compressed_records(tmp_path: Path) -> None:
    path = _saved(tmp_path / "x.pt", {"a": torch.zeros(10**6)})
    path.write_bytes(archive(path.read_bytes(), bytes, compression=zipfile.ZIP_DEFLATED))
    with pytest.raises(CheckpointError, match="compressed or encrypted"):
        read_pickled(path)


@pytest.mark.parametrize("legacy", [True, False])
def test_other_formats(tmp_path: Path, legacy: bool) -> None:
    path = tmp_path / "x.pt"
    if legacy:
        torch.save({"a": torch.zeros(3)}, path, _use_new_zipfile_serialization=False)
    else:
        path.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match=r"x\.pt cannot be read: it (does not end like|is too short for)"):
        read_pickled(path)


def test_files_without_right_sums_of_their_records(tmp_path: Path) -> None:
    """An option of torch leaves them out: such a file is not damaged."""
    torch.serialization.set_crc32_options(False)
    try:
        path = _saved(tmp_path / "x.pt", {"a": torch.arange(3)})
    finally:
        torch.serialization.set_crc32_options(True)
    assert read_pickled(path)["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("sums", [True, False])
def test_every_flipped_bit_of_a_record_is_found(tmp_path: Path, sums: bool) -> None:
    path = _saved(tmp_path / "x.pt", {"a": torch.arange(30)})
    content = path.read_bytes()
    start = content.index(torch.arange(30).numpy().tobytes())
    for place in range(start, start + 240, 7):
        path.write_bytes(content[:place] + bytes([content[place] ^ 16]) + content[place + 1 :])
        if sums:
            with pytest.raises(CheckpointError, match="data/0' is damaged"):
                check_pickled(path)
        else:
            check_pickled(path, sums=False)


def test_appended_directory(tmp_path: Path) -> None:
    """Two directories in one file: Python and torch could take different ones."""
    path = _saved(tmp_path / "x.pt", {"a": torch.zeros(3)})
    other = io.BytesIO()
    torch.save({"a": _Evil(print, "x")}, other)
    path.write_bytes(other.getvalue() + path.read_bytes())
    with pytest.raises(CheckpointError, match="directory is not where it says"):
        read_pickled(path)


def test_everything_that_a_checkpoint_may_hold_passes(tmp_path: Path) -> None:
    sparse = torch.eye(3).to_sparse()
    content = {
        "numbers": [1, 2.5, True, None, 1j, 2**70, float("inf")],
        "text": ("x", b"bytes", bytearray(b"more")),
        "sets": {1, (2, "x")},
        "tensors": [torch.zeros(0), torch.arange(5), torch.ones(2, 3, dtype=torch.bfloat16), torch.tensor(True)],
        "float8": torch.zeros(3).to(torch.float8_e4m3fn),
        "view": torch.arange(10)[2:5],
        "transposed": torch.ones(4, 2).t(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "sparse": sparse,
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "meta": torch.empty(10**9, device="meta"),
        "dtype": torch.float16,
        "size": torch.Size([2, 3]),
        "device": torch.device("cpu"),
        "state dict": torch.nn.Linear(2, 2).state_dict(),
    }
    found = read_pickled(_saved(tmp_path / "x.pt", content))
    assert found.keys() == content.keys()
    assert found["text"] == content["text"]
    assert found["numbers"] == content["numbers"]
    assert torch.equal(found["sparse"].to_dense(), sparse.to_dense())
    assert found["meta"].shape == (10**9,)
