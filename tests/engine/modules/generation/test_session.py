"""Generation between the steps of training: what it gives, and that training does not notice."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import peft
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hf import initialize
from ds_hf.engine.modules.generation import weights as weights_room
from ds_hf.engine.modules.generation.footprint import cache_nbytes, call_nbytes
from ds_hf.engine.zero.at_rest import is_ordinary
from ds_hf.errors import ConfigError, DsHfError
from tests.engine.modules.generation.common import (
    ADAMW,
    EOS,
    engine_of,
    live_bytes,
    llama,
    narrowed,
    plain_copy,
    tokens,
    train,
)
from tests.helpers.distributed import run_distributed
from tests.helpers.parity import base_config, full_weights

STAGES = (0, 1, 2, 3)
BF16 = {"bf16": {"enabled": True}}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False}
BLOCKWISE = {"hybrid_engine": {"enabled": True, "pin_parameters": False}}


def lora(model: Any, **more: Any) -> Any:
    torch.manual_seed(8)
    return peft.get_peft_model(model, peft.LoraConfig(**{**LORA, **more}))


def make(kind: str) -> Any:
    model = llama(tied=kind == "tied", dropout=0.2)
    return lora(model) if kind == "lora" else model


def generated(model: Any, seed: int, new: int, **how: Any) -> Tensor:
    found: Tensor = model.generate(input_ids=tokens(seed), max_new_tokens=new, **how)
    return found


# -- training goes on ------------------------------------------------------------------------------------------------


def losses_and_weights(
    stage: int, kind: str, between: Callable[[Any, int], None], **more: Any
) -> tuple[list[float], dict[str, Tensor]]:
    engine = engine_of(make(kind), stage, gradient_accumulation_steps=2, **more)
    torch.manual_seed(30 + dist.get_rank())
    losses = []
    for step in range(3):
        for index in range(2):
            ids = tokens(10 * step + index)
            loss = engine(input_ids=ids, labels=ids).loss
            between(engine, 100 + step)  # a graph is alive
            engine.backward(loss)
            between(engine, 200 + step)  # gradients are waiting
            engine.step()
            losses.append(loss.item())
        between(engine, 300 + step)
    found = losses, full_weights(engine.module)
    engine.destroy()
    return found


def nothing(engine: Any, seed: int) -> None:
    pass


def traces(engine: Any) -> list[Any]:
    """What generation has to leave alone."""
    hooks, module = engine.hooks, engine.module
    return [
        torch.get_rng_state().tolist(),
        [child.training for child in module.modules()],
        [None if p.grad is None else p.grad.clone().tolist() for p in module.parameters()],
        [(unit.depth, unit.awaited, len(unit.open_calls)) for unit in engine.units],
        [p.requires_grad for p in module.parameters()],
        len(hooks.handles),
        [len(child._forward_hooks) + len(child._forward_pre_hooks) for child in module.modules()],
        {unit.name: other.name for unit, other in hooks.prefetch._next.items()},
        [unit.name for unit in engine.reducer.used],
        [is_ordinary(p) or type(p) for p in module.parameters()],
    ]


def greedy_and_sampled(engine: Any, seed: int) -> None:
    before = traces(engine)
    new = 3 + 6 * dist.get_rank()
    engine.generate(tokens(seed), max_new_tokens=new, do_sample=False)
    engine.generate(tokens(seed), max_new_tokens=new, do_sample=True, top_k=9)
    engine.module.eval()  # in training mode transformers' generate draws dropout
    engine.module.generate(input_ids=tokens(seed), max_new_tokens=new, do_sample=False)
    engine.module.train()
    assert traces(engine) == before


def training_goes_on(kinds: tuple[str, ...], more: dict[str, Any], stages: tuple[int, ...] = STAGES) -> None:
    for kind in kinds:
        for stage in stages:
            print("case", kind, stage)
            alone = losses_and_weights(stage, kind, nothing, **more)
            between = losses_and_weights(stage, kind, greedy_and_sampled, **more)
            assert between[0] == alone[0]
            for name, value in alone[1].items():
                assert torch.equal(between[1][name], value), name


def test_training_goes_on_bit_for_bit() -> None:
    run_distributed(training_goes_on, 2, ("lora",), {}, (1, 3), timeout=90)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, BF16, BLOCKWISE], ids=["fp32", "bf16", "blockwise"])
def test_training_goes_on_bit_for_bit_everywhere(more: dict[str, Any]) -> None:
    run_distributed(training_goes_on, 2, ("untied", "tied", "lora"), more, timeout=180)


# -- what it gives ---------------------------------------------------------------------------------------------------


def equals_plain(kinds: tuple[str, ...], more: dict[str, Any], stages: tuple[int, ...] = STAGES) -> None:
    for kind in kinds:
        for stage in stages:
            print("case", kind, stage)
            engine = engine_of(make(kind), stage, **more)
            plain = narrowed(make(kind), torch.bfloat16 if "bf16" in more else torch.float32)
            for step in range(2):
                train(engine, step)
                plain = plain_copy(engine, plain)
                new = 4 + 9 * dist.get_rank()
                for how in ({"do_sample": False}, {"num_beams": 2, "do_sample": False}, {"do_sample": True}):
                    torch.manual_seed(40)
                    ours = engine.generate(tokens(50 + step), max_new_tokens=new, **how)
                    torch.manual_seed(40)
                    assert torch.equal(ours, plain.generate(input_ids=tokens(50 + step), max_new_tokens=new, **how))
                engine.eval()
                ours = generated(engine.module, 60 + step, new, do_sample=False)
                assert torch.equal(ours, generated(plain, 60 + step, new, do_sample=False))
                engine.train()
            engine.destroy()


def after_unfreezing(stage: int) -> None:
    """What was unfrozen amid the run has other buffers than when the engine was made."""
    model = llama()
    model.model.layers.requires_grad_(False)
    config = base_config(stage, optimizer=ADAMW)
    engine = initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    before = engine.generate(tokens(50), max_new_tokens=9, do_sample=False)
    train(engine, 0)
    model.requires_grad_(True)
    train(engine, 1)
    plain = plain_copy(engine, llama())
    ours = engine.generate(tokens(50), max_new_tokens=9, do_sample=False)
    assert torch.equal(ours, generated(plain, 50, 9, do_sample=False))
    assert not torch.equal(ours, before)
    engine.eval()
    assert torch.equal(generated(model, 60, 9, do_sample=False), generated(plain, 60, 9, do_sample=False))
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_it_generates_with_what_was_unfrozen(stage: int) -> None:
    run_distributed(after_unfreezing, 2, stage, timeout=30)


def test_it_gives_what_plain_generate_gives() -> None:
    run_distributed(equals_plain, 2, ("untied",), {}, (0, 3), timeout=90)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, BLOCKWISE], ids=["whole", "blockwise"])
def test_it_gives_what_plain_generate_gives_everywhere(more: dict[str, Any]) -> None:
    run_distributed(equals_plain, 2, ("untied", "tied", "lora"), more, timeout=180)


@pytest.mark.slow
def test_it_gives_what_plain_generate_gives_in_bf16() -> None:
    run_distributed(equals_plain, 2, ("untied", "tied"), BF16, timeout=180)


# -- ranks -----------------------------------------------------------------------------------------------------------


def ranks_run_alone() -> None:
    engine = engine_of(llama(), 3)
    plain = plain_copy(engine, llama())
    rank = dist.get_rank()
    for _ in range(2):
        with engine.generation():
            for call in range(1 + 2 * rank):  # not even equally often
                ours = engine.generate(tokens(call), max_new_tokens=2 + 5 * rank, do_sample=False)
                assert torch.equal(ours, generated(plain, call, 2 + 5 * rank, do_sample=False))
        assert all(param.numel() == 0 for param in engine.module.parameters())
        train(engine, 5)
        plain = plain_copy(engine, plain)


def test_ranks_run_alone_in_a_session() -> None:
    run_distributed(ranks_run_alone, 2)


def full_on_one_rank() -> None:
    """One rank has no room: all gather block by block, and those that have finished run on with the others."""
    engine = engine_of(llama(), 3)
    plain = plain_copy(engine, llama())
    rank = dist.get_rank()
    free = weights_room.free_nbytes
    with patch.object(weights_room, "free_nbytes", lambda device: 0 if rank else free(device)):
        with engine.generation(keep=True):
            assert all(param.numel() == 0 for param in engine.module.parameters())
            ours = engine.generate(tokens(1), max_new_tokens=3 + 8 * rank, do_sample=False)
        theirs = generated(engine.module, 1, 3 + 8 * rank, do_sample=False)
    expected = generated(plain, 1, 3 + 8 * rank, do_sample=False)
    assert torch.equal(ours, expected)
    assert torch.equal(theirs, expected)


def test_where_one_rank_has_no_room_all_gather_block_by_block() -> None:
    run_distributed(full_on_one_rank, 2)


def steps_inside() -> None:
    """Steps inside a session train, and the session sees their weights at the same addresses."""
    alone, engine = engine_of(llama(), 3), engine_of(llama(), 3)
    for step in range(3):
        train(alone, step)
    with engine.generation(keep=True):
        places = [param.data_ptr() for param in engine.module.parameters()]
        for step in range(3):
            train(engine, step)
            ours = engine.generate(tokens(9), max_new_tokens=5, do_sample=False)
            assert [param.data_ptr() for param in engine.module.parameters()] == places
            whole = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
            plain = llama().eval()
            plain.load_state_dict(whole, strict=False)
            assert torch.equal(ours, generated(plain, 9, 5, do_sample=False))
    with engine.generation(keep=True):
        assert [param.data_ptr() for param in engine.module.parameters()] == places
    expected = full_weights(alone.module)
    for name, value in full_weights(engine.module).items():
        assert torch.equal(value, expected[name]), name
    held = sum(buffer.nbytes for unit in engine.units for buffer in unit.buffers)
    engine.release_generation()
    assert sum(buffer.nbytes for unit in engine.units for buffer in unit.buffers) < held
    train(engine, 4)
    train(alone, 4)
    assert torch.equal(full_weights(engine.module)["lm_head.weight"], full_weights(alone.module)["lm_head.weight"])


def test_steps_inside_a_session() -> None:
    run_distributed(steps_inside, 2)


# -- memory ----------------------------------------------------------------------------------------------------------


def alternations(count: int, stage: int, adapters: bool) -> list[int]:
    engine = engine_of(lora(llama()) if adapters else llama(), stage)
    seen = []
    for step in range(count):
        with engine.generation(keep=step % 2 == 0):
            engine.generate(tokens(step), max_new_tokens=3, do_sample=step % 3 == 0)
        train(engine, step)
        if step in (3, 4, count - 2, count - 1):
            seen.append(live_bytes())
    return seen


@pytest.mark.parametrize(
    ("count", "stage", "adapters"),
    [
        (10, 3, False),
        pytest.param(50, 3, False, marks=pytest.mark.slow),
        pytest.param(50, 1, True, marks=pytest.mark.slow),
    ],
)
def test_alternations_take_no_more_memory(count: int, stage: int, adapters: bool) -> None:
    for seen in run_distributed(alternations, 2, count, stage, adapters, timeout=90):
        assert max(seen) - min(seen) < 4096, seen  # lists of torch's own grow by a few numbers


# -- LoRA ------------------------------------------------------------------------------------------------------------


class Watch:
    """A stopping criterion that never stops: looks at the model in the middle of a call."""

    def __init__(self, model: Any) -> None:
        self.model, self.merged = model, None

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.merged = [m.merged for m in self.model.modules() if hasattr(m, "merged_adapters") and hasattr(m, "lora_A")]
        return torch.zeros(len(input_ids), dtype=torch.bool)


def adapters_are_merged(options: dict[str, Any]) -> None:
    for stage in STAGES:
        engine = engine_of(lora(llama(), **options), stage, **BF16)
        train(engine, 0)
        before = full_weights(engine.module)
        places = [param.data_ptr() for param in engine.module.parameters()]
        watch = Watch(engine.module)
        engine.generate(tokens(1), max_new_tokens=3, do_sample=False, stopping_criteria=[watch])
        assert watch.merged
        assert all(watch.merged)
        assert not any(m.merged_adapters for m in engine.module.modules() if hasattr(m, "merged_adapters"))
        for name, value in full_weights(engine.module).items():
            assert torch.equal(value, before[name]), name
        assert [param.data_ptr() for param in engine.module.parameters()] == places
        with engine.module.disable_adapter():  # a reference model, as TRL computes it
            engine.generate(tokens(1), max_new_tokens=3, do_sample=False, stopping_criteria=[watch])
        assert not any(watch.merged)
        engine.fuse_lora_weight()
        assert all(m.merged for m in engine.module.modules() if hasattr(m, "lora_A") and hasattr(m, "merged"))
        engine.unfuse_lora_weight()
        for name, value in full_weights(engine.module).items():
            assert torch.equal(value, before[name]), name
        engine.destroy()


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"use_dora": True}, marks=pytest.mark.slow)], ids=["lora", "dora"]
)
def test_adapters_are_merged_for_the_call_and_weights_are_the_same_afterwards(options: dict[str, Any]) -> None:
    run_distributed(adapters_are_merged, 2, options, timeout=90)


def adapter_below_a_tied_head() -> None:
    """Merged into the embedding it would be in the head as well."""
    engine = engine_of(lora(llama(tied=True), target_modules=["embed_tokens"]), 3)
    watch = Watch(engine.module)
    ours = engine.generate(tokens(1), max_new_tokens=4, do_sample=False, stopping_criteria=[watch])
    assert not any(watch.merged or [])
    plain = plain_copy(engine, lora(llama(tied=True), target_modules=["embed_tokens"]))
    assert torch.equal(ours, plain.generate(input_ids=tokens(1), max_new_tokens=4, do_sample=False))


@pytest.mark.slow
def test_adapters_of_tied_weights_stay_beside_them() -> None:
    run_distributed(adapter_below_a_tied_head, 2)


# -- random numbers --------------------------------------------------------------------------------------------------


def random_numbers() -> None:
    engine = engine_of(llama(), 2)
    prompt = tokens(1)

    def sample() -> list[list[int]]:
        return engine.generate(prompt, max_new_tokens=12, do_sample=True, eos_token_id=None).tolist()

    torch.manual_seed(1)
    state = torch.get_rng_state()
    first, second = sample(), sample()
    assert torch.equal(torch.get_rng_state(), state)
    assert first != second  # two calls do not draw the same
    torch.manual_seed(1)
    assert [sample(), sample()] == [first, second]  # but after seeding they do
    torch.rand(3)
    assert sample() not in (first, second)


def test_sampling_has_a_stream_of_its_own() -> None:
    run_distributed(random_numbers, 1)


# -- bad input and faults --------------------------------------------------------------------------------------------


class Fails:
    """A stopping criterion that raises."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        raise ValueError("in the middle")


