"""`probe_lengths()`: what heads do with more and more context, and where attention falls apart.

All lengths are judged by the same tokens, the last ones of each sequence: what is in front of them is cut to each
length. More context does no harm to a model that can use it, so a loss that rises is that of attention: nothing else in
the model knows what is in front.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn import functional

from locater.calls.call_and_masks import Call
from locater.calls.listeners import ListeningSwitch
from locater.commands.load_model import load_model
from locater.commands.probe_data import data_label
from locater.defaults import Progress
from locater.discovery import attention_layers
from locater.errors import LocaterError
from locater.explain.replayed_pass import main_output
from locater.inputs.text import Text, batches, positions_of
from locater.kernels import row_statistics
from locater.layers import AttentionLayer
from locater.numerics import finite_or_none, interval, known_median
from locater.observing.listening_site import listening_to
from locater.observing.run_model import run_checked
from locater.results.length_probe import HeadAtLength, Length, LengthProbe
from locater.sources.weights import ModuleWeights
from locater.torch_private import unwrap_compiled

SEQUENCES, TOKENS = 4, 16384  # of the longest length, and tokens, at least
RISE = 0.1  # nats by which the loss has risen for certain where attention falls apart
NAMED = 8  # heads that changed most
COLUMNS = ("entropy", "entropy_ratio", "sink", "reach", "max_logit")


def probe_lengths(
    model: nn.Module | str | os.PathLike[str],
    text: Text | None = None,
    lengths: Sequence[int] = (256, 1024, 4096),
    *,
    tokenizer: Any = None,
    tokens: int | None = None,
    label: str | None = None,
    progress: Progress | None = None,
) -> LengthProbe:
    """Entropy, sink, reach and loss of `model` with `lengths` tokens in front, judged by the last tokens of each
    sequence: half of the shortest length, which are the same for all.

    >>> from locater_lab.train import Shape, Transformer
    >>> model = Transformer(Shape(vocabulary=32, layers=2, width=16, heads=2, kv_heads=2, hidden=24, length=64))
    >>> found = probe_lengths(model, torch.arange(512) % 32, [8, 32])
    >>> [row.length for row in found.lengths], len(found.rows), found.apart
    ([8, 32], 8, None)
    """
    lengths = _checked(lengths)
    source = os.fspath(model) if isinstance(model, str | os.PathLike) else type(model).__name__
    module = unwrap_compiled(load_model(source) if isinstance(model, str | os.PathLike) else model)
    layers = attention_layers(module)
    if not layers or not all(layer.causal and layer.kind == "self" for layer in layers):
        raise LocaterError(
            f"{type(module).__name__}: lengths are compared by the loss of the next token, and not all of its "
            "attention is causal self-attention"
        )
    positions, notes = positions_of(module), []
    if positions is not None and lengths[-1] > positions:
        if not all(layer.rotary is not None or layer.rotary_table is not None for layer in layers):
            raise LocaterError(
                f"--lengths {lengths[-1]}: the model has a table of {positions} positions: give {positions} or less"
            )
        notes.append(f"{lengths[-1]:,} tokens are more than the {positions:,} positions that the configuration states")
    ids = _sequences(module, text, tokenizer, lengths[-1], tokens or max(TOKENS, SEQUENCES * lengths[-1]))
    if len(ids) < 2:
        notes.append("a single sequence has no interval, and attention that falls apart is not told from chance")
    study = _Lengths(module, layers, ids, lengths)
    steps = study.run()
    for _ in progress(steps, len(ids) * len(lengths)) if progress else steps:
        pass
    named = data_label(text, None) if text is None or isinstance(text, str | os.PathLike) else None
    assumptions = {
        "data": label or named,
        "sequences": len(ids),
        "judged": study.judged,
        "threshold": RISE,
        "notes": notes,
    }
    found = study.lengths()
    return LengthProbe(source, assumptions, stated_positions(module, layers), found, study.rows, study.changed(found))


def _checked(lengths: Sequence[int]) -> list[int]:
    found = sorted(set(lengths))
    if len(found) < 2 or found[0] < 8:
        raise LocaterError(f"lengths={list(lengths)}: give two lengths or more, of 8 tokens or more each")
    return found


def _sequences(
    module: nn.Module, text: Text | None, tokenizer: Any, length: int, tokens: int
) -> Int[Tensor, "sequences length"]:
    """Whole sequences of the longest length."""
    if text is None:
        from locater.inputs.corpus import embedded_text

        text = embedded_text()
    given = batches(module, text, tokenizer=tokenizer, length=length, tokens=tokens, batch=1, beyond_positions=True)
    rows = [row for batch in given for row in batch.get("input_ids", torch.empty(0, 0))]
    whole = [row for row in rows if len(row) == length]
    if not whole:
        longest = max((len(row) for row in rows), default=0)
        raise LocaterError(
            f"the text has {longest:,} tokens, and the longest length is {length:,}: give more text, or shorter lengths"
        )
    return torch.stack(whole)


@dataclass(eq=False)
class _LastRows:
    """Listens to one layer: sums of the statistics of the last rows of each call, by head."""

    name: str
    module: nn.Module
    rows: int
    switch: ListeningSwitch = field(default_factory=ListeningSwitch)
    sums: dict[str, Tensor] = field(default_factory=dict)  # (H,)
    count: int = 0

    def receive(self, call: Call) -> None:
        if call.why_unmeasurable is not None:
            raise LocaterError(f"{self.name}: {call.why_unmeasurable}")
        (B, H, T, _), S = call.query.shape, call.key.shape[2]
        terms = call.terms.checked(B, H, T, S).placed(T, S, call.query.device).for_queries(slice(T - self.rows, T))
        stats = row_statistics(call.query[:, :, -self.rows :], call.key, terms)
        assert stats.distance is not None
        assert stats.first_mass is not None
        found = {
            "entropy": stats.entropy,
            "entropy_ratio": stats.entropy_ratio,
            "sink": stats.first_mass,
            "reach": stats.distance,
        }
        for name, x in found.items():
            self.sums[name] = self.sums.get(name, 0) + x.double().sum((0, 2)).cpu()
        top = stats.max_logit.double().amax((0, 2)).cpu()
        self.sums["max_logit"] = torch.maximum(self.sums.get("max_logit", top), top)
        self.count += B * self.rows

    def of_head(self, head: int) -> dict[str, float | None]:
        means = {name: float(x[head]) / (1 if name == "max_logit" else self.count) for name, x in self.sums.items()}
        return {name: finite_or_none(x) for name, x in means.items()}


class _Lengths:
    """What was measured so far."""

    def __init__(
        self, module: nn.Module, layers: Sequence[AttentionLayer], ids: Int[Tensor, "n length"], lengths: Sequence[int]
    ) -> None:
        self.module, self.layers, self.ids, self.every = module, layers, ids, lengths
        self.judged = max(2, lengths[0] // 2)
        self.start = ids[:, :1] if len(ids) > 1 and bool((ids[:, 0] == ids[0, 0]).all()) else ids[:, :0]
        self.losses: dict[int, list[float]] = {}
        self.rows: list[HeadAtLength] = []
        taken = inspect.signature(module.forward).parameters
        self.options: dict[str, Any] = {"use_cache": False} if "use_cache" in taken else {}
        if "logits_to_keep" in taken:  # of long sequences, logits are larger than the model
            self.options["logits_to_keep"] = self.judged + 1

    def run(self) -> Iterator[None]:
        weights = ModuleWeights(self.module)
        for length in self.every:
            sites = [_LastRows(layer.name, weights.submodule(layer.name), self.judged) for layer in self.layers]
            losses = []
            with listening_to(self.module, sites):
                for number in range(len(self.ids)):
                    losses.append(self._loss(self._cut(number, length)))
                    yield
            self.losses[length] = losses
            for at, site in enumerate(sites):
                if not site.count:
                    raise LocaterError(f"{site.name}: its attention was not seen, so it is not known what its heads do")
                heads = range(self.layers[at].heads)
                self.rows += [HeadAtLength(length, at, head, **site.of_head(head)) for head in heads]

    def _cut(self, number: int, length: int) -> Int[Tensor, "1 length"]:
        """The last tokens of a sequence, behind the first token that all share."""
        start = self.start[number]
        return torch.cat([start, self.ids[number, self.ids.shape[1] - length + len(start) :]])[None]

    def _loss(self, ids: Int[Tensor, "1 length"]) -> float:
        """The mean loss of the judged tokens."""
        out = main_output(run_checked(self.module, {"input_ids": ids, **self.options}))
        if out is None or out.ndim != 3 or out.shape[1] < self.judged + 1:
            raise LocaterError(f"{type(self.module).__name__}: it gives no logits over its vocabulary")
        logits, targets = out[0, -self.judged - 1 : -1], ids[0, -self.judged :].to(out.device)
        return float(functional.cross_entropy(logits.float() if logits.dtype != torch.float64 else logits, targets))

    def lengths(self) -> list[Length]:
        found: list[Length] = []
        for length in self.every:
            losses = self.losses[length]
            own = [row for row in self.rows if row.length == length]
            medians = {name: known_median(getattr(row, name) for row in own) for name in COLUMNS}
            before = [row for row in found if row.loss is not None]
            rise = low = high = None
            if before:
                best = min(before, key=lambda row: row.loss if row.loss is not None else math.inf)
                mean, half = interval([x - y for x, y in zip(losses, self.losses[best.length], strict=True)])
                rise, low, high = finite_or_none(mean), finite_or_none(mean - half), finite_or_none(mean + half)
            lost = not all(map(math.isfinite, losses))
            found.append(
                Length(
                    length=length,
                    loss=finite_or_none(sum(losses) / len(losses)),
                    rise=rise,
                    low=low,
                    high=high,
                    apart=bool(before) and (lost or (low is not None and low > RISE)),
                    **medians,
                )
            )
        return found

    def changed(self, found: Sequence[Length]) -> list[dict[str, Any]]:
        """The heads whose attention changed most where it falls apart: by weight on the first token and entropy."""
        at = next((number for number, row in enumerate(found) if row.apart), None)
        if at is None:
            return []
        best = min(found[:at], key=lambda row: math.inf if row.loss is None else row.loss).length
        of = {(row.length, row.layer, row.head): row for row in self.rows}
        changes: list[tuple[float, dict[str, Any]]] = []
        for row in (row for row in self.rows if row.length == found[at].length):
            before = of[best, row.layer, row.head]
            pairs = [(before.sink, row.sink), (before.entropy_ratio, row.entropy_ratio)]
            if all(x is not None and y is not None for x, y in pairs):
                size = sum(abs((y or 0.0) - (x or 0.0)) for x, y in pairs)
                changes.append((size, {"layer": row.layer, "head": row.head, **_around(before, row)}))
        return [change for _, change in sorted(changes, key=lambda pair: -pair[0])[:NAMED]]


def _around(before: HeadAtLength, after: HeadAtLength) -> dict[str, list[float | None]]:
    return {name: [getattr(before, name), getattr(after, name)] for name in ("sink", "entropy_ratio", "reach")}


def stated_positions(module: nn.Module, layers: Sequence[AttentionLayer]) -> dict[str, Any]:
    """What the configuration says of positions: how many, and how rotary angles are scaled."""
    config: Any = getattr(module, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    said = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    settings = dict(said) if isinstance(said, Mapping) else {}
    kinds = [layer for layer in layers if layer.rotary is not None or layer.rotary_table is not None]
    return {
        "positions": positions_of(module),
        "rotary": bool(kinds),
        "scaling": {str(name): value for name, value in settings.items() if _is_plain(value)},
    }


def _is_plain(value: Any) -> bool:
    """Whether JSON can have it."""
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and _is_plain(part) for name, part in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value))
