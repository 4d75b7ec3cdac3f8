"""Which explanation of heads can be trusted: cheap scores of heads against removing each head (docs/head-scores.md).

The plan is docs/results/head-scores-plan.md. Each prompt leaves a line in docs/results/head-scores.jsonl, with the
effect of removing every head and every score of it.

    locater reproduce head-scores --models FOLDER --data FOLDER --runs LINES --jobs 1     # measures what LINES lacks
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from locater.commands.load_model import load_model
from locater.errors import LocaterError
from locater.explain import Run, paths
from locater.explain.attention_flow import target_gradients
from locater.explain.explanation import Target, choose_target
from locater.explain.replayed_pass import head_effects
from locater.explain.streams import stream_steps
from locater.inputs.text import read_text
from locater.inputs.tokenizer import tokenizer_for
from locater.layers.output_maps_and_written_norms import written_norms
from locater.numerics import spearman
from locater.observing.attention_maps import attention_maps
from locater_lab.engine.claims import Claim, by_seed
from locater_lab.engine.provenance import SOURCES, check_commit, commit_of
from locater_lab.engine.reproduction import Paper, Results, Setting, Study
from locater_lab.train.sweep import append_line, read_lines

PROSE, TOKENS, PROMPTS = "test.txt.xz", 24, 20
FOLDERS = {
    "SmolLM2-135M-Instruct": "smollm2-135m-instruct",
    "all-MiniLM-L6-v2": "all-minilm-l6-v2",
    "Gemma-3-270M": "gemma3-270m",
}
FEWER = {"Gemma-3-270M": 8}  # prompts, where the output layer makes them dear
LEAST = 0.5  # mean correlation from which a score may be called an estimate
SCORES = {  # name: what it is, and whether its sign says for or against
    "share": ("paths through the head, outputs of MLPs held: what `explain` prints", True),
    "share, MLPs linear": ("the same, MLPs frozen as linear maps", True),
    "gradient x output": ("gradient of the target times the head's output: attribution patching to zero", True),
    "patching to the mean": ("the same, for the output less its mean over tokens", True),
    "norm": ("size of what the head writes where the target is read", False),
    "relevance": ("sum of max(gradient x map, 0)", False),
    "weights": ("Frobenius norm of O V, without any prompt", False),
}
TOP, NAMED = 10, (10, 30)  # heads with the largest effect, and with the largest score
Line = Mapping[str, Any]


def _claims() -> tuple[Claim, ...]:
    return tuple(
        Claim(
            f"{letter}{number}",
            f"On {model}, {name} orders heads as removal does",
            "Spearman of sizes over heads, mean over prompts",
            "at least",
            LEAST,
            by="ours",
        )
        for letter, model in zip("abc", FOLDERS, strict=True)
        for number, name in enumerate(SCORES, 1)
    )


CLAIMS = _claims()


def measure(setting: Setting) -> Results:
    """Judge the lines that there are; with --jobs measure the prompts of --models that have none first."""
    if setting.runs is None:
        return Results({})
    found = [line for path in (*setting.more_runs, setting.runs) for line in read_lines(path)]
    lines = {(line["model"], line["prompt"]): line for line in found}
    if setting.jobs and setting.models is not None and setting.data is not None:
        commit = commit_of(SOURCES)
        check_commit(setting.runs, commit)
        for name, folder in FOLDERS.items():
            if not (setting.models / folder).is_dir():
                continue
            module = load_model(str(setting.models / folder))
            for number, ids in enumerate(prompts(module, setting.data / PROSE)[: prompts_of(name)]):
                if (name, number) not in lines:
                    line = {"model": name, "prompt": number, **measure_prompt(module, ids), "commit": commit}
                    append_line(setting.runs, line)
                    lines[name, number] = line
                    setting.log(f"{name}, prompt {number}: target {line['target']:.3f}")
    return results_of(list(lines.values())) if lines else Results({})


def prompts_of(model: str) -> int:
    """How many prompts of a model there are."""
    return FEWER.get(model, PROMPTS)


def prompts(module: Any, path: Path) -> list[Tensor]:
    """Ids (1, TOKENS) of the first piece of each line of text that is long enough, with the model's special tokens."""
    tokenizer, found = tokenizer_for(module, None), []
    for line in read_text(path).splitlines():
        if line.strip().startswith("=") or len(line) < 3 * TOKENS:
            continue
        ids = tokenizer(line, truncation=True, max_length=TOKENS)["input_ids"]
        if len(ids) == TOKENS:
            found.append(torch.tensor([ids]))
        if len(found) == PROMPTS:
            break
    return found


def measure_prompt(module: Any, ids: Tensor) -> dict[str, Any]:
    """The target, the effect of removing each head, and each score, head by head in the order of a scan."""
    run = Run(module, {"input_ids": ids})
    target = choose_target(run.output)
    return {
        "target": target.value,
        "heads": [layer.heads for layer in run.layers],
        "effect": _rounded(head_effects(module, {"input_ids": ids}, target, every_head(run))),
        "scores": {name: _rounded(values) for name, values in scores(run, target).items()},
    }


