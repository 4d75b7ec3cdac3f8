"""Fastmax: both forms, its limits against closed forms, the leak, counts, and training judged by runs that were made
up.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch

from locater_lab.engine.devices_and_processes import draw_normal
from locater_lab.engine.mechanism_runs import SOFTMAX, SOFTMAX_IMAGE
from locater_lab.engine.pages import page
from locater_lab.engine.runs import Arm, Runs
from locater_lab.mechanisms import mechanism
from locater_lab.papers import Setting, judge, reproduce
from locater_lab.papers.gerami2024 import PAPER, cost_and_training, polynomial
from tests.lab.made_runs import made_line, reproduce_without_rules


def seed_by_seed(runs: Runs, arm: Arm, losses: list[float], **by_seed: list[float]) -> None:
    """An arm whose first rate is the best; a sample without any spread would decide nothing."""
    for rate in arm.rates[1:]:
        runs.add(arm.row(rate, 0), made_line(losses[0] + 1))
    for seed, loss in enumerate(losses):
        measures = {name: values[seed] for name, values in by_seed.items()}
        accuracy = measures.pop("accuracy", None)
        runs.add(arm.row(arm.rates[0], seed), made_line(loss, measures=measures, accuracy=accuracy))


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """One run at small sizes, with runs that are made up."""
    path = tmp_path_factory.mktemp("runs") / "runs.jsonl"
    runs = Runs(path)
    seed_by_seed(runs, SOFTMAX, [4.0, 4.1, 4.2], entropy_share=[0.6, 0.601, 0.599], sink_rate=[0.1] * 3)
    seed_by_seed(runs, cost_and_training.ORDER_2, [4.2, 4.301, 4.399], entropy_share=[0.99, 0.991, 0.989])
    seed_by_seed(runs, cost_and_training.ORDER_1, [4.2, 4.3001], entropy_share=[0.995, 0.996])
    seed_by_seed(runs, SOFTMAX_IMAGE, [0.3, 0.3], accuracy=[0.9, 0.9])
    seed_by_seed(runs, cost_and_training.ON_IMAGES, [0.3, 0.3], accuracy=[0.895, 0.89501])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(polynomial, "DRAWS", {True: 6})
        patch.setattr(polynomial, "FORM_LENGTHS", {True: (256,)})
        patch.setattr(polynomial, "LIMIT_DRAWS", {True: 12})
        patch.setattr(polynomial, "LEAK_SEEDS", {True: 8})
        patch.setattr(cost_and_training, "TIMED_LENGTHS", (64, 128))
        yield reproduce_without_rules(PAPER, Setting(quick=True, runs=path)).to_dict()


def test_the_reference_by_hand() -> None:
    """Unit vectors at right angles: x = 1 with itself and 0 with the other."""
    x = torch.eye(2, dtype=torch.float64)[None, None]
    v = torch.tensor([[[[1.0], [0.0]]]], dtype=torch.float64)
    first, second = (
        polynomial.explicit_output(3 * x, x, v, order, causal=False).flatten().tolist() for order in (1, 2)
    )
    assert first == pytest.approx([2 / 3, 1 / 3])
    assert second == pytest.approx([2.5 / 3.5, 1 / 3.5])
    assert polynomial.explicit_output(x, x, v, 2, causal=True).flatten().tolist() == pytest.approx([1.0, 1 / 3.5])


@pytest.mark.parametrize("n", [4, 40])
def test_the_cap_as_a_fraction(n: int) -> None:
    top, low = Fraction(5, 2), Fraction(1, 2)
    assert polynomial.largest_weight(*polynomial.build_keys(n)) == pytest.approx(
        float(top / (top + (n - 1) * low)), abs=1e-15
    )
    assert top / (top + (n - 1) * low) == Fraction(5, n + 4)


def test_order_2_of_the_mechanism_is_positive_without_a_norm() -> None:
    assert 0.5 <= polynomial.least_f(0) + 1e-12 < 0.51


def test_entropy_is_least_at_the_worst_share() -> None:
    """Weights drawn within a ratio of 5 never exceed the gap, and two levels at the worst share come close."""
    weights = 1 + 4 * torch.rand(20_000, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64).round()
    weights = weights / weights.sum(1, keepdim=True)
    gap = math.log(50) - polynomial.entropy(weights).min().item()
    assert gap <= polynomial.widest_gap()
    worst = min(
        polynomial.entropy(mechanism("fastmax").map(*polynomial.build_keys(400, m))).item() for m in range(50, 150)
    )
    assert math.log(400) - worst == pytest.approx(polynomial.widest_gap(), abs=1e-3)


def test_the_slope_by_its_formula() -> None:
    """dO / dx_l = f'(x_l) (v_l - o) / sum f."""
    x, v = torch.tensor([0.3, -0.7, 1.0], dtype=torch.float64), draw_normal(3, 2, seed=0)
    assert polynomial.largest_slope(x, v) == pytest.approx(((1 + x) / (1 + x + x * x / 2).sum()).max().item())


