"""Explanations of one input: the page, tables in the terminal, tokens coloured in a notebook, and sentences for all."""

from __future__ import annotations

import base64
import html
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from locater.report.pages import assemble, round_significant, short_name
from locater.report.terminal import empty_table, fitting_columns
from locater.report.token_groups import groups_markup, print_groups
from locater.report.verdict_sentences import amount
from locater.version import __version__

Document = Mapping[str, Any]
LISTED_TOKENS = 40  # tokens that are listed; of more, those with the largest scores
HEADS_NAMED = 8
SHARES_LEGEND = (
    "lost without it: measured, the head set to zero and everything after it computed again · "
    "estimated: the gradient of the target times the head's output · "
    "share: what passes through the head along attention, outputs of MLPs held as they were"
)
LONGEST_TOKEN = 24
NOTEBOOK_TOKENS = 200
FOR, AGAINST = "11,150,160", "220,110,40"  # seen on light and dark ground
LABELS = {  # names of methods as a reader sees them
    "operator": "operator",
    "paths": "paths",
    "relevance": "relevance",
    "rollout": "attention rollout",
    "raw_attention": "raw attention",
    "attention_norms": "attention norms",
    "gradient_input": "gradient × input",
    "integrated_gradients": "integrated gradients",
}


def method_label(method: str) -> str:
    return LABELS.get(method, method.replace("_", " "))


def quote(text: str) -> str:
    """A token between quotes, with line ends visible."""
    return "‘" + text.replace("\n", "↵").replace("\t", "⇥") + "’"


def verdict(result: Document) -> str:
    """What the model predicts."""
    if result["target"]["index"] is None:
        return "The model returns no logits: its output is explained along itself."
    if not result["predictions"]:
        return f"The model scores {quote(result['target']['name'])} with {result['target']['value']:.4g}."
    first = max(result["predictions"], key=lambda p: p["probability"])
    others = [p for p in result["predictions"] if p["index"] != first["index"]][:2]
    more = (
        ", then " + " and ".join(f"{quote(p['name'])} ({percent(p['probability'])})" for p in others) if others else ""
    )
    return f"The model's first choice is {quote(first['name'])} ({percent(first['probability'])}){more}."


def target_sentence(result: Document) -> str:
    """Which number is explained, of what input."""
    target, tokens = result["target"], " and ".join(_token_count(result, stream) for stream in result["streams"])
    if target["index"] is None:
        return f"Explained: the mean of the output over its tokens, along itself ({target['value']:.4g}); {tokens}."
    where = "" if target["position"] is None else f" at token {target['position']}"
    what = f"the logit of {quote(target['name'])}{where} ({target['value']:.4g})"
    return f"Explained: {what}; {tokens}."


def _token_count(result: Document, stream: Document) -> str:
    if stream["ids"] is None:
        patches = len(stream["tokens"]) - len(stream["special"])
        return f"{patches:,} patch{'es' * (patches != 1)}"
    return amount(len(stream["tokens"]), f"{stream['name']} token" if len(result["streams"]) > 1 else "token")


def best_method(result: Document) -> str:
    """Which method's scores take the target down fastest when tokens are removed; empty where that was not tried, or
    where methods do not differ.
    """
    areas = sorted((curve["area"], method_label(name)) for name, curve in deletion_curves(result).items())
    if not areas or f"{areas[0][0]:.2g}" == f"{areas[-1][0]:.2g}":
        return ""
    (low, best), (high, worst) = areas[0], areas[-1]
    return (
        "On this input, removing tokens by score lowers the target "
        f"fastest with {best} (area {low:.2g}), slowest with {worst} ({high:.2g})."
    )


def percent(share: float) -> str:
    """
    >>> percent(0.314), percent(0.0123), percent(-0.2), percent(-0.0001)
    ('31 %', '1.2 %', '-20 %', '0.0 %')
    """
    digits = 1 if abs(share) < 0.0995 else 0
    return f"{round(100 * share, digits) + 0.0:.{digits}f} %"  # + 0.0: no minus sign on zero


def as_sentence(text: str) -> str:
    """
    >>> as_sentence("scores sum to the target")
    'Scores sum to the target.'
    """
    return text[:1].upper() + text[1:] + ("" if not text or text.endswith(".") else ".")


