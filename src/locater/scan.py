"""`scan()`: every head of a model or a checkpoint, its query-key spectrum, and what the theory makes of it. No forward pass."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from locater.errors import LocaterError
from locater.findings import FLAGS, flags_of, key_variance
from locater.heads import AttentionLayer, effective, layers_of, open_source
from locater.heads.readers import Source
from locater.spectrum import Moments
from locater.theory import expected_entropy, localization, mixture_localization, unit_moments
from locater.theory.localization import SKEW_LIMIT
from locater.version import __version__

if TYPE_CHECKING:
    import pandas
    import polars

SCHEMA = 1
LENGTH = 256
Progress = Callable[[Iterable[AttentionLayer], int], Iterable[AttentionLayer]]


@dataclass(frozen=True)
class HeadRow:
    """One head. `trace`, `trace_of_square`, `frobenius_sq` are of the effective W without the logit scale; M, S, F with it.

    None stands for a number that has no meaning here: traces of cross-attention, everything of a head with NaN weights.
    """

    layer: int
    head: int
    kv_head: int
    kind: str
    width: int
    head_dim: int
    scale: float
    trace: float | None = None
    trace_of_square: float | None = None
    frobenius_sq: float | None = None
    symmetric_sq: float | None = None
    mean: float | None = None
    variance: float | None = None
    concentration: float | None = None
    spectral_norm: float | None = None
    stable_rank: float | None = None
    M: float | None = None
    S: float | None = None
    F: float | None = None
    skew: float | None = None
    key_bias: float | None = None
    localization: float | None = None
    approximation: str | None = None
    expected_entropy: float | None = None
    flags: tuple[str, ...] = ()
    eigenvalues: tuple[tuple[float, float], ...] | None = None

    def __getitem__(self, column: str) -> Any:
        return getattr(self, column)


NUMERIC_COLUMNS = tuple(f.name for f in fields(HeadRow) if "float" in str(f.type) and f.name != "eigenvalues")
SCAN_FLAGS = tuple(f.name for f in FLAGS if set(f.needs) <= {*NUMERIC_COLUMNS, "finite"})


@dataclass(frozen=True)
class Scan:
    """What `scan()` found: a row per head, an entry per layer, and the assumptions behind the numbers."""

    source: str
    assumptions: dict[str, Any]
    layers: list[dict[str, Any]]
    rows: list[HeadRow]

    def to_dict(self) -> dict[str, Any]:
        """The JSON document: schema, locater, source, assumptions, layers, heads."""
        heads = [asdict(row) for row in self.rows]
        for head in heads:
            if head["eigenvalues"] is None:
                del head["eigenvalues"]
        return {
            "schema": SCHEMA, "locater": __version__, "source": self.source, "assumptions": self.assumptions,
            "layers": self.layers, "heads": heads,
        }  # fmt: skip

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON document; the file appears whole or not at all."""
        write_whole(Path(path), self.to_json() + "\n")

    def to_pandas(self) -> pandas.DataFrame:
        """One row per head, as a pandas frame."""
        import pandas

        return pandas.DataFrame([asdict(row) for row in self.rows])

    def to_polars(self) -> polars.DataFrame:
        """One row per head, as a polars frame."""
        import polars

        return polars.DataFrame([asdict(row) for row in self.rows])


def scan(
    source: Source,
    *,
    length: int = LENGTH,
    raw: bool = False,
    eigenvalues: bool = False,
    query: str | None = None,
    key: str | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    progress: Progress | None = None,
) -> Scan:
    """Read every head of `source`: an nn.Module, a folder, a weights file or a hub id.

    `length` is the number of tokens in view for entropy and sharpness; `raw` takes stored parameters without folding
    norms; `query`, `key` and `heads` name the tensors of an architecture that is not known.

    >>> from torch import nn
    >>> found = scan(nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 2))
    >>> len(found.rows), found.assumptions["prediction"]
    (4, 'prior')
    """
    if length < 2:
        raise LocaterError(f"length {length} is too short: attention over fewer than two tokens has no spread")
    weights, config = open_source(source)
    found = list(layers_of(weights, config, query=query, key=key, heads=heads, kv_heads=kv_heads))  # tensors are still on disk
    rows: list[HeadRow] = []
    for number, layer in enumerate(progress(found, len(found)) if progress else found):
        rows.extend(_rows(layer, number, length, raw, eigenvalues))
    name = type(source).__name__ if isinstance(source, nn.Module) else str(source)
    return Scan(name, _assumptions(found, length, raw or bool(query)), [_entry(x, n) for n, x in enumerate(found)], rows)


