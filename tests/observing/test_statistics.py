"""Statistics of attention inputs against numpy on what the layers really read; from text to batches; what is
refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import locater
from locater import LocaterError, Statistics, statistics
from locater.discovery import attention_layers
from locater.inputs.text import batches
from locater.observing.input_covariances import SAMPLE, statistics_of_batches
from locater.observing.run_model import run_model
from locater.predict.statistics_file import Input
from tests.families import CASES
from tests.parity import Case, model_of, record

FAMILIES = [
    "llama", "gpt2", "gemma3", "opt", "opt-post-norm", "bloom", "falcon", "deepseek_v3", "olmo2",  # decoders
    # padded encoders
    "bert", "roberta", "distilbert", "mpnet", "deberta_v2", "xlnet", "torch-encoder-pre", "torch-encoder-post",
    "roberta-cross", "t5", "bart", "whisper", "torch-transformer-pre", "torch-transformer-post",  # pairs
    "vit", "dinov2_with_registers", "clip", "siglip", "timm",  # towers
]  # fmt: skip


def case_of(label: str) -> Case:
    return next(c for c in CASES if c.label == label)


def as_keywords(label: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch of a case as `model(**batch)` takes it."""
    if not label.startswith("torch-encoder"):
        return batch
    return {"src": batch["src"], "src_key_padding_mask": batch["attention_mask"] == 0}


def real_of(batch: dict[str, Tensor], key: str | None, x: Tensor) -> np.ndarray[Any, Any]:
    return (batch[key].bool() if key in batch else torch.ones(x.shape[:2], dtype=torch.bool)).numpy()


