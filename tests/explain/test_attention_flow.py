"""Relevance and its rivals against the model's own eager maps, autograd and formulas written out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import locater
from locater import LocaterError, explain, register
from locater.calls.interceptors import INTERCEPTORS
from locater.calls.listeners import KEY
from locater.explain import attention_event
from locater.explain.attention_flow import RelevanceMatrices, carried_norms
from locater.explain.recorded_run import Run
from locater.families import registry
from locater_lab.train import Shape, Transformer
from tests.explain import two_streams
from tests.families import CASES
from tests.parity import model_of, redraw

IDS = torch.tensor([[3, 17, 4, 9, 30, 12, 5]])
WORDS = torch.tensor([[3, 17, 4, 9, 30, 1], [8, 2, 9, 30, 1, 1]])
PIXELS = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
DECODED = torch.tensor([[1, 6, 7, 8]])


def built(name: str, config: str, **settings: Any) -> Any:
    import transformers

    model = getattr(transformers, name)(getattr(transformers, config)(**settings)).double().eval()
    redraw(model, 1.0)
    return model


def bert() -> Any:
    return built(
        "BertForSequenceClassification",
        "BertConfig",
        **dict(hidden_size=16, num_hidden_layers=3, num_attention_heads=4, intermediate_size=24, vocab_size=40),
        num_labels=3,
    )


def t5() -> Any:
    sizes = dict(
        d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, vocab_size=40, relative_attention_num_buckets=8
    )
    return built("T5ForConditionalGeneration", "T5Config", **sizes, decoder_start_token_id=0)


def bart() -> Any:
    sizes = dict(d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2)
    return built(
        "BartForConditionalGeneration", "BartConfig", **sizes, encoder_ffn_dim=24, decoder_ffn_dim=24, vocab_size=40
    )


def clip() -> Any:
    stack = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24)
    text = dict(stack, vocab_size=40, max_position_embeddings=16, eos_token_id=1, bos_token_id=0, pad_token_id=2)
    vision = dict(stack, image_size=8, patch_size=4)
    return built("CLIPModel", "CLIPConfig", text_config=text, vision_config=vision, projection_dim=8)


def gpt2() -> Any:
    return built("GPT2LMHeadModel", "GPT2Config", n_embd=16, n_layer=3, n_head=4, vocab_size=40, n_positions=16)


def own(**settings: Any) -> Transformer:
    torch.manual_seed(0)
    sizes = dict(vocabulary=32, layers=2, width=16, heads=4, kv_heads=2, hidden=24) | settings
    return Transformer(Shape(**sizes), scale=0.4).double().eval()


def weighted(A: Tensor, dA: Tensor, row: int = 0) -> Tensor:
    """mean over heads of max(dA * A, 0), of maps (B, H, T, S)."""
    return (A * dA)[row].clamp(min=0).mean(0).detach()


def eager(model: Any, keywords: dict[str, Tensor], number: Callable[[Any], Tensor], *names: str) -> list[Tensor]:
    """Weighted maps of the model's own eager attention, by autograd through the maps that it returns."""
    model.set_attn_implementation("eager")
    out = model(**keywords, output_attentions=True)
    maps = [A for name in names for A in _field(out, name)]
    slopes = torch.autograd.grad(number(out), maps)
    model.set_attn_implementation("sdpa")
    return [
        weighted(A, dA, 0) if len(A) == 1 else (A * dA).clamp(min=0).mean(1).detach()
        for A, dA in zip(maps, slopes, strict=True)
    ]


def _field(out: Any, path: str) -> Any:
    for name in path.split("."):
        out = getattr(out, name)
    return out


def clean(model: nn.Module) -> bool:
    """Nothing is left on any module, and every parameter can be trained."""
    left = any(KEY in m.__dict__ or INTERCEPTORS in m.__dict__ or "forward" in m.__dict__ for m in model.modules())
    return not left and all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(("make", "position"), [(gpt2, 4), (bert, None)])
