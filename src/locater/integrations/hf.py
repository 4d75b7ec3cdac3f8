"""Controls in any `transformers.Trainer`, exact under accumulation, clipping and several processes.

    trainer = transformers.Trainer(...)
    locater.integrations.hf.attach(trainer, [locater.LocAteR()])
    trainer.train()

The trainer's own `compute_loss` is wrapped on the instance, so that the penalty is part of the loss that is scaled,
accumulated and clipped. A callback could not do that: it cannot change the loss, and a gradient that it adds before
the optimizer step comes after clipping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from locater.control.base import Control, Controls
from locater.errors import LocaterError

KEY = "_locater_controls"


def attach(trainer: Any, controls: Control | Iterable[Control]) -> Controls:
    """Attach controls to the trainer's model and to its loss; returns them as one. `detach(trainer)` undoes it.

    The logged loss then includes the penalty; `logs["penalty"]` is the penalty of the last step before each log.
    Controls with parameters of their own need an optimizer that has them: pass `optimizers=` to the trainer.
    """
    if getattr(trainer, KEY, None) is not None:
        raise LocaterError("this trainer already has controls: detach(trainer) first, or attach all of them at once")
    for name in ("compute_loss", "add_callback", "model"):
        if not hasattr(trainer, name):
            raise LocaterError(f"{type(trainer).__name__} is not a transformers.Trainer: it has no {name}")
    attached = Controls([controls] if isinstance(controls, Control) else controls)
    attached.attach(trainer.model)
    callback = _callback(attached)
    trainer.compute_loss = _add_penalty(trainer, trainer.compute_loss, attached, callback)
    trainer.log = _log_penalty(trainer.log, callback)  # `on_log` would come too late: logs are stored before it
    trainer.add_callback(callback)
    setattr(trainer, KEY, (attached, callback))
    return attached


def detach(trainer: Any) -> None:
    """Remove the controls of a trainer and its model. May be called twice."""
    if getattr(trainer, KEY, None) is None:
        return
    controls, callback = getattr(trainer, KEY)
    controls.detach()
    trainer.remove_callback(callback)
    del trainer.compute_loss, trainer.log  # the methods of the class apply again
    delattr(trainer, KEY)


def _add_penalty(trainer: Any, inner: Callable[..., Any], controls: Controls, callback: Any) -> Callable[..., Any]:
    """`compute_loss` with the penalty of the controls added while training."""

    def compute_loss(model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        out = inner(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        if not model.training or controls.model is None:
            return out
        penalty = controls.loss()
        callback.penalty = penalty.detach()
        # a loss that the trainer will not divide by the accumulation steps is already divided; divide the penalty, too
        share = trainer.current_gradient_accumulation_steps if _is_scaled(trainer, num_items_in_batch) else 1
        penalty = penalty / share
        if not return_outputs:
            return out + penalty.to(out)
        return out[0] + penalty.to(out[0]), out[1]

    return compute_loss


def _log_penalty(inner: Callable[..., Any], callback: Any) -> Callable[..., Any]:
    """`log` with the last penalty next to the loss."""

    def log(logs: dict[str, Any], *args: Any, **kw: Any) -> Any:
        if "loss" in logs and callback.penalty is not None:
            logs = {**logs, "penalty": float(callback.penalty)}
        return inner(logs, *args, **kw)

    return log


def _is_scaled(trainer: Any, items: Any) -> bool:
    """Whether the loss of a micro-batch is divided by the accumulation steps before it reaches the trainer."""
    flag = getattr(trainer, "loss_is_scaled_for_ga", None)
    if flag is not None:
        return bool(flag)
    return (trainer.model_accepts_loss_kwargs and items is not None) or trainer.compute_loss_func is not None


def _callback(controls: Controls) -> Any:
    from transformers import TrainerCallback

    class AfterStep(TrainerCallback):  # type: ignore[misc]
        """Calls `after_step` after each optimizer step."""

        penalty: Tensor | None = None  # of the last step

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
            controls.after_step()

    return AfterStep()
