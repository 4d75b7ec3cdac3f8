"""Checkpoints of this machine, the hub, buckets and URLs as lists: what a pattern matches, and what tells that a
checkpoint has changed.
"""

from __future__ import annotations

import os

from locater.errors import LocaterError
from locater.sources import local_files, remote
from locater.sources.local_files import Matched
from locater.sources.remote.address import remote_address
from locater.sources.remote.folders import folder_of


def expand(pattern: str) -> Matched:
    """The checkpoints that a pattern matches, each under the one name that it always has."""
    if remote_address(pattern) is None:
        return local_files.expand(pattern)
    return Matched([full_name(source) for source in remote.expand(pattern)], [])


def full_name(source: str) -> str:
    """The name of a checkpoint that is the same from every folder: an absolute path, or an address.

    >>> full_name("s3://bucket/run/step-10/"), full_name("/data/run/../step-10")
    ('s3://bucket/run/step-10', '/data/step-10')
    """
    address = remote_address(source)
    if address is None:
        return os.path.abspath(source)
    if address.query:
        raise LocaterError(
            f"{address}: a URL with a signature or a token after '?': it would be kept with the results and expire; "
            "give hf://, s3://, gs:// or az://, or scan it by itself"
        )
    return str(address)


def identity(source: str) -> str:
    """What changes when a checkpoint changes, as a text. Weights are not read, but for both ends of local files."""
    return local_files.identity(source) if remote_address(source) is None else remote.identity(source)


def size_of(source: str) -> int | None:
    """Bytes of the files of a checkpoint; None where a server does not list them."""
    address = remote_address(source)
    if address is None:
        return local_files.size_of(source)
    sizes = [fact.rpartition(" ")[2] for fact in folder_of(address).digests().values()]
    return sum(map(int, sizes)) if sizes and all(size.isdecimal() for size in sizes) else None
