"""`ablate`: the same numbers as removing heads one by one from the whole model, and what it says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional

import locater
from locater.calls.head_removal import Removal
from locater.cli import app
from locater.commands.ablating import cosine_distances
from locater.discovery import attention_layers
from locater.errors import LocaterError
from locater.explain.replayed_pass import main_output, replayed
from locater.observing.run_model import run_model
from locater.results.ablation import Ablation
from locater_lab.train import Shape, Transformer
from tests.families import CASES
from tests.observing.test_layers_by_calls import tiny
from tests.parity import model_of, tokens

DEMO = Path(str(locater.__file__)).parent / "demo"
BY_LABEL = {case.label: case for case in CASES}
EXACT = 1e-9


def small(**settings: Any) -> nn.Module:
    torch.manual_seed(0)
    shape = Shape(vocabulary=32, layers=3, width=16, heads=2, kv_heads=2, hidden=24, **settings)
    return Transformer(shape, scale=0.5).double().eval()


IDS = torch.randint(32, (5, 12), generator=torch.Generator().manual_seed(0))


def losses(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        logits = model(ids)
    apart = functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return apart.view(len(ids), -1).mean(1)


@pytest.mark.parametrize("mode", ["zero", "mean", "uniform", "window", "bits"])
def test_every_head_is_removed_from_the_whole_model(mode: str) -> None:
    model, options = small(), {"window": 2, "sinks": 1, "bits": 2}
    found = locater.ablate(model, [{"input_ids": IDS}], mode=mode, **options)  # type: ignore[arg-type]
    before = losses(model, IDS)
    assert found.loss == pytest.approx(float(before.mean()), rel=EXACT)
    assert [row.heads for row in found.rows] == [[(layer, head)] for layer in range(3) for head in range(2)]
    for row in found.rows:
        with locater.without(model, row.heads, mode, **options):  # type: ignore[arg-type]
            change = losses(model, IDS) - before
        assert row.change == pytest.approx(float(change.mean()), abs=EXACT)
        low, high = stats.t.interval(0.95, 4, change.mean(), change.std() / 5**0.5)
        assert (row.low, row.high) == pytest.approx((float(low), float(high)), abs=EXACT)


def test_a_compiled_model_gives_the_same_numbers() -> None:
    """Its code is run without the compiler: each removal would be another graph."""
    model = small()
    found = locater.ablate(model, [{"input_ids": IDS}])
    compiled = locater.ablate(torch.compile(model, backend="eager"), [{"input_ids": IDS}])  # type: ignore[arg-type]
    model.compile(backend="eager")
    in_place = locater.ablate(model, [{"input_ids": IDS}])
    assert found.by_head == compiled.by_head == in_place.by_head


def test_pairs_and_layers() -> None:
    model = small()
    found = locater.ablate(model, IDS, [(2, 1), [(0, 1), (2, 0)], 1, "all"])
    assert [row.name for row in found.rows] == ["2.1", "0.1+2.0", "layer 1", "all heads"]
    assert len(found.rows[3].heads) == 6
    for row in found.rows:
        with locater.without(model, row.heads):
            assert row.change == pytest.approx(float(losses(model, IDS).mean()) - found.loss, abs=EXACT)


# every way of running: a stack of blocks, encoder and decoder, a module at many depths, time first, no known interface
@pytest.mark.parametrize(
    "label", "llama gpt2 bert albert albert-groups t5 whisper xlnet mpnet falcon vit clip torch-transformer-pre".split()
)
def test_the_rest_of_a_model_goes_on_from_what_it_had(label: str) -> None:
    """Replayed from a layer on, several removals at once: as removed from the whole model."""
    model, batch = model_of(BY_LABEL[label]), BY_LABEL[label].batch()
    layers = attention_layers(model)
    last = len(layers) - 1
    sets = [{last: (0,)}, {last: (layers[last].heads - 1,)}, {last: (0,), 0: (1,)}]
    how = Removal()
    with replayed(model, batch, 3) as (replay, _, _):
        assert replay.can_skip
        assert replay.most == (1 if label == "clip" else 3)  # its output compares the texts of a batch with its images
        groups = [sets] if replay.most == 3 else [[heads] for heads in sets]
        got = torch.cat([_output(replay.replay(heads, how)[0]) for heads in groups]).chunk(3)
    for heads, output in zip(sets, got, strict=True):
        pairs = [(layer, head) for layer in heads for head in heads[layer]]
        with locater.without(model, pairs):
            whole = _output(run_model(model, batch))
        assert float((output - whole).norm() / whole.norm()) < EXACT, pairs


def _output(out: Any) -> Tensor:
    output = main_output(out)
    assert output is not None
    return output.nan_to_num()


def test_a_model_without_a_record() -> None:
    model, batch = tiny("glm")
    found = locater.ablate(model, [batch])
    assert found.measure == "distance"
    assert found.loss is None
    plain = _output(run_model(model, batch))
    for row in found.rows:
        with locater.without(model, row.heads):
            apart = cosine_distances(_output(run_model(model, batch)), plain, batch.get("attention_mask"))
        assert row.change == pytest.approx(float(apart.mean()), abs=EXACT)


def test_a_batch_with_labels_has_the_loss_of_the_labels() -> None:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=64)
    model = BertForSequenceClassification(BertConfig(**sizes, num_labels=3)).double().eval()
    batch = {**tokens(), "labels": torch.tensor([2, 0])}
    found = locater.ablate(model, [batch], [(1, 0)])
    with torch.no_grad():
        assert found.loss == pytest.approx(float(model(**batch).loss), rel=EXACT)
        with locater.without(model, [(1, 0)]):
            assert found.rows[0].change == pytest.approx(float(model(**batch).loss) - found.loss, abs=EXACT)


def test_padding_counts_for_nothing() -> None:
    model: Any = model_of(BY_LABEL["llama"])
    padded, ids = tokens(), tokens()["input_ids"]
    found = locater.ablate(model, [padded], [(1, 0)])
    with torch.no_grad():
        logits = model(**padded).logits
    rows = [slice(0, None), slice(3, None)]
    by_hand = [functional.cross_entropy(logits[i, at][:-1], ids[i, at][1:]) for i, at in enumerate(rows)]
    assert found.loss == pytest.approx(float(torch.stack(by_hand).mean()), rel=EXACT)


def test_blocks_before_a_removal_do_not_run() -> None:
    """The pass is recorded, tried from its middle, and run from the last block on, both removals at once."""
    model: Any = small()
    ran: list[int] = []
    for number, block in enumerate(model.model.layers):
        block.mlp.register_forward_hook(lambda *_, number=number: ran.append(number))
    locater.ablate(model, [{"input_ids": IDS}], [(2, 0), (2, 1)])
    assert ran == [0, 1, 2, 1, 2, 2]


@pytest.mark.parametrize(
    ("heads", "words"),
    [([(3, 0)], "layer 3: there are 3"), ([(0, 2)], "head 0.2: layer 0 has 2"), ([], "no head"), (["x"], "give pairs")],
)
def test_heads_that_are_not_there(heads: Any, words: str) -> None:
    with pytest.raises(LocaterError, match=words):
        locater.ablate(small(), IDS, heads)


@pytest.fixture(scope="module")
def found() -> Ablation:
    return locater.ablate(small(), IDS)


def test_the_document_is_all_that_is_shown(found: Ablation) -> None:
    from locater.report.ablation import ablation_in_notebook, ablation_page, map_of_changes

    document = json.loads(found.to_json())
    assert document["measure"] == "loss"
    assert len(document["removals"]) == 6
    page = ablation_page(document)
    assert page == found.page()
    assert page.count("<rect") > 12
    assert "of the time of the blocks in a pass" in page
    assert found._repr_html_() == ablation_in_notebook(document)
    assert map_of_changes(document).values[1, 0] == found.by_head[1, 0]


def test_the_command(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    path, text = tmp_path / "a.json", tmp_path / "text.txt"
    text.write_text("Attention heads move what one token knows to where another one needs it. " * 8)
    arguments = [
        "ablate",
        str(DEMO),
        "--text",
        str(text),
        "--remove",
        "1.0,0.1+1.1,1,all",
        "--tokens",
        "64",
        "--length",
        "16",
    ]
    got = CliRunner().invoke(app, [*arguments, "--json", str(path), "--report", str(tmp_path / "a.html")])
    assert got.exit_code == 0, got.output
    assert [row["name"] for row in json.loads(path.read_text())["removals"]] == [
        "1.0",
        "0.1+1.1",
        "layer 1",
        "all heads",
    ]
    assert "0.1+1.1" in (tmp_path / "a.html").read_text()
    wrong = CliRunner().invoke(app, ["ablate", str(DEMO), "--remove", "1-0"])
    assert isinstance(wrong.exception, LocaterError)
    assert "write layer.head" in str(wrong.exception)
