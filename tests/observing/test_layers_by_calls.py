"""Models without a record: their layers are found by their calls, and the numbers are those of the model's own maps."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import _get_current_function_mode

import locater
from locater.calls.recognise import NO_SOFTMAX
from locater.errors import LocaterError
from locater.observing import SeenHead, observe
from tests.calls.test_attention_like import shrink
from tests.calls.test_attention_like import tiny as small
from tests.processes import ranks

WIDTH, HEADS, TOKENS = 32, 4, 9
# types without a record: decoders of text, hybrids, encoders of text, sound and images; by the interface and beside it
TYPES = [
    "gemma", "glm", "helium", "smollm3", "persimmon", "mpt", "gpt_neo", "codegen", "modernbert", "esm", "wav2vec2", "deit",
]  # fmt: skip


def tiny(model_type: str) -> tuple[Any, dict[str, Tensor]]:
    """An untrained model of a type in small, float64, with random weights that make attention uneven, and inputs."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import AutoModel

    torch.manual_seed(0)
    extra: dict[str, Any] = {}
    if model_type == "codegen":
        extra = {"n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 4}
    elif model_type == "gpt_neo":
        extra = {"hidden_size": 32, "num_heads": 4, "num_layers": 2, "attention_types": [[["global", "local"], 1]]}
    elif model_type == "esm":
        extra = {"vocab_size": 160, "pad_token_id": 0, "mask_token_id": 1}
    elif model_type == "mpt":
        extra = {"d_model": 32, "n_heads": 4, "n_layers": 2}
    elif model_type == "wav2vec2":
        extra = {"conv_dim": [16, 16], "conv_kernel": [8, 4], "conv_stride": [8, 4], "num_feat_extract_layers": 2}
    config = shrink(CONFIG_MAPPING[model_type](**extra))
    if getattr(config, "pad_token_id", None) is not None:
        config.pad_token_id = 0
    model = AutoModel.from_config(config, attn_implementation="eager").double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8.0)
    if model_type == "deit":
        return model, {"pixel_values": torch.randn(2, 3, 32, 32, dtype=torch.float64)}
    if model_type == "wav2vec2":
        return model, {"input_values": torch.randn(2, 400, dtype=torch.float64)}
    return model, {"input_ids": torch.randint(3, 120, (2, TOKENS)), "attention_mask": torch.ones(2, TOKENS).long()}


def entropies(maps: Tensor) -> list[float]:
    """Mean entropy of each head over all rows of maps (B, H, T, S)."""
    p = maps.double()
    return torch.special.entr(p).sum(-1).mean((0, 2)).tolist()


def of_layer(rows: list[SeenHead], layer: int) -> list[float | None]:
    return [row.entropy for row in rows if row.layer == layer]


@pytest.mark.parametrize("model_type", TYPES)
def test_entropies_are_those_of_the_models_own_maps(model_type: str) -> None:
    """In bfloat16 the model's maps are rounded to 2^-9 of each weight: that is 2^-9 (H + 1) of an entropy H."""
    model, inputs = tiny(model_type)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        in_dtype = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}
        with torch.no_grad(), observe(model.to(dtype)) as seen:
            out = model(**in_dtype, output_attentions=True)
        maps = [part for part in out.attentions if part is not None]
        assert len(maps) == len(seen.sites) > 0
        for number, part in enumerate(maps):
            near = 1e-5 if dtype != torch.bfloat16 else 2**-9 * (1 + max(entropies(part)))
            assert of_layer(seen.rows, number) == pytest.approx(entropies(part), abs=near), dtype
    assert {row.provenance for row in seen.rows} == {"calls"}
    assert "query-key maps of these layers are not known" in seen.notes[0]
    assert seen.silent == []
    assert min(row.entropy_ratio or 0 for row in seen.rows) < 0.99  # maps that are not uniform


