"""The random numbers of a run: apart from the caller's, saved with each checkpoint and restored from it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def own_randomness(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the random numbers of a run; afterwards those of the caller go on as if it had not taken place."""
    before = random.getstate()
    with torch.random.fork_rng(range(torch.cuda.device_count()) if device.type == "cuda" else ()):
        try:
            torch.manual_seed(seed)
            random.seed(seed)
            yield
        finally:
            random.setstate(before)


def random_state() -> dict[str, Any]:
    """The state of every generator that training or a control may use."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"torch": torch.get_rng_state(), "cuda": cuda, "python": random.getstate()}


def restore_random(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([x.cpu() for x in state["cuda"]])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
