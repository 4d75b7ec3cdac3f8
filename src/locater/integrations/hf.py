"""Controls in `transformers.Trainer`, exact under accumulation, clipping and several processes; no subclass.

    trainer = transformers.Trainer(...)
    locater.integrations.hf.attach(trainer, [locater.LocAteR()])
    trainer.train()

A callback cannot change the loss, and a gradient added before the optimizer step comes after clipping. So the trainer's
own `compute_loss` is wrapped on the instance: the penalty is part of the loss that is scaled, accumulated and clipped.
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

    The logged loss then holds the penalty; `logs["penalty"]` is its part, of the last step before each log. Controls
    with parameters of their own need an optimizer that knows them: pass `optimizers=` to the trainer.
    """
    if getattr(trainer, KEY, None) is not None:
        raise LocaterError("this trainer has controls already: detach(trainer) first, or attach all of them at once")
    for name in ("compute_loss", "add_callback", "model"):
        if not hasattr(trainer, name):
            raise LocaterError(f"{type(trainer).__name__} is no transformers.Trainer: it has no {name}")
    held = Controls([controls] if isinstance(controls, Control) else controls)
    held.attach(trainer.model)
    callback = _callback(held)
    trainer.compute_loss = _with_penalty(trainer, trainer.compute_loss, held, callback)
    trainer.log = _with_part(trainer.log, callback)  # callbacks are told of logs after they have been kept
    trainer.add_callback(callback)
    setattr(trainer, KEY, (held, callback))
    return held


def detach(trainer: Any) -> None:
    """Take controls off a trainer and its model. May be called twice."""
    found = getattr(trainer, KEY, None)
    if found is None:
        return
    held, callback = found
    held.detach()
    trainer.remove_callback(callback)
    del trainer.compute_loss, trainer.log  # the class's own show again
    delattr(trainer, KEY)


def _with_penalty(trainer: Any, inner: Callable[..., Any], held: Controls, told: Any) -> Callable[..., Any]:
    def compute_loss(model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        out = inner(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        if not model.training or held.model is None:
            return out
        penalty = held.loss()
        told.penalty = penalty.detach()
        # a loss that the trainer does not divide by the accumulation steps is a part of its batch's mean already
        share = trainer.current_gradient_accumulation_steps if _scaled(trainer, num_items_in_batch) else 1
        penalty = penalty / share
        if not return_outputs:
            return out + penalty.to(out)
        return out[0] + penalty.to(out[0]), out[1]

    return compute_loss


def _with_part(inner: Callable[..., Any], told: Any) -> Callable[..., Any]:
    def log(logs: dict[str, Any], *args: Any, **kw: Any) -> Any:
        if "loss" in logs and told.penalty is not None:
            logs = {**logs, "penalty": float(told.penalty)}
        return inner(logs, *args, **kw)

    return log


def _scaled(trainer: Any, items: Any) -> bool:
    """Whether the loss of a micro-batch is divided by the accumulation steps before it reaches the trainer."""
    flag = getattr(trainer, "loss_is_scaled_for_ga", None)
    if flag is not None:
        return bool(flag)
    return (trainer.model_accepts_loss_kwargs and items is not None) or trainer.compute_loss_func is not None


def _callback(held: Controls) -> Any:
    from transformers import TrainerCallback

    class AfterStep(TrainerCallback):  # type: ignore[misc]
        """`after_step` after each optimizer step; the penalty of the last one."""

        penalty: Tensor | None = None

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
            held.after_step()

    return AfterStep()
