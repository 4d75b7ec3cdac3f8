"""Changes of the second unseen set that do no harm: equal in function, or so small that nobody would call the model broken.

They are what tools leave behind that people use every day: quantisers, trainers, editors of facts, older versions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from locater_lab.studies.verdicts import models, unseen
from locater_lab.studies.verdicts import planting as p
from locater_lab.studies.verdicts import writing as w
from locater_lab.studies.verdicts.checkpoint import (
    DOWN,
    UP,
    WRITES,
    Checkpoint,
    LoraAdapter,
    NotHereError,
    Place,
    generator,
    quantised,
)
from locater_lab.studies.verdicts.faults import ANY_NEUTRAL, Fault

DECODERS = ("llama", "gemma3_text")


# ---- quantisers ----


def packed_in_eight_bits(c: Checkpoint, place: Place) -> None:
    """Every matrix as Q8_0, as most GGUF files have them; rows that blocks of 32 do not divide stay in 16 bits."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    for name, tensor in list(c.tensors.items()):
        if tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
            c.packed[name] = quantize(tensor.float().numpy(), GGMLQuantizationType.Q8_0)
            c.put(name, torch.from_numpy(dequantize(c.packed[name], GGMLQuantizationType.Q8_0)))


def eight_bits_by_rows(c: Checkpoint, place: Place) -> None:
    """Every map in 8 bits with a scale for each row, and back."""
    for name in c.maps_of_blocks():
        whole, scale, _ = quantised(c.tensors[name], 8, c.tensors[name].shape[1])
        c.put(name, (whole * scale).view(c.tensors[name].shape))


def smooth(c: Checkpoint, undone: bool) -> None:
    """Columns of the maps behind norms, and of the maps down, times the root of their size; and, where it is undone, the
    gains and the maps up divided by the same.
    """
    for layer, one in enumerate(c.stack):
        for gain, maps in unseen.behind_norms(c, layer):
            factor = _sizes([c.tensors[name] for name in maps])
            for name in maps:
                c.put(name, c.tensors[name].float() * factor)
            if undone:
                c.put(gain, (c.tensors[gain].float() + one.norm.offset) / factor - one.norm.offset)
        if undone:
            (up,), (down,) = c.ending([UP], layer), c.ending([DOWN], layer)
            factor = _sizes([c.tensors[down]])
            c.put(down, c.tensors[down].float() * factor)
            c.put(up, c.tensors[up].float() / factor[:, None])


def _sizes(maps: list[Tensor]) -> Tensor:
    """For each column the root of its largest number over the mean, at most 4."""
    largest = torch.stack([x.float().abs().amax(0) for x in maps]).amax(0).clamp_min(1e-6)
    spread = 0.5 * (largest.log2() - largest.log2().mean())
    return torch.exp2(spread.clamp(-2, 2))


