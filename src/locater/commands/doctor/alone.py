"""What can be told from a model alone: values, heads and layers beside their neighbours, and config.json.

Every threshold here is far from what trained models show; the bench of faults says how far (`make verdicts`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor

from locater.commands.doctor.heads import LayerHeads
from locater.commands.doctor.places import heads_words, layers_words, tensors_words
from locater.commands.doctor.reading import Examined
from locater.commands.doctor.tensors import Facts, place_of
from locater.families.registry import BUILT_IN
from locater.findings.causes import Finding, finding
from locater.layers.layout import AttentionLayout

RANDOM_SPREAD = 6.0  # between quartiles of log2 |x|; weights have 1.9, random bits 16 (float16) to 128
FEW_LEVELS, MANY_LEVELS = 4, 8  # distinct values in groups of 32
OFF = 8.0  # times the median of its neighbours: a tensor
HEAD_OFF = 6.0  # times the median of the heads around it: a map of a head
DEAD = 1e-4  # of the median of the heads around it
ROW_OFF = 50.0  # times the median row
NO_ZERO_POINT = 0.5  # |mean| over root mean square
EQUAL = 1e-6  # of the size of two sketches
LOGITS_OFF = 12.0  # median spread of all heads; trained models have 0.5 to 2
NEAR = 3  # layers on either side that count as neighbours
ORDER_FITS, ORDER_BETTER = 0.3, 4.0

Kinds = Mapping[tuple[str, str], Mapping[int, Facts]]  # by stack and kind, then by layer


def kinds_of(facts: Iterable[Facts]) -> dict[tuple[str, str], dict[int, Facts]]:
    """Tensors of layers by stack and kind, then by layer."""
    table: dict[tuple[str, str], dict[int, Facts]] = {}
    for fact in facts:
        if fact.place.layer is not None:
            table.setdefault((fact.place.stack, fact.place.kind), {})[fact.place.layer] = fact
    return table


def findings_alone(seen: Examined) -> list[Finding]:
    """Everything that the file of a model says against it."""
    facts, kinds = [*seen.facts.values()], kinds_of(seen.facts.values())
    broken: set[str] = set()  # tensors whose numbers are no weights: nothing else is said of them
    found = [
        *_values(facts, broken),
        *_zeros(facts, kinds, broken, seen),
        *_constants(facts, kinds, broken),
    ]
    found += [*_missing(kinds), *_config(seen), *_tied(seen), *_biases(seen, kinds)]
    found += [*_copies(kinds, broken), *_levels(kinds, broken)]
    of_heads = [*_heads(seen, broken), *_copied_heads(seen)]
    layers = {seen.heads_layer(layer) for item in of_heads for layer, _ in item.evidence.get("heads", ())}
    found += [*_norms(kinds, broken, layers), *of_heads, *_logits(seen), *_gains(seen), *_order(seen)]
    return found


# ---- values ----


def _values(facts: Sequence[Facts], broken: set[str]) -> Iterator[Finding]:
    for cause, words in (("random-bits", ""), ("overflow", ""), ("nonfinite", "")):
        some = [fact for fact in facts if fact.name not in broken and _value_cause(fact) == cause]
        if not some:
            continue
        broken |= {fact.name for fact in some}
        if cause == "nonfinite":
            nan, inf = sum(x.nan for x in some), sum(x.inf for x in some)
            parts = [f"{count:,} {name}" for count, name in ((nan, "NaN"), (inf, "infinite")) if count]
            words = f"has {' and '.join(parts)} of {sum(x.numbers for x in some):,} numbers"
        spread = max(max(x.spread, x.wild) for x in some)
        evidence: dict[str, Any] = {
            "nan": sum(x.nan for x in some),
            "inf": sum(x.inf for x in some),
            "log2_spread": round(spread, 2),
        }
        yield finding(cause, tensors_words(some), words, tensors=[x.name for x in some], **evidence)


def _value_cause(fact: Facts) -> str:
    """Why numbers of a tensor are no weights; empty where they may be. Rows of other scales spread a map, not a row."""
    spread = fact.wild or (fact.spread if fact.is_map else 0.0)
    if spread > RANDOM_SPREAD and (not fact.finite or fact.largest > 1e4):
        return "random-bits"
    if fact.inf and not fact.nan and (fact.dtype == "float16" or fact.largest > 1e37):
        return "overflow"
    return "" if fact.finite else "nonfinite"


def _zeros(facts: Sequence[Facts], kinds: Kinds, broken: set[str], seen: Examined) -> Iterator[Finding]:
    """Maps that are zero. A layer whose values or outputs, or whose every map is zero does nothing."""
    writing = _writing_maps(seen)
    zero = [fact for fact in facts if fact.zero and fact.is_map]
    idle = {name for name in (fact.name for fact in zero) if _zero_everywhere(name, zero, kinds)}
    if idle:
        some = [fact for fact in zero if fact.name in idle]
        yield finding("zero", tensors_words(some), "is zero in every layer, as before training", severity="note")
    by_layer: dict[tuple[str, int | None], list[Facts]] = {}
    for fact in zero:
        if fact.name not in idle:
            by_layer.setdefault((fact.place.stack, fact.place.layer), []).append(fact)
    broken |= {fact.name for fact in zero}
    for (stack, layer), some in by_layer.items():
        names = [fact.name for fact in some]
        of_attention = [name for name in names if _of_attention(name)]
        if layer is not None and (len(of_attention) > 1 or len(names) > 2 or writing & {*names}):
            evidence: dict[str, Any] = {"layers": [layer], "tensors": names}
            attention = len(of_attention) == len(names)
            count = (
                f"{len(names)} maps{' of attention' if attention else ''} are" if len(names) > 1 else f"{names[0]} is"
            )
            words = f"{'does nothing' if not attention or len(names) > 1 else 'attends for nothing'}: {count} zero"
            yield finding("zero-layer", layers_words(stack, [layer]), words, **evidence)
        else:
            yield finding("zero", tensors_words(some), tensors=names, layers=[] if layer is None else [layer])
    for (_, kind), layers in kinds.items():
        some = [fact for fact in layers.values() if fact.zero and not fact.is_map and fact.numbers > 1]
        if some and _is_norm(kind) and not kind.endswith(("bias", "beta")) and len(some) <= len(layers) / 3:
            broken |= {fact.name for fact in some}
            yield finding("zero", tensors_words(some), "is a gain of zeros", tensors=[fact.name for fact in some])
    for fact in facts:
        start, stop = fact.longest_zeros
        if seen.heads and _of_attention(fact.name):
            continue  # said of the head
        same = kinds.get((fact.place.stack, fact.place.kind), {}).values()
        alone = all(other.zero_rows == 0 for other in same if other is not fact)
        if not fact.zero and fact.is_map and stop - start >= max(8, fact.shape[0] // 8) and alone and len(same) > 1:
            words = f"has zeros in rows {start} to {stop - 1} of {fact.shape[0]}"
            yield finding("zero", fact.name, words, rows=[start, stop], tensors=[fact.name])


def _writing_maps(seen: Examined) -> set[str]:
    """Maps of values and outputs: where one of them is zero, what a layer attends to is lost."""
    found = [] if seen.model.reading is None else seen.model.reading.found
    parts = [part for item in found if isinstance(item, AttentionLayout) for part in (item.value, item.out)]
    return {name for part in parts if part is not None for name, _ in part.maps(seen.model.weights)}


def _zero_everywhere(name: str, zero: Sequence[Facts], kinds: Kinds) -> bool:
    fact = next(x for x in zero if x.name == name)
    layers = kinds.get((fact.place.stack, fact.place.kind), {})
    return len(layers) > 1 and all(other.zero for other in layers.values())


def _of_attention(name: str) -> bool:
    return any(word in name.lower() for word in ("attn", "attention"))


def _constants(facts: Sequence[Facts], kinds: Kinds, broken: set[str]) -> Iterator[Finding]:
    """One number everywhere. Gains of an untrained model are that in all layers, and no fault."""
    for fact in facts:
        if not fact.constant or fact.name in broken:
            continue
        layers = kinds.get((fact.place.stack, fact.place.kind), {})
        others = [other for other in layers.values() if other is not fact]
        apart = len(others) >= 2 and not any(other.constant for other in others)
        if fact.is_map or (apart and len(fact.shape) == 1 and fact.shape[0] > 1):
            broken.add(fact.name)
            words = f"holds {fact.least:.4g} everywhere"
            yield finding("constant", fact.name, words, value=fact.least, tensors=[fact.name])


def _levels(kinds: Kinds, broken: set[str]) -> Iterator[Finding]:
    """Tensors with fewer distinct values than those of their kind in other layers."""
    few: list[Facts] = []
    coarse: list[Facts] = []
    for layers in kinds.values():
        known = [x for x in layers.values() if x.levels and x.is_map and x.name not in broken]
        usual = median(x.levels for x in known) if known else 0.0
        few += [x for x in known if x.levels <= FEW_LEVELS and usual > MANY_LEVELS]
        coarse += [x for x in known if x.levels <= 16 and x not in few]
    if few:
        most = max(x.levels for x in few)
        words = f"has {most:.0f} distinct values among 32 neighbours, other layers more than {MANY_LEVELS}"
        yield finding("low-bits", tensors_words(few), words, tensors=[x.name for x in few], levels=most)
    if coarse:
        levels = median(x.levels for x in coarse)
        words = f"quantised: {levels:.0f} distinct values among 32 neighbours"
        yield finding("quantised", tensors_words(coarse), words, severity="note", levels=levels)


def _norms(kinds: Kinds, broken: set[str], by_head: set[int]) -> Iterator[Finding]:
    """Maps off their neighbours, rows off their map, and maps whose mean is no map's. Of the layers `by_head` heads say
    it.
    """
    for layers in kinds.values():
        known = {at: x for at, x in layers.items() if x.is_map and x.name not in broken and x.rms > 0}
        for at, fact in known.items():
            if at in by_head and _of_attention(fact.name):
                continue
            near = [known[other].rms for other in known if other != at and abs(other - at) <= NEAR]
            if len(near) >= 3:
                ratio = fact.rms / median(near)
                if not 1 / OFF < ratio < OFF:
                    words = f"is {_times(ratio)} in its neighbours"
                    yield finding("unknown", fact.name, words, severity="fault", ratio=round(ratio, 4), layers=[at])
                    continue
            others = [other for other in known.values() if other is not fact]
            if len(others) < 2:
                continue
            if fact.row_ratio > ROW_OFF and max(x.row_ratio for x in others) < ROW_OFF / 2:
                words = f"has row {fact.row_at} at {fact.row_ratio:.3g} times its median row"
                yield finding(
                    "lost-scales", fact.name, words, row=fact.row_at, ratio=round(fact.row_ratio, 1), layers=[at]
                )
            shift = abs(fact.mean) / fact.rms
            if shift > NO_ZERO_POINT and max(abs(x.mean) / x.rms for x in others) < NO_ZERO_POINT / 2:
                words = f"has a mean of {fact.mean:.3g} at a root mean square of {fact.rms:.3g}"
                yield finding("lost-zero-points", fact.name, words, mean_over_rms=round(shift, 3), layers=[at])


def _times(ratio: float) -> str:
    """`50 times as large as`, for a ratio of norms."""
    return f"{ratio:.3g} times as large as" if ratio > 1 else f"{1 / ratio:.3g} times smaller than"


# ---- layers ----


def _missing(kinds: Kinds) -> Iterator[Finding]:
    """Layers without tensors that all other layers of their stack have, and gaps in the numbers of layers."""
    stacks: dict[str, dict[int, set[str]]] = {}
    for (stack, kind), layers in kinds.items():
        for at in layers:
            stacks.setdefault(stack, {}).setdefault(at, set()).add(kind)
    for stack, layers_ in stacks.items():
        count = max(layers_) + 1
        gaps = [at for at in range(count) if at not in layers_]
        if gaps and len(gaps) <= count / 2 and len(layers_) > 1:
            yield finding("missing-layer", layers_words(stack, gaps), f"is missing of {count}", layers=gaps)
        if len(layers_) < 3:
            continue
        usual = {kind for kind in set().union(*layers_.values()) if _share(kind, layers_) >= 0.8}
        for at, own in layers_.items():
            lost = sorted(usual - own)
            if not lost or own - usual:
                continue  # a layer with maps of its own is of another kind
            biases = all(kind.endswith("bias") for kind in lost)
            named = f"{', '.join(lost[:3])}{f' and {len(lost) - 3} more' if len(lost) > 3 else ''}"
            words = f"lacks {named}, which the others have"
            yield finding(
                "lost-biases" if biases else "missing-layer", layers_words(stack, [at]), words, layers=[at], lost=lost
            )


def _share(kind: str, layers: Mapping[int, set[str]]) -> float:
    return sum(kind in own for own in layers.values()) / len(layers)


def _copies(kinds: Kinds, broken: set[str]) -> Iterator[Finding]:
    """Layers whose maps equal those of another layer."""
    same: dict[tuple[str, int, int], list[str]] = {}
    maps: dict[str, set[str]] = {}
    for (stack, kind), layers in kinds.items():
        known = {
            at: x
            for at, x in layers.items()
            if x.is_map and x.signature is not None and x.name not in broken and not x.zero
        }
        if known:
            maps.setdefault(stack, set()).add(kind)
        by_size: dict[str, list[int]] = {}
        for at, fact in sorted(known.items()):
            key = f"{fact.rms:.5e} {fact.shape}"
            for other in by_size.get(key, ()):
                if _equal(fact.signature, known[other].signature):
                    same.setdefault((stack, other, at), []).append(fact.name)
                    break
            by_size.setdefault(key, []).append(at)
    for stack in {stack for stack, _, _ in same}:
        every = {at for (other, _), x in kinds.items() if other == stack for at in x}
        copies = {second for (other, _, second) in same if other == stack}
        if len(copies) == len(every) - 1:
            words = f"are all alike: {len(every)} layers with equal maps, as before training or with shared weights"
            yield finding("duplicated-layer", layers_words(stack, sorted(every)), words, severity="note")
            same = {key: names for key, names in same.items() if key[0] != stack}
    for (stack, first, second), names in same.items():
        words = f"is a copy of layer {first}: {len(names)} of {len(maps[stack])} maps are equal"
        evidence: dict[str, Any] = {"layers": [second], "source": first, "tensors": names}
        yield finding("duplicated-layer", layers_words(stack, [second]), words, **evidence)


def _equal(a: Tensor | None, b: Tensor | None, within: float = EQUAL) -> bool:
    if a is None or b is None or a.shape != b.shape:
        return False
    size = float(a.norm())
    return size > 0 and float((a - b).norm()) <= within * size


# ---- config.json ----


def _config(seen: Examined) -> Iterator[Finding]:
    model, config = seen.model, seen.model.config
    if model.damage is not None:
        words = str(model.damage).removeprefix(f"{model.weights.where}: ")
        yield finding(model.damage.cause, "config.json" if model.damage.cause == "config" else "the model", words)
    text = config.get("text_config")
    settings = text if isinstance(text, Mapping) else config
    for key, ends in (
        ("vocab_size", ("embed_tokens.weight", "word_embeddings.weight", "wte.weight")),
        ("intermediate_size", ("layers.0.mlp.up_proj.weight", "layer.0.intermediate.dense.weight")),
    ):
        said = settings.get(key)
        for name, fact in seen.facts.items():
            if config.get("model_type") not in BUILT_IN:
                continue  # another package's settings may mean something else
            if isinstance(said, int) and name.endswith(ends) and "vision" not in name and fact.shape[0] != said:
                words = f"says {key} {said:,}, and {name} has {fact.shape[0]:,} rows"
                yield finding("config", "config.json", words, setting=key, said=said, stored=fact.shape[0])
    said = str(settings.get("dtype") or settings.get("torch_dtype") or config.get("dtype") or "").removeprefix("torch.")
    stored = {fact.dtype for fact in seen.facts.values() if fact.is_map}
    if said and stored and said not in stored and not model.live and not getattr(model.weights, "quantised", None):
        words = f"says {said}, the tensors are {', '.join(sorted(stored))}"
        yield finding("dtype", "config.json", words, severity="note", said=said, stored=sorted(stored))


def _tied(seen: Examined) -> Iterator[Finding]:
    config, facts = seen.model.config, seen.facts
    heads = [
        x
        for name, x in facts.items()
        if name.endswith(("lm_head.weight", "cls.predictions.decoder.weight", "embed_out.weight"))
    ]
    ends = ("embed_tokens.weight", "word_embeddings.weight", "wte.weight", "embed_in.weight")
    inputs = [x for name, x in facts.items() if name.endswith(ends)]
    tied = config.get("tie_word_embeddings")
    if len(inputs) != 1 or seen.model.live:
        return
    (embedding,) = inputs
    for head in heads if tied is True and embedding.finite else ():
        a, b = head.signature, embedding.signature
        if a is not None and b is not None and head.finite and head.shape == embedding.shape and not _equal(a, b, 0.01):
            yield finding("untied", head.name, difference=round(float((a - b).norm() / b.norm()), 4))
    kinds = config.get("architectures") or []
    if (
        tied is False
        and not heads
        and isinstance(kinds, list)
        and any("CausalLM" in str(kind) for kind in kinds)
        and "gguf" not in seen.model.weights.where
    ):
        yield finding(
            "untied", "lm_head.weight", "is missing, and config.json says that it is not tied to the embeddings"
        )


BIASED = ("bert", "roberta", "xlm-roberta", "electra", "camembert", "gpt2", "qwen2")  # in queries, whatever is set


def _biases(seen: Examined, kinds: Kinds) -> Iterator[Finding]:
    """Biases that the configuration announces and no layer has, or that are all zero in a trained model."""
    config, model = seen.model.config, seen.model
    announced = bool(config.get("attention_bias")) or config.get("model_type") in BIASED
    biases = {kind: layers for kind, layers in kinds.items() if kind[1].endswith("bias") and not _is_norm(kind[1])}
    if announced and seen.layers and not model.live and all(x.query.bias is None for x in seen.layers):
        why = (
            "attention_bias is true"
            if config.get("attention_bias")
            else f"models of the type {config.get('model_type')} have them"
        )
        yield finding("lost-biases", "every layer", f"has no biases of queries and keys, and {why}")
    gains = [x for kind, layers in kinds.items() if _is_norm(kind[1]) for x in layers.values()]
    trained = any(not x.constant for x in gains)
    zero = [kind for kind, layers in biases.items() if all(x.zero for x in layers.values())]
    if len(biases) >= 3 and len(zero) == len(biases) and trained:
        yield finding(
            "lost-biases", "every layer", f"has zero biases in all {len(biases)} kinds of maps", kinds=len(biases)
        )
    for kind, layers in biases.items():
        some = [at for at, x in layers.items() if x.zero]
        if some and len(layers) >= 3 and len(some) <= len(layers) / 3:
            yield finding(
                "lost-biases", layers_words(kind[0], some), f"has {kind[1]} all zero, the others have not", layers=some
            )


def _is_norm(kind: str) -> bool:
    return any(word in kind.lower() for word in ("norm", "ln_"))


# ---- heads ----


def _heads(seen: Examined, broken: set[str]) -> Iterator[Finding]:
    """Heads that are dead, or off the heads around them; of layers whose numbers are all weights."""
    unknown = {place_of(name).layer for name in broken if _of_attention(name) and not seen.facts[name].zero}
    dead: list[tuple[int, int, str]] = []
    scaled: list[tuple[int, int, str, float]] = []
    for heads in seen.heads:
        if seen.heads_layer(heads.number) in unknown:
            continue
        near = [other for other in seen.heads if abs(other.number - heads.number) <= NEAR]
        for part, sketch in heads.maps().items():
            norms = sketch.square().sum((1, 2)).sqrt()
            if not bool((norms > 0).any()):
                continue  # said of the layer
            around = torch.cat([x.maps()[part].square().sum((1, 2)).sqrt() for x in near if part in x.maps()])
            usual = float(around[around > 0].median())  # most of them may be zero: the rest of a file is lost
            own = float(norms.median())
            for head, size in enumerate(norms.tolist()):
                for number in _query_heads(heads, part, head):
                    if size <= DEAD * usual:
                        dead.append((heads.number, number, part))
                    elif part not in heads.normed and (len(norms) > 1 or len(near) > 2):
                        ratio = min(
                            (size / usual, size / (own or usual)), key=lambda x: abs(math.log(x)) if x > 0 else math.inf
                        )
                        if not 1 / HEAD_OFF < ratio < HEAD_OFF and not _whole_layer(norms, head):
                            scaled.append((heads.number, number, part, ratio))
    if dead:
        places = sorted({(layer, head) for layer, head, _ in dead})
        parts = sorted({part for _, _, part in dead})
        yield finding(
            "dead-head",
            heads_words(places),
            f"does nothing: {' and '.join(parts)} {'is' if len(parts) == 1 else 'are'} zero",
            heads=places,
            maps=parts,
        )
    for part, ratio_of in _by_part(scaled).items():
        places = sorted(ratio_of)
        worst = max(ratio_of.values(), key=lambda x: abs(math.log(x)))
        yield finding(
            "scaled-head",
            heads_words(places),
            f"has a {part} map {_times(worst)} those around it",
            heads=places,
            ratio=round(worst, 4),
            map=part,
        )


def _logits(seen: Examined) -> Iterator[Finding]:
    """Logits of all heads that are too large by a common factor."""
    known = [x for heads in seen.heads for x in heads.spread.tolist() if math.isfinite(x)]
    if len(known) >= 8 and median(known) > LOGITS_OFF:
        words = f"has logits with a spread of {median(known):.3g} (median of heads; trained models have 0.5 to 2): "
        words += "the scale of queries was lost, or gains are off"
        yield finding("unknown", "every layer", words, severity="fault", spread=round(median(known), 3))


def _query_heads(heads: LayerHeads, part: str, head: int) -> range:
    """The query heads that use a head of a map."""
    if part in ("query", "out"):
        return range(head, head + 1)
    group = heads.heads // heads.kv_heads
    return range(head * group, (head + 1) * group)


def _whole_layer(norms: Tensor, head: int) -> bool:
    """Whether most heads of the layer are off as this one is: then it is said of the layer's tensor."""
    others = torch.cat([norms[:head], norms[head + 1 :]])
    return len(others) > 0 and float((others / norms[head]).log().abs().median()) < math.log(2)


