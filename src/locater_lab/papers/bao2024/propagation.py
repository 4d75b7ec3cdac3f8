"""The propagation probability: closed form and exact mixture beside the simulated walk (docs/theory.md sections 3 and
4). Study a.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from locater.spectrum import moments
from locater.theory import mixture_propagation, signal_propagation, unit_moments
from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.theory import simulate

NUMBERS = {True: 24_000_000, False: 240_000_000}  # normal numbers drawn per case, quick or not
WALKS = {True: 20_000, False: 100_000}  # at most
CHUNK = 2_000_000  # numbers in memory at a time
DRAWS = 4096  # of the query, for the mixture
MANY = 64  # directions from which the closed form should do
LENGTHS, RANKS = (16, 64, 256, 1024, 4096), (1, 4, 16, 64, 128)
LARGEST = 16_384  # length x rank that a case may have: beyond it there would be a few hundred walks and no precision
EXPECTED = 5  # events that a simulation should see of a kind before its standard error means anything
PROFILES = ("profile", "closed", "mixture")
SELF_LOGIT = 4.0  # M of every symmetric map

CLAIMS = (
    Claim(
        "a1", "With many directions, two moments of the spectrum give the propagation probability of every token",
        f"error of the closed form against simulated walks where it should be largest, worst of ranks from {MANY} on", "at most", 0.05,
        where="theorem on signal propagation", bound="ours",
    ),
    Claim(
        "a2", "Two moments are enough at 16 directions too, where the theorem, a limit of many directions, promises nothing",
        "largest difference between W and -W of trace 0, whose first two moments are equal (94 % of tr W^2 in one direction)",
        "at most", 0.01, by="ours",
    ),
    Claim(
        "a3", "Averaged over queries, the conditional law of the walk gives the propagation probability exactly at any rank",
        "largest distance of the mixture from simulated walks, in their joint standard errors", "at most", 4.5, by="ours",
    ),
    Claim(
        "a4", "The closed form's error is 0.064 |g1|, g1 the skewness of the query's quadratic form, for maps near a projector",
        "median over ranks of error / |g1|, projectors, against the mixture", "about", 0.064, 0.008, by="ours",
    ),
)  # fmt: skip


def maps(rank: int, symmetric: bool, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Query and key map (h, d) of a head: a multiple of a projector, or one whose keys share half of its queries' map.

    >>> q, k = maps(4, symmetric=True)
    >>> round((4**-0.5 * (q.mT @ k).trace()).item(), 6)      # the mean self-logit
    4.0
    """
    if symmetric:
        root = (SELF_LOGIT / math.sqrt(rank)) ** 0.5 * torch.eye(rank, dtype=torch.float64)
        return root, root
    generator = torch.Generator().manual_seed(seed + rank)
    q, noise = torch.randn(2, rank, rank + min(rank, 16), dtype=torch.float64, generator=generator)
    k = q / 2 + noise
    size = rank**-0.5 * torch.linalg.matrix_norm(q.mT @ k)  # sqrt F
    return q / size.sqrt() * 2**0.5, k / size.sqrt() * 2**0.5  # sqrt F = 2


