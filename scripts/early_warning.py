"""The early-warning record: how many steps before a training run goes wrong each signal crosses its threshold, and how
often it does so in healthy runs.

    python scripts/early_warning.py unseen --text FILE [--out LINES] [--jobs N] [--device cuda] [--minutes M] [--part I/N]
    python scripts/early_warning.py judge [LINES]     judges them, writes docs/results/early-warning-unseen.json and .md

The unseen runs (docs/results/early-warning-plan.md) measure what `locater.Monitor()` is worth as it is released, on runs
that its thresholds were not chosen on: other text, sizes, optimizers, mechanisms, precisions and causes of failure.

    python scripts/early_warning.py run --out FOLDER [--text FILE] [--part I/N]     trains the first runs, one JSON each
    python scripts/early_warning.py table FOLDER                                    judges them, writes docs/results/early-warning.json
    python scripts/early_warning.py show                                            prints the table from that file

The first runs, 32 small language models on bytes watched at every step, are those on which the thresholds were chosen.
Some are pushed to fail: high learning rate, no warm-up, large initial scale, half precision without a loss scale.

Whether a run went wrong is judged by its loss alone: for 30 steps in a row the smoothed loss stays 0.5 nats above its
best so far, or above that of the usual run of its kind at the same step, or it is not finite. A collapse that only stalls
the loss counts as much as a spike.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch

sys.path[:0] = [str(Path(__file__).parent)]

from early_warning_judge import BEHIND, LASTING, RISE, SMOOTH, smoothed, wrong_from  # noqa: E402 - beside this file
from early_warning_plan import BATCH as UNSEEN_BATCH  # noqa: E402
from early_warning_plan import LENGTH as UNSEEN_LENGTH  # noqa: E402
from early_warning_plan import STEPS as UNSEEN_STEPS  # noqa: E402
from early_warning_runs import BATCH, HEADS, LAYERS, LENGTH, STEPS, WIDTH, plans, run_all  # noqa: E402 - beside this file

OUT = Path("docs/results/early-warning.json")
UNSEEN_SIZE = (UNSEEN_BATCH, UNSEEN_LENGTH)
UNSEEN = Path("docs/results/early-warning-unseen.jsonl")


def smooth(run: dict[str, Any]) -> list[float]:
    """Losses as means over the last steps; not finite stays so."""
    return smoothed([x["loss"] for x in run["steps"]])


def usual(runs: list[dict[str, Any]]) -> dict[str, list[float]]:
    """The median loss at every step of the runs that were meant to be healthy, by kind."""
    medians = {}
    for kind in {run["plan"]["kind"] for run in runs}:
        curves = [smooth(run) for run in runs if run["plan"]["kind"] == kind and "seed" in run["plan"]["name"]]
        medians[kind] = [statistics.median(at) for at in zip(*curves, strict=True)]
    return medians


def wrong_at(run: dict[str, Any], healthy: list[float]) -> int | None:
    """The first step, counted from 0, from which on the loss shows that the run has gone wrong; None for a healthy one."""
    step = wrong_from([x["loss"] for x in run["steps"]], healthy)
    return None if step is None else step - 1


def signals() -> dict[str, tuple[str, Any]]:
    """By name of the alarm: what it reads, and a function of the steps so far that says if it is raised at the last."""
    alarms: dict[str, tuple[str, Any]] = {}
    for bound in (10, 20, 30, 50, 100, 200):
        alarms[f"max logit > {bound}"] = ("activations", lambda past, b=bound: _above(past[-1]["max_logit"], b))
    for factor in (2, 4, 8):
        alarms[f"max logit > {factor} x its median of the last 50 steps"] = (
            "activations",
            lambda past, f=factor: _jump(past, "max_logit", f),
        )
    for bound in (0.4, 0.3, 0.2, 0.1, 0.05):
        alarms[f"entropy ratio of a head < {bound}"] = (
            "activations",
            lambda past, b=bound: _below(past[-1]["entropy_ratio_min"], b),
        )
    for bound in (0.7, 0.6, 0.5, 0.4):
        alarms[f"mean entropy ratio < {bound}"] = (
            "activations",
            lambda past, b=bound: _below(past[-1]["entropy_ratio_mean"], b),
        )
    for bound in (3.3, 5, 10, 20, 50):
        alarms[f"logit spread from weights > {bound}"] = (
            "weights",
            lambda past, b=bound: _above(past[-1]["spread"], b),
        )
    for bound in (2, 5, 20):
        alarms[f"|M| > {bound}"] = ("weights", lambda past, b=bound: _above(past[-1]["M"], b))
    for bound in (0.5, 0.9):
        alarms[f"first-key weight > {bound}"] = ("activations", lambda past, b=bound: _above(past[-1]["sink"], b))
    both = ("max_logit", 200), ("spread", 5)
    alarms["max logit > 200, or logit spread from weights > 5"] = (
        "both",
        lambda past: any(_above(past[-1][n], b) for n, b in both),
    )
    alarms["max logit > 200, and logit spread from weights > 5"] = (
        "both",
        lambda past: all(_above(past[-1][n], b) for n, b in both),
    )
    alarms["a head is not finite"] = ("activations", lambda past: past[-1]["lost_heads"] > 0)
    for factor in (3, 10, 30):
        alarms[f"gradient norm > {factor} x its median of the last 50 steps"] = (
            "gradients",
            lambda past, f=factor: _jump(past, "grad_norm", f),
        )
    return alarms


def _above(x: float | None, bound: float) -> bool:
    return x is None or x > bound


def _below(x: float | None, bound: float) -> bool:
    return x is None or x < bound


def _jump(past: list[dict[str, Any]], name: str, factor: float) -> bool:
    before = [x[name] for x in past[-51:-1] if x[name] is not None]
    return past[-1][name] is None or (len(before) >= 10 and past[-1][name] > factor * statistics.median(before))


def unforced(run: dict[str, Any]) -> bool:
    """Whether a run was meant to be an ordinary one."""
    return "seed" in run["plan"]["name"] or run["plan"]["name"] in ("gpt2 rate 3e-3", "llama rate 3e-3")


def judge(runs: list[dict[str, Any]]) -> dict[str, Any]:
    healthy_curves = usual(runs)
    verdicts = [wrong_at(run, healthy_curves[run["plan"]["kind"]]) for run in runs]
    rows = []
    for name, (reads, raised) in signals().items():
        at = [next((i for i in range(len(run["steps"])) if raised(run["steps"][: i + 1])), None) for run in runs]
        leads = [v - a for v, a in zip(verdicts, at, strict=True) if v is not None and a is not None and a < v]
        wrong, healthy = sum(v is not None for v in verdicts), sum(v is None for v in verdicts)
        false_alarms = [run for v, a, run in zip(verdicts, at, runs, strict=True) if v is None and a is not None]
        rows.append(
            {
                "signal": name,
                "reads": reads,
                "caught": len(leads),
                "missed": wrong - len(leads),
                "wrong": wrong,
                "false_alarms": len(false_alarms),
                "healthy": healthy,
                "false_alarms_unforced": sum(map(unforced, false_alarms)),
                "unforced": sum(map(unforced, runs)),
                "lead_median": statistics.median(leads) if leads else None,
                "lead_least": min(leads, default=None),
            }
        )
    outcomes = [
        {
            "run": run["plan"]["name"],
            "wrong_at": v,
            "last_loss": run["steps"][-1]["loss"],
            "steps": len(run["steps"]),
            "largest_logit": max((x["max_logit"] or 0 for x in run["steps"]), default=None),
        }
        for run, v in zip(runs, verdicts, strict=True)
    ]
    return {
        "signals": rows,
        "runs": outcomes,
        "rule": {"rise": RISE, "behind": BEHIND, "lasting": LASTING, "smooth": SMOOTH},
    }


def text(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    wrong, healthy = record["signals"][0]["wrong"], record["signals"][0]["healthy"]
    device, torch_version = record["machine"]["device"], record["machine"]["torch"]
    ordinary = record["signals"][0]["unforced"]
    lines = [
        "# The early-warning record",
        "",
        f"Made by `scripts/early_warning.py` on an {device} (torch {torch_version}); figures in "
        f"`early-warning.json`. {wrong + healthy} runs of small language models on bytes ({LAYERS} layers, width {WIDTH}, "
        f"{HEADS} heads, {LENGTH} tokens, batch {BATCH}, {STEPS} steps), each watched at every step. {wrong} went wrong "
        f"and {healthy} did not, judged by the loss alone: smoothed over {SMOOTH} steps, it stayed {RISE} nats above its "
        f"best, or above the usual run of its kind at that step, for {LASTING} steps. Of the {healthy} healthy runs "
        f"{ordinary} were ordinary; the rest were forced and survived.",
        "",
        "Lead is how many steps the alarm came before the loss showed it. An alarm after that counts as missed.",
        "",
        "| signal | reads | caught | median lead | least lead | false alarms | of them in ordinary runs |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in record["signals"]:
        lead, least = ("-" if row[x] is None else f"{row[x]:g}" for x in ("lead_median", "lead_least"))
        cells = [
            row["signal"].replace("|", "\\|"),
            row["reads"],
            f"{row['caught']} of {wrong}",
            lead,
            least,
            f"{row['false_alarms']} of {healthy}",
            f"{row['false_alarms_unforced']} of {row['unforced']}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| run | went wrong at step | last loss | largest logit |", "|---|---|---|---|"]
    for run in record["runs"]:
        end = "not finite" if run["last_loss"] is None else f"{run['last_loss']:.2f}"
        lines.append(
            f"| {run['run']} | {'-' if run['wrong_at'] is None else run['wrong_at']} | {end} | {run['largest_logit']:.3g} |"
        )
    return "\n".join(lines) + "\n"


def refuse(why: str) -> NoReturn:
    """End with one line, and the status of a wrong call."""
    print(why, file=sys.stderr)
    raise SystemExit(2)


def judge_unseen(lines: Path) -> None:
    """Write the record of the unseen runs, and its page."""
    from early_warning_page import record
    from early_warning_page import text as page

    if not lines.exists():
        refuse(f"{lines}: no such file: make the runs with `early_warning.py unseen --text FILE` first")
    data = record([json.loads(line) for line in lines.read_text().splitlines()])
    UNSEEN.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    UNSEEN.with_suffix(".md").write_text(page(data))
    print(page(data))


def make_unseen(args: argparse.Namespace) -> None:
    """Train the unseen runs that are not made yet."""
    from early_warning_train import run_all as train_unseen

    if args.text is None:
        refuse("early_warning.py unseen needs --text FILE: Wikipedia prose, which may be packed with xz")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    how = dict(jobs=args.jobs, part=args.part, minutes=args.minutes, only=args.only, seed=args.seed)
    train_unseen(args.out or UNSEEN, args.text, device=device, size=args.size, steps=args.steps or UNSEEN_STEPS, **how)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("unseen", "judge", "run", "table", "show"))
    parser.add_argument("folder", nargs="?", type=Path, help="of table: where run wrote; of judge: the lines of unseen")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--jobs", type=int, default=1, help="of unseen: runs at a time")
    parser.add_argument("--device", help="of unseen: cuda or cpu; by default cuda where there is one")
    parser.add_argument("--minutes", type=float, default=math.inf, help="of unseen: after these no run begins")
    parser.add_argument("--only", default="", help="of unseen: a pattern that names of runs have to match")
    parser.add_argument("--seed", type=int, default=0, help="of unseen: added to all seeds, for trials")
    parser.add_argument(
        "--size", type=int, nargs=2, default=UNSEEN_SIZE, help="of unseen: sequences and tokens, for trials"
    )
    args = parser.parse_args()
    if args.verb == "show":
        print(text(json.loads(OUT.read_text())))
    elif args.verb == "unseen":
        make_unseen(args)
    elif args.verb == "judge":
        judge_unseen(args.folder or UNSEEN)
    elif args.verb == "table":
        runs = [json.loads(path.read_text()) for path in sorted(args.folder.glob("*.json"))]
        order = {plan.name: i for i, plan in enumerate(plans())}
        runs.sort(key=lambda run: order[run["plan"]["name"]])
        record = {**judge(runs), "machine": runs[0]["machine"], "text": runs[0]["text"]}
        OUT.write_text(json.dumps(record, indent=1) + "\n")
        OUT.with_suffix(".md").write_text(text(record))
        print(text(record))
    else:
        run_all(args.out, args.text, args.part, args.steps or STEPS)


if __name__ == "__main__":
    main()
