"""The maps of single heads under fused attention: those that the model's own eager attention returns, and no others
built.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import locater
from locater.calls.listeners import KEY
from locater.discovery import attention_layers
from locater.errors import LocaterError
from locater.observing import attention_pattern, observe
from locater_lab.mechanisms import mechanism
from locater_lab.mechanisms.swap import SwapMechanism
from locater_lab.train import Shape, Transformer
from tests.families import CASES
from tests.observing.test_observe import use
from tests.parity import Case, model_of, record

# sinks, windows, soft-caps, position biases, groups of heads, padding, cross-attention, images, taps
FAST = ("gpt2", "llama", "mistral-window", "gemma2", "gpt_oss", "bert", "vit", "t5", "clip", "timm", "deberta_v2")
SHARED = ("albert", "albert-groups", "albert-inner")
CHOSEN = [case for case in CASES if "eager" in case.implementations and not case.call and case.label not in SHARED]
RUNS = [pytest.param(case, id=case.label, marks=() if case.label in FAST else pytest.mark.slow) for case in CHOSEN]
# transformers computes the softmax of most models in float32, whatever the precision of the model
IN_DOUBLE = ("gpt2", "bert", "t5", "timm")


def apart(case: Case, model: nn.Module, maps: dict[tuple[int, int], Tensor]) -> float:
    """The largest difference from the model's own eager maps, over rows of real tokens."""
    own = record(case, use(model, "eager"), "eager")
    layers, batch, worst, compared = attention_layers(model), case.batch(), 0.0, 0
    numbers = {layer.name: number for number, layer in enumerate(layers)}
    for site, theirs in zip(case.sites, own, strict=True):
        assert theirs.maps is not None
        number = numbers[site.attention]
        ours = torch.stack([maps[number, head] for head in range(layers[number].heads)], 1)
        real = torch.ones(ours.shape[:3], dtype=torch.bool)
        if theirs.padding in batch:
            real &= batch[theirs.padding].bool()[:, None]
        worst = max(worst, float((ours - theirs.maps.detach())[real].abs().max()))
        compared += 1
    assert compared == len(layers)
    return worst


@pytest.mark.parametrize("case", RUNS)
def test_maps_are_those_of_the_models_eager_attention(case: Case) -> None:
    model = use(model_of(case), case.implementations[-1])
    maps = attention_pattern(model, case.batch())
    assert apart(case, model, maps) < (1e-12 if case.label in IN_DOUBLE else 1e-6)


def gpt2(**settings: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=50, n_positions=96, initializer_range=0.3)
    return GPT2LMHeadModel(config).eval()


IDS = torch.arange(24)[None] % 50


