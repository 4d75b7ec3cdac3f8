"""What a release contains: the checks of scripts/dist.py, and promises of SECURITY.md that can be read in the code."""

from __future__ import annotations

import ast
import re
import runpy
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DIST: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "dist.py"))


def wheel(folder: Path, *names: str, size: int = 0, page: str = "") -> Path:
    path = folder / "locater-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, bytes(size))
        archive.writestr("locater-0.1.0.dist-info/METADATA", page)
    return path


def test_a_wheel_with_all_that_it_needs_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    DIST["check_wheel"](wheel(tmp_path, *DIST["NEEDED"]))
    assert "5 files" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("names", "size", "fault"),
    [
        (DIST["NEEDED"][1:], 0, "lacks .'locater/py.typed'"),
        ((*DIST["NEEDED"], "tests/test_dist.py"), 0, "has .'tests'. that do not belong"),
        (DIST["NEEDED"], 1_400_000, "more than 5,500,000"),
    ],
)
def test_another_is_refused(names: tuple[str, ...], size: int, fault: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=fault):
        DIST["check_wheel"](wheel(tmp_path, *names, size=size))


@pytest.mark.parametrize("page", ["see [scan](docs/scan.md)", '<img src="docs/images/watch.png">'])
def test_a_page_with_a_dead_link_is_refused(page: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"links that lead nowhere: .*docs/"):
        DIST["check_wheel"](wheel(tmp_path, *DIST["NEEDED"], page=page))


def test_what_the_wheel_needs_is_in_the_tree() -> None:
    assert all((ROOT / "src" / name).is_file() for name in DIST["NEEDED"])


def test_a_command_that_fails_ends_with_its_output() -> None:
    with pytest.raises(SystemExit, match=r"status 3\n.*why"):
        DIST["run"]("sh", "-c", "echo why; exit 3")


# ---- the page of an index ----

PAGE: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "index_page.py"))
README = (ROOT / "README.md").read_text()
TARGETS = re.findall(r"\]\(([^)]+)\)", README) + re.findall(r'src="([^"]+)"', README)


def test_with_an_address_every_link_leads_to_the_files_of_the_tag() -> None:
    page = PAGE["index_page"](README, "https://host/owner/locater", "v1.2.3")
    found = re.findall(r"\]\(([^)]+)\)", page) + re.findall(r'src="([^"]+)"', page)
    assert len(found) == len(TARGETS) > 20
    for target, link in zip(TARGETS, found, strict=True):
        kind = "raw" if target.endswith(".png") else "blob"
        assert link == (target if ":" in target else f"https://host/owner/locater/{kind}/v1.2.3/{target}")
    addresses = PAGE["addresses"]("https://host/owner/locater", "v1.2.3")
    assert addresses["Changelog"] == "https://host/owner/locater/blob/v1.2.3/CHANGELOG.md"


def test_without_one_no_link_is_left_and_no_word_is_lost() -> None:
    page = PAGE["index_page"](README)
    assert "](docs" not in page
    assert "<img" not in page
    assert PAGE["addresses"]("", "v1.2.3") == {}
    plain = re.sub(r"\[([^\[\]]*)\]\([^):]+\)", r"\1", README)
    kept = [line for line in page.splitlines() if line.strip() and "source distribution" not in line]
    lost = [line for line in plain.splitlines() if line.strip() and line not in kept]
    assert all("<img" in line or line.startswith("*A run") or line.endswith("*") for line in lost), lost


def test_the_wheel_of_this_tree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Built here: its size, what it holds, its page and the licence of its weights."""
    builders = pytest.importorskip("hatchling.builders.wheel")
    (path,) = builders.WheelBuilder(str(ROOT)).build(directory=str(tmp_path))
    DIST["check_wheel"](Path(path))
    archive = zipfile.ZipFile(path)
    metadata = archive.read(next(name for name in archive.namelist() if name.endswith("/METADATA"))).decode()
    assert "Description-Content-Type: text/markdown" in metadata
    assert "# Locater" in metadata
    assert "Apache-2.0" in archive.read("locater/demo/ORIGIN.md").decode()
    assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())


# ---- extras and versions ----

EXTRAS: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "dist_extras.py"))
BOUNDS: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "bounds.py"))


def test_every_extra_is_tried() -> None:
    assert EXTRAS["choose_extras"]("") == list(EXTRAS["extras"]()) == list(EXTRAS["TRIALS"])
    assert EXTRAS["choose_extras"]("gguf, hf") == ["gguf", "hf"]
    assert EXTRAS["choose_extras"]("none") == []
    with pytest.raises(SystemExit, match="--extras nonsense: no such extra; there are hf, "):
        EXTRAS["choose_extras"]("nonsense")


def test_a_trial_fails_where_the_work_does_and_where_nothing_is_refused(tmp_path: Path) -> None:
    """With real Pythons: this one, which has the package, and code that does not need an extra at all."""
    here, trial = Path(sys.executable), EXTRAS["Trial"]
    trials = EXTRAS["works"].__globals__["TRIALS"]
    trials.update(
        broken=trial("raise SystemExit('it broke')"), idle=trial("print('done')"), lost=trial("import nowhere")
    )
    assert EXTRAS["works"](here, "idle", tmp_path) == "done"
    with pytest.raises(SystemExit, match=r"(?s)\[broken\]: its trial failed:.*it broke"):
        EXTRAS["works"](here, "broken", tmp_path)
    for name in ("idle", "lost"):
        with pytest.raises(SystemExit, match=rf"\[{name}\]: without it, .* names locater\[{name}\]"):
            EXTRAS["refuses"](here, name, tmp_path)


def test_a_package_has_one_lower_bound() -> None:
    for extra, fault in (("x>=2", "two lower bounds of x"), ("y", "'y' has no lower bound")):
        with pytest.raises(SystemExit, match=fault):
            BOUNDS["lowest"]({"dependencies": ["x>=1"], "optional-dependencies": {"z": [extra]}})


def calls_of(function: str) -> list[tuple[str, ast.Call]]:
    """Every call of a function in our sources, and the file where it is."""
    found = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if f"{function}(" in text:
            calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
            found += [(path.relative_to(ROOT).as_posix(), x) for x in calls if ast.unparse(x.func).endswith(function)]
    return found


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
    calls = calls_of(function)
    assert calls
    for where, node in calls:
        given = {word.arg: ast.unparse(word.value) for word in node.keywords}
        assert given.get(option) == str(value), f"{where}:{node.lineno}: {ast.unparse(node)}"
