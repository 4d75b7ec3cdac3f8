"""Every attention mechanism by name: `mechanism("sigmoid")(q, k, v, causal=True)`.

A row of `TABLE` is a mechanism. The tests run over all rows and hold each to what it declares.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor

from locater.calls.call_and_masks import OtherAttention
from locater.errors import LocaterError
from locater.kernels import Terms
from locater.registry import Registry
from locater_lab.mechanisms import delta, doubly_normalized, gated, linear, multiformer, softmax
from locater_lab.mechanisms.mechanism_record import Mechanism

_OVER_QUERIES = "it normalises over queries first, later ones included; for encoders and cross-attention"
_RECURRENT = "it is a recurrence over tokens"
_CONVOLVES = "a convolution over tokens joins each with later ones; for encoders"
TABLE = (
    Mechanism("softmax", softmax.softmax_attention, softmax.softmax_map, "stochastic", "softmax(s q k^T) v"),
    Mechanism(
        "softcap",
        softmax.capped_attention,
        softmax.capped_map,
        "stochastic",
        "softmax(c tanh(s q k^T / c)) v",
        path="kernel",
    ),
    Mechanism(
        "qk_norm",
        softmax.qk_norm_attention,
        softmax.qk_norm_map,
        "stochastic",
        "softmax(s g_q g_k (q/rms q) (k/rms k)^T) v",
        learned=("query_gain", "key_gain"),
    ),
    Mechanism(
        "sigmoid",
        softmax.sigmoid_attention,
        softmax.sigmoid_map,
        "non-negative",
        "sigmoid(s q k^T - ln n) v",
        path="kernel",
    ),
    Mechanism(
        "softmax_plus_one",
        softmax.softmax_plus_one_attention,
        softmax.softmax_plus_one_map,
        "sub-stochastic",
        "exp(x_j) / (1 + sum exp(x)), x = s q k^T",
    ),
    Mechanism(
        "learned_sink",
        softmax.learned_sink_attention,
        softmax.learned_sink_map,
        "sub-stochastic",
        "exp(x_j) / (exp(sinks_h) + sum exp(x)), x = s q k^T",
        learned=("sinks",),
    ),
    Mechanism(
        "centred", softmax.centred_attention, softmax.centred_map, "signed", "softmax(s q k^T) v - mean of v in view"
    ),
    Mechanism(
        "doubly_normalized",
        doubly_normalized.doubly_normalized_attention,
        doubly_normalized.doubly_normalized_map,
        "stochastic",
        "softmax(E - log sum_i exp(E_i)) v, E = s q k^T",
        causal="never",
        reason=_OVER_QUERIES,
    ),
    Mechanism(
        "hybrid_normalized",
        doubly_normalized.hybrid_normalized_attention,
        doubly_normalized.hybrid_normalized_map,
        "stochastic",
        "mix doubly_normalized + (1 - mix) softmax",
        causal="never",
        learned=("mix",),
        reason=_OVER_QUERIES,
    ),
    Mechanism(
        "fastmax",
        linear.fastmax_attention,
        linear.fastmax_map,
        "stochastic",
        "f(x_j) / sum f(x), f = 1 + x (+ x^2/2), x = s (q/|q|) (k/|k|)^T",
        cost="linear",
        path="factorised",
    ),
    Mechanism(
        "linear",
        linear.linear_attention,
        linear.linear_map,
        "stochastic",
        "f_j / sum f, f = phi(s q) phi(k)^T, phi = elu + 1",
        cost="linear",
        path="factorised",
    ),
    Mechanism(
        "delta",
        delta.delta_attention,
        delta.delta_map,
        "signed",
        "s M^T q, M += beta k (v - M^T k)^T",
        causal="only",
        cost="linear",
        path="chunked",
        learned=("beta",),
        reason=_RECURRENT,
    ),
    Mechanism(
        "gated_delta",
        delta.gated_delta_attention,
        delta.gated_delta_map,
        "signed",
        "s M^T q, M = a M, M += beta k (v - M^T k)^T, a = exp(log_decay)",
        causal="only",
        cost="linear",
        path="chunked",
        learned=("beta", "log_decay"),
        reason=_RECURRENT,
    ),
    Mechanism(
        "binary",
        softmax.binary_attention,
        softmax.binary_map,
        "stochastic",
        "softmax(s mu_q mu_k sign(q) sign(k)^T + bias) v",
        learned=("bias",),
    ),
    Mechanism(
        "differential",
        softmax.differential_attention,
        softmax.differential_map,
        "signed",
        "(softmax(s q1 k1^T) - lam softmax(s q2 k2^T)) v",
        learned=("lam",),
    ),
    Mechanism(
        "gated",
        gated.gated_attention,
        gated.gated_map,
        "sub-stochastic",
        "g softmax(s (g_q q) (g_k k)^T) (g_v v), gates in (0, 1)",
        learned=("gate", "value_gate", "key_gate", "query_gate"),
    ),
    Mechanism(
        "multiformer",
        multiformer.multiformer_attention,
        multiformer.multiformer_map,
        "signed",
        "softmax(s q k^T) v per head: of all keys, of those in a window, or of k and v convolved",
        causal="never",
        learned=("key_kernel", "value_kernel", "key_bias", "value_bias"),
        reason=_CONVOLVES,
    ),
)
MECHANISMS: Registry[Mechanism] = Registry("attention mechanism")
for _row in TABLE:
    MECHANISMS.add(_row, _row.name)


def mechanism(name: str) -> Mechanism:
    """The mechanism called `name`.

    >>> mechanism("linear").cost
    'linear'
    """
    return MECHANISMS.lookup(name)


def mechanisms() -> tuple[Mechanism, ...]:
    """All of them.

    >>> [m.name for m in mechanisms() if m.kind == "signed"]
    ['centred', 'delta', 'gated_delta', 'differential', 'multiformer']
    """
    return MECHANISMS.entries()


SOFTMAXES = ("softmax", "softcap", "softmax_plus_one", "learned_sink")  # measured as a softmax with a cap or with sinks


def why_unmeasurable(name: str) -> str | None:
    """Why attention by the mechanism called `name` cannot be measured, in a line; None where it can.

    >>> why_unmeasurable("softcap"), why_unmeasurable("fastmax").partition(":")[0]
    (None, 'fastmax attention cannot be measured')
    """
    if name in SOFTMAXES:
        return None
    known = mechanism(name)
    arguments = ", ".join(["q", "k", *(f"{need}={need}" for need in known.needs or known.learned[:1])])
    its_map = f"locater_lab.mechanisms.mechanism({name!r}).map({arguments})"
    if known.kind in ("signed", "non-negative"):
        reason = f"rows of {known.kind} weights do not sum to 1 and have no entropy; their mass is {its_map}.sum(-1)"
    else:
        reason = f"its weights are no softmax of q.k, of which entropy and the rest are read; its map is {its_map}"
    return f"{name} attention cannot be measured: {reason}"


def other_attention(name: str, cap: float = softmax.DEFAULT_CAP) -> OtherAttention:
    """What a call at the attention interface says of the mechanism called `name`."""
    as_softmax = partial(_as_softmax, name, cap) if name in SOFTMAXES else None
    return OtherAttention(name, why_unmeasurable(name), mechanism(name).kind == "signed", as_softmax)


def _as_softmax(name: str, cap: float, terms: Terms, query: Tensor) -> Terms:
    """The terms by which a mechanism is a softmax: with a cap, or with a sink."""
    if name in ("softmax", "learned_sink"):  # the sinks came with the call
        return terms
    if (terms.sinks if name == "softmax_plus_one" else terms.softcap) is not None:
        raise LocaterError(f"{name} attention: its logits have another cap or sink besides, and two are not one")
    if name == "softmax_plus_one":
        return replace(terms, sinks=query.new_zeros(query.shape[1]))
    return replace(terms, softcap=cap)


def register_mechanism(new: Mechanism) -> None:
    """Add one under a name that is free. The tests of the registry then cover it too."""
    MECHANISMS.add(new, new.name)
