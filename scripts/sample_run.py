"""Train a small model at a learning rate that is too high for it, log every head, take the picture that docs/watch.md shows.

    .venv/bin/python scripts/sample_run.py [--log run.jsonl]      # under a minute on one core

Four layers of six heads on bytes of the text inside CPython, AdamW at 4e-3 without warm-up, 500 steps, every 10th observed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from locater import __version__
from locater.findings import flags_of
from locater.kernels import attention_statistics
from locater.report.sinks import JsonlSink, Sink, read_run
from locater.report.watch import watch_page
from locater.train.corpus import embedded_text

LAYERS, HEADS, WIDTH, LENGTH, BATCH, EVERY = 4, 6, 96, 96, 8, 10
COLUMNS = ("entropy_ratio", "entropy", "max_logit", "max_probability", "sink", "self_mass", "distance")
RAISED_BY = {"exploding": ("max_logit", 100.0), "locked": ("entropy_ratio", 0.1), "sink": ("sink", 0.9)}


def observe(projected: dict[int, torch.Tensor]) -> list[dict[str, list[float]]]:
    """Per layer, numbers of every head, from queries and keys of the batch that was just run."""
    found = []
    for layer in range(LAYERS):
        q, k, _ = projected[layer].detach().split(WIDTH, dim=-1)  # (B, T, WIDTH) each
        q, k = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (q, k))
        numbers = attention_statistics(q, k, causal=True).reduced()
        numbers["sink"] = numbers["first_mass"]
        found.append({name: numbers[name].tolist() for name in COLUMNS})
    return found


def warnings(step: int, layer: int, numbers: dict[str, list[float]]) -> list[dict[str, Any]]:
    found = []
    for head in range(HEADS):
        row = {name: values[head] for name, values in numbers.items()}
        for flag in flags_of(row, LENGTH):
            column, threshold = RAISED_BY[flag]
            found.append({
                "kind": "warning", "step": step, "time": time.time(), "layer": layer, "head": head, "name": f"transformer.h.{layer}.attn",
                "flag": flag, "value": row[column], "threshold": threshold,
                "message": f"layer {layer} head {head}: {column} {row[column]:.3g}",
            })  # fmt: skip
    return found


def train(sink: Sink, steps: int, rate: float) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    text = torch.tensor(list(embedded_text()[:400_000].encode()))
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, resid_pdrop=0, attn_pdrop=0, embd_pdrop=0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    projected: dict[int, torch.Tensor] = {}
    for layer, block in enumerate(model.transformer.h):
        block.attn.c_attn.register_forward_hook(lambda module, args, out, layer=layer: projected.update({layer: out}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    entries = [{"layer": i, "name": f"transformer.h.{i}.attn", "heads": HEADS, "kind": "self"} for i in range(LAYERS)]
    about = {"schema": 1, "locater": __version__, "source": type(model).__name__, "every": EVERY, "layers": entries, "columns": COLUMNS}
    sink.write({"kind": "run", **about, "time": time.time()})
    for step in range(steps):
        starts = torch.randint(len(text) - LENGTH, (BATCH,)).tolist()
        rows = torch.stack([text[start : start + LENGTH] for start in starts])
        loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0).item()
        optimizer.step()
        if step % EVERY:
            sink.write({"kind": "loss", "step": step, "loss": loss.item()})
            continue
        seen = observe(projected)
        heads = {name: [numbers[name] for numbers in seen] for name in COLUMNS}
        scalars = {"grad_norm": norm}
        sink.write({"kind": "step", "step": step, "time": time.time(), "loss": loss.item(), "scalars": scalars, "heads": heads})
        for layer, numbers in enumerate(seen):
            for record in warnings(step, layer, numbers):
                sink.write(record)
    sink.write({"kind": "end", "step": steps - 1, "time": time.time()})


def picture(page: Path, out: Path) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"] if os.geteuid() == 0 else [])
        opened = browser.new_context(offline=True, viewport={"width": 1320, "height": 900}).new_page()
        opened.goto(page.as_uri())
        opened.screenshot(path=out, full_page=True)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--log", type=Path, help="keep the log here; must not exist")
    ask.add_argument("--steps", type=int, default=500)
    ask.add_argument("--rate", type=float, default=4e-3)
    ask.add_argument("--picture", type=Path, default=Path(__file__).parents[1] / "docs" / "images" / "watch.png")
    args = ask.parse_args()
    if args.log is not None and args.log.exists():
        ask.error(f"{args.log} exists: a second run in one log counts as the first one resumed")
    with tempfile.TemporaryDirectory() as place:
        log = args.log or Path(place) / "run.jsonl"
        sink = JsonlSink(log)
        train(sink, args.steps, args.rate)
        sink.close()
        run = read_run(log)
        print(run.summary())
        page = Path(place) / "page.html"
        page.write_text(watch_page(run), encoding="utf-8")
        picture(page, args.picture)
        print(args.picture)


if __name__ == "__main__":
    main()
