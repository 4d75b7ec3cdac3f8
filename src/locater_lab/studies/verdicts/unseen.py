"""Faults and harmless changes that nobody had in mind: the rules of doctor were frozen at FROZEN before these were
written down, planted and measured, by somebody who had not read their code. They are counted apart from the others.

Since then rules were mended with them at hand: of the rules of today they are seen.

Where no cause of doctor is what was done, `causes` is empty: then `unknown` is the honest answer, and any name a wrong one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from locater_lab.studies.verdicts import models
from locater_lab.studies.verdicts import planting as p
from locater_lab.studies.verdicts.checkpoint import (
    DOWN,
    GATE,
    UP,
    WRITES,
    Checkpoint,
    LoraAdapter,
    NotHereError,
    Part,
    Place,
    generator,
)
from locater_lab.studies.verdicts.faults import ANY_NEUTRAL, Fault

FROZEN = "47660d23"  # the commit whose rules were asked

# ---- faults ----


def swapped_names(one: str, other: str) -> p.Plant:
    """Two tensors of every block have each other's names."""

    def plant(c: Checkpoint, place: Place) -> None:
        for first, second in zip(c.ending([one]), c.ending([other]), strict=True):
            c.tensors[first], c.tensors[second] = c.tensors[second], c.tensors[first]

    return plant


def norms_of_two_layers(c: Checkpoint, place: Place) -> None:
    names = [name for name, _ in c.gains()]
    if len(names) < 4:
        raise NotHereError(f"{c.name}: no gains in front of attention")
    one, other = names[1], names[place.layer + 1 if place.layer == 1 else place.layer]
    c.tensors[one], c.tensors[other] = c.tensors[other], c.tensors[one]


def shifted_positions(c: Checkpoint, place: Place) -> None:
    """Two rows of padding in front, as RoBERTa has them, that this model has not."""
    names = [n for n in c.tensors if n.endswith("position_embeddings.weight")]
    if not names:
        raise NotHereError(f"{c.name}: no embeddings of positions")
    c.put(names[0], c.tensors[names[0]].roll(2, 0))


def doubled_biases(c: Checkpoint, place: Place) -> None:
    for name in c.ending(["dense.bias", "query.bias", "key.bias", "value.bias"]):
        c.put(name, 2 * c.tensors[name].float())


def norm_biases_lost(c: Checkpoint, place: Place) -> None:
    for name in c.ending(["LayerNorm.bias"]):
        c.edit(name).zero_()


def outputs_by_position_in_group(c: Checkpoint, place: Place) -> None:
    """Columns of the output maps in the order (head of the group, group)."""
    for layer, one in enumerate(c.stack):
        if one.kv_heads in (1, one.heads):
            raise NotHereError(f"{c.name}: no groups of heads")
        rows = c.rows(layer, "out").unflatten(0, (one.kv_heads, -1))
        c.put_rows(layer, "out", rows.transpose(0, 1).flatten(0, 1))


def expanded_groups(interleaved: bool) -> p.Plant:
    """Keys and values for each head of queries: each repeated in place, or (wrongly) all of them again and again."""

    def plant(c: Checkpoint, place: Place) -> None:
        c.require("llama")
        for layer, one in enumerate(c.stack):
            if one.kv_heads == one.heads:
                raise NotHereError(f"{c.name}: no groups of heads")
            for part in ("key", "value"):
                name, size = c.part(layer, part).weight, one.heads // one.kv_heads
                rows = c.tensors[name].unflatten(0, (one.kv_heads, -1))
                many = rows.repeat(size, 1, 1) if interleaved else rows.repeat_interleave(size, 0)
                c.tensors[name] = many.flatten(0, 1)
        c.config["num_key_value_heads"] = c.config["num_attention_heads"]

    return plant


def drawn_mlp(c: Checkpoint, place: Place) -> None:
    """An MLP whose names did not fit, as a framework leaves it: drawn with a spread of 0.02."""
    inner, outer = c.neurons(place.layer)
    for name in [*inner, outer]:
        if c.tensors[name].ndim == 2:
            c.put(name, 0.02 * torch.randn(c.tensors[name].shape, generator=generator("drawn", c.name, name)))


