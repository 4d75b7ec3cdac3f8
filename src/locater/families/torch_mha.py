"""`torch.nn.MultiheadAttention`, alone or inside nn.TransformerEncoder, nn.TransformerDecoder and nn.Transformer.

A state dict does not say how many heads there are nor whether norms come first, so a checkpoint needs a config.json
with `{"model_type": "torch", "num_heads": n, "norm_first": false, "layer_norm_eps": 1e-5}` beside it (or `--heads`); a
live module has them as attributes. Which norm an attention reads is known in PyTorch's own layers alone; elsewhere a
live model is discovered, and for a file config.json may name the norm inside the block (`"norm": "ln_1"`). Causal masks
are arguments of the call here, so `causal` is False: `dataclasses.replace` it if you mask.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from locater.calls.call_and_masks import Call
from locater.calls.listeners import active_listeners
from locater.calls.patching import Undo, argument_of, notify, replace_method
from locater.errors import LocaterError
from locater.families.record import Family
from locater.kernels import Terms
from locater.layers.build import integer, map_layout, named_map, norm_layout, shape_of
from locater.layers.layer import Kind
from locater.layers.layout import AttentionLayout, LogitsLayout
from locater.layers.map_layouts import MapLayout, NormLayout, VectorLayout, count
from locater.layers.norm import NormKind
from locater.sources.open_source import Config
from locater.sources.weights import ModuleWeights, Weights, natural_key
from locater.torch_private import ENCODER_STEPS, has_joint_projection, replace_fused_encoder_layer

# The tap of `nn.MultiheadAttention`, alone or inside PyTorch's own encoders and decoders.


_tapped: list[nn.MultiheadAttention] = []
_plain: list[Callable[..., Tensor]] = []  # the function that is replaced, while it is


def tap(module: nn.Module) -> Iterator[Undo]:
    assert isinstance(module, nn.MultiheadAttention)
    yield replace_method(module, "forward", _attend)
    if not _tapped:
        _plain.append(replace_fused_encoder_layer(_encode))
    _tapped.append(module)

    def undo() -> None:
        _tapped[:] = [m for m in _tapped if m is not module]
        if not _tapped:
            replace_fused_encoder_layer(_plain.pop())

    yield undo


def _attend(module: nn.MultiheadAttention, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    out = forward(*args, **kwargs)
    sites = active_listeners(module)
    if sites:
        query, key, _, hidden, _, mask = (argument_of(args, kwargs, at, name) for at, name in enumerate(ARGUMENTS))
        with torch.no_grad():
            q, k, padding = _batched(module, query, key)
            output, _, _ = _batched(module, out[0].detach(), out[0])
            notify(sites, replace(_masked(_met(module, q, k, padding), mask, hidden), output=output))
    return out


ARGUMENTS = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask")


def _encode(*args: Any) -> Tensor:
    """A whole encoder layer in one function: the attention in it is known by its weight. What it returns is not
    attention's alone.
    """
    out = _plain[0](*args)
    for module in _tapped:
        if module.in_proj_weight is args[3]:
            sites = active_listeners(module)
            if sites:
                with torch.no_grad():
                    notify(sites, _in_layer(module, *args))
    return out


def _in_layer(module: nn.MultiheadAttention, src: Tensor, *args: Any) -> Call:
    norm_first, eps, weight, bias = args[7:11]
    mask, mask_type = args[-2:]
    x, _, padding = _batched(module, src, src)
    if norm_first:
        x = functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    call = _met(module, x, x, padding)
    if mask is None:
        return call
    return call.with_terms(padding=mask == 0) if mask_type == 1 else call.with_terms(mask=mask == 0)


def _batched(module: nn.MultiheadAttention, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Inputs as (B, T, E), and which keys are real where the input is a nested tensor."""
    if query.is_nested:  # query and key are one, or PyTorch refuses
        lengths = torch.tensor([part.shape[0] for part in query.unbind()], device=query.device)
        whole = torch.nested.to_padded_tensor(query, 0.0)
        return whole, whole, torch.arange(whole.shape[1], device=query.device) < lengths[:, None]
    if query.ndim == 2:
        return query[None], key[None], None
    return (query, key, None) if module.batch_first else (query.transpose(0, 1), key.transpose(0, 1), None)


