"""Work around processors that list AMX but crash when it is used.

On some virtual machines /proc/cpuinfo lists AMX, the kernel grants it and single instructions run, but half-precision
layers still crash with an illegal instruction inside oneDNN. No flag shows this, so a child process tries such a layer.
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

LIMIT = "AVX512_CORE_FP16"  # the largest instruction set of oneDNN without AMX
VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # the new name and the old one
PATIENCE = 60.0  # seconds allowed for a trial
FAULTS = (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS)  # raised by instructions that do not work
TRIAL = "from locater.amx import half_precision_layer; half_precision_layer()"


def avoid_broken_amx(
    probe: Callable[[], int] | None = None, cpuinfo: str | os.PathLike[str] = "/proc/cpuinfo"
) -> str | None:
    """Forbid AMX to oneDNN where half-precision layers crash with it. Returns the message that it prints, or None.

    Call it before the first half-precision operation, because oneDNN reads its limit only once. The limit is an
    environment variable, so child processes inherit it. Nothing is tried or changed where the variable is already set.
    It costs nothing where the processor has no AMX, and 0.05 s where it has. Commands that run a model call it; in
    your own program:

        from locater.amx import avoid_broken_amx
        avoid_broken_amx()

    `probe` runs a layer and returns the number of the signal that ended it, or 0.

    >>> avoid_broken_amx(probe=lambda: 4, cpuinfo="a processor that lists nothing")
    """
    if any(name in os.environ for name in VARIABLES) or not _lists_amx(Path(cpuinfo)):
        return None
    fault = (_default_probe if probe is None else probe)()
    if fault not in FAULTS:  # a child that was killed otherwise, for example out of memory, says nothing about AMX
        return None
    os.environ[VARIABLES[0]] = LIMIT
    message = (
        f"AMX is listed but half-precision layers crash with it here ({signal.Signals(fault).name}): "
        f"continuing without AMX, as with {VARIABLES[0]}={LIMIT} in the environment"
    )
    print(f"locater: {message}", file=sys.stderr)
    return message


def half_precision_layer() -> None:
    """The trial: linear layers in half precision, large enough that oneDNN runs them."""
    import torch

    torch.set_num_threads(1)  # a team of threads does not survive a fork
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.ones(64, 64, dtype=dtype)
        torch.nn.functional.linear(x, x, x[0])


def signal_of(trial: Callable[[], None]) -> int:
    """Run `trial` in a forked child; return the number of the signal that ended it, or 0. An exception is no signal."""
    with warnings.catch_warnings():
        # Python warns of forking with threads; those of a BLAS library are idle here
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
    return 0  # it hung, which is not the fault looked for


@cache
def _default_probe() -> int:
    """Run the trial in a fork where that is safe, else in a new process, which takes seconds."""
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
            flags = next((line for line in lines if line.startswith("flags")), "")  # all processors are alike
    except OSError:  # not Linux
        return False
    return any(flag.startswith("amx") for flag in flags.split())


def _die_quietly() -> None:
    """In the child: no core file, no traceback, no signal handlers of the parent."""
    import resource

    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in FAULTS:
        signal.signal(number, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
