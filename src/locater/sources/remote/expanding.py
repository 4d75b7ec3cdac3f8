"""A pattern of checkpoints as the sources that match it: revisions of a model on the hub, or prefixes of a bucket."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase

from locater.errors import LocaterError
from locater.sources.remote.address import BUCKETS, WEIGHTS, WILD, Address, natural_key, remote_address
from locater.sources.remote.hub import hub_revisions
from locater.sources.remote.objects import listing

SHOWN = 5  # names that a message lists


def expand(pattern: str) -> list[str]:
    """The sources that match a pattern, in the order of the numbers in their names.

    `hf://org/model@step*` is every branch and tag that matches, `s3://bucket/run/step-*` (gs, az) every prefix, and
    every weights file. A name without `*`, `?` or `[` stands for itself, as do names of this machine.

    >>> expand("hf://org/model@step1000"), expand("org/model")
    (['hf://org/model@step1000'], ['org/model'])
    """
    address = remote_address(pattern)
    if address is None or not WILD.search(f"{address.root}{address.path}{address.revision or ''}"):
        return [pattern]
    if WILD.search(address.root) or (address.scheme == "hf" and WILD.search(address.path)):
        part = "the revision, after @," if address.scheme == "hf" else "the path"
        raise LocaterError(f"{pattern}: only {part} may have * in it")
    if address.scheme == "http":
        raise LocaterError(f"{pattern}: a plain server does not list its folders: give each URL by itself")
    matching = _revisions(address) if address.scheme == "hf" else sorted(_prefixes(address), key=natural_key)
    if not matching:
        raise LocaterError(
            f"{pattern}: no {'folder or weights file' if address.scheme in BUCKETS else 'revision'} matches"
        )
    return matching


def _revisions(address: Address) -> list[str]:
    names, wanted = hub_revisions(address), address.revision or ""
    matching = sorted((name for name in names if fnmatchcase(name, wanted)), key=natural_key)
    if not matching:
        shown = ", ".join(sorted(names, key=natural_key)[:SHOWN])
        raise LocaterError(f"{address}: no branch or tag matches (there are {len(names)}: {shown}, ...)")
    return [str(replace(address, revision=name)) for name in matching]


def _prefixes(address: Address) -> Iterator[str]:
    """Addresses that match, one part of the path after the other; each part with a wildcard is listed."""
    parts = address.path.split("/")
    at = next((i for i, part in enumerate(parts) if WILD.search(part)), None)
    if at is None:
        yield str(address)
        return
    above = replace(address, path="/".join(parts[:at]))
    there, rest = listing(above), parts[at + 1 :]
    names = there.folders if rest else [*there.folders, *(name for name in there.objects if name.endswith(WEIGHTS[:5]))]
    for name in names:
        if fnmatchcase(name, parts[at]):
            yield from _prefixes(above.inside("/".join([name, *rest])))
