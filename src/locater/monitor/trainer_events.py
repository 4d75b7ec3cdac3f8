"""What trainers tell a callback, as steps of a monitor: transformers.Trainer and lightning.Trainer.

Loss and rate are the trainer's own. transformers logs a mean over `logging_steps`, and by default one in which losses
that are not numbers are replaced, so the loss of each step is taken from `training_step`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from locater.attention.stand_ins import instead

if TYPE_CHECKING:
    from locater.observing.observation import Observation

LOGGED = ("grad_norm", "penalty")  # taken from the logs of transformers.Trainer, at the steps that it logs


class TrainerEvents:
    """Callbacks of both trainers; `Monitor` adds what they call."""

    observation: Observation | None
    step: int
    _sum: Any = None  # of the losses of a step's micro-batches
    _parts = 0  # how many of them
    _rate: float | None = None
    _norm: Tensor | None = None
    _unlisten: Callable[[], None] | None = None
    _logged = 0  # the step of the trainer's last log

    attach: Callable[..., Any]
    after_step: Callable[..., Any]
    detach: Callable[[], None]
    _close: Callable[[], None]
    _flush: Callable[..., None]
    _write: Callable[[dict[str, Any]], None]
    _say: Callable[..., None]

    @property
    def attached(self) -> bool:
        return self.observation is not None

    @property
    def due(self) -> bool:
        """Whether the step that is running is observed."""
        return self.observation is not None and self.observation.switch.on

    def _hear(self, loss: Any) -> None:
        """The loss of one micro-batch."""
        if self.attached and isinstance(loss, Tensor) and loss.numel() == 1:
            # a copy: a CUDA graph writes the next loss over this one
            self._sum = loss.detach().clone() if self._sum is None else self._sum + loss.detach()
            self._parts += 1

    def _begin(self, model: nn.Module, folder: str, step: int) -> None:
        self._end()
        self.step = self._logged = step
        self.attach(model, folder)

    def _end(self) -> None:
        """A run that failed may have left it attached: transformers.Trainer has no event for that."""
        if self._unlisten is not None:
            self._unlisten()
        self._unlisten = self._sum = self._rate = self._norm = None
        self._parts = 0
        with contextlib.suppress(Exception):  # where the run failed with its device, losses cannot be read from there
            self._flush(wait=True)
        self._close()

    def _step_done(self, step: int, share: float = 1.0) -> None:
        """One optimizer step; `share` times the sum over its micro-batches is its loss."""
        loss = self._sum if self._sum is None or share == 1.0 else self._sum * share
        self._sum, self._parts = None, 0
        known = {"grad_norm": self._norm, "rate": self._rate}
        self.after_step(loss, step=step, **{name: value for name, value in known.items() if value is not None})

    # transformers.Trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **held: Any) -> None:
        if getattr(args, "n_gpu", 1) > 1:
            self._end()
            self._say(
                "nn.DataParallel runs copies of the model, which are not observed: start one process per device with torchrun"
            )
            return
        self._begin(held["model"], args.output_dir or ".", int(state.global_step))
        trainer = trainer_of(self)
        self._unlisten = None if trainer is None else listen(trainer, self._hear)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **held: Any) -> None:
        self._rate = _rate(optimizer) if self.due else None  # a rate on a device is waited for

    def on_step_end(self, args: Any, state: Any, control: Any, **held: Any) -> None:
        if self.attached:
            self._step_done(int(state.global_step))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **held: Any) -> None:
        if not self.attached or not logs or "loss" not in logs:  # an evaluation, or the summary at the end
            return
        step = int(state.global_step)
        record = {"kind": "loss", "step": step, "scalars": {name: float(logs[name]) for name in LOGGED if name in logs}}
        if self._unlisten is None:  # steps are not heard one by one: the mean since the last log, at its own step
            record |= {"loss": float(logs["loss"]), "over": step - self._logged}
        self._logged = step
        if len(record) > 3 or record["scalars"]:
            self._write(record)

    # lightning.Trainer

    def on_train_start(self, trainer: Any, module: nn.Module) -> None:
        self._begin(module, trainer.log_dir or trainer.default_root_dir, int(trainer.global_step))

    def on_before_optimizer_step(self, trainer: Any, module: nn.Module, optimizer: Any) -> None:
        self._rate = _rate(optimizer) if self.due else None
        self._norm = _gradient_norm(trainer, module, optimizer) if self.due else None

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._hear(outputs.get("loss") if isinstance(outputs, dict) else outputs)
        if self.attached and int(trainer.global_step) > self.step:  # once per optimizer step
            # each part was divided by accumulate_grad_batches, and the last group of an epoch may have fewer
            whole = trainer.accumulate_grad_batches if module.automatic_optimization else 1
            self._step_done(int(trainer.global_step), whole / max(1, self._parts))

    def on_exception(self, trainer: Any, module: nn.Module, exception: BaseException) -> None:
        self._end()

    # Both

    def on_train_end(self, *args: Any, **held: Any) -> None:
        try:
            self.detach()
        finally:
            self._end()

    state_key = "locater.Monitor"

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("on_") or name in ("setup", "teardown"):
            return _nothing  # an event of a trainer that a monitor has no use for
        raise AttributeError(f"{type(self).__name__} has no {name!r}")


def _nothing(*args: Any, **held: Any) -> None:
    return None


def _rate(optimizer: Any) -> float | None:
    groups = getattr(optimizer, "param_groups", None)
    return float(groups[0]["lr"]) if groups and "lr" in groups[0] else None


def still_scaled(trainer: Any, optimizer: Any) -> bool:
    """Whether Lightning's gradients are still multiplied for half precision before the optimizer step: only where the
    optimizer itself divides them, as fused Adam does."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return scaler is not None and bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _gradient_norm(trainer: Any, module: nn.Module, optimizer: Any) -> Tensor | None:
    """Before clipping; None where gradients are shards of others, or still scaled for half precision."""
    alone = trainer.world_size == 1 or "ddp" in type(trainer.strategy).__name__.lower()
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    if still_scaled(trainer, optimizer) or not alone or not grads or any(type(grad) is not Tensor for grad in grads):
        return None
    return torch.nn.utils.get_total_norm(grads)


def trainer_of(callback: Any) -> Any:
    """The trainer that is calling `callback`; None where there is none.

    Events carry the model, the optimizer and the state, but not the trainer; it is the `self` of one of the calling
    frames.
    """
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        handler = getattr(owner, "callback_handler", None)
        if callable(getattr(owner, "training_step", None)) and any(
            held is callback for held in getattr(handler, "callbacks", ())
        ):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


def listen(trainer: Any, hear: Callable[[Any], None]) -> Callable[[], None]:
    """Tell `hear` what each `training_step` returns: the loss of a micro-batch as it is accumulated. Returns what ends
    it.
    """

    def heard(owner: Any, training_step: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        loss = training_step(*args, **kw)
        hear(loss)
        return loss

    return instead(trainer, "training_step", heard)
