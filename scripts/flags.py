"""How often the flags of a scan are right: real trained models scanned, and measured by a probe; docs/flags.md.

    python scripts/flags.py --models FOLDER [--text FILE]     # measures and keeps docs/results/flags.json, then the page
    python scripts/flags.py --page                            # writes the page again

FOLDER has the folders of FOLDERS; a model that is not there is named and keeps its numbers. A flag that no sound model
raises is judged on planted heads.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from flags_inputs import inputs
from torch import nn

import locater
from locater.commands.load import load_model
from locater.discovery import attention_layers

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "docs/results/flags.json", ROOT / "docs/flags.md"
FOLDERS = {
    "SmolLM2-135M-Instruct": "smollm2-135m-instruct",
    "Gemma-3-270M": "gemma3-270m",
    "all-MiniLM-L6-v2": "all-minilm-l6-v2",
    "AntiBERTy": "antiberty",
    "stories260K": "stories260K",
}
PLANTED_HEADS = 4  # of each fault and model, in layers apart
SHARP = 0.15  # measured entropy ratio under which a head is called sharp rightly
LEVEL = 0.95  # and uniform, above which
Head = Mapping[str, Any]

# flag: what a scan says, what the probe measures, and both in words. The last two were flags until version 0.2.
FLAGS: dict[str, tuple[Callable[[Head], bool], Callable[[Head], bool], str]] = {
    "nonfinite": (
        lambda x: "nonfinite" in x["flags"],
        lambda x: "nonfinite" in x["measured"],
        "its measured logits are not finite",
    ),
    "uniform": (
        lambda x: "uniform" in x["flags"],
        lambda x: (x["entropy_ratio"] or 0) > LEVEL,
        f"measured entropy ratio above {LEVEL}",
    ),
    "sharp": (
        lambda x: "sharp" in x["flags"],
        lambda x: x["entropy_ratio"] is not None and x["entropy_ratio"] < SHARP,
        f"measured entropy ratio below {SHARP}",
    ),
    "antisymmetric": (
        lambda x: "antisymmetric" in x["flags"],
        lambda x: bool(x["F"]) and x["S"] / x["F"] < -0.5,
        "S/F below -0.5 over the tokens that the head reads",
    ),
    "repels-itself": (
        lambda x: x["M"] is not None and x["M"] < -1,
        lambda x: x["self_mass"] is not None and x["self_mass"] < x["uniform_self"],
        "measured weight of tokens on themselves below that of uniform attention",
    ),
    "few-directions": (
        lambda x: x["prior_skew"] is not None and abs(x["prior_skew"]) > 0.75,
        lambda x: x["skew"] is not None and abs(x["skew"]) > 0.75,
        "skew beyond 0.75 in size over the tokens that the head reads",
    ),
}
COLUMNS = {"repels-itself": "M", "few-directions": "skew"}  # flags until version 0.2
PLANTED = ("nonfinite", "uniform", "sharp", "antisymmetric")


# ---- what a model says of itself, and what is measured ----


def heads_of(module: nn.Module, data: Any, tokens: int) -> list[dict[str, Any]]:
    """Each head: what a scan of its weights says, and what a probe measures."""
    scanned = locater.scan(module)
    seen = locater.probe(module, data, tokens=tokens)
    measured = {(row.layer, row.head): row for row in seen.rows}
    with_inputs = locater.scan(module, statistics=seen.statistics, length=max(2, seen.assumptions["length"]))
    over_inputs = {(row.layer, row.head): row for row in with_inputs.rows}
    causal = {entry["layer"]: entry["causal"] for entry in scanned.layers}
    rows = []
    for row in scanned.rows:
        at, T = (row.layer, row.head), seen.assumptions["length"]
        probed, tokens_of = measured.get(at), over_inputs.get(at)
        rows.append(
            {
                "layer": row.layer,
                "head": row.head,
                "flags": list(row.flags),
                "M": row.M,
                "prior_skew": row.skew,
                **{name: getattr(tokens_of, name, None) for name in ("S", "F", "skew")},
                **{name: getattr(probed, name, None) for name in ("entropy_ratio", "self_mass")},
                "measured": list(getattr(probed, "flags", ())),
                "uniform_self": sum(1 / n for n in range(1, T + 1)) / T if causal[row.layer] else 1 / T,
            }
        )
    return rows


def places(module: nn.Module, count: int = PLANTED_HEADS) -> list[tuple[int, int]]:
    """Heads in layers apart, another head in each."""
    layers = attention_layers(module)
    chosen = [round((i + 0.5) * len(layers) / count) for i in range(min(count, len(layers)))]
    return [(n, (3 * i + 1) % layers[n].heads) for i, n in enumerate(chosen)]


@torch.no_grad()
def plant(module: nn.Module, fault: str, layer: int, head: int, factor: float = 50.0) -> list[tuple[int, int]]:
    """Give a head a fault, in place; the heads that have it now. Where queries are normalised a factor on the query map
    is harmless, so it goes into the gain of the norm, which all heads of a layer share.
    """
    one = attention_layers(module)[layer]
    rows = slice(head * one.head_dim, (head + 1) * one.head_dim)
    query, bias = one.query.weight(), one.query.bias
    whole = [(layer, n) for n in range(one.heads)]
    if fault == "nonfinite":
        query[rows.start, 0] = math.nan
        return [(layer, head)]
    if fault in ("sharp", "uniform"):
        times = factor if fault == "sharp" else 1 / 1000
        norm = getattr(module.get_submodule(one.name), "q_norm", None)
        if norm is not None:
            norm.weight.copy_((1 + norm.weight) * times - 1)  # Gemma keeps the gain minus 1
            return whole
        query[rows] *= times
        if fault == "uniform" and bias is not None:
            bias[rows] = 0
        return [(layer, head)]
    key = one.key.weight()[head // one.group * one.head_dim :][: one.head_dim]  # W = K^T J^T K, with J^T = -J
    half = one.head_dim // 2
    query[rows] = torch.cat([-key[half:], key[:half]])
    for part in (one.query, one.key):
        if part.bias is not None:
            part.bias.zero_()
    for name in ("q_norm", "k_norm"):
        if (norm := getattr(module.get_submodule(one.name), name, None)) is not None:
            norm.weight.zero_()
    return [(layer, head)]


def measured_model(name: str, folder: Path, text: Path | None, tokens: int) -> dict[str, Any]:
    """Its heads as they are, and with each fault that is planted."""
    data = inputs(name, text)
    found: dict[str, Any] = {"heads": heads_of(load_model(str(folder)), data, tokens), "planted": {}}
    for fault in PLANTED:
        module = load_model(str(folder))
        at = places(module)[-1:] if fault == "nonfinite" else places(module)  # all that follows NaN is NaN
        wanted = {place for layer, head in at for place in plant(module, fault, layer, head)}
        rows = [x for x in heads_of(module, data, min(tokens, 512)) if (x["layer"], x["head"]) in wanted]
        found["planted"][fault] = rows
        print(f"  {fault}: {sum(map(FLAGS[fault][0], rows))} of {len(rows)} flagged", flush=True)
    return found


# ---- the page ----


def wilson(hits: int, of: int) -> tuple[float, float]:
    """The 95 % interval of a share, by Wilson.

    >>> [round(x, 2) for x in wilson(8, 10)]
    [0.49, 0.94]
    """
    if not of:
        return math.nan, math.nan
    z, share = 1.959964, hits / of
    middle, width = share + z * z / (2 * of), z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    return max(0.0, (middle - width) / (1 + z * z / of)), min(1.0, (middle + width) / (1 + z * z / of))


def shown(hits: int, of: int) -> str:
    """`4 of 35: 0.11 (0.05 to 0.26)`."""
    if not of:
        return "none"
    low, high = wilson(hits, of)
    return f"{hits} of {of}: {hits / of:.2f} ({low:.2f} to {high:.2f})"


def counts(heads: Iterable[Head], flag: str) -> tuple[int, int, int]:
    """Heads that have the flag, of them those where it is right, and all where it would be."""
    said, true, _ = FLAGS[flag]
    pairs = [(said(x), true(x)) for x in heads]
    return sum(a for a, _ in pairs), sum(a and b for a, b in pairs), sum(b for _, b in pairs)


def page(data: Mapping[str, Any]) -> str:
    models = data["models"]
    every = [x for model in models.values() for x in model["heads"]]
    lines = [HEAD.format(heads=len(every), models=len(models), tokens=data["tokens"])]
    lines += ["| flag | right where | precision | recall | false alarms |", "|---|---|---|---|---|"]
    for flag, (_, _, words) in FLAGS.items():
        if flag in COLUMNS:
            continue
        raised, right, true = counts(every, flag)
        lines.append(
            f"| `{flag}` | {words} | {shown(right, raised)} | {shown(right, true)} | {raised - right} of {len(every)} |"
        )
    lines += ["", PLANTED_TEXT, "", "| flag | " + " | ".join(models) + " | all, found | all, right where raised |"]
    lines += ["|---|" + "---|" * (len(models) + 2)]
    for flag in PLANTED:
        parts = {name: counts(model["planted"][flag], flag) for name, model in models.items()}
        sizes = {name: len(model["planted"][flag]) for name, model in models.items()}
        raised, right, true = (sum(part[i] for part in parts.values()) for i in range(3))
        cells = " | ".join(
            f"{part[1]} of {part[2]}" + f" ({sizes[name]})" * (sizes[name] != part[2]) for name, part in parts.items()
        )
        lines.append(f"| `{flag}` | {cells} | {shown(right, true)} | {shown(right, raised)} |")
    lines += [
        "",
        COLUMNS_TEXT,
        "",
        "| was a flag | is the column | right where | precision | recall |",
        "|---|---|---|---|---|",
    ]
    for flag, column in COLUMNS.items():
        raised, right, true = counts(every, flag)
        lines.append(f"| `{flag}` | `{column}` | {FLAGS[flag][2]} | {shown(right, raised)} | {shown(right, true)} |")
    lines += [COLUMNS_AFTER, "", "## By model", "", "Raised, of these right, and how many it would be right for.", ""]
    lines += ["| flag | " + " | ".join(f"{name} ({len(model['heads'])})" for name, model in models.items()) + " |"]
    lines += ["|---|" + "---|" * len(models)]
    for flag in FLAGS:
        cells = " | ".join("{} / {} / {}".format(*counts(model["heads"], flag)) for model in models.values())
        lines.append(f"| `{flag}` | {cells} |")
    return "\n".join([*lines, "", TAIL, ""])


HEAD = """# How often flags are right