def smoothed_pairs(c: Checkpoint, place: Place) -> None:
    """Channels of queries that turn together times the root of the size of those of keys, and these over it, for a cache
    in few bits.
    """
    for layer, one in enumerate(c.stack):
        full = one.rotary is not None and 2 * len(one.rotary.frequencies) == one.head_dim
        if not full or one.query_norm is not None:
            raise NotHereError(f"{c.name}: queries and keys do not turn in pairs of all their channels")
        keys, queries = c.rows(layer, "key"), c.rows(layer, "query")
        size = keys.square().sum(2).unflatten(1, (2, -1)).sum(1).sqrt().clamp_min(1e-6)  # (heads of keys, pairs)
        factor = torch.exp2((0.5 * (size.log2() - size.log2().mean())).clamp(-2, 2)).repeat(1, 2)[:, :, None]
        c.put_rows(layer, "key", keys / factor)
        c.put_rows(layer, "query", queries * factor.repeat_interleave(one.heads // one.kv_heads, 0))


def turned_stream(c: Checkpoint, place: Place) -> None:
    """The residual stream in other directions, gains folded into the maps behind them: what takes outliers away. The
    output map has the last gain, so that it is no longer that of the embeddings.
    """
    unseen.folded_gains(c, place)
    width = c.config["hidden_size"]
    turn = torch.linalg.qr(torch.randn(width, width, generator=generator("stream", c.name), dtype=torch.float64))[0]
    table, last = c.tensors[c.embedding()], c.tensors["model.norm.weight"]
    head = (table.double() * last.double()) @ turn
    for name in [c.embedding(), *c.maps_of_blocks()]:
        whole = c.tensors[name].double()
        c.put(name, turn.mT @ whole if name.endswith(WRITES) else whole @ turn)
    c.edit("model.norm.weight").fill_(1.0)
    p.tie_lost(c, place)
    c.tensors["lm_head.weight"] = head.to(table.dtype)


# ---- trainers and editors ----


def direction_weakened(c: Checkpoint, place: Place) -> None:
    """A share of one direction of the residual stream taken out of all that is written, as editors of behaviour do."""
    c.require(*DECODERS)
    away = torch.randn(c.config["hidden_size"], generator=generator("direction", c.name))
    away /= away.norm()
    for name in c.ending(WRITES):
        whole = c.tensors[name].float()
        c.put(name, whole - place.strength * torch.outer(away, away @ whole))


def fact_edited(c: Checkpoint, place: Place) -> None:
    """A delta of rank one in the map out of one MLP: a share of it that is the strength."""
    name = c.neurons(place.layer)[1]
    own, g = c.tensors[name].float(), generator("fact", c.name)
    delta = torch.outer(torch.randn(own.shape[0], generator=g), torch.randn(own.shape[1], generator=g))
    c.put(name, own + place.strength * own.norm() / delta.norm() * delta)


def unused_tokens_trained(c: Checkpoint, place: Place) -> None:
    """Up to eight rows of tokens that its text does not have: special tokens that a chat needs."""
    rows = c.edit(c.embedding())
    seen = set(models.ids_of(unseen.known_model(c)).flatten().tolist())
    free = [token for token in range(len(rows)) if token not in seen][-8:]
    if not free or c.config.get("model_type") not in (*DECODERS, "bert"):
        raise NotHereError(f"{c.name}: every token is in its text")
    spread = rows.float().std(0)
    rows[free] += (0.5 * spread * torch.randn(len(free), rows.shape[1], generator=generator("free", c.name))).to(rows.dtype)  # fmt: skip


def biases_trained(c: Checkpoint, place: Place) -> None:
    """Biases moved by a share of their size, as training of these alone does."""
    p.moved(c, c.ending((".bias",)), place.strength)


def gains_trained(c: Checkpoint, place: Place) -> None:
    """Every gain of a norm in a block times a number near one."""
    for name in c.ending(("norm.weight", "LayerNorm.weight")):
        whole = c.tensors[name].float()
        noise = torch.randn(whole.shape, generator=generator("gains", c.name, name))
        c.put(name, whole * (1 + place.strength * noise))


def sizes_trained(c: Checkpoint, place: Place) -> None:
    """Every row of every map times a number near one."""
    for name in c.maps_of_blocks():
        whole = c.tensors[name].float()
        factor = 1 + place.strength * torch.randn(len(whole), 1, generator=generator("sizes", c.name, name))
        c.put(name, whole * factor)


def value_head_left(c: Checkpoint, place: Place) -> None:
    """The head of values that training with rewards leaves in the file, and that nothing reads."""
    c.require(*DECODERS)
    drawn = torch.randn(1, c.config["hidden_size"], generator=generator("values", c.name))
    c.tensors |= {"v_head.summary.weight": 0.02 * drawn, "v_head.summary.bias": torch.zeros(1)}


def trainer_folder(folder: Path, c: Checkpoint, place: Place) -> None:
    """What a trainer saves beside the weights to go on from."""
    names = sorted(c.tensors)[:4]
    state = {i: {"step": torch.tensor(500.0), "exp_avg": torch.zeros(c.tensors[n].shape)} for i, n in enumerate(names)}
    torch.save({"state": state, "param_groups": [{"lr": 2e-5, "params": list(state)}]}, folder / "optimizer.pt")
    torch.save({"last_epoch": 500, "_last_lr": [2e-5]}, folder / "scheduler.pt")
    torch.save({"learning_rate": 2e-5, "output_dir": "out"}, folder / "training_args.bin")
    torch.save({"cpu": torch.get_rng_state()}, folder / "rng_state.pth")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 500, "log_history": [{"loss": 2.5}]}))