def test_one_stack_against_autograd_through_eager_maps(make: Callable[[], Any], position: int | None) -> None:
    model = make()
    choice = 2 if position is None else (position, 2)
    why = explain.relevance(model, IDS, target=choice)
    parts = eager(
        model,
        {"input_ids": IDS},
        lambda out: out.logits[0, 2] if position is None else out.logits[0, position, 2],
        "attentions",
    )
    R = torch.eye(7, dtype=torch.float64)
    for Abar in parts:
        R = R + Abar @ R
    row = 0 if position is None else position  # BERT reads its class token
    assert why.matrix is not None
    assert torch.allclose(why.matrix, R, atol=1e-12)
    assert torch.allclose(why.scores, R[row] - torch.eye(7)[row], atol=1e-12)
    assert f"read at token {row}" in why.how
    assert clean(model)


def test_encoder_and_decoder_against_a_loop_written_out() -> None:
    model = t5()
    keywords = {"input_ids": IDS, "decoder_input_ids": DECODED}
    why = explain.relevance(model, keywords, target=(2, 11))
    parts = eager(
        model,
        keywords,
        lambda out: out.logits[0, 2, 11],
        "encoder_attentions",
        "decoder_attentions",
        "cross_attentions",
    )
    encoder, decoder, cross = parts[:2], parts[2:4], parts[4:]
    R_ii = np.eye(7)
    for A in encoder:
        R_ii = R_ii + A.numpy() @ R_ii
    R_qq, R_qi = np.eye(4), np.zeros((4, 7))
    for A, C in zip(decoder, cross, strict=True):
        R_qq, R_qi = R_qq + A.numpy() @ R_qq, R_qi + A.numpy() @ R_qi
        R_qi = R_qi + bar(R_qq).T @ C.numpy() @ bar(R_ii)
    assert why.stream == "encoder"
    assert list(why.other_streams) == ["decoder"]
    assert np.allclose(why.scores, R_qi[2], atol=1e-12)
    assert np.allclose(why.other_streams["decoder"], R_qq[2] - np.eye(4)[2], atol=1e-12)
    assert np.abs(R_qi[2]).max() > 1e-4


def bar(R: np.ndarray) -> np.ndarray:
    """R - I with rows scaled to sum to 1, plus I; rows of zeros stay."""
    moved = R - np.eye(len(R))
    sums = moved.sum(1, keepdims=True)
    return np.divide(moved, sums, out=np.zeros_like(moved), where=sums != 0) + np.eye(len(R))


def test_two_towers_each_by_the_gradient_of_the_similarity() -> None:
    model = clip()
    keywords = {"input_ids": WORDS, "pixel_values": PIXELS, "attention_mask": torch.ones_like(WORDS)}
    why = explain.relevance(model, keywords, target=1)
    parts = eager(
        model,
        keywords,
        lambda out: out.logits_per_image[0, 1],
        "vision_model_output.attentions",
        "text_model_output.attentions",
    )
    R, S = torch.eye(5, dtype=torch.float64), torch.eye(6, dtype=torch.float64)
    for A in parts[:2]:
        R = R + A @ R
    for A in parts[2:]:
        S = S + A[1] @ S
    assert why.stream == "image"
    assert torch.allclose(why.scores, R[0] - torch.eye(5)[0], atol=1e-12)
    assert torch.allclose(why.other_streams["text"], S[4] - torch.eye(6)[4], atol=1e-12)  # the end of the second text
    assert float(S[4, :4].max()) > 1e-6


@pytest.fixture
def streams() -> Iterator[Any]:
    register(two_streams.FAMILY)
    torch.manual_seed(0)
    model = two_streams.TwoStreams().double().eval()
    redraw(model, 1.0)
    try:
        yield model
    finally:
        registry.BY_TYPE.remove(two_streams.TYPE)


