"""A training run as a page: layers by steps, the loss above, warnings as marks.

`serve` keeps the page up to date while the run goes on.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import socket
import sys
import threading
import time
import webbrowser
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qs, urlsplit

from locater.errors import LocaterError
from locater.findings import EXPLODING, FLAGS
from locater.redacted_and_escaped_text import one_line
from locater.report.pages import assemble, flag_table, short_name
from locater.runs.page_data import VALUES, Curve, pack, thin
from locater.runs.records import Record
from locater.runs.run_log import Run, RunReader, find_log, lines_of
from locater.runs.verdict import LossCourse
from locater.version import __version__

# ---- the log of a run while it grows, and what is new in it since the last request of a live page ----

FINGERPRINT = 4_096  # bytes at both ends of the part that was read; they identify the file


class LogFollower:
    """Follows one log. Each reading costs as much as what was appended since the last one, not as the whole file."""

    def __init__(self, path: str | os.PathLike[str], room: int = VALUES) -> None:
        self.path = Path(path)
        self.room = room  # numbers that a page has room for
        self._lock = threading.Lock()
        self._revision = time.time_ns() // 1_000_000  # differs from those of an earlier server
        self._log: Path | None = None  # the log in the folder; stays the same if others appear next to it
        self._restart()

    def _restart(self) -> None:
        self._reader: RunReader | None = None
        self._offset, self._file, self._changed, self._error = 0, (0, 0), 0.0, ""
        self._fingerprint = b"", b""  # of the part that has been read
        self._sent: dict[int, list[Record]] = {}  # the steps drawn at the last few revisions
        self._curves: dict[str, Curve] = {}
        self._course = LossCourse()
        self._drawn: dict[int, tuple[Record, Record]] = {}  # by step: a record without and with numbers of heads
        self._rewrites = 0

    def read_new_lines(self) -> None:
        """Read what was written since the last call, up to the last complete line."""
        if self._log is None or not self._log.is_file():
            self._log = find_log(self.path)
        log = self._log
        if log is None:
            return
        with log.open("rb") as file:
            status = os.fstat(file.fileno())
            if (
                (status.st_dev, status.st_ino) != self._file
                or status.st_size < self._offset
                or self._fingerprint_of(file) != self._fingerprint
            ):
                self._restart()  # another file under this name, or the same one rewritten
                self._file, self._reader = (status.st_dev, status.st_ino), RunReader(log, stored=True)
            self._changed = status.st_mtime
            if self._reader is None or self._error or status.st_size == self._offset:
                return
            self._read_on(file, self._reader, log)

    def _read_on(self, file: BinaryIO, reader: RunReader, log: Path) -> None:
        before = self._offset
        file.seek(before)
        try:
            reader.feed(self._complete_lines(file, log))
        except LocaterError as error:
            self._error, self._fingerprint = str(error), self._fingerprint_of(file)
            raise
        if self._offset > before:
            self._revision += 1
            self._fingerprint = self._fingerprint_of(file)
        elif before == 0:
            _check_beginning(file, log)

    def _complete_lines(self, file: BinaryIO, log: Path) -> Iterator[bytes]:
        for line in lines_of(file, log):
            if not line.endswith(b"\n"):
                return
            self._offset += len(line)
            yield line

    def _fingerprint_of(self, file: BinaryIO) -> tuple[bytes, bytes]:
        """Beginning and end of the part that has been read. Appending changes neither."""
        size = min(FINGERPRINT, self._offset)
        file.seek(0)
        head = file.read(size)
        file.seek(self._offset - size)
        return head, file.read(size)

    def waiting(self) -> str:
        """Why there is nothing to draw yet; empty once there is a run."""
        if self._reader is None:
            return f"no log in {self.path} yet" if self.path.is_dir() else f"{self.path} does not exist yet"
        if self._reader.header is not None:
            return ""
        if self._reader.incomplete:
            raise LocaterError(
                f"{self._reader.path}: not a run log: line {self._reader.incomplete} is not a run record"
            )
        empty = not self._reader.path.stat().st_size
        return f"{self._reader.path} {'is empty' if empty else 'has no whole line yet'}"

    def answer(self, after: int) -> dict[str, Any]:
        """What is new for a page at revision `after`, and the `age` of the log in seconds.

        It has the key `waiting` before the first record, and `error` for a file that is not a log.
        """
        with self._lock:
            try:
                self.read_new_lines()
                if self._error:  # nothing after a bad line can be trusted until the file is replaced
                    return {"error": self._error}
                if self.waiting() or self._reader is None:
                    return {"waiting": str(self.path)}
            except (LocaterError, OSError) as error:
                return {"error": str(error)}
            state = {"revision": self._revision, "age": max(0.0, round(time.time() - self._changed, 1))}
            return state if after == self._revision else {**state, **self._news(self._reader, after)}

    def _news(self, reader: RunReader, after: int) -> dict[str, Any]:
        run = reader.run()
        assert run is not None
        if reader.rewrites != self._rewrites:
            self._curves, self._rewrites, self._course = {}, reader.rewrites, LossCourse()
        for name, points in reader.curves.items():
            curve = self._curves.setdefault(name, Curve())
            for point in points[curve.count :]:
                curve.add(point)
        self._course.extend(run.losses[self._course.count :])
        drawn, stride = thin(run, self.room)
        pairs = zip(self._sent.get(after, []), drawn, strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] is pair[1], pairs))
        self._sent = {**dict(list(self._sent.items())[-3:]), self._revision: drawn}
        self._read_heads(reader, drawn)
        drawn_run = replace(run, with_heads=lambda records: [self._drawn[record["step"]][1] for record in records])
        return pack(drawn_run, drawn, stride, same, self._curves, self._course)

    def _read_heads(self, reader: RunReader, drawn: list[Record]) -> None:
        """Keep the numbers of the drawn steps and no others, since a page has room for only so many."""
        kept = {record["step"]: self._drawn.get(record["step"], (None, record)) for record in drawn}
        missing = [record for record in drawn if kept[record["step"]][0] is not record]
        found = reader.with_heads(missing) if missing else []  # the log may be gone
        read = dict(zip((record["step"] for record in missing), found, strict=True))
        self._drawn = {x["step"]: (x, read[x["step"]] if x["step"] in read else kept[x["step"]][1]) for x in drawn}


def _check_beginning(file: BinaryIO, log: Path) -> None:
    file.seek(0)
    start = file.read(64).lstrip()
    if start and not start.startswith(b"{"):
        raise LocaterError(f"{log}: not a run log: its first line does not begin with a JSON object")


# ---- the page ----


def watch_page(
    run: Run, live: bool = False, other: Run | None = None, names: Sequence[str] = ("first run", "second run")
) -> str:
    """One self-contained page. With `live` it polls the server that `serve` starts; without, it is a document.

    The curves of `other` are drawn dashed over those of `run`; `names` are the names of the two. Both share the room
    that a page has for numbers.
    """
    if other is None:
        return run_page(short_name(str(run.header.get("source", "run"))), pack(run, *thin(run)), live)
    first, second = (pack(x, *thin(x, VALUES // 2)) for x in (run, other))
    return run_page(" and ".join(names), {**first, "other": second, "names": list(names)}, live)


def names_apart(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> tuple[str, str]:
    """Names for two runs: the last part of their paths that differs.

    >>> names_apart("runs/small/run.jsonl", "runs/large/run.jsonl"), names_apart("run", "run")
    (('small', 'large'), ('first run', 'second run'))
    """
    pairs = zip(reversed(Path(first).parts), reversed(Path(second).parts), strict=False)
    return next(((a, b) for a, b in pairs if a != b), ("first run", "second run"))


def run_page(name: str, data: dict[str, Any], live: bool) -> str:
    """The page around packed data, which may still be empty when `live`."""
    needs = {flag.name: flag.needs for flag in FLAGS}
    flags = {name: {**entry, "needs": needs[name]} for name, entry in flag_table().items()}
    words = {
        "TITLE": f"{name} · Locater",
        "HEADING": name,
        "FOOTER": f"Made by Locater {__version__} from a run's log.",
    }
    data = {"live": live, "flags": flags, "exploding": EXPLODING, **data}
    connect = "'self'" if live else ""
    return assemble("watch", words, data, scripts=("steps.js",), styles=("steps.css",), connect=connect)


# ---- live ----

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src 'self'"
POLICY += "; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"  # each page has a stricter one of its own
FILES = ("/run.json", "/other.json")  # news of the first run, and of the second
THREADS = 128  # clients that are answered at the same time; others wait in the backlog
# While others wait, a client is disconnected if it has not sent its whole request, or not read its answer, by then.
REQUEST_SECONDS, ANSWER_SECONDS = 0.4, 1.0
LOOKS = 5  # at a slow client before it is disconnected: a busy machine may be late to read what a fast one sent


@dataclass
class _Client:
    """An open connection."""

    since: float  # since when it is being waited for
    asked: bool = False  # whether it has sent its request
    looks: int = 0  # how often it was found to be slow


class Server(ThreadingHTTPServer):
    """Serves the page at / and its updates at /run.json?after=REVISION, to this machine only.

    Updates of a second run are at /other.json.
    """

    daemon_threads = True
    patience = 10.0  # seconds for a client to send its request and read the answer
    request_queue_size = 1_024  # connections that wait to be accepted; the operating system may allow fewer

    def __init__(
        self, path: str | os.PathLike[str], port: int = 0, other: str | os.PathLike[str] | None = None
    ) -> None:
        paths = [path] if other is None else [path, other]
        self.followers = [LogFollower(x, VALUES // len(paths)) for x in paths]
        for follower in self.followers:
            follower.read_new_lines()  # refuses a file that is not a log before anything is served
        self.waiting = "; ".join(filter(None, (follower.waiting() for follower in self.followers)))
        self._free = threading.BoundedSemaphore(THREADS)
        self._clients: dict[socket.socket, _Client] = {}
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except (OSError, OverflowError) as error:
            raise LocaterError(
                f"port {port} cannot be opened ({error}): choose another with --port, or 0 for any"
            ) from None

    @property
    def follower(self) -> LogFollower:
        """Of the first run."""
        return self.followers[0]

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        while not self._free.acquire(timeout=0.05):
            self._end_slow(REQUEST_SECONDS, ANSWER_SECONDS, LOOKS)
        self._clients[request] = _Client(time.monotonic())
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._forget_client(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget_client(request)

    def _forget_client(self, request: Any) -> None:
        self._clients.pop(request, None)
        self._free.release()

    def request_received(self, request: socket.socket) -> None:
        """A client has sent its request: it is not waited for while the answer is prepared."""
        self._clients[request] = _Client(math.inf, True)

    def answer_ready(self, request: socket.socket) -> None:
        """Its answer is ready to be read."""
        self._clients[request] = _Client(time.monotonic(), True)

    def service_actions(self) -> None:
        """Close connections that take too long altogether: the timeout of a socket starts again with each byte."""
        self._end_slow(self.patience, self.patience)

    def _end_slow(self, to_ask: float, to_take: float, looks: int = 1) -> None:
        now = time.monotonic()
        for request, client in list(self._clients.items()):
            if now - client.since > (to_take if client.asked else to_ask):
                client.looks += 1
                if client.looks >= looks:
                    with contextlib.suppress(OSError):
                        request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Stay quiet if the client went away or took too long."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(self.server.patience)

    def parse_request(self) -> bool:
        whole = super().parse_request()
        self.server.request_received(self.connection)
        return whole

    def do_GET(self) -> None:
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if host not in ("127.0.0.1", "localhost"):  # a foreign name that resolves to this machine
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
            empty = [{"waiting": str(follower.path)} for follower in self.server.followers]
            data: dict[str, Any] = {**empty[0]}
            if len(empty) == 2:
                names = names_apart(*(follower.path for follower in self.server.followers))
                data |= {"other": empty[1], "names": list(names)}
            self._send(200, "text/html", run_page(self.server.follower.path.name, data, live=True))
        elif url.path in FILES[: len(self.server.followers)]:
            answer = self.server.followers[FILES.index(url.path)].answer(int(after))
            self._send(200, "application/json", json.dumps(answer, separators=(",", ":"), allow_nan=False))
        else:
            self._send(404, "text/plain", "nothing here")

    def _send(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.server.answer_ready(self.connection)
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", POLICY)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the page asks every two seconds, and a line for each request would be noise."""


def serve(
    path: str | os.PathLike[str],
    port: int = 0,
    open_browser: bool = False,
    other: str | os.PathLike[str] | None = None,
) -> None:
    """Serve the page of a run, or of two, at 127.0.0.1 until Ctrl-C. A log may not exist yet: the page waits for it."""
    with Server(path, port, other) as server:
        both = f"{path} and {other}" if other is not None else path
        print(one_line(f"Watching {both} at {server.address} (Ctrl-C stops)"), flush=True)
        if server.waiting:
            print(one_line(f"Waiting for the first line: {server.waiting}"), flush=True)
        if open_browser:
            webbrowser.open(server.address)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
