"""The words of docs/kinds-of-heads.md, around the numbers of docs/results/kinds-of-heads.json."""

from __future__ import annotations

from typing import Any

from locater.findings.flags import LEVEL, LOCAL, ROLE_WEIGHT, UNIFORM

Head = dict[str, Any]
PARTS = ("spectrum", "pattern", "prediction")


def page(document: dict[str, Any]) -> str:
    """The page in Markdown."""
    heads = {head["kind"]: head for head in document["heads"]}
    sections = [
        f"## {TITLES[kind]}\n\n{WHAT[kind]}\n\n{_figures(kind)}\n\n{_numbers(head)}\n\n{SAYS[kind](head, document)}\n"
        for kind, head in heads.items()
    ]
    return "\n".join([HEAD, *sections, _table(heads), _counts(document["models"]), TAIL])


def _figures(kind: str) -> str:
    alts = dict(zip(PARTS, ("eigenvalues", "attention map", "weight by distance, measured and predicted"), strict=True))
    return " ".join(f"![{kind}: {alts[part]}](images/kinds-{kind}-{part}.svg)" for part in PARTS)


def _numbers(head: Head) -> str:
    cost = head["cost"]
    loss = f"{cost:.2f} nats" if cost >= 0.005 else f"{cost:.4f} nats"
    flags = ", ".join(f"`{flag}`" for flag in head["flags"]) or "none"
    return (
        f"Head {head['head']} of layer {head['layer']} in “{head['model']}”: M {head['M']:.2f}, √F {head['F'] ** 0.5:.2f}, κ {head['concentration']:.3f}, "
        f"Λ {head['localization']:.3f}; flags of the probe: {flags}. Without it the loss, {head['loss']:.2f}, rises by {loss}."
    )


def _at(head: Head, series: str, zone: str) -> float:
    return head["weights"][series][head["zones"].index(zone)]


def _sink(head: Head, document: dict[str, Any]) -> str:
    return (
        f"**The prediction** sees the sink: normal tokens with the measured first token in its place put {head['predicted_sink']:.2f} of the weight there, measured "
        f"{head['sink']:.2f}. It misses when: the model looks at the previous token exactly where the current one asks for a copy (weight "
        f"{_at(head, 'measured', '1 before'):.2f}), and normal tokens ask for nothing in particular. Weights alone do not know that one token differs from all others "
        f"({_at(head, 'weights alone', 'first token'):.2f})."
    )


def _previous(head: Head, document: dict[str, Any]) -> str:
    return (
        f"**The prediction fails here.** This model adds learned positions to the stream, so the head finds the previous token by what it reads. Normal tokens have no "
        f"position: {_at(head, 'predicted', '1 before'):.2f} of their weight lies one token back, measured {_at(head, 'measured', '1 before'):.2f}. That the head is sharp is "
        f"half seen (entropy {head['predicted_entropy']:.2f} predicted, {head['entropy']:.2f} measured). With rotary positions it is different: see the local head."
    )


def _induction(head: Head, document: dict[str, Any]) -> str:
    radius = (head["F"] / head["head_dim"]) ** 0.5
    return (
        f"**The spectrum** shows why eigenvalues are not enough. The largest has size {head['largest_eigenvalue']:.2f}, and in a normal matrix with this √F their root mean square would be {radius:.2f}. W "
        f"compares what a token is with what stood before another, two parts of the stream that differ, and a map between different parts has eigenvalues near 0 however strong it is. √F sees it; M, κ "
        f"and Λ do not.\n\n"
        f"**The prediction** gets how sharp the head is (entropy {head['predicted_entropy']:.2f}, measured {head['entropy']:.2f}) and cannot get where it looks: "
        f"{_at(head, 'measured', 'after copy'):.2f} of the weight lies on tokens that followed the current one before, and normal tokens never repeat."
    )


def _local(head: Head, document: dict[str, Any]) -> str:
    return (
        f"**The prediction is right here**, zone by zone: {_at(head, 'predicted', '1 before'):.2f} of the weight one letter back, measured {_at(head, 'measured', '1 before'):.2f}. Rotary "
        f"positions are applied by the head itself, to normal tokens too. It needs the statistics: what points back is the mean of the stream, the same in every token and turned by its position. With "
        f"the mean alone {_at(head, 'the mean alone', '1 before'):.2f} of the weight lies one letter back, without it {_at(head, 'without the mean', '1 before'):.2f}. Weights alone assume a mean of zero, and predict {head['prior_entropy']:.2f} nats where {head['entropy']:.2f} are measured. "
        f"Λ, from the mean of the eigenvalues at offset 0, is {head['localization']:.2f}: it speaks of tokens that resemble their neighbours, not of positions."
    )


def _dead(head: Head, document: dict[str, Any]) -> str:
    averaging = max(document["near_uniform"], key=lambda entry: entry["cost"])
    return (
        f"**The prediction is right**, from weights alone too: logits that hardly differ are the one thing that √F ({head['F'] ** 0.5:.2f}) decides by itself. It is not small enough for the flag "
        f"`uniform` (√F below {UNIFORM**0.5:.1f}): a weight decay of 1 has not shrunk it that far.\n\n"
        f"**Uniform is not dead.** Layer {averaging['layer']}, head {averaging['head']} of “{averaging['model']}” has an entropy ratio of {averaging['entropy_ratio']:.2f}, more than this head, and "
        f"without it the loss rises by {averaging['cost']:.2f} nats: an average of all tokens counts them. [Take a head out](guides/study-heads.md#without-a-head) before you call it dead."
    )


