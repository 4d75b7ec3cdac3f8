"""A training run as a page: layers by steps, the loss above, warnings as marks. `serve` keeps it up to date while the run goes on."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import math
import os
import threading
import time
import webbrowser
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np

from locater.errors import LocaterError
from locater.findings import EXPLODING, FLAGS
from locater.report.html import assemble, short_name
from locater.report.log import Record, Run, RunReader, find_log
from locater.version import __version__

VALUES = 2_050_000  # numbers on one page: two bytes each, a third more as text
MOST_STEPS = 2_000
MOST_LOSSES = 1_500
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src 'self'"
MOST_MARKS = 50  # beginnings kept of one head's warnings of one kind


def watch_page(run: Run, live: bool = False) -> str:
    """One self-contained page. `live` adds the polling that `serve` answers; without it the page is a document."""
    drawn, stride = thin(run)
    return assemble_page(short_name(str(run.header.get("source", "run"))), pack(run, drawn, stride), live)


def assemble_page(name: str, data: dict[str, Any], live: bool) -> str:
    """The page around packed data, which may still be empty when `live`."""
    flags = {f.name: {"meaning": f.meaning, "way_out": f.way_out, "severity": f.severity, "needs": f.needs} for f in FLAGS}
    words = {"TITLE": f"{name} · Locater", "HEADING": name, "FOOTER": f"Made by Locater {__version__} from a run's log."}
    return assemble("watch", words, {"live": live, "flags": flags, "exploding": EXPLODING, **data})


def thin(run: Run) -> tuple[list[Record], int]:
    """The observed steps that are drawn: every n-th, the last, and those where a warning began; and n."""
    heads = sum(entry["heads"] for entry in run.header["layers"])
    most = max(2, min(MOST_STEPS, VALUES // max(1, heads * len(columns(run)))))
    stride = math.ceil(len(run.steps) / most) if len(run.steps) > most else 1
    began = sorted({group["steps"][0] for group in group_warnings(run)})[: most // 16] if stride > 1 else []
    last = len(run.steps) - 1
    return [record for i, record in enumerate(run.steps) if i % stride == 0 or i == last or record["step"] in began], stride


def columns(run: Run) -> list[str]:
    """Columns in the order of the header, then those that only steps name."""
    found = dict.fromkeys(run.header["columns"])
    for record in run.steps[:1] + run.steps[-1:]:
        found |= dict.fromkeys(record["heads"])
    return list(found)


def pack(run: Run, drawn: Sequence[Record], stride: int, keep: int = 0) -> dict[str, Any]:
    """What the page's script reads; of the steps only those from number `keep` on, because it has the others."""
    new, names = drawn[keep:], columns(run)
    values = {name: _halves(run, new, name) for name in names if any(name in record["heads"] for record in new)}
    scalars = sorted({name for record in new for name in record["scalars"]})
    layers = run.header["layers"]
    return {
        "name": short_name(str(run.header.get("source", "run"))), "every": run.header.get("every"),
        "layers": [{"short": str(e["layer"]), "name": e["name"], "heads": e["heads"], "kind": e.get("kind", "self")} for e in layers],
        "columns": names, "keep": keep, "steps": [record["step"] for record in new], "values": values,
        "scalars": {name: [_digits(record["scalars"].get(name)) for record in new] for name in scalars},
        "loss": [[step, _digits(loss)] for step, loss in thin_losses(run.losses)],
        "warnings": group_warnings(run), "resumed": run.resumed, "ended": run.ended, "last": run.last,
        "observed": len(run.steps), "stride": stride,
    }  # fmt: skip


def _halves(run: Run, steps: Sequence[Record], name: str) -> list[Any]:
    """[scale, text]: one column of some steps as half-precision numbers over a scale, heads after layers after steps; NaN for null."""
    empty: list[list[None]] = [[None] * entry["heads"] for entry in run.header["layers"]]
    table = np.array(
        [
            [x for row, none in zip(record["heads"].get(name) or empty, empty, strict=True) for x in (none if row is None else row)]
            for record in steps
        ],
        dtype=np.float64,
    )
    table[~np.isfinite(table)] = np.nan
    largest = float(np.nanmax(np.abs(table))) if np.isfinite(table).any() else 0.0
    scale = 2.0 ** (math.frexp(largest)[1] - 15) if largest > 0 else 1.0  # the largest comes to lie just below 2^15
    return [scale, base64.b64encode((table / scale).astype("<f2").tobytes()).decode()]


def thin_losses(losses: Sequence[tuple[int, float | None]]) -> list[tuple[int, float | None]]:
    """At most MOST_LOSSES points: of every stretch its lowest and its highest, so that a spike stays; and a loss that is no number."""
    if len(losses) <= MOST_LOSSES:
        return list(losses)
    width, kept = math.ceil(2 * len(losses) / MOST_LOSSES), {losses[0][0]: losses[0][1], losses[-1][0]: losses[-1][1]}
    for start in range(0, len(losses), width):
        part = losses[start : start + width]
        known = [(loss, step) for step, loss in part if loss is not None]
        kept |= {step: loss for loss, step in (min(known), max(known))} if known else {}
        kept |= dict(next(([pair] for pair in part if pair[1] is None), []))
    return sorted(kept.items())


