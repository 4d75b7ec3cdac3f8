"""Methods that read attention maps: relevance and rollout follow them from layer to layer, raw attention and the norms
of what attention carries are those of the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locater.errors import LocaterError
from locater.explain.attention_event import AttentionEvent
from locater.explain.explanation import Explanation, Target, TargetChoice, choose_target
from locater.explain.recorded_run import Inputs, Run, as_run
from locater.explain.streams import (
    StreamsOf,
    StreamStep,
    end_steps,
    last_steps,
    main_stream,
    read_rows,
    stream_sizes,
    stream_steps,
)
from locater.observing.accumulate import wide
from locater.observing.attention_maps import attention_maps


@torch.inference_mode(False)
def relevance(
    model: nn.Module | Run,
    inputs: Inputs | None = None,
    target: TargetChoice = None,
    *,
    streams: StreamsOf | None = None,
) -> Explanation:
    """Attention maps weighted by their gradients, carried through all layers (Chefer, Gur and Wolf 2021).

    Works for one stack (decoders, BERT, ViT), encoder and decoder (T5, BART, Whisper), two towers (CLIP) and two
    streams with cross-attention, under any attention backend. Scores are the row of the token that the target reads,
    without the 1 that this token has from itself; the mean of the rows where it reads several. `streams` names the
    streams of layers by patterns of their names, where paths do not tell them.

    >>> from locater_lab.train import Shape, Transformer
    >>> _ = torch.manual_seed(0)
    >>> model = Transformer(Shape(vocabulary=16, layers=2, width=16, heads=2, kv_heads=2, hidden=16), scale=0.3)
    >>> why = relevance(model, torch.arange(6)[None], target=3)
    >>> why.scores.shape, why.matrix.shape, bool((why.scores >= 0).all())
    (torch.Size([6]), torch.Size([6, 6]), True)
    """
    run = as_run(model, inputs, gradients=True)
    events = run.values("relevance")
    chosen = choose_target(run.output, target)
    steps = stream_steps(events, streams)
    slopes = target_gradients(run, chosen, steps)
    matrices = RelevanceMatrices(stream_sizes(steps), like=_zero_like(steps))
    crossings: list[tuple[str, str, Tensor]] = []
    for number, (step, slope) in enumerate(zip(steps, slopes, strict=True)):
        Abar = step.event.relevance(slope, sequence_of(step, chosen))
        if not step.is_cross:
            matrices.self_attention(step.reader, Abar)
            continue
        crossings.append((step.reader, step.read, Abar))
        if number + 1 == len(steps) or steps[number + 1].at != step.at:  # both directions are applied together
            matrices.cross_attention(*crossings)
            crossings.clear()
    return explanation_from("relevance", run, chosen, steps, slopes, matrices, EXACT_RELEVANCE)


@torch.inference_mode(False)
def rollout(
    model: nn.Module | Run,
    inputs: Inputs | None = None,
    target: TargetChoice = None,
    *,
    streams: StreamsOf | None = None,
) -> Explanation:
    """The product over layers of (mean over heads of A + I), rows scaled to sum to 1 (Abnar and Zuidema 2020).

    The target only says which token's row is read. What reaches stream s from stream q by cross-attention is
    R_ss^T A R_qq, with A of the last such layer.

    >>> from locater_lab.train import Shape, Transformer
    >>> _ = torch.manual_seed(0)
    >>> model = Transformer(Shape(vocabulary=16, layers=2, width=16, heads=2, kv_heads=2, hidden=16), scale=0.3)
    >>> round(float(rollout(model, torch.arange(6)[None]).scores.sum()), 5)
    1.0
    """
    run, chosen, steps, slopes = run_to_read(model, inputs, target, streams)
    matrices = _RolloutMatrices(stream_sizes(steps), _zero_like(steps))
    for step in steps:
        other = step.event.call.other
        if other is not None and other.signed:
            raise LocaterError(
                f"{step.event.layer.name}: rollout needs weights of at least 0, and those of "
                f"{other.name} attention are signed: use relevance or gradient_input"
            )
        matrices.add(step, step.event.mean_map(sequence_of(step, chosen)))
    exact = "the target chooses the token; its value and sign do not enter"
    return explanation_from("rollout", run, chosen, steps, slopes, matrices, exact)


@torch.inference_mode(False)
def raw_attention(
    model: nn.Module | Run,
    inputs: Inputs | None = None,
    target: TargetChoice = None,
    *,
    streams: StreamsOf | None = None,
) -> Explanation:
    """The attention map of the last layer, mean over heads; for another stream, that of the last cross-attention."""
    run, chosen, steps, slopes = run_to_read(model, inputs, target, streams)
    last = {(step.reader, step.read): step for step in steps}
    maps = {pair: step.event.mean_map(sequence_of(step, chosen)) for pair, step in last.items()}
    return explanation_from(
        "raw_attention", run, chosen, steps, slopes, StackMaps(maps), "the weights of one layer, as they are"
    )


@torch.inference_mode(False)
def attention_norms(
    model: nn.Module | Run,
    inputs: Inputs | None = None,
    target: TargetChoice = None,
    *,
    streams: StreamsOf | None = None,
) -> Explanation:
    """|| sum over heads of A_ij v_j W_O || in the last layer: the size of what token i takes from token j (Kobayashi et
    al. 2020). For another stream, the same of the last cross-attention.
    """
    run, chosen, steps, slopes = run_to_read(model, inputs, target, streams)
    run.values("attention_norms")
    last = {(step.reader, step.read): step for step in steps}
    maps = {pair: carried_norms(step.event, sequence_of(step, chosen)) for pair, step in last.items()}
    exact = "norms of the vectors that attention adds in one layer; what later maps and norms do is left out"
    return explanation_from("attention_norms", run, chosen, steps, slopes, StackMaps(maps), exact)


class RelevanceMatrices:
    """Relevance of every token for every other: matrices R, by (stream of the reader, stream of what is read).

    Rules of Chefer, Gur and Wolf 2021; numbers in brackets are those of their equations. A map Abar (T_s, T_q) says
    how much each query of stream s takes from each key of stream q. R_sq (T_s, T_q) is the relevance of the tokens of q
    for those of s. At the start R_ss is the identity and R_sq is zero.

    >>> R = RelevanceMatrices({"text": 2})
    >>> R.self_attention("text", torch.tensor([[0.5, 0.5], [0.0, 1.0]]))
    >>> R["text", "text"].tolist()
    [[1.5, 0.5], [0.0, 2.0]]
    """

    def __init__(self, sizes: Mapping[str, int], like: Tensor | None = None) -> None:
        like = torch.zeros(()) if like is None else like
        self.sizes = dict(sizes)
        self._matrices = {(s, s): torch.eye(size).to(like) for s, size in sizes.items()}

    def __getitem__(self, pair: tuple[str, str]) -> Float[Tensor, "Q T"]:
        if pair in self._matrices:
            return self._matrices[pair]
        like = next(iter(self._matrices.values()))
        return like.new_zeros(self.sizes[pair[0]], self.sizes[pair[1]])

    def knows(self, reader: str, read: str) -> bool:
        """Whether anything of `read` has reached `reader`."""
        return (reader, read) in self._matrices

    def self_attention(self, s: str, Abar: Float[Tensor, "T T"]) -> None:
        """R_ss += Abar R_ss (6), R_sq += Abar R_sq (7)."""
        for pair, R in self._matrices.items():
            if pair[0] == s:
                self._matrices[pair] = R + Abar @ R

    def cross_attention(self, *steps: tuple[str, str, Float[Tensor, "Q T"]]) -> None:
        """Steps (s, q, Abar_sq) at once: R_sq += Rbar_ss^T Abar_sq Rbar_qq (10), R_ss += Abar_sq R_qs (11)."""
        added = []
        for s, q, Abar in steps:
            carried = scale_rows(self[s, s]).mT @ Abar @ scale_rows(self[q, q])
            added.append(((s, q), carried))
            if self.knows(q, s):
                added.append(((s, s), Abar @ self[q, s]))
        for pair, addition in added:
            self._matrices[pair] = self[pair] + addition


def scale_rows(R: Float[Tensor, "T T"]) -> Float[Tensor, "T T"]:
    """Rbar (8, 9): R - I with rows scaled to sum to 1, plus I. A row of zeros stays zero, where the quotient is 0 / 0.

    >>> scale_rows(torch.tensor([[2.0, 3.0], [0.0, 1.0]])).tolist()
    [[1.25, 0.75], [0.0, 1.0]]
    """
    eye = torch.eye(len(R), dtype=R.dtype, device=R.device)
    moved = R - eye
    sums = moved.sum(-1, keepdim=True)
    return torch.where(sums == 0, torch.zeros_like(moved), moved / torch.where(sums == 0, 1.0, sums)) + eye


EXACT_RELEVANCE = (
    "the gradient of the target with respect to every attention map is exact; how it is carried is a heuristic: "
    "scores do not add up to the target"
)


@dataclass
class StackMaps:
    """Matrices as they are, without an identity in them."""

    matrices: Mapping[tuple[str, str], Tensor]

    def __getitem__(self, pair: tuple[str, str]) -> Tensor:
        return self.matrices[pair]

    def knows(self, reader: str, read: str) -> bool:
        return (reader, read) in self.matrices


class _RolloutMatrices(StackMaps):
    """Rollout: self-attention of every stream as a product, and the last cross-attention between two."""

    def __init__(self, sizes: Mapping[str, int], like: Tensor) -> None:
        self.eyes = {name: torch.eye(size).to(like) for name, size in sizes.items()}
        self.alone = dict(self.eyes)
        self.crossings: dict[tuple[str, str], Tensor] = {}

    def add(self, step: StreamStep, A: Float[Tensor, "Q T"]) -> None:
        if step.is_cross:
            self.crossings[step.reader, step.read] = A
            return
        mixed = A + self.eyes[step.reader]
        self.alone[step.reader] = mixed / mixed.sum(-1, keepdim=True) @ self.alone[step.reader]

    def __getitem__(self, pair: tuple[str, str]) -> Tensor:
        s, q = pair
        return self.alone[s] if s == q else self.alone[s].mT @ self.crossings[pair] @ self.alone[q]

    def knows(self, reader: str, read: str) -> bool:
        return reader == read or (reader, read) in self.crossings


def target_gradients(
    run: Run, target: Target, steps: Sequence[StreamStep], only: Sequence[StreamStep] | None = None
) -> list[Tensor | None]:
    """The gradient of the target with respect to the output of each attention call, or of `only` some; None where the
    target does not depend on it, or where it was not recorded.
    """
    chosen = [step for step in (steps if only is None else only) if step.event.output is not None]
    outputs = [step.event.output for step in chosen]
    with torch.enable_grad():  # whatever the caller has set
        number = target.number(run.output)
    if not outputs or not number.requires_grad:
        return [None] * len(steps)
    # the graph stays for other methods of the same run
    slopes = torch.autograd.grad(number, outputs, allow_unused=True, retain_graph=True)  # type: ignore[arg-type]
    by_step: dict[int, Tensor | None] = {}
    for step, slope in zip(chosen, slopes, strict=True):
        to_heads = step.event.to_heads
        by_step[id(step)] = slope if slope is None or to_heads is None else to_heads(slope)
    return [by_step.get(id(step)) for step in steps]


def head_estimates(run: Run, target: Target) -> dict[tuple[int, int], float]:
    """What the target would lose without each head, (layer, head), to first order: its gradient times the output of the
    head, summed over tokens. One backward pass; docs/head-scores.md says how far it can be trusted. Empty where outputs
    of heads were not seen.
    """
    steps = stream_steps(run.events)
    places = {id(layer): number for number, layer in enumerate(run.layers)}
    if len(steps) != len(places) or any(step.event.to_heads is not None for step in steps):
        return {}
    estimates: dict[tuple[int, int], float] = {}
    for step, slope in zip(steps, target_gradients(run, target, steps), strict=True):
        if slope is not None and step.event.output is not None:
            values = (slope.double() * step.event.output.detach().double()).sum((0, 1, 3)).tolist()
            estimates |= {(places[id(step.event.layer)], head): x for head, x in enumerate(values)}
    return estimates


def sequence_of(step: StreamStep, target: Target) -> int:
    """The row of a batch that a call is read at: the target's text, where several texts meet one image."""
    rows = step.event.call.query.shape[0]
    if rows == 1:
        return 0
    if target.index is None or target.position is not None or target.index >= rows:
        raise LocaterError(f"{step.event.layer.name}: the batch has {rows} inputs: explain one at a time")
    return target.index


