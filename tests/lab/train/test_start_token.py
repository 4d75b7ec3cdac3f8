"""`--bos`: a start token in front of every sequence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from locater import LocaterError
from locater.inputs.text import batches
from locater.inputs.tokenizer import ByteTokenizer, StartTokenizer, Tokenizer, make_tokenizer, without_start
from locater_lab.data.word_tokenizer import WordTokenizer
from locater_lab.train import Plan, load, run
from locater_lab.train.data import open_data
from tests.lab.train.test_runs import Cut, cut_at, plan, weights

TEXT = "the head of a layer looks at the token\nbefore it\n" * 9
KINDS = {"bytes": {}, "pairs": {"vocabulary": 260}, "words": {"words": True}}


def tokenizer_of(kind: str) -> Tokenizer:
    return (
        WordTokenizer.from_texts([TEXT]) if kind == "words" else make_tokenizer(256 if kind == "bytes" else 260, [TEXT])
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_saved_tokenizer_puts_it_in_front(kind: str) -> None:
    from tokenizers import Tokenizer as Theirs

    plain = tokenizer_of(kind)
    tokenizer = StartTokenizer(plain)
    theirs, ids = Theirs.from_str(tokenizer.to_json()), plain.encode(TEXT).tolist()
    assert tokenizer.encode(TEXT).tolist() == ids
    assert theirs.encode(TEXT).ids == [plain.size, *ids]
    assert theirs.encode(TEXT, add_special_tokens=False).ids == ids
    assert theirs.id_to_token(plain.size) == "<bos>"
    assert theirs.get_vocab_size() == tokenizer.size == plain.size + 1
    assert json.loads(without_start(tokenizer.to_json())) == json.loads(plain.to_json())
    assert without_start(plain.to_json()) == plain.to_json()


def test_each_token_of_text_is_a_target_once(tmp_path: Path) -> None:
    data: Any = open_data(plan(tmp_path, bos=True), tmp_path, torch.device("cpu"))
    rows = list(data.windows("report"))
    whole = data.splits["report"].long()
    targets = torch.cat([y.flatten() for _, y in rows])
    assert torch.equal(targets, whole[: len(targets)])  # from the first token on
    assert len(whole) - len(targets) < 16
    for inputs, targets in (*rows, data.batch(3)):
        assert inputs.shape[1] == 16
        assert bool((inputs[:, 0] == 256).all())
        assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_the_last_place_to_begin_is_drawn(tmp_path: Path) -> None:
    """A train split of one token more than a sequence has two places to begin."""
    texts = {"corpus": "0123456789abcdefX", "select": "s" * 40, "report": "r" * 40}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    paths = {name: (str(tmp_path / name),) for name in texts}
    data = open_data(plan(tmp_path, bos=True, batch=64, **paths), tmp_path, torch.device("cpu"))
    assert {bytes(row.tolist()).decode() for row in data.batch(0)[1]} == {texts["corpus"][:16], texts["corpus"][1:]}


def test_masked_models_keep_it_in_view(tmp_path: Path) -> None:
    data: Any = open_data(plan(tmp_path, bos=True, task="masked", masked=0.9), tmp_path, torch.device("cpu"))
    whole, seen = data.splits["select"].long(), []
    for inputs, targets in data.windows("select"):
        assert bool((inputs[:, 0] == 256).all())
        assert bool((targets[:, 0] == -100).all())
        assert bool((targets >= 0).any(1).all())
        assert torch.equal(inputs == 257, targets >= 0)
        seen.append(torch.where(targets >= 0, targets, inputs)[:, 1:].flatten())
    assert torch.equal(torch.cat(seen), whole[: len(torch.cat(seen))])
    assert len(whole) - len(torch.cat(seen)) <= 16
    few: Any = open_data(plan(tmp_path, bos=True, task="masked", masked=0.0), tmp_path, torch.device("cpu"))
    assert bool((few.batch(0)[0] == 257).sum(1).eq(1).all())  # one at least, and not the start token


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_with_it_goes_on_exactly_and_reads_text(tmp_path: Path, kind: str) -> None:
    whole = run(plan(tmp_path, bos=True, steps=6, observe=0, **KINDS[kind]))
    cut = plan(tmp_path, bos=True, steps=6, observe=0, out=str(tmp_path / "cut"), **KINDS[kind])
    with pytest.raises(Cut):
        run(cut, cut_at(5))
    assert weights(run(cut)) == weights(whole)
    model, start = load(whole.model), whole.data["vocabulary"] - 1
    assert model.shape.vocabulary == start + 1
    text = (tmp_path / "corpus.txt").read_text()
    (rows,) = (batch["input_ids"] for batch in batches(model, text, tokenizer=whole.model, length=16, tokens=64))
    assert bool((rows[:, 0] == start).all())
    assert bool((rows[:, 1:] < start).all())


def test_tasks_without_it() -> None:
    for task in ("copy", "sort"):
        with pytest.raises(LocaterError, match=f"task={task} has no start token to choose: leave out bos"):
            Plan(task=task, bos=True)


def test_a_literal_start_token_in_the_text_is_text() -> None:
    text = "a <bos> b"
    assert StartTokenizer(ByteTokenizer()).encode(text).tolist() == list(text.encode())
    assert StartTokenizer(WordTokenizer(["a"])).encode(text).tolist() == [2, 0, 0, 1]
