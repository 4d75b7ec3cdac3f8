"""The versions of the package, of its documents and of its code. The build reads the first."""

from __future__ import annotations

from functools import cache

__version__ = "0.2.0"
SCHEMA = 1  # of the JSON documents; increases when a key moves or changes its meaning
# of scans and of comparisons of them: 2 since `expected_entropy` is that of normal logits, and `sharp` stands on it
SCAN_SCHEMA = 2
OF_SCHEMA = "of_schema"  # in the assumptions of a scan that was read from a document of an earlier schema: its number
OLD_NUMBERS = (
    "of a document of version 0.2 or before: expected entropy (H) by the old formula log T - v/2, "
    "and sharp where that is 0; scan the model again for the entropy of normal logits"
)
COMPUTED_AGAIN = (
    "of a document of version 0.2 or before: expected entropy and flags computed again from its F and key bias"
)
OLD_NOTES = (OLD_NUMBERS, COMPUTED_AGAIN)  # notes of such a scan
PROBE_SCHEMA = 2  # of the document of `locater probe`: 2 since M, F and localization are predicted_M, ...


@cache
def code_version(*rooms: str) -> str:
    """A hash of the names and sources of rooms, folders or single files: what they compute may differ where it differs.

    >>> code_version("theory") == code_version("theory") != code_version("families", "theory")
    True
    >>> code_version("theory", "verbs")
    Traceback (most recent call last):
    ...
    ValueError: there is no room 'verbs'
    """
    import hashlib  # not at the top: `import locater` reads only the version
    from pathlib import Path

    root, digest = Path(__file__).parent, hashlib.sha256()
    files = {room: [*(root / room).rglob("*.py"), *root.glob(f"{room}.py")] for room in rooms}
    if missing := [room for room, found in files.items() if not found]:  # renamed: its code would count for nothing
        raise ValueError(f"there is no room {missing[0]!r}")
    for path in sorted(path for found in files.values() for path in found):
        digest.update(f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()
