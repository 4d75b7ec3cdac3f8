"""Every mechanism of the registry, held to what it declares and to a plain reading of its formula in float64."""

from __future__ import annotations

import json
import runpy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from locater.errors import LocaterError
from locater_lab.mechanisms import mechanism, mechanisms
from tests import ROOT
from tests.lab.mechanisms.mechanism_cases import (
    CASES,
    B,
    Case,
    E,
    H,
    K,
    case_id,
    draw,
    expected,
    operands,
    padding_of,
    takes,
    views,
)

every_case = pytest.mark.parametrize("case", CASES, ids=case_id)
# the others have tests of their own below
smooth_cases = pytest.mark.parametrize("case", [c for c in CASES if c.smooth], ids=case_id)
# what is not refused
USES = [(c, causal) for c in CASES for causal in (False, True) if takes(c, mechanism(c.name), causal, False)]
every_use = pytest.mark.parametrize(("case", "causal"), USES, ids=[f"{case_id(c)}-{causal}" for c, causal in USES])
causal_cases = pytest.mark.parametrize("case", [c for c, causal in USES if causal], ids=case_id)


def test_every_mechanism_has_a_case() -> None:
    assert {case.name for case in CASES} == {m.name for m in mechanisms()}


@every_case
@pytest.mark.parametrize("T", [9, 3])
def test_it_equals_its_formula(case: Case, T: int) -> None:
    """Output and map, for every mask it takes, with keys in groups and before the queries."""
    S, m = 9, mechanism(case.name)
    q, k, v = operands(T, S)
    options = case.options(T, S)
    tried = 0
    for name, (kw, seen) in views(T, S).items():
        rowwise = name.startswith("rows")
        if not takes(case, m, kw.get("causal", False), rowwise):
            continue
        for scale in (None, 0.4):
            real = kw.get("query_padding", kw.get("padding"))
            rows = torch.ones(B, T, dtype=torch.bool) if real is None or real.shape[1] != T else real
            want = expected(case, q, k, seen, rows, kw.get("causal", False) or rowwise, scale, options)
            torch.testing.assert_close(m.map(q, k, scale=scale, **kw, **options), want, rtol=1e-9, atol=1e-10, msg=name)
            out = m(q, k, v, scale=scale, **kw, **options)
            torch.testing.assert_close(out, want @ v.repeat_interleave(H // K, 1), rtol=1e-9, atol=1e-10, msg=name)
            assert out.shape == (B, H, T, E)
            tried += 1
    assert tried >= 6


@every_case
def test_one_token(case: Case) -> None:
    m = mechanism(case.name)
    q, k, v = operands(1, 1)
    kw, options = dict(causal=takes(case, m, True, False)), case.options(1, 1)
    seen = torch.ones(B, H, 1, 1, dtype=torch.bool)
    want = expected(case, q, k, seen, torch.ones(B, 1, dtype=torch.bool), kw["causal"], None, options)
    torch.testing.assert_close(m(q, k, v, **kw, **options), want @ v.repeat_interleave(2, 1), rtol=1e-9, atol=1e-10)


@smooth_cases
def test_gradients(case: Case) -> None:
    """Of q, k, v and every learned option, with padding, a row that sees nothing where it is causal, and groups."""
    m, T = mechanism(case.name), 4
    q, k, v = operands(T, T)
    padding = torch.ones(B, T, dtype=torch.bool)
    padding[1, :1] = False
    given = {
        name: value.clone().requires_grad_() for name, value in case.options(T, T).items() if isinstance(value, Tensor)
    }
    fixed = {name: value for name, value in case.options(T, T).items() if name not in given}
    kw = dict(causal=takes(case, m, True, False), padding=padding)

    def run(q: Tensor, k: Tensor, v: Tensor, *learned: Tensor) -> Tensor:
        return m(q, k, v, **kw, **fixed, **dict(zip(given, learned, strict=True)))

    torch.autograd.gradcheck(run, [x.requires_grad_() for x in (q, k, v)] + list(given.values()), fast_mode=True)


@pytest.mark.parametrize("name", ["doubly_normalized", "hybrid_normalized"])
def test_no_second_derivative_is_made_up(name: str) -> None:
    """Where attention itself would have one: its first is right, a second would lack terms."""
    q, k, v = (x.requires_grad_() for x in operands(5, 5))
    options = {"mix": 0.5} if name == "hybrid_normalized" else {}
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        loss = mechanism(name)(q, k, v, **options).square().sum()
        with pytest.raises(LocaterError, match="first derivatives only"):
            torch.autograd.grad(loss, (q, k), create_graph=True)


def test_a_window_wider_than_the_text_costs_no_more() -> None:
    """It is all keys then, and nothing is padded to its width."""
    q, k, v = operands(40, 40)
    wide = mechanism("multiformer")(q, k, v, kinds="l", window=10**9)
    torch.testing.assert_close(wide, mechanism("softmax")(q, k, v))
    near, far = (
        mechanism("multiformer").map(q, k, kinds="l", window=n) @ v.repeat_interleave(H // K, 1) for n in (30, 78)
    )
    torch.testing.assert_close(mechanism("multiformer")(q, k, v, kinds="l", window=30), near)
    torch.testing.assert_close(far, wide)


@pytest.mark.parametrize("kinds", ["fll", "ffl", "lffc"])
def test_heads_come_back_in_their_order(kinds: str) -> None:
    """Evenly spaced or not: each head, and its gradients, as if all heads were of its kind."""
    q, k, v = (draw(1, 4, 20, 6, seed=n).requires_grad_() for n in range(3))
    kernel = torch.full((1, 1, 3, 1), 0.4, dtype=torch.float64)
    options = dict(window=4, key_kernel=kernel, value_kernel=kernel)
    weight = draw(1, 4, 20, 6, seed=4)
    out = mechanism("multiformer")(q, k, v, kinds=kinds, **options)
    grads = torch.autograd.grad((out * weight).sum(), (q, k, v))
    for h in range(4):
        alone = mechanism("multiformer")(q, k, v, kinds=(kinds * 4)[h], **options)
        torch.testing.assert_close(out[:, h], alone[:, h])
        wanted = torch.autograd.grad((alone * weight)[:, h].sum(), (q, k, v))
        for a, b in zip(grads, wanted, strict=True):
            torch.testing.assert_close(a[:, h], b[:, h])


@every_use
@pytest.mark.parametrize("T", [300, 150])
def test_blocks_and_chunks_fit_together(case: Case, T: int, causal: bool) -> None:
    """Over several of them, output and gradients are those of the map written out."""
    m, S = mechanism(case.name), 300
    leaves = [x[:1, : x.shape[1] // 2].clone().requires_grad_() for x in operands(T, S)]
    options = {}
    for name, x in case.options(T, S).items():
        options[name] = (
            x if not isinstance(x, Tensor) else x[: len(x) // 2] if x.ndim == 1 else x[:1, : x.shape[1] // 2]
        )
        if isinstance(options[name], Tensor):
            leaves.append(options[name].requires_grad_())
    q, k, v = leaves[:3]
    kw = dict(causal=causal, padding=padding_of(S)[1:], query_padding=padding_of(S)[1:, S - T :])
    out, want = m(q, k, v, **kw, **options), m.map(q, k, **kw, **options) @ v
    torch.testing.assert_close(out, want)
    weight = draw(*out.shape, seed=4)
    ours, theirs = (torch.autograd.grad((x * weight).sum(), leaves) for x in (out, want))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


@every_case
@pytest.mark.parametrize("T", [140, 37])
def test_no_later_token_changes_an_earlier_output(case: Case, T: int) -> None:
    """Over the edges of chunks too; or it refuses, and says why."""
    m, S, cut = mechanism(case.name), 140, 20
    q, k, v = (x.float() for x in operands(T, S))
    options = {name: x.float() if isinstance(x, Tensor) else x for name, x in case.options(T, S).items()}
    if not takes(case, m, True, False):
        with pytest.raises(LocaterError, match="cannot be causal"):
            m(q, k, v, causal=True, **options)
        return
    before = m(q, k, v, causal=True, **options)
    for x in (q, k, v, *(options[name] for name in ("beta", "log_decay") if name in options)):
        x[:, :, -cut:] = 3 * x[:, :, -cut:].flip(-1) if x.ndim == 4 else x[:, :, -cut:] / 2
    after = m(q, k, v, causal=True, **options)
    torch.testing.assert_close(after[:, :, :-cut], before[:, :, :-cut], rtol=1e-6, atol=1e-6)
    assert (after[:, :, -cut:] - before[:, :, -cut:]).abs().max() > 1e-3 or case.name == "centred"


@every_use
def test_padding_is_as_good_as_absent(case: Case, causal: bool) -> None:
    """Whatever stands in padding, real tokens come out as if it were not there, and nothing is NaN."""
    m, T, front = mechanism(case.name), 11, 3
    q, k, v = operands(T, T)
    options = case.options(T, T)
    padding = torch.ones(B, T, dtype=torch.bool)
    padding[:, :front] = False
    for x in (q, k, v):
        x[:, :, :front] = 100.0
    out = m(q, k, v, causal=causal, padding=padding, **options)
    fewer = {name: x[..., front:] if isinstance(x, Tensor) and x.shape[-1] == T else x for name, x in options.items()}
    alone = m(*(x[:, :, front:] for x in (q, k, v)), causal=causal, **fewer)
    torch.testing.assert_close(out[:, :, front:], alone, rtol=1e-9, atol=1e-10)
    nothing = m(q, k, v, causal=causal, padding=torch.zeros_like(padding), **options)
    assert (nothing == 0).all()


@causal_cases
def test_decoding_with_kept_keys(case: Case) -> None:
    """The last token alone, with all keys, comes out as in the whole sequence."""
    m, S = mechanism(case.name), 11
    q, k, v = operands(S, S)
    options = case.options(S, S)
    whole = m(q, k, v, causal=True, **options)
    torch.testing.assert_close(m(q[:, :, -1:], k, v, causal=True, **options), whole[:, :, -1:], rtol=1e-9, atol=1e-10)


@every_case
def test_the_kind_of_map_is_the_declared_one(case: Case) -> None:
    m, S = mechanism(case.name), 24
    q, k, _ = operands(S, S)
    weights = m.map(3 * q, k, causal=m.causal == "only", **case.options(S, S))
    mass = weights.sum(-1)
    if m.kind == "signed":
        assert weights.min() < -1e-3
        return
    assert weights.min() >= 0
    if m.kind == "stochastic":
        torch.testing.assert_close(mass, torch.ones_like(mass))
    elif m.kind == "sub-stochastic":
        assert mass.max() <= 1
        assert mass.min() < 0.99
    else:
        assert mass.max() > 1.01, "sub-stochastic would be the better word"


class Watch(TorchDispatchMode):
    """The largest tensor that any operation makes, and whether fused attention is among them."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.fused = 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self.largest = max(self.largest, x.untyped_storage().nbytes() // x.element_size())
        self.fused |= "scaled_dot_product_flash" in str(func)
        return out


def one_head(case: Case, T: int) -> tuple[list[Tensor], dict[str, Any]]:
    """float32 operands of one sample and one head, with gradients."""
    tensors = [x[:1, :1].float().clone().requires_grad_() for x in operands(T, T)]
    options = {}
    for name, x in case.options(T, T).items():
        options[name] = x if not isinstance(x, Tensor) else x.float()[:1] if x.ndim == 1 else x.float()[:1, :1]
    return tensors, options


@every_use
def test_the_path_is_the_declared_one(case: Case, causal: bool) -> None:
    """No T x T tensor forward or backward, unless it says so; fused attention is called where it says so."""
    m, T = mechanism(case.name), 520
    (q, k, v), options = one_head(case, T)
    with Watch() as seen:
        m(q, k, v, causal=causal, **options).square().sum().backward()
    assert seen.fused == (m.path == "sdpa") == m.is_fused
    biased = causal and case.name == "binary" and "bias" in options  # a bias and a causal mask have to meet somewhere
    assert (seen.largest >= T * T) == biased, seen.largest


@every_case
def test_the_cost_is_the_declared_one(case: Case) -> None:
    """Multiplications forward and backward when T doubles: twice for linear, four times for quadratic."""
    m, counts = mechanism(case.name), []
    for T in (512, 1024):
        (q, k, v), options = one_head(case, T)
        with (
            FlopCounterMode(display=False) as counter,
            torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        ):
            m(q, k, v, causal=m.is_causal_safe and not case.encoder, **options).sum().backward()
        counts.append(counter.get_total_flops())
    growth = counts[1] / counts[0]
    assert 1.9 < growth < 2.1 if m.cost == "linear" else 3.5 < growth < 4.1


@every_case
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_fewer_digits(case: Case, dtype: torch.dtype, device: str) -> None:
    """Whole, padded, and with keys before the queries; gradients are finite."""
    m, S = mechanism(case.name), 70
    causal = takes(case, m, True, False)
    for T, padding in ((S, None), (S, padding_of(S)), (40, None)):
        q, k, v = (x.to(device, dtype).requires_grad_() for x in operands(T, S))
        options = {name: x.to(device, dtype) if isinstance(x, Tensor) else x for name, x in case.options(T, S).items()}
        exact = {name: x.double().cpu() if isinstance(x, Tensor) else x for name, x in options.items()}
        out = m(q, k, v, causal=causal, padding=None if padding is None else padding.to(device), **options)
        want = m(*(x.detach().double().cpu() for x in (q, k, v)), causal=causal, padding=padding, **exact)
        assert out.dtype == dtype
        assert (out.cpu() - want).abs().max() < (1e-5 if dtype == torch.float32 else 5e-2)
        out.sum().backward()
        assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v))


@every_case
def test_it_compiles_in_one_piece(case: Case) -> None:
    m, T = mechanism(case.name), 140
    q, k, v = (x.requires_grad_() for x in operands(T, T))
    kw = dict(causal=takes(case, m, True, False), padding=padding_of(T), **case.options(T, T))
    compiled = torch.compile(lambda q, k, v: m(q, k, v, **kw), fullgraph=True, backend="eager", dynamic=False)
    torch.testing.assert_close(compiled(q, k, v), m(q, k, v, **kw))
    torch._dynamo.reset()


def test_the_page_declares_what_the_registry_does() -> None:
    text = (ROOT / "docs" / "mechanisms.md").read_text()
    causal = {"either": "yes", "never": "refused", "only": "only"}
    for m in mechanisms():
        learned = ", ".join(f"`{name}`" for name in m.learned) or "-"
        assert f"| {m.kind} | {causal[m.causal]} | {m.cost} | {m.path} | {learned} |" in _row(text, m.name), m.name


def _row(text: str, name: str) -> str:
    return next((line for line in text.splitlines() if line.startswith(f"| `{name}` |")), "")


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_table_of_costs_is_that_of_the_results(device: str) -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "mechanisms.py"))
    results = json.loads((ROOT / f"benchmarks/results/mechanisms-{device}.json").read_text())
    page = (ROOT / "docs" / "results" / "kernels.md").read_text()
    assert script["table"](results) in page, "python benchmarks/mechanisms.py --table"
    assert {m.name for m in mechanisms()} <= set(results["seconds"])


def test_the_page_runs_as_written() -> None:
    text = (ROOT / "docs" / "mechanisms.md").read_text()
    for block in text.split("```python\n")[1:]:
        exec(block.split("```")[0], {})