def test_two_streams_that_look_at_each_other(streams: Any) -> None:
    keywords = {"input_ids": IDS % 12, "features": torch.randn(1, 5, 16, dtype=torch.float64)}
    why = explain.relevance(streams, keywords, target=1)
    calls = [
        [getattr(getattr(streams, s)[n], part) for s in ("text", "image")]
        for n in range(2)
        for part in ("cross", "self_attn")
    ]
    try:
        two_streams.Attention.written_out = True
        number = streams(**keywords)[0, 1]
        maps = [m.map for pair in calls for m in pair]
        slopes = torch.autograd.grad(number, maps, allow_unused=True)
    finally:
        two_streams.Attention.written_out = False
    parts = [
        np.zeros(A.shape[2:]) if dA is None else weighted(A, dA).numpy() for A, dA in zip(maps, slopes, strict=True)
    ]
    tt, ii, ti, it = np.eye(7), np.eye(5), np.zeros((7, 5)), np.zeros((5, 7))
    for n in range(2):
        A_ti, A_it, A_tt, A_ii = parts[4 * n : 4 * n + 4]
        new_ti, new_tt = bar(tt).T @ A_ti @ bar(ii), A_ti @ it
        new_it, new_ii = bar(ii).T @ A_it @ bar(tt), A_it @ ti
        ti, tt, it, ii = ti + new_ti, tt + new_tt, it + new_it, ii + new_ii
        tt, ti = tt + A_tt @ tt, ti + A_tt @ ti
        ii, it = ii + A_ii @ ii, it + A_ii @ it
    assert why.stream == "text"
    assert np.allclose(why.scores, tt[0] - np.eye(7)[0], atol=1e-12)
    assert np.allclose(why.other_streams["image"], ti[0], atol=1e-12)
    assert ti[0].max() > 1e-5
    named = {
        r"text\.\d\.cross": ("a", "b"),
        r"image\.\d\.cross": ("b", "a"),
        "text.*": ("a", "a"),
        "image.*": ("b", "b"),
    }
    again = explain.relevance(streams, keywords, target=1, streams=named)
    assert (again.stream, list(again.other_streams)) == ("a", ["b"])
    assert torch.equal(again.scores, why.scores)
    rolled = explain.rollout(streams, keywords, target=1)
    assert set(rolled.other_streams) == {"image"}


def test_rules_against_numpy_from_random_maps() -> None:
    random = np.random.default_rng(0)
    A, B, C = (random.uniform(size=shape) for shape in ((4, 3), (3, 4), (4, 4)))
    matrices = RelevanceMatrices({"s": 4, "q": 3}, torch.zeros((), dtype=torch.float64))
    matrices.cross_attention(("s", "q", torch.tensor(A)), ("q", "s", torch.tensor(B)))  # nothing moved yet: 0 / 0
    assert np.allclose(matrices["s", "q"], A)
    matrices.self_attention("s", torch.tensor(C))
    matrices.cross_attention(("s", "q", torch.tensor(A)))
    ss, sq = np.eye(4) + C, A + C @ A
    assert np.allclose(matrices["s", "q"], sq + bar(ss).T @ A)
    assert np.allclose(matrices["s", "s"], ss + A @ B)  # eq. 11, with R_qs = B from the first step
    assert np.allclose(matrices["q", "q"], np.eye(3))


def test_relevance_without_gradients_is_rollout_times_two_to_the_layers() -> None:
    model = gpt2()
    run = Run(model, IDS)
    matrices = RelevanceMatrices({"input": 7}, torch.zeros((), dtype=torch.float64))
    for event in run.events:
        matrices.self_attention("input", event.mean_map())
    rolled = explain.rollout(model, IDS)
    assert rolled.matrix is not None
    assert torch.allclose(matrices["input", "input"], 2**3 * rolled.matrix, atol=1e-12)
    assert torch.allclose(rolled.matrix.sum(-1), torch.ones(7, dtype=torch.float64))


