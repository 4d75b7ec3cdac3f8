"""docs/schema: documents that commands wrote fit their JSON Schema, damaged ones do not, and no column is missing."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch import nn

import locater
from locater.results.document import LAYER
from locater.results.probe import ProbeRow
from locater.results.scan import HeadRow
from locater_lab.models.shape import Shape
from locater_lab.train import Result, Transformer
from tests.golden.comparing import DIGEST
from tests.golden.documents import DOCUMENTS, FILES
from tests.golden.keys import RENAMED

SCHEMAS = {
    path.name.split(".")[0]: json.loads(path.read_text())
    for path in (Path(__file__).parents[2] / "docs" / "schema").glob("*")
}
DEMO = Path(str(locater.__file__)).parent / "demo"
GOLDEN = [document for document in DOCUMENTS if document.kind in SCHEMAS]


def faults(kind: str, document: Any) -> list[str]:
    errors = jsonschema.Draft202012Validator(SCHEMAS[kind]).iter_errors(document)
    return [f"{error.json_path}: {error.message:.200}" for error in errors]


def as_written(kind: str, golden: dict[str, Any]) -> dict[str, Any]:
    """A golden document with what is not stored in it: versions and paths, keys added since, lists kept as digests."""
    document = {"locater": "0.1.0", "source": "here", **golden}
    if kind == "compare":
        document |= {"source": ["a", "b"], "changes": {"columns": {}, "heads": []}}
    if kind == "probe":
        names = {old.rpartition(".")[2]: new.rpartition(".")[2] for old, new in RENAMED["probe"].items()}
        added = {"skip_induction": None, "pair_induction": None}
        heads = [{names.get(key, key): value for key, value in head.items()} | added for head in document["heads"]]
        document |= {"schema": 2, "roles": {}, "heads": heads}
    for head in document.get("heads", []):
        for key in [key for key, value in head.items() if isinstance(value, dict) and DIGEST in value]:
            del head[key]
    return document


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda document: document.name)
def test_golden_documents_fit(golden: Any) -> None:
    document = golden.golden()
    assert not faults(golden.kind, as_written(golden.kind, document["result"] if golden.kind == "train" else document))
    if golden.kind == "train":
        assert not faults("scan", as_written("scan", document["scan"]))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One new document of each kind, as it would stand in a file, with every optional part that is cheap."""
    torch.manual_seed(0)
    model = Transformer(Shape(vocabulary=32, layers=2, width=16, heads=2, kv_heads=2, length=32)).eval()
    again = tmp_path_factory.mktemp("again")
    for file in DEMO.glob("*.*"):
        (again / file.name).write_bytes(file.read_bytes())
    documents = {
        "scan": locater.scan(DEMO, eigenvalues=True, values=True).with_details().to_dict(),
        "probe": locater.probe(model, torch.randint(32, (512,)), length=32).to_dict(),
        "compare": locater.compare(DEMO, DEMO / "twin", again).to_dict(),
        "ablate": locater.ablate(model, torch.randint(32, (64,)), [(0, 1), 1], length=32).to_dict(),
        "train": Result.from_dict(json.loads((FILES / "finished" / "result.json").read_text())).to_dict(),
    }
    return json.loads(json.dumps(documents, allow_nan=False))


@pytest.mark.parametrize("kind", SCHEMAS)
def test_new_documents_fit(kind: str, written: dict[str, Any]) -> None:
    assert not faults(kind, written[kind])


def test_heads_without_numbers_fit() -> None:
    """A head with NaN weights, and cross-attention: most columns are null."""
    block = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, batch_first=True), 1)
    with torch.no_grad():
        block.layers[0].self_attn.in_proj_weight[0, 0] = float("nan")
    document = locater.scan(block).to_dict()
    assert any(head["M"] is None and "nonfinite" in head["flags"] for head in document["heads"])
    assert any(head["kind"] == "cross" for head in document["heads"])
    assert not faults("scan", json.loads(json.dumps(document, allow_nan=False)))


def test_ablations_without_a_loss_and_by_one_sequence_fit() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 1, enable_nested_tensor=False)
    document = locater.ablate(encoder, [{"src": torch.randn(1, 4, 16)}]).to_dict()
    assert document["measure"] == "distance"
    assert document["loss"] is None
    assert document["removals"][0]["low"] is None
    assert not faults("ablate", json.loads(json.dumps(document, allow_nan=False)))


def places(document: Any, schema: dict[str, Any], root: dict[str, Any]) -> Iterator[tuple[Any, str, bool]]:
    """Every object of a document with each of its keys that the schema knows, and whether it has to be there."""
    schema = root["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    if isinstance(document, dict):
        for key, part in schema.get("properties", {}).items():
            if key in document:
                yield document, key, key in schema.get("required", ())
                yield from places(document[key], part, root)
    elif isinstance(document, list) and document and "items" in schema:
        yield from places(document[0], schema["items"], root)


@pytest.mark.parametrize("kind", SCHEMAS)
def test_a_damaged_document_does_not_fit(kind: str, written: dict[str, Any]) -> None:
    """Every value that the schema names, of another type; every key that has to be there, taken away."""
    document, tried = copy.deepcopy(written[kind]), 0
    for holder, key, required in list(places(document, SCHEMAS[kind], SCHEMAS[kind])):
        value = holder[key]
        holder[key] = [{"of": "another type"}] if not isinstance(value, list) else "another type"
        assert faults(kind, document), f"{key} = {holder[key]}"
        del holder[key]
        assert bool(faults(kind, document)) == required, f"without {key}"
        holder[key] = value
        tried += 1
    assert document == written[kind]
    assert tried >= 20


def test_another_schema_does_not_fit(written: dict[str, Any]) -> None:
    for kind, document in written.items():
        assert faults(kind, {**document, "schema": document["schema"] + 1}), kind


@pytest.mark.parametrize(
    ("kind", "row", "more"), [("scan", HeadRow, {"faults"}), ("probe", ProbeRow, {"faults", "role"})]
)
def test_every_column_is_in_the_schema(kind: str, row: type[Any], more: set[str]) -> None:
    assert set(SCHEMAS[kind]["$defs"]["head"]["properties"]) == {field.name for field in fields(row)} | more


@pytest.mark.parametrize("kind", ["scan", "compare"])
def test_every_key_of_a_layer_is_in_the_schema(kind: str) -> None:
    assert set(SCHEMAS[kind]["$defs"]["layer"]["properties"]) == set(LAYER)
