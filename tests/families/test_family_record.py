"""One record teaches every room: the made-up model of docs/add-a-family.md, taught by its one FAMILY."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import locater
from locater import Block, Family, LocaterError
from locater.control import LocAteR, QKClip, Surgery
from locater.families import registry
from locater.families.record import BlockModules
from tests import ROOT

PAGE = ROOT / "docs" / "add-a-family.md"
CONFIG = {"model_type": "my_model", "dim": 32, "n_heads": 4, "vocab_size": 64}

pytestmark = pytest.mark.usefixtures("detached")


@pytest.fixture
def page() -> Iterator[dict[str, Any]]:
    """Names that the page defines, after all its code has run, checks included."""
    text = PAGE.read_text()
    names: dict[str, Any] = {}
    try:
        for title in ("The model", "Its record", "Verify it"):
            section = re.split(r"(?m)^## ", text.partition(f"## {title}\n")[2])[0]
            code = "\n".join(line for line in section.splitlines() if not line or line.startswith("    "))
            exec(compile(dedent(code), f"{PAGE.name}, {title}", "exec"), names)
        yield names
    finally:
        registry.BY_TYPE.remove("my_model")


@pytest.fixture
def model(page: dict[str, Any]) -> Any:
    torch.manual_seed(1)
    made = page["Model"](CONFIG).double()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


def ids() -> Tensor:
    return torch.randint(64, (3, 12), generator=torch.Generator().manual_seed(2))


def test_scan_and_probe(model: Any) -> None:
    assert [row.layer for row in locater.scan(model).rows] == [0] * 4 + [1] * 4
    text = torch.randint(64, (6, 32), generator=torch.Generator().manual_seed(3))
    probe = locater.probe(model, text)
    assert len(probe.rows) == 8
    assert all(row.entropy is not None and row.entropy > 0 for row in probe.rows)


def test_observe(model: Any) -> None:
    """Against the maps of the layers, at both depths; the tap leaves nothing behind."""
    before = {path: set(vars(module)) for path, module in model.named_modules()}
    plain = model(ids())
    with locater.observe(model) as seen, locater.observe(model, layers=[1]) as too:
        assert torch.equal(model(ids()), plain)
    assert {path: set(vars(module)) for path, module in model.named_modules()} == before
    stream = model.embed(ids())
    for layer, block in zip(locater.attention_layers(model), model.blocks, strict=True):
        entropy = torch.special.entr(layer.attention(stream)).sum(-1).mean((0, 2))
        rows = [row for row in seen.rows if row.layer == layer.index]
        torch.testing.assert_close(torch.tensor([row.entropy for row in rows]), entropy.float(), rtol=1e-5, atol=1e-6)
        stream = block(stream)
    assert [row.entropy for row in too.rows] == [row.entropy for row in seen.rows[4:]]


@torch.no_grad()
@pytest.mark.parametrize(
    "cuts", [{"no_skip": True}, {"no_mlp": True}, {"no_norm": True}, {"no_skip": True, "no_mlp": True, "no_norm": True}]
)
def test_surgery(model: Any, cuts: dict[str, bool]) -> None:
    x, plain = model.embed(ids()), model(ids())
    for block in model.blocks:
        calm1, calm2 = (nn.Identity(), nn.Identity()) if cuts.get("no_norm") else (block.calm1, block.calm2)
        y = block.attn(calm1(x))
        y = y if cuts.get("no_skip") else x + y
        x = y if cuts.get("no_mlp") else y + block.think(calm2(y))
    control = Surgery(**cuts).attach(model)  # type: ignore[arg-type]
    torch.testing.assert_close(model(ids()), model.last(x) @ model.embed.weight.T, rtol=1e-12, atol=1e-12)
    control.detach()
    assert torch.equal(model(ids()), plain)


@pytest.mark.parametrize("mlp", ["source", "linear"])
def test_explain(model: Any, mlp: Any) -> None:
    paths = locater.explain.decompose(model, ids(), mlp=mlp)
    assert paths.gap < 1e-12
    torch.testing.assert_close(
        paths.by_length().total.sum(0) @ model.embed.weight.T, model(ids()), rtol=1e-10, atol=1e-10
    )
    assert paths.through_heads().norm.shape == (2, 4)


def test_controls(model: Any) -> None:
    """A step with LocAteR's penalty, and logits clipped to a limit."""
    other = copy.deepcopy(model)
    for one, control in ((model, LocAteR(shrink=0.1, hold=0.1, target=2.0).attach(model)), (other, None)):
        optimizer = torch.optim.SGD(one.parameters(), 0.01)
        loss = nn.functional.cross_entropy(one(ids())[:, :-1].flatten(0, 1), ids()[:, 1:].flatten())
        (loss if control is None else loss + control.loss()).backward()
        optimizer.step()
        if control is not None:
            control.after_step()
            control.detach()
    assert not torch.equal(model.blocks[0].attn.wqkv.weight, other.blocks[0].attn.wqkv.weight)
    assert torch.equal(model.blocks[1].think.fall.weight, other.blocks[1].think.fall.weight)

    with locater.observe(model) as seen:
        model(ids())
    limit = 0.5 * max(row.max_logit for row in seen.rows)
    clip = QKClip(limit).attach(model)
    model(ids())
    clip.after_step()
    clip.detach()
    assert clip.clipped
    with locater.observe(model, layers=[0]) as after:
        model(ids())
    assert max(row.max_logit for row in after.rows) <= limit * (1 + 1e-6)


