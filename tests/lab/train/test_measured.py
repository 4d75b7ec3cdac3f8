"""What a trained model is measured by, whatever it attends by: against `observe`, against hooks, against maps made by
hand.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from locater import observe
from locater.measures import rank_residual
from locater_lab.mechanisms import mechanisms
from locater_lab.train import Plan, Transformer, run
from locater_lab.train.map_measures_and_diverged_layer import map_numbers, measure
from locater_lab.train.run_folder import Result
from tests.lab.train.test_attention import IDS, SET, can_look_ahead, model_of, parts, plan

NAMES = [*dict.fromkeys([*(m.name for m in mechanisms()), *SET])]


def maps_by_values(model: Transformer, layer: int) -> Tensor:
    """A layer's maps column by column: what reaches the output projection when the values are the unit vectors of
    keys.
    """
    part: Any = parts(model)[layer]
    held: dict[str, Any] = {}
    hook = part.register_forward_pre_hook(lambda m, args: held.update(x=args[0], turn=args[1]))
    with torch.no_grad():
        model(IDS)
    hook.remove()
    q, k, _ = part.operands(held["x"], held["turn"])
    S = k.shape[2]
    v = torch.eye(S, dtype=torch.float64).expand(2, k.shape[1], S, S)
    return model_attend(part, q, k, v, held["x"])


@torch.no_grad()
def model_attend(part: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    from locater_lab.models.transformer import attend_by_mechanism

    return attend_by_mechanism(part, q, k, v, x, part.causal)


@pytest.mark.parametrize("text", NAMES)
def test_every_mechanism_is_measured(text: str) -> None:
    model = model_of(text, causal=not can_look_ahead(text))
    found = measure(model, IDS)
    signed = any(m.mechanism.kind == "signed" for m in model.shape.by_layer)
    alone = all(m.mechanism.kind == "signed" for m in model.shape.by_layer)
    assert (found["entropy"] is None) == alone
    numbers = [x for name, x in found.items() if isinstance(x, float)]
    assert all(math.isfinite(x) for x in numbers)
    assert len(found["halves"]) == 5
    assert len(found["relevance"]) == 2
    assert sum(found["relevance"][0]) == pytest.approx(1, abs=0.1)
    assert (found["gate"] is not None) == any(
        m.name == "gated" and not m.settings.get("additive") for m in model.shape.by_layer
    )
    if not signed and all(m.mechanism.kind == "stochastic" for m in model.shape.by_layer):
        assert found["row_mass"] == pytest.approx(1)
    if (
        all(m.mechanism.kind == "sub-stochastic" for m in model.shape.by_layer)
        and "additive" not in text
        and "key" not in text
    ):
        assert found["row_mass"] < 1


@pytest.mark.parametrize(
    "text", ["softmax", "sigmoid", "delta", "gated", "linear", "centred", "learned_sink", "binary"]
)
def test_maps_are_those_that_act(text: str) -> None:
    """Rows, first key and least column from maps found through the values."""
    model = model_of(text)
    acted = torch.stack([maps_by_values(model, layer) for layer in (0, 1)])  # (layer, B, H, T, S)
    found, size = measure(model, IDS), acted.abs()
    assert found["row_mass"] == pytest.approx(float(acted.sum(-1).mean()), rel=1e-9, abs=1e-12)
    shares = size / size.sum(-1, keepdim=True).clamp_min(1e-300)
    assert found["first_mass"] == pytest.approx(float(shares[..., 0].mean()), rel=1e-6)
    assert found["first_weight"] == pytest.approx(float(size[..., 0].mean()), rel=1e-6)
    assert found["column_least"] == pytest.approx(float(acted.sum(-2).amin(-1).mean()), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("text", ["softmax", "softcap", "softmax_plus_one", "learned_sink"])
def test_as_observed(text: str) -> None:
    model = model_of(text)
    with observe(model) as seen, torch.no_grad():
        model(IDS)
    mass = [row.row_mass for row in seen.rows if row.row_mass is not None]
    found = measure(model, IDS)
    assert found["row_mass"] == pytest.approx(sum(mass) / len(mass) if mass else 1.0, rel=1e-5)
    if text in ("softmax", "softcap"):
        entropies = [row.entropy or 0.0 for row in seen.rows]
        assert found["entropy"] == pytest.approx(sum(entropies) / len(entropies), rel=1e-5)


@pytest.mark.parametrize("norm", ["pre", "sandwich", "post"])
def test_halves_are_the_stream(norm: str) -> None:
    model = model_of("softmax", norm=norm)
    blocks: Any = model.model.layers
    ends: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda m, args, y: ends.append(y)) for block in blocks]
    with torch.no_grad():
        model(IDS)
    for hook in hooks:
        hook.remove()
    found = measure(model, IDS)
    for index, x in enumerate(ends):
        half = found["halves"][2 * index + 2]
        assert half["largest"] == pytest.approx(float(x.abs().max()))
        assert half["residual"] == pytest.approx(float(rank_residual(x).mean()))
    assert found["spike"] == max(half["largest"] for half in found["halves"])


def test_the_first_value_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of values of length 1, but for the first key's of 1/4."""
    model = model_of("softmax")
    kind = type(parts(model)[0])
    plain = kind.operands

    def shrunk(part: Any, x: Tensor, turn: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = plain(part, x, turn)
        v = v / v.norm(dim=-1, keepdim=True)
        v[:, :, 0] *= 0.25
        return q, k, v

    monkeypatch.setattr(kind, "operands", shrunk)
    assert measure(model, IDS)["first_value"] == pytest.approx(0.25)


def test_sinks_and_what_is_explained_away() -> None:
    """Head 0 looks at the first key, head 1 at itself, head 2 at key 2 from there on."""
    T = 6
    p = torch.zeros(2, 3, T, T)
    p[:, 0, :, 0] = 1
    p[:, 1] = torch.eye(T)
    p[:, 2] = torch.eye(T)
    p[:, 2, 2:] = 0
    p[:, 2, 2:, 2] = 1
    found = map_numbers(p, causal=True)
    assert found["sink_rate"] == pytest.approx(1 / 3)  # of head 1 the first key has 1/6 of its queries
    assert found["sink_ratio"] == pytest.approx(1.0 - 1 / 3)
    assert found["first_mass"] == pytest.approx((1 + 1 / 6 + 1 / 6) / 3)
    # the share stays, the weight does not
    assert map_numbers(p / 4, causal=True)["first_weight"] == pytest.approx((1 + 1 / 6 + 1 / 6) / 12)
    assert map_numbers(p / 4, causal=True)["first_mass"] == pytest.approx((1 + 1 / 6 + 1 / 6) / 3)
    assert found["explained_away"] == pytest.approx((5 + 0 + 3) / 18)
    assert found["entropy"] == pytest.approx(0)
    assert found["gap"] == pytest.approx((1 + 0 + (1 - 1 / 2)) / 3)  # singular values: sqrt 6, 0; 1, 1; 2, 1
    assert map_numbers(p, causal=True, kind="signed")["entropy"] is None


def test_a_run_brings_them(tmp_path: Any) -> None:
    made: Plan = plan(tmp_path, attention="delta", steps=2)
    result = run(made)
    assert result.measures["entropy"] is None
    assert Result.from_dict(result.to_dict()).measures == result.measures
    old = {name: value for name, value in result.to_dict().items() if name != "measures"}
    assert Result.from_dict(old).measures == {}


def test_a_stream_of_nothing_has_no_ratio() -> None:
    """Numbers that do not exist are null, and the result is JSON."""
    import json

    model = model_of("softmax")
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    found = measure(model, IDS)
    assert (found["spike"], found["spike_ratio"], found["halves"][0]["residual"]) == (0.0, None, None)
    assert found["entropy_share"] == pytest.approx(1)
    json.dumps(found, allow_nan=False)
