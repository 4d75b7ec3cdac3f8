"""Whole runs: what is learned and left behind, going on, full disks, failures, sweeps, the command."""

from __future__ import annotations

import hashlib
import io
import json
import math
import random
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import locater
from locater import LocaterError
from locater.control.base import Control, Controls
from locater.runs.record_sinks import read_run
from locater_lab.cli.train import ProgressLine
from locater_lab.models.transformer import Transformer
from locater_lab.train import DivergedError, Plan, Result, load, loop, run, sweep
from locater_lab.train import checkpoint as checkpoints
from locater_lab.train.controls_and_conversion import controls
from locater_lab.train.data import open_data
from locater_lab.train.optimizer_and_learning_rate import compile_model
from locater_lab.train.sweep import RESULTS, parse_sweep, read_results
from tests.conftest import Result as Ran
from tests.lab.train.test_parts import TINY, corpus, images

Run = Callable[..., Ran]


def plan(folder: Path, **changes: Any) -> Plan:
    text = folder / "corpus.txt"
    held = {
        **TINY,
        "corpus": (str(text if text.exists() else corpus(folder, 1600)),),
        "out": str(folder / "run"),
        "log": 1,
    }
    return Plan(**{**held, "steps": 12, "checkpoint": 4, "evaluate": 6, "observe": 4, **changes})


def weights(result: Result) -> bytes:
    return (Path(result.model) / "model.safetensors").read_bytes()


class Cut(Exception):  # noqa: N818
    """Ends a run from inside."""


def cut_at(step: int) -> Callable[[dict[str, Any]], None]:
    def tell(event: dict[str, Any]) -> None:
        if event["step"] == step:
            raise Cut

    return tell


