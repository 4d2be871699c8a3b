"""How good the autotuner's result is, and what finding it costs.

    python benchmarks/autotune.py --cpu --json FILE
    python benchmarks/autotune.py --model 1b --folder /tmp/tuning --deepspeed-path /folder/with/deepspeed --json FILE

Tunes a model of random weights (a Llama, or ``moe``, five layers of Qwen3-30B-A3B) that a Trainer trains with HF's
"auto" ZeRO-3 file (every bucket "auto"), at one global batch; with ``--lora`` adapters on all linear layers of 16-bit
weights. Parts, chosen by ``--parts``; with ``--folder`` they can be run in several calls, also an interrupted search:

- ``own``: tokens/s of the file as it is, with ds_hf;
- ``deepspeed``: the same command with real DeepSpeed, of ``--deepspeed-path`` or of the interpreter ``--deepspeed``;
- ``search``: ds_hf's search, seconds and launches; ``tuned``: its command, started as a user would;
- ``exhaustive``: a launch for every setting of the same space with every micro-batch; ``--exhaustive-budget`` ends it;
  where there is one micro-batch only, what ``search`` launched is not launched again;
- ``deepspeed-autotuner``: DeepSpeed's own search on the same script, cut off after ``--autotuner-limit``, and tokens/s
  of the best that it had measured by then.

A search's wall time is its device time: a launch holds every device. Each part has an empty cache of torch.compile. All
figures are written after each part. ``--cpu`` uses two gloo processes, a tiny model and an artificial memory limit.

DeepSpeed's autotuner wants ``pdsh`` to kill with after each experiment, and ``tabulate`` for its summary: where these
are missing, a command that does nothing and a function that joins words stand in for them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

PARTS = ("own", "deepspeed", "search", "tuned", "exhaustive", "deepspeed-autotuner")
ROOT = Path(__file__).resolve().parents[1]
SHAPES: dict[str, dict[str, Any]] = {  # of its configuration; the sequences are as long as positions allow
    "tiny": {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 2048,
             "intermediate_size": 320, "max_position_embeddings": 64},
    "1b": {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "vocab_size": 32000,
           "intermediate_size": 5632, "max_position_embeddings": 2048},
    "7b": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000,
           "intermediate_size": 11264, "max_position_embeddings": 2048},
    "8b": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
           "vocab_size": 128256, "intermediate_size": 14336, "max_position_embeddings": 4096},
    "tiny-moe": {"model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "intermediate_size": 128,
                 "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
                 "max_position_embeddings": 64},
    "moe": {"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 5, "num_attention_heads": 32,
            "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "intermediate_size": 6144,
            "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
            "max_position_embeddings": 4096},
}  # fmt: skip
MICROS, ACCUMULATIONS = {"1b": 4, "7b": 1}, {"tiny": 8, "7b": 8}  # of the user's file, else 2 and 1
SPACE = ("zero_optimization.stage", "ds_hf.compile", "gradient_checkpointing")
OUTSIDE = ("zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device",
           "activation_checkpointing.cpu_checkpointing")  # fmt: skip
SCRIPT = """
import json
import time
start = time.perf_counter()
import torch
from dataclasses import dataclass
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, Trainer, TrainerCallback, TrainingArguments

@dataclass
class Shape:
    shape: str = ""
    lora: int = 0

def say(text):
    if arguments.process_index == 0:
        print(f"[{time.perf_counter() - start:5.1f} s] {text}", flush=True)

class Timer(TrainerCallback):
    times = []
    def on_step_end(self, args, state, control, **kwargs):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())

class Tokens(torch.utils.data.Dataset):
    def __init__(self, vocabulary, length):
        self.tokens = torch.randint(vocabulary, (4096, length), generator=torch.Generator().manual_seed(0))
    def __len__(self):
        return 100_000
    def __getitem__(self, index):
        row = self.tokens[index % 4096]
        return {"input_ids": row, "labels": row}

