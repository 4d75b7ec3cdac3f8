"""Composing functions by hand (study c), and what of the separation theorem can be decided here (study e).

**By hand (study c).** A recurrence that composes on the fly, the states that each order of the prompt needs, layers
that hop.

The task of the theorem, simplified: compose L functions on m points, listed with the one applied last in front. A
prompt lists f_L, ..., f_1 as tokens (l, x, f_l(x)), then asks i_L = f_L(... f_1(i_0)) for a start i_0. The published
task has tables that grow, with words that say which part of a table to use; that is left out here. Functions are
permutations, so that a guess is right once in m times at every depth.

The number of states that a prompt needs at a cut is counted, not argued: two beginnings need different states exactly
when some continuation has different answers, so the number of states is that of different rows of answers over all
continuations.

**The theorem (study e).** L functions in a chain: L + 1 layers of full attention compose them (claim c5, by
construction); no stack of L - 1 full layers and 2^(3 L^2) linear ones does, where states are small against the prompt.
The second half is about all stacks of that size, for prompts without end, and stays open here but for L = 1. There no
layer is full, and linear layers on top of each other are one recurrence, whose states can be counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.mechanisms import mechanism

# ---- c: composing by hand ----


POINTS = 3  # of the functions that are listed in full: 27 of them
BATCH = 64
SHARP = 200.0  # scale of softmax, keys of length one
EXACT = "none: exact"
ORDERS = {
    "forward, start first": ("start", "f1", "f2", "f3"),
    "forward, start last": ("f1", "f2", "f3", "start"),
    "reverse, start first": ("start", "f3", "f2", "f1"),
    "reverse, start last": ("f3", "f2", "f1", "start"),
}

COMPOSITION_CLAIMS = (
    Claim(
        "c1",
        "Listed forward, with the start in front, a recurrence composes on the fly",
        "wrong answers of a linear recurrence that turns one pointer per token, five functions on eight points",
        "at most",
        0.0,
        by="ours",
    ),
    Claim(
        "c2",
        "Listed with the last function first, that recurrence fails",
        "share of wrong answers at five hops",
        "at least",
        0.5,
        by="ours",
    ),
    Claim(
        "c3",
        "Reverse order needs a state that holds a whole function: m^m of them, not m",
        "states needed before the last function, reverse with the start last, over m^m",
        "about",
        1.0,
        0.0,
        by="ours",
    ),
    Claim(
        "c4",
        "Listed forward a state of m is enough, wherever the start stands",
        "states needed at the worst cut between functions, forward with the start last, over m",
        "at most",
        1.0,
        by="ours",
    ),
    Claim(
        "c5",
        "L + 1 layers of full attention compose L functions",
        "wrong answers of a stack written by hand from `softmax` layers, tokens x and f(x) apart: one layer binds x to "
        "f(x), one makes each hop; the simplified task",
        "at most",
        0.0,
        where="abstract",
    ),
    Claim(
        "c6",
        "Layers of the delta rule in the place of the hops do as well where the state holds all pairs",
        "wrong answers of the same stack with `delta` hops, d_k = L m",
        "at most",
        0.0,
        by="ours",
    ),
    Claim(
        "c7",
        "and not where it is a quarter of that",
        "share of wrong answers at five hops, d_k = L m / 4",
        "at least",
        0.5,
        by="ours",
    ),
)


# --- the task ---


@dataclass(frozen=True)
class CompositionTask:
    """L functions on m points."""

    points: int
    functions: int

    @property
    def pairs(self) -> int:
        """Tokens that list the functions."""
        return self.points * self.functions


TASK = CompositionTask(points=8, functions=5)


@dataclass(frozen=True)
class Prompts:
    """Listed tokens (B, L m), first token first; then questions (B, Q), each a start."""

    layer: Int[Tensor, "B n"]  # which function, from 0, the one applied first
    x: Int[Tensor, "B n"]
    y: Int[Tensor, "B n"]
    start: Int[Tensor, "B Q"]
    reached: Int[Tensor, "B Q L"]  # where the chain is after one function, two, ... all

    @property
    def answer(self) -> Int[Tensor, "B Q"]:
        return self.reached[:, :, -1]


def draw_prompts(
    task: CompositionTask, batch: int, generator: torch.Generator, forward: bool = False, questions: int = 1
) -> Prompts:
    """Random functions and starts; points within a function in random order.

    >>> draw_prompts(CompositionTask(points=4, functions=3), 2, torch.Generator().manual_seed(0)).layer[0].tolist()
    [2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0]
    """
    device, m, L = generator.device, task.points, task.functions
    table = torch.rand(batch, L, m, generator=generator, device=device).argsort(-1)  # f_l(x)
    x = torch.rand(batch, L, m, generator=generator, device=device).argsort(-1)
    y = table.gather(2, x)
    layer = torch.arange(L, device=device)[None, :, None].expand(batch, L, m)
    layer, x, y = (z if forward else z.flip(1) for z in (layer, x, y))
    start = torch.randint(m, (batch, questions), generator=generator, device=device)
    at, reached = start, []
    for number in range(L):
        at = table[:, number].gather(1, at)
        reached.append(at)
    return Prompts(layer.flatten(1), x.flatten(1), y.flatten(1), start, torch.stack(reached, 2))


# --- on the fly ---


def pointer_ends(batch: Prompts, task: CompositionTask) -> Int[Tensor, " B"]:
    """Where a pointer ends that starts at (function 1, i_0), by s <- (I + (e_to - e_from) e_from^T) s at every token
    (l, x, y).
    """
    state = torch.zeros(len(batch.x), (task.functions + 1) * task.points, dtype=torch.float64)
    state.scatter_(1, batch.start[:, :1], 1.0)
    for t in range(batch.x.shape[1]):
        here = (batch.layer[:, t] * task.points + batch.x[:, t])[:, None]
        there = ((batch.layer[:, t] + 1) * task.points + batch.y[:, t])[:, None]
        mass = state.gather(1, here)
        state = state.scatter_add(1, there, mass).scatter_add(1, here, -mass)
    return state.argmax(1)


def pointer_errors(forward: bool) -> Float[Tensor, " B"]:
    """Whether the pointer ends at a wrong answer, prompt by prompt."""
    batch = draw_prompts(TASK, BATCH, torch.Generator().manual_seed(0), forward)
    right = TASK.functions * TASK.points + batch.answer[:, -1]
    return (pointer_ends(batch, TASK) != right).double()


# --- states ---


def all_choices(part: str, m: int) -> Iterator[Any]:
    """All starts, or all functions on m points."""
    return iter(range(m)) if part == "start" else product(range(m), repeat=m)


def answer_of(parts: Mapping[str, Any]) -> int:
    """Of a whole prompt: a start, and functions f1, f2, ... as their tables."""
    at = parts["start"]
    for number in range(1, len(parts)):
        at = parts[f"f{number}"][at]
    return int(at)


def count_states(order: tuple[str, ...], cut: int, m: int) -> int:
    """Different rows of answers over all continuations, of all beginnings of `cut` parts.

    >>> count_states(("f1", "start"), 1, 2), count_states(("start", "f1"), 1, 2)
    (4, 2)
    """
    before, after = order[:cut], order[cut:]
    ends = [dict(zip(after, end, strict=True)) for end in product(*(list(all_choices(p, m)) for p in after))]
    rows = set()
    for values in product(*(list(all_choices(p, m)) for p in before)):
        begin = dict(zip(before, values, strict=True))
        rows.add(tuple(answer_of(begin | end) for end in ends))
    return len(rows)


def state_table(m: int) -> dict[str, list[int]]:
    """States at each cut between two functions, of three functions (all of them) on m points."""
    table = {}
    for name, order in ORDERS.items():
        cuts = [c for c in range(1, len(order)) if order[c - 1] != "start" and order[c] != "start"]
        table[name] = [count_states(order, c, m) for c in cuts]
    return table


# --- layers ---


def bound_tokens(batch: Prompts, task: CompositionTask) -> tuple[Float[Tensor, "B n c"], Float[Tensor, "B n m"]]:
    """The first layer: tokens (l, x) and f(x) stand apart, and each f(x) looks one place back. Keys (l, x) and values
    at the f(x).
    """
    size, n = batch.x.shape
    names = torch.nn.functional.one_hot(batch.layer * task.points + batch.x, task.pairs).double()
    values = torch.nn.functional.one_hot(batch.y, task.points).double()
    stream = torch.zeros(size, 2 * n, task.pairs, dtype=torch.float64)
    stream[:, 0::2] = names
    place = torch.eye(2 * n, dtype=torch.float64)[None, None].expand(size, 1, -1, -1)
    before = torch.cat([place[:, :, :1], place[:, :, :-1]], 2)  # place t asks for place t - 1
    out = mechanism("softmax")(before, place, stream[:, None], causal=True, scale=SHARP)[:, 0]
    return out[:, 1::2], values


def hop_errors(batch: Prompts, task: CompositionTask, name: str, channels: int) -> Float[Tensor, " B"]:
    """Whether the answer after all hops is wrong; one layer for each, keys brought to `channels` channels."""
    keys, values = bound_tokens(batch, task)
    spread = torch.eye(task.pairs, dtype=torch.float64)
    if channels < task.pairs:
        g = torch.Generator().manual_seed(1)
        spread = torch.randn(task.pairs, channels, generator=g, dtype=torch.float64)
        spread = spread / spread.norm(dim=1, keepdim=True)
    k = torch.cat([keys @ spread, torch.zeros(len(keys), 1, channels, dtype=torch.float64)], 1)[:, None]
    v = torch.cat([values, torch.zeros(len(keys), 1, task.points, dtype=torch.float64)], 1)[:, None]
    writes = torch.ones(len(keys), k.shape[2], dtype=torch.bool)
    writes[:, -1] = False  # the question
    at = torch.nn.functional.one_hot(batch.start[:, -1], task.points).double()
    for layer in range(task.functions):
        name_of_pair = torch.zeros(len(keys), task.pairs, dtype=torch.float64)
        name_of_pair[:, layer * task.points : (layer + 1) * task.points] = at
        q = (name_of_pair @ spread)[:, None, None]  # the last token's query
        if name == "delta":
            out = mechanism(name)(q, k, v, causal=True, beta=writes[:, None].double())
        else:
            out = mechanism(name)(q, k, v, causal=True, padding=writes, scale=SHARP)
        at = out[:, 0, 0]
    return (at.argmax(-1) != batch.answer[:, -1]).double()


def measure_composition(setting: Setting) -> Results:
    """Pointers, counted states and layers by hand."""
    table, every = state_table(POINTS), POINTS**POINTS
    batch = draw_prompts(TASK, BATCH, torch.Generator().manual_seed(0))
    measured = {
        "c1": Measurement(float(pointer_errors(True).sum()), 0.0, EXACT),
        "c2": by_seed(pointer_errors(False).tolist(), of="prompts"),
        "c3": Measurement(table["reverse, start last"][-1] / every, 0.0, EXACT),
        "c4": Measurement(max(table["forward, start last"]) / POINTS, 0.0, EXACT),
        "c5": Measurement(float(hop_errors(batch, TASK, "softmax", TASK.pairs).sum()), 0.0, EXACT),
        "c6": Measurement(float(hop_errors(batch, TASK, "delta", TASK.pairs).sum()), 0.0, EXACT),
        "c7": by_seed(hop_errors(batch, TASK, "delta", TASK.pairs // 4).tolist(), of="prompts"),
    }
    states_needed = {
        "points": POINTS,
        "functions_on_points": every,
        "rows": [{"order": name, "states": ", ".join(map(str, counts))} for name, counts in table.items()],
    }
    return Results(
        measured,
        {"states_needed": states_needed, "hops": {"points": TASK.points, "functions": TASK.functions}},
    )


COMPOSITION_STUDY = Study("composing by hand", COMPOSITION_CLAIMS, measure_composition)


# ---- e: the separation theorem ----


SIZES = (2, 3, 4, 5)  # points m of the one function; m^m functions, all of them

THEOREM_CLAIMS = (
    Claim(
        "e1",
        "No stack of L - 1 full layers and 2^(3 L^2) linear ones composes L functions",
        "stacks of that kind that compose, prompts long against the size of a layer",
        "at most",
        0.0,
        where="abstract",
    ),
    Claim(
        "e2",
        "The separation is that of every linear attention that is a recurrence, Mamba and DeltaNet among them",
        "recurrences whose stacks of that kind compose",
        "at most",
        0.0,
        where="abstract",
    ),
)
NEEDS_PROOF = (
    "a proof, which this project does not check: for two functions the theorem speaks of 4,096 linear layers, and "
    "trying some stacks does not show that none composes"
)

ONE_FUNCTION_CLAIMS = (
    Claim(
        "e3",
        "For L = 1, linear layers alone, whatever their number, need a state that tells all m^m functions apart",
        f"states needed before the start, over m^m, least of m = {', '.join(map(str, SIZES))}",
        "about",
        1.0,
        0.0,
        by="ours",
    ),
)

TWO_SUM_CLAIMS = (
    Claim(
        "e4",
        "Sparse attention is separated from full attention by a second task, 2-Sum",
        "stacks of sparse layers that solve it",
        "at most",
        0.0,
        by="summary",
    ),
)
NEEDS_STATEMENT = "the theorem itself: only a summary that names the task was at hand, not its sizes"


def measure_one_function(setting: Setting) -> Results:
    """One function, then the start: states that any left-to-right machine needs between them."""
    counts = {m: count_states(("f1", "start"), 1, m) for m in SIZES}
    least = min(count / m**m for m, count in counts.items())
    return Results({"e3": Measurement(least, 0.0, EXACT)})


SEPARATION_STUDIES = (
    Study("the separation theorem", THEOREM_CLAIMS, needs=NEEDS_PROOF),
    Study("the theorem for one function", ONE_FUNCTION_CLAIMS, measure_one_function),
    Study("2-Sum", TWO_SUM_CLAIMS, needs=NEEDS_STATEMENT),
)
