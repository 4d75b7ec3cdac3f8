"""What a machine cannot do is noticed and said: AMX that kills, and a browser that is not there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from locater import amx
from locater.amx import LIMIT, VARIABLES, avoid_broken_amx, half_precision_layer, signal_of
from tests import ROOT, conftest, summary
from tests.processes import python

SAID = (
    "locater: AMX is listed but half-precision layers crash with it here (SIGILL): continuing without AMX, as with "
    f"{VARIABLES[0]}={LIMIT} in the environment\n"
)


@pytest.fixture(autouse=True)
def _no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that what a test sets is taken back
        monkeypatch.delenv(name)


@pytest.fixture
def with_amx(tmp_path: Path) -> Path:
    path = tmp_path / "cpuinfo"
    path.write_text(
        "processor\t: 0\nvendor_id\t: GenuineIntel\nflags\t\t: fpu avx512f amx_bf16 avx512_fp16 amx_tile amx_int8\n"
    )
    return path


@pytest.fixture
def without_amx(tmp_path: Path) -> Path:
    path = tmp_path / "cpuinfo-plain"
    path.write_text("processor\t: 0\nmodel name\t: amx in the name only\nflags\t\t: fpu sse2 avx2\n")
    return path


def dying() -> None:
    os.kill(os.getpid(), signal.SIGILL)


def never() -> int:
    raise AssertionError("nothing was to be tried here")


def test_a_child_dies_and_the_parent_learns_of_what(capfd: pytest.CaptureFixture[str]) -> None:
    def failing() -> None:
        raise ValueError

    assert signal_of(dying) == signal.SIGILL
    assert signal_of(failing) == 0
    assert signal_of(half_precision_layer) == 0, "set ONEDNN_MAX_CPU_ISA as conftest.py does"
    assert capfd.readouterr().err == ""


def test_a_child_that_hangs_is_no_sign_of_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx, "PATIENCE", 0.05)
    assert signal_of(threading.Event().wait) == 0  # type: ignore[arg-type]


def test_a_child_that_is_killed_is_no_sign_of_amx(with_amx: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As for want of memory."""
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGABRT):
        assert avoid_broken_amx(lambda number=number: number, with_amx) is None
    assert not os.environ.get(VARIABLES[0])
    assert capsys.readouterr().err == ""


def test_a_dying_layer_sets_the_limit_and_says_so_once(with_amx: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert avoid_broken_amx(lambda: signal_of(dying), with_amx) is not None
    assert os.environ[VARIABLES[0]] == LIMIT
    assert capsys.readouterr().err == SAID
    assert avoid_broken_amx(never, with_amx) is None
    assert capsys.readouterr().err == ""


def test_a_layer_that_runs_leaves_everything_as_it_was(with_amx: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert avoid_broken_amx(lambda: signal_of(lambda: None), with_amx) is None
    assert not any(name in os.environ for name in VARIABLES)
    assert capsys.readouterr().err == ""


def test_without_amx_nothing_is_tried(without_amx: Path, tmp_path: Path) -> None:
    assert avoid_broken_amx(never, without_amx) is None
    assert avoid_broken_amx(never, tmp_path / "no such file") is None


@pytest.mark.parametrize("name", VARIABLES)
def test_a_limit_that_the_user_chose_stays(name: str, with_amx: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "AVX2")
    assert avoid_broken_amx(never, with_amx) is None
    assert [os.environ.get(other) for other in VARIABLES if other != name] == [None]


def test_beside_other_threads_the_trial_is_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork takes locks along that no thread will ever give back."""
    monkeypatch.setattr(amx, "signal_of", never)
    monkeypatch.setattr(amx, "TRIAL", "import os; os.kill(os.getpid(), 4)")
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        assert amx._default_probe.__wrapped__() == signal.SIGILL
    finally:
        done.set()
        other.join()


FORCED = """
import sys
import torch
from locater.amx import avoid_broken_amx
for _ in range(2):
    avoid_broken_amx(lambda: 4, sys.argv[1])
x = torch.randn(2, 4, 64, 64, generator=torch.Generator().manual_seed(0))
functions = {
    "linear": lambda x: torch.nn.functional.linear(x, x[0, 0]),
    "product": lambda x: x @ x.mT,
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True),
}
for dtype in (torch.bfloat16, torch.float16):
    for name, function in functions.items():
        exact, found = function(x.to(dtype).double()), function(x.to(dtype)).double()
        assert (found - exact).abs().max() < 0.01 * exact.abs().max(), (name, dtype)
"""


def test_half_precision_is_right_with_the_limit(with_amx: Path) -> None:
    """In a fresh process, as where the layer dies: the limit comes after PyTorch and before oneDNN looks, and is said
    once.
    """
    done = subprocess.run([python(), "-c", FORCED, str(with_amx)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, SAID)


def test_the_command_line_tries_by_itself(
    run: Callable[..., Any], with_amx: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(amx, "_default_probe", lambda: signal.SIGILL)
    monkeypatch.setattr(avoid_broken_amx, "__defaults__", (None, with_amx))
    for command in ("scan", "probe", "compare", "train", "reproduce"):
        assert run(command, "--help").status == 0
    assert run("--help").status == run("--version").status == run("reproduce", "--list").status == 0
    run("watch", tmp_path / "nothing", "--json", "-")
    run("scan", tmp_path / "nothing")
    assert VARIABLES[0] not in os.environ, "these run no layer"
    first, second = (run("probe", tmp_path / "nothing", "--json", "-") for _ in range(2))
    assert (first.err.startswith(SAID), "AMX" in second.err, os.environ[VARIABLES[0]]) == (True, False, LIMIT)
    monkeypatch.setattr("locater_lab.engine.reproduction.reproduce", lambda *given: sys.exit(0))
    train = ["train", "--corpus", tmp_path / "nothing", "--out", tmp_path / "run"]
    for command in (train, ["reproduce", "dong2021", "--claim", "a1", "--quick"]):
        monkeypatch.delenv(VARIABLES[0])
        assert run(*command).err.startswith(SAID), command


def test_skipped_page_tests_are_told_at_the_end(tmp_path: Path) -> None:
    """By a worker: the process that collects its results says it."""
    skipped = "import pytest\nfrom tests.summary import NO_BROWSER\n" + "".join(
        f"@pytest.mark.skipif({absent}, reason={reason})\ndef test_{name}(): pass\n"
        for name, absent, reason in (
            ("page", True, "NO_BROWSER"),
            ("other_page", True, "NO_BROWSER"),
            ("gpu", True, "'no GPU'"),
        )
    )
    (tmp_path / "test_pages.py").write_text(skipped)
    command = [python(), "-m", "pytest", "-q", "-p", "xdist", "-n", "1", "-p", "tests.summary", "test_pages.py"]
    lean = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=lean, capture_output=True, text=True, timeout=120)
    assert "3 skipped" in done.stdout, done.stdout + done.stderr
    assert (
        done.stdout.count("2 tests of pages were skipped: there is no Chromium here; `make browser` installs one") == 1
    )
    assert conftest.pytest_terminal_summary is summary.pytest_terminal_summary
