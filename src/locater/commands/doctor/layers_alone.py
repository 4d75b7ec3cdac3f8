"""Layers beside their neighbours, and the settings beside the tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from torch import Tensor

from locater.commands.doctor.places import layers_words
from locater.commands.doctor.reading import Examined
from locater.commands.doctor.values_alone import Kinds, is_norm, of_attention
from locater.families.registry import BUILT_IN
from locater.findings.causes import Finding, finding

OFF = 8.0  # times the median of its neighbours: a tensor
ROW_OFF = 50.0  # times the median row
NO_ZERO_POINT = 0.5  # |mean| over root mean square
EQUAL = 1e-6  # of the size of two sketches
NEAR = 3  # layers on either side that count as neighbours
BIASED = ("bert", "roberta", "xlm-roberta", "electra", "camembert", "gpt2", "qwen2")  # in queries, whatever is set


def sizes(kinds: Kinds, broken: set[str], by_head: set[int]) -> Iterator[Finding]:
    """Maps off their neighbours, rows off their map, and maps whose mean is no map's. Of the layers `by_head` heads say
    it.
    """
    for layers in kinds.values():
        known = {at: x for at, x in layers.items() if x.is_map and x.name not in broken and x.rms > 0}
        for at, fact in known.items():
            if at in by_head and of_attention(fact.name):
                continue
            near = [known[other].rms for other in known if other != at and abs(other - at) <= NEAR]
            if len(near) >= 3:
                ratio = fact.rms / median(near)
                if not 1 / OFF < ratio < OFF:
                    words = f"is {times_words(ratio)} in its neighbours"
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


def times_words(ratio: float) -> str:
    """`50 times as large as`, for a ratio of norms."""
    return f"{ratio:.3g} times as large as" if ratio > 1 else f"{1 / ratio:.3g} times smaller than"


def missing(kinds: Kinds) -> Iterator[Finding]:
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


def copies(kinds: Kinds, broken: set[str]) -> Iterator[Finding]:
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
                if equal_sketches(fact.signature, known[other].signature):
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


def equal_sketches(a: Tensor | None, b: Tensor | None, within: float = EQUAL) -> bool:
    if a is None or b is None or a.shape != b.shape:
        return False
    size = float(a.norm())
    return size > 0 and float((a - b).norm()) <= within * size


def own_settings(seen: Examined) -> Iterator[Finding]:
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


def tied_outputs(seen: Examined) -> Iterator[Finding]:
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
        if (
            a is not None
            and b is not None
            and head.finite
            and head.shape == embedding.shape
            and not equal_sketches(a, b, 0.01)
        ):
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


def biases(seen: Examined, kinds: Kinds) -> Iterator[Finding]:
    """Biases that the configuration announces and no layer has, or that are all zero in a trained model."""
    config, model = seen.model.config, seen.model
    announced = bool(config.get("attention_bias")) or config.get("model_type") in BIASED
    biases = {kind: layers for kind, layers in kinds.items() if kind[1].endswith("bias") and not is_norm(kind[1])}
    if announced and seen.layers and not model.live and all(x.query.bias is None for x in seen.layers):
        why = (
            "attention_bias is true"
            if config.get("attention_bias")
            else f"models of the type {config.get('model_type')} have them"
        )
        yield finding("lost-biases", "every layer", f"has no biases of queries and keys, and {why}")
    gains = [x for kind, layers in kinds.items() if is_norm(kind[1]) for x in layers.values()]
    trained = any(not x.constant for x in gains)
    zero = [kind for kind, layers in biases.items() if all(x.zero for x in layers.values())]
    if config.get("model_type") in BIASED and len(biases) >= 3 and len(zero) == len(biases) and trained:
        yield finding(
            "lost-biases", "every layer", f"has zero biases in all {len(biases)} kinds of maps", kinds=len(biases)
        )
    for kind, layers in biases.items():
        some = [at for at, x in layers.items() if x.zero]
        if some and len(layers) >= 3 and len(some) <= len(layers) / 3:
            yield finding(
                "lost-biases", layers_words(kind[0], some), f"has {kind[1]} all zero, the others have not", layers=some
            )
