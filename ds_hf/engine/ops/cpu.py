"""The rules of reference.py on the CPU: loads the library that ``csrc/cpu`` becomes and calls it through ctypes.

Owns the mirror of ``csrc/cpu/ds_hf_cpu.h``; both carry one number, ``ABI``, and a library with another is refused.
Arguments were checked by library.py. ctypes releases the GIL for the time of a call. The library takes its threads from
the OpenMP runtime that torch has loaded; a child made by ``fork`` after the first call works on one thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_char_p, c_double, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from ds_hf.engine.ops.reference import clip_control, sum_parts_
from ds_hf.host import local_world_size, rank_cores

__all__ = [
    "adagrad_",
    "adam_",
    "available",
    "beside_threads",
    "clip_control",
    "instruction_set",
    "lamb_",
    "lamb_apply_",
    "lamb_moments_",
    "lion_",
    "loaded",
    "norm_control",
    "set_instruction_set",
    "sgd_",
    "squared_norm",
    "sum_parts_",
    "threads",
    "type_number",
    "unsupported",
    "use_threads",
]

Rate = float | Tensor

ABI = 1
FOLDER = Path(__file__).parent / "_lib"
LIBRARY = "libds_hf_cpu.so"
REPORT = "BUILD.txt"  # hatch_build.py says there why there is no library
THREADS_VARIABLE = "DS_HF_CPU_THREADS"
_thread = threading.local()  # .threads, see ``use_threads``
_TYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


class Lists(ctypes.Structure):
    _fields_ = (
        ("nbytes", c_int64),
        ("count", c_int64),
        ("numels", POINTER(c_int64)),
        *((name, POINTER(c_void_p)) for name in ("params", "grads", "firsts", "seconds", "outs", "steps")),
        ("scale_and_skip", c_void_p),
        ("seed", c_uint64),
        *((name, c_int32) for name in ("stochastic", "threads")),
        *((name, c_int32) for name in ("param_type", "grad_type", "moment_type", "out_type")),
    )


def _numbers(name: str, doubles: str, flags: str = "") -> type[ctypes.Structure]:
    fields = [*((field, c_double) for field in doubles.split()), *((field, c_int32) for field in flags.split())]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


_Adam = _numbers("_Adam", "lr beta1 beta2 eps weight_decay", "decoupled bias_correction")
_Lion = _numbers("_Lion", "lr beta1 beta2 weight_decay")
_Adagrad = _numbers("_Adagrad", "lr lr_decay eps weight_decay")
_Sgd = _numbers("_Sgd", "lr momentum dampening weight_decay", "nesterov first")
_Lamb = _numbers("_Lamb", "lr beta1 beta2 eps weight_decay min_coeff max_coeff", "eps_inside_sqrt bias_correction")


def available() -> str | None:
    """``None`` if the library is there and runs on this machine, else why not."""
    found = _library()
    return found if isinstance(found, str) else None


def unsupported(op: str, *dtypes: torch.dtype) -> str | None:
    """Why tensors of ``dtypes`` are not for this module; ``None`` if they are."""
    for dtype in dtypes:
        if dtype not in _TYPES:
            return (
                f"the CPU kernel of {op} takes float32, bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
            )
    return None


def threads() -> int:
    """How many threads a call may use: what this rank's share of the processor is.

    torchrun sets ``OMP_NUM_THREADS=1`` for several ranks unless the user chose a number. With states on the CPU most
    cores would then do nothing, so that the default is replaced here by an equal share of the cores.
    """
    chosen = _chosen_threads() or getattr(_thread, "threads", 0)
    if chosen:
        return chosen
    if os.environ.get("OMP_NUM_THREADS") == "1" and (several := os.environ.get("LOCAL_WORLD_SIZE", "1")) != "1":
        return _share(several, os.environ.get("LOCAL_RANK")) or torch.get_num_threads()
    return torch.get_num_threads()


@functools.cache
def _share(ranks: str, rank: str | None) -> int:
    """Cores of this rank, where these variables of the environment say that there are several; else 0."""
    return len(rank_cores()) if local_world_size() > 1 else 0


def beside_threads() -> int:
    """How many threads an update may use beside a thread that launches kernels.

    All of the rank's cores but one (2.7 B beside a forward, 16 cores of an H100's host: 726 ms with 12 threads, 679
    with 14, 630 with 16). Fewer where OMP_NUM_THREADS or ``torch.set_num_threads`` say so, but for the number 1, which
    launchers and images set for all programs.
    """
    cores = len(rank_cores())
    limit = torch.get_num_threads()
    useful = cores - 1 if cores > 2 else cores
    return _chosen_threads() or (min(limit, useful) if limit > 1 else useful)


def use_threads(count: int) -> None:
    """Let this thread's ops, torch's among them, use ``count`` threads. Other threads keep theirs."""
    _thread.threads = count
    torch.get_num_threads()  # torch's own number comes with the first call on a thread: it must not come later
    with contextlib.suppress(AttributeError):  # a torch without OpenMP
        ctypes.CDLL(None).omp_set_num_threads(count)


def _chosen_threads() -> int:
    chosen = os.environ.get(THREADS_VARIABLE, "")
    return int(chosen) if chosen.isdecimal() else 0


def instruction_set() -> str:
    """What the library runs on: avx512, avx2 or baseline."""
    name: bytes = loaded().ds_hf_cpu_isa()
    return name.decode()


def set_instruction_set(name: str) -> bool:
    """For tests: choose one, or the best one again with an empty name; whether this processor has it."""
    return bool(loaded().ds_hf_cpu_set_isa(name.encode()) == 0)


def adam_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    outs: Sequence[Tensor],
    steps: Sequence[Tensor],
    scale_and_skip: Tensor | None,
    *,
    lr: Rate,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool = True,
    bias_correction: bool = True,
    seed: int | None = None,
) -> None:
    lists = lists_of(params, grads, exp_avgs, exp_avg_sqs, outs, steps, scale_and_skip, seed)
    _call("adam", lists, _Adam(float(lr), beta1, beta2, eps, weight_decay, decoupled, bias_correction))


def lion_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    outs: Sequence[Tensor],
    scale_and_skip: Tensor | None,
    *,
    lr: Rate,
    beta1: float,
    beta2: float,
    weight_decay: float,
    seed: int | None = None,
) -> None:
    lists = lists_of(params, grads, exp_avgs, (), outs, (), scale_and_skip, seed)
    _call("lion", lists, _Lion(float(lr), beta1, beta2, weight_decay))


def adagrad_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    sums: Sequence[Tensor],
    outs: Sequence[Tensor],
    steps: Sequence[Tensor],
    scale_and_skip: Tensor | None,
    *,
    lr: Rate,
    lr_decay: float,
    eps: float,
    weight_decay: float,
    seed: int | None = None,
) -> None:
    lists = lists_of(params, grads, sums, (), outs, steps, scale_and_skip, seed)
    _call("adagrad", lists, _Adagrad(float(lr), lr_decay, eps, weight_decay))


def sgd_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    outs: Sequence[Tensor],
    scale_and_skip: Tensor | None,
    *,
    lr: Rate,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    first: bool,
    seed: int | None = None,
) -> None:
    lists = lists_of(params, grads, momentum_buffers if momentum else (), (), outs, (), scale_and_skip, seed)
    _call("sgd", lists, _Sgd(float(lr), momentum, dampening, weight_decay, nesterov, first))


def lamb_moments_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    scale_and_skip: Tensor | None,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    eps_inside_sqrt: bool,
    weight_decay: float,
) -> Tensor:
    norms = torch.zeros(len(params), 2, dtype=torch.float32)
    lists = lists_of(params, grads, exp_avgs, exp_avg_sqs, (), (), scale_and_skip, None)
    numbers = _Lamb(0, beta1, beta2, eps, weight_decay, 0, 0, eps_inside_sqrt, False)
    _call("lamb_moments", lists, numbers, norms)
    return norms


def lamb_apply_(
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    outs: Sequence[Tensor],
    steps: Sequence[Tensor],
    norms: Tensor,
    scale_and_skip: Tensor | None,
    *,
    lr: Rate,
    beta1: float,
    beta2: float,
    eps: float,
    eps_inside_sqrt: bool,
    weight_decay: float,
    bias_correction: bool,
    min_coeff: float,
    max_coeff: float,
) -> None:
    lists = lists_of(params, (), exp_avgs, exp_avg_sqs, outs, steps, scale_and_skip, None)
    coefficients = (min_coeff, max_coeff)
    numbers = _Lamb(float(lr), beta1, beta2, eps, weight_decay, *coefficients, eps_inside_sqrt, bias_correction)
    _call("lamb_apply", lists, numbers, norms.float().contiguous())


def lamb_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    outs: Sequence[Tensor],
    steps: Sequence[Tensor],
    scale_and_skip: Tensor | None,
    *,
    lr: Rate,
    beta1: float,
    beta2: float,
    eps: float,
    eps_inside_sqrt: bool,
    weight_decay: float,
    bias_correction: bool,
    min_coeff: float,
    max_coeff: float,
) -> None:
    coefficients = (min_coeff, max_coeff)
    numbers = _Lamb(float(lr), beta1, beta2, eps, weight_decay, *coefficients, eps_inside_sqrt, bias_correction)
    norms = torch.zeros(len(params), 2, dtype=torch.float32)
    _call("lamb_moments", lists_of(params, grads, exp_avgs, exp_avg_sqs, (), (), scale_and_skip, None), numbers, norms)
    _call("lamb_apply", lists_of(params, (), exp_avgs, exp_avg_sqs, outs, steps, scale_and_skip, None), numbers, norms)


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    result = torch.zeros((), dtype=torch.float32)
    lists = lists_of((), tensors, (), (), (), (), None, None)
    _check("squared_norm", loaded().ds_hf_cpu_squared_norm(byref(lists), result.data_ptr()))
    return result


def norm_control(tensors: Sequence[Tensor], *, scale: float, max_norm: float, checked: bool) -> Tensor:
    """``reference.norm_control``: the norm is the work."""
    return clip_control([squared_norm(tensors)], scale=scale, max_norm=max_norm, checked=checked)


def _call(op: str, lists: Lists, numbers: ctypes.Structure, norms: Tensor | None = None) -> None:
    function: Callable[..., int] = getattr(loaded(), f"ds_hf_cpu_{op}")
    more = () if norms is None else (norms.data_ptr(),)
    _check(op, function(byref(lists), byref(numbers), *more))


def _check(op: str, status: int) -> None:
    assert status == 0, f"{op}: the library refuses its arguments ({status})"


def lists_of(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    firsts: Sequence[Tensor],
    seconds: Sequence[Tensor],
    outs: Sequence[Tensor],
    steps: Sequence[Tensor],
    scale_and_skip: Tensor | None,
    seed: int | None,
) -> Lists:
    """The struct of one call; tensors of any shape, in each list of one dtype. It holds addresses: they must outlive
    it."""
    entries = params or grads
    return Lists(
        nbytes=ctypes.sizeof(Lists),
        count=len(entries),
        numels=(c_int64 * len(entries))(*[tensor.numel() for tensor in entries]),
        params=_addresses(params),
        grads=_addresses(grads),
        firsts=_addresses(firsts),
        seconds=_addresses(seconds),
        outs=_addresses(outs),
        steps=_addresses(steps),
        scale_and_skip=None if scale_and_skip is None else scale_and_skip.data_ptr(),
        seed=0 if seed is None else seed & (2**64 - 1),
        stochastic=seed is not None,
        threads=threads(),
        param_type=_type(params),
        grad_type=_type(grads),
        moment_type=_type(firsts),
        out_type=_type(outs),
    )


def _addresses(tensors: Sequence[Tensor]) -> ctypes.Array[c_void_p] | None:
    return (c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors]) if tensors else None


def _type(tensors: Sequence[Tensor]) -> int:
    return type_number(tensors[0]) if tensors else 0


def type_number(tensor: Tensor) -> int:
    """What the library calls the dtype of ``tensor``, of any shape."""
    return _TYPES[tensor.dtype]


def loaded() -> ctypes.CDLL:
    """The library, which is ``available``."""
    library = _library()
    assert not isinstance(library, str), library
    return library


@functools.cache
def _library() -> ctypes.CDLL | str:
    """The library, or the reason why there is none."""
    path = FOLDER / LIBRARY
    if not path.exists():
        try:
            return (FOLDER / REPORT).read_text(encoding="utf-8").splitlines()[0]
        except (OSError, IndexError):
            return f"{path} does not exist: ds_hf was not installed; pip install it, or run make setup in a checkout"
    try:
        library = _open(path)
        found = library.ds_hf_cpu_abi()
    except (OSError, AttributeError) as error:
        return f"{path} cannot be loaded ({error}): reinstall ds_hf"
    if found != ABI:
        return f"{path} belongs to another version of ds_hf (interface {found}, not {ABI}): reinstall ds_hf"
    library.ds_hf_cpu_isa.restype = c_char_p
    library.ds_hf_cpu_set_isa.argtypes = [c_char_p]
    structs = {"adam": _Adam, "lion": _Lion, "adagrad": _Adagrad, "sgd": _Sgd}
    for op, struct in structs.items():
        getattr(library, f"ds_hf_cpu_{op}").argtypes = [POINTER(Lists), POINTER(struct)]
    for op in ("lamb_moments", "lamb_apply"):
        getattr(library, f"ds_hf_cpu_{op}").argtypes = [POINTER(Lists), POINTER(_Lamb), c_void_p]
    library.ds_hf_cpu_squared_norm.argtypes = [POINTER(Lists), c_void_p]
    return library


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        if "undefined symbol" not in str(error):
            raise
    # a torch without OpenMP: the compiler's runtime, which most systems have
    ctypes.CDLL("libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(path))
