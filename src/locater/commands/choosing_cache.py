"""`cache_plan()`: which key heads need the whole cache and which can do with a window, at a loss that the user names.

Heads are ordered by what the window costs them: to first order, from one pass with gradients, or measured one by one.
The longest list of that order whose loss, all at once, is within the budget is chosen on one half of the text. It is
judged on the other half, by lists of rising length: the last of them before the first that costs too much is the
result. In that order a list that costs too much passes as rarely as a single test lets it (5 %), however many are
tried.
"""

from __future__ import annotations

import math
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from locater.calls.head_removal import HeadRemoval, Outputs, Removal, changed_head, heads_removed, removals_of
from locater.commands.ablating import Measurements, sequence_losses
from locater.commands.key_ranges_and_sinks import sinks_and_massive, summary_of_keys, token_names
from locater.commands.load_model import load_model
from locater.commands.probe_data import count_sequences, data_label
from locater.defaults import CACHE_LENGTH, TOKENS, Progress
from locater.discovery import attention_layers
from locater.errors import LocaterError
from locater.inputs.text import Batch, Text, batches
from locater.inputs.tokenizer import tokenizer_for
from locater.layers import AttentionLayer
from locater.numerics import finite_or_none, interval
from locater.observing.observation import observe
from locater.observing.run_model import run_checked
from locater.results.ablation import Removed
from locater.results.cache_plan import CachePlan, KeyHead
from locater.sources.weights import ModuleWeights
from locater.torch_private import unwrap_compiled

TOGETHER = 1024  # tokens in a batch
SHARES = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0)  # of the chosen list, that are judged
FEWEST = 4  # sequences to choose on, and to judge on
BITS = 4  # of keys, for what sinks do to them
Unit = tuple[int, int]  # layer and key head


def cache_plan(
    model: nn.Module | str | os.PathLike[str],
    text: Text | None = None,
    *,
    window: int = 128,
    sinks: int = 4,
    loss: float = 0.02,
    measure: bool = False,
    copies: bool = False,
    tokenizer: Any = None,
    length: int = CACHE_LENGTH,
    tokens: int = TOKENS,
    label: str | None = None,
    progress: Progress | None = None,
) -> CachePlan:
    """Which key heads of `model` can do with the last `window` keys and the first `sinks`, all of them at once, for at
    most `loss` nats per token. `measure` measures what each costs by itself, and goes by that. With `copies` the first
    half of each sequence stands twice, and the loss is that of the second copy: what is asked for is far back.

    >>> from locater_lab.train import Shape, Transformer
    >>> model = Transformer(Shape(vocabulary=32, layers=2, width=16, heads=2, kv_heads=2, hidden=24))
    >>> plan = cache_plan(model, torch.arange(512) % 32, window=4, sinks=1, length=32)
    >>> plan.holds, len(plan.windowed) + len(plan.whole)
    (True, 4)
    """
    how = Removal("window", window, sinks)
    if not loss > 0 or not math.isfinite(loss):
        raise LocaterError(f"loss={loss}: nats per token that the list may cost, such as 0.02")
    if length <= window + sinks:
        raise LocaterError(
            f"sequences of {length} tokens and a window of {window} with {sinks} sinks: the window hides nothing; give "
            "longer sequences (--length) or a shorter window"
        )
    source = os.fspath(model) if isinstance(model, str | os.PathLike) else type(model).__name__
    module = unwrap_compiled(load_model(source) if isinstance(model, str | os.PathLike) else model)
    given = _given(module, text, tokenizer, length, tokens)
    plan = _Plan(module, attention_layers(module), how, loss, measure, _token_names(module, tokenizer))
    choose, judge = _halves(given)
    steps = plan.run(choose, judge, copies)
    for _ in progress(steps, plan.expected(len(choose), len(judge))) if progress else steps:
        pass
    named = data_label(text, None) if text is None or isinstance(text, str | os.PathLike) else None
    assumptions = {
        "window": window,
        "sinks": sinks,
        "measured": measure,
        "copies": copies,
        "data": label or named,
        "length": given[0]["input_ids"].shape[1],
        "sequences": {"choose": count_sequences(choose), "judge": count_sequences(judge)},
        "notes": plan.notes,
    }
    return plan.result(source, assumptions)


