"""Train the sample run of docs/watch.md into TensorBoard and trackio, and take the screenshots of docs/monitor.md.

    python scripts/tracker_screenshots.py [--only PREFIX]      # a minute on one core, no network

Takes those of the packages that are installed. trackio 0.43 asks for pillow below 13: `pip install trackio tensorboard`
into an environment of its own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sample_run import train

OUT = Path(__file__).parents[1] / "docs" / "images"
Shot = Callable[[Any], None]  # brings a page into the state that is wanted


def tensorboard(place: Path) -> tuple[str, dict[str, tuple[str, Shot]]]:
    """Address of a TensorBoard that shows the run, and its pictures."""
    from tensorboard import program

    os.chdir(place)  # the page shows the path
    train(["tensorboard:logs/run"])
    server = program.TensorBoard()
    server.configure(argv=["tensorboard", "--logdir", "logs", "--port", "0", "--load_fast=false"])

    def overview(page: Any) -> None:
        page.get_by_text("attention/entropy_by_layer").first.wait_for()
        with suppress(Exception):  # the settings take a third of the width
            page.locator("button[aria-label='Close side pane']").click(timeout=2000)

    def layers(page: Any) -> None:
        page.get_by_text("largest logit of each layer").first.wait_for()

    address = server.launch()
    return address, {"tensorboard": ("#timeseries", overview), "tensorboard-layers": ("#custom_scalars", layers)}


def trackio(place: Path) -> tuple[str, dict[str, tuple[str, Shot]]]:
    """The same for trackio."""
    os.environ["TRACKIO_DIR"] = str(place / "trackio")  # read when trackio is imported
    import trackio as tracker

    tracker.init(project="sample", name="run", embed=False)
    train(["trackio"])
    tracker.finish()
    _, address, *_ = tracker.show(project="sample", open_browser=False, block_thread=False)

    def pictures(page: Any) -> None:
        page.get_by_text("Media & Tables").first.click()
        page.get_by_text("locater/attention/entropy_by_layer").first.wait_for()

    return address, {"trackio": ("/?project=sample", pictures)}


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="PREFIX", help="only screenshots whose name begins with it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place, sync_playwright() as play:
        browser = play.chromium.launch(
            executable_path=shutil.which("chromium") or shutil.which("chromium-headless-shell"),
            args=["--no-sandbox"] if os.geteuid() == 0 else [],
        )
        for name, show in (("tensorboard", tensorboard), ("trackio", trackio)):
            if find_spec(name) is None:
                print(f"{name} is not installed: left out")
            if find_spec(name) is None or not name.startswith(args.only[: len(name)]):
                continue
            address, shots = show(Path(place))
            for shot, (where, prepare) in shots.items():
                if shot.startswith(args.only):
                    page = browser.new_context(viewport={"width": 1320, "height": 820}).new_page()
                    page.goto(address.rstrip("/") + where)
                    prepare(page)
                    page.wait_for_timeout(3000)  # curves are drawn after they have been fetched
                    page.screenshot(path=OUT / f"{shot}.png")
                    shrink(OUT / f"{shot}.png")
                    print(OUT / f"{shot}.png")


def shrink(path: Path) -> None:
    """To 256 colours, of which the rare ones count as much as the frequent ones: half of the bytes."""
    from PIL import Image

    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        small.save(path, optimize=True)


if __name__ == "__main__":
    main()
