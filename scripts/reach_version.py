"""Which code a line of docs/results/reach.jsonl was made with."""

from __future__ import annotations

import hashlib
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "locater"
ROOMS = ("families", "tape", "observing")


def code_version() -> str:
    """The first characters of a hash of the sources that find, verify and observe attention."""
    digest = hashlib.sha256()
    for path in sorted(path for room in ROOMS for path in (SOURCE / room).rglob("*.py")):
        digest.update(f"{path.relative_to(SOURCE).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]
