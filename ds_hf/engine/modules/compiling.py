"""torch.compile, block by block: what ZeRO does around a block stays outside of the compiled code.

A block's compiled ``forward`` runs between its eager hooks, so nothing of ds_hf breaks a graph, and alike blocks share
their compiled code. ``Module.compile()`` of a module that has hooks - accelerate's regional compilation calls it - does
the same; torch's own would trace the hooks.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import cached_property, partial
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hf.engine.modules.capturing import EAGER, Captures, captures_of, records
from ds_hf.engine.zero.unit import Unit, in_backward, tensors_in
from ds_hf.log import announce, logger, warn_once

__all__ = [
    "CompileReport",
    "ModuleCompiler",
    "StandIn",
    "attach",
    "blocks_of",
    "compiler_of",
    "computes_with_liger",
    "tell_of_compilation",
    "tell_of_the_wait",
]

_ENOUGH_CALLS = 2  # optimizer steps after which everything that recurs has been compiled


class CompileReport(NamedTuple):
    """What became of the compiled modules so far, in this process.

    Attributes:
        modules: how many modules are compiled.
        graphs: compiled graphs.
        breaks: graph breaks, by torch's reason.
    """

    modules: int
    graphs: int
    breaks: dict[str, int]

    def __str__(self) -> str:
        total = sum(self.breaks.values())
        text = f"torch.compile: {self.modules} modules, {self.graphs} graphs, {total} graph break{'s' * (total != 1)}"
        reasons = sorted(self.breaks.items(), key=lambda item: -item[1])[:5]
        return "\n".join([text, *(f"  {count} x {reason.splitlines()[0]}" for reason, count in reasons)])


def _tell_lost_options(module: nn.Module, compiled: Any) -> None:
    """torch keeps what ``module.compile()`` was given in the compiled code alone."""
    if _options_in(compiled) != _options_in(torch.compile(module.forward)):
        warn_once(
            f"{type(module).__name__}.compile() had a backend, a mode or options and was called before the engine was "
            "made, which compiles its blocks with inductor as it is by default: call engine.compile(backend=..., "
            "mode=..., options=...) after initialize() to have them"
        )


def _options_in(compiled: Any) -> Any:
    """``None`` where torch compiles nothing (``TORCHDYNAMO_DISABLE=1``) and gives the function back as it is."""
    return getattr(compiled, "get_compiler_config", lambda: None)()


class ModuleCompiler:
    """Compiles modules of one engine and takes everything back.

    Args:
        hooked: the modules that have hooks; their ``compile()`` leads here.
        budget: of what backward needs, the fraction of bytes that compiled code may keep; ``None``: as torch is set.
        captures: makes what holds the blocks in CUDA graphs, when a module is compiled.
        shared: several processes compute a block together: what they exchange runs beside products.
    """

    def __init__(
        self,
        hooked: Iterable[nn.Module],
        budget: float | None = None,
        captures: Callable[[], Captures] = lambda: Captures(lambda: None),
        *,
        shared: bool = False,
    ) -> None:
        self.hooked = list(dict.fromkeys(hooked))
        self.budget, self._make_captures, self._shared = budget, captures, shared
        self._eager: set[nn.Module] = set()  # captured, and not compiled
        self.compiled: dict[nn.Module, StandIn] = {}
        self.steps = 0
        self._before: tuple[int, dict[str, int]] | None = None
        for module in self.hooked:
            before = module.__dict__.pop("_compiled_call_impl", None)
            module.__dict__["compile"] = StandIn(module, "compile", _Compile(self, module))
            if before is not None:  # compiled before it had hooks
                _tell_lost_options(module, before)
                self.compile(module)

    @cached_property
    def captures(self) -> Captures:
        """The blocks in CUDA graphs."""
        return self._make_captures()

    def compile(self, module: nn.Module, *args: Any, **options: Any) -> None:
        """Compile ``module.forward``, or those of the modules with hooks inside of it if there are any.

        ``args`` and ``options`` are those of ``torch.compile``.
        """
        if self._before is None:
            self._before = _counters()
            if options.get("backend", "inductor") == "inductor":
                tell_of_the_wait("step")
        inside = set(module.modules()).intersection(self.hooked) - {module}
        if inside:
            for inner in (m for m in self.hooked if m in inside):
                self.compile(inner, *args, **options)
            return
        if computes_with_liger(module):
            warn_once(
                f"{type(module).__name__} computes with Liger's kernels, and is neither compiled nor captured: torch's "
                "compiler may take such a kernel to write into the weights that it reads. Compiled or captured blocks "
                "gain about as much without them (use_liger_kernel=False)"
            )
            return
        around: Any = getattr(module.__dict__.get("forward"), "call", None)
        decides = getattr(around, "decides", False)  # outside of the graph, whether the block is computed
        if module in self._eager and options.get("backend") != EAGER and not decides:
            del self.compiled[module], module.__dict__["forward"]  # the compiler was asked for later
            self._eager.discard(module)
        if module in self.compiled:
            return
        forward = _AsTried(self._made(module, around.given if decides else module.forward, args, options))
        self.compiled[module] = stand_in = StandIn(module, "forward", forward)
        if decides:
            around.given = forward
        else:
            module.__dict__["forward"] = stand_in

    def _made(
        self, module: nn.Module, own: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> Callable[..., Any]:
        if self.captures.asked:
            options = {"dynamic": False, **options}
            if options.get("backend", "inductor") == "inductor" and not options.get("options"):
                options["mode"] = options.get("mode") or "reduce-overhead"
        graphs = records(options.get("backend"), options.get("mode"), options.get("options"))
        if options.get("backend") == EAGER:
            self._eager.add(module)
        if self.budget is not None or self._shared:
            options = _with_backend(self.budget, self._shared, **options)
        forward = torch.compile(own, *args, **options)
        if not graphs:
            return forward
        plain = {key: value for key, value in options.items() if key not in ("mode", "options")}
        again = own if module in self._eager else torch.compile(own, *args, **plain)
        return self.captures.around(module, forward, again, own)

    def report(self) -> CompileReport:
        """Graphs and graph breaks since the first module was compiled."""
        graphs, breaks = _counters() if self._before is not None else (0, {})
        before_graphs, before = self._before or (0, {})
        new = {reason: count - before.get(reason, 0) for reason, count in breaks.items()}
        return CompileReport(len(self.compiled), graphs - before_graphs, {r: n for r, n in new.items() if n > 0})

    @property
    def note(self) -> str:
        """For the line with which a run begins."""
        if not self.compiled:
            return ""
        ways = ["compiled"] * any(module not in self._eager for module in self.compiled)
        checkpointed = all(getattr(module, "gradient_checkpointing", False) for module in self.compiled)
        ways += ["captured"] * (self.captures.used and not checkpointed)  # a checkpointed block computes eagerly
        return f"blocks {' and '.join(ways)}" if ways else ""

    def on_step(self) -> CompileReport | None:
        """Note an optimizer step; the report when it is worth telling."""
        if not self.compiled:
            return None
        self.steps += 1
        return self.report() if self.steps == _ENOUGH_CALLS else None

    def remove(self) -> None:
        """Give the modules their own methods back."""
        for module in self.hooked:
            module.__dict__.pop("compile", None)
        for module, forward in self.compiled.items():
            if module.__dict__.get("forward") is forward:
                del module.__dict__["forward"]
                if self.captures.used:  # graphs hold memory for as long as dynamo remembers the function
                    torch._dynamo.eval_frame.remove_from_cache(module.forward)
        if "captures" in self.__dict__:
            self.captures.close()
        self.hooked.clear()
        self.compiled.clear()


def computes_with_liger(model: nn.Module) -> bool:
    """Whether a part of ``model`` is a module of Liger's, runs its ``forward``, or names one of its functions."""
    return any(_is_ligers(forward) for module in model.modules() for forward in (type(module).forward, module.forward))


