"""What was seen of each head and each layer, as rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from locater.findings import flags_of
from locater.measures import Ranks, ranks_of_gram
from locater.probing.site import Site
from locater.probing.tally import AT


@dataclass(frozen=True)
class SeenHead:
    """One head over everything that was run. Means are over rows that see a key; None stands for what was not asked for or not seen.

    `entropy` is in nats; with sinks a row's weights sum to `row_mass` < 1 and entropy is that of the weights as they act.
    `sink` is the weight on the first key in sight, `rest_entropy` the entropy without it, weights made to sum to 1 again.
    `how` is "exact" when every row counted, "sampled" otherwise.

    `output_singular_values` are the d_head singular values of A_h V_h, largest first: of the matrix whose rows are the head's outputs
    at all counted tokens of all sequences and calls, from the same sum of Gram matrices as the two ranks. They grow with the root of
    the number of tokens; over sqrt(rows) they do not. In float32 those under 3.5e-4 sqrt(d_head) of the first are rounding. They
    are d_head numbers per head: the steps that `Monitor` logs and the heads that `probe` lists do without. None where all outputs are
    zero or the layer hands none over (`nn.MultiheadAttention`).
    """

    layer: int
    head: int
    kv_head: int
    kind: str
    name: str
    rows: int
    how: str
    entropy: float | None = None
    entropy_ratio: float | None = None
    max_logit: float | None = None
    max_probability: float | None = None
    row_mass: float | None = None
    participation: float | None = None
    distance: float | None = None
    self_mass: float | None = None
    sink: float | None = None
    rest_entropy: float | None = None
    rest_entropy_ratio: float | None = None
    offsets: dict[int, float | None] = field(default_factory=dict)  # weight on the key that many tokens before
    output_stable_rank: float | None = None
    output_effective_rank: float | None = None
    output_singular_values: tuple[float, ...] | None = None
    flags: tuple[str, ...] = ()

    def __getitem__(self, column: str) -> Any:
        return getattr(self, column)


MEANS = {  # column: the column that counts its rows
    "entropy": "rows", "row_mass": "rows", "max_probability": "rows", "participation": "rows", "distance": "rows", "self_mass": "rows",
    "entropy_ratio": "wide_rows", "sink": "first_rows", "rest_entropy": "rest_rows", "rest_entropy_ratio": "wide_rest_rows",
}  # fmt: skip


def rows_of(site: Site) -> list[SeenHead]:
    """One row per head that was listened to; none where nothing was called."""
    if not site.called:
        return []
    sums, pairs = site.sums.cpu().double(), site.pairs.cpu().double()
    tops = site.maxima.cpu()[:, 0].tolist()
    ranks = None if site.gram is None else ranks_of_gram(site.gram.cpu())
    return [_row(site, at, sums[at].tolist(), tops[at], pairs[at].tolist(), ranks) for at in range(len(site.heads))]


def _row(site: Site, at: int, sums: list[float], top: float, pairs: list[list[float]], ranks: Ranks | None) -> SeenHead:
    found: dict[str, Any] = {name: _over(sums[AT[name]], sums[AT[count]]) for name, count in MEANS.items()}
    found["max_logit"] = _finite(top)
    rows = int(sums[AT["rows"]])
    if site.kind != "self":  # queries and keys are different tokens
        found["distance"] = found["self_mass"] = None
    if ranks is not None:
        found["output_stable_rank"], found["output_effective_rank"] = (_finite(float(x[at])) for x in (ranks.stable, ranks.effective))
        values = tuple(ranks.singular_values[at].tolist())
        found["output_singular_values"] = values if any(values) and all(map(math.isfinite, values)) else None
    finite = all(math.isfinite(sums[AT[name]]) for name in MEANS) and not math.isnan(top) and top < math.inf
    head = site.heads[at]
    return SeenHead(
        site.number, head, head // site.group, site.kind, site.name, rows, "sampled" if site.wanted.rows else "exact", **found,
        offsets={offset: _over(*pairs[i]) for i, (offset, _) in enumerate(site.wanted.offsets)},
        flags=flags_of({**found, "finite": finite}, length=2),
    )  # fmt: skip


def _over(total: float, count: float) -> float | None:
    return _finite(total / count) if count else None


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None
