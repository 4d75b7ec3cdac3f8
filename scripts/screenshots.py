"""Take the screenshots of the documentation, in headless Chromium.

.venv/bin/python scripts/screenshots.py [--models FOLDER] [--text FILE] [--only PREFIX]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import locater
from locater.report.trajectory import trajectory_page
from locater.results.trajectory import trajectory
from locater_lab.engine.trained_models import sentence_model, why_unavailable
from locater_lab.train import Plan, run

ROOT = Path(__file__).parents[1]


class HasPage(Protocol):
    def report(self, path: Path) -> None: ...


CHOICES = {"trajectory": "#layer=2&head=4&metric=M&step=500&guide=closed"}
CLIPS = {"trajectory": {"x": 0, "y": 0, "width": 1320, "height": 1290}}  # the lists below are long
PROMPT = "Once upon a time, there was a little girl named Lily. She loved to"
METHODS = ("operator", "relevance", "integrated_gradients", "rollout", "paths")


class Checkpoints:
    """Two runs of 50 checkpoints each, trained here in about two minutes: the second at ten times the rate. Of the
    first, two checkpoints are deleted, one is cut short and one is a copy of the one before it.
    """

    def report(self, path: Path) -> None:
        rows: list[dict[str, Any]] = []
        errors: dict[str, str] = {}
        with tempfile.TemporaryDirectory() as place:
            for name, rate in (("calm", 3e-3), ("hot", 3e-2)):
                folder = Path(place) / name
                size = dict(layers=4, width=64, heads=8, length=64, batch=8, steps=1000, warmup=0.02)
                often = dict(checkpoint=20, keep=0, observe=0, evaluate=0, device="cpu")
                run(Plan(out=str(folder), rate=rate, **size, **often))  # type: ignore[arg-type]
                if name == "calm":
                    damage(folder)
                for source in sorted(folder.glob("step-*")):
                    label = f"{name}/{source.name}"
                    try:
                        rows += checkpoint_rows(source, label, name)
                    except locater.LocaterError as error:
                        errors[label] = str(error).replace(f"{place}/", "")
        path.write_text(trajectory_page(trajectory(rows, errors, length=256)), encoding="utf-8")


def damage(folder: Path) -> None:
    for step in (400, 420):
        shutil.rmtree(folder / f"step-{step:08d}")
    shutil.copy(folder / "step-00000140" / "model.safetensors", folder / "step-00000160")
    cut = folder / "step-00000700" / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:100_000])


def checkpoint_rows(source: Path, label: str, run: str) -> list[dict[str, Any]]:
    result = locater.scan(source)
    digest = hashlib.sha256((source / "model.safetensors").read_bytes()).hexdigest()
    names = {entry["layer"]: entry["name"] for entry in result.layers}
    more = {"source": label, "run": run, "step": int(source.name[5:]), "digest": digest}
    return [{**row, **more, "layer_name": names[row["layer"]]} for row in result.records()]


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", type=Path, default=ROOT.parent / "shared" / "models", help="folder that holds stories260K"
    )
    parser.add_argument("--only", default="", metavar="PREFIX", help="only screenshots whose name begins with it")
    parser.add_argument(
        "--text",
        type=Path,
        default=ROOT.parent / "shared" / "data" / "wikitext-2" / "test.txt.xz",
        help="text that probes run on",
    )
    args = parser.parse_args()
    if why := why_unavailable():
        sys.exit(why)
    stories, minilm = args.models / "stories260K", str(sentence_model())
    label = "WikiText-2"
    shots: list[tuple[str, Callable[[], HasPage], str]] = [
        ("stories260K", lambda: locater.scan(stories), "light"),
        ("all-MiniLM-L6-v2-dark", lambda: locater.scan(minilm), "dark"),
        ("probe-stories260K", lambda: locater.probe(str(stories), args.text, label=label), "light"),
        ("probe-all-MiniLM-L6-v2-dark", lambda: locater.probe(minilm, args.text, label=label), "dark"),
        ("explain-stories260K", lambda: locater.explanations(stories, PROMPT, methods=METHODS), "light"),
        ("trajectory", Checkpoints, "light"),
    ]
    out = ROOT / "docs" / "images"
    out.mkdir(exist_ok=True)
    with sync_playwright() as play, tempfile.TemporaryDirectory() as place:
        browser = play.chromium.launch(
            executable_path=shutil.which("chromium") or shutil.which("chromium-headless-shell"),
            args=["--no-sandbox"] if os.geteuid() == 0 else [],
        )
        for name, make, scheme in shots:
            if args.only and not name.startswith(args.only):
                continue
            page_path = Path(place) / f"{name}.html"
            make().report(page_path)
            context = browser.new_context(offline=True, color_scheme=scheme, viewport={"width": 1320, "height": 900})
            page = context.new_page()
            page.goto(page_path.as_uri() + CHOICES.get(name, ""))
            if name == "trajectory":  # it unpacks its numbers after it has been loaded
                page.wait_for_selector("html[data-ready]")
            page.screenshot(path=out / f"{name}.png", full_page=True, clip=CLIPS.get(name))
            print(out / f"{name}.png")


if __name__ == "__main__":
    main()