def test_a_run_learns_and_leaves_everything_behind(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    result = run(plan(tmp_path, steps=60, rate=1e-2, control=("locater(target=2)",)), events.append)
    assert result.report_loss < 3.0 < events[0]["loss"]  # bytes at random: 5.5
    assert [step for step, _ in result.history] == list(range(6, 61, 6))
    assert events[-1]["step"] == 60
    assert events[-1]["entropy"] > 0
    log = read_run(tmp_path / "run")
    assert log.ended
    assert log.steps[-1]["step"] == 57
    M = torch.tensor([row.M for row in locater.scan(result.model).rows])
    assert bool((M > 1).all()), "the control pulls M to 2"
    assert Result.load(tmp_path / "run" / "result.json") == result
    assert result.tokens == 60 * 4 * 16
    assert [p.name for p in checkpoints.checkpoints(tmp_path / "run")] == ["step-00000056", "step-00000060"]


@pytest.mark.parametrize(("keep", "steps"), [(0, [4, 8, 12]), (1, [12]), (2, [8, 12])])
def test_how_many_checkpoints_stay(tmp_path: Path, keep: int, steps: list[int]) -> None:
    first = run(plan(tmp_path, keep=keep, evaluate=0, observe=0))
    assert [int(p.name[5:]) for p in checkpoints.checkpoints(tmp_path / "run")] == steps
    assert run(plan(tmp_path, keep=3, evaluate=0, observe=0)).report_loss == first.report_loss, "the same run"


def test_what_was_read_from_the_device_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    real = locater.Monitor.after_step

    def after_step(self: Any, loss: Any = None, step: int | None = None, **scalars: Any) -> Any:
        told.extend([loss, *scalars.values()])
        return real(self, loss, step, **scalars)

    monkeypatch.setattr(locater.Monitor, "after_step", after_step)
    run(plan(tmp_path, steps=2))
    assert {type(x) for x in told} == {float}


def test_the_report_loss_is_that_of_the_final_weights(tmp_path: Path) -> None:
    from locater_lab.train.data import open_data

    result = run(plan(tmp_path))
    data = open_data(result.plan, tmp_path, torch.device("cpu"))
    model = load(result.model)
    with torch.no_grad():
        held = [(float(model(x, y)) * y.numel(), y.numel()) for x, y in data.windows("report")]
    assert result.report_loss == pytest.approx(sum(a for a, _ in held) / sum(b for _, b in held), rel=1e-5)
    facts = result.data
    assert result.bits_per_byte == pytest.approx(result.report_loss / 0.6931, rel=1e-3)  # a byte is a token here
    assert facts["sha256"] == locater.inputs.corpus.fingerprint(
        "\n\n".join(locater.inputs.corpus.read_documents(result.plan.corpus))
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run that nobody disturbed."""
    return run(plan(tmp_path_factory.mktemp("whole"), control=("locater(target=2)",), accumulate=2))


@pytest.mark.parametrize("step", [1, 4, 7, 12])
def test_a_run_that_was_cut_off_goes_on_exactly(tmp_path: Path, whole: Result, step: int) -> None:
    again = replace(whole.plan, out=str(tmp_path / "cut"))
    with pytest.raises(Cut):
        run(again, cut_at(step))
    result = run(again)
    assert weights(result) == weights(whole)
    assert (result.report_loss, result.history, result.train_loss) == (
        whole.report_loss,
        whole.history,
        whole.train_loss,
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(plan(tmp_path_factory.mktemp("plain"), steps=4, checkpoint=2, evaluate=0, accumulate=2))


# settings under which controls act on weights as small as those of the first steps
ACTING = {"entropypenalty": "entropypenalty(ceiling=0.5)", "qkclip": "qk_clip(limit=0.001)", "logitsoftcap": "logit_softcap(cap=0.001)",
          "mechanism": "mechanism(name=sigmoid)", "surgery": "surgery(no_skip=True, no_norm=True)"}  # fmt: skip


@pytest.mark.parametrize("name", controls())
def test_a_run_under_each_control_goes_on_exactly(tmp_path: Path, plain: Result, name: str) -> None:
    controlled = run(replace(plain.plan, out=str(tmp_path / "whole"), control=(ACTING.get(name, name),)))
    assert weights(controlled) != weights(plain), "the control acts"
    again = replace(controlled.plan, out=str(tmp_path / "cut"))
    with pytest.raises(Cut):
        run(again, cut_at(3))
    result = run(again)
    assert weights(result) == weights(controlled)
    assert result.report_loss == controlled.report_loss
    assert all(math.isfinite(row.M) for row in locater.scan(result.model).rows if row.M is not None)


class Noise(Control):
    """Draws on the random numbers that everybody shares."""

    def after_step(self) -> None:
        with torch.no_grad():
            for p in self.attached.parameters():
                p += 1e-3 * random.random() * torch.randn(p.shape)


def test_random_numbers_go_on_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "attach", lambda texts, model: Controls([Noise()]).attach(model))
    undisturbed = run(plan(tmp_path, out=str(tmp_path / "whole"), steps=5, checkpoint=2))
    again = replace(undisturbed.plan, out=str(tmp_path / "cut"))
    with pytest.raises(Cut):
        run(again, cut_at(3))
    random.seed(7)
    assert weights(run(again)) == weights(undisturbed)


def test_accumulation_is_a_larger_batch_in_parts(tmp_path: Path) -> None:
    from locater_lab.train.loop import Training

    (tmp_path / "run").mkdir()
    made = Training.begin(plan(tmp_path, accumulate=3, observe=0), tmp_path / "run", torch.device("cpu"), print)
    batches = made._batches(0)
    assert not any(torch.equal(a, b) for a, _ in batches for b, _ in made._batches(1)), (
        "each part is a batch of its own"
    )
    made._backward(batches)
    summed = [p.grad.clone() for p in made.model.parameters() if p.grad is not None]
    made.optimizer.zero_grad()
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    made.model(x, y).backward()
    for ours, grad in zip(summed, [p.grad for p in made.model.parameters() if p.grad is not None], strict=True):
        torch.testing.assert_close(ours, grad, atol=1e-6, rtol=1e-4)


def test_a_finished_run_is_read_back_and_random_numbers_are_the_callers(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first = run(plan(tmp_path))
    assert torch.equal(torch.rand(1), expected)
    assert run(first.plan, cut_at(1)) == first  # no step is made


def test_seeds_and_settings_matter(tmp_path: Path) -> None:
    base = run(plan(tmp_path, out=str(tmp_path / "a"), checkpoint=0, observe=0))
    other = run(replace(base.plan, out=str(tmp_path / "b"), seed=1))
    assert weights(base) != weights(other)
    assert not list((tmp_path / "a").glob("step-*"))


def test_masked_text_with_merged_bytes(tmp_path: Path) -> None:
    result = run(plan(tmp_path, task="masked", vocabulary=300, steps=80, rate=1e-2, checkpoint=0))
    assert result.report_loss < 4.0  # 301 tokens at random: 5.7
    assert result.bits_per_byte is None
    assert load(result.model).shape.vocabulary == 301
    assert locater.scan(result.model).rows[0].kind == "self"


def test_texts_are_told_apart(tmp_path: Path) -> None:
    for name, letters in (("early", "abcdef "), ("late", "abcxyz ")):
        lines = ("".join(random.Random(f"{name}{n}").choices(letters, k=100)) for n in range(200))
        (tmp_path / f"{name}.txt").write_text("\n".join(lines))
    sources = (str(tmp_path / "early.txt"), str(tmp_path / "late.txt"))
    result = run(plan(tmp_path, task="classify", corpus=sources, steps=60, rate=1e-2, checkpoint=0))
    assert result.accuracy is not None
    assert result.accuracy > 0.95
    assert result.bits_per_byte is None
    assert result.data["classes"] == 2
    model = load(result.model)
    assert model.shape.classes == 2
    data = open_data(result.plan, Path(result.plan.out), torch.device("cpu"))
    right = [model(inputs).argmax(-1) == labels for inputs, labels in data.windows("report")]
    assert float(torch.cat(right).double().mean()) == result.accuracy  # the output map was saved too
    assert locater.scan(result.model).rows[0].kind == "self"


def test_classes_need_texts_of_their_own(tmp_path: Path) -> None:
    for name, text in (("a", "one text\n" * 400), ("b", "one text\n" * 400), ("c", "few")):
        (tmp_path / f"{name}.txt").write_text(text)
    a, b, c = (str(tmp_path / f"{name}.txt") for name in "abc")
    with pytest.raises(LocaterError, match="give --corpus twice or more"):
        plan(tmp_path, task="classify", corpus=(a,))
    with pytest.raises(LocaterError, match=r"b\.txt: the same text as .*a\.txt"):
        run(plan(tmp_path, task="classify", corpus=(a, b)))
    with pytest.raises(LocaterError, match=r"c\.txt: its train split has \d+ tokens, too few"):
        run(plan(tmp_path, task="classify", corpus=(a, c)))


def test_images_are_told_apart(tmp_path: Path) -> None:
    held = Plan(task="image", images=str(images(tmp_path / "x.npz")), out=str(tmp_path / "run"), layers=1, width=16, heads=2, batch=20,
                steps=40, rate=1e-2, device="cpu")  # fmt: skip
    result = run(held)
    assert result.accuracy is not None
    assert result.accuracy > 0.95
    assert load(result.model).shape.length == 4


def test_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.compile
    calls = []

    def traced(model: Any, mode: str) -> Any:
        calls.append(model)
        return plain(model, backend="eager")  # what is traced is the matter here, not the code made of it

    monkeypatch.setattr(torch, "compile", traced)
    result = run(plan(tmp_path, compile=True, checkpoint=0))
    assert len(calls) == 1
    assert [step["step"] for step in read_run(tmp_path / "run").steps] == [1, 5, 9]
    assert read_run(tmp_path / "run").steps[1]["heads"]["entropy"][1][1] > 0
    torch._dynamo.reset()
    same = run(replace(result.plan, compile=False, out=str(tmp_path / "eager")))
    assert result.report_loss == pytest.approx(same.report_loss, rel=1e-4)


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    whole = run(plan(tmp_path, out=str(tmp_path / "whole")))
    held = replace(whole.plan, out=str(tmp_path / "full"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(event: dict[str, Any]) -> None:
        if event["step"] == 6:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))  # larger files fail, as on a full disk

    try:
        with pytest.raises(LocaterError) as error:
            run(held, fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "step-00000008: the checkpoint cannot be written" in str(error.value)
    assert "full/step-00000004 is kept" in str(error.value)
    assert [p.name for p in checkpoints.checkpoints(tmp_path / "full")] == ["step-00000004"]
    assert not list((tmp_path / "full").glob(".*.tmp"))
    assert weights(run(held)) == weights(whole)


class Poison(Control):
    """Spoils one row of the second layer's queries after five steps."""

    steps = 0

    def __init__(self, value: float = math.inf) -> None:
        self.value = value

    def after_step(self) -> None:
        self.steps += 1
        if self.steps == 5:
            model: Any = self.attached
            model.model.layers[1].self_attn.q_proj.weight.data[9] = self.value


@pytest.mark.parametrize(
    ("every", "said"),
    [
        (
            4,
            "step 6: the loss is nan; the logits of model.layers.1.self_attn went first (head 1); the last good checkpoint is {}-00000004",
        ),
        (
            5,
            "step 5: the weights are not finite; the logits of model.layers.1.self_attn went first (head 1); no checkpoint was written",
        ),
    ],
)
def test_a_run_that_fails_names_step_layer_and_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, said: str
) -> None:
    monkeypatch.setattr(loop, "attach", lambda texts, model: Controls([Poison()]).attach(model))
    with pytest.raises(DivergedError) as error:
        run(plan(tmp_path, checkpoint=every))
    assert said.format(tmp_path / "run" / "step") in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run" / "model").exists()
    assert len(checkpoints.checkpoints(tmp_path / "run")) == (every == 4)


@pytest.mark.parametrize(
    ("value", "said"), [(math.inf, "step 5: the weights are not finite"), (3e38, "step 5: the report loss is nan")]
)
def test_the_last_step_can_be_one_too_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float, said: str
) -> None:
    monkeypatch.setattr(loop, "attach", lambda texts, model: Controls([Poison(value)]).attach(model))
    with pytest.raises(DivergedError, match=said):
        run(plan(tmp_path, steps=5, checkpoint=0))
    assert not (tmp_path / "run" / "result.json").exists()