def _met(module: nn.MultiheadAttention, query: Tensor, key: Tensor, padding: Tensor | None) -> Call:
    q, k = _projected(module, query, 0), _projected(module, key, 1)
    return Call(q, k, Terms(q.shape[-1] ** -0.5, padding=padding))


def _projected(module: nn.MultiheadAttention, x: Tensor, part: int) -> Tensor:
    rows = slice(part * module.embed_dim, (part + 1) * module.embed_dim)
    weight = (
        module.in_proj_weight[rows]
        if has_joint_projection(module)
        else (module.q_proj_weight, module.k_proj_weight)[part]
    )
    bias = None if module.in_proj_bias is None else module.in_proj_bias[rows]
    return functional.linear(x, weight, bias).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)


def _masked(call: Call, mask: Tensor | None, hidden: Tensor | None) -> Call:
    """With masks as PyTorch takes them: True hides, numbers are added. `is_causal` is a hint about `mask` and adds
    nothing.
    """
    B, H, T, _ = call.query.shape
    added = []
    if mask is not None:
        mask = mask[None, None] if mask.ndim == 2 else mask.view(B, H, T, -1)
        if mask.dtype == torch.bool:
            call = call.with_terms(mask=~mask)
        else:
            added.append(mask.detach())
    if hidden is not None:
        hidden = hidden[None] if hidden.ndim == 1 else hidden
        if hidden.dtype == torch.bool:
            call = call.with_terms(padding=~hidden)
        else:
            added.append(hidden.detach()[:, None, None])
    return call.masked(sum(added[1:], added[0])) if added else call


ROLES = ("self_attn", "multihead_attn")  # attention in the layers of PyTorch's encoders and decoders
BLOCKS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
STACKS = (nn.TransformerEncoder, nn.TransformerDecoder)
ALONE = ({"layers"}, {"layers", "norm"}, {"encoder", "decoder"})  # how names begin where nothing is around the stacks
OUTSIDE = "it reads what the model around its stack gives it"
PATTERN = r"(?P<stem>(?:.*\.)?)(?:in_proj_weight|q_proj_weight)"


@dataclass(frozen=True)
class _Facts:
    """What the tensors do not tell."""

    heads: int
    kind: Kind
    norm: NormLayout
    memory_norm: NormLayout | None
    extra_key: bool = False  # add_bias_kv or add_zero_attn: a learned or zero key joins the softmax
    unknown_norm: str | None = None


def stems(weights: Weights) -> list[str]:
    """Paths of attention modules, each with its last dot, so that an attention module alone has the path ""."""
    paths = [m["stem"] for name in weights.names() if (m := re.fullmatch(PATTERN, name))]
    return sorted(paths, key=natural_key)


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayout]:
    for index, stem in enumerate(stems(weights)):
        yield _layer(weights, stem, index, _facts(weights, config, stem.removesuffix(".")))


def _facts(weights: Weights, config: Config, path: str) -> _Facts:
    if not isinstance(weights, ModuleWeights):
        return _facts_on_disk(weights, config, path)
    module = weights.submodule(path)
    if not isinstance(module, nn.MultiheadAttention):
        kind = type(module).__name__
        raise LocaterError(
            f"{weights.where}: {path} has the tensors of nn.MultiheadAttention but is a {kind}: locater.register() it"
        )
    placed = _norms_in_front(weights, path, module)
    extra = module.bias_k is not None or module.add_zero_attn
    return _Facts(module.num_heads, placed.kind, placed.norm, placed.memory_norm, extra, placed.unknown)


def _facts_on_disk(weights: Weights, config: Config, path: str) -> _Facts:
    heads = integer(config, weights, "num_heads", "nhead", "num_attention_heads")
    block, _, role = path.rpartition(".")
    decoder = f"{_in(block, 'norm3')}.weight" in weights.names()
    kind: Kind = "cross" if decoder and role == "multihead_attn" else "self"
    eps, given = config.get("layer_norm_eps", 1e-5), config.get("norm")
    if isinstance(given, str):
        return _Facts(heads, kind, norm_layout(weights, _in(block, given), "layer", eps), None)
    unknown = _unknown_on_disk(weights, path, bool(config.get("norm_first")))
    memory = _memory_norm(weights, block, eps) if kind == "cross" else None
    return _Facts(
        heads, kind, _norm_before(weights, block, kind, bool(config.get("norm_first")), eps), memory, False, unknown
    )


