"""A place where attention is listened to: one attention module, and the sums of its calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from locater.attention.call import Call
from locater.attention.listeners import Switch, is_measured
from locater.observing.tally import COLUMNS, MAXIMA, Accumulators, StatisticsOptions, tally, wide

if TYPE_CHECKING:
    from locater.families import AttentionLayer


@dataclass
class Site:
    """One attention module under observation. `heads` are the numbers of the query heads that are observed."""

    name: str
    number: int
    kind: str
    module: nn.Module
    group: int  # query heads per key head
    count: int  # query heads
    heads: list[int]
    switch: Switch
    options: StatisticsOptions
    layer: AttentionLayer | None  # None where the module was found by its calls
    output_size: int | None = None  # of a head's output, where no layer tells it
    device: torch.device | None = None  # of the sums, where it is not that of the parameters
    placed: bool = True  # whether keys are tokens in order, so that distances and a first key are known
    totals: Accumulators = field(init=False)
    picked: Tensor | None = field(init=False, default=None)  # `heads` as a tensor, None for all

    def __post_init__(self) -> None:
        with torch.inference_mode(False):  # tensors made in inference mode could be written to nowhere else
            self._make()

    def _make(self) -> None:
        device = self.device or next((p.device for p in self.module.parameters()), torch.device("cpu"))
        count, dtype, gram = len(self.heads), wide(device), None
        if count < self.count:
            self.picked = torch.tensor(self.heads, device=device)
        size = self.output_size
        if self.layer is not None and self.layer.value is not None:
            size = self.layer.value.shape[0] // self.layer.kv_heads
        if self.options.outputs and size is not None:
            gram = torch.zeros(count, size, size, dtype=dtype, device=device)
        self.totals = Accumulators(
            sums=torch.zeros(count, len(COLUMNS), dtype=dtype, device=device),
            maxima=torch.full((count, len(MAXIMA)), -torch.inf, dtype=torch.float32, device=device),
            pairs=torch.zeros(count, len(self.options.offsets), 2, dtype=dtype, device=device),
            gram=gram,
        )

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Nothing, in a copy of a model or in a saved one."""
        return type(None), ()

    @property
    def sums(self) -> Tensor:
        return self.totals.sums

    @property
    def maxima(self) -> Tensor:
        return self.totals.maxima

    @property
    def gram(self) -> Tensor | None:
        return self.totals.gram

    def see(self, call: Call) -> None:
        """Add one call. Traced by torch.compile: an operator and nothing else."""
        if is_measured(self, call):
            own = self.kind == "self" and self.placed
            tally(call, self.totals, self.options, own, self.picked, self.switch.lenient)


def clear(sites: Sequence[Site]) -> None:
    """Set the accumulators of all sites back, in two operations."""
    if not sites:
        return
    maxima = [site.totals.maxima for site in sites]
    added = [x for site in sites for x in site.totals.added() if x.numel()]
    torch._foreach_zero_([*added, *maxima])
    torch._foreach_sub_(maxima, torch.inf)
