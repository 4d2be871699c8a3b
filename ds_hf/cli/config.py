"""The commands ``ds-hf config``: check, explain, and write configurations.

Exit codes: 0 fine, 1 the configuration has faults, 2 wrong usage.
"""

from __future__ import annotations

import json
import math
import os
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ds_hf.cli.options import print_json, wrong_usage
from ds_hf.config.compression import compression_notes
from ds_hf.config.data_efficiency import data_notes
from ds_hf.config.docs import configuration_pages
from ds_hf.config.elastic_keys import elastic_notes
from ds_hf.config.explain import EffectiveValue, auto_keys, missing_packages, rows, summary, wire_notes
from ds_hf.config.load import examine, grouped
from ds_hf.config.mesh import tensor_notes
from ds_hf.config.presets import PRESETS, preset
from ds_hf.config.schema import schema_address, schema_text
from ds_hf.config.triple import WorldSize
from ds_hf.config.types import Config, OriginKind
from ds_hf.config.wire_seconds import wire_seconds
from ds_hf.errors import SHOWN_FAULTS, ConfigError, Fault
from ds_hf.log import complain
from ds_hf.measure.links import load_links
from ds_hf.printable import printable
from ds_hf.regular_files import check_regular

__all__ = ["config_app"]

config_app = typer.Typer(
    help="Check, explain and write configurations.",
    no_args_is_help=True,
    epilog="""\b
Examples:
  ds-hf config check ds_config.json --world-size 8
  ds-hf config explain ds_config.json --all
  ds-hf config new --preset zero2 -o ds_config.json
""",
)

