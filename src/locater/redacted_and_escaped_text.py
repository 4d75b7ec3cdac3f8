"""Text that is safe to print. Secrets in addresses are left out: passwords, tokens and signatures. Names in files and
answers of servers may contain characters that a terminal acts on: they are shown as `\\u001b`, never sent. Commands
print through `Escaping`, so no other place needs to care.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any

# groups 1 and 3 are kept, the scheme and the place; left out is what is before `@` (a password may have slashes in it,
# which do not belong there) and after `?`. In names of buckets `?` may be a wildcard; on the hub a revision follows `@`
USER = r"""([^\s/@:'"<>]*:(?!\d+/)[^\s@'"<>]*@|[^\s/@'"<>]*@)?"""
PLACE = r"""([^\s?#'"<>]*)"""
WEB = rf"""(?i)\b(https?:/{{0,3}}|ftps?://){USER}{PLACE}([?#][^\s'"<>]*?(?=[:,;.)]{{0,3}}(?:[\s'"<>]|$)))?"""
OTHER = rf"""(?i)\b(?!hf:|https?:)([a-z][a-z0-9+.-]{{0,20}}://){USER}{PLACE}([?#][\w.%-]+=[^\s'"<>]*)?"""


def without_secrets(text: str) -> str:
    """Text without the parts of addresses before `@` and after `?`: passwords, tokens and signatures.

    >>> without_secrets("https://me:secret@host/x?token=secret: no such file"), without_secrets("hf://gpt2@main")
    ('https://host/x: no such file', 'hf://gpt2@main')
    >>> without_secrets("s3://bucket/step-?"), without_secrets("s3://bucket/x?X-Amz-Signature=secret")
    ('s3://bucket/step-?', 's3://bucket/x')
    """
    # compiled at the first call, which is not at every start
    return re.sub(OTHER, r"\1\3", re.sub(WEB, r"\1\3", text))


# C0 without tab and newline, DEL and C1; marks, embeddings, overrides and isolates of writing directions; the line and
# paragraph separators; halves of surrogates
ACTED_ON = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"


def escape_controls(text: str) -> str:
    """Text without characters that a terminal acts on; in JSON the escapes mean the same as the characters.

    >>> escape_controls("a\\x1b[31m"), escape_controls("two\\nlines")
    ('a\\\\u001b[31m', 'two\\nlines')
    """
    # compiled at the first call: `locater --help` makes none
    return re.sub(ACTED_ON, lambda found: f"\\u{ord(found[0]):04x}", text)


def one_line(text: object) -> str:
    """Text for a single line: newlines are escaped too.

    >>> one_line("two\\nlines")
    'two\\\\nlines'
    """
    return escape_controls(str(text).replace("\r\n", "\n").replace("\n", "\\n"))


class Escaping:
    """A text stream that escapes what is written to it. Consoles of rich write past it, to `rich_proxied_file`: they
    send commands to the terminal, and escape the text between them.
    """

    def __init__(self, stream: Any) -> None:
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        self.rich_proxied_file.write(escape_controls(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


def terminal_behind(stream: Any) -> Any:
    """The stream for terminal commands, such as those that rewrite a line."""
    return getattr(stream, "rich_proxied_file", stream)


@contextlib.contextmanager
def escaped_output() -> Iterator[None]:
    """Inside, everything that is printed, warned about or logged is escaped."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (
        stream if isinstance(stream, Escaping) or stream is None else Escaping(stream) for stream in before
    )
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
