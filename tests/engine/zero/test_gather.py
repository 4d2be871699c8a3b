"""GatheredParameters: what may be kept from inside a block, blocks in blocks, parametrized layers."""

from __future__ import annotations

import logging

import peft
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hf import initialize
from ds_hf.engine.zero.buffer import home_of
from ds_hf.engine.zero.gather import GatheredParameters
from ds_hf.engine.zero.init import Init
from ds_hf.errors import DsHfError
from tests.helpers.distributed import run_distributed
from tests.helpers.logs import Lines

CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}


def layer() -> nn.Linear:
    torch.manual_seed(0)
    with Init(config_dict_or_path=CONFIG):
        return nn.Linear(64, 32)


def keep_what_was_taken_inside() -> tuple[bool, int, int]:
    """Tensors taken inside a block are valid after it; what nobody took is given back."""
    torch.manual_seed(0)
    expected = nn.Linear(64, 32).weight.detach()
    model = layer()
    home = home_of(model.weight)
    assert home is not None
    with GatheredParameters(model.weight):
        taken, transposed = model.state_dict()["weight"], model.weight.detach().t()
    held = home.buffer.full.untyped_storage().nbytes()
    with GatheredParameters(model.weight, modifier_rank=0):
        model.weight.data.add_(1.0)
    same = torch.equal(taken, expected) and torch.equal(transposed, expected.t())
    with GatheredParameters(model.weight):
        same = same and torch.equal(model.weight.detach(), expected + 1)
    return same, held, home.buffer.full.untyped_storage().nbytes()


def test_tensors_taken_inside_a_block_stay_valid_after_it() -> None:
    for same, held, held_at_the_end in run_distributed(keep_what_was_taken_inside, 2):
        assert same
        assert held == held_at_the_end == 0


def swap(first: nn.Linear, second: nn.Linear) -> Tensor:
    kept = first.weight.data
    first.weight.data = second.weight.data
    second.weight.data = kept
    before = first.bias.data
    first.bias.data = before * 2
    return before


def swap_inside() -> list[bool]:
    torch.manual_seed(0)
    expected = nn.Linear(8, 8), nn.Linear(8, 8)
    torch.manual_seed(0)
    with Init(config_dict_or_path={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}):
        model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    with GatheredParameters(list(model.parameters()), modifier_rank=0):
        before = swap(*model)  # type: ignore[arg-type]
    same = [torch.equal(before, swap(*expected))]
    with GatheredParameters(list(model.parameters())):
        return same + [
            torch.equal(a, b) for a, b in zip(model.parameters(), nn.ModuleList(expected).parameters(), strict=True)
        ]


def test_values_in_whose_place_others_are_put_stay_as_they_are() -> None:
    assert run_distributed(swap_inside, 2) == [[True] * 5] * 2


def write_in_an_inner_block_on_one_rank() -> float:
    """As transformers does: the inner block exists on the writing rank alone."""
    model = layer()
    with GatheredParameters(list(model.parameters()), modifier_rank=1):
        if dist.get_rank() == 1:
            with GatheredParameters(model.weight, modifier_rank=1), torch.no_grad():
                model.weight.fill_(7.0)
    with GatheredParameters(model.weight):
        return float(model.weight.sum())


def test_inner_block_of_the_writing_rank_is_not_collective() -> None:
    assert run_distributed(write_in_an_inner_block_on_one_rank, 2, timeout=30) == [7.0 * 64 * 32] * 2


def gather_in_an_order_of_each_rank(stage: int) -> list[float]:
    """Of layers of one size, whose values would come in each other's places. Transformers gives a set."""
    with Init(config_dict_or_path=CONFIG, enabled=stage == 3):
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    engine = initialize(
        model=model,
        config={**CONFIG, "zero_optimization": {"stage": stage}, "optimizer": {"type": "SGD", "params": {"lr": 0.0}}},
    )[0]
    layers = list(model)[:: -1 if dist.get_rank() else 1]
    weights = [layer.weight for layer in layers if isinstance(layer, nn.Linear)]
    with GatheredParameters(weights, modifier_rank=0):
        for number, layer in enumerate(model):
            nn.init.constant_(layer.weight, number + 10 * dist.get_rank())  # type: ignore[arg-type]
    with GatheredParameters(weights):
        values = [float(layer.weight.detach().sum()) for layer in model]  # type: ignore[operator, union-attr]
    engine.destroy()
    return values


@pytest.mark.parametrize("stage", [2, 3])
def test_each_rank_may_name_the_parameters_in_an_order_of_its_own(stage: int) -> None:
    for values in run_distributed(gather_in_an_order_of_each_rank, 2, stage):
        assert values == [0.0, 16.0, 32.0]


def weight_norm_under_init() -> tuple[bool, bool, list[int]]:
    """The computed weight can be read on one rank; the shards hold its parameters."""
    torch.manual_seed(0)
    plain = nn.utils.parametrizations.weight_norm(nn.Linear(64, 32))
    torch.manual_seed(0)
    with Init(config_dict_or_path=CONFIG):
        linear = nn.Linear(64, 32)
        with GatheredParameters(linear.weight, modifier_rank=0):
            linear = nn.utils.parametrizations.weight_norm(linear)
    readable = dist.get_rank() == 1 or torch.equal(linear.weight, plain.weight)
    originals = list(linear.parametrizations["weight"].parameters())  # type: ignore[index, union-attr]
    with GatheredParameters(originals, modifier_rank=0), torch.no_grad():
        originals[0].fill_(2.0 if dist.get_rank() == 0 else 3.0)
    return readable, bool((originals[0] == 2.0).all()), [getattr(p, "ds_numel", 0) for p in originals]


