"""Fleets: parts are the scans of their checkpoints, a rerun does nothing, and what is broken is said."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import locater
from locater.commands.fleet import parts, running
from locater.commands.fleet import running as planning
from locater.commands.fleet.cache_keys import PACKAGE, UNRELATED, ScanSettings, reader_files
from locater.commands.fleet.running import jobs_of, tasks_of
from locater.commands.fleet.store import Store
from locater.commands.fleet.tasks import perform
from locater.errors import LocaterError
from locater.results.run_names import label_source, list_checkpoints
from tests import ROOT, benchmark
from tests.commands.fleet_folders import checkpoint, make_run, rewritten, table
from tests.processes import finished, forked, python

pytest.importorskip("pyarrow")
Run = Callable[..., Any]


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of five checkpoints, of which tests change copies alone; the fourth has the weights of the second."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    make_run(folder, 5)
    shutil.copy(folder / "step-00000100" / "model.safetensors", folder / "step-00000300" / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def scanned(steps: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fleet of that run, which tests only read."""
    out = tmp_path_factory.mktemp("fleets") / "heads"
    locater.Fleet.run([str(steps / "step-*")], out)
    return out


def test_rows_are_those_of_scans(steps: Path, scanned: Path) -> None:
    fleet = locater.Fleet.open(scanned)
    for folder in steps.iterdir():
        one, kept = locater.scan(folder), fleet.scan(folder)
        assert (kept.rows, kept.layers, kept.assumptions) == (one.rows, one.layers, one.assumptions)
    rows = table(scanned)
    assert len(rows) == 5 * 12
    assert [row["step"] for row in rows[::12]] == [0, 100, 200, 300, 400]
    assert {row["run"] for row in rows} == {str(steps)}
    assert {row["layer_name"] for row in rows} == {f"model.layers.{i}.self_attn" for i in range(3)}
    first = locater.scan(steps / "step-00000000").records()[0]
    skipped = {*parts.LEFT_OUT, "flags", "faults"}
    assert {name: rows[0][name] for name in first if name not in skipped} == {
        name: value for name, value in first.items() if name not in skipped
    }
    assert (tuple(rows[0]["flags"]), tuple(rows[0]["faults"])) == (first["flags"], first["faults"])


def test_equal_weights_have_equal_digests(scanned: Path) -> None:
    fleet = locater.Fleet.open(scanned)
    digests = {entry.step: entry.digest for entry in fleet.sources()}
    assert digests[100] == digests[300]
    assert len(set(digests.values())) == 4
    (run,) = fleet.to_dict()["runs"]
    assert [[entry["step"] for entry in group] for group in run["duplicates"]] == [[100, 300]]


def test_frames_and_sql_agree(scanned: Path) -> None:
    fleet = locater.Fleet.open(scanned)
    frame, rows = fleet.to_polars(), table(scanned)
    assert frame.to_dicts() == rows
    assert fleet.to_pandas()["F"].tolist() == [row["F"] for row in rows]
    largest = fleet.sql("select step, max(F) from heads group by step order by step").fetchall()
    assert largest == [(step, max(row["F"] for row in rows if row["step"] == step)) for step in (0, 100, 200, 300, 400)]
    assert fleet.sql("select count(*) from sources where status = 'done'").fetchall() == [(5,)]
    with pytest.raises(LocaterError, match="cannot be answered"):
        fleet.sql("select nothing from heads")


def test_eigenvalues_survive(steps: Path, tmp_path: Path) -> None:
    fleet = locater.Fleet.run([str(steps / "step-00000200")], tmp_path / "heads", eigenvalues=True, length=64)
    one = locater.scan(steps / "step-00000200", eigenvalues=True, length=64)
    assert fleet.scan("step-00000200").rows == one.rows
    assert fleet.scan("step-00000200").with_details().rows[0].drive is not None


