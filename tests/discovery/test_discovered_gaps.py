"""What discovery does not know it refuses: scales, masks, windows; and what it keeps of a model it forgets in time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import locater
from locater.control import LocAteR
from locater.errors import LocaterError

EXAMPLE = {"x": torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0))}


class Attention(nn.Module):
    """Two heads, with what a test changes."""

    def __init__(self, window: int = 64, shrink: int = 0, cubed: bool = False, learned_scale: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.window, self.shrink, self.cubed, self.factor = window, shrink, cubed, 8**-0.5
        self.temperature = nn.Parameter(torch.tensor(10.0)) if learned_scale else None
        angles = torch.rand(40, 4, generator=torch.Generator().manual_seed(3))
        angles[0] = 0
        self.register_buffer("angles", angles)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (2, 8)).transpose(1, 2) for part in (self.q, self.k, self.v))
        logits = self.turned(q) @ self.turned(k).mT * (self.factor if self.temperature is None else self.temperature)
        mixed = (self.masked(logits).softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.o(mixed**3 if self.cubed else mixed)

    def turned(self, x: Tensor) -> Tensor:
        angles: Any = self.angles
        cos, sin = (f(angles[: x.shape[2]]).to(x) for f in (torch.cos, torch.sin))
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def masked(self, logits: Tensor) -> Tensor:
        at = torch.arange(logits.shape[-1])
        distance = at[:, None] - at
        return logits.masked_fill((distance < 0) | (distance >= self.window - self.shrink), -torch.inf)


class Model(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(16), Attention(**settings)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.norm(x))


class Bent(Attention):
    """Logits that are changed where the example has none that large."""

    def __init__(self, bend: Any) -> None:
        super().__init__()
        self.bend = bend

    def masked(self, logits: Tensor) -> Tensor:
        return super().masked(self.bend(logits))


@pytest.mark.parametrize(
    "bend",
    [
        lambda logits: logits.clamp(-20, 20),
        lambda logits: torch.where(logits < -30, torch.full_like(logits, -1e9), logits),
        lambda logits: logits.clamp(-20, 20) - logits.amax(-1, keepdim=True),
    ],
)
def test_logits_that_are_nonlinear_beyond_the_example_have_no_scale(bend: Any) -> None:
    model = Model()
    model.attn = Bent(bend)
    (layer,) = locater.discover(model, EXAMPLE).layers
    assert "nonlinear" in str(layer.unknown_scale)


class Clamped(nn.Module):
    """A norm that is another one for small inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return x * x.square().mean(-1, keepdim=True).clamp_min(1e-2).rsqrt() * self.weight


class ClampedRMSNorm(Clamped):
    pass


def test_a_norm_that_is_another_for_small_inputs_is_not_read_as_one() -> None:
    model = Model()
    model.norm = ClampedRMSNorm()  # type: ignore[assignment]
    (layer,) = locater.discover(model, EXAMPLE).layers
    assert layer.norm.kind == "none"  # its stream is what the norm returns


def test_a_layer_whose_output_is_not_known_keeps_its_mask() -> None:
    (layer,) = locater.discover(Model(cubed=True), EXAMPLE).layers
    assert layer.unknown_output is not None
    assert (layer.causal, layer.window, layer.unknown_mask) == (True, 64, None)


def test_numbers_in_units_of_logits_are_refused_without_a_scale() -> None:
    """The scale is a parameter: it differs between the passes, and is that of no pass."""
    model = Model(learned_scale=True)
    (layer,) = locater.discover(model, EXAMPLE).layers
    assert math.isnan(layer.scale)
    assert "scale" in str(layer.unknown_scale)
    rows = locater.scan(model, example=EXAMPLE).rows
    unit = locater.scan(Model(), example=EXAMPLE).rows
    for row, other in zip(rows, unit, strict=True):
        assert [row[name] for name in ("scale", "M", "S", "F", "key_bias", "expected_entropy", "localization")] == [
            None
        ] * 7
        assert row.frobenius_sq is not None
        assert other.F is not None
    with pytest.raises(LocaterError, match="not the scale"):
        locater.attention_layers(model, example=EXAMPLE)
    with pytest.raises(LocaterError, match="scale"):
        LocAteR().attach(model)
    with pytest.raises(LocaterError, match="scale of its logits is not known"):
        locater.layers.effective(layer)


@pytest.mark.parametrize(("shrink", "window"), [(0, 64), (1, 63), (2, None)])
def test_a_window_follows_from_two_sizes(shrink: int, window: int | None) -> None:
    """Settings of 6 and 4 that show as 4 and 2: half of the setting plus one explains the first alone."""
    (layer,) = locater.discover(Model(shrink=shrink), EXAMPLE).layers
    assert layer.window == window
    assert (layer.unknown_mask is None) == (window is not None)


