"""The task `ngram`: its source against closed forms, its facts, what is refused, what a run reports."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from locater import LocaterError
from locater_lab.data.synthetic import NgramSource
from locater_lab.train import Plan, load
from locater_lab.train import run as train
from locater_lab.train.data import HELD_OUT, open_data
from tests.conftest import Result as Ran

TINY = Plan(
    task="ngram",
    vocabulary=3,
    parents="1,2",
    concentration=0.3,
    layers=1,
    width=8,
    heads=1,
    length=12,
    steps=3,
    batch=64,
    mlp="none",
    observe=0,
    evaluate=0,
    checkpoint=0,
    device="cpu",
)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("parents", [(1,), (2,), (1, 2), (1, 3)])
def test_tables_of_one_choice_decide_every_token(parents: tuple[int, ...]) -> None:
    source = NgramSource(3, parents, 1.0)
    choices = torch.randint(3, (40, source.contexts), generator=rng())
    rows = source.follow(torch.nn.functional.one_hot(choices, 3).double(), 30, rng(1)).tolist()
    for row, table in zip(rows, choices.tolist(), strict=True):
        for t in range(max(parents), 30):
            context = 0
            for distance in parents:
                context = 3 * context + row[t - distance]
            assert row[t] == table[context]
    assert len({tuple(row[: max(parents)]) for row in rows}) > 2, "first tokens vary"


def test_frequencies_are_those_of_the_table() -> None:
    source = NgramSource(3, (1,), 1.0)
    table = source.tables(1, rng(3))
    row = source.follow(table, 40_000, rng(4))[0]
    counts = torch.bincount(3 * row[:-1] + row[1:], minlength=9).view(3, 3).double()
    assert torch.allclose(counts / counts.sum(1, keepdim=True), table[0], atol=0.02)


@pytest.mark.parametrize("parents", [(1,), (1, 2), (1, 3)])
def test_losses_of_bayes_add_up_to_the_marginal_likelihood(parents: tuple[int, ...]) -> None:
    """p(x) of a Dirichlet prior is a product over contexts of B(counts + a) / B(a): a closed form by log-gamma."""
    source = NgramSource(3, parents, 0.4)
    rows = source.sample(20, 25, rng(5))
    reach, a = max(parents), torch.full((3,), 0.4, dtype=torch.float64)
    expected = []
    for row in rows.tolist():
        counts: dict[tuple[int, ...], Tensor] = {}
        for t in range(reach, len(row)):
            context = tuple(row[t - distance] for distance in parents)
            counts.setdefault(context, torch.zeros(3, dtype=torch.float64))[row[t]] += 1

        def log_beta(x: Tensor) -> float:
            return float(torch.lgamma(x).sum() - torch.lgamma(x.sum()))

        expected.append(reach * math.log(3) - sum(log_beta(n + a) - log_beta(a) for n in counts.values()))
    assert torch.allclose(source.surprise(rows).sum(1), torch.tensor(expected, dtype=torch.float64), atol=1e-10)


def test_counting_with_other_parents_against_a_loop() -> None:
    source = NgramSource(3, (1, 2), 0.5)
    rows = source.sample(6, 20, rng(6))
    for parents in [(), (2,)]:
        got = source.surprise(rows, parents)
        for row, losses in zip(rows.tolist(), got.tolist(), strict=True):
            for t, loss in enumerate(losses):
                if t < max((*parents, 0)):
                    assert loss == pytest.approx(math.log(3))
                    continue
                past = [s for s in range(max((*parents, 0)), t) if all(row[s - p] == row[t - p] for p in parents)]
                equal = sum(row[s] == row[t] for s in past)
                assert loss == pytest.approx(-math.log((equal + 0.5) / (len(past) + 1.5)), abs=1e-12)


def test_no_rival_has_a_lower_loss_than_bayes() -> None:
    source = NgramSource(2, (1, 2), 0.2)
    losses = source.rivals(source.sample(2000, 60, rng(7)))
    assert list(losses) == ["", "1", "2", "1,2"]
    assert losses["1,2"] < min(losses["1"], losses["2"]) < losses[""] < math.log(2)


def test_facts_and_splits(tmp_path: Path) -> None:
    data = open_data(TINY, tmp_path, torch.device("cpu"))
    inputs, targets = data.batch(3)
    assert inputs.shape == targets.shape == (64, 12)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(open_data(TINY, tmp_path, torch.device("cpu")).batch(3)[1], targets)
    rows = torch.cat([torch.cat([x, y[:, -1:]], 1) for x, y in data.windows("report")])
    assert rows.shape == (HELD_OUT, 13)
    assert data.facts["parents"] == [1, 2]
    least = float(NgramSource(3, (1, 2), 0.3).surprise(rows)[:, 1:].mean())
    assert data.facts["least_loss"]["report"] == pytest.approx(least)
    assert data.facts["counting_loss"]["1,2"] == pytest.approx(least)
    other = open_data(replace(TINY, seed=4), tmp_path, torch.device("cpu"))
    assert other.facts == data.facts
    assert not torch.equal(other.batch(3)[1], targets)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocabulary": 256}, "a table would have 65,536 probabilities, 4,096 at most: give a smaller --vocabulary"),
        ({"vocabulary": 3, "parents": "0"}, "parents='0': give distances from 1 on"),
        ({"vocabulary": 3, "parents": "1,1"}, "parents='1,1': give distances from 1 on, each once"),
        ({"vocabulary": 3, "parents": "a"}, "parents='a': give distances"),
        ({"vocabulary": 3, "parents": "1,9", "length": 8}, "parents=1,9: the farthest is beyond the length of 8"),
        ({"vocabulary": 1}, "vocabulary=1: must be at least 2"),
        ({"vocabulary": 3, "concentration": 0.0}, "concentration=0.0: must be at least 0.01"),
        ({"vocabulary": 3, "corpus": ["a.txt"]}, "task=ngram makes its own tokens: leave out corpus=a.txt"),
    ],
)
def test_bad_input_is_refused_in_a_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LocaterError) as error:
        Plan.from_dict({"task": "ngram", **options})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_model_without_mlps_learns_what_counting_tokens_knows(tmp_path: Path) -> None:
    plan = replace(TINY, vocabulary=2, parents="1", layers=1, width=16, steps=60, rate=2e-2, out=str(tmp_path))
    result = train(plan)
    assert result.data["least_loss"]["report"] < result.report_loss < math.log(2) - 0.02
    assert load(result.model).shape.vocabulary == 2


def test_the_command_tells_the_distance_from_bayes(tmp_path: Path, run: Callable[..., Ran]) -> None:
    options = "--task ngram --vocabulary 3 --parents 1,2 --layers 1 --width 8 --heads 1 --length 12 --steps 2 --device cpu".split()
    done = run("train", "--out", tmp_path / "a", *options)
    assert done.status == 0, done.err
    assert " above Bayes), select loss" in done.out
    refused = run("train", "--out", tmp_path / "b", "--parents", "2", "--steps", "2")
    assert refused.status == 2
    assert refused.err.strip() == "locater: --parents does nothing with --task causal: leave one of them out"
