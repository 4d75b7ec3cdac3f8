"""A run's log tells the truth: losses are the trainer's own, survive a kill, and each run has a file that can be
read.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from locater import LocaterError, Monitor
from locater.findings import QUANTITIES, explain, parse_conditions
from locater.integrations.monitor_for_trainers import find_trainer
from locater.runs.head_table import COLUMNS, SPECTRUM
from locater.runs.record_sinks import JsonlSink, read_run
from tests.families.decoders import GROUPED, make
from tests.parity import redraw
from tests.processes import python


def llama(**more: Any) -> Any:
    model = make("Llama", **{**GROUPED, **more})
    redraw(model, 0.3)
    return model


class Words(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 14

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        ids = torch.randint(3, 64, (8,), generator=torch.Generator().manual_seed(at))
        return {"input_ids": ids, "labels": ids}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def encoder(layers: int = 1, width: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(width, 2, 16, batch_first=True), layers, enable_nested_tensor=False
    )


# transformers.Trainer


def trainer_for(folder: Path, *callbacks: Any, model: Any = None, **settings: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    usual = dict(
        per_device_train_batch_size=2,
        num_train_epochs=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    data = {"train_dataset": Words(), "eval_dataset": Words()}
    return Trainer(
        model or llama(), TrainingArguments(str(folder), **{**usual, **settings}), callbacks=list(callbacks), **data
    )


def trained(folder: Path, **settings: Any) -> tuple[list[dict[str, Any]], Any]:
    """What the trainer logged while it trained, and the run that the monitor wrote."""
    trainer = trainer_for(folder, Monitor(every=3), **settings)
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry], read_run(folder / "locater.jsonl")


@pytest.mark.parametrize("accumulate", [1, 3])  # 7 micro-batches: the last group of 3 is short
def test_losses_are_those_of_the_trainer(tmp_path: Path, accumulate: int) -> None:
    settings = {"gradient_accumulation_steps": accumulate, "eval_strategy": "steps", "eval_steps": 1}
    logs, run = trained(tmp_path / "each", logging_steps=1, **settings)
    _, rare = trained(tmp_path / "rare", logging_steps=500, **settings)
    assert [step for step, _ in run.losses] == [entry["step"] for entry in logs]
    assert [loss for _, loss in run.losses] == pytest.approx([entry["loss"] for entry in logs], rel=1e-6)
    assert rare.losses == run.losses  # each step, however seldom the trainer logs
    assert dict(run.scalars["grad_norm"]) == {entry["step"]: pytest.approx(entry["grad_norm"]) for entry in logs}
    rates = {entry["step"]: pytest.approx(entry["learning_rate"]) for entry in logs}
    assert dict(run.scalars["rate"]) == {record["step"]: rates[record["step"]] for record in run.steps}
    assert all("null" not in (tmp_path / name / "locater.jsonl").read_text() for name in ("each", "rare"))


def test_a_loss_that_is_not_a_number_is_told_where_the_trainer_hides_it(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    class Breaks(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **held: Any) -> None:
            if state.global_step == 4:
                with torch.no_grad():
                    model.lm_head.weight.fill_(torch.nan)

    trainer = trainer_for(tmp_path, Monitor(every=2), Breaks(), logging_steps=1)
    trainer.train()
    losses = dict(read_run(tmp_path / "locater.jsonl").losses)
    assert [step for step, loss in losses.items() if math.isnan(loss)] == [5, 6, 7]
    assert all(math.isfinite(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry)
    assert [x["loss"] for x in lines(tmp_path / "locater.jsonl") if x.get("step") == 6 and "loss" in x] == ["NaN"]
    assert "training_step" not in vars(trainer)  # nothing is left on it


def test_a_trainer_that_cannot_be_listened_to_leaves_its_logged_means(tmp_path: Path) -> None:
    monitor, model = Monitor(every=2), llama().train()
    args, state = SimpleNamespace(output_dir=str(tmp_path), n_gpu=1), SimpleNamespace(global_step=0)
    monitor.on_train_begin(args, state, None, model=model)
    for step in range(1, 5):
        state.global_step = step
        model(**{name: x[None] for name, x in Words()[0].items()})
        monitor.on_step_end(args, state, None)
        if step == 3:
            monitor.on_log(args, state, None, logs={"loss": 2.5, "grad_norm": 1.0})
            monitor.on_log(args, state, None, logs={"eval_loss": 9.0})
    monitor.on_log(args, state, None, logs={"train_loss": 7.0})
    monitor.on_train_end(args, state, None)
    assert read_run(tmp_path).losses == [(3, 2.5)]
    assert [x["over"] for x in lines(tmp_path / "locater.jsonl") if x["kind"] == "loss"] == [3]
    assert "null" not in (tmp_path / "locater.jsonl").read_text()


def test_a_trainer_is_found_and_its_class_restored(tmp_path: Path) -> None:
    """Callbacks are not handed their trainer. The one with a `training_step` of its own is listened to as any other; one
    that takes its batches from elsewhere leaves its logged means.
    """
    from transformers import Trainer

    class OwnStep(Trainer):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            loss = 2 * model(**inputs).loss
            loss.backward()
            return loss.detach()

    class OwnBatches(Trainer):  # type: ignore[misc]
        def get_batch_samples(self, batches: Any, count: int, device: Any) -> Any:
            return [next(batches) for _ in range(count)], None

    before = Trainer.get_batch_samples
    for kind, steps in ((OwnStep, [*range(1, 8)]), (OwnBatches, [7])):
        trainer = trainer_for(tmp_path / kind.__name__, Monitor(every=3), logging_steps=7)
        trainer.__class__ = kind
        trainer.train()
        assert [step for step, _ in read_run(tmp_path / kind.__name__ / "locater.jsonl").losses] == steps
        assert Trainer.get_batch_samples is before
    assert "get_batch_samples" in vars(OwnBatches)


@pytest.mark.parametrize("first", [0, 1])
def test_searches_for_trainers_may_end_in_any_order(first: int) -> None:
    from transformers import Trainer

    before = Trainer.get_batch_samples
    searches = [find_trainer(object(), lambda trainer: None) for _ in range(2)]
    assert Trainer.get_batch_samples is not before
    for at in (first, 1 - first):
        searches[at]()
    assert Trainer.get_batch_samples is before


def test_a_run_resumed_from_a_checkpoint_goes_on_in_its_log(tmp_path: Path) -> None:
    whole = trainer_for(tmp_path, Monitor(every=2), logging_steps=1, save_strategy="steps", save_steps=3)
    whole.train()
    before = read_run(tmp_path / "locater.jsonl")
    again = trainer_for(tmp_path, Monitor(every=2), logging_steps=1)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    run = read_run(tmp_path / "locater.jsonl")
    assert (run.resumed, run.ended) == ((4,), True)
    assert [step for step, _ in run.losses] == [1, 2, 3, 4, 5, 6, 7]
    assert [loss for _, loss in run.losses] == pytest.approx([loss for _, loss in before.losses], rel=1e-5)


# lightning.Trainer


def test_losses_in_lightning_are_means_over_micro_batches(tmp_path: Path) -> None:
    import lightning

    start, said, norms = llama(), [], []

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = start

        def training_step(self, batch: Any, at: int) -> Tensor:
            loss = self.model(**batch).loss
            said.append(float(loss.detach()))
            return loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norms.append(
                float(torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None]))
            )

        def validation_step(self, batch: Any, at: int) -> Tensor:
            return 100 + self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    loader = torch.utils.data.DataLoader(Words(), batch_size=2)
    trainer = lightning.Trainer(
        max_epochs=1, accumulate_grad_batches=3, gradient_clip_val=0.5, accelerator="cpu", logger=False, enable_checkpointing=False,
        val_check_interval=2, enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        callbacks=[Monitor(every=2)],
    )  # fmt: skip
    trainer.fit(Lit(), loader, loader)
    run = read_run(tmp_path / "locater.jsonl")
    means = [sum(said[:3]) / 3, sum(said[3:6]) / 3, said[6]]  # 7 micro-batches: the last step has one
    assert [loss for _, loss in run.losses] == pytest.approx(means, rel=1e-5)
    assert dict(run.scalars["rate"]) == {1: pytest.approx(0.1), 3: pytest.approx(0.1 / 3)}
    assert dict(run.scalars["grad_norm"]) == {
        1: pytest.approx(norms[0], rel=1e-5),
        3: pytest.approx(norms[2], rel=1e-5),
    }
    assert "null" not in (tmp_path / "locater.jsonl").read_text()


# What is not known, and what is not a number


def test_a_loop_that_hands_over_nothing_writes_no_null(tmp_path: Path) -> None:
    monitor = Monitor(tmp_path / "run.jsonl", every=2, spectrum=False).attach(model := encoder().train())
    for loss in (None, None, math.nan, torch.tensor(math.inf)):
        model(torch.randn(1, 3, 16))
        monitor.after_step(loss=loss, grad_norm=-math.inf)
    monitor.detach()
    held = lines(tmp_path / "run.jsonl")
    assert [x.get("loss", "absent") for x in held[1:-1]] == ["absent", "NaN", "Infinity"]
    assert held[1]["scalars"] == {"grad_norm": "-Infinity"}
    run = read_run(tmp_path / "run.jsonl")
    assert [step for step, _ in run.losses] == [3, 4]
    assert math.isnan(run.losses[0][1])
    assert run.losses[1][1] == math.inf
    assert json.loads(run.to_json(), parse_constant=pytest.fail)["losses"] == [[3, None], [4, None]]


# A file that can be read


def attached(model: nn.Module, folder: Path, *sinks: Path, steps: int = 1, start: int = 0, **options: Any) -> None:
    monitor = Monitor(*sinks, every=1, **{"spectrum": False, **options})
    monitor.step = start
    monitor.attach(model.train(), folder)
    for _ in range(steps):
        model(torch.randn(1, 3, model.layers[0].linear1.in_features))  # type: ignore[index,union-attr]
        monitor.after_step(loss=1.0)
    monitor.detach()


def test_a_log_that_was_named_is_not_mixed_with_another_model(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    attached(encoder(1), tmp_path, path)
    before = path.read_bytes()
    with pytest.raises(
        LocaterError, match=r"run\.jsonl: holds a run of TransformerEncoder with 1 layer of 2 heads, and this one has"
    ) as told:
        attached(encoder(2), tmp_path, path)
    assert len(str(told.value).splitlines()) == 1
    assert path.read_bytes() == before
    attached(encoder(1), tmp_path, path, start=1)  # the same shape goes on
    assert [record["step"] for record in read_run(path).steps] == [1, 2]
    with pytest.raises(LocaterError, match="2 layers of 2 heads"):
        JsonlSink(path).write(
            {"kind": "run", "source": "x", "layers": [{"layer": i, "heads": 2, "name": str(i)} for i in (0, 1)]}
        )


def test_another_model_in_a_folder_gets_a_log_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "locater"):
        for layers in (1, 2, 1, 2, 3):
            attached(encoder(layers), tmp_path, start=layers)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["locater-2.jsonl", "locater-3.jsonl", "locater.jsonl"]
    shapes = {path.name: len(read_run(path).header["layers"]) for path in tmp_path.iterdir()}
    assert shapes == {"locater.jsonl": 1, "locater-2.jsonl": 2, "locater-3.jsonl": 3}
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 3
    assert "locater.jsonl has a run of another model: this run is written to" in told[0]
    caplog.clear()
    assert len(read_run(tmp_path).header["layers"]) == 3
    assert "locater-3.jsonl" in caplog.text
    os.utime(tmp_path / "locater.jsonl", (2**32, 2**32))
    assert len(read_run(tmp_path).header["layers"]) == 1, "the newest, whatever its name"


def test_a_header_that_a_crash_tore_does_not_close_the_log(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"kind":"run","sch')
    for start in (0, 1, 2):
        attached(encoder(), tmp_path, path, start=start)
    assert [record["step"] for record in read_run(path).steps] == [1, 2, 3]
    path.write_text("a note\n")
    with pytest.raises(LocaterError, match="is not a run log"):
        JsonlSink(path)


def test_a_log_of_losses_that_is_refused_stays_as_it_was(tmp_path: Path) -> None:
    from locater_lab.train import Shape, Transformer
    from locater_lab.train.loop import LossLog

    attached(encoder(1), tmp_path, tmp_path / "run.jsonl")
    before, losses = (tmp_path / "run.jsonl").read_bytes(), LossLog(tmp_path / "run.jsonl", 1)
    with pytest.raises(LocaterError, match="holds a run of TransformerEncoder"):
        losses.attach(Transformer(Shape(width=16, heads=2, kv_heads=2, layers=1, hidden=24)))
    losses.detach()  # as every run does at its end
    assert (tmp_path / "run.jsonl").read_bytes() == before


# What trainers tell


def under_way(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Monitor:
    """A monitor with losses that have not arrived from the device."""
    monkeypatch.setattr("locater.runs.run_monitor._has_arrived", lambda *held: False)
    monitor = Monitor(folder / "run.jsonl", every=100, spectrum=False).attach(model := encoder().train())
    for step in range(4):
        model(torch.randn(1, 3, 16))
        monitor.after_step(loss=float(step))
    assert len(read_run(folder / "run.jsonl").losses) == 1
    return monitor


def test_a_run_that_fails_keeps_the_losses_that_were_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    under_way(tmp_path, monkeypatch).on_exception(SimpleNamespace(), nn.Module(), RuntimeError())
    assert [step for step, _ in read_run(tmp_path / "run.jsonl").losses] == [1, 2, 3, 4]


def test_a_device_that_is_lost_does_not_keep_the_monitor_attached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: Any) -> Any:
        raise RuntimeError("device lost")

    monitor = under_way(tmp_path, monkeypatch)
    monkeypatch.setattr("locater.runs.run_monitor.PendingLosses.take", lost)
    with pytest.raises(RuntimeError, match="device lost"):
        monitor.detach()
    assert not monitor.attached
    monkeypatch.undo()
    (tmp_path / "other").mkdir()
    monitor = under_way(tmp_path / "other", monkeypatch)
    monkeypatch.setattr("locater.runs.run_monitor.PendingLosses.take", lost)
    monitor.on_exception(SimpleNamespace(), nn.Module(), RuntimeError())  # the exception on its way is not replaced
    assert not monitor.attached


class Rates(dict[str, Any]):
    """A group of parameters that counts how often its rate was read, which waits for a device that holds it."""

    reads = 0

    def __getitem__(self, name: str) -> Any:
        self.reads += name == "lr"
        return super().__getitem__(name)


def test_the_rate_is_read_where_it_is_written(tmp_path: Path) -> None:
    monitor = Monitor(tmp_path / "run.jsonl", every=4, spectrum=False).attach(model := encoder().train())
    group = Rates(lr=torch.tensor(0.5))
    for at in range(1, 7):
        model(torch.randn(1, 3, 16))
        monitor.on_optimizer_step(None, None, None, optimizer=SimpleNamespace(param_groups=[group]))
        monitor.on_step_end(None, SimpleNamespace(global_step=at), None)
    monitor.detach()
    assert read_run(tmp_path / "run.jsonl").scalars["rate"] == [(1, 0.5), (5, 0.5)]
    assert group.reads == 2


def test_a_loss_that_is_written_over_is_kept(tmp_path: Path) -> None:
    """Graphs of CUDA put the loss of every micro-batch into the same memory."""
    monitor = Monitor(tmp_path / "run.jsonl", every=1, spectrum=False).attach(encoder().train())
    loss = torch.tensor(1.0)
    for value in (1.0, 10.0):
        loss.fill_(value)
        monitor._add_loss(loss)
    loss.fill_(100.0)
    monitor.on_step_end(None, SimpleNamespace(global_step=1), None)
    monitor.detach()
    assert read_run(tmp_path / "run.jsonl").losses == [(1, 11.0)]


# Kills, full disks, folders that vanish

LOOP = """
import os, sys, torch
from locater import Monitor
model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True), 1, enable_nested_tensor=False)
monitor = Monitor(sys.argv[1], every=10**6).attach(model.train())
print(os.getpid(), flush=True)
for step in range(1, 10**6):
    loss = model(torch.randn(1, 3, 16)).square().mean()
    monitor.after_step(loss=loss)
    print(step, flush=True)
