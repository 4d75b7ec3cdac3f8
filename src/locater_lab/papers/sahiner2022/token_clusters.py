"""Tokens in clusters: whether the convex solution attends by cluster, and whether it does so unasked: study d.

A token has three channels for its cluster (a corner of a triangle, with noise), one for a value, and channels of noise
that are as large as the rest. Two tasks on the same tokens:

    own    y_t = mean over tokens u of v_u where u is in the cluster of t: needs to know who is alike
    all    y_t = mean over all tokens u of v_u: does not

Column v of Z* is the map W of the value channel: x_t^T W x_u is the weight with which the value of u reaches token t.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from locater_lab.engine.claims import Claim, by_seed
from locater_lab.engine.devices_and_processes import draw_normal
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.papers.sahiner2022.convex_problem import design, recover_heads, solve
from locater_lab.papers.sahiner2022.optima import head_rows

CLUSTERS, NOISE_CHANNELS, TOKENS = 3, 3, 10
VALUE = CLUSTERS  # the channel
WIDTH = CLUSTERS + 1 + NOISE_CHANNELS
JITTER = 0.1  # of the corners
SEQUENCES = {True: 40, False: 200}
SEEDS = {True: 8, False: 16}
PENALTY = 0.1
STEPS = 300
TASKS = ("own", "all")

CLAIMS = (
    Claim(
        "d1", "Self-attention clusters tokens by their latent similarity, where the task depends on clusters",
        "chance that a pair of one cluster has a larger weight than a pair of two, new sequences", "at least", 0.9, where="abstract",
        bound="ours",
    ),
    Claim(
        "d2", "It does so better than the tokens' own inner products",
        "the same chance, less that of inner products", "at least", 0.05, by="ours",
    ),
    Claim(
        "d3", "It clusters them unasked, where the task does not depend on clusters",
        "the same chance, task over all tokens", "at least", 0.9, by="ours",
    ),
)  # fmt: skip


class ClusterBatch(NamedTuple):
    """Tokens (n, s, d), targets by task (n, s), and which pairs share a cluster."""

    x: Tensor
    targets: dict[str, Tensor]
    same: Bool[Tensor, "n s s"]


def draw_batch(seed: int, sequences: int) -> ClusterBatch:
    g = torch.Generator().manual_seed(seed)
    cluster = torch.randint(CLUSTERS, (sequences, TOKENS), generator=g)
    corner = torch.nn.functional.one_hot(cluster, CLUSTERS).double()
    x = torch.cat(
        [
            corner + JITTER * draw_normal(sequences, TOKENS, CLUSTERS, seed=seed + 1),
            draw_normal(sequences, TOKENS, WIDTH - CLUSTERS, seed=seed + 2),
        ],
        2,
    )
    same = cluster[:, :, None] == cluster[:, None]
    value = x[:, :, VALUE]
    own = torch.einsum("ntu,nu->nt", same.double(), value) / TOKENS
    return ClusterBatch(x, {"own": own, "all": value.mean(1, keepdim=True).expand_as(own)}, same)


def value_map(Z: Float[Tensor, "pairs d c"]) -> Float[Tensor, "d d"]:
    """The map with which values reach tokens, from a Z with one output."""
    return Z[:, VALUE, 0].reshape(WIDTH, WIDTH)


def chance_of_larger_weight(weights: Float[Tensor, "n s s"], same: Bool[Tensor, "n s s"]) -> float:
    """That a pair of one cluster has a larger weight than a pair of two (the area under the curve), tokens with
    themselves left out.

    >>> same = torch.tensor([[[True, True, False], [True, True, False], [False, False, True]]])
    >>> chance_of_larger_weight(same.double(), same), chance_of_larger_weight(-same.double(), same), chance_of_larger_weight(torch.zeros(1, 3, 3), same)
    (1.0, 0.0, 0.5)
    """
    other = ~torch.eye(same.shape[1], dtype=torch.bool)
    a, b = weights[same & other], weights[~same]
    ranks = torch.searchsorted(b.sort().values, a), torch.searchsorted(b.sort().values, a, right=True)
    return float((ranks[0] + ranks[1]).double().mean() / 2 / len(b))


def measure(setting: Setting) -> Results:
    chances: dict[str, list[float]] = {"own": [], "all": [], "tokens": []}
    errors: dict[str, list[float]] = {task: [] for task in TASKS}
    maps: list[dict[str, Any]] = []
    for seed in setting.each(list(range(SEEDS[setting.quick]))):
        batch, new = draw_batch(100 * seed, SEQUENCES[setting.quick]), draw_batch(100 * seed + 50, 40)
        phi, phi_new = design(batch.x)[None], design(new.x)
        y = torch.stack([batch.targets[task].reshape(-1, 1) for task in TASKS])
        Z = solve(phi.expand(2, -1, -1, -1, -1), y, PENALTY, STEPS, 1e-4).Z[:, 0]
        chances["tokens"].append(chance_of_larger_weight(new.x @ new.x.mT, new.same))
        for task, one in zip(TASKS, Z, strict=True):
            chances[task].append(chance_of_larger_weight(new.x @ value_map(one) @ new.x.mT, new.same))
            predicted = phi_new[:, 0].flatten(1) @ one.flatten()
            truth = new.targets[task].flatten()
            errors[task].append(float((predicted - truth).square().mean() / truth.var()))
            if seed == 0:
                maps += head_rows(recover_heads(one, 0.05)[0], task)
    gains = [a - b for a, b in zip(chances["own"], chances["tokens"], strict=True)]
    measured = {"d1": by_seed(chances["own"]), "d2": by_seed(gains), "d3": by_seed(chances["all"])}
    rows = [
        {"of": of, "chance": (mean := by_seed(values)).value, "spread": mean.spread,
         "error": by_seed(errors[of]).value if of in errors else None}
        for of, values in chances.items()
    ]  # fmt: skip
    return Results(measured, {"clusters": {"rows": rows, "maps": maps, "tokens": TOKENS, "width": WIDTH}})


STUDY = Study("tokens in clusters", CLAIMS, measure)
