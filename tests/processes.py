"""Processes that start with everything imported: forked from this one, where a fresh interpreter would import for
seconds.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT


def hears_interrupts() -> None:
    """In a child, before its program: Ctrl-C ends it, as on a terminal. What a shell starts in the background, or nohup,
    ignores interrupts and hands that down.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def forked(work: Callable[[], Any], log: Path, variables: Mapping[str, str] | None = None) -> int:
    """Start `work` in a child with these environment variables; what it prints goes to `log`. The child's number."""
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - until the child ends
        os.environ.update(variables or {})
        work()
        status = 0
    except SystemExit as stop:  # a command that ends as commands do
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)  # nothing of pytest's is run to its end here, and gloo's threads cannot abort it


def finished(children: Mapping[int, Path], seconds: float = 120) -> list[str]:
    """What each child printed, once all have ended; fails with it where one failed or takes too long."""
    running, failed = set(children), False
    end = time.monotonic() + seconds
    while running and not failed and time.monotonic() < end:
        for child in list(running):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                running.remove(child)
                failed |= status != 0
        time.sleep(0.01)
    for child in running:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    texts = [log.read_text() for log in children.values()]
    assert not running, "\n".join(texts)
    assert not failed, "\n".join(texts)
    return texts


def ranks(work: Callable[[int], Any], folder: Path, count: int = 2, seconds: float = 120) -> list[str]:
    """`work(rank)` in processes of one gloo group, over the loopback device; what each printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_USE_CPU": "true",
    }
    children = {}
    for rank in range(count):
        log = folder / f"rank-{rank}.txt"
        children[forked(lambda rank=rank: work(rank), log, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})] = (
            log
        )
    return finished(children, seconds)


INTERPRETER = """
import importlib, json, os, sys, traceback
import torch
torch.set_num_threads(1)
for line in sys.stdin:
    module, call, log = json.loads(line)
    t = importlib.import_module(module)
    child = os.fork()
    if not child:
        status = 1
        try:
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            exec(call)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    print(os.waitpid(child, 0)[1], flush=True)
"""
_interpreter: subprocess.Popen[str] | None = None


def interpreted(module: str, call: str) -> None:
    """Run `call`, in which `t` is the test module, with Triton's kernels interpreted on the CPU: in a fork of a process
    that was started for this, because the switch is read when Triton is imported.
    """
    pytest.importorskip("triton", reason="Triton is only made for Linux")
    global _interpreter
    if _interpreter is None or _interpreter.poll() is not None:
        variables = {**os.environ, "TRITON_INTERPRET": "1"}
        _interpreter = subprocess.Popen(
            [sys.executable, "-c", INTERPRETER],
            env=variables,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    assert _interpreter.stdin is not None
    assert _interpreter.stdout is not None
    with tempfile.NamedTemporaryFile("r") as log:
        print(json.dumps([module, call, log.name]), file=_interpreter.stdin, flush=True)
        status = _interpreter.stdout.readline().strip()
        assert status == "0", log.read()[-3000:] or f"{module}: {call}: ended with status {status}"


def end_interpreter() -> None:
    """When all tests of this process are done."""
    if _interpreter is not None:
        _interpreter.communicate()
