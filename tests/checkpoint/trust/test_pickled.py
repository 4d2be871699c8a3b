"""Pickled files of a stranger: no code runs, and no figure in them takes memory that the file does not have."""

from __future__ import annotations

import io
import os
import pickle
import resource
import struct
import subprocess
import sys
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds_hf.checkpoint.digest import digest_of
from ds_hf.checkpoint.trust.pickled import FrugalUnpickler, check_pickled, read_pickled
from ds_hf.errors import CheckpointError
from tests.checkpoint.hostile import archive, limit_memory


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
    return b"\x80\x02}" + _text("a") + _tensor(numel, kind) + b"s."


def _tensor(numel: int, kind: str = "FloatStorage") -> bytes:
    numbers = b"K\x00K\x03\x85K\x01\x85\x89ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + _storage(numel, kind) + numbers + b"tR"


def _storage(numel: int, kind: str = "FloatStorage") -> bytes:
    return b"(" + _text("storage") + f"ctorch\n{kind}\n".encode() + _text("0") + _text("cpu") + _long(numel) + b"tQ"


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<L", len(text)) + text.encode()


def _long(number: int) -> bytes:
    content = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(content)]) + content


_OPCODES = [
    b"(", b"t", b")", b"\x85", b"\x86", b"\x87", b"]", b"}", b"a", b"e", b"s", b"u", b"N", b"K\x01", b"q\x00", b"q\x01",
    b"h\x00", b"h\x01", b"h\x00h\x00\x86q\x00", b"h\x00h\x00\x86q\x00" * 8, b"](h\x00h\x00eq\x00" * 40, b"R", b"\x81",
    b"b", b"Q", _text("a"), _text("latin1"), _long(2**31), _long(2**62), b"c__builtin__\nbytearray\n",
    b"c__builtin__\nset\n", b"ccollections\nOrderedDict\n", b"ccollections\nCounter\n", b"ctorch\nSize\n",
    b"c_codecs\nencode\n", b"ctorch\nFloatStorage\n", b"ctorch\nTensor\n", b"ctorch._utils\n_rebuild_parameter\n",
    b"c__builtin__\nbytearray\n" + _long(2**31) + b"\x85R", _tensor(3), b"h\x00c__builtin__\nset\nh\x00\x85R",
    b"ctorch._utils\n_rebuild_tensor_v2\n(" + _storage(3) + b"K\x00" + _long(2**40) + b"\x85K\x00\x85\x89NtR",
]  # fmt: skip


def _keep_shop() -> None:
    """Check, load and go through each file whose path is given."""
    resource.setrlimit(resource.RLIMIT_CPU, (300, 300))
    limit_memory(300 * 2**20)
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        path = Path(line.strip())
        begun = time.process_time()
        try:
            check_pickled(path)
        except CheckpointError:
            said = "refused"
        else:
            said = "loaded"
            try:
                digest_of(torch.load(path, weights_only=True))
            except MemoryError:
                said = "took all memory"
            except Exception:  # not of a kind that torch or a digest knows
                pass
        if time.process_time() - begun > 5:
            said = "took all time"
        print(said, flush=True)


@pytest.fixture(scope="module")
def shop() -> Iterator[Any]:
    command = [sys.executable, "-c", "from tests.checkpoint.trust.test_pickled import _keep_shop; _keep_shop()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30)


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


def _nested(levels: int, kind: Callable[[Any], Any]) -> Any:
    """Each level holds the one below twice: ``2**levels`` elements of a few bytes each."""
    value: Any = kind([1, 2])
    for _ in range(levels):
        value = kind([value, value])
    return value


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (list, "objects when its references are followed"),
        (tuple, "objects when its references are followed"),
        (lambda pair: {"a": pair[0], "b": pair[1]}, "objects when its references are followed"),
        (lambda pair: [[]] * 1000, None),
        (lambda pair: ["x" * 1000, pair[0]], None),
    ],
)
def test_nested_references(tmp_path: Path, kind: Callable[[Any], Any], message: str | None) -> None:
    path = _saved(tmp_path / "x.pt", {"lr_scheduler": _nested(60, kind)})
    assert path.stat().st_size < 8000
    if message is None:
        check_pickled(path)
        return
    with pytest.raises(CheckpointError, match=rf"x\.pt cannot be read: it holds more than \d+ {message}"):
        check_pickled(path)


def test_references_that_are_shared_as_programs_do(tmp_path: Path) -> None:
    config = {"a": [1, 2, 3], "b": "text"}
    content = {"history": [{"step": step, "config": config} for step in range(2000)], "tied": [torch.zeros(9)] * 3}
    assert read_pickled(_saved(tmp_path / "x.pt", content))["history"][-1]["config"] == config