def every_head(run: Run) -> list[tuple[int, int]]:
    return [(number, head) for number, layer in enumerate(run.layers) for head in range(layer.heads)]


def scores(run: Run, target: Target) -> dict[str, Tensor]:
    """Every score (heads of all layers)."""
    steps = stream_steps(run.events)
    slopes = target_gradients(run, target, steps)
    read = slice(None) if target.position is None else slice(target.position, target.position + 1)
    found: dict[str, list[Tensor]] = {name: [] for name in list(SCORES)[2:]}
    choice = None if target.index is None else target.index
    with torch.no_grad():
        for step, slope in zip(steps, slopes, strict=True):
            event = step.event
            layer, out = event.layer, event.layer.out
            if slope is None or event.value is None or event.output is None or out is None:
                raise LocaterError(f"{layer.name}: its values or its output map are not known, so it has no scores")
            z = event.output[0].detach()  # (T, H, V)
            written = torch.einsum("thv,dhv->thd", z, out.weight().unflatten(1, (layer.heads, -1)))
            values = event.value[0].repeat_interleave(layer.group, 0)  # (H, S, V)
            maps = attention_maps(event.call)[0]
            found["gradient x output"].append((slope[0] * z).sum((0, 2)))
            found["patching to the mean"].append((slope[0] * (z - z.mean(0))).sum((0, 2)))
            found["norm"].append(written[read].mean(0).norm(dim=-1))
            found["relevance"].append((slope[0].transpose(0, 1) @ values.mT * maps).clamp_min(0).sum((1, 2)))
            found["weights"].append(torch.tensor(written_norms(layer)))
    shares = {
        "share": paths(run, target=choice, mlp="source").parts["head"].flatten(),
        "share, MLPs linear": paths(run, target=choice, mlp="linear").parts["head"].flatten(),
    }
    return {**shares, **{name: torch.cat(parts) for name, parts in found.items()}}


def _rounded(values: Tensor | Sequence[float]) -> list[float]:
    return [float(f"{float(x):.5g}") for x in values]


def results_of(lines: Sequence[Line]) -> Results:
    """Correlations by model and score, and a measurement for each claim."""
    measured, models = {}, {}
    for letter, model in zip("abc", FOLDERS, strict=True):
        own = sorted((line for line in lines if line["model"] == model), key=lambda line: line["prompt"])
        if len(own) < 2:
            continue
        rows = {}
        for number, name in enumerate(SCORES, 1):
            sizes = [_correlation(line, name, sizes=True) for line in own]
            if len(own) >= prompts_of(model):  # as planned
                measured[f"{letter}{number}"] = by_seed(sizes, of="prompts")
            signed = [_correlation(line, name, sizes=False) for line in own] if SCORES[name][1] else []
            rows[name] = {
                "size": _mean_and_half(sizes),
                "signed": _mean_and_half(signed) if signed else None,
                "found": [round(sum(_overlap(line, name, count) for line in own) / len(own), 3) for count in NAMED],
            }
        models[model] = {"prompts": len(own), "heads": sum(own[0]["heads"]), "scores": rows}
    return Results(measured, {"models": models})


def _correlation(line: Line, name: str, sizes: bool) -> float:
    score, effect = torch.tensor(line["scores"][name]), torch.tensor(line["effect"])
    return spearman(score.abs(), effect.abs()) or 0.0 if sizes else spearman(score, effect) or 0.0


def _overlap(line: Line, name: str, count: int) -> int:
    """How many of the heads with the largest effect are among the `count` with the largest score."""
    score, effect = torch.tensor(line["scores"][name]).abs(), torch.tensor(line["effect"]).abs()
    return len({*effect.topk(TOP).indices.tolist()} & {*score.topk(count).indices.tolist()})


def _mean_and_half(values: Sequence[float]) -> list[float]:
    found = by_seed(values)
    return [round(found.value, 3), round(found.spread, 3)]


STUDY = Study(
    "scores of heads against removal",
    CLAIMS,
    measure,
    "figures of prompts: --runs FILE of earlier ones, with --jobs 1 --models FOLDER --data FOLDER to measure those that "
    "it lacks",
    on_models=True,
    on_runs=True,
)
PAPER = Paper(
    "head-scores",
    "Which explanation of heads can be trusted?",
    "Cheap scores of heads, held against removing each head of trained models",
    (STUDY,),
    Path(__file__).parent,
    {"SCORES": SCORES, "LEAST": LEAST, "TOP": TOP, "NAMED": NAMED, "TOKENS": TOKENS},
    page="head-scores",
    kept=("head-scores.jsonl",),
    kinds={"experiment": "a b c d e f"},
    says="Which cheap scores order the heads of a model as removing each of them does?",
    beliefs={
        "a3 b3": "gradient times output orders the heads of SmolLM2 and MiniLM as removing each of them does",
        "a1 b1": "a head's share of what is added orders heads so",
        "a7 b7": "a score from weights orders heads so",
    },
)

__all__ = ["PAPER"]
