"""The exception for everything that a user can fix. Its message is one line that names the culprit and what to do."""

from __future__ import annotations

from locater.redacted_and_escaped_text import without_secrets


class LocaterError(Exception):
    """Bad input. The command line prints the message and exits with status 2. A message names files and addresses as
    the user gave them, and what may be a secret in an address is left out of it.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(without_secrets(message))


class DamagedError(LocaterError):
    """A source that contradicts itself or its configuration. `cause` is one of `locater.findings.causes`."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


def first_line(error: BaseException) -> str:
    """The first line of the message of an exception, cut if it is long, or the name of its class if it is empty.

    >>> first_line(ValueError("one\\ntwo")), first_line(KeyError())
    ('one', 'KeyError')
    """
    return next((line[:400] for line in str(error).splitlines() if line.strip()), type(error).__name__)


def printable(name: str) -> str:
    """A name from a file, in a form that fits into a message of one line.

    >>> printable("layer.0.weight"), printable("two\\nlines")
    ('layer.0.weight', "'two\\\\nlines'")
    """
    return name if name.isprintable() and len(name) <= 200 else f"{name!r:.80}"


class UnreadableError(LocaterError):
    """Why an attention cannot be read, without the name of its module."""
