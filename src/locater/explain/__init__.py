"""Which tokens and heads an output comes from: one recorded `Run` of a model, and methods of a `Run`.

`METHODS` has every method by name, from which the command chooses; `APPLIES_TO` says in words what each applies to.
"""

from collections.abc import Callable

from locater.explain.attention_flow import attention_norms, raw_attention, relevance, rollout
from locater.explain.deletion_curves import Curve, Deletion, deletion
from locater.explain.explanation import Explanation, Target
from locater.explain.freezing import decompose
from locater.explain.input_gradients import gradient_input, integrated_gradients
from locater.explain.linear_operator import operator, paths
from locater.explain.path_sums import ByLength, HeadParts, Path, Paths
from locater.explain.recorded_run import Run

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

__all__ = [
    "APPLIES_TO",
    "METHODS",
    "ByLength",
    "Curve",
    "Deletion",
    "Explanation",
    "HeadParts",
    "Path",
    "Paths",
    "Run",
    "Target",
    "attention_norms",
    "decompose",
    "deletion",
    "gradient_input",
    "integrated_gradients",
    "operator",
    "paths",
    "raw_attention",
    "relevance",
    "rollout",
]
