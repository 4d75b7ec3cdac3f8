"""The spine: every family's `AttentionLayer` computes the logits and the output that the real model computes, and the
test can fail.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from locater import scan
from locater.calls.attention_like import unread
from locater.discovery import attention_layers
from locater.families import families
from locater.layers import AttentionLayer, Norm, Projection, Rotary, effective
from locater.layers.position_biases import RelativeTerms
from locater.layers.projection_with_norm import NormedProjection
from locater.sources.weights import DictWeights, ModuleWeights
from tests.families import CASES
from tests.parity import STORED, TOLERANCE, Case, Record, disagreement, model_of, record

RUNS = [pytest.param(case, how, id=f"{case.label}-{how}") for case in CASES for how in case.implementations]


@cache
def live(label: str) -> tuple[nn.Module, dict[str, list[Record]]]:
    case = next(c for c in CASES if c.label == label)
    model = model_of(case)
    return model, {how: record(case, model, how) for how in case.implementations}


@pytest.mark.parametrize(("case", "how"), RUNS)
def test_live_model(case: Case, how: str) -> None:
    model, seen = live(case.label)
    agree(case, list(attention_layers(model)), seen[how])
    assert [layer.name for layer in attention_layers(model)] == [site.attention for site in case.sites]


@pytest.mark.parametrize("case", [pytest.param(c, id=c.label) for c in CASES])
def test_checkpoint(case: Case, tmp_path: Path) -> None:
    model, seen = live(case.label)
    case.save(model, tmp_path) if case.save else model.save_pretrained(tmp_path)
    layers = list(attention_layers(tmp_path, **case.options))
    for how in case.implementations:
        agree(case, layers, seen[how])


@pytest.mark.parametrize("case", [pytest.param(c, id=c.label) for c in CASES])
def test_bfloat16(case: Case, tmp_path: Path) -> None:
    """The dtype that checkpoints are stored in: no sum or product of stored numbers may be rounded to it, live or from
    disk.

    The reference is the model itself, run in float64 with the stored numbers.
    """
    stored, exact = in_bits(case.label, torch.bfloat16)
    case.save(stored, tmp_path) if case.save else stored.save_pretrained(tmp_path)
    seen = record(case, exact, case.implementations[0])
    for layers in (attention_layers(stored), attention_layers(tmp_path, **case.options)):
        same_moments(layers, attention_layers(exact))
        for layer, here in zip(layers, seen, strict=True):
            apart = disagreement(layer, here, case)
            assert all(value <= STORED for value in apart.values()), f"{layer.name}: {apart}"


@pytest.mark.parametrize("label", ["gemma2", "gemma3", "dinov2", "deepseek_v3", "cohere-normed", "xlnet"])
def test_float16(label: str) -> None:
    stored, exact = in_bits(label, torch.float16)
    same_moments(attention_layers(stored), attention_layers(exact))


@pytest.mark.parametrize("label", ["gemma2", "gemma3"])
def test_scan_of_a_bfloat16_checkpoint(label: str, tmp_path: Path) -> None:
    stored, exact = in_bits(label, torch.bfloat16)
    stored.save_pretrained(tmp_path)
    for ours, theirs in zip(scan(tmp_path).rows, scan(exact).rows, strict=True):
        size = theirs["frobenius_sq"]
        assert ours["trace"] == pytest.approx(theirs["trace"], abs=STORED * (size * theirs.head_dim) ** 0.5)
        assert ours["frobenius_sq"] == pytest.approx(size, rel=STORED)
        assert ours["trace_of_square"] == pytest.approx(theirs["trace_of_square"], abs=STORED * size)


@torch.no_grad()
def in_bits(label: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """A model stored in `dtype`, and its twin: the same numbers in float64. Buffers, such as rotary tables, stay exact
    in the twin.
    """
    exact = copy.deepcopy(live(label)[0])
    for p in exact.parameters():
        p.copy_(p.to(dtype))
    return copy.deepcopy(exact).to(dtype), exact


@torch.no_grad()
def same_moments(stored: list[AttentionLayer], reference: list[AttentionLayer]) -> None:
    """Of the effective W: traces relative to ||W||_F sqrt(head_dim), second moments to ||W||_F^2."""
    for layer, other in zip(stored, reference, strict=True):
        folded, wanted = effective(layer), effective(other)
        ours, theirs = folded.moments(), wanted.moments()
        size = theirs.frobenius_sq
        apart = {
            "key_term": (folded.key_term - wanted.key_term).norm(dim=-1)
            / wanted.key_term.norm(dim=-1).clamp_min(size.sqrt())
        }
        apart["frobenius_sq"] = (ours.frobenius_sq - size) / size
        if theirs.cross is not None:
            apart["trace"] = (ours.trace - theirs.trace) / (size * theirs.head_dim).sqrt()
            apart["trace_of_square"] = (ours.trace_of_square - theirs.trace_of_square) / size
        assert all(value.abs().max() <= STORED for value in apart.values()), f"{layer.name}: {apart}"


def test_gains_added_in_sixteen_bits_are_noticed() -> None:
    """What the tests above are for: 1 + w of a bfloat16 w is not a bfloat16 number."""
    case = next(c for c in CASES if c.label == "gemma2")
    model, seen = live("gemma2")
    layer = attention_layers(model)[0]
    assert layer.norm.gain is not None
    rounded = replace(layer, norm=replace(layer.norm, gain=layer.norm.gain.bfloat16().double()))
    assert disagreement(rounded, seen["eager"][0], case)["logits"] > 100 * STORED
    with pytest.raises(AssertionError, match="trace"):
        same_moments([rounded], [layer])


def agree(case: Case, layers: list[AttentionLayer], seen: list[Record]) -> None:
    assert len(layers) == len(case.sites)
    for layer, here in zip(layers, seen, strict=True):
        assert here.calls == 1, f"{layer.name}: its attention function was reached {here.calls} times"
        if here.logits is not None:
            assert 1 < here.logits.std() < 3, f"{layer.name}: redrawn logits have a spread of {here.logits.std():.2f}"
        apart = disagreement(layer, here, case)
        assert {"output"} < set(apart), f"{layer.name}: nothing of its logits was recorded"
        assert all(value <= TOLERANCE for value in apart.values()), f"{layer.name}: {apart}"


@pytest.mark.parametrize("case", [pytest.param(c, id=c.label) for c in CASES])
def test_a_layer_that_were_left_out_would_be_missed(case: Case) -> None:
    model, _ = live(case.label)
    names = [layer.name for layer in attention_layers(model)]
    for weights in (ModuleWeights(model), DictWeights(model.state_dict(), "disk")):
        for name in names:
            assert unread(weights, [other for other in names if other != name]), name


# The mutation check: a field set to its neutral value must break parity somewhere, or nothing tests it.

PART = {"query": Projection, "key": Projection, "value": Projection, "out": Projection, "norm": Norm, "memory_norm": Norm,
        "query_norm": Norm, "key_norm": Norm, "rotary": Rotary, "relative": RelativeTerms}  # fmt: skip
NEUTRAL = {
    Projection: {"weight": lambda p: torch.zeros(p.shape, dtype=torch.float64), "bias": None},
    Norm: {"kind": "none", "gain": None, "bias": None, "eps": 0.0},
    Rotary: {"frequencies": lambda r: torch.zeros_like(r.frequencies), "amplitude": 1.0},
    RelativeTerms: {
        "code": lambda r: lambda distances: 0 * r.code(distances),
        "key": None,
        "query": None,
        "shift": None,
    },
}
WHOLE = {
    "heads": lambda x: replace(x, heads=1, kv_heads=1, head_dim=x.heads * x.head_dim),
    "kv_heads": lambda x: replace(x, kv_heads=x.heads),
    "head_dim": lambda x: replace(x, heads=x.heads * 2, kv_heads=x.kv_heads * 2, head_dim=x.head_dim // 2),
    "scale": lambda x: replace(x, scale=1.0),
    "causal": lambda x: replace(x, causal=False),
    "window": lambda x: replace(x, window=None),
    "kind": lambda x: replace(x, kind="self"),
    "norm": lambda x: replace(x, norm=Norm()),
    "memory_norm": lambda x: replace(x, memory_norm=None),
    "query_norm": lambda x: replace(x, query_norm=None),
    "key_norm": lambda x: replace(x, key_norm=None),
    "rotary": lambda x: replace(x, rotary=None),
    "relative": lambda x: replace(x, relative=None),
    "bias": lambda x: replace(x, bias=None),
    "softcap": lambda x: replace(x, softcap=None),
    "sinks": lambda x: replace(x, sinks=None),
}  # fmt: skip
NORMED = {  # of maps with a norm inside, all of a layer at once
    "down": lambda p: zeroed(p.down),
    "inner": lambda p: Norm(),
    "inner.gain": lambda p: replace(p.inner, gain=None),
    "inner.eps": lambda p: replace(p.inner, eps=0.0),
    "blocks": lambda p: 1,
    "up": lambda p: p.up and zeroed(p.up),
    "shared": lambda p: None,
    "heads": lambda p: 1,
}
# another mechanism has a layer of its own kind: tests/lab/train/test_attention.py
NAMES_ONLY = {"name", "index", "mechanism", "provenance", "quantised"}
# what discovery alone sets: layers with these must give the model's own output in tests/discovery/test_discovered*.py
DISCOVERED = {"rotary_table", "norm_last", "value_stream_norm", "head_value_norm", "mixed_norm", "mixed_norm_apart"}
DISCOVERED |= {"gate", "chunk", "unknown_scale", "unknown_logits", "unknown_mask", "unknown_output"}
DISCOVERED |= {"inputs_matter", "unknown_norm"}  # words


def zeroed(p: Projection) -> Projection:
    return replace(p, weight=lambda: torch.zeros(p.shape, dtype=torch.float64))


def mutations() -> dict[str, Callable[[AttentionLayer], AttentionLayer]]:
    made = dict(WHOLE)
    for part, kind in PART.items():
        for name, neutral in NEUTRAL[kind].items():

            def mutate(
                layer: AttentionLayer, part: str = part, name: str = name, neutral: object = neutral
            ) -> AttentionLayer:
                held = getattr(layer, part)
                if held is None or getattr(held, name) is None:
                    return layer
                value = neutral(held) if callable(neutral) else neutral
                if part in ("query", "key", "value", "out") and name == "weight":
                    return replace(layer, **{part: replace(held, weight=lambda: value)})
                return replace(layer, **{part: replace(held, **{name: value})})

            made[f"{part}.{name}"] = mutate
    for name, neutral in NORMED.items():

        def inside(layer: AttentionLayer, name: str = name, neutral: Callable[..., object] = neutral) -> AttentionLayer:
            held = {part: getattr(layer, part) for part in ("query", "key", "value")}
            changed = {
                k: replace(p, **{name.split(".")[0]: neutral(p)})
                for k, p in held.items()
                if isinstance(p, NormedProjection)
            }
            return replace(layer, **changed) if changed else layer

        made[f"normed.{name}"] = inside
    return made


def test_every_field_has_a_mutation() -> None:
    made = mutations()
    for f in fields(AttentionLayer):
        covered = f.name in {*made, *NAMES_ONLY, *DISCOVERED} or (f.name in PART and f"{f.name}.weight" in made)
        assert covered, f"AttentionLayer.{f.name} has no mutation"
    for kind, neutral in NEUTRAL.items():
        missing = (
            {f.name for f in fields(kind)} - set(neutral) - {"shape", "first"}
        )  # discovery alone sets Rotary.first
        assert not missing, f"{kind.__name__}.{missing} has no mutation"
    assert {f.name for f in fields(NormedProjection)} - {f.name for f in fields(Projection)} <= set(NORMED)


@pytest.mark.parametrize("name", sorted(mutations()))
def test_a_neutral_field_breaks_parity(name: str) -> None:
    mutate = mutations()[name]
    for case in CASES:
        model, seen = live(case.label)
        for layer, here in zip(attention_layers(model), seen[case.implementations[0]], strict=True):
            if broken(mutate, layer, here, case):
                return
    pytest.fail(f"no family notices {name}: parity would pass without it")


def broken(mutate: Callable[[AttentionLayer], AttentionLayer], layer: AttentionLayer, here: Record, case: Case) -> bool:
    changed = mutate(layer)
    if changed is layer:
        return False
    try:
        apart = disagreement(changed, here, case)
    except RuntimeError:  # shapes no longer fit
        return True
    return any(value > TOLERANCE for value in apart.values())


def test_every_registered_family_has_a_case() -> None:
    tested = {_model_type(case) for case in CASES}
    assert set(families()) <= tested | {"torchtitan"}  # which needs the package: tests/families/test_torchtitan.py


def _model_type(case: Case) -> str:
    config = getattr(case.build(), "config", None)
    # torch and timm carry no configuration
    return config.model_type if config is not None else case.label.partition("-")[0]
