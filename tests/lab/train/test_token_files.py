"""Tokens that processes share: made once, equal to those of a run by itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from locater.inputs.tokenizer import PairTokenizer, make_tokenizer
from locater_lab.data.word_tokenizer import TOKENS_FOLDER, load_or_make, shared_tokens
from locater_lab.train import text_data
from locater_lab.train.plan import Plan


def test_a_second_process_reads_what_the_first_has_made(tmp_path: Path) -> None:
    calls: list[int] = []

    def make() -> list[dict[str, torch.Tensor]]:
        calls.append(1)
        return [{"train": torch.arange(5)}]

    with shared_tokens(tmp_path):
        assert os.environ[TOKENS_FOLDER] == str(tmp_path)
        first, second = load_or_make("a", make), load_or_make("a", make)
        assert torch.equal(first[0]["train"], second[0]["train"])
        assert len(calls) == 1
        load_or_make("b", make)
        assert len(calls) == 2, "another key"
    assert TOKENS_FOLDER not in os.environ
    load_or_make("a", make)
    assert len(calls) == 3, "without a folder nothing is kept"
    assert len(list(tmp_path.iterdir())) == 2


def test_tokens_from_a_file_are_those_of_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = tmp_path / "text.txt"
    corpus.write_text("".join(f"line {i}: some words, and {i * i} more of them\n\n" for i in range(400)))
    plan = Plan(corpus=(str(corpus),), vocabulary=300, length=16)

    def read() -> text_data.TextData:
        for cached in (text_data._pair_tokenizer, text_data.encode_texts):
            cached.cache_clear()
        return text_data.read_text_data(plan, tmp_path / "run", torch.device("cpu"))

    alone = read()
    kept = tmp_path / "kept"
    kept.mkdir()
    with shared_tokens(kept):
        read()
        monkeypatch.setattr(text_data, "make_tokenizer", None)  # from here on neither is trained
        monkeypatch.setattr(PairTokenizer, "encode", None)
        shared = read()
    assert shared.tokenizer.to_json() == alone.tokenizer.to_json()
    assert shared.facts == alone.facts
    assert all(torch.equal(shared.splits[name], alone.splits[name]) for name in alone.splits)


def test_pieces_are_encoded_in_their_order() -> None:
    """More text than one piece, and more pieces than are encoded at the same time."""
    from locater.inputs import tokenizer as module

    text = "".join(f"word{i} " for i in range(3000))
    pairs = make_tokenizer(300, [text])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE", 100)
        patch.setattr(module, "PIECES", 3)
        ids = pairs.encode(text)
    one_by_one = [i for at in range(0, len(text), 100) for i in pairs._tokenizer.encode(text[at : at + 100]).ids]  # type: ignore[attr-defined]
    assert ids.tolist() == one_by_one


def test_a_text_is_read_again_only_where_its_files_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = tmp_path / "text.txt"
    corpus.write_text("".join(f"line {i}: some words, and {i * i} more of them\n\n" for i in range(400)))
    plan = Plan(corpus=(str(corpus),), vocabulary=256, length=16)
    reads: list[int] = []
    read = text_data.read_documents
    monkeypatch.setattr(text_data, "read_documents", lambda paths: reads.append(1) or read(paths))

    def sha256() -> str:
        return str(text_data.read_text_data(plan, tmp_path / "run", torch.device("cpu")).facts["sha256"])

    first = sha256()
    assert sha256() == first
    assert len(reads) == 1
    corpus.write_text(corpus.read_text() + "one line more\n\n")
    assert sha256() != first
    assert len(reads) == 2
