"""Layers that `discover` finds in models, against an independent run of the model and against the records of families."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import locater
from locater.discovery.layout_of_call import read_layout
from locater.discovery.redrawn_copy import RedrawnCopy, TapedPass
from locater.discovery.verified_search import verify_layout
from locater.errors import LocaterError, UnreadableError
from locater.layers import AttentionLayer, effective
from locater.layers.layout import AttentionLayout, RotaryLayout
from locater.layers.map_layouts import Runs, numbers_in, runs_of
from tests import parity

transformers = pytest.importorskip("transformers")

BASE: dict[str, Any] = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    vocab_size=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
GPT: dict[str, Any] = dict(
    n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=64, bos_token_id=1, eos_token_id=2
)
HEAD = {"head_dim": 8}
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=24)
EVERY_HEAD = {"num_key_value_heads": 4}


def build(stem: str, kind: str = "ForCausalLM", **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{stem}Config")(**settings)
    return getattr(transformers, f"{stem}{kind}")(config).eval()


MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma": ("Gemma", "ForCausalLM", {**BASE, **HEAD}),
    "glm": ("Glm", "ForCausalLM", {**BASE, **HEAD}),
    "olmo": ("Olmo", "ForCausalLM", {**BASE, **EVERY_HEAD}),
    "smollm3": ("SmolLM3", "ForCausalLM", BASE),
    "seed_oss": ("SeedOss", "ForCausalLM", {**BASE, **HEAD}),
    "qwen2_moe": ("Qwen2Moe", "ForCausalLM", {**BASE, **EXPERTS}),
    "codegen": ("CodeGen", "ForCausalLM", {**GPT, "rotary_dim": 4}),
    "gpt_bigcode": ("GPTBigCode", "ForCausalLM", GPT),
    "mpt": ("Mpt", "ForCausalLM", dict(d_model=32, n_layers=2, n_heads=4, vocab_size=64, max_seq_len=64)),
    "hunyuan": ("HunYuanDenseV1", "ForCausalLM", {**BASE, **HEAD}),  # norms of queries and keys after the rotation
    "apertus": ("Apertus", "ForCausalLM", BASE),
}
# q, k, v and output maps of the attention module, written down by hand
DECODERS = dict.fromkeys(
    ("gemma", "glm", "olmo", "smollm3", "seed_oss", "qwen2_moe", "hunyuan"),
    ("model.layers.{}.self_attn", "model.layers.{}.input_layernorm", "o_proj"),
)
DECODERS["apertus"] = ("model.layers.{}.self_attn", "model.layers.{}.attention_layernorm", "o_proj")


LONGER = ("apertus", "seed_oss", "smollm3")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LONGER)) for n in MODELS])
def test_layers_give_what_the_model_computes(name: str) -> None:
    """The model itself, redrawn with other numbers than discovery used, run with hooks on its modules."""
    model = build(*MODELS[name][:2], **MODELS[name][2])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state, python_state = torch.random.get_rng_state(), random.getstate()
    discovered = locater.discover(model)
    assert discovered.whole
    assert [layer.unknown_output for layer in discovered.layers] == [None, None]
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert torch.equal(state, torch.random.get_rng_state())
    assert python_state == random.getstate()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    if name in DECODERS:
        _compare_with_hooks(model, *DECODERS[name])


class Float64(TorchFunctionMode):
    """What models compute in float32 whatever their dtype, norms and softmax, in float64: else the comparison is as exact as
    the processor's float32, which differs by its make.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wider(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        if func is Tensor.float:
            func = Tensor.double
        return func(*map(wider, args), **{key: wider(x) for key, x in (kwargs or {}).items()})


def _compare_with_hooks(model: nn.Module, attention: str, norm: str, out: str) -> None:
    model = model.double()
    parity.redraw(model, spread=0.4, seed=7)  # logits of a few units: norms and softmax of these models are float32
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    sites = [
        parity.Site(attention.format(i), norm.format(i), f"{attention.format(i)}.{out}", padding=None) for i in range(2)
    ]
    case = parity.Case("", lambda: model, lambda: {"input_ids": _ids()}, sites)
    for implementation in ("eager", "sdpa"):
        with Float64():
            records = parity.record(case, model, implementation)
        for layer, seen in zip(locater.discover(model).layers, records, strict=True):
            assert layer.provenance == "discovered"
            assert seen.calls == 1
            differences = parity.disagreement(layer, seen, case)
            assert {"logits", "output"} <= differences.keys()
            assert max(differences.values()) < parity.TOLERANCE, differences


def _ids(length: int = 11) -> Tensor:
    return torch.randint(3, 64, (2, length), generator=torch.Generator().manual_seed(5))


RECORDED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "ForCausalLM", BASE),
    "gpt2": ("GPT2", "LMHeadModel", GPT),
    "bert": ("Bert", "Model", BASE),
    "t5": (
        "T5",
        "ForConditionalGeneration",
        dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=64, decoder_start_token_id=0),
    ),
}


