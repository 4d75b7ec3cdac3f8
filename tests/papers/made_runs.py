"""Lines of training runs that nobody trained, to judge by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from locater_papers.runs import Arm, Runs


def made_line(loss: float, **more: Any) -> dict[str, Any]:
    heads = {"M": 0.0, "S": 0.0, "F": 1.0, "concentration": 0.0}
    own = {
        "status": "done",
        "select_loss": loss,
        "report_loss": loss,
        "accuracy": None,
        "entropy": 2.0,
        "heads": heads,
        "device": "cpu",
    }
    return {**own, **more}


def fill(runs: Runs, arm: Arm, losses: Sequence[float], measures: Mapping[str, Any] | None = None, **more: Any) -> None:
    """An arm whose first rate is the best, with these losses by seed."""
    for rate in arm.rates[1:]:
        runs.add(arm.row(rate, 0), made_line(losses[0] + 1))
    for seed, loss in enumerate(losses):
        runs.add(arm.row(arm.rates[0], seed), made_line(loss, measures=measures, **more))
