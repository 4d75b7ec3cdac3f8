"""Plant every fault in every model, and write down what each command says: a line of JSON for each.

A line is kept where the code that judges and what is planted are as they were, so that an interrupted run goes on. The
loss of a planted model depends on neither command nor code, and is measured once for each digest of what is planted.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from locater.errors import LocaterError, first_line
from locater.version import code_version
from locater_lab.studies.verdicts import commands, models, writing
from locater_lab.studies.verdicts.adapters import LoraAdapter, adapter_for
from locater_lab.studies.verdicts.checkpoint import Checkpoint, NotHereError, Place
from locater_lab.studies.verdicts.faults import Fault, faults
from locater_lab.studies.verdicts.models import Model
from locater_lab.train.sweep import append_line, read_lines

ROOMS = ("commands", "results", "findings", "families", "layers", "sources", "cli")  # whose code judges
CALLS = ("scan", "compare", "doctor", "doctor --base", "doctor --adapter", "probe")
PLACES = {"early": 1 / 6, "middle": 1 / 2, "late": 5 / 6}
Log = Callable[[str], None]


def key_of(line: dict[str, Any]) -> tuple[str, str, str]:
    return line["model"], line["fault"], line["at"]


def newest(path: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    """The last line of each model, fault and place."""
    return {key_of(line): line for line in read_lines(path)}


@dataclass
class Bench:
    """One model, its adapter, and a folder for what is planted."""

    model: Model
    base: Checkpoint
    folder: Path
    kept: dict[tuple[str, str, str], dict[str, Any]]
    adapter: LoraAdapter | None = None
    calls: tuple[str, ...] = CALLS
    losses: dict[str, float | None] = field(default_factory=dict)  # by digest

    def __post_init__(self) -> None:
        for line in self.kept.values():
            if line["model"] == self.model.name:
                self.losses[line["digest"]] = math.nan if line["loss"] == "nan" else line["loss"]

    def places(self, fault: Fault) -> Iterator[Place]:
        """Where a fault is planted: every strength in the first of its places, the first strength in the others. Tiny
        models have one place.
        """
        count, tiny = len(self.base.stack), self.model.role == "tiny"
        for number, where in enumerate(fault.places):
            for strength in fault.strengths:
                if (number and strength != fault.strengths[0]) or (tiny and (number or strength != fault.strengths[0])):
                    continue
                layer = min(count - 1, int(PLACES[where] * count))
                head = (3 * layer + 1) % self.base.stack[layer].heads
                name = where if len(fault.strengths) == 1 else f"{where}, {strength:g}"
                yield Place(layer, head, strength, name)

    def measure(self, fault: Fault, place: Place) -> dict[str, Any] | None:
        """The line of a planted model; None where the model has no such part, or the kept line is of this code."""
        code = code_version(*ROOMS)[:12]
        planted, spot = self.base.copied(), self.folder / "planted"
        try:
            fault.plant(planted, place)
            digest = planted.digest(self.base) + (f"-{fault.name}" if fault.damage else "") + f"-{fault.container}"
            old = self.kept.get((self.model.name, fault.name, place.name))
            same = old is not None and old["code"] == code and old["digest"] == digest
            answered = {**old["said"], **dict.fromkeys(old["absent"])} if old is not None and same else {}
            if set(self.calls) <= set(answered):
                return None
            path = self._write(planted, fault, place, spot)
        except NotHereError:
            shutil.rmtree(spot, ignore_errors=True)
            return None
        start = time.perf_counter()
        said = self._asked(fault, path, [name for name in self.calls if name not in answered])
        spent = {name: round(one.pop("seconds"), 2) for name, one in said.items()}
        reference = self.reference(fault)
        loss = reference if fault.container == "adapter" else self._loss(digest, planted, path)
        shutil.rmtree(spot, ignore_errors=True)
        return {
            "model": self.model.name,
            "fault": fault.name,
            "at": place.name,
            "layer": place.layer,
            "head": place.head,
            "strength": place.strength,
            "group": fault.group,
            "causes": list(fault.causes),
            "role": self.model.role,
            "container": fault.container,
            "digest": digest,
            "loss": _plain(loss),
            "reference": _plain(reference),
            "runs": loss is not None,
            "said": {**_there(answered), **said},
            "absent": [
                name for name in CALLS if name in {*self.calls, *answered} and name not in {**said, **_there(answered)}
            ],
            "seconds": {
                **(old["seconds"] if old is not None and same else {}),
                **spent,
                "all": round(time.perf_counter() - start, 2),
            },
            "commit": _commit(),
            "code": code,
        }

    def reference(self, fault: Fault) -> float | None:
        """The loss that a planted one is held against: of the base, or of the base with the adapter merged well."""
        if not self.model.kind:
            return None
        merging = fault.with_adapter or fault.name in ("merged-once", "adapter-folder")
        planted = self.base.copied()
        if merging and self.adapter is not None:
            self.adapter.merge(planted)
        return self._loss(planted.digest(self.base) + "-one file", planted, None)

    def _loss(self, digest: str, planted: Checkpoint, path: Path | None) -> float | None:
        """From the folder that is there, or from one written for it: a GGUF file and an adapter are not run."""
        if not self.model.kind:
            return None
        if digest not in self.losses:
            spot = self.folder / "for the loss"
            runs = path is not None and (path / "config.json").is_file()
            folder = path if runs and path is not None else writing.write(planted, spot, "one file")
            self.losses[digest] = models.measure_loss(folder, self.model)
            shutil.rmtree(spot, ignore_errors=True)
        return self.losses[digest]

    def _write(self, planted: Checkpoint, fault: Fault, place: Place, spot: Path) -> Path:
        if fault.container == "adapter":
            assert self.adapter is not None
            return self.adapter.save(spot, self.model.folder)
        path = writing.write(planted, spot, fault.container)
        if fault.damage is not None:
            fault.damage(path, planted, place)
        return path

    def _asked(self, fault: Fault, path: Path, calls: Iterable[str]) -> dict[str, commands.Said]:
        base, adapter = self.model.folder, self.folder / "adapter"
        with_adapter = self.adapter is not None and (fault.with_adapter or fault.name == "merged-once")
        asked: dict[str, Callable[[], commands.Said | None]] = {
            "scan": lambda: commands.scan(path),
            "compare": lambda: commands.compare(base, path),
            "doctor": lambda: commands.doctor(path),
            "doctor --base": lambda: commands.doctor(path, base),
        }
        if with_adapter:
            asked["doctor --adapter"] = lambda: commands.doctor(path, base, adapter)
        heads = sum(layer.heads for layer in self.base.stack)
        if self.model.kind and heads <= commands.PROBED and (path / "config.json").is_file():
            asked["probe"] = lambda: commands.probe(path, models.ids_of(self.model))
        found = {}
        for name in calls:
            said = asked[name]() if name in asked else None
            if said is not None:
                said.pop("out", None)
                found[name] = {**said, "right": commands.is_right(said, fault.causes, fault.harmless)}
        return found


def open_bench(
    model: Model, folder: Path, kept: dict[tuple[str, str, str], dict[str, Any]], calls: tuple[str, ...]
) -> Bench | str:
    """The bench of a model, or why it has none."""
    base, why = models.readable(model.folder, model.name)
    if base is None:
        return why
    bench = Bench(model, base, folder, kept, calls=calls)
    try:
        names = [base.part(n, part).weight for n in range(len(base.stack)) for part in ("query", "value")]
        bench.adapter = adapter_for(base, models.gradient_of(model, names) if model.kind else None)
        bench.adapter.save(folder / "adapter", model.folder)
    except NotHereError:
        bench.adapter = None
    return bench


def run(
    found: Iterable[Model], path: Path, log: Log, only: str = "", calls: tuple[str, ...] = CALLS
) -> Iterator[dict[str, Any]]:
    """Measure what has no line yet, and append each line as it comes."""
    torch.set_num_threads(1)
    kept = newest(path)
    for model in found:
        with tempfile.TemporaryDirectory() as place:
            start = time.perf_counter()
            bench = open_bench(model, Path(place), kept, calls)
            if isinstance(bench, str):
                log(f"{model.name}: left out ({bench})")
                continue
            count = 0
            for fault in faults(bench.adapter):
                if only not in fault.name or (model.role == "tiny" and not fault.on_tiny):
                    continue
                for spot in bench.places(fault):
                    line = bench.measure(fault, spot)
                    if line is not None:
                        append_line(path, line)
                        count += 1
                        yield line
            log(f"{model.name}: {count} planted, {time.perf_counter() - start:.0f} s")


def tiny_models(folder: Path, log: Log, only: str = "") -> Iterator[Model]:
    """The tiny models, written one after the other."""
    for kind in models.TINY:
        if only and only != kind:
            continue
        try:
            yield models.tiny_model(kind, folder / kind)
        except (LocaterError, ValueError, AttributeError) as error:
            log(f"tiny {kind}: cannot be built ({first_line(error)})")
        shutil.rmtree(folder / kind, ignore_errors=True)


def compact(path: Path) -> list[dict[str, Any]]:
    """Keep the newest line of each model, fault and place, in order; returns them. What counts as the right cause is that
    of the table of today.
    """
    table = {fault.name: fault for fault in faults(LoraAdapter({}, False))}
    lines = sorted(newest(path).values(), key=lambda line: (line["model"], line["group"], line["fault"], line["at"]))
    lines = [line for line in lines if line["fault"] in table]
    for line in lines:
        fault = table[line["fault"]]
        line["causes"] = list(fault.causes)
        for said in line["said"].values():
            said["right"] = commands.is_right(said, fault.causes, fault.harmless)
    spare = path.with_suffix(".new")
    spare.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    spare.replace(path)
    return lines


def _there(answered: dict[str, Any]) -> dict[str, Any]:
    return {name: said for name, said in answered.items() if said is not None}


def _plain(loss: float | None) -> float | str | None:
    """JSON has no NaN."""
    if loss is None:
        return None
    return round(loss, 4) if math.isfinite(loss) else "nan"


def _commit() -> str:
    told = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
    return told.stdout.strip() or "unknown"


__all__ = ["CALLS", "Bench", "compact", "newest", "open_bench", "run", "tiny_models"]
