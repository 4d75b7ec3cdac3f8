"""The unseen runs of the early-warning record: which models and optimizers, which causes of failure, in which order.

docs/results/early-warning-plan.md says why. Everything that is drawn (the step at which a fault begins) is drawn from
the name of the run, so that the list is the same wherever it is made.
"""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from locater_lab.models.shape import Shape
from locater_lab.models.transformer import Transformer

STEPS, LENGTH, BATCH = 600, 128, 32
WORDS = 2048  # of the vocabulary of words
HEALTHY = 5  # runs of every kind that are left alone
FACTORS = (1.0, 1.0, 1.0, 0.8, 1.25)  # of the kind's rate, in these


@dataclass(frozen=True)
class ModelKind:
    """A model and how it is usually trained. `build` names a class of transformers, or `own` for locater_lab.models."""

    name: str
    build: str
    layers: int
    width: int
    heads: int
    text: str  # wiki: bytes of Wikipedia; words: its 2,048 most frequent words; docs: bytes of Python's documentation
    optimizer: str
    rate: float
    dtype: str
    kv_heads: int | None = None
    own: tuple[tuple[str, Any], ...] = ()  # fields of `Shape`
    warmup: int = 50
    cosine: bool = False  # to a tenth of the rate; else the rate stays

    @property
    def model(self) -> str:
        """The family that is left out: mechanism, positions and norm."""
        return FAMILY[self.name]


@dataclass(frozen=True)
class TrainingRun:
    """One run: a kind, and what was changed to make it fail. Without a cause nothing was but the seed and the rate."""

    kind: str
    name: str
    seed: int
    cause: str = ""
    rate: float = 1.0  # times the kind's
    warmup: int | None = None  # None is the kind's
    clip: float = 1.0
    weights: float = 1.0  # times all initial weights of two axes
    query_key: float = 1.0  # times the initial query and key maps
    beta2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.9
    decay: float = 0.1
    onset: int | None = None  # the first step of what follows
    until: int = STEPS
    jump: float = 1.0  # the rate is multiplied by this from onset to until
    growth: float = 1.0  # the rate is multiplied by this at every step from onset on
    data: str = ""  # shuffled, random, relabelled; creeping: a share of shuffled sequences that grows to 1


