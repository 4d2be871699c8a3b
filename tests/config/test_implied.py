"""DeepCompile and Nebula: what they ask for is filled in under ds_hf's own keys, and said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ds_hf
from ds_hf.config import Config, ConfigError, load_config
from ds_hf.config.plan import plan_states
from ds_hf.config.types.root import OriginKind


def of(stage: int = 3, **sections: Any) -> Config:
    zero = {"stage": stage, **sections.pop("zero_optimization", {})}
    return load_config({"train_batch_size": 2, "zero_optimization": zero, **sections}, world_size=1)


def said(config: Config) -> dict[str, str]:
    return {warning.pointer: warning.message for warning in config.warnings}


def test_blocks_are_compiled() -> None:
    config = of(compile={"deepcompile": True})
    assert config.ds_hf.compile == "blocks"
    assert config.provenance["/ds_hf/compile"].kind is OriginKind.DERIVED
    assert "blocks are compiled, and gathers and reductions go on beside them" in said(config)["/compile/deepcompile"]
    older = of(compile={"disable": False, "backend": "inductor"})  # axolotl's zero1_torch_compile.json
    assert (older.ds_hf.compile, older.warnings) == (False, ())
    assert "engine.compile(backend=...)" in said(of(compile={"backend": "aot_eager"}))["/compile/backend"]
    off = of(compile={"deepcompile": False})
    assert (off.ds_hf.compile, off.warnings) == (False, ())
    kept = of(compile={"deepcompile": True}, ds_hf={"compile": False})
    assert kept.ds_hf.compile is False
    budget = of(compile={"deepcompile": True}, ds_hf={"activation_memory_budget": 0.5})
    assert budget.ds_hf.activation_memory_budget == 0.5  # needs compiled blocks


def test_what_the_file_says_itself_is_kept_and_told() -> None:
    asked = {"deepcompile": True, "offload_opt_states": True, "offload_parameters": True, "offload_activation": True}
    config = of(
        compile=asked,
        nebula={"enabled": True},
        zero_optimization={"offload_optimizer": {"device": "none"}, "offload_param": {"device": "cpu"}},
        activation_checkpointing={"cpu_checkpointing": False},
        ds_hf={"compile": False, "checkpoint": {"async": False}},
    )
    told = said(config)
    assert told["/compile/deepcompile"] == "no effect: ds_hf.compile is false, which is kept"
    kept = 'no effect: zero_optimization.offload_optimizer.device is "none", which is kept'
    assert told["/compile/offload_opt_states"] == kept
    assert told["/compile/offload_parameters"].startswith("zero_optimization.offload_param.device is set to cpu")
    assert told["/compile/offload_activation"].startswith("no effect: activation_checkpointing.cpu_checkpointing is fa")
    assert told["/nebula/enabled"] == "no effect: ds_hf.checkpoint.async is false, which is kept"
    assert (config.ds_hf.compile, config.activation_checkpointing.cpu_checkpointing) == (False, False)


def test_offloads_are_zeros() -> None:
    asked = {"deepcompile": True, "offload_opt_states": True, "offload_parameters": True, "offload_activation": True}
    config = of(compile=asked)
    plan = plan_states(config)
    assert (plan.optimizer.device, plan.parameters.device) == ("cpu", "cpu")
    assert config.activation_checkpointing.cpu_checkpointing
    assert "zero_optimization.offload_param.device is set to cpu" in said(config)["/compile/offload_parameters"]
    second = of(2, compile=asked)
    assert plan_states(second).optimizer.device == "cpu"
    assert second.zero_optimization.offload_param.device == "none"
    assert said(second)["/compile/offload_parameters"] == "no effect: it is for ZeRO stage 3, and this is 2"
    assert said(of(0, compile=asked))["/compile/offload_opt_states"].startswith(
        "no effect: it is for ZeRO stage 1 or 2"
    )
    given = of(compile=asked, zero_optimization={"offload_optimizer": {"device": "none"}})
    assert plan_states(given).optimizer.device == "device"
    off = of(compile={"offload_opt_states": True})
    assert plan_states(off).optimizer.device == "device"
    assert said(off)["/compile/offload_opt_states"] == "no effect: compile.deepcompile is not true"


def test_passes() -> None:
    assert of(compile={"deepcompile": True, "passes": ["z3"]}).ds_hf.compile == "blocks"
    for name, key in (("autosp", "sequence_parallel_size"), ("autotp", "tensor_parallel.autotp_size")):
        with pytest.raises(ConfigError, match=f"the pass {name} divides the model") as caught:
            of(compile={"deepcompile": True, "passes": ["z1", name]})
        assert caught.value.faults[0].pointer == "/compile/passes/1"
        assert caught.value.faults[0].fix == f"set {key}, or remove it"
    both = {"compile": {"deepcompile": True, "passes": ["autotp"]}, "tensor_parallel": {"autotp_size": 2}}
    assert load_config({**both, "train_batch_size": 2}, world_size=2).ds_hf.compile == "blocks"


@pytest.mark.parametrize("key", ["free_activation", "symmetric_memory", "debug_log", "sync_after_allgather"])
def test_what_has_no_effect_says_why(key: str) -> None:
    message = said(of(compile={"deepcompile": True, key: True}))[f"/compile/{key}"]
    assert message.startswith("no effect: ")
    assert len(message) > 30


def test_nebula() -> None:
    config = of(nebula={"enabled": True, "persistent_storage_path": "/data", "num_of_version_in_retention": 3})
    assert config.ds_hf.checkpoint.async_
    assert "and not by Nebula" in said(config)["/nebula/enabled"]
    assert said(config)["/nebula/persistent_storage_path"].startswith(
        "no effect: save_checkpoint writes into the folder"
    )
    assert not of(nebula={"enabled": False}).ds_hf.checkpoint.async_
    assert not of(nebula={"enabled": True}, ds_hf={"checkpoint": {"async": False}}).ds_hf.checkpoint.async_
    local = of(checkpoint={"use_node_local_storage": True})
    assert said(local)["/checkpoint/use_node_local_storage"].startswith("no effect: a checkpoint is one folder")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_engine_trains_as_without() -> None:
    def losses(**more: Any) -> tuple[list[float], int]:
        torch.manual_seed(0)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 3},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        }
        shape = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=2, **shape))
        engine = ds_hf.initialize(model=model, config={**config, **more})[0]
        if more:
            engine.compile()  # as DeepSpeed asks for; it is done already
        found = []
        for step in range(3):
            tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(step))
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        compiled = len(engine.compiler.compiled) if more else 0
        engine.destroy()
        return found, compiled

    plain, _ = losses()
    deep, compiled = losses(compile={"deepcompile": True, "offload_opt_states": True})
    assert deep == pytest.approx(plain, abs=1e-4)
    assert compiled == 2
