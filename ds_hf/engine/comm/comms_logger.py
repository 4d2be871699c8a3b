"""What collectives take: ``comms_logger`` of the configuration, and ``deepspeed.comm.log_summary()``.

There is one logger a process. While it is on, the device is waited for before and after each collective that it
measures, so that nothing runs beside it: a run that asks for times is slower. Collectives of the engine come from
``log``, those of a script from ``deepspeed_api.collectives``; names, table and dictionary are DeepSpeed's. A size is
what a rank puts in, in bytes; latencies are milliseconds, bandwidths gigabits a second. The table has one column more:
the bytes that a rank's link carries for all calls, in a ring or by direct sends.
"""

from __future__ import annotations

import inspect
import math
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hf.engine.comm.device import synchronize
from ds_hf.engine.comm.process_group import current_rank
from ds_hf.log import say

__all__ = [
    "CommsLogger",
    "calc_bw_log",
    "comms_logger",
    "configure",
    "convert_size",
    "get_comm_operation_count",
    "get_logged_comm_ops",
    "has_comm_data",
    "log_summary",
    "reset_log",
    "timed",
    "trim_mean",
]

Row = dict[str, Any]
Table = dict[str, dict[int, Row]]

# The bytes that DeepSpeed's "tput" counts, and those that pass a rank's link (the bus bandwidth of nccl-tests, its
# doc/PERFORMANCE.md), over the bytes that a rank puts in, by number of ranks.
_MOVED: dict[str, Callable[[int], tuple[float, float]]] = {
    "all_to_all": lambda n: (1, (n - 1) / n),
    "all_to_all_single": lambda n: (1, (n - 1) / n),
    "all_gather": lambda n: (n, n - 1),
    "all_gather_into_tensor": lambda n: (n, n - 1),
    "reduce_scatter": lambda n: (1, (n - 1) / n),
    "reduce_scatter_tensor": lambda n: (1, (n - 1) / n),
    "all_reduce": lambda n: (2, 2 * (n - 1) / n),
    "all_reduce_coalesced": lambda n: (2, 2 * (n - 1) / n),
    "inference_all_reduce": lambda n: (2, 2 * (n - 1) / n),
}
_SUMMARY = {
    "Count": "count",
    "Total Latency(ms)": "total_latency_ms",
    "Avg Latency(ms)": "avg_latency_ms",
    "tput_avg (Gbps)": "tput_avg_gbps",
    "busbw_avg (Gbps)": "busbw_avg_gbps",
    "On the wire": "wire_size_str",
}
_STRAGGLERS = {
    "Count": "count",
    "Total comm lat(ms)": "total_comm_lat_ms",
    "Total straggler(ms)": "total_straggler_ms",
    "Avg comm lat(ms)": "avg_comm_lat_ms",
    "Avg straggler(ms)": "avg_straggler_ms",
}
_WIDTH = 20


class _Calls:
    """The calls of one operation with messages of one size, among so many ranks."""

    def __init__(self, operation: str, ranks: int) -> None:
        self.operation, self.ranks, self.latencies = operation, ranks, array("d")


