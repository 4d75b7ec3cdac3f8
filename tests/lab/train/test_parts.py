"""The trainer's parts: plans, text, tokenizers, the model, controls by name."""

from __future__ import annotations

import gzip
import json
import lzma
import random
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from locater import LocaterError, attention_layers, observe
from locater.inputs.corpus import read_documents
from locater.inputs.tokenizer import ByteTokenizer, make_tokenizer
from locater_lab.train import Plan, Shape, Transformer, load, run
from locater_lab.train import checkpoint as checkpoints
from locater_lab.train.controls_and_conversion import controls, parse_control
from locater_lab.train.data import open_data
from locater_lab.train.map_measures_and_diverged_layer import find_diverged_layer
from locater_lab.train.run_folder import plan_difference
from locater_lab.train.text_data import split
from tests.parity import redraw
from tests.processes import python

TINY: dict[str, Any] = dict(layers=2, width=16, heads=2, length=16, batch=4, device="cpu")


def corpus(folder: Path, words: int = 4000) -> Path:
    """A text with something to learn: words that follow each other in a fixed order, half of the time."""
    rng = random.Random(1)
    names = "the head of a layer looks at every token before it and takes what it needs".split()
    at, lines = 0, []
    for _ in range(words):
        at = (at + 1) % len(names) if rng.random() < 0.5 else rng.randrange(len(names))
        lines.append(names[at] + (".\n\n" if rng.random() < 0.1 else " "))
    path = folder / "corpus.txt"
    path.write_text("".join(lines))
    return path


# Plans


def test_a_plan_goes_to_json_and_back() -> None:
    plan = Plan(rate=1e-4, corpus=("a.txt", "b"), kv_heads=2, compile=True, control=("locater(target=free)",))
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json('{"rate": 1}').rate == 1.0


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ({"speed": 3}, "a plan has no 'speed'; it has out, task"),
        ({"steps": "many"}, "steps='many': must be of type int"),
        ({"steps": True}, "steps=True"),
        ({"steps": 0}, "steps=0: must be at least 1"),
        ({"rate": float("nan")}, "rate=nan: give a finite number"),
        ({"corpus": "a.txt"}, "corpus='a.txt'"),
        ({"task": "translate"}, "choose causal or masked or classify or image"),
        ({"width": 100, "heads": 3}, "width=100, heads=3: each must be a multiple of the next"),
        ({"width": 12, "heads": 4}, "give heads an even size"),
        ({"heads": 4, "kv_heads": 3}, "heads=4, kv_heads=3: each must be a multiple of the next"),
        ({"task": "image"}, "go together"),
        (
            {"task": "image", "images": "a.npz", "corpus": ["a.txt"]},
            "task=image learns from images alone: leave out corpus=a.txt",
        ),
        ({"masked": 1.0}, "these are shares"),
    ],
)
def test_a_bad_plan_is_refused(held: dict[str, Any], said: str) -> None:
    with pytest.raises(LocaterError) as error:
        Plan.from_dict(held)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_what_makes_another_run() -> None:
    assert plan_difference(Plan(out="a", log=5), Plan(out="b", log=7)) is None
    assert plan_difference(Plan(rate=0.1), Plan(rate=0.2)) == "rate=0.2, here 0.1"


# Text


