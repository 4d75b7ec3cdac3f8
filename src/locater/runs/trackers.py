"""Sinks of other people's tools: TensorBoard, Weights & Biases, trackio. Each is imported when it is opened."""

from __future__ import annotations

import importlib
import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from locater.errors import LocaterError
from locater.runs.entropy_pictures import COLUMN, EntropyPictures
from locater.runs.records import Record
from locater.runs.scalars import flat

if TYPE_CHECKING:
    from PIL.Image import Image

CHARTS = {  # TensorBoard's tab "Custom Scalars": a line per layer
    "entropy ratio, mean of each layer": "layer_entropy_ratio/mean/.*",
    "entropy ratio, lowest head of each layer": "layer_entropy_ratio/min/.*",
    "largest logit of each layer": "layer_max_logit/max/.*",
    "logit spread from weights, largest of each layer": "layer_spread/max/.*",
}


class _Scalars:
    """What all trackers have in common: flat numbers of each record, and now and then two pictures."""

    def __init__(self) -> None:
        self._layers: list[int] = []
        self._pictures: EntropyPictures | None = None

    def _numbers(self, record: Record) -> dict[str, float]:
        if record["kind"] == "run":
            self._layers = [entry["layer"] for entry in record["layers"]]
            drawn = COLUMN in record["columns"] and find_spec("PIL") is not None
            self._pictures = EntropyPictures(record) if drawn else None
        return flat(record, self._layers)

    def _drawn(self, record: Record) -> dict[str, Image]:
        pictures = self._pictures.draw(record) if self._pictures is not None else {}
        return {f"attention/{name}": picture for name, picture in pictures.items()}


class TensorBoardSink(_Scalars):
    """Scalars such as `layer_entropy_ratio/mean/03`, `loss` and `grad_norm`, charts with a line per layer, pictures of
    all heads; warnings as text.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__()
        module = imported("torch.utils.tensorboard", "tensorboard")
        self._writer = module.SummaryWriter(os.fspath(folder))

    def write(self, record: Record) -> None:
        at = {"global_step": record.get("step"), "walltime": record.get("time")}
        for name, number in self._numbers(record).items():
            self._writer.add_scalar(name, number, **at)
        if record["kind"] == "run":
            charts = {title: ["Multiline", [tags]] for title, tags in CHARTS.items()}
            self._writer.add_custom_scalars({"attention": charts})
        if record["kind"] == "warning":
            self._writer.add_text("warnings", str(record["message"]), **at)
        for name, picture in self._drawn(record).items():
            self._writer.add_image(name, np.asarray(picture), dataformats="HWC", **at)
        if record["kind"] in ("warning", "end"):
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Tracker(_Scalars):
    """Flat scalars under `locater/` in the tracker's active run, and pictures of all heads."""

    name = ""

    def __init__(self) -> None:
        super().__init__()
        self._module = imported(self.name, self.name)

    def write(self, record: Record) -> None:
        values: dict[str, Any] = {f"locater/{name}": number for name, number in self._numbers(record).items()}
        values |= {f"locater/{name}": self._module.Image(x) for name, x in self._drawn(record).items()}
        if values:
            self._log(values, record["step"])

    def _log(self, values: dict[str, Any], step: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to do: the run belongs to whoever started it."""


class WandbSink(_Tracker):
    """Weights & Biases: the run that `wandb.init()` started. The training step is `locater/step`, since a script that
    logs by itself has steps of its own, and W&B drops rows whose step is lower than its last.
    """

    name = "wandb"

    def __init__(self) -> None:
        super().__init__()
        if self._module.run is None:
            raise LocaterError("no W&B run is active: call wandb.init() before the first record")
        self._module.run.define_metric("locater/*", step_metric="locater/step")

    def _log(self, values: dict[str, Any], step: int) -> None:
        self._module.log({"locater/step": step, **values})


class TrackioSink(_Tracker):
    """trackio: the run that `trackio.init()` started. Warnings are alerts, one for each flag at a step."""

    name = "trackio"

    def __init__(self) -> None:
        super().__init__()
        self._alerted: tuple[int, str] | None = None

    def write(self, record: Record) -> None:
        try:
            super().write(record)
            if record["kind"] == "warning" and self._alerted != (record["step"], record["flag"]):
                self._alerted = (record["step"], record["flag"])
                self._module.alert(
                    title=f"{record['flag']}: {record['name']} head {record['head']}", text=record["message"]
                )
        except RuntimeError as error:
            raise LocaterError(f"trackio: {error}") from None

    def _log(self, values: dict[str, Any], step: int) -> None:
        self._module.log(values, step=step)


def imported(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise LocaterError(f"{package} is not installed: pip install {package}") from None
