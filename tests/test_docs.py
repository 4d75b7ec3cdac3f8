"""What the documentation says is what the code does."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from locater.cli.shell import Group
from locater.findings import FLAGS
from tests import ROOT, benchmark
from tests.processes import finished, forked


def test_one_count_of_supported_types() -> None:
    """Of the families' own files: the README, the page and the message on an unknown architecture give the same
    number.
    """
    from locater.families import families
    from locater.families.registry import BUILT_IN, FAMILIES
    from locater_lab.models.family import FAMILY as OWN

    said = re.search(r"(\d+) model types in (\d+) families", (ROOT / "README.md").read_text())
    assert said is not None
    assert (int(said[1]), int(said[2])) == (len(BUILT_IN), len(FAMILIES))
    listed = re.findall(
        r"`([^`]+)`", "".join(re.findall(r"(?m)^\|([^|]*`[^|]*)\|", (ROOT / "docs" / "families.md").read_text()))
    )
    assert sorted(listed) == sorted(BUILT_IN)
    assert {*BUILT_IN, *OWN.model_types} <= set(families()), "whether or not the trainer has been imported"


def test_the_page_of_families_is_up_to_date() -> None:
    made = runpy.run_path(str(ROOT / "scripts" / "families.py"))["page"]()
    assert (ROOT / "docs" / "families.md").read_text() == made, "run scripts/families.py"


def test_the_tables_of_flags_and_roles_are_up_to_date() -> None:
    """In the repository too, and not on the site alone."""
    from locater.findings import FLAGS

    made = runpy.run_path(str(ROOT / "scripts" / "flags_page.py"))
    shown = made["PAGE"].read_text()
    assert shown == made["page"](shown), "run scripts/flags_page.py"
    assert all(f"| `{flag.name}` | {flag.severity} |" in shown and flag.way_out in shown for flag in FLAGS)
    assert "{" not in shown


def test_every_flag_is_explained() -> None:
    text = (ROOT / "docs" / "theory.md").read_text()
    assert all(f"`{flag.name}`" in text for flag in FLAGS)


# Pages that commands make, and history: nobody has to read them from start to end.
MADE = ("families.md", "log.md", "performance.md", "tolerance.md", "verdicts.md")
MOST_WORDS = 65_000


def test_the_pages_are_few_enough_words_for_one_reader() -> None:
    """Without result pages. The aim is 60,000: the bound goes down with the pages, and never up."""
    docs = ROOT / "docs"
    pages = [x for x in docs.rglob("*.md") if docs / "results" not in x.parents and x not in [docs / y for y in MADE]]
    words = sum(len(page.read_text().split()) for page in pages)
    assert len(pages) > 40
    assert words <= MOST_WORDS, f"{words} words: say it once, link to it, or take as many out elsewhere"


PAGES = sorted(path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text) + re.findall(r'src="([^":]+)"', text):
        assert ((ROOT / page).parent / target).exists(), target


@pytest.mark.parametrize("page", [page for page in PAGES if page not in ("CHANGELOG.md", "docs/log.md")])
def test_what_a_page_imports_is_there(page: str) -> None:
    for line in re.findall(
        r"(?m)^ *(?:>>> )?(from locater[\w.]* import [\w, ]+|import locater[\w.]+)", (ROOT / page).read_text()
    ):
        exec(line, {})


def test_the_architecture_names_every_folder_and_no_other() -> None:
    """Names in backticks at the start of a row: `findings/` is a folder of a package, `spectrum.py` a module."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    tables = dict(re.findall(r"\| room of `(\w+)` \|[^\n]*\n\|---\|---\|\n((?:\|.*\n)+)", text))
    packages = {name: ROOT / "src" / name for name in ("locater", "locater_lab")}
    assert tables.keys() == packages.keys()
    for name, package in packages.items():
        named = "".join(line.split(" | ")[0] for line in tables[name].splitlines())
        folders = {path.parent.name for path in package.glob("*/*") if path.suffix != ".pyc"} - {"__pycache__"}
        assert set(re.findall(r"`([\w/]+)/`", named)) == folders, name
        assert set(re.findall(r"`(\w+\.py)`", named)) == {p.name for p in package.glob("*.py")} - {
            "__init__.py",
            "__main__.py",
        }
    steps = re.findall(r"│  (\S+) ", text)  # of the picture
    assert steps
    assert all(any((package / step).exists() for package in packages.values()) for step in steps)


