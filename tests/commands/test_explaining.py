"""`explanations()` and `locater explain`: what they gather is the model's own, and bad input is one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import locater
from locater.commands import explaining as explain_parts
from locater.commands.explain_input_and_target import Entries, token_texts
from locater.commands.explaining import explanations
from locater.errors import LocaterError
from locater.inputs.tokenizer import CONFIG, FILE, make_tokenizer
from locater.report.explanation import pack_table, unpack_table
from locater.results.explanations import TokenStream
from locater_lab.engine.trained_models import sentence_model, why_unavailable
from locater_lab.train import Shape, Transformer
from tests.conftest import Result
from tests.observing.test_attention_shares import CHATML, chat_tokenizer, llama

Run = Callable[..., Result]
WORDS = "the cat sat on the mat and the dog ran to the cat because a bird sang in the old tree\n"
PROMPT = "the cat sat on"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny language model with a tokenizer of byte pairs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    shape = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, vocab_size=300)
    config = LlamaConfig(**shape, num_hidden_layers=2, max_position_embeddings=64, initializer_range=0.3)
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / FILE).write_text(make_tokenizer(300, [WORDS * 50]).to_json())
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="module")
def model(saved: Path) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(saved, attn_implementation="eager", dtype=torch.float32).eval()


SIZES = {"layers": 1, "attention_heads": 4, "ffn_dim": 48}


def test_what_is_gathered_is_the_models_own(saved: Path, model: Any) -> None:
    result = explanations(saved, PROMPT)
    ids = torch.tensor([result.streams[0].ids])
    with torch.no_grad():
        out = model(ids, output_attentions=True)
    logits = out.logits[0, -1].double()
    assert result.target.index == int(logits.argmax())
    assert result.target.position == ids.shape[1] - 1
    assert [p.index for p in result.predictions] == logits.topk(8).indices.tolist()
    assert [p.probability for p in result.predictions] == pytest.approx(
        logits.softmax(-1).topk(8).values.tolist(), rel=1e-4
    )
    (operator,) = result.methods
    assert operator.method == "operator"
    assert operator.offset is not None
    assert float(operator.scores.sum()) + operator.offset == pytest.approx(float(logits.max()), rel=1e-3)
    assert sum(row.value for row in result.lengths) == pytest.approx(float(logits.max()), rel=1e-3)
    assert [(row.layer, row.head) for row in result.heads] == [(layer, head) for layer in range(2) for head in range(4)]
    assert len(result.patterns) == 8
    for pattern in result.patterns:
        assert torch.allclose(pattern.weights, out.attentions[pattern.layer][0, pattern.head], atol=1e-5)
    assert "".join(result.streams[0].tokens) == PROMPT
    assert [row["operator"] for row in result.rows] == pytest.approx(operator.scores.tolist())


def test_what_is_lost_without_a_head_is_measured(saved: Path, model: Any) -> None:
    """And estimated: the slope of the target along the output of a head."""
    result = explanations(saved, PROMPT, deletion=False)
    ids = torch.tensor([result.streams[0].ids])
    target = result.target
    assert all(row.effect is not None for row in result.heads)
    for row in result.heads[2:6]:
        with torch.no_grad(), locater.without(model, [(row.layer, row.head)]):
            left = float(model(ids).logits[0, -1, target.index])
        assert row.effect == pytest.approx(target.value - left, abs=1e-4)
        columns = model.model.layers[row.layer].self_attn.o_proj.weight[:, row.head * 8 : (row.head + 1) * 8]
        sides = []
        with torch.no_grad():
            before = columns.clone()
            for scale in (1.05, 0.95):
                columns.copy_(before * scale)
                sides.append(float(model(ids).logits[0, -1, target.index]))
            columns.copy_(before)
        assert row.estimate == pytest.approx((sides[0] - sides[1]) / 0.1, rel=0.02, abs=1e-3)


def test_another_method_where_the_operator_does_not_apply(saved: Path) -> None:
    from transformers import BartConfig, BartForConditionalGeneration

    torch.manual_seed(0)
    sizes: dict[str, Any] = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in SIZES.items()}
    model = BartForConditionalGeneration(BartConfig(d_model=32, vocab_size=512, **sizes)).eval()
    result = explanations(model, "the cat sat", decoder_text=" on the", tokenizer=str(saved), deletion=False)
    assert [method.method for method in result.methods] == ["relevance"]
    assert "left out: operator" in result.assumptions["notes"][0]


def test_the_target_is_the_one_that_was_named(saved: Path, model: Any) -> None:
    vocabulary = json.loads((saved / FILE).read_text())["model"]["vocab"]
    result = explanations(saved, PROMPT, target=" cat", position=1, methods=["paths"])
    assert (result.target.index, result.target.position) == (vocabulary["Ġcat"], 1)
    with torch.no_grad():
        logit = model(torch.tensor([result.streams[0].ids])).logits[0, 1, vocabulary["Ġcat"]]
    assert result.target.value == pytest.approx(float(logit), rel=1e-4)
    assert result.target_name == " cat"
    assert [method.method for method in result.methods] == ["paths"]
    assert explanations(saved, PROMPT, target="17", methods=["paths"]).target.index == 17


def test_a_token_of_another_model_is_named_as_it_is_written() -> None:
    """In the vocabulary of MiniLM pieces inside a word have two signs in front of them."""
    from transformers import AutoTokenizer

    if why := why_unavailable():
        pytest.skip(why)
    tok = AutoTokenizer.from_pretrained(str(sentence_model()))
    entries = Entries(tok)
    assert [entries.name(entries.index(text)) for text in ("fox", "##ing", "[SEP]")] == ["fox", "##ing", "[SEP]"]
    text = "Foxes  jumped, naïvely\n😀 again"
    coded = tok(text, return_offsets_mapping=True)
    tokens = token_texts(tok, text, coded["input_ids"], coded["offset_mapping"])
    assert "".join(tokens[1:-1]) == text.replace(" 😀", "[UNK]").replace("\n😀", "[UNK]")
    assert (tokens[0], tokens[-1]) == ("[CLS]", "[SEP]")


def test_few_patterns_where_there_is_no_room(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = explanations(saved, PROMPT, methods=["paths"])
    size = len(whole.streams[0].tokens) ** 2
    monkeypatch.setattr(explain_parts, "PATTERN_CELLS", 2 * size)
    result = explanations(saved, PROMPT, methods=["paths"])
    best = sorted(whole.heads, key=lambda row: -abs(row.share))[:2]
    assert {(p.layer, p.head) for p in result.patterns} == {(row.layer, row.head) for row in best}
    chosen = explanations(saved, PROMPT, methods=["paths"], heads=[(1, 3)])
    assert [(p.layer, p.head) for p in chosen.patterns] == [(1, 3)]


def tiny(kind: str) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration, ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    if kind == "t5":
        shape = dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=300)
        return T5ForConditionalGeneration(T5Config(**shape, decoder_start_token_id=0)).eval()
    shape = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    return ViTForImageClassification(ViTConfig(**shape, image_size=32, patch_size=8, num_labels=3)).eval()


def test_encoder_and_decoder(saved: Path) -> None:
    """As long as each other: removing a token of one must leave the other as it is."""
    model = tiny("t5")
    result = explanations(model, "the cat sat", decoder_text=" on the", tokenizer=str(saved), methods=["relevance"])
    encoder, decoder = result.streams
    assert (encoder.name, decoder.name) == ("encoder", "decoder")
    assert len(encoder.tokens) == len(decoder.tokens) == 3
    assert decoder.ids is not None
    assert decoder.ids[0] == 0
    model.set_attn_implementation("eager")
    ids = {"input_ids": torch.tensor([encoder.ids]), "decoder_input_ids": torch.tensor([decoder.ids])}
    with torch.no_grad():
        out = model(**ids, output_attentions=True)
    assert result.target.index == int(out.logits[0, -1].argmax())
    cross = next(entry["layer"] for entry in result.layers if entry["kind"] == "cross")
    pattern = next(p for p in result.patterns if (p.layer, p.head) == (cross, 1))
    assert (pattern.queries, pattern.keys) == ("decoder", "encoder")
    assert torch.allclose(pattern.weights, out.cross_attentions[0][0, 1], atol=1e-5)
    curve = result.deletion["relevance"]
    probability = float(out.logits[0, -1].softmax(-1)[result.target.index])
    assert curve.largest_first[0] == pytest.approx(probability, rel=1e-4)
    one = int(result.methods[0].scores.argmax())  # 40 % of three tokens is one
    left = [i for i in range(3) if i != one]
    with torch.no_grad():
        shorter = model(input_ids=ids["input_ids"][:, left], decoder_input_ids=ids["decoder_input_ids"]).logits[0, -1]
    without = float(shorter.softmax(-1)[result.target.index])
    assert curve.largest_first[curve.removed.index(0.4)] == pytest.approx(without, rel=1e-4)
    assert (result.heads, result.lengths) == ([], [])
    assert "cross-attention joins two" in result.assumptions["heads"]


def test_a_picture_in_patches(tmp_path: Path) -> None:
    np.save(tmp_path / "picture.npy", np.random.default_rng(0).integers(0, 255, (1, 32, 32, 3), dtype=np.uint8))
    result = explanations(tiny("vit"), image=tmp_path / "picture.npy", methods=["relevance", "gradient_input"])
    assert result.picture is not None
    assert (result.picture.rows, result.picture.columns, result.picture.before) == (4, 4, 1)
    assert result.streams[0].tokens[:2] == ["[CLS]", "row 1, column 1"]
    pixels = np.load(tmp_path / "picture.npy")[0]
    assert np.abs(result.picture.pixels.numpy().astype(int) - pixels).max() <= 1
    relevance, gradient = ([row[name] for row in result.rows] for name in ("relevance", "gradient_input"))
    assert relevance[0] is not None
    assert gradient[0] is None  # the class token is no part of the picture
    assert None not in gradient[1:]
    assert result.methods[1].ranked()[-1][0] == 0
    assert "nan" not in result.methods[1]._repr_html_()
    result.report(tmp_path / "page.html")
    json.loads(result.to_json(matrices=True))


def test_a_sure_classifier_keeps_its_probabilities(tmp_path: Path) -> None:
    """A probability that rounds to 1 throughout is one all the same: areas of methods must have one unit."""
    np.save(tmp_path / "picture.npy", np.random.default_rng(0).integers(0, 255, (1, 32, 32, 3), dtype=np.uint8))
    model = tiny("vit")
    with torch.no_grad():
        model.classifier.weight *= 1e-3
        model.classifier.bias.copy_(torch.tensor([100.0, 0.0, 0.0]))
    result = explanations(model, image=tmp_path / "picture.npy", methods=["relevance"])
    curve = result.deletion["relevance"]
    assert (curve.of, set(curve.largest_first)) == ("probability", {1.0})


def test_patterns_that_do_not_fit_the_tokens_are_counted(saved: Path, model: Any) -> None:
    layers = [{"layer": i, "name": f"model.layers.{i}.self_attn", "kind": "self", "heads": 4} for i in range(2)]
    run = explain_parts.Run(model, {"input_ids": torch.arange(3)[None]})
    for tokens, patterns, words in ((3, 8, "all of them."), (4, 0, "Those of 8 heads are left out")):
        stream = TokenStream("input", ["a"] * tokens, list(range(tokens)))
        shown, which = explain_parts.head_patterns(run, [stream], layers, [], None)
        assert len(shown) == patterns
        assert words in which


def test_packed_tables_are_off_by_one_part_in_254_of_their_row() -> None:
    table = torch.randn(7, 31, generator=torch.Generator().manual_seed(0)).numpy() * np.logspace(-9, 9, 7)[:, None]
    again = unpack_table(pack_table(table), 7, 31)
    assert (np.abs(again - table).max(1) <= np.abs(table).max(1) / 254 * 1.001).all()
    assert (unpack_table(pack_table(np.zeros((2, 3))), 2, 3) == 0).all()


def test_the_document_and_the_terminal(run: Run, saved: Path, tmp_path: Path) -> None:
    kept = {name: tmp_path / f"found.{name}" for name in ("json", "html")}
    words = ("explain", saved, "--prompt", PROMPT, "--method", "operator,paths")
    result = run(*words, "--json", kept["json"], "--report", kept["html"])
    assert (result.status, result.err) == (0, "")
    document = json.loads(kept["json"].read_text())
    assert (document["schema"], document["source"]) == (1, str(saved))
    assert [method["method"] for method in document["methods"]] == ["operator", "paths"]
    assert "matrix" not in document["methods"][0]
    whole = json.loads(run(*words, "--json", "-", "--matrices").out)
    tokens = len(document["streams"][0]["tokens"])
    assert np.array(whole["methods"][0]["matrix"]).shape == (tokens, tokens)
    assert np.array(whole["patterns"][0]["weights"]).sum(1) == pytest.approx(1)
    shown = " ".join(result.out.split())
    assert "The model's first choice is" in shown
    assert f"at token {tokens - 1}" in shown
    assert "head lost without it estimated share" in shown
    assert "(no token): what starts at no input token: biases, and what MLPs add, which `paths` holds" in shown
    assert "operator: Scores and offset sum to the target" in shown
    assert kept["html"].read_text().startswith("<!doctype html>")


def test_wrong_types_are_one_line(model: Any, saved: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"text": ["a"]}, "the prompt is a list: give one text"),
        ({"position": 1.5}, "position 1.5: give a whole number"),
        ({"target": 4000}, "target 4000: the output has entries 0 to"),
        ({"heads": (0, 1)}, "give pairs of layer and head"),
        ({"heads": [(9, 9)]}, "head 9.9: there is no such head in layers 0 to 1"),
        ({"methods": "magic"}, "method 'magic' is not known"),
        ({"model": 5}, "5 is no model"),
    ]
    for options, message in cases:
        given = {"model": model, "text": PROMPT, "tokenizer": saved, "deletion": False, **options}
        with pytest.raises(LocaterError, match=re.escape(message)):
            explanations(**given)


def test_classes_without_names_are_not_called_by_tokens(saved: Path) -> None:
    """A classifier that `locater train` made has a tokenizer, and an output that is no vocabulary."""
    torch.manual_seed(0)
    shape = Shape(vocabulary=300, layers=1, width=16, heads=2, kv_heads=2, hidden=16, causal=False, classes=3)
    classifier = Transformer(shape).eval()
    options: dict[str, Any] = {"tokenizer": saved, "methods": "rollout", "deletion": False}
    assert {p.name for p in explanations(classifier, PROMPT, **options).predictions} == {
        "class 0",
        "class 1",
        "class 2",
    }
    assert explanations(classifier, PROMPT, target="class 2", **options).target.index == 2


def test_bad_input_is_one_line(run: Run, saved: Path, saved_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text(WORDS * 10)
    cases: list[tuple[list[object], str]] = [
        ([saved], "nothing to explain: give the prompt with --prompt"),
        ([saved, "--prompt", " "], "the prompt is empty"),
        ([saved, "--prompt", PROMPT, "--target", " catbird"], "is not one token of the vocabulary: it splits into ' cat', 'bird"[:50]),
        ([saved, "--prompt", PROMPT, "--target", "4000"], "entries 0 to 299"),
        ([saved, "--prompt", PROMPT, "--position", "99"], "the output has tokens 0 to"),
        ([saved, "--text", tmp_path / "long.txt"], "but the model has 64 positions: shorten it"),
        ([saved, "--prompt", PROMPT, "--text", tmp_path / "long.txt"], "exclude each other"),
        ([saved, "--prompt", PROMPT, "--method", "magic"], "method 'magic' is not known: use"),
        ([saved, "--prompt", PROMPT, "--patterns", "9.9"], "head 9.9: there is no such head in layers 0 to 1"),
        ([saved, "--prompt", PROMPT, "--target", ""], "the target is empty"),
        ([saved, "--prompt", PROMPT, "--target", "\udcff"], "target '\\udcff': not UTF-8 text"),
        ([saved, "--text", PROMPT], "no such file; for the prompt itself give --prompt"),
        ([saved, "--prompt", PROMPT, "--patterns", "0.²"], "write layer.head, such as 3.1,4.0"),
        ([saved, "--prompt", PROMPT, "--patterns", "one"], "write layer.head, such as 3.1,4.0"),
        ([saved, "--prompt", PROMPT, "--decoder-text", "on"], "has no decoder beside an encoder"),
        ([saved, "--image", tmp_path / "none.png"], "names no image size"),
        ([saved_llama, "--prompt", PROMPT], "--tokenizer PATH"),
    ]  # fmt: skip
    for words, message in cases:
        result = run("explain", *words)
        assert (result.status, result.out) == (2, ""), words
        assert message in result.err, (words, result.err)
        assert result.err.count("\n") == 1, (words, result.err)


def test_a_chat_by_its_groups(run: Run, tmp_path: Path) -> None:
    """What heads give to the parts of a chat, and the sums of the scores there."""
    torch.manual_seed(0)
    module, tokenizer = llama(vocab_size=512, max_position_embeddings=256), chat_tokenizer(CHATML, "bytes")
    module.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    said = "Name three rivers of Asia."
    result = locater.explanations(tmp_path / "model", said, chat=True, deletion=False)
    (stream,) = result.streams
    assert "".join(stream.tokens).startswith("<|im_start|>user")
    labels = result.groups["labels"]
    own = "".join(token for token, label in zip(stream.tokens, labels, strict=True) if label == "prompt")
    assert own.strip() == said
    assert set(labels) == {"special", "prompt"}
    groups = locater.token_groups(module, tokenizer)
    with locater.observe(module.eval(), groups=groups) as seen, torch.no_grad():
        module(input_ids=torch.tensor([stream.ids]))
    for name, share in result.groups["attention"].items():
        own_shares = [row.shares[name] for row in seen.groups]
        assert share == pytest.approx(sum(own_shares) / len(own_shares), abs=1e-5)
    page, data = tmp_path / "chat.html", tmp_path / "chat.json"
    shown = run(
        "explain", tmp_path / "model", "--prompt", said, "--chat", "--no-deletion", "--report", page, "--json", data
    )
    assert shown.status == 0, shown.err
    line = next(line.split() for line in shown.out.splitlines() if line.split()[:1] == ["prompt"])
    document = json.loads(data.read_text())
    assert document["groups"]["labels"] == labels
    scores = document["methods"][0]["scores"]["input"]
    total = sum(x for x, label in zip(scores, labels, strict=True) if label == "prompt")
    assert line[:2] == ["prompt", str(labels.count("prompt"))]
    assert float(line[-1]) == pytest.approx(total, abs=0.01 + 0.01 * abs(total))
    assert "even weights over the keys in sight" in page.read_text()
    assert "prompt" in result._repr_html_()


def test_one_group_is_no_table(saved: Path) -> None:
    result = explanations(saved, PROMPT, deletion=False)
    assert result.groups == {}
    assert "even weights" not in result.page()
    with pytest.raises(LocaterError, match="no chat template"):
        explanations(saved, PROMPT, chat=True)
