"""Surgery: what is left of every family is what is written out here by hand, and it comes back to the bit."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from locater import LocaterError, Monitor
from locater.control import Controls, Surgery, Temperature, carried_changes, surgery
from locater.discovery import attention_layers
from locater.families.registry import BY_TYPE
from locater.measures import rank_residual
from locater.observing import observe
from locater.sources.open_source import config_of
from locater_lab.models.transformer import TransformerBlock
from locater_lab.train import Plan, Shape, Transformer, run
from locater_lab.train.controls_and_conversion import parse_control
from tests.families import CASES, blocks
from tests.lab.train.test_parts import TINY, corpus
from tests.observing.test_observe import tensors
from tests.parity import Case, model_of

LABELS = (  # every choice of cuts
    "bert bert-decoder roberta roberta-cross xlm-roberta camembert electra electra-widened albert albert-groups albert-inner xlnet "
    "xlnet-causal-clamped gpt2 llama mistral-window qwen2 qwen3 gemma2 gemma3 phi3 granite starcoder2 vit locater-llama locater-causal "
    "locater-masked locater-image"
)
MORE = (  # a few choices: blocks of all other families
    "gpt_neox phi cohere cohere2 gptj falcon falcon-per-head falcon-groups falcon-groups-one-norm falcon-alibi bloom opt opt-bare "
    "opt-post-norm stablelm distilbert mpnet deberta_v2 dinov2 dinov2_with_registers clip clip-text clip-vision siglip siglip-text "
    "siglip-vision olmo2 olmo3 mixtral qwen3_moe gpt_oss granitemoe deepseek_v2 deepseek_v3 t5 mt5 umt5 t5-encoder whisper bart "
    "locater-sandwich stablelm-parallel gpt_neox-sequential locater-post locater-sandwich-alone"
)
BY_LABEL = {case.label: case for case in [*CASES, *blocks.CASES]}
FAMILIES = [pytest.param(BY_LABEL[label], id=label) for label in [*LABELS.split(), *MORE.split()]]
ONE_OF_EACH = [pytest.param(BY_LABEL[x], id=x) for x in "bert albert xlnet gpt2 gemma3 vit locater-masked".split()]

Cuts = dict[str, Any]
SEGMENTS = ("seg_embed", "r_s_bias")  # of XLNet, for calls with token types
EACH: list[Cuts] = [{"no_skip": True}, {"no_mlp": True}, {"no_mlp": "sublayer"}, {"no_norm": True}]
TOGETHER: list[Cuts] = [
    {"no_skip": True, "no_mlp": True},
    {"no_skip": True, "no_norm": True},
    {"no_mlp": True, "no_norm": True},
    {"no_mlp": "sublayer", "no_norm": True},
    {"no_skip": True, "no_mlp": True, "no_norm": True},
    {"no_skip": True, "no_mlp": "sublayer", "no_norm": True},
]
FEW: list[Cuts] = [*EACH[:2], EACH[3], TOGETHER[-1]]


pytestmark = pytest.mark.usefixtures("detached")


def execute(model: nn.Module, case: Case) -> Any:
    """One pass without gradients."""
    with torch.no_grad():
        return case.call(model, case.batch()) if case.call else model(**case.batch())


def prepared(case: Case) -> nn.Module:
    model: Any = model_of(case)
    if case.implementations == ("eager",) and hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("eager")
    return model


def blocks_of(model: nn.Module) -> list[Any]:
    """Layers and blocks, but no mixtures of experts."""
    blocks = [module for module in model.modules() if type(module).__name__.endswith(("Layer", "Block"))]
    return [module for module in blocks if "SparseMoe" not in type(module).__name__]


def watched(model: nn.Module, case: Case) -> list[tuple[Any, dict[str, Any], Tensor]]:
    """Every call of a block in order: the block, its arguments by name, and the stream that left it."""
    calls: list[tuple[Any, dict[str, Any], Tensor]] = []

    def hook(block: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        given = dict(inspect.signature(type(block).forward).bind(block, *args, **kwargs).arguments)
        calls.append((block, {**given, **given.pop("kwargs", {})}, out[0] if isinstance(out, tuple) else out))

    handles = [block.register_forward_hook(hook, with_kwargs=True) for block in blocks_of(model)]
    try:
        execute(model, case)
    finally:
        for handle in handles:
            handle.remove()
    return calls


# What is left, written out. `given` are the arguments of the block; n is its norm, or nothing


def normed(norm: nn.Module, cuts: Cuts) -> Callable[[Tensor], Tensor]:
    return (lambda x: x) if cuts.get("no_norm") else norm


def bert(block: Any, x: Tensor, given: dict[str, Any], cuts: Cuts) -> Tensor:
    first, second = normed(block.attention.output.LayerNorm, cuts), normed(block.output.LayerNorm, cuts)
    mixed = block.attention.output.dense(block.attention.self(x, attention_mask=given["attention_mask"])[0])
    y = first(mixed) if cuts.get("no_skip") else first(mixed + x)
    if given.get("encoder_hidden_states") is not None:  # its skip stays
        asked = dict(
            encoder_hidden_states=given["encoder_hidden_states"], attention_mask=given["encoder_attention_mask"]
        )
        mixed = block.crossattention.output.dense(block.crossattention.self(y, **asked)[0])
        y = normed(block.crossattention.output.LayerNorm, cuts)(mixed + y)
    if cuts.get("no_mlp"):
        return y if cuts["no_mlp"] == "sublayer" else second(y)
    return second(block.output.dense(block.intermediate.intermediate_act_fn(block.intermediate.dense(y))) + y)


def albert(block: Any, x: Tensor, given: dict[str, Any], cuts: Cuts) -> Tensor:
    layer = block.attention
    first, second = normed(layer.LayerNorm, cuts), normed(block.full_layer_layer_norm, cuts)
    q, k, v = (
        m(x).unflatten(-1, (layer.num_attention_heads, -1)).transpose(1, 2)
        for m in (layer.query, layer.key, layer.value)
    )
    maps = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~given["attention_mask"], -torch.inf).softmax(-1)
    mixed = layer.dense((maps @ v).transpose(1, 2).flatten(2))
    y = first(mixed) if cuts.get("no_skip") else first(mixed + x)
    if cuts.get("no_mlp"):
        return y if cuts["no_mlp"] == "sublayer" else second(y)
    return second(block.ffn_output(block.activation(block.ffn(y))) + y)


def xlnet(block: Any, x: Tensor, given: dict[str, Any], cuts: Cuts) -> Tensor:
    layer = block.rel_attn
    first, second = normed(layer.layer_norm, cuts), normed(block.ff.layer_norm, cuts)
    q, k, v, r = (
        torch.einsum("ibh,hnd->ibnd", h, W)
        for h, W in ((x, layer.q), (x, layer.k), (x, layer.v), (given["r"].to(x), layer.r))
    )
    mixed = torch.einsum("ibnd,hnd->ibh", layer.rel_attn_core(q, k, v, r, None, given["attn_mask_h"]), layer.o)
    y = first(mixed) if cuts.get("no_skip") else first(mixed + x)
    if cuts.get("no_mlp"):
        return y if cuts["no_mlp"] == "sublayer" else second(y)
    return second(block.ff.layer_2(block.ff.activation_function(block.ff.layer_1(y))) + y)


def pre_norm(
    block: Any,
    attend: Callable[[Tensor], Tensor],
    norms: list[nn.Module],
    x: Tensor,
    cuts: Cuts,
    times: float = 1.0,
    mlp: Callable[[Tensor], Tensor] | None = None,
    cross: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Two norms; or four, of which two follow attention and MLP (Gemma). `times` is Granite's factor on what is
    added.
    """
    mlp = mlp or block.mlp
    into, after, into_mlp, after_mlp = (
        normed(n, cuts) for n in (norms if len(norms) == 4 else (norms[0], nn.Identity(), norms[1], nn.Identity()))
    )
    mixed = after(attend(into(x))) * times
    y = mixed if cuts.get("no_skip") else x + mixed
    y = y if cross is None else y + cross(y)  # its skip stays
    return y if cuts.get("no_mlp") else y + after_mlp(mlp(into_mlp(y))) * times


