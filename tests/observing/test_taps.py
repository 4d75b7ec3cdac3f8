"""Attention that does not pass the interface of transformers: undone, nested, cached, compiled, checkpointed,
trained.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from locater.discovery import attention_layers
from locater.errors import LocaterError
from locater.observing import SeenHead, observe
from tests.families import CASES
from tests.families.torch_modules import WIDTH, encode, padded
from tests.observing.test_observe import batch_of, prepared, reference, run, tensors, use, vars_of
from tests.parity import Case, model_of, record

FAST = torch._transformer_encoder_layer_fwd
LABELS = [
    "bloom", "bloom-slow", "falcon", "falcon-alibi", "falcon-groups", "gptj", "mpnet", "xlnet", "deberta_v2", "torch-encoder-pre",
    "torch-encoder-post", "torch-attention", "torch-transformer-post", "siglip-vision", "timm", "timm-head-norms",
]  # fmt: skip
WITH_OUTPUT = ["bloom", "falcon", "gptj", "mpnet", "xlnet", "deberta_v2", "timm"]
CACHED = [
    ("bloom", "eager"),
    ("falcon", "eager"),
    ("falcon", "sdpa"),
    ("falcon-groups", "sdpa"),
    ("falcon-alibi", "sdpa"),
    ("gptj", "eager"),
]


def case_of(label: str) -> Case:
    return next(c for c in CASES if c.label == label)


def model_for(label: str, how: str | None = None) -> Any:
    case = case_of(label)
    return use(model_of(case).float(), how or case.implementations[-1])


def entropies(maps: Tensor) -> Tensor:
    return -torch.special.xlogy(maps, maps).sum(-1)


def close(a: float | None, b: Tensor) -> bool:
    return a == pytest.approx(float(b.detach()), rel=1e-4, abs=1e-4)


# Undone


@pytest.mark.parametrize("label", LABELS)
def test_a_failing_forward_leaves_nothing_behind(label: str) -> None:
    case, model = case_of(label), model_for(label)
    before = vars_of(model).keys()
    with observe(model) as seen:
        run(case, model)
    rows = [row.rows for row in seen.rows]
    last = model.get_submodule(seen.sites[-1].name)
    handles = [part.register_forward_pre_hook(_fail) for part in last.modules()]
    with pytest.raises(RuntimeError, match="meant"), observe(model), torch.enable_grad():
        case.call(model, batch_of(case)) if case.call else model(**batch_of(case))
    for handle in handles:
        handle.remove()
    assert vars_of(model).keys() == before
    assert torch._transformer_encoder_layer_fwd is FAST
    with observe(model) as again:
        run(case, model)
    assert [row.rows for row in again.rows] == rows


def _fail(module: nn.Module, args: Any) -> None:
    raise RuntimeError("meant to fail")


@pytest.mark.parametrize("label", LABELS)
def test_two_observations_count_each_for_itself(label: str) -> None:
    case, model = case_of(label), model_for(label)
    before = vars_of(model).keys()
    outer, inner = observe(model), observe(model)
    outer.__enter__()
    run(case, model)
    once = [row.rows for row in outer.rows]
    inner.__enter__()
    run(case, model)
    outer.__exit__(None, None, None)  # first in, first out
    run(case, model)
    inner.__exit__(None, None, None)
    assert [row.rows for row in outer.rows] == [row.rows for row in inner.rows] == [2 * n for n in once]
    assert vars_of(model).keys() == before
    assert torch._transformer_encoder_layer_fwd is FAST


@pytest.mark.parametrize("label", LABELS)
def test_training_is_equal_to_the_bit(label: str) -> None:
    case, model = case_of(label), model_for(label)
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.1
    model.train()

    def step() -> list[Tensor]:
        torch.manual_seed(3)
        model.zero_grad()
        batch = batch_of(case)
        out = tensors(case.call(model, batch) if case.call else model(**batch))
        sum(x.float().square().sum() for x in out if x.requires_grad).backward()  # type: ignore[union-attr]
        return [x.detach().clone() for x in (*out, *(p.grad for p in model.parameters() if p.grad is not None))]

    plain = step()
    with observe(model, every=2) as seen:
        first, rows = step(), [row.rows for row in seen.rows]
        second = step()
        assert [row.rows for row in seen.rows] == rows  # nobody listened
    for found in (first, second, step()):
        assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))


@pytest.mark.parametrize("label", WITH_OUTPUT)
def test_head_outputs_are_those_of_maps_and_values(label: str) -> None:
    case = case_of(label)
    model, recorded = prepared(label)
    how = case.implementations[-1]
    use(model, how)
    with observe(model, outputs=True) as seen:
        run(case, model)
    for number, layer in enumerate(attention_layers(model)):
        here = recorded[min(recorded)][number]
        maps, counted = reference(case, layer, here)
        assert layer.value is not None
        assert here.x is not None
        value = layer.value(layer.norm(here.x)).unflatten(-1, (layer.kv_heads, -1)).repeat_interleave(layer.group, 2)
        out = torch.einsum("bhts,bshv->bthv", maps.float(), value) * counted[..., None, None]
        wanted = torch.einsum("bthv,bthw->hvw", out, out)
        gram = seen.sites[number].gram
        assert gram is not None
        assert torch.allclose(gram.float(), wanted, rtol=1e-3, atol=1e-3 * float(wanted.detach().abs().max()))


# Cached


def last_rows(label: str, how: str, number: int) -> tuple[Tensor, Tensor]:
    """Entropies (B, H) and largest logits (B, H) of the last query in one whole forward pass."""
    case = case_of(label)
    model, recorded = prepared(label)
    layer = list(attention_layers(model))[number]
    maps, _ = reference(case, layer, recorded[min(recorded)][number])
    logits = recorded[how][number].logits
    assert logits is not None
    return entropies(maps[:, :, -1]), torch.where(maps > 0, logits.double(), -torch.inf)[:, :, -1].amax(-1)


@torch.no_grad()
def one_step(model: Any, batch: dict[str, Tensor], cache: Any = None) -> list[SeenHead]:
    """The last token with everything before it in the cache."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    length = ids.shape[1] - 1
    past = model(
        ids[:, :length], attention_mask=mask[:, :length], use_cache=True, past_key_values=cache
    ).past_key_values
    with observe(model) as seen:
        model(ids[:, length:], attention_mask=mask, use_cache=True, past_key_values=past)
    return seen.rows


