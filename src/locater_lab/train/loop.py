"""The training loop: forward, backward, clip, check, step. Orchestration only."""

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

from locater import Monitor
from locater.control.base import Controls
from locater.errors import LocaterError, first_line
from locater.observing import observe
from locater.runs.head_table import COLUMNS
from locater.runs.record_sinks import JsonlSink
from locater.runs.records import end_record, header, loss_record
from locater.runs.run_log import LOG
from locater_lab.mechanisms.stack import parse_attention
from locater_lab.models.transformer import Attention, Transformer
from locater_lab.train import checkpoint
from locater_lab.train.batches import Batch, Data
from locater_lab.train.controls_and_conversion import (
    Conversion,
    attach,
    check_controls,
    check_conversion,
    conversion_of,
    restore,
)
from locater_lab.train.data import open_data
from locater_lab.train.map_measures_and_diverged_layer import SEQUENCES, find_diverged_layer, measure, why_unread
from locater_lab.train.optimizer_and_learning_rate import (
    compile_model,
    deterministic_algorithms,
    device_of,
    optimizer_for,
    random_state,
    rate_at,
    restore_random,
    seeded_randomness,
    shape_of,
    strictly_deterministic,
    uses_bfloat16,
)
from locater_lab.train.plan import Plan
from locater_lab.train.run_folder import RESULT, Result, claimed_folder, run_folder
from locater_lab.train.text_data import ClassData, TextData

# A model measured on a split of its data: loss, accuracy, and the entropy of its heads.


@dataclass(frozen=True)
class Evaluation:
    """`half` computes in bfloat16 autocast, as training does then."""

    model: Transformer
    data: Data
    device: torch.device
    half: bool

    def autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16) if self.half else nullcontext()

    @torch.no_grad()
    def loss_and_accuracy(self, split: str, most: int | None = None) -> tuple[float, float | None]:
        """Mean loss over the targets of a split, and the share of them that the model ranks first; of the first `most`
        sequences, or of all. Targets that are no classes, of a model that denoises, have a squared error and no rank.
        """
        sums: list[tuple[Tensor, ...]] = []  # of each window: loss, targets, and how many are ranked first
        with _evaluation_mode(self.model):
            for inputs, targets in self.data.windows(split, most):
                with self.autocast():
                    logits = self.model(inputs).float().flatten(0, -2)
                if self.model.shape.denoises:
                    error = nn.functional.mse_loss(logits, targets.flatten(0, -2), reduction="sum")
                    sums.append((error, torch.tensor(targets.numel())))
                    continue
                flat = targets.flatten()
                loss = nn.functional.cross_entropy(logits, flat, reduction="sum")
                sums.append((loss, (flat >= 0).sum(), (logits.argmax(-1) == flat).sum()))
        # the device is waited for once, and not after each window
        total, count, *right = (sum(torch.stack(column).tolist()) for column in zip(*sums, strict=True))
        return total / count, right[0] / count if right else None

    def report(self) -> tuple[float, float | None, list[float]]:
        """Loss and accuracy on the report split, and the entropy of each head; none where attention has none."""
        if why_unread(self.model) is not None:
            return *self.loss_and_accuracy("report"), []
        with observe(self.model) as seen:
            loss, accuracy = self.loss_and_accuracy("report")
        return loss, accuracy, [row.entropy for row in seen.rows if row.entropy is not None]

    def measures(self) -> dict[str, Any]:
        """Attention maps and residual stream on the first sequences of the report split."""
        inputs, _ = next(iter(self.data.windows("report", SEQUENCES)))
        with _evaluation_mode(self.model):
            return measure(self.model, inputs)


@contextmanager
def _evaluation_mode(model: Transformer) -> Iterator[None]:
    before = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(before)


# What the trainer logs of a run beside `Monitor`: the entropy for the live line, and losses where heads have no
# numbers.


class LastEntropy:
    """A sink that remembers the mean entropy of the last observed step."""

    value: float | None = None

    def write(self, record: dict[str, Any]) -> None:
        if record["kind"] == "step":
            known = [x for row in record["heads"]["entropy"] for x in row if x is not None]
            self.value = sum(known) / len(known) if known else None

    def close(self) -> None:
        """Nothing to close."""


