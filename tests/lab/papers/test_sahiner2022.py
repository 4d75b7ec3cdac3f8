"""Sahiner and others 2022: the lifted problem against loops and closed forms, optima in heads, heads on images, and the
page.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from locater.errors import LocaterError
from locater_lab.engine.devices_and_processes import draw_normal
from locater_lab.engine.pages import page, write_report
from locater_lab.papers import Setting, reproduce
from locater_lab.papers.sahiner2022 import PAPER, convex_problem, image_heads, optima, token_clusters


def by_loops(x: np.ndarray[Any, Any], maps: Any, values: Any, gates: Any = None) -> np.ndarray[Any, Any]:
    """Attention without softmax, number by number."""
    n, s, _ = x.shape
    out = np.zeros((n, s, values.shape[2]))
    for i in range(n):
        for t in range(s):
            for u in range(s):
                for j in range(len(maps)):
                    is_open = gates is None or x[i, t] @ gates[j] @ x[i, u] >= 0
                    out[i, t] += is_open * (x[i, t] @ maps[j] @ x[i, u]) * (x[i, u] @ values[j])
    return out


def test_heads_and_the_lifted_matrix_against_loops() -> None:
    x, maps, values, gates = (
        draw_normal(*shape, seed=n) for n, shape in enumerate([(2, 3, 2), (3, 2, 2), (3, 2, 2), (3, 2, 2)])
    )
    arrays = [y.numpy() for y in (x, maps, values, gates)]
    lifted = convex_problem.lifted_output(convex_problem.design(x), convex_problem.lift(maps, values)).reshape(2, 3, 2)
    np.testing.assert_allclose(lifted, by_loops(*arrays[:3]), atol=1e-10)
    np.testing.assert_allclose(convex_problem.heads_output(x, maps, values, gates), by_loops(*arrays), atol=1e-10)
    each = torch.cat([convex_problem.lift(maps[j : j + 1], values[j : j + 1]) for j in range(3)])
    np.testing.assert_allclose(
        convex_problem.lifted_output(convex_problem.design(x, gates), each).reshape(2, 3, 2),
        by_loops(*arrays),
        atol=1e-10,
    )


def test_heads_go_back_and_forth_and_their_penalty_is_the_nuclear_norm() -> None:
    for number in range(len(convex_problem.CASE_SIZES)):
        assert convex_problem.recovery_difference(convex_problem.draw_case(number)) < 1e-10
        assert convex_problem.least_penalty(convex_problem.draw_case(number)) > 1
    Z = convex_problem.lift(draw_normal(1, 3, 3, seed=0), draw_normal(1, 3, 2, seed=1))
    assert convex_problem.numerical_rank(Z[0]) == 1
    assert len(convex_problem.recover_heads(Z[0])[0]) == 1


def orthonormal() -> tuple[torch.Tensor, torch.Tensor]:
    """A problem with Phi^T Phi = I, whose solution is y thresholded."""
    phi = torch.linalg.qr(draw_normal(40, 2 * 4 * 2, seed=3)).Q.reshape(40, 2, 4, 2)
    return phi, draw_normal(40, 3, seed=4)


@pytest.mark.parametrize("way", ["fista", "split"])
def test_the_solvers_against_the_closed_form(way: str) -> None:
    phi, y = orthonormal()
    b = 0.7
    if way == "fista":
        solution = convex_problem.solve(phi[None], y[None], b, 200, 1e-13)
    else:
        solution = convex_problem.split_solve(phi, y, (b,), 400)[0]
    inner = torch.einsum("rgpl,rc->gplc", phi, y)
    for g in range(2):
        U, S, V = np.linalg.svd(inner[g].reshape(4, 6).numpy(), full_matrices=False)
        np.testing.assert_allclose(solution.Z[0, g].reshape(4, 6), U * np.maximum(S - b, 0) @ V, atol=1e-9)
    assert float(solution.gap) < 1e-8


def test_no_matrix_is_below_the_dual_bound() -> None:
    phi, y = optima.draw_problem(0)
    solution = convex_problem.solve(phi[None], y[None], 0.5, 300, 0.0)
    bound = float(solution.objective - solution.gap)
    for seed in range(20):
        Z = solution.Z + 0.02 * draw_normal(*solution.Z.shape, seed=seed)
        assert float(convex_problem.value_and_gap(phi[None], y[None], Z, torch.tensor([0.5]))[0]) > bound
    assert float(solution.gap) > 0


def test_slope_and_curvature_of_heads_against_autograd() -> None:
    problems = optima.Problems(draw_normal(1, 6, 2, 4, 2, seed=0), draw_normal(1, 6, 2, seed=1), 0.3)
    maps, values = optima.first_heads(problems, 3, seed=2)
    sizes = maps.numel()

    def objective(flat: torch.Tensor) -> torch.Tensor:
        return optima.objectives(problems, flat[:sizes].reshape(maps.shape), flat[sizes:].reshape(values.shape)).sum()

    flat = torch.cat([maps.flatten(), values.flatten()])
    exact = torch.autograd.functional.hessian(objective, flat)
    phi = problems.per_head(3)
    ours = optima.hessian(phi, maps, values, optima.output_errors(problems, maps, values), 0.3)[0]
    torch.testing.assert_close(ours, exact, atol=1e-10, rtol=1e-10)


def test_enough_heads_reach_the_convex_optimum_and_half_of_its_rank_does_not() -> None:
    phi, y = optima.draw_problem(7)
    solution = convex_problem.solve(phi[None], y[None], optima.PENALTY, 1600, 1e-8)
    rank = convex_problem.numerical_rank(solution.Z[0, 0])
    problems = optima.Problems.of([(phi, y)], optima.PENALTY).repeat_starts(2)
    best = {m: float(optima.descend_by_newton(problems, m, m, 200).objective.min()) for m in (rank // 2, optima.MOST)}
    optimum = float(solution.objective)
    assert best[optima.MOST] == pytest.approx(optimum, rel=1e-8)
    assert best[rank // 2] > 1.01 * optimum


def test_gates_of_relu_heads_make_a_lower_bound() -> None:
    sets = [optima.draw_gated_problem(seed) for seed in range(2)]
    x, y = torch.stack([x for x, _ in sets]), torch.stack([y for _, y in sets])
    objectives, maps = optima.train_relu_heads(x, y, 30)
    phi = torch.stack([convex_problem.design(*one) for one in zip(x, maps, strict=True)])
    assert bool((convex_problem.solve(phi, y, optima.GATED_PENALTY, 300, 1e-4).objective < objectives).all())


def test_targets_of_the_clusters_by_loops() -> None:
    batch = token_clusters.draw_batch(0, 2)
    for n in range(2):
        for t in range(token_clusters.TOKENS):
            own = [
                float(batch.x[n, u, token_clusters.VALUE]) for u in range(token_clusters.TOKENS) if batch.same[n, t, u]
            ]
            assert float(batch.targets["own"][n, t]) == pytest.approx(sum(own) / token_clusters.TOKENS)


# --- images
# -------------------------------------------------------------------------------------------------------------


def made_images(folder: Path, side: int = 28) -> Path:
    """Images whose class is where their bright square is: a head must tell places apart."""
    rng = np.random.default_rng(0)
    labels = rng.integers(10, size=200).astype(np.uint8)
    pixels = rng.integers(60, size=(200, side, side)).astype(np.uint8)
    for image, label in zip(pixels, labels, strict=True):
        row, column = divmod(int(label), 4)
        image[7 * row : 7 * row + 7, 7 * column : 7 * column + 7] = 200
    parts = {
        "train_images": pixels[:150],
        "train_labels": labels[:150],
        "test_images": pixels[150:],
        "test_labels": labels[150:],
    }
    np.savez(folder / image_heads.FILE, **parts)  # type: ignore[arg-type]
    return folder


def test_images_that_are_missing_or_of_another_shape(tmp_path: Path) -> None:
    assert image_heads.images(None) is None
    assert image_heads.images(tmp_path) is None
    made_images(tmp_path, side=30)
    with pytest.raises(LocaterError, match="images must be 28 x 28"):
        image_heads.images(tmp_path)
    (tmp_path / image_heads.FILE).write_bytes(b"no archive")
    with pytest.raises(LocaterError, match=r"is no \.npz archive with the arrays train_images"):
        image_heads.images(tmp_path)


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optima, "SETS", 3)
        patch.setattr(optima, "PENALTIES", (0.1, 30.0))
        patch.setitem(optima.HEAD_COUNTS, True, (1, 2, 3, 5, 6))
        patch.setitem(optima.STARTS, True, 2)
        patch.setitem(optima.ADAM_STEPS, True, 20)
        patch.setattr(optima, "NEWTON_STEPS", 15)
        patch.setattr(optima, "SOLVER_STEPS", 450)
        patch.setattr(optima, "GATED_STEPS", 10)
        patch.setitem(optima.RELU_STEPS, True, 20)
        patch.setattr(token_clusters, "STEPS", 15)
        patch.setitem(token_clusters.SEEDS, True, 2)
        patch.setitem(image_heads.SIZES, True, (100, 40, 60))
        patch.setitem(image_heads.SEEDS, True, 2)
        patch.setitem(image_heads.EPOCHS, True, 10)
        patch.setitem(image_heads.STEPS, True, 20)
        folder = made_images(tmp_path_factory.mktemp("images"))
        yield json.loads(reproduce(PAPER, Setting(data=folder)).to_json())


def test_small_studies_decide(document: dict[str, Any]) -> None:
    verdicts = {entry["id"]: entry["verdict"] for entry in document["claims"]}
    assert {verdicts[name] for name in ("a1", "a2", "a3", "a4", "b3", "c2")} == {"holds"}
    assert verdicts["c4"] == "undecided"
    rows = {
        row["head"]: row["accuracy"]
        for row in document["studies"]["heads on frozen features"]["tables"]["frozen_heads"]["rows"]
    }
    assert rows["linear on all tokens"] > 0.9, "each class is a place"
    assert rows["linear"] < 0.6, "a mean over tokens does not know places"


def test_the_page_stands_with_all_some_and_no_claims_measured(tmp_path: Path, document: dict[str, Any]) -> None:
    written = write_report(document, PAPER, tmp_path / "s.md", tmp_path)
    text = written[0].read_text()
    assert {path.name for path in written[1:]} == {"sahiner2022-heads.svg"}
    assert all(f"## {letter}." in text for letter in "abcde")
    alone = json.loads(reproduce(PAPER, Setting(), claim="a").to_json())
    text, figures = page(alone, PAPER)
    assert "## a." in text
    assert "## b." not in text
    assert figures == {}
    without = json.loads(reproduce(PAPER, Setting(), claim="e").to_json())
    assert "fashion.npz (Fashion-MNIST): --data FOLDER" in page(without, PAPER)[0]
    nothing = [{**entry, "measured": None, "verdict": "undecided"} for entry in document["claims"]]
    text, figures = page({**document, "claims": nothing, "studies": {}}, PAPER)
    assert figures == {}
    assert "## What came out" not in text
