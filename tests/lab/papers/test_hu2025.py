"""Hu and others 2025: layers of the construction against their targets, batched training against plain modules, and the
page. The construction itself: tests/lab/theory/test_approximation.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from locater_lab.engine.devices_and_processes import draw_normal
from locater_lab.engine.pages import page, write_report
from locater_lab.papers import Setting, reproduce
from locater_lab.papers.hu2025 import PAPER, constructions, trained_heads


def test_the_uniform_head_gathers_every_linear_form() -> None:
    x, W = draw_normal(5, 3, 2, seed=0), draw_normal(4, 6, seed=1)
    torch.testing.assert_close(
        constructions.gather_linear_forms(x, W), (x.flatten(1) @ W.mT)[:, None].expand(-1, 3, -1), atol=1e-10, rtol=0
    )


def test_layers_approximate_their_target_better_with_more_anchors() -> None:
    f = constructions.draw_target(2, seed=10)
    x = torch.rand(300, 2, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    true = f(x.flatten(1))[:, None]
    for form, coarse, fine in ((constructions.two_layers, 8, 200), (constructions.layer_and_softmax, 8, 60)):
        errors = [float((form(x, f, count, 100.0) - true).abs().max()) for count in (coarse, fine)]
        assert errors[1] < 0.25 * errors[0]
    # on a point of the grid the softmax of one layer is exact
    corner = torch.tensor([[[0.0], [1.0]]], dtype=torch.float64)
    assert float((constructions.layer_and_softmax(corner, f, 5, 100.0) - f(corner.flatten(1))).abs().max()) < 1e-10


def test_the_constructed_map_is_nilpotent_and_of_rank_two() -> None:
    row = constructions.map_row(8, 2.0)
    assert (row["rank"], row["mean"]) == (2, 0.0)
    assert row["largest_eigenvalue"] < 1e-10
    assert row["temperature"] == pytest.approx((2 / 7) ** 2 / 2)


def test_the_construction_is_a_free_head() -> None:
    """Put into a free head, keys and values of the construction are found to be its line and its parabola."""
    anchors = constructions.Anchors.sharp(-1.0, 1.0, 8, 2.0)
    L = anchors.values
    head = trained_heads.Head(2 * anchors.beta * (L + 1)[None], -anchors.beta * (L**2 - 1)[None], L[None])
    s = trained_heads.head_inputs()
    torch.testing.assert_close(
        head.output(s)[0], constructions.anchor_logits(s, anchors).softmax(-1) @ L, atol=1e-10, rtol=0
    )
    row = trained_heads.head_spectra(head)[0]
    assert row["linear"] == pytest.approx(1.0)
    assert row["quadratic"] == pytest.approx(1.0)
    assert row["beta"] == pytest.approx(anchors.beta)
    assert row["beta_of_gamma"] == pytest.approx(anchors.beta)


def test_batched_layers_are_multi_head_attention() -> None:
    """One of the layers against torch's own attention with the same weights."""
    model = trained_heads.Layers(2, 3, trained_heads.LayerCase(heads=4, anchors=5)).double()
    x = draw_normal(2, 6, 3, trained_heads.WIDTH, seed=0)
    with torch.no_grad():
        out, z = model(x)[1], model.tokens(x)[1]
        q, k, v = (
            z @ w[1] + b[1]
            for w, b in ((model.query, model.query_bias), (model.key, model.key_bias), (model.value, model.value_bias))
        )
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in (q[:, :3], k, v))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        expected = mixed.transpose(1, 2).flatten(-2) @ model.out[1] + model.out_bias[1]
    torch.testing.assert_close(out, expected, atol=1e-10, rtol=0)


def test_the_parabola_is_found_where_it_is() -> None:
    """Logits made of the anchors' values are explained in full, with their beta."""
    model = trained_heads.Layers(2, 3, trained_heads.LayerCase(anchors=5)).double().requires_grad_(False)
    s = draw_normal(2, 7, 3, seed=1)
    far = (s[..., None] - model.anchor_values()[:, None, None]).square()
    logits = torch.cat([draw_normal(2, 7, 3, 3, seed=2), 4.0 - 0.7 * far], -1)[:, :, None]
    beta, share = trained_heads.parabola(model, logits, s)
    torch.testing.assert_close(beta, torch.full_like(beta, 0.7))
    torch.testing.assert_close(share, torch.ones_like(share))


@pytest.fixture(scope="module")
def document() -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constructions, "GRID", 4001)
        patch.setattr(constructions, "SHARPNESSES", (0.5, 2.0, 100.0))
        patch.setattr(constructions, "SAMPLE_POINTS", 200)
        patch.setitem(trained_heads.HEAD_STEPS, True, 20)
        patch.setitem(trained_heads.SIZES, True, trained_heads.ExperimentSize(3, 80, 2, 3, 3e-3))
        yield json.loads(reproduce(PAPER, Setting()).to_json())


def test_closed_forms_hold(document: dict[str, Any]) -> None:
    verdicts = {entry["id"]: entry["verdict"] for entry in document["claims"]}
    solved = [f"a{n}" for n in range(1, 9)]
    assert {verdicts[name] for name in solved} == {"holds"}
    by_anchors = document["studies"]["the head with anchors"]["tables"]["by_anchors"]
    assert all(row["tuned"] < row["hard"] <= row["half_gap"] for row in by_anchors)
    errors = [
        row["error"] for row in document["studies"]["a layer that is trained"]["tables"]["trained_layers"]["rows"]
    ]
    assert all(math.isfinite(x) for x in errors)


def test_the_page_stands_with_all_some_and_no_claims_measured(tmp_path: Path, document: dict[str, Any]) -> None:
    written = write_report(document, PAPER, tmp_path / "h.md", tmp_path)
    text = written[0].read_text()
    assert {path.name for path in written[1:]} == {"hu2025-errors.svg", "hu2025-trained.svg"}
    assert all(f"## {letter}." in text for letter in "abcd")
    alone = {**document, "claims": [x for x in document["claims"] if x["id"][0] == "b"],
             "studies": {"whole sequences": document["studies"]["whole sequences"]}}  # fmt: skip
    text, figures = page(alone, PAPER)
    assert "## b." in text
    assert "## a." not in text
    assert figures == {}
    nothing = [{**entry, "measured": None, "verdict": "undecided"} for entry in document["claims"]]
    text, figures = page({**document, "claims": nothing, "studies": {}}, PAPER)
    assert figures == {}
    assert "## What came out" not in text
