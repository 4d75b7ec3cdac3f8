"""`probe --cache`: the loss with windows in several heads at once, against a model that attends with that mask."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional

import locater
from locater.calls.head_removal import Removal
from locater.commands.choosing_cache import first_order, repeated
from locater.commands.key_ranges_and_sinks import sinks_and_massive
from locater.discovery import attention_layers
from locater.errors import LocaterError
from tests.conftest import Result
from tests.families import CASES
from tests.observing.test_attention_shares import drawn, llama
from tests.parity import model_of

EXACT = 1e-9
WINDOW, SINKS = 4, 1
IDS = torch.randint(3, 60, (12, 24), generator=torch.Generator().manual_seed(0))
DEMO = Path(str(locater.__file__)).parent / "demo"


@contextmanager
def attends_with(model: nn.Module, windowed: dict[int, list[int]], share: float | Tensor = 1.0) -> Iterator[None]:
    """The model with an attention function of our own: maps in float64, and a mask in these query heads. `share`: how
    much of the output is that of the masked map.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    def attend(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scaling: float = 1.0, **_: Any
    ) -> tuple[Tensor, Tensor]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        T = q.shape[2]
        at = torch.arange(T)
        logits = (q @ k.mT * scaling).masked_fill(at[:, None] < at, -torch.inf)
        whole = logits.softmax(-1)
        kept = (at[:, None] - at < WINDOW) | (at < SINKS)
        weights = whole.clone()
        for head in windowed.get(module.layer_idx, ()):
            own = logits[:, head].masked_fill(~kept, -torch.inf).softmax(-1)
            weights[:, head] = share * own + (1 - share) * whole[:, head]
        return (weights @ v).transpose(1, 2).contiguous(), whole

    AttentionInterface.register("windowed64", attend)
    AttentionMaskInterface.register("windowed64", sdpa_mask)
    model.set_attn_implementation("windowed64")  # type: ignore[operator]
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")  # type: ignore[operator]


def losses(model: nn.Module, ids: Tensor, windowed: dict[int, list[int]] | None = None) -> Tensor:
    with torch.no_grad(), attends_with(model, windowed or {}):
        logits = model(input_ids=ids).logits
    apart = functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return apart.view(len(ids), -1).mean(1)


def query_heads(units: list[tuple[int, int]]) -> dict[int, list[int]]:
    """Two query heads share a key head."""
    found: dict[int, list[int]] = {}
    for layer, head in units:
        found.setdefault(layer, []).extend([2 * head, 2 * head + 1])
    return found


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return drawn(llama(num_hidden_layers=3))


def plan_of(model: nn.Module, loss: float, **more: Any) -> locater.CachePlan:
    return locater.cache_plan(model, IDS, loss=loss, length=24, **{"window": WINDOW, "sinks": SINKS, **more})


def test_every_list_has_the_loss_of_a_model_with_that_mask(model: nn.Module) -> None:
    plan = plan_of(model, 0.2, measure=True)
    halves = {"choose": IDS[:6], "judge": IDS[6:]}
    assert plan.loss == pytest.approx(float(losses(model, halves["judge"]).mean()), abs=EXACT)
    order = sorted(plan.rows, key=lambda row: row.change or 0.0)
    assert {row["text"] for row in plan.tried} == {"choose", "judge"}
    for row in plan.tried:
        units = [(x.layer, x.kv_head) for x in order[: row["heads"]]]
        ids = halves[row["text"]]
        change = losses(model, ids, query_heads(units)) - losses(model, ids)
        assert row["change"] == pytest.approx(float(change.mean()), abs=EXACT)
        low, high = stats.t.interval(0.95, 5, change.mean(), change.std() / 6**0.5)
        assert (row["low"], row["high"]) == pytest.approx((float(low), float(high)), abs=EXACT)
        assert row["holds"] is (row["high"] <= 0.2)
    for unit in plan.rows:
        alone = losses(model, IDS[:6], query_heads([(unit.layer, unit.kv_head)])) - losses(model, IDS[:6])
        assert unit.change == pytest.approx(float(alone.mean()), abs=EXACT)
    if plan.judged is not None:
        own = sum(row.change or 0.0 for row in plan.rows if row.windowed)
        assert plan.judged["sum"] == pytest.approx(own, abs=EXACT)


def test_first_order_effects_are_slopes(model: nn.Module) -> None:
    """Of the loss, where the share of the masked map grows from none."""
    ids, units = IDS[:3], [(layer, head) for layer in range(3) for head in range(2)]
    found = first_order(model, attention_layers(model), units, Removal("window", WINDOW, SINKS), {"input_ids": ids})
    for unit in units:
        share = torch.zeros(3, 1, 1, requires_grad=True, dtype=torch.float64)
        with attends_with(model, query_heads([unit]), share):
            logits = model(input_ids=ids).logits
        apart = functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        (slope,) = torch.autograd.grad(apart.view(3, -1).mean(1).sum(), share)
        assert found[unit] == pytest.approx(slope.flatten().tolist(), abs=1e-6)