def _is_ligers(forward: Any) -> bool:
    function = inspect.unwrap(getattr(forward, "__func__", forward))
    code, names = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    used = [function, *(names.get(name) for name in code.co_names)] if code else [function]
    return any(str(getattr(each, "__module__", "")).startswith("liger_kernel.") for each in used)


def compiler_of(engine: Any) -> ModuleCompiler:
    """That of ``engine``, of all modules of its units."""
    return ModuleCompiler(
        (module for unit in engine.units for module in unit.modules),
        engine.settings.ds_hf.activation_memory_budget,
        partial(captures_of, engine),
        shared=engine.mesh.shape.tensor > 1,
    )


def blocks_of(units: Iterable[Unit], model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, or else the whole model: what ``engine.compile()`` compiles."""
    return [m for unit in units if unit.name for m in unit.modules if any(m.children())] or [model]


def attach(engine: Any) -> None:
    """Compile or capture the blocks of ``engine`` if the file says so; their own ``compile()`` leads to it anyway."""
    compiler, own = engine.compiler, engine.settings.ds_hf
    if not (own.compile or own.capture):
        return
    why = _why_not_captured(engine) if own.capture else None
    if why is not None and engine.mesh.world.rank == 0:
        logger.warning('blocks are not captured ("ds_hf": {"capture": "blocks"}): %s', why)
    compiler.captures.asked = bool(own.capture) and why is None
    if compiler.captures.asked and own.capture_pad_to_multiple_of is not None:
        from ds_hf.engine.modules.padding import Padding

        compiler.captures.padding = Padding(own.capture_pad_to_multiple_of)
    if own.compile or compiler.captures.asked:
        engine.compile(backend="inductor" if own.compile else EAGER)


def _why_not_captured(engine: Any) -> str | None:
    shape, settings = engine.mesh.shape, engine.settings
    exchanges = [axis for axis in ("tensor", "sequence", "pipe") if getattr(shape, axis) > 1]
    if engine.device.type != "cuda":
        return f"CUDA graphs are for GPUs, and the model is on {engine.device.type}"
    if exchanges:
        return f"processes exchange data inside of blocks, or between them, along {' and '.join(exchanges)}"
    if settings.expert_parallel.enabled:
        return "experts are divided over processes, which wait for each other's counts (expert_parallel)"
    if settings.ds_hf.offload_activations or settings.activation_checkpointing.cpu_checkpointing:
        return "activations go to host memory while blocks compute, which a graph's memory would not wait for"
    return None


def tell_of_the_wait(what: str) -> None:
    """Say why the first ``what`` takes so long, and where torch keeps its code for the next run; once, on rank 0."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    if not dist.is_initialized() or dist.get_rank() == 0:
        announce(
            f"torch.compile: the first {what} takes a minute or more where this model is new, and seconds where "
            f"{cache_dir()} has its code (TORCHINDUCTOR_CACHE_DIR names another folder, one that stays)"
        )


def tell_of_compilation(engine: Any) -> None:
    """After a step: what was compiled, once, in the log of rank 0."""
    report = engine.compiler.on_step()
    if report is not None and engine.mesh.world.rank == 0:
        logger.log(logging.WARNING if report.breaks else logging.INFO, "%s", report)
        recomputed = any(getattr(module, "gradient_checkpointing", False) for module in engine.compiler.compiled)
        if engine.compiler.budget is not None and recomputed:
            logger.warning(
                "ds_hf.activation_memory_budget has no effect: the blocks are checkpointed, so each keeps its inputs "
                "alone. Remove one of the two: the budget, or gradient checkpointing"
            )
        kinds = len({type(module) for module in engine.compiler.compiled})
        caches = getattr(getattr(engine.module, "config", None), "use_cache", False) is True
        if caches and kinds < report.modules <= report.graphs:
            logger.warning(
                "torch.compile: %d graphs for %d alike blocks. The model keeps keys and values of each block while it "
                "trains, and each place in that cache takes a graph of its own: model.config.use_cache = False",
                report.graphs,
                report.modules,
            )


def _with_backend(budget: float | None, shared: bool, /, **options: Any) -> dict[str, Any]:
    """The options of ``torch.compile`` with a backend that keeps to the budget, and lets exchanges run beside."""
    mode, patches, dynamic = options.pop("mode", None), options.pop("options", None), options.get("dynamic")
    backend = _Backend(options.get("backend", "inductor"), budget, shared, mode, patches, dynamic)
    return {**options, "backend": backend}


class _Backend:
    """A backend under ``activation_memory_budget``, which torch reads when it divides a graph into its two passes, and
    for blocks that processes share with the order of ``modules/overlap.py``, unless ``patches`` have a pass of theirs.

    So the process's own settings stay, and a call of what is compiled costs nothing more. Equal ones share graphs.
    """

    def __init__(
        self, backend: Any, budget: float | None, shared: bool, mode: str | None, patches: Any, dynamic: bool | None
    ) -> None:
        from torch._dynamo import lookup_backend

        self.backend, self.budget = lookup_backend(backend), budget
        self.options: dict[str, Any] = {}
        if backend == "inductor":  # takes what a mode stands for, and not its name
            from torch._inductor import config, list_mode_options

            chosen = list_mode_options(mode, dynamic) if mode and mode != "default" else {}
            if shared and config.post_grad_custom_post_pass is None:
                from ds_hf.engine.modules.overlap import PATCHES

                chosen = {**PATCHES, **chosen}
            self.options["config_patches"] = {**chosen, **(patches or {})}
        else:
            self.options = {key: value for key, value in (("mode", mode), ("options", patches)) if value}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Backend) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from torch._functorch import config

        with config.patch(activation_memory_budget=self.budget) if self.budget is not None else nullcontext():
            return self.backend(graph, inputs, **self.options)


