"""Sequences padded around blocks: gradients of the model as it is, and what cannot be padded is left alone and told.

Blocks stand in for their own graphs here; ``tests/gpu/test_capturing.py`` has the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_hf.engine.modules.capturing import Captures
from ds_hf.engine.modules.padding import Padding
from ds_hf.log import forget_said
from tests.engine.modules.test_compiling import make
from tests.helpers.distributed import run_distributed

MULTIPLE, LENGTH = 16, 21
SIZES: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 32, "use_cache": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    forget_said()
    yield
    torch._dynamo.reset()


def llama(**more: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **more}))


def gemma(**more: Any) -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**{**SIZES, **more}, head_dim=8, sliding_window=8, layer_types=kinds))


def gptj() -> Any:
    """Rotations are read from a table of exactly as many positions as a batch may have."""
    from transformers import GPTJConfig, GPTJForCausalLM

    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LENGTH, "rotary_dim": 4, "vocab_size": 99}
    return GPTJForCausalLM(GPTJConfig(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False))


def bloom() -> Any:
    """Slopes of attention are an input of its blocks."""
    from transformers import BloomConfig, BloomForCausalLM

    return BloomForCausalLM(BloomConfig(vocab_size=99, hidden_size=32, n_layer=2, n_head=4, use_cache=False))


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    tokens = {"decoder_start_token_id": 0, "pad_token_id": 0}
    return T5ForConditionalGeneration(T5Config(**sizes, **tokens, dropout_rate=0.0, use_cache=False))


def bert() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**{key: value for key, value in SIZES.items() if key != "use_cache"}, **off))


def mpt() -> Any:
    """Its masks say what is hidden, not what is seen."""
    from transformers import MptConfig, MptForCausalLM

    return MptForCausalLM(MptConfig(vocab_size=99, d_model=32, n_layers=2, n_heads=4, use_cache=False))


def batch(masked: str | None, rows: int = 3) -> dict[str, Tensor]:
    ids = torch.randint(1, 99, (rows, LENGTH), generator=torch.Generator().manual_seed(1))
    if masked is None:
        return {"input_ids": ids, "labels": ids}
    mask = torch.ones_like(ids)
    mask[0, slice(15, None) if masked == "right" else slice(5)] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def grads(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    model.zero_grad()
    model(**inputs).loss.backward()
    return [torch.zeros(()) if param.grad is None else param.grad.clone() for param in model.parameters()]


def pad_blocks(model: nn.Module, padding: Padding) -> list[int]:
    """The lengths that blocks are called with from now on, each through ``padding``."""
    seen: list[int] = []
    lists = (part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part) == 2)
    for block in [block for blocks in lists for block in blocks]:
        captures, own = Captures(lambda: None), block.forward
        captures.padding = padding

        def captured(*args: Any, own: Callable[..., Any] = own, **kwargs: Any) -> Any:
            seen.append((args[0] if args else kwargs["hidden_states"]).shape[1])
            return own(*args, **kwargs)

        block.__dict__["forward"] = captures.around(block, captured, own, own)
    return seen


@pytest.mark.parametrize(
    ("build", "masked"),
    [(build, masked) for build in (llama, gemma, gptj, t5) for masked in (None, "right", "left")]
    + [(bloom, None), (bloom, "right"), (bert, "right"), (bert, "left")],
)
def test_gradients_are_those_of_the_batch_as_it_is(build: Callable[[], Any], masked: str | None) -> None:
    torch.manual_seed(0)
    model = build().double().train()
    plain = grads(model, batch(masked))
    state = torch.get_rng_state()
    seen = pad_blocks(model, Padding(MULTIPLE))
    padded = grads(model, batch(masked))
    if build is t5:
        assert seen.count(32) > 2  # parts of its blocks, too, and not those of an encoder without a mask
    else:
        assert seen == [32, 32]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(part.training for part in model.modules())
    for one, other in zip(plain, padded, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-7, atol=1e-7)  # rotations and masks are of 32 bits


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["cohere2", "deepseek_v3", "exaone4", "gemma2", "glm4", "gpt_oss", "granite", "jamba", "lfm2", "llama4_text",
     "modernbert-decoder", "nemotron", "olmo2", "phi3", "qwen3_next", "rwkv", "smollm3", "starcoder2", "xglm"],
)  # fmt: skip
def test_types_of_transformers(kind: str) -> None:
    """States, convolutions and experts too. Of all 150 causal types that can be made small 124 are padded and right;
    the others are told (2026-11-30, transformers 5.23)."""
    from tests.tools.families import build

    model = build(kind)
    inputs = batch(None)
    inputs = {name: value % 90 + 3 for name, value in inputs.items()}
    plain = grads(model, inputs)
    seen = pad_blocks(model, Padding(MULTIPLE))
    padded = grads(model, inputs)
    assert seen.count(32) >= 2
    for one, other in zip(plain, padded, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)


class Counting(nn.Module):
    """An MLP that trains something beside what it gives, as layers of experts do."""

    def __init__(self, own: nn.Module, how: str) -> None:
        super().__init__()
        self.own, self.how = own, how
        self.norm = nn.BatchNorm1d(32, track_running_stats=how == "batch norm")
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.how.endswith("batch norm"):
            x = self.norm(x.flatten(0, 1)).view_as(x)
        elif self.how == "a counter" and self.training:
            self.seen += x.shape[1]
        elif self.how == "a loss beside it":
            self.loss = x.square().mean()
        elif self.how == "a length":
            x = x * x.shape[1]
        elif self.how == "one length" and x.shape[1] != LENGTH:
            raise ValueError("I know one length")
        return self.own(x)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("bert", "depends on later ones"),
        ("mpt", "depends on later ones"),
        ("a cache", "model.config.use_cache = False"),
        ("hooks", "would see padding"),
        ("packed", "in another way where"),
        ("batch norm", "keeps what it has seen"),
        ("a batch's batch norm", "depends on later ones"),
        ("a counter", "keeps what it has seen"),
        ("a loss beside it", "keeps what it has seen"),
        ("a length", "depends on the length"),
        ("one length", "fails with twice the length (ValueError: I know one length)"),
    ],
)
def test_what_is_left_as_it_is(case: str, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = {"bert": bert, "mpt": mpt}.get(case, llama)().double().train()
    inputs: dict[str, Any] = batch(None)
    hooked: list[Any] = []
    if case == "a cache":
        inputs["use_cache"] = True
    elif case == "packed":
        inputs["cu_seq_lens_q"] = torch.tensor([0, 5, 63], dtype=torch.int32)
    elif case not in ("bert", "mpt"):
        for block in model.model.layers:
            if case == "hooks":
                block.self_attn.register_forward_hook(lambda module, args, output: hooked.append(args))
            else:
                block.mlp = Counting(block.mlp, case).double()
    plain = grads(model, inputs)
    seen = pad_blocks(model, Padding(MULTIPLE))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    found = grads(model, inputs)
    assert seen == [LENGTH, LENGTH]
    assert len(hooked) == (4 if case == "hooks" else 0)  # two blocks, twice: nothing is tried out before them
    assert all(map(torch.equal, found, plain))
    for name, buffer in model.named_buffers():
        if name.endswith("seen"):
            assert buffer - before[name] == (LENGTH if case == "a counter" else 0)
    assert reason in caplog.text
    assert "sequences are not padded for captured blocks" in caplog.text


class Recorded(nn.Module):
    """A causal block that counts the kinds of inputs its code is compiled for."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(x).cumsum(1)


