"""The rescue trial: does acting on the heads that a warning names save a run? docs/results/rescue-plan.md came first.

    make study STUDY='early_warning.rescue --text articles.txt.xz --states FOLDER --jobs 14'

Base runs write a state at their first warning, or at a drawn step before any; from each state every branch changes one
thing and goes on. `--toy` does it at toy size on a CPU, into --out. rescue_judging.py judges the lines, and the claims
are printed.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from locater import Monitor, QKClip
from locater.control.writing import rewrite
from locater.discovery import attention_layers
from locater.errors import LocaterError
from locater.layers import AttentionLayer, Projection
from locater_lab.studies.early_warning import plan, training
from locater_lab.studies.early_warning.rescue_judging import CLAIMS, judge_trial
from locater_lab.train.sweep import append_line, read_lines

RESULTS = Path("docs/results")  # from the root of the repository, where make runs
BASE, BRANCHES = "rescue-runs.jsonl", "rescue-branches.jsonl"
KINDS = ("gpt2-a", "gpt2-b", "llama-a", "llama-b", "llama-c", "qwen3-a", "qwen3-c", "olmo2", "gemma2", "neox", "opt", "post-a")  # fmt: skip
RATES, SEEDS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0), 3
EVERY = 10
LOGIT, SPREAD, MOST_NAMED = 50.0, 2.5, 4
CLIPPING = ("named", "random", "layer", "all")
ARMS = ("nothing", *CLIPPING, "freeze", "half")
Head = tuple[int, int]


@dataclass(frozen=True)
class Size:
    """How large the trial is: that of the plan, or a toy."""

    kinds: tuple[str, ...] = KINDS
    rates: tuple[float, ...] = RATES
    seeds: int = SEEDS
    batch: int = plan.BATCH
    length: int = plan.LENGTH
    steps: int = plan.STEPS
    branch: int = 300
    alarmed: tuple[int, int] = (20, 450)  # steps between which a warning makes a state
    quiet: tuple[int, int] = (50, 450)
    states: int = 60  # of each sort
    of_kind: int = 8


TOY = Size(("gpt2-a", "qwen3-a"), (1.0, 30.0), 1, 4, 32, 40, 10, (5, 35), (10, 20), 2, 2)


def base_runs(size: Size) -> list[plan.TrainingRun]:
    """The ladder of rates, in the order in which its lines are made."""
    runs = [
        plan.TrainingRun(
            kind, f"{kind} rescue {rate:g} {seed}", 400 + seed, cause="" if rate == 1 else "rate", rate=rate
        )
        for kind in size.kinds
        for rate in size.rates
        for seed in range(size.seeds)
    ]
    random.Random(0).shuffle(runs)
    return runs


def quiet_step(run: plan.TrainingRun, size: Size) -> int:
    """Where a run that was not warned of gives a quiet state."""
    first, last = (step // EVERY for step in size.quiet)
    return EVERY * random.Random(run.name).randrange(first, last + 1) + 1  # an observed step


class Training:
    """A run that can be saved after any step and go on bitwise from there."""

    def __init__(self, run: plan.TrainingRun, tokens: Path, device: str, size: Size) -> None:
        self.run, self.kind, self.device, self.step = run, plan.BY_NAME[run.kind], device, 0
        torch.manual_seed(run.seed)
        self.model = plan.build_model(self.kind, run).to(device).train()
        self.optimizers = plan.make_optimizers(self.kind, run, self.model)
        ids = torch.from_numpy(np.load(tokens / f"{self.kind.text}.npy", allow_pickle=False))
        words = plan.vocabulary_size(self.kind)
        self._batches = training.draw_batches(run, ids, words, (size.batch, size.length))
        self.factor = 1.0  # of the rate

    def advance(self) -> tuple[float, float]:
        """One step: its loss and gradient norm."""
        self.step += 1
        inputs, targets = (x.to(self.device) for x in next(self._batches))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.factor * plan.rate_at(self.kind, self.run, self.step)
        dtype = getattr(torch, self.kind.dtype)
        with torch.autocast(self.device, dtype, enabled=self.kind.dtype != "float32"):
            own = self.kind.build == "own"
            out = self.model(inputs) if own else self.model(input_ids=inputs, use_cache=False).logits
        loss = functional.cross_entropy(out.flatten(0, 1).float(), targets.flatten())
        self.model.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.run.clip)
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.item(), norm.item()

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on after the step of a state: the batches before it are drawn and dropped."""
        self.model.load_state_dict(state["model"])
        for optimizer, held in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(held)
        for _ in range(state["step"] - self.step):
            next(self._batches)
        self.step = state["step"]


