"""The commands ``ds-hf checkpoint``: inspect, verify, convert and consolidate.

What they do lies in ``ds_hf.checkpoint``. Exit codes: 0 fine, 1 the checkpoint has
faults, 2 wrong usage. Torch is imported when a command runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from ds_hf.cli.few_bits import asked_for, lines
from ds_hf.cli.options import print_json, wrong_usage
from ds_hf.errors import CheckpointError
from ds_hf.log import complain
from ds_hf.printable import printable, size_text

if TYPE_CHECKING:
    import torch

    from ds_hf.checkpoint.few_bits import FewBits
    from ds_hf.checkpoint.inspect import Content
    from ds_hf.checkpoint.source import Source

__all__ = ["checkpoint_app"]

checkpoint_app = typer.Typer(
    help="Look at, check and convert checkpoints.",
    no_args_is_help=True,
    epilog="""\b
Examples:
  ds-hf checkpoint inspect output/checkpoint-100
  ds-hf checkpoint verify output/checkpoint-100 --json
  ds-hf checkpoint convert output/checkpoint-100 model --to hf
  ds-hf checkpoint convert output/checkpoint-100 small --to hf --bits 4 --time
""",
)

_QUIET_S = 2.0  # no progress bar for what takes less
Report = Callable[[int, int], None]


class Format(str, Enum):
    """What ``convert`` reads and writes."""

    ds_hf = "ds_hf"
    deepspeed = "deepspeed"
    universal = "universal"
    dcp = "dcp"
    hf = "hf"
    fp32 = "fp32"


def _path(text: str) -> Path:
    if not text:  # pathlib takes it for the current folder
        raise typer.BadParameter("it is empty; '.' is the current folder")
    return Path(text)


Folder = Annotated[
    Path,
    typer.Argument(
        help="Folder of a checkpoint, or one that holds 'latest'.", show_default=False, parser=_path, metavar="PATH"
    ),
]
Tag = Annotated[
    str | None, typer.Option("--tag", "-t", help="Which checkpoint; by default the one that 'latest' names.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="Dtype of the weights: fp32, bf16, fp16; by default that of the model.")
]
ShardSize = Annotated[str, typer.Option("--max-shard-size", help="Size limit of one file (hf).")]
Model = Annotated[
    Path | None,
    typer.Option(
        "--model",
        help="Of hf: folder with config.json, tokenizer, code; default beside the checkpoint.",
    ),
]


Force = Annotated[bool, typer.Option("--force", "-f", help="Replace what is there.")]


@checkpoint_app.command("inspect")
def inspect_command(path: Folder, tag: Tag = None, as_json: AsJson = False) -> None:
    """Show what a checkpoint holds, in any of the formats."""
    from ds_hf.checkpoint.formats import open_source
    from ds_hf.checkpoint.inspect import inspect

    _require(path)
    with _faults(as_json):
        content = inspect(open_source(path, tag))
        if as_json:
            print_json({"ok": True, **content.as_json()})
        else:
            _print_content(content)


@checkpoint_app.command("verify")
def verify_command(path: Folder, tag: Tag = None, as_json: AsJson = False) -> None:
    """Read a whole checkpoint and report what is damaged or missing."""
    from ds_hf.checkpoint.inspect import verdict_of

    _require(path)
    with _progress("verifying") as report:
        verdict = verdict_of(path, tag, report)
    if as_json:
        checksums = not verdict.unsummed
        print_json({"ok": not verdict.faults, "faults": verdict.faults, "checksums": checksums})
    else:
        for fault in verdict.faults:
            _say(fault)
        _say(f"{path}: {verdict.text}")
    if verdict.faults:
        raise typer.Exit(1)


@checkpoint_app.command("convert")
def convert_command(
    path: Folder,
    output: Annotated[
        Path,
        typer.Argument(
            help="Folder (or, for fp32, file) to write.", show_default=False, parser=_path, metavar="OUTPUT"
        ),
    ],
    to: Annotated[Format, typer.Option("--to", help="What to write.")] = Format.ds_hf,
    source: Annotated[Format | None, typer.Option("--from", help="Its format; detected by default.")] = None,
    tag: Tag = None,
    out_tag: Annotated[
        str | None, typer.Option("--out-tag", help="Tag to write (ds_hf, deepspeed, universal); global_stepN.")
    ] = None,
    dtype: Dtype = None,
    max_shard_size: ShardSize = "5GB",
    model: Model = None,
    stage: Annotated[int, typer.Option("--stage", min=1, max=3, help="ZeRO stage (deepspeed).")] = 2,
    world_size: Annotated[
        int, typer.Option("--world-size", "-w", min=1, max=2**16, help="Number of processes (deepspeed).")
    ] = 1,
    sub_group_size: Annotated[int, typer.Option("--sub-group-size", min=1, help="For deepspeed at stage 3.")] = 10**9,
    autoep: Annotated[bool, typer.Option("--autoep", help="Experts in AutoEP's names (universal).")] = False,
    bits: Annotated[int | None, typer.Option("--bits", help="Linear layers in 8 or 4 bits (hf).")] = None,
    group_size: Annotated[
        int | None, typer.Option("--group-size", min=0, help="Columns with one scale (--bits); 0: a scale a row.")
    ] = None,
    sparse: Annotated[
        str | None, typer.Option("--sparse", help="2:4: two of every four values of linear layers are left (hf).")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option("--exclude", help="Regular expression of layers that stay as they are.")
    ] = None,
    timed: Annotated[bool, typer.Option("--time", help="Time a token before and after, on this machine.")] = False,
    text: Annotated[
        Path | None, typer.Option("--text", help="File whose loss to compare before and after.", parser=_path)
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint in another format.

    ds_hf: our own, which any number of processes loads. deepspeed: DeepSpeed's files, for a stage and world size.
    universal: DeepSpeed's universal checkpoint, which it loads at any. dcp: torch.distributed.checkpoint. hf: weights
    for from_pretrained; with --bits in compressed-tensors' format, which vLLM reads too. fp32: weights in fp32, one
    file or a folder.
    """
    _require(path)
    few = asked_for(to.value, output, bits, group_size, sparse, exclude, timed, text)
    if source is Format.fp32:
        wrong_usage("--from fp32: a file of weights is read as --from hf, if it is safetensors")
    if to is Format.fp32 and dtype is not None:
        wrong_usage("--to fp32 writes fp32; use --to hf or consolidate with --dtype")
    kind = _dtype(dtype)
    if to in (Format.ds_hf, Format.deepspeed, Format.universal) and kind is not None:
        wrong_usage(f"--dtype: {to.value} keeps states as they are")
    if to not in (Format.ds_hf, Format.deepspeed) and out_tag is not None:
        wrong_usage(f"--out-tag: {to.value} has no tags; it is written to {output} itself")
    if to is not Format.universal and autoep:
        wrong_usage(f"--autoep goes with --to universal, not with {to.value}")
    if to not in (Format.hf, Format.fp32) and model is not None:
        wrong_usage(f"--model goes with weights (--to hf or fp32), not with {to.value}")
    from ds_hf.checkpoint.formats import open_source
    from ds_hf.checkpoint.source import CheckpointKind

    with _faults(as_json):
        opened = open_source(path, tag, None if source is None else CheckpointKind(source.value))
        if autoep:
            from ds_hf.checkpoint.deepspeed.autoep import as_autoep

            opened = as_autoep(opened)
        if few is not None:
            few.plan(opened, model)
        with _progress(printable(f"writing {output}")) as report:
            where, copied = _convert(
                opened, output, to, out_tag, kind, max_shard_size, model, (stage, world_size, sub_group_size), report,
                None if few is None else few.form, force,
            )  # fmt: skip
        found = None if few is None else few.compare(opened, where, kind)
    _tell(where, as_json, copied, found)


