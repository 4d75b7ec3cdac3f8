"""`locater demo`: what Locater is for, in three acts that are computed here and now, in less than a minute, offline.

A converted checkpoint that is broken, a run at a rate that is too high, and what one head does. Each act is a few lines
for a terminal and a part of one page.
"""

from __future__ import annotations

import html
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.nn import functional

from locater import Monitor
from locater.commands.ablating import ablate
from locater.commands.doctor.diagnosing import doctor
from locater.commands.probing import probe
from locater.files import write_whole
from locater.inputs.corpus import embedded_text
from locater.markup import HIGH, LOW, heat_map
from locater.numerics import one_thread
from locater.observing import attention_pattern
from locater.report.ablation import bars
from locater.report.pages import assemble, wide
from locater.runs.run_log import Run, read_run
from locater.runs.watch_page import watch_page
from locater.sources.open_source import open_source
from locater.version import SCHEMA, __version__
from locater_lab.models.shape import Shape
from locater_lab.models.transformer import Transformer, load
from locater_lab.train.checkpoint import safetensors

DEMO = Path(str(files("locater") / "demo"))
REPEATS = DEMO / "repeats"
HEAD_SIZE, PLANTED = 32, (4, 0)  # of the demo; the head that the first act scales
SOUND, HOT, STEPS = 3e-3, 0.2, 200  # rates of the second act
WORDS, LENGTH, SHORTEST, LONGEST = 64, 64, 8, 31  # of the third: a vocabulary, a sequence, and what repeats in it
Line = tuple[str, str]  # Verdict, Why or Next, and what follows it; "" in front of what goes on


@dataclass
class Act:
    """What was done, the verdict and what follows for the terminal; numbers for --json; drawings for the page."""

    title: str
    what: str
    lines: list[Line]
    numbers: dict[str, Any]
    drawings: list[str] = field(default_factory=list)  # SVG or tables


@dataclass
class Demonstration:
    """All acts, and the commands to go on with."""

    acts: list[Act]
    commands: tuple[tuple[str, str], ...] = (
        ("locater doctor path/to/model --base path/to/its/base", "a checkpoint that was converted, merged or quantised"),
        ("Trainer(..., callbacks=[locater.Monitor()])", "a training run: transformers, Lightning, or a loop of your own"),
        ("locater ablate path/to/model --text some.txt", "what each head of a model does"),
    )  # fmt: skip

    def to_json(self) -> str:
        acts = [{"title": act.title, "what": act.what, "lines": act.lines, **act.numbers} for act in self.acts]
        return json.dumps({"schema": SCHEMA, "locater": __version__, "acts": acts}, indent=1, allow_nan=False)

    def page(self) -> str:
        """The same story as a page."""
        parts = []
        for number, act in enumerate(self.acts, 1):
            parts.append(f"<h2>{number}. {html.escape(act.title)}</h2><p>{html.escape(act.what)}</p>")
            parts += [wide(part) for part in (_table(act.lines), *act.drawings)]
        parts += ["<h2>Now your own</h2>", wide(_table(self.commands))]
        words = {
            "TITLE": "Locater: a demonstration",
            "HEADING": "What Locater does, on three small models",
            "FOOTER": f"Made by Locater {__version__}; every number was computed on this machine.",
        }
        return assemble("prose", words, markup={"PROSE": "\n".join(parts)})


def _table(lines: Sequence[Line]) -> str:
    cells = (f"<tr><th>{html.escape(name)}</th><td>{html.escape(words)}</td></tr>" for name, words in lines)
    return f"<table>{''.join(cells)}</table>"


def demonstrate(folder: Path) -> Iterator[Act]:
    """The acts, one by one as they end; what they write goes to `folder`."""
    with one_thread():  # matrices are so small that a second thread costs more than it gives
        yield broken_checkpoint(folder)
        yield hot_run(folder)
        yield what_heads_do()


# ---- 1: a checkpoint that was converted ----


def broken_checkpoint(folder: Path) -> Act:
    """Plant what conversions get wrong in a copy of the packaged model, and ask the doctor."""
    copy = folder / "converted"
    copy.mkdir(parents=True, exist_ok=True)
    weights, _ = open_source(DEMO)
    tensors = {name: weights.read(name) for name in weights.names()}
    for name, tensor in tensors.items():
        if "q_proj" in name or "k_proj" in name:
            tensors[name] = interleaved(tensor)
    layer, head = PLANTED
    query = tensors[f"model.layers.{layer}.self_attn.q_proj.weight"]
    query[head * HEAD_SIZE : (head + 1) * HEAD_SIZE] *= 50
    write_whole(copy / "model.safetensors", b"".join(safetensors(tensors)))
    write_whole(copy / "config.json", (DEMO / "config.json").read_bytes())
    found = doctor(copy, DEMO)
    faults = [finding for finding in found.findings if finding.severity == "fault"]
    what = (
        "A copy of the packaged model: its queries and keys are stored in another rotary order, and one head is "
        "scaled, which conversions and merges get wrong. `locater doctor` reads the files and runs nothing."
    )
    lines = [("Verdict", found.verdict)]
    lines += [("" if at else "Why", f"{fault.where}: {fault.words}") for at, fault in enumerate(faults)]
    lines += [("" if at else "Next", advice) for at, advice in enumerate(dict.fromkeys(x.next for x in faults))]
    layers = sorted({row["layer"] for row in found.heads})
    grid = [[row["logits_difference"] for row in found.heads if row["layer"] == at] for at in layers]
    drawing = heat_map(grid, "difference of a head's logits from the original, as a share of their norm")
    numbers = {"verdict": found.verdict, "findings": [asdict(fault) for fault in faults]}
    return Act("Is this checkpoint what it should be?", what, lines, numbers, [drawing])


