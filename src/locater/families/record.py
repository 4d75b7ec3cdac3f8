"""`Family` and `Block`: everything that Locater has to know about one architecture, in one record.

    FAMILY = Family(
        model_types=("llama", "mistral"),
        layers=layers,       # reads the attention layers: scan, and all that stands on it
        block=LLAMA_BLOCK,   # where norms, attention, MLP and skips of a block are: Surgery and explain
        tap=None,            # how attention is observed that does not pass the interface of transformers
    )

`register(FAMILY)` teaches it to every part of the package. docs/add-a-family.md is the guide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from locater.calls.patching import Undo
from locater.errors import LocaterError
from locater.layers.layer import AttentionLayer
from locater.layers.layout import AttentionLayout
from locater.layers.norm import NormKind
from locater.sources.open_source import Config
from locater.sources.weights import ModuleWeights, Weights

Found = AttentionLayout | AttentionLayer  # where the heads of a layer are, or what they compute
Reader = Callable[[Weights, Config], Iterator[Found]]
Tap = Callable[[nn.Module], Iterator[Undo]]
# the path of a module from its block; a tuple lists alternatives, of which the first that a model has is taken
Part = str | tuple[str, ...] | None


@dataclass(frozen=True)
class Block:
    """Where the parts of a block are, and how it adds them up.

        sequential   y = after_attention(x + attention_out(attention(before_attention(x))))
                     z = after_mlp(y + mlp_out(mlp(before_mlp(y))))
        parallel     z = x + attention(before_attention(x)) + mlp(before_mlp(x))

    Each of the six norms is the path of a module from the block, or None where the block has no such norm. In a
    parallel block without `before_mlp` the MLP reads what attention reads.
    """

    attention: str  # how the names of its self-attention layers end
    norm: NormKind = "layer"  # kind of all norms of the blocks, and of the final one
    before_attention: Part = None
    attention_out: Part = None
    after_attention: Part = None
    before_mlp: Part = None
    mlp_out: Part = None
    after_mlp: Part = None
    other_norms: tuple[str, ...] = ()  # norms that only some models have, around cross-attention for example
    mlp: Part = None  # the MLP, from what it reads to what it adds; None: `up` and `down` alone are modules
    up: Part = None  # its map to the hidden units whose values are gated or activated
    down: Part = None  # its map from the hidden units
    gate_first: bool = False  # `up` is one map with the gate in its first half
    experts: Part = None  # of a mixture: the module of the stacked experts, called with (x, chosen experts, weights)
    shared_up: Part = None  # of a mixture: up and down map of the expert that every token passes
    shared_down: Part = None
    parallel: bool = False
    # where the attention module adds its skip itself: the module inside it whose output is added to the skip
    added: Part = None
    stack: str = "layers"  # the path of the list of blocks, from where `final` is too
    final: Part = None  # the norm after the last block
    gain_offset: float = 0.0  # 1 where norms store w for a gain of 1 + w
    multiplier: float = 1.0  # of what attention and MLP add (Granite)
    mlp_scale: str | None = None  # the tensor that multiplies what the MLP adds, channel by channel (layer scale)
    transposed: bool = False  # linear maps are stored (in, out)
    time_first: bool = False  # the stream is (tokens, batch, width)

    def __post_init__(self) -> None:
        around = (self.attention_out, self.after_attention, self.mlp_out, self.after_mlp, self.added)
        if self.parallel and any(around):
            raise LocaterError("Block: a parallel block has norms in front of attention and of the MLP only")

    @property
    def norms(self) -> tuple[Part, ...]:
        """The six norms, those that it has."""
        norms = (
            self.before_attention,
            self.attention_out,
            self.after_attention,
            self.before_mlp,
            self.mlp_out,
            self.after_mlp,
        )
        return tuple(norm for norm in norms if norm)

    def path(self, layer: AttentionLayer) -> str:
        """The path of the block that a self-attention layer is in."""
        if layer.name != self.attention and not layer.name.endswith(f".{self.attention}"):
            raise LocaterError(f"{layer.name}: the record of its block says that attention is called {self.attention}")
        return layer.name.removesuffix(self.attention).removesuffix(".")


@dataclass(frozen=True)
class BlockModules:
    """The modules of one block of a live model."""

    weights: ModuleWeights
    path: str

    def find(self, part: Part) -> str | None:
        """The path of a part in the model; None where it is not there."""
        modules = self.weights.modules()
        return next((path for path in self._paths(part) if path in modules or not path), None)

    def module(self, part: Part) -> nn.Module:
        """A part that has to be there; a KeyError names the path where it is not."""
        path = self.find(part)
        if path is None:
            raise KeyError(self._paths(part)[-1])
        return self.weights.submodule(path)

    def _paths(self, part: Part) -> list[str]:
        names = (part,) if isinstance(part, str) else part or ()
        return [".".join(filter(None, (self.path, name))) for name in names]


@dataclass(frozen=True)
class Family:
    """One architecture. `model_types` are values of `model_type` in config.json; the rest is described field by field.

    `block` may be a function of the configuration, where settings move the parts of a block; it raises a LocaterError
    for settings that it cannot describe.
    """

    model_types: tuple[str, ...]
    layers: Reader  # (weights, config) -> one AttentionLayout per attention layer, or the AttentionLayer itself
    block: Block | Callable[[Config], Block] | None = None
    tap: Tap | None = None  # attention module -> what takes the tap off again
    # why an attention module cannot be observed, or None where it can
    unobservable: Callable[[nn.Module], str | None] | None = None
    # whether an attention module is of this family, for attention known by its class and not by the model's type
    recognises: Callable[[nn.Module], bool] | None = None

    # the live model in a folder of a checkpoint, where transformers does not know its class
    load: Callable[[Path], nn.Module] | None = None

    def __post_init__(self) -> None:
        types = (self.model_types,) if isinstance(self.model_types, str) else tuple(self.model_types)
        if not types or not all(isinstance(name, str) and name for name in types):
            raise LocaterError(f"Family: model_types={self.model_types!r}: one name or more, as in config.json")
        object.__setattr__(self, "model_types", types)

    def block_for(self, config: Config) -> Block | None:
        """The block of a model with this configuration."""
        return self.block(config) if callable(self.block) else self.block
