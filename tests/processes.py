"""Processes that start with everything imported: forked from this one, or from an interpreter that was started once, where
a fresh one would import for seconds.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
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
from tests.interpreter import CLIENT


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


DISTRIBUTED = (
    *("locater.control", "torch._dynamo", "torch.distributed.fsdp"),
    *("torch.distributed.tensor.parallel", "torch.distributed.checkpoint.state_dict"),
)


def ranks(work: Callable[[int], Any], folder: Path, count: int = 2, seconds: float = 120) -> list[str]:
    """`work(rank)` in processes of one gloo group, over the loopback device; what each printed."""
    for name in DISTRIBUTED:  # once, and not in every child
        importlib.import_module(name)
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


class Interpreter:
    """Forks what it is asked to run from a process that has imported these modules, under these variables."""

    def __init__(self, *modules: str, **variables: str) -> None:
        self.folder = Path(tempfile.mkdtemp(dir="/tmp"))  # paths of sockets have to be short
        self.address = str(self.folder / "socket")
        self.python = self.folder / "python"
        self.python.write_text(CLIENT.format(python=sys.executable, address=self.address))
        self.python.chmod(0o755)
        self.variables = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **variables}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.interpreter", self.address, *modules],
            env=self.variables,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "listening\n"

    def run(self, module: str, call: str, log: Path) -> int:
        """The status of `call`, in which `t` is the module, which is imported once for all that follows."""
        asked: dict[str, Any] = dict(arguments=["-c", f"import torch, {module} as t\n{call}"], modules=[module])
        asked |= dict(folder=str(ROOT), variables=self.variables, limits=[], ignored=[])
        text = json.dumps(asked).encode()
        with log.open("w") as output, socket.socket(socket.AF_UNIX) as server:
            server.connect(self.address)
            socket.send_fds(server, [len(text).to_bytes(4, "big")], [0, output.fileno(), output.fileno()])
            server.sendall(text)
            return int(server.recv(16) or b"70")

    def spent(self) -> float:
        """Seconds of processor time, with those of the programs that have ended."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        self.process.communicate()
        shutil.rmtree(self.folder)


_interpreters: dict[str, Interpreter] = {}


def python() -> str:
    """A command that runs programs as `sys.executable` does, a second or two sooner: PyTorch is imported already, nothing
    of ours. What asks about the start of the interpreter starts `sys.executable` itself, and so does what counts
    processes or kills them and must know that they are dead at once.
    """
    if not hasattr(os, "fork"):
        return sys.executable
    if "python" not in _interpreters:
        _interpreters["python"] = Interpreter("torch", "jaxtyping", "rich.table", "typer")
    return str(_interpreters["python"].python)


def interpreted(module: str, call: str) -> None:
    """Run `call`, in which `t` is the test module, with Triton's kernels interpreted on the CPU: in a fork of a process
    that was started for this, because the switch is read when Triton is imported.
    """
    pytest.importorskip("triton", reason="Triton is only made for Linux")
    if "triton" not in _interpreters:
        _interpreters["triton"] = Interpreter("torch", TRITON_INTERPRET="1")
    with tempfile.NamedTemporaryFile("r") as log:
        status = _interpreters["triton"].run(module, call, Path(log.name))
        assert status == 0, log.read()[-3000:] or f"{module}: {call}: ended with status {status}"


def spent() -> float:
    """By all of them, which are no ended children of this process yet."""
    return sum(interpreter.spent() for interpreter in _interpreters.values())


def end_interpreters() -> None:
    """When all tests of this process are done."""
    for interpreter in _interpreters.values():
        interpreter.end()
