"""Plant every fault in every model, and write down what each command says: a line of JSON for each.

An answer is kept where the code of its command and what is planted are as they were, so that an interrupted run goes on.
The loss of a planted model depends on neither, and is measured once for each digest of what is planted.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import nn

import locater
from locater.errors import LocaterError, first_line
from locater_lab.studies.verdicts import commands, models, unseen, unseen2, writing
from locater_lab.studies.verdicts.checkpoint import SIZES, Checkpoint, LoraAdapter, NotHereError, Place, adapter_for
from locater_lab.studies.verdicts.faults import Fault, faults
from locater_lab.studies.verdicts.models import Model
from locater_lab.train.sweep import append_line, read_lines

ROOMS = ("commands", "results", "findings", "families", "layers", "sources", "cli")  # whose code answers
DOCTOR = ("doctor", "diagnosis", "causes")  # in the names of files that doctor alone reads
CALLS = ("scan", "compare", "doctor", "doctor --base", "doctor --adapter", "probe")
PLACES = {"early": 1 / 6, "middle": 1 / 2, "late": 5 / 6}
LARGE = 10**8  # numbers of a model in which each fault and strength is planted once


def every_fault(adapter: LoraAdapter | None) -> list[Fault]:
    """Those of every set."""
    return [*faults(adapter), *unseen.unseen_faults(adapter), *unseen2.unseen_faults(adapter)]


@cache
def table_of_names() -> dict[str, Fault]:
    """Every fault by its name, for its words alone: no adapter is in it."""
    return {fault.name: fault for fault in every_fault(LoraAdapter({}, False))}


@cache
def code_of(call: str) -> str:
    """A hash of the code that answers a call: where it is the same, so are the answers."""
    root, digest = Path(locater.__file__).parent, hashlib.sha256()
    for path in sorted(path for room in ROOMS for path in (root / room).rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if call.startswith("doctor") or not any(part in name for part in DOCTOR):
            digest.update(f"{name}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


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
        models have one place and strength; large ones every strength in one place, another for each fault.
        """
        count, (first, *others) = len(self.base.stack), fault.strengths
        spots = [(fault.places[0], first)]
        if self.large:
            turn = crc32(fault.name.encode())
            spots = [(fault.places[(turn + i) % len(fault.places)], x) for i, x in enumerate(fault.strengths)]
        elif self.model.role != "tiny":
            spots += [(fault.places[0], x) for x in others] + [(where, first) for where in fault.places[1:]]
        for where, strength in spots:
            layer = min(count - 1, int(PLACES[where] * count))
            head = (3 * layer + 1) % self.base.stack[layer].heads
            name = where if not others else f"{where}, {strength:g}"
            yield Place(layer, head, strength, name)

    @cached_property
    def module(self) -> nn.Module:
        """The base, ready to run."""
        return models.load_quietly(self.model.folder)

    @cached_property
    def large(self) -> bool:
        return sum(x.numel() for x in self.base.tensors.values()) > LARGE

    def measure(self, fault: Fault, place: Place) -> dict[str, Any] | None:
        """The line of a planted model; None where the model has no such part, or the kept line has every answer."""
        planted, spot = self.base.copied(), self.folder / "planted"
        old = self.kept.get((self.model.name, fault.name, place.name), {"digest": "", "said": {}, "seconds": {}})
        try:
            fault.plant(planted, place)
            digest = planted.digest(self.base) + (f"-{fault.name}" if fault.damage else "") + f"-{fault.container}"
            reference = self.reference(fault)
            same = old["digest"] == digest and (not self.of_adapter(fault) or old["reference"] == _plain(reference))
            said = {name: x for name, x in old["said"].items() if same and x.get("code") == code_of(name)}
            calls = [name for name in self.calls if name not in said and self.can_answer(name, fault)]
            if same and not calls:
                return None
            idle = not calls and fault.damage is None and fault.container in ("one file", "adapter")
            path = None if idle else self._write(planted, fault, place, spot)
        except NotHereError:
            shutil.rmtree(spot, ignore_errors=True)
            return None
        start = time.perf_counter()
        said |= {name: self._ask(name, fault, path) for name in calls if path is not None}
        spent = {name: round(said[name].pop("seconds"), 2) for name in calls}
        loss = self._loss(digest, planted, path, in_place=fault.damage is None or fault.container == "adapter")
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
            "said": said,
            "seconds": {**(old["seconds"] if same else {}), **spent, "all": round(time.perf_counter() - start, 2)},
            "commit": _commit(),
        }

    def of_adapter(self, fault: Fault) -> bool:
        """Whether a fault is about the adapter: held against the base with it, and measured again with another one."""
        return fault.with_adapter or fault.merges or fault.container == "adapter"

    def is_good(self, adapter: LoraAdapter) -> bool:
        """Whether the model is better with it: a step down the gradient may be too long. Without a loss all are good."""
        if not self.model.kind:
            return True
        losses = []
        for times in (0.0, 1.0):
            planted = self.base.copied()
            if times:
                adapter.merge(planted)
            losses.append(self._loss(planted.digest(self.base) + "-one file", planted, None))
        before, after = losses
        return before is not None and after is not None and after < before

    def reference(self, fault: Fault) -> float | None:
        """The loss that a planted one is held against: of the base, or of the base with the adapter merged well."""
        if not self.model.kind:
            return None
        planted = self.base.copied()
        if self.of_adapter(fault) and self.adapter is not None:
            self.adapter.merge(planted)
        return self._loss(planted.digest(self.base) + "-one file", planted, None)

    def _loss(self, digest: str, planted: Checkpoint, path: Path | None, in_place: bool = True) -> float | None:
        """In place, or from the folder that is there, or from one written for it: a GGUF file and an adapter are not run."""
        if not self.model.kind:
            return None
        if in_place and digest not in self.losses and digest.endswith(("-one file", "-gguf", "-adapter")):
            found = models.loss_in_place(self.module, self.model, self.base, planted)
            if found is not None:
                self.losses[digest] = found
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
            path = self.adapter.save(spot, self.model.folder)
        else:
            path = writing.write(planted, spot, fault.container)
        if fault.damage is not None:
            fault.damage(path, planted, place)
        return path

    def can_answer(self, call: str, fault: Fault) -> bool:
        """Whether a call can know: merging needs the adapter, and a probe a folder that runs, and few heads."""
        if call.startswith("doctor") and not hasattr(locater, "doctor"):
            return False
        if call == "doctor --adapter":
            return self.adapter is not None and (fault.with_adapter or (fault.merges and fault.container != "adapter"))
        if call == "text":
            return bool(self.model.kind) and fault.container not in ("gguf", "adapter")
        if fault.with_adapter:
            return False
        if call != "probe":
            return True
        few = sum(layer.heads for layer in self.base.stack) <= commands.PROBED
        return bool(self.model.kind) and few and fault.container not in ("gguf", "adapter")

    def _ask(self, call: str, fault: Fault, path: Path) -> commands.Said:
        base, adapter = self.model.folder, self.folder / "adapter"
        asked: dict[str, Callable[[], commands.Said]] = {
            "scan": lambda: commands.scan(path),
            "compare": lambda: commands.compare(base, path),
            "doctor": lambda: commands.doctor(path),
            "doctor --base": lambda: commands.doctor(path, base),
            "doctor --adapter": lambda: commands.doctor(path, base, adapter),
            "probe": lambda: commands.probe(path, models.ids_of(self.model)),
            "text": lambda: commands.text(path, base, models.ids_of(self.model)),
        }
        said = asked[call]()
        for folder, name in ((path, "MODEL"), (self.folder, "."), (base, "BASE")):
            said["says"] = said["says"].replace(str(folder), name)
        right = commands.is_right(said, fault.causes, fault.harmless)
        return {**{key: x for key, x in said.items() if key != "out"}, "right": right, "code": code_of(call)}


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
        longest = adapter_for(base, models.gradient_of(model, names) if model.kind else None)
        tried = (longest.shortened(size / SIZES[0]) for size in SIZES)
        bench.adapter = next((adapter for adapter in tried if bench.is_good(adapter)), longest)
        bench.adapter.save(folder / "adapter", model.folder)
    except NotHereError:
        bench.adapter = None
    return bench


