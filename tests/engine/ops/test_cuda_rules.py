"""The CUDA kernels, run on the host by tests/helpers/cuda_emulator.py, against the reference."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from ds_hf.engine.ops import cuda, cuda_lamb, cuda_launch
from ds_hf.engine.ops.cuda_launch import Tuning, Tunings
from ds_hf.engine.ops.split_master import LOW, split_fp32
from tests.helpers import ops_cases as cases
from tests.helpers.cuda_emulator import Emulator, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1e-38, 3.4e38, -3.4e38, math.inf, -math.inf, math.nan, 1 + 2**-8, 1 + 3 * 2**-8]
SIZES = [0, 1, 7, 512, 33, 1000, 0, 4097, 3]  # a tile has 512 elements here


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "emulator"
    folder.mkdir(exist_ok=True)
    return Emulator(folder)


@pytest.fixture
def ops(machine: Emulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(cuda_launch, "machine_of", lambda _: machine)
    machine.launches.clear()
    return cuda


@pytest.mark.parametrize("rule", cases.UPDATES)
def test_rule(ops: Any, rule: str) -> None:
    for offset in (0, 1, 3, 4):
        data = cases.make(SIZES, out=BF16, rule=rule, offset=offset)
        cases.check_update(ops, rule, data, cases.scale_and_skip_of("cpu") if offset else None)


@pytest.mark.parametrize(
    ("param", "grad", "moment", "out"),
    [(F32, BF16, F32, F32), (F32, F16, BF16, F16), (BF16, BF16, BF16, None), (BF16, F32, F32, BF16)],
)
def test_dtypes(ops: Any, param: torch.dtype, grad: torch.dtype, moment: torch.dtype, out: torch.dtype | None) -> None:
    for offset in (0, 4, 5):
        data = cases.make(SIZES, param=param, grad=grad, moment=moment, out=out, offset=offset)
        cases.check_update(ops, "adamw", data)


@pytest.mark.parametrize("rule", cases.UPDATES)
def test_masters_in_halves(ops: Any, rule: str) -> None:
    for offset in (0, 5):
        data = cases.make(SIZES, rule=rule, param=BF16, grad=BF16, out=LOW, offset=offset)
        cases.check_split(ops, rule, data, cases.scale_and_skip_of("cpu") if offset else None)


def test_halves_of_special_numbers(ops: Any) -> None:
    data = cases.make([len(SPECIAL)], rule="sgd-plain", param=BF16, out=LOW)
    master = torch.tensor(SPECIAL)
    high, low = split_fp32(master)
    data.params, data.grads, data.outs = [high], [torch.zeros_like(master)], [low]
    before = [data.params[0].clone(), data.outs[0].clone()]
    cases.check_split(ops, "sgd-plain", data)
    assert torch.equal(data.params[0].nan_to_num(7), before[0].nan_to_num(7))
    assert torch.equal(data.outs[0], before[1])


def test_flag_leaves_halves_alone(ops: Any) -> None:
    data = cases.make(SIZES, param=BF16, out=LOW)
    cases.check_skip(data, lambda scale_and_skip: cases.call_update(ops, "adamw", data, scale_and_skip))


def test_pointers_of_different_alignment(ops: Any) -> None:
    data, moved = cases.make([2000], grad=BF16, out=BF16), cases.make([2000], grad=BF16, out=BF16, offset=1)
    data.grads, data.outs = moved.grads, moved.outs
    cases.check_update(ops, "adamw", data)
    moved.check_guards()


def test_many_tensors(ops: Any, machine: Emulator) -> None:
    sizes = [index * 37 % 700 for index in range(530)]
    cases.check_update(ops, "adamw", cases.make(sizes, grad=BF16, out=BF16))
    assert machine.launches == [("update", 4)] * 2, "500 at once"
    cases.check_update(ops, "adamw", cases.make([0, 0]))
    cases.check_update(ops, "adamw", cases.make([]))
    assert len(machine.launches) == 2


def test_rate_on_device(ops: Any) -> None:
    for rule in ("adamw", "lion"):
        data = cases.make(SIZES, rule=rule)
        cases.check_update(ops, rule, data, lr=torch.tensor(0.3))


@pytest.mark.parametrize("rule", ["adamw", "sgd"])
def test_flag_writes_nothing(ops: Any, rule: str) -> None:
    for offset in (0, 1):
        data = cases.make(SIZES, out=BF16, rule=rule, offset=offset)
        cases.check_skip(data, lambda scale_and_skip, data=data: cases.call_update(ops, rule, data, scale_and_skip))


@pytest.mark.parametrize("rule", ["adamw", "adam", "lion", "adagrad", "sgd"])
def test_special_numbers(ops: Any, rule: str) -> None:
    special = torch.tensor([math.inf, -math.inf, math.nan, 1e-42, -1e-42, 0.0, 3e38, 65504.0, 1e-7, 1.0] * 60)
    for place in range(3):
        data = cases.make([len(special)] * 2, out=BF16, rule=rule)
        for target in [data.params, data.grads, *data.states][min(place, len(data.states) + 1)]:
            target.copy_(special)
        cases.check_update(ops, rule, data, dtype=None)  # in fp64 less overflows


def test_denormals_are_kept(ops: Any) -> None:
    data = cases.make([700], rule="sgd-plain")
    data.params[0].fill_(1e-42)
    data.grads[0].fill_(1e-42)
    cases.call_update(ops, "sgd-plain", data, None, lr=0.5)
    assert (data.params[0] > 0).all()
    assert (data.params[0] < 1e-42).all()


def test_rounds_to_nearest_even(ops: Any) -> None:
    split = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8, 3.4e38, 1e-41]).repeat(100)
    data = cases.make([600], out=BF16, rule="sgd-plain")
    data.params[0].zero_()
    data.grads[0].copy_(-split)
    cases.call_update(ops, "sgd-plain", data, None, lr=1.0)
    assert torch.equal(data.outs[0], split.to(BF16))


def test_stochastic_rounding(ops: Any) -> None:
    def run(seed: int, numels: list[int]) -> cases.Data:
        data = cases.make(numels, param=BF16, moment=BF16, out=BF16)
        cases.call_update(ops, "adamw", data, None, seed=seed)
        data.check_guards()
        return data

    first, again, other = run(1, [3000, 3000]), run(1, [3000, 3000]), run(2, [3000, 3000])
    exact = cases.make([3000, 3000], param=BF16, moment=BF16, out=BF16).copied()
    cases.call_update(cases.reference, "adamw", exact, None)
    for got, same, different in zip(first.written(), again.written(), other.written(), strict=True):
        assert torch.equal(got, same)
        assert not torch.equal(got, different)
    for got, want in [(first.params, exact.params), *zip(first.states, exact.states, strict=True)]:
        for tensor, wanted in zip(got, want, strict=True):
            error = (tensor.double() - wanted) / wanted.abs().clamp(min=1e-6)
            assert error.abs().max() < 2**-7
            assert abs(error.mean()) < 4 * 2**-7 / math.sqrt(6 * 3000)  # unbiased


def test_noise_differs_by_tensor_and_entry(ops: Any) -> None:
    data = cases.make([4000, 4000], param=BF16, moment=BF16, rule="sgd")
    for target in (*data.params, *data.states[0]):
        target.fill_(1.0)
    for grad in data.grads:
        grad.fill_(2**-8 / 10)
    numbers = {"lr": 1.0, "momentum": 1.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "first": False}
    data.params[0].fill_(2.0)
    data.params[1].fill_(2.0)
    ops.sgd_(data.params, data.grads, data.states[0], [], None, seed=3, **numbers)
    up = [(tensor != tensor.min()).double() for tensor in (*data.params, *data.states[0])]
    for index, one in enumerate(up):
        for another in up[:index]:
            assert abs(torch.corrcoef(torch.stack([one, another]))[0, 1]) < 0.08
    assert abs(up[2].mean() - 0.1 / 2) < 0.02  # a tenth of half a unit in the last place


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_norm(ops: Any, dtype: torch.dtype) -> None:
    for offset in (0, 1, 8):
        cases.check_norm(ops, cases.make(SIZES, grad=dtype, offset=offset).grads)
    cases.check_norm(ops, cases.make([index * 37 % 1500 for index in range(70)], grad=dtype).grads)
    cases.check_norm(ops, cases.make([0], grad=dtype).grads)


def test_update_that_starts_early(ops: Any, machine: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "early", True)
    cases.check_update(ops, "adamw", cases.make(SIZES, grad=BF16, out=BF16), cases.scale_and_skip_of("cpu"))


def test_control(ops: Any, machine: Emulator) -> None:
    cases.check_control(ops, cases.make([1, 5000, 77], grad=BF16).grads)
    cases.check_control(ops, cases.make([index * 37 % 1500 for index in range(70)], grad=F32).grads)  # two launches
    assert ops.norm_control(cases.make([0]).grads, scale=4.0, max_norm=1.0, checked=True).tolist() == [0.25, 0.0, 0.0]
    machine.launches.clear()
    ops.norm_control(cases.make([5000]).grads, scale=1.0, max_norm=1.0, checked=False)
    assert [name for name, _ in machine.launches] == ["gradient_norm"]


@pytest.mark.parametrize(
    ("ranks", "dtype"),
    [
        (2, BF16),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, F32), (2, F16), (5, F32), (5, BF16), (5, F16))),
    ],
)
def test_sum(ops: Any, dtype: torch.dtype, ranks: int) -> None:
    for offset in (0, 1, 8):
        cases.check_sum(ops, SIZES, ranks, ranks - 2, offset, grad=dtype)
    cases.check_sum(ops, [index * 37 % 1500 for index in range(70)], ranks, 0, 0, grad=dtype)
    cases.check_sum(ops, [0], ranks, 0, 0, grad=dtype)


def test_norm_of_special_numbers(ops: Any) -> None:
    for value in (math.inf, math.nan, 1e20):
        (tensor,) = cases.make([5000]).grads
        tensor[4321] = value
        got = ops.squared_norm([tensor])
        assert got.isnan() if math.isnan(value) else got == math.inf


@pytest.fixture(params=["lamb_apply", "lamb_fused", "lamb_stream"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernel that LAMB ends with, whatever the sizes: that of two calls, or one of the two of one launch."""
    monkeypatch.setattr(cuda_lamb, "STREAMED_NUMEL", 1 << 60 if request.param == "lamb_stream" else 0)
    return str(request.param)


