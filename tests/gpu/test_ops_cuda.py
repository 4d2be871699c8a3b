"""The CUDA kernels on a GPU, against the reference in fp64; tests/engine/ops/test_cuda_rules.py has more cases."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ds_hf.engine.ops import cuda, cuda_lamb, cuda_launch
from ds_hf.engine.ops.split_master import LOW
from tests.helpers import ops_cases as cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SIZES = [0, 1, 7, 33, 1000, 4097, 1_000_003]
# On an H100 lamb_fused.cu and lamb_stream.cu keep some 8 million elements on the chip, in tiles of 4096 and 2944.
LAMB_SIZES = [
    pytest.param([2048 * 2048, 2048, 5504 * 2048, 2048, 512 * 2048, 2048 * 2048 + 7, 33], id="llama"),
    pytest.param([30_000_001], id="larger than the chip"),
    pytest.param([1000, 0, 3000, 500] * 40, id="many"),
    pytest.param([5], id="tiny"),
]


def test_available() -> None:
    assert cuda.available() is None


@pytest.mark.parametrize("offset", [0, 1, 3, 8])
@pytest.mark.parametrize("rule", cases.UPDATES)
def test_rule(rule: str, offset: int) -> None:
    data = cases.make(SIZES, "cuda", rule=rule, grad=BF16, out=BF16, offset=offset)
    cases.check_update(cuda, rule, data, cases.scale_and_skip_of("cuda") if offset else None)


@pytest.mark.parametrize("out", [None, BF16, F16, F32])
@pytest.mark.parametrize("moment", [F32, BF16])
@pytest.mark.parametrize("grad", [F32, BF16, F16])
@pytest.mark.parametrize("param", [F32, BF16])
def test_dtypes(param: torch.dtype, grad: torch.dtype, moment: torch.dtype, out: torch.dtype | None) -> None:
    for offset in (0, 3):
        data = cases.make(SIZES, "cuda", param=param, grad=grad, moment=moment, out=out, offset=offset)
        cases.check_update(cuda, "adamw", data)


@pytest.mark.parametrize("offset", [0, 5])
@pytest.mark.parametrize("rule", cases.UPDATES)
def test_masters_in_halves(rule: str, offset: int) -> None:
    data = cases.make([1, 7, 4096, 100_003], "cuda", rule=rule, param=BF16, grad=BF16, out=LOW, offset=offset)
    cases.check_split(cuda, rule, data, cases.scale_and_skip_of("cuda"))


def test_many_tensors() -> None:
    sizes = [index * 7919 % 20_000 for index in range(500)]
    cases.check_update(cuda, "adamw", cases.make(sizes, "cuda", grad=BF16, out=BF16))
    cases.check_norm(cuda, cases.make(sizes, "cuda", grad=BF16).grads)


def test_rate_on_device() -> None:
    for rule in ("adamw", "lion", "adagrad", "sgd"):
        data = cases.make(SIZES, "cuda", rule=rule)
        cases.check_update(cuda, rule, data, lr=torch.tensor(0.3, device="cuda"))


@pytest.mark.parametrize("rule", ["adamw", "adam", "lion", "adagrad", "sgd"])
def test_special_numbers(rule: str) -> None:
    special = torch.tensor([math.inf, -math.inf, math.nan, 1e-42, -1e-42, 0.0, 3e38, 65504.0, 1e-7, 1.0] * 600)
    for place in range(3):
        data = cases.make([len(special)] * 2, "cuda", rule=rule, out=BF16)
        for target in [data.params, data.grads, *data.states][min(place, len(data.states) + 1)]:
            target.copy_(special)
        cases.check_update(cuda, rule, data, dtype=None)


def test_denormals_and_rounding() -> None:
    values = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8, 3.4e38, 1e-41, math.nan])
    for out in (BF16, F16):
        data = cases.make([7000], "cuda", rule="sgd-plain", out=out)
        data.params[0].zero_()
        data.grads[0].copy_(-values.repeat(1000))
        cases.call_update(cuda, "sgd-plain", data, None, lr=1.0)
        torch.testing.assert_close(data.outs[0], values.repeat(1000).cuda().to(out), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(data.params[0].nan_to_num(7), values.repeat(1000).cuda().nan_to_num(7))


def test_stochastic_rounding() -> None:
    def run(seed: int) -> cases.Data:
        data = cases.make([300_000, 300_000], "cuda", param=BF16, moment=BF16, out=BF16)
        cases.call_update(cuda, "adamw", data, None, seed=seed)
        data.check_guards()
        return data

    first, again, other = run(1), run(1), run(2)
    exact = cases.make([300_000, 300_000], "cuda", param=BF16, moment=BF16, out=BF16).copied()
    cases.call_update(cases.reference, "adamw", exact, None)
    for got, same, different in zip(first.written(), again.written(), other.written(), strict=True):
        assert torch.equal(got, same)
        assert not torch.equal(got, different)
    for got, want in [(first.params, exact.params), *zip(first.states, exact.states, strict=True)]:
        for tensor, wanted in zip(got, want, strict=True):
            error = (tensor.double() - wanted) / wanted.abs().clamp(min=1e-6)
            assert error.abs().max() < 2**-7
            assert abs(error.mean()) < 5 * 2**-7 / math.sqrt(6 * 300_000)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_norm(dtype: torch.dtype) -> None:
    for offset in (0, 1, 8):
        cases.check_norm(cuda, cases.make([*SIZES, 20_000_001], "cuda", grad=dtype, offset=offset).grads)
    cases.check_norm(cuda, cases.make([0], "cuda", grad=dtype).grads)
    for value in (math.inf, math.nan):
        (tensor,) = cases.make([5000], "cuda", grad=dtype).grads
        tensor[4321] = value
        assert not cuda.squared_norm([tensor]).isfinite()


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("ranks", [2, 8])
def test_sum(dtype: torch.dtype, ranks: int) -> None:
    for offset in (0, 1, 8):
        cases.check_sum(cuda, [*SIZES, 3_000_001], ranks, ranks - 2, offset, device="cuda", grad=dtype)


def test_control() -> None:
    cases.check_control(cuda, cases.make([1, 5000, 77, 3_000_001], "cuda", grad=BF16).grads)


def test_clipped_updates_one_after_another_are_right() -> None:
    """The update begins before the norm has ended; on two streams at once, each with counters of its own."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    data = [cases.make([700_001, 4096], "cuda", grad=BF16, out=BF16, seed=seed) for seed in range(len(streams))]
    before = [torch.cat(each.params).double() for each in data]
    grads = [torch.cat([g.double() for g in each.grads]) for each in data]
    torch.cuda.synchronize()
    plain = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "first": False}
    for _ in range(50):
        for each, stream in zip(data, streams, strict=True):
            with torch.cuda.stream(stream):
                scale_and_skip = cuda.norm_control(each.grads, scale=1.0, max_norm=10.0, checked=True)
                cuda.sgd_(each.params, each.grads, [], each.outs, scale_and_skip[:2], lr=0.5, **plain)
    torch.cuda.synchronize()
    for each, was, grad in zip(data, before, grads, strict=True):
        want = was - 50 * 0.5 * grad * 10.0 / grad.norm()
        torch.testing.assert_close(
            torch.cat(each.params).double(), want, rtol=0, atol=5e-5
        )  # fifty roundings of numbers up to 6
        assert torch.equal(torch.cat(each.outs), torch.cat(each.params).bfloat16())