def interleaved(weight: Tensor) -> Tensor:
    """Rows of each head in the other order of rotary pairs: (0, n/2), (1, n/2 + 1), ... as neighbours."""
    rows = weight.view(-1, 2, HEAD_SIZE // 2, weight.shape[-1])
    return rows.transpose(1, 2).reshape(weight.shape).contiguous()


# ---- 2: a run at too high a rate ----


def hot_run(folder: Path) -> Act:
    """Train the same small model at a sound rate and at a hot one, both watched."""
    log = folder / "hot" / "locater.jsonl"
    page = folder / "hot" / "watch.html"
    sound = train_on_letters(SOUND, folder / "sound" / "locater.jsonl")
    hot = train_on_letters(HOT, log)
    write_whole(page, watch_page(read_run(log, stored=True)))
    verdict, fine = hot.verdict(), sound.verdict()
    runs = [read_run(folder / name / "locater.jsonl", stored=True) for name in ("hot", "sound")]
    ends = [fmean(loss for _, loss in run.losses[-20:]) for run in runs]
    what = (
        f"A small model learns Python's documentation letter by letter, {STEPS} steps, at a rate that is {HOT / SOUND:.0f} times "
        "too high. `locater.Monitor()` looks at every 10th step and writes a log."
    )
    lines = [
        ("Verdict", verdict.verdict),
        ("Why", verdict.why),
        ("Next", verdict.next),
        (
            "Beside it",
            f"the same run at a sound rate: {fine.verdict}; its loss over the last 20 steps is {ends[1]:.2f}, not {ends[0]:.2f}",
        ),
        ("Page", f"every head at every step, as `locater watch` shows it: {page}"),
    ]
    numbers = {
        "verdict": verdict.verdict,
        "heads": [list(head) for head in verdict.heads],
        "since": verdict.since,
        "losses": {"hot": ends[0], "sound": ends[1]},
    }
    return Act("Which heads are failing in this run, and since when?", what, lines, numbers, [loss_curves(*runs)])


def train_on_letters(rate: float, log: Path) -> Monitor:
    """A run of `STEPS` steps with its monitor, which has ended."""
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    ids = torch.frombuffer(bytearray(embedded_text()[:400_000].encode()), dtype=torch.uint8).long()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        shape = Shape(vocabulary=256, layers=2, width=64, heads=4, kv_heads=4, hidden=192, length=LENGTH)
        model = Transformer(shape).train()
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.1)
    monitor = Monitor(log, every=10)
    with quiet():
        monitor.attach(model)
        for step in range(1, STEPS + 1):
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, step / 20)
            at = torch.randint(len(ids) - LENGTH - 1, (16,), generator=generator)
            rows = torch.stack([ids[i : i + LENGTH + 1] for i in at.tolist()])
            loss = functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            monitor.after_step(loss=loss.item())
        monitor.detach()
    return monitor


@contextmanager
def quiet() -> Iterator[None]:
    """Without the monitor's own lines, which would stand between those of the act."""
    logger = logging.getLogger("locater")
    before, logger.disabled = logger.disabled, True
    try:
        with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
            yield
    finally:
        logger.disabled = before


def loss_curves(hot: Run, sound: Run) -> str:
    """Both losses over the steps, as SVG; a mark where the hot run was first warned of."""
    wide, high, left = 560.0, 180.0, 40.0
    top = max(loss for run in (hot, sound) for _, loss in run.losses)

    def point(step: int, loss: float) -> str:
        return f"{left + step / STEPS * wide:.1f} {8 + (1 - loss / top) * high:.1f}"

    parts = [
        f'<text x="{left - 6:.0f}" y="14" text-anchor="end">{top:.1f}</text>',
        f'<text x="{left - 6:.0f}" y="{high + 10:.0f}" text-anchor="end">0</text>',
        f'<path d="M{point(0, top)}L{point(0, 0.0)}L{point(STEPS, 0.0)}" fill="none" stroke="currentColor" stroke-opacity=".4"/>',
        f'<text x="{left + wide:.0f}" y="{high + 24:.0f}" text-anchor="end">loss by step, to {STEPS}</text>',
    ]
    for run, colour, name in ((hot, LOW, f"rate {HOT:g}"), (sound, HIGH, f"rate {SOUND:g}")):
        path = "L".join(point(step, loss) for step, loss in run.losses)
        x, y = point(*run.losses[-1]).split()
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{float(x) + 6:.0f}" y="{y}" fill="{colour}">{name}</text>')
    if hot.warnings:
        step = hot.warnings[0]["step"]
        parts.append(f'<path d="M{point(step, top)}L{point(step, 0.0)}" stroke="currentColor" stroke-dasharray="4 3"/>')
        parts.append(f'<text x="{point(step, top).split()[0]}" y="18" dx="6">first warning: step {step}</text>')
    size = f'width="{wide + 130:.0f}" height="{high + 34:.0f}" viewBox="0 0 {wide + 130:.0f} {high + 34:.0f}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="loss of both runs by step" '
        f'style="max-width:100%;height:auto" font-size="11" font-family="sans-serif" fill="currentColor">{"".join(parts)}</svg>'
    )


