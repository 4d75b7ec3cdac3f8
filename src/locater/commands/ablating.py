"""`ablate()`: what each head does, by taking it away. The loss of the whole model with a head removed, less that of the
model as it is, with intervals over sequences; of a model without a loss the cosine distance of its outputs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from operator import index
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from locater.calls.head_removal import Removal
from locater.commands.load_model import load_model
from locater.commands.probe_data import count_sequences, data_label
from locater.defaults import LENGTH, Progress
from locater.discovery import attention_layers
from locater.errors import LocaterError
from locater.explain.replayed_pass import Heads, Seconds, batch_size, main_output, replayed
from locater.inputs.text import Batch, Text, batches
from locater.layers import AttentionLayer
from locater.numerics import finite_or_none, interval
from locater.results.ablation import Ablation, Removed

TOKENS = 2048  # tokens of text, in sequences of `length`
TOGETHER = 1024  # tokens in a batch, and in all copies of it that a pass has
EVERY = "all"  # heads, at once
Chosen = Sequence[str | int | tuple[int, int] | Sequence[tuple[int, int]]]


def ablate(
    model: nn.Module | str | os.PathLike[str],
    batch: Text | None = None,
    heads: Chosen | None = None,
    mode: str = "zero",
    *,
    window: int = 128,
    sinks: int = 4,
    bits: int = 4,
    tokenizer: Any = None,
    length: int = LENGTH,
    tokens: int = TOKENS,
    label: str | None = None,
    progress: Progress | None = None,
) -> Ablation:
    """Remove every head of `model` in turn, or each of `heads`, and measure the whole model without it.

    `heads` has a (layer, head), a layer's number for all its heads at once, a list of (layer, head) that are removed
    together, or "all" for every head of the model at once. `mode` says what stands in place of a head: zero; its mean
    over the tokens of the batch; uniform weights; weights on the last `window` keys and the first `sinks`; or keys of
    `bits` bits (`locater.calls.head_removal`). `batch` is text, a path, token ids, or batches as the model takes them;
    with `labels` in it, their loss is measured. The loss is next-token cross-entropy of a causal model, in nats per
    token. Without either, outputs are compared.

    >>> from locater_lab.train import Shape, Transformer
    >>> model = Transformer(Shape(vocabulary=32, layers=2, width=16, heads=2, kv_heads=2, hidden=24))
    >>> found = ablate(model, torch.arange(64) % 32, length=16)
    >>> [row.name for row in found.rows], found.measure
    (['0.0', '0.1', '1.0', '1.1'], 'loss')
    """
    how = Removal(mode, window, sinks, bits)
    source = os.fspath(model) if isinstance(model, str | os.PathLike) else type(model).__name__
    module = load_model(source) if isinstance(model, str | os.PathLike) else model
    layers = attention_layers(module)
    study = Measurements(module, layers, chosen_heads(heads, layers), how)
    given = _batches(module, batch, tokenizer, length, tokens)
    steps = study.measure(given)
    for _ in progress(steps, len(given) * len(study.sets)) if progress else steps:
        pass
    named = data_label(batch, None) if batch is None or isinstance(batch, str | os.PathLike) else None
    assumptions = {
        "mode": mode,
        "how": str(how),
        "data": label or named,
        "length": max(_shape(part)[1] for part in given),
        "sequences": count_sequences(given),
        "notes": study.notes,
    }
    return study.result(source, assumptions)


def chosen_heads(heads: Chosen | None, layers: Sequence[AttentionLayer]) -> list[dict[int, tuple[int, ...]]]:
    """What is removed each time: heads by number of layer."""
    if heads is None:
        return [{number: (head,)} for number, layer in enumerate(layers) for head in range(layer.heads)]
    sets: list[dict[int, tuple[int, ...]]] = []
    for item in [heads] if isinstance(heads, int | str) else heads:
        if item == EVERY:
            sets.append({number: tuple(range(layer.heads)) for number, layer in enumerate(layers)})
            continue
        if isinstance(item, int):
            _check_layer(item, layers)
            sets.append({item: tuple(range(layers[item].heads))})
            continue
        try:
            given: Any = item
            one = len(given) == 2 and all(isinstance(part, int) for part in given)
            pairs = [(index(layer), index(head)) for layer, head in ([given] if one else given)]
        except (TypeError, ValueError):
            pairs = []
        if not pairs:
            raise LocaterError(
                f"heads={heads!r:.60}: give pairs of layer and head, such as heads=[(3, 0)], numbers of layers, or "
                f"lists of pairs that are removed together; {EVERY!r} for every head at once"
            )
        together: dict[int, tuple[int, ...]] = {}
        for layer, head in pairs:
            _check_layer(layer, layers, head)
            together[layer] = (*together.get(layer, ()), head)
        sets.append(together)
    if not sets:
        raise LocaterError("heads=[]: no head to remove; leave it out for every head")
    return sets


def _check_layer(layer: int, layers: Sequence[AttentionLayer], head: int | None = None) -> None:
    if not 0 <= layer < len(layers):
        raise LocaterError(f"layer {layer}: there are {len(layers)} attention layers, numbered from 0")
    if head is not None and not 0 <= head < layers[layer].heads:
        raise LocaterError(f"head {layer}.{head}: layer {layer} has {layers[layer].heads} heads, numbered from 0")


class Measurements:
    """What was measured so far: a value per removal and sequence."""

    def __init__(
        self, module: nn.Module, layers: Sequence[AttentionLayer], sets: Sequence[Heads], how: Removal
    ) -> None:
        self.module, self.layers, self.sets, self.how = module, layers, sets, how
        self.causal = all(layer.causal for layer in layers)
        self.measure_name: str | None = None
        self.base: list[float] = []  # the loss of each sequence with every head
        self.changes: list[list[float]] = [[] for _ in sets]
        self.passes: list[Seconds] = []
        self.removals: list[Seconds] = []  # each for one removal in one batch
        self.notes: list[str] = []

    def measure(self, given: Sequence[Batch]) -> Iterator[None]:
        """Every removal in every batch, removals with the same first layer together."""
        order = sorted(range(len(self.sets)), key=lambda at: min(self.sets[at]))
        for batch in given:
            size, length = _shape(batch)
            tokens = _real_tokens(batch)
            with replayed(self.module, batch, max(1, TOGETHER // max(1, size * length))) as (replay, out, seconds):
                self.passes.append(seconds)
                before = self._begin(out, batch)
                if not replay.can_skip:
                    self._note("blocks could not be skipped: every removal ran the whole model")
                at = 0
                while at < len(order):
                    first = min(self.sets[order[at]])
                    group = [n for n in order[at : at + replay.most] if min(self.sets[n]) == first]
                    after, taken = replay.replay([self.sets[n] for n in group], self.how, tokens)
                    values = self._judge(after, before, batch, len(group))
                    for number, change in zip(group, values, strict=True):
                        self.changes[number] += change.tolist()
                        self.removals.append(Seconds(taken.blocks / len(group), taken.rest / len(group)))
                        yield
                    at += len(group)

    def _begin(self, out: Any, batch: Batch) -> Tensor:
        """What removals are compared with: losses, or the output."""
        losses = sequence_losses(out, batch, self.causal)
        name = "distance" if losses is None else "loss"
        if self.measure_name not in (None, name):
            raise LocaterError("some batches have a loss and others none: give batches of one kind")
        self.measure_name = name
        if losses is not None:
            self.base += losses.tolist()
            return losses
        output = main_output(out)
        assert output is not None
        return output

    def _judge(self, out: Any, before: Tensor, batch: Batch, copies: int) -> list[Tensor]:
        """The change of each sequence, copy by copy."""
        if self.measure_name == "loss":
            losses = sequence_losses(out, batch, self.causal, copies)
            assert losses is not None
            return [part - before for part in losses.chunk(copies)]
        output = main_output(out)
        assert output is not None
        return [cosine_distances(part, before, _real_tokens(batch)) for part in output.chunk(copies)]

    def _note(self, words: str) -> None:
        if words not in self.notes:
            self.notes.append(words)

    def result(self, source: str, assumptions: dict[str, Any]) -> Ablation:
        rows = []
        for heads, values in zip(self.sets, self.changes, strict=True):
            mean, half = interval(values)
            pairs = [(layer, head) for layer in sorted(heads) for head in heads[layer]]
            rows.append(
                Removed(
                    name=self._name(heads),
                    heads=pairs,
                    change=finite_or_none(mean),
                    low=finite_or_none(mean - half),
                    high=finite_or_none(mean + half),
                    sequences=len(values),
                )
            )
        loss = finite_or_none(sum(self.base) / len(self.base)) if self.base else None
        layers = [
            {"layer": number, "name": layer.name, "kind": layer.kind, "heads": layer.heads}
            for number, layer in enumerate(self.layers)
        ]
        assert self.measure_name is not None
        return Ablation(source, assumptions, self.measure_name, loss, self._cost(), layers, rows)

    def _name(self, heads: Heads) -> str:
        """`17.3`, `17.3+18.6`, `layer 17`, or `all heads`."""
        whole = [len(set(heads.get(number, ()))) == layer.heads for number, layer in enumerate(self.layers)]
        if all(whole) and len(whole) > 1:
            return "all heads"
        if len(heads) == 1:
            ((layer, chosen),) = heads.items()
            if len(set(chosen)) == self.layers[layer].heads > 1:
                return f"layer {layer}"
        return "+".join(f"{layer}.{head}" for layer in sorted(heads) for head in heads[layer])

    def _cost(self) -> dict[str, float | None]:
        """Seconds of a pass and of a removal, both of one batch on average, and the shares of the pass."""
        blocks, rest = (_mean(getattr(x, part) for x in self.passes) for part in ("blocks", "rest"))
        own, last = (_mean(getattr(x, part) for x in self.removals) for part in ("blocks", "rest"))
        return {
            "pass_blocks": blocks,
            "pass_rest": rest,
            "removal_blocks": own,
            "removal_rest": last,
            "share_of_blocks": own / blocks if blocks else None,
        }


def _mean(values: Iterator[float]) -> float:
    every = list(values)
    return sum(every) / len(every)


# What is compared.


def sequence_losses(out: Any, batch: Mapping[str, Any], causal: bool, copies: int = 1) -> Float[Tensor, " N"] | None:
    """The loss of each sequence, of all copies of the batch; None where there is none.

    `labels` of the batch count, if it has some: of tokens or of sequences, -100 for none. Else the next tokens, of a
    causal model that gives logits over its vocabulary.
    """
    logits, ids, labels = main_output(out), batch.get("input_ids"), batch.get("labels")
    if logits is None:
        return None
    if isinstance(labels, Tensor) and not labels.is_floating_point() and labels.shape == logits.shape[1:-1]:
        labels = labels[None]
    if isinstance(labels, Tensor) and not labels.is_floating_point() and logits.ndim == labels.ndim + 1:
        targets, shifted = labels, causal and labels.ndim == 2
    elif causal and isinstance(ids, Tensor) and logits.ndim == 3 and logits.shape[1] == ids.shape[1] > 1:
        if int(ids.max()) >= logits.shape[-1]:
            return None
        mask = batch.get("attention_mask")
        targets = ids if not isinstance(mask, Tensor) or mask.shape != ids.shape else ids.masked_fill(mask == 0, -100)
        shifted = True
    else:
        return None
    if shifted:
        real = targets[:, :-1] != -100 if not isinstance(labels, Tensor) else True
        targets, logits = targets[:, 1:].where(torch.as_tensor(real, device=targets.device), -100), logits[:, :-1]
    targets = targets.to(logits.device).repeat(copies, *[1] * (targets.ndim - 1))
    return torch.stack([_loss(x, y) for x, y in zip(logits, targets, strict=True)]).double().cpu()


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return functional.cross_entropy(wide.reshape(-1, wide.shape[-1]), targets.reshape(-1), ignore_index=-100)


@torch.no_grad()
def cosine_distances(x: Tensor, y: Tensor, tokens: Tensor | None) -> Float[Tensor, " B"]:
    """1 - cos between outputs, over the last axis; the mean over the tokens of each sequence."""
    wide = torch.float64
    apart = 1 - functional.cosine_similarity(x.to(wide), y.to(wide), dim=-1)
    if apart.ndim > 1 and tokens is not None and tokens.shape == apart.shape[:2]:
        real = tokens.to(apart.device, torch.bool)
        apart = apart.flatten(2).mean(-1) if apart.ndim > 2 else apart
        return (apart.where(real, 0.0).sum(1) / real.sum(1)).cpu()
    return apart.flatten(1).mean(1).cpu() if apart.ndim > 1 else apart.cpu()


# What models are run on.


def _batches(module: nn.Module, batch: Text | None, tokenizer: Any, length: int, tokens: int) -> list[Batch]:
    if batch is None:
        from locater.inputs.corpus import embedded_text

        batch = embedded_text()
    size = batch.shape[1] if isinstance(batch, Tensor) and batch.ndim == 2 else length
    together = max(1, TOGETHER // max(1, size))
    return batches(module, batch, tokenizer=tokenizer, length=length, tokens=tokens, batch=together)


def _shape(batch: Batch) -> tuple[int, int]:
    """Sequences and tokens of a batch."""
    ids = batch.get("input_ids")
    return batch_size(batch), ids.shape[1] if isinstance(ids, Tensor) and ids.ndim > 1 else 1


def _real_tokens(batch: Batch) -> Tensor | None:
    """(B, T), True where a token is no padding; None where all are, or where tokens are not known."""
    mask = batch.get("attention_mask")
    return mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None