def _unknown_on_disk(weights: Weights, path: str, norm_first: bool) -> str | None:
    """Why the norm that an attention reads is not known from a file; None where its tensors are those of PyTorch's own
    encoders and decoders.
    """
    block, _, role = path.rpartition(".")
    if not path or (not block and role in ROLES):
        return None
    if role not in ROLES or any(f"{_in(block, part)}.weight" not in weights.names() for part in ("norm1", "linear1")):
        return (
            "its block is not one of PyTorch's own, and a file does not say which norm it reads: scan the live model, "
            'or name the norm inside the block in config.json ("norm": "ln_1")'
        )
    first = role == ROLES[0] and re.fullmatch(r"(.+\.)?layers\.0", block)
    if first and not norm_first and {name.split(".")[0] for name in weights.names()} not in ALONE:
        return (
            "it reads what the model gives its first layer, and a file does not say what that is: scan the live model"
        )
    return None


def _layer(weights: Weights, stem: str, index: int, facts: _Facts) -> AttentionLayout:
    q, k, v = (_input_projection(weights, stem, i) for i in range(3))
    out = map_layout(weights, f"{stem}out_proj")
    rows = count(q.rows)
    head_dim, rest = divmod(rows, facts.heads)
    if rest:
        raise LocaterError(
            f"{weights.where}: {stem}in_proj has {rows} query rows, "
            f"which {facts.heads} heads do not divide: change --heads"
        )
    return AttentionLayout(
        name=stem.removesuffix("."),
        index=index,
        heads=facts.heads,
        kv_heads=facts.heads,
        head_dim=head_dim,
        query=q,
        key=k,
        value=None if facts.extra_key else v,
        out=None if facts.extra_key else out,
        logits=LogitsLayout(head_dim**-0.5),
        norm=facts.norm,
        memory_norm=facts.memory_norm,
        kind=facts.kind,
        unknown_norm=facts.unknown_norm,
    )


def _input_projection(weights: Weights, stem: str, part: int) -> MapLayout:
    fused, own, bias = f"{stem}in_proj_weight", f"{stem}{'qkv'[part]}_proj_weight", f"{stem}in_proj_bias"
    if fused in weights.names():
        rows = shape_of(weights, fused)[0] // 3
        return named_map(weights, fused, bias, [(part * rows, (part + 1) * rows)])
    layout = named_map(weights, own, "")
    rows = count(layout.rows)
    shift = VectorLayout(bias, (range(part * rows, (part + 1) * rows),)) if bias in weights.names() else None
    return replace(layout, shift=shift)  # the bias of all three is one tensor


def _norm_before(weights: Weights, block: str, kind: Kind, norm_first: bool, eps: float) -> NormLayout:
    """The norm that the queries read: in front (norm_first), or the one that closed the step before."""
    stack, _, number = block.rpartition(".")
    decoder = f"{_in(block, 'norm3')}.weight" in weights.names()
    if norm_first:
        name = _in(block, "norm2" if kind == "cross" else "norm1")
    elif kind == "cross":
        name = _in(block, "norm1")
    else:
        name = (
            f"{_in(stack, str(int(number) - 1))}.{'norm3' if decoder else 'norm2'}"
            if number.isdigit() and int(number)
            else ""
        )
    return _norm(weights, name, eps)


