"""How long `locater reproduce --quick` takes, so that it can say so beforehand and start with the longest study.

    locater reproduce --quick --json FOLDER/NAME.json
    python -m locater_lab.engine.quick_times FOLDER MINUTES       # of processor time, of the whole

The second command keeps in quick_times.json what the whole took and the processor seconds of each study, of quick
documents alone. Only what is said beforehand and the order of studies depend on them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from locater.files import write_whole
from locater_lab.engine.devices_and_processes import processor_count
from locater_lab.engine.reproduction import Paper, is_measured

FILE = Path(__file__).with_name("quick_times.json")


@cache
def quick_times() -> dict[str, Any]:
    """`whole`, in minutes, and by paper and title of the study seconds in `papers`."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def seconds_of(paper: str, title: str) -> float:
    """Of a study; 0 where it was never timed."""
    return float(quick_times()["papers"].get(paper, {}).get(title, 0.0))


def time_ahead(papers: Sequence[Paper], every: int, quick: bool) -> str:
    """One line, before the work: minutes of a quick run on the processors that there are, and what it leaves out. `every`
    is how many papers there are in all.
    """
    if not quick:
        return "how long this takes is not known: --quick takes minutes"
    studies = [(paper, study) for paper in papers for study in paper.studies if study.measure is not None]
    left_out = [f"{paper.name} {study.claims[0].id[0]}" for paper, study in studies if not is_measured(study, True)]
    untimed = [paper.name for paper in papers if paper.name not in quick_times()["papers"]]
    minutes = sum(seconds_of(paper.name, study.title) for paper, study in studies if is_measured(study, True)) / 60
    known = f"{minutes:.1f} minutes of processor time"
    if len(papers) == every:
        minutes, untimed = quick_times()["whole"], []
        known = f"{minutes:.1f} minutes of processor time, {minutes / processor_count():.1f} on {processor_count()} free processors"
    parts = [f"when it was last timed this took {known}"] if minutes else []
    parts += [f"never timed by itself: {', '.join(untimed)}"] if untimed else []
    parts += [f"not quick, and left out: {', '.join(left_out)}"] if left_out else []
    return "; ".join(parts)


def main(folder: Path, minutes: float) -> None:
    times = {}
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(document, dict) and document.get("paper") and document["assumptions"]["quick"]:
            spent = document["assumptions"]["processor_seconds"]
            if spent:
                times[document["paper"]] = {title: round(x, 1) for title, x in spent.items()}
    write_whole(FILE, json.dumps({"whole": minutes, "papers": times}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
