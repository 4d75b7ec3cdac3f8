"""Study a: the rules of section 3, and what they are without gradients.

    R <- R + Abar R,  Abar = mean over heads of max(0, dy/dA * A)             self-attention, equations 5 and 6

With Abar the mean map itself, whose rows sum to 1, R = prod (I + A_l) = 2^L times rollout.
"""

from __future__ import annotations

import torch

from locater.explain import relevance, rollout
from locater.explain.attention_flow import RelevanceMatrices
from locater.explain.attention_record import recorded_attention
from locater_lab.engine.claims import Claim, Measurement
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.train import Shape, Transformer

LAYERS = (1, 2, 4)
ROUNDING = 1e-10

CLAIMS = (
    Claim(
        "a1", "Without gradients the rule for self-attention is rollout times 2 to the number of layers",
        "largest |R - 2^L rollout| / |R|, in float64", "at most", ROUNDING, by="ours",
    ),
    Claim(
        "a2", "Gradients make it another matrix", "least |R / |R| - rollout / |rollout||, matrices of unit norm", "at least", 0.1, by="ours",
    ),
)  # fmt: skip


def model(layers: int) -> Transformer:
    torch.manual_seed(layers)
    shape = Shape(vocabulary=32, layers=layers, width=32, heads=4, kv_heads=4, hidden=48, length=16, causal=False)
    return Transformer(shape, scale=0.3).double().eval()


def measure(setting: Setting) -> Results:
    rows = []
    for layers in LAYERS:
        net, ids = model(layers), torch.arange(12)[None]
        matrices = RelevanceMatrices({"input": 12}, like=torch.zeros((), dtype=torch.float64))
        for event in recorded_attention(net, ids).events:
            matrices.self_attention("input", event.mean_map())
        R, plain = matrices["input", "input"], rollout(net, ids, (0, 1)).matrix
        with_gradients = relevance(net, ids, (0, 1)).matrix
        assert plain is not None
        assert with_gradients is not None
        unit, other = (x / x.norm() for x in (with_gradients, plain))
        rows.append({
            "layers": layers,
            "gap": float((R - 2**layers * plain).norm() / R.norm()),
            "apart": float((unit - other).norm()),
        })  # fmt: skip
    of = f"none: models of {', '.join(map(str, LAYERS))} layers"
    measured = {
        "a1": Measurement(max(row["gap"] for row in rows), 0.0, of),
        "a2": Measurement(min(row["apart"] for row in rows), 0.0, of),
    }
    return Results(measured, {"rules": rows})


STUDY = Study("the rules without gradients", CLAIMS, measure)