def main_stream(method: Document) -> str:
    """The stream whose scores are a method's first."""
    return str(next(iter(method["scores"])))


def deletion_curves(result: Document) -> dict[str, Document]:
    """By method, what was left when tokens were removed; without methods for which that was not tried."""
    return {method["method"]: method["deletion"] for method in result["methods"] if method["deletion"] is not None}


def token_rows(result: Document) -> list[dict[str, Any]]:
    """One row per token: stream, position, token, and the score of each method."""
    rows = []
    for stream in result["streams"]:
        columns = {method["method"]: method["scores"].get(stream["name"]) for method in result["methods"]}
        for position, token in enumerate(stream["tokens"]):
            scores = {name: None if x is None else x[position] for name, x in columns.items()}
            rows.append({"stream": stream["name"], "position": position, "token": token, **scores})
    return rows


def score_unit(method: Document) -> str:
    """What the scores of a method add up to, in a few words."""
    total = sum(x for x in method["scores"][main_stream(method)] if x is not None)
    if method["offset"] is None:
        return f"scores sum to {total:.3g}"
    offset = method["offset"] if abs(method["offset"]) > 5e-4 * abs(total) else 0.0
    return f"scores sum to {total:.3g}; {offset:.3g} comes from no token"


def _order(row: Document) -> float:
    """What heads are ordered by."""
    value: float = row["value"] if row.get("estimate") is None else row["estimate"]
    return value


def effect_share(row: Document, result: Document, name: str = "effect") -> float | None:
    """What the target loses without a head, as a share of it; measured or estimated."""
    effect, target = row.get(name), result["target"]["value"]
    return None if effect is None or not target else effect / abs(target)


def heads_note(result: Document) -> str:
    """What the map of heads shows, and which patterns the page has."""
    if not result["layers"]:
        return result["assumptions"].get("patterns") or "No attention was recorded."
    measured = sum(row.get("effect") is not None for row in result["heads"])
    shares = (
        "Share of the target that passes through each head along attention, with outputs of MLPs held. It is not what "
        f"changes without the head: that was measured for {measured} of them."
        if result["heads"]
        else result["assumptions"].get("heads", "")
    )
    total = sum(entry["heads"] for entry in result["layers"])
    shown = len(result.get("patterns", ()))
    which = (
        "Choose a head to see what it attends to."
        if shown == total
        else f"Patterns of {shown:,} of {amount(total, 'head')} are here (dots): {result['assumptions']['patterns']}"
    )
    return f"{shares} {which}".strip()


# ---- tables of numbers on the page: one byte per number, compressed, as text that a script reads when needed ----


def pack_table(table: ArrayLike) -> str:
    """A table (rows, columns) as base64 of a zlib stream: a float32 scale per row, then the numbers as int8.

    A number is its int8 times the scale of its row: it is off by at most 1/254 of the largest number in its row.

    >>> unpack_table(pack_table([[0.0, 0.5, 1.0], [-2.0, 0.0, 1.0]]), 2, 3).round(2)
    array([[ 0.  ,  0.5 ,  1.  ],
           [-2.  ,  0.  ,  1.01]], dtype=float32)
    """
    x = np.asarray(table, dtype=np.float32)
    scale = np.abs(x).max(axis=1, initial=0.0) / 127
    whole = np.rint(x / np.where(scale > 0, scale, 1)[:, None]).astype(np.int8)
    data = scale.astype("<f4").tobytes() + whole.tobytes()
    return base64.b64encode(zlib.compress(data, 6)).decode()


def unpack_table(packed: str, rows: int, columns: int) -> np.ndarray:
    """The table again, as the script of a page reads it."""
    data = zlib.decompress(base64.b64decode(packed))
    scale = np.frombuffer(data, "<f4", rows)
    return np.frombuffer(data, np.int8, rows * columns, 4 * rows).reshape(rows, columns) * scale[:, None]


class Tables:
    """Tables that a page carries beside its data, each in an element of its own that is read when it is shown."""

    def __init__(self) -> None:
        self.packed: list[str] = []

    def add(self, table: ArrayLike) -> int:
        """The number of the table on the page."""
        self.packed.append(pack_table(table))
        return len(self.packed) - 1

    def markup(self) -> str:
        return "\n".join(_data_element(f"table-{i}", text) for i, text in enumerate(self.packed))


# ---- the page ----


