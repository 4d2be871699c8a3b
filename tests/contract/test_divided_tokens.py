"""``ds_hf.tensor_sequence_parallel``: tokens divided between cut layers, against one process with plain torch.

fp64 gradients agree to 1e-12 of the largest, whatever the number of tokens; and it stays so with adapters, blocks that
are computed again in backward, compiled ones, and evaluation and generation between steps.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_hf import initialize
from ds_hf.engine.zero.gather import GatheredParameters
from ds_hf.errors import ConfigError
from tests.contract.test_tensor_parallel import FP32_ROUTERS, config
from tests.helpers.compiled import with_quick_backend
from tests.helpers.distributed import run_distributed
from tests.helpers.tensor import Block, build, loss_of, whole

KEY: dict[str, Any] = {"tensor_sequence_parallel": True}


def samples(count: int = 3, length: int = 9) -> list[Tensor]:
    """Micro-batches of one step, of 1 or 2 samples; their tokens do not all divide."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 64, (1 + index % 2, length + index), generator=generator) for index in range(count)]


def engine_of(model: nn.Module, kind: str, tensor: int, stage: int, own: dict[str, Any] = KEY, **more: Any) -> Any:
    settings = config(kind, tensor, stage, optimizer={"type": "SGD", "params": {"lr": 1.0}}, ds_hf=own, **more)
    settings["gradient_accumulation_steps"] = len(samples())
    trained = [param for param in model.parameters() if param.requires_grad]
    return initialize(model=model, model_parameters=trained, config=settings)[0]


def gradients_of(engine: Any, between: Any = None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Whole weights, and whole gradients there of the mean of the micro-batches, by a step of SGD with rate 1."""
    trained = {name: param for name, param in engine.module.named_parameters() if param.requires_grad}

    def values() -> dict[str, Tensor]:
        with GatheredParameters(list(trained.values())):
            here = {name: param.detach().clone() for name, param in trained.items()}
        return whole(here, engine.module, engine.mesh.axis("tensor"))

    before = values()
    for ids in samples():
        engine.backward(loss_of(engine, ids))
        engine.step()
        if between is not None:
            between()
    after = values()
    return before, {name: before[name] - after[name] for name in before}


def plain(model: nn.Module) -> dict[str, Tensor]:
    for ids in samples():
        (loss_of(model, ids) / len(samples())).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], within: float = 1e-12) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        apart = float((found[name] - value).abs().max() / value.abs().max())
        # a difference of weights near 1 has 1e-16 of them, and the smallest gradients here are 1e-3
        assert apart < within, (name, apart)


def gradients(kind: str, tensor: int, stage: int) -> tuple[dict[str, Tensor], list[str]]:
    engine = engine_of(build(kind).double(), kind, tensor, stage)
    divided = [name for name, module in engine.module.named_modules() if "_ds_here" in vars(module)]
    return gradients_of(engine)[1], divided


def check_gradients(kind: str, tensor: int, stage: int) -> None:
    expected = plain(build(kind).double())
    for found, divided in run_distributed(gradients, tensor, kind, tensor, stage, timeout=90):
        assert len(divided) >= 6  # blocks and what is in them
        assert_equal(found, expected, 1e-6 if kind in FP32_ROUTERS else 1e-12)


@pytest.mark.parametrize(("kind", "tensor", "stage"), [("qwen3", 4, 3), ("fused", 2, 0), ("DeepseekV2", 2, 2)])
def test_gradients(kind: str, tensor: int, stage: int) -> None:
    """Norms of heads; biases behind sums; latent attention, and experts with shared ones, which sum over all tokens."""
    check_gradients(kind, tensor, stage)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "mistral", "phi3", "mixtral", "gpt2", "GraniteSWA", "Bloom", "DeepseekV2"])
@pytest.mark.parametrize("tensor", [2, 4])
@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_of_more_models(kind: str, tensor: int, stage: int) -> None:
    check_gradients(kind, tensor, stage)


# -- beside other things -------------------------------------------------------------------------------------------


def with_lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    targets = ["q_proj", "o_proj", "up_proj", "down_proj"]
    made = get_peft_model(build("llama"), LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    return made.double()  # type: ignore[no-any-return]


def look(engine: Any) -> None:
    """What a script does between micro-batches."""
    engine.eval()
    with torch.no_grad():
        loss_of(engine, samples(1, 7)[0])
    engine.train()
    engine.generate(samples(1, 4)[0], max_new_tokens=3, do_sample=False, pad_token_id=3)


def cases() -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Gradients that are found and expected, by case."""
    found: dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]] = {}

    def add(name: str, model: nn.Module, stage: int, own: dict[str, Any] = KEY, between: Any = None) -> None:
        reference = with_lora() if name == "adapters" else build("llama").double()
        engine = engine_of(model, "llama", 2, stage, own)
        before, gradients = gradients_of(engine, None if between is None else lambda: between(engine))
        reference.load_state_dict(before, strict=False)
        found[name] = gradients, plain(reference)
        engine.destroy()

    add("adapters", with_lora(), 3)
    for reentrant in (False, True):
        checkpointed: Any = build("llama").double().train()
        checkpointed.gradient_checkpointing_enable({"use_reentrant": reentrant})
        add(f"checkpointed, reentrant {reentrant}", checkpointed, 2)
    add("evaluation and generation between", build("llama").double(), 1, between=look)
    shared = build("llama").double()
    for name, own in (("one engine", KEY), ("the next, without the key", {}), ("one more", KEY)):
        add(name, shared, 1, own)
    return found


