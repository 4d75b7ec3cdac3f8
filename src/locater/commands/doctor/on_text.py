"""What a text shows of a model beside its base: the loss, and heads that attend otherwise or lost their role.

Heads are those of `observe`, their roles those of `probe`. Both models read the same tokens, so that losses are
compared token by token.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from locater.commands.doctor.places import heads_words
from locater.commands.load_model import load_model
from locater.commands.probing import HeadKey, role_scores
from locater.errors import LocaterError
from locater.findings import ROLES, judge
from locater.findings.causes import Finding, finding
from locater.inputs.text import Batch, Text, as_text, batches, positions_of
from locater.inputs.tokenizer import tokenizer_for
from locater.observing.observation import observe
from locater.observing.run_model import run_model
from locater.sources.open_source import Source

LENGTH, TOKENS = 128, 512  # of a sequence, and in all
HIDDEN = 7  # every how many tokens one is hidden from a model that fills in tokens
SURE = 4.0  # standard errors of the mean difference of losses
WORSE = 0.5  # nats that no merge, cast or quantisation that keeps a model whole has taken
MOVED = 0.1  # of the entropy, as a share of that of uniform attention, or of the weight on the first token
WEIGHTS = {role.name: role.needs[0] for role in ROLES if len(role.needs) == 1}  # roles that are a share of attention
Heads = Mapping[HeadKey, Mapping[str, Any]]


@dataclass(frozen=True)
class Behaviour:
    """A model on a text: nats of each predicted token, and rows of heads with their role."""

    losses: Tensor | None
    heads: dict[HeadKey, dict[str, Any]]
    vocabulary: int | None

    @property
    def loss(self) -> float | None:
        return None if self.losses is None else float(self.losses.mean())


@dataclass(frozen=True)
class OnText:
    """What a text shows: findings, numbers for the document, and columns of heads."""

    findings: list[Finding]
    numbers: dict[str, Any]
    columns: dict[HeadKey, dict[str, Any]]


def check_text(text: Text) -> Text:
    """Refuse at once what cannot be run on at all: without transformers, or on a file that is no text."""
    if find_spec("transformers") is None:
        raise LocaterError("--text runs the model, which needs the transformers package: pip install 'locater[hf]'")
    parts = [text] if isinstance(text, str | Path) else text if isinstance(text, list | tuple) else []
    return as_text(parts) if parts and all(isinstance(part, str | Path) for part in parts) else text


def examine_on_text(
    source: Source,
    base: Source | None,
    text: Text,
    tokenizer: Any = None,
    places: Mapping[HeadKey, HeadKey] | None = None,
) -> OnText:
    """Run MODEL, and BASE on the same tokens. What cannot be run is a note: the weights were judged all the same.
    `places` says where in MODEL a head of BASE is, where that is elsewhere.
    """
    runs: dict[str, Behaviour] = {}
    ids: list[Batch] | None = None
    for name, one in (("BASE", base), ("MODEL", source)):
        if one is None:
            continue
        try:
            module = _module(one)
            # token by token the same for both, by the tokenizer of BASE: another one would compare other tokens
            ids = _tokens(module, text, tokenizer) if ids is None else ids
            runs[name] = run_on_tokens(module, ids)
        except (LocaterError, RuntimeError, IndexError, ValueError) as error:
            said = str(error).splitlines()[0]
            words = f"{name} was not run ({said}), so nothing is known of its loss and of what its heads do on text"
            return OnText([finding("unknown", "the text", words, severity="note")], {}, {})
    own, other = runs["MODEL"], runs.get("BASE")
    count = sum(batch["input_ids"].numel() for batch in ids or [])
    numbers = {"tokens": count, "loss": own.loss, "base_loss": None if other is None else other.loss}
    found = findings_on_text(own, other, places)
    columns: dict[HeadKey, dict[str, Any]] = {
        key: {name: row.get(name) for name in ("entropy_ratio", "sink", "role")} for key, row in own.heads.items()
    }
    for key, row in {} if other is None else other.heads.items():
        columns.setdefault(key, {})["base_role"] = row["role"]
    return OnText(found, numbers, columns)


def findings_on_text(
    own: Behaviour, other: Behaviour | None, places: Mapping[HeadKey, HeadKey] | None = None
) -> list[Finding]:
    """What a text says of a model, and of what it does otherwise than its base."""
    found = {} if other is None else {key: own.heads.get((places or {}).get(key, key), {}) for key in other.heads}
    beside = [] if other is None else [*_of_roles(found, other.heads), *_of_attention(found, other.heads)]
    return [*_of_loss(own, other), *beside]


def _module(source: Source) -> nn.Module:
    if isinstance(source, nn.Module):
        return source
    if not isinstance(source, str | os.PathLike):
        raise LocaterError(f"{type(source).__name__}: only a module, a folder or a hub id can be run")
    module: nn.Module = load_model(os.fspath(source))
    return module


def _tokens(module: nn.Module, text: Text, tokenizer: Any) -> list[Batch]:
    length = min(LENGTH, positions_of(module) or LENGTH)
    return batches(module, text, tokenizer=tokenizer, length=length, tokens=TOKENS, batch=2)


def run_on_tokens(module: nn.Module, ids: list[Batch]) -> Behaviour:
    """The losses of a model with an output over its vocabulary, and what its heads do."""
    losses: list[Tensor] = []
    kind = _kind_of_loss(module)
    with observe(module) as seen:
        for batch in ids:
            output = run_model(module, batch)
            if kind == "next token":
                losses.append(_of_next(output.logits, batch["input_ids"]))
    if kind == "hidden token":
        losses = [_of_hidden(module, batch) for batch in ids]
    scores = role_scores(module, ids)
    rows = [{**vars(row), **scores.get((row.layer, row.head), {})} for row in seen.rows]
    length = max(batch["input_ids"].shape[1] for batch in ids)
    pairs = zip(rows, judge(rows, length), strict=True)
    heads = {(row["layer"], row["head"]): {**row, "role": verdict.role} for row, verdict in pairs}
    size = getattr(getattr(module, "config", None), "vocab_size", None)
    return Behaviour(torch.cat(losses) if losses else None, heads, size)


def _kind_of_loss(module: nn.Module) -> str:
    """By the name of the class, as transformers names them; empty where a model has no output over a vocabulary."""
    name = type(module).__name__
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        return ""
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return "next token"
    return "hidden token" if name.endswith("ForMaskedLM") else ""


def _of_next(logits: Tensor, ids: Tensor) -> Tensor:
    flat = logits[:, :-1].flatten(0, 1).float()
    return functional.cross_entropy(flat, ids[:, 1:].flatten().to(flat.device), reduction="none").double().cpu()


def _of_hidden(module: nn.Module, batch: Batch) -> Tensor:
    ids = batch["input_ids"]
    mask = getattr(tokenizer_for(module), "mask_token_id", None)
    if mask is None:
        raise LocaterError("its tokenizer has no token for what is hidden")
    hidden = torch.zeros_like(ids, dtype=torch.bool)
    hidden[:, HIDDEN // 2 : -1 : HIDDEN] = True
    logits = run_model(module, {**batch, "input_ids": ids.masked_fill(hidden, mask)}).logits
    return functional.cross_entropy(logits[hidden].float(), ids[hidden], reduction="none").double().cpu()


def _of_loss(own: Behaviour, other: Behaviour | None) -> list[Finding]:
    if own.losses is None or own.loss is None:
        words = "gives no loss: the model has no output over its vocabulary"
        return [finding("loss", "the text", words, severity="note")]
    if not bool(own.losses.isfinite().all()):
        beside = "" if other is None or other.loss is None else f", that of BASE is {other.loss:.3f}"
        return [finding("nonfinite", "the output", f"is NaN or infinite on the text{beside}")]
    if other is None or other.losses is None or other.loss is None:
        guess = float(torch.tensor(float(own.vocabulary)).log()) if own.vocabulary else float("inf")
        words = f"has a loss of {own.loss:.3f} nats per token"
        if own.loss > guess:
            return [finding("worse-loss", "the text", f"{words}, worse than guessing ({guess:.2f})", loss=own.loss)]
        return [finding("loss", "the text", words, loss=own.loss)]
    apart = own.losses - other.losses
    difference, error = float(apart.mean()), float(apart.std()) / max(1, len(apart)) ** 0.5
    evidence = {"loss": own.loss, "base_loss": other.loss, "difference": difference, "standard_error": error}
    evidence = {name: round(x, 5) for name, x in evidence.items()}
    words = f"has a loss of {own.loss:.3f} nats per token, BASE {other.loss:.3f}"
    sure = abs(difference) > SURE * error and abs(difference) >= 0.005
    if not sure:
        return [finding("loss", "the text", f"{words}: no sure difference", **evidence)]
    words += f" ({abs(difference):.3f} ± {error:.3f} {'worse' if difference > 0 else 'better'})"
    if difference > WORSE:
        return [finding("worse-loss", "the text", words, **evidence)]
    return [finding("loss", "the text", words, severity="change" if difference > 0 else "note", **evidence)]


def _of_roles(now: Heads, before: Heads) -> list[Finding]:
    """Heads that have less than half of the weight of their role in BASE left. One near the threshold loses none."""
    lost: dict[str, list[HeadKey]] = {}
    had: dict[str, int] = {}
    for key, row in before.items():
        column = WEIGHTS.get(row["role"] or "")
        if column is None:
            continue
        had[row["role"]] = had.get(row["role"], 0) + 1
        weight = now[key].get(column)
        if weight is None or not weight >= row[column] / 2:
            lost.setdefault(row["role"], []).append(key)
    if not lost:
        return []
    parts = [f"{len(heads)} of {had[role]} {role} ({heads_words(heads)})" for role, heads in lost.items()]
    every = [key for heads in lost.values() for key in heads]
    words = f"lost the role that they have in BASE: {', '.join(parts)}"
    return [finding("lost-role", _heads(every), words, heads=[[*key] for key in every])]


def _of_attention(now: Heads, before: Heads) -> list[Finding]:
    moved = [key for key, row in before.items() if _moved(row, now[key])]
    if not moved:
        return []
    words = f"of {len(before)} attend otherwise than in BASE: entropy or weight on the first token moved by "
    words += f"more than {MOVED}: {heads_words(moved)}"
    return [finding("other-attention", _heads(moved), words, heads=[[*key] for key in moved])]


def _heads(some: Sequence[HeadKey]) -> str:
    return f"{len(some)} head{'s' * (len(some) > 1)}"


def _moved(row: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    pairs = [(row.get(name), now.get(name)) for name in ("entropy_ratio", "sink")]
    return any(a is not None and (b is None or not abs(a - b) <= MOVED) for a, b in pairs)