def plain_eager(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    weights = functional.softmax(query @ key.mT * scaling, dim=-1)
    return (weights @ value).transpose(1, 2), weights


class Pooled(nn.Module):
    """Learned queries, the same for all sequences, through the interface."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.is_causal, self.scaling = config, False, 0.5
        self.query, self.to_k = nn.Parameter(torch.randn(1, HEADS, 3, WIDTH // HEADS)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        from transformers.models.glm.modeling_glm import ALL_ATTENTION_FUNCTIONS

        k = self.to_k(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, plain_eager)
        return attend(self, self.query, k, k, None, scaling=self.scaling, is_causal=False)[0]


class Both(Pooled):
    """Attends by hand first, then through the interface."""

    def forward(self, x: Tensor) -> Tensor:
        k = self.to_k(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        query = self.query.expand(len(x), -1, -1, -1) + (k @ k.mT).softmax(-1).mean()
        return super().forward(x) + query.mean()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_what_a_module_attends_beside_the_interface_is_not_lost(implementation: str) -> None:
    from transformers import GlmConfig

    torch.manual_seed(0)
    model, x = Both(GlmConfig(attn_implementation=implementation)), torch.randn(5, TOKENS, WIDTH)
    with torch.no_grad(), observe(model) as seen:
        model(x)
        k = model.to_k(x).double().unflatten(-1, (HEADS, -1)).transpose(1, 2)
    assert [(site.name, site.kind) for site in seen.sites] == [("", "cross"), ("", "self")]
    assert of_layer(seen.rows, 1) == pytest.approx(entropies((k @ k.mT).softmax(-1)), abs=1e-5)
    assert of_layer(seen.rows, 0) == pytest.approx(entropies((model.query.double() @ k.mT * 0.5).softmax(-1)), abs=1e-5)


def test_learned_queries_for_all_sequences_are_heard_at_the_interface() -> None:
    from transformers import GlmConfig

    torch.manual_seed(0)
    model, x = Pooled(GlmConfig(attn_implementation="sdpa")), torch.randn(5, TOKENS, WIDTH)
    with torch.no_grad(), observe(model) as seen:
        model(x)
        k = model.to_k(x).double().unflatten(-1, (HEADS, -1)).transpose(1, 2)
        maps = (model.query.double() @ k.mT * 0.5).softmax(-1)
    assert of_layer(seen.rows, 0) == pytest.approx(entropies(maps), abs=1e-5)
    assert (seen.rows[0].rows, seen.rows[0].kind) == (5 * 3, "cross")


class TwoInputs(nn.Module):
    """Queries of the first input and keys of the second, in three ways to take their largest numbers off."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.to_q, self.to_k = way, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.to_q(x), self.to_k(y)))
        self.logits = q @ k.mT * 3.0
        less = (self.logits - self.logits.max()).clamp(-50_000, 50_000) if "all" in self.way else self.logits
        if "turned" in self.way:
            self.logits, less, k = self.logits.mT, less.mT, q
        if "rows" in self.way:
            less = (less - less.max(-1, keepdim=True)[0]).clamp(-50_000, 50_000)
        return less.softmax(-1) @ k


def test_queries_and_keys_of_two_inputs_of_one_length_are_cross_attention() -> None:
    """Not told by a name nor by lengths: distance and self_mass would be of tokens that are not the same."""
    torch.manual_seed(0)
    model, x = TwoInputs(""), torch.randn(3, TOKENS, WIDTH)
    for other, kind in ((torch.randn(3, TOKENS, WIDTH), "cross"), (x, "self"), (x.clone(), "self")):
        with torch.no_grad(), observe(model) as seen:
            model(x, other)
        assert {row.kind for row in seen.rows} == {kind}
        assert (seen.rows[0].distance is None) == (seen.rows[0].self_mass is None) == (kind == "cross")


def test_lxmert_with_as_many_words_as_boxes() -> None:
    """Its attention takes `context` by place, in self-attention the tokens themselves."""
    from transformers import LxmertConfig, LxmertModel

    torch.manual_seed(0)
    config = LxmertConfig(
        hidden_size=32, num_attention_heads=4, intermediate_size=32, l_layers=1, r_layers=1, x_layers=1
    )
    inputs = {"visual_feats": torch.randn(2, TOKENS, 2048), "visual_pos": torch.rand(2, TOKENS, 4)}
    model = LxmertModel(config).eval()
    with torch.no_grad(), observe(model) as seen:
        model(input_ids=torch.randint(3, 120, (2, TOKENS)), **inputs)
    kinds = {row.name: row.kind for row in seen.rows}
    assert {name for name, kind in kinds.items() if kind == "cross"} == {"encoder.x_layers.0.visual_attention.att"}
    assert len(kinds) == 5


@pytest.mark.parametrize("way", ["", "all", "all turned", "rows", "all turned rows"])
def test_logits_are_those_before_largest_numbers_were_taken_off(way: str) -> None:
    """Off each row, or off all of them; a clamp that reaches no number between changes nothing (Grounding DINO)."""
    torch.manual_seed(0)
    model, x = TwoInputs(way), torch.randn(3, TOKENS, WIDTH)
    with torch.no_grad(), observe(model) as seen:
        model(x, torch.randn(3, TOKENS - 2, WIDTH))
    assert of_layer(seen.rows, 0) == pytest.approx(entropies(model.logits.softmax(-1)), abs=1e-5)
    assert [row.max_logit for row in seen.rows] == pytest.approx(model.logits.amax((0, 2, 3)).tolist(), abs=1e-5)


def test_a_clamp_that_changes_rows_less_their_largest_number_is_refused() -> None:
    class Tight(TwoInputs):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            logits = self.to_q(x) @ self.to_k(y).mT
            return (logits - logits.amax(-1, keepdim=True)).clamp(-0.1, 0.0).softmax(-1) @ y

    x = torch.randn(3, TOKENS, WIDTH)
    with pytest.raises(LocaterError, match="what was taken off each row"), observe(model := Tight("")):
        model(x, x)


def test_logits_that_are_written_into_a_tensor_by_parts_are_logits() -> None:
    """Longformer's, a diagonal at a time. With few tokens its window hides none of them."""
    from transformers import LongformerConfig, LongformerModel

    torch.manual_seed(0)
    config = LongformerConfig(vocab_size=120, hidden_size=32, num_attention_heads=4, num_hidden_layers=2, attention_window=16,
                              intermediate_size=32)  # fmt: skip
    model = LongformerModel(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8.0)
    with torch.no_grad(), observe(model) as seen:
        out = model(torch.randint(3, 120, (2, TOKENS)), output_attentions=True)
    for number, part in enumerate(out.attentions):
        assert of_layer(seen.rows, number) == pytest.approx(entropies(part), abs=1e-5)
    assert {row.distance for row in seen.rows} == {None}  # columns are offsets
    assert min(row.entropy_ratio or 0 for row in seen.rows) < 0.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_of_minus_ten_thousand_hides(dtype: torch.dtype) -> None:
    """As MarkupLM's, which passes the attention interface: rows of padding do not count, nor do its keys."""
    model, inputs = tiny("markuplm")
    inputs["attention_mask"][0, -2:] = 0
    with torch.no_grad(), observe(model.to(dtype)) as seen:
        out = model(**inputs, output_attentions=True)
    real = inputs["attention_mask"].bool()
    for number, part in enumerate(out.attentions):
        rows = torch.special.entr(part.double()).sum(-1).transpose(1, 2)[real]  # (rows, H)
        keys = real.sum(-1, keepdim=True).expand_as(real)[real].double()
        near = 1e-5 if dtype == torch.float32 else 0.01
        assert of_layer(seen.rows, number) == pytest.approx(rows.mean(0).tolist(), abs=near)
        ratios = [row.entropy_ratio for row in seen.rows if row.layer == number]
        assert ratios == pytest.approx((rows / keys.log()[:, None]).mean(0).tolist(), abs=near)


def test_fused_attention_gives_the_numbers_of_eager_attention_on_a_padded_batch() -> None:
    model, inputs = tiny("glm")
    model.float()  # in float64 its eager maps of padding are NaN
    inputs["attention_mask"][0, :3] = 0
    with torch.no_grad(), observe(model) as eager:
        plain = model(**inputs, output_attentions=True)
    model.set_attn_implementation("sdpa")
    with torch.no_grad(), observe(model) as fused:
        model(**inputs)
    assert [r.entropy for r in fused.rows] == pytest.approx([r.entropy for r in eager.rows], abs=1e-6)
    real = inputs["attention_mask"].bool()
    expected = [
        torch.special.entr(part[:, h].double()).sum(-1)[real].mean() for part in plain.attentions for h in range(4)
    ]
    assert [r.entropy for r in eager.rows] == pytest.approx([float(x) for x in expected], abs=1e-5)


class Direct(nn.Module):
    """Attention in one of several ways, none of which passes the interface of transformers."""

    def __init__(self, way: str, heads: int = HEADS) -> None:
        super().__init__()
        self.way, self.num_heads = way, heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def maps(self, x: Tensor) -> Tensor:
        """The maps that it has, in float64, by the definition."""
        q, k = (m(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2).double() for m in (self.to_q, self.to_k))
        logits = q @ k.mT * (0.3 if self.way == "scaled" else q.shape[-1] ** -0.5)
        if self.way == "masked":
            logits = logits + mask_of(x.shape[1]).double()
        elif self.way in ("causal", "subtracted"):
            logits = logits.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -torch.inf)
        return logits.softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for m in (self.to_q, self.to_k, self.to_v))
        scale, T = q.shape[-1] ** -0.5, x.shape[1]
        if self.way == "causal":
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.way == "masked":
            out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask_of(T))
        elif self.way == "scaled":
            out = functional.scaled_dot_product_attention(q, k, v, scale=0.3)
        elif self.way == "by hand":
            out = (q @ k.transpose(-1, -2) * scale).softmax(-1) @ v
        elif self.way == "subtracted":
            out = torch.softmax(q @ k.mT * scale - 1e4 * torch.ones(T, T).triu(1), dim=-1) @ v
        elif self.way == "einsum":
            out = functional.softmax(torch.einsum("bhtd,bhsd->bhts", q, k) / scale**-1, dim=-1) @ v
        else:  # batch and heads are one axis
            weights = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).mul_(scale).softmax(-1)
            out = torch.bmm(nn.functional.dropout(weights, 0.1, self.training), v.flatten(0, 1)).view_as(v)
        return out.transpose(1, 2).flatten(2)


