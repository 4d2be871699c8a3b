"""``python -m deepspeed.checkpoint.ds_to_universal``: any checkpoint, ours or DeepSpeed's, as a universal one.

DeepSpeed first extracts what each rank has of each parameter into files, and then merges these. Here parameters are
read from where they lie, one for each worker in memory; the functions of the two steps are there for scripts that call
them, and ``--keep_temp_folder`` leaves the files of the first.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_hf.checkpoint.deepspeed.layout import find_grid
from ds_hf.checkpoint.deepspeed.module import ModelStates
from ds_hf.checkpoint.deepspeed.pickles import load_any, load_pickled, save_pickled
from ds_hf.checkpoint.deepspeed.read import read_deepspeed
from ds_hf.checkpoint.deepspeed.slices import SliceRules
from ds_hf.checkpoint.deepspeed.write_universal import write_universal
from ds_hf.checkpoint.formats import open_source
from ds_hf.checkpoint.source import CheckpointKind, Source
from ds_hf.deepspeed_api.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    FP32_FLAT_GROUPS,
    OPTIMIZER_STATE_DICT,
    PARAM,
    PARAM_SLICE_MAPPINGS,
    PIPELINE_REPLICATED_PARAMETER_PATTERNS,
    SINGLE_PARTITION_OF_FP32_GROUPS,
    UNIVERSAL_CHECKPOINT_INFO,
)
from ds_hf.errors import CheckpointError
from ds_hf.log import complain, logger

from .deepspeed_checkpoint import DeepSpeedCheckpoint

__all__ = [
    "atoi",
    "command",
    "dp_index_to_str",
    "dump_param_fragment",
    "extract_zero_shards",
    "extract_zero_shards_stage3",
    "main",
    "merge_tp_slices",
    "merge_zero3_slices",
    "natural_keys",
    "parse_arguments",
]

_STATE_OF = {"fp32": "master"}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """DeepSpeed's options."""
    parser = argparse.ArgumentParser(description="Write a checkpoint of ds_hf or DeepSpeed as a universal one.")
    parser.add_argument("--input_folder", required=True, help="folder of the checkpoint, or one that holds 'latest'")
    parser.add_argument("--output_folder", required=True, help="folder to write; latest_universal beside it names it")
    parser.add_argument("--num_extract_workers", default=4, type=int, help="threads for --keep_temp_folder")
    parser.add_argument("--num_merge_workers", default=2, type=int, help="parameters in memory at a time")
    parser.add_argument("--keep_temp_folder", action="store_true", help="leave what each rank has in OUTPUT/tmp")
    parser.add_argument(
        "--no_strict", dest="strict", action="store_false", help="go on with patterns that match no parameter"
    )
    parser.add_argument(
        "--inject_missing_state",
        action="store_true",
        help="where nothing says how tensor-parallel slices make whole parameters, they follow one another",
    )
    return parser.parse_args(arguments)


def main(args: Any) -> None:
    """Convert; ``args`` has the attributes that ``parse_arguments`` gives.

    Raises:
        CheckpointError: the input is damaged or incomplete, or the output holds something else.
    """
    for name in ("num_extract_workers", "num_merge_workers"):
        count = getattr(args, name, 1)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} is {count!r}, and at least 1 is needed")
    print(f"Converting checkpoint in {args.input_folder} to universal checkpoint in {args.output_folder}")
    source = _open(Path(args.input_folder), assumed=bool(getattr(args, "inject_missing_state", False)))
    output = write_universal(
        source, args.output_folder, strict=getattr(args, "strict", True), workers=getattr(args, "num_merge_workers", 1)
    )
    if getattr(args, "keep_temp_folder", False):
        if source.kind is CheckpointKind.DEEPSPEED:
            _extract(source, output / "tmp", getattr(args, "num_extract_workers", 1))
        else:
            print("There are no intermediate files to keep: this checkpoint is read from where it lies")
    print("*** Done!")


