"""A training run as data: `Plan` has every setting that decides it, and goes to JSON and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self, get_type_hints

from locater.errors import LocaterError
from locater.inputs.tokenizer import BYTES
from locater_lab.mechanisms import mechanisms
from locater_lab.mechanisms.stack import LayerAttention, parse_attention
from locater_lab.mechanisms.swap import check_causality

# What a plan is refused for: sizes that do not fit together, data that a task does not read, attention that does
# not fit.


GENERATED = {"sort": "numbers", "copy": "tokens", "ngram": "tokens"}  # tasks that generate their data, and read none
LEAST_VOCABULARY = {"sort": 8, "copy": 8, "ngram": 2}  # of those tasks; all others have bytes at least
LARGEST_COPY = 4096  # vocabulary of --task copy, whose source has a probability for every pair of tokens
LARGEST_TABLE = 4096  # probabilities in a table of --task ngram, of which there is one per sequence


def check_plan_sizes(plan: Plan) -> None:
    """Refuse sizes and shares that do not fit together."""
    if plan.width % plan.heads or plan.heads % (plan.kv_heads or plan.heads):
        shared = "" if plan.kv_heads is None else f", kv_heads={plan.kv_heads}"
        raise LocaterError(f"width={plan.width}, heads={plan.heads}{shared}: each must be a multiple of the next")
    if (plan.width // plan.heads) % 2 and plan.where == "rotary":
        raise LocaterError(
            f"width={plan.width}, heads={plan.heads}: rotary positions rotate pairs of channels; "
            "give heads an even size"
        )
    if plan.width % 2 and plan.where == "sinusoidal":
        raise LocaterError(f"width={plan.width}: sinusoidal positions are pairs of channels: give an even width")
    if plan.masked >= 1 or plan.dropout >= 1 or plan.beta2 >= 1 or plan.floor > 1:
        raise LocaterError(
            f"masked={plan.masked}, dropout={plan.dropout}, beta2={plan.beta2}, floor={plan.floor}: "
            "these are shares, below 1 (floor 1 at most)"
        )
    if plan.warmup > 1 and plan.warmup != int(plan.warmup):
        raise LocaterError(f"warmup={plan.warmup}: up to 1 a share of the steps, above a whole number of them")


def check_plan_data(plan: Plan) -> None:
    """Refuse data that the task does not read, and a vocabulary that it cannot have."""
    source = f"corpus={plan.corpus[0]}" if plan.corpus else "" if plan.images is None else f"images={plan.images}"
    if plan.reads_images and plan.corpus:
        raise LocaterError(f"task={plan.task} learns from images alone: leave out {source}")
    if plan.task in GENERATED and source:
        raise LocaterError(f"task={plan.task} makes its own {GENERATED[plan.task]}: leave out {source}")
    if plan.reads_images != (plan.images is not None):
        task = plan.task if plan.reads_images else "image or diffusion"
        raise LocaterError(f"task={task} and images=PATH go together: give both or neither")
    _check_splits(plan)
    if plan.words and not plan.is_text:
        raise LocaterError(f"task={plan.task} has no text: leave out words")
    if plan.task == "classify" and len(plan.corpus) < 2:
        raise LocaterError("task=classify needs a corpus for each class: give --corpus twice or more")
    if plan.words and plan.vocabulary == BYTES:  # the default of a plan without words
        raise LocaterError(
            f"vocabulary={BYTES}, words=True: {BYTES} are bytes: give --vocabulary 0 for all words, or another"
        )
    if plan.task not in GENERATED and not plan.words and plan.vocabulary < BYTES:
        raise LocaterError(
            f"vocabulary={plan.vocabulary}: must be at least {BYTES}, except with task=copy, task=ngram and "
            "task=sort, or with words"
        )
    if plan.vocabulary < LEAST_VOCABULARY.get(plan.task, 0):
        raise LocaterError(
            f"vocabulary={plan.vocabulary}: must be at least {LEAST_VOCABULARY[plan.task]} with task={plan.task}"
        )
    if plan.task == "copy" and plan.vocabulary > LARGEST_COPY:
        raise LocaterError(
            f"vocabulary={plan.vocabulary}: must be at most {LARGEST_COPY} with task=copy, "
            "which stores a number for every pair of tokens"
        )
    if plan.task == "ngram":
        _check_ngram(plan)


def _check_splits(plan: Plan) -> None:
    """Refuse texts for select and report, and a start token, where the task makes its own; and one of the texts
    without the other.
    """
    for name, paths in (("select", plan.select), ("report", plan.report)):
        if paths and plan.task not in ("causal", "masked"):
            raise LocaterError(f"task={plan.task} makes its own splits: leave out {name}={paths[0]}")
    if plan.bos and plan.task not in ("causal", "masked"):
        raise LocaterError(f"task={plan.task} has no start token to choose: leave out bos")
    if bool(plan.select) != bool(plan.report):
        raise LocaterError("select=PATH and report=PATH go together: give both or neither")


def _check_ngram(plan: Plan) -> None:
    """Refuse parents that are no distances within a sequence, and tables that are too large."""
    distances = plan.distances
    if max(distances) > plan.length:
        raise LocaterError(f"parents={plan.parents}: the farthest is beyond the length of {plan.length}")
    if plan.vocabulary ** (len(distances) + 1) > LARGEST_TABLE:
        raise LocaterError(
            f"vocabulary={plan.vocabulary}, parents={plan.parents}: a table would have "
            f"{plan.vocabulary ** (len(distances) + 1):,} probabilities, {LARGEST_TABLE:,} at most: "
            "give a smaller --vocabulary, such as 3"
        )


def check_plan_attention(plan: Plan) -> None:
    """Refuse a mechanism that does not fit the task or the sizes, and options that it does not have."""
    for option, text in (("--attention", plan.attention), ("--convert", plan.convert)):
        if text is None or text == "softmax":
            continue
        try:
            layers = parse_attention(text, plan.layers)
            for layer in {layer.name: layer for layer in layers}.values():  # each mechanism once
                _check_mechanism(plan, layer)
        except LocaterError as error:
            raise LocaterError(f"{option} {text}: {error}") from None
    if plan.convert_at is not None and plan.convert is None:
        raise LocaterError(f"convert_at={plan.convert_at}: to what? Give --convert MECHANISM too")
    if plan.convert == plan.attention:
        raise LocaterError(f"--convert {plan.convert}: that is the attention of the model already")
    if plan.conversion_step > plan.steps:
        raise LocaterError(f"convert_at={plan.convert_at}: the run ends at step {plan.steps}")


def _check_mechanism(plan: Plan, layer: LayerAttention) -> None:
    size = plan.width // plan.heads
    check_causality(layer.mechanism, plan.is_causal, f"task={plan.task}")
    if layer.name == "differential" and plan.where == "rotary" and size % 4:
        raise LocaterError(
            f"width={plan.width}, heads={plan.heads}: differential attention rotates pairs of channels in each "
            "half of a head: give heads a size that is a multiple of 4"
        )
    tokens = None if plan.reads_images else plan.length
    layer.check(tokens, width=plan.width, heads=plan.heads, size=size, kv_heads=plan.kv_heads or plan.heads)


ATTENTION = ", ".join(m.name for m in mechanisms())


def option(default: Any, help: str, least: float | None = None, choices: tuple[str, ...] = ()) -> Any:
    """A field of the plan, with its help text on the command line and the values that it takes."""
    return field(default=default, metadata={"help": help, "least": least, "choices": choices})


@dataclass(frozen=True)
class Plan:
    """Every setting of a run. The command line offers the same fields: `--rate 1e-3` is `Plan(rate=1e-3)`.

    >>> Plan(steps=10) == Plan.from_json(Plan(steps=10).to_json())
    True
    """

    out: str = option("run", "Folder of the run.")
    task: str = option(
        "causal", "What the model learns.", choices=("causal", "masked", "classify", "image", "diffusion", *GENERATED)
    )
    corpus: tuple[str, ...] = option(
        (),
        "Text: a file, a folder or a .tar (.xz and .gz too), may be repeated; or a stream of tokens (.tokens.json), "
        "which a run sees once. Default: Python's documentation. "
        "With --task classify, each is one class.",
    )
    select: tuple[str, ...] = option(
        (), "Validation text, in place of a share of the corpus: a file or folder, may be repeated."
    )
    report: tuple[str, ...] = option(
        (), "Test text that results are reported on, in place of a share of the corpus. Needs --select."
    )
    images: str | None = option(None, "Pictures with labels (.npz), for --task image and diffusion.")
    vocabulary: int = option(
        None,  # 256, or with words 0
        "Size of the vocabulary: 256 are bytes; more are byte pairs learned from the text (needs tokenizers); "
        "fewer for --task copy, ngram or sort. Default 256. With --words: how many of the most frequent words to keep. "
        "Default 0, which is all.",
        least=0,
    )
    words: bool = option(
        False,
        "Use whole words as tokens, split at white space, instead of bytes; words outside the vocabulary are <unk>.",
    )
    bos: bool = option(False, "Put a start token in front of every sequence of text; it counts towards --length.")
    parents: str = option(
        "1", "Distances to the earlier tokens that determine the next one, such as 1,2; for --task ngram."
    )
    concentration: float = option(
        1.0,
        "Concentration of the Dirichlet prior of transition tables, for --task ngram: small values are nearly deterministic.",
        least=0.01,
    )
    layers: int = option(4, "Blocks.", least=1)
    width: int = option(128, "Channels of the residual stream.", least=2)
    heads: int = option(4, "Query heads in a layer.", least=1)
    kv_heads: int | None = option(None, "Key-value heads in a layer. Default: as many as query heads.", least=1)
    hidden: int | None = option(
        None, "Channels of the MLP. Default: 8/3 of the width (swiglu) or 4 times the width (others).", least=1
    )
    length: int = option(128, "Tokens in a sequence.", least=2)
    patch: int = option(4, "Side of an image patch in pixels.", least=1)
    positions: str | None = option(
        None,
        "rotary (the default for text), learned (for images), sinusoidal: sines and cosines added to embeddings; or none.",
        choices=("rotary", "learned", "sinusoidal", "none"),
    )
    qk_norm: bool = option(False, "RMSNorm of queries and keys, as in Qwen3.")
    attention: str = option(
        "softmax",
        f"The mechanism, such as 'gated(per=element)' or 'hybrid(layout=3:1)': {ATTENTION}, hybrid of several.",
    )
    convert: str | None = option(
        None, "Replace --attention by this mechanism after step --convert-at; the weights stay as they are."
    )
    convert_at: int | None = option(
        None,
        "Step after which --convert replaces the attention. Default: the last step, with no training after it.",
        least=1,
    )
    mlp: str = option("swiglu", "The MLP.", choices=("swiglu", "gelu", "relu", "linear", "none"))
    norm: str = option(
        "pre",
        "Norms of a block: before attention and MLP (pre), before and after each (sandwich), after the sums (post), or none.",
        choices=("pre", "sandwich", "post", "none"),
    )
    build: str = option(
        "llama",
        "How the rest of the model is built: as Llama (RMSNorm, no biases), or as a language model of fairseq (LayerNorm, biases, "
        "first weights by Xavier, no last norm behind --norm post).",
        choices=("llama", "fairseq"),
    )
    fusion: str | None = option(
        None,
        "Compute the final output from the outputs of all layers, fused this way.",
        choices=("concat", "max", "gate"),
    )
    scale: float = option(0.02, "Standard deviation of the initial weights.", least=0)
    dropout: float = option(0.0, "Share of channels set to zero after embeddings, attention and MLP.", least=0)
    masked: float = option(0.15, "Share of tokens to mask, for --task masked.", least=0)
    steps: int = option(1000, "Optimizer steps.", least=1)
    batch: int = option(16, "Sequences in a forward pass.", least=1)
    accumulate: int = option(1, "Forward passes in a step.", least=1)
    rate: float = option(3e-3, "Peak learning rate.", least=0)
    warmup: float = option(0.05, "Linear warm-up: a share of the steps up to 1, a number of steps above.", least=0)
    schedule: str = option(
        "cosine",
        "How the rate falls after the warm-up: as a cosine to the floor, or with the inverse square root of the step.",
        choices=("cosine", "inverse_sqrt"),
    )
    floor: float = option(0.1, "Final learning rate of the cosine, as a share of the peak.", least=0)
    optimizer: str = option(
        "adamw",
        "AdamW; Muon for matrices inside blocks and AdamW for the rest; or SGD with momentum 0.9.",
        choices=("adamw", "muon", "sgd"),
    )
    beta2: float = option(0.95, "Decay of AdamW's average of squared gradients.", least=0)
    decay: float = option(0.1, "Weight decay, on matrices only.", least=0)
    decay_qk: float | None = option(None, "Weight decay of query and key maps. Default: that of --decay.", least=0)
    clip: float = option(1.0, "Clip gradients to this norm; 0 for no limit.", least=0)
    control: tuple[str, ...] = option((), "Attach a control, such as 'locater(target=2)'; may be repeated.")
    seed: int = option(0, "Seed of the initial weights and of the order of the data.", least=0)
    observe: int = option(50, "Measure every head every N steps; 0 for never.", least=0)
    evaluate: int = option(200, "Evaluate the select split every N steps; 0 for only at the end.", least=0)
    checkpoint: int = option(200, "Write a checkpoint every N steps; 0 for none.", least=0)
    keep: int = option(2, "Keep this many of the last checkpoints; 0 for all of them.", least=0)
    log: int = option(10, "Report progress every N steps.", least=1)
    device: str = option("auto", "cpu, cuda, cuda:1, mps; auto is cuda where there is a GPU.")
    precision: str = option(
        "auto", "auto is bfloat16 on CUDA, float32 elsewhere.", choices=("auto", "float32", "bfloat16")
    )
    compile: bool = option(False, "Compile the model with torch.compile.")
    deterministic: bool = option(
        True, "On a GPU, use deterministic algorithms, so that equal plans give equal weights."
    )

    def __post_init__(self) -> None:
        if self.vocabulary is None:
            object.__setattr__(self, "vocabulary", 0 if self.words else BYTES)
        for item in fields(self):
            _check(item.name, getattr(self, item.name), item.metadata)
        check_plan_sizes(self)
        check_plan_data(self)
        check_plan_attention(self)

    @property
    def is_causal(self) -> bool:
        """Whether a token attends only to itself and earlier ones."""
        return self.task in ("causal", "copy", "ngram")

    @property
    def attention_after(self) -> tuple[LayerAttention, ...]:
        """The mechanism of each layer at the end of the run."""
        return parse_attention(self.convert or self.attention, self.layers)

    @property
    def conversion_step(self) -> int:
        """The step after which `convert` takes the place of `attention`."""
        return self.convert_at or self.steps

    @property
    def reads_images(self) -> bool:
        return self.task in ("image", "diffusion")

    @property
    def is_text(self) -> bool:
        """Whether the model learns from text."""
        return self.task in ("causal", "masked", "classify")

    @property
    def distances(self) -> tuple[int, ...]:
        """The parents of --task ngram as numbers, nearest first."""
        words = self.parents.split(",")
        if not all(word.strip().isdecimal() and int(word) for word in words) or len({*map(int, words)}) < len(words):
            raise LocaterError(f"parents={self.parents!r}: give distances from 1 on, each once, such as 1 or 1,2")
        return tuple(sorted(map(int, words)))

    @property
    def where(self) -> str:
        """Kind of positions: those of the plan, or the default of the task."""
        return self.positions or ("learned" if self.reads_images else "rotary")

    @property
    def unread(self) -> dict[str, str]:
        """Options that have no effect in this run, each with the choice that makes it so. Setting one of them is a
        mistake.
        """
        ignored = dict.fromkeys(("vocabulary", "length") if self.reads_images else ("patch",), f"--task {self.task}")
        if self.task != "masked":
            ignored["masked"] = f"--task {self.task}"
        if self.task != "ngram":
            ignored |= dict.fromkeys(("parents", "concentration"), f"--task {self.task}")
        if self.schedule == "inverse_sqrt":
            ignored["floor"] = "--schedule inverse_sqrt"
        if self.optimizer == "sgd":
            ignored["beta2"] = "--optimizer sgd"
        return ignored | ({"hidden": "--mlp none"} if self.mlp == "none" else {})

    def to_dict(self) -> dict[str, Any]:
        return {name: list(x) if isinstance(x, tuple) else x for name, x in asdict(self).items()}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> Self:
        """Refuses names that are no field of a plan, and values of the wrong type."""
        hints = {name: hint for name, hint in get_type_hints(cls).items() if name in {f.name for f in fields(cls)}}
        unknown = [name for name in options if name not in hints]
        if unknown:
            raise LocaterError(f"a plan has no {unknown[0]!r}; it has {', '.join(hints)}")
        return cls(**{name: _convert_type(name, value, hints[name]) for name, value in options.items()})

    @classmethod
    def from_json(cls, text: str) -> Self:
        try:
            options = json.loads(text)
        except ValueError as error:
            raise LocaterError(f"not a plan in JSON ({error})") from None
        if not isinstance(options, dict):
            raise LocaterError(f"a plan is a JSON object of options, not a {type(options).__name__}")
        return cls.from_dict(options)

    @classmethod
    def load(cls, path: Path) -> Self:
        try:
            return cls.from_json(path.read_text(encoding="utf-8"))
        except (LocaterError, UnicodeDecodeError) as error:
            raise LocaterError(f"{path}: {error}") from None


def _check(name: str, value: Any, allowed: Mapping[str, Any]) -> None:
    """Refuse a value that the metadata of its field does not allow."""
    choices, least = allowed["choices"], allowed["least"]
    if name == "out" and not value:
        raise LocaterError("out='': give the run a folder")
    if choices and value is not None and value not in choices:
        raise LocaterError(f"{name}={value!r}: choose {' or '.join(choices)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise LocaterError(f"{name}={value}: give a finite number")
    if least is not None and value is not None and value < least:
        raise LocaterError(f"{name}={value}: must be at least {least}")


def _convert_type(name: str, value: Any, hint: Any) -> Any:
    """The value in the type of its field: JSON has lists for tuples, and may write 1 for 1.0."""
    if hint == tuple[str, ...]:
        if isinstance(value, list | tuple) and all(isinstance(x, str) for x in value):
            return tuple(value)
    elif hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    elif isinstance(value, hint) and not (isinstance(value, bool) and hint is not bool):
        return value
    raise LocaterError(f"{name}={value!r}: must be of type {getattr(hint, '__name__', hint)}")
