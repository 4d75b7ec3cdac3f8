"""A run that is killed at any moment, with SIGKILL, and started again ends with exactly the weights of a run that was
not.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from locater.cli import main
from locater.train import Plan, run
from tests.processes import finished, forked
from tests.train.test_parts import corpus

if sys.platform == "win32":
    pytest.skip("needs fork and SIGKILL", allow_module_level=True)

# One process trains once, so that everything is imported, and forks a run for each point at which to die: every call
# that a checkpoint makes of the system counts.
SCRIPT = '''
import os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from locater.train import Plan, run
corpus, base = sys.argv[1], Path(sys.argv[2])

def plan(name):
    return Plan(out=str(base / name), corpus=(corpus,), layers=1, width=16, heads=2, length=16, batch=4, steps=6, checkpoint=2, evaluate=3,
                observe=4, log=1, control=("locater(target=2)",), device="cpu")

def child(name, die_at):
    """Train in a child that kills itself at the die_at-th call of the system; returns how it ended."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    calls = 0
    def counted(function):
        def call(*args, **kw):
            nonlocal calls
            calls += 1
            if calls == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            done = function(*args, **kw)
            calls += 1
            if calls == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return done
        return call
    for name_of in ("fsync", "rename", "mkdir", "replace"):
        setattr(os, name_of, counted(getattr(os, name_of)))
    os._exit(0 if run(plan(name)).report_loss > 0 else 1)

def weights(name):
    return (base / name / "model" / "model.safetensors").read_bytes()

assert run(plan("whole")).report_loss > 0  # in this process: what it imports, the children have
died = 0
for point in range(1, 80, int(sys.argv[3])):
    name = f"killed-{point}"
    first = child(name, point)
    died += first == signal.SIGKILL
    assert child(name, 7 * point % 30 + 1) in (0, signal.SIGKILL)     # die once more somewhere else
    assert child(name, 0) == 0
    assert weights(name) == weights("whole"), point
    assert not list((base / name).glob(".*.tmp")), point
print("died", died)
'''


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(("every", "least"), [(27, 3), pytest.param(6, 10, marks=pytest.mark.slow)])
def test_killed_at_many_points_of_a_checkpoint(every: int, least: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(corpus(tmp_path)), str(tmp_path), str(every)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) >= least, "the points must lie inside the run"


def test_the_command_killed_from_outside(tmp_path: Path) -> None:
    options = ["--corpus", str(corpus(tmp_path)), "--out", str(tmp_path / "killed"), *OPTIONS.split()]

    def command() -> None:
        sys.argv = ["locater", "train", *options]
        main()

    output = tmp_path / "output.txt"
    killed = forked(command, output)
    wait_for(tmp_path / "killed" / "step-00000020", killed)
    os.kill(killed, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(killed, 0)[1]) == -signal.SIGKILL
    assert not (tmp_path / "killed" / "result.json").exists(), "it must die before its end"
    finished({forked(command, output): output})
    whole = run(replace(Plan.load(tmp_path / "killed" / "plan.json"), out=str(tmp_path / "whole")))
    assert (tmp_path / "killed/model/model.safetensors").read_bytes() == (
        Path(whole.model) / "model.safetensors"
    ).read_bytes()


OPTIONS = "--layers 2 --width 16 --heads 2 --length 16 --batch 4 --steps 120 --checkpoint 20 --observe 50 --device cpu"


def wait_for(path: Path, child: int) -> None:
    for _ in range(3000):
        if path.exists():
            return
        assert os.waitpid(child, os.WNOHANG)[0] == 0, "it ended before it could be killed"
        time.sleep(0.01)
    pytest.fail(f"{path} did not appear")
