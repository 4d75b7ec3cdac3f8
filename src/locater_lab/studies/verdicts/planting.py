"""Ways to plant a fault in a checkpoint, and changes that do no harm: functions of (checkpoint, place).

Each raises NotHereError where the model has no such part, or where the change would be no fault in it: a factor on
queries that are normalised, for example.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import torch

from locater_lab.studies.verdicts.checkpoint import (
    Checkpoint,
    LoraAdapter,
    NotHereError,
    Part,
    Place,
    generator,
    quantised,
    run_length,
)

Plant = Callable[[Checkpoint, Place], None]
Tensors = Literal["query", "value", "mlp", "norm", "embedding"]
HALF_RANGE = 65_504.0  # the largest number of float16
MAPS: tuple[Part, ...] = ("query", "key", "value", "out")


def tensor_of(c: Checkpoint, place: Place, part: Tensors) -> str:
    """The name of a tensor of the layer, or of the whole model."""
    if part == "mlp":
        return c.mlp(place.layer)
    if part == "embedding":
        return c.embedding()
    if part == "norm":
        gain = c.norm(place.layer).gain
        if not isinstance(gain, str):
            raise NotHereError(f"{c.name}: no gain in front of attention")
        return gain
    return c.part(place.layer, part).weight


# ---- values ----


def one_number(part: Tensors, value: float) -> Plant:
    """One number in the middle of a tensor; of queries and values in a row of the head."""

    def plant(c: Checkpoint, place: Place) -> None:
        if part in ("query", "value"):
            rows = c.rows(place.layer, part)
            head = place.head * c.heads_of(place.layer, part) // c.stack[place.layer].heads
            rows[head, rows.shape[1] // 2, min(3, rows.shape[2] - 1)] = value
            c.put_rows(place.layer, part, rows)
            return
        flat = c.edit(tensor_of(c, place, part)).view(-1)
        flat[min(len(flat) - 1, len(flat) // 2 + 7)] = value

    return plant


def filled(part: Tensors, value: float | None = None) -> Plant:
    """A whole tensor of one number: 0, or its own root mean square (None)."""

    def plant(c: Checkpoint, place: Place) -> None:
        tensor = c.edit(tensor_of(c, place, part))
        tensor.fill_(float(tensor.float().square().mean().sqrt()) if value is None else value)

    return plant


def random_bits(c: Checkpoint, place: Place) -> None:
    """A share of a map's numbers replaced by random bits that are finite numbers of any size up to the share's `top`."""
    name = c.mlp(place.layer)
    tensor = c.edit(name)
    flat, g = tensor.view(-1), generator("bits", c.name, name)
    count = max(1, round(place.strength * flat.numel()))
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    raw = torch.randint(0, 256, (2 * count * flat.element_size(),), generator=g, dtype=torch.uint8)
    drawn = raw.view(size).view(flat.dtype)
    drawn = drawn[drawn.isfinite()][:count]
    start = (flat.numel() - len(drawn)) // 2
    flat[start : start + len(drawn)] = drawn


def overflow(c: Checkpoint, place: Place) -> None:
    """Queries of a head times a power of two and its keys over it, which changes nothing, and a cast to float16, in
    which such queries are infinite. Where queries are normalised the factor alone changes nothing.
    """
    factor = 2.0 ** math.ceil(math.log2(4 * HALF_RANGE / c.rows(place.layer, "query").abs().amax().item()))
    one = c.stack[place.layer]
    _scale_pair(c, place.layer, place.head * one.kv_heads // one.heads, factor)
    cast(torch.float16)(c, place)


def _scale_pair(c: Checkpoint, layer: int, group: int, factor: float) -> None:
    """Queries of a group of heads times a factor, and its keys over it (not where norms are between)."""
    one = c.stack[layer]
    size = one.heads // one.kv_heads
    q = c.rows(layer, "query")
    q[group * size : (group + 1) * size] *= factor
    c.put_rows(layer, "query", q)
    if one.query_norm is None and c.part(layer, "query").inner is None:
        _without_position_terms(c, layer)
        k = c.rows(layer, "key")
        k[group] /= factor
        c.put_rows(layer, "key", k)


def _without_position_terms(c: Checkpoint, layer: int) -> None:
    if c.stack[layer].logits.relative is not None or c.part(layer, "query").shift is not None:
        raise NotHereError(f"{c.name}: queries meet positions too")


# ---- one head ----


def scaled_head(part: Part) -> Plant:
    """The rows of a head times the strength (of `out` its columns)."""

    def plant(c: Checkpoint, place: Place) -> None:
        one = c.stack[place.layer]
        if part == "query" and (one.query_norm is not None or c.part(place.layer, part).inner is not None):
            raise NotHereError(f"{c.name}: queries are normalised, so a factor on them changes nothing")
        rows = c.rows(place.layer, part)
        rows[place.head * len(rows) // one.heads] *= place.strength
        c.put_rows(place.layer, part, rows)

    return plant


def scaled_gain(c: Checkpoint, place: Place) -> None:
    """Where queries are normalised: the gain of that norm times the strength, for all heads of a layer."""
    norm = c.stack[place.layer].query_norm
    if norm is None or not isinstance(norm.gain, str):
        raise NotHereError(f"{c.name}: queries are not normalised")
    stored = c.tensors[norm.gain].float()
    c.put(norm.gain, (stored + norm.offset) * place.strength - norm.offset)


def dead_head(part: Part) -> Plant:
    def plant(c: Checkpoint, place: Place) -> None:
        rows = c.rows(place.layer, part)
        rows[place.head * len(rows) // c.stack[place.layer].heads] = 0
        c.put_rows(place.layer, part, rows)

    return plant


def copied_head(c: Checkpoint, place: Place) -> None:
    """A head over the next one: queries and outputs, and keys and values where it has its own."""
    one = c.stack[place.layer]
    parts: Sequence[Part] = MAPS if one.kv_heads == one.heads else ("query", "out")
    target = (place.head + 1) % one.heads
    if one.heads == 1:
        raise NotHereError(f"{c.name}: one head in a layer")
    for part in parts:
        rows = c.rows(place.layer, part)
        rows[target] = rows[place.head]
        c.put_rows(place.layer, part, rows)


def swapped_in_layer(c: Checkpoint, place: Place) -> None:
    """The queries of two heads of a layer change places, as far apart as they can be."""
    one = c.stack[place.layer]
    if one.heads < 2:
        raise NotHereError(f"{c.name}: one head in a layer")
    rows = c.rows(place.layer, "query")
    other = (place.head + max(1, one.heads // 2)) % one.heads
    rows[[place.head, other]] = rows[[other, place.head]]
    c.put_rows(place.layer, "query", rows)


def swapped_between_layers(c: Checkpoint, place: Place) -> None:
    """The queries of a head and of the same head two layers on change places."""
    other = (place.layer + 2) % len(c.stack) if len(c.stack) > 2 else (place.layer + 1) % len(c.stack)
    if other == place.layer:
        raise NotHereError(f"{c.name}: one layer")
    if c.stack[other].heads != c.stack[place.layer].heads:
        raise NotHereError(f"{c.name}: layers have different numbers of heads")
    a, b = c.rows(place.layer, "query"), c.rows(other, "query")
    a[place.head], b[place.head] = b[place.head].clone(), a[place.head].clone()
    c.put_rows(place.layer, "query", a)
    c.put_rows(other, "query", b)


def permuted_queries(c: Checkpoint, place: Place) -> None:
    """All query heads of a layer move up by one, their outputs stay."""
    if c.stack[place.layer].heads < 2:
        raise NotHereError(f"{c.name}: one head in a layer")
    c.put_rows(place.layer, "query", c.rows(place.layer, "query").roll(1, 0))


# ---- layers ----


def zero_parts(*parts: Part) -> Plant:
    def plant(c: Checkpoint, place: Place) -> None:
        for part in parts:
            c.put_rows(place.layer, part, torch.zeros_like(c.rows(place.layer, part)))

    return plant


def move_blocks(order: Callable[[int, int], list[int]]) -> Plant:
    """`order(layers, layer)` says which block each block has from now on."""

    def plant(c: Checkpoint, place: Place) -> None:
        count = len(c.stack)
        if count < 2:
            raise NotHereError(f"{c.name}: one layer")
        sources, held = order(count, place.layer), dict(c.tensors)
        for target, source in enumerate(sources):
            for name in c.in_block(target):
                other = c.blocks[source] + name.removeprefix(c.blocks[target])
                if other in held and held[other].shape == held[name].shape:
                    c.tensors[name] = held[other] if source == target else held[other].clone()

    return plant


def lost_block(c: Checkpoint, place: Place) -> None:
    """The tensors of a block are not in the file."""
    for name in c.in_block(place.layer):
        del c.tensors[name]


def dropped_block(c: Checkpoint, place: Place) -> None:
    """A block is left out, those behind it move up, and the settings count one layer fewer."""
    if len(c.stack) < 2:
        raise NotHereError(f"{c.name}: one layer")
    rebuild(c, [layer for layer in range(len(c.stack)) if layer != place.layer])


def rebuild(c: Checkpoint, sources: Sequence[int]) -> None:
    """Another number of blocks: `sources` says which block each is, and the settings count them."""
    key, held = layer_count(c), dict(c.tensors)
    for layer in range(len(c.stack)):
        for name in c.in_block(layer):
            del c.tensors[name]
    for target, source in enumerate(sources):
        path = re.sub(r"\d+\.$", f"{target}.", c.blocks[source])
        for name in (n for n in held if n.startswith(c.blocks[source])):
            c.tensors[path + name.removeprefix(c.blocks[source])] = (
                held[name] if source == target else held[name].clone()
            )
    c.config[key] = len(sources)
    if c.config.get("layer_types"):
        c.config["layer_types"] = [c.config["layer_types"][source] for source in sources]


def layer_count(c: Checkpoint) -> str:
    """The setting that counts the layers."""
    key = next((k for k in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") if k in c.config), None)
    if key is None or c.config[key] != len(c.stack):
        raise NotHereError(f"{c.name}: its settings do not count these layers")
    return key


# ---- conversion ----


def rotary_order(*parts: Part) -> Plant:
    """Rows of heads from halves (i, i + n/2) to neighbours (2i, 2i + 1): the layout of another implementation. In all
    layers; only the channels that rotate.
    """

    def plant(c: Checkpoint, place: Place) -> None:
        for layer, one in enumerate(c.stack):
            if one.rotary is None:
                raise NotHereError(f"{c.name}: no rotary positions")
            turning = 2 * len(one.rotary.frequencies)
            if turning < 4:
                raise NotHereError(f"{c.name}: one pair of channels turns, so both orders are one")
            for part in parts:
                rows = c.rows(layer, part)
                order = torch.arange(turning).view(2, -1).mT.flatten()
                rows[:, :turning] = rows[:, order]
                c.put_rows(layer, part, rows)

    return plant


def shifted_gain(c: Checkpoint, place: Place) -> None:
    """The strength is added to every gain in front of attention."""
    if not c.gains():
        raise NotHereError(f"{c.name}: no gains in front of attention")
    for name, _ in c.gains():
        c.put(name, c.tensors[name].float() + place.strength)


def scaled_queries(power: int) -> Plant:
    """1/sqrt(head size) folded into the queries once more (power 1), or taken out of them (-1), in all layers."""

    def plant(c: Checkpoint, place: Place) -> None:
        for layer, one in enumerate(c.stack):
            factor = one.head_dim ** (-0.5 * power)
            if one.query_norm is not None or c.part(layer, "query").inner is not None:
                scaled_gain(c, replace(place, layer=layer, strength=factor))
            else:
                c.put_rows(layer, "query", c.rows(layer, "query") * factor)

    return plant


def fused_order(c: Checkpoint, place: Place) -> None:
    """Queries, keys and values one after the other, cut as if they came group by group. In all layers."""
    for layer, one in enumerate(c.stack):
        parts = [c.rows(layer, part) for part in ("query", "key", "value")]
        if len({x.shape[1:] for x in parts}) > 1:
            raise NotHereError(f"{c.name}: heads of queries, keys and values have different sizes")
        if one.kv_heads == 1:
            raise NotHereError(f"{c.name}: one group in a layer, so both orders are one")
        whole, size = torch.cat(parts), one.heads // one.kv_heads
        groups = whole.view(one.kv_heads, size + 2, *whole.shape[1:])
        cut = groups[:, :size].flatten(0, 1), groups[:, size], groups[:, size + 1]
        for part, rows in zip(("query", "key", "value"), cut, strict=True):
            c.put_rows(layer, part, rows)  # type: ignore[arg-type]


def transposed(part: Part) -> Plant:
    """Square maps stored the other way round, in all layers."""

    def plant(c: Checkpoint, place: Place) -> None:
        for layer in range(len(c.stack)):
            layout = c.part(layer, part)
            stored = c.tensors[layout.weight]
            if stored.ndim != 2 or stored.shape[0] != stored.shape[1]:
                raise NotHereError(f"{c.name}: {layout.weight} is not square")
            c.put(layout.weight, stored.mT)

    return plant


def untied(c: Checkpoint, place: Place) -> None:
    """An output map of its own beside tied embeddings: those of an earlier step (noise of the strength)."""
    _refuse_untied(c)
    table = c.tensors[c.embedding()]
    noise = torch.randn(table.shape, generator=generator("untied", c.name)) * table.float().std() * place.strength
    c.tensors["lm_head.weight"] = (table.float() + noise).to(table.dtype)
    c.config["tie_word_embeddings"] = False


def tie_lost(c: Checkpoint, place: Place) -> None:
    """The settings say that embeddings are not tied, and the file has no output map."""
    _refuse_untied(c)
    c.config["tie_word_embeddings"] = False


def _refuse_untied(c: Checkpoint) -> None:
    kind = (c.config.get("architectures") or [""])[0]
    if "CausalLM" not in kind or not c.config.get("tie_word_embeddings", True) or "lm_head.weight" in c.tensors:
        raise NotHereError(f"{c.name}: embeddings are not tied to an output map")


def lost_biases(zeros: bool) -> Plant:
    """The biases of attention are zero, or not in the file, in all layers."""

    def plant(c: Checkpoint, place: Place) -> None:
        names = {c.part(layer, part).bias for layer in range(len(c.stack)) for part in MAPS} - {None}
        if not names:
            raise NotHereError(f"{c.name}: attention has no biases")
        for name in sorted(map(str, names)):
            if zeros:
                c.edit(name).zero_()
            else:
                del c.tensors[name]

    return plant


def other_theta(c: Checkpoint, place: Place) -> None:
    """The base of rotary positions times the strength."""
    if any(one.rotary is not None and len(one.rotary.frequencies) < 2 for one in c.stack):
        raise NotHereError(f"{c.name}: one pair of channels turns, at any base")
    rope = c.config.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        rope["rope_theta"] *= place.strength
    elif isinstance(rope, dict) and any(isinstance(x, dict) and "rope_theta" in x for x in rope.values()):
        for each in rope.values():
            each["rope_theta"] *= place.strength
    elif "rope_theta" in c.config:
        c.config["rope_theta"] *= place.strength
    else:
        raise NotHereError(f"{c.name}: no rope_theta")


def other_head_count(c: Checkpoint, place: Place) -> None:
    """Twice as many heads of half the size: every shape fits."""
    one = c.stack[0]
    key = next((k for k in ("num_attention_heads", "n_head", "n_heads") if k in c.config), None)
    if key is None or one.query_norm is not None or one.head_dim % 4:
        raise NotHereError(f"{c.name}: another head count does not fit its tensors")
    if one.rotary is not None and 2 * len(one.rotary.frequencies) != one.head_dim:
        raise NotHereError(f"{c.name}: rotary positions turn a share of the channels")
    if one.logits.bias is not None or one.logits.relative is not None or one.logits.sinks is not None:
        raise NotHereError(f"{c.name}: heads have numbers of their own")
    c.config[key] *= 2
    if "num_key_value_heads" in c.config:
        c.config["num_key_value_heads"] *= 2
    if c.config.get("head_dim"):
        c.config["head_dim"] //= 2


def fewer_layers(c: Checkpoint, place: Place) -> None:
    """The settings count one layer fewer than the file has."""
    key = layer_count(c)
    if c.config[key] < 2:
        raise NotHereError(f"{c.name}: one layer")
    c.config[key] -= 1
    if c.config.get("layer_types"):
        c.config["layer_types"].pop()


# ---- merging: `adapter` is the model's own ----


def merged(adapter: LoraAdapter, times: float | None = None) -> Plant:
    """The delta added `times` (None: as often as the strength says)."""
    return lambda c, place: adapter.merge(c, place.strength if times is None else times)


def half_merged(adapter: LoraAdapter, by: Literal["layers", "maps"]) -> Plant:
    """Merged in the first half of the layers, or in the maps of values alone."""

    def plant(c: Checkpoint, place: Place) -> None:
        layers = range(len(c.stack) // 2) if by == "layers" else range(len(c.stack))
        names = {c.part(layer, "value").weight for layer in layers}
        if by == "layers":
            names |= {c.part(layer, "query").weight for layer in layers}
        if names == set(adapter.factors):
            raise NotHereError(f"{c.name}: queries and values are in one map")
        adapter.merge(c, only=lambda name: name in names)

    return plant


def wrong_base(adapter: LoraAdapter) -> Plant:
    """Merged into another step of the base."""

    def plant(c: Checkpoint, place: Place) -> None:
        another_step(c, place)
        adapter.merge(c)

    return plant


# ---- quantisation ----


def lost_scales(how: Literal["zero", "swapped"]) -> Plant:
    """A map in 8 bits whose scales are zero for a share of its blocks, or each that of the block half a map away."""

    def plant(c: Checkpoint, place: Place) -> None:
        name = c.mlp(place.layer)
        tensor = c.tensors[name]
        whole, scale, _ = quantised(tensor, 8, run_length(tensor))
        count = max(1, round(place.strength * len(scale)))
        if how == "zero":
            scale[len(scale) // 2 : len(scale) // 2 + count] = 0
        else:
            scale = scale.roll(len(scale) // 2 + 1, 0)
        c.put(name, (whole * scale).view(tensor.shape))

    return plant


def low_bits(c: Checkpoint, place: Place) -> None:
    """Every matrix of a block in as many bits as the strength says."""
    for name in [n for n in c.in_block(place.layer) if c.tensors[n].ndim == 2]:
        tensor = c.tensors[name]
        whole, scale, _ = quantised(tensor, round(place.strength), run_length(tensor))
        c.put(name, (whole * scale).view(tensor.shape))


def lost_zero_points(c: Checkpoint, place: Place) -> None:
    """A map in 4 bits with zero points, read without them."""
    name = c.mlp(place.layer)
    tensor = c.tensors[name]
    whole, scale, _ = quantised(tensor, 4, run_length(tensor), zero_points=True)
    c.put(name, (whole * scale).view(tensor.shape))


def all_maps_in_bits(bits: int) -> Plant:
    """Every matrix of every block in blocks of whole numbers, as quantisation leaves them."""

    def plant(c: Checkpoint, place: Place) -> None:
        for name in c.maps_of_blocks():
            tensor = c.tensors[name]
            whole, scale, zero = quantised(tensor, bits, run_length(tensor))
            c.put(name, ((whole - zero) * scale).view(tensor.shape))

    return plant


def packed_scales_lost(c: Checkpoint, place: Place) -> None:
    """A map of a GGUF file in Q8_0 whose 16-bit scales are zero in a share of the blocks."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    name = c.part(place.layer, "value").weight
    tensor = c.tensors[name]
    if tensor.shape[-1] % 32:
        raise NotHereError(f"{c.name}: {name} is not in blocks of 32")
    packed = quantize(tensor.float().numpy(), GGMLQuantizationType.Q8_0).copy()
    rows = max(1, round(place.strength * len(packed)))
    blocks = packed[:rows].reshape(rows, -1, 34)
    blocks[:, :, :2] = 0
    packed[:rows] = blocks.reshape(rows, -1)
    c.packed[name] = packed
    c.put(name, torch.from_numpy(dequantize(packed, GGMLQuantizationType.Q8_0)))


