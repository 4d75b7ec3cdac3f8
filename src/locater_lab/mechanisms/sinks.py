"""Softmax that may look away: a key of zero value takes weight, so that a row sums to less than 1.

softmax_plus_one (its sink has logit 0): p_j = exp(x_j) / (1 + sum_j' exp(x_j')). learned_sink (gpt-oss): the 1 is
exp(s_h), one number per query head, not multiplied by the scale. No mask covers the sink.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from locater.errors import LocaterError
from locater_lab.mechanisms.inputs import Inputs, widen
from locater_lab.mechanisms.softmax import fused, logits, normalized, with_channels


def softmax_plus_one_attention(x: Inputs) -> Tensor:
    """One zero key in front of the others, with a zero value: its logit is 0 for every query."""
    return fused(_with_zero_key(x), x.usual_scale)


def softmax_plus_one_map(x: Inputs) -> Tensor:
    return normalized(x, logits(x, x.usual_scale), x.q.new_zeros(x.heads))


def learned_sink_attention(x: Inputs, *, sinks: Tensor) -> Tensor:
    """`sinks` (H,) are logits: they come as one more channel of the queries, which only the sink's key has too.

    >>> from locater_lab.mechanisms import mechanism
    >>> q = k = v = torch.ones(1, 2, 3, 4)
    >>> sinks = torch.tensor([-100.0, 100.0])                               # nothing taken, everything taken
    >>> mechanism("learned_sink")(q, k, v, sinks=sinks)[0, :, 0, 0].round()
    tensor([1., 0.])
    """
    _check(x, sinks)
    on_sink = functional.pad(x.k.new_ones(1, 1, 1, 1), (0, 0, 0, x.S))  # 1, 0, 0, ...
    of_queries = widen(sinks)[None, :, None, None] / x.usual_scale
    return fused(with_channels(_with_zero_key(x), of_queries, on_sink), x.usual_scale)


def learned_sink_map(x: Inputs, *, sinks: Tensor) -> Tensor:
    _check(x, sinks)
    return normalized(x, logits(x, x.usual_scale), sinks)


def _with_zero_key(x: Inputs) -> Inputs:
    """One more key and value at the front, zero and always seen."""
    mask, padding = (None if y is None else functional.pad(y, (1, 0), value=True) for y in (x.mask, x.padding))
    k, v = (functional.pad(y, (0, 0, 1, 0)) for y in (x.k, x.v))
    return replace(x.with_terms(mask=mask, padding=padding), k=k, v=v)


def _check(x: Inputs, sinks: Tensor) -> None:
    if not isinstance(sinks, torch.Tensor) or tuple(sinks.shape) != (x.heads,):
        shape = list(sinks.shape) if isinstance(sinks, torch.Tensor) else sinks
        raise LocaterError(f"sinks={shape}: a tensor of one logit per query head [{x.heads}]")
