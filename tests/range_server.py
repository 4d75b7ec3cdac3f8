"""An HTTP server for tests and benchmarks: byte ranges, faults on demand, and as much of the hub's API as is asked for.

    /files/PATH              a plain server of files
    /api/models/..., /ORG/MODEL/resolve/REVISION/PATH    the hub; its large files are redirected to
    /cdn/PATH?until=TIME     a signed address that expires

A model of the hub is a folder ORG/MODEL/REVISION under `root`. Every request is kept in `requests`, and `fault` decides
what goes wrong with it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = (".safetensors", ".bin", ".gguf")  # what the hub keeps as LFS


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    number: int  # of this path, from 1

    @property
    def range(self) -> tuple[int, int] | None:
        if "range" not in self.headers:
            return None
        first, last = self.headers["range"].removeprefix("bytes=").split("-")
        return int(first), int(last) + 1


@dataclass(frozen=True)
class Fault:
    """What goes wrong with a request."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    cut: int | None = None  # bytes of the body after which the connection is closed
    stall: float = 0.0  # seconds before anything is sent
    ranges: bool = True  # False: the whole file in place of a range
    version: str = ""  # another ETag
    shift: int = 0  # bytes from another place than those that were asked for


class RangeServer:
    """Serves the files under `root` at `url`."""

    def __init__(self, root: Path, latency: float = 0.0, port: int = 0) -> None:
        self.root, self.latency = root, latency
        self.requests: list[Request] = []
        self.sent = 0  # bytes of bodies
        self.lifetime = 3600.0  # seconds that a signed address is good for
        self.gated: dict[str, str] = {}  # model -> the token that opens it
        self.commits: dict[Path, str] = {}  # of revisions, where they are not those of their names
        self.fault: Callable[[Request], Fault | None] = lambda request: None
        self.lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"owner": self})
        self._server = _Server(("127.0.0.1", port), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def start(self) -> None:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def reset(self) -> None:
        with self.lock:
            self.requests, self.sent = [], 0

    def data_requests(self) -> list[Request]:
        """Requests for bytes of weights."""
        return [r for r in self.requests if r.range is not None]


@contextmanager
def served(root: Path, latency: float = 0.0) -> Iterator[RangeServer]:
    server = RangeServer(root, latency)
    server.start()
    try:
        yield server
    finally:
        server.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients may close a connection when they like."""


class _Handler(BaseHTTPRequestHandler):
    owner: RangeServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args: object) -> None: ...

    def do_GET(self) -> None:
        owner, parts = self.owner, urlsplit(self.path)
        path = unquote(parts.path)
        with owner.lock:
            number = 1 + sum(r.path == path and r.method == self.command for r in owner.requests)
            request = Request(self.command, path, {k.lower(): v for k, v in self.headers.items()}, number)
            owner.requests.append(request)
        time.sleep(owner.latency)
        fault = owner.fault(request) or Fault()
        time.sleep(fault.stall)
        try:
            if fault.status is not None:
                self._send(fault.status, fault.headers, fault.body)
            elif path.startswith("/files/"):
                self._file(owner.root / path.removeprefix("/files/"), request, fault)
            elif path.startswith("/cdn/"):
                self._signed(path.removeprefix("/cdn/"), parts.query, request, fault)
            elif path.startswith("/api/models/"):
                self._api(path.removeprefix("/api/models/"))
            elif "/resolve/" in path:
                self._resolve(path, request, fault)
            else:
                self._send(404, {})
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_HEAD = do_GET

    def _send(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, document: Any) -> None:
        self._send(200, {"Content-Type": "application/json"}, json.dumps(document).encode())

    def _file(self, path: Path, request: Request, fault: Fault, extra: dict[str, str] | None = None) -> None:
        if not path.is_file():
            self._send(404, {})
            return
        size, etag = path.stat().st_size, f'"{_digest(path)}{fault.version}"'
        if request.headers.get("if-match", etag) != etag:
            self._send(412, {})
            return
        first, stop, status = 0, size, 200
        headers = {"ETag": etag, **(extra or {}), **fault.headers}
        if request.range is not None and fault.ranges:
            first, stop, status = request.range[0] + fault.shift, min(request.range[1] + fault.shift, size), 206
            headers["Content-Range"] = f"bytes {first}-{stop - 1}/{size}"
            if first >= size:
                self._send(416, {"Content-Range": f"bytes */{size}"})
                return
        self.send_response(status)
        for name, value in {"Content-Length": str(stop - first), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        count = stop - first if fault.cut is None else min(fault.cut, stop - first)
        self.wfile.flush()
        with path.open("rb") as file:
            sent = self.connection.sendfile(file, first, count) if count else 0
        with self.owner.lock:
            self.owner.sent += sent
        self.close_connection |= fault.cut is not None

    def _signed(self, rest: str, query: str, request: Request, fault: Fault) -> None:
        if float(parse_qs(query)["until"][0]) < time.time():
            self._send(403, {}, b"Request has expired")
        else:
            self._file(self.owner.root / rest, request, fault)

    def _revisions(self, model: str) -> dict[str, Path]:
        """Folders of a model by revision: its branches and tags, and their commits."""
        folder = self.owner.root / model
        named = {path.name.replace("%2F", "/"): path for path in sorted(folder.iterdir())} if folder.is_dir() else {}
        return {**{self._commit(path): path for path in named.values()}, **named}

    def _commit(self, folder: Path) -> str:
        return self.owner.commits.get(folder) or hashlib.sha1(str(folder).encode()).hexdigest()

    def _refused(self, model: str, revision: str) -> bool:
        """Send the hub's answer for a model or a revision that is not there, or not open to the user."""
        revisions = self._revisions(model)
        if not revisions:
            self._send(401, {"X-Error-Message": "Invalid username or password."})
        elif revision not in revisions:
            self._send(404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": f"Invalid rev id: {revision}"})
        return not revisions or revision not in revisions

    def _api(self, rest: str) -> None:
        model, tail = "/".join(rest.split("/")[:2]), "/".join(rest.split("/")[2:])
        if tail == "refs":
            if not self._refused(model, "main"):
                names = [name for name, path in self._revisions(model).items() if name != self._commit(path)]
                kinds = {"tags": [n for n in names if n.startswith("v")], "branches": [n for n in names if n[0] != "v"]}
                refs = {
                    kind: [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": "0" * 40} for n in found]
                    for kind, found in kinds.items()
                }
                self._json({**refs, "converts": []})
            return
        tree = tail.startswith("tree/")
        revision = tail.removeprefix("revision/").removeprefix("tree/") or "main"
        if not self._refused(model, revision):
            folder = self._revisions(model)[revision]
            if tree:
                paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
                self._json([_tree_entry(_sibling(path, folder)) for path in paths])
                return
            siblings = [_sibling(path, folder) for path in sorted(folder.rglob("*")) if path.is_file()]
            self._json({"id": model, "modelId": model, "sha": self._commit(folder), "private": False, "tags": [],
                        "downloads": 0, "likes": 0, "siblings": siblings})  # fmt: skip

    def _resolve(self, path: str, request: Request, fault: Fault) -> None:
        org, name, _, revision, *rest = path.strip("/").split("/")
        model, owner = f"{org}/{name}", self.owner
        if self._refused(model, revision):
            return
        if model in owner.gated and request.headers.get("authorization") != f"Bearer {owner.gated[model]}":
            said = (
                f"Access to model {model} is restricted. You must have access to it and be authenticated to access it."
            )
            self._send(401, {"X-Error-Code": "GatedRepo", "X-Error-Message": said})
            return
        folder = self._revisions(model)[revision]
        file = folder / "/".join(rest)
        if not file.is_file():
            self._send(404, {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
            return
        headers = {"X-Repo-Commit": self._commit(folder)}
        if not file.name.endswith(LARGE):
            self._file(file, request, fault, headers)
            return
        elsewhere = owner.url.replace("127.0.0.1", "localhost")  # another host than the hub's, as there
        there = f"{elsewhere}/cdn/{file.relative_to(owner.root)}?until={time.time() + owner.lifetime}"
        linked = {"X-Linked-Size": str(file.stat().st_size), "X-Linked-ETag": f'"{_digest(file)}"', "Location": there}
        self._send(302, headers | linked)


def _sibling(path: Path, folder: Path) -> dict[str, Any]:
    size = path.stat().st_size
    entry = {"rfilename": str(path.relative_to(folder)), "size": size, "blobId": _digest(path)[:40]}
    lfs = {"sha256": _digest(path), "size": size, "pointerSize": 135}
    return {**entry, "lfs": lfs} if path.name.endswith(LARGE) else entry


def _tree_entry(sibling: dict[str, Any]) -> dict[str, Any]:
    entry = {"type": "file", "path": sibling["rfilename"], "size": sibling["size"], "oid": sibling["blobId"]}
    if "lfs" in sibling:
        entry["lfs"] = {**sibling["lfs"], "oid": sibling["lfs"]["sha256"]}
    return entry


def _digest(path: Path) -> str:
    status = path.stat()
    return _digest_of(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=1024)
def _digest_of(path: Path, size: int, changed: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    """For benchmarks, in a process of its own: prints its URL, then a line of counts for each line that it reads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("--latency", type=float, default=0.03, help="seconds before each answer")
    parser.add_argument("--port", type=int, default=0)
    args = parser.parse_args()
    server = RangeServer(args.root, args.latency, args.port)
    server.start()
    print(server.url, flush=True)
    for _ in iter(input, "end"):
        print(json.dumps({"requests": len(server.requests), "bytes": server.sent}), flush=True)
        server.reset()


if __name__ == "__main__":
    main()
