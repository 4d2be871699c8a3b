"""Weights in few bits: the grid is torchao's, the layout compressed-tensors', the pattern 2:4 the largest values'."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ds_hf.checkpoint.few_bits import FewBits, group_size_for, own_grids, pack, plan, round_to_bits, two_of_four
from ds_hf.checkpoint.pretrained import export_source, read_pretrained
from ds_hf.compression.quantizers import SymQuantizer
from ds_hf.errors import CheckpointError
from tests.helpers.few_bits import unpacked


def _weight(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_value_becomes_the_nearest_on_the_grid(bits: int, dtype: torch.dtype) -> None:
    weight = _weight(6, 64, dtype)
    codes, scales = round_to_bits(weight, bits, 32)
    assert (codes.dtype, scales.dtype, scales.shape) == (torch.int8, dtype, (6, 2))
    most = 2 ** (bits - 1)
    expected = weight.double().view(6, 2, 32).abs().amax(-1) / (most - 0.5)
    torch.testing.assert_close(scales.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=0)
    away = (weight.double() / scales.double().repeat_interleave(32, 1) - codes).abs()
    inside = codes < most - 1  # what is above the largest code is cut off
    assert away[inside].max() <= 0.5 + 2e-5  # the quotient is in 32 bits
    assert away.max() <= 0.5 + 2 * most * torch.finfo(dtype).eps
    assert (int(codes.min()), int(codes.max())) == (-most, most - 1)


def test_a_group_of_zeros_stays_zero() -> None:
    codes, scales = round_to_bits(torch.zeros(2, 32, dtype=torch.bfloat16), 4, 32)
    assert not codes.any()
    assert scales.isfinite().all()
    assert (scales > 0).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_grid_is_torchaos(bits: int, dtype: torch.dtype) -> None:
    """What its quantization-aware training rounds to, to the bit."""
    qat = pytest.importorskip("torchao.quantization.qat")
    weight = _weight(8, 128, dtype)
    for group in (32, 128):
        config = qat.IntxFakeQuantizeConfig({4: torch.int4, 8: torch.int8}[bits], group_size=group)
        theirs = qat.fake_quantizer.IntxFakeQuantizer(config)(weight)
        codes, scales = round_to_bits(weight, bits, group)
        ours = codes.to(dtype) * scales.repeat_interleave(group, 1)
        assert torch.equal(ours, theirs.to(dtype))


@pytest.mark.parametrize(("bits", "dtype"), [(4, torch.float32), (4, torch.bfloat16), (8, torch.float32)])
@pytest.mark.parametrize("largest", ["below", "above"])
def test_what_lies_on_a_grid_is_kept(bits: int, dtype: torch.dtype, largest: str) -> None:
    """DeepSpeed's quantizer has the scale ``max |w| / 2^(b-1)`` of a stretch that is longer than a group."""
    most = 2 ** (bits - 1)
    codes = torch.randint(1 - most, most, (6, 64), generator=torch.Generator().manual_seed(1)).float()
    codes[0, 0] = -most if largest == "below" else most - 1
    codes[1, :32] = 0
    weight = (codes * 0.0371).to(dtype)
    found, scales = round_to_bits(weight, bits, 32, keeps=True)
    read = found.to(dtype) * scales.repeat_interleave(32, 1)
    torch.testing.assert_close(read, weight, rtol=2 * torch.finfo(dtype).eps, atol=0)
    plain, scales = round_to_bits(weight, bits, 32)
    assert (plain.to(dtype) * scales.repeat_interleave(32, 1) - weight).abs().max() > 0.0371 / 4
    assert not own_grids(_weight(6, 64, dtype), bits, 32).any()


@pytest.mark.parametrize(("bits", "dtype"), [(4, torch.float32), (4, torch.bfloat16), (8, torch.float32)])
def test_what_compression_training_leaves_is_kept(bits: int, dtype: torch.dtype) -> None:
    """Its stretches hold whole groups; where a group holds two of them, it is rounded anew."""
    left = SymQuantizer.apply(_weight(32, 256, dtype), bits, None, None, 32)  # a stretch a row
    codes, scales = round_to_bits(left, bits, 128, keeps=True)
    read = codes.to(dtype) * scales.repeat_interleave(128, 1)
    torch.testing.assert_close(read, left, rtol=2 * torch.finfo(dtype).eps, atol=0)
    halves = SymQuantizer.apply(_weight(32, 256, dtype), bits, None, None, 64)
    assert (own_grids(halves, bits, 256) == 0).float().mean() > 0.9


