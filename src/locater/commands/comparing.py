"""`compare()`: two models head by head, or a series of more than two."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

from torch import nn

from locater.commands.differences import (
    HeadDifference,
    Move,
    Place,
    TensorDifference,
    head_differences,
    moved_heads,
    responses,
    same_head_shapes,
    tensor_differences,
)
from locater.commands.scanning import scan
from locater.defaults import LENGTH, Progress
from locater.discovery import read_source
from locater.errors import LocaterError
from locater.layers import AttentionLayer
from locater.numerics import known_median
from locater.results.comparison import (
    CHANGED,
    Comparison,
    ModuleChange,
    WeightChanges,
    compare_scans,
)
from locater.results.scan import Scan
from locater.results.series import ComparisonSeries, compare_series
from locater.sources.open_source import Source, open_source
from locater.sources.weights import Weights

NAMES_OF_A_SAVE = {"_name_or_path", "transformers_version", "torch_dtype", "dtype"}  # no setting of the model


@overload
def compare(
    a: Source | Scan,
    b: Source | Scan,
    *,
    length: int = ...,
    raw: bool = ...,
    progress: Progress | None = ...,
    download: bool = ...,
) -> Comparison: ...
@overload
def compare(
    a: Source | Scan,
    b: Source | Scan,
    c: Source | Scan,
    /,
    *more: Source | Scan,
    length: int = ...,
    raw: bool = ...,
    progress: Progress | None = ...,
    download: bool = ...,
) -> ComparisonSeries: ...
def compare(
    a: Source | Scan,
    b: Source | Scan,
    *more: Source | Scan,
    length: int = LENGTH,
    raw: bool = False,
    progress: Progress | None = None,
    download: bool = False,
) -> Comparison | ComparisonSeries:
    """Compare two models, two checkpoints of one run, or two scans (also as the JSON files that `scan` wrote).

    More than two are a `ComparisonSeries`, in the order given: what changed, and between which of them.

    >>> from torch import nn
    >>> comparison = compare(nn.MultiheadAttention(16, 2), nn.MultiheadAttention(16, 2))
    >>> comparison.aligned, len(comparison.rows)
    (True, 2)
    >>> len(compare(*(nn.MultiheadAttention(16, 2) for _ in range(4))).pairs)
    3
    """
    sources = (a, b, *more)
    if more:
        _check_distinct(sources)
    # what heads write is compared where it is known of all
    values = all(_is_local(x) or (isinstance(x, Scan) and x.has_values) for x in map(_loaded, sources))
    scans = [_scan_of(x, length, raw, progress, download, values) for x in sources]
    if more:
        return _with_differences(compare_series(scans), sources, raw)
    result = compare_scans(*scans)
    opened = _open_both(a, b)
    if opened is None or not result.aligned:
        return result
    weights = _weight_changes(*opened, result, progress)
    if weights is None:
        return result
    if result.equal:
        result = replace(result, tensors=weights.as_tensors())
    return _with_heads(replace(result, weights=weights), *opened, raw)


def _check_distinct(sources: Sequence[Source | Scan]) -> None:
    """A series names each source once: a repetition is a mistake, and would look like a change back."""
    seen: set[Any] = set()
    for source in sources:
        key = os.path.realpath(source) if isinstance(source, str | os.PathLike) else id(source)
        if key in seen:
            name = source if isinstance(source, str | os.PathLike) else getattr(source, "source", "one model")
            raise LocaterError(f"{name} is given more than once: compare each source once, in the order of training")
        seen.add(key)


Opened = tuple[Weights, dict[str, Any]]


def _open_both(a: Source | Scan, b: Source | Scan) -> tuple[Opened, Opened] | None:
    """Two sources on this machine, whose tensors and heads are compared. None for scans, and for remote checkpoints, of
    which a scan reads a small part.
    """
    if isinstance(a, Scan) or isinstance(b, Scan) or not (_is_local(a) and _is_local(b)):
        return None
    return open_source(a), open_source(b)


def _weight_changes(
    first: Opened, second: Opened, result: Comparison, progress: Progress | None
) -> WeightChanges | None:
    """Every tensor of two sources; None where one cannot be read that no head needs."""
    (a, config_a), (b, config_b) = first, second
    try:
        found = list(tensor_differences(a, b, progress))
    except LocaterError:
        return None
    by_module: dict[str, list[TensorDifference]] = {}
    for one in found:
        by_module.setdefault(one.module, []).append(one)
    attention = tuple(f"{entry['name']}." for entry in result.a.layers if entry["name"])
    settings = ({*config_a} & {*config_b}) - NAMES_OF_A_SAVE  # what one format leaves out is no difference
    # a GGUF file is read as the tensors of attention alone
    whole = not any(hasattr(weights, "all_numbers") for weights in (a, b))
    only_a, only_b = (sorted({*x.names()} - {*y.names()}) if whole else [] for x, y in ((a, b), (b, a)))
    return WeightChanges(
        whole=whole,
        compared=len(found),
        equal=sum(one.kind == "equal" for one in found),
        dtype=sum(one.kind == "dtype" for one in found),
        different=[one.name for one in found if one.kind != "equal"],
        only_a=only_a,
        only_b=only_b,
        nonfinite=[one.name for one in found if one.nonfinite],
        config=sorted(key for key in settings if not _equal_setting(config_a[key], config_b[key])),
        modules=[
            change
            for module, ones in by_module.items()
            if (change := _module_change(module, ones, attention)) is not None
        ],
    )


def _equal_setting(a: Any, b: Any) -> bool:
    """Whether two settings are equal, as numbers in float32 where both are numbers: some formats store no others."""
    return bool(a == b) or (isinstance(a, float) and isinstance(b, float) and math.isclose(a, b, rel_tol=1e-6))


def _module_change(module: str, ones: Sequence[TensorDifference], attention: tuple[str, ...]) -> ModuleChange | None:
    """The changes of tensors of one kind, where there are any."""
    changed = [one for one in ones if one.kind in ("changed", "shape")]
    if not changed:
        return None
    known = [one.relative for one in changed if one.relative is not None]
    ranks = [one.rank for one in changed]
    return ModuleChange(
        module,
        len(changed),
        len(ones),
        known_median(known),
        max(known, default=None),
        None if None in ranks else max(rank for rank in ranks if rank is not None),
        all(one.name.startswith(attention) for one in changed) if attention else False,
    )


def _with_heads(result: Comparison, first: Opened, second: Opened, raw: bool) -> Comparison:
    """The differences of heads, and those that are heads of A in another place."""
    if result.weights is not None and result.weights.identical:  # nothing is left that could differ
        layers = _layers(first, result.a)
        rotates = {number: layer.rotary is not None for number, layer in layers.items()}
        known = {n: layer.value is not None and layer.out is not None for n, layer in layers.items()}
        same = [
            HeadDifference(0.0, 0.0 if rotates[row.layer] else None, 0.0 if known[row.layer] else None)
            for row in result.rows
        ]
        return result.with_heads([x._asdict() for x in same], {})
    layers, others = _layers(first, result.a), _layers(second, result.b)
    table = _differences(layers, others, raw)
    if table is None:
        return result
    changed = [place for place, x in table.items() if (x.largest or 0.0) > CHANGED]
    moves: dict[Place, Move] = {}
    if changed:
        these = {number for number, _ in changed}
        moves = moved_heads(
            {number: responses(layer) for number, layer in layers.items()},
            {number: responses(layer) for number, layer in others.items() if number in these},
            changed,
        )
    places = [(row.layer, row.head) for row in result.rows]
    return result.with_heads([table[place]._asdict() for place in places], {k: m._asdict() for k, m in moves.items()})


def _layers(opened: Opened, scanned: Scan) -> dict[int, AttentionLayer]:
    """The layers that were scanned, by number."""
    layers = read_source(*opened).layers
    return {entry["layer"]: layers[entry["layer"]] for entry in scanned.layers}


def _differences(
    base: dict[int, AttentionLayer], other: dict[int, AttentionLayer], raw: bool
) -> dict[Place, HeadDifference] | None:
    """Those of all heads; None where the shapes of two layers differ."""
    if not all(same_head_shapes(layer, other[number]) for number, layer in base.items()):
        return None
    return {
        (number, head): row
        for number, layer in base.items()
        for head, row in enumerate(head_differences(layer, other[number], raw))
    }


def _with_differences(series: ComparisonSeries, sources: Sequence[Source | Scan], raw: bool) -> ComparisonSeries:
    """A series with the differences of heads between neighbours, and from the first; of sources on this machine."""
    if not all(_is_local(source) for source in sources):
        return series
    steps: list[list[dict[str, float | None]] | None] = []
    from_first: list[list[dict[str, float | None]] | None] = []
    layers = (
        _layers(open_source(source), scanned)  # type: ignore[arg-type]
        for source, scanned in zip(sources, series.scans, strict=True)
    )
    first = before = next(layers)
    for now in layers:  # three are open at a time
        steps.append(_difference_rows(before, now, series.ends, raw))
        from_first.append(steps[0] if before is first else _difference_rows(first, now, series.ends, raw))
        before = now
    return series.with_heads(steps, from_first)


def _difference_rows(
    base: dict[int, AttentionLayer], other: dict[int, AttentionLayer], result: Comparison, raw: bool
) -> list[dict[str, float | None]] | None:
    """Differences in the order of the rows of `result`."""
    table = _differences(base, other, raw)
    return None if table is None else [table[row.layer, row.head]._asdict() for row in result.rows]


def _loaded(source: Source | Scan) -> Source | Scan:
    """A scan where the source is the JSON of one."""
    if isinstance(source, str | os.PathLike) and Path(source).suffix == ".json" and Path(source).is_file():
        return Scan.load(source)
    return source


def _is_local(source: Source | Scan) -> bool:
    if isinstance(source, Scan):
        return False
    path = not isinstance(source, nn.Module)
    return not path or (os.path.exists(source) and Path(source).suffix != ".json")  # type: ignore[arg-type]


def _scan_of(
    source: Source | Scan, length: int, raw: bool, progress: Progress | None, download: bool, values: bool
) -> Scan:
    loaded = _loaded(source)
    if isinstance(loaded, Scan):
        return loaded
    return scan(loaded, length=length, raw=raw, progress=progress, download=download, values=values)
