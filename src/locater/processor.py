"""Processors that promise more than they do: AMX that is listed and kills whoever uses it.

On some virtual machines /proc/cpuinfo lists AMX, the kernel grants it, single instructions run, and half-precision
layers still end the process with an illegal instruction inside oneDNN. No flag tells; trying does. So a child process
tries.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

LIMIT = "AVX512_CORE_FP16"  # the most that oneDNN can be allowed without AMX
VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # new name and old
PATIENCE = 60.0  # seconds that a trial may take
FAULTS = (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS)  # of instructions that do not work
TRIAL = "from locater.processor import half_precision_layer; half_precision_layer()"


def avoid_broken_amx(
    probe: Callable[[], int] | None = None, cpuinfo: str | os.PathLike[str] = "/proc/cpuinfo"
) -> str | None:
    """Keep oneDNN off AMX where a half-precision layer dies of it. Returns what was done, also said on standard error,
    or None.

    Call it before the first half-precision operation: oneDNN reads its limit once. The limit is an environment
    variable, so child processes have it too, and whoever sets it first, or one of their own choice, is not asked again.
    Costs nothing where the processor has no AMX, and 0.05 s where it has. Commands that run a model call it; in a
    program of your own:

        from locater.processor import avoid_broken_amx
        avoid_broken_amx()

    `probe` tries a layer and returns the number of the signal that ended it, or 0.

    >>> avoid_broken_amx(probe=lambda: 4, cpuinfo="a processor that lists nothing")
    """
    if any(name in os.environ for name in VARIABLES) or not _lists_amx(Path(cpuinfo)):
        return None
    ended = (_default_probe if probe is None else probe)()
    if ended not in FAULTS:  # a child that was killed, as for want of memory, says nothing about AMX
        return None
    os.environ[VARIABLES[0]] = LIMIT
    said = (
        f"AMX is listed and half-precision layers die of it here ({signal.Signals(ended).name}): going on without it, as with "
        f"{VARIABLES[0]}={LIMIT} in the environment"
    )
    print(f"locater: {said}", file=sys.stderr)
    return said


def half_precision_layer() -> None:
    """What dies: linear layers in half precision, large enough that oneDNN takes them."""
    import torch

    torch.set_num_threads(1)  # a team of threads does not survive a fork
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.ones(64, 64, dtype=dtype)
        torch.nn.functional.linear(x, x, x[0])


def signal_of(trial: Callable[[], None]) -> int:
    """Number of the signal that ends a forked child which runs `trial`, or 0; an exception in it is no signal."""
    with warnings.catch_warnings():
        # threads of a BLAS library count as threads; they are not used here
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            _die_quietly()
            trial()
        finally:
            os._exit(0)
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 0  # it hung, which is no sign of AMX


@cache
def _default_probe() -> int:
    """In a fork where that is safe; else in a process that imports PyTorch again, which takes seconds."""
    import torch

    alone = threading.active_count() == 1 and not torch.cuda.is_initialized()
    if alone and not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return signal_of(half_precision_layer)
    try:
        done = subprocess.run([sys.executable, "-c", TRIAL], capture_output=True, timeout=PATIENCE)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return max(0, -done.returncode)


def _lists_amx(cpuinfo: Path) -> bool:
    try:
        with cpuinfo.open(encoding="utf-8", errors="replace") as lines:
            flags = next((line for line in lines if line.startswith("flags")), "")  # the first processor stands for all
    except OSError:  # not Linux
        return False
    return any(flag.startswith("amx") for flag in flags.split())


def _die_quietly() -> None:
    """No core file, no traceback, no handlers of the parent."""
    import resource

    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in FAULTS:
        signal.signal(number, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
