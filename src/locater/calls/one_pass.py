"""The output of a model's attention and its statistics from one kernel, in place of the model's own attention.

For `observe(model, fused=True)`: the kernel's output differs from that of the model's own by rounding. Where the kernel
does not take a call (masks, dropout, mechanisms, full precision: see `locater.kernels.fused.is_fused`), nothing is
replaced.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from locater.calls.call import Call, from_interface
from locater.calls.listeners import Listener, described
from locater.kernels.fused import attend_with_numbers, is_fused


def in_one_pass(
    site: Listener, module: nn.Module, name: str, tensors: tuple[Tensor, Tensor, Tensor], mask: Any, kw: dict[str, Any]
) -> tuple[Tensor, Call] | None:
    """Output (B, T, H, V) and the call with its statistics; None where the model's own attention has to run."""
    query, key, value = tensors
    if torch.compiler.is_dynamo_compiling():  # what the kernel takes is asked of the device
        return None
    if kw.get("mechanism") is not None or kw.get("output_attentions") or (kw.get("dropout") and module.training):
        return None
    if not query.ndim == key.ndim == value.ndim == 4:
        return None
    call = described((site,), from_interface, module, name, query, key, mask, kw, query)
    if call is None or call.cut is not None or call.key.shape != key.shape or call.query.shape != query.shape:
        return None
    if not is_fused(query, key, value, call.terms):
        return None
    out, numbers = attend_with_numbers(query, key, value, call.terms)
    output = out.transpose(1, 2)
    return output, replace(call, output=output.detach(), statistics=numbers)