def mask_of(tokens: int) -> Tensor:
    mask = torch.zeros(tokens, tokens)
    mask[5:, 2] = torch.finfo(torch.float32).min
    mask[3, 4] = -2.0
    return mask


@pytest.mark.parametrize("way", ["causal", "masked", "scaled", "by hand", "subtracted", "einsum", "flat"])
def test_attention_of_a_plain_module_is_heard(way: str) -> None:
    torch.manual_seed(1)
    attention = Direct(way).eval()
    model, x = nn.Sequential(attention, nn.Linear(WIDTH, WIDTH)), 3 * torch.randn(2, TOKENS, WIDTH)
    plain = model(x)
    with observe(model) as seen:
        assert torch.equal(model(x), plain)
    maps = attention.maps(x).detach()
    assert of_layer(seen.rows, 0) == pytest.approx(entropies(maps), abs=1e-5)
    visible = (maps > 0).sum(-1)
    wide = visible > 1
    ratio = torch.special.entr(maps).sum(-1) / visible.clamp_min(2).log()
    expected = [float(ratio[:, h][wide[:, h]].mean()) for h in range(HEADS)]
    assert [row.entropy_ratio for row in seen.rows] == pytest.approx(expected, abs=1e-5)
    assert [row.max_probability for row in seen.rows] == pytest.approx(maps.amax(-1).mean((0, 2)).tolist(), abs=1e-5)
    assert (seen.rows[0].name, seen.rows[0].kind, len(seen.rows), seen.silent) == ("0", "self", HEADS, [])


