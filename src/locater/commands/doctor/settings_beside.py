"""What the two configurations say otherwise."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from locater.commands.doctor.pairs import Beside
from locater.findings.causes import Severity, finding
from locater.layers.layer import AttentionLayer

MOST = 0.5  # share of maps that changed, from which on a model was trained further
OF_SHAPES = ("heads", "kv_heads", "head_dim")  # which tensors of other shapes need
# settings that what a model computes depends on, and no tensor shows
ACTS = re.compile(
    r"hidden_act|activation|softcap|multiplier|logits?_scal|logit_scale|query_pre_attn|attn_scale|scale_attn|scale_emb"
    r"|num_hidden_layers|^n_layer|sliding_window|layer_types|rotary|^rope\\.|rope_theta|norm_eps|epsilon|use_parallel"
    r"|position_embedding_type|is_decoder|attention_window|num_experts_per_tok|top_k_experts|norm_topk_prob|alibi"
    r"|do_layer_norm_before|embed_scale|clip_qkv|causal|bidirectional|residual_"
)
ABSENT_IS_OFF = re.compile(r"softcap|multiplier|clip_qkv")  # null says something, where elsewhere it is a default
GELU = re.compile(
    r"gelu(_new|_fast|_accurate|_python|_python_tanh|_pytorch_tanh|_pytorch)?"
)  # equal to 1e-3 of a number
REPEATED = re.compile(r"eps|rope|theta|query_pre_attn|rotary_emb_base")


def other_settings(beside: Beside) -> None:
    """What the two configurations say otherwise of what a model computes, whatever format they are in. Where tensors
    have other shapes too, it is these that differ.
    """
    paired = beside.paired
    differ: dict[str, tuple[Any, Any]] = {}
    shapes = any(pair.other_shape and "attn" in pair.name.lower() for pair in beside.pairs.values())
    for own, base in zip(paired.own.layers, paired.base.layers, strict=False):
        for name, a, b in _numbers_of(own, base):
            if not (shapes and name in OF_SHAPES):
                differ.setdefault(name, (a, b))
    config, other = (_flat(x.model.config) for x in (paired.own, paired.base))
    read = bool(differ)
    for key in sorted(config.keys() & other.keys()):
        if read and REPEATED.search(key):
            continue  # said in words of their own
        absent = None in (config[key], other[key]) and not ABSENT_IS_OFF.search(key)
        if ACTS.search(key) and not absent and not _equal(config[key], other[key]):
            differ.setdefault(key, (config[key], other[key]))
    trained = share_changed(beside) > MOST
    for name, (a, b) in differ.items():
        words = f"says {name} {a}, BASE {b}"
        alike = isinstance(a, str) and isinstance(b, str) and GELU.fullmatch(a) and GELU.fullmatch(b)
        severity: Severity | None = "change" if alike or (trained and name == "rotary base") else None
        evidence: dict[str, Any] = {"setting": name, "said": a, "base": b}
        beside.found.append(finding("config", "config.json", words, severity=severity, **evidence))


def _numbers_of(own: AttentionLayer, base: AttentionLayer) -> Iterator[tuple[str, Any, Any]]:
    """Numbers of a layer that come from its configuration, where they differ."""
    for name in ("heads", "kv_heads", "head_dim", "window", "chunk", "causal", "softcap"):
        a, b = getattr(own, name), getattr(base, name)
        if a != b:
            yield name, a, b
    if own.head_dim == base.head_dim and not math.isclose(own.scale, base.scale, rel_tol=1e-3):
        yield "scale of logits", round(own.scale, 6), round(base.scale, 6)
    a, b = own.rotary, base.rotary
    if (a is None) != (b is None):
        yield "rotary positions", a is not None, b is not None
    elif a is not None and b is not None:
        x, y = a.frequencies, b.frequencies
        if x.shape != y.shape or not torch.allclose(x, y, rtol=1e-3, atol=0):
            bases = _rotary_base(x), _rotary_base(y)
            if len(x) == len(y) and math.isclose(*bases, rel_tol=1e-3):
                yield "frequencies of rotary positions from", f"{float(x[0]):.4g}", f"{float(y[0]):.4g}"
            else:
                yield "rotary base", *bases
    if own.norm.eps and base.norm.eps and not 0.1 < own.norm.eps / base.norm.eps < 10:
        yield "epsilon of norms", own.norm.eps, base.norm.eps


def _rotary_base(frequencies: Tensor) -> float:
    """The theta of frequencies theta^(-i / pairs)."""
    if len(frequencies) < 2 or not float(frequencies[1]):
        return float(frequencies[0])
    return float(f"{float((frequencies[0] / frequencies[1]).double() ** len(frequencies)):.4g}")


def share_changed(beside: Beside) -> float:
    maps = [pair for pair in beside.pairs.values() if pair.is_map]
    return sum(pair.changed for pair in maps) / len(maps) if maps else 0.0


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the text model, those of rotary positions among them."""
    text = config.get("text_config")
    settings = dict(text) if isinstance(text, Mapping) else dict(config)
    for key in ("rope_parameters", "rope_scaling"):
        inner = settings.pop(key, None)
        if isinstance(inner, Mapping) and not any(isinstance(x, Mapping) for x in inner.values()):
            settings |= {f"rope.{name}": x for name, x in inner.items() if name not in ("rope_type", "type")}
    return settings


def _equal(a: Any, b: Any) -> bool:
    """Whether two settings say the same."""
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-12)
    return bool(a == b)
