"""Streams of tokens: every token of several parts once, whole documents held out, and files that are what they say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from locater.errors import LocaterError
from locater_lab.train.data import open_data
from locater_lab.train.loop import run
from locater_lab.train.plan import Plan
from locater_lab.train.streams import (  # fmt: skip
    Source,
    StreamData,
    check_stream,
    pack_stream,
    sources_of,
    unpack_stream,
    write_stream,
)

pytest.importorskip("tokenizers")
WORDS = "the quick brown fox jumps over a lazy dog while seven wizards box a quiet jury of apes".split()
VOCABULARY = 280
SOURCES = (Source("pages", ("a.txt", "b.txt"), "\n\n\n", 300, 200), Source("prose", ("c.txt",), "\n\n", 300, 200))


def document(name: str) -> str:
    rng = torch.Generator().manual_seed(sum(map(ord, name)))
    picks = torch.randint(len(WORDS), (25,), generator=rng).tolist()
    return f"{name} " + " ".join(WORDS[i] for i in picks)


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = tmp_path_factory.mktemp("texts")
    for source in SOURCES:
        for file in source.files:
            (texts / file).write_text(source.separator.join(document(f"{file}-{n}") for n in range(12)))
    path = tmp_path_factory.mktemp("stream") / "made.tokens.json"
    write_stream(path, SOURCES, texts, VOCABULARY, path.with_name("made-tokenizer.json"))
    return path


def plan_of(stream: Path, **options: object) -> Plan:
    plain = Plan(
        corpus=(str(stream),), vocabulary=VOCABULARY, layers=1, width=16, heads=2, length=8, batch=4, steps=3,
        checkpoint=0, evaluate=0, observe=0, device="cpu",
    )  # fmt: skip
    return replace(plain, **options)  # type: ignore[arg-type]


def opened(plan: Plan) -> StreamData:
    data = open_data(plan, Path("unused"), torch.device("cpu"))
    assert isinstance(data, StreamData)
    return data


def test_every_token_of_all_parts_is_a_target_once_and_in_order(stream: Path) -> None:
    data = opened(plan_of(stream, batch=1))
    parts = [torch.frombuffer(bytearray((stream.parent / x["file"]).read_bytes()), dtype=torch.int16) for x in check_stream(stream)["parts"] if x["split"] == "train"]  # fmt: skip
    text = torch.cat(parts).long()
    rows = {}
    for index in range(data.rows):
        inputs, targets = data.batch(index)
        assert torch.equal(inputs[0, 1:], targets[0, :-1])
        rows[int(data.order[index])] = targets[0]
    assert sorted(rows) == list(range(data.rows))
    assert torch.equal(torch.cat([rows[i] for i in range(data.rows)]), text[1 : 1 + data.rows * 8])
    assert len(text) - data.rows * 8 <= 8, "only the end of the stream fills no row"


def test_a_seed_draws_the_order_and_nothing_else_does(stream: Path) -> None:
    first, again, other = (opened(plan_of(stream, seed=seed, batch=2)) for seed in (3, 3, 4))
    assert torch.equal(first.order, again.order)
    assert not torch.equal(first.order, other.order)
    narrow = opened(plan_of(stream, seed=3, batch=2, width=32))
    assert torch.equal(first.batch(1)[0], narrow.batch(1)[0])


def test_held_out_documents_are_in_no_other_part(stream: Path) -> None:
    from locater.inputs.tokenizer import PairTokenizer

    description = check_stream(stream)
    tokenizer = PairTokenizer.from_json((stream.parent / description["tokenizer"]["file"]).read_text())._tokenizer
    texts = {}
    for entry in description["parts"]:
        ids = torch.frombuffer(bytearray((stream.parent / entry["file"]).read_bytes()), dtype=torch.int16).tolist()
        texts[entry["source"], entry["split"], entry["file"]] = tokenizer.decode(ids)
    for (_, split, _), text in texts.items():
        if split != "train":
            names = [line.split()[0] for line in text.split("\n") if line.strip()]
            assert len(names) >= 2
            assert not any(name + " " in other for name in names for key, other in texts.items() if key[1] != split)
    data = opened(plan_of(stream))
    assert sources_of(data) == ["pages", "prose"]
    assert torch.equal(data.splits["report"], torch.cat([data.splits["report pages"], data.splits["report prose"]]))


def test_text_is_not_read_twice(stream: Path) -> None:
    rows = opened(plan_of(stream)).rows
    with pytest.raises(LocaterError, match="each of which is seen once"):
        opened(plan_of(stream, steps=rows // 4 + 1))


def test_what_a_stream_does_not_have_is_refused(stream: Path) -> None:
    with pytest.raises(LocaterError, match="leave out other texts"):
        opened(plan_of(stream, bos=True))
    with pytest.raises(LocaterError, match="has a vocabulary of 280"):
        opened(plan_of(stream, vocabulary=300))


def test_a_changed_file_is_refused_and_a_packed_stream_is_the_same(stream: Path, tmp_path: Path) -> None:
    pack_stream(stream, tmp_path / "packed")
    assert unpack_stream(tmp_path / "packed" / stream.name, tmp_path / "here") == check_stream(stream)
    for entry in check_stream(stream)["parts"]:
        assert (tmp_path / "here" / entry["file"]).read_bytes() == (stream.parent / entry["file"]).read_bytes()
    file = tmp_path / "here" / check_stream(stream)["parts"][0]["file"]
    file.write_bytes(file.read_bytes()[:-2] + b"\0\0")
    with pytest.raises(LocaterError, match="missing or changed"):
        check_stream(tmp_path / "here" / stream.name)


@pytest.mark.parametrize("task", ["causal", "masked"])
def test_a_run_on_a_stream_repeats_itself(stream: Path, tmp_path: Path, task: str) -> None:
    first, again = (run(plan_of(stream, task=task, out=str(tmp_path / name))) for name in "ab")
    assert first.report_loss == again.report_loss
    assert first.data["sha256"] == check_stream(stream)["sha256"]
    assert (tmp_path / "a" / "tokenizer.json").is_file()


def test_a_model_without_positions_sees_none(stream: Path, tmp_path: Path) -> None:
    """Without them the last token's output does not depend on the order of those before it, in one layer."""
    from locater_lab.models.transformer import load

    model = load(run(plan_of(stream, positions="none", out=str(tmp_path / "run"))).model)
    tokens = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        assert torch.allclose(model(tokens)[:, -1], model(tokens[:, [2, 0, 1, 3]])[:, -1], atol=1e-5)
