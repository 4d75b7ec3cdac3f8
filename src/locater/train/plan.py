"""A training run as data: `Plan` says everything that decides it, `Result` what came of it. Both go to JSON and
back.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self, get_type_hints

from locater.attention import mechanisms
from locater.attention.text import Named, parse_attention
from locater.control.mechanism import check_causality
from locater.data.tokenizer import BYTES
from locater.errors import LocaterError

ATTENTION = ", ".join(m.name for m in mechanisms())
MADE = {"sort": "numbers", "copy": "tokens"}  # tasks that read nothing
LARGEST_COPY = 4096  # tokens of a source that holds a chance for every pair of them
PACE = ("out", "log")  # of no consequence for the weights: a run may be moved, and tell more or less


def option(default: Any, help: str, least: float | None = None, choices: tuple[str, ...] = ()) -> Any:
    """A field of the plan with what the command line says of it, and what values it takes."""
    return field(default=default, metadata={"help": help, "least": least, "choices": choices})


@dataclass(frozen=True)
class Plan:
    """Everything that decides a run. The command line offers the same fields: `--rate 1e-3` is `Plan(rate=1e-3)`.

    >>> Plan(steps=10) == Plan.from_json(Plan(steps=10).to_json())
    True
    """

    out: str = option("run", "Folder of the run.")
    task: str = option("causal", "What is learned.", choices=("causal", "masked", "image", "sort", "copy"))
    corpus: tuple[str, ...] = option(
        (), "Text: a file, a folder or a .tar (.xz and .gz too), may be repeated; none: Python's own."
    )
    images: str | None = option(None, "Images and labels (.npz), for --task image.")
    vocabulary: int = option(
        256,
        "Tokens: 256 are bytes; more are learned from the text (needs tokenizers); fewer for --task copy or sort.",
        least=8,
    )
    layers: int = option(4, "Blocks.", least=1)
    width: int = option(128, "Channels of the residual stream.", least=2)
    heads: int = option(4, "Query heads in a block.", least=1)
    kv_heads: int | None = option(None, "Key heads in a block; as many as query heads unless given.", least=1)
    hidden: int | None = option(
        None, "Channels of the MLP; unless given 8/3 of the width (swiglu) or 4 times (gelu).", least=1
    )
    length: int = option(128, "Tokens in a sequence.", least=2)
    patch: int = option(4, "Pixels on a side of an image's patch.", least=1)
    positions: str | None = option(
        None, "rotary (for text unless given) or learned (for images).", choices=("rotary", "learned")
    )
    qk_norm: bool = option(False, "RMSNorm of queries and keys, as in Qwen3.")
    attention: str = option(
        "softmax",
        f"The mechanism, such as 'gated(per=element)' or 'hybrid(layout=3:1)': {ATTENTION}, hybrid of several.",
    )
    mlp: str = option("swiglu", "The MLP.", choices=("swiglu", "gelu", "linear", "none"))
    norm: str = option(
        "pre", "Norms: before each part, behind it too, or behind the sum.", choices=("pre", "sandwich", "post")
    )
    fusion: str | None = option(
        None, "The output of all layers fused into the last.", choices=("concat", "max", "gate")
    )
    scale: float = option(0.02, "Standard deviation of weights at the start.", least=0)
    masked: float = option(0.15, "Share of tokens hidden, for --task masked.", least=0)
    steps: int = option(1000, "Optimizer steps.", least=1)
    batch: int = option(16, "Sequences in a forward pass.", least=1)
    accumulate: int = option(1, "Forward passes in a step.", least=1)
    rate: float = option(3e-3, "Learning rate at its highest.", least=0)
    warmup: float = option(0.05, "Share of the steps over which the rate rises; then it falls as a cosine.", least=0)
    floor: float = option(0.1, "Share of the rate that is left at the end.", least=0)
    decay: float = option(0.1, "Weight decay of matrices.", least=0)
    clip: float = option(1.0, "Largest norm of the gradient; 0 for no limit.", least=0)
    control: tuple[str, ...] = option((), "A control, such as 'locater(target=2)'; may be repeated.")
    seed: int = option(0, "Of the first weights and of the order of the data.", least=0)
    observe: int = option(50, "Measure every head each so many steps; 0 for never.", least=0)
    evaluate: int = option(200, "Loss on the select split each so many steps; 0 for only at the end.", least=0)
    checkpoint: int = option(200, "Checkpoint each so many steps; 0 for none.", least=0)
    log: int = option(10, "Tell of the run each so many steps.", least=1)
    device: str = option("auto", "cpu, cuda, cuda:1, mps; auto takes what there is.")
    precision: str = option("auto", "auto is bfloat16 on CUDA.", choices=("auto", "float32", "bfloat16"))
    compile: bool = option(False, "torch.compile the model.")

    def __post_init__(self) -> None:
        for item in fields(self):
            _check(item.name, getattr(self, item.name), item.metadata)
        if self.width % self.heads or self.heads % (self.kv_heads or self.heads):
            shared = "" if self.kv_heads is None else f", kv_heads={self.kv_heads}"
            raise LocaterError(f"width={self.width}, heads={self.heads}{shared}: each must be a multiple of the next")
        if (self.width // self.heads) % 2 and self.where == "rotary":
            raise LocaterError(
                f"width={self.width}, heads={self.heads}: rotary positions turn pairs of channels; give heads an even size"
            )
        self._check_data()
        self._check_attention()
        if self.masked >= 1 or self.warmup > 1 or self.floor > 1:
            raise LocaterError(
                f"masked={self.masked}, warmup={self.warmup}, floor={self.floor}: these are shares, 1 at most (masked below 1)"
            )

    def _check_data(self) -> None:
        """Refuse what the task does not read, and sizes of its vocabulary that it cannot have."""
        given = f"corpus={self.corpus[0]}" if self.corpus else "" if self.images is None else f"images={self.images}"
        if self.task == "image" and self.corpus:
            raise LocaterError(f"task=image learns from images alone: leave out corpus={self.corpus[0]}")
        if self.task in MADE and given:
            raise LocaterError(f"task={self.task} makes its own {MADE[self.task]}: leave out {given}")
        if (self.task == "image") != (self.images is not None):
            raise LocaterError("task=image and images=PATH go together: give both or neither")
        if self.task not in MADE and self.vocabulary < BYTES:
            raise LocaterError(f"vocabulary={self.vocabulary}: {BYTES} is the least, but for task=copy and task=sort")
        if self.task == "copy" and self.vocabulary > LARGEST_COPY:
            raise LocaterError(
                f"vocabulary={self.vocabulary}: {LARGEST_COPY} is the most for task=copy, which holds a number for every pair"
            )

    def _check_attention(self) -> None:
        """Refuse a mechanism that the task or the sizes do not fit, and settings it does not have."""
        if self.attention == "softmax":
            return
        try:
            # each kind once
            for held in {layer.name: layer for layer in parse_attention(self.attention, self.layers)}.values():
                self._check_mechanism(held)
        except LocaterError as error:
            raise LocaterError(f"--attention {self.attention}: {error}") from None

    def _check_mechanism(self, held: Named) -> None:
        size = self.width // self.heads
        check_causality(held.mechanism, self.is_causal, f"task={self.task}")
        if held.name == "differential" and self.where == "rotary" and size % 4:
            raise LocaterError(
                f"width={self.width}, heads={self.heads}: differential attention turns pairs in each half of a head"
            )
        tokens = None if self.task == "image" else self.length
        held.check(tokens, width=self.width, heads=self.heads, size=size, kv_heads=self.kv_heads or self.heads)

    @property
    def is_causal(self) -> bool:
        """Whether tokens see those before them alone."""
        return self.task in ("causal", "copy")

    @property
    def where(self) -> str:
        """Kind of positions."""
        return self.positions or ("learned" if self.task == "image" else "rotary")

    @property
    def unread(self) -> dict[str, str]:
        """Options that decide nothing in this run, each with the choice that makes it so; who gives one of them means
        another run.
        """
        found = dict.fromkeys(("vocabulary", "length") if self.task == "image" else ("patch",), f"--task {self.task}")
        if self.task != "masked":
            found["masked"] = f"--task {self.task}"
        return found | ({"hidden": "--mlp none"} if self.mlp == "none" else {})

    def to_dict(self) -> dict[str, Any]:
        return {name: list(x) if isinstance(x, tuple) else x for name, x in asdict(self).items()}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_dict(cls, held: Mapping[str, Any]) -> Self:
        """Refuses what is no field of a plan, and values of the wrong type."""
        hints = {name: hint for name, hint in get_type_hints(cls).items() if name in {f.name for f in fields(cls)}}
        unknown = [name for name in held if name not in hints]
        if unknown:
            raise LocaterError(f"a plan has no {unknown[0]!r}; it has {', '.join(hints)}")
        return cls(**{name: _typed(name, value, hints[name]) for name, value in held.items()})

    @classmethod
    def from_json(cls, text: str) -> Self:
        try:
            held = json.loads(text)
        except ValueError as error:
            raise LocaterError(f"not a plan in JSON ({error})") from None
        if not isinstance(held, dict):
            raise LocaterError(f"a plan is a JSON object of options, not a {type(held).__name__}")
        return cls.from_dict(held)

    @classmethod
    def load(cls, path: Path) -> Self:
        try:
            return cls.from_json(path.read_text(encoding="utf-8"))
        except (LocaterError, UnicodeDecodeError) as error:
            raise LocaterError(f"{path}: {error}") from None

    def difference(self, other: Plan) -> str | None:
        """The first option that makes another run of it, in words."""
        ours, theirs = self.to_dict(), other.to_dict()
        return next(
            (f"{n}={theirs[n]!r}, here {ours[n]!r}" for n in ours if n not in PACE and ours[n] != theirs[n]), None
        )


def _check(name: str, value: Any, held: Mapping[str, Any]) -> None:
    if name == "out" and not value:
        raise LocaterError("out='': give the run a folder")
    if held["choices"] and value is not None and value not in held["choices"]:
        raise LocaterError(f"{name}={value!r}: choose {' or '.join(held['choices'])}")
    if isinstance(value, float) and not math.isfinite(value):
        raise LocaterError(f"{name}={value}: give a finite number")
    if held["least"] is not None and value is not None and value < held["least"]:
        raise LocaterError(f"{name}={value}: {held['least']} is the least")


def _typed(name: str, value: Any, hint: Any) -> Any:
    """The value as the field wants it; JSON has lists for tuples and may write 1 for 1.0."""
    if hint == tuple[str, ...]:
        if isinstance(value, list | tuple) and all(isinstance(x, str) for x in value):
            return tuple(value)
    elif hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    elif isinstance(value, hint) and not (isinstance(value, bool) and hint is not bool):
        return value
    raise LocaterError(f"{name}={value!r}: not a value of the right kind ({getattr(hint, '__name__', hint)})")
