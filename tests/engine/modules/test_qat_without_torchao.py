"""Where torchao is missing or too old, a file that asks for it ends before training."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from torch import nn

from ds_hf import initialize
from ds_hf.errors import ConfigError
from tests.helpers.parity import base_config


def test_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization.qat", None)
    with pytest.raises(ConfigError, match=r"cannot be imported .* pip install 'ds-hf\[few-bits\]'"):
        initialize(model=nn.Linear(32, 32), config=base_config(1, ds_hf={"qat": True}))


def test_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "torchao",
        "torchao.quantization",
        "torchao.quantization.qat",
        "torchao.quantization.qat.fake_quantizer",
    ):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(ConfigError, match=r"this torchao is too old .* pip install -U torchao"):
        initialize(model=nn.Linear(32, 32), config=base_config(1, ds_hf={"qat": True}))


def test_without_the_section_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization.qat", None)
    initialize(model=nn.Linear(32, 32), config=base_config(1, ds_hf={"qat": False}))[0].destroy()
