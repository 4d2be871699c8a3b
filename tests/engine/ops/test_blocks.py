"""Block formats: what they keep, the C++ library's and the GPU's forms, and what the operators refuse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ds_hf.engine.ops import blocks, cpu, cpu_blocks, cuda_blocks, cuda_build, cuda_launch, reference_blocks
from ds_hf.engine.ops.blocks import BlockFormat
from tests.helpers import block_cases as cases
from tests.helpers import cubin
from tests.helpers.cuda_emulator import emulate

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [(F32, F32, 0.0), (BF16, F32, 0.8), (F16, BF16, 0.0), (F32, None, 0.0)]


@pytest.fixture(params=["baseline", "avx2", "avx512"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    if reason := cpu_blocks.available():
        pytest.skip(reason)
    if not cpu.set_instruction_set(request.param):
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    cpu.set_instruction_set("")


@pytest.fixture
def emulated(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    emulate(tmp_path_factory, monkeypatch)
    monkeypatch.setattr(cuda_blocks, "TUNING", cuda_launch.Tuning(threads=64, blocks=1))
    monkeypatch.setattr(cuda_blocks, "_WAVES", 1)
    cuda_blocks.macros_of.cache_clear()
    yield cuda_blocks
    cuda_blocks.macros_of.cache_clear()


# -- what they are ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "wrong"), [(8, 0.5 / 127), (4, 0.5 / 7)])
def test_an_error_is_at_most_half_a_step_of_the_block(bits: int, wrong: float) -> None:
    values = cases.values_of(3, 1000, F32)
    form = BlockFormat(bits)
    kept = form.read(form.write(values), torch.empty_like(values))
    padded = torch.nn.functional.pad(values, (0, 24)).view(3, -1, 256)
    largest = padded.abs().amax(-1, keepdim=True).expand(padded.shape).reshape(3, -1)[:, :1000]
    assert ((kept - values).abs() <= largest * wrong * (1 + 1e-5)).all()
    assert (kept[values == 0] == 0).all()


def test_one_bit_is_the_sign_and_the_root_mean_square() -> None:
    values = torch.tensor([[3.0, -4.0, 0.0, -0.0]])
    form = BlockFormat(1, 64)
    kept = form.read(form.write(values), torch.empty_like(values))
    torch.testing.assert_close(kept, torch.tensor([[2.5, -2.5, 2.5, 2.5]]))


@pytest.mark.parametrize("form", cases.FORMATS, ids=str)
def test_sizes(form: BlockFormat) -> None:
    assert form.nbytes(0) == 0
    assert form.nbytes(1) == 8
    assert form.nbytes(64 * form.numel) == 64 * form.numel * form.bits // 8 + 4 * 64
    with pytest.raises(ValueError, match="8, 4 or 1 bits"):
        BlockFormat(2)
    with pytest.raises(ValueError, match="multiple of 64"):
        BlockFormat(8, 100)


@pytest.mark.parametrize("form", [BlockFormat(4), BlockFormat(1, 4096)], ids=str)
def test_with_feedback_a_sum_of_what_was_sent_is_the_sum_of_what_there_was(form: BlockFormat) -> None:
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(1, 5000, generator=generator)
    feedback = torch.zeros_like(base)
    sent, wanted, plain = (torch.zeros_like(base) for _ in range(3))
    out = torch.empty_like(base)
    for _ in range(50):
        values = base + 0.1 * torch.randn(1, 5000, generator=generator)
        wanted += values
        sent += form.read(form.write(values, feedback), out)
        plain += form.read(form.write(values), out)
    torch.testing.assert_close(sent + feedback, wanted, rtol=0, atol=1e-3)  # nothing is lost, some is late
    assert (sent - wanted).norm() < 0.35 * (plain - wanted).norm()


# -- the CPU and the GPU ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", cases.FORMATS, ids=str)
def test_cpu(isa: str, form: BlockFormat) -> None:
    for numel in cases.SIZES:
        for dtype, feedback, beta in DTYPES:
            cases.check_format(cpu_blocks, form, 3, numel, dtype, feedback, beta=beta)
    cases.check_not_finite(cpu_blocks, form)
    cases.check_extremes(cpu_blocks, form)


@pytest.mark.parametrize("form", cases.FORMATS[:3], ids=str)
def test_reference_knows_infinities(form: BlockFormat) -> None:
    cases.check_not_finite(reference_blocks, form)
    cases.check_extremes(reference_blocks, form)


def test_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := cpu_blocks.available():
        pytest.skip(reason)
    form = BlockFormat(1, 4096)
    values = cases.values_of(3, 300_001, F32)
    found = []
    for threads in ("1", "3"):
        monkeypatch.setenv(cpu.THREADS_VARIABLE, threads)
        feedback = torch.zeros_like(values)
        out = torch.zeros_like(form.empty(3, 300_001, values.device))
        found.append((form.write(values, feedback, out=out).clone(), feedback))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, marks=[pytest.mark.slow] if form.bits != 4 else [], id=str(form))
        for form in cases.FORMATS[:3]
    ],
)
def test_cuda(emulated: Any, form: BlockFormat) -> None:
    for numel in (1, 64, 1003, 4096 + 5):
        cases.check_format(emulated, form, 2, numel, BF16, F32, beta=0.8)
    cases.check_format(emulated, form, 3, 777, F32, None)
    cases.check_format(emulated, form, 1, 512, F16, BF16)
    cases.check_not_finite(emulated, form)
    cases.check_extremes(emulated, form)


@pytest.mark.skipif(cubin.compiler() is None, reason="neither NVRTC nor nvcc is here")
def test_cuda_compiles_and_spills_nothing() -> None:
    for bits, block, value, other in ((8, 256, 1, 3), (4, 256, 0, 0), (1, 4096, 0, 0), (8, 256, 2, 1)):
        code = cubin.compiled(
            cuda_build.program_text("blocks.cu", cuda_blocks.macros_of(bits, block, value, other)), "sm_90"
        )
        frames = cubin.frame_nbytes(code)
        assert frames
        assert max(frames.values()) <= 8, frames


# -- the operators ------------------------------------------------------------------------------------------------


def arguments() -> tuple[BlockFormat, torch.Tensor, torch.Tensor, torch.Tensor]:
    form = BlockFormat(8)
    return form, form.empty(2, 300, torch.device("cpu")).zero_(), torch.ones(2, 300), torch.zeros(2, 300)


def test_registered_operators_keep_their_schemas() -> None:
    form, out, values, feedback = arguments()
    numbers = {"bits": form.bits, "block": form.numel}
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.ds_hf.to_blocks_.default, (out, values, feedback), numbers, test_utils=tests)
    torch.library.opcheck(torch.ops.ds_hf.from_blocks_.default, (values, out, None), numbers, test_utils=tests)


def test_compiled_calls_compute_the_same() -> None:
    form, out, values, feedback = arguments()

    def there_and_back(values: torch.Tensor, feedback: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return form.read(form.write(values, feedback, out=out), torch.empty_like(values))

    expected = there_and_back(values * 3.3, feedback.clone(), out)
    result = torch.compile(there_and_back, backend="aot_eager", fullgraph=True)(values * 3.3, feedback.clone(), out)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    torch._dynamo.reset()


def test_what_does_not_fit_is_refused() -> None:
    _, out, values, feedback = arguments()
    numbers: dict[str, Any] = {"bits": 8, "block": 256}
    for error, call in (
        ("has 308 bytes, not 307", lambda: blocks.to_blocks_(out[:, 1:].contiguous(), values, None, **numbers)),
        (r"\[rows, numel\]", lambda: blocks.to_blocks_(out, values, feedback[:1], **numbers)),
        ("2 rows of values and 1 of blocks", lambda: blocks.to_blocks_(out[:1], values, None, **numbers)),
        ("not torch.float64", lambda: blocks.to_blocks_(out, values.double(), None, **numbers)),
        ("contiguous", lambda: blocks.to_blocks_(out, torch.ones(300, 2).t(), None, **numbers)),
        ("uint8", lambda: blocks.from_blocks_(values, out.float(), None, **numbers)),
        ("3 rows of blocks", lambda: blocks.from_blocks_(values, torch.cat([out, out[:1]]), None, **numbers)),
    ):
        with pytest.raises((ValueError, TypeError), match=error):
            call()


def test_a_library_from_before_leaves_it_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_blocks, "ABI", -1)
    cpu_blocks.available.cache_clear()
    try:
        module, reason = blocks.choose(torch.device("cpu"))
        assert module is reference_blocks
        assert "another version" in str(reason) or "library" in str(reason)
    finally:
        monkeypatch.undo()
        cpu_blocks.available.cache_clear()
