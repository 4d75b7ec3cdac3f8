"""What a plan is refused for: sizes that do not fit together, data that a task does not read, attention that does not
fit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from locater.errors import LocaterError
from locater.inputs.tokenizer import BYTES
from locater_lab.mechanisms.swap import check_causality
from locater_lab.mechanisms.text import Named, parse_attention

if TYPE_CHECKING:
    from locater_lab.train.plan import Plan

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


def _check_mechanism(plan: Plan, layer: Named) -> None:
    size = plan.width // plan.heads
    check_causality(layer.mechanism, plan.is_causal, f"task={plan.task}")
    if layer.name == "differential" and plan.where == "rotary" and size % 4:
        raise LocaterError(
            f"width={plan.width}, heads={plan.heads}: differential attention rotates pairs of channels in each "
            "half of a head: give heads a size that is a multiple of 4"
        )
    tokens = None if plan.reads_images else plan.length
    layer.check(tokens, width=plan.width, heads=plan.heads, size=size, kv_heads=plan.kv_heads or plan.heads)