class CommsLogger:
    """Measures collectives and sums them up.

    Attributes:
        enabled: measure at all.
        verbose: say each call, on standard output of rank 0.
        debug: names tell what is sent, or which function called.
        prof_all: measure every operation; otherwise those in ``prof_ops``, and calls with ``prof=True``.
        prof_ops: names of operations.
    """

    def __init__(self) -> None:
        self.enabled = self.verbose = self.debug = False
        self.prof_all = True
        self.prof_ops: list[str] = []
        self._calls: dict[str, dict[int, _Calls]] = {}

    def configure(self, section: Any) -> None:
        """Take over a ``comms_logger`` section that is enabled; any other leaves everything as it is."""
        if section.enabled:
            self.enabled, self.verbose, self.debug = True, section.verbose, section.debug
            self.prof_all, self.prof_ops = section.prof_all, list(section.prof_ops)

    def start_profiling_comms(self) -> None:
        """Measure every operation."""
        self.prof_all = True

    def stop_profiling_comms(self) -> None:
        """Measure the operations in ``prof_ops`` only."""
        self.prof_all = False

    def start_profiling_op(self, op_name_list: Iterable[str]) -> None:
        """Measure these operations too."""
        self.prof_ops = list(dict.fromkeys([*self.prof_ops, *op_name_list]))

    def stop_profiling_op(self, op_name_list: Iterable[str]) -> None:
        """Take these operations from ``prof_ops``."""
        dropped = set(op_name_list)
        self.prof_ops = [name for name in self.prof_ops if name not in dropped]

    def start(
        self, operation: str, nbytes: int, ranks: int, about: str = "", name: str = "", prof: bool = False
    ) -> Callable[[], None] | None:
        """A collective begins. What is returned is called when it has been issued; ``None``: it is not measured."""
        name = name or operation
        if not (self.enabled and (prof or self.prof_all or name in self.prof_ops)):
            return None
        shown = f"{name} | [{about}]" if self.debug and about else name
        begin = _now()
        return lambda: self._add(operation, shown, (_now() - begin) * 1e3, nbytes, ranks)

    def append(self, raw_name: str, record_name: str, latency: float, msg_size: int) -> None:
        """Note a call of the operation ``raw_name``, under the name ``record_name``."""
        self._add(raw_name, record_name, latency, msg_size, _world_size())

    def _add(self, operation: str, name: str, latency: float, nbytes: int, ranks: int) -> None:
        sizes = self._calls.setdefault(name, {})
        sizes.setdefault(nbytes, _Calls(operation, ranks)).latencies.append(latency)
        if self.verbose and current_rank() == 0:
            tput, busbw = _bandwidths(operation, nbytes, latency, ranks)
            say(
                f"comm op: {name} | time (ms): {latency:.2f} | msg size: {convert_size(nbytes)} | "
                f"algbw (Gbps): {tput:.2f} | busbw (Gbps): {busbw:.2f}"
            )

    def has_data(self) -> bool:
        """Whether anything was measured."""
        return bool(self._calls)

    def reset_data(self) -> None:
        """Forget what was measured."""
        self._calls.clear()

    def get_operation_names(self) -> list[str]:
        """Names under which something was measured."""
        return list(self._calls)

    def get_total_operations(self) -> int:
        """Number of calls that were measured."""
        return sum(len(calls.latencies) for sizes in self._calls.values() for calls in sizes.values())

    def get_raw_data(self) -> dict[str, dict[int, list[Any]]]:
        """By name and size: number of calls, and of each its latency, its tput and its bus bandwidth."""
        return {
            name: {
                nbytes: [len(calls.latencies), list(calls.latencies), *map(list, _all_bandwidths(nbytes, calls))]
                for nbytes, calls in sizes.items()
            }
            for name, sizes in self._calls.items()
        }

    def get_operation_summary(self, operation_name: str) -> dict[int, Row] | None:
        """By size: count, total and average latency, average bandwidths. ``None`` for a name without calls."""
        sizes = self._calls.get(operation_name)
        return None if sizes is None else {nbytes: _row(nbytes, calls) for nbytes, calls in sorted(sizes.items())}

    def log_all(self, print_log: bool = True, show_straggler: bool = False, return_dict: bool = False) -> Row | None:
        """Print a table of what was measured, or return it.

        Args:
            show_straggler: also how long a rank waited for others: its latency beyond the shortest of all ranks'.
                Collective; only calls that all ranks measured are compared.

        Returns:
            With ``return_dict`` ``{"summary": …, "straggler_analysis": …, "metadata": …}``, the first two by name and
            size.
        """
        summary = {name: self.get_operation_summary(name) or {} for name in list(self._calls)}
        apart = self._stragglers() if show_straggler else None
        if print_log and not summary:
            say('no collective was measured (switched on by "comms_logger": {"enabled": true})')
        elif print_log:
            _print_table("Comm. Op", summary, _SUMMARY)
            if apart is not None:
                say("\nStraggler effect: what the calls of this rank took beyond those of the fastest rank")
                _print_table("Comm. Op", apart, _STRAGGLERS)
        if print_log and not self.prof_all:
            made = {name.partition(" | ")[0] for name in summary}
            for name in self.prof_ops:
                if name not in made:
                    say(f"no call of {name} was made, which comms_logger.prof_ops names")
        if not return_dict:
            return None
        metadata = {"world_size": _world_size(), "rank": current_rank(), "timestamp": datetime.now().isoformat()}
        return {"summary": summary, "straggler_analysis": apart, "metadata": metadata}

    def _stragglers(self) -> Table:
        mine = {name: {n: len(calls.latencies) for n, calls in sizes.items()} for name, sizes in self._calls.items()}
        everyone: list[Any] = [mine]
        if _world_size() > 1:
            everyone = [None] * _world_size()
            dist.all_gather_object(everyone, mine)
        table: Table = {}
        for name in sorted(mine):
            for nbytes in sorted(mine[name]):
                count = min(theirs.get(name, {}).get(nbytes, 0) for theirs in everyone)
                if count:
                    latencies = torch.tensor(self._calls[name][nbytes].latencies[:count], dtype=torch.float64)
                    table.setdefault(name, {})[nbytes] = _straggler_row(nbytes, latencies)
        return table


