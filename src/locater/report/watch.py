"""A training run as a page: layers by steps, the loss above, warnings as marks. `serve` keeps it up to date while the
run goes on.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import socket
import sys
import threading
import time
import webbrowser
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qs, urlsplit

from locater.errors import LocaterError
from locater.findings import EXPLODING, FLAGS
from locater.report.scan import assemble, short_name
from locater.report.packing import Curve, pack, thin
from locater.tracking.run_log import Record, Run, RunReader, find_log
from locater.version import __version__

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src 'self'"
PRINT = 4_096  # bytes of the beginning and of the end of what was read, by which a file is known again
THREADS = 64  # clients answered at a time; others wait in the backlog


def watch_page(run: Run, live: bool = False) -> str:
    """One self-contained page. `live` adds the polling that `serve` answers; without it the page is a document."""
    drawn, stride = thin(run)
    return assemble_page(short_name(str(run.header.get("source", "run"))), pack(run, drawn, stride), live)


def assemble_page(name: str, data: dict[str, Any], live: bool) -> str:
    """The page around packed data, which may still be empty when `live`."""
    flags = {
        f.name: {"meaning": f.meaning, "way_out": f.way_out, "severity": f.severity, "needs": f.needs} for f in FLAGS
    }
    words = {
        "TITLE": f"{name} · Locater",
        "HEADING": name,
        "FOOTER": f"Made by Locater {__version__} from a run's log.",
    }
    return assemble("watch", words, {"live": live, "flags": flags, "exploding": EXPLODING, **data})


# ---- live ----


class Follower:
    """Reads a log as it grows, and says what a page that knows revision `after` lacks. Costs what is new, not what is
    there.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self._revision = time.time_ns() // 1_000_000  # so that a page of an earlier server is not taken for one of ours
        self._log: Path | None = None  # once found it is kept, whatever else comes into a folder
        self._restart()

    def _restart(self) -> None:
        self._reader: RunReader | None = None
        self._offset, self._file, self._changed, self._error = 0, (0, 0), 0.0, ""
        self._prints = b"", b""  # of what has been read
        self._sent: dict[int, list[Record]] = {}  # the steps that were drawn at the last few revisions
        self._curves: dict[str, Curve] = {}
        self._rewrites = 0

    def look(self) -> None:
        """Read what has been written since the last look, up to the last whole line."""
        if self._log is None or not self._log.is_file():
            self._log = find_log(self.path)
        log = self._log
        if log is None:
            return
        with log.open("rb") as file:
            held = os.fstat(file.fileno())
            if (
                (held.st_dev, held.st_ino) != self._file
                or held.st_size < self._offset
                or self._print(file) != self._prints
            ):
                self._restart()  # another file under this name, or the same one written anew
                self._file, self._reader = (held.st_dev, held.st_ino), RunReader(log)
            self._changed = held.st_mtime
            if self._reader is None or self._error or held.st_size == self._offset:
                return
            before = self._offset
            file.seek(before)
            try:
                self._reader.feed(self._whole_lines(file))
            except LocaterError as error:
                self._error, self._prints = str(error), self._print(file)
                raise
            if self._offset > before:
                self._revision += 1
                self._prints = self._print(file)
            elif before == 0:
                self._check_beginning(file, log)

    def _whole_lines(self, file: BinaryIO) -> Iterator[bytes]:
        for line in file:
            if not line.endswith(b"\n"):
                return
            self._offset += len(line)
            yield line

    def _print(self, file: BinaryIO) -> tuple[bytes, bytes]:
        """Beginning and end of the part that has been read. An append changes neither."""
        size = min(PRINT, self._offset)
        file.seek(0)
        head = file.read(size)
        file.seek(self._offset - size)
        return head, file.read(size)

    def _check_beginning(self, file: BinaryIO, log: Path) -> None:
        file.seek(0)
        start = file.read(64).lstrip()
        if start and not start.startswith(b"{"):
            raise LocaterError(f"{log}: not a run log: its first line does not begin with a JSON object")

    def waiting(self) -> str:
        """Why there is nothing to draw yet; empty when there is a run."""
        if self._reader is None:
            return f"no log in {self.path} yet" if self.path.is_dir() else f"{self.path} does not exist yet"
        if self._reader.header is not None:
            return ""
        if self._reader.torn:
            raise LocaterError(f"{self._reader.path}: not a run log: line {self._reader.torn} is not a run record")
        return f"{self._reader.path} {'has no whole line yet' if self._reader.path.stat().st_size else 'is empty'}"

    def answer(self, after: int) -> dict[str, Any]:
        """`waiting` before the first record, `error` for what is no log, else what has come since; `age` in seconds."""
        with self._lock:
            try:
                self.look()
                if self._error:  # a line that is no record: nothing below it can be trusted until the file is another
                    return {"error": self._error}
                if self.waiting() or self._reader is None:
                    return {"waiting": str(self.path)}
            except (LocaterError, OSError) as error:
                return {"error": str(error)}
            about = {"revision": self._revision, "age": max(0.0, round(time.time() - self._changed, 1))}
            return about if after == self._revision else {**about, **self._news(self._reader, after)}

    def _news(self, reader: RunReader, after: int) -> dict[str, Any]:
        run = reader.run()
        assert run is not None
        if reader.rewrites != self._rewrites:
            self._curves, self._rewrites = {}, reader.rewrites
        for name, points in reader.curves.items():
            curve = self._curves.setdefault(name, Curve())
            for point in points[curve.count :]:
                curve.add(point)
        drawn, stride = thin(run)
        keep = sum(
            1
            for _ in itertools.takewhile(
                lambda pair: pair[0] is pair[1], zip(self._sent.get(after, []), drawn, strict=False)
            )
        )
        self._sent = {**dict(list(self._sent.items())[-3:]), self._revision: drawn}
        return pack(run, drawn, stride, keep, self._curves)


