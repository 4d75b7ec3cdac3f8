"""The documentation site: its nav, the hooks that mend pages, its figures and its examples. `make docs` builds it."""

from __future__ import annotations

import json
import os
import re
import runpy
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests import benchmark
from tests.conftest import Result
from tests.golden import keys
from tests.processes import finished, forked

ROOT = Path(__file__).parents[1]
HOOKS: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "site_hooks.py"))
DOCS = sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml without making the objects that it names."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)
SITE: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)


def test_every_page_is_in_the_nav_once() -> None:
    names = HOOKS["_names"](SITE["nav"])
    config = HOOKS["on_config"](SimpleNamespace(docs_dir=str(ROOT / "docs"), nav=SITE["nav"]))
    shown = HOOKS["_names"](config.nav)
    assert sorted(shown) == sorted([*DOCS, *HOOKS["PAGES"], *HOOKS["NOTEBOOKS"].values()])
    assert [next(iter(entry)) for entry in config.nav] == ["Start", "Guides", "Reference", "Theory", "Results", "Log"]
    assert [name for name in names if "*" in name] == ["*.md", "results/*.md"]


def test_nothing_comes_from_elsewhere() -> None:
    assert SITE["theme"]["font"] is False
    assert not [name for name in SITE.get("extra_css", []) + SITE.get("extra_javascript", []) if "//" in name]
    external = HOOKS["EXTERNAL"]
    assert external.search('<script async src="https://example.org/x.js">')
    assert external.search('<link rel="stylesheet" href="//example.org/x.css">')
    assert not external.search('<a href="https://example.org">a link may lead elsewhere</a>')


@pytest.mark.parametrize(
    ("page", "target", "expected"),
    [
        ("scan.md", "theory.md", "theory.md"),
        ("scan.md", "../benchmarks/results/checkpoint.json", "files/benchmarks/results/checkpoint.json"),
        ("results/hu2025.md", "../theory.md", "../theory.md"),
        ("results/hu2025.md", "../../CHANGELOG.md", "../CHANGELOG.md"),
        ("guides/extend.md", "../../README.md", "../index.md"),
        ("CONTRIBUTING.md", "docs/golden.md", "golden.md"),
        ("CONTRIBUTING.md", "CHANGELOG.md", "CHANGELOG.md"),
        ("CHANGELOG.md", "LICENSE", "files/LICENSE"),
        ("tutorials.md", "../examples/one-prompt-explained.ipynb", "tutorials/one-prompt-explained.md"),
        ("guides/study-heads.md", "../../examples/head-to-output.ipynb", "../tutorials/head-to-output.md"),
        ("tutorials/head-to-output.md", "../docs/explain.md", "../explain.md"),
        ("tutorials/head-to-output.md", "../examples/head-to-output.ipynb", "../files/examples/head-to-output.ipynb"),
        ("tutorials/head-to-output.md", "head-to-output-plot-0.png", "head-to-output-plot-0.png"),
    ],
)
def test_links_out_of_docs_lead_to_the_site(page: str, target: str, expected: str) -> None:
    assert HOOKS["_target"](SimpleNamespace(src_uri=page), target) == expected


def test_addresses_and_headings_are_left_alone() -> None:
    text = "[a](https://example.org/x.md) [b](#part) [c](mailto:x@example.org)"
    assert HOOKS["LINK"].findall(text) == []


def test_lists_and_tables_need_no_empty_line() -> None:
    mend = HOOKS["_blocks"]
    assert mend("Words:\n- one\n- two") == "Words:\n\n- one\n- two"
    assert mend("- one\n  more\n- two\n  - inside") == "- one\n  more\n- two\n    - inside"
    assert mend("Words:\n| a | b |\n|---|---|\n| 1 | 2 |") == "Words:\n\n| a | b |\n|---|---|\n| 1 | 2 |"
    fenced = "```\nx\n- no list\n```"
    assert mend(fenced) == fenced