def stale_pickle(folder: Path, c: Checkpoint, place: Place) -> None:
    """A pickle of an earlier step beside the weights, which nothing reads where both are there."""
    earlier = {n: 0.9 * x if x.is_floating_point() else x for n, x in c.tensors.items()}
    torch.save(earlier, folder / "pytorch_model.bin")


def adapter_in_sixteen_bits(folder: Path, c: Checkpoint, place: Place) -> None:
    file = folder / "adapter_model.safetensors"
    save_file({n: x.bfloat16() for n, x in load_file(file).items()}, file, metadata={"format": "pt"})


# ---- versions and converters ----


def mistral_by_name(c: Checkpoint, place: Place) -> None:
    """The same blocks under the name of another family that computes the same."""
    c.require("llama")
    c.config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}


def centred_writes(c: Checkpoint, place: Place) -> None:
    """The mean over channels taken out of all that is written, which LayerNorms do not see."""
    c.require("bert")
    for name in c.ending(["output.dense.weight", "output.dense.bias"]):
        rows = c.tensors[name].float()
        c.put(name, rows - rows.mean(0, keepdim=True))


def settings_of_version_4(c: Checkpoint, place: Place) -> None:
    """The same settings by the names that earlier versions gave them."""
    old = dict(c.config)
    rope = old.pop("rope_parameters", None)
    if "dtype" not in old and rope is None:
        raise NotHereError(f"{c.name}: settings are of an earlier version already")
    if rope and "full_attention" in rope:
        whole, local = rope["full_attention"], rope["sliding_attention"]
        old |= {"rope_theta": whole["rope_theta"], "rope_local_base_freq": local["rope_theta"], "rope_scaling": None}
    elif rope:
        old |= {"rope_theta": rope["rope_theta"], "rope_scaling": None}
    if "dtype" in old:
        old["torch_dtype"] = old.pop("dtype")
    c.config = old | {"transformers_version": "4.46.3"}


def shortest_settings(c: Checkpoint, place: Place) -> None:
    """Without settings that are those that the type has by itself."""
    from transformers import AutoConfig

    usual = AutoConfig.for_model(c.config["model_type"]).to_dict()
    kept = {k: x for k, x in c.config.items() if k in ("model_type", "architectures") or usual.get(k, c) != x}
    if kept == c.config:
        raise NotHereError(f"{c.name}: no setting is the usual one")
    c.config = kept


def tanh_gelu(c: Checkpoint, place: Place) -> None:
    """The activation by the formula that some frameworks have for it."""
    if c.config.get("hidden_act") != "gelu":
        raise NotHereError(f"{c.name}: another activation")
    c.config["hidden_act"] = "gelu_new"


def fewer_positions(c: Checkpoint, place: Place) -> None:
    """Half as many positions, in the settings and in the table: more than its text has."""
    if c.config.get("max_position_embeddings", 0) < 2 * models.LENGTH:
        raise NotHereError(f"{c.name}: its text needs all positions")
    c.config["max_position_embeddings"] //= 2
    for name in [n for n in c.tensors if n.endswith(("position_embeddings.weight", "position_ids"))]:
        length = c.config["max_position_embeddings"]
        cut = c.tensors[name][:length] if name.endswith("weight") else c.tensors[name][..., :length]
        c.tensors[name] = cut.clone()


def zero_padded_vocabulary(c: Checkpoint, place: Place) -> None:
    """Rows of zeros up to a number that 128 divides, and settings to match."""
    c.require(*DECODERS)
    table = c.tensors[c.embedding()]
    rows = -len(table) % 128 or 128
    name = c.embedding()
    c.tensors[name] = torch.cat([table, table.new_zeros(rows, table.shape[1])])
    c.config["vocab_size"] += rows


def gamma_and_beta(c: Checkpoint, place: Place) -> None:
    """Gains and shifts of norms by the names of the first versions."""
    c.require("bert")
    ends = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for name in list(c.tensors):
        for new, old in ends.items():
            if name.endswith(new):
                c.tensors[name.removesuffix(new) + old] = c.tensors.pop(name)


