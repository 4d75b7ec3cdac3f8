"""What a remote source costs, counted while it is read."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass
class Traffic:
    """Bytes and requests so far. `planned` is how many bytes of weights there will be; 0 where that is not known."""

    bytes: int = 0
    requests: int = 0
    planned: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, bytes: int = 0, requests: int = 0, planned: int = 0) -> None:
        with self._lock:
            self.bytes += bytes
            self.requests += requests
            self.planned += planned
