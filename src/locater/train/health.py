"""What is seen of attention during a run, and which layer to name when it fails."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from typing import Any

import torch

from locater.attention.call import why_unmeasurable
from locater.control.mechanism import acting_mechanism
from locater.errors import LocaterError
from locater.models.transformer import Attention, Transformer
from locater.monitor.run_monitor import COLUMNS, header
from locater.observing import observe
from locater.tracking.loggers import JsonlSink
from locater.train.batches import Batch


class LastSeen:
    """A sink that keeps the mean entropy of the last observed step, for the live line."""

    entropy: float | None = None

    def write(self, record: dict[str, Any]) -> None:
        if record["kind"] == "step":
            known = [x for row in record["heads"]["entropy"] for x in row if x is not None]
            self.entropy = sum(known) / len(known) if known else None

    def close(self) -> None:
        """Nothing to close."""


def why_unread(model: Transformer) -> str | None:
    """Why the heads of a model cannot be measured, in a line; None where they can. Controls are attached before."""
    found = (why_unmeasurable(acting_mechanism(module)) for module in model.modules() if isinstance(module, Attention))
    return next((why for why in found if why is not None), None)


class Losses:
    """Stands for a `Monitor` where heads cannot be measured: the same log, of losses alone."""

    def __init__(self, path: Path, every: int) -> None:
        self.path, self.every, self.step = path, every, 0
        self.sink: JsonlSink | None = None
        self.told = False

    def attach(self, model: Transformer) -> None:
        held = [(name, m) for name, m in model.named_modules() if isinstance(m, Attention)]
        layers = [
            {"layer": i, "name": name, "heads": model.shape.heads, "kind": "self"} for i, (name, _) in enumerate(held)
        ]
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
        self._write({"kind": "loss", "step": step, "loss": loss})

    def detach(self) -> None:
        """May be called twice."""
        self._write({"kind": "end", "step": self.step, "time": time.time()})
        if self.sink is not None:
            self.sink.close()
            self.sink = None

    def _write(self, record: dict[str, Any]) -> None:
        """A full disk costs the record, and is told once."""
        try:
            if self.sink is not None:
                self.sink.write(record)
        except LocaterError as error:
            if not self.told:
                logging.getLogger("locater").warning("the run goes on without records: %s", error)
            self.told = True


@torch.no_grad()
def culprit(model: Transformer, batches: list[Batch]) -> str:
    """The first layer whose logits are not finite on these batches, in words; where all are, the layer with the
    largest.
    """
    if why_unread(model) is not None:
        return _first_output(model, batches)
    with observe(model) as seen:
        for inputs, _ in batches:
            model(inputs)
    for row in seen.rows:
        if "nonfinite" in row.flags:
            return f"the logits of {row.name} went first (head {row.head})"
    top = max(seen.rows, key=lambda row: row.max_logit or -math.inf)
    return f"all attention logits are finite, the largest {top.max_logit:.4g} in {top.name} head {top.head}"


def _first_output(model: Transformer, batches: list[Batch]) -> str:
    """The same for attention that has no logits to measure: the first layer whose output is not finite."""
    wrong: list[str] = []
    hooks = [
        module.register_forward_hook(
            lambda *seen, name=name: None if bool(seen[-1].isfinite().all()) else wrong.append(name)
        )
        for name, module in model.named_modules()
        if isinstance(module, Attention)
    ]
    try:
        for inputs, _ in batches:
            model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return f"the outputs of {wrong[0]} went first" if wrong else "all outputs of attention are finite"