class LossLog:
    """Takes the place of a `Monitor` where heads cannot be measured: the same log, with losses alone."""

    def __init__(self, path: Path, every: int) -> None:
        self.path, self.every, self.step = path, every, 0
        self.sink: JsonlSink | None = None
        self.warned = False

    def attach(self, model: Transformer) -> None:
        names = [name for name, module in model.named_modules() if isinstance(module, Attention)]
        heads = model.shape.heads
        layers = [{"layer": i, "name": name, "heads": heads, "kind": "self"} for i, name in enumerate(names)]
        sink, begin = JsonlSink(self.path), header(type(model).__name__, self.every, layers, COLUMNS)
        try:
            sink.check(begin)  # a log of another model is refused, and stays as it is
        except BaseException:
            sink.close()
            raise
        self.sink = sink
        self._write(begin)

    def after_step(self, loss: float, step: int, **scalars: Any) -> None:
        self.step = step
        self._write(loss_record(step, loss))

    def detach(self) -> None:
        """May be called twice."""
        self._write(end_record(self.step))
        if self.sink is not None:
            self.sink.close()
            self.sink = None

    def _write(self, record: dict[str, Any]) -> None:
        """A full disk costs the record; the user is warned once."""
        try:
            if self.sink is not None:
                self.sink.write(record)
        except LocaterError as error:
            if not self.warned:
                logging.getLogger("locater").warning("the run goes on without records: %s", error)
            self.warned = True


logger = logging.getLogger("locater")
NOT_DETERMINISTIC = "does not have a deterministic implementation"  # how PyTorch refuses an operation
WINDOWS = 256  # sequences of the select split that are evaluated during training; the end is measured on all
WITH_ACCURACY = ("image", "classify", "sort")
NO_PERPLEXITY = ("image", "classify", "diffusion")
OnProgress = Callable[[dict[str, Any]], None]


class DivergedError(LocaterError):
    """The loss or its gradient is no longer a number."""


def run(plan: Plan, on_progress: OnProgress = lambda event: None) -> Result:
    """Train as `plan` says. A run that was interrupted goes on from its last checkpoint; one that is finished is read
    back.

    `on_progress` is called every `plan.log` steps with a dictionary: step, loss, perplexity, select_loss, entropy,
    tokens_per_second, seconds_left.
    """
    check_plan(plan)
    device = device_of(plan.device)
    folder = run_folder(plan)
    if (folder / RESULT).is_file():
        return Result.load(folder / RESULT)
    with seeded_randomness(plan.seed, device), deterministic_algorithms(device, plan.deterministic):
        training = Training.begin(plan, folder, device, on_progress)
        try:
            with claimed_folder(plan):  # nothing is written before data, model and controls are ready
                training.go_on()
                training.train()
                return training.finish()
        finally:
            training.end()


def check_plan(plan: Plan) -> None:
    """Refuse controls that do not exist or do not fit the attention. `Plan` itself checks everything else."""
    check_controls(plan.control, [layer.name for layer in parse_attention(plan.attention, plan.layers)])
    check_conversion(plan)