@contextmanager
def refused(what: str) -> Iterator[None]:
    with pytest.raises(DsHfError, match=what):
        yield


def faults() -> None:
    limits = {"enabled": True, "max_out_tokens": 16}
    for stage in STAGES:
        alone, engine = engine_of(llama(), stage), engine_of(llama(), stage, hybrid_engine=limits)
        train(alone, 0)
        train(engine, 0)
        with pytest.raises(ValueError, match="in the middle"):
            engine.generate(tokens(1), max_new_tokens=3, stopping_criteria=[Fails()])
        assert engine.module.training
        with refused("16: raise it, or give a shorter prompt"):
            engine.generate(tokens(1), max_new_tokens=10)
        with refused("cache_implementation is 'offloaded'.*remove it"):
            engine.generate(tokens(1), max_new_tokens=3, cache_implementation="offloaded")
        engine.generate(tokens(1), max_new_tokens=9)
        train(alone, 1)
        train(engine, 1)
        expected = full_weights(alone.module)
        assert all(torch.equal(value, expected[name]) for name, value in full_weights(engine.module).items())
        engine.parked.add("lp_params")
        with refused("reload_states"):
            engine.generate(tokens(1), max_new_tokens=3)
        engine.parked.clear()
        copied = copy.deepcopy(engine.module) if stage < 3 else None  # a copy is no engine's
        engine.destroy()
        with refused("destroyed"):
            engine.generate(tokens(1), max_new_tokens=3)
        if copied is not None:
            copied.generate(input_ids=tokens(1), max_new_tokens=3)
    plain = engine_of(nn.Linear(4, 4), 0)
    with refused("Linear has none"):
        plain.generate(tokens(1))
    with pytest.raises(ConfigError, match="inference_tp_size"):
        engine_of(llama(), 0, hybrid_engine={"enabled": True, "inference_tp_size": 2})


