"""The second set of faults that nobody had in mind, and the changes that do no harm (unseen2_harmless). They were written
by somebody who had read neither the rules of doctor nor their page nor any of its answers, while the rules were mended
by somebody who had not read these. More than half are what people met and told in public: each names the thread.

What counts as right was fixed before doctor was asked. Where `causes` is empty no cause of doctor is what was done, and
`unknown` is the honest answer; where they are not, `unknown` is honest too, and every other name is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from locater.layers.layout import AttentionLayout
from locater_lab.studies.verdicts import planting as p
from locater_lab.studies.verdicts import unseen
from locater_lab.studies.verdicts import writing as w
from locater_lab.studies.verdicts.checkpoint import (
    GATE,
    UP,
    WRITES,
    Checkpoint,
    LoraAdapter,
    NotHereError,
    Place,
    generator,
    quantised,
    run_length,
)
from locater_lab.studies.verdicts.faults import ALL_PLACES, Fault
from locater_lab.studies.verdicts.unseen2_harmless import harmless_changes, smooth

FROZEN = "65513f45"
DECODERS = ("llama", "gemma3_text")
LARGEST_TRAINED = 2 * 10**8
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {size}\n"


# ---- files ----


def pointer(folder: Path, c: Checkpoint, place: Place) -> None:
    """The repository was cloned without its large files: a few lines of text stand for the weights."""
    file = folder / "model.safetensors"
    file.write_text(POINTER.format(digest=c.name.encode().hex().ljust(64, "0")[:64], size=file.stat().st_size))


def shards_renamed(folder: Path, c: Checkpoint, place: Place) -> None:
    """Two shards were saved under each other's names."""
    first, *_, last = w.shard_files(folder)
    spare = first.with_suffix(".spare")
    first.rename(spare)
    last.rename(first)
    spare.rename(last)


def empty_tensors(c: Checkpoint, place: Place) -> None:
    """From a layer on, tensors have no numbers: they were saved before the parts of all processes were gathered."""
    for layer in range(place.layer, len(c.stack)):
        for name in c.in_block(layer):
            c.tensors[name] = c.tensors[name].new_empty(0)


def resumed_download(c: Checkpoint, place: Place) -> None:
    """The second half of the numbers is of another step: the file was replaced while it was fetched."""
    names = sorted(name for name, x in c.tensors.items() if x.is_floating_point())
    left = sum(c.tensors[name].numel() for name in names) // 2
    for name in names:
        old = c.tensors[name].reshape(-1)
        if left < len(old) and c.tensors[name].ndim > 1:  # gains of norms hardly move
            p.moved(c, [name], place.strength)
            c.edit(name).view(-1)[: max(left, 0)] = old[: max(left, 0)]
        left -= len(old)


def flipped_bit(c: Checkpoint, place: Place) -> None:
    """The highest bit of an exponent, in one number of an MLP: what bad memory leaves. The number stays finite."""
    flat = c.edit(c.mlp(place.layer)).view(-1)
    whole = flat.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    at = int(((flat.float() - 0.01).abs()).argmin())  # a small number, of which it makes a huge one
    whole[at] ^= 1 << (8 * flat.element_size() - 2)


# ---- parts of several processes ----


def ranks_of(one: AttentionLayout) -> int:
    """Over how many processes the heads of a layer are divided here."""
    if one.heads < 2:
        raise NotHereError(f"{one.name}: one head in a layer")
    return 2 if one.kv_heads == 1 or one.kv_heads % 2 == 0 else one.kv_heads