def test_grids_are_kept_in_files(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "rounded"
    place.mkdir()
    codes = torch.randint(-8, 8, (8, 64), generator=torch.Generator().manual_seed(2)).float()
    codes[2, 32:] = 0
    save_file({"model.up.weight": codes * 0.02, "model.down.weight": _weight(64, 32)}, place / "model.safetensors")
    source = read_pretrained(place)
    form = plan(source, {"model.up": "", "model.down": ""}, 4)
    written = {name: value for weight in source.weights() for name, value in form.tensors(weight, None)}
    read = unpacked(written["model.up.weight_packed"], 4) * written["model.up.weight_scale"].repeat_interleave(32, 1)
    torch.testing.assert_close(read, codes * 0.02)
    assert torch.equal(written["model.down.weight_scale"], round_to_bits(_weight(64, 32), 4, 32)[1])


@pytest.mark.parametrize(("bits", "columns", "words"), [(4, 32, 4), (4, 12, 2), (8, 32, 8), (8, 6, 2)])
def test_codes_lie_one_after_another(bits: int, columns: int, words: int) -> None:
    most = 2 ** (bits - 1)
    codes = torch.randint(-most, most, (5, columns), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    packed = pack(codes, bits)
    assert (packed.dtype, packed.shape) == (torch.int32, (5, words))
    assert torch.equal(unpacked(packed, bits)[:, :columns], codes)


@pytest.mark.parametrize(("bits", "columns"), [(4, 32), (4, 12), (8, 32), (8, 6)])
def test_the_layout_is_compressed_tensors(bits: int, columns: int) -> None:
    theirs = pytest.importorskip("compressed_tensors.compressors.pack_quantized")
    most = 2 ** (bits - 1)
    codes = torch.randint(-most, most, (5, columns), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(theirs.unpack_from_int32(pack(codes, bits), bits, torch.Size((5, columns))), codes)


def test_two_of_four_are_left_and_the_largest() -> None:
    weight = _weight(16, 32)
    found = two_of_four(weight)
    fours, left = weight.view(16, 8, 4).abs(), found.view(16, 8, 4)
    assert ((left != 0).sum(-1) == 2).all()
    assert torch.equal(left.abs().sum(-1), fours.sort(dim=-1).values[..., 2:].sum(-1))
    assert torch.equal(found[found != 0], weight[found != 0])
    assert torch.equal(two_of_four(found), found)


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "plain"
    place.mkdir()
    tensors = {
        "model.up.weight": _weight(8, 64, torch.bfloat16),
        "model.up.bias": torch.ones(8, dtype=torch.bfloat16),
        "model.down.weight": _weight(64, 32, torch.bfloat16),
        "head.weight": _weight(5, 64, torch.bfloat16),
    }
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    (place / "config.json").write_text('{"model_type": "own"}')
    return place


PRUNED: dict[str, object] = {"compression": {}}
LINEAR = {"model.up": "", "model.down": "", "head": "the head"}


def test_what_is_written(folder: Path, tmp_path: Path) -> None:
    source, out = read_pretrained(folder), tmp_path / "out"
    form = plan(source, LINEAR, 4)
    assert form.text == "2 linear layers in 4 bits, one scale for 32 columns; as they were: 1 the head"
    export_source(source, out, form=form, max_shard_size="1KB")
    written = {weight.name: weight.read() for weight in read_pretrained(out).weights()}
    assert len(list(out.glob("*.safetensors"))) > 1
    weights = {weight.name: weight.read() for weight in source.weights()}
    for name in ("model.up", "model.down"):
        codes, scales = round_to_bits(weights[f"{name}.weight"], 4, 32)
        assert torch.equal(written.pop(f"{name}.weight_packed"), pack(codes, 4))
        assert torch.equal(written.pop(f"{name}.weight_scale"), scales)
        assert written.pop(f"{name}.weight_shape").tolist() == list(codes.shape)
    assert set(written) == {"model.up.bias", "head.weight"}
    assert all(torch.equal(value, weights[name]) for name, value in written.items())


def test_rows_are_rounded_in_stretches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = read_pretrained(folder)
    weight = next(weight for weight in source.weights() if weight.name == "model.down.weight")
    form = plan(source, LINEAR, 8)
    whole = dict(form.tensors(weight, None))
    monkeypatch.setattr("ds_hf.checkpoint.few_bits._AT_ONCE", 96)
    assert all(torch.equal(value, whole[name]) for name, value in form.tensors(weight, None))
    assert whole["model.down.weight_scale"].shape == (64, 1)


def test_zeros_stay_zeros_in_few_bits(folder: Path, tmp_path: Path) -> None:
    source = read_pretrained(folder)
    export_source(source, tmp_path / "out", form=plan(source, LINEAR, 4, sparse=True))
    written = {weight.name: weight.read() for weight in read_pretrained(tmp_path / "out").weights()}
    codes = unpacked(written["model.up.weight_packed"], 4)
    assert ((codes.view(8, 16, 4) != 0).sum(-1) <= 2).all()
    export_source(source, tmp_path / "plain", form=plan(source, LINEAR, None, sparse=True))
    written = {weight.name: weight.read() for weight in read_pretrained(tmp_path / "plain").weights()}
    assert ((written["model.up.weight"].view(8, 16, 4) != 0).sum(-1) == 2).all()
    assert torch.equal(written["head.weight"], _weight(5, 64, torch.bfloat16))


def test_the_scales_are_as_few_as_kernels_have() -> None:
    assert group_size_for({"a": (8, 256), "b": (8, 512)}, 4, None) == 128
    assert group_size_for({"a": (8, 256), "b": (8, 192)}, 4, None) == 64
    assert group_size_for({"a": (8, 256)}, 8, None) is None
    assert group_size_for({"a": (8, 250)}, 4, 0) is None
    assert group_size_for({"a": (8, 250)}, 4, 50) == 50


def test_what_does_not_divide_is_refused(folder: Path) -> None:
    source = read_pretrained(folder)
    with pytest.raises(CheckpointError, match=r"--group-size 48 does not divide the 64 columns of model\.up: 32 fit"):
        plan(source, LINEAR, 4, group_size=48)
    with pytest.raises(CheckpointError, match="groups of 32 do not divide the 40 columns of a: give --group-size"):
        group_size_for({"a": (8, 40)}, 4, None)
    with pytest.raises(CheckpointError, match=r"has no matrix model.gate.weight, .* Merge adapters first"):
        plan(source, {**LINEAR, "model.gate": ""}, 4)
    with pytest.raises(CheckpointError, match=r"no linear layer is left .* \(excluded, the head\)"):
        plan(source, LINEAR, 4, exclude=["^model"])
    with pytest.raises(CheckpointError, match="--exclude dwon: it is in no linear layer's name"):
        plan(source, LINEAR, 4, exclude=["dwon"])
    form = plan(source, LINEAR, 4, exclude=["down"], group_size=64)
    assert (form.layers, form.group_size, form.ignored) == ({"model.up"}, 64, ("model.down", "head"))
    assert form.section["quantization_config"]["ignore"] == ["model.down", "head"]
    assert FewBits(None, None, True, frozenset({"a"}), ()).section == {}


@pytest.mark.parametrize(("sparse", "beside", "told"), [(True, {}, True), (False, {}, False), (True, PRUNED, False)])
def test_values_that_were_trained_and_are_left_out_are_told(
    folder: Path, caplog: pytest.LogCaptureFixture, sparse: bool, beside: dict[str, object], told: bool
) -> None:
    source = read_pretrained(folder)
    source.common["features"] = {"qat": {"bits": 4, "group_size": 32, "exclude": []}, **beside}
    for bits in (4, None):
        caplog.clear()
        if sparse or bits:
            plan(source, LINEAR, bits, sparse=sparse)
        assert ("to 4 bits with all of its values, and half of them are left out" in caplog.text) == told
