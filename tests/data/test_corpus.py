"""The text that every CPython carries."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

from locater.data.corpus import _docstrings, embedded_text, fingerprint


def test_embedded_text_is_large_and_readable() -> None:
    text = embedded_text()
    assert len(text) > 1_500_000
    assert text.count(" the ") > 5_000


def test_its_order_is_the_same_each_time() -> None:
    folder = Path(json.__file__).parents[1] / "email"
    texts = list(_docstrings(folder))
    assert len(texts) > 100
    assert fingerprint("".join(texts)) == fingerprint("".join(_docstrings(folder)))


def test_the_shipped_checkpoint_names_its_text() -> None:
    record = json.loads((files("locater") / "demo" / "training.json").read_text())
    assert len(record["text_sha256"]) == 64
    assert record["steps"] == 1500
