"""The progress line of a run: rewritten in place on a terminal, plain lines on a pipe."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from locater.escapes import one_line, terminal_behind


class Live:
    """Shows the progress that `run` reports. On a pipe at most one line in `pause` seconds, and the last."""

    def __init__(self, stream: TextIO | None = None, label: str = "", pause: float = 5.0) -> None:
        self.stream = terminal_behind(sys.stderr if stream is None else stream)
        self.label, self.pause = label, pause
        self.terminal = self.stream.isatty()
        self.next = 0.0

    def __call__(self, event: dict[str, Any]) -> None:
        last = event["step"] == event["steps"]
        if self.terminal:
            self.stream.write(f"\r\x1b[K{one_line(self.label)}{line(event)}" + ("\n" if last else ""))
        elif last or time.monotonic() >= self.next:
            self.next = time.monotonic() + self.pause
            self.stream.write(f"{one_line(self.label)}{line(event)}\n")
        self.stream.flush()

    def clear(self) -> None:
        """Erase the line, so that the next output starts on an empty one."""
        if self.terminal:
            self.stream.write("\r\x1b[K")
            self.stream.flush()


def line(event: dict[str, Any]) -> str:
    """One line of a run.

    >>> event = {"step": 50, "steps": 1000, "loss": 2.0, "perplexity": 7.389, "select_loss": None, "entropy": 3.25}
    >>> line({**event, "tokens_per_second": 81234.0, "seconds_left": 754.0})
    'step 50/1000  loss 2.000  perplexity 7.389  entropy 3.25  81,234 tokens/s  12 min 34 s left'
    """
    parts = [f"step {event['step']}/{event['steps']}", f"loss {event['loss']:.3f}"]
    if event["perplexity"] is not None:
        parts.append(f"perplexity {event['perplexity']:.4g}")
    if event["select_loss"] is not None:
        parts.append(f"select {event['select_loss']:.3f}")
    if event["entropy"] is not None:
        parts.append(f"entropy {event['entropy']:.2f}")
    parts.append(f"{event['tokens_per_second']:,.0f} tokens/s")
    if event["step"] < event["steps"]:
        parts.append(f"{duration(event['seconds_left'])} left")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """
    >>> duration(5.2), duration(754), duration(7300)
    ('5 s', '12 min 34 s', '2 h 1 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
