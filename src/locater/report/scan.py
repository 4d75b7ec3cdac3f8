"""A scan, or two scans side by side, as a self-contained page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from locater.findings import Verdict
from locater.report.change_words import changes_sentences
from locater.report.pages import assemble, excuses, flag_table, layer_note, short_name, significant
from locater.report.scan_columns import by_column, changes, quantities, telling
from locater.report.tables import (
    NO_ROLES,
    collapse_risk,
    directions,
    moved,
    noted,
    origin,
    predicted_from,
    read_sentence,
    summary,
)
from locater.theory import variance_at
from locater.theory.propagation import COLLAPSED
from locater.version import __version__

if TYPE_CHECKING:
    from locater.results.comparison import Comparison
    from locater.results.scan import HeadRow, Scan

NUMBERS = (
    *("M", "S", "F", "mean", "concentration", "localization", "expected_entropy"),
    *("residual_kept", "key_bias", "stable_rank", "effective_rank", "spectral_norm", "skew"),
)


def scan_page(scan: Scan) -> str:
    """The page of one scan."""
    heads = f"{len(scan.rows)} heads in {len(scan.layers)} attention layer{'s' * (len(scan.layers) != 1)}"
    risk = collapse_risk(scan.layers, scan.assumptions["length"])
    sentences = (f"{heads}, head size {_sizes(scan)}.", noted(scan.rows, scan.verdicts), risk, directions(scan.rows))
    counts = " ".join(filter(None, sentences))
    return _page(short_name(scan.source), _verdict(scan), counts, [scan], aligned=True)


def compare_page(comparison: Comparison) -> str:
    """The page of two scans, with differences where they have the same heads."""
    a, b, aligned = comparison.a.with_details(), comparison.b.with_details(), comparison.aligned
    counts = f"A: {len(a.rows)} heads in {len(a.layers)} layers. B: {len(b.rows)} heads in {len(b.layers)} layers."
    changed = ""
    if aligned:
        verdict = moved(a.verdicts, b.verdicts)
        changed = " ".join(changes_sentences(comparison))
    else:
        verdict = " ".join(f"{letter}: {_verdict(x)}" for letter, x in (("A", a), ("B", b)))
        counts += " Their shapes differ, so heads are shown one model at a time and not subtracted."
    return _page(f"{short_name(a.source)} against {short_name(b.source)}", verdict, counts, [a, b], aligned, changed)


def _page(title: str, verdict: str, counts: str, scans: Sequence[Scan], aligned: bool, changed: str = "") -> str:
    assumed = scans[0].assumptions
    notes = "; ".join(assumed["notes"])
    with_statistics = assumed.get("prediction") == "predicted"
    words = {
        "TITLE": f"{title} · Locater",
        "HEADING": title,
        "VERDICT": verdict,
        "CHANGED": changed,
        "COUNTS": counts,
        "ORIGIN": origin(assumed),
        "ASSUMED": f"For {assumed['length']} {assumed['tokens']}; weights {assumed['weights']}."
        + (f" {notes}." if notes else "")
        + f" {read_sentence(assumed)}"
        + f" {NO_ROLES[0].upper()}{NO_ROLES[1:]}.",
        "FOOTER": f"Made by Locater {__version__} from weights {'and statistics' if with_statistics else 'alone'}.",
    }
    data = {
        "length": assumed["length"],
        "sharp": significant(variance_at(COLLAPSED, assumed["length"]) ** 0.5),  # a line in the map of M and √F
        "aligned": aligned,
        "metrics": {
            name: {
                "label": x.label + ", by the old formula" * (scans[0].old and name == "expected_entropy"),
                "diverging": x.diverging,
                "least": x.least,
                "meaning": x.meaning,
            }
            for name, x in quantities(assumed["length"]).items()
        },
        "opening": _opening(scans, aligned, assumed["length"]),
        "flags": flag_table(),
        "scans": [_scan_data(scan, letter) for scan, letter in zip(scans, "AB", strict=False)],
    }
    return assemble("scan", words, data)


def _opening(scans: Sequence[Scan], aligned: bool, length: int) -> str:
    """The metric to open on: of two scans what changed most, of one the first whose map is not blank."""
    if len(scans) == 2 and aligned:
        return next(iter(by_column(changes(scans[0].rows, scans[1].rows, length))), "sqrtF")
    return telling(scans[0].rows, length).name


def _scan_data(scan: Scan, letter: str) -> dict[str, Any]:
    rotary = any("frequencies" in entry for entry in scan.layers)
    places = {entry["layer"]: place for place, entry in enumerate(scan.layers)}  # a shard's layers do not start at 0
    pairs = zip(scan.rows, scan.verdicts, strict=True)
    return {
        "name": short_name(scan.source),
        "letter": letter,
        "layers": [_layer_data(entry) for entry in scan.layers],
        "heads": [_head_data(row, verdict, places[row.layer], rotary) for row, verdict in pairs],
    }


def _layer_data(entry: dict[str, Any]) -> dict[str, Any]:
    data: dict[str, Any] = {
        "name": entry["name"],
        "short": str(entry["layer"]),
        "heads": entry["heads"],
        "note": layer_note(entry),
    }
    if "frequencies" in entry:
        data["frequencies"] = [significant(f, 7) for f in entry["frequencies"]]
    return data


def _head_data(row: HeadRow, verdict: Verdict, place: int, rotary: bool) -> dict[str, Any]:
    data: dict[str, Any] = {
        "layer": place,
        "head": row.head,
        "flags": list(row.flags),
        "approximation": row.approximation,
        "excused": excuses(verdict),
    }
    data.update({name: significant(row[name]) for name in NUMBERS})
    if row.eigenvalues is not None:
        data["eigenvalues"] = [[significant(re, 3), significant(im, 3)] for re, im in row.eigenvalues]
    if row.profile is not None:
        data["profile"] = [significant(x, 3) for x in row.profile]
    if row.drive is not None and rotary:
        data["even"], data["odd"] = ([significant(x, 3) for x in row.drive[part]] for part in ("even", "odd"))
        data["still"] = significant(row.drive["still"])
    return data


def _verdict(scan: Scan) -> str:
    return summary(scan.rows, scan.verdicts, predicted_from(scan.assumptions))


def _sizes(scan: Scan) -> str:
    return ", ".join(str(size) for size in sorted({entry["head_dim"] for entry in scan.layers}))
