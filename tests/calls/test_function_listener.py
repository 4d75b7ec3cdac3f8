"""Attention that modules compute themselves: every way of writing it, every order of axes, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from locater.calls.flex_attention import FlexArguments, call_of_flex
from locater.calls.function_listener import FunctionListener
from locater.errors import LocaterError
from locater.observing import SeenHead, observe

WIDTH, HEADS, TOKENS, BATCH = 24, 3, 6, 2


class Attention(nn.Module):
    """Attention whose inside is `way(module, q, k, v)`, on maps of the input (B, T, E)."""

    def __init__(self, way: Callable[..., Any], heads: int | None = HEADS) -> None:
        super().__init__()
        self.way = way
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        if heads is not None:
            self.num_heads = heads

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, self.to_q(x), self.to_k(x), self.to_v(x))

    def maps(self, x: Tensor, heads: int = HEADS, scale: float = 1.0) -> Tensor:
        """(B, H, T, S) in float64, by the definition."""
        q, k = (m(x).detach().double().unflatten(-1, (heads, -1)).transpose(1, 2) for m in (self.to_q, self.to_k))
        return (q @ k.mT * scale).softmax(-1)


def split(x: Tensor) -> Tensor:
    """(B, T, E) as (B, H, T, D)."""
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def observed(
    way: Callable[..., Any], heads: int | None = HEADS, batch: int = BATCH
) -> tuple[list[SeenHead], Attention, Tensor]:
    torch.manual_seed(3)
    model, x = Attention(way, heads).eval(), 3 * torch.randn(batch, TOKENS, WIDTH)
    plain = model(x)
    with observe(model) as seen:
        assert torch.equal(model(x), plain)
    return seen.rows, model, x


def entropies(maps: Tensor) -> list[float]:
    return torch.special.entr(maps).sum(-1).mean((0, 2)).tolist()


def by_bmm(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (split(x).flatten(0, 1) for x in (q, k, v))
    return joined(torch.bmm(torch.bmm(q, k.mT).softmax(-1), v).unflatten(0, (-1, HEADS)))


def heads_first(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (torch.cat(x.chunk(HEADS, -1), 0) for x in (q, k, v))  # (H * B, T, D)
    return torch.cat(((q @ k.mT).softmax(-1) @ v).chunk(HEADS, 0), -1)


def tokens_first(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1).contiguous().view(TOKENS, -1, WIDTH // HEADS).transpose(0, 1) for x in (q, k, v))
    out = torch.bmm(functional.softmax(torch.bmm(q, k.mT), dim=-1), v)
    return out.transpose(0, 1).reshape(TOKENS, -1, WIDTH).transpose(0, 1)


def heads_after_tokens(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.unflatten(-1, (HEADS, -1)) for x in (q, k, v))
    return torch.einsum("bths,bshd->bthd", torch.einsum("bthd,bshd->bths", q, k).softmax(-1), v).flatten(2)


def einsum_in_place(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.unflatten(-1, (HEADS, -1)) for x in (q, k, v))
    weights = torch.einsum("bthd,bshd->bhts", q, k).add_(0.0).softmax(dim=3)
    return joined(torch.einsum("bhts,bshd->bhtd", weights, v))


def by_keywords(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = torch.matmul(input=split(q), other=split(k).transpose(-1, -2))
    return joined(torch.matmul(torch.softmax(input=logits, dim=-1, dtype=torch.float32), split(v)))


def by_module(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return joined(nn.Softmax(dim=-1)(split(q) @ split(k).mT) @ split(v))


def by_axis(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """With the name that numpy has for `dim`."""
    logits = (split(q)[..., None, :] * split(k)[..., None, :, :]).sum(axis=-1)
    return joined(torch.softmax(logits, axis=-1) @ split(v))


def unpacked(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = torch.stack([q, k, v]).unflatten(-1, (HEADS, -1)).transpose(2, 3).flatten(1, 2)
    return joined(((q @ k.mT).softmax(-1) @ v).unflatten(0, (-1, HEADS)))


def complex_rotation(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    turn = torch.polar(torch.ones(TOKENS, WIDTH // HEADS // 2), torch.zeros(TOKENS, WIDTH // HEADS // 2))
    q, k = (
        torch.view_as_real(torch.view_as_complex(split(x).unflatten(-1, (-1, 2))) * turn).flatten(-2) for x in (q, k)
    )
    q, k, v = (x.flatten(0, 1) for x in (q, k, split(v)))
    return joined(((q @ k.mT).softmax(-1) @ v).unflatten(0, (-1, HEADS)))


WAYS = [
    by_bmm, heads_first, tokens_first, heads_after_tokens, einsum_in_place, by_keywords, by_module, by_axis, unpacked, complex_rotation,
]  # fmt: skip


@pytest.mark.parametrize("heads", [HEADS, None], ids=["told", "not told"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_heads_are_found_in_any_order_of_axes(way: Callable[..., Any], heads: int | None) -> None:
    """Also where batch and heads, or tokens and heads, are as many."""
    for batch in (1, BATCH, HEADS):
        rows, model, x = observed(way, heads, batch)
        assert [row.entropy for row in rows] == pytest.approx(entropies(model.maps(x)), abs=1e-5)


def test_as_many_heads_as_the_call_has_are_counted_whatever_the_module_says() -> None:
    def twice(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        fine = [x.unflatten(-1, (8, -1)).transpose(1, 2) for x in (q, k, v)]
        return joined((fine[0] @ fine[1].mT).softmax(-1) @ fine[2]) + joined(
            (split(q) @ split(k).mT).softmax(-1) @ split(v)
        )

    rows, model, x = observed(twice)
    assert [row.entropy for row in rows[:8]] == pytest.approx(entropies(model.maps(x, 8)), abs=1e-5)
    assert [row.entropy for row in rows[8:]] == pytest.approx(entropies(model.maps(x)), abs=1e-5)


def test_a_head_without_batch_or_split_is_one_head() -> None:
    def single(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.stack([torch.softmax(a @ b.T, dim=-1) @ c for a, b, c in zip(q, k, v, strict=True)])

    rows, model, x = observed(single, None)
    assert [row.entropy for row in rows] == pytest.approx(entropies(model.maps(x, 1)), abs=1e-5)


class PerHead(nn.Module):
    """Maps of each head by themselves; attention, or a softmax of the queries alone."""

    def __init__(self, linear: bool) -> None:
        super().__init__()
        self.to_q, self.to_k = (nn.Parameter(torch.randn(HEADS, WIDTH, 8) / 5) for _ in range(2))
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        q, k = (torch.einsum("bte,hed->bhtd", x, weight) for weight in (self.to_q, self.to_k))
        if self.linear:
            return q.softmax(-1) @ (k.softmax(-2).mT @ k)
        return (q @ k.mT).softmax(-1) @ k


def test_maps_of_each_head_are_no_attention_by_themselves() -> None:
    torch.manual_seed(0)
    model, x = PerHead(False), torch.randn(BATCH, TOKENS, WIDTH)
    with observe(model) as seen:
        model(x)
    q, k = (torch.einsum("bte,hed->bhtd", x.double(), w.double()) for w in (model.to_q, model.to_k))
    assert [row.entropy for row in seen.rows] == pytest.approx(entropies((q @ k.mT).softmax(-1).detach()), abs=1e-5)
    with pytest.raises(LocaterError, match="no softmax attention was found"), observe(PerHead(True)) as seen:
        seen.model(x)


class Twice(nn.Module):
    """Two modules, of which the second can be measured."""

    def __init__(self, way: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.second = Attention(way), Attention(by_module)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def overwritten(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = split(q) @ split(k).mT
    weights = logits.softmax(-1)
    logits.zero_()
    return joined(weights @ split(v))


def one_head_then_all(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v + joined((split(q) @ split(k).mT).softmax(-1) @ split(v))


def by_channels(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return joined(((split(q).mT @ split(k)).softmax(-1) @ split(v).mT).mT)


@pytest.mark.parametrize(
    ("way", "note"),
    [
        (overwritten, "not measured: first: its attention was overwritten in place"),
        (one_head_then_all, "a part of the calls is not measured: first: it attends by one of its 3 heads at a time"),
        (by_channels, "not measured: first: its rows are channels, not tokens"),
    ],
)
def test_what_cannot_be_measured_is_named_and_the_rest_is_measured(way: Callable[..., Any], note: str) -> None:
    model, x = Twice(way), torch.randn(HEADS, TOKENS, WIDTH)  # as many sequences as heads: no axis tells them apart
    with observe(model) as seen:
        model(x)
    assert seen.notes[-1].startswith(note)
    second = [row.entropy for row in seen.rows if row.name == "second"]
    assert second == pytest.approx(entropies(model.second.maps(model.first(x))), abs=1e-5)


def test_tensors_of_inference_mode_are_read_as_they_were() -> None:
    model, x = Attention(overwritten), torch.randn(BATCH, TOKENS, WIDTH)
    with torch.inference_mode(), observe(model) as seen:
        model(x)
    assert [row.entropy for row in seen.rows] == pytest.approx(entropies(model.maps(x)), abs=1e-5)


def test_an_error_while_listening_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("of the listener")

    monkeypatch.setattr(FunctionListener, "_on_softmax", fail)
    model, x = Attention(by_module), torch.randn(BATCH, TOKENS, WIDTH)
    plain = model(x)
    with pytest.raises(LocaterError, match="not measured: the model itself: of the listener"), observe(model):
        assert torch.equal(model(x), plain)


def test_heads_that_a_layer_does_not_have_are_refused() -> None:
    model, x = Attention(by_module), torch.randn(BATCH, TOKENS, WIDTH)
    with pytest.raises(LocaterError, match=r"heads=\[7\]: there are 3, numbered from 0"), observe(model, heads=[7]):
        model(x)


@pytest.mark.parametrize("low", [-1e4, torch.finfo(torch.float32).min, -torch.inf])
def test_rows_of_padding_do_not_count(low: float) -> None:
    """Left padding and a causal mask: a row of padding sees no key, and its softmax is of hidden logits alone."""
    hidden = torch.ones(TOKENS, TOKENS).triu(1).bool().expand(BATCH, 1, -1, -1).clone()
    hidden[0, :, :, :2] = True

    def masked(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = (split(q) @ split(k).mT).masked_fill(hidden, low)
        return joined(functional.softmax(logits, dim=-1).nan_to_num() @ split(v))

    rows, model, x = observed(masked)
    q, k = split(model.to_q(x)).double(), split(model.to_k(x)).double()
    maps = (q @ k.mT).masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num().detach()
    real = torch.ones(BATCH, TOKENS).bool()
    real[0, :2] = False
    expected = [float(torch.special.entr(maps[:, h]).sum(-1)[real].mean()) for h in range(HEADS)]
    assert [row.entropy for row in rows] == pytest.approx(expected, abs=1e-5)
    assert {row.rows for row in rows} == {BATCH * TOKENS - 2}


# several calls from one place of the code


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, scale=1.0)


def fused_with_an_axis(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return fused(q[:, None], k[:, None], v[:, None])[:, 0]


def head_by_head(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def way(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(*(x.chunk(HEADS, -1) for x in (q, k, v)), strict=True)
        return torch.cat([attend(*part) for part in parts], -1)

    return way


@pytest.mark.parametrize("heads", [HEADS, None], ids=["told", "not told"])
@pytest.mark.parametrize("attend", [by_hand, fused, fused_with_an_axis])
def test_a_loop_over_heads_has_a_row_for_each(attend: Callable[..., Tensor], heads: int | None) -> None:
    if attend is fused and heads is None:
        pytest.skip("covered by hand: without an axis and a number of heads there is one head either way")
    rows, model, x = observed(head_by_head(attend), heads)
    assert [(row.layer, row.head, row.rows) for row in rows] == [(0, head, BATCH * TOKENS) for head in range(HEADS)]
    assert [row.entropy for row in rows] == pytest.approx(entropies(model.maps(x)), abs=1e-5)


class SixHeads(nn.Module):
    """Chunks of two heads, of one map for queries, keys and values, in reverse order every second pass."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (6, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return torch.cat([fused(*(y[:, at : at + 2] for y in (q, k, v))) for at in (0, 2, 4)], 1)

    def maps(self, x: Tensor) -> Tensor:
        q, k, _ = (y.unflatten(-1, (6, -1)).transpose(1, 2) for y in self.qkv(x).detach().double().chunk(3, -1))
        return (q @ k.mT).softmax(-1)


