"""MLPs of a recorded run as branches that are linear in the stream: plain, gated, and mixtures of experts.

Axes: B sequences, T tokens, d width, f hidden units, r tokens of one expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater.errors import LocaterError
from locater.explain.branches import Expert, Experts, FrozenNorm, Gates
from locater.families.record import Part
from locater.layers import AttentionLayer
from locater.numerics import upcast

if TYPE_CHECKING:
    from locater.explain.freezing import Freezer


def frozen_mlp(freezer: Freezer, layer: AttentionLayer, like: Tensor) -> tuple[Gates | Experts, Tensor | None]:
    """The MLP of a layer's block, and the bias that it adds."""
    recording, block = freezer.recording, freezer.recording.block
    before = freezer.norm(layer, block.before_mlp or (block.before_attention if block.parallel else None))
    experts = recording.find(layer, block.experts)
    if experts is not None:
        parts = list(_routed(freezer, experts, before, like))
        if recording.find(layer, block.shared_up) is not None:
            parts.append(_shared(freezer, layer, before, like))
        return Experts(parts, before, (like.shape[0], like.shape[1])), None
    up, down = _maps(freezer, layer, block.up, block.down)
    ratio, constant, W_up = _ratios(freezer, up, down, before, like)
    W_down, bias = freezer.linear(down, like)
    return Gates(ratio, W_up, W_down, before, constant), bias


def _maps(freezer: Freezer, layer: AttentionLayer, up: Part, down: Part) -> tuple[str, str]:
    paths = freezer.recording.find(layer, up), freezer.recording.find(layer, down)
    if paths[0] is None or paths[1] is None:
        names = " and ".join(shown(part) for part in (up, down) if part) or "known up and down map"
        raise LocaterError(
            f"{freezer.recording.block.path(layer)}: no {names}, so its MLP is not made linear: use mlp='source'"
        )
    return paths[0], paths[1]


def _ratios(
    freezer: Freezer, up: str, down: str, before: FrozenNorm | None, like: Tensor
) -> tuple[Float[Tensor, "B T f"], Float[Tensor, "B T f"], Float[Tensor, "f d"]]:
    """Ratios of value to pre-activation, the hidden units' part that does not come from x, and the map to them."""
    recording = freezer.recording
    W_up, b_up = freezer.linear(up, like)
    z, value = upcast(recording.once(up).output), upcast(recording.once(down).input)
    if recording.block.gate_first:
        z, W_up = z.chunk(2, -1)[1], W_up.chunk(2)[1]
        b_up = None if b_up is None else b_up.chunk(2)[1]
    ratio = torch.where(z == 0, 0.0, value / z)
    # an activation that is not 0 at 0 has no ratio there
    constant = ratio * _pre_activation_constant(W_up, b_up, before) + torch.where(z == 0, value, 0.0)
    return ratio, constant, W_up


def _pre_activation_constant(W_up: Tensor, b_up: Tensor | None, before: FrozenNorm | None) -> Float[Tensor, " f"]:
    constant = W_up.new_zeros(W_up.shape[0]) if b_up is None else b_up
    return constant if before is None or before.shift is None else constant + W_up @ before.shift


def _shared(freezer: Freezer, layer: AttentionLayer, before: FrozenNorm | None, like: Tensor) -> Expert:
    """The expert that every token passes, with weight 1."""
    block = freezer.recording.block
    up, down = _maps(freezer, layer, block.shared_up, block.shared_down)
    ratio, constant, W_up = _ratios(freezer, up, down, before, like)
    W_down, bias = freezer.linear(down, like)
    constant = constant @ W_down.mT if bias is None else constant @ W_down.mT + bias
    tokens = torch.arange(like.shape[0] * like.shape[1], device=like.device)
    return Expert(tokens, ratio.flatten(0, 1), W_up, W_down, constant.flatten(0, 1))


def _routed(freezer: Freezer, path: str, before: FrozenNorm | None, like: Tensor) -> Iterator[Expert]:
    """The experts that tokens were sent to. Their maps are stacked in two tensors, as in transformers 5."""
    module: Any = freezer.recording.weights.submodule(path)
    passage = freezer.recording.passages[path][0]
    chosen = next((x for x in passage.others if not x.is_floating_point()), None)
    share = next((x for x in passage.others if x.is_floating_point()), None)
    stacked: list[Any] = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    if not all(isinstance(x, Tensor) and x.ndim == 3 for x in stacked) or chosen is None or share is None:
        raise LocaterError(
            f"{path}: its experts are not stacked maps gate_up_proj and down_proj, called with the chosen experts and "
            "their weights, so its MLP is not made linear: use mlp='source'"
        )
    if chosen.shape != share.shape:
        raise LocaterError(f"{path}: one weight per chosen expert is expected, so its MLP is not made linear")
    x, share = upcast(passage.input.flatten(0, -2)), share.to(like)
    for number in chosen.unique().tolist():
        if number < stacked[0].shape[0]:  # beyond it: tokens that no expert takes
            tokens, place = torch.where(chosen == number)
            yield _expert(module, number, tokens, share[tokens, place, None], x[tokens].to(like), before)


def _expert(
    module: Any, number: int, tokens: Tensor, share: Tensor, x: Float[Tensor, "r d"], before: FrozenNorm | None
) -> Expert:
    """The gate is frozen: a hidden unit's value is the one that it has at an up of 0, plus a ratio times its up."""
    both, down = (getattr(module, name)[number].detach().to(x) for name in ("gate_up_proj", "down_proj"))
    if getattr(module, "is_transposed", False):
        both, down = both.mT, down.mT
    b_both, b_down = (getattr(module, f"{name}_bias", None) for name in ("gate_up_proj", "down_proj"))
    units = slice(1, None, 2) if not getattr(module, "is_concatenated", True) else slice(both.shape[0] // 2, None)
    b_up = None if b_both is None else b_both[number].detach().to(x)[units]
    pre = x @ both.mT if b_both is None else x @ both.mT + b_both[number].detach().to(x)
    closed = pre.clone()
    closed[:, units] = 0
    value, least = _gated(module, pre), _gated(module, closed)
    ratio = torch.where(pre[:, units] == 0, 0.0, (value - least) / pre[:, units])
    hidden = least + ratio * _pre_activation_constant(both[units], b_up, before)
    constant = hidden @ down.mT if b_down is None else hidden @ down.mT + b_down[number].detach().to(x)
    return Expert(tokens, ratio * share, both[units], down, constant * share)


def _gated(module: Any, gate_up: Tensor) -> Tensor:
    if hasattr(module, "_apply_gate"):
        value: Tensor = module._apply_gate(gate_up)
    else:
        gate, up = gate_up.chunk(2, -1)
        value = module.act_fn(gate) * up
    return value


def shown(part: Part) -> str:
    return part if isinstance(part, str) else " or ".join(part or ())
