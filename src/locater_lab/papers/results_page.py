"""Writes the findings of docs/results/README.md from the documents that are kept: `python -m locater_lab.papers.results_page`."""

from locater.files import write_whole
from locater_lab.engine.beliefs import results_lines, with_results
from locater_lab.engine.runs import KEPT
from locater_lab.papers import PAPERS


def main() -> None:
    page = KEPT / "README.md"
    write_whole(page, with_results(page.read_text(encoding="utf-8"), results_lines(PAPERS.values(), KEPT.parent)))


if __name__ == "__main__":
    main()
