"""Which layer of a stack attends by which mechanism, and attention in words, as `locater train --attention` takes it.

`sigmoid`, `gated(per=element, position=value)`, `fastmax(order=1)` are one mechanism with its settings for all layers.
Hybrid stacks have few layers of full attention among many of linear cost: `hybrid("3:1", 12)`, or in words
`hybrid(layout=3:1, linear=gated_delta)`, is three linear layers, then one full, and again (Qwen3-Next and Kimi Linear:
layer i is full where (i + 1) % 4 == 0; MiniMax-01: "7:1"). `hybrid("SLLS")` writes layers out, S for full (softmax) and
L for linear; "SLL..." repeats. Of what L + 1 full layers can do, composing L functions, L - 1 full layers among very
many linear ones cannot (Ye et al. 2026).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from locater.errors import LocaterError, first_line
from locater.options import parse_call
from locater_lab.mechanisms.mechanism_record import Causal, Cost, Mechanism
from locater_lab.mechanisms.modules import AttentionModule, attention_module
from locater_lab.mechanisms.registry import mechanism, mechanisms


@dataclass(frozen=True)
class HybridLayout:
    """Names of mechanisms, layer by layer, and what follows for the stack."""

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.names:
            raise LocaterError("a layout of no layers")
        kinds = {m.causal: m.name for m in self.mechanisms}
        if "only" in kinds and "never" in kinds:
            raise LocaterError(f"{kinds['only']} is causal only and {kinds['never']} never: no stack can have both")

    @property
    def mechanisms(self) -> tuple[Mechanism, ...]:
        return tuple(mechanism(name) for name in self.names)

    @property
    def causal(self) -> Causal:
        kinds = {m.causal for m in self.mechanisms} - {"either"}
        return next(iter(kinds), "either")

    @property
    def cost(self) -> Cost:
        """Of the dearest layer."""
        return "quadratic" if any(m.cost == "quadratic" for m in self.mechanisms) else "linear"

    @property
    def counts(self) -> dict[str, int]:
        """Layers of each mechanism."""
        return dict(Counter(self.names))

    def modules(self, settings: dict[str, dict[str, Any]] | None = None, **sizes: Any) -> nn.ModuleList:
        """A module per layer (`attention_module`) with its depth; `settings` by name of mechanism.

        >>> stack = hybrid("LS", linear="delta").modules(width=16, heads=4, size=4)
        >>> [layer.name for layer in stack]
        ['delta', 'softmax']
        """
        own = settings or {}
        return nn.ModuleList(
            attention_module(name, depth=i, **sizes, **own.get(name, {})) for i, name in enumerate(self.names)
        )


def hybrid(
    layout: str | Sequence[str], layers: int | None = None, *, full: str = "softmax", linear: str = "gated_delta"
) -> HybridLayout:
    """The layout of a stack: letters S and L, a ratio "linear:full", or names of mechanisms.

    Letters with "..." behind them repeat, the last time perhaps in part; so does a ratio, which begins with its linear
    layers.

    >>> hybrid("SLLS").names
    ('softmax', 'gated_delta', 'gated_delta', 'softmax')
    >>> hybrid("3:1", 48).counts                                            # Qwen3-Next, but for its gates
    {'gated_delta': 36, 'softmax': 12}
    >>> hybrid("SL...", 3, linear="linear").names
    ('softmax', 'linear', 'softmax')
    """
    if not isinstance(layout, str):
        return HybridLayout(_repeat_to_length(tuple(layout), layers, False))
    ratio = re.fullmatch(r"(\d+):(\d+)", layout)
    letters = "L" * int(ratio[1]) + "S" * int(ratio[2]) if ratio else layout.removesuffix("...")
    if not letters or set(letters) - set("SL"):
        raise LocaterError(
            f"layout={layout!r}: letters S (full) and L (linear), with ... to repeat them, "
            "or a ratio linear:full such as 3:1"
        )
    if mechanism(full).cost == "linear":
        raise LocaterError(
            f"full={full!r} has linear cost: a layer of full attention sees all tokens, such as softmax or gated"
        )
    if mechanism(linear).cost != "linear":
        raise LocaterError(f"linear={linear!r} has quadratic cost; linear, fastmax, delta or gated_delta")
    names = tuple(full if letter == "S" else linear for letter in letters)
    return HybridLayout(_repeat_to_length(names, layers, ratio is not None or layout.endswith("...")))


def _repeat_to_length(names: tuple[str, ...], layers: int | None, repeats: bool) -> tuple[str, ...]:
    if layers is None and repeats:
        raise LocaterError("a ratio, and letters that repeat, need layers: how many there are")
    if layers is None:
        return names
    if layers < 1:
        raise LocaterError(f"layers={layers}: at least 1")
    if not repeats and len(names) != layers:
        raise LocaterError(f"the layout has {len(names)} layers, not {layers}; with ... behind it letters repeat")
    return (names * -(-layers // len(names)))[:layers]


# ---- Attention in words ----


STACK = "hybrid"
SIZES = ("width", "heads", "size", "kv_heads", "value_size", "depth")  # the model's to give


@dataclass(frozen=True)
class LayerAttention:
    """A mechanism by name, and the settings of its module."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def mechanism(self) -> Mechanism:
        return mechanism(self.name)

    @property
    def is_bare(self) -> bool:
        """Whether it is the mechanism as it stands: nothing to learn, nothing set."""
        return not (self.settings or self.mechanism.has_parameters or self.mechanism.needs)

    def module(self, **sizes: Any) -> AttentionModule:
        """Its module; `sizes` as for `attention_module`."""
        return attention_module(self.name, **sizes, **self.settings)

    def check(self, tokens: int | None = None, **sizes: Any) -> None:
        """Raise where a setting does not exist or has an impossible value; some show only when the module is called.

        A grid has as many tokens as its image: it is checked where `tokens`, the length of a sequence, is not None.
        """
        grid = "grid" in self.settings
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                module = self.module(**sizes)
                if self.settings and not (grid and tokens is None):
                    self._try_call(module, tokens if grid and tokens is not None else 8, **sizes)
        except (TypeError, ValueError, RuntimeError) as error:
            values = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
            raise LocaterError(f"{self.name}: a value that cannot be among {values} ({first_line(error)})") from None

    def _try_call(
        self, module: AttentionModule, tokens: int, *, width: int, heads: int, size: int, kv_heads: int
    ) -> None:
        q, k = torch.zeros(1, heads, tokens, size), torch.zeros(1, kv_heads, tokens, size)
        module(q, k, k, torch.zeros(1, tokens, width), causal=self.mechanism.causal != "never")


