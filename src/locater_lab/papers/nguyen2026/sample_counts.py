"""How many samples experts take: students of one kind fitted to teachers of the same kind, gated and not. Study c.

A teacher has two heads. Tokens are (1, z) with z normal, the last one asks, and the output is one number:

    f(X) = sum_h g_h sum_j A_hj a_h.x_j,   A_h = softmax over j of x_N^T P_h z_j,   g_h = sigmoid(w_h.x_N), or 1

(g_h = 1 without a gate), so that biases of queries and of values are in it, with which linear experts and their weights
can stand in for each other. Students have two heads, or three, which is one too many; least squares by Levenberg and
Marquardt, from near the truth, all seeds at once.

The theorem (claim d1) is about the worst teacher and n without end. Five sizes of sample and one kind of teacher show a
trend at most, so that what is measured are claims of ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.reproduction import Results, Setting, Study

TOKENS, WIDTH = 4, 3  # of a token: a 1 and two numbers
COUNTS = (100, 200, 400, 800, 1600)
SEEDS = {True: 16, False: 80}
STEPS = {True: 150, False: 400}
LEAST_GAIN, QUIET_STEPS = 1e-6, 4  # of the loss, and steps without it
NOISE, LOUD_NOISE = 0.2, 0.5  # of the signal's standard deviation
APART_LEVEL = 0.1  # how far from the truth students begin
PER_HEAD = {"P": WIDTH * (WIDTH - 1), "a": WIDTH, "w": WIDTH}

CLAIMS = (
    Claim("c1", "Gated students learn their experts with more samples", "slope of log expert error against log n, one head too many",
          "at most", 0.0, by="ours"),
    Claim("c2", "Gated students learn them faster than ungated ones (a trend, no rate is tested)",
          "slope of gated less slope of ungated students, one head too many, as seen at this size", "at most", 0.0, by="ours"),
    Claim("c3", "They do with the right number of heads too", "slope of gated less slope of ungated students, two heads", "at most", 0.0,
          by="ours"),
    Claim("c4", "At the largest sample the gated student's experts are nearer to the truth",
          "log of expert error, gated less ungated, one head too many", "at most", 0.0, by="ours"),
    Claim("c5", "What is predicted is learned at the same speed with a gate and without: the difference is in the experts",
          "slope of log prediction error, gated less ungated, one head too many", "about", 0.0, 0.1, by="ours"),
    Claim("c6", "Gated students learn them faster with more noise too", "slope of gated less slope of ungated students, one head too many, "
          f"noise of {LOUD_NOISE:g}", "at most", 0.0, by="ours"),
)  # fmt: skip
THEOREM_CLAIMS = (
    Claim("d1", "For experts up to a given error gated attention needs polynomially many samples, multi-head attention exponentially many",
          "kinds of teacher whose experts take gated attention more than polynomially many samples", "at most", 0.0, where="abstract"),
)  # fmt: skip
PROOF = (
    "a proof, which this project does not check: five sizes of sample, up to 1,600, and one kind of teacher cannot tell a "
    "polynomial from an exponential"
)


@dataclass(frozen=True)
class ExpertHeads:
    """Parameters of B models with H heads each; `w` is not used without a gate."""

    P: Float[Tensor, "B H D E"]
    a: Float[Tensor, "B H D"]
    w: Float[Tensor, "B H D"]
    gated: bool

    def flat(self) -> Float[Tensor, "B p"]:
        parts = (self.P, self.a, self.w) if self.gated else (self.P, self.a)
        return torch.cat([x.flatten(2) for x in parts], 2).flatten(1)

    def at(self, flat: Float[Tensor, "B p"]) -> ExpertHeads:
        """The same kind with other numbers."""
        parts = flat.unflatten(1, (self.a.shape[1], -1)).split(
            [PER_HEAD[k] for k in ("P", "a", *("w" * self.gated))], 2
        )
        return ExpertHeads(
            parts[0].unflatten(2, (WIDTH, WIDTH - 1)), parts[1], parts[2] if self.gated else self.w, self.gated
        )


def predict(m: ExpertHeads, x: Float[Tensor, "B n N D"]) -> tuple[Float[Tensor, "B n"], Float[Tensor, "B n p"]]:
    """f and its derivative by every parameter, by hand.

    With e_j = a.x_j and m = sum_j A_j e_j: df/da = g sum_j A_j x_j, df/dP = g x_N (sum_j A_j (e_j - m) z_j)^T, df/dw =
    g (1 - g) m x_N.
    """
    last, z = x[:, :, -1], x[..., 1:]
    weights = torch.einsum("bnd,bhde,bnje->bhnj", last, m.P, z).softmax(-1)
    expert = torch.einsum("bhd,bnjd->bhnj", m.a, x)
    mean = (weights * expert).sum(-1)  # (B, H, n)
    gate = torch.einsum("bhd,bnd->bhn", m.w, last).sigmoid() if m.gated else torch.ones_like(mean)
    pull = torch.einsum("bhnj,bnje->bhne", weights * (expert - mean[..., None]), z)
    of_P = (gate[..., None, None] * last[:, None, :, :, None] * pull[..., None, :]).flatten(3)
    of_a = gate[..., None] * torch.einsum("bhnj,bnjd->bhnd", weights, x)
    parts = [of_P, of_a]
    if m.gated:
        parts.append((gate * (1 - gate) * mean)[..., None] * last[:, None])
    return (gate * mean).sum(1), torch.cat(parts, 3).permute(0, 2, 1, 3).flatten(2)


def fit_students(start: ExpertHeads, x: Float[Tensor, "B n N D"], y: Float[Tensor, "B n"], steps: int) -> ExpertHeads:
    """Least squares by damped Gauss-Newton steps, a damping per model; a model is done when QUIET steps in a row gain
    nothing.
    """
    flat, damp = start.flat(), x.new_full((len(x),), 1e-2)
    idle = torch.zeros(len(x), dtype=torch.long)
    value, slope = predict(start.at(flat), x)
    loss = (value - y).square().mean(1)
    eye = torch.eye(flat.shape[1], dtype=x.dtype)
    for _ in range(steps):
        on = (idle < QUIET_STEPS).nonzero()[:, 0]
        if not len(on):
            break
        own = slope[on]
        gram, right = own.mT @ own / x.shape[1], own.mT @ (y[on] - value[on])[..., None] / x.shape[1]
        tried = flat[on] + torch.linalg.solve(gram + damp[on, None, None] * eye, right)[..., 0]
        new_value, new_slope = predict(start.at(tried), x[on])
        new_loss = (new_value - y[on]).square().mean(1)
        better = new_loss < loss[on]
        gain = (loss[on] - new_loss) / loss[on]
        idle[on] = torch.where(gain > LEAST_GAIN, 0, idle[on] + 1)
        damp[on] = torch.where(better, damp[on] / 3, damp[on] * 4).clamp(1e-9, 1e6)
        to = on[better]
        flat[to], value[to], slope[to], loss[to] = tried[better], new_value[better], new_slope[better], new_loss[better]
    return start.at(flat)


def draw_teacher(seeds: int, gated: bool) -> ExpertHeads:
    """Two heads for every seed; the same but for the gate."""
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    P, a, w = draw(seeds, 2, WIDTH, WIDTH - 1), draw(seeds, 2, WIDTH), draw(seeds, 2, WIDTH)
    return ExpertHeads(P, a, w, gated)


def start_student(truth: ExpertHeads, heads: int, seed: int) -> ExpertHeads:
    """Near the truth; a third head takes half of the first one's expert."""
    g = torch.Generator().manual_seed(seed)
    which = [0, 1, 0][:heads]
    share = torch.tensor([0.5, 1.0, 0.5] if heads == 3 else [1.0, 1.0], dtype=torch.float64)
    P, a, w = truth.P[:, which], truth.a[:, which] * share[:, None], truth.w[:, which]
    P, a, w = (x + APART_LEVEL * torch.randn(x.shape, generator=g, dtype=torch.float64) for x in (P, a, w))
    return ExpertHeads(P, a, w, truth.gated)


