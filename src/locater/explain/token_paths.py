"""`paths()`: input tokens scored by the paths that start at them, and the target split by path length and by head."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from locater.explain.decomposing import check_mlp
from locater.explain.explanation import Explanation
from locater.explain.freezing import Mlp
from locater.explain.readout import check_sum, frozen_with_readout
from locater.explain.targets import TargetChoice


def paths(
    model: nn.Module,
    inputs: Mapping[str, Tensor] | Tensor,
    target: TargetChoice = None,
    *,
    mlp: Mlp = "source",
) -> Explanation:
    """Scores of input tokens: the sum of all paths from a token to the target (`inputs`: keywords, or token ids).

    A path goes through one head or the skip in each layer (`decompose`, docs/explain.md). With mlp="source" the output
    of an MLP is a constant, and scores count what attention carries to the target. With mlp="linear" paths also go
    through MLPs, and the scores are those of `operator`. The offset has the paths that start at constants, and at MLPs
    that are a source.

    `parts["length"]` (L + 1,) is the target split by the number of heads that paths go through, and `parts["head"]`
    (L, H) the part that goes through each head; both with paths of every origin, in units of the target. A path goes
    through several heads, so the parts of heads do not sum to the target.

    >>> from locater_lab.train import Shape, Transformer
    >>> _ = torch.manual_seed(0)
    >>> model = Transformer(Shape(vocabulary=64, layers=3, width=32, heads=4, kv_heads=2, hidden=48), scale=0.2)
    >>> explanation = paths(model, torch.arange(10)[None], target=7)
    >>> explanation.parts["length"].shape, explanation.parts["head"].shape
    (torch.Size([4]), torch.Size([3, 4]))
    >>> abs(float(explanation.scores.sum()) + explanation.offset - explanation.target.value) < 1e-5
    True
    """
    check_mlp(mlp)
    frozen, readout = frozen_with_readout(model, inputs, target, mlp)
    with torch.no_grad():
        x, covector = frozen.input, readout.covector
        scores = (frozen.pulled_back(covector[None, None])[0, 0] * x[0]).sum(-1)
        constants = frozen.streams[-1] - frozen.carried(x[None])[0]
        offset = readout.constant + float((constants[0].double() * covector.double()).sum())
        check_sum(readout, float(scores.double().sum()) + offset, frozen.output[0], next(model.parameters()).dtype)
        parts = {
            "length": torch.einsum("lbtd,td->l", frozen.by_length().total, covector).cpu(),
            "head": frozen.along_heads(covector[None]).cpu(),
        }
    where = "constants and outputs of MLPs" if mlp == "source" else "constants"
    return Explanation(
        "paths",
        readout.target,
        scores.cpu(),
        offset=offset,
        parts=parts,
        exact=f"scores and offset (paths from {where}) sum to the target; {readout.note}",
        how=f"one forward pass of the model, frozen with mlp={mlp!r}; one backward pass through the frozen model, and "
        "its sums by length",
    )
