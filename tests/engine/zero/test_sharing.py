"""Two engines whose models share modules, against plain torch on one process with two optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_hf
from ds_hf.engine.zero.gather import GatheredParameters
from ds_hf.errors import DsHfError
from tests.helpers.distributed import DistributedFailure, run_distributed

WIDTH = 16


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Embedding(8, WIDTH)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.activation = nn.Tanh()

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.entry(tokens)
        for block in self.blocks:
            hidden = hidden + self.activation(block(hidden))
        return hidden


class Headed(nn.Module):
    """An encoder and a head; something of its own that no other model has, frozen, beside them."""

    def __init__(self, encoder: Encoder, activation: nn.Module) -> None:
        super().__init__()
        self.encoder, self.activation = encoder, activation
        self.own = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, tokens: Tensor, goal: Tensor) -> Tensor:
        hidden = self.activation(self.own(self.encoder(tokens)))
        return (self.head(hidden).squeeze(-1) - goal).pow(2).mean()


def models(kind: str) -> tuple[Headed, Headed]:
    torch.manual_seed(0)
    encoder, activation = Encoder(), nn.Tanh()
    first = Headed(encoder, activation)
    if kind == "activation":
        return first, Headed(copy.deepcopy(encoder), activation)
    if kind == "frozen":
        encoder.requires_grad_(False)
    return first, Headed(encoder, activation)


def trained(model: Headed, kind: str, which: int) -> list[nn.Parameter]:
    """Where the encoder is common and trains, one of the two has it in its optimizer."""
    if kind == ("by-first", "by-second")[1 - which]:
        return list(model.head.parameters())
    return [param for param in model.parameters() if param.requires_grad]


def batches(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 8, (4, 3), generator=generator), torch.randn(4, 3, generator=generator)


STEPS = 3


def in_plain_torch(kind: str, accumulation: int) -> tuple[list[float], dict[str, Tensor]]:
    pair = models(kind)
    chosen = [trained(model, kind, which) for which, model in enumerate(pair)]
    optimizers = [torch.optim.SGD(params, lr=0.1, momentum=0.9) for params in chosen]
    losses, number = [], 0
    for _ in range(STEPS):
        for model, optimizer in zip(pair, optimizers, strict=True):
            for _ in range(accumulation):
                loss = model(*batches(number))
                (loss / accumulation).backward()
                losses.append(loss.item())
                number += 1
            optimizer.step()
            optimizer.zero_grad()
    return losses, weights(pair)


def weights(pair: tuple[Headed, Headed]) -> dict[str, Tensor]:
    with GatheredParameters([param for model in pair for param in model.parameters()]):
        return {
            f"{which}.{name}": param.detach().cpu().clone()
            for which, model in enumerate(pair)
            for name, param in model.named_parameters()
        }


def two_engines(kind: str, stages: tuple[int, int], driven: bool, accumulation: int, folder: str) -> None:
    expected, expected_weights = in_plain_torch(kind, accumulation)
    pair = models(kind)
    engines = []
    for which, (model, stage) in enumerate(zip(pair, stages, strict=True)):
        settings = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20 * (which + 1)},
        }
        params = trained(model, kind, which)
        engines.append(ds_hf.initialize(model=model, model_parameters=params, config=settings)[0])
    losses, number = [], 0
    mine = slice(dist.get_rank() * 2, dist.get_rank() * 2 + 2)
    for _ in range(STEPS):
        for engine in engines:
            for _ in range(accumulation):
                loss = engine(*(each[mine].to(engine.device) for each in batches(number)))
                if driven:
                    engine.backward(loss)
                else:
                    loss.backward()
                engine.step()
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                losses.append(mean.item() / 2)
                number += 1
    assert losses == pytest.approx(expected, rel=1e-5), (losses, expected)
    for name, value in weights(pair).items():
        torch.testing.assert_close(value, expected_weights[name], rtol=1e-5, atol=1e-6, msg=name)
    for which, engine in enumerate(engines):  # whole checkpoints, of both
        engine.save_checkpoint(f"{folder}/{which}")
    with torch.no_grad(), GatheredParameters([p for m in pair for p in m.parameters()], modifier_rank=0):
        for model in pair:
            for param in model.parameters():
                param.zero_()
    for which, engine in enumerate(engines):
        engine.load_checkpoint(f"{folder}/{which}")
    for name, value in weights(pair).items():
        torch.testing.assert_close(value, expected_weights[name], rtol=1e-5, atol=1e-6, msg=name)
    engines[0].destroy()  # the other one goes on
    engines[1].backward(engines[1](*(each[mine].to(engines[1].device) for each in batches(99))))
    engines[1].destroy()


KINDS = ("activation", "frozen", "by-first", "by-second")


@pytest.mark.parametrize(
    ("kind", "stages", "driven", "accumulation"),
    [
        ("activation", (0, 2), False, 2),
        ("activation", (3, 1), True, 1),
        ("frozen", (3, 3), True, 2),
        ("frozen", (0, 3), False, 1),
        ("frozen", (3, 1), False, 2),
        ("by-first", (3, 2), True, 2),
        ("by-second", (3, 3), False, 1),
    ],
)
def test_both_train_as_in_plain_torch(
    kind: str, stages: tuple[int, int], driven: bool, accumulation: int, tmp_path: Path
) -> None:
    run_distributed(two_engines, 2, kind, stages, driven, accumulation, str(tmp_path))


def every_pair(kind: str, driven: bool, accumulation: int, folder: str) -> None:
    for first in range(4):
        for second in range(4):
            place = f"{folder}/{first}{second}"
            try:
                two_engines(kind, (first, second), driven, accumulation, place)
            except Exception as error:
                raise AssertionError(f"{kind}, stages {first} and {second}, {driven=}, {accumulation=}") from error


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("driven", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_every_pair_of_stages(kind: str, driven: bool, accumulation: int, tmp_path: Path) -> None:
    run_distributed(every_pair, 2, kind, driven, accumulation, str(tmp_path))


def half_taken(use: Callable[[Any], Any]) -> None:
    pair = models("both")
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3},
    }
    first, *_ = ds_hf.initialize(model=pair[0], config=settings)
    second, *_ = ds_hf.initialize(model=pair[1], config=settings)
    with pytest.raises(DsHfError, match=r"encoder\.entry\.weight and 8 more.*this one has ended"):
        use(first)
    second.backward(second(*batches(0)))
    second.step()
    first.destroy()
    second.backward(second(*batches(0)))
    second.step()


def call(engine: Any) -> None:
    engine(*batches(0))


def save(engine: Any) -> None:
    engine.save_checkpoint("never")


def write(engine: Any) -> None:
    for method in (engine.save_16bit_model, engine.export_pretrained):
        with pytest.raises(DsHfError, match="this one has ended"):
            method("never")
    engine.module_state_dict()


@pytest.mark.parametrize("use", [call, save, write])
def test_an_engine_whose_parameters_another_one_trains_says_so(use: Callable[[Any], Any]) -> None:
    run_distributed(half_taken, 1, use)


def loss_of_rivals(generator: nn.Module, judge: nn.Module, noise: Tensor, real: Tensor, which: int) -> Tensor:
    """The generator's loss, through the judge, or the judge's."""
    if which:
        return (judge(generator(noise)) - 1).pow(2).mean()
    return (judge(real) - 1).pow(2).mean() + judge(generator(noise).detach()).pow(2).mean()


def rivals() -> list[nn.Module]:
    """A generator and its judge."""
    torch.manual_seed(0)
    return [
        nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)), nn.Linear(WIDTH, out))
        for out in (WIDTH, 1)
    ]


def one_reaches_through_the_other(stages: tuple[int, int], driven: bool, accumulation: int, clears: bool) -> None:
    """Backward of the generator's loss leaves gradients with the discriminator, which adds them up or drops them."""
    pair = rivals()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in pair]
    ours, engines = rivals(), []
    for model, stage in zip(ours, stages, strict=True):
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }
        engines.append(ds_hf.initialize(model=model, config=config)[0])
    for step in range(3):
        if clears:
            optimizers[1].zero_grad()
            engines[1].optimizer.zero_grad()
        for which in (0, 1):
            for micro in range(accumulation):
                seed = step * 100 + which * 10 + micro
                batch = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(seed))
                (loss_of_rivals(*pair, *batch, which) / accumulation).backward()
                mine = batch[:, dist.get_rank() * 2 : dist.get_rank() * 2 + 2].to(engines[0].device)
                loss = loss_of_rivals(*engines, *mine, which)
                if driven:
                    engines[1 - which].backward(loss)
                else:
                    loss.backward()
                engines[1 - which].step()
            optimizers[1 - which].step()
            optimizers[1 - which].zero_grad()
    with GatheredParameters([p for model in ours for p in model.parameters()]):
        for model, plain in zip(ours, pair, strict=True):
            for value, expected in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(value.detach().cpu(), expected.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("stages", "driven", "accumulation", "clears"),
    [((1, 0), True, 2, False), ((3, 3), False, 2, True), ((2, 3), True, 1, False)],
)
def test_backward_of_one_model_through_another(
    stages: tuple[int, int], driven: bool, accumulation: int, clears: bool
) -> None:
    run_distributed(one_reaches_through_the_other, 2, stages, driven, accumulation, clears)


