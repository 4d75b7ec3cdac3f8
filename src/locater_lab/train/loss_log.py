"""What the trainer logs of a run beside `Monitor`: the entropy for the live line, and losses where heads have no
numbers.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from locater.errors import LocaterError
from locater.runs.head_table import COLUMNS
from locater.runs.loggers import JsonlSink
from locater.runs.run_records import end_record, header, loss_record
from locater_lab.models.transformer import Attention, Transformer


class LastEntropy:
    """A sink that remembers the mean entropy of the last observed step."""

    value: float | None = None

    def write(self, record: dict[str, Any]) -> None:
        if record["kind"] == "step":
            known = [x for row in record["heads"]["entropy"] for x in row if x is not None]
            self.value = sum(known) / len(known) if known else None

    def close(self) -> None:
        """Nothing to close."""


class LossLog:
    """Takes the place of a `Monitor` where heads cannot be measured: the same log, with losses alone."""

    def __init__(self, path: Path, every: int) -> None:
        self.path, self.every, self.step = path, every, 0
        self.sink: JsonlSink | None = None
        self.warned = False

    def attach(self, model: Transformer) -> None:
        names = [name for name, module in model.named_modules() if isinstance(module, Attention)]
        heads = model.shape.heads
        layers = [{"layer": i, "name": name, "heads": heads, "kind": "self"} for i, name in enumerate(names)]
        sink, begin = JsonlSink(self.path), header(type(model).__name__, self.every, layers, COLUMNS)
        try:
            sink.check(begin)  # a log of another model is refused, and stays as it is
        except BaseException:
            sink.close()
            raise
        self.sink = sink
        self._write(begin)

    def after_step(self, loss: float, step: int, **scalars: Any) -> None:
        self.step = step
        self._write(loss_record(step, loss))

    def detach(self) -> None:
        """May be called twice."""
        self._write(end_record(self.step))
        if self.sink is not None:
            self.sink.close()
            self.sink = None

    def _write(self, record: dict[str, Any]) -> None:
        """A full disk costs the record; the user is warned once."""
        try:
            if self.sink is not None:
                self.sink.write(record)
        except LocaterError as error:
            if not self.warned:
                logging.getLogger("locater").warning("the run goes on without records: %s", error)
            self.warned = True
