"""Losses of heads whose vocabulary is cut over the tensor axis: the logits are never gathered unless something looks.

fp64 gradients agree to 1e-12 of the largest with one process; the numbers of a model in fp32 as far as rounding goes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ds_hf import initialize
from ds_hf.engine.comm.mesh import axis_of
from ds_hf.engine.modules.tiling import loss as losses
from ds_hf.engine.modules.tiling.logits import PartialLogits
from ds_hf.engine.parallel.tensor.functions import Place
from tests.contract.test_tensor_parallel import config
from tests.helpers.distributed import run_distributed
from tests.helpers.tensor import VOCABULARY, batches_of, build, loss_of

ROWS, WIDTH = 12, 6
SGD = {"type": "SGD", "params": {"lr": 1.0}}


def sample(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight and bias of a head, and labels of which three do not count."""
    generator = torch.Generator().manual_seed(3)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((ROWS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    )
    labels = torch.randint(0, VOCABULARY, (ROWS,), generator=generator)
    labels[::4] = -100
    labels[1], labels[2] = 0, VOCABULARY - 1
    return hidden, weight, bias, labels


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def functions() -> dict[str, float]:
    """The farthest of losses and gradients from those of one process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    place = Place(axis_of(dist.group.WORLD, "tensor"), "lm_head", [None])
    own = slice(rank * VOCABULARY // size, (rank + 1) * VOCABULARY // size)
    apart = {}
    for name, dtype in (("rows", torch.float64), ("linear", torch.float32)):
        hidden, weight, bias, labels = sample(dtype)
        logits = F.linear(hidden, weight, bias)
        each = F.cross_entropy(logits, labels, reduction="none")
        factors = torch.arange(1, ROWS + 1, dtype=dtype)
        objective = (each * factors).sum() if name == "rows" else each.sum()
        expected = torch.autograd.grad(objective, [logits, hidden, weight, bias])
        if name == "rows":
            part = logits[:, own].detach().requires_grad_()
            # in several steps
            found = losses.rows_cross_entropy(part, labels, rows=5, place=place)
            apart["rows"] = relative(found, each)
            (grad,) = torch.autograd.grad((found * factors).sum(), part)
            apart["rows, gradient"] = relative(grad, expected[0][:, own])
            continue
        parts = [tensor[own].detach().requires_grad_() for tensor in (weight, bias)]
        losses._LOGITS_NBYTES, losses._LEAST_ROWS = 4 * len(parts[0]) * 5, 1
        found = losses.linear_cross_entropy(hidden, parts[0], labels, parts[1], place=place)
        apart["linear"] = relative(found, each.sum())
        grads = torch.autograd.grad(found, [hidden, *parts])
        for which, grad, right in zip("hwb", grads, expected[1:], strict=True):
            apart[f"linear, {which}"] = relative(grad, right if which == "h" else right[own])
    return apart


def test_functions_against_one_process() -> None:
    for apart in run_distributed(functions, 2):
        assert max(apart["rows"], apart["rows, gradient"]) <= 1e-12, apart
        assert max(apart.values()) <= 2e-6, apart


def engine_of(kind: str = "llama", dtype: torch.dtype = torch.float32, stage: int = 1, **own: Any) -> Any:
    settings = config(kind, dist.get_world_size(), stage, optimizer=SGD, ds_hf=own)
    return initialize(model=build(kind).to(dtype), config=settings)[0]


def in_fp64() -> float:
    """The farthest gradient of a cut model from one process in fp64, with the loss in fp64 as well."""
    ids = batches_of(1, 1, 1)[0, 0, 0]
    reference = build("llama").double()
    logits = reference(input_ids=ids).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    engine = engine_of(dtype=torch.float64, stage=0)
    found = engine(input_ids=ids, labels=ids).logits
    assert isinstance(found, PartialLogits)
    engine.backward(losses.causal_lm_loss(found, ids, VOCABULARY))
    farthest = 0.0
    for (name, param), whole in zip(engine.module.named_parameters(), reference.parameters(), strict=True):
        grad = whole.grad
        assert grad is not None
        if grad.shape != param.shape:
            dim = next(dim for dim in (0, 1) if grad.shape[dim] != param.shape[dim])
            grad = grad.chunk(dist.get_world_size(), dim)[dist.get_rank()]
        ours = param.grad
        assert ours is not None, name
        farthest = max(farthest, relative(ours, grad))
    engine.destroy()
    return farthest


def test_gradients_of_a_model_in_fp64() -> None:
    for farthest in run_distributed(in_fp64, 2):
        assert farthest <= 1e-12


def ways() -> dict[str, Any]:
    """A model of transformers in every way that its loss and logits are asked for."""
    ids = batches_of(1, 1, 1)[0, 0, 0]
    labels = ids.clone()
    labels[:, :3] = -100
    count = torch.tensor(7)
    reference = build("llama")
    plain = reference(input_ids=ids, labels=labels)
    counted = reference(input_ids=ids, labels=labels, num_items_in_batch=count).loss
    found: dict[str, Any] = {}
    engine = engine_of(stage=0)
    outputs = engine(input_ids=ids, labels=labels)
    found["not gathered"] = isinstance(outputs.logits, PartialLogits) and outputs.logits.made is None
    found["loss"] = outputs.loss.item() == pytest.approx(plain.loss.item(), rel=1e-6)
    shifted = engine(input_ids=ids, labels=labels, shift_labels=F.pad(labels[:, 1:], (0, 1), value=-100)).loss
    found["shifted"] = shifted.item() == outputs.loss.item()
    again = engine(input_ids=ids, labels=labels, num_items_in_batch=count).loss
    found["counted"] = again.item() == pytest.approx(counted.item(), rel=1e-6)
    found["shape"] = outputs.logits.shape == plain.logits.shape
    found["logits"] = torch.allclose(outputs.logits.float(), plain.logits, atol=1e-5)
    found["best"] = torch.equal(outputs.logits.argmax(-1), plain.logits.argmax(-1))
    smooth = {"label_smoothing": 0.1}  # of logits that a script looks at
    ours = F.cross_entropy(engine(input_ids=ids, labels=ids).logits.flatten(0, 1), ids.flatten(), **smooth)
    theirs = F.cross_entropy(plain.logits.flatten(0, 1), ids.flatten(), **smooth)
    found["smoothed"] = ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    engine.backward(ours)
    theirs.backward()
    grad, weight = engine.module.lm_head.weight.grad, reference.lm_head.weight.grad
    assert weight is not None
    found["gradient of logits"] = relative(grad, weight.chunk(2)[dist.get_rank()]) < 1e-5
    with torch.no_grad():
        found["without gradients"] = type(engine(input_ids=ids, labels=labels).logits) is Tensor
    found["without labels"] = type(engine(input_ids=ids).logits) is Tensor
    engine.eval()
    evaluated = engine(input_ids=ids, labels=labels)
    found["evaluation"] = type(evaluated.logits) is Tensor
    found["its loss"] = evaluated.loss.item() == pytest.approx(plain.loss.item(), rel=1e-6)
    engine.destroy()
    found["given back"] = "_loss_function" not in engine.module.__dict__
    return found


def test_a_model_of_transformers() -> None:
    for found in run_distributed(ways, 2, timeout=60):
        assert all(found.values()), found


def trained(stage: int) -> dict[str, list[float]]:
    """Losses and norms of four steps with logits that are gathered, that are not, and in chunks."""
    found = {}
    losses._LOGITS_NBYTES, losses._LEAST_ROWS = 4 * VOCABULARY * 4, 1
    for name, own in (("partial", {}), ("chunked", {"chunked_loss": True}), ("gathered", {})):
        engine = engine_of(stage=stage, **own)
        if name == "gathered":
            for handle in engine.hooks.handles:
                if type(handle).__name__ == "PartialLoss":
                    handle.remove()
        found[name] = []
        for step in batches_of(4, 1, 1):
            loss = loss_of(engine, step[0, 0])
            engine.backward(loss)
            engine.step()
            found[name] += [float(loss.detach()), float(engine.get_global_grad_norm())]
        engine.destroy()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_with_and_without_gathered_logits(stage: int) -> None:
    for found in run_distributed(trained, 2, stage, timeout=90):
        assert found["partial"] == pytest.approx(found["gathered"], rel=1e-5)
        assert found["chunked"] == pytest.approx(found["gathered"], rel=1e-5)
