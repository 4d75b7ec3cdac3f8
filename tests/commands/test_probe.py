"""What `probe()` says of heads, as data: columns and their kinds, bounds that bound, scores of heads built by hand,
what is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor, nn

from locater import LocaterError, Probe, observe, probe, scan
from locater.commands.load_model import load_model
from locater.commands.probing import agreement
from locater.discovery import attention_layers
from locater.findings import parse_conditions
from locater.findings.flags import NO_ROLE
from locater.inputs.images import image_batches
from locater.layers import AttentionLayer, Norm
from locater.layers.projection_with_norm import NormedProjection
from locater.numerics import spearman
from locater.observing.head_roles import circuit_scores
from locater.observing.input_covariances import statistics_of_batches
from locater.observing.run_model import run_model
from locater.predict.prediction_and_logit_bound import logit_bound
from locater.results.probe import (
    BOUND,
    MEASURED,
    PREDICTED,
    PRIOR,
    PROBE_COLUMNS,
    PROBE_FLAGS,
    ProbeRow,
)
from tests.families import CASES
from tests.parity import Case, model_of

CIRCUITS = ("previous", "duplicate", "induction", "skip_induction", "pair_induction")


def case_of(label: str) -> Case:
    return next(c for c in CASES if c.label == label)


def model(label: str) -> Any:
    return model_of(case_of(label)).float()


def ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 60, shape, generator=torch.Generator().manual_seed(seed))


def batch_of(label: str) -> dict[str, Tensor]:
    return {name: x.float() if x.is_floating_point() else x for name, x in case_of(label).batch().items()}


@pytest.fixture(scope="module")
def llama() -> Probe:
    return probe(model("llama"), ids(12, 40))


# ---- columns ----


def test_every_column_has_a_kind(llama: Probe) -> None:
    assert set(llama.assumptions["how"]) == set(PROBE_COLUMNS)
    assert {f.name for f in fields(ProbeRow)} >= set(PROBE_COLUMNS)
    for columns, kind in ((MEASURED, "exact"), (PREDICTED, "predicted"), (PRIOR, "prior"), (BOUND, "bound")):
        assert {llama.assumptions["how"][name] for name in columns} == {kind}


def test_a_decoder_has_every_number(llama: Probe) -> None:
    assert [(row.layer, row.head, row.kv_head) for row in llama.rows] == [
        (n, h, h // 2) for n in range(2) for h in range(4)
    ]
    assert all(isinstance(row[name], float) for row in llama.rows for name in PROBE_COLUMNS)
    assert [x.block for x in llama.streams] == [-1, 0, 1]
    document = json.loads(llama.to_json())
    assert document["heads"][3]["entropy"] == llama.rows[3].entropy
    assert document["layers"][1]["input"]["tokens"] == 4 * 39
    assert repr(llama) == "Probe('LlamaForCausalLM', 8 heads in 2 layers)"


def test_numbers_come_from_two_parts_of_the_text(llama: Probe) -> None:
    """Statistics from the first third, measurements from the rest; theory as a scan with those statistics has it."""
    torch_model, text = model("llama"), ids(12, 40)
    found = statistics_of_batches(torch_model, [{"input_ids": text[:4]}])
    assert llama.statistics is not None
    for a, b in zip(llama.statistics.inputs, found.inputs, strict=True):
        assert torch.allclose(a.covariance, b.covariance, atol=1e-5)
    with observe(torch_model) as seen:
        run_model(torch_model, {"input_ids": text[4:]})
    assert [row.entropy for row in llama.rows] == pytest.approx([row.entropy for row in seen.rows], rel=1e-5)
    theory, weights = scan(torch_model, statistics=found, length=40), scan(torch_model, length=40)
    for name in ("M", "F", "localization"):
        predicted = [row[f"predicted_{name}"] for row in llama.rows]
        assert predicted == pytest.approx([getattr(row, name) for row in theory.rows], rel=1e-4)
        assert predicted != pytest.approx([getattr(row, name) for row in weights.rows], rel=1e-2)
    assert [row.prior_localization for row in llama.rows] == pytest.approx(
        [row.localization for row in weights.rows], rel=1e-4
    )
    assert llama.assumptions["held_out"] is True
    assert (llama.assumptions["statistics_sequences"], llama.assumptions["measured_sequences"]) == (4, 8)


def test_numbers_of_measured_tokens_have_names_of_their_own(llama: Probe) -> None:
    """M, F and localization of a probe are those of measured tokens, and of a scan those of unit tokens: two names."""
    document = llama.to_dict()
    for name in ("M", "F", "localization"):
        assert name not in document["heads"][0]
        assert document["assumptions"]["how"][f"predicted_{name}"] == "predicted"
        with pytest.raises(LocaterError, match=f"no column '{name}'; there are .*predicted_{name}"):
            parse_conditions(f"{name}>-1e9", PROBE_COLUMNS, PROBE_FLAGS)
    assert document["schema"] == 2
    assert scan(model("llama")).to_dict()["schema"] == 2
    assert "antisymmetric" in PROBE_FLAGS, "M, S and F of measured tokens decide it, and are no columns"


def test_sampled_rows_say_so() -> None:
    found = probe(model("llama"), ids(12, 40), rows=5)
    how = found.assumptions["how"]
    assert {how[name] for name in MEASURED if name not in CIRCUITS} == {"sampled"}
    assert {how[name] for name in CIRCUITS} == {"exact"}
    assert {row.rows for row in found.rows} == {8 * 5}


def test_a_single_sequence_is_not_held_out() -> None:
    found = probe(model("llama"), ids(1, 40))
    assert found.assumptions["held_out"] is False
    assert any("only one sequence" in note for note in found.assumptions["notes"])
    assert found.statistics is not None
    assert (found.statistics.tokens, found.rows[0].rows) == (39, 40)


def test_batches_may_hold_more_than_tokens() -> None:
    """What is not there once per sequence is not cut."""
    text = ids(6, 20)
    more = {
        "input_ids": text,
        "attention_mask": torch.ones_like(text),
        "position_ids": torch.arange(20)[None],
        "use_cache": False,
    }
    found, plain = probe(model("llama"), [more]), probe(model("llama"), text)
    assert [row.entropy for row in found.rows] == pytest.approx([row.entropy for row in plain.rows], rel=1e-5)
    assert found.assumptions["measured_sequences"] == 4


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_module_of_pytorch_with_tensors(batch_first: bool) -> None:
    """Time first, a single batch cannot be cut into sequences: both parts use it."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=batch_first), 2, enable_nested_tensor=False
    )
    x, hidden = torch.randn(6, 10, 16), torch.zeros(6, 10, dtype=torch.bool)
    hidden[1, 7:] = True
    found = probe(encoder, [{"src": x if batch_first else x.transpose(0, 1), "src_key_padding_mask": hidden}])
    assert found.assumptions["held_out"] is batch_first
    assert all(
        row.previous is None and row.entropy is not None and row.predicted_entropy is not None for row in found.rows
    )
    assert len(found.rows) == 4