def explanations_page(result: Document) -> str:
    """The page of one input."""
    name, tables = short_name(result["source"]), Tables()
    data = page_data(result, tables)
    words = {
        "TITLE": f"{name} · Locater",
        "HEADING": name,
        "VERDICT": verdict(result),
        "TARGET": target_sentence(result),
        "AGREEMENT": best_method(result),
        "FOOTER": f"Made by Locater {__version__}.",
    }
    markup = tables.markup()
    if result.get("picture"):
        markup += "\n" + _data_element("pixels", result["picture"]["pixels"])
    groups = groups_markup(_scores_by_group(result), result.get("groups") or {})
    return assemble("explain", words, data, {"TABLES": markup, "GROUPS": groups}, ("tables.js",))


def page_data(result: Document, tables: Tables) -> dict[str, Any]:
    """What the page's script reads."""
    places = {stream["name"]: place for place, stream in enumerate(result["streams"])}
    return {
        "streams": [_stream_data(result, place) for place in range(len(result["streams"]))],
        "picture": _picture_data(result),
        "target": {name: result["target"][name] for name in ("index", "position")},
        "methods": [_method_data(method, result, places, tables) for method in result["methods"]],
        "predictions": [[p["index"], p["name"], round_significant(p["probability"])] for p in result["predictions"]],
        "predictions_note": "Probability of the likeliest entries; the explained one is marked.",
        "layers": [{**entry, "short": str(entry["layer"])} for entry in result["layers"]],
        "heads": [
            [row["layer"], row["head"], round_significant(row["share"]), round_significant(effect_share(row, result))]
            for row in result["heads"]
        ],
        "heads_note": heads_note(result),
        "patterns": [_pattern_data(pattern, places, tables) for pattern in result.get("patterns", ())],
        "first_head": _first_head(result),
        "lengths": [[row["length"], round_significant(row["share"])] for row in result["lengths"]],
        "lengths_note": _lengths_note(result),
        "deletion": [_curve_data(name, curve) for name, curve in deletion_curves(result).items()],
        "deletion_axis": _deletion_axis(result),
        "deletion_note": result["assumptions"].get("deletion", ""),
        "notes": result["assumptions"].get("notes", []),
    }


def _curve_data(name: str, curve: Document) -> dict[str, Any]:
    sides = (curve["largest_first"], curve["smallest_first"])
    return {
        "label": method_label(name),
        "area": round_significant(curve["area"]),
        "points": [[[x, round_significant(y)] for x, y in zip(curve["removed"], side, strict=True)] for side in sides],
    }


def _deletion_axis(result: Document) -> str:
    kinds = {curve["of"] for curve in deletion_curves(result).values()}
    return "probability" if kinds == {"probability"} else "target"


def _data_element(name: str, text: str) -> str:
    return f'<script type="text/plain" id="{name}">{text}</script>'


def _stream_data(result: Document, place: int) -> dict[str, Any]:
    stream = result["streams"][place]
    return {
        "name": stream["name"],
        "tokens": stream["tokens"],
        "special": sorted(stream["special"]),
        "patches": stream["ids"] is None and bool(result.get("picture")),
        "explained": stream["name"] == result["assumptions"].get("output_stream"),
    }


def _picture_data(result: Document) -> dict[str, int] | None:
    picture = result.get("picture")
    return picture and {name: picture[name] for name in ("width", "height", "rows", "columns", "before")}


def _method_data(method: Document, result: Document, places: dict[str, int], tables: Tables) -> dict[str, Any]:
    matrix, name = method.get("matrix"), method["method"]
    shown = matrix is not None and name not in result["assumptions"].get("without_matrix", ())
    rows = 0 if matrix is None else len(matrix)
    return {
        "name": name,
        "label": method_label(name),
        "unit": score_unit(method),
        "exact": as_sentence(method["exact"]),
        "how": as_sentence(method["how"]),
        "stream": places[main_stream(method)],
        "scores": [_numbers(method["scores"].get(stream)) for stream in places],
        "without": "" if shown or matrix is None else "Its matrix has no room on this page.",
        "table": tables.add(matrix) if shown and matrix is not None else None,
        "rows": rows,
        "queries": _queries(result, method, rows, places),
    }


