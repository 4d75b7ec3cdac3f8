"""`Monitor`, which transformers.Trainer and lightning.Trainer take as a callback.

Loss and learning rate are the trainer's own. The loss of each step comes from `training_step`: what transformers logs
is a mean over `logging_steps`, in which losses that are not numbers are replaced by default.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from locater.calls.patching import replace_method
from locater.runs.run_monitor import RunMonitor
from locater.torch_private import unscales_gradients

LOGGED = ("grad_norm", "penalty")  # copied from the logs of transformers.Trainer, at the steps that it logs
SEARCH = "_locater_search"  # on a replaced `get_batch_samples`: whether the search for its trainer has ended


class Monitor(RunMonitor):
    """Observe every `every`-th step of a run, write it to sinks, and warn once per head and reason.

    A callback for `transformers.Trainer` and `lightning.Trainer`; in any other loop call `attach(model)`,
    `after_step(loss=loss)` after each step, and `detach()`.

    `sinks` are paths that end in .jsonl, "tensorboard:FOLDER", "wandb", "trackio", "mlflow", or objects with write()
    and close(); without any, `locater.jsonl` in the output folder of the run. `layers`, `heads` and `rows` choose a
    sample as in `observe`. `warn_on` lists flags and comparisons as --fail-on does, such as "exploding,
    entropy_ratio<0.1". `spectrum` adds M and the logit spread of each head's query-key map, from its weights.
    `passes="loss"` counts the forward passes that a loss comes from: in training mode, with gradients enabled when they
    begin. A reference, a rollout or an evaluation runs without; the log has how many were left out. `passes="all"`
    counts every pass in training mode.

    A warning is a reason to look, and silence is no promise. On small runs that had no part in choosing `warn_on`, a
    warning came 10 steps or more before the loss showed the failure in 32 of 66 runs that failed (32 of 58 without
    those with bad data), and in 2 of 110 ordinary runs. Sudden faults, such as a jump of the learning rate or bad data,
    show in the loss first (docs/monitor.md).
    """

    _loss_sum: Any = None  # over the micro-batches of a step
    _micro_batches = 0  # how many of them
    _rate: float | None = None
    _grad_norm: Tensor | None = None
    _stop_listening: Callable[[], None] | None = None
    _step_losses_known = False  # whether transformers.Trainer's `training_step` is listened to
    _last_logged = 0  # step of the trainer's last log

    def _add_loss(self, loss: Any) -> None:
        """Add the loss of one micro-batch."""
        if self.attached and isinstance(loss, Tensor) and loss.numel() == 1:
            # a copy: a CUDA graph writes the next loss over this one
            self._loss_sum = loss.detach().clone() if self._loss_sum is None else self._loss_sum + loss.detach()
            self._micro_batches += 1

    def _begin(self, model: nn.Module, folder: str, step: int) -> None:
        self._end()
        self.step = self._last_logged = step
        self.attach(model, folder)

    def _end(self, failure: str = "") -> None:
        """Detach, also after a run that failed: transformers.Trainer has no event for that."""
        if self._stop_listening is not None:
            self._stop_listening()
        self._stop_listening = self._loss_sum = self._rate = self._grad_norm = None
        self._micro_batches, self._step_losses_known = 0, False
        self.end_run(failure)

    def _end_step(self, step: int, share: float = 1.0) -> None:
        """One optimizer step; its loss is `share` times the sum over its micro-batches."""
        loss = self._loss_sum if self._loss_sum is None or share == 1.0 else self._loss_sum * share
        self._loss_sum, self._micro_batches = None, 0
        known = {"grad_norm": self._grad_norm, "rate": self._rate}
        self.after_step(loss, step=step, **{name: value for name, value in known.items() if value is not None})

    # transformers.Trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **event: Any) -> None:
        if getattr(args, "n_gpu", 1) > 1:
            self._end()
            self._report_once(
                "nn.DataParallel runs copies of the model, which are not observed: "
                "start one process per device with torchrun"
            )
            return
        self._begin(event["model"], args.output_dir or ".", int(state.global_step))
        self._stop_listening = find_trainer(self, self._listen)

    def _listen(self, trainer: Any) -> None:
        """Count what each `training_step` of a transformers.Trainer returns: the loss of a micro-batch."""

        def counted_step(owner: Any, training_step: Callable[..., Any], *args: Any, **kw: Any) -> Any:
            loss = training_step(*args, **kw)
            self._add_loss(loss)
            return loss

        self._stop_listening = replace_method(trainer, "training_step", counted_step)
        self._step_losses_known = True

    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **event: Any) -> None:
        self._rate = learning_rate(optimizer) if self.due else None  # reading a rate may wait for the device

    def on_step_end(self, args: Any, state: Any, control: Any, **event: Any) -> None:
        if self.attached:
            self._end_step(int(state.global_step))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **event: Any) -> None:
        if not self.attached or not logs or "loss" not in logs:  # an evaluation, or the summary at the end
            return
        step = int(state.global_step)
        record = {"kind": "loss", "step": step, "scalars": {name: float(logs[name]) for name in LOGGED if name in logs}}
        if not self._step_losses_known:  # log the mean since the last log
            record |= {"loss": float(logs["loss"]), "over": step - self._last_logged}
        self._last_logged = step
        if len(record) > 3 or record["scalars"]:
            self._sinks.write(record)

    # lightning.Trainer

    def on_train_start(self, trainer: Any, module: nn.Module) -> None:
        self._begin(module, trainer.log_dir or trainer.default_root_dir, int(trainer.global_step))

    def on_before_optimizer_step(self, trainer: Any, module: nn.Module, optimizer: Any) -> None:
        self._rate = learning_rate(optimizer) if self.due else None
        self._grad_norm = _gradient_norm(trainer, module, optimizer) if self.due else None

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._add_loss(outputs.get("loss") if isinstance(outputs, dict) else outputs)
        if self.attached and int(trainer.global_step) > self.step:  # once per optimizer step
            # each loss was divided by accumulate_grad_batches; the last step of an epoch may have fewer micro-batches
            whole = trainer.accumulate_grad_batches if module.automatic_optimization else 1
            self._end_step(int(trainer.global_step), whole / max(1, self._micro_batches))

    def on_exception(self, trainer: Any, module: nn.Module, exception: BaseException) -> None:
        self._end(type(exception).__name__)

    # Both

    def on_train_end(self, *args: Any, **event: Any) -> None:
        try:
            self.detach()
        finally:
            self._end()

    state_key = "locater.Monitor"

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("on_") or name in ("setup", "teardown"):
            return _ignore  # an event that a monitor ignores
        raise AttributeError(f"{type(self).__name__} has no {name!r}")


def _ignore(*args: Any, **event: Any) -> None:
    return None


def learning_rate(optimizer: Any) -> float | None:
    groups = getattr(optimizer, "param_groups", None)
    return float(groups[0]["lr"]) if groups and "lr" in groups[0] else None


def still_scaled(trainer: Any, optimizer: Any) -> bool:
    """Whether gradients still carry the loss scale of half precision when Lightning calls back before the optimizer
    step: only if the optimizer itself divides by it, as fused Adam does.
    """
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return scaler is not None and unscales_gradients(optimizer)


def _gradient_norm(trainer: Any, module: nn.Module, optimizer: Any) -> Tensor | None:
    """The norm before clipping; None if gradients are sharded or still carry a loss scale."""
    alone = trainer.world_size == 1 or "ddp" in type(trainer.strategy).__name__.lower()
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    if still_scaled(trainer, optimizer) or not alone or not grads or any(type(grad) is not Tensor for grad in grads):
        return None
    return torch.nn.utils.get_total_norm(grads)


def find_trainer(callback: Any, use: Callable[[Any], None]) -> Callable[[], None]:
    """Call `use` with the transformers.Trainer that has `callback`, before its next training step. Returns a function
    that ends the search.

    Events carry the model, the optimizer and the state, but not the trainer. Every trainer gets the batches of a step
    from `get_batch_samples`, so that method of the class is replaced until the trainer in question calls it. A subclass
    with a loop of its own that does not call it is not found.
    """
    module = sys.modules.get("transformers.trainer")
    if module is None:  # so the caller is not a transformers.Trainer
        return lambda: None
    cls, name = module.Trainer, "get_batch_samples"
    method = getattr(cls, name)

    @wraps(method)
    def searching(trainer: Any, *args: Any, **kw: Any) -> Any:
        if not over and any(other is callback for other in trainer.callback_handler.callbacks):
            end()
            use(trainer)
        return method(trainer, *args, **kw)

    over: list[bool] = []  # not empty once the search has ended
    vars(searching)[SEARCH] = over

    def end() -> None:
        over.append(True)
        # searches may end in any order, and a method that others put on top stays, with ours idle below it
        while getattr(top := getattr(cls, name), SEARCH, None):
            setattr(cls, name, top.__wrapped__)

    setattr(cls, name, searching)
    return end
