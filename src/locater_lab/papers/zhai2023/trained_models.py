"""How much of a trained head's entropy its bounds explain, and training with sigma-Reparam: studies c, d and e."""

from __future__ import annotations

import math
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from locater.numerics import spearman
from locater.theory import entropy_floor, entropy_floor_of_range
from locater_lab.engine.arms import difference, study_of_arms, table_of_arms
from locater_lab.engine.claims import Claim, by_seed, half_range
from locater_lab.engine.mechanism_runs import SOFTMAX, arm
from locater_lab.engine.provenance import origin_of_lines
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.engine.runs import Row, Runs
from locater_lab.engine.trained_models import HALVES, LENGTH, TrainedLayer, trained_layers
from locater_lab.papers.bao2024.arms import PLAIN, RIVALS, SHORT, stability_rows
from locater_lab.papers.bao2024.training import hot_losses, rates_survived
from locater_lab.papers.zhai2023.floor_and_reparam import centred_norm, row_entropy

ROWS = 16  # the last of every sequence
KINDS = ("theorem", "row", "range")

CLAIMS = (
    Claim(
        "c1", "On trained models the bound of Theorem 3.1 says something",
        f"median over heads of the bound, in nats, {LENGTH} tokens", "at least", 0.01, by="ours",
    ),
    Claim(
        "c2", "The row form, which needs the logits, explains half of the entropy",
        "bound over entropy, median over heads", "at least", 0.5, by="ours",
    ),
    Claim(
        "c3", "So does the range of the logits",
        "bound over entropy, median over heads", "at least", 0.5, by="ours",
    ),
    Claim(
        "c4", "Heads with a larger spectral norm of the query-key map have less entropy",
        "rank correlation over the heads of a model, the weakest of the models", "at most", -0.3, by="ours",
    ),
    Claim(
        "c5", "The norm of a head's rows of logits orders heads by entropy",
        "rank correlation over the heads of a model, the weakest of the models", "at most", -0.8, by="ours",
    ),
)  # fmt: skip


def spectral_norms(part: TrainedLayer) -> Tensor:
    """|W_Q W_K^T| of every query head, biases as one more channel of the tokens; with rotary positions |W_Q| |W_K|,
    which bounds it.
    """
    layer = part.layer

    def heads(projection: Any, count: int) -> Tensor:
        W = projection.weight().detach().double()
        b = torch.zeros(len(W)) if projection.bias is None else projection.bias.detach()
        return torch.cat([W, b.double()[:, None]], 1).unflatten(0, (count, -1))  # (heads, size, width + 1)

    q, k = heads(layer.query, layer.heads), heads(layer.key, layer.kv_heads).repeat_interleave(layer.group, 0)
    if layer.rotary is None:
        return torch.linalg.matrix_norm(q.mT @ k, 2)
    return torch.linalg.matrix_norm(q, 2) * torch.linalg.matrix_norm(k, 2)


def entropies_of_layer(part: TrainedLayer) -> list[dict[str, float]]:
    """Of every head: its entropy and the three bounds, means over the last rows of all sequences; the norms behind
    them.
    """
    logits, T = part.logits(), part.x.shape[1]
    x = torch.cat([part.x.double(), torch.ones_like(part.x[..., :1], dtype=torch.float64)], -1)
    spectral = spectral_norms(part)
    s = part.layer.scale * torch.linalg.matrix_norm(x, 2).square()[:, None] * spectral  # (sequences, heads)
    found: dict[str, list[Tensor]] = {}
    for at in range(T - ROWS, T):
        keys = at + 1 if part.causal else T
        row = logits[:, :, at, :keys]
        each = {
            "entropy": row_entropy(row),
            "theorem": entropy_floor(s, keys),
            "row": entropy_floor(centred_norm(row), keys),
        }
        each |= {"range": entropy_floor_of_range(row.amax(-1) - row.amin(-1), keys), "norm": centred_norm(row), "s": s}
        for name, values in each.items():
            found.setdefault(name, []).append(values.mean(0))
    means = {name: torch.stack(values).mean(0).tolist() for name, values in found.items()}
    return [
        {**{name: held[h] for name, held in means.items()}, "spectral": float(spectral[h])}
        for h in range(len(spectral))
    ]


