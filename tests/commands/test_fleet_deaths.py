"""Fleets whose workers and drivers are killed: nothing is lost, nothing is wrong, and one bad job stops no other."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

import locater
from locater.commands.fleet import running
from locater.commands.fleet.cache_keys import Job, ScanSettings
from locater.commands.fleet.parts import read_header
from locater.commands.fleet.running import _Supervisor, jobs_of, run_in_workers
from locater.commands.fleet.store import Store
from locater.commands.fleet.tasks import Outcome, Schedule
from locater.results.run_names import list_checkpoints
from tests import ROOT
from tests.commands.fleet_folders import checkpoint, make_run, table
from tests.processes import python

pytest.importorskip("pyarrow")
LARGE = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64}


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight small checkpoints, and a larger one that takes long enough to be killed at."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    make_run(folder, 8)
    checkpoint(folder / "step-00000800", seed=8, **LARGE, num_hidden_layers=6)
    return folder


@pytest.fixture(scope="module")
def undisturbed(steps: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fleets") / "heads"
    locater.Fleet.run([str(steps / "step-*")], out, workers=0)
    return out


def jobs_in(steps: Path) -> list[Job]:
    jobs, failed = jobs_of(list_checkpoints([str(steps / "step-*")]).entries, ScanSettings())
    assert not failed
    return jobs


def assert_whole(out: Path) -> None:
    """Every visible part can be read, whatever was killed."""
    for path in out.glob("*.parquet"):
        read_header(path)


def test_a_killed_worker_costs_nothing(steps: Path, undisturbed: Path, tmp_path: Path) -> None:
    store, jobs = Store.create(tmp_path / "heads", ScanSettings()), jobs_in(steps)
    supervisor = _Supervisor(Schedule([tuple(jobs[:5]), tuple(jobs[5:])]), store.folder, workers=2)
    done: list[Outcome] = []
    killed: list[int] = []
    for outcome in supervisor.outcomes():
        done.append(outcome)
        busy = [worker.process.pid for worker in supervisor.workers if worker.left]
        if len(killed) < 2 and len(done) > 2 * len(killed) and (fresh := [pid for pid in busy if pid not in killed]):
            killed.append(fresh[0])
            os.kill(fresh[0], signal.SIGKILL)
    assert len(killed) == 2
    assert sorted(outcome.job.source for outcome in done) == sorted(job.source for job in jobs)
    assert not any(outcome.reason or outcome.fatal for outcome in done)
    assert table(store.folder) == table(undisturbed)
    assert not multiprocessing.active_children()


def test_a_job_that_kills_its_workers_is_given_up_alone(steps: Path, undisturbed: Path, tmp_path: Path) -> None:
    store, jobs = Store.create(tmp_path / "heads", ScanSettings()), jobs_in(steps)
    poison = str(steps / "step-00000800")
    jobs = [*jobs[:3], jobs[8], *jobs[3:8]]
    supervisor = _Supervisor(Schedule([tuple(jobs[:5]), tuple(jobs[5:])]), store.folder, workers=2)
    beside: list[int] = []  # for each kill, the other workers that were at work
    over = threading.Event()

    def kill() -> None:
        while not over.is_set():
            for worker in list(supervisor.workers):
                if worker.at is not None and worker.at.source == poison and worker.process.is_alive():
                    others = sum(bool(other.left) for other in supervisor.workers if other is not worker)
                    os.kill(worker.process.pid, signal.SIGKILL)
                    worker.process.join()
                    beside.append(others)
            time.sleep(0.001)

    thread = threading.Thread(target=kill)
    thread.start()
    outcomes = {outcome.job.source: outcome.reason for outcome in supervisor.outcomes()}
    over.set()
    thread.join()
    assert len(beside) == 3
    assert beside[1:] == [0, 0]
    assert [source for source, reason in outcomes.items() if reason] == [poison]
    fleet = locater.Fleet.open(store.folder)
    assert "was killed by SIGKILL 3 times" in fleet.errors[poison]
    assert [entry.tries for entry in fleet.sources() if entry.status == "failed"] == [3]
    assert table(store.folder) == [row for row in table(undisturbed) if row["source"] != poison]
    again = running.run([str(steps / "step-*")], store.folder, retry_failed=True, engine=running.Engine(workers=1))
    assert list(again.scanned) == [poison]
    assert table(store.folder) == table(undisturbed)
    assert not list(store.folder.glob("*.error.json"))


def test_workers_end_with_whoever_asked_them(steps: Path, tmp_path: Path) -> None:
    store = Store.create(tmp_path / "heads", ScanSettings())
    outcomes = run_in_workers(Schedule([tuple(jobs_in(steps))]), store.folder, workers=2)
    next(outcomes)
    assert multiprocessing.active_children()
    outcomes.close()
    assert not multiprocessing.active_children()


def test_a_folder_that_vanishes_stops_everything(steps: Path, tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    (outcome,) = run_in_workers(Schedule([tuple(jobs_in(steps)[:1])]), folder, workers=1)
    assert "not visible where the work is done" in str(outcome.fatal)


def children_of(pid: int) -> list[int]:
    """Processes below this one, the forks of its fork server included."""
    below: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        below.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    found, waiting = [], [pid]
    while waiting:
        waiting = [child for one in waiting for child in below.get(one, [])]
        found += waiting
    return found


def driver(pattern: str, out: Path, *options: str, home: str | None = None) -> subprocess.Popen[bytes]:
    """A process that is found, with those below it, by its number."""
    command = [sys.executable, "-m", "locater", "fleet", pattern, "--out", str(out), *options]
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    if home is not None:  # where the token of a Ray cluster is
        variables |= {"HOME": home, "RAY_AUTH_MODE": "token"}
    return subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_a_killed_driver_leaves_whole_parts_and_no_process(steps: Path, undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "heads"
    process = driver(str(steps / "step-*"), out, "--workers", "2")
    end = time.monotonic() + 60
    while not (out.is_dir() and any(out.glob("*.parquet"))) and time.monotonic() < end:
        time.sleep(0.005)
    workers = children_of(process.pid)
    process.kill()
    process.communicate()
    assert workers
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < end:
        time.sleep(0.01)
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    assert any(out.glob("*.parquet"))
    assert_whole(out)
    locater.Fleet.run([str(steps / "step-*")], out, workers=0)
    assert table(out) == table(undisturbed)


def test_a_script_without_a_guard_can_have_workers(steps: Path, undisturbed: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import locater\nlocater.Fleet.run([{str(steps / 'step-*')!r}], 'heads', workers=2)\n")
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, script], cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert table(tmp_path / "heads") == table(undisturbed)


@pytest.mark.parametrize("workers", [pytest.param("0", marks=pytest.mark.slow), "2"])
def test_a_disk_that_is_full_costs_what_was_not_written(
    steps: Path, undisturbed: Path, tmp_path: Path, workers: str
) -> None:
    """No file may be longer than most parts are: one line, no part that cannot be read, and the next run goes on."""
    out = tmp_path / "heads"
    small = max(path.stat().st_size for path in undisturbed.glob("*.parquet")) - 1

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (small, small))

    command = [python(), "-m", "locater", "fleet", str(steps / "step-*"), "--out", str(out), "--workers", workers]
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, preexec_fn=full, timeout=120)
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr
    assert "this is a bug" not in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert_whole(out)
    kept = {path.name: path.stat().st_mtime_ns for path in out.glob("*.parquet")}
    locater.Fleet.run([str(steps / "step-*")], out, workers=0, retry_failed=True)
    assert table(out) == table(undisturbed)
    assert {name: (out / name).stat().st_mtime_ns for name in kept} == kept, "what was done is not done again"
    assert not list(out.glob("*.error.json"))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="/proc is a folder that nobody can write to")
def test_a_folder_that_cannot_be_written(steps: Path) -> None:
    command = [python(), "-m", "locater", "fleet", str(steps / "step-*"), "--out", "/proc/heads", "--workers", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    said = done.stderr
    assert done.returncode == 2
    assert said.startswith("locater: /proc/heads"), said
    assert len(said.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_workers_killed_at_random_moments(steps: Path, undisturbed: Path, tmp_path: Path) -> None:
    """No row is lost or doubled, and the command ends."""
    out, chance = tmp_path / "heads", random.Random(time.time_ns())
    process = driver(str(steps / "step-*"), out, "--workers", "2")
    killed = 0
    while process.poll() is None:
        below = [pid for one in children_of(process.pid) for pid in children_of(one)]
        if killed < 4 and below:
            time.sleep(chance.random() * 0.2)
            with contextlib.suppress(ProcessLookupError):
                os.kill(chance.choice(below), signal.SIGKILL)
                killed += 1
        time.sleep(0.005)
    said = process.communicate()[1].decode()
    assert killed
    assert process.returncode == 0, said
    assert_whole(out)
    assert table(out) == table(undisturbed)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """200 checkpoints, and their table when nobody is killed."""
    folder = tmp_path_factory.mktemp("many")
    make_run(folder / "run", 200)
    locater.Fleet.run([str(folder / "run" / "step-*")], folder / "heads", workers=0)
    return folder / "run", folder / "heads"


@pytest.mark.slow
def test_two_hundred_checkpoints_with_random_deaths(many: tuple[Path, Path], tmp_path: Path) -> None:
    """About every ten checkpoints a worker dies, or the server that forks them, or the driver."""
    steps, undisturbed = many
    out, chance, said = tmp_path / "heads", random.Random(0), ""
    deaths = [*["worker"] * 4, "server", "driver", *["worker"] * 3, "driver", *["worker"] * 6]
    count = len(deaths)
    for _ in range(8):
        process = driver(str(steps / "step-*"), out, "--workers", "2", "--retry-failed")
        while process.poll() is None:
            due = deaths and len(list(out.glob("*.parquet"))) > 10 * (count - len(deaths) + 1)
            below = children_of(process.pid) if due else []
            servers = [pid for pid in below if children_of(pid)]
            victims = {"worker": [p for pid in servers for p in children_of(pid)], "server": servers}
            if due and (chosen := [process.pid] if deaths[0] == "driver" else victims[deaths[0]]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(chance.choice(chosen), signal.SIGKILL)
                deaths.pop(0)
            time.sleep(0.002)
        said = process.communicate()[1].decode()
        assert_whole(out)
        if process.returncode == 0:
            break
    assert process.returncode == 0, said
    assert not deaths
    assert table(out) == table(undisturbed)
    assert not list(out.glob("*.error.json"))


@pytest.mark.slow
def test_two_hundred_checkpoints_on_ray_with_two_workers_killed(many: tuple[Path, Path], tmp_path: Path) -> None:
    pytest.importorskip("ray")
    from locater.commands.fleet.on_ray import _perform_task

    steps, undisturbed = many
    title = f"ray::{_perform_task.__name__}".encode()  # of a worker that has a task
    out, files = tmp_path / "heads", tempfile.mkdtemp(dir="/tmp")  # paths of sockets have to be short
    code = (
        "import ray, sys\n"
        "own = dict(num_cpus=2, include_dashboard=False, log_to_driver=False, _node_ip_address='127.0.0.1')\n"
        f"context = ray.init(_temp_dir={files!r}, **own)\n"
        "print(context.address_info['gcs_address'], flush=True)\n"
        "sys.stdin.read()\n"
    )
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HOME": files, "RAY_AUTH_MODE": "token"}
    cluster = subprocess.Popen(
        [sys.executable, "-c", code], env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert cluster.stdout is not None
        address = next(line for line in cluster.stdout if line.count(":") == 1 and line[0].isdigit()).strip()
        process = driver(str(steps / "step-*"), out, "--ray", address, home=files)
        killed: set[int] = set()
        while process.poll() is None:
            if len(killed) < 2 and len(list(out.glob("*.parquet"))) > 20 * (len(killed) + 1):
                at_work = [pid for pid in children_of(cluster.pid) if title in command_line(pid)]
                if at_work:
                    os.kill(at_work[0], signal.SIGKILL)
                    killed.add(at_work[0])
            time.sleep(0.01)
        assert process.returncode == 0, process.communicate()[1].decode()
    finally:
        cluster.communicate("")
        shutil.rmtree(files, ignore_errors=True)
    assert len(killed) == 2
    assert_whole(out)
    assert table(out) == table(undisturbed)


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
