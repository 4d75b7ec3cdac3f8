"""Is LocAteR worth it in pretraining? The plan as data: models, arms, rates, seeds, and the rules that decide what runs.

docs/results/pretraining-plan.md says the same in words, with reasons; it was written before the first run. A cell is an
arm at one size with one kind of positions. Its rates are factors of two; two seeds choose among them, by the select
loss, and other seeds judge at the rate that was chosen, by the report loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean
from typing import Any, Literal

from locater_lab.engine.runs import Row, Runs
from locater_lab.train.plan import Plan
from locater_lab.train.streams import Source

# ---- text ----

STREAM = "pretraining.tokens.json"
SHA256 = "221e7df51b59b24051c9fc3a5893eb603f9ddc6884e1c390a5242383ae316f5c"  # of the stream
TOKENIZER = "pretraining-tokenizer.json"
TOKENIZER_SHA256 = "0185ca9326020286c4702f4f6fe74976ae088397b2fe4a72dc0e04e52848a24b"
VOCABULARY = 16_384
EVERY = 4  # the tokenizer is learned from every 4th document that is trained on
SOURCES = (
    Source("docs", ("docs/part-0.txt.xz", "docs/part-1.txt.xz"), "\n\n\n", report=600_000, select=300_000),
    Source("wikipedia", ("wikipedia/articles.txt.xz",), "\n\n", report=600_000, select=300_000),
)
IMAGES = "fashion.npz"

# ---- models ----

CHOOSING = (0, 1)  # seeds that choose rates, and which arms go on
JUDGING = 100  # the first of the seeds that judge


@dataclass(frozen=True)
class Size:
    """A model, how long it is trained, and how many seeds choose and judge."""

    name: str
    layers: int
    width: int
    steps: int
    choosing: int
    judging: int

    @property
    def parameters(self) -> int:
        """Weights of maps inside blocks: four of attention and three of the MLP."""
        hidden = -(-8 * self.width // 3 // 8) * 8
        return self.layers * (4 * self.width**2 + 3 * self.width * hidden)


SIZES = {
    size.name: size
    for size in (Size("10M", 6, 384, 1200, 2, 5), Size("30M", 10, 512, 1800, 2, 5), Size("85M", 12, 768, 2300, 1, 4))
}
HEAD = 64
BASE = Plan(
    corpus=(STREAM,), vocabulary=VOCABULARY, length=512, batch=32, warmup=0.1, decay=0.1, evaluate=100, checkpoint=0,
    observe=200, compile=True,
)  # fmt: skip
POSITIONS = ("rotary", "learned")


def plan_of_size(size: Size) -> Plan:
    return replace(BASE, layers=size.layers, width=size.width, heads=size.width // HEAD, steps=size.steps)


# ---- arms ----

NONE = "none"
ARMS: dict[str, dict[str, Any]] = {
    NONE: {},  # AdamW with the weight decay of 0.1 that all arms have but those that change it
    "weight decay 0": {"decay": 0.0},
    "weight decay 0.3": {"decay": 0.3},
    "weight decay 1": {"decay": 1.0},
    "LocAteR held": {"control": ("locater(target=2)",)},
    "LocAteR free": {"control": ("locater(target=free)",)},
    "LocAteR full": {"control": ("locater(target=2, part=full)",)},
    "mean alone": {"control": ("locater(target=2, shrink=0)",)},
    "scale alone": {"control": ("locater(hold=0)",)},
    "QK-norm": {"qk_norm": True},
    "QK-clip at 100": {"control": ("qkclip(limit=100)",)},
    "mimetic": {"control": ("mimetic(target=2)",)},
}
FORMS = ("LocAteR held", "LocAteR free", "LocAteR full", "mean alone", "scale alone")
RIVALS = ("weight decay 0", "weight decay 0.3", "weight decay 1", "QK-norm", "QK-clip at 100", "mimetic")
WHY = (NONE, "mean alone", "mimetic", "scale alone")
EVERYWHERE = ("rotary", "learned", "sinusoidal", "none")  # positions of the cross that asks why

# ---- rates ----

RATE = 1e-3
START = (0, 1, 2, 3, 4)  # powers of two at which every arm of 10M begins: 1e-3 to 1.6e-2
AROUND = (-1, 0, 1)  # of a larger size, about the arm's rate one size below
COOLEST, HOTTEST = -4, 7  # beyond these no arm goes
LIKE_UNIFORM = math.log(VOCABULARY)  # the loss of a run that diverged, or that ends above it


def rate_of(power: int) -> float:
    """
    >>> [rate_of(power) for power in (-1, 0, 3)]
    [0.0005, 0.001, 0.008]
    """
    return RATE * 2.0**power


@dataclass(frozen=True)
class Grid:
    """What is known of an arm's rates. `best` is a power of two; `end` says why there are no more rates: it lies inside,
    or at the edge of all that may be tried, which decides nothing.
    """

    losses: Mapping[int, float]  # mean select loss of the choosing seeds, infinite where one of them diverged
    best: int | None
    end: Literal["inside", "edge"] | None
    further: int | None = None  # the rate to try next


def grid_of(losses: Mapping[int, float], least: int = COOLEST, most: int = HOTTEST) -> Grid:
    """The rule for edges: a best rate at an edge of what was tried asks for the next one, until both neighbours are
    known and worse. A neighbour at which the arm breaks is known.

    >>> grid_of({0: 3.2, 1: 3.1, 2: 3.3}).end, grid_of({0: 3.2, 1: 3.1, 2: math.inf}).best
    ('inside', 1)
    >>> grid_of({0: 3.2, 1: 3.1, 2: 3.0}).further, grid_of({0: math.inf, 1: math.inf}).further
    (3, -1)
    """
    survived = {power: loss for power, loss in losses.items() if math.isfinite(loss)}
    best = min(survived, key=lambda power: (survived[power], power)) if survived else None
    if best is None:
        further = min(losses) - 1
    elif best + 1 not in losses:
        further = best + 1
    elif best - 1 not in losses:
        further = best - 1
    else:
        return Grid(losses, best, "inside")
    inside_bounds = least <= further <= most
    return Grid(losses, best, None if inside_bounds else "edge", further if inside_bounds else None)


@dataclass(frozen=True)
class Cell:
    """An arm of one size, or task, with one kind of positions."""

    stage: str
    positions: str
    arm: str
    base: Plan
    start: tuple[int, ...]
    choosing: int
    judging: int

    def row(self, power: int, seed: int) -> Row:
        return _row(self, power, seed)

    @property
    def choosing_seeds(self) -> range:
        return range(self.choosing)

    @property
    def judging_seeds(self) -> range:
        return range(JUDGING, JUDGING + self.judging)

    def tried(self, runs: Runs) -> tuple[list[int], Grid]:
        """Every rate that is asked for so far, and what is known of them: no best one while runs are missing."""
        powers = list(self.start)
        while True:
            found = {power: self._select_loss(runs, power) for power in powers}
            known = {power: loss for power, loss in found.items() if loss is not None}
            grid = grid_of(known) if len(known) == len(powers) else Grid(known, None, None)
            if grid.further is None:
                return powers, grid
            powers.append(grid.further)

    def grid(self, runs: Runs) -> Grid:
        return self.tried(runs)[1]

    def _select_loss(self, runs: Runs, power: int) -> float | None:
        losses = []
        for seed in self.choosing_seeds:
            line = runs.of(self.row(power, seed))
            if line is None:
                return None
            losses.append(line["select_loss"] if line["status"] == "done" else math.inf)
        return fmean(losses)

    def judged(self, runs: Runs) -> list[dict[str, Any]] | None:
        """Lines of the judging seeds at the rate that was chosen; None until all are known, or where none was chosen."""
        grid = self.grid(runs)
        if grid.end != "inside" or grid.best is None:
            return None
        lines = [runs.of(self.row(grid.best, seed)) for seed in self.judging_seeds]
        found = [line for line in lines if line is not None]
        return found if len(found) == len(lines) else None

    def rows(self, runs: Runs) -> Iterator[tuple[tuple[int, int], Row]]:
        """Rows by priority: a seed for all rates before the next seed, and choosing before judging."""
        powers, grid = self.tried(runs)
        for seed in self.choosing_seeds:
            yield from (((0, seed), self.row(power, seed)) for power in powers)
        if grid.end == "inside" and grid.best is not None:
            yield from (((1, seed), self.row(grid.best, seed)) for seed in self.judging_seeds)


@lru_cache(1 << 14)
def _row(cell: Cell, power: int, seed: int) -> Row:
    """Kept with its key: all rows are asked for whenever a run ends."""
    options = {**ARMS[cell.arm], "rate": rate_of(power), "seed": seed}
    return Row(cell.stage, f"{cell.positions}, {cell.arm}", replace(cell.base, positions=cell.positions, **options))


def final_loss(line: Mapping[str, Any], which: str = "report_loss") -> float:
    """A run that diverged, or that ends above it, has the loss of uniform guesses."""
    return min(float(line[which]), LIKE_UNIFORM) if line["status"] == "done" else LIKE_UNIFORM


# ---- stages ----

Bases = Mapping[str, Plan]
BASES: dict[str, Plan] = {
    **{name: plan_of_size(size) for name, size in SIZES.items()},
    "masked": replace(plan_of_size(SIZES["10M"]), task="masked"),
    "image": Plan(
        task="image", images=IMAGES, layers=6, width=384, heads=6, batch=128, steps=2000, warmup=0.1, decay=0.1,
        evaluate=200, checkpoint=0, observe=500, compile=True,
    ),
}  # fmt: skip
STAGES = ("10M", "30M", "85M", "sensitivity", "masked", "image", "why")  # in this order
BEYOND = {"masked": "rotary", "image": "learned"}  # and the positions of each
BEYOND_SEEDS = 8
GO_ON = {"30M": 4, "85M": 3}  # arms
BELOW = {"30M": "10M", "85M": "30M"}


def first_cells(bases: Bases = BASES) -> list[Cell]:
    """All arms at 10M."""
    size = SIZES["10M"]
    return [
        Cell("10M", positions, arm, bases["10M"], START, size.choosing, size.judging)
        for positions in POSITIONS
        for arm in ARMS
    ]


def ranked(cells: Sequence[Cell], runs: Runs) -> list[tuple[float, str]] | None:
    """Arms by what they change: select loss at the best rate less that of no control, mean over choosing seeds and
    positions, the best first. None until the rates of every cell have ended; an arm at an edge is left out. The seeds
    that judge have no part in it, so that what they say of the arm that is chosen has no luck of the choice in it.
    """
    grids = {(cell.positions, cell.arm): cell.grid(runs) for cell in cells}
    if any(grid.end is None for grid in grids.values()):
        return None
    losses = {
        key: grid.losses[grid.best] for key, grid in grids.items() if grid.end == "inside" and grid.best is not None
    }
    kinds = list(dict.fromkeys(cell.positions for cell in cells))
    if any((positions, NONE) not in losses for positions in kinds):
        return None
    changes = []
    for arm in dict.fromkeys(cell.arm for cell in cells):
        if arm != NONE and all((positions, arm) in losses for positions in kinds):
            changes.append((fmean(losses[p, arm] - losses[p, NONE] for p in kinds), arm))
    return sorted(changes)


def going_on(ranking: Sequence[tuple[float, str]], count: int) -> list[str]:
    """Which arms go to the next size: no control, the best form of LocAteR, the best rival, and then the best that are
    left.

    >>> going_on([(-0.03, "mimetic"), (-0.02, "QK-norm"), (0.01, "LocAteR held")], 4)
    ['none', 'LocAteR held', 'mimetic', 'QK-norm']
    """
    arms = [arm for _, arm in ranking]
    firsts = [next((arm for arm in arms if arm in kind), None) for kind in (FORMS, RIVALS)]
    chosen = [NONE, *(arm for arm in firsts if arm is not None)]
    return [*chosen, *(arm for arm in arms if arm not in chosen)][:count]


def next_cells(stage: str, runs: Runs, bases: Bases = BASES) -> list[Cell] | None:
    """Cells of 30M or 85M; None until the size below has decided."""
    below = cells_of(BELOW[stage], runs, bases)
    ranking = None if below is None else ranked(below, runs)
    if below is None or ranking is None:
        return None
    size, arms = SIZES[stage], going_on(ranking, GO_ON[stage])
    found = []
    for cell in below:
        best = cell.grid(runs).best
        if cell.arm in arms and best is not None:
            start = tuple(best + step for step in AROUND)
            found.append(Cell(stage, cell.positions, cell.arm, bases[stage], start, size.choosing, size.judging))
    return found


def cells_beyond(stage: str, runs: Runs, bases: Bases = BASES) -> list[Cell] | None:
    """The masked model or the image classifier with the two best forms and without control."""
    ranking = ranked(first_cells(bases), runs)
    if ranking is None:
        return None
    arms = [NONE, *[arm for _, arm in ranking if arm in FORMS][:2]]
    start = START if stage == "masked" else tuple(power - 2 for power in START)
    return [Cell(stage, BEYOND[stage], arm, bases[stage], start, len(CHOOSING), BEYOND_SEEDS) for arm in arms]


def why_cells(bases: Bases = BASES) -> list[Cell]:
    """Four kinds of positions by four arms; those of rotary and learned positions are cells of 10M."""
    size = SIZES["10M"]
    return [
        Cell("why", positions, arm, bases["10M"], START, size.choosing, size.judging)
        for positions in EVERYWHERE
        for arm in WHY
    ]


def cells_of(stage: str, runs: Runs, bases: Bases = BASES) -> list[Cell] | None:
    """The cells of a stage; None while runs that decide them are missing."""
    if stage == "10M":
        return first_cells(bases)
    if stage in GO_ON:
        return next_cells(stage, runs, bases)
    return why_cells(bases) if stage == "why" else cells_beyond(stage, runs, bases)


def sensitivity_rows(runs: Runs, bases: Bases = BASES) -> list[Row]:
    """No control and the form that goes on, with the judging seeds at every rate that all arms began with."""
    ranking = ranked(first_cells(bases), runs)
    if ranking is None:
        return []
    arms = (NONE, next(arm for _, arm in ranking if arm in FORMS))
    cells = [cell for cell in first_cells(bases) if cell.arm in arms]
    return [cell.row(power, seed) for seed in cells[0].judging_seeds for power in START for cell in cells]


def rows(runs: Runs, stages: Iterable[str] = STAGES, bases: Bases = BASES) -> list[Row]:
    """All runs that are asked for, given those that there are, in the order in which they are made."""
    found: list[Row] = []
    for stage in stages:
        if stage == "sensitivity":
            found += sensitivity_rows(runs, bases)
            continue
        asked = [entry for cell in cells_of(stage, runs, bases) or () for entry in cell.rows(runs)]
        found += [row for _, row in sorted(asked, key=lambda entry: entry[0])]  # stable: cells stay in their order
    return found


def tiny_bases(vocabulary: int, stream: str = STREAM) -> dict[str, Plan]:
    """The same plans at a size that a CPU runs in a moment, to try the queue with."""
    small: dict[str, Any] = dict(layers=1, width=16, heads=2, steps=4, batch=2, evaluate=2, observe=4, compile=False)
    text: dict[str, Any] = dict(vocabulary=vocabulary, length=8, corpus=(stream,))
    return {name: replace(plan, **small, **({} if plan.reads_images else text)) for name, plan in BASES.items()}


# ---- how long it takes ----

FURTHER = 1  # rates beyond the first ones that an arm needs, as assumed for the count


def counted() -> dict[str, int]:
    """Runs of each stage, if every arm asks for `FURTHER` rates more than it begins with."""
    many = len(START) + FURTHER
    found = {}
    for name, size in SIZES.items():
        cells = len(POSITIONS) * (len(ARMS) if name == "10M" else GO_ON[name])
        rates = many if name == "10M" else len(AROUND) + FURTHER
        found[name] = cells * (rates * size.choosing + size.judging)
    found["sensitivity"] = 2 * len(POSITIONS) * (len(START) - 1) * SIZES["10M"].judging
    for name in BEYOND:
        found[name] = 3 * (many * len(CHOOSING) + BEYOND_SEEDS)
    new = [(p, arm) for p in EVERYWHERE for arm in WHY if p not in POSITIONS]
    found["why"] = len(new) * (many * len(CHOOSING) + SIZES["10M"].judging)
    return found
