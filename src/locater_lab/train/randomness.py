"""The random numbers of a run: apart from the caller's, saved with each checkpoint and restored from it."""

from __future__ import annotations

import os
import random
import warnings
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


@contextmanager
def deterministic(device: torch.device, wanted: bool = True) -> Iterator[None]:
    """On a GPU, prefer algorithms whose sums have a fixed order: equal plans then give equal weights on one device.

    Without it equal runs of a compiled model end up to 0.01 nats apart. An operation that has no such algorithm is used
    as it is; PyTorch's warnings about it are left out.
    """
    if device.type != "cuda" or not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


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
