"""The cache goes by the name that the model at hand has for it, whatever release of transformers that is from."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from ds_hf.inference.static import CACHE_NAMES, cache_argument, cache_of, given_cache


class Before(nn.Module):
    def forward(self, input_ids: Any, past_key_values: Any = None) -> Any: ...


class Since(nn.Module):
    def forward(self, input_ids: Any, cache: Any = None) -> Any: ...


@pytest.mark.parametrize(("model", "name"), [(Before(), "past_key_values"), (Since(), "cache")])
def test_the_models_own_name_is_used(model: nn.Module, name: str) -> None:
    assert name in CACHE_NAMES
    assert cache_argument(model) == name
    assert given_cache({name: "filled", "use_cache": True}) == (name, "filled")
    assert cache_of(SimpleNamespace(logits=None, **{name: "filled"})) == "filled"


def test_a_model_without_a_cache_is_told_of() -> None:
    assert given_cache({"cache": None, "use_cache": True})[1] is None
    with pytest.raises(AttributeError, match="past_key_values"):
        cache_of(SimpleNamespace(logits=None))
