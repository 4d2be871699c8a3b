"""Metrics of a data set, and the files of them that samplers read.

Of a metric ``name`` with one value for each sample, in ``save_path/name``:

- ``name_sample_to_metric``: its value for each sample, in the order of the data set;
- ``name_index_to_metric`` and ``name_index_to_sample``: each value that occurs, and the samples that have it;
- ``name_index_to_sample_percentile_merged``: the same samples in about a hundred rows.

Of one that is summed over samples: ``name_metric_value``. Numbers are whole, in the smallest dtype that has them all.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Subset

from ds_hf.data.index_files import MMapIndexedDatasetBuilder, find_fit_int_dtype
from ds_hf.errors import DsHfError
from ds_hf.log import logger

__all__ = ["DataAnalyzer", "DistributedDataAnalyzer"]

Numbers = NDArray[Any]
Results = dict[str, tuple[Numbers, Numbers]]  # by metric: samples and their values; of a sum: no samples

_SINGLE, _SUM = "single_value_per_sample", "accumulate_value_over_samples"


class DataAnalyzer:
    """Computes metrics in ``num_workers`` jobs of ``num_threads`` processes each, which leave their part in files.

    ``run_map`` of each worker, then ``run_reduce`` of one of them; ``run_map_reduce`` where they are one process group.

    Args:
        metric_functions: from a batch to a tensor: of a value for each sample, or of values to be added up.
        metric_types: "single_value_per_sample" or "accumulate_value_over_samples".
        metric_dtypes: of what functions return.
        specific_threads: which of the threads this job runs; all without.
        collate_fn: as a DataLoader takes it.
        custom_map_init, custom_map_update, custom_map_finalize, custom_reduce: in place of what is done here, with
            DeepSpeed's arguments.
        sample_indices: the numbers under which samples are listed, in the order of ``dataset``.
    """

    def __init__(
        self,
        dataset: Any,
        num_workers: int = 1,
        worker_id: int = 0,
        num_threads: int = 1,
        num_threads_reduce: int = 1,
        specific_threads: Sequence[int] = (),
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Callable[[Any], Any]] = (),
        metric_types: Sequence[str] = (),
        metric_dtypes: Sequence[Any] = (),
        save_path: str | Path = "./",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        custom_map_init: Callable[..., Any] | None = None,
        custom_map_update: Callable[..., Any] | None = None,
        custom_map_finalize: Callable[..., Any] | None = None,
        custom_reduce: Callable[..., Any] | None = None,
        sample_indices: Sequence[int] | None = None,
    ) -> None:
        _check_metrics(metric_names, metric_functions, metric_types)
        self.dataset, self.collate_fn, self.batch_size = dataset, collate_fn, batch_size
        self.num_workers, self.worker_id, self.num_threads = num_workers, worker_id, num_threads
        self.num_threads_reduce, self.specific_threads = num_threads_reduce, list(specific_threads)
        self.metric_names, self.metric_functions = list(metric_names), list(metric_functions)
        self.metric_types, self.metric_dtypes = list(metric_types), list(metric_dtypes)
        self.save_path, self.sample_indices = os.fspath(save_path), sample_indices
        self.custom_map_init, self.custom_map_update = custom_map_init, custom_map_update
        self.custom_map_finalize, self.custom_reduce = custom_map_finalize, custom_reduce

    def run_map(self) -> None:
        """Compute this worker's part, and write it."""
        threads = self.specific_threads or list(range(self.num_threads))
        if self.num_threads == 1:
            self._map(0)
            return
        fork = multiprocessing.get_context("fork")  # functions of scripts cannot be sent, and data sets may be large
        started = [fork.Process(target=self._map, args=(thread,)) for thread in threads]
        for process in started:
            process.start()
        for process in started:
            process.join()
        if failed := [thread for thread, process in zip(threads, started, strict=True) if process.exitcode]:
            raise DsHfError(f"analysis of the data: threads {failed} of worker {self.worker_id} failed, see above")

    def _map(self, thread: int) -> None:
        first, last = self._part(thread)
        loader = DataLoader(Subset(self.dataset, range(first, last)), self.batch_size, collate_fn=self.collate_fn)
        about = self.metric_types, self.metric_dtypes
        if self.custom_map_init is not None:
            results = self.custom_map_init(thread, self.metric_names, *about, self.save_path, self.worker_id)
        else:
            results = _Gathered(self.metric_names, self.metric_types, self.metric_functions, self.metric_dtypes)
        done = 0
        for batch in loader:
            if self.custom_map_update is not None:
                self.custom_map_update(batch, *about, self.metric_functions, results, first + done)
                done += min(self.batch_size, last - first - done)
            else:
                done += results.add(batch, first + done, self.sample_indices)
        if self.custom_map_finalize is not None:
            self.custom_map_finalize(*about, results)
        elif isinstance(results, _Gathered):
            for name, (samples, values) in results.arrays().items():
                folder = self._folder(name, self.worker_id, thread)
                folder.mkdir(parents=True, exist_ok=True)
                np.savez(folder / "part.npz", samples=samples, values=values)
        logger.info("analysis of the data: samples %d to %d are done", first, last)

    def _part(self, thread: int) -> tuple[int, int]:
        bounds = np.linspace(0, len(self.dataset), self.num_workers + 1, dtype=int)[self.worker_id :][:2]
        first, last = np.linspace(bounds[0], bounds[1], self.num_threads + 1, dtype=int)[thread:][:2]
        return int(first), int(last)

    def _folder(self, name: str, worker: int, thread: int) -> Path:
        return Path(self.save_path) / name / f"worker{worker}_thread{thread}"

    def run_reduce(self) -> None:
        """Put the parts of all workers together.

        Raises:
            DsHfError: one is missing.
        """
        if self.custom_reduce is not None:
            counts = self.num_workers, self.num_threads, self.num_threads_reduce
            self.custom_reduce(self.dataset, self.metric_names, self.metric_types, self.save_path, *counts)
            return
        for name, kind in zip(self.metric_names, self.metric_types, strict=True):
            parts = []
            for worker in range(self.num_workers):
                for thread in range(self.num_threads):
                    path = self._folder(name, worker, thread) / "part.npz"
                    if not path.is_file():
                        raise DsHfError(f"{path} is missing: run_map() of worker {worker} has not ended")
                    with np.load(path) as part:
                        parts.append((part["samples"], part["values"]))
            _write(Path(self.save_path), name, kind, parts, len(self.dataset))

    def run_map_reduce(self, comm_group: Any = None) -> None:
        """All of it. Collective where there is a process group; the first worker puts the parts together."""
        self.run_map()
        grouped = dist.is_initialized() and self.num_workers > 1
        if grouped:
            dist.barrier(group=comm_group)
        if self.worker_id == 0:
            self.run_reduce()
        if grouped:
            dist.barrier(group=comm_group)


