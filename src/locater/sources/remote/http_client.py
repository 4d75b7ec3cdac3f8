"""A small HTTP client for byte ranges: connections are kept, bodies go straight into a buffer, `close` ends reads that
wait, and a server that sends its answer too slowly is not waited for. A busy server is asked again, as often and after
as long as it is polite to; what all of it costs is counted.

The standard library is enough, so plain URLs need no extra package. Proxies are those of the environment.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import math
import random
import socket
import ssl
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from threading import Event
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from locater.errors import LocaterError
from locater.version import __version__

CONNECT_SECONDS = 10.0
READ_SECONDS = 30.0  # without a single byte
ANSWER_SECONDS = 60.0  # for a status and its headers, however many times `100 Continue` comes before them
ANSWER_BYTES = 1 << 20  # of them
LEAST_RATE = 256  # bytes a second of a body, over any READ_SECONDS
Key = tuple[str, str]  # scheme, host with port
GONE = (ConnectionError, http.client.BadStatusLine, BrokenPipeError)  # a kept connection that the server has closed


class Unreachable(Exception):  # noqa: N818
    """No connection to a host could be made."""


class TooSlow(TimeoutError):  # noqa: N818
    """Bytes come, but not as fast as they have to."""


class _PacedReader(io.RawIOBase):
    """What a socket sends, within a deadline: the timeout of a socket starts again with each byte."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._raw = sock, sock.makefile("rb", buffering=0)
        self._since, self._count, self._body = time.monotonic(), 0, False

    def begin_body(self) -> None:
        self._since, self._count, self._body = time.monotonic(), 0, True

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        seconds = READ_SECONDS if self._body else ANSWER_SECONDS
        left = self._since + seconds - time.monotonic()
        if left <= 0 or (not self._body and self._count > ANSWER_BYTES):
            self._judge(seconds)
            left = seconds
        self._sock.settimeout(min(left, READ_SECONDS))
        try:
            count = self._raw.readinto(buffer)
        except TimeoutError:
            if self._count:
                self._judge(seconds)
            raise
        self._count += count or 0
        return count

    def _judge(self, seconds: float) -> None:
        """At the end of a period: refuse what came too slowly, or begin the next one."""
        if not self._body:
            raise TooSlow(f"no answer after {self._count:,} bytes of headers")
        if self._count < LEAST_RATE * seconds:
            raise TooSlow(f"less than {LEAST_RATE} bytes a second")
        self._since, self._count = time.monotonic(), 0

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()


class _Reply(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, **settings: Any) -> None:
        super().__init__(sock, *args, **settings)
        self.fp.close()
        self._paced = _PacedReader(sock)
        self.fp = io.BufferedReader(self._paced, 1 << 16)

    def begin(self) -> None:
        super().begin()
        self._paced.begin_body()


