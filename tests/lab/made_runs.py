"""Lines of training runs that nobody trained, to judge by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from locater_lab.engine import claims
from locater_lab.engine.claims import Measurement
from locater_lab.engine.mechanism_runs import PROBE_SEED, RECIPES, TEXT_SEEDS, recipe_row, text_arms, text_rows
from locater_lab.engine.reproduction import Paper, Reproduction, Setting, reproduce
from locater_lab.engine.runs import Arm, Runs


@contextmanager
def lifted_rules() -> Iterator[None]:
    """Which way claims go by few made-up runs, all seeds of all arms counted. The rules on edges and on seeds, under which
    few runs decide nothing, have tests of their own (tests/lab/engine).
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Arm, "edge", lambda self, runs: None)
        patch.setattr(Arm, "choosing", 0)
        patch.setattr(claims, "FEWEST_SEEDS", 1)
        yield


def reproduce_without_rules(paper: Paper, setting: Setting, claim: str | None = None) -> Reproduction:
    with lifted_rules():
        return reproduce(paper, setting, claim)


def known_measurements(found: Mapping[str, Measurement | None]) -> dict[str, Measurement]:
    return {key: value for key, value in found.items() if value is not None}


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


def text_line(loss: float, share: float, rate: float = 0.5, spike: float = 30.0, **more: Any) -> dict[str, Any]:
    """A run on text, its first token with this share of rows, and `rate` of its heads with a sink."""
    measures = {"first_mass": share, "first_weight": share, "first_value": 0.2, "sink_rate": rate, "sink_ratio": rate, "row_mass": 1.0,
                "gate": None, "spike_ratio": spike}  # fmt: skip
    curve = {"sinks": [[50, share / 2], [100, share]], "sink_rates": [[50, 0.0], [100, rate]]}
    return made_line(loss, measures=measures | more, **curve)


def fill_text(
    runs: Runs, levels: Mapping[str, Mapping[str, Any]], rate: float = 0.5, recipe: str = "start token"
) -> None:
    """All runs on text: `recipe` is picked, arms have a share of 0.4 unless `levels` says otherwise. Seeds hardly
    differ.
    """
    for name in RECIPES:
        runs.add(recipe_row(name), text_line(3.0, 0.4, rate if name == recipe else 0.0))
    for number, (name, arm) in enumerate(text_arms(recipe).items()):
        for seed in range(TEXT_SEEDS):
            noise = 1e-4 * (1 + number) * ((7 * seed + number) % 5 - 2)
            own = {"share": 0.4, "rate": rate} | levels.get(name, {})
            runs.add(
                arm.row(arm.rates[0], seed), text_line(3.0 + noise, own.pop("share") + noise, own.pop("rate"), **own)
            )
    assert not runs.missing(text_rows(runs))
    assert PROBE_SEED not in range(TEXT_SEEDS)
