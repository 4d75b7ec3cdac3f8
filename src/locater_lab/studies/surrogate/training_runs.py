"""Models that are trained to test the surrogate on: docs/results/surrogate-plan.md. Each run leaves one line of JSON
with the figures of its heads, and no weights.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from locater.errors import LocaterError, first_line
from locater.inputs.text import Batch, read_text
from locater_lab.engine.reproduction import round_numbers
from locater_lab.engine.runs import Row, machine
from locater_lab.studies.surrogate.head_predictions import measure_heads
from locater_lab.train.data import open_data
from locater_lab.train.loop import DivergedError, run
from locater_lab.train.plan import Plan
from locater_lab.train.sweep import append_line, read_lines

TEXT, IMAGES = "articles.txt", "fashion.npz"
GATHERED, MEASURED = 4096, 8192  # tokens for statistics, and to measure on
BASE = Plan(
    corpus=(TEXT,), vocabulary=4096, layers=6, width=256, heads=4, length=256, batch=32, steps=1500, rate=2.5e-3,
    observe=0, evaluate=0, checkpoint=0, log=500, compile=True,
)  # fmt: skip
ARMS: dict[str, Plan] = {
    "causal 4x128": replace(BASE, layers=4, width=128, rate=4e-3),
    "causal 6x256": BASE,
    "causal 8x384": replace(BASE, layers=8, width=384, heads=6, rate=1.5e-3),
    "causal 12x512": replace(BASE, layers=12, width=512, heads=8, rate=1e-3),
    "masked 6x256": replace(BASE, task="masked"),
    "image 6x192": replace(
        BASE, task="image", corpus=(), vocabulary=256, length=128, images=IMAGES, width=192, heads=6, batch=128, rate=5e-4
    ),
    "learned 6x256": replace(BASE, positions="learned"),
    "small heads 6x256": replace(BASE, heads=16),
    "causal 6x256, seed 1": replace(BASE, seed=1),
}  # fmt: skip


def train_all(
    out: Path,
    data: Path,
    jobs: int,
    characters: int = 24_000_000,
    arms: dict[str, Plan] = ARMS,
    log: Callable[[str], None] = print,
) -> None:
    """Train every arm that has no line in `out`, `jobs` at a time. `data` is a folder that holds articles.txt.xz and
    fashion.npz, directly or one level down.
    """
    done = {line["options"] for line in map(_with_options, read_lines(out))}
    missing = {name: plan for name, plan in arms.items() if _options_text(plan, characters) not in done}
    if not missing:
        log("every run has its line")
        return
    broken = []
    with tempfile.TemporaryDirectory(prefix="locater-surrogate-") as folder:
        placed = _prepare_plans(missing, data, Path(folder), characters)
        with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
            running = {pool.submit(train, placed[name], Path(folder)): name for name in missing}
            for future in as_completed(running):
                name = running[future]
                try:
                    line = {"arm": name, "options": _options_text(missing[name], characters), **future.result()}
                except (
                    Exception
                ) as error:  # anything can end a run (compilers, memory); it has no line and is run again
                    broken.append(f"{name}: {type(error).__name__}: {first_line(error)}")
                    log(broken[-1])
                    continue
                append_line(out, round_numbers(line, 5))
                trained = (
                    f"loss {line['report_loss']:.4f}, {line['seconds']:.0f} s"
                    if line["status"] == "done"
                    else "diverged"
                )
                log(f"{name}: {trained}")
    if broken:
        raise LocaterError(f"{len(broken)} runs broke and can be run again, the first: {broken[0]}")


def _prepare_plans(arms: dict[str, Plan], data: Path, folder: Path, characters: int) -> dict[str, Plan]:
    """The plans with their data where it is. Text is turned into tokens here, once: forked processes inherit them."""
    torch.set_num_threads(1)  # a process with a team of threads cannot be forked safely
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    placed = {name: _with_local_data(plan, data, folder, characters) for name, plan in arms.items()}
    text = next((plan for plan in placed.values() if plan.corpus), None)
    if text is not None:
        open_data(text, folder, torch.device("cpu"))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return placed


def train(plan: Plan, folder: Path) -> dict[str, Any]:
    """Train one model, then measure its heads on the CPU, in float32."""
    from locater_lab.train import load

    plan = replace(plan, out=tempfile.mkdtemp(dir=folder))
    try:
        result = run(plan)
    except DivergedError as error:
        return {"status": "diverged", "message": str(error).replace(str(folder), "run"), **machine(plan)}
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    model = load(result.model)
    figures = measure_heads(model, split_batches(plan, "select", GATHERED), split_batches(plan, "report", MEASURED))
    shutil.rmtree(plan.out, ignore_errors=True)
    return {
        "status": "done",
        "report_loss": result.report_loss,
        "accuracy": result.accuracy,
        "seconds": result.seconds,
        "trained_tokens": result.tokens,
        **figures,
        **machine(plan),
    }


def split_batches(plan: Plan, split: str, tokens: int) -> list[Batch]:
    """The beginning of a split, as batches that the model takes: about so many tokens, or all there are."""
    data = open_data(plan, Path(plan.out), torch.device("cpu"))
    each = plan.length if plan.task != "image" else _patch_count(plan, data.facts["shape"])
    return [{"inputs": inputs} for inputs, _ in data.windows(split, max(1, tokens // each))]


def _patch_count(plan: Plan, shape: list[int]) -> int:
    return shape[0] * shape[1] // plan.patch**2


def _with_local_data(plan: Plan, data: Path, folder: Path, characters: int) -> Plan:
    """The plan with its data where it is. Text is cut after so many characters, at the end of an article."""
    if plan.images is not None:
        return replace(plan, images=str(_find_file(data, plan.images)))
    path = folder / TEXT
    if not path.is_file():
        text = read_text(_find_file(data, f"{TEXT}.xz"))
        end = text.find("\n\n", characters)
        path.write_text(text if end < 0 else text[:end], encoding="utf-8")
    return replace(plan, corpus=(str(path),))


def _find_file(data: Path, name: str) -> Path:
    path = next((path for path in (data / name, *sorted(data.glob(f"*/{name}"))) if path.is_file()), None)
    if path is None:
        raise LocaterError(f"{data}: no {name} in it, nor one level down: give --data FOLDER")
    return path


def _options_text(plan: Plan, characters: int) -> str:
    """What decides a run: options that are not a plan's defaults, and how much text there was."""
    options = Row("surrogate", "", plan).options
    return json.dumps({**options, "characters": characters if plan.corpus else None}, sort_keys=True)


def _with_options(line: dict[str, Any]) -> dict[str, Any]:
    return {"options": "", **line}
