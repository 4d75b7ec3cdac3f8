"""`probe()`: run a model over text or images and set what its heads do beside what theory predicts of them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from locater.data.images import image_batches
from locater.data.text import Batch, Text, batches, files_named
from locater.errors import LocaterError
from locater.families import AttentionLayer, attention_layers
from locater.files import write_whole
from locater.findings import FLAGS, Verdict, flags_of, judge
from locater.numerics import finite_or_none, spearman
from locater.observing.circuits import PERIOD, Circuit, circuit_scores
from locater.observing.collecting import Progress, collected
from locater.observing.inputs import run
from locater.observing.observation import observe
from locater.observing.rows import SeenHead
from locater.observing.stream import SeenLayer, time_first
from locater.predict.input_statistics import Input, Statistics
from locater.predict.prediction import logit_bound, predict
from locater.report.probe import block_of
from locater.theory import kept_at_entropy
from locater.verbs.load import load_model
from locater.verbs.scan_result import LENGTH, TOKENS, HeadRow
from locater.verbs.scanning import kept_in, root_mean_square, row_keys, scan
from locater.version import SCHEMA, __version__

if TYPE_CHECKING:
    import pandas

DEFAULT_TEXT = "the documentation inside Python"
LONGEST = 1024  # tokens that heads are run on for predictions


@dataclass(frozen=True)
class ProbeRow:
    """One head: measured, predicted from statistics of another part of the text, and what weights alone say (prior).

    `HOW` says of each column what kind of number it is. None: not asked for, or it has no meaning here.
    """

    layer: int
    head: int
    kv_head: int
    kind: str
    name: str
    rows: int
    entropy: float | None = None
    entropy_ratio: float | None = None
    max_logit: float | None = None
    max_probability: float | None = None
    row_mass: float | None = None
    participation: float | None = None
    typical_kept: float | None = None
    distance: float | None = None
    self_mass: float | None = None
    sink: float | None = None
    rest_entropy: float | None = None
    output_stable_rank: float | None = None
    output_effective_rank: float | None = None
    previous: float | None = None
    duplicate: float | None = None
    induction: float | None = None
    predicted_entropy: float | None = None
    predicted_sink: float | None = None
    predicted_rest_entropy: float | None = None
    predicted_typical_kept: float | None = None
    M: float | None = None
    F: float | None = None
    localization: float | None = None
    prior_entropy: float | None = None
    prior_typical_kept: float | None = None
    prior_localization: float | None = None
    logit_bound: float | None = None
    flags: tuple[str, ...] = ()

    def __getitem__(self, column: str) -> Any:
        return getattr(self, column)


MEASURED = (
    "entropy", "entropy_ratio", "max_logit", "max_probability", "row_mass", "participation", "typical_kept", "distance", "self_mass",
    "sink", "rest_entropy", "output_stable_rank", "output_effective_rank", "previous", "duplicate", "induction",
)  # fmt: skip
PREDICTED = (
    "predicted_entropy",
    "predicted_sink",
    "predicted_rest_entropy",
    "predicted_typical_kept",
    "M",
    "F",
    "localization",
)
PRIOR = ("prior_entropy", "prior_typical_kept", "prior_localization")
KEPT = ("typical_kept", "predicted_typical_kept", "prior_typical_kept")
BOUND = ("logit_bound",)
PROBE_COLUMNS = (*MEASURED, *PREDICTED, *PRIOR, *BOUND)
PROBE_FLAGS = tuple(f.name for f in FLAGS if set(f.needs) <= {*PROBE_COLUMNS, "finite", "S", "key_bias", "skew"})


@dataclass(frozen=True, repr=False)
class Probe:
    """What `probe()` found."""

    source: str
    assumptions: dict[str, Any]
    layers: list[dict[str, Any]]  # attention layers, with the statistics of their input
    streams: list[SeenLayer]  # the residual stream between blocks
    rows: list[ProbeRow]
    # prediction: Spearman correlation and mean error against the measurement
    agreement: dict[str, dict[str, float | None]]
    statistics: Statistics | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        return f"Probe({self.source!r}, {len(self.rows)} heads in {len(self.layers)} layers)"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from locater.report.probe import probe_in_notebook

        return probe_in_notebook(self)

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """Of each row: its role, which of its flags are faults, and why the others are not."""
        return judge([vars(row) for row in self.rows], self.assumptions["length"])

    def records(self) -> list[dict[str, Any]]:
        """Rows as they are written, with `faults` beside `flags`, and the `role`."""
        both = zip(self.rows, self.verdicts, strict=True)
        return [{**asdict(row), "faults": held.faults, "role": held.role} for row, held in both]

    def to_dict(self) -> dict[str, Any]:
        """The JSON document: schema, locater, source, assumptions, agreement, layers, streams, heads."""
        return {
            "schema": SCHEMA, "locater": __version__, "source": self.source, "assumptions": self.assumptions,
            "agreement": self.agreement, "layers": self.layers, "streams": [asdict(x) for x in self.streams],
            "heads": self.records(),
        }  # fmt: skip

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON document; the file appears whole or not at all."""
        write_whole(Path(path), self.to_json() + "\n")

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write the HTML page: self-contained, works offline."""
        from locater.report.probe import probe_page

        write_whole(Path(path), probe_page(self))

    def to_pandas(self) -> pandas.DataFrame:
        """One row per head, as a pandas frame."""
        import pandas

        return pandas.DataFrame(self.records())


def probe(
    model: nn.Module | str | os.PathLike[str],
    text: Text | None = None,
    *,
    images: str | Path | None = None,
    tokenizer: Any = None,
    length: int = LENGTH,
    tokens: int = TOKENS,
    rows: int | None = None,
    label: str | None = None,
    progress: Progress | None = None,
) -> Probe:
    """Run `model` over about `tokens` tokens of `text` in sequences of `length`, and predict each head from another
    part of it.

    `model` is a module or the folder of a checkpoint. `text` is a string, a path, several of either, token ids, or
    batches as the model takes them; without it the documentation inside Python. `images` in its place is a folder of
    pictures or an array. The first third of what is read gives the statistics behind the predictions, the rest is
    measured; where there is only one batch both use it, and the result says so. `rows` samples that many rows of each
    call; `label` is what the result calls the data.
    """
    if text is not None and images is not None:
        raise LocaterError("what to run the model on: give text or images, one of the two")
    source = os.fspath(model) if isinstance(model, str | os.PathLike) else type(model).__name__
    module = load_model(source) if isinstance(model, str | os.PathLike) else model
    if images is not None:
        held = image_batches(module, images)
    else:
        _check_reads_text(module, text)
        label = label or _label(text)
        text = _default_text() if text is None else text
        held = batches(module, text, tokenizer=tokenizer, length=length, tokens=tokens + max(length, tokens // 2))
    found = probed(module, held, source, rows=rows, progress=progress)
    found.assumptions["data"] = label or (None if images is None else str(images))
    return found


def _default_text() -> str:
    from locater.data.corpus import embedded_text

    return embedded_text()


def _label(text: Text | None) -> str | None:
    """What the result calls a text: the default and files by name, other text not at all."""
    if text is None:
        return f"{DEFAULT_TEXT} (the default; text= for yours)"
    if isinstance(text, str | Path):
        path = files_named([text])[0]
        return None if path is None else str(path)
    if not isinstance(text, list | tuple) or not text:
        return None
    paths = files_named(text)
    return f"{len(paths)} files, the first {paths[0]}" if all(path is not None for path in paths) else None


def _check_reads_text(module: nn.Module, text: Any) -> None:
    wants = getattr(module, "main_input_name", "input_ids")
    parts = text if isinstance(text, list | tuple) else [text]
    if all(part is None or isinstance(part, str | Path) for part in parts) and wants != "input_ids":
        way_out = (
            "give images= (--images PATH on the command line)"
            if wants == "pixel_values"
            else "from Python, give batches as it takes them"
        )
        raise LocaterError(f"{type(module).__name__} reads {wants}, not text: {way_out}")


def probed(
    module: nn.Module, held: list[Batch], source: str, rows: int | None = None, progress: Progress | None = None
) -> Probe:
    """The same, from batches."""
    gathering, measuring = _parts(module, held)
    found = collected(module, gathering, progress)
    scanned = scan(module, statistics=found, length=max(2, min(found.length, 4096)))
    layers = list(attention_layers(module))
    circuits = _circuits(module, gathering)
    with observe(module, rest=True, outputs=True, hidden=True, rows=rows) as seen:
        for part in progress(measuring, len(measuring)) if progress else measuring:
            run(module, part)
    length = scanned.assumptions["length"]
    plain = scan(module, length=length)
    reached = sorted({row.layer for row in seen.rows})
    inputs = {x.layer: x for x in found.inputs}
    columns = {number: _columns(layers[number], inputs.get(number), _length(found)) for number in reached}
    theory = {(row.layer, row.head): row for row in scanned.rows}
    weights = {(row.layer, row.head): row.localization for row in plain.rows}
    made = [
        _row(row, columns[row.layer], theory.get((row.layer, row.head)), weights[row.layer, row.head], circuits, length)
        for row in seen.rows
    ]
    entries = [
        {**entry, **_kept(made, entry["layer"]), **_around(entry["name"], seen.layers), **_input(inputs.get(entry["layer"]))}
        for entry in plain.layers if entry["layer"] in columns
    ]  # fmt: skip
    assumed = _assumptions(scanned.assumptions, gathering, measuring, rows, seen.silent, circuits)
    return Probe(source, assumed, entries, seen.layers, made, agreement(made), found)


def _parts(module: nn.Module, held: list[Batch]) -> tuple[list[Batch], list[Batch]]:
    """For statistics and for measurement: the first third of the sequences and the others, where there is more than
    one.

    Batches of tokens or images are cut in two where the third ends; others only where there is a single one, and where
    sequences come first in it.
    """
    known = all({"input_ids", "pixel_values"} & part.keys() for part in held)
    if len(held) > 1 and not known:
        cut = max(1, len(held) // 3)
        return held[:cut], held[cut:]
    if not known and any(time_first(part) for part in module.modules()):
        return held, held
    left = max(1, sum(_size(part) for part in held) // 3)
    gathering: list[Batch] = []
    measuring: list[Batch] = []
    for part in held:
        size, cut = _size(part), min(left, _size(part))
        left -= cut
        gathering += [_cut(part, size, slice(cut))] if cut else []
        measuring += [_cut(part, size, slice(cut, None))] if cut < size else []
    return (gathering, measuring) if measuring else (held, held)


def _cut(part: Batch, size: int, rows: slice) -> Batch:
    """Some sequences of a batch; what is not there once per sequence (positions, switches) stays as it is."""
    return {k: v[rows] if isinstance(v, Tensor) and v.ndim and len(v) == size else v for k, v in part.items()}


def _size(part: Batch) -> int:
    """Sequences in a batch."""
    tensors = [part[name] for name in ("input_ids", "pixel_values") if name in part] or list(part.values())
    return next((len(x) for x in tensors if isinstance(x, Tensor) and x.ndim), 1)


def _length(found: Statistics) -> int:
    return max(2, min(found.length, LONGEST))


def _columns(layer: AttentionLayer, given: Input | None, length: int) -> dict[str, list[float | None]]:
    """What is computed of a layer's heads, at the lengths that it was given: towers and stacks differ in them."""
    at, keys = (
        (length, length)
        if given is None
        else (max(2, min(x or length, LONGEST)) for x in (given.length, given.memory_length))
    )
    predicted = {} if given is None else predict(layer, given, at, keys)
    made: dict[str, Tensor | None] = {f"predicted_{k}": predicted.get(k) for k in ("entropy", "sink", "rest_entropy")}
    made |= {"prior_entropy": predict(layer, None, at, keys)["entropy"], "logit_bound": logit_bound(layer)}
    for kind in ("predicted", "prior"):
        entropy = made[f"{kind}_entropy"]
        made[f"{kind}_typical_kept"] = (
            None if entropy is None else kept_at_entropy(entropy, row_keys(layer, at, keys), typical=True)
        )
    return {
        name: [None] * layer.heads if held is None else [finite_or_none(float(x)) for x in held]
        for name, held in made.items()
    }