def check_lamb(ops: Any, kernel: str, machine: Emulator, data: cases.Data, *args: Any, **changes: Any) -> None:
    machine.launches.clear()
    cases.check_lamb(ops, data, *args, fused=kernel != "lamb_apply", **changes)
    wanted = {kernel, "lamb_moments", "lamb_norms"} if kernel == "lamb_apply" else {kernel}
    assert {name for name, _ in machine.launches} == (wanted if any(map(len, data.params)) else set())


@pytest.mark.parametrize(
    "changes", [{}, {"eps_inside_sqrt": True, "weight_decay": 0.0}, {"bias_correction": False, "max_coeff": 0.5}]
)
def test_lamb(ops: Any, kernel: str, machine: Emulator, changes: dict[str, Any]) -> None:
    for offset in (0, 1, 4):
        data = cases.make(SIZES, out=BF16, offset=offset)
        check_lamb(ops, kernel, machine, data, cases.scale_and_skip_of("cpu") if offset else None, **changes)


# In the kernels of one launch a tile has 256 elements, there are 4 blocks, and a block keeps 6 tiles in shared memory.
LAMB_SIZES = [
    pytest.param([30000], id="larger than the chip", marks=pytest.mark.slow),
    pytest.param([3000, 3000, 7000, 40, 1, 0, 9000, 300, 300, 12000], id="several groups"),
    pytest.param([100, 0, 300, 50] * 40, id="many"),
    pytest.param([6 * 1024, 7 * 1024, 8 * 1024, 5000, 0], id="at the limits"),
]