# ---- another model ----


def redrawn(only: Literal["all", "embedding"]) -> Plant:
    """Numbers of the same size from a normal distribution, as of a model that was not trained."""

    def plant(c: Checkpoint, place: Place) -> None:
        names = [c.embedding()] if only == "embedding" else [n for n, x in c.tensors.items() if x.is_floating_point()]
        for name in names:
            tensor = c.tensors[name].float()
            spread = tensor.std() if tensor.numel() > 1 else tensor.new_zeros(())
            drawn = torch.randn(tensor.shape, generator=generator("redrawn", c.name, name))
            c.put(name, tensor.mean() + spread * drawn)

    return plant


def moved_tokens(c: Checkpoint, place: Place) -> None:
    """The rows of the embeddings in another order: those of another tokenizer."""
    name = c.embedding()
    c.put(name, c.tensors[name].roll(7, 0))


def another_step(c: Checkpoint, place: Place) -> None:
    """Every matrix of every block moved by a share of its own size, as training on moves it."""
    moved(c, c.maps_of_blocks(), place.strength)


def shard_of_another_step(c: Checkpoint, place: Place) -> None:
    """The last shard is of another step."""
    last = c.shard_of(len(c.stack) - 1)
    layers = [layer for layer in range(len(c.stack)) if c.shard_of(layer) == last]
    moved(c, [n for layer in layers for n in c.in_block(layer) if c.tensors[n].ndim == 2], place.strength)


