"""The page of the surrogate's record, from its figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from surrogate_figures import (
    BETWEEN,
    CLAIMS,
    QUANTITIES,
    REASONS,
    Entry,
    Estimate,
    Judged,
    draws_of,
    errors,
    goes_with_error,
    judged,
    learned_order,
    mean,
    mean_error,
    order_of_heads,
    part_share,
    part_size,
    quantity,
    reasons,
)

from locater_lab.engine.significance import decided_by_holm

KINDS = {
    "weights": "weights alone: z ~ N(0, I)",
    "diagonal": "z ~ N(mean, diagonal)",
    "covariance": "z ~ N(mean, covariance)",
    "other": "the same, statistics from another corpus",
    "own": "the same, statistics from the measured text (not held out)",
    "shuffled": "real tokens in random order (not held out)",
}
MAIN = ("weights", "diagonal", "covariance", "shuffled")
COLUMNS = {
    "rest_entropy": "Entropy without the first token (nats)",
    "sink": "Weight on the first token",
}
Correlation = tuple[str, Estimate, int, int, str]  # words, estimate, models of this sign, models, whether decided
WORST = 3  # heads of a model that are listed


def table(entries: Sequence[Entry], column: str = "entropy") -> str:
    """Spearman's correlation and mean absolute error, by model and kind of tokens."""
    lines = _head("model", *KINDS.values())
    for e in entries:
        cells = []
        for kind in KINDS:
            known = kind in e["predicted"]
            order = order_of_heads(e, kind, column).value if known else 0
            cells.append(f"{order:.2f}, {mean_error(e, kind, column).value:.2f}" if known else "")
        lines.append(_row(e["model"], *cells))
    return "\n".join(lines)


