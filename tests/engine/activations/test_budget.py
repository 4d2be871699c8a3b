"""torch's ``activation_memory_budget`` with compiled blocks of an engine: fewer bytes are kept for backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ds_hf import initialize
from tests.contract.test_tensor_parallel import config
from tests.helpers.distributed import run_distributed
from tests.helpers.tensor import batches_of, build, loss_of


def kept_for_backward(budget: float) -> tuple[int, list[float], float]:
    """Bytes that autograd keeps of a step beside parameters, the losses, and the norm of three steps."""
    import torch._functorch.config as settings

    torch._dynamo.reset()
    settings.activation_memory_budget = budget
    own = config("llama", 1, 1)
    del own["tensor_parallel"]
    engine = initialize(model=build("llama", use_cache=False), config=own)[0]
    engine.compile(backend="aot_eager_decomp_partition")
    params = {param.untyped_storage().data_ptr() for param in engine.module.parameters()}
    kept: dict[int, int] = {}

    def keep(value: Tensor) -> Tensor:
        kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    losses = []
    for step in batches_of(3, 1, 1):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            loss = loss_of(engine, step[0, 0])
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return sum(size for where, size in kept.items() if where not in params), losses, engine.get_global_grad_norm()


def budgets() -> list[tuple[int, list[float], float]]:
    return [kept_for_backward(budget) for budget in (1.0, 0.5)]


@pytest.mark.slow
def test_a_budget_keeps_less() -> None:
    ((whole, losses, norm), (half, others, other)) = run_distributed(budgets, 1, timeout=60)[0]
    assert half < 0.75 * whole, (half, whole)  # embedding, head and loss are not compiled and keep all of theirs
    assert others == pytest.approx(losses, rel=1e-6)
    assert other == pytest.approx(norm, rel=1e-5)
