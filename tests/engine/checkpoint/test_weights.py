"""``engine.named_weights``: whole weights by name, at every stage, of cut and of tied layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_hf.errors import DsHfError
from tests.engine.modules.generation.common import engine_of, llama, train
from tests.helpers.distributed import run_distributed
from tests.helpers.parity import full_weights


def equals_state_dict(stages: tuple[int, ...]) -> None:
    for stage in stages:
        for tied in (False, True):
            model = llama(tied=tied)
            model.register_buffer("told", torch.arange(3.0))
            engine = engine_of(model, stage, bf16={"enabled": True})
            train(engine, 1)
            expected = full_weights(engine.module)
            found = dict(engine.named_weights(torch.float32))  # held beyond the end
            assert set(found) == set(engine.module.state_dict())
            for name, value in expected.items():
                assert found[name].dtype == torch.float32
                assert torch.equal(found[name], value.float()), name
            assert (found["lm_head.weight"] is found["model.embed_tokens.weight"]) == tied
            assert torch.equal(found["told"], torch.arange(3.0))
            other = llama(tied=tied)
            other.register_buffer("told", torch.zeros(3))
            other.load_state_dict(dict(engine.named_weights()))
            assert dict(engine.named_weights())["lm_head.weight"].dtype == torch.bfloat16
            if stage == 3:
                assert all(param.numel() == 0 for param in engine.module.parameters())
            train(engine, 2)
            engine.destroy()


def test_names_and_values_are_those_of_the_state_dict() -> None:
    run_distributed(equals_state_dict, 2, (1, 3))


@pytest.mark.slow
def test_names_and_values_at_the_other_stages() -> None:
    run_distributed(equals_state_dict, 2, (0, 2))


def one_gather_a_unit() -> tuple[int, int]:
    from unittest.mock import patch

    from ds_hf.engine.comm import collectives

    engine = engine_of(llama(), 3)
    calls = []
    whole = collectives.all_gather

    def counted(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        whole(*args, **kwargs)

    with patch.object(collectives, "all_gather", counted):
        list(engine.named_weights())
    return len(calls), sum(len(unit.buffers) for unit in engine.units)


def test_one_gather_a_unit() -> None:
    for calls, buffers in run_distributed(one_gather_a_unit, 2):
        assert calls == buffers


def cut(stage: int) -> None:
    """Tensor parallelism over two processes, of a model that has its values from the same seed."""
    more = {"tensor_parallel": {"autotp_size": 2}}
    expected = llama().state_dict()
    engine = engine_of(llama(), stage, **more)
    found = dict(engine.named_weights())
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_layers_that_tensor_parallelism_has_cut() -> None:
    run_distributed(cut, 2, 1)


@pytest.mark.slow
def test_layers_that_both_have_cut() -> None:
    run_distributed(cut, 4, 3, timeout=120)


def frozen(stage: int) -> None:
    """A reference model: no optimizer; its weights may leave the device and come back."""
    engine = engine_of(llama(), stage, optimizer=None)
    ids = torch.arange(6, 14)[None]
    with torch.no_grad():
        before = engine(input_ids=ids).logits
    engine.offload_states(include=["lp_params", "optim_states"])
    with pytest.raises(DsHfError, match="reload_states"):
        engine(input_ids=ids)
    with pytest.raises(DsHfError, match="reload_states"):
        engine.named_weights()
    with pytest.raises(DsHfError, match="reload_states"):
        engine.module.generate(input_ids=ids, max_new_tokens=2)
    engine.reload_states()
    with torch.no_grad():
        assert torch.equal(engine(input_ids=ids).logits, before)
    engine.offload_states()
    engine.reload_states(non_blocking=True)
    engine.generate(ids, max_new_tokens=2)


@pytest.mark.parametrize("stage", [0, 3])
def test_engines_without_an_optimizer_are_parked_too(stage: int) -> None:
    run_distributed(frozen, 2, stage)