def page(entries: Sequence[Entry]) -> str:
    verdicts, correlations = judged(entries), _correlations(entries)
    sections: list[list[str]] = [
        [
            "# The Gaussian surrogate: entropy of heads, predicted and measured",
            "",
            "Made by `make surrogate` (`scripts/surrogate.py`; figures in `surrogate.json` and, of the models that were trained for it, in",
            "`surrogate-runs.jsonl`). Plan and claims: [surrogate-plan.md](surrogate-plan.md), written before the runs. Why it works: docs/theory.md",
            "section 6. Statistics come from one text, measurements from another. Brackets are 95 % bootstrap intervals over the heads of a",
            "model; they say how far these heads speak for such heads, not how another training run would come out.",
        ],
        _in_short(entries, verdicts, correlations),
        _claims(verdicts),
        _models(entries),
        _by_kind(entries),
        _groups(entries),
        _by_layer(entries),
        _parts(entries),
        _reasons(correlations),
        _suggested(entries),
        _worst(entries),
        *(_other_column(entries, column, title) for column, title in COLUMNS.items()),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def _in_short(entries: Sequence[Entry], verdicts: Sequence[Judged], correlations: Sequence[Correlation]) -> list[str]:
    """Sentences with their figures."""
    orders, sizes = ([figure(e) for e in entries] for figure in (order_of_heads, mean_error))
    low, high = min(orders, key=_value), max(orders, key=_value)
    least, most = min(sizes, key=_value), max(sizes, key=_value)
    name = {id(x): e["model"] for figures in (orders, sizes) for x, e in zip(figures, entries, strict=True)}
    prior = [mean_error(e, "weights").value for e in entries]
    between = [x for x in verdicts if x.claim in BETWEEN]
    strong = [(words, x) for words, x, _, _, verdict in correlations if verdict == "yes"]
    lines = [
        "## In short",
        "",
        f"- Over {len(entries)} models and {sum(_heads(e) for e in entries)} heads, mean and covariance order the heads with a rank correlation from "
        f"{_shown(low)} ({name[id(low)]}) to {_shown(high)} ({name[id(high)]}).",
        f"- The mean error is between {_shown(least)} nats ({name[id(least)]}) and {_shown(most)} nats ({name[id(most)]}). From weights alone it is "
        f"{min(prior):.2f} to {max(prior):.2f}.",
    ]
    for claim in CLAIMS:
        counted = {
            v: sum(x.verdict == v for x in verdicts if x.claim == claim) for v in ("holds", "fails", "undecided")
        }
        lines.append(
            f"- {CLAIMS[claim][0]}. Of {len(entries)} models it holds in {counted['holds']}, fails in {counted['fails']}, undecided in "
            f"{counted['undecided']}."
        )
    lines += [f"- {BETWEEN[x.claim]}: {_shown(x.estimate, 3)}, {_in_words(x)}." for x in between]
    if strong:
        listed = "; ".join(f"{words} {_shown(x)}" for words, x in strong)
        lines.append(f"- What goes with a large error, by rank correlation within models: {listed}.")
    else:
        lines.append("- No quantity in the table below goes with the size of the error beyond the noise.")
    return lines


def _in_words(x: Judged) -> str:
    return {"holds": "so it does", "fails": "the opposite", "undecided": "undecided"}[x.verdict]


def _claims(verdicts: Sequence[Judged]) -> list[str]:
    models = [x.model for x in verdicts if x.claim == "order"]
    by_cell = {(x.claim, x.model): x for x in verdicts}
    lines = [
        "## Claims",
        "",
        "Each cell: the figure, its interval and the verdict; all claims of all models are judged together (Holm), so an interval may exclude the",
        "bound and the claim still be undecided.",
        "",
        *(f"- `{claim}`: {words[0]}." for claim, words in CLAIMS.items()),
        "",
        *_head("model", *CLAIMS),
    ]
    for model in models:
        cells = [by_cell[claim, model] for claim in CLAIMS]
        lines.append(_row(model, *(f"{_shown(x.estimate)} {x.verdict}" for x in cells)))
    between = [x for x in verdicts if x.claim in BETWEEN]
    if between:
        lines += ["", *_head("between models", "figure", "verdict")]
        lines += [_row(BETWEEN[x.claim], _shown(x.estimate, 3), x.verdict) for x in between]
    return lines


def _models(entries: Sequence[Entry]) -> list[str]:
    lines = [
        "## Models",
        "",
        *_head(
            "model", "parameters", "layers x width", "heads", "size", "mask", "positions", "input", "length",
            "tokens: statistics, measured", "energy of the mean, by layer",
        ),
    ]  # fmt: skip
    for e in entries:
        shares = [x["mean_share"] for x in e["layers"]]
        cells = (
            f"{e['parameters'] / 1e6:.1f} M", f"{len(e['layers'])} x {e['width']}", str(_heads(e)), str(e["head_dim"]),
            "causal" if e["causal"] else "none", e["positions"], e["corpus"], str(e["length"]),
            f"{e['statistics_tokens']:,}, {e['measured_tokens']:,}", f"{min(shares):.0%} to {max(shares):.0%}",
        )  # fmt: skip
        lines.append(_row(e["model"], *cells))
    return lines


def _by_kind(entries: Sequence[Entry]) -> list[str]:
    lines = [
        "## Entropy, by what the head is run on",
        "",
        "Spearman's correlation over heads, then the mean absolute error in nats.",
        "",
        *_head("model", *(KINDS[kind] for kind in MAIN)),
    ]
    for e in entries:
        cells = [f"{_shown(order_of_heads(e, kind))}; {_shown(mean_error(e, kind))}" for kind in MAIN]
        lines.append(_row(e["model"], *cells))
    return [*lines, "", "Two more kinds beside these, without intervals:", "", table(entries)]


def _groups(entries: Sequence[Entry]) -> list[str]:
    lines = [
        "## By depth, size and kind",
        "",
        "Heads of all models together: mean absolute error in nats, of mean and covariance and of real tokens in random order.",
        "",
        *_head("heads", "how many", "models", "mean and covariance", "real tokens, random order"),
    ]
    for words, members in _members(entries):
        counts = np.concatenate([draws_of(e, len(at)) for e, at in members], 1)
        cells = []
        for kind in ("covariance", "shuffled"):
            values = np.concatenate([np.abs(errors(e, kind))[at] for e, at in members])
            cells.append(_shown(mean(values, counts)))
        lines.append(_row(words, str(counts.shape[1]), str(len(members)), *cells))
    return lines


def _members(entries: Sequence[Entry]) -> list[tuple[str, list[tuple[Entry, Any]]]]:
    """Groups of heads, in words: entries with the places of their heads."""

    def depth(e: Entry, low: float, high: float) -> Any:
        last = max(1, len(e["layers"]) - 1)
        share = np.array(e["heads"]["layer"]) / last
        return np.flatnonzero((share > low) & (share <= high))

    def all_of(keep: Callable[[Entry], bool]) -> list[tuple[Entry, Any]]:
        return [(e, np.arange(_heads(e))) for e in entries if keep(e)]

    depths = {
        "first layer": (-1, 0),
        "first third of the others": (0, 1 / 3),
        "second third": (1 / 3, 2 / 3),
        "last third": (2 / 3, 1),
    }
    groups = [(words, [(e, depth(e, *span)) for e in entries]) for words, span in depths.items()]
    for word, name in (("width", "width"), ("head size", "head_dim")):
        groups += [
            (f"{word} {n}", all_of(lambda e, n=n, k=name: e[k] == n)) for n in sorted({e[name] for e in entries})
        ]  # type: ignore[misc]
    for causal, mask in ((True, "causal"), (False, "no mask")):
        for kind in sorted({e["positions"] for e in entries}):
            groups.append(
                (
                    f"{mask}, positions {kind}",
                    all_of(lambda e, c=causal, k=kind: (e["causal"], e["positions"]) == (c, k)),
                )
            )  # type: ignore[misc]
    kept = [(words, [(e, at) for e, at in members if len(at)]) for words, members in groups]
    return [(words, members) for words, members in kept if members]


def _by_layer(entries: Sequence[Entry]) -> list[str]:
    lines = [
        "## By layer",
        "",
        "From the first layer to the last: mean absolute error of mean and covariance, of real tokens in random order, and how far the layer's",
        "input is from normal, the mean Kolmogorov distance of random projections over that of as many normal tokens.",
        "",
        *_head("model", "mean and covariance", "real tokens, random order", "distance from normal"),
    ]
    for e in entries:
        layer = np.array(e["heads"]["layer"])
        by_layer = [
            ", ".join(f"{np.abs(errors(e, kind))[layer == x['layer']].mean():.2f}" for x in e["layers"])
            for kind in ("covariance", "shuffled")
        ]
        far = ", ".join(f"{x['normality'] / x['normality_expected']:.1f}" for x in e["layers"])
        lines.append(_row(e["model"], *by_layer, far))
    return lines


def _parts(entries: Sequence[Entry]) -> list[str]:
    lines = [
        "## What the error is made of",
        "",
        "The error of a head is the sum of three: statistics came from another text, tokens are not normal, and their order is forgotten",
        "(surrogate-plan.md). Mean size of each in nats, and its share of the mean squared error; shares sum to 1 and can be negative, where a part",
        "offsets the others.",
        "",
        *_head("model", "mean error, signed", "another text", "not normal", "order"),
    ]
    for e in entries:
        cells = [f"{_shown(part_size(e, name))}; {_shown(part_share(e, name))}" for name in ("text", "shape", "order")]
        lines.append(_row(e["model"], _shown(mean(errors(e), draws_of(e))), *cells))
    return lines


def _correlations(entries: Sequence[Entry]) -> list[Correlation]:
    """Per quantity: words, correlation with the absolute error, models of the same sign, models, whether decided."""
    known = {name: goes_with_error(entries, name) for name in QUANTITIES}
    decided = decided_by_holm({name: x.p_value(0.0) for name, (x, _, _) in known.items()})
    order = sorted(known, key=lambda name: -abs(known[name][0].value))
    return [(QUANTITIES[name], *known[name], "yes" if name in decided else "undecided") for name in order]


def _reasons(correlations: Sequence[Correlation]) -> list[str]:
    lines = [
        "## Where it fails",
        "",
        "Rank correlation of a head's absolute error with what may explain it, ranks taken within each model. Decided: beyond the noise, all",
        "quantities together (Holm). A correlation says which heads are hard, not why; the next section is about that.",
        "",
        *_head("quantity", "correlation with the error", "models of this sign", "decided"),
    ]
    for words, estimate, same, models, verdict in correlations:
        lines.append(_row(words, _shown(estimate), f"{same} of {models}", verdict))
    return lines


def _suggested(entries: Sequence[Entry]) -> list[str]:
    """Reasons that the models at hand suggested, judged on the trained ones."""
    at_hand, trained = ([e for e in entries if ("arm" in e) == is_trained] for is_trained in (False, True))
    lines = [
        "## Why it fails",
        "",
        "Suggested by the models at hand, and then tested on the trained ones (surrogate-plan.md, last section). Rank correlations within models.",
        "",
        *_head("claim", "correlation of", "models at hand", "trained models", "verdict on the trained"),
    ]
    first = reasons(at_hand)
    known = reasons(trained) if trained else {}
    estimates = {claim: x for claim, (x, _, _) in known.items()}
    learned = learned_order(entries)
    if learned is not None:
        estimates["learned order"] = learned
    decided = decided_by_holm({claim: x.p_value(0.0) for claim, x in estimates.items()})
    verdicts = {c: ("holds" if x.value > 0 else "fails") if c in decided else "undecided" for c, x in estimates.items()}
    for claim, (words, _, _) in REASONS.items():
        cells = [
            f"{_shown(figures[claim][0])}, {figures[claim][1]} of {figures[claim][2]} models" if figures else ""
            for figures in (first, known)
        ]
        lines.append(_row(f"`{claim}`", words, *cells, verdicts.get(claim, "not run")))
    words = 'mean size of the part "order", learned less rotary positions, nats'
    lines.append(
        _row(
            "`learned order`",
            words,
            "",
            "" if learned is None else _shown(learned),
            verdicts.get("learned order", "not run"),
        )
    )
    return lines


def _worst(entries: Sequence[Entry]) -> list[str]:
    shown = ("sink", "previous", "induction", "identity", "skew", "kurtosis", "rank")
    lines = [
        "## The heads that are furthest off",
        "",
        f"The {WORST} largest errors of each model: entropy measured, predicted from mean and covariance, from those of the measured text, and on real",
        "tokens in random order; then the quantities of the table above.",
        "",
        *_head("model", "head", "measured", "predicted", "own text", "random order", *shown),
    ]
    for e in entries:
        heads, predicted = e["heads"], e["predicted"]
        for i in np.argsort(-np.abs(errors(e)), kind="stable")[:WORST]:
            kinds = [f"{predicted[kind]['entropy'][i]:.2f}" for kind in ("covariance", "own", "shuffled")]
            values = [quantity(e, name) for name in shown]
            cells = ["" if column is None else f"{column[i]:.2f}" for column in values]
            place = f"{heads['layer'][i]}.{heads['head'][i]}"
            lines.append(_row(e["model"], place, f"{heads['entropy'][i]:.2f}", *kinds, *cells))
    return lines


def _other_column(entries: Sequence[Entry], column: str, title: str) -> list[str]:
    lines = [f"## {title}", "", "Spearman's correlation and mean absolute error.", ""]
    lines += _head("model", *(KINDS[kind] for kind in MAIN))
    for e in entries:
        cells = [
            f"{order_of_heads(e, kind, column).value:.2f}, {mean_error(e, kind, column).value:.3f}" for kind in MAIN
        ]
        lines.append(_row(e["model"], *cells))
    return lines


def _shown(x: Estimate, digits: int = 2) -> str:
    low, high = x.interval
    return f"{_signed(x.value, digits)} [{_signed(low, digits)}, {_signed(high, digits)}]"


def _signed(x: float, digits: int) -> str:
    return f"{round(x, digits) + 0.0:.{digits}f}"  # + 0.0: no minus sign on zero


def _value(x: Estimate) -> float:
    return x.value


def _heads(e: Entry) -> int:
    return len(e["heads"]["entropy"])


def _head(*cells: str) -> list[str]:
    return [_row(*cells), "|---" * len(cells) + "|"]


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"
