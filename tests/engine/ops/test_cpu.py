"""The CPU kernels against reference.py in fp64: every rule, dtype, instruction set, odd lengths, misaligned starts."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_hf.engine.ops import cpu, reference

NUMELS = (0, 1, 7, 16, 33, 1000, 4097)
OFFSETS = (0, 1, 3)
GUARD = 4
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
EPS = {F32: 2e-6, BF16: 2**-8, F16: 2**-11}
ADAM = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1}
LION = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
ADAGRAD = {"lr": 1e-2, "lr_decay": 0.1, "eps": 1e-6, "weight_decay": 0.1}
SGD = {"lr": 1e-2, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1, "nesterov": False, "first": False}
LAMB = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "eps_inside_sqrt": False, "weight_decay": 0.1}
LAMB |= {"bias_correction": True, "min_coeff": 0.01, "max_coeff": 10.0}
LAMB_MOMENTS = ("beta1", "beta2", "eps", "eps_inside_sqrt", "weight_decay")
# name: function, moments, whether it takes steps, settings
CASES: dict[str, tuple[str, int, bool, dict[str, Any]]] = {
    "adamw": ("adam_", 2, True, ADAM),
    "adam": ("adam_", 2, True, ADAM | {"decoupled": False}),
    "adam, no correction": ("adam_", 2, True, ADAM | {"bias_correction": False, "weight_decay": 0.0}),
    "lion": ("lion_", 1, False, LION),
    "adagrad": ("adagrad_", 1, True, ADAGRAD),
    "sgd": ("sgd_", 0, False, SGD | {"momentum": 0.0}),
    "momentum": ("sgd_", 1, False, SGD),
    "momentum, first": ("sgd_", 1, False, SGD | {"first": True}),
    "nesterov": ("sgd_", 1, False, SGD | {"nesterov": True, "dampening": 0.0, "weight_decay": 0.0}),
    "lamb": ("lamb_", 2, True, LAMB),
    "lamb, eps inside": ("lamb_", 2, True, LAMB | {"eps_inside_sqrt": True, "max_coeff": 0.5}),
}
TYPES = [(F32, F32, F32, None), (F32, BF16, F32, BF16), (F32, F16, F32, F16), (BF16, BF16, BF16, BF16)]
TYPES += [(BF16, F32, F32, F16), (F32, BF16, BF16, F32)]

reason = cpu.available()
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))


@pytest.fixture(params=["baseline", "avx2", "avx512"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    if not cpu.set_instruction_set(request.param):
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    cpu.set_instruction_set("")


class Entries:
    """Random tensors of all lengths and starts, each between guards that must stay."""

    def __init__(self, dtype: torch.dtype | None, *, positive: bool = False, shift: int = 0, scale: float = 1) -> None:
        self.whole: list[Tensor] = []
        self.tensors: list[Tensor] = []
        if dtype is None:
            return
        for index, (numel, offset) in enumerate(itertools.product(NUMELS, OFFSETS)):
            start = GUARD + OFFSETS[(index + shift) % 3] + offset
            whole = torch.full((start + numel + GUARD,), -7.0, dtype=dtype)
            values = torch.randn(numel) * scale
            whole[start : start + numel] = (values.abs() if positive else values).to(dtype)
            self.whole.append(whole)
            self.tensors.append(whole[start : start + numel])

    def wide(self) -> list[Tensor]:
        return [tensor.double() for tensor in self.tensors]

    def assert_guards(self) -> None:
        for whole, tensor in zip(self.whole, self.tensors, strict=True):
            start = tensor.storage_offset()
            assert (whole[:start] == -7).all()
            assert (whole[start + tensor.numel() :] == -7).all()


def _close(got: Sequence[Tensor], wanted: Sequence[Tensor], tolerance: float) -> None:
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("types", TYPES, ids=lambda types: "-".join(str(t).removeprefix("torch.") for t in types))
@pytest.mark.parametrize("case", CASES)
def test_a_rule_is_the_reference(case: str, types: tuple[torch.dtype, ...], isa: str) -> None:
    torch.manual_seed(0)
    name, count, stepped, settings = CASES[case]
    param_type, grad_type, moment_type, out_type = types
    params, grads, outs = Entries(param_type), Entries(grad_type, shift=1, scale=100), Entries(out_type, shift=1)
    moments = [Entries(moment_type, positive=place == 1 or name == "adagrad_", shift=place) for place in range(count)]
    steps = [torch.tensor(float(1 + index)) for index in range(len(params.tensors))]
    scale_and_skip = torch.tensor([0.01, 0.0])
    wide = [group.wide() for group in (params, grads, *moments)]
    old = [grad.clone() for grad in grads.tensors]

    def call(module: Any, groups: list[list[Tensor]], outs: list[Tensor]) -> None:
        function: Callable[..., None] = getattr(module, name)
        if not count:
            groups = [*groups, []]
        function(*groups, outs, *([steps] if stepped else []), scale_and_skip, **settings)

    call(reference, wide, [])
    call(cpu, [group.tensors for group in (params, grads, *moments)], outs.tensors)
    # between its passes LAMB keeps moments in their dtype, and the reference in fp64 keeps all their digits
    loss = 10 * settings["lr"] * EPS[moment_type] if name == "lamb_" else 0
    _close(params.tensors, wide[0], EPS[param_type] + loss)
    for got, wanted in zip(moments, wide[2:], strict=True):
        _close(got.tensors, wanted, EPS[moment_type])
    if out_type is not None:
        for out, param in zip(outs.tensors, params.tensors, strict=True):
            assert torch.equal(out, param.to(out_type))
    assert all(torch.equal(*pair) for pair in zip(grads.tensors, old, strict=True))
    for group in (params, grads, outs, *moments):
        group.assert_guards()


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_squared_norm(dtype: torch.dtype, isa: str) -> None:
    torch.manual_seed(0)
    grads = Entries(dtype)
    torch.testing.assert_close(cpu.squared_norm(grads.tensors), reference.squared_norm(grads.wide()), rtol=1e-6, atol=0)
    for value in (float("inf"), float("nan")):
        grads.tensors[-1][-1] = value
        assert cpu.squared_norm(grads.tensors).isnan() if value != value else cpu.squared_norm(grads.tensors).isinf()
    if dtype is not F16:
        assert cpu.squared_norm([torch.tensor([1e30], dtype=dtype)]).isinf()


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_every_16_bit_value_is_read_and_written_as_torch_does(dtype: torch.dtype, isa: str) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    params, out = torch.zeros(1 << 16), torch.empty(1 << 16, dtype=dtype)
    cpu.sgd_([params], [every], [], [out], None, **SGD | {"lr": -1.0, "momentum": 0.0, "weight_decay": 0.0})
    torch.testing.assert_close(params, every.float(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(out, every, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_rounding_is_to_nearest_even(dtype: torch.dtype, isa: str) -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (100_000,), generator=generator).to(torch.int32)
    ties = (bits & ~0x1FFF) | (0x1000 if dtype is F16 else 0)
    around_f16 = torch.randn(50_000, generator=generator).exp2() * torch.tensor(2.0**-15)
    special = torch.tensor(
        [65504.0, 65519.9, 65520.0, 65536.0, 2.0**-24, 2.0**-25, 3.0 * 2**-26, 3.3e38, 3.4028e38, 0.0]
    )
    values = torch.cat(
        [bits.view(F32), (ties & ~0x7FFF | 0x8000).view(F32), ties.view(F32), around_f16, special, -special]
    )
    out = torch.empty(len(values), dtype=dtype)
    cpu.sgd_([values], [torch.zeros_like(values)], [], [out], None, **SGD | {"momentum": 0.0, "weight_decay": 0.0})
    torch.testing.assert_close(out, values.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("case", CASES)
def test_inf_and_nan_go_where_they_go_in_the_reference(case: str, isa: str) -> None:
    name, count, stepped, settings = CASES[case]
    values = [0.0, -0.0, 1.0, -2.0, 1e-40, 3e38, float("inf"), -float("inf"), float("nan")]
    combined = list(itertools.product(values, repeat=2))
    groups = [torch.tensor([pair[0] for pair in combined]), torch.tensor([pair[1] for pair in combined])]
    groups += [torch.full((len(combined),), 0.5) for _ in range(count)] or [torch.empty(0)]
    steps = [[torch.tensor(2.0)]] if stepped else []
    results = []
    for module in (cpu, reference):
        copies = [group.clone() for group in groups]
        lists = [[copy] for copy in copies[: 2 + count]] + ([[]] if not count else [])
        getattr(module, name)(*lists, [], *steps, None, **settings)
        results.append(copies)
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-45, equal_nan=True)


def test_denormals_are_kept(isa: str) -> None:
    values = torch.tensor([1e-45, 1e-40, -3e-39, 1e-38] * 9)
    param, moment, out = values.clone(), values.clone(), torch.empty(36, dtype=BF16)
    try:
        torch.set_flush_denormal(True)  # the mode of this thread
        cpu.lion_([param], [values], [moment], [out], None, lr=0.0, beta1=0.9, beta2=0.5, weight_decay=0.0)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(param, values)
    assert torch.equal(out, values.to(BF16))
    torch.testing.assert_close(moment.double(), values.double(), rtol=1e-6, atol=1.5e-45)


@pytest.mark.parametrize("case", CASES)
def test_where_the_flag_is_set_nothing_is_written(case: str, isa: str) -> None:
    name, count, stepped, settings = CASES[case]
    groups = [[torch.randn(37), torch.randn(40_000)] for _ in range(2 + count)] + ([[]] if not count else [])
    before = [[tensor.clone() for tensor in group] for group in groups]
    outs = [torch.full((37,), 3.0, dtype=BF16), torch.full((40_000,), 3.0, dtype=BF16)]
    for flag in (1.0, float("nan")):
        scale_and_skip = torch.tensor([1.0, flag])
        getattr(cpu, name)(*groups, outs, *([[torch.ones(())] * 2] if stepped else []), scale_and_skip, **settings)
    assert all(
        torch.equal(*pair) for old, new in zip(before, groups, strict=True) for pair in zip(old, new, strict=True)
    )
    assert all((out == 3).all() for out in outs)


def _stochastic(seed: int | None, numel: int, value: float = 1 + 2**-9, entries: int = 1) -> list[list[Tensor]]:
    """The param and both moments after a step whose exact results are all ``value``, between two bf16 numbers."""
    groups = [[torch.ones(numel, dtype=BF16) for _ in range(entries)] for _ in range(3)]
    grads, steps = [torch.full((numel,), value)] * entries, [torch.ones(())] * entries
    rule = {"lr": 1 - value, "beta1": 0.0, "beta2": 0.0, "eps": 0.0, "weight_decay": 0.0, "bias_correction": False}
    # with both betas 0 the moments are g and g², and the param moves by -lr
    cpu.adam_(groups[0], grads, *groups[1:], [], steps, None, seed=seed, **rule)
    return groups


def test_stochastic_rounding_is_unbiased(isa: str) -> None:
    numel = 1 << 20
    params, firsts, seconds = (group[0].float() for group in _stochastic(3, numel))
    assert set(params.unique().tolist()) == {1.0, 1 + 2**-7}
    for got, exact in ((params, 1 + 2**-9), (firsts, 1 + 2**-9), (seconds, (1 + 2**-9) ** 2)):
        sigma = 2**-7 * 0.5 / numel**0.5
        assert abs(got.double().mean().item() - exact) < 4 * sigma
        ups = (got > got.min()).double()
        for lag in (1, 16, 8192):  # neighbours in any sense do not go together
            both = (ups[lag:] * ups[:-lag]).mean().item()
            assert abs(both - ups.mean().item() ** 2) < 5e-3
    ups = [(got > got.min()).double() for got in (params, firsts, seconds)]
    for one, other in itertools.combinations(ups, 2):
        assert abs((one * other).mean().item() - one.mean().item() * other.mean().item()) < 5e-3


def test_stochastic_rounding_depends_on_seed_entry_and_element_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    first = _stochastic(5, 100_003, entries=2)
    for isa, count in itertools.product(("baseline", "avx2", "avx512"), ("1", "3")):
        monkeypatch.setenv(cpu.THREADS_VARIABLE, count)
        if cpu.set_instruction_set(isa):
            again = _stochastic(5, 100_003, entries=2)
            assert all(torch.equal(*pair) for a, b in zip(first, again, strict=True) for pair in zip(a, b, strict=True))
    cpu.set_instruction_set("")
    other = _stochastic(6, 100_003)
    assert all(not torch.equal(group[0], changed[0]) for group, changed in zip(first, other, strict=True))
    assert all(not torch.equal(group[0], group[1]) for group in first)
    assert torch.equal(_stochastic(None, 100)[0][0], torch.ones(100, dtype=BF16))


def test_stochastic_rounding_keeps_what_is_exact_and_what_is_not_finite() -> None:
    param = torch.tensor([0.0, -0.0, 1.5, float("inf"), -float("inf"), float("nan"), 1e-40] * 5).to(BF16)
    before = param.clone()
    for seed in range(20):
        cpu.sgd_([param], [torch.zeros(35)], [], [], None, **SGD | {"momentum": 0.0, "weight_decay": 0.0}, seed=seed)
    torch.testing.assert_close(param, before, rtol=0, atol=0, equal_nan=True)


def test_the_number_of_threads_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    numels = (300_001, 5, 0, 70_000)
    results = []
    for count in ("1", "2", "3", "7"):
        monkeypatch.setenv(cpu.THREADS_VARIABLE, count)
        torch.manual_seed(0)
        groups = [[torch.rand(numel) for numel in numels] for _ in range(4)]
        outs = [torch.empty(numel, dtype=BF16) for numel in numels]
        steps = [torch.ones(())] * 4
        norm = cpu.squared_norm(groups[1])
        cpu.lamb_(*groups, outs, steps, None, **LAMB)
        norms = cpu.lamb_moments_(*groups, None, **{k: LAMB[k] for k in LAMB_MOMENTS})
        results.append([norm, norms, *outs, *(tensor for group in groups for tensor in group)])
    for other in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], other, strict=True))


def test_rates_in_tensors_and_empty_lists() -> None:
    one, other = torch.ones(9), torch.ones(9)
    rule = SGD | {"momentum": 0.0}
    cpu.sgd_([one], [torch.ones(9)], [], [], None, **rule | {"lr": torch.tensor(0.25)})
    cpu.sgd_([other], [torch.ones(9)], [], [], None, **rule | {"lr": 0.25})
    assert torch.equal(one, other)
    cpu.adam_([], [], [], [], [], [], None, **ADAM)
    assert cpu.lamb_moments_([], [], [], [], None, **{k: LAMB[k] for k in LAMB_MOMENTS}).shape == (0, 2)


def test_streamed_outs_of_long_lists(isa: str) -> None:
    for offset in (0, 1, 16):
        param, out = torch.randn(1_100_003), torch.zeros(1_100_003 + 64, dtype=BF16)
        aligned = -(out.data_ptr() // 2) % 32 + offset
        place = out[aligned : aligned + 1_100_003]
        cpu.sgd_([param], [torch.zeros(1_100_003)], [], [place], None, **SGD | {"momentum": 0.0, "weight_decay": 0.0})
        assert torch.equal(place, param.to(BF16))
        assert (out[:aligned] == 0).all()
        assert (out[aligned + 1_100_003 :] == 0).all()


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", cpu.THREADS_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    assert cpu.threads() == torch.get_num_threads()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(24)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("OMP_NUM_THREADS", "4")  # somebody's choice
    assert cpu.threads() == torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # torchrun's
    assert cpu.threads() == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert cpu.threads() == 1
    monkeypatch.setenv(cpu.THREADS_VARIABLE, "5")
    assert cpu.threads() == 5


def test_threads_beside_the_launching_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_WORLD_SIZE", cpu.THREADS_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    cores = [1, 2, 3, 4, 8, 16]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # OMP_NUM_THREADS=1, as launchers and images set it
    for count, useful in zip(cores, [1, 2, 2, 3, 7, 15], strict=True):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, count=count: set(range(count)))
        assert cpu.beside_threads() == useful
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)  # somebody's choice
    assert cpu.beside_threads() == 5
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    assert cpu.beside_threads() == 15
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert cpu.beside_threads() == 3
    monkeypatch.setenv(cpu.THREADS_VARIABLE, "16")
    assert cpu.beside_threads() == 16


def test_a_thread_uses_what_it_was_given_and_others_keep_theirs() -> None:
    before = cpu.threads(), torch.get_num_threads()

    def inside() -> tuple[int, int]:
        cpu.use_threads(before[1] + 2)
        return cpu.threads(), torch.get_num_threads()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(inside).result() == (before[1] + 2, before[1] + 2)
    assert (cpu.threads(), torch.get_num_threads()) == before


def test_unsupported_dtypes() -> None:
    assert cpu.unsupported("adam_", F32, BF16, F16) is None
    assert "float64" in str(cpu.unsupported("adam_", F32, torch.float64))


def test_a_library_that_is_missing_broken_or_stale_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reason_now() -> str:
        cpu._library.cache_clear()
        return str(cpu.available())

    library = cpu.FOLDER / cpu.LIBRARY
    try:
        with monkeypatch.context() as patch:
            patch.setattr(cpu, "FOLDER", tmp_path)
            assert "does not exist" in reason_now()
            (tmp_path / cpu.REPORT).write_text("no C++ compiler\nand more\n")
            assert reason_now() == "no C++ compiler"
            (tmp_path / cpu.LIBRARY).write_text("not a library")
            assert "cannot be loaded" in reason_now()
            shutil.copy2(library, tmp_path / cpu.LIBRARY)
            patch.setattr(cpu, "ABI", cpu.ABI + 1)
            assert "another version" in reason_now()
    finally:
        cpu._library.cache_clear()
    assert cpu.available() is None


def test_the_struct_is_the_header() -> None:
    """The library compares its own sizeof with ours; it says so instead of reading wrong fields."""
    lists = cpu.lists_of([torch.ones(1)], [torch.ones(1)], (), (), (), (), None, None)
    assert cpu.loaded().ds_hf_cpu_sgd(ctypes.byref(lists), ctypes.byref(cpu._Sgd())) == 0
    lists.nbytes += 8
    assert cpu.loaded().ds_hf_cpu_sgd(ctypes.byref(lists), ctypes.byref(cpu._Sgd())) == 1
    header = Path(__file__).parents[3] / "csrc" / "cpu" / "ds_hf_cpu.h"
    assert re.findall(r"#define DS_HF_CPU_ABI (\d+)", header.read_text()) == [str(cpu.ABI)]


FORK = """
import os, sys, torch
from ds_hf.engine.ops import cpu
os.environ["DS_HF_CPU_THREADS"] = "4"
tensors = [torch.ones(1_000_000)]
assert cpu.squared_norm(tensors) == 1e6
maps = open("/proc/self/maps").read()
print(len({line.split()[-1] for line in maps.splitlines() if "omp" in line.split()[-1].rsplit("/", 1)[-1]}))
for _ in range(3):
    child = os.fork()
    if child == 0:
        os._exit(0 if cpu.squared_norm(tensors) == 1e6 else 1)
    assert os.waitpid(child, 0)[1] == 0
assert cpu.squared_norm(tensors) == 1e6
"""


def test_a_forked_child_may_call_and_there_is_one_openmp_runtime() -> None:
    """The threads of the parent's pool do not exist in the child: waiting for them would be forever."""
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1"
