"""Statistics of each observed head, as rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from locater.brief import brief
from locater.findings import FLAGS
from locater.measures import Ranks, ranks_of_gram
from locater.numerics import finite_or_none
from locater.observing.accumulate import COLUMN, wide
from locater.observing.listening_site import Site
from locater.torch_private import flatten_together


@dataclass(frozen=True)
class MeasuredHead:
    """Which head it is, and the numbers of its attention that every result has."""

    layer: int
    head: int
    kv_head: int
    kind: str
    name: str
    rows: int
    entropy: float | None = None
    entropy_ratio: float | None = None
    max_logit: float | None = None
    max_probability: float | None = None
    row_mass: float | None = None
    participation: float | None = None


@dataclass(frozen=True)
class SeenHead(MeasuredHead):
    """One head over all calls. Means are over rows that see a key; None stands for what was not requested or did not
    occur.

    `entropy` is in nats; with sinks a row's weights sum to `row_mass` < 1 and entropy is that of the weights as they
    act. `sink` is the weight on the first key in sight, `rest_entropy` the entropy without it, weights made to sum to 1
    again. `how` is "exact" when every row counted, "sampled" otherwise.

    `output_singular_values` are the d_head singular values of A_h V_h, largest first: of the matrix whose rows are the
    head's outputs at all counted tokens of all sequences and calls, from the same sum of Gram matrices as the two
    ranks. They grow with the root of the number of tokens; over sqrt(rows) they do not. In float32 those under 3.5e-4
    sqrt(d_head) of the first are rounding. They are d_head numbers per head: the steps that `Monitor` logs and the
    heads that `probe` lists do without. None where all outputs are zero or the layer hands none over
    (`nn.MultiheadAttention`, which leaves both ranks None too).
    """

    how: str = "exact"
    distance: float | None = None
    self_mass: float | None = None
    sink: float | None = None
    rest_entropy: float | None = None
    rest_entropy_ratio: float | None = None
    beyond: float | None = None  # weight on keys that are neither sinks nor within a window, where it was asked for
    offsets: dict[int, float | None] = field(default_factory=dict)  # weight on the key that many tokens before
    output_stable_rank: float | None = None
    output_effective_rank: float | None = None
    output_singular_values: tuple[float, ...] | None = None
    flags: tuple[str, ...] = ()
    provenance: str = "family"  # "calls": found by its calls, without a record, and its query-key map is not known

    __repr__ = brief

    @property
    def tower(self) -> str:
        """The part of the model that the layer belongs to: its path up to the list of blocks, or to its own name."""
        return tower_of(self.name)

    def __getitem__(self, column: str) -> Any:
        return getattr(self, column)


def tower_of(name: str) -> str:
    """The path of a layer up to the list of blocks, or to its own name.

    >>> tower_of("vision_tower.encoder.layers.3.self_attn"), tower_of("vision_tower.head.attention")
    ('vision_tower.encoder', 'vision_tower.head')
    """
    parts = name.split(".")
    numbers = [at for at, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: max(0, numbers[0] - 1)] if numbers else parts[:-1])


MEANS = {  # column: the column that counts its rows
    "entropy": "rows",
    "row_mass": "rows",
    "max_probability": "rows",
    "participation": "rows",
    "distance": "rows",
    "self_mass": "rows",
    "entropy_ratio": "wide_rows",
    "sink": "first_rows",
    "rest_entropy": "rest_rows",
    "rest_entropy_ratio": "wide_rest_rows",
}


PLACES = {name: (COLUMN[name], COLUMN[count]) for name, count in MEANS.items()}
SHOWN = [  # the other flags need weights
    (flag.name, flag.needs[0], flag.rule)
    for flag in FLAGS
    if len(flag.needs) == 1 and flag.needs[0] in {*MEANS, "max_logit", "finite"}
]


@dataclass(frozen=True)
class Totals:
    """The sums of a site, per observed head, as plain numbers."""

    sums: list[list[float]]
    tops: list[float]
    pairs: list[list[list[float]]]

    @property
    def called(self) -> bool:
        return any(row[COLUMN["calls"]] > 0 for row in self.sums)


def accumulators(sites: Iterable[Site], request: str | int | None = None) -> list[Tensor]:
    """Sums, maxima and pairs of every site, or of one request there: the tensors that `totals` takes as numbers."""
    return [x for site in sites for x in (site.totals if request is None else site.requests[request])[:3]]


def totals(sites: Sequence[Site], numbers: Iterable[list[float]]) -> list[Totals]:
    """One per site, from the numbers of `accumulators`."""
    by_site, left = [], iter(numbers)
    for site in sites:
        (sums, tops, pairs), count = (next(left) for _ in range(3)), len(site.heads)
        rows, offsets = list(_parts(sums, count)), len(site.options.offsets)
        by_site.append(Totals(rows, tops, [list(_parts(part, offsets)) for part in _parts(pairs, count)]))
    return by_site


def _parts(numbers: list[float], count: int) -> Iterator[list[float]]:
    size = len(numbers) // max(1, count)
    return (numbers[i * size : (i + 1) * size] for i in range(count))


@torch.no_grad()
def fetch_numbers(tensors: Sequence[Tensor]) -> list[list[float]]:
    """The numbers in each of these tensors, waiting once for each device."""
    kinds: dict[torch.device, dict[torch.dtype, list[int]]] = {}
    for i, x in enumerate(tensors):
        kinds.setdefault(x.device, {}).setdefault(x.dtype, []).append(i)
    values: dict[int, list[float]] = {}
    for device, of_dtype in kinds.items():
        parts = [flatten_together([tensors[i] for i in which]).to(wide(device)) for which in of_dtype.values()]
        flat, start = torch.cat(parts).tolist(), 0
        for i in (i for which in of_dtype.values() for i in which):
            end = start + tensors[i].numel()
            values[i], start = flat[start:end], end
    return [values[i] for i in range(len(tensors))]


def rows_of(sites: Sequence[Site], request: str | int | None = None) -> list[SeenHead]:
    """One row per observed head, of the sites that were called; of one request, where it is named."""
    rows: list[SeenHead] = []
    sites = sites if request is None else [site for site in sites if request in site.requests]
    for site, total in zip(sites, totals(sites, fetch_numbers(accumulators(sites, request))), strict=True):
        if total.called:
            gram = site.gram if request is None else site.requests[request].gram
            ranks = None if gram is None else ranks_of_gram(gram.cpu())
            rows += [_row(site, at, total, ranks) for at in range(len(site.heads))]
    return rows


def _row(site: Site, at: int, total: Totals, ranks: Ranks | None) -> SeenHead:
    sums = total.sums[at]
    columns = head_numbers(site, sums, total.tops[at])
    if ranks is not None and sums[COLUMN["outputs"]]:
        columns["output_stable_rank"], columns["output_effective_rank"] = (
            finite_or_none(float(x[at])) for x in (ranks.stable, ranks.effective)
        )
        values = tuple(ranks.singular_values[at].tolist())
        columns["output_singular_values"] = values if any(values) and all(map(math.isfinite, values)) else None
    head = site.heads[at]
    return SeenHead(
        layer=site.number,
        head=head,
        kv_head=head // site.group,
        kind=site.kind,
        name=site.name,
        rows=int(sums[COLUMN["rows"]]),
        how="sampled" if site.options.rows else "exact",
        offsets={offset: _over(*total.pairs[at][i]) for i, (offset, _) in enumerate(site.options.offsets)},
        provenance="family" if site.layer is not None else "calls",
        **columns,
    )


def head_numbers(site: Site, sums: list[float], top: float, names: Iterable[str] = tuple(MEANS)) -> dict[str, Any]:
    """Means of these names, the largest logit and the flags of one head of a layer."""
    columns: dict[str, Any] = {
        "finite": all(map(math.isfinite, sums)) and top < math.inf,
        "max_logit": finite_or_none(top),
    }
    for name in names:
        total, count = PLACES[name]
        columns[name] = _over(sums[total], sums[count])
    unknown = [] if site.kind == "self" else ["distance", "self_mass"]  # queries and keys are different tokens
    if not site.placed:
        unknown = ["distance", "self_mass", "sink", "rest_entropy", "rest_entropy_ratio"]
    columns.update({name: None for name in unknown if name in columns})
    flags = [
        name for name, column, rule in SHOWN if (value := columns.get(column)) is not None and rule(value, length=2)
    ]
    columns["flags"] = tuple(flags)
    del columns["finite"]
    return columns


def _over(total: float, count: float) -> float | None:
    return finite_or_none(total / count) if count else None