def test_the_list_grows_until_it_no_longer_holds(model: nn.Module) -> None:
    """Judged lists rise, all but the last hold, and the result is the last that does."""
    sizes = {}
    for loss in (1e-6, 0.02, 0.1, 0.3, 1.0, 100.0):
        plan = plan_of(model, loss)
        judged = [row for row in plan.tried if row["text"] == "judge"]
        assert [row["heads"] for row in judged] == sorted(row["heads"] for row in judged)
        assert all(row["holds"] for row in judged[:-1])
        held = [row["heads"] for row in judged if row["holds"]]
        assert len(plan.windowed) == (held[-1] if held else 0) == sum(row.windowed for row in plan.rows)
        assert plan.holds is bool(held)
        assert (plan.judged is None) or plan.judged["high"] <= loss
        sizes[loss] = len(plan.windowed)
    assert sizes[1e-6] == 0
    assert sizes[100.0] == 6
    assert list(sizes.values()) == sorted(sizes.values())


def test_weight_beyond_the_window_is_of_the_key_head(model: nn.Module) -> None:
    plan = plan_of(model, 0.1)
    with locater.observe(model, beyond=(WINDOW, SINKS)) as seen:
        model(input_ids=IDS[:6])
    for row in plan.rows:
        own = [x.beyond for x in seen.rows if (x.layer, x.kv_head) == (row.layer, row.kv_head)]
        assert len(own) == 2
        assert row.beyond == pytest.approx(sum(x or 0.0 for x in own) / 2, abs=EXACT)


def test_the_export_is_read_as_duo_attention_reads_it(model: nn.Module, tmp_path: Path) -> None:
    """Its readers clip the table, and give a window to the share of heads with the lowest scores."""
    plan = plan_of(model, 0.2)
    assert 0 < len(plan.windowed) < 6
    plan.export(tmp_path / "list")
    settings = json.loads((tmp_path / "list" / "config.json").read_text())
    scores = np.clip(np.loadtxt(tmp_path / "list" / "full_attention_heads.tsv", dtype=float, delimiter="\t"), 0, 1)
    assert (settings["sink_size"], settings["recent_size"], scores.shape) == (SINKS, WINDOW, (3, 2))
    count = round(scores.size * settings["head_compression_ratio"])
    places = np.unravel_index(np.argsort(scores, axis=None)[:count], scores.shape)
    assert sorted(zip(*(axis.tolist() for axis in places), strict=True)) == plan.windowed
    assert sorted(map(tuple, np.argwhere(scores < 0.5).tolist())) == plan.windowed
    assert len(np.unique(scores)) == scores.size, "no ties: readers break them at random"


def test_a_repeated_text() -> None:
    batch = repeated({"input_ids": torch.tensor([[1, 5, 6, 7, 8], [1, 4, 3, 2, 9]])})
    assert batch["input_ids"].tolist() == [[1, 5, 6, 5, 6], [1, 4, 3, 4, 3]]
    assert batch["labels"].tolist() == [[-100, -100, -100, 5, 6], [-100, -100, -100, 4, 3]]


def test_the_second_copy_of_a_text(model: nn.Module) -> None:
    plan = plan_of(model, 0.5)
    assert plan.other is not None
    twice = torch.cat([IDS[6:, :12], IDS[6:, :12]], 1)

    def copy_loss(windowed: dict[int, list[int]]) -> Tensor:
        with torch.no_grad(), attends_with(model, windowed):
            logits = model(input_ids=twice).logits
        apart = functional.cross_entropy(logits[:, 11:-1].flatten(0, 1), twice[:, 12:].flatten(), reduction="none")
        return apart.view(6, -1).mean(1)

    assert plan.other["loss"] == pytest.approx(float(copy_loss({}).mean()), abs=EXACT)
    change = copy_loss(query_heads(plan.windowed)) - copy_loss({})
    assert plan.other["change"] == pytest.approx(float(change.mean()), abs=EXACT)
    by_copies = plan_of(model, 0.5, copies=True, measure=True)
    assert by_copies.loss == pytest.approx(float(copy_loss({}).mean()), abs=EXACT)
    assert by_copies.judged is not None
    change = copy_loss(query_heads(by_copies.windowed)) - copy_loss({})
    assert by_copies.judged["change"] == pytest.approx(float(change.mean()), abs=EXACT)
    plain = losses(model, IDS[6:], query_heads(by_copies.windowed)) - losses(model, IDS[6:])
    assert by_copies.other is not None
    assert by_copies.other["change"] == pytest.approx(float(plain.mean()), abs=EXACT)
    with pytest.raises(LocaterError, match="too short for a text that stands twice"):
        plan_of(model, 0.5, copies=True, window=16)


