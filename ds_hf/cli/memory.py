"""The command ``ds-hf memory``: what training takes, at every stage and offload, without a GPU.

Exit codes: 0 fine, 1 it cannot be predicted or the configuration has faults, 2 wrong usage.
Torch is imported when the command runs.
"""

from __future__ import annotations

import difflib
import json
import shlex
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ds_hf.errors import ConfigError
from ds_hf.host import total_memory
from ds_hf.log import complain
from ds_hf.printable import printable
from ds_hf.regular_files import replace_file

if TYPE_CHECKING:
    from ds_hf.memory.cheapest import Way
    from ds_hf.memory.prediction import Prediction
    from ds_hf.memory.subject import Subject
    from ds_hf.memory.table import Machine, Row

__all__ = ["SETTINGS", "memory_command"]

# What the command does not know belongs to the script.
SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": True, "token_normalize_func": str}
_DEFAULT_MEMORY = "80GiB"
_PER_HOST = 8
GIB = 1 << 30

Target = Annotated[
    str,
    typer.Argument(
        help="A training script with its arguments, a folder or cached name of a model, or a description such as "
        "llama:hidden=4096,layers=32,heads=32,intermediate=11008,vocab=32000.",
        show_default=False,
    ),
]
Rest = Annotated[list[str] | None, typer.Argument(help="Arguments of the script.", show_default=False)]
ConfigFile = Annotated[
    str | None, typer.Option("--config", help="DeepSpeed's JSON file, or a preset; for a script, its own by default.")
]
World = Annotated[
    int, typer.Option("--world-size", "-w", "--num-gpus", "-n", min=1, help="Number of processes, one for each GPU.")
]
Micro = Annotated[int | None, typer.Option("--micro-batch", min=1, help="Samples in one micro-batch of a process.")]
Length = Annotated[int | None, typer.Option("--seq-len", min=1, help="Tokens per sample.")]
Recompute = Annotated[
    bool | None,
    typer.Option("--checkpointing/--no-checkpointing", help="Gradient checkpointing; by default as in the model."),
]
Attention = Annotated[str | None, typer.Option("--attention", help="sdpa, eager, flash_attention_2, ...")]
Sequence = Annotated[int | None, typer.Option("--sp", min=1, help="Processes that share each sequence (Ulysses).")]
Experts = Annotated[int | None, typer.Option("--ep", min=1, help="Processes that divide the experts of each layer.")]
Tensor = Annotated[int | None, typer.Option("--tp", min=1, help="Processes that share each layer (AutoTP).")]
Pipe = Annotated[
    int | None, typer.Option("--pp", min=1, help="Stages of a pipeline; the one that takes most is shown.")
]
Offload = Annotated[
    bool,
    typer.Option(
        "--offload-activations",
        help="Keep the inputs of checkpointed blocks in host memory; switches checkpointing on.",
    ),
]
Tiles = Annotated[bool, typer.Option("--tiles", help="MLPs in tiles and the loss in chunks.")]
Budget = Annotated[
    float | None,
    typer.Option("--activation-budget", min=0, max=1, help="Blocks compiled; of what backward needs they keep this."),
]
Longest = Annotated[bool, typer.Option("--longest", help="Say the longest sequence that fits, too.")]
DeviceMemory = Annotated[
    str | None,
    typer.Option("--device-memory", "--gpu-memory", help=f"Memory of a GPU: this machine's, or {_DEFAULT_MEMORY}."),
]
HostMemory = Annotated[
    str | None, typer.Option("--host-memory", help="Memory of one host; by default that of this machine.")
]
Lora = Annotated[
    str | None,
    typer.Option("--lora", help="Train PEFT's adapters: r=16, or r=16,targets=q_proj,v_proj. For models, not scripts."),
]
LoadIn = Annotated[
    str | None,
    typer.Option("--load-in", "--base-bits", help="The base of the adapters in few bits: 4bit or 8bit (QLoRA)."),
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write the DeepSpeed file of the cheapest way that fits.")
]
PerHost = Annotated[int, typer.Option("--gpus-per-host", min=1, help="Number of processes that share a host.")]
Inference = Annotated[
    bool,
    typer.Option(
        "--inference",
        help="What generating takes: --micro-batch prompts, --seq-len tokens with the answer; "
        "--config is that of init_inference.",
    ),
]
Weights = Annotated[bool, typer.Option("--load-weights", help="Let the script load its weights.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON; all figures are bytes.")]


