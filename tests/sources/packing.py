"""GPTQ and AWQ maps packed number by number, from the description of the formats, and the floats that they stand for."""

from __future__ import annotations

import torch
from torch import Tensor

INPUTS, OUTPUTS, GROUP = 48, 16, 16
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # place i of a word holds this one of its eight outputs


def _numbers(bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weights (inputs, outputs), zero points and scales (groups, outputs)."""
    draw = torch.Generator().manual_seed(bits)
    weight = torch.randint(0, 2**bits, (INPUTS, OUTPUTS), generator=draw)
    zero = torch.randint(1, 2**bits, (INPUTS // GROUP, OUTPUTS), generator=draw)
    scale = torch.rand(INPUTS // GROUP, OUTPUTS, generator=draw).half() + 0.01
    return weight, zero, scale


def _word(numbers: list[int], bits: int) -> int:
    """A signed word of 32 bits, the first number lowest."""
    word = sum(number << bits * place for place, number in enumerate(numbers))
    return word - 2**32 if word >= 2**31 else word


def _floats(weight: Tensor, zero: Tensor, scale: Tensor, group: list[int]) -> Tensor:
    """(outputs, inputs), in Python's own floats: exact, and exact in float32 too."""
    rows = [
        [float(scale[group[i], o]) * int(weight[i, o] - zero[group[i], o]) for i in range(INPUTS)]
        for o in range(OUTPUTS)
    ]
    return torch.tensor(rows)


def gptq(bits: int, sorted_by_activations: bool, minus_one: bool) -> tuple[dict[str, Tensor], Tensor]:
    weight, zero, scale = _numbers(bits)
    group = [i // GROUP for i in range(INPUTS)]
    if sorted_by_activations:
        group = [group[i] for i in torch.randperm(INPUTS, generator=torch.Generator().manual_seed(9)).tolist()]
    per = 32 // bits
    packed = [
        [_word([int(weight[i + k, o]) for k in range(per)], bits) for o in range(OUTPUTS)]
        for i in range(0, INPUTS, per)
    ]
    zeros = [
        [_word([int(row[o + k]) - minus_one for k in range(per)], bits) for o in range(0, OUTPUTS, per)] for row in zero
    ]
    stored = {
        "qweight": torch.tensor(packed, dtype=torch.int32),
        "qzeros": torch.tensor(zeros, dtype=torch.int32),
        "scales": scale,
        "g_idx": torch.tensor(group, dtype=torch.int32),
    }
    return stored, _floats(weight, zero, scale, group)


def awq() -> tuple[dict[str, Tensor], Tensor]:
    weight, zero, scale = _numbers(4)

    def packed(rows: Tensor) -> Tensor:
        words = [[_word([int(row[o + k]) for k in AWQ_ORDER], 4) for o in range(0, OUTPUTS, 8)] for row in rows]
        return torch.tensor(words, dtype=torch.int32)

    stored = {"qweight": packed(weight), "qzeros": packed(zero), "scales": scale}
    return stored, _floats(weight, zero, scale, [i // GROUP for i in range(INPUTS)])