def planted() -> Transformer:
    """Every token looks for token 6, whose value is the answer 7; all other tokens carry nothing."""
    model = own(vocabulary=8, layers=1, width=8, heads=2, kv_heads=2, hidden=8, positions="learned")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0 if p.ndim == 1 else 0.0)
        words, attention = model.model.embed_tokens.weight, model.model.layers[0].self_attn
        words[:7, 1] = 1.0
        words[torch.arange(6), 4 + torch.arange(6) % 4] = 0.5
        words[6, 0], words[6, 2], words[7, 3] = 1.0, 1.0, 1.0
        attention.q_proj.weight[0, 1], attention.k_proj.weight[0, 0] = 2.0, 2.0
        attention.v_proj.weight[0, 2], attention.o_proj.weight[3, 0] = 1.0, 1.0
    return model


@pytest.mark.parametrize("name", sorted(explain.METHODS))
def test_a_planted_token_comes_first(name: str) -> None:
    ids = torch.tensor([[0, 3, 2, 6, 1, 4, 5, 0]])
    why = explain.METHODS[name](planted(), ids, target=7)
    if name == "rollout":  # which adds the token itself
        why.scores[-1] = 0
    assert why.method == name
    assert why.ranked()[0][0] == 3
    assert why.target.what == "logit 7 at token 7"


def test_the_table_says_what_each_method_applies_to() -> None:
    assert set(explain.METHODS) == set(explain.APPLIES_TO)
    assert all(getattr(explain, name) is method for name, method in explain.METHODS.items())


def test_attention_norms_against_vectors_written_out() -> None:
    event = Run(own(), IDS).events[-1]
    assert event.value is not None
    assert event.layer.out is not None
    q, k, v = event.call.query[0], event.call.key[0].repeat_interleave(2, 0), event.value[0].repeat_interleave(2, 0)
    A = (q @ k.mT / 2).masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf).softmax(-1)
    W = event.layer.out.weight().detach().double()
    carried = (A[..., None] * v[:, None]).permute(1, 2, 0, 3).flatten(2) @ W.mT  # (T, S, d)
    assert torch.allclose(carried_norms(event), carried.norm(dim=-1), atol=1e-10)


def test_heads_in_parts_and_backends_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = bert()
    whole = explain.relevance(model, IDS, target=1).scores
    monkeypatch.setattr(attention_event, "AT_ONCE", 1)
    assert torch.allclose(explain.relevance(model, IDS, target=1).scores, whole, atol=1e-14)
    model.set_attn_implementation("eager")
    assert torch.allclose(explain.relevance(model, IDS, target=1).scores, whole, atol=1e-12)
    for p in model.parameters():
        p.requires_grad_(False)
    with torch.no_grad():  # neither a frozen model nor a caller without gradients matters
        assert torch.allclose(explain.relevance(model, IDS, target=1).scores, whole, atol=1e-12)


@pytest.mark.parametrize("attention", ["sigmoid", "delta", "learned_sink"])
def test_other_mechanisms(attention: str) -> None:
    """The gradient of a map by dO V^T, against the map itself as a leaf of the graph."""
    model = own(attention=attention, layers=1)
    run = Run(model, IDS)
    event = run.events[0]
    assert event.output is not None
    assert event.value is not None
    (slope,) = torch.autograd.grad(run.output[0, -1, 5], [event.output])
    A = attention_event.attention_maps(event.call).requires_grad_(True)
    mixed = (A @ event.value.repeat_interleave(2, 1)).transpose(1, 2)
    assert torch.allclose(mixed, event.output, atol=1e-10)
    (dA,) = torch.autograd.grad((mixed * slope).sum(), A)
    assert torch.allclose(event.relevance(slope), weighted(A, dA), atol=1e-12)
    if attention == "delta":
        with pytest.raises(LocaterError, match=r"rollout needs weights of at least 0, and those of delta .* relevance"):
            explain.rollout(model, IDS)


