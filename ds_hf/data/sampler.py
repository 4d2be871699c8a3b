"""Samples from easy to hard, by metrics: the same batches as DeepSpeed draws, on every process by itself.

When the difficulty of a metric rises, the samples that come within reach make a *cluster*, in random order. A batch
takes samples of all clusters, as many of each as a draw by their sizes says; a cluster that is used up is shuffled and
begins again. All draws come from one generator of a seed, so processes need not tell each other, and a run that resumes
draws again what was drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from ds_hf.data.difficulty import CurriculumScheduler
from ds_hf.data.index_files import MMapIndexedDataset, read_numbers
from ds_hf.errors import ConfigError, DsHfError
from ds_hf.log import warn_once

__all__ = ["ClusterDraws", "DeepSpeedDataSampler", "EpochSampler", "MetricIndex"]

Indices = NDArray[np.int64]


class MetricIndex:
    """Which samples are within reach of a difficulty.

    Args:
        name: of the metric.
        settings: its section.
        total: samples of the data set.

    Attributes:
        samples: int64 ``[total]``, from easy to hard.
        values: of these; ``None`` for percentiles.
    """

    def __init__(self, name: str, settings: Mapping[str, Any], total: int) -> None:
        self.name, self.settings = name, settings
        self.by_percentile = settings.get("difficulty_type", "value") == "percentile"
        values = settings.get("index_to_metric_path")
        rows = settings.get("index_to_sample_path")
        self.values: NDArray[Any] | None = None
        if values is not None and rows is None:
            numbers = read_numbers(values)
            order = np.argsort(numbers, kind="stable")
            self.samples, self.values = order.astype(np.int64), np.asarray(numbers)[order]
        elif rows is None:
            raise ConfigError(
                f"the metric {name} has no files: give index_to_sample_path and index_to_metric_path as DataAnalyzer "
                'writes them, or index_to_metric_path of one number for each sample; or "clustering_type": '
                '"single_cluster"',
                name,
            )
        else:
            listed = MMapIndexedDataset(rows)
            self.samples = listed.flat().astype(np.int64)
            if not self.by_percentile:
                if values is None:
                    raise ConfigError(
                        f"the metric {name} has no index_to_metric_path: difficulties are its values", name
                    )
                numbers = read_numbers(values)
                if len(numbers) != len(listed):
                    raise ConfigError(
                        f"{values} has {len(numbers):_} values, and {rows} lists samples of {len(listed):_}: the two "
                        f"are not of one analysis. Give both files as DataAnalyzer wrote them (metric {name})",
                        name,
                    )
                self.values = np.repeat(numbers, listed.sizes)
        self._check(total, str(values if rows is None else rows))

    def _check(self, total: int, path: str) -> None:
        if len(self.samples) != total or (self.values is not None and len(self.values) != total):
            raise ConfigError(
                f"{path} is of {len(self.samples):_} samples, and the data set has {total:_}: analyze this one anew "
                f"(metric {self.name})",
                self.name,
            )
        if total and (self.samples.min() < 0 or self.samples.max() >= total):
            raise ConfigError(f"{path} names sample {self.samples.max()}, and the data set has {total:_}", self.name)
        seen = np.zeros(total, dtype=bool)
        seen[self.samples] = True
        if not seen.all():
            raise ConfigError(
                f"{path} names {int(seen.sum()):_} of {total:_} samples, and some of them more than once, so it does "
                f"not list the samples by their {self.name}. Give the file ..._index_to_sample that DataAnalyzer wrote",
                self.name,
            )
        if self.by_percentile and total < self.settings["max_difficulty"]:
            raise ConfigError(
                f"max_difficulty {self.settings['max_difficulty']} of {self.name} is into how many shares the samples "
                f"are divided (100, as a rule), and there are {total:_}: give no more than that",
                self.name,
            )
        if self.values is None or not total:
            return
        if strange := int((~np.isfinite(self.values)).sum()):
            raise ConfigError(
                f"{path} has {strange:_} values of {self.name} that are not finite, and no difficulty reaches these "
                "samples: write numbers for them",
                self.name,
            )
        least, most = self.values.min(), self.values.max()
        begins, ends = self.settings["min_difficulty"], self.settings["max_difficulty"]
        if begins >= most > least:
            raise ConfigError(
                f"min_difficulty {begins} of {self.name} is not below its largest value, {most}: all samples are "
                f"within reach from the first step. Give one between {least} and {most}",
                self.name,
            )
        if ends > most:
            warn_once(f"max_difficulty {ends} of {self.name} is beyond its largest value: give {most}")
        elif ends < most:
            beyond = int((self.values > ends).sum())
            warn_once(f"max_difficulty {ends} of {self.name} leaves {beyond:_} samples out for ever: they reach {most}")

    def between(self, after: float, until: float) -> Indices:
        """Samples whose difficulty is above ``after`` and not above ``until``, from easy to hard."""
        if self.values is not None:
            return self.samples[(self.values > after) & (self.values <= until)]
        most = self.settings["max_difficulty"]
        each = len(self.samples) // most
        return self.samples[int(each * after) : len(self.samples) if until == most else int(each * until)]


class ClusterDraws:
    """The batches of all processes, one after another.

    Args:
        config: ``data_efficiency``.
        total: samples of the data set.
        batch: samples of a batch.
    """

    def __init__(self, config: Mapping[str, Any], total: int, batch: int) -> None:
        section = ((config.get("data_sampling") or {}).get("curriculum_learning")) or {}
        metrics: Mapping[str, Mapping[str, Any]] = section.get("curriculum_metrics") or {}
        self.total: int = total
        self.batch, self.seed = batch, config.get("seed", 1234)
        self.schedulers = {name: CurriculumScheduler(settings) for name, settings in metrics.items()}
        self.indices = {
            name: MetricIndex(name, settings, total)
            for name, settings in metrics.items()
            if settings.get("clustering_type", "schedule_based" if _has_files(settings) else "single_cluster")
            != "single_cluster"
        }
        self.restart()

    def restart(self) -> None:
        """Begin with the first batch."""
        self._random = np.random.default_rng(self.seed)
        self.step = 0
        self.difficulties: dict[str, Any] = {}
        self.clusters: list[Indices] = []
        self.positions: list[int] = []
        for scheduler in self.schedulers.values():
            scheduler.set_current_difficulty(scheduler.state["min_difficulty"])

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        """The samples of the next batch, of all processes."""
        self.step += 1
        before = dict(self.difficulties)
        self.difficulties = {name: each.update_difficulty(self.step) for name, each in self.schedulers.items()}
        if before != self.difficulties or not self.step > 1:
            self._open_cluster(before)
        if not self.clusters:
            self._explain_nothing()
        sizes = [len(cluster) for cluster in self.clusters]
        weights = [size / sum(sizes) for size in sizes]
        chosen = self._random.choice(len(sizes), self.batch, replace=True, p=weights)
        found: list[int] = []
        for cluster, count in enumerate(np.bincount(chosen, minlength=len(sizes)).tolist()):
            found += self._take(cluster, count)
        self._random.shuffle(found)
        return found

    def _open_cluster(self, before: Mapping[str, Any]) -> None:
        new = self._within_reach(before)
        if len(new):
            new = new.copy()
            self._random.shuffle(new)
            self.clusters.append(new)
            self.positions.append(0)

    def _within_reach(self, before: Mapping[str, Any]) -> Indices:
        """Samples that no cluster has yet and that have come within reach."""
        if len(self.indices) > 1:
            found: Indices | None = None
            for name, index in self.indices.items():
                lowest = 0 if index.by_percentile else float("-inf")
                reached = index.between(lowest, self.difficulties[name])
                found = reached if found is None else np.intersect1d(found, reached, assume_unique=True)
            assert found is not None
            for cluster in self.clusters:
                found = np.setdiff1d(found, cluster, assume_unique=True)
            return found
        for name, index in self.indices.items():
            lowest = 0 if index.by_percentile else float("-inf")
            return index.between(before.get(name, lowest), self.difficulties[name])
        return np.arange(0 if self.clusters else self.total, dtype=np.int64)

    def _take(self, cluster: int, count: int) -> list[int]:
        start = self.positions[cluster]
        found: list[int] = self.clusters[cluster][start : start + count].tolist()
        self.positions[cluster] += count
        while len(found) < count:  # DeepSpeed gives fewer where a cluster is smaller than what is drawn of it
            self._random.shuffle(self.clusters[cluster])
            more = self.clusters[cluster][: count - len(found)].tolist()
            self.positions[cluster] = len(more)
            found += more
        return found

    def _explain_nothing(self) -> None:
        reach = ", ".join(f"{name} {value}" for name, value in self.difficulties.items())
        least = ", ".join(
            f"{name} {index.values.min()}" for name, index in self.indices.items() if index.values is not None
        )
        raise ConfigError(
            f"no sample is within reach of the first difficulties ({reach}); the easiest have {least or 'others'}: "
            "raise min_difficulty",
            "curriculum_metrics",
        )


def _has_files(settings: Mapping[str, Any]) -> bool:
    return any(settings.get(key) is not None for key in ("index_to_metric_path", "index_to_sample_path"))


class DeepSpeedDataSampler:
    """Micro-batches of one process, for ``DataLoader(batch_sampler=...)``.

    Args:
        data_efficiency_config: the section, also without its defaults.
        one_epoch_total_samples: length of the data set.
        data_parallel_group: not needed: nothing is sent.
        global_rank: likewise.
    """

    def __init__(
        self,
        data_efficiency_config: Mapping[str, Any],
        one_epoch_total_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        data_parallel_group: Any = None,
        gradient_accumulation_steps: int = 1,
        global_rank: int = 0,
        drop_last: bool = True,
    ) -> None:
        if one_epoch_total_samples < 1 or micro_batch_size < 1 or not 0 <= data_parallel_rank < data_parallel_size:
            raise DsHfError(
                f"no micro-batches of {micro_batch_size} of {one_epoch_total_samples} samples for process "
                f"{data_parallel_rank} of {data_parallel_size}: give a data set that is not empty, and sizes that fit"
            )
        self.micro, self.rank, self.processes = micro_batch_size, data_parallel_rank, data_parallel_size
        self.drop_last = drop_last
        self.global_batch_size = micro_batch_size * data_parallel_size * gradient_accumulation_steps
        self.draws = ClusterDraws(data_efficiency_config, one_epoch_total_samples, self.global_batch_size)
        epochs = (data_efficiency_config.get("data_sampling") or {}).get("num_epochs", 1000)
        self.total_samples: int = one_epoch_total_samples * epochs
        self.batch: list[int] = []
        self.consumed_samples = 0
        self.drawn: list[tuple[int, int]] = []  # see ``go_to``

    def __len__(self) -> int:
        return self.total_samples

    def __iter__(self) -> Iterator[list[int]]:
        together = self.micro * self.processes
        while self.consumed_samples <= self.total_samples:
            if not self.batch:
                self.batch = next(self.draws)
            current, self.batch = self.batch[:together], self.batch[together:]
            if len(current) < together and self.drop_last:
                continue
            start, end = (round(rank * len(current) / self.processes) for rank in (self.rank, self.rank + 1))
            self.consumed_samples += len(current)
            yield current[start:end]

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: Mapping[str, Callable[[int], Any]]) -> None:
        """Functions from a step to a difficulty, by metric."""
        for name, scheduler in self.draws.schedulers.items():
            if name in schedule_func_dict:
                scheduler.set_custom_get_difficulty(schedule_func_dict[name])

    def give_all(self) -> None:
        """Micro-batches of all processes in turn, for accelerate, which deals out what it is given to prepare."""
        self.rank, self.processes = 0, 1

    def go_to(self, samples: int, drawn: Sequence[tuple[int, int]] = ()) -> None:
        """Stand after ``samples`` samples of all processes.

        Args:
            drawn: which of them came in batches of another size: all up to a number, in batches of a size.
        """
        self.draws.restart()
        self.batch, self.consumed_samples, self.drawn = [], samples, list(drawn)
        reached = 0
        for end, size in [*drawn, (samples, self.global_batch_size)]:
            self.draws.batch = size
            while (left := min(end, samples) - reached) > 0:
                self.batch = self.batch or next(self.draws)
                taken = min(left, len(self.batch))
                self.batch, reached = self.batch[taken:], reached + taken

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, and the difficulties there (which ``set_data_post_process_func`` functions ask for)."""
        return {
            "batch": list(self.batch),
            "consumed_samples": self.consumed_samples,
            "curriculum_step": self.draws.step,
            "current_difficulties": dict(self.draws.difficulties),
            **self.sizes(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there, by drawing again what was drawn."""
        samples = state_dict["consumed_samples"]
        self.go_to(samples, self.drawn_before(state_dict, samples))

    def sizes(self) -> dict[str, Any]:
        """For a state: samples of a batch, and of batches of other sizes that a run had before it went on."""
        changed = {"drawn": [list(each) for each in self.drawn]} if self.drawn else {}
        return {"global_batch": self.global_batch_size, **changed}

    def drawn_before(self, state: Mapping[str, Any], samples: int) -> list[tuple[int, int]]:
        """What ``go_to`` is to know of a state with ``sizes()``, which was taken after ``samples`` samples."""
        drawn = [(int(end), int(size)) for end, size in state.get("drawn", ())]
        size = state.get("global_batch", self.global_batch_size)
        return drawn if size == self.global_batch_size else [*drawn, (samples, size)]


class EpochSampler(Sampler[int]):
    """The same samples in one row, as many in an epoch as the data set has: what a Trainer divides among processes."""

    def __init__(self, draws: ClusterDraws) -> None:
        self.draws, self.epoch = draws, 0

    def set_epoch(self, epoch: int) -> None:
        """The coming pass is this one."""
        self.epoch = epoch

    def __len__(self) -> int:
        return int(self.draws.total)

    def __iter__(self) -> Iterator[int]:
        self.draws.restart()
        start = self.epoch * self.draws.total
        self.epoch += 1
        row = (sample for batch in self.draws for sample in batch)
        return islice(row, start, start + self.draws.total)
