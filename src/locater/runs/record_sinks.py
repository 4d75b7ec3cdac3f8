"""Where the records of a training run go: a JSON-lines log, TensorBoard, W&B, trackio, MLflow.

`read_run` and `Run` (runs/run_log.py), which read a log back, are also imported from here.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from locater.errors import LocaterError
from locater.numerics import finite_or_none
from locater.runs.records import Record, is_run, line_of, shape_of
from locater.runs.run_log import LOG, Run, read_first_record, read_run

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "JsonlSink",
    "MlflowSink",
    "Run",
    "Sink",
    "TensorBoardSink",
    "TrackioSink",
    "WandbSink",
    "flat_scalars",
    "open_sink",
    "read_run",
]

# The numbers of a record as flat scalars: few, and named so that a tracker groups them by meaning.

BOTH = ("min", "max")
# Which extreme of a column shows that a head fails. Columns that are not listed have both.
EXTREMES: dict[str, tuple[str, ...]] = {
    "entropy_ratio": ("min",),
    "max_logit": ("max",),
    "spread": ("max",),
    "sink": ("max",),
    "participation": ("min",),
    "entropy": (),  # the ratio says the same for any number of visible keys
    "distance": (),
}


def flat_scalars(record: Record, layers: list[int]) -> dict[str, float]:
    """Scalars of a record by name, without nulls; `layers` are the numbers of the layers.

    `attention/COLUMN/min` or `/max` is the worst head of the whole model. `layer_COLUMN/mean/03` is the mean over the
    heads of layer 3, and `layer_COLUMN/min/03` its worst head: trackers put the same number of all layers side by side.

    >>> record = {"kind": "step", "step": 5, "loss": 2.0, "scalars": {}, "heads": {"sink": [[0.25, None, 0.75]]}}
    >>> flat_scalars(record, [3])
    {'loss': 2.0, 'attention/sink/max': 0.75, 'layer_sink/mean/03': 0.5, 'layer_sink/max/03': 0.75}
    """
    scalars = {"loss": record.get("loss"), **(record.get("scalars") or {})}
    if record["kind"] == "warning":
        scalars[f"warning/{record['flag']}"] = record.get("value")
    columns = {
        column: {layer: _known_numbers(row) for layer, row in zip(layers, rows, strict=False)}
        for column, rows in (record.get("heads") or {}).items()
    }
    ordered = [*(name for name in EXTREMES if name in columns), *(name for name in columns if name not in EXTREMES)]
    for column in ordered:
        scalars |= _model_scalars(column, columns[column])
    for column in ordered:
        scalars |= _layer_scalars(column, columns[column])
    return {
        name: number for name, number in scalars.items() if number is not None and finite_or_none(number) is not None
    }


def _model_scalars(column: str, rows: dict[int, list[float]]) -> Iterator[tuple[str, float]]:
    heads = [x for row in rows.values() for x in row]
    for end in EXTREMES.get(column, ()) if heads else ():
        yield f"attention/{column}/{end}", _extreme(end, heads)


def _layer_scalars(column: str, rows: dict[int, list[float]]) -> Iterator[tuple[str, float]]:
    for layer, row in rows.items():
        if row:
            yield f"layer_{column}/mean/{layer:02d}", sum(row) / len(row)
            for end in EXTREMES.get(column, BOTH):
                yield f"layer_{column}/{end}/{layer:02d}", _extreme(end, row)


def _known_numbers(row: Iterable[float | None] | None) -> list[float]:
    return [x for x in row or () if x is not None and finite_or_none(x) is not None]


def _extreme(end: str, values: list[float]) -> float:
    return min(values) if end == "min" else max(values)


# Entropy of a run as two small pictures, for trackers: layers over steps, and every head at the last step.

COLUMN = "entropy_ratio"
GROWTH = 1.15  # new pictures once the number of observed steps has grown by this factor
WIDTH, HEIGHT, LAYER = 600, (192, 768), 32  # pixels: of a map, its least and largest height, one layer
LEFT, TOP, BOTTOM, TEXT = 56, 36, 72, 22  # trackers show pictures at half of this size or less
INK, PAPER, UNKNOWN = (40, 44, 52), (255, 255, 255), (200, 200, 200)
STOPS = (0.0, 0.1, 0.35, 0.65, 1.0)  # of the colour scale: bright means that heads look at few tokens
COLOURS = ((253, 231, 37), (253, 174, 50), (204, 71, 120), (92, 60, 150), (20, 26, 70))


class EntropyPictures:
    """Collects the entropy ratios of a run. `draw(record)` now and then returns two pictures by name, otherwise none.

    They are drawn at the first observed step, then whenever the run has grown by a seventh (so that a long run does
    not fill the disk with pictures), and at the end.
    """

    def __init__(self, header: Record) -> None:
        self.layers: list[int] = [entry["layer"] for entry in header["layers"]]
        self.steps: list[int] = []
        self.means: list[list[float]] = []  # by observed step and layer; NaN if unknown
        self.heads: list[list[float]] = []  # at the last observed step
        self.drawn = 0  # observed steps at the last pictures

    def draw(self, record: Record) -> dict[str, Image]:
        rows = (record.get("heads") or {}).get(COLUMN)
        if rows:
            self.steps.append(record["step"])
            self.heads = [[math.nan if x is None else float(x) for x in row or ()] for row in rows]
            self.means.append([_mean(row) for row in self.heads])
        count = len(self.steps)
        due = count >= GROWTH * self.drawn if record["kind"] == "step" else record["kind"] == "end"
        if not due or count <= self.drawn:
            return {}
        self.drawn = count
        return {"entropy_by_layer": self._draw_history(), "entropy_by_head": self._draw_heads()}

    def _draw_history(self) -> Image:
        rows = [[step[layer] for step in self.means] for layer in range(len(self.layers))]
        title = "entropy ratio of layers, mean of heads"
        return self._picture(rows, title, (f"step {self.steps[0]}", str(self.steps[-1])))

    def _draw_heads(self) -> Image:
        count = max(1, *map(len, self.heads))
        rows = [row + [math.nan] * (count - len(row)) for row in self.heads]
        return self._picture(rows, f"entropy ratio of heads, step {self.steps[-1]}", ("head 0", str(count - 1)))

    def _picture(self, rows: list[list[float]], title: str, ends: tuple[str, str]) -> Image:
        """A map with its title, layer numbers on the left, labels below, and the colour scale."""
        from PIL import Image, ImageDraw, ImageFont

        height = min(max(HEIGHT[0], LAYER * len(rows)), HEIGHT[1])
        low, right = TOP + height, LEFT + WIDTH
        picture = Image.new("RGB", (right + 24, low + BOTTOM), PAPER)
        picture.paste(_draw_map(rows, (WIDTH, height)), (LEFT, TOP))
        draw = ImageDraw.Draw(picture)
        text = partial(draw.text, fill=INK, font=ImageFont.load_default(TEXT))
        text((LEFT, 4), title)
        for at in range(0, len(rows), math.ceil(TEXT * len(rows) / height)):  # as many labels as fit
            text((LEFT - 10, TOP + (at + 0.5) * height / len(rows)), str(self.layers[at]), anchor="rm")
        text((LEFT, low + 4), ends[0])
        text((right, low + 4), ends[1], anchor="ra")
        for x in range(200):
            colour = tuple(_colours(x / 199).astype(int).tolist())
            draw.line([(LEFT + 120 + x, low + 42), (LEFT + 120 + x, low + 60)], fill=colour)
        text((LEFT, low + 38), "one-hot 0")
        text((LEFT + 330, low + 38), "1 uniform")
        return picture


def _draw_map(rows: list[list[float]], size: tuple[int, int]) -> Image:
    """Rows of ratios as coloured cells. With more columns than pixels, a pixel shows the mean of several."""
    from PIL import Image

    cells = Image.fromarray(np.asarray(rows, dtype=np.float32))
    numbers = np.asarray(cells.resize(size, Image.Resampling.BOX))
    painted = np.where(np.isfinite(numbers)[..., None], _colours(numbers), UNKNOWN)
    return Image.fromarray(painted.round().astype(np.uint8))


def _colours(ratios: Any) -> Any:
    """Red, green and blue along a last axis."""
    return np.stack([np.interp(ratios, STOPS, channel) for channel in zip(*COLOURS, strict=True)], -1)


def _mean(row: list[float]) -> float:
    known = [x for x in row if math.isfinite(x)]
    return sum(known) / len(known) if known else math.nan


# The trackers.

CHARTS = {  # TensorBoard's tab "Custom Scalars": a line per layer
    "entropy ratio, mean of each layer": "layer_entropy_ratio/mean/.*",
    "entropy ratio, lowest head of each layer": "layer_entropy_ratio/min/.*",
    "largest logit of each layer": "layer_max_logit/max/.*",
    "logit spread from weights, largest of each layer": "layer_spread/max/.*",
}


class _Scalars:
    """What all trackers share: flat numbers of each record, and now and then two pictures."""

    def __init__(self) -> None:
        self._layers: list[int] = []
        self._pictures: EntropyPictures | None = None

    def _numbers(self, record: Record) -> dict[str, float]:
        if record["kind"] == "run":
            self._layers = [entry["layer"] for entry in record["layers"]]
            with_pictures = COLUMN in record["columns"] and find_spec("PIL") is not None
            self._pictures = EntropyPictures(record) if with_pictures else None
        return flat_scalars(record, self._layers)

    def _new_pictures(self, record: Record) -> dict[str, Image]:
        pictures = self._pictures.draw(record) if self._pictures is not None else {}
        return {f"attention/{name}": picture for name, picture in pictures.items()}


class TensorBoardSink(_Scalars):
    """Scalars such as `layer_entropy_ratio/mean/03`, `loss` and `grad_norm`, charts with a line per layer, pictures of
    all heads; warnings as text.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__()
        module = import_tracker("torch.utils.tensorboard", "tensorboard")
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
        for name, picture in self._new_pictures(record).items():
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
        self._module = import_tracker(self.name, self.name)

    def write(self, record: Record) -> None:
        values: dict[str, Any] = {f"locater/{name}": number for name, number in self._numbers(record).items()}
        values |= {f"locater/{name}": self._module.Image(x) for name, x in self._new_pictures(record).items()}
        if values:
            self._log(values, record["step"])

    def _log(self, values: dict[str, Any], step: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Do nothing: the run belongs to whoever started it."""


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


class MlflowSink(_Tracker):
    """MLflow: the run that `mlflow.start_run()` started. Warnings are a text file of the run."""

    name = "mlflow"

    def __init__(self) -> None:
        super().__init__()
        if self._module.active_run() is None:
            raise LocaterError("no MLflow run is active: call mlflow.start_run() before the first record")
        self._run, self._messages = self._module.active_run().info.run_id, ""

    def write(self, record: Record) -> None:
        step, client = record.get("step"), self._module.MlflowClient()
        known = {f"locater/{name}": number for name, number in self._numbers(record).items()}
        # a name may have letters, digits and - . / : of signs
        values = {name.replace(">", " above ").replace("<", " below "): number for name, number in known.items()}
        self._module.log_metrics(values, step=step, run_id=self._run) if values else None
        for name, picture in self._new_pictures(record).items():
            client.log_image(self._run, picture, f"locater/{name}-{step:08d}.png")
        if record["kind"] == "warning":
            self._messages += f"{record['message']}\n"
            client.log_text(self._run, self._messages, "locater/warnings.txt")


def import_tracker(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise LocaterError(f"{package} is not installed: pip install {package}") from None


# Sinks by name, the log, and all sinks of a run.

CHOICES = "a path that ends in .jsonl, tensorboard:FOLDER, wandb, trackio, mlflow"


@runtime_checkable
class Sink(Protocol):
    """Anything that records can be written to. `close` may be called twice."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


def open_sink(spec: str | os.PathLike[str] | Sink) -> Sink:
    """The sink with this name: a path that ends in .jsonl, `tensorboard:FOLDER`, `wandb`, `trackio`, `mlflow`. A sink
    is returned unchanged.
    """
    if not isinstance(spec, str | os.PathLike):
        if isinstance(spec, Sink):
            return spec
        raise LocaterError(
            f"a sink is {CHOICES}, or an object with write(record) and close(), not {type(spec).__name__}"
        )
    text = os.fspath(spec)
    if text.endswith(".jsonl"):
        return JsonlSink(text)
    kind, _, folder = text.partition(":")
    if kind == "tensorboard" and folder:
        return TensorBoardSink(folder)
    if text == "wandb":
        return WandbSink()
    if text == "trackio":
        return TrackioSink()
    if text == "mlflow":
        return MlflowSink()
    raise LocaterError(f"no sink is called {text!r}: give {CHOICES}")


class JsonlSink:
    """One JSON object per line. Each record is written immediately: a crash costs at most the line being written.

    A run of the same layers and heads continues an existing log and adds a `run` record of its own. Any other run is
    refused.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._header = b""  # a `run` record that could not be written yet; it goes before the next record
        try:
            self._first = read_first_record(self.path)
            self._file = self.path.open("ab", buffering=0)
            if self._ends_inside_line():
                self._append(b"\n")  # the incomplete line stays on its own; read_run() skips it
        except OSError as error:
            raise LocaterError(f"{self.path}: cannot be written ({error.strerror})") from None

    def _ends_inside_line(self) -> bool:
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            file.seek(max(0, size - 1))
            return size > 0 and file.read(1) != b"\n"

    def check(self, header: Record) -> None:
        """Refuse a run whose layers or heads differ from those of the file: a log with both could not be read."""
        if self._first is not None and not same_shape(self._first, header):
            raise LocaterError(
                f"{self.path}: holds a run of {_shape(self._first)}, and this one has {_shape(header)}: "
                'give it a log of its own, such as Monitor("other.jsonl"), or move the old one away'
            )

    def write(self, record: Record) -> None:
        line = line_of(record)
        if is_run(record):
            self.check(record)
            self._header = line
        elif self._header:
            line = self._header + line
        self._append(line)
        self._header = b""

    def _append(self, line: bytes) -> None:
        remaining = memoryview(line)
        try:
            start = self._file.seek(0, os.SEEK_END)
            if os.fstat(self._file.fileno()).st_nlink == 0:  # the file was deleted: records would be lost silently
                raise LocaterError(f"{self.path}: was deleted while the run was writing to it")
            while remaining:
                remaining = remaining[self._file.write(remaining) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(start)  # half a line would make the next record unreadable
            raise LocaterError(f"{self.path}: cannot be written ({error.strerror})") from None

    def close(self) -> None:
        self._file.close()


def same_shape(a: Record, b: Record) -> bool:
    try:
        return shape_of(a) == shape_of(b)
    except (KeyError, TypeError, ValueError):
        return False


def _shape(header: Record) -> str:
    try:
        heads = sorted({entry[1] for entry in shape_of(header)})
    except (KeyError, TypeError, ValueError):
        return "layers that cannot be read"
    count, source = len(header["layers"]), header.get("source", "a model")
    return f"{source} with {count} layer{'s' * (count != 1)} of {' or '.join(map(str, heads)) or 'no'} heads"


class RecordSinks:
    """`specs` are the sinks that the user named; without any, `locater.jsonl` in the run's folder.

    `report(message, about)` is called when something goes wrong. `about` is the sink, so that each is reported once.
    """

    def __init__(self, specs: Sequence[str | os.PathLike[str] | Sink], report: Callable[..., None]) -> None:
        self._specs, self._report = specs, report
        self._sinks: list[Sink] = []

    def __bool__(self) -> bool:
        """Whether any sink is open."""
        return bool(self._sinks)

    def log_hint(self) -> str:
        """Where the log is and how to view it, as the end of a sentence; empty if there is no log."""
        paths = [str(sink.path) for sink in self._sinks if isinstance(sink, JsonlSink)]
        return f"; the log is {paths[0]} (locater watch {shlex.quote(paths[0])})" if paths else ""

    def open(self, folder: Path, header: dict[str, Any]) -> None:
        """Open every sink. A log with the run of another model is refused if the user named it, else avoided."""
        if not self._specs:
            with contextlib.suppress(OSError):  # a folder that cannot be made is reported by the sink
                folder.mkdir(parents=True, exist_ok=True)
        try:
            for spec in self._specs or (self._default_log(folder, header),):
                self._sinks.append(open_sink(spec))
                if isinstance(self._sinks[-1], JsonlSink):
                    self._sinks[-1].check(header)
        except BaseException:
            self.close()
            raise

    def _default_log(self, folder: Path, header: dict[str, Any]) -> Path:
        """`locater.jsonl`; if that has a run of another shape, `locater-2.jsonl` and so on."""
        taken = ""
        for count in itertools.count(1):
            path = folder / (LOG if count == 1 else f"{Path(LOG).stem}-{count}.jsonl")
            previous = read_first_record(path)
            if previous is None or same_shape(previous, header):
                break
            taken = taken or path.name
        if taken:
            self._report(f"{folder / taken} has a run of another model: this run is written to {path}")
        return path

    def write(self, record: dict[str, Any]) -> None:
        for sink in self._sinks:
            try:
                sink.write(record)
            except Exception as error:  # of any tracker: a full disk, a lost connection; the next record is tried
                self._report(f"the run continues without records: {type(sink).__name__}: {error}", about=sink)

    def close(self) -> None:
        """May be called twice."""
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:  # of any tracker: the other sinks are still to be closed
                self._report(f"{type(sink).__name__}: {error}")
        self._sinks = []