def test_a_rerun_does_nothing_and_new_steps_are_added(tmp_path: Path) -> None:
    make_run(tmp_path / "run", 2)
    pattern, out = str(tmp_path / "run" / "step-*"), tmp_path / "heads"
    locater.Fleet.run([pattern], out)
    before = Store(out).parts()
    assert not running.run([pattern], out).scanned
    assert Store(out).parts() == before
    make_run(tmp_path / "run", 1, first=2)
    assert list(running.run([pattern], out).scanned) == [str(tmp_path / "run" / "step-00000200")]
    assert before.items() < Store(out).parts().items()


def test_shards_make_what_one_run_makes(steps: Path, scanned: Path, tmp_path: Path) -> None:
    for shard in ((2, 3), (3, 3), (1, 3)):
        locater.Fleet.run([str(steps / "step-*")], tmp_path / "heads", shard=shard)
    assert table(tmp_path / "heads") == table(scanned)
    assert Store(tmp_path / "heads").parts().keys() == Store(scanned).parts().keys()


def test_layers_of_a_large_checkpoint_are_dealt_out(
    steps: Path, scanned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "LARGE", 2_500)  # of queries and keys there are 6,144 bytes per layer
    found = list_checkpoints([str(steps / "step-00000100")]).entries
    jobs, _ = jobs_of(found, ScanSettings())
    assert [job.piece for job in jobs] == [(1, 3), (2, 3), (3, 3)]
    for shard in ((1, 2), (2, 2)):  # fewer checkpoints than shards: pieces are dealt out
        locater.Fleet.run([str(steps / "step-00000100")], tmp_path / "heads", shard=shard)
        assert len(table(tmp_path / "heads")) == (0 if shard[0] == 1 else 12)  # a part is never shown as the whole
    assert table(tmp_path / "heads") == [row for row in table(scanned) if row["step"] == 100]
    assert not [name for name in os.listdir(tmp_path / "heads") if name.startswith(".")]


def test_pieces_that_nobody_joined_are_joined(
    steps: Path, scanned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "LARGE", 2_500)
    with monkeypatch.context() as blind:  # as storage over a network that shows files late
        blind.setattr(Store, "has_all_pieces", lambda self, job: False)
        fleet = locater.Fleet.run([str(steps / "step-00000100")], tmp_path / "heads")
        assert fleet.counts() == {"done": 0, "failed": 0, "to do": 1}
    locater.Fleet.run([str(steps / "step-00000100")], tmp_path / "heads")
    assert table(tmp_path / "heads") == [row for row in table(scanned) if row["step"] == 100]


def test_small_checkpoints_share_a_task_and_the_largest_come_first(steps: Path) -> None:
    jobs, _ = jobs_of(list_checkpoints([str(steps / "step-*")]).entries * 40, ScanSettings())
    tasks = tasks_of(jobs)
    assert 2 < len(tasks) < 8
    assert sum(map(len, tasks)) == 200
    tasks = tasks_of([replace(jobs[0], seconds=1.0), replace(jobs[1], seconds=60.0), replace(jobs[2], seconds=6.0)])
    assert [[job.seconds for job in task] for task in tasks] == [[60.0], [6.0], [1.0]]


def test_two_fleets_on_one_folder(steps: Path, scanned: Path, tmp_path: Path) -> None:
    out = tmp_path / "heads"

    def work() -> None:
        locater.Fleet.run([str(steps / "step-*")], out, workers=0)

    finished({forked(work, tmp_path / f"{i}.txt"): tmp_path / f"{i}.txt" for i in range(2)})
    assert table(out) == table(scanned)
    assert not [name for name in os.listdir(out) if name.startswith(".")]


def test_other_settings_need_another_folder(steps: Path, scanned: Path) -> None:
    with pytest.raises(LocaterError, match=r"was created with --length 256, and this command has --length 64 --raw"):
        locater.Fleet.run([str(steps / "step-*")], scanned, length=64, raw=True)


