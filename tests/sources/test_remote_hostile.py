"""Servers that send what no server should: every answer ends in one line, soon, and without a number."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from locater.errors import LocaterError
from locater.sources.remote import Traffic, buckets, http_client, http_file
from locater.sources.remote.address import remote_address
from locater.sources.remote.folders import ObjectFile, read_range
from locater.sources.remote.http_file import _redirect_target
from tests.conftest import Result
from tests.range_server import Fault, RangeServer

Run = Callable[..., Result]
Answer = Iterable[bytes]  # what is sent to a request, piece by piece
SOON = 60.0  # seconds, on a busy machine; what is waited for takes ten minutes, or for ever


class RawServer:
    """Sends the given bytes to each request, and closes the connection."""

    def __init__(self, answer: Callable[[str, str], Answer]) -> None:
        self.answer, self.seen = answer, list[str]()
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.socket.accept()
                threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head:
                more = connection.recv(4096)
                if not more:
                    return
                head += more
            method, path, _ = head.decode("latin-1").split(" ", 2)
            self.seen.append(f"{method} {path}")
            for piece in self.answer(method, path):
                connection.sendall(piece)


@contextlib.contextmanager
def raw(answer: Callable[[str, str], Answer]) -> Iterator[RawServer]:
    server = RawServer(answer)
    try:
        yield server
    finally:
        server.socket.close()


def dripped(start: bytes, piece: bytes, pause: float) -> Iterator[bytes]:
    yield start
    while True:
        time.sleep(pause)
        yield piece


def endless(start: bytes, piece: bytes) -> Iterator[bytes]:
    yield start
    while True:
        yield piece


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits, so that what is waited for too long is seen."""
    monkeypatch.setattr(http_client, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(http_client, "READ_SECONDS", 0.4)
    monkeypatch.setattr(http_client, "ANSWER_SECONDS", 0.6)


OK = b"HTTP/1.1 200 OK\r\n"
PART = b"HTTP/1.1 206 Partial Content\r\n"
LONG = b"9" * 5000
ANSWERS: dict[str, tuple[Callable[[], Answer], str]] = {
    "100 Continue without end": (
        lambda: endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        "is too slow: no answer after",
    ),
    "100 Continue now and then": (
        lambda: dripped(b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.05),
        "is too slow: no answer after",
    ),
    "a byte of headers now and then": (lambda: dripped(OK, b"x", 0.05), "is too slow: no answer after"),
    "a byte of the body now and then": (
        lambda: dripped(OK + b"Content-Length: 100000\r\nETag: x\r\n\r\n", b"{", 0.05),
        "is too slow: less than 256 bytes a second",
    ),
    "a chunk of a byte now and then": (
        lambda: dripped(OK + b"Transfer-Encoding: chunked\r\nETag: x\r\n\r\n", b"1\r\n{\r\n", 0.05),
        "is too slow: less than 256 bytes a second",
    ),
    "nothing": (list, "tries): try again later|cannot be reached"),
    "silence": (lambda: dripped(b"", b"", 0.1), "does not answer in time"),
    "no HTTP": (lambda: [b"220 ftp ready\r\n"], "cannot be reached"),
    "noise": (lambda: [bytes(range(256)) * 99], "cannot be reached"),
    "a status of 5,000 digits": (lambda: [b"HTTP/1.1 " + LONG + b" OK\r\n\r\n"], "cannot be reached"),
    "a status that is no number": (lambda: [b"HTTP/1.1 2x0 OK\r\n\r\n"], "cannot be reached"),
    "a status below 100": (lambda: [b"HTTP/1.1 099 OK\r\n\r\n"], "cannot be reached"),
    "another version": (lambda: [b"HTTP/9.9 200 OK\r\n\r\n"], "cannot be reached|not readable|not a safetensors"),
    "a reason without end": (lambda: endless(b"HTTP/1.1 200 ", b"x" * 999), "cannot be reached"),
    "a reason that commands the terminal": (lambda: [b"HTTP/1.1 404 \x1b]0;x\x07\x9b\r\n\r\n"], "no weights there"),
    "a teapot with a long reason": (
        lambda: [b"HTTP/1.1 418 " + b"x" * 9000 + b"\r\nContent-Length: 0\r\n\r\n"],
        "its server answers 418 xxx",
    ),
    "1,000 headers": (lambda: [OK + b"A: b\r\n" * 1000 + b"\r\n"], "cannot be reached"),
    "a header of a megabyte": (lambda: [OK + b"A: " + b"b" * 1_000_000 + b"\r\n\r\n"], "cannot be reached"),
    "headers without end": (lambda: endless(OK, b"A: b\r\n"), "cannot be reached"),
    "no header at all": (lambda: [b"\r\n\r\n"], "cannot be reached"),
    "an odd header": (lambda: [OK + b": : :\r\n \r\nETag\r\n\r\n"], "not readable as JSON"),
    "a length of 5,000 digits": (
        lambda: [OK + b"ETag: x\r\nContent-Length: " + LONG + b"\r\n\r\n"],
        "not readable as JSON|gives no size",
    ),
    "a length below zero": (lambda: [OK + b"ETag: x\r\nContent-Length: -5\r\n\r\n{"], "not readable as JSON"),
    "a length in Arabic digits": (
        lambda: [OK + "Content-Length: \u0661\u0662\r\n\r\n{".encode()],
        "not readable as JSON",
    ),
    "longer than it says": (lambda: [OK + b"Content-Length: 2\r\n\r\n{}and more"], "adapter"),
    "shorter than it says": (lambda: [OK + b"Content-Length: 99\r\n\r\n{}"], "the connection is cut (5 tries)"),
    "a chunk of no number": (lambda: [OK + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n{}\r\n"], "cut|not HTTP|reached"),
    "a chunk of 5,000 digits": (
        lambda: [OK + b"Transfer-Encoding: chunked\r\n\r\n" + LONG + b"\r\n{}\r\n"],
        "cut|not HTTP|reached",
    ),
    "a chunk below zero": (
        lambda: endless(OK + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n", b"x" * 65536),
        "too large for a configuration|not readable|not HTTP|reached|too slow",
    ),
    "chunks that end early": (lambda: [OK + b"Transfer-Encoding: chunked\r\n\r\nff\r\n{}"], "cut|reached"),
    "a body without end": (lambda: endless(OK + b"\r\n", b" " * 65536), "too large for a configuration|too slow"),
    "gzip": (
        lambda: [OK + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\n\x1f\x8b\x08"],
        "answers 200 with a compressed body",
    ),
    "deep JSON": (
        lambda: [OK + b"Content-Length: 200000\r\n\r\n" + b"[" * 200000],
        "not readable as JSON (nested too deep)",
    ),
    "no text": (lambda: [OK + b"Content-Length: 2\r\n\r\n\xff\xfe"], "not readable as JSON"),
    "moved to half an address": (
        lambda: [b"HTTP/1.1 302 x\r\nLocation: http://[::1\r\nContent-Length: 0\r\n\r\n"],
        "its server's answer is not HTTP (Invalid IPv6 URL)",
    ),
    "moved to a port of no number": (
        lambda: [b"HTTP/1.1 302 x\r\nLocation: http://127.0.0.1:port/\r\nContent-Length: 0\r\n\r\n"],
        "cannot be reached",
    ),
    "moved to a port of 5,000 digits": (
        lambda: [b"HTTP/1.1 302 x\r\nLocation: http://127.0.0.1:" + LONG + b"/\r\nContent-Length: 0\r\n\r\n"],
        "cannot be reached|not HTTP",
    ),
    "moved to a host with a label too long": (
        lambda: [b"HTTP/1.1 302 x\r\nLocation: http://" + b"a" * 300 + b"/\r\nContent-Length: 0\r\n\r\n"],
        "cannot be reached|not HTTP|cannot be found",
    ),
    "moved to a file": (
        lambda: [b"HTTP/1.1 302 x\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n"],
        "its server redirects from http: to file:, which is not followed",
    ),
    "moved to gopher": (
        lambda: [b"HTTP/1.1 302 x\r\nLocation: gopher://127.0.0.1:70/\r\nContent-Length: 0\r\n\r\n"],
        "its server redirects from http: to gopher:, which is not followed",
    ),
    "moved to nowhere": (
        lambda: [b"HTTP/1.1 302 x\r\nContent-Length: 0\r\n\r\n"],
        "more than 5 redirections",
    ),
    "moved, with a body without end": (
        lambda: endless(b"HTTP/1.1 302 x\r\nLocation: /again\r\n\r\n", b"x" * 65536),
        "more than 5 redirections",
    ),
    "moved to letters that no request may hold": (
        lambda: [b"HTTP/1.1 302 x\r\nLocation: /caf\xc3\xa9 \x01\r\nContent-Length: 0\r\n\r\n"],
        "more than 5 redirections",
    ),
    "a wait of 5,000 digits": (
        lambda: [b"HTTP/1.1 503 x\r\nRetry-After: " + LONG + b"\r\nContent-Length: 0\r\n\r\n"],
        "the server answers 503 x (5 tries)",
    ),
    "a wait until the end of time": (
        lambda: [
            b"HTTP/1.1 503 x\r\nRetry-After: Mon, 01 Jan 99999999999999999999 00:00:00 GMT\r\n"
            b"Content-Length: 0\r\n\r\n"
        ],
        "the server answers 503 x (5 tries)",
    ),
    "a status of switching": (lambda: [b"HTTP/1.1 101 x\r\nUpgrade: x\r\n\r\n"], "its server answers 101 x"),
}  # fmt: skip


def refused(run: Run, url: str, *options: str) -> str:
    """The one line of a scan that ends soon."""
    begun = time.monotonic()
    result = run("scan", url, *options)
    assert time.monotonic() - begun < SOON
    assert (result.status, result.out) == (2, ""), result
    assert len(result.err.splitlines()) == 1, result.err
    assert "this is a bug" not in result.err, result.err
    assert len(result.err) < 1000
    assert not set(result.err) & {"\x1b", "\x07", "\x9b"}
    return result.err


def says(line: str, words: str) -> bool:
    return any(part in line for part in words.split("|"))


@pytest.mark.parametrize("name", [*ANSWERS])
def test_answers_to_the_first_request(run: Run, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(http_file, "JSON_LIMIT", 4_000_000)  # a body without end is read to the limit
    answer, words = ANSWERS[name]
    with raw(lambda method, path: answer()) as server:
        line = refused(run, f"{server.url}/x")
    assert says(line, words), line


def ranged(first: object, last: object, size: object, body: bytes = b"", more: bytes = b"") -> bytes:
    head = f"Content-Range: bytes {first}-{last}/{size}\r\nContent-Length: {len(body)}\r\n".encode()
    return PART + head + b"ETag: x\r\n" + more + b"\r\n" + body


HEADER = (2).to_bytes(8, "little") + b"{}"
RANGES: dict[str, tuple[Callable[[], Answer], str]] = {
    "a size of 5,000 digits": (lambda: [ranged(0, 9, "9" * 5000, HEADER)], "without a range of known size"),
    "a size of 30 digits": (lambda: [ranged(0, 9, "9" * 30, HEADER)], "without a range of known size"),
    "a first byte of 5,000 digits": (lambda: [ranged("9" * 5000, 9, 10, HEADER)], "without a range of known size"),
    "an unknown size": (lambda: [ranged(0, 9, "*", HEADER)], "without a range of known size (bytes 0-9/*)"),
    "a size below zero": (lambda: [ranged(0, 9, -10, HEADER)], "without a range of known size"),
    "a size of zero": (lambda: [ranged(0, 9, 0, HEADER)], "not a safetensors file"),
    "an exabyte": (lambda: [ranged(0, 9, 1 << 60, HEADER)], "safetensors"),
    "another unit": (lambda: [PART + b"Content-Range: lines 0-9/10\r\n\r\n"], "without a range of known size"),
    "no range": (lambda: [PART + b"Content-Length: 10\r\n\r\n" + HEADER], "without a range of known size"),
    "several ranges": (
        lambda: [PART + b"Content-Type: multipart/byteranges; boundary=x\r\n\r\n--x\r\n"],
        "without a range of known size",
    ),
    "bytes of another place": (lambda: [ranged(5, 14, 99, HEADER)], "sent bytes from 5 and not from 0: refused"),
    "gzip": (lambda: [ranged(0, 9, 10, HEADER, b"Content-Encoding: gzip\r\n")], "with a compressed body"),
    "nothing of what it promises": (lambda: [ranged(0, 9, 10)], "the connection is cut (5 tries)"),
    "a byte, and the end of the connection": (
        lambda: [ranged(0, 9, 1 << 20, b"\0" * 3)],
        "sent bytes from 0 and not from 3: refused",
    ),
    "a byte now and then": (
        lambda: dripped(
            PART + b"ETag: x\r\nContent-Range: bytes 0-99999/100000\r\nContent-Length: 100000\r\n\r\n", b"x", 0.05
        ),
        "is too slow: less than 256 bytes a second (5 tries)",
    ),
    "a chunk of no number": (
        lambda: [PART + b"Content-Range: bytes 0-9/10\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n"],
        "cut|not HTTP",
    ),
    "a tag on two lines": (
        lambda: [ranged(0, 9, 10, HEADER, b"ETag: x\r\n y\r\n")],
        "safetensors",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*RANGES])
def test_answers_to_a_range(run: Run, name: str) -> None:
    answer, words = RANGES[name]

    def answered(method: str, path: str) -> Answer:
        if not path.endswith(".safetensors"):
            return [b"HTTP/1.1 404 x\r\nContent-Length: 0\r\n\r\n"]
        return answer() if method == "GET" else [OK + b"ETag: x\r\nContent-Length: 10\r\n\r\n"]

    with raw(answered) as server:
        line = refused(run, f"{server.url}/x/model.safetensors")
    assert says(line, words), line


def test_a_byte_per_connection_is_given_up(run: Run, server: RangeServer, saved_llama: Path) -> None:
    """Each answer goes on where the last one ended, and ends after a byte."""
    data = (saved_llama / "model.safetensors").read_bytes()
    (server.root / "x").mkdir()
    (server.root / "x" / "model.safetensors").write_bytes(data)
    server.fault = lambda request: Fault(cut=1) if request.range else None
    line = refused(run, f"{server.url}/files/x/model.safetensors")
    assert "model.safetensors: the connection is cut (21 times): try again later" in line
    assert len(server.data_requests()) < 100


DOWNLOADS: dict[str, tuple[Callable[[], Answer], str]] = {
    "a body without end": (ANSWERS["a body without end"][0], "does not say how large it is, so it is not downloaded"),
    "a chunk below zero": (ANSWERS["a chunk below zero"][0], "does not say how large it is, so it is not downloaded"),
    "a byte now and then": (ANSWERS["a byte of the body now and then"][0], "less than 256 bytes a second (5 tries)"),
    "an exabyte": (lambda: endless(OK + b"Content-Length: 1152921504606846976\r\n\r\n", b"x" * 65536), "has room for"),
}


@pytest.mark.parametrize("name", [*DOWNLOADS])
def test_downloads(run: Run, name: str) -> None:
    """With --download the file is written to disk: no more than fits."""
    answer, words = DOWNLOADS[name]

    def answered(method: str, path: str) -> Answer:
        if not path.endswith(".gguf"):
            return [b"HTTP/1.1 404 x\r\nContent-Length: 0\r\n\r\n"]
        return answer() if method == "GET" else [OK + b"ETag: x\r\nContent-Length: 10\r\n\r\n"]

    with raw(answered) as server:
        line = refused(run, f"{server.url}/x/model.gguf", "--download")
    assert words in line


def test_redirects_follow_http_alone() -> None:
    assert _redirect_target("http://a/b/c", "d?e=f") == "http://a/b/d?e=f"
    assert _redirect_target("https://a/b", "//other/c") == "https://other/c"
    assert _redirect_target("http://a/b", "https://a/b") == "https://a/b"
    assert _redirect_target("http://a/b", "/caf\u00c3\u00a9 x%20y") == "http://a/caf%C3%A9%20x%20y"
    for start, target in (
        ("https://a/b", "http://a/b"),
        ("https://a/b", "HTTP://a/b"),
        ("http://a/b", "file:///etc/passwd"),
        ("http://a/b", "data:,x"),
        ("http://a/b", "ftp://a/b"),
        ("http://a/b", "javascript:x"),
    ):
        with pytest.raises(http_file.ForbiddenRedirect, match="which is not followed"):
            _redirect_target(start, target)


def test_a_slow_server_that_is_fast_enough(run: Run) -> None:
    """Pauses between requests, and steady bytes, are no reason to give up."""
    body = b'{"x": "' + b"y" * 4000 + b'"}'

    def answered(method: str, path: str) -> Answer:
        yield OK + f"Content-Length: {len(body)}\r\n\r\n".encode()
        for at in range(0, len(body), 100):  # 2,000 bytes a second, in three periods
            time.sleep(0.03)
            yield body[at : at + 100]

    with raw(answered) as slow:
        assert "is too slow" not in refused(run, f"{slow.url}/x")


SECRET = "s3cr3t"


@pytest.mark.parametrize(
    "source",
    [
        "https:///x?token=s3cr3t",
        "https://me:s3cr3t@",
        "https://me:s3cr3t@[::1",
        "https://me:s3cr3t/more@127.0.0.1:1/x",
        "https://127.0.0.1:1/x?s3cr3t",
        "https://127.0.0.1:1/x*?sig=s3cr3t",
        "https://127.0.0.1:1/x#access_token=s3cr3t",
        "http://me:s3cr3t@127.0.0.1:1/x",
        "HTTPS://127.0.0.1:1/x?token=s3cr3t",
        "https:127.0.0.1:1/x?token=s3cr3t",
        "ftp://me:s3cr3t@127.0.0.1:1/x?token=s3cr3t",
        "s3://me:s3cr3t@bucket//x",
        "s3://me:s3cr3t@bucket/x",
        "s3://bucket//x?X-Amz-Signature=s3cr3t",
        "az://container//x?sv=1&sig=s3cr3t",
    ],
)
def test_secrets_in_addresses_are_not_printed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """By no command, for no form of an address, and not by the traceback of --debug."""
    for name in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    for arguments in (
        ["scan", source],
        ["--debug", "scan", source],
        ["compare", source, source, source],
        ["probe", source, "--text", source],
        ["explain", source, "text"],
        ["watch", source, "--json", "-"],
        ["fleet", source, "--out", tmp_path / "heads"],
    ):
        result = run(*arguments)
        assert result.status == 2, result
        assert SECRET not in result.out + result.err, arguments
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or SECRET not in path.read_text(errors="replace"), path


def test_a_signed_address_is_named_without_its_signature(run: Run, server: RangeServer, saved_llama: Path) -> None:
    """In tables, JSON, pages and the address of a page."""
    (server.root / "x").mkdir()
    for name in ("model.safetensors", "config.json"):
        (server.root / "x" / name).write_bytes((saved_llama / name).read_bytes())
    page, data = server.root / "page.html", server.root / "data.json"
    source = server.url.replace("//", f"//me:{SECRET}@") + f"/files/x?sig={SECRET}"
    result = run("scan", source, "--json", data, "--report", page)
    assert result.status == 0, result
    result = run("compare", source, source)
    assert result.status == 0, result
    assert any("authorization" in request.headers for request in server.requests)
    assert SECRET not in result.out + result.err + page.read_text() + data.read_text()


# ---- buckets ----


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(buckets, "READ_SECONDS", 0.4)
    monkeypatch.setattr(buckets, "WHOLE_SECONDS", 1.5)
    monkeypatch.setattr(buckets, "RETRY_SECONDS", 1.0)
    buckets._store.cache_clear()
    yield
    buckets._store.cache_clear()


def xml(text: str, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nContent-Length: {len(text.encode())}\r\n\r\n{text}".encode()


def failed(code: str, status: str) -> bytes:
    return xml(f"<Error><Code>{code}</Code><Message>\x1b[31m said</Message></Error>", status)


HUGE = "<Contents><Key>x/model.safetensors</Key><Size>" + "9" * 40 + "</Size><LastModified>2020-01-01T00:00:00Z</LastModified></Contents>"  # fmt: skip
ODD = "".join(
    f"<Contents><Key>x/{name}</Key><Size>9</Size><LastModified>2020-01-01T00:00:00Z</LastModified><ETag>e</ETag></Contents>"
    for name in ("a&#27;]0;x&#7;b.txt", "../../y.txt", "a&#10;b.txt", "\u202eb.txt", "[/red].txt", "&#155;2J.gguf")
)
BUCKETS: dict[str, Callable[[], Answer]] = {
    "access denied": lambda: [failed("AccessDenied", "403 Forbidden")],
    "another region": lambda: [failed("PermanentRedirect", "301 Moved")],
    "a region of its own": lambda: [failed("AuthorizationHeaderMalformed", "400 Bad Request")],
    "expired keys": lambda: [failed("ExpiredToken", "400 Bad Request")],
    "no such bucket": lambda: [failed("NoSuchBucket", "404 Not Found")],
    "slow down": lambda: [failed("SlowDown", "503 Slow Down")],
    "moved to a file": lambda: [b"HTTP/1.1 302 x\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n"],
    "no XML": lambda: [OK + b"Content-Length: 5\r\n\r\nhello"],
    "half an XML": lambda: [xml("<ListBucketResult><Contents><Key>")],
    "a size of 40 digits": lambda: [xml(f"<ListBucketResult>{HUGE}</ListBucketResult>")],
    "an entity of its own": lambda: [xml('<!DOCTYPE x [<!ENTITY e "e">]><ListBucketResult>&e;</ListBucketResult>')],
    "odd names": lambda: [xml(f"<ListBucketResult>{ODD}</ListBucketResult>")],
    "an empty listing": lambda: [xml("<ListBucketResult></ListBucketResult>")],
    "silence": lambda: dripped(b"", b"", 0.1),
    "a byte now and then": lambda: dripped(OK + b"Content-Length: 100000\r\n\r\n", b"<", 0.05),
    "the end of the connection": list,
    "noise": lambda: [bytes(range(256)) * 99],
}


@pytest.mark.parametrize("name", [*BUCKETS])
def test_answers_of_buckets(run: Run, monkeypatch: pytest.MonkeyPatch, impatient: None, name: str) -> None:
    pytest.importorskip("obstore")
    with raw(lambda method, path: BUCKETS[name]()) as server:
        for key, value in {
            "AWS_ENDPOINT": server.url, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": SECRET,
        }.items():  # fmt: skip
            monkeypatch.setenv(key, value)
        line = refused(run, "s3://bucket/x")
        assert line.startswith("locater: s3://bucket")
        assert SECRET not in line


def put_model(bucket: Any, folder: Path, prefix: str = "run/x") -> None:
    for name in ("model.safetensors", "config.json"):
        bucket.upload_file(str(folder / name), "runs", f"{prefix}/{name}")


def test_objects_of_a_bucket_that_are_not_what_they_should_be(run: Run, bucket: Any, saved_llama: Path) -> None:
    """Missing, cut, no JSON, or with a shard that is not there: by the S3 of moto."""
    data = (saved_llama / "model.safetensors").read_bytes()
    index = b'{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'
    put_model(bucket, saved_llama)
    for prefix, name, body in (
        ("cut", "model.safetensors", data[:-5]),
        ("header", "model.safetensors", data[:100]),
        ("empty", "model.safetensors", b""),
        ("shards", "model.safetensors.index.json", index),
        ("index", "model.safetensors.index.json", b"[" * 200_000),
    ):
        bucket.put_object(Bucket="runs", Key=f"{prefix}/{name}", Body=body)
    bucket.put_object(Bucket="runs", Key="config/config.json", Body=b'{"model_type": ')
    bucket.put_object(Bucket="runs", Key="config/model.safetensors", Body=data)
    for source, words in (
        ("runs/cut", "model.safetensors: truncated"),
        ("runs/header", "not a safetensors file, or truncated in its header"),
        ("runs/empty", "has no bytes there: it is empty, or shorter than it was"),
        ("runs/shards", "names the shard model-00001-of-00002.safetensors, which is not there"),
        ("runs/index", "not readable as JSON (nested too deep)"),
        ("runs/config", "config.json: not readable as JSON"),
        ("runs/nothing", "no weights there"),
        ("runs/run/x/other.safetensors", "no such file there"),
        ("nowhere/x", "there is no bucket nowhere"),
    ):
        assert words in (line := refused(run, f"s3://{source}")), line
    assert run("scan", "s3://runs/run/x").status == 0


def test_an_object_that_changes_between_reads(bucket: Any, saved_llama: Path) -> None:
    put_model(bucket, saved_llama)
    address = remote_address("s3://runs/run/x/model.safetensors")
    assert address is not None
    file = ObjectFile(address, Traffic())
    assert len(read_range(file, 0, 100)) == 100
    data = (saved_llama / "model.safetensors").read_bytes()
    bucket.put_object(Bucket="runs", Key="run/x/model.safetensors", Body=data[:-1] + b"x")
    with pytest.raises(LocaterError, match="changed while it was read: start again"):
        read_range(file, 100, 200)
    bucket.delete_object(Bucket="runs", Key="run/x/model.safetensors")
    with pytest.raises(LocaterError, match=r"no such object or bucket|changed while it was read"):
        read_range(file, 100, 200)


@pytest.mark.slow
def test_listings_with_many_names(run: Run, bucket: Any, saved_llama: Path) -> None:
    """More than a page of a listing has."""
    put_model(bucket, saved_llama)
    for i in range(1_100):
        bucket.put_object(Bucket="runs", Key=f"run/x/{i:05}.txt", Body=b"")
    assert run("scan", "s3://runs/run/x").status == 0
