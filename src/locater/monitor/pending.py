"""Losses on their way from the device to the log: copied without waiting, handed out once they have arrived."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

SLOTS = 256  # losses under way at a time


class Pending:
    """Losses in the order of their steps. On the CPU each is a number at once; on CUDA a copy to pinned memory runs
    behind the step, so that a killed run loses only what the device had not computed. Elsewhere they are kept until
    somebody waits.
    """

    def __init__(self) -> None:
        self._held: deque[tuple[int, Any, torch.cuda.Event | None]] = deque()
        self._slots: Tensor | None = None  # pinned once: to pin memory waits for the device
        self._count = 0

    def add(self, step: int, loss: Tensor | float) -> None:
        if not isinstance(loss, Tensor):
            self._held.append((step, float(loss), None))
            return
        loss = loss.detach()
        if loss.device.type == "cpu":
            self._held.append((step, float(loss), None))
        elif loss.device.type == "cuda" and type(loss) in (Tensor, nn.Parameter) and len(self._held) < SLOTS:
            if self._slots is None:
                self._slots = torch.empty(SLOTS, dtype=torch.float64, pin_memory=True)
            copy = self._slots[self._count % SLOTS].copy_(loss.reshape(()), non_blocking=True)
            self._count += 1
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(loss.device))
            self._held.append((step, copy, arrived))
        else:  # a copy: the loop may write over the tensor before it is read
            self._held.append((step, loss.clone(), None))

    def take(self, wait: bool = False) -> Iterator[tuple[int, float]]:
        """Those that have arrived, the earliest first; all of them with `wait`."""
        while self._held and (wait or _arrived(*self._held[0][1:])):
            step, loss, arrived = self._held.popleft()
            if arrived is not None:
                arrived.synchronize()
            yield step, float(loss)

    def clear(self) -> None:
        self._held.clear()


def _arrived(loss: Any, copied: torch.cuda.Event | None) -> bool:
    return isinstance(loss, float) if copied is None else copied.query()
