"""Scores of a head's role: weight on the previous token, on the same token before, and on the token after that one
(induction); and induction by other parents than the last token.

The first three are measured on random tokens repeated once, r r, where nothing but the repetition can be attended to.
Only three diagonals of the maps are computed, so the maps are never built. In r r the tokens before and before that
repeat together, so the others are measured on random tokens of a small alphabet, where they repeat apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from locater.errors import LocaterError
from locater.observing.forward_pass import run
from locater.observing.matching import match_scores
from locater.observing.observation import observe

PERIOD, SEQUENCES = 50, 4
ALPHABET, LENGTH = 8, 128  # tokens that the sequences of the second pass are made of, and their length
SKIP, PAIR = (2,), (1, 2)  # parents, `locater.observing.matching`


@dataclass(frozen=True)
class Circuit:
    """Mean weight of a head on the token before; in the repeat, on the same token before, and on the one after it.

    `skip_induction` and `pair_induction` are weight less that of uniform attention: on tokens two after an earlier copy
    of the token before the current one, and on tokens that followed the same two tokens.
    """

    previous: float | None
    duplicate: float | None
    induction: float | None
    skip_induction: float | None = None
    pair_induction: float | None = None


def circuit_scores(
    model: nn.Module, period: int = PERIOD, sequences: int = SEQUENCES, seed: int = 0
) -> dict[tuple[int, int], Circuit]:
    """Scores by (layer, head), from `sequences` random sequences of length `period`, repeated once, and as many of a
    small alphabet.

    In the repeat, row t attends to t - 1 (previous), t - period (duplicate) and t - period + 1 (induction). A uniform
    causal head would have about 1 / t everywhere.
    """
    config: Any = getattr(model, "config", None)
    text = _text_config(model)
    rows, most = getattr(text, "vocab_size", None), getattr(text, "max_position_embeddings", None)
    if not rows or getattr(config, "is_encoder_decoder", False):
        raise LocaterError(f"{type(model).__name__}: circuit scores need one stack of layers over a vocabulary")
    period = period_of(model, period)
    allowed = torch.tensor(sorted(set(range(rows)) - _special(config) - _special(text)))
    if period < 3 or not len(allowed):
        raise LocaterError(
            f"{type(model).__name__}: circuit scores need at least 8 positions and one token that is not special"
        )
    generator = torch.Generator().manual_seed(seed)
    once = allowed[torch.randint(len(allowed), (sequences, period), generator=generator)]
    with observe(model, offsets=((1, period), (period, period), (period - 1, period))) as seen:
        run(model, {"input_ids": torch.cat([once, once], 1)})
    few = allowed[torch.randperm(len(allowed), generator=generator)[:ALPHABET]]
    length = min(LENGTH, (most or LENGTH + 2) - 2)
    ids = few[torch.randint(len(few), (sequences, length), generator=generator)]
    by_parents = _by_parents(model, ids)
    return {
        (row.layer, row.head): Circuit(
            row.offsets[1],
            row.offsets[period],
            row.offsets[period - 1],
            *by_parents.get((row.layer, row.head), (None, None)),
        )
        for row in seen.rows
        if row.kind == "self"
    }


def period_of(model: nn.Module, period: int = PERIOD) -> int:
    """How many tokens are repeated: as many as asked for, or as the model has positions for."""
    most = getattr(_text_config(model), "max_position_embeddings", None)
    return min(period, (most or 2 * period) // 2 - 1)


def _text_config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _by_parents(model: nn.Module, ids: Tensor) -> dict[tuple[int, int], tuple[float | None, float | None]]:
    """Skip and pair induction of each head. Empty where keys are not just the tokens of the input, as with learned keys
    in front of them: the other scores are known there all the same.
    """
    try:
        matched = match_scores(model, ids, (SKIP, PAIR))
    except LocaterError:
        return {}
    return {head: (scores[SKIP].excess, scores[PAIR].excess) for head, scores in matched.items()}


def _special(config: Any) -> set[int]:
    """Ids that a model knows by role; some have a list of them."""
    roles = (getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos", "sep", "cls", "mask"))
    return {i for ids in roles if ids is not None for i in (ids if isinstance(ids, list | tuple) else [ids])}