def explanation_from(
    method: str,
    run: Run,
    target: Target,
    steps: Sequence[StreamStep],
    slopes: Sequence[Tensor | None],
    matrices: RelevanceMatrices | StackMaps,
    exact: str,
) -> Explanation:
    """Scores from matrices: for each stream, the rows of the tokens where the target reads."""
    rows, words = _rows_read(run, target, steps, slopes)
    scores: dict[str, Tensor] = {}
    for end, tokens in rows.items():
        for name in stream_sizes(steps):
            if not matrices.knows(end, name):
                continue
            part = matrices[end, name][tokens]
            if name == end and isinstance(matrices, RelevanceMatrices):
                part = part - torch.eye(matrices.sizes[name]).to(part)[tokens]
            scores[name] = scores.get(name, 0) + part.mean(0)
    main = main_stream(list(scores), list(rows))
    reader = next((end for end in rows if matrices.knows(end, main)), None)
    return Explanation(
        method,
        target,
        scores.pop(main).cpu(),
        None if reader is None else matrices[reader, main].cpu(),
        stream=main,
        other_streams={name: x.cpu() for name, x in scores.items()},
        exact=exact,
        how=f"{len(steps)} attention calls, {words}",
    )


def _rows_read(
    run: Run, target: Target, steps: Sequence[StreamStep], slopes: Sequence[Tensor | None]
) -> tuple[dict[str, Tensor], str]:
    """The tokens of each stream where the target reads, and that in words."""
    at, rows, words = {id(step): n for n, step in enumerate(steps)}, dict[str, Tensor](), list[str]()
    # a pooling head may read the whole stream, and the target none of it: then every stream may be read
    for ends in (end_steps(steps), last_steps(steps)):
        for name, end in ends.items() if not rows else ():
            tokens = read_rows(slopes[at[id(end)]], sequence_of(end, target))
            if end.event.output is None:  # attention that gives no gradient
                size = end.event.call.query.shape[2]
                tokens = torch.tensor([target.position]) if target.position is not None else torch.arange(size)
            if len(tokens):
                rows[name] = tokens.to(end.event.call.query.device)
                where = f"token {int(tokens[0])}" if len(tokens) == 1 else f"the mean of {len(tokens)} tokens"
                words.append(where if len(ends) == 1 else f"{where} of {name}")
    if not rows:
        raise LocaterError(f"{run.name}: {target.what} does not depend on its attention: there is nothing to follow")
    return rows, "read at " + " and ".join(words)