# The record itself


def test_without_a_block_or_a_tap_what_needs_them_is_refused(page: dict[str, Any], model: Any) -> None:
    locater.register(Family("my_model", page["layers"]))
    assert len(locater.scan(model).rows) == 8
    with pytest.raises(
        LocaterError, match=r"Surgery: Model \(model type 'my_model'\): its blocks are not known: describe"
    ):
        Surgery(no_skip=True).attach(model)
    with pytest.raises(
        LocaterError, match="Model: model_type 'my_model' is not split into linear steps: describe its blocks"
    ):
        locater.explain.decompose(model, ids())
    with pytest.raises(LocaterError, match="nothing was observed"), locater.observe(model):
        model(ids())


def test_a_wrong_block_is_noticed(page: dict[str, Any], model: Any) -> None:
    wrong = Block(
        attention="attn", norm="rms", before_attention="calm1", before_mlp="calm2", mlp="talk", stack="blocks"
    )
    locater.register(Family("my_model", page["layers"], wrong, page["tap"]))
    with pytest.raises(LocaterError, match=r"blocks\.0\.talk, which its family names, is not there"):
        Surgery(no_mlp=True).attach(model)
    with pytest.raises(LocaterError, match="its paths sum to its output only within"):
        locater.explain.decompose(model, ids())
    locater.register(Family("my_model", page["layers"], Block(attention="attention"), page["tap"]))
    with pytest.raises(
        LocaterError, match=r"blocks\.0\.attn: the record of its block says that attention is called attention"
    ):
        Surgery(no_skip=True).attach(model)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Family((), lambda weights, config: iter(())), r"Family: model_types=\(\): one name or more"),
        (lambda: Block("attn", parallel=True, after_mlp="norm"), "Block: a parallel block has norms in front of"),
        (lambda: locater.register("my_model"), "register: 'my_model' is no Family"),
    ],
)
def test_bad_records_are_one_line(make: Any, said: str) -> None:
    with pytest.raises(LocaterError, match=said) as refused:
        make()
    assert "\n" not in str(refused.value)


def test_the_first_alternative_that_is_there_is_taken(model: Any) -> None:
    modules = BlockModules(locater.sources.weights.ModuleWeights(model), "blocks.0")  # type: ignore[attr-defined]
    assert modules.find(("calm0", "calm2", "calm1")) == "blocks.0.calm2"
    assert modules.find("") == "blocks.0"
    assert modules.find("calm0") is modules.find(None) is None
    with pytest.raises(KeyError, match=r"blocks\.0\.calm9"):
        modules.module(("calm0", "calm9"))