class DistributedDataAnalyzer:
    """The same in the memory of the processes of a group, each of which computes a part of the data set.

    Args:
        device: accepted for DeepSpeed's sake; numbers stay in host memory.
        others: as ``DataAnalyzer`` takes them; ``num_workers`` and ``worker_id`` are a group's if there is one.
    """

    def __init__(
        self,
        dataset: Any,
        num_workers: int = 1,
        num_threads: int = 1,
        worker_id: int = 0,
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Callable[[Any], Any]] = (),
        metric_types: Sequence[str] = (),
        save_path: str | Path = "./",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        device: Any = "cuda",
        comm_group: Any = None,
        sample_indices: Sequence[int] | None = None,
    ) -> None:
        _check_metrics(metric_names, metric_functions, metric_types)
        self.dataset, self.batch_size, self.collate_fn = dataset, batch_size, collate_fn
        self.metric_names, self.metric_functions = list(metric_names), list(metric_functions)
        self.metric_types, self.save_path = list(metric_types), os.fspath(save_path)
        self.comm_group, self.sample_indices = comm_group, sample_indices
        self.num_threads, self.num_workers, self.worker_id = num_threads, num_workers, worker_id
        if dist.is_initialized():
            self.num_workers, self.worker_id = dist.get_world_size(comm_group), dist.get_rank(comm_group)

    def run_map_reduce(self) -> None:
        """Compute and write. Collective; the first process writes."""
        bounds = np.linspace(0, len(self.dataset), self.num_workers + 1, dtype=int)
        first, last = int(bounds[self.worker_id]), int(bounds[self.worker_id + 1])
        found = _Gathered(self.metric_names, self.metric_types, self.metric_functions, ())
        done = 0
        for batch in DataLoader(Subset(self.dataset, range(first, last)), self.batch_size, collate_fn=self.collate_fn):
            done += found.add(batch, first + done, self.sample_indices)
        parts: list[Any] = [found.arrays()]
        if self.num_workers > 1:
            parts = [None] * self.num_workers
            dist.all_gather_object(parts, found.arrays(), group=self.comm_group)
        if self.worker_id == 0:
            for name, kind in zip(self.metric_names, self.metric_types, strict=True):
                _write(Path(self.save_path), name, kind, [part[name] for part in parts], len(self.dataset))
        if self.num_workers > 1:
            dist.barrier(group=self.comm_group)


