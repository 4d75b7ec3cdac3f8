"""An interpreter that has imported PyTorch and forks a child for each program that it is asked to run.

`python -m tests.interpreter SOCKET MODULE...` imports the modules, listens, and ends with its standard input.
tests/processes.py starts it and asks it; nothing of pytest's is imported here, nor of ours.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import sys
import threading
import types
from typing import Any

# What stands for `python` in commands: it hands its arguments, streams, folder, variables and limits to the process that
# listens, passes signals on, and ends as the child ended. It imports next to nothing, and is there in 20 ms.
CLIENT = """#!{python} -IS
import json, os, resource, signal, socket, sys
asked = dict(arguments=sys.argv[1:], folder=os.getcwd(), variables=dict(os.environ))
asked["limits"] = [[n, *resource.getrlimit(getattr(resource, n))] for n in dir(resource) if n.startswith("RLIMIT_")]
asked["ignored"] = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) == signal.SIG_IGN]
asked = json.dumps(asked).encode()
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
socket.send_fds(server, [len(asked).to_bytes(4, "big")], [0, 1, 2])
server.sendall(asked)
for number in (signal.SIGINT, signal.SIGTERM):
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, lambda number, frame: server.send(bytes([number])))
status = int(server.recv(16) or b"70")
if status < 0:
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


def run_program(arguments: list[str]) -> None:
    """`-c CODE`, `-m MODULE` or a file, with what follows, as the interpreter itself runs them."""
    first, *others = arguments
    if first == "-c":
        code, *others = others
        sys.argv = ["-c", *others]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        sys.path.insert(0, "")
        exec(compile(code, "<string>", "exec"), vars(main))
    elif first == "-m":
        module, *others = others
        sys.argv = [module, *others]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(first)))
        runpy.run_path(first, run_name="__main__")


def end_as_python_ends() -> int:
    """Threads are waited for, what was registered is run, and output that cannot be written is told."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    status = 0
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError) as error:
            status = 120
            with contextlib.suppress(OSError):
                sys.stderr.write(f"Exception ignored in: {stream!r}\n{type(error).__name__}: {error}\n")
    return status


def become(asked: dict[str, Any], streams: list[int]) -> None:
    """In a child: the program that was asked for, to the end of this process."""
    status = 1
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.closerange(3, 256)
        os.chdir(asked["folder"])
        os.environ.clear()
        os.environ.update(asked["variables"])
        added = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place not in sys.path]
        sys.path[:0] = added
        for limit, *values in asked["limits"]:
            resource.setrlimit(getattr(resource, limit), tuple(values))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for number in asked["ignored"]:
            signal.signal(number, signal.SIG_IGN)
        run_program(asked["arguments"])
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if status and not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        with contextlib.suppress(BaseException):
            status = end_as_python_ends() or status
        os._exit(status)


def watch_over(child: int, asker: socket.socket) -> None:
    """Signals that come from who asked are the child's; where nobody waits any longer, the child is killed."""
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            with contextlib.suppress(OSError):
                asker.send(b"%d" % os.waitstatus_to_exitcode(status))
            return
        if select.select([asker], [], [], 0.005)[0]:
            os.kill(child, (asker.recv(1) or bytes([signal.SIGKILL]))[0])


def serve(address: str) -> None:
    door = socket.socket(socket.AF_UNIX)
    door.bind(address)
    door.listen(16)
    print("listening", flush=True)
    while 0 not in (ready := select.select([0, door], [], [], 0.2)[0]):
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not ready:
            continue
        asker, _ = door.accept()
        head, streams, *_ = socket.recv_fds(asker, 4, 3)
        with asker.makefile("rb") as sent:
            asked = json.loads(sent.read(int.from_bytes(head, "big")))
        for module in asked.get("modules", ()):
            importlib.import_module(module)
        gc.freeze()
        if not os.fork():
            if not (child := os.fork()):
                become(asked, streams)
            door.close()
            for stream in streams:
                os.close(stream)
            watch_over(child, asker)
            os._exit(0)
        asker.close()
        for stream in streams:
            os.close(stream)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    serve(sys.argv[1])