class Linear(Direct):
    """Called attention, with a query and a key map, and no softmax of q.k."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x) for m in (self.to_q, self.to_k, self.to_v))
        return q.softmax(-1) @ (k.softmax(1).mT @ v)


class Opaque(torch.autograd.Function):
    """The same numbers, made where nobody sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy().copy())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class OneByOne(Direct):
    """One head after the other, of numbers that Locater cannot follow: which head a call is of is not known."""

    def forward(self, x: Tensor) -> Tensor:
        maps = (Opaque.apply(m(x)) for m in (self.to_q, self.to_k, self.to_v))
        parts = zip(*(m.chunk(self.num_heads, -1) for m in maps), strict=True)
        return torch.cat([(q @ k.mT).softmax(-1) @ v for q, k, v in parts], -1)


class Model(nn.Module):
    """Two towers, of which one may not run."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.image = (nn.ModuleList([Direct("by hand"), Direct("causal")]) for _ in range(2))
        self.linear, self.apart = Linear("linear"), OneByOne("one by one")
        self.fail = False

    def forward(self, x: Tensor, image: Tensor | None = None) -> Tensor:
        for block in self.text:
            x = x + block(x)
        if self.fail:
            raise RuntimeError("as it should")
        for block in self.image if image is not None else ():
            x = x + block(image)
        return self.apart(self.linear(x))


def test_what_never_ran_and_what_was_not_heard_is_named() -> None:
    model, x = Model(), torch.randn(2, TOKENS, WIDTH)
    with observe(model) as seen:
        model(x)
    assert [site.name for site in seen.sites] == ["text.0", "text.1"]
    assert seen.silent == ["image.0", "image.1"]
    _, silent, unheard, refused = seen.notes
    assert silent == "attention modules that never ran: image.* (2)"
    assert unheard == f"no attention was found in modules that look like it: linear: {NO_SOFTMAX}"
    assert refused.startswith(
        "not measured: apart: attention with rows [2, 9]: it is not known which axis are the heads"
    )
    with observe(model) as seen:
        model(x, x)
    assert [row.tower for row in seen.rows[::HEADS]] == [""] * 4
    assert seen.silent == []
    assert {row.name for row in seen.rows} == {"text.0", "text.1", "image.0", "image.1"}


def state(model: nn.Module) -> list[Any]:
    return [sorted(map(str, vars(module))) for module in model.modules()]


def test_nothing_is_attached_afterwards_even_after_an_exception() -> None:
    import torch.nn.attention.flex_attention as flex
    from transformers.modeling_utils import AttentionInterface

    model, x = Model(), torch.randn(2, TOKENS, WIDTH)
    before, function = state(model), flex.flex_attention
    with observe(model):
        model(x)
    assert state(model) == before
    model.fail = True
    with pytest.raises(RuntimeError, match="as it should"), observe(model):
        model(x)
    assert state(model) == before
    assert flex.flex_attention is function
    assert _get_current_function_mode() is None
    assert not any("locater" in getattr(f, "__module__", "") for f in AttentionInterface._global_mapping.values())
    model.fail = False
    with observe(model) as seen:  # a pass that failed leaves nothing that would be counted later
        model(x)
    assert {row.rows for row in seen.rows} == {2 * TOKENS}


def test_layers_heads_and_outputs_can_be_chosen() -> None:
    model, x = Model(), torch.randn(2, TOKENS, WIDTH)
    with observe(model, layers=[1], heads=[0, 3], outputs=True, rest=True) as seen:
        model(x)
    assert [(row.layer, row.head) for row in seen.rows] == [(1, 0), (1, 3)]
    q, k, v = (m(x + model.text[0](x)) for m in (model.text[1].to_q, model.text[1].to_k, model.text[1].to_v))  # type: ignore[operator]
    q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 3].flatten(0, 1)
    expected = torch.linalg.svdvals(out.double())
    assert seen.rows[1].output_singular_values == pytest.approx(expected.tolist(), rel=1e-4)
    with pytest.raises(LocaterError, match="it is of no known architecture"):
        observe(model, patterns=[(0, 0)])
    with pytest.raises(LocaterError, match=r"layers=1: the layers of Model are found while it runs"):
        observe(model, layers=1)


def test_a_model_without_attention_is_told_so() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with (
        pytest.raises(LocaterError, match=r"no softmax attention was found\. None of its modules looks like"),
        observe(model),
    ):
        model(torch.zeros(1, 4))


def test_pytorchs_fast_path_inside_an_unknown_model_stays() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(WIDTH, HEADS, batch_first=True)
            self.encoder, self.own = nn.TransformerEncoder(layer, 1), Direct("causal")

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            return self.own(self.encoder(x, src_key_padding_mask=padding))

    model, x = Mixed().eval(), torch.randn(2, TOKENS, WIDTH)
    padding = torch.zeros(2, TOKENS).bool()
    padding[0, 5:] = True
    with torch.no_grad():
        plain = model(x, padding)
        with observe(model) as seen:
            assert torch.equal(model(x, padding), plain)
    assert [(site.name, site.count) for site in seen.sites] == [("encoder.layers.0.self_attn", 4), ("own", 4)]
    assert seen.rows[0].rows == 2 * TOKENS - 4


def test_towers_of_a_vision_language_model_are_named() -> None:
    model = small("PaliGemma", "cpu").eval()
    text = {"input_ids": torch.randint(3, 100, (1, 5)), "attention_mask": torch.ones(1, 5).long()}
    with torch.no_grad(), observe(model) as seen:
        model(**text)
    assert {row.tower for row in seen.rows} == {"language_model"}
    vision = ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn", "head.attention"]
    assert seen.silent == [f"vision_tower.{name}" for name in vision]
    with torch.no_grad(), observe(model) as seen:
        model.vision_tower(torch.randn(1, 3, 32, 32))
        model(**text)
    towers = list(dict.fromkeys(row.tower for row in seen.rows))
    assert towers == ["vision_tower.encoder", "vision_tower.head", "language_model"]
    assert seen.silent == []


def test_a_monitor_follows_a_model_without_a_record(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, x = Model(), torch.randn(2, TOKENS, WIDTH)
    log = tmp_path / "run.jsonl"
    monitor = locater.Monitor(log, every=2, warn_on="entropy_ratio>0").attach(model)
    with caplog.at_level(logging.WARNING, "locater"):
        for step in range(3):
            loss = model(x, x if step == 2 else None).square().mean()
            loss.backward()
            monitor.after_step(loss=loss)
    monitor.detach()
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [layer["name"] for layer in records[0]["layers"]] == ["text.0", "text.1"]
    steps = [record for record in records if record["kind"] == "step"]
    assert [len(step["heads"]["entropy"]) for step in steps] == [2, 2]
    assert len(steps[0]["heads"]["entropy"][0]) == HEADS
    assert all(
        x is not None for step in steps for name in ("M", "spread") for layer in step["heads"][name] for x in layer
    )
    assert None not in steps[1]["heads"]["entropy"][1]
    assert {record["name"] for record in records if record["kind"] == "warning"} == {"text.0", "text.1"}
    assert "query-key maps of these layers are not known" not in caplog.text
    assert "layers that first ran after the log had begun are not in it: image.0" in caplog.text
    assert KEYS.isdisjoint(key for module in model.modules() for key in vars(module))


KEYS = {"_locater_sites", "forward"}


def test_a_monitor_and_observations_inside_each_other(tmp_path: Path) -> None:
    """Each counts its own passes, also after a step that failed; then nothing is left on the model."""
    model, x = Model(), torch.randn(2, TOKENS, WIDTH)
    before, log = state(model), tmp_path / "run.jsonl"
    with observe(model) as alone:
        model(x)
    expected = [[of_layer(alone.rows, layer)[head] for head in range(HEADS)] for layer in range(2)]
    monitor = locater.Monitor(log, every=1, warn_on="").attach(model)
    with observe(model) as outer:
        for step in range(3):
            model.fail = step == 1
            if model.fail:
                with pytest.raises(RuntimeError, match="as it should"):
                    model(x)
                model.fail = False
            with observe(model) as inner:
                model(x)
            monitor.after_step(loss=0.0)
            assert {row.rows for row in inner.rows} == {2 * TOKENS}
    assert {row.rows for row in outer.rows} == {4 * 2 * TOKENS}  # what ran before the failure counts
    monitor.detach()
    steps = [record for record in map(json.loads, log.read_text().splitlines()) if record["kind"] == "step"]
    assert len(steps) == 3
    for record in steps:
        assert record["heads"]["entropy"] == [pytest.approx(layer, abs=1e-12) for layer in expected]
    assert state(model) == before
    assert _get_current_function_mode() is None


def different_towers(rank: int) -> None:
    """One rank has a batch with images, the other has none; then both have the same."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, TOKENS, WIDTH)
    with observe(model) as seen:
        model(x, x if rank else None)
        with pytest.raises(LocaterError, match="ranks found different attention layers"):
            seen.reduce()
    with observe(model) as seen:
        model(x)
        seen.reduce()
    print(json.dumps([[row.rows, row.entropy] for row in seen.rows]), flush=True)