`locater scan` predicts from weights what a head does; `locater probe` measures it. This page holds one against the other: {heads} heads of {models} trained models, none of which is known to be broken, each
measured on about {tokens:,} tokens of what it was made for (prose, protein sequences, stories for children). `make flags FLAGS='--models FOLDER --text FILE'` makes it again.

Precision is the share of raised flags that the measurement confirms, recall the share of heads of that kind that have the flag, both with 95 % intervals (Wilson).
"""
PLANTED_TEXT = f"""No sound model raises these flags, so each is judged on planted heads, {PLANTED_HEADS} in layers apart of each model (1 of `nonfinite`, because all that follows NaN is NaN): `sharp` is a query map times 50, `uniform`
one divided by 1,000, `antisymmetric` a query map that turns the keys of its head by a quarter, `nonfinite` one NaN. In Gemma 3, which normalises queries, a factor on the query map is harmless, and the gain of the norm is changed, which all
heads of a layer share. Counts are flagged of measured so; in parentheses how many were planted, where the measurement does not confirm all of them."""
COLUMNS_TEXT = """A flag whose precision is below 0.8 is a column and no flag:"""
COLUMNS_AFTER = """
`few-directions` said little besides: measured tokens give more than half of all heads such a skew, and weights alone show a few of these. The exact mixture replaces the closed form as before, and the column
`approximation` says where."""
TAIL = """## What follows

