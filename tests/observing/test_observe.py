"""Observing changes nothing and sees what the model's own maps hold: every family, every implementation, padded
batches.
"""

from __future__ import annotations

import copy
import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from locater.discovery import attention_layers
from locater.observing import SeenHead, observe
from tests.families import CASES
from tests.parity import Case, Record, model_of, record

RUNS = [pytest.param(case, how, id=f"{case.label}-{how}") for case in CASES for how in case.implementations]
# one module at several depths: what it was given last is not all it was given
SHARED = ("albert", "albert-groups", "albert-inner")
TOLERANCE = 1e-4


@cache
def prepared(label: str) -> tuple[nn.Module, dict[str, list[Record]]]:
    """A float32 model and what its own attention did, by the independent taps of the parity harness."""
    case = next(c for c in CASES if c.label == label)
    model = model_of(case).float()
    return model, {how: record(singly(case), use(model, how), how) for how in case.implementations}


def singly(case: Case) -> Case:
    """The same case on float32 batches."""
    made = copy.copy(case)
    object.__setattr__(made, "batch", lambda: batch_of(case))
    return made


def batch_of(case: Case) -> dict[str, Tensor]:
    return {k: v.float() if v.is_floating_point() else v for k, v in case.batch().items()}


def use(model: Any, how: str) -> nn.Module:
    """The model under one of its implementations, set as its users would."""
    if getattr(model, "config", None) is not None:
        if type(model).__name__.startswith("Falcon"):
            model.config._attn_implementation = how  # asked at every call
        else:
            model.set_attn_implementation(how)
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = how == "sdpa"
    return model


def run(case: Case, model: nn.Module) -> Any:
    with torch.no_grad():
        batch = batch_of(case)
        return case.call(model, batch) if case.call else model(**batch)


def tensors(x: Any) -> list[Tensor]:
    """Every tensor in an output, in order."""
    if isinstance(x, Tensor):
        return [x]
    if hasattr(x, "items"):
        return [t for _, value in x.items() for t in tensors(value)]
    return [t for value in x for t in tensors(value)] if isinstance(x, list | tuple) else []


