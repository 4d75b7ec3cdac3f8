"""Scores of heads against removal: each score is what it says, on the demo, and the page is that of the kept lines."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

import locater
from locater.commands.load_model import load_model
from locater.discovery import attention_layers
from locater.explain import Run
from locater.explain.explanation import choose_target
from locater_lab.studies import head_scores
from tests import ROOT

DEMO = Path(str(locater.__file__)).parent / "demo"
IDS = torch.arange(5, 17)[None]
LINES = [json.loads(line) for line in (ROOT / "docs/results/head-scores.jsonl").read_text().splitlines()]


@cache
def demo() -> Any:
    return load_model(str(DEMO)).double()


@cache
def line() -> dict[str, Any]:
    return head_scores.measure_prompt(demo(), IDS)


def logit(scaled: tuple[int, int] | None = None, by: float = 1.0) -> float:
    """The target, with one head's columns of the output map scaled."""
    model, run = demo(), Run(demo(), {"input_ids": IDS})
    target = choose_target(run.output)
    with torch.no_grad():
        if scaled is None:
            return target.value
        layer = attention_layers(model)[scaled[0]]
        assert layer.out is not None
        weight: Tensor = layer.out.weight()
        size = weight.shape[1] // layer.heads
        columns = slice(scaled[1] * size, (scaled[1] + 1) * size)
        before = weight[:, columns].clone()
        weight[:, columns] *= by
        try:
            return float(target.number(model(IDS)))
        finally:
            weight[:, columns] = before


@pytest.mark.parametrize("head", [(0, 1), (3, 2)])
def test_scores_are_what_they_say(head: tuple[int, int]) -> None:
    at = head[0] * 4 + head[1]
    assert line()["effect"][at] == pytest.approx(logit() - logit(head, 0.0), abs=1e-4)
    slope = (logit(head, 1.02) - logit(head, 0.98)) / 0.04  # norms of Llama round to float32
    assert line()["scores"]["gradient x output"][at] == pytest.approx(slope, rel=5e-3, abs=1e-4)
    assert all(len(values) == len(line()["effect"]) for values in line()["scores"].values())
    assert min(line()["scores"]["norm"]) > 0


def test_the_kept_page_is_that_of_the_lines() -> None:
    kept = json.loads((ROOT / "docs" / head_scores.PAPER.document_file).read_text())
    found = head_scores.results_of(LINES)
    (study,) = kept["studies"].values()
    assert study["tables"] == json.loads(json.dumps(found.tables)), "locater reproduce head-scores"
    model = "all-MiniLM-L6-v2"
    own = [x for x in LINES if x["model"] == model]
    assert len(own) == head_scores.PROMPTS
    by_hand = [
        stats.spearmanr([abs(x) for x in row["scores"]["norm"]], [abs(x) for x in row["effect"]]).statistic
        for row in own
    ]
    assert found.tables["models"][model]["scores"]["norm"]["size"][0] == pytest.approx(
        sum(by_hand) / len(by_hand), abs=1e-3
    )