class Server(ThreadingHTTPServer):
    """The page at /, what it lacks at /run.json?after=REVISION; on this machine only."""

    daemon_threads = True
    patience = 10.0  # seconds for a client to ask and to take its answer
    request_queue_size = 1_024  # connections that wait to be accepted; the operating system may allow fewer

    def __init__(self, path: str | os.PathLike[str], port: int = 0) -> None:
        self.follower = Follower(path)
        self.follower.look()  # what is no log is refused before anything is served
        self.waiting = self.follower.waiting()
        self._free = threading.BoundedSemaphore(THREADS)
        self._since: dict[socket.socket, float] = {}  # connections being answered, and since when
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except (OSError, OverflowError) as error:
            raise LocaterError(
                f"port {port} cannot be opened ({error}): choose another with --port, or 0 for any"
            ) from None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        while not self._free.acquire(timeout=0.5):
            self.service_actions()
        self._since[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._done(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._done(request)

    def _done(self, request: Any) -> None:
        self._since.pop(request, None)
        self._free.release()

    def service_actions(self) -> None:
        """End connections that take too long as a whole; a timeout of the socket alone begins anew with each byte."""
        for request, since in list(self._since.items()):
            if time.monotonic() - since > self.patience:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Quiet where the client went away or took too long."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(self.server.patience)

    def do_GET(self) -> None:
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if host not in ("127.0.0.1", "localhost"):  # another site's name that leads here
            self._send(403, "text/plain", "this page is served to its own machine only")
            return
        try:
            url = urlsplit(self.path)
            after = parse_qs(url.query, max_num_fields=8).get("after", ["0"])[0]
        except ValueError:
            url, after = urlsplit(""), ""
        if not re.fullmatch("[0-9]{1,20}", after):
            self._send(400, "text/plain", "not an address of this page")
        elif url.path == "/":
            name = self.server.follower.path.name
            self._send(200, "text/html", assemble_page(name, {"waiting": str(self.server.follower.path)}, live=True))
        elif url.path == "/run.json":
            self._send(
                200,
                "application/json",
                json.dumps(self.server.follower.answer(int(after)), separators=(",", ":"), allow_nan=False),
            )
        else:
            self._send(404, "text/plain", "nothing here")

    def _send(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in (
            ("Content-Type", f"{kind}; charset=utf-8"),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(name, value)
        self.send_header("Content-Security-Policy", POLICY)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet: a line every two seconds helps nobody."""


def serve(path: str | os.PathLike[str], port: int = 0, open_browser: bool = False) -> None:
    """Serve the page of a run at 127.0.0.1 while it goes on; Ctrl-C stops. A log that does not exist yet is waited
    for.
    """
    with Server(path, port) as server:
        print(f"Watching {path} at {server.address} (Ctrl-C stops)", flush=True)
        if server.waiting:
            print(f"Waiting for the first line: {server.waiting}", flush=True)
        if open_browser:
            webbrowser.open(server.address)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
