"""The command ``ds-hf`` with everything under it."""

from __future__ import annotations

from typing import Annotated

import typer

from ds_hf.autotune.cli import AS_GIVEN, EXAMPLES, autotune_command
from ds_hf.autotune.lr.cli import REST, lr_find_command
from ds_hf.cli.checkpoint import checkpoint_app
from ds_hf.cli.config import config_app
from ds_hf.cli.doctor import doctor_command
from ds_hf.cli.generate import generate_command
from ds_hf.cli.launch import add_run_command
from ds_hf.cli.memory import SETTINGS, memory_command
from ds_hf.cli.options import Commands, one_name, version_option
from ds_hf.profile.cli import AS_GIVEN as BEFORE_SCRIPT
from ds_hf.profile.cli import profile_command

__all__ = ["app"]

app = typer.Typer(
    cls=Commands,
    help="Train HuggingFace models with ZeRO, from a DeepSpeed JSON file.",
    no_args_is_help=True,
    context_settings={"token_normalize_func": one_name},  # of all commands, unless they have their own
    epilog="""\b
Examples:
  ds-hf config new --preset zero2 -o ds_config.json
  ds-hf run --num_gpus 2 train.py --deepspeed ds_config.json
  ds-hf checkpoint inspect output/checkpoint-100
  ds-hf doctor --json
Exit codes: docs/environment.md
""",
)


@app.callback()
def common(version: Annotated[bool, version_option()] = False) -> None:
    """What stands before the command."""


app.add_typer(config_app, name="config")
app.add_typer(checkpoint_app, name="checkpoint")
app.command("memory", context_settings=SETTINGS)(memory_command)
app.command("generate")(generate_command)
add_run_command(app)
app.command("doctor")(doctor_command)
app.command("lr-find", context_settings=REST)(lr_find_command)
app.command("autotune", context_settings=AS_GIVEN, epilog=EXAMPLES)(autotune_command)
app.command("profile", context_settings=BEFORE_SCRIPT)(profile_command)