@pytest.mark.parametrize("name", RECORDED)
def test_maps_are_those_of_the_record(name: str) -> None:
    """Effective maps (scale x W_Q^T W_K of each head) of discovery and of the hand-written family."""
    model = build(*RECORDED[name][:2], **RECORDED[name][2]).double()
    parity.redraw(model)
    example = {"input_ids": _ids(), "decoder_input_ids": _ids(7)} if name == "t5" else None
    by_record = locater.attention_layers(model)
    discovered = locater.discover(model, example)
    assert discovered.whole
    assert len(by_record) == len(discovered.layers)
    for layer in discovered.layers:
        record = next(other for other in by_record if layer.name.startswith(other.name))
        ours, theirs = _logit_maps(layer), _logit_maps(record)
        assert (ours - theirs).abs().max() < 1e-8 * theirs.std(), layer.name
        assert (layer.causal, layer.kind) == (record.causal, record.kind) or layer.unknown_output


def _logit_maps(layer: AttentionLayer) -> Tensor:
    maps = effective(layer)
    key = maps.key.repeat_interleave(layer.group, 0)
    return maps.scale * maps.query.mT @ key


@pytest.fixture(scope="module")
def qwen3() -> tuple[AttentionLayout, TapedPass]:
    """A layout with norms and rotation, and a second pass to verify it on."""
    copied = RedrawnCopy(build("Qwen3", **{**BASE, **HEAD}), None)
    first = copied.run(0)
    layout = read_layout(first.tape, first.calls[0])
    return layout, copied.run(1)


def test_the_layout_that_was_read_is_verified(qwen3: tuple[AttentionLayout, TapedPass]) -> None:
    layout, run = qwen3
    assert verify_layout(layout, run, run.calls[0]) == layout
    assert layout.query_norm is not None
    assert layout.rotary is not None
    assert len(layout.rotary.frequencies) == 4


def _shifted(rows: Runs) -> Runs:
    first, *others = numbers_in(rows)
    return runs_of([*others, first])


def _faults(layout: AttentionLayout) -> dict[str, AttentionLayout]:
    """Layouts with one small mistake in queries or keys."""
    query, key, norm, rotary = layout.query, layout.key, layout.query_norm, layout.rotary
    assert norm is not None
    assert rotary is not None
    return {
        "query rows": replace(layout, query=replace(query, rows=_shifted(query.rows))),
        "key rows": replace(layout, key=replace(key, rows=_shifted(key.rows))),
        "angle": replace(layout, rotary=RotaryLayout((rotary.frequencies[0] + 1e-4, *rotary.frequencies[1:]))),
        "no rotation": replace(layout, rotary=None),
        "front norm": replace(layout, norm=type(layout.norm)()),
        "query norm": replace(layout, query_norm=None),
        "gain + 1": replace(layout, query_norm=replace(norm, offset=1.0)),
        "eps": replace(layout, query_norm=replace(norm, eps=norm.eps + 1e-4)),
        "order of norm and rotation": replace(layout, norm_last=True),
        "scale of products": replace(layout, product_scale=1.0001),
    }


def test_mistakes_in_queries_and_keys_are_refused(qwen3: tuple[AttentionLayout, TapedPass]) -> None:
    layout, run = qwen3
    for name, faulty in _faults(layout).items():
        with pytest.raises(UnreadableError, match="queries and keys differ"):
            pytest.fail(f"{name} was verified: {verify_layout(faulty, run, run.calls[0])}")


def test_a_mistake_in_the_scale_leaves_queries_and_keys(qwen3: tuple[AttentionLayout, TapedPass]) -> None:
    layout, run = qwen3
    faulty = replace(layout, logits=replace(layout.logits, scale=layout.logits.scale * 1.0001))
    result = verify_layout(faulty, run, run.calls[0])
    assert "scale differs" in str(result.unknown_scale)
    layer = result.build(locater.sources.open_source.open_source(run.model)[0])
    with pytest.raises(LocaterError, match="only its queries and keys are known"):
        layer.logits(torch.zeros(1, 2, 32))


def test_mistakes_in_values_and_output_leave_the_logits(qwen3: tuple[AttentionLayout, TapedPass]) -> None:
    layout, run = qwen3
    value, out = layout.value, layout.out
    assert value is not None
    assert out is not None
    for faulty in (
        replace(layout, value=replace(value, rows=_shifted(value.rows))),
        replace(layout, out=replace(out, rows=_shifted(out.rows))),
    ):
        result = verify_layout(faulty, run, run.calls[0])
        assert result.unknown_logits is None
        assert "output differs" in str(result.unknown_output)
        layer = result.build(locater.sources.open_source.open_source(run.model)[0])
        layer.logits(torch.zeros(1, 2, 32, dtype=torch.float64))
        with pytest.raises(LocaterError, match="cannot be computed"):
            layer.output(torch.zeros(1, 2, 32, dtype=torch.float64))