def _assumptions(layers: list[AttentionLayer], length: int, raw: bool) -> dict[str, Any]:
    notes = []
    if any(x.norm.kind == "none" for x in layers) and not raw:
        notes.append("layers without a known norm in front: their input is taken as unit tokens too")
    if any(x.query_norm or x.key_norm for x in layers) and not raw:
        notes.append("query and key norms in mean field: each token's own norm is replaced by its root mean square")
    if any(x.rotary for x in layers):
        notes.append("rotary positions: moments are those at offset 0")
    if any(x.bias or x.softcap or x.sinks is not None for x in layers):
        notes.append("position biases, soft-caps and sinks are in the layer but not in the prior: it speaks of the query-key map alone")
    if any(x.kind == "cross" for x in layers):
        notes.append("cross-attention: traces, M, S and localization have no meaning and are left out")
    return {
        "prediction": "prior",
        "tokens": "unit tokens: mean 0, |z|^2 = width, covariance I (I - 11^T/d after LayerNorm)",
        "weights": "as stored" if raw else "effective: norm gains and biases folded into queries and keys",
        "length": length,
        "notes": notes,
    }


def _positions(layer: AttentionLayer) -> str | None:
    if layer.rotary:
        return "rotary"
    return type(layer.bias).__name__.lower() if layer.bias else None


def _entry(layer: AttentionLayer, number: int) -> dict[str, Any]:
    return {
        "layer": number, "name": layer.name, "kind": layer.kind, "heads": layer.heads, "kv_heads": layer.kv_heads,
        "head_dim": layer.head_dim, "width": layer.width, "norm": layer.norm.kind, "causal": layer.causal,
        "window": layer.window, "positions": _positions(layer),
        "softcap": layer.softcap, "sinks": layer.sinks is not None, "query_key_norm": layer.query_norm is not None,
    }  # fmt: skip


@torch.no_grad()
def _rows(layer: AttentionLayer, number: int, length: int, raw: bool, eigenvalues: bool) -> Iterator[HeadRow]:
    folded = effective(layer, raw)
    query_ok = folded.query.isfinite().flatten(1).all(1)
    key_ok = folded.key.isfinite().flatten(1).all(1).repeat_interleave(layer.group)
    finite = query_ok & key_ok & folded.key_term.isfinite().all(1)
    held = folded.moments().select(finite)
    numbers = _numbers(held, folded.scale, folded.key_bias[finite], length, eigenvalues)
    for head in range(layer.heads):
        fixed: dict[str, Any] = {
            "layer": number, "head": head, "kv_head": head // layer.group, "kind": layer.kind,
            "width": layer.width, "head_dim": layer.head_dim, "scale": layer.scale,
        }  # fmt: skip
        row = next(numbers) if finite[head] else {}
        flags = flags_of({**row, "finite": bool(finite[head])}, length)
        yield HeadRow(**fixed, **row, flags=flags)


def _numbers(m: Moments, scale: float, key_bias: Tensor, length: int, eigenvalues: bool) -> Iterator[dict[str, Any]]:
    """The computed columns, head by head."""
    columns = ["frobenius_sq", "spectral_norm", "stable_rank"]
    table = {name: getattr(m, name) for name in columns}
    table["F"], table["key_bias"] = m.frobenius_sq * scale**2, key_bias
    variance = torch.tensor([key_variance(f, b) for f, b in zip(table["F"].tolist(), key_bias.tolist(), strict=True)])
    table["expected_entropy"] = expected_entropy(variance, length)
    if m.cross is not None:
        for name in ("trace", "trace_of_square", "symmetric_sq", "mean", "variance", "concentration", "skew"):
            table[name] = getattr(m, name)
        table["M"], table["S"], table["F"] = unit_moments(m, scale)
        few = table["skew"].abs() > SKEW_LIMIT
        table["localization"] = localization(table["M"], table["S"], table["F"])
        table["localization"][few] = mixture_localization(m.select(few), scale)
    lists = {name: [_finite(x) for x in column.tolist()] for name, column in table.items()}
    spectra = torch.view_as_real(m.eigenvalues()).tolist() if eigenvalues and m.cross is not None else None
    for head in range(len(key_bias)):
        row: dict[str, Any] = {name: column[head] for name, column in lists.items()}
        if m.cross is not None:
            row["approximation"] = "mixture" if few[head] else "gaussian"
        if spectra is not None:
            row["eigenvalues"] = tuple((re, im) for re, im in spectra[head])
        yield row


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it appears whole or not at all."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            try:
                file.write(text)
                file.close()
                os.chmod(file.name, 0o644)
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise LocaterError(f"{path}: cannot be written ({error.strerror})") from None
