"""Full, local and compressed heads against plain references: study a.

full        softmax over all keys
local       softmax over keys in a window
compressed  softmax over keys that a strided convolution over tokens has shortened, on values shortened likewise
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.compute import normal
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.mechanisms import mechanism

DRAWS = {True: 30, False: 200}
HEADS, SIZE, WINDOW = 4, 6, 64
TAPS = ((5, 2), (7, 3), (3, 1))  # (taps, stride): the two of the paper, and one that only blurs

CLAIMS = (
    Claim(
        "a1",
        "A layer whose heads are all full is multi-head attention",
        "largest difference from PyTorch's own layer, weights shared",
        "at most",
        1e-12,
        by="ours",
    ),
    Claim(
        "a2",
        "A local head does not see keys outside its window",
        "largest change of outputs when those keys and values are drawn anew",
        "at most",
        0.0,
        by="ours",
    ),
    Claim(
        "a3",
        "A compressed head of one tap, stride 1 and kernel 1 is a full head",
        "largest difference of outputs",
        "at most",
        1e-12,
        by="ours",
    ),
    Claim(
        "a4",
        "A compressed head is a strided convolution of keys and values, then attention",
        "largest difference from conv1d channel by channel and softmax, three pairs of taps and stride",
        "at most",
        1e-12,
        by="ours",
    ),
    Claim(
        "a5",
        f"A published window of {WINDOW} lets every token see {WINDOW // 2} tokens on either side",
        "least reach to a side of a token in the middle, windows aligned to blocks as in the public code",
        "at least",
        WINDOW // 2,
        by="ours",
    ),
    Claim(
        "a6",
        "What a compressed head gives is a weighted mean of values: the rows of its map sum to 1",
        "mean distance of a row's sum from 1, kernels as they are at first",
        "at most",
        0.1,
        by="ours",
    ),
)


def operands(seed: int, T: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (normal(1, HEADS, T, SIZE, seed=10 * seed + i) for i in range(3))
    return q, k, v


def full_error(seed: int) -> float:
    """Against `nn.MultiheadAttention`."""
    width, T = HEADS * SIZE, 7
    torch.manual_seed(seed)
    layer = nn.MultiheadAttention(width, HEADS, bias=False, batch_first=True, dtype=torch.float64)
    x = normal(2, T, width, seed=seed)
    q, k, v = (y.unflatten(2, (HEADS, SIZE)).transpose(1, 2) for y in (x @ layer.in_proj_weight.mT).chunk(3, -1))
    heads = mechanism("multiformer")(q, k, v, kinds="ffff")
    with torch.no_grad():
        joined = heads.transpose(1, 2).flatten(2) @ layer.out_proj.weight.mT
        return (joined - layer(x, x, x, need_weights=False)[0]).abs().max().item()


def local_change(seed: int, window: int = 6) -> tuple[float, float]:
    """Change of a token's output by keys outside its window, and by those inside."""
    T = 24
    q, k, v = operands(seed, T)
    at = seed % T
    inside = (torch.arange(T) - at).abs() <= window // 2
    attend = partial(mechanism("multiformer"), kinds="l", window=window)
    plain = attend(q, k, v)[:, :, at]
    changes = []
    for chosen in (~inside, inside):
        others = [torch.where(chosen[:, None], normal(*x.shape, seed=seed + 999), x) for x in (k, v)]
        changes.append((attend(q, *others)[:, :, at] - plain).abs().max().item())
    return changes[0], changes[1]


def identity_error(seed: int) -> float:
    q, k, v = operands(seed, 11)
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    got = mechanism("multiformer")(q, k, v, kinds="c", stride=1, key_kernel=one, value_kernel=one)
    return (got - functional.scaled_dot_product_attention(q, k, v)).abs().max().item()