def test_sizes_that_programs_have(tmp_path: Path) -> None:
    """Schedules with a list for each group, histories, names of many parameters, text of some megabytes."""
    content = {
        "lr_scheduler": {"base_lrs": [1e-3] * 1000, "_last_lr": [0.1] * 1000, "lr_lambdas": [None] * 1000},
        "log_history": [{"step": step, "loss": step / 7, "learning_rate": 1e-4} for step in range(5000)],
        "param_shapes": {f"model.layers.{n}.mlp.weight": torch.Size([n, 4]) for n in range(5000)},
        "text": "x" * 10**7,
        "expanded": torch.zeros(3, 1).expand(3, 10**6),
    }
    found = read_pickled(_saved(tmp_path / "x.pt", content))
    assert found["lr_scheduler"] == content["lr_scheduler"]
    assert found["param_shapes"] == content["param_shapes"]
    assert found["expanded"].stride() == (1, 0)  # as torch.save keeps it


def test_much_text_of_little(tmp_path: Path) -> None:
    path = _saved(tmp_path / "x.pt", {"a": ["x" * 10**6] * 10**4})
    with pytest.raises(CheckpointError, match="it stands for 10000000000 bytes, which is far larger than the file"):
        check_pickled(path)


def test_what_holds_itself(tmp_path: Path) -> None:
    circle: list[Any] = []
    circle.append({"again": circle})
    with pytest.raises(CheckpointError, match="it holds itself"):
        check_pickled(_saved(tmp_path / "x.pt", {"a": circle}))
    deep: list[Any] = []
    for _ in range(250):
        deep = [deep]
    with pytest.raises(CheckpointError, match="nested more than 200 levels deep"):
        check_pickled(_saved(tmp_path / "x.pt", {"a": deep}))


def _tuples(levels: int) -> bytes:
    """Tuples of twice the one below, each remembered; the last one is on the stack."""
    return b"K\x01" + b"".join(b"q\x00h\x00\x86" for _ in range(levels))


@pytest.mark.parametrize(
    "call",
    [
        b"\x80\x02}" + _tuples(100) + b"K\x01s.",  # hashed as a key
        b"\x80\x02}(" + _tuples(100) + b"K\x01u.",
        b"\x80\x02c__builtin__\nset\n]" + _tuples(100) + b"a\x85R.",
        b"\x80\x02K\x01" + b"\x85" * 10**5 + b".",  # deep, which is hashed on C's stack
        b"\x80\x02c__builtin__\nbytearray\n" + _tensor(3) + b"\x85R.",
        b"\x80\x02c__builtin__\nset\n" + _tensor(3) + b"\x85R.",
        b"\x80\x02c__builtin__\nbytearray\n(I2147483648\ntR.",
        b"\x80\x02"
        + _text("x" * 10**4)
        + b"q\x00]("
        + b"c__builtin__\nbytearray\nh\x00U\x06latin1\x86R" * 10**4
        + b"e.",
        b"\x80\x02](" + b"K\x01" * 10**4 + b"eq\x00](" + b"c__builtin__\nset\nh\x00\x85R" * 2000 + b"e.",
        b"\x80\x02ctorch\nTensor\n)\x81(" + _text("storage") + b"K\x00J\xff\xff\xff\x7f\x85K\x00\x85tb.",
        b"\x80\x02ctorch._utils\n_rebuild_wrapper_subclass\n)R.",
    ],
)
def test_calls_for_work(tmp_path: Path, call: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"x\.pt cannot be read: it "):
        check_pickled(_pickle_of(tmp_path / "x.pt", call))


def test_keys_of_one_hash(tmp_path: Path) -> None:
    keys = {(2**61 - 1) * number: None for number in range(1, 3000)}
    with pytest.raises(CheckpointError, match="objects when its references are followed"):
        check_pickled(_saved(tmp_path / "x.pt", keys))
    check_pickled(_saved(tmp_path / "x.pt", {2**63 + number * 7919: None for number in range(3000)}))


def test_many_expanded_tensors(tmp_path: Path) -> None:
    """Each is below the limit of one."""
    content = {str(number): torch.zeros(1).expand(5 * 10**6) for number in range(8)}
    path = _saved(tmp_path / "x.pt", content)
    with pytest.raises(CheckpointError, match=r"it stands for 16000000\d bytes, which is far larger than the file"):
        check_pickled(path)


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_passes_is_loaded_in_proportion(shop: Any, tmp_path: Path, data: Any) -> None:
    """Pickles put together at random from opcodes: what is not refused loads with 300 MB of addresses in 5 s of CPU."""
    opcodes = st.sampled_from(_OPCODES)
    content = b"\x80\x02}" + b"".join(data.draw(st.lists(opcodes, max_size=60))) + b"."
    path = _pickle_of(tmp_path / "x.pt", content)
    shop.stdin.write(f"{path}\n")
    shop.stdin.flush()
    assert shop.stdout.readline() in ("refused\n", "loaded\n"), content


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
    assert large.numel() * 4 > 2**26


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
