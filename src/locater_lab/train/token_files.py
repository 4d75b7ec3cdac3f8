"""Tokens in files that several processes read: a sweep tokenizes its text once, not once in each process.

The folder is named by an environment variable, which child processes inherit. Without it nothing is written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from locater.inputs.corpus import fingerprint

FOLDER = "LOCATER_TOKENS"


@contextmanager
def shared_tokens(folder: Path) -> Iterator[None]:
    """Keep tokens in this folder, here and in processes started here."""
    before = os.environ.get(FOLDER)
    os.environ[FOLDER] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[FOLDER]
        else:
            os.environ[FOLDER] = before


def made_once(key: str, make: Callable[[], Any]) -> Any:
    """What `make` returns, which may be text, tensors, and lists and dictionaries of them.

    `make` is called unless the folder has the result for this key; equal keys must mean equal results.
    """
    where = os.environ.get(FOLDER)
    if where is None:
        return make()
    path = Path(where) / f"{fingerprint(key)}.pt"
    if path.is_file():
        return torch.load(path, weights_only=True)
    value, partial = make(), path.with_suffix(f".{os.getpid()}")
    torch.save(value, partial)
    partial.replace(path)  # whole or not at all
    return value