def _queries(result: Document, method: Document, rows: int, places: dict[str, int]) -> int:
    """The stream whose tokens are the rows of a method's matrix: the output's, where the lengths agree."""
    main = main_stream(method)
    output = result["assumptions"].get("output_stream", main)
    lengths = {stream["name"]: len(stream["tokens"]) for stream in result["streams"]}
    return places[output] if lengths.get(output) == rows else places[main]


def _numbers(values: Sequence[float | None] | None) -> list[float | None] | None:
    return None if values is None else [None if x is None else round_significant(x) for x in values]


def _pattern_data(pattern: Document, places: dict[str, int], tables: Tables) -> dict[str, Any]:
    weights = pattern["weights"]
    return {
        "layer": pattern["layer"],
        "head": pattern["head"],
        "rows": len(weights),
        "columns": len(weights[0]),
        "queries": places[pattern["queries"]],
        "keys": places[pattern["keys"]],
        "table": tables.add(weights),
    }


def _first_head(result: Document) -> int:
    """The pattern to begin with: of the head with the largest share, or of the last layer."""
    patterns = result.get("patterns", ())
    if not result["heads"]:
        return max(0, len(patterns) - 1)
    shares = {(row["layer"], row["head"]): abs(row["share"]) for row in result["heads"]}
    sizes: Sequence[float] = [shares.get((p["layer"], p["head"]), 0.0) for p in patterns]
    return sizes.index(max(sizes)) if sizes else 0


def _lengths_note(result: Document) -> str:
    if not result["lengths"]:
        return str(result["assumptions"].get("lengths", ""))
    largest = max(result["lengths"], key=lambda row: abs(row["share"]))
    heads = "no head" if largest["length"] == 0 else amount(largest["length"], "head")
    part = f"the largest part, {percent(largest['share'])}, passes {heads}"
    return f"The target as a sum over paths, by heads passed: {part}."


# ---- the terminal ----


def print_explanations(result: Document, console: Console) -> None:
    """What the model predicts, tokens with scores, heads by share, and what each method is exact about."""
    console.print(f"[bold]{escape(verdict(result))}[/bold]", highlight=False)
    console.print(escape(target_sentence(result)), highlight=False)
    _print_scores(result, console)
    print_groups(_scores_by_group(result), result.get("groups") or {}, console)
    if result["heads"]:
        best = sorted(result["heads"], key=lambda row: -abs(_order(row)))[:HEADS_NAMED]
        grid = empty_table("heads that count most for the target", ["head", "lost without it", "estimated", "share"])
        for row in best:
            numbers = (effect_share(row, result), effect_share(row, result, "estimate"), row["share"])
            shown = ("-" if x is None else percent(x) for x in numbers)
            grid.add_row(f"{row['layer']}.{row['head']}", *shown)
        console.print(grid)
        console.print(f"[dim]{SHARES_LEGEND}[/dim]", highlight=False)
    if result["lengths"]:
        named = ", ".join(f"{row['length']}: {percent(row['share'])}" for row in result["lengths"][:HEADS_NAMED])
        console.print(f"Share of the target by heads passed: {named}", highlight=False)
    if best_sentence := best_method(result):
        console.print(escape(best_sentence), highlight=False)
    for method in result["methods"]:
        console.print(
            f"[bold]{escape(method_label(method['method']))}[/bold]: {escape(as_sentence(method['exact']))}",
            highlight=False,
        )
    for note in result["assumptions"]["notes"]:
        console.print(f"[dim]- {escape(note)}[/dim]", highlight=False)


def _scores_by_group(result: Document) -> dict[str, dict[str, str]]:
    """The sum of the scores of each group's tokens, by method; of methods that score these tokens."""
    labels = (result.get("groups") or {}).get("labels", [])
    sums: dict[str, dict[str, str]] = {}
    for method in result["methods"]:
        scores = method["scores"].get(main_stream(method), ())
        if len(scores) == len(labels):
            pairs = list(zip(scores, labels, strict=True))
            sums[method_label(method["method"])] = {
                name: _score(sum(x or 0.0 for x, label in pairs if label == name)) for name in dict.fromkeys(labels)
            }
    return sums


