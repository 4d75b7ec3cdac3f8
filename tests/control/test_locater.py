"""LocAteR: the penalty is the one written with d x d matrices, in every layout; it has a floor; it sits in any training
step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from locater.control import LocAteR
from locater.discovery import attention_layers
from locater.errors import LocaterError
from locater.layers import effective
from tests.families import CASES
from tests.parity import Case, model_of

RAW = ("opt-post-norm", "electra-widened", "albert-unshared", "xlnet", "xlnet-causal-clamped")
SELF = [  # where a norm stands in front of attention, or of queries and keys; others are in test_units.py
    case
    for case in CASES
    if case.label not in ("roberta-cross", "torch-encoder-post", "torch-attention", "torch-transformer-post", *RAW)
]
# Their layers are folded by the same operations as those of another case; how each is read is tested in
# tests/families/test_parity.py. They run with the slow tests.
ALIKE = set(
    """
    albert-groups albert-inner bert-decoder camembert clip-classifier clip-text clip-text-projected clip-vision cohere2
    deberta_v2-keys-only deberta_v2-own-maps-conv dinov2 dinov2_with_registers distilbert electra falcon-alibi
    falcon-alibi-rounded falcon-groups-one-norm bloom-slow gemma3-both-ways granitemoe llama-rope-linear
    llama-rope-llama3 locater-causal locater-llama locater-masked locater-normed locater-qwen3 locater-sandwich
    mistral-window mixtral mpnet mt5 olmo3 qwen2-window qwen3_moe roberta roberta-decoder siglip siglip-text
    siglip-vision stablelm starcoder2 t5-encoder torch-transformer-pre umt5 xlm-roberta
    """.split()
)
IDS = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))


def case_of(label: str) -> Case:
    return next(case for case in CASES if case.label == label)


def explicit(model: nn.Module, shrink: float = 0.01, hold: float = 0.01, target: float = 2.0) -> Tensor:
    """Head by head from W itself, d x d."""
    total = torch.zeros((), dtype=torch.float64)
    for layer in attention_layers(model):
        if layer.kind == "cross":
            continue
        folded = effective(layer)
        for head in range(layer.heads):
            W = layer.scale * folded.query[head].mT @ folded.key[head // layer.group]
            total = total + shrink * ((W + W.mT) / 2).square().sum() + hold * (W.trace() - target) ** 2
    return total


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.label, marks=[pytest.mark.slow] * (case.label in ALIKE)) for case in SELF]
)
def test_penalty_and_gradient_are_those_of_the_explicit_map(case: Case) -> None:
    model = model_of(case)
    want = explicit(model)
    theirs = gradients(model, want)
    control = LocAteR().attach(model)
    loss = control.loss()
    ours = gradients(model, loss)
    assert loss.dtype == torch.float64
    assert float(loss.detach()) == pytest.approx(float(want.detach()), rel=1e-10)
    assert theirs
    for name, gradient in theirs.items():
        size = float(gradient.abs().max())
        assert torch.allclose(ours.get(name, torch.zeros_like(gradient)), gradient, atol=1e-9 * max(size, 1e-6)), name


@pytest.mark.parametrize(
    ("label", "names"),
    [
        ("gpt2", ["transformer.h.1.attn.c_attn.weight", "transformer.h.1.ln_1.weight"]),
        ("gpt_neox", ["gpt_neox.layers.0.attention.query_key_value.weight"]),
        ("llama", ["model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"]),
        ("albert", ["encoder.albert_layer_groups.0.albert_layers.0.attention.key.weight"]),
        ("torch-encoder-pre", ["layers.1.self_attn.in_proj_weight"]),
        ("deepseek_v3", ["model.layers.1.self_attn.q_b_proj.weight", "model.layers.1.self_attn.kv_b_proj.weight"]),
    ],
)
def test_gradients_arrive_in_fused_grouped_and_shared_maps(label: str, names: list[str]) -> None:
    model = model_of(case_of(label))
    found = gradients(model, LocAteR().attach(model).loss())
    for name in names:
        match = next(held for held in found if held.endswith(name))
        assert float(found[match].abs().max()) > 0


def test_values_of_a_fused_map_get_no_gradient() -> None:
    model = model_of(case_of("gpt2"))
    found = gradients(model, LocAteR().attach(model).loss())["transformer.h.0.attn.c_attn.weight"]
    assert float(found[:, 64:].abs().max()) == 0
    assert float(found[:, :64].abs().min()) > 0


def test_a_shared_layer_counts_once() -> None:
    case = case_of("albert")
    model = model_of(case)
    depths = model.config.num_hidden_layers
    assert depths > 1
    (query, _, scale), *rest = LocAteR().attach(model).maps()
    assert not rest
    assert len(query) == len(scale) == model.config.num_hidden_groups * model.config.inner_group_num < depths


@pytest.mark.parametrize("label", ["qwen3", "gemma3", "olmo2"])
def test_scaling_a_normalised_map_changes_neither_logits_nor_penalty(label: str) -> None:
    model = model_of(case_of(label))
    for name, module in model.named_modules():
        if name.endswith("norm"):
            for attribute in ("variance_epsilon", "eps"):
                if hasattr(module, attribute):
                    setattr(module, attribute, 0.0)
    control = LocAteR().attach(model)
    before, logits = control.loss().detach(), model(IDS).logits.detach()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("q_proj.weight"):
                p.mul_(3)
    assert torch.allclose(model(IDS).logits, logits, atol=1e-5)
    assert float(control.loss().detach()) == pytest.approx(float(before), rel=1e-5)


def descend(value: Callable[[Tensor, Tensor], Tensor], steps: int) -> tuple[list[float], Tensor]:
    """Gradient descent on a function of W_Q and W_K (4 x 8); the values on the way, and the last W."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(4, 8, generator=generator, dtype=torch.float64).mul_(0.3).requires_grad_() for _ in range(2))
    seen = []
    for _ in range(steps):
        loss = value(q, k)
        for x, g in zip((q, k), torch.autograd.grad(loss, (q, k)), strict=True):
            x.data -= 0.02 * g
        seen.append(float(loss.detach()))
        if seen[-1] < -1e6:
            break
    return seen, (q.mT @ k).detach()


