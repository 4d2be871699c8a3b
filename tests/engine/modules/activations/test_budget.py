"""``ds_hf.activation_memory_budget``: compiled blocks keep fewer bytes for backward, and compute the same."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_hf import initialize
from ds_hf.engine.modules.compiling import ModuleCompiler
from tests.contract.test_tensor_parallel import config
from tests.helpers.compiled import BACKEND, with_quick_backend
from tests.helpers.distributed import run_distributed
from tests.helpers.tensor import batches_of, build, loss_of


class Block(nn.Module):
    """An MLP: what its activation functions give is cheap to compute again."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.middle, self.down = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.middle(F.gelu(self.up(x)))))


class Kept:
    """Bytes that autograd keeps for backward beside parameters, while it is entered."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = {param.untyped_storage().data_ptr() for param in model.parameters()}
        self.sizes: dict[int, int] = {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.keep, lambda value: value)

    def keep(self, value: Tensor) -> Tensor:
        where = value.untyped_storage().data_ptr()
        if where not in self.parameters:
            self.sizes[where] = value.untyped_storage().nbytes()
        return value

    @property
    def nbytes(self) -> int:
        return sum(self.sizes.values())


@pytest.mark.parametrize("options", [{"backend": BACKEND}, pytest.param({}, marks=pytest.mark.slow)])
def test_a_block_keeps_less_and_computes_the_same(options: dict[str, str]) -> None:
    import torch._functorch.config as settings

    torch.manual_seed(0)
    block, x = Block().double(), torch.randn(8, 16, dtype=torch.float64)
    block(x).square().sum().backward()
    expected = [param.grad for param in block.parameters()]
    kept = []
    for budget in (None, 1.0, 0.5, 0.0):
        torch._dynamo.reset()
        compiler = ModuleCompiler([block], budget)
        compiler.compile(block, **options)
        block.zero_grad()
        with (tracked := Kept(block)).hooks:
            loss = block(x).square().sum()
        loss.backward()
        kept.append(tracked.nbytes)
        compiler.remove()
        for param, gradient in zip(block.parameters(), expected, strict=True):
            torch.testing.assert_close(param.grad, gradient, rtol=1e-12, atol=1e-12)
    assert kept[0] == kept[1] > kept[2] > kept[3], kept
    assert kept[2] <= 0.6 * kept[1], kept
    assert settings.activation_memory_budget == 1.0  # torch's own stays


def test_alike_blocks_share_their_graphs() -> None:
    torch._dynamo.reset()
    blocks, x = [Block() for _ in range(3)], torch.randn(8, 16)
    compiler = ModuleCompiler(blocks, 0.5)
    for block in blocks:
        compiler.compile(block, backend=BACKEND)
        block(x).sum().backward()
    assert (compiler.report().modules, compiler.report().graphs) == (3, 1)
    compiler.remove()


def of_engine(budget: float, *, checkpointed: bool = False) -> tuple[int, list[float], float]:
    """Bytes kept of a step, the losses and the norm of three steps of a Llama."""
    torch._dynamo.reset()
    own = config("llama", 1, 1)
    del own["tensor_parallel"]
    own["ds_hf"] = {"compile": "blocks", "activation_memory_budget": budget}
    model = build("llama", use_cache=False)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    engine = with_quick_backend(initialize(model=model, config=own)[0])
    losses = []
    for step in batches_of(3, 1, 1):
        with (kept := Kept(engine.module)).hooks:
            loss = loss_of(engine, step[0, 0])
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    norm = engine.get_global_grad_norm()
    engine.destroy()
    assert norm is not None
    return kept.nbytes, losses, float(norm)


def of_engines() -> list[tuple[int, list[float], float]]:
    return [of_engine(budget) for budget in (1.0, 0.5)]


@pytest.mark.slow
def test_the_key_of_the_file() -> None:
    ((whole, losses, norm), (half, others, other)) = run_distributed(of_engines, 1, timeout=60)[0]
    assert half < 0.75 * whole, (half, whole)  # embedding, head and loss are not compiled and keep all of theirs
    assert others == pytest.approx(losses, rel=1e-6)
    assert other == pytest.approx(norm, rel=1e-5)


@pytest.mark.slow
def test_checkpointed_blocks_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        of_engine(0.5, checkpointed=True)
    assert "activation_memory_budget has no effect: the blocks are checkpointed" in caplog.text
