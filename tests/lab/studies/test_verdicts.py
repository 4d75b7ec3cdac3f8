"""The bench of faults itself: each fault changes what it says and nothing else, harmless changes leave the logits, and the
page says what the lines say. The real demo model, on disk, run by transformers.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM

from locater import scan
from locater.errors import LocaterError
from locater.sources.open_source import open_source
from locater_lab.studies.flags import wilson
from locater_lab.studies.verdicts import bench, commands, models, page, writing
from locater_lab.studies.verdicts.checkpoint import (
    ALPHA,
    RANK,
    Checkpoint,
    LoraAdapter,
    NotHereError,
    Place,
    adapter_for,
)
from locater_lab.studies.verdicts.faults import CAUSES, GROUPS, KNOWN, NEUTRAL, Fault, faults
from tests import ROOT

DEMO = models.trained_models(None)[0]
BASE = Checkpoint.open(DEMO.folder, DEMO.name)
ADAPTER = adapter_for(BASE, None)
TABLE = {fault.name: fault for fault in faults(ADAPTER)}
LAYERS, HEADS, KV, SIZE, WIDTH = 6, 4, 2, 32, 128  # of the demo
FILE = load_file(DEMO.folder / "model.safetensors")


def place(fault: Fault, layer: int = 3, head: int = 2) -> Place:
    return Place(layer, head, fault.strengths[0])


def planted(name: str, layer: int = 3, head: int = 2) -> Checkpoint:
    made = BASE.copied()
    TABLE[name].plant(made, place(TABLE[name], layer, head))
    return made


def written(name: str, folder: Path) -> Path:
    fault = TABLE[name]
    if fault.container == "adapter":
        return ADAPTER.save(folder, DEMO.folder)
    made = planted(name)
    path = writing.write(made, folder, fault.container)
    if fault.damage is not None:
        fault.damage(path, made, place(fault))
    return path


def applies(name: str) -> bool:
    try:
        planted(name)
    except NotHereError:
        return False
    return True


def stored(layer: int, part: str) -> Tensor:
    return FILE[f"model.layers.{layer}.self_attn.{part}_proj.weight"].float()


# ---- the table ----


def test_the_table_has_what_the_plan_asks_for() -> None:
    real = [fault for fault in TABLE.values() if not fault.harmless]
    assert len(TABLE) == len(faults(ADAPTER))
    assert len(real) >= 40
    assert {fault.group for fault in real} == set(GROUPS)
    assert {cause for fault in real for cause in fault.causes} == set(CAUSES)
    assert {cause for fault in TABLE.values() if fault.harmless for cause in fault.causes} < set(NEUTRAL)


NOT_IN_THE_DEMO = {"scaled-gain-of-queries", "zero-biases", "lost-biases", "scale-before-a-norm", "bfloat16"}


@pytest.mark.parametrize("name", TABLE)
def test_a_fault_changes_the_files_where_it_says(name: str, tmp_path: Path) -> None:
    """Files that differ from the model's: those that are planted, byte by byte. What a plan cannot be planted in says so."""
    fault = TABLE[name]
    if name in NOT_IN_THE_DEMO:
        assert not applies(name)
        return
    made = planted(name)
    spot = f"model.layers.{3}."
    changed = made.changed(BASE)
    assert all(torch.equal(BASE.tensors[key], FILE[key]) for key in FILE), "the base is never written to"
    if changed and fault.places != ("middle",) and fault.group in ("values", "one head", "quantisation"):
        assert all(key.startswith(spot) for key in changed), "of one layer"
    path = written(name, tmp_path / "out")
    if fault.damage is None and fault.container in ("one file", "shards", "renamed shards"):
        found: dict[str, Tensor] = {}
        for file in sorted(path.glob("*.safetensors")):
            found |= load_file(file)
        same = {
            key
            for key in FILE
            if key in found and found[key].dtype == FILE[key].dtype and torch.equal(found[key], FILE[key])
        }
        assert set(FILE) - same == set(changed) & set(FILE)
        assert json.loads((path / "config.json").read_text()) == made.config
        nothing = name in ("not-merged", "copy", "shards", "renamed-shards")
        assert (not changed and made.config == BASE.config) == nothing


# ---- what is planted, held against the file's own rows ----


