"""Execute the notebooks in examples/ and save them with their outputs: `make notebooks`.

    .venv/bin/python scripts/notebooks.py [NAME ...]      # all of them, or some by the name of the file

What belongs to the machine is not saved: standard error, times, the folder that the package is installed in. The code that was
executed is stored as a hash, so that a test notices a notebook that was changed and not executed again.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import os
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MOST_BYTES, MOST_PICTURE = 200_000, 60_000  # of a notebook; of a figure


def code_hash(book: Any) -> str:
    """Of all code cells, in their order."""
    code = "\0".join(cell.source for cell in book.cells if cell.cell_type == "code")
    return hashlib.sha256(code.encode()).hexdigest()


def execute(path: Path) -> Any:
    """The notebook with its outputs, run from the root of the repository with one thread and this tree's package. A cell that fails raises."""
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.read(path, as_version=4)
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    client = NotebookClient(
        book, timeout=300, kernel_name="python3", record_timing=False, resources={"metadata": {"path": str(ROOT)}}
    )
    client.execute(env=environment)
    return book


def tidy(book: Any) -> None:
    """Keep what a reader needs, and nothing of the machine."""
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.outputs = [tidy_outputs(output) for output in cell.outputs if output.get("name") != "stderr"]
    book.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "locater": {"executed": code_hash(book)},
    }


def tidy_outputs(output: Any) -> Any:
    package = str(ROOT / "src" / "locater")
    if "text" in output:
        output["text"] = output["text"].replace(package, "site-packages/locater")
    for kind, content in output.get("data", {}).items():
        if isinstance(content, str) and kind.startswith("text/"):
            output["data"][kind] = content.replace(package, "site-packages/locater")
    if "image/png" in output.get("data", {}):
        output["data"]["image/png"] = smaller(output["data"]["image/png"])
    return output


def smaller(picture: str) -> str:
    """A figure in 256 colours: curves and labels look the same in half of the bytes."""
    from PIL import Image

    file = io.BytesIO()
    with Image.open(io.BytesIO(base64.b64decode(picture))) as full:
        full.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(file, format="PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def main() -> None:
    import nbformat

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="names of files in examples/, without .ipynb; default: all")
    args = parser.parse_args()
    paths = [ROOT / "examples" / f"{name}.ipynb" for name in args.names] or sorted((ROOT / "examples").glob("*.ipynb"))
    for path in paths:
        start = time.monotonic()
        book = execute(path)
        tidy(book)
        nbformat.validate(book)
        nbformat.write(book, path)
        print(f"{path.name}: {time.monotonic() - start:.0f} s, {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
