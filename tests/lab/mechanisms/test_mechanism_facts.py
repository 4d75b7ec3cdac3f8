"""What papers and the algebra say of single mechanisms, and bad input."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from locater.errors import LocaterError
from locater_lab.mechanisms import mechanism, register_mechanism
from tests.lab.mechanisms.mechanism_cases import B, D, E, H, K, draw, operands


def test_a_sink_fixed_at_zero_is_softmax_plus_one_and_at_minus_infinity_softmax() -> None:
    q, k, v = operands(5, 7)
    sunk = mechanism("learned_sink")
    torch.testing.assert_close(sunk(q, k, v, sinks=torch.zeros(H).double()), mechanism("softmax_plus_one")(q, k, v))
    torch.testing.assert_close(sunk(q, k, v, sinks=torch.full((H,), -700.0).double()), mechanism("softmax")(q, k, v))
    assert mechanism("softmax_plus_one").map(0 * q, k).sum(-1).unique().tolist() == pytest.approx([7 / 8])


def test_a_sink_keeps_its_digits_in_half_precision() -> None:
    """A logit of 7.77 is 7.78 in bfloat16; the second channel holds the rest."""
    q, k, v = (x.bfloat16() for x in operands(6, 6))
    sinks = torch.full((H,), 7.77)
    out = mechanism("learned_sink")(q, k, torch.ones_like(v), sinks=sinks).double()
    want = mechanism("learned_sink").map(q.double(), k.double(), sinks=sinks.double()).sum(-1, keepdim=True)
    assert ((out - want) / want).abs().max() < 5e-3  # of rounding the output itself


def test_sigmoid_of_zero_logits() -> None:
    q, k, _ = operands(4, 8)
    assert mechanism("sigmoid").map(0 * q, k).sum(-1).unique().tolist() == pytest.approx([8 / 9])
    assert mechanism("sigmoid").map(0 * q, k, bias=0.0).sum(-1).unique().tolist() == pytest.approx([4.0])
    per_head = mechanism("sigmoid").map(0 * q, k, bias=draw(H)).sum(-1)[0, :, 0]
    torch.testing.assert_close(per_head, 8 * draw(H).sigmoid())


def test_centred_rows_sum_to_zero_and_forget_a_constant_value() -> None:
    q, k, v = operands(8, 8)
    m = mechanism("centred")
    for causal in (False, True):
        assert m.map(q, k, causal=causal).sum(-1).abs().max() < 1e-12
        torch.testing.assert_close(m(q, k, v + 5, causal=causal), m(q, k, v, causal=causal))


def test_no_key_is_explained_away() -> None:
    """Each key receives at least 1/S; the bound is met where one query outbids all others for every key but one (Ding
    et al.).
    """
    q, k, _ = operands(32, 32)
    m = mechanism("doubly_normalized")
    assert m.map(40 * q, k).sum(2).min() >= 1 / 32
    assert mechanism("softmax").map(40 * q, k).sum(2).min() < 1e-6
    assert mechanism("hybrid_normalized").map(40 * q, k, mix=0.5).sum(2).min() >= 0.5 / 32
    logits = torch.zeros(8, 8).double()
    logits[0], logits[1:, 0] = 40.0, -40.0
    tight = m.map(logits[None, None], torch.eye(8).double()[None, None], scale=1.0)
    assert float(tight.sum(2)[0, 0, 0]) == pytest.approx(1 / 8)
    shifted = m.map(logits[None, None] + draw(8), torch.eye(8).double()[None, None], scale=1.0)
    torch.testing.assert_close(shifted, tight)  # what is added to all logits of a key is normalised away


def test_a_causal_mask_in_disguise_is_refused() -> None:
    q, k, v = operands(6, 6)
    with pytest.raises(LocaterError, match="cannot be causal: it normalises over queries"):
        mechanism("doubly_normalized")(q, k, v, mask=torch.ones(6, 6, dtype=torch.bool).tril())
    blocks = torch.block_diag(torch.ones(3, 3), torch.ones(3, 3)).bool()
    packed = mechanism("doubly_normalized")(q, k, v, mask=blocks)
    torch.testing.assert_close(packed[:, :, :3], mechanism("doubly_normalized")(*(x[:, :, :3] for x in (q, k, v))))


def test_normalised_fastmax_cannot_localise() -> None:
    q, k, _ = operands(40, 40)
    weights = mechanism("fastmax").map(100 * q, k)
    assert weights.max() <= 5 / 44
    entropy = torch.special.entr(weights).sum(-1)
    assert entropy.min() / math.log(40) > 0.95


def test_the_delta_rule_recalls_and_overwrites() -> None:
    keys = torch.linalg.qr(draw(D, D))[0][None, None]
    values = draw(1, 1, D, E, seed=1)
    m, one = mechanism("delta"), torch.ones(1, 1, D).double()
    recalled = m(keys, torch.cat([keys, keys], 2)[:, :, :D], values, causal=True, beta=one)
    torch.testing.assert_close(recalled[:, :, -1], values[:, :, -1])
    again = torch.cat([values, 2 * values], 2)
    out = m(keys, keys.repeat(1, 1, 2, 1), again, causal=True, beta=one.repeat(1, 1, 2))
    torch.testing.assert_close(out[:, :, -1], 2 * values[:, :, -1])
    torch.testing.assert_close(
        mechanism("gated_delta")(keys, keys, values, causal=True, beta=one / 2, log_decay=0 * one),
        m(keys, keys, values, causal=True, beta=one / 2),
    )


def test_strong_decay_over_long_chunks_is_finite() -> None:
    """exp of the decay between a token and an earlier one would overflow above the diagonal."""
    T = 200
    q, k, v = (x.float().requires_grad_() for x in operands(T, T))
    decay = torch.full((B, K, T), -50.0, requires_grad=True)
    out = mechanism("gated_delta")(q, k, v, causal=True, beta=torch.ones(B, K, T), log_decay=decay)
    out.sum().backward()
    assert all(x.isfinite().all() for x in (out, q.grad, k.grad, v.grad, decay.grad))


def test_long_sequences_keep_their_digits() -> None:
    """float32 against float64 over 8,192 tokens: sums and memory do not drift."""
    T = 8192
    q, k, v = (x[:1, :1] for x in operands(T, T))
    beta, decay = draw(1, 1, T, seed=5).sigmoid(), -0.01 * draw(1, 1, T, seed=6).exp()
    for name, options in (
        ("linear", {}),
        ("fastmax", {}),
        ("delta", {"beta": beta}),
        ("gated_delta", {"beta": beta, "log_decay": decay}),
    ):
        want = mechanism(name)(q, k, v, causal=True, **options)
        out = mechanism(name)(
            q.float(), k.float(), v.float(), causal=True, **{n: x.float() for n, x in options.items()}
        )
        assert (out - want).abs().max() < 1e-5, name


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.where(x >= 0, 1.0, -1.0).to(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * (ctx.saved_tensors[0].abs() <= 1)


def test_the_gradient_of_one_bit_is_straight_through() -> None:
    """Signs pass it on where |x| <= 1, mu has its own; bias and values are ordinary."""
    leaves = [x.requires_grad_() for x in (*operands(5, 5, 2, 2), draw(1, 2, 5, 5, seed=9))]
    q, k, v, bias = leaves
    mu = q.abs().mean((2, 3), keepdim=True) * k.abs().mean((2, 3), keepdim=True)
    want = (mu * Clipped.apply(q) @ Clipped.apply(k).mT * D**-0.5 + bias).softmax(-1) @ v
    got = mechanism("binary")(q, k, v, bias=bias)
    torch.testing.assert_close(got, want)
    weight = draw(*got.shape, seed=4)
    for ours, theirs in zip(
        *(torch.autograd.grad((x * weight).sum(), leaves, retain_graph=True) for x in (got, want)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_one_bit_logits_have_few_levels() -> None:
    q, k, _ = operands(40, 40)
    weights = mechanism("binary").map(q, k)
    levels = weights.log().mul(1e9).round()
    step = 2 * D**-0.5 * q[0, 0].abs().mean() * k[0, 0].abs().mean()
    for row in levels[0, 0]:
        assert len(row.unique()) <= D + 1
        gaps = row.unique().diff() / 1e9 / step
        torch.testing.assert_close(gaps, gaps.round(), rtol=0, atol=1e-6)
    turn = torch.randperm(D, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(mechanism("binary").map(q[..., turn], k[..., turn]), weights)


def test_differential_rows_sum_to_one_less_lambda() -> None:
    q, k, v = operands(8, 8)
    m = mechanism("differential")
    torch.testing.assert_close(m.map(q, k, causal=True, lam=0.8).sum(-1), torch.full((B, H, 8), 0.2).double())
    torch.testing.assert_close(m(q, k, v, lam=0.0), mechanism("softmax")(q[..., :3], k[..., :3], v))


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("softmax", dict(q=torch.zeros(2, 3, 4)), r"q has shape \[2, 3, 4\]; it has four axes"),
        ("softmax", dict(k=torch.zeros(2, 3, 9, 6).double()), r"k has shape \[2, 3, 9, 6\].* heads that divide"),
        (
            "softmax",
            dict(v=torch.zeros(2, 2, 8, 5).double()),
            r"v has shape \[2, 2, 8, 5\].* same batch, heads and tokens",
        ),
        ("softmax", dict(v=torch.zeros(2, 2, 9, 5)), "v is float32 and q float64"),
        ("softmax", dict(scale=0.0), "scale=0.0: a finite number other than 0"),
        ("softmax", dict(mask=torch.zeros(9, 9)), "mask is float32: a boolean tensor"),
        ("softmax", dict(mask=torch.ones(9, 8, dtype=torch.bool)), "its axis S must be 9"),
        ("softmax", dict(padding=torch.ones(2, 8, dtype=torch.bool)), r"padding has shape \[2, 8\], not \[2, 9\]"),
        (
            "softmax",
            dict(query_padding=torch.ones(1, 9, dtype=torch.bool)),
            r"query_padding has shape \[1, 9\], not \[2, 9\]",
        ),
        ("softmax", dict(q=torch.zeros(2, 4, 10, 6).double(), causal=True), "10 queries and 9 keys cannot be causal"),
        ("softmax", dict(cap=3.0), "softmax has no option 'cap'; it takes none"),
        ("softcap", dict(cap=0.0), "cap=0.0: a number above 0"),
        ("qk_norm", dict(kind="batch"), "choose rms or layer"),
        ("qk_norm", dict(key_gain=torch.ones(4)), r"key_gain has shape \[4\], not \[2\]"),
        ("sigmoid", dict(bias=torch.zeros(3)), r"bias has shape \[3\]: a number, or one per query head \[4\]"),
        ("learned_sink", dict(), "learned_sink needs sinks"),
        ("learned_sink", dict(sinks=torch.zeros(2)), r"sinks=\[2\]: a tensor of one logit per query head \[4\]"),
        ("hybrid_normalized", dict(mix=1.5), "mix=1.5: a number from 0"),
        ("doubly_normalized", dict(causal=True), "it normalises over queries first, later ones included"),
        (
            "doubly_normalized",
            dict(q=torch.zeros(2, 4, 3, 6).double(), padding=torch.ones(2, 9, dtype=torch.bool)),
            "need query_padding",
        ),
        ("fastmax", dict(order=3), "order=3: 1 or 2"),
        ("fastmax", dict(norm="max"), "token, sequence or None"),
        ("fastmax", dict(norm="sequence", causal=True), "later tokens too, so it cannot be causal"),
        ("fastmax", dict(order=1, norm=None), "order 1 has negative weights"),
        ("fastmax", dict(order=1, scale=2.0), "order 1 has negative weights"),
        ("linear", dict(mask=torch.ones(9, 9, dtype=torch.bool)), "linear: a mask with a row per query"),
        ("delta", dict(beta=torch.ones(2, 2, 9)), "delta is causal only: it is a recurrence"),
        ("delta", dict(beta=torch.ones(2, 4, 9), causal=True), r"beta has shape \[2, 4, 9\], not \[2, 2, 9\]"),
        ("gated_delta", dict(beta=torch.ones(2, 2, 9), causal=True), "gated_delta needs log_decay"),
        ("binary", dict(bias=torch.zeros(5, 9)), r"bias has shape \[1, 1, 5, 9\]"),
        (
            "differential",
            dict(lam=0.5, q=torch.zeros(2, 4, 9, 5).double(), k=torch.zeros(2, 2, 9, 5).double()),
            "no two halves",
        ),
    ],
)
def test_bad_input_is_named_on_one_line(name: str, change: dict[str, Any], said: str) -> None:
    q, k, v = operands(9, 9)
    given = dict(q=q, k=k, v=v) | change
    with pytest.raises(LocaterError, match=said) as raised:
        mechanism(name)(given.pop("q"), given.pop("k"), given.pop("v"), **given)
    assert "\n" not in str(raised.value)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        LocaterError, match=r"no attention mechanism 'sofmax': did you mean 'softmax'\? There are softmax, softcap"
    ):
        mechanism("sofmax")
    with pytest.raises(LocaterError, match="'softmax' is already registered"):
        register_mechanism(mechanism("softmax"))