def run_to_read(
    model: nn.Module | Run, inputs: Inputs | None, target: TargetChoice, streams: StreamsOf | None
) -> tuple[Run, Target, list[StreamStep], list[Tensor | None]]:
    """A run whose target says only where to read: gradients of the last calls alone."""
    run = as_run(model, inputs, gradients=True)
    chosen, steps = choose_target(run.output, target), stream_steps(run.events, streams)
    return run, chosen, steps, target_gradients(run, chosen, steps, list(last_steps(steps).values()))


def _zero_like(steps: Sequence[StreamStep]) -> Tensor:
    query = steps[0].event.call.query
    return torch.zeros((), dtype=torch.promote_types(query.dtype, torch.float32), device=query.device)


def carried_norms(event: AttentionEvent, row: int = 0) -> Float[Tensor, "T S"]:
    """|| sum_h A_hij v_hj W_O,h || for all pairs of tokens, from the Gram matrices of the heads at each key: an array
    (T, S, d) is not needed.
    """
    layer, values = event.layer, event.value
    if layer.out is None or values is None:
        raise LocaterError(
            f"{layer.name}: its output map is not known, so it has no attention_norms: use raw_attention"
        )
    if layer.mixed_norm is not None or layer.gate is not None:
        raise LocaterError(f"{layer.name}: a norm or a gate is in front of its output map: use raw_attention")
    H = layer.heads
    with torch.no_grad():
        v = values[row].to(wide(values.device)).repeat_interleave(H // values.shape[1], 0)  # (H, S, V)
        W_O = layer.out.weight().detach().to(v).unflatten(1, (H, -1))  # (d, H, V)
        carried = torch.einsum("hsv,dhv->shd", v, W_O)
        gram = carried @ carried.mT  # (S, H, H)
        A = attention_maps(event.call)[row].to(v)  # (H, T, S)
        squared = sum(A[h] * torch.einsum("gts,sg->ts", A, gram[:, h]) for h in range(H))
        assert isinstance(squared, Tensor)
        return squared.clamp_min(0).sqrt().to(torch.promote_types(values.dtype, torch.float32))