def test_a_rate_that_is_too_high_ends_the_run(run: Run, tmp_path: Path) -> None:
    found = run("train", *options(tmp_path), "--rate", "1e30", "--warmup", "0")
    assert found.status == 2
    assert found.err.splitlines()[-1].startswith(f"locater: {tmp_path / 'run'}: step 2: the ")


def test_another_plan_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    run(plan(tmp_path))
    with pytest.raises(LocaterError, match=r"holds another run \(steps=12, here 13\)"):
        run(plan(tmp_path, steps=13))


@pytest.mark.parametrize(
    "wrong",
    [
        {"corpus": ("no/such.txt",)},
        {"length": 5000},
        {"control": ("surgery",)},
        {"vocabulary": 300, "control": ("mimetic(x=1)",)},
    ],
)
def test_a_start_that_failed_claims_nothing(tmp_path: Path, wrong: dict[str, Any]) -> None:
    out = tmp_path / "new" / "run"
    with pytest.raises(LocaterError):
        run(plan(tmp_path, out=str(out), **wrong))
    with pytest.raises(LocaterError):
        sweep(plan(tmp_path, out=str(out), **wrong), {"seed": [0, 1]})
    assert not out.parent.exists()


def test_a_control_that_does_not_fit_the_model_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(LocaterError, match="capped at"):
        run(plan(tmp_path, vocabulary=300, attention="softcap", control=("logit_softcap(cap=2)",)))
    assert not (tmp_path / "run").exists()


