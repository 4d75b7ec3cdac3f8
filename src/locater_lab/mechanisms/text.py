"""Attention in words, as `locater train --attention` takes it: a mechanism with its settings, or a stack of several.

`sigmoid`, `gated(per=element, position=value)`, `fastmax(order=1)`; `hybrid(layout=3:1, linear=gated_delta)` gives
layers their own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch

from locater.errors import LocaterError, first_line
from locater.options import parse_call
from locater_lab.mechanisms.hybrid import hybrid
from locater_lab.mechanisms.mechanism_record import Mechanism
from locater_lab.mechanisms.modules import AttentionModule, attention_module
from locater_lab.mechanisms.registry import mechanism, mechanisms

STACK = "hybrid"
SIZES = ("width", "heads", "size", "kv_heads", "value_size", "depth")  # the model's to give


@dataclass(frozen=True)
class Named:
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
                    self._call(module, tokens if grid and tokens is not None else 8, **sizes)
        except (TypeError, ValueError, RuntimeError) as error:
            values = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
            raise LocaterError(f"{self.name}: a value that cannot be among {values} ({first_line(error)})") from None

    def _call(self, module: AttentionModule, tokens: int, *, width: int, heads: int, size: int, kv_heads: int) -> None:
        q, k = torch.zeros(1, heads, tokens, size), torch.zeros(1, kv_heads, tokens, size)
        module(q, k, k, torch.zeros(1, tokens, width), causal=self.mechanism.causal != "never")


def parse_attention(text: str, layers: int) -> tuple[Named, ...]:
    """What each of so many layers attends by.

    >>> parse_attention("gated(per=element)", 2)[1]
    Named(name='gated', settings={'per': 'element'})
    >>> [layer.name for layer in parse_attention("hybrid(layout=2:1, linear=delta)", 3)]
    ['delta', 'delta', 'softmax']
    """
    name, options = parse_call(re.sub(r"=\s*(\d+:\d+)", r"='\1'", text), "attention")
    if name != STACK:
        wrong = [option for option in options if option in SIZES]
        if wrong:
            raise LocaterError(f"{name} has no setting {wrong[0]!r}: the model's sizes are those of its layers")
        return (Named(_known(name), options),) * layers
    wrong = [option for option in options if option not in ("layout", "full", "linear")]
    if wrong or not isinstance(options.get("layout"), str):
        raise LocaterError(
            f"attention {text!r}: {STACK}(layout=3:1, full=softmax, linear=gated_delta); layout may be letters, S and L"
        )
    return tuple(Named(name) for name in hybrid(options.pop("layout"), layers, **options).names)


def _known(name: str) -> str:
    names = [m.name for m in mechanisms()]
    if name not in names:
        raise LocaterError(
            f"no attention mechanism {name!r}; there are {', '.join(names)}, and {STACK}(layout=...) of several"
        )
    return name