def is_plain(part: TrainedLayer) -> bool:
    """Whether logits are scale times q k^T of linear maps, turned by position at most: what the theorem is about."""
    layer = part.layer
    return all(
        x is None
        for x in (
            layer.query_norm,
            layer.key_norm,
            layer.relative,
            layer.bias,
            layer.softcap,
            layer.sinks,
            layer.window,
        )
    )


def measure(setting: Setting) -> Results:
    """Every head of every model, on two halves of a text."""
    held: dict[str, list[list[dict[str, float]]]] = {}
    for part in trained_layers(setting):
        if is_plain(part):
            held.setdefault(part.model, [[], []])[part.half].extend(entropies_of_layer(part))
    if not held:
        return Results({})
    both = [[head for halves in held.values() for head in halves[n]] for n in range(2)]
    ordered = {
        name: [{key: _order(halves[n], key) for key in ("spectral", "norm")} for n in range(2)]
        for name, halves in held.items()
    }
    rows = [
        {"model": name, "entropy": fmean(h["entropy"] for h in halves[0]), "s": median(h["s"] for h in halves[0]),
         "norm": median(h["norm"] for h in halves[0]), **{kind: median(h[kind] for h in halves[0]) for kind in KINDS},
         "spectral": ordered[name][0]["spectral"], "norm_order": ordered[name][0]["norm"]}
        for name, halves in held.items()
    ]  # fmt: skip
    points = [[h["entropy"], h["row"], h["range"], h["theorem"]] for h in both[0]]
    measured = {
        "c1": half_range([median(h["theorem"] for h in some) for some in both], HALVES),
        "c2": half_range([median(h["row"] / h["entropy"] for h in some) for some in both], HALVES),
        "c3": half_range([median(h["range"] / h["entropy"] for h in some) for some in both], HALVES),
        "c4": half_range([max(each[n]["spectral"] for each in ordered.values()) for n in range(2)], HALVES),
        "c5": half_range([max(each[n]["norm"] for each in ordered.values()) for n in range(2)], HALVES),
    }
    return Results(measured, {"trained_heads": {"rows": rows, "points": points, "tokens": LENGTH}})


def _order(heads: list[dict[str, float]], key: str) -> float:
    return spearman(torch.tensor([h[key] for h in heads]), torch.tensor([h["entropy"] for h in heads])) or 0.0


HEADS_STUDY = Study(
    "bounds on trained heads",
    CLAIMS,
    measure,
    needs="a trained model whose logits are those of linear maps",
    on_models=True,
)


# --- training: the runs of bao2024 ---

HOT_CLAIMS = (
    Claim(
        "d1", "With sigma-Reparam a model trains at rates at which the plain one fails, as seen at this size",
        "highest rate survived with it over that without", "at least", 2.0, where="abstract", bound="ours",
    ),
    Claim(
        "d2", "Where the plain model fails its entropy has collapsed, as seen at this size",
        "entropy of attention of the plain model at the hottest rate, in nats", "at most", 0.1, where="abstract", bound="ours",
    ),
    Claim(
        "d3", "With sigma-Reparam entropy does not collapse, as seen at this size",
        "entropy of attention at the hottest rate, in nats", "at least", 1.0, where="abstract", bound="ours",
    ),
    Claim(
        "d4", "At the best rate of each it does no worse than the plain model, as seen at this size",
        "change of report loss, each at its best of three rates", "at most", 0.0, by="ours",
    ),
    Claim(
        "d5", "It raises entropy at the best rates too, as seen at this size",
        "change of the entropy of attention, each at its best of three rates", "at least", 0.0, by="ours",
    ),
)  # fmt: skip
NEEDS_RUNS = "training runs of bao2024: --runs docs/results/bao2024-runs.jsonl"