class Settings:
    """A configuration as plain projects write it."""

    def __init__(self) -> None:
        self.window = 12


class Configured(Attention):
    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.window, self.config = None, kept  # type: ignore[assignment]

    def masked(self, logits: Tensor) -> Tensor:
        config = self.config
        window = config.window if isinstance(config, Settings) else config["window"][0]
        at = torch.arange(logits.shape[-1])
        distance = at[:, None] - at
        return logits.masked_fill((distance < 0) | (distance >= window), -torch.inf)


@pytest.mark.parametrize("kept", [Settings(), {"window": (12, 0)}, {"window": [12, 0]}])
def test_windows_of_plain_configurations(kept: Any) -> None:
    model = Model()
    model.attn = Configured(kept)
    assert locater.discover(model, EXAMPLE).layers[0].window == 12
    if isinstance(kept, Settings):
        kept.window = 4
        assert locater.discover(model, EXAMPLE).layers[0].window == 4


class Towers(Model):
    """A model with a part that looks like attention and does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.attn.tower = Attention()  # type: ignore[assignment]


def test_attention_inside_a_module_that_attends_is_listed() -> None:
    discovered = locater.discover(Towers(), EXAMPLE)
    assert discovered.unreached == ["attn.tower"]
    assert not discovered.whole


def test_in_inference_mode_and_with_another_default_device() -> None:
    with torch.inference_mode():
        assert locater.discover(Model(), {"x": torch.randn(2, 9, 16)}).whole
    model = Model()
    with torch.device("meta"):
        assert locater.discover(model, EXAMPLE).whole


class Unmoved(Attention):
    """A window that is set, and that no mask follows."""

    def masked(self, logits: Tensor) -> Tensor:
        return logits


def test_a_window_that_shows_in_no_mask_is_refused() -> None:
    model = Model()
    model.attn = Unmoved()
    (layer,) = locater.discover(model, EXAMPLE).layers
    assert "window = 64" in str(layer.unknown_mask)
    assert layer.unknown_output is None


class Masked(Model):
    """Its window acts only where a mask is given; and the parts of a model have settings of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.config = Unmoved(), None
        self.attn.window = None  # type: ignore[assignment]
        self.attn.config = {"sliding_windows": [[16, 4]]}  # type: ignore[assignment]

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return super().forward(x)


def test_a_window_that_may_need_a_mask_is_not_taken_for_none() -> None:
    (layer,) = locater.discover(Masked(), EXAMPLE).layers
    assert "sliding_windows = 16" in str(layer.unknown_mask)