def first_rank_everywhere(c: Checkpoint, place: Place) -> None:
    """Every process read the part of the first one, in all layers."""

    def again(rows: Tensor, ranks: int) -> Tensor:
        return rows if len(rows) % ranks else torch.cat([rows[: len(rows) // ranks]] * ranks)

    for layer, one in enumerate(c.stack):
        ranks = ranks_of(one)
        for part in p.MAPS:
            c.put_rows(layer, part, again(c.rows(layer, part), ranks))
        inner, outer = c.neurons(layer)
        for name in inner:
            c.put(name, again(c.tensors[name], ranks))
        c.put(outer, again(c.tensors[outer].mT, ranks).mT)


def ranks_cut_as_one(c: Checkpoint, place: Place) -> None:
    """Queries, keys and values of one process after the other, cut as if all queries came first. In all layers."""
    for layer, one in enumerate(c.stack):
        parts = [c.rows(layer, part) for part in ("query", "key", "value")]
        if len({x.shape[1:] for x in parts}) > 1 or one.kv_heads == 1:
            raise NotHereError(f"{c.name}: queries, keys and values are not divided together")
        ranks = ranks_of(one)
        whole = torch.cat([x.chunk(ranks)[rank] for rank in range(ranks) for x in parts])
        cut = whole.split([len(x) for x in parts])
        for part, rows in zip(("query", "key", "value"), cut, strict=True):
            c.put_rows(layer, part, rows)  # type: ignore[arg-type]


def first_rank_of_biases(c: Checkpoint, place: Place) -> None:
    """Biases of queries, keys and values are those of the first process in every process; the maps are right."""
    for layer, one in enumerate(c.stack):
        for part in ("query", "key", "value"):
            rows = c.rows(layer, part)
            if c.part(layer, part).bias is None or len(rows) % ranks_of(one):
                raise NotHereError(f"{c.name}: no biases that are divided")
            own = rows[: len(rows) // ranks_of(one), :, -1]
            rows[:, :, -1] = torch.cat([own] * ranks_of(one))
            c.put_rows(layer, part, rows)


def lost_rank_of_the_vocabulary(c: Checkpoint, place: Place) -> None:
    """The second half of the rows of the embeddings is zero: it was the part of another process."""
    rows = c.edit(c.embedding())
    rows[len(rows) // 2 :] = 0


# ---- conversion ----


def interleaved_gates(c: Checkpoint, place: Place) -> None:
    """Rows of the two maps into an MLP one by one in turn, cut as if one map followed the other."""
    for gate, up in zip(c.ending([GATE]), c.ending([UP]), strict=True):
        whole = torch.stack([c.tensors[gate], c.tensors[up]], 1).flatten(0, 1)
        first, second = whole.chunk(2)
        c.put(gate, first)
        c.put(up, second)


def keys_by_the_count_of_queries(c: Checkpoint, place: Place) -> None:
    """Keys brought from neighbours to halves as if there were as many heads of keys as of queries."""
    for layer, one in enumerate(c.stack):
        rows = c.rows(layer, "key")
        size, full = rows.shape[1], one.rotary is not None and 2 * len(one.rotary.frequencies) == rows.shape[1]
        if not full or one.kv_heads == one.heads or len(rows) * size % (2 * one.heads):
            raise NotHereError(f"{c.name}: heads of keys are not counted so")
        neighbours = rows.unflatten(1, (2, -1)).transpose(1, 2).flatten(0, 2)
        halves = neighbours.unflatten(0, (one.heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        c.put_rows(layer, "key", halves.view(rows.shape))


def centred_for_layer_norm(c: Checkpoint, place: Place) -> None:
    """The mean over channels taken out of all that is written, which a LayerNorm does not see, and these norms do."""
    c.require(*DECODERS)
    for name in [c.embedding(), *c.ending(WRITES)]:
        rows = c.tensors[name].float()
        c.put(name, rows - rows.mean(1 if name == c.embedding() else 0, keepdim=True))


def one_kind_of_layer(c: Checkpoint, place: Place) -> None:
    """The settings call every layer a sliding one, so that the others turn positions at the wrong base."""
    kinds = c.config.get("layer_types") or []
    if len(set(kinds)) < 2:
        raise NotHereError(f"{c.name}: layers are of one kind")
    c.config["layer_types"] = ["sliding_attention"] * len(kinds)


def one_token_more(c: Checkpoint, place: Place) -> None:
    """The settings count a token that was added to the tokenizer, and the embeddings have no row for it."""
    c.config["vocab_size"] += 1


def more_layers(c: Checkpoint, place: Place) -> None:
    """The settings count two layers more than the file has."""
    key = p.layer_count(c)
    c.config[key] += 2
    if c.config.get("layer_types"):
        c.config["layer_types"] += c.config["layer_types"][-2:]


def compiled_names(c: Checkpoint, place: Place) -> None:
    """Every name begins with that of the module around a compiled model, so that none is found."""
    c.tensors = {f"_orig_mod.{name}": tensor for name, tensor in c.tensors.items()}


def head_of_zeros(c: Checkpoint, place: Place) -> None:
    """The tied output map was stored as the zeros that one process had of it, and the settings untie it."""
    c.require(*DECODERS)
    p.tie_lost(c, place)
    c.tensors["lm_head.weight"] = torch.zeros_like(c.tensors[c.embedding()])


def token_types_lost(c: Checkpoint, place: Place) -> None:
    names = [n for n in c.tensors if n.endswith("token_type_embeddings.weight")]
    if not names:
        raise NotHereError(f"{c.name}: no embeddings of token types")
    c.edit(names[0]).zero_()


# ---- layers ----


def virtual_stages(c: Checkpoint, place: Place) -> None:
    """Quarters of the layers in the order 0, 2, 1, 3: two processes with two stages each, one process after the other."""
    if len(c.stack) < 4:
        raise NotHereError(f"{c.name}: fewer than four layers")

    def order(count: int, layer: int) -> list[int]:
        quarters = [range(count * i // 4, count * (i + 1) // 4) for i in (0, 2, 1, 3)]
        return [layer for quarter in quarters for layer in quarter]

    p.move_blocks(order)(c, place)


def overwritten_stage(c: Checkpoint, place: Place) -> None:
    """Each process counts its layers from 0, and the second wrote over the first: both halves are the second."""
    p.move_blocks(lambda count, layer: [at if at >= count // 2 else at + count - count // 2 for at in range(count)])(
        c, place
    )


def every_second_layer(c: Checkpoint, place: Place) -> None:
    """A student before its training: every second layer of the teacher."""
    if len(c.stack) < 3:
        raise NotHereError(f"{c.name}: fewer than three layers")
    p.rebuild(c, range(0, len(c.stack), 2))


def stacked_twice(c: Checkpoint, place: Place) -> None:
    """The first two thirds of the layers, and then the last two thirds: a larger model from one."""
    count = len(c.stack)
    if count < 3:
        raise NotHereError(f"{c.name}: fewer than three layers")
    p.rebuild(c, [*range(2 * count // 3), *range(count // 3, count)])


# ---- training and merging ----


def not_normalised(c: Checkpoint, place: Place) -> None:
    """Every number times the strength: the weights of an average do not sum to one."""
    for name in [n for n, x in c.tensors.items() if x.is_floating_point()]:
        c.put(name, place.strength * c.tensors[name].float())


def optimizer_state(c: Checkpoint, place: Place) -> None:
    """Mean squares of gradients in place of the weights."""
    for name in [n for n, x in c.tensors.items() if x.is_floating_point()]:
        drawn = torch.randn(c.tensors[name].shape, generator=generator("squares", c.name, name))
        c.put(name, (1e-4 * drawn).square())


def trained_too_fast(c: Checkpoint, place: Place) -> None:
    if sum(x.numel() for x in c.tensors.values()) > LARGEST_TRAINED:
        raise NotHereError(f"{c.name}: its training takes several gigabytes")
    unseen.trained_on(c, place)


def after_a_fine_tune(plant: p.Plant, share: float = 0.03) -> p.Plant:
    """A fault in a model that was trained on: every map moved by a share of its size."""

    def planted(c: Checkpoint, place: Place) -> None:
        p.another_step(c, replace(place, strength=share))
        plant(c, place)

    return planted


def merged_into_four_bits(adapter: LoraAdapter) -> p.Plant:
    """Merged into the base as it was loaded for training, in 4 bits."""

    def plant(c: Checkpoint, place: Place) -> None:
        p.all_maps_in_bits(4)(c, place)
        adapter.merge(c)

    return plant


def merged_again_after_a_stop(adapter: LoraAdapter) -> p.Plant:
    """Merged in place, stopped half way, and merged again: the first half of the layers has it twice."""

    def plant(c: Checkpoint, place: Place) -> None:
        early = {name for layer in range(len(c.stack) // 2) for name in c.in_block(layer)}
        adapter.merge(c)
        adapter.merge(c, only=lambda name: name in early)

    return plant


def merged_where_a_name_fits(adapter: LoraAdapter) -> p.Plant:
    """Merged in the layers whose number begins with 1, as a pattern without an end finds them."""
    return lambda c, place: adapter.merge(c, only=lambda name: re.search(r"\.1\d*\.", name) is not None)


def another_adapter_merged(adapter: LoraAdapter) -> p.Plant:
    """Another adapter for the same maps, of the same rank and size, was merged."""

    def plant(c: Checkpoint, place: Place) -> None:
        g = generator("another adapter", c.name)
        factors = {}
        for name, (a, b) in adapter.factors.items():
            other = torch.randn(a.shape, generator=g), torch.randn(b.shape, generator=g)
            size = ((b @ a).norm() / (other[1] @ other[0]).norm()).sqrt()
            factors[name] = (other[0] * size, other[1] * size)
        replace(adapter, factors=factors).merge(c)

    return plant


def merged_then_converted(adapter: LoraAdapter) -> p.Plant:
    """Merged as it should be, and then written in another rotary order."""

    def plant(c: Checkpoint, place: Place) -> None:
        adapter.merge(c)
        p.rotary_order("query", "key")(c, place)

    return plant


def adapter_without_training(folder: Path, c: Checkpoint, place: Place) -> None:
    """The adapter as it was drawn: the second factors are zero, so that it does nothing."""
    file = folder / "adapter_model.safetensors"
    tensors = {name: x.zero_() if ".lora_B." in name else x for name, x in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


# ---- quantisation: in all maps of all blocks ----


def in_four_bits(read: Callable[[Tensor, Tensor, Tensor], Tensor], zero_points: bool = False) -> p.Plant:
    """Maps in 4 bits, of which `read` makes numbers: (whole numbers, scales, zero points)."""

    def plant(c: Checkpoint, place: Place) -> None:
        for name in c.maps_of_blocks():
            tensor = c.tensors[name]
            found = read(*quantised(tensor, 4, run_length(tensor), zero_points))
            c.put(name, found.view(tensor.shape))

    return plant


def as_excess(whole: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Stored as two's complement, and read as numbers from which 8 is taken."""
    return torch.where(whole < 0, whole + 8, whole - 8) * scale


def out_of_pack_order(whole: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Eight numbers of a word in the order 0, 2, 4, 6, 1, 3, 5, 7."""
    flat = (whole * scale).flatten()
    if len(flat) % 8:
        raise NotHereError("a map is not in words of eight numbers")
    return flat.view(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].flatten()


def order_of_columns_ignored(c: Checkpoint, place: Place) -> None:
    """Columns were put into groups by size, and are read as if groups were neighbours: scales of other groups."""
    for name in c.maps_of_blocks():
        stored = c.tensors[name].float().flatten(1)
        block = run_length(stored[0])
        order = stored.norm(dim=0).argsort(descending=True)
        whole, scale, _ = quantised(stored[:, order], 4, block)
        codes = whole.view(stored.shape)[:, order.argsort()]
        scales = scale.view(len(stored), -1).repeat_interleave(block, 1)
        c.put(name, (codes * scales).view(c.tensors[name].shape))


def smoothing_not_undone(c: Checkpoint, place: Place) -> None:
    """Columns of maps behind norms were scaled by their size before quantisation, and the gains were not divided."""
    smooth(c, undone=False)


def outliers_lost(c: Checkpoint, place: Place) -> None:
    """The largest columns of every map, which were kept apart in 16 bits, are zero: a share that is the strength."""
    for name in c.maps_of_blocks():
        stored = c.edit(name).flatten(1)
        count = max(1, round(place.strength * stored.shape[1]))
        stored[:, stored.float().norm(dim=0).topk(count).indices] = 0


# ---- the table ----


def _merging(adapter: LoraAdapter, fault: Callable[..., Fault]) -> list[Fault]:
    return [
        fault("merged-into-four-bits", "merging", "wrong-base low-bits quantised", merged_into_four_bits(adapter), "merged into the base in 4 bits (unsloth-zoo 810, peft 1043, transformers 31293)"),
        fault("merged-again-after-a-stop", "merging", "wrong-dose half-merged", merged_again_after_a_stop(adapter), "the first half of the layers has the adapter twice"),
        fault("merged-where-a-name-fits", "merging", "half-merged not-merged", merged_where_a_name_fits(adapter), "merged in the layers whose number begins with 1"),
        fault("another-adapter-merged", "merging", "not-merged", another_adapter_merged(adapter), "another adapter of the same rank and size was merged"),
        fault("merged-then-converted", "merging", "rotary-order", merged_then_converted(adapter), "merged well, and then written in another rotary order"),
        fault("adapter-without-training", "values", "zero", p.nothing, "an adapter whose second factors are zero (peft 1402)", container="adapter", damage=adapter_without_training),
    ]  # fmt: skip


def _training_and_quantisation(fault: Callable[..., Fault]) -> list[Fault]:
    def zeros_off(whole: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        return (whole - zero - 1) * scale

    return [
        fault("not-normalised", "values", "", not_normalised, "every number times 0.6 or 1.25: an average that was not divided (pytorch-image-models 1182, Paddle 17677)", strengths=(0.6, 1.25), on_tiny=True),
        fault("optimizer-state", "another model", "another-model", optimizer_state, "mean squares of gradients in place of the weights", on_tiny=True),
        fault("trained-too-fast", "another model", "another-step another-model", trained_too_fast, "five steps of AdamW at a rate of 0.03 or 0.01", strengths=(0.03, 0.01)),
        fault("pruned-by-size", "values", "zero", unseen.pruned, "the smallest 70 % or half of the numbers of every map are zero", strengths=(0.7, 0.5)),
        fault("fine-tuned-then-converted", "conversion", "rotary-order", after_a_fine_tune(p.rotary_order("query", "key")), "every map moved by 3 %, and rows of queries and keys in another rotary order", on_tiny=True),
        fault("fine-tuned-with-swapped-layers", "layers", "swapped-layers", after_a_fine_tune(p.move_blocks(_next_two)), "every map moved by 3 %, and two neighbouring layers changed places", places=ALL_PLACES, on_tiny=True),
        fault("fine-tuned-with-dead-outputs", "one head", "dead-head", after_a_fine_tune(p.dead_head("out")), "every map moved by 3 %, and a head's outputs zero", places=ALL_PLACES, on_tiny=True),
        fault("order-of-columns-ignored", "quantisation", "lost-scales", order_of_columns_ignored, "4 bits with groups by size, read as if groups were neighbours (vllm 7374, AutoGPTQ 198)"),
        fault("out-of-pack-order", "quantisation", "", in_four_bits(out_of_pack_order), "4 bits, eight numbers of a word in another order (Quark 30, llm-awq 91)"),
        fault("signs-of-four-bits", "quantisation", "lost-zero-points", in_four_bits(as_excess), "4 bits in two's complement, read as numbers less 8 (1bit-MONSTER 572)"),
        fault("zero-points-off-by-one", "quantisation", "lost-zero-points", in_four_bits(zeros_off, zero_points=True), "4 bits, every zero point one too high (AutoAWQ 101)"),
        fault("three-bits", "quantisation", "low-bits quantised", p.all_maps_in_bits(3), "every map in 3 bits"),
        fault("smoothing-not-undone", "quantisation", "lost-scales", smoothing_not_undone, "columns of maps behind norms scaled, and gains as they were"),
        fault("outliers-lost", "quantisation", "lost-scales zero", outliers_lost, "the largest half percent of the columns of every map are zero", strengths=(0.005,)),
    ]  # fmt: skip


def _next_two(count: int, layer: int) -> list[int]:
    other = layer + 1 if layer + 1 < count else layer - 1
    return [other if at == layer else layer if at == other else at for at in range(count)]


def unseen_faults(adapter: LoraAdapter | None) -> list[Fault]:
    """Faults, then harmless changes."""

    def fault(name: str, group: str, causes: str, plant: p.Plant, says: str, **more: Any) -> Fault:
        more = {"on_tiny": False, **more}
        return Fault(name, group, tuple(causes.split()), plant, says, belongs="unseen 2", **more)

    return [
        fault("pointer-file", "files", "truncated", p.nothing, "a few lines of text stand for the weights (transformers 27923, OmniParser 34)", damage=pointer),
        fault("shards-renamed", "files", "stale-index missing-layer", p.nothing, "two shards have each other's names", container="shards", damage=shards_renamed),
        fault("empty-tensors", "files", "truncated missing-layer config", empty_tensors, "from a layer on, tensors have no numbers (transformers 20082, OpenRLHF 839)", places=("middle", "late")),
        fault("resumed-download", "files", "another-step", resumed_download, "the second half of the file is of another step", strengths=(0.3, 0.1)),
        fault("flipped-bit", "values", "random-bits overflow nonfinite", flipped_bit, "the highest bit of an exponent, in one number of an MLP", places=ALL_PLACES, on_tiny=True),
        fault("first-rank-everywhere", "conversion", "copied-head", first_rank_everywhere, "every process read the part of the first (vllm-gguf-plugin 103)"),
        fault("ranks-cut-as-one", "conversion", "fused-order", ranks_cut_as_one, "fused maps of several processes, cut as if of one (Megatron-Bridge 2013, ChatLearn 277)", on_tiny=True),
        fault("first-rank-of-biases", "conversion", "", first_rank_of_biases, "biases of attention are those of the first process everywhere", on_tiny=True),
        fault("lost-rank-of-the-vocabulary", "another model", "zero truncated another-model", lost_rank_of_the_vocabulary, "the second half of the rows of the embeddings is zero (lmms-engine 160)"),
        fault("interleaved-gates", "conversion", "fused-order", interleaved_gates, "the two maps into MLPs in turn, cut as halves (ATOM 1410)"),
        fault("keys-by-the-count-of-queries", "conversion", "rotary-order", keys_by_the_count_of_queries, "rows of keys were ordered by the number of query heads (llama.cpp 3364, transformers 31788)", on_tiny=True),
        fault("centred-for-layer-norm", "conversion", "", centred_for_layer_norm, "means taken out of what is written, as if norms were LayerNorms (TransformerLens 372)"),
        fault("one-kind-of-layer", "conversion", "config", one_kind_of_layer, "config.json calls every layer a sliding one (vllm 21863, vllm 21927)"),
        fault("one-token-more", "conversion", "config", one_token_more, "config.json counts a token more than the embeddings have (stanford_alpaca 175, LlamaFactory 3125)"),
        fault("more-layers", "conversion", "config missing-layer", more_layers, "config.json counts two layers more than there are"),
        fault("compiled-names", "conversion", "missing-layer config another-model", compiled_names, "names begin with _orig_mod (nanoGPT 325, pytorch-image-models 2003)"),
        fault("theta-in-gguf", "conversion", "config", p.other_theta, "a GGUF file whose base of positions is a tenth", strengths=(0.1,), container="gguf"),
        fault("head-of-zeros", "conversion", "zero untied", head_of_zeros, "embeddings are untied, and the output map is zero"),
        fault("token-types-lost", "values", "zero", token_types_lost, "the embeddings of token types are zero"),
        fault("virtual-stages", "layers", "swapped-layers shifted-layers", virtual_stages, "quarters of the layers in the order 0, 2, 1, 3 (Paddle 45402)", on_tiny=True),
        fault("overwritten-stage", "layers", "duplicated-layer", overwritten_stage, "the second half of the layers twice, and not the first"),
        fault("every-second-layer", "layers", "missing-layer", every_second_layer, "every second layer, and settings to match"),
        fault("stacked-twice", "layers", "duplicated-layer", stacked_twice, "the first and the last two thirds of the layers, and settings to match"),
        *_training_and_quantisation(fault),
        *([] if adapter is None else _merging(adapter, fault)),
        *harmless_changes(adapter),
    ]  # fmt: skip


__all__: Sequence[str] = ["FROZEN", "unseen_faults"]