KERNELS = ["lamb_apply", "lamb_fused", "lamb_stream"]


def take(kernel: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Have LAMB of all sizes end with ``kernel``; whether that is one of those of one launch."""
    monkeypatch.setattr(cuda_lamb, "STREAMED_NUMEL", 1 << 60 if kernel == "lamb_stream" else 0)
    return kernel != "lamb_apply"


@pytest.fixture(params=KERNELS)
def fused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """LAMB in one call or in two, each of its kernels in turn."""
    return take(request.param, monkeypatch)


@pytest.mark.parametrize("numels", LAMB_SIZES)
def test_lamb(numels: list[int], fused: bool) -> None:
    for offset in (0, 1):
        data = cases.make(numels, "cuda", grad=BF16, out=BF16, offset=offset)
        cases.check_lamb(cuda, data, cases.scale_and_skip_of("cuda"), fused=fused)
    data = cases.make(numels, "cuda", param=BF16, grad=F16, moment=BF16)
    cases.check_lamb(cuda, data, fused=fused, eps_inside_sqrt=True)


@pytest.mark.parametrize("kernel", KERNELS[1:])
def test_lamb_has_room_for_its_kernel(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would make two passes otherwise, as right and slower."""
    machine = cuda_launch.gpu(torch.cuda.current_device())
    load, loaded = machine.kernel, []

    def remember(source: str, name: str, macros: Any) -> Any:
        loaded.append(name)
        return load(source, name, macros)

    monkeypatch.setattr(machine, "kernel", remember)
    cases.check_lamb(cuda, cases.make([5000, 7], "cuda"), fused=take(kernel, monkeypatch))
    assert loaded == [kernel]


def test_lamb_is_deterministic(fused: bool) -> None:
    def run() -> list[torch.Tensor]:
        data = cases.make([3_000_000, 40, 9_000_000], "cuda", grad=BF16, out=BF16)
        cases.call_lamb(cuda, data, None, fused)
        return data.written()

    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second)