# ---- agreement ----


@pytest.mark.parametrize("ties", [False, True])
def test_agreement_is_that_of_scipy(ties: bool) -> None:
    values = torch.randn(2, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values[1] += values[0]
    values = (2 * values).round() / 2 if ties else values
    assert (len(values[0].unique()) < 30) is ties
    rows = [
        ProbeRow(0, i, i, "self", "", 1, entropy=float(a), predicted_entropy=float(b))
        for i, (a, b) in enumerate(values.T)
    ]
    rows.append(ProbeRow(0, 60, 60, "self", "", 1, entropy=None, predicted_entropy=9.0))
    found = agreement(rows)
    assert found.keys() == {"predicted_entropy"}
    assert found["predicted_entropy"]["spearman"] == pytest.approx(
        scipy.stats.spearmanr(*values.numpy()).statistic, abs=1e-12
    )
    assert found["predicted_entropy"]["error"] == pytest.approx(float((values[0] - values[1]).abs().mean()))
    assert found["predicted_entropy"]["heads"] == 60


def test_agreement_needs_three_heads_that_differ() -> None:
    assert spearman(torch.tensor([1.0, 1.0, 1.0]), torch.tensor([1.0, 2.0, 3.0])) is None
    assert agreement([ProbeRow(0, i, i, "self", "", 1, sink=0.1, predicted_sink=0.2) for i in range(2)]) == {}


# ---- bounds ----

BOUNDED = [
    "llama", "llama-wide-heads-biased", "llama-rope-yarn", "qwen2", "qwen3", "gemma2", "gemma3", "gpt_oss", "gpt2", "gpt_neox", "opt",
    "falcon", "phi", "phi3-longrope", "starcoder2", "granite", "bert", "roberta", "distilbert", "vit", "clip", "timm-head-norms",
    "timm-rms", "torch-encoder-pre", "whisper", "bart", "torch-transformer-pre",
]  # fmt: skip
UNBOUNDED = [
    "bloom",
    "falcon-alibi",
    "t5-encoder",
    "deberta_v2",
    "xlnet",
    "mpnet",
    "torch-attention",
    "olmo2",
    "deepseek_v3",
]


def layers_of(label: str) -> list[AttentionLayer]:
    return list(attention_layers(model_of(case_of(label))))


def inputs(width: int) -> Iterator[Tensor]:
    """Tokens of every size, and some with one entry that sticks out."""
    for seed, size in enumerate((1e-2, 1.0, 30.0, 1e4)):
        x = size * torch.randn(2, 24, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        x[1, torch.arange(24), torch.arange(24) % width] *= 1e3
        yield x


@pytest.mark.parametrize("label", BOUNDED)
@torch.no_grad()
def test_no_logit_exceeds_its_bound(label: str) -> None:
    bounded = 0
    for layer in layers_of(label):
        bound = logit_bound(layer)
        if bound is None:
            assert layer.norm.kind == "none" or layer.key_side_norm.kind == "none"
            continue
        bounded += 1
        assert bound.shape == (layer.heads,)
        for x, memory in zip(inputs(layer.width), inputs(layer.key.shape[1]), strict=True):
            top = layer.logits(x, memory if layer.kind == "cross" else None).abs().amax((0, 2, 3))
            assert (top <= bound * (1 + 1e-6)).all()
            assert (top > 0).all()
    assert bounded


@pytest.mark.parametrize("label", UNBOUNDED)
def test_where_nothing_bounds_there_is_no_bound(label: str) -> None:
    for layer in layers_of(label):
        assert logit_bound(layer) is None
        inside = isinstance(layer.query, NormedProjection) or isinstance(layer.key, NormedProjection)
        assert layer.bias is not None or layer.relative is not None or layer.norm.kind == "none" or inside


@torch.no_grad()
def test_the_bound_is_reached() -> None:
    """Keys that are the queries, and a token along the strongest direction: no smaller number would do."""
    layer = replace(layers_of("llama")[0], rotary=None)
    same = replace(layer, key=layer.query, kv_heads=layer.heads, norm=replace(layer.norm, eps=0.0))
    bound = logit_bound(same)
    assert bound is not None
    assert layer.norm.gain is not None
    W = layer.query.weight().unflatten(0, (layer.heads, -1)) * layer.norm.gain
    for head in range(layer.heads):
        token = torch.linalg.svd(W[head]).Vh[0].view(1, 1, -1)
        assert float(same.logits(token)[0, head]) == pytest.approx(float(bound[head]), rel=1e-9)


@torch.no_grad()
def test_a_soft_cap_bounds_everything() -> None:
    layer = layers_of("gemma2")[0]
    assert logit_bound(layer) == pytest.approx(torch.full((4,), 3.0))
    free = logit_bound(replace(layer, softcap=None))
    assert free is not None
    assert (free > 3).all()
    assert logit_bound(replace(layers_of("bloom")[0], softcap=5.0)) == pytest.approx(torch.full((6,), 5.0))
    wide = logit_bound(replace(layer, softcap=1e6))
    assert wide == pytest.approx(free)


@pytest.mark.parametrize("label", ["llama", "qwen3", "gpt2", "gpt_oss"])
def test_measured_logits_stay_below_the_bound(label: str) -> None:
    for row in probe(model(label), ids(9, 20)).rows:
        assert row.max_logit is not None
        assert row.logit_bound is not None
        assert 0 < row.max_logit <= row.logit_bound


# ---- what heads are for ----

WORDS, PLACES = 64, 128  # channels for what a token is, twice, and for where it is
WIDTH = 2 * WORDS + PLACES


def built() -> Any:
    """Two layers of one head. The first looks at the token before and copies what it is into channels of its own; the
    second looks for its own token among those copies, and so at the token after the earlier copy: induction."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = dict(
        n_embd=WIDTH,
        n_layer=2,
        n_head=1,
        n_inner=8,
        vocab_size=4096,
        n_positions=PLACES,
        bos_token_id=0,
        eos_token_id=0,
    )
    made = GPT2LMHeadModel(GPT2Config(**shape)).eval()
    word, place, copy = slice(WORDS), slice(WORDS, WORDS + PLACES), slice(WORDS + PLACES, WIDTH)
    for p in made.parameters():
        p.data.zero_()
    for name, p in made.named_parameters():
        if "ln_" in name and name.endswith("weight"):
            p.data.fill_(1)
    core = made.transformer
    core.wte.weight.data[:, word] = (
        torch.randn(4096, WORDS, generator=torch.Generator().manual_seed(0)).sign() / WORDS**0.5
    )
    core.wpe.weight.data[:, place] = torch.eye(PLACES)
    # inputs, which, outputs
    first, second = (core.h[i].attn.c_attn.weight.data.view(WIDTH, 3, WIDTH) for i in range(2))
    first[place, 0, place] = torch.eye(PLACES).roll(-1, 1)  # asks for the place before its own
    first[place, 1, place] = 4 * torch.eye(PLACES)
    first[word, 2, copy] = 0.2 * torch.eye(WORDS)
    core.h[0].attn.c_proj.weight.data[:] = torch.eye(WIDTH)
    second[word, 0, word] = 4 * torch.eye(WORDS)
    second[copy, 1, word] = torch.eye(WORDS)
    return made


def test_heads_built_by_hand_score_what_they_were_built_for() -> None:
    scores = circuit_scores(built())
    previous, induction = scores[0, 0], scores[1, 0]
    assert previous.previous is not None
    assert previous.previous > 0.99
    assert previous.duplicate == pytest.approx(0, abs=0.01)
    assert previous.induction == pytest.approx(0, abs=0.01)
    assert induction.induction is not None
    assert induction.induction > 0.95
    assert induction.previous == pytest.approx(0, abs=0.02)
    assert induction.duplicate == pytest.approx(0, abs=0.02)


@pytest.mark.parametrize("label", ["llama", "gpt2", "bert", "mistral-window"])
@torch.no_grad()
def test_scores_are_diagonals_of_the_maps(label: str) -> None:
    found = model(label)
    seen: list[Tensor] = []
    handle = found.register_forward_pre_hook(lambda _, args, kw: seen.append(kw["input_ids"]), with_kwargs=True)
    scores = circuit_scores(found, period=20)
    handle.remove()
    text = seen[0]
    assert torch.equal(text[:, :20], text[:, 20:])
    found.set_attn_implementation("eager")
    maps = found(input_ids=text, output_attentions=True).attentions
    rows = torch.arange(20, 40)
    for (layer, head), score in scores.items():
        at = maps[layer][:, head]
        for got, offset in zip((score.previous, score.duplicate, score.induction), (1, 20, 19), strict=True):
            in_view = offset < 4 or label != "mistral-window"
            expected = float(at[:, rows, rows - offset].mean())
            assert got == (pytest.approx(expected, abs=1e-5) if in_view else None)


def test_scores_leave_special_tokens_out() -> None:
    """Some models have several ids for the end of a text."""
    found = model("llama")
    found.config.eos_token_id, found.config.bos_token_id, found.config.pad_token_id = [*range(10, 40)], 1, 5
    seen: list[Tensor] = []
    handle = found.register_forward_pre_hook(lambda _, args, kw: seen.append(kw["input_ids"]), with_kwargs=True)
    circuit_scores(found)
    handle.remove()
    held = set(seen[0].flatten().tolist())
    assert not held & {1, 5, *range(10, 40)}
    assert held >= {0, 2, 63}
    assert seen[0].shape == (4, 62)  # 64 positions
    found.config.eos_token_id = [*range(64)]
    with pytest.raises(LocaterError, match="one token that is not special"):
        circuit_scores(found)


def test_models_without_one_stack_over_words_have_no_scores() -> None:
    for label, said in (("t5", "one stack of layers"), ("vit", "one stack of layers")):
        with pytest.raises(LocaterError, match=said):
            circuit_scores(model(label))
    assert all(row.previous is None for row in probe(model("t5"), ids(6, 9)).rows)


# ---- images ----


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    path = tmp_path / "a.npy"
    np.save(path, np.random.default_rng(0).integers(0, 256, (9, 8, 8, 3), dtype=np.uint8))
    return path


def test_a_model_that_sees(pictures: Path) -> None:
    found = probe(model("vit"), images=pictures)
    assert len(found.rows) == 8
    assert (found.assumptions["statistics_sequences"], found.assumptions["measured_sequences"]) == (3, 6)
    assert found.assumptions["data"] == str(pictures)
    assert found.assumptions["length"] == 5  # four patches and the class token
    for row in found.rows:
        assert row.rows == 6 * 5
        assert None not in (row.entropy, row.predicted_entropy, row.predicted_M)
        assert (row.previous, row.duplicate, row.induction) == (None, None, None)


def test_arrays_are_brought_to_size_and_range(tmp_path: Path) -> None:
    vit = model("vit")
    grey = np.random.default_rng(0).random((2, 8, 8)).astype(np.float32)
    forms = {
        "grey": grey, "last": grey[..., None].repeat(3, -1), "first": grey[:, None].repeat(3, 1),
        "bytes": (255 * grey).round().astype(np.uint8), "large": grey.repeat(4, 1).repeat(4, 2),
    }  # fmt: skip
    expected = torch.from_numpy(grey)[:, None].expand(-1, 3, -1, -1) * 2 - 1  # mean and spread 0.5
    for name, array in forms.items():
        np.save(tmp_path / f"{name}.npy", array)
        pixels = image_batches(vit, tmp_path / f"{name}.npy")[0]["pixel_values"]
        assert pixels.shape == (2, 3, 8, 8)
        if name != "large":
            assert torch.allclose(pixels, expected, atol=0.005 if name == "bytes" else 1e-6), name
    np.savez(tmp_path / "a.npz", train_images=grey + 5, test_images=grey, labels=np.zeros(2))
    assert torch.allclose(image_batches(vit, tmp_path / "a.npz")[0]["pixel_values"], expected, atol=1e-6)
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": [0.1, 0.2, 0.3], "image_std": [1.0, 2.0, 4.0]})
    )
    vit.name_or_path = str(tmp_path)
    pixels = image_batches(vit, tmp_path / "grey.npy")[0]["pixel_values"]
    assert torch.allclose(pixels[:, 2], (torch.from_numpy(grey) - 0.3) / 4, atol=1e-6)


def test_folders_of_pictures(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    for at in range(6):
        shade = np.full((12, 10, 3), 40 * at, dtype=np.uint8)
        image.fromarray(shade).save(tmp_path / f"{at}.png")
    (tmp_path / "notes.txt").write_text("not a picture")
    pixels = image_batches(model("vit"), tmp_path)[0]["pixel_values"]
    assert pixels.shape == (6, 3, 8, 8)
    assert torch.allclose(pixels[:, 0, 4, 4], torch.arange(6) * 80 / 255 - 1, atol=1e-4)
    assert len(probe(model("vit"), images=tmp_path).rows) == 8
    (tmp_path / "9.png").write_bytes(b"no picture")
    with pytest.raises(LocaterError, match=r"9\.png: not a readable image"):
        image_batches(model("vit"), tmp_path)


def test_images_that_are_refused(tmp_path: Path) -> None:
    vit = model("vit")
    np.save(tmp_path / "flat.npy", np.zeros((3, 4)))
    np.save(tmp_path / "none.npy", np.zeros((0, 8, 8)))
    np.savez(tmp_path / "labels.npz", labels=np.zeros(3))
    (tmp_path / "junk.npy").write_bytes(b"junk")
    (tmp_path / "empty").mkdir()
    for name, said in (
        ("flat.npy", r"shape \[3, 4\]; images are"), ("none.npy", "images are"), ("labels.npz", "only labels"),
        ("junk.npy", "cannot be read as"),
        ("empty", "contains no image"), ("missing", "no such file or folder"),
    ):  # fmt: skip
        with pytest.raises(LocaterError, match=said):
            image_batches(vit, tmp_path / name)
    with pytest.raises(LocaterError, match="names no image size"):
        image_batches(model("llama"), tmp_path / "flat.npy")


# ---- what is left out, and what has no meaning ----


def test_towers_that_nothing_reached_are_left_out(pictures: Path) -> None:
    clip = model("clip")
    words, sight = probe(clip, ids(6, 9)), probe(clip, images=pictures)
    for found, layers, missing in ((words, [0, 1], "vision_model"), (sight, [2, 3], "text_model")):
        assert sorted({row.layer for row in found.rows}) == [entry["layer"] for entry in found.layers] == layers
        notes = [note for note in found.assumptions["notes"] if note.startswith("not called, and left out")]
        assert len(notes) == 1
        assert missing in notes[0]
        assert all(row.predicted_entropy is not None and row.predicted_M is not None for row in found.rows)
    assert words.rows[0].previous is not None
    assert sight.rows[0].previous is None
    both = probe(clip, [batch_of("clip")])
    assert len(both.rows) == 16
    assert not any("not called" in note for note in both.assumptions["notes"])


def test_each_tower_is_predicted_at_its_own_length() -> None:
    """Nine words and five patches: without queries, entropy is the log of how many there are."""
    clip = model("clip")
    for name, p in clip.named_parameters():
        if ".q_proj." in name and "vision" in name:
            p.data.zero_()
    batch = {
        "input_ids": ids(6, 9),
        "attention_mask": torch.ones(6, 9, dtype=torch.long),
        "pixel_values": torch.randn(6, 3, 8, 8),
    }
    for row in probe(clip, [batch]).rows[8:]:
        for column in ("entropy", "predicted_entropy", "prior_entropy"):
            assert row[column] == pytest.approx(np.log(5), abs=1e-4)


def test_what_heads_keep_of_the_differences() -> None:
    """Without queries rows are uniform: 1 / sqrt(keys), of the mean participation (T + 1) / 2 under a causal mask."""
    for label, length, want in (("bert", 9, 9**-0.5), ("llama", 9, 5**-0.5)):
        plain, flat = model(label), model(label)
        for name, p in flat.named_parameters():
            if ".q_proj." in name or ".query." in name:
                p.data.zero_()
        for row in probe(flat, ids(6, length)).rows:
            for column in ("typical_kept", "predicted_typical_kept", "prior_typical_kept"):
                assert row[column] == pytest.approx(want, rel=1e-3)
        for row in probe(plain, ids(6, length)).rows:
            assert row.typical_kept == pytest.approx(row.participation**-0.5)
            assert want < row.typical_kept < 1


def test_layers_hold_the_residual_around_them() -> None:
    found = probe(model("llama"), ids(6, 12))
    residuals = [point.residual for point in found.streams]
    assert [entry["residual_before"] for entry in found.layers] == residuals[:-1]
    assert [entry["residual_after"] for entry in found.layers] == residuals[1:]
    for entry in found.layers:
        for column in ("typical_kept", "predicted_typical_kept", "prior_typical_kept"):
            squares = [row[column] ** 2 for row in found.rows if row.layer == entry["layer"]]
            assert entry[column] ** 2 == pytest.approx(sum(squares) / len(squares))
    assert {"predicted_typical_kept", "prior_typical_kept"} <= found.agreement.keys()


def test_a_composite_that_reads_text_alone() -> None:
    found = probe(model("gemma3-composite"), ids(6, 9))
    assert {entry["layer"] for entry in found.layers} == {0, 1}
    assert any("vision_tower" in note for note in found.assumptions["notes"])


def test_cross_attention_has_no_distance() -> None:
    for label in ("t5", "bart", "whisper"):
        found = probe(model(label), [batch_of(label)])
        cross = [row for row in found.rows if row.kind == "cross"]
        assert cross
        for row in cross:
            assert {
                row[name]
                for name in (
                    "distance",
                    "self_mass",
                    "predicted_M",
                    "predicted_localization",
                    "prior_localization",
                    "predicted_sink",
                    *CIRCUITS,
                )
            } == {None}
            assert None not in (
                row.entropy,
                row.rest_entropy,
                row.predicted_entropy,
                row.predicted_rest_entropy,
                row.predicted_F,
                row.sink,
            )
        assert all(row.distance is not None for row in found.rows if row.kind == "self")


def test_a_pooling_layer_of_one_query_is_measured_and_predicted() -> None:
    found = probe(model("siglip"), [batch_of("siglip")])
    pooled = [row for row in found.rows if row.name.endswith("head.attention")]
    assert len(pooled) == 4
    assert all(row.predicted_entropy is not None for row in pooled)


def test_a_head_with_nan_says_null_and_not_zero() -> None:
    broken = model("llama")
    broken.model.layers[1].self_attn.q_proj.weight.data[8:16] = torch.nan
    found = probe(broken, ids(9, 20))
    row = next(row for row in found.rows if (row.layer, row.head) == (1, 1))
    assert {name: row[name] for name in PROBE_COLUMNS if row[name] is not None} == {}
    assert row.flags == ("nonfinite",)
    others = [row for row in found.rows if (row.layer, row.head) != (1, 1)]
    assert all(row[name] is not None for row in others for name in ("sink", *CIRCUITS, "predicted_entropy"))
    assert not any("nonfinite" in row.flags for row in others)
    json.loads(found.to_json())


def test_nan_in_the_stream_reaches_every_head_after_it() -> None:
    broken = model("llama")
    broken.model.layers[0].mlp.down_proj.weight.data[:] = torch.nan
    found = probe(broken, ids(9, 20))
    for row in found.rows:
        measured = {
            row[name] for name in ("entropy", "sink", "max_logit", *CIRCUITS, "predicted_entropy", "predicted_M")
        }
        assert (measured == {None}) is (row.layer == 1)
        assert row.prior_entropy is not None
    assert found.agreement["predicted_entropy"]["heads"] == 4
    json.loads(found.to_json())


def _zero_values(attention: Any) -> None:
    attention.v_proj.weight[:32] = 0  # of heads 0 and 1, which share them


def _zero_outputs(attention: Any) -> None:
    attention.o_proj.weight[:, :64] = 0


def _nan_values(attention: Any) -> None:
    attention.v_proj.weight[3, 5] = torch.nan


def _inf_outputs(attention: Any) -> None:
    attention.o_proj.weight[5, 3] = attention.o_proj.weight[7, 40] = torch.inf


@pytest.mark.parametrize(
    ("plant", "flag"),
    [
        (None, None),
        (_zero_values, "silent"),
        (_zero_outputs, "silent"),
        (_nan_values, "nonfinite"),
        (_inf_outputs, "nonfinite"),
    ],
)
def test_a_head_that_cannot_write_is_named(plant: Callable[[Any], None] | None, flag: str | None) -> None:
    """Heads 3.0 and 3.1 of the demo."""
    demo = load_model(str(files("locater") / "demo"))
    attention = demo.model.layers[3].self_attn
    with torch.no_grad():
        if plant is not None:
            plant(attention)
    found = probe(demo, ids(6, 40))
    broken = [(row.layer, row.head) for row in found.rows if flag in row.flags and row.layer <= 3]
    assert broken == ([] if plant is None else [(3, 0), (3, 1)])
    assert [flag in verdict.faults for verdict in found.verdicts[12:16]] == [plant is not None] * 2 + [False] * 2
    notes = [note for note in found.assumptions["notes"] if "NaN" in note]
    assert [note.startswith("NaN or infinite weights in 3.0, 3.1 (layer.head):") for note in notes] == (
        [True] if flag == "nonfinite" else []
    )
    assert flag is None or flag in PROBE_FLAGS


@pytest.mark.parametrize("plant", ["nothing", "no values", "no outputs", "NaN in values", "NaN in outputs"])
def test_a_head_that_cannot_write_has_no_role(plant: str) -> None:
    """A previous-token head built by hand looks where it did, and moves nothing."""
    made = built()
    core = made.transformer
    with torch.no_grad():
        for block in core.h:  # the second copies what it attends to as well
            block.attn.c_attn.weight[:WORDS, 2 * WIDTH :] += 0.1 * torch.eye(WORDS, WIDTH)
            block.attn.c_proj.weight[:] = torch.eye(WIDTH)
        values, outputs = core.h[0].attn.c_attn.weight[:, 2 * WIDTH :], core.h[0].attn.c_proj.weight
        if plant != "nothing":
            broken = values if "values" in plant else outputs
            broken[:] = broken * (torch.nan if "NaN" in plant else 0)
    found = probe(made, ids(6, 40))
    first = found.rows[0]
    assert found.verdicts[0].role == ("previous-token" if plant == "nothing" else None)
    assert ((0, 0) in found.roles.get("previous-token", [])) == (plant == "nothing")
    assert [name for name in first.flags if name in NO_ROLE] == (
        [] if plant == "nothing" else ["nonfinite" if "NaN" in plant else "silent"]
    )
    assert found.records()[0]["role"] == found.verdicts[0].role
    if plant != "NaN in values":  # whose numbers are gone, as those of its output
        assert first.previous > 0.9


def test_the_mean_field_of_a_norm_is_not_used_for_the_bound() -> None:
    """A norm on queries bounds them whatever the norm in front."""
    layer = layers_of("qwen3")[0]
    assert torch.equal(logit_bound(layer), logit_bound(replace(layer, norm=Norm())))  # type: ignore[arg-type]


def test_the_note_says_how_many_tokens_are_repeated() -> None:
    """A model with 64 positions has no room for 50 tokens twice."""
    notes = probe(model("llama"), ids(6, 9)).assumptions["notes"]
    assert [note for note in notes if "repeated" in note] == [
        "previous, duplicate and induction: on 31 random tokens repeated once"
    ]
