"""Dong, Cordonnier and Loukas 2021: numbers against plain references, claims at sizes that take a moment, and the page.

Studies a, b, e, g and h.
"""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from locater.measures import composite_norm, token_residual
from locater_lab.engine.claims import verdict_of
from locater_lab.engine.figures import Contour, Field, Panel, Series, contour, draw
from locater_lab.engine.pages import page, write_report
from locater_lab.engine.reproduction import Study, join_documents, measure
from locater_lab.papers import PAPERS, Setting, reproduce
from locater_lab.papers.dong2021 import circle, contraction, locater_slowing, paths, planted_heads, two_collapses
from locater_lab.theory import FunctionalBlock, depth_residuals, layer_bound, path_counts
from locater_lab.train import Transformer
from tests import ROOT

PAPER = PAPERS["dong2021"]
MINE = {"a", "b", "e", "g", "h"}


def verdicts(study: Study) -> dict[str, str]:
    measured = measure(study, Setting()).measured
    return {claim.id: verdict_of(claim, measured[claim.id], "").verdict for claim in study.claims}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every study at a size that takes a second or two."""
    monkeypatch.setitem(contraction.SEEDS, True, 6)
    monkeypatch.setitem(contraction.DRAWS, True, 60)
    monkeypatch.setattr(contraction, "CROWD", 100_000)
    monkeypatch.setitem(circle.SEEDS, True, 3)
    monkeypatch.setitem(circle.STEPS, True, 5)
    monkeypatch.setattr(circle, "WALKED", 20)
    monkeypatch.setattr(two_collapses, "SEEDS", 2)
    monkeypatch.setitem(two_collapses.SEQUENCES, True, 2)
    monkeypatch.setattr(two_collapses, "SIZES", (0.125, 0.5, 2.0, 8.0, 32.0))
    monkeypatch.setattr(two_collapses, "MEANS", (-4.0, 0.0, 1.0, 4.0, 16.0))
    monkeypatch.setattr(two_collapses, "SCALES", tuple(2.0**k for k in range(-3, 7)))
    monkeypatch.setattr(locater_slowing, "SEEDS", 2)
    monkeypatch.setitem(locater_slowing.STEPS, True, 10)
    monkeypatch.setattr(locater_slowing, "CHECKED", 8)
    monkeypatch.setattr(locater_slowing, "BATCH", 4)
    monkeypatch.setattr(locater_slowing, "DESCENT_STEPS", 40)


# --- a: contraction ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 3])
def test_tokens_held_apart_move_as_tokens_do(heads: int) -> None:
    """Against the plain block while it has digits, and against its own law once it has none."""
    x = contraction.draw_normal(7, 8, seed=1) + 2
    layers = [contraction.block(seed, heads=heads, size=0.7) for seed in range(5)]
    plain, exact = depth_residuals(x, layers).tolist(), contraction.exact_depth(x, layers)
    assert exact[:3] == pytest.approx(plain[:3], rel=1e-6)
    at = contraction.SplitTokens.of(x)
    for layer in layers[:2]:
        at = contraction.advance(at, layer)
    assert (at.shared + at.rest).numpy() == pytest.approx(layers[1](layers[0](x)).numpy(), abs=1e-12)
    assert at.rest.mean(0).abs().max() < 1e-15


def test_a_residual_far_below_rounding_still_goes_with_the_third_power() -> None:
    R, v, layer = contraction.draw_normal(6, 8, seed=3), contraction.draw_normal(8, seed=4), contraction.block(5)
    R = R - R.mean(0)
    sizes = (1e-20, 1e-50, 1e-80)
    after = [
        composite_norm(contraction.advance(contraction.SplitTokens(v, r * R), layer).rest).item() / r**3 for r in sizes
    ]
    assert after == pytest.approx([after[0]] * 3, rel=1e-9)
    b = np.full(6, 1 / 6)  # leading order: uniform over keys
    E = layer.scale * R.numpy() @ layer.W_QK[0].numpy() @ R.numpy().T
    lead = (
        np.stack([sum(b[j] * (E[i, j] - b @ E[i]) * R.numpy()[j] for j in range(6)) for i in range(6)])
        @ layer.W_VO[0].numpy()
    )
    lead -= lead.mean(0)
    assert after[0] == pytest.approx(math.sqrt(np.linalg.norm(lead, 1) * np.linalg.norm(lead, np.inf)), rel=1e-9)
    with pytest.raises(ValueError, match="attention alone"):
        contraction.advance(contraction.SplitTokens(v, R), contraction.block(5, skip=True))


def test_uniform_causal_attention_halves_the_residual_every_layer() -> None:
    """Means over what is visible have the eigenvalues 1, 1/2, 1/3 ...: the reason of a8."""
    n = 12
    means = np.tril(np.ones((n, n))) / np.arange(1, n + 1)[:, None]
    assert sorted(np.linalg.eigvals(means).real, reverse=True)[:3] == pytest.approx([1, 1 / 2, 1 / 3])
    uniform = FunctionalBlock(torch.zeros(1, 3, 3), torch.eye(3)[None], scale=1.0, causal=True)
    found = depth_residuals(contraction.draw_normal(n, 3, seed=1), [uniform] * 30).tolist()
    assert found[-1] / found[-2] == pytest.approx(0.5, abs=1e-3)


def test_study_a_decides_its_claims(small: None) -> None:
    said = verdicts(contraction.CONTRACTION_STUDY)
    sure = ("a1", "a2", "a3", "a5", "a7", "a8")
    assert {i: said[i] for i in sure} == dict.fromkeys(sure, "holds")
    assert said["a10"] == "fails", "MLPs alone do not stop it"


def test_the_abstracts_sentence_is_judged_by_its_weaker_part(small: None) -> None:
    measured = measure(contraction.CONTRACTION_STUDY, Setting()).measured["a10"]
    assert measured is not None
    assert measured.value == pytest.approx(measured.numbers["with MLPs"])
    assert measured.numbers["with MLPs"] < -10 < -2 < measured.numbers["with skips"]


# --- b: bounds --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [10, 40])
def test_the_crowd_is_that_of_a_dense_layer(m: int) -> None:
    found, strength = contraction.crowd_of(m), math.log(contraction.OWN_WEIGHT * 2 * m)
    x = torch.zeros(2 * m + 1, m + 1, dtype=torch.float64)
    x[: m + 1] = torch.eye(m + 1, dtype=torch.float64)
    x[:, 0] += math.log(contraction.HUB_WEIGHT * 2 * m) / strength
    same = torch.eye(m + 1, dtype=torch.float64)[None]
    layer = FunctionalBlock(strength * same, same, scale=1.0)
    after = layer(x)
    assert found.tokens == len(x)
    assert found.residual <= contraction.best_at_least(after)
    assert found.residual == pytest.approx(contraction.best_at_least(after), rel=2 / m)
    assert composite_norm(x - x[-1]).item() == pytest.approx(1)
    assert found.stated == pytest.approx(4 * strength)
    assert (
        contraction.best_at_least(after)
        <= layer_bound(x, layer).item()
        <= found.proved * (1 + 1e-9) * composite_norm(token_residual(x)).item() ** 3
    )


def test_the_crowd_crosses_where_it_is_said_to() -> None:
    first = contraction.crossing_count()
    before, at = contraction.crowd_of((first - 1) // 2 - 1), contraction.crowd_of((first - 1) // 2)
    assert before.residual <= before.stated
    assert at.residual > at.stated
    assert 7_000 < first < 9_000


def test_study_b_decides_its_claims(small: None) -> None:
    said = verdicts(contraction.BOUNDS_STUDY)
    assert [i for i, verdict in said.items() if verdict == "fails"] == ["b2", "b6"]
    assert "undecided" not in said.values()


# --- e: lengths -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stated", paths.STATED_LENGTHS, ids=lambda s: s.model)
def test_the_table_in_fractions(stated: paths.StatedLengths) -> None:
    """Binomial with chance H / (1 + H), as exact fractions: independent of the counts."""
    p = Fraction(stated.heads, 1 + stated.heads)
    chance = [math.comb(stated.depth, k) * p**k * (1 - p) ** (stated.depth - k) for k in range(stated.depth + 1)]
    found = paths.length_row(stated.depth, stated.heads)
    assert found["mean"] == pytest.approx(float(stated.depth * p), rel=1e-14)
    assert found["modes"] == [k for k, x in enumerate(chance) if x == max(chance)] == list(stated.modes)
    assert (found["at_mode"], found["longest"]) == pytest.approx((float(max(chance)), float(chance[-1])), rel=1e-14)
    assert (round(found["mean"], 3), round(found["at_mode"], 4), round(found["longest"], 4)) == (
        stated.mean,
        stated.at_mode,
        stated.longest,
    )


def test_weights_of_lengths_by_listing_every_set_of_layers() -> None:
    listed = [0.0] * 7
    for visited in product((False, True), repeat=6):
        listed[sum(visited)] += math.prod(1 - a if v else a for v, a in zip(visited, paths.SKIPS, strict=True))
    found = paths.measure_length(Setting())
    assert found.tables["length_weights"]["weights"] == pytest.approx(listed, rel=1e-12)
    assert found.measured["e4"].value == pytest.approx(listed[0] + listed[1])  # type: ignore[union-attr]
    assert set(verdicts(paths.LENGTH_STUDY).values()) == {"holds"}
    assert paths.count_listed_paths(5, 3) == path_counts(5, 3)


# --- g: the circle ----------------------------------------------------------------------------------------------------


def test_points_and_targets_of_the_circle() -> None:
    at = torch.arange(circle.POINTS)
    now, later = circle.token_pairs(at), circle.token_pairs(at, 1)
    assert torch.equal(later[:-1], now[1:])
    assert torch.equal(later[-1], now[0])
    assert (now[:, 0] - now[:, 1]).norm(dim=1).min() > 2 * circle.RADIUS * 0.999
    turned = torch.atan2(later[0, 0, 1], later[0, 0, 0]) - torch.atan2(now[0, 0, 1], now[0, 0, 0])
    assert math.degrees(turned.item()) == pytest.approx(0.36, abs=1e-4)


@pytest.mark.parametrize("variant", circle.VARIANTS, ids=lambda v: v.name)
def test_the_layer_is_that_of_plain_loops(variant: circle.LayerVariant) -> None:
    held = {name: x.detach() for name, x in circle.draw_weights(variant, 2).items()}
    x = torch.randn(2, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    found = circle.apply_layer(variant, held, x)

    def normed(y: np.ndarray) -> np.ndarray:
        return (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-5)

    for seed, pair in product(range(2), range(3)):
        W = {name: w[seed].double().numpy() for name, w in held.items()}
        y = normed(x[seed, pair].double().numpy() @ W["in"])
        mixed, size = np.zeros_like(y), variant.width // circle.HEADS
        for h in range(circle.HEADS):
            part = slice(h * size, (h + 1) * size)
            q, k, v = (y @ W[name][:, part] for name in ("query", "key", "value"))
            weight = np.exp(q @ k.T / math.sqrt(size))
            mixed[:, part] = weight / weight.sum(1, keepdims=True) @ v
        y = normed(mixed @ W["output"] + (y if variant.skip else 0))
        if variant.mlp:
            wide = torch.from_numpy(y @ W["wide"])
            y = normed(y + torch.nn.functional.gelu(wide).numpy() @ W["narrow"])
        wanted = y @ W["out"] + (x[seed, pair].numpy() if variant.outer else 0)
        assert found[seed, pair].numpy() == pytest.approx(wanted, abs=1e-4)


def test_training_on_the_circle_learns_it() -> None:
    variant = circle.LayerVariant("x + attention", width=16, outer=True)
    before, after = (
        sum(circle.prediction_error(variant, circle.train_variant(variant, 2, steps))) for steps in (1, 100)
    )
    assert after < before / 5
    assert circle.relative_distance(circle.walk_states(variant, circle.draw_weights(variant, 2), 3))[0].tolist() == [
        1,
        1,
    ]


# --- h: both collapses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", planted_heads.SHAPES)
@pytest.mark.parametrize("ratio", two_collapses.RATIOS)
def test_heads_have_the_moments_they_are_asked_for(shape: str, ratio: float) -> None:
    A = planted_heads.planted_head(5.0, 3.0, ratio, shape, seed=2)
    assert A is not None
    assert (A.trace().item(), A.norm().item(), (A @ A).trace().item()) == pytest.approx((5.0, 3.0, ratio * 9.0))
    most = math.sqrt(planted_heads.WIDTH * (1 + ratio) / 2) * 3.0  # M^2 <= d (F + S) / 2
    assert planted_heads.planted_head(most * 1.001, 3.0, ratio, shape) is None
    assert planted_heads.planted_head(most * 0.999, 3.0, ratio, shape) is not None


def plain_attention(x: np.ndarray, A: np.ndarray, causal: bool) -> tuple[np.ndarray, list[float]]:
    """Row by row: outputs, and entropy over log of the visible keys."""
    rows, shares = [], []
    for i in range(len(x)):
        seen = x[: i + 1] if causal else x
        logits = x[i] @ A @ seen.T
        p = np.exp(logits - logits.max())
        p /= p.sum()
        rows.append(p @ seen)
        if len(seen) > 1:
            shares.append(-(p * np.log(np.maximum(p, 1e-300))).sum() / math.log(len(seen)))
    return np.stack(rows), shares


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", planted_heads.TOKENS)
def test_kept_entropy_and_price_are_those_of_plain_loops(kind: str, causal: bool) -> None:
    x, A = planted_heads.draw_tokens(kind, 2, seed=1), planted_heads.planted_head(4.0, 2.0, 0.0)
    assert A is not None
    other = planted_heads.planted_head(1.0, 8.0, 1.0)
    assert other is not None
    seen = planted_heads.attend_batch(
        planted_heads.TokenBatch.of(x), torch.stack([other, A]), causal
    )  # the second is compared
    kept, entropy, price = [], [], []
    for tokens in x.double().numpy():
        y, shares = plain_attention(tokens, A.numpy(), causal)
        R, left = tokens - tokens.mean(0), y - y.mean(0)
        size = [math.sqrt(np.linalg.norm(m, 1) * np.linalg.norm(m, np.inf)) for m in (left, R)]
        kept.append(size[0] / size[1])
        entropy.append(np.mean(shares))
        lost = (1 - np.mean(shares)) * math.log(len(tokens))
        price.append(math.sqrt((left**2).sum() / len(tokens)) / np.linalg.norm(R, axis=1).max() / math.sqrt(2 * lost))
    assert (float(seen.kept[1]), float(seen.entropy[1])) == pytest.approx((np.mean(kept), np.mean(entropy)), rel=1e-4)
    assert math.isnan(seen.price[1]) if causal else float(seen.price[1]) == pytest.approx(max(price), rel=1e-3)


def test_the_first_order_of_kept_and_entropy() -> None:
    """v / 2 is the entropy lost and k the residual kept (Frobenius) by a head that hardly attends."""
    batch = planted_heads.TokenBatch.of(planted_heads.draw_tokens("equal norm", 1, seed=4))
    A = planted_heads.planted_head(0.02, 0.01, 0.0)
    assert A is not None
    v, k = (float(x) for x in planted_heads.linear_response(batch, A[None]))
    x = batch.x[0].double().numpy()
    y, shares = plain_attention(x, A.numpy(), causal=False)
    left, R = y - y.mean(0), x - x.mean(0)
    assert np.linalg.norm(left) / np.linalg.norm(R) == pytest.approx(k, rel=0.02)
    assert (1 - np.mean(shares)) * math.log(len(x)) == pytest.approx(v / 2, rel=0.05)


def test_rules_of_one_and_two_numbers_by_brute_force() -> None:
    generator = torch.Generator().manual_seed(0)
    score, other = torch.randint(8, (2, 60), generator=generator).double()
    label = (score > 2) & (other < 6) & (torch.rand(60, generator=generator) < 0.8)

    def balanced(said: torch.Tensor) -> float:
        return float((said & label).sum() / label.sum() + (~said & ~label).sum() / (~label).sum()) / 2

    one = max(balanced((score >= a) & (score <= b)) for a in range(8) for b in range(8))
    assert two_collapses.interval_accuracy(score, label) == pytest.approx(max(one, 0.5))
    two = max(balanced((score >= a) & (other <= b)) for a in range(8) for b in range(8))
    a, b = two_collapses.best_corner(score, other, label)
    assert balanced((score >= a) & (other <= b)) == pytest.approx(two)
    pairs = [(p > n) + 0.5 * (p == n) for p in score[label].tolist() for n in score[~label].tolist()]
    assert two_collapses.ordering_chance(score, label) == pytest.approx(sum(pairs) / len(pairs))
    assert math.isnan(two_collapses.ordering_chance(score, torch.ones(60, dtype=torch.bool)))


def test_the_directions_of_study_h(small: None) -> None:
    results = two_collapses.measure(Setting())
    found = {key: x.value for key, x in results.measured.items() if x is not None}
    assert found["h2"] < 1
    assert found["h3"] > 0.8
    assert found["h5"] > 0.95
    assert max(found["h6"], found["h7"]) < 0.85 < results.tables["two_number_rule"]["chosen_here"]


def test_the_penalty_alone_slows_the_collapse_and_surgery_is_undone() -> None:
    begun = locater_slowing.draw_maps(2, 0.3, 0)
    after = locater_slowing.penalize_maps(begun, 2.0, 250)
    assert locater_slowing.moments_of(begun)["size"] == pytest.approx(0.3, rel=0.05)
    assert locater_slowing.moments_of(after)["M"] == pytest.approx(2, abs=0.2)
    x = planted_heads.draw_tokens("equal norm", 1, 0)[0].double()
    assert locater_slowing.stack_shares(after, x)[2] > 10 * locater_slowing.stack_shares(begun, x)[2]
    torch.manual_seed(0)
    model = Transformer(locater_slowing.SHAPE)
    whole = locater_slowing.layer_shares(model, False, 0)
    cut = locater_slowing.layer_shares(model, True, 0)
    assert locater_slowing.layer_shares(model, False, 0) == whole
    assert whole[0] == cut[0]
    assert cut[2] < 1e-4 < 0.2 < whole[-1]


# --- the paper and its page -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """All of these studies at their small sizes, through JSON."""
    with pytest.MonkeyPatch.context() as patch:
        small.__wrapped__(patch)  # type: ignore[attr-defined]
        parts = [json.loads(reproduce(PAPER, Setting(), letter).to_json()) for letter in sorted(MINE)]
    return join_documents(parts, PAPER)


def test_every_claim_of_these_studies_is_measured(document: dict[str, Any]) -> None:
    assert {entry["id"][0] for entry in document["claims"]} == MINE
    assert all(entry["measured"] is not None and math.isfinite(entry["measured"]) for entry in document["claims"])
    assert all(entry["spread_of"] for entry in document["claims"])
    assert [c.id for c in PAPER.claims if c.id[0] in MINE] == [entry["id"] for entry in document["claims"]]


def test_the_page_renders_and_its_figures_are_sound(document: dict[str, Any], tmp_path: Path) -> None:
    written = write_report(document, PAPER, tmp_path / "dong2021.md", tmp_path)
    names = {path.stem.removeprefix("dong2021-") for path in written[1:]}
    assert names == {"contraction", "bounds", "lengths", "circle", "bridge", "price", "slowing"}
    text = written[0].read_text()
    assert "(figure:" not in text
    assert all(f"({path.name})" in text for path in written[1:])
    for path in written[1:]:
        drawing = path.read_text()
        ElementTree.fromstring(drawing)
        assert "nan" not in drawing
        assert "inf" not in drawing


def test_the_kept_page_is_that_of_the_kept_numbers() -> None:
    kept = ROOT / "docs" / "results"
    text, figures = page(json.loads((kept / "dong2021.json").read_text()), PAPER)
    for name, drawing in figures.items():
        assert (ROOT / "docs" / "images" / f"dong2021-{name}.svg").read_text() == drawing, name
        text = text.replace(f"(figure:{name})", f"(../images/dong2021-{name}.svg)")
    assert len(figures) == 11
    assert (kept / "dong2021.md").read_text() == text


def test_a_page_without_measurements_or_with_some(document: dict[str, Any]) -> None:
    nothing = {**document, "claims": [{**entry, "measured": None} for entry in document["claims"]], "studies": {}}
    text, figures = page(nothing, PAPER)
    assert not figures
    assert "## What came out" not in text
    some = {title: tables for title, tables in document["studies"].items() if title == "path lengths"}
    claims = [entry for entry in document["claims"] if entry["id"][0] == "e"]
    text, figures = page({**document, "claims": claims, "studies": some}, PAPER)
    assert list(figures) == ["lengths"]
    assert "## e." in text
    assert "## a." not in text


@pytest.mark.parametrize("verdict", ["holds", "fails", "undecided"])
def test_sentences_follow_verdicts(document: dict[str, Any], verdict: str) -> None:
    claims = [{**entry, "verdict": verdict} for entry in document["claims"]]
    text, _ = page({**document, "claims": claims}, PAPER)
    told = {
        "holds": ("In stacks of random layers that is so", "a factor of 1/2 a layer, whatever", "withstood an input"),
        "fails": ("As it stands that fails", "but not into a factor of 1/2", "no claim against the paper"),
        "undecided": (
            "In stacks of random layers that is undecided",
            "is undecided (measured",
            "may slow rank collapse",
        ),
    }
    assert {key for key, words in told.items() if all(word in text for word in words)} == {verdict}


def test_the_window_of_each_kind_of_tokens() -> None:
    rising, flat = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [1.0] * 6
    octaves = {"equal norm": rising[::-1], "raw walk": flat, "independent": rising}
    ways = two_collapses.window_table(two_collapses.CONCENTRATIONS, octaves)["ways"]
    assert ways == {
        "widens": ["independent"],
        "narrows": ["equal norm"],
        "neither widens nor narrows": ["raw walk"],
    }


def test_words_of_a_phase_diagram_stand_where_cells_are_so(document: dict[str, Any]) -> None:
    table = next(s["tables"]["phases"] for s in document["studies"].values() if "phases" in s["tables"])
    clear = {
        name: {key: [[x and 1.0 for x in row] for row in plane] for key, plane in held.items()}
        for name, held in table["planes"].items()
    }
    words = [
        word[2] for d in planted_heads.phase_table(clear, table["M"], table["size"])["diagrams"] for word in d["words"]
    ]
    assert "neither" in words
    assert not {"rank collapse", "entropy"} & set(words), "no cell is so"


def test_a_field_and_its_contour() -> None:
    grid = [1.0, 2.0, 4.0, 8.0]
    rising = [[math.log2(x * y) for x in grid] for y in grid]
    passed = contour(grid, grid, Contour(rising, 3.5))
    assert passed
    assert all(math.log2(x * y) == pytest.approx(3.5) for segment in passed for x, y in segment)
    holed: list[list[float | None]] = [
        [None if x > 4 else value for x, value in zip(grid, row, strict=True)] for row in rising
    ]
    assert all(x <= 4 for segment in contour(grid, grid, Contour(holed, 3.5)) for x, _ in segment)
    values: list[list[float | None]] = [[None, 0.0, 0.5, -0.5]] * 4
    field = Field(
        "f", "x", "y", grid, grid, values, [Contour(rising, 3.5, style="dashed")], [(2.0, 2.0, "here & there")]
    )
    panel = Panel("p", "x", "y", [Series("s", [(1.0, 1e-9), (2.0, 1.0)])], y_scale="log", legend="bottom right")
    root = ElementTree.fromstring(draw([field, panel, panel], columns=2))
    assert (root.get("width"), root.get("height")) == ("800", "600")
    space = "{http://www.w3.org/2000/svg}"
    fills = [rect.get("fill") for rect in root.iter(f"{space}rect")]
    assert [fills.count(colour) for colour in ("#e9e9e9", field.clear)] == [4, 4]
    assert "here & there" in [text.text for text in root.iter(f"{space}text")]
    assert {"1e-5", "0.001"} & {text.text for text in root.iter(f"{space}text")}
