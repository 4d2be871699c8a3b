"""``InferenceEngine``: a model that only computes, with DeepSpeed's names, and how it is put together.

Order: weights from a checkpoint (or those that are there) -> layers divided -> dtype and device -> numbers of 8 or 4
bits -> how it decodes. With ``zero`` an engine without an optimizer holds the weights, and they come block by block.
"""

from __future__ import annotations

import functools
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ds_hf.config.types.parallel import ExpertParallelSection
from ds_hf.engine.builder import build_engine
from ds_hf.engine.comm.mesh import compute_device
from ds_hf.engine.comm.process_group import init_distributed
from ds_hf.engine.engine import CoreEngine
from ds_hf.engine.modules.generation.footprint import check_cache_place
from ds_hf.engine.modules.quantized.by_torchao import has_torchao, quantize_by_torchao
from ds_hf.engine.modules.quantized.layers import has_stacks, quantize_layers, tied_weights
from ds_hf.engine.modules.quantized.settings import choice_of
from ds_hf.engine.optim.sharded import ShardedOptimizer
from ds_hf.engine.zero.buffer import buffers_of
from ds_hf.engine.zero.packed import is_packed
from ds_hf.errors import ConfigError, DsHfError
from ds_hf.inference.config import DTYPES, InferenceConfig
from ds_hf.inference.decode import Decoder
from ds_hf.inference.forward import CapturedCalls
from ds_hf.inference.layers import divide_layers
from ds_hf.inference.weights import load_weights
from ds_hf.log import log_once

__all__ = ["InferenceEngine", "TooLongError"]

_SHARE_OF_FREE = 0.8  # of the device's memory that weights may take which are packed there, as packing takes some


class TooLongError(DsHfError, ValueError):
    """A prompt, or prompt and answer together, do not fit into ``max_out_tokens``."""


