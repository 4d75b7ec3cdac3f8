"""Make the golden files again: `python scripts/golden.py`, or some of them by name. docs/golden.md says when.

Files under tests/golden/files are what an early version left on disks; they are not made again. `--files FOLDER` makes
such a set from today's code, for a folder of its own.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from tests.golden import code, documents  # noqa: E402 - the tests are no package that is installed

STOPPED = 12  # step after which the run in the files is cut off; its checkpoint is of step 10


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("names", nargs="*", help="documents to make; all unless given")
    ask.add_argument(
        "--files", type=Path, metavar="FOLDER", help="make files as users have them on disk, and nothing else"
    )
    given = ask.parse_args()
    if given.files is not None:
        make_files(given.files)
        return
    known = [document.name for document in documents.DOCUMENTS]
    unknown = [name for name in given.names if name not in [*known, "names"]]
    if unknown:
        sys.exit(f"golden: no document {unknown[0]!r}: there are names, {', '.join(known)}")
    left = 0
    for document in documents.DOCUMENTS:
        if given.names and document.name not in given.names:
            continue
        began, why = time.process_time(), document.lacks()
        left += why is not None
        if why is None:
            document.path.write_text(documents.text_of(documents.make(document)))
        print(
            f"{document.name}: {f'left as it is, {why}' if why else f'{time.process_time() - began:.1f} s'}", flush=True
        )
    if not given.names or "names" in given.names:
        documents.NAMES.write_text(documents.text_of(documents.names()))
        print("names")
    sys.exit(f"golden: {left} documents were not made" if left else 0)


def make_files(folder: Path) -> None:
    """A run cut off behind its first checkpoint, with its log; that checkpoint's scan and statistics; plan and result
    of the whole run.
    """
    if folder.exists():
        sys.exit(f"golden: {folder} is there: give a folder that is not")
    run, finished = folder / "run", folder / "finished"
    plain = next(document for document in documents.DOCUMENTS if document.name == "train-plain")
    finished.mkdir(parents=True)
    try:
        code.train(plan_of(plain.arguments, run), stop)
    except KeyboardInterrupt:
        (run / ".lock").unlink()
    code.command("scan", run / "step-00000010", "--eigenvalues", "--json", folder / "scan.json")
    probed = ("probe", run / "step-00000010", "--text", documents.TEXT, "--length", 32, "--tokens", 512)
    code.command(*probed, "--save-statistics", folder / "statistics.pt")
    with tempfile.TemporaryDirectory() as place:
        documents.make(plain, Path(place))
        for name in ("plan.json", "result.json"):
            (finished / name).write_text((Path(place) / name).read_text().replace(place, str(finished)))


def plan_of(arguments: tuple[str, ...], out: Path) -> code.Plan:
    """The plan that the options of a document make; told of at the step at which it is cut off."""
    defaults = code.Plan().to_dict()
    given = {name[2:]: value for name, value in zip(arguments[1::2], arguments[2::2], strict=True)}
    typed = {name: [value] if name == "corpus" else type(defaults[name])(value) for name, value in given.items()}
    return code.Plan.from_dict({**typed, "out": str(out), "log": STOPPED})


def stop(event: dict[str, object]) -> None:
    """What a user does."""
    if event["step"] == STOPPED:
        raise KeyboardInterrupt


if __name__ == "__main__":
    main()