def _by_part(scaled: Sequence[tuple[int, int, str, float]]) -> dict[str, dict[tuple[int, int], float]]:
    parts: dict[str, dict[tuple[int, int], float]] = {}
    for layer, head, part, ratio in scaled:
        parts.setdefault(part, {})[layer, head] = ratio
    return parts


def _copied_heads(seen: Examined) -> Iterator[Finding]:
    """Heads whose queries, values or outputs equal those of another head."""
    pairs: dict[tuple[tuple[int, int], tuple[int, int]], list[str]] = {}
    for part in ("query", "value", "out"):
        places = [
            (heads.number, head)
            for heads in seen.heads
            if part in heads.maps()
            for head in range(len(heads.maps()[part]))
        ]
        by_shape: dict[tuple[int, ...], list[int]] = {}
        sketches = [
            heads.maps()[part][head]
            for heads in seen.heads
            if part in heads.maps()
            for head in range(len(heads.maps()[part]))
        ]
        for at, sketch in enumerate(sketches):
            by_shape.setdefault(tuple(sketch.shape), []).append(at)
        for members in by_shape.values():
            flat = torch.stack([sketches[at].flatten() for at in members])
            order = flat.norm(dim=1).argsort().tolist()
            for one, two in pairwise(order):
                if _equal(flat[one], flat[two]):
                    a, b = sorted((places[members[one]], places[members[two]]))
                    pairs.setdefault((a, b), []).append(part)
    # layers that are copies of each other are said as such, and key heads that were repeated on purpose are not
    layers: dict[tuple[int, int], int] = {}
    for (a, b), parts in pairs.items():
        if "query" in parts or "out" in parts:
            layers[a[0], b[0]] = layers.get((a[0], b[0]), 0) + 1
    for (a, b), parts in pairs.items():
        whole = a[0] != b[0] and layers.get((a[0], b[0]), 0) > 1
        of_values = parts == ["value"] and sum(x[0] == a[0] and p == ["value"] for (x, _), p in pairs.items()) > 1
        if not whole and not of_values:
            words = f"is a copy of {a[0]}.{a[1]} ({', '.join(parts)})"
            yield finding("copied-head", heads_words([b]), words, heads=[b], source=list(a), maps=parts)


