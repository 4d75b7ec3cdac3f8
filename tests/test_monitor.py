"""The monitor in a loop of one's own, in transformers' Trainer and in Lightning: what it logs, when it warns, what it leaves alone."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from locater import LocaterError
from locater.probing import Monitor, observe
from locater.report.sinks import read_run
from tests.families.decoders import GROUPED, make
from tests.parity import redraw, tokens

BATCH = tokens()


def llama() -> Any:
    model = make("Llama", **GROUPED)
    redraw(model, 0.3)
    return model


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def train(model: Any, monitor: Monitor, steps: int, rate: float = 1e-3, evaluate: bool = False) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    model.train()
    for _ in range(steps):
        loss = model(**BATCH, labels=BATCH["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if evaluate:
            model.eval()
            with torch.no_grad():
                model(input_ids=BATCH["input_ids"])
            model.train()
        monitor.after_step(loss=loss)


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    model = llama()
    with observe(model) as seen, torch.no_grad():
        model(**BATCH)
    monitor = Monitor(tmp_path / "run.jsonl", every=4).attach(model)
    train(model, monitor, 10)
    monitor.detach()
    monitor.detach()
    run = read_run(tmp_path / "run.jsonl")
    assert run.ended
    assert [step["step"] for step in run.steps] == [1, 5, 9]
    assert [layer["name"] for layer in run.header["layers"]] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    found = run.steps[0]["heads"]  # before any update
    assert found["entropy"][1][2] == pytest.approx(seen.rows[6].entropy, rel=1e-6)
    assert found["spread"][0][0] > 0
    assert all(step["loss"] > 0 for step in run.steps)
    assert sorted(x["step"] for x in records(tmp_path / "run.jsonl") if x["kind"] == "loss") == [2, 3, 4, 6, 7, 8, 10]
    assert not any("locater" in name for module in model.modules() for name in vars(module))


def test_training_is_not_changed(tmp_path: Path) -> None:
    found = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = llama()
        monitor: Any = Monitor(tmp_path / "run.jsonl", every=2).attach(model) if watched else _Deaf()
        train(model, monitor, 5)
        monitor.detach()
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class _Deaf:
    def after_step(self, **_: Any) -> None:
        return

    def detach(self) -> None:
        return


def test_evaluation_between_steps_is_not_part_of_them(tmp_path: Path) -> None:
    alone, between = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for path, evaluate in ((alone, False), (between, True)):
        torch.manual_seed(0)
        monitor = Monitor(path, every=1).attach(llama())
        train(monitor.observation.model, monitor, 3, evaluate=evaluate)  # type: ignore[union-attr]
        monitor.detach()
    assert [x["heads"] for x in read_run(alone).steps] == [x["heads"] for x in read_run(between).steps]


def test_unobserved_steps_read_nothing_from_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    monitor = Monitor(tmp_path / "run.jsonl", every=3).attach(model)
    train(model, monitor, 1)  # observed
    reads: list[str] = []
    for name in ("item", "tolist", "__float__", "__bool__", "cpu"):
        original = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda self, *a, _o=original, _n=name, **k: (reads.append(_n), _o(self, *a, **k))[1])
    monitor.after_step(loss=torch.tensor(1.0))
    monitor.after_step(loss=torch.tensor(1.0))
    assert not reads
    monitor.detach()


def test_one_warning_per_head_and_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = llama()
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[8:16] *= 3000  # head 1
    monitor = Monitor(tmp_path / "run.jsonl", every=1, warn_on="exploding, locked, max_logit>50").attach(model)
    with caplog.at_level(logging.WARNING, "locater"):
        train(model, monitor, 3)
    monitor.detach()
    warnings = read_run(tmp_path / "run.jsonl").warnings
    assert {(w["layer"], w["head"]) for w in warnings} == {(1, 1)}
    assert len(warnings) == len({w["flag"] for w in warnings})  # three steps, each reason once
    explode = next(w for w in warnings if w["flag"] == "exploding")
    assert explode["value"] > 200
    assert "model.layers.1.self_attn head 1: exploding (max_logit" in caplog.text
    assert next(w for w in warnings if w["flag"] == "max_logit>50")["threshold"] == 50


def test_weights_that_are_not_finite_are_told(tmp_path: Path) -> None:
    model = llama()
    monitor = Monitor(tmp_path / "run.jsonl", every=1).attach(model)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[0, 0] = torch.nan
    found = []
    model.train()
    model(**BATCH, labels=BATCH["input_ids"])
    found = monitor.after_step()
    monitor.detach()
    assert {(w["layer"], w["head"]) for w in found if w["flag"] == "nonfinite"} >= {(0, 0), (0, 1)}  # both queries of key head 0
    assert read_run(tmp_path / "run.jsonl").steps[0]["heads"]["entropy"][0][0] is None


def test_a_resumed_run_goes_on_in_its_file(tmp_path: Path) -> None:
    model = llama()
    for start in (0, 4):
        monitor = Monitor(tmp_path / "run.jsonl", every=2)
        monitor.step = start
        monitor.attach(model)
        train(model, monitor, 4)
        monitor.detach()
    assert [s["step"] for s in read_run(tmp_path / "run.jsonl").steps] == [1, 3, 5, 7]


def test_misuse_is_told(tmp_path: Path) -> None:
    with pytest.raises(LocaterError, match="every=0"):
        Monitor(every=0)
    with pytest.raises(LocaterError, match="no column 'entropi'"):
        Monitor(warn_on="entropi<1")
    with pytest.raises(LocaterError, match="not attached"):
        Monitor().after_step()
    monitor = Monitor(tmp_path / "run.jsonl").attach(llama())
    with pytest.raises(LocaterError, match="attached already"):
        monitor.attach(llama())
    monitor.detach()


# Trainers


class Words(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        ids = torch.randint(3, 64, (8,), generator=torch.Generator().manual_seed(at))
        return {"input_ids": ids, "labels": ids}


def test_in_transformers_trainer(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    settings = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=2, num_train_epochs=1, logging_steps=1,
        eval_strategy="steps", eval_steps=2, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    model = llama()
    Trainer(model, settings, train_dataset=Words(), eval_dataset=Words(), callbacks=[Monitor(every=2)]).train()
    run = read_run(tmp_path / "locater.jsonl")
    assert run.ended
    assert [s["step"] for s in run.steps] == [1, 3, 5]
    assert len(run.losses) == 6
    assert not any("locater" in name for module in model.modules() for name in vars(module))


def test_in_lightning(tmp_path: Path) -> None:
    import lightning

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama()

        def training_step(self, batch: Any, at: int) -> Tensor:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    trainer = lightning.Trainer(
        max_epochs=1, accumulate_grad_batches=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, callbacks=[Monitor(every=2)],
    )  # fmt: skip
    trainer.fit(Lit(), torch.utils.data.DataLoader(Words(), batch_size=2))
    run = read_run(tmp_path / "locater.jsonl")
    assert run.ended
    assert [s["step"] for s in run.steps] == [1, 3, 5]
    assert run.header["layers"][0]["name"].endswith("layers.0.self_attn")