own, arguments = HfArgumentParser((Shape, TrainingArguments)).parse_args_into_dataclasses()
say("imported, processes connected")
config = AutoConfig.for_model(**{"model_type": "llama", "use_cache": False, **json.loads(own.shape)})
length = config.max_position_embeddings
torch.manual_seed(0)
with arguments.device:
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if own.lora else torch.float32)
    if own.lora:
        from peft import LoraConfig, get_peft_model
        adapter = LoraConfig(r=own.lora, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, adapter)
say("model built")
trainer = Trainer(model, arguments, train_dataset=Tokens(config.vocab_size, length), callbacks=[Timer()])
trainer.train()
say("trained")
import deepspeed
say(f"engine: {deepspeed.__version__} in {deepspeed.__file__}")
steps = sorted(b - a for a, b in zip(Timer.times[2:], Timer.times[3:]))
per_step = arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size * length
say(f"tokens/s: {per_step / steps[len(steps) // 2]:.2f}")
"""
AUTO = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto", "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": "auto",
                          "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"},
}  # fmt: skip


BATCH_KEYS = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
BATCH = ("--per_device_train_batch_size", "--gradient_accumulation_steps")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="the tiny model on two gloo processes")
    parser.add_argument("--model", choices=sorted(SHAPES), default="1b")
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters; 0 trains all weights")
    parser.add_argument("--parts", help="with commas; default: own,search,tuned, and deepspeed where it is named")
    parser.add_argument("--folder", type=Path, help="keep everything here, and go on with what is in it")
    parser.add_argument("--processes", type=int, help="default: one a GPU, or two")
    parser.add_argument("--micro", type=int, help="micro-batch of the user's file")
    parser.add_argument("--accumulation", type=int, help="accumulation steps of the user's file")
    parser.add_argument("--micros", default="1:1024", help="interval for the micro-batch in searches")
    parser.add_argument("--tune", help=f"keys that are free, with commas, or all; default: {', '.join(SPACE)}")
    parser.add_argument("--fix", default=",".join(OUTSIDE), help="keys that stay, with commas; default: what offloads")
    parser.add_argument("--budget", default="10m", help="of the search")
    parser.add_argument("--exhaustive-budget", default="100h")
    parser.add_argument("--autotuner-limit", default="10m", help="for DeepSpeed's autotuner")
    parser.add_argument("--memory-limit", help="default: that of the device, or 120MiB with --cpu")
    parser.add_argument("--exhaustive", action="store_true", help="the same as naming it in --parts")
    parser.add_argument("--deepspeed", help="python of an environment with real DeepSpeed; default: this one")
    parser.add_argument("--deepspeed-path", type=Path, help="folder with real DeepSpeed, in front of PYTHONPATH")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    if args.cpu:
        args.model, args.memory_limit = args.model if "tiny" in args.model else "tiny", args.memory_limit or "120MiB"
    args.micro, args.accumulation = (
        args.micro or MICROS.get(args.model, 2),
        args.accumulation or ACCUMULATIONS.get(args.model, 1),
    )
    args.tune = args.tune or ",".join(key for key in SPACE if not args.cpu or key != "ds_hf.compile")
    real = bool(args.deepspeed or args.deepspeed_path)
    default = ["own", *(["deepspeed"] if real else []), "search", "tuned", *(["exhaustive"] if args.exhaustive else [])]
    args.parts = args.parts.split(",") if args.parts else default
    if set(args.parts) - set(PARTS):
        parser.error(f"--parts takes {', '.join(PARTS)}")
    if {"deepspeed", "deepspeed-autotuner"} & set(args.parts) and not real:
        parser.error("real DeepSpeed is needed: --deepspeed PYTHON or --deepspeed-path FOLDER")
    return args


class Benchmark:
    """The parts; each is a method that returns its figures.

    Attributes:
        figures: of all parts so far, also those of earlier calls in the same folder.
    """

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        import torch

        self.args, self.folder = args, folder
        gpus = torch.cuda.device_count() if torch.cuda.is_available() and not args.cpu else 0
        self.processes = args.processes or gpus or 2
        self.environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        os.environ.update(self.environment)
        (folder / "train.py").write_text(SCRIPT)
        (folder / "ds_config.json").write_text(json.dumps(AUTO))
        self.noted = folder / "figures.json"
        self.figures: dict[str, Any] = json.loads(self.noted.read_text()) if self.noted.exists() else {}
        here = {"model": args.model, "lora": args.lora, "processes": self.processes, "torch": torch.__version__,
                "device": torch.cuda.get_device_name() if gpus else "cpu", "micros": args.micros,
                "global_batch": args.micro * args.accumulation * self.processes}  # fmt: skip
        if any(self.figures.get(key, value) != value for key, value in here.items()):
            raise SystemExit(f"{folder} holds another benchmark: give another --folder")
        self.figures = {**here, "command": " ".join(sys.argv[1:]), **self.figures}

    def run(self) -> None:
        parts = {"own": self.own, "deepspeed": self.deepspeed, "search": self.search, "tuned": self.tuned,
                 "exhaustive": self.exhaustive, "deepspeed-autotuner": self.autotuner}  # fmt: skip
        for name in self.args.parts:
            print(f"--- {name}", flush=True)
            start = time.monotonic()
            # every part compiles anew; a search that goes on finds what it had
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.folder / f"compiled-{name}")
            self.environment["TORCHINDUCTOR_CACHE_DIR"] = os.environ["TORCHINDUCTOR_CACHE_DIR"]
            found = parts[name]()
            self.figures[name] = {**found, "wall": self.figures.get(name, {}).get("wall", 0) + time.monotonic() - start}
            print(f"--- {name}: {time.monotonic() - start:.0f} s", flush=True)
            self.write()

    def write(self) -> None:
        for path in (self.noted, self.args.json):
            if path is not None:
                path.write_text(json.dumps(self.figures, indent=2) + "\n")

    # -- parts ------------------------------------------------------------------------------------------------------

    def own(self) -> dict[str, Any]:
        return self._train(self._words(), sys.executable, self.environment, real=False)

    def deepspeed(self) -> dict[str, Any]:
        return self._train(self._words(), self.args.deepspeed or sys.executable, self._real_environment(), real=True)

    def search(self) -> dict[str, Any]:
        from ds_hf.autotune.options import seconds_of

        return self._search("search", budget=seconds_of(self.args.budget))

    def tuned(self) -> dict[str, Any]:
        if "search" not in self.figures:
            raise SystemExit("tuned needs what search found: run it first, with the same --folder")
        return self._train(self.figures["search"]["words"], sys.executable, self.environment, real=False)

    def exhaustive(self) -> dict[str, Any]:
        from ds_hf.autotune.options import seconds_of

        low, _, high = self.args.micros.partition(":")
        done, here = self.folder / "search", self.folder / "exhaustive"
        if done.exists() and not here.exists() and low == (high or low):  # its launches are the same ones
            shutil.copytree(done, here)
        budget = seconds_of(self.args.exhaustive_budget)
        point_seconds = max(2.0, seconds_of(self.args.budget) / 60)  # what the search allows itself
        return self._search("exhaustive", budget=budget, trials=10_000, patience=10_000, micros=100,
                            sampler="exhaustive", confirm=False, point_seconds=point_seconds)  # fmt: skip

    def autotuner(self) -> dict[str, Any]:
        """DeepSpeed's own, as its documentation has it for a Trainer's script: every stage, the default fast mode."""
        from ds_hf.autotune.options import seconds_of

        folder = self.folder / "deepspeed-autotuner"
        shutil.rmtree(folder, ignore_errors=True)
        environment = self._real_environment()
        self._stand_in(folder / "bin", environment)
        section = {
            "enabled": True,
            "arg_mappings": dict(zip(BATCH_KEYS, BATCH, strict=True)),
            "max_train_batch_size": self.figures["global_batch"],
        }  # fmt: skip
        zero = {**AUTO["zero_optimization"], "stage": "all"}
        config = {**AUTO, "zero_optimization": zero, "autotuning": section}
        del config["train_batch_size"]  # of the first experiment it would be the user's, and fit no more
        (folder / "ds_config.json").write_text(json.dumps(config))
        words = [*self._words()[:-1], "ds_config.json"]
        start = time.monotonic()
        limit = seconds_of(self.args.autotuner_limit)
        with (folder / "log.txt").open("wb") as log:
            process = subprocess.Popen(
                [str(folder / "bin" / "deepspeed"), "--autotuning", "tune", "--num_gpus", str(self.processes), *words],
                cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                seen: set[str] = set()
                while process.poll() is None and time.monotonic() - start < limit:
                    time.sleep(1)
                    for name in _measured(folder).keys() - seen:
                        seen.add(name)
                        print(f"[{time.monotonic() - start:5.1f} s] {name}: {_measured(folder)[name]}", flush=True)
            finally:
                ended = process.poll() is not None
                _end(process)
        found = _measured(folder)
        figures = {"seconds": time.monotonic() - start, "finished": ended, "experiments": found,
                   "launches": len(list(folder.glob("autotuning_results/*/cmd.txt")))}  # fmt: skip
        if not found:
            print((folder / "log.txt").read_text(errors="replace")[-3000:])
            return figures
        best = max(found, key=lambda name: found[name])
        config = json.loads((folder / "autotuning_results" / best / "exp.json").read_text())["ds_config"]
        config.pop("autotuning", None)
        (folder / "best.json").write_text(json.dumps(config))
        words = [*self._words()[:-1], str(folder / "best.json")]
        size = [config[key] for key in BATCH_KEYS]
        for flag, value in zip(BATCH, size, strict=True):
            words[words.index(flag) + 1] = str(value)
        figures |= {"best": best, "config": config, "global_batch": size[0] * size[1] * self.processes}
        measured = self._train(words, self.args.deepspeed or sys.executable, environment, real=True)
        return {**figures, "tokens_per_s": measured["tokens_per_s"], "engine": measured["engine"]}

    # -- how --------------------------------------------------------------------------------------------------------

    def _words(self) -> list[str]:
        """The training command."""
        args, folder = self.args, self.folder
        shape = json.dumps(SHAPES[args.model])
        common = ["--output_dir", str(folder / "out"), "--max_steps", "14", "--report_to", "none", "--save_strategy",
                  "no", "--disable_tqdm", "True", "--logging_strategy", "no", "--shape", shape,
                  "--lora", str(args.lora)]  # fmt: skip
        batch = [BATCH[0], str(args.micro), BATCH[1], str(args.accumulation)]
        precision = ["--use_cpu", "True"] if args.cpu else ["--bf16", "True"]  # transformers finds DeepSpeed's ranks so
        return [str(folder / "train.py"), *common, *batch, *precision, "--deepspeed", str(folder / "ds_config.json")]

    def _train(self, words: list[str], python: str, environment: dict[str, str], *, real: bool) -> dict[str, Any]:
        """Run a training; what it prints is shown, and read.

        Args:
            real: whether the engine must be DeepSpeed's own.
        """
        run = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.processes}", *words]
        start = time.monotonic()
        found = subprocess.run(run, capture_output=True, text=True, env=environment, timeout=580, check=False)
        said = re.findall(r"^\[ *[\d.]+ s\] .*$", found.stdout, re.M)
        print("\n".join(said), flush=True)
        match, engine = (re.search(rf"{key}: (.+)", found.stdout) for key in ("tokens/s", "engine"))
        if match is None or engine is None:
            raise SystemExit(f"{' '.join(run)} failed:\n{found.stdout[-2000:]}\n{found.stderr[-4000:]}")
        if ("+ds.hf" in engine[1]) == real:
            raise SystemExit(f"this part was to have {'DeepSpeed' if real else 'ds_hf'}, and had {engine[1]}")
        return {"tokens_per_s": float(match[1]), "engine": engine[1], "seconds": time.monotonic() - start}

    def _real_environment(self) -> dict[str, str]:
        """Of a process in which the name deepspeed is DeepSpeed's own."""
        environment = {key: value for key, value in self.environment.items() if key != "PYTHONPATH"}
        path = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
        path = [part for part in path if not Path(part).resolve().is_relative_to(ROOT)]
        real = self.args.deepspeed_path
        if real is not None:
            path = [str(real), *path]
            if not any(real.glob("deepspeed-*.dist-info")):  # accelerate asks for it
                path.append(str(self._metadata(real)))
        return {**environment, **({"PYTHONPATH": os.pathsep.join(path)} if path else {})}

    def _metadata(self, real: Path) -> Path:
        version = re.search(
            r"version\s*=\s*'([^']+)'", (real / "deepspeed" / "git_version_info_installed.py").read_text()
        )
        number = version[1] if version else "0"
        folder = self.folder / "metadata" / f"deepspeed-{number}.dist-info"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {number}\n")
        return folder.parent

    def _stand_in(self, folder: Path, environment: dict[str, str]) -> None:
        """The command ``deepspeed``, and what its autotuner wants and may not have."""
        folder.mkdir(parents=True)
        python = shutil.which(self.args.deepspeed or sys.executable)
        scripts = {"deepspeed": f"#!{python}\nfrom deepspeed.launcher.runner import main\nmain()\n"}
        if shutil.which("pdsh") is None:
            scripts["pdsh"] = "#!/bin/sh\nexit 0\n"
        for name, text in scripts.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        asked = [str(python), "-c", "import tabulate"]
        if subprocess.run(asked, env=environment, capture_output=True, check=False).returncode:
            text = "def tabulate(rows, **_):\n    return '\\n'.join(' '.join(map(str, row)) for row in rows)\n"
            (folder / "tabulate.py").write_text(text)
            environment["PYTHONPATH"] = os.pathsep.join([environment.get("PYTHONPATH", ""), str(folder)]).strip(
                os.pathsep
            )
        environment["PATH"] = os.pathsep.join([str(folder), str(Path(str(python)).parent), environment["PATH"]])
        if self.args.cpu:
            environment["LOCAL_SIZE"] = str(self.processes)  # how many "devices" its CPU accelerator counts

    def _search(self, name: str, **changes: Any) -> dict[str, Any]:
        """One search; goes on with one that was cut off."""
        from rich.console import Console

        from ds_hf.autotune.options import Options, nbytes_of
        from ds_hf.autotune.run import tune

        args = self.args
        limit = nbytes_of(args.memory_limit) if args.memory_limit else None
        low, _, high = args.micros.partition(":")
        fix = () if args.tune == "all" else tuple(args.fix.split(","))
        options = Options(results_dir=self.folder / name, tune=tuple(args.tune.split(",")), fix=fix, memory_limit=limit,
                          processes=self.processes, low_micro=int(low), high_micro=int(high or low))  # fmt: skip
        start = time.monotonic()
        result = tune(self._words(), dataclasses.replace(options, **changes), Console())
        seconds = time.monotonic() - start + self.figures.get(name, {}).get("seconds", 0)
        point = result.best[1]
        trials = _trials(self.folder / name)
        return {
            "seconds": seconds,
            "in_launches": sum(each["seconds"] for each in trials["launched"]),
            "confirming": 0.0 if result.confirmed is None else result.confirmed.seconds,
            "stopped": result.why_stopped,
            "in_engine": SHAPES[args.model]["max_position_embeddings"]
            * self.processes
            * point.micro
            * point.accumulation
            / point.seconds,
            "setting": result.best[0].setting,
            "label": result.best[0].label.removesuffix(" (your file)"),
            "micro": point.micro,
            "kept": result.kept,
            "launches": len(trials["launched"]),
            "points": sum(len(each["points"]) for each in trials["launched"]),
            "ruled_out": trials["ruled out"],
            "trials": trials["launched"],
            "words": result.words[3:] if result.words[0] == "torchrun" else result.words,
        }


