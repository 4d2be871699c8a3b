"""Which collectives are measured, under which names, with which sizes; and what is told of them."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import redirect_stdout
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.comm import all_reduce_coalesced, batch_isend_irecv

from ds_hf import initialize
from ds_hf.deepspeed_api import collectives as calls
from ds_hf.engine.comm.comms_logger import (
    CommsLogger,
    calc_bw_log,
    comms_logger,
    configure,
    convert_size,
    log_summary,
    reset_log,
    trim_mean,
)
from ds_hf.errors import ConfigError
from tests.helpers.distributed import run_distributed
from tests.helpers.models import TinyLM, token_batches
from tests.helpers.parity import base_config

KIB = 256  # elements of fp32


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """The logger is one for the process."""
    yield
    configure(enabled=False, prof_all=True, prof_ops=(), verbose=False, debug=False)
    reset_log()


def printed(function: Any, *args: Any, **kwargs: Any) -> str:
    with redirect_stdout(io.StringIO()) as out:
        function(*args, **kwargs)
    return out.getvalue()


def counts() -> dict[str, dict[int, int]]:
    return {name: {n: row[0] for n, row in sizes.items()} for name, sizes in comms_logger.get_raw_data().items()}


def test_sizes_are_written_in_powers_of_1024() -> None:
    assert [convert_size(n) for n in (0, 1, 1023, 1024, 1536, 1 << 30)] == [
        "0B",
        "1.0 B",
        "1023.0 B",
        "1.0 KB",
        "1.5 KB",
        "1.0 GB",
    ]


def test_averages_leave_out_what_is_far_off() -> None:
    assert trim_mean([]) == 0
    assert trim_mean([1.0, 2.0, 6.0]) == 3
    assert trim_mean([1000.0, *[2.0] * 18, 0.0]) == 2


@pytest.mark.parametrize(
    ("operation", "ranks", "wire"),
    [
        ("all_reduce", 4, 1500),  # a ring sends each byte there and back, but for a rank's own part
        ("reduce_scatter_tensor", 4, 750),
        ("all_gather_into_tensor", 4, 3000),
        ("all_to_all_single", 4, 750),
        ("broadcast", 4, 1000),
        ("all_reduce", 1, 0),
    ],
)
def test_bytes_on_the_wire(operation: str, ranks: int, wire: int) -> None:
    logger = CommsLogger()
    logger._add(operation, operation, 1.0, 1000, ranks)
    logger._add(operation, operation, 1.0, 1000, ranks)
    table = logger.get_operation_summary(operation)
    assert table is not None
    assert table[1000]["wire_bytes"] == 2 * wire


def test_a_table_of_given_calls() -> None:
    logger = CommsLogger()
    for latency in (1.0, 3.0):
        logger.append("broadcast", "broadcast | [weights]", latency, 1024)
    logger.append("barrier", "barrier", 0.5, 0)
    assert logger.get_operation_names() == ["broadcast | [weights]", "barrier"]
    assert logger.get_total_operations() == 3
    table = logger.get_operation_summary("broadcast | [weights]")
    assert table is not None
    gbps = (1024 * 8e-6 / 1 + 1024 * 8e-6 / 3) / 2
    assert table[1024] == {
        "count": 2,
        "total_latency_ms": 4.0,
        "avg_latency_ms": 2.0,
        "tput_avg_gbps": pytest.approx(gbps),
        "busbw_avg_gbps": pytest.approx(gbps),
        "msg_size_bytes": 1024,
        "msg_size_str": "1.0 KB",
        "wire_bytes": 2048,
        "wire_size_str": "2.0 KB",
    }
    assert logger.get_operation_summary("reduce") is None
    lines = [line.split() for line in printed(logger.log_all).splitlines()]
    assert lines[1:] == [
        ["broadcast", "|", "[weights]"],
        ["1.0", "KB", "2", "4.00", "2.00", "0.01", "0.01", "2.0", "KB"],
        ["barrier"],
        ["0B", "1", "0.50", "0.50", "0.00", "0.00", "0B"],
    ]
    logger.reset_data()
    assert not logger.has_data()
    assert logger.get_raw_data() == {}
    assert printed(logger.log_all, show_straggler=True).startswith("no collective was measured")


def of_a_script() -> dict[str, Any]:
    found: dict[str, Any] = {}
    world = dist.get_world_size()
    tensor = torch.ones(KIB)
    calls.all_reduce(tensor)
    found["off"] = counts()
    configure(enabled=True)
    calls.all_reduce(tensor)
    calls.all_reduce(tensor=tensor)
    calls.all_gather_into_tensor(torch.empty(world * KIB), tensor=tensor)
    calls.reduce_scatter_tensor(torch.empty(KIB // world), tensor)
    calls.reduce_scatter(torch.empty(KIB), [torch.ones(KIB) for _ in range(world)])
    calls.broadcast(tensor, 0)
    calls.barrier()
    all_reduce_coalesced([tensor, tensor])
    peer = 1 - dist.get_rank()
    ops = [dist.P2POp(dist.isend, tensor, peer), dist.P2POp(dist.irecv, torch.empty(KIB), peer)]
    for work in batch_isend_irecv(ops):
        work.wait()
    with pytest.raises(TypeError):
        calls.all_reduce(nothing=tensor)
    found["all"] = counts()
    reset_log()

    configure(prof_all=False, prof_ops=["broadcast", "mine"])
    calls.all_reduce(tensor)
    calls.broadcast(tensor, src=0)
    calls.all_reduce(tensor, log_name="mine")
    calls.all_reduce(tensor, prof=True, debug="whatever")
    comms_logger.stop_profiling_op(["mine"])
    comms_logger.start_profiling_op(["barrier", "broadcast"])
    calls.all_reduce(tensor, log_name="mine")
    calls.barrier()
    found["chosen"] = counts()
    reset_log()

    configure(prof_all=True, debug=True, verbose=True)
    found["said"] = printed(calls.all_reduce, tensor)
    found["debug"] = counts()
    found["bandwidths"] = {name: calc_bw_log(name, 10**6, 8.0) for name in ("all_reduce", "all_gather", "send")}
    configure(enabled=False)
    calls.all_reduce(tensor)
    found["off again"] = counts() == found["debug"]
    return found


def test_collectives_of_a_script() -> None:
    for rank, found in enumerate(run_distributed(of_a_script, 2)):
        assert found["off"] == {}
        assert found["all"] == {
            "all_reduce": {1024: 2},
            "all_gather_into_tensor": {1024: 1},
            "reduce_scatter_tensor": {1024: 1},
            "reduce_scatter": {2048: 1},
            "broadcast": {1024: 1},
            "barrier": {0: 1},
            "all_reduce_coalesced": {2048: 1},
            "batch_isend_irecv": {2048: 1},
        }
        assert found["chosen"] == {
            "broadcast": {1024: 1},
            "mine": {1024: 1},
            "all_reduce": {1024: 1},
            "barrier": {0: 1},
        }
        assert found["debug"] == {"all_reduce | [Caller Func: printed]": {1024: 1}}
        line = "comm op: all_reduce | [Caller Func: printed] | time (ms): "
        assert found["said"].startswith(line) if rank == 0 else found["said"] == ""
        assert found["bandwidths"] == {"all_reduce": (2.0, 1.0), "all_gather": (2.0, 1.0), "send": (1.0, 1.0)}
        assert found["off again"]


STEPS = 2


def of_an_engine(stage: int) -> dict[str, Any]:
    config = base_config(stage, comms_logger={"enabled": True}, gradient_clipping=1.0)
    engine, *_ = initialize(model=TinyLM(), config=config)
    reset_log()
    for _ in range(STEPS):
        engine.backward(engine(token_batches(2, 8)))
        engine.step()
    summary: Any = log_summary(show_straggler=True, return_dict=True)
    told = printed(log_summary)
    buffers = [buffer for unit in engine.units for buffer in unit.buffers]
    found = {
        "summary": summary,
        "told": told,
        "reduced": sum(buffer.layout.numel for buffer in buffers) * 4,
        "number": len(buffers),
    }
    engine.destroy()
    return found


def sent(rows: dict[int, dict[str, Any]]) -> int:
    return sum(nbytes * row["count"] for nbytes, row in rows.items())


@pytest.mark.parametrize("stage", [1, 3])
def test_collectives_of_an_engine(stage: int) -> None:
    for rank, found in enumerate(run_distributed(of_an_engine, 2, stage)):
        summary = found["summary"]["summary"]
        reduced = summary["reduce_scatter_tensor"]
        assert sent(reduced) == STEPS * found["reduced"]
        assert sum(row["count"] for row in reduced.values()) == STEPS * found["number"]
        gathered = sent(summary["all_gather_into_tensor"])
        assert gathered >= STEPS * found["reduced"] // 2  # a rank puts in half; stage 3 gathers some twice
        assert "all_reduce" in summary  # the norm
        apart = found["summary"]["straggler_analysis"]
        assert {name: set(rows) for name, rows in apart.items()} == {name: set(rows) for name, rows in summary.items()}
        for name, rows in apart.items():
            for nbytes, row in rows.items():
                total = row["total_comm_lat_ms"] + row["total_straggler_ms"]
                assert total == pytest.approx(summary[name][nbytes]["total_latency_ms"])
                assert row["total_straggler_ms"] >= 0
        metadata = found["summary"]["metadata"]
        assert (metadata["world_size"], metadata["rank"]) == (2, rank)
        assert ("reduce_scatter_tensor\n" in found["told"]) == (rank == 0)
        assert (found["told"] == "") == (rank == 1)


def names_what_is_sent() -> list[str]:
    config = base_config(
        2, comms_logger={"enabled": True, "debug": True, "prof_all": False, "prof_ops": ["all_reduce"]}
    )
    engine, *_ = initialize(model=TinyLM(), config=config)
    engine.backward(engine(token_batches(2, 8)))
    engine.step()
    engine.destroy()
    return comms_logger.get_operation_names()


def test_debug_names_what_an_engine_sends() -> None:
    for names in run_distributed(names_what_is_sent, 2):
        assert names
        assert all(name.startswith("all_reduce | [") for name in names), names


def uneven() -> set[str]:
    configure(enabled=True)
    if dist.get_rank() == 0:
        comms_logger.append("send", "send", 1.0, 8)
    for latency in range(1, 3 + dist.get_rank()):
        comms_logger.append("barrier", "barrier", float(latency), 0)
    found: Any = log_summary(show_straggler=True, return_dict=True)
    assert found["straggler_analysis"]["barrier"][0]["count"] == 2
    return set(found["straggler_analysis"])


def test_only_what_all_ranks_measured_is_compared() -> None:
    assert run_distributed(uneven, 2) == [{"barrier"}, {"barrier"}]


def test_operations_that_are_never_called_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    logger = CommsLogger()
    logger.prof_all, logger.prof_ops = False, ["barrier", "all_reduec"]
    logger.append("barrier", "barrier | [by a script]", 0.5, 0)
    logger.log_all()
    printed = capsys.readouterr().out
    assert "no call of all_reduec was made, which comms_logger.prof_ops names" in printed
    assert "no call of barrier" not in printed


def test_a_configuration_sets_it_up() -> None:
    section = SimpleNamespace(enabled=True, verbose=False, debug=True, prof_all=False, prof_ops=("barrier",))
    configure(SimpleNamespace(comms_logger=section), verbose=True)
    assert (comms_logger.enabled, comms_logger.verbose, comms_logger.debug) == (True, True, True)
    assert (comms_logger.prof_all, comms_logger.prof_ops) == (False, ["barrier"])
    configure(SimpleNamespace(comms_config=SimpleNamespace(comms_logger=SimpleNamespace(enabled=False))))
    assert comms_logger.enabled
    with pytest.raises(TypeError, match="dict has no section comms_logger"):
        configure({"comms_logger": {"enabled": True}})


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="comms_logger/prof_ops"):
        initialize(model=TinyLM(), config=base_config(0, comms_logger={"enabled": True, "prof_ops": "all_reduce"}))
