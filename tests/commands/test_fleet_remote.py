"""Fleets of checkpoints that are elsewhere: revisions of the hub, prefixes of a bucket, lists of URLs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import locater
from locater.commands.fleet import running
from locater.commands.fleet import running as planning
from locater.errors import LocaterError
from tests.commands.fleet_folders import checkpoint, rewritten, table
from tests.range_server import RangeServer
from tests.sources.conftest import bucket, hub, server  # noqa: F401 - fixtures

pytest.importorskip("pyarrow")


def local_rows(fleet: Path, folders: dict[int, Path]) -> None:
    """The rows of a fleet are those of scans of the same files here."""
    rows = table(fleet)
    for step, folder in folders.items():
        here = locater.scan(folder).rows
        there = [row for row in rows if row["step"] == step]
        assert [(r["layer"], r["head"], r["F"], r["M"]) for r in there] == [(r.layer, r.head, r.F, r.M) for r in here]


def test_revisions_of_the_hub(hub: RangeServer, tmp_path: Path) -> None:  # noqa: F811
    model = hub.root / "org" / "run"
    revisions = {step: checkpoint(model / f"step{step}", seed=step) for step in (9, 10)}
    for name in ("main", "step100"):
        shutil.copytree(revisions[9], model / name)  # weights of another step
    out = tmp_path / "heads"
    fleet = locater.Fleet.run(["hf://org/run@step*"], out)
    local_rows(out, revisions)
    assert [entry.step for entry in fleet.sources()] == [9, 10, 100]
    (run,) = fleet.to_dict()["runs"]
    assert run["run"] == "hf://org/run"
    assert [[entry["step"] for entry in group] for group in run["duplicates"]] == [[9, 100]]
    hub.reset()
    assert not running.run(["hf://org/run@step*"], out).scanned
    assert not hub.data_requests(), "a rerun reads no weights"
    rewritten(revisions[10], 1.5)
    hub.commits[revisions[10]] = "f" * 40
    assert list(running.run(["hf://org/run@step*"], out).scanned) == ["hf://org/run@step10"]
    local_rows(out, revisions)


def test_prefixes_of_a_bucket_in_pieces(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(planning, "LARGE", 2_500)
    folder = checkpoint(tmp_path / "step-7", seed=7)
    for name in ("config.json", "model.safetensors"):
        bucket.upload_file(str(folder / name), "runs", f"mine/step-7/{name}")
    fleet = locater.Fleet.run(["s3://runs/mine/step-*"], tmp_path / "heads")
    local_rows(tmp_path / "heads", {7: folder})
    assert [(x.source, x.run) for x in fleet.sources()] == [("s3://runs/mine/step-7", "s3://runs/mine")]
    whole = locater.Fleet.run([str(folder)], tmp_path / "here")
    assert fleet.sources()[0].digest == whole.sources()[0].digest


def test_lists_of_urls(server: RangeServer, tmp_path: Path) -> None:  # noqa: F811
    folder = checkpoint(server.root / "step-3", seed=3)
    names = tmp_path / "list.csv"
    names.write_text(f"url,step\n{server.url}/files/step-3/,3\n{server.url}/files/none,4\n")
    fleet = locater.Fleet.run([f"@{names}"], tmp_path / "heads")
    local_rows(tmp_path / "heads", {3: folder})
    assert list(fleet.errors) == [f"{server.url}/files/none"]
    names.write_text(f"url,step\n{server.url}/files/step-3?signature=secret,3\n")
    with pytest.raises(LocaterError, match="a URL with a signature") as refused:
        locater.Fleet.run([f"@{names}"], tmp_path / "heads")
    assert "secret" not in str(refused.value)
