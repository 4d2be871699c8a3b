"""The operators' checks, their registration with torch, and the way to the reference."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_hf import log
from ds_hf.engine.ops import cpu, library, reference

ADAM: dict[str, Any] = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
LAMB = {**ADAM, "eps_inside_sqrt": False}
TRUST = {"bias_correction": True, "min_coeff": 0.01, "max_coeff": 10.0}


def values(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def adam_arguments(numel: int = 10, count: int = 2) -> list[Any]:
    lists = [[values(numel + i, seed=10 * place + i).abs() for i in range(count)] for place in range(4)]
    outs = [torch.zeros(numel + i, dtype=torch.bfloat16) for i in range(count)]
    return [*lists, outs, [torch.ones(()) for _ in range(count)], None]


def spoiled(change: Callable[[list[Any]], Any]) -> list[Any]:
    arguments = adam_arguments()
    change(arguments)
    return arguments


def put(place: int, index: int, value: Tensor) -> Callable[[list[Any]], None]:
    def change(arguments: list[Any]) -> None:
        arguments[place][index] = value

    return change


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (put(1, 1, torch.zeros(10)), ValueError, r"grads\[1\] has 10 elements and params\[1\] 11"),
        (put(2, 0, torch.zeros(12)), ValueError, r"exp_avgs\[0\] has 12 elements"),
        (put(4, 1, torch.zeros(3, dtype=torch.bfloat16)), ValueError, r"outs\[1\] has 3"),
        (lambda a: a[1].pop(), ValueError, "grads has 1 tensors and params has 2"),
        (lambda a: a[4].pop(), ValueError, "outs has 1 tensors and params has 2"),
        (lambda a: a[5].clear(), ValueError, "steps has 0 tensors"),
        (put(0, 0, torch.zeros(20)[::2]), ValueError, r"params\[0\] is not contiguous"),
        (put(1, 0, torch.zeros(10, dtype=torch.int32)), TypeError, "grads are int32"),
        (put(1, 1, torch.zeros(11, dtype=torch.float16)), TypeError, r"grads\[1\] is float16 and grads\[0\] float32"),
        (put(3, 1, torch.zeros(11, device="meta")), ValueError, r"exp_avg_sqs\[1\] is on meta"),
        (put(5, 0, torch.ones(3)), ValueError, r"steps\[0\] must be one fp32 number, not float32 \[3\]"),
        (put(5, 0, torch.ones((), dtype=torch.int64)), TypeError, "steps are int64"),
        (lambda a: a.__setitem__(6, torch.ones(3)), ValueError, "scale_and_skip must be fp32 of 2 elements"),
        (lambda a: a.__setitem__(6, torch.ones(2, dtype=torch.float64)), ValueError, "scale_and_skip must be fp32"),
        (
            lambda a: a.__setitem__(6, torch.ones(2, device="meta")),
            ValueError,
            "scale_and_skip .* on cpu, not .* meta",
        ),
    ],
)
def test_wrong_arguments_are_named_and_nothing_is_written(
    change: Callable[[list[Any]], Any], error: type[Exception], said: str
) -> None:
    arguments = spoiled(change)
    tensors = [t for tensors in arguments[:6] for t in tensors if t.device.type != "meta"]
    before = [t.clone() for t in tensors]
    with pytest.raises(error, match=said):
        library.adam_(*arguments, **ADAM)
    for tensor, was in zip(tensors, before, strict=True):
        assert torch.equal(tensor, was)


def test_the_rate_as_a_tensor_is_checked_and_counts() -> None:
    with pytest.raises(ValueError, match="lr must be fp32 of 1 elements"):
        library.adam_(*adam_arguments(), **{**ADAM, "lr": torch.ones(2)})
    one, two = adam_arguments(), adam_arguments()
    library.adam_(*one, **ADAM)
    library.adam_(*two, **{**ADAM, "lr": torch.tensor(0.1)})
    torch.testing.assert_close(one[0], two[0])


def test_nothing_to_do() -> None:
    library.adam_([], [], [], [], [], [], None, **ADAM)
    assert library.lamb_moments_([], [], [], [], None, **{k: v for k, v in LAMB.items() if k != "lr"}).shape == (0, 2)
    assert float(library.squared_norm([])) == 0.0
    assert float(library.squared_norm([torch.zeros(0)])) == 0.0
    assert library.norm_control([], **CLIP).tolist() == [0.5, 0.0, 0.0]


def test_squares_are_single_numbers() -> None:
    with pytest.raises(ValueError, match=r"squares\[1\] must be fp32 of 1 elements on cpu, not float32 \[2\]"):
        library.clip_control([torch.tensor(1.0), torch.ones(2)], **CLIP)


CLIP: dict[str, Any] = {"scale": 2.0, "max_norm": 1.0, "checked": True}
CALLS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "adam_": (adam_arguments(), ADAM),
    "lion_": ([*adam_arguments()[:3], [], None], {k: ADAM[k] for k in ("lr", "beta1", "beta2", "weight_decay")}),
    "adagrad_": (
        [*adam_arguments()[:3], [], adam_arguments()[5], None],
        {"lr": 0.1, "lr_decay": 0.1, "eps": 1e-8, "weight_decay": 0.1},
    ),
    "sgd_": (
        [*adam_arguments()[:3], [], None],
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.1, "nesterov": True, "first": False},
    ),
    "lamb_": (adam_arguments(), {**LAMB, **TRUST}),
    "lamb_moments_": ([*adam_arguments()[:4], None], {k: v for k, v in LAMB.items() if k != "lr"}),
    "lamb_apply_": (
        [adam_arguments()[0], *adam_arguments()[2:4], [], adam_arguments()[5], torch.ones(2, 2), None],
        {**LAMB, **TRUST},
    ),
    "squared_norm": ([adam_arguments()[1]], {}),
    "norm_control": ([adam_arguments()[1]], CLIP),
    "clip_control": ([[torch.tensor(9.0), torch.tensor(16.0)]], CLIP),
    "sum_parts_": (
        [torch.zeros(5), [torch.arange(5.0)], torch.ones(5), torch.ones(2, 7)],
        {"cuts": [0, 1, 0, 3, 4], "place": 1, "factor": 0.5},
    ),
}


def test_every_operator_is_called_below() -> None:
    assert CALLS.keys() == library.OPS.keys() == set(reference.__all__)


@pytest.mark.parametrize("name", CALLS)
def test_registered_operators_keep_their_schemas(name: str) -> None:
    arguments, scalars = CALLS[name]
    rate = [None] if library.OPS[name].rule else []
    torch.library.opcheck(
        getattr(torch.ops.ds_hf, name).default,
        (*arguments, *rate),
        scalars,
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize("name", CALLS)
def test_compiled_calls_compute_the_same(name: str) -> None:
    arguments, scalars = CALLS[name]

    def copies() -> list[Any]:
        return [[t.clone() for t in a] if isinstance(a, list) else a for a in arguments]

    eager, compiled = copies(), copies()
    expected = getattr(library, name)(*eager, **scalars)
    result = torch.compile(getattr(library, name), backend="aot_eager", fullgraph=True)(*compiled, **scalars)
    torch.testing.assert_close(compiled, eager, rtol=0, atol=0)
    if expected is not None:
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
    torch._dynamo.reset()


def test_written_tensors_count_versions() -> None:
    """Autograd then notices that a tensor which it saved has changed."""
    arguments = adam_arguments()
    versions = [[t._version for t in tensors] for tensors in arguments[:5]]
    library.adam_(*arguments, **ADAM)
    changed = [
        [t._version > v for t, v in zip(ts, vs, strict=True)] for ts, vs in zip(arguments, versions, strict=False)
    ]
    assert changed == [[True] * 2, [False] * 2, [True] * 2, [True] * 2, [True] * 2]


def test_what_no_kernel_takes_goes_to_the_reference_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    log.forget_said()
    lists = [[values(5, torch.float64, seed)] for seed in range(2)]
    with caplog.at_level(logging.INFO, logger="ds_hf"):
        for _ in range(2):
            library.sgd_(
                *lists, [], [], None, lr=0.1, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, first=True
            )
    assert [r.message for r in caplog.records] == [
        "ds_hf::sgd_ on cpu runs in plain torch: the kernels do not take float64"
    ]
    torch.testing.assert_close(lists[0][0], values(5, torch.float64) - 0.2 * values(5, torch.float64, 1))


def test_masters_in_fp16_go_to_the_reference() -> None:
    arguments = [[t.half() for t in tensors] for tensors in adam_arguments()[:4]]
    expected = [[t.double() for t in tensors] for tensors in arguments]
    steps = [torch.ones(()), torch.ones(())]
    library.adam_(*arguments, [], steps, None, **ADAM)
    reference.adam_(*expected, [], steps, None, **ADAM)
    torch.testing.assert_close(arguments[0], [t.half() for t in expected[0]], rtol=2e-3, atol=1e-4)


def test_other_devices_have_the_reference() -> None:
    module, reason = library.choose(torch.device("meta"))
    assert module is reference
    assert reason == "ds_hf has no kernels for the device meta"


def test_without_the_library_torch_computes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(cpu, "available", lambda: "no C++ compiler when ds_hf was installed")
    log.forget_said()
    one, two = adam_arguments(), adam_arguments()
    with caplog.at_level(logging.INFO, logger="ds_hf"):
        library.adam_(*one, **ADAM)
    assert "ds_hf::adam_ on cpu runs in plain torch: no C++ compiler" in caplog.text
    reference.adam_(*two, **ADAM)
    torch.testing.assert_close(one[0], two[0], rtol=0, atol=0)


SUM = {"cuts": [0, 0, 0, 0, 5], "place": 0, "factor": 1.0}


@pytest.mark.parametrize(
    ("out", "mine", "rows", "changes", "error"),
    [
        (torch.zeros(5), torch.zeros(5), torch.zeros(1, 4), {}, "not within"),
        (torch.zeros(4), torch.zeros(5), torch.zeros(1, 5), {}, "not within"),
        (torch.zeros(5), torch.zeros(4), torch.zeros(1, 5), {}, "not within"),
        (torch.zeros(5), torch.zeros(5), torch.zeros(1, 5), {"cuts": [1, 0, 0, 0, 5]}, "not within"),
        (torch.zeros(5), torch.zeros(5), torch.zeros(1, 5), {"cuts": [0, 0, 0, -1, 5]}, "not within"),
        (torch.zeros(5), torch.zeros(5), torch.zeros(1, 5), {"place": 2}, "place 2 is not one of 2 ranks"),
        (torch.zeros(5), torch.zeros(5), torch.zeros(5), {}, "rows must be"),
        (torch.zeros(5), torch.zeros(5), torch.zeros(5, 1).t().expand(2, 5), {}, "contiguous"),
        (torch.zeros(5, device="meta"), torch.zeros(5), torch.zeros(1, 5), {}, "on meta"),
        (torch.zeros(5), torch.zeros(5, dtype=torch.bfloat16), torch.zeros(1, 5), {}, "bfloat16"),
        (torch.zeros(5, dtype=torch.int32), torch.zeros(5), torch.zeros(1, 5), {}, "int32"),
    ],
)
def test_sums_of_what_does_not_fit_are_refused(
    out: torch.Tensor, mine: torch.Tensor, rows: torch.Tensor, changes: dict[str, Any], error: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=error):
        library.sum_parts_(out, [mine], None, rows, **{**SUM, **changes})
