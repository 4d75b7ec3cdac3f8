"""The folder of a run, which belongs to one plan and to one process at a time, and the result that is kept in it."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from locater.brief import brief
from locater.errors import LocaterError
from locater.files import write_whole
from locater.inputs.tokenizer import FILE
from locater.runs.run_log import LOG, read_run
from locater.version import SCHEMA, __version__
from locater_lab.train.plan import Plan

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PLAN, RESULT, LOCK = "plan.json", "result.json", ".lock"
PACE = ("out", "keep", "log")  # fields that do not affect the weights: the folder, what stays in it, progress


def plan_difference(plan: Plan, other: Plan) -> str | None:
    """The first option that makes the two plans different runs, in words; None where they are the same run."""
    ours, theirs = plan.to_dict(), other.to_dict()
    return next((f"{n}={theirs[n]!r}, here {ours[n]!r}" for n in ours if n not in PACE and ours[n] != theirs[n]), None)


def run_folder(plan: Plan) -> Path:
    """The folder of a plan's run, which need not exist yet. Refused where it holds another run or cannot be written.
    Nothing is written.
    """
    folder = Path(plan.out)
    if (folder / PLAN).is_file():
        other = plan_difference(plan, Plan.load(folder / PLAN))
        if other is not None and not _took_no_step(folder):
            raise LocaterError(f"{folder}: holds another run ({other}): give another --out, or remove it")
    elif any(folder.glob("step-*")) or (folder / RESULT).is_file():
        raise LocaterError(f"{folder}: holds checkpoints but no {PLAN}: give another --out")
    if not (folder / RESULT).is_file():
        _check_free(folder)
    return folder


def _check_free(folder: Path) -> None:
    """Refuse a folder that cannot be written to, or that another process trains in: now, rather than after the text is
    read.
    """
    existing = next((path for path in (folder, *folder.parents) if os.path.lexists(path)), folder)
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        why = "cannot be written to" if existing.is_dir() else "is no folder"
        raise LocaterError(f"{folder}: cannot be made ({existing} {why}): give another --out")
    if (folder / LOCK).is_file():
        with locked_folder(folder):
            pass


@contextmanager
def claimed_folder(plan: Plan) -> Iterator[None]:
    """Create the run's folder and reserve it for this plan. Leftovers of another plan that took no step are removed."""
    folder = Path(plan.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LocaterError(f"{folder}: cannot be made ({error.strerror}): give another --out") from None
    with locked_folder(folder):
        path = folder / PLAN
        other = plan_difference(plan, Plan.load(path)) if path.is_file() else None
        if other is not None and not _took_no_step(folder):  # another process has begun since `run_folder`
            raise LocaterError(f"{folder}: holds another run ({other}): give another --out, or remove it")
        if other is not None:
            for name in (LOG, FILE):
                (folder / name).unlink(missing_ok=True)
        if other is not None or not path.is_file():
            write_whole(path, plan.to_json() + "\n")
        yield


def _took_no_step(folder: Path) -> bool:
    """Whether a run was started here and left no checkpoint, no weights, no result and no step in the log."""
    if (
        not (folder / LOCK).is_file()
        or any(folder.glob("step-*"))
        or any((folder / name).exists() for name in (RESULT, "model"))
    ):
        return False
    try:
        return not (folder / LOG).is_file() or not read_run(folder / LOG).losses
    except LocaterError:  # not a log of ours: leave the folder alone
        return False


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Lock a run's folder for this process, and remove temporary folders that a crash left in it."""
    try:
        lock = (folder / LOCK).open("w")
    except OSError as error:
        raise LocaterError(f"{folder}: cannot be written to ({error.strerror}): give another --out") from None
    with lock as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the process ends, however it ends
            except BlockingIOError:
                raise LocaterError(
                    f"{folder}: another process is training in it: wait for it, or give another --out"
                ) from None
        for leftover in (*folder.glob(".*.tmp"), *folder.glob(".*.old")):
            shutil.rmtree(leftover, ignore_errors=True)
        yield


# ---- The result ----


@dataclass(frozen=True)
class Result:
    """The outcome of a run. Losses are those of the final weights, in nats per token (of --task diffusion: squared
    errors): choose settings by `select_loss`,
    publish `report_loss`.
    """

    plan: Plan
    train_loss: float
    select_loss: float
    report_loss: float
    report_entropy: float | None  # of attention, mean over heads, nats
    bits_per_byte: float | None = None  # of text that was learned causally, without unknown words
    accuracy: float | None = None  # of images and texts by class, and of sorted numbers
    conversion: dict[str, Any] | None = None  # --convert: step; report loss and accuracy before and after
    history: tuple[tuple[int, float], ...] = ()  # step and loss on the select split
    parameters: int = 0
    tokens: int = 0  # seen in training
    seconds: float = 0.0  # of training, over all parts of a run that was interrupted
    measures: dict[str, Any] = field(default_factory=dict)  # of maps and residual stream (`train.measures`)
    data: dict[str, Any] = field(default_factory=dict)  # hash of the text, sizes of the splits
    model: str = ""  # folder of the final weights

    __repr__ = brief

    @property
    def perplexity(self) -> float | None:
        """exp of the report loss; None where that is a squared error."""
        return None if self.plan.task == "diffusion" else math.exp(min(self.report_loss, 700.0))

    def to_dict(self) -> dict[str, Any]:
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {
            "schema": SCHEMA,
            "locater": __version__,
            "source": self.model,
            **values,
            "plan": self.plan.to_dict(),
            "history": [list(pair) for pair in self.history],
            "perplexity": self.perplexity,
            "tokens_per_second": self.tokens / self.seconds if self.seconds else None,
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def save(self, path: Path) -> None:
        write_whole(path, self.to_json() + "\n")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        newer = ("measures", "conversion")  # results of earlier versions have none
        values = {item.name: data[item.name] for item in fields(cls) if item.name in data or item.name not in newer}
        history = tuple((step, loss) for step, loss in data["history"])
        return cls(**{**values, "plan": Plan.from_dict(data["plan"]), "history": history})

    @classmethod
    def load(cls, path: Path) -> Self:
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError) as error:
            raise LocaterError(f"{path}: not the result of a run ({error!r}): remove it to train again") from None