class _Gathered:
    """What functions of metrics gave, batch by batch."""

    def __init__(
        self,
        names: Sequence[str],
        kinds: Sequence[str],
        functions: Sequence[Callable[[Any], Any]],
        dtypes: Sequence[Any],
    ) -> None:
        self._metrics = list(zip(names, kinds, functions, strict=True))
        self._dtypes = dict(zip(names, dtypes, strict=False))
        self._samples: dict[str, list[Numbers]] = {name: [] for name in names}
        self._values: dict[str, list[Numbers]] = {name: [] for name in names}

    def add(self, batch: Any, start: int, indices: Sequence[int] | None) -> int:
        """Add a batch whose first sample is ``start``; its samples."""
        count = 0
        for name, kind, function in self._metrics:
            values = _whole(name, function(batch), self._dtypes.get(name))
            if kind == _SUM:
                before = self._values[name]
                self._values[name] = [before[0] + values] if before else [values]
                continue
            count = len(values)
            samples = np.arange(start, start + count)
            if isinstance(batch, Mapping) and "index" in batch:  # Megatron's data sets tell it
                samples = np.asarray(batch["index"]).reshape(count, -1)[:, 0]
            elif indices is not None:
                samples = np.asarray([indices[int(each)] for each in samples])
            self._samples[name].append(samples.astype(np.int64))
            self._values[name].append(values.reshape(count, -1)[:, 0])
        return count or _samples_in(batch)

    def arrays(self) -> Results:
        """All of it, by metric."""
        nothing = np.empty(0, dtype=np.int64)
        return {
            name: (np.concatenate([nothing, *self._samples[name]]), np.concatenate([nothing, *map(np.ravel, values)]))
            for name, values in self._values.items()
        }


def _samples_in(batch: Any) -> int:
    values = next(iter(batch.values())) if isinstance(batch, Mapping) else batch
    return len(values)


def _whole(name: str, values: Any, dtype: Any) -> Numbers:
    found = values.detach().cpu() if isinstance(values, torch.Tensor) else values
    if not isinstance(found, torch.Tensor | np.ndarray):
        raise DsHfError(
            f"the function of metric {name} gave a {type(values).__name__}: it returns a tensor or an array"
        )
    if dtype is not None and _dtype_name(found.dtype) != _dtype_name(dtype):
        raise DsHfError(f"the function of metric {name} gave {found.dtype}, and its metric_dtype is {dtype}")
    array = np.asarray(found)
    if array.dtype.kind not in "iub":
        raise DsHfError(
            f"metric {name} has values of {array.dtype}: round them to whole numbers, of a finer unit if need be"
        )
    return array.astype(np.int64)


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else np.dtype(dtype).name


def _write(path: Path, name: str, kind: str, parts: Sequence[tuple[Numbers, Numbers]], total: int) -> None:
    """The files of one metric."""
    folder = path / name
    folder.mkdir(parents=True, exist_ok=True)
    if kind == _SUM:
        summed = np.sum([values for _, values in parts if len(values)], axis=0)
        _file(folder / f"{name}_metric_value", [summed], find_fit_int_dtype(summed.min(), summed.max()))
        return
    samples, values = (np.concatenate(each) for each in zip(*parts, strict=True))
    if len(samples) != total:
        raise DsHfError(f"metric {name} has values of {len(samples)} samples, and the data set has {total}")
    by_sample, by_value = find_fit_int_dtype(0, total - 1), find_fit_int_dtype(values.min(), values.max())
    _file(folder / f"{name}_sample_to_metric", values.reshape(-1, 1), by_value)
    order = np.argsort(values, kind="stable")
    unique, starts = np.unique(values[order], return_index=True)
    rows = np.split(samples[order], starts[1:])
    _file(folder / f"{name}_index_to_metric", unique.reshape(-1, 1), by_value)
    _file(folder / f"{name}_index_to_sample", rows, by_sample)
    each = max(1, len(rows) // 100)
    merged = [np.concatenate(rows[start : start + each]) for start in range(0, len(rows), each)]
    _file(folder / f"{name}_index_to_sample_percentile_merged", merged, by_sample)


def _file(path: Path, rows: Any, dtype: Any) -> None:
    builder = MMapIndexedDatasetBuilder(f"{path}.bin", dtype)
    builder.add_items(rows)
    builder.end_document()
    builder.finalize(f"{path}.idx")


def _check_metrics(names: Sequence[str], functions: Sequence[Any], kinds: Sequence[str]) -> None:
    if not len(names) == len(functions) == len(kinds):
        raise DsHfError(
            f"there are {len(names)} metric_names, {len(functions)} metric_functions and {len(kinds)} metric_types: "
            "give one of each for a metric"
        )
    if wrong := [kind for kind in kinds if kind not in (_SINGLE, _SUM)]:
        raise DsHfError(f"there is no metric_type {wrong[0]!r:.80}: give {_SINGLE} or {_SUM}")