@pytest.mark.parametrize(("label", "how"), CACHED)
def test_a_cached_step_is_the_last_row(label: str, how: str) -> None:
    model = use(prepared(label)[0], how)
    for row in one_step(model, batch_of(case_of(label))):
        entropy, top = last_rows(label, how, row.layer)
        assert row.rows == 2
        assert close(row.entropy, entropy[:, row.head].mean())
        assert close(row.max_logit, top[:, row.head].max())


@pytest.mark.parametrize("label", ["falcon", "gptj"])  # BLOOM itself fails with a static cache and a padding mask
def test_a_static_cache_has_room_that_is_not_looked_at(label: str) -> None:
    from transformers import StaticCache

    how = case_of(label).implementations[-1]
    model: Any = use(prepared(label)[0], how)
    for row in one_step(model, batch_of(case_of(label)), StaticCache(config=model.config, max_cache_len=16)):
        entropy, _ = last_rows(label, how, row.layer)
        assert row.rows == 2
        assert close(row.entropy, entropy[:, row.head].mean())


@pytest.mark.parametrize(("label", "how"), CACHED)
def test_generating_counts_every_query_once(label: str, how: str) -> None:
    model: Any = use(prepared(label)[0], how)
    batch = batch_of(case_of(label))
    settings = dict(max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
    plain = model.generate(**batch, **settings)
    with observe(model) as seen:
        assert torch.equal(model.generate(**batch, **settings), plain)
    assert {row.rows for row in seen.rows} == {int(batch["attention_mask"].sum()) + 2 * 3}


# XLNet's segments, memories and second stream


@torch.no_grad()
def test_segments_memories_and_two_streams_of_xlnet() -> None:
    case, model = case_of("xlnet"), model_for("xlnet")
    ids = batch_of(case)["input_ids"]
    settings: dict[str, Any] = dict(token_type_ids=(torch.arange(9) > 4).long().expand(2, 9), output_attentions=True)
    mems = model(ids, use_mems=True, mem_len=6).mems
    for more, width in ((settings, 9), (dict(settings, mems=mems), 9 + mems[0].shape[0])):
        with observe(model) as seen:
            maps = model(ids, **more).attentions  # (T, S, B, H) in the module, (B, H, T, S) here
        for row in seen.rows:
            assert maps[row.layer].shape[-1] == width
            assert row.rows == 18
            assert close(row.entropy, entropies(maps[row.layer][:, row.head].double()).mean())
    target = torch.zeros(2, 1, 9)
    target[:, 0, 8] = 1
    with observe(model) as seen:
        content = model(ids, **settings, target_mapping=target).attentions[0][0]
    assert {row.rows for row in seen.rows} == {18}
    assert all(
        close(row.entropy, entropies(content[:, row.head].double()).mean()) for row in seen.rows if row.layer == 0
    )


# PyTorch's encoder in its fast path


def right_padded() -> dict[str, Tensor]:
    batch = padded()
    return {**batch, "attention_mask": batch["attention_mask"].flip(1)}


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch", [padded, right_padded])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_the_fast_path_is_seen_and_kept(nested: bool, norm_first: bool, batch: Any) -> None:
    def build() -> nn.Module:
        block = nn.TransformerEncoderLayer(WIDTH, 4, 48, dropout=0.0, batch_first=True, norm_first=norm_first)
        return nn.TransformerEncoder(block, 2, enable_nested_tensor=nested)

    base = case_of("torch-encoder-pre" if norm_first else "torch-encoder-post")
    case = replace(
        base, build=build, batch=lambda: {k: v.float() if v.is_floating_point() else v for k, v in batch().items()}
    )
    model = model_of(case).float()
    records = record(case, model, "eager")  # the slow path
    with torch.no_grad():
        plain = encode(model, case.batch())
        with observe(model) as seen:
            assert torch.equal(encode(model, case.batch()), plain)
    real = case.batch()["attention_mask"].bool()
    for row in seen.rows:
        maps = records[row.layer].maps
        assert maps is not None
        assert row.rows == int(real.sum())
        assert close(row.entropy, entropies(maps[:, row.head].double())[real].mean())


def test_the_fast_path_hides_what_an_additive_mask_marks() -> None:
    """PyTorch reads numbers as yes or no there; what acts is what is seen."""
    torch.manual_seed(0)
    layers = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 4, 48, batch_first=True), 1, enable_nested_tensor=False
    ).eval()
    x, at = torch.randn(2, 9, 32), torch.arange(9)
    slopes = -0.3 * (at[:, None] - at).clamp_min(0).float()
    with torch.no_grad():
        with observe(layers) as added:
            out = layers(x, mask=slopes)
        with observe(layers) as hidden:
            assert torch.equal(layers(x, mask=slopes != 0), out)
    with observe(layers) as slow:
        layers(x, mask=slopes)
    assert (
        [row.entropy for row in added.rows]
        == [row.entropy for row in hidden.rows]
        != [row.entropy for row in slow.rows]
    )


