"""The text that every CPython carries."""

from __future__ import annotations

import json
from importlib.resources import files

from locater.data.corpus import embedded_text, fingerprint


def test_embedded_text_is_large_readable_and_the_same_each_time() -> None:
    text = embedded_text()
    assert len(text) > 1_500_000
    assert text.count(" the ") > 5_000
    assert fingerprint(text) == fingerprint(embedded_text())


def test_the_shipped_checkpoint_names_its_text() -> None:
    record = json.loads((files("locater") / "demo" / "training.json").read_text())
    assert len(record["text_sha256"]) == 64
    assert record["steps"] == 1500
