"""Heads taken away from a running model: the same as changing its weights by hand."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import locater
from locater.control import Surgery, carried_changes
from locater.discovery import attention_layers
from locater.errors import LocaterError
from locater.explain.replayed_pass import main_output
from locater.observing.run_model import run_model
from tests.families import CASES
from tests.observing.test_layers_by_calls import tiny
from tests.parity import model_of, tokens

TOLERANCE = 1e-6
BY_LABEL = {case.label: case for case in CASES}
# by the interface of transformers; among fused attention, softmax by hand, einsum, PyTorch's function; towers, stacks
FAMILIES = "llama gpt2 gemma3 gpt_oss deepseek_v3 bert albert vit t5 whisper falcon bloom gptj mpnet xlnet deberta_v2"
OTHERS = "torch-transformer-pre timm-head-norms clip-vision"
DISCOVERED = {"glm": "o_proj", "mpt": "out_proj", "codegen": "out_proj"}  # without a record, and their output map


def run(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    out = main_output(run_model(model, batch))
    assert out is not None
    return out.nan_to_num()  # some make NaN of padding


@torch.no_grad()
def without_columns(model: nn.Module, batch: dict[str, Tensor], weight: Tensor, columns: slice) -> Tensor:
    """The output with columns of an output map zeroed by hand."""
    before = weight[:, columns].clone()
    weight[:, columns] = 0
    try:
        return run(model, batch)
    finally:
        weight[:, columns] = before


def apart(x: Tensor, y: Tensor) -> float:
    return float((x - y).abs().max() / y.std())


@pytest.mark.parametrize("label", [*FAMILIES.split(), *OTHERS.split()])
def test_a_removed_head_is_a_head_without_columns(label: str) -> None:
    model, batch = model_of(BY_LABEL[label]), BY_LABEL[label].batch()
    layers = attention_layers(model)
    layer, head = len(layers) // 2, layers[len(layers) // 2].heads - 1
    out = layers[layer].out
    assert out is not None
    weight, size = out.weight(), out.shape[1] // layers[layer].heads
    assert any(weight.untyped_storage().data_ptr() == p.untyped_storage().data_ptr() for p in model.parameters())
    plain, by_hand = run(model, batch), without_columns(model, batch, weight, slice(head * size, (head + 1) * size))
    with locater.without(model, [(layer, head)]):
        removed = run(model, batch)
    assert apart(removed, by_hand) < TOLERANCE < apart(removed, plain)
    assert torch.equal(run(model, batch), plain)


@pytest.mark.parametrize("kind", DISCOVERED)
def test_the_same_in_a_model_without_a_record(kind: str) -> None:
    model, batch = tiny(kind)
    layers = attention_layers(model)
    assert all(layer.provenance == "discovered" for layer in layers)
    weight = model.get_submodule(f"{layers[1].name}.{DISCOVERED[kind]}").weight
    size = weight.shape[1] // layers[1].heads
    by_hand = without_columns(model, batch, weight, slice(2 * size, 3 * size))
    with locater.without(model, [(1, 2)]):
        removed = run(model, batch)
    assert apart(removed, by_hand) < TOLERANCE < apart(run(model, batch), by_hand)


@pytest.mark.parametrize("in_place", [False, True])
def test_the_same_in_a_compiled_model(in_place: bool) -> None:
    model, batch = model_of(BY_LABEL["llama"]), tokens()
    weight = attention_layers(model)[1].out.weight()  # type: ignore[union-attr]
    compiled: Any = model
    if in_place:
        model.compile(backend="eager")
    else:
        compiled = torch.compile(model, backend="eager")
    plain = run(compiled, batch)
    size = weight.shape[1] // 4
    with torch.compiler.set_stance("force_eager"):
        by_hand = without_columns(model, batch, weight, slice(size, 2 * size))
    with locater.without(compiled, [(1, 1)]):
        assert apart(run(compiled, batch), by_hand) < TOLERANCE < apart(by_hand, plain)
    assert apart(run(compiled, batch), plain) < TOLERANCE


def llama(**settings: Any) -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4)
    config = MistralConfig(**sizes, intermediate_size=48, vocab_size=64, initializer_range=0.3, **settings)
    return MistralForCausalLM(config).double().eval()


def test_even_weights_are_those_of_a_query_of_zeros() -> None:
    model, batch = llama(sliding_window=None), tokens()
    with locater.without(model, [(0, 2)], "uniform"):
        even = run(model, batch)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[16:24] = 0
    assert apart(even[:, 3:], run(model, batch)[:, 3:]) < TOLERANCE  # a row of padding that sees no key has no weights


@pytest.mark.parametrize("pads", [0, 3])
def test_a_window_is_that_of_the_model(pads: int) -> None:
    free, batch = llama(sliding_window=None), tokens(pads=pads)
    windowed = llama(sliding_window=3)
    every = [(layer, head) for layer in range(2) for head in range(4)]
    with locater.without(free, every, "window", window=3, sinks=0):
        assert apart(run(free, batch)[:, pads:], run(windowed, batch)[:, pads:]) < TOLERANCE
    with locater.without(free, every, "window", window=9, sinks=0):
        wide = run(free, batch)
    assert apart(wide[:, pads:], run(free, batch)[:, pads:]) < TOLERANCE
    with locater.without(free, every, "window", window=1, sinks=8):
        assert apart(run(free, batch)[:, pads:], wide[:, pads:]) < TOLERANCE


def test_rounded_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.mistral import modeling_mistral

    model, batch = llama(sliding_window=None), tokens(pads=0)
    rotate = modeling_mistral.apply_rotary_pos_emb
    with locater.without(model, [(1, 3)], "bits", bits=2):
        rounded = run(model, batch)

    calls: list[int] = []

    def rotate_and_round(q: Tensor, k: Tensor, *args: Any, **kw: Any) -> tuple[Tensor, Tensor]:
        q, k = rotate(q, k, *args, **kw)
        calls.append(1)
        if len(calls) == 2:
            k, part = k.clone(), k[:, 3]
            low, high = part.min(1, keepdim=True).values, part.max(1, keepdim=True).values
            k[:, 3] = low + ((part - low) * 3 / (high - low)).round() * (high - low) / 3
        return q, k

    plain = run(model, batch)
    monkeypatch.setattr(modeling_mistral, "apply_rotary_pos_emb", rotate_and_round)
    by_hand = run(model, batch)
    assert apart(rounded, by_hand) < TOLERANCE < apart(by_hand, plain)


def test_a_mean_is_over_all_tokens_of_the_call() -> None:
    model, batch = llama(sliding_window=None), tokens(pads=0)
    out = model.model.layers[1].self_attn.o_proj

    def replace(module: nn.Module, args: tuple[Tensor]) -> Tensor:
        x = args[0].clone()
        x[..., 8:16] = x[..., 8:16].mean((0, 1))
        return x

    with out.register_forward_pre_hook(replace):  # type: ignore[attr-defined]
        by_hand = run(model, batch)
    with locater.without(model, [(1, 1)], "mean"):
        assert apart(run(model, batch), by_hand) < TOLERANCE


@pytest.mark.parametrize("label", ["llama", "gptj"])
def test_a_copy_lacks_the_same_heads(label: str) -> None:
    model, batch = model_of(BY_LABEL[label]), tokens()
    plain = run(model, batch)
    with locater.without(model, [(1, 0)]):
        less = run(model, batch)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        assert [change.module for change in carried_changes(model)] == [attention_layers(model)[1].name]
    assert torch.equal(run(model, batch), plain)
    assert not torch.equal(less, plain)
    assert all(torch.equal(run(other, batch), less) for other in copies)


def test_a_control_that_is_copied_with_its_model_puts_back_the_copy() -> None:
    model, batch = llama(sliding_window=None), tokens(pads=0)
    plain = run(model, batch)
    model.control = Surgery(heads=[(1, 0)]).attach(model)
    less = run(model, batch)
    other = copy.deepcopy(model)
    other.control.detach()
    assert torch.equal(run(other, batch), plain)
    assert torch.equal(run(model, batch), less)
    model.control.detach()
    assert torch.equal(run(model, batch), plain)


def test_gradients_pass_the_heads_that_stay() -> None:
    model, batch = llama(sliding_window=None), tokens(pads=0)
    with locater.without(model, [(1, 1)]):
        model(**batch).logits.square().sum().backward()
    gradient = model.model.layers[1].self_attn.v_proj.weight.grad
    assert bool((gradient[8:16] == 0).all())
    assert bool((gradient[:8] != 0).any())


def test_heads_and_skips_by_one_surgery() -> None:
    model, batch = llama(sliding_window=None), tokens(pads=0)
    plain = run(model, batch)
    control = Surgery(no_mlp=True, heads=[(0, 0)]).attach(model)
    both = run(model, batch)
    control.detach()
    with locater.without(model, [(0, 0)]):
        assert not torch.equal(run(model, batch), both)
    assert torch.equal(run(model, batch), plain)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"heads": [(2, 0)]}, "there are 2 layers, numbered"),
        ({"heads": [(1, 4)]}, "2 layers of 4 heads"),
        ({"heads": [3]}, "pairs of layer and head"),
        ({"heads": [(0, 0)], "mode": "none"}, "zero, mean, uniform, window, bits"),
        ({"heads": [(0, 0)], "mode": "bits", "bits": 0}, "bits=0"),
        ({"heads": [(0, 0)], "mode": "window", "window": 0}, "window=0"),
    ],
)
def test_what_cannot_be_removed_is_refused_in_a_line(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(LocaterError, match=words) as error, locater.without(llama(), **arguments):
        pass
    assert "\n" not in str(error.value)


def test_a_softmax_by_hand_shows_no_keys() -> None:
    model = model_of(BY_LABEL["gptj"])
    with locater.without(model, [(0, 0)], "bits"), pytest.raises(LocaterError, match="its keys are not known"):
        run(model, tokens())
