"""What doubly normalized attention promises every key, and what that costs: studies a and b.

A mechanism takes queries and keys. With the rows of a matrix E as queries and unit vectors as keys its logits are E, so
that each mechanism can be tested on any matrix of logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from locater.errors import LocaterError
from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.devices_and_processes import draw_normal
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.mechanisms import mechanism

Logits = Float[Tensor, "T S"]

DRAWS = {True: 300, False: 3000}
KEYS, QUERIES = (4, 16, 64, 128), (2.0, 1.0, 0.5)  # queries: over the number of keys
SIZES = (0.1, 1.0, 5.0, 30.0)  # standard deviation of logits
MIXES = (0.1, 0.5, 0.9)
ROUNDS = (1, 2, 5, 20, 100)
TIGHT = 8  # keys of the tight example
# keys of the table by size; standard deviation of the logits that are normalized again and again
SHOWN_KEYS, ROUGH_SIZE = 64, 5.0

CLAIMS = (
    Claim(
        "a1", "Doubly normalized attention is guaranteed not to explain a key away: every key gets at least 1/S in all, S being the number "
        "of keys",
        "least column sum times S, random logits of four sizes", "at least", 1.0, where="abstract", bound="ours",
    ),
    Claim(
        "a2", "The hybrid u times it and 1 - u times softmax gives at least u/S",
        "least column sum times S / u, the same logits", "at least", 1.0, by="ours",
    ),
    Claim(
        "a3", "The bound is reached: no larger one is true",
        f"column sum times S where one query wins every key and the others avoid one, {TIGHT} keys", "about", 1.0, 1e-6, by="ours",
    ),
    Claim(
        "a4", "Softmax gives no such promise",
        "least column sum times S under softmax, the same logits", "at most", 1e-6, by="ours",
    ),
    Claim(
        "a5", "It is one round of Sinkhorn's iteration, columns first",
        "largest difference from dividing exp(E) by column sums, then by row sums", "at most", 1e-12, by="ours",
    ),
    Claim(
        "a6", "What is added to all logits of one key cancels: no key can make itself heard, or be a sink, by its own bias",
        "largest change of the map by biases N(0, 25) on keys", "at most", 1e-12, by="ours",
    ),
    Claim(
        "a7", "Padding changes nothing: a sequence padded within a batch has the map of the sequence alone",
        "largest difference from the map of the sequence alone", "at most", 1e-12, by="ours",
    ),
    Claim(
        "a8", "The promise is about sums: one query may be all that looks at a key",
        f"largest share of a key's column that comes from one query, logits of standard deviation {ROUGH_SIZE:g}", "at least", 0.99, by="ours",
    ),
)  # fmt: skip

CAUSAL_CLAIMS = (
    Claim(
        "b1", "It cannot be causal, and is refused where it would have to be",
        "causal calls that were answered, of three ways to ask", "at most", 0.0, by="ours",
    ),
    Claim(
        "b2", "With a causal mask on its rows alone, an earlier token would learn of later ones",
        "largest change of earlier rows when the last query changes, mean of draws, logits of standard deviation 1", "at least", 0.01,
        by="ours",
    ),
    Claim(
        "b3", "Sums over queries from the key's to the row's own leak nothing",
        "the same change with such prefix sums", "at most", 1e-12, by="ours",
    ),
    Claim(
        "b4", "This causal form keeps the promise, and gives more: key j receives at least 1/j, from its own query alone",
        "least of j times the weight of token j on itself, random logits of four sizes", "at least", 1.0, by="ours",
    ),
    Claim(
        "b5", "Causal softmax does not",
        "least of j times the column sum of key j, the same logits", "at most", 1e-6, by="ours",
    ),
)  # fmt: skip


def map_of(name: str, E: Logits, **options: Any) -> Logits:
    """The map of a mechanism for logits E.

    >>> map_of("doubly_normalized", torch.tensor([[0.0, 9.0], [0.0, 0.0]], dtype=torch.float64)).sum(0).min() >= 0.5
    tensor(True)
    """
    keys = torch.eye(E.shape[1], dtype=E.dtype)
    return mechanism(name).map(E[None, None], keys[None, None], scale=1.0, **options)[0, 0]


def sinkhorn_map(E: Logits, rounds: int = 1) -> Logits:
    """exp(E) with columns, then rows, divided by their sums, again and again; in logarithms."""
    for _ in range(rounds):
        E = E - E.logsumexp(0, keepdim=True)
        E = E - E.logsumexp(1, keepdim=True)
    return E.exp()


def prefix_normalized_map(E: Logits) -> Logits:
    """The causal form: xi_ij = exp(E_ij) / sum of exp(E_i'j) over i' from j to i, then rows.

    >>> prefix_normalized_map(torch.zeros(2, 2)).tolist()
    [[1.0, 0.0], [0.3333333432674408, 0.6666666865348816]]
    """
    seen = _lower(E)
    low = E.masked_fill(~seen, -torch.inf)
    return (E - low.logcumsumexp(0)).masked_fill(~seen, -torch.inf).softmax(1)


def leaky_causal_map(E: Logits) -> Logits:
    """Causal rows, but column sums over all queries that see the key: what a causal mask alone would make of it."""
    seen = _lower(E)
    low = E.masked_fill(~seen, -torch.inf)
    return (low - low.logsumexp(0, keepdim=True)).softmax(1)


def tight_logits(S: int = TIGHT, size: float = 40.0) -> Logits:
    """Row 0 wins every column, and the other rows avoid column 0."""
    E = torch.zeros(S, S, dtype=torch.float64)
    E[0] = size
    E[1:, 0] = -size
    return E


def _lower(E: Tensor) -> Bool[Tensor, "T S"]:
    return torch.ones_like(E, dtype=torch.bool).tril()


@dataclass(frozen=True)
class Draw:
    """Random logits; `loud` where some keys are louder than others, by a number added to all their logits."""

    size: float
    loud: bool
    E: Logits


def draw_logits(count: int) -> list[Draw]:
    """Logits of four sizes, with fewer, as many and more queries than keys; every fifth is loud."""
    drawn = []
    for seed in range(count):
        S, size = KEYS[seed % 4], SIZES[seed // 4 % 4]
        T = int(S * QUERIES[seed % 3])
        loud = seed % 5 == 0
        bias = 3 * draw_normal(1, S, seed=seed + 50_000) if loud else 0.0
        drawn.append(Draw(size, loud, size * draw_normal(T, S, seed=seed) + bias))
    return drawn


def padding_error(seed: int = 0, tokens: int = 24, more: int = 9) -> tuple[float, float]:
    """Of a padded sequence's map from its own; and the least column sum times S were padded queries counted."""
    q, k = (draw_normal(1, 2, tokens + more, 8, seed=seed + n) for n in range(2))
    real = torch.arange(tokens + more)[None] < tokens
    padded = mechanism("doubly_normalized").map(q, k, padding=real)[:, :, :tokens, :tokens]
    alone = mechanism("doubly_normalized").map(q[:, :, :tokens], k[:, :, :tokens])
    loud = torch.cat([q[:, :, :tokens], 100 * q[:, :, tokens:]], 2)  # padding may hold anything
    counted = mechanism("doubly_normalized").map(loud, k, padding=real, query_padding=torch.ones_like(real))[
        :, :, :tokens, :tokens
    ]
    return float((padded - alone).abs().max()), float(counted.sum(2).min() * tokens)


def sums_of_draw(draw: Draw, number: int) -> dict[str, float]:
    """Least column sums times S under three mechanisms, keys that softmax explains away, and two changes that should be
    nothing: against Sinkhorn's iteration, and by biases on keys.
    """
    E, u = draw.E, MIXES[number % 3]
    S = E.shape[1]
    plain, doubly = map_of("softmax", E), map_of("doubly_normalized", E)
    biased = map_of("doubly_normalized", E + 5 * draw_normal(1, S, seed=number))
    return {
        "softmax": float(plain.sum(0).min() * S),
        "doubly": float(doubly.sum(0).min() * S),
        "hybrid": float(map_of("hybrid_normalized", E, mix=u).sum(0).min() * S / u),
        "away": float((plain.sum(0) < 1 / S).double().mean()),
        "sinkhorn": float((doubly - sinkhorn_map(E)).abs().max()),
        "biased": float((biased - doubly).abs().max()),
    }


def by_size(drawn: list[Draw], rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """A row for each size of logits, over the square draws that are not loud."""
    table = []
    for size in SIZES:
        some = [
            row
            for draw, row in zip(drawn, rows, strict=True)
            if draw.size == size and draw.E.shape == (SHOWN_KEYS, SHOWN_KEYS) and not draw.loud
        ]
        if some:
            least = {name: min(row[name] for row in some) for name in ("softmax", "doubly")}
            table.append({"size": size, **least, "away": sum(row["away"] for row in some) / len(some)})
    return table


def measure(setting: Setting) -> Results:
    """All draws, with the three mechanisms; then single maps."""
    drawn = draw_logits(DRAWS[setting.quick])
    rows = [sums_of_draw(draw, number) for number, draw in enumerate(setting.each(drawn))]
    least = {name: min(row[name] for row in rows) for name in ("softmax", "doubly", "hybrid")}
    rough = ROUGH_SIZE * draw_normal(SHOWN_KEYS, SHOWN_KEYS, seed=1)
    doubly = map_of("doubly_normalized", rough)
    error, padding_counted = padding_error()
    lowest, largest = f"none: least of {len(drawn)} draws", f"none: largest of {len(drawn)} draws"
    bound = float(map_of("doubly_normalized", tight_logits()).sum(0).min() * TIGHT)
    # to nine digits: some draws are at the bound, and rounding is on either side of it
    measured = {
        "a1": Measurement(round(least["doubly"], 9), 0.0, lowest),
        "a2": Measurement(round(least["hybrid"], 9), 0.0, lowest),
        "a3": Measurement(bound, 0.0, "none: solved"),
        "a4": Measurement(least["softmax"], 0.0, lowest),
        "a5": Measurement(max(row["sinkhorn"] for row in rows), 0.0, largest),
        "a6": Measurement(max(row["biased"] for row in rows), 0.0, largest),
        "a7": Measurement(error, 0.0, "none: largest entry"),
        "a8": Measurement(float((doubly.max(0).values / doubly.sum(0)).max()), 0.0, "none: one draw"),
    }
    tables = {
        "column_sums": {"keys": SHOWN_KEYS, "rows": by_size(drawn, rows)},
        "sinkhorn_rounds": {"size": ROUGH_SIZE, "rows": [column_sums_after(rough, rounds) for rounds in ROUNDS]},
        "padding_counted": padding_counted,
    }
    return Results(measured, tables)


def column_sums_after(E: Logits, rounds: int) -> dict[str, float]:
    """Least and largest column sum after so many rounds."""
    sums = sinkhorn_map(E, rounds).sum(0)
    return {"rounds": rounds, "least": float(sums.min()), "largest": float(sums.max())}


def answered_calls() -> int:
    """Of three ways to ask for a causal map: those that were answered."""
    E, count = torch.zeros(3, 3, dtype=torch.float64), 0
    ways: tuple[dict[str, Any], ...] = (dict(causal=True), dict(mask=_lower(E)), dict(mask=_lower(E)[None, None]))
    for way in ways:
        try:
            map_of("doubly_normalized", E, **way)
            count += 1
        except LocaterError:
            pass
    return count


def measure_causal(setting: Setting) -> Results:
    """What would leak, and the form that does not."""
    leaks: list[float] = []
    prefix_leaks: list[float] = []
    for seed in range(20):
        E = draw_normal(32, 32, seed=seed)
        other = torch.cat([E[:-1], draw_normal(1, 32, seed=seed + 100)])
        leaks.append(float((leaky_causal_map(E) - leaky_causal_map(other))[:-1].abs().max()))
        prefix_leaks.append(float((prefix_normalized_map(E) - prefix_normalized_map(other))[:-1].abs().max()))
    own: list[float] = []
    plain: list[float] = []
    for number in range(DRAWS[setting.quick] // 3):
        S = KEYS[number % 4]
        E = SIZES[number // 4 % 4] * draw_normal(S, S, seed=number)
        place = torch.arange(1, S + 1, dtype=torch.float64)
        own.append(float((prefix_normalized_map(E).diagonal() * place).min()))
        plain.append(float((map_of("softmax", E, causal=True).sum(0) * place).min()))
    measured = {
        "b1": Measurement(float(answered_calls()), 0.0, "none: counted"),
        "b2": by_seed(leaks, of="draws"),
        "b3": Measurement(max(prefix_leaks), 0.0, "none: largest of 20 draws"),
        "b4": Measurement(round(min(own), 9), 0.0, f"none: least of {len(own)} draws"),
        "b5": Measurement(min(plain), 0.0, f"none: least of {len(plain)} draws"),
    }
    return Results(measured)


GUARANTEE_STUDY = Study("the promise to every key", CLAIMS, measure)
CAUSAL_STUDY = Study("under a causal mask", CAUSAL_CLAIMS, measure_causal)