def _given(module: nn.Module, text: Text | None, tokenizer: Any, length: int, tokens: int) -> list[Batch]:
    if text is None:
        from locater.inputs.corpus import embedded_text

        text = embedded_text()
    given = batches(
        module, text, tokenizer=tokenizer, length=length, tokens=tokens, batch=max(1, TOGETHER // max(1, length))
    )
    if any("input_ids" not in batch for batch in given):
        raise LocaterError("a cache is of models that read tokens: give text, or batches with input_ids")
    return given


def _halves(given: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
    """Two halves of the sequences."""
    half = count_sequences(list(given)) // 2
    if half < FEWEST:
        raise LocaterError(
            f"{count_sequences(list(given))} sequences: half of them choose and the others judge, which takes "
            f"{2 * FEWEST} or more; give more text, more --tokens or a shorter --length"
        )
    choose: list[Batch] = []
    judge: list[Batch] = []
    for batch in given:
        left, size = half - count_sequences(choose), len(batch["input_ids"])
        for to, rows in ((choose, slice(0, max(0, left))), (judge, slice(max(0, left), size))):
            part = {name: x[rows] if isinstance(x, Tensor) and len(x) == size else x for name, x in batch.items()}
            if len(part["input_ids"]):
                to.append(part)
    return choose, judge


def _token_names(module: nn.Module, tokenizer: Any) -> Any:
    try:
        return token_names(tokenizer_for(module, tokenizer))
    except LocaterError:
        return token_names(None)


class _Plan:
    """What was measured so far."""

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[AttentionLayer],
        how: Removal,
        budget: float,
        measure: bool,
        names: Any,
    ) -> None:
        if not layers or not all(layer.causal and layer.kind == "self" for layer in layers):
            raise LocaterError(
                f"{type(module).__name__}: a cache is of models that write one token after the other with causal "
                "self-attention, and not all of its attention is that"
            )
        self.module, self.layers, self.how, self.budget = module, layers, how, budget
        self.measure, self.names = measure, names
        self.weights = ModuleWeights(module)
        self.bounded = {
            at
            for at, layer in enumerate(layers)
            if min(layer.window or math.inf, layer.chunk or math.inf) <= how.window
        }
        self.units = [
            (at, head) for at, layer in enumerate(layers) if at not in self.bounded for head in range(layer.kv_heads)
        ]
        if not self.units:
            raise LocaterError(
                f"every layer has a window of {how.window} keys or fewer of its own: there is nothing to gain"
            )
        self.texts: dict[str, list[Batch]] = {}  # "choose", "judge", "other"
        self.base: dict[str, list[float]] = {}  # losses with the whole cache, by text
        self.beyond: dict[Unit, float] = {}
        self.predicted: dict[Unit, float] = {}
        self.single: dict[Unit, Removed] = {}
        self.tried: list[dict[str, Any]] = []
        self.accepted: list[Unit] = []
        self.other: dict[str, Any] | None = None
        self.notes: list[str] = []
        if self.bounded:
            self.notes.append(f"{len(self.bounded)} layers have a window of their own, and stay as they are")

    def expected(self, choose: int, judge: int) -> int:
        """About how many steps there are."""
        sizes = math.ceil(math.log2(len(self.units) + 1))
        return choose * (2 + len(self.units) * self.measure) + sizes + len(SHARES) + 3

    # ---- the course of it

    def run(self, choose: list[Batch], judge: list[Batch], copies: bool) -> Iterator[None]:
        again = [[repeated(batch) for batch in half] for half in (choose, judge)]
        if copies:
            choose, judge, again = *again, [choose, judge]
        self.texts = {"choose": choose, "judge": judge, "other": again[1]}
        length = max(batch["input_ids"].shape[1] for text in (judge, again[1]) for batch in text if "labels" in batch)
        far = length // 2 > self.how.window
        if not far:
            short = "sequences are too short for a text that stands twice, with a copy beyond the window"
            if copies:
                raise LocaterError(short)
            self.notes.append(short)
        yield from self._look(choose)
        if self.measure:
            yield from self._measure_singles(choose)
        order = sorted(self.units, key=self._cost)
        fitting = yield from self._longest(order)
        chosen = order[:fitting]
        for size in sorted({math.ceil(share * fitting) for share in SHARES} - {0}):
            row = self._try(chosen[:size], "judge")
            yield
            if not row["holds"]:
                break
            self.accepted = chosen[:size]
        if self.accepted and far:
            yield from self._judge_other()
        yield from self._round_keys()

    def _cost(self, unit: Unit) -> float:
        return (self.single[unit].change or 0.0) if self.measure else self.predicted[unit]

    def _look(self, choose: list[Batch]) -> Iterator[None]:
        """Weight beyond the window, and first-order effects."""
        with observe(self.module, beyond=(self.how.window, self.how.sinks), rows=1) as seen:
            for batch in choose:
                run_checked(self.module, _inputs(batch))
                yield
        numbers = {layer.name: at for at, layer in enumerate(self.layers)}
        shares: dict[Unit, list[float]] = {}
        for row in seen.rows:
            if row.name in numbers and row.beyond is not None:
                shares.setdefault((numbers[row.name], row.kv_head), []).append(row.beyond)
        self.beyond = {unit: sum(values) / len(values) for unit, values in shares.items()}
        totals: dict[Unit, list[float]] = {unit: [] for unit in self.units}
        for batch in choose:
            for unit, values in first_order(self.module, self.layers, self.units, self.how, batch).items():
                totals[unit] += values
            yield
        self.predicted = {unit: sum(values) / len(values) for unit, values in totals.items()}
        self.sinks, self.massive = sinks_and_massive(
            self.module, self.layers, _inputs(choose[0]), self.how.sinks, self.names
        )

    def _measure_singles(self, choose: list[Batch]) -> Iterator[None]:
        """The window in each key head alone."""
        sets = [{layer: tuple(self._heads((layer, head)))} for layer, head in self.units]
        study = Measurements(self.module, self.layers, sets, self.how)
        yield from study.measure(choose)
        self.single = dict(zip(self.units, study.result("", {}).rows, strict=True))

    def _longest(self, order: Sequence[Unit]) -> Generator[None, None, int]:
        """How long a list may be on the text of the choice: by halving, from all of them on."""
        fits, fails = 0, len(order) + 1
        size = len(order)
        while fails - fits > 1:
            if self._try(order[:size], "choose")["holds"]:
                fits = size
            else:
                fails = size
            yield
            size = (fits + fails) // 2
        return fits

    def _judge_other(self) -> Iterator[None]:
        """What the list costs where each text stands twice; or, if that is what it was judged by, where it does not."""
        row = self._change(self.accepted, "other")
        yield
        self.other = {"loss": sum(self.base["other"]) / len(self.base["other"]), **row}

    def _round_keys(self) -> Iterator[None]:
        """What rounded keys cost, with the first of them in the range of the others and apart."""
        typical, largest = summary_of_keys(self.sinks)
        self.keys: dict[str, Any] = {"bits": BITS, "finer": typical, "finest": largest}
        for name, whole in (("rounded", 0), ("first_apart", self.how.sinks)):
            how = Removal("bits", bits=BITS, whole=whole)
            try:
                self.keys[name] = self._change(self.units, "judge", how)
            except LocaterError as error:
                self.keys[name] = None
                self.notes.append(f"keys were not rounded: {error}")
            yield

    # ---- one list, all at once

    def _heads(self, unit: Unit) -> range:
        group = self.layers[unit[0]].group
        return range(unit[1] * group, (unit[1] + 1) * group)

    def _try(self, units: Sequence[Unit], text: str) -> dict[str, Any]:
        found = self._change(units, text)
        holds = found["high"] is not None and found["high"] <= self.budget
        row = {"heads": len(units), "text": text, **found, "holds": holds}
        self.tried.append(row)
        return row

    def _change(self, units: Sequence[Unit], text: str, how: Removal | None = None) -> dict[str, Any]:
        """The change of the loss with the window in all of these at once, with its interval over sequences."""
        if text not in self.base:
            self.base[text] = self._losses(text, (), self.how)
            if not all(map(math.isfinite, self.base[text])):
                raise LocaterError(
                    f"{type(self.module).__name__}: its loss on this text is not a number: try locater doctor"
                )
        after = self._losses(text, units, how or self.how)
        mean, half = interval([x - y for x, y in zip(after, self.base[text], strict=True)])
        return {"change": finite_or_none(mean), "low": finite_or_none(mean - half), "high": finite_or_none(mean + half)}

    def _losses(self, text: str, units: Sequence[Unit], how: Removal) -> list[float]:
        """The loss of each sequence."""
        chosen: dict[int, list[int]] = {}
        for unit in units:
            chosen.setdefault(unit[0], []).extend(self._heads(unit))
        places = [(layer.name, layer.heads) for layer in self.layers]
        removals = removals_of(places, chosen, how)
        losses: list[float] = []
        places_of = [(self.weights.submodule(name), removal) for name, removal in removals.items()]
        with torch.compiler.set_stance("force_eager"), heads_removed(self.module, places_of):
            for batch in self.texts[text]:
                found = sequence_losses(run_checked(self.module, _inputs(batch)), batch, causal=True)
                if found is None:
                    raise LocaterError(f"{type(self.module).__name__}: it gives no logits over its vocabulary")
                losses += found.tolist()
        return losses

    def result(self, source: str, assumptions: dict[str, Any]) -> CachePlan:
        accepted = set(self.accepted)
        rows = [self._row(at, head, accepted) for at, layer in enumerate(self.layers) for head in range(layer.kv_heads)]
        judged = next((row for row in reversed(self.tried) if row["text"] == "judge" and row["holds"]), None)
        if judged is not None:
            keys = ("heads", "change", "low", "high")
            judged = {key: judged[key] for key in keys} | {
                "sum": sum(self._cost(unit) for unit in self.accepted),
                "sum_of": "measured" if self.measure else "predicted",
            }
        layers = [
            {"layer": at, "name": layer.name, "heads": layer.heads, "kv_heads": layer.kv_heads, "window": layer.window}
            for at, layer in enumerate(self.layers)
        ]
        base = self.base["judge"]
        return CachePlan(
            source,
            assumptions,
            sum(base) / len(base),
            self.budget,
            judged is not None,
            judged,
            self.tried,
            self.other,
            self.keys,
            self.sinks,
            self.massive,
            layers,
            rows,
        )

    def _row(self, layer: int, head: int, accepted: set[Unit]) -> KeyHead:
        unit = (layer, head)
        single = self.single.get(unit)
        return KeyHead(
            layer=layer,
            kv_head=head,
            heads=list(self._heads(unit)),
            beyond=self.beyond.get(unit),
            predicted=finite_or_none(self.predicted.get(unit)),
            change=None if single is None else single.change,
            low=None if single is None else single.low,
            high=None if single is None else single.high,
            windowed=unit in accepted,
            bounded=layer in self.bounded,
        )


def reach_of(layer: AttentionLayer) -> float:
    """How many keys a layer sees at most, by its own window."""
    return min(layer.window or math.inf, layer.chunk or math.inf)


# What a window costs to first order.


class _Gate(HeadRemoval):
    """Lets in as much of what would stand in place of heads as a gate says: none, with a slope."""

    gate: Tensor

    def change(self, outputs: Outputs, parts: Sequence[Sequence[int]], parts_of_call: Any) -> Outputs:
        self._count_call()
        call, value = parts_of_call()
        with torch.no_grad():
            new = outputs.detach().clone()
            for head in parts[0]:
                new[:, :, head] = changed_head(call, value, slice(0, len(outputs)), head, self.how).to(new.dtype)
            apart = (new - outputs).float()
        self.gate = apart.new_zeros(len(outputs), self.count, requires_grad=True)
        return outputs + (self.gate[:, None, :, None] * apart).to(outputs.dtype)


def first_order(
    module: nn.Module, layers: Sequence[AttentionLayer], units: Sequence[Unit], how: Removal, batch: Batch
) -> dict[Unit, list[float]]:
    """The change of the loss of each sequence with `how` in place of each unit's heads, to first order: the slope of
    the loss where each head gives a little of what it would give then. One pass and its gradients, for all units.
    """
    weights, gates = ModuleWeights(module), dict[int, _Gate]()
    for at in {at for at, _ in units}:
        gates[at] = _Gate(layers[at].name, layers[at].heads, how, {0: list(range(layers[at].heads))})
    places = [(weights.submodule(gate.name), gate) for gate in gates.values()]
    with torch.compiler.set_stance("force_eager"), heads_removed(module, places):
        out = run_checked(module, _inputs(batch), gradients=True)
    with torch.enable_grad():
        losses = sequence_losses(out, batch, causal=True)
        if losses is None:
            raise LocaterError(f"{type(module).__name__}: it gives no logits over its vocabulary")
        numbers = list(gates)
        slopes = torch.autograd.grad(losses.sum(), [gates[at].gate for at in numbers])
    of_layer = dict(zip(numbers, slopes, strict=True))
    found = {}
    for at, head in units:
        group = layers[at].group
        found[at, head] = of_layer[at][:, head * group : (head + 1) * group].double().sum(1).tolist()
    return found


def _inputs(batch: Batch) -> Batch:
    """What the model reads: labels are counted here."""
    return {name: x for name, x in batch.items() if name != "labels"}


def repeated(batch: Mapping[str, Tensor]) -> Batch:
    """The first half of each sequence twice, a first token that all share once; with labels for the second copy."""
    ids = batch["input_ids"]
    start = ids[:, :1] if len(ids) and bool((ids[:, 0] == ids[0, 0]).all()) and len(ids) > 1 else ids[:, :0]
    half = (ids.shape[1] - start.shape[1]) // 2
    once = ids[:, start.shape[1] : start.shape[1] + half]
    twice = torch.cat([start, once, once], 1)
    labels = twice.clone()
    labels[:, : start.shape[1] + half] = -100
    return {"input_ids": twice, "attention_mask": torch.ones_like(twice), "labels": labels}