def _trials(folder: Path) -> dict[str, Any]:
    """What the journal of a search has."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    from ds_hf.autotune.journal import JOURNAL, STUDY
    from ds_hf.autotune.records import record_of

    storage = JournalStorage(JournalFileBackend(str(folder / JOURNAL)))
    trials = optuna.load_study(study_name=STUDY, storage=storage).get_trials(deepcopy=False)
    records = [record for record in map(record_of, trials) if record is not None]
    launched = [record for record in records if record.kind != "ruled out"]
    return {
        "ruled out": len(records) - len(launched),
        "launched": [
            {
                "setting": record.label, "kind": record.kind, "seconds": round(record.seconds, 1),
                "points": [[p.micro, p.accumulation, p.seconds, p.low, p.high, p.peak] for p in record.points],
                "split": record.events.get("split", {}), "predicted": record.predicted,
            }
            for record in launched
        ],
    }  # fmt: skip


def _measured(folder: Path) -> dict[str, float]:
    """Samples a second of the experiments of DeepSpeed's autotuner that have ended."""
    found = {}
    for path in folder.glob("autotuning_results/*/metrics.json"):
        with contextlib.suppress(ValueError, KeyError):  # half written
            found[path.parent.name] = float(json.loads(path.read_text())["throughput"])
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of it and of all that it started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        whole = psutil.Process(process.pid)
        family = [whole, *whole.children(recursive=True)]
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(family, timeout=10)
    process.wait()


