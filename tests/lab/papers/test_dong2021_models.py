"""Dong, Cordonnier and Loukas 2021, on models: curves over depth, products of maps, sums of paths, each against a plain
reference.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial import ConvexHull
from torch import Tensor, nn

from locater.errors import LocaterError
from locater.numerics import one_thread
from locater_lab.engine.claims import verdict_of
from locater_lab.engine.devices_and_processes import device_of_study, map_parts
from locater_lab.engine.pages import page
from locater_lab.engine.reproduction import Reproduction, Results, Setting, Study
from locater_lab.papers import PAPERS
from locater_lab.papers.dong2021 import locater_slowing, path_tasks, paths, residual_by_depth
from locater_lab.papers.dong2021.path_classifier import (
    DEPTH,
    Classifier,
    ClassifierLayer,
    ClassifierShape,
    HeadPath,
    LabelledTokens,
    TrainingRecipe,
    accuracy,
    draw_path,
    guess_accuracy,
    train_classifier,
)

Array = np.ndarray[Any, Any]
SMALL: dict[str, dict[str, Any]] = {
    "BERT": dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, vocab_size=300),
    "ALBERT": dict(
        hidden_size=32,
        embedding_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
        vocab_size=300,
    ),
    "XLNet": dict(d_model=32, n_layer=3, n_head=4, d_inner=48, vocab_size=300),
}


def small(name: str, seed: int = 0) -> Any:
    model = residual_by_depth.initial_model(name, seed, **SMALL[name])
    for weight in model.parameters():  # gains, biases and large logits, so that a wrong cut shows
        weight.add_(0.2 * torch.randn(weight.shape))
    return model.double()


def ids(samples: int = 2, length: int = 9) -> Tensor:
    return torch.randint(300, (samples, length), generator=torch.Generator().manual_seed(1))


def states(model: Any) -> list[Tensor]:
    return list(model(input_ids=ids(), output_hidden_states=True).hidden_states)


def composite(x: Array) -> float:
    return math.sqrt(np.abs(x).sum(0).max() * np.abs(x).sum(1).max())


# --- residual against depth -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
def test_residuals_are_those_of_the_hidden_states(name: str) -> None:
    model = small(name)
    for variant in residual_by_depth.VARIANTS:
        with residual_by_depth.cut_model(model, variant):
            found = residual_by_depth.residuals_by_sample(model, [{"input_ids": ids()[:1]}, {"input_ids": ids()[1:]}])
            held = [x.numpy() for x in states(model)]
        expected = [[composite(x[i] - x[i].mean(0)) / composite(x[i]) for x in held] for i in range(2)]
        assert found.shape == (2, 4)
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("variant", [*residual_by_depth.VARIANTS, residual_by_depth.BRANCH_OUT])
def test_a_cut_model_is_whole_again_afterwards(name: str, variant: str) -> None:
    model = small(name)
    before, modules = states(model), [id(m) for m in model.modules()]
    with residual_by_depth.cut_model(model, variant):
        changed = states(model)
    with pytest.raises(ValueError, match="specify"), residual_by_depth.cut_model(model, variant):
        model()
    assert all(map(torch.equal, before, states(model)))
    assert modules == [id(m) for m in model.modules()]
    assert torch.equal(before[-1], changed[-1]) is (variant == "full")


ALBERT_END: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "no MLP": lambda layer, x: layer.full_layer_layer_norm(layer.activation(x) + x),
    residual_by_depth.BRANCH_OUT: lambda layer, x: layer.full_layer_layer_norm(x),
}


@pytest.mark.parametrize("variant", ALBERT_END)
def test_albert_without_mlp_is_as_published_or_without_the_branch(variant: str) -> None:
    model = small("ALBERT")
    layer = model.encoder.albert_layer_groups[0].albert_layers[0]
    with residual_by_depth.cut_model(model, variant):
        found = states(model)
    for before, after in itertools.pairwise(found):
        torch.testing.assert_close(after, ALBERT_END[variant](layer, layer.attention(before)[0]))


def test_bert_without_mlp_is_attention_skip_and_norm() -> None:
    model = small("BERT")
    with residual_by_depth.cut_model(model, "no MLP"):
        found = states(model)
    with residual_by_depth.cut_model(model, "neither"):
        bare = states(model)
    for layer, before, after in zip(model.encoder.layer, found, found[1:], strict=False):
        torch.testing.assert_close(after, layer.attention(before)[0])
    for layer, before, after in zip(model.encoder.layer, bare, bare[1:], strict=False):
        out = layer.attention.output
        torch.testing.assert_close(after, out.LayerNorm(out.dense(layer.attention.self(before)[0])))


def test_rows_of_words() -> None:
    rows = residual_by_depth.word_rows("the cat, the dog; " * 20, samples=3, length=12)
    assert rows.shape == (3, 12)
    assert rows[:, 0].eq(0).all()
    assert rows[:, -1].eq(1).all()
    words, expected = ["the", "cat", ",", "the", "dog", ";"], {"the": 2, "cat": 3, ",": 4, "dog": 5, ";": 6}
    assert rows[0, 1:-1].tolist() == [expected[words[i % 6]] for i in range(10)]
    with pytest.raises(LocaterError, match="words of text"):
        residual_by_depth.word_rows("too short", 1)


def as_stated(shift: float = 0.0) -> residual_by_depth.Curves:
    """Curves that are the paper's, with gaps filled by a straight line, in eight draws that differ by rounding."""
    noise = 1e-6 * torch.randn(8, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    curves: residual_by_depth.Curves = {}
    for model, variants in residual_by_depth.STATED.items():
        curves[model] = {}
        for number, (variant, stated) in enumerate(variants.items(), 1):
            line = np.interp(range(13), list(stated), list(stated.values())) + shift
            curves[model][variant] = torch.tensor(line) + number * noise
    curves["ALBERT"][residual_by_depth.BRANCH_OUT] = noise.expand(8, 13)
    return curves


def test_claims_on_depth_against_the_papers_own_curves() -> None:
    """All hold but the abstract's sentence on MLPs, which the paper's own figure does not show."""
    measured = residual_by_depth.measure_initial(as_stated())
    claims = {claim.id: claim for claim in residual_by_depth.DEPTH_CLAIMS}
    assert set(measured) == {f"c{i}" for i in (*range(1, 17), 21)}
    verdicts = {key: verdict_of(claims[key], x, "").verdict for key, x in measured.items()}
    assert verdicts == {key: "fails" if key == "c21" else "holds" for key in measured}
    assert max(measured["c2"].value, measured["c2"].spread) < 1e-5
    assert measured["c15"].value == pytest.approx(0.345 - 0.449, abs=1e-5)
    shifted = residual_by_depth.measure_initial(as_stated(0.2))
    assert {key: verdict_of(claims[key], shifted[key], "").verdict for key in ("c1", "c4", "c6", "c14", "c21")} == {
        **dict.fromkeys(("c1", "c4", "c6"), "fails"),
        **dict.fromkeys(("c14", "c21"), "holds"),
    }


def rendered(study: Study, results: Results) -> tuple[str, dict[str, str]]:
    """The page of one study's results, through JSON."""
    verdicts = tuple(verdict_of(claim, results.measured.get(claim.id), "") for claim in study.claims)
    about = {"quick": True, "seconds": {}, "processor_seconds": {}, "torch": "", "python": "", "threads": 1}
    document = Reproduction(PAPERS["dong2021"], verdicts, about, {study.title: results.tables}).to_json()
    return page(json.loads(document), PAPERS["dong2021"])


def test_trained_models_are_judged_by_their_mask() -> None:
    falling = {v: [[0.9, 0.2, 0.01], [0.9, 0.3, 0.03]] for v in residual_by_depth.VARIANTS}
    entries = [{"model": "a", "causal": False, "curves": falling}]
    found = residual_by_depth.measure_trained(entries)
    assert set(found) == {"c17", "c18", "c19"}
    assert (found["c17"].value, found["c17"].spread) == pytest.approx((0.02, 0.01))
    assert found["c18"].value == 2
    assert set(residual_by_depth.measure_trained([{**entries[0], "causal": True}])) == {"c20"}


def test_the_study_of_depth_at_small_sizes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = residual_by_depth.initial_model
    sizes = {
        name: {**held, "num_hidden_layers" if name != "XLNet" else "n_layer": 12, "vocab_size": 3000}
        for name, held in SMALL.items()
    }
    monkeypatch.setattr(residual_by_depth, "initial_model", lambda name, seed: whole(name, seed, **sizes[name]))
    monkeypatch.setattr(residual_by_depth, "SAMPLES", {True: 2})
    monkeypatch.setattr(residual_by_depth, "DRAWS", {True: 2})
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text('{"model_type": "nothing"}')
    results = residual_by_depth.measure_depth(setting(models=tmp_path))
    assert {f"c{i}" for i in (*range(1, 17), 20, 21)} <= results.measured.keys()
    assert results.measured["c4"].value < 0.05  # type: ignore[union-attr]
    text, figures = rendered(residual_by_depth.DEPTH_STUDY, results)
    assert set(figures) == {"depth", "depth-trained"}
    assert text.count("\n| ALBERT |") == 5
    for drawing in figures.values():
        ElementTree.fromstring(drawing)
    assert "Left out: odd" in text


def setting(**more: Any) -> Setting:
    """One whose text takes no time."""
    held = Setting(**more)
    vars(held)["text"] = " ".join(f"word{i * i % 97} of {i % 7}, and" for i in range(8000))
    return held


# --- products of attention maps ---------------------------------------------------------------------------------------


def random_maps(layers: int = 3, samples: int = 2, heads: int = 2, tokens: int = 5) -> Tensor:
    logits = torch.randn(
        layers, samples, heads, tokens, tokens, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    return (2 * logits).softmax(-1)


@pytest.mark.parametrize("factors", [1, 2, 3])
def test_chains_are_ordered_products_of_one_sample(factors: int) -> None:
    maps = random_maps()
    possible = []
    for sample, layers in itertools.product(range(2), itertools.combinations(range(3), factors)):
        for heads in itertools.product(range(2), repeat=factors):
            product = np.eye(5)
            for layer, head in zip(layers, heads, strict=True):
                product = product @ maps[layer, sample, head].numpy()
            possible.append(product)
    seen = set()
    for found in paths.draw_products(maps, factors, 200).numpy():
        near = [i for i, product in enumerate(possible) if np.allclose(product, found)]
        assert len(near) == 1
        seen.add(near[0])
    assert len(seen) == len(possible)


def test_distance_from_rank_one() -> None:
    found = paths.off_rank_one(random_maps()[0, 0])
    for value, x in zip(found.tolist(), random_maps()[0, 0].numpy(), strict=True):
        u, s, v = np.linalg.svd(x)
        assert value == pytest.approx(composite(x - s[0] * np.outer(u[:, 0], v[0])) / composite(x))
    torch.testing.assert_close(paths.off_rank_one_in_float32(random_maps()[0, 0]), found, rtol=1e-4, atol=0)
    same = torch.full((1, 4, 4), 0.25)
    assert paths.off_rank_one(same).item() < 1e-15


def test_decades_leave_out_what_is_rounding() -> None:
    assert paths.decades_per_factor({k: 10 ** (-1.5 * k) for k in range(1, 5)} | {5: 1e-15}) == pytest.approx(1.5)
    assert math.isnan(paths.decades_per_factor({1: 0.1, 2: 1e-16}))


def test_attention_maps_are_those_of_the_weights() -> None:
    model = small("BERT")
    was = model.config._attn_implementation
    found = paths.attention_maps(model, ids())
    assert found.shape == (3, 2, 4, 9, 9)
    assert model.config._attn_implementation == was
    for number, layer in enumerate(model.encoder.layer):
        x = states(model)[number]
        own = layer.attention.self
        q, k = (part(x).unflatten(-1, (4, 8)).transpose(1, 2) for part in (own.query, own.key))
        torch.testing.assert_close(found[number], (q @ k.mT / 8**0.5).softmax(-1))


def test_the_study_of_products_at_small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = residual_by_depth.initial_model
    size = {**SMALL["BERT"], "num_hidden_layers": 6, "vocab_size": 3000}
    monkeypatch.setattr(paths, "initial_model", lambda name, seed: whole(name, seed, **size))
    monkeypatch.setattr(paths, "REPEATS", {True: 3})
    monkeypatch.setattr(paths, "SAMPLES", {True: 1})
    demo = {name: folder for name, folder in paths.model_folders(None).items() if name.startswith("demo")}
    monkeypatch.setattr(paths, "model_folders", lambda models: demo)
    results = paths.measure_product(setting())
    assert set(results.measured) == {"d1", "d2", "d5", "d6"}
    assert 0 < results.measured["d6"].value < 0.5  # type: ignore[union-attr]
    text, figures = rendered(paths.PRODUCT_STUDY, results)
    assert "\n| demo (in the package) | causal |" in text
    ElementTree.fromstring(figures["products"])


# --- paths of classifiers ---------------------------------------------------------------------------------------------

SHAPES = {
    "tokens": ClassifierShape(2, 8, 4, vocabulary=11, positions=5),
    "coordinates": ClassifierShape(3, 12, 2),
    "padded": ClassifierShape(2, 8, 2, vocabulary=11, mlp=True),
}


def classifier(name: str) -> tuple[Classifier, LabelledTokens]:
    torch.manual_seed(3)
    shape = SHAPES[name]
    model = Classifier(shape).double().eval().requires_grad_(False)
    for weight in model.parameters():
        weight.add_(0.3 * torch.randn(weight.shape))
    x = torch.randint(1, 11, (3, 5)) if shape.vocabulary else torch.randn(3, 5, 2, dtype=torch.float64)
    y = torch.randint(shape.labels, (3, 5))
    if name == "padded":
        y[0, 3:] = -1
    return model, LabelledTokens(x, y)


def norm(x: Array, module: nn.LayerNorm | None = None) -> Array:
    rest = x - x.mean(-1, keepdims=True)
    found = rest / np.sqrt((rest**2).mean(-1, keepdims=True) + 1e-12)
    return found if module is None else found * module.weight.numpy() + module.bias.numpy()


def linear(x: Array, module: Any) -> Array:
    return x @ module.weight.numpy().T + module.bias.numpy()


def gelu(x: Array) -> Array:
    return x * np.vectorize(lambda v: 0.5 * (1 + math.erf(v / math.sqrt(2))))(x)


def plain_maps(layer: ClassifierLayer, x: Array, real: Array) -> list[Array]:
    """Attention of every head of one sequence, key by key."""
    size = x.shape[1] // layer.heads
    q, k = linear(x, layer.query), linear(x, layer.key)
    found = []
    for head in range(layer.heads):
        at = slice(head * size, (head + 1) * size)
        weight = np.exp(q[:, at] @ k[:, at].T / math.sqrt(size)) * real
        found.append(weight / weight.sum(-1, keepdims=True))
    return found


def plain_head(layer: ClassifierLayer, x: Array, attention: Array, head: int) -> Array:
    """One head's part of the output, without the bias of the output."""
    size = x.shape[1] // layer.heads
    at = slice(head * size, (head + 1) * size)
    return attention @ linear(x, layer.value)[:, at] @ layer.out.weight.numpy()[:, at].T


def plain_mlp(layer: ClassifierLayer, x: Array) -> Array:
    if layer.mlp is None:
        return x
    return norm(x + linear(gelu(linear(x, layer.mlp[0])), layer.mlp[2]), layer.mlp_norm)


def plain_whole(model: Classifier, x: Array, real: Array) -> tuple[Array, list[list[Array]]]:
    held = []
    for layer in model.layers:
        assert isinstance(layer, ClassifierLayer)
        maps = plain_maps(layer, x, real)
        held.append(maps)
        mixed = sum(plain_head(layer, x, maps[h], h) for h in range(layer.heads)) + layer.out.bias.numpy()
        x = plain_mlp(layer, norm(x + mixed, layer.norm))
    return x, held


def plain_path(model: Classifier, x: Array, real: Array, path: HeadPath, held: list[list[Array]] | None) -> Array:
    for number, head in enumerate(path):
        layer = model.layers[number]
        assert isinstance(layer, ClassifierLayer)
        if head is not None:
            attention = (plain_maps(layer, x, real) if held is None else held[number])[head]
            x = plain_mlp(layer, norm(plain_head(layer, x, attention, head) + layer.out.bias.numpy()))
    return x


@pytest.mark.parametrize("name", SHAPES)
def test_paths_and_the_whole_model_against_numpy(name: str) -> None:
    model, data = classifier(name)
    draws = random.Random(0)
    paths = [draw_path(k, model.shape.heads, draws) for k in range(DEPTH + 1)]
    start = model.embed(data.x).numpy()
    maps = model.attention(data.x, data.real)
    found = {False: model.path_logits(data, paths), True: model.path_logits(data, paths, maps)}
    whole = model(data.x, data.real)
    for i, real in enumerate(data.real.numpy()):
        end, held = plain_whole(model, start[i], real)
        np.testing.assert_allclose(whole[i].numpy(), linear(end, model.head), rtol=1e-8, atol=1e-10)
        for kept, logits in found.items():
            total = sum(plain_path(model, start[i], real, path, held if kept else None) for path in paths)
            np.testing.assert_allclose(
                logits[i].numpy(), linear(norm(np.asarray(total)), model.head), rtol=1e-8, atol=1e-10
            )
    assert not torch.allclose(found[False], found[True])


def test_paths_of_length_zero_are_the_embedding() -> None:
    model, data = classifier("tokens")
    found = path_tasks.accuracy_by_length(model, data, 5, seed=0)
    start = torch.tensor(norm(model.embed(data.x).numpy()))
    assert found[0] == pytest.approx(accuracy(model.head(start), data))
    assert len(found) == DEPTH + 1


def test_paths_are_drawn_evenly() -> None:
    draws = random.Random(1)
    seen = [draw_path(2, 3, draws) for _ in range(6000)]
    assert all(sum(head is not None for head in path) == 2 for path in seen)
    share = [sum(path[layer] == head for path in seen) / 6000 for layer in range(DEPTH) for head in range(3)]
    assert max(abs(x - 2 / DEPTH / 3) for x in share) < 0.02


def test_hull_against_scipy() -> None:
    learn, judged = path_tasks.convex_hull(Setting(), 0)
    assert (len(learn.x), len(judged.x)) == (10_000, 300)
    points = torch.rand(100, 10, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 10 - 3
    for cloud, found in zip(points, path_tasks.on_hull(points), strict=True):
        assert set(found.nonzero()[:, 0].tolist()) == set(ConvexHull(cloud.numpy()).vertices.tolist())
    assert 0.55 < learn.y.double().mean() < 0.65


def test_sorting_data() -> None:
    learn, judged = path_tasks.sorting(Setting(), 0)
    assert (learn.x.shape, judged.x.shape) == ((1000, 8), (200, 8))
    assert learn.y[5].tolist() == sorted(learn.x[5].tolist())
    assert not torch.equal(learn.x[:200], judged.x)


def test_memorisation_reads_rte_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "rte").mkdir()
    rows = [
        "index\tsentence1\tsentence2\tlabel",
        "0\tThe cat sat.\tThe cat.\tentailment",
        "1\tA dog\tThe\tnot_entailment",
    ]
    (tmp_path / "rte" / "train.tsv").write_text("\n".join(rows))
    learn, judged = path_tasks.memorisation(setting(data=tmp_path), 0)
    assert learn.x.tolist() == [[1, 2, 3, 4, 1, 2, 4], [5, 6, 1, 0, 0, 0, 0]]
    assert torch.equal(learn.y == -1, learn.x == 0)
    assert torch.equal(judged.y, learn.y)
    learn, judged = path_tasks.memorisation(setting(), 0)
    assert (len(learn.x), len(judged.x)) == (500, 88)
    assert 0.47 < learn.y[learn.real].double().mean() < 0.53
    assert "no RTE" in path_tasks.sentences(setting())[1]


def test_training_learns() -> None:
    learn, judged = path_tasks.sorting(Setting(), 0)
    model = train_classifier(path_tasks.TASKS[0].shape, learn, TrainingRecipe(4, 30, 1e-3), 0)
    assert accuracy(model(judged.x, judged.real), judged) > guess_accuracy(learn, judged) + 0.03


def test_training_is_the_same_again() -> None:
    learn, _ = path_tasks.sorting(Setting(), 0)
    once, twice = (
        train_classifier(path_tasks.TASKS[0].shape, learn.part(slice(90)), TrainingRecipe(1, 30, 1e-3), 0)
        .state_dict()
        .values()
        for _ in range(2)
    )
    assert all(map(torch.equal, once, twice))


def fewer(make: path_tasks.DataMaker) -> path_tasks.DataMaker:
    def made(held: Setting, seed: int) -> tuple[LabelledTokens, LabelledTokens]:
        learn, judged = make(held, seed)
        return learn.part(slice(60)), judged.part(slice(10))

    return made


def brief(task: path_tasks.PathTask) -> path_tasks.PathTask:
    return replace(task, make=fewer(task.make), recipe=replace(task.recipe, epochs=1), seeds={True: 2}, quick_epochs=1)


def test_the_study_of_tasks_and_its_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_tasks, "TASKS", tuple(map(brief, path_tasks.TASKS[:2])))
    monkeypatch.setattr(path_tasks, "REPEATS", 1)
    results = path_tasks.measure(setting())
    found = {key: x.value for key, x in results.measured.items() if x is not None}
    assert set(found) == {f"f{i}" for i in (*range(1, 11), 16, 17)}
    rows = results.tables["path_accuracy"]
    curves = [run["curves"] for run in rows[0]["runs"]]
    assert found["f5"] == pytest.approx(np.mean([c[path_tasks.MANY][1] - c[path_tasks.FEW][1] for c in curves]))
    assert found["f2"] == pytest.approx(np.mean([c[path_tasks.FEW][1] for c in curves]))
    assert [row["task"] for row in rows] == ["sorting", "convex hull"]
    text, figures = rendered(path_tasks.STUDY, results)
    assert text.count("\n| convex hull |") == 3
    assert "AdamW at 0.001 falling to zero (published: 1e-05)" in text
    assert "AdamW at 1e-05 (published: 1e-05, times 0.91 at five epochs)" in text
    ElementTree.fromstring(figures["tasks"])


@pytest.mark.slow
def test_parts_in_processes_of_their_own_find_what_they_find_here() -> None:
    short = [
        replace(path_tasks.TASKS[0], recipe=replace(path_tasks.TASKS[0].recipe, epochs=epochs)) for epochs in (1, 2)
    ]
    plan: list[tuple[path_tasks.PathTask, int | None]] = [(task, None) for task in short]
    bar: list[Any] = []

    def progress(parts: Iterable[Any], total: int) -> Iterable[Any]:
        for part in parts:
            bar.append((part, total))
            yield part

    apart = map_parts(path_tasks.part_of, plan, Setting(jobs=2, progress=progress))
    assert bar == [(part, 2) for part in plan]
    with one_thread():
        assert apart == map_parts(path_tasks.part_of, plan, Setting())


@pytest.mark.gpu
def test_models_of_studies_f_and_h_on_the_gpu() -> None:
    assert device_of_study(Setting(quick=False)) == "cuda"
    assert device_of_study(Setting()) == "cpu"
    for task in path_tasks.TASKS:
        learn, judged = (part.part(slice(40)).to("cuda") for part in task.make(setting(), 0))
        model = train_classifier(task.shape, learn, TrainingRecipe(1, task.recipe.batch, 1e-3), 0)
        here = train_classifier(task.shape, learn.to("cpu"), TrainingRecipe(0, 1, 1e-3), 0)
        here.load_state_dict(model.state_dict())
        draws = random.Random(0)
        paths = [draw_path(k, task.shape.heads, draws) for k in range(DEPTH + 1)]
        for maps in (None, model.attention(judged.x, judged.real)):
            there = model.path_logits(judged, paths, maps)
            held = None if maps is None else [x.cpu() for x in maps]
            torch.testing.assert_close(
                there.cpu(), here.path_logits(judged.to("cpu"), paths, held), rtol=1e-3, atol=1e-3
            )
        assert 0 <= path_tasks.take_apart(model, learn, judged, 0)["entire"] <= 1
    found = locater_slowing.train_and_measure("LocAteR, target 2", 0, 5, "cuda")
    assert len(found["whole"]) == len(found["cut"]) == locater_slowing.SHAPE.layers + 1


def test_every_claim_has_an_id_of_its_own() -> None:
    studies = (residual_by_depth.DEPTH_STUDY, paths.PRODUCT_STUDY, path_tasks.STUDY)
    for study, letter in zip(studies, "cdf", strict=True):
        found = [claim.id for claim in study.claims]
        assert found == [f"{letter}{i}" for i in range(1, len(found) + 1)]
