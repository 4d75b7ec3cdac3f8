"""Controls in `lightning.Trainer`, exact under accumulation and clipping.

trainer = lightning.Trainer(..., callbacks=[locater.integrations.lightning.ControlCallback(locater.LocAteR())])
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch import Tensor

try:
    from lightning.pytorch import Callback
except ImportError:  # the older name of the same package
    try:
        from pytorch_lightning import Callback
    except ImportError:
        raise ImportError("Lightning is not installed: pip install 'locater[lightning]'") from None

from locater.control.base import Control, Controls
from locater.errors import LocaterError
from locater.integrations.monitor_for_trainers import still_scaled

logger = logging.getLogger("locater")


class ControlCallback(Callback):  # type: ignore[misc]
    """Attaches controls when training starts, and once per optimizer step adds the gradient of their penalty, before
    clipping.
    """

    def __init__(self, controls: Control | Iterable[Control]) -> None:
        self.controls = Controls([controls] if isinstance(controls, Control) else controls)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if not pl_module.automatic_optimization:
            raise LocaterError(
                "manual optimization: use controls in training_step: loss + control.loss(), then control.after_step()"
            )
        for control in self.controls.controls:
            if control.loss_needs_forward_graph:
                raise LocaterError(
                    f"{control!r}: its penalty needs the graph of the forward pass, which is gone when Lightning "
                    "calls back: control.attach(module), and return loss + control.loss() from training_step"
                )
        self.controls.attach(pl_module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._step, self._warned = int(trainer.global_step), False

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        penalty: Tensor = self.controls.loss()
        scaler: Any = getattr(trainer.precision_plugin, "scaler", None)
        if penalty.requires_grad:
            if still_scaled(trainer, optimizer):
                scaler.scale(penalty).backward()
            elif scaler is None or bool(penalty.isfinite()):
                penalty.backward()
            elif not self._warned:  # the scaler has checked the gradients already, and would not skip this step
                self._warned = True
                logger.warning(
                    "step %d: the penalty is %s: left out of the step", trainer.global_step, float(penalty.detach())
                )
        pl_module.log("locater/penalty", penalty.detach())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step > self._step:
            self._step = int(trainer.global_step)
            self.controls.after_step()

    _step = 0
    _warned = False  # whether a penalty was left out, and the user warned

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.controls.detach()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.controls.detach()
