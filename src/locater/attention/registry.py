"""Every mechanism by name, with what it declares: `mechanism("sigmoid")(q, k, v, causal=True)`.

A row of `_TABLE` is a mechanism; the tests run over all rows and hold each to what it declares.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from locater.attention import (
    binary,
    centred,
    delta,
    differential,
    doubly_normalized,
    fastmax,
    gated,
    linear,
    multiformer,
    sigmoid,
    sinks,
    softmax,
)
from locater.attention.inputs import Inputs, checked
from locater.attention.qk_norm import qk_norm_attention, qk_norm_map
from locater.attention.softcap import capped_attention, capped_map
from locater.errors import LocaterError
from locater.kernels.terms import Terms

Kind = Literal["stochastic", "sub-stochastic", "non-negative", "signed"]
Causal = Literal["either", "never", "only"]
Cost = Literal["quadratic", "linear"]
Path = Literal["sdpa", "factorised", "chunked", "kernel"]


@dataclass(frozen=True)
class Mechanism:
    """One way to attend, and what it declares.

    `kind` of its map: "stochastic" (weights of at least 0 that sum to 1 in a row), "sub-stochastic" (at most 1),
    "non-negative" (any sum), "signed" (negative weights too: no entropy). `causal`: "either", "never" (refused) or
    "only". `cost`: growth of time with T. `path`: "sdpa" (PyTorch's fused attention), "factorised" (sums of features),
    "chunked" (a recurrence, some tokens at a time), or "kernel" (one of this package on a GPU; elsewhere the map is
    built for some queries at a time). `learned` names the options that a model would learn, or make of its stream.

    >>> m = mechanism("softmax_plus_one")
    >>> m.kind, m.causal, m.cost, m.path
    ('sub-stochastic', 'either', 'quadratic', 'sdpa')
    >>> q = k = v = torch.zeros(1, 2, 3, 4)
    >>> m.map(q, k, causal=True)[0, 0].sum(-1)                   # n / (n + 1) for n equal logits of 0
    tensor([0.5000, 0.6667, 0.7500])
    """

    name: str
    attend: Callable[..., Tensor]  # (Inputs, options) -> (B, H, T, E)
    weights: Callable[..., Tensor]  # (Inputs, options) -> (B, H, T, S), written out: for tests and instruments
    kind: Kind
    formula: str
    causal: Causal = "either"
    cost: Cost = "quadratic"
    path: Path = "sdpa"
    learned: tuple[str, ...] = ()
    reason: str = ""  # why it is not both causal and not
    options: tuple[str, ...] = field(init=False)  # what it takes besides the common arguments
    needs: tuple[str, ...] = field(init=False)  # of these, what has no default

    def __post_init__(self) -> None:
        own = list(inspect.signature(self.attend).parameters.values())[1:]
        object.__setattr__(self, "options", tuple(p.name for p in own))
        object.__setattr__(self, "needs", tuple(p.name for p in own if p.default is inspect.Parameter.empty))

    @property
    def has_parameters(self) -> bool:
        return bool(self.learned)

    @property
    def is_causal_safe(self) -> bool:
        return self.causal != "never"

    @property
    def is_fused(self) -> bool:
        """Whether it runs on PyTorch's fused attention."""
        return self.path == "sdpa"

    def __call__(
        self,
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B K S D"],
        v: Float[Tensor, "B K S E"],
        *,
        causal: bool = False,
        mask: Bool[Tensor, "*any"] | None = None,
        padding: Bool[Tensor, "B S"] | None = None,
        query_padding: Bool[Tensor, "B T"] | None = None,
        scale: float | None = None,
        **options: Any,
    ) -> Float[Tensor, "B H T E"]:
        """What it makes of q, k and v. Query head h uses key head h // (H / K); queries are the last T of S positions.

        `mask` is True where a query may look, with axes that fit (B, H, T, S) or are 1; `padding` is True for keys that
        are tokens, `query_padding` for queries, which matters where something is summed over queries (that of keys
        where T = S and it is not given). A row that sees no key is zero. `scale` multiplies q.k, 1 / sqrt(D) unless the
        mechanism has its own.
        """
        x = checked(q, k, v, Terms(scale, causal, mask=mask, padding=padding), query_padding)
        self._check(x, options)
        return self.attend(x, **options)

    def map(
        self,
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B K S D"],
        *,
        causal: bool = False,
        mask: Bool[Tensor, "*any"] | None = None,
        padding: Bool[Tensor, "B S"] | None = None,
        query_padding: Bool[Tensor, "B T"] | None = None,
        scale: float | None = None,
        **options: Any,
    ) -> Float[Tensor, "B H T S"]:
        """Its T x S matrices written out, whatever that costs: `map @ v` is the output."""
        x = checked(q, k, k, Terms(scale, causal, mask=mask, padding=padding), query_padding)
        self._check(x, options)
        return self.weights(x, **options)

    def _check(self, x: Inputs, options: dict[str, Any]) -> None:
        wrong, missing = [n for n in options if n not in self.options], [n for n in self.needs if n not in options]
        if wrong:
            raise LocaterError(f"{self.name} has no option {wrong[0]!r}; it takes {', '.join(self.options) or 'none'}")
        if missing:
            raise LocaterError(f"{self.name} needs {', '.join(missing)}: {self.formula}")
        if self.causal == "never" and (x.causal or _looks_back_only(x)):
            raise LocaterError(f"{self.name} cannot be causal: {self.reason}")
        if self.causal == "only" and not x.causal:
            raise LocaterError(f"{self.name} is causal only: {self.reason}; causal=True")
        if self.cost == "linear" and x.has_row_mask:
            raise LocaterError(
                f"{self.name}: a mask with a row per query is T x S, which it never builds; padding (B, S), one row, or causal=True"
            )


def _looks_back_only(x: Inputs) -> bool:
    """Whether a mask is causal in all but name."""
    if x.mask is None or not x.has_row_mask or x.T != x.S or torch.compiler.is_compiling():
        return False
    return not bool(x.mask.triu(1).any())


_OVER_QUERIES = "it normalises over queries first, later ones included; for encoders and cross-attention"
_RECURRENT = "it is a recurrence over tokens"
_CONVOLVES = "a convolution over tokens joins each with later ones; for encoders"
_TABLE = (
    Mechanism("softmax", softmax.softmax_attention, softmax.softmax_map, "stochastic", "softmax(s q k^T) v"),
    Mechanism("softcap", capped_attention, capped_map, "stochastic", "softmax(c tanh(s q k^T / c)) v", path="kernel"),
    Mechanism(
        "qk_norm", qk_norm_attention, qk_norm_map, "stochastic", "softmax(s g_q g_k (q/rms q) (k/rms k)^T) v",
        learned=("query_gain", "key_gain"),
    ),
    Mechanism("sigmoid", sigmoid.sigmoid_attention, sigmoid.sigmoid_map, "non-negative", "sigmoid(s q k^T - ln n) v", path="kernel"),
    Mechanism(
        "softmax_plus_one", sinks.softmax_plus_one_attention, sinks.softmax_plus_one_map, "sub-stochastic",
        "exp(x_j) / (1 + sum exp(x)), x = s q k^T",
    ),
    Mechanism(
        "learned_sink", sinks.learned_sink_attention, sinks.learned_sink_map, "sub-stochastic",
        "exp(x_j) / (exp(sinks_h) + sum exp(x)), x = s q k^T", learned=("sinks",),
    ),
    Mechanism("centred", centred.centred_attention, centred.centred_map, "signed", "softmax(s q k^T) v - mean of v in view"),
    Mechanism(
        "doubly_normalized", doubly_normalized.doubly_normalized_attention, doubly_normalized.doubly_normalized_map, "stochastic",
        "softmax(E - log sum_i exp(E_i)) v, E = s q k^T", causal="never", reason=_OVER_QUERIES,
    ),
    Mechanism(
        "hybrid_normalized", doubly_normalized.hybrid_normalized_attention, doubly_normalized.hybrid_normalized_map, "stochastic",
        "mix doubly_normalized + (1 - mix) softmax", causal="never", learned=("mix",), reason=_OVER_QUERIES,
    ),
    Mechanism(
        "fastmax", fastmax.fastmax_attention, fastmax.fastmax_map, "stochastic",
        "f(x_j) / sum f(x), f = 1 + x (+ x^2/2), x = s (q/|q|) (k/|k|)^T", cost="linear", path="factorised",
    ),
    Mechanism(
        "linear", linear.linear_attention, linear.linear_map, "stochastic",
        "f_j / sum f, f = phi(s q) phi(k)^T, phi = elu + 1", cost="linear", path="factorised",
    ),
    Mechanism(
        "delta", delta.delta_attention, delta.delta_map, "signed",
        "s M^T q, M += beta k (v - M^T k)^T", causal="only", cost="linear", path="chunked",
        learned=("beta",), reason=_RECURRENT,
    ),
    Mechanism(
        "gated_delta", delta.gated_delta_attention, delta.gated_delta_map, "signed",
        "s M^T q, M = a M, M += beta k (v - M^T k)^T, a = exp(log_decay)", causal="only", cost="linear", path="chunked",
        learned=("beta", "log_decay"), reason=_RECURRENT,
    ),
    Mechanism(
        "binary", binary.binary_attention, binary.binary_map, "stochastic",
        "softmax(s mu_q mu_k sign(q) sign(k)^T + bias) v", learned=("bias",),
    ),
    Mechanism(
        "differential", differential.differential_attention, differential.differential_map, "signed",
        "(softmax(s q1 k1^T) - lam softmax(s q2 k2^T)) v", learned=("lam",),
    ),
    Mechanism(
        "gated", gated.gated_attention, gated.gated_map, "sub-stochastic",
        "g softmax(s (g_q q) (g_k k)^T) (g_v v), gates in (0, 1)", learned=("gate", "value_gate", "key_gate", "query_gate"),
    ),
    Mechanism(
        "multiformer", multiformer.multiformer_attention, multiformer.multiformer_map, "signed",
        "softmax(s q k^T) v per head: of all keys, of those in a window, or of k and v convolved", causal="never",
        learned=("key_kernel", "value_kernel", "key_bias", "value_bias"), reason=_CONVOLVES,
    ),
)  # fmt: skip
_MECHANISMS = {row.name: row for row in _TABLE}


def mechanism(name: str) -> Mechanism:
    """The mechanism called `name`.

    >>> mechanism("linear").cost
    'linear'
    """
    if name not in _MECHANISMS:
        raise LocaterError(f"no attention mechanism {name!r}; there are {', '.join(_MECHANISMS)}")
    return _MECHANISMS[name]


def mechanisms() -> tuple[Mechanism, ...]:
    """All of them.

    >>> [m.name for m in mechanisms() if m.kind == "signed"]
    ['centred', 'delta', 'gated_delta', 'differential', 'multiformer']
    """
    return tuple(_MECHANISMS.values())


def register_mechanism(new: Mechanism) -> None:
    """One more, under a name that is free; the tests of the registry take it up with the others."""
    if new.name in _MECHANISMS:
        raise LocaterError(f"there is an attention mechanism {new.name!r} already; another name")
    _MECHANISMS[new.name] = new