def _row(
    row: SeenHead,
    columns: Mapping[str, Sequence[float | None]],
    theory: HeadRow | None,
    prior: float | None,
    circuits: Mapping[Any, Circuit],
    length: int,
) -> ProbeRow:
    own = {f.name for f in fields(ProbeRow)}
    held = {name: value for name, value in vars(row).items() if name in own}
    held["typical_kept"] = None if not row.participation else row.participation**-0.5
    circuit = circuits.get((row.layer, row.head))
    held |= vars(circuit) if circuit is not None else {}
    held |= {name: values[row.head] for name, values in columns.items()}
    known = {} if theory is None else vars(theory)
    held |= {name: known.get(name) for name in ("M", "F", "localization")} | {"prior_localization": prior}
    everything = {**known, **held, "finite": "nonfinite" not in (*row.flags, *known.get("flags", ()))}
    return ProbeRow(**{**held, "flags": flags_of(everything, length)})


def _kept(rows: Sequence[ProbeRow], number: int) -> dict[str, float | None]:
    """What the heads of a layer keep, in root mean square."""
    return {column: root_mean_square(kept_in(rows, number, column)) for column in KEPT}


def _around(name: str, streams: Sequence[SeenLayer]) -> dict[str, float | None]:
    """The residual of the stream before and after the block that an attention layer is in."""
    block = block_of(name, streams)
    if block is None:
        return {"residual_before": None, "residual_after": None}
    before = next((x.residual for x in streams if (x.stack, x.block) == (block.stack, block.block - 1)), None)
    return {"residual_before": finite_or_none(before), "residual_after": finite_or_none(block.residual)}


