"""Parameters at rest: copies of them are errors, writes to them are told; copies of what is whole are plain models."""

from __future__ import annotations

import copy
import io
import itertools
import logging
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn

from ds_hf import initialize
from ds_hf.engine.zero.access import safe_get_full_fp32_param
from ds_hf.engine.zero.gather import GatheredParameters
from ds_hf.engine.zero.init import Init
from ds_hf.errors import DsHfError
from ds_hf.log import forget_said
from tests.engine.zero.zoo import WIDTH, Stack, mean_square
from tests.helpers.distributed import run_distributed
from tests.helpers.logs import Lines
from tests.helpers.parity import base_config, full_weights, weight_error

SGD = {"type": "SGD", "params": {"lr": 0.05}}


def saved(value: Any) -> Any:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": lambda engine: copy.deepcopy(engine.module),
    "deepcopy of a block": lambda engine: copy.deepcopy(engine.module.blocks[0]),
    "save": lambda engine: saved(engine.module),
    "pickle": lambda engine: pickle.dumps(engine.module.blocks[0].up.weight),
    "save of the state dict": lambda engine: saved(engine.module.state_dict()),
    "deepcopy of the state dict": lambda engine: copy.deepcopy(engine.module_state_dict()),
    "parameter": lambda engine: nn.Parameter(engine.module.blocks[0].up.weight.data),
    "clone": lambda engine: engine.module.blocks[0].up.weight.clone(),
    "safetensors": lambda engine: safetensors.torch.save(engine.module.state_dict()),
    "safetensors of a parameter": lambda engine: safetensors.torch.save({"a": engine.module.blocks[0].up.weight}),
}


def built(stage: int) -> Any:
    torch.manual_seed(2)
    engine, *_ = initialize(model=Stack(), config=base_config(stage, optimizer=SGD))
    train(engine)
    return engine


def train(engine: Any) -> None:
    data = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    engine.backward(mean_square(engine(data)))
    engine.step()


def is_plain(model: nn.Module, engine: Any) -> bool:
    """It trains by itself, and what trains it does not reach the engine, nor the engine it."""
    names = dict(model.named_parameters())
    same = all(torch.equal(value, names[name]) for name, value in full_weights(engine.module).items())
    plain = all(type(p) is nn.Parameter and not hasattr(p, "ds_id") for p in names.values())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    mean_square(model(torch.ones(2, WIDTH))).backward()
    mine = [p.detach().clone() for p in model.parameters()]
    train(engine)
    untouched = all(torch.equal(p, q) for p, q in zip(model.parameters(), mine, strict=True))
    before = full_weights(engine.module)
    optimizer.step()
    after = full_weights(engine.module)
    return same and plain and untouched and all(torch.equal(before[name], after[name]) for name in before)


def copies() -> list[str]:
    wrong = []
    for stage in (0, 1, 2, 3):
        engine = built(stage)
        for name, make in COPIES.items() if stage == 3 else ():
            with pytest.raises(DsHfError, match="GatheredParameters") as told:
                make(engine)
            said = str(told.value)
            if ("weight" not in said and "bias" not in said) or "stage3_param_persistence_threshold" not in said:
                wrong.append(name)
        for make in (copy.deepcopy, saved):
            with GatheredParameters(list(engine.module.parameters())):
                taken = make(engine.module)
            if not is_plain(taken, engine):
                wrong.append(f"{make.__name__} at stage {stage}")
        for part in (engine, engine.optimizer):
            for make in (copy.deepcopy, pickle.dumps):
                with pytest.raises(DsHfError, match="copied or pickled"):
                    make(part)
        engine.destroy()
    return wrong


def test_copies_are_whole_plain_models_or_errors() -> None:
    assert run_distributed(copies, 2, timeout=100) == [[], []]


