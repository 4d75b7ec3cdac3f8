"""Which arms the zoo has: every mechanism once, with its default settings, one stack of two kinds, one head without its
norm.
"""

from __future__ import annotations

from dataclasses import replace

from locater.attention import mechanisms
from locater_papers.engine.mechanism_runs import MASKED, RATES, SOFTMAX, SOFTMAX_MASKED, arm
from locater_papers.engine.runs import Arm

STACK = replace(arm("hybrid(layout=3:1)", name="hybrid 3:1"), rates=RATES, seeds=3)
BARE = arm("differential(norm=False)", name="differential, no norm")
CAUSAL: dict[str, Arm] = {
    m.name: SOFTMAX if m.name == "softmax" else arm(m.name) for m in mechanisms() if m.is_causal_safe
}
CAUSAL |= {STACK.name: STACK, BARE.name: BARE}
BOTH_WAYS: dict[str, Arm] = {"softmax": SOFTMAX_MASKED} | {
    m.name: arm(m.name, MASKED) for m in mechanisms() if not m.is_causal_safe
}
ARMS: tuple[Arm, ...] = (*CAUSAL.values(), *BOTH_WAYS.values())


def against(held: Arm) -> Arm:
    """The softmax arm that one is compared with."""
    return SOFTMAX if held.base.task == "causal" else SOFTMAX_MASKED
