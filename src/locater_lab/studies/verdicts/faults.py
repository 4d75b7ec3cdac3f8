"""The faults, as data: what is planted, where and how strong, and the causes that a verdict has to name.

Two causes are given where they are equal in the weights, or where both are true. The adapter of a model is its own, so
`faults` takes it; without one the group of merging is empty.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from locater_lab.studies.verdicts import planting as p
from locater_lab.studies.verdicts import writing as w
from locater_lab.studies.verdicts.checkpoint import LoraAdapter

GROUPS = ("values", "one head", "layers", "conversion", "merging", "quantisation", "files", "another model")
CAUSES = (
    "nonfinite overflow zero constant random-bits scaled-head dead-head copied-head swapped-heads permuted-heads "
    "zero-layer duplicated-layer shifted-layers swapped-layers missing-layer rotary-order shifted-gain scaled-queries "
    "fused-order transposed untied lost-biases config not-merged wrong-dose wrong-sign wrong-base half-merged "
    "lost-scales low-bits lost-zero-points another-step stale-index truncated duplicate-names another-model"
).split()
NEUTRAL = "identical dtype fine-tune low-rank equivalent quantised adapter unknown".split()
ANY_NEUTRAL = tuple(cause for cause in NEUTRAL if cause != "unknown")
KNOWN = "known"
ALL_PLACES = ("early", "middle", "late")


@dataclass(frozen=True)
class Fault:
    """One line of the table. `causes` are those that count as right; of a harmless change, neutral ones."""

    name: str
    group: str
    causes: tuple[str, ...]
    plant: p.Plant
    says: str
    strengths: tuple[float, ...] = (1.0,)
    places: tuple[str, ...] = ("middle",)
    container: str = "one file"
    damage: w.Damage | None = field(default=None, compare=False)
    on_tiny: bool = True  # tried on the tiny models too
    belongs: str = KNOWN  # the set: "known" when the rules were written, or "unseen 1" and so on, each counted apart
    merges: bool = False  # a harmless change in which the adapter is merged: held against the base with it

    @property
    def harmless(self) -> bool:
        return self.group == "harmless"

    @property
    def with_adapter(self) -> bool:
        """Whether only somebody who has the adapter can know it."""
        return self.group == "merging"


def _values() -> list[Fault]:
    nan, inf = float("nan"), float("inf")

    def fault(name: str, causes: str, plant: p.Plant, says: str, **more: object) -> Fault:
        return Fault(name, "values", tuple(causes.split()), plant, says, **more)  # type: ignore[arg-type]

    return [
        fault("nan-in-queries", "nonfinite", p.one_number("query", nan), "one NaN in a head's queries", places=ALL_PLACES),
        fault("nan-in-values", "nonfinite", p.one_number("value", nan), "one NaN in a head's values"),
        fault("nan-in-mlp", "nonfinite", p.one_number("mlp", nan), "one NaN in an MLP", places=("early", "late")),
        fault("nan-in-embedding", "nonfinite", p.one_number("embedding", nan), "one NaN in the row of a token"),
        fault("inf-in-norm", "nonfinite", p.one_number("norm", inf), "one infinite gain in front of attention"),
        fault("nan-in-pickle", "nonfinite", p.one_number("mlp", nan), "one NaN in an MLP, stored as a pickle", container="pickle", on_tiny=False),
        fault("nan-in-gguf", "nonfinite", p.one_number("value", nan), "one NaN in values, stored as GGUF", container="gguf", on_tiny=False),
        fault("overflow", "overflow nonfinite", p.overflow, "float16 in which a head's queries are infinite, where bfloat16 held them"),
        fault("zero-mlp", "zero", p.filled("mlp", 0.0), "an MLP's map is zero", places=("early", "late")),
        fault("zero-gain", "zero", p.filled("norm", 0.0), "the gain in front of attention is zero", on_tiny=False),
        fault("constant-mlp", "constant", p.filled("mlp"), "every number of an MLP's map is the same"),
        fault("constant-queries", "constant", p.filled("query"), "every number of a query map is the same"),
        fault("random-bits", "random-bits", p.random_bits, "a share of an MLP's map is random bits (finite numbers)", strengths=(1.0, 0.1)),
    ]  # fmt: skip


def _one_head() -> list[Fault]:
    def fault(name: str, causes: str, plant: p.Plant, says: str, **more: object) -> Fault:
        return Fault(name, "one head", tuple(causes.split()), plant, says, **more)  # type: ignore[arg-type]

    return [
        fault("scaled-queries-of-a-head", "scaled-head", p.scaled_head("query"), "a head's queries times 50, 5, 1/50", strengths=(50.0, 5.0, 0.02), places=ALL_PLACES),
        fault("scaled-gain-of-queries", "scaled-head scaled-queries", p.scaled_gain, "the gain of the norm of a layer's queries times 50", strengths=(50.0, 5.0)),
        fault("scaled-outputs-of-a-head", "scaled-head", p.scaled_head("out"), "a head's outputs times 50", strengths=(50.0,), places=ALL_PLACES),
        fault("dead-outputs", "dead-head", p.dead_head("out"), "a head's outputs are zero", places=ALL_PLACES),
        # where a layer has one head of values, its layer writes nothing: the same weights
        fault("dead-values", "dead-head zero-layer", p.dead_head("value"), "a head's values are zero"),
        fault("dead-queries", "dead-head", p.dead_head("query"), "a head's queries are zero, so it looks at all alike"),
        fault("copied-head", "copied-head", p.copied_head, "a head over the next one of its layer", places=ALL_PLACES),
        fault("swapped-in-a-layer", "swapped-heads permuted-heads", p.swapped_in_layer, "two heads of a layer have each other's queries", places=ALL_PLACES),
        fault("swapped-between-layers", "swapped-heads", p.swapped_between_layers, "two heads of two layers have each other's queries"),
        fault("permuted-queries", "permuted-heads", p.permuted_queries, "the query heads of a layer moved up by one", places=ALL_PLACES),
    ]  # fmt: skip


def _layers() -> list[Fault]:
    def fault(name: str, causes: str, plant: p.Plant, says: str, **more: object) -> Fault:
        return Fault(name, "layers", tuple(causes.split()), plant, says, **more)  # type: ignore[arg-type]

    def duplicated(count: int, layer: int) -> list[int]:
        target = layer + 1 if layer + 1 < count else layer - 1
        return [layer if at == target else at for at in range(count)]

    def shifted(count: int, layer: int) -> list[int]:
        return [(at + 1) % count for at in range(count)]

    def swapped(count: int, layer: int) -> list[int]:
        other = (layer + max(1, count // 3)) % count
        return [other if at == layer else layer if at == other else at for at in range(count)]

    return [
        fault("zero-attention", "zero-layer", p.zero_parts("query", "key", "value", "out"), "all maps of a layer's attention are zero", places=ALL_PLACES),
        fault("zero-values", "zero-layer", p.zero_parts("value", "out"), "values and outputs of a layer are zero"),
        fault("duplicated-layer", "duplicated-layer", p.move_blocks(duplicated), "a layer over the next one", places=ALL_PLACES),
        fault("shifted-layers", "shifted-layers", p.move_blocks(shifted), "every layer is the next one, the last is the first"),
        fault("swapped-layers", "swapped-layers", p.move_blocks(swapped), "two layers changed places", places=("early", "middle")),
        fault("lost-layer", "missing-layer", p.lost_block, "a layer is not in the file"),
        fault("dropped-layer", "missing-layer", p.dropped_block, "a layer was left out, and the settings count one fewer"),
    ]  # fmt: skip


def _conversion() -> list[Fault]:
    def fault(name: str, causes: str, plant: p.Plant, says: str, **more: object) -> Fault:
        return Fault(name, "conversion", tuple(causes.split()), plant, says, **more)  # type: ignore[arg-type]

    both = p.rotary_order("query", "key")
    return [
        fault("rotary-order", "rotary-order", both, "rows of queries and keys are in another rotary order"),
        fault("rotary-order-of-queries", "rotary-order", p.rotary_order("query"), "rows of queries are in another rotary order"),
        fault("rotary-order-of-keys", "rotary-order", p.rotary_order("key"), "rows of keys are in another rotary order"),
        fault("rotary-order-in-gguf", "rotary-order", both, "a GGUF file whose rows were not put into its order", container="gguf", on_tiny=False),
        fault("gain-plus-one", "shifted-gain", p.shifted_gain, "1 was added to every gain in front of attention"),
        fault("gain-minus-one", "shifted-gain", p.shifted_gain, "1 was taken from every gain in front of attention", strengths=(-1.0,)),
        fault("scale-folded-twice", "scaled-queries", p.scaled_queries(1), "1/sqrt(head size) is in the queries too"),
        fault("scale-lost", "scaled-queries", p.scaled_queries(-1), "queries were divided by 1/sqrt(head size)"),
        fault("fused-order", "fused-order", p.fused_order, "fused queries, keys and values were cut in the wrong order"),
        fault("transposed-outputs", "transposed", p.transposed("out"), "square output maps are stored the other way round"),
        fault("transposed-queries", "transposed", p.transposed("query"), "square query maps are stored the other way round"),
        fault("untied", "untied", p.untied, "tied embeddings have an output map of their own, which is another", strengths=(0.5,)),
        fault("tie-lost", "untied config", p.tie_lost, "the settings untie embeddings, and the file has no output map"),
        fault("zero-biases", "lost-biases", p.lost_biases(zeros=True), "the biases of attention are zero"),
        fault("lost-biases", "lost-biases", p.lost_biases(zeros=False), "the biases of attention are not in the file"),
        fault("rope-theta", "config", p.other_theta, "rope_theta in config.json is 10 times, or a tenth", strengths=(10.0, 0.1)),
        fault("head-count", "config", p.other_head_count, "config.json has twice as many heads of half the size"),
        fault("layer-count", "config missing-layer", p.fewer_layers, "config.json counts one layer fewer than there are"),
    ]  # fmt: skip


def _merging(adapter: LoraAdapter) -> list[Fault]:
    def fault(name: str, causes: str, plant: p.Plant, says: str, **more: object) -> Fault:
        return Fault(name, "merging", tuple(causes.split()), plant, says, **more)  # type: ignore[arg-type]

    return [
        fault("not-merged", "not-merged", p.nothing, "the base itself: the adapter was not merged"),
        fault("merged-twice", "wrong-dose", p.merged(adapter), "the adapter was merged twice (or with twice its alpha)", strengths=(2.0, 4.0)),
        fault("merged-with-half-alpha", "wrong-dose", p.merged(adapter), "the adapter was merged with half its alpha", strengths=(0.5,)),
        fault("merged-with-wrong-sign", "wrong-sign", p.merged(adapter), "the adapter was taken away", strengths=(-1.0,)),
        fault("merged-into-another-base", "wrong-base", p.wrong_base(adapter), "the adapter was merged into another step of the base", strengths=(0.2, 0.05)),
        fault("merged-in-half-the-layers", "half-merged", p.half_merged(adapter, "layers"), "merged in the first half of the layers"),
        fault("merged-in-values-alone", "half-merged", p.half_merged(adapter, "maps"), "merged in the maps of values alone"),
    ]  # fmt: skip


def _quantisation() -> list[Fault]:
    def fault(name: str, causes: str, plant: p.Plant, says: str, **more: object) -> Fault:
        return Fault(name, "quantisation", tuple(causes.split()), plant, says, **more)  # type: ignore[arg-type]

    return [
        fault("scales-lost", "lost-scales zero", p.lost_scales("zero"), "in a map of 8 bits a share of the scales is zero", strengths=(0.3, 0.05)),
        fault("scales-swapped", "lost-scales", p.lost_scales("swapped"), "in a map of 8 bits blocks have each other's scales"),
        fault("scales-lost-in-gguf", "lost-scales zero dead-head", p.packed_scales_lost, "in a GGUF file a share of the scales of a map in Q8_0 is zero", strengths=(0.5,), container="gguf", on_tiny=False),
        fault("two-bits", "low-bits", p.low_bits, "all maps of a layer in 2 bits", strengths=(2.0,), places=("early", "middle")),
        fault("zero-points-ignored", "lost-zero-points", p.lost_zero_points, "a map of 4 bits was read without its zero points", places=("early", "middle")),
    ]  # fmt: skip


def _files() -> list[Fault]:
    def fault(name: str, causes: str, damage: w.Damage | None, says: str, **more: object) -> Fault:
        more = {"plant": p.nothing, **more}
        return Fault(name, "files", tuple(causes.split()), says=says, container="shards", damage=damage, **more)  # type: ignore[arg-type]

    return [
        fault("shard-of-another-step", "another-step", None, "the last shard is of another step", plant=p.shard_of_another_step, strengths=(0.5, 0.2)),
        fault("stale-index", "stale-index", w.stale_index, "the index names another shard for a layer's tensors"),
        fault("short-index", "stale-index missing-layer", w.short_index, "the index does not name a layer's tensors"),
        fault("truncated-shard", "truncated", w.cut_short, "the last shard ends in the middle", strengths=(0.6,)),
        fault("zeros-at-the-end", "zero truncated zero-layer", w.zeros_at_the_end, "the last half of the last shard is zeros", strengths=(0.5,)),
        fault("lost-shard", "missing-layer truncated stale-index", w.lost_shard, "the last shard is not there"),
        fault("duplicate-names", "duplicate-names", w.tensors_twice, "two shards have a layer's tensors, and they differ"),
    ]  # fmt: skip


def _another_model() -> list[Fault]:
    def fault(name: str, plant: p.Plant, says: str, **more: object) -> Fault:
        return Fault(name, "another model", ("another-model",), plant, says, **more)  # type: ignore[arg-type]

    return [
        fault("another-model", p.redrawn("all"), "every tensor was drawn anew, at its own size"),
        fault("another-embedding", p.redrawn("embedding"), "the embeddings were drawn anew", on_tiny=False),
        fault("another-tokenizer", p.moved_tokens, "the rows of the embeddings are in another order", on_tiny=False),
    ]


def _harmless(adapter: LoraAdapter | None) -> list[Fault]:
    def change(name: str, causes: str, plant: p.Plant, says: str, **more: object) -> Fault:
        return Fault(name, "harmless", tuple(causes.split()), plant, says, **more)  # type: ignore[arg-type]

    merged = [] if adapter is None else [
        change("merged-once", "low-rank adapter", p.merged(adapter, 1.0), "the adapter was merged as it should be", merges=True),
        change("adapter-folder", "adapter low-rank", p.merged(adapter, 1.0), "the adapter in a folder of its own", container="adapter", merges=True),
    ]  # fmt: skip
    return [
        change("copy", "identical", p.nothing, "the same files"),
        change("float32", "dtype", p.cast(torch.float32), "stored as float32"),
        change("float16", "dtype", p.cast(torch.float16), "stored as float16"),
        change("bfloat16", "dtype", p.cast(torch.bfloat16), "stored as bfloat16"),
        change("shards", "identical", p.nothing, "in shards", container="shards"),
        change("renamed-shards", "identical", p.nothing, "in shards of other names", container="renamed shards", on_tiny=False),
        change("pickle", "identical", p.nothing, "as a pickle", container="pickle"),
        change("gguf", "identical dtype", p.nothing, "as GGUF in F16", container="gguf", on_tiny=False),
        change("without-prefix", "identical", p.without_prefix, "tensors named without the model around the blocks", on_tiny=False),
        change("equal-permutation", "equivalent", p.equal_permutation, "heads permuted with all that belongs to them", places=("early", "late")),
        change("equal-scales", "equivalent", p.equal_scales, "queries of a layer times 4, keys over 4", strengths=(4.0,), places=("early", "late")),
        change("scale-before-a-norm", "equivalent", p.scale_before_norm, "queries times 4 before a norm of queries", strengths=(4.0,)),
        change("fine-tune", "fine-tune", p.another_step, "every map moved by 1 % or 3 % of its size", strengths=(0.01, 0.03)),
        change("eight-bits", "quantised", p.all_maps_in_bits(8), "all maps in blocks of 8 bits, and back"),
        *merged,
    ]  # fmt: skip


def faults(adapter: LoraAdapter | None) -> list[Fault]:
    """All that is planted, harmless changes last."""
    merging = [] if adapter is None else _merging(adapter)
    groups = (_values(), _one_head(), _layers(), _conversion(), merging, _quantisation(), _files(), _another_model())
    return [*(fault for group in groups for fault in group), *_harmless(adapter)]