def drawn_head(c: Checkpoint, place: Place) -> None:
    c.require("llama")
    table = c.tensors[c.embedding()]
    c.tensors["lm_head.weight"] = (0.02 * torch.randn(table.shape, generator=generator("head", c.name))).to(table.dtype)
    c.config["tie_word_embeddings"] = False


def final_norm_lost(c: Checkpoint, place: Place) -> None:
    """The gain of the last norm (where a model has none, that of the embeddings) is one."""
    names = [n for n in c.tensors if n.endswith(("model.norm.weight", "embeddings.LayerNorm.weight"))]
    if not names:
        raise NotHereError(f"{c.name}: no last norm")
    c.edit(names[0]).fill_(1.0)


def stretched_positions(c: Checkpoint, place: Place) -> None:
    """The settings of a variant for long texts: positions over 4."""
    rope = c.config.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_type" not in rope:
        raise NotHereError(f"{c.name}: no rotary positions")
    rope |= {"rope_type": "linear", "factor": 4.0}


def setting(values: dict[str, object]) -> p.Plant:
    """The first of these settings that a model has gets another value."""

    def plant(c: Checkpoint, place: Place) -> None:
        key = next((key for key in values if key in c.config), None)
        if key is None:
            raise NotHereError(f"{c.name}: no setting {', '.join(values)}")
        c.config[key] = values[key]

    return plant


def eight_bit_floats(c: Checkpoint, place: Place) -> None:
    """Every map through float8 (4 bits of exponent, 3 of mantissa) without a scale, over 16 as one was lost."""
    for name in c.maps_of_blocks():
        small = (c.tensors[name].float() / 16).to(torch.float8_e4m3fn)
        c.put(name, small.float() * 16)


def cut_mantissas(c: Checkpoint, place: Place) -> None:
    """Every map with 2 bits of mantissa, cut off and not rounded."""
    for name in c.maps_of_blocks():
        whole = c.tensors[name].float()
        c.put(name, (whole.view(torch.int32) & ~((1 << 21) - 1)).view(torch.float32))


def averaged_with_another(c: Checkpoint, place: Place) -> None:
    """The mean with a model that has nothing to do with it."""
    for name in c.maps_of_blocks():
        own = c.tensors[name].float()
        c.put(name, (own + own.std() * torch.randn(own.shape, generator=generator("other", c.name, name))) / 2)


def token_inserted(c: Checkpoint, place: Place) -> None:
    """A token was added in front of the words: rows from the third on moved by one, the last is lost."""
    name = c.embedding()
    rows = c.tensors[name].float()
    c.put(name, torch.cat([rows[:3], rows.mean(0, keepdim=True), rows[3:-1]]))


def interpolated_layers(c: Checkpoint, place: Place) -> None:
    """A layer is the mean of itself and the next one."""
    other = place.layer + 1 if place.layer + 1 < len(c.stack) else place.layer - 1
    for name in c.in_block(place.layer):
        twin = c.blocks[other] + name.removeprefix(c.blocks[place.layer])
        c.put(name, (c.tensors[name].float() + c.tensors[twin].float()) / 2)