def _parsed_verbs(text: str) -> set[str]:
    """Each `locater VERB ...` is parsed, with its options; nothing is run."""
    import typer.main

    from locater.cli import load_offered_commands

    group = typer.main.get_command(load_offered_commands())
    lines = re.findall(r"(?m)^(?:\$ )?(locater .+)$", text) + re.findall(r"`(locater [a-z]+ [^`\n]+)`", text)
    calls = [shlex.split(line, comments=True)[1:] for line in lines]
    for words in calls:
        context = group.make_context("locater", words[:1], resilient_parsing=True)
        name, command, rest = group.resolve_command(context, words)
        command.make_context(name, rest, parent=context)
    assert {words[0] for words in calls} <= {*group.list_commands(context)}
    return {words[0] for words in calls}


def test_the_readme_is_short_and_its_commands_exist() -> None:
    from locater.cli import load_offered_commands

    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 110
    assert max(map(len, text.splitlines())) <= 120
    load_offered_commands()
    assert _parsed_verbs(text) == {*Group.late}, "each verb is shown"


def test_what_programs_are_told_is_so(tmp_path: Path) -> None:
    """The commands of AGENTS.md are parsed, and the keys that it names are in the documents of the packaged model."""
    import locater
    from locater_lab.demonstration import DEMO, REPEATS
    from locater_lab.models.transformer import load

    text = (ROOT / "AGENTS.md").read_text()
    assert {"doctor", "scan", "probe", "ablate", "explain", "compare"} == _parsed_verbs(text)
    documents = {
        "doctor MODEL --json": locater.doctor(DEMO).to_dict(),
        "doctor MODEL --base BASE --json": locater.doctor(DEMO, DEMO / "twin").to_dict(),
        "scan": locater.scan(DEMO).to_dict(),
        "compare": locater.compare(DEMO, DEMO / "twin").to_dict(),
        "ablate": locater.ablate(load(REPEATS), torch.arange(64), [(0, 0)], length=32).to_dict(),
    }
    for start, document in documents.items():
        (row,) = [line for line in text.splitlines() if f"`locater {start} " in line]
        for key, inner in re.findall(r"`(\w+)(?:\[\])?\.?(\w*)`", row.split("|")[3]):
            assert key in document, (start, key)
            assert not inner or not document[key] or inner in _first(document[key]), (start, key, inner)


def _first(found: Any) -> Any:
    return found[0] if isinstance(found, list) else found


def test_every_link_for_programs_leads_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)", (ROOT / "llms.txt").read_text()):
        assert (ROOT / target).is_file(), target


def test_the_table_of_kernels_is_that_of_the_results() -> None:
    made = runpy.run_path(str(ROOT / "benchmarks" / "attention.py"))["table"](
        json.loads((ROOT / "benchmarks/results/attention.json").read_text())
    )
    assert made in (ROOT / "docs" / "results" / "kernels.md").read_text(), "python benchmarks/attention.py --table"


def test_the_table_of_attention_with_statistics_is_that_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    made = runpy.run_path(str(ROOT / "benchmarks" / "attention_tuning.py"))["table"](
        json.loads((ROOT / "benchmarks/results/attention-variants.json").read_text())
    )
    assert made in (ROOT / "docs" / "results" / "kernels.md").read_text(), (
        "python benchmarks/attention_tuning.py --table"
    )


def _examples(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


LIGHTNING = [block for block in _examples("docs/guides/watch-a-run.md") if "import lightning" in block]
TRAINERS = BLOCKS = [*_examples("README.md"), *LIGHTNING]  # one of transformers, one of Lightning


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_the_readme_runs_as_written(number: int, tmp_path: Path) -> None:
    """Each example as a script of its own, in an empty folder; a log that it writes has the observed steps, and the
    run ends with its verdict.
    """

    # imported once, before the processes part
    import lightning  # noqa: F401
    from accelerate.state import AcceleratorState
    from transformers import GPT2LMHeadModel, Trainer  # noqa: F401

    def example() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        os.chdir(tmp_path)
        exec(compile(BLOCKS[number], "README.md", "exec"), {"__name__": "__main__"})

    output = tmp_path / "output.txt"
    finished({forked(example, output): output}, 300)
    logs = [*tmp_path.rglob("*.jsonl")]
    assert len(logs) == ("Monitor(" in BLOCKS[number])
    for log in logs:
        steps = [x for x in map(json.loads, log.read_text().splitlines()) if x["kind"] == "step"]
        assert [x["step"] for x in steps] == ([1, 11] if "lightning" in BLOCKS[number] else [1, 11, 21, 31])
        assert all(len(row) == 4 and None not in row for x in steps for row in x["heads"]["M"])
        assert ("Verdict   too early" if "lightning" in BLOCKS[number] else "Verdict   healthy") in output.read_text()


def test_the_readme_has_both_trainers() -> None:
    assert ["lightning" in block for block in TRAINERS] == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "extras"), [(0, "hf"), (1, "hf,lightning")])