def test_layers_with_a_window_of_their_own_stay() -> None:
    case = next(case for case in CASES if case.label == "gemma3")
    layers = attention_layers(model_of(case))
    own = sorted({layer.window for layer in layers if layer.window is not None})
    assert own, "the case has local layers"
    module = model_of(case).double()
    plan = locater.cache_plan(module, IDS, window=own[-1], sinks=1, loss=100.0, length=24)
    for row in plan.rows:
        assert row.bounded is (layers[row.layer].window is not None)
        assert row.windowed is not row.bounded
    assert "window of their own" in plan.assumptions["notes"][0]


def test_planted_sinks_and_massive_activations() -> None:
    """A first token with a huge entry in one channel, whose key every head looks for."""
    model = llama().double().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1:
                p.normal_(0, 0.02)
            if "q_proj" in name or "k_proj" in name:
                p.zero_()
                p[:, 5] = 1.0 if "q_proj" in name else 40.0
            if name.endswith("embed_tokens.weight"):
                p[:, 5] = 0.02
                p[1, 5] = 4000.0
    ids = torch.randint(3, 60, (2, 20), generator=torch.Generator().manual_seed(1))
    ids[:, 0] = 1
    sinks, massive = sinks_and_massive(model, attention_layers(model), {"input_ids": ids}, 1, str)
    assert [row["first_heads"] for row in sinks] == [4, 4]
    assert all(row["first_weight"] > 0.9 for row in sinks)
    assert all(row["key_step"] > 3 for row in sinks), "the key of the first token is far larger than all others"
    assert all(row["massive"] and row["places"] == [0] and row["channels"][0] == 5 for row in massive)
    assert massive[0]["tokens"] == ["1"]
    plain, none = sinks_and_massive(drawn(llama()), attention_layers(drawn(llama())), {"input_ids": ids}, 1, str)
    assert not any(row["massive"] for row in none)
    assert len(plain) == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"loss": 0.0}, "nats per token"),
        ({"window": 24}, "window hides nothing"),
        ({"window": 0}, "1 key or more"),
        ({"text": IDS[:5]}, "half of them choose"),
    ],
)
def test_what_is_refused(model: nn.Module, change: dict[str, Any], words: str) -> None:
    settings = {"text": IDS, "window": WINDOW, "sinks": SINKS, "length": 24} | change
    with pytest.raises(LocaterError, match=words):
        locater.cache_plan(model, **settings)


def test_models_without_a_cache_are_refused() -> None:
    case = next(case for case in CASES if case.label == "bert")
    with pytest.raises(LocaterError, match="causal"):
        locater.cache_plan(model_of(case), IDS, window=WINDOW, length=24)


def test_keys_without_their_first_are_rounded_more_finely() -> None:
    from locater.calls.head_removal import rounded_keys

    k = torch.tensor([9.0, 0.0, 0.3, 1.0]).view(1, 1, 4, 1)
    real = torch.ones(1, 1, 4, dtype=torch.bool)
    assert rounded_keys(k, real, 1).flatten().tolist() == [9, 0, 0, 0]
    assert rounded_keys(k, real & (real.cumsum(-1) > 1), 1).flatten().tolist() == [9, 0, 0, 1]


def test_the_command(run: Callable[..., Result], tmp_path: Path) -> None:
    files = [tmp_path / "plan.json", tmp_path / "plan.html", tmp_path / "list"]
    options = ["--cache", "--window", 16, "--length", 64, "--tokens", 1024, "--loss", 0.2]
    result = run("probe", DEMO, *options, "--json", files[0], "--report", files[1], "--out", files[2])
    assert result.status == 0, result.err
    document = json.loads(files[0].read_text())
    windowed = sum(row["windowed"] for row in document["key_heads"])
    assert f"{windowed} of 12 key heads can do with the last 16 keys and the first 4" in " ".join(result.out.split())
    assert "Every key head" in files[1].read_text()
    assert sorted(path.name for path in files[2].iterdir()) == ["config.json", "full_attention_heads.tsv"]
    for wrong, words in (
        (["--cache", "--rows", 4], "--cache and --rows exclude each other"),
        (["--cache", "--lengths", "16,32"], "--cache and --lengths exclude each other"),
        (["--out", "x"], "--out goes with --cache"),
        (["--measure"], "--measure goes with --cache"),
        (["--lengths", "16,32", "--copies"], "--copies goes with --cache"),
        (["--lengths", "16,a"], "write numbers of tokens"),
    ):
        result = run("probe", DEMO, *wrong)
        assert (result.status, words in result.err) == (2, True), result.err


def test_it_is_shown_in_eighty_columns(model: nn.Module) -> None:
    for loss in (1e-6, 0.2):
        plan = plan_of(model, loss, measure=loss > 0.1)
        out = io.StringIO()
        plan.show(Console(file=out, width=80))
        assert max(map(len, out.getvalue().splitlines())) <= 80
        assert ("No list of key heads was shown" in " ".join(out.getvalue().split())) is (not plan.holds)
        assert "<svg" in plan._repr_html_()
        assert "Lists that were tried" in plan.page()
