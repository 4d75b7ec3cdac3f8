"""What a release contains: the checks of scripts/dist.py, and promises of SECURITY.md that can be read in the code."""

from __future__ import annotations

import ast
import runpy
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DIST: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "dist.py"))


def wheel(folder: Path, *names: str, size: int = 0) -> Path:
    path = folder / "locater-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in (*names, "locater-0.1.0.dist-info/METADATA"):
            archive.writestr(name, bytes(size))
    return path


def test_a_wheel_with_all_that_it_needs_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    DIST["check_wheel"](wheel(tmp_path, *DIST["NEEDED"]))
    assert "5 files" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("names", "size", "fault"),
    [
        (DIST["NEEDED"][1:], 0, "lacks .'locater/py.typed'"),
        ((*DIST["NEEDED"], "tests/test_dist.py"), 0, "has .'tests'. that do not belong"),
        (DIST["NEEDED"], 1_100_000, "more than 5,000,000"),
    ],
)
def test_another_is_refused(names: tuple[str, ...], size: int, fault: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=fault):
        DIST["check_wheel"](wheel(tmp_path, *names, size=size))


def test_what_the_wheel_needs_is_in_the_tree() -> None:
    assert all((ROOT / "src" / name).is_file() for name in DIST["NEEDED"])


def test_a_command_that_fails_ends_with_its_output() -> None:
    with pytest.raises(SystemExit, match=r"status 3\n.*why"):
        DIST["run"]("sh", "-c", "echo why; exit 3")


CALLS = [
    (path.relative_to(ROOT).as_posix(), node)
    for path in (ROOT / "src").rglob("*.py")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    if isinstance(node, ast.Call)
]


@pytest.mark.parametrize(
    ("function", "option", "value"),
    [
        ("torch.load", "weights_only", True),
        ("np.load", "allow_pickle", False),
        (".from_pretrained", "trust_remote_code", False),
    ],
)
def test_files_are_opened_without_running_them(function: str, option: str, value: bool) -> None:
    """Every call says so itself, and does not rely on a default that may change or that asks."""
    calls = [(where, node) for where, node in CALLS if ast.unparse(node.func).endswith(function)]
    assert calls
    for where, node in calls:
        given = {word.arg: ast.unparse(word.value) for word in node.keywords}
        assert given.get(option) == str(value), f"{where}:{node.lineno}: {ast.unparse(node)}"
