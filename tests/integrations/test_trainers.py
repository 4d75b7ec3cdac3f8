"""Controls in the real trainers against a loop written by hand: the same weights after an epoch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from locater import LocaterError, Monitor
from locater.control.locater import LocAteR
from locater.integrations import hf
from locater.runs.record_sinks import read_run
from tests.families.decoders import GROUPED, SHAPE, make
from tests.parity import redraw
from tests.processes import ranks

RATE, SIZE, COUNT = 0.5, 2, 14  # 7 micro-batches: the last group is short


def llama() -> Any:
    model = make("Llama", **GROUPED)
    redraw(model, 0.3)
    return model


def post_norm() -> Any:
    """No norm in front of its first layer."""
    model = make("OPT", **SHAPE, word_embed_proj_dim=32, ffn_dim=48, dropout=0.0, do_layer_norm_before=False)
    redraw(model, 0.3)
    return model


class Words(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        ids = torch.randint(3, 64, (8,), generator=torch.Generator().manual_seed(at))
        return {"input_ids": ids, "labels": ids}


class Counting(LocAteR):
    """Knows how often it was told of a step."""

    steps = 0

    def after_step(self) -> None:
        super().after_step()
        self.steps += 1


def by_hand(
    model: Any, accumulate: int, clip: float | None, whole_groups: bool = False, form: Any = "effective"
) -> Any:
    """SGD with the penalty counted once per optimizer step. Lightning divides a short last group by the full size."""
    control = LocAteR(shrink=0.05, hold=0.05, form=form).attach(model.train())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    data = Words()
    batches = [[data[i] for i in range(at, min(at + SIZE, COUNT))] for at in range(0, COUNT, SIZE)]
    for start in range(0, len(batches), accumulate):
        group = batches[start : start + accumulate]
        for rows in group:
            batch = {k: torch.stack([row[k] for row in rows]) for k in rows[0]}
            loss = model(**batch).loss / (accumulate if whole_groups else len(group))
            loss.backward()
        control.loss().backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        control.after_step()
    return model


def furthest(a: Any, b: Any) -> float:
    return max(
        float((p - q).abs().max()) for p, q in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize(
    ("accumulate", "clip", "form", "built"),
    [
        *((n, clip, "effective", llama) for n in (1, 2, 3) for clip in (None, 0.5)),
        (1, 0.5, "measured", llama),
        (1, 0.5, "effective", post_norm),
    ],
)
def test_transformers_trainer(tmp_path: Path, accumulate: int, clip: float | None, form: Any, built: Any) -> None:
    from transformers import Trainer, TrainingArguments

    start = built()
    settings = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=SIZE, gradient_accumulation_steps=accumulate, num_train_epochs=1,
        max_grad_norm=clip or 0.0, learning_rate=RATE, lr_scheduler_type="constant", optim="sgd", report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True, logging_steps=1, remove_unused_columns=False,
    )  # fmt: skip
    model = copy.deepcopy(start)

    class InOrder(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *args: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    trainer = InOrder(model, settings, train_dataset=Words())
    control = Counting(shrink=0.05, hold=0.05, form=form)
    hf.attach(trainer, control)
    trainer.train()
    assert control.steps == -(-COUNT // SIZE // accumulate)
    assert any("penalty" in entry for entry in trainer.state.log_history)
    plain = copy.deepcopy(start)
    assert furthest(model, by_hand(plain, accumulate, clip, form=form)) < 2e-6
    assert furthest(start, model) > 1e-3
    hf.detach(trainer)
    hf.detach(trainer)
    assert "compute_loss" not in vars(trainer)


def test_misuse_of_the_trainer_is_told(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    trainer = Trainer(llama(), TrainingArguments(str(tmp_path), report_to=[], use_cpu=True))
    hf.attach(trainer, [LocAteR()])
    with pytest.raises(LocaterError, match="already has controls"):
        hf.attach(trainer, [LocAteR()])
    with pytest.raises(LocaterError, match=r"is not a transformers\.Trainer"):
        hf.attach(object(), [LocAteR()])


@pytest.mark.parametrize(
    ("accumulate", "clip", "form", "built"),
    [
        *((n, clip, "effective", llama) for n in (1, 2) for clip in (None, 0.5)),
        (2, 0.5, "measured", llama),
        (2, 0.5, "effective", post_norm),
    ],
)
def test_lightning(tmp_path: Path, accumulate: int, clip: float | None, form: Any, built: Any) -> None:
    import lightning

    from locater.integrations.lightning import ControlCallback

    start = built()

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = copy.deepcopy(start)

        def training_step(self, batch: Any, at: int) -> Tensor:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=RATE)

    control = Counting(shrink=0.05, hold=0.05, form=form)
    trainer = lightning.Trainer(
        max_epochs=1, accumulate_grad_batches=accumulate, gradient_clip_val=clip, accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        callbacks=[ControlCallback(control)],
    )  # fmt: skip
    lit = Lit()
    trainer.fit(lit, torch.utils.data.DataLoader(Words(), batch_size=SIZE))
    assert control.steps == -(-COUNT // SIZE // accumulate)
    plain = by_hand(copy.deepcopy(start), accumulate, clip, whole_groups=True, form=form)
    assert furthest(lit.model, plain) < 2e-6
    assert control.model is None


class Still:
    """Made on first use, since Lightning is imported late: a module whose own loss moves nothing, so that only the
    penalty does.
    """

    def __new__(cls, start: Any, fused: bool = False) -> Any:
        import lightning

        class Lit(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = copy.deepcopy(start)

            def training_step(self, batch: Any, at: int) -> Tensor:
                return sum((p * 0).sum() for p in self.parameters())  # type: ignore[return-value]

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=RATE, fused=fused)

        return Lit()


def lightning_fit(
    folder: Path, module: Any, callback: Any, steps: int, ckpt_path: Path | None = None, **more: Any
) -> Any:
    import lightning

    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, callbacks=[callback], **more,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(Words(), batch_size=SIZE), ckpt_path=ckpt_path, weights_only=False)
    return trainer


@pytest.mark.parametrize("fused", [False, True])
def test_lightning_in_half_precision_counts_the_penalty_once(tmp_path: Path, fused: bool) -> None:
    """Gradients are unscaled before the callback is asked, unless the optimizer does that itself."""
    from lightning.pytorch.plugins import MixedPrecision

    from locater.integrations.lightning import ControlCallback

    start = llama()
    lit, expected = Still(start, fused), copy.deepcopy(start)
    callback = ControlCallback(LocAteR(shrink=0.05, hold=0.05))
    lightning_fit(tmp_path, lit, callback, 1, plugins=[MixedPrecision("16-mixed", "cpu")])
    LocAteR(shrink=0.05, hold=0.05).attach(expected).loss().backward()
    torch.optim.SGD([p for p in expected.parameters() if p.grad is not None], lr=RATE).step()
    assert furthest(lit.model, expected) < 1e-6 < furthest(start, expected)


class Broken(LocAteR):
    """Its penalty is not a number."""

    def loss(self) -> Tensor:
        return super().loss() * float("nan")


def test_a_penalty_that_is_no_number_does_not_get_past_the_scaler(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from lightning.pytorch.plugins import MixedPrecision

    from locater.integrations.lightning import ControlCallback

    start = llama()
    lit = Still(start)
    lightning_fit(tmp_path, lit, ControlCallback(Broken()), 2, plugins=[MixedPrecision("16-mixed", "cpu")])
    assert furthest(lit.model, start) == 0
    assert [r.message for r in caplog.records if "penalty is nan" in r.message] == [
        "step 0: the penalty is nan: left out of the step"
    ]


def test_lightning_refuses_a_penalty_of_the_forward_pass(tmp_path: Path) -> None:
    from locater.control import EntropyPenalty
    from locater.integrations.lightning import ControlCallback

    with pytest.raises(LocaterError, match=r"EntropyPenalty\(floor=0.2.*control.loss\(\)"):
        lightning_fit(tmp_path, Still(llama()), ControlCallback([LocAteR(), EntropyPenalty(floor=0.2)]), 1)


def test_lightning_counts_the_steps_of_every_fit(tmp_path: Path) -> None:
    from locater.integrations.lightning import ControlCallback

    control = Counting()
    callback = ControlCallback(control)
    for _ in range(2):
        lightning_fit(tmp_path, Still(llama()), callback, 3)
    assert control.steps == 6


def test_lightning_resumed_counts_no_step_twice(tmp_path: Path) -> None:
    """Under accumulation the first micro-batch of the second part ends no optimizer step."""
    from locater.integrations.lightning import ControlCallback

    lightning_fit(tmp_path, Still(llama()), ControlCallback(LocAteR()), 2).save_checkpoint(tmp_path / "two.ckpt")
    control = Counting()
    lightning_fit(
        tmp_path,
        Still(llama()),
        ControlCallback(control),
        4,
        accumulate_grad_batches=2,
        ckpt_path=tmp_path / "two.ckpt",
    )
    assert control.steps == 2


def train_one_of_two(rank: int, folder: Path) -> None:
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    AcceleratorState._reset_state(reset_partial_state=True)  # an earlier test may have trained in one process
    settings = TrainingArguments(
        str(folder),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        max_grad_norm=0.5,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="sgd",
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
        remove_unused_columns=False,
        ddp_backend="gloo",
    )
    model = llama()
    trainer = InOrder(model, settings, train_dataset=Words(), callbacks=[Monitor(every=3)])
    hf.attach(trainer, LocAteR(shrink=0.05, hold=0.05))
    trainer.train()
    assert trainer.args.world_size == 2
    if rank == 0:
        torch.save(model.state_dict(), folder / "two.pt")


def test_transformers_trainer_in_two_processes(tmp_path: Path) -> None:
    """Two processes of one sequence each see the batches that one process of two sees."""
    ranks(lambda rank: train_one_of_two(rank, tmp_path), tmp_path)
    assert len(list(tmp_path.rglob("*.jsonl"))) == 1  # the first process writes
    log = read_run(tmp_path / "locater.jsonl")
    assert [step for step, _ in log.losses] == [1, 2, 3, 4]
    assert ([record["step"] for record in log.steps], log.resumed, log.ended) == ([1, 4], (), True)
    model = llama()
    model.load_state_dict(torch.load(tmp_path / "two.pt"))
    assert furthest(model, by_hand(llama(), 2, 0.5)) < 2e-6
