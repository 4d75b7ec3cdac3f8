"""Every mechanism under every control: a step is trained, or the pair is refused in one line that names the option."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from locater import LocaterError, attention_layers
from locater.control import LocAteR
from locater_lab.mechanisms import mechanisms
from locater_lab.mechanisms.stack import parse_attention
from locater_lab.train import Plan, Shape, Transformer, run
from locater_lab.train.controls_and_conversion import controls
from locater_lab.train.loop import Training, check_plan
from tests.conftest import Result as Ran

ATTENTION = [m.name for m in mechanisms()] + [
    "gated(per=element)", "gated(per=element, position=value)", "gated(position=key)", "gated(from_input=False)", "gated(additive=True)",
    "fastmax(order=1)", "softcap(cap=3)", "binary(span=0)", "differential(norm=False)", "multiformer(kinds=cc, depthwise=False)",
    "hybrid(layout=L)", "hybrid(layout=L, linear=delta)",
]  # fmt: skip
SETTINGS = {"entropypenalty": "(ceiling=0.5)", "mechanism": "(name=sigmoid)", "surgery": "(no_skip=True, no_norm=True)"}
CONTROLS = [
    name + SETTINGS.get(name, "") for name, kind in controls().items() if kind.__module__.startswith("locater.control.")
]
# what reads or replaces the logits of a softmax; the others are for every mechanism whose heads can be read
OF_SOFTMAX = ("entropypenalty", "logitsoftcap", "mechanism", "qkclip", "qknorm")
PLAIN = ("softmax", "softcap", "softmax_plus_one", "learned_sink")
UNREAD = ("qk_norm", "differential")
NOT_FOR = {
    "softcap": ("logitsoftcap", "mechanism", "qkclip"),
    "softmax_plus_one": ("mechanism",),
    "learned_sink": ("mechanism",),
}


def plan_of(attention: str, control: str, folder: Path, **changes: Any) -> Plan:
    never = any(layer.mechanism.causal == "never" for layer in parse_attention(attention, 1))
    held: dict[str, Any] = dict(
        out=str(folder), task="sort" if never else "copy", vocabulary=8, layers=1, width=16, heads=2, hidden=16, length=5, batch=2,
        steps=1, evaluate=0, checkpoint=0, observe=0, device="cpu", attention=attention, control=(control,),
    )  # fmt: skip
    return Plan(**{**held, **changes})


def begun(plan: Plan) -> Training:
    """A run as it stands before anything is written."""
    check_plan(plan)
    return Training.begin(plan, Path(plan.out), torch.device("cpu"), lambda event: None)


def fits(attention: str, control: str) -> bool:
    """Whether the pair is one that makes sense."""
    name, control = parse_attention(attention, 1)[0].name, control.partition("(")[0]
    if name in UNREAD or control in NOT_FOR.get(name, ()):
        return False
    return name in PLAIN or control not in OF_SOFTMAX


@pytest.mark.parametrize("attention", ATTENTION)
def test_every_mechanism_under_every_control(attention: str, tmp_path: Path) -> None:
    for control in CONTROLS:
        plan = plan_of(attention, control, tmp_path / "run")
        if not fits(attention, control):
            with pytest.raises(LocaterError) as error:
                begun(plan)
            assert str(error.value).startswith(f"--control {control}: ")
            assert "\n" not in str(error.value)
            continue
        training = begun(plan)
        try:
            training.train()
        finally:
            training.end()
        assert math.isfinite(training.loss), control
        assert all(bool(p.isfinite().all()) for p in training.trainable), control
    assert not (tmp_path / "run").exists(), "nothing is written before a run is begun"


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is traced is the matter here, not the code made of it."""
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, mode: plain(model, backend="eager"))


@pytest.mark.parametrize(
    ("attention", "control"), [("gated(per=element)", "locater"), ("learned_sink", "entropypenalty(ceiling=0.5)")]
)
def test_a_compiled_run(attention: str, control: str, tmp_path: Path, traced: None) -> None:
    result = run(plan_of(attention, control, tmp_path / "run", compile=True, batch=512, length=4))
    torch._dynamo.reset()
    assert math.isfinite(result.report_loss)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ATTENTION)
def test_every_pair_in_a_whole_compiled_run(attention: str, tmp_path: Path, traced: None) -> None:
    """Evaluated, observed, checkpointed and measured too; the loss is that of a run that is not compiled."""
    for at, control in enumerate(CONTROLS):
        if not fits(attention, control):
            continue
        both = [
            run(
                plan_of(
                    attention,
                    control,
                    tmp_path / f"{at}-{compiled}",
                    compile=compiled,
                    steps=3,
                    observe=1,
                    checkpoint=2,
                    batch=64,
                )
            )
            for compiled in (False, True)
        ]
        torch._dynamo.reset()
        assert both[1].report_loss == pytest.approx(both[0].report_loss, rel=1e-3), control


@pytest.mark.parametrize("attention", [a for a in ATTENTION if parse_attention(a, 1)[0].name not in UNREAD])
def test_layers_are_recorded_and_no_module_is_made(
    attention: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A reader names tensors and no more, so that it can be traced."""
    causal = not any(layer.mechanism.causal == "never" for layer in parse_attention(attention, 1))
    model = Transformer(
        Shape(width=16, layers=1, heads=2, kv_heads=2, hidden=16, length=8, attention=attention, causal=causal)
    )

    def made(*args: Any, **kw: Any) -> None:
        pytest.fail("a module was made while a layer was read")

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.Module, "__init__", made)
        assert len(list(attention_layers(model))) == 1
    control = LocAteR().attach(model)  # which traces what it reads, or warns that it is slower
    assert control.loss().requires_grad
    assert [entry.message for entry in caplog.records if entry.levelname == "WARNING"] == []
    control.detach()


def test_the_penalty_is_one_graph() -> None:
    control = LocAteR().attach(
        Transformer(Shape(width=16, layers=1, heads=2, kv_heads=2, hidden=16, attention="gated_delta"))
    )
    torch.testing.assert_close(torch.compile(control.loss, backend="eager", fullgraph=True)(), control.loss())
    torch._dynamo.reset()
    control.detach()


def test_the_command_names_the_control(tmp_path: Path, run: Callable[..., Ran]) -> None:
    sizes = "--task copy --vocabulary 8 --layers 1 --width 16 --heads 2 --length 4 --batch 512 --steps 1 --observe 0 --device cpu".split()
    done = run("train", "--attention", "gated", "--control", "locater(target=2)", "--out", tmp_path / "run", *sizes)
    assert done.status == 0, done.err
    done = run("train", "--attention", "softcap", "--control", "qk_clip", "--out", tmp_path / "other", *sizes)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("locater: --control qk_clip: model.layers.0.self_attn: its logits have a soft cap")
    assert len(done.err.splitlines()) == 1


def test_equal_plans_with_measured_tokens_give_equal_weights(tmp_path: Path) -> None:
    def weights(name: str, control: str) -> dict[str, torch.Tensor]:
        plan = plan_of("softmax", control, tmp_path / name, steps=3, accumulate=2, norm="post", dropout=0.1)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            training = begun(plan)
            training.train()
        training.end()
        return training.model.state_dict()

    first, second = (weights(name, "locater(form=measured, shrink=1)") for name in ("first", "second"))
    plain = weights("plain", "locater(shrink=0, hold=0)")
    assert all(torch.equal(first[name], x) for name, x in second.items())
    assert any(not torch.equal(plain[name], x) for name, x in second.items())