class LastStep:
    """A sink that keeps the numbers of all heads at the last observed step, and what a line needs of the run."""

    def __init__(self) -> None:
        self.heads: dict[Head, dict[str, float]] = {}
        self.layers: list[int] = []
        self.observed = training.WarningsSink()

    def write(self, record: dict[str, Any]) -> None:
        self.observed.write(record)
        if record["kind"] == "run":
            self.layers = [entry["layer"] for entry in record["layers"]]
        if record["kind"] == "step":
            self.heads = {}
            for column in ("max_logit", "spread"):
                for layer, row in zip(self.layers, record["heads"][column], strict=True):
                    for head, value in enumerate(row):
                        self.heads.setdefault((layer, head), {})[column] = math.inf if value is None else value

    def close(self) -> None:
        return


def over_bound(row: Mapping[str, float]) -> float:
    """How far a head is over what it is scaled down to; at most 1 for one that stays as it is."""
    return max(1.0, row["max_logit"] / LOGIT, row["spread"] / SPREAD)


def spectral_entropy(model: nn.Module) -> float:
    """The lowest entropy, over heads, of the squared singular values of their queries or keys (arXiv 2606.28116)."""
    lowest = math.inf
    for layer in attention_layers(model):
        for part, heads in ((layer.query, layer.heads), (layer.key, layer.kv_heads)):
            weight = part.weight().detach().float()
            if not bool(weight.isfinite().all()):
                return 0.0
            values = torch.linalg.svdvals(weight.view(heads, -1, weight.shape[1])).square()
            shares = values / values.sum(-1, keepdim=True)
            lowest = min(lowest, float(-torch.special.xlogy(shares, shares).sum(-1).min()))
    return lowest


def maps_of(model: nn.Module) -> Tensor:
    """All query and key weights as one vector."""
    return torch.cat([p.weight().detach().flatten() for x in attention_layers(model) for p in (x.query, x.key)])


def train_base(run: plan.TrainingRun, tokens: Path, states: Path, device: str, size: Size) -> dict[str, Any]:
    """The line of a base run. Its state is in `states`, where it has one."""
    torch.set_num_threads(1)
    this, last = Training(run, tokens, device, size), LastStep()
    monitor = Monitor(last, every=EVERY).attach(this.model)
    losses: list[float] = []
    norms: list[float] = []
    rivals: list[list[float]] = []
    before, sort, began = maps_of(this.model), "", time.time()
    for step in range(1, size.steps + 1):
        loss, norm = this.advance()
        warnings = monitor.after_step(loss=loss, grad_norm=norm)
        losses.append(loss)
        norms.append(norm)
        if (step - 1) % EVERY == 0:
            now = maps_of(this.model)
            rivals.append([step, spectral_entropy(this.model), float((now - before).norm() / now.norm())])
            before = now
        wanted = "alarmed" if warnings and size.alarmed[0] <= step <= size.alarmed[1] else ""
        wanted = wanted or ("quiet" if not monitor.warned and step == quiet_step(run, size) else "")
        if wanted and sort != "alarmed" and (wanted == "alarmed" or not sort):
            heads = dict.fromkeys((w["layer"], w["head"]) for w in warnings) or dict.fromkeys(last.heads)
            sort = wanted
            torch.save({**this.state(), "heads": last.heads, "warned": list(heads), "sort": sort, "losses": losses}, states / f"{run.name}.pt")  # fmt: skip
        if len(losses) > 10 and not any(map(math.isfinite, losses[-10:])):
            break
    monitor.detach()
    return {
        "name": run.name,
        "run": asdict(run),
        "state": sort,
        "losses": [round(x, 3) if math.isfinite(x) else None for x in losses],
        "norms": [round(x, 3) if math.isfinite(x) else None for x in norms],
        "warnings": last.observed.first(),
        "observed": last.observed.observed,
        "rivals": [[x if math.isfinite(x) else None for x in row] for row in rivals],
        "seconds": round(time.time() - began, 1),
    }


