"""The separation theorem: what of it can be decided here, and what cannot. Studies e.

L functions in a chain: L + 1 layers of full attention compose them (claim c5, by construction); no stack of L - 1 full
layers and 2^(3 L^2) linear ones does, where states are small against the prompt. The second half is about all stacks of
that size, for prompts without end, and stays open here but for L = 1. There no layer is full, and linear layers on top
of each other are one recurrence, whose states can be counted.
"""

from __future__ import annotations

from locater_lab.engine.claims import Claim, Measurement
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.papers.ye2026.composing import EXACT, states

SIZES = (2, 3, 4, 5)  # points m of the one function; m^m functions, all of them

THEOREM = (
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
PROOF = (
    "a proof, which this project does not check: for two functions the theorem speaks of 4,096 linear layers, and "
    "trying some stacks does not show that none composes"
)

ONE_FUNCTION = (
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

TWO_SUM = (
    Claim(
        "e4",
        "Sparse attention is separated from full attention by a second task, 2-Sum",
        "stacks of sparse layers that solve it",
        "at most",
        0.0,
        by="summary",
    ),
)
STATEMENT = "the theorem itself: only a summary that names the task was at hand, not its sizes"


def measure(setting: Setting) -> Results:
    """One function, then the start: states that any left-to-right machine needs between them."""
    counts = {m: states(("f1", "start"), 1, m) for m in SIZES}
    least = min(count / m**m for m, count in counts.items())
    return Results({"e3": Measurement(least, 0.0, EXACT)})


STUDIES = (
    Study("the separation theorem", THEOREM, needs=PROOF),
    Study("the theorem for one function", ONE_FUNCTION, measure),
    Study("2-Sum", TWO_SUM, needs=STATEMENT),
)
