"""``ds_hf.tensor_sequence_parallel`` where blocks are not called once each from the first to the last: against one
process with plain torch, fp64 gradients to 1e-12 of the largest, or refused by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from ds_hf.errors import ConfigError
from ds_hf.log import forget_said
from tests.contract.test_divided_tokens import KEY, assert_equal, engine_of, gradients_of, plain, samples
from tests.helpers.distributed import run_distributed
from tests.helpers.logs import Lines
from tests.helpers.tensor import Block, Fused, build, loss_of

ORDERS = {
    "the first dropped": [1, 2],
    "one between dropped": [0, 2],
    "one alone": [1],
    "each twice": [0, 0, 1, 1, 2, 2],
    "the last twice": [0, 1, 2, 2],
    "all twice": [0, 1, 2, 0, 1, 2],
}


class Ordered(Fused):
    """Calls blocks in ``order``, by ``call``; ``behind`` is computed of what each gives."""

    order: tuple[int, ...] | list[int] = (0, 1, 2)
    call: Any = staticmethod(lambda block, x: block(x))
    behind: Any = staticmethod(lambda x: x)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embed(input_ids)
        for index in self.order:
            x = self.behind(self.call(self.blocks[index], x))
        if labels is None:
            return x
        return cross_entropy(self.lm_head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def ordered(**more: Any) -> Ordered:
    model = build("fused").double()
    model.__class__ = Ordered
    for name, value in more.items():
        setattr(model, name, value)
    return model  # type: ignore[return-value]


def checkpointed(reentrant: bool) -> Callable[..., Any]:
    return lambda block, x: checkpoint(block, x, use_reentrant=reentrant)


def of_deepspeed(block: nn.Module, x: Tensor) -> Any:
    import deepspeed

    return deepspeed.checkpointing.checkpoint(block, x)


def partly_without_gradients(block: nn.Module, x: Tensor) -> Any:
    with torch.set_grad_enabled(getattr(block, "trained", True)):
        return block(x)


def models() -> Iterator[tuple[str, Ordered]]:
    for name, order in ORDERS.items():
        yield name, ordered(order=order)
    yield "checkpoint around a block", ordered(call=checkpointed(False))
    yield "reentrant checkpoint", ordered(call=checkpointed(True))
    yield "deepspeed.checkpointing", ordered(call=of_deepspeed)
    model = ordered(call=partly_without_gradients)
    model.blocks[0].trained = model.blocks[1].trained = False  # type: ignore[assignment]
    yield "the first ones without gradients", model


def called() -> dict[str, Any]:
    found = {}
    for name, model in models():
        engine = engine_of(model, "fused", 2, 1)
        found[name] = gradients_of(engine)[1]
        engine.destroy()
    return found


def test_blocks_called_otherwise() -> None:
    found = run_distributed(called, 2, timeout=120)
    for name, model in models():
        expected = plain(model)
        for rank in found:
            for missing in rank[name].keys() - expected.keys():  # dropped
                assert not rank[name].pop(missing).any()
            assert_equal(rank[name], expected)


class AsTransformersDid(Block):
    """Computed again from within its call, hooks and all: blocks of transformers 5.0 to 5.19."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(partial(super().__call__, **kwargs), *args, use_reentrant=False)


def computed_again() -> Iterator[tuple[str, Ordered]]:
    yield "around", ordered(call=checkpointed(False))
    model = ordered()
    for block in model.blocks:
        block.__class__ = AsTransformersDid
    yield "within", model


def compiled() -> dict[str, Any]:
    """Gradients of two steps, and how many graphs there were after each."""
    found = {}
    for name, model in computed_again():
        torch.compiler.reset()
        engine = engine_of(model, "fused", 2, 1)
        engine.compile(backend="aot_eager")
        steps = [(gradients_of(engine)[1], engine.compile_report().graphs) for _ in range(2)]
        found[name] = steps
        engine.destroy()
    return found


@pytest.mark.slow
def test_blocks_that_are_compiled_and_computed_again() -> None:
    """What a block gives is tried out eagerly at first, which a checkpoint has to repeat as it was."""
    ran = run_distributed(compiled, 2, timeout=120)
    for name, model in computed_again():
        for step in range(2):
            expected = {key: value.clone() for key, value in plain(model).items()}
            for rank in ran:
                gradients, graphs = rank[name][step]
                assert_equal(gradients, expected, 1e-11)
                assert graphs > 0, "compiled behind the first micro-batch"
            with torch.no_grad():
                for param in model.parameters():
                    param -= param.grad
                    param.grad = None


