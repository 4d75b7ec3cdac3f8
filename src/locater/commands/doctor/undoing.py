"""Changes that a model computes the same with, found and undone before it is compared with its base.

Channels of the residual stream, or neurons of an MLP, in another order, turned or scaled; gains of norms that were
folded into the maps behind them; keys and values repeated for each head of queries. Each has a partner for every row
or channel of the base, so what was done is known exactly; whatever else was done shows in the comparison afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from locater.commands.doctor.other_places import map_sketch
from locater.commands.doctor.pairs import Paired, matched_names
from locater.commands.doctor.places import layers_words
from locater.commands.doctor.reading import Model, find_attention
from locater.commands.doctor.rewritten import Rewrite, RewrittenWeights
from locater.commands.doctor.tensors import EMBEDDINGS, place_of
from locater.layers.layout import AttentionLayout
from locater.layers.map_layouts import MapLayout

MOVED = 0.1  # a difference from which on it is asked whether a map was rewritten
MATCHED = 0.9  # cosine of a row with its partner
PARTNERED = 0.9  # share of rows that have one
SAME = 0.02  # what a rewritten row may differ by: rounding, and no training
SCALED = 0.1  # logarithm of a factor on a neuron
SOME = 0.01  # share of neurons with a factor
WIDEST_TURN = 2304  # channels of a stream for which a rotation is looked for
SAMPLED = 4096  # rows of the embeddings from which channels are matched
# a norm in front of an MLP, the surest name first
MLP_NORMS = ("pre_feedforward_layernorm", "post_attention_layernorm", "ffn_norm", "ln_2", "layernorm_after", "norm2")
GATES = re.compile(r"gate_proj|ffn_gate|wi_0|\.w1\.|\.gate\.")
WRITES = re.compile(r"down_proj|ffn_down|fc2|c_proj|\.w2\.|\.wo\.|dense_4h_to_h|output\.dense|o_proj|out_proj")
NORMED_AFTER = re.compile(r"(v_proj|o_proj|up_proj|down_proj)\.weight$")  # linear in what the norm gets
LAST_NORMS = (
    "model.norm.weight",
    "ln_f.weight",
    "final_layer_norm.weight",
    "final_layernorm.weight",
    "output_norm.weight",
)
HEADS_OUT = ("lm_head.weight", "embed_out.weight", "output.weight")
Rewrites = dict[str, Rewrite]
Wrong = tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Undone:
    """A model without what was rewritten in it; `steps` are what was undone, `wrong` what was done in a wrong way."""

    model: Model
    steps: tuple[str, ...] = ()
    wrong: Wrong = ()  # layers, and the head of keys that each head of queries has


def undo(paired: Paired) -> Undone | None:
    """The model as it would be stored if it were stored as the base is; None where nothing was rewritten."""
    own, base = paired.own.model, paired.base.model
    pairs = paired.pairs.values()
    if own.live or own.reading is None or not any(x.other_shape or (x.changed and x.difference > MOVED) for x in pairs):
        return None
    result = own
    wrong: Wrong = ()
    steps: list[str] = []
    sides = Sides(own, base, matched_names(own.names, base.names))
    heads = _repeated_heads(sides)
    if heads is not None:
        rewrites, wrong, words, kv_heads = heads
        result = _rewritten(result, rewrites, _with_kv_heads(own.config, kv_heads))
        steps += words
    for look in (_stream, _gains, _before_norms, _neurons):
        rewrites, words = look(replace_own(sides, result))
        if rewrites:
            result = _rewritten(result, rewrites, result.config)
            steps += words
    if result is own:
        return None
    find_attention(result)
    return Undone(result, tuple(steps), wrong)


@dataclass(frozen=True)
class Sides:
    """Both models, and the names of tensors in the base by those of the model."""

    own: Model
    base: Model
    names: Mapping[str, str]

    def both(self, name: str, rows: int | None = None) -> tuple[Tensor, Tensor]:
        """A tensor in both, in float32; or its first rows."""
        ours, theirs = (
            x.read(n) if rows is None else x.read(n, [(0, min(rows, x.shape(n)[0]))])
            for x, n in ((self.own.weights, name), (self.base.weights, self.names[name]))
        )
        return ours.detach().cpu().float(), theirs.detach().cpu().float()

    def sketches(self, name: str, axis: int = 0) -> tuple[Tensor, Tensor]:
        """The sketch of the rows of a map, or of its columns, in both."""
        return map_sketch(self.own.weights, name, axis), map_sketch(self.base.weights, self.names[name], axis)

    def shapes(self, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.own.weights.shape(name), self.base.weights.shape(self.names[name])

    def layouts(self) -> list[AttentionLayout]:
        found = [] if self.own.reading is None else self.own.reading.found
        return [x for x in found if isinstance(x, AttentionLayout)]

    def embedding(self) -> str | None:
        found = [x for x in self.names if x.endswith(EMBEDDINGS) and len(self.own.weights.shape(x)) == 2]
        return found[0] if len(found) == 1 else None


def replace_own(sides: Sides, own: Model) -> Sides:
    return replace(sides, own=own)


def _rewritten(model: Model, rewrites: Rewrites, config: dict[str, Any]) -> Model:
    return replace(model, weights=RewrittenWeights(model.weights, rewrites), config=config)


def matched_rows(own: Tensor, base: Tensor, signs: bool = False) -> Tensor | None:
    """For each row of `base` the row of `own` that is it, times anything; None where too many have no partner.

    >>> matched_rows(torch.tensor([[0.0, 2.0], [1.0, 0.0]]), torch.eye(2)).tolist()
    [1, 0]
    """
    a, b = (x / x.norm(dim=1, keepdim=True).clamp_min(1e-30) for x in (own, base))
    count = len(b)
    partner, free = torch.full((count,), -1), torch.ones(len(a), dtype=torch.bool)
    if len(a) == count:  # where most rows are in their own place, near twins change no places
        stay = (a * b).sum(1) > MATCHED
        if float(stay.float().mean()) > 0.5:
            partner[stay], free[stay] = torch.arange(count)[stay], False
    for start in range(0, count, 1024):
        near = b[start : start + 1024] @ a.mT
        best = (near.abs() if signs else near).max(1)
        for at, (cosine, place) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True), start):
            if partner[at] < 0 and cosine > MATCHED and free[place]:
                partner[at], free[place] = place, False
    lost = partner < 0
    if int(lost.sum()) > (1 - PARTNERED) * count:
        return None
    partner[lost] = free.nonzero().flatten()[: int(lost.sum())]  # dead rows: any will do
    return partner


def _is_order(order: Tensor) -> bool:
    return not torch.equal(order, torch.arange(len(order)))


# ---- keys and values that were repeated for each head of queries ----


def _repeated_heads(sides: Sides) -> tuple[Rewrites, Wrong, list[str], int] | None:
    """Heads of keys and values, each of which is one of the base's fewer ones."""
    rewrites: Rewrites = {}
    sources: dict[int, tuple[int, ...]] = {}
    kv_heads = 0
    for item in sides.layouts():
        for part in (item.key, item.value):
            if not isinstance(part, MapLayout) or part.weight not in sides.names or part.transposed or part.axes != 1:
                return None
            (own, *_), (base, *_) = sides.shapes(part.weight)
            size = own // item.kv_heads
            if base >= own or base % size or item.heads % (base // size):
                return None
            kv_heads = base // size
            x, b = sides.both(part.weight)
            places = _heads_of_base(x.view(item.kv_heads, -1), b.view(kv_heads, -1))
            if places is None or sources.setdefault(item.index, places) != places:
                return None
            firsts = torch.tensor([places.index(head) for head in range(kv_heads)])
            rows = (firsts[:, None] * size + torch.arange(size)).flatten()
            for name in (part.weight, part.bias):
                if name is not None:
                    rewrites[name] = Rewrite(rows=rows)
    if not rewrites:
        return None
    wrong = {}
    for item in sides.layouts():
        each = item.heads // item.kv_heads  # heads of queries for each stored head of keys
        acts = tuple(sources[item.index][head // each] for head in range(item.heads))
        if acts != tuple(head // (item.heads // kv_heads) for head in range(item.heads)):
            wrong[item.index] = acts
    words = [] if wrong else [f"keys and values repeated for each head of queries ({kv_heads} heads in BASE)"]
    return rewrites, tuple(wrong.items()), words, kv_heads


def _heads_of_base(own: Tensor, base: Tensor) -> tuple[int, ...] | None:
    """For each head of keys the head of the base that it is, where each of these is there."""
    apart = torch.cdist(own, base) / base.norm(dim=1).clamp_min(1e-30)
    least = apart.min(1)
    places = tuple(int(x) for x in least.indices)
    whole = bool((least.values < SAME).all()) and {*places} == {*range(len(base))}
    return places if whole else None


def _with_kv_heads(config: Mapping[str, Any], heads: int) -> dict[str, Any]:
    text = config.get("text_config")
    if isinstance(text, Mapping) and "num_key_value_heads" in text:
        return {**config, "text_config": {**text, "num_key_value_heads": heads}}
    return {**config, "num_key_value_heads": heads}


# ---- channels of the residual stream ----


def _stream(sides: Sides) -> tuple[Rewrites, list[str]]:
    """Channels in another order, with other signs, or turned: as the embeddings have them, in every tensor."""
    name = sides.embedding()
    if name is None or sides.shapes(name)[0][1] != sides.shapes(name)[1][1]:
        return {}, []
    rows = min(SAMPLED, *(shape[0] for shape in sides.shapes(name)))
    own, base = (x[:rows] for x in sides.both(name, rows))
    if float((own * base).sum()) > MATCHED * float(own.norm() * base.norm()):
        return {}, []
    rms = all(item.norm.kind != "layer" for item in sides.layouts())
    order = matched_rows(own.mT, base.mT, signs=rms)
    if order is not None:
        signs = (own.mT[order] * base.mT).sum(1).sign()
        flips = signs if rms and bool((signs < 0).any()) else None
        if not _is_order(order) and flips is None:
            return {}, []
        words = "channels of the residual stream in another order" if _is_order(order) else "other signs of channels"
        rewrites = _everywhere(sides, len(order), Rewrite(rows=order, row_factors=flips))
        return (rewrites, [words]) if _agrees(sides, rewrites) else ({}, [])
    width = own.shape[1]
    if not rms or width > WIDEST_TURN or rows < 2 * width:
        return {}, []
    u, _, v = torch.linalg.svd(own.mT @ base)
    turn = u @ v  # own @ turn is the base
    if float((own @ turn - base).norm()) > SAME * float(base.norm()) or not _plain_gains(sides):
        return {}, []
    rewrites = _everywhere(sides, width, Rewrite(row_turn=turn.mT))
    return (rewrites, ["the residual stream turned"]) if _agrees(sides, rewrites) else ({}, [])


def _agrees(sides: Sides, rewrites: Rewrites) -> bool:
    """Whether what the embeddings say is true of maps of attention too: else the embeddings alone were changed."""
    votes = []
    for item in sides.layouts()[:: max(1, len(sides.layouts()) // 3)]:
        name = item.query.weight if isinstance(item.query, MapLayout) else ""
        if name in rewrites and name in sides.names and len({*sides.shapes(name)}) == 1:
            own, base = sides.both(name)
            made = rewrites[name].apply(own).float()
            votes.append(float(((made - own) * base).sum()) > 0)
    return sum(votes) > len(votes) / 2


def _plain_gains(sides: Sides) -> bool:
    """Whether gains are one number each: behind others a turned stream is another one."""
    names = [x.norm.gain for x in sides.layouts() if isinstance(x.norm.gain, str)]
    gains = [sides.own.weights.read(name).float() for name in names]
    return all(float(x.std()) <= SAME * float(x.mean().abs()) for x in gains)


def _everywhere(sides: Sides, width: int, of_rows: Rewrite) -> Rewrites:
    """The same of every axis that the stream has in a tensor."""
    of_columns = Rewrite(
        columns=of_rows.rows,
        column_turn=None if of_rows.row_turn is None else of_rows.row_turn.mT,
        column_factors=of_rows.row_factors,
    )
    axis_of, inside = _known_axes(sides)
    rewrites: Rewrites = {}
    for name in sides.own.names:
        shape = sides.own.weights.shape(name)
        at = [axis for axis in range(len(shape)) if shape[axis] == width]
        if name in inside or not at or len(shape) > 2:
            continue
        if len(shape) == 1:
            gain = not name.endswith("bias")
            if of_rows.row_turn is None:  # gains have no sign of their own
                rewrites[name] = Rewrite(rows=of_rows.rows, row_factors=None if gain else of_rows.row_factors)
            continue
        axis = axis_of.get(name, at[0] if len(at) == 1 else 0 if WRITES.search(name) else 1)
        rewrites[name] = of_columns if axis else of_rows
    return rewrites


def _known_axes(sides: Sides) -> tuple[dict[str, int], set[str]]:
    """The axis of the stream in maps of attention; vectors that are not in it: biases of queries, keys and values."""
    axes: dict[str, int] = {}
    inside: set[str] = set()
    for item in sides.layouts():
        for part in (item.query, item.key, item.value):
            if isinstance(part, MapLayout):
                axes[part.weight] = 0 if part.transposed else 1
                inside |= set() if part.bias is None else {part.bias}
        if item.out is not None:
            axes[item.out.weight] = 1 if item.out.transposed else 0
        for norm in (item.query_norm, item.key_norm):
            inside |= {name for name, _ in ([] if norm is None else norm.vectors(sides.own.weights))}
    return axes, inside


# ---- gains of norms, folded into the maps behind them ----


def _gains(sides: Sides) -> tuple[Rewrites, list[str]]:
    """Where the maps behind a norm are the base's but for what its gains lost, both are read as in the base."""
    rewrites: Rewrites = {}
    layers: set[int] = set()
    for gain, offset, maps in _norms_and_maps(sides):
        if gain not in sides.names or len({*sides.shapes(gain)}) > 1:
            continue
        own, base = (x + offset for x in sides.both(gain))
        if float((own - base).norm()) <= SAME * float(base.norm()) or not bool((base.abs() > 1e-6).all()):
            continue
        factors = own / base  # of the columns of the maps, which lost them
        if maps and all(_folded(sides, name, other, factors) for name, other in maps):
            rewrites |= {name: Rewrite(column_factors=factors) for name, _ in maps}
            rewrites[gain] = Rewrite(numbers=sides.base.weights.read(sides.names[gain]).detach().cpu())
            layers.add(-1 if (layer := place_of(gain).layer) is None else layer)
    numbered = sorted(layers - {-1})
    where = layers_words("", numbered) if numbered else "the last norm"
    return rewrites, [f"gains of norms folded into the maps behind them ({where})"] if rewrites else []


def _before_norms(sides: Sides) -> tuple[Rewrites, list[str]]:
    """One factor on a map whose result goes through a norm of its own, in blocks with norms behind their parts."""
    rewrites: Rewrites = {}
    for name in sides.names if any(x.endswith("post_feedforward_layernorm.weight") for x in sides.names) else ():
        if not NORMED_AFTER.search(name) or len({*sides.shapes(name)}) > 1:
            continue
        own, base = sides.sketches(name)
        factor = float((own * base).sum() / base.square().sum().clamp_min(1e-30))
        beside = float((own - factor * base).norm()) < SAME * float(own.norm())
        if beside and factor > 0 and abs(factor - 1) > SAME:
            rewrites[name] = Rewrite(row_factors=torch.full((len(own),), 1 / factor))
    return rewrites, ["factors that a norm behind takes away"] if rewrites else []


def _folded(sides: Sides, name: str, other: str, factors: Tensor) -> bool:
    """Whether a map is more like the base's with these factors on its columns than without."""
    if sides.own.weights.shape(name) != sides.base.weights.shape(other):
        return False
    if sides.own.weights.shape(name)[-1] != len(factors):
        return False
    met = map_sketch(sides.base.weights, other)
    plain, scaled = map_sketch(sides.own.weights, name), map_sketch(sides.own.weights, name, factors=factors)
    before, after = (float((y - met).norm() / met.norm()) for y in (plain, scaled))
    return after < before and after < 0.2


def _norms_and_maps(sides: Sides) -> Iterator[tuple[str, float, list[tuple[str, str]]]]:
    """Gains, what is added to them, and (map, map of the base) for all that read what the norm gives."""
    offset = 0.0
    for item in sides.layouts():
        place = place_of(f"{item.name}.x")
        own = [n for n in sides.names if place_of(n)[:2] == (place.stack, place.layer)]
        offset = item.norm.offset
        attention = [x.weight for x in (item.query, item.key, item.value) if isinstance(x, MapLayout)]
        of_out = {item.out.weight} if item.out is not None else set()
        rest = [n for n in own if n not in attention and n not in of_out and len(sides.own.weights.shape(n)) == 2]
        mlp = [n for n in rest if not WRITES.search(n)]
        between = next((n for word in MLP_NORMS for n in own if n.endswith(f"{word}.weight")), None)
        if isinstance(item.norm.gain, str) and item.norm.kind == "rms":
            maps = [*dict.fromkeys(attention)] + ([] if between else mlp)
            yield item.norm.gain, offset, [(n, sides.names[n]) for n in maps if n in sides.names]
            if between is not None:
                yield between, offset, [(n, sides.names[n]) for n in mlp]
    last = next((n for n in sides.names if n.endswith(LAST_NORMS) and place_of(n).layer is None), None)
    head = next((n for n in sides.own.names if n.endswith(HEADS_OUT)), None)
    if last is not None and head is not None:
        table = sides.names.get(head) or sides.names.get(sides.embedding() or "")
        yield last, offset, [] if table is None else [(head, table)]


# ---- neurons of MLPs ----


def _neurons(sides: Sides) -> tuple[Rewrites, list[str]]:
    """Neurons in another order, or with a factor into them and one over it out of them."""
    rewrites: Rewrites = {}
    layers: dict[str, list[int]] = {"order": [], "scale": []}
    for layer, maps, width in _mlps(sides):
        found = _neurons_of(sides, maps, width)
        if found is None:
            continue
        order, factors = found
        if _is_order(order):
            layers["order"].append(layer)
        if factors:
            layers["scale"].append(layer)
        for name, axis in maps.items():
            times = None if name not in factors else 1 / factors[name]
            moved = order if _is_order(order) else None
            made = Rewrite(columns=moved, column_factors=times) if axis else Rewrite(rows=moved, row_factors=times)
            if moved is not None or times is not None:
                rewrites[name] = made
    words = []
    if layers["order"]:
        words.append(f"neurons of MLPs in another order ({layers_words('', layers['order'])})")
    if layers["scale"]:
        words.append(f"neurons of MLPs scaled, and back in the maps out of them ({layers_words('', layers['scale'])})")
    return rewrites, words


def _mlps(sides: Sides) -> Iterator[tuple[int, dict[str, int], int]]:
    """(layer, tensors with their axis of neurons, neurons) of each MLP, and of each expert."""
    for item in sides.layouts():
        place = place_of(f"{item.name}.x")
        parts = (item.query, item.key, item.value, item.out)
        attention = {x for part in parts if part is not None for x, _ in part.maps(sides.own.weights)}
        groups: dict[str, list[str]] = {}
        for name in sides.names:
            if place_of(name)[:2] == (place.stack, place.layer) and name not in attention:
                expert = re.search(r"experts\.(\d+)\.", name)
                groups.setdefault(expert[1] if expert else "", []).append(name)
        stream = item.query.width if isinstance(item.query, MapLayout) else 0
        for names in groups.values():
            shapes = {n: sides.own.weights.shape(n) for n in names}
            maps = {n: x for n, x in shapes.items() if len(x) == 2 and stream in x and x[0] != x[1]}
            sizes = {x[1] if x[0] == stream else x[0] for x in maps.values()}
            if len(sizes) != 1 or len(maps) < 2:
                continue
            (count,) = sizes
            axes = {n: x.index(count) for n, x in maps.items()}
            axes |= {n: 0 for n, x in shapes.items() if x == (count,) and n.endswith("bias")}
            if all(len({*sides.shapes(n)}) == 1 for n in axes):
                yield place.layer or 0, axes, count


def _neurons_of(sides: Sides, maps: Mapping[str, int], count: int) -> tuple[Tensor, dict[str, Tensor]] | None:
    """The neuron of the model for each of the base, and factors by tensor; None where they stand as they are."""
    ours, theirs = [], []
    whole: dict[str, tuple[Tensor, Tensor]] = {}
    for name, axis in maps.items():
        if len(sides.own.weights.shape(name)) == 1:
            own, base = sides.both(name)
            whole[name] = own[:, None], base[:, None]
            continue
        own, base = sides.sketches(name, axis)
        whole[name] = own, base
        ours.append(own / own.norm(dim=1, keepdim=True).clamp_min(1e-30))
        theirs.append(base / base.norm(dim=1, keepdim=True).clamp_min(1e-30))
    order = matched_rows(torch.cat(ours, 1), torch.cat(theirs, 1))
    if order is None:
        return None
    config = sides.own.config
    homogeneous = "relu" in (config.get("hidden_act"), config.get("activation_function"))
    factors = _factors({name: (own[order], base) for name, (own, base) in whole.items()}, homogeneous)
    return (order, factors) if factors or _is_order(order) else None


def _factors(whole: Mapping[str, tuple[Tensor, Tensor]], homogeneous: bool) -> dict[str, Tensor]:
    """Factors on the maps into neurons (not through the gate) that those out of them take back; empty where there are
    none, or where they are not taken back: then they stay, and are compared. Without a gate an activation is between,
    which takes factors through where it is `homogeneous`.
    """
    found = {name: (own * base).sum(1) / base.square().sum(1).clamp_min(1e-30) for name, (own, base) in whole.items()}
    matrices = [name for name, (own, _) in whole.items() if own.shape[1] > 1]
    into = [name for name in matrices if not WRITES.search(name) and not GATES.search(name)]
    out = [name for name in matrices if WRITES.search(name)]
    gated = len(matrices) == 3
    if len(into) != 1 or len(out) != 1 or not (gated or (homogeneous and len(matrices) == 2)):
        return {}
    up, down = found[into[0]], found[out[0]]
    scaled = ((up / down).abs().clamp_min(1e-30).log().abs() > 2 * SCALED) & (up.abs() > 1e-6)
    if float(scaled.float().mean()) < SOME or float((up * down - 1)[scaled].abs().median()) > SAME:
        return {}
    up = torch.where(scaled, up, torch.ones_like(up))
    if not gated and bool((up < 0).any()):
        return {}
    biases = {name: up for name in whole if name == f"{into[0].removesuffix('weight')}bias"}
    return {into[0]: up, out[0]: 1 / up, **biases}
