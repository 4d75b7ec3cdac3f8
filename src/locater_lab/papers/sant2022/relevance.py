"""The paper's measure of how much a head counts: what leaves it as it is, and what it does not tell. Study c, and study
d on models.

    c_h = sum_t |W_O^h o_ht|_1        r_h = median over samples of c_h / sum_h' c_h'

the share of each head in what a layer adds to the stream, in the absolute-sum norm.
"""

from __future__ import annotations

from statistics import fmean, median

import torch
from jaxtyping import Float
from torch import Tensor

from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.compute import normal
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.mechanisms.multiformer import head_relevance

DRAWS = {True: 40, False: 300}
HEADS, SIZE, WIDTH, SAMPLES, TOKENS = 4, 8, 64, 31, 12
WRITTEN_OUT = 5  # draws that are compared with loops

CLAIMS = (
    Claim(
        "c1",
        "Relevance is each head's share of what the layer adds",
        "largest difference from sums written out",
        "at most",
        1e-12,
        by="ours",
    ),
    Claim(
        "c2",
        "Of one sample the shares sum to 1",
        "largest distance of the sum from 1",
        "at most",
        1e-12,
        by="ours",
    ),
    Claim(
        "c3",
        "Their medians over samples do too",
        f"largest distance of the sum from 1 over draws, {SAMPLES} samples that lean on different heads",
        "at most",
        0.02,
        by="ours",
    ),
    Claim(
        "c4",
        "Another basis inside heads, another order of tokens or another scale of the layer changes nothing",
        "largest change of a share",
        "at most",
        1e-12,
        by="ours",
    ),
    Claim(
        "c5",
        "Another basis of the stream changes nothing",
        f"change of share, two heads of equal strength, one of which writes to one channel of {WIDTH}",
        "at most",
        0.05,
        by="ours",
    ),
    Claim(
        "c6",
        "A layer without its most relevant heads is another layer",
        "change of the layer's output by leaving out two heads with 0.9 of the relevance that undo each other, over "
        "its size",
        "at least",
        0.5,
        by="ours",
    ),
)


def drawn(seed: int, samples: int = SAMPLES) -> tuple[Float[Tensor, "B H T E"], Float[Tensor, "W HE"]]:
    """Heads of different strengths, which differ by sample."""
    heads = normal(samples, HEADS, TOKENS, SIZE, seed=seed) * normal(samples, HEADS, 1, 1, seed=seed + 1).exp()
    return heads, normal(WIDTH, HEADS * SIZE, seed=seed + 2)


def written_out(heads: Tensor, weight: Tensor) -> list[float]:
    """The definition in loops."""
    shares: list[list[float]] = []
    for sample in heads:
        sizes = []
        for h, outputs in enumerate(sample):
            part = weight[:, h * SIZE : (h + 1) * SIZE]
            sizes.append(sum((part @ o).abs().sum().item() for o in outputs))
        shares.append([size / sum(sizes) for size in sizes])
    return [median(share[h] for share in shares) for h in range(len(shares[0]))]


def unmoved(seed: int) -> float:
    """Largest change by bases inside heads, order of tokens, and scale."""
    heads, weight = drawn(seed)
    plain = head_relevance(heads, weight)
    basis = normal(HEADS, SIZE, SIZE, seed=seed + 3) + 3 * torch.eye(SIZE, dtype=torch.float64)
    turned = torch.cat([weight[:, h * SIZE : (h + 1) * SIZE] @ torch.linalg.inv(basis[h]).mT for h in range(HEADS)], 1)
    changes = [
        head_relevance(heads @ basis, turned),
        head_relevance(heads.flip(2), weight),
        head_relevance(7.0 * heads, weight / 3),
    ]
    return max((x - plain).abs().max().item() for x in changes)


def turned_stream(seed: int) -> tuple[float, float]:
    """Share of a head that writes to one channel beside one as strong that writes to all; as it is, and with the stream
    turned.
    """
    heads = normal(SAMPLES, 2, TOKENS, 1, seed=seed)
    weight = torch.zeros(WIDTH, 2, dtype=torch.float64)
    weight[0, 0] = 1.0
    weight[:, 1] = normal(WIDTH, seed=seed + 1)
    weight[:, 1] /= weight[:, 1].norm()
    turn = torch.linalg.qr(normal(WIDTH, WIDTH, seed=seed + 2)).Q
    return head_relevance(heads, weight)[0].item(), head_relevance(heads, turn @ weight)[0].item()


def cancelling() -> dict[str, float]:
    """Four heads, of which the first two write opposite things; their relevance, and what leaving both out changes."""
    heads, weight = normal(SAMPLES, HEADS, TOKENS, SIZE, seed=0), normal(WIDTH, HEADS * SIZE, seed=1)
    heads[:, 0] *= 9
    heads[:, 1] = heads[:, 0]
    weight[:, SIZE : 2 * SIZE] = -weight[:, :SIZE]
    shares = head_relevance(heads, weight)

    def layer(x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(2) @ weight.mT

    without = heads.clone()
    without[:, :2] = 0
    change = (layer(heads) - layer(without)).norm() / layer(heads).norm()
    return {"relevance": shares[:2].sum().item(), "change": change.item()}


def measure(setting: Setting) -> Results:
    """All draws."""
    seeds = range(DRAWS[setting.quick])
    largest = f"none: the largest of {len(seeds)} draws"
    exact, once, medians = [], [], []
    for seed in seeds:
        heads, weight = drawn(10 * seed)
        shares = head_relevance(heads, weight)
        if seed < WRITTEN_OUT:
            loops = torch.tensor(written_out(heads, weight), dtype=torch.float64)
            exact.append((shares - loops).abs().max().item())
        once.append(abs(head_relevance(heads[:1], weight).sum().item() - 1))
        medians.append(shares.sum().item() - 1)
    pairs = [turned_stream(10 * seed) for seed in seeds]
    undone = cancelling()
    measured = {
        "c1": Measurement(max(exact), 0.0, f"none: the largest of {len(exact)} draws"),
        "c2": Measurement(max(once), 0.0, largest),
        "c3": Measurement(max(abs(x) for x in medians), 0.0, largest),
        "c4": Measurement(max(unmoved(10 * seed) for seed in seeds), 0.0, largest),
        "c5": by_seed([b - a for a, b in pairs], of="draws"),
        "c6": Measurement(undone["change"], 0.0, "none: built"),
    }
    tables = {
        "sum_of_medians": 1 + fmean(medians),
        "one_channel_share": {"as_it_is": pairs[0][0], "turned": pairs[0][1]},
        "cancelling_heads": undone,
    }
    return Results(measured, tables)


STUDY = Study("relevance of heads", CLAIMS, measure)