# nn.MultiheadAttention by itself


MASKS = ["none", "bool", "float", "bool-3d", "float-3d"]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("padding", ["none", "bool", "float"])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_masks_of_multihead_attention(kind: str, padding: str, first: bool) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(16, 4, kdim=12, vdim=10, batch_first=first)
    nn.init.normal_(attention.in_proj_bias)
    q, k, v = torch.randn(2, 5, 16), torch.randn(2, 7, 12), torch.randn(2, 7, 10)
    mask = torch.rand(*((8,) if "3d" in kind else ()), 5, 7) > 0.6
    mask[..., 3] = False
    hidden = torch.zeros(2, 7, dtype=torch.bool)
    hidden[1, :2] = True
    given: dict[str, Any] = {}
    if kind != "none":
        given["attn_mask"] = mask if "bool" in kind else torch.randn(mask.shape).masked_fill(mask, -torch.inf)
    if padding != "none":
        given["key_padding_mask"] = hidden if padding == "bool" else torch.zeros(2, 7).masked_fill(hidden, -torch.inf)
    inputs = (q, k, v) if first else (x.transpose(0, 1) for x in (q, k, v))
    with observe(attention) as seen:
        _, maps = attention(*inputs, **given, average_attn_weights=False)
    for row in seen.rows:
        assert row.kind == "cross"
        assert row.rows == 10
        assert close(row.entropy, entropies(maps[:, row.head].double()).mean())