def test_names_of_files_in_sentences_are_links() -> None:
    named = HOOKS["_page_names"]
    assert named("see docs/theory.md, section 9 and (docs/log.md).", "scan.md") == (
        "see [theory, section 9](theory.md#9-flags) and ([log](log.md))."
    )
    assert named("why: docs/theory.md", "results/surrogate.md") == "why: [theory](../theory.md)"
    assert named("[theory.md](theory.md) says", "scan.md") == "[theory](theory.md) says"
    for kept in (
        "`docs/theory.md`",
        "    docs/theory.md",
        "```\ndocs/theory.md\n```",
        "docs/none.md",
        "[a](docs/log.md)",
    ):
        assert named(kept, "scan.md") == kept


@pytest.mark.slow  # it probes every model of the package; tests/report/test_gallery.py makes a smaller one
def test_the_gallery_of_the_site_is_made() -> None:
    """By the hook that adds it; every page that docs/gallery.md links to is there."""
    linked = set(re.findall(r"\]\(gallery/([\w-]+)\.html\)", HOOKS["_shown"]()))
    assert linked
    assert linked <= {path.stem for path in HOOKS["_gallery"]().glob("*.html")}


def test_pictures_in_a_row_have_room() -> None:
    text = (ROOT / "docs" / "kinds-of-heads.md").read_text()
    assert len(HOOKS["PICTURES"].findall(text)) == 5
    assert not HOOKS["PICTURES"].search((ROOT / "docs" / "probe.md").read_text())


def test_results_are_called_by_what_they_are_about() -> None:
    assert HOOKS["_title"]("results/amsel2024.md") == "amsel2024: Rank in attention"
    assert HOOKS["_title"]("results/zoo.md") == "Every attention mechanism on the same footing"
    assert HOOKS["_title"]("results/amsel2024-plan.md") == "amsel2024: the plan of the training runs"


def test_the_commands_are_those_of_the_program() -> None:
    """Every command with every option, as it would say it itself; compared with the names that users rely on."""
    written = HOOKS["_commands"]()
    commands = json.loads((ROOT / "tests" / "golden" / "names.json").read_text())["commands"]
    parts = dict(re.findall(r"(?ms)^## (?:locater )?(\w+)\n(.*?)(?=^## |\Z)", written))
    assert set(commands) <= set(parts)
    for name, options in commands.items():
        paths = [f"commands.{name}.{option}" for option in options if option.startswith("--")]
        kept = (keys.RENAMED["names"].get(path, path) for path in paths if path not in keys.GONE["names"])
        lacking = [path for path in kept if path.rpartition(".")[2] not in parts[name]]
        assert not lacking, (name, lacking)
    assert "Tokens in a sequence" in parts["scan"]
    assert "default: 256" in parts["scan"]
    assert "'run/step-\\*', 'hf://org/model@step\\*'" in parts["fleet"], "stars are no emphasis"


def test_every_public_name_is_in_the_reference() -> None:
    import locater

    names = ("locater.control", "locater.explain", "locater.families", "locater_lab.theory")
    pages = "\n".join(HOOKS["_interface"](name) for name in names)
    assert "::: locater.control.QKClip" in pages
    assert "::: locater_lab.theory.contraction_rate" in pages
    assert "::: locater_lab.theory.approximation" not in pages, "a module has no page of its own"
    shown = re.findall(r"::: locater\.(\w+)", HOOKS["_interface"]("locater"))
    modules = {name for name in locater.__all__ if (ROOT / "docs" / "reference" / f"{name}.md").exists()}
    # `control`, `explain` and others are modules with pages; everything else is shown on the page of the package
    assert set(shown) == set(locater.__all__) - modules - {"__version__"}


