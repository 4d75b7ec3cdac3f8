"""Heads of different kinds in one layer, what is made of several layers, and stacks of several mechanisms; and what
modules refuse.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from locater.errors import LocaterError
from locater_lab.mechanisms import mechanism
from locater_lab.mechanisms.fusion import ConcatFusion, GateFusion, MaxFusion, layer_fusion
from locater_lab.mechanisms.modules import (
    BinaryBiasAttention,
    DifferentialAttention,
    GatedAttention,
    MultiformerAttention,
    attention_module,
)
from locater_lab.mechanisms.multiformer import head_relevance
from locater_lab.mechanisms.stack import HybridLayout, hybrid
from tests.lab.mechanisms.mechanism_cases import B, D, E, H, K, draw, operands
from tests.lab.mechanisms.test_mechanism_modules import W, stream


def test_the_table_of_an_image() -> None:
    """Equal differences share an entry; the class token has three of its own."""
    layer = BinaryBiasAttention(heads=2, grid=(2, 3), extra=True)
    at, where = layer.table_indices(7, 7), [(r, c) for r in range(2) for c in range(3)]
    assert len(layer.table) == 3 * 5 + 3
    assert at[0, 1:].unique().numel() == at[1:, 0].unique().numel() == 1
    assert {int(at[0, 1]), int(at[1, 0]), int(at[0, 0])} == {15, 16, 17}
    entries: dict[tuple[int, int], int] = {}
    for i, a in enumerate(where):
        for j, b in enumerate(where):
            assert entries.setdefault((b[0] - a[0], b[1] - a[1]), int(at[1 + i, 1 + j])) == int(at[1 + i, 1 + j])
    assert sorted(entries.values()) == list(range(15))
    assert torch.equal(
        BinaryBiasAttention(2, grid=(2, 3)).table_indices(2, 6),
        BinaryBiasAttention(2, grid=(2, 3)).table_indices(6, 6)[-2:],
    )
    with pytest.raises(LocaterError, match="7 tokens, and there are 5 keys"):
        layer.table_indices(5, 5)


def test_multiformer_of_full_heads_is_softmax() -> None:
    q, k, v = operands(9, 9)
    torch.testing.assert_close(MultiformerAttention("ffff", D)(q, k, v), mechanism("softmax")(q, k, v))
    one = torch.ones(1, 1, 1, 1).double()
    got = mechanism("multiformer")(q, k, v, kinds="c", stride=1, key_kernel=one, value_kernel=one)
    torch.testing.assert_close(got, mechanism("softmax")(q, k, v))


@pytest.mark.parametrize(("taps", "stride", "S"), [(5, 2, 9), (5, 2, 10), (7, 3, 11), (3, 3, 1), (5, 2, 2)])
def test_convolutional_heads_are_those_of_conv1d(taps: int, stride: int, S: int) -> None:
    q, k, v = operands(S, S)
    layer = MultiformerAttention("cccc", D, value_size=E, taps=taps, stride=stride).double()
    short = []
    for y, weight, bias in ((k, layer.key_kernel, layer.key_bias), (v, layer.value_kernel, layer.value_bias)):
        more = max(taps - S - 2 * (stride // 2), -(S + 2 * (stride // 2) - taps) % stride)
        flat = functional.pad(y.flatten(0, 1).mT, (0, more))
        out = functional.conv1d(flat, weight[0, 0].T[:, None], bias.flatten(), stride, stride // 2, groups=y.shape[3])
        short.append(out.mT.unflatten(0, (B, K)))
    want = mechanism("softmax")(q, *short)
    assert short[0].shape[2] <= S // stride + 2
    torch.testing.assert_close(layer(q, k, v), want, rtol=1e-9, atol=1e-10)


def test_local_heads_see_their_window_only() -> None:
    """Over the edges of blocks, and with keys before the queries."""
    for T, S in ((300, 300), (140, 300)):
        q, k, v = operands(T, S)
        m = mechanism("multiformer")
        at = torch.arange(S - T, S)[:, None] - torch.arange(S)
        want = mechanism("softmax")(q, k, v, mask=(at.abs() <= 5)[None, None])
        torch.testing.assert_close(m(q, k, v, kinds="l", window=10), want)
        rows = (draw(B, H, T, S, seed=4) > 0) | (at == 0)
        want = mechanism("softmax")(q, k, v, mask=rows & (at.abs() <= 5))
        torch.testing.assert_close(m(q, k, v, kinds="l", window=10, mask=rows), want)


def test_head_relevance() -> None:
    """Shares of each sample sum to 1; a padded token, and a head that is scaled, count as they should."""
    heads, weight = draw(5, H, 4, E), draw(W, H * E, seed=1)
    padding = torch.arange(4) >= torch.tensor([0, 1, 2, 3, 0])[:, None]
    shares = torch.zeros(5, H, dtype=torch.float64)
    for b in range(5):
        for h in range(H):
            for t in range(4):
                if padding[b, t]:
                    shares[b, h] += (weight[:, h * E : (h + 1) * E] @ heads[b, h, t]).abs().sum()
    shares = shares / shares.sum(1, keepdim=True)
    torch.testing.assert_close(head_relevance(heads, weight, padding), shares.sort(0).values[2])
    assert head_relevance(heads * torch.tensor([1.0, 1, 1, 1e6])[:, None, None], weight)[3] > 0.99
    assert head_relevance(torch.zeros(1, H, 2, E), weight.float()).isfinite().all()


@pytest.mark.parametrize("kind", ["concat", "max", "gate"])
def test_fusion(kind: Any) -> None:
    states = [draw(B, 4, W, seed=i) for i in range(3)]
    fuse = layer_fusion(kind, 3, W).double()
    start = torch.stack(states).amax(0) if kind == "max" else torch.stack(states).mean(0)
    torch.testing.assert_close(fuse(states), start)
    for i, p in enumerate(fuse.parameters()):
        p.data.copy_(draw(*p.shape, seed=10 + i))
    want = torch.zeros(B, 4, W, dtype=torch.float64)
    for b in range(B):
        for t in range(4):
            rows = [state[b, t] for state in states]
            if isinstance(fuse, ConcatFusion):
                want[b, t] = (
                    sum(fuse.weight.data[:, i * W : (i + 1) * W] @ row for i, row in enumerate(rows)) + fuse.bias.data
                )
            elif isinstance(fuse, GateFusion):
                share = torch.stack([(fuse.weight.data @ row).exp() for row in rows])
                want[b, t] = sum(s * row for s, row in zip(share / share.sum(), rows, strict=True))
                torch.testing.assert_close(fuse.weights(states)[:, b, t], share / share.sum())
            else:
                want[b, t] = torch.stack(rows).max(0).values
    torch.testing.assert_close(fuse(states), want)
    assert torch.autograd.gradcheck(
        lambda *some: fuse(some), [state.requires_grad_() for state in states], fast_mode=True
    )
    other = layer_fusion(kind, 3, W).double()
    other.load_state_dict(fuse.state_dict())
    torch.testing.assert_close(other(states), want)
    assert sum(p.numel() for p in fuse.parameters()) == {"concat": 3 * W * W + W, "max": 0, "gate": W}[kind]
    assert fuse([state[:, :1] for state in states]).shape == (B, 1, W)
    for wrong in (states[:2], [*states[:2], states[2][:, :2]]):
        with pytest.raises(LocaterError, match="hidden states"):
            fuse(wrong)


def test_layouts() -> None:
    qwen = hybrid("3:1", 48, full="gated")
    assert [i for i, name in enumerate(qwen.names) if name == "gated"] == [i for i in range(48) if (i + 1) % 4 == 0]
    assert (qwen.causal, qwen.cost, qwen.counts) == ("only", "quadratic", {"gated_delta": 36, "gated": 12})
    assert hybrid("1:0", 3, linear="linear") == HybridLayout(("linear",) * 3)
    assert (hybrid("L...", 2, linear="linear").cost, hybrid("LS", linear="linear").causal) == ("linear", "either")
    assert hybrid(["softmax", "doubly_normalized"]).causal == "never"
    assert hybrid("7:1", 5).names == ("gated_delta",) * 5
    stack = hybrid("LS", full="differential").modules({"differential": {"norm": False}}, width=W, heads=H, size=D)
    assert isinstance(stack[1], DifferentialAttention)
    assert stack[1].lam_init == DifferentialAttention(D, depth=1).lam_init
    assert stack[1].gain is None
    q = draw(B, H, 5, D)
    for layer in stack.double():
        assert layer(q, q, q, stream(5), causal=True).shape == q.shape


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hybrid("SXL"), "letters S"),
        (lambda: hybrid("0:0", 4), "letters S"),
        (lambda: hybrid("3:1"), "need layers"),
        (lambda: hybrid("SL", 3), "2 layers, not 3"),
        (lambda: hybrid("SL", full="linear"), "linear cost"),
        (lambda: hybrid("SL", linear="softmax"), "quadratic cost"),
        (lambda: hybrid(["delta", "doubly_normalized"]), "no stack can have both"),
        (lambda: hybrid(["softmax", "none"]), "no attention mechanism"),
        (lambda: hybrid([]), "no layers"),
        (lambda: layer_fusion("mean", 2, W), "concat, max, gate"),  # type: ignore[arg-type]
        (lambda: MaxFusion(0, W), "at least one"),
        (lambda: GatedAttention(W, H, D, position="after"), "choose output, value"),  # type: ignore[arg-type]
        (lambda: GatedAttention(W, H, D, shared=True), "element"),
        (lambda: GatedAttention(W, H, D, position="value", additive=True), "additive"),
        (lambda: GatedAttention(W, H, D).double()(*operands(3, 3)), "given: none"),
        (lambda: GatedAttention(W, H, D).double()(*operands(3, 3), stream(4)), "3 tokens, 7"),
        (
            lambda: attention_module("delta", width=W, heads=H, size=D).double()(*operands(3, 3, kv=H), causal=True),
            "layer's input",
        ),
        (lambda: attention_module("gated", width=W, heads=H, size=D, colour=1), "colour"),
        (lambda: attention_module("none", width=W, heads=H, size=D), "no attention mechanism"),
        (lambda: mechanism("gated")(*operands(3, 3)), "at least one of gate"),
        (lambda: mechanism("gated")(*operands(3, 3), gate=torch.ones(B, H, 2)), "does not fit"),
        (lambda: mechanism("multiformer")(*operands(3, 3)), "need key_kernel"),
        (lambda: mechanism("multiformer")(*operands(3, 3), kinds="fx"), "letters of f"),
        (lambda: mechanism("multiformer")(*operands(3, 3), kinds="l", window=0), "at least 1 token"),
        (
            lambda: MultiformerAttention("cccc", D, value_size=E, taps=2, stride=3).double()(*operands(3, 3)),
            "passed over",
        ),
        (lambda: MultiformerAttention("fc", D, value_size=E).double()(*operands(3, 3)), "names 2 heads"),
        (lambda: head_relevance(torch.zeros(1, 2, 3, 4), torch.zeros(8, 6)), "2 heads of 4"),
        (lambda: DifferentialAttention(5), "even size"),
        (lambda: BinaryBiasAttention(2, extra=True), "grid"),
    ],
)
def test_refusals(call: Any, message: str) -> None:
    with pytest.raises(LocaterError, match=message):
        call()
