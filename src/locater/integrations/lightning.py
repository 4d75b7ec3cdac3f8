"""Controls in `lightning.Trainer`, exact under accumulation and clipping.

trainer = lightning.Trainer(..., callbacks=[locater.integrations.lightning.ControlCallback(locater.LocAteR())])
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

try:
    from lightning.pytorch import Callback
except ImportError:  # the older name of the same package
    from pytorch_lightning import Callback

from locater.control.base import Control, Controls
from locater.errors import LocaterError


class ControlCallback(Callback):  # type: ignore[misc]
    """Attaches controls when training starts and adds the gradient of their penalty once per optimizer step, before clipping."""

    def __init__(self, controls: Control | Iterable[Control]) -> None:
        self.controls = Controls([controls] if isinstance(controls, Control) else controls)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if not pl_module.automatic_optimization:
            raise LocaterError("a module that optimises by hand adds controls by hand: loss + control.loss(), then control.after_step()")
        self.controls.attach(pl_module)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        penalty: Tensor = self.controls.loss()
        if penalty.requires_grad:
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            (penalty if scaler is None else scaler.scale(penalty)).backward()  # gradients are still scaled here
        pl_module.log("locater/penalty", penalty.detach())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step > self._step:
            self._step = int(trainer.global_step)
            self.controls.after_step()

    _step = 0

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.controls.detach()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.controls.detach()
