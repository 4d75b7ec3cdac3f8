"""Paths through a transformer: its output as a sum over ways through the layers, each layer by one head or past all of them.

For one input everything that is not linear is frozen as it was: attention maps A_h and the denominators of norms. Then a layer is

    x  ->  x + sum_h A_h N(x) W_h + b          (pre-norm; a post-norm layer puts its frozen norm around the whole)

and the output is a sum over paths: in each layer the skip or one head (Dong, Cordonnier, Loukas 2021). A path's length is the number
of heads it passes. It starts at one of three origins, kept apart because their sum is the output and none of them alone:

    input       what enters the first block
    constants   biases and shifts of norms, each at its own layer; a value bias or a shift in front of attention has passed a head
    mlp         outputs of MLPs as they were, each at its own layer (mlp="source")

An MLP is not linear. With mlp="source", the default, its output is a vector that starts a path: what went into it ends there, and
the paths of the input are those of attention alone, [H + skip]^L as in the paper. With mlp="linear" the ratio of each hidden unit's
value to its pre-activation is frozen (the gate of SwiGLU; Phi(z) of GELU), and the MLP is a branch that paths may take, beside
the skip; lengths still count heads. Both sums are exact. A block whose MLP was taken out has no such step.

Axes: B sequences, T queries, S keys, d width, H heads, K value heads, h head size, f hidden units, n fields carried at once.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from locater.errors import LocaterError, first_line
from locater.heads import AttentionLayer, attention_layers
from locater.heads.build import norm, optional
from locater.heads.norm import Norm, NormKind
from locater.heads.readers import config_of
from locater.heads.weights import ModuleWeights
from locater.kernels.terms import Terms, full_terms
from locater.probing import interface
from locater.probing.call import Call
from locater.probing.outside.parts import instead
from locater.probing.running import run
from locater.probing.site import Site, Switch, Wanted, enter, leave
from locater.spectrum import upcast

Mlp = Literal["source", "linear"]
Path = Sequence[int | None]  # one entry per step of `Paths.steps`: None is the skip, a number the head; an MLP is number 0
INPUT, CONSTANTS, MLP = range(3)
AT_ONCE = 32  # paths that are walked together


# --- which modules a block is made of -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Paths of modules under a block, which is `<base><stack>.<number>`; `final` is under the base. None: there is none."""

    stack: str
    attention: str
    kind: NormKind
    before: str | None  # norm in front of attention
    after: str | None  # norm around attention and skip
    mlp_before: str | None
    mlp_after: str | None
    mlp: str  # what gives the MLP's output
    up: str
    down: str
    final: str | None


LLAMA = Layout(
    "layers", "self_attn", "rms", "input_layernorm", None, "post_attention_layernorm", None, "mlp", "mlp.up_proj", "mlp.down_proj", "norm"
)
GPT2 = Layout("h", "attn", "layer", "ln_1", None, "ln_2", None, "mlp", "mlp.c_fc", "mlp.c_proj", "ln_f")
VIT = Layout("layers", "attention", "layer", "layernorm_before", None, "layernorm_after", None, "mlp", "mlp.fc1", "mlp.fc2", "layernorm")
BERT = Layout(
    "encoder.layer", "attention.self", "layer", None, "attention.output.LayerNorm", None, "output.LayerNorm",
    "output.dense", "intermediate.dense", "output.dense", None,
)  # fmt: skip
LAYOUTS = {
    **dict.fromkeys(("llama", "locater", "mistral", "qwen2", "qwen3"), LLAMA),
    **dict.fromkeys(("bert", "camembert", "electra", "roberta", "xlm-roberta"), BERT),
    "gpt2": GPT2,
    "vit": VIT,
}


# --- frozen parts: all are linear in x (n, B, T, d) ---------------------------------------------------------------------


@dataclass(frozen=True)
class FrozenNorm:
    """gain * (x - mean) * factor, with `factor` (B, T, 1) one over each token's deviation as it was; `shift` is what it adds."""

    factor: Tensor
    gain: Tensor | None
    shift: Tensor | None
    centred: bool

    def __call__(self, x: Tensor) -> Tensor:
        x = (x - x.mean(-1, keepdim=True) if self.centred else x) * self.factor
        return x if self.gain is None else x * self.gain