def test_the_readme_runs_from_a_clean_environment(number: int, extras: str, tmp_path: Path) -> None:
    """With the extras that it names and nothing else. Needs a package index, and minutes."""
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    install = [python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", f"{ROOT}[{extras}]"]
    done = subprocess.run(install, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    (tmp_path / "run").mkdir()
    ran = subprocess.run(
        [python, "-c", TRAINERS[number]], cwd=tmp_path / "run", env=env, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    (log,) = (tmp_path / "run").rglob("locater.jsonl")
    assert sum('"loss":' in line for line in log.read_text().splitlines()) == (20 if "lightning" in extras else 40)


def test_the_docs_quote_the_benchmark() -> None:
    text = (ROOT / "docs" / "scan.md").read_text()
    held = json.loads((ROOT / "benchmarks/results/checkpoint.json").read_text())
    ours, default, half = held["locater"], held["transformer_lens"], held["transformer_lens_bfloat16"]
    for figure in (
        f"{ours['seconds']:.2f} s | {ours['peak_over_import'] / 1e6:.0f} MB",
        f"{default['seconds']:.2f} s ({default['seconds'] / ours['seconds']:.1f} x) | {default['peak_over_import'] / 1e6:,.0f} MB",
        f"TransformerLens {default['version']}, defaults (float32)",
        f"{half['seconds']:.2f} s ({half['seconds'] / ours['seconds']:.1f} x) | {half['peak_over_import'] / 1e6:.0f} MB",
        f"{held['moments']['moments_over_floor']:.2f} times one product",
    ):
        assert figure in text, figure
    assert f"{ours['seconds']:.2f} s and {ours['peak_over_import'] / 1e6:.0f} MB" in (ROOT / "README.md").read_text()


def test_the_page_of_remote_checkpoints_quotes_its_benchmark() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "remote.json").read_text())
    summary = benchmark("remote")["summary"](results)
    text = (ROOT / "docs" / "remote.md").read_text()
    assert all(f"    {line}" in text for line in summary.splitlines())
    for run in (results["https"], results["hf"]):
        assert run["bytes"] <= 1.15 * results["bytes_needed"]
        assert run["rows"] == results["local"]["rows"]


def test_the_early_warning_record_is_what_the_monitor_page_quotes() -> None:
    found = json.loads((ROOT / "docs/results/early-warning.json").read_text())
    rows = {row["signal"]: row for row in found["signals"]}
    quoted = (ROOT / "docs" / "monitor.md").read_text()
    for signal, said in (
        ("max logit > 200", "(`exploding`)"),
        ("logit spread from weights > 5", "from weights is beyond 5"),
        ("max logit > 200, or logit spread from weights > 5", "either (the default)"),
        ("entropy ratio of a head < 0.1", "(`locked`)"),
        ("gradient norm > 3 x its median of the last 50 steps", "3 times its median"),
    ):
        row = rows[signal]
        lead = f"{row['lead_median']:.0f}"
        line = f"{said} | {row['caught']} of {row['wrong']} | {lead} | {row['false_alarms']} | {row['false_alarms_unforced']} |"
        assert line in quoted, line


def test_the_cost_of_observing_is_that_of_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "benchmarks" / "observe.py"))["table"]()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    text = (ROOT / "docs" / "observe.md").read_text()
    assert rows
    assert all(row in text for row in rows)


def test_the_table_of_verdicts_is_that_of_the_kept_results() -> None:
    from locater_lab.engine.verdict_text import results_cells
    from locater_lab.papers import PAPERS

    lines = (ROOT / "docs" / "results" / "README.md").read_text().splitlines()
    offered = (ROOT / "docs" / "reproduce.md").read_text()
    for name in PAPERS:
        assert f"\n| `{name}` | " in offered
        claims = json.loads((ROOT / "docs" / PAPERS[name].document_file).read_text())["claims"]
        cells = " | ".join(results_cells(claims))
        row = next(line for line in lines if line.startswith(f"| [{name}]("))
        assert row.endswith(f"| {cells} |"), f"{name}: {cells}"


def test_the_hooks_run_what_lint_runs() -> None:
    recipe = re.search(r"(?m)^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text())
    assert recipe is not None
    hooks = re.findall(r"entry: \.venv/bin/(.+)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert hooks == re.findall(r"\$\(BIN\)/(.+)", recipe[1])


def test_the_citation_has_the_version() -> None:
    from locater import __version__

    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
