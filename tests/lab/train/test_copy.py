"""The task `copy`: its source, its batches, what is refused, what is learned."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from locater import LocaterError
from locater_lab.data.synthetic import TRIGGERS, CopySource, copy_source, entropies
from locater_lab.mechanisms import mechanisms
from locater_lab.train import Plan, load, run
from locater_lab.train.data import HELD_OUT, SourceData, open_data
from tests.conftest import Result as Ran

TINY = Plan(
    task="copy",
    vocabulary=8,
    layers=1,
    width=16,
    heads=2,
    length=16,
    steps=3,
    batch=64,
    observe=0,
    evaluate=0,
    checkpoint=0,
    device="cpu",
)


def drawn(source: CopySource, rows: int = 4000, length: int = 50, seed: int = 0) -> torch.Tensor:
    return source.sample(rows, length, torch.Generator().manual_seed(seed))


def opened(plan: Plan, folder: Path) -> SourceData[CopySource]:
    data = open_data(plan, folder, torch.device("cpu"))
    assert isinstance(data, SourceData)
    return data


def rows_of(data: SourceData[CopySource], name: str) -> torch.Tensor:
    return torch.cat([torch.cat([x, y[:, -1:]], 1) for x, y in data.windows(name)])


# The source


@pytest.mark.parametrize("vocabulary", [8, 64, 300])
def test_a_trigger_is_followed_by_the_token_before_it(vocabulary: int) -> None:
    source = copy_source(vocabulary)
    for row in drawn(source, 200).tolist():
        assert row[0] == vocabulary == source.start
        assert all(0 <= token < vocabulary for token in row[1:])
        at = [i for i, token in enumerate(row) if token in source.triggers.tolist()]
        assert min(at, default=2) >= 2, "the first token is none, or there would be nothing to copy"
        assert all(row[i + 1] == row[i - 1] for i in at if i + 1 < len(row))
        assert not any(row[i + 1] in source.triggers.tolist() for i in at if i + 1 < len(row))


def test_pairs_follow_the_chain() -> None:
    source = copy_source(8)
    rows = drawn(source)
    assert len(source.triggers) == TRIGGERS
    assert source.chain.sum(1).tolist() == pytest.approx([1.0] * 8)
    for token in set(range(8)) - set(source.triggers.tolist()):
        after = rows[:, 1:][rows[:, :-1] == token]
        found = torch.bincount(after, minlength=8) / len(after)
        room = 5 * (source.chain[token] / len(after)).sqrt()  # five standard errors
        assert bool(((found - source.chain[token]).abs() <= room).all())


def test_first_tokens_are_those_of_the_long_run() -> None:
    source = copy_source(16)
    row = drawn(source, 1, 50_000)[0, 1:]
    common = torch.bincount(row[~source.is_trigger[row]], minlength=16).double()
    assert (common / common.sum()).tolist() == pytest.approx(source.first.tolist(), abs=0.02)
    firsts = torch.bincount(drawn(source, 50_000, 1)[:, 1], minlength=16) / 50_000
    assert firsts.tolist() == pytest.approx(source.first.tolist(), abs=0.01)
    assert source.first[source.triggers].tolist() == [0.0] * TRIGGERS


@pytest.mark.parametrize("length", [2, 5])
def test_the_entropy_is_that_of_all_sequences(length: int) -> None:
    """Every sequence with its probability, written out."""
    source = copy_source(8)
    chain, first, triggers = source.chain.tolist(), source.first.tolist(), source.triggers.tolist()

    def left(before: int, now: int, chance: float, more: int) -> float:
        if not more or chance == 0:
            return -chance * math.log(chance) if chance else 0.0
        if now in triggers:
            return left(now, before, chance, more - 1)
        return sum(left(now, token, chance * chain[now][token], more - 1) for token in range(8))

    whole = sum(left(8, token, chance, length - 1) for token, chance in enumerate(first))
    assert source.entropy(length) == pytest.approx(whole / length, rel=1e-12)


def test_the_entropy_is_the_mean_surprise() -> None:
    source = copy_source(64)
    found = source.surprise(drawn(source, 8000, 64)).mean(1)
    assert float(found.mean()) == pytest.approx(source.entropy(64), abs=5 * float(found.std()) / 8000**0.5)
    assert bool((source.surprise(drawn(source))[source.is_trigger[drawn(source)[:, :-1]]] == 0).all()), (
        "a copy is no surprise"
    )


def test_pairs_and_copies_are_worth_learning() -> None:
    """A model of single tokens, one of pairs, and one that copies differ by half a nat at least."""
    source = copy_source(64)
    rows = drawn(source, 2000, 64)[:, 1:]
    pairs = torch.bincount(64 * rows[:, :-1].flatten() + rows[:, 1:].flatten(), minlength=4096).double()
    pairs = (pairs / pairs.sum()).view(64, 64)
    alone, of_pairs = float(entropies(pairs.sum(0))), float(entropies(pairs.flatten()) - entropies(pairs.sum(1)))
    assert source.entropy(64) + 0.5 < of_pairs < alone - 0.5


# Batches


def test_seed_and_step_decide_a_batch(tmp_path: Path) -> None:
    plan = replace(TINY, vocabulary=64, batch=4)
    data, again, other = opened(plan, tmp_path), opened(plan, tmp_path), opened(replace(plan, seed=1), tmp_path)
    inputs, targets = data.batch(3)
    assert inputs.shape == targets.shape == (4, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert inputs[:, 0].tolist() == [64] * 4
    data.batch(4)
    assert torch.equal(again.batch(3)[1], targets)
    assert not torch.equal(data.batch(4)[1], targets)
    assert not torch.equal(other.batch(3)[1], targets)
    assert torch.equal(other.source.chain, data.source.chain), "seeds learn one source"
    assert other.facts == data.facts


def test_splits_do_not_meet(tmp_path: Path) -> None:
    data = opened(replace(TINY, vocabulary=64, length=64, batch=100), tmp_path)
    kept = {name: {tuple(row) for row in rows_of(data, name).tolist()} for name in ("select", "report")}
    seen = {
        (*x, int(y[-1]))
        for index in range(40)
        for x, y in zip(data.batch(index)[0].tolist(), data.batch(index)[1], strict=True)
    }
    assert len(kept["select"]) == len(kept["report"]) == HELD_OUT
    assert len(seen) == 4000
    assert not kept["select"] & kept["report"] | seen & (kept["select"] | kept["report"])
    assert sum(len(x) for x, _ in data.windows("report", 7)) == 7


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_seed_draws_the_held_out_sequences(tmp_path: Path, seed: int) -> None:
    # batches of their size, drawn the same way
    data = opened(replace(TINY, vocabulary=64, batch=HELD_OUT, seed=seed), tmp_path)
    for name in ("select", "report"):
        assert not any(torch.equal(data.batch(index)[0], data.splits[name][:, :-1]) for index in range(3))


def test_facts_of_the_source(tmp_path: Path) -> None:
    data = opened(replace(TINY, vocabulary=64, batch=5), tmp_path)
    assert data.facts["vocabulary"] == 65
    assert data.facts["entropy"] == data.source.entropy(16)
    for name, least in data.facts["least_loss"].items():
        assert least == pytest.approx(float(data.source.surprise(rows_of(data, name)).mean()))
        assert least == pytest.approx(data.facts["entropy"], abs=0.05)
    assert (
        data.facts["sha256"]
        == opened(replace(TINY, vocabulary=64, seed=9), tmp_path).facts["sha256"]
        != opened(TINY, tmp_path).facts["sha256"]
    )


# What is refused


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ({"task": "copy", "corpus": ["a.txt"]}, "task=copy makes its own tokens: leave out corpus=a.txt"),
        ({"task": "copy", "vocabulary": 7}, "vocabulary=7: must be at least 8"),
        (
            {"task": "causal", "vocabulary": 64},
            "vocabulary=64: must be at least 256, except with task=copy, task=ngram and task=sort",
        ),
        ({"task": "sort", "vocabulary": 7}, "vocabulary=7: must be at least 8"),
        ({"task": "copy", "vocabulary": 4097}, "vocabulary=4097: must be at most 4096 with task=copy"),
        ({"task": "copy", "images": "a.npz"}, "task=copy makes its own tokens: leave out images=a.npz"),
        ({"task": "sort", "images": "a.npz"}, "task=sort makes its own numbers: leave out images=a.npz"),
        ({"task": "copy", "attention": "doubly_normalized"}, "task=copy: doubly_normalized attention cannot be causal"),
    ],
)
def test_bad_input_is_refused_in_a_line(held: dict[str, Any], said: str) -> None:
    with pytest.raises(LocaterError) as error:
        Plan.from_dict(held)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


# Runs


def test_a_run_learns_pairs_and_copies(tmp_path: Path) -> None:
    plan = replace(TINY, vocabulary=16, width=32, heads=1, length=32, batch=32, steps=300, rate=1e-2, out=str(tmp_path))
    result = run(plan)
    data = opened(plan, tmp_path)
    rows = rows_of(data, "report")
    counts = torch.bincount(rows[:, 1:].flatten()).double()
    least, alone = result.data["least_loss"]["report"], float(entropies(counts / counts.sum()))
    assert least < result.report_loss < least + 0.1 < alone - 0.5
    assert result.bits_per_byte is None
    assert result.accuracy is None
    with torch.no_grad():
        put_first = load(result.model)(rows[:, :-1]).argmax(-1)
    copies = data.source.is_trigger[rows[:, :-1]]
    assert float((put_first == rows[:, 1:])[copies].double().mean()) > 0.9


@pytest.mark.parametrize("name", [m.name for m in mechanisms() if m.causal != "never"])
def test_every_causal_mechanism_trains_and_is_measured(tmp_path: Path, name: str) -> None:
    result = run(replace(TINY, attention=name, out=str(tmp_path)))
    assert load(result.model).shape.causal
    for kind in ("first_mass", "sink_rate", "sink_ratio", "spike"):
        assert math.isfinite(result.measures[kind])


def test_few_numbers_are_sorted(tmp_path: Path) -> None:
    result = run(replace(TINY, task="sort", vocabulary=8, out=str(tmp_path)))
    assert result.accuracy is not None
    assert load(result.model).shape.vocabulary == 8


def test_a_run_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    class Cut(Exception):  # noqa: N818
        pass

    def tell(event: dict[str, Any]) -> None:
        if event["step"] == 5:
            raise Cut

    plan = replace(TINY, steps=8, checkpoint=2, log=1)
    whole = run(replace(plan, out=str(tmp_path / "whole")))
    with pytest.raises(Cut):
        run(replace(plan, out=str(tmp_path / "cut")), tell)
    assert run(replace(plan, out=str(tmp_path / "cut"))).report_loss == whole.report_loss


def test_the_command_tells_the_distance_from_the_source(tmp_path: Path, run: Callable[..., Ran]) -> None:
    options = "--task copy --vocabulary 8 --layers 1 --width 16 --heads 2 --length 16 --steps 2 --batch 64 --device cpu".split()
    found = run("train", "--out", tmp_path / "a", *options)
    assert found.status == 0, found.err
    assert " above its source), select loss" in found.out
    refused = run("train", "--out", tmp_path / "b", *options, "--corpus", "a.txt")
    assert refused.status == 2
    assert refused.err.strip().splitlines() == ["locater: task=copy makes its own tokens: leave out corpus=a.txt"]