@dataclass(frozen=True)
class Heads:
    """A_h N(x) W_V W_O for every head of a layer."""

    maps: Float[Tensor, "B H T S"]
    value: Float[Tensor, "K h d"]
    out: Float[Tensor, "H h d"]
    before: FrozenNorm | None
    constant: Float[Tensor, "K h"]  # what values are made of besides x: W_V shift + bias

    @property
    def count(self) -> int:
        return self.out.shape[0]

    def all(self, x: Tensor) -> Tensor:
        """The sum over heads."""
        return self._mixed(x).flatten(-2) @ self.out.flatten(0, 1)

    def each(self, x: Tensor) -> Tensor:
        """(H, n, B, T, d)"""
        return torch.einsum("nbthv,hvd->hnbtd", self._mixed(x), self.out)

    def one(self, x: Tensor, head: int) -> Tensor:
        values = _normed(self.before, x) @ self.value[head // self._group].mT  # (n, B, S, h)
        return self.maps[:, head] @ values @ self.out[head]

    def offsets(self) -> Tensor:
        """What each head adds whatever x is: (H, B, T, d)."""
        constant = torch.einsum("hv,hvd->hd", self.constant.repeat_interleave(self._group, 0), self.out)
        return torch.einsum("bht,hd->hbtd", self.maps.sum(-1), constant)

    @property
    def _group(self) -> int:
        return self.count // self.value.shape[0]

    def _mixed(self, x: Tensor) -> Tensor:
        """Values mixed by each head: (n, B, T, H, h). One product per head with the n fields side by side as columns."""
        n, size = x.shape[0], self.value.shape[1]
        values = _normed(self.before, x) @ self.value.flatten(0, 1).mT
        side = values.unflatten(-1, (-1, size)).permute(1, 3, 2, 0, 4).flatten(-2)  # (B, K, S, n h)
        mixed = self.maps @ side.repeat_interleave(self._group, 1)  # (B, H, T, n h)
        return mixed.unflatten(-1, (n, size)).permute(3, 0, 2, 1, 4)


@dataclass(frozen=True)
class Gates:
    """W_down diag(ratio) W_up N(x): an MLP whose hidden units keep the ratio (B, T, f) of value to pre-activation."""

    ratio: Tensor
    up: Tensor  # (f, d)
    down: Tensor  # (d, f)
    before: FrozenNorm | None
    constant: Tensor  # (B, T, f): of the hidden units' values, what does not come from x
    count: int = 1

    def all(self, x: Tensor) -> Tensor:
        return (_normed(self.before, x) @ self.up.mT * self.ratio) @ self.down.mT

    def each(self, x: Tensor) -> Tensor:
        return self.all(x)[None]

    def one(self, x: Tensor, head: int) -> Tensor:
        return self.all(x)

    def offsets(self) -> Tensor:
        return (self.constant @ self.down.mT)[None]


@dataclass(frozen=True)
class Step:
    """x -> after(x + branches + what is added). `longer` is what passing a branch adds to a path's length."""

    name: str
    branches: Heads | Gates | None = None
    longer: int = 0
    bias: Tensor | None = None  # (d,)
    observed: Tensor | None = None  # (B, T, d): an MLP's output
    after: FrozenNorm | None = None

    def onward(self, x: Tensor) -> Tensor:
        """All ways through the step, without what is added."""
        return _normed(self.after, x if self.branches is None else x + self.branches.all(x))

    def replay(self, x: Tensor) -> Tensor:
        """What the model did: all ways, and all that is added."""
        if self.branches is not None:
            x = x + self.branches.all(x) + self.branches.offsets().sum(0)
        x = _normed(self.after, sum((held for held in (self.bias, self.observed) if held is not None), x))
        return x if self.after is None or self.after.shift is None else x + self.after.shift

    def grown(self, state: Tensor) -> Tensor:
        """The same for paths sorted by origin and length: (origins, lengths, B, T, d)."""
        if self.branches is not None:
            passed = self.branches.all(state.flatten(0, 1)).view_as(state)
            passed[CONSTANTS, 0] += self.branches.offsets().sum(0)
            none = torch.zeros_like(state[:, : self.longer])
            state = torch.cat([state, none], 1) + torch.cat([none, passed], 1)
        if self.bias is not None:
            state[CONSTANTS, 0] += self.bias
        if self.observed is not None:
            state[MLP, 0] += self.observed
        state = _normed(self.after, state)
        if self.after is not None and self.after.shift is not None:
            state[CONSTANTS, 0] += self.after.shift
        return state


def _normed(norm: FrozenNorm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


# --- paths --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ByLength:
    """What all paths of each length bring, by origin; each (L + 1, B, T, d), with the number of heads passed first."""

    input: Tensor
    constants: Tensor
    mlp: Tensor

    @property
    def total(self) -> Tensor:
        """Over origins. Its sum over lengths is the output."""
        return self.input + self.constants + self.mlp


@dataclass(frozen=True)
class HeadShares:
    """What passes through each head, of all that arrives: (L, H). A path passes several heads, so shares do not sum to 1."""

    norm: Tensor  # |c| / |y|
    projection: Tensor  # <c, y> / <y, y>

    def ranked(self, by: Literal["norm", "projection"] = "projection") -> list[tuple[int, int, float]]:
        """(layer, head, share), the largest in size first; a projection may be negative."""
        if by not in ("norm", "projection"):
            raise LocaterError(f"by={by!r} is not known: use 'norm' or 'projection'")
        table: Tensor = getattr(self, by)
        rows = [(layer, head, share) for layer, shares in enumerate(table.tolist()) for head, share in enumerate(shares)]
        return sorted(rows, key=lambda row: -abs(row[2]))


@dataclass(frozen=True, repr=False, eq=False)
class Paths:
    """A model, frozen at one input. Made by `decompose`. It shares the model's weights: ask before these are trained on."""

    name: str
    input: Float[Tensor, "B T d"]  # what enters the first block
    output: Float[Tensor, "B T d"]  # what the model itself made of it
    real: Bool[Tensor, "B T"]  # tokens that are not padding
    frozen: Sequence[Step]
    streams: Sequence[Tensor] = field(init=False)  # (B, T, d) in front of each frozen step, replayed; the last is the end

    def __post_init__(self) -> None:
        streams = [self.input]
        for step in self.frozen:
            streams.append(step.replay(streams[-1][None])[0])
        object.__setattr__(self, "streams", streams)

    @property
    def steps(self) -> list[Step]:
        """Where a path has a choice: attention layers, and MLPs that are branches, in the model's order."""
        return [step for step in self.frozen if step.branches is not None]

    @property
    def layers(self) -> int:
        """Attention layers: the length of the longest paths."""
        return sum(step.longer for step in self.steps)

    @property
    def heads(self) -> int:
        return next(step.branches.count for step in self.steps if step.branches is not None and step.longer)

    @property
    def gap(self) -> float:
        """|sum of all paths - output| / |output| over real tokens: rounding, if the layout is right."""
        miss = (self.streams[-1] - self.output)[self.real]
        return float(miss.norm() / self.output[self.real].norm())

    def count(self, length: int) -> int:
        """Paths of that length from the input: C(L, k) H^k, times 2 for every MLP that is a branch."""
        self._check_length(length)
        return math.comb(self.layers, length) * self.heads**length * 2 ** (len(self.steps) - self.layers)

    def contribution(self, path: Path) -> Float[Tensor, "B T d"]:
        """What one path brings from the input to the output."""
        return self.contributions([path])[0]

    def contributions(self, paths: Sequence[Path]) -> Float[Tensor, "n B T d"]:
        """The same for several."""
        for path in paths:
            self._check(path)
        x = self.input.expand(len(paths), *self.input.shape).clone()
        at = -1
        for step in self.frozen:
            if step.branches is not None:
                at += 1
                for choice in sorted({path[at] for path in paths} - {None}, key=int):  # type: ignore[arg-type]
                    rows = [row for row, path in enumerate(paths) if path[at] == choice]
                    x[rows] = step.branches.one(x[rows], choice)  # type: ignore[arg-type]
            x = _normed(step.after, x)
        return x

    def sum_of(self, paths: Sequence[Path]) -> Float[Tensor, "B T d"]:
        """What several paths bring together; a path that is named twice counts twice."""
        total = torch.zeros_like(self.input)
        for start in range(0, len(paths), AT_ONCE):
            total += self.contributions(paths[start : start + AT_ONCE]).sum(0)
        return total

    def by_length(self) -> ByLength:
        """What all paths of length 0, 1, ..., L bring, without listing them: partial sums by length are carried from step to step."""
        state = self.input.new_zeros(3, 1, *self.input.shape)
        state[INPUT, 0] = self.input
        for step in self.frozen:
            state = step.grown(state)
        return ByLength(state[INPUT], state[CONSTANTS], state[MLP])

    def sample(self, length: int, n: int, seed: int = 0) -> list[tuple[int | None, ...]]:
        """`n` paths of that length from the input, each equally likely, with replacement."""
        self._check_length(length)
        if n < 1:
            raise LocaterError(f"n={n}: sample at least one path")
        draw = random.Random(seed)
        return [self._drawn(length, draw) for _ in range(n)]

    def sampled_sum(self, length: int, n: int, seed: int = 0) -> Float[Tensor, "B T d"]:
        """The sum of `n` sampled paths; times count(length) / n it estimates `by_length().input[length]` without bias."""
        return self.sum_of(self.sample(length, n, seed))

    def through(self, layer: int, head: int) -> Float[Tensor, "B T d"]:
        """What all paths that pass a head bring, from every origin."""
        if not (0 <= layer < self.layers and 0 <= head < self.heads):
            raise LocaterError(f"layer {layer}, head {head}: there are {self.layers} layers of {self.heads} heads, numbered from 0")
        return self._through(layer)[head]

    def through_heads(self, tokens: Bool[Tensor, "B T"] | None = None) -> HeadShares:
        """How much of the output passes each head, over `tokens` (all real ones unless given)."""
        tokens = self.real if tokens is None else tokens
        y = self.output[tokens]
        norms, projections = [], []
        for layer in range(self.layers):
            passed = self._through(layer)[:, tokens]  # (H, tokens, d)
            norms.append(passed.flatten(1).norm(dim=1) / y.norm())
            projections.append((passed * y).flatten(1).sum(1) / y.square().sum())
        return HeadShares(torch.stack(norms), torch.stack(projections))

    def _through(self, layer: int) -> Tensor:
        """(H, B, T, d): each head's output, carried to the end by all ways."""
        at = [i for i, step in enumerate(self.frozen) if step.longer][layer]
        step = self.frozen[at]
        assert step.branches is not None
        x = _normed(step.after, step.branches.each(self.streams[at][None])[:, 0] + step.branches.offsets())
        for later in self.frozen[at + 1 :]:
            x = later.onward(x)
        return x

    def _drawn(self, length: int, draw: random.Random) -> tuple[int | None, ...]:
        visited = iter(kept := [False] * self.layers)
        for layer in draw.sample(range(self.layers), length):
            kept[layer] = True
        return tuple(
            (draw.randrange(self.heads) if next(visited) else None) if step.longer else draw.choice((None, 0)) for step in self.steps
        )

    def _check_length(self, length: int) -> None:
        if not 0 <= length <= self.layers:
            raise LocaterError(f"length {length}: paths of {self.name} have lengths 0 to {self.layers}")

    def _check(self, path: Path) -> None:
        steps = self.steps
        if len(path) != len(steps):
            raise LocaterError(f"path {list(path)}: {self.name} has {len(steps)} steps, and a path names a head or None for each")
        for step, choice in zip(steps, path, strict=True):
            count = 0 if step.branches is None else step.branches.count
            if choice is not None and not 0 <= choice < count:
                raise LocaterError(f"path {list(path)}: {step.name} has {count} branches, numbered from 0; None is the skip")


# --- a model, run once and frozen ---------------------------------------------------------------------------------------


def decompose(model: nn.Module, batch: Mapping[str, Tensor] | Tensor, *, mlp: Mlp = "source", final_norm: bool = True) -> Paths:
    """Run `model` once on `batch` (keywords, or its first argument) and freeze it into paths.

    `mlp` is "source" or "linear" (above). The output is what the model's head reads: the stream after the final norm, whose
    denominators are frozen too, or before it with `final_norm=False`. Families: BERT and RoBERTa, GPT-2, Llama and its relatives,
    ViT, Locater's own blocks. Everything is computed in the model's precision, float32 at least. transformers computes Llama's norms,
    and the eager softmax of some, in float32 whatever the model's precision, which shows in `gap`.

    >>> from locater.train import Shape, Transformer
    >>> _ = torch.manual_seed(0)
    >>> model = Transformer(Shape(vocabulary=64, layers=3, width=32, heads=4, kv_heads=2, hidden=48), scale=0.2)
    >>> paths = decompose(model, torch.arange(10)[None])
    >>> found = paths.by_length()                              # 5^3 = 125 paths, by length 0 to 3
    >>> torch.allclose(found.total.sum(0), paths.output, atol=1e-5)
    True
    >>> [paths.count(k) for k in range(4)], tuple(paths.contribution((2, None, 0)).shape)
    ([1, 12, 48, 64], (1, 10, 32))
    >>> torch.allclose(paths.sum_of([(None, None, None)]), found.input[0], atol=1e-5)
    True
    >>> paths.through_heads().norm.shape
    torch.Size([3, 4])
    """
    if mlp not in ("source", "linear"):
        raise LocaterError(f"mlp={mlp!r} is not known: use 'source' or 'linear'")
    layout = _layout(model)
    layers = list(attention_layers(model))
    cross = next((layer.name for layer in layers if layer.kind != "self"), None)
    if cross is not None:
        raise LocaterError(f"{cross}: paths go through one stack, and cross-attention joins two: leave it out of the model")
    reading = _Reading(ModuleWeights(model), layout, layers)
    with reading.listening():
        given = _named(model, batch)
        try:
            run(model, given)
        except LocaterError:
            raise
        except Exception as error:
            raise LocaterError(f"{type(model).__name__}: does not run on this batch ({first_line(error)})") from error
    with torch.no_grad():
        paths = reading.paths(mlp, final_norm, given.get("attention_mask"))
        return _sound(paths, next(model.parameters()).dtype)


def _layout(model: nn.Module) -> Layout:
    kind = config_of(model).get("model_type")
    if kind not in LAYOUTS:
        what = f"model_type {kind!r}" if kind else "a model without a model_type"
        raise LocaterError(f"{type(model).__name__}: {what} is not decomposed into paths; those that are: {', '.join(sorted(LAYOUTS))}")
    return LAYOUTS[kind]


def _named(model: nn.Module, batch: Mapping[str, Tensor] | Tensor) -> dict[str, Tensor]:
    if isinstance(batch, Tensor):
        return {next(iter(inspect.signature(model.forward).parameters)): batch}
    return dict(batch)


def _sound(paths: Paths, dtype: torch.dtype) -> Paths:
    """Refuse a sum that is not the output: then the model has parts that its family does not have."""
    most = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) ** 0.5
    if not paths.gap <= most:
        raise LocaterError(
            f"{paths.name}: its paths sum to its output only within {paths.gap:.1e} (expected {most:.0e}): it has parts that "
            "are not those of its model_type, or its output is not finite"
        )
    return paths


class _Kept(Site):
    """A site that keeps its calls as they are."""

    def _make(self) -> None:
        self.calls: list[Call] = []

    def see(self, call: Call) -> None:
        self.calls.append(call)


@dataclass(frozen=True)
class _Passed:
    given: Tensor
    returned: Tensor


@dataclass
class _Reading:
    """One pass of a model: what its attention was asked, and what passed through the modules that matter."""

    weights: ModuleWeights
    layout: Layout
    layers: Sequence[AttentionLayer]
    passed: dict[str, list[_Passed]] = field(default_factory=dict)
    sites: list[_Kept] = field(default_factory=list)

    @contextmanager
    def listening(self) -> Iterator[None]:
        with ExitStack() as stack:
            interface.install()
            stack.callback(interface.remove)
            for number, layer in enumerate(self.layers):
                module = self.weights.submodule(layer.name)
                site = _Kept(layer.name, number, "self", module, layer.group, layer.heads, [], Switch(), Wanted(), layer)
                self.sites.append(site)
                enter(site)
                stack.callback(leave, site)
            for path in self._watched():
                held = self.passed.setdefault(path, [])
                stack.callback(instead(self.weights.submodule(path), "forward", partial(_keep, held)))
            yield

    def paths(self, mlp: Mlp, final_norm: bool, mask: Tensor | None) -> Paths:
        steps: list[Step] = []
        for layer, site in zip(self.layers, self.sites, strict=True):
            block = self._block(layer)
            steps.append(self._attention(layer, self._call(site), block))
            steps += self._mlp(block, mlp)
        x = upcast(self._once(self._block(self.layers[0])).given)
        end = self._once(self._block(self.layers[-1])).returned
        final = self._final()
        if final is not None and final_norm:
            steps.append(Step(final, after=self._norm(final)))
            end = self._once(final).returned
        real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        if mask is not None and mask.shape == real.shape:
            real = mask.to(x.device).bool()
        return Paths(self.weights.where, x, upcast(end), real, steps)

    def _attention(self, layer: AttentionLayer, call: Call, block: str) -> Step:
        assert layer.value is not None
        assert layer.out is not None
        maps = attention_maps(call)
        before = self._norm(_under(block, self.layout.before))
        value = layer.value.weight().detach().to(maps).unflatten(0, (layer.kv_heads, -1))
        constant = value.new_zeros(value.shape[:2])
        if layer.value.bias is not None:
            constant = constant + layer.value.bias.detach().to(maps).view_as(constant)
        if before is not None and before.shift is not None:
            constant = constant + value @ before.shift
        out = layer.out.weight().detach().to(maps).mT.unflatten(0, (layer.heads, -1))
        bias = _like(layer.out.bias, maps)
        return Step(layer.name, Heads(maps, value, out, before, constant), 1, bias, after=self._norm(_under(block, self.layout.after)))

    def _mlp(self, block: str, mlp: Mlp) -> list[Step]:
        """None where it was taken out, one otherwise; its norm may have stayed."""
        name, around = f"{block}.{self.layout.mlp}", _under(block, self.layout.mlp_after)
        after = self._norm(around) if self._ran(around) else None
        if not self._ran(name):
            return [] if after is None else [Step(name, after=after)]
        observed = upcast(self._once(name).returned)
        if mlp == "source" or not observed.any():
            return [Step(name, observed=observed, after=after)]
        gates, bias = self._gates(block, observed)
        return [Step(name, gates, 0, bias, after=after)]

    def _gates(self, block: str, like: Tensor) -> tuple[Gates, Tensor | None]:
        up, down = f"{block}.{self.layout.up}", f"{block}.{self.layout.down}"
        if not (self._ran(up) and self._ran(down)):
            raise LocaterError(f"{block}: no {self.layout.up} and {self.layout.down}, so its MLP is not made linear: use mlp='source'")
        before = self._norm(_under(block, self.layout.mlp_before))
        (W_up, b_up), (W_down, b_down) = self._linear(up, like), self._linear(down, like)
        z, value = upcast(self._once(up).returned), upcast(self._once(down).given)
        ratio = torch.where(z == 0, 0.0, value / z)
        made = W_up.new_zeros(W_up.shape[0]) if b_up is None else b_up
        if before is not None and before.shift is not None:
            made = made + W_up @ before.shift
        constant = ratio * made + torch.where(z == 0, value, 0.0)  # an activation that is not 0 at 0 has no ratio there
        return Gates(ratio, W_up, W_down, before, constant), b_down

    def _norm(self, path: str | None) -> FrozenNorm | None:
        """The norm at `path`, with the denominators it had."""
        if path is None:
            return None
        module: Any = self.weights.submodule(path)
        eps = getattr(module, "eps", None)
        held = norm(self.weights, path, self.layout.kind, module.variance_epsilon if eps is None else eps)
        x = upcast(self._once(path).given)
        return FrozenNorm(_factor(held, x), _like(held.gain, x), _like(held.bias, x), held.kind == "layer")

    def _linear(self, path: str, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """(out, in) and the bias; GPT-2 stores (in, out)."""
        weight = self.weights.read(f"{path}.weight").detach().to(like)
        return weight.mT if self.layout is GPT2 else weight, _like(optional(self.weights, f"{path}.bias"), like)

    def _watched(self) -> list[str]:
        layout, found = self.layout, [self._block(self.layers[0]), self._block(self.layers[-1])]
        for block in map(self._block, self.layers):
            parts = (layout.before, layout.after, layout.mlp_before, layout.mlp_after, layout.mlp, layout.up, layout.down)
            found += [path for part in parts if part is not None and self._has(path := f"{block}.{part}")]
        final = self._final()
        return list(dict.fromkeys([*found, *([] if final is None else [final])]))

    def _block(self, layer: AttentionLayer) -> str:
        return layer.name.removesuffix(f".{self.layout.attention}")

    def _final(self) -> str | None:
        if self.layout.final is None:
            return None
        stack = self._block(self.layers[0]).rpartition(".")[0]
        return stack.removesuffix(self.layout.stack) + self.layout.final

    def _has(self, path: str) -> bool:
        try:
            self.weights.submodule(path)
        except KeyError:
            return False
        return True

    def _ran(self, path: str | None) -> bool:
        return bool(path and self.passed.get(path))

    def _once(self, path: str) -> _Passed:
        held = self.passed.get(path, [])
        if len(held) != 1:
            raise LocaterError(f"{path}: passed {len(held)} times in one run of the model; paths need every part once")
        return held[0]

    def _call(self, site: _Kept) -> Call:
        if len(site.calls) != 1:
            raise LocaterError(
                f"{site.name}: its attention was heard {len(site.calls)} times in one run of the model, not once: "
                "load it with attn_implementation='sdpa' or 'eager'"
            )
        return site.calls[0]


def attention_maps(call: Call) -> Float[Tensor, "B H T S"]:
    """The weights that a call gave its keys, computed again from its queries, keys and masks. A row that sees no key is zero."""
    q, k = upcast(call.query), upcast(call.key)
    (B, H, T, _), S = q.shape, k.shape[2]
    terms = Terms(call.scale, call.causal, call.window, call.softcap, call.padding, call.documents, call.mask, call.bias, call.alibi)
    terms = full_terms(terms, B, H, T, S)
    logits = terms.logits(q, k.repeat_interleave(H // k.shape[1], 1), slice(0, T), T)
    hidden = ~terms.visible(slice(0, T), T, S, q.device) | (logits == -torch.inf)
    return logits.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0.0)


def _keep(held: list[_Passed], module: nn.Module, forward: Any, *args: Any, **kw: Any) -> Any:
    out = forward(*args, **kw)
    given = args[0] if args else next(iter(kw.values()))
    held.append(_Passed(given.detach(), (out[0] if isinstance(out, tuple) else out).detach()))
    return out


def _factor(norm: Norm, x: Tensor) -> Tensor:
    """One over each token's deviation: (B, T, 1)."""
    if norm.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)


def _like(held: Tensor | None, x: Tensor) -> Tensor | None:
    return None if held is None else held.detach().to(x)


def _under(block: str, part: str | None) -> str | None:
    return None if part is None else f"{block}.{part}"