# ---- 3: what a head does ----


def what_heads_do() -> Act:
    """Find the induction heads of a packaged model, show where one looks, and take them away."""
    model = load(REPEATS)
    words, _ = repeats(torch.Generator().manual_seed(7), 32)
    count = words.numel()
    rows = sorted(
        probe(model, words.flatten(), length=LENGTH, tokens=count).rows, key=lambda row: -(row.induction or 0.0)
    )
    found = [row for row in rows if (row.induction or 0.0) > 0.5]
    places = [(row.layer, row.head) for row in found]
    alone = [(row.layer, row.head) for row in rows]
    removed = ablate(model, words.flatten(), [[place] for place in alone] + [places], length=LENGTH, tokens=count)
    change = {tuple(row.heads): row.change or 0.0 for row in removed.rows}
    first, loss = places[0], removed.loss or 0.0
    other = max((place for place in alone if place not in places), key=lambda place: change[(place,)])
    pattern = attention_pattern(model, words[:1], layers=[first[0]], heads=[first[1]])[first][0]
    query = LENGTH - 2
    key = int(pattern[query].argmax())
    what = (
        "A model of two layers has learned to go on with a passage of random words that it has seen before. `locater probe` "
        "finds the heads that do it, and `locater ablate` takes them away."
    )
    names = " and ".join(f"{layer}.{head}" for layer, head in places)
    shares = " and ".join(f"{row.induction:.0%}" for row in found)
    lines = [
        ("Found", f"heads {names} put {shares} of their weight on what followed the same word before"),
        (
            "Example",
            f"... {_words(words[0], key - 2, key + 1)} ... {_words(words[0], query - 1, query + 1)}: {first[0]}.{first[1]} "
            f"looks at the {words[0, key]}; the next word is {words[0, query + 1]}",
        ),
        (
            "Removed",
            f"the loss goes from {loss:.2f} nats to {loss + change[(first,)]:.2f} without {first[0]}.{first[1]}, to "
            f"{loss + change[tuple(places)]:.2f} without both: one stands in for the other",
        ),
        (
            "",
            f"without {other[0]}.{other[1]}, which no score names and they depend on, it is {loss + change[(other,)]:.2f}",
        ),
    ]
    label = f"head {first[0]}.{first[1]}: weight of a word (row) on earlier words (column)"
    drawings = [
        heat_map(pattern.tolist(), label, rows="word", columns="word"),
        bars(removed.to_dict()["removals"], "change of the loss without these heads, nats"),
    ]
    numbers = {
        "heads": [list(place) for place in places],
        "induction": [row.induction for row in found],
        "loss": loss,
        "without": {"+".join(f"{layer}.{head}" for layer, head in row.heads): row.change for row in removed.rows},
    }
    return Act("What do these heads do?", what, lines, numbers, drawings)


def repeats(generator: torch.Generator, count: int) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Sequences of random words, each a passage of 8 to 31 words over and over; and where a word can be known."""
    period = torch.randint(SHORTEST, LONGEST + 1, (count, 1), generator=generator)
    words, place = torch.randint(WORDS, (count, LENGTH), generator=generator), torch.arange(LENGTH)
    return words.gather(1, place % period), place > period


def train_on_repeats(steps: int = 900, rate: float = 3e-3, batch: int = 64, seed: int = 1) -> Transformer:
    """The model of the third act: two layers of attention alone, half a minute on one core. First it learns what can be
    known; then also to be unsure of what cannot.
    """
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shape = Shape(
            vocabulary=WORDS, layers=2, width=64, heads=2, kv_heads=2, hidden=128, length=LENGTH, mlp="none",
            positions="learned",
        )  # fmt: skip
        model, generator = Transformer(shape).train(), torch.Generator().manual_seed(seed)
        optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.98), weight_decay=0.1)
        for step in range(1, steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, step / 100) * min(1.0, (steps - step) / (0.3 * steps) + 0.02)
            rows, known = repeats(generator, batch)
            logits = model(rows[:, :-1]).flatten(0, 1)
            losses = functional.cross_entropy(logits, rows[:, 1:].flatten(), reduction="none").view(batch, -1)
            loss, other = losses[known[:, 1:]].mean(), losses[~known[:, 1:]].mean()
            optimizer.zero_grad()
            (loss + 0.5 * other if step > 0.6 * steps else loss).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return model.eval()


def _words(row: Tensor, first: int, last: int) -> str:
    return " ".join(str(int(x)) for x in row[max(0, first) : last])
