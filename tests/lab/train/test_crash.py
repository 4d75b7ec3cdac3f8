"""A run that is killed at any moment, with SIGKILL, and started again ends with exactly the weights of a run that was
not.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from locater.cli import main
from locater_lab.train import Plan, run
from tests.lab.train.test_parts import corpus
from tests.processes import finished, forked

if sys.platform == "win32":
    pytest.skip("needs fork and SIGKILL", allow_module_level=True)

# A run is forked for each point at which to die: every call that a checkpoint makes of the system counts.


def child(plan: Plan, die_at: int) -> int:
    """Train in a child that kills itself at the die_at-th call of the system; returns how it ended."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    calls = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kw: Any) -> Any:
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

    for name in ("fsync", "rename", "mkdir", "replace"):
        setattr(os, name, counted(getattr(os, name)))
    os._exit(0 if run(plan).report_loss > 0 else 1)


def killed_at_points(every: int, text: Path, base: Path) -> None:
    def plan(name: str) -> Plan:
        shape: dict[str, Any] = dict(layers=1, width=16, heads=2, length=16, batch=4, steps=6, device="cpu")
        often: dict[str, Any] = dict(checkpoint=2, evaluate=3, observe=4, log=1)
        return Plan(out=str(base / name), corpus=(str(text),), control=("locater(target=2)",), **shape, **often)

    def weights(name: str) -> bytes:
        return (base / name / "model" / "model.safetensors").read_bytes()

    assert run(plan("whole")).report_loss > 0  # in this process: what it imports, the children have
    died = 0
    for point in range(1, 80, every):
        name = f"killed-{point}"
        first = child(plan(name), point)
        died += first == signal.SIGKILL
        assert child(plan(name), 7 * point % 30 + 1) in (0, signal.SIGKILL)  # die once more somewhere else
        assert child(plan(name), 0) == 0
        assert weights(name) == weights("whole"), point
        assert not list((base / name).glob(".*.tmp")), point
    print("died", died)


@pytest.mark.parametrize(("every", "least"), [(27, 3), pytest.param(6, 10, marks=pytest.mark.slow)])
def test_killed_at_many_points_of_a_checkpoint(every: int, least: int, tmp_path: Path) -> None:
    output, text = tmp_path / "output.txt", corpus(tmp_path)
    (printed,) = finished({forked(lambda: killed_at_points(every, text, tmp_path), output): output}, 600)
    assert int(printed.split()[-1]) >= least, "the points must lie inside the run"


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
