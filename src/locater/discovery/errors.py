"""The error of discovery: why one attention cannot be read."""

from __future__ import annotations

from locater.errors import LocaterError


class UnreadableError(LocaterError):
    """Why an attention cannot be read, without the name of its module."""
