"""`probe --lengths`: what heads do with more context, against eager maps; and where attention falls apart."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional

import locater
from locater.errors import LocaterError
from locater.results.length_probe import LengthProbe
from tests.conftest import Result
from tests.families import CASES
from tests.observing.test_attention_shares import drawn, eager_maps, llama
from tests.parity import model_of

EXACT = 1e-7  # norms of transformers compute in float32
DEMO = Path(str(locater.__file__)).parent / "demo"
IDS = torch.randint(3, 60, (3, 48), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return drawn(llama())


def reference(model: nn.Module, ids: Tensor, judged: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses of the last tokens, and means over their rows, by layer and head."""
    maps = torch.stack(eager_maps(model, {"input_ids": ids}))[..., -judged:, :]  # (L, B, H, t, S)
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, -judged - 1 : -1]
    apart = functional.cross_entropy(logits.flatten(0, 1), ids[:, -judged:].flatten(), reduction="none")
    at = torch.arange(ids.shape[1])
    entropy = -torch.special.xlogy(maps, maps).sum(-1)
    numbers = {
        "entropy": entropy,
        "entropy_ratio": entropy / torch.log(at[-judged:] + 1.0),
        "sink": maps[..., 0],
        "reach": (maps * (at[-judged:, None] - at)).sum(-1),
    }
    return apart.view(len(ids), -1).mean(1), {name: x.mean((1, 3)) for name, x in numbers.items()}


@pytest.mark.parametrize("start", [False, True])
def test_every_number_is_that_of_eager_maps(model: nn.Module, start: bool) -> None:
    ids = IDS.clone()
    if start:
        ids[:, 0] = 1
    found = locater.probe_lengths(model, ids, [12, 24, 48])
    for row in found.lengths:
        cut = ids[:, -row.length :].clone()
        if start:
            cut[:, 0] = 1
        losses, numbers = reference(model, cut, judged=6)
        assert row.loss == pytest.approx(float(losses.mean()), abs=EXACT)
        for head in (x for x in found.rows if x.length == row.length):
            for name, x in numbers.items():
                assert getattr(head, name) == pytest.approx(float(x[head.layer, head.head]), abs=EXACT), name
    assert found.lengths[0].rise is None
    assert len(found.rows) == 3 * 2 * 4


def test_a_rise_is_of_the_same_tokens(model: nn.Module) -> None:
    from scipy import stats

    found = locater.probe_lengths(model, IDS, [12, 48])
    short, long = (reference(model, IDS[:, -length:], judged=6)[0] for length in (12, 48))
    rise = long - short
    low, high = stats.t.interval(0.95, 2, rise.mean(), rise.std() / 3**0.5)
    row = found.lengths[1]
    assert (row.rise, row.low, row.high) == pytest.approx((float(rise.mean()), float(low), float(high)), abs=1e-6)


def stretched(theta: float) -> nn.Module:
    """The model in the package with other rotary angles than it was trained with."""
    from locater.commands.load_model import load_model

    model = load_model(str(DEMO))
    rotary = [part for part in model.modules() if "rotary" in type(part).__name__.lower()]
    config: Any = model.config
    config.rope_parameters = {"rope_type": "default", "rope_theta": theta}
    for part in rotary:
        part.__init__(config)  # type: ignore[misc]
    return model


def demo_text() -> str:
    return " ".join(str(vars(str)[name].__doc__) for name in sorted(vars(str)) if vars(str)[name].__doc__) * 3


def test_a_healthy_model_holds() -> None:
    found = locater.probe_lengths(DEMO, demo_text(), [16, 64, 256], tokens=4096)
    assert found.apart is None
    assert found.changed == []
    assert found.rotary["positions"] == 256
    assert found.rotary["scaling"]["rope_theta"] == 10000


def test_what_is_refused(model: nn.Module) -> None:
    for lengths, words in (([12], "two lengths"), ([4, 12], "8 tokens"), ([12, 1000], "give more text")):
        with pytest.raises(LocaterError, match=words):
            locater.probe_lengths(model, IDS, lengths)
    with pytest.raises(LocaterError, match="give more text"):
        locater.probe_lengths(model, torch.arange(3, 60), [12, 500])
    by_label = {case.label: case for case in CASES}
    with pytest.raises(LocaterError, match="table of"):
        locater.probe_lengths(model_of(by_label["gpt2"]), torch.randint(3, 30, (9000,)), [16, 4096])
    with pytest.raises(LocaterError, match="causal"):
        locater.probe_lengths(model_of(by_label["bert"]), IDS, [12, 24])


def test_more_than_the_stated_positions(model: nn.Module) -> None:
    """Rotary angles have no end, so this is measured, and said."""
    ids = torch.randint(3, 60, (2, 96), generator=torch.Generator().manual_seed(2))
    found = locater.probe_lengths(model, ids, [16, 96])
    assert "96 tokens are more than the 64 positions" in found.assumptions["notes"][0]


def test_the_command(run: Callable[..., Result], tmp_path: Path) -> None:
    files = [tmp_path / "lengths.json", tmp_path / "lengths.html"]
    result = run("probe", DEMO, "--lengths", "16,64", "--tokens", 512, "--json", files[0], "--report", files[1])
    assert result.status == 0, result.err
    assert "Attention holds up to 64 tokens" in result.out
    assert "rope_theta 10000" in result.out
    document = json.loads(files[0].read_text())
    assert [row["length"] for row in document["lengths"]] == [16, 64]
    assert len(document["heads"]) == 2 * 24
    assert "Reach in tokens" in files[1].read_text()


def test_it_is_shown_in_eighty_columns(model: nn.Module) -> None:
    found = locater.probe_lengths(model, IDS, [12, 24, 48])
    out = io.StringIO()
    found.show(Console(file=out, width=80))
    assert max(map(len, out.getvalue().splitlines())) <= 80
    assert "<table" in found._repr_html_()
    apart = LengthProbe(
        **{
            **vars(found),
            "lengths": [*found.lengths[:2], type(found.lengths[2])(**{**vars(found.lengths[2]), "apart": True})],
            "changed": [{"layer": 1, "head": 2, "sink": [0.5, 0.1], "entropy_ratio": [0.2, 0.7], "reach": [3.0, 9.0]}],
        }
    )
    out = io.StringIO()
    apart.show(Console(file=out, width=80))
    assert "Attention falls apart at 48 tokens" in out.getvalue()
    assert "1.2 gives the first token 0.10 of its weight (before: 0.50)" in " ".join(out.getvalue().split())


@pytest.mark.parametrize(("theta", "apart"), [(1e3, 256), (3e3, 256), (1e5, None)])
def test_angles_that_the_model_was_not_trained_with(theta: float, apart: int | None) -> None:
    """Faster angles than in training come to distances that were never seen; slower ones do not."""
    found = locater.probe_lengths(stretched(theta), demo_text(), [16, 64, 256], tokens=4096)
    assert found.apart == apart
    assert found.rotary["scaling"]["rope_theta"] == theta
    assert bool(found.changed) is (apart is not None)