class HttpClient:
    """Requests over kept connections, from any thread."""

    def __init__(self, traffic: Traffic | None = None) -> None:
        self.traffic = traffic or Traffic()
        self.stopped = threading.Event()
        self.met: set[str] = set()  # hosts that have answered: from then on a lost connection is tried again
        self._idle: dict[Key, list[http.client.HTTPConnection]] = {}
        self._busy: set[http.client.HTTPConnection] = set()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def response(self, method: str, url: str, headers: Mapping[str, str]) -> Iterator[http.client.HTTPResponse]:
        """The answer to one request. Its connection is kept if the body has been read to its end."""
        parts = urlsplit(url)
        key = (parts.scheme, parts.netloc)
        connection, reply = self._answer(key, method, url, headers)
        try:
            yield reply
        except BaseException:
            connection.close()
            raise
        finally:
            with self._lock:
                self._busy.discard(connection)
                if reply.isclosed() and connection.sock is not None and not self.stopped.is_set():
                    self._idle.setdefault(key, []).append(connection)
                else:
                    connection.close()

    def close(self) -> None:
        """End all requests, also those that wait for bytes in other threads."""
        self.stopped.set()
        with self._lock:
            for connection in self._busy:
                if connection.sock is not None:
                    with contextlib.suppress(OSError):  # not connected any more
                        connection.sock.shutdown(socket.SHUT_RDWR)
            for connection in (one for idle in self._idle.values() for one in idle):
                connection.close()
            self._idle.clear()

    def _answer(
        self, key: Key, method: str, url: str, headers: Mapping[str, str]
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        sent = {
            "User-Agent": f"locater/{__version__}",
            "Accept-Encoding": "identity",
            **_authorization(key[1]),
            **headers,
        }
        while True:
            connection, kept = self._connection(key)
            try:
                self.traffic.add(requests=1)
                proxied = getattr(connection, "proxy_headers", {})
                connection.request(method, _target(connection, url), headers={**sent, **proxied})
                return connection, connection.getresponse()
            except BaseException as error:
                with self._lock:
                    self._busy.discard(connection)
                connection.close()
                if self.stopped.is_set():
                    raise Stopped from None
                if not (kept and isinstance(error, GONE)):
                    raise

    def _connection(self, key: Key) -> tuple[http.client.HTTPConnection, bool]:
        """A connection to a host, and whether it has been used before."""
        with self._lock:
            if self.stopped.is_set():
                raise Stopped
            idle = self._idle.get(key)
            connection = idle.pop() if idle else None
            kept = connection is not None
            connection = connection or _new_connection(*key)
            connection.response_class = _Reply
            self._busy.add(connection)
        if not kept:
            try:
                connection.connect()
                connection.sock.settimeout(READ_SECONDS)
            except BaseException as error:
                with self._lock:
                    self._busy.discard(connection)
                connection.close()
                if isinstance(error, OSError | ValueError | http.client.HTTPException):
                    raise Unreachable(reason(error, key[1].rpartition("@")[2])) from error
                raise
        return connection, kept


def _new_connection(scheme: str, host: str) -> http.client.HTTPConnection:
    """A connection that is not open yet, through the proxy of the environment where one is set."""
    bare = host.rpartition("@")[2]
    proxy = None if proxy_bypass(bare) else getproxies().get(scheme)
    timeout = CONNECT_SECONDS
    if proxy is None:
        if scheme == "https":
            return http.client.HTTPSConnection(bare, timeout=timeout, context=_context())
        return http.client.HTTPConnection(bare, timeout=timeout)
    through = urlsplit(proxy if "://" in proxy else f"http://{proxy}").netloc
    address = through.rpartition("@")[2]
    if scheme == "http":
        connection = http.client.HTTPConnection(address, timeout=timeout)
        connection.proxy_headers = _authorization(through, "Proxy-Authorization")  # type: ignore[attr-defined]
        return connection
    tunnel = http.client.HTTPSConnection(address, timeout=timeout, context=_context())
    tunnel.set_tunnel(bare, headers=_authorization(through, "Proxy-Authorization"))
    return tunnel


def _authorization(host: str, header: str = "Authorization") -> dict[str, str]:
    """The header for `user:password@host`."""
    user, at, _ = host.rpartition("@")
    return {header: f"Basic {b64encode(unquote(user).encode()).decode()}"} if at else {}


def _target(connection: http.client.HTTPConnection, url: str) -> str:
    """What the first line of a request asks for: a path, or the whole URL from a proxy."""
    parts = urlsplit(url)
    if hasattr(connection, "proxy_headers"):
        return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


@cache
def _context() -> ssl.SSLContext:
    """Certificates of the system; where it has none, those of certifi, if installed."""
    context = ssl.create_default_context()
    if not context.get_ca_certs():
        with contextlib.suppress(ImportError):
            import certifi

            context.load_verify_locations(certifi.where())
    return context


def reason(error: BaseException, host: str) -> str:
    """A failed connection in words."""
    host = f"{host:.100}"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate of {host} is not trusted ({error.verify_message})"
    if isinstance(error, socket.gaierror):
        return f"the host {host} cannot be found (is there a network?)"
    if isinstance(error, TooSlow):
        return f"{host} is too slow: {error}"
    if isinstance(error, TimeoutError):
        return f"{host} does not answer in time"
    words = f"{getattr(error, 'strerror', None) or str(error) or type(error).__name__:.200}"
    return f"{host} cannot be reached ({words})"


# When to ask again, and what it costs.

T = TypeVar("T")
TRIES = 5
TEMPORARY = (408, 429, 500, 502, 503, 504)  # answers after which the same request may succeed
LONGEST_WAIT = 120.0  # seconds that are waited where a server asks for it
FIRST_WAIT = 0.5  # seconds, doubled with every try, where it does not


class Temporary(Exception):  # noqa: N818 - no error yet
    """A failure after which the same request may succeed; `wait` is the time in seconds that the server asks for."""

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.wait = wait


class Stopped(Exception):  # noqa: N818
    """The reader has been closed while it waited."""


def retry_after(header: str | None) -> float | None:
    """Seconds that a `Retry-After` header asks for: a number, or a date.

    >>> retry_after("3"), retry_after(None), retry_after("soon")
    (3.0, None, None)
    """
    if not header:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            date = parsedate_to_datetime(header)
            seconds = (date - datetime.now(UTC if date.tzinfo else None)).total_seconds()
        except (TypeError, ValueError, OverflowError):
            return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def pause(where: str, failure: Temporary, tries: int, stop: Event | None = None) -> None:
    """Wait before the next try, as long as the server asks; refused after `TRIES` of them, or for too long a wait."""
    if tries >= TRIES:
        raise LocaterError(f"{where}: {failure} ({TRIES} tries): try again later") from None
    if failure.wait is not None and failure.wait > LONGEST_WAIT:
        raise LocaterError(f"{where}: {failure} and asks to wait {failure.wait:,.0f} s: try again after that") from None
    wait = failure.wait
    if wait is None:
        wait = FIRST_WAIT * 2 ** (tries - 1) * random.uniform(0.5, 1.0)  # apart from others that failed with us
    if stop is None:
        time.sleep(wait)
    elif stop.wait(wait):
        raise Stopped


def retry(where: str, action: Callable[[], T]) -> T:
    """The result of `action`, which is run again where it raises `Temporary`."""
    tries = 0
    while True:
        try:
            return action()
        except Temporary as failure:
            tries += 1
            pause(where, failure, tries)


@dataclass
class Traffic:
    """Bytes of files and requests for them so far; `planned` is how many bytes there will be, if known.

    >>> traffic = Traffic()
    >>> traffic.add(bytes=100, requests=1)
    >>> traffic.bytes, traffic.requests, traffic.planned
    (100, 1, 0)
    """

    bytes: int = 0
    requests: int = 0
    planned: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, bytes: int = 0, requests: int = 0, planned: int = 0) -> None:
        with self._lock:
            self.bytes += bytes
            self.requests += requests
            self.planned += planned
