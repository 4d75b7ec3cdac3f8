"""The census: query-key spectra of trained models, beside those of the same shapes at initialisation.

    make study STUDY='census --models FOLDER'

Reads the checkpoint inside the package, the sentence encoder all-MiniLM-L6-v2 where it is
installed, and every model folder below --models. Writes docs/results/census.json and, from it, docs/results/census.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import torch

import locater
from locater_lab.engine.trained_models import model_folders

ROOT = Path()  # of the repository, where make runs
SEEDS = 3


def scan_initial(folder: Path, seed: int) -> locater.Scan:
    """The scan of a model of the same shape, initialised as transformers does."""
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(seed)
    return locater.scan(AutoModel.from_config(AutoConfig.from_pretrained(folder, trust_remote_code=False)))


def summarise(scan: locater.Scan) -> dict[str, Any]:
    rows: list[Any] = [r for r in scan.rows if r.trace is not None]

    def column(name: str) -> list[Any]:
        return [getattr(r, name) for r in rows]

    return {
        "heads": len(rows),
        "layers": len(scan.layers),
        "head_dim": rows[0].head_dim,
        "width": rows[0].width,
        "positive": sum(t > 0 for t in column("trace")) / len(rows),
        "S_over_F": quartiles([r.S / r.F for r in rows]),
        "concentration": quartiles(column("concentration")),
        "localization": quartiles(column("localization")),
        "M": quartiles(column("M")),
        "sqrt_F": quartiles([f**0.5 for f in column("F")]),
        "key_bias_over_sqrt_F": quartiles([r.key_bias / r.F**0.5 for r in rows]),
        "stable_rank_share": quartiles([r.stable_rank / r.head_dim for r in rows]),
        "effective_rank_share": quartiles([r.effective_rank / r.head_dim for r in rows]),
        "localized": sum(abs(x) >= 0.1 for x in column("localization")) / len(rows),
        "mixture": sum(a == "mixture" for a in column("approximation")) / len(rows),
    }


def quartiles(values: list[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    points = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64))
    return [round(x, 4) for x in points.tolist()]


def by_layer(scan: locater.Scan) -> list[float]:
    rows: list[Any] = list(scan.rows)
    return [round(median(r.M for r in rows if r.layer == entry["layer"]), 3) for entry in scan.layers]


def measure(models: Path) -> list[dict[str, Any]]:
    entries = []
    for name, folder in model_folders(models).items():
        trained = locater.scan(folder)
        starts = [scan_initial(folder, seed) for seed in range(SEEDS)]
        pooled = locater.Scan("", {}, starts[0].layers, [row for start in starts for row in start.rows])
        entries.append(
            {
                "model": name,
                "trained": summarise(trained),
                "initial": summarise(pooled),
                "M_by_layer": by_layer(trained),
            }
        )
    return entries


def quartiles_text(triple: list[float]) -> str:
    low, middle, high = (round(x, 2) + 0.0 for x in triple)  # + 0.0: no minus sign on zero
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


COLUMNS = {
    "M": "M, mean self-logit",
    "sqrt_F": "√F",
    "S_over_F": "S/F",
    "concentration": "concentration κ",
    "localization": "localization Λ",
    "stable_rank_share": "stable rank / head size",
    "effective_rank_share": "effective rank / head size",
    "key_bias_over_sqrt_F": "key bias / √F",
}


def page_text(entries: list[dict[str, Any]]) -> str:
    lines = [
        "# Census: what training does to the query-key spectrum",
        "",
        "Made by `make study STUDY=census` from weights alone (figures in `census.json`). Each cell is the median over heads,",
        f"with the quartiles. Initial rows pool {SEEDS} seeds of the same shape as transformers initialises it. All numbers are of the",
        "effective map, in logit units of unit tokens (docs/theory.md): priors, not measurements on text.",
        "",
        "| model | heads | tr W > 0 | " + " | ".join(COLUMNS.values()) + " | Λ at least 0.1 |",
        "|---|---|---|" + "---|" * (len(COLUMNS) + 1),
    ]
    for entry in entries:
        for state in ("initial", "trained"):
            s = entry[state]
            cells = " | ".join(quartiles_text(s[name]) for name in COLUMNS)
            heads = s["heads"] if state == "trained" else s["heads"] // SEEDS
            lines.append(
                f"| {entry['model']}, {state} | {heads} | {s['positive']:.0%} | {cells} | {s['localized']:.0%} |"
            )
    lines += ["", "Median M by layer, trained:", ""]
    lines += [f"- {e['model']}: " + ", ".join(f"{m:.2f}" for m in e["M_by_layer"]) for e in entries]
    lines += ["", "## What training does", "", *(f"- {line}" for line in conclusions(entries)), ""]
    return "\n".join(lines)


def conclusions(entries: list[dict[str, Any]]) -> list[str]:
    """Sentences about the figures, each with its figures."""

    def pairs(name: str) -> str:
        medians = {e["model"]: [round(e[state][name][1], 2) + 0.0 for state in ("initial", "trained")] for e in entries}
        return "; ".join(f"{model} {start:.2f} to {end:.2f}" for model, (start, end) in medians.items())

    def shares(name: str) -> str:
        return "; ".join(f"{e['model']} {e['initial'][name]:.0%} to {e['trained'][name]:.0%}" for e in entries)

    used = [
        f"{e['model']} {e['trained']['stable_rank_share'][1] * e['trained']['head_dim']:.1f} by stable rank and "
        f"{e['trained']['effective_rank_share'][1] * e['trained']['head_dim']:.1f} by effective rank of {e['trained']['head_dim']}"
        for e in entries
    ]
    grew = sum(e["trained"]["sqrt_F"][1] > e["initial"]["sqrt_F"][1] for e in entries)
    narrowed = sum(e["trained"]["stable_rank_share"][1] < e["initial"]["stable_rank_share"][1] for e in entries)
    return [
        f"The scale of logits grows in {grew} of {len(entries)} models. Median √F: {pairs('sqrt_F')}.",
        f"Fewer directions carry it in {narrowed} of {len(entries)}. Median stable rank over head size: {pairs('stable_rank_share')}.",
        f"Directions that trained heads use, median over heads: {'; '.join(used)}. The stable rank counts those as strong as the "
        "strongest, the effective rank all by their share.",
        f"Share of heads with a positive trace: {shares('positive')}.",
        f"W stays far from symmetric. Median S/F: {pairs('S_over_F')} (a symmetric map has 1, an antisymmetric one -1).",
        f"Share of heads that the theory calls localized by position (|Λ| at least 0.1): {shares('localized')}.",
        f"Concentration stays near 0, where the theory's ideal is 1. Median κ: {pairs('concentration')}.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=None, help="folder of more trained models")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    args = parser.parse_args()
    entries = measure(args.models)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "census.json").write_text(json.dumps(entries, indent=1) + "\n")
    (args.out / "census.md").write_text(page_text(entries))
    print(f"{len(entries)} models: {args.out / 'census.md'}")


if __name__ == "__main__":
    main()