@pytest.mark.parametrize(("n", "holds"), [(2, False), (4, True), (7, True)])
def test_the_bound_on_slopes_needs_four_keys(n: int, holds: bool) -> None:
    """One key at x, all others where f is least."""
    steepest = max(
        polynomial.largest_slope(torch.tensor([x] + [-1.0] * (n - 1), dtype=torch.float64), draw_normal(n, 2, seed=n))
        for x in torch.linspace(-1, 1, 41).tolist()
    )
    assert (steepest <= 4 / (n + 4) * (1 + 1e-12)) is holds


def test_scales_for_half_of_the_weight() -> None:
    assert polynomial.half_scale(1000, fastmax=True) == pytest.approx(
        math.sqrt(998) - 1, rel=1e-6
    )  # s^2 + 2 s + 2 = n - 1
    assert polynomial.half_scale(1000, fastmax=False) == pytest.approx(math.log(999) / 2, rel=1e-6)


def test_what_the_sequence_norm_tells() -> None:
    x = polynomial.normalize_over_sequence(draw_normal(9, 4, seed=0))
    assert (x @ x.mT).abs().max() <= 1 + 1e-12
    assert polynomial.earlier_change(0, 16, sequence=False) == 0
    assert polynomial.earlier_change(0, 16, sequence=True) > 1e-3
    assert polynomial.earlier_change(0, 16, sequence=True, factor=1.0) == 0, "the same token"
    q, k, v = (draw_normal(1, 1, 16, 4, seed=i) for i in range(3))
    # the last row sees all: what the mechanism does
    ours = polynomial.causal_outputs(q[0, 0], k[0, 0], v[0, 0], sequence=True)[-1]
    torch.testing.assert_close(ours, mechanism("fastmax")(q, k, v, norm="sequence")[0, 0, -1])


def test_multiplications_by_their_formula() -> None:
    assert cost_and_training.multiplications(512, 16, None) == 2 * 512 * 512 * 16
    assert cost_and_training.multiplications(512, 16, 1) == 2 * 512 * 17 * 17
    assert cost_and_training.multiplications(512, 16, 2) == 2 * 512 * cost_and_training.feature_count(16, 2) * 17


def test_verdicts(document: dict[str, Any]) -> None:
    verdict = {x["id"]: x["verdict"] for x in document["claims"]}
    holds = ("a1", "a2", "a3", "a4", "b1", "b2", "b4", "b5", "b6", "b7", "b8", "b9", "c1", "c2", "c3", "d1", "d2", "d3")
    assert {key: verdict[key] for key in holds} == dict.fromkeys(holds, "holds")
    assert {verdict[key] for key in ("a5", "b3", "b10", "d6")} == {"fails"}
    cap = next(c for c in PAPER.claims if c.id == "b4")
    assert judge(cap, 1e-6, 0.0) == "fails", "a weight over the cap would be told"


def test_checks_are_not_counted_for_the_paper() -> None:
    by = {claim.id: claim.by for claim in PAPER.claims}
    assert [name for name in by if by[name] == "paper"] == ["a1", "e4"]
    assert [name for name in by if by[name] == "summary"] == ["b9"]


@pytest.mark.usefixtures("without_rules")
def test_training_is_judged_seed_by_seed(document: dict[str, Any]) -> None:
    entries = {x["id"]: x for x in document["claims"]}
    assert {f"e{n}": entries[f"e{n}"]["verdict"] for n in range(1, 7)} == {
        "e1": "fails",
        "e2": "fails",
        "e3": "undecided",
        "e4": "holds",
        "e5": "holds",
        "e6": "holds",
    }
    assert entries["e1"]["measured"] == pytest.approx(0.2)
    assert entries["e3"]["numbers"]["by_seed"] == pytest.approx([0.0, 0.0009], abs=1e-9)
    without = reproduce(PAPER, Setting(), claim="e").verdicts
    assert {(v.verdict, bool(v.waits_for)) for v in without} == {("undecided", True)}


@pytest.mark.usefixtures("without_rules")
def test_the_page_is_made_from_the_document(document: dict[str, Any]) -> None:
    text, figures = page(json.loads(json.dumps(document, allow_nan=False)), PAPER)
    assert set(figures) == {"limits", "leak", "cost"}
    assert all(f"(figure:{name})" in text for name in figures)
    assert "Trained, order 2 changes the report loss of a causal language model by +0.200 (+0.198 to +0.202)" in text
    assert f"| fastmax, image | {cost_and_training.ON_IMAGES.rates[0]:g} | 0.300, 0.300 | 0.895, 0.895 | -, - |" in text
    assert "| order 1 |" in text


def test_a_sentence_follows_its_verdict(document: dict[str, Any]) -> None:
    text, _ = page({**document, "claims": [{**x, "verdict": "undecided"} for x in document["claims"]]}, PAPER)
    assert "Whether order 1 keeps its digits where all keys oppose the query is undecided" in text


@pytest.mark.parametrize("letters", ["", "ab", "cd"])
def test_a_page_of_some_claims_or_none(document: dict[str, Any], letters: str) -> None:
    studies = {
        study.title: document["studies"][study.title] for study in PAPER.studies if study.claims[0].id[0] in letters
    }
    claims = [x if x["id"][0] in letters else {**x, "measured": None} for x in document["claims"]]
    text, figures = page({**document, "claims": claims, "studies": studies}, PAPER)
    assert [f"## {letter}. " in text for letter in "abcde"] == [letter in letters for letter in "abcde"]
    assert len(figures) == len(set(letters) & set("bcd"))