@pytest.mark.slow
def test_ranks_that_heard_different_layers_are_not_added(tmp_path: Path) -> None:
    first, second = (json.loads(text.splitlines()[-1]) for text in ranks(different_towers, tmp_path))
    assert first == second
    assert {rows for rows, _ in first} == {2 * 2 * TOKENS}


def test_a_scan_of_named_tensors_says_what_it_left_out() -> None:
    result = locater.scan(Model(), query="text.*.to_q.weight", key="text.*.to_k.weight", heads=HEADS)
    assert len(result.rows) == 2 * HEADS
    assert result.assumptions["unread"] == ["apart", "image.0", "image.1", "linear"]
    assert result.assumptions["notes"][0] == "a part of its attention: not read are apart, image.* (2), linear"
    assert json.loads(result.to_json())["assumptions"]["unread"] == result.assumptions["unread"]


def test_copies_are_not_observed() -> None:
    import copy

    model, x = Model(), torch.randn(2, TOKENS, WIDTH)
    with observe(model) as seen:
        model(x)
        copy.deepcopy(model)(x)
    assert {row.rows for row in seen.rows} == {2 * TOKENS}


@pytest.mark.slow
def test_flex_attention_called_directly_is_heard() -> None:
    from torch.nn.attention import flex_attention as flex

    class Flexible(Direct):
        def forward(self, x: Tensor) -> Tensor:
            parts = (self.to_q, self.to_k, self.to_v)
            q, k, v = (m(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for m in parts)
            mask = flex.create_block_mask(lambda b, h, t, s: t >= s, None, None, len(x[0]), len(x[0]), device="cpu")
            return flex.flex_attention(q, k, v, block_mask=mask).transpose(1, 2).flatten(2)

    model, x = Flexible("causal"), torch.randn(2, 128, WIDTH)
    with torch.no_grad(), observe(model) as seen:
        model(x)
    assert of_layer(seen.rows, 0) == pytest.approx(entropies(model.maps(x)), abs=1e-5)


@pytest.mark.slow
def test_a_model_without_a_record_is_heard_under_flex_attention() -> None:
    model, inputs = tiny("gemma")
    model.float()
    with torch.no_grad(), observe(model) as eager:
        model(**inputs)
    model.set_attn_implementation("flex_attention")
    with torch.no_grad(), observe(model) as seen:
        model(**inputs)
    assert [r.entropy for r in seen.rows] == pytest.approx([r.entropy for r in eager.rows], abs=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="torch.compile needs a compiler")
def test_a_compiled_model_without_a_record_is_heard_at_the_interface() -> None:
    model, inputs = tiny("gemma")
    with torch.no_grad(), observe(model) as plain:
        model(**inputs)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad(), observe(compiled) as seen:
        compiled(**inputs)
    assert [r.entropy for r in seen.rows] == pytest.approx([r.entropy for r in plain.rows], abs=1e-6)


@pytest.mark.parametrize("how", ["eager", "sdpa"])
def test_a_model_without_a_record_that_was_compiled_and_run_before_is_heard(how: str) -> None:
    """The graph of a model under eager attention does not ask whether the table has got an entry for it. It is traced
    three times: one layer is enough.
    """
    import transformers

    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = transformers.GemmaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    model = transformers.GemmaForCausalLM._from_config(config, attn_implementation=how).eval()
    ids = torch.arange(1, 7)[None]
    with observe(model) as plain, torch.no_grad():
        model(ids, use_cache=False)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(ids, use_cache=False)
        with observe(compiled) as seen:
            compiled(ids, use_cache=False)
    assert [row.entropy for row in seen.rows] == pytest.approx([row.entropy for row in plain.rows], abs=1e-6)
    torch._dynamo.reset()