def one_loss_in_fp16(stages: tuple[int, int], dtypes: tuple[str, str], use: str) -> None:
    """Two engines that learn from one loss, of which some train in fp16, each with another loss scale."""
    pair, ours, engines = rivals(), rivals(), []
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in pair]
    for model, stage, dtype in zip(ours, stages, dtypes, strict=True):
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            dtype: {"enabled": True, **({"initial_scale_power": 8 + stage} if dtype == "fp16" else {})},
        }
        engines.append(ds_hf.initialize(model=model, config=config)[0])
    for step in range(3):
        noise = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        mine = noise[dist.get_rank() * 2 : dist.get_rank() * 2 + 2].to(engines[0].device)
        loss = engines[1](engines[0](mine)).float().sub(1).pow(2).mean()
        engines[0].backward(loss) if use == "backward" else engines[0].scale(loss).backward()
        pair[1](pair[0](noise)).sub(1).pow(2).mean().backward()
        for engine, optimizer in zip(engines, optimizers, strict=True):
            engine.step()
            optimizer.step()
            optimizer.zero_grad()
    with GatheredParameters([p for model in ours for p in model.parameters()]):
        for model, plain in zip(ours, pair, strict=True):
            for value, expected in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(value.detach().float().cpu(), expected.detach(), rtol=0, atol=2e-3)


