"""Mixtures of experts at stage 3, without any flag: ranks take different experts in training and evaluation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.compat import stage3_code as code
from tests.compat.common import WORLD, run_user_code

STAGE3 = "Stage 3 models"
TOLERANCE = 2e-5
WIDTH, EXPERTS = 16, 4


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Mixture(nn.Module):
    """Each token goes to one expert; experts without a token are not called, as people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        weights, chosen = self.gate(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(flat[rows]) * weights[rows, None])
        return x + out.view_as(x)


class OneMixture(nn.Module):
    """A mixture in the middle of a model that has no blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.middle, self.head = nn.Linear(WIDTH, WIDTH), Mixture(), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(torch.relu(self.before(x))))


class Blocks(nn.Module):
    """Mixtures one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixture() for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Unnamed(nn.Module):
    """A model that itself chooses, in words of its own; one whole branch a rank, another at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.switch = nn.Linear(WIDTH, 2)
        self.paths = nn.ModuleList(Expert() for _ in range(2))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        path = int(x[0, 0, 0] > 0)
        h = self.before(x)
        return self.head(h + self.paths[path](h) * self.switch(h).softmax(-1)[..., path, None])


class Sometimes(nn.Module):
    """Ordinary blocks, of which a part runs or not by the data of the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SometimesBlock() for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class SometimesBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main, self.adapter = Expert(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.main(x)
        return y + self.adapter(y) if bool(x[0, 0, 0] > 0) else y


class Tasks(nn.Module):
    """A head for each task; a batch has one task."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, 1100)
        self.heads = nn.ModuleDict({"left": nn.Linear(1100, 1000), "right": nn.Linear(1100, 1000)})  # large on purpose

    def forward(self, x: Tensor) -> Tensor:
        return self.heads["left" if bool(x[0, 0, 0] > 0) else "right"](torch.tanh(self.body(x)))


MODELS = (OneMixture, Blocks, Mixture, Unnamed, Sometimes, Tasks)


def mean_square(model: nn.Module, batch: code.Batch) -> Tensor:
    """A loss."""
    out: Tensor = model(batch["x"])
    return out.square().mean()


def batch(step: int, rank: int) -> code.Batch:
    """Few tokens, so that most experts get none; the first number says which way a rank goes."""
    x = torch.randn(1, 2, WIDTH, generator=torch.Generator().manual_seed(17 * step + rank))
    x[0, 0, 0] = 1.0 if (step + rank) % 2 else -1.0
    return {"x": x}


def train_and_evaluate() -> dict[str, tuple[float, float, bool]]:
    """Each model: errors of training and of evaluation, and whether ranks went different ways."""
    import deepspeed

    deepspeed.init_distributed()
    found = {}
    for make in MODELS:
        torch.manual_seed(3)
        plain = make()
        torch.manual_seed(3)
        engine = code.initialize(make(), code.config())
        batches = [[batch(step, r) for r in range(code.world())] for step in range(4)]
        reference = code.train_plain(plain, batches, mean_square)
        trained = code.largest(code.train_engine(engine, batches, mean_square), reference)
        unused = [p.grad is None for p in plain.parameters()]
        mean_square(plain, batches[0][0]).backward()
        unused = [p.grad is None for p in plain.parameters()]
        engine.eval()
        with torch.no_grad():
            own = [row[code.rank()] for row in batches]
            ours = [mean_square(engine, code.on(engine.device, one)).item() for one in own]
            theirs = [[mean_square(plain, one).item()] * code.world() for one in own]
        found[make.__name__] = (trained, code.largest(ours, theirs), any(unused))
        engine.destroy()
    return found


@pytest.mark.feature(
    STAGE3, "mixture of experts, branches and heads that ranks use differently, without any flag", pain="P16"
)
def test_ranks_may_take_different_ways_without_any_flag() -> None:
    for found in run_user_code(train_and_evaluate):
        for name, (trained, evaluated, has_unused) in found.items():
            assert trained < TOLERANCE, name
            assert evaluated < TOLERANCE, name
            assert has_unused, name


# -- a parameter of another module ----------------------------------------------------------------------------------


class Scale(nn.Module):
    """Its forward uses a weight that another module holds, as DeepSpeed's documentation has it."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.borrowed = [other]  # not a child

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.borrowed[0].weight.t(), self.bias)


class Borrowing(nn.Module):
    def __init__(self, register: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(2))
        owner = self.blocks[0][0]
        assert isinstance(owner, nn.Linear)
        self.scale = Scale(owner)
        if register:
            import deepspeed

            deepspeed.zero.register_external_parameter(self.scale, owner.weight)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.scale(x)


def borrow() -> float:
    import deepspeed

    deepspeed.init_distributed()
    torch.manual_seed(3)
    plain = Borrowing(register=False)
    torch.manual_seed(3)
    engine = code.initialize(Borrowing(register=True), code.config())
    batches = [[batch(step, r) for r in range(code.world())] for step in range(4)]
    return code.largest(code.train_engine(engine, batches, mean_square), code.train_plain(plain, batches, mean_square))


@pytest.mark.feature(STAGE3, "a forward that takes a parameter of another module", pain="P14")
def test_forward_may_take_a_registered_parameter_of_another_module() -> None:
    assert max(run_user_code(borrow)) < TOLERANCE


# -- memory ---------------------------------------------------------------------------------------------------------


def held_during_backward() -> tuple[int, int]:
    """Most blocks whole at one time in backward, though some experts had no gradient; and how many there are."""
    import deepspeed

    deepspeed.init_distributed()
    torch.manual_seed(3)
    engine = code.initialize(nn.Sequential(*(Mixture() for _ in range(6)), nn.Linear(WIDTH, 2)), code.config())
    experts = [m.experts[0].up.weight for m in engine.module[:6]]
    most = 0

    def count(grad: Tensor) -> None:
        nonlocal most
        most = max(most, sum(weight.numel() > 0 for weight in experts))

    x = batch(0, code.rank())["x"].to(engine.device)
    for layer in engine.module:
        layer.register_forward_hook(lambda module, args, out: out.register_hook(count) and None)
    engine.backward(engine(x).square().mean())
    return most, len(experts)


@pytest.mark.skipif(WORLD < 2, reason="one process holds every parameter whole")
@pytest.mark.feature(STAGE3, "blocks whose experts got no token are released in backward", pain="P16")
def test_blocks_with_unused_experts_are_released_in_backward() -> None:
    for most, blocks in run_user_code(held_during_backward):
        assert blocks == 6
        assert 1 <= most <= 2
