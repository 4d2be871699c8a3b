"""Which dtype the buffers of a 16-bit model have: as loaded, as ``data_types`` says, or fp32 where a model needs it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hf import initialize
from ds_hf.config import load_config
from ds_hf.engine.zero.fp32_buffers import buffers_to_keep_in_fp32, keep_buffers_in_fp32, keep_in_fp32_pattern
from ds_hf.engine.zero.init import Init
from ds_hf.errors import ConfigError
from tests.helpers.distributed import run_distributed
from tests.helpers.parity import base_config

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
VALUE = 10.01  # in bf16 it is 10.0


class Router(nn.Module):
    """As transformers' models name what they need in fp32."""

    _keep_in_fp32_modules_strict: ClassVar = {"kept"}
    _keep_in_fp32_modules: ClassVar = ["in_half"]

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 8)
        self.register_buffer("kept", torch.full((8,), VALUE))
        self.register_buffer("in_half", torch.full((8,), VALUE))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.gate(x)
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.norm = Router(), nn.BatchNorm1d(8)
        self.register_buffer("plain", torch.full((8,), VALUE))
        self.register_buffer("kept", torch.full((8,), VALUE))  # in no list: this class has none
        self.register_buffer("narrow", torch.full((8,), VALUE).bfloat16())
        self.register_buffer("wide", torch.full((8,), VALUE, dtype=FP64))
        self.register_buffer("count", torch.zeros(1, dtype=torch.long))
        self.other = nn.Module()
        self.other.register_buffer("shared", self.plain)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.router(x)).float().mean()


def dtypes(stage: int, init: bool = False, **more: Any) -> dict[str, torch.dtype]:
    config = base_config(stage, **{"bf16": {"enabled": True}, **more})
    if init:
        with Init(config_dict_or_path=config):
            model = Model()
    else:
        model = Model()
    engine, *_ = initialize(model=model, config=config)
    engine.backward(engine(torch.randn(4, 8)))
    engine.step()
    assert model.other.shared is model.plain
    found = {name: buffer.dtype for name, buffer in model.named_buffers()}
    engine.destroy()
    assert found.pop("count") == found.pop("norm.num_batches_tracked") == torch.int64
    assert found.pop("norm.running_mean") == found.pop("norm.running_var")
    return found


LOADED = {"plain": FP32, "kept": FP32, "narrow": BF16, "wide": FP64, "router.kept": FP32, "router.in_half": FP32}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_buffers_keep_the_dtype_in_which_they_came(stage: int) -> None:
    assert dtypes(stage) == LOADED
    assert dtypes(stage, bf16={"enabled": False}) == LOADED


@pytest.mark.parametrize("stage", [1, 3])
def test_buffers_take_the_dtype_that_is_asked_for(stage: int) -> None:
    asked = dict.fromkeys(LOADED, BF16) | {"router.kept": FP32}
    assert dtypes(stage, data_types={"buffer_dtype": "bf16"}) == asked
    none_kept = {"buffer_dtype": "torch.bfloat16", "keep_in_fp32_modules": []}
    assert dtypes(stage, data_types=none_kept) == dict.fromkeys(LOADED, BF16)
    named = {"buffer_dtype": "bf16", "keep_in_fp32_modules": ["pl*in", "narrow"]}
    assert dtypes(stage, data_types=named) == dict.fromkeys(LOADED, BF16) | {"plain": FP32, "narrow": FP32}
    assert dtypes(stage, data_types={"buffer_dtype": "fp32"}) == dict.fromkeys(LOADED, FP32)


def test_patterns_of_no_buffer_are_told(caplog: pytest.LogCaptureFixture) -> None:
    dtypes(1, data_types={"keep_in_fp32_modules": ["pl*in", "gate"]})  # "gate" has parameters alone
    assert "keep_in_fp32_modules: 'gate' is in no name of a buffer" in caplog.text
    assert "'pl*in'" not in caplog.text


def test_what_a_model_lists_stays_under_init() -> None:
    made = dict.fromkeys(LOADED, BF16)
    assert dtypes(3, init=True) == made | {"router.kept": FP32}
    assert dtypes(3, init=True, data_types={"keep_in_fp32_modules": []}) == made
    assert dtypes(3, init=True, data_types={"keep_in_fp32_modules": ["router*half"]}) == made | {"router.in_half": FP32}
    assert dtypes(3, init=True, bf16={"enabled": False}) == LOADED


def test_a_model_that_exists_is_looked_through() -> None:
    model = Model().bfloat16()
    Init(module=model, config_dict_or_path=base_config(3, bf16={"enabled": True}))
    assert (model.router.kept.dtype, model.router.in_half.dtype, model.kept.dtype) == (FP32, BF16, BF16)


def test_the_second_list_counts_beside_fp16_only() -> None:
    model = Model()
    for dtype, kept in ((FP16, ["router.kept", "router.in_half"]), (BF16, ["router.kept"])):
        pattern = keep_in_fp32_pattern(model, "auto", dtype)
        assert pattern is not None
        names = {id(buffer): name for name, buffer in model.named_buffers()}
        assert [names[id(buffer)] for buffer in buffers_to_keep_in_fp32(model, pattern)] == kept
    assert keep_in_fp32_pattern(model, "auto", FP32) is keep_in_fp32_pattern(model, "auto", None) is None
    assert keep_in_fp32_pattern(model, [], BF16) is None
    assert keep_in_fp32_pattern(nn.Linear(1, 1), "auto", BF16) is None
    pattern = keep_in_fp32_pattern(model, ["narrow"], BF16)
    assert pattern is not None
    assert keep_buffers_in_fp32(model, pattern) == 1
    assert keep_buffers_in_fp32(model, pattern) == 0


