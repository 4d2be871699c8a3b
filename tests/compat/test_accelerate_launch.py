"""``accelerate config`` and ``accelerate launch``: all answers of the questionnaire, files, flags, contradictions."""

from __future__ import annotations

import itertools
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.commands.launch import launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env

from ds_hf.config import load_config
from ds_hf.config.plan import plan_states
from ds_hf.errors import ConfigError
from ds_hf.log import forget_said
from tests.compat.accelerate_user import fresh_start
from tests.compat.common import SCRIPTS, WORLD, read_json, run_user_code, write_json
from tests.helpers.distributed import free_port
from tests.helpers.logs import Lines
from tests.helpers.patience import PATIENCE

SCRIPT = SCRIPTS / "accelerate_short.py"
BASE = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "DEEPSPEED",
    "machine_rank": 0,
    "main_training_function": "main",
    "num_machines": 1,
    "num_processes": WORLD,
    "rdzv_backend": "static",
    "same_network": True,
    "use_cpu": False,
    "debug": False,
}


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Environment variables of a launch end with the test."""
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name)
    yield monkeypatch
    fresh_start()


def plugin_of(monkeypatch: pytest.MonkeyPatch, *command_line: str) -> tuple[DeepSpeedPlugin, str]:
    """What a script's ``Accelerator()`` makes of this command line, and the mixed precision; nothing is started."""
    environments: list[dict[str, str]] = []
    with monkeypatch.context() as patch:
        launch_instead = lambda parsed: environments.append(prepare_deepspeed_cmd_env(parsed)[1])  # noqa: E731
        patch.setattr("accelerate.commands.launch.deepspeed_launcher", launch_instead)
        launch_command(launch_command_parser().parse_args([*command_line, "script.py"]))
    (environment,) = environments
    for name, value in environment.items():
        if name.startswith("ACCELERATE_"):
            monkeypatch.setenv(name, value)
    plugin = DeepSpeedPlugin()
    plugin.set_mixed_precision(environment["ACCELERATE_MIXED_PRECISION"])
    return plugin, environment["ACCELERATE_MIXED_PRECISION"]


def answers() -> Iterator[dict[str, Any]]:
    """Every combination that the questionnaire can end with, but for NVMe."""
    for stage, precision in itertools.product((0, 1, 2, 3), ("no", "fp16", "bf16")):
        devices = ("none", "cpu") if stage >= 2 else (None,)
        for optimizer, parameters, clip, flag in itertools.product(devices, devices, (None, 0.5), (True, False)):
            found: dict[str, Any] = {"zero_stage": stage, "gradient_accumulation_steps": 2, "zero3_init_flag": flag}
            if optimizer is not None:
                found |= {"offload_optimizer_device": optimizer, "offload_param_device": parameters}
            if clip is not None:
                found["gradient_clipping"] = clip
            if stage == 3:
                found["zero3_save_16bit_model"] = not flag
            yield {**BASE, "mixed_precision": precision, "deepspeed_config": found}


@pytest.mark.feature("accelerate", "every answer of `accelerate config` about DeepSpeed")
def test_every_answer_of_the_questionnaire_gives_a_legal_configuration(
    tmp_path: Path, untouched: pytest.MonkeyPatch
) -> None:
    seen = 0
    for content in answers():
        file = tmp_path / "answers.yaml"
        file.write_text(yaml.safe_dump(content))
        with untouched.context() as patch:
            plugin, precision = plugin_of(patch, f"--config_file={file}")
        asked = content["deepspeed_config"]
        plugin.deepspeed_config_process(
            must_match=False, train_micro_batch_size_per_gpu=2, train_batch_size=8, gradient_clipping=1.0
        )
        config = load_config(plugin.deepspeed_config, world_size=2)
        zero = config.zero_optimization
        assert zero.stage == asked["zero_stage"]
        assert zero.offload_optimizer.device == asked.get("offload_optimizer_device", "none")
        parameters = asked.get("offload_param_device", "none")
        assert plan_states(config).parameters.device == (
            "device" if parameters == "none" or zero.stage != 3 else parameters
        )
        ignored = [fault.pointer for fault in config.warnings if "offload_param" in fault.pointer]
        assert bool(ignored) == (parameters != "none" and zero.stage != 3)
        assert zero.stage3_gather_16bit_weights_on_model_save == asked.get("zero3_save_16bit_model", False)
        assert config.gradient_clipping == asked.get("gradient_clipping", 1.0)
        assert config.gradient_accumulation_steps == 2
        assert (config.fp16.enabled, config.bf16.enabled) == (precision == "fp16", precision == "bf16")
        assert plugin.zero3_init_flag == (asked["zero3_init_flag"] and zero.stage == 3)
        seen += 1
    assert seen == 3 * (2 * 2 * 2 + 2 * 4 * 2 * 2)