class Shorter(Model):
    """A second layer that only runs in short sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.chunk_window = Attention(window=10**9), 64

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + self.other(self.norm(x)) if x.shape[1] <= self.chunk_window else x


def test_a_layer_that_does_not_run_with_a_small_window_is_refused_alone() -> None:
    first, second = locater.discover(Shorter(), EXAMPLE).layers
    assert first.unknown_mask is None
    assert "other attention runs" in str(second.unknown_mask)


def test_the_live_model_does_not_run_and_no_device_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    model, passes = Model(), []
    model.attn.register_forward_hook(lambda *_: passes.append(1))
    state = torch.get_rng_state()
    locater.discover(model)
    assert (passes, seeds) == ([], [])
    assert torch.equal(state, torch.get_rng_state())


def test_what_is_kept_follows_settings_and_buffers() -> None:
    model = Model()
    first = locater.discover(model, EXAMPLE).layers[0]
    assert locater.discover(model, EXAMPLE).layers[0].rotary_table is not None
    model.attn.window = 32
    assert locater.discover(model, EXAMPLE).layers[0].window == 32
    model.attn.factor = 0.5
    assert locater.discover(model, EXAMPLE).layers[0].scale == pytest.approx(0.5)
    model.attn.angles.mul_(2)  # type: ignore[operator]
    again = locater.discover(model, EXAMPLE).layers[0]
    assert first.rotary_table is not None
    assert again.rotary_table is not None
    assert torch.allclose(again.rotary_table.angles, 2 * first.rotary_table.angles)


def test_an_example_serves_calls_without_one_only_where_none_can_be_guessed() -> None:
    model, longer = Model(), {"x": torch.randn(1, 20, 16)}
    assert len(_angles(model, longer)) == 20
    assert len(_angles(model)) == 9
    assert len(_angles(model, longer)) == 20

    class Two(Model):
        def forward(self, x: Tensor, key_word: Any) -> Tensor:
            assert key_word == "open"
            return super().forward(x)

    second = Two()
    with pytest.raises(LocaterError, match="example="):
        locater.discover(second)
    example = {**longer, "key_word": "open"}
    assert len(_angles(second, example)) == 20
    assert len(_angles(second)) == 20


def _angles(model: nn.Module, example: Any = None) -> Tensor:
    table = locater.discover(model, example).layers[0].rotary_table
    assert table is not None
    return table.angles


def test_maps_on_tokens_do_not_turn() -> None:
    """Tokens of a sample have no place, so that a table of angles neither turns them nor runs out."""
    from locater.control.locater import token_maps

    (layer,) = locater.discover(Model(), EXAMPLE).layers
    x = torch.randn(50, 16)
    maps = token_maps(layer, x, torch.ones(50, dtype=torch.bool))
    q = (x @ layer.query.weight().mT + layer.query.bias).unflatten(-1, (2, 8)).transpose(0, 1)
    assert torch.allclose(maps.query.mT * 50, q, atol=1e-6)


class Unguessed(Attention):
    def forward(self, batch: Any) -> Tensor:  # type: ignore[override]
        return super().forward(batch["stream"][0])


class Linear(Attention):
    """No softmax."""

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.v(x) * (self.q(x) * self.k(x)).sum(-1, keepdim=True))


class Beside(nn.Module):
    """A part is known by its class, another one not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.other = nn.MultiheadAttention(16, 2), Unguessed()

    def forward(self, batch: Any) -> Tensor:
        x = batch["stream"][0]
        return self.other({"stream": [self.text(x, x, x)[0]]})


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (Unguessed, "no inputs could be guessed"),
        (Beside, "no inputs could be guessed"),
        (Linear, "the model itself: not read, because no softmax"),
        (lambda: Linear().to("meta"), "q.weight has no data"),
        (lambda: nn.Linear(4, 4), "no attention found"),
    ],
    ids=["inputs", "part", "softmax", "meta", "none"],
)
def test_a_refusal_of_a_live_model_begins_with_its_reason(build: Any, reason: str) -> None:
    """And not with a file that a live model has no use for; the way out comes after it, in Python."""
    model = build()
    for verb in (locater.scan, locater.attention_layers):
        with pytest.raises(LocaterError) as error:
            verb(model)
        line = str(error.value)
        assert line.startswith(f"{type(model).__name__}: {reason}"), line
        assert "config.json" not in line
        assert "--query" not in line
        assert "\n" not in line
        if reason != "no attention found":
            assert "locater.scan(model, query='PATTERN', key='PATTERN', heads=N)" in line
            assert "not read" in line.lower()


def test_the_reason_comes_before_what_was_read() -> None:
    model = nn.Sequential(Model(), Linear())
    with pytest.raises(LocaterError) as error:
        locater.attention_layers(model, example={"input": EXAMPLE["x"]})
    assert str(error.value).startswith("Sequential: 1: not read, because no softmax")


class Conditioned(nn.Module):
    """Another norm is in front where a second input is given."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.features = nn.Embedding(20, 16), nn.Linear(16, 16)
        self.plain, self.joint, self.attention = nn.LayerNorm(16), nn.LayerNorm(16), Attention()

    def forward(self, input_ids: Tensor, encoder_hidden_states: Tensor | None = None) -> Tensor:
        x = self.words(input_ids)
        if encoder_hidden_states is None:
            return self.attention(self.plain(x))
        return self.attention(self.joint(x + self.features(encoder_hidden_states).mean(1, keepdim=True)))


class Pictured(Conditioned):
    """The second input is one that cannot be guessed here: it has to be of a size that nothing tells."""

    def forward(self, input_ids: Tensor, pixel_values: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(input_ids, None if pixel_values is None else pixel_values.view(2, 3, 16))


@pytest.mark.parametrize(
    ("build", "norm", "line"),
    [
        (Conditioned, "joint", "input_ids, encoder_hidden_states: without encoder_hidden_states it reads another norm"),
        (Pictured, "plain", "input_ids: with pixel_values, which the model takes too, it may read another norm"),
    ],
)
def test_a_norm_that_the_guessed_inputs_decide_is_said(build: Any, norm: str, line: str) -> None:
    model = build()
    with torch.no_grad():
        model.plain.weight.add_(1.0)
    found = locater.discover(model)
    (layer,) = found.layers
    assert layer.norm.gain is not None
    assert torch.equal(layer.norm.gain, getattr(model, norm).weight)
    assert line in " ".join(found.gaps)
    assert any(line in note and "example=" in note for note in locater.scan(model).assumptions["notes"])
    given = {"input_ids": torch.zeros(2, 5, dtype=torch.long)}
    own = locater.discover(model, given)
    assert not any("guessed" in gap for gap in own.gaps), "who gives inputs has chosen"
    assert own.layers[0].norm.gain is not None
    assert torch.equal(own.layers[0].norm.gain, model.plain.weight)