def test_a_disk_that_is_full(steps: Path, scanned: Path, tmp_path: Path) -> None:
    out = tmp_path / "heads"

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, 6_000))  # a part has more bytes, a list has fewer
        with pytest.raises(LocaterError, match=r"heads: cannot be written \(File too large\).*before stays"):
            locater.Fleet.run([str(steps / "step-*")], out)

    finished({forked(work, tmp_path / "log.txt"): tmp_path / "log.txt"})
    assert not Store(out).parts()
    assert not Store(out).errors()  # no fault of a checkpoint
    locater.Fleet.run([str(steps / "step-*")], out)
    assert table(out) == table(scanned)


def test_folders_that_cannot_be_written(steps: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    for out, words in (("file/heads", "cannot be made a folder"), ("full", "not empty and not a fleet")):
        with pytest.raises(LocaterError, match=words):
            locater.Fleet.run([str(steps / "step-*")], tmp_path / out)
    with pytest.raises(LocaterError, match="not the folder of a fleet"):
        locater.Fleet.open(tmp_path / "full")


def test_a_truncated_part_hides_no_other(steps: Path, scanned: Path, tmp_path: Path) -> None:
    out = tmp_path / "heads"
    shutil.copytree(scanned, out)
    path = locater.Fleet.open(out).files()[1]  # by step
    path.write_bytes(path.read_bytes()[:-1000])
    fleet = locater.Fleet.open(out)
    with pytest.warns(UserWarning, match="its rows are left out"):
        assert fleet.to_polars()["step"].unique().sort().to_list() == [0, 200, 300, 400]
    assert fleet.counts() == {"done": 4, "failed": 0, "to do": 1}
    assert "not a complete part" in fleet.status_words()
    account = running.run([str(steps / "step-*")], out)
    assert list(account.scanned) == [str(steps / "step-00000100")]
    assert "not a complete part" in account.notes[0]
    assert table(out) == table(scanned)


def test_a_part_with_more_rows_than_bytes_is_not_read(scanned: Path, tmp_path: Path) -> None:
    """A million rows of nulls in a few kB would take hundreds of megabytes."""
    arrow = pytest.importorskip("pyarrow")
    out = tmp_path / "heads"
    shutil.copytree(scanned, out)
    path = locater.Fleet.open(out).files()[0]
    table = arrow.parquet.read_table(path)
    more = arrow.table({field.name: arrow.nulls(1_000_000, field.type) for field in table.schema}, schema=table.schema)
    arrow.parquet.write_table(more, path, compression="zstd")
    with pytest.raises(parts.DamagedPartError, match=r"damaged \(1,000,000 rows in [0-9,]+ bytes\)"):
        parts.read_rows(path)
    with pytest.raises(parts.DamagedPartError, match=r"not a complete part \(1,000,000 rows"):
        parts.read_header(path)


def test_flipped_bytes_are_noticed(scanned: Path, tmp_path: Path) -> None:
    out = tmp_path / "heads"
    shutil.copytree(scanned, out)
    path = locater.Fleet.open(out).files()[0]
    content = bytearray(path.read_bytes())
    content[len(content) // 5] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(LocaterError, match=r"parquet: damaged .*remove it and run the fleet again"):
        locater.Fleet.open(out).to_polars()


def test_a_checkpoint_that_changes_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    (folder,) = make_run(tmp_path / "run", 1)
    store = Store.create(tmp_path / "heads", ScanSettings())
    ((job,), _) = jobs_of(list_checkpoints([str(folder)]).entries, ScanSettings())
    rewritten(folder, 1.5)
    outcome = perform(job, store.folder)
    assert "changed while the fleet ran" in str(outcome.reason)
    assert not store.parts()
    fleet = locater.Fleet.run([str(folder)], tmp_path / "heads")  # it is another checkpoint now, so it is tried
    assert fleet.scan(folder).rows == locater.scan(folder).rows
    assert not fleet.errors


def test_a_checkpoint_that_changed_takes_the_place_of_its_part(tmp_path: Path) -> None:
    (folder,) = make_run(tmp_path / "run", 1)
    locater.Fleet.run([str(folder)], tmp_path / "heads")
    rewritten(folder, 1.5)
    fleet = locater.Fleet.run([str(folder)], tmp_path / "heads")
    assert len(fleet.files()) == len(list((tmp_path / "heads").glob("*.parquet"))) == 1
    assert fleet.scan(folder).rows == locater.scan(folder).rows


def test_a_checkpoint_that_broke_has_no_rows_and_one_that_is_gone_keeps_them(tmp_path: Path, run: Run) -> None:
    one, two = make_run(tmp_path / "run", 2)
    names, out = tmp_path / "list.csv", tmp_path / "heads"
    names.write_text(f"{one}\n{two}\n")
    assert run("fleet", f"@{names}", "--out", out).status == 0
    (one / "model.safetensors").write_bytes(b"nothing")
    (one / "optimizer.pt").write_bytes(b"nothing")  # is not read
    shutil.rmtree(two)
    done = run("fleet", f"@{names}", "--out", out)
    assert done.status == 2
    assert "1 checkpoint cannot be inspected now; what was scanned before stays" in done.err
    assert "1 of 2 checkpoints failed" in done.err
    assert {row["step"] for row in table(out)} == {100}
    assert [entry.status for entry in locater.Fleet.open(out).sources()] == ["failed", "done"]


def test_what_is_written_beside_the_weights_does_not_count(tmp_path: Path) -> None:
    (folder,) = make_run(tmp_path / "run", 1)
    locater.Fleet.run([str(folder)], tmp_path / "heads")
    (folder / "optimizer.pt").write_bytes(b"state")
    assert not running.run([str(folder)], tmp_path / "heads").scanned
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    assert running.run([str(folder)], tmp_path / "heads").scanned


def test_only_half_written_files_are_swept_away(scanned: Path, tmp_path: Path) -> None:
    out = tmp_path / "heads"
    shutil.copytree(scanned, out)
    old = [".k.parquet.x1y2", ".list-0.json.ab", ".fleet.12.34", ".k.superseded", ".k.damaged", ".k.1-of-2.json"]
    for name in [*old, ".new.parquet.x1"]:
        (out / name).write_text("")
    for name in old:
        os.utime(out / name, (0, 0))
    Store.create(out, ScanSettings())
    left = {".k.superseded", ".k.damaged", ".k.1-of-2.json", ".new.parquet.x1"}
    assert {name for name in os.listdir(out) if name.startswith(".")} == left
    assert len(Store(out).parts()) == 5


def test_folders_of_distributed_checkpoints_with_their_configuration_above(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    plain = checkpoint(tmp_path / "plain", seed=1)
    run, out = tmp_path / "run", tmp_path / "heads"
    for step in (10, 20):
        tensors = {name: tensor * step for name, tensor in load_file(plain / "model.safetensors").items()}
        dcp.save(tensors, checkpoint_id=str(run / f"step-{step}"), no_dist=True)
    shutil.copy(plain / "config.json", run / "config.json")
    fleet = locater.Fleet.run([str(run / "*")], out)
    assert [entry.step for entry in fleet.sources()] == [10, 20]
    assert fleet.scan("step-20").rows == locater.scan(run / "step-20").rows
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-2}))
    assert len(running.run([str(run / "*")], out).scanned) == 2


