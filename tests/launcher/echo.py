"""A script of tests: writes what it was given to a file of its rank; then does as its first argument says."""

import json
import os
import signal
import subprocess
import sys
import time

NAMES = [
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
]


def main() -> None:
    rank = os.environ["RANK"]
    told = {
        "argv": sys.argv[1:],
        "cores": sorted(os.sched_getaffinity(0)),
        **{name: os.environ[name] for name in NAMES},
    }
    with open(f"out_{rank}_{told['TORCHELASTIC_RESTART_COUNT']}.json", "w") as file:
        json.dump(told, file)
    print(f"rank {rank} is here", flush=True)
    what = next((word for word in sys.argv[1:] if not word.startswith("--local_rank")), "")
    if what == "fail" and rank == "1" and told["TORCHELASTIC_RESTART_COUNT"] == "0":
        sys.excepthook = recorded
        time.sleep(0.5)
        raise ValueError("broken on purpose")
    if what == "save":
        signal.signal(signal.SIGTERM, save)
        time.sleep(600)
    if what in ("fail", "wait", "stubborn"):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "child of " + os.getcwd()])
        if what == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        if told["TORCHELASTIC_RESTART_COUNT"] == "0":
            time.sleep(600)


def save(signum: int, frame: object) -> None:
    """A last checkpoint that takes its time."""
    time.sleep(9)
    with open(f"saved_{os.environ['RANK']}", "w"):
        sys.exit(0)


def recorded(kind: type, error: BaseException, trace: object) -> None:
    """What ds_hf's engine does in a training script."""
    from ds_hf.engine.comm.failure_record import _recording

    _recording(os.environ["TORCHELASTIC_ERROR_FILE"], os.getpid(), sys.__excepthook__)(kind, error, trace)


main()