def loaded(folder: Path) -> list[Any]:
    """The bias of DeepSeek-V3's router: plain, under ``zero.Init`` as transformers does it, and in the engine."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    if not folder.exists():
        shape = AutoConfig.for_model(
            "deepseek_v3", vocab_size=32, hidden_size=32, intermediate_size=32, moe_intermediate_size=16,
            num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, n_routed_experts=8, n_group=2,
            num_experts_per_tok=2, topk_group=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, v_head_dim=8,
            qk_nope_head_dim=8, first_k_dense_replace=1, n_shared_experts=1,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(shape)
        bias = next(buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias"))
        bias.copy_(torch.linspace(10, 10.01, 8))
        model.save_pretrained(folder)
    config = base_config(3, bf16={"enabled": True})

    def bias_of(model: Any) -> Any:
        found = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
        return [(str(buffer.dtype), buffer.tolist()) for buffer in found]

    seen = [bias_of(AutoModelForCausalLM.from_pretrained(folder, dtype=BF16))]
    kept = HfDeepSpeedConfig(config)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=BF16)
    del kept
    seen.append(bias_of(model))
    engine, *_ = initialize(model=model, config=config)
    engine.backward(engine(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss)
    engine.step()
    seen.append(bias_of(engine.module))
    engine.destroy()
    return seen


def test_experts_are_chosen_by_what_was_saved(tmp_path: Path) -> None:
    ((plain, initialised, trained),) = run_distributed(loaded, 1, tmp_path / "model", timeout=100)
    assert plain == initialised == trained
    assert plain[0] == ("torch.float32", torch.linspace(10, 10.01, 8).tolist())


def test_formats_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"param_dtype is bf16, and fp16 and bf16 make the parameters fp32"):
        load_config(base_config(0, data_types={"param_dtype": "bf16"}), world_size=1)
    fits = base_config(0, data_types={"param_dtype": "bf16"}, bf16={"enabled": True})
    assert load_config(fits, world_size=1).warnings == ()
    open_yet = base_config(0, data_types={"param_dtype": "bf16", "buffer_dtype": "bf16"}, bf16={"enabled": "auto"})
    assert load_config(open_yet, world_size=1, allow_auto=True).warnings == ()
    (warning,) = load_config(base_config(0, data_types={"buffer_dtype": "bf16"}), world_size=1).warnings
    assert warning.message == "no effect: buffers are cast only where fp16 or bf16 is enabled"


class Positions(nn.Module):
    """As tutorials write it: relies on buffers being cast with the model."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(4))
        self.out = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + self.table).float().mean()


def test_a_model_that_relies_on_cast_buffers_is_told_what_to_set() -> None:
    config = base_config(2, bf16={"enabled": True})
    engine, *_ = initialize(model=Positions(), config=config)
    with pytest.raises(RuntimeError, match="dtype") as failed:
        engine(torch.ones(2, 4))
    if sys.version_info >= (3, 11):
        assert any(
            "wider for table. If" in note and '"buffer_dtype": "bf16"' in note for note in failed.value.__notes__
        )
    engine.destroy()
    engine, *_ = initialize(model=Positions(), config={**config, "data_types": {"buffer_dtype": "bf16"}})
    engine.backward(engine(torch.ones(2, 4)))
    engine.step()
    engine.destroy()


KINDS = (torch.complex64, torch.bool, torch.int16, torch.uint16, torch.uint64, FP64, FP16, torch.float8_e4m3fn)


def every_kind(folder: Path) -> list[bool]:
    """Of buffers, with other values on each rank; gloo and NCCL know half of these dtypes."""
    rank = dist.get_rank()
    model = nn.Linear(2, 2)
    for index, kind in enumerate(KINDS):
        model.register_buffer(f"b{index}", torch.tensor([1.0, rank]).to(kind))
    model.register_buffer("single", torch.tensor(float(rank)))
    model.register_buffer("empty", torch.empty(0))
    model.register_buffer("strided", torch.full((3, 2), float(rank)).t())
    engine, *_ = initialize(model=model, config=base_config(1, bf16={"enabled": True}))

    def as_rank_0() -> list[bool]:
        expected = [torch.tensor([1.0, 0.0]).to(kind).tolist() for kind in KINDS]
        same = [buffer.tolist() == values for buffer, values in zip(kinds, expected, strict=True)]
        return [*same, model.single.item() == 0, model.empty.numel() == 0, model.strided.eq(0).all().item()]

    kinds = [getattr(model, f"b{index}") for index in range(len(KINDS))]
    found = as_rank_0()
    engine.save_checkpoint(folder)
    for buffer in kinds:
        buffer.view(torch.uint8).zero_()
    engine.load_checkpoint(folder)
    found += as_rank_0()
    engine.destroy()
    return found


def test_all_ranks_have_the_buffers_of_rank_0(tmp_path: Path) -> None:
    for found in run_distributed(every_kind, 2, tmp_path):
        assert len(found) == 2 * (len(KINDS) + 3)
        assert all(found)