def show(figures: dict[str, Any]) -> None:
    """A table of tokens/s, and ratios."""
    print(
        f"\n{figures['model']} on {figures['processes']} x {figures['device']}, global batch {figures['global_batch']}"
    )
    tuned = figures.get("tuned", {}).get("tokens_per_s")
    for name in ("own", "deepspeed", "deepspeed-autotuner", "tuned"):
        speed = figures.get(name, {}).get("tokens_per_s")
        if speed:
            ratio = f"   tuned is {tuned / speed:.2f} x" if tuned else ""
            print(f"  {name:<20} {speed:>12,.0f} tokens/s{ratio}")
    for name in ("search", "exhaustive", "deepspeed-autotuner"):
        if name in figures:
            each = figures[name]
            speed = f", best {each['in_engine']:,.0f} tokens/s in the engine" if "in_engine" in each else ""
            cut = "" if each.get("finished", True) else ", cut off"
            print(f"  {name + ':':<20} {each['seconds']:.0f} s, {each['launches']} launches{speed}{cut}")
    if "search" in figures and "exhaustive" in figures:
        search, whole = figures["search"], figures["exhaustive"]
        same = _speed_there(search, whole) / max(_speed_there(whole, whole), 1e-12)
        alone, both = search["in_launches"], search["in_launches"] + search["confirming"]
        print(
            f"  of exhaustive search: speed {search['in_engine'] / whole['in_engine']:.1%} as each measured it, "
            f"{same:.1%} by the figures of the exhaustive one; seconds in launches "
            f"{alone / whole['in_launches']:.1%}, with the one that confirms {both / whole['in_launches']:.1%}; "
            f"it ended as {whole['stopped']}"
        )
    if "search" in figures and "deepspeed-autotuner" in figures:
        share = figures["search"]["seconds"] / figures["deepspeed-autotuner"]["seconds"]
        print(f"  of DeepSpeed's autotuner: time {share:.1%}")


def _speed_there(found: dict[str, Any], whole: dict[str, Any]) -> float:
    """Samples a second that ``whole`` measured for what ``found`` is the result of; 0 where it did not."""
    for trial in whole["trials"]:
        for micro, accumulation, seconds, *_ in trial["points"]:
            if trial["setting"] == found["label"] and micro == found["micro"]:
                return float(micro * accumulation / seconds)
    return 0.0


def main() -> None:
    args = parse()
    with contextlib.ExitStack() as stack:
        folder = (args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        benchmark = Benchmark(args, folder)
        try:
            benchmark.run()
        finally:
            benchmark.write()
            show(benchmark.figures)


if __name__ == "__main__":
    main()