@pytest.mark.parametrize("numels", LAMB_SIZES)
def test_lamb_sizes(
    ops: Any, kernel: str, machine: Emulator, monkeypatch: pytest.MonkeyPatch, numels: list[int]
) -> None:
    check_lamb(ops, kernel, machine, cases.make(numels, out=BF16))
    if kernel != "lamb_apply":
        assert len(machine.launches) == -(-len(numels) // 60)
        tuning = replace(getattr(machine.tunings, kernel), held=2)
        monkeypatch.setattr(machine, "tunings", replace(machine.tunings, **{kernel: tuning}))
        for offset in (0, 3):
            check_lamb(ops, kernel, machine, cases.make(numels, out=BF16, offset=offset))


def test_lamb_dtypes(ops: Any, kernel: str, machine: Emulator) -> None:
    check_lamb(ops, kernel, machine, cases.make([2600, 30000, 77], param=BF16, grad=F16, moment=BF16))


def test_lamb_is_deterministic(ops: Any, kernel: str) -> None:
    """Threads take other turns the second time."""

    def run() -> list[torch.Tensor]:
        data = cases.make([5000, 33, 12000, 700], grad=BF16, out=BF16)
        cases.call_lamb(ops, data, None, kernel != "lamb_apply")
        return data.written()

    assert all(map(torch.equal, run(), run()))


def test_lamb_takes_the_kernel_for_the_size(ops: Any, machine: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_lamb, "STREAMED_NUMEL", 1000)
    for numels in ([400, 600], [400, 601]):
        cases.check_lamb(ops, cases.make(numels), fused=True)
    assert [name for name, _ in machine.launches] == ["lamb_stream", "lamb_fused"]


def test_lamb_without_shared_memory(ops: Any, machine: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "shared_nbytes", 0)
    cases.check_lamb(ops, cases.make(SIZES, out=BF16), fused=True)
    assert [name for name, _ in machine.launches] == ["lamb_moments", "lamb_norms", "lamb_apply"]


def test_lamb_of_nothing_and_of_zeros(ops: Any, kernel: str, machine: Emulator) -> None:
    for numels in ([], [0, 0]):
        cases.check_lamb(ops, cases.make(numels), fused=kernel != "lamb_apply")
    data = cases.make([700, 700])
    data.params[0].zero_()
    data.grads[1].zero_()
    data.states[0][1].zero_()
    check_lamb(ops, kernel, machine, data, weight_decay=0.0)


def test_lamb_flag_writes_nothing(ops: Any, kernel: str, machine: Emulator) -> None:
    for numels in (SIZES, [30000]):
        data = cases.make(numels, out=BF16)
        cases.check_skip(
            data, lambda scale_and_skip, data=data: cases.call_lamb(ops, data, scale_and_skip, kernel != "lamb_apply")
        )
    assert kernel in {name for name, _ in machine.launches}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tuning", "ahead"),
    [
        (Tuning(threads=64, blocks=1, vec=8, groups=1, waves=3), 2),
        (Tuning(threads=32, blocks=3, groups=4, stream=0, capacity=100), 1),
        (Tuning(threads=64, blocks=2, groups=1, held=3), 1),
        (Tuning(threads=64, blocks=1, groups=2, held=2), 2),
    ],
)
def test_other_tunings(
    ops: Any, kernel: str, machine: Emulator, monkeypatch: pytest.MonkeyPatch, tuning: Tuning, ahead: int
) -> None:
    monkeypatch.setattr(machine, "tunings", Tunings(tuning, tuning, tuning, tuning, tuning))
    monkeypatch.setattr(machine, "shared_nbytes", 40 << 10)
    monkeypatch.setattr(cuda_lamb, "AHEAD", ahead)
    for numels in ([5000, 0, 1024, 33, 7000, 2048, 512, 60000, 9000], [index * 37 % 700 for index in range(130)]):
        for offset in (0, 1):
            check_lamb(ops, kernel, machine, cases.make(numels, grad=BF16, out=BF16, offset=offset))
            if kernel == "lamb_apply":
                cases.check_update(ops, "adamw", cases.make(numels, grad=BF16, out=BF16, offset=offset))
        if kernel == "lamb_apply":
            cases.check_norm(ops, cases.make(numels, grad=BF16).grads)