def _convert(
    source: Source,
    output: Path,
    to: Format,
    tag: str | None,
    dtype: torch.dtype | None,
    max_shard_size: str,
    model: Path | None,
    target: tuple[int, int, int],
    report: Report,
    form: FewBits | None,
    force: bool,
) -> tuple[Path, list[str] | None]:
    """Write; where, and what was copied beside weights (``None`` where there is nothing to copy)."""
    if to is Format.ds_hf:
        from ds_hf.checkpoint.convert import target_of, write_own

        _require_free(target_of(source, output, tag)[1], to, force)
        return write_own(source, output, tag, report, over=force), None
    if to is Format.deepspeed:
        from ds_hf.checkpoint.convert import target_of
        from ds_hf.checkpoint.deepspeed.write import Target, write_deepspeed

        _require_free(target_of(source, output, tag)[1], to, force)
        return write_deepspeed(source, output, Target(*target), tag, report, over=force), None
    if to is Format.universal:
        from ds_hf.checkpoint.convert import target_of
        from ds_hf.checkpoint.deepspeed.write_universal import default_universal_tag, write_universal

        folder = target_of(source, output, default_universal_tag(source) if tag is None else tag)[1]
        _require_free(folder, to, force)
        return write_universal(source, folder, strict=False, report=report), None
    if to is Format.dcp:
        from ds_hf.checkpoint.dcp import write_dcp

        _require_free(output, to, force)
        write_dcp(source, output, dtype=dtype, report=report, over=force)
        return output, None
    import torch

    assert to in (Format.hf, Format.fp32), to
    kind = torch.float32 if to is Format.fp32 else dtype
    return _weights(source, output, kind, max_shard_size, model, report, force, form)