def convolution_error(seed: int) -> float:
    """Against conv1d with a group per channel; the end filled up with zeros until the last token has been met."""
    taps, stride = TAPS[seed % 3]
    T = 9 + seed % 7
    q, k, v = operands(seed, T)
    kernels = [normal(1, HEADS, taps, SIZE, seed=seed + i) for i in (50, 51)]
    biases = [normal(1, HEADS, 1, SIZE, seed=seed + i) for i in (52, 53)]
    short = []
    for x, kernel, bias in zip((k, v), kernels, biases, strict=True):
        heads = []
        for h in range(HEADS):
            padded = functional.pad(x[:, h].mT, (stride // 2, stride // 2))
            while (padded.shape[-1] - taps) % stride or padded.shape[-1] < taps:
                padded = functional.pad(padded, (0, 1))
            weight = kernel[0, h].mT[:, None]
            heads.append(functional.conv1d(padded, weight, bias[0, h, 0], stride=stride, groups=SIZE).mT)
        short.append(torch.stack(heads, 1))
    want = (q @ short[0].mT / SIZE**0.5).softmax(-1) @ short[1]
    options: dict[str, Any] = dict(
        key_kernel=kernels[0], value_kernel=kernels[1], key_bias=biases[0], value_bias=biases[1]
    )
    return (mechanism("multiformer")(q, k, v, kinds="c", stride=stride, **options) - want).abs().max().item()


def block_window(T: int, window: int = WINDOW) -> Bool[Tensor, "T T"]:
    """Which keys a query sees with windows aligned to blocks: blocks of window // 3, its own and one to either side.

    >>> block_window(9, 9).sum(1).tolist()
    [6, 6, 6, 9, 9, 9, 6, 6, 6]
    """
    block = torch.arange(T) // (window // 3)
    return (block[:, None] - block).abs() <= 1


def reach(T: int = 210) -> dict[str, int | float]:
    """How far the tokens in the middle see to a side, and what the two windows have in common."""
    seen, at = block_window(T), torch.arange(T)
    centred = (at[:, None] - at).abs() <= WINDOW // 2
    rows = range(WINDOW, T - WINDOW)
    back = [int((i - at[seen[i]]).max()) for i in rows]
    ahead = [int((at[seen[i]] - i).max()) for i in rows]
    common = (seen & centred)[WINDOW : T - WINDOW].sum() / (seen | centred)[WINDOW : T - WINDOW].sum()
    return {
        "window": WINDOW,
        "least": min(back + ahead),
        "most": max(back + ahead),
        "keys": int(seen[T // 2].sum()),
        "common": common.item(),
    }


def row_sums(seed: int) -> Float[Tensor, " rows"]:
    """Of maps of compressed heads, taps shared by channels, drawn as the module draws them."""
    taps, stride = TAPS[seed % 2]
    q, k, _ = operands(seed, 40)
    generator = torch.Generator().manual_seed(seed)
    kernels = [
        (2 * torch.rand(1, 1, taps, 1, generator=generator, dtype=torch.float64) - 1) / taps**0.5 for _ in range(2)
    ]
    weights = mechanism("multiformer").map(
        q, k, kinds="c", stride=stride, key_kernel=kernels[0], value_kernel=kernels[1]
    )
    return weights.sum(-1).flatten()


def measure(setting: Setting) -> Results:
    """All draws."""
    seeds = range(DRAWS[setting.quick])
    largest = f"none: the largest of {len(seeds)} draws"
    local = [local_change(seed) for seed in seeds]
    window = reach()
    sums = [row_sums(seed) for seed in seeds]
    off = [(x - 1).abs().mean().item() for x in sums]
    measured = {
        "a1": Measurement(max(full_error(seed) for seed in seeds), 0.0, largest),
        "a2": Measurement(max(x[0] for x in local), 0.0, largest),
        "a3": Measurement(max(identity_error(seed) for seed in seeds), 0.0, largest),
        "a4": Measurement(max(convolution_error(seed) for seed in seeds), 0.0, largest),
        "a5": Measurement(float(window["least"]), 0.0, "none: counted"),
        "a6": by_seed(off, of="kernels"),
    }
    rows = torch.cat(sums)
    tables = {
        "published_window": window,
        "least_change_inside": min(x[1] for x in local),
        "compressed_row_sums": {"least": rows.min().item(), "most": rows.max().item()},
    }
    return Results(measured, tables)


STUDY = Study("kinds of heads", CLAIMS, measure)
