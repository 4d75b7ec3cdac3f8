"""The golden documents: which command makes each, and how they are made and stored."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.golden import code
from tests.golden.comparing import compact

FOLDER = Path(__file__).parent
FILES = FOLDER / "files-0.2"  # written once, by version 0.2.0: see docs/golden.md
PAPER_RUNS = {name: code.ROOT / "docs" / "results" / f"{name}-runs.jsonl" for name in ("bao2024", "mechanisms")}
TEXT = "LICENSE"  # a text that does not change; Python's documentation differs between its releases

PROBED = ("--text", TEXT, "--length", "128", "--tokens", "1024")
TINY = (
    *("--corpus", TEXT, "--layers", "2", "--width", "16", "--heads", "2", "--length", "32", "--scale", "0.1"),
    *("--steps", "30", "--batch", "8", "--observe", "10", "--evaluate", "10", "--checkpoint", "10", "--device", "cpu"),
)


@dataclass(frozen=True)
class Document:
    """A command and where its data is kept. `{demo}` in it is the folder of that model; `slow` ones are made in `make
    test-slow`.
    """

    name: str
    arguments: tuple[str, ...]
    slow: bool = False

    @property
    def kind(self) -> str:
        return self.arguments[0]

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.json"

    def lacks(self) -> str | None:
        """Why it cannot be made here, if so."""
        if "{MiniLM}" in self.arguments and (why := code.why_unavailable()):
            return why
        missing = [path for name, path in code.MODELS.items() if f"{{{name}}}" in self.arguments and not path.is_dir()]
        return f"{missing[0]} is not there" if missing else None

    def golden(self) -> Any:
        return json.loads(self.path.read_text())


DOCUMENTS = (
    Document("scan-demo", ("scan", "{demo}")),
    Document("scan-twin", ("scan", "{twin}", "--length", "512")),
    Document("scan-stories260K", ("scan", "{stories260K}")),
    Document("scan-MiniLM", ("scan", "{MiniLM}")),
    Document("scan-raw", ("scan", "{stories260K}", "--raw")),
    Document("scan-eigenvalues", ("scan", "{demo}", "--eigenvalues", "--shard", "1/2")),
    Document("scan-statistics", ("scan", "{checkpoint}", "--statistics", "{statistics}", "--length", "32")),
    Document("compare-twins", ("compare", "{demo}", "{twin}")),
    Document("compare-shapes", ("compare", "{stories260K}", "{MiniLM}", "--raw")),
    Document("probe-demo", ("probe", "{demo}", *PROBED)),
    Document("probe-stories260K", ("probe", "{stories260K}", *PROBED)),
    Document("probe-MiniLM", ("probe", "{MiniLM}", *PROBED), slow=True),
    Document("train-plain", ("train", *TINY)),
    Document("train-locater", ("train", *TINY, "--control", "locater(target=2, shrink=0.3, hold=0.3)")),
    Document(
        "train-gated", ("train", *TINY, "--attention", "gated(per=element)", "--control", "temperature(init=1.5)")
    ),
    # numbers
    Document("reproduce-gerami2024", ("reproduce", "gerami2024", "--quick", "--runs", "{mechanisms}"), slow=True),
    # kept runs
    Document("reproduce-qiu2025", ("reproduce", "qiu2025", "--quick", "--runs", "{mechanisms}"), slow=True),
    Document("reproduce-zhai2023-trained", ("reproduce", "zhai2023", "--quick", "--claim", "b"), slow=True),
    Document("reproduce-zhai2023-runs", ("reproduce", "zhai2023", "--quick", "--claim", "d", "--runs", "{bao2024}")),
)
NAMES = FOLDER / "names.json"


def make(document: Document, out: Path | None = None) -> Any:
    """Run its command and take its data; a training run is made in the folder `out`, and goes on where one was begun in
    it.
    """
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "data.json"
        arguments = [_filled(argument) for argument in document.arguments]
        if document.kind == "train":
            return compact(_trained(arguments, out or Path(folder) / "run", target), "train", document.name)
        return compact(_data(target, *arguments), document.kind, document.name)


def _trained(arguments: list[str], out: Path, target: Path) -> dict[str, Any]:
    """Its result, its log, and a scan of the model that came of it: losses alone hardly show what a control did."""
    held = {"result": _data(target, *arguments, "--out", str(out)), "log": _data(target, "watch", str(out))}
    return {**held, "scan": _data(target, "scan", str(out / "model"))}


def _data(target: Path, *arguments: str) -> Any:
    code.command(*arguments, "--json", target)
    return json.loads(target.read_text())


def _filled(argument: str) -> str:
    places = {
        **code.MODELS,
        **PAPER_RUNS,
        "checkpoint": FILES / "run" / "step-00000010",
        "statistics": FILES / "statistics.pt",
    }
    name = argument[1:-1]
    return str(places[name]) if argument == f"{{{name}}}" else argument


def names() -> dict[str, Any]:
    """Names that are data, and how many of the kept runs the claims of each paper ask for."""
    return {**code.names(), "kept_runs": code.kept_runs_asked_for(PAPER_RUNS)}


def text_of(document: Any, depth: int = 3) -> str:
    """JSON with a line for each row, so that a change is read in a diff and files stay small."""
    return _lines(document, 0, depth) + "\n"


def _lines(x: Any, at: int, depth: int) -> str:
    if at == depth or not isinstance(x, dict | list) or not any(isinstance(part, dict | list) for part in _parts(x)):
        return json.dumps(x, separators=(",", ":"), allow_nan=False)
    if isinstance(x, dict):
        inside = [f"{json.dumps(key)}:{_lines(value, at + 1, depth)}" for key, value in x.items()]
        return "{\n" + ",\n".join(inside) + "\n}"
    return "[\n" + ",\n".join(_lines(value, at + 1, depth) for value in x) + "\n]"


def _parts(x: dict[str, Any] | list[Any]) -> list[Any]:
    return list(x.values()) if isinstance(x, dict) else x