@pytest.mark.parametrize(("stages", "use"), [((0, 3), "backward"), ((2, 1), "scale")])
def test_one_loss_of_two_engines_in_fp16(stages: tuple[int, int], use: str) -> None:
    run_distributed(one_loss_in_fp16, 2, stages, ("fp16", "fp16"), use)


@pytest.mark.parametrize("use", ["backward", "scale"])
def test_one_loss_without_the_scale_that_the_other_engine_needs(use: str) -> None:
    said = "an engine that has no loss scale reached parameters of this one" if use == "backward" else "Loss scaling is"
    with pytest.raises(DistributedFailure, match=said):
        run_distributed(one_loss_in_fp16, 1, (0, 0), ("bf16", "fp16"), use)


def a_scaled_loss_that_trains_nothing(stage: int) -> None:
    """Whose backward never came, or ended in an exception: another engine's ``loss.backward()`` is as without it."""
    engines = []
    for more in ({"fp16": {"enabled": True, "initial_scale_power": 8}}, {}):
        torch.manual_seed(0)
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "zero_optimization": zero, **more}
        config["optimizer"] = {"type": "SGD", "params": {"lr": 0.0}}
        engines.append(ds_hf.initialize(model=nn.Linear(WIDTH, 1), config=config)[0])
    scaled, other = engines
    batch = torch.randn(2, WIDTH).to(other.device)
    plain = nn.Linear(WIDTH, 1)
    plain.load_state_dict({name: value.float().cpu() for name, value in other.named_weights()})
    plain(batch.cpu()).pow(2).mean().backward()
    wanted = float(nn.utils.clip_grad_norm_(plain.parameters(), 1e9))
    for fails in (False, True):
        outputs = scaled(batch).float()
        loss = scaled.scale(outputs.pow(2).mean())
        if fails:
            outputs.register_hook(lambda grad: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                loss.backward()
        other(batch).pow(2).mean().backward()
        other.step()
        assert other.get_global_grad_norm() == pytest.approx(wanted, rel=1e-5)
        outputs = scaled(batch)
        with pytest.raises(DsHfError, match="Loss scaling is required"):
            outputs.float().pow(2).mean().backward()

    elsewhere = torch.ones(3, requires_grad=True)  # of no engine
    outputs, unscaled = other(batch), scaled(batch).float()
    torch.autograd.grad(scaled.scale(elsewhere.sum()), elsewhere)
    outputs.pow(2).mean().backward()
    other.step()
    assert other.get_global_grad_norm() == pytest.approx(wanted, rel=1e-5)
    scaled.scale(elsewhere.sum()).backward()
    with pytest.raises(DsHfError, match="Loss scaling is required"):
        unscaled.pow(2).mean().backward()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_scaled_loss_that_trains_nothing_is_forgotten(stage: int) -> None:
    run_distributed(a_scaled_loss_that_trains_nothing, 1, stage)


class Critic(nn.Module):
    """A head on the first layer of an actor, which its loss reaches."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk, self.head = trunk, nn.Linear(WIDTH, 1)

    def forward(self, batch: Tensor) -> Tensor:
        return (self.head(torch.tanh(self.trunk(batch))) - 1).float().pow(2).mean()


class Actor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, batch: Tensor) -> Tensor:
        return self.head(torch.tanh(self.trunk(batch))).float().pow(2).mean()


def actor_and_critic() -> list[nn.Module]:
    torch.manual_seed(0)
    actor = Actor()
    return [actor, Critic(actor.trunk)]


def updated_together(cases: list[tuple[tuple[int, int], int, str, tuple[float, float] | None]]) -> None:
    """Both backwards, then both steps: a part of the actor's gradients comes of the critic's loss."""
    for stages, accumulation, order, scales in cases:
        plain, ours = actor_and_critic(), actor_and_critic()
        optimizers = [torch.optim.SGD(params, lr=0.1) for params in (plain[0].parameters(), plain[1].head.parameters())]
        engines = []
        for which, (model, stage) in enumerate(zip(ours, stages, strict=True)):
            config = {
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": accumulation,
                "gradient_clipping": 0.0,
                "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
                "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            }
            if scales:
                config["fp16"] = {"enabled": True, "loss_scale": scales[which]}
            params = list((model.head if which else model).parameters())
            engines.append(ds_hf.initialize(model=model, model_parameters=params, config=config)[0])
        for step in range(2 * accumulation):
            batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
            mine = batch[dist.get_rank() * 2 : dist.get_rank() * 2 + 2].to(engines[0].device)
            for which in map(int, order[:2]):
                (plain[which](batch) / accumulation).backward()
                loss = engines[which](mine.half() if scales else mine)
                if order.endswith("by hand"):
                    (engines[which].scale(loss) if scales else loss).backward()
                else:
                    engines[which].backward(loss)
            for which in (0, 1):
                engines[which].step()
                if step % accumulation == accumulation - 1:
                    optimizers[which].step()
                    optimizers[which].zero_grad()
        tolerance = 2e-3 if scales else 1e-6
        with GatheredParameters([p for model in ours for p in model.parameters()]):
            for (name, value), expected in zip(ours[1].named_parameters(), plain[1].parameters(), strict=True):
                torch.testing.assert_close(
                    value.detach().float().cpu(),
                    expected.detach(),
                    rtol=0,
                    atol=tolerance,
                    msg=lambda text, case=(stages, accumulation, order, scales, name): f"{case}: {text}",
                )
        for engine in engines:
            engine.destroy()


def test_updates_together_of_engines_of_which_one_reaches_into_the_other() -> None:
    """As in one process, whatever the orders, and whatever the loss scales are."""
    plain = [((2, 2), 3, "01"), ((3, 0), 3, "01"), ((0, 3), 3, "10"), ((0, 0), 3, "01"), ((0, 0), 1, "01")]
    by_hand = [((0, 1), 3, "01 by hand"), ((3, 3), 3, "10 by hand")]
    half = [((0, 0), 1, "01"), ((2, 3), 2, "10"), ((3, 1), 2, "01 by hand")]
    cases = [*((*case, None) for case in plain + by_hand), *((*case, (128.0, 2048.0)) for case in half)]
    run_distributed(updated_together, 2, cases)


def seen_beside_another() -> None:
    models = actor_and_critic()[:1] + rivals()[:1]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    first, other = (ds_hf.initialize(model=model, config=config)[0] for model in models)
    batch = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    first.backward(first(batch))
    before = {name: param.grad for name, param in first.module.named_parameters()}
    assert all(grad is not None for grad in before.values())
    other(batch).pow(2).mean().backward()
    other.backward(other(batch).pow(2).mean())
    assert all(param.grad is before[name] for name, param in first.module.named_parameters())


def test_gradients_of_stage_0_stay_to_be_seen_when_another_engine_runs_backward() -> None:
    run_distributed(seen_beside_another, 2)


def with_a_reference() -> None:
    """A policy of adapters on a frozen base, and a reference model that is that base."""
    from peft import LoraConfig, get_peft_model

    def policy_of(base: nn.Module) -> Any:
        torch.manual_seed(1)
        return get_peft_model(base, LoraConfig(r=4, target_modules=r"\d\.0", init_lora_weights=False))

    def outputs(reference: Any, policy: Any, step: int) -> tuple[Tensor, Tensor]:
        batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        with torch.no_grad(), policy_model.disable_adapter():
            expected = reference(batch)
        return expected, (policy(batch) - 1).pow(2).mean()

    def losses_with(reference: Any, policy: Any, update: Callable[[Tensor], None]) -> list[float]:
        found = []
        for step in range(3):
            expected, loss = outputs(reference, policy, step)
            update(loss)
            found += [expected.mean().item(), loss.item()]
        return found

    def settings(stage: int, **more: Any) -> dict[str, Any]:
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        return {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, "zero_optimization": zero, **more}

    base = rivals()[0]
    policy_model = policy_of(base)
    sgd = torch.optim.SGD([p for p in policy_model.parameters() if p.requires_grad], lr=0.1)

    def plainly(loss: Tensor) -> None:
        loss.backward()
        sgd.step()
        sgd.zero_grad()

    wanted = losses_with(base, policy_model, plainly)
    for first, second in ((3, 0), (0, 3), (3, 3), (2, 2)):
        for order in ("policy first", "reference first", "the same model"):
            base = rivals()[0]
            policy_model = policy_of(base)
            made = policy_model if order == "the same model" else base
            engines: dict[str, Any] = {}
            for role in ("reference", "policy") if order == "reference first" else ("policy", "reference"):
                config = settings(first, optimizer={"type": "SGD", "params": {"lr": 0.1}})
                model = policy_model if role == "policy" else made
                config = config if role == "policy" else settings(second)
                engines[role], *_ = ds_hf.initialize(model=model, config=config)

            def trained(loss: Tensor, engine: Any = engines["policy"]) -> None:
                engine.backward(loss)
                engine.step()

            found = losses_with(engines["reference"], engines["policy"], trained)
            assert found == pytest.approx(wanted, rel=1e-5), (first, second, order)
            for engine in engines.values():
                engine.destroy()


def test_a_policy_and_its_reference_share_a_base() -> None:
    run_distributed(with_a_reference, 2)
