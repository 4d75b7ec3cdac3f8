"""Inputs that are guessed run; where none can be guessed, one line says which argument is not known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel, CLIPConfig, CLIPModel, GPT2Config, T5Config, ViTConfig, WhisperConfig

import locater
from locater.discovery.example_inputs import example_inputs
from locater.errors import LocaterError

SMALL = dict(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16)
CONFIGS = {
    "ids": (GPT2Config(n_embd=16, n_head=2, n_layer=1, vocab_size=7), {"input_ids", "attention_mask"}),
    "encoder and decoder": (
        T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=50),
        {"input_ids", "attention_mask", "decoder_input_ids"},
    ),
    "picture": (ViTConfig(**SMALL, image_size=[16, 24], patch_size=8, num_channels=1), {"pixel_values"}),
    "sound": (
        WhisperConfig(
            d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
            encoder_ffn_dim=16, decoder_ffn_dim=16, vocab_size=60, max_source_positions=20, num_mel_bins=12,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        ),
        {"input_features", "decoder_input_ids"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONFIGS)
def test_guessed_inputs_run(kind: str) -> None:
    config, names = CONFIGS[kind]
    model = AutoModel.from_config(config)
    guess = example_inputs(model)
    assert set(guess) == names
    with torch.no_grad():
        out = model.eval()(**guess)
    assert torch.isfinite(out[0]).all()
    assert all(x.shape[0] == 2 for x in guess.values())


def test_every_tower_of_a_composite_model_runs() -> None:
    config = CLIPConfig(
        text_config={**SMALL, "vocab_size": 40}, vision_config={**SMALL, "image_size": 16, "patch_size": 8}
    )
    model = CLIPModel(config)
    ran: list[str] = []
    for name, part in model.named_modules():
        if name.endswith("self_attn"):
            part.register_forward_hook(lambda module, args, out, name=name: ran.append(name))
    example_inputs(model)
    assert {name.split(".")[0] for name in ran} == {"text_model", "vision_model"}


def test_the_model_and_the_random_state_are_as_before() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 1).train()
    model.layers[0].eval()
    modes, state = [part.training for part in model.modules()], torch.get_rng_state()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    example_inputs(model)
    assert [part.training for part in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_inputs_have_the_dtype_of_the_model_and_do_not_change_between_calls() -> None:
    model = nn.Sequential(nn.Linear(12, 4)).double()
    one, two = example_inputs(model), example_inputs(model)
    assert one["input"].dtype == torch.float64
    assert one["input"].shape[-1] == 12
    assert torch.equal(one["input"], two["input"])


class Molecule(nn.Module):
    """Takes what no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"model_type": "molecule", "hidden_size": 8}
        self.map = nn.Linear(8, 8)

    def forward(self, bonds: Tensor, input_ids: Tensor | None = None) -> Tensor:
        return self.map(bonds)


class Strict(Molecule):
    """Takes ids, and always raises."""

    def forward(self, input_ids: Tensor) -> Tensor:  # type: ignore[override]
        raise ValueError("only 7 tokens\nand more")


def test_an_unknown_argument_is_named() -> None:
    with pytest.raises(
        LocaterError, match=r"^Molecule: no inputs .* 'bonds' is not known\. .*example=\{'bonds': tensor"
    ):
        example_inputs(Molecule())


def test_the_error_of_the_model_is_given_in_one_line() -> None:
    with pytest.raises(LocaterError, match=r"only 7 tokens") as caught:
        example_inputs(Strict())
    assert "\n" not in str(caught.value)
    assert "input_ids (2, 9)" in str(caught.value)


@pytest.mark.parametrize("example", [torch.zeros(1, 4, dtype=torch.long), (torch.zeros(2),), {0: torch.zeros(2)}])
@pytest.mark.parametrize("ask", [locater.scan, locater.discover, locater.attention_layers])
def test_inputs_without_names_are_refused(ask: Any, example: Any) -> None:
    with pytest.raises(LocaterError, match=r"example is a \w+: give a mapping from names"):
        ask(nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 1), example=example)


def test_a_model_on_the_meta_device_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(LocaterError, match="meta device"):
        example_inputs(model)


class Frames(Molecule):
    """Takes features of another width than its configuration says, stacked in pairs."""

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        return self.map(hidden_states[:, :8].unflatten(1, (4, 2)).flatten(2))


def test_a_size_that_does_not_fit_is_repaired() -> None:
    """The map takes 8 channels, two frames at a time: 4 of each frame, where the configuration says 8."""
    assert example_inputs(Frames())["hidden_states"].shape == (2, 9, 4)