def shards_in_the_wrong_order(c: Checkpoint, place: Place) -> None:
    """The two parts of maps into the neurons of MLPs, put together the other way round; maps out of them are right."""
    for layer in range(len(c.stack)):
        for name in c.neurons(layer)[0]:
            c.put(name, c.tensors[name].roll(len(c.tensors[name]) // 2, 0))


def reshaped_maps(c: Checkpoint, place: Place) -> None:
    """Maps out of MLPs that were stored the other way round and brought into shape without a transposition."""
    for layer in range(len(c.stack)):
        name = c.neurons(layer)[1]
        c.put(name, c.tensors[name].mT.contiguous().view(c.tensors[name].shape))


def zero_pages(c: Checkpoint, place: Place) -> None:
    """A hole of zeros in the middle of a map, a fifth of it, that begins and ends in the middle of rows."""
    flat = c.edit(c.mlp(place.layer)).view(-1)
    flat[2 * len(flat) // 5 + 11 : 3 * len(flat) // 5 + 7] = 0


def swapped_bytes(c: Checkpoint, place: Place) -> None:
    """A map in the other order of bytes."""
    tensor = c.tensors[c.mlp(place.layer)]
    size = tensor.element_size()
    c.tensors[c.mlp(place.layer)] = tensor.view(torch.uint8).unflatten(-1, (-1, size)).flip(-1).flatten(-2).view(tensor.dtype)  # fmt: skip


def read_as_another_type(c: Checkpoint, place: Place) -> None:
    """The bits of a map in float16, read as bfloat16."""
    name = c.mlp(place.layer)
    c.put(name, c.tensors[name].half().view(torch.bfloat16))


def off_by_one(c: Checkpoint, place: Place) -> None:
    """Every map of a block was read from one number too early."""
    for name in c.in_block(place.layer):
        if c.tensors[name].ndim == 2:
            c.put(name, c.tensors[name].flatten().roll(1).view(c.tensors[name].shape))


def scaled_embedding(c: Checkpoint, place: Place) -> None:
    """sqrt(width), which another family multiplies by, is in the table."""
    table = c.tensors[c.embedding()]
    c.put(c.embedding(), table.float() * table.shape[1] ** 0.5)


def clamped_infinity(c: Checkpoint, place: Place) -> None:
    """An infinite number of a map was made 65504, as nan_to_num does in 16 bits."""
    tensor = c.edit(c.mlp(place.layer))
    tensor.view(-1)[tensor.numel() // 3] = p.HALF_RANGE


def sorted_as_text(c: Checkpoint, place: Place) -> None:
    """Layers in the order of their numbers as text: 0, 1, 10, 11, 2."""
    if len(c.stack) < 11:
        raise NotHereError(f"{c.name}: fewer than eleven layers")
    p.move_blocks(lambda count, layer: [int(x) for x in sorted(map(str, range(count)))])(c, place)


def all_the_last(c: Checkpoint, place: Place) -> None:
    """Every layer is the last one, as a loop leaves it that keeps a reference."""
    p.move_blocks(lambda count, layer: [count - 1] * count)(c, place)


def halved_gains(c: Checkpoint, place: Place) -> None:
    """Weight decay went over the gains of norms: all are half of what they were."""
    for name in c.ending(["norm.weight", "LayerNorm.weight"]):
        c.put(name, c.tensors[name].float() / 2)


def merged_elsewhere(adapter: LoraAdapter, how: str) -> p.Plant:
    """Each delta in the next layer, or the other way round where it is square."""

    def plant(c: Checkpoint, place: Place) -> None:
        parts: tuple[Part, ...] = ("query", "value")
        after = {
            c.part(n, x).weight: c.part((n + 1) % len(c.stack), x).weight for n in range(len(c.stack)) for x in parts
        }
        square = {name for name in adapter.factors if len(set(c.tensors[name].shape)) == 1}
        if how == "transposed" and not square:
            raise NotHereError(f"{c.name}: no map of the adapter is square")
        for name in adapter.factors:
            delta, target = adapter.delta(name), after[name] if how == "next layer" else name
            c.put(target, c.tensors[target].float() + (delta.mT if how == "transposed" and name in square else delta))

    return plant


# ---- changes that do no harm ----


def padded_vocabulary(c: Checkpoint, place: Place) -> None:
    """64 rows that are near the mean, and settings to match."""
    name = c.embedding()
    rows = c.tensors[name].float()
    drawn = rows.std(0) * 1e-3 * torch.randn(64, rows.shape[1], generator=generator("rows", c.name))
    if "For" in (c.config.get("architectures") or [""])[0]:
        c.require("llama")  # others have output maps with biases, or embeddings of which copies are kept
    c.tensors[name] = torch.cat([rows, rows.mean(0) + drawn]).to(c.tensors[name].dtype)
    c.config["vocab_size"] += 64


def stored_head(c: Checkpoint, place: Place) -> None:
    c.require("llama")
    c.tensors["lm_head.weight"] = c.tensors[c.embedding()].clone()


def permuted_neurons(c: Checkpoint, place: Place) -> None:
    """The neurons of every MLP in another order, with all maps."""
    for layer in range(len(c.stack)):
        inner, outer = c.neurons(layer)
        order = torch.randperm(c.tensors[outer].shape[1], generator=generator("neurons", c.name, layer))
        for name in inner:
            c.put(name, c.tensors[name][order])
        c.put(outer, c.tensors[outer][:, order])


def permuted_stream(c: Checkpoint, place: Place) -> None:
    """The channels of the residual stream in another order, everywhere."""
    c.require("llama")
    order = torch.randperm(c.config["hidden_size"], generator=generator("stream", c.name))
    for name, tensor in c.tensors.items():
        c.put(name, tensor[order] if tensor.ndim == 1 or name.endswith(WRITES) else tensor[:, order])


def scaled_neurons(c: Checkpoint, place: Place) -> None:
    """Maps up times 4, maps down over 4."""
    for up, down in zip(c.ending([UP]), c.ending([DOWN]), strict=True):
        c.put(up, c.tensors[up].float() * 4)
        c.put(down, c.tensors[down].float() / 4)


def behind_norms(c: Checkpoint, layer: int) -> list[tuple[str, list[str]]]:
    """The gains of a block and the maps that read what they scale, by the names of Llama and of Gemma."""
    c.require("llama", "gemma3_text")
    mlp = "post_attention_layernorm" if c.config["model_type"] == "llama" else "pre_feedforward_layernorm"
    maps = {"input_layernorm": ("q_proj.weight", "k_proj.weight", "v_proj.weight"), mlp: (GATE, UP)}
    return [(c.ending([f"{norm}.weight"], layer)[0], c.ending(ends, layer)) for norm, ends in maps.items()]


def folded_gains(c: Checkpoint, place: Place) -> None:
    """Gains of norms in the maps behind them, ones in their place."""
    c.require("llama")
    for layer in range(len(c.stack)):
        for gain, maps in behind_norms(c, layer):
            for name in maps:
                c.put(name, c.tensors[name].float() * c.tensors[gain].float())
            c.edit(gain).fill_(1.0)


def turned_values(c: Checkpoint, place: Place) -> None:
    """Values of each group of heads rotated, and outputs rotated back, as quantisers do against outliers."""
    for layer, one in enumerate(c.stack):
        values, outputs = c.rows(layer, "value"), c.rows(layer, "out")
        size = values.shape[1]
        turn = torch.linalg.qr(torch.randn(size, size, generator=generator("turn", c.name, layer)))[0]
        c.put_rows(layer, "value", torch.einsum("ij,hjd->hid", turn, values))
        if outputs.shape[1] != size or one.mixed_norm is not None:
            raise NotHereError(f"{c.name}: outputs have other sizes")
        c.put_rows(layer, "out", torch.einsum("ij,hjd->hid", turn, outputs))


def scaled_values(c: Checkpoint, place: Place) -> None:
    for layer in range(len(c.stack)):
        c.put_rows(layer, "value", c.rows(layer, "value") * 4)
        c.put_rows(layer, "out", c.rows(layer, "out") / 4)


def other_settings(c: Checkpoint, place: Place) -> None:
    """Keys in another order, keys that nothing reads, and another version."""
    c.config = dict(reversed(c.config.items())) | {"transformers_version": "4.40.0", "_note": "exported", "use_cache": False}  # fmt: skip


def wide_norms(c: Checkpoint, place: Place) -> None:
    """Gains in float32 beside maps in 16 bits."""
    names = [n for n, x in c.tensors.items() if x.ndim == 1 and x.dtype in (torch.bfloat16, torch.float16)]
    if not names:
        raise NotHereError(f"{c.name}: gains are in float32 already")
    for name in names:
        c.tensors[name] = c.tensors[name].float()


def old_buffers(c: Checkpoint, place: Place) -> None:
    """Tables that older versions stored, and newer ones ignore."""
    for layer, one in enumerate(c.stack):
        if one.rotary is None:
            raise NotHereError(f"{c.name}: no rotary positions")
        c.tensors[f"{c.blocks[layer]}self_attn.rotary_emb.inv_freq"] = torch.tensor(list(one.rotary.frequencies))


def pruned(c: Checkpoint, place: Place) -> None:
    """The smallest numbers of every map are zero: a share that is the strength."""
    for name in c.maps_of_blocks():
        whole = c.tensors[name].float()
        small = whole.abs().flatten().kthvalue(max(1, int(place.strength * whole.numel()))).values
        c.put(name, whole.where(whole.abs() > small, torch.zeros(())))


def trained_on(c: Checkpoint, place: Place) -> None:
    """Five steps of AdamW down the model's own loss, at the rate that is the strength."""
    module, model = models.load_quietly(c.folder), known_model(c)
    own = {n: x for n, x in module.named_parameters() if n in c.tensors}
    steps = torch.optim.AdamW(own.values(), lr=place.strength)
    for _ in range(5):
        steps.zero_grad()
        models.loss_of(module, model).backward()
        steps.step()
    for name, parameter in own.items():
        c.put(name, parameter.detach())


def known_model(c: Checkpoint) -> models.Model:
    """The model of the bench that a checkpoint is, with what it was made for."""
    model = next((m for m in models.trained_models(c.folder.parent) if m.name == c.name), None)
    if model is None:
        raise NotHereError(f"{c.name}: there is no text of what it was made for")
    return model


def merged_in_mlp(c: Checkpoint, place: Place) -> None:
    """A delta of rank 16 and 1 % of its map in every map out of an MLP."""
    for layer in range(len(c.stack)):
        name = c.neurons(layer)[1]
        own, g = c.tensors[name].float(), generator("small", c.name, name)
        delta = torch.randn(own.shape[0], 16, generator=g) @ torch.randn(16, own.shape[1], generator=g)
        c.put(name, own + 0.01 * own.norm() / delta.norm() * delta)


def in_reverse(path: Path, c: Checkpoint, place: Place) -> None:
    """The same tensors from the last to the first, with metadata of another tool and a header that is filled up."""
    file = path / "model.safetensors"
    raw = file.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header, made, data = json.loads(raw[8:start]), {}, b""
    header.pop("__metadata__", None)
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"], reverse=True):
        first, last = entry["data_offsets"]
        made[name] = {**entry, "data_offsets": [len(data), len(data) + last - first]}
        data += raw[start + first : start + last]
    text = json.dumps({"__metadata__": {"format": "pt", "made_by": "another tool"}, **made}).encode()
    text += b" " * (-len(text) % 8 + 64)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


# ---- the table ----


def unseen_faults(adapter: LoraAdapter | None) -> list[Fault]:
    """Faults, then harmless changes, each planted once."""

    def fault(name: str, group: str, causes: str, plant: p.Plant, says: str) -> Fault:
        return Fault(name, group, tuple(causes.split()), plant, says, on_tiny=False, belongs="unseen 1")

    merging = [] if adapter is None else [
        fault("merged-in-the-next-layer", "merging", "", merged_elsewhere(adapter, "next layer"), "the adapter was merged one layer too late"),
        fault("merged-transposed", "merging", "transposed", merged_elsewhere(adapter, "transposed"), "square deltas were merged the other way round"),
    ]  # fmt: skip
    return [
        fault("gate-and-up-swapped", "conversion", "fused-order", swapped_names(GATE, UP), "the two maps into MLPs have each other's names"),
        fault("keys-and-values-swapped", "conversion", "fused-order", swapped_names("k_proj.weight", "v_proj.weight"), "keys and values have each other's names"),
        fault("norms-of-a-block-swapped", "conversion", "", swapped_names("input_layernorm.weight", "post_attention_layernorm.weight"), "the two norms of every block have each other's names"),
        fault("norms-of-two-layers-swapped", "layers", "swapped-layers", norms_of_two_layers, "two layers have each other's gains in front of attention"),
        fault("positions-off-by-two", "conversion", "", shifted_positions, "embeddings of positions moved by two rows"),
        fault("biases-twice", "conversion", "", doubled_biases, "every bias was added twice"),
        fault("norm-biases-lost", "conversion", "lost-biases zero", norm_biases_lost, "the biases of norms are zero"),
        fault("outputs-by-position-in-group", "conversion", "permuted-heads swapped-heads", outputs_by_position_in_group, "output maps expect heads in another order than queries have"),
        fault("groups-interleaved", "conversion", "permuted-heads", expanded_groups(True), "key and value heads were repeated in turn, not in place"),
        fault("drawn-mlp", "values", "another-model", drawn_mlp, "an MLP that was not loaded: drawn anew with a spread of 0.02"),
        fault("drawn-head", "conversion", "untied another-model", drawn_head, "an output map drawn anew beside embeddings that were tied"),
        fault("final-norm-lost", "values", "constant", final_norm_lost, "the gains of the last norm (of BERT: of the embeddings) are ones"),
        fault("stretched-positions", "conversion", "config", stretched_positions, "config.json stretches positions by 4"),
        fault("other-activation", "conversion", "config", setting({"hidden_act": "relu"}), "config.json has another activation"),
        fault("other-epsilon", "conversion", "config", setting({"rms_norm_eps": 0.1, "layer_norm_eps": 0.1}), "config.json has 0.1 for the epsilon of norms"),
        fault("eight-bit-floats", "quantisation", "low-bits quantised", eight_bit_floats, "every map over 16 in 8-bit floats, whose small numbers are lost"),
        fault("cut-mantissas", "quantisation", "low-bits quantised", cut_mantissas, "every map with 2 bits of mantissa, cut off"),
        fault("averaged-with-another", "another model", "another-model another-step", averaged_with_another, "the mean of the model and another of the same shape"),
        fault("token-inserted", "another model", "another-model", token_inserted, "rows of the embeddings from the third on moved by one"),
        fault("interpolated-layers", "layers", "", interpolated_layers, "a layer is the mean of itself and the next"),
        fault("shards-in-the-wrong-order", "conversion", "", shards_in_the_wrong_order, "halves of the maps into MLPs were put together the other way round"),
        fault("reshaped-maps", "conversion", "transposed", reshaped_maps, "maps out of MLPs were reshaped in place of transposed"),
        fault("zero-pages", "files", "zero truncated", zero_pages, "a fifth of an MLP's map in the middle is zeros"),
        fault("swapped-bytes", "files", "random-bits nonfinite", swapped_bytes, "an MLP's map in the other order of bytes"),
        fault("read-as-another-type", "files", "random-bits overflow", read_as_another_type, "the bits of an MLP's map in float16, read as bfloat16"),
        fault("off-by-one", "files", "", off_by_one, "the maps of a layer were read from one number too early"),
        fault("scaled-embedding", "conversion", "", scaled_embedding, "the embeddings times the root of their width"),
        fault("clamped-infinity", "values", "overflow random-bits nonfinite", clamped_infinity, "one number of an MLP is 65504, as a clamp leaves infinity"),
        fault("sorted-as-text", "layers", "shifted-layers swapped-layers", sorted_as_text, "layers in the order 0, 1, 10, 11, ..., 2"),
        fault("all-the-last", "layers", "duplicated-layer", all_the_last, "every layer is the last one"),
        fault("halved-gains", "conversion", "", halved_gains, "the gains of all norms of blocks are halved"),
        *merging,
        *_harmless(),
    ]  # fmt: skip


def _harmless() -> list[Fault]:
    def change(name: str, plant: p.Plant, says: str, **more: Any) -> Fault:
        return Fault(name, "harmless", ANY_NEUTRAL, plant, says, on_tiny=False, belongs="unseen 1", **more)

    return [
        change("padded-vocabulary", padded_vocabulary, "64 rows more than tokens, and settings to match"),
        change("stored-head", stored_head, "the tied output map is in the file too"),
        change("permuted-neurons", permuted_neurons, "neurons of all MLPs in another order, with their maps"),
        change("permuted-stream", permuted_stream, "channels of the residual stream in another order, everywhere"),
        change("scaled-neurons", scaled_neurons, "maps up times 4, maps down over 4"),
        change("folded-gains", folded_gains, "gains of norms folded into the maps behind them"),
        change("turned-values", turned_values, "values rotated and outputs rotated back, in all heads"),
        change("scaled-values", scaled_values, "values times 4, outputs over 4"),
        change("groups-expanded", expanded_groups(False), "keys and values repeated for each head of queries, and settings to match"),
        change("other-settings", other_settings, "settings in another order, and some that nothing reads"),
        change("wide-norms", wide_norms, "gains of norms in float32 beside 16-bit maps"),
        change("old-buffers", old_buffers, "tables of rotary frequencies are in the file too"),
        change("trained-on", trained_on, "five steps of AdamW at 2e-5", strengths=(2e-5,)),
        change("merged-in-mlp", merged_in_mlp, "a delta of rank 16 and 1 % in the maps out of MLPs"),
        change("pruned", pruned, "the smallest tenth of every map is zero", strengths=(0.1,)),
        change("in-reverse", p.nothing, "tensors in the reverse order in the file, with other metadata", damage=in_reverse),
    ]  # fmt: skip