def test_labels_change_without_a_scan(steps: Path, scanned: Path, tmp_path: Path) -> None:
    out = tmp_path / "heads"
    shutil.copytree(scanned, out)
    account = running.run([str(steps / "step-*")], out, run_name="mine", step_pattern=r"step-0*([1-9])00")
    assert not account.scanned
    rows = table(out)
    assert {(row["run"], row["step"]) for row in rows} == {("mine", i) for i in range(1, 5)} | {("mine", None)}
    assert sum(row["F"] for row in rows) == pytest.approx(sum(row["F"] for row in table(scanned)), rel=1e-12)


def test_a_job_that_killed_its_process_is_done_in_a_worker(
    steps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.create(tmp_path / "heads", ScanSettings())
    ((job,), _) = jobs_of(list_checkpoints([str(steps / "step-00000100")]).entries, ScanSettings())

    def work() -> None:
        with store.started(job):
            os.kill(os.getpid(), 9)

    child = forked(work, tmp_path / "log.txt")
    assert os.waitpid(child, 0)[1] == 9
    used: list[int] = []
    real = running.run_in_workers
    monkeypatch.setattr(running, "run_in_workers", lambda *given: used.append(1) or real(*given))
    locater.Fleet.run([job.source], tmp_path / "heads")
    assert used
    assert not store.was_cut_off(job)
    locater.Fleet.run([str(steps / "step-00000200")], tmp_path / "heads")
    assert len(used) == 1


def test_failures_do_not_stop_the_others(steps: Path, tmp_path: Path, run: Run) -> None:
    bad = checkpoint(tmp_path / "run" / "step-7", seed=7)
    (bad / "model.safetensors").write_bytes((bad / "model.safetensors").read_bytes()[:-9])
    sources = tmp_path / "list.csv"
    good = steps / "step-00000100"
    sources.write_text(f"source,step\n{bad},7\n{good},100\n{tmp_path / 'missing'},8\n")
    out = tmp_path / "heads"
    done = run("fleet", f"@{sources}", "--out", out)
    assert done.status == 2
    assert "1 of 3 checkpoints done, 2 failed" in done.out
    assert "truncated" in done.out
    assert "no such file or folder" in done.out
    assert "2 of 3 checkpoints failed" in done.err
    assert len(locater.Fleet.open(out).to_polars()) == 12
    shutil.copy(good / "model.safetensors", bad / "model.safetensors")  # repaired: tried without being asked
    shutil.copytree(good, tmp_path / "missing")
    done = run("fleet", f"@{sources}", "--out", out)
    assert (done.status, locater.Fleet.open(out).errors) == (0, {})
    assert not list(out.glob("*.error.json"))


def test_failures_are_tried_again_when_asked(tmp_path: Path, run: Run) -> None:
    (folder,) = make_run(tmp_path / "run", 1)
    (folder / "config.json").write_text('{"model_type": "nonesuch"}')
    out = tmp_path / "heads"
    assert run("fleet", folder, "--out", out).status == 2
    store, (key,) = Store(out), Store(out).errors()
    document = json.loads(store.error(key).read_text())
    store.error(key).write_text(json.dumps({**document, "reason": "an old reason"}))
    assert "an old reason" in run("fleet", folder, "--out", out).err  # not tried
    status = run("fleet", out, "--status")
    assert (status.status, status.out.splitlines()[0]) == (0, f"{out}: 0 done, 1 failed, 0 to do")
    assert "failed (1 try): an old reason" in status.out
    again = run("fleet", out, "--retry-failed")
    assert again.status == 2
    assert "nonesuch" in again.err


def test_the_command_says_what_there_is(steps: Path, scanned: Path, tmp_path: Path, run: Run) -> None:
    shown = run("fleet", scanned, "--json", tmp_path / "fleet.json", "--fail-on", "sharp")
    assert shown.status == 1
    assert f"{scanned}: 5 of 5 checkpoints done." in shown.out
    assert "5 from 0 to 400" in shown.out
    assert "equal queries, keys and norms: 100, 300" in shown.out.lower()
    document = json.loads((tmp_path / "fleet.json").read_text())
    assert document == locater.Fleet.open(scanned).to_dict()
    rows = table(scanned)
    (entry,) = document["runs"]
    assert entry["heads_with_faults"] == len({(r["layer"], r["head"]) for r in rows if r["faults"]})
    for flag, said in entry["flags"].items():
        assert said["first"]["step"] == min(row["step"] for row in rows if flag in row["flags"])
        assert said["heads"] == len({(r["layer"], r["head"]) for r in rows if flag in r["flags"]})
    sharp = sum("sharp" in row["flags"] for row in rows)
    assert f"locater: --fail-on: {sharp} heads are sharp, worst " in shown.err
    assert run("fleet", scanned, "--fail-on", "M<-1e9").status == 0
    assert json.loads(run("fleet", scanned, "--json", "-").out) == document
    assert "<table>" in locater.Fleet.open(scanned)._repr_html_()
    assert "5 done" in repr(locater.Fleet.open(scanned))


def test_models_without_a_run_are_different_models(tmp_path: Path) -> None:
    for seed, name in enumerate(("a", "b")):
        checkpoint(tmp_path / name, seed)
    fleet = locater.Fleet.run([str(tmp_path / "?")], tmp_path / "heads")
    (run,) = fleet.to_dict()["runs"]
    rows = table(tmp_path / "heads")
    assert (run["run"], run["heads"], run["without_step"], run["heads_with_faults_at_last"]) == (None, 24, 2, None)
    assert run["heads_with_faults"] == sum(bool(row["faults"]) for row in rows)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("{steps}/step-*",), "add --out FOLDER"),
        (("{steps}/nothing-*", "--out", "{out}"), "matches nothing"),
        (("{steps}", "--out", "{out}"), "5 folders with weights: give"),
        (("{steps}/*", "--out", "{out}", "--shard", "3/2"), "--shard 3/2: the first number counts"),
        (("{steps}/*", "--out", "{out}", "--shard", "a"), "write it as I/N"),
        (("{steps}/*", "--out", "{out}", "--step-pattern", "("), "not a regular expression"),
        (("{steps}/*", "--out", "{out}", "--step-pattern", r"\d+"), "has 0 groups"),
        (("{steps}/*", "--out", "{out}", "--step-pattern", "(step)"), "'step' in .* is not a number"),
        (("{steps}/*", "--out", "{out}", "--length", "1"), "length 1 is out of range"),
        (("{steps}/*", "--out", "{out}", "--ray", "auto", "--shard", "1/2"), "exclude each other"),
        (("{steps}/*", "--out", "{out}", "--fail-on", "bogus"), "bogus"),
        (("@{steps}/none.csv", "--out", "{out}"), "none.csv: cannot be read"),
        (("{scanned}", "--length", "9"), "--length is for scanning"),
        (("{steps}/*", "--status", "--out", "{out}"), "not the folder of a fleet"),
    ],
)
def test_bad_usage_is_one_line(
    arguments: tuple[str, ...], words: str, steps: Path, scanned: Path, tmp_path: Path, run: Run
) -> None:
    places = {"steps": steps, "scanned": scanned, "out": tmp_path / "heads"}
    done = run("fleet", *(argument.format(**places) for argument in arguments))
    assert done.status == 2
    (line,) = done.err.splitlines()
    assert line.startswith("locater: ")
    assert re.search(words, line), line
    assert not (tmp_path / "heads").exists()


