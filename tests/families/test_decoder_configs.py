"""Checkpoints of further decoders as hubs hold them: older keys in config.json, extra layers, scaled FP8; and wrong
ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import locater
from locater.discovery import attention_layers
from locater.errors import LocaterError
from tests.families.more_decoders import CASES
from tests.parity import model_of


def written(label: str, folder: Path, **changes: Any) -> Path:
    """A saved model whose config.json holds `changes`; None takes a key out."""
    model_of(next(c for c in CASES if c.label == label)).save_pretrained(folder)
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


SU = {"type": "su", "short_factor": [1.0, 1.5, 2.0, 4.0], "long_factor": [9.0] * 4}
YARN = {"type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("label", "older"),
    [
        ("phi", {"rope_theta": 100.0, "partial_rotary_factor": 0.5}),
        ("phi3-longrope", {"rope_theta": 100.0, "rope_scaling": SU}),
        ("deepseek_v3-yarn-biased", {"rope_theta": 100.0, "rope_scaling": YARN}),
        ("olmo3", {"rope_theta": 500_000.0}),
        ("cohere", {}),  # its base is not everybody's
        ("stablelm", {"rope_theta": 10_000.0}),
        ("falcon", {"num_attention_heads": None, "n_head": 4, "num_hidden_layers": None, "n_layer": 2}),
        ("bloom", {"n_head": None, "num_attention_heads": 6, "hidden_size": None, "n_embed": 48}),
    ],
)
def test_older_configurations_say_the_same(label: str, older: dict[str, Any], tmp_path: Path) -> None:
    now = list(attention_layers(written(label, tmp_path / "now")))
    then = list(attention_layers(written(label, tmp_path / "then", **{"rope_parameters": None, **older})))
    x = torch.randn(1, 5, now[0].width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for a, b in zip(now, then, strict=True):
        assert torch.equal(a.logits(x), b.logits(x))


@pytest.mark.parametrize("case", [pytest.param(c, id=c.label) for c in CASES])
def test_a_configuration_that_does_not_fit_is_refused_in_a_line(case: Any, tmp_path: Path) -> None:
    config = json.loads((written(case.label, tmp_path) / "config.json").read_text())
    for key, wrong in (("num_attention_heads", 5), ("n_head", 5), ("num_hidden_layers", 3), ("n_layer", 3)):
        if key in config:
            (tmp_path / "config.json").write_text(json.dumps({**config, key: wrong}))
            with pytest.raises(LocaterError, match="but the configuration says") as refusal:
                list(attention_layers(tmp_path))
            assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("case", [pytest.param(c, id=c.label) for c in CASES])
def test_scan_reads_the_live_model_and_its_checkpoint_alike(case: Any, tmp_path: Path) -> None:
    model = model_of(case)
    model.save_pretrained(tmp_path)
    for live, saved in zip(locater.scan(model).rows, locater.scan(tmp_path).rows, strict=True):
        assert live == saved
        assert live.frobenius_sq


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    folder = written("deepseek_v3", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    extra = {k.replace("layers.1.", "layers.2."): v.clone() for k, v in tensors.items() if "layers.1." in k}
    save_file({**tensors, **extra}, folder / "model.safetensors")
    assert [layer.index for layer in attention_layers(folder)] == [0, 1]


def test_a_scale_beside_plain_weights_is_refused(tmp_path: Path) -> None:
    folder = written("deepseek_v3", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.kv_b_proj.weight_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(LocaterError, match=r"kv_b_proj\.weight is quantised .* and stored as torch\.\w+, which"):
        locater.scan(folder)


def test_rotary_channels_beyond_a_head_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LocaterError, match="rotary_dim"):
        list(attention_layers(written("gptj", tmp_path, rotary_dim=16)))
