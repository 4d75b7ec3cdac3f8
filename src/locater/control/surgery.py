"""Surgery: attention skips, MLPs and norms taken out of a live model and put back (Dong, Cordonnier and Loukas 2021).

What is left decides whether tokens stay apart. Attention alone makes them equal at a doubly exponential rate; it is the
skip that holds them apart, and MLPs and norms alone do not (`locater.measures.rank_residual` over the layers).

    switch            pre-norm block: y = x + attn(norm(x))          post-norm block: y = norm(x + attn(x))
                                      y + mlp(norm(y))                                norm(y + mlp(y))
    no_skip           y = attn(norm(x))                              y = norm(attn(x))
    no_mlp            y                                              norm(y)
    no_mlp=sublayer   y                                              y
    no_norm           y = x + attn(x), y + mlp(y)                    y = x + attn(x), y + mlp(y)

Nothing is copied and no code of a model is written anew. Methods of single modules are replaced, and what is left out
of a sum is a zero there, so that what remains is exact:

    pre-norm blocks   the block runs on zeros, and the norm in front of attention is handed what came in; the MLP returns zeros
    BERT              attention's output module is handed zeros for the input that it adds; that of the MLP is its norm alone
    ALBERT            attention's norm is handed what attention made, in place of the sum; the MLP returns zeros
    XLNet             post_attention(residual=False), as in the paper's own code; the feed-forward module is its norm alone
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from locater.attention.stand_ins import REPLACED, instead
from locater.checkpoints.sources import config_of
from locater.checkpoints.weights import ModuleWeights
from locater.control.base import Control, Layers, self_layers
from locater.errors import LocaterError

Forward = Callable[..., Any]
Part = Callable[[str], nn.Module]  # a part of a block by its path from there; "" is the block


@dataclass(frozen=True)
class Cut:
    """A method of one module, and what is put in its place."""

    module: nn.Module
    name: str
    heard: Forward


@dataclass
class Switch:
    """On until a control is detached. A copy of the model has its own."""

    on: bool = True


class Surgery(Control):
    """A model without attention skips, MLPs or the norms of its blocks, each by its own switch; `detach` puts them
    back.

    no_skip takes off the skip around self-attention; that around the MLP stays, as does one around cross-attention.
    no_mlp takes off the whole branch. A post-norm block then still has the norm that closed it: no_mlp="sublayer" takes
    that too, as the paper did with BERT and XLNet. no_norm takes off the norms of the blocks: those of embeddings, of
    the end, and of queries and keys stay. `layers` are numbers as in a scan; ALBERT has one module for many depths, so
    what is taken out is missing at each.

    Parameters keep their names, and those that are out of use get no gradient. Attach it before `observe` and
    `Monitor`, which then see what is left. A scan reads weights and knows nothing of it. A copy of the model is without
    the same parts, whatever becomes of the original.

    >>> from locater.measures import rank_residual
    >>> from locater.train import Shape, Transformer
    >>> _ = torch.manual_seed(0)
    >>> model = Transformer(Shape(width=16, heads=2, kv_heads=2, layers=3, hidden=24, causal=False)).double().requires_grad_(False)
    >>> ids, stream = torch.arange(12)[None], model.model
    >>> round(float(rank_residual(stream(ids))), 2)
    0.97
    >>> control = Surgery(no_skip=True, no_mlp=True).attach(model)
    >>> bool(rank_residual(stream(ids)) < 1e-6)
    True
    >>> control.detach()
    """

    def __init__(
        self,
        no_skip: bool = False,
        no_mlp: bool | Literal["sublayer"] = False,
        no_norm: bool = False,
        layers: Layers = None,
    ) -> None:
        for name, value in (("no_skip", no_skip), ("no_norm", no_norm)):
            if not isinstance(value, bool):
                raise LocaterError(f"{name}={value!r}: True or False")
        if not isinstance(no_mlp, bool) and no_mlp != "sublayer":
            raise LocaterError(f"no_mlp={no_mlp!r}: True, False, or sublayer to take the norm after it too")
        if not (no_skip or no_mlp or no_norm):
            raise LocaterError("Surgery takes nothing out: give no_skip=True, no_mlp=True or no_norm=True")
        if isinstance(layers, int):
            raise LocaterError(f"layers={layers}: a list of numbers, such as [{layers}]")
        self.no_skip, self.no_mlp, self.no_norm, self.layers = no_skip, no_mlp, no_norm, layers

    def _attach(self, model: nn.Module) -> None:
        cuts = self._cuts(model)
        self._switch, self._undo = Switch(), list[Callable[[], None]]()
        try:
            for cut in cuts:
                self._undo.append(
                    instead(cut.module, cut.name, partial(_while_on, self._switch, cut.heard), repr(self))
                )
        except BaseException:
            self._detach(model)
            raise

    def _detach(self, model: nn.Module) -> None:
        self._switch.on = False  # for what stays below somebody else's stand-in
        for undo in reversed(self._undo):
            undo()

    def _cuts(self, model: nn.Module) -> list[Cut]:
        """Every replacement, each block once; raises where a part is missing or somebody else is at it."""
        kind = config_of(model).get("model_type")
        if kind not in ANATOMIES:
            raise LocaterError(_unknown(model, kind, "its blocks are not known"))
        anatomy, weights = ANATOMIES[kind], ModuleWeights(model)
        found: list[Cut] = []
        for path in dict.fromkeys(_block(layer.name, anatomy) for layer in self_layers(model, self.layers)):
            try:
                found += self._cuts_of(anatomy, partial(_part, weights, path))
            except KeyError as error:
                raise LocaterError(_unknown(model, kind, f"{error.args[0]} is not there")) from None
        for cut in found:
            if REPLACED in getattr(cut.module.__dict__.get(cut.name), "__dict__", ()):
                raise LocaterError(
                    f"{type(cut.module).__name__}.{cut.name} is observed, or under another Surgery: attach Surgery before observe "
                    "and Monitor, and give one Surgery all switches for a block"
                )
        return found

    def _cuts_of(self, anatomy: Anatomy, part: Part) -> Iterator[Cut]:
        """Norms first: the others stand above them."""
        if self.no_norm:
            yield from (Cut(part(name), "forward", _same) for name in anatomy.norms)
            yield from (Cut(norm, "forward", _same) for norm in _those_there(part, anatomy.maybe))
        if self.no_mlp:
            yield from anatomy.mlp(part, self.no_mlp == "sublayer")
        if self.no_skip:
            yield from anatomy.skip(part)


def _block(attention: str, anatomy: Anatomy) -> str:
    return attention.removesuffix(anatomy.attention).removesuffix(".")


def _part(weights: ModuleWeights, block: str, name: str) -> nn.Module:
    return weights.submodule(".".join(filter(None, (block, name))))


def _those_there(part: Part, names: tuple[str, ...]) -> Iterator[nn.Module]:
    for name in names:
        try:
            yield part(name)
        except KeyError:
            continue


def _unknown(model: nn.Module, kind: str | None, why: str) -> str:
    of = f"model type {kind!r}" if kind else "no model type"
    return f"Surgery: {type(model).__name__} ({of}): {why}; it works on {', '.join(sorted(ANATOMIES))}"


# What stands in for a method. Each is handed the module, the method that it stands for, and the arguments.


def _while_on(switch: Switch, heard: Forward, module: nn.Module, forward: Forward, *args: Any, **kw: Any) -> Any:
    return heard(module, forward, *args, **kw) if switch.on else forward(*args, **kw)


def _same(module: nn.Module, forward: Forward, x: Tensor) -> Tensor:
    return x


def _nothing(module: nn.Module, forward: Forward, x: Tensor, *args: Any, **kw: Any) -> Tensor:
    return torch.zeros_like(x)


# Pre-norm blocks. `held` is what came into the block, from there to its first norm.


def _without_stream(
    held: list[Tensor], block: nn.Module, forward: Forward, hidden_states: Tensor, *args: Any, **kw: Any
) -> Any:
    held[:] = [hidden_states]
    try:
        out = forward(torch.zeros_like(hidden_states), *args, **kw)
        if held:
            raise LocaterError(
                f"{type(block).__name__} did not call the norm in front of its attention: Surgery cannot take off its skip"
            )
        return out
    finally:
        held.clear()


def _with_stream(held: list[Tensor], norm: nn.Module, forward: Forward, x: Tensor) -> Any:
    return forward(held.pop() if held else x)


def _pre_norm_skip(norm: str, part: Part) -> Iterator[Cut]:
    held: list[Tensor] = []
    yield Cut(part(""), "forward", partial(_without_stream, held))
    yield Cut(part(norm), "forward", partial(_with_stream, held))


def _pre_norm_mlp(part: Part, sublayer: bool) -> Iterator[Cut]:
    """Where an RMSNorm follows the MLP inside the branch (Gemma), it makes zeros of zeros."""
    yield Cut(part("mlp"), "forward", _nothing)


# BERT


def _added_to_zeros(module: nn.Module, forward: Forward, hidden_states: Tensor, input_tensor: Tensor) -> Any:
    return forward(hidden_states, torch.zeros_like(input_tensor))


def _bert_skip(part: Part) -> Iterator[Cut]:
    yield Cut(part("attention.output"), "forward", _added_to_zeros)


def _input_alone(
    norm: nn.Module | None, module: nn.Module, forward: Forward, hidden_states: Tensor, input_tensor: Tensor
) -> Any:
    return input_tensor if norm is None else norm(input_tensor)


def _bert_mlp(part: Part, sublayer: bool) -> Iterator[Cut]:
    yield Cut(part("intermediate"), "forward", _same)
    yield Cut(part("output"), "forward", partial(_input_alone, None if sublayer else part("output.LayerNorm")))


# ALBERT. `held` is what attention made, from its last dropout to the norm that is given the sum.


def _keep(held: list[Tensor], dropout: nn.Module, forward: Forward, x: Tensor) -> Tensor:
    held[:] = [forward(x)]
    return held[0]


def _not_the_sum(held: list[Tensor], norm: nn.Module, forward: Forward, x: Tensor) -> Any:
    return forward(held.pop())


def _albert_skip(part: Part) -> Iterator[Cut]:
    held: list[Tensor] = []
    yield Cut(part("attention.output_dropout"), "forward", partial(_keep, held))
    yield Cut(part("attention.LayerNorm"), "forward", partial(_not_the_sum, held))


def _albert_mlp(part: Part, sublayer: bool) -> Iterator[Cut]:
    yield Cut(part("ffn"), "forward", _same)
    yield Cut(part("ffn_output"), "forward", _nothing)
    if sublayer:
        yield Cut(part("full_layer_layer_norm"), "forward", _same)


# XLNet


def _no_residual(module: nn.Module, forward: Forward, h: Tensor, attn_vec: Tensor, residual: bool = True) -> Any:
    return forward(h, attn_vec, residual=False)


def _xlnet_skip(part: Part) -> Iterator[Cut]:
    layer = part("rel_attn")
    if not hasattr(layer, "post_attention"):
        raise KeyError(f"{type(layer).__name__}.post_attention")
    yield Cut(layer, "post_attention", _no_residual)


def _norm_alone(norm: nn.Module, module: nn.Module, forward: Forward, x: Tensor) -> Any:
    return norm(x)


def _xlnet_mlp(part: Part, sublayer: bool) -> Iterator[Cut]:
    yield Cut(part("ff"), "forward", _same if sublayer else partial(_norm_alone, part("ff.layer_norm")))


@dataclass(frozen=True)
class Anatomy:
    """Where the parts of a block are, as paths from it."""

    attention: str  # how the name of its attention layer ends
    norms: tuple[str, ...]
    skip: Callable[[Part], Iterator[Cut]]
    mlp: Callable[[Part, bool], Iterator[Cut]]
    maybe: tuple[str, ...] = ()  # norms that only some have


def _pre_norm(attention: str, *norms: str, maybe: tuple[str, ...] = ()) -> Anatomy:
    """The first norm is the one in front of attention."""
    return Anatomy(attention, norms, partial(_pre_norm_skip, norms[0]), _pre_norm_mlp, maybe)


BERT = Anatomy(
    "attention.self",
    ("attention.output.LayerNorm", "output.LayerNorm"),
    _bert_skip,
    _bert_mlp,
    ("crossattention.output.LayerNorm",),
)
ALBERT = Anatomy("attention", ("attention.LayerNorm", "full_layer_layer_norm"), _albert_skip, _albert_mlp)
XLNET = Anatomy("rel_attn", ("rel_attn.layer_norm", "ff.layer_norm"), _xlnet_skip, _xlnet_mlp)
GPT2 = _pre_norm("attn", "ln_1", "ln_2", maybe=("ln_cross_attn",))
VIT = _pre_norm("attention", "layernorm_before", "layernorm_after")
LLAMA = _pre_norm(
    "self_attn",
    "input_layernorm",
    "post_attention_layernorm",
    maybe=("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)

ANATOMIES: dict[str, Anatomy] = {
    "albert": ALBERT,
    "gpt2": GPT2,
    "vit": VIT,
    "xlnet": XLNET,
    **dict.fromkeys(("bert", "camembert", "electra", "roberta", "xlm-roberta"), BERT),
    **dict.fromkeys(
        ("gemma2", "gemma3_text", "granite", "llama", "locater", "mistral", "phi3", "qwen2", "qwen3", "starcoder2"),
        LLAMA,
    ),
}
