"""The workflows of .github, read as GitHub reads them: what they run exists, what they may do is little."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import ROOT

FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
WORKFLOWS: dict[str, Any] = {path.stem: yaml.safe_load(path.read_text()) for path in FILES}
TARGETS = set(re.findall(r"(?m)^([\w -]+?):(?!=)", (ROOT / "Makefile").read_text()))
JOBS = [(name, job, jobs[job]) for name, flow in WORKFLOWS.items() for jobs in [flow["jobs"]] for job in jobs]


def triggers(workflow: Any) -> Any:
    return workflow[True]  # YAML 1.1 takes the word `on` for that


def commands(job: Any) -> list[str]:
    """What the steps of a job run, for every row of its matrix."""
    rows = job.get("strategy", {}).get("matrix", {}).get("include", [{}])
    lines = [line for step in job["steps"] for line in step.get("run", "").splitlines()]
    return [
        re.sub(r"\$\{\{ matrix\.(\w+) \}\}", lambda x, row=row: row.get(x[1], ""), y) for y in lines for row in rows
    ]


def test_there_is_one_for_tests_docs_and_releases() -> None:
    assert set(WORKFLOWS) == {"ci", "docs", "release"}


@pytest.mark.parametrize(("name", "job", "steps"), JOBS, ids=lambda x: x if isinstance(x, str) else "")
def test_a_job_ends_and_runs_targets_that_exist(name: str, job: str, steps: Any) -> None:
    assert steps["timeout-minutes"] <= 90
    targets = {word for target in TARGETS for word in target.split()}
    for line in commands(steps):
        found = re.match(r"(?:sudo )?make ([\w-]+)", line)
        assert found is None or found[1] in targets, line
    for step in steps["steps"]:
        if "uses" in step:
            # A tag or a branch can be moved to other code later; a commit cannot.
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"]), step["uses"]


def test_every_pinned_action_names_its_version() -> None:
    for path in FILES:
        for line in path.read_text().splitlines():
            assert "uses:" not in line or re.search(r"@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line), f"{path.name}: {line}"


@pytest.mark.parametrize(("name", "workflow"), WORKFLOWS.items(), ids=list(WORKFLOWS))
def test_no_workflow_may_write_by_default(name: str, workflow: Any) -> None:
    assert workflow["permissions"] == {"contents": "read"}
    assert "secrets." not in (ROOT / ".github" / "workflows" / f"{name}.yml").read_text()


def test_the_lowest_and_newest_versions_have_rows() -> None:
    run = commands(WORKFLOWS["ci"]["jobs"]["bounds"])
    assert [line for line in run if "make" in line] == ["make test-lowest", "make test-newest"]
    rows = WORKFLOWS["ci"]["jobs"]["bounds"]["strategy"]["matrix"]["include"]
    assert rows[0] == {"bound": "lowest", "python": "3.11"}, "the lowest Python that pyproject.toml allows"


def test_a_release_is_that_of_a_tag_and_publishes_without_a_password() -> None:
    release = WORKFLOWS["release"]
    assert triggers(release) == {"push": {"tags": ["v*"]}}
    build, publish = release["jobs"]["build"], release["jobs"]["publish"]
    assert {"make test", "make dist"} <= set(commands(build))
    assert publish["needs"] == "build"
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["steps"][-1]["uses"].startswith("pypa/gh-action-pypi-publish@")
    uploaded = build["steps"][-1]["with"]["name"]
    assert publish["steps"][0]["with"] == {"name": uploaded, "path": "dist"}


def test_the_check_of_the_tag_passes_for_this_tree(tmp_path: Path) -> None:
    """The lines themselves, run by a shell: with the version of this tree, and with another one."""
    import subprocess

    from locater import __version__

    step = next(x for x in WORKFLOWS["release"]["jobs"]["build"]["steps"] if "TAG" in x.get("env", {}))
    for tag, status in ((f"v{__version__}", 0), ("v9.9.9", 1)):
        done = subprocess.run(["bash", "-e", "-c", step["run"]], cwd=ROOT, env={"TAG": tag, "PATH": "/usr/bin:/bin"})
        assert done.returncode == status, tag
