"""``Decoder`` against transformers' own ``generate``: the same tokens, by a static cache."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from ds_hf.inference import decode
from ds_hf.inference.decode import Decoder, cache_length
from ds_hf.inference.step import DecodingStep
from ds_hf.log import forget_said
from tests.helpers.generating import GREEDY, left_padded, small_model

ENDS = [*range(5, 25)]  # so that sequences end at different lengths


def both(model: Any, decoder: Decoder, inputs: dict[str, Any], **kwargs: Any) -> torch.Tensor:
    """The decoder's tokens, which are those of ``model.generate``."""
    torch.manual_seed(3)
    expected = model.generate(**inputs, **kwargs)
    torch.manual_seed(3)
    found: torch.Tensor = decoder.generate(**inputs, **kwargs)
    assert found.tolist() == expected.tolist()
    return found


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("llama", False),
        ("llama", True),
        ("qwen3", False),
        pytest.param("qwen3", True, marks=SLOW),
        pytest.param("mistral", False, marks=SLOW),
        ("mistral", True),
        ("gpt2", False),
        pytest.param("gpt2", True, marks=SLOW),
        pytest.param("t5", False, marks=SLOW),
        ("t5", True),
        ("bloom", False),
        pytest.param("bloom", True, marks=SLOW),
    ],
)
def test_tokens_are_those_of_transformers(name: str, full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a cache of which attention sees what is filled, and one that it sees whole, as captured steps do."""
    if full:
        monkeypatch.setattr(Decoder, "_captures", lambda *_: True)
        monkeypatch.setattr(Decoder, "_captured", lambda *_: None)
    model, inputs = small_model(name), left_padded()
    decoder = Decoder(model)
    tokens = both(model, decoder, inputs, **GREEDY)
    assert max(len(set(row.tolist())) for row in tokens[:, -24:]) > 5
    assert (decoder.last.way, decoder.last.steps, decoder.last.cache_length) == ("static", 23, 64)
    ended = both(model, decoder, inputs, **{**GREEDY, "eos_token_id": ENDS})
    assert ended.shape[1] < tokens.shape[1] or name in ("t5", "bloom")
    both(model, decoder, inputs, **{**GREEDY, "do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 20})
    both(model, decoder, left_padded(2, 40), **{**GREEDY, "max_new_tokens": 1})
    both(model, decoder, inputs, **{**GREEDY, "max_new_tokens": 3, "num_return_sequences": 2, "do_sample": True})


def test_bf16_for_32_tokens() -> None:
    model = small_model("llama", dtype=torch.bfloat16)
    both(model, Decoder(model), left_padded(), **{**GREEDY, "max_new_tokens": 32})


def test_weights_that_change_in_place_keep_the_step_and_those_that_move_do_not() -> None:
    model, inputs = small_model("llama"), left_padded()
    decoder = Decoder(model)
    before = both(model, decoder, inputs, **GREEDY)
    (step,) = decoder._steps.values()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape, generator=torch.Generator().manual_seed(1)), alpha=0.05)
    assert both(model, decoder, inputs, **GREEDY).tolist() != before.tolist()
    assert list(decoder._steps.values()) == [step]
    model.lm_head.weight.data = model.lm_head.weight.data * 2
    both(model, decoder, inputs, **GREEDY)
    assert list(decoder._steps.values()) != [step]


def test_steps_are_shared_by_near_lengths_and_the_oldest_goes() -> None:
    model = small_model("llama")
    decoder = Decoder(model, keep=2)
    for length in (9, 11, 30):
        both(model, decoder, left_padded(length=length), **GREEDY)
    assert len(decoder._steps) == 1
    for batch in (1, 2):
        both(model, decoder, left_padded(batch), **GREEDY)
    assert [step.token.shape[0] for step in decoder._steps.values()] == [1, 2]
    decoder.release()
    assert not decoder._steps


def test_adapters_on_and_off_and_merged() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(small_model("llama"), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    for name, param in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param, generator=torch.Generator().manual_seed(2))
    decoder, inputs = Decoder(model.eval()), left_padded()
    tuned = both(model, decoder, inputs, **GREEDY)
    with model.disable_adapter():
        assert both(model, decoder, inputs, **GREEDY).tolist() != tuned.tolist()
    model.merge_adapter()
    both(model, decoder, inputs, **GREEDY)
    model.unmerge_adapter()
    assert both(model, decoder, inputs, **GREEDY).tolist() == tuned.tolist()


@pytest.mark.parametrize(
    ("name", "kwargs", "why"),
    [
        ("mamba", {}, "no static cache"),
        ("llama", {"num_beams": 2}, "num_beams is 2"),
        ("llama", {"repetition_penalty": 1.3}, "looks at the tokens so far"),
        ("llama", {"cache_implementation": "static"}, "cache_implementation is given"),
        ("llama", {"return_dict_in_generate": True}, "return_dict_in_generate"),
        ("llama", {"use_cache": False}, "use_cache"),
    ],
)
def test_what_goes_to_transformers_is_told_once(
    name: str, kwargs: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    forget_said()
    caplog.set_level(logging.INFO, "ds_hf")
    model, inputs = small_model(name), left_padded()
    decoder = Decoder(model)
    settings = {**GREEDY, "max_new_tokens": 4, **kwargs}
    for _ in range(2):
        found, expected = decoder.generate(**inputs, **settings), model.generate(**inputs, **settings)
        found, expected = (getattr(tokens, "sequences", tokens) for tokens in (found, expected))
        assert found.tolist() == expected.tolist()
    assert decoder.last.way == "transformers"
    assert why in decoder.last.why
    assert sum(why in record.getMessage() for record in caplog.records) == 1


def test_prompts_that_do_not_fit_are_refused_before_anything_is_computed() -> None:
    model = small_model("llama")
    decoder = Decoder(model, max_length=30)
    both(model, decoder, left_padded(), **{**GREEDY, "max_new_tokens": 19})
    assert decoder.last.cache_length == 30
    for beams in (1, 2):
        with pytest.raises(ValueError, match=r"11 tokens and 24 new ones make 35.*room for 30"):
            decoder.generate(**left_padded(), **GREEDY, num_beams=beams)


def test_a_step_that_cannot_be_captured_is_computed_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the compiler first, then without a graph; one line each."""
    forget_said()
    tried = []

    def fails(step: DecodingStep, pool: Any, settled: Any) -> None:
        tried.append(step.forward)
        raise RuntimeError("operation not permitted\nand more")

    monkeypatch.setattr(DecodingStep, "capture", fails)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    model = small_model("llama")
    decoder = Decoder(model, compiled=True)
    step: Any = type("Step", (), {"forward": "compiled", "capture": fails})()
    decoder._captured(step, model)
    assert tried == ["compiled", model]
    assert step.forward is model
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "generate: the decoding step cannot be compiled: operation not permitted",
        "generate: the decoding step cannot be captured in a CUDA graph: operation not permitted",
    ]


