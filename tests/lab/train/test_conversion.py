"""--convert: another mechanism in a trained model, measured right before and after, trained on, and resumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from locater.errors import LocaterError
from locater.runs.run_log import read_run
from locater_lab.cli.train import summary
from locater_lab.mechanisms.swap import SwapMechanism
from locater_lab.train import Plan, load, run
from locater_lab.train.data import open_data
from locater_lab.train.run_folder import RESULT, Result
from tests.lab.train.test_parts import images
from tests.lab.train.test_runs import Cut, cut_at, weights


def plan(folder: Path, name: str, **options: Any) -> Plan:
    file = folder / "x.npz"
    path = str(file if file.exists() else images(file))
    small = dict(layers=2, width=16, heads=2, batch=20, steps=12, rate=1e-2, device="cpu", observe=0, checkpoint=0)
    return Plan(task="image", images=path, out=str(folder / name), **{**small, **options})


def loss_of(model: torch.nn.Module, result: Result, folder: Path) -> tuple[float, float]:
    """Loss and accuracy on the report split, by hand."""
    with torch.no_grad():
        parts = [
            (model(x).double(), y) for x, y in open_data(result.plan, folder, torch.device("cpu")).windows("report")
        ]
    logits, labels = (torch.cat(x) for x in zip(*parts, strict=True))
    right = logits.argmax(-1) == labels
    return float(-logits.log_softmax(-1).gather(1, labels[:, None]).mean()), float(right.double().mean())


def test_at_the_last_step_the_weights_are_those_of_the_plain_run(tmp_path: Path) -> None:
    plain = run(plan(tmp_path, "plain"))
    other = run(plan(tmp_path, "other", convert="centred"))
    assert plain.conversion is None
    assert other.conversion is not None
    assert other.conversion["step"] == 12
    assert other.conversion["before"] == {"loss": plain.report_loss, "accuracy": plain.accuracy}
    model = load(plain.model)
    swapped = SwapMechanism("centred").attach(model)
    loss, accuracy = loss_of(model, other, tmp_path)
    swapped.detach()
    assert other.report_loss == other.conversion["after"]["loss"] == pytest.approx(loss, rel=1e-5)
    assert other.accuracy == other.conversion["after"]["accuracy"] == pytest.approx(accuracy)
    assert load(other.model).shape.attention == "centred"
    assert summary(other).endswith(f"at step 12 moved the report loss from {plain.report_loss:.4f} to {loss:.4f}")
    assert other.measures["entropy"] is None, "weights that may be negative have none"
    assert Result.load(tmp_path / "other" / RESULT) == other


def test_training_goes_on_with_the_parameters_of_the_mechanism(tmp_path: Path) -> None:
    short = run(plan(tmp_path, "short", convert="binary(grid=(2, 2))", convert_at=6, steps=6, warmup=0, floor=1))
    long = run(plan(tmp_path, "long", convert="binary(grid=(2, 2))", convert_at=6, steps=12, warmup=0, floor=1))
    assert short.conversion == long.conversion
    before, after = (load(result.model).state_dict() for result in (short, long))
    assert before.keys() == after.keys()
    tables = [name for name in before if name.endswith("mechanism.table")]
    assert len(tables) == 2
    assert all(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("stop", [5, 9])
def test_a_run_resumes_on_either_side_of_its_conversion(tmp_path: Path, stop: int) -> None:
    options: dict[str, Any] = dict(convert="gated", convert_at=6, checkpoint=4, log=1)
    whole, parts = (plan(tmp_path, name, **options) for name in ("whole", "parts"))
    with pytest.raises(Cut):
        run(parts, cut_at(stop))
    first, again = run(whole), run(parts)
    assert weights(again) == weights(first)
    assert again.conversion == first.conversion


def test_heads_are_observed_where_they_can_be_on_both_sides(tmp_path: Path) -> None:
    run(plan(tmp_path, "sink", convert="learned_sink", convert_at=6, observe=3))
    steps = read_run(tmp_path / "sink").steps
    assert len(steps) == 4
    assert steps[-1]["step"] > 6
    run(plan(tmp_path, "binary", convert="binary", convert_at=6, observe=3))
    assert read_run(tmp_path / "binary").steps == [], "losses alone"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"convert": "softmax"}, "that is the attention of the model already"),
        ({"convert": "binary", "convert_at": 13}, "convert_at=13: the run ends at step 12"),
        ({"convert": "binary(grid=(3, 3))"}, "a grid of 3 x 3 has 9 tokens, and there are 4 keys"),
        ({"convert_at": 5}, "Give --convert MECHANISM too"),
        ({"convert": "delta"}, "--convert delta: task=image: delta attention is causal only"),
        ({"convert": "binery"}, "--convert binery: no attention mechanism 'binery'"),
        (
            {"convert": "binary", "control": ("mechanism(name=sigmoid)",)},
            "replaces the attention of --convert binary",
        ),
        (
            {"convert": "binary", "control": ("qk_clip",)},
            "needs the logits of a softmax, and binary attention has none",
        ),
    ],
)
def test_what_cannot_be_converted_is_refused(tmp_path: Path, options: dict[str, Any], why: str) -> None:
    with pytest.raises(LocaterError) as error:
        run(plan(tmp_path, "run", **options))
    assert why in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_compiled_model_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, mode: plain(model, backend="eager"))
    options = dict(convert="binary(grid=(2, 2))", convert_at=6)
    eager = run(plan(tmp_path, "eager", **options))
    compiled = run(replace(eager.plan, out=str(tmp_path / "compiled"), compile=True))
    torch._dynamo.reset()
    assert compiled.report_loss == pytest.approx(eager.report_loss, rel=1e-4)