def _gains(seen: Examined) -> Iterator[Finding]:
    """Gains that are mostly negative: one was subtracted from them, or is missing."""
    negative = []
    for layer in seen.layers:
        gain = layer.norm.gain
        if gain is not None and gain.numel() > 1 and float((gain.float() < 0).float().mean()) > 0.5:
            negative.append(layer.index)
    if seen.layers and len(negative) > len(seen.layers) / 2:
        words = "has gains in front of attention that are mostly negative, as if one had been subtracted"
        yield finding("shifted-gain", layers_words("", negative), words, layers=negative)


def _order(seen: Examined) -> Iterator[Finding]:
    """Rows of queries and keys whose sizes follow the frequencies of the other rotary order, or of larger heads: their
    sizes do not tell these two apart.
    """
    for part in ("query", "key"):
        profiles = [x for heads in seen.heads if (x := _profile(heads, part)) is not None]
        if len({len(x) for x in profiles}) != 1 or len(profiles) < 2:
            return
        mean = torch.stack(profiles).mean(0)
        halves, neighbours = _order_fits(mean)
        if neighbours > ORDER_FITS or neighbours * ORDER_BETTER > halves:
            return
    words = "has rows of queries and keys as in the interleaved rotary order, or half as many heads as config.json says"
    evidence: dict[str, Any] = {"unexplained_as_halves": round(halves, 3), "as_neighbours": round(neighbours, 3)}
    yield finding("unknown", "every layer", words, severity="fault", **evidence)


def _profile(heads: LayerHeads, part: str) -> Tensor | None:
    """Mean over heads of the logarithm of row norms, less its mean, of the rotated channels."""
    rows = heads.query_rows if part == "query" else heads.key_rows
    if not heads.rotary or heads.channels < 8:
        return None
    logs = rows[:, : heads.channels].double()
    if not bool((logs > 0).all()):
        return None
    logs = logs.log()
    return (logs - logs.mean(1, keepdim=True)).mean(0)


def _order_fits(profile: Tensor) -> tuple[float, float]:
    """Unexplained shares of a profile, with channels (i, i + h/2), and with (2i, 2i + 1), turning together."""
    half, at = len(profile) // 2, torch.arange(len(profile)).double()
    shares = []
    for place in (at % half, torch.div(at, 2, rounding_mode="floor")):
        x = torch.stack([(place / half) ** power for power in range(4)], 1)
        left = profile - x @ torch.linalg.lstsq(x, profile).solution
        shares.append(float(left.square().sum() / profile.square().sum().clamp_min(1e-30)))
    return shares[0], shares[1]