def refused() -> dict[str, str]:
    said = {}
    ids = samples()[0]
    mixing = ordered(behind=lambda x: x - x.mean(1, keepdim=True))
    in_place = ordered(behind=lambda x: x.mul_(0.5))
    pooled = ordered(order=[0, 1])
    for name, model in (("mixing", mixing), ("in place", in_place), ("pooled", pooled)):
        engine = engine_of(model, "fused", 2, 1)
        with pytest.raises(ConfigError) as raised:
            engine(input_ids=ids)
        said[name] = str(raised.value)
    early = engine_of(ordered(order=[0, 1]), "fused", 2, 1)
    with pytest.raises(ValueError, match="batch_size") as failed:
        loss_of(early, ids)
    said["early"] = "\n".join(getattr(failed.value, "__notes__", ["/ds_hf/tensor_sequence_parallel: last block"]))
    return said


def test_a_part_that_the_model_would_go_on_with_is_refused() -> None:
    for said in run_distributed(refused, 2, timeout=60):
        assert "blocks.1 is not given what the block before it gave" in said["mixing"]
        assert "blocks.1 is not given what the block before it gave" in said["in place"]
        assert "the last block of blocks was not called behind the first one" in said["pooled"]
        assert "last block" in said["early"]
        for text in said.values():
            assert "/ds_hf/tensor_sequence_parallel" in text


def losses_between() -> list[tuple[float, float]]:
    """Of a model that is evaluated when a forward was interrupted, and when a checkpoint stopped a block early."""
    model: Any = build("llama").double().train()
    expected: Any = build("llama").double()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    engine = engine_of(model, "llama", 2, 1)
    found = []

    def evaluate(ids: Tensor) -> None:
        with torch.no_grad():
            found.append((loss_of(engine, ids).item(), loss_of(expected, ids).item()))

    def interrupt(module: nn.Module, args: Any) -> None:
        raise torch.OutOfMemoryError

    for ids in samples()[:2]:
        handle = engine.module.model.layers[1].mlp.down_proj.register_forward_pre_hook(interrupt)
        with pytest.raises(torch.OutOfMemoryError):
            loss_of(engine, ids)
        handle.remove()
        evaluate(ids)
        engine.backward(loss_of(engine, ids))
        evaluate(ids)
        engine.step()
    return found


def test_evaluation_behind_what_was_interrupted() -> None:
    for rank in run_distributed(losses_between, 2, timeout=60):
        assert len(rank) == 4
        for found, expected in rank:
            assert abs(found - expected) < 1e-12


def with_cache(model: Any, ids: Tensor, grad: bool) -> Tensor:
    """A loss of the second part of tokens that attend to the first."""
    with torch.set_grad_enabled(grad):
        first = model(input_ids=ids[:, :5], use_cache=True)
    second = model(input_ids=ids[:, 5:], past_key_values=first.past_key_values, use_cache=True)
    return second.logits.pow(2).mean() + (first.logits.pow(2).mean() if grad else 0.0)  # type: ignore[no-any-return]


def cached() -> dict[Any, list[float]]:
    found = {}
    for kind in ("llama", "gpt2"):  # which give the cache by name and by place
        for grad in (False, True):
            engine = engine_of(build(kind).double(), kind, 2, 1)
            found[kind, grad] = [with_cache(engine, ids, grad).item() for ids in samples()]
            engine.destroy()
    return found


def test_caches_of_earlier_calls() -> None:
    for rank in run_distributed(cached, 2, timeout=90):
        for (kind, grad), found in rank.items():
            expected = [with_cache(build(kind).double(), ids, grad).item() for ids in samples()]
            assert found == pytest.approx(expected, rel=1e-12)


