"""Where the records of a training run go: a JSON-lines log, TensorBoard, W&B, trackio. `read_run` reads a log back."""

from __future__ import annotations

import contextlib
import importlib
import os
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from locater.errors import LocaterError
from locater.missing import finite_or_none
from locater.tracking.logged_run import Run
from locater.tracking.records import Record, is_run, line_of, shape_of
from locater.tracking.run_log import first_run, read_run

__all__ = ["JsonlSink", "Run", "Sink", "TensorBoardSink", "TrackioSink", "WandbSink", "flat", "open_sink", "read_run"]

CHOICES = "a path that ends in .jsonl, tensorboard:FOLDER, wandb, trackio"


@runtime_checkable
class Sink(Protocol):
    """Anything that records can be written to. `close` may be called twice."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


def open_sink(spec: str | os.PathLike[str] | Sink) -> Sink:
    """The sink of a name: a path that ends in .jsonl, `tensorboard:FOLDER`, `wandb`, `trackio`. A sink is returned as
    it is.
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
    raise LocaterError(f"no sink {text!r}: give {CHOICES}")


class JsonlSink:
    """One JSON object per line. Each record is written at once: a crash costs at most the line being written.

    An existing log is continued by a run of the same layers and heads, which adds a `run` record of its own. Any other
    run is refused.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._header = b""  # a `run` record that could not be written yet, to go before the next record
        try:
            self._first = first_run(self.path)
            self._file = self.path.open("ab", buffering=0)
            if self._ends_inside_line():
                self._put(b"\n")  # the incomplete line stays on its own; read_run() skips it
        except OSError as error:
            raise LocaterError(f"{self.path}: cannot be written ({error.strerror})") from None

    def _ends_inside_line(self) -> bool:
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            file.seek(max(0, size - 1))
            return size > 0 and file.read(1) != b"\n"

    def check(self, header: Record) -> None:
        """Refuse a run whose layers or heads are not those of the file: with both in it, it could not be read."""
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
        self._put(line)
        self._header = b""

    def _put(self, line: bytes) -> None:
        remaining = memoryview(line)
        try:
            start = self._file.seek(0, os.SEEK_END)
            if os.fstat(self._file.fileno()).st_nlink == 0:  # the file was deleted: records would be lost unnoticed
                raise LocaterError(f"{self.path}: was removed while the run wrote to it")
            while remaining:
                remaining = remaining[self._file.write(remaining) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(start)  # half a line would make the next record unreadable
            raise LocaterError(f"{self.path}: cannot be written ({error.strerror})") from None

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """Scalars such as `layer/03/entropy_ratio/mean`, `loss` and `grad_norm`; warnings as text."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        module = _import("torch.utils.tensorboard", "tensorboard")
        self._writer = module.SummaryWriter(os.fspath(folder))
        self._layers: list[int] = []

    def write(self, record: Record) -> None:
        if record["kind"] == "run":
            self._layers = [entry["layer"] for entry in record["layers"]]
        for name, number in flat(record, self._layers).items():
            self._writer.add_scalar(name, number, record["step"], walltime=record.get("time"))
        if record["kind"] == "warning":
            self._writer.add_text("warnings", str(record["message"]), record["step"], walltime=record.get("time"))
        if record["kind"] in ("warning", "end"):
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Tracker:
    """Flat scalars under `locater/` in the tracker's active run, with the training step as `locater/step`."""

    name = ""

    def __init__(self) -> None:
        self._module = _import(self.name, self.name)
        self._layers: list[int] = []

    def write(self, record: Record) -> None:
        if record["kind"] == "run":
            self._layers = [entry["layer"] for entry in record["layers"]]
        numbers = flat(record, self._layers)
        if numbers:
            self._module.log(
                {"locater/step": record["step"], **{f"locater/{name}": number for name, number in numbers.items()}}
            )

    def close(self) -> None:
        """Nothing to do: the run belongs to whoever started it."""


class WandbSink(_Tracker):
    """Weights & Biases: the run that `wandb.init()` started."""

    name = "wandb"

    def __init__(self) -> None:
        super().__init__()
        if self._module.run is None:
            raise LocaterError("no W&B run is active: call wandb.init() before the first record")
        self._module.run.define_metric("locater/*", step_metric="locater/step")


class TrackioSink(_Tracker):
    """trackio: the run that `trackio.init()` started."""

    name = "trackio"

    def write(self, record: Record) -> None:
        try:
            super().write(record)
        except RuntimeError as error:
            raise LocaterError(f"trackio: {error}") from None


def flat(record: Record, layers: list[int]) -> dict[str, float]:
    """Scalars of a record by name, without nulls; `layers` are the numbers of the layers.

    >>> flat({"kind": "step", "step": 5, "loss": 2.0, "scalars": {}, "heads": {"sink": [[0.25, None, 0.75]]}}, [3])
    {'loss': 2.0, 'layer/03/sink/mean': 0.5, 'layer/03/sink/min': 0.25, 'layer/03/sink/max': 0.75}
    """
    scalars = {"loss": record.get("loss"), **(record.get("scalars") or {})}
    if record["kind"] == "warning":
        scalars[f"warning/{record['flag']}"] = record.get("value")
    for column, rows in (record.get("heads") or {}).items():
        for layer, row in zip(layers, rows, strict=False):
            known = [x for x in row or () if finite_or_none(x) is not None]
            if known:
                name = f"layer/{layer:02d}/{column}"
                scalars[f"{name}/mean"] = sum(known) / len(known)
                scalars |= {f"{name}/min": min(known), f"{name}/max": max(known)}
    return {name: cast(float, number) for name, number in scalars.items() if finite_or_none(number) is not None}


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


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise LocaterError(f"{package} is not installed: pip install {package}") from None