def test_attention_outside_the_interface_by_its_own_values() -> None:
    """PyTorch's own modules and timm's: the gradient of the map, against the model with its attention written out."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double().eval()
    redraw(model, 1.0)
    x = torch.randn(6, 1, 16, dtype=torch.float64)
    with pytest.raises(LocaterError, match="6 inputs: explain one at a time"):  # outputs are (tokens, batch, width)
        explain.relevance(model, x)
    wrapped = nn.Sequential(model, Last())
    why = explain.relevance(wrapped, x, target=3)
    parts, h, maps = [], x, []
    for block in model.layers:
        q, k, v = (
            z[:, 0].unflatten(-1, (2, 8)).transpose(0, 1)
            for z in nn.functional.linear(h, block.self_attn.in_proj_weight, block.self_attn.in_proj_bias).split(16, -1)
        )
        maps.append((q @ k.mT / 8**0.5).softmax(-1))
        h = block.norm1(h + block.self_attn.out_proj((maps[-1] @ v).transpose(0, 1).flatten(1))[:, None])
        h = block.norm2(h + block.linear2(block.linear1(h).relu()))
    slopes = torch.autograd.grad(h[-1, 0, 3], maps)
    parts = [(A * dA).clamp(min=0).mean(0).detach() for A, dA in zip(maps, slopes, strict=True)]
    R = torch.eye(6, dtype=torch.float64)
    for Abar in parts:
        R = R + Abar @ R
    assert why.matrix is not None
    assert torch.allclose(why.matrix, R, atol=1e-10)
    assert clean(wrapped)
    timm = next(case for case in CASES if case.label == "timm")
    blocks = model_of(timm)
    run = Run(blocks, {k: v[:1] for k, v in timm.batch().items()})
    event = run.events[-1]
    assert event.value is not None
    assert event.to_heads is not None
    y = torch.randn(1, 9, blocks.blocks[1].attn.proj.out_features, dtype=torch.float64)  # type: ignore[index, union-attr]
    flat = event.to_heads(y).flatten(2)
    assert torch.allclose(flat, y @ blocks.blocks[1].attn.proj.weight, atol=1e-10)  # type: ignore[index, union-attr]


class Last(nn.Module):
    """The output of the last token, (tokens, batch, width) to (batch, width)."""

    def forward(self, x: Tensor) -> Tensor:
        return x[-1]


def test_what_does_not_apply_is_one_line_and_nothing_stays_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    model, bloom = gpt2(), next(case for case in CASES if case.label == "bloom")
    tapped = model_of(bloom)
    monkeypatch.setitem(sys.modules, "captum.attr", None)
    for subject, call, match in (
        (
            tapped,
            lambda: explain.relevance(tapped, {k: v[:1] for k, v in bloom.batch().items()}),
            "needs the values .* use rollout",
        ),
        (model, lambda: explain.relevance(model, IDS, target=99), "entries 0 to 39"),
        (model, lambda: explain.relevance(model, IDS.repeat(2, 1)), "2 inputs: explain one at a time"),
        (model, lambda: explain.rollout(model, {"pixel_values": IDS}), "does not run on these inputs"),
        (
            model,
            lambda: explain.gradient_input(model, {"inputs_embeds": torch.randn(1, 4, 16).double()}),
            "no embedding of its inputs",
        ),
        (model, lambda: explain.gradient_input(model, "text"), "inputs are a str"),  # type: ignore[arg-type]
        (model, lambda: explain.integrated_gradients(model, IDS), r"needs captum: pip install 'locater\[explain\]'"),
    ):
        with pytest.raises(LocaterError, match=match) as caught:
            call()
        assert "\n" not in str(caught.value)
        assert clean(subject)
    assert locater.explain.relevance is explain.relevance