def memory_command(
    context: typer.Context,
    target: Target,
    rest: Rest = None,
    config: ConfigFile = None,
    world_size: World = 1,
    micro_batch: Micro = None,
    seq_len: Length = None,
    checkpointing: Recompute = None,
    attention: Attention = None,
    sp: Sequence = None,
    tp: Tensor = None,
    ep: Experts = None,
    pp: Pipe = None,
    offload_activations: Offload = False,
    tiles: Tiles = False,
    activation_budget: Budget = None,
    longest: Longest = False,
    inference: Inference = False,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    gpus_per_host: PerHost = _PER_HOST,
    load_weights: Weights = False,
    lora: Lora = None,
    load_in: LoadIn = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Predict what training takes of GPU, host and disk, at every ZeRO stage and offload, without a GPU.

    Options of this command may stand anywhere; what it does not know is the script's, and so is all that follows --.
    """
    _refuse_unknown(context, target, rest or [])
    from ds_hf.memory.adapters import LoraRequest
    from ds_hf.memory.cheapest import cheapest_way
    from ds_hf.memory.prediction import UnpredictableError
    from ds_hf.memory.subject import Request, Subject
    from ds_hf.memory.table import Machine, parse_bytes, rows

    if inference:
        _inference(target, config, micro_batch or 1, seq_len, tp, device_memory, attention, as_json)
        return
    try:
        adapters, bits = None if lora is None else LoraRequest.parse(lora), _bits(load_in)
    except UnpredictableError as error:
        complain(error)
        raise typer.Exit(2) from None
    request = Request(
        config,
        micro_batch,
        seq_len,
        checkpointing,
        attention,
        load_weights,
        sequence_parallel=sp,
        offload_activations=offload_activations,
        tensor_parallel=tp,
        expert_parallel=ep,
        tiles=tiles,
        activation_budget=activation_budget,
        pipeline_stages=pp,
        lora=adapters,
        base_bits=bits,
    )
    try:
        host = total_memory() if host_memory is None else parse_bytes(host_memory)
        machine = Machine(parse_bytes(device_memory or _this_device()), host, world_size, gpus_per_host)
        with _working(as_json):
            subject = Subject.of(target, rest or [], request)
            table = list(rows(subject.predictor, subject.config, machine, micro_batch, longest=longest))
            way = cheapest_way(target, rest or [], subject, table, machine, micro_batch)
            subject.notes.extend(_host_notes(target, machine, table, host_memory is None))
    except (UnpredictableError, ConfigError) as error:
        complain(error)
        raise typer.Exit(1) from None
    if as_json:
        print(json.dumps({**_as_json(subject, machine, table), "cheapest": _way_as_json(way)}, indent=2))
    else:
        _print(subject, machine, table)
        if any(row.prediction is not None for row in table):
            _print_way(way, target, rest or [], machine, output)
    if all(row.prediction is None for row in table):
        raise typer.Exit(1)
    if output is not None:
        _write(way, output)


def _host_notes(target: str, machine: Machine, table: list[Row], of_here: bool) -> list[str]:
    """Where host memory, and not the GPU, rules a row out: whose memory it is, and what else the model may load in."""
    over = [row for row in table if _is_over_host(row, machine)]
    if not over:
        return []
    notes = []
    if of_here:
        memory = f"{_gib(machine.host_memory or 0)} GiB of host memory are this machine's"
        notes.append(f"{memory}, and rule out what would fit the GPU; --host-memory 256GiB: another's")
    loads = any(row.prediction and row.prediction.host.get("loading") == row.prediction.host_total for row in over)
    if loads and ":" in target and "dtype=" not in target:
        notes.append("a description is loaded in fp32; add dtype=bfloat16 to it for weights that are stored in bf16")
    return notes


def _is_over_host(row: Row, machine: Machine) -> bool:
    """Whether it is the host alone that has no room for ``row``."""
    return not row.fits and row.prediction is not None and row.prediction.device_total <= machine.device_memory


def _refuse_unknown(context: typer.Context, target: str, rest: list[str]) -> None:
    """Refuse unknown options before anything is loaded, unless they may be a script's."""
    words = [word for word in (target, *rest) if word.startswith("-") and word != "-"]
    if not words or (target.endswith(".py") and not target.startswith("-")):
        return
    known = [name for parameter in context.command.params for name in parameter.opts]
    name = words[0].partition("=")[0]
    near = difflib.get_close_matches(name.replace("_", "-"), known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    script = " Options of a script come after it." if target.startswith("-") else " Only scripts take arguments."
    complain(f"there is no option {name}{hint}{script}")
    raise typer.Exit(2)


def _bits(text: str | None) -> int | None:
    from ds_hf.memory.prediction import UnpredictableError

    if text is None:
        return None
    bits = text.lower().removesuffix("bit").removesuffix("-").removesuffix("s")
    if bits not in ("4", "8"):
        raise UnpredictableError(f"--load-in {text}: write 4bit or 8bit")
    return int(bits)


def _inference(
    target: str,
    config: str | None,
    batch: int,
    length: int | None,
    tp: int | None,
    device_memory: str | None,
    attention: str | None,
    as_json: bool,
) -> None:
    """A row for each dtype, on the GPU and in host memory."""
    from ds_hf.inference.config import load_inference_config
    from ds_hf.memory.inference import predict_inference
    from ds_hf.memory.models import build
    from ds_hf.memory.prediction import UnpredictableError, Workload
    from ds_hf.memory.table import parse_bytes

    try:
        device = parse_bytes(device_memory or _this_device())
        settings = load_inference_config(config, {})
        size = tp or settings.tensor_parallel.tp_size
        tokens = length or settings.max_out_tokens
        dtypes = [settings.dtype] if "dtype" in settings.given else ["fp32", "bf16", "int8", "int4"]
        needs = []
        places = [bool(settings.zero)] if "zero" in settings.given else [False, True] if size == 1 else [False]
        for dtype in dtypes:
            for offload in places:
                model = build(target, Workload(micro_batch=batch, seq_len=tokens, attention=attention))
                half = max(tokens // 2, 1)
                needs.append(
                    predict_inference(
                        model, dtype, batch=batch, prompt=half, new=tokens - half, tp=size, offload=offload
                    )
                )
    except (UnpredictableError, ConfigError) as error:
        complain(error)
        raise typer.Exit(1) from None
    if as_json:
        rows = [{**need.as_json(), "fits": need.device_peak <= device} for need in needs]
        print(json.dumps({"batch": batch, "tokens": tokens, "tensor_parallel_size": size, "rows": rows}, indent=2))
        return
    console = Console(highlight=False)
    head = f"generating: {batch} x {tokens} tokens, half of them the prompt; {size} process{'es' if size > 1 else ''}"
    console.print(f"{head} with {_gib(device)} GiB each", soft_wrap=True)
    grid = Table(box=None, pad_edge=False, header_style="bold")
    grid.add_column("weights")
    grid.add_column("in")
    for name in ("weights", "cache", "prompt", "GPU", "host", "loading", ""):
        grid.add_column(name, justify="right" if name else "left")
    for need in needs:
        fits = need.device_peak <= device
        parts = [_gib(need.device[name]) for name in ("weights", "cache", "prompt")]
        host = _gib(need.host) if need.host else "-"
        where = "host memory" if need.offload else "GPU"
        verdict = "fits" if fits else "too large"
        grid.add_row(
            need.dtype,
            where,
            *parts,
            _gib(need.device_peak),
            host,
            _gib(need.host_peak),
            verdict,
            style="" if fits else "dim",
        )
    console.print(grid)
    notes = "GiB: GPU at its peak, generating or loading; host: weights that rest there; loading: host memory meanwhile"
    console.print(Text(notes, "dim"), soft_wrap=True)


def _tensor(subject: Subject) -> int:
    """Processes that share each layer."""
    section = subject.config.get("tensor_parallel") or {}
    return int(max(section.get("autotp_size", 0), (section.get("tp") or {}).get("tp_size", 1), 1))


def _stages(subject: Subject) -> int:
    """Stages of a pipeline."""
    stages = (subject.config.get("pipeline") or {}).get("stages")
    return stages if isinstance(stages, int) else 1


def _this_device() -> str:
    """Memory of the GPU here."""
    import torch

    if not torch.cuda.is_available():
        return _DEFAULT_MEMORY
    return f"{torch.cuda.get_device_properties(0).total_memory}B"


def _working(as_json: bool) -> AbstractContextManager[Any]:
    """A line on the terminal while nothing else is to be seen."""
    console = Console(stderr=True)
    if as_json or not console.is_terminal:
        return nullcontext()
    return console.status("running the model without its values ...")


def _as_json(subject: Subject, machine: Machine, table: list[Row]) -> dict[str, Any]:
    from ds_hf.memory.adapters import count_parameters

    total, trained = count_parameters(subject.predictor.model)
    workload = subject.predictor.workload
    return {
        "model": type(subject.predictor.model).__name__,
        "parameters": total,
        "trainable": trained,
        "seq_len": workload.seq_len,
        "world_size": machine.world_size,
        "sequence_parallel_size": subject.config.get("sequence_parallel_size", 1),
        "tensor_parallel_size": _tensor(subject),
        "pipeline_stages": _stages(subject),
        "device_memory": machine.device_memory,
        "host_memory": machine.host_memory,
        "notes": subject.notes,
        "rows": [row.as_json() for row in table],
    }


def _way_as_json(way: Way | None) -> dict[str, Any] | None:
    if way is None:
        return None
    return {
        "options": list(way.options),
        "what": way.words,
        "stage": way.row.stage,
        "offload": way.row.offload,
        "config": way.file,
        "largest_micro_batch": way.row.largest,
        "longest_sequence": way.longest or None,
    }


def _print_way(way: Way | None, target: str, rest: list[str], machine: Machine, output: Path | None) -> None:
    """The last line: the cheapest way that fits, and the commands."""
    console = Console(highlight=False)
    console.print()
    if way is None:
        text = "nothing fits: more or larger GPUs (-n, --device-memory), a shorter --seq-len, or a smaller model"
        console.print(Text(f"cheapest: {text}", "bold"), soft_wrap=True)
        return
    assert way.row.prediction is not None
    need = f"{_gib(way.row.prediction.device_total)} of {_gib(machine.device_memory)} GiB"
    most = f"; at most micro-batch {way.row.largest}" + (f", or {way.longest:,} tokens a sample" if way.longest else "")
    console.print(Text(printable(f"cheapest that fits: {way.words}: {need}{most}"), "bold"), soft_wrap=True)
    again = shlex.join(["ds-hf", "memory", *_given(), *way.options])
    if way.options:
        console.print(Text(printable(f"  {again}")), soft_wrap=True)
    file = str(output or "ds_config.json")
    if output is None:
        console.print(Text(printable(f"  {again} -o {file}")), soft_wrap=True)
    script = [target, *rest] if target.endswith(".py") else ["train.py", "--deepspeed", file, *way.arguments]
    words = ["torchrun", "--standalone", f"--nproc-per-node={min(machine.processes_per_host, machine.world_size)}"]
    console.print(Text(printable(f"  {shlex.join([*words, *script])}")), soft_wrap=True)


def _given() -> list[str]:
    """The user's own words."""
    return sys.argv[2:] if sys.argv[1:2] == ["memory"] else ["..."]


def _write(way: Way | None, output: Path) -> None:
    if way is None:
        complain(f"nothing fits, so {output} is not written")
        raise typer.Exit(1)
    replace_file(output, json.dumps(way.file, indent=2) + "\n")
    print(f"wrote {output}", file=sys.stderr)


def _print(subject: Subject, machine: Machine, table: list[Row]) -> None:
    console = Console(highlight=False)
    console.print(_title(subject, machine, table), soft_wrap=True)
    for note in subject.notes:
        console.print(Text(printable(f"note: {note}"), "dim"), soft_wrap=True)
    console.print()
    grid = Table(box=None, pad_edge=False, header_style="bold")
    grid.add_column("stage")
    grid.add_column("offload")
    lengths = any(row.longest is not None for row in table)
    for name in ("GPU", "host", "disk", "micro-batch", *(["longest"] if lengths else [])):
        grid.add_column(name, justify="right")
    grid.add_column("")
    shown = _shown(subject, table)
    for row in table:
        grid.add_row(
            *_cells(row, machine, lengths=lengths), style="bold" if row is shown else "" if row.fits else "dim"
        )
    console.print(grid)
    per_host = min(machine.processes_per_host, machine.world_size)
    where = f"GPU of each process, host and disk of the {per_host} on one host"
    most = "; longest: tokens of a sample that fit, to 256 for each process that shares it" if lengths else ""
    console.print(Text(f"GiB: {where}; micro-batch: the largest that fits{most}", "dim"), soft_wrap=True)
    for reason in dict.fromkeys(row.refused for row in table if row.refused):
        console.print(Text(printable(f"refused: {reason}"), "dim"), soft_wrap=True)
    if shown is not None and shown.prediction is not None:
        console.print()
        _print_parts(console, shown, shown.prediction)


def _title(subject: Subject, machine: Machine, table: list[Row]) -> Text:
    from ds_hf.memory.adapters import count_parameters

    total, trained = count_parameters(subject.predictor.model)
    workload = subject.predictor.workload
    predicted = next((row.prediction for row in table if row.prediction is not None), None)
    batch = predicted.micro_batch if predicted is not None else workload.micro_batch
    trains = "" if trained == total else f", of which {_count(trained)} train"
    processes = f"{machine.world_size} process{'es' if machine.world_size > 1 else ''}"
    if (shared := subject.config.get("sequence_parallel_size", 1)) > 1:
        processes += f", {shared} to a sequence,"
    if (shared := _tensor(subject)) > 1:
        processes += f", {shared} to a layer,"
    if (stages := _stages(subject)) > 1:
        processes += f", {stages} stages,"
    return Text.assemble(
        (type(subject.predictor.model).__name__, "bold"),
        f": {_count(total)} parameters{trains}; micro-batch {batch}{_tokens(subject)}; {processes} with "
        f"{_gib(machine.device_memory)} GiB each"
        + ("" if machine.host_memory is None else f"; a host has {_gib(machine.host_memory)} GiB"),
    )


def _tokens(subject: Subject) -> str:
    """Of a sample, where it has some: images have none."""
    from ds_hf.memory.models import example_inputs

    workload = subject.predictor.workload
    inputs = example_inputs(subject.predictor.model, workload).values()
    sizes = [tuple(value.shape[1:]) for value in inputs if hasattr(value, "shape")]
    return f" x {workload.seq_len} tokens" if any(workload.seq_len in size for size in sizes) else ""


def _shown(subject: Subject, table: list[Row]) -> Row | None:
    """The row whose parts are listed: the given configuration's, else the first that fits, else the smallest."""
    possible = [row for row in table if row.prediction is not None]
    own = [row for row in possible if row.chosen and subject.given]
    fitting = [row for row in possible if row.fits]
    if own or fitting:
        return (own or fitting)[0]
    return min(possible, key=lambda row: row.prediction.device_total if row.prediction else 0, default=None)


def _cells(row: Row, machine: Machine, *, lengths: bool) -> tuple[str, ...]:
    longest = (f"{row.longest:,}" if row.longest else "-",) if lengths else ()
    if row.prediction is None:
        return str(row.stage), row.offload, "-", "-", "-", "-", *longest, "refused"
    processes = min(machine.processes_per_host, machine.world_size)
    host, disk = (getattr(row.prediction, name) * processes for name in ("host_total", "disk_total"))
    verdict = "fits" if row.fits else "too large for the host" if _is_over_host(row, machine) else "too large"
    return (
        str(row.stage),
        row.offload,
        _gib(row.prediction.device_total),
        _gib(host),
        _gib(disk) if disk else "-",
        str(row.largest) if row.largest else "-",
        *longest,
        verdict,
    )


def _print_parts(console: Console, row: Row, prediction: Prediction) -> None:
    console.print(
        Text.assemble(
            (f"stage {row.stage}, offload {row.offload}" if row.offload != "-" else f"stage {row.stage}", "bold"),
            f": each process{_which(prediction)}, at the peak (in {prediction.moment})",
        )
    )
    grid = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    grid.add_column()
    grid.add_column()
    grid.add_column(justify="right")
    places = {
        "GPU": {**prediction.device, **prediction.outside},
        "host": prediction.host,
        "disk": prediction.disk,
    }
    for place, parts in places.items():
        for index, (name, size) in enumerate(parts.items()):
            after = " (before training)" if name == "loading" else ""
            grid.add_row(Text("" if index else place, "bold"), name + after, _gib(size))
    console.print(grid)


def _which(prediction: Prediction) -> str:
    """The stage of a pipeline that takes most, and what each takes."""
    if not prediction.stages:
        return ""
    totals = [stage.device_total for stage in prediction.stages]
    listed = ", ".join(map(_gib, totals))
    return f" of stage {totals.index(max(totals))} of the pipeline (GPU of each stage: {listed} GiB)"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.3g} B" if parameters >= 1e9 else f"{parameters / 1e6:.3g} M"


def _gib(nbytes: int) -> str:
    value = nbytes / GIB
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"