def case(rank: int, length: int, symmetric: bool, quick: bool) -> dict[str, Any]:
    """One head and one length: errors of both forms against simulation, with the simulation's own standard error."""
    q, k = maps(rank, symmetric)
    m, scale = moments(q, k), rank**-0.5
    per_walk = length * q.shape[1]
    walks = max(200, min(WALKS[quick], NUMBERS[quick] // per_walk))
    seen = simulate(q, k, scale, length, walks, seed=rank + length, chunk=max(1, CHUNK // per_walk))
    closed = signal_propagation(*unit_moments(m, scale), length=length)
    exact = mixture_propagation(m, scale, length, draws=DRAWS)
    error, off = (closed - seen.propagated).abs(), (exact - seen.propagated).abs()
    binomial = exact * (1 - exact)
    joint = (binomial / walks + binomial / DRAWS).sqrt()
    often_enough = binomial * walks >= EXPECTED
    worst = int((closed - exact).abs().argmax())  # chosen without the simulation, whose noise would choose itself
    return {
        "rank": rank, "length": length, "map": "symmetric" if symmetric else "general", "walks": walks,
        "closed_error": float(error[worst]), "standard_error": float((binomial / walks).sqrt()[worst]), "position": worst + 1,
        "mixture_error": float(off.max()), "mixture_sigmas": float((off / joint)[often_enough].max()), "skew": float(m.skew),
        "profile": _at(seen.propagated), "closed": _at(closed), "mixture": _at(exact),
    }  # fmt: skip


def same_moments(quick: bool, rank: int = 16, length: int = 64) -> Measurement:
    """W with one eigenvalue up and all others down by as much in sum, and -W: equal in trace, tr W^2 and norm."""
    values = torch.full((rank,), -1.0 / (rank - 1), dtype=torch.float64)
    values[0] = 1.0
    values = values * 2 * rank**0.5 / values.norm()  # sqrt F = 2
    eye = torch.eye(rank, dtype=torch.float64)
    seen = [simulate(eye, torch.diag(sign * values), rank**-0.5, length, WALKS[quick], seed=3) for sign in (1.0, -1.0)]
    gap = (seen[0].propagated - seen[1].propagated).abs()
    worst = int(gap.argmax())
    error = math.hypot(*(float(x.error[worst]) for x in seen))
    numbers = {
        "position": worst + 1,
        "length": length,
        "W": float(seen[0].propagated[worst]),
        "minus_W": float(seen[1].propagated[worst]),
    }
    return Measurement(float(gap[worst]), 2 * error, "2 standard errors", numbers)


def skew_law(length: int = 64, ranks: tuple[int, ...] = RANKS, seeds: int = 8) -> tuple[Measurement, dict[str, float]]:
    """Error of the closed form over |g1| for projectors, with the mixture as the truth; and the same by rank. Seeds are
    draws of the mixture.
    """
    ratios = torch.zeros(seeds, len(ranks))
    for column, rank in enumerate(ranks):
        q, k = maps(rank, symmetric=True)
        m, scale = moments(q, k), rank**-0.5
        closed = signal_propagation(*unit_moments(m, scale), length=length)
        exact = torch.stack([mixture_propagation(m, scale, length, draws=1 << 15, seed=seed) for seed in range(seeds)])
        worst = int((closed - exact.mean(0)).abs().argmax())
        ratios[:, column] = (closed - exact)[:, worst].abs() / m.skew.abs()
    by_rank = {f"rank {rank}": float(x) for rank, x in zip(ranks, ratios.mean(0), strict=True)}
    return by_seed(ratios.median(1).values.tolist(), of="draws of the mixture"), by_rank


def measure(setting: Setting) -> Results:
    """All cases, then the four numbers."""
    grid = [(r, t, s) for s in (True, False) for t in LENGTHS for r in RANKS if r * t <= LARGEST or r == 4]
    cases = [case(rank, length, symmetric, setting.quick) for rank, length, symmetric in setting.each(grid)]
    many = max((c for c in cases if c["rank"] >= MANY), key=lambda c: c["closed_error"])
    far = max(cases, key=lambda c: c["mixture_sigmas"])
    plain = [{k: v for k, v in c.items() if k not in PROFILES} for c in cases]
    shown = {c["rank"]: {k: c[k] for k in PROFILES} for c in cases if c["length"] == 64 and c["map"] == "symmetric"}
    farthest = {k: far[k] for k in ("rank", "length", "map", "mixture_error")}
    where = {k: many[k] for k in ("rank", "length", "map", "walks")}
    law, by_rank = skew_law()
    measured = {
        "a1": Measurement(many["closed_error"], 2 * many["standard_error"], "2 standard errors", where),
        "a2": same_moments(setting.quick),
        "a3": Measurement(far["mixture_sigmas"], 0.0, "none: in standard errors", farthest),
        "a4": law,
    }
    return Results(measured, {"walks": plain, "profiles": shown, "error_over_skew": by_rank})


def _at(profile: Tensor, points: int = 32) -> list[float]:
    return [float(x) for x in profile[torch.linspace(0, len(profile) - 1, points).long()]]


STUDY = Study("propagation probability", CLAIMS, measure)
