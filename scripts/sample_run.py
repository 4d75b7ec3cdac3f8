"""Train a small model at too high a learning rate, log every head, and take the screenshot in docs/watch.md.

    .venv/bin/python scripts/sample_run.py [--log run.jsonl]      # under a minute on one core

Four layers of six heads on bytes of the text inside CPython, AdamW at 4e-3 without warm-up, 500 steps, every 10th
observed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from locater import Monitor
from locater.inputs.corpus import embedded_text
from locater.runs.record_sinks import read_run
from locater.runs.watch_page import watch_page

LAYERS, HEADS, WIDTH, LENGTH, BATCH, EVERY = 4, 6, 96, 96, 8, 10


def train(sinks: Sequence[Path | str], steps: int = 500, rate: float = 4e-3) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    text = torch.tensor(list(embedded_text()[:400_000].encode()))
    config = GPT2Config(
        vocab_size=256,
        n_positions=LENGTH,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        resid_pdrop=0,
        attn_pdrop=0,
        embd_pdrop=0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    monitor = Monitor(*sinks, every=EVERY, warn_on="nonfinite, exploding, locked, spread>5").attach(model)
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH, (BATCH,)).tolist()
        rows = torch.stack([text[start : start + LENGTH] for start in starts])
        loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        monitor.after_step(loss=loss, grad_norm=norm)
    monitor.detach()


def picture(page: Path, out: Path) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(
            executable_path=shutil.which("chromium") or shutil.which("chromium-headless-shell"),
            args=["--no-sandbox"] if os.geteuid() == 0 else [],
        )
        opened = browser.new_context(offline=True, viewport={"width": 1320, "height": 900}).new_page()
        opened.goto(page.as_uri())
        opened.screenshot(path=out, full_page=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, help="keep the log here; must not exist")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--picture", type=Path, default=Path(__file__).parents[1] / "docs" / "images" / "watch.png")
    args = parser.parse_args()
    if args.log is not None and args.log.exists():
        parser.error(f"{args.log} exists: a second run in one log counts as the first one resumed")
    with tempfile.TemporaryDirectory() as place:
        log = args.log or Path(place) / "run.jsonl"
        train([log], args.steps, args.rate)
        run = read_run(log)
        print(run.summary())
        page = Path(place) / "page.html"
        page.write_text(watch_page(run), encoding="utf-8")
        picture(page, args.picture)
        print(args.picture)


if __name__ == "__main__":
    main()