def test_a_run_that_came_to_no_step_makes_room_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(self: loop.Training) -> None:
        raise Cut

    with monkeypatch.context() as held:
        held.setattr(loop.Training, "train", killed)
        with pytest.raises(Cut):
            run(plan(tmp_path, vocabulary=300))
    assert (tmp_path / "run" / "tokenizer.json").is_file()
    with pytest.raises(Cut):
        run(plan(tmp_path, vocabulary=310, steps=5, checkpoint=0), cut_at(2))
    assert len(json.loads((tmp_path / "run" / "tokenizer.json").read_text())["model"]["vocab"]) == 310, (
        "of the new plan"
    )
    with pytest.raises(LocaterError, match=r"holds another run \(vocabulary=310, here 256\)"):
        run(plan(tmp_path))  # two steps are in the log
    assert run(plan(tmp_path, vocabulary=310, steps=5, checkpoint=0)).tokens == 5 * 4 * 16


def test_a_plan_that_somebody_wrote_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "plan.json").write_text(plan(tmp_path, steps=3).to_json())
    with pytest.raises(LocaterError, match="holds another run"):
        run(plan(tmp_path, steps=4))
    assert Plan.load(tmp_path / "run" / "plan.json").steps == 3


def test_two_runs_in_one_folder_at_a_time_are_refused(tmp_path: Path) -> None:
    def another(event: dict[str, Any]) -> None:
        run(plan(tmp_path))

    with pytest.raises(LocaterError, match="another process is training in it"):
        run(plan(tmp_path), another)
    assert run(plan(tmp_path)).report_loss > 0


