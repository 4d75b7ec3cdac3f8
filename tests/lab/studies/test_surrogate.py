"""The record of the surrogate: figures of heads, intervals, claims, and the page that is made of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from locater.discovery import attention_layers
from locater_lab.engine.claims import judge_together, verdict_of
from locater_lab.studies import surrogate
from locater_lab.studies.surrogate import antibody_and_reaction_inputs as inputs
from locater_lab.studies.surrogate import errors_and_claims, tables_of_page, training_runs
from locater_lab.studies.surrogate import training_runs as runs
from locater_lab.train import Shape, Transformer
from tests import ROOT

SHAPE = Shape(vocabulary=12, layers=2, width=16, heads=2, kv_heads=2, hidden=24, length=12)


def some_entry(model: str = "a", count: int = 20, width: int = 64) -> dict[str, Any]:
    rng = np.random.default_rng(len(model) + count)

    def column() -> list[float]:
        return rng.normal(size=count).tolist()

    kinds = ("weights", "diagonal", "covariance", "own", "shuffled")
    return {
        "model": model,
        "width": width,
        "heads": {"entropy": column(), "layer": [i % 2 for i in range(count)], "sink": column(), "induction": [None] * count},
        "predicted": {kind: {"entropy": column()} for kind in kinds},
        "layers": [{"layer": i, "kurtosis": 0.1 * i} for i in range(2)],
    }  # fmt: skip


# ---- figures ----


def test_drawn_rank_correlations_are_those_of_the_drawn_heads() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=9).round(1), rng.normal(size=9).round(1)
    counts = rng.multinomial(9, np.full(9, 1 / 9), size=20).astype(float)
    ours = errors_and_claims.rank_correlation(x, y, counts)
    assert ours.value == pytest.approx(stats.spearmanr(x, y).statistic)
    drawn = [np.repeat(np.arange(9), c.astype(int)) for c in counts]
    assert ours.samples == pytest.approx([stats.spearmanr(x[at], y[at]).statistic for at in drawn])


def test_parts_sum_to_the_error() -> None:
    entry = some_entry()
    assert sum(errors_and_claims.error_parts(entry).values()) == pytest.approx(
        errors_and_claims.prediction_errors(entry)
    )
    shares = [errors_and_claims.part_share(entry, name) for name in errors_and_claims.PARTS]
    assert sum(x.value for x in shares) == pytest.approx(1)
    assert sum(x.samples for x in shares) == pytest.approx(np.ones(errors_and_claims.DRAWS))


def test_the_slope_is_that_of_a_line_through_all_heads() -> None:
    entries = [some_entry("a", 5, 64), some_entry("bb", 9, 128), some_entry("ccc", 7, 512)]
    width = np.concatenate([np.full(len(errors_and_claims.prediction_errors(e)), np.log2(e["width"])) for e in entries])
    error = np.concatenate([np.abs(errors_and_claims.prediction_errors(e)) for e in entries])
    assert errors_and_claims.slope_with_width(entries).value == pytest.approx(np.polyfit(width, error, 1)[0])


def test_intervals_of_a_mean_are_close_to_the_normal_ones() -> None:
    values = np.random.default_rng(1).normal(size=200)
    entry = some_entry(count=200)
    low, high = errors_and_claims.mean_over_heads(values, errors_and_claims.head_draws(entry)).interval
    error = values.std() / 200**0.5
    assert (low, high) == pytest.approx((values.mean() - 1.96 * error, values.mean() + 1.96 * error), abs=0.1 * error)


def test_what_goes_with_the_error_is_found_and_noise_is_not() -> None:
    entries = [some_entry("a", 40), some_entry("bb", 30)]
    for entry in entries:
        noise = np.random.default_rng(3).normal(size=len(entry["heads"]["layer"]))
        entry["heads"]["rank"] = (np.abs(errors_and_claims.prediction_errors(entry)) + 0.1 * noise).tolist()
    estimate, same, models = errors_and_claims.correlation_with_error(entries, "rank")
    assert estimate.value > 0.8
    assert (same, models) == (2, 2)
    assert estimate.p_value(0.0) < 0.001
    noise = errors_and_claims.correlation_with_error(entries, "sink")[0]
    assert noise.p_value(0.0) > 0.01
    assert errors_and_claims.head_quantity(entries[0], "induction") is None  # a model without tokens has none
    assert errors_and_claims.head_quantity(entries[0], "layer_kurtosis") == pytest.approx([0.0, 0.1] * 20)


def test_claims_hold_fail_or_stay_open_by_their_intervals() -> None:
    entry = some_entry("demo", 60)
    rng = np.random.default_rng(0)
    for kind, size in (("covariance", 0.01), ("own", 0.01), ("diagonal", 1.0), ("shuffled", 0.01)):
        noise = size * rng.normal(size=60)
        entry["predicted"][kind]["entropy"] = (np.array(entry["heads"]["entropy"]) + noise).tolist()
    items = errors_and_claims.claim_figures([entry, some_entry("rxnfp", 60)])
    claims = {claim.id: claim for claim in surrogate.STUDY.claims}
    found = {surrogate.claim_id(x.claim, x.model): surrogate._measurement(x) for x in items}
    judged = judge_together([verdict_of(claims[id], measured, "") for id, measured in found.items()])
    verdicts = {v.claim.id: v.verdict for v in judged}
    assert [verdicts[surrogate.claim_id(x, "demo")] for x in ("order", "error", "covariance")] == ["holds"] * 3
    assert verdicts[surrogate.claim_id("text", "demo")] == "undecided"
    assert [verdicts[surrogate.claim_id(x, "rxnfp")] for x in ("order", "error")] == ["fails"] * 2


# ---- heads ----


@torch.no_grad()
def test_rows_of_logits_have_the_shape_that_scipy_gives_them() -> None:
    torch.manual_seed(0)
    layer = next(iter(attention_layers(Transformer(SHAPE, scale=0.5))))
    x = torch.randn(2, 12, 16)
    ours = training_runs._shape_of_rows(layer, x)
    logits = training_runs._without_norm(layer).logits(x).double()
    rows = [[logits[b, h, t, 1 : t + 1].numpy() for b in range(2) for t in range(6, 12)] for h in range(2)]
    assert ours["spread"].tolist() == pytest.approx([np.mean([row.std() for row in each]) for each in rows])
    assert ours["skew"].tolist() == pytest.approx([np.mean([stats.skew(row) for row in each]) for each in rows])
    assert ours["kurtosis"].tolist() == pytest.approx([np.mean([stats.kurtosis(row) for row in each]) for each in rows])


def test_omega_squared_is_one_where_groups_say_all_and_zero_where_they_say_nothing() -> None:
    groups = torch.arange(8).repeat_interleave(50)
    assert training_runs.omega_squared(groups.double(), groups) == pytest.approx(1)
    noise = torch.randn(400, generator=torch.Generator().manual_seed(0))
    assert training_runs.omega_squared(noise, groups) == pytest.approx(0, abs=0.03)
    half = training_runs.omega_squared(groups.double() / groups.double().std() + noise, groups)
    assert half == pytest.approx(0.5, abs=0.06)
    assert training_runs.omega_squared(noise[:6], torch.arange(6)) is None  # every group too small


def test_shuffling_keeps_first_tokens_and_all_others_somewhere() -> None:
    x = torch.arange(24.0).view(2, 4, 3)
    mixed = training_runs.shuffle_tokens(x)
    assert torch.equal(mixed[:, 0], x[:, 0])
    assert sorted(mixed[:, 1:].flatten(0, 1).tolist()) == sorted(x[:, 1:].flatten(0, 1).tolist())
    assert not torch.equal(mixed, x)


@torch.no_grad()
def test_a_head_that_sees_nothing_is_predicted_by_every_kind_of_tokens() -> None:
    """Without queries attention is even, whatever the tokens are: entropy of a row is the log of its keys."""
    torch.manual_seed(0)
    model = Transformer(SHAPE)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.zero_()  # type: ignore[union-attr]
    parts = [[{"inputs": torch.randint(12, (4, 12))}] for _ in range(2)]
    entry = training_runs.measure_heads(model, *parts)
    even = np.mean(np.log(np.arange(1, 13)))
    for columns in (entry["heads"], *entry["predicted"].values()):
        assert columns["entropy"] == pytest.approx([even] * 4, abs=1e-5)
    assert entry["heads"]["layer"] == [0, 0, 1, 1]
    assert entry["measured_tokens"] == 48
    assert (entry["positions"], entry["causal"], entry["head_dim"]) == ("rotary", True, 8)


# ---- runs and inputs ----


def test_a_trained_arm_leaves_one_line_without_weights_and_is_not_trained_again(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "fashion.npz",
        **{f"{split}_images": np.random.default_rng(0).integers(0, 255, (40, 8, 8), np.uint8) for split in ("train", "test")},
        **{f"{split}_labels": np.arange(40) % 4 for split in ("train", "test")},
    )  # fmt: skip
    small: dict[str, Any] = dict(layers=2, width=32, heads=2, batch=16, steps=2, compile=False, device="cpu")
    arms = {"image 6x192": replace(runs.ARMS["image 6x192"], **small)}
    out, told = tmp_path / "runs.jsonl", []
    for _ in range(2):
        runs.train_all(out, tmp_path, 1, arms=arms, log=told.append)
    (line,) = map(json.loads, out.read_text().splitlines())
    assert line["status"] == "done"
    assert len(line["predicted"]["covariance"]["entropy"]) == len(line["heads"]["entropy"]) == 4
    assert line["heads"]["induction"] == [None] * 4
    assert line["length"] == 4  # patches
    assert told[-1] == "every run has its line"


def test_missing_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(surrogate.LocaterError, match=r"no fashion\.npz"):
        runs.train_all(tmp_path / "a.jsonl", tmp_path, 1, arms={"a": runs.ARMS["image 6x192"]})


def test_inputs_that_are_no_text_are_halved(tmp_path: Path) -> None:
    path = tmp_path / "inputs.txt"
    path.write_text("# numbers\n" + "".join(f"{i} {i} {i}\n" for i in range(10)))
    title, gathered, measured = surrogate.read_token_inputs(path)
    assert title == "numbers"
    assert [batch["input_ids"][:, 0].tolist() for batch in gathered + measured] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    path.write_text("# numbers\n1 2\n3\n")
    with pytest.raises(surrogate.LocaterError, match="every line as many"):
        surrogate.read_token_inputs(path)


def test_reactions_lose_the_numbers_of_their_atoms() -> None:
    assert inputs.without_numbers("[CH3:1][c:2]1[nH:3][N+:4].Br[Br:5]>>[C@H:12]") == "Cc1[nH][N+].BrBr>>[C@H]"
    assert inputs.PIECES.findall("Clc1[nH]%12>>Br") == ["Cl", "c", "1", "[nH]", "%12", ">>", "Br"]


# ---- what is written down ----


def test_the_kept_document_and_the_table_are_those_of_the_heads() -> None:
    results = ROOT / "docs" / "results"
    entries = surrogate.read_entries([results / name for name in surrogate.PAPER.kept])
    document = json.loads((results / "surrogate.json").read_text())
    found = surrogate.results_of(entries)
    (study,) = document["studies"].values()
    assert study["tables"] == found.tables, "locater reproduce surrogate"
    for claim in document["claims"]:
        assert claim["measured"] == pytest.approx(found.measured[claim["id"]].value, rel=1e-4)
    at_hand = [entry for entry in entries if "arm" not in entry]
    theory = (ROOT / "docs/theory.md").read_text()
    assert tables_of_page.cells_table(tables_of_page.kinds_table(at_hand)) in theory, "copy its table"
    for entry in at_hand:
        assert errors_and_claims.mean_error(entry).value < errors_and_claims.mean_error(entry, "weights").value, entry[
            "model"
        ]