def test_lamb_flag_writes_nothing(fused: bool) -> None:
    for offset in (0, 1):
        data = cases.make([*SIZES, 9_000_000], "cuda", out=BF16, offset=offset)
        cases.check_skip(data, lambda scale_and_skip, data=data: cases.call_lamb(cuda, data, scale_and_skip, fused))


def test_flag_writes_nothing() -> None:
    calls: list[Callable[[cases.Data, torch.Tensor], Any]] = [
        lambda data, scale_and_skip: cases.call_update(cuda, "adamw", data, scale_and_skip),
        lambda data, scale_and_skip: cases.call_update(cuda, "sgd", data, scale_and_skip),
    ]
    for call in calls:
        for offset in (0, 1):
            data = cases.make(SIZES, "cuda", out=BF16, offset=offset)
            cases.check_skip(data, lambda scale_and_skip, data=data, call=call: call(data, scale_and_skip))


Job = Callable[[cases.Data, torch.Tensor, torch.Tensor], Any]


@pytest.fixture(params=["adamw", "norm", *KERNELS])
def job(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A call with data, control and learning rate."""
    if request.param == "adamw":
        return lambda data, scale_and_skip, lr: cases.call_update(cuda, "adamw", data, scale_and_skip, lr=lr)
    if request.param == "norm":
        return lambda data, scale_and_skip, lr: data.outs[0].copy_(cuda.squared_norm(data.grads))
    fused = take(request.param, monkeypatch)
    return lambda data, scale_and_skip, lr: cases.call_lamb(cuda, data, scale_and_skip, fused, lr=lr)


def test_graph(job: Job) -> None:
    """Replays take what control and lr are then, and each gives what a call would."""
    numels = [1_000_003, 2_000_000, 5, 8_000_000]
    eager, graphed = (cases.make(numels, "cuda", grad=BF16, out=BF16) for _ in range(2))
    scale_and_skip, lr = cases.scale_and_skip_of("cuda"), torch.tensor(0.01, device="cuda")
    warm = cases.make(numels, "cuda", grad=BF16, out=BF16)
    job(warm, scale_and_skip, lr)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        job(graphed, scale_and_skip, lr)
    for scale, flag, rate in ((0.5, 0.0, 0.01), (0.25, 0.0, 0.1), (1.0, 1.0, 0.1), (1.0, 0.0, 0.02)):
        scale_and_skip.copy_(torch.tensor([scale, flag]))
        lr.fill_(rate)
        for data in (eager, graphed):
            for step in data.steps:
                step.add_(1)
        graph.replay()
        job(eager, scale_and_skip, lr)
        for one, other in zip(eager.written(), graphed.written(), strict=True):
            assert torch.equal(one, other)


def test_capture_of_kernels_not_yet_loaded() -> None:
    data, same = (cases.make([1000], "cuda", rule="lion", grad=F16, out=F16) for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cases.call_update(cuda, "lion", data, None)
    graph.replay()
    cases.call_update(cuda, "lion", same, None)
    assert torch.equal(data.params[0], same.params[0])


def test_host_does_not_wait(job: Job) -> None:
    data = cases.make([1_000_003, 77], "cuda", grad=BF16, out=BF16)
    scale_and_skip, lr = cases.scale_and_skip_of("cuda"), torch.tensor(0.01, device="cuda")
    job(data, scale_and_skip, lr)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            job(data, scale_and_skip, lr)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_other_streams_and_threads(job: Job) -> None:
    """Two streams at once, each fed by its own thread: both finish, with the same result."""
    numels = [9_000_000, 100, 3_000_000]
    scale_and_skip, lr = cases.scale_and_skip_of("cuda"), torch.tensor(0.01, device="cuda")
    several = [cases.make(numels, "cuda", grad=BF16, out=BF16) for _ in range(2)]
    torch.cuda.synchronize()

    def work(data: cases.Data) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                job(data, scale_and_skip, lr)

    threads = [threading.Thread(target=work, args=(data,)) for data in several]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    for one, other in zip(several[0].written(), several[1].written(), strict=True):
        assert torch.equal(one, other)


def test_thread_that_has_not_used_cuda() -> None:
    """It has no current context of its own."""
    data = cases.make([1000], "cuda")
    before = data.params[0].clone()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            cases.call_update(cuda, "adamw", data, None)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures, failures
    assert not torch.equal(data.params[0], before)


def test_more_elements_than_32_bits_count() -> None:
    if torch.cuda.get_device_properties(0).total_memory < 60 << 30:
        pytest.skip("needs 60 GB of GPU memory")
    numel = 2**31 + 4099
    numbers = {**cases.SGD, "momentum": 0.0, "weight_decay": 0.0, "lr": 1.0}
    params, outs = (torch.zeros(numel, dtype=BF16, device="cuda") for _ in range(2))
    grads = torch.ones(numel, dtype=BF16, device="cuda")
    marks = [0, 2**30, 2**31 - 1, 2**31, 2**31 + 4000, numel - 1]
    grads[marks] = -3.0
    cuda.sgd_([params], [grads], [], [outs], None, **numbers)
    want = -grads
    assert torch.equal(params, want)
    assert torch.equal(outs, want)
    del want
    assert float(cuda.squared_norm([grads])) == pytest.approx(numel + 8 * len(marks), rel=1e-6)


def test_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for device in ("cuda:1", "cuda:0"):
        cases.check_update(cuda, "adamw", cases.make([1000, 3], device))
        assert torch.cuda.current_device() == 0


def test_launches_of_few_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five hundred entries fill a launch: one call of 501 needs two."""
    launches: list[int] = []
    machine = cuda_launch.gpu(torch.cuda.current_device())
    launch = machine.launch

    def count(*args: Any, **named: Any) -> None:
        launches.append(args[1])
        launch(*args, **named)

    monkeypatch.setattr(machine, "launch", count)
    cases.check_update(cuda, "adamw", cases.make([100] * 501, "cuda"))
    assert launches == [500, 1]
