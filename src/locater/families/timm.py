"""timm's blocks: one fused map `qkv` (queries, keys, values, each head by head), `norm1` in front, norms per head where
the model has them.

A live module is recognised by its attributes: Linear `qkv` and `proj`, `num_heads` and `scale`. A checkpoint does not
say how many heads there are: put `{"model_type": "timm", "num_heads": n}` into config.json beside it, or add --heads.
timm's own config.json names an architecture instead; architectures with other attention are refused.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor, nn

from locater.calls.attention_interface import uses_attention_interface
from locater.calls.call_and_masks import Call
from locater.calls.patching import RecordedCall, Undo, layer_name, record_parts
from locater.errors import LocaterError
from locater.families.record import Family
from locater.kernels import Terms
from locater.layers.build import expect, integer, map_layout, norm_layout, scaled_rows, shape_of
from locater.layers.layout import AttentionLayout, LogitsLayout
from locater.layers.map_layouts import NormLayout
from locater.sources.open_source import Config
from locater.sources.weights import ModuleWeights, Weights, numbered

# The tap of timm's attention: queries and keys are the output of `qkv`, after norms per head where it has them.


KNOWN = ("attn_mask", "is_causal")


def tap(module: nn.Module) -> Iterator[Undo]:
    norms = [name for name in ("q_norm", "k_norm") if isinstance(getattr(module, name, None), nn.Module)]
    names = list(inspect.signature(module.forward).parameters)
    yield from record_parts(module, partial(_described, names), outputs=["qkv", *norms], inputs=["proj"])


def _described(names: Sequence[str], module: Any, recorded: RecordedCall) -> Call:
    fused = recorded.tensors["qkv"].unflatten(-1, (3, module.num_heads, -1))  # (B, T, 3, H, D)
    q, k = (
        fused[:, :, part].transpose(1, 2)
        if name not in recorded.tensors
        else _heads_first(module, recorded.tensors[name], fused)
        for part, name in enumerate(("q_norm", "k_norm"))
    )
    call = Call(q, k, Terms(float(module.scale)), recorded.heads("proj", module.num_heads))
    arguments = {**dict(zip(names, recorded.args, strict=False)), **recorded.kwargs}
    for name in names[1:]:
        if arguments.get(name) is not None and name not in KNOWN:
            raise LocaterError(
                f"{layer_name(module)}: what its argument {name!r} does to attention is not known: "
                "pass attn_mask instead"
            )
    if arguments.get("is_causal"):
        call = call.with_terms(causal=True)
    return _masked(call, module, arguments.get("attn_mask"))


def _heads_first(module: nn.Module, normed: Tensor, fused: Tensor) -> Tensor:
    B, T, _, H, D = fused.shape
    if tuple(normed.shape) not in ((B, H, T, D), (B, T, H, D)):
        raise LocaterError(
            f"{layer_name(module)}: its norms give {list(normed.shape)}, no heads: describe it with locater.register()"
        )
    return normed if normed.shape[1] == H else normed.transpose(1, 2)


def _masked(call: Call, module: Any, mask: Tensor | None) -> Call:
    if mask is None:
        return call
    if not mask.is_floating_point() and not getattr(module, "fused_attn", False):
        # the plain way adds its mask, so True and False would be 1 and 0
        raise LocaterError(
            f"{layer_name(module)}: a boolean attn_mask hides nothing unless fused_attn is set: "
            "set it, or pass an additive mask"
        )
    while mask.ndim < 4:
        mask = mask[None]
    return call.masked(mask.detach())


PATTERN = r"(?P<prefix>(.*\.)?blocks\.(\d+\.)?)(?P<layer>\d+)\.attn\.qkv\.weight"
# of plain attention; more (tables over distance, masks) is another kind
PARTS = r"(qkv|proj|q_norm|k_norm|norm)\.(weight|bias)"
BLOCKS = "timm.models.vision_transformer"  # whose blocks apply norm1 in front of attention
KEPT = ("qkv", "proj", "q_norm", "k_norm", "norm")
# architectures: rotary and post-norm ones look alike on disk
PLAIN = r"(vit|deit3?|flexivit)_(?!.*(dinov3|eupe|pe_|relpos|rope|rpn_)).*"


@dataclass(frozen=True)
class _Facts:
    """What the tensors do not tell."""

    heads: int
    scale: float | None = None  # None: 1/sqrt(head_dim)


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayout]:
    paths = stems(weights)
    if not paths:
        raise LocaterError(
            f"{weights.where}: no attention in timm's manner here: a Linear qkv, a Linear proj, num_heads and scale"
        )
    for stem in paths:
        yield _layer(weights, config, stem, _facts(weights, config, stem))


def stems(weights: Weights) -> list[str]:
    """Paths of attention modules, each with its last dot, so that an attention module alone has the path ""."""
    if isinstance(weights, ModuleWeights):
        return [f"{path}." if path else "" for path, module in weights.modules().items() if _offers(module)]
    return [name.removesuffix("qkv.weight") for _, name in numbered(weights, PATTERN)]


def _offers(module: Any) -> bool:
    """Whether a module has the attributes of timm's plain attention, and nothing else that may act on its logits, such
    as a table over distance. Others are discovered.
    """
    if not isinstance(getattr(module, "qkv", None), nn.Linear):
        return False
    if any(name.partition(".")[0] not in KEPT for name, _ in chain(module.named_parameters(), module.named_buffers())):
        return False
    if "rope" in inspect.signature(module.forward).parameters or "Channel" in type(module).__name__:
        return False
    linear = all(isinstance(getattr(module, name, None), nn.Linear) for name in ("qkv", "proj"))
    return (
        linear
        and isinstance(getattr(module, "num_heads", None), int)
        and isinstance(getattr(module, "scale", None), float)
    )


def _facts(weights: Weights, config: Config, stem: str) -> _Facts:
    foreign = [n for n in weights.names() if n.startswith(stem) and not re.fullmatch(PARTS, n.removeprefix(stem))]
    if foreign:
        raise LocaterError(
            f"{weights.where}: {foreign[0]} is no part of timm's plain attention: "
            "describe the model with locater.register()"
        )
    if isinstance(weights, ModuleWeights):
        module: Any = weights.submodule(stem.removesuffix("."))
        return _Facts(module.num_heads, module.scale)
    architecture = config.get("architecture")
    if "model_type" not in config and architecture and not re.fullmatch(PLAIN, architecture):
        raise LocaterError(
            f"{weights.where}: timm's {architecture} is not known to be a plain ViT; if it is, "
            'set "model_type": "timm" and "num_heads" in config.json'
        )
    args = config.get("model_args")
    settings = {
        **(args if isinstance(args, Mapping) else {}),
        **{key: value for key, value in config.items() if value is not None},
    }
    if settings.get("num_heads") is None:
        raise LocaterError(f"{weights.where}: the number of heads is not in the tensors: add --heads N")
    return _Facts(integer(settings, weights, "num_heads"))


def _layer(weights: Weights, config: Config, stem: str, facts: _Facts) -> AttentionLayout:
    rows, width = shape_of(weights, f"{stem}qkv.weight")
    size, rest = divmod(rows, 3 * facts.heads)
    if rest:
        raise LocaterError(
            f"{weights.where}: {stem}qkv.weight has {rows} rows, "
            f"which {facts.heads} heads do not divide: change --heads"
        )
    query, key, value = (
        map_layout(weights, f"{stem}qkv", [(part * rows // 3, (part + 1) * rows // 3)]) for part in range(3)
    )
    block = re.sub(r"[^.]*\.$", "", stem)  # with its last dot too
    number = block.removesuffix(".").rpartition(".")[2]
    # a norm between values and `proj` (timm's scale_norm) is no part of the record, so the output is left out
    mixes = f"{stem}norm.weight" not in weights.names()
    before, unknown = _norm_before(weights, config, block, width)
    heads_norms = [_norm(weights, config, f"{stem}{name}", size) for name in ("q_norm", "k_norm")]
    return AttentionLayout(
        name=stem.removesuffix("."),
        index=int(number) if number.isdigit() else 0,
        heads=facts.heads,
        kv_heads=facts.heads,
        head_dim=size,
        query=query,
        key=key,
        value=value if mixes else None,
        out=scaled_rows(weights, map_layout(weights, f"{stem}proj"), f"{block}ls1.gamma") if mixes else None,
        logits=LogitsLayout(size**-0.5 if facts.scale is None else facts.scale),
        norm=before,
        unknown_norm=unknown,
        query_norm=heads_norms[0],
        key_norm=heads_norms[1],
    )


def _norm_before(weights: Weights, config: Config, block: str, width: int) -> tuple[NormLayout, str | None]:
    """The norm in front, and why it is a guess where it is: a block of another library may apply `norm1` anywhere."""
    if any(name.startswith(f"{block}adaLN") for name in weights.names()):
        raise LocaterError(
            f"{weights.where}: {block[:-1]} is modulated by a condition (adaLN), "
            "so its weights alone do not tell its logits"
        )
    path = f"{block}norm1"
    if not isinstance(weights, ModuleWeights):
        found = _norm(weights, config, path, width)
        return found or NormLayout(), None if found else f"the file holds no {path}.weight"
    around = weights.submodule(block[:-1])
    if _offers(around):  # the attention is the model itself
        return NormLayout(), None
    kind = type(around)
    unknown = None if kind.__module__ == BLOCKS else f"its block, {kind.__name__}, may apply its norms anywhere"
    if "ResPost" in kind.__name__:
        return NormLayout(), unknown  # norm1 follows attention there
    return _norm(weights, config, path, width) or NormLayout(), unknown


def _norm(weights: Weights, config: Config, path: str, size: int) -> NormLayout | None:
    """LayerNorm or RMSNorm: a live module has its class and eps; on disk only LayerNorm has a bias."""
    if f"{path}.weight" in weights.names():
        expect(
            weights,
            f"{path}.weight",
            shape_of(weights, f"{path}.weight"),
            (size,),
            "as qkv and the number of heads say",
        )
    if not isinstance(weights, ModuleWeights):
        eps = config.get("layer_norm_eps", 1e-5 if "_clip_" in config.get("architecture", "") else 1e-6)
        if f"{path}.weight" not in weights.names():
            return None
        return norm_layout(weights, path, "layer" if f"{path}.bias" in weights.names() else "rms", eps)
    parent, _, name = path.rpartition(".")
    module: Any = getattr(weights.submodule(parent), name, None)
    if module is None or isinstance(module, nn.Identity):
        return None
    if isinstance(module, nn.LayerNorm):
        return norm_layout(weights, path, "layer", module.eps)
    if "rms" in type(module).__name__.lower() and isinstance(getattr(module, "eps", None), float):
        return norm_layout(weights, path, "rms", module.eps)
    raise LocaterError(
        f"{weights.where}: {path} is a {type(module).__name__}, neither LayerNorm nor RMSNorm with an eps"
    )


def recognises(module: nn.Module) -> bool:
    """Attention of timm's that does not pass the interface of transformers."""
    return _offers(module) and not uses_attention_interface(module)


FAMILY = Family(("timm",), layers, tap=tap, recognises=recognises)
