"""torchtitan's attention (`GQAttention` of its Llama and Qwen models): separate or fused maps of queries, keys and
values, rotary positions, and an inner module that attends.

A live module is recognised by its parts. Masks come as block masks of FlexAttention; variable-length attention is not
observed, since its sequences lie in one row. A checkpoint does not say how many heads there are: load it into the
model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from locater.calls.call_and_masks import Call, with_dense_mask
from locater.calls.listeners import active_listeners, describe_call
from locater.calls.patching import Undo, notify, replace_method
from locater.errors import LocaterError
from locater.families.record import Family
from locater.kernels import Terms
from locater.layers.build import map_layout, norm_layout
from locater.layers.layout import AttentionLayout, LogitsLayout, RotaryLayout
from locater.layers.map_layouts import MapLayout, NormLayout
from locater.layers.rotary import halves
from locater.sources.open_source import Config
from locater.sources.weights import ModuleWeights, Weights
from locater.torch_private import without_dispatch_modes

LIBRARY = "torchtitan."
BLOCKS = {"Llama3TransformerBlock", "Qwen3TransformerBlock"}  # with `attention_norm` in front of attention
TURNING = {"ComplexRoPE": True, "CosSinRoPE": False}  # whether neighbouring channels turn, or halves

# The tap: the inner module is called with queries and keys (B, L, heads, size) as they meet.


def tap(module: nn.Module) -> Iterator[Undo]:
    inner: Any = module.inner_attention
    yield replace_method(inner, "forward", partial(_attend, module))


def _attend(
    module: Any, inner: nn.Module, forward: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, **kwargs: Any
) -> Any:
    out = forward(q, k, v, **kwargs)
    sites = active_listeners(module)
    if sites:
        call = describe_call(sites, _described, inner, q.detach(), k.detach(), out.detach(), kwargs)
        if call is not None:
            notify(sites, call)
    return out


def _described(inner: nn.Module, q: Tensor, k: Tensor, out: Tensor, kwargs: dict[str, Any]) -> Call:
    query, key, mask = q.transpose(1, 2), k.transpose(1, 2), kwargs.get("attention_masks")
    if kwargs.get("score_mod") is not None or kwargs.get("out_transform") is not None:
        raise LocaterError("what its score_mod or out_transform does to attention is not known")
    scale = kwargs.get("scale")
    terms = Terms(query.shape[-1] ** -0.5 if scale is None else float(scale))
    if mask is None:
        return Call(query, key, Terms(terms.scale, causal=bool(kwargs.get("is_causal", True))), out)
    return Call(query, key, with_dense_mask(terms, mask, query, key), out)


def unobservable(module: nn.Module) -> str | None:
    if type(getattr(module, "inner_attention", None)).__name__ == "VarlenAttention":
        return "variable-length attention has its sequences in one row: observe a model with FlexAttention"
    return None


# The reader.


def recognises(module: nn.Module) -> bool:
    """Whether a module is torchtitan's attention with grouped keys."""
    if type(module).__name__ != "GQAttention" or not type(module).__module__.startswith(LIBRARY):
        return False
    return _order(module) is not None


def _order(module: Any) -> bool | None:
    return TURNING.get(type(getattr(module, "rope", None)).__name__)


def stems(weights: Weights) -> list[str]:
    """Paths of attention modules, each with its last dot, so that an attention module alone has the path ""."""
    if not isinstance(weights, ModuleWeights):
        return []
    return [f"{path}." if path else "" for path, module in weights.modules().items() if recognises(module)]


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayout]:
    assert isinstance(weights, ModuleWeights), "a live model alone has `stems`"
    for number, stem in enumerate(stems(weights)):
        yield _layer(weights, stem, number)


def _layer(weights: ModuleWeights, stem: str, number: int) -> AttentionLayout:
    path = stem.removesuffix(".")
    module: Any = weights.submodule(path)
    heads, keys, size = module.n_heads, module.n_kv_heads, module.head_dim
    query, key, value = _maps(weights, f"{stem}qkv_linear", heads, keys, size)
    query_norm, key_norm = (_norm(weights, module, stem, name) for name in ("q_norm", "k_norm"))
    if _order(module):
        order = halves(size)
        query, key = query.within_heads(heads, order), key.within_heads(keys, order)
        query_norm, key_norm = (None if norm is None else norm.picked(order) for norm in (query_norm, key_norm))
    before, unknown = _norm_before(weights, path)
    return AttentionLayout(
        name=path,
        index=number,
        heads=heads,
        kv_heads=keys,
        head_dim=size,
        query=query,
        key=key,
        value=value,
        out=map_layout(weights, f"{stem}wo"),
        logits=LogitsLayout(size**-0.5 if module.scaling is None else float(module.scaling), causal=True),
        norm=before,
        unknown_norm=unknown,
        query_norm=query_norm,
        key_norm=key_norm,
        rotary=_rotary(weights, module, path),
    )


def _maps(weights: Weights, stem: str, heads: int, keys: int, size: int) -> list[MapLayout]:
    """Queries, keys and values: three maps, or one with the queries, the key and the value of each group in turn."""
    if f"{stem}.wqkv.weight" not in weights.names():
        return [map_layout(weights, f"{stem}.{name}") for name in ("wq", "wk", "wv")]
    group = heads // keys
    starts = [at * (group + 2) * size for at in range(keys)]
    parts = ((0, group), (group, group + 1), (group + 1, group + 2))
    rows = [[(start + first * size, start + end * size) for start in starts] for first, end in parts]
    return [map_layout(weights, f"{stem}.wqkv", part) for part in rows]


def _norm(weights: Weights, module: Any, stem: str, name: str) -> NormLayout | None:
    norm = getattr(module, name, None)
    return None if norm is None else norm_layout(weights, f"{stem}{name}", "rms", norm.eps, affine=False)


def _norm_before(weights: ModuleWeights, path: str) -> tuple[NormLayout, str | None]:
    """The norm in front, and why it is a guess where it is."""
    above, _, _ = path.rpartition(".")
    block: Any = weights.submodule(above) if path else None
    norm = getattr(block, "attention_norm", None)
    if norm is None:
        return NormLayout(), None if block is None else f"its block, {type(block).__name__}, has no attention_norm"
    kind = next((one.__name__ for one in type(block).__mro__ if one.__name__ in BLOCKS), None)
    unknown = None if kind else f"its block, {type(block).__name__}, may apply its norms anywhere"
    name = f"{above}.attention_norm" if above else "attention_norm"
    return norm_layout(weights, name, "rms", norm.eps, affine=False), unknown


def _rotary(weights: Weights, module: Any, path: str) -> RotaryLayout:
    """The angles by which a token turns from one position to the next, as the model's own table has them."""
    table = module.rope.cache
    if table.is_meta or len(table) < 2:
        raise LocaterError(f"{weights.where}: {path}.rope has no table of angles yet: initialise the model first")
    with without_dispatch_modes():
        angles = table[1].detach().cpu()
        if angles.is_complex():
            return RotaryLayout(tuple(angles.angle().tolist()))
        cos, sin = angles.float().chunk(2)
        return RotaryLayout(tuple(sin[: len(sin) // 2].atan2(cos[: len(cos) // 2]).tolist()))


FAMILY = Family(("torchtitan",), layers, tap=tap, unobservable=unobservable, recognises=recognises)
