"""Divided sequences against one process: gradients in fp64, at every stage, alone and beside data parallelism.

The loss is the mean over all tokens that count, of which some processes have none; the gradient the mean over samples.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch import Tensor, nn

from ds_hf import initialize
from ds_hf.engine.comm.mesh import axis_of
from ds_hf.engine.parallel.sequence.losses import mean_over_tokens
from ds_hf.engine.zero.gather import GatheredParameters
from ds_hf.errors import ConfigError
from tests.helpers.distributed import run_distributed

TOKENS, MICRO, STEPS = 16, 2, 2
STAGES = (0, 1, 2, 3)


def model(kv_heads: int = 2, heads: int = 4, **more: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=heads,
        head_dim=8,
        num_key_value_heads=kv_heads,
        use_cache=False,
        attn_implementation="sdpa",
        **more,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).double()


def data(samples: int) -> tuple[Tensor, Tensor]:
    """``[steps, samples, micro, tokens]`` of ids and of labels: the first quarter of all counts for nothing, nor does
    the second half of some."""
    ids = torch.randint(0, 64, (STEPS, samples, MICRO, TOKENS), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    labels[..., : TOKENS // 4] = -100
    labels[1:, :, :, TOKENS // 2 :] = -100
    return ids, labels


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": stage},
        **more,
    }


def shifted(labels: Tensor) -> Tensor:
    return nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]


def weights(module: nn.Module) -> list[Tensor]:
    with GatheredParameters(list(module.parameters())):
        return [param.detach().cpu().clone() for param in module.parameters()]


def reference(samples: int, factor: float = 1.0, kv_heads: int = 2, device: str = "cpu") -> list[list[Tensor]]:
    """Gradients of each step, by one process."""
    net, found = model(kv_heads).to(device), []
    for ids, labels in zip(*data(samples), strict=True):
        net.zero_grad()
        for x, y in zip(ids.to(device), labels.to(device), strict=True):
            (net(input_ids=x, labels=y).loss * factor / samples).backward()
        found.append([param.grad.cpu().clone() for param in net.parameters() if param.grad is not None])
        with torch.no_grad():
            for param in net.parameters():
                assert param.grad is not None
                param -= param.grad
    return found


def gradient_errors(stage: int, sequence: int, kv_heads: int = 2, factor: float = 1.0, **more: Any) -> list[float]:
    """Relative error of the gradient, in the L2 norm, in each step."""
    samples = dist.get_world_size() // sequence
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"  # cosines of positions are in fp32, and differ there
    expected = reference(samples, factor, kv_heads, device)
    net = model(kv_heads)
    if more.pop("checkpointing", False):
        net.gradient_checkpointing_enable()
    engine, *_ = initialize(model=net, mesh_param=(samples, sequence), config=config(stage, **more))
    axis = axis_of(groups._get_sequence_parallel_group())
    assert (axis.world_size, engine.dp_world_size, engine.sequence_parallel_size) == (sequence, samples, sequence)
    mine = slice(axis.rank * TOKENS // sequence, (axis.rank + 1) * TOKENS // sequence)
    errors, before = [], weights(net)
    for (ids, labels), wanted in zip(zip(*data(samples), strict=True), expected, strict=True):
        x, y = ids[engine.mesh.sample_rank][:, mine], shifted(labels[engine.mesh.sample_rank])[:, mine].contiguous()
        x, y = x.to(device), y.to(device)
        loss = engine(input_ids=x, labels=y, shift_labels=y).loss
        engine.backward(mean_over_tokens(loss, (y != -100).sum(), axis))
        engine.step()
        after = weights(net)
        found = torch.cat([(a - b).flatten() for a, b in zip(before, after, strict=True)])
        target = torch.cat([each.flatten() for each in wanted])
        errors.append(float((found - target).norm() / target.norm()))
        before = after
    engine.destroy()
    return errors


def gradients_of_stages(stages: list[int], sequence: int, **more: Any) -> list[float]:
    return [error for stage in stages for error in gradient_errors(stage, sequence, **more)]


def test_gradients_of_two_processes_that_share_sequences() -> None:
    for errors in run_distributed(gradients_of_stages, 2, [0, 3], 2, timeout=90):
        assert max(errors) < 1e-12


def test_gradients_beside_data_parallelism_and_with_few_key_heads() -> None:
    for errors in run_distributed(gradients_of_stages, 4, [1, 2], 2, kv_heads=1, checkpointing=True, timeout=90):
        assert max(errors) < 1e-12


def test_the_sum_over_a_sequence_is_larger_by_its_processes() -> None:
    more = {"ds_hf": {"sequence_gradients": "sum"}}
    for errors in run_distributed(gradients_of_stages, 2, [1], 2, factor=2.0, **more):
        assert max(errors) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "shape"), list(product(STAGES, [(2, 2), (4, 2), (4, 4)])))
def test_gradients_of_every_mesh(stage: int, shape: tuple[int, int]) -> None:
    processes, sequence = shape
    for errors in run_distributed(gradients_of_stages, processes, [stage], sequence, kv_heads=1, timeout=120):
        assert max(errors) < 1e-12


def refused(implementation: str, **sizes: Any) -> str:
    net = model(**sizes)
    net.config._attn_implementation = implementation  # type: ignore[union-attr]
    with pytest.raises(ConfigError) as caught:
        initialize(model=net, config={**config(1), "sequence_parallel_size": dist.get_world_size()})
    return str(caught.value)


def refused_each() -> list[str]:
    kinds = ["linear_attention", "full_attention", "full_attention"]
    return [refused("eager"), refused("sdpa", layer_types=kinds), refused("sdpa", kv_heads=1, heads=1)]


def test_what_cannot_be_divided_is_refused() -> None:
    for eager, linear, heads in run_distributed(refused_each, 2):
        assert "eager attn_implementation isn't supported by Ulysses" in eager
        assert "does not support layers of type linear_attention" in linear
        assert "Attention head count 1 is not divisible by SP size 2" in heads
        assert "sp_size has to be one of 1" in heads


def losses(sequence: int, tree: dict[str, Any], *, checkpointing: bool = False) -> list[float]:
    """Of six micro-batches in fp32, and the weights' sum after them."""
    samples = dist.get_world_size() // sequence // max(tree.get("tensor_parallel", {}).get("autotp_size", 1), 1)
    net = model().float()
    if checkpointing:
        net.gradient_checkpointing_enable()  # type: ignore[operator]
    optimizer = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    engine, *_ = initialize(model=net, config={**config(1), **optimizer, "sequence_parallel_size": sequence, **tree})
    axis, found = engine.mesh.axis("sequence"), []
    mine = slice(axis.rank * TOKENS // sequence, (axis.rank + 1) * TOKENS // sequence)
    for ids, labels in zip(*data(samples), strict=True):
        x, y = ids[engine.mesh.sample_rank][:, mine], shifted(labels[engine.mesh.sample_rank])[:, mine].contiguous()
        for _ in range(2):
            loss = mean_over_tokens(engine(input_ids=x, labels=y, shift_labels=y).loss, (y != -100).sum(), axis)
            engine.backward(loss)
            engine.step()
            found.append(float(loss.detach()))
    engine.destroy()
    return found


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


HOST = {"device": "cpu"}
BESIDE: list[tuple[dict[str, Any], bool, float]] = [
    (zero(2, offload_optimizer=HOST), False, 1e-5),
    (zero(3, offload_optimizer=HOST, offload_param=HOST), False, 1e-5),
    ({**zero(3), "activation_checkpointing": {"cpu_checkpointing": True}}, True, 1e-5),
    ({**zero(3), "bf16": {"enabled": True}}, True, 1e-2),
    ({**zero(1), "bf16": {"enabled": True}, "seq_parallel_communication_data_type": "bf16"}, False, 1e-2),
    ({**zero(2), "fp16": {"enabled": True, "initial_scale_power": 8}}, False, 1e-2),
    ({**zero(1), "ds_hf": {"compile": "blocks"}}, False, 1e-5),
    (zero(3, mics_shard_size=2), False, 1e-5),
    (zero(3, zero_hpz_partition_size=2), False, 1e-5),
    ({**zero(0), "tensor_parallel": {"autotp_size": 2}}, False, 1e-5),
    ({**zero(3), "tensor_parallel": {"autotp_size": 2}}, False, 1e-5),
    ({**zero(3), "tensor_parallel": {"autotp_size": 2}, "ds_hf": {"tensor_sequence_parallel": True}}, False, 1e-5),
]


@pytest.mark.slow
@pytest.mark.parametrize(("tree", "checkpointing", "tolerance"), BESIDE)
def test_beside_other_features(tree: dict[str, Any], checkpointing: bool, tolerance: float) -> None:
    expected = run_distributed(losses, 2 if "tensor_parallel" in tree else 4, 2, zero(3), timeout=90)
    for rank, found in enumerate(run_distributed(losses, 4, 2, tree, checkpointing=checkpointing, timeout=150)):
        assert found == pytest.approx(expected[rank % len(expected)], rel=tolerance)