"""


def test_a_killed_run_loses_no_step_that_was_done(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with subprocess.Popen([python(), "-c", LOOP, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        number = int(process.stdout.readline())
        for _ in range(40):
            process.stdout.readline()
        os.kill(number, signal.SIGKILL)
        done = [line for line in process.stdout.read().splitlines() if line]
        assert process.wait(30) == -signal.SIGKILL
    last = max(40, *map(int, done[:-1])) if done[:-1] else 40  # the last line may be torn
    run = read_run(path)
    assert [step for step, _ in run.losses][:last] == list(range(1, last + 1))
    assert not run.ended


def test_a_folder_that_vanishes_costs_records_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitor = Monitor(every=2, spectrum=False).attach(model := encoder().train(), tmp_path / "run")
    with caplog.at_level(logging.WARNING, "locater"):
        for step in range(6):
            if step == 2:
                shutil.rmtree(tmp_path / "run")
            model(torch.randn(1, 3, 16))
            monitor.after_step(loss=1.0)
    monitor.detach()
    (told,) = [record.getMessage() for record in caplog.records if record.name == "locater"]
    assert "the run continues without records" in told
    assert "was deleted while the run was writing to it" in told


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full is Linux's")
def test_a_disk_that_is_full_costs_records_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "run.jsonl"
    path.symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING, "locater"):
        attached(encoder(), tmp_path, path, steps=4)
    (told,) = [record.getMessage() for record in caplog.records]
    assert "No space left on device" in told


def test_a_header_that_found_no_space_comes_before_the_next_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, full = os.fstat, [True]

    def fstat(descriptor: int) -> os.stat_result:
        if full.pop() if full else False:
            raise OSError(28, "No space left on device")
        return real(descriptor)

    monkeypatch.setattr("locater.runs.record_sinks.os.fstat", fstat)
    attached(encoder(), tmp_path, tmp_path / "run.jsonl", steps=2)
    assert [record["step"] for record in read_run(tmp_path / "run.jsonl").steps] == [1, 2]


# What a warning says


@pytest.mark.parametrize("column", [*COLUMNS, *SPECTRUM])
def test_every_quantity_says_what_crossing_it_means(column: str) -> None:
    for sign, verb in ((">", "exceeds"), (">=", "has reached"), ("<", "is below"), ("<=", "is down to")):
        (condition,) = parse_conditions(f"{column}{sign}5", {column}, [])
        text = explain(condition, 5.265)
        quantity = QUANTITIES[column]
        assert text.startswith(f"{quantity.label} 5.3 {verb} 5: ")
        meaning, remedy = quantity.above if ">" in sign else quantity.below
        assert text.endswith(f": {meaning}; {remedy.words()}")
    (condition,) = parse_conditions(f"{column}>5", {column}, [])
    assert f"{QUANTITIES[column].label} 5.0004 exceeds 5: " in explain(condition, 5.0004)


def test_a_warning_says_what_it_means_and_what_to_do(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = encoder()
    with torch.no_grad():
        model.layers[0].self_attn.in_proj_weight *= 20  # type: ignore[union-attr,index]
    with caplog.at_level(logging.WARNING, "locater"):
        attached(model, tmp_path, tmp_path / "run.jsonl", spectrum=True, warn_on="spread>5")
    first = read_run(tmp_path / "run.jsonl").warnings[0]
    assert first["flag"] == "spread>5"
    said = f"logit spread {first['value']:.2g} exceeds 5: attention is close to one-hot"
    assert f"head 0: {said}; lower the learning rate, or attach locater.SigmaReparam()" in first["message"]
    assert "step 1: logit spread up to" in caplog.text
