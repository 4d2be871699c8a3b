"""DeepSpeed's own layer and loss over divided sequences, against the whole."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.sequence import VocabParallelCrossEntropyLoss, configure_vocab_parallel_loss
from deepspeed.sequence.cross_entropy import (
    VocabParallelCausalLMLoss,
    validate_vocab_parallel_loss,
    vocab_parallel_cross_entropy,
    vocab_sequence_parallel_cross_entropy,
)
from deepspeed.sequence.layer import DistributedAttention, _SeqAllToAll
from deepspeed.utils import groups
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.helpers.distributed import run_distributed


def whole(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def part(tensor: Tensor, dim: int) -> Tensor:
    return tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()


def attention(batch_dim: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal; of the layout that ``DistributedAttention`` was given."""
    groups = query.shape[2] // key.shape[2]
    tensors = [query, *(each.repeat_interleave(groups, 2) for each in (key, value))]
    order = (0, 2, 1, 3) if batch_dim == 0 else (1, 2, 0, 3)
    found = torch.nn.functional.scaled_dot_product_attention(*(each.permute(order) for each in tensors), is_causal=True)
    return found.permute((0, 2, 1, 3) if batch_dim == 0 else (2, 0, 1, 3))


def difference(batch_dim: int, heads: int, kv_heads: int) -> float:
    sequence = 1 - batch_dim
    shape = [2, 2]
    shape[sequence] = 4 * dist.get_world_size()
    full = [whole(*shape, h, 8, seed=h + i).requires_grad_() for i, h in enumerate((heads, kv_heads, kv_heads))]
    expected = attention(batch_dim, *full)
    weight = whole(*expected.shape, seed=7)
    (expected * weight).sum().backward()
    mine = [part(each.detach(), sequence).requires_grad_() for each in full]
    layer = DistributedAttention(functools.partial(attention, batch_dim), dist.group.WORLD, gather_idx=sequence)
    got = layer(*mine, batch_dim)
    (got * part(weight, sequence)).sum().backward()
    found = [(got - part(expected.detach(), sequence)).abs().max()]
    for each, reference in zip(mine, full, strict=True):
        assert each.grad is not None
        assert reference.grad is not None
        found.append((each.grad - part(reference.grad, sequence)).abs().max())
    return float(torch.stack(found).max())


def differences() -> list[float]:
    return [
        difference(batch_dim, heads, kv_heads)
        for batch_dim in (0, 1)
        for heads, kv_heads in ((4, 4), (8, 2), (3, 3), (6, 3))  # the last two are divided unevenly
    ]


def test_distributed_attention() -> None:
    assert max(max(found) for found in run_distributed(differences, 2)) < 1e-12


def there_and_back() -> None:
    for shape, batch_dim in (((2, 4, 8, 16), 0), ((4, 2, 8, 16), 1)):
        given = whole(*shape, seed=dist.get_rank())
        heads = _SeqAllToAll.apply(dist.group.WORLD, given, 2, 0, batch_dim)
        assert heads.shape[2] == 8 // dist.get_world_size()
        assert torch.equal(_SeqAllToAll.apply(dist.group.WORLD, heads, 0, 2, batch_dim), given)
        for number in (3, 5):  # the first process has one more, and the way back is not told how many there are
            odd = given[:, :, :number]
            heads = _SeqAllToAll.apply(dist.group.WORLD, odd, 2, 0, batch_dim)
            assert heads.shape[2] == (number + 1 - dist.get_rank()) // 2
            assert torch.equal(_SeqAllToAll.apply(dist.group.WORLD, heads, 0, 2, batch_dim), odd)


def test_the_exchange_of_one_tensor() -> None:
    run_distributed(there_and_back, 2)


def losses(parts: str) -> dict[str, Any]:
    """Cross entropy of ``[tokens, batch, vocabulary]`` with tokens or the vocabulary divided."""
    n, rank = dist.get_world_size(), dist.get_rank()
    logits, target = whole(4 * n, 3, 10), torch.randint(0, 10, (4 * n, 3), generator=torch.Generator().manual_seed(1))
    target[1, 2] = -100
    reference = logits.clone().requires_grad_()
    expected = cross_entropy(reference.flatten(0, 1), target.flatten(), reduction="none").view(4 * n, 3)
    weight = whole(4 * n, 3, seed=5)
    (expected * weight).sum().backward()
    assert reference.grad is not None
    if parts == "tokens":
        mine = part(logits, 0).requires_grad_()
        found = vocab_sequence_parallel_cross_entropy(mine, part(target, 0), dist.group.WORLD)
        wanted = part(reference.grad, 0)
        mean = vocab_parallel_cross_entropy(mine, part(target, 0), sp_group=dist.group.WORLD)
    else:
        mine = part(logits, 2).requires_grad_()
        alone, _ = dist.new_subgroups(1)
        found = vocab_sequence_parallel_cross_entropy(mine, target, alone, tp_group=dist.group.WORLD)
        wanted = part(reference.grad, 2)
        mean = vocab_parallel_cross_entropy(mine, target, tp_group=dist.group.WORLD)
        with pytest.raises(ValueError, match="Target is out of range for vocabulary size 10"):
            vocab_parallel_cross_entropy(mine, target + 9, tp_group=dist.group.WORLD)
    (found * weight).sum().backward()
    assert mine.grad is not None
    assert found.dtype is torch.float64
    assert rank < n
    return {
        "loss": float((found - expected).detach().abs().max()),
        "gradient": float((mine.grad - wanted).abs().max()),
        "mean": float(mean.detach() - cross_entropy(logits.flatten(0, 1), target.flatten())),
    }


