"""Weights in blocks: sizes and errors of each format against what the format promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_hf.engine.modules.quantized.format import WeightFormat, format_of
from ds_hf.errors import ConfigError


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", [(96, 128), (40, 100), (3, 64)])
def test_no_weight_is_off_by_more_than_half_a_step(
    shape: tuple[int, int], bits: int, symmetric: bool, dim: int
) -> None:
    form = WeightFormat(bits, 64, symmetric, dim)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) + 0.7
    packed = form.pack(weight)
    assert packed.dtype is torch.int8
    rows, numel = shape if dim == 1 else shape[::-1]
    groups = -(-numel // 64)
    assert packed.shape == (rows, -(-numel * bits // 32) * 4 + 4 * groups * (1 if symmetric else 2))
    found = form.unpack(packed, shape, torch.float32)
    assert found.shape == shape
    lines = weight if dim == 1 else weight.t()
    steps = []
    for group in lines.split(64, dim=1):
        extent = group.abs().amax(1) if symmetric else (group.amax(1) - group.amin(1)) / 2
        steps.append((extent / (2 ** (bits - 1) - 1) / 2)[:, None].expand(group.shape))
    error = ((found if dim == 1 else found.t()) - lines).abs()
    assert (error <= torch.cat(steps, 1) * 1.001 + 1e-6).all()
    assert error.max() > 0


def test_asymmetric_blocks_are_nearer_where_weights_are_not_around_zero() -> None:
    weight = torch.rand(64, 256, generator=torch.Generator().manual_seed(0)) + 1
    errors = [
        (form.unpack(form.pack(weight), (64, 256), torch.float32) - weight).norm()
        for form in (WeightFormat(4, 64, True), WeightFormat(4, 64, False))
    ]
    assert errors[1] < errors[0] / 3


def test_options() -> None:
    assert format_of({}, "") == WeightFormat(8, 64, True, 1)
    options = {"num_bits": 4, "group_size": 128, "group_dim": 0, "symmetric": False}
    assert format_of(options, "") == WeightFormat(4, 128, False, 0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_bits": 3}, "/x/num_bits: 3 bits"),
        ({"group_size": 100}, "a multiple of 64"),
        ({"group_dim": 2}, "dimension 2"),
        ({"symmetric": "no"}, "'no' is no boolean"),
        ({"bits": 8}, "unknown key 'bits'"),
    ],
)
def test_wrong_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        format_of(options, "/x")
