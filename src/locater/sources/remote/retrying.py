"""Ask a busy server again: as often, and after as long, as it is polite to."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from threading import Event
from typing import TypeVar

from locater.errors import LocaterError

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


def tried(where: str, action: Callable[[], T]) -> T:
    """The result of `action`, which is run again where it raises `Temporary`."""
    tries = 0
    while True:
        try:
            return action()
        except Temporary as failure:
            tries += 1
            pause(where, failure, tries)
