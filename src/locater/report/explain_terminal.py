"""Explanations of one input in the terminal: tokens with their scores, the heads that count, what is exact."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from locater.report.explain_words import best_method, method_label, percent, sentence, target_sentence, verdict
from locater.report.tables import counted
from locater.report.terminal import empty_table, fitting

if TYPE_CHECKING:
    from locater.results.explanations import Explanations

MOST_TOKENS = 40  # tokens that are listed; of more, those with the largest scores
HEADS_NAMED = 8
LONGEST_TOKEN = 24


def print_explanations(result: Explanations, console: Console) -> None:
    """What the model predicts, tokens with scores, heads by share, and what each method is exact about."""
    console.print(f"[bold]{escape(verdict(result))}[/bold]", highlight=False)
    console.print(escape(target_sentence(result)), highlight=False)
    _print_scores(result, console)
    if result.heads:
        best = sorted(result.heads, key=lambda row: -abs(row.share))[:HEADS_NAMED]
        named = ", ".join(f"{row.layer}.{row.head} {percent(row.share)}" for row in best)
        console.print(f"Heads with the largest share of the target (layer.head): {named}", highlight=False)
    if result.lengths:
        named = ", ".join(f"{row.length}: {percent(row.share)}" for row in result.lengths[:HEADS_NAMED])
        console.print(f"Share of the target by heads passed: {named}", highlight=False)
    if best_sentence := best_method(result):
        console.print(escape(best_sentence), highlight=False)
    for method in result.methods:
        console.print(
            f"[bold]{escape(method_label(method.method))}[/bold]: {escape(sentence(method.exact))}", highlight=False
        )
    for note in result.assumptions["notes"]:
        console.print(f"[dim]- {escape(note)}[/dim]", highlight=False)


def _print_scores(result: Explanations, console: Console) -> None:
    rows = result.rows
    names = {method.method: method_label(method.method) for method in result.methods}
    first = next(iter(names))
    title = "score of each token"
    if len(rows) > MOST_TOKENS:
        title = f"{MOST_TOKENS} of {counted(len(rows), 'token')}, the largest scores of {names[first]}"
        best = sorted(rows, key=lambda row: -abs(row[first] or 0.0))[:MOST_TOKENS]
        rows = [row for row in rows if any(row is other for other in best)]
    texts = [stream.name for stream in result.streams if stream.ids is not None]
    several = len(result.streams) > 1
    cells = {
        **({"stream": [row["stream"] for row in rows]} if several else {}),
        "": [str(row["position"]) for row in rows],
        "token": [_shown(row["token"], row["stream"] not in texts) for row in rows],
        **{label: [_score(row[name]) for row in rows] for name, label in names.items()},
    }
    if any(method.offset is not None for method in result.methods):
        offsets = {names[method.method]: _score(method.offset) for method in result.methods}
        for name, column in cells.items():
            column.append(offsets.get(name, "(no token)" if name == "token" else ""))
    always = [name for name in cells if name in ("stream", "", "token")]
    shown = fitting(cells, [*always, names[first]], console.width)
    strong = {label: _strongest([row[name] for row in rows]) for name, label in names.items()}
    table = empty_table(title, shown)
    table.columns[shown.index("token")].justify = "left"
    for i in range(len(cells["token"])):
        table.add_row(*(Text(cells[name][i], style="bold" if i in strong.get(name, ()) else "") for name in shown))
    console.print(table)


def _strongest(scores: list[float | None]) -> set[int]:
    """Places of the three largest scores."""
    order = sorted(range(len(scores)), key=lambda i: -abs(scores[i] or 0.0))
    return set(order[:3])


def _score(x: float | None) -> str:
    return "-" if x is None else f"{x:.3g}" if abs(x) >= 100 else f"{round(x, 3) + 0.0:.3f}"


def _shown(token: str, patch: bool) -> str:
    text = token if patch else token.replace("\n", "↵").replace("\t", "⇥").replace(" ", "·")
    text = "".join(c if c.isprintable() else "\ufffd" for c in text)  # such as the start of a terminal's commands
    return text if len(text) <= LONGEST_TOKEN else text[: LONGEST_TOKEN - 1] + "…"
