"""Plain PyTorch and diffusion models through discovery, scan, observe and LocAteR, against what the models compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import locater
from locater.errors import LocaterError
from tests.families.plain_models import MODELS, Plain
from tests.parity import redraw

REFUSED = [name for name, plain in MODELS.items() if plain.reason is not None]
READ = [name for name in MODELS if name not in REFUSED]
LONGER = (
    "mask by addition",
    "grouped by expand",
    "grouped by repeat",
    "timm without norms",
    "shifted windows",
    "einsum, one head",
)


def parameters(names: list[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in LONGER)) for name in names]


def built(name: str) -> tuple[nn.Module, Plain]:
    torch.manual_seed(0)
    return MODELS[name].build().eval(), MODELS[name]


@contextmanager
def taken_from(model: nn.Module, example: dict[str, Any]) -> Iterator[dict[str, tuple[tuple[Any, ...], Tensor]]]:
    """What each module read and returned, by its path, in one pass of the model."""
    taken: dict[str, tuple[tuple[Any, ...], Tensor]] = {}

    def hook(path: str) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            taken[path] = ((*args, *kwargs.values()), out[0] if isinstance(out, tuple) else out)

        return keep

    handles = [m.register_forward_hook(hook(path), with_kwargs=True) for path, m in model.named_modules()]
    try:
        with torch.no_grad():
            model(**example)
        yield taken
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("name", parameters(READ))
def test_layers_give_what_the_modules_compute(name: str) -> None:
    """The output of each attention module, from the model itself in float64, and the number of its rows in a scan."""
    model, plain = built(name)
    redraw(model.double(), spread=0.4, seed=3)
    example = {k: x.double() if torch.is_floating_point(x) else x for k, x in plain.example.items()}
    discovered = locater.discover(model, example)
    assert [layer.heads for layer in discovered.layers] == [plain.heads] * plain.layers
    assert not discovered.refused
    with taken_from(model, example) as taken:
        for layer in discovered.layers:
            if plain.no_logits is not None:
                assert plain.no_logits in str(layer.unknown_logits)
            elif plain.no_output is not None:
                assert layer.unknown_logits is None
                assert plain.no_output in str(layer.unknown_output)
            else:
                _compare_output(layer, taken)
    assert len(locater.scan(model, example=example).rows) == plain.layers * plain.heads


def _compare_output(layer: Any, taken: dict[str, Any]) -> None:
    """`layer.output` without its norm, of what the attention module read, against what the module returned; and its
    norm against that of the model.
    """
    args, theirs = taken[layer.name]
    read = args[0]
    other = next((x for x in args[1:] if isinstance(x, Tensor) and x.ndim == 3 and x.shape != read.shape), None)
    plain_norm = type(layer.norm)()
    bare = replace(layer, norm=plain_norm, memory_norm=None if layer.memory_norm is None else plain_norm)
    ours = bare.output(read, other)
    assert (ours - theirs).abs().max() < 1e-6 * theirs.std(), layer.name
    if layer.norm.kind != "none":
        fronts = [(a[0], out) for a, out in taken.values() if isinstance(out, Tensor) and _holds(out, read)]
        streams = [(x, out) for x, out in fronts if isinstance(x, Tensor) and x.shape == out.shape]
        assert any((layer.norm(x) - out).abs().max() < 1e-6 * out.std() for x, out in streams), layer.name


def _holds(out: Tensor, read: Tensor) -> bool:
    """Whether two tensors have the same numbers, maybe at other places: tokens are moved into windows."""
    return torch.equal(out.flatten().sort().values, read.flatten().sort().values)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused_with_the_reason(name: str) -> None:
    model, plain = built(name)
    discovered = locater.discover(model, plain.example)
    assert not discovered.layers
    assert all(str(plain.reason) in refusal.reason for refusal in discovered.refused)
    for attempt in (lambda: locater.scan(model, example=plain.example), lambda: locater.LocAteR().attach(model)):
        with pytest.raises(LocaterError, match=str(plain.reason)) as error:
            attempt()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", parameters(list(MODELS)))
def test_observe_measures_the_entropy_of_the_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the entropies of every softmax and every fused call, computed here."""
    model, plain = built(name)
    redraw(model, spread=0.4, seed=3)
    entropies = _entropies(model, plain, monkeypatch)
    with locater.observe(model) as seen, torch.no_grad():
        model(**plain.example)
    assert len(seen.rows) == sum(map(len, entropies))
    ours = [row["entropy"] for row in seen.rows]
    theirs = [x for part in entropies for x in part.tolist()]
    assert ours == pytest.approx(theirs, rel=1e-4)


def _entropies(model: nn.Module, plain: Plain, patch: pytest.MonkeyPatch) -> list[Tensor]:
    """Mean entropy of each head, for each attention call of one pass, in the order of calls."""
    entropies: list[Tensor] = []
    fused, softmax = functional.scaled_dot_product_attention, torch.softmax

    def count(weights: Tensor) -> None:
        weights = weights.double()
        weights = weights.reshape(-1, plain.heads, *weights.shape[-2:])
        rows = -(weights * weights.clamp_min(1e-300).log()).sum(-1)
        entropies.append(rows.mean((0, 2)))

    def attend(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, *args: Any, **kw: Any) -> Tensor:
        keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        logits = q @ keys.mT * q.shape[-1] ** -0.5
        if kw.get("is_causal"):
            hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
            logits = logits.masked_fill(hidden, -torch.inf)
        count(softmax(logits, -1))
        return fused(q, k, v, attn_mask, *args, **kw)

    def soft(x: Tensor, *args: Any, **kw: Any) -> Tensor:
        out = softmax(x, -1)
        count(out)
        return out

    with patch.context() as inside, torch.enable_grad():  # with gradients, PyTorch's own module takes no short way
        inside.setattr(functional, "scaled_dot_product_attention", attend)
        inside.setattr(torch, "softmax", soft)
        inside.setattr(functional, "softmax", soft)
        inside.setattr(Tensor, "softmax", soft)
        model(**plain.example)
    return entropies


@pytest.mark.parametrize("name", parameters(["DiT", "UNet", "baddbmm", "grouped by fused"]))
def test_the_penalty_acts_on_queries_and_keys(name: str) -> None:
    model, plain = built(name)
    locater.discover(model, plain.example)
    control = locater.LocAteR().attach(model)
    try:
        model.train()(**plain.example)
        control.loss().backward()
    finally:
        control.detach()
    charged = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert charged
    assert all("q" in name.split(".")[-2] or "k" in name.split(".")[-2] or "norm" in name for name in charged), charged


def test_layers_are_numbered_by_the_numbers_inside_their_names() -> None:
    """torchvision calls its blocks encoder_layer_0, encoder_layer_1, ..."""
    model = nn.Sequential()
    for number in range(11):
        model.add_module(f"encoder_layer_{number}", nn.TransformerEncoderLayer(16, 2, 16, batch_first=True))
    names = [layer["name"] for layer in locater.scan(model).layers]
    assert names == [f"encoder_layer_{number}.self_attn" for number in range(11)]
