"""What several commands share: default settings, and the type of a progress bar. Apart from the results, so that
`locater --help` does not load those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

LENGTH = 256  # tokens in view
TOKENS = 8192  # tokens that a probe measures
CACHE_LENGTH = 512  # tokens in a sequence, where a window is tried
Progress = Callable[[Iterable[Any], int], Iterable[Any]]  # (items, their number) -> the same items, shown as a bar
