"""The table of features: each row names a function that takes an engine alone."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest

from ds_hf.engine.features import FEATURES, Feature


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_what_a_row_names_takes_an_engine(feature: Feature) -> None:
    module, function = feature.attach.split(":")
    inspect.signature(getattr(import_module(f"ds_hf.engine.{module}"), function)).bind("an engine")
