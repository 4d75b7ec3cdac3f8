"""Secrets in addresses, left out of what is printed: passwords, tokens and signatures."""

from __future__ import annotations

import re

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