def losses_each() -> list[dict[str, Any]]:
    return [losses("tokens"), losses("vocabulary")]


def test_cross_entropy_of_divided_tokens_and_vocabulary() -> None:
    for rank in run_distributed(losses_each, 2):
        for found in rank:
            assert max(abs(value) for value in found.values()) < 1e-12, found


def losses_as_objects() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    logits = whole(2, 5, 6 * n)
    labels = torch.randint(0, 6 * n, (2, 5), generator=torch.Generator().manual_seed(1))
    labels[0, 1] = -100
    reference = logits.clone().requires_grad_()
    expected = cross_entropy(reference[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    expected.backward()
    assert reference.grad is not None
    mine = part(logits, 2).requires_grad_()

    model = nn.Module()
    model.loss_function = stock = nn.CrossEntropyLoss()  # a submodule, which a plain object cannot replace
    validate_vocab_parallel_loss(model)
    assert model.loss_function is stock
    head = SimpleNamespace(mp_group=dist.group.WORLD, vocab_start_index=6 * rank, vocab_end_index=6 * rank + 6)
    assert configure_vocab_parallel_loss(model, head) is model
    assert model._deepspeed_original_loss_function is stock
    loss = model.loss_function
    assert isinstance(loss, VocabParallelCausalLMLoss)
    found = loss(mine, labels, vocab_size=6 * n)
    found.backward()
    assert mine.grad is not None
    assert torch.allclose(found, expected, atol=1e-12)
    assert float((mine.grad - part(reference.grad, 2)).abs().max()) < 1e-12
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    assert torch.allclose(loss(mine, shift_labels=shifted), found, atol=1e-12)
    assert torch.allclose(loss(mine, labels, num_items_in_batch=4), expected * 7 / 4, atol=1e-12)
    with pytest.raises(ValueError, match="labels or shift_labels"):
        loss(mine)
    with pytest.raises(RuntimeError, match="another than in the first call"):
        loss(mine[..., :3], labels)
    module = VocabParallelCrossEntropyLoss(dist.group.WORLD, reduction="none")
    wanted = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(2, 5)
    assert torch.allclose(module(mine, labels), wanted, atol=1e-12)
    with pytest.raises(ValueError, match="global_vocab_size requires"):
        vocab_parallel_cross_entropy(mine, labels, dist.group.WORLD, global_vocab_size=6 * n)


def test_losses_of_a_divided_vocabulary_as_objects() -> None:
    run_distributed(losses_as_objects, 2)


def test_a_loss_that_cannot_be_replaced() -> None:
    class Fixed(nn.Module):
        loss_function = property(lambda self: None)

    for model in (nn.Linear(1, 1), Fixed()):
        with pytest.raises(ValueError, match="loss_function"):
            validate_vocab_parallel_loss(model)


def gradient_of_a_mean(gradients: str) -> float:
    import deepspeed

    n = dist.get_world_size()
    given, target = whole(1, 4 * n, 6), torch.randint(0, 10, (4 * n,), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    model = nn.Linear(6, 10, dtype=torch.float64)
    cross_entropy(model(given[0]), target).backward()
    assert model.weight.grad is not None
    wanted, model.weight.grad, model.bias.grad = model.weight.grad, None, None
    config = {"train_micro_batch_size_per_gpu": 1, "ds_hf": {"sequence_gradients": gradients}}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mesh_param=(1, n))
    before = model.weight.detach().clone()
    logits = engine(part(given, 1))[0]
    group = groups._get_sequence_parallel_group()
    engine.backward(vocab_parallel_cross_entropy(logits, part(target, 0), sp_group=group))
    engine.step()
    return float((before - model.weight.detach() - wanted).abs().max())


def gradients_of_means() -> list[float]:
    return [gradient_of_a_mean("mean"), gradient_of_a_mean("sum")]


def test_the_mean_over_divided_tokens_has_the_true_gradient_in_an_engine() -> None:
    assert max(max(found) for found in run_distributed(gradients_of_means, 2)) < 1e-12
