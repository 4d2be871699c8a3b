"""Which kernel computes a loss over a head: Liger's where it is, on a GPU, with fp32 sums of the weight's gradient."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from ds_hf.engine.modules.tiling import loss

FAKE = """
import torch

calls = []

def liger_fused_linear_cross_entropy(input, weight, target, bias=None, ignore_index=-100, reduction="mean"{more}):
    calls.append({said})
    logits = torch.nn.functional.linear(input.as_subclass(torch.Tensor), weight, bias)
    return torch.nn.functional.cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction)
"""


class OnGpu(Tensor):
    is_cuda = True  # type: ignore[assignment]


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which a package ``liger_kernel`` is found."""
    for name in [name for name in sys.modules if name.startswith("liger_kernel")]:
        monkeypatch.delitem(sys.modules, name)
    package = tmp_path / "liger_kernel" / "transformers"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    loss._liger.cache_clear()
    yield package / "functional.py"
    loss._liger.cache_clear()
    for name in [name for name in sys.modules if name.startswith("liger_kernel")]:
        del sys.modules[name]


@pytest.mark.parametrize(("more", "said"), [(", accum_dtype=None", "accum_dtype"), ("", "None")])
def test_ligers_kernel_is_called(fresh: Path, more: str, said: str) -> None:
    fresh.write_text(FAKE.format(more=more, said=said))
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(7, 5), torch.randn(11, 5), torch.randn(11)
    labels = torch.tensor([1, 2, -7, 4, 10, -7, 0])
    expected = cross_entropy(linear(hidden, weight, bias), labels, ignore_index=-7, reduction="sum")
    found = loss.linear_cross_entropy(hidden.as_subclass(OnGpu), weight, labels, bias, ignore_index=-7)
    import liger_kernel.transformers.functional as fake  # type: ignore[import-not-found]

    assert fake.calls == [torch.float32 if said == "accum_dtype" else None]
    torch.testing.assert_close(found, expected)
    assert len(fake.calls) == 1
    torch.testing.assert_close(loss.linear_cross_entropy(hidden, weight, labels, bias, ignore_index=-7), expected)
    assert len(fake.calls) == 1, "on the CPU it is torch's operators"