@pytest.mark.parametrize(
    ("name", "run_name", "step"),
    [
        ("/data/run/step-00001000", "/data/run", 1000),
        ("/data/run/step1000", "/data/run", 1000),
        ("/data/checkpoint-500", "/data", 500),
        ("/data/mine_step_20.safetensors", "/data/mine", 20),
        ("/data/run/step-9/model.safetensors", "/data/run", 9),
        ("/data/run/global_step3", "/data/run", 3),
        ("hf://org/model@step1000-tokens4B", "hf://org/model", 1000),
        ("hf://org/model@stage1-step70-tokens1B", "hf://org/model@stage1", 70),
        ("/data/checkpoint-3-step-500", "/data/checkpoint-3", 500),
        ("/data/step3/models/bert", None, None),
        ("/data/footstep7", None, None),
        ("/data/step1-to-step2", None, None),  # two steps are none
        ("/data/llama-7b", None, None),
    ],
)
def test_steps_come_from_names(name: str, run_name: str | None, step: int | None) -> None:
    assert asdict(label_source(name)) == {"source": name, "run": run_name, "step": step}


def test_lists(tmp_path: Path) -> None:
    path = tmp_path / "list.csv"
    path.write_text("Step,Checkpoint Directory\n1000,https://host/step1000-unsharded/\n,/data/step-7\n")
    assert [(x.source, x.step) for x in list_checkpoints([f"@{path}"]).entries] == [
        ("https://host/step1000-unsharded", 1000),
        ("/data/step-7", 7),
    ]
    path.write_text("/data/a\n/data/b\n")
    found = list_checkpoints([f"@{path}"])
    assert [x.source for x in found.entries] == ["/data/a", "/data/b"]
    assert "2 of 2 names have no step" in found.notes[0]
    for text, words in (
        ("a,b\n1,2\n", "none of them named source"),
        ("source,step\n/data/a,many\n", "row 2 has the step 'many'"),
        ("source,step\n/data/a\n", "row 2 has 1 cells"),
        ("source,step\n,3\n", "row 2 names no source"),
        ("source,step\n/data/a,1\n/data/a,2\n", "listed twice"),
        ("", "an empty list"),
        ("source\n", "headings and no rows"),
    ):
        path.write_text(text)
        with pytest.raises(LocaterError, match=words):
            list_checkpoints([f"@{path}"])