def test_what_cannot_be_is_told_and_leaves_the_engine_as_it_was() -> None:
    run_distributed(faults, 2, timeout=90)


def ends_at_eos() -> None:
    """Rows that end early are padded, and ranks stop by themselves."""
    engine = engine_of(llama(), 3)
    plain = plain_copy(engine, llama())
    prompt = tokens(3, rows=3)
    prompt[0, :3] = 0
    mask = (prompt != 0).long()
    how = {"attention_mask": mask, "max_new_tokens": 30, "eos_token_id": [EOS, 7, 9, 11, 13], "do_sample": False}
    assert torch.equal(engine.generate(prompt, **how), plain.generate(input_ids=prompt, **how))


def test_padded_prompts_and_rows_that_end_early() -> None:
    run_distributed(ends_at_eos, 2)


# -- with a decoder --------------------------------------------------------------------------------------------------


def decodes(stages: tuple[int, ...]) -> None:
    """With a static cache, which on the CPU is asked for: whole weights, sessions, LoRA; never block by block."""
    graph = {"enabled": True, "enable_cuda_graph": True}
    for stage in stages:
        engine = engine_of(lora(llama()), stage, hybrid_engine=graph)
        plain = plain_copy(engine, lora(llama()))
        new = 4 + 9 * dist.get_rank()
        for step in range(3):
            places = [param.data_ptr() for param in engine.module.parameters()]
            with engine.generation():
                ours = engine.generate(input_ids=tokens(9), max_new_tokens=new, do_sample=False)
                (decoder,) = engine.generating._decoders.values()
                assert decoder.last.way == "static"
                held = [param.data_ptr() for param in engine.module.parameters()]
            assert torch.equal(ours, generated(plain, 9, new, do_sample=False))
            engine.eval()
            assert torch.equal(generated(engine.module, 9, new, do_sample=False), ours)
            engine.train()
            with engine.generation():
                assert [param.data_ptr() for param in engine.module.parameters()] == held
            assert [param.data_ptr() for param in engine.module.parameters()] == places
            train(engine, step)
            plain = plain_copy(engine, plain)
        engine.destroy()


def test_a_decoder_is_used_where_weights_are_whole() -> None:
    run_distributed(decodes, 2, (3,))


def test_sizes_of_layers_that_differ_are_the_largest() -> None:
    """Gemma 4 and Gemma 3n: heads, and widths of MLPs, of each layer."""
    transformers = pytest.importorskip("transformers", "5.20")
    sizes = {"hidden_size": 32, "num_attention_heads": 8, "num_hidden_layers": 2, "head_dim": 4}
    layers = {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0}
    widest = transformers.Gemma4TextConfig(
        **sizes, **layers, num_key_value_heads=2, num_global_key_value_heads=1, global_head_dim=16
    )
    assert cache_nbytes(widest, 3, 10, torch.bfloat16) == 2 * 2 * 3 * 10 * 2 * 16 * 2
    model = torch.nn.Module()
    model.config = SimpleNamespace(hidden_size=32, intermediate_size=[48, 64], vocab_size=100)  # type: ignore[assignment]
    prompt = torch.zeros(3, 5, dtype=torch.long)
    assert call_nbytes(model, (prompt,), {}, torch.float32) == 3 * 5 * (8 * 32 + 3 * 64) * 4 + 3 * 4 * 3 * 100
