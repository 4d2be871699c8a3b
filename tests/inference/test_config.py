"""The keys of ``init_inference``: DeepSpeed's names, older ones, values in Python, and sentences for what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_hf.errors import ConfigError
from ds_hf.inference.config import InferenceConfig, load_inference_config


def test_defaults_are_deepspeeds() -> None:
    config = InferenceConfig()
    assert (config.dtype, config.tensor_parallel.tp_size, config.max_out_tokens) == ("fp16", 1, 1024)
    assert config.tensor_parallel.enabled
    assert (config.replace_with_kernel_inject, config.enable_cuda_graph, config.zero, config.checkpoint) == (
        False,
        False,
        {},
        None,
    )
    assert config.quant.weight.num_bits == 8
    assert config.quant_bits is None
    assert config.dict()["tensor_parallel"]["tp_grain_size"] == 64


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (torch.half, "fp16"),
        (torch.bfloat16, "bf16"),
        (torch.float, "fp32"),
        (torch.int8, "int8"),
        ("torch.bfloat16", "bf16"),
        ("half", "fp16"),
        ("fp32", "fp32"),
        ("float32", "fp32"),
        ("int4", "int4"),
    ],
)
def test_dtypes(given: Any, name: str) -> None:
    assert InferenceConfig(dtype=given).dtype == name


def test_older_names_and_objects() -> None:
    class Block(nn.Module):
        pass

    config = InferenceConfig(mp_size=2, kernel_inject=True, max_tokens=77, injection_dict={Block: ("a", "b")})
    assert (config.tensor_parallel.tp_size, config.replace_with_kernel_inject, config.max_out_tokens) == (2, True, 77)
    assert config.injection_policy == {Block: ("a", "b")}
    group = object()
    assert InferenceConfig(tp={"tp_size": 2, "tp_group": group}).tensor_parallel.tp_group is group
    assert InferenceConfig(dtype="int8", quant={"weight": {"num_bits": 4}}).quant_bits == 4


def test_a_file_and_keywords(tmp_path: Path) -> None:
    path = tmp_path / "inference.json"
    path.write_text('{"dtype": "bf16", "tensor_parallel": {"tp_size": 2}} // half of them')
    config = load_inference_config(str(path), {"max_out_tokens": 9})
    assert (config.dtype, config.tensor_parallel.tp_size, config.max_out_tokens) == ("bf16", 2, 9)
    assert load_inference_config(path, {"dtype": "bf16"}).dtype == "bf16"
    with pytest.raises(ValueError, match="Conflicting argument 'dtype' in 'config'"):
        load_inference_config({"dtype": "bf16"}, {"dtype": "fp16"})
    with pytest.raises(ValueError, match="expected string or dictionary, got"):
        load_inference_config(3, {})


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"dtype": "fp8"}, '"fp8" is not a choice'),
        ({"dtyp": "fp16"}, 'did you mean "dtype"'),
        ({"tensor_parallel": {"tp_size": 0}}, "0 is too small"),
        ({"tensor_parallel": {"tp_size": 2}, "mp_size": 4}, "older name of tensor_parallel.tp_size"),
        ({"use_triton": True}, "DeepSpeed's Triton kernels"),
        ({"moe": {"ep_size": 2}}, "experts are not divided"),
        ({"moe": True}, "experts are not divided"),
        ({"ep_size": 2}, "experts are not divided"),
        ({"save_mp_checkpoint_path": "/x"}, "read slice by slice"),
        ({"state_manager": {}}, "is of FastGen.*vLLM"),
        ({"deployment_name": "x"}, "is of MII.*vLLM"),
        ({"max_ragged_batch_size": 768}, "is of FastGen.*vLLM"),
        ({"replica_configs": []}, "is of MII, DeepSpeed's server.*vLLM"),
        ({"kv_cache_dtype": "fp8"}, "is of vLLM, a server"),
        ({"max_out_tokens": 0}, "0 is too small"),
        ({"quant": {"weight": {"num_bits": 4}}}, 'set "dtype": "int8"'),
        ({"dtype": "int8", "quant": {"weight": {"num_bits": 3}}}, "3 is not a choice"),
        ({"enable_cuda_graph": True, "zero": {"stage": 3}}, "no address that a graph could keep"),
        ({"checkpoint": "a", "checkpoint_config": {"checkpoint_dir": "b"}}, "checkpoint is given as well"),
    ],
)
def test_what_is_wrong_is_told(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){text}"):
        InferenceConfig(**values)


def test_all_faults_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        InferenceConfig(dtype="fp8", use_triton=True, max_out_tokens=-1)
    assert len(caught.value.faults) == 3