def measure_hot_rates(runs: Runs) -> Results:
    """Hot rates, with and without; None where a run is missing."""
    held = stability_rows()
    found = {
        name: {rate: [runs.of(row) for row in rows] for rate, rows in held[name].items()} for name in ("none", "sigma-reparam")
    }  # fmt: skip
    losses = {name: by_rate for name, by_rate in hot_losses(runs).items() if name in found}
    if losses.keys() < found.keys():
        return Results({})
    best, _ = rates_survived(losses)
    hottest = max(losses["none"])
    entropy = {
        name: {
            rate: [line["entropy"] for line in lines if line and line["status"] == "done"]
            for rate, lines in by_rate.items()
        }
        for name, by_rate in found.items()
    }
    table = {
        "rows": [
            {"control": name, "rate": rate, "loss": fmean(losses[name][rate]), "entropy": fmean(entropy[name][rate] or [math.nan])}
            for name in losses for rate in losses[name]
        ],
        "survived": best, "steps": SHORT,
    }  # fmt: skip
    ends = {name: by_rate[hottest] for name, by_rate in entropy.items()}
    ratios = [a / b for a, b in zip(best["sigma-reparam"], best["none"], strict=True)] if all(best["none"]) else []
    samples = {"d1": ratios, "d2": ends["none"], "d3": ends["sigma-reparam"]}
    measured = {key: by_seed(values) if values else None for key, values in samples.items()}
    return Results(measured, {"hot_rates": table})


def measure_tuned_arms(runs: Runs) -> Results:
    """Each at its best of three rates."""
    own = RIVALS["sigma-reparam"]
    entropy = {
        each.name: fmean(line["entropy"] for line in ends) for each in (PLAIN, own) if (ends := each.lines_so_far(runs))
    }
    arms = table_of_arms(runs, (PLAIN, own))
    for arm_ in arms:  # these runs keep it beside `measures`
        for end in arm_["ends"]:
            end["entropy"] = entropy[arm_["arm"]]
    measured = {"d4": difference(runs, own, PLAIN, "report_loss"), "d5": difference(runs, own, PLAIN, "entropy")}
    return Results(measured, {"best_rates": arms})


def measure_stored_runs(setting: Setting) -> Results:
    if setting.runs is None:
        return Results({})
    runs = Runs(setting.runs, setting.more_runs)
    parts = measure_hot_rates(runs), measure_tuned_arms(runs)
    read = [line for row in stored_rows(runs) if (line := runs.of(row)) is not None]
    measured, tables = parts[0].measured | parts[1].measured, parts[0].tables | parts[1].tables  # type: ignore[operator]
    return Results(measured, tables, origin_of_lines(read))


def stored_rows(runs: Runs) -> list[Row]:
    """Those at hot rates, and those of both arms at ordinary rates."""
    hot = stability_rows()
    rows = [row for name in ("none", "sigma-reparam") for same_rate in hot[name].values() for row in same_rate]
    return [*rows, *PLAIN.rows(runs), *RIVALS["sigma-reparam"].rows(runs)]


STORED_RUNS_STUDY = Study("hot rates and best rates", HOT_CLAIMS, measure_stored_runs, NEEDS_RUNS, on_runs=True)


# --- training: gamma ---

SPECTRAL, UNIT = (
    arm(control=("sigmareparam",), name="sigma-Reparam"),
    arm(control=("sigmareparam(gamma=1)",), name="sigma-Reparam, gamma 1"),
)
ARMS = (SOFTMAX, SPECTRAL, UNIT)

GAMMA_CLAIMS = (
    Claim(
        "e1", "Begun with gamma = 1, as in the paper, it does better than begun with each map's own norm, as in its code, as seen at "
        "this size",
        "report loss with gamma = 1 less that with the maps' norms", "at most", 0.0, by="ours",
    ),
    Claim(
        "e2", "Begun with gamma = 1 it does no worse than the plain model, as seen at this size",
        "change of report loss", "at most", 0.0, by="ours",
    ),
    Claim(
        "e3", "Begun with gamma = 1 entropy stays above that of the plain model, as seen at this size",
        "change of the entropy of attention after training", "at least", 0.0, by="ours",
    ),
)  # fmt: skip


def judge_gamma(runs: Runs) -> Results:
    measured = {
        "e1": difference(runs, UNIT, SPECTRAL, "report_loss"),
        "e2": difference(runs, UNIT, SOFTMAX, "report_loss"),
        "e3": difference(runs, UNIT, SOFTMAX, "measures.entropy"),
    }
    return Results(measured, {"gamma_start": table_of_arms(runs, ARMS)})


GAMMA_STUDY = study_of_arms("where gamma begins", GAMMA_CLAIMS, ARMS, judge_gamma)
