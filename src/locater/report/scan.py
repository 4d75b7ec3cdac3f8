"""A scan: its page, its tables in the terminal, and what a notebook shows of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from locater.findings import Verdict
from locater.report.columns import SCAN_HEADINGS, VALUE_HEADINGS, Row, opening_quantity, quantities
from locater.report.notebook import heads_display
from locater.report.pages import assemble, excuses, flag_table, layer_note, round_significant, short_name
from locater.report.plots import map_of_scan
from locater.report.terminal import print_heads
from locater.report.verdict_sentences import (
    NO_ROLES,
    amount,
    collapse_sentence,
    directions_sentence,
    notes_sentence,
    origin_sentence,
    predicted_from,
    read_sentence,
    summary,
    verdicts_of,
)
from locater.theory import variance_at
from locater.theory.propagation_and_regimes import COLLAPSED
from locater.version import OF_SCHEMA, __version__

Document = Mapping[str, Any]
NUMBERS = (
    *("M", "S", "F", "mean", "concentration", "localization", "expected_entropy"),
    *("residual_kept", "key_bias", "stable_rank", "effective_rank", "spectral_norm", "skew"),
)
LEGEND = {
    "M": "mean self-logit",
    "√F": "spread of logits",
    "H": "expected entropy in nats",
    "Λ": "localization by position",
    "κ": "concentration of the spectrum",
    "S/F": "1 symmetric, -1 antisymmetric",
    "key bias": "spread of the key-only term",
    "kept": "share of the tokens' differences that attention alone keeps",
    "stable rank": "how many directions carry the map",
    "writes": "norm of what it writes, O V, over the median of its layer",
}


def scan_page(scan: Document) -> str:
    """The page of one scan. It draws eigenvalues and positions where the document has them."""
    rows, verdicts, layers, length = scan["heads"], verdicts_of(scan), scan["layers"], scan["assumptions"]["length"]
    sizes = ", ".join(str(size) for size in sorted({entry["head_dim"] for entry in layers}))
    heads = f"{amount(len(rows), 'head')} in {amount(len(layers), 'attention layer')}, head size {sizes}."
    sentences = (heads, notes_sentence(rows, verdicts), collapse_sentence(layers, length), directions_sentence(rows))
    counts = " ".join(filter(None, sentences))
    return page_of_scans(short_name(scan["source"]), scan_verdict(scan), counts, [scan], True, opening_of(scan))


def page_of_scans(
    title: str, verdict: str, counts: str, scans: Sequence[Document], aligned: bool, opening: str, changed: str = ""
) -> str:
    """The page of one scan, or of two side by side. `opening` is the quantity that it shows first."""
    assumed = scans[0]["assumptions"]
    notes = "; ".join(assumed["notes"])
    with_statistics = assumed.get("prediction") == "predicted"
    words = {
        "TITLE": f"{title} · Locater",
        "HEADING": title,
        "VERDICT": verdict,
        "CHANGED": changed,
        "COUNTS": counts,
        "ORIGIN": origin_sentence(assumed),
        "ASSUMED": f"For {assumed['length']} {assumed['tokens']}; weights {assumed['weights']}."
        + (f" {notes}." if notes else "")
        + f" {read_sentence(assumed)}"
        + f" {NO_ROLES[0].upper()}{NO_ROLES[1:]}.",
        "FOOTER": f"Made by Locater {__version__} from weights {'and statistics' if with_statistics else 'alone'}.",
    }
    data = {
        "length": assumed["length"],
        "sharp": round_significant(variance_at(COLLAPSED, assumed["length"]) ** 0.5),  # a line in the map of M and √F
        "aligned": aligned,
        "metrics": {
            name: {
                "label": x.label + ", by the old formula" * (OF_SCHEMA in assumed and name == "expected_entropy"),
                "diverging": x.diverging,
                "least": x.least,
                "meaning": x.meaning,
            }
            for name, x in quantities(assumed["length"]).items()
        },
        "opening": opening,
        "flags": flag_table(),
        "scans": [_scan_data(scan, letter) for scan, letter in zip(scans, "AB", strict=False)],
    }
    return assemble("scan", words, data)


def opening_of(scan: Document) -> str:
    """The quantity to open on: the first whose map is not blank."""
    return opening_quantity(scan["heads"], scan["assumptions"]["length"]).name


def _scan_data(scan: Document, letter: str) -> dict[str, Any]:
    rotary = any("frequencies" in entry for entry in scan["layers"])
    places = {entry["layer"]: place for place, entry in enumerate(scan["layers"])}  # a shard's layers do not start at 0
    pairs = zip(scan["heads"], verdicts_of(scan), strict=True)
    return {
        "name": short_name(scan["source"]),
        "letter": letter,
        "layers": [_layer_data(entry) for entry in scan["layers"]],
        "heads": [_head_data(row, verdict, places[row["layer"]], rotary) for row, verdict in pairs],
    }


def _layer_data(entry: dict[str, Any]) -> dict[str, Any]:
    data: dict[str, Any] = {
        "name": entry["name"],
        "short": str(entry["layer"]),
        "heads": entry["heads"],
        "note": layer_note(entry),
    }
    if "frequencies" in entry:
        data["frequencies"] = [round_significant(f, 7) for f in entry["frequencies"]]
    return data


def _head_data(row: Row, verdict: Verdict, place: int, rotary: bool) -> dict[str, Any]:
    data: dict[str, Any] = {
        "layer": place,
        "head": row["head"],
        "flags": list(row["flags"]),
        "approximation": row["approximation"],
        "excused": excuses(verdict),
    }
    data.update({name: round_significant(row[name]) for name in NUMBERS})
    if row.get("eigenvalues") is not None:
        data["eigenvalues"] = [[round_significant(re, 3), round_significant(im, 3)] for re, im in row["eigenvalues"]]
    if row.get("profile") is not None:
        data["profile"] = [round_significant(x, 3) for x in row["profile"]]
    if row.get("drive") is not None and rotary:
        data["even"], data["odd"] = ([round_significant(x, 3) for x in row["drive"][part]] for part in ("even", "odd"))
        data["still"] = round_significant(row["drive"]["still"])
    return data


def scan_verdict(scan: Document) -> str:
    """Which heads have which fault."""
    return summary(scan["heads"], verdicts_of(scan), predicted_from(scan["assumptions"]))


def print_scan(scan: Document, console: Console) -> None:
    """The verdict, the table, what the flags mean, and what was assumed."""
    a, rows, verdicts = scan["assumptions"], scan["heads"], verdicts_of(scan)
    console.print(
        f"[bold]{summary(rows, verdicts, predicted_from(a))}[/bold] {notes_sentence(rows, verdicts)}", highlight=False
    )
    legend = {**LEGEND, "H": "log T - v/2, the old formula"} if OF_SCHEMA in a else LEGEND
    headings = {**VALUE_HEADINGS, **SCAN_HEADINGS} if a.get("values") else SCAN_HEADINGS
    print_heads(scan, verdicts, headings, legend, {"kept": "residual_kept"}, console)
    for sentence in filter(None, (collapse_sentence(scan["layers"], a["length"]), directions_sentence(rows))):
        console.print(escape(sentence), highlight=False)
    console.print(escape(" ".join(filter(None, (origin_sentence(a), read_sentence(a))))), highlight=False)
    for note in (f"for {a['length']} {a['tokens']}; weights {a['weights']}", *a["notes"], NO_ROLES):
        console.print(f"[dim]- {escape(note)}[/dim]", highlight=False)


def scan_in_notebook(scan: Document) -> str:
    rows, verdicts, assumptions = scan["heads"], verdicts_of(scan), scan["assumptions"]
    verdict = summary(rows, verdicts, predicted_from(assumptions))
    sentences = (verdict, notes_sentence(rows, verdicts), origin_sentence(assumptions))
    title = f"{short_name(scan['source'])}: {amount(len(rows), 'head')} in "
    title += amount(len(scan["layers"]), "attention layer")
    return heads_display(title, sentences, map_of_scan(scan), SCAN_HEADINGS, rows, verdicts)
