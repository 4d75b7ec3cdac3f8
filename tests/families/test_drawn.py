"""Models whose attention is drawn at random, against plain loops: what is said of them is right, or refused with a reason
that is declared here.

A failure ends with the settings on one line; `check(Drawn(...))` with that line draws the model again.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import locater
from locater.calls.recognise import MOVED, NO_SOFTMAX
from locater.errors import LocaterError
from locater.layers import AttentionLayer
from tests.families import drawn as drawing
from tests.families import spellings
from tests.families.drawn import Drawn, draw, usual
from tests.families.drawn_families import DrawnFamily, draw_family
from tests.families.drawn_models import DrawnModel, array, inputs_of, layers_of
from tests.families.loops import Array, Layer, logits_of, measures_of, moments_of, output_of, visible, weights_of
from tests.parity import TOLERANCE

FLOAT32 = 1e-5  # models of transformers compute norms and softmax in float32, whatever their dtype


@dataclass(frozen=True)
class Refusal:
    """Settings that are not read, and the reason that is given for it; None where they are read all the same."""

    when: dict[str, Any]  # the value of a setting, or a set of values
    discover: str | None = None
    observe: str | None = None

    def concerns(self, drawn: Drawn) -> bool:
        own = {name: getattr(drawn, name) for name in self.when}
        return all(
            own[name] in value if isinstance(value, set) else own[name] == value for name, value in self.when.items()
        )


# Forms that a layout has no words for. An entry goes when what it describes is read; `check` fails until it does.
EXPECTED_REFUSALS: list[Refusal] = [
    *(Refusal({"softmax": spelling}, NO_SOFTMAX, NO_SOFTMAX) for spelling in spellings.NO_SOFTMAXES),
    Refusal({"softmax": set(spellings.OVER_ANOTHER_AXIS), "sinks": True}, None, MOVED),
    Refusal({"repeating": spellings.BY_GROUPS}, "a token is met twice in one of its sequences"),
    Refusal({"repeating": spellings.STRIDED}, "share keys, and not in groups of neighbours"),
    Refusal({"qk_norm": "rms of all", "layout": {"fused", "Conv1D"}, "heads": {2, 3, 4, 6}}, "channels of heads of"),
    Refusal({"positions": {"alibi", "alibi by key", "table"}, "softcap": {2.5}}, "its logits are not one multiple"),
    Refusal({"positions": "alibi by key", "mask": {"none", "window 3"}}, "a bias that is not known"),
    Refusal({"positions": "alibi by key", "sinks": True}, "its logits differ|a bias that is not known"),
    # which keys are padding is only seen where another sequence has none
    Refusal({"padding": {"left", "right"}, "batch": 1}, "its mask is neither causal nor a window|its output differs"),
]
UNREAD = [
    (name, value)
    for refusal in EXPECTED_REFUSALS
    for name, value in refusal.when.items()
    if len(refusal.when) == 1 and name in spellings.SPELLINGS
]


@dataclass(frozen=True)
class Computed:
    """One layer in one forward pass, by loops."""

    x: Tensor  # the stream
    logits: Array
    seen: Array
    weights: Array
    output: Array


def computed(
    model: nn.Module, layers: Sequence[Layer], inputs: dict[str, Tensor], real: Array, near: float = TOLERANCE
) -> list[Computed]:
    """What each layer computes; its output has to be that of the model."""
    results = []
    for layer, (x, theirs) in zip(layers, _recorded(model, layers, inputs), strict=True):
        logits, seen = logits_of(layer, array(x)), visible(layer, real)
        weights = weights_of(layer, logits, seen)
        output = output_of(layer, array(x), weights)
        assert _apart(output, array(theirs), real[..., None]) < near, f"{layer.name}: the loops are another model"
        results.append(Computed(x, logits, seen, weights, output))
    return results


def _recorded(model: nn.Module, layers: Sequence[Layer], inputs: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """(stream, output) of each layer, as the model computes them."""
    streams: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def enter(layer: Layer) -> Any:
        return lambda _, args, kwargs: streams.update(
            {layer.name: (args[0] if args else kwargs["hidden_states"]).detach()}
        )

    def leave(layer: Layer) -> Any:
        return lambda _, args, out: outputs.update({layer.name: (out[0] if isinstance(out, tuple) else out).detach()})

    handles = []
    for layer in layers:
        handles.append(model.get_submodule(layer.reads).register_forward_pre_hook(enter(layer), with_kwargs=True))
        handles.append(model.get_submodule(layer.writes).register_forward_hook(leave(layer)))
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    return [(streams[layer.name], outputs[layer.name]) for layer in layers]


def _apart(ours: Array, theirs: Array, where: Array) -> float:
    """Largest difference, in standard deviations of `theirs`."""
    where = np.broadcast_to(where, theirs.shape)
    return float(np.abs(ours - theirs)[where].max() / theirs[where].std())


# ---- what is found, against the loops


def check_layers(
    found: Sequence[AttentionLayer], layers: Sequence[Layer], passes: Sequence[Computed], real: Array
) -> None:
    """Heads, masks, logits and outputs, as far as a layer says that they are known."""
    for ours, layer, seen in zip(found, layers, passes, strict=True):
        assert ours.name == layer.name
        assert (ours.heads, ours.kv_heads, ours.head_dim) == (layer.heads, layer.kv_heads, layer.size)
        if ours.unknown_mask is None:
            for rows in (real, np.ones((1, 20), dtype=bool)):
                shown = ours.visible(rows.shape[1], rows.shape[1], torch.tensor(rows))[:, 0].numpy()
                assert np.array_equal(shown, visible(layer, rows)), f"{layer.name}: another mask"
        if ours.unknown_logits is None:
            logits, theirs = ours.logits(seen.x).detach().numpy(), seen.logits
            if layer.shift_free:
                logits, theirs = (_centred(x, seen.seen) for x in (logits, theirs))
            where = (seen.seen & real[:, :, None])[:, None]
            assert _apart(logits, theirs, where) < TOLERANCE, f"{layer.name}: other logits"
        if ours.unknown_output is None:
            mask = None if ours.unknown_mask is None else torch.tensor(seen.seen)[:, None]
            output = ours.output(seen.x, padding=torch.tensor(real), mask=mask).detach().numpy()
            assert _apart(output, seen.output, real[..., None]) < TOLERANCE, f"{layer.name}: another output"


def _centred(logits: Array, seen: Array) -> Array:
    where = np.broadcast_to(seen[:, None], logits.shape)
    means = np.where(where, logits, 0).sum(-1, keepdims=True) / where.sum(-1, keepdims=True).clip(1)
    return np.where(where, logits - means, 0)


def check_scan(rows: Sequence[Any], layers: Sequence[Layer]) -> None:
    """Moments of every head. Traces are compared in units of the norm of W, which they may be much smaller than."""
    wanted = [moments for layer in layers for moments in moments_of(layer)]
    for row, moments in zip(rows, wanted, strict=True):
        norm, logits = moments["frobenius_sq"] ** 0.5, moments["F"] ** 0.5
        units = {
            "trace": norm,
            "trace_of_square": norm**2,
            "frobenius_sq": norm**2,
            "M": logits,
            "S": logits**2,
            "F": logits**2,
        }
        for name, value in moments.items():
            if row.scale is None and name in ("scale", "M", "S", "F", "key_bias"):
                assert row[name] is None
                continue
            near = TOLERANCE * units.get(name, max(1.0, abs(value)))
            assert row[name] == pytest.approx(value, rel=0, abs=near), f"layer {row.layer}, head {row.head}: {name}"


def check_observed(
    rows: Sequence[Any], layers: Sequence[Layer], passes: Sequence[Computed], real: Array, near: float = TOLERANCE
) -> None:
    """Columns of every head that was observed."""
    wanted = [
        (layer.name, head, measures)
        for layer, seen in zip(layers, passes, strict=True)
        for head, measures in enumerate(measures_of(seen.logits, seen.weights, seen.seen, real))
    ]
    for row, (name, head, measures) in zip(rows, wanted, strict=True):
        assert (row.name, row.head, row.kind) == (name, head, "self")
        for column, value in measures.items():
            assert row[column] == pytest.approx(value, rel=near, abs=near), f"{name}, head {head}: {column}"


def check(drawn: Drawn) -> None:
    """One drawn model in all ways, or the refusals that are expected of it."""
    torch.manual_seed(0)
    model, inputs = DrawnModel(drawn), inputs_of(drawn)
    layers, real = layers_of(model), inputs["attention_mask"].bool().numpy()
    refusals = [refusal for refusal in EXPECTED_REFUSALS if refusal.concerns(drawn)]
    try:
        passes = computed(model, layers, inputs, real)
        found = locater.discover(model, inputs)
        _check_reasons(found.gaps, [refusal.discover for refusal in refusals])
        if found.layers:
            check_layers(found.layers, layers, passes, real)
            check_scan(locater.scan(model, example=inputs).rows, layers)
        seen = observed(model, inputs)
        _check_reasons([seen] if isinstance(seen, str) else [], [refusal.observe for refusal in refusals])
        if not isinstance(seen, str):
            check_observed(seen, layers, passes, real)
    except Exception as error:
        error.add_note(repr(drawn))
        raise


def _check_reasons(given: Sequence[str], expected: Sequence[str | None]) -> None:
    """Every reason is one that is expected, and where one is expected there is one."""
    patterns = [pattern for pattern in expected if pattern is not None]
    for reason in given:
        assert any(re.search(pattern, reason) for pattern in patterns), f"refused: {reason}"
    assert given or not patterns, f"read, which was to be refused: {patterns}; take it off EXPECTED_REFUSALS"


def observed(model: nn.Module, inputs: dict[str, Tensor]) -> list[Any] | str:
    """The heads that are observed, or why they are not."""
    try:
        with torch.no_grad(), locater.observe(model) as seen:
            model(**inputs)
    except LocaterError as error:
        return str(error)
    missing = [note for note in seen.notes if "not measured" in note or NO_SOFTMAX in note]
    return missing[0] if missing else seen.rows


def check_family(drawn: DrawnFamily, folder: Any) -> None:
    """A model of a known family: its record, live and from disk, what discovery makes of it, and what is observed."""
    model, inputs = drawn.model(), drawn.inputs()
    layers, real = drawn.layers(model), inputs["attention_mask"].bool().numpy()
    try:
        passes = computed(model, layers, inputs, real, FLOAT32)
        check_layers(locater.attention_layers(model), layers, passes, real)
        found = locater.discover(model, inputs)
        assert not found.gaps, found.gaps
        check_layers(found.layers, layers, passes, real)
        model.save_pretrained(folder)
        check_layers(locater.attention_layers(folder), layers, passes, real)
        for source in (model, folder):
            check_scan(locater.scan(source).rows, layers)
        seen = observed(model, inputs)
        assert not isinstance(seen, str), seen
        check_observed(seen, layers, passes, real, FLOAT32)
    except Exception as error:
        error.add_note(repr(drawn))
        raise


# ---- what is drawn

FIRST, LAST = 70, 500  # drawn models of `make test`, and all
# and in `make test`: keys before queries, softmin with sinks, writes behind a cast, maps by einsum under a moved softmax
ONCE_REFUSED = (125, 141, 193, 220, 232, 239, 403)


def _values(drawn: Drawn) -> set[tuple[str, Any]]:
    return {(field.name, getattr(drawn, field.name)) for field in fields(Drawn) if field.name != "seed"}


def covering(count: int, seeds: range) -> list[int]:
    """`count` seeds, first of all those with a setting that none before them has."""
    seen: set[tuple[str, Any]] = set()
    chosen = []
    for seed in seeds:
        values = _values(draw(seed, UNREAD))
        chosen += [seed] if values - seen else []
        seen |= values
    return sorted([*chosen, *(seed for seed in seeds if seed not in chosen)][:count])


QUICK = sorted({*covering(FIRST, range(LAST)), *ONCE_REFUSED})
MANY = [seed for seed in range(LAST) if seed not in QUICK]


@pytest.mark.parametrize("seed", [*QUICK, *(pytest.param(seed, marks=pytest.mark.slow) for seed in MANY)])
def test_drawn_models_are_right_or_refused(seed: int) -> None:
    check(draw(seed, UNREAD))


def test_every_setting_is_among_the_first() -> None:
    seen = set[tuple[str, Any]]().union(*(_values(draw(seed, UNREAD)) for seed in QUICK))
    choices = {**drawing.CHOICES, **spellings.SPELLINGS}
    missing = [(name, value) for name, values in choices.items() for value in values if (name, value) not in seen]
    assert sorted(missing) == sorted(UNREAD)


@pytest.mark.parametrize("seed", [*range(7), *(pytest.param(n, marks=pytest.mark.slow) for n in range(7, 140))])
def test_known_families_with_drawn_settings_are_right(seed: int, tmp_path: Path) -> None:
    check_family(draw_family(seed), tmp_path)


# ---- what is refused

# settings without which a step is not taken
NEEDED: dict[str, dict[str, Any]] = {
    "scaling": {"scale_of": "logits"},
    "capping": {"softcap": 2.5},
    "masking": {"mask": "causal"},
    "repeating": {"layout": "separate", "heads": 4, "kv_heads": 2},
    "heads": {"kv_heads": 1},
}


def _refused(refusal: Refusal, seed: int) -> Drawn:
    """A model of which a refusal speaks: as plain as possible with seed 0, otherwise drawn."""
    rng = random.Random(seed)
    values = {name: rng.choice(sorted(v)) if isinstance(v, set) else v for name, v in refusal.when.items()}
    needed = [setting for name in values for setting in NEEDED.get(name, {}).items()]
    settings = {"product": usual("product"), "repeating": usual("repeating"), **dict(needed), **values}
    return draw(seed, UNREAD, **settings) if seed else Drawn(**settings)


def _words(refusal: Refusal) -> str:
    """A name for a test. The order of a set differs between processes."""
    return ", ".join(str(sorted(x, key=str) if isinstance(x, set | frozenset) else x) for x in refusal.when.values())


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
@pytest.mark.parametrize("refusal", EXPECTED_REFUSALS, ids=_words)
def test_refusals_are_those_that_are_expected(refusal: Refusal, seed: int) -> None:
    drawn = _refused(refusal, seed)
    assert refusal.concerns(drawn), drawn
    check(drawn)
