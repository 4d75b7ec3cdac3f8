"""The report's own part: figures and tables of this paper, from the JSON document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from locater_papers.engine.arms_page import (
    Entries,
    Part,
    Said,
    Sections,
    arms_table,
    carried_in,
    in_sections,
    in_short,
    numbers_of,
)
from locater_papers.engine.figures import Panel, Series, draw


def page(document: Mapping[str, Any]) -> Part:
    """The sections after the verdicts, and their figures."""
    sections: Sections = (
        (_forms, ("a4",)), (_limits, ("b3", "b4", "b6")), (_leak, ("c1",)), (_cost, ("d3", "d4")), (_training, ()),
    )  # fmt: skip
    return in_sections(document, sections)


def lead(document: Mapping[str, Any]) -> list[str]:
    """The answer in plain words; only what was measured."""
    found, more = numbers_of(document), dict[str, float]()
    if found.keys() >= {"d3", "d4", "d6"}:
        d4, d6 = found["d4"], found["d6"]
        equal = next(row["crossing"] for row in found["d3"]["sizes"] if row["size"] == d6["size"])
        more |= {
            "equal": equal,
            "few": d6["tokens"],
            "size": d6["size"],
            "many": d4["times"][-1]["tokens"],
            "timed": d4["size"],
        }
    if "b4" in found:
        more["keys"] = found["b4"]["keys"][-1]["keys"]
    said: Said = (
        (("a1", "a2"), lambda v: "Fastmax puts 1 + x + x²/2 in the place of softmax's exp(x). Sums over keys can then be taken once for "
         "all queries, and cost grows "
         f"with the number of tokens, not with its square. The two ways to compute it agree to {max(v['a1'], v['a2']):.0e}."),
        (("equal", "d4", "d6"), lambda v: f"It pays from some length on: with heads of {v['size']:.0f}, order 2 multiplies as often as "
         f"softmax attention at {v['equal']:,.0f} tokens, and at {v['few']:,.0f} tokens {v['d6']:.1f} times as often. At {v['many']:,.0f} "
         f"tokens and heads of {v['timed']:.0f} it took {v['d4']:.2f} of the time of fused attention here."),
        (("b5", "b7"), lambda v: "The price is sharpness. With queries and keys at unit length no weight exceeds 5 / (n + 4) among n keys "
         f"(keys built for it attain that to {abs(v['b5']):.0e}), and entropy is never more than {v['b7']:.3f} nats under that of "
         "uniform attention."),
        (("b10", "keys"), lambda v: f"A larger scale brings sharpness back slowly: to give one of {v['keys']:,.0f} keys half of the "
         f"weight it takes {v['b10']:.0f} times the scale that softmax needs."),
        (("c1", "c2"), lambda v: "Normalising over the sequence, as public code does, tells earlier tokens of later ones: a new last "
         f"token changes outputs of the first half by {v['c1']:.2%}. Per token it changes them by {v['c2']:g}."),
        (("a5",), lambda v: f"Order 1 loses its digits where all keys oppose the query: a relative error of {v['a5']:.1e} in float32."),
        (("e1",), lambda v: f"Trained, order 2 changes the report loss of a causal language model by {v['e1']:+.3f} nats against "
         "softmax, as seen at this size."),
        (("e2",), lambda v: f"Order 1 changes it by {v['e2']:+.3f} nats."),
        (("e4",), lambda v: f"On images order 2 changes test accuracy by {v['e4']:+.3f}."),
        (("e5", "e6"), lambda v: f"Trained maps of order 2 have {v['e5']:.3f} of the largest entropy, softmax's {v['e6']:.3f}."),
    )  # fmt: skip
    return in_short(document, said, more)


def _forms(found: Entries) -> Part:
    held = found["a4"]
    lines = [
        "## a. Rounding", "",
        f"Errors in float32 over the largest output, causal, one head of {held['size']}. The explicit map is of the last 256 queries.", "",
        "| order | tokens | factorised | explicit |", "|---|---|---|---|",
    ]  # fmt: skip
    lines += [
        f"| {r['order']} | {r['tokens']:,} | {r['factorised']:.1e} | {r['explicit']:.1e} |" for r in held["rounding"]
    ]
    fars = list(held["opposed"]["1"])
    lines += [
        "",
        "Where all keys point away from the query, weights of order 1 are near 0 and their sum has few digits; those of order 2 are "
        "near 1/2.",
        "",
    ]
    lines += [
        "| error, keys so far from the opposite of the query | " + " | ".join(fars) + " |",
        "|---" * (len(fars) + 1) + "|",
    ]
    lines += [
        f"| order {order} | " + " | ".join(f"{x:.1e}" for x in by.values()) + " |"
        for order, by in held["opposed"].items()
    ]
    return lines, {}


def _limits(found: Entries) -> Part:
    table, b3 = found["b4"]["keys"], found["b3"]
    first = Panel(
        "largest weight one key can have", "keys", "weight",
        [
            Series("Fastmax, order 2", [(r["keys"], r["built"]) for r in table], "line", 1),
            Series("softmax, |x| at most 1", [(r["keys"], r["softmax"]) for r in table], "line", 0),
            Series("uniform", [(r["keys"], 1 / r["keys"]) for r in table], "dashed", 4),
        ],
        x_scale="log", y_scale="log", y_limits=(1e-4, 1.5),
    )  # fmt: skip
    some = [r for r in table if r["half_scale"] is not None]
    second = Panel(
        "scale at which one key can have half", "keys", "scale of x",
        [
            Series("Fastmax, order 2", [(r["keys"], r["half_scale"]) for r in some], "line", 1),
            Series("softmax", [(r["keys"], r["half_scale_softmax"]) for r in some], "line", 0),
        ],
        x_scale="log", y_scale="log", y_limits=(1, 150),
    )  # fmt: skip
    lines = [
        "## b. What it cannot weigh", "", "![limits](figure:limits)", "",
        f"Between -1 and 1 the polynomial runs from 1/2 to 5/2, exp from 0.37 to 2.7: it is {b3['at_minus_1']:+.0%} off at -1 and "
        f"{b3['at_1']:+.0%} at 1. Keys built to",
        "attain each bound: one along the query and all others against it; for entropy, the share of keys along it that is worst.", "",
        "| keys | largest weight | 5 / (n + 4) | softmax, same x | least entropy / log n | largest slope | 4 / (n + 4) |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for r in table:
        cells = f"{r['built']:.5f} | {r['cap']:.5f} | {r['softmax']:.5f} | {r['share']:.3f} | {r['slope']:.5f} | {r['slope_bound']:.5f}"
        lines.append(f"| {r['keys']:,} | {cells} |")
    sizes = ", ".join(f"{x:.4f} (heads of {size})" for size, x in found["b6"]["by_size"].items())
    lines += [
        "", f"Gaussian queries and keys do not come near: mean entropy over log n is {sizes}.", "",
        "A scale s > 1 lets one key have half of the weight once s² + 2 s + 2 = n - 1; softmax needs exp(2 s) = n - 1. The root of n "
        "against its",
        "logarithm. Softmax held to |x| at most 1 (QK-norm without a gain) is capped too, and not much higher: it is the scale that "
        "sets them apart.",
    ]  # fmt: skip
    return lines, {"limits": draw([first, second])}


def _leak(found: Entries) -> Part:
    held = found["c1"]
    panels = [
        Panel(
            "last token drawn anew", "tokens", "change of the first half's outputs", [Series("",
            [(r["tokens"], r["change"]) for r in held["by_length"]], "line", 1)],
            x_scale="log", y_scale="log",
        ),
        Panel(
            f"last of {held['tokens']} tokens made longer", "times as long", "change of the first half's outputs",
            [Series("", [(r["factor"], r["change"]) for r in held["by_factor"]], "line", 1)],
        ),
    ]  # fmt: skip
    ten = held["by_factor"][-1]
    lines = [
        "## c. What the norm tells", "", "![leak](figure:leak)", "",
        "Mean over tokens off, and over the largest length: both move when a later token does, under a causal mask too. Relative change "
        "of what the",
        f"first half of a sequence gives out. It fades with length, as the mean does, unless the last token is long: {ten['factor']:g} "
        "times as long changes",
        f"{ten['change']:.1%}. The mechanism here refuses the pair of a causal mask and this norm.",
    ]  # fmt: skip
    return lines, {"leak": draw(panels)}


def _cost(found: Entries) -> Part:
    sizes, d4 = found["d3"]["sizes"], found["d4"]
    panel = Panel(
        f"processor time, {d4['heads']} heads of {d4['size']}", "tokens", "milliseconds",
        [
            Series(name, [(r["tokens"], 1000 * r[name]) for r in d4["times"]], "line", n)
            for n, name in enumerate(("fused", "order 2", "order 1"))
        ],
        x_scale="log", y_scale="log",
    )  # fmt: skip
    lines = [
        "## d. Cost", "", "![time](figure:cost)", "",
        "Features of a token at order 2, and the number of tokens from which on it multiplies less than softmax attention. Pairs of "
        "channels are",
        "taken once here, so there are about half as many as in the public form.", "",
        "| head size | features | of the public form | equal at T = |", "|---|---|---|---|",
    ]  # fmt: skip
    lines += [f"| {r['size']} | {r['features']:,} | {r['published']:,} | {r['crossing']:,.0f} |" for r in sizes]
    lines += [
        "", "Times of one run in one thread, all keys in view, forward, in turns; only their ratios mean anything elsewhere:", "",
        "| tokens | fused | order 1 | order 2 | order 2 / fused |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for r in d4["times"]:
        cells = " | ".join(f"{1000 * r[name]:.1f} ms" for name in ("fused", "order 1", "order 2"))
        lines.append(f"| {r['tokens']:,} | {cells} | {r['order 2'] / r['fused']:.2f} |")
    return lines, {"cost": draw([panel])}


def _training(found: Entries) -> Part:
    held = carried_in(found)
    if held is None:
        return [], {}
    lines = [
        "## e. Trained", "",
        f"{held['layers']} layers, mechanisms at the better of two rates, variations at one. Figures by seed.",
        "Text unless the arm says image. Entropy is a share of the log of keys in view.",
        f"Sinks: share of heads whose first token receives more than {held['sink']:g}.", "",
        *arms_table(
            held["arms"],
            {"loss": "report loss", "accuracy": "accuracy", "entropy_share": "entropy", "sink_rate": "sinks",
            "stable_rank": "stable rank of maps"},
        ),
    ]  # fmt: skip
    return lines, {}
