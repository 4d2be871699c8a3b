"""Files of metrics and batches by them, against what DeepSpeed 0.19.8 makes of the same data (``draws.json``)."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.data_pipeline.data_sampling.data_analyzer import DataAnalyzer, DistributedDataAnalyzer
from deepspeed.runtime.data_pipeline.data_sampling.data_sampler import DeepSpeedDataSampler
from deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import MMapIndexedDataset, MMapIndexedDatasetBuilder

from ds_hf.data.index_files import read_numbers
from ds_hf.data.sampler import ClusterDraws, EpochSampler, MetricIndex
from ds_hf.errors import ConfigError, DsHfError
from tests.helpers.distributed import run_distributed

TABLE = json.loads((Path(__file__).parent / "draws.json").read_text())
TOTAL = len(TABLE["lengths"])
LINEAR = {"schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 6, "difficulty_step": 1}}


class Lines(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return TOTAL

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([TABLE["lengths"][index], TABLE["rare"][index]])


METRICS: dict[str, Any] = {
    "metric_names": ["seqlen", "rare", "total"],
    "metric_functions": [lambda batch: batch[:, 0], lambda batch: batch[:, 1], lambda batch: batch.sum(0)],
    "metric_types": ["single_value_per_sample"] * 2 + ["accumulate_value_over_samples"],
}


def analyzer(path: Path, **more: Any) -> DataAnalyzer:
    return DataAnalyzer(Lines(), batch_size=7, save_path=path, metric_dtypes=[torch.int64] * 3, **METRICS, **more)


def sums(path: Path) -> dict[str, list[int]]:
    found = sorted(path.glob("*/*.bin"))
    return {file.stem: [file.stat().st_size, zlib.crc32(file.read_bytes())] for file in found}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("metrics")
    analyzer(path).run_map_reduce()
    return path


def test_numbers_of_files_are_those_of_deepspeed(files: Path) -> None:
    assert sums(files) == TABLE["files"]


def test_workers_and_threads_make_the_same_files(tmp_path: Path) -> None:
    for worker in (1, 0):
        analyzer(tmp_path, num_workers=2, worker_id=worker, num_threads=2).run_map()
    analyzer(tmp_path, num_workers=2, num_threads=2).run_reduce()
    assert sums(tmp_path) == TABLE["files"]
    with pytest.raises(DsHfError, match=r"run_map\(\) of worker 2 has not ended"):
        analyzer(tmp_path, num_workers=3, num_threads=2).run_reduce()


def together(path: str) -> None:
    DistributedDataAnalyzer(Lines(), batch_size=7, save_path=path, device="cpu", **METRICS).run_map_reduce()


def test_processes_of_a_group_make_the_same_files(tmp_path: Path) -> None:
    run_distributed(together, 2, str(tmp_path), timeout=30)
    assert sums(tmp_path) == TABLE["files"]


def test_functions_that_give_something_else_are_named(tmp_path: Path) -> None:
    for function, words in (
        (lambda batch: batch[:, 0].float(), "gave torch.float32, and its metric_dtype is torch.int64"),
        (lambda batch: 3, "gave a int: it returns a tensor"),
    ):
        given: dict[str, Any] = {"metric_names": ["a"], "metric_functions": [function]}
        kinds = {"metric_types": ["single_value_per_sample"], "metric_dtypes": [torch.int64]}
        with pytest.raises(DsHfError, match=words):
            DataAnalyzer(Lines(), save_path=tmp_path, **given, **kinds).run_map()  # type: ignore[arg-type]
    with pytest.raises(DsHfError, match="there is no metric_type 'mean'"):
        DataAnalyzer(Lines(), metric_names=["a"], metric_functions=[len], metric_types=["mean"])


def config(files: Path, metrics: dict[str, Any], **more: Any) -> dict[str, Any]:
    found = {
        name: {key: str(files / name / value) if key.endswith("path") else value for key, value in metric.items()}
        for name, metric in metrics.items()
    }
    sampling = {"num_epochs": 1, "curriculum_learning": {"enabled": True, "curriculum_metrics": found}}
    return {"seed": 77, "data_sampling": {**sampling, **more}}


def sampler(
    files: Path, metrics: dict[str, Any], rank: int = 0, world: int = 1, micro: int = 2
) -> DeepSpeedDataSampler:
    steps = 8 // (micro * world)
    return DeepSpeedDataSampler(config(files, metrics), TOTAL, micro, rank, world, None, steps, rank)


@pytest.mark.parametrize("name", TABLE["cases"])
def test_each_batch_is_that_of_deepspeed(files: Path, name: str) -> None:
    case = TABLE["cases"][name]
    found, difficulties = [], []
    given = sampler(files, case["metrics"])
    for batch in given:
        found.append(batch)
        difficulties.append(given.state_dict()["current_difficulties"])
    assert found == case["batches"]
    assert difficulties[::4] == case["difficulties"]


def test_processes_take_parts_of_the_same_batches_and_resume_exactly(files: Path) -> None:
    metrics = TABLE["cases"]["two"]["metrics"]
    alone = [sample for batch in sampler(files, metrics) for sample in batch]
    for world, micro in ((2, 2), (4, 1), (2, 4)):
        parts = [list(sampler(files, metrics, rank, world, micro)) for rank in range(world)]
        row = [sample for batches in zip(*parts, strict=True) for batch in batches for sample in batch]
        assert row == alone[: len(row)]
        assert len(row) >= TOTAL
    first = sampler(files, metrics)
    taken = [batch for batch, _ in zip(first, range(13), strict=False)]
    second = sampler(files, metrics)
    second.load_state_dict(first.state_dict() | {"consumed_samples": 26})
    assert [*taken, *second] == TABLE["cases"]["two"]["batches"]


def test_epochs_of_a_trainer_are_stretches_of_the_same_row(files: Path) -> None:
    given = config(files, TABLE["cases"]["value"]["metrics"])
    row = [sample for batch in TABLE["cases"]["value"]["batches"] for sample in batch]
    epochs = EpochSampler(ClusterDraws(given, TOTAL, 8))
    assert list(epochs) == row[:TOTAL]
    later = list(epochs)
    epochs.set_epoch(1)
    assert later == list(epochs)
    assert later[:2] == row[TOTAL : TOTAL + 2]


def test_numbers_in_one_file_are_a_metric(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.array(TABLE["lengths"]))
    metric = {
        "index_to_metric_path": str(tmp_path / "lengths.npy"),
        "min_difficulty": 8,
        "max_difficulty": 29,
        **LINEAR,
    }
    draws = ClusterDraws(
        {"data_sampling": {"curriculum_learning": {"curriculum_metrics": {"length": metric}}}}, TOTAL, 8
    )
    assert all(TABLE["lengths"][sample] <= 11 for sample in next(draws))
    np.save(tmp_path / "lengths.npy", np.where(np.arange(TOTAL) < 2, np.nan, TABLE["lengths"]))
    with pytest.raises(ConfigError, match=r"lengths\.npy has 2 values of length that are not finite"):
        ClusterDraws({"data_sampling": {"curriculum_learning": {"curriculum_metrics": {"length": metric}}}}, TOTAL, 8)


@pytest.mark.parametrize(
    ("changes", "total", "words"),
    [
        ({}, TOTAL + 1, f"is of {TOTAL} samples, and the data set has {TOTAL + 1}"),
        ({"min_difficulty": 30}, TOTAL, "is not below its largest value, 29"),
        ({"min_difficulty": 1, "max_difficulty": 5}, TOTAL, "no sample is within reach"),
        ({"index_to_metric_path": None}, TOTAL, "has no index_to_metric_path"),
        ({"index_to_metric_path": None, "index_to_sample_path": None}, TOTAL, "has no files"),
    ],
)
def test_files_that_do_not_fit_are_named(files: Path, changes: dict[str, Any], total: int, words: str) -> None:
    metric = config(files, TABLE["cases"]["value"]["metrics"])["data_sampling"]["curriculum_learning"]
    metric = {**metric["curriculum_metrics"]["seqlen"], **changes}
    metric["max_difficulty"] = max(metric["max_difficulty"], metric["min_difficulty"])
    given = {"data_sampling": {"curriculum_learning": {"curriculum_metrics": {"seqlen": metric}}}}
    with pytest.raises(ConfigError, match=words):
        next(ClusterDraws(given, total, 8))


def test_files_of_two_analyses_are_named(files: Path, tmp_path: Path) -> None:
    metric = config(files, TABLE["cases"]["value"]["metrics"])["data_sampling"]["curriculum_learning"]
    metric = metric["curriculum_metrics"]["seqlen"]
    listed = MMapIndexedDataset(metric["index_to_sample_path"])
    np.save(tmp_path / "fewer.npy", read_numbers(metric["index_to_metric_path"])[1:])
    with pytest.raises(ConfigError, match=f"values, and .* lists samples of {len(listed)}: the two are not of one"):
        MetricIndex("seqlen", {**metric, "index_to_metric_path": f"{tmp_path}/fewer.npy"}, TOTAL)
    builder = MMapIndexedDatasetBuilder(tmp_path / "twice.bin", np.int64)
    builder.add_items(np.minimum(item, TOTAL - 3) for item in listed[0 : len(listed)])
    builder.finalize(tmp_path / "twice.idx")
    with pytest.raises(ConfigError, match=f"names {TOTAL - 2} of {TOTAL} samples, and some of them more than once"):
        MetricIndex("seqlen", {**metric, "index_to_sample_path": f"{tmp_path}/twice"}, TOTAL)
    shares = {**metric, "difficulty_type": "percentile", "max_difficulty": TOTAL + 1}
    with pytest.raises(ConfigError, match=f"and there are {TOTAL}: give no more than that"):
        MetricIndex("seqlen", shares, TOTAL)
