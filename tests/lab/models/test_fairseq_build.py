"""`--build fairseq`: the layer of PyTorch that has the same norms, biases and ReLU, and fairseq's first weights."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from locater.discovery import attention_layers
from locater_lab.models.shape import Shape
from locater_lab.models.transformer import Transformer
from locater_lab.train.checkpoint import save

SHAPE = Shape(
    vocabulary=40, layers=2, width=128, heads=2, kv_heads=2, hidden=96, length=12, positions="sinusoidal", mlp="relu", norm="post",
    build="fairseq",
)  # fmt: skip


def layer_of_torch(block: Any, shape: Shape) -> nn.TransformerEncoderLayer:
    """PyTorch's own layer with the weights of a block."""
    other = nn.TransformerEncoderLayer(
        shape.width, shape.heads, shape.hidden, 0.0, "relu", 1e-5, batch_first=True, norm_first=shape.norm == "pre"
    ).double()
    attention = block.self_attn
    names = ("q_proj", "k_proj", "v_proj")
    first, second = (
        ("input_layernorm", "post_attention_layernorm")
        if shape.norm == "pre"
        else ("attention_out_norm", "mlp_out_norm")
    )
    other.load_state_dict({
        "self_attn.in_proj_weight": torch.cat([getattr(attention, name).weight for name in names]),
        "self_attn.in_proj_bias": torch.cat([getattr(attention, name).bias for name in names]),
        **{f"self_attn.out_proj.{part}": getattr(attention.o_proj, part) for part in ("weight", "bias")},
        **{f"linear1.{part}": getattr(block.mlp.up_proj, part) for part in ("weight", "bias")},
        **{f"linear2.{part}": getattr(block.mlp.down_proj, part) for part in ("weight", "bias")},
        **{f"norm1.{part}": getattr(getattr(block, first), part) for part in ("weight", "bias")},
        **{f"norm2.{part}": getattr(getattr(block, second), part) for part in ("weight", "bias")},
    })  # fmt: skip
    return other


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_a_stack_is_that_of_pytorch(norm: str) -> None:
    """Every parameter redrawn, so that a bias left out would show; behind norms after the sums there is no last one."""
    torch.manual_seed(0)
    shape = replace(SHAPE, norm=norm)
    model: Any = Transformer(shape).double().eval()
    for p in model.parameters():
        p.data = torch.randn_like(p) * 0.3
    ids = torch.randint(40, (3, 12))
    with torch.no_grad():
        x: Tensor = model.model.embed(ids)[0]
        mask = nn.Transformer.generate_square_subsequent_mask(12, dtype=torch.float64)
        for block in model.model.layers:
            x = layer_of_torch(block, shape)(x, src_mask=mask, is_causal=True)
        expected = x if norm == "post" else model.model.norm(x)
        torch.testing.assert_close(model.model(ids), expected, rtol=1e-9, atol=1e-9)
    assert any("norm.weight" in name for name in model.state_dict())
    assert ("model.norm.weight" in model.state_dict()) == (norm == "pre")


def test_first_weights_are_those_of_fairseq() -> None:
    """Xavier uniform with a gain of 1/sqrt 2 for queries, keys and values, of 1 for the others, which are not made
    smaller with depth; biases of outputs zero; embeddings normal.
    """
    torch.manual_seed(0)
    model = Transformer(replace(SHAPE, hidden=128), scale=128**-0.5)
    found = dict(model.named_parameters())
    largest = math.sqrt(6 / 256)
    for name, gain in (("self_attn.q_proj", 2**-0.5), ("self_attn.v_proj", 2**-0.5), ("self_attn.o_proj", 1.0), ("mlp.down_proj", 1.0)):  # fmt: skip
        weight = found[f"model.layers.1.{name}.weight"]
        assert float(weight.detach().abs().max()) == pytest.approx(gain * largest, rel=0.01)
        assert float(weight.detach().std()) == pytest.approx(gain * largest / math.sqrt(3), rel=0.02)
    assert float(found["model.embed_tokens.weight"].detach().std()) == pytest.approx(128**-0.5, rel=0.05)
    zero = [
        not found[f"model.layers.0.{name}.bias"].any() for name in ("self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
    ]
    assert zero == [True] * 3
    assert float(found["model.layers.0.self_attn.q_proj.bias"].detach().abs().max()) > 0.05


def test_its_heads_are_read_with_biases_and_norms(tmp_path: Path) -> None:
    """Logits and outputs of a saved model, whose second layer reads behind a LayerNorm of the sum."""
    torch.manual_seed(0)
    model: Any = Transformer(SHAPE)
    for p in model.parameters():
        p.data = torch.randn_like(p) * 0.3
    path = save(tmp_path, "model", model)
    wide, held = model.double().eval(), {}
    enters, attention = wide.model.layers[0].mlp_out_norm, wide.model.layers[1].self_attn
    enters.register_forward_pre_hook(lambda m, args: held.update(stream=args[0]))
    attention.register_forward_hook(lambda m, args, y: held.update(y=y))
    with torch.no_grad():
        wide(torch.randint(40, (2, 12)))
    for layer in (list(attention_layers(wide))[1], list(attention_layers(str(path)))[1]):
        output = layer.output(held["stream"])
        torch.testing.assert_close(output.double(), held["y"], rtol=1e-5, atol=1e-5)
