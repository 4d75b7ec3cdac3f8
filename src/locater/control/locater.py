"""LocAteR: shrink the scale of each head's query-key spectrum and keep its mean at a target. docs/theory.md section 8.

    penalty = sum over heads of   shrink * V + hold * (M - target)^2

M = s tr W is the mean logit of a unit token with itself. V is the scale of the spectrum in the same units:

    part="symmetric"   V = s^2 tr W_sym^2
    part="full"        V = s^2 (2 ||W||_F^2 + tr W^2) / 3     penalizes the antisymmetric part too; it is the variance
                                                              of the paper's delta, averaged over positions
    part="frobenius"   V = s^2 ||W||_F^2                      is no reading of the paper: a plain penalty on W beside it

With form="effective" W is the effective map, norms folded in, so one setting fits every width and head size, and
scaling W_Q where a norm follows changes nothing. Where no norm stands in front of a layer, nothing fixes the size of
its tokens. There W is multiplied by their mean square size in the last training pass, r^2 = E |z|^2 / d, so that
M = s r^2 tr W and V = s^2 r^4 tr W_sym^2.

With form="stored" W is made of the parameters as stored. No source that could be read quotes the paper's formula, so
its readings have names: form="held" is "stored" with a target, which every description says; form="free" is "stored"
with target="free", where nothing holds the mean; form="full" is "stored" with part="full". Raw tr W^2 is no such
penalty: it has no lower bound, since a rotation makes it negative.

With form="measured" M and V are those of tokens that the layer actually reads, instead of unit tokens:

    L_ij = s q_i . (k_j - mean k)        V = mean of L_ij^2 over all pairs        M = mean of L_ii
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from locater.control.base import Control, Layers, chosen_layers, device_of
from locater.discovery import attention_layers
from locater.discovery.replayed_maps import FoldedStacks, Inputs, Maps
from locater.errors import LocaterError
from locater.layers.layer import AttentionLayer, Projection
from locater.layers.norm import Norm
from locater.layers.norm_folding import Effective, effective, folded
from locater.layers.projection_with_norm import JoinedProjection, NormedProjection, norm_inside
from locater.numerics import is_number
from locater.observing.training_tokens import (
    TokenListener,
    TokenSample,
    TokenSize,
    listen_to_training_tokens,
    samples_of,
    share_samples,
    share_sizes,
    sizes_of,
)


def size_counts(layer: AttentionLayer) -> bool:
    """Whether the logits of a self-attention layer depend on the size of the tokens that it reads: no norm in front of
    it fixes this size, and none of both queries and keys undoes it.

    >>> plain = Projection(lambda: torch.eye(2), (2, 2))
    >>> layer = AttentionLayer("attention", 0, 1, 1, 2, query=plain, key=plain, scale=1.0)
    >>> size_counts(layer), size_counts(replace(layer, norm=Norm("rms")))
    (True, False)
    >>> size_counts(replace(layer, query_norm=Norm("rms"), key_norm=Norm("rms")))
    False
    """
    sides = ((layer.query, layer.query_norm), (layer.key, layer.key_norm))
    return layer.norm.kind == "none" and not all(_undoes_size(*side) for side in sides)


def _undoes_size(projection: Projection, norm: Norm | None) -> bool:
    """Whether a norm behind the map makes the same of tokens of any size. A bias in front of that norm does not grow
    with the tokens, and rotary channels beside a latent do not pass through it.
    """
    if isinstance(projection, NormedProjection):
        return projection.down.bias is None and projection.shared is None
    if isinstance(projection, JoinedProjection):
        return all(_undoes_size(part, norm) for part in projection.parts)
    return norm is not None and projection.bias is None


def sized_maps(layer: AttentionLayer, mean_square: Float[Tensor, " 1"] | None = None) -> Effective:
    """The effective maps; given r^2 = E |z|^2 / d of the tokens that the layer reads, those of tokens of this size in
    place of unit tokens: M = s r^2 tr W and V = s^2 r^4 tr W_sym^2.

    r is a gain in front of the maps, so a norm behind one of them has its mean field over tokens of this size.
    """
    if mean_square is None:
        return effective(layer)
    norm = Norm(gain=mean_square.sqrt().expand(layer.width))
    query, key = (side.linear(partial(folded, norm=norm)) for side in (layer.query, layer.key))
    return effective(replace(layer, norm=norm, query=query, key=key))


def stored_maps(layer: AttentionLayer) -> Effective:
    """The query and key maps as the parameters are stored: no norm is folded in, and none of queries and keys.

    Refused for latent attention: a norm stands between its two matrices, so no product of them is in use.
    """
    return effective(
        replace(layer, query=_stored_projection(layer, layer.query), key=_stored_projection(layer, layer.key)), raw=True
    )


def _stored_projection(layer: AttentionLayer, projection: Projection) -> Projection:
    if not norm_inside(projection):
        return projection
    if not isinstance(projection, NormedProjection) or projection.up is not None:
        raise LocaterError(
            f"{layer.name}: latent attention has no query-key map as stored, since a norm stands between its two "
            "matrices: use the effective or the measured form"
        )
    return projection.down


def token_maps(layer: AttentionLayer, x: Float[Tensor, "n d"], real: Bool[Tensor, " n"]) -> Effective:
    """Queries and keys of n tokens that a layer reads, as maps from the numbers of the tokens.

    `x` is the input of the attention module itself, behind the norm in front of it. Tokens that are not `real` do not
    count. Column i of `query` (H, h, n) is the query of token i divided by the number of tokens; column j of `key`
    (K, h, n) is the key of token j minus the mean key. So with L_ij = s q_i . (k_j - mean k) over N real tokens,

        s tr(Q^T K) = sum_i L_ii / N            the mean logit of a token with itself
        s^2 ||Q^T K||_F^2 = sum_ij L_ij^2 / N^2     the mean square over all pairs

    Norms and biases of queries and keys are exact. There is no rotation, so these are logits at distance zero;
    position terms and soft-caps are left out.

    >>> x = torch.eye(2)
    >>> plain = Projection(lambda: torch.eye(2), (2, 2))
    >>> layer = AttentionLayer("attention", 0, 1, 1, 2, query=plain, key=plain, scale=1.0)
    >>> maps = token_maps(layer, x, torch.tensor([True, True]))
    >>> maps.query[0].mT @ maps.key[0] * 2                             # L: the mean key is (1/2, 1/2)
    tensor([[ 0.5000, -0.5000],
            [-0.5000,  0.5000]])
    """
    counted = real.to(x.dtype)
    number = counted.sum().clamp_min(1)
    at_zero = replace(layer, norm=Norm(), memory_norm=None, rotary=None, rotary_table=None)
    query, key = (side(x[None])[0].mT for side in (at_zero.queries, at_zero.keys))  # (heads, h, n)
    if layer.rotary is not None and layer.rotary.amplitude != 1:
        turning = torch.ones(layer.head_dim, dtype=x.dtype, device=x.device)
        turning[: layer.rotary.channels] = layer.rotary.amplitude
        query, key = query * turning[:, None], key * turning[:, None]
    key = key - (key * counted).sum(-1, keepdim=True) / number
    query, key = query * (counted / number), key * counted
    return Effective(query, key, query.new_zeros(layer.heads, len(x)), layer.scale, layer.kind == "cross")


# The query and key maps of a live model in the form that a penalty acts on; re-read at each step.

Form = Literal["effective", "measured", "stored"]
FOLDS: Mapping[Form, Callable[..., Effective]] = {
    "effective": sized_maps,
    "measured": token_maps,
    "stored": stored_maps,
}


class ModelMaps:
    """Maps of the layers with these numbers.

    Until `close`, the measured form listens to all of these layers, and the effective form to those whose logits depend
    on the size of their tokens.
    """

    def __init__(self, model: nn.Module, layers: Mapping[int, AttentionLayer], form: Form) -> None:
        self.model, self.numbers, self.fold = model, list(layers), FOLDS[form]
        self.samples = samples_of(model, layers) if form == "measured" else {}
        raw = {number: layer for number, layer in layers.items() if form == "effective" and size_counts(layer)}
        self.sizes = sizes_of(model, raw)
        self._inputs: dict[int, Inputs] = {
            **{number: partial(_tokens, sample) for number, sample in self.samples.items()},
            **{number: partial(_mean_square, size) for number, size in self.sizes.items()},
        }
        self._stacks = FoldedStacks(model, self.numbers, self.fold, self._inputs)
        listeners: list[TokenListener] = [*self.samples.values(), *self.sizes.values()]
        self._ends = listen_to_training_tokens(model, listeners) if listeners else []

    def current_maps(self) -> list[Maps]:
        """Queries (L, H, h, d), keys (L, K, h, d) and logit scales (L,) of each stack; gradients flow to the weights.

        In the measured form d counts tokens of the sample. Raises if tokens are needed and none have been seen.
        """
        if self.samples:
            self._finish_samples()
        if self.sizes:
            self._finish_sizes()
        return self._stacks.maps()

    def forget(self) -> None:
        """Drop the samples after a step, since they belong to the weights before it. Sizes of tokens stay until the
        next pass.
        """
        for sample in self.samples.values():
            sample.forget()

    def state(self) -> dict[str, Tensor]:
        """The sums behind the size of tokens (2,), by the name of the layer; zeros for a layer that has not run.

        All layers are present from the beginning, since a distributed checkpoint fills in a state that exists already.
        """
        return {
            size.name: size.sums.detach().clone() if size.filled else torch.zeros_like(size.sums)
            for size in self.sizes.values()
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the sizes of a checkpoint. Raises for a layer that needs no size here."""
        by_name = {size.name: size for size in self.sizes.values()}
        unknown = [name for name in state if name not in by_name]
        if unknown:
            raise LocaterError(
                f"LocAteR: this state has the size of the tokens of {unknown[0] or 'the model'}, which is not needed "
                "here: it belongs to another model or other layers"
            )
        for name, sums in state.items():
            if bool(sums[1]):  # the number of tokens
                by_name[name].load(sums)

    def close(self) -> None:
        """Stop listening."""
        for end in reversed(self._ends):
            end()
        self._ends = []

    def _finish_sizes(self) -> None:
        sizes = list(self.sizes.values())
        if not torch.compiler.is_compiling():  # as for samples
            empty = [size for size in sizes if not size.filled]
            if empty:
                raise LocaterError(_missing_size(type(self.model).__name__, empty))
        share_sizes(sizes)
        for size in sizes:
            size.restart()

    def _finish_samples(self) -> None:
        samples = list(self.samples.values())
        if not torch.compiler.is_compiling():  # in one graph with the forward pass, samples are not filled yet
            empty = [sample for sample in samples if not sample.filled]
            if empty:
                raise LocaterError(_missing_sample(type(self.model).__name__, empty, len(samples)))
        share_samples(samples)
        for sample in samples:
            sample.restart()


