"""Settings of small models, drawn at random: where the heads of their attention are stored, norms, positions, masks,
scale, and how each step is written (`spellings.py`). `drawn_models.py` makes the models.

    draw(7)                          settings at random
    Drawn(layout="fused", ...)       what is printed of them, which is the same settings again
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any

from tests.families import spellings

SHARED = 4  # rotary channels that all keys of a latent layer have in common


def usual(name: str) -> str:
    """The usual way to write a step."""
    return next(iter(spellings.SPELLINGS[name]))


@dataclass(frozen=True)
class Drawn:
    """Settings of a model, and the seed of its numbers."""

    seed: int = 0
    layout: str = "separate"  # how maps of queries, keys and values are stored
    heads: int = 4
    kv_heads: int = 4
    size: int = 8  # channels of a head
    width: int = 24
    layers: int = 1
    batch: int = 2
    length: int = 9
    told: bool = True  # the module says how many heads it has
    norm: str = "layer"
    qk_norm: str = "none"
    bias: str = "all"
    positions: str = "none"
    mask: str = "none"
    padding: str = "none"
    scale: float | None = None  # None: one over the root of the size
    scale_of: str = "logits"  # what the scale multiplies
    softcap: float | None = None
    sinks: bool = False
    mapping: str = usual("mapping")
    product: str = usual("product")
    scaling: str = usual("scaling")
    moving: str = usual("moving")
    capping: str = usual("capping")
    masking: str = usual("masking")
    softmax: str = usual("softmax")
    mixing: str = usual("mixing")
    splitting: str = usual("splitting")
    joining: str = usual("joining")
    repeating: str = usual("repeating")
    turning: str = ""  # set where positions turn

    def __post_init__(self) -> None:
        """Steps that are not taken are not spelled, so that what is printed says what is there."""
        for name in self._not_taken():
            object.__setattr__(self, name, "" if name == "turning" else usual(name))
        if self.rotary is not None and self.turning not in spellings.ROTATIONS[self.rotary]:
            object.__setattr__(self, "turning", next(iter(spellings.ROTATIONS[self.rotary])))

    def __repr__(self) -> str:
        """What differs from the usual, on one line."""
        given = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Drawn({', '.join(f'{name}={value!r}' for name, value in given)})"

    @property
    def factor(self) -> float:
        return self.size**-0.5 if self.scale is None else self.scale

    @property
    def fused(self) -> bool:
        return self.product.startswith("functional.scaled_dot_product_attention")

    @property
    def rotary(self) -> str | None:
        return self.positions.removeprefix("rotary ").split()[0] if self.positions.startswith("rotary") else None

    @property
    def turning_channels(self) -> int:
        """Channels of a head that turn."""
        if self.rotary is None:
            return 0
        return SHARED if self.layout in LATENT else self.size // 4 * 2 if "partial" in self.positions else self.size

    @property
    def window(self) -> int | None:
        return int(self.mask.split()[-1]) if "window" in self.mask else None

    @property
    def causal(self) -> bool:
        return self.mask.startswith("causal")

    def _not_taken(self) -> list[str]:
        """Steps that this model does not take, or that another step does."""
        in_one_call = ("scaling", "moving", "masking", "softmax", "mixing", "capping") if self.fused else ()
        no_scaling = self.scale_of != "logits" or self.product == spellings.BADDBMM
        grouped = self.kv_heads < self.heads
        return [
            *in_one_call,
            *(["scaling"] if no_scaling else []),
            *(["capping"] if self.softcap is None else []),
            *(["masking"] if self.mask == self.padding == "none" else []),
            *(["turning"] if self.rotary is None else []),
            *(["mapping"] if self.layout == "Conv1D" else []),
            *(["splitting"] if self.layout in ("by head", *LATENT) else []),
            *(["repeating"] if not grouped else []),
            *(["product", "mixing"] if grouped and self.repeating == spellings.BY_GROUPS else []),
        ]


LATENT = ("latent", "latent of queries too")
# the settings that differ in more than their size
CHOICES: dict[str, tuple[Any, ...]] = {
    "layout": ("separate", "fused", "by head", "Conv1D", *LATENT),
    "norm": ("none", "layer", "rms", "rms 1 + w", "post"),
    "qk_norm": ("none", "rms of heads", "layer of heads", "rms of all"),
    "bias": ("all", "none", "no key"),
    "positions": (
        "none",
        "learned",
        "rotary half",
        "rotary interleaved",
        "rotary half partial",
        "rotary interleaved partial",
        "alibi",
        "alibi by key",
        "table",
    ),
    "mask": ("none", "causal", "causal window 3", "window 3", "causal window 5", "causal window 16"),
    "padding": ("none", "right", "left"),
    "scale_of": ("logits", "queries", "both", "nothing"),
    "scale": (None, 0.25, 0.4),
    "softcap": (None, 2.5),
    "sinks": (False, True),
    "told": (True, False),
}


def draw(seed: int, without: Collection[tuple[str, str]] = (), **fixed: Any) -> Drawn:
    """Settings at random. `without` lists (step, spelling) that are not drawn; `fixed` ones are as given."""
    rng, drawn = random.Random(seed), dict[str, Any](seed=seed)

    def settle(name: str, choices: Sequence[Any] = (), often: int = 0) -> Any:
        """One of `choices`, which are those of CHOICES if none are given; `often` more chances for the first. It is
        drawn in any case, so that `fixed` leaves the others as they are.
        """
        choices = choices or CHOICES[name]
        chosen = rng.choice([*choices, *[choices[0]] * often])
        drawn[name] = fixed.get(name, chosen)
        return drawn[name]

    def spell(name: str, choices: Collection[str]) -> None:
        """The usual spelling in three of ten models."""
        as_usual, chosen = rng.random() < 0.3, rng.choice([x for x in choices if (name, x) not in without])
        drawn[name] = fixed.get(name, next(iter(choices)) if as_usual else chosen)

    layout, heads = settle("layout"), settle("heads", (1, 2, 3, 4, 4, 6))
    latent = layout in LATENT
    groups = [n for n in range(1, heads + 1) if heads % n == 0]
    settle("kv_heads", [heads] if latent else [heads, *groups])
    for name, sizes in {"size": (4, 6, 8), "width": (20, 24, 32), "batch": (1, 2, 3, 4), "length": (8, 9, 10)}.items():
        settle(name, sizes)
    settle("layers", (1, 2), often=2)
    settle("told", often=1)
    settle("norm")
    norms = CHOICES["qk_norm"]
    settle("qk_norm", norms[:1] if latent else norms[:3] if layout == "by head" else norms, often=2)
    settle("bias", CHOICES["bias"][: 3 if layout == "separate" else 2])
    positions = settle("positions", [x for x in CHOICES["positions"] if not (latent and "partial" in x)])
    mask, padding = settle("mask"), settle("padding", often=1)
    settle("scale_of", often=2)
    settle("scale", often=1)
    causal_alone = mask == "causal" and padding == "none" and positions not in ("table", "alibi", "alibi by key")
    products = [x for x in spellings.PRODUCTS if x != spellings.FUSED_CAUSAL]
    spell("product", [*products, *[spellings.FUSED_CAUSAL] * (4 if causal_alone else 0)])
    fused = Drawn(**drawn).fused
    settle("softcap", [None] if fused else (), often=2)
    settle("sinks", [False] if fused else (), often=2)
    other = spellings.BY_GROUPS if fused else spellings.SHARED_BY_FUSED
    spell("repeating", [x for x in spellings.REPEATS if x != other])
    blind = padding == "left" and mask.startswith("causal")  # rows of padding that see no key
    spell("masking", [x for x in spellings.MASKINGS if not (blind and x in spellings.INFINITE)])
    for name in ("mapping", "scaling", "moving", "capping", "softmax", "mixing", "splitting", "joining"):
        spell(name, spellings.SPELLINGS[name])
    spell("turning", spellings.ROTATIONS["interleaved" if "interleaved" in positions else "half"])
    return Drawn(**{**drawn, **fixed})