def _row(nbytes: int, calls: _Calls) -> Row:
    tputs, busbws = _all_bandwidths(nbytes, calls)
    wire = round(_moved(calls.operation, calls.ranks)[1] * nbytes * len(calls.latencies))
    return {
        "count": len(calls.latencies),
        "total_latency_ms": math.fsum(calls.latencies),
        "avg_latency_ms": trim_mean(calls.latencies),
        "tput_avg_gbps": trim_mean(tputs),
        "busbw_avg_gbps": trim_mean(busbws),
        "msg_size_bytes": nbytes,
        "msg_size_str": convert_size(nbytes),
        "wire_bytes": wire,
        "wire_size_str": convert_size(wire),
    }


def _straggler_row(nbytes: int, latencies: Tensor) -> Row:
    shortest = latencies.to("cuda") if dist.is_initialized() and dist.get_backend() == "nccl" else latencies.clone()
    if _world_size() > 1:
        dist.all_reduce(shortest, op=dist.ReduceOp.MIN)
    shortest = shortest.cpu()
    waited = latencies - shortest
    return {
        "count": len(latencies),
        "total_comm_lat_ms": float(shortest.sum()),
        "total_straggler_ms": float(waited.sum()),
        "avg_comm_lat_ms": trim_mean(shortest.tolist()),
        "avg_straggler_ms": trim_mean(waited.tolist()),
        "msg_size_bytes": nbytes,
        "msg_size_str": convert_size(nbytes),
    }


def _print_table(title: str, table: Table, columns: dict[str, str]) -> None:
    def line(*cells: str) -> str:
        return "".join(f"{cell:<{_WIDTH}}" for cell in cells).rstrip()

    lines = [line(title, "Message Size", *columns)]
    for name, rows in table.items():
        lines.append(name)
        for row in rows.values():
            values = [row[key] for key in columns.values()]
            shown = [str(value) if isinstance(value, int | str) else f"{value:.2f}" for value in values]
            lines.append(line("", row["msg_size_str"], *shown))
    say("\n".join(lines))


def _all_bandwidths(nbytes: int, calls: _Calls) -> tuple[Sequence[float], Sequence[float]]:
    pairs = [_bandwidths(calls.operation, nbytes, latency, calls.ranks) for latency in calls.latencies]
    return [tput for tput, _ in pairs], [busbw for _, busbw in pairs]


def _bandwidths(operation: str, nbytes: int, latency: float, ranks: int) -> tuple[float, float]:
    if latency <= 0:
        return 0.0, 0.0
    moved = _moved(operation, ranks)
    return moved[0] * nbytes * 8e-6 / latency, moved[1] * nbytes * 8e-6 / latency


def _moved(operation: str, ranks: int) -> tuple[float, float]:
    return _MOVED[operation](ranks) if operation in _MOVED else (1, 1)


