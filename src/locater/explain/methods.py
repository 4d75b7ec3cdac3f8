"""Every method of this room by name, and what it applies to: the command and the page choose from this table."""

from __future__ import annotations

from collections.abc import Callable

from locater.explain.attention_flow import raw_attention, relevance, rollout
from locater.explain.explanation import Explanation
from locater.explain.input_gradients import gradient_input, integrated_gradients
from locater.explain.linear_operator import operator, paths
from locater.explain.value_norms import attention_norms

_STACKS = "one stack, encoder and decoder, two towers, two streams with cross-attention"
METHODS: dict[str, Callable[..., Explanation]] = {
    "relevance": relevance,
    "rollout": rollout,
    "raw_attention": raw_attention,
    "attention_norms": attention_norms,
    "gradient_input": gradient_input,
    "integrated_gradients": integrated_gradients,
    "operator": operator,
    "paths": paths,
}
APPLIES_TO: dict[str, str] = {
    "relevance": f"attention whose output is its map times values: {_STACKS}",
    "rollout": f"attention with weights of at least 0: {_STACKS}",
    "raw_attention": f"any attention that has a map: {_STACKS}",
    "attention_norms": "as relevance, where the output map is known",
    "gradient_input": "models that embed token ids or image patches",
    "integrated_gradients": "as gradient_input; needs captum, from the extra [explain]",
    "operator": "one stack whose family says where the parts of a block are (docs/families.md)",
    "paths": "as operator",
}