def test_weight_norm_under_init_can_be_read_at_any_time_and_is_the_same_everywhere() -> None:
    for readable, same, numels in run_distributed(weight_norm_under_init, 2):
        assert readable
        assert same
        assert numels == [32, 32 * 64]


CHECKED = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, "enable_sanity_checks": True}}


def change(model: nn.Module, how: str, outer: bool = False) -> str:
    params = list(model.parameters())
    try:
        with GatheredParameters(params, modifier_rank=0 if outer else None), GatheredParameters(params):
            if dist.get_rank() == 0 and how:
                weight = params[0] if how == "in place" else params[0].data
                with torch.no_grad():
                    weight.add_(1.0)
    except RuntimeError as error:
        return str(error)
    return ""


def changes_that_are_lost() -> dict[str, str]:
    with Init(config_dict_or_path=CHECKED):
        fresh = nn.Linear(64, 32)
    found = {how or "none": change(fresh, how) for how in ("", "in place", "data")}
    found["kept outside"] = change(fresh, "data", outer=True)
    config = {**CHECKED, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = initialize(model=nn.Sequential(nn.Linear(64, 32)), config=config)
    found["engine"] = change(engine.module, "data")
    found["engine, none"] = change(engine.module, "")
    found["without the key"] = change(layer(), "data")
    with GatheredParameters(fresh.weight):  # blocks still gather after an error
        found["gathers"] = str(tuple(fresh.weight.shape))
    return found


def test_sanity_checks_report_a_change_that_would_be_lost() -> None:
    ranks = run_distributed(changes_that_are_lost, 2)
    for rank, found in enumerate(ranks):
        for case in ("in place", "data", "engine"):
            assert "inside GatheredParameters(modifier_rank=None)" in found[case], case
            assert ("here 1 (of shape (32, 64))" if rank == 0 else "on another rank") in found[case]
            assert "modifier_rank=0" in found[case]
        for case in ("none", "kept outside", "engine, none", "without the key"):
            assert found[case] == "", case
        assert found["gathers"] == "(32, 64)"


def adapters_merged_inside(how: str) -> tuple[bool, bool, bool]:
    """Whether the lost change was told; whether the model gives what adapters that are merged, or are not, give."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 8))
    made = peft.LoraConfig(r=4, target_modules=["0", "2"], init_lora_weights=False)
    model = peft.get_peft_model(base, made).eval()
    x = torch.linspace(-1, 1, 64)
    expected, lines = model(x).detach(), Lines()
    with model.disable_adapter():
        without = model(x).detach()
    logging.getLogger("ds_hf").addHandler(lines)
    engine, *_ = initialize(model=model, config={**CONFIG, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
    with GatheredParameters(list(model.parameters()), modifier_rank=0 if how == "kept" else None):
        model.merge_adapter()
        if how == "undone":
            model.unmerge_adapter()
    with torch.no_grad():
        found = engine(x)
    told = any("base_layer.weight (32, 64) was changed inside" in line for line in lines.texts)
    engine.destroy()
    return told, torch.allclose(found, expected, atol=1e-5), torch.allclose(found, without, atol=1e-5)


def test_adapters_that_are_merged_for_nothing_are_told() -> None:
    """Frozen weights, and a write through ``.data``; what is merged and taken out again is no loss."""
    wanted = {"lost": (True, False, True), "kept": (False, True, False), "undone": (False, True, False)}
    for how, expected in wanted.items():
        found = run_distributed(adapters_merged_inside, 2, how)
        assert found == [expected, (False, *expected[1:])], how  # the first process speaks


def newcomers() -> list[list[bool]]:
    """Which parameters have what TRL clears around a generation, one of them not there as the engine was made."""
    found = []
    for stage in (2, 3):
        model = nn.Linear(64, 32)
        engine, *_ = initialize(model=model, config={**CONFIG, "zero_optimization": {"stage": stage}})
        model.late = nn.Parameter(torch.ones(3))
        with GatheredParameters(model.parameters()):
            found.append([hasattr(param, "ds_active_sub_modules") for param in model.parameters()])
        engine.destroy()
    return found


def test_adapters_that_come_later_have_the_names_that_trl_asks_for() -> None:
    assert run_distributed(newcomers, 2) == [[[False] * 3, [True] * 3]] * 2


@pytest.mark.parametrize("shape", [(40, 64), (1, 64)])  # the second would broadcast
def test_values_of_another_shape_are_refused(shape: tuple[int, int]) -> None:
    model = layer()
    with (
        pytest.raises(DsHfError, match=rf"\(32, 64\) was given values of shape \({shape[0]}, 64\) inside Gathered"),
        GatheredParameters(model.weight, modifier_rank=0),
    ):
        model.weight.data = torch.zeros(shape)
