"""Build wheel and sdist twice, compare them byte by byte, check them, and try the wheel in environments of its own.

    make dist                              # into dist/; installs torch and every extra: minutes, and access to PyPI
    make dist DIST='--extras hf,gguf'      # tries these extras alone; none: the plain wheel alone

The wheel is installed alone, then with each extra into an environment of its own; dist_extras.py has what is tried.

Dates inside the archives are that of the last commit (SOURCE_DATE_EPOCH), so the same tree gives the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # also where this is run by its path from elsewhere
from dist_extras import choose_extras, packages, try_extras

ROOT = Path(__file__).parents[1]
LARGEST = 5_500_000  # bytes of the wheel, 3.2 million of them the weights of the demo
NEEDED = ("locater/py.typed", "locater_lab/py.typed", "locater/demo/model.safetensors", "locater/demo/ORIGIN.md")
# What a user without extras relies on: every public name is there, and nothing optional was needed for it.
IMPORTS = """
import importlib.util, locater
for name in locater.__all__:
    getattr(locater, name)
assert not [name for name in ("transformers", "lightning", "gguf", "captum", "matplotlib") if importlib.util.find_spec(name)]
print("locater", locater.__version__, "imported without extras")
"""


def run(*words: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    """Run a command; where it fails, end with its output."""
    words = tuple(map(str, words))
    done = subprocess.run(words, cwd=cwd, env={**os.environ, **(env or {})}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: status {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def build(out: Path) -> dict[str, str]:
    """Build wheel and sdist into an empty folder: SHA-256 by name."""
    out.mkdir(parents=True, exist_ok=True)
    for old in (*out.glob("locater-*.whl"), *out.glob("locater-*.tar.gz")):
        old.unlink()
    date = run("git", "log", "-1", "--format=%ct").strip()
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, env={"SOURCE_DATE_EPOCH": date})
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.glob("locater-*"))}


def check_wheel(wheel: Path) -> None:
    """Refuse a wheel that is too large, lacks a file or brings one that is not ours."""
    size = wheel.stat().st_size
    if size > LARGEST:
        sys.exit(f"{wheel.name}: {size:,} bytes, more than {LARGEST:,}")
    names = zipfile.ZipFile(wheel).namelist()
    missing = [name for name in NEEDED if name not in names]
    page = zipfile.ZipFile(wheel).read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
    if dead := re.findall(r"\]\(([^):\s]+)\)|src=\"([^\":]+)\"", page):
        sys.exit(f"{wheel.name}: its page on an index would have links that lead nowhere: {dead[:3]}")
    others = {name.split("/")[0] for name in names} - {"locater", "locater_lab"}
    others = {name for name in others if not name.endswith(".dist-info")}
    if missing or others:
        sys.exit(f"{wheel.name}: lacks {missing}, and has {sorted(others)} that do not belong in it")
    print(f"{wheel.name}: {size / 1e6:.2f} MB, {len(names)} files")


def install_wheel(folder: Path, requirement: str | Path, like: Path | None = None) -> Path:
    """A new environment in folder/venv with a wheel, its dependencies as pinned and nothing else: its Python. With the
    Python of another environment it begins with the packages of that one, as hard links.
    """
    run(sys.executable, "-m", "venv", *([] if like is None else ["--without-pip"]), folder / "venv")
    python = folder / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    if like is not None:
        shutil.copytree(packages(like), packages(python), copy_function=os.link, dirs_exist_ok=True)
    run(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", requirement)
    return python


def try_wheel(wheel: Path, folder: Path) -> Path:
    """Install the wheel and its dependencies alone; import every public name, run `locater demo`."""
    python = install_wheel(folder, wheel)
    clean = {"PYTHONPATH": "", "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    print(run(python, "-c", IMPORTS, cwd=folder, env=clean).strip())
    lines = run(python.with_name("locater"), "demo", "--json", "demo.json", cwd=folder, env=clean).splitlines()
    if not (folder / "demo.json").is_file():
        sys.exit("locater demo wrote no data")
    print(f"locater demo: {next(line for line in lines if line.strip()).strip()}", flush=True)
    return python


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-install", action="store_true", help="build and check, and try nothing")
    parser.add_argument("--extras", default="", metavar="NAMES", help="try these extras, or none; all without it")
    arguments = parser.parse_args(words)
    names = choose_extras(arguments.extras)
    dist = ROOT / "dist"
    first = build(dist)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        second = build(folder / "again")
        if first != second or len(first) != 2:
            sys.exit(f"two builds of one tree differ:\n{first}\n{second}")
        files = [dist / name for name in first]
        wheel = next(path for path in files if path.suffix == ".whl")
        run(sys.executable, "-m", "twine", "check", "--strict", *files)
        check_wheel(wheel)
        if not arguments.no_install:
            try_extras(wheel, names, try_wheel(wheel, folder), folder, install_wheel)
    for name, digest in first.items():
        print(f"{digest}  dist/{name}")


if __name__ == "__main__":
    main(sys.argv[1:])