def _in(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _memory_norm(weights: Weights, block: str, eps: float) -> NormLayout:
    """The norm that closed the encoder, where the checkpoint holds one beside the decoder (nn.Transformer)."""
    return _norm(weights, re.sub(r"decoder\.layers\.\d+$", "encoder.norm", block), eps)


def _norm(weights: Weights, name: str, eps: float) -> NormLayout:
    return norm_layout(weights, name, "layer", eps) if f"{name}.weight" in weights.names() else NormLayout()


@dataclass(frozen=True)
class Placed:
    """The norms that queries and keys read."""

    kind: Kind
    norm: NormLayout = field(default_factory=NormLayout)
    memory_norm: NormLayout | None = None
    unknown: str | None = None  # why these are not known


def _norms_in_front(weights: ModuleWeights, path: str, module: nn.MultiheadAttention) -> Placed:
    """Of an attention module that is the model itself, its input is all there is."""
    kind: Kind = "cross" if module.kdim != module.embed_dim else "self"
    if not path:
        return Placed(kind)
    block_path, _, role = path.rpartition(".")
    block: Any = weights.submodule(block_path)
    if not _runs_as(block, BLOCKS) or role not in ROLES:
        return Placed(kind, unknown=f"its block, {type(block).__name__}, may apply its norms anywhere")
    cross = role == "multihead_attn"
    memory = _norm_of_memory(weights, block_path) if cross else None
    if block.norm_first or cross:
        queries = _norm_at(
            weights, f"{block_path}." if block_path else "", "norm2" if cross and block.norm_first else "norm1"
        )
    else:
        queries = _norm_of_stream(weights, block_path)
    unknown = next((x for x in (queries, memory) if isinstance(x, str)), None)
    return Placed(
        "cross" if cross else "self",
        NormLayout() if isinstance(queries, str) else queries,
        NormLayout() if isinstance(memory, str) else memory,
        unknown,
    )


def _runs_as(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Whether a module runs as one of these classes is written: a subclass may run otherwise."""
    steps = ("forward", *ENCODER_STEPS)
    return any(
        isinstance(module, kind)
        and all(getattr(type(module), step, None) is getattr(kind, step, None) for step in steps)
        for kind in kinds
    )


def _norm_of_stream(weights: ModuleWeights, path: str) -> NormLayout | str:
    """The norm that made the input of a layer, or why that is not known: the last one of the layer before."""
    if not path:
        return NormLayout()
    stack_path, _, number = path.rpartition(".")
    stack = weights.submodule(stack_path)
    owner_path = stack_path if type(stack) is nn.Sequential else stack_path.rpartition(".")[0]
    owner = weights.submodule(owner_path)
    if stack is not owner and not (_runs_as(owner, STACKS) and stack is owner.layers):
        return OUTSIDE
    if not number.isdigit():
        return OUTSIDE
    if int(number):
        return _norm_after(weights, f"{stack_path}.{int(number) - 1}" if stack_path else str(int(number) - 1))
    root = weights.module
    alone = not owner_path or (_runs_as(root, (nn.Transformer,)) and owner_path in ("encoder", "decoder"))
    return NormLayout() if alone else OUTSIDE


def _norm_after(weights: ModuleWeights, path: str) -> NormLayout | str:
    """The norm at the end of a layer."""
    block: Any = weights.submodule(path)
    if not _runs_as(block, BLOCKS):
        return f"the layer before it, {type(block).__name__}, may apply its norms anywhere"
    if block.norm_first:
        return NormLayout()
    return _norm_at(weights, f"{path}.", "norm3" if isinstance(block, nn.TransformerDecoderLayer) else "norm2")


def _norm_of_memory(weights: ModuleWeights, block_path: str) -> NormLayout | str:
    """The norm of the stream that a decoder layer takes its keys from: the one that closed the encoder of the same
    nn.Transformer.
    """
    stack, _, _ = block_path.rpartition(".")
    owner = stack.rpartition(".")[0]
    if not block_path or (not owner and _runs_as(weights.module, STACKS)):
        return NormLayout()
    whole_path = owner.rpartition(".")[0]
    whole: Any = weights.submodule(whole_path)
    if not _runs_as(whole, (nn.Transformer,)) or not _runs_as(whole.encoder, STACKS):
        return OUTSIDE.replace("it reads", "its keys read")
    prefix = f"{whole_path}.encoder" if whole_path else "encoder"
    if whole.encoder.norm is not None:
        return _norm_at(weights, f"{prefix}.", "norm")
    return _norm_after(weights, f"{prefix}.layers.{len(whole.encoder.layers) - 1}")


def _norm_at(weights: ModuleWeights, prefix: str, name: str) -> NormLayout | str:
    """The norm of this name, or why it is none that can be read."""
    module: Any = getattr(weights.submodule(prefix.removesuffix(".")), name)
    if isinstance(module, nn.Identity):
        return NormLayout()
    if type(module) not in (nn.LayerNorm, nn.RMSNorm) or len(module.normalized_shape) != 1:
        return f"the norm that it reads is a {type(module).__name__}"
    eps = module.eps
    if eps is None:  # as nn.RMSNorm computes
        eps = torch.finfo(module.weight.dtype if module.weight is not None else torch.float32).eps
    kind: NormKind = "layer" if type(module) is nn.LayerNorm else "rms"
    return norm_layout(weights, f"{prefix}{name}", kind, eps, affine=False)


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
