"""The exception for everything that a user can fix. Its message is one line that names the culprit and what to do."""

from __future__ import annotations

import re

# groups 1 and 3 are kept, the scheme and the place; left out is what is before `@` (a password may have slashes in it,
# which do not belong there) and after `?`. In names of buckets `?` may be a wildcard; on the hub a revision follows `@`
USER = r"""([^\s/@:'"<>]*:(?!\d+/)[^\s@'"<>]*@|[^\s/@'"<>]*@)?"""
PLACE = r"""([^\s?#'"<>]*)"""
WEB = re.compile(
    rf"""(?i)\b(https?:/{{0,3}}|ftps?://){USER}{PLACE}([?#][^\s'"<>]*?(?=[:,;.)]{{0,3}}(?:[\s'"<>]|$)))?"""
)
OTHER = re.compile(rf"""(?i)\b(?!hf:|https?:)([a-z][a-z0-9+.-]{{0,20}}://){USER}{PLACE}([?#][\w.%-]+=[^\s'"<>]*)?""")


class LocaterError(Exception):
    """Bad input. The command line prints the message and exits with status 2. A message names files and addresses as
    the user gave them, and what may be a secret in an address is left out of it.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(without_secrets(message))


def without_secrets(text: str) -> str:
    """Text without the parts of addresses before `@` and after `?`: passwords, tokens and signatures.

    >>> without_secrets("https://me:secret@host/x?token=secret: no such file"), without_secrets("hf://gpt2@main")
    ('https://host/x: no such file', 'hf://gpt2@main')
    >>> without_secrets("s3://bucket/step-?"), without_secrets("s3://bucket/x?X-Amz-Signature=secret")
    ('s3://bucket/step-?', 's3://bucket/x')
    """
    return OTHER.sub(r"\1\3", WEB.sub(r"\1\3", text))


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