def test_in_float32_and_through_an_observation() -> None:
    model = gpt2()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        own = model(IDS, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    with torch.no_grad(), observe(model, layers=[0], patterns=[(2, 1), (0, 3), (2, 0)]) as seen:
        model(IDS)
    for layer, head in ((2, 1), (0, 3), (2, 0)):
        assert torch.allclose(seen.pattern(layer, head), own[layer][:, head], atol=1e-6, rtol=0)
    assert {row.layer for row in seen.rows} == {0}  # statistics stay what was asked for
    with pytest.raises(LocaterError, match=r"layer 1, head 0 was not kept: observe\(model, patterns=\[\(1, 0\)\]\)"):
        seen.pattern(1, 0)
    assert not any(KEY in module.__dict__ for module in model.modules())


class Sizes(TorchDispatchMode):
    """How many floating-point numbers each operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor) and x.is_floating_point():
                self.largest = max(self.largest, x.numel())
        return out


def test_no_map_of_another_head_is_built() -> None:
    model, ids = gpt2(), torch.arange(96)[None] % 50
    with Sizes() as whole:
        attention_pattern(model, ids)
    with Sizes() as one:
        attention_pattern(model.transformer, ids, layers=[1], heads=[2])
    assert whole.largest == 4 * 96 * 96
    assert one.largest < 2 * 96 * 96  # one map, and the hidden units of an MLP


@pytest.mark.parametrize("attention", ["softmax", "sigmoid", "learned_sink"])
def test_own_models_and_their_mechanisms(attention: str) -> None:
    torch.manual_seed(0)
    shape = Shape(vocabulary=32, layers=2, width=32, heads=4, kv_heads=2, hidden=32, attention=attention)
    model, ids = Transformer(shape, scale=0.3).double().eval(), torch.arange(12)[None]
    maps = attention_pattern(model, ids, heads=[1, 3])
    hidden, n = torch.ones(12, 12).triu(1).bool(), torch.arange(1, 13).double()[:, None]
    with torch.no_grad():
        x, turn = model.model.embed(ids)
        for number, block in enumerate(model.model.layers):
            q, k, _ = block.self_attn.operands(block.input_layernorm(x), turn)
            logits = (q @ k.repeat_interleave(2, 1).mT * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
            expected = {
                "softmax": logits.softmax(-1),
                "sigmoid": torch.sigmoid(logits - n.log()),
                "learned_sink": logits.exp() / (1 + logits.exp().sum(-1, keepdim=True)),  # sinks are 0 at first
            }[attention]
            for head in (1, 3):
                assert torch.allclose(maps[number, head], expected[:, head], atol=1e-12)
            x = block(x, turn)
    assert len(maps) == 4


def test_maps_after_a_control_has_replaced_the_softmax() -> None:
    other = gpt2().double()
    plain = attention_pattern(other, IDS)
    control = SwapMechanism("linear").attach(other)
    changed = attention_pattern(other, IDS, layers=[0], heads=[2])[0, 2]
    control.detach()
    with torch.no_grad():
        attn = other.transformer.h[0].attn
        y = other.transformer.h[0].ln_1(other.transformer.wte(IDS) + other.transformer.wpe(torch.arange(24)))
        q, k, _ = (z.unflatten(-1, (4, -1)).transpose(1, 2) for z in attn.c_attn(y).split(32, -1))
        expected = mechanism("linear").map(q, k, causal=True)[:, 2]
    assert torch.allclose(changed, expected, atol=1e-12)
    assert not torch.allclose(changed, plain[0, 2], atol=1e-3)


def test_bad_input_is_one_line_and_leaves_nothing_attached() -> None:
    model = gpt2()
    for call, match in (
        (lambda: attention_pattern(model, IDS, layers=[7]), "layers=.7.: there are 3"),
        (lambda: attention_pattern(model, IDS, heads=[4]), "heads=.4.: there are 4"),
        (lambda: attention_pattern(model, IDS, layers="all"), "layers='all': give indices such as"),  # type: ignore[arg-type]
        (lambda: attention_pattern(model, IDS, layers=[0.5]), r"layers=\[0.5\]: give indices"),  # type: ignore[list-item]
        (lambda: attention_pattern(model, IDS, heads=True), "heads=True: give indices"),
        (lambda: observe(model, patterns=(0, 1)), r"patterns=\(0, 1\): give pairs"),  # type: ignore[arg-type]
        (lambda: observe(model, patterns=[("a", 0)]), "patterns=.*: give pairs"),  # type: ignore[list-item]
        (lambda: attention_pattern(model, "text"), "inputs are a str"),  # type: ignore[arg-type]
        (lambda: attention_pattern(model, {"pixels": IDS}), "does not run on these inputs"),
        (lambda: observe(model, patterns=[(0, 9)]), r"patterns: \(0, 9\): there are 3 layers of 4 heads"),
        (lambda: observe(model, patterns=[(5, 0)]), r"patterns: \(5, 0\): there are 3 layers, numbered"),
    ):
        with pytest.raises(LocaterError, match=match) as caught:
            call()
        assert "\n" not in str(caught.value)
    assert not any(KEY in module.__dict__ for module in model.modules())
    shared = next(case for case in CASES if case.label == "albert")
    with pytest.raises(LocaterError, match="called 3 times in one run of the model, so its maps cannot be told apart"):
        attention_pattern(model_of(shared), shared.batch())


def test_indices_of_numpy_and_torch_are_indices() -> None:
    model = gpt2()
    for layers in (np.array([0, 2]), torch.tensor([2, 0]), range(0, 3, 2)):
        assert {layer for layer, _ in attention_pattern(model, IDS, layers=layers)} == {0, 2}  # type: ignore[arg-type]
    assert list(attention_pattern(model, IDS, layers=[1], heads=np.int64(1))) == [(1, 2)]  # type: ignore[arg-type]


def test_copies_are_not_observed_and_the_name_is_the_functions() -> None:
    model = gpt2()
    with observe(model, patterns=[(0, 0)]) as seen, torch.no_grad():
        model(IDS)
        twin, first = copy.deepcopy(model), seen.pattern(0, 0)
        twin(IDS.flip(1))
    assert seen.pattern(0, 0) is not first or torch.equal(seen.pattern(0, 0), first)
    assert torch.equal(seen.pattern(0, 0), first)
    assert locater.attention_pattern is attention_pattern


@pytest.mark.slow
def test_compiled_and_under_flex_attention() -> None:
    model = gpt2()
    plain = attention_pattern(model, IDS, layers=[1])
    with torch.no_grad(), observe(torch.compile(model, backend="eager"), patterns=[(1, 2)]) as seen:
        seen.model(IDS)
    assert torch.allclose(seen.pattern(1, 2), plain[1, 2], atol=1e-6)
    case = next(case for case in CASES if case.label == "llama")
    llama = use(model_of(case).float(), "sdpa")
    fused = attention_pattern(llama, case.batch())
    llama.set_attn_implementation("flex_attention")  # type: ignore[operator]
    flexible = attention_pattern(llama, case.batch())
    assert all(torch.allclose(flexible[at], fused[at], atol=1e-5) for at in fused)