def group_warnings(run: Run) -> list[dict[str, Any]]:
    """One entry per head and flag: the steps where it began, the last, how often, the worst value, the threshold, the first message."""
    places = {entry["layer"]: place for place, entry in enumerate(run.header["layers"])}
    before = dict(zip([record["step"] for record in run.steps[1:]], [record["step"] for record in run.steps], strict=False))
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for record in run.warnings:
        key = (record["layer"], record["head"], record["flag"])
        group = found.setdefault(key, {
            "layer": places.get(record["layer"]), "head": record["head"], "flag": str(record["flag"]), "steps": [], "count": 0,
            "threshold": _digits(record.get("threshold")), "worst": None, "message": str(record.get("message", "")),
        })  # fmt: skip
        if not group["count"] or (before.get(record["step"]) != group["last"] and len(group["steps"]) < MOST_MARKS):
            group["steps"].append(record["step"])  # not raised at the observed step before: it begins here
        group["count"] += 1
        group["last"] = record["step"]
        group["worst"] = _digits(_worse(group["worst"], record.get("value"), record.get("threshold")))
    return list(found.values())


def _worse(a: float | None, b: float | None, threshold: float | None) -> float | None:
    """The one that lies farther beyond the threshold."""
    known = [x for x in (a, b) if x is not None]
    return max(known, key=lambda x: abs(x - (threshold or 0.0)), default=None)


def _digits(x: Any) -> float | None:
    """Five significant digits, and nothing that JSON cannot hold."""
    return float(f"{x:.5g}") if isinstance(x, int | float) and math.isfinite(x) else None


# ---- live ----


class Follower:
    """Reads a log as it grows, and says what a page that knows revision `after` lacks."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self._revision = time.time_ns() // 1_000_000  # so that a page of an earlier server is not taken for one of ours
        self._sent: dict[int, list[Record]] = {}  # the steps that were drawn at the last few revisions
        self._restart()

    def _restart(self) -> None:
        self._reader: RunReader | None = None
        self._offset, self._file, self._changed, self._error = 0, (0, 0), 0.0, ""

    def look(self) -> None:
        """Read what has been written since the last look, up to the last whole line."""
        log = find_log(self.path)
        if log is None:
            return
        with log.open("rb") as file:
            held = os.fstat(file.fileno())
            if (held.st_dev, held.st_ino) != self._file or held.st_size < self._offset:  # another file under this name
                self._restart()
                self._file, self._reader = (held.st_dev, held.st_ino), RunReader(log)
            self._changed = held.st_mtime
            file.seek(self._offset)
            lines, _, _ = file.read().rpartition(b"\n")
        if lines and self._reader is not None and not self._error:
            self._offset += len(lines) + 1
            self._revision += 1
            try:
                self._reader.feed(lines.split(b"\n"))
            except LocaterError as error:
                self._error = str(error)
                raise

    def answer(self, after: int) -> dict[str, Any]:
        """`waiting` before the first record, `error` for what is no log, else what has come since; `age` in seconds."""
        with self._lock:
            try:
                self.look()
            except (LocaterError, OSError) as error:
                return {"error": str(error)}
            if self._error:  # a line that is no record: nothing below it can be trusted until the file is another
                return {"error": self._error}
            run = self._reader.run() if self._reader is not None else None
            if run is None:
                return {"waiting": str(self.path)}
            about = {"revision": self._revision, "age": max(0.0, round(time.time() - self._changed, 1))}
            if after == self._revision:
                return about
            drawn, stride = thin(run)
            keep = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] is pair[1], zip(self._sent.get(after, []), drawn, strict=False)))
            self._sent = {**dict(list(self._sent.items())[-3:]), self._revision: drawn}
            return {**about, **pack(run, drawn, stride, keep)}


class Server(ThreadingHTTPServer):
    """The page at /, what it lacks at /run.json?after=REVISION; on this machine only."""

    daemon_threads = True

    def __init__(self, path: str | os.PathLike[str], port: int = 0) -> None:
        self.follower = Follower(path)
        self.follower.look()  # what is no log is refused before anything is served
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except (OSError, OverflowError) as error:
            raise LocaterError(f"port {port} cannot be opened ({error}): choose another with --port, or 0 for any") from None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if host not in ("127.0.0.1", "localhost"):  # another site's name that leads here
            self._send(403, "text/plain", "this page is served to its own machine only")
            return
        url = urlsplit(self.path)
        if url.path == "/":
            name = self.server.follower.path.name
            self._send(200, "text/html", assemble_page(name, {"waiting": str(self.server.follower.path)}, live=True))
        elif url.path == "/run.json":
            after = parse_qs(url.query).get("after", ["0"])[0]
            found = self.server.follower.answer(int(after) if after.isdecimal() else 0)
            self._send(200, "application/json", json.dumps(found, separators=(",", ":"), allow_nan=False))
        else:
            self._send(404, "text/plain", "nothing here")

    def _send(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in (("Content-Type", f"{kind}; charset=utf-8"), ("Content-Length", str(len(body))), ("Cache-Control", "no-store")):
            self.send_header(name, value)
        self.send_header("Content-Security-Policy", POLICY)
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # the reader has closed the page
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet: a line every two seconds helps nobody."""


def serve(path: str | os.PathLike[str], port: int = 0, open_browser: bool = False) -> None:
    """Serve the page of a run at 127.0.0.1 while it goes on; Ctrl-C stops. A log that does not exist yet is waited for."""
    with Server(path, port) as server:
        print(f"Watching {path} at {server.address} (Ctrl-C stops)", flush=True)
        if open_browser:
            webbrowser.open(server.address)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
