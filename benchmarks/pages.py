"""Time to make pages of many heads, their size, and the time until a browser shows the page of checkpoints.

    python benchmarks/pages.py              # writes benchmarks/results/pages.json

The page of a scan has 1,024 heads with eigenvalues and drives; pages of checkpoints have numbers that walk at random,
which compress badly. Without playwright and Chromium the times in the browser are missing.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import command_line, machine, place, write

import locater
from locater.report.trajectory import trajectory_page
from locater.results.scan import NUMERIC_COLUMNS, Scan
from locater.results.trajectory import trajectory

SIZES = ((50, 8, 8), (150, 32, 32))  # checkpoints, layers, heads in a layer
LAYERS, HEADS, SIZE = 32, 32, 128  # of the page of a scan
STEPS = "(() => { const t = performance.now(); for (let i = 0; i < 20; i++) slide(-1); return (performance.now() - t) / 20 })()"


def make_rows(steps: int, layers: int, heads: int) -> list[dict[str, Any]]:
    """Numbers that walk at random from step to step, none like another; one head in seven has a flag that comes and
    goes.
    """
    rng = np.random.default_rng(0)
    walks = rng.normal(size=(steps, layers, heads, len(NUMERIC_COLUMNS))).cumsum(0) * 0.05
    raised = rng.random((steps, layers, heads)) < 1 / 7
    rows = []
    for step in range(steps):
        where = {"source": f"run/step-{step * 1000}", "run": "run", "step": step * 1000, "digest": str(step)}
        for layer in range(layers):
            for head in range(heads):
                numbers = dict(zip(NUMERIC_COLUMNS, np.exp(walks[step, layer, head]).tolist(), strict=True))
                flags = ["sharp"] if raised[step, layer, head] else []
                which = {"layer": layer, "head": head, "kind": "self", "width": 4096, "head_dim": 128}
                rows.append({**which, **numbers, "flags": flags, "faults": flags, **where, "layer_name": str(layer)})
    return rows


def large_scan() -> Scan:
    """A scan of LAYERS x HEADS heads of SIZE, from one layer of a random Llama that stands for all."""
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    shape = {"hidden_size": 1024, "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    model = LlamaModel(LlamaConfig(**shape, head_dim=SIZE, intermediate_size=8, vocab_size=8))
    one = locater.scan(model, details=True)
    rows = [replace(row, layer=layer) for layer in range(LAYERS) for row in one.rows]
    return replace(one, rows=rows, layers=[{**one.layers[0], "layer": layer} for layer in range(LAYERS)])


def scan_figures() -> dict[str, Any]:
    scan = large_scan()
    began, worked = time.perf_counter(), time.process_time()
    text = scan.page()
    seconds, worked = time.perf_counter() - began, time.process_time() - worked
    return {"heads": len(scan.rows), "seconds": seconds, "processor_seconds": worked, "megabytes": len(text) / 1e6}


def trajectory_figures(size: tuple[int, int, int], browser: Any, folder: str) -> dict[str, Any]:
    rows = make_rows(*size)
    marks = [time.perf_counter()]
    document = trajectory(rows, {}, length=256)
    marks.append(time.perf_counter())
    text = trajectory_page(document)
    marks.append(time.perf_counter())
    figures = {
        "checkpoints": size[0],
        "heads": size[1] * size[2],
        "megabytes": len(text) / 1e6,
        "document_seconds": marks[1] - marks[0],
        "page_seconds": marks[2] - marks[1],
    }
    return figures if browser is None else figures | time_page(browser, text, Path(folder) / "page.html")


def time_page(browser: Any, text: str, path: Path) -> dict[str, float]:
    """Milliseconds in a browser."""
    path.write_text(text, encoding="utf-8")
    page = browser.new_context(offline=True, viewport={"width": 1320, "height": 900}).new_page()
    opened = time.perf_counter()
    page.goto(path.as_uri())
    page.wait_for_selector("#map-a image")
    drawn = time.perf_counter() - opened
    page.wait_for_selector("html[data-ready]")
    ready = time.perf_counter() - opened
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    times = {"first_paint_ms": paint, "map_ms": 1e3 * drawn, "all_columns_ms": 1e3 * ready}
    return times | {"slider_step_ms": page.evaluate(STEPS)}


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser; None where there is none."""
    with suppress(ImportError):
        from playwright.sync_api import sync_playwright

        program = shutil.which("chromium-headless-shell") or shutil.which("chromium")
        if program is not None:
            sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
            with sync_playwright() as play:
                yield play.chromium.launch(executable_path=program, args=[*sandbox, "--disable-gpu"])
                return
    yield None


def main() -> None:
    args = command_line(__doc__, "pages").parse_args()
    results: dict[str, Any] = {"machine": machine(), "scan": scan_figures(), "trajectories": []}
    with chromium() as browser, tempfile.TemporaryDirectory() as folder:
        for size in SIZES[:1] if args.quick else SIZES:
            results["trajectories"].append(trajectory_figures(size, browser, folder))
    results["load"] = os.getloadavg()[0]
    write(results, place(args))


if __name__ == "__main__":
    main()
