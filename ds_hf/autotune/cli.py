"""``ds-hf autotune``: options on the command line, what it shows, and its exit codes.

0: a configuration was written (also when the user's own was kept). 1: the search failed; the script's own error is
shown. 2: wrong usage. 130: interrupted before anything was measured.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ds_hf.errors import ConfigError, DsHfError
from ds_hf.log import complain
from ds_hf.processes import end_program

__all__ = ["AS_GIVEN", "EXAMPLES", "autotune_command", "run_command"]

AS_GIVEN = {"allow_interspersed_args": False}  # what stands behind the script is the script's
EXAMPLES = """\b
Examples:
  ds-hf autotune --budget 10m train.py --model gpt2 --deepspeed ds_config.json
  ds-hf autotune --tune zero_optimization.stage --fix ds_hf.compile train.py --deepspeed ds_config.json
  ds-hf autotune -n 2 --device-memory 2GiB --run train.py --deepspeed zero3
Exit codes: 0 a file was written, 1 the search failed, 2 wrong usage, 130 interrupted before anything was measured
"""

SEARCH, SPACE, TRIALS = "Search", "What may change", "Launches"
Words = Annotated[
    list[str],
    typer.Argument(
        metavar="train.py [its arguments] --deepspeed ds_config.json",
        help="The training script as you start it.",
        show_default=False,
    ),
]
ResultsDir = Annotated[
    Path,
    typer.Option(
        "--output", "-o", help="Folder for all results; naming it again resumes the search.", rich_help_panel=SEARCH
    ),
]
Budget = Annotated[str, typer.Option(help="Time budget of the whole search: 90s, 10m, 1.5h.", rich_help_panel=SEARCH)]
Trials = Annotated[int, typer.Option(min=1, help="Maximum number of launches.", rich_help_panel=SEARCH)]
Goal = Annotated[
    str,
    typer.Option(
        "--goal",
        "--metric",
        help="throughput or tokens (both: the fastest), cost (the same, with --price), latency, flops, memory, "
        "largest-batch (samples that all devices hold at once; the global batch may grow), or longest-sequence.",
        rich_help_panel=SEARCH,
    ),
]
LengthOption = Annotated[
    str | None,
    typer.Option(
        metavar="OPTION",
        help="Of the script: what sets the length of its sequences, as --length-option=--max_length.",
        show_default=False,
        rich_help_panel=SEARCH,
    ),
]
Price = Annotated[
    float | None,
    typer.Option(
        help="Of an hour of one device, in any currency: what a million tokens or samples cost is told.",
        show_default=False,
        rich_help_panel=SEARCH,
    ),
]
Tune = Annotated[
    list[str],
    typer.Option(
        help="A key of your file that may change all the same, e.g. zero_optimization.stage; all frees each. "
        "May be repeated.",
        show_default=False,
        rich_help_panel=SPACE,
    ),
]
Fix = Annotated[
    list[str],
    typer.Option(help="A key that must not change. May be repeated.", show_default=False, rich_help_panel=SPACE),
]
Batch = Annotated[
    str | None,
    typer.Option(
        help="Interval for the global batch, e.g. 64:256. Without it your global batch is kept.", rich_help_panel=SPACE
    ),
]
Micro = Annotated[str, typer.Option(help="Interval for the micro-batch.", rich_help_panel=SPACE)]
MemoryLimit = Annotated[
    str | None,
    typer.Option(
        "--device-memory",
        help="Memory of each device, e.g. 2GiB, to use less than there is. On a CPU the bytes of tensors count.",
        rich_help_panel=SPACE,
    ),
]
Processes = Annotated[
    int | None,
    typer.Option("--num-gpus", "-n", min=1, help="Processes; one a GPU if not given.", rich_help_panel=TRIALS),
]
Launcher = Annotated[
    str | None,
    typer.Option(
        help='Start the script with these words instead of torchrun, e.g. "srun -N 2 torchrun ...".',
        rich_help_panel=TRIALS,
    ),
]
TrialTimeout = Annotated[str, typer.Option(help="Longest launch.", rich_help_panel=TRIALS)]
StallTimeout = Annotated[
    str, typer.Option(help="A launch that is silent for longer counts as hung.", rich_help_panel=TRIALS)
]
Patience = Annotated[
    int, typer.Option(min=1, help="Stop after this many launches without a gain.", rich_help_panel=SEARCH)
]
Seed = Annotated[int, typer.Option(help="Seed of Optuna's sampler.", rich_help_panel=SEARCH)]
Overwrite = Annotated[
    bool,
    typer.Option("--force/--no-force", "-f", help="Discard an earlier search in the folder.", rich_help_panel=SEARCH),
]
Confirm = Annotated[
    bool, typer.Option(help="Run your script once with the result, to confirm its speed.", rich_help_panel=SEARCH)
]
LearningRate = Annotated[
    bool,
    typer.Option("--lr", "--with-lr", help="Then search for a learning rate with the result.", rich_help_panel=SEARCH),
]
Forget = Annotated[
    bool,
    typer.Option(
        "--forget",
        help="Begin without what earlier searches of this model on this machine measured.",
        rich_help_panel=SEARCH,
    ),
]
Train = Annotated[bool, typer.Option("--run", help="Train with the result afterwards.", rich_help_panel=SEARCH)]


def autotune_command(
    words: Words,
    results_dir: ResultsDir = Path("autotuning_results"),
    budget: Budget = "30m",
    trials: Trials = 50,
    goal: Goal = "throughput",
    price: Price = None,
    length_option: LengthOption = None,
    patience: Patience = 5,
    tune: Tune = [],  # noqa: B006  # typer copies it
    fix: Fix = [],  # noqa: B006
    batch: Batch = None,
    micro: Micro = "1:1024",
    memory_limit: MemoryLimit = None,
    processes: Processes = None,
    launcher: Launcher = None,
    trial_timeout: TrialTimeout = "15m",
    stall_timeout: StallTimeout = "5m",
    seed: Seed = 0,
    overwrite: Overwrite = False,
    confirm: Confirm = True,
    train: Train = False,
    lr: LearningRate = False,
    forget: Forget = False,
) -> None:
    """Find the fastest configuration for a training script: ds-hf autotune --budget 10m train.py --deepspeed ds.json

    Your script is started unchanged, several times, for a few steps each. The global batch stays what it is. Keys that
    your file leaves out or has as "auto" may change; those that it sets stay, unless --tune names them; a preset's may
    change.
    """
    from ds_hf.autotune.options import Options

    def options() -> Options:
        low, high = _interval(batch) if batch else (None, None)
        low_micro, high_micro = _interval(micro)
        return Options().changed(
            results_dir=results_dir,
            budget=budget,
            trials=trials,
            metric=goal,
            price=price,
            length_option=length_option,
            patience=patience,
            tune=tune,
            fix=fix,
            low_batch=low,
            high_batch=high,
            low_micro=low_micro,
            high_micro=high_micro,
            memory_limit=memory_limit,
            processes=processes,
            launcher=launcher or "",
            trial_timeout=trial_timeout,
            stall_timeout=stall_timeout,
            seed=seed,
            overwrite=overwrite,
            confirm=confirm,
            lr=lr,
            forget=forget,
        )

    code = _guarded(lambda: _tune_and_train(words, options(), train))
    if code:
        raise typer.Exit(code)


def run_command(mode: str, command: list[str]) -> int:
    """What ``deepspeed --autotuning MODE`` does; the options come from the file's ``autotuning`` section."""
    from ds_hf.autotune.options import Options

    if mode not in ("tune", "run"):
        complain(f'--autotuning takes "tune" or "run", not {mode!r}')
        return 2
    return _guarded(lambda: _tune_and_train(command, Options(), mode == "run"))