def _tokens(sample: TokenSample) -> tuple[Tensor, Tensor]:
    return sample.tokens, sample.real


def _mean_square(size: TokenSize) -> tuple[Tensor]:
    return (size.mean_square(),)


def _missing_size(model: str, empty: Sequence[TokenSize]) -> str:
    return (
        f"{empty[0].name or model}: no norm stands in front of this layer, and the size of the tokens that it reads is "
        "not known before its first forward pass in training mode: call loss() after model(...) of the model that was "
        "passed to attach(), or choose layers=[...] without it"
    )


def _missing_sample(model: str, empty: list[TokenSample], of: int) -> str:
    if len(empty) == of:
        return (
            f"{model}: form='measured' needs a forward pass in training mode since the last step: call loss() after "
            "model(...) of the model that was passed to attach()"
        )
    return (
        f"{empty[0].name}: no tokens (B, T, d) were seen at this layer in the last forward pass, so form='measured' "
        "does not know what it reads: use form='effective', or layers=[...] without it"
    )


# The control.

Schedule = Callable[[int], float]  # of the step, from 0; multiplies the penalty


READINGS = ("held", "free", "full")  # of the paper's penalty, each on W as it is stored


class LocAteR(Control):
    """The regularizer of Bao, Hataya and Karakida (2024) in logit units.

    `form` says which logits M and V are of:

    - "effective": of unit tokens, with the norms in front of attention folded into W. Where there is no such norm (the
      first layer of a post-norm model), of tokens with the mean square size of those that the layer read in the last
      training pass (not differentiated). There `loss()` comes after the first forward pass. Norms of both queries and
      keys undo the size, so such layers need no pass;
    - "measured": of tokens that the layer read in the last training pass (a sample of 256, not differentiated). With
      L_ij = s q_i . (k_j - mean k), V is the mean of L_ij^2 over all pairs and M the mean of L_ii. Norms and biases of
      queries and keys are exact; rotation is left out, so these are logits at distance zero. `loss()` comes after the
      forward pass. Passes between two calls of `loss()` share the sample;
    - "stored": of unit tokens, with W_Q and W_K as the parameters are stored and no norm at all. "held", "free" and
      "full" are readings of the paper by name: this form with a target, with `target="free"`, with `part="full"`.

    `target="free"` concentrates the spectrum around whatever mean it has: shrink * (V - M^2 / d_head), never negative.
    With a `limit` only V above it is penalised: shrink * max(0, V - limit). `part` applies to W, not to the measured
    form. `layers` are numbers as in a scan; cross-attention has no mean and is left out. A layer that several depths
    share counts once.

    >>> block = nn.TransformerEncoderLayer(16, 2, batch_first=True)
    >>> model = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
    >>> control = LocAteR(target=2.0).attach(model)
    >>> _ = model(torch.randn(4, 32, 16))                              # its first layer has no norm in front
    >>> bool(control.loss() > 0), control.loss().requires_grad
    (True, True)
    >>> control = LocAteR(form="measured").attach(model)
    >>> _ = model(torch.randn(4, 32, 16)); bool(control.loss() > 0)
    True
    """

    state_attributes = ("step",)

    def __init__(
        self,
        shrink: float = 0.01,
        hold: float = 0.01,
        target: float | Literal["free"] = 2.0,
        form: Literal["effective", "measured", "stored", "held", "free", "full"] = "effective",
        part: Literal["symmetric", "full", "frobenius"] = "symmetric",
        limit: float = 0.0,
        layers: Layers = None,
        schedule: Schedule | None = None,
    ) -> None:
        if form not in ("effective", "measured", "stored", *READINGS):
            raise LocaterError(f"form={form!r}: choose effective, measured, held, free, full or stored")
        if form in READINGS:
            target = "free" if form == "free" else target
            part = "full" if form == "full" else part
        if part not in ("symmetric", "full", "frobenius"):
            raise LocaterError(f"part={part!r}: choose symmetric, full or frobenius")
        if form == "measured" and part != "symmetric":
            raise LocaterError(
                f"part={part!r} is a part of W, and form='measured' penalises all logits: leave part out"
            )
        if target != "free" and not is_number(target):
            raise LocaterError(f"target={target!r}: must be a number, or free")
        if schedule is not None and not callable(schedule):
            raise LocaterError(
                f"schedule={schedule!r}: must be a function of the step, so it can be given only in Python"
            )
        if not (is_number(shrink) and is_number(hold) and shrink >= 0 and hold >= 0):
            raise LocaterError(
                f"shrink={shrink!r}, hold={hold!r}: both must be numbers from 0 on (below 0 the penalty rewards)"
            )
        if not (is_number(limit) and limit >= 0):
            raise LocaterError(f"limit={limit!r}: must be a number from 0 on, the V that is not penalised")
        if limit and target == "free":
            raise LocaterError(f"limit={limit} does not apply to target='free': give a number as target")
        self.shrink, self.hold, self.target = shrink, hold, target
        self.form: Form = form if form == "effective" or form == "measured" else "stored"
        self.part, self.limit, self.layers, self.schedule = part, limit, layers, schedule
        self.step = 0

    def _check(self, model: nn.Module) -> dict[int, AttentionLayer]:
        """The self-attention layers that are penalised, by their numbers."""
        every = attention_layers(model)
        layers = chosen_layers(every, self.layers, type(model).__name__)
        if not any(part.weight().requires_grad for layer in layers for part in (layer.query, layer.key)):
            raise LocaterError(
                f"{type(model).__name__}: none of its query and key maps is trained, so a penalty would change nothing"
            )
        numbers = range(len(every)) if self.layers is None else self.layers
        of_self = {number: every[number] for number in numbers if every[number].kind == "self"}
        if self.form == "stored":
            for layer in of_self.values():
                FOLDS["stored"](layer)
        return of_self

    def _attach(self, model: nn.Module) -> None:
        of_self = self._check(model)
        self.step = 0
        self._set_strength()
        self._maps = ModelMaps(model, of_self, self.form)  # last: the measured form begins to listen

    def _detach(self, model: nn.Module) -> None:
        self._maps.close()
        del self._maps

    def maps(self) -> list[Maps]:
        """Query and key maps of the chosen layers and their logit scales, layers of one kind stacked.

        In the measured form these are maps from the numbers of the sampled tokens (`control.penalty_maps.token_maps`).
        """
        _ = self.attached
        return self._maps.current_maps()

    def loss(self) -> Tensor:
        """The penalty of this step, in float32 at least, under autocast too."""
        with torch.autocast(device_of(self.attached).type, enabled=False):
            parts = [self.of(query, key, scale.unsqueeze(-1)).sum() for query, key, scale in self.maps()]
        total = torch.stack(parts).sum()
        return total if self.strength is None else self.strength * total

    def of(self, query: Tensor, key: Tensor, scale: Tensor | float) -> Tensor:
        """The penalty of every head (..., H), from queries (..., H, h, d), keys (..., K, h, d) and logit scales."""
        trace, square, size = traces(query, key)
        M, V = scale * trace, scale**2 * self._spread(square, size)
        if self.target == "free":
            return self.shrink * (V - M**2 / query.shape[-2])
        assert not isinstance(self.target, str)
        excess = torch.relu(V - self.limit) if self.limit else V
        return self.shrink * excess + self.hold * (M - self.target) ** 2

    def _spread(self, square: Tensor, size: Tensor) -> Tensor:
        """V / s^2, from tr W^2 and ||W||_F^2."""
        if self.form == "measured" or self.part == "frobenius":
            return size
        return (square + size) / 2 if self.part == "symmetric" else (2 * size + square) / 3

    def after_step(self) -> None:
        if self.model is not None:
            self._maps.forget()
        self.step += 1
        self._set_strength()

    def state_dict(self) -> dict[str, Any]:
        """The step and, for layers without a norm in front of them, the sums behind the size of their tokens."""
        sizes = {} if self.model is None else self._maps.state()
        return {**super().state_dict(), **({"sizes": sizes} if sizes else {})}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict({name: value for name, value in state.items() if name != "sizes"})
        if state.get("sizes"):
            _ = self.attached
            self._maps.load_state(state["sizes"])
        self._set_strength()

    def _set_strength(self) -> None:
        """The value of the schedule at this step, as a tensor: a new number would recompile the step."""
        self.strength = None if self.schedule is None else torch.tensor(float(self.schedule(self.step)))


def traces(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """tr W, tr W^2 and ||W||_F^2 of W = W_Q^T W_K for every head (..., H); no d x d matrix and no copy of grouped keys.

    `Moments` has the same numbers, but caches them behind a lock, which torch.compile cannot trace.

    >>> row = torch.tensor([[[1.0, 2.0]]])
    >>> [float(x) for x in traces(row, row)]     # W = [[1, 2], [2, 4]]
    [5.0, 25.0, 25.0]
    """
    groups = query.unflatten(-3, (key.shape[-3], -1))  # (..., K, group, h, d)
    cross = (groups.flatten(-3, -2) @ key.mT).unflatten(-2, groups.shape[-3:-1])  # (..., K, group, h, h): G transposed
    query_gram, key_gram = groups @ groups.mT, (key @ key.mT).unsqueeze(-3)
    trace = cross.diagonal(dim1=-2, dim2=-1).sum(-1)
    trace_of_square = (cross * cross.mT).sum((-2, -1))
    frobenius_sq = (query_gram * key_gram).sum((-2, -1))
    return trace.flatten(-2), trace_of_square.flatten(-2), frobenius_sq.flatten(-2)
