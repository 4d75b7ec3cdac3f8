"""What differs between two models, as one sentence: from the document of their comparison."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from locater.report.verdict_sentences import amount

Document = Mapping[str, Any]
Place = tuple[int, int]
NAMED = 3  # tensors, groups of modules or moved heads that a sentence names
KINDS = 4  # modules of a group
SAME = 1e-3  # relative difference of a head under which it is the same in all but rounding
NOTABLE = 0.01  # above which it changed
CANCELLED = 10.0  # times the difference of heads is that of tensors which cancel each other
ELSEWHERE = 0.7  # median difference of heads and tensors from which two models have nothing in common
READ = "queries, keys and norms were read, and nothing is known of the rest"


PERMUTED = "permuted-heads"  # within layers and with their outputs, so that nothing else changed


class ChangeVerdict(NamedTuple):
    """`name` is one of: identical, dtype, config, nonfinite, rotary-order, permuted-heads, moved-heads, equivalent,
    low-rank, another-model, other-names, changed; unread where values, outputs and other tensors were not compared, and
    other-heads where the two have other heads.
    """

    name: str
    sentence: str


def change_verdict(comparison: Document) -> ChangeVerdict:
    """The verdict on a comparison of two."""
    if not comparison["aligned"]:
        return ChangeVerdict("other-heads", "They have other heads, so no head is compared with another.")
    weights = comparison.get("weights")  # not in documents of version 0.2
    if weights is None:
        if comparison["equal"]:
            return ChangeVerdict("unread", f"Every number of every head is equal; {READ}.")
        return ChangeVerdict("unread", f"Numbers of heads differ; {READ}.")
    return _alike(weights) or _changed(weights, comparison["heads"])


def _alike(weights: Document) -> ChangeVerdict | None:
    """Tensors that are all equal, in their bytes or but for their type."""
    count = weights["compared"]
    if weights["only_a"] or weights["only_b"] or weights["modules"] or not count:
        return None
    config = _config_words(weights) + _partly(weights)
    if weights["dtype"]:
        sentence = (
            f"Another dtype alone: {weights['dtype']:,} of {amount(count, 'tensor')} have the same numbers, rounded to "
            f"another type{'; the others have equal bytes' if weights['equal'] else ''}"
        )
        return ChangeVerdict("dtype", f"{sentence}{config}.")
    sentence = f"all {count:,} tensors have equal bytes"
    if weights["config"]:
        return ChangeVerdict("config", f"A{sentence[1:]}{config}.")
    return ChangeVerdict("identical", f"Identical: {sentence}{config}.")


def _partly(weights: Document) -> str:
    return "" if weights["whole"] else "; only those of attention were read, as of any GGUF file"


def _config_words(weights: Document) -> str:
    keys = weights["config"]
    more = f" and {len(keys) - NAMED:,} more" if len(keys) > NAMED else ""
    return f", and config.json differs: {', '.join(keys[:NAMED])}{more}" if keys else ""


def _changed(weights: Document, heads: Sequence[Document]) -> ChangeVerdict:
    """Tensors that changed, and what that does to heads."""
    name, acts = _heads_words(weights, heads)
    if not weights["compared"]:
        return ChangeVerdict(
            "other-names", f"No tensor has a name that both know, so heads alone were compared. {acts}"
        )
    tensors, lost = f"{_tensors_words(weights)}{_config_words(weights)}{_partly(weights)}.", weights["nonfinite"]
    if lost:
        told = "" if acts.startswith("No head changed") else acts
        return ChangeVerdict("nonfinite", f"{lost_words(weights)}, where A has finite ones. {tensors} {told}".rstrip())
    sentences = (tensors, acts) if name in ("changed", "low-rank") else (acts, tensors)
    return ChangeVerdict(name, " ".join(filter(None, sentences)))


def lost_words(weights: Document) -> str:
    """Which tensors have numbers that are not finite; empty if none has."""
    lost = weights["nonfinite"]
    more = f" and {len(lost) - NAMED:,} more" if len(lost) > NAMED else ""
    return f"NaN or infinite numbers in {', '.join(lost[:NAMED])}{more}" if lost else ""


def _tensors_words(weights: Document) -> str:
    """`60 of 272 tensors changed: q_proj and v_proj (30 each), rank 8, by 5 % of their norm`."""
    modules = weights["modules"]
    parts = []
    count = sum(module["changed"] for module in modules)
    if count:
        parts.append(f"{count:,} of {amount(weights['compared'], 'tensor')} changed: {_modules_words(modules)}")
    if weights["dtype"]:
        parts.append(f"{weights['dtype']:,} have another dtype")
    for key, letter in (("only_a", "A"), ("only_b", "B")):
        if weights[key]:
            more = f" and {len(weights[key]) - NAMED:,} more" if len(weights[key]) > NAMED else ""
            parts.append(f"only {letter} has {', '.join(weights[key][:NAMED])}{more}")
    return "; ".join(parts)


def _modules_words(modules: Sequence[Document]) -> str:
    """Kinds of modules with the same rank and count together, those that changed most often first."""
    alike: dict[tuple[int, int | None], list[Document]] = {}
    for module in sorted(modules, key=lambda x: -x["changed"]):
        alike.setdefault((module["changed"], module["rank"]), []).append(module)
    parts = [_kinds_words(count, rank, some) for (count, rank), some in list(alike.items())[:NAMED]]
    rest = sum(len(some) for some in list(alike.values())[NAMED:])
    return ", ".join(parts) + (f" and {amount(rest, 'more kind')}" if rest else "")


def _kinds_words(count: int, rank: int | None, some: Sequence[Document]) -> str:
    """`q_proj and v_proj (30 each, rank 8, by 5 % of their norm)`."""
    names = [_short(x["module"]) for x in some]
    more = f" and {len(names) - KINDS} more" if len(names) > KINDS else ""
    listed = ", ".join(names[:KINDS]) if more or len(names) < 2 else f"{', '.join(names[:-1])} and {names[-1]}"
    words = [f"{count:,}" + " each" * (len(some) > 1)] * (count > 1)
    words += [f"rank {rank}"] * (rank is not None)
    known = [x["relative"] for x in some if x["relative"] is not None]
    if known:
        words.append(
            f"by {_percent(median(known))} of {'their' if count * len(some) > 1 else 'its'} norm".replace(
                "times of", "times"
            )
        )
    return f"{listed}{more}" + (f" ({', '.join(words)})" if words else "")


def _short(module: str) -> str:
    """`model.layers.*.self_attn.q_proj.weight` as `q_proj`."""
    parts = module.split(".")
    names = [part for part in parts if part not in ("weight", "*")]
    return names[-1] if names and names[-1] != "bias" else ".".join(names[-2:]) or module


def _percent(share: float) -> str:
    """`5 %`, `0.012 %`, `49 times`."""
    value = 100 * share
    if value >= 1000:
        return f"{share:,.3g} times" if share < 1000 else f"{share:,.0f} times"
    return f"{value:.0f} %" if value >= 9.5 else f"{value:.2g} %"


def _heads_words(weights: Document, heads: Sequence[Document]) -> tuple[str, str]:
    """The name of what happened, and what it does to heads."""
    known = [x for x in heads if x["weights"] is not None]
    sizes = {(x["layer"], x["head"]): _largest(x["weights"]) for x in known}
    numbers = {place: size for place, size in sizes.items() if size is not None}
    if not numbers:
        return "changed", ""
    changed = [place for place, size in numbers.items() if size > NOTABLE]
    if not changed:
        return _unchanged(weights, numbers)
    of = amount(len(heads), "head")
    turned = [x for x in known if _turned(x["weights"])]
    if 2 * len(turned) > len(changed):
        return "rotary-order", (
            "The rotary channels of queries and keys are in another order, or turn at other frequencies: "
            f"{len(turned):,} of {of} have equal products for tokens at one position, and other products at a distance."
        )
    moved = {(x["layer"], x["head"]): x["moved"] for x in known if x["moved"] is not None}
    if moved and 2 * len(moved) >= len(changed):
        return _moved(moved, len(changed), of)
    middle, (largest, at) = median(numbers.values()), max((size, place) for place, size in numbers.items())
    if middle > ELSEWHERE and _throughout(weights):
        shown = (
            f"Another model: heads differ by {_percent(middle)} (median), where unrelated weights of one size differ"
        )
        return "another-model", f"{shown} by 141 %."
    ranks = [x["rank"] for x in weights["modules"]]
    layers = {layer for layer, _ in changed}
    throughout = len(changed) == sum(x["layer"] in layers for x in heads)  # and not single heads of a layer
    name = "low-rank" if throughout and ranks and None not in ranks and not weights["only_b"] else "changed"
    typical = _percent(median(numbers[place] for place in changed))
    most = f"median {typical}, most {at[0]}.{at[1]}: {_percent(largest)}"
    verb = "differs" if len(changed) == 1 else "differ"
    return name, f"{len(changed):,} of {of} {verb} by more than {_percent(NOTABLE)} ({most})."


def _turned(differences: Mapping[str, float | None]) -> bool:
    """Whether a head has the same logits at one position, and others at a distance."""
    still, turned = differences["qk"], differences["qk_rotated"]
    return still is not None and turned is not None and still <= SAME and turned > NOTABLE


def _unchanged(weights: Document, numbers: Mapping[Place, float]) -> tuple[str, str]:
    """Tensors changed, and no head did."""
    most = max(numbers.values())
    words = "No head changed" + (f": at most by {_percent(most)}" if most else "")
    modules = weights["modules"]
    inside = modules and all(module["attention"] for module in modules)
    # of tensors in 16 bits rounding is left, far below what changed
    far = all(most * CANCELLED <= (module["relative"] or 0) for module in modules)
    if inside and (most <= SAME or far) and not (weights["only_a"] or weights["only_b"]):
        return "equivalent", f"{words}, so what changed cancels: these weights do the same."
    return "changed", f"{words}."


def _moved(moved: Mapping[Place, Document], changed: int, of: str) -> tuple[str, str]:
    """Heads that are heads of A from elsewhere, or have their queries."""
    places = list(moved)
    named = ", ".join(f"{a}.{b} from {moved[a, b]['layer']}.{moved[a, b]['head']}" for a, b in places[:NAMED])
    more = f" and {len(places) - NAMED:,} more" if len(places) > NAMED else ""
    whole = Counter(x["part"] for x in moved.values()).most_common(1)[0][0] == "head"
    what = "are other heads of A" if whole else "have the queries of other heads of A"
    within = all(x["layer"] == layer for (layer, _), x in moved.items())
    origins = Counter((x["layer"], x["head"]) for x in moved.values())
    permuted = whole and within and set(origins) == set(moved) and len(moved) == changed
    name = PERMUTED if permuted else "moved-heads"
    harmless = ", which changes nothing that the layer does" if permuted else ""
    return name, f"{len(moved):,} of {of} {what}{harmless}: {named}{more}."


def _throughout(weights: Document) -> bool:
    """Whether most tensors changed beyond recognition."""
    strong = sum(x["changed"] for x in weights["modules"] if (x["relative"] or 0) > ELSEWHERE)
    return 2 * strong > weights["compared"]


def _largest(differences: Mapping[str, float | None]) -> float | None:
    return max((x for x in differences.values() if x is not None), default=None)