def _tune_and_train(words: list[str], options: object, train: bool) -> int:
    from ds_hf.autotune.options import Options
    from ds_hf.autotune.run import tune

    assert isinstance(options, Options)
    result = tune(words, options, Console())
    if not train:
        return 0
    print(f"\n$ {shlex.join(result.words)}", flush=True)
    whole = (
        [sys.executable, "-m", "torch.distributed.run", *result.words[1:]]
        if result.words[0] == "torchrun"
        else result.words
    )
    process = subprocess.Popen(whole)
    try:
        return process.wait()
    finally:
        end_program(process)


def _guarded(work: object) -> int:
    """Run ``work``; errors become a message and an exit code."""
    from ds_hf.autotune.study import TuneError

    assert callable(work)
    try:
        return int(work())
    except KeyboardInterrupt:
        complain("interrupted before your own file was measured: nothing was written")
        return 130
    except ConfigError as error:
        first, *others = error.faults
        plain = not (others or first.pointer or first.fix)  # not about the file
        complain(first.message if plain else error)
        return 2
    except TuneError as error:
        if error.tail.strip():
            print(
                "the end of the script's output:\n" + "\n".join(f"  | {line}" for line in error.tail.splitlines()),
                file=sys.stderr,
            )
        else:
            print("the script printed nothing", file=sys.stderr)
        complain(error)
        return 1
    except (DsHfError, OSError) as error:  # of a results folder in which something else lies
        complain(error)
        return 1


def _interval(text: str) -> tuple[int, int]:
    """ "8:64" as two numbers; "8" is both ends.

    Raises:
        ConfigError: it is neither.
    """
    low, _, high = text.partition(":")
    if not low.isdecimal() or not (high or low).isdecimal() or int(low) < 1:
        raise ConfigError(f"{text!r} is not a valid interval: write 8:64")
    return int(low), int(high or low)