def test_a_mistake_in_the_mask_leaves_logits_and_maps(qwen3: tuple[AttentionLayout, TapedPass]) -> None:
    layout, run = qwen3
    for mistake in ({"causal": False}, {"window": 8}):
        result = verify_layout(replace(layout, logits=replace(layout.logits, **mistake)), run, run.calls[0])
        assert result.unknown_logits is None
        assert result.unknown_output is None
        assert "mask changes" in str(result.unknown_mask)
        layer = result.build(locater.sources.open_source.open_source(run.model)[0])
        x = torch.randn(1, 2, 32, dtype=torch.float64)
        with pytest.raises(LocaterError, match="give mask="):
            layer.output(x)
        right = layout.build(locater.sources.open_source.open_source(run.model)[0])
        mask = torch.ones(2, 2, dtype=torch.bool).tril()[None, None]
        assert torch.equal(layer.output(x, mask=mask), right.output(x))


@pytest.mark.parametrize("clip", [0.3, 1e3])
def test_a_clipped_query_is_refused(clip: float) -> None:
    """Also where no number of the example reaches the clip."""
    model = build("Olmo", **{**BASE, **EVERY_HEAD}, clip_qkv=clip)
    discovered = locater.discover(model)
    assert not discovered.layers
    assert {refusal.reason for refusal in discovered.refused} == {
        "its queries, keys or values are clipped, or no linear function of their maps"
    }
    with pytest.raises(LocaterError, match="clipped"):
        locater.attention_layers(model)


def test_scan_of_an_unknown_architecture() -> None:
    scan = locater.scan(build("Gemma", **{**BASE, **HEAD}))
    assert len(scan.rows) == 8
    assert {entry["provenance"] for entry in scan.layers} == {"discovered"}
    assert any(note.startswith("discovered") for note in scan.assumptions["notes"])


def test_an_exception_in_the_pass_leaves_the_model_as_it_was() -> None:
    model = build("Gemma", **{**BASE, **HEAD}).train()
    with pytest.raises(LocaterError, match="example="):
        locater.discover(model, {"input_ids": torch.full((1, 3), 10_000)})
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.zeros(1).add(1).item() == 1  # no mode is left


@pytest.mark.parametrize(("stem", "windows"), [("Ministral", [6, None]), ("Gemma2", [5000, None])])
def test_windows_longer_than_the_example(stem: str, windows: list[int | None]) -> None:
    settings = {**BASE, **HEAD, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": windows[0]}
    layers = locater.discover(build(stem, **settings)).layers
    assert [layer.window for layer in layers] == windows
    assert all(layer.unknown_output is None for layer in layers)


def test_a_rotation_by_table_is_needed() -> None:
    """DINOv3 turns by the place of a patch in two dimensions: no position times a frequency."""
    model = build(
        "DINOv3ViT",
        "Model",
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=12,
        patch_size=4,
    )
    (layer,) = locater.discover(model).layers
    assert layer.rotary_table is not None
    assert layer.unknown_output is None
    x = torch.randn(1, len(layer.rotary_table.angles), 32)
    assert not torch.allclose(layer.logits(x), replace(layer, rotary_table=None).logits(x), atol=1e-3)


def test_a_window_that_is_built_into_the_model() -> None:
    """GPT-Neo builds its mask when it is made, so it is made anew with other sizes."""
    model = build(
        "GPTNeo",
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=32,
        vocab_size=64,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
    )
    assert [layer.window for layer in locater.discover(model).layers] == [None, 32]


MORE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "arcee": ("Arcee", "ForCausalLM", BASE),
    "cohere": ("Cohere", "ForCausalLM", BASE),
    "ernie4_5": ("Ernie4_5", "ForCausalLM", BASE),
    "exaone4": ("Exaone4", "ForCausalLM", BASE),
    "glm4": ("Glm4", "ForCausalLM", {**BASE, **HEAD}),
    "nemotron": ("Nemotron", "ForCausalLM", BASE),
    "olmoe": ("Olmoe", "ForCausalLM", {**BASE, **EXPERTS}),
    "persimmon": ("Persimmon", "ForCausalLM", BASE),
    "phimoe": ("Phimoe", "ForCausalLM", {**BASE, "num_local_experts": 4}),
    "modernbert": ("ModernBert", "Model", {**BASE, "local_attention": 6, "global_attn_every_n_layers": 2}),
    "electra": ("Electra", "Model", BASE),
    "biogpt": ("BioGpt", "Model", BASE),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_types_are_verified_in_full(name: str) -> None:
    discovered = locater.discover(build(*MORE[name][:2], **MORE[name][2]))
    assert discovered.whole
    assert len(discovered.layers) == 2
    assert all(layer.unknown_output is None for layer in discovered.layers)