def test_chunks_of_heads_are_one_layer_and_heads_can_be_chosen() -> None:
    torch.manual_seed(0)
    model, batches = SixHeads(), [2 * torch.randn(BATCH, TOKENS, WIDTH) for _ in range(3)]
    expected = entropies(torch.cat([model.maps(x) for x in batches]))
    for heads in (None, [1, 2, 5], [4]):
        with observe(model, heads=heads, outputs=True) as seen:
            for x in batches:
                model(x)
        assert [row.head for row in seen.rows] == (heads or list(range(6)))
        assert [row.entropy for row in seen.rows] == pytest.approx([expected[h] for h in heads or range(6)], abs=1e-5)
        assert {row.rows for row in seen.rows} == {3 * BATCH * TOKENS}
        assert None not in [row.output_stable_rank for row in seen.rows]


class Heads(nn.Module):
    """Maps of each head in modules of their own, and blocks that are no modules."""

    def __init__(self, blocks: int = 1, shared: bool = False) -> None:
        super().__init__()
        self.blocks, self.shared = blocks, shared
        self.maps = nn.ModuleList(nn.Linear(WIDTH, 8) for _ in range(2 * HEADS * (1 if shared else blocks)))
        self.back = nn.Linear(8 * HEADS, WIDTH)
        self.skip: int | None = None

    def parts(self, x: Tensor) -> Iterator[tuple[int, Tensor, list[Tensor]]]:
        """Each block's number, its input, and its queries and keys, head by head."""
        for block in range(self.blocks):
            if block == self.skip:
                continue
            start = 0 if self.shared else 2 * HEADS * block
            made = [self.maps[start + at](x) for at in range(2 * HEADS)]
            yield block, x, made
            x = x + self.back(torch.cat(self.attend(made), -1))

    def attend(self, made: list[Tensor]) -> list[Tensor]:
        return [by_hand(made[2 * head], made[2 * head + 1], made[2 * head + 1]) for head in range(HEADS)]

    def forward(self, x: Tensor) -> Tensor:
        return sum((made[0] for _, _, made in self.parts(x)), torch.zeros(()))

    def expected(self, x: Tensor) -> dict[int, list[float]]:
        found = {}
        with torch.no_grad():
            for block, _, made in self.parts(x):
                maps = [(q.double() @ k.double().mT).softmax(-1) for q, k in zip(made[::2], made[1::2], strict=True)]
                found[block] = entropies(torch.stack(maps, 1))
        return found


