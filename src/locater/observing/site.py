"""A place where attention is listened to: one attention module, and the sums of what it did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from locater.attention.call import Call
from locater.attention.listeners import Switch
from locater.observing.tally import COLUMNS, MAXIMA, StatisticsOptions, tally, wide

if TYPE_CHECKING:
    from locater.families import AttentionLayer


@dataclass
class Site:
    """One attention module under observation. `heads` are the numbers of those listened to."""

    name: str
    number: int
    kind: str
    module: nn.Module
    group: int  # query heads per key head
    count: int  # query heads
    heads: list[int]
    switch: Switch
    options: StatisticsOptions
    layer: AttentionLayer | None
    sums: Tensor = field(init=False)
    maxima: Tensor = field(init=False)
    pairs: Tensor = field(init=False)
    gram: Tensor | None = field(init=False, default=None)
    picked: Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        with torch.inference_mode(False):  # made there, they could be written to nowhere else
            self._make()

    def _make(self) -> None:
        device = next((p.device for p in self.module.parameters()), torch.device("cpu"))
        count, dtype = len(self.heads), wide(device)
        self.sums = torch.zeros(count, len(COLUMNS), dtype=dtype, device=device)
        self.maxima = torch.full((count, len(MAXIMA)), -torch.inf, dtype=torch.float32, device=device)
        self.pairs = torch.zeros(count, len(self.options.offsets), 2, dtype=dtype, device=device)
        if count < self.count:
            self.picked = torch.tensor(self.heads, device=device)
        if self.options.outputs and self.layer is not None and self.layer.value is not None:
            size = self.layer.value.shape[0] // self.layer.kv_heads
            self.gram = torch.zeros(count, size, size, dtype=dtype, device=device)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Nothing, in a copy of a model or in a saved one."""
        return type(None), ()

    def see(self, call: Call) -> None:
        """Add one call. Traced by torch.compile: an operator and nothing else."""
        options = self.options
        tally(
            call.query, call.key, self.sums, self.maxima, self.pairs, self.gram, call.scale, call.causal, self.kind == "self",
            call.window or 0, call.softcap or 0.0, call.padding, call.documents, call.mask, call.bias, call.alibi, call.sinks,
            call.output, self.picked, call.cut, options.rows, options.rest,
            [offset for offset, _ in options.offsets], [start for _, start in options.offsets], self.switch.lenient,
        )  # fmt: skip


def clear(sites: Sequence[Site]) -> None:
    """Forget what was seen, of all sites together."""
    if not sites:
        return
    maxima = [site.maxima for site in sites]
    added = [held for site in sites for held in (site.sums, site.pairs, site.gram) if held is not None and held.numel()]
    torch._foreach_zero_([*added, *maxima])
    torch._foreach_sub_(maxima, torch.inf)