def moments(tokens: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    return tokens.mean(0), np.cov(tokens.T, bias=True).reshape(tokens.shape[1], -1)


def close(ours: Tensor | None, expected: np.ndarray[Any, Any]) -> None:
    """To the rounding of float32, in which statistics are kept."""
    assert ours is not None
    np.testing.assert_allclose(ours.double().numpy(), expected, rtol=0, atol=1e-6 * np.abs(expected).max())


def split(x: np.ndarray[Any, Any], real: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """First real tokens (B, d), and the others (n, d), sequence by sequence."""
    rows = [sequence[kept] for sequence, kept in zip(x, real, strict=True)]
    return np.stack([row[0] for row in rows]), np.concatenate([row[1:] for row in rows])


# ---- against numpy ----


@pytest.mark.parametrize("label", FAMILIES)
@torch.no_grad()
def test_moments_are_those_of_what_the_layer_reads(label: str) -> None:
    case = case_of(label)
    model, batch = model_of(case), case.batch()
    layers = list(attention_layers(model))
    seen = {
        site.attention: here
        for site, here in zip(case.sites, record(case, model, case.implementations[0]), strict=True)
    }
    found = statistics_of_batches(model, [as_keywords(label, batch)])
    assert [x.layer for x in found.inputs] == list(range(len(layers)))
    for given, layer in zip(found.inputs, layers, strict=True):
        here = seen[layer.name]
        assert here.x is not None
        x, real = layer.norm(here.x).numpy(), real_of(batch, here.padding, here.x)
        assert (given.name, given.kind, given.length) == (layer.name, layer.kind, round(real.sum() / len(real)))
        if layer.kind == "self":
            first, others = split(x, real)
            close(given.first, first.mean(0))
            assert given.memory_mean is None
        else:
            others = x[real]
            assert given.first is None
            assert here.memory is not None
            memory = layer.key_side_norm(here.memory).numpy()[real_of(batch, case.memory_padding, here.memory)]
            for ours, expected in zip((given.memory_mean, given.memory_covariance), moments(memory), strict=True):
                close(ours, expected)
        assert given.tokens == len(others)
        for ours, expected in zip((given.mean, given.covariance), moments(others), strict=True):
            close(ours, expected)


@torch.no_grad()
def test_a_module_that_is_called_many_times_counts_every_call() -> None:
    model, batch = model_of(case_of("albert")), case_of("albert").batch()
    kept: list[Tensor] = []
    attention = next(module for name, module in model.named_modules() if name.endswith("attention"))
    handle = attention.register_forward_pre_hook(
        lambda _, args, kw: kept.append(args[0] if args else kw["hidden_states"]), with_kwargs=True
    )
    model(**batch)
    handle.remove()
    assert len(kept) == 3  # depths
    pairs = [split(x.numpy(), batch["attention_mask"].bool().numpy()) for x in kept]
    given = statistics_of_batches(model, [batch]).inputs[0]
    close(given.first, np.concatenate([first for first, _ in pairs]).mean(0))
    for ours, expected in zip(
        (given.mean, given.covariance), moments(np.concatenate([rest for _, rest in pairs])), strict=True
    ):
        close(ours, expected)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_padded_tokens_do_not_count_in_torch_encoders(nested: bool, batch_first: bool) -> None:
    """Time first, batch first, and the nested tensors that the encoder makes of a padded batch."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=batch_first), 2, enable_nested_tensor=nested
    )
    x, hidden = torch.randn(4, 10, 16), torch.zeros(4, 10, dtype=torch.bool)
    hidden[1, 6:] = hidden[3, 2:] = True
    found = statistics(encoder, [{"src": x if batch_first else x.transpose(0, 1), "src_key_padding_mask": hidden}])
    first, others = split(x.double().numpy(), ~hidden.numpy())
    given = found.inputs[0]
    assert (given.tokens, given.length) == (len(others), 7)  # 28 tokens in 4 sequences
    close(given.first, first.mean(0))
    close(given.covariance, moments(others)[1])


@pytest.mark.parametrize("label", ["bert", "gpt2", "t5", "bart", "xlnet"])
def test_what_padding_holds_changes_nothing(label: str) -> None:
    case = case_of(label)
    model, batch = model_of(case), case.batch()
    other = {name: x.clone() for name, x in batch.items()}
    for ids, mask in (("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask")):
        if ids in other:
            other[ids][other[mask] == 0] = 7
    for a, b in zip(
        statistics_of_batches(model, [batch]).inputs, statistics_of_batches(model, [other]).inputs, strict=True
    ):
        assert torch.allclose(a.covariance, b.covariance, atol=1e-6)
        assert torch.allclose(a.mean, b.mean, atol=1e-6)


def test_the_mask_of_one_stack_is_not_that_of_the_other() -> None:
    """A decoder without a mask of its own is not padded, whatever its encoder is; nor is the tower that sees."""
    case = case_of("t5")
    batch = {name: x for name, x in case.batch().items() if name != "decoder_attention_mask"}
    own = [
        x
        for x in statistics_of_batches(model_of(case), [batch]).inputs
        if x.kind == "self" and x.name.startswith("decoder")
    ]
    assert [x.tokens for x in own] == [2 * 6] * 3
    case = case_of("clip")
    # as many as patches and the class token
    words = torch.randint(3, 64, (2, 5), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    found = statistics_of_batches(
        model_of(case), [{"input_ids": words, "attention_mask": mask, "pixel_values": case.batch()["pixel_values"]}]
    )
    assert [x.tokens for x in found.inputs] == [6, 6, 8, 8]


def test_a_large_mean_takes_no_digits_of_the_covariance() -> None:
    width = 1032  # beyond the width up to which sums are float64
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(width, 1, 8, batch_first=True), 1, enable_nested_tensor=False
    )
    parts = [1000 + torch.randn(1, 9, width) for _ in range(2)]
    given = statistics(encoder, [{"src": part} for part in parts]).inputs[0]
    expected = moments(torch.cat(parts)[:, 1:].flatten(0, 1).double().numpy())[1]
    np.testing.assert_allclose(given.covariance.double().numpy(), expected, rtol=0, atol=1e-5)


def test_what_else_is_said_of_the_input() -> None:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 1, 8, batch_first=True), 1, enable_nested_tensor=False
    )
    x = torch.randn(8, 1 + SAMPLE // 4, 8)
    x[..., 0] *= 10
    x[..., 1] += 10
    given = statistics(encoder, [{"src": x}]).inputs[0]
    tokens = x[:, 1:].flatten(0, 1).double().numpy()
    energy = (tokens**2).sum(1).mean()
    assert given.mean_share == pytest.approx((tokens.mean(0) ** 2).sum() / energy, rel=1e-5)
    assert given.kurtosis == pytest.approx(0, abs=0.1)
    assert given.normality == pytest.approx(given.normality_expected, rel=0.2)
    values = np.linalg.eigvalsh(np.cov(tokens.T, bias=True))[::-1]
    assert given.directions[0] == pytest.approx(values[0] / energy, rel=1e-4)
    heavy = statistics(encoder, [{"src": x**3}]).inputs[0]
    assert heavy.kurtosis is not None
    assert heavy.kurtosis > 5
    assert heavy.normality is not None
    assert heavy.normality > 3 * given.normality_expected


# ---- the file ----


@pytest.fixture(scope="module")
def found() -> Statistics:
    case = case_of("t5")
    return statistics_of_batches(model_of(case), [case.batch()])


def test_save_and_load(found: Statistics, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    found.save(path)
    again = Statistics.load(path)
    assert (again.source, again.tokens, again.length, again.silent) == (
        found.source,
        found.tokens,
        found.length,
        found.silent,
    )
    for a, b in zip(again.inputs, found.inputs, strict=True):
        assert vars(a).keys() == vars(b).keys()
        for name, value in vars(b).items():
            same = torch.equal(value, getattr(a, name)) if isinstance(value, Tensor) else value == getattr(a, name)
            assert same, name


def test_a_file_appears_whole_or_not_at_all(found: Statistics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.pt"
    found.save(path)
    before = path.read_bytes()

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(LocaterError, match=r"a\.pt: cannot be written \(No space left"):
        found.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(LocaterError, match="cannot be written"):
        found.save(tmp_path / "none" / "a.pt")


def test_files_that_are_refused(found: Statistics, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    with pytest.raises(LocaterError, match=r"a\.pt: cannot be read \(No such file"):
        Statistics.load(path)
    held = {"schema": 1, "source": "", "tokens": 1, "length": 1, "inputs": [], "silent": ()}
    for wrong, said in (
        ({**held, "schema": 99}, "schema 99, not 1"), ({}, "schema"), ([1], "not statistics"),
        ({**held, "inputs": [{"layer": 0}]}, "missing"),
        ({**held, "inputs": [{**vars(found.inputs[0]), "more": 1}]}, "more"),
    ):  # fmt: skip
        torch.save(wrong, path)
        with pytest.raises(LocaterError, match=said):
            Statistics.load(path)
    path.write_bytes(b"no archive")
    with pytest.raises(LocaterError, match="collect them again"):
        Statistics.load(path)


def test_a_scan_refuses_statistics_of_another_model(found: Statistics) -> None:
    with pytest.raises(
        LocaterError, match=r"layer 2 .* is self-attention of width 24, the statistics of T5Model have self-attention"
    ):
        locater.scan(model_of(case_of("clip")), statistics=found)
    with pytest.raises(LocaterError, match="exclude each other"):
        locater.scan(model_of(case_of("t5")), statistics=found, raw=True)
    fewer = Statistics(found.source, found.tokens, found.length, [*found.inputs, replace(found.inputs[0], layer=99)])
    with pytest.raises(LocaterError, match=r"attention layers, the statistics of T5Model are of 100"):
        locater.scan(model_of(case_of("t5")), statistics=fewer)
    short = Statistics(found.source, found.tokens, found.length, found.inputs[:-1])
    with pytest.raises(LocaterError, match="have nothing there"):
        locater.scan(model_of(case_of("t5")), statistics=short)


def test_layers_that_no_token_reached_are_named_and_left_out() -> None:
    model = model_of(case_of("clip"))
    ids = case_of("clip").batch()["input_ids"]
    read = statistics(model, ids)
    assert (len(read.inputs), read.silent) == (2, (2, 3))
    scanned = locater.scan(model, statistics=read)
    assert [entry["layer"] for entry in scanned.layers] == [0, 1]
    assert any(
        "vision_model.encoder.layers.0.self_attn" in note and "left out" in note
        for note in scanned.assumptions["notes"]
    )


# ---- nothing stays behind ----


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_as_before(fails: bool) -> None:
    case = case_of("llama")
    model: Any = model_of(case).float()
    model.train()
    model.model.layers[1].eval()
    modes = [m.training for m in model.modules()]
    ids = case.batch()["input_ids"]
    if fails:

        def break_off(*args: object) -> None:
            raise RuntimeError("stop")

        handle = model.model.layers[1].mlp.register_forward_pre_hook(break_off)
        with pytest.raises(RuntimeError, match="stop"):
            statistics(model, ids)
        handle.remove()
    else:
        statistics(model, ids)
    assert [m.training for m in model.modules()] == modes
    assert hooks(model) == 0
    assert all(p.grad is None for p in model.parameters())


def test_a_model_without_attention_that_can_be_told() -> None:
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 1, 8, batch_first=True), 1, enable_nested_tensor=False
    )
    with pytest.raises(LocaterError, match="no attention layer was called"):
        statistics(encoder, [{"src": torch.randn(1, 1, 8)}])  # one token, which is the first


def test_run_takes_the_tower_that_the_batch_is_for() -> None:
    case = case_of("clip")
    model, batch = model_of(case), case.batch()
    both = run_model(model, batch)
    words = run_model(model, {name: batch[name] for name in ("input_ids", "attention_mask")})
    sight = run_model(model, {"pixel_values": batch["pixel_values"]})
    for one, whole in ((words, both.text_embeds), (sight, both.image_embeds)):
        pooled = one if isinstance(one, Tensor) else one.pooler_output
        assert torch.allclose(torch.nn.functional.normalize(pooled, dim=-1), whole, atol=1e-9)


# ---- from text to batches ----


def tokenizer(template: str | None = None) -> Any:
    """Words as tokens; `template` puts [CLS] and [SEP] around them, or <s> in front."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2}
    words = Tokenizer(models.WordLevel({**special, "a": 3, **{f"w{i}": i for i in range(4, 64)}}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    if template:
        words.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")


WORDS = " ".join(f"w{4 + i % 60}" for i in range(100))


@pytest.mark.parametrize(
    ("template", "before", "after"),
    [(None, [], []), ("[CLS] $A [SEP]", [1], [2]), ("[CLS] $A", [1], []), ("$A [SEP]", [], [2])],
)
def test_special_tokens_stand_in_every_sequence(template: str | None, before: list[int], after: list[int]) -> None:
    held = batches(nn.Linear(1, 1), WORDS, tokenizer=tokenizer(template), length=16, tokens=64, batch=3)
    ids = torch.cat([part["input_ids"] for part in held])
    assert [len(part["input_ids"]) for part in held] == [3, 1]
    assert ids.shape == (4, 16)
    inner = 16 - len(before) - len(after)
    assert ids[:, : len(before)].tolist() == [before] * 4
    assert ids[:, 16 - len(after) :].tolist() == [after] * 4
    assert ids[:, len(before) : len(before) + inner].flatten().tolist() == [4 + i % 60 for i in range(4 * inner)]
    assert all(bool(part["attention_mask"].all()) for part in held)


def test_texts_paths_and_what_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(WORDS)
    how: dict[str, Any] = dict(tokenizer=tokenizer(), length=10, tokens=50)
    whole = batches(nn.Linear(1, 1), WORDS, **how)[0]["input_ids"]
    for same in (tmp_path / "a.txt", WORDS.split(), [tmp_path / "a.txt"]):
        assert torch.equal(batches(nn.Linear(1, 1), same, **how)[0]["input_ids"], whole)
    assert torch.equal(batches(nn.Linear(1, 1), WORDS, skip=10, **how)[0]["input_ids"][:-1], whole[1:])
    # shorter than a sequence
    assert batches(nn.Linear(1, 1), "w4 w5 w6", **how)[0]["input_ids"].tolist() == [[4, 5, 6]]


def test_the_path_of_a_text_is_read_and_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A string that names a file is that file, alone and in a list; sentences stay sentences, whatever stands in
    them.
    """
    (tmp_path / "a.txt").write_text(WORDS)
    (tmp_path / "two words.md").write_text(WORDS)
    monkeypatch.chdir(tmp_path)
    how: dict[str, Any] = dict(tokenizer=tokenizer(), length=10, tokens=50)
    whole = batches(nn.Linear(1, 1), WORDS, **how)[0]["input_ids"]
    for named in (str(tmp_path / "a.txt"), "a.txt", "two words.md", ["a.txt"], ("a.txt", "two words.md")):
        assert torch.equal(batches(nn.Linear(1, 1), named, **how)[0]["input_ids"], whole)
    for sentence in ("w4 w5 and/or a.txt", ["w4 w5", "a.txt"], ["w4 w5", "w6/w7"], "w4 w5\nw6 none.txt"):
        assert batches(nn.Linear(1, 1), sentence, **how)[0]["input_ids"][0, :2].tolist() == [4, 5]


MISSING = ["none.txt", "no/such/file", "./none", "/no/such file.txt", "C:\\none.txt", "~/none.jsonl", ["none.txt"]]


@pytest.mark.parametrize("missing", MISSING)
def test_a_string_that_looks_like_a_missing_file_is_refused(
    missing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LocaterError, match="no such file") as error:
        statistics(model_of(case_of("llama")), missing, tokenizer=tokenizer())
    assert Path(missing[0] if isinstance(missing, list) else missing).name in str(error.value)
    with pytest.raises(LocaterError, match="is a folder: name a text file"):
        batches(nn.Linear(1, 1), str(tmp_path), tokenizer=tokenizer())


@pytest.mark.parametrize(
    ("change", "when"),
    [({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "no tokenizer there"),
     ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "its tokenizer failed")],
)  # fmt: skip
def test_a_tokenizer_that_panics_is_named(
    change: dict[str, Any], when: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rust's panics are no `Exception`: real ones, at loading and at work."""
    tokenizer().save_pretrained(tmp_path)
    held = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**held, **change}))
    with pytest.raises(LocaterError, match=when) as error:
        batches(nn.Linear(1, 1), WORDS, tokenizer=tmp_path)
    assert str(tmp_path) in str(error.value)
    assert "panicked" in capfd.readouterr().err


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "t5", "gemma2", "mpnet"])
def test_a_folder_without_a_tokenizer_is_not_read_with_an_empty_one(kind: str, tmp_path: Path) -> None:
    """transformers makes one up, of special tokens alone: no tokens at all, or every word unknown."""
    from transformers import AutoConfig

    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    with pytest.raises(LocaterError, match=r"no tokenizer there: give one with tokenizer= \(--tokenizer PATH"):
        batches(nn.Linear(1, 1), WORDS, tokenizer=tmp_path)