def command(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    try:
        main(parse_arguments(arguments))
    except (CheckpointError, OSError, ValueError) as error:
        complain(error)
        return 1
    return 0


def _open(folder: Path, *, assumed: bool) -> Source:
    if not assumed:
        return open_source(folder)
    try:
        return open_source(folder)
    except CheckpointError as error:
        if UNIVERSAL_CHECKPOINT_INFO not in str(error):
            raise
        logger.warning(
            "%s has no %s: slices are taken to follow one another in dimension 0", folder, UNIVERSAL_CHECKPOINT_INFO
        )
        return read_deepspeed(folder, assumed=True)


def _extract(source: Source, temporary: Path, workers: int) -> None:
    """What each rank has of each parameter, into files."""
    folder, grid = source.folder, find_grid(source.folder)
    if grid.experts:
        raise CheckpointError(f"{folder}: moments of experts in files of their own are not read: load and save it here")
    work: Iterable[Any]
    do: Callable[[Any], None]
    if source.stage == 3:
        states = ModelStates(folder, grid, assumed=True)
        files = [[str(folder / name) for name in row] for row in grid.optimizers]
        shapes = [states.shapes(column) for column in range(len(files))]
        work = list(itertools.product(range(len(files)), range(len(files[0]))))
        do = lambda at: extract_zero_shards_stage3(files, shapes, len(files[0]), str(temporary), at)  # noqa: E731
    else:
        opened = DeepSpeedCheckpoint(str(folder))
        work = list(itertools.product(range(opened.pp_degree), range(opened.tp_degree), range(opened.dp_degree)))
        do = lambda at: extract_zero_shards(str(temporary), opened, at)  # noqa: E731
    with ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(do, work):
            pass


# -- the steps ------------------------------------------------------------------------------------------------------


def atoi(text: str) -> int | str:
    """Digits as a number."""
    return int(text) if text.isdigit() else text


def natural_keys(text: str) -> list[int | str]:
    """A key that sorts numbers in texts by their values."""
    return [atoi(part) for part in re.split(r"(\d+)", text)]


def dp_index_to_str(dp_index: int) -> str:
    """A data-parallel rank as in names of fragments: two digits at least."""
    return f"{dp_index:0>2d}"


def extract_zero_shards(dir: str, ds_checkpoint: DeepSpeedCheckpoint, indices_3D: tuple[int, int, int]) -> None:
    """Write what a rank ``(pp, tp, dp)`` of stage 1 or 2 has of each parameter below ``dir``."""
    pp_index, tp_index, dp_index = indices_3D
    state = ds_checkpoint.get_zero_checkpoint_state(pp_index=pp_index, tp_index=tp_index, dp_index=dp_index)
    optimizer = state[OPTIMIZER_STATE_DICT]
    info = ds_checkpoint.get_checkpoint_info(UNIVERSAL_CHECKPOINT_INFO) or {}
    rules = SliceRules(
        {PIPELINE_REPLICATED_PARAMETER_PATTERNS: info.get(PIPELINE_REPLICATED_PARAMETER_PATTERNS, [])}, Path(dir), 1
    )
    groups = optimizer[BASE_OPTIMIZER_STATE]["state"]
    for index, mapping in enumerate(optimizer[PARAM_SLICE_MAPPINGS]):
        flat = {"fp32": optimizer[SINGLE_PARTITION_OF_FP32_GROUPS][index], **groups.get(index, {})}
        for name, place in mapping.items():
            if pp_index > 0 and rules.pipeline.match(name):  # the first stage has it too
                continue
            for key, value in flat.items():
                dump_param_fragment(dir, tp_index, dp_index, key, value, name, place.start, place.numel)


def extract_zero_shards_stage3(
    optim_files_grid: Sequence[Sequence[str]],
    param_shapes_grid: Sequence[Sequence[Mapping[str, Any]]],
    dp_degree: int,
    temp_dir: str,
    indices: tuple[int, int],
    exclude_param_names: Iterable[str] | None = None,
) -> None:
    """The same of a rank ``(tp, dp)`` of stage 3."""
    tp_index, dp_index = indices
    excluded = set(exclude_param_names or ())
    optimizer = load_pickled(Path(optim_files_grid[tp_index][dp_index]))[OPTIMIZER_STATE_DICT]
    for index, shapes in enumerate(param_shapes_grid[tp_index]):
        moments = optimizer[OPTIMIZER_STATE_DICT]["state"][index]
        flat = {"fp32": optimizer[FP32_FLAT_GROUPS][index]}
        flat.update({key: value for key, value in moments.items() if key != "step"})
        offset = 0
        for name, shape in shapes.items():
            numel = torch.Size(shape).numel()
            part = -(-numel // dp_degree)
            own = max(0, min(part, numel - dp_index * part))
            if name not in excluded:
                for key, value in flat.items():
                    dump_param_fragment(temp_dir, tp_index, dp_index, key, value, name, offset, own)
            offset += part


def dump_param_fragment(
    dir: str,
    tp_index: int,
    dp_index: int,
    state_name: str,
    state_flat_tensor: Any,
    param_name: str,
    offset: int,
    numel: int,
) -> None:
    """Write ``dir/param_name/tp_index/state_name.dp_index``: ``numel`` elements of a flat state, or the step."""
    if "/" in param_name or param_name in ("", ".", ".."):
        raise CheckpointError(f"the parameter {param_name!r} cannot have a folder of its name")
    path = Path(dir, param_name, str(tp_index), f"{state_name}.{dp_index_to_str(dp_index)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    value = state_flat_tensor
    if state_name != "step" and torch.is_tensor(value):
        value = value.narrow(0, offset, numel).clone()
    save_pickled(path, value)


def merge_tp_slices(
    uc_info: Mapping[str, Any],
    dir: str,
    slice_dir: str,
    tp_degree: int,
    name_and_shapes: tuple[str, Any],
) -> set[str]:
    """Put one parameter together of what ``extract_zero_shards`` wrote, into ``dir/name``.

    Args:
        name_and_shapes: its name, and of each tensor-parallel rank the shape there (or the one shape of all).

    Returns:
        the patterns that do not match it.
    """
    name, given = name_and_shapes
    shapes = [tuple(given)] * tp_degree if all(isinstance(n, int) for n in given) else [tuple(shape) for shape in given]
    rules = SliceRules(uc_info, Path(slice_dir), tp_degree, assumed=True)
    place = rules.place(name, shapes)
    target = Path(dir, name)
    target.mkdir(parents=True, exist_ok=True)
    states = sorted({path.name.partition(".")[0] for path in Path(slice_dir, name).glob("*/*.*")})
    for state in states:
        parts = [_merged(Path(slice_dir, name, str(rank)), state) for rank in range(tp_degree)]
        if state == "step":
            _check_steps(name, parts)
            save_pickled(target / "step.pt", parts[0])
            continue
        held = [
            torch.empty(shape) if part is None and 0 in shape else part
            for part, shape in zip(parts, shapes, strict=True)
        ]
        _check_slices(name, state, held, shapes)
        whole = place.merge(held, _STATE_OF.get(state, state))
        save_pickled(target / f"{state}.pt", {**place.keys, PARAM: whole})
    return set(rules.unused())


def merge_zero3_slices(dp_degree: int, dir: str, slice_dir: str, name: str) -> None:
    """The same of a stage 3 without tensor parallelism: flat tensors."""
    target = Path(dir, name)
    target.mkdir(parents=True, exist_ok=True)
    for state in ("fp32", "exp_avg", "exp_avg_sq"):
        merged = _merged(Path(slice_dir, name, "0"), state)
        if merged is None:
            raise CheckpointError(f"{Path(slice_dir, name)} has no fragments of {state}")
        save_pickled(target / f"{state}.pt", merged)


def _merged(folder: Path, state: str) -> Any:
    """Of one tensor-parallel rank: fragments by data-parallel rank, ``None`` where there are none."""
    paths = sorted(folder.glob(f"{state}.*"), key=lambda path: natural_keys(path.name))
    parts = [load_any(path) for path in paths]
    if not parts:
        return None
    if state == "step":
        _check_steps(folder.parent.name, parts)
        return parts[0]
    return torch.cat(parts, dim=0)


def _check_steps(name: str, steps: Sequence[Any]) -> None:
    known = {float(step) for step in steps if step is not None}
    if len(known) > 1:
        raise CheckpointError(
            f"fragments of {name} were saved after {sorted(known)} steps: they are of different saves"
        )


def _check_slices(name: str, state: str, held: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> None:
    for rank, (part, shape) in enumerate(zip(held, shapes, strict=True)):
        if not isinstance(part, Tensor) or part.numel() != torch.Size(shape).numel():
            found = "no fragments" if part is None else f"{part.numel()} elements"
            raise CheckpointError(
                f"tensor-parallel rank {rank} has {found} of {name} ({state}), its shape is {list(shape)}"
            )


if __name__ == "__main__":
    sys.exit(command())