def post_norm(
    attend: Callable[[Tensor], Tensor],
    mlp: Callable[[Tensor], Tensor],
    norms: tuple[nn.Module, nn.Module],
    x: Tensor,
    cuts: Cuts,
    cross: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    first, second = (normed(norm, cuts) for norm in norms)
    y = first(attend(x)) if cuts.get("no_skip") else first(x + attend(x))
    y = y if cross is None else cross(y)
    if cuts.get("no_mlp"):
        return y if cuts["no_mlp"] == "sublayer" else second(y)
    return second(y + mlp(y))


def parallel(
    attend: Callable[[Tensor], Tensor],
    mlp: Callable[[Tensor], Tensor],
    norms: tuple[nn.Module, nn.Module],
    x: Tensor,
    cuts: Cuts,
) -> Tensor:
    """One skip around both."""
    into, into_mlp = (normed(norm, cuts) for norm in norms)
    y = attend(into(x))
    y = y if cuts.get("no_mlp") else y + mlp(into_mlp(x))
    return y if cuts.get("no_skip") else x + y


def gpt2(block: Any, x: Tensor, given: dict[str, Any], cuts: Cuts) -> Tensor:
    return pre_norm(
        block, lambda h: block.attn(h, attention_mask=given["attention_mask"])[0], [block.ln_1, block.ln_2], x, cuts
    )


def vit(block: Any, x: Tensor, given: dict[str, Any], cuts: Cuts) -> Tensor:
    return pre_norm(block, lambda h: block.attention(h)[0], [block.layernorm_before, block.layernorm_after], x, cuts)


def own(block: Any, x: Tensor, given: dict[str, Any], cuts: Cuts) -> Tensor:
    norms = [block.input_layernorm, block.post_attention_layernorm]
    if block.around:
        behind = (block.attention_out_norm, block.mlp_out_norm)
        return post_norm(lambda h: block.self_attn(h, given["turn"]), block.mlp, behind, x, cuts)
    if block.attention_out_norm is not None:
        norms = [norms[0], block.attention_out_norm, norms[1], block.mlp_out_norm]
    return pre_norm(block, lambda h: block.self_attn(h, given["turn"]), norms, x, cuts)


def llama(block: Any, x: Tensor, given: dict[str, Any], cuts: Cuts) -> Tensor:
    if getattr(block, "use_parallel_residual", False):  # StableLM
        return one_norm(block, x, given, cuts)
    asked = {name: given[name] for name in ("attention_mask", "position_ids", "position_embeddings")}
    names = "input_layernorm post_attention_layernorm pre_feedforward_layernorm post_feedforward_layernorm".split()
    norms = [getattr(block, name) for name in names if hasattr(block, name)]
    return pre_norm(
        block,
        lambda h: block.self_attn(hidden_states=h, **asked)[0],
        norms,
        x,
        cuts,
        getattr(block, "residual_multiplier", 1.0),
        getattr(block, "block_sparse_moe", None) or (lambda h: first(block.mlp(h))),
    )


def first(out: Any) -> Tensor:
    """Some modules return a tensor, others a tuple that starts with it."""
    return out[0] if isinstance(out, tuple) else out


def attended(attention: nn.Module, given: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """Attention as a function of the stream; all else is what the block was called with."""
    names = "attention_mask position_ids position_embeddings alibi position_bias relative_pos rel_embeddings".split()
    takes = inspect.signature(type(attention).forward).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    asked = {name: given[name] for name in names if name in given}
    asked = {name: x for name, x in asked.items() if name in takes or (anything and x is not None)}
    return lambda h: first(attention(h, **asked))


def one_norm(block: Any, x: Tensor, given: dict[str, Any], cuts: Cuts) -> Tensor:
    """Phi, Cohere and GPT-J: attention and MLP read the same norm."""
    norm, attention = (block.ln_1, block.attn) if hasattr(block, "ln_1") else (block.input_layernorm, block.self_attn)
    return parallel(attended(attention, given), block.mlp, (norm, norm), x, cuts)


def neox(block: Any, x: Tensor, given: dict[str, Any], cuts: Cuts) -> Tensor:
    norms = block.input_layernorm, block.post_attention_layernorm
    if not block.use_parallel_residual:
        return pre_norm(block, attended(block.attention, given), list(norms), x, cuts)
    return parallel(attended(block.attention, given), block.mlp, norms, x, cuts)


def falcon(block: Any, x: Tensor, given: dict[str, Any], cuts: Cuts) -> Tensor:
    attend = attended(block.self_attention, given)
    if hasattr(block, "post_attention_layernorm"):
        return pre_norm(block, attend, [block.input_layernorm, block.post_attention_layernorm], x, cuts)
    if hasattr(block, "ln_mlp"):
        return parallel(attend, block.mlp, (block.ln_attn, block.ln_mlp), x, cuts)
    return parallel(attend, block.mlp, (block.input_layernorm, block.input_layernorm), x, cuts)


def bloom(block: Any, x: Tensor, given: dict[str, Any], cuts: Cuts) -> Tensor:
    """Attention and MLP add their skip themselves: zeros here."""
    none, asked = torch.zeros_like(x), {name: given[name] for name in ("attention_mask", "alibi")}
    return pre_norm(
        block,
        lambda h: first(block.self_attention(h, none, **asked)),
        [block.input_layernorm, block.post_attention_layernorm],
        x,
        cuts,
        mlp=lambda h: block.mlp(h, none),
    )


def opt(block: Any, x: Tensor, given: dict[str, Any], cuts: Cuts) -> Tensor:
    attend, norms = attended(block.self_attn, given), (block.self_attn_layer_norm, block.final_layer_norm)

    def mlp(h: Tensor) -> Tensor:
        return block.fc2(block.activation_fn(block.fc1(h)))

    if block.do_layer_norm_before:
        return pre_norm(block, attend, list(norms), x, cuts, mlp=mlp)
    return post_norm(attend, mlp, norms, x, cuts)


def pair(block: Any, x: Tensor, given: dict[str, Any], cuts: Cuts) -> Tensor:
    """Encoder and decoder layers of Whisper (norms in front) and BART (norms behind)."""
    attend, norms = attended(block.self_attn, given), (block.self_attn_layer_norm, block.final_layer_norm)
    looks, around = None, None

    def mlp(h: Tensor) -> Tensor:
        return block.fc2(block.activation_fn(block.fc1(h)))

    if hasattr(block, "encoder_attn"):
        norm = normed(block.encoder_attn_layer_norm, cuts)
        asked = {"key_value_states": given["encoder_hidden_states"], "attention_mask": given["encoder_attention_mask"]}

        def looks(h: Tensor) -> Tensor:
            return first(block.encoder_attn(norm(h), **asked))

        def around(h: Tensor) -> Tensor:
            return norm(h + first(block.encoder_attn(h, **asked)))

    if "Whisper" in type(block).__name__:
        return pre_norm(block, attend, list(norms), x, cuts, mlp=mlp, cross=looks)
    return post_norm(attend, mlp, norms, x, cuts, around)


def t5(block: Any, x: Tensor, given: dict[str, Any], cuts: Cuts) -> Tensor:
    own_bias = "UMT5" in type(block).__name__  # and other names
    asked = {"mask": given.get("attention_mask"), "position_bias": given.get("position_bias")}
    asked = {"attention_mask": given.get("attention_mask")} if own_bias else asked
    looks = None
    if len(block.layer) == 3:
        norm = normed(block.layer[1].layer_norm, cuts)
        memory = {
            "key_value_states": given["encoder_hidden_states"],
            "mask": given.get("encoder_attention_mask"),
            "position_bias": given.get("encoder_decoder_position_bias"),
        }
        if own_bias:
            memory = {
                k: given.get(v)
                for k, v in (("encoder_hidden_states",) * 2, ("attention_mask", "encoder_attention_mask"))
            }

        def looks(h: Tensor) -> Tensor:
            return first(block.layer[1].EncDecAttention(norm(h), **memory))

    return pre_norm(
        block,
        lambda h: first(block.layer[0].SelfAttention(h, **asked)),
        [block.layer[0].layer_norm, block.layer[-1].layer_norm],
        x,
        cuts,
        mlp=block.layer[-1].DenseReluDense,
        cross=looks,
    )


def distilbert(block: Any, x: Tensor, given: dict[str, Any], cuts: Cuts) -> Tensor:
    return post_norm(
        attended(block.attention, given), block.ffn, (block.sa_layer_norm, block.output_layer_norm), x, cuts
    )


def behind(block: Any, x: Tensor, given: dict[str, Any], cuts: Cuts) -> Tensor:
    """MPNet and DeBERTa: BERT's blocks with attention of their own."""
    mlp: Callable[[Tensor], Tensor] = lambda h: block.output.dense(block.intermediate(h))  # noqa: E731
    if hasattr(block.attention, "attn"):
        attend, norm = attended(block.attention.attn, given), block.attention.LayerNorm
        return post_norm(attend, mlp, (norm, block.output.LayerNorm), x, cuts)
    inner, output = attended(block.attention.self, given), block.attention.output
    return post_norm(lambda h: output.dense(inner(h)), mlp, (output.LayerNorm, block.output.LayerNorm), x, cuts)


def tower(block: Any, x: Tensor, given: dict[str, Any], cuts: Cuts) -> Tensor:
    return pre_norm(block, attended(block.self_attn, given), [block.layer_norm1, block.layer_norm2], x, cuts)


def dinov2(block: Any, x: Tensor, given: dict[str, Any], cuts: Cuts) -> Tensor:
    return pre_norm(
        block,
        lambda h: block.layer_scale1(first(block.attention(h))),
        [block.norm1, block.norm2],
        x,
        cuts,
        mlp=lambda h: block.layer_scale2(block.mlp(h)),
    )


def olmo2(block: Any, x: Tensor, given: dict[str, Any], cuts: Cuts) -> Tensor:
    norms = [nn.Identity(), block.post_attention_layernorm, nn.Identity(), block.post_feedforward_layernorm]
    return pre_norm(block, attended(block.self_attn, given), norms, x, cuts)


BY_BLOCK = {
    "AlbertLayer": albert, "XLNetLayer": xlnet, "GPT2Block": gpt2, "ViTLayer": vit,
    "GPTNeoXLayer": neox, "FalconDecoderLayer": falcon, "BloomBlock": bloom, "OPTDecoderLayer": opt, "T5Block": t5, "MT5Block": t5,
    "UMT5Block": t5, "TransformerBlock": distilbert, "Dinov2Layer": dinov2, "Dinov2WithRegistersLayer": dinov2,
    **dict.fromkeys((f"{name}Layer" for name in ("Bert", "Roberta", "XLMRoberta", "Camembert", "Electra")), bert),
    **dict.fromkeys(("PhiDecoderLayer", "CohereDecoderLayer", "Cohere2DecoderLayer", "GPTJBlock"), one_norm),
    **dict.fromkeys((f"{name}{side}Layer" for name in ("Whisper", "Bart") for side in ("Encoder", "Decoder")), pair),
    **dict.fromkeys(("MPNetLayer", "DebertaV2Layer"), behind), **dict.fromkeys(("CLIPEncoderLayer", "SiglipEncoderLayer"), tower),
    **dict.fromkeys(("Olmo2DecoderLayer", "Olmo3DecoderLayer"), olmo2),
}  # fmt: skip


def written_out(block: nn.Module) -> Callable[..., Tensor]:
    """The block as it is written out above. DistilBERT has a `TransformerBlock` too."""
    return own if isinstance(block, TransformerBlock) else BY_BLOCK.get(type(block).__name__, llama)


@torch.no_grad()
def by_hand(
    calls: list[tuple[Any, dict[str, Any], Tensor]], cuts: Cuts, operated: list[Any], memory: Tensor | None = None
) -> list[Tensor]:
    """The stream after every call of a block, from what entered the first block of each stack. `memory` is what the
    second stack looks at, in the model that is left.
    """
    found: list[Tensor] = []
    before: Tensor | None = None  # what left the block before, in the whole model
    for block, given, out in calls:
        entered = next(v for k, v in given.items() if k != "self")
        x = entered if before is None or not torch.equal(entered.nan_to_num(), before.nan_to_num()) else found[-1]
        before = out
        if memory is not None and given.get("encoder_hidden_states") is not None:
            given = {**given, "encoder_hidden_states": memory}
        x = written_out(block)(block, x, given, cuts if any(block is one for one in operated) else {})
        found.append(x)
    return found


# Every family


@pytest.mark.parametrize("case", FAMILIES)
def test_what_is_left_is_what_is_written_out(case: Case) -> None:
    model = prepared(case)
    calls, before, keys = watched(model, case), tensors(execute(model, case)), list(model.state_dict())
    # as in a scan
    blocks, numbers = blocks_of(model), [i for i, layer in enumerate(attention_layers(model)) if layer.kind == "self"]
    every = EACH + TOGETHER if case.label in LABELS.split() else FEW
    choices: list[tuple[Cuts, list[int] | None]] = [(cuts, None) for cuts in every]
    choices += [(TOGETHER[-2], numbers[-1:]), (EACH[0], numbers[:1])]
    rounds = 1e-6 if case.label == "gptj" else 1e-12  # its attention is computed in float32
    agree(by_hand(calls, {}, blocks), [out for *_, out in calls], rounds)  # what is written out is this model
    for cuts, layers in choices:
        operated = [b for i, b in zip(numbers, blocks, strict=True) if layers is None or i in layers]
        control = Surgery(**cuts, layers=layers).attach(model)
        assert list(model.state_dict()) == keys
        left = watched(model, case)
        control.detach()
        memory = next((m for _, g, _ in left if (m := g.get("encoder_hidden_states")) is not None), None)
        found = [out for *_, out in left]
        agree(found, by_hand(calls, cuts, operated, memory), rounds)
        assert not same(found, [out for *_, out in calls])
        assert same(tensors(execute(model, case)), before)
    assert not any(
        "locater" in key or callable(held)
        for module in model.modules()
        for key, held in vars(module).items()
        if key == "forward"
    )


def agree(found: list[Tensor], expected: list[Tensor], rounds: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype == torch.float64
        scale = float(other.nan_to_num().abs().max())
        torch.testing.assert_close(one, other, rtol=0, atol=rounds * scale, equal_nan=True)


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("case", ONE_OF_EACH)
def test_it_is_observed(case: Case) -> None:
    """Heads, the stream between blocks and what attention is given: that of the model which is left."""
    model = prepared(case)
    with observe(model) as whole:
        execute(model, case)
    Surgery(no_skip=True, no_mlp=True).attach(model)
    plain = watched(model, case)
    with observe(model, hidden=True) as seen:
        again = watched(model, case)
    assert same([out for *_, out in plain], [out for *_, out in again])
    assert [row.name for row in seen.rows] == [row.name for row in whole.rows]
    assert [row.entropy for row in seen.rows] != [row.entropy for row in whole.rows]
    assert seen.layers[0].block == -1
    assert (seen.layers[0].residual or 0) > 0.1, "it is not the zeros that a block is run on"
    assert all(x.residual is not None for x in seen.layers)


@pytest.mark.parametrize("case", ONE_OF_EACH)
def test_gradients_flow_through_what_is_left(case: Case) -> None:
    """Parameters out of use have none, and there is no other way than through attention."""
    model = prepared(case).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    Surgery(no_skip=True, no_mlp=True, no_norm=True).attach(model)
    blocks, out = blocks_of(model), tensors(case.call(model, case.batch()) if case.call else model(**case.batch()))[0]
    out[torch.isfinite(out)].square().mean().backward()
    for name, p in ((name, p) for block in blocks for name, p in block.named_parameters()):
        in_use = name.startswith(("attn.", "self_attn.", "attention.", "rel_attn.")) and not name.endswith(SEGMENTS)
        if in_use and "layernorm" not in name.lower().replace("_", ""):
            assert p.grad is not None, name
            assert p.grad.isfinite().all(), name
            assert p.ndim < 2 or p.grad.abs().max() > 0, name
        else:
            assert p.grad is None, name


def test_gradients_are_those_of_what_is_written_out() -> None:
    case = BY_LABEL["gpt2"]
    model, other = prepared(case), prepared(case)
    calls = watched(other, case)
    x = calls[0][1]["hidden_states"].clone().requires_grad_()
    y = x
    for block, given, _ in calls:
        y = gpt2(block, y, given, TOGETHER[0])
    y.nan_to_num().square().sum().backward()
    Surgery(**TOGETHER[0]).attach(model)
    stream = x.detach().clone().requires_grad_()
    z = stream
    for block, (_, given, _) in zip(blocks_of(model), calls, strict=True):
        z = block(z, attention_mask=given["attention_mask"])
    z.nan_to_num().square().sum().backward()
    assert x.grad is not None
    assert stream.grad is not None
    assert x.grad.abs().max() > 0
    torch.testing.assert_close(stream.grad, x.grad, rtol=1e-12, atol=0)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None)
        if one.grad is not None and two.grad is not None:
            torch.testing.assert_close(one.grad, two.grad, rtol=1e-10, atol=1e-12)


# Ways of running


def small(name: str, **kw: Any) -> Any:
    """At initialisation, without dropout."""
    import transformers

    torch.manual_seed(0)
    shape = dict(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        vocab_size=64,
        max_position_embeddings=64,
    )
    dropout = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0} if name in ("Bert", "Albert") else {}
    return (
        getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**{**shape, **dropout, **kw}))
        .double()
        .eval()
    )


