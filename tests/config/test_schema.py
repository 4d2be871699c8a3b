"""What the check says of keys that there are not."""

from __future__ import annotations

from typing import Any

import pytest

from ds_hf.config import load_config
from ds_hf.config.schema import walk
from ds_hf.errors import ConfigError


@pytest.mark.parametrize(
    ("section", "said", "not_said"),
    [
        ({"tensor_parallel": {"enabled": True, "autotp_size": 1}}, "autotp_size", "comms_logger"),
        ({"pipeline": {"schedule": "1F1B"}}, "known here: stages", "scheduler"),
        ({"dataloader_settings": {"num_workers": 4}}, "remove it", "did you mean"),
        ({"bf16": {"enabled": True, "loss_scale": 0}}, "needs no loss scale", "fp16, where"),
        ({"zero_optimization": {"gradient_cliping": 1.0}}, "did you mean gradient_clipping", "known here"),
        ({"zero_optimization": {"zenflow": {"topk": 0.1}}}, 'did you mean "topk_ratio"?', "expert_parallel"),
        ({"zero_optimisation": {"stage": 1}}, 'did you mean "zero_optimization"', "remove it"),
    ],
)
def test_hints_do_not_lead_astray(section: dict[str, Any], said: str, not_said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"train_micro_batch_size_per_gpu": 1, **section}, world_size=1)
    assert said in str(caught.value)
    assert not_said not in str(caught.value)


def test_auto_is_a_value_where_it_is_the_default() -> None:
    """A key that is "auto" when it is absent may be written so."""
    for path, node in walk():
        if node.get("default") == "auto" or "auto" in node.get("enum", ()):
            assert node.get("x-auto"), path