# ---- the branches ----


class HeadClip(QKClip):
    """QK-clip of chosen heads alone, and a first scaling of each by a factor of its own."""

    def __init__(self, factors: Mapping[Head, float]) -> None:
        super().__init__(limit=LOGIT, every=EVERY)
        self.factors = factors

    def scale_once(self) -> None:
        for number, layer in enumerate(attention_layers(self.attached)):
            gamma = [self.factors.get((number, head), 1.0) for head in range(layer.heads)]
            if min(gamma) < 1:
                super()._clip(self.attached, number, torch.tensor(gamma, dtype=torch.float64))

    def _clip(self, model: nn.Module, number: int, gamma: Tensor) -> None:
        chosen = torch.tensor([(number, head) in self.factors for head in range(len(gamma))])
        super()._clip(model, number, torch.where(chosen, gamma, torch.ones_like(gamma)))


def named_heads(state: Mapping[str, Any]) -> list[Head]:
    """Those warned of at the state, the furthest over the bound first; of a quiet state those with the largest logit."""
    rows = state["heads"]
    if state["sort"] == "alarmed":
        return sorted(state["warned"], key=lambda head: -over_bound(rows[head]))[:MOST_NAMED]
    return sorted(rows, key=lambda head: -rows[head]["max_logit"])[:MOST_NAMED]


def factors_of(arm: str, state: Mapping[str, Any], name: str) -> dict[Head, float]:
    """Heads that an arm clips, and what each is scaled by at first."""
    rows, named = state["heads"], named_heads(state)
    own = {head: 1 / over_bound(rows[head]) for head in rows}
    if arm == "named":
        return {head: own[head] for head in named}
    if arm == "random":
        others = sorted(set(rows) - set(named))
        drawn = random.Random(name).sample(others, min(len(named), len(others)))
        return {head: own[other] for head, other in zip(drawn, named, strict=False)}
    layers = {layer for layer, _ in named}
    return {head: factor for head, factor in own.items() if arm == "all" or head[0] in layers}


class FrozenHeads:
    """Puts the queries of heads back to what they were, and their keys where no other head shares them."""

    def __init__(self, model: nn.Module, heads: Sequence[Head]) -> None:
        self.model = model
        self.kept = [
            (number, part, rows, part(layer).weight().detach().clone())
            for number, layer in enumerate(attention_layers(model))
            for part, shared in ((_query, False), (_key, layer.group > 1))
            if not shared and (rows := _rows(layer, [h for x, h in heads if x == number]))
        ]

    def restore(self) -> None:
        for number, part, rows, old in self.kept:
            projection = part(list(attention_layers(self.model))[number])
            weight = projection.weight().detach().clone()
            weight[rows] = old[rows]
            name = list(attention_layers(self.model))[number].name
            rewrite(self.model, name, partial(_projection, self.model, number, part), weight, projection.bias)


def _query(layer: AttentionLayer) -> Projection:
    return layer.query


def _key(layer: AttentionLayer) -> Projection:
    return layer.key


def _projection(model: nn.Module, number: int, part: Callable[[AttentionLayer], Projection]) -> Projection:
    return part(list(attention_layers(model))[number])


def _rows(layer: AttentionLayer, heads: Sequence[int]) -> list[int]:
    return [head * layer.head_dim + i for head in heads for i in range(layer.head_dim)]