def test_the_same_work_by_other_tools_is_that_of_the_results() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "rivals.json").read_text())
    made = benchmark("rivals")["table"](results)
    text = (ROOT / "docs" / "compare-with.md").read_text()
    rows = [line for line in made.splitlines() if line]
    assert len(rows) > 20
    assert all(f"{row}\n" in text for row in rows), "python benchmarks/rivals.py --table"
    asked = dict(re.findall(r"(?m)^([\w-]+)==(\S+)$", (ROOT / "benchmarks" / "rivals.txt").read_text()))
    others = [name for name in results["versions"] if name not in ("torch", "transformers")]
    assert [results["versions"][name] for name in others] == [asked[name] for name in others], "make bench-rivals"


def test_the_versions_are_those_of_the_project() -> None:
    text = (ROOT / "docs" / "support.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(x for extra in project["optional-dependencies"].values() for x in extra)]
    lowest = dict(re.findall(r"(?m)^([\w-]+)>=([\d.]+)", "\n".join(asked)))
    pinned = dict(re.findall(r"(?m)^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text()))
    rows = re.findall(r"(?m)^\| ([^|]+) \| (>= [^|]+) \| ([^|]+) \|$", text)
    assert rows
    assert rows[0][:2] == ("Python", project["requires-python"].replace(">=", ">= "))
    for names, least, tested in rows[1:]:
        packages = re.findall(r"[a-z_]+", re.sub(r"\(.*\)", "", names))
        assert re.findall(r"[\d.]+", least) == [lowest[name] for name in packages]
        assert re.findall(r"\d[\d.]*\d", tested)[: len(packages)] == [pinned[name] for name in packages]
    ci = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    pythons = sorted({entry["python"] for entry in ci["linux"]["strategy"]["matrix"]["include"]})
    assert rows[0][2].startswith(", ".join(pythons) + " on Linux")


EXAMPLES = [
    pytest.param(block, id=f"{page}-{number}")
    for page in DOCS
    if page.startswith("guides/")
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL))
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_of_the_guides_run(example: str, tmp_path: Path) -> None:
    """Each as a script of its own; a log that it writes has observed steps with heads."""
    import transformers  # noqa: F401  # imported once, before the processes part

    def script() -> None:
        os.chdir(tmp_path)
        exec(compile(example, "guide", "exec"), {"__name__": "__main__"})

    output = tmp_path / "output.txt"
    finished({forked(script, output): output}, 120)
    logs = [*tmp_path.rglob("*.jsonl")]
    assert len(logs) == ("Monitor(" in example)
    for log in logs:
        steps = [entry for entry in map(json.loads, log.read_text().splitlines()) if entry["kind"] == "step"]
        assert steps
        assert all(entry["heads"]["entropy"] for entry in steps)


def test_the_commands_of_the_guide_say_what_it_shows(
    run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the models that its script makes. Of a run on a text the words count, and not the digits."""
    page = (ROOT / "docs" / "guides" / "check-a-checkpoint.md").read_text()
    script = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    monkeypatch.chdir(tmp_path)
    Path("plant.py").write_text(script)
    exec(compile(script, "plant.py", "exec"), {"__name__": "__main__"})
    shown = re.findall(r"    \$ locater (.+)\n((?:    .+\n)+)", page)
    assert len(shown) == 5
    for words, lines in shown:
        done = run(*words.split())
        said, expected = (" ".join(x.partition("Read ")[0].split()) for x in (done.out, lines))
        if "--text" in words:
            said, expected = (re.sub(r"\d[\d.]*", "0", x).partition(" heads ")[0] for x in (said, expected))
        assert (done.status, said) == (1, expected), words


def test_examples_in_docstrings_are_code() -> None:
    pytest.importorskip("griffe", reason="make docs installs it")
    made = runpy.run_path(str(ROOT / "scripts" / "site_docstrings.py"))
    pattern = made["EXAMPLE"]
    assert (
        pattern.sub(lambda found: f"<{found[0]}>", "Text.\n\n>>> 1 + 1\n2\n\nMore.")
        == "Text.\n\n<>>> 1 + 1\n2>\n\nMore."
    )
