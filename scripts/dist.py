"""Build wheel and sdist twice, compare them byte by byte, check them, and try the wheel in an environment of its own.

    make dist        # into dist/; installs torch into a temporary environment: minutes, and access to PyPI

Dates inside the archives are that of the last commit (SOURCE_DATE_EPOCH), so the same tree gives the same bytes.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
LARGEST = 5_000_000  # bytes of the wheel
NEEDED = ("locater/py.typed", "locater_papers/py.typed", "locater/demo/model.safetensors", "locater/demo/ORIGIN.md")
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
    others = {name.split("/")[0] for name in names} - {"locater", "locater_papers"}
    others = {name for name in others if not name.endswith(".dist-info")}
    if missing or others:
        sys.exit(f"{wheel.name}: lacks {missing}, and has {sorted(others)} that do not belong in it")
    print(f"{wheel.name}: {size / 1e6:.2f} MB, {len(names)} files")


def try_wheel(wheel: Path, folder: Path) -> None:
    """Install the wheel and its dependencies alone; import every public name, run `locater demo`."""
    run(sys.executable, "-m", "venv", folder / "venv")
    bin = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
    run(bin / "python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel)
    clean = {"PYTHONPATH": "", "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    print(run(bin / "python", "-c", IMPORTS, cwd=folder, env=clean).strip())
    lines = run(bin / "locater", "demo", "--json", "demo.json", cwd=folder, env=clean).splitlines()
    if not (folder / "demo.json").is_file():
        sys.exit("locater demo wrote no data")
    print(f"locater demo: {next(line for line in lines if line.strip()).strip()}")


def main(arguments: Sequence[str]) -> None:
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
        if "--no-install" not in arguments:
            try_wheel(wheel, folder)
    for name, digest in first.items():
        print(f"{digest}  dist/{name}")


if __name__ == "__main__":
    main(sys.argv[1:])
