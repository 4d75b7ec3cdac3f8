"""Mechanisms with learned options, as modules: they have the parameters, compute the options and call the mechanism.

`forward(q, k, v, x, causal=..., mask=...)` takes the operands of the mechanism and, where gates are made of it, the
layer's input x (B, S, width), one row per key. `attention_module(name, ...)` makes the module of any mechanism.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from locater.errors import LocaterError
from locater_lab.mechanisms.gated import GateModule, Per, Score
from locater_lab.mechanisms.registry import mechanism

Position = Literal["output", "value", "key", "query"]


class AttentionModule(nn.Module):
    """A mechanism with its parameters; of those without any, the mechanism as it is, or with options of it set.

    >>> q = k = v = torch.ones(1, 2, 3, 4)
    >>> AttentionModule("fastmax", order=1)(q, k, v, causal=True).shape
    torch.Size([1, 2, 3, 4])
    """

    def __init__(self, name: str, **settings: Any) -> None:
        super().__init__()
        known = mechanism(name)
        free = [option for option in known.options if option not in known.learned]
        wrong = [option for option in settings if option not in free]
        if wrong:
            raise LocaterError(f"{name} has no setting {wrong[0]!r}; it has {', '.join(free) or 'none'}")
        self.name, self.settings = known.name, settings

    def options(self, q: Tensor, k: Tensor, x: Tensor | None) -> dict[str, Any]:
        """The options of the mechanism for these operands."""
        return dict(self.settings)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        x: Tensor | None = None,
        *,
        causal: bool = False,
        mask: Tensor | None = None,
        padding: Tensor | None = None,
        query_padding: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """The output (B, H, T, E); arguments as those of every mechanism."""
        how: dict[str, Any] = dict(causal=causal, mask=mask, padding=padding, query_padding=query_padding, scale=scale)
        return mechanism(self.name)(q, k, v, **how, **self.options(q, k, x))

    def map(self, q: Tensor, k: Tensor, x: Tensor | None = None, **how: Any) -> Tensor:
        """The map (B, H, T, S) written out, with the parameters as they are; `how` as for the output."""
        return mechanism(self.name).map(q, k, **how, **self.options(q, k, x))

    def extra_repr(self) -> str:
        return self.name

    def _check_stream(self, x: Tensor | None, tokens: int, width: int) -> Tensor:
        if x is None or x.ndim != 3 or x.shape[1] != tokens or x.shape[2] != width:
            shape = "none" if x is None else list(x.shape)
            raise LocaterError(
                f"{self.name} makes its gates of the layer's input x (batch, {tokens} tokens, {width}); given: {shape}"
            )
        return x


class LearnedSinkAttention(AttentionModule):
    """One sink logit per query head; 0 at first, which is `softmax_plus_one`.

    >>> sum(p.numel() for p in LearnedSinkAttention(8).parameters())
    8
    """

    def __init__(self, heads: int) -> None:
        super().__init__("learned_sink")
        self.sinks = nn.Parameter(torch.zeros(heads))

    def options(self, q: Tensor, k: Tensor, x: Tensor | None) -> dict[str, Any]:
        return {"sinks": self.sinks}


class QKNormAttention(AttentionModule):
    """A gain per query head and one per key head, 1 at first."""

    def __init__(self, heads: int, kv_heads: int | None = None) -> None:
        super().__init__("qk_norm")
        self.query_gain, self.key_gain = nn.Parameter(torch.ones(heads)), nn.Parameter(torch.ones(kv_heads or heads))

    def options(self, q: Tensor, k: Tensor, x: Tensor | None) -> dict[str, Any]:
        return {"query_gain": self.query_gain, "key_gain": self.key_gain}


class HybridNormalizedAttention(AttentionModule):
    """u = sigmoid(logit) per query head, 1/2 at first."""

    def __init__(self, heads: int) -> None:
        super().__init__("hybrid_normalized")
        self.logit = nn.Parameter(torch.zeros(heads))

    def options(self, q: Tensor, k: Tensor, x: Tensor | None) -> dict[str, Any]:
        return {"mix": self.logit.sigmoid()}


class DeltaAttention(AttentionModule):
    """beta = sigmoid(x W_b) per key head: how much of what a key holds is replaced."""

    def __init__(self, width: int, kv_heads: int) -> None:
        super().__init__("delta")
        self.beta = nn.Linear(width, kv_heads, bias=False)

    def options(self, q: Tensor, k: Tensor, x: Tensor | None) -> dict[str, Any]:
        return {"beta": self.beta(self._check_stream(x, k.shape[2], self.beta.in_features)).sigmoid().mT}


class GatedDeltaAttention(DeltaAttention):
    """And log_decay = -exp(a) softplus(x W_a + b) per key head, in float32 at least; at first exp(a) ~ U(0, 16) and b =
    1.

    >>> layer, x = GatedDeltaAttention(8, kv_heads=2), torch.randn(1, 5, 8)
    >>> options = layer.options(x, torch.zeros(1, 2, 5, 4), x)
    >>> options["beta"].shape, bool((options["log_decay"] < 0).all()), sum(p.numel() for p in layer.parameters())
    (torch.Size([1, 2, 5]), True, 36)
    """

    def __init__(self, width: int, kv_heads: int) -> None:
        super().__init__(width, kv_heads)
        self.name = "gated_delta"
        self.decay = nn.Linear(width, kv_heads, bias=False)
        self.log_rate = nn.Parameter(torch.empty(kv_heads).uniform_(0, 16).clamp_min(1e-4).log())
        self.decay_bias = nn.Parameter(torch.ones(kv_heads))

    def options(self, q: Tensor, k: Tensor, x: Tensor | None) -> dict[str, Any]:
        options = super().options(q, k, x)
        step = self.decay(x)
        wide = step.to(torch.promote_types(step.dtype, torch.float32))
        log_decay = -self.log_rate.to(wide).exp() * nn.functional.softplus(wide + self.decay_bias)
        return options | {"log_decay": log_decay.mT}


class DifferentialAttention(AttentionModule):
    """lam = exp(a1.b1) - exp(a2.b2) + lam_init, lam_init = 0.8 - 0.6 exp(-0.3 depth); four vectors of half a query's
    size, N(0, 0.1).

    `depth` is that of the layer, from 0. The output is (1 - lam_init) rms_norm(o), channel by channel gained, one gain
    for all heads; without `norm` it is o. `map` is the map before the norm.

    >>> layer = DifferentialAttention(size=8, depth=0)
    >>> round(layer.lam_init, 3), sum(p.numel() for p in layer.parameters())
    (0.2, 24)
    """

    def __init__(self, size: int, value_size: int | None = None, *, depth: int = 0, norm: bool = True) -> None:
        super().__init__("differential")
        if size % 2 or depth < 0:
            raise LocaterError(
                f"differential: size={size}, depth={depth}: an even size, which has two halves, and layers from 0"
            )
        self.lam_init = 0.8 - 0.6 * math.exp(-0.3 * depth)
        self.vectors = nn.Parameter(0.1 * torch.randn(4, size // 2))  # a1, b1, a2, b2
        self.gain = nn.Parameter(torch.ones(value_size or size)) if norm else None

    @property
    def lam(self) -> Tensor:
        first, second = (self.vectors[0::2] * self.vectors[1::2]).sum(-1).exp().unbind()
        return first - second + self.lam_init

    def options(self, q: Tensor, k: Tensor, x: Tensor | None) -> dict[str, Any]:
        return {"lam": self.lam}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None = None, **how: Any) -> Tensor:
        out = super().forward(q, k, v, x, **how)
        if self.gain is None:
            return out
        return (1 - self.lam_init) * nn.functional.rms_norm(out, self.gain.shape, self.gain.to(out.dtype), eps=1e-5)


class BinaryBiasAttention(AttentionModule):
    """bias_ij = table[j - i] per query head, of distances up to `span`, further ones with it; or of an image's patches.

    With `grid` (rows, columns) tokens are patches, and the table has an entry per difference of rows and of columns;
    with `extra` (a class token in front) three more: from it to a patch, from a patch to it, to itself. At first N(0,
    0.02), cut at 2. The scales mu are not learned: they are means of |q| and |k|.

    >>> BinaryBiasAttention(heads=4, span=8).table.shape, BinaryBiasAttention(heads=4, grid=(3, 2), extra=True).table.shape
    (torch.Size([17, 4]), torch.Size([18, 4]))
    """

    def __init__(
        self, heads: int, span: int = 128, *, grid: tuple[int, int] | None = None, extra: bool = False
    ) -> None:
        super().__init__("binary")
        if span < 0 or (grid is not None and min(grid) < 1) or (extra and grid is None):
            raise LocaterError(
                f"span={span}, grid={grid}, extra={extra}: a span of at least 0, or a grid (rows, columns), "
                "which may have an extra"
            )
        self.span, self.grid, self.extra = span, grid, extra
        entries = 2 * span + 1 if grid is None else (2 * grid[0] - 1) * (2 * grid[1] - 1) + 3 * extra
        self.table = nn.Parameter(nn.init.trunc_normal_(torch.empty(entries, heads), std=0.02, a=-0.04, b=0.04))

    def table_indices(self, T: int, S: int) -> Tensor:
        """Which entry of the table is that of query i and key j (T, S)."""
        device = self.table.device
        if self.grid is None:
            apart = torch.arange(S, device=device) - (torch.arange(T, device=device) + S - T)[:, None]
            return apart.clamp(-self.span, self.span) + self.span
        rows, columns = self.grid
        if rows * columns + self.extra != S:
            raise LocaterError(
                f"binary: a grid of {rows} x {columns} has {rows * columns + self.extra} tokens, and there are {S} keys"
            )
        at = torch.arange(rows * columns, device=device)
        down, across = ((y - y[:, None]) for y in (at // columns, at % columns))
        out = (down + rows - 1) * (2 * columns - 1) + across + columns - 1
        if self.extra:
            last = len(self.table) - 3
            out = nn.functional.pad(out, (1, 0), value=last + 1)
            first = torch.tensor([[last + 2]], device=device)
            out = torch.cat([nn.functional.pad(first, (0, S - 1), value=last), out])
        return out[S - T :]

    def options(self, q: Tensor, k: Tensor, x: Tensor | None) -> dict[str, Any]:
        return {"bias": self.table[self.table_indices(q.shape[2], k.shape[2])].permute(2, 0, 1)[None]}


class GatedAttention(AttentionModule):
    """Softmax attention with a `GateModule` after it ("output"), or on "value", "key" or "query"; `per` "head" or "element".

    `additive` (after attention only): o + silu(x W), which is no gate and has no map.

    >>> sum(p.numel() for p in GatedAttention(8, heads=4, size=2).parameters())      # width x heads
    32
    """

    def __init__(
        self,
        width: int,
        heads: int,
        size: int,
        *,
        kv_heads: int | None = None,
        value_size: int | None = None,
        position: Position = "output",
        per: Per = "head",
        shared: bool = False,
        from_input: bool = True,
        score: Score = "sigmoid",
        additive: bool = False,
    ) -> None:
        super().__init__("gated")
        places = {"output": "gate", "value": "value_gate", "key": "key_gate", "query": "query_gate"}
        if position not in places:
            raise LocaterError(
                f"position={position!r}: choose {', '.join(places)}; after the output projection, a GateModule of its own"
            )
        if additive and (position != "output" or not from_input or shared):
            raise LocaterError("additive is o + silu(x W): position='output', made of the input, and not shared")
        self.option, self.additive, self.width = places[position], additive, width
        many = heads if position in ("output", "query") else kv_heads or heads
        channels = (value_size or size) if position in ("output", "value") else size
        self.gate = GateModule(width, many, channels, per, shared=shared, from_input=from_input, score=score)

    def options(self, q: Tensor, k: Tensor, x: Tensor | None) -> dict[str, Any]:
        if self.additive:
            raise LocaterError("gated: o + silu(x W) is no map of values")
        return {self.option: self.gate(self._check_stream(x, k.shape[2], self.width) if self.gate.from_input else q)}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None = None, **how: Any) -> Tensor:
        if not self.additive:
            return super().forward(q, k, v, x, **how)
        added = nn.functional.silu(self.gate.logits(self._check_stream(x, k.shape[2], self.width)))
        return mechanism("softmax")(q, k, v, **how) + added[:, :, k.shape[2] - q.shape[2] :]


class MultiformerAttention(AttentionModule):
    """A letter per query head, f (full), l (local) or c (convolutional); one kernel for keys and one for values, of all
    c heads.

    `depthwise` kernels have taps per channel and a bias; otherwise taps are shared by channels, values have no bias,
    and there is a map.

    >>> layer = MultiformerAttention("llcc", size=4)                                 # two kernels of 5 taps, two biases
    >>> sum(p.numel() for p in layer.parameters())
    48
    """

    def __init__(
        self,
        kinds: str,
        size: int,
        *,
        value_size: int | None = None,
        window: int = 64,
        taps: int = 5,
        stride: int = 2,
        depthwise: bool = True,
    ) -> None:
        super().__init__("multiformer")
        self.kinds, self.window, self.stride, self.depthwise = kinds, window, stride, depthwise
        for name, channels in (("key", size), ("value", value_size or size)) if "c" in kinds else ():
            kernel = torch.empty(1, 1, taps, channels if depthwise else 1).uniform_(-(taps**-0.5), taps**-0.5)
            self.register_parameter(f"{name}_kernel", nn.Parameter(kernel))
            if depthwise:
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.zeros(1, 1, 1, channels)))

    def options(self, q: Tensor, k: Tensor, x: Tensor | None) -> dict[str, Any]:
        if len(self.kinds) != q.shape[1]:
            raise LocaterError(f"kinds={self.kinds!r} names {len(self.kinds)} heads, and q has {q.shape[1]}")
        return dict(kinds=self.kinds, window=self.window, stride=self.stride) | dict(self.named_parameters())


def attention_module(
    name: str,
    *,
    width: int,
    heads: int,
    size: int,
    kv_heads: int | None = None,
    value_size: int | None = None,
    depth: int = 0,
    **settings: Any,
) -> AttentionModule:
    """The module of a mechanism, for heads of these sizes; `settings` are its own.

    >>> attention_module("learned_sink", width=16, heads=4, size=4)
    LearnedSinkAttention(learned_sink)
    """
    few, values = kv_heads or heads, value_size or size
    makers: dict[str, Any] = {
        "qk_norm": lambda **kw: QKNormAttention(heads, few, **kw),
        "learned_sink": lambda **kw: LearnedSinkAttention(heads, **kw),
        "hybrid_normalized": lambda **kw: HybridNormalizedAttention(heads, **kw),
        "delta": lambda **kw: DeltaAttention(width, few, **kw),
        "gated_delta": lambda **kw: GatedDeltaAttention(width, few, **kw),
        "binary": lambda **kw: BinaryBiasAttention(heads, **kw),
        "differential": lambda **kw: DifferentialAttention(size, values, depth=depth, **kw),
        "gated": lambda **kw: GatedAttention(width, heads, size, kv_heads=few, value_size=values, **kw),
        "multiformer": lambda **kw: MultiformerAttention(
            **({"kinds": ("flc" * heads)[:heads]} | kw), size=size, value_size=values
        ),
    }
    try:
        return makers.get(name, lambda **kw: AttentionModule(name, **kw))(**settings)
    except TypeError as error:
        wrong = str(error).rpartition("argument ")[2]
        raise LocaterError(
            f"{name} has no setting {wrong}" if "unexpected keyword" in str(error) else f"{name}: {error}"
        ) from error