def test_the_raw_trace_of_the_square_has_no_floor_and_this_penalty_has() -> None:
    raw, W = descend(lambda q, k: ((q.mT @ k) @ (q.mT @ k)).trace(), 200)
    assert raw[-1] < -1e6  # and on: each step goes lower than the last
    assert all(b < a for a, b in pairwise(raw))
    antisymmetric, symmetric = ((W - W.mT) / 2).square().sum(), ((W + W.mT) / 2).square().sum()
    assert antisymmetric > 10 * symmetric

    control = LocAteR(shrink=1.0, hold=1.0)
    ours, W = descend(lambda q, k: control.of(q[None], k[None], 0.5).sum(), 400)
    assert min(ours) > 0
    assert ours[-1] == pytest.approx(ours[-100], rel=1e-3)  # it has arrived
    assert ((W - W.mT) / 2).square().sum() < 10


def test_where_the_penalty_alone_comes_to_rest() -> None:
    """M = target / (1 + shrink / (hold d_head kappa)), with the concentration kappa of the map that was found."""
    torch.manual_seed(0)
    model = nn.MultiheadAttention(16, 2).double()
    control = LocAteR(shrink=0.5, hold=1.0, target=2.0, part="full").attach(model)
    ones = torch.ones(3, 2, 16, dtype=torch.float64)  # of a mean square of 1
    model(ones, ones, ones)
    optimizer = torch.optim.LBFGS(
        [model.in_proj_weight], max_iter=500, tolerance_grad=1e-10, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = control.loss()
        loss.backward()
        return loss

    optimizer.step(closure)
    layer = attention_layers(model)[0]
    m = effective(layer).moments()
    M = layer.scale * m.trace.detach()
    want = 2.0 / (1 + 0.5 / (1.0 * 8 * m.concentration.detach()))
    assert torch.allclose(M, want, atol=1e-5)
    assert float(M.max()) < 1.95


@pytest.mark.parametrize("part", ["symmetric", "full"])
def test_a_free_mean_is_never_rewarded(part: str) -> None:
    control = LocAteR(shrink=1.0, target="free", part=part)
    q, k = (
        torch.randn(64, 4, 8, generator=torch.Generator().manual_seed(0)),
        torch.randn(64, 4, 8, generator=torch.Generator().manual_seed(1)),
    )
    assert float(control.of(q, k, 1.0).min()) > 0
    rows = torch.linalg.qr(q.mT)[0].mT  # a projector: fully concentrated
    assert float(control.of(rows, 3 * rows, 1.0).abs().max()) < 1e-4


def test_chosen_layers_and_schedule() -> None:
    model = model_of(case_of("llama"))
    both = [float(LocAteR(layers=[i]).attach(model).loss().detach()) for i in (0, 1)]
    assert both[0] != pytest.approx(both[1])
    whole = LocAteR(schedule=lambda step: 1.0 if step < 1 else 0.25).attach(model)
    assert float(whole.loss().detach()) == pytest.approx(sum(both))
    whole.after_step()
    assert float(whole.loss().detach()) == pytest.approx(sum(both) / 4)


def test_autocast_does_not_touch_the_penalty() -> None:
    model = model_of(case_of("gpt2")).float()
    control = LocAteR().attach(model)
    plain = control.loss()
    with torch.autocast("cpu", torch.bfloat16):
        inside = control.loss()
    assert inside.dtype == torch.float32
    assert torch.equal(inside, plain)


def test_half_precision_weights_are_charged_in_float32() -> None:
    model = model_of(case_of("llama")).bfloat16()
    control = LocAteR().attach(model)
    want = explicit(model_of(case_of("llama")).bfloat16().double())
    assert control.loss().dtype == torch.float32
    assert float(control.loss().detach()) == pytest.approx(float(want.detach()), rel=1e-5)


def test_a_model_that_moves_to_another_dtype_is_read_again() -> None:
    model = model_of(case_of("gemma3")).float()
    control = LocAteR().attach(model)
    control.loss()
    model.double()
    assert float(control.loss().detach()) == pytest.approx(float(explicit(model).detach()), rel=1e-10)


def step_of(model: nn.Module, *controls: LocAteR) -> Callable[[Tensor], Tensor]:
    def step(ids: Tensor) -> Tensor:
        logits = model(ids, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        for control in controls:
            loss = loss + 100 * control.loss()
        return loss

    return step


def test_activation_checkpointing() -> None:
    model = model_of(case_of("llama")).train()
    step = step_of(model, LocAteR().attach(model))
    plain = gradients(model, step(IDS))
    model.gradient_checkpointing_enable()
    again = gradients(model, step(IDS))
    assert plain.keys() == again.keys()
    assert all(torch.allclose(again[name], g, atol=1e-12) for name, g in plain.items())


@pytest.mark.parametrize("label", ["gemma3", "deepseek_v3", "torch-encoder-pre"])  # llama is compiled whole below
def test_the_penalty_is_one_graph(label: str) -> None:
    control = LocAteR().attach(model_of(case_of(label)))
    torch._dynamo.reset()
    found = torch._dynamo.explain(control.loss)()
    assert found.graph_break_count == 0, found.break_reasons
    assert found.graph_count == 1


def test_a_compiled_training_step_keeps_one_graph() -> None:
    model = model_of(case_of("gpt2")).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    step = step_of(model, LocAteR().attach(model), LocAteR(form="measured").attach(model))
    eager = gradients(model, step(IDS))
    torch._dynamo.reset()
    # a graph that breaks is an error with fullgraph
    compiled = gradients(model, torch.compile(step, backend="aot_eager", fullgraph=True)(IDS))
    assert all(torch.allclose(compiled[name], g, atol=1e-10) for name, g in eager.items())


def test_a_compiled_penalty_follows_weights_and_schedule_without_compiling_again() -> None:
    model = model_of(case_of("llama"))
    control = LocAteR(schedule=lambda step: 1 / (1 + step)).attach(model)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(control.loss, backend=counter, fullgraph=True)
    for step in range(4):
        assert float(compiled().detach()) == pytest.approx(float(explicit(model).detach()) / (1 + step), rel=1e-6)
        control.after_step()
        with torch.no_grad():
            model.get_submodule("model.layers.0.self_attn.k_proj").weight.mul_(1.5)
    assert counter.frame_count == 1


def test_what_cannot_be_controlled_is_refused_in_one_line() -> None:
    with pytest.raises(LocaterError, match="no attention found"):
        LocAteR().attach(nn.Linear(4, 4))
    model = model_of(case_of("llama"))
    for name, p in model.named_parameters():
        p.requires_grad_("q_proj" not in name and "k_proj" not in name)  # gains in front of them are trained
    with pytest.raises(LocaterError, match="none of its query and key maps is trained"):
        LocAteR().attach(model)
    with pytest.raises(LocaterError, match=r"layers=\[7\]: there are 2"):
        LocAteR(layers=[7]).attach(model)
    control = LocAteR()
    with pytest.raises(LocaterError, match="not attached"):
        control.loss()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(part="upper"), "part='upper': choose symmetric, full or frobenius"),
        (dict(target="none"), "target='none': must be a number, or free"),
        (dict(shrink=-1.0), "shrink=-1.0"),
        (dict(hold=math.nan), "hold=nan"),
    ],
)
def test_bad_options_are_named(options: dict[str, object], said: str) -> None:
    with pytest.raises(LocaterError) as caught:
        LocAteR(**options)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_detach_leaves_no_trace() -> None:
    case = case_of("gpt2")
    model = model_of(case)
    keys, before = list(model.state_dict()), model(**case.batch()).logits
    attributes = {name: sorted(vars(module)) for name, module in model.named_modules()}
    control = LocAteR().attach(model)
    control.loss().backward()
    control.after_step()
    control.detach()
    control.detach()
    assert list(model.state_dict()) == keys
    assert torch.equal(model(**case.batch()).logits, before)
    assert {name: sorted(vars(module)) for name, module in model.named_modules()} == attributes
    control.attach(model)
