"""Live models whose layers compute with more than they store: adapters of peft, parametrizations of PyTorch."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import locater
from locater.control import Control, LocAteR, Mimetic, QKClip
from locater.discovery import attention_layers
from locater.errors import LocaterError
from locater.sources.weights import ModuleWeights
from tests.families import CASES
from tests.parity import model_of

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
IDS = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))
KINDS: dict[str, dict[str, Any]] = {
    "lora": {}, "rslora": dict(use_rslora=True), "dora": dict(use_dora=True), "dropout": dict(lora_dropout=0.5),
    "dora-dropout": dict(use_dora=True, lora_dropout=0.5),
}  # fmt: skip
MAPS = {"llama": ["q_proj", "k_proj", "v_proj"], "gpt2": ["c_attn"], "llama-wide-heads-biased": ["q_proj", "k_proj"]}


def plain(label: str) -> nn.Module:
    return model_of(next(case for case in CASES if case.label == label))


def adapted(label: str, **kw: Any) -> Any:
    """A model under an adapter that has been trained: nothing is at its start, where many mistakes cannot be seen."""
    import peft  # seconds, which only the process that runs these tests spends

    kw.setdefault("target_modules", MAPS[label])
    model = peft.get_peft_model(plain(label), peft.LoraConfig(r=3, lora_alpha=5, **kw), autocast_adapter_dtype=False)
    trained(model)
    return model.eval()


@torch.no_grad()
def trained(model: nn.Module, seed: int = 7) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if "lora_B" in name or "lora_A" in name:
            p.copy_(0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
        elif "magnitude" in name:
            p.mul_(1.5)


def wrapped(model: nn.Module) -> dict[str, Any]:
    return {name: m for name, m in model.named_modules() if hasattr(m, "base_layer")}


@torch.no_grad()
def computed(layer: Any) -> tuple[Tensor, Tensor]:
    """(W (out, in), bias) that a layer applies, from what it does to unit vectors."""
    width = layer.in_features
    bias = layer(torch.zeros(1, width, dtype=torch.float64))[0]
    return (layer(torch.eye(width, dtype=torch.float64)) - bias).T, bias


def agrees(model: nn.Module) -> None:
    weights = ModuleWeights(model)
    found = wrapped(model)
    assert found
    for name, layer in found.items():
        W, bias = computed(layer)
        ours = weights.read(f"{name}.weight")
        assert weights.shape(f"{name}.weight") == tuple(ours.shape)
        assert torch.allclose(ours.mT if layer.fan_in_fan_out else ours, W, atol=1e-12), name
        if f"{name}.bias" in weights.names():
            assert torch.allclose(weights.read(f"{name}.bias"), bias, atol=1e-12), name


@pytest.mark.parametrize("label", MAPS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_read_as_it_computes(label: str, kind: str) -> None:
    model = adapted(label, **KINDS[kind])
    agrees(model)
    base = plain(label)
    stem = next(iter(wrapped(model)))
    assert not torch.allclose(
        ModuleWeights(model).read(f"{stem}.weight"),
        ModuleWeights(base).read(f"{stem.removeprefix('base_model.model.')}.weight"),
    )


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_merged_switched_off_and_several(kind: str) -> None:
    import peft

    model = adapted("llama", **KINDS[kind])
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=MAPS["llama"], **KINDS[kind]))
    model.double()
    trained(model, 8)
    for active in ("second", "default", ["default", "second"]):
        model.base_model.set_adapter(active)
        agrees(model)
    with model.disable_adapter():
        agrees(model)
    model.merge_adapter()
    agrees(model)
    with model.disable_adapter(), pytest.raises(LocaterError, match="merged and switched off"):
        ModuleWeights(model).read(f"{next(iter(wrapped(model)))}.weight")


def test_a_bias_of_the_adapter_counts() -> None:
    model = adapted("llama-wide-heads-biased", lora_bias=True)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("lora_B.default.bias"):
                p.fill_(0.7)
    agrees(model)


@pytest.mark.parametrize("kind", ["lora", "dora"])
@torch.no_grad()
def test_adapters_in_sixteen_bits_are_added_in_more(kind: str) -> None:
    """A layer adds what its base and its adapter give, so the sum of their maps is nowhere rounded to 16 bits."""
    exact = adapted("llama", **KINDS[kind])
    for p in exact.parameters():
        p.copy_(p.bfloat16())
    wanted = {name: ModuleWeights(exact).read(f"{name}.weight") for name in wrapped(exact)}
    stored = ModuleWeights(exact.to(torch.bfloat16))
    for name, W in wanted.items():
        assert (stored.read(f"{name}.weight") - W).norm() / W.norm() < 1e-6, name


def test_dropout_of_a_training_step_does_not_reach_the_reading() -> None:
    model = adapted("llama", lora_dropout=0.5)
    before = [layer.query.weight().clone() for layer in attention_layers(model)]
    model.train()
    assert all(torch.equal(layer.query.weight(), q) for layer, q in zip(attention_layers(model), before, strict=True))


@pytest.mark.parametrize("label", ["llama", "gpt2"])
def test_scan_and_observe_see_what_the_merged_model_shows(label: str) -> None:
    model = adapted(label, use_dora=True, modules_to_save=["input_layernorm"] if label == "llama" else None)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "modules_to_save" in name:
                p.mul_(1.3)
    ours = locater.scan(model)
    with locater.observe(model) as seen, torch.no_grad():
        model(IDS)
    merged = model.merge_and_unload()
    theirs = locater.scan(merged)
    with locater.observe(merged) as again, torch.no_grad():
        merged(IDS)
    assert [row.frobenius_sq for row in ours.rows] == pytest.approx([row.frobenius_sq for row in theirs.rows], rel=1e-6)
    assert [row.M for row in ours.rows] == pytest.approx([row.M for row in theirs.rows], rel=1e-6)
    assert [row.entropy for row in seen.rows] == pytest.approx([row.entropy for row in again.rows], rel=1e-6)
    assert [row.M for row in ours.rows] != pytest.approx([row.M for row in locater.scan(plain(label)).rows], rel=1e-2)


@pytest.mark.parametrize("label", ["llama", "gpt2"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_the_penalty_trains_the_adapter(label: str, kind: str) -> None:
    model = adapted(label, **KINDS[kind])
    control = LocAteR().attach(model)
    loss = control.loss()
    loss.backward()
    reached = {name: float(p.grad.abs().max()) for name, p in model.named_parameters() if p.grad is not None}
    wanted = [n for n, p in model.named_parameters() if p.requires_grad and ".v_proj." not in n]
    assert reached.keys() == set(wanted)
    assert min(reached.values()) > 0
    assert kind == "lora" or any("magnitude" in name for name in reached)
    # along the gradient of lora_A, the penalty of the merged model falls as the gradient says
    a = next(p for n, p in model.named_parameters() if "lora_A" in n)
    step = 1e-6
    with torch.no_grad():
        slope = float(a.grad.square().sum())
        a.sub_(step * a.grad)
    if kind == "lora":  # DoRA takes its norm as a constant
        assert float((loss - control.loss()).detach()) / step == pytest.approx(slope, rel=1e-3)
    now = float(control.loss().detach())
    merged = LocAteR().attach(model.merge_and_unload().requires_grad_(True)).loss()
    assert now == pytest.approx(float(merged.detach()), rel=1e-9)


def test_the_penalty_of_an_adapted_model_is_one_graph() -> None:
    control = LocAteR().attach(adapted("llama"))
    torch._dynamo.reset()
    found = torch._dynamo.explain(control.loss)()
    assert found.graph_break_count == 0, found.break_reasons


@pytest.mark.parametrize("control", [Mimetic(), QKClip()])
def test_controls_that_write_weights_refuse_adapters_before_they_write(control: Control) -> None:
    """Only the second layer is adapted: the first must not have been written when that is noticed."""
    model = adapted("llama", layers_to_transform=[1])
    state = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(LocaterError, match=r"layers.1.self_attn: its query and key maps are more than stored"):
        control.attach(model)
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    assert control.model is None


def test_other_adapters_are_refused_by_name() -> None:
    import peft

    config = peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    model = peft.get_peft_model(plain("llama"), config)
    with pytest.raises(
        LocaterError, match=r"self_attn.k_proj.weight: adapters of kind ia3 Linear are not read: merge_and_unload"
    ):
        locater.scan(model)


def test_parametrizations_are_read_as_computed_and_not_stepped() -> None:
    model = plain("llama").train()
    query, key = (model.get_submodule(f"model.layers.0.self_attn.{part}_proj") for part in "qk")
    parametrizations.weight_norm(query)
    parametrizations.spectral_norm(key)
    with torch.no_grad():
        query.parametrizations.weight.original0.mul_(2)
        u = key.parametrizations.weight[0]._u.clone()
    layer = attention_layers(model)[0]
    shown = layer.key.weight()
    assert torch.equal(key.parametrizations.weight[0]._u, u)
    assert key.parametrizations.weight[0].training
    model.eval()
    assert torch.equal(layer.query.weight(), query.weight)
    assert torch.equal(shown, key.weight)
    assert layer.query.shape == tuple(query.weight.shape)
    loss = LocAteR().attach(model).loss()
    loss.backward()
    assert float(query.parametrizations.weight.original0.grad.abs().max()) > 0
