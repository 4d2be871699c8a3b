"""Hooks on transformers' checkpoint upon a signal (``enable_jit_checkpoint``).

By itself each process saves when its own signal has come: at different steps, or not at all on the others, which then
wait for it; and before a step is counted that the engine has already made. Here all processes ask each other at the end
of each step, save together, and wait until the files are whole. SIGUSR1, which Slurm can be asked to send, counts too.
"""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from ds_hf.hf.autoload import wrap
from ds_hf.hf.loss import Args, Kwargs, Wrapped, engine_of

__all__ = ["wrap_jit_checkpoint"]

_SINCE, _NAME, _END = "_ds_hf_since", "_ds_hf_name", "_ds_hf_end"


def wrap_jit_checkpoint(module: ModuleType) -> None:
    """Hook of ``transformers.trainer_jit_checkpoint``."""
    wrap(module, "CheckpointManager.setup_signal_handler", _also_usr1)
    wrap(module, "CheckpointManager._sigterm_handler", _note)
    wrap(module, "JITCheckpointCallback.on_step_end", _at_step_end)
    for name in ("on_pre_optimizer_step", "on_step_begin", "on_epoch_end"):
        wrap(module, f"JITCheckpointCallback.{name}", _not_here)
    wrap(module, "JITCheckpointCallback.on_train_end", _give_back)


def _also_usr1(wrapped: Wrapped, manager: Any, args: Args, kwargs: Kwargs) -> Any:
    free = signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL and manager.trainer.args.deepspeed_plugin is not None
    if free and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, manager._sigterm_handler)
    return wrapped(*args, **kwargs)


def _note(wrapped: Wrapped, manager: Any, args: Args, kwargs: Kwargs) -> Any:
    """When the first signal came; a second one changes nothing."""
    if _SINCE in vars(manager):
        return None
    vars(manager)[_SINCE] = time.monotonic()
    vars(manager)[_NAME] = signal.Signals(args[0] if args else kwargs["signum"]).name
    return wrapped(*args, **kwargs)


def _not_here(wrapped: Wrapped, callback: Any, args: Args, kwargs: Kwargs) -> Any:
    return wrapped(*args, **kwargs) if engine_of(callback.trainer) is None else None


def _at_step_end(wrapped: Wrapped, callback: Any, args: Args, kwargs: Kwargs) -> Any:
    trainer, manager = callback.trainer, callback.jit_manager
    engine = engine_of(trainer)
    if engine is None or manager is None:
        return wrapped(*args, **kwargs)
    control = args[2] if len(args) > 2 else kwargs["control"]
    from ds_hf.engine.checkpoint.signals import AgreedEnd

    end = vars(manager).get(_END)
    if end is None or end.axis is not engine.mesh.world:
        end = vars(manager)[_END] = AgreedEnd(engine.mesh.world, engine.settings.ds_hf.checkpoint.grace)
    began = time.monotonic()
    elapsed = end.seconds(vars(manager).get(_SINCE) if manager.is_checkpoint_requested else None)
    if elapsed is None:
        times = engine.checkpoint_writer.times
        end.forewarn(None if times is None else times.written, patience=manager.kill_wait)
        return None
    control.should_save = control.should_evaluate = False
    control.should_training_stop = True
    manager.execute_jit_checkpoint()
    engine.wait_for_checkpoint()
    name = vars(manager).get(_NAME, "a signal to another process")
    folder = Path(trainer._get_output_dir(trial=None), f"checkpoint-{trainer.state.global_step}")
    end.told(folder, elapsed + time.monotonic() - began, name)
    return None


def _give_back(wrapped: Wrapped, callback: Any, args: Args, kwargs: Kwargs) -> Any:
    manager = callback.jit_manager
    if manager is not None and signal.getsignal(signal.SIGUSR1) == manager._sigterm_handler:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    return wrapped(*args, **kwargs)
