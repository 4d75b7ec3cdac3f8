"""What a command asks of a fleet: scan, retry failures, or show a folder."""

from __future__ import annotations

import os
from dataclasses import dataclass

from locater.commands.fleet.cache_keys import ScanSettings
from locater.commands.fleet.result import Fleet
from locater.commands.fleet.running import Engine, retry, run
from locater.commands.scanning import parse_shard
from locater.defaults import LENGTH, Progress
from locater.errors import LocaterError
from locater.results.run_names import list_checkpoints


@dataclass(frozen=True)
class FleetRequest:
    """The arguments of `locater fleet`. Without `out` the one source is the folder of a fleet."""

    sources: tuple[str, ...]
    out: str | None = None
    run: str | None = None
    step_pattern: str | None = None
    length: int = LENGTH
    raw: bool = False
    eigenvalues: bool = False
    workers: int | None = None
    shard: str | None = None
    ray: str | None = None

    @property
    def engine(self) -> Engine:
        return Engine(self.workers, self.ray, parse_shard(self.shard))


def answer(
    request: FleetRequest, status: bool, retry_failed: bool, progress: Progress | None = None
) -> tuple[Fleet, list[str], list[str]]:
    """Do what is asked; returns the fleet, the sources in question, and notes."""
    if request.out is None:
        fleet = _open_fleet(request)
        if retry_failed and not status:
            retry(fleet.folder, engine=request.engine, progress=progress)
        return fleet, [entry.source for entry in fleet.sources()], []
    if status:
        found = list_checkpoints(request.sources, request.run, request.step_pattern)
        return Fleet.open(request.out), [entry.source for entry in found.entries], found.notes
    account = run(
        request.sources,
        request.out,
        settings=ScanSettings(request.length, request.raw, request.eigenvalues),
        run_name=request.run,
        step_pattern=request.step_pattern,
        engine=request.engine,
        retry_failed=retry_failed,
        progress=progress,
    )
    return Fleet.open(request.out), account.asked, account.notes


def _open_fleet(request: FleetRequest) -> Fleet:
    """The fleet in a folder that was given in place of sources. Options that would be ignored are refused."""
    first = request.sources[0]
    if len(request.sources) > 1 or not os.path.isfile(os.path.join(first, "fleet.json")):
        raise LocaterError(
            f"add --out FOLDER, the folder for the results ({first} is not itself the folder of a fleet)"
        )
    plain = FleetRequest(request.sources)
    for name in ("run", "step_pattern", "length", "raw", "eigenvalues", "shard"):
        if getattr(request, name) != getattr(plain, name):
            option = f"--{name.replace('_', '-')}"
            raise LocaterError(f"{option} is for scanning: {first} is a fleet, give SOURCES and --out {first}")
    return Fleet.open(first)
