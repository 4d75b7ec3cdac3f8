"""Controls that act on weights: writing into any layout, mimetic initialisation, QK-Clip, sigma-Reparam."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from locater.control import LocAteR, Mimetic, QKClip, SigmaReparam
from locater.control.writing import rewrite
from locater.discovery import attention_layers
from locater.errors import LocaterError
from locater.layers import effective
from locater.layers.projection_with_norm import NormedProjection
from locater.observing import observe
from tests.families import CASES
from tests.parity import Case, model_of

IDS = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))
LAYOUTS = [
    "llama", "gpt2", "gpt_neox", "falcon", "falcon-groups", "phi3", "gptj", "cohere", "bert", "albert", "xlnet", "deberta_v2",
    "torch-encoder-pre", "t5", "clip", "timm",
]  # fmt: skip


def case_of(label: str) -> Case:
    return next(case for case in CASES if case.label == label)


def undropped(case: Case) -> nn.Module:
    """In training mode, where controls act, yet with nothing left to chance."""
    model = model_of(case)
    for module in model.modules():
        for name in ("dropout", "attention_dropout", "attn_dropout", "dropout_prob", "p"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model.train()


def run(case: Case, model: nn.Module) -> Any:
    with torch.no_grad():
        return case.call(model, case.batch()) if case.call else model(**case.batch())


# Writing


@pytest.mark.parametrize("label", LAYOUTS)
def test_a_written_map_is_read_back_and_nothing_else_moves(label: str) -> None:
    model = model_of(case_of(label))
    before = [
        (layer.query.weight().clone(), layer.key.weight().clone(), layer.value.weight().clone())
        for layer in attention_layers(model)
    ]
    number = len(before) - 1
    held = list(attention_layers(model))[number]
    noise = torch.randn(held.key.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    entries = {name: p.detach().clone() for name, p in model.named_parameters()}
    rewrite(model, held.name, lambda: list(attention_layers(model))[number].key, noise)
    for at, (layer, (query, key, value)) in enumerate(zip(attention_layers(model), before, strict=True)):
        assert torch.equal(layer.query.weight(), query)
        assert torch.equal(layer.value.weight(), value)
        assert torch.equal(layer.key.weight(), noise if at == number else key)
    assert sum(int((p != entries[name]).sum()) for name, p in model.named_parameters()) == noise.numel()


@pytest.mark.parametrize("label", ["llama-wide-heads-biased", "gpt2", "gpt_neox", "torch-encoder-post", "phi", "xlnet"])
def test_biases_are_written_too(label: str) -> None:
    model = model_of(case_of(label)).requires_grad_(False)
    held = list(attention_layers(model))[1]
    wanted = torch.arange(float(len(held.query.bias)), dtype=torch.float64)
    rewrite(model, held.name, lambda: list(attention_layers(model))[1].query, bias=wanted)
    again = list(attention_layers(model))[1]
    assert torch.equal(again.query.bias, wanted)
    assert torch.equal(again.query.weight(), held.query.weight())
    assert not any(p.requires_grad for p in model.parameters())


def test_a_map_that_is_computed_is_put_back_and_refused() -> None:
    model = model_of(case_of("llama"))
    SigmaReparam(only="query-key").attach(model)
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(LocaterError, match=r"model.layers.0.self_attn: its query and key maps are more than stored"):
        Mimetic().attach(model)
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())


# Mimetic initialisation


def means(model: nn.Module) -> list[Tensor]:
    """M of every group, layer by layer."""
    layers = [layer for layer in attention_layers(model) if layer.kind == "self"]
    return [(x.scale * effective(x).moments().trace).detach().unflatten(0, (x.kv_heads, -1)).mean(1) for x in layers]


@pytest.mark.parametrize("label", [*LAYOUTS, "llama-rope-yarn", "gpt_oss", "bloom", "dinov2", "whisper"])
@pytest.mark.parametrize("target", [2.0, -0.5])
def test_every_head_starts_with_the_wanted_mean(label: str, target: float) -> None:
    model = model_of(case_of(label))
    queries = [layer.query.weight().clone() for layer in attention_layers(model)]
    control = Mimetic(target).attach(model)
    for found in means(model):
        assert torch.allclose(found, torch.full_like(found, target), atol=1e-9)
    assert all(torch.equal(layer.query.weight(), q) for layer, q in zip(attention_layers(model), queries, strict=True))
    assert float(control.loss()) == 0


@pytest.mark.parametrize(
    "label", ["qwen3", "gemma3", "olmo2", "stablelm-normed", "cohere-normed", "phi-normed", "timm-head-norms"]
)
def test_and_so_it_does_under_norms_on_queries_and_keys(label: str) -> None:
    model = model_of(case_of(label))
    Mimetic(0.75).attach(model)
    for found in means(model):
        assert torch.allclose(found, torch.full_like(found, 0.75), atol=1e-8)


def test_mimetic_refuses_what_it_cannot_reach() -> None:
    model = model_of(case_of("olmo2"))
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(
        LocaterError, match=r"layers.0.self_attn: norms .* bound the self-logit .* target=50.0 is beyond it"
    ):
        Mimetic(50.0).attach(model)
    with pytest.raises(LocaterError, match="narrow latent"):
        Mimetic().attach(model_of(case_of("deepseek_v3")))
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())


def test_mimetic_is_a_start_and_stays_when_detached() -> None:
    model = model_of(case_of("gpt2")).float()
    keys = list(model.state_dict())
    control = Mimetic(1.5, layers=[1]).attach(model)
    other, chosen = means(model)
    assert torch.allclose(chosen, torch.full_like(chosen, 1.5), atol=1e-5)
    assert not torch.allclose(other, torch.full_like(other, 1.5), atol=0.1)
    control.detach()
    assert torch.equal(means(model)[1], chosen)
    assert list(model.state_dict()) == keys


# QK-Clip


CLIPPED = [
    "llama", "llama-wide-heads-biased", "gpt2", "gpt_neox", "bert", "opt", "falcon", "falcon-groups", "phi3", "gptj", "cohere", "granite",
    "albert-unshared", "torch-encoder-pre", "dinov2", "timm", "gpt_oss", "deepseek_v3", "deepseek_v3-plain-query", "deepseek_v2",
]  # fmt: skip


@pytest.fixture
def clip() -> Iterator[Callable[..., QKClip]]:
    """`clip(model, limit)`: attached, and detached when the test is over, however it ends."""
    made: list[QKClip] = []

    def attach(model: nn.Module, *args: Any, **kw: Any) -> QKClip:
        made.append(QKClip(*args, **kw).attach(model))
        return made[-1]

    yield attach
    for control in made:
        control.detach()


def first_layer(case: Case, model: nn.Module) -> Tensor:
    """Largest logit of every head of layer 0, whose input no clipping changes."""
    with observe(model, layers=[0]) as seen:
        run(case, model)
    return torch.tensor([row.max_logit for row in seen.rows])


@pytest.mark.parametrize("label", CLIPPED)
def test_the_same_batch_then_reaches_the_limit_and_no_more(label: str, clip: Callable[..., QKClip]) -> None:
    case = case_of(label)
    model = undropped(case)
    before = first_layer(case, model)
    limit = 0.7 * float(before.sort().values[len(before) // 2])
    untouched = effective(attention_layers(model)[0]).query.detach().clone()
    control = clip(model, limit)
    run(case, model)
    control.after_step()
    control.detach()
    after, over = first_layer(case, model), before > limit
    assert bool(over.any())
    assert torch.allclose(after[over], torch.full_like(after[over], limit), rtol=1e-4)
    assert torch.allclose(after[~over], before[~over], rtol=1e-6)
    if not isinstance(attention_layers(model)[0].query, NormedProjection):
        assert torch.equal(effective(attention_layers(model)[0]).query[~over], untouched[~over])


@pytest.mark.parametrize(("alpha", "shares"), [(0.5, (0.5, 0.5)), (1.0, (1.0, 0.0)), (0.25, (0.25, 0.75))])
def test_alpha_shares_the_scaling(alpha: float, shares: tuple[float, float], clip: Callable[..., QKClip]) -> None:
    case = case_of("gpt2")
    model = undropped(case)
    was = attention_layers(model)[0]
    q, k, bias, v = (
        was.query.weight().clone(),
        was.key.weight().clone(),
        was.key.bias.clone(),
        was.value.weight().clone(),
    )
    top = first_layer(case, model)
    control = clip(model, float(top.max()) / 2, alpha)
    run(case, model)
    control.after_step()
    head, now = int(top.argmax()), attention_layers(model)[0]
    rows = slice(head * now.head_dim, (head + 1) * now.head_dim)
    assert torch.allclose(now.query.weight()[rows], q[rows] * 0.5 ** shares[0], rtol=1e-6)
    assert torch.allclose(now.key.weight()[rows], k[rows] * 0.5 ** shares[1], rtol=1e-6)
    assert torch.allclose(now.key.bias[rows], bias[rows] * 0.5 ** shares[1], rtol=1e-6)
    assert torch.equal(now.value.weight(), v)


def test_grouped_keys_are_left_to_the_other_heads(clip: Callable[..., QKClip]) -> None:
    case = case_of("llama")
    model = undropped(case)
    keys = [layer.key.weight().clone() for layer in attention_layers(model)]
    control = clip(model, 0.5)
    run(case, model)
    control.after_step()
    assert control.clipped > 0
    assert all(torch.equal(layer.key.weight(), k) for layer, k in zip(attention_layers(model), keys, strict=True))


def test_it_looks_at_every_nth_step_and_only_at_training(clip: Callable[..., QKClip]) -> None:
    case = case_of("gpt2")
    model = undropped(case)
    control = clip(model, 0.1, every=2)
    run(case, model)
    control.after_step()
    clipped = control.clipped
    run(case, model)
    control.after_step()
    assert control.clipped == clipped > 0
    model.eval()
    run(case, model)
    with pytest.raises(LocaterError, match="no training pass since the last step"):
        control.after_step()


def test_a_limit_that_is_not_reached_changes_nothing(clip: Callable[..., QKClip]) -> None:
    case = case_of("gpt2")
    model = undropped(case)
    state, attributes = copy.deepcopy(model.state_dict()), sorted(vars(model))
    control = clip(model)
    run(case, model)
    control.after_step()
    control.detach()
    assert control.clipped == 0
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    assert sorted(vars(model)) == attributes


@pytest.mark.parametrize(
    ("label", "why"),
    [
        ("qwen3", "norm"), ("gemma3", "norm"), ("olmo2", "norm"), ("stablelm-normed", "norm"),
        ("t5", "position bias"), ("bloom", "position bias"), ("xlnet", "relative terms"), ("gemma2", "soft cap"),
    ],
)  # fmt: skip
def test_clip_refuses_models_whose_logits_do_not_follow_the_maps(label: str, why: str) -> None:
    with pytest.raises(LocaterError, match=rf"0\..*{why}.*QK-Clip does not apply"):
        QKClip().attach(model_of(case_of(label)))


@pytest.mark.parametrize("options", [dict(limit=0.0), dict(limit=math.nan), dict(alpha=2.0), dict(every=0)])
def test_bad_options_of_clip_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(LocaterError, match=f"{next(iter(options))}="):
        QKClip(**options)


# sigma-Reparam


def outputs(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("label", ["gpt2", "llama", "gpt_neox", "deepseek_v3"])
def test_outputs_stay_when_it_comes_and_when_it_goes(label: str) -> None:
    model = undropped(case_of(label)).float()
    keys, before, kinds = list(model.state_dict()), outputs(model.eval()), [type(m) for m in model.modules()]
    parameters = [id(p) for p in model.parameters()]
    control = SigmaReparam().attach(model)
    assert torch.allclose(outputs(model), before, atol=1e-5)
    assert list(model.state_dict()) != keys
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    model.train()
    for _ in range(2):
        optimizer.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
    trained = outputs(model.eval())
    assert not torch.allclose(trained, before, atol=1e-3)
    control.detach()
    assert torch.allclose(outputs(model), trained, atol=1e-5)
    assert list(model.state_dict()) == keys
    assert [type(m) for m in model.modules()] == kinds
    assert [id(p) for p in model.parameters()] == parameters


def test_gamma_is_the_spectral_norm_of_every_map() -> None:
    model = model_of(case_of("gpt2"))
    control = SigmaReparam(gamma=1.0, layers=[1]).attach(model)
    norms = {
        name: float(torch.linalg.matrix_norm(m.weight.detach(), 2))
        for name, m in model.named_modules()
        if type(m).__name__.endswith("Conv1D")
    }
    assert len(control.parts) == 4
    for name, norm in norms.items():
        assert (norm == pytest.approx(1, abs=1e-9)) is (".h.1." in name), name


@pytest.mark.parametrize(
    ("label", "count"), [("llama", 4), ("gpt2", 2), ("torch-encoder-pre", 2), ("xlnet", 4), ("albert", 2)]
)
def test_only_query_and_key_maps(label: str, count: int) -> None:
    model = model_of(case_of(label))
    control = SigmaReparam(gamma=0.5, only="query-key").attach(model)
    assert len(control.parts) == count
    for place, _ in control.tensors:
        weight = getattr(place.module, place.attribute).detach().flatten(1)
        assert float(torch.linalg.matrix_norm(weight, 2)) == pytest.approx(0.5, abs=1e-9)
    control.detach()


def test_one_step_of_power_iteration_per_training_pass_and_none_for_a_look() -> None:
    model = undropped(case_of("llama"))
    control = SigmaReparam(only="query-key").attach(model)
    place, part = control.tensors[0][0], control.parts[0]
    with torch.no_grad():
        original = place.module.parametrizations[place.attribute].original
        original.add_(torch.randn(original.shape, dtype=original.dtype, generator=torch.Generator().manual_seed(3)))
    u = part.u.clone()
    LocAteR().attach(model).loss()
    attention_layers(model)[0].query.weight()
    assert torch.equal(part.u, u)
    outputs(model.eval())
    assert torch.equal(part.u, u)
    model.train().gradient_checkpointing_enable()
    model(IDS, labels=IDS).loss.backward()
    v = original @ u
    v = v / v.norm()
    want = original.mT @ v
    assert torch.allclose(part.u, want / want.norm(), atol=1e-12)
    assert torch.allclose(part.v, v, atol=1e-12)


def test_sigma_is_differentiated_and_its_vectors_are_not() -> None:
    model = undropped(case_of("llama"))
    control = SigmaReparam().attach(model)
    model(IDS, labels=IDS).loss.backward()
    for (place, _), part in zip(control.tensors, control.parts, strict=True):
        original = place.module.parametrizations[place.attribute].original
        along, size = (
            float((original.grad * original).sum().detach()),
            float((original.grad.norm() * original.norm()).detach()),
        )
        assert size > 0
        assert abs(along) < 1e-10 * size  # scaling W changes nothing
        assert float(part.gamma.grad.abs()) > 0
    part = control.parts[0]
    W = torch.randn(part.v.numel(), part.u.numel(), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(part, W)


def test_the_penalty_reaches_through_the_parametrization() -> None:
    model = model_of(case_of("gpt2"))
    want = LocAteR().attach(model).loss().detach()
    control = SigmaReparam().attach(model)
    loss = LocAteR().attach(model).loss()
    assert torch.allclose(loss.detach(), want, rtol=1e-9)
    loss.backward()
    assert float(control.parts[0].gamma.grad.abs()) > 0


def test_sigma_reparam_refuses_what_is_parametrized_and_bad_options() -> None:
    model = model_of(case_of("llama"))
    torch.nn.utils.parametrizations.weight_norm(model.get_submodule("model.layers.1.mlp.up_proj"))
    keys = list(model.state_dict())
    with pytest.raises(LocaterError, match=r"model.layers.1.mlp.up_proj.weight: it already has a parametrization"):
        SigmaReparam().attach(model)
    assert list(model.state_dict()) == keys
    for options in (dict(gamma="one"), dict(only="values"), dict(layers=[9])):
        with pytest.raises(LocaterError, match=f"{next(iter(options))}="):
            SigmaReparam(**options).attach(model_of(case_of("llama")))