def test_patterns_leave_out_what_is_no_checkpoint(steps: Path, tmp_path: Path) -> None:
    shutil.copytree(steps, tmp_path / "run")
    (tmp_path / "run" / "plan.json").write_text("{}")
    (tmp_path / "run" / "step-00000500").mkdir()  # a gap is no error
    found = list_checkpoints([str(tmp_path / "run" / "*")])
    assert len(found.entries) == 5
    assert found.notes == ["left out, because they hold no weights: plan.json, step-00000500"]


def test_the_reader_version_covers_what_a_scan_imports() -> None:
    """Those of the instrument, and those that the families of `locater train` models need, which are in another
    package.
    """
    code = "import sys, locater.commands.scanning as s; print(*(m.__file__ for n, m in sys.modules.items() if {}))"
    own = code.format("n.startswith('locater.')")
    family = code.replace("; print", "; from locater.families.registry import BY_TYPE; BY_TYPE['locater']; print")
    others = family.format("n.startswith('locater_lab.models') or n.startswith('locater_lab.mechanisms')")
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    read = {str(path) for path in reader_files().values()}
    for script, some in ((own, "sources/weights.py"), (others, "locater_lab/models/family.py")):
        done = subprocess.run([python(), "-c", script], env=variables, capture_output=True, text=True, check=True)
        loaded = set(done.stdout.split())
        assert any(path.endswith(some) for path in loaded)
        assert not loaded - read
    assert all((PACKAGE / place).exists() for place in UNRELATED)
    assert not [path for path in read if path.endswith("locater/cli/shell.py")]


