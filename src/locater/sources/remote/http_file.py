"""One file behind a URL, read by byte ranges. It is pinned to what was seen first: bytes of two versions never mix."""

from __future__ import annotations

import http.client
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar
from urllib.parse import quote, urljoin, urlsplit

from locater.errors import LocaterError, first_line
from locater.files import JSON_LIMIT
from locater.sources.remote.http_client import (
    TEMPORARY,
    HttpClient,
    Temporary,
    TooSlow,
    Unreachable,
    pause,
    reason,
    retry_after,
)

T = TypeVar("T")
REDIRECTS = 5
MOVED = (301, 302, 303, 307, 308)
MISSING = (404, 410)
PART = 1 << 20  # bytes between two writes of a download
CHANGED = "changed while it was read: start again"
LARGEST = 1 << 62  # bytes of a file; a size is sent as digits, and there may be thousands of them
PROGRESS = 1 << 16  # bytes; a body that is cut before them is resumed
CUTS = 20  # times, for one range


@dataclass(frozen=True)
class Location:
    """Where the bytes of a file are now. Signed addresses expire, and are asked for again."""

    url: str
    digest: str | None = None  # of the content, where the server of names gives it
    size: int | None = None


class HttpRefusal(Exception):  # noqa: N818 - an answer, and often not an error
    """A status that is no success, and that does not change by asking again."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(f"{status} {words}".strip())
        self.status = status


class ForbiddenRedirect(Exception):  # noqa: N818
    """A redirection to another protocol than HTTP, or to one that is less safe."""


class HttpFile:
    """A file that a server sends in ranges; `where` names it in messages. `resolve` says where its bytes are, `headers`
    what a request to a URL needs. `conditional` asks the server to refuse if the file has changed (If-Match).
    """

    def __init__(
        self,
        client: HttpClient,
        where: str,
        resolve: Callable[[], Location],
        headers: Callable[[str], Mapping[str, str]] = lambda url: {},
        conditional: bool = True,
    ) -> None:
        self.where, self.name = where, where.rpartition("/")[2]
        self.size: int | None = None
        self._version: str | None = None  # ETag, or the date where there is none
        self._client, self._resolve, self._headers, self._conditional = client, resolve, headers, conditional
        self._location: Location | None = None
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return self.where

    def close(self) -> None:
        self._client.close()

    def fill(self, start: int, view: memoryview) -> int:
        """Put the bytes from `start` on into `view`; how many there were, fewer only where the file ends. A cut body is
        resumed where it ended.
        """
        filled, stop, cuts = 0, start + len(view), 0
        while filled < len(view) and (self.size is None or start + filled < self.size):
            first = start + filled
            asked = {"Range": f"bytes={first}-{stop - 1}", **self._condition()}
            got = self._exchange("GET", asked, partial(self._fill, first, view[filled:]))
            filled, cuts = filled + got, cuts + (got < PROGRESS)
            if cuts > CUTS:
                raise LocaterError(f"{self.where}: the connection is cut ({cuts} times): try again later")
        return filled

    def whole(self) -> bytes | None:
        """All bytes of a small file, without a range; None where there is no such file."""
        return self._unless_missing("GET", self._body)

    def facts(self) -> tuple[int, str] | None:
        """(size, ETag or date) by a HEAD request; None where there is no such file."""
        return self._unless_missing("HEAD", self._size_and_version)

    def save(self, path: Path) -> None:
        """Write all of the file to `path`, without ranges."""
        self._exchange("GET", {}, partial(self._copy, path))

    def _copy(self, path: Path, reply: http.client.HTTPResponse) -> None:
        free, part = shutil.disk_usage(path.parent).free, memoryview(bytearray(PART))
        if reply.length is None:
            raise LocaterError(f"{self.where}: its server does not say how large it is, so it is not downloaded")
        if reply.length > free:
            raise LocaterError(
                f"{self.where}: {reply.length:,} bytes, and {path.parent} has room for {free:,}: set TMPDIR to a "
                "folder with more room"
            )
        with path.open("wb") as target:
            while count := reply.readinto(part):
                target.write(part[:count])
                self._client.traffic.add(bytes=count)
        if reply.length:
            raise Temporary("the connection is cut")

    def _unless_missing(self, method: str, take: Callable[[http.client.HTTPResponse], T]) -> T | None:
        try:
            return self._exchange(method, {}, take, missing=True)
        except HttpRefusal:
            return None

    def _exchange(
        self,
        method: str,
        asked: Mapping[str, str],
        take: Callable[[http.client.HTTPResponse], T],
        missing: bool = False,
    ) -> T:
        """What `take` makes of the answer. Failures that may pass are tried again, and an expired address is renewed
        once. `missing` raises `HttpRefusal` where there is no such file; every other failure is one line.
        """
        tries, renewed = 0, False
        while True:
            location = self._current()
            try:
                return self._once(method, location, asked, take)
            except Temporary as failure:
                tries += 1
                pause(self.where, failure, tries, self._client.stopped)
            except HttpRefusal as refusal:
                if missing and refusal.status in MISSING:
                    raise
                if refusal.status not in (401, 403) or renewed or not self._renew(location):
                    self._refuse(refusal)
                renewed = True

    def _once(
        self, method: str, location: Location, asked: Mapping[str, str], take: Callable[[http.client.HTTPResponse], T]
    ) -> T:
        url = location.url
        for _ in range(REDIRECTS):
            try:
                host = urlsplit(url).netloc.rpartition("@")[2]
                with self._client.response(method, url, {**asked, **self._headers(url)}) as reply:
                    self._client.met.add(host)
                    if reply.status not in MOVED:
                        _check(reply)
                        result = take(reply)
                        self._remember_redirect(location, url)
                        return result
                    reply.readinto(bytearray(PROGRESS))  # a short body keeps the connection
                    url = _redirect_target(url, reply.getheader("Location") or "")
            except Unreachable as error:
                if host not in self._client.met:
                    raise LocaterError(f"{self.where}: {error}") from None
                raise Temporary(str(error)) from None
            except (OSError, http.client.HTTPException) as error:
                raise Temporary(reason(error, host)) from None
            except ForbiddenRedirect as error:
                raise LocaterError(f"{self.where}: {error}") from None
            except (ValueError, OverflowError) as error:  # of the standard library, for what it does not expect
                raise LocaterError(
                    f"{self.where}: its server's answer is not HTTP ({first_line(error):.200})"
                ) from None
        raise LocaterError(f"{self.where}: more than {REDIRECTS} redirections: give the address that they lead to")

    def _fill(self, start: int, view: memoryview, reply: http.client.HTTPResponse) -> int:
        """Put the body of an answer into `view`; how many bytes came."""
        if reply.status == 206:
            first, size = _content_range(reply)
            if first != start:
                raise LocaterError(f"{self.where}: its server sent bytes from {first} and not from {start}: refused")
        elif start == 0 and reply.length is not None and reply.length <= len(view):  # all of a small file
            size = reply.length
        else:
            raise LocaterError(f"{self.where}: its server does not send ranges of files: add --download")
        self._pin(reply, size)
        wanted, got = min(len(view), size - start), 0
        if wanted <= 0:
            return 0
        try:
            while got < wanted and (count := reply.readinto(view[got : min(got + PART, wanted)])):
                got += count
        except TooSlow:
            raise
        except (OSError, http.client.HTTPException) as error:
            if not got:
                raise Temporary(f"the connection is cut ({reason(error, 'the server')})") from None
        finally:
            self._client.traffic.add(bytes=got)
        if not got:
            raise Temporary("the connection is cut")
        return got

    def _body(self, reply: http.client.HTTPResponse) -> bytes:
        body, part = bytearray(), memoryview(bytearray(PART))
        while len(body) <= JSON_LIMIT and (count := reply.readinto(part)):
            body += part[:count]
            self._client.traffic.add(bytes=count)
        if len(body) > JSON_LIMIT:
            raise LocaterError(
                f"{self.where}: more than {JSON_LIMIT:,} bytes, too large for a configuration or an index"
            )
        if reply.length:
            raise Temporary("the connection is cut")
        return bytes(body)

    def _size_and_version(self, reply: http.client.HTTPResponse) -> tuple[int, str]:
        reply.read()  # nothing, of a HEAD
        version, size = _version(reply), _size(reply.getheader("Content-Length") or "")
        if version is None or size is None:
            raise LocaterError(
                f"{self.where}: its server gives no size, or neither ETag nor date, so a change would not be seen"
            )
        return size, version

    def _pin(self, reply: http.client.HTTPResponse, size: int) -> None:
        """Remember size and version of the file, or compare them with those that were seen first."""
        version = _version(reply)
        with self._lock:
            if self.size is None:
                self.size = size
            if self._version is None:
                self._version = version
            if (self.size, self._version) != (size, version):
                raise LocaterError(f"{self.where}: {CHANGED}")

    def _condition(self) -> dict[str, str]:
        """What makes a server refuse if the file has changed. A weak ETag cannot be asked for."""
        version = self._version
        if not self._conditional or version is None or version.startswith("W/") or not version.isprintable():
            return {}
        return {"If-Match" if version.startswith('"') else "If-Unmodified-Since": version}

    def _current(self) -> Location:
        with self._lock:
            if self._location is None:
                self._location = self._resolve()
                self.size = self._location.size if self.size is None else self.size
            return self._location

    def _remember_redirect(self, location: Location, url: str) -> None:
        """Ask where a redirection led from now on."""
        with self._lock:
            if url != location.url and self._location is location:
                self._location = replace(location, url=url)

    def _renew(self, refused: Location) -> bool:
        """Ask once more where the bytes are; whether there is another address than the one that was refused."""
        with self._lock:
            if self._location is not refused:
                return True  # another thread has asked
            renewed = self._resolve()
            if renewed.digest is not None:
                if (renewed.digest, renewed.size) != (refused.digest, refused.size):
                    raise LocaterError(f"{self.where}: {CHANGED}")
                self._version = None  # the same content; another host may write its ETag otherwise
            self._location = renewed
            return renewed.url != refused.url

    def _refuse(self, refusal: HttpRefusal) -> NoReturn:
        if refusal.status == 412:
            words = CHANGED
        elif refusal.status in MISSING:
            words = "no such file there"
        elif refusal.status in (401, 403):
            words = f"its server refuses access ({refusal})"
        elif refusal.status == 416:
            words = f"shorter than it was: {CHANGED}"
        else:
            words = f"its server answers {refusal}"
        raise LocaterError(f"{self.where}: {words}") from None


def _check(reply: http.client.HTTPResponse) -> None:
    """Raise for every answer but the bytes that were asked for."""
    if reply.status in TEMPORARY:
        words = f"the server answers {reply.status} {reply.reason:.200}".strip()
        raise Temporary(words, retry_after(reply.getheader("Retry-After")))
    if reply.status not in (200, 206):
        raise HttpRefusal(reply.status, f"{reply.getheader('X-Error-Message') or reply.reason:.200}")
    if reply.getheader("Content-Encoding", "identity") != "identity":
        raise HttpRefusal(reply.status, "with a compressed body, which has no ranges: add --download")


def _content_range(reply: http.client.HTTPResponse) -> tuple[int, int]:
    """(first byte, size of the file) of `Content-Range: bytes 0-99/1000`."""
    header = reply.getheader("Content-Range") or ""
    unit, _, rest = header.partition(" ")
    span, _, end = rest.partition("/")
    first, size = _size(span.partition("-")[0]), _size(end)
    if unit != "bytes" or first is None or size is None:
        raise HttpRefusal(reply.status, f"without a range of known size ({header:.100})")
    return first, size


def _size(digits: str) -> int | None:
    """A number of bytes; None for what cannot be one.

    >>> _size("12"), _size("-1"), _size("9" * 5000)
    (12, None, None)
    """
    number = int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 20 else LARGEST
    return number if number < LARGEST else None


def _version(reply: http.client.HTTPResponse) -> str | None:
    """What changes with the content."""
    return reply.getheader("ETag") or reply.getheader("Last-Modified")


def _redirect_target(url: str, location: str) -> str:
    """Where a redirection leads: to http or https, and never from https to http."""
    # headers are read as Latin-1, and may hold bytes that have to be quoted in a request
    target = urljoin(url, quote(location.encode("latin-1", "replace"), safe="%/:?#[]@!$&'()*+,;=~"))
    if not may_lead(url, target):
        before, after = urlsplit(url).scheme, urlsplit(target).scheme
        raise ForbiddenRedirect(f"its server redirects from {before}: to {after:.20}:, which is not followed")
    return target


def may_lead(url: str, target: str) -> bool:
    """Whether a server behind one address may send its clients to another."""
    before, after = urlsplit(url).scheme, urlsplit(target).scheme
    return after == "https" or (before, after) == ("http", "http")