def expert_error(fit: ExpertHeads, truth: ExpertHeads) -> Float[Tensor, " B"]:
    """Heads of the student go to the teacher's head with the nearest P. Their experts together against its expert, and,
    by what each expert weighs, their P against its P: sqrt of the sum over the teacher's heads of |sum a - a*|^2 + sum
    |a| |P - P*|^2.
    """
    far = (fit.P[:, :, None] - truth.P[:, None]).flatten(3).square().sum(-1)  # (B, student, teacher)
    own = torch.nn.functional.one_hot(far.argmin(2), 2).to(far)
    together = torch.einsum("bst,bsd->btd", own, fit.a)
    total = (together - truth.a).square().sum((1, 2)) + (own * far * fit.a.norm(dim=-1)[..., None]).sum((1, 2))
    return total.sqrt()


def errors_by_count(
    gated: bool, heads: int, seeds: int, steps: int, noise: float = NOISE
) -> dict[str, Float[Tensor, "counts B"]]:
    """Of experts and of predictions, for every size of sample and every seed."""
    truth = draw_teacher(seeds, gated)
    g = torch.Generator().manual_seed(1)

    def inputs(n: int) -> Tensor:
        z = torch.randn(seeds, n, TOKENS, WIDTH - 1, generator=g, dtype=torch.float64)
        return torch.cat([torch.ones_like(z[..., :1]), z], -1)

    test = inputs(2000)
    clean = predict(truth, test)[0]
    spread = clean.std(1, keepdim=True)
    of_experts, of_values = [], []
    for n in COUNTS:
        x = inputs(n)
        y = predict(truth, x)[0] + noise * spread * torch.randn(seeds, n, generator=g, dtype=torch.float64)
        fit = fit_students(start_student(truth, heads, n), x, y, steps)
        of_experts.append(expert_error(fit, truth))
        of_values.append((predict(fit, test)[0] - clean).square().mean(1).sqrt() / spread[:, 0])
    return {"experts": torch.stack(of_experts), "values": torch.stack(of_values)}