def test_token_ids_and_batches_pass_through() -> None:
    ids = torch.arange(24)
    assert batches(nn.Linear(1, 1), ids, length=8, tokens=16)[0]["input_ids"].tolist() == ids[:16].view(2, 8).tolist()
    assert [part["input_ids"].tolist() for part in batches(nn.Linear(1, 1), ids.view(3, 8), batch=2)] == [
        ids[:16].view(2, 8).tolist(),
        ids[16:].view(1, 8).tolist(),
    ]
    batch = {"src": torch.randn(2, 3, 4)}
    # one batch alone is not a list of names
    assert batches(nn.Linear(1, 1), batch) == batches(nn.Linear(1, 1), [batch]) == [batch]


def test_pairs_of_stacks_get_the_same_tokens_twice() -> None:
    model, ids = model_of(case_of("t5")), torch.randint(3, 64, (2, 6))
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    held = batches(model, {"input_ids": ids, "attention_mask": mask})[0]
    assert torch.equal(held["decoder_input_ids"], ids)
    assert torch.equal(held["decoder_attention_mask"], mask)
    own = {"input_ids": ids, "decoder_input_ids": ids[:, :3]}
    assert batches(model, own)[0].keys() == own.keys()


def refusals() -> list[tuple[Any, Callable[[], nn.Module], dict[str, Any], str]]:
    def llama() -> nn.Module:
        return model_of(case_of("llama"))

    def plain() -> nn.Module:
        return nn.Linear(1, 1)

    return [
        ("", llama, dict(tokenizer=tokenizer()), "the text is empty"),
        (" \n ", llama, dict(tokenizer=tokenizer()), "the text is empty"),
        ([], llama, {}, "the text is empty"),
        (WORDS, llama, {}, r"its tokenizer is not known: give one with tokenizer="),
        (WORDS, plain, {}, r"Linear: its tokenizer is not known"),
        (WORDS, llama, dict(tokenizer="no/such/folder/here"), r"no tokenizer there"),
        ("w4", llama, dict(tokenizer=tokenizer()), "1 token of text in sequences of 256: attention needs at least two"),
        (WORDS, llama, dict(tokenizer=tokenizer("[CLS] $A [SEP]"), length=3), "attention needs at least two"),
        (
            WORDS,
            llama,
            dict(tokenizer=tokenizer(), length=80),
            r"sequences of 80 tokens, but the model has 64 positions: use length=64",
        ),
        (torch.tensor([[3, 64]]), llama, {}, "token id 64 is beyond the model's vocabulary of 64"),
        (torch.tensor([[3, -1]]), llama, {}, "token id -1 is beyond"),
        ([{"input_ids": [[3, 4], [5]]}], llama, {}, "pad ragged sequences"),
        ([{"input_ids": torch.tensor([3, 4])}], llama, {}, r"must be a tensor \(sequences, tokens\)"),
        ([{"input_ids": torch.zeros(0, 4, dtype=torch.long)}], llama, {}, r"must be a tensor \(sequences, tokens\)"),
        ([[3, 4], [5]], llama, {}, "text contains list objects"),
        (torch.randn(2, 3), llama, {}, "token ids are whole numbers"),
        (torch.zeros(2, 3, 4, dtype=torch.long), llama, {}, r"a tensor of shape \[2, 3, 4\]"),
    ]