def written_twice(file: str) -> list[str]:
    """As DeepSpeed-Chat does: a state dict on one process, and in its place then what all gather."""
    engine, lines = built(3), Lines(logging.WARNING)
    logging.getLogger("ds_hf").addHandler(lines)
    if dist.get_rank() == 0:
        torch.save(engine.module.state_dict(), file)
    if dist.get_rank() == 0:
        with pytest.raises(DsHfError, match="would be empty"):
            torch.load(file, weights_only=False)
    whole = full_weights(engine.module)
    if dist.get_rank() == 0:
        torch.save(whole, file)
        assert all(torch.equal(value, whole[name]) for name, value in torch.load(file).items())
    return [line for line in lines.texts if "can not be read" in line]


def test_a_state_dict_of_nothing_can_be_written_and_not_read(tmp_path: Path) -> None:
    told, silent = run_distributed(written_twice, 2, str(tmp_path / "weights.bin"))
    assert len(told) == 1
    assert not silent


def forked() -> None:
    """A child would write into the connections of its parent; a copy works in it."""
    engine = built(3)
    with GatheredParameters(list(engine.module.parameters())):
        copied = copy.deepcopy(engine.module)
    expected = float(mean_square(copied(torch.ones(2, WIDTH))))
    context = multiprocessing.get_context("fork")
    answers: list[Any] = []
    for model in (engine.module, copied):
        queue = context.SimpleQueue()
        process = context.Process(target=called_in_a_child, args=(model, queue))
        process.start()
        answers.append(queue.get())
        process.join()
    assert "made by fork" in answers[0]
    assert answers[1] == expected
    train(engine)


def called_in_a_child(model: nn.Module, answers: Any) -> None:
    torch.set_num_threads(1)
    try:
        answers.put(float(mean_square(model(torch.ones(2, WIDTH)))))
    except DsHfError as error:
        answers.put(str(error))


def test_a_forked_child() -> None:
    run_distributed(forked, 2, timeout=100)


def copies_before_initialize() -> bool:
    """What zero.Init made is copied shard by shard, and may have an engine of its own."""
    with Init(config_dict_or_path={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}):
        model = Stack()
    copied = copy.deepcopy(model)
    before = full_weights(model)
    with pytest.raises(DsHfError, match="GatheredParameters"):
        saved(model)
    engine, *_ = initialize(model=copied, config=base_config(3, optimizer=SGD))
    train(engine)
    after, trained = full_weights(model), full_weights(copied)
    same = all(torch.equal(before[name], after[name]) for name in before)
    return same and not all(torch.equal(before[name], trained[name]) for name in before)


def test_copies_of_what_init_made_are_sharded_and_train_by_themselves() -> None:
    assert run_distributed(copies_before_initialize, 2, timeout=60) == [True, True]


def _in_place(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.mul_(2.0)


def _replace(weight: nn.Parameter) -> None:
    weight.data = torch.ones(3)


WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "mul_": _in_place,
    "fill_ or constant_": lambda weight: nn.init.constant_(weight, 1.0),
    "data.zero_": lambda weight: weight.data.zero_(),
    "data.__setitem__": lambda weight: weight.data.__setitem__(slice(0, 2), 1.0),
    "data = ...": _replace,
}


def writes() -> list[str]:
    engine, lines, silent = built(3), Lines(logging.WARNING), []
    logging.getLogger("ds_hf").addHandler(lines)
    weight = engine.module.blocks[1].up.weight
    before = full_weights(engine.module)
    for name, write in WRITES.items():
        forget_said()
        lines.texts.clear()
        write(weight)
        write(weight)
        told = [text for text in lines.texts if "blocks.1.up.weight" in text and "modifier_rank=0" in text]
        if len(told) != 1 or not any(word in told[0] for word in name.split(" or ")):
            silent.append(f"{name}: {lines.texts}")
    forget_said()
    lines.texts.clear()
    with GatheredParameters([weight]):
        nn.init.zeros_(weight)
    if len(lines.texts) != 1 or "blocks.1.up.weight" not in lines.texts[0]:
        silent.append(f"gathered: {lines.texts}")
    lines.texts.clear()
    _ = weight.requires_grad_(True), weight.detach(), weight.grad
    silent += lines.texts
    after = full_weights(engine.module)
    engine.module.bfloat16()
    if len(lines.texts) != 1 or "is not cast to bfloat16" not in lines.texts[0]:
        silent.append(f"cast: {lines.texts}")
    engine.destroy()
    return silent + [name for name in before if not torch.equal(before[name], after[name])]


