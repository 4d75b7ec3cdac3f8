"""Default settings of several commands. Apart from the results, so that `locater --help` does not load those."""

from __future__ import annotations

LENGTH = 256  # tokens in view
TOKENS = 8192  # tokens that a probe measures
