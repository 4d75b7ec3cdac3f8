"""Mechanisms with parameters: modules held to formulas written out in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from locater.errors import LocaterError
from locater_lab.mechanisms import mechanism, mechanisms
from locater_lab.mechanisms.gated import GateModule
from locater_lab.mechanisms.modules import AttentionModule, DifferentialAttention, attention_module
from tests.lab.mechanisms.mechanism_cases import B, D, E, H, K, draw, operands, row_softmax

W = 7  # width of the stream
LEARNED = [m.name for m in mechanisms() if m.has_parameters]
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in LEARNED} | {
    "gated element": ("gated", dict(per="element")),
    "gated value": ("gated", dict(position="value")),
    "gated value element": ("gated", dict(position="value", per="element")),
    "gated key": ("gated", dict(position="key", per="element")),
    "gated query": ("gated", dict(position="query", per="element")),
    "gated shared": ("gated", dict(per="element", shared=True)),
    "gated constant": ("gated", dict(per="element", from_input=False)),
    "gated ns": ("gated", dict(score="ns_sigmoid")),
    "gated additive": ("gated", dict(per="element", additive=True)),
    "differential bare": ("differential", dict(norm=False)),
    "binary short": ("binary", dict(span=3)),
    "multiformer with a map": ("multiformer", dict(kinds="lcfc", depthwise=False, window=4)),
}
every = pytest.mark.parametrize("label", VARIANTS)


def module(label: str, seed: int = 0) -> AttentionModule:
    """In float64, every parameter redrawn."""
    name, settings = VARIANTS[label]
    made = attention_module(name, width=W, heads=H, size=D, kv_heads=K, value_size=E, depth=2, **settings).double()
    for i, parameter in enumerate(made.parameters()):
        parameter.data = draw(*parameter.shape, seed=seed + 20 + i) * 0.5
    return made


def stream(S: int) -> Tensor:
    return draw(B, S, W, seed=9)


def how(label: str) -> dict[str, Any]:
    return dict(causal=mechanism(VARIANTS[label][0]).is_causal_safe)


def sigmoid(y: Tensor) -> Tensor:
    return 1 / (1 + (-y).exp())


def attended(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Softmax attention, head by head."""
    T, S = q.shape[2], k.shape[2]
    seen = torch.ones(T, S, dtype=torch.bool)
    seen = seen.tril(S - T) if causal else seen
    return torch.stack(
        [
            torch.stack([row_softmax(q[b, h] @ k[b, h // 2].T * D**-0.5, seen) @ v[b, h // 2] for h in range(H)])
            for b in range(B)
        ]
    )


def scores(weight: Tensor, x: Tensor, heads: int, size: int) -> Tensor:
    """x W of every head, token and channel, number by number."""
    out = torch.zeros(B, heads, x.shape[1], size, dtype=torch.float64)
    for h in range(heads):
        for c in range(size):
            out[:, h, :, c] = (x * weight[h * size + c]).sum(-1)
    return out


def reference(label: str, m: AttentionModule, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """What the module should give, from its state."""
    name, settings = VARIANTS[label]
    p = {key: value.detach() for key, value in m.state_dict().items()}
    T, S, causal = q.shape[2], k.shape[2], mechanism(name).is_causal_safe
    rows = slice(S - T, None)
    if name == "gated":
        w, per = p["gate.weight"], settings.get("per", "head")
        position = settings.get("position", "output")
        heads, size = {"output": (H, E), "value": (K, E), "key": (K, D), "query": (H, D)}[position]
        if settings.get("from_input", True):
            raw = scores(w, x, heads, size if per == "element" else 1)
            if settings.get("additive"):
                return attended(q, k, v, causal) + (raw * sigmoid(raw))[:, :, rows]
        else:
            raw = w.reshape(1, heads, 1, size).expand(B, heads, S, size)
        g = sigmoid(raw)
        if settings.get("shared"):
            g = sum(g[:, h : h + 1] for h in range(heads)) / heads
        if settings.get("score") == "ns_sigmoid":
            g = (1 + g) / 2
        if position == "output":
            return g[:, :, rows] * attended(q, k, v, causal)
        if position == "query":
            return attended(g[:, :, rows] * q, k, v, causal)
        return attended(q, g * k, v, causal) if position == "key" else attended(q, k, g * v, causal)
    made: dict[str, Any] = {}
    if name == "qk_norm":
        made = p
    if name == "learned_sink":
        made = {"sinks": p["sinks"]}
    if name == "hybrid_normalized":
        made = {"mix": sigmoid(p["logit"])}
    if name in ("delta", "gated_delta"):
        made = {"beta": sigmoid(scores(p["beta.weight"], x, K, 1))[..., 0]}
    if name == "gated_delta":
        rate, step = p["log_rate"].exp()[:, None], scores(p["decay.weight"], x, K, 1)[..., 0] + p["decay_bias"][:, None]
        made["log_decay"] = -rate * (1 + step.exp()).log()
    if name == "binary":
        span = settings.get("span", 128)
        made = {"bias": torch.empty(1, H, T, S, dtype=torch.float64)}
        for i in range(T):
            for j in range(S):
                made["bias"][0, :, i, j] = p["table"][max(-span, min(span, j - i - S + T)) + span]
    if name == "differential":
        a1, b1, a2, b2 = p["vectors"]
        start = 0.8 - 0.6 * math.exp(-0.6)
        made = {"lam": float((a1 @ b1).exp() - (a2 @ b2).exp()) + start}
    if name == "multiformer":
        made = p | dict(kinds=settings.get("kinds", "flcf"), window=settings.get("window", 64))
    out = mechanism(name)(q, k, v, causal=causal, **made)
    if name == "differential" and settings.get("norm", True):
        out = (1 - start) * p["gain"] * out / (out.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return out


def test_every_mechanism_has_a_module_and_only_those_that_learn_have_parameters() -> None:
    for m in mechanisms():
        made = attention_module(m.name, width=W, heads=H, size=D)
        assert made.name == m.name
        assert bool(list(made.parameters())) == m.has_parameters, m.name


@every
@pytest.mark.parametrize("T", [8, 3, 1])
def test_it_equals_its_formula(label: str, T: int) -> None:
    m, S = module(label), 8
    q, k, v = operands(T, S)
    torch.testing.assert_close(
        m(q, k, v, stream(S), **how(label)), reference(label, m, q, k, v, stream(S)), rtol=1e-9, atol=1e-10
    )


@every
def test_one_token(label: str) -> None:
    m, (q, k, v) = module(label), operands(1, 1)
    out = m(q, k, v, stream(1), **how(label))
    torch.testing.assert_close(out, reference(label, m, q, k, v, stream(1)), rtol=1e-9, atol=1e-10)


@every
def test_the_map_gives_the_output(label: str) -> None:
    m, (q, k, v), x = module(label), operands(6, 6), stream(6)
    if label in (
        "gated element",
        "gated value element",
        "gated shared",
        "gated constant",
        "gated additive",
        "multiformer",
    ):
        with pytest.raises(LocaterError, match="map"):
            m.map(q, k, x, **how(label))
        return
    if label == "differential":
        m.gain = None  # the map is that before the norm
    want = m.map(q, k, x, **how(label)) @ v.repeat_interleave(H // K, 1)
    torch.testing.assert_close(m(q, k, v, x, **how(label)), want, rtol=1e-9, atol=1e-10)


@every
def test_gradients_of_parameters_and_stream(label: str) -> None:
    m, (q, k, v) = module(label), operands(4, 4)
    names = [name for name, _ in m.named_parameters()]

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(m, dict(zip(names, values, strict=True)), (q, k, v, x), how(label))

    leaves = [stream(4).requires_grad_(), *(p.detach().clone().requires_grad_() for p in m.parameters())]
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


@every
def test_every_parameter_is_used(label: str) -> None:
    m, (q, k, v) = module(label), operands(6, 6)
    m(q, k, v, stream(6), **how(label)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in m.parameters())


@every
def test_no_later_token_changes_an_earlier_output(label: str) -> None:
    m, cut, S = module(label), 3, 9
    q, k, v = operands(S, S)
    x = stream(S)
    if not how(label)["causal"]:
        with pytest.raises(LocaterError, match="cannot be causal"):
            m(q, k, v, x, causal=True)
        return
    before = m(q, k, v, x, causal=True)
    for y in (q[:, :, -cut:], k[:, :, -cut:], v[:, :, -cut:], x[:, -cut:]):
        y.mul_(-2)
    after = m(q, k, v, x, causal=True)
    torch.testing.assert_close(after[:, :, :-cut], before[:, :, :-cut], rtol=1e-9, atol=1e-10)
    assert (after[:, :, -cut:] - before[:, :, -cut:]).abs().max() > 1e-3


@every
def test_padding_is_as_good_as_absent(label: str) -> None:
    m, T, front = module(label), 9, 3
    q, k, v = operands(T, T)
    x, padding = stream(T), torch.ones(B, T, dtype=torch.bool)
    padding[:, :front] = False
    for y in (q[:, :, :front], k[:, :, :front], v[:, :, :front], x[:, :front]):
        y.fill_(50.0)
    out = m(q, k, v, x, padding=padding, **how(label))
    alone = m(*(y[:, :, front:] for y in (q, k, v)), x[:, front:], **how(label))
    torch.testing.assert_close(out[:, :, front:], alone, rtol=1e-9, atol=1e-10)
    nothing = m(q, k, v, x, padding=torch.zeros_like(padding), **how(label))
    assert nothing.isfinite().all()
    assert (nothing == 0).all() or label == "gated additive"


@pytest.mark.parametrize("label", [label for label in VARIANTS if how(label)["causal"]])
def test_the_last_token_alone(label: str) -> None:
    """With kept keys, and the stream of all of them."""
    m, S = module(label), 7
    q, k, v = operands(S, S)
    whole = m(q, k, v, stream(S), causal=True)
    torch.testing.assert_close(m(q[:, :, -1:], k, v, stream(S), causal=True), whole[:, :, -1:], rtol=1e-9, atol=1e-10)


@every
def test_state_dict_goes_round(label: str) -> None:
    one, other = module(label), module(label, seed=50)
    q, k, v = operands(5, 5)
    want = one(q, k, v, stream(5), **how(label))
    assert (other(q, k, v, stream(5), **how(label)) - want).abs().max() > 1e-6
    other.load_state_dict(one.state_dict())
    assert torch.equal(other(q, k, v, stream(5), **how(label)), want)


@pytest.mark.parametrize(
    ("label", "shapes"),
    [
        ("qk_norm", {"query_gain": (H,), "key_gain": (K,)}),
        ("learned_sink", {"sinks": (H,)}),
        ("hybrid_normalized", {"logit": (H,)}),
        ("delta", {"beta.weight": (K, W)}),
        ("gated_delta", {"beta.weight": (K, W), "decay.weight": (K, W), "log_rate": (K,), "decay_bias": (K,)}),
        ("differential", {"vectors": (4, D // 2), "gain": (E,)}),
        ("differential bare", {"vectors": (4, D // 2)}),
        ("binary", {"table": (257, H)}),
        ("gated", {"gate.weight": (H, W)}),
        ("gated element", {"gate.weight": (H * E, W)}),
        ("gated shared", {"gate.weight": (H * E, W)}),
        ("gated value", {"gate.weight": (K, W)}),
        ("gated value element", {"gate.weight": (K * E, W)}),
        ("gated key", {"gate.weight": (K * D, W)}),
        ("gated query", {"gate.weight": (H * D, W)}),
        ("gated constant", {"gate.weight": (H, E)}),
        (
            "multiformer",
            {
                "key_kernel": (1, 1, 5, D),
                "key_bias": (1, 1, 1, D),
                "value_kernel": (1, 1, 5, E),
                "value_bias": (1, 1, 1, E),
            },
        ),
        ("multiformer with a map", {"key_kernel": (1, 1, 5, 1), "value_kernel": (1, 1, 5, 1)}),
    ],
)
def test_shapes_of_parameters(label: str, shapes: dict[str, tuple[int, ...]]) -> None:
    assert {name: tuple(p.shape) for name, p in module(label).named_parameters()} == shapes


def test_where_modules_start() -> None:
    """Sinks at softmax_plus_one, norms at gain 1, gates at 1/2, lambda at its start, decays below 0."""
    q, k, v = operands(6, 6)
    x, sizes = stream(6), dict(width=W, heads=H, size=D, kv_heads=K, value_size=E)
    new = {name: attention_module(name, **sizes).double() for name in LEARNED}
    torch.testing.assert_close(new["learned_sink"](q, k, v), mechanism("softmax_plus_one")(q, k, v))
    torch.testing.assert_close(new["qk_norm"](q, k, v), mechanism("qk_norm")(q, k, v))
    torch.testing.assert_close(new["hybrid_normalized"].options(q, k, x)["mix"], torch.full((H,), 0.5).double())
    assert (new["gated"].options(q, k, x)["gate"] - 0.5).abs().max() < 0.1
    assert (new["gated_delta"].options(q, k, x)["log_decay"] < 0).all()
    assert new["binary"].table.abs().max() <= 0.04
    for depth, start in ((0, 0.2), (1, 0.8 - 0.6 * math.exp(-0.3)), (100, 0.8)):
        layer = DifferentialAttention(64, depth=depth)
        assert layer.lam_init == pytest.approx(start)
        assert abs(layer.lam.item() - start) < 0.6
        layer.vectors.data.zero_()
        assert layer.lam.item() == pytest.approx(start)


def test_a_gate_leaves_the_rank_of_a_head() -> None:
    """Element-wise after attention: the output is no linear function of the values any more, and a head still spans E
    at most.
    """
    q, k, v = operands(40, 40)
    out = module("gated element")(q, k, v, stream(40))
    assert torch.linalg.matrix_rank(out).max() <= E
    last = GateModule(W, 1, W, "element").double()  # the fifth place: after the output projection
    torch.testing.assert_close(last(stream(4))[:, 0], sigmoid(stream(4) @ last.weight.T))