def test_writes_to_what_is_not_here_are_told_once_by_name() -> None:
    told = run_distributed(writes, 2, timeout=60)
    assert told[0] == []


def _load_elsewhere(params: list[nn.Parameter]) -> None:
    other = nn.Linear(3, 2)
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict({"weight": params[0].detach(), "bias": params[1].detach()})


READS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "norm": lambda params: [param.norm() for param in params],
    "norm of data": lambda params: [param.data.norm() for param in params],
    "norm of detached data": lambda params: [param.data.detach().norm() for param in params],
    "norm of detached": lambda params: [param.detach().norm() for param in params],
    "cast first": lambda params: [param.detach().float().pow(2).sum() for param in params],
    "cast with gradients": lambda params: [param.double().sum() for param in params],
    "counted": lambda params: [(param.data == 0).sum() for param in params],
    "vector of data": lambda params: torch.cat([param.data.view(-1) for param in params]),
    "average": lambda params: [torch.zeros_like(param.data).add_(param.data, alpha=0.1) for param in params],
    "torch.norm": lambda params: [torch.norm(param) for param in params],
    "torch.equal": lambda params: [torch.equal(param, param) for param in params],
    "histogram": lambda params: [torch.histc(param.detach().float()) for param in params],
    "foreach": lambda params: torch._foreach_norm(params),
    "total norm": nn.utils.get_total_norm,
    "foreach of data": lambda params: torch._foreach_norm([param.data for param in params]),
    "not a number": lambda params: any(torch.isnan(param).any() for param in params),
    "loaded elsewhere": lambda params: _load_elsewhere(params),
    "zeros": lambda params: [(param == 0).sum() for param in params],
    "array": lambda params: [param.__array__() for param in params],
}
FORMS: dict[str, Callable[[nn.Parameter], Any]] = {
    "numel": lambda param: param.numel(),
    "size": lambda param: param.size(),
    "shape": lambda param: param.shape,
    "ndim": lambda param: param.ndim >= 2,  # which weights decay
    "dim": lambda param: param.dim(),
    "len": lambda param: [len(param)],
    "address": lambda param: param.data_ptr(),  # which are tied
    "storage": lambda param: param.untyped_storage().data_ptr(),
    "numel of a value": lambda param: param.data.numel(),
    "shape of a value": lambda param: param.detach().shape,
}


def elements(params: list[nn.Parameter]) -> int:
    """As scripts for DeepSpeed count them."""
    return sum(param.ds_numel if hasattr(param, "ds_numel") else param.numel() for param in params)


def test_a_model_whose_engine_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    """Its weights are in parts still; the sentence comes before torch's own error."""
    forget_said()
    model = nn.Linear(3, 2)
    engine = initialize(model=model, config=base_config(3))[0]
    before = engine(torch.ones(1, 3)).tolist()
    engine.destroy()
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 3))
    assert "`linear()` of weight (2, 3) sees no values" in caplog.text
    assert "was destroyed" in caplog.text
    with GatheredParameters(list(model.parameters())):
        assert model(torch.ones(1, 3)).tolist() == before
    again = initialize(model=model, config=base_config(3))[0]
    assert again(torch.ones(1, 3)).tolist() == before
    again.destroy()