def log_log_slopes(by_count: Float[Tensor, "counts B"]) -> Float[Tensor, " B"]:
    """Of log error against log n, seed by seed.

    >>> n = torch.tensor(COUNTS, dtype=torch.float64)
    >>> log_log_slopes(n[:, None] ** -0.5)
    tensor([-0.5000], dtype=torch.float64)
    """
    at = torch.tensor(COUNTS, dtype=by_count.dtype).log()
    at = at - at.mean()
    return (at[:, None] * by_count.log()).sum(0) / at.square().sum()


def measure(setting: Setting) -> Results:
    seeds, steps = SEEDS[setting.quick], STEPS[setting.quick]
    kinds = [(gated, heads) for heads in (2, 3) for gated in (False, True)]
    by_kind = {kind: errors_by_count(*kind, seeds, steps) for kind in setting.each(kinds)}
    rows: list[dict[str, Any]] = []
    for (gated, heads), by_quantity in by_kind.items():
        for quantity, values in by_quantity.items():
            fit = by_seed(log_log_slopes(values).tolist())
            row = {"gated": gated, "heads": heads, "of": quantity, "slope": fit.value, "spread": fit.spread}
            rows.append({**row, "errors": values.median(1).values.tolist()})

    def less(heads: int, quantity: str) -> Measurement:
        return by_seed(
            (log_log_slopes(by_kind[True, heads][quantity]) - log_log_slopes(by_kind[False, heads][quantity])).tolist()
        )

    last = (by_kind[True, 3]["experts"][-1].log() - by_kind[False, 3]["experts"][-1].log()).tolist()
    measured = {
        "c1": by_seed(log_log_slopes(by_kind[True, 3]["experts"]).tolist()),
        "c2": less(3, "experts"),
        "c3": less(2, "experts"),
        "c4": by_seed(last),
        "c5": less(3, "values"),
    }
    sizes = {"counts": list(COUNTS), "seeds": seeds, "noise": NOISE, "error_ratio": math.exp(fmean(last))}
    tables: dict[str, Any] = {"samples": {**sizes, "rows": rows}}
    if not setting.quick:
        with_gate, without = (
            log_log_slopes(errors_by_count(gate, 3, seeds // 2, steps, LOUD_NOISE)["experts"]) for gate in (True, False)
        )
        measured["c6"] = by_seed((with_gate - without).tolist())
        tables["loud_samples"] = {"noise": LOUD_NOISE, "gated": float(with_gate.mean()), "plain": float(without.mean())}
    return Results(measured, tables)


SAMPLES_STUDY = Study(
    "samples that experts take", CLAIMS, measure, needs="a run without --quick, two minutes of one processor"
)
THEOREM_STUDY = Study("the rates of the theorem", THEOREM_CLAIMS, needs=PROOF)
