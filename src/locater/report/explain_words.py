"""What explanations say in sentences: on the page, in the terminal and in notebooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from locater.report.tables import counted

if TYPE_CHECKING:
    from locater.explain.explanation import Explanation
    from locater.results.explanations import Explanations, TokenStream

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


def quoted(text: str) -> str:
    """A token between quotes, with line ends visible."""
    return "‘" + text.replace("\n", "↵").replace("\t", "⇥") + "’"


def verdict(result: Explanations) -> str:
    """What the model predicts."""
    if result.target.index is None:
        return "The model returns no logits: its output is explained along itself."
    if not result.predictions:
        return f"The model scores {quoted(result.target_name)} with {result.target.value:.4g}."
    first = max(result.predictions, key=lambda p: p.probability)
    others = [p for p in result.predictions if p.index != first.index][:2]
    more = ", then " + " and ".join(f"{quoted(p.name)} ({percent(p.probability)})" for p in others) if others else ""
    return f"The model's first choice is {quoted(first.name)} ({percent(first.probability)}){more}."


def target_sentence(result: Explanations) -> str:
    """Which number is explained, of what input."""
    tokens = " and ".join(_counted_tokens(result, stream) for stream in result.streams)
    if result.target.index is None:
        return f"Explained: the mean of the output over its tokens, along itself ({result.target.value:.4g}); {tokens}."
    where = "" if result.target.position is None else f" at token {result.target.position}"
    what = f"the logit of {quoted(result.target_name)}{where} ({result.target.value:.4g})"
    return f"Explained: {what}; {tokens}."


def _counted_tokens(result: Explanations, stream: TokenStream) -> str:
    if stream.ids is None and result.picture is not None:
        return f"{result.picture.rows} x {result.picture.columns} patches"
    return counted(len(stream.tokens), f"{stream.name} token" if len(result.streams) > 1 else "token")


def best_method(result: Explanations) -> str:
    """Which method's scores take the target down fastest when tokens are removed; empty where that was not tried, or
    where methods do not differ.
    """
    areas = sorted((curve.area, method_label(name)) for name, curve in result.deletion.items())
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


def sentence(text: str) -> str:
    """
    >>> sentence("scores sum to the target")
    'Scores sum to the target.'
    """
    return text[:1].upper() + text[1:] + ("" if not text or text.endswith(".") else ".")


def unit(method: Explanation) -> str:
    """What the scores of a method add up to, in a few words."""
    total = float(method.scores.nansum())
    if method.offset is None:
        return f"scores sum to {total:.3g}"
    offset = method.offset if abs(method.offset) > 5e-4 * abs(total) else 0.0
    return f"scores sum to {total:.3g}; {offset:.3g} comes from no token"


def heads_note(result: Explanations) -> str:
    """What the map of heads shows, and which patterns the page has."""
    if not result.layers:
        return result.assumptions.get("patterns") or "No attention was recorded."
    shares = (
        "Share of the target that passes through each head." if result.heads else result.assumptions.get("heads", "")
    )
    total = sum(entry["heads"] for entry in result.layers)
    shown = len(result.patterns)
    which = (
        "Choose a head to see what it attends to."
        if shown == total
        else f"Patterns of {shown:,} of {counted(total, 'head')} are here (dots): {result.assumptions['patterns']}"
    )
    return f"{shares} {which}".strip()
