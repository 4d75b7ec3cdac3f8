"""Composition by hand: a recurrence that composes on the fly, what a state must hold in each order, layers that hop.
Study c.

How much a state must hold at a cut of the prompt is counted, not argued: two beginnings need different states exactly
when some continuation has different answers, so the number of states is that of different rows of answers over all
continuations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater.attention import mechanism
from locater_papers.engine.claims import Claim, Measured
from locater_papers.engine.papers import Setting, Study
from locater_papers.ye2026.task import Prompts, Task, prompts

POINTS = 3  # of the functions that are listed in full: 27 of them
TASK, BATCH = Task(points=8, functions=5), 64
SHARP = 200.0  # scale of softmax, keys of length one
EXACT = "none: exact"
ORDERS = {
    "forward, start first": ("start", "f1", "f2", "f3"), "forward, start last": ("f1", "f2", "f3", "start"),
    "reverse, start first": ("start", "f3", "f2", "f1"), "reverse, start last": ("f3", "f2", "f1", "start"),
}  # fmt: skip

CLAIMS = (
    Claim("c1", "Listed forward, with the start in front, a recurrence composes on the fly",
          "wrong answers of a linear recurrence that turns one pointer per token, five functions on eight points", "at most", 0.0,
          by="ours"),
    Claim("c2", "Listed with the last function first, that recurrence fails", "share of wrong answers at five hops", "at least", 0.5,
          by="ours"),
    Claim("c3", "Reverse order needs a state that holds a whole function: m^m of them, not m",
          "states needed before the last function, reverse with the start last, over m^m", "about", 1.0, 0.0, by="ours"),
    Claim("c4", "Listed forward a state of m is enough, wherever the start stands",
          "states needed at the worst cut between functions, forward with the start last, over m", "at most", 1.0, by="ours"),
    Claim("c5", "L + 1 layers of full attention compose L functions: one to bind x to f(x), one for each hop",
          "wrong answers of a stack written by hand from `softmax` layers, tokens x and f(x) apart", "at most", 0.0),
    Claim("c6", "Layers of the delta rule in the place of the hops do as well where the state holds all pairs",
          "wrong answers of the same stack with `delta` hops, d_k = L m", "at most", 0.0, by="ours"),
    Claim("c7", "and not where it is a quarter of that", "share of wrong answers at five hops, d_k = L m / 4", "at least", 0.5, by="ours"),
)  # fmt: skip


# --- on the fly -------------------------------------------------------------------------------------------------------


def pointer(made: Prompts, task: Task) -> Tensor:
    """Where a pointer ends that starts at (function 1, i_0), by s <- (I + (e_to - e_from) e_from^T) s at every token
    (l, x, y).
    """
    batch, size = len(made.x), (task.functions + 1) * task.points
    state = torch.zeros(batch, size, dtype=torch.float64)
    state.scatter_(1, made.start[:, :1], 1.0)
    for t in range(made.x.shape[1]):
        here = (made.layer[:, t] * task.points + made.x[:, t])[:, None]
        there = ((made.layer[:, t] + 1) * task.points + made.y[:, t])[:, None]
        mass = state.gather(1, here)
        state = state.scatter_add(1, there, mass).scatter_add(1, here, -mass)
    return state.argmax(1)


def on_the_fly(forward: bool) -> float:
    """Share of wrong answers."""
    made = prompts(TASK, BATCH, torch.Generator().manual_seed(0), forward)
    found = pointer(made, TASK)
    return float((found != TASK.functions * TASK.points + made.answer[:, -1]).double().mean())


# --- states -----------------------------------------------------------------------------------------------------------


def choices(part: str, m: int) -> Iterator[Any]:
    return iter(range(m)) if part == "start" else product(range(m), repeat=m)


def answer(held: Mapping[str, Any]) -> int:
    at = held["start"]
    for number in range(1, len(held)):
        at = held[f"f{number}"][at]
    return int(at)


def states(order: tuple[str, ...], cut: int, m: int) -> int:
    """Different rows of answers over all continuations, of all beginnings of `cut` parts.

    >>> states(("f1", "start"), 1, 2), states(("start", "f1"), 1, 2)
    (4, 2)
    """
    before, after = order[:cut], order[cut:]
    ends = [dict(zip(after, end, strict=True)) for end in product(*(list(choices(p, m)) for p in after))]
    rows = set()
    for begin in product(*(list(choices(p, m)) for p in before)):
        held = dict(zip(before, begin, strict=True))
        rows.add(tuple(answer(held | end) for end in ends))
    return len(rows)


def state_table(m: int) -> dict[str, list[int]]:
    """States at each cut between two functions, of three functions (all of them) on m points."""
    found = {}
    for name, order in ORDERS.items():
        cuts = [c for c in range(1, len(order)) if order[c - 1] != "start" and order[c] != "start"]
        found[name] = [states(order, c, m) for c in cuts]
    return found


# --- layers -----------------------------------------------------------------------------------------------------------


def bound(made: Prompts, task: Task) -> tuple[Float[Tensor, "B n c"], Float[Tensor, "B n m"]]:
    """The first layer: tokens (l, x) and f(x) stand apart, and each f(x) looks one place back. Keys (l, x) and values
    at the f(x).
    """
    batch, n = made.x.shape
    asked = torch.nn.functional.one_hot(made.layer * task.points + made.x, task.pairs).double()
    value = torch.nn.functional.one_hot(made.y, task.points).double()
    stream = torch.zeros(batch, 2 * n, task.pairs, dtype=torch.float64)
    stream[:, 0::2] = asked
    place = torch.eye(2 * n, dtype=torch.float64)[None, None].expand(batch, 1, -1, -1)
    before = torch.cat([place[:, :, :1], place[:, :, :-1]], 2)  # place t asks for place t - 1
    out = mechanism("softmax")(before, place, stream[:, None], causal=True, scale=SHARP)[:, 0]
    return out[:, 1::2], value


def hopped(made: Prompts, task: Task, name: str, channels: int) -> Float[Tensor, " B"]:
    """Whether the answer after all hops is wrong; one layer for each, keys brought to `channels` channels."""
    keys, values = bound(made, task)
    spread = torch.eye(task.pairs, dtype=torch.float64)
    if channels < task.pairs:
        g = torch.Generator().manual_seed(1)
        spread = torch.randn(task.pairs, channels, generator=g, dtype=torch.float64)
        spread = spread / spread.norm(dim=1, keepdim=True)
    k = torch.cat([keys @ spread, torch.zeros(len(keys), 1, channels, dtype=torch.float64)], 1)[:, None]
    v = torch.cat([values, torch.zeros(len(keys), 1, task.points, dtype=torch.float64)], 1)[:, None]
    writes = torch.ones(len(keys), k.shape[2], dtype=torch.bool)
    writes[:, -1] = False  # the question
    at = torch.nn.functional.one_hot(made.start[:, -1], task.points).double()
    for layer in range(task.functions):
        wanted = torch.zeros(len(keys), task.pairs, dtype=torch.float64)
        wanted[:, layer * task.points : (layer + 1) * task.points] = at
        q = (wanted @ spread)[:, None, None]  # the last token's query
        if name == "delta":
            out = mechanism(name)(q, k, v, causal=True, beta=writes[:, None].double())
        else:
            out = mechanism(name)(q, k, v, causal=True, padding=writes, scale=SHARP)
        at = out[:, 0, 0]
    return (at.argmax(-1) != made.answer[:, -1]).double()


def measure(setting: Setting) -> Mapping[str, Measured]:
    table = state_table(POINTS)
    every = POINTS**POINTS
    made = prompts(TASK, BATCH, torch.Generator().manual_seed(0))
    few = TASK.pairs // 4
    numbers = {"states": table, "points": POINTS, "functions": 3, "task": [TASK.points, TASK.functions]}
    return {
        "c1": Measured(on_the_fly(True) * BATCH, 0.0, EXACT, numbers), "c2": _share(on_the_fly(False)),
        "c3": Measured(table["reverse, start last"][-1] / every, 0.0, EXACT),
        "c4": Measured(max(table["forward, start last"]) / POINTS, 0.0, EXACT),
        "c5": Measured(float(hopped(made, TASK, "softmax", TASK.pairs).sum()), 0.0, EXACT),
        "c6": Measured(float(hopped(made, TASK, "delta", TASK.pairs).sum()), 0.0, EXACT),
        "c7": _share(float(hopped(made, TASK, "delta", few).mean())),
    }  # fmt: skip


def _share(wrong: float) -> Measured:
    """Of wrong answers among random prompts; a share of 0 or 1 has the error of one answer."""
    return Measured(
        wrong, 2 * math.sqrt(max(wrong * (1 - wrong), 1 / BATCH) / BATCH), f"2 standard errors over {BATCH} prompts"
    )


STUDY = Study("composing by hand", CLAIMS, measure)