def test_unbatched_and_projections_without_bias() -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(16, 4, bias=False)
    x = torch.randn(6, 16)
    with observe(attention) as seen:
        _, maps = attention(x, x, x, attn_mask=torch.ones(6, 6).triu(1).bool(), average_attn_weights=False)
    assert all(close(row.entropy, entropies(maps[row.head].double()).mean()) for row in seen.rows)


@pytest.mark.parametrize("extra", ["add_bias_kv", "add_zero_attn"])
def test_keys_that_are_no_tokens_are_refused(extra: str) -> None:
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 16, batch_first=True), 1, enable_nested_tensor=False
    )
    model.layers[0].self_attn = nn.MultiheadAttention(16, 2, batch_first=True, **{extra: True})
    with pytest.raises(LocaterError, match=r"layers\.0\.self_attn: add_bias_kv and add_zero_attn"):
        observe(model)


def test_timm_masks() -> None:
    torch.manual_seed(0)
    case, model = case_of("timm"), model_for("timm")
    attention, x = model.blocks[0].attn, batch_of(case)["x"]
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    with observe(attention) as seen:
        attention(x, attn_mask=mask)
    q, k, _ = attention.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
    maps = (attention.scale * q @ k.mT).masked_fill(~mask, -torch.inf).softmax(-1)
    assert all(close(row.entropy, entropies(maps[:, row.head].double()).mean()) for row in seen.rows)
    attention.fused_attn = False
    with pytest.raises(LocaterError, match="a boolean attn_mask hides nothing"), observe(attention):
        attention(x, mask)


# Compiled and checkpointed


@pytest.mark.parametrize("label", ["bloom", "torch-encoder-post"])
def test_a_compiled_model_keeps_one_graph_and_counts(label: str) -> None:
    case, model = case_of(label), model_for(label)
    with observe(model) as seen:
        run(case, model)
    wanted = [(row.rows, row.entropy) for row in seen.rows]
    batch = batch_of(case)
    inputs = (
        dict(batch) if label == "bloom" else {"src": batch["src"], "src_key_padding_mask": batch["attention_mask"] == 0}
    )
    torch._dynamo.reset()
    backend = "eager" if label == "bloom" else "aot_eager"  # test_modes.py has a decoder with autograd's own graph
    compiled = torch.compile(model, backend=backend, fullgraph=True)  # a graph that breaks is an error
    with torch.no_grad():
        compiled(**inputs)
        with observe(model) as late:  # after the first compiled call, and nothing is reset
            compiled(**inputs)
        found = [(row.rows, row.entropy) for row in late.rows]
        compiled(**inputs)
    assert (
        [(row.rows, row.entropy) for row in late.rows] == found == [(n, pytest.approx(x, abs=1e-5)) for n, x in wanted]
    )
    torch._dynamo.reset()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("label", ["bloom", "falcon", "gptj"])
def test_checkpointing_counts_once(label: str, reentrant: bool) -> None:
    case, model = case_of(label), model_for(label)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with observe(model) as seen:
        model(**batch_of(case), use_cache=False).logits.sum().backward()
    assert {row.rows for row in seen.rows} == {int(batch_of(case)["attention_mask"].sum())}
