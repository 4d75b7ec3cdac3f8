"""Tokens by depth in drawn models, norms after the sums against norms in front, with a mask and without: study d.

The paper is about BERT, whose norms stand after the sums. Models of today have them in front of attention and MLP.
"""

from __future__ import annotations

import math
from itertools import product

import torch
from jaxtyping import Float
from torch import Tensor

from locater.measures import token_cosine
from locater_lab.engine.claims import Claim, by_seed
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.papers.shi2022.bounds import layer_norm

SEEDS = {True: 16, False: 24}
DEPTH, TOKENS, WIDTH, HEADS = 24, 32, 64, 4
GAINS = (0.3, 1.0)  # of what a sublayer adds, beside the tokens' size

CLAIMS = (
    Claim(
        "d1", "With norms after the sums, tokens of a drawn model become all but equal",
        f"mean cosine after {DEPTH} layers, Gaussian weights that keep a token's size", "at least", 0.99, by="ours",
    ),
    Claim(
        "d2", "With norms in front they stay apart: the stream grows, and a layer changes less of it",
        "the same", "at most", 0.9, by="ours",
    ),
    Claim(
        "d3", "A causal mask keeps tokens apart",
        f"cosine after {DEPTH} layers with the mask less without, norms after the sums, sublayers that add 0.3", "at most", 0.0, by="ours",
    ),
    Claim(
        "d4", "Where sublayers add little (0.3), the place of the norm is worth less than 0.1 of cosine",
        f"cosine after {DEPTH} layers, norms after the sums less norms in front", "at most", 0.1, by="ours",
    ),
)  # fmt: skip


def cosines(
    seed: int, post: bool, causal: bool = False, gain: float = 1.0, depth: int = DEPTH
) -> Float[Tensor, " states"]:
    """Mean cosine of tokens before the first layer and after each."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = layer_norm(normal(TOKENS, WIDTH))
    later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    states = [x]
    for _ in range(depth):
        W_QK, W_VO = (
            normal(HEADS, WIDTH, WIDTH) / math.sqrt(WIDTH),
            gain * normal(HEADS, WIDTH, WIDTH) / math.sqrt(WIDTH * HEADS),
        )
        W_in, W_out = (
            gain * normal(WIDTH, 4 * WIDTH) / math.sqrt(WIDTH),
            gain * normal(4 * WIDTH, WIDTH) / math.sqrt(2 * WIDTH),
        )
        for number in range(2):
            y = x if post else layer_norm(x)
            if number == 0:
                logits = y @ W_QK @ y.mT / math.sqrt(WIDTH)
                a = (logits.masked_fill(later, -math.inf) if causal else logits).softmax(-1)
                added = (a @ y @ W_VO).sum(0)
            else:
                added = (y @ W_in).relu() @ W_out
            x = layer_norm(x + added) if post else x + added
        states.append(x)
    return token_cosine(torch.stack(states))


def measure(setting: Setting) -> Results:
    """Both places of the norm, both masks, two gains."""
    seeds = range(SEEDS[setting.quick])
    kinds = {
        _name(post, causal, gain): torch.stack([cosines(seed, post, causal, gain) for seed in seeds])
        for gain, post, causal in product(GAINS, (True, False), (False, True))
    }
    last = {name: states[:, -1] for name, states in kinds.items()}
    measured = {
        "d1": by_seed(last["post, 1"].tolist()),
        "d2": by_seed(last["pre, 1"].tolist()),
        "d3": by_seed((last["post, causal, 0.3"] - last["post, 0.3"]).tolist()),
        "d4": by_seed((last["post, 0.3"] - last["pre, 0.3"]).tolist()),
    }
    curves = {name: states.mean(0).tolist() for name, states in kinds.items()}
    table = {"curves": curves, "seeds": len(seeds), "tokens": TOKENS, "width": WIDTH, "layers": DEPTH}
    return Results(measured, {"cosine_by_depth": table})


def _name(post: bool, causal: bool, gain: float) -> str:
    return f"{'post' if post else 'pre'}{', causal' * causal}, {gain:g}"


STUDY = Study("norms after the sums and in front", CLAIMS, measure)
