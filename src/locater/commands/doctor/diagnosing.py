"""`doctor()`: what is wrong with a model, alone, beside its base, and with an adapter that should be in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from locater.commands.doctor.alone import findings_alone
from locater.commands.doctor.beside_base import findings_beside
from locater.commands.doctor.merge import open_adapter_on
from locater.commands.doctor.on_text import check_text, examine_on_text
from locater.commands.doctor.pairs import Paired
from locater.commands.doctor.places import tensors_words
from locater.commands.doctor.reading import Examined, Model, examine, find_attention, open_model, source_name
from locater.commands.doctor.reading_pairs import examine_pair
from locater.commands.doctor.tensors import Facts
from locater.commands.doctor.undoing import undo
from locater.commands.probing import HeadKey
from locater.errors import DamagedError, LocaterError
from locater.files import is_there, read_json
from locater.findings.causes import Finding, finding
from locater.inputs.text import Text
from locater.numerics import finite_or_none, one_thread
from locater.results.diagnosis import Diagnosis
from locater.sources.open_source import Source, WrappedSource
from locater.sources.remote import session
from locater.sources.safetensors_file import shards_of

Progress = Callable[[Iterable[Any], int], Iterable[Any]]
WITHOUT_BASE = (
    "give --base: rotary order, shifted gains, moved layers, a lost scale, a wrong merge and another model show only "
    "beside BASE"
)


def doctor(
    source: Source,
    base: Source | None = None,
    adapter: str | None = None,
    *,
    text: Text | None = None,
    tokenizer: Any = None,
    progress: Progress | None = None,
    download: bool = False,
    **names: Any,
) -> Diagnosis:
    """Is this checkpoint what it should be? Every tensor of `source` is read once; without `text` nothing is run.

    `source` and `base` are an nn.Module, a folder, a weights file, a hub id or an address. With `base`, doctor says
    what was done to it; with `adapter`, a folder of peft that should be merged into it, whether it was, once, and into
    the right base.

    >>> from torch import nn
    >>> doctor(nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 2)).broken
    False
    """
    start, shown = time.perf_counter(), source_name(source)
    if adapter is not None and base is None:
        raise LocaterError("--adapter says what should have been added to BASE: give --base too")
    read = None if text is None else check_text(text)
    with session(), one_thread():  # blocks are small: on a busy machine a team of threads takes ten times as long
        try:
            model = open_model(source, shown, download)
        except DamagedError as error:  # the files contradict themselves, so nothing more is known of them
            damaged = finding(error.cause, "files", str(error).removeprefix(f"{shown}: "))
            other = None if base is None else source_name(base)
            return Diagnosis(shown, [damaged], base=other, adapter=adapter)
        find_attention(model, **names)
        of_files = stale_index(model, source)
        if base is None:
            seen, needs = examine(model, progress), [WITHOUT_BASE]
            found, pairs = findings_alone(seen), None
        else:
            original = open_model(base, source_name(base), download)
            find_attention(original, **names)
            adapted = None if adapter is None else open_adapter_on(adapter, original)
            pairs = examine_pair(model, original, adapted, progress)
            seen, needs, undone = pairs.own, [], undo(pairs)
            if undone is not None:  # what computes the same is no difference: the rest of it is
                pairs = examine_pair(undone.model, original, adapted, progress)
            found = findings_beside(pairs, adapted is not None, undone, seen)
    found += [*of_files, *unread_notes(seen)]
    ran = None if read is None else examine_on_text(source, base, read, tokenizer, _places(pairs))
    found += [] if ran is None else ran.findings
    return Diagnosis(
        shown,
        sorted(found, key=lambda item: ("fault", "change", "note").index(item.severity)),
        [tensor_row(fact, pairs) for fact in seen.facts.values()],
        head_rows(seen, pairs, {} if ran is None else ran.columns),
        {
            "tensors": len(seen.facts),
            "of": len(model.names),
            "bytes": seen.bytes + (pairs.base.bytes if pairs is not None else 0),
            "seconds": round(time.perf_counter() - start, 3),
            **({} if ran is None else {"text": ran.numbers}),
        },
        base=None if base is None else source_name(base),
        adapter=adapter,
        needs=needs,
    )


def _places(pairs: Paired | None) -> dict[HeadKey, HeadKey]:
    """Where in MODEL each head of BASE is, of layers that are equivalent but for the order of their heads."""
    equivalent = [] if pairs is None else [pair for pair in pairs.heads if pair.equivalent]
    return {(pair.number, there): (pair.number, here) for pair in equivalent for here, there in enumerate(pair.order)}


def stale_index(model: Model, source: Source) -> list[Finding]:
    """An index that does not name all tensors of its shards: a loader that follows it leaves them out."""
    if isinstance(source, nn.Module | WrappedSource):
        return []
    for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        path = Path(source) / name
        if is_there(path):
            named = shards_of(read_json(path), str(path))
            lost = [tensor for tensor in model.names if tensor not in named]
            if lost:
                words = f"does not name {len(lost)} tensors that its shards have: {tensors_words(lost)}"
                return [finding("stale-index", name, words, tensors=lost)]
    return []


def unread_notes(seen: Examined) -> list[Finding]:
    """What was not read, and why."""
    found = []
    if seen.model.unread:
        found.append(finding("unknown", "heads", f"were not read: {seen.model.unread}", severity="note"))
    if seen.refused:
        name, why = next(iter(seen.refused.items()))
        why = why.removeprefix(f"{seen.model.weights.where}: ")
        words = f"{len(seen.refused)} were not read: {why}" if len(seen.refused) > 1 else f"was not read: {why}"
        found.append(finding("unknown", "tensors" if len(seen.refused) > 1 else name, words, severity="note"))
    return found


def tensor_row(fact: Facts, pairs: Paired | None) -> dict[str, Any]:
    """A tensor as the document has it."""
    place, pair = fact.place, None if pairs is None else pairs.pairs.get(fact.name)
    return {
        "name": fact.name,
        "stack": place.stack,
        "layer": place.layer,
        "kind": place.kind,
        "shape": list(fact.shape),
        "dtype": fact.dtype,
        "finite": fact.finite,
        "rms": finite_or_none(fact.rms),
        "largest": finite_or_none(fact.largest),
        "mean": finite_or_none(fact.mean),
        "difference": None if pair is None or pair.other_shape else finite_or_none(pair.difference),
        "rank": None if pair is None else pair.rank,
    }


def head_rows(
    seen: Examined, pairs: Paired | None, on_text: Mapping[HeadKey, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Heads as the document has them: the spread of their logits, what they write, both beside the base's, and what
    they do on a text.
    """
    beside = {} if pairs is None else {x.number: x for x in pairs.heads}
    rows = []
    for heads in seen.heads:
        pair = beside.get(heads.number)
        columns = {"spread": heads.spread, "written": heads.written}
        if pair is not None:
            columns |= {"logits_difference": pair.logits_difference, "output_difference": pair.output_difference}
        for head in range(heads.heads):
            numbers = {name: None if x is None else finite_or_none(float(x[head])) for name, x in columns.items()}
            rows.append({"layer": heads.number, "head": head, **numbers, **on_text.get((heads.number, head), {})})
    return rows
