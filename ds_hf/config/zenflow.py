"""Rules of ``zero_optimization.zenflow``, which puts updates off: not where there are none, or something else does."""

from __future__ import annotations

from ds_hf.config.source import Draft
from ds_hf.config.types.root import Config

__all__ = ["check_zenflow"]


def check_zenflow(config: Config, draft: Draft) -> None:
    """Collect what the section cannot be combined with; what the engine alone can know, it refuses itself."""
    section, base, own = config.zero_optimization.zenflow, "/zero_optimization/zenflow", config.ds_hf.offload
    if section is None:
        return
    zero, every, often = config.zero_optimization, section.update_interval, section.select_interval
    if zero.offload_optimizer.device != "cpu":
        message = (
            f'zenflow is for optimizer states in host memory, and their device is "{zero.offload_optimizer.device}"'
        )
        draft.fault(base, message, 'add "offload_optimizer": {"device": "cpu"}, or remove zenflow')
    if zero.stage == 3 and zero.offload_param.device == "nvme":
        message = (
            "zenflow changes some columns in every step, and parameters in files would be read and written for them"
        )
        draft.fault("/zero_optimization/offload_param/device", message, 'give "cpu", or remove zenflow')
    if config.optimizer is not None and config.optimizer.type.lower() not in ("adam", "adamw"):
        draft.fault("/optimizer/type", f"zenflow is for Adam and AdamW, not for {config.optimizer.type}",
                    'take "AdamW", or remove zenflow')  # fmt: skip
    if section.select_strategy != "auto" and isinstance(often, str):
        draft.fault(f"{base}/select_interval", f'"{section.select_strategy}" needs a number', "give one")
    if section.select_strategy == "auto" and not isinstance(often, str):
        message = "no effect: with select_strategy auto the columns are chosen again once an epoch"
        draft.warn(f"{base}/select_interval", message, 'set "select_strategy": "step" or "epoch", or remove it')
    if section.select_strategy == "step" and isinstance(every, int) and isinstance(often, int) and often < every:
        message = f"columns would be chosen every {often} steps, and all are updated every {every}"
        draft.fault(f"{base}/select_interval", message, f"give at least {every}")
    if section.topk_ratio == 1:
        message = "the device updates every column in every step: its memory holds all states, and offload saves none"
        draft.warn(f"{base}/topk_ratio", message, "give less, such as 0.1, or remove zenflow and offload_optimizer")
    for name, narrow in (("fp16", config.fp16.fp16_master_weights_and_grads),
                         ("bf16", config.bf16.bf16_master_weights_and_grads)):  # fmt: skip
        if narrow:
            draft.fault(f"/{name}/{name}_master_weights_and_grads", "zenflow keeps master weights in fp32", "remove it")
    if not zero.compute_grad_norm:
        draft.fault("/zero_optimization/compute_grad_norm", "zenflow needs the norm of each step", "remove it")
    if own.delayed:
        draft.fault("/ds_hf/offload/delayed", "zenflow delays updates in its own way", 'use "overlap_step" in zenflow')
    if own.stream not in ("auto", 0.0) or own.ratio is not None:
        draft.warn("/ds_hf/offload", "no effect: zenflow says what the device updates", "remove it")
    if zero.offload_optimizer.ratio < 1:
        draft.warn("/zero_optimization/offload_optimizer/ratio",
                   "no effect: zenflow says what the device updates", "remove it")  # fmt: skip
