"""Random numbers of a run: its own, saved with a checkpoint and restored from it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def own_randomness(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers of a run; those of the caller go on afterwards as if there had been none."""
    before = random.getstate()
    with torch.random.fork_rng(range(torch.cuda.device_count()) if device.type == "cuda" else ()):
        try:
            torch.manual_seed(seed)
            random.seed(seed)
            yield
        finally:
            random.setstate(before)


def random_state() -> dict[str, Any]:
    """All random numbers that training or a control may draw on."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"torch": torch.get_rng_state(), "cuda": cuda, "python": random.getstate()}


def restore_random(held: dict[str, Any]) -> None:
    torch.set_rng_state(held["torch"].cpu())
    if held["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([x.cpu() for x in held["cuda"]])
    version, words, gauss = held["python"]
    random.setstate((version, tuple(words), gauss))