def train_branch(
    run: plan.TrainingRun, arm: str, tokens: Path, states: Path, device: str, size: Size
) -> dict[str, Any]:
    """The line of one branch; without losses where its clip does not apply to the model."""
    torch.set_num_threads(1)
    state = torch.load(states / f"{run.name}.pt", map_location=device, weights_only=True)
    this = Training(run, tokens, device, size)
    this.load(state)
    about = {"name": run.name, "arm": arm, "sort": state["sort"], "step": state["step"]}
    factors = factors_of(arm, state, run.name) if arm in CLIPPING else {}
    about["heads"] = [list(head) for head in factors or (named_heads(state) if arm == "freeze" else ())]
    clip, frozen = HeadClip(factors), FrozenHeads(this.model, named_heads(state)) if arm == "freeze" else None
    this.factor = 0.5 if arm == "half" else 1.0
    if factors:
        try:
            clip.attach(this.model)
        except LocaterError as error:
            return {**about, "losses": None, "why": str(error)}
        clip.scale_once()
    losses: list[float] = []
    for _ in range(min(size.branch, plan.STEPS - state["step"])):
        losses.append(this.advance()[0])
        if factors:
            clip.after_step()
        if frozen is not None:
            frozen.restore()
        if len(losses) > 10 and not any(map(math.isfinite, losses[-10:])):
            break
    return {**about, "losses": [round(x, 4) if math.isfinite(x) else None for x in losses]}


def chosen_states(lines: Sequence[Mapping[str, Any]], size: Size) -> list[str]:
    """Names of the runs whose states are branched, by the rule of the plan."""
    names: list[str] = []
    for sort in ("alarmed", "quiet"):
        of_sort = sorted(line["name"] for line in lines if line["state"] == sort)
        random.Random(0).shuffle(of_sort)
        counts: dict[str, int] = {}
        kinds = {line["name"]: line["run"]["kind"] for line in lines}
        taken = []
        for name in of_sort:
            counts[kinds[name]] = counts.get(kinds[name], 0) + 1
            taken += [name] if counts[kinds[name]] <= size.of_kind else []
        names += taken[: size.states]
    return names


def run_trial(out: Path, tokens: Path, states: Path, size: Size, jobs: int) -> None:
    """Make the base runs and branches that have no line yet."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base = {line["name"] for line in read_lines(out / BASE)}
    runs = {run.name: run for run in base_runs(size)}
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        missing = [run for name, run in runs.items() if name not in base]
        for line in pool.map(partial(train_base, tokens=tokens, states=states, device=device, size=size), missing):
            append_line(out / BASE, line)
            print(f"{line['name']}: {line['state'] or 'no state'}, {line['seconds']} s", flush=True)
        names = chosen_states(list(read_lines(out / BASE)), size)
        done = {(line["name"], line["arm"]) for line in read_lines(out / BRANCHES)}
        wanted = [(name, arm) for name in names for arm in ARMS if (name, arm) not in done]
        work = partial(_branch, tokens=tokens, states=states, device=device, size=size, runs=runs)
        for line in pool.map(work, wanted):
            append_line(out / BRANCHES, line)


def _branch(wanted: tuple[str, str], runs: Mapping[str, plan.TrainingRun], **where: Any) -> dict[str, Any]:
    return train_branch(runs[wanted[0]], wanted[1], **where)


def texts(path: Path | None, folder: Path) -> Iterator[str]:
    """Write the tokens that the kinds read. Without a text, a toy: bytes of Python's documentation for all."""
    if path is not None:
        yield from training.read_texts(path, folder).values()
        return
    from locater.inputs.corpus import embedded_text

    ids = np.frombuffer(embedded_text().encode(), np.uint8)
    for name in ("wiki", "docs", "words"):
        np.save(folder / f"{name}.npy", ids)
        yield name


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="articles.txt.xz")
    parser.add_argument("--states", type=Path, help="a folder for states, several GB; they are needed for the branches")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--toy", action="store_true", help="two kinds, 40 steps, two rates, into --out")
    given = parser.parse_args(arguments)
    if not given.toy and (given.text is None or given.states is None):
        parser.error("give --text and --states, or --toy")
    with tempfile.TemporaryDirectory() as folder:
        list(texts(given.text, Path(folder)))
        states = given.states or Path(folder)
        states.mkdir(parents=True, exist_ok=True)
        run_trial(given.out, Path(folder), states, TOY if given.toy else Size(), given.jobs)
    found = judge_trial(list(read_lines(given.out / BASE)), list(read_lines(given.out / BRANCHES)))
    for claim in CLAIMS:
        m = found[claim.id]
        measured = "too little to judge" if m is None else f"{m.value:+.3f} ± {m.spread:.3f}, p {m.p}, {m.numbers}"
        print(f"{claim.id}  {claim.says}: {measured} ({claim.relation} {claim.stated:g})")


if __name__ == "__main__":
    main()
