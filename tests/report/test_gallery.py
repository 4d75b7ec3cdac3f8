"""The gallery and the page of five kinds of heads: pages that open, links that lead somewhere, numbers that are measured."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from locater_lab.studies import kinds_of_heads as kinds
from locater_lab.studies.kinds_of_heads import exhibits as models
from locater_lab.train import Shape, Transformer
from tests import ROOT
from tests.report.visits import Visit, needs_browser

sys.path[:0] = [str(ROOT / "scripts")]

import gallery as script  # noqa: E402 - scripts/ is no package


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the demo, of a model without a tokenizer, and of a folder that cannot be read."""
    folder = tmp_path_factory.mktemp("given")
    shutil.copytree(models.DEMO / "twin", folder / "mute")
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text("{}")
    out = folder / "gallery"
    script.gallery([*models.packaged_models()[:1], *models.given_models([folder])], out, tokens=256)
    return out


def links(page: Path) -> list[str]:
    return re.findall(r'(?:href|src)="(?!data:|#)([^"]*)"', page.read_text())


def test_every_link_leads_to_a_page_and_nothing_is_loaded(pages: Path) -> None:
    assert sorted(links(pages / "index.html")) == [
        "demo-probe.html",
        "demo-scan.html",
        "kinds-of-heads.html",
        "mute-scan.html",
    ]
    for page in pages.glob("*.html"):
        assert all((pages / target).is_file() for target in links(page))
        assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//|@import""", page.read_text())


def test_what_is_missing_is_said(pages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (pages / "index.html").read_text()
    assert "No probe: " in text
    assert "no tokenizer there" in text
    assert "<h2>broken</h2>" not in text
    script.gallery(models.given_models([pages.parent / "broken"]), pages.parent / "other")
    assert "broken: left out (" in capsys.readouterr().err
    with pytest.raises(Exception, match="no checkpoint there"):
        models.given_models([pages])


@needs_browser
@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_the_index_opens_and_leads_to_pages_that_open(browser: Any, pages: Path, scheme: str, width: int) -> None:
    visit = Visit(browser, pages / "index.html", scheme, width)
    asked: list[str] = []
    visit.page.on("request", lambda request: asked.append(request.url))
    wide = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    assert visit.page.locator(".card h2").all_text_contents() == ["Demo", "mute"]
    assert visit.page.evaluate(wide)
    for name, heading in (("Scan", "Demo"), ("Probe", "Demo"), ("five kinds of heads", "Five kinds of heads")):
        visit.page.locator(f"a:text-is('{name}')").first.click()
        assert visit.text("h1") == heading
        assert visit.page.evaluate(wide)
        if name.startswith("five"):  # every picture is inside the page and was drawn
            sizes = visit.page.evaluate("[...document.images].map(image => image.naturalWidth)")
            assert len(sizes) == 15
            assert all(sizes)
        visit.page.go_back()
    assert not visit.console
    assert all(url.startswith(("file:", "data:")) for url in asked)


# ---- five kinds of heads ----

RESULTS = ROOT / "docs" / "results" / "kinds-of-heads.json"


def test_the_heads_that_are_shown_are_of_their_kinds() -> None:
    document = json.loads(RESULTS.read_text())["studies"][kinds.STUDY.title]["tables"]
    assert [head["kind"] for head in document["heads"]] == [kind.name for kind in kinds.KINDS]
    for head in document["heads"]:  # each head is of its kind, by the thresholds of the flag table
        assert {
            "sink": head["sink"] > 0.5,
            "previous-token": head["previous"] > 0.5,
            "induction": head["induction"] > 0.5,
            "local": head["distance"] < 2,
            "dead": abs(head["cost"]) < document["idle"],
        }[head["kind"]]
        for weights in (head["weights"]["measured"], head["weights"]["weights alone"]):
            assert sum(x for x in weights if x is not None) == pytest.approx(1, abs=2e-3)


def test_zones_share_out_all_weight() -> None:
    """Against a loop over single weights."""
    torch.manual_seed(0)
    maps = torch.rand(2, 14, 14, dtype=torch.float64).tril()
    maps /= maps.sum(-1, keepdim=True)
    copies = (torch.rand(2, 14, 14) > 0.7).tril()
    for after in (None, copies):
        sums = dict.fromkeys((*kinds.ZONES, kinds.COPY), 0.0)
        for b in range(2):
            for t in range(kinds.FROM, 14):
                for s in range(t + 1):
                    back = t - s
                    near = ("itself", "1 before", "2-4", "2-4", "2-4")[back] if back < 5 else "5+"
                    zone = "first token" if s == 0 else kinds.COPY if after is not None and after[b, t, s] else near
                    sums[zone] += float(maps[b, t, s]) / (2 * (14 - kinds.FROM))
        expected = [sums[zone] for zone in (*kinds.ZONES, *([] if after is None else [kinds.COPY]))]
        assert kinds.weight_by_zone(maps, after) == pytest.approx(expected, abs=1e-9)


def test_a_head_that_is_taken_out_adds_nothing() -> None:
    """Against the same model with the head's output set to zero on its way."""
    torch.manual_seed(0)
    model = Transformer(Shape(width=16, heads=4, kv_heads=4, layers=2, hidden=24)).double().requires_grad_(False)
    ids = torch.randint(256, (2, 9))

    def silence(module: Any, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (inputs[0].clone().index_fill_(-1, torch.arange(8, 12), 0.0),)

    cut = kinds.without_head(model, 1, 2)(ids)
    before = model(ids)
    handle = model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(silence)
    torch.testing.assert_close(cut, model(ids))
    handle.remove()
    assert not torch.allclose(cut, before)


@pytest.mark.slow
def test_the_recipes_grow_heads_of_all_kinds_and_the_whole_gallery_is_made(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["gallery.py", "--out", str(tmp_path / "g"), "--tokens", "512"])
    script.main()
    named = {exhibit.name for exhibit in (*models.packaged_models(), *models.installed_models())} | set(models.RECIPES)
    shown = {name for name in links(tmp_path / "g" / "index.html") if name.endswith("-probe.html")}
    assert shown == {f"{name}-probe.html" for name in named}
    tables, pictures = kinds.make_tables(tmp_path / "g" / "models", [], print)
    assert [head["kind"] for head in tables["heads"]] == [kind.name for kind in kinds.KINDS]
    assert len(pictures) == 15
    assert set(kinds.results_of(tables, pictures).measured) == {claim.id for claim in kinds.CLAIMS}