def test_beside_other_things() -> None:
    for rank in run_distributed(cases, 2, timeout=120):
        assert len(rank) == 7
        for name, (found, expected) in rank.items():
            assert_equal(found, expected)
            assert name


def compiled() -> tuple[Any, Any]:
    model: Any = build("llama", use_cache=False).double()
    engine = with_quick_backend(engine_of(model, "llama", 2, 2, {**KEY, "compile": "blocks"}))
    _, found = gradients_of(engine)
    return found, engine.compile_report().breaks


@pytest.mark.slow
def test_compiled_blocks() -> None:
    expected = plain(build("llama").double())
    for found, breaks in run_distributed(compiled, 2, timeout=200):
        assert breaks == {}
        assert_equal(found, expected, 1e-5)  # Llama's norms are in fp32


# -- what is refused -----------------------------------------------------------------------------------------------


class Mixing(Block):
    """Looks at other tokens in its own code."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1e-3 * x.mean(1, keepdim=True)


class Shaped(Block):
    """Counts on the shape of all hidden states."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(1, 9, 32)


def refusals() -> dict[str, str]:
    said: dict[str, str] = {}

    def note(name: str, call: Any) -> None:
        try:
            call()
            said[name] = ""
        except ConfigError as error:
            said[name] = str(error)

    dropped = build("fused")
    dropped.blocks[1].drop = nn.Dropout(0.1)
    note("dropout", lambda: engine_of(dropped, "fused", 2, 1))
    recording = engine_of(build("llama"), "llama", 2, 1)
    ids = samples()[0]
    note("recorded", lambda: recording(input_ids=ids, output_hidden_states=True))
    with torch.no_grad():
        kept = recording(input_ids=ids, output_hidden_states=True).hidden_states
    said["evaluated"] = str([tuple(value.shape) for value in kept][1])
    compiled = {**KEY, "compile": "blocks"}
    for name, kind, own in (("other tokens", Mixing, KEY), ("its shape", Shaped, KEY), ("compiled", Mixing, compiled)):
        model = build("fused")
        for block in model.blocks:
            block.__class__ = kind
        engine = engine_of(model, "fused", 2, 1, own)
        note(name, lambda engine=engine: loss_of(engine, ids))
    put = build("fused")
    put.blocks[2].forward = put.blocks[2].forward
    note("put", lambda: engine_of(put, "fused", 2, 1))
    return said


def test_what_does_not_fit_is_refused_by_name() -> None:
    for said in run_distributed(refusals, 2, timeout=90):
        assert "blocks.1 drops elements (drop.p)" in said["dropout"]
        assert "output_hidden_states" in said["recorded"]
        assert said["evaluated"] == "(1, 9, 32)"
        for name in ("other tokens", "compiled"):
            assert "blocks.0 computes something else with a part of the tokens" in said[name]
        assert "blocks.0 does not compute with a part of the tokens" in said["its shape"]
        assert "blocks.2 has a forward that was put into it" in said["put"]
        for name in said.keys() - {"evaluated"}:
            assert "/ds_hf/tensor_sequence_parallel" in said[name]