def test_other_text_than_the_run_began_with_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Cut):
        run(plan(tmp_path), cut_at(5))
    corpus(tmp_path, words=4001)
    with pytest.raises(LocaterError, match="began on other data than there is now"):
        run(plan(tmp_path))


def test_what_a_crash_left_is_cleared_away(tmp_path: Path) -> None:
    for name in (".step-00000009.tmp", ".step-00000002.old", ".model.tmp"):
        (tmp_path / "run" / name).mkdir(parents=True)
    run(plan(tmp_path))
    assert not [p for p in (tmp_path / "run").iterdir() if p.name.startswith(".") and p.is_dir()]


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was cut off after its second checkpoint."""
    base = tmp_path_factory.mktemp("damaged")
    with pytest.raises(Cut):
        run(plan(base), cut_at(9))
    return base / "run"


@pytest.mark.parametrize(
    "name", ["state.pt", "SHA256SUMS", "model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"]
)
def test_a_bit_that_flips_in_a_checkpoint_is_found(two_checkpoints: Path, name: str) -> None:
    step = two_checkpoints / "step-00000008"
    path = step / name
    content, cpu = path.read_bytes(), torch.device("cpu")
    rng = random.Random(0)
    places = [0, 8 * len(content) - 1, *(rng.randrange(8 * len(content)) for _ in range(60))]
    flipped = [content[: at // 8] + bytes([content[at // 8] ^ (1 << at % 8)]) + content[at // 8 + 1 :] for at in places]
    try:
        for damaged in (*flipped, b"", content[:-1], content[: len(content) // 2], content + b"\0"):
            path.write_bytes(damaged)
            with pytest.raises(LocaterError) as error:
                checkpoints.read_state(step, cpu)
            said = str(error.value)
            assert said.startswith(f"{step}/"), said
            assert name == "SHA256SUMS" or said.startswith(f"{path}: damaged"), said
            assert said.endswith(f"remove {step}, and the run goes on from step-00000004"), said
            assert "\n" not in said
    finally:
        path.write_bytes(content)
    assert checkpoints.read_state(step, cpu)["step"] == 8


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(tmp_path: Path, whole: Result) -> None:
    again = replace(whole.plan, out=str(tmp_path / "run"))
    with pytest.raises(Cut):
        run(again, cut_at(9))
    last = tmp_path / "run" / "step-00000008"
    (last / "state.pt").write_bytes(b"half")
    with pytest.raises(LocaterError, match=r"step-00000008/state\.pt: damaged, .* the run goes on from step-00000004"):
        run(again)
    shutil.rmtree(last)
    assert weights(run(again)) == weights(whole)


def test_a_tokenizer_that_changed_is_refused(two_checkpoints: Path) -> None:
    path, step = two_checkpoints / "tokenizer.json", two_checkpoints / "step-00000008"
    content = path.read_bytes()
    try:
        path.write_bytes(content + b" ")
        with pytest.raises(LocaterError) as error:
            checkpoints.read_state(step, torch.device("cpu"))
    finally:
        path.write_bytes(content)
    assert (
        str(error.value) == f"{path}: damaged, or changed since step-00000008: copy {step / 'tokenizer.json'} over it"
    )


def test_a_checkpoint_of_before_has_no_sums(
    two_checkpoints: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(two_checkpoints / "step-00000004", tmp_path / "step-00000004")
    (tmp_path / "step-00000004" / "SHA256SUMS").unlink()
    assert checkpoints.read_state(tmp_path / "step-00000004", torch.device("cpu"))["step"] == 4
    said = f"{tmp_path}/step-00000004: was written without SHA256SUMS, so it cannot be checked for damage; the run goes on from it"
    assert caplog.messages == [said]
    (tmp_path / "step-00000004" / "state.pt").write_bytes(b"half")
    with pytest.raises(
        LocaterError,
        match=r"step-00000004: cannot be read .* the run goes on from its first step, since no other is kept",
    ):
        checkpoints.read_state(tmp_path / "step-00000004", torch.device("cpu"))


def test_sums_are_those_of_the_usual_command(two_checkpoints: Path) -> None:
    step = two_checkpoints / "step-00000008"
    made = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}"
        for path in sorted(step.iterdir())
        if path.name != "SHA256SUMS"
    ]
    assert sorted((step / "SHA256SUMS").read_text().splitlines()) == sorted(made)


# Sweeps


def test_a_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    base = plan(tmp_path, out=str(tmp_path / "sweep"), steps=4, checkpoint=2, observe=0)
    over = {"rate": [1e-3, 1e30], "seed": [0, 1]}
    told: list[str] = []

    def tell(name: str) -> Callable[[dict[str, Any]], None]:
        told.append(name)
        return cut_at(3) if name == "rate=0.001,seed=1" and told.count(name) == 1 else lambda event: None

    with pytest.raises(Cut):
        sweep(base, over, tell)
    path = tmp_path / "sweep" / RESULTS
    assert [line["name"] for line in read_results(path)] == ["rate=0.001,seed=0"]
    with path.open("a") as file:
        file.write('{"name": "half')  # killed in the middle of a line
    lines = sweep(base, over, tell)
    assert told[:3] == ["rate=0.001,seed=0", "rate=0.001,seed=1", "rate=0.001,seed=1"]
    assert len(told) == 5
    assert [line["status"] for line in lines] == ["done", "done", "diverged", "diverged"]
    assert Result.from_dict(lines[1]).plan.seed == 1
    assert sweep(base, over, tell) == lines
    assert len(told) == 5
    moved = path.parent.rename(tmp_path / "moved")
    assert sweep(replace(base, out=str(moved)), over, tell) == lines


@pytest.mark.parametrize(
    ("text", "seeds", "said"),
    [
        ("speed=1,2", None, "write it as option=value,value with an option of task"),
        ("rate", None, "write it as option=value,value"),
        ("rate=1,fast", None, "--sweep rate: 'fast' is not a valid value"),
        ("rate=1,1.0", None, "give each value once"),
        ("seed=1,2", 3, "exclude each other"),
        ("out=a,b", None, "with an option of task"),
    ],
)
def test_a_bad_sweep_is_refused(text: str, seeds: int | None, said: str) -> None:
    with pytest.raises(LocaterError) as error:
        parse_sweep([text], seeds)
    assert said in str(error.value)


# The command


def options(folder: Path) -> list[str]:
    held = plan(folder)
    return [
        "--corpus",
        held.corpus[0],
        "--out",
        held.out,
        *"--layers 2 --width 16 --heads 2 --length 16 --batch 4 --steps 6".split(),
    ]


def test_the_command(run: Run, tmp_path: Path) -> None:
    found = run("train", *options(tmp_path), "--control", "locater(target=1)", "--json", tmp_path / "x.json")
    assert found.status == 0, found.err
    assert any(line.startswith("step 6/6  loss ") for line in found.err.splitlines())
    assert "report loss" in found.out
    assert f"Now: locater scan {tmp_path / 'run' / 'model'}" in found.out
    data = json.loads((tmp_path / "x.json").read_text())
    assert data["plan"]["control"] == ["locater(target=1)"]
    again = run("train", *options(tmp_path), "--control", "locater(target=1)", "--json", "-")
    assert json.loads(again.out) == data
    assert run("scan", tmp_path / "run" / "model").status == 0


@pytest.mark.parametrize(
    ("every", "said"),
    [
        (0, "no checkpoint was written (--checkpoint 0), so the same command starts from the first step"),
        (5, "no checkpoint was written, so the same command starts from the first step"),
        (2, "the same command goes on from {}/step-00000002"),
    ],
)
def test_an_interruption_says_what_is_kept(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, said: str
) -> None:
    before = loop.Training._after_step

    def interrupted(self: loop.Training, start: int) -> None:
        before(self, start)
        if self.step == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(loop.Training, "_after_step", interrupted)
    found = run("train", *options(tmp_path), "--checkpoint", every)
    assert found.status == 130
    assert found.err.splitlines()[-1] == f"locater: interrupted; {said.format(tmp_path / 'run')}"


def test_a_plan_from_a_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(plan(tmp_path, steps=3, rate=0.5).to_json())
    found = run("train", "--plan", tmp_path / "plan.json", "--rate", "0.001", "--json", "-")
    data = json.loads(found.out)
    assert (data["plan"]["steps"], data["plan"]["rate"]) == (3, 0.001)


def test_seeds_from_the_command(run: Run, tmp_path: Path) -> None:
    found = run("train", *options(tmp_path), "--seeds", "2", "--sweep", "rate=1e-3,1e30", "--warmup", "0")
    assert found.status == 2
    assert found.err.splitlines()[-1].startswith("locater: 2 of 4 runs diverged, first ")
    assert "rate=0.001,seed=1: report loss" in found.out
    assert len(read_results(tmp_path / "run" / RESULTS)) == 4


def test_seeds_begin_at_the_one_given(run: Run, tmp_path: Path) -> None:
    found = run("train", *options(tmp_path), "--seed", 3, "--seeds", 2)
    assert found.status == 0, found.err
    assert [line["plan"]["seed"] for line in read_results(tmp_path / "run" / RESULTS)] == [3, 4]


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--control", "nothing"], "no control 'nothing'"),
        (["--heads", "3"], "each must be a multiple of the next"),
        (["--corpus", "no/such/file"], "no/such/file: cannot be read"),
        (["--corpus", ""], "the name of a text is empty"),
        (["--length", "5000"], "split has"),
        (["--device", "abacus"], "device='abacus'"),
        (["--json", "no/such/folder/x.json"], "the folder no/such/folder does not exist"),
        (["--plan", "no-plan.json"], "no-plan.json"),
        (["--sweep", "x=1"], "write it as option=value"),
        (["--masked", "0.2"], "--masked does nothing with --task causal"),
        (["--patch", "4"], "--patch does nothing with --task causal"),
        (["--mlp", "none", "--hidden", "8"], "--hidden does nothing with --mlp none"),
        (["--sweep", "masked=0.1,0.2"], "--masked does nothing with --task causal"),
        (["--rate", "1", "--sweep", "rate=1,2"], "--rate and --sweep rate=... exclude each other"),
        (["--sweep", "decay=1,2", "--sweep", "decay=3"], "--sweep decay is given twice"),
        (
            ["--sweep", "kv_heads=1,3"],
            "--sweep kv_heads=3: width=16, heads=2, kv_heads=3: each must be a multiple of the next",
        ),
        (["--sweep", "control=locater(part=\"full\"),locater(part='full')"], "is the folder of two runs"),
        (["--sweep", f"control=none,locater(layers=[{'0, ' * 80}])"], "is too long a name for a folder"),
        (["--sweep", "control=none,surgery"], "--control surgery: Surgery would remove nothing"),
        (["--sweep", "attention=softmax,gated(per=3)"], "--attention gated(per=3): per=3: choose head or element"),
        (["--control", "locater(layers=[7])"], "--control locater(layers=[7]): layers=[7]: there are 2"),
        (["--attention", "gated(per=3)"], "--attention gated(per=3): per=3: choose head or element"),
    ],
)
def test_bad_usage_is_one_line(run: Run, tmp_path: Path, extra: list[str], said: str) -> None:
    found = run("train", *options(tmp_path), *extra)
    assert found.status == 2, found
    lines = found.err.splitlines()
    assert len(lines) == 1, found.err
    assert said in lines[0]
    assert found.out == ""


def test_a_folder_that_cannot_be_made(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    found = run("train", *options(tmp_path), "--out", tmp_path / "file" / "run")
    assert (found.status, len(found.err.splitlines())) == (2, 1)
    assert "file/run: cannot be made" in found.err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_live_line() -> None:
    event = {
        "step": 1,
        "steps": 3,
        "loss": 1.0,
        "perplexity": 2.718,
        "select_loss": 2.0,
        "entropy": None,
        "tokens_per_second": 10.0,
        "seconds_left": 2.0,
    }
    for stream, begins, count in ((Terminal(), "\r\x1b[K", 1), (io.StringIO(), "step", 2)):
        live = ProgressLine(stream)
        for step in (1, 2, 3):
            live({**event, "step": step})
        assert stream.getvalue().startswith(begins)
        assert stream.getvalue().count("\n") == count  # on a pipe the second comes too soon after the first
        assert stream.getvalue().count("step 3/3  loss 1.000  perplexity 2.718  select 2.000  10 tokens/s\n") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_equal_plans_give_equal_weights_on_a_gpu(tmp_path: Path, compiled: bool) -> None:
    """At a length where the gradients of fused attention are summed over several blocks of keys."""
    corpus(tmp_path, 20_000)
    settings = dict(device="cuda", length=512, batch=8, steps=8, width=64, heads=1, compile=compiled)
    first, second = (run(plan(tmp_path, **settings, out=str(tmp_path / name))) for name in ("first", "second"))
    assert weights(first) == weights(second)


@pytest.mark.gpu
def test_an_operation_that_is_not_deterministic_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """PyTorch refuses `kthvalue`; the run goes on with it and says so once."""
    forward = Transformer.forward

    def with_kthvalue(self: Transformer, *args: Any) -> torch.Tensor:
        return forward(self, *args) + 0 * torch.ones(8, device="cuda").kthvalue(2).values

    monkeypatch.setattr(Transformer, "forward", with_kthvalue)
    run(plan(tmp_path, device="cuda"))
    assert sum("equal plans will not give equal weights" in record.message for record in caplog.records) == 1


@pytest.mark.gpu
def test_passes_as_graphs_train_like_passes_queued_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled with CUDA graphs and without: the same bits, also of a run that was cut and went on."""
    first = plan(tmp_path, device="cuda", compile=True, out=str(tmp_path / "graphs"))
    graphs = run(first)
    with pytest.raises(Cut):
        run(replace(first, out=str(tmp_path / "cut")), on_progress=cut_at(6))
    again = run(replace(first, out=str(tmp_path / "cut")))
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, mode: plain(model))
    queued = run(replace(first, out=str(tmp_path / "queued")))
    assert weights(graphs) == weights(again) == weights(queued)
    assert graphs.report_loss == queued.report_loss


def test_which_runs_are_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls keep tensors of a pass, and gradients that are added up outlive it."""
    monkeypatch.setattr(torch, "compile", lambda model, mode: mode)
    one, cuda = plan(tmp_path, compile=True), torch.device("cuda")
    assert compile_model(one, torch.nn.Identity(), cuda) == "reduce-overhead"
    for changes in ({"accumulate": 2}, {"dropout": 0.1}, {"control": ("locater",)}):
        assert compile_model(replace(one, **changes), torch.nn.Identity(), cuda) == "default"
    assert compile_model(one, torch.nn.Identity(), torch.device("cpu")) == "default"
    assert isinstance(compile_model(replace(one, compile=False), torch.nn.Identity(), cuda), torch.nn.Identity)
