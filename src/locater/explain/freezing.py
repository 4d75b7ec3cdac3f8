"""`decompose()`: a recorded run, frozen: each attention layer and each MLP as a step that is linear in the stream.

Axes: B sequences, T queries, S keys, d width, H heads, K value heads, h head size, f hidden units.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locater.calls.call_and_masks import Call
from locater.errors import LocaterError
from locater.explain.linear_steps import Expert, ExpertMixture, FrozenLatent, FrozenNorm, GatedMlp, HeadBranch, Step
from locater.explain.path_sums import Paths
from locater.explain.recorded_run import BlockRecord, Inputs, Run, as_run
from locater.families.record import Part
from locater.layers import AttentionLayer
from locater.layers.build import norm, optional
from locater.layers.layer import Projection
from locater.layers.projection_with_norm import JoinedProjection, NormedProjection
from locater.numerics import upcast
from locater.observing.attention_maps import attention_maps
from locater.torch_private import apply_expert_gate

Mlp = Literal["source", "linear"]
EPS_NAMES = ("eps", "variance_epsilon", "epsilon")


def decompose(
    model: nn.Module | Run, batch: Inputs | None = None, *, mlp: Mlp = "source", final_norm: bool = True
) -> Paths:
    """Run `model` once on `batch` (keywords, or its first argument) and freeze it into paths.

    `mlp` is "source" or "linear" (`locater.explain.path_sums`). The output is the stream after the final norm, whose
    denominators are frozen too, or before it with `final_norm=False`. It works for every family whose record says where
    the parts of a block are (docs/explain.md lists them). Everything is computed in the model's precision, float32 at
    least. transformers computes the RMSNorms of most models, and the eager softmax of some, in float32 whatever the
    model's precision, which shows in `gap`.

    >>> from locater_lab.train import Shape, Transformer
    >>> _ = torch.manual_seed(0)
    >>> model = Transformer(Shape(vocabulary=64, layers=3, width=32, heads=4, kv_heads=2, hidden=48), scale=0.2)
    >>> paths = decompose(model, torch.arange(10)[None])
    >>> by_length = paths.by_length()                          # 5^3 = 125 paths, by length 0 to 3
    >>> torch.allclose(by_length.total.sum(0), paths.output, atol=1e-5)
    True
    >>> [paths.count(k) for k in range(4)], tuple(paths.contribution((2, None, 0)).shape)
    ([1, 12, 48, 64], (1, 10, 32))
    >>> torch.allclose(paths.sum_of([(None, None, None)]), by_length.input[0], atol=1e-5)
    True
    >>> paths.through_heads().norm.shape
    torch.Size([3, 4])
    """
    check_mlp(mlp)
    return frozen_paths(as_run(model, batch, blocks=True), mlp, final_norm)


def check_mlp(mlp: str) -> None:
    if mlp not in ("source", "linear"):
        raise LocaterError(f"mlp={mlp!r} is not known: use 'source' or 'linear'")


@torch.no_grad()
def frozen_paths(run: Run, mlp: Mlp, final_norm: bool = True) -> Paths:
    """A recorded run, frozen; refused where its paths do not sum to its output."""
    paths = Freezer(run.blocks, mlp).paths(final_norm, run.keywords.get("attention_mask"))
    _check_sum(paths, next(run.model.parameters()).dtype)
    return paths


def _check_sum(paths: Paths, dtype: torch.dtype) -> None:
    """Refuse a sum that is not the output: then the model has parts that its family does not describe."""
    most = tolerance(dtype)
    if not paths.gap <= most:
        raise LocaterError(
            f"{paths.name}: its paths sum to its output only within {paths.gap:.1e} (expected {most:.0e}): "
            + (
                "torch.autocast rounds what it computes: leave its block"
                if torch.is_autocast_enabled(paths.output.device.type)
                else "it has parts that its model_type does not have, or its output is not finite"
            )
        )


def tolerance(dtype: torch.dtype) -> float:
    """How far a sum may be from the output of a model in this precision, relative to it."""
    return max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) ** 0.5


@dataclass(frozen=True)
class Freezer:
    """Makes `Paths` of a recorded run."""

    record: BlockRecord
    mlp: Mlp

    def paths(self, final_norm: bool, mask: Tensor | None) -> Paths:
        record = self.record
        steps: list[Step] = []
        for turn, layer, call in record.in_call_order():
            steps += replace(self, record=turn)._steps(layer, call)
        start, output = record.ends()
        x = upcast(start)
        final = record.final()
        if final is not None and final_norm:
            steps.append(Step(final, after=self.norm_at(final)))
            output = record.only_call(final).output
        real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        if mask is not None and mask.shape == real.shape:
            real = mask.to(x.device).bool()
        return Paths(record.weights.where, x, upcast(output), real, steps)

    def _steps(self, layer: AttentionLayer, call: Call) -> list[Step]:
        """Attention, then the MLP; of a parallel block one step, where its MLP is a branch."""
        attention, mlp = self._attention(layer, call), self._mlp(layer)
        if not self.record.block.parallel or not mlp or not isinstance(mlp[0].branches, GatedMlp | ExpertMixture):
            return [attention, *mlp]  # an observed output is a constant: it may be added in a step of its own
        if attention.out is not None or mlp[0].out is not None:
            raise LocaterError(f"{layer.name}: parallel blocks with layer scale are not decomposed with mlp='linear'")
        biases = [bias for bias in (attention.bias, mlp[0].bias) if bias is not None]
        bias = sum(biases[1:], biases[0]) if biases else None
        return [replace(attention, bias=bias, beside=mlp[0].branches)]

    def _attention(self, layer: AttentionLayer, call: Call) -> Step:
        if layer.head_value_norm is not None or layer.mixed_norm is not None or layer.gate is not None:
            raise LocaterError(f"{layer.name}: a norm or a gate acts on its values, which is not frozen")
        if layer.value is None or layer.out is None:
            raise LocaterError(f"{layer.name}: its family does not read values and outputs, so it has no paths")
        block, maps = self.record.block, attention_maps(call)
        before: FrozenNorm | FrozenLatent | None = self.norm(layer, block.before_attention)
        read = layer.value
        if isinstance(read, JoinedProjection):
            raise LocaterError(f"{layer.name}: its values are rows of several maps, which have no paths here")
        if isinstance(layer.value, NormedProjection):
            before, read = self._latent(layer, layer.value)
        value = read.weight().detach().to(maps).unflatten(0, (layer.kv_heads, -1))
        constant = value.new_zeros(value.shape[:2])
        if read.bias is not None:
            constant = constant + read.bias.detach().to(maps).view_as(constant)
        if before is not None and before.shift is not None:
            constant = constant + torch.einsum("khd,...d->...kh", value, before.shift)
        out = layer.out.weight().detach().to(maps).mT.unflatten(0, (layer.heads, -1))
        return Step(
            layer.name,
            HeadBranch(maps, value, out, before, constant),
            1,
            _like(layer.out.bias, maps),
            after=self.norm(layer, block.after_attention),
            out=self._with_scale(self.norm(layer, block.attention_out), None, maps),
        )

    def _latent(self, layer: AttentionLayer, value: NormedProjection) -> tuple[FrozenLatent, Projection]:
        """What the values of DeepSeek read, frozen; and the map that reads it."""
        path = self.record.modules(layer).find(self.record.block.before_attention)
        if value.up is None or value.shared is not None or value.blocks != 1 or path is None:
            raise LocaterError(f"{layer.name}: its values pass a norm head by head, which is not frozen")
        before, x = self.norm_at(path), upcast(self.record.only_call(path).input)
        down = value.down.weight().detach().to(x)
        constant = x.new_zeros(down.shape[0])
        if value.down.bias is not None:
            constant = constant + value.down.bias.detach().to(x)
        if before.shift is not None:
            constant = constant + down @ before.shift
        z = before(x) @ down.mT + constant
        centred = z - z.mean(-1, keepdim=True) if value.inner.kind == "layer" else z
        factor = torch.rsqrt(centred.square().mean(-1, keepdim=True) + value.inner.eps)
        inner = FrozenNorm(factor, _like(value.inner.gain, x), _like(value.inner.bias, x), value.inner.kind == "layer")
        shift = inner(constant.expand_as(z)) if constant.any() else None
        if inner.shift is not None:
            shift = inner.shift if shift is None else shift + inner.shift
        return FrozenLatent(before, down, inner, shift), value.up

    def _mlp(self, layer: AttentionLayer) -> list[Step]:
        """No step where the MLP was taken out and left no norm, one otherwise."""
        record, block = self.record, self.record.block
        name = record.find(layer, block.mlp or block.down)
        after = self.norm(layer, block.after_mlp) if record.find(layer, block.after_mlp) else None
        if name is None:
            return [] if after is None else [Step(block.path(layer), after=after)]
        output = upcast(record.only_call(name).output)
        scale = self._mlp_scale(layer, output)
        if self.mlp == "source" or not output.any():
            behind = record.find(layer, block.mlp_out)
            added = output if behind is None else upcast(record.only_call(behind).output)
            scaling = self._with_scale(None, scale, output)
            return [Step(name, observed=added if scaling is None else scaling(added), after=after)]
        branch, bias = frozen_mlp(self, layer, output)
        out = self._with_scale(self.norm(layer, block.mlp_out), scale, output)
        return [Step(name, branch, 0, bias, after=after, out=out)]

    def norm(self, layer: AttentionLayer, part: Part) -> FrozenNorm | None:
        if not part:
            return None
        path = self.record.modules(layer).find(part)
        if path is None:
            raise LocaterError(f"{self.record.block.path(layer)}: no norm {shown(part)}, which its family names")
        return self.norm_at(path)

    def norm_at(self, path: str) -> FrozenNorm:
        """The norm at `path`, with the denominators of the run."""
        block, weights = self.record.block, self.record.weights
        x = upcast(self.record.only_call(path).input)
        affine = f"{path}.weight" in weights.names()
        read = norm(weights, path, block.norm, _eps(weights.submodule(path), path, x), block.gain_offset, affine)
        centred = x - x.mean(-1, keepdim=True) if read.kind == "layer" else x
        factor = torch.rsqrt(centred.square().mean(-1, keepdim=True) + read.eps)  # (B, T, 1)
        return FrozenNorm(factor, _like(read.gain, x), _like(read.bias, x), read.kind == "layer")

    def _with_scale(self, norm: FrozenNorm | None, scale: Tensor | None, like: Tensor) -> FrozenNorm | None:
        """A norm, or none, followed by the block's multiplier and by layer scale."""
        multiplier = self.record.block.multiplier
        if multiplier == 1 and scale is None:
            return norm
        factors = [like.new_tensor(multiplier) if scale is None else multiplier * scale]
        if norm is None:
            return FrozenNorm(like.new_ones(()), factors[0], None, False)
        gain = factors[0] if norm.gain is None else norm.gain * factors[0]
        return replace(norm, gain=gain, shift=None if norm.shift is None else norm.shift * factors[0])

    def _mlp_scale(self, layer: AttentionLayer, like: Tensor) -> Tensor | None:
        name = self.record.block.mlp_scale
        return (
            None if name is None else _like(self.record.weights.read(f"{self.record.block.path(layer)}.{name}"), like)
        )

    def linear(self, path: str, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """A linear map (out, in), and its bias."""
        weights = self.record.weights
        weight = weights.read(f"{path}.weight").detach().to(like)
        bias = _like(optional(weights, f"{path}.bias"), like)
        return weight.mT if self.record.block.transposed else weight, bias


def _eps(module: Any, path: str, x: Tensor) -> float:
    names = [name for name in EPS_NAMES if hasattr(module, name)]
    if not names:
        raise LocaterError(f"{path}: {type(module).__name__} has none of the attributes {', '.join(EPS_NAMES)}")
    eps = getattr(module, names[0])
    return torch.finfo(x.dtype).eps if eps is None else float(eps)


def _like(tensor: Tensor | None, x: Tensor) -> Tensor | None:
    return None if tensor is None else tensor.detach().to(x)


# MLPs of a recorded run as branches that are linear in the stream: plain, gated, and mixtures of experts.


def frozen_mlp(freezer: Freezer, layer: AttentionLayer, like: Tensor) -> tuple[GatedMlp | ExpertMixture, Tensor | None]:
    """The MLP of a layer's block, and the bias that it adds."""
    record, block = freezer.record, freezer.record.block
    before = freezer.norm(layer, block.before_mlp or (block.before_attention if block.parallel else None))
    experts = record.find(layer, block.experts)
    if experts is not None:
        parts = list(_routed_experts(freezer, experts, before, like))
        if record.find(layer, block.shared_up) is not None:
            parts.append(_shared_expert(freezer, layer, before, like))
        return ExpertMixture(parts, before, (like.shape[0], like.shape[1])), None
    up, down = _maps(freezer, layer, block.up, block.down)
    ratio, constant, W_up = _ratios(freezer, up, down, before, like)
    W_down, bias = freezer.linear(down, like)
    return GatedMlp(ratio, W_up, W_down, before, constant), bias


def _maps(freezer: Freezer, layer: AttentionLayer, up: Part, down: Part) -> tuple[str, str]:
    paths = freezer.record.find(layer, up), freezer.record.find(layer, down)
    if paths[0] is None or paths[1] is None:
        names = " and ".join(shown(part) for part in (up, down) if part) or "known up and down map"
        raise LocaterError(
            f"{freezer.record.block.path(layer)}: no {names}, so its MLP is not made linear: use mlp='source'"
        )
    return paths[0], paths[1]


def _ratios(
    freezer: Freezer, up: str, down: str, before: FrozenNorm | None, like: Tensor
) -> tuple[Float[Tensor, "B T f"], Float[Tensor, "B T f"], Float[Tensor, "f d"]]:
    """Ratios of value to pre-activation, the hidden units' part that does not come from x, and the map to them."""
    record = freezer.record
    W_up, b_up = freezer.linear(up, like)
    z, value = upcast(record.only_call(up).output), upcast(record.only_call(down).input)
    if record.block.gate_first:
        z, W_up = z.chunk(2, -1)[1], W_up.chunk(2)[1]
        b_up = None if b_up is None else b_up.chunk(2)[1]
    ratio = torch.where(z == 0, 0.0, value / z)
    # an activation that is not 0 at 0 has no ratio there
    constant = ratio * _pre_activation_constant(W_up, b_up, before) + torch.where(z == 0, value, 0.0)
    return ratio, constant, W_up


def _pre_activation_constant(W_up: Tensor, b_up: Tensor | None, before: FrozenNorm | None) -> Float[Tensor, " f"]:
    constant = W_up.new_zeros(W_up.shape[0]) if b_up is None else b_up
    return constant if before is None or before.shift is None else constant + W_up @ before.shift


def _shared_expert(freezer: Freezer, layer: AttentionLayer, before: FrozenNorm | None, like: Tensor) -> Expert:
    """The expert that every token passes, with weight 1."""
    block = freezer.record.block
    up, down = _maps(freezer, layer, block.shared_up, block.shared_down)
    ratio, constant, W_up = _ratios(freezer, up, down, before, like)
    W_down, bias = freezer.linear(down, like)
    constant = constant @ W_down.mT if bias is None else constant @ W_down.mT + bias
    tokens = torch.arange(like.shape[0] * like.shape[1], device=like.device)
    return Expert(tokens, ratio.flatten(0, 1), W_up, W_down, constant.flatten(0, 1))


def _routed_experts(freezer: Freezer, path: str, before: FrozenNorm | None, like: Tensor) -> Iterator[Expert]:
    """The experts that tokens were sent to. Their maps are stacked in two tensors, as in transformers 5."""
    module: Any = freezer.record.weights.submodule(path)
    passage = freezer.record.module_calls[path][0]
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
    value, least = apply_expert_gate(module, pre), apply_expert_gate(module, closed)
    ratio = torch.where(pre[:, units] == 0, 0.0, (value - least) / pre[:, units])
    hidden = least + ratio * _pre_activation_constant(both[units], b_up, before)
    constant = hidden @ down.mT if b_down is None else hidden @ down.mT + b_down[number].detach().to(x)
    return Expert(tokens, ratio * share, both[units], down, constant * share)


def shown(part: Part) -> str:
    return part if isinstance(part, str) else " or ".join(part or ())
