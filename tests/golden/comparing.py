"""Comparing a document with its golden file: values by path, numbers within a tolerance, everything else equal.

Numbers that float32 linear algebra made differ in their last digits between processors, and small ones that are
differences of large ones differ more. `TOLERANCES` says what is allowed and why.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.golden import keys

DIGITS = 7  # kept of a number
LONGEST = 64  # a list of more numbers than this is kept as a digest
DIGEST = "digest_of"
SHOWN = 20  # problems told one by one


@dataclass(frozen=True)
class Tolerance:
    """Two numbers agree if they differ by at most `relative` times the larger, or by `absolute`."""

    relative: float
    absolute: float

    def agree(self, a: float, b: float, scale: float = 0.0) -> bool:
        return abs(a - b) <= max(self.relative * max(abs(a), abs(b), scale), self.absolute)


# The first that fits counts: kind or name of documents, pattern of paths, tolerance. docs/golden.md has what was
# measured.
TOLERANCES = (
    # eigenvalues near 0 are known to a part of the largest, not of themselves
    ("scan-eigenvalues", "heads[*].eigenvalues", Tolerance(1e-4, 2e-6)),
    # float32 moments: 1e-5 apart at most, where a trace cancels
    ("scan", "*", Tolerance(1e-4, 1e-8)),
    # differences of two such numbers
    ("compare", "*", Tolerance(1e-4, 1e-6)),
    # forward passes in float32, and predictions on drawn tokens: 1e-4 apart at most
    ("probe", "*", Tolerance(5e-4, 1e-8)),
    # 30 steps carry rounding on: 5e-5 apart at most
    ("train", "*", Tolerance(1e-3, 1e-7)),
    # stated, not measured
    ("reproduce", "claims[*].stated", Tolerance(0.0, 0.0)),
    ("reproduce", "claims[*].tolerance", Tolerance(0.0, 0.0)),
    # rounding errors of float32 are what these numbers measure
    ("reproduce-gerami2024", "claims[a4].measured", Tolerance(0.5, 0.0)),
    ("reproduce-gerami2024", "claims[a5].measured", Tolerance(0.5, 0.0)),
    ("reproduce-gerami2024", "claims[a4].numbers.rounding", Tolerance(0.5, 0.0)),
    ("reproduce-gerami2024", "claims[a4].numbers.opposed", Tolerance(0.5, 0.0)),
    # 100 steps of AdamW: 5e-4 apart at most
    ("reproduce-zhai2023-trained", "*", Tolerance(3e-3, 1e-9)),
    # five digits are kept; errors of float64 are as good as 0
    ("reproduce", "*", Tolerance(2e-4, 1e-12)),
    # names are equal or not
    ("names", "*", Tolerance(0.0, 0.0)),
)


def tolerance_of(path: str, kind: str, name: str = "") -> Tolerance:
    return next(held for of, pattern, held in TOLERANCES if of in (kind, name) and _regex(pattern).match(path))


def compact(document: Any, kind: str, name: str = "") -> Any:
    """A document as it is stored: without what is excluded, numbers rounded, long lists of numbers as digests."""
    return _compact(document, "", [_regex(pattern) for pattern in _of(keys.EXCLUDED, kind, name)])


def _compact(x: Any, path: str, excluded: list[re.Pattern[str]]) -> Any:
    if isinstance(x, dict):
        inside = {key: f"{path}.{key}" if path else str(key) for key in x}
        return {
            key: _compact(x[key], at, excluded)
            for key, at in inside.items()
            if not any(rule.match(at) for rule in excluded)
        }
    if isinstance(x, list | tuple):
        flat = list(_numbers(x))
        if len(flat) > LONGEST and None not in flat:
            return _digest([float(value) for value in flat if value is not None])
        return [_compact(value, f"{path}[{label}]", excluded) for label, value in zip(_labels(x), x, strict=True)]
    return float(f"{x:.{DIGITS}g}") if isinstance(x, float) else x


def _numbers(x: Any) -> Iterator[float | None]:
    """All numbers in nested lists; None for anything else."""
    if isinstance(x, list | tuple):
        for value in x:
            yield from _numbers(value)
    else:
        yield x if isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) else None


def _digest(values: list[float]) -> dict[str, float]:
    """Mean, a mean that weighs later numbers more and so knows their order, and root mean square."""
    count = len(values)
    held = {
        "mean": math.fsum(values) / count,
        "weighted_mean": math.fsum(value * (at + 1) / count for at, value in enumerate(values)) / count,
        "root_mean_square": math.sqrt(math.fsum(value * value for value in values) / count),
    }
    return {DIGEST: count, **{key: float(f"{value:.{DIGITS}g}") for key, value in held.items()}}


def problems(golden: Any, now: Any, kind: str, name: str = "") -> list[str]:
    """How a compact document differs from its golden one, a line for each value; none where it does not."""
    old = {_renamed(path, kind, name): leaf for path, leaf in leaves(golden)}
    new = dict(leaves(now))
    for table in (keys.CHANGED.get(kind, {}), keys.CHANGED.get(name, {})):
        old |= {path: Leaf(value) for path, value in table.items() if path in old}
    found = [*_missing(old, new, kind, name), *_additional(old, new, kind, name)]
    reworded = [_regex(pattern) for pattern in _of(keys.REWORDED, kind, name)]
    for path in old.keys() & new.keys():
        if (
            any(rule.match(path) for rule in reworded)
            and isinstance(old[path].value, str)
            and isinstance(new[path].value, str)
        ):
            continue
        problem = difference(old[path], new[path], tolerance_of(path, kind, name))
        if problem:
            found.append(f"{path}: {problem}")
    return sorted(found, key=_natural)


def report(name: str, found: list[str]) -> str:
    """Problems of a document in lines for a reader."""
    more = [f"... and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    return "\n".join([f"{name} differs from tests/golden/{name}.json at {len(found)} places:", *found[:SHOWN], *more])


@dataclass(frozen=True)
class Leaf:
    value: Any
    scale: float = 0.0  # the size of the numbers that a digest's mean is of: means cancel


def leaves(x: Any, path: str = "") -> Iterator[tuple[str, Leaf]]:
    """Every value of a document with its path. A list of words is one value; names are one each (`names` holds nothing
    else).
    """
    if isinstance(x, dict) and x:
        scale = x["root_mean_square"] if DIGEST in x else 0.0
        for key, value in x.items():
            at = f"{path}.{key}" if path else str(key)
            yield from leaves(value, at) if isinstance(value, dict | list) else [(at, Leaf(value, scale))]
    elif isinstance(x, list) and x and not all(isinstance(value, str) for value in x):
        for label, value in zip(_labels(x), x, strict=True):
            yield from leaves(value, f"{path}[{label}]")
    else:
        yield path, Leaf(x)


def difference(old: Leaf, new: Leaf, tolerance: Tolerance) -> str | None:
    """In words; None where the two agree."""
    a, b = old.value, new.value
    numbers = [isinstance(x, int | float) and not isinstance(x, bool) for x in (a, b)]
    if all(numbers) and isinstance(a, float) | isinstance(b, float):
        if tolerance.agree(a, b, old.scale):
            return None
        apart = abs(a - b) / max(abs(a), abs(b))
        return f"{a:.{DIGITS}g} is golden, {b:.{DIGITS}g} now: {apart:.1e} apart, {tolerance.relative:g} is allowed"
    return None if a == b and type(a) is type(b) else f"{a!r} is golden, {b!r} now"


def _missing(old: dict[str, Leaf], new: dict[str, Leaf], kind: str, name: str) -> Iterable[str]:
    gone = [_regex(pattern) for pattern in _of(keys.GONE, kind, name)]
    lost = [path for path in old if path not in new and not any(rule.match(path) for rule in gone)]
    return _by_row(lost, new, "is gone; a new name is written in RENAMED of tests/golden/keys.py")


def _additional(old: dict[str, Leaf], new: dict[str, Leaf], kind: str, name: str) -> Iterable[str]:
    if kind == "names":
        return []  # more names are no loss
    allowed = [_regex(pattern) for pattern in _of(keys.NEW, kind, name)]
    more = [path for path in new if path not in old and not any(rule.match(path) for rule in allowed)]
    return _by_row(more, old, "is new; what is added on purpose is written in NEW of tests/golden/keys.py")


def _by_row(paths: list[str], others: dict[str, Leaf], what: str) -> Iterable[str]:
    """Once for a row of which the other document has nothing, else value by value."""
    rows = {path[: path.rindex("]") + 1] for path in others if "]" in path}
    told = [
        path[: path.rindex("]") + 1] if "]" in path and path[: path.rindex("]") + 1] not in rows else path
        for path in paths
    ]
    return [f"{path}: {what}" for path in dict.fromkeys(told)]


def _labels(rows: Iterable[Any]) -> list[str]:
    """What tells the rows of a list apart: its identity where it has one, else its number."""
    held = list(rows)
    for names in keys.IDENTITY:
        if held and all(isinstance(row, dict) and set(names) <= row.keys() for row in held):
            labels = [".".join(str(row[name]) for name in names) for row in held]
            if len(set(labels)) == len(labels):
                return labels
    return [str(number) for number in range(len(held))]


def _renamed(path: str, kind: str, name: str) -> str:
    for table in (keys.RENAMED.get(kind, {}), keys.RENAMED.get(name, {})):
        for pattern, target in table.items():
            match = _regex(pattern).match(path)
            if match:
                groups = iter(match.groups())
                return re.sub(r"\*", lambda _: next(groups), target) + path[match.end() :]  # noqa: B023 - called at once
    return path


def _regex(pattern: str) -> re.Pattern[str]:
    """A pattern that matches a path or the beginning of one, up to the end of a key or row."""
    return re.compile("(.*?)".join(re.escape(part) for part in pattern.split("*")) + r"(?=$|[.\[])")


def _of(table: dict[str, tuple[str, ...]], kind: str, name: str) -> tuple[str, ...]:
    return (*table.get(kind, ()), *(table.get(name, ()) if name != kind else ()))


def _natural(text: str) -> list[Any]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", text)]
