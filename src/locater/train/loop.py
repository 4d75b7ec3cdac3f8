"""The loop: forward, backward, clip, check, step. Everything else is read here and done elsewhere."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from locater.attention.text import parse_attention
from locater.control.base import Controls
from locater.errors import LocaterError
from locater.models.transformer import Transformer
from locater.monitor import Monitor
from locater.observing import observe
from locater.train import checkpoint
from locater.train.batches import Batch, Data
from locater.train.controls import attach, check_controls, restore
from locater.train.data import open_data
from locater.train.health import LastSeen, Losses, culprit, why_unread
from locater.train.measured import SEQUENCES, measure
from locater.train.plan import Plan
from locater.train.randomness import own_randomness, random_state, restore_random
from locater.train.recipe import device_of, optimizer_for, rate_at, shape_of
from locater.train.result import Result
from locater.train.run_folder import LOG, RESULT, claimed, run_folder
from locater.train.text_data import TextData

logger = logging.getLogger("locater")
WINDOWS = 256  # of the select split, during training; the end is measured on all
Tell = Callable[[dict[str, Any]], None]


class DivergedError(LocaterError):
    """The loss or its gradient is no longer a number."""


def run(plan: Plan, tell: Tell = lambda event: None) -> Result:
    """Train as `plan` says, from the last checkpoint in its folder where there is one; a run that is finished is read
    back.

    `tell` is handed a dictionary each `plan.log` steps: step, loss, perplexity, select_loss, entropy,
    tokens_per_second, seconds_left.
    """
    check_plan(plan)
    device = device_of(plan.device)
    folder = run_folder(plan)
    if (folder / RESULT).is_file():
        return Result.load(folder / RESULT)
    with own_randomness(plan.seed, device):
        training = Training.begin(plan, folder, device, tell)
        try:
            with claimed(plan):  # nothing is written before data, model and controls stand
                training.go_on()
                training.train()
                return training.finish()
        finally:
            training.end()


def check_plan(plan: Plan) -> None:
    """Refuse controls that are none, or that do not go with the attention; the rest of a plan was checked when it was
    made.
    """
    check_controls(plan.control, [layer.name for layer in parse_attention(plan.attention, plan.layers)])


@dataclass
class Training:
    """A run under way."""

    plan: Plan
    folder: Path
    device: torch.device
    tell: Tell
    data: Data
    model: Transformer
    forward: Callable[..., Tensor]  # the model, compiled if asked for
    controls: Controls
    learned: list[nn.Parameter]  # of the model, and of its controls
    optimizer: torch.optim.Optimizer
    monitor: Monitor | Losses | None
    seen: LastSeen
    step: int = 0
    loss: float = math.nan
    history: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0  # of earlier parts of the run
    began: float = field(default_factory=time.monotonic)
    told: tuple[int, float] = (0, 0.0)  # step and time when something was last told

    @classmethod
    def begin(cls, plan: Plan, folder: Path, device: torch.device, tell: Tell) -> Training:
        data = open_data(plan, folder, device)
        model = Transformer(shape_of(plan, data), plan.scale).to(device)
        controls = attach(plan.control, model)
        learned = [p for p in (*model.parameters(), *controls.parameters()) if p.requires_grad]
        seen, monitor = LastSeen(), None
        try:
            if plan.observe:
                log, why = folder / LOG, why_unread(model)
                if why is not None:
                    logger.warning("%s: the run goes on, its heads not observed: %s", folder, why)
                monitor = Monitor(log, seen, every=plan.observe) if why is None else Losses(log, plan.observe)
            forward = torch.compile(model) if plan.compile else model
            optimizer = optimizer_for(plan, learned, device)
        except BaseException:
            controls.detach()
            raise
        return cls(plan, folder, device, tell, data, model, forward, controls, learned, optimizer, monitor, seen)

    def go_on(self) -> None:
        """From the last checkpoint in the folder, which is now this run's, or from nothing."""
        self._resume()
        if isinstance(self.data, TextData) and self.step == 0:
            self.data.keep_tokenizer(self.folder)
        if self.monitor is not None:
            self.monitor.step = self.step
            self.monitor.attach(self.model)

    def train(self) -> None:
        plan, start = self.plan, self.step
        self.began = time.monotonic()
        self.told = start, self.began
        self.model.train()
        batches = self._batches(self.step)
        while self.step < plan.steps:
            for group in self.optimizer.param_groups:
                group["lr"] = rate_at(plan, self.step)
            loss = self._backward(batches)
            norm = nn.utils.clip_grad_norm_(self.learned, plan.clip or math.inf)
            following = self._batches(self.step + 1)  # before the device is waited for
            self.loss = float(loss)
            if not math.isfinite(self.loss):
                raise DivergedError(self._failure(self.step + 1, f"the loss is {self.loss}", batches))
            grad_norm = float(norm)
            if not math.isfinite(grad_norm):
                raise DivergedError(self._failure(self.step + 1, f"the norm of the gradient is {grad_norm}", batches))
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.controls.after_step()
            self.step += 1
            if self.monitor is not None:
                rate = self.optimizer.param_groups[0]["lr"]
                self.monitor.after_step(loss=self.loss, step=self.step, grad_norm=grad_norm, rate=rate)
            batches = following
            self._after_step(start)

    def finish(self) -> Result:
        """The final weights, measured on both splits, on disk."""
        self.seconds += time.monotonic() - self.began
        if self.monitor is not None:
            self.monitor.detach()
        report, correct, entropies = self._reported()
        if not math.isfinite(report):  # the last step can still be one too far
            raise DivergedError(self._failure(self.step, f"the report loss is {report}", self._batches(self.step - 1)))
        facts, target = self.data.facts, checkpoint.save(self.folder, "model", self.model)
        per_byte = (
            facts["tokens"]["report"] / facts["bytes"]["report"] / math.log(2) if self.plan.task == "causal" else None
        )
        result = Result(
            self.plan, self.loss, self._evaluate("select")[0], report, sum(entropies) / len(entropies) if entropies else None,
            bits_per_byte=None if per_byte is None else report * per_byte,
            accuracy=correct if self.plan.task in ("image", "sort") else None,
            history=tuple(self.history), parameters=sum(p.numel() for p in self.model.parameters()),
            tokens=self.step * self._tokens, seconds=self.seconds, data=facts, model=str(target), measures=self._measured(),
        )  # fmt: skip
        result.save(self.folder / RESULT)
        return result

    def _reported(self) -> tuple[float, float, list[float]]:
        """Loss and accuracy on the report split, and the entropies of heads; none where attention has none."""
        if why_unread(self.model) is not None:
            return *self._evaluate("report"), []
        with observe(self.model) as seen:
            report, correct = self._evaluate("report")
        return report, correct, [row.entropy for row in seen.rows if row.entropy is not None]

    def _measured(self) -> dict[str, Any]:
        """Maps and stream on the first sequences of the report split."""
        inputs, _ = next(iter(self.data.windows("report", SEQUENCES)))
        with _evaluating(self.model):
            return measure(self.model, inputs)

    def end(self) -> None:
        """Take everything off, whatever happened."""
        self.controls.detach()
        if self.monitor is not None:
            self.monitor.detach()

    def _batches(self, step: int) -> list[Batch]:
        count = self.plan.accumulate
        return [self.data.batch(step * count + part) for part in range(count)] if step < self.plan.steps else []

    def _backward(self, batches: list[Batch]) -> Tensor:
        """The mean loss of the step, without what controls add; gradients are those of both."""
        total = torch.zeros((), device=self.device)
        for inputs, targets in batches:
            with self._precision():
                loss = self.forward(inputs, targets)
            ((loss + self.controls.loss()) / len(batches)).backward()
            total += loss.detach() / len(batches)
        return total

    def _after_step(self, start: int) -> None:
        plan, last = self.plan, self.step == self.plan.steps
        if plan.evaluate and self.step % plan.evaluate == 0:
            self.history.append((self.step, self._evaluate("select", WINDOWS)[0]))
        due = plan.checkpoint and self.step % plan.checkpoint == 0
        if (due or last) and not all(bool(p.isfinite().all()) for p in self.learned):
            raise DivergedError(self._failure(self.step, "the weights are not finite", self._batches(self.step - 1)))
        if due or (last and plan.checkpoint):
            checkpoint.save(self.folder, checkpoint.name_of(self.step), self.model, self._state())
            checkpoint.thin_out(self.folder)
        if self.step % plan.log == 0 or last or self.step == start + 1:
            self._say()

    def _say(self) -> None:
        step, since = self.told
        self.told = self.step, time.monotonic()
        # of the steps since the last time, so that compiling is soon forgotten
        pace = (self.told[1] - since) / (self.step - step)
        left = (self.plan.steps - self.step) * pace
        self.tell({
            "step": self.step, "steps": self.plan.steps, "loss": self.loss,
            "perplexity": None if self.plan.task == "image" else math.exp(min(self.loss, 700.0)),
            "select_loss": self.history[-1][1] if self.history else None, "entropy": self.seen.entropy,
            "tokens_per_second": self._tokens / pace, "seconds_left": left,
        })  # fmt: skip

    @property
    def _tokens(self) -> int:
        """In a step."""
        return self.plan.batch * self.plan.accumulate * self.model.shape.length

    def _precision(self) -> Any:
        half = self.plan.precision == "bfloat16" or (self.plan.precision == "auto" and self.device.type == "cuda")
        return torch.autocast(self.device.type, torch.bfloat16) if half else nullcontext()

    @torch.no_grad()
    def _evaluate(self, split: str, most: int | None = None) -> tuple[float, float]:
        """Mean loss over the targets of a split, and the share of them that the model puts first."""
        with _evaluating(self.model):
            total, right, count = 0.0, 0, 0
            for inputs, targets in self.data.windows(split, most):
                with self._precision():
                    logits = self.model(inputs).float().flatten(0, -2)
                flat, known = targets.flatten(), int((targets >= 0).sum())
                total += float(nn.functional.cross_entropy(logits, flat, reduction="sum"))
                right, count = right + int((logits.argmax(-1) == flat).sum()), count + known
        return total / count, right / count

    def _state(self) -> dict[str, Any]:
        return {
            "step": self.step, "loss": self.loss, "history": self.history, "seconds": self.seconds + time.monotonic() - self.began,
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "controls": self.controls.state_dict(),
            "random": random_state(), "sha256": self.data.facts["sha256"],
        }  # fmt: skip

    def _resume(self) -> None:
        path = checkpoint.latest(self.folder)
        if path is None:
            return
        held = checkpoint.read_state(path, self.device)
        if held["sha256"] != self.data.facts["sha256"]:
            raise LocaterError(
                f"{self.folder}: began on other data than there is now (sha256 {held['sha256'][:12]}...): give another --out"
            )
        self.model.load_state_dict(held["model"])
        self.optimizer.load_state_dict(held["optimizer"])
        restore(self.controls, held["controls"])
        restore_random(held["random"])
        self.step, self.loss, self.seconds = held["step"], held["loss"], held["seconds"]
        self.history = [(step, loss) for step, loss in held["history"]]

    def _failure(self, step: int, what: str, batches: list[Batch]) -> str:
        last = checkpoint.latest(self.folder)
        kept = f"the last good checkpoint is {last}" if last else "no checkpoint was written before"
        return f"{self.folder}: step {step}: {what}; {culprit(self.model, batches)}; {kept}. Lower --rate, or add a --control"


@contextmanager
def _evaluating(model: Transformer) -> Iterator[None]:
    before = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(before)