def penalized(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of a loss and of the square of that gradient, by the hidden states that go in."""
    hidden = torch.randn(*ids.shape, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    loss = model(inputs_embeds=hidden.requires_grad_(), labels=ids).loss
    (first,) = torch.autograd.grad(loss, hidden, create_graph=True)
    (second,) = torch.autograd.grad(loss + first.pow(2).sum(), hidden)
    return first.detach(), second


def penalties() -> list[tuple[Tensor, Tensor]]:
    found = []
    for own in ({}, {"tensor_sequence_parallel": True}):
        engine = engine_of(build("llama", attn_implementation="eager").double(), "llama", 2, 1, own)
        found.append(penalized(engine, samples()[1]))
        engine.destroy()
    return found


def test_gradient_of_a_gradient() -> None:
    """Cut layers with and without divided tokens."""
    first, second = penalized(build("llama", attn_implementation="eager").double(), samples()[1])
    for rank in run_distributed(penalties, 2, timeout=60):
        for found in rank:
            assert_equal({"first": found[0], "second": found[1]}, {"first": first, "second": second})


# -- losses on what is between two blocks ------------------------------------------------------------------------------


def with_losses_of_parts() -> dict[Any, str]:
    """What is said at the third step, when a loss on hidden states of a block begins that a hook keeps, and with hooks
    that keep nothing or change what the next block gets."""
    said: dict[Any, str] = {}
    for name, index in [("look", 1), ("change", 1), ("keep", 0), ("keep", 1), ("keep", 2), ("keep before", 1)]:
        model: Any = build("llama").double().train()
        if index == 1:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        engine = engine_of(model, "llama", 2, 1)
        kept: list[Tensor] = []

        def hook(module: nn.Module, args: Any, output: Any, name: str = name, kept: list[Tensor] = kept) -> Any:
            hidden = output[0] if isinstance(output, tuple) else output
            kept.append(hidden)
            if name == "change":
                return (hidden * 2, *output[1:]) if isinstance(output, tuple) else hidden * 2
            return None

        def before(module: nn.Module, args: Any, kept: list[Tensor] = kept) -> None:
            kept.append(args[0])

        for step, ids in enumerate(samples()):
            layer = engine.module.model.layers[index]
            if step == 2:
                layer.register_forward_pre_hook(before) if name == "keep before" else layer.register_forward_hook(hook)
            loss = loss_of(engine, ids)
            try:
                engine.backward(loss + kept[0].pow(2).mean() if step == 2 and name.startswith("keep") else loss)
            except ConfigError as error:
                said[name, index] = str(error)
            else:
                engine.step()
                said[name, index] = ""
        engine.destroy()
    return said


def test_a_loss_on_a_part_is_refused_at_any_step() -> None:
    for said in run_distributed(with_losses_of_parts, 2, timeout=90):
        for (name, index), text in said.items():
            if name.startswith("keep"):
                given = index - (name == "keep before")
                assert f"model.layers.{given} gave hidden states of a part of the tokens" in text
            else:
                assert text == "", name


def hooks_of_libraries(folder: Path) -> list[str]:
    """What is said of those of the profiler, of the report, and of transformers, which stay after an evaluation that
    asked for hidden states."""
    logging.getLogger("ds_hf").addHandler(lines := Lines())
    ids, profiler = samples(1, length=10)[0], {"enabled": True, "output_file": str(folder / "flops")}
    for of in ("profiler", "report", "transformers"):
        own = {**KEY, "report": str(folder)} if of == "report" else KEY
        more = {"flops_profiler": profiler} if of == "profiler" else {}
        engine = engine_of(build("llama").double(), "llama", 2, 1, own, **more)
        if of == "transformers":
            engine.eval()
            with torch.no_grad():
                engine(input_ids=ids, output_hidden_states=True)
            assert engine.module.model.layers[0]._forward_hooks
        for _ in range(2):
            engine.train()
            engine.backward(loss_of(engine, ids))
            engine.step()
        engine.destroy()
    return [line for line in lines.texts if "parts of the tokens" in line]


def test_hooks_of_libraries_are_not_told(tmp_path: Path) -> None:
    assert run_distributed(hooks_of_libraries, 2, tmp_path, timeout=60) == [[], []]


def hooks_that_look() -> dict[str, str]:
    """What is said of a hook on each of these modules that was registered after a step; "" for nothing."""
    logging.getLogger("ds_hf").addHandler(lines := Lines())
    engine = engine_of(build("llama").double(), "llama", 2, 1)
    layer = engine.module.model.layers[1]
    seen: list[int] = []

    def logs_a_mean(module: nn.Module, args: Any, output: Any = None) -> None:
        seen.append(args[0].shape[:-1].numel())

    found, ids = {}, samples(1, length=10)[0]
    for name in ("nothing", "norm", "block", "mlp", "before the mlp", "o_proj", "head"):
        forget_said()
        lines.texts.clear()
        modules = {"norm": layer.input_layernorm, "block": layer, "o_proj": layer.self_attn.o_proj}
        module = {**modules, "head": engine.module.lm_head}.get(name, layer.mlp)
        before = name.startswith("before")
        handle = module.register_forward_pre_hook(logs_a_mean) if before else module.register_forward_hook(logs_a_mean)
        if name == "nothing":
            handle.remove()
        engine.backward(loss_of(engine, ids))
        handle.remove()
        found[name] = next((line for line in lines.texts if "parts of the tokens" in line), "")
    engine.destroy()
    return {**found, "tokens": str([seen[0] * 2 == ids.numel(), seen[2] == ids.numel(), seen[3] == ids.numel()])}


def test_hooks_that_see_a_part_are_told() -> None:
    found, _ = run_distributed(hooks_that_look, 2, timeout=60)  # the first process speaks
    name = "model.layers.1"
    for key, module in {"norm": f"{name}.input_layernorm", "block": name, "mlp": f"{name}.mlp"}.items():
        assert f"logs_a_mean) on {module} sees one of 2 parts of the tokens" in found[key], key
    assert f"on {name}.self_attn.o_proj sees one of 2 parts" in found["o_proj"]
    assert found["nothing"] == found["before the mlp"] == found["head"] == ""
    assert found["tokens"] == "[True, True, True]"  # of the norm; of the mlp's input, which is whole