def reads() -> list[str]:
    """Which are not told, and what else is."""
    engine, lines, wrong = built(3), Lines(logging.WARNING), []
    logging.getLogger("ds_hf").addHandler(lines)
    params = list(engine.module.parameters())
    for param in params:
        param._ds_home.buffer.hold.turns = 0
    train(engine)
    for name, read in READS.items():
        forget_said()
        lines.texts.clear()
        with torch.no_grad():
            read(params)
            read(params)
        if len(lines.texts) != 1 or "sees no values" not in lines.texts[0]:
            wrong.append(f"{name}: {lines.texts}")
    for name, form in FORMS.items():
        forget_said()
        lines.texts.clear()
        form(params[0])
        if len(lines.texts) != 1 or "ds_shape" not in lines.texts[0]:
            wrong.append(f"{name}: {lines.texts}")
    forget_said()
    lines.texts.clear()
    assert elements(params) == sum(param.numel() for param in Stack().parameters())
    engine.module.cpu()
    for param in params:
        forms = torch.empty_like(param), param.data.new_zeros(2), param.detach().detach(), param.to(param.device)
        _ = *forms, repr(param.data), param.type(), param.data.untyped_storage(), param.data.to("meta")
    with GatheredParameters(params):
        total = nn.utils.get_total_norm(params)
    for _ in range(20):  # in turns
        train(engine)
    wrong += lines.texts + [f"norm: {total}"] * bool(total == 0)
    engine.destroy()
    return wrong


def test_reads_of_what_is_not_here_are_told() -> None:
    assert run_distributed(reads, 2, timeout=60)[0] == []


def load_whole_weights() -> tuple[bool, bool]:
    torch.manual_seed(4)
    wanted = Stack().state_dict()
    engine = built(3)
    told = []
    for module, state in (
        (engine.module, wanted),
        (engine.module.blocks[1], {k[len("blocks.1.") :]: v for k, v in wanted.items() if k.startswith("blocks.1.")}),
    ):
        for assign in (False, True):
            with pytest.raises(RuntimeError, match="load_module_state_dict") as raised:
                module.load_state_dict(state, assign=assign)
            told.append(str(raised.value).count("GatheredParameters") == 1)
    engine.load_module_state_dict(wanted)
    found = full_weights(engine.module)
    engine.destroy()
    return all(told), all(torch.equal(found[name], wanted[name]) for name in found)


def test_whole_weights_are_refused_with_what_to_call() -> None:
    assert run_distributed(load_whole_weights, 2, timeout=60) == [(True, True)] * 2


def _copied(param: nn.Parameter) -> None:
    param.data = torch.ones(param.shape, dtype=param.dtype)


def _through_a_view(param: nn.Parameter) -> None:
    param.detach().view(-1)[::2] *= 0.5


def _as_vector(param: nn.Parameter) -> None:
    vector = nn.utils.parameters_to_vector([param])
    nn.utils.vector_to_parameters(vector * 0.9, [param])


LOST: dict[str, Callable[[nn.Parameter], Any]] = {
    "clamp": lambda param: param.data.clamp_(-0.1, 0.1),
    "copied": _copied,
    "foreach": lambda param: torch._foreach_mul_([param], 0.9),
    "view": _through_a_view,
    "vector": _as_vector,
}


def lost_writes_of_stage_3() -> list[str]:
    """Which are not told, outside of ``GatheredParameters`` and inside of one that keeps nothing."""
    lines, silent = Lines(logging.WARNING), []
    logging.getLogger("ds_hf").addHandler(lines)
    for (kind, write), gathered in itertools.product(LOST.items(), (False, True)):
        forget_said()
        lines.texts.clear()
        engine = built(3)
        data = torch.ones(2, WIDTH, device=engine.device)
        bias = engine.module.blocks[0].up.bias
        bias.data = nn.functional.pad(bias.data, (0, 0), "constant", 0)  # nothing, as transformers ties weights
        for index in range(3):
            if index:
                with torch.no_grad(), GatheredParameters([engine.module.blocks[0].up.weight], enabled=gathered):
                    write(engine.module.blocks[0].up.weight)
            elif lines.texts:
                silent.append(f"{kind}: {lines.texts}")
            engine.backward(mean_square(engine(data)))
            engine.step()
        if dist.get_rank() == 0 and sum("blocks.0.up.weight" in text for text in lines.texts) < 1:
            silent.append(f"{kind}, {gathered}: {lines.texts}")
        engine.module.to(engine.device)
        engine.destroy()
    return silent