def test_head_faults_are_in_the_rows_of_the_head() -> None:
    rows = slice(2 * SIZE, 3 * SIZE)
    after = planted("scaled-queries-of-a-head").tensors["model.layers.3.self_attn.q_proj.weight"].float()
    assert torch.equal(after[rows], (stored(3, "q")[rows] * 50).bfloat16().float())
    others = [i for i in range(HEADS * SIZE) if not rows.start <= i < rows.stop]
    assert torch.equal(after[others], stored(3, "q")[others])
    after = planted("dead-outputs").tensors["model.layers.3.self_attn.o_proj.weight"]
    assert not after[:, rows].any()
    assert torch.equal(after[:, others].float(), stored(3, "o")[:, others])
    after = planted("dead-values").tensors["model.layers.3.self_attn.v_proj.weight"]
    assert not after[SIZE:].any(), "query head 2 reads the second of two value heads"
    assert torch.equal(after[:SIZE].float(), stored(3, "v")[:SIZE])
    after = planted("permuted-queries").tensors["model.layers.3.self_attn.q_proj.weight"].float()
    assert torch.equal(after, stored(3, "q").roll(SIZE, 0))


def test_rotary_order_is_that_of_the_other_implementation() -> None:
    """Channel 2i of a head is what channel i was, 2i + 1 what i + n/2 was."""
    made = planted("rotary-order")
    for layer in (0, 5):
        for part, heads in (("q", HEADS), ("k", KV)):
            after = made.tensors[f"model.layers.{layer}.self_attn.{part}_proj.weight"].float()
            for head in range(heads):
                for i in range(SIZE // 2):
                    old, new = stored(layer, part)[head * SIZE :], after[head * SIZE :]
                    assert torch.equal(new[2 * i], old[i])
                    assert torch.equal(new[2 * i + 1], old[i + SIZE // 2])


def test_fused_order_cuts_groups() -> None:
    """Of q0 q1 q2 q3 k0 k1 v0 v1 the first group takes q0 q1 as queries, q2 as its key and q3 as its value."""
    made = planted("fused-order")
    q, k, v = (
        made.tensors[f"model.layers.0.self_attn.{part}_proj.weight"].float().unflatten(0, (-1, SIZE)) for part in "qkv"
    )
    old_q, old_k, old_v = (stored(0, part).unflatten(0, (-1, SIZE)) for part in "qkv")
    assert torch.equal(q, torch.cat([old_q[:2], old_k]))
    assert torch.equal(k, torch.stack([old_q[2], old_v[0]]))
    assert torch.equal(v, torch.stack([old_q[3], old_v[1]]))


def test_layer_faults_move_whole_blocks() -> None:
    def block(tensors: dict[str, Tensor], layer: int) -> dict[str, Tensor]:
        return {k.partition(f"layers.{layer}.")[2]: x for k, x in tensors.items() if f"layers.{layer}." in k}

    def same(name: str) -> list[int]:
        """For each block of the planted model the block of the file that it is."""
        made = planted(name).tensors
        count = LAYERS - (name == "dropped-layer")
        return [next(j for j in range(LAYERS) if all(torch.equal(x, block(FILE, j)[k]) for k, x in block(made, i).items())) for i in range(count)]  # fmt: skip

    assert same("duplicated-layer") == [0, 1, 2, 3, 3, 5]
    assert same("shifted-layers") == [1, 2, 3, 4, 5, 0]
    assert same("swapped-layers") == [0, 1, 2, 5, 4, 3]
    assert same("dropped-layer") == [0, 1, 2, 4, 5]
    assert planted("dropped-layer").config["num_hidden_layers"] == LAYERS - 1


def test_numbers_that_are_no_numbers() -> None:
    for name in ("nan-in-queries", "nan-in-values", "nan-in-mlp", "nan-in-embedding", "inf-in-norm"):
        made = planted(name)
        (changed,) = made.changed(BASE)
        assert int((~made.tensors[changed].isfinite()).sum()) == 1
    overflow = planted("overflow")
    assert all(x.dtype == torch.float16 for x in overflow.tensors.values())
    infinite = [name for name, x in overflow.tensors.items() if not x.isfinite().all()]
    assert infinite == ["model.layers.3.self_attn.q_proj.weight"]


def test_quantised_maps_are_near_their_own_numbers() -> None:
    eight = planted("eight-bits")
    error = [(eight.tensors[k].float() - FILE[k].float()).norm() / FILE[k].float().norm() for k in eight.changed(BASE)]
    assert max(error) < 0.01
    two = planted("two-bits")
    assert all(len(two.tensors[k].float().view(-1, 32)[0].unique()) <= 3 for k in two.changed(BASE))
    lost = planted("zero-points-ignored")
    (name,) = lost.changed(BASE)
    assert (lost.tensors[name] >= 0).all(), "whole numbers times scales, both positive"


# ---- merging, held against peft ----


def test_the_adapter_is_what_peft_makes_of_it(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    folder = ADAPTER.save(tmp_path / "adapter", DEMO.folder)
    base = AutoModelForCausalLM.from_pretrained(DEMO.folder, dtype=torch.float32)
    merged = peft.PeftModel.from_pretrained(base, str(folder)).merge_and_unload().state_dict()
    for name in ADAPTER.factors:
        expected = FILE[name].float() + ADAPTER.delta(name)
        assert torch.allclose(merged[name], expected, atol=1e-6)
        assert (ADAPTER.delta(name).norm() / FILE[name].float().norm()).item() == pytest.approx(0.06, rel=1e-3)
        assert torch.linalg.matrix_rank(ADAPTER.delta(name)).item() == RANK
    weights, _ = open_source(str(folder))
    assert torch.allclose(weights.read(name).float(), expected, atol=1e-6)


def test_twice_merged_is_twice_the_alpha(tmp_path: Path) -> None:
    twice = planted("merged-twice")
    double = LoraAdapter({k: (a, 2 * b) for k, (a, b) in ADAPTER.factors.items()}, False)
    other = BASE.copied()
    double.merge(other)
    assert twice.digest(BASE) == other.digest(BASE)
    assert ALPHA / RANK == 2


def test_a_trained_adapter_goes_down_the_loss() -> None:
    names = [f"model.layers.{n}.self_attn.{x}_proj.weight" for n in range(LAYERS) for x in "qv"]
    module = AutoModelForCausalLM.from_pretrained(DEMO.folder, dtype=torch.float32)
    trained = adapter_for(BASE, models.gradient_of(DEMO, names))
    losses = []
    for sign in (1.0, 0.0, -1.0):
        for name in names:
            module.get_parameter(name).data.copy_(FILE[name].float() + sign * trained.delta(name))
        losses.append(models.loss_of(module, DEMO).item())
    assert losses == sorted(losses)
    assert losses[2] - losses[0] > models.SMALLEST


# ---- changes that do no harm ----


def logits(path: Path, exact: bool) -> Tensor:
    """In float64 where the numbers are those of the file: GGUF and adapters are read by Locater's own reader."""
    torch.manual_seed(0)
    ids = torch.randint(1, 1024, (2, 24))
    folder = path if (path / "config.json").is_file() else DEMO.folder
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    if folder != path:
        weights, _ = open_source(str(path))
        for name in weights.names():
            module.get_parameter(name).data.copy_(weights.read(name))
    return module(input_ids=ids).logits.detach()


EQUAL = ("copy", "float32", "shards", "renamed-shards", "pickle", "without-prefix", "equal-scales", "gguf", "float16")


@pytest.mark.parametrize("name", EQUAL)
def test_changes_of_form_leave_the_logits(name: str, tmp_path: Path) -> None:
    """To the last bits of float64; a cast of bfloat16 to float16 rounds its smallest numbers."""
    before, after = logits(DEMO.folder, True), logits(written(name, tmp_path / "out"), True)
    tolerance = 2e-4 if name in ("float16", "gguf") else 1e-9
    assert (before - after).abs().max().item() < tolerance


NEW_AND_EQUAL = ("stored-head", "permuted-neurons", "permuted-stream", "scaled-neurons", "scaled-values", "groups-expanded",
                 "other-settings", "old-buffers", "in-reverse")  # fmt: skip


@pytest.mark.parametrize("name", NEW_AND_EQUAL)
def test_changes_that_nobody_had_in_mind_leave_the_logits(name: str, tmp_path: Path) -> None:
    change = bench.table_of_names()[name]
    made = BASE.copied()
    change.plant(made, place(change))
    assert change.damage or made.changed(BASE) or made.config != BASE.config
    path = writing.write(made, tmp_path / "out", change.container)
    if change.damage is not None:
        change.damage(path, made, place(change))
    tolerance = 1e-5 if name == "permuted-stream" else 1e-9  # norms add their squares up in float32, in another order
    assert (logits(DEMO.folder, True) - logits(path, True)).abs().max().item() < tolerance


SECOND = {name: fault for name, fault in bench.table_of_names().items() if fault.belongs == "unseen 2"}
EXACT = ("smoothed", "smoothed-pairs", "turned-stream", "mistral-by-name", "value-head-left", "trainer-folder", "stale-pickle",
         "settings-of-version-4", "shortest-settings", "index-without-size", "pickle-shards", "old-pickle", "float64")  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_changes_of_the_second_set_leave_the_logits(name: str, tmp_path: Path) -> None:
    """In float32, where scales and turns are rounded least."""
    change, made = SECOND[name], BASE.copied()
    base = made.copied()
    TABLE["float32"].plant(base, place(TABLE["float32"]))
    made = base.copied()
    change.plant(made, place(change))
    form = change.damage is not None or change.container != "one file"
    assert form or made.changed(base) or made.config != base.config
    path = writing.write(made, tmp_path / "out", change.container)
    if change.damage is not None:
        change.damage(path, made, place(change))
    before, after = logits(DEMO.folder, True), logits(path, True)
    assert ((before - after).norm() / before.norm()).item() < (1e-9 if form else 1e-4)


SECOND_OF_BERT = ("centred-writes", "gamma-and-beta", "with-prefix")


@pytest.mark.parametrize("name", SECOND_OF_BERT)
def test_changes_of_the_second_set_leave_the_states_of_bert(name: str, tmp_path: Path) -> None:
    base = Checkpoint.open(models.tiny_model("bert", tmp_path / "bert").folder, "bert")
    made = base.copied()
    SECOND[name].plant(made, place(SECOND[name], 1, 1))
    assert made.changed(base)
    path = writing.write(made, tmp_path / "out", "one file")
    ids = torch.randint(1, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    before, after = (AutoModel.from_pretrained(x, dtype=torch.float64)(input_ids=ids).last_hidden_state for x in (base.folder, path))  # fmt: skip
    assert ((before - after).norm() / before.norm()).item() < 1e-6


@pytest.fixture(scope="module")
def second_lines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Losses of the second set in the demo; no command is asked."""
    folder = tmp_path_factory.mktemp("second")
    made = bench.open_bench(DEMO, folder, {}, ())
    assert isinstance(made, bench.Bench)
    return list(bench.run(made, folder / "lines.jsonl", "unseen 2"))


def test_the_second_set_does_what_it_says_to_the_loss(second_lines: list[dict[str, Any]]) -> None:
    moved = {(x["fault"], x["at"]): page.change(x) for x in second_lines}
    harmless = [x for x in second_lines if x["group"] == "harmless"]
    assert len(harmless) >= 20
    assert all(abs(moved[x["fault"], x["at"]] or math.inf) < 0.01 or moved[x["fault"], x["at"]] == 0 for x in harmless)
    faults = [x for x in second_lines if x["group"] != "harmless"]
    assert sum(page.does_harm(x) for x in faults) > 0.75 * len(faults)
    broken = {x["fault"] for x in faults if not x["runs"]}
    assert broken == {"pointer-file", "empty-tensors", "one-token-more"}
    assert all(x["said"] == {} for x in second_lines)


def test_harmless_changes_of_the_second_set_do_no_harm_to_trained_models() -> None:
    """Of the stored losses: within 0.01 nats, in every model that they were measured in."""
    files = (ROOT / "docs" / "results").glob("verdicts*.jsonl")
    lines = [json.loads(text) for file in files for text in file.read_text().splitlines()]
    own = [x for x in lines if x["fault"] in SECOND and x["group"] == "harmless" and x["role"] != "tiny"]
    assert {x["fault"] for x in own} == {name for name, fault in SECOND.items() if fault.harmless}
    assert {(x["fault"], x["model"]): page.change(x) for x in own if abs(page.change(x) or 0.0) > 0.01} == {}
    assert all(x["runs"] for x in own)


def second(name: str, base: Checkpoint = BASE, layer: int = 3, head: int = 2) -> dict[str, Tensor]:
    made = base.copied()
    SECOND[name].plant(made, place(SECOND[name], layer, head))
    return {key: x.float() for key, x in made.tensors.items()}


def test_parts_of_processes_are_where_they_say() -> None:
    q, k, v = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv")
    old_q, old_k, old_v = (FILE[name].float() for name in (q, k, v))
    again = second("first-rank-everywhere")
    assert torch.equal(again[q], torch.cat([old_q[: 2 * SIZE]] * 2))
    assert torch.equal(again[k], torch.cat([old_k[:SIZE]] * 2))
    down = again["model.layers.0.mlp.down_proj.weight"]
    assert torch.equal(down[:, :128], down[:, 128:])
    cut = second("ranks-cut-as-one")  # q0 q1 k0 v0 q2 q3 k1 v1
    assert torch.equal(cut[q], torch.cat([old_q[: 2 * SIZE], old_k[:SIZE], old_v[:SIZE]]))
    assert torch.equal(cut[k], old_q[2 * SIZE :])
    assert torch.equal(cut[v], torch.cat([old_k[SIZE:], old_v[SIZE:]]))
    gate, up = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
    turns = second("interleaved-gates")
    assert torch.equal(turns[gate][5], FILE[up][2].float())
    assert torch.equal(turns[up][0], FILE[gate][128].float())
    rows = second("lost-rank-of-the-vocabulary")["model.embed_tokens.weight"]
    assert not rows[512:].any()
    assert torch.equal(rows[:512], FILE["model.embed_tokens.weight"][:512].float())


def test_keys_by_the_count_of_queries_are_right_where_counts_agree() -> None:
    """The same two steps with the true count give the rows back; with four heads of queries they do not."""
    name = "model.layers.0.self_attn.k_proj.weight"
    neighbours = FILE[name].float().view(KV, 2, SIZE // 2, WIDTH).transpose(1, 2).reshape(-1, WIDTH)
    right = neighbours.view(KV, SIZE // 2, 2, WIDTH).transpose(1, 2).reshape(-1, WIDTH)
    assert torch.equal(right, FILE[name].float())
    wrong = neighbours.view(HEADS, SIZE // 4, 2, WIDTH).transpose(1, 2).reshape(-1, WIDTH)
    assert torch.equal(second("keys-by-the-count-of-queries")[name], wrong)


def test_stacks_of_the_second_set() -> None:
    def same(name: str) -> list[int]:
        made, key = second(name), "model.layers.{}.mlp.up_proj.weight"
        count = sum(".mlp.up_proj." in x for x in made)
        return [next(j for j in range(LAYERS) if torch.equal(made[key.format(i)], FILE[key.format(j)].float())) for i in range(count)]  # fmt: skip

    assert same("every-second-layer") == [0, 2, 4]
    assert same("stacked-twice") == [0, 1, 2, 3, 2, 3, 4, 5]
    assert same("overwritten-stage") == [3, 4, 5, 3, 4, 5]
    assert same("virtual-stages") == [0, 3, 1, 2, 4, 5]
    made = BASE.copied()
    SECOND["stacked-twice"].plant(made, place(SECOND["stacked-twice"]))
    assert made.config["num_hidden_layers"] == 8


def test_one_bit_is_flipped() -> None:
    made = BASE.copied()
    SECOND["flipped-bit"].plant(made, place(SECOND["flipped-bit"]))
    (name,) = made.changed(BASE)
    differ = made.tensors[name].view(torch.int16) ^ FILE[name].view(torch.int16)
    assert differ.count_nonzero() == 1
    assert differ.sum() == 1 << 14
    assert made.tensors[name].isfinite().all()
    assert made.tensors[name].float().abs().max() > 1e35


def test_a_download_is_resumed_in_the_middle() -> None:
    made = BASE.copied()
    SECOND["resumed-download"].plant(made, place(SECOND["resumed-download"]))
    order = sorted(FILE)
    before, after = (torch.cat([x[n].float().flatten() for n in order]) for x in (FILE, made.tensors))
    half = len(before) // 2
    assert torch.equal(before[:half], after[:half])
    assert (before[half:] != after[half:]).float().mean() > 0.97
    assert len(made.changed(BASE)) < len(order)


def test_four_bits_of_the_second_set() -> None:
    """Held against 4 bits that are read as they should be."""
    name = "model.layers.0.mlp.up_proj.weight"
    blocks = FILE[name].float().view(-1, 32)
    scale = blocks.abs().amax(1, keepdim=True) / 7
    codes = (blocks / scale).round().clamp(-7, 7)
    signs = (second("signs-of-four-bits")[name].view(-1, 32) / scale).round()
    assert torch.equal(signs, torch.where(codes < 0, codes + 8, codes - 8))
    packed = (second("out-of-pack-order")[name].view(-1, 32) / scale).round()
    assert torch.equal(packed[:, :8], codes[:, [0, 2, 4, 6, 1, 3, 5, 7]])
    low, high = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
    step = (high - low) / 15
    off = (second("zero-points-off-by-one")[name].view(-1, 32) - blocks) / step
    assert off.mean().item() == pytest.approx(-1, abs=0.02)
    assert off.abs().max() < 2.1


def test_an_adapter_without_training_does_nothing(tmp_path: Path) -> None:
    fault = SECOND["adapter-without-training"]
    folder = ADAPTER.save(tmp_path, DEMO.folder)
    assert fault.damage is not None
    fault.damage(folder, BASE, place(fault))
    weights, _ = open_source(str(folder))
    assert all(torch.equal(weights.read(name).float(), FILE[name].float()) for name in ADAPTER.factors)


def test_eight_bits_of_a_file_are_those_of_the_numbers(tmp_path: Path) -> None:
    """What a GGUF file in Q8_0 holds is what the loss is measured on."""
    made = BASE.copied()
    SECOND["packed-in-eight-bits"].plant(made, place(SECOND["packed-in-eight-bits"]))
    weights, _ = open_source(str(writing.write(made, tmp_path / "out", "gguf")))
    names = [name for name in weights.names() if name in made.packed]
    assert len(names) >= 4 * LAYERS
    assert all(torch.equal(weights.read(n).bfloat16(), made.tensors[n].bfloat16()) for n in names)
    assert len(made.packed) == 1 + 7 * LAYERS


def test_permuted_heads_with_their_outputs_leave_the_logits(tmp_path: Path) -> None:
    made = planted("equal-permutation")
    assert len(made.changed(BASE)) == 4
    path = written("equal-permutation", tmp_path / "out")
    assert (logits(DEMO.folder, True) - logits(path, True)).abs().max().item() < 1e-9


def test_small_changes_are_small(tmp_path: Path) -> None:
    """A fine-tune of 1 % and 8 bits move logits by less than a twentieth of their own size."""
    before = logits(DEMO.folder, True)
    for name in ("fine-tune", "eight-bits"):
        after = logits(written(name, tmp_path / name), True)
        assert 0 < ((before - after).norm() / before.norm()).item() < 0.05


def test_a_cast_of_float32_is_to_bfloat16() -> None:
    wide = BASE.copied()
    TABLE["float32"].plant(wide, place(TABLE["float32"]))
    TABLE["bfloat16"].plant(wide, place(TABLE["bfloat16"]))
    assert all(torch.equal(wide.tensors[name], FILE[name]) for name in FILE)


FUSED = {"gpt2": "float64", "gpt_neox": "float64", "qwen3": "float64", "bert": "float64", "falcon": "float64"}


@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("name", ["equal-permutation", "equal-scales", "scale-before-a-norm"])
def test_equal_changes_of_other_families_leave_the_states(kind: str, name: str, tmp_path: Path) -> None:
    """Fused, transposed, interleaved and biased maps, and normalised queries: run by transformers."""
    model = models.tiny_model(kind, tmp_path / kind)
    base = Checkpoint.open(model.folder, kind)
    made = base.copied()
    try:
        TABLE[name].plant(made, Place(1, 1, TABLE[name].strengths[0]))
    except NotHereError:
        assert (name == "scale-before-a-norm") == (kind != "qwen3")
        return
    path = writing.write(made, tmp_path / "out", "one file")
    ids = torch.randint(1, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    states = [
        AutoModel.from_pretrained(folder, dtype=torch.float64)(input_ids=ids).last_hidden_state
        for folder in (model.folder, path)
    ]
    tolerance = 1e-5 if name == "scale-before-a-norm" else 1e-9  # the norm has an epsilon
    assert made.changed(base)
    assert (states[0] - states[1]).abs().max().item() < tolerance


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "falcon", "phi3", "bert"])
def test_faults_of_other_families_change_what_a_scan_reads(kind: str, tmp_path: Path) -> None:
    """A head times 50 is that head and no other, wherever its rows are."""
    model = models.tiny_model(kind, tmp_path / kind)
    base = Checkpoint.open(model.folder, kind)
    made = base.copied()
    TABLE["scaled-queries-of-a-head"].plant(made, Place(2, 1, 50.0))
    before, after = scan(str(model.folder)).rows, scan(str(writing.write(made, tmp_path / "out", "one file"))).rows
    for a, b in zip(before, after, strict=True):
        assert a.F is not None
        assert b.F is not None
        assert b.F / a.F == pytest.approx(2500 if (a.layer, a.head) == (2, 1) else 1, rel=1e-3)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "gemma3_text"])
def test_the_base_is_never_written_to(kind: str, tmp_path: Path) -> None:
    """Of a model that is stored in float32 too, where a conversion is no copy."""
    model = models.tiny_model(kind, tmp_path / kind)
    base = Checkpoint.open(model.folder, kind)
    before = {name: tensor.clone() for name, tensor in base.tensors.items()}
    settings = json.dumps(base.config)
    adapter = adapter_for(base, None)
    for fault in bench.every_fault(adapter):
        made = base.copied()
        try:
            fault.plant(made, Place(2, 1, fault.strengths[0]))
        except NotHereError:
            continue
        assert all(torch.equal(base.tensors[name], before[name]) for name in before), fault.name
        assert json.dumps(base.config) == settings, fault.name


# ---- files ----


def test_damaged_files_are_damaged(tmp_path: Path) -> None:
    for name in ("truncated-shard", "lost-shard", "stale-index", "duplicate-names"):
        with pytest.raises(LocaterError):
            open_source(str(written(name, tmp_path / name)))
    zeros, _ = open_source(str(written("zeros-at-the-end", tmp_path / "zeros")))
    empty = [name for name in zeros.names() if not zeros.read(name).any()]
    assert empty
    assert all(FILE[name].any() for name in empty)


# ---- running, counting, the page ----


def test_the_loss_is_that_of_plain_python(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    ids = (
        Tokenizer.from_file(str(DEMO.folder / "tokenizer.json"))
        .encode(" ".join(DEMO.text.split()), add_special_tokens=False)
        .ids
    )
    rows = torch.tensor(ids[: models.LENGTH * (min(len(ids), models.TOKENS) // models.LENGTH)]).view(-1, models.LENGTH)
    model = AutoModelForCausalLM.from_pretrained(DEMO.folder, dtype=torch.float32)
    chance = model(input_ids=rows).logits.log_softmax(-1)[:, :-1].gather(2, rows[:, 1:, None])
    assert models.measure_loss(DEMO.folder, DEMO) == pytest.approx(-chance.mean().item(), abs=1e-5)
    assert math.isnan(models.measure_loss(written("nan-in-mlp", tmp_path / "nan"), DEMO) or 0.0)
    assert models.measure_loss(written("lost-shard", tmp_path / "lost"), DEMO) is None


def test_a_loss_in_place_is_that_of_the_file(tmp_path: Path) -> None:
    module = models.load_quietly(DEMO.folder)
    sound = models.loss_in_place(module, DEMO, BASE, BASE)
    for name in ("rotary-order", "nan-in-mlp"):
        there = models.measure_loss(written(name, tmp_path / name), DEMO)
        assert there == pytest.approx(models.loss_in_place(module, DEMO, BASE, planted(name)), abs=1e-6, nan_ok=True)
        assert models.loss_in_place(module, DEMO, BASE, BASE) == sound, "the base is there again"
    for name in ("rope-theta", "lost-layer", "without-prefix"):
        assert models.loss_in_place(module, DEMO, BASE, planted(name)) is None


def test_lines_are_kept_and_the_page_is_theirs(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"

    def run(only: str) -> list[dict[str, Any]]:
        made = bench.open_bench(DEMO, tmp_path, bench.newest(path), ("scan", "compare"))
        assert isinstance(made, bench.Bench)
        return list(bench.run(made, path, only))

    made = run("nan-in-queries")
    assert [line["at"] for line in made] == ["early", "middle", "late"]
    assert run("nan-in-queries") == []
    made += run("harmless: copy")
    assert all(line["said"]["scan"] == {**line["said"]["scan"], "status": 1, "right": True} for line in made[:3])
    assert all(line["loss"] == "nan" and page.does_harm(line) for line in made[:3])
    copies = [line for line in made if line["group"] == "harmless"]
    assert all(line["said"]["scan"]["status"] == 0 and not page.does_harm(line) for line in copies)
    lines = bench.compact(path)
    assert len(lines) == len(made)
    told = page.page(lines, {})
    assert "nan-in-queries" in told
    assert page.count(lines[-3:], "scan").found_text() in told


def line(model: str, role: str, group: str, status: int, right: bool, loss: Any = 3.0) -> dict[str, Any]:
    said = {"doctor --base": {"status": status, "right": right, "says": "", "causes": []}}
    return {"model": model, "fault": "x", "at": "middle", "role": role, "group": group, "causes": ["zero"], "loss": loss, "reference": 2.0, "said": said}  # fmt: skip


def test_shares_are_counted_on_judged_models_and_on_faults_that_do_harm() -> None:
    lines = [
        *(line("a", "judged", "values", 1, True) for _ in range(8)),
        line("a", "judged", "values", 1, False),
        line("a", "judged", "values", 0, False, "nan"),
        line("a", "judged", "values", 0, False, 2.04),  # does no harm
        line("b", "chosen on", "values", 0, False),
        line("a", "judged", "harmless", 0, True, 2.0),
    ]
    found = page.goal(lines)
    assert found["harmful"] == page.Count(9, 8, 10)
    assert found["reached"]
    assert page.goal([*lines, line("a", "judged", "harmless", 1, False, 2.0)])["reached"] is False
    low, high = wilson(9, 10)
    assert found["harmful"].found_text() == f"9 of 10: 0.90 ({low:.2f} to {high:.2f})"


def test_faults_that_nobody_had_in_mind_are_counted_apart() -> None:
    every = bench.every_fault(ADAPTER)
    assert {fault.belongs for fault in every} == {KNOWN, *page.UNSEEN}
    assert len({fault.name for fault in every}) == len(every)
    for name in page.UNSEEN:
        own = [fault for fault in every if fault.belongs == name]
        assert all(fault.group in (*GROUPS, "harmless") for fault in own)
        assert {cause for fault in own for cause in fault.causes} <= {*CAUSES, *NEUTRAL} - {"unknown"}
    lines = [line("a", "judged", "values", 1, True), line("a", "judged", "harmless", 0, True, 2.0)]
    new = [{**line("a", "judged", "values", 1, False), "fault": "zero-pages"} for _ in range(4)]
    second = [{**line("a", "judged", "values", 1, True), "fault": "flipped-bit"}]
    for one in [*lines, *new, *second]:
        one["commit"] = "0" * 12
    for at, causes in enumerate(([], ["unknown"], ["untied"], ["untied", "unknown"])):
        new[at]["said"]["doctor --base"]["causes"] = [["fault", cause] for cause in causes]
    assert [page.answer(one, "doctor --base") for one in new] == ["unknown", "unknown", "untied", "untied"]
    assert page.goal([*lines, *new, *second]) == page.goal(lines)
    apart = page.page([*lines, *new], {}).partition("## Faults that nobody had in mind")
    assert (
        apart[0].replace(page._beyond(new, "unseen 1").lstrip(), "").replace("\n\n\n", "\n\n").strip()
        == page.page(lines, {}).partition("## Every fault")[0].strip()
    )
    assert "finds 4 of 4: 1.00 (0.51 to 1.00) of those that do harm" in apart[0]
    assert "| 2 | 2 of 4: 0.50 (0.15 to 0.85) |" in apart[2], "no cause, wrong cause"
    assert "A second set" not in "".join(apart)
    both = page.page([*lines, *new, *second], {})
    assert "finds 4 of 4: 1.00 (0.51 to 1.00) of those that do harm" in both, "the sets are not mixed"
    assert "finds 1 of 1: 1.00 (0.21 to 1.00) of those that do harm" in both
    assert "`flipped-bit`" in both.partition("## A second set")[2]
    assert "`flipped-bit`" not in both.partition("## A second set")[0]
    asked_nothing = [{**second[0], "said": {}}]
    assert "A second set" not in page.page([*lines, *new, *asked_nothing], {}), "losses alone are no answers"


def test_words_of_commands_name_causes() -> None:
    said = {"status": 1, "says": "locater: --fail-on: 1 head is sharp: 4.7"}
    assert commands.is_right(said, ("scaled-head",), harmless=False)
    assert not commands.is_right(said, ("rotary-order",), harmless=False)
    doctor = {"status": 1, "says": "", "causes": [["fault", "zero"], ["note", "dtype"]]}
    assert commands.is_right(doctor, ("zero",), harmless=False)
    assert not commands.is_right(doctor, ("dtype",), harmless=False)


def test_the_stored_page_is_that_of_the_stored_lines() -> None:
    from locater_lab.studies.verdicts.__main__ import WHY

    path = ROOT / "docs" / "results" / "verdicts.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert (ROOT / "docs" / "verdicts.md").read_text() == page.page(lines, WHY), "run make verdicts VERDICTS=--page"


def test_places_are_in_the_model() -> None:
    made = bench.Bench(DEMO, BASE, Path(), {}, ADAPTER)
    for fault in TABLE.values():
        spots = list(made.places(fault))
        assert spots
        assert all(0 <= spot.layer < LAYERS and 0 <= spot.head < HEADS for spot in spots)
        assert {spot.strength for spot in spots} == set(fault.strengths)
        assert len({spot.name for spot in spots}) == len(spots)
    tiny = replace(made, model=replace(DEMO, role="tiny"))
    assert all(len(list(tiny.places(fault))) == 1 for fault in TABLE.values())