@dataclass
class Training:
    """A run under way."""

    plan: Plan
    folder: Path
    device: torch.device
    on_progress: OnProgress
    data: Data
    model: Transformer
    forward: Callable[..., Tensor]  # the model, compiled if the plan says so
    controls: Controls
    trainable: list[nn.Parameter]  # of the model, and of its controls
    optimizer: torch.optim.Optimizer
    monitor: Monitor | LossLog | None
    last_entropy: LastEntropy
    conversion: Conversion | None
    step: int = 0
    loss: float = math.nan
    history: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0  # of earlier parts of the run
    began: float = field(default_factory=time.monotonic)
    converted: dict[str, Any] | None = None  # losses before and after the conversion, once it was made
    last_progress: tuple[int, float] = (0, 0.0)  # step and time of the last call of `on_progress`

    def __post_init__(self) -> None:
        self.evaluation = Evaluation(self.model, self.data, self.device, uses_bfloat16(self.plan, self.device))
        self.deterministic = self.plan.deterministic and self.device.type == "cuda"

    @classmethod
    def begin(cls, plan: Plan, folder: Path, device: torch.device, on_progress: OnProgress) -> Training:
        """Data, model, controls, optimizer and monitor of a plan. Nothing is written."""
        data = open_data(plan, folder, device)
        model = Transformer(shape_of(plan, data), plan.scale, plan.dropout).to(device)
        conversion = conversion_of(plan, model)
        controls = attach(plan.control, model)
        learned = dict(model.named_parameters()) | ({} if conversion is None else conversion.named_parameters())
        learned |= {f"control.{i}": p for i, p in enumerate(controls.parameters())}
        trainable = {name: p for name, p in learned.items() if p.requires_grad}
        entropy = LastEntropy()
        try:
            monitor = _make_monitor(plan, folder, model, entropy, conversion) if plan.observe else None
            forward = compile_model(plan, model, device)
            optimizer = optimizer_for(plan, trainable, device)
        except BaseException:
            controls.detach()
            raise
        return cls(
            *(plan, folder, device, on_progress, data, model, forward, controls),
            *([*trainable.values()], optimizer, monitor, entropy, conversion),
        )

    def go_on(self) -> None:
        """Start from the last checkpoint in the folder, or from the first step, and open the log."""
        self._resume()
        if isinstance(self.data, TextData | ClassData) and self.step == 0:
            self.data.save_tokenizer(self.folder)
        if self.monitor is not None:
            self.monitor.step = self.step
            self.monitor.attach(self.model)

    def train(self) -> None:
        plan, start = self.plan, self.step
        self.began = time.monotonic()
        self.last_progress = start, self.began
        self.model.train()
        batches = self._batches(self.step)
        while self.step < plan.steps:
            for group in self.optimizer.param_groups:
                group["lr"] = rate_at(plan, self.step)
            loss = self._backward(batches)
            norm = nn.utils.clip_grad_norm_(self.trainable, plan.clip or math.inf)
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
        """Measure the final weights on both splits, and write them and the result."""
        self.seconds += time.monotonic() - self.began
        if self.monitor is not None:
            self.monitor.detach()
        report, accuracy, entropies = self.evaluation.report()
        if not math.isfinite(report):  # the last step may have spoiled the weights
            raise DivergedError(self._failure(self.step, f"the report loss is {report}", self._batches(self.step - 1)))
        facts, target = self.data.facts, checkpoint.save(self.folder, "model", self.model)
        bits_per_byte = None
        if self.plan.task == "causal" and not facts.get("unknown", {}).get("report"):  # <unk> hides what it stands for
            bits_per_byte = report * (facts["tokens"]["report"] / facts["bytes"]["report"] / math.log(2))
        result = Result(
            plan=self.plan,
            train_loss=self.loss,
            select_loss=self.evaluation.loss_and_accuracy("select")[0],
            report_loss=report,
            report_entropy=sum(entropies) / len(entropies) if entropies else None,
            bits_per_byte=bits_per_byte,
            accuracy=accuracy if self.plan.task in WITH_ACCURACY else None,
            conversion=self.converted,
            history=tuple(self.history),
            parameters=sum(p.numel() for p in self.model.parameters()),
            tokens=self.step * self._tokens_per_step,
            seconds=self.seconds,
            measures=self.evaluation.measures(),
            data=facts,
            model=str(target),
        )
        result.save(self.folder / RESULT)
        return result

    def end(self) -> None:
        """Detach controls and monitor, whatever happened."""
        self.controls.detach()
        if self.monitor is not None:
            self.monitor.detach()

    def _batches(self, step: int) -> list[Batch]:
        count = self.plan.accumulate
        return [self.data.batch(step * count + part) for part in range(count)] if step < self.plan.steps else []

    def _backward(self, batches: list[Batch]) -> Tensor:
        """The mean loss of the step, without the penalty of controls; gradients include it."""
        try:
            with strictly_deterministic() if self.deterministic else nullcontext():
                return self._accumulate_gradients(batches)
        except RuntimeError as error:
            if not self.deterministic or NOT_DETERMINISTIC not in str(error):
                raise
            self.deterministic = False
            logger.warning("equal plans will not give equal weights: %s", first_line(error))
            self.optimizer.zero_grad(set_to_none=True)
            return self._accumulate_gradients(batches)

    def _accumulate_gradients(self, batches: list[Batch]) -> Tensor:
        total = torch.zeros((), device=self.device)
        for inputs, targets in batches:
            with self.evaluation.autocast():
                loss = self.forward(inputs, targets)
            ((loss + self.controls.loss()) / len(batches)).backward()
            total += loss.detach() / len(batches)
        return total

    def _after_step(self, start: int) -> None:
        """Evaluate, write a checkpoint and report progress, where this step is due for it."""
        plan, last = self.plan, self.step == self.plan.steps
        if self.conversion is not None and self.step == plan.conversion_step:
            self._convert(self.conversion)
        if plan.evaluate and self.step % plan.evaluate == 0:
            self.history.append((self.step, self.evaluation.loss_and_accuracy("select", WINDOWS)[0]))
        due = plan.checkpoint and self.step % plan.checkpoint == 0
        if (due or last) and not all(bool(p.isfinite().all()) for p in self.trainable):
            raise DivergedError(self._failure(self.step, "the weights are not finite", self._batches(self.step - 1)))
        if due or (last and plan.checkpoint):
            checkpoint.save(self.folder, checkpoint.checkpoint_name(self.step), self.model, self._state())
            checkpoint.remove_older(self.folder, plan.keep)
        if self.step % plan.log == 0 or last or self.step == start + 1:
            self._report_progress()

    def _convert(self, conversion: Conversion) -> None:
        """Put another mechanism in, the report split measured right before and right after."""
        before = self._measured_now()
        conversion.apply()
        if self.plan.compile:
            torch.compiler.reset()
            self.forward = compile_model(self.plan, self.model, self.device)
        self.converted = {"step": self.step, "before": before, "after": self._measured_now()}

    def _measured_now(self) -> dict[str, float | None]:
        loss, accuracy = self.evaluation.loss_and_accuracy("report")
        return {"loss": loss, "accuracy": accuracy if self.plan.task in WITH_ACCURACY else None}

    def _report_progress(self) -> None:
        step, since = self.last_progress
        self.last_progress = self.step, time.monotonic()
        # of the steps since the last report, so that the time of compiling does not count for long
        pace = (self.last_progress[1] - since) / (self.step - step)
        self.on_progress(
            {
                "step": self.step,
                "steps": self.plan.steps,
                "loss": self.loss,
                "perplexity": None if self.plan.task in NO_PERPLEXITY else math.exp(min(self.loss, 700.0)),
                "select_loss": self.history[-1][1] if self.history else None,
                "entropy": self.last_entropy.value,
                "tokens_per_second": self._tokens_per_step / pace,
                "seconds_left": (self.plan.steps - self.step) * pace,
            }
        )

    @property
    def _tokens_per_step(self) -> int:
        return self.plan.batch * self.plan.accumulate * self.model.shape.length

    def _state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "loss": self.loss,
            "history": self.history,
            "converted": self.converted,
            "seconds": self.seconds + time.monotonic() - self.began,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "controls": self.controls.state_dict(),
            "random": random_state(),
            "sha256": self.data.facts["sha256"],
        }

    def _resume(self) -> None:
        path = checkpoint.latest(self.folder)
        if path is None:
            return
        state = checkpoint.read_state(path, self.device)
        if state["sha256"] != self.data.facts["sha256"]:
            raise LocaterError(
                f"{self.folder}: began on other data than there is now (sha256 {state['sha256'][:12]}...): "
                "give another --out"
            )
        self.converted = state.get("converted")  # checkpoints of earlier versions have none
        if self.conversion is not None and self.converted is not None:
            self.conversion.apply()
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        restore(self.controls, state["controls"])
        restore_random(state["random"])
        self.step, self.loss, self.seconds = state["step"], state["loss"], state["seconds"]
        self.history = [(step, loss) for step, loss in state["history"]]

    def _failure(self, step: int, reason: str, batches: list[Batch]) -> str:
        last = checkpoint.latest(self.folder)
        good = f"the last good checkpoint is {last}" if last else "no checkpoint was written before"
        layer = find_diverged_layer(self.model, batches)
        return f"{self.folder}: step {step}: {reason}; {layer}; {good}. Lower --rate, or add a --control"


def _make_monitor(
    plan: Plan, folder: Path, model: Transformer, entropy: LastEntropy, conversion: Conversion | None
) -> Monitor | LossLog:
    """A monitor of every head; where heads cannot be measured, or will not be after a conversion, a log of losses
    alone, and a warning that says why.
    """
    why = why_unread(model) or (None if conversion is None else conversion.why_unread)
    if why is None:
        return Monitor(folder / LOG, entropy, every=plan.observe)
    logger.warning("%s: the run goes on, its heads not observed: %s", folder, why)
    return LossLog(folder / LOG, plan.observe)