def test_documents_of_files_folders_and_archives(tmp_path: Path) -> None:
    inside = tmp_path / "texts"
    (inside / "deep").mkdir(parents=True)
    (inside / "a.txt").write_text("alpha")
    (inside / "deep" / "b.txt.gz").write_bytes(gzip.compress(b"beta\r\n"))
    (inside / "c.txt.xz").write_bytes(lzma.compress(b"gamma"))
    (inside / "twice.txt").write_text("alpha")
    (inside / "picture.png").write_bytes(b"\x89PNG\0\xff")
    (inside / ".hidden").write_text("secret")
    assert read_documents([inside]) == ["alpha", "gamma", "beta\n"]
    with tarfile.open(tmp_path / "all.tar.xz", "w:xz") as archive:
        archive.add(inside / "a.txt", "z.txt")
        archive.add(inside / "picture.png", "b.png")
        archive.add(inside / "deep", "deep", recursive=False)
    assert read_documents([tmp_path / "all.tar.xz"]) == ["alpha"]
    assert read_documents([inside / "deep" / "b.txt.gz", inside / "a.txt"]) == ["beta\n", "alpha"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("none.txt", None, "cannot be read (No"),
        ("empty.txt", b" \n", "no text in it"),
        ("zeros.txt", b"text\0text", "not UTF-8 text (a zero byte at 4)"),
        ("latin.txt", "é".encode("latin-1"), "not UTF-8 text"),
        ("half.txt.xz", lzma.compress(b"text" * 500)[:-20], "cannot be read"),
        ("half.txt.gz", gzip.compress(b"text" * 500, mtime=0)[:-9], "cannot be read"),
        ("wrong.gz", b"plain", "cannot be read"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, name: str, content: bytes | None, said: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(LocaterError) as error:
        read_documents([path])
    assert str(path) in str(error.value)
    assert said in str(error.value)


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"\0\1")
    with pytest.raises(LocaterError, match="no text in it"):
        read_documents([tmp_path])


def test_splits_share_no_document_and_lose_none(tmp_path: Path) -> None:
    documents = [f"document {n} " * (n % 7 + 1) for n in range(300)]
    parts = split(documents)
    assert sorted(parts["train"] + parts["select"] + parts["report"]) == sorted(documents)
    sizes = {name: sum(map(len, held)) / sum(map(len, documents)) for name, held in parts.items()}
    assert sizes["report"] == pytest.approx(0.05, abs=0.01)
    assert sizes["select"] == pytest.approx(0.05, abs=0.01)
    assert parts == split(documents)
    assert parts["train"] != sorted(parts["train"])


def test_one_long_document_is_cut_into_pieces(tmp_path: Path) -> None:
    text = corpus(tmp_path).read_text()
    parts = split([text])
    assert all(len(parts[name]) > 1 for name in parts)
    assert sum(len(piece) for held in parts.values() for piece in held) == pytest.approx(len(text), rel=0.02)
    assert all(piece in text for held in parts.values() for piece in held)


@pytest.mark.parametrize("vocabulary", [256, 300])
def test_tokenizers_are_read_by_transformers(tmp_path: Path, vocabulary: int) -> None:
    from transformers import AutoTokenizer

    text = "Attention, naïve: 3 × 4.\n\n  tabs\tand\0so on 🙂" + "the head of the layer " * 20
    tokenizer = make_tokenizer(vocabulary, [text])
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode(text).tolist()
    assert theirs(text)["input_ids"] == ids
    assert theirs.decode(ids) == text
    assert len(theirs) == tokenizer.size == vocabulary
    assert (ids == list(text.encode())) == (vocabulary == 256)


# Batches


def test_batches_depend_on_seed_and_step_alone(tmp_path: Path) -> None:
    plan = Plan(**TINY, corpus=(str(corpus(tmp_path)),))
    data = open_data(plan, tmp_path, torch.device("cpu"))
    later = data.batch(7)
    assert torch.equal(open_data(plan, tmp_path, torch.device("cpu")).batch(7)[0], later[0])
    assert not torch.equal(data.batch(8)[0], later[0])
    inputs, targets = later
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    text = "".join(map(chr, inputs[0].tolist()))
    assert text in bytes(data.splits["train"].tolist()).decode()  # type: ignore[attr-defined]


def test_windows_cover_a_split_once(tmp_path: Path) -> None:
    plan = Plan(**TINY, corpus=(str(corpus(tmp_path)),))
    data = open_data(plan, tmp_path, torch.device("cpu"))
    targets = torch.cat([y.flatten() for _, y in data.windows("report")])
    whole = data.splits["report"]  # type: ignore[attr-defined]
    assert torch.equal(targets, whole[1 : len(targets) + 1].long())
    assert len(whole) - len(targets) <= plan.length


def test_masked_batches_hide_what_is_asked_for(tmp_path: Path) -> None:
    data = open_data(
        Plan(**{**TINY, "batch": 64}, task="masked", corpus=(str(corpus(tmp_path)),)), tmp_path, torch.device("cpu")
    )
    inputs, targets = data.batch(0)
    hidden = inputs == 256
    assert float(hidden.float().mean()) == pytest.approx(0.15, abs=0.04)
    assert torch.equal(hidden, targets != -100)
    assert bool((targets[hidden] < 256).all())
    assert torch.equal(next(data.windows("select"))[0], next(data.windows("select"))[0])


def images(path: Path, count: int = 200) -> Path:
    """Bright on the left is 1, on the right 0."""
    rng = np.random.default_rng(0)
    held = {}
    for name in ("train", "test"):
        labels = rng.integers(0, 2, count).astype(np.uint8)
        pictures = rng.integers(0, 60, (count, 8, 8)).astype(np.uint8)
        pictures[labels == 1, :, :4] += 150
        pictures[labels == 0, :, 4:] += 150
        held |= {f"{name}_images": pictures, f"{name}_labels": labels}
    np.savez(path, **held)
    return path


def test_images_of_an_epoch_come_once(tmp_path: Path) -> None:
    plan = Plan(task="image", images=str(images(tmp_path / "x.npz")), batch=30, device="cpu")
    data = open_data(plan, tmp_path, torch.device("cpu"))
    assert data.facts["count"] == {"select": 20, "train": 180, "report": 200}
    whole = data.splits["train"][0]  # type: ignore[attr-defined]
    epoch = torch.cat([data.batch(i)[0] for i in range(6)])
    assert sorted(x.sum().item() for x in epoch) == sorted(x.sum().item() for x in whole)
    assert not torch.equal(data.batch(0)[0], data.batch(6)[0])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(test_labels=None), "holds no test_labels"),
        (dict(train_images=np.zeros((200, 9, 9), np.uint8)), "do not divide into patches of 4"),
        (dict(train_images=np.zeros((200, 8, 8))), "of uint8"),
        (dict(train_labels=np.zeros(3, np.uint8)), "labels (N,)"),
    ],
)
def test_bad_images_are_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    held = {**np.load(images(tmp_path / "x.npz")), **change}
    np.savez(tmp_path / "y.npz", **{name: value for name, value in held.items() if value is not None})
    with pytest.raises(LocaterError, match=r"y\.npz") as error:
        open_data(Plan(task="image", images=str(tmp_path / "y.npz")), tmp_path, torch.device("cpu"))
    assert said in str(error.value)
    few = Plan(task="image", images=str(tmp_path / "x.npz"), batch=500)
    with pytest.raises(
        LocaterError, match=r"x\.npz: 180 images to train on fill no batch of 500: give a smaller --batch"
    ):
        open_data(few, tmp_path, torch.device("cpu"))