def _print_scores(result: Document, console: Console) -> None:
    rows = token_rows(result)
    names = {method["method"]: method_label(method["method"]) for method in result["methods"]}
    first = next(iter(names))
    title = "score of each token"
    if len(rows) > LISTED_TOKENS:
        title = f"{LISTED_TOKENS} of {amount(len(rows), 'token')}, the largest scores of {names[first]}"
        best = sorted(rows, key=lambda row: -abs(row[first] or 0.0))[:LISTED_TOKENS]
        rows = [row for row in rows if any(row is other for other in best)]
    texts = [stream["name"] for stream in result["streams"] if stream["ids"] is not None]
    several = len(result["streams"]) > 1
    cells = {
        **({"stream": [row["stream"] for row in rows]} if several else {}),
        "": [str(row["position"]) for row in rows],
        "token": [_shown_token(row["token"], row["stream"] not in texts) for row in rows],
        **{label: [_score(row[name]) for row in rows] for name, label in names.items()},
    }
    if any(method["offset"] is not None for method in result["methods"]):
        offsets = {names[method["method"]]: _score(method["offset"]) for method in result["methods"]}
        for name, column in cells.items():
            column.append(offsets.get(name, "(no token)" if name == "token" else ""))
    always = [name for name in cells if name in ("stream", "", "token")]
    shown = fitting_columns(cells, [*always, names[first]], console.width)
    strong = {label: _strongest([row[name] for row in rows]) for name, label in names.items()}
    table = empty_table(title, shown)
    table.columns[shown.index("token")].justify = "left"
    for i in range(len(cells["token"])):
        table.add_row(*(Text(cells[name][i], style="bold" if i in strong.get(name, ()) else "") for name in shown))
    console.print(table)
    if any(method["offset"] is not None for method in result["methods"]):
        held = ", and what MLPs add, which `paths` holds" if "paths" in names else ""
        console.print(f"[dim](no token): what starts at no input token: biases{held}[/dim]", highlight=False)


def _strongest(scores: list[float | None]) -> set[int]:
    """Places of the three largest scores."""
    order = sorted(range(len(scores)), key=lambda i: -abs(scores[i] or 0.0))
    return set(order[:3])


def _score(x: float | None) -> str:
    return "-" if x is None else f"{x:.3g}" if abs(x) >= 100 else f"{round(x, 3) + 0.0:.3f}"


def _shown_token(token: str, patch: bool) -> str:
    text = token if patch else token.replace("\n", "↵").replace("\t", "⇥").replace(" ", "·")
    text = "".join(c if c.isprintable() else "\ufffd" for c in text)  # such as the start of a terminal's commands
    return text if len(text) <= LONGEST_TOKEN else text[: LONGEST_TOKEN - 1] + "…"


# ---- notebooks ----


def explanations_in_notebook(result: Document) -> str:
    """A line of tokens per method; patches of a picture are on the page alone."""
    parts = [f"<p><b>{html.escape(short_name(result['source']))}</b><br>{html.escape(verdict(result))}<br>"]
    parts.append(f"{html.escape(target_sentence(result))}</p>")
    texts = [stream for stream in result["streams"] if stream["ids"] is not None]
    for method in result["methods"]:
        name = html.escape(f"{method_label(method['method'])} ({score_unit(method)})")
        parts += [f"<p>{name}<br>{_line(method, stream)}</p>" for stream in texts if stream["name"] in method["scores"]]
    parts.append(groups_markup(_scores_by_group(result), result.get("groups") or {}))
    return "".join(parts) + "<p><code>.report(path)</code> writes the page, with heads, matrices and deletion.</p>"


def _line(method: Document, stream: Document) -> str:
    scores = [0.0 if x is None else x for x in method["scores"][stream["name"]]]
    usual = [abs(x) for t, x in enumerate(scores) if t not in set(stream["special"])] or [abs(x) for x in scores]
    most = max(usual) or 1.0
    spans = []
    for token, score in list(zip(stream["tokens"], scores, strict=True))[:NOTEBOOK_TOKENS]:
        strength = min(1.0, abs(score) / most)
        colour = f"rgba({AGAINST if score < 0 else FOR},{0.75 * strength:.2f})"
        spans.append(
            f"<span style='background:{colour};white-space:pre-wrap' title='{score:.3g}'>{html.escape(token)}</span>"
        )
    more = f" and {len(scores) - NOTEBOOK_TOKENS:,} more" if len(scores) > NOTEBOOK_TOKENS else ""
    return "".join(spans) + more