def calc_bw_log(comm_op: str, size: int, duration: float) -> tuple[float, float]:
    """Throughput and bus bandwidth in gigabits a second.

    DeepSpeed multiplies the size of a reduce-scatter by the number of ranks once more; here it is what a rank puts in.

    Args:
        size: bytes that a rank puts in.
        duration: milliseconds.
    """
    return _bandwidths(comm_op, size, duration, _world_size())


def convert_size(size_bytes: float) -> str:
    """``"1.5 KB"``, in powers of 1024."""
    if size_bytes == 0:
        return "0B"
    units = ("B", "KB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB")
    power = min(int(math.log(size_bytes, 1024)), len(units) - 1)
    return f"{round(size_bytes / 1024**power, 2)} {units[power]}"


def trim_mean(data: Iterable[float], trim_percent: float = 0.1) -> float:
    """Mean without that share of the values at either end; 0 without values."""
    values = sorted(data)
    cut = round(len(values) * trim_percent)
    kept = values[cut : len(values) - cut]
    return math.fsum(kept) / len(kept) if kept else 0.0


def timed(function: Callable[..., Any], sized: str = "", **renamed: str) -> Callable[..., Any]:
    """``function``, a collective of torch's, as scripts call DeepSpeed's: measured while the logger is on.

    It takes DeepSpeed's arguments ``prof`` (measure this call), ``log_name`` (its name in the table) and ``debug``.

    Args:
        sized: the argument that a rank puts in: a tensor, or a list of tensors or of ``P2POp``; "" if there is none.
        renamed: torch's name for each of DeepSpeed's names of an argument; both are taken.
    """
    signature, operation = inspect.signature(function), function.__name__

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        prof, name, _ = kwargs.pop("prof", False), kwargs.pop("log_name", None), kwargs.pop("debug", None)
        for theirs, ours in renamed.items():
            if theirs in kwargs:
                kwargs[ours] = kwargs.pop(theirs)
        if not comms_logger.enabled:
            return function(*args, **kwargs)
        given = signature.bind_partial(*args, **kwargs).arguments
        ranks = max(dist.get_world_size(given.get("group")), 1) if dist.is_initialized() else 1
        about = f"Caller Func: {sys._getframe(1).f_code.co_name}"
        stop = comms_logger.start(operation, _nbytes(given.get(sized)), ranks, about, name or "", prof)
        result = function(*args, **kwargs)
        if stop is not None:
            stop()
        return result

    return call


def _nbytes(sent: Any) -> int:
    tensors = sent if isinstance(sent, list | tuple) else [sent]
    found = [getattr(item, "tensor", item) for item in tensors]  # a P2POp has its tensor in it
    return sum(tensor.nbytes for tensor in found if isinstance(tensor, Tensor))


comms_logger = CommsLogger()
has_comm_data = comms_logger.has_data
reset_log = comms_logger.reset_data
get_logged_comm_ops = comms_logger.get_operation_names
get_comm_operation_count = comms_logger.get_total_operations


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Iterable[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Set the logger up, from a configuration that has a section ``comms_logger`` or one by one.

    Raises:
        TypeError: the configuration has no such section.
    """
    if deepspeed_config is not None:
        section = getattr(getattr(deepspeed_config, "comms_config", deepspeed_config), "comms_logger", None)
        if not hasattr(section, "enabled"):
            raise TypeError(f"{type(deepspeed_config).__name__} has no section comms_logger")
        comms_logger.configure(section)
    given = {"enabled": enabled, "prof_all": prof_all, "verbose": verbose, "debug": debug}
    for name, value in given.items():
        if value is not None:
            setattr(comms_logger, name, bool(value))
    if prof_ops is not None:
        comms_logger.prof_ops = list(prof_ops)


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> Row | None:
    """The logger's ``log_all`` on every rank, of which rank 0 prints. Collective."""
    if _world_size() > 1:
        dist.barrier()
    found = comms_logger.log_all(current_rank() == 0, show_straggler, return_dict)
    if _world_size() > 1:
        dist.barrier()
    return found


def _now() -> float:
    synchronize()
    return time.perf_counter()


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
