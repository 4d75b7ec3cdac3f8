"""Size of the page of checkpoints, and the time until a browser shows it, for two sizes of runs.

python benchmarks/trajectory_page.py       about 20 s; needs playwright and Chromium
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from locater.report.trajectory import trajectory_page
from locater.verbs.scan_result import NUMERIC_COLUMNS
from locater.verbs.trajectory import trajectory

SIZES = ((50, 8, 8), (150, 32, 32))  # checkpoints, layers, heads in a layer


def made_rows(steps: int, layers: int, heads: int) -> list[dict[str, Any]]:
    """Numbers that walk at random from step to step, none like another; one head in seven has a flag that comes and
    goes.
    """
    rng = np.random.default_rng(0)
    walks = rng.normal(size=(steps, layers, heads, len(NUMERIC_COLUMNS))).cumsum(0) * 0.05
    raised = rng.random((steps, layers, heads)) < 1 / 7
    rows = []
    for step in range(steps):
        place = {"source": f"run/step-{step * 1000}", "run": "run", "step": step * 1000, "digest": str(step)}
        for layer in range(layers):
            for head in range(heads):
                numbers = dict(zip(NUMERIC_COLUMNS, np.exp(walks[step, layer, head]).tolist(), strict=True))
                flags = ["sharp"] if raised[step, layer, head] else []
                which = {"layer": layer, "head": head, "kind": "self", "width": 4096, "head_dim": 128}
                rows.append({**which, **numbers, "flags": flags, "faults": flags, **place, "layer_name": str(layer)})
    return rows


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def main() -> None:
    from playwright.sync_api import sync_playwright

    print(f"processor: {processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with sync_playwright() as play, tempfile.TemporaryDirectory() as folder:
        program = shutil.which("chromium-headless-shell") or shutil.which("chromium")
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = play.chromium.launch(executable_path=program, args=[*sandbox, "--disable-gpu"])
        for size in SIZES:
            rows = made_rows(*size)
            start = time.perf_counter()
            document = trajectory(rows, {}, length=256)
            middle = time.perf_counter()
            text = trajectory_page(document)
            made = time.perf_counter()
            path = Path(folder) / "page.html"
            path.write_text(text, encoding="utf-8")
            page = browser.new_context(offline=True, viewport={"width": 1320, "height": 900}).new_page()
            opened = time.perf_counter()
            page.goto(path.as_uri())
            page.wait_for_selector("#map-a image")
            drawn = time.perf_counter() - opened
            page.wait_for_selector("html[data-ready]")
            ready = time.perf_counter() - opened
            paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
            slide = page.evaluate(
                "(() => { const t = performance.now(); for (let i = 0; i < 20; i++) slide(-1); return (performance.now() - t) / 20 })()"
            )
            print(
                f"{size[0]} checkpoints x {size[1] * size[2]:,} heads: page {len(text) / 1e6:.2f} MB; document made in "
                f"{middle - start:.1f} s, page in {made - middle:.1f} s; first paint {paint:.0f} ms, map drawn {drawn * 1e3:.0f} ms, "
                f"all columns {ready * 1e3:.0f} ms, one step of the slider {slide:.0f} ms"
            )


if __name__ == "__main__":
    main()
