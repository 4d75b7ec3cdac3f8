"""The rule by which seeds decide claims: it holds its level where nothing is true, alone and for a whole page."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from locater.numerics import LEVEL, interval, probability_within, quantile
from locater_lab.engine.claims import (
    FEWEST_SEEDS,
    Claim,
    Measurement,
    by_seed,
    decided_by_holm,
    judge_together,
    p_value,
    verdict_of,
)
from locater_lab.engine.pages import Facts
from locater_lab.engine.verdict_text import measured_text, possible_ends, verdict_cell

SAMPLES, PAGES, CLAIMS = 100_000, 2_000, 20
BETTER = Claim("x", "it is better", "change of loss", "at most", 0.0)


def error(count: int, share: float = LEVEL) -> float:
    """Three standard errors of a share that was counted."""
    return 3 * math.sqrt(share * (1 - share) / count)


def decided(samples: np.ndarray) -> np.ndarray:
    """Which rows (samples, seeds) the interval decides against 0."""
    seeds = samples.shape[1]
    return np.abs(samples.mean(1)) > quantile(seeds - 1) * samples.std(1, ddof=1) / math.sqrt(seeds)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 11, 30])
def test_quantiles_are_those_of_students_t(freedom: int) -> None:
    for level in (0.05, 0.01, 0.05 / 40):
        assert quantile(freedom, level) == pytest.approx(stats.t.isf(level / 2, freedom), rel=1e-9)
    for t in (0.0, 0.3, 2.0, 40.0):
        assert probability_within(t, freedom) == pytest.approx(1 - 2 * stats.t.sf(t, freedom), abs=1e-12)


def test_intervals_and_p_values_are_those_of_a_t_test() -> None:
    values = [-0.011, 0.002, -0.007, -0.004, -0.009]
    mean, half = interval(values)
    expected = stats.t.interval(0.95, 4, loc=np.mean(values), scale=stats.sem(values))
    assert (mean - half, mean + half) == pytest.approx(expected)
    assert p_value(values, 0.003) == pytest.approx(stats.ttest_1samp(values, 0.003).pvalue)


@pytest.mark.parametrize("seeds", [2, 3, 8])
def test_normal_noise_around_nothing_is_decided_in_five_of_a_hundred_samples(seeds: int) -> None:
    samples = np.random.default_rng(0).standard_normal((SAMPLES, seeds))
    assert decided(samples).mean() == pytest.approx(LEVEL, abs=error(SAMPLES))
    verdicts = [verdict_of(BETTER, by_seed(row), "").decided for row in samples[:200].tolist()]
    by_interval = decided(samples[:200]).tolist() if seeds >= FEWEST_SEEDS else [False] * 200
    assert verdicts == by_interval, "claims are judged by this interval, from four seeds on"


@pytest.mark.parametrize(("noise", "most"), [("uniform", 0.056), ("laplace", 0.05)])
def test_other_noise_hardly_changes_the_level(noise: str, most: float) -> None:
    """Eight seeds. Noise without tails is decided a little more often than in 5 %, noise with long ones less often."""
    generator = np.random.default_rng(0)
    draw = generator.laplace if noise == "laplace" else lambda size: generator.uniform(-1, 1, size)
    assert decided(draw(size=(SAMPLES, 8))).mean() <= most + error(SAMPLES)


@pytest.mark.parametrize(("seeds", "share"), [(2, 0.5), (3, 0.25)])
def test_seeds_that_all_agree_are_no_rule(seeds: int, share: float) -> None:
    """What decided claims before: half of all samples of two seeds, and a quarter of those of three."""
    samples = np.random.default_rng(0).standard_normal((SAMPLES, seeds))
    agree = (samples > 0).all(1) | (samples < 0).all(1)
    assert agree.mean() == pytest.approx(share, abs=error(SAMPLES, share))


@pytest.mark.parametrize("common", [0.0, 1.0])
def test_a_page_of_true_nulls_is_wrong_somewhere_in_five_of_a_hundred(common: float) -> None:
    """Twenty claims, independent or all against the same plain runs; each by itself would be wrong somewhere far more
    often.
    """
    generator = np.random.default_rng(0)
    samples = generator.standard_normal((PAGES, CLAIMS, 8)) + common * generator.standard_normal((PAGES, 1, 8))
    pages = stats.ttest_1samp(samples, 0.0, axis=2).pvalue
    wrong = [bool(decided_by_holm({str(n): float(p) for n, p in enumerate(page)})) for page in pages]
    assert np.mean(wrong) <= LEVEL + error(PAGES)
    assert (pages <= LEVEL).any(1).mean() > 0.3


def test_one_clear_claim_among_nulls_is_still_decided() -> None:
    clear = [-0.025, -0.029, -0.023, -0.026, -0.021, -0.027, -0.024, -0.026]
    noise = np.random.default_rng(1).standard_normal((CLAIMS, 8)).tolist()
    claims = [Claim(f"x{n}", "", "", "at most", 0.0) for n in range(CLAIMS + 1)]
    verdicts = judge_together([verdict_of(c, by_seed(v), "") for c, v in zip(claims, [clear, *noise], strict=True)])
    assert [v.claim.id for v in verdicts if v.decided] == ["x0"]
    assert verdicts[0].verdict == "holds"


def test_equal_values_are_judged_by_signs() -> None:
    assert [verdict_of(BETTER, by_seed([-1.0] * n), "").verdict for n in (5, 6)] == ["undecided", "holds"]
    assert p_value([0.0] * 8, 0.0) == 1.0


# --- rules that keep a verdict open whatever the numbers say ---

CLEAR = by_seed([-1.0, -1.1, -0.9, -1.05, -0.95])


def test_fewer_than_four_seeds_decide_nothing() -> None:
    four, three = ([-1.0, -1.001, -0.999, -1.0005][:n] for n in (4, 3))
    found = verdict_of(BETTER, by_seed(three), "")
    assert (found.verdict, found.alone, found.undecided_by) == (
        "undecided",
        "holds",
        "fewer than 4 seeds, which decide nothing",
    )
    assert found.p is not None
    assert found.p < 1e-3
    assert verdict_of(BETTER, by_seed(four), "").verdict == "holds"


def test_one_training_run_decides_nothing_about_training() -> None:
    inputs = by_seed([-1.0, -1.1, -0.9] * 16, of="inputs of one model")
    assert verdict_of(BETTER, inputs, "").verdict == "holds"
    found = verdict_of(replace(BETTER, one_run=True), inputs, "")
    assert (found.verdict, found.undecided_by) == (
        "undecided",
        "one training run, which decides nothing about training",
    )


def test_what_was_chosen_after_its_outcome_decides_nothing() -> None:
    found = verdict_of(replace(BETTER, seen=True), CLEAR, "")
    assert (found.verdict, found.alone) == ("undecided", "holds")
    assert "chosen after its outcome had been seen" in found.undecided_by
    assert verdict_of(replace(BETTER, seen=True), None, "").undecided_by == ""


def test_a_page_does_not_hide_what_came_out_otherwise() -> None:
    """In another setting a paper's claim cannot fail: the row and the sentence say which way it came out all the same."""
    worse = verdict_of(
        replace(BETTER, by="paper", setting="scaled"), by_seed([1.0, 1.1, 0.9, 1.05, 0.95]), ""
    ).to_dict()
    assert verdict_cell(worse) == "undecided: otherwise here"
    facts = Facts({"claims": [worse]})
    words = {"holds": "less", "fails": "more", "undecided": "undecided"}
    assert facts.say(worse["id"], **words) == "undecided (came out otherwise, not in the setting of the paper)"
    assert facts.say(worse["id"], **words, otherwise="more, at this size") == "more, at this size"


