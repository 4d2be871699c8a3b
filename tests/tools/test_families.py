"""``families``: models of transformers under a feature; some of them each week, all of them by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tools.families import FEATURES, main, small

FEW = "bert,cohere2,deepseek_v4,exaone4,gemma3_text,gpt2,jamba,olmo2,opt,phi3,qwen3_moe,starcoder2"
COMPILED = "gpt_neox,phi3"  # inductor takes half a minute for each; one adds attention and MLP to the same residual


def test_what_is_refused_and_what_is_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sequence", "--only", "bart,llama", "--json", str(tmp_path / "rows.json")]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert "BartForCausalLM takes no position_ids" in rows["bart"]["refused"]
    assert rows["llama"]["class"] == "LlamaForCausalLM"
    assert 0 <= rows["llama"]["off"] < 5e-6
    assert "sequence: 1 as plain torch, 0 not; 0 skipped, 1 refused, 0 failed" in capsys.readouterr().out


def test_sizes_of_configurations_inside() -> None:
    from transformers import LlavaConfig

    found = small(LlavaConfig)
    assert found["text_config"]["hidden_size"] == 32
    assert found["vision_config"]["num_hidden_layers"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_some_of_them(feature: str) -> None:
    assert main([feature, "--only", COMPILED if feature == "compiled_tensor" else FEW]) == 0