TITLES = {
    "sink": "Sink",
    "previous-token": "Previous token",
    "induction": "Induction",
    "local": "Local",
    "dead": "Dead",
}
WHAT = {
    "sink": "Rests on the first token where it has nothing to add. Here it copies the previous token after a few trigger tokens (the dots off the column) and waits on the first token elsewhere.",
    "previous-token": "Looks at the token before, whatever it is. Later heads build on it: it tells every token what stood in front of it.",
    "induction": "Looks at what followed the current token the last time: the stripe in the pattern, which begins where the random tokens repeat. It needs a previous-token head in an earlier layer.",
    "local": "Spreads its weight over the last few tokens.",
    "dead": "Averages all tokens, and nearly nothing reads the result: the task needs one head, and the model has four.",
}
SAYS = {"sink": _sink, "previous-token": _previous, "induction": _induction, "local": _local, "dead": _dead}


def _table(heads: dict[str, Head]) -> str:
    lines = [
        "## The five side by side\n",
        "Entropies in nats. The prediction from statistics runs the head on normal tokens with the mean and covariance of its real input; weights alone assume mean 0 and covariance 1.\n",
        "| kind | entropy, measured | from statistics | from weights | `sink` | `previous` | `induction` | `distance` | `entropy_ratio` | loss without it |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for kind, head in heads.items():
        entropies = (f"{head[name]:.2f}" for name in ("entropy", "predicted_entropy", "prior_entropy"))
        columns = (f"{head[name]:.2f}" for name in ("sink", "previous", "induction", "distance", "entropy_ratio"))
        lines.append(f"| {TITLES[kind]} | {' | '.join((*entropies, *columns))} | +{head['cost']:.2g} |")
    return "\n".join(lines) + "\n"


def _counts(models: list[dict[str, Any]]) -> str:
    kinds = list(TITLES)
    lines = [
        "## How many there are\n",
        f"Heads of each kind in the models at hand. Near uniform: `entropy_ratio` above {LEVEL}. Whether heads are dead was tried in the models that are trained here.\n",
        f"| model | heads | {' | '.join(TITLES[kind].lower() for kind in kinds)} | near uniform |",
        "|---|---|" + "---|" * (len(kinds) + 1),
    ]
    for model in models:
        cells = ("-" if model[kind] is None else str(model[kind]) for kind in kinds)
        lines.append(f"| {model['model']} | {model['heads']} | {' | '.join(cells)} | {model['uniform']} |")
    return "\n".join(lines) + "\n"


HEAD = f"""# Five kinds of heads

How to tell what a head does from a few numbers, with a real trained head of each kind: its spectrum, its attention on one sequence, and where its weight lies beside where it was
predicted to lie.

| kind | looks at | rule |
|---|---|---|
| [Sink](#sink) | the first token | `sink` above {ROLE_WEIGHT}: role `first-token`; above 0.9 the flag `sink` too |
| [Previous token](#previous-token) | the token before | `previous` above {ROLE_WEIGHT} |
| [Induction](#induction) | what followed the same token before | `induction` above {ROLE_WEIGHT} |
| [Local](#local) | the last few tokens | `distance` below {LOCAL:g}, and at most half of the weight on itself |
| [Dead](#dead) | everything alike | without it the loss rises by less than 0.001 nats; candidates: `entropy_ratio` above {LEVEL}, or √F below {UNIFORM**0.5:g} in a scan (flag `uniform`) |

These are columns of [`locater probe`](probe.md#columns); a head has the first role that it fulfils, and being `sharp` or `locked` is then no fault but its work. [`locater.observe`](observe.md) has
`sink`, `distance` and `entropy_ratio` too, on your own forward passes. `previous` and `induction` are measured on random tokens that are repeated once.

    locater probe MODEL --text FILE --report probe.html   # roles and numbers of all heads
    locater scan MODEL --eigenvalues --json scan.json     # spectra

In Python, [`locater.attention_pattern(model, inputs)`](observe.md#maps-of-single-heads) gives the maps of single heads.

How to read the pictures:

- **Spectrum.** Eigenvalues of s W, W = W_QᵀW_K, with their mean M / head size as a ring. The dashed circle has the root mean square of the singular values, √(F / head size), as its radius: the
  eigenvalues of a normal matrix would have that size. Far inside it, W maps one part of the stream to another.
- **Pattern.** A row per token that looks, a column per token that is looked at. Darker is more weight (on the scale of its root, so that small weights are seen).
- **Prediction.** Where the weight lies, by distance, from the ninth token on: measured, predicted from the mean and covariance of what the head reads, and from weights alone.
  [Section 6 of the theory](theory.md#6-predicting-real-heads-the-gaussian-surrogate) says how.
"""
TAIL = """Made by `python scripts/kinds_of_heads.py`, which trains four models in a minute or two each on a CPU ([the recipes](../scripts/gallery_models.py)), probes them on data that they have not seen, and takes
the clearest head of each kind; the last rows of the table need more models ([the gallery](gallery.md) shows all of them). Each model was trained with one seed: these heads are examples, not samples.
[All numbers](results/kinds-of-heads.json).
"""