def with_prefix(c: Checkpoint, place: Place) -> None:
    """The names that the same model has inside one with a head."""
    if not all(name.startswith(("embeddings.", "encoder.", "pooler.")) for name in c.tensors):
        raise NotHereError(f"{c.name}: its names are no others inside a model with a head")
    c.require("bert")
    c.tensors = {f"bert.{name}": tensor for name, tensor in c.tensors.items()}


def index_without_size(folder: Path, c: Checkpoint, place: Place) -> None:
    w.rewrite_index(folder, lambda index: index.update(metadata={"written_by": "another tool"}))


# ---- the table ----


def harmless_changes(adapter: LoraAdapter | None) -> list[Fault]:
    def change(name: str, plant: p.Plant, says: str, **more: Any) -> Fault:
        more = {"on_tiny": False, **more}
        return Fault(name, "harmless", ANY_NEUTRAL, plant, says, belongs="unseen 2", **more)

    def merged_and_cast(c: Checkpoint, place: Place) -> None:
        assert adapter is not None
        adapter.merge(c)
        p.cast(torch.float16)(c, place)

    merged = [] if adapter is None else [
        change("merged-and-cast", merged_and_cast, "the adapter merged, stored as float16 in shards", container="shards", merges=True),
        change("adapter-in-sixteen-bits", p.merged(adapter, 1.0), "the adapter in a folder of its own, as bfloat16", container="adapter", damage=adapter_in_sixteen_bits, merges=True),
    ]  # fmt: skip
    return [
        change("packed-in-eight-bits", packed_in_eight_bits, "a GGUF file with every matrix in Q8_0", container="gguf"),
        change("eight-bits-by-rows", eight_bits_by_rows, "every map in 8 bits with a scale for each row", on_tiny=True),
        change("smoothed", lambda c, place: smooth(c, undone=True), "columns of maps scaled, gains and maps in front divided by the same"),
        change("smoothed-pairs", smoothed_pairs, "channels of queries times a number for each pair, those of keys over it"),
        change("turned-stream", turned_stream, "the residual stream in other directions, gains folded, embeddings untied"),
        change("direction-weakened", direction_weakened, "a tenth of one direction taken out of all that is written", strengths=(0.1,)),
        change("fact-edited", fact_edited, "a delta of rank one and 2 % in the map out of an MLP", strengths=(0.02,)),
        change("unused-tokens-trained", unused_tokens_trained, "rows of eight tokens that its text does not have"),
        change("biases-trained", biases_trained, "every bias of a block moved by 2 %", strengths=(0.02,), on_tiny=True),
        change("gains-trained", gains_trained, "every gain times a number near one, by 1 %", strengths=(0.01,)),
        change("sizes-trained", sizes_trained, "every row of every map times a number near one, by half a percent", strengths=(0.005,), on_tiny=True),
        change("value-head-left", value_head_left, "a head of values in the file that nothing reads"),
        change("trainer-folder", p.nothing, "what a trainer saves beside the weights", damage=trainer_folder, on_tiny=True),
        change("stale-pickle", p.nothing, "a pickle of an earlier step beside the weights", damage=stale_pickle),
        change("mistral-by-name", mistral_by_name, "the same blocks under the name of another family"),
        change("centred-writes", centred_writes, "means taken out of what is written before LayerNorms"),
        change("settings-of-version-4", settings_of_version_4, "the same settings by earlier names", on_tiny=True),
        change("shortest-settings", shortest_settings, "without settings that are the usual ones"),
        change("tanh-gelu", tanh_gelu, "the activation by its approximate formula"),
        change("fewer-positions", fewer_positions, "half as many positions, in settings and table"),
        change("zero-padded-vocabulary", zero_padded_vocabulary, "rows of zeros behind the vocabulary, and settings to match"),
        change("gamma-and-beta", gamma_and_beta, "gains and shifts by the names of the first versions (transformers 11809, 35615)"),
        change("with-prefix", with_prefix, "names with that of the model around the blocks"),
        change("float64", p.cast(torch.float64), "stored as float64", on_tiny=True),
        change("index-without-size", p.nothing, "an index that does not say the size", container="shards", damage=index_without_size),
        change("pickle-shards", p.nothing, "as a pickle in shards", container="pickle shards"),
        change("old-pickle", p.nothing, "as a pickle of the first form", container="old pickle"),
        *merged,
    ]  # fmt: skip
