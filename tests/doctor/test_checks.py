"""What the doctor reads from nvidia-smi, and every combination that it knows to be bad."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ds_hf.doctor import hardware, releases, report
from ds_hf.doctor.hardware import ListedGpu, disk_speed, parse_gpus, parse_links
from ds_hf.doctor.known_bad import RULES, KnownMachine, problems
from tests.helpers.distributed import run_distributed

H100 = [ListedGpu(index, "NVIDIA H100 80GB HBM3", 80_000, 81_559, "570.1") for index in range(2)]
RTX = [ListedGpu(index, "NVIDIA GeForce RTX 4090", 24_000, 24_564, "570.1") for index in range(2)]
FINE = KnownMachine(
    gpus=H100,
    torch_gpus=2,
    torch_cuda="12.8",
    nccl=(2, 27, 3),
    shm_nbytes=64 << 30,
    memory_nbytes=512 << 30,
    kernel="6.1.0-26-amd64",
    host_address="10.0.0.5",
)

TOPO = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m\n"
    "GPU0\t X \tNV18\tSYS\tPIX\t0-31\n"
    "GPU1\tNV18\t X \tSYS\tSYS\t0-31\n"
    "GPU2\tSYS\tSYS\t X \tSYS\t32-63\n"
    "NIC0\tPIX\tSYS\tSYS\t X \n\nLegend:\n  X    = Self\n  GPU  = x\n"
)


def test_gpus() -> None:
    text = "0, 80995, 81559, 570.124.06, NVIDIA H100 80GB HBM3\n1, [N/A], 81559, 570, x\nsome message\n"
    assert parse_gpus(text) == [ListedGpu(0, "NVIDIA H100 80GB HBM3", 80995, 81559, "570.124.06")]
    assert parse_gpus("") == []


def test_links() -> None:
    assert parse_links(TOPO) == "NVLink (18 links) between 1 pair; PCIe across NUMA nodes between 2 pairs"
    assert parse_links("") == ""


@pytest.mark.parametrize(
    ("change", "words", "fix"),
    [
        ({"torch_cuda": None, "torch_gpus": 0}, "build for the CPU", "install torch for CUDA"),
        ({"torch_gpus": 0, "env": {"CUDA_VISIBLE_DEVICES": ""}}, "hides all 2 GPUs", "unset it"),
        ({"torch_gpus": 0}, "under driver 570.1", "update the driver"),
        ({"shm_nbytes": 64 << 20}, "/dev/shm has 64 MiB", "--shm-size"),
        ({"kernel": "5.4.0-99"}, "Linux 5.4.0-99", "update the kernel"),
        ({"gpus": RTX}, "no direct access", "NCCL_P2P_DISABLE=1"),
        ({"env": {"CUDA_LAUNCH_BLOCKING": "1"}}, "CUDA_LAUNCH_BLOCKING=1", "unset"),
        ({"env": {"TORCH_DISTRIBUTED_DEBUG": "detail"}}, "checks every collective", "unset"),
        ({"env": {"NCCL_SHM_DISABLE": "1"}}, "NCCL_SHM_DISABLE=1: NCCL takes", "unset"),
        ({"host_address": "127.0.1.1"}, "127.0.1.1", "GLOO_SOCKET_IFNAME"),
        ({"host_address": None}, "has no address", "/etc/hosts"),
        ({"memory_nbytes": 32 << 30}, "32 GiB of memory beside", "ds-hf memory"),
        ({"memlock": 65536}, "ulimit -l is 64 KiB", "unlimited"),
        (
            {"installed": {"torch": "2.15.0+cpu", "trl": "0.9"}, "declared": {"torch": ">=2.11", "trl": ">=1"}},
            "trl 0.9: ds-hf is not made for so old",
            "pip install 'trl>=1'",
        ),
        (
            {"installed": {"torch": "3.0"}, "lacking": {"torch": ["torch.nn.Linear", *"abcd"]}},
            "torch 3.0 lacks torch.nn.Linear, a, b, c and 1 more",
            "another release",
        ),
    ],
)
def test_every_rule(change: dict[str, object], words: str, fix: str) -> None:
    assert problems(FINE) == []
    found = problems(replace(FINE, **change))  # type: ignore[arg-type]
    assert len(found) == 1, found
    assert words in found[0][0]
    assert fix in found[0][1]


def test_no_rule_speaks_about_a_machine_without_gpus() -> None:
    bare = replace(FINE, gpus=[], torch_gpus=0, torch_cuda=None, nccl=None, memory_nbytes=1 << 30, memlock=0)
    assert problems(bare) == []
    assert len(RULES) >= 12


def test_the_installed_releases_have_all_that_is_imported_from_them() -> None:
    (lacking,) = run_distributed(releases.lacking, 1, backend=None)  # which has imported most of them
    assert lacking == {}
    found, needs = releases.installed(), releases.declared()
    assert {"torch", "transformers", "accelerate", "trl"} <= needs.keys() & found.keys()
    assert problems(replace(FINE, installed=found, declared=needs)) == []


def test_what_a_release_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "code.py").write_text(
        "from torch import nn, no_such_name\n"
        "def later():\n    from transformers.no_such_module import anything\n"
        "    try:\n        from accelerate import may_be_missing\n    except ImportError: pass\n"
    )
    monkeypatch.setattr(releases.ds_hf, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(releases.autoload, "unfit_hooks", lambda: {"accelerate.state": "AttributeError: renamed"})
    assert releases.lacking() == {
        "torch": ["torch.no_such_name"],
        "transformers": ["transformers.no_such_module.anything"],
        "accelerate": ["accelerate.state (AttributeError: renamed)"],
    }


def test_the_fix_of_a_name_that_is_not_served_is_a_folder_that_serves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    folder = Path(report._deepspeed().fix.split()[1])
    assert (folder / "deepspeed" / "__init__.py").is_file()


def test_disk(tmp_path: Path) -> None:
    speed = disk_speed(tmp_path, 8 << 20)
    assert speed.write > 1e5
    assert speed.read > 1e5
    assert list(tmp_path.iterdir()) == []
    fact = report._disk(tmp_path / "missing")
    assert "No such file" in fact.value
    assert "--disk" in fact.fix


def test_a_driver_that_hangs_is_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(hardware, "ASK_S", 0.3)
    assert hardware.gpus() == []