class _AsTried:
    """A compiled forward that is computed again in backward as eagerly as it was before: what a block gives is tried
    out before it is compiled, and a checkpoint around it counts the tensors that are saved, both times.

    Where several forwards come before a backward, the gradient of what a block gave says which of them it is: it is
    there before the block is computed again.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward, self.eager, self.tried = forward, False, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.forward(*args, **kwargs)
        if not in_backward():
            return self._noted(self.forward(*args, **kwargs))
        if self.eager:
            with torch.compiler.set_stance("force_eager"):
                return self.forward(*args, **kwargs)
        return self.forward(*args, **kwargs)

    def _noted(self, found: Any) -> Any:
        self.eager = eager = _is_eager()
        self.tried |= eager
        if self.tried:
            for tensor in tensors_in(found):
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._again, eager))  # type: ignore[no-untyped-call]
        return found

    def _again(self, eager: bool, _: Tensor) -> None:
        self.eager = eager


def _is_eager() -> bool:
    from torch._dynamo import eval_frame

    return bool(eval_frame._stance.stance == "force_eager")


class _Compile:
    """``module.compile()``."""

    def __init__(self, compiler: ModuleCompiler, module: nn.Module) -> None:
        self.compiler, self.module = compiler, module

    def __call__(self, *args: Any, **options: Any) -> None:
        self.compiler.compile(self.module, *args, **options)


class StandIn:
    """Stands in for a method of one module; a copy of the module has its class's method again."""

    def __init__(self, module: nn.Module, name: str, call: Callable[..., Any]) -> None:
        self.module, self.name, self.call = module, name, call
        self.__name__ = name
        self.__wrapped__ = getattr(type(module), name).__get__(module)  # inspect.signature() looks there

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _own_method(memo.get(id(self.module), self.module), self.name)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _own_method, (self.module, self.name)


def _own_method(module: nn.Module, name: str) -> MethodType:
    return MethodType(getattr(type(module), name), module)


def _counters() -> tuple[int, dict[str, int]]:
    """Dynamo's count of graphs, and of graph breaks by reason."""
    from torch._dynamo.utils import counters  # a second of imports: only where something is compiled

    return int(counters["stats"]["unique_graphs"]), dict(counters["graph_break"])