- A scan that names no head says little of what heads do on text: of the heads that a probe finds nearly one-hot, or nearly uniform, weights alone show none (recall above). Measure with `locater probe`.
- A scan that names one is to be believed: no sound model has such a head, and a head whose scale is broken has the flag. With none raised, 0 false alarms of so many heads is the figure, and precision on sound models is not known.
- An antisymmetric map stays one over any tokens, so `antisymmetric` is right by what it means; whether attention is one-way is not measured.
- The tenth of log T under which `sharp` stands was chosen in view of SmolLM2-135M, whose largest spread is 6.05 where 10.1 is needed; the other four are judged by it. The variance of 0.01 of `uniform` is older than these models here.
  That `repels-itself` and `few-directions` are no flags was decided on all five, so their figures are no test on unseen models."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, help="folder with the models' folders")
    parser.add_argument("--also", type=Path, help="another folder to look in")
    parser.add_argument("--text", type=Path, help="prose; default: the documentation inside Python")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--only", help="one model")
    parser.add_argument("--page", action="store_true", help="write the page from what is kept")
    args = parser.parse_args()
    data = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"models": {}}
    data["tokens"] = data.get("tokens", args.tokens) if args.page else args.tokens
    for name, folder in FOLDERS.items():
        if args.page or args.only not in (None, name):
            continue
        at = [path / folder for path in (args.models, args.also) if path is not None and (path / folder).is_dir()]
        if not at:
            print(f"{name}: {folder} is not in --models", file=sys.stderr)
            continue
        print(name, flush=True)
        data["models"][name] = measured_model(name, at[0], args.text, args.tokens)
        ordered = {key: data["models"][key] for key in FOLDERS if key in data["models"]}
        RESULTS.write_text(
            json.dumps({**data, "models": ordered}, separators=(",", ":")).replace("},{", "},\n{") + "\n"
        )
    data = json.loads(RESULTS.read_text())
    PAGE.write_text(page(data))


if __name__ == "__main__":
    main()