def of(captures: Captures, block: Recorded, lengths: list[int]) -> tuple[list[int], int]:
    graphs: list[None] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(None)
        return graph.forward

    seen: list[int] = []
    compiled = torch.compile(block.forward, backend=count, dynamic=False)

    def captured(x: Tensor) -> Any:
        seen.append(x.shape[1])
        return compiled(x)

    forward = captures.around(block, captured, block.forward, block.forward)
    for length in lengths:
        for needs in (False, True):
            x = torch.randn(1, length, 4, requires_grad=needs)
            torch.testing.assert_close(forward(x), block(x))
    return seen, len(graphs)


def test_when_no_more_shapes_are_taken_longer_ones_serve() -> None:
    captures = Captures(lambda: None)
    captures.padding = Padding(4)
    seen, _ = of(captures, Recorded(), [30, 3, 5, 9, 13, 17, 21, 26, 34, 32, 23, 39])
    assert seen[::2] == [32, 4, 8, 12, 16, 20, 24, 28, 32, 24]  # for 34 and 39 none is long enough
    captures = Captures(lambda: None)
    captures.padding = Padding(8)
    seen, _ = of(captures, Recorded(), [8, 16, 24, 32, 40, 48, 56, 80, 60])
    assert seen[-2:] == [80, 80]


def test_each_shape_may_be_compiled_with_gradients_of_its_input_and_without() -> None:
    """The first block of a model with adapters has an input that needs none."""
    seen, graphs = of(Captures(lambda: None), Recorded(), [2, 3, 4, 5, 6, 7, 8, 9])
    assert len(seen) == 16
    assert graphs == 16  # torch's own limit is eight


def with_an_engine(stage: int) -> None:
    losses = []
    for padding in (None, Padding(8)):
        torch.manual_seed(0)
        engine = make(stage, llama(vocab_size=32, num_attention_heads=2), gradient_accumulation_steps=2)
        if padding is not None:
            engine.compiler.captures.asked, engine.compiler.captures.padding = True, padding
            engine.compile(backend="cudagraphs")  # as the configuration does on a GPU; here nothing is recorded
        losses.append([])
        for step, length in enumerate((5, 17, 8, 23)):
            ids = torch.arange(step, step + length)[None] % 32
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            losses[-1].append(loss.item())
        if padding is not None:
            assert padding._known == {8, 24}
        engine.destroy()
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("stage", [2, 3])
def test_an_engine(stage: int) -> None:
    run_distributed(with_an_engine, 1, stage)