IDS = torch.arange(3, 35).view(2, 16)


def stepped(model: Any) -> list[Tensor]:
    model.zero_grad()
    out = model(IDS).last_hidden_state
    out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", ["Llama", "Bert"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_under_activation_checkpointing(name: str, reentrant: bool) -> None:
    model = small(name).train()
    Surgery(no_skip=True, no_norm=True).attach(model)
    plain = stepped(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    for one, other in zip(stepped(model), plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", ["Llama", pytest.param("Bert", marks=pytest.mark.slow), "Albert"])
@torch.no_grad()
def test_a_compiled_model_notices(name: str) -> None:
    """One that was compiled and run before too; in one graph."""
    model = small(name, use_cache=False) if name == "Llama" else small(name)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    before = compiled(IDS).last_hidden_state
    control = Surgery(no_skip=True, no_mlp=True, no_norm=True).attach(model)
    expected = model(IDS).last_hidden_state
    assert not torch.equal(expected, before)
    assert torch.equal(compiled(IDS).last_hidden_state, expected)
    control.detach()
    assert torch.equal(compiled(IDS).last_hidden_state, before)


@torch.no_grad()
def test_generation_with_a_cache_is_that_without() -> None:
    model = small("GPT2", n_embd=32, n_layer=2, n_head=4)
    Surgery(no_skip=True).attach(model)
    whole = model(IDS).last_hidden_state
    first = model(IDS[:, :9], use_cache=True)
    rest = model(IDS[:, 9:], past_key_values=first.past_key_values).last_hidden_state
    torch.testing.assert_close(torch.cat([first.last_hidden_state, rest], 1), whole, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("no_skip", [True, False])
@torch.no_grad()
def test_two_streams_of_xlnet_both_lose_their_skip(no_skip: bool) -> None:
    """Values are zero, so that what leaves attention is its skip. In float32: the second stream of transformers has no
    float64.
    """
    model: Any = prepared(BY_LABEL["xlnet"]).float()
    model.layer[0].rel_attn.v.zero_()
    streams: list[Any] = []
    model.layer[0].rel_attn.register_forward_hook(lambda module, args, out: streams.extend(out[:2]))
    Surgery(no_skip=no_skip, no_norm=True).attach(model)
    ids = BY_LABEL["xlnet"].batch()["input_ids"]
    model(input_ids=ids, target_mapping=torch.eye(9)[None, -2:].repeat(2, 1, 1), perm_mask=torch.zeros(2, 9, 9))
    assert len(streams) == 2
    assert all((x.abs().max() == 0) == no_skip for x in streams)


@torch.no_grad()
def test_chunks_of_the_feed_forward_layer() -> None:
    for name in ("Bert", "Albert"):
        whole, chunked = small(name), small(name, chunk_size_feed_forward=4)
        for model in (whole, chunked):
            Surgery(no_mlp=True, no_skip=True).attach(model)
        assert torch.equal(whole(IDS).last_hidden_state, chunked(IDS).last_hidden_state)


# Beside others


@pytest.mark.parametrize("label", ["gpt2", "bert", "albert"])
def test_it_may_end_before_those_who_watch(label: str) -> None:
    case = BY_LABEL[label]
    model = prepared(case)
    before = tensors(execute(model, case))
    control = Surgery(no_skip=True, no_mlp=True, no_norm=True).attach(model)
    with observe(model, hidden=True):
        control.detach()
        assert same(tensors(execute(model, case)), before)
    assert same(tensors(execute(model, case)), before)
    assert not any("forward" in vars(module) for module in model.modules())


def test_those_who_watch_come_after() -> None:
    model = small("GPT2", n_embd=32, n_layer=2, n_head=4)
    with (
        observe(model, hidden=True),
        pytest.raises(LocaterError, match=r"^GPT2Block\.forward is observed, or replaced by another Surgery: "),
    ):
        Surgery(no_skip=True).attach(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_two_of_them_share_a_model_and_not_a_part() -> None:
    model = small("GPT2", n_embd=32, n_layer=2, n_head=4)
    both = Controls(
        [Surgery(no_skip=True, layers=[0]), Surgery(no_norm=True, layers=[1]), Surgery(no_mlp=True), Temperature(2.0)]
    )
    both.attach(model)
    with pytest.raises(LocaterError, match="replaced by another Surgery"):
        Surgery(no_norm=True).attach(model)
    both.detach()
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_monitor_goes_along(tmp_path: Path) -> None:
    model, given = small("Llama"), list[Tensor]()
    Surgery(no_skip=True).attach(model)
    monitor = Monitor(tmp_path / "run.jsonl", every=1).attach(model)
    stepped(model.train())
    monitor.after_step()
    monitor.detach()
    assert (tmp_path / "run.jsonl").read_text().count('"step"')
    model.layers[0].self_attn.register_forward_pre_hook(
        lambda m, args, kw: given.append(kw["hidden_states"]), with_kwargs=True
    )
    model(IDS)
    assert given[0].abs().max() > 0, "what attention is given is the stream, not the zeros that its block is run on"


@pytest.mark.parametrize("case", ONE_OF_EACH)
def test_a_copy_is_cut_as_the_model_is(case: Case) -> None:
    model = prepared(case)
    before = tensors(execute(model, case))
    control = Surgery(no_skip=True, no_mlp=True, no_norm=True).attach(model)
    cut = tensors(execute(model, case))
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(copy.deepcopy(model))]
    twin, its = copy.deepcopy((model, control))
    control.detach()
    assert all(torch.equal(a, b) for a, b in zip(tensors(execute(model, case)), before, strict=True))
    assert not carried_changes(model)
    for other in (*copies, twin):
        assert all(torch.equal(a, b) for a, b in zip(tensors(execute(other, case)), cut, strict=True))
        assert {held.control for held in carried_changes(other)} == {repr(control)}
        with pytest.raises(LocaterError, match="replaced by another Surgery"):
            Surgery(no_mlp=True).attach(other)
    its.detach()  # a control that was copied along is the copy's
    assert all(torch.equal(a, b) for a, b in zip(tensors(execute(twin, case)), before, strict=True))


# What cannot be done


def test_a_block_without_an_mlp_has_none_to_lose() -> None:
    with pytest.raises(LocaterError, match=r"Surgery: model\.layers\.0 has no MLP to remove"):
        Surgery(no_mlp=True).attach(BY_LABEL["locater-no-mlp"].build())


def test_all_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, count = small("Bert"), 0
    real = surgery.replace_method

    def failing(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count == 4:
            raise RuntimeError("no more")
        return real(*args)

    monkeypatch.setattr(surgery, "replace_method", failing)
    control = Surgery(no_skip=True, no_mlp=True, no_norm=True)
    with pytest.raises(RuntimeError, match="no more"):
        control.attach(model)
    assert control.model is None
    assert not any({"forward", "feed_forward_chunk"} & vars(module).keys() for module in model.modules())


@pytest.mark.parametrize(
    ("label", "said"),
    [
        ("torch-encoder-pre", r"TransformerEncoder \(no model type\): its blocks are not known: describe them with"),
        ("timm", r"Blocks \(no model type\): its blocks are not known"),
        ("bloom-slow", r"BloomForCausalLM \(model type 'bloom'\): slow_but_exact multiplies outside"),
        ("gemma3-composite", r"\(model type 'gemma3'\): gemma3 has two towers .* pass model.model.language_model"),
    ],
)
def test_other_families_are_refused(label: str, said: str) -> None:
    with pytest.raises(LocaterError, match=said) as refused:
        Surgery(no_skip=True).attach(BY_LABEL[label].build())
    assert "\n" not in str(refused.value)


def test_every_family_with_a_block_is_operated_on() -> None:
    built = [BY_LABEL[label].build() for label in [*LABELS.split(), *MORE.split()]]
    kinds = {config_of(model)["model_type"] for model in built}
    assert kinds | {"gemma3"} == {name for name, family in BY_TYPE.items() if family.block is not None}


@pytest.mark.parametrize(
    ("name", "part", "cuts", "said"),
    [
        (
            "Bert",
            "encoder.layer.1.output.LayerNorm",
            {"no_norm": True},
            "encoder.layer.1.output.LayerNorm, which its family names, is not there",
        ),
        ("Llama", "layers.1.mlp", {"no_mlp": True}, "layers.1.mlp, which its family names, is not there"),
        (
            "Albert",
            "encoder.albert_layer_groups.0.albert_layers.0.attention.output_dropout",
            {"no_skip": True},
            "output_dropout, which its family names, is not there",
        ),
    ],
)
def test_a_part_that_is_missing_is_named(name: str, part: str, cuts: Cuts, said: str) -> None:
    model = small(name)
    above, _, last = part.rpartition(".")
    delattr(model.get_submodule(above), last)
    with pytest.raises(LocaterError, match=rf"Surgery: {name}Model \(model type '{name.lower()}'\): .*{said}"):
        Surgery(**cuts).attach(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_block_that_goes_another_way_is_an_error() -> None:
    model = small("GPT2", n_embd=32, n_layer=2, n_head=4)
    control = Surgery(no_skip=True).attach(model)
    norm = model.h[0].ln_1
    model.h[0].ln_1 = nn.Identity()
    with pytest.raises(LocaterError, match="GPT2Block did not call the norm in front of its attention"):
        model(IDS)
    model.h[0].ln_1 = norm
    assert model(IDS).last_hidden_state.isfinite().all()
    control.detach()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Surgery(), "Surgery would remove nothing: give no_skip=True, no_mlp=True, no_norm=True or heads"),
        (lambda: Surgery(layers=[0]), "Surgery would remove nothing"),
        (lambda: Surgery(no_skip="yes"), "no_skip='yes': must be True or False"),  # type: ignore[arg-type]
        (lambda: Surgery(no_norm=1), "no_norm=1: must be True or False"),  # type: ignore[arg-type]
        (lambda: Surgery(no_mlp="norm"), "no_mlp='norm': must be True, False, or sublayer"),  # type: ignore[arg-type]
        (lambda: Surgery(no_skip=True, layers=1), r"layers=1: must be a list of numbers, such as \[1\]"),  # type: ignore[arg-type]
        (
            lambda: Surgery(no_skip=True, layers=[2]).attach(small("Bert")),
            r"layers=\[2\]: there are 2, numbered from 0",
        ),
        (lambda: Surgery(no_skip=True, layers=[]).attach(small("Bert")), r"layers=\[\]: there are 2"),
        (
            lambda: Surgery(no_skip=True).attach(nn.Linear(2, 2)),
            r"Surgery: Linear \(no model type\): its blocks are not known: describe them with locater.register()",
        ),
        (lambda: Surgery(no_skip=True).loss(), "Surgery is not attached"),
        (lambda: parse_control("surgery"), "Surgery would remove nothing"),
        (
            lambda: parse_control("surgery(skip=True)"),
            "control surgery has no option 'skip': it has no_skip, no_mlp, no_norm, layers",
        ),
    ],
)
def test_bad_requests_are_one_line(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(LocaterError, match=said) as refused:
        make()
    assert "\n" not in str(refused.value)


def test_attached_twice() -> None:
    control = Surgery(no_mlp=True).attach(small("Bert"))
    with pytest.raises(LocaterError, match="already attached"):
        control.attach(small("Bert"))


# What it is for


def residuals(hidden: list[Tensor]) -> list[float]:
    return [float(rank_residual(x).mean()) for x in hidden]


@torch.no_grad()
def test_attention_alone_collapses_and_the_skip_prevents_it() -> None:
    """Twelve layers at initialisation. The paper's figure has .35 for the whole model, .45 with the skip alone, 0 from
    layer 2 without.
    """
    model = small("Bert", hidden_size=64, num_hidden_layers=12, intermediate_size=256)
    ids = torch.randint(64, (4, 48), generator=torch.Generator().manual_seed(0))

    def depths(**cuts: Any) -> list[float]:
        control = Surgery(**cuts).attach(model) if cuts else None
        found = residuals(model(ids, output_hidden_states=True).hidden_states)
        if control is not None:
            control.detach()
        return found

    whole, skip_alone = depths(), depths(no_mlp="sublayer")
    assert len(whole) == 13
    assert min(whole) > 0.25
    assert min(skip_alone) > 0.25
    for cuts in ({"no_mlp": True, "no_norm": True}, {"no_mlp": "sublayer"}, {}):
        alone = depths(no_skip=True, **cuts)
        assert alone[0] == whole[0]
        assert alone[2] < 0.01, cuts
        assert max(alone[4:]) < 1e-6, cuts


@torch.no_grad()
def test_so_do_our_own_blocks() -> None:
    torch.manual_seed(0)
    model = Transformer(Shape(width=64, heads=4, layers=12, hidden=128, length=48, causal=False)).double()
    ids = torch.randint(256, (4, 48), generator=torch.Generator().manual_seed(0))
    whole = residuals([model.model(ids)])
    Surgery(no_skip=True, no_mlp=True, no_norm=True).attach(model)
    with observe(model, hidden=True) as seen:
        model(ids)
    assert whole[0] > 0.5
    assert (seen.layers[0].residual or 0) > 0.5
    assert all((layer.residual or 0) < 1e-3 for layer in seen.layers[3:])


def test_a_run_without_skips(tmp_path: Path) -> None:
    """By name, with the monitor; and resumed controls are of the same kind."""
    held: Any = parse_control("surgery(no_skip=True, no_mlp=sublayer, layers=[0])")
    assert repr(held) == "Surgery(no_skip=True, no_mlp='sublayer', no_norm=False, layers=[0])"
    settings = {
        **TINY,
        "corpus": (str(corpus(tmp_path)),),
        "log": 1,
        "steps": 4,
        "checkpoint": 2,
        "evaluate": 2,
        "observe": 2,
    }
    plain = run(Plan(**settings, out=str(tmp_path / "plain")))
    result = run(Plan(**settings, out=str(tmp_path / "cut"), control=("surgery(no_skip=True, no_norm=True)",)))
    assert result.report_loss != plain.report_loss
    assert result.history
