"""What controls state on their classes: parameters, state, needs. Checkpoints in the older form are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import locater
from locater import LocaterError
from locater.control import CONTROLS, Controls, LocAteR, QKClip, QKNorm, Temperature
from locater.control.base import Control
from locater.control.forward_controls import ForwardControl
from locater_lab.mechanisms.swap import SwapMechanism
from locater_lab.train import Plan, Shape, Transformer, run
from locater_lab.train.controls_and_conversion import restore

# settings under which controls act on weights as small as those of the first steps
ACTING = {
    "entropypenalty": "entropypenalty(ceiling=0.5)",
    "qkclip": "qk_clip(limit=0.001, every=2)",
    "logitsoftcap": "logit_softcap(cap=0.001)",
    "mechanism": "mechanism(name=sigmoid)",
    "surgery": "surgery(no_skip=True, no_norm=True)",
}
OWN = [name for name, kind in CONTROLS.items() if kind.__module__.startswith("locater.control.")]
SHAPE = Shape(vocabulary=32, layers=2, width=16, heads=2, kv_heads=2, hidden=24, length=8)


class Cut(Exception):  # noqa: N818
    """Ends a run from inside."""


def cut_at(step: int) -> Callable[[dict[str, Any]], None]:
    def tell(event: dict[str, Any]) -> None:
        if event["step"] == step:
            raise Cut

    return tell


def plan(folder: Path, name: str) -> Plan:
    text = folder.parent / "corpus.txt"
    text.write_text("".join(f"line {i} has {i * i % 97} words.\n\n" for i in range(800)))
    shape: dict[str, Any] = dict(corpus=(str(text),), layers=2, width=16, heads=2, length=16, batch=4)
    often: dict[str, Any] = dict(steps=6, evaluate=0, checkpoint=3, observe=0, log=1, device="cpu")
    return Plan(out=str(folder), control=(ACTING.get(name, name),), **shape, **often)


def plain(x: Any) -> bool:
    if isinstance(x, list | tuple):
        return all(map(plain, x))
    return x is None or (isinstance(x, bool | int | float | str | Tensor) and not isinstance(x, nn.Parameter))


def older_form(attached: Controls) -> list[dict[str, Any]]:
    """The state of controls as checkpoints had it before: every plain attribute, and parameters where there are any."""
    return [
        {
            "kept": {name: value for name, value in vars(control).items() if plain(value)},
            "state": control.state_dict() if isinstance(control, ForwardControl) else {},
        }
        for control in attached.controls
    ]


@pytest.mark.parametrize("name", OWN)
def test_a_checkpoint_in_the_older_form_goes_on_exactly(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(plan(tmp_path / "whole", name))
    cut = replace(whole.plan, out=str(tmp_path / "cut"))
    with monkeypatch.context() as patch:
        patch.setattr(Controls, "state_dict", older_form)
        with pytest.raises(Cut):
            run(cut, cut_at(4))
    state = torch.load(tmp_path / "cut" / "step-00000003" / "state.pt", weights_only=True)
    assert isinstance(state["controls"], list)
    result = run(cut)
    assert (result.train_loss, result.report_loss) == (whole.train_loss, whole.report_loss)
    files = [Path(folder) / "model" / "model.safetensors" for folder in (whole.plan.out, cut.out)]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_clip_on_some_steps_goes_on_at_the_same_steps(every: int, tmp_path: Path) -> None:
    text = f"qk_clip(limit=0.001, every={every})"
    whole = run(replace(plan(tmp_path / "whole", "qkclip"), control=(text,), checkpoint=2))
    cut = replace(whole.plan, out=str(tmp_path / "cut"))
    with pytest.raises(Cut):
        run(cut, cut_at(5))
    assert run(cut).train_loss == whole.train_loss


def test_parameters_and_state_of_several_are_those_of_each() -> None:
    model = Transformer(SHAPE)
    controls = [Temperature(), LocAteR(schedule=lambda step: 1.0 + step), QKNorm(init=1.0)]
    both = Controls(controls).attach(model)
    assert both.parameters() == [*controls[0].parameters(), *controls[2].parameters()]
    assert len(both.parameters()) == 2 + 4
    controls[1].after_step()
    with torch.no_grad():
        controls[0].parameters()[0].fill_(0.25)
    state = {place: dict(part) for place, part in both.state_dict().items()}
    assert state["1"] == {"step": 1}
    both.detach()
    again = Controls([Temperature(), LocAteR(schedule=lambda step: 1.0 + step), QKNorm(init=1.0)]).attach(model)
    again.load_state_dict(state)
    assert again.controls[0].parameters()[0].tolist() == [0.25, 0.25]
    assert float(again.controls[1].strength) == 2.0  # type: ignore[attr-defined]
    with pytest.raises(LocaterError, match="this state has 1 controls, and there are 3"):
        again.load_state_dict({"0": {}})
    again.detach()


def test_a_state_of_another_control_is_refused() -> None:
    with pytest.raises(LocaterError, match="LocAteR: this state holds clipped, and step was expected"):
        LocAteR().load_state_dict({"clipped": 2})
    with pytest.raises(LocaterError, match="Control: this state holds step, and nothing was expected"):
        Control().load_state_dict({"step": 1})
    with pytest.raises(LocaterError, match="QKClip is not attached"):
        QKClip().load_state_dict({"clipped": 2, "step": 1})


class Counting(Control):
    """Counts, and keeps a running mean that somebody else uses too."""

    state_attributes = ("count", "mean")

    def __init__(self) -> None:
        self.count, self.mean, self.names = 0, torch.zeros(2), ["a"]


@pytest.mark.parametrize("older", [False, True])
def test_the_state_that_a_class_names_goes_on(older: bool) -> None:
    first, second = Counting(), Counting()
    first.count, first.mean = 5, torch.ones(2)
    shared = second.mean
    state: Any = Controls([first]).state_dict()
    if older:
        state = [{"kept": {"count": 5, "mean": torch.ones(2), "names": ["a"]}, "state": {}}]
    first.mean += 1
    restore(Controls([second]), state)
    assert second.count == 5
    assert shared.tolist() == [1, 1], "restored in place, and not what came after the state was taken"


def test_needs_are_said_on_the_class() -> None:
    assert {name for name in OWN if CONTROLS[name].needs_softmax} == {"entropypenalty", "logitsoftcap", "qkclip"}
    assert QKNorm().needs_softmax
    assert not QKNorm(init=1.0).needs_softmax
    assert {name for name in OWN if CONTROLS[name].loss_needs_forward_graph} == {"entropypenalty"}
    swap = Controls([Temperature(), SwapMechanism("sigmoid", layers=[1])])
    assert [swap.mechanism_of(layer, "softmax") for layer in range(3)] == ["softmax", "sigmoid", "softmax"]


def test_names_that_moved_to_the_laboratory_name_their_new_home() -> None:
    for name, home in {"attention": "locater_lab.mechanisms", "train": "locater_lab.train"}.items():
        with pytest.raises(AttributeError, match=f"locater.{name} is now {home}"):
            getattr(locater, name)
    assert CONTROLS["mechanism"] is SwapMechanism, "offered by an entry point"