def test_a_changed_reader_of_another_package_makes_a_new_version(tmp_path: Path) -> None:
    """A package that offers a family by an entry point: its files count, and it is not imported for that."""
    package = tmp_path / "own_family"
    (tmp_path / "own_family-1.dist-info").mkdir()
    (tmp_path / "own_family-1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: own_family\nVersion: 1\n"
    )
    points = "[locater.families]\nown = own_family.reading:FAMILY\n"
    (tmp_path / "own_family-1.dist-info" / "entry_points.txt").write_text(points)
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    code = "from locater.commands.fleet.cache_keys import reader_version; print(reader_version())"
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(tmp_path)])}
    versions = []
    for text in ("FAMILY = 1\n", "FAMILY = 2\n", "FAMILY = 1\n"):
        (package / "reading.py").write_text(text)
        done = subprocess.run([python(), "-c", code], env=variables, capture_output=True, text=True, check=True)
        versions.append(done.stdout)
    assert versions[0] == versions[2] != versions[1]


def test_the_queries_of_the_page_run(scanned: Path) -> None:
    text = (ROOT / "docs" / "fleet.md").read_text()
    queries = re.findall(r"^    (select .*)$", text, re.MULTILINE)
    assert len(queries) == 3
    fleet, rows = locater.Fleet.open(scanned), table(scanned)
    by_step, first, equal = (fleet.sql(query).fetchall() for query in queries)
    assert [line[0] for line in by_step] == [0, 100, 200, 300, 400]
    assert by_step[0][2] == sum(bool(row["faults"]) for row in rows if row["step"] == 0)
    assert {line[:2] for line in first} == {(r["layer"], r["head"]) for r in rows if "sharp" in r["flags"]}
    assert [line[1] for line in equal] == [[100, 300]]


