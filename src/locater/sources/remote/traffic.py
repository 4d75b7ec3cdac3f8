"""What a remote source costs, counted while it is read."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


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