def _shape_fields(**fields: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(fields.items())


LEARNED = _shape_fields(positions="learned", mlp="gelu")
POST = _shape_fields(norm="post", mlp="gelu")
KINDS = (
    ModelKind("gpt2-a", "GPT2", 4, 128, 4, "wiki", "adamw", 2e-3, "bfloat16"),
    ModelKind("gpt2-b", "GPT2", 2, 192, 6, "docs", "sgd", 0.3, "float32"),
    ModelKind("gpt2-c", "GPT2", 6, 96, 6, "words", "muon", 2e-3, "float16", cosine=True),
    ModelKind("llama-a", "Llama", 2, 64, 4, "docs", "adamw", 3e-3, "float32", cosine=True),
    ModelKind("llama-b", "Llama", 8, 96, 4, "wiki", "adamw", 1e-3, "float16", kv_heads=2),
    ModelKind("llama-c", "Llama", 4, 128, 8, "wiki", "muon", 2e-3, "bfloat16"),
    ModelKind("llama-d", "Llama", 4, 128, 2, "words", "sgd", 0.3, "bfloat16"),
    ModelKind("qwen3-a", "Qwen3", 4, 128, 4, "wiki", "adamw", 3e-3, "bfloat16", kv_heads=2, cosine=True),
    ModelKind("qwen3-b", "Qwen3", 6, 64, 4, "docs", "muon", 2e-3, "float32"),
    ModelKind("qwen3-c", "Qwen3", 2, 128, 4, "words", "adamw", 2e-3, "float16"),
    ModelKind("olmo2", "Olmo2", 6, 128, 4, "wiki", "adamw", 2e-3, "bfloat16"),
    ModelKind("gemma2", "Gemma2", 4, 128, 4, "wiki", "adamw", 2e-3, "bfloat16", kv_heads=2),
    ModelKind("softcap", "own", 4, 96, 4, "docs", "adamw", 2e-3, "float32", own=(*LEARNED, ("attention", "softcap"))),
    ModelKind("neox", "GPTNeoX", 4, 128, 4, "docs", "adamw", 2e-3, "float16", cosine=True),
    ModelKind("opt", "OPT", 4, 128, 4, "words", "adamw", 2e-3, "float32"),
    ModelKind("bloom", "Bloom", 4, 128, 8, "wiki", "adamw", 2e-3, "bfloat16"),
    ModelKind("starcoder2", "Starcoder2", 4, 96, 4, "docs", "sgd", 0.3, "float32", kv_heads=2),
    ModelKind("post-a", "own", 6, 128, 4, "wiki", "adamw", 1e-3, "float32", own=POST, warmup=100),
    ModelKind("post-b", "own", 12, 64, 4, "docs", "adamw", 5e-4, "bfloat16", own=POST, warmup=100),
    ModelKind("sandwich", "own", 6, 96, 4, "wiki", "muon", 2e-3, "bfloat16", own=_shape_fields(norm="sandwich")),
    ModelKind(
        "sink",
        "own",
        4,
        128,
        4,
        "wiki",
        "adamw",
        2e-3,
        "bfloat16",
        own=_shape_fields(attention="learned_sink"),
        cosine=True,
    ),
    ModelKind(
        "plus-one",
        "own",
        3,
        192,
        6,
        "words",
        "adamw",
        2e-3,
        "bfloat16",
        own=(*LEARNED, ("attention", "softmax_plus_one")),
    ),
)
FAMILY = {
    **dict.fromkeys(("gpt2-a", "gpt2-b", "gpt2-c", "opt"), "learned positions, LayerNorm"),
    **dict.fromkeys(("llama-a", "llama-b", "llama-c", "llama-d", "starcoder2", "neox"), "rotary"),
    **dict.fromkeys(("qwen3-a", "qwen3-b", "qwen3-c", "olmo2"), "QK-norm"),
    **dict.fromkeys(("gemma2", "softcap"), "softcap"),
    **dict.fromkeys(("post-a", "post-b"), "post-norm"),
    **dict.fromkeys(("sink", "plus-one"), "softmax with a sink of its own"),
    "bloom": "ALiBi",
    "sandwich": "sandwich norm",
}
BY_NAME = {kind.name: kind for kind in KINDS}


def healthy_runs() -> list[TrainingRun]:
    """Runs that are left alone."""
    return [
        TrainingRun(kind.name, f"{kind.name} healthy {i + 1}", seed=100 + i, rate=FACTORS[i])
        for i in range(HEALTHY)
        for kind in KINDS
    ]


def forced_runs() -> list[TrainingRun]:
    """Runs that are pushed to fail, by cause."""
    runs: list[TrainingRun] = []

    def add(cause: str, kinds: str, *variants: dict[str, Any], begins: bool = False) -> None:
        for i, kind in enumerate(kinds.split()):
            name = f"{kind} {cause} {i + 1}"
            change = dict(variants[i % len(variants)])
            if begins:
                change["onset"] = random.Random(name).randint(150, 400)
            if "lasts" in change:
                change["until"] = change["onset"] + change.pop("lasts")
            runs.append(TrainingRun(kind, name, seed=200 + len(runs), cause=cause, **change))

    def rates(*factors: float, **change: Any) -> list[dict[str, Any]]:
        return [dict(rate=factor, **change) for factor in factors]

    free = dict(clip=math.inf)
    add("hot rate", "gpt2-a llama-a olmo2 softcap opt bloom sink plus-one", *rates(50, 100))
    add("no warm-up", "gpt2-a llama-b gemma2 neox opt sandwich", *rates(30, 100, warmup=0, **free))
    jumps = [dict(jump=factor) for factor in (20, 50, 100)]
    add("sudden rate", "gpt2-c llama-c qwen3-a softcap bloom post-a sink plus-one", *jumps, begins=True)
    growth: list[dict[str, Any]] = [dict(growth=factor, onset=100) for factor in (1.03, 1.015)]
    add("rising rate", "gpt2-a llama-a qwen3-c gemma2 neox opt sandwich", *growth)
    spoilt: list[dict[str, Any]] = [
        dict(data="shuffled"),
        dict(data="random", lasts=80),
        dict(data="relabelled"),
        dict(data="creeping"),
    ]
    add("bad data", "gpt2-b llama-c qwen3-b gemma2 post-b starcoder2 plus-one olmo2", *spoilt, begins=True)
    overflow: list[dict[str, Any]] = [*rates(50, **free), dict(decay=-6, **free)]
    add("float16 overflow", "gpt2-c llama-b qwen3-c neox llama-b qwen3-c", *overflow)
    add(
        "post-norm without warm-up", "post-a post-b post-a post-b post-a post-b", *rates(6, 6, 20, 20, 60, 60, warmup=0)
    )
    start: list[dict[str, Any]] = [dict(weights=8, rate=10), dict(query_key=300, rate=30), dict(weights=8, rate=30)]
    add("large start", "gpt2-a llama-a bloom opt sink softcap", *start)
    constants: list[dict[str, Any]] = [
        dict(beta2=0.9999, warmup=0),
        dict(beta2=0.5),
        dict(beta2=0.9999, eps=1e-16, warmup=0),
    ]
    add(
        "optimizer constants",
        "llama-a neox qwen3-a opt gpt2-a sink",
        *(dict(rate=50, **change) for change in constants),
    )
    hot: list[dict[str, Any]] = [dict(growth=1.02, onset=100, **free), *rates(1, momentum=0.99, **free), *rates(4)]
    add("SGD too hot", "gpt2-b llama-d starcoder2 llama-d starcoder2 gpt2-b", *hot)
    add("negative decay", "gpt2-a llama-c qwen3-a gemma2 bloom sandwich", dict(decay=-6), dict(decay=-3))
    return runs


def all_runs() -> list[TrainingRun]:
    """In the order in which they are made: three healthy runs of each kind, the forced ones, the other healthy ones."""
    healthy = healthy_runs()
    return [*healthy[: 3 * len(KINDS)], *forced_runs(), *healthy[3 * len(KINDS) :]]


def rate_at(kind: ModelKind, run: TrainingRun, step: int) -> float:
    """The learning rate of a step, counted from 1."""
    warmup = kind.warmup if run.warmup is None else run.warmup
    rate = kind.rate * run.rate * min(1.0, step / max(1, warmup))
    if kind.cosine:
        rate *= 0.55 + 0.45 * math.cos(math.pi * step / STEPS)
    if run.onset is not None and run.onset <= step:
        rate *= run.growth ** (step - run.onset + 1) * (run.jump if step < run.until else 1.0)
    return rate


def vocabulary_size(kind: ModelKind) -> int:
    return WORDS if kind.text == "words" else 256


def build_model(kind: ModelKind, run: TrainingRun) -> nn.Module:
    """The model of a kind, its initial weights multiplied as the run has it."""
    if kind.build == "own":
        sizes: dict[str, Any] = dict(layers=kind.layers, width=kind.width, heads=kind.heads)
        sizes |= dict(kv_heads=kind.kv_heads or kind.heads)
        shape = Shape(vocabulary=vocabulary_size(kind), hidden=3 * kind.width, length=LENGTH, **sizes, **dict(kind.own))
        model: nn.Module = Transformer(shape)
    else:
        model = _transformers_model(kind)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1:
                p.mul_(run.weights)
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                p.mul_(math.sqrt(run.query_key))
    return model


def _transformers_model(kind: ModelKind) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    tokens = dict(vocab_size=vocabulary_size(kind), bos_token_id=0, eos_token_id=0, pad_token_id=None)
    layers, width, heads = kind.layers, kind.width, kind.heads
    if kind.build == "GPT2":
        sizes: dict[str, Any] = dict(n_embd=width, n_layer=layers, n_head=heads, n_positions=LENGTH)
        sizes |= dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    elif kind.build == "Bloom":
        sizes = dict(hidden_size=width, n_layer=layers, n_head=heads)
    elif kind.build == "OPT":
        sizes = dict(hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, ffn_dim=3 * width)
        sizes |= dict(word_embed_proj_dim=width, max_position_embeddings=LENGTH, dropout=0.0)
    else:
        sizes = dict(
            hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=3 * width
        )
        sizes |= dict(max_position_embeddings=LENGTH)
        if kind.build != "GPTNeoX":
            sizes |= dict(num_key_value_heads=kind.kv_heads or heads, head_dim=width // heads)
        if kind.build == "Starcoder2":
            sizes |= dict(residual_dropout=0.0, embedding_dropout=0.0)
        if kind.build == "Gemma2":
            sizes |= dict(query_pre_attn_scalar=width // heads, sliding_window=LENGTH // 2)
    config = getattr(transformers, f"{kind.build}Config")(**sizes, **tokens)
    head = "LMHeadModel" if kind.build == "GPT2" else "ForCausalLM"
    return getattr(transformers, f"{kind.build}{head}")(config)


def make_optimizers(kind: ModelKind, run: TrainingRun, model: nn.Module) -> list[torch.optim.Optimizer]:
    rate, parameters = kind.rate * run.rate, list(model.parameters())
    if kind.optimizer == "sgd":
        return [torch.optim.SGD(parameters, rate, momentum=run.momentum)]
    constants: dict[str, Any] = dict(betas=(0.9, run.beta2), eps=run.eps)
    if kind.optimizer == "adamw":
        both: list[torch.optim.Optimizer] = [torch.optim.AdamW(parameters, rate, **constants)]
    else:
        maps = [p for name, p in model.named_parameters() if p.ndim == 2 and not re.search("embed|wte|wpe|head", name)]
        others = [p for p in parameters if not any(p is q for q in maps)]
        muon = torch.optim.Muon(maps, rate, adjust_lr_fn="match_rms_adamw")
        both = [muon, torch.optim.AdamW(others, rate, **constants)]
    for optimizer in both:
        for group in optimizer.param_groups:
            group["weight_decay"] = run.decay  # set here, since the constructors refuse a negative one
    return both