@pytest.mark.parametrize("at", range(len(refusals())))
def test_what_the_model_would_fail_on_is_refused(at: int) -> None:
    text, model, how, said = refusals()[at]
    with pytest.raises(LocaterError, match=said):
        batches(model(), text, **how)


def test_roberta_counts_positions_from_its_padding_on() -> None:
    model: Any = model_of(case_of("roberta")).float()
    most = model.config.max_position_embeddings - model.config.pad_token_id - 1
    ids = torch.randint(3, 64, (2, most + 1))
    with pytest.raises(LocaterError, match=f"the model has {most} positions: use length={most}"):
        batches(model, ids)
    held = batches(model, ids[:, :most])
    assert statistics_of_batches(model, held).length == most  # and it runs
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        run_model(model, {"input_ids": ids})


def test_statistics_of_text_are_those_of_its_batches() -> None:
    model = model_of(case_of("llama"))
    how: dict[str, Any] = dict(tokenizer=tokenizer(), length=20, tokens=80, batch=2)
    seen: list[int] = []

    def progress(held: Any, count: int) -> Any:
        seen.append(count)
        return held

    ours = statistics(model, WORDS, **how, progress=progress)
    same = statistics_of_batches(model, batches(model, WORDS, **how))
    assert seen == [2]
    assert (ours.length, ours.tokens) == (20, 4 * 19)
    assert all(torch.equal(a.covariance, b.covariance) for a, b in zip(ours.inputs, same.inputs, strict=True))
    assert repr(ours) == "Statistics('LlamaForCausalLM', 2 layers, 76 tokens)"
    assert isinstance(ours.inputs[0], Input)
