"""`torch.nn.MultiheadAttention`, alone or inside nn.TransformerEncoder, nn.TransformerDecoder and nn.Transformer.

A state dict does not say how many heads there are nor whether norms come first, so a checkpoint needs a config.json
with `{"model_type": "torch", "num_heads": n, "norm_first": false, "layer_norm_eps": 1e-5}` beside it (or `--heads`); a
live module has them as attributes. Causal masks are arguments of the call here, so `causal` is False:
`dataclasses.replace` it if you mask.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from locater.checkpoints.sources import Config
from locater.checkpoints.weights import ModuleWeights, Rows, Weights, natural
from locater.errors import LocaterError
from locater.families.build import integer, matrix, norm, optional, projection, shape_of
from locater.families.layer import AttentionLayer, Kind, Projection
from locater.families.norm import Norm
from locater.families.record import Family
from locater.families.torch_mha_tap import tap

PATTERN = r"(?P<stem>(?:.*\.)?)(?:in_proj_weight|q_proj_weight)"


@dataclass(frozen=True)
class _Facts:
    """What the tensors do not tell."""

    heads: int
    norm_first: bool
    eps: float
    extra_key: bool = False  # add_bias_kv or add_zero_attn: a learned or zero key joins the softmax
    cross: bool | None = None  # None: only the name tells


def stems(weights: Weights) -> list[str]:
    """Paths of attention modules, each with its last dot, so that an attention module alone has the path ""."""
    paths = [m["stem"] for name in weights.names() if (m := re.fullmatch(PATTERN, name))]
    return sorted(paths, key=lambda stem: natural(stem.split(".")))


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayer]:
    for index, stem in enumerate(stems(weights)):
        yield _layer(weights, stem, index, _facts(weights, config, stem.removesuffix(".")))


def _facts(weights: Weights, config: Config, path: str) -> _Facts:
    if not isinstance(weights, ModuleWeights):
        heads = integer(config, weights, "num_heads", "nhead", "num_attention_heads")
        return _Facts(heads, bool(config.get("norm_first")), config.get("layer_norm_eps", 1e-5))
    module = weights.submodule(path)
    if not isinstance(module, nn.MultiheadAttention):
        kind = type(module).__name__
        raise LocaterError(
            f"{weights.where}: {path} has the tensors of nn.MultiheadAttention but is a {kind}: locater.register() it"
        )
    parent = weights.submodule(path.rpartition(".")[0]) if path else None  # "" is a block that is the model itself
    extra = module.bias_k is not None or module.add_zero_attn
    if isinstance(parent, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        cross = isinstance(parent, nn.TransformerDecoderLayer) and path.endswith("multihead_attn")
        return _Facts(module.num_heads, parent.norm_first, parent.norm1.eps, extra, cross)
    return _Facts(module.num_heads, False, 1e-5, extra, module.kdim != module.embed_dim)


def _layer(weights: Weights, stem: str, index: int, facts: _Facts) -> AttentionLayer:
    block, _, role = stem.removesuffix(".").rpartition(".")
    decoder = f"{_in(block, 'norm3')}.weight" in weights.names()
    kind: Kind = (
        "cross" if (facts.cross if facts.cross is not None else decoder and role == "multihead_attn") else "self"
    )
    q, k, v = (_input_projection(weights, stem, i) for i in range(3))
    out = projection(weights, f"{stem}out_proj")
    head_dim, rest = divmod(q.shape[0], facts.heads)
    if rest:
        raise LocaterError(
            f"{weights.where}: {stem}in_proj has {q.shape[0]} query rows, "
            f"which {facts.heads} heads do not divide: change --heads"
        )
    return AttentionLayer(
        name=stem.removesuffix("."),
        index=index,
        heads=facts.heads,
        kv_heads=facts.heads,
        head_dim=head_dim,
        query=q,
        key=k,
        value=None if facts.extra_key else v,
        out=None if facts.extra_key else out,
        scale=head_dim**-0.5,
        norm=_norm_before(weights, block, kind, facts),
        memory_norm=_memory_norm(weights, block, facts) if kind == "cross" else None,
        kind=kind,
    )


def _input_projection(weights: Weights, stem: str, part: int) -> Projection:
    fused, own = f"{stem}in_proj_weight", f"{stem}{'qkv'[part]}_proj_weight"
    together = fused in weights.names()
    rows = shape_of(weights, fused)[0] // 3 if together else shape_of(weights, own)[0]
    here: Rows = [(part * rows, (part + 1) * rows)]
    return matrix(
        weights, fused if together else own, optional(weights, f"{stem}in_proj_bias", here), here if together else None
    )


def _norm_before(weights: Weights, block: str, kind: Kind, facts: _Facts) -> Norm:
    """The norm that the queries read: in front (norm_first), or the one that closed the step before."""
    stack, _, number = block.rpartition(".")
    decoder = f"{_in(block, 'norm3')}.weight" in weights.names()
    if facts.norm_first:
        name = _in(block, "norm2" if kind == "cross" else "norm1")
    elif kind == "cross":
        name = _in(block, "norm1")
    else:
        name = (
            f"{_in(stack, str(int(number) - 1))}.{'norm3' if decoder else 'norm2'}"
            if number.isdigit() and int(number)
            else ""
        )
    return _norm(weights, name, facts.eps)


def _in(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _memory_norm(weights: Weights, block: str, facts: _Facts) -> Norm:
    """The norm that closed the encoder, where the checkpoint holds one beside the decoder (nn.Transformer)."""
    return _norm(weights, re.sub(r"decoder\.layers\.\d+$", "encoder.norm", block), facts.eps)


def _norm(weights: Weights, name: str, eps: float) -> Norm:
    return norm(weights, name, "layer", eps) if f"{name}.weight" in weights.names() else Norm()


def unobservable(module: nn.Module) -> str | None:
    if isinstance(module, nn.MultiheadAttention) and (module.bias_k is not None or module.add_zero_attn):
        return (
            "add_bias_kv and add_zero_attn give every query a key that is no token, which is not observed; "
            "observe the other layers with layers=[...]"
        )
    return None


def recognises(module: nn.Module) -> bool:
    return isinstance(module, nn.MultiheadAttention)


FAMILY = Family(("torch",), layers, tap=tap, unobservable=unobservable, recognises=recognises)
