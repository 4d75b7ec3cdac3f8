"""Tiny encoders that came after BERT: RoBERTa and its kin, DistilBERT, MPNet, ALBERT, XLNet, DeBERTa."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.families.encoders import BERT_SITES, SHAPE
from tests.parity import EPS, Case, Record, Site, interface_tap, tokens

VOCABULARY = dict(vocab_size=64, max_position_embeddings=64)


def make(name: str, **kw: Any) -> nn.Module:
    import transformers

    return getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**kw))


def far_tokens() -> dict[str, Tensor]:
    """Far enough apart for buckets that widen with distance."""
    return tokens(length=40)


def case(label: str, name: str, sites: list[Site] = BERT_SITES, spread: float = 1.0, **kw: Any) -> Case:
    return Case(label, lambda: make(name, **SHAPE, **VOCABULARY, **kw), tokens, sites, spread=spread)


# Cross-attention in RoBERTa

CROSS_SITES = [
    site
    for i, own in enumerate(BERT_SITES)
    for site in (
        own,
        Site(
            f"encoder.layer.{i}.crossattention.self",
            f"encoder.layer.{i}.attention.output.LayerNorm",
            f"encoder.layer.{i}.crossattention.output.dense",
            f"encoder.layer.{i}.crossattention.self.key",
        ),
    )
]


def with_memory() -> dict[str, Tensor]:
    memory = torch.randn(2, 7, SHAPE["hidden_size"], dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, :2] = 0
    return {**tokens(), "encoder_hidden_states": memory, "encoder_attention_mask": mask}


def roberta_cross() -> nn.Module:
    return make("Roberta", **SHAPE, **VOCABULARY, is_decoder=True, add_cross_attention=True)


# DistilBERT

DISTILBERT_SITES = [
    Site(
        f"transformer.layer.{i}.attention",
        f"transformer.layer.{i - 1}.output_layer_norm" if i else "embeddings.LayerNorm",
        f"transformer.layer.{i}.attention.out_lin",
    )
    for i in range(2)
]


def distilbert() -> nn.Module:
    return make("DistilBert", dim=32, n_layers=2, n_heads=4, hidden_dim=48, **VOCABULARY)


# MPNet computes attention inline: read its queries and keys where they are made, its mask and bias where they are
# passed

MPNET_SITES = [
    Site(
        f"encoder.layer.{i}.attention.attn",
        f"encoder.layer.{i - 1}.output.LayerNorm" if i else "embeddings.LayerNorm",
        f"encoder.layer.{i}.attention.attn.o",
    )
    for i in range(2)
]


@contextlib.contextmanager
def mpnet_tap(model: nn.Module, implementation: str, records: dict[str, Record]) -> Iterator[None]:
    made: dict[nn.Module, Tensor] = {}

    def keep(module: nn.Module, args: Any, out: Tensor) -> None:
        made[module] = out

    def ask_for_maps(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "output_attentions": True}

    def see(module: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        _, mask, bias = args
        q, k = (made[m].unflatten(-1, (module.num_attention_heads, -1)).transpose(1, 2) for m in (module.q, module.k))
        here = records[paths[module]]
        here.calls += 1
        here.logits = q @ k.mT / module.attention_head_size**0.5 + bias
        here.mask, here.maps = mask == 0, out[1]

    paths = {model.get_submodule(path): path for path in records}
    handles = []
    for module in paths:
        handles += [module.q.register_forward_hook(keep), module.k.register_forward_hook(keep)]
        handles += [
            module.register_forward_pre_hook(ask_for_maps, with_kwargs=True),
            module.register_forward_hook(see, with_kwargs=True),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# ALBERT calls one module at several depths: the last call is the one compared


@contextlib.contextmanager
def albert_tap(model: nn.Module, implementation: str, records: dict[str, Record]) -> Iterator[None]:
    config: Any = model.config
    entered: dict[str, Tensor | None] = {}  # what the norm in front had been given when attention was called

    def enter(path: str) -> Any:
        return lambda module, args: entered.update({path: records[path].x})

    handles = [model.get_submodule(path).register_forward_pre_hook(enter(path)) for path in records]
    try:
        with interface_tap(model, implementation, records):
            yield
    finally:
        for handle in handles:
            handle.remove()
    each = config.num_hidden_layers // config.num_hidden_groups
    for path, here in records.items():
        here.x = entered[path]
        here.calls = 1 if here.calls == each else -here.calls


def albert(label: str, depths: int, groups: int, inner: int, before: list[str | None], spread: float = 1.0) -> Case:
    """`before` names, module by module, the block whose norm its last call read."""
    blocks = [f"encoder.albert_layer_groups.{g}.albert_layers.{i}" for g in range(groups) for i in range(inner)]
    sites = [
        Site(
            f"{block}.attention",
            b and f"encoder.albert_layer_groups.{b}.full_layer_layer_norm",
            f"{block}.attention.dense",
        )
        for block, b in zip(blocks, before, strict=True)
    ]
    kw = {
        **SHAPE,
        **VOCABULARY,
        "embedding_size": 16,
        "num_hidden_layers": depths,
        "num_hidden_groups": groups,
        "inner_group_num": inner,
    }
    return Case(label, lambda: make("Albert", **kw), tokens, sites, tap=albert_tap, spread=spread)


# XLNet runs time first, keeps its output map inside a method, and computes logits in `rel_attn_core`

XLNET_SITES = [
    Site(f"layer.{i}.rel_attn", f"layer.{i - 1}.ff.layer_norm" if i else None, f"layer.{i}.rel_attn.layer_norm")
    for i in range(2)
]


@contextlib.contextmanager
def xlnet_tap(model: nn.Module, implementation: str, records: dict[str, Record]) -> Iterator[None]:
    modules: dict[str, Any] = {path: model.get_submodule(path) for path in records}
    given: dict[str, Tensor] = {}  # the layer's input
    summed: dict[str, Tensor] = {}  # its input plus its output, as they enter the norm

    def core(path: str, module: Any) -> Any:
        inner = module.rel_attn_core

        def attend(
            q: Tensor, k: Tensor, v: Tensor, k_r: Tensor, seg_mat: None, attn_mask: Tensor, output_attentions: bool
        ) -> Tensor:
            out, maps = inner(q, k, v, k_r, seg_mat, attn_mask, True)
            content = torch.einsum("ibnd,jbnd->bnij", q + module.r_w_bias, k)
            place = module.rel_shift_bnij(torch.einsum("ibnd,jbnd->bnij", q + module.r_r_bias, k_r), klen=k.shape[0])
            here = records[path]
            here.calls += 1
            here.logits, here.maps = (content + place) * module.scale, maps.permute(2, 3, 0, 1)
            here.mask = attn_mask.permute(2, 3, 0, 1) == 0
            return out

        return attend

    def keep(into: dict[str, Tensor], path: str) -> Any:
        return lambda module, args: into.update({path: args[0]})

    handles = []
    for path, module in modules.items():
        handles += [
            module.register_forward_pre_hook(keep(given, path)),
            module.layer_norm.register_forward_pre_hook(keep(summed, path)),
        ]
        module.rel_attn_core = core(path, module)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module in modules.values():
            del module.rel_attn_core
    for path, here in records.items():
        assert here.x is not None
        here.x = here.x.transpose(0, 1)
        here.output = (summed[path] - given[path]).transpose(0, 1)


def xlnet(label: str, batch: Any = tokens, **kw: Any) -> Case:
    shape = dict(d_model=32, n_layer=2, n_head=4, d_inner=48, vocab_size=64, layer_norm_eps=EPS)
    return Case(
        label, lambda: make("XLNet", **shape, **kw), batch, XLNET_SITES, implementations=("eager",), tap=xlnet_tap
    )


# DeBERTa adds its terms in a method of its own, which is given queries and keys


def deberta_site(i: int, before: str) -> Site:
    return Site(f"encoder.layer.{i}.attention.self", before, f"encoder.layer.{i}.attention.output.dense")


@contextlib.contextmanager
def deberta_tap(model: nn.Module, implementation: str, records: dict[str, Record]) -> Iterator[None]:
    modules: dict[str, Any] = {path: model.get_submodule(path) for path in records}

    def terms(path: str, module: Any) -> Any:
        inner = module.disentangled_attention_bias

        def add(q: Tensor, k: Tensor, place: Tensor, embeddings: Tensor, factor: int) -> Tensor:
            found = inner(q, k, place, embeddings, factor)
            records[path].calls += 1
            records[path].logits = (q @ k.mT * (q.shape[-1] * factor) ** -0.5 + found).unflatten(
                0, (-1, module.num_attention_heads)
            )
            return found

        return add

    def ask_for_maps(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return (*args[:2], True, *args[3:]), kwargs

    def see(path: str) -> Any:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            records[path].mask, records[path].maps = args[1].bool(), out[1]

        return hook

    handles = []
    for path, module in modules.items():
        module.disentangled_attention_bias = terms(path, module)
        handles += [
            module.register_forward_pre_hook(ask_for_maps, with_kwargs=True),
            module.register_forward_hook(see(path)),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module in modules.values():
            del module.disentangled_attention_bias


def deberta(label: str, before: str = "layer.0.output", **kw: Any) -> Case:
    sites = [deberta_site(0, "embeddings.LayerNorm"), deberta_site(1, f"encoder.{before}.LayerNorm")]
    kw = {**SHAPE, **VOCABULARY, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], **kw}
    return Case(label, lambda: make("DebertaV2", **kw), far_tokens, sites, implementations=("eager",), tap=deberta_tap)


CASES = [
    case("roberta", "Roberta"),
    case("roberta-decoder", "Roberta", is_decoder=True),
    Case("roberta-cross", roberta_cross, with_memory, CROSS_SITES, memory_padding="encoder_attention_mask"),
    case("xlm-roberta", "XLMRoberta"),
    case("camembert", "Camembert"),
    case("electra", "Electra", embedding_size=32),
    case(
        "electra-widened",
        "Electra",
        [Site(BERT_SITES[0].attention, None, BERT_SITES[0].out), BERT_SITES[1]],
        embedding_size=16,
    ),
    Case("distilbert", distilbert, tokens, DISTILBERT_SITES),
    Case(
        "mpnet",
        lambda: make("MPNet", **SHAPE, **VOCABULARY, relative_attention_num_buckets=40),
        far_tokens,
        MPNET_SITES,
        implementations=("eager",),
        tap=mpnet_tap,
    ),
    albert("albert", 3, 1, 1, ["0.albert_layers.0"]),
    albert("albert-groups", 4, 2, 1, ["0.albert_layers.0", "1.albert_layers.0"]),
    albert("albert-inner", 5, 1, 2, ["0.albert_layers.1", "0.albert_layers.0"], 1.04),
    albert("albert-unshared", 2, 2, 1, [None, "0.albert_layers.0"]),
    xlnet("xlnet"),
    # a batch with padding does not run with this attn_type: the model adds masks of two shapes in place
    xlnet("xlnet-causal-clamped", lambda: {"input_ids": tokens()["input_ids"]}, attn_type="uni", clamp_len=4),
    deberta("deberta_v2", position_buckets=8, share_att_key=True, norm_rel_ebd="layer_norm"),
    deberta("deberta_v2-own-maps-conv", "conv", max_relative_positions=16, conv_kernel_size=3),
    deberta("deberta_v2-keys-only", pos_att_type=["c2p"], position_buckets=8),
]
