"""Print constraints for pip: the lowest versions that pyproject.toml allows, or the newest, with torch as tested.

    python scripts/bounds.py lowest    # every package that it names, at the lower end of its range
    python scripts/bounds.py newest    # torch of constraints.txt (a newer one brings CUDA's packages), the rest free

`make test-lowest` and `make test-newest` install with these, in environments of their own. What is not named in
pyproject.toml, the packages of packages, is left to pip in both.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Tools of this repository: nobody who installs the package meets their lower bounds.
TOOLS = {"dev", "docs", "release", "slow", "bench"}
BOUND = re.compile(r"^(?P<name>[\w.-]+)(\[[\w,]+\])?>=(?P<version>[\w.]+)")


def lowest(project: dict[str, list[str] | dict[str, list[str]]] | None = None) -> dict[str, str]:
    """The lower bound of each package that an installed Locater or its tests ask for; a bound is said once.

    >>> lowest({"dependencies": ["torch>=2.11"], "optional-dependencies": {"hf": ["transformers>=5.22"]}})
    {'torch': '2.11', 'transformers': '5.22'}
    """
    if project is None:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *(x for name, group in extras.items() if name not in TOOLS for x in group)]
    found: dict[str, str] = {}
    for requirement in asked:
        if requirement.startswith("locater["):
            continue
        bound = BOUND.match(requirement)
        if bound is None:
            sys.exit(f"pyproject.toml: {requirement!r} has no lower bound")
        if found.setdefault(bound["name"], bound["version"]) != bound["version"]:
            sys.exit(f"pyproject.toml: two lower bounds of {bound['name']}")
    return found


def newest() -> dict[str, str]:
    """What is held back."""
    pinned = re.search(r"(?m)^torch==(.+)$", (ROOT / "constraints.txt").read_text())
    assert pinned is not None
    return {"torch": pinned[1]}


if __name__ == "__main__":
    for name, version in {"lowest": lowest, "newest": newest}[sys.argv[1]]().items():
        print(f"{name}=={version}")
