"""What one attention mechanism declares, and how it is called: `mechanism("sigmoid")(q, k, v, causal=True)`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from locater.brief import brief
from locater.errors import LocaterError
from locater.kernels.terms import Terms
from locater_lab.mechanisms.inputs import Inputs, check_inputs

Kind = Literal["stochastic", "sub-stochastic", "non-negative", "signed"]
Causal = Literal["either", "never", "only"]
Cost = Literal["quadratic", "linear"]
Path = Literal["sdpa", "factorised", "chunked", "kernel"]


@dataclass(frozen=True)
class Mechanism:
    """One attention mechanism, and what it declares.

    - `kind`, of its attention map: "stochastic" (weights of at least 0, each row sums to 1), "sub-stochastic" (each row
      sums to at most 1), "non-negative" (any sum), or "signed" (negative weights too, so rows have no entropy).
    - `causal`: "either", "never" (causal calls are refused) or "only".
    - `cost`: how time grows with the number of tokens.
    - `path`: "sdpa" (PyTorch's fused attention), "factorised" (sums of features), "chunked" (a recurrence over blocks
      of tokens), or "kernel" (a Triton kernel of this package on a GPU; elsewhere the map is built block by block).
    - `learned`: the options that a model learns, or computes from its hidden states.

    >>> from locater_lab.mechanisms import mechanism
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
    reason: str = ""  # why `causal` is "never" or "only"
    options: tuple[str, ...] = field(init=False)  # what it takes besides the common arguments
    needs: tuple[str, ...] = field(init=False)  # the options without a default

    __repr__ = brief

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
        """The attention output. Query head h uses key head h // (H / K); queries are the last T of S positions.

        `mask` is True where a query may look, and broadcasts to (B, H, T, S). `padding` is True for keys that are
        tokens. `query_padding` is True for queries that are tokens, and matters where the mechanism sums over queries;
        its default is `padding` where T = S. A row that sees no key is zero. `scale` multiplies q.k: 1 / sqrt(D) unless
        the mechanism has its own.
        """
        x = check_inputs(q, k, v, Terms(scale, causal, mask=mask, padding=padding), query_padding)
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
        """The attention map, T x S, written out at whatever cost: `map @ v` is the output."""
        x = check_inputs(q, k, k, Terms(scale, causal, mask=mask, padding=padding), query_padding)
        self._check(x, options)
        return self.weights(x, **options)

    def _check(self, x: Inputs, options: dict[str, Any]) -> None:
        unknown = [name for name in options if name not in self.options]
        missing = [name for name in self.needs if name not in options]
        if unknown:
            known = ", ".join(self.options) or "none"
            raise LocaterError(f"{self.name} has no option {unknown[0]!r}; it takes {known}")
        if missing:
            raise LocaterError(f"{self.name} needs {', '.join(missing)}: {self.formula}")
        if self.causal == "never" and (x.causal or _looks_back_only(x)):
            raise LocaterError(f"{self.name} cannot be causal: {self.reason}")
        if self.causal == "only" and not x.causal:
            raise LocaterError(f"{self.name} is causal only: {self.reason}; causal=True")
        if self.cost == "linear" and x.has_row_mask:
            raise LocaterError(
                f"{self.name}: a mask with a row per query is T x S, which it never builds; "
                "padding (B, S), one row, or causal=True"
            )


def _looks_back_only(x: Inputs) -> bool:
    """Whether a mask hides every later key, as causal=True would."""
    if x.mask is None or not x.has_row_mask or x.T != x.S or torch.compiler.is_dynamo_compiling():
        return False
    return not bool(x.mask.triu(1).any())