def test_the_page_quotes_the_benchmark() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "fleet.json").read_text())
    lines = benchmark("fleet")["table"](results).splitlines()
    text = (ROOT / "docs" / "fleet.md").read_text()
    assert len(lines) == 6
    assert all(line in text for line in lines)


def test_a_changed_shard_in_a_folder_below_its_index_is_scanned_again(tmp_path: Path) -> None:
    folder, out = checkpoint(tmp_path / "model", 1), tmp_path / "out"
    shard, index = folder / "parts" / "all.safetensors", folder / "model.safetensors.index.json"
    shard.parent.mkdir()
    (folder / "model.safetensors").rename(shard)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(load_file(shard), "parts/all.safetensors")}))
    before = [row["F"] for row in locater.Fleet.run([str(index)], out).records()]
    checkpoint(tmp_path / "other", 2)
    shutil.copy(tmp_path / "other" / "model.safetensors", shard)
    after = [row["F"] for row in locater.Fleet.run([str(index)], out).records()]
    assert after == [row.F for row in locater.scan(index).rows]
    assert after != before


def test_a_gate_does_not_pass_on_checkpoints_that_are_not_scanned(tmp_path: Path, run: Callable[..., Any]) -> None:
    """A damaged part is a checkpoint to do: its heads were not tried, so --fail-on cannot say that all is well."""
    make_run(tmp_path / "run", 2)
    fleet = locater.Fleet.run([str(tmp_path / "run" / "*")], tmp_path / "out")
    part = fleet.files()[0]
    part.write_bytes(part.read_bytes()[:2000])
    shown = run("fleet", tmp_path / "out", "--fail-on", "M<-1e9")
    assert shown.status == 2
    assert "1 of 2 checkpoints are not scanned" in shown.err
    with pytest.warns(UserWarning, match="its rows are left out"):
        assert len(fleet.to_arrow()) == 12
    with pytest.warns(UserWarning, match="its rows are left out"):
        fleet.sql("select * from heads")
    assert run("fleet", tmp_path / "out", "--retry-failed", "--fail-on", "M<-1e9").status == 0


def test_a_fleet_is_no_checkpoint(scanned: Path, tmp_path: Path) -> None:
    with pytest.raises(LocaterError, match="the folder of a fleet, not a checkpoint"):
        locater.Fleet.run([str(scanned)], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("item", [{"source": 5, "run": None, "step": None}, {"source": "a", "run": "b", "step": "c"}])
def test_a_list_of_something_else_is_refused(item: dict[str, Any], tmp_path: Path) -> None:
    store = Store.create(tmp_path, ScanSettings())
    (tmp_path / "list-a.json").write_text(json.dumps({"schema": 1, "sources": [item]}))
    with pytest.raises(LocaterError, match=r"list-a\.json: damaged"):
        store.lists()
    (tmp_path / "a.error.json").write_text(json.dumps({**item, "reason": "none"}))
    assert store.errors() == {}