def test_only_its_own_setting_can_fail_a_paper() -> None:
    """What is ours fails in any setting; what holds elsewhere holds."""
    worse = by_seed([1.0, 1.1, 0.9, 1.05, 0.95])
    paper, ours = (replace(BETTER, by=by, setting="scaled") for by in ("paper", "ours"))
    assert [verdict_of(claim, worse, "").verdict for claim in (paper, ours, replace(paper, setting="own"))] == [
        "undecided",
        "fails",
        "fails",
    ]
    assert "cannot fail the paper" in verdict_of(paper, worse, "").undecided_by
    assert verdict_of(paper, CLEAR, "").verdict == "holds"


def test_claims_of_papers_and_ours_are_corrected_apart() -> None:
    """Many undecided claims of ours take nothing from one of the paper's, nor the other way round."""
    claims = [replace(BETTER, id="p", by="paper"), *(replace(BETTER, id=f"o{n}", by="ours") for n in range(40))]
    found = judge_together([verdict_of(claim, Measurement(-1.0, 0.0, "", p=0.03), "") for claim in claims])
    assert [v.claim.id for v in found if v.decided] == ["p"]
    assert found[0].alone == "holds"


def test_a_probability_is_one_and_intervals_end_where_quantities_do() -> None:
    noise = np.random.default_rng(0).normal(size=80)
    assert min(p_value((noise + shift).tolist(), 0.0) for shift in np.linspace(0, 4, 200)) == 0.0, "rounding went below"
    found = verdict_of(BETTER, Measurement(-1.0, 0.0, "", p=-2.2e-16), "")
    assert found.p == 0.0
    claim = replace(BETTER, within=(-1.0, 1.0))
    entry = verdict_of(claim, by_seed([-0.9, 0.3]), "").to_dict()
    assert entry["spread"] > 1
    assert (measured_text(entry), possible_ends(entry)) == ("-0.3 (-1 to 1)", (-1.0, 1.0))
    assert possible_ends({**entry, "within": None})[0] < -7
