"""Write the golden files again: `python scripts/golden.py`, or some of them by name. docs/golden.md says when.

Files under tests/golden/files-0.2 were written by version 0.2.0 and stay as they are. `--files FOLDER` writes such a
set with today's code, to another folder.
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

STOPPED = 12  # step after which the run in the files is interrupted; its checkpoint is of step 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="documents to write; default: all")
    parser.add_argument(
        "--files", type=Path, metavar="FOLDER", help="write files as users have them on disk, and nothing else"
    )
    args = parser.parse_args()
    if args.files is not None:
        make_files(args.files)
        return
    known = [document.name for document in documents.DOCUMENTS]
    unknown = [name for name in args.names if name not in [*known, "names"]]
    if unknown:
        sys.exit(f"golden: no document {unknown[0]!r}: there are names, {', '.join(known)}")
    skipped = 0
    for document in documents.DOCUMENTS:
        if args.names and document.name not in args.names:
            continue
        began, why = time.process_time(), document.lacks()
        skipped += why is not None
        if why is None:
            document.path.write_text(documents.text_of(documents.make(document)))
        print(
            f"{document.name}: {f'left as it is, {why}' if why else f'{time.process_time() - began:.1f} s'}", flush=True
        )
    if not args.names or "names" in args.names:
        documents.NAMES.write_text(documents.text_of(documents.names()))
        print("names")
    sys.exit(f"golden: {skipped} documents were not written" if skipped else 0)


def make_files(folder: Path) -> None:
    """A run interrupted after its first checkpoint, with its log; scan and statistics of that checkpoint; plan and
    result of the whole run.
    """
    if folder.exists():
        sys.exit(f"golden: {folder} exists: give a new folder")
    run, finished = folder / "run", folder / "finished"
    plain = next(document for document in documents.DOCUMENTS if document.name == "train-plain")
    finished.mkdir(parents=True)
    try:
        code.train(plan_of(plain.arguments, run), stop)
    except KeyboardInterrupt:
        (run / ".lock").unlink()
    code.command("scan", run / "step-00000010", "--eigenvalues", "--json", folder / "scan.json")
    probe = ("probe", run / "step-00000010", "--text", documents.TEXT, "--length", 32, "--tokens", 512)
    code.command(*probe, "--save-statistics", folder / "statistics.pt")
    with tempfile.TemporaryDirectory() as place:
        documents.make(plain, Path(place))
        for name in ("plan.json", "result.json"):
            (finished / name).write_text((Path(place) / name).read_text().replace(place, str(finished)))


def plan_of(arguments: tuple[str, ...], out: Path) -> code.Plan:
    """The plan of a document's options, which reports progress at the step at which it is interrupted."""
    defaults = code.Plan().to_dict()
    options = {name[2:]: value for name, value in zip(arguments[1::2], arguments[2::2], strict=True)}
    typed = {name: [value] if name == "corpus" else type(defaults[name])(value) for name, value in options.items()}
    return code.Plan.from_dict({**typed, "out": str(out), "log": STOPPED})


def stop(event: dict[str, object]) -> None:
    """Interrupt the run, as Ctrl-C does."""
    if event["step"] == STOPPED:
        raise KeyboardInterrupt


if __name__ == "__main__":
    main()
