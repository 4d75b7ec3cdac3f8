"""`decompose()`: a model run once on an input, and frozen.

Axes: B sequences, T queries, S keys, d width, H heads, K value heads, h head size, f hidden units, n fields carried at
once.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locater.attention import interface
from locater.attention.call import Call
from locater.attention.listeners import Switch, enter, leave
from locater.attention.stand_ins import instead
from locater.checkpoints.sources import config_of
from locater.checkpoints.weights import ModuleWeights
from locater.errors import LocaterError, first_line
from locater.explain.frozen import FrozenNorm, Gates, Heads, Step
from locater.explain.layouts import GPT2, LAYOUTS, Layout
from locater.explain.paths import Paths
from locater.families import AttentionLayer, attention_layers
from locater.families.build import norm, optional
from locater.families.norm import Norm
from locater.numerics import upcast
from locater.observing.inputs import run
from locater.observing.site import Site
from locater.observing.tally import StatisticsOptions

Mlp = Literal["source", "linear"]


def decompose(
    model: nn.Module, batch: Mapping[str, Tensor] | Tensor, *, mlp: Mlp = "source", final_norm: bool = True
) -> Paths:
    """Run `model` once on `batch` (keywords, or its first argument) and freeze it into paths.

    `mlp` is "source" or "linear" (above). The output is what the model's head reads: the stream after the final norm,
    whose denominators are frozen too, or before it with `final_norm=False`. Families: BERT and RoBERTa, GPT-2, Llama
    and its relatives, ViT, Locater's own blocks. Everything is computed in the model's precision, float32 at least.
    transformers computes Llama's norms, and the eager softmax of some, in float32 whatever the model's precision, which
    shows in `gap`.

    >>> from locater.train import Shape, Transformer
    >>> _ = torch.manual_seed(0)
    >>> model = Transformer(Shape(vocabulary=64, layers=3, width=32, heads=4, kv_heads=2, hidden=48), scale=0.2)
    >>> paths = decompose(model, torch.arange(10)[None])
    >>> found = paths.by_length()                              # 5^3 = 125 paths, by length 0 to 3
    >>> torch.allclose(found.total.sum(0), paths.output, atol=1e-5)
    True
    >>> [paths.count(k) for k in range(4)], tuple(paths.contribution((2, None, 0)).shape)
    ([1, 12, 48, 64], (1, 10, 32))
    >>> torch.allclose(paths.sum_of([(None, None, None)]), found.input[0], atol=1e-5)
    True
    >>> paths.through_heads().norm.shape
    torch.Size([3, 4])
    """
    if mlp not in ("source", "linear"):
        raise LocaterError(f"mlp={mlp!r} is not known: use 'source' or 'linear'")
    if not isinstance(batch, Mapping | Tensor):
        raise LocaterError(
            f"batch is a {type(batch).__name__}: give token ids as a tensor, or the keywords that the model takes"
        )
    layout = _layout(model)
    layers = list(attention_layers(model))
    cross = next((layer.name for layer in layers if layer.kind != "self"), None)
    if cross is not None:
        raise LocaterError(
            f"{cross}: paths go through one stack, and cross-attention joins two: leave it out of the model"
        )
    reading = _Reading(ModuleWeights(model), layout, layers)
    with reading.listening():
        given = _named(model, batch)
        try:
            run(model, given)
        except LocaterError:
            raise
        except Exception as error:
            raise LocaterError(f"{type(model).__name__}: does not run on this batch ({first_line(error)})") from error
    with torch.no_grad():
        paths = reading.paths(mlp, final_norm, given.get("attention_mask"))
        return _sound(paths, next(model.parameters()).dtype)


def _layout(model: nn.Module) -> Layout:
    kind = config_of(model).get("model_type")
    if kind not in LAYOUTS:
        what = f"model_type {kind!r}" if kind else "a model without a model_type"
        raise LocaterError(
            f"{type(model).__name__}: {what} is not decomposed into paths; those that are: {', '.join(sorted(LAYOUTS))}"
        )
    return LAYOUTS[kind]


def _named(model: nn.Module, batch: Mapping[str, Tensor] | Tensor) -> dict[str, Tensor]:
    if isinstance(batch, Tensor):
        return {next(iter(inspect.signature(model.forward).parameters)): batch}
    return dict(batch)


def _sound(paths: Paths, dtype: torch.dtype) -> Paths:
    """Refuse a sum that is not the output: then the model has parts that its family does not have."""
    most = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) ** 0.5
    if not paths.gap <= most:
        raise LocaterError(
            f"{paths.name}: its paths sum to its output only within {paths.gap:.1e} (expected {most:.0e}): it has parts that "
            "are not those of its model_type, or its output is not finite"
        )
    return paths


class _Kept(Site):
    """A site that keeps its calls as they are."""

    def _make(self) -> None:
        self.calls: list[Call] = []

    def see(self, call: Call) -> None:
        self.calls.append(call)


@dataclass(frozen=True)
class _Passed:
    given: Tensor
    returned: Tensor


@dataclass
class _Reading:
    """One pass of a model: what its attention was asked, and what passed through the modules that matter."""

    weights: ModuleWeights
    layout: Layout
    layers: Sequence[AttentionLayer]
    passed: dict[str, list[_Passed]] = field(default_factory=dict)
    sites: list[_Kept] = field(default_factory=list)

    @contextmanager
    def listening(self) -> Iterator[None]:
        with ExitStack() as stack:
            interface.install()
            stack.callback(interface.remove)
            for number, layer in enumerate(self.layers):
                module = self.weights.submodule(layer.name)
                site = _Kept(
                    layer.name,
                    number,
                    "self",
                    module,
                    layer.group,
                    layer.heads,
                    [],
                    Switch(),
                    StatisticsOptions(),
                    layer,
                )
                self.sites.append(site)
                enter(site)
                stack.callback(leave, site)
            for path in self._watched():
                held = self.passed.setdefault(path, [])
                stack.callback(instead(self.weights.submodule(path), "forward", partial(_keep, held)))
            yield

    def paths(self, mlp: Mlp, final_norm: bool, mask: Tensor | None) -> Paths:
        steps: list[Step] = []
        for layer, site in zip(self.layers, self.sites, strict=True):
            block = self._block(layer)
            steps.append(self._attention(layer, self._call(site), block))
            steps += self._mlp(block, mlp)
        x = upcast(self._once(self._block(self.layers[0])).given)
        end = self._once(self._block(self.layers[-1])).returned
        final = self._final()
        if final is not None and final_norm:
            steps.append(Step(final, after=self._norm(final)))
            end = self._once(final).returned
        real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        if mask is not None and mask.shape == real.shape:
            real = mask.to(x.device).bool()
        return Paths(self.weights.where, x, upcast(end), real, steps)

    def _attention(self, layer: AttentionLayer, call: Call, block: str) -> Step:
        assert layer.value is not None
        assert layer.out is not None
        maps = attention_maps(call)
        before = self._norm(_under(block, self.layout.before))
        value = layer.value.weight().detach().to(maps).unflatten(0, (layer.kv_heads, -1))
        constant = value.new_zeros(value.shape[:2])
        if layer.value.bias is not None:
            constant = constant + layer.value.bias.detach().to(maps).view_as(constant)
        if before is not None and before.shift is not None:
            constant = constant + value @ before.shift
        out = layer.out.weight().detach().to(maps).mT.unflatten(0, (layer.heads, -1))
        bias = _like(layer.out.bias, maps)
        return Step(
            layer.name,
            Heads(maps, value, out, before, constant),
            1,
            bias,
            after=self._norm(_under(block, self.layout.after)),
        )

    def _mlp(self, block: str, mlp: Mlp) -> list[Step]:
        """None where it was taken out, one otherwise; its norm may have stayed."""
        name, around = f"{block}.{self.layout.mlp}", _under(block, self.layout.mlp_after)
        after = self._norm(around) if self._ran(around) else None
        if not self._ran(name):
            return [] if after is None else [Step(name, after=after)]
        observed = upcast(self._once(name).returned)
        if mlp == "source" or not observed.any():
            return [Step(name, observed=observed, after=after)]
        gates, bias = self._gates(block, observed)
        return [Step(name, gates, 0, bias, after=after)]

    def _gates(self, block: str, like: Tensor) -> tuple[Gates, Tensor | None]:
        up, down = f"{block}.{self.layout.up}", f"{block}.{self.layout.down}"
        if not (self._ran(up) and self._ran(down)):
            raise LocaterError(
                f"{block}: no {self.layout.up} and {self.layout.down}, so its MLP is not made linear: use mlp='source'"
            )
        before = self._norm(_under(block, self.layout.mlp_before))
        (W_up, b_up), (W_down, b_down) = self._linear(up, like), self._linear(down, like)
        z, value = upcast(self._once(up).returned), upcast(self._once(down).given)
        ratio = torch.where(z == 0, 0.0, value / z)
        made = W_up.new_zeros(W_up.shape[0]) if b_up is None else b_up
        if before is not None and before.shift is not None:
            made = made + W_up @ before.shift
        constant = ratio * made + torch.where(z == 0, value, 0.0)  # an activation that is not 0 at 0 has no ratio there
        return Gates(ratio, W_up, W_down, before, constant), b_down

    def _norm(self, path: str | None) -> FrozenNorm | None:
        """The norm at `path`, with the denominators it had."""
        if path is None:
            return None
        module: Any = self.weights.submodule(path)
        eps = getattr(module, "eps", None)
        held = norm(self.weights, path, self.layout.kind, module.variance_epsilon if eps is None else eps)
        x = upcast(self._once(path).given)
        return FrozenNorm(_factor(held, x), _like(held.gain, x), _like(held.bias, x), held.kind == "layer")

    def _linear(self, path: str, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """(out, in) and the bias; GPT-2 stores (in, out)."""
        weight = self.weights.read(f"{path}.weight").detach().to(like)
        return weight.mT if self.layout is GPT2 else weight, _like(optional(self.weights, f"{path}.bias"), like)

    def _watched(self) -> list[str]:
        layout, found = self.layout, [self._block(self.layers[0]), self._block(self.layers[-1])]
        for block in map(self._block, self.layers):
            parts = (
                layout.before,
                layout.after,
                layout.mlp_before,
                layout.mlp_after,
                layout.mlp,
                layout.up,
                layout.down,
            )
            found += [path for part in parts if part is not None and self._has(path := f"{block}.{part}")]
        final = self._final()
        return list(dict.fromkeys([*found, *([] if final is None else [final])]))

    def _block(self, layer: AttentionLayer) -> str:
        return layer.name.removesuffix(f".{self.layout.attention}")

    def _final(self) -> str | None:
        if self.layout.final is None:
            return None
        stack = self._block(self.layers[0]).rpartition(".")[0]
        return stack.removesuffix(self.layout.stack) + self.layout.final

    def _has(self, path: str) -> bool:
        try:
            self.weights.submodule(path)
        except KeyError:
            return False
        return True

    def _ran(self, path: str | None) -> bool:
        return bool(path and self.passed.get(path))

    def _once(self, path: str) -> _Passed:
        held = self.passed.get(path, [])
        if len(held) != 1:
            raise LocaterError(f"{path}: passed {len(held)} times in one run of the model; paths need every part once")
        return held[0]

    def _call(self, site: _Kept) -> Call:
        if len(site.calls) != 1:
            raise LocaterError(
                f"{site.name}: its attention was heard {len(site.calls)} times in one run of the model, not once: "
                "load it with attn_implementation='sdpa' or 'eager'"
            )
        return site.calls[0]


def attention_maps(call: Call) -> Float[Tensor, "B H T S"]:
    """The weights that a call gave its keys, computed again from its queries, keys and masks. A row that sees no key is
    zero.
    """
    q, k = upcast(call.query), upcast(call.key)
    (B, H, T, _), S = q.shape, k.shape[2]
    terms = call.terms.checked(B, H, T, S)
    logits = terms.logits(q, k.repeat_interleave(H // k.shape[1], 1), slice(0, T), T)
    hidden = ~terms.visible(slice(0, T), T, S, q.device) | (logits == -torch.inf)
    return logits.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0.0)


def _keep(held: list[_Passed], module: nn.Module, forward: Any, *args: Any, **kw: Any) -> Any:
    out = forward(*args, **kw)
    given = args[0] if args else next(iter(kw.values()))
    held.append(_Passed(given.detach(), (out[0] if isinstance(out, tuple) else out).detach()))
    return out


def _factor(norm: Norm, x: Tensor) -> Tensor:
    """One over each token's deviation: (B, T, 1)."""
    if norm.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)


def _like(held: Tensor | None, x: Tensor) -> Tensor | None:
    return None if held is None else held.detach().to(x)


def _under(block: str, part: str | None) -> str | None:
    return None if part is None else f"{block}.{part}"