@pytest.mark.feature("accelerate", "offload to NVMe, asked for in `accelerate config`")
def test_nvme_is_taken_over_and_its_folder_asked_for(tmp_path: Path, untouched: pytest.MonkeyPatch) -> None:
    asked = {"zero_stage": 3, "offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": "/nvme"}
    file = tmp_path / "answers.yaml"
    file.write_text(yaml.safe_dump({**BASE, "mixed_precision": "no", "deepspeed_config": asked}))
    # accelerate has no way from its answers to the plugin for the folder: it writes the text "none"
    with pytest.raises(ConfigError, match=r"offload_optimizer/nvme_path.*\n.*/a/fast/folder"):
        plugin_of(untouched, f"--config_file={file}")
    untouched.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH", "/nvme")
    plugin, _ = plugin_of(untouched, f"--config_file={file}")
    section = plugin.deepspeed_config["zero_optimization"]["offload_optimizer"]
    assert section == {"device": "nvme", "nvme_path": "/nvme"}


@pytest.mark.feature("accelerate", "MoE layer classes from `accelerate config` become leaf modules", pain="P16")
def test_moe_classes_become_leaves(tmp_path: Path, untouched: pytest.MonkeyPatch) -> None:
    from deepspeed.utils import z3_leaf_module

    from tests.compat.accelerate_user import Regressor

    asked = {"zero_stage": 3, "deepspeed_moe_layer_cls_names": "Linear"}
    file = tmp_path / "answers.yaml"
    file.write_text(yaml.safe_dump({**BASE, "mixed_precision": "no", "deepspeed_config": asked}))
    plugin, _ = plugin_of(untouched, f"--config_file={file}")
    model = Regressor()
    plugin.set_moe_leaf_modules(model)
    assert [name for name, module in model.named_modules() if z3_leaf_module(module)] == [
        "blocks.0",
        "blocks.1",
        "head",
    ]


@pytest.mark.feature(
    "accelerate", "--mixed_precision against the DeepSpeed file: contradictions are refused", pain="P4"
)
@pytest.mark.parametrize(("flag", "in_file"), [("bf16", "fp16"), ("fp16", "bf16")])
def test_precision_of_the_flag_against_the_file(
    flag: str, in_file: str, tmp_path: Path, untouched: pytest.MonkeyPatch
) -> None:
    file = write_json(tmp_path / "ds.json", {"zero_optimization": {"stage": 2}, in_file: {"enabled": True}})
    command_line = ["--use_deepspeed", f"--deepspeed_config_file={file}"]
    with pytest.raises(ValueError, match=f"cannot be set to `{flag}` when `{in_file}` is set in the DeepSpeed config"):
        plugin_of(untouched, *command_line, f"--mixed_precision={flag}")
    plugin, _ = plugin_of(untouched, *command_line, "--mixed_precision=no")  # what the file says holds
    assert plugin.deepspeed_config[in_file]["enabled"] is True


@pytest.mark.feature("accelerate", '--mixed_precision fills fp16 and bf16 that are absent or "auto" in the file')
@pytest.mark.parametrize("written", [None, "auto"])
@pytest.mark.parametrize("flag", ["no", "fp16", "bf16"])
def test_precision_of_the_flag_fills_the_file(
    flag: str, written: str | None, tmp_path: Path, untouched: pytest.MonkeyPatch
) -> None:
    content: dict[str, Any] = {"zero_optimization": {"stage": 2}, "train_batch_size": 4}
    if written:
        content |= {"fp16": {"enabled": written}, "bf16": {"enabled": written}}
    file = write_json(tmp_path / "ds.json", content)
    plugin, _ = plugin_of(untouched, "--use_deepspeed", f"--deepspeed_config_file={file}", f"--mixed_precision={flag}")
    config = load_config(plugin.deepspeed_config, world_size=1)
    assert (config.fp16.enabled, config.bf16.enabled) == (flag == "fp16", flag == "bf16")


def test_flags_that_the_file_contradicts_are_told(tmp_path: Path, untouched: pytest.MonkeyPatch) -> None:
    """The file counts; what it has "auto" for, or says as well, is taken in silence."""
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    content = {"gradient_accumulation_steps": 2, "gradient_clipping": "auto", "zero_optimization": zero}
    file = write_json(tmp_path / "ds.json", content)
    agreed = ("--gradient_clipping=0.5", "--gradient_accumulation_steps=2", "--zero3_save_16bit_model=true")
    lines = Lines(logging.WARNING)
    logging.getLogger("ds_hf").addHandler(lines)
    forget_said()
    command = ("--use_deepspeed", f"--deepspeed_config_file={file}", f"--num_processes={WORLD}", *agreed)
    plugin_of(untouched, *command, "--zero_stage=1", "--offload_optimizer_device=cpu")
    assert lines.texts == []
    plugin, _ = plugin_of(untouched, *command, "--zero_stage=3", "--offload_param_device=cpu")
    logging.getLogger("ds_hf").removeHandler(lines)
    assert plugin.zero_stage == 1
    (told,) = lines.texts
    assert (
        "zero_stage=3, and the file has zero_optimization.stage 1; offload_param_device=cpu, and the file has no"
        in told
    )