@pytest.mark.slow
def test_compiled_step() -> None:
    model, inputs = small_model("llama"), left_padded()
    decoder = Decoder(model, compiled=True)
    both(model, decoder, inputs, **{**GREEDY, "eos_token_id": ENDS})
    assert decoder.last.compiled


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "t5"])
def test_captured_step(name: str, compiled: bool) -> None:
    model = small_model(name).cuda()
    inputs = {key: value.cuda() for key, value in left_padded().items()}
    settled: list[int] = []

    def counted() -> AbstractContextManager[None]:
        settled.append(1)
        return nullcontext()

    decoder = Decoder(model, compiled=compiled, settled=counted)
    for _ in range(2):
        both(model, decoder, inputs, **GREEDY)
        assert (decoder.last.way, decoder.last.compiled) == ("graph", compiled)
        both(model, decoder, inputs, **{**GREEDY, "eos_token_id": ENDS})
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1.01)
    assert len(settled) == 2  # one graph with ends, one without
    drawn = [decoder.generate(**inputs, **{**GREEDY, "do_sample": True}).tolist() for _ in range(2)]
    assert drawn[0] != drawn[1]


def test_lengths_of_caches() -> None:
    for positions in range(1, 5000):
        length = cache_length(positions)
        assert positions <= length <= max(64, positions + positions // 4 + 64)
        assert cache_length(positions, 1000) == (positions if positions > 1000 else min(length, 1000))
    assert len({cache_length(positions) for positions in range(1, 4097)}) <= 24
    assert decode.Decoded("graph").steps == 0
