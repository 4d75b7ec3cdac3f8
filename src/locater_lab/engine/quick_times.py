"""How long `locater reproduce --quick` takes, study by study, so that it can say so beforehand and start with the longest.

    locater reproduce --quick --json FOLDER/NAME.json && python -m locater_lab.engine.quick_times FOLDER

The second command keeps the processor seconds of each study in quick_times.json, with the machine's load told on
docs/reproduce.md. Nothing else depends on them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from locater.files import write_whole
from locater_lab.engine.devices_and_processes import processor_count
from locater_lab.engine.reproduction import Paper, is_measured

FILE = Path(__file__).with_name("quick_times.json")
UNKNOWN = 5.0  # seconds of a study that was never timed


@cache
def quick_times() -> dict[str, dict[str, float]]:
    """Processor seconds by paper and title of the study."""
    found: dict[str, dict[str, float]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def seconds_of(paper: str, title: str) -> float:
    return quick_times().get(paper, {}).get(title, UNKNOWN)


def time_ahead(papers: Sequence[Paper], quick: bool) -> str:
    """One line, before the work: minutes of a quick run on the processors that there are, and what it leaves out."""
    studies = [(paper, study) for paper in papers for study in paper.studies if study.measure is not None]
    left_out = [f"{paper.name} {study.claims[0].id[0]}" for paper, study in studies if not is_measured(study, quick)]
    seconds = sum(seconds_of(paper.name, study.title) for paper, study in studies if is_measured(study, quick))
    if not quick:
        return f"without --quick this takes far longer than the {seconds / 60:.0f} minutes of processor time of a quick run"
    count = processor_count()
    text = f"this takes about {max(seconds / 60, 0.1):.1f} minutes of processor time, {max(seconds / 60 / count, 0.1):.1f} on {count} free processors"
    return f"{text}; not quick, and left out: {', '.join(left_out)}" if left_out else text


def main(folder: Path) -> None:
    times = {}
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        times[document["paper"]] = {
            title: round(x, 1) for title, x in document["assumptions"]["processor_seconds"].items()
        }
    write_whole(FILE, json.dumps(times, indent=1) + "\n")
    print(f"{FILE}: {sum(sum(x.values()) for x in times.values()) / 60:.1f} minutes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