def _input(given: Input | None) -> dict[str, Any]:
    if given is None:
        return {"input": None}
    names = ("tokens", "mean_share", "kurtosis", "normality", "normality_expected")
    held = {name: getattr(given, name) for name in names}
    sound = [x for x in given.directions if math.isfinite(x)]
    return {
        "input": {name: x if isinstance(x, int) else finite_or_none(x) for name, x in held.items()}
        | {"directions": sound}
    }


def _circuits(module: nn.Module, held: list[Batch]) -> dict[tuple[int, int], Circuit]:
    if not held or "input_ids" not in held[0]:
        return {}
    try:
        return circuit_scores(module)
    except LocaterError:
        return {}


def _assumptions(
    scanned: dict[str, Any],
    gathering: list[Batch],
    measuring: list[Batch],
    rows: int | None,
    silent: list[str],
    circuits: Mapping[Any, Any],
) -> dict[str, Any]:
    notes = [note for note in scanned["notes"] if not note.startswith(("position biases", "no statistics"))]
    if gathering is measuring:
        notes.append("only one sequence: predictions use statistics of the same text that was measured")
    if silent:
        notes.append(f"not called, and left out: {', '.join(silent)}")
    if circuits:
        notes.append(f"previous, duplicate and induction: on {PERIOD} random tokens repeated once")
    how = dict.fromkeys(MEASURED, "sampled" if rows else "exact")
    how |= dict.fromkeys(("previous", "duplicate", "induction"), "exact")
    how |= dict.fromkeys(PREDICTED, "predicted") | dict.fromkeys(PRIOR, "prior") | dict.fromkeys(BOUND, "bound")
    return {
        "prediction": "predicted", "how": how, "held_out": gathering is not measuring, "tokens": scanned["tokens"], "notes": notes,
        "length": scanned["length"], "measured_sequences": _count(measuring), "statistics_sequences": _count(gathering),
    }  # fmt: skip


def _count(held: list[Batch]) -> int:
    return sum(_size(part) for part in held)


def agreement(rows: Sequence[ProbeRow]) -> dict[str, dict[str, float | None]]:
    """How well each prediction does over heads: Spearman's rank correlation and the mean absolute error."""
    pairs = {
        "predicted_entropy": "entropy", "predicted_rest_entropy": "rest_entropy", "predicted_sink": "sink", "prior_entropy": "entropy",
        "predicted_typical_kept": "typical_kept", "prior_typical_kept": "typical_kept",
    }  # fmt: skip
    found = {}
    for predicted, measured in pairs.items():
        both = [
            (row[predicted], row[measured]) for row in rows if row[predicted] is not None and row[measured] is not None
        ]
        if len(both) > 2:
            a, b = torch.tensor(both, dtype=torch.float64).unbind(1)
            found[predicted] = {
                "spearman": spearman(a, b),
                "error": float((a - b).abs().mean()),
                "heads": float(len(both)),
            }
    return found