File = Annotated[
    str, typer.Argument(help="Configuration file, preset name, or - for standard input.", show_default=False)
]
World = Annotated[
    int | None, typer.Option("--world-size", "-w", min=1, help="Number of processes, to check the batch keys.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="File to write to.", show_default=False)]
Force = Annotated[bool, typer.Option("--force", "-f", help="Overwrite the file.")]
PresetUse = Enum("PresetUse", {"trainer": "trainer", "loop": "loop"}, type=str)
PresetName = Enum("PresetName", {name: name for name in PRESETS}, type=str)  # type: ignore[misc]


@config_app.command("check")
def check_command(file: File, world_size: World = None, as_json: AsJson = False) -> None:
    """Check a configuration: lists every fault with its line and the fix."""
    try:
        config = _examine(file, world_size)
    except ConfigError as error:
        _print_faults(error, as_json)
        raise typer.Exit(1) from None
    if as_json:
        print_json(
            {"ok": True, "faults": [], "warnings": [_fault_json(w) for w in config.warnings], "auto": auto_keys(config)}
        )
        return
    console = Console(highlight=False)
    _item(console, "ok", "bold green", Text.assemble((printable(config.source), "bold"), f": {summary(config)}"))
    if autos := auto_keys(config):
        _item(console, "auto", "cyan", Text(f"the Trainer or accelerate fills {len(autos)}: {', '.join(autos)}"))
    if notes := elastic_notes(config):
        _item(console, "elastic", "cyan", Text(notes[0].removeprefix("elasticity: ")))
    for place, text in (*missing_packages(config), *tensor_notes(config)):
        _item(console, "note", "yellow", Text.assemble((place, "bold"), f": {text}"))
    for message, faults in grouped(config.warnings):
        names = ", ".join(_key(fault.place) + (f" (line {fault.line})" if fault.line else "") for fault in faults)
        fix = f" -> {faults[0].fix}" if faults[0].fix and len(faults) == 1 else ""
        _item(console, "note", "yellow", Text.assemble((names, "bold"), f": {message}{fix}"))


@config_app.command("explain")
def explain_command(
    file: File,
    world_size: World = None,
    show_all: Annotated[bool, typer.Option("--all", "-a", help="Also show what is at its default.")] = False,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="A folder or cached name of a model, or a description such as mixtral:layers=2,experts=8: where its "
            "experts are found, and how many a process has. Needs no weights.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print every effective value and where it comes from."""
    try:
        config = _examine(file, world_size)
        experts = [] if model is None else _experts_of(model, config)
    except ConfigError as error:
        _print_faults(error, as_json)
        raise typer.Exit(1) from None
    found = rows(config)
    shown = [row for row in found if show_all or as_json or not row.quiet]
    if as_json:
        plans = [{"key": "expert_parallel", "value": text, "from": "model", "detail": model} for text in experts]
        print_json([*(_row_json(row) for row in shown), *({**plan, "note": ""} for plan in plans)])
        return
    _print_rows(config, shown)
    for text in experts:
        print(printable(text))
    hidden = len(found) - len(shown)
    if hidden:
        print(f"{hidden} more keys are at their defaults; --all shows them.")
    for note in (*elastic_notes(config), *data_notes(config), *compression_notes(config)):
        print(note)
    notes = wire_notes(config)
    for note in notes:
        print(note)
    if notes:
        links, reason = load_links()
        print(printable(wire_seconds(config, links) if links else f"for seconds on your links: {reason}"))


def _experts_of(model: str, config: Config) -> list[str]:
    """What becomes of the model's experts, a line for layers that are alike.

    Raises:
        ConfigError: what ``initialize`` would raise of them.
    """
    from ds_hf.engine.parallel.experts.divide import told
    from ds_hf.engine.parallel.experts.plan import plan_experts
    from ds_hf.memory.models import build
    from ds_hf.memory.prediction import UnpredictableError, Workload

    try:
        net = build(model, Workload())
    except UnpredictableError as error:
        complain(error)
        raise typer.Exit(1) from None
    section = config.expert_parallel
    if section.enabled:
        return told(plan_experts(net, section, section.autoep_size), section.autoep_size)
    try:
        layers = plan_experts(net, type(section)(enabled=True), 1)
    except ConfigError:
        return [f"{model} has no experts that expert_parallel would divide"]
    return [f"expert_parallel is not enabled: {len(layers)} layers of experts have transformers' own forward"]


@config_app.command("new")
def new_command(
    name: Annotated[PresetName | None, typer.Option("--preset", "-p", help="Which preset.", show_default=False)] = None,
    use: Annotated[
        PresetUse,
        typer.Option("--for", help='The Trainer and accelerate fill in "auto"; your own loop needs values.'),
    ] = PresetUse.trainer,
    output: Output = None,
    force: Force = False,
) -> None:
    """Write a preset; without --preset list them."""
    if name is None:
        width = max(map(len, PRESETS))
        for key, (text, _) in PRESETS.items():
            print(f"{key:<{width}}  {text}")
        print("\nds-hf config new --preset zero2 -o ds_config.json               # for the Trainer and accelerate")
        print("ds-hf config new --preset zero2 --for loop -o ds_config.json    # for a loop of your own")
        return
    tree = preset(str(name.value), loop=use is PresetUse.loop)
    if output is not None:  # what an editor reads
        tree = {"$schema": schema_address(), **tree}
    _write(json.dumps(tree, indent=2) + "\n", output, force)


@config_app.command("schema")
def schema_command(output: Output = None, force: Force = False) -> None:
    """Print the JSON Schema, for editors."""
    _write(schema_text(), output, force)


@config_app.command("docs", hidden=True)
def docs_command(output: Output = None) -> None:
    """Print the reference pages, or write docs/configuration.md and those in docs/configuration/."""
    pages = configuration_pages()
    if output is None:
        _write("\n".join(pages.values()), None, force=True)
        return
    if output.suffix != ".md":
        wrong_usage("--output names a page, which ends in .md; the others lie in a folder of its name")
    folder = output.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages.items():
        _write(text, folder / f"{name}.md" if name else output, force=True)
    for old in folder.glob("*.md"):
        if old.stem not in pages:
            old.unlink()


def _examine(file: str, world_size: int | None) -> Config:
    """Check ``file``; with an unknown number of processes the batch keys only have to be possible."""
    source: object = sys.stdin.read() if file == "-" else file
    if file != "-" and file not in PRESETS:
        source = Path(file)
    known = world_size is not None or os.environ.get("WORLD_SIZE", "").strip().isdecimal()
    world = WorldSize.find(world_size) if known else WorldSize(0, "unknown")
    return examine(source, world=world, allow_auto=True)


def _write(text: str, output: Path | None, force: bool) -> None:
    if output is None:
        sys.stdout.write(text)
        return
    exists = os.path.lexists(output)
    try:
        if exists:
            check_regular(output)  # a pipe would be waited for, and what a broken link names is another's file
        if exists and not force:
            wrong_usage(f"{output} exists; --force overwrites it")
        output.write_text(text, "utf-8")
    except OSError as error:
        wrong_usage(f"cannot write {output}: {error.strerror}")
    print(printable(f"wrote {output}"), file=sys.stderr)


def _key(pointer: str) -> str:
    return printable(pointer[1:].replace("/", ".").replace("~1", "/").replace("~0", "~")) or "(file)"


def _item(console: Console, label: str, style: str, text: Text) -> None:
    """A label and a text beside it; wrapped with a hanging indent on a terminal, one line elsewhere."""
    if not console.is_terminal:
        print(f"{label}: {text.plain}")
        return
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=6)
    grid.add_column()
    grid.add_row(Text(label, style), text)
    console.print(grid)


def _print_faults(error: ConfigError, as_json: bool) -> None:
    if as_json:
        print_json({"ok": False, "faults": [_fault_json(fault) for fault in error.faults], "warnings": [], "auto": []})
        return
    console = Console(highlight=False)
    count = len(error.faults)
    head = f": {count} fault{'s' if count != 1 else ''}"
    _item(console, "faulty", "bold red", Text.assemble((printable(error.source), "bold"), head))
    for fault in error.faults[:SHOWN_FAULTS]:
        line = f" (line {fault.line})" if fault.line else ""
        if not console.is_terminal:
            print(f"\n{_key(fault.place)}{line}: {fault.message}\n    fix: {fault.fix}")
            continue
        console.print()
        console.print(Text.assemble((_key(fault.place), "bold"), (line, "dim")))
        _item(console, "", "", Text(fault.message))
        if fault.fix:
            _item(console, "  fix", "green", Text("\n".join(part.strip() for part in fault.fix.splitlines())))
    if count > SHOWN_FAULTS:
        print(f"\n... and {count - SHOWN_FAULTS} more")


def _print_rows(config: Config, shown: list[EffectiveValue]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        cells = [(printable(row.key), _short(_value(row.value)), printable(row.origin), row.note) for row in shown]
        widths = [max(len(cell[column]) for cell in cells) for column in range(3)]
        print(f"{printable(config.source)}: {summary(config)}")
        for key, value, origin, note in cells:
            print(f"{key:<{widths[0]}}  {value:<{widths[1]}}  {origin:<{widths[2]}}  {note}".rstrip())
        return
    console.print(Text.assemble((printable(config.source), "bold"), f": {summary(config)}"))
    table = Table.grid(padding=(0, 2))
    table.add_column(overflow="fold")
    table.add_column(overflow="fold", max_width=26)
    table.add_column()
    section = ""
    for row in sorted(shown, key=lambda row: "." in row.key):
        head, _, rest = row.key.partition(".")
        if rest and head != section:
            table.add_row(Text(f"\n{head}", "bold"), "", "")
        section = head if rest else ""
        table.add_row(*_cells(row, rest))
    console.print(table)


def _cells(row: EffectiveValue, inner: str) -> tuple[Text, Text, Text]:
    """Key, value and origin of one row of the terminal's table; ``inner`` is the key inside its section."""
    style = "dim" if row.origin.kind is OriginKind.DEFAULT else ""
    note = f"; {row.note}" if row.note else ""
    value = Text(_short(_value(row.value), 26), style or "cyan")
    return (
        Text(printable(f"  {inner}" if inner else row.key), style),
        value,
        Text(printable(f"{row.origin}{note}"), "dim" if not row.note else ""),
    )


def _value(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "-"}[value]
    if isinstance(value, int) and abs(value) >= 10_000:
        return "unlimited" if value == 2**63 - 1 else f"{value:_}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict)) else str(value)


def _short(text: str, limit: int = 40) -> str:
    text = printable(text)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _row_json(row: EffectiveValue) -> dict[str, Any]:
    value = str(row.value) if isinstance(row.value, float) and not math.isfinite(row.value) else row.value
    return {"key": row.key, "value": value, "from": row.origin.kind.value, "detail": str(row.origin), "note": row.note}


def _fault_json(fault: Fault) -> dict[str, Any]:
    return {"pointer": fault.pointer, "line": fault.line, "message": fault.message, "fix": fault.fix}
