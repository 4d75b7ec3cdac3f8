"""One training run in this process, and the line that is kept of it."""

from __future__ import annotations

import hashlib
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import locater
from locater.errors import LocaterError
from locater.runs.run_log import LOG, read_run
from locater.version import __version__
from locater_lab.train.measured import SINK
from locater_lab.train.plan import Plan

KEPT = ("train_loss", "select_loss", "report_loss", "accuracy", "history", "seconds", "parameters", "measures")
TEXTS = ("corpus", "select", "report")  # fields of a plan that name files of text
SAMPLES = 10  # images that are drawn from a model that denoises

_trained: list[tuple[Any, ...]] = []  # controls, mechanism and sizes of the last run of this process


def train(held: Mapping[str, Any], data: str) -> dict[str, Any]:
    """One run in this process; its weights are read and thrown away."""
    import torch

    from locater_lab.train.loop import DivergedError, run

    plan = Plan.from_dict(held)
    kind = (
        *(plan.control, plan.attention, plan.norm, plan.mlp, plan.fusion, plan.task, plan.heads, plan.convert),
        # of another size graphs would be for any size, and slower
        *(plan.layers, plan.width, plan.batch, plan.length, plan.positions),
    )
    if plan.compile and _trained != [kind]:
        torch._dynamo.reset()  # graphs of other controls are of no use, and too many of them are refused
    _trained[:] = [kind]
    folder = Path(tempfile.mkdtemp(prefix="locater-run-"))
    try:
        result = run(placed(plan, Path(data), folder))
        found = {"status": "done", **{name: getattr(result, name) for name in KEPT}, "entropy": result.report_entropy}
        observed: dict[str, Any] = curves(folder / LOG) if plan.observe else {}
        if result.conversion is not None:
            observed["conversion"] = result.conversion
        if plan.task == "diffusion" and plan.seed == 0:
            observed["samples"] = samples(result.model, plan.device)
        return {**found, **observed, "heads": moments(result.model), **machine(plan)}
    except DivergedError as error:
        return {"status": "diverged", "message": str(error).replace(str(folder), "run"), **machine(plan)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def samples(model: str, device: str) -> str:
    """A few images drawn from a model of --task diffusion, as a strip."""
    from locater_lab.engine.pictures import strip_of
    from locater_lab.models.loading import load
    from locater_lab.models.sampling import sample_images
    from locater_lab.train.recipe import device_of

    return strip_of(sample_images(load(model).to(device_of(device)), SAMPLES))


def curves(log: Path) -> dict[str, list[tuple[int, float]]]:
    """Means over heads at each observed step: `entropies` in nats, `sinks`, the weight on the first token, and
    `sink_rates`, the share of heads in which that is a sink.
    """
    steps = read_run(log).steps
    means = {name: _means(steps, column) for name, column in (("entropies", "entropy"), ("sinks", "sink"))}
    return {**means, "sink_rates": _means(steps, "sink", lambda weight: float(weight > SINK))}


def _means(
    steps: Sequence[Mapping[str, Any]], column: str, of: Callable[[float], float] = float
) -> list[tuple[int, float]]:
    by_step = [(step["step"], [of(x) for row in step["heads"][column] for x in row if x is not None]) for step in steps]
    return [(step, statistics.fmean(values)) for step, values in by_step if values]


def placed(plan: Plan, data: Path, out: Path) -> Plan:
    """The plan with its data where it is."""
    images = None if plan.images is None else str(data / plan.images)
    corpus, select, report = (tuple(str(data / name) for name in getattr(plan, part)) for part in TEXTS)
    return replace(plan, out=str(out), corpus=corpus, select=select, report=report, images=images)


def moments(model: str) -> dict[str, float] | None:
    """Means over heads of the moments in logit units, from the weights as they were saved; None where heads are not
    read.
    """
    from locater.commands.scanning import scan

    try:
        rows = scan(model).rows
    except LocaterError:
        return None
    return {
        name: statistics.fmean(float(getattr(row, name)) for row in rows) for name in ("M", "S", "F", "concentration")
    }


def machine(plan: Plan) -> dict[str, str]:
    """What a number may depend on besides its plan."""
    from locater_lab.train.recipe import device_of

    return versions(device_of(plan.device).type)


def versions(kind: str) -> dict[str, str]:
    """The device of this kind (`cuda`, `cpu`), versions, and the code (a hash of the package's files)."""
    import torch

    device = torch.cuda.get_device_name() if kind == "cuda" else kind
    known = {
        "device": device,
        "torch": torch.__version__,
        "locater": __version__,
        "code": code_of(Path(locater.__file__)),
    }
    commit = _commit(Path(locater.__file__).parent)
    return {**known, "commit": commit} if commit else known


@cache
def code_of(package: Path) -> str:
    """The first 12 digits of a SHA-256 over the sources of a package, given its __init__.py."""
    digest = hashlib.sha256()
    for path in sorted(package.parent.rglob("*.py")):
        digest.update(path.relative_to(package.parent).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


@cache
def _commit(folder: Path) -> str | None:
    """The commit of the tree that a package runs from, and whether its files differ from it; None outside of one."""
    try:
        done = subprocess.run(["git", "-C", folder, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0 or not done.stdout.strip():
        return None
    changes = subprocess.run(["git", "-C", folder, "status", "--porcelain", "--", "."], capture_output=True, timeout=10)
    return done.stdout.strip()[:12] + (" and changes" if changes.stdout else "")