def parse_attention(text: str, layers: int) -> tuple[LayerAttention, ...]:
    """What each of so many layers attends by.

    >>> parse_attention("gated(per=element)", 2)[1]
    LayerAttention(name='gated', settings={'per': 'element'})
    >>> [layer.name for layer in parse_attention("hybrid(layout=2:1, linear=delta)", 3)]
    ['delta', 'delta', 'softmax']
    """
    name, options = parse_call(re.sub(r"=\s*(\d+:\d+)", r"='\1'", text), "attention")
    if name != STACK:
        wrong = [option for option in options if option in SIZES]
        if wrong:
            raise LocaterError(f"{name} has no setting {wrong[0]!r}: the model's sizes are those of its layers")
        return (LayerAttention(_known_name(name), options),) * layers
    wrong = [option for option in options if option not in ("layout", "full", "linear")]
    if wrong or not isinstance(options.get("layout"), str):
        raise LocaterError(
            f"attention {text!r}: {STACK}(layout=3:1, full=softmax, linear=gated_delta); layout may be letters, S and L"
        )
    return tuple(LayerAttention(name) for name in hybrid(options.pop("layout"), layers, **options).names)


def _known_name(name: str) -> str:
    names = [m.name for m in mechanisms()]
    if name not in names:
        raise LocaterError(
            f"no attention mechanism {name!r}; there are {', '.join(names)}, and {STACK}(layout=...) of several"
        )
    return name
