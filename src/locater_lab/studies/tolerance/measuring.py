"""What the study measures of a model: what each head could be judged by, and the model with heads changed.

Each measurement is a line of JSON, written when it is done, so that an interrupted run goes on where it was.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from locater import probe
from locater.calls.head_removal import HeadRemoval, Removal, heads_removed
from locater.calls.interceptors import AttentionRequest, Interceptor, add_interceptor, remove_interceptor
from locater.commands.ablating import cosine_distances
from locater.discovery import attention_layers
from locater.errors import LocaterError
from locater.explain.replayed_pass import Heads, ReplayedPass, main_output, replayed
from locater.inputs.corpus import fingerprint
from locater.inputs.text import Batch, batches, read_text
from locater.layers import AttentionLayer
from locater.layers.output_maps_and_written_norms import written_norms
from locater.numerics import finite_or_none
from locater.observing.attention_maps import attention_maps
from locater.observing.run_model import run_model
from locater.sources.weights import ModuleWeights
from locater_lab.engine.reproduction import Setting
from locater_lab.studies.flags import STORIES, model_inputs

CHOOSE, JUDGE, CHARACTERS = "valid.txt.xz", "test.txt.xz", 60_000
SEQUENCES, PROBED, SLOPES = 4, 4, 2  # that changes are judged on, that a probe reads, and that gradients are taken on
SINKS = 4
DIRECTIONS = 8  # random directions of an output without a loss
DRAWS = 6  # of next tokens, for the second order of a loss
TOGETHER = 1024  # tokens in all copies of a sequence in a pass
Head = tuple[int, int]


@dataclass(frozen=True)
class Subject:
    """A model of the study: the tokens of its sequences for heads one by one and for many at once, the part of them
    whose loss counts, and how many heads of each layer are changed one by one (None: all).
    """

    folder: str
    judges: bool
    length: int
    long: int
    part: float = 0.5
    drawn: int | None = None
    causal: bool = True


SUBJECTS: dict[str, Subject] = {
    "demo": Subject("", False, 256, 256),
    "stories260K": Subject("stories260K", False, 256, 256),
    "all-MiniLM-L6-v2": Subject("all-minilm-l6-v2", False, 256, 256, causal=False),
    "AntiBERTy": Subject("antiberty", True, 115, 115, causal=False),
    "SmolLM2-135M-Instruct": Subject("smollm2-135m-instruct", True, 512, 1024, drawn=2),
    "Gemma-3-270M": Subject("gemma3-270m", True, 512, 1024, part=0.25, drawn=2),
}


def changes_of_a_head(length: int) -> dict[str, Removal]:
    """What is done to one head after the other, in sequences of `length` tokens."""
    return {
        "zero": Removal("zero"),
        "window": Removal("window", window=length // 4, sinks=SINKS),
        "2 bits": Removal("bits", bits=2),
        "mean": Removal("mean"),
        "uniform": Removal("uniform"),
        "4 bits": Removal("bits", bits=4),
        "1 bit": Removal("bits", bits=1),
    }


def changes_of_all(length: int) -> dict[str, Removal]:
    """What is done to all heads at once: windows are named by their share of the sequence."""
    return {
        "window 1/8": Removal("window", window=length // 8, sinks=SINKS),
        "window 1/2": Removal("window", window=length // 2, sinks=SINKS),
        **{f"{bits} bits": Removal("bits", bits=bits) for bits in (8, 4, 2)},
    }


LISTS = {"zero": ("zero", 0.25), "window": ("window 1/8", 0.5), "2 bits": ("2 bits", 0.5)}  # rule, change, share


def of_list(name: str, length: int) -> tuple[Removal, float]:
    """What is done to the heads of a list, and which share of all heads it has."""
    change, share = LISTS[name]
    return {**changes_of_a_head(length), **changes_of_all(length)}[change], share


# ---- texts ----


@dataclass(frozen=True)
class Inputs:
    """Sequences to predict from, to change heads one by one on, and to change many on; and a hash of their text."""

    choose: list[Batch]
    alone: list[Batch]
    together: list[Batch]
    text: str


def inputs_of(name: str, module: nn.Module, setting: Setting) -> Inputs:
    """The sequences of a model, one to a batch. Models with little text have the same ones for many heads at once."""
    subject = SUBJECTS[name]
    if name == "AntiBERTy":
        chains = model_inputs(name, None)
        each = [{"input_ids": chain[None]} for chain in chains]
        return Inputs(each[:4], each[4:], each[4:], fingerprint(str(chains.tolist())))
    choose, judge = _texts(name, setting)
    cut = partial(_sequences, module)
    alone = cut(judge, subject.length)
    skip = 0 if subject.long == subject.length else SEQUENCES * subject.length
    together = cut(judge, subject.long, skip) if skip else alone
    return Inputs(cut(choose, subject.length), alone, together, fingerprint(choose + judge))


def _texts(name: str, setting: Setting) -> tuple[str, str]:
    if name in ("demo", "stories260K"):
        text = setting.text if name == "demo" else " ".join(STORIES.split("\n"))
        half = len(text) // 2
        return text[:half][:CHARACTERS], text[half:][:CHARACTERS]
    if setting.data is None:
        raise LocaterError(f"{name}: give --data FOLDER with {CHOOSE} and {JUDGE}")
    return read_text(setting.data / CHOOSE)[:CHARACTERS], read_text(setting.data / JUDGE)[:CHARACTERS]


def _sequences(module: nn.Module, text: str, length: int, skip: int = 0) -> list[Batch]:
    found = batches(module, text, length=length, tokens=SEQUENCES * length, batch=1, skip=skip)
    return [{"input_ids": part["input_ids"]} for part in found]


def folder_of(name: str, models: Path | None) -> Path | None:
    if name == "demo":
        return Path(str(files("locater") / "demo"))
    folder = None if models is None else models / SUBJECTS[name].folder
    return folder if folder is not None and folder.is_dir() else None


def every_head(layers: Sequence[AttentionLayer]) -> list[Head]:
    return [(number, head) for number, layer in enumerate(layers) for head in range(layer.heads)]


def drawn_heads(name: str, layers: Sequence[AttentionLayer]) -> list[Head]:
    """The heads that are changed one by one."""
    count, generator = SUBJECTS[name].drawn, random.Random(0)
    if count is None:
        return every_head(layers)
    return [(n, h) for n, layer in enumerate(layers) for h in sorted(generator.sample(range(layer.heads), count))]


# ---- the model with heads changed ----


class Judged:
    """One sequence of a model, and what it loses with heads changed: nats of the last part, or the cosine distance."""

    def __init__(self, module: nn.Module, subject: Subject, batch: Batch, replay: ReplayedPass, out: Any) -> None:
        self.ids, self.kept = batch["input_ids"], kept_tokens(subject, batch)
        self.causal = all(layer.causal for layer in replay.layers)
        self.replay, self.before = replay, out
        self.loss = float(self._losses(out)[0]) if self.causal else None

    def _losses(self, out: Any) -> Tensor:
        """The loss of each copy of the sequence."""
        logits = main_output(out)
        assert logits is not None
        targets = self.ids[0, -self.kept :]
        return torch.stack([functional.cross_entropy(x[:-1].float(), targets) for x in logits]).double()

    def change(self, parts: Sequence[Heads], how: Removal) -> list[float]:
        """What is lost with each of `parts` changed."""
        with torch.no_grad():
            out, _ = self.replay.replay(parts, how)
            if self.loss is not None:
                return [float(x) - self.loss for x in self._losses(out)]
            output, before = main_output(out), main_output(self.before)
            assert output is not None
            assert before is not None
            return [float(cosine_distances(x, before, None)) for x in output.chunk(len(parts))]

    def one_by_one(self, heads: Sequence[Head], how: Removal) -> list[float]:
        """What is lost with each head changed, in the order of `heads`, which are sorted."""
        found: list[float] = []
        while len(found) < len(heads):
            layer, some = heads[len(found)][0], heads[len(found) : len(found) + self.replay.most]
            found += self.change([{layer: (head,)} for number, head in some if number == layer], how)
        return found


def kept_tokens(subject: Subject, batch: Batch) -> int:
    """How many tokens at the end of a sequence have a loss."""
    return int(batch["input_ids"].shape[1] * subject.part)


@contextmanager
def judged(module: nn.Module, subject: Subject, batch: Batch) -> Iterator[Judged]:
    causal = all(layer.causal for layer in attention_layers(module))
    given: dict[str, Any] = {**batch, **({"logits_to_keep": kept_tokens(subject, batch) + 1} if causal else {})}
    copies = max(1, TOGETHER // batch["input_ids"].shape[1])
    with torch.no_grad(), replayed(module, given, copies) as (replay, out, _):
        yield Judged(module, subject, batch, replay, out)


def together(heads: Sequence[Head]) -> Heads:
    found: dict[int, tuple[int, ...]] = {}
    for layer, head in heads:
        found[layer] = (*found.get(layer, ()), head)
    return found


def drawn_list(name: str, rule: str, sequence: int, heads: Sequence[Head], count: int) -> list[Head]:
    """As many heads drawn at random, others for each sequence."""
    return sorted(random.Random(f"{name}, {rule}, {sequence}").sample(list(heads), count))


# ---- what could tell it beforehand ----

SECOND = "second order"  # added when first lines of judges had been seen
BY_CHANGE = ("written change", "gradient x change", SECOND)  # of predictors: those that are computed for each change
CLASSES = {
    "weights and surrogate": ("depth", "written", "prior entropy", "predicted entropy", "predicted sink"),
    "one pass": ("entropy ratio", "sink", "distance", "outside", "role", "written change"),
    "gradient": ("gradient x change",),
}
ROLES = ("previous", "duplicate", "induction")


def predictors(module: nn.Module, subject: Subject, choose: Sequence[Batch]) -> dict[str, list[float | None]]:
    """Columns over all heads; those of a change are named `written change: zero`."""
    layers = list(attention_layers(module))
    length = choose[0]["input_ids"].shape[1]
    rows = probe(module, [dict(batch) for batch in choose[:PROBED]], length=length).rows
    if len(rows) != len(every_head(layers)):
        raise LocaterError(f"a probe has {len(rows)} of {len(every_head(layers))} heads")
    columns: dict[str, list[float | None]] = {
        "depth": [float(layer) for layer, _ in every_head(layers)],
        "written": [norm for layer in layers for norm in written_norms(layer)],
        "prior entropy": [row.prior_entropy for row in rows],
        "predicted entropy": [row.predicted_entropy for row in rows],
        "predicted sink": [row.predicted_sink for row in rows],
        "entropy ratio": [row.entropy_ratio for row in rows],
        "sink": [row.sink for row in rows],
        "distance": [row.distance for row in rows],
        "role": [max((row[name] for name in ROLES if row[name] is not None), default=None) for row in rows],
    }
    sums: dict[str, Tensor] = {}
    some = choose[:SLOPES]
    for batch in some:
        for name, values in estimates(module, subject, batch).items():
            sums[name] = sums.get(name, torch.zeros_like(values)) + values / len(some)
    columns |= {name: [float(x) for x in values] for name, values in sums.items()}
    return {name: [None if x is None else finite_or_none(x) for x in values] for name, values in columns.items()}


class ChangedOutputs(Interceptor):
    """Listens to the attention of a layer: what would change of the outputs of its heads under every change."""

    order = 100  # after all other changes

    def __init__(self, layer: AttentionLayer, changes: Mapping[str, Removal], window: int) -> None:
        self.layer, self.changes, self.window = layer, changes, window
        self.deltas: dict[str, Tensor] = {}  # (B, T, H, V)
        self.outside: Tensor | None = None  # (H,)
        self.products: dict[str, list[Tensor]] = {name: [] for name in changes}  # (H,), one for each backward pass

    def __call__(self, request: AttentionRequest) -> AttentionRequest:
        return replace(request, attend=partial(self._attend, request))

    def _attend(
        self, request: AttentionRequest, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kw: Any
    ) -> Any:
        out = request.attend(module, q, k, v, *args, **kw)
        z, call = out[0] + torch.zeros((), requires_grad=True), request.call()  # parameters need no gradient
        every = list(range(self.layer.heads))
        with torch.no_grad():
            for name, how in self.changes.items():
                removal = HeadRemoval(self.layer.name, self.layer.heads, how)
                self.deltas[name] = removal.change(z, [every], lambda: (call, v)) - z
            maps = attention_maps(call)[0]
            at = torch.arange(maps.shape[-1])
            seen = ((at[:, None] - at).abs() < self.window) | (at < SINKS)
            self.outside = maps.masked_fill(seen, 0.0).sum(-1).mean(-1)
        z.register_hook(self._multiply)
        return (z, *out[1:])

    def _multiply(self, slope: Tensor) -> None:
        for name, delta in self.deltas.items():
            self.products[name].append((slope * delta).sum((0, 1, 3)))

    def written(self, name: str) -> Tensor:
        """Mean size (H,) over tokens of what the head would write differently."""
        out = self.layer.out
        assert out is not None
        weight = out.weight().detach().unflatten(1, (self.layer.heads, -1))  # (d, H, V)
        delta = self.deltas[name][0].transpose(0, 1)  # (H, T, V)
        return torch.stack([(part @ weight[:, head].T).norm(dim=-1).mean() for head, part in enumerate(delta)])


def estimates(module: nn.Module, subject: Subject, batch: Batch, second: bool = False) -> dict[str, Tensor]:
    """`outside`, and `written change` and `gradient x change` of every change, over all heads: one pass, and a backward
    pass for the loss, or for each random direction of an output without one. With `second`, `second order` in place of
    the last.
    """
    layers, weights = list(attention_layers(module)), ModuleWeights(module)
    length = batch["input_ids"].shape[1]
    changes = changes_of_a_head(length)
    listeners = [ChangedOutputs(layer, changes, length // 4) for layer in layers]
    module.requires_grad_(False)
    with heads_removed(module, []):
        for layer, listener in zip(layers, listeners, strict=True):
            add_interceptor(weights.submodule(layer.name), listener)
        try:
            causal = all(layer.causal for layer in layers)
            targets = _targets(module, subject, batch, causal, second)
            for number, target in enumerate(targets):
                target.backward(retain_graph=number + 1 < len(targets))
        finally:
            for layer, listener in zip(layers, listeners, strict=True):
                remove_interceptor(weights.submodule(layer.name), listener)
    found = {"outside": torch.cat([x.outside for x in listeners if x.outside is not None])}
    with torch.no_grad():
        for name in changes:
            found[f"written change: {name}"] = torch.cat([x.written(name) for x in listeners])
            products = [torch.stack(x.products[name]) for x in listeners]
            found[f"{SECOND if second else BY_CHANGE[1]}: {name}"] = torch.cat([_estimate(x) for x in products])
    return found


def second_order(module: nn.Module, subject: Subject, choose: Sequence[Batch]) -> dict[str, list[float]]:
    """`second order` of every change over all heads of a causal model, on one sequence."""
    found = estimates(module, subject, choose[0], second=True)
    return {name: [float(x) for x in values] for name, values in found.items() if name.startswith(SECOND)}


def _targets(module: nn.Module, subject: Subject, batch: Batch, causal: bool, second: bool) -> list[Tensor]:
    """The loss; or the products of the normalised output with random directions, per square root of a token. With
    `second`, log-probabilities of next tokens that are drawn from the model's own prediction, with random signs: half of
    the mean square of their change is the second-order change of the divergence from that prediction.
    """
    kept = kept_tokens(subject, batch)
    given: dict[str, Any] = {**batch, **({"logits_to_keep": kept + 1, "use_cache": False} if causal else {})}
    output = main_output(run_model(module, given, gradients=True))
    assert output is not None
    generator = torch.Generator().manual_seed(0)
    if causal and not second:
        return [functional.cross_entropy(output[0, :-1].float(), batch["input_ids"][0, -kept:])]
    if causal:
        logs = output[0, :-1].float().log_softmax(-1)
        drawn = torch.multinomial(logs.detach().exp(), DRAWS, replacement=True, generator=generator)
        signs = torch.randint(2, drawn.shape, generator=generator) * 2.0 - 1.0
        return list((logs.gather(1, drawn) * signs).sum(0) / kept**0.5)
    unit = functional.normalize(output.float(), dim=-1)
    draws = [torch.randn(unit.shape, generator=generator) for _ in range(DIRECTIONS)]
    return [(unit * draw).sum() / unit.shape[1] ** 0.5 for draw in draws]


def _estimate(products: Tensor) -> Tensor:
    """(H,) of products (passes, H): the first-order change of the loss, or 1 - cos to second order."""
    return products[0] if len(products) == 1 else products.square().mean(0) / 2