def test_maps_of_each_head_and_blocks_without_modules_have_rows_of_their_own() -> None:
    torch.manual_seed(0)
    model, x = Heads(blocks=2), 3 * torch.randn(BATCH, TOKENS, WIDTH)
    expected = model.expected(x)
    assert expected[0] != pytest.approx(expected[1], abs=1e-2)
    with observe(model) as seen:
        model(x)
        model.skip = 0  # as LayerDrop does: what is left is the second block, not the first
        model(x)
    assert [(row.layer, row.head) for row in seen.rows] == [(block, head) for block in (0, 1) for head in range(HEADS)]
    assert [row.entropy for row in seen.rows[:HEADS]] == pytest.approx(expected[0], abs=1e-5)
    model.skip = None
    second = model.expected(x)[1]
    model.skip = 0
    mean = [(a + b) / 2 for a, b in zip(second, model.expected(x)[1], strict=True)]
    assert [row.entropy for row in seen.rows[HEADS:]] == pytest.approx(mean, abs=1e-5)


def test_blocks_that_share_their_weights_are_one_layer() -> None:
    torch.manual_seed(0)
    model, x = Heads(blocks=3, shared=True), 3 * torch.randn(BATCH, TOKENS, WIDTH)
    with observe(model) as seen:
        model(x)
    found = model.expected(x)
    mean = [sum(found[block][head] for block in range(3)) / 3 for head in range(HEADS)]
    assert [(row.layer, row.head, row.rows) for row in seen.rows] == [(0, h, 3 * BATCH * TOKENS) for h in range(HEADS)]
    assert [row.entropy for row in seen.rows] == pytest.approx(mean, abs=1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_loop_over_heads_that_is_checkpointed_is_counted_once(reentrant: bool) -> None:
    class Checkpointed(SixHeads):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    torch.manual_seed(0)
    model, x = Checkpointed(), torch.randn(BATCH, TOKENS, WIDTH, requires_grad=True)
    with observe(model) as seen:
        model(x).square().mean().backward()
    assert [row.entropy for row in seen.rows] == pytest.approx(entropies(model.maps(x)), abs=1e-5)
    assert {row.rows for row in seen.rows} == {BATCH * TOKENS}


def gained(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads of the same queries and keys, which a gain tells apart."""
    return sum((by_hand(q * gain, k, v) for gain in (0.5, 1.0, 2.0)), torch.zeros(()))


def parts_of_keys(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sum((by_hand(q, *part) for part in zip(k.chunk(2, 1), v.chunk(2, 1), strict=True)), torch.zeros(()))


def test_a_loop_whose_tensors_are_not_followed_is_refused() -> None:
    def unseen(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        made = (torch.from_numpy(x.detach().numpy().copy()) for x in (q, k, v))
        return torch.cat([by_hand(*part) for part in zip(*(x.chunk(HEADS, -1) for x in made), strict=True)], -1)

    with pytest.raises(LocaterError, match="3 times from one place of its code, by heads or by parts of the tokens"):
        observed(unseen, None)


@pytest.mark.parametrize("way", [gained, parts_of_keys])
def test_calls_that_cannot_be_told_apart_are_refused(way: Callable[..., Any]) -> None:
    with pytest.raises(
        LocaterError, match="more than once from the same queries: what distinguishes these calls is not"
    ):
        observed(way, None)


def test_adapters_of_each_head_before_one_map_tell_heads_apart() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(HEADS))
            self.to_q, self.to_k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def operands(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
            return [(self.to_q(y), self.to_k(y)) for y in (m(x) for m in self.before)]

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([by_hand(q, k, k) for q, k in self.operands(x)], -1)

    torch.manual_seed(0)
    model, x = Adapted(), 3 * torch.randn(BATCH, TOKENS, WIDTH)
    with observe(model) as seen:
        model(x)
    maps = torch.stack([(q.double() @ k.double().mT).softmax(-1).detach() for q, k in model.operands(x)], 1)
    assert [row.entropy for row in seen.rows] == pytest.approx(entropies(maps), abs=1e-5)


def test_heads_one_at_a_time_through_the_attention_interface() -> None:
    pytest.importorskip("transformers")
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def interface(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(*(split(x).chunk(HEADS, 1) for x in (q, k, v)), strict=True)
        attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return torch.cat([attend(m, *part, None, scaling=1.0, is_causal=False)[0] for part in parts], -1)[:, :, 0]

    for heads in (HEADS, None):
        rows, model, x = observed(interface, heads)
        assert [row.head for row in rows] == list(range(HEADS))
        assert [row.entropy for row in rows] == pytest.approx(entropies(model.maps(x)), abs=1e-5)


def test_a_compiled_model_that_attends_several_times_says_so() -> None:
    pytest.importorskip("transformers")
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def interface(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(*(split(x).chunk(HEADS, 1) for x in (q, k, v)), strict=True)
        attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return torch.cat([attend(m, *part, None, scaling=1.0, is_causal=False)[0] for part in parts], -1)[:, :, 0]

    model = torch.compile(Attention(interface, None), backend="eager")
    with observe(model) as seen:
        model(torch.randn(BATCH, TOKENS, WIDTH))
    assert any(note.startswith("attended more than once in a pass: ") for note in seen.notes)
    torch._dynamo.reset()


def by_windows(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.unflatten(1, (2, 3)).unflatten(-1, (HEADS, -1)).transpose(2, 3) for x in (q, k, v))  # (B, 2, H, 3, D)
    return functional.scaled_dot_product_attention(q, k, v, scale=1.0).transpose(2, 3).flatten(3).flatten(1, 2)


def by_chunks(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    chunks = zip(*(split(x).chunk(2, 2) for x in (q, k, v)), strict=True)
    return joined(torch.cat([(a @ b.mT).softmax(-1) @ c for a, b, c in chunks], 2))


@pytest.mark.parametrize("way", [by_windows, by_chunks])
@pytest.mark.parametrize("heads", [HEADS, None])
def test_windows_and_chunks_are_one_layer(way: Callable[..., Any], heads: int | None) -> None:
    rows, model, x = observed(way, heads)
    q, k = split(model.to_q(x)).double(), split(model.to_k(x)).double()
    maps = [(a @ b.mT).softmax(-1).detach() for a, b in zip(q.chunk(2, 2), k.chunk(2, 2), strict=True)]
    assert [row.entropy for row in rows] == pytest.approx(entropies(torch.cat(maps, 2)), abs=1e-5)
    assert {row.rows for row in rows} == {BATCH * TOKENS}


def test_keys_in_blocks_have_no_distance() -> None:
    """Two blocks of three queries, each of which sees a block on either side."""

    def blocks(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (
            split(q).unflatten(2, (2, 3)),
            *(functional.pad(split(x), (0, 0, 3, 3)).unfold(2, 9, 3).mT for x in (k, v)),
        )
        return joined(((q @ k.mT).softmax(-1) @ v).flatten(2, 3))

    torch.manual_seed(0)
    model, x = Attention(blocks), torch.randn(BATCH, TOKENS, WIDTH)
    with observe(model, rest=True) as seen:
        model(x)
    q, k = split(model.to_q(x)).double(), functional.pad(split(model.to_k(x)).double(), (0, 0, 3, 3))
    maps = [(q[:, :, 3 * at : 3 * at + 3] @ k[:, :, 3 * at : 3 * at + 9].mT).softmax(-1).detach() for at in range(2)]
    assert [row.entropy for row in seen.rows] == pytest.approx(entropies(torch.cat(maps, 2)), abs=1e-5)
    row = seen.rows[0]
    assert (row.kind, row.distance, row.self_mass, row.sink, row.rest_entropy) == ("self", None, None, None, None)
    assert seen.notes[-1].startswith("keys are in blocks around each query, not in order: the model itself")


@pytest.mark.parametrize("separate", [True, False])
def test_pytorchs_multi_head_function_is_heard(separate: bool) -> None:
    added = torch.randn(BATCH * HEADS, TOKENS, TOKENS)
    padding = torch.zeros(BATCH, TOKENS).bool()
    padding[1, 4:] = True
    low = torch.zeros(BATCH, TOKENS).masked_fill(padding, -torch.inf)

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(3 * WIDTH, WIDTH)), nn.Parameter(torch.randn(3 * WIDTH))
            self.out = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = x.transpose(0, 1)
            parts: dict[str, Any] = {}
            if separate:
                weights = self.weight.chunk(3)
                parts = dict(zip(("q_proj_weight", "k_proj_weight", "v_proj_weight"), weights, strict=True))
            out, _ = functional.multi_head_attention_forward(
                *(x, x, x, WIDTH, HEADS, None if separate else self.weight, self.bias, None, None, False, 0.0),
                *(self.out.weight, self.out.bias),
                **dict(key_padding_mask=low, attn_mask=added, use_separate_proj_weight=separate, **parts),
            )
            return out.transpose(0, 1)

    torch.manual_seed(0)
    model, x = Own(), torch.randn(BATCH, TOKENS, WIDTH)
    plain = model(x)
    with observe(model) as seen:
        assert torch.equal(model(x), plain)
    weights, biases = model.weight.double().chunk(3), model.bias.double().chunk(3)
    q, k = (split(functional.linear(x.double(), weights[at], biases[at])) for at in range(2))
    logits = q @ k.mT * (WIDTH // HEADS) ** -0.5 + added.double().view(BATCH, HEADS, TOKENS, TOKENS)
    maps = logits.masked_fill(padding[:, None, None], -torch.inf).softmax(-1).detach()
    expected = [float(torch.special.entr(maps[:, h]).sum(-1)[~padding].mean()) for h in range(HEADS)]
    assert [row.entropy for row in seen.rows] == pytest.approx(expected, abs=1e-5)


def test_flex_attention_with_changed_scores() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(BATCH, 4, TOKENS, 8), torch.randn(BATCH, 2, TOKENS, 8)
    slopes = torch.rand(4)

    def alibi(score: Tensor, b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return score - slopes[h] * (t - s)

    class Causal:
        @staticmethod
        def mask_mod(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
            return t >= s

    call = call_of_flex(q, FlexArguments(q, k, k, alibi, Causal, 0.3))
    at = torch.arange(TOKENS)
    expected = 0.3 * q.double() @ k.double().repeat_interleave(2, 1).mT
    expected = expected - slopes.double()[:, None, None] * (at[:, None] - at)
    assert torch.allclose(call.terms.logits(call.query, call.key, slice(None), TOKENS).double(), expected, atol=1e-5)
    assert torch.equal(call.terms.mask, (at[:, None] >= at).expand(BATCH, 4, -1, -1))


SINKS = torch.tensor([-1.0, 0.5, 2.0])


def with_sink(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = split(q) @ split(k).mT
    sinks = SINKS.view(1, HEADS, 1, 1).expand(*logits.shape[:3], 1)
    return joined(torch.cat([logits, sinks], dim=-1).softmax(-1)[..., :-1] @ split(v))


def with_sink_less_the_largest(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As GPT-OSS does."""
    logits = split(q) @ split(k).mT
    joint = torch.cat([logits, SINKS.reshape(1, -1, 1, 1).expand(len(q), -1, TOKENS, -1)], dim=-1)
    joint = joint - joint.max(dim=-1, keepdim=True).values
    return joined(functional.softmax(joint, dim=-1, dtype=joint.dtype)[..., :-1] @ split(v))


@pytest.mark.parametrize("heads", [HEADS, None], ids=["told", "not told"])
@pytest.mark.parametrize("way", [with_sink, with_sink_less_the_largest])
def test_a_logit_behind_those_of_the_keys_is_a_sink(way: Callable[..., Any], heads: int | None) -> None:
    rows, model, x = observed(way, heads)
    q, k = split(model.to_q(x)).double(), split(model.to_k(x)).double()
    logits = (q @ k.mT).detach()
    maps = torch.cat([logits, SINKS.double().view(1, -1, 1, 1).expand(BATCH, -1, TOKENS, 1)], -1).softmax(-1)[..., :-1]
    at = torch.arange(TOKENS)
    expected: dict[str, Tensor] = {
        "entropy": torch.special.entr(maps).sum(-1).mean((0, 2)),
        "row_mass": maps.sum(-1).mean((0, 2)),
        "max_logit": logits.amax((0, 2, 3)),
        "max_probability": maps.amax(-1).mean((0, 2)),
        "sink": maps[..., 0].mean((0, 2)),
        "distance": (maps * (at[:, None] - at).abs()).sum(-1).mean((0, 2)),
    }
    for name, values in expected.items():
        assert [row[name] for row in rows] == pytest.approx(values.tolist(), abs=1e-5), name


def less_the_largest(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = split(q) @ split(k).mT
    return joined((logits - logits.amax(-1, keepdim=True).detach()).softmax(-1) @ split(v))


def less_the_largest_in_place_and_masked(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = split(q) @ split(k).mT
    logits -= torch.max(logits, dim=-1, keepdim=True)[0]
    return joined(logits.masked_fill(torch.zeros(TOKENS, TOKENS).bool(), -torch.inf).softmax(-1) @ split(v))


def not_below_the_least(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As OPT does: the larger of two tensors is no largest number of rows."""
    logits = split(q) @ split(k).mT
    return joined(torch.max(logits, torch.tensor(torch.finfo(logits.dtype).min)).softmax(-1) @ split(v))


@pytest.mark.parametrize("way", [less_the_largest, less_the_largest_in_place_and_masked, not_below_the_least])
def test_what_is_taken_off_a_row_is_not_taken_off_its_largest_logit(way: Callable[..., Any]) -> None:
    rows, model, x = observed(way)
    q, k = split(model.to_q(x)).double(), split(model.to_k(x)).double()
    assert [row.max_logit for row in rows] == pytest.approx((q @ k.mT).amax((0, 2, 3)).tolist(), rel=1e-5)
    assert [row.entropy for row in rows] == pytest.approx(entropies(model.maps(x)), abs=1e-5)


def sink_in_front(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = split(q) @ split(k).mT
    return joined(torch.cat([torch.zeros_like(logits[..., :1]), logits], -1).softmax(-1)[..., 1:] @ split(v))


def sink_by_row(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = split(q) @ split(k).mT
    return joined(torch.cat([logits, split(q).sum(-1, keepdim=True)], -1).softmax(-1)[..., :-1] @ split(v))


def scaled_after_the_largest(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = split(q) @ split(k).mT
    return joined(((logits - logits.amax(-1, keepdim=True)) * 0.5).softmax(-1) @ split(v))


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        (sink_in_front, "numbers that belong to no key stand in front"),
        (sink_by_row, "joins its softmax, and is another one in each row"),
        (scaled_after_the_largest, "what was taken off each row of its logits is not known any more"),
    ],
)
def test_logits_that_cannot_be_told_are_refused(way: Callable[..., Any], reason: str) -> None:
    model, x = Twice(way), torch.randn(BATCH, TOKENS, WIDTH)
    with observe(model) as seen:
        model(x)
    assert {row.name for row in seen.rows} == {"second"}
    assert reason in seen.notes[-1]