def moved(c: Checkpoint, names: Sequence[str], share: float) -> None:
    """Noise that is a share of a tensor's own size."""
    for name in dict.fromkeys(names):
        tensor = c.tensors[name].float()
        noise = torch.randn(tensor.shape, generator=generator("step", c.name, name))
        c.put(name, tensor + share * tensor.square().mean().sqrt() * noise)


# ---- changes that do no harm ----


def nothing(c: Checkpoint, place: Place) -> None:
    """The same numbers."""


def cast(dtype: torch.dtype) -> Plant:
    """Every tensor in another type, and the settings say so."""

    def plant(c: Checkpoint, place: Place) -> None:
        floats = [name for name, x in c.tensors.items() if x.is_floating_point()]
        if all(c.tensors[name].dtype == dtype for name in floats):
            raise NotHereError(f"{c.name}: stored as {dtype} already")
        for name in floats:
            c.tensors[name] = c.tensors[name].to(dtype)
        c.config["dtype"] = str(dtype).removeprefix("torch.")
        c.config.pop("torch_dtype", None)

    return plant


def equal_permutation(c: Checkpoint, place: Place) -> None:
    """Heads of a layer in another order, with all that belongs to them."""
    one = c.stack[place.layer]
    numbered = one.logits.bias, one.logits.relative, one.logits.sinks, one.gate, one.mixed_norm
    tied = c.part(place.layer, "query").inner, c.part(place.layer, "query").shift
    if any(x is not None for x in (*numbered, *tied)) or one.heads < 2:
        raise NotHereError(f"{c.name}: heads have numbers of their own")
    for part in MAPS:
        rows = c.rows(place.layer, part)
        grouped = rows.unflatten(0, (one.kv_heads, -1))
        if one.kv_heads > 1:
            grouped = grouped.roll(1, 0)
        if grouped.shape[1] > 1:
            grouped = grouped.roll(1, 1)
        c.put_rows(place.layer, part, grouped.flatten(0, 1))


def equal_scales(c: Checkpoint, place: Place) -> None:
    """Queries of a layer times the strength, keys over it."""
    one = c.stack[place.layer]
    if one.query_norm is not None or c.part(place.layer, "query").inner is not None:
        raise NotHereError(f"{c.name}: queries are normalised")
    _without_position_terms(c, place.layer)
    for group in range(one.kv_heads):
        _scale_pair(c, place.layer, group, place.strength)


def scale_before_norm(c: Checkpoint, place: Place) -> None:
    """Queries of a layer times the strength, before a norm that takes it out again."""
    if c.stack[place.layer].query_norm is None:
        raise NotHereError(f"{c.name}: queries are not normalised")
    c.put_rows(place.layer, "query", c.rows(place.layer, "query") * place.strength)


def without_prefix(c: Checkpoint, place: Place) -> None:
    """The names of the tensors without that of the model around the blocks."""
    prefix = c.blocks[0].partition(".")[0] + "."
    if not all(name.startswith(prefix) for name in c.tensors):
        raise NotHereError(f"{c.name}: names do not all begin with {prefix}")
    c.tensors = {name.removeprefix(prefix): tensor for name, tensor in c.tensors.items()}