def test_lost_writes_of_stage_3_are_told() -> None:
    assert run_distributed(lost_writes_of_stage_3, 2, timeout=60) == [[], []]


class Projected(nn.Module):
    """Blocks that bound their weights as they run, and a frozen scale that decays: as normalized heads, codebooks and
    momentum encoders do."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.gathers = way, False
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
            self.write(block.weight if self.way != "frozen" else self.scale.weight)
        return x @ self.scale.weight if self.way == "frozen" else x

    @torch.no_grad()
    def write(self, weight: nn.Parameter) -> None:
        with GatheredParameters([weight], modifier_rank=0, enabled=self.gathers):
            if self.way == "replaced":
                weight.data = weight.data.clamp(-0.1, 0.1)
            elif self.way == "copied":
                weight.data.copy_(weight.data.clamp(-0.1, 0.1))
            elif self.way == "moved":
                weight.data = weight.data.clone()
            elif self.way != "none":
                weight.data.mul_(0.9)


def projected(way: str, gathers: bool) -> tuple[list[str], float]:
    """What is told, and how far the weights are from those of torch."""
    lines = Lines(logging.WARNING)
    logging.getLogger("ds_hf").addHandler(lines)
    torch.manual_seed(2)
    model, reference = Projected(way), Projected(way)
    reference.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD([p for p in reference.parameters() if p.requires_grad], lr=0.05)
    engine, *_ = initialize(model=model, config=base_config(3, optimizer=SGD))
    model.gathers = gathers
    if not gathers:  # evaluations first, in which nothing is written, do not keep it from being told
        model.way = "none"
        with torch.no_grad():
            for _ in range(8):
                engine(torch.zeros(1, WIDTH, device=engine.device))
        model.way = way
    for index in range(3):
        data = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(index)).to(engine.device)
        mean_square(reference(data.cpu().flatten(0, 1))).backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.backward(mean_square(engine(data[dist.get_rank()])))
        engine.step()
    error = weight_error(model, reference)
    engine.destroy()
    logging.getLogger("ds_hf").removeHandler(lines)
    return lines.texts, error


def projections() -> list[Any]:
    found = []
    for way in ("replaced", "copied", "frozen", "moved"):
        forget_said()
        told, _ = projected(way, gathers=False)
        forget_said()
        found.append((way, [text.split(" was written")[0] for text in told], projected(way, gathers=True)))
    return found


def test_writes_of_a_forward_are_told_and_gathered_ones_are_those_of_torch() -> None:
    ranks = run_distributed(projections, 2, timeout=60)
    names = [f"{name}.weight ({WIDTH}, {WIDTH})" for name in ("blocks.0", "blocks.1", "blocks.2", "scale")]
    for cases in zip(*ranks, strict=True):
        found = {name for _, told, _ in cases for name in told}
        assert bool(found) is (cases[0][0] != "moved")
        assert found <= set(names)
        for way, _, (told, error) in cases:
            assert (way, told) == (way, [])
            assert error < 1e-6, way


def writes_beside_masters() -> list[str]:
    lines, wrong, rank = Lines(logging.WARNING), [], dist.get_rank()
    logging.getLogger("ds_hf").addHandler(lines)
    for stage, half, counted in itertools.product((0, 1, 2), (True, False), (True, False)):
        forget_said()
        lines.texts.clear()
        more = {"bf16": {"enabled": True}} if half else {}
        engine, *_ = initialize(model=Stack(), config=base_config(stage, optimizer=SGD, **more))
        weight = engine.module.blocks[0].up.weight
        other = engine.module.blocks[0].down.weight
        data = torch.ones(2, WIDTH, dtype=weight.dtype, device=engine.device)

        def step(engine: Any = engine, data: torch.Tensor = data) -> None:
            engine.backward(mean_square(engine(data)))
            engine.step()

        step()
        master = safe_get_full_fp32_param(other).clone()
        with GatheredParameters([weight], modifier_rank=0), torch.no_grad():
            weight.fill_(0.5 + rank)
        if not torch.equal(master, safe_get_full_fp32_param(other)):
            wrong.append(f"{stage} {more}: another master was rounded")
        step()
        wrong += [f"{stage} {more}: {text}" for text in lines.texts]
        if not abs(weight.float().mean().item() - 0.5) < 0.1:
            wrong.append(f"{stage} {more}: rank 0's values did not reach this one, or its master")
        with torch.no_grad():
            (weight if counted else weight.data).fill_(3.0)
        step()
        told = sum("blocks.0.up.weight" in text and "modifier_rank=0" in text for text in lines.texts)
        wrong += [f"{stage} {more} {counted}: {told}"] if told and not half else [""] * told
        if (weight.float().mean().item() > 2) is half:
            wrong.append(f"{stage} {more}: {weight.float().mean().item()}")
        engine.destroy()
    return wrong


def test_writes_that_a_step_takes_back_are_told_and_gathered_ones_kept() -> None:
    first, second = run_distributed(writes_beside_masters, 2, timeout=90)
    # What torch counts is told by the first process, other values by those that have their masters.
    assert set(first + second) == {""}
    assert 7 <= len(first + second) <= 9


# -- penalties on weights ----------------------------------------------------------------------------------------------


def penalty(model: nn.Module, *, function: bool = False) -> Any:
    norm: Any = torch.linalg.vector_norm if function else torch.Tensor.norm
    return 1e-2 * sum(norm(param) for param in model.parameters())


def penalised(engine: Any, data: torch.Tensor, way: str, *, function: bool) -> None:
    params = list(engine.module.parameters())
    if way == "gathered":
        with GatheredParameters(params):
            extra = penalty(engine.module, function=function)
        engine.backward(mean_square(engine(data)) + extra)
    elif way == "gathered with backward":
        loss = mean_square(engine(data))
        with GatheredParameters(params):
            engine.backward(loss + penalty(engine.module, function=function))
    elif way == "after":
        loss = mean_square(engine(data))
        engine.backward(loss + penalty(engine.module, function=function))
    else:
        extra = penalty(engine.module, function=function)
        loss = mean_square(engine(data)) + extra
        loss.backward() if way == "before, own" else engine.backward(loss)
    engine.step()


def penalties() -> None:
    """As the message says, they are those of plain torch; elsewhere there is the message."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    for way in ("gathered", "gathered with backward", "before", "before, own", "after"):
        for function in (False, True):
            torch.manual_seed(2)
            model = Stack()
            plain = copy.deepcopy(model)
            engine = initialize(model=model, config=base_config(3, optimizer=SGD, zero_optimization=zero))[0]
            data = [torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
            mine = data[dist.get_rank()]
            if way.startswith("gathered"):
                optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
                (sum(mean_square(plain(each)) for each in data) / 2 + penalty(plain)).backward()
                optimizer.step()
                penalised(engine, mine, way, function=function)
                assert weight_error(engine.module, plain) < 1e-5, way
            else:
                with pytest.raises(DsHfError, match=r"GatheredParameters\(list\(model\.parameters\(\)\)\):`, before"):
                    penalised(engine, mine, way, function=function)
            engine.destroy()


def test_penalties_on_weights() -> None:
    run_distributed(penalties, 2, timeout=30)