# The model


@pytest.mark.parametrize("qk_norm", [False, True])
def test_transformers_computes_the_same(tmp_path: Path, qk_norm: bool) -> None:
    from transformers import AutoModelForCausalLM

    model = Transformer(
        Shape(vocabulary=64, layers=3, width=32, heads=4, kv_heads=2, hidden=48, length=12, qk_norm=qk_norm)
    )
    redraw(model)
    (tmp_path / "tokenizer.json").write_text(ByteTokenizer().to_json())
    folder = checkpoints.save(tmp_path, "model", model)
    ids = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        ours = model(ids)
        torch.testing.assert_close(theirs(ids).logits, ours, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(theirs(ids, labels=ids).loss, model(ids[:, :-1], ids[:, 1:]), atol=1e-4, rtol=1e-4)
        assert torch.equal(load(folder)(ids), ours)


SHAPES = {
    "causal": Shape(vocabulary=64, layers=2, width=32, heads=4, kv_heads=2, hidden=48, length=9),
    "masked": Shape(vocabulary=64, layers=2, width=32, heads=4, kv_heads=4, hidden=48, length=9, causal=False, mlp="gelu"),
    "image": Shape(vocabulary=5, layers=2, width=32, heads=4, kv_heads=4, hidden=48, length=4, positions="learned", causal=False,
                   image=(8, 8, 3)),
}  # fmt: skip


@pytest.mark.parametrize("kind", SHAPES)
def test_a_saved_model_is_the_same_and_is_scanned(tmp_path: Path, kind: str) -> None:
    model = Transformer(SHAPES[kind])
    redraw(model)
    folder = checkpoints.save(tmp_path, "model", model)
    again = load(folder)
    rng = torch.Generator().manual_seed(0)
    inputs = (
        torch.randint(256, (2, 8, 8, 3), generator=rng) if kind == "image" else torch.randint(64, (2, 9), generator=rng)
    )
    with torch.no_grad():
        assert torch.equal(model(inputs), again(inputs))
    read = list(attention_layers(folder))
    assert [layer.causal for layer in read] == [kind == "causal"] * 2
    assert [layer.rotary is None for layer in read] == [kind == "image"] * 2
    with observe(model) as seen, torch.no_grad():
        model(inputs)
    assert len(seen.rows) == 8
    assert all(row.entropy is not None and row.entropy > 0 for row in seen.rows)


def test_a_fresh_interpreter_scans_what_was_trained(tmp_path: Path) -> None:
    """Nothing but the scan is imported: the type is known all the same."""
    folder = checkpoints.save(tmp_path, "model", Transformer(SHAPES["masked"]))
    code = (
        "import sys; from locater.commands.scanning import scan; assert 'locater_lab.models.transformer' not in sys.modules; "
        "print(len(scan(sys.argv[1]).rows))"
    )
    done = subprocess.run([python(), "-c", code, str(folder)], capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("8", 0), done.stderr


def test_a_causal_model_does_not_look_ahead_and_a_masked_one_does() -> None:
    for kind, changed in (("causal", False), ("masked", True)):
        model = Transformer(SHAPES[kind])
        redraw(model)
        ids = torch.zeros(1, 9, dtype=torch.long)
        other = ids.clone()
        other[0, -1] = 5
        with torch.no_grad():
            assert torch.equal(model(ids)[0, 0], model(other)[0, 0]) != changed


def test_the_layer_that_went_first_is_named() -> None:
    model = Transformer(Shape(vocabulary=64, layers=3, width=16, heads=2, kv_heads=2, hidden=24, length=8))
    batch = [(torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 8, dtype=torch.long))]
    assert find_diverged_layer(model, batch).startswith("all attention logits are finite, the largest")
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[9] = torch.inf  # type: ignore[union-attr, index, operator]
    assert find_diverged_layer(model, batch) == "the logits of model.layers.1.self_attn went first (head 1)"


# Controls by name


def test_controls_by_name() -> None:
    assert "locater" in controls()
    held: Any = parse_control("LocAteR(target=-1.5, part=full, layers=[0, 1])")
    assert (held.target, held.part, held.layers, held.shrink) == (-1.5, "full", [0, 1], 0.01)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("locator", "no control 'locator': did you mean 'locater'? There are "),
        (
            "locater(goal=2)",
            "control locater has no option 'goal': it has shrink, hold, target, form, part, limit, layers, schedule",
        ),
        ("locater(2)", "write it as name or name(option=value, ...)"),
        ("locater(**{})", "write it as"),
        ("locater(target=__import__('os'))", "a number, a word, a text or a list of them"),
        ("locater(target=2", "write it as"),
        ("", "write it as"),
        ("os.system('x')", "write it as"),
        ("locater(shrink='a')", "shrink='a', hold=0.01: both must be numbers from 0 on"),
        ("qk_clip(limit='a')", "limit='a': must be a number above 0"),
        ("qk_norm(init=[1])", "init=[1]: must be a number above 0, or keep"),
        ("sigmareparam(gamma=[1])", "gamma=[1]: must be a number, or spectral"),
        ("entropy_penalty(ceiling=True)", "must be"),
        ("temperature(init='a')", "init='a': a temperature must be a number above 0"),
        ("locater(part=half)", "choose symmetric, full or frobenius"),
        ("locater(layers=2)", "layers=2: give a list of numbers, such as [0, 2]"),
        ("locater(target=[1])", "target=[1]: must be a number, or free"),
        ("locater(schedule=cosine)", "schedule='cosine': must be a function of the step"),
        ("mimetic(target=high)", "target='high': must be a number"),
        ("mechanism", "mechanism needs name: write it as mechanism(name=...)"),
    ],
)
def test_a_bad_control_is_refused(text: str, said: str) -> None:
    with pytest.raises(LocaterError) as error:
        parse_control(text)
    assert said in str(error.value)
    assert str(error.value).startswith("--control ")


@pytest.mark.parametrize("control", ["nope(x=1)", "locater(shrnk=1)"])
def test_a_control_that_is_none_leaves_no_folder(control: str, tmp_path: Path) -> None:
    with pytest.raises(LocaterError, match=r"no control 'nope'|no option 'shrnk'"):
        run(Plan(out=str(tmp_path / "run"), control=(control,)))
    assert not (tmp_path / "run").exists()