@checkpoint_app.command("consolidate")
def consolidate_command(
    path: Folder,
    output: Annotated[
        Path,
        typer.Argument(
            help="Folder, or one .safetensors, .bin or .pt file.", show_default=False, parser=_path, metavar="OUTPUT"
        ),
    ],
    tag: Tag = None,
    dtype: Dtype = "fp32",
    max_shard_size: ShardSize = "5GB",
    model: Model = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Merge the weights of a checkpoint, by default in fp32 from the master weights."""
    _require(path)
    kind = _dtype(dtype)
    from ds_hf.checkpoint.formats import open_source

    with _faults(as_json):
        opened = open_source(path, tag)
        with _progress(printable(f"writing {output}")) as report:
            where, copied = _weights(opened, output, kind, max_shard_size, model, report, force)
    _tell(where, as_json, copied)


def _weights(
    source: Source,
    output: Path,
    dtype: torch.dtype | None,
    max_shard_size: str,
    model: Path | None,
    report: Report,
    force: bool,
    form: FewBits | None = None,
) -> tuple[Path, list[str] | None]:
    """Weights into a folder, or into one file if ``output`` has the name of one; see ``_convert``."""
    from ds_hf.checkpoint.aside import weights_in
    from ds_hf.checkpoint.pretrained import export_source, no_model, write_single

    single = output.suffix in (".safetensors", ".bin", ".pt", ".pth")
    there = (output if output.is_file() else None) if single else weights_in(output)
    if there is not None and not force:
        wrong_usage(f"{there} exists; --force replaces it")
    if single:
        if model is not None:
            wrong_usage("--model goes with a folder, not with one file")
        write_single(source, output, dtype=dtype, report=report)
        return output, None
    try:
        copied = export_source(
            source, output, dtype=dtype, max_shard_size=max_shard_size, model_folder=model, report=report, form=form
        )  # fmt: skip
    except CheckpointError:
        raise
    except ValueError as error:  # of the size
        wrong_usage(f"--max-shard-size: {error}")
    return output, None if no_model(source) else copied


# -- arguments ------------------------------------------------------------------------------------------------------


def _require(path: Path) -> None:
    if not path.exists():
        wrong_usage(f"{path} does not exist")


def _require_free(target: Path, to: Format, force: bool) -> None:
    from ds_hf.checkpoint.formats import lies_at

    if lies_at(target, to.value) and not force:
        wrong_usage(f"{target} exists; --force replaces it")


def _dtype(text: str | None) -> torch.dtype | None:
    if text is None or text == "auto":
        return None
    from ds_hf.dtypes import torch_dtype

    found: torch.dtype | None = torch_dtype(text)
    if found is None or not found.is_floating_point:
        wrong_usage(f"--dtype {text}: use fp32, bf16, fp16 or auto")
    return found


# -- output ---------------------------------------------------------------------------------------------------------


@contextmanager
def _faults(as_json: bool) -> Iterator[None]:
    """Tell what is wrong with the checkpoint, and end with 1."""
    try:
        yield
    except (CheckpointError, OSError) as error:
        if as_json:
            print_json({"ok": False, "faults": [str(error)]})
        else:
            complain(error)
        raise typer.Exit(1) from None


@contextmanager
def _progress(doing: str) -> Iterator[Report]:
    """A bar on the terminal's standard error once it has taken two seconds; nothing elsewhere."""
    console = Console(stderr=True)
    begun = time.monotonic()
    bar = Progress(
        TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip
    task = bar.add_task(doing)
    shown = False

    def report(done: int, total: int) -> None:
        nonlocal shown
        if not shown and console.is_terminal and time.monotonic() - begun > _QUIET_S:
            bar.start()
            shown = True
        bar.update(task, completed=done, total=total)

    try:
        yield report
    finally:
        if shown:
            bar.stop()


def _tell(where: Path, as_json: bool, copied: list[str] | None = None, found: dict[str, Any] | None = None) -> None:
    if as_json:
        beside = {} if copied is None else {"copied": copied}
        print_json({"ok": True, "written": str(where), **beside, **(found or {})})
    else:
        _say(f"wrote {where}")
        if copied:
            _say(f"with {', '.join(copied)}")
        if found is not None:
            for line in lines(found, size_text):
                _say(line)
    if copied is not None and not (where / "config.json").is_file():
        print(
            printable(
                f"{where} has no config.json, which from_pretrained needs: none lies beside the checkpoint. Convert "
                "with --model FOLDER, the folder of the model that was trained"
            ),
            file=sys.stderr,
        )


def _say(text: str) -> None:
    Console(highlight=False, markup=False).print(printable(text), soft_wrap=True)


def _print_content(content: Content) -> None:
    """Facts, then files."""
    stage = "" if content.stage is None else f", ZeRO stage {content.stage}"
    writer = " ".join(f"{name} {version}" for name, version in content.written_by.items())
    facts = [
        ("checkpoint", content.folder),
        ("kind", content.kind + (f" ({writer.strip()})" if writer.strip() else "")),
        ("step", f"{content.step:_} ({content.samples:_} samples, {content.skipped:_} steps skipped)"),
        ("saved by", f"{content.world_size} process{'es' if content.world_size > 1 else ''}{stage}"),
        ("optimizer", content.optimizer or "-"),
        (
            "parameters",
            f"{content.elements:_} elements in {content.parameters}, {content.trainable:_} trained; "
            + ", ".join(f"{count:_} {dtype}" for dtype, count in content.dtypes.items()),
        ),
        ("states", ", ".join(f"{state} {size_text(nbytes)}" for state, nbytes in content.states.items())),
        ("buffers", str(content.buffers)),
        ("tied", ", ".join(f"{alias} = {name}" for alias, name in content.tied.items()) or "-"),
        ("left out", f"{len(content.excluded)} frozen parameters" if content.excluded else "-"),
        ("besides", ", ".join(content.has) or "-"),
        ("size", f"{size_text(content.nbytes)} in {len(content.files)} files"),
    ]
    _print_rows([(name, text) for name, text in facts])
    _say("")
    _print_rows([(file.name, size_text(file.nbytes), file.holds) for file in content.files])


def _print_rows(rows: list[tuple[str, ...]]) -> None:
    """Columns: a table that wraps on a terminal, aligned lines elsewhere."""
    console = Console(highlight=False, markup=False)
    rows = [tuple(printable(cell).replace("\n", "\\n") for cell in row) for row in rows]
    if not console.is_terminal:
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
        for row in rows:
            cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)]
            print("  ".join([*cells, row[-1]]).rstrip())
        return
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    for row in rows:
        grid.add_row(*row)
    console.print(grid)
