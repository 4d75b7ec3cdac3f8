"""A format whose reader has every kind of fault, to see that the harness sees them: the seed chooses which."""

from __future__ import annotations

import os
import time
from pathlib import Path
from random import Random
from typing import Any

from locater import LocaterError
from tests.fuzz.formats import Format


def broken(folder: Path) -> Any:
    """A reader with every kind of fault, chosen by the file."""
    match (folder / "x").read_text():
        case "0":
            raise ValueError("an exception of another kind")
        case "1":
            return {"a": len(bytearray(b"memory" * 200_000_000)) // 1_200_000_000}
        case "2":
            time.sleep(600)
        case "3":
            os._exit(7)
        case "4":
            return {"a": 2}
        case "5":
            raise LocaterError("two\nlines")
        case "6":
            raise LocaterError("refused")
        case "9":
            return {}
    return {"a": 1}


def reference(folder: Path) -> Any:
    if (folder / "x").read_text() == "7":
        raise ValueError("refused by the library")
    return {"a": 1}


def write_seed(rng: Random, folder: Path) -> None:
    known = {Random(seed).random(): seed for seed in range(9)}
    (folder / "x").write_text(str(known[rng.random()]))


PLANTED = Format(lambda folder: None, write_seed, broken, reference)