@pytest.mark.parametrize(("case", "how"), RUNS)
def test_outputs_are_equal_to_the_bit(case: Case, how: str) -> None:
    model = use(prepared(case.label)[0], how)
    before = tensors(run(case, model))
    kept = {k: (v if isinstance(v, Tensor) else repr(v)) for k, v in vars_of(model).items()}
    with observe(model) as seen:
        during = tensors(run(case, model))
    after = tensors(run(case, model))
    assert len(before) == len(during) > 0 or case.label == "gemma3-composite"
    assert all(torch.equal(a, b) for a, b in zip(before, during, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert vars_of(model).keys() == kept.keys()
    assert not seen.silent


def vars_of(model: nn.Module) -> dict[str, Any]:
    """Everything that hangs on the modules, by path."""
    found = {f"{path}.{name}": value for path, module in model.named_modules() for name, value in vars(module).items()}
    hooks = {f"{path}.hooks": len(m._forward_hooks) + len(m._forward_pre_hooks) for path, m in model.named_modules()}
    return {**{k: v for k, v in found.items() if "hooks" not in k}, **{f"{k}={v}": v for k, v in hooks.items()}}


@pytest.mark.parametrize(("case", "how"), [r for r in RUNS if r.values[0].label not in SHARED])
def test_numbers_are_those_of_the_maps(case: Case, how: str) -> None:
    model, recorded = prepared(case.label)
    use(model, how)
    with observe(model, rest=True, offsets=(1,)) as seen:
        run(case, model)
    layers = list(attention_layers(model))
    by_layer = {number: [row for row in seen.rows if row.layer == number] for number in range(len(layers))}
    for number, layer in enumerate(layers):
        assert len(by_layer[number]) == layer.heads
        own = recorded[how][number]
        # eager first: those have maps. Padded queries of cross-attention differ between implementations: there each has
        # its own
        maps, rows = reference(case, layer, own if layer.kind == "cross" else recorded[min(recorded)][number])
        for row in by_layer[number]:
            compare(row, maps[:, row.head], rows, own, layer.kind == "self")


def reference(case: Case, layer: Any, here: Record) -> tuple[Tensor, Tensor]:
    """Maps (B, H, T, S) in float64 as the model made them, and the rows that are no padding."""
    batch = batch_of(case)
    x, memory = here.x, here.memory
    assert x is not None
    real = {k: v.bool() for k, v in batch.items() if k.endswith("attention_mask")}
    padding = real.get(here.padding or "", torch.ones(x.shape[:2], dtype=torch.bool))
    keys = (
        padding
        if memory is None
        else real.get(case.memory_padding or "", torch.ones(memory.shape[:2], dtype=torch.bool))
    )
    visible = layer.visible(x.shape[1], keys.shape[1], keys)
    if here.maps is not None:
        maps = here.maps.double()
    else:
        assert here.logits is not None
        maps = here.logits.double().masked_fill(~visible, -torch.inf).softmax(-1)
    maps = torch.where(visible, maps.nan_to_num(), 0.0)
    rows = padding if layer.kind == "self" else torch.ones_like(padding)
    return maps, rows & visible.any(-1)[:, 0].expand(rows.shape)


def compare(row: SeenHead, maps: Tensor, counted: Tensor, own: Record, same_tokens: bool) -> None:
    B, T, S = maps.shape
    p = maps[counted]  # (rows, S)
    at = torch.arange(T).expand(B, T)[counted]
    assert row.rows == len(p)
    entropy = -torch.special.xlogy(p, p).sum(-1)
    wanted = {"entropy": entropy.mean(), "row_mass": p.sum(-1).mean(), "max_probability": p.amax(-1).mean(),
              "participation": (1 / p.square().sum(-1)).mean()}  # fmt: skip
    if same_tokens:
        wanted["distance"] = (p * (at[:, None] - torch.arange(S)).abs()).sum(-1).mean()
        wanted["self_mass"] = p.gather(1, at[:, None]).mean()
        previous = [p[i, t - 1] for i, t in enumerate(at.tolist()) if t >= 1 and (p[i, t - 1] > 0)]
        if previous:
            assert row.offsets[1] == pytest.approx(float(torch.stack(previous).mean()), abs=TOLERANCE)
    for name, value in wanted.items():
        assert row[name] == pytest.approx(float(value), rel=TOLERANCE, abs=TOLERANCE), name
    if own.logits is not None:
        whole = torch.where(maps > 0, own.logits[:, row.head].double(), -torch.inf)[counted]
        assert row.max_logit is not None
        assert math.isclose(row.max_logit, float(whole.max()), rel_tol=TOLERANCE, abs_tol=TOLERANCE)


@pytest.mark.parametrize("how", ["eager", "sdpa"])
def test_singular_values_are_those_of_all_outputs_one_below_the_other(how: str) -> None:
    case = next(c for c in CASES if c.label == "llama")
    # float64; its eager softmax is float32, and NaN where a row sees nothing, so padding comes last
    model: Any = model_of(case)
    whole = {k: v.flip(1) for k, v in batch_of(case).items()}
    calls = [whole, {k: v[:, 1:-1] for k, v in whole.items()}]
    assert not all(bool(batch["attention_mask"].all()) for batch in calls)
    outputs = explicit_outputs(use(model, "eager"), calls)
    use(model, how)
    with observe(model, outputs=True) as seen, torch.no_grad():
        for batch in calls:
            model(**batch)
    for row in seen.rows:
        s = torch.linalg.svdvals(outputs[row.layer][row.head])
        assert row.output_singular_values == pytest.approx(s.tolist(), abs=1e-6 * float(s[0]))
        assert row.output_stable_rank == pytest.approx(float(s.square().sum() / s[0] ** 2), rel=1e-5)
        p = s / s.sum()
        assert row.output_effective_rank == pytest.approx(float(torch.special.entr(p).sum().exp()), rel=1e-5)
    with observe(model) as seen, torch.no_grad():
        model(**calls[0])
    assert all(row.output_singular_values is None for row in seen.rows)  # not asked for


def explicit_outputs(model: Any, calls: list[dict[str, Tensor]]) -> list[list[Tensor]]:
    """A_h V_h (rows, d_head) of each layer's heads: the model's own maps times its own values, real rows of every
    call.
    """
    values: list[Tensor] = []
    hooks = [
        b.self_attn.v_proj.register_forward_hook(lambda module, args, out: values.append(out))
        for b in model.model.layers
    ]
    found: list[list[list[Tensor]]] = [[[] for _ in range(model.config.num_attention_heads)] for _ in hooks]
    for batch in calls:
        values.clear()
        with torch.no_grad():
            maps = model(**batch, output_attentions=True, use_cache=False).attentions
        for number, (A, v) in enumerate(zip(maps, values, strict=True)):
            V = v.unflatten(-1, (model.config.num_key_value_heads, -1))  # (B, S, key heads, d_head)
            group = A.shape[1] // V.shape[2]
            for head, rows in enumerate(found[number]):
                rows.append((A[:, head] @ V[:, :, head // group])[batch["attention_mask"].bool()])
    for hook in hooks:
        hook.remove()
    return [[torch.cat(rows) for rows in layer] for layer in found]


def test_a_layer_that_hands_no_outputs_over_has_no_singular_values() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 1, enable_nested_tensor=False)
    with observe(model, outputs=True) as seen:
        model(torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0)))
    assert all(row.output_singular_values is None for row in seen.rows)