@pytest.mark.feature("accelerate", "settings in both accelerate's file and DeepSpeed's are refused", pain="P4")
def test_settings_given_in_both_files_are_refused(tmp_path: Path, untouched: pytest.MonkeyPatch) -> None:
    ds = write_json(tmp_path / "ds.json", {"zero_optimization": {"stage": 2}})
    asked = {"deepspeed_config_file": str(ds), "gradient_clipping": 1.0, "zero_stage": 3}
    file = tmp_path / "answers.yaml"
    file.write_text(yaml.safe_dump({**BASE, "mixed_precision": "no", "deepspeed_config": asked}))
    with pytest.raises(ValueError, match="the following accelerate config variables will be ignored"):
        plugin_of(untouched, f"--config_file={file}")


class Terminal:
    """A program in a pseudo-terminal that is asked and answered."""

    def __init__(self, command: Sequence[str], env: dict[str, str]) -> None:
        self.master, slave = os.openpty()
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=env, close_fds=True)
        os.close(slave)
        self.text = ""

    def answer(self, question: str, keys: str, timeout: float) -> None:
        """Wait until ``question`` is shown, then press ``keys``."""
        self._read_until(question, timeout)
        self.text = self.text[self.text.index(question) + len(question) :]
        time.sleep(0.1)  # a menu starts to listen after it has drawn itself
        os.write(self.master, keys.encode())

    def close(self, timeout: float) -> int:
        """The exit status."""
        try:
            self._read_until(None, timeout)
            return self.process.wait(timeout * PATIENCE)
        finally:
            self.process.kill()
            os.close(self.master)

    def _read_until(self, question: str | None, timeout: float) -> None:
        deadline = time.monotonic() + timeout * PATIENCE
        while question is None or question not in self.text:
            ready, _, _ = select.select([self.master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{question!r} was not asked within {timeout:g} s; shown so far: {self.text[-2000:]}"
            try:
                self.text += os.read(self.master, 4096).decode(errors="replace")
            except OSError:  # the program has ended
                assert question is None, f"{question!r} was not asked; shown so far: {self.text[-2000:]}"
                return


def fill_in(file: Path, *about_deepspeed: tuple[str, str]) -> None:
    """Answer ``accelerate config`` up to its end."""
    terminal = Terminal(
        [sys.executable, "-m", "accelerate.commands.accelerate_cli", "config", f"--config_file={file}"],
        {**os.environ, "COLUMNS": "200", "TERM": "xterm"},
    )
    questions = (
        ("In which compute environment are you running?", "\r"),
        ("Which type of machine are you using?", "\r"),
        ("run your training on CPU only", "\n"),
        ("optimize your script with torch dynamo", "\n"),
        ("Do you want to use DeepSpeed?", "yes\n"),
        *about_deepspeed,
    )
    try:
        for index, (question, keys) in enumerate(questions):
            terminal.answer(question, keys, timeout=60 if index == 0 else 15)
    finally:
        status = terminal.close(timeout=30)
    assert status == 0


@pytest.mark.slow
@pytest.mark.feature("accelerate", "accelerate config, then accelerate launch with the file it wrote")
def test_the_questionnaire_itself_and_a_launch_of_what_it_wrote(tmp_path: Path) -> None:
    file = tmp_path / "default_config.yaml"
    fill_in(
        file,
        ("specify a json file to a DeepSpeed config?", "no\n"),
        ("ZeRO optimization stage?", "3\r"),
        ("Where to offload optimizer states?", "1\r"),
        ("Where to offload parameters?", "1\r"),
        ("How many gradient accumulation steps", "2\n"),
        ("use gradient clipping?", "yes\n"),
        ("gradient clipping value?", "0.5\n"),
        ("save 16-bit model weights", "yes\n"),
        ("enable `deepspeed.zero.Init`", "yes\n"),
        ("enable Mixture-of-Experts", "no\n"),
        ("How many GPU(s) should be used", f"{WORLD}\n"),
        ("mixed precision?", "2\r"),
    )
    written = yaml.safe_load(file.read_text())
    assert written["distributed_type"] == "DEEPSPEED"
    assert written["deepspeed_config"] == {
        "zero_stage": 3,
        "offload_optimizer_device": "cpu",
        "offload_param_device": "cpu",
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "zero3_save_16bit_model": True,
        "zero3_init_flag": True,
    }
    report = launch(tmp_path, f"--config_file={file}")
    assert report["processes"] == WORLD
    assert report["stage"] == 3
    assert report["batch"] == [2 * 2 * WORLD, 2, 2]
    assert report["clipping"] == 0.5
    assert report["dtype"] == "torch.bfloat16"
    assert report["zero"]["offload_optimizer"]["device"] == report["zero"]["offload_param"]["device"] == "cpu"
    assert report["steps"] == 32 // (2 * WORLD) // 2


@pytest.mark.slow
@pytest.mark.feature("accelerate", "accelerate config with a DeepSpeed file, then accelerate launch")
def test_the_questionnaire_with_a_deepspeed_file(tmp_path: Path) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
    content = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "optimizer": optimizer}
    ds = write_json(tmp_path / "ds.json", {**content, "zero_optimization": {"stage": 2}})
    file = tmp_path / "default_config.yaml"
    fill_in(
        file,
        ("specify a json file to a DeepSpeed config?", "yes\n"),
        ("path to the json DeepSpeed config file", f"{ds}\n"),
        ("enable `deepspeed.zero.Init`", "no\n"),
        ("enable Mixture-of-Experts", "no\n"),
        ("How many GPU(s) should be used", f"{WORLD}\n"),
    )
    report = launch(tmp_path, f"--config_file={file}")
    assert (report["processes"], report["stage"], report["batch"]) == (WORLD, 2, [2 * WORLD, 2, 1])


def launch(folder: Path, *options: str) -> dict[str, Any]:
    """``accelerate launch`` of the short script; its report."""
    command = [sys.executable, "-m", "accelerate.commands.launch", f"--main_process_port={free_port()}", *options]
    command += [str(SCRIPT), str(folder / "report.json")]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
    report: dict[str, Any] = read_json(folder / "report.json")
    return report


@pytest.mark.slow
@pytest.mark.feature("accelerate", "accelerate launch with a yaml file and flags that override it")
def test_a_file_and_flags_that_override_it(tmp_path: Path) -> None:
    file = tmp_path / "answers.yaml"
    asked = {"zero_stage": 3, "gradient_accumulation_steps": 1, "offload_param_device": "none"}
    file.write_text(yaml.safe_dump({**BASE, "mixed_precision": "no", "deepspeed_config": asked}))
    report = launch(tmp_path, f"--config_file={file}", "--zero_stage=1", "--gradient_accumulation_steps=4")
    assert (report["stage"], report["batch"], report["dtype"]) == (1, [8 * WORLD, 2, 4], "torch.float32")


@pytest.mark.slow
@pytest.mark.feature("accelerate", "accelerate test")
def test_accelerates_own_test_script(tmp_path: Path) -> None:
    file = tmp_path / "answers.yaml"
    asked = {"zero_stage": 2, "gradient_accumulation_steps": 1}
    content = {**BASE, "mixed_precision": "no", "deepspeed_config": asked, "main_process_port": free_port()}
    file.write_text(yaml.safe_dump(content))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.accelerate_cli", "test", f"--config_file={file}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PATH": path},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert "Test is a success!" in done.stdout
    assert "DistributedType.DEEPSPEED" in done.stdout
    assert f"Num processes: {WORLD}" in done.stdout


def in_a_notebook(stage: int) -> None:
    """The cell that a notebook launches."""
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage, gradient_accumulation_steps=1))
    import torch

    from tests.compat.accelerate_user import LR, MICRO, Regressor, loader, train

    model = Regressor()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    engine, optimizer, batches = accelerator.prepare(model, optimizer, loader(4 * MICRO * accelerator.num_processes))
    rows = train(accelerator, engine, optimizer, None, batches)
    print("LOSSES", accelerator.num_processes, [row["loss"] for row in rows], flush=True)


def start_from_a_notebook() -> None:
    """As a notebook does it: no launcher's environment, processes are forked by accelerate."""
    from accelerate import notebook_launcher

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    notebook_launcher(in_a_notebook, (3,), num_processes=1)


@pytest.mark.slow
@pytest.mark.feature("accelerate", "notebook_launcher (one process)")
def test_in_a_notebook(capfd: pytest.CaptureFixture[str]) -> None:
    from tests.compat.accelerate_user import MICRO, plain_training

    run_user_code(start_from_a_notebook, world_size=1)
    line = next(line for line in capfd.readouterr().out.splitlines() if line.startswith("LOSSES 1 "))
    losses = [float(number) for number in line.partition("[")[2].rstrip("]").split(",")]
    expected = [row["loss"] for row in plain_training(1, 4 * MICRO)[0]]
    assert losses == pytest.approx(expected, rel=1e-5)