def run(bench: Bench, path: Path, only: str = "") -> Iterator[dict[str, Any]]:
    """Measure of a model what has no line yet, and append each line as it comes."""
    for fault in every_fault(bench.adapter):
        if only not in f"{fault.belongs}: {fault.group}: {fault.name}" or (
            bench.model.role == "tiny" and not fault.on_tiny
        ):
            continue
        for spot in bench.places(fault):
            line = bench.measure(fault, spot)
            if line is not None:
                append_line(path, line)
                yield line


def run_all(one: Model | str, path: Path, only: str = "", calls: tuple[str, ...] = CALLS) -> str:
    """All of a model, or of the tiny model of a type; what was done, in a line."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    for call in calls:
        code_of(call)  # of the files that this process has read, whatever is edited while it runs
    with tempfile.TemporaryDirectory() as place:
        try:
            model = models.tiny_model(one, Path(place) / "tiny") if isinstance(one, str) else one
        except (LocaterError, ValueError, AttributeError, ImportError) as error:
            return f"tiny {one}: cannot be built ({first_line(error)})"
        bench = open_bench(model, Path(place), newest(path), calls)
        if isinstance(bench, str):
            return f"{model.name}: left out ({bench})"
        count = sum(1 for _ in run(bench, path, only))
    return f"{model.name}: {count} planted, {time.perf_counter() - start:.0f} s"


def compact(path: Path) -> list[dict[str, Any]]:
    """Keep the newest line of each model, fault and place, in order; returns them. What counts as the right cause is that
    of the table of today.
    """
    table = table_of_names()
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


def _plain(loss: float | None) -> float | str | None:
    """JSON has no NaN."""
    if loss is None:
        return None
    return round(loss, 4) if math.isfinite(loss) else "nan"


def _commit() -> str:
    told = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
    return told.stdout.strip() or "unknown"


__all__ = ["CALLS", "Bench", "compact", "every_fault", "newest", "open_bench", "run", "run_all", "table_of_names"]