class InferenceEngine(nn.Module):
    """A model prepared by ``init_inference``; other names are the model's.

    Args:
        model: the model; it stays the same object and is changed in place.
        config: see ``InferenceConfig``.

    Attributes:
        module: the model.
        mp_world_size: processes that share each layer.
        decoder: decodes with a static cache, where the configuration asks for it.

    Raises:
        ConfigError: the model cannot be prepared so; it says why.
        CheckpointError: the checkpoint does not fit.
    """

    def __init__(self, model: nn.Module, config: InferenceConfig) -> None:
        super().__init__()
        self._config = config
        _check(model, config)
        self.dtype = DTYPES[config.dtype] if config.quant_bits is None else _computing_dtype(model)
        self.mp_world_size = config.tensor_parallel.tp_size if config.tensor_parallel.enabled else 1
        self.zero_engine: CoreEngine | None = None
        self.mesh: Any = None
        with torch.no_grad():
            self._prepare(model, config)
        self.module = model
        self.eval()
        on_gpu = compute_device().type == "cuda" and not config.keep_module_on_host
        kernels = bool(config.replace_with_kernel_inject)
        self.decoder: Decoder | None = None
        self._calls: CapturedCalls | None = None
        if (config.enable_cuda_graph or kernels) and self.zero_engine is None:
            self.decoder = Decoder(model, compiled=kernels and on_gpu, max_length=config.max_out_tokens)
        if config.enable_cuda_graph and on_gpu:
            self._calls = CapturedCalls(model)
        if kernels:
            _use_kernels(model)
        self.model_profile_enabled = False
        self._model_times: list[float] = []
        self._hooks: list[RemovableHandle] = []
        if hasattr(model, "generate"):
            self.generate = self._generate

    def _prepare(self, model: nn.Module, config: InferenceConfig) -> None:
        device = torch.device("cpu") if config.keep_module_on_host else compute_device()
        if self.mp_world_size > 1:
            self.mesh = divide_layers(model, config)
        checkpoint = config.checkpoint or config.checkpoint_config.checkpoint_dir
        if checkpoint is not None:
            folder = config.base_dir or config.checkpoint_config.base_dir
            place = _place_of_whole(model, config, self.dtype, device)
            load_weights(model, checkpoint, base_dir=folder, dtype=self.dtype, device=place)
        elif any(param.is_meta for param in model.parameters()):
            raise ConfigError(
                "the model has no values (it lies on the meta device): give checkpoint=, from which each process "
                "reads its part",
                "init_inference",
            )
        _cast(model, self.dtype)
        if config.zero.get("stage", 0) == 3:
            self.zero_engine = _zero_engine(model, config, self.dtype)
            return
        if config.quant_bits is not None:
            _quantize(model, config, device)
        model.to(device)

    # -- computing -------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's outputs, without gradients."""
        with torch.no_grad():
            return (self._calls or self.module)(*inputs, **kwargs)

    def _generate(self, *inputs: Any, **kwargs: Any) -> Any:
        """``model.generate``: the same arguments, the same tokens.

        Raises:
            DsHfError: a cache that leaves the GPU, and there is none.
            TooLongError: the prompt, with a static cache also prompt and answer, has more than ``max_out_tokens``.
            NotImplementedError: ``num_beams`` is more than 1, with ``enable_cuda_graph``.
        """
        self._check_call(inputs, kwargs)
        check_cache_place(self.module, kwargs, compute_device())
        if self.decoder is None:
            return self.module.generate(*inputs, **kwargs)  # type: ignore[operator]
        try:
            return self.decoder.generate(*inputs, **kwargs)
        except ValueError as error:
            if "max_out_tokens" in str(error):
                raise TooLongError(str(error)) from None
            raise

    def _check_call(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        beams = kwargs.get("num_beams") or getattr(kwargs.get("generation_config"), "num_beams", None) or 1
        if beams > 1 and self._config.enable_cuda_graph:
            raise NotImplementedError(
                f"num_beams is {beams}, and a captured decoding step cannot reorder its cache: remove num_beams, or "
                "enable_cuda_graph"
            )
        given = (*inputs[:1], kwargs.get("inputs"), kwargs.get("input_ids"))
        for tokens in given:
            if isinstance(tokens, Tensor) and tokens.dim() == 2 and tokens.shape[1] > self._config.max_out_tokens:
                raise TooLongError(
                    f"Input with size {tokens.shape[1]} exceeds maximum length of {self._config.max_out_tokens}. "
                    "Please increase `max_tokens` in the DeepSpeed Inference Config."
                )

    # -- times -----------------------------------------------------------------------------------------------------

    def profile_model_time(self, use_cuda_events: bool = True) -> None:
        """Time each call of the model from now on; ``model_times`` gives the times."""
        if not self.model_profile_enabled:
            begun: list[float] = []

            def before(*_: Any) -> None:
                begun.append(_now())

            def after(*_: Any) -> None:
                self._model_times.append((_now() - begun.pop()) * 1000)

            self._hooks += [self.module.register_forward_pre_hook(before), self.module.register_forward_hook(after)]
            if self.decoder is not None:
                self.decoder.clock = functools.partial(_timed, self._model_times)
        self.model_profile_enabled = True

    def model_times(self) -> list[float]:
        """Milliseconds of each call of the model, of each token in ``generate``, since the last time.

        Raises:
            AssertionError: ``profile_model_time`` was not called.
        """
        assert self.model_profile_enabled, "model profiling is not enabled"
        times = list(self._model_times)
        self._model_times.clear()
        return times

    # -- the rest --------------------------------------------------------------------------------------------------

    @property
    def config(self) -> Any:
        """The model's configuration."""
        return self.module.config

    @property
    def is_compiled(self) -> bool:
        return self.decoder is not None and self.decoder.compiled

    def compile(self, backend: str = "inductor", compile_kwargs: Any = None, *_: Any, **__: Any) -> None:
        """Compile decoding steps from now on."""
        if self.decoder is None and self.zero_engine is None:
            self.decoder = Decoder(self.module, capture=False, max_length=self._config.max_out_tokens)
        if self.decoder is not None:
            self.decoder.compiled = True
            self.decoder.release()

    def destroy(self) -> None:
        """Give back caches, graphs and hooks. The model stays."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self.decoder is not None:
            self.decoder.release()
        if self._calls is not None:
            self._calls.clear()
        if self.zero_engine is not None:
            self.zero_engine.destroy()
        self.model_profile_enabled = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _timed(times: list[float], step: Callable[[], None]) -> None:
    begun = _now()
    step()
    times.append((_now() - begun) * 1000)


def _check(model: nn.Module, config: InferenceConfig) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"init_inference() needs a model, an nn.Module; got {type(model).__name__}", "init_inference")
    quantized = next((name for name, param in model.named_parameters() if is_packed(param)), None)
    if quantized is not None and (config.quant_bits is not None or config.tensor_parallel.tp_size > 1):
        what = "quantized again" if config.quant_bits is not None else "divided over processes"
        raise ConfigError(
            f"{quantized} is quantized already, and would be {what}: give the dtype in which the model computes and "
            "tp_size 1, or load the model without quantization",
            "init_inference",
        )
    if buffers_of(model.parameters()) and config.zero.get("stage", 0) != 3:
        raise ConfigError(
            'the model\'s parameters are divided (zero.Init, HfDeepSpeedConfig): give zero={"stage": 3}, or load it '
            "without",
            "init_inference",
        )
    if buffers_of(model.parameters()) and config.tensor_parallel.enabled and config.tensor_parallel.tp_size > 1:
        raise ConfigError(
            "the model's parameters are divided already (zero.Init, HfDeepSpeedConfig), and tp_size divides layers: "
            "load the model without, or on the meta device with checkpoint=",
            "init_inference",
        )
    if config.zero and config.zero.get("stage", 0) not in (0, 3):
        raise ConfigError(
            f"zero is stage {config.zero.get('stage')}, which divides what training needs: give stage 3, with "
            "offload_param for a model that is larger than the GPU, or remove it",
            "init_inference",
        )


def _computing_dtype(model: nn.Module) -> torch.dtype:
    """Of a model whose weights are quantized: its own where that has 16 bits, else bf16."""
    own = next((param.dtype for param in model.parameters() if param.is_floating_point()), torch.bfloat16)
    return own if own in (torch.float16, torch.bfloat16) else torch.bfloat16


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters to ``dtype``. Buffers stay as they were loaded, as in training: rotary tables need their fp32."""
    for param in model.parameters():
        if param.is_floating_point() and not is_packed(param) and param.dtype != dtype and not buffers_of([param]):
            param.data = param.data.to(dtype)
            param.grad = None


def _place_of_whole(
    model: nn.Module, config: InferenceConfig, dtype: torch.dtype, device: torch.device
) -> torch.device:
    """Where weights lie between the checkpoint and what becomes of them: on ``device`` if they fit and may stay."""
    if config.zero:
        return torch.device("cpu")
    if config.quant_bits is not None and device.type == "cuda":
        whole = sum(param.numel() for param in model.parameters()) * dtype.itemsize
        if whole > _SHARE_OF_FREE * torch.cuda.mem_get_info(device)[0]:
            return torch.device("cpu")  # layer after layer goes up and is packed there
    return device


def _zero_engine(model: nn.Module, config: InferenceConfig, dtype: torch.dtype) -> CoreEngine:
    init_distributed()
    source: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": dict(config.zero)}
    if config.quant_bits is not None:
        later = config.quant.weight.post_init_quant
        source["weight_quantization"] = {"quantized_initialization": _options(config), "post_init_quant": later}
    if config.tensor_parallel.enabled and config.tensor_parallel.tp_size > 1:  # divided already: it is told how
        source["tensor_parallel"] = {"autotp_size": config.tensor_parallel.tp_size}
    if dtype is not torch.float32:
        source["bf16" if dtype is torch.bfloat16 else "fp16"] = {"enabled": True}
    return build_engine(
        model,
        source,
        optimizer=None,
        model_parameters=None,
        training_data=None,
        lr_scheduler=None,
        mpu=None,
        mesh_param=None,
        collate_fn=None,
        compiled=False,
        engine_type=CoreEngine,
        optimizer_type=ShardedOptimizer,
    )


def _options(config: InferenceConfig) -> dict[str, Any]:
    """``quantized_initialization`` of what the configuration says of its weights."""
    weight = config.quant.weight
    options = {"num_bits": config.quant_bits, "symmetric": weight.q_type == "symmetric"}
    return {**options, **weight.quantized_initialization}


def _quantize(model: nn.Module, config: InferenceConfig, device: torch.device) -> None:
    """On a GPU linear layers by torchao, where it is installed and the options are plain; all others, and experts, in
    blocks.

    Layer after layer goes to ``device`` and is packed there, which never holds all of them in 16 bits.
    """
    weight = config.quant.weight
    plain = weight.q_type == "symmetric" and not weight.quantized_initialization and not weight.post_init_quant
    done = []
    if plain and _is_gpu(device) and has_torchao():
        done = quantize_by_torchao(model, config.quant_bits or 8, tied_weights(model), device)
    choose = choice_of(_options(config), weight.post_init_quant, "/quant/weight")
    assert choose is not None
    if has_stacks(model):
        from ds_hf.engine.modules.quantized.stacks import quantize_experts

        done += quantize_experts(model, choose, ExpertParallelSection(), device=device, trains=False)
    if not [*done, *quantize_layers(model, choose, device=device)]:
        log_once(f"init_inference: {type(model).__name__} has no layer to quantize")


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _use_kernels(model: Any) -> None:
    """transformers' own replacement of layers by kernels of the hub, where its library is installed."""
    if importlib.util.find_spec("kernels") is None or not hasattr(model, "kernelize"):
        return
    try:
        model.use_kernels = True
    except Exception as error:  # no network, no kernel for this device
        log_once(f"init_inference: transformers' kernels are not used: {(str(error) or 'error').splitlines()[0]}")
