"""Losses on their way from the device to the log: copied without waiting, and read once they have arrived."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

SLOTS = 256  # most losses under way at a time


class Pending:
    """A queue of losses in the order of their steps.

    On the CPU each is a number at once. On CUDA a copy to pinned memory runs behind the step, so that a killed run
    loses only what the device had not computed. On other devices a loss stays in the queue until `take(wait=True)`.
    """

    def __init__(self) -> None:
        self._queue: deque[tuple[int, Any, torch.cuda.Event | None]] = deque()
        self._slots: Tensor | None = None  # pinned once, since pinning waits for the device
        self._count = 0

    def add(self, step: int, loss: Tensor | float) -> None:
        if not isinstance(loss, Tensor):
            self._queue.append((step, float(loss), None))
            return
        loss = loss.detach()
        if loss.device.type == "cpu":
            self._queue.append((step, float(loss), None))
        elif loss.device.type == "cuda" and type(loss) in (Tensor, nn.Parameter) and len(self._queue) < SLOTS:
            if self._slots is None:
                self._slots = torch.empty(SLOTS, dtype=torch.float64, pin_memory=True)
            copy = self._slots[self._count % SLOTS].copy_(loss.reshape(()), non_blocking=True)
            self._count += 1
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(loss.device))
            self._queue.append((step, copy, arrived))
        else:  # a copy: the loop may write over the tensor before it is read
            self._queue.append((step, loss.clone(), None))

    def take(self, wait: bool = False) -> Iterator[tuple[int, float]]:
        """Steps and losses that have arrived, the earliest first; with `wait` all of them."""
        while self._queue and (wait or _arrived(*self._queue[0][1:])):
            step, loss, arrived = self._queue.popleft()
            if arrived is not None:
                arrived.synchronize()
            yield step, float(loss)

    def clear(self) -> None:
        self._queue.clear()


def _arrived(loss: Any, copied: torch.cuda.Event | None) -> bool:
    return isinstance(loss, float) if copied is None else copied.query()
