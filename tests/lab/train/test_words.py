"""Words as tokens: beside the tokenizers package and a count by hand; runs with them."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import locater
from locater import LocaterError
from locater.commands.explain_input_and_target import Entries
from locater_lab.data.word_tokenizer import WordTokenizer
from locater_lab.train import Plan, load, run
from locater_lab.train.data import open_data
from tests.lab.train.test_runs import Cut, cut_at, plan, weights

# every kind of white space, blank lines, literal special tokens (alone and within words), a rare word
TEXT = "the cat <unk> sat\n\n  a\xa0cat\u3000the\tthe\x1ccat\x1f \x85dog\n<eos> x<unk>y naïve 🙂 (the \u2028 cat)\r\n \nend\n"


def saved(tokenizer: WordTokenizer) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_str(tokenizer.to_json())


def test_tokens_are_those_of_the_tokenizers_package() -> None:
    tokenizer = WordTokenizer.from_texts([TEXT], 4)
    assert saved(tokenizer).encode(TEXT).ids == tokenizer.encode(TEXT).tolist()
    assert saved(tokenizer).get_vocab_size() == tokenizer.size == 6
    assert saved(tokenizer).encode("the cat").tokens == ["the", "cat"]  # a prompt may stop within a line


def test_words_by_hand() -> None:
    tokenizer = WordTokenizer.from_texts([TEXT])
    lines = [line.split() for line in TEXT.split("\n")[:-1]]
    counts = Counter(word for line in lines for word in line if word not in ("<unk>", "<eos>"))
    assert [*tokenizer.ids][:4] == ["<unk>", "<eos>", *(word for word, _ in counts.most_common(2))]
    assert {*tokenizer.ids} == {"<unk>", "<eos>", *counts}
    words = {number: word for word, number in tokenizer.ids.items()}
    expected = [word for line in lines for word in (*line, "<eos>")]
    assert [words[number] for number in tokenizer.encode(TEXT).tolist()] == expected
    assert torch.equal(tokenizer.encode(TEXT[:-1]), tokenizer.encode(TEXT))  # a last line without a break is ended too
    assert tokenizer.encode("").tolist() == []
    assert tokenizer.encode("\n").tolist() == [1]


def test_the_most_frequent_are_kept_and_the_first_of_equals() -> None:
    tokenizer = WordTokenizer.from_texts(["b a c a", "d c c b"], 2)
    assert [*tokenizer.ids] == ["<unk>", "<eos>", "c", "b"]
    assert tokenizer.unknown("c d d <unk> e") == 3
    assert WordTokenizer.from_texts(["b a"], 9).size == 4


def test_a_run_with_words_goes_on_exactly(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"words": True, "vocabulary": 7, "steps": 6, "observe": 0}
    whole = run(plan(tmp_path, **settings))
    again = plan(tmp_path, **settings, out=str(tmp_path / "cut"))
    with pytest.raises(Cut):
        run(again, cut_at(5))
    assert weights(run(again)) == weights(whole)
    assert load(whole.model).shape.vocabulary == whole.data["vocabulary"] == 9


def test_the_loss_is_that_of_words(tmp_path: Path) -> None:
    """Perplexity is per word and end of line; bits per byte only where no word of the report split is unknown."""
    whole, few = (
        run(plan(tmp_path, words=True, vocabulary=n, steps=2, observe=0, out=str(tmp_path / str(n)))) for n in (0, 3)
    )
    data = open_data(whole.plan, tmp_path, torch.device("cpu"))
    model, losses = load(whole.model), []
    with torch.no_grad():
        for inputs, targets in data.windows("report"):
            picked = model(inputs).double().log_softmax(-1).gather(-1, targets[..., None])
            losses.append(-picked.flatten())
    assert whole.perplexity == pytest.approx(math.exp(float(torch.cat(losses).mean())), rel=1e-5)
    assert whole.data["vocabulary"] == 2 + len({*(tmp_path / "corpus.txt").read_text().split()})
    assert whole.data["unknown"] == {"train": 0, "select": 0, "report": 0}
    bits = whole.report_loss / math.log(2) * whole.data["tokens"]["report"] / whole.data["bytes"]["report"]
    assert whole.bits_per_byte == pytest.approx(bits)
    assert few.data["unknown"]["report"] > 0
    assert few.bits_per_byte is None


def test_the_model_is_probed_on_text(tmp_path: Path) -> None:
    """By the saved tokenizer: the same numbers as on the tokens that it was trained on."""
    result = run(plan(tmp_path, words=True, steps=2, observe=0))
    text = (tmp_path / "corpus.txt").read_text()
    ids = WordTokenizer.from_texts([text]).ids  # in another order than those of the train split: only the words count
    tokenizer = open_data(result.plan, tmp_path, torch.device("cpu")).tokenizer  # type: ignore[attr-defined]
    assert {*tokenizer.ids} == {*ids}
    rows = [
        locater.probe(result.model, given, length=16, tokens=256).rows
        for given in (text, tokenizer.encode(text).long())
    ]
    assert [row.entropy for row in rows[0]] == [row.entropy for row in rows[1]]


def test_words_of_masked_models_and_classes(tmp_path: Path) -> None:
    masked = run(plan(tmp_path, words=True, task="masked", steps=2, observe=0))
    assert load(masked.model).shape.vocabulary == masked.data["vocabulary"] + 1  # the mask
    other = tmp_path / "other.txt"
    other.write_text("one two three\n\n" * 400)
    texts = (str(tmp_path / "corpus.txt"), str(other))
    classes = run(
        plan(tmp_path, words=True, task="classify", corpus=texts, steps=2, observe=0, out=str(tmp_path / "classes"))
    )
    known = {*(tmp_path / "corpus.txt").read_text().split(), *other.read_text().split()}
    assert classes.data["vocabulary"] == 2 + len(known)


def test_a_word_that_is_not_in_the_vocabulary_is_no_target() -> None:
    from transformers import PreTrainedTokenizerFast

    entries = Entries(tokenizer=PreTrainedTokenizerFast(tokenizer_object=saved(WordTokenizer(["a", "cat"]))))
    assert (entries.index("cat"), entries.index("<unk>")) == (3, 0)
    with pytest.raises(LocaterError, match="target 'dog' is not one token of the vocabulary"):
        entries.index("dog")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"words": True, "vocabulary": 256}, "256 are bytes: give --vocabulary 0 for all words"),
        ({"words": True, "vocabulary": -1}, "vocabulary=-1: must be at least 0"),
        ({"words": True, "task": "sort"}, "task=sort has no text: leave out words"),
        ({"vocabulary": 0}, "vocabulary=0: must be at least 256"),
    ],
)
def test_plans_that_make_no_sense(given: dict[str, Any], message: str) -> None:
    with pytest.raises(LocaterError, match=message):
        Plan(**given)


def test_the_default_vocabulary_is_that_of_the_kind() -> None:
    assert (Plan().vocabulary, Plan(words=True).vocabulary) == (256, 0)
    assert Plan.from_json('{"words": true}') == Plan(words=True)
    assert Plan.from_json(Plan(words=True, vocabulary=9).to_json()).vocabulary == 9
