"""A scan against an independent float64 computation from the stored tensors, and the contract of its JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from locater import Scan, scan
from locater.commands.scan_rows import row_keys
from locater.discovery import layers_of
from locater.results.scan import HeadRow
from locater.sources.open_source import open_source
from locater.testing import assert_heads
from locater.theory import residual_kept
from tests import ROOT
from tests.conftest import Result

DEMO = Path(str(files("locater") / "demo"))
STORIES = ROOT.parent / "shared" / "models" / "stories260K"
MODELS = [
    pytest.param(DEMO, id="demo"),
    pytest.param(
        STORIES, id="stories260K", marks=pytest.mark.skipif(not STORIES.is_dir(), reason=f"{STORIES} is not there")
    ),
]
COLUMNS = (
    "layer head kv_head kind width head_dim scale trace trace_of_square frobenius_sq symmetric_sq mean variance concentration "
    "spectral_norm stable_rank effective_rank M S F skew key_bias localization approximation expected_entropy residual_kept flags"
).split()


def full_matrices(folder: Path) -> dict[tuple[int, int], np.ndarray]:
    """W = (W_Q diag g)^T (W_K diag g) of a Llama-shape checkpoint, d x d, float64."""
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    heads, groups, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    found = {}
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}"
        gain = tensors[f"{block}.input_layernorm.weight"].double().numpy()
        q, k = (tensors[f"{block}.self_attn.{p}_proj.weight"].double().numpy() * gain for p in "qk")
        for head in range(heads):
            group = head // (heads // groups)
            found[layer, head] = q[head * size : (head + 1) * size].T @ k[group * size : (group + 1) * size]
    return found


@pytest.mark.parametrize("folder", MODELS)
def test_moments_within_tolerance_of_float64(folder: Path) -> None:
    matrices = full_matrices(folder)
    rows = scan(folder, eigenvalues=True).rows
    assert len(rows) == len(matrices)
    for row in rows:
        W = matrices[row.layer, row.head]
        norm, symmetric = np.linalg.norm(W), (W + W.T) / 2
        assert abs(row.trace - np.trace(W)) <= 1e-5 * norm * row.head_dim**0.5
        for ours, exact in (
            (row.trace_of_square, np.trace(W @ W)),
            (row.frobenius_sq, norm**2),
            (row.symmetric_sq, np.trace(symmetric @ symmetric)),
        ):
            assert abs(ours - exact) <= 1e-5 * norm**2
        assert row.spectral_norm == pytest.approx(np.linalg.norm(W, 2), rel=1e-5)
        s = np.linalg.svd(W, compute_uv=False)[: row.head_dim]
        share = s / s.sum()
        assert row.stable_rank == pytest.approx((s**2).sum() / s[0] ** 2, rel=1e-5)
        assert row.effective_rank == pytest.approx(np.exp(-(share * np.log(share)).sum()), rel=1e-5)
        assert row.M == pytest.approx(np.trace(W) * row.head_dim**-0.5, abs=1e-5 * norm)
        close_spectra(np.array([complex(*pair) for pair in row.eigenvalues]), np.linalg.eigvals(W), norm)


def close_spectra(ours: np.ndarray, full: np.ndarray, norm: float) -> None:
    """Every eigenvalue of ours has a partner among the largest of the d x d matrix, and the sums of powers agree."""
    exact = full[np.argsort(-abs(full))][: len(ours)]
    # single eigenvalues of a non-normal map are badly conditioned
    assert max(min(abs(z - exact)) for z in ours) < 2e-3 * norm
    for power in (1, 2, 3):
        assert abs((ours**power).sum() - (exact**power).sum()) < 1e-4 * norm**power


def test_forty_heads_of_stories() -> None:
    if not STORIES.is_dir():
        pytest.skip(f"{STORIES} is not there")
    found = scan(STORIES)
    assert len(found.rows) == 40
    assert [r.kv_head for r in found.rows[:8]] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_json_contract(tmp_path: Path) -> None:
    found = scan(DEMO)
    found.save(tmp_path / "scan.json")
    document = json.loads((tmp_path / "scan.json").read_text())
    assert list(document) == ["schema", "locater", "source", "assumptions", "layers", "heads"]
    assert list(document["heads"][0]) == [*COLUMNS, "faults"]
    assert document["assumptions"]["prediction"] == "prior"
    assert document["assumptions"]["length"] == 256
    assert len(document["layers"]) == 6


def test_what_heads_keep_of_the_differences() -> None:
    found = scan(DEMO, length=100)
    for row in found.rows:
        assert row.residual_kept == pytest.approx(residual_kept(row.F + row.key_bias**2, 100).item(), rel=1e-5)
        assert 0.1 < row.residual_kept < 1
    for entry in found.layers:
        squares = [row.residual_kept**2 for row in found.rows if row.layer == entry["layer"]]
        assert entry["residual_kept"] ** 2 == pytest.approx(sum(squares) / len(squares))
    torch.manual_seed(0)
    sharper = nn.MultiheadAttention(16, 2)
    sharper.in_proj_weight.data *= 30
    assert min(r.residual_kept for r in scan(sharper).rows) > max(
        r.residual_kept for r in scan(nn.MultiheadAttention(16, 2)).rows
    )


def test_a_broken_head_keeps_no_number() -> None:
    broken = nn.MultiheadAttention(16, 2)
    broken.in_proj_weight.data[:8] = torch.nan
    found = scan(broken)
    assert found.rows[0].residual_kept is None
    assert found.layers[0]["residual_kept"] == pytest.approx(found.rows[1].residual_kept)
    broken.in_proj_weight.data[:] = torch.nan
    assert scan(broken).layers[0]["residual_kept"] is None


def test_how_many_keys_rows_see() -> None:
    layer = next(iter(layers_of(*open_source(DEMO))))
    for causal, window, kind in (
        (True, None, "self"),
        (True, 3, "self"),
        (False, 3, "self"),
        (False, None, "self"),
        (False, None, "cross"),
    ):
        held = replace(layer, causal=causal, window=window, kind=kind)
        assert set(row_keys(held, 9, 9)) == set(held.visible(9, 9)[0, 0].sum(-1).tolist())
        long = torch.tensor(row_keys(held, 1000, 1000), dtype=torch.float64).mean().item()
        assert long == pytest.approx(held.visible(1000, 1000)[0, 0].sum(-1).double().mean().item(), rel=0.01)


def test_eigenvalues_on_request_sum_to_the_trace() -> None:
    for row in scan(DEMO, eigenvalues=True).rows:
        assert sum(re for re, _ in row.eigenvalues) == pytest.approx(row.trace, abs=1e-4)
        assert sum(im for _, im in row.eigenvalues) == pytest.approx(0, abs=1e-4)


def test_raw_leaves_gains_out() -> None:
    tensors = load_file(DEMO / "model.safetensors")
    q, k = (tensors[f"model.layers.0.self_attn.{p}_proj.weight"].double() for p in "qk")
    expected = torch.trace(q[:32].T @ k[:32]).item()
    assert scan(DEMO, raw=True).rows[0].trace == pytest.approx(expected, rel=1e-4)
    assert scan(DEMO).rows[0].trace != pytest.approx(expected, rel=1e-2)


def test_cross_attention_has_no_traces() -> None:
    torch.manual_seed(0)
    model = nn.Transformer(32, 4, 1, 1, 48, batch_first=True)
    cross = [r for r in scan(model).rows if r.kind == "cross"]
    assert len(cross) == 4
    for row in cross:
        assert (row.trace, row.M, row.S, row.localization, row.mean, row.concentration) == (None,) * 6
        assert row.frobenius_sq > 0
        assert row.spectral_norm > 0
        assert row.F == pytest.approx(row.frobenius_sq * row.scale**2)


def test_sharp_is_where_the_entropy_of_a_row_is_below_a_tenth_of_log_T() -> None:
    """Over few tokens that needs a larger spread: the same head is sharp over many and not over two."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(32, 2)
    with torch.no_grad():
        attention.in_proj_weight *= 5
    short, long = scan(attention, length=2).rows[0], scan(attention, length=100_000).rows[0]
    assert short.F == long.F
    assert short.expected_entropy > 0.1 * math.log(2)
    assert long.expected_entropy < 0.1 * math.log(100_000)
    assert "sharp" not in short.flags
    assert "sharp" in long.flags


def test_frames(saved_llama: Path) -> None:
    found = scan(saved_llama)
    for frame in (found.to_pandas(), found.to_polars()):
        assert list(frame.columns)[: len(COLUMNS)] == COLUMNS
        assert len(frame) == 12


def test_rows_answer_by_name_and_by_key() -> None:
    row = HeadRow(layer=0, head=1, kv_head=0, kind="self", width=8, head_dim=4, scale=0.5, trace=2.0)
    assert row.trace == row["trace"] == 2.0


def test_a_family_can_be_registered_from_outside(tmp_path: Path) -> None:
    from locater import Family, register
    from locater.families import registry
    from locater.layers.build import projection
    from locater.layers.layer import AttentionLayer

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wq, self.wk = nn.Linear(16, 16), nn.Linear(16, 16)

    class Config:
        def to_dict(self) -> dict[str, str]:
            return {"model_type": "home-made"}

    def layers(weights, config):  # type: ignore[no-untyped-def]
        yield AttentionLayer("block", 0, 2, 2, 8, projection(weights, "wq"), projection(weights, "wk"), 8**-0.5)

    model = Block()
    model.config = Config()  # type: ignore[assignment]
    register(Family(("home-made",), layers))
    try:
        assert len(scan(model).rows) == 2
    finally:
        registry.BY_TYPE.remove("home-made")


def test_wrapped_parts_are_found_under_their_own_names() -> None:
    """Compiled layers put their name into the path; a bare block has no path at all."""
    torch.manual_seed(0)
    plain = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 48, batch_first=True), 2)
    with torch.no_grad():
        for block in plain.layers:
            block.norm2.weight.mul_(3)
    wanted = [row.F for row in scan(plain).rows]
    for number, block in enumerate(plain.layers):
        plain.layers[number] = torch.compile(block)
    assert [row.F for row in scan(plain).rows] == wanted
    bare = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True, norm_first=True)
    with torch.no_grad():
        bare.norm1.weight.mul_(3)
    assert [row.F for row in scan(bare).rows] == [row.F for row in scan(nn.Sequential(bare)).rows]


def test_autocast_does_not_reach_the_moments(saved_llama: Path) -> None:
    wanted = [row.trace for row in scan(saved_llama).rows]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert [row.trace for row in scan(saved_llama).rows] == wanted


def test_a_page_of_a_model_that_moved_on_is_refused(tmp_path: Path) -> None:
    from locater import LocaterError

    torch.manual_seed(0)
    model = nn.MultiheadAttention(32, 4)
    found = scan(model)
    found.report(tmp_path / "a.html")
    with torch.no_grad():
        model.in_proj_weight *= 2
    with pytest.raises(LocaterError, match="has changed since it was scanned"):
        found.report(tmp_path / "b.html")
    del model
    with pytest.raises(LocaterError, match="is gone"):
        found.report(tmp_path / "b.html")


def test_page_data_stay_out_of_the_json(tmp_path: Path) -> None:
    detailed = scan(DEMO, details=True)
    kept = detailed.plain(eigenvalues=False).to_dict()
    assert list(kept["heads"][0]) == [*COLUMNS, "faults"]
    assert kept["heads"] == scan(DEMO).to_dict()["heads"]


def test_terms_that_meet_content_are_named() -> None:
    from tests.families.more_encoders import CASES

    model = next(case for case in CASES if case.label == "xlnet").build()
    found = scan(model)
    assert {entry["positions"] for entry in found.layers} == {"relative"}
    assert any("relative terms" in note for note in found.assumptions["notes"])


def numbers_read(found: Any) -> tuple[int, int]:
    read = found.assumptions["read"]
    return read["maps"] + read["vectors"], read["of"]


def test_a_scan_says_how_much_of_a_model_it_read(saved_llama: Path, tmp_path: Path, run: Any) -> None:
    """The same of a file, of shards of it, of a pickle, of the live model and of jobs that share the layers."""
    from transformers import AutoModelForCausalLM

    tensors = load_file(saved_llama / "model.safetensors")
    wanted = sum(t.numel() for name, t in tensors.items() if re.search(r"[qk]_(proj|norm)|input_layernorm", name))
    every = sum(t.numel() for t in tensors.values())
    live = AutoModelForCausalLM.from_pretrained(saved_llama)
    live.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    (tmp_path / "pickle").mkdir()
    torch.save(tensors, tmp_path / "pickle" / "pytorch_model.bin")
    (tmp_path / "pickle" / "config.json").write_text((saved_llama / "config.json").read_text())
    for source in (saved_llama, tmp_path / "shards", tmp_path / "pickle"):
        assert numbers_read(scan(source)) == (wanted, every), source
    of_live = sum(parameter.numel() for parameter in live.parameters())
    assert numbers_read(scan(live)) == (wanted, of_live)
    joined = Scan.join(scan(saved_llama, shard=(i, 3)) for i in (1, 2, 3))
    assert numbers_read(joined) == (wanted, every)
    assert sum(numbers_read(scan(saved_llama, shard=(i, 3)))[0] for i in (1, 2, 3)) >= wanted
    share = f"{100 * wanted / every:.1f} % of the numbers of the model"
    assert share in " ".join(
        run("scan", saved_llama, "--json", tmp_path / "a.json", "--report", tmp_path / "a.html").out.split()
    )
    assert share in (tmp_path / "a.html").read_text()
    assert numbers_read(Scan.load(tmp_path / "a.json")) == (wanted, every)


# ---- values ----


def with_head_writing(factor: float, folder: Path, part: str = "v_proj") -> Path:
    """The demo with the values of heads 2.2 and 2.3, which share them, or the columns of the output map of head 2.1,
    times `factor`.
    """
    tensors, config = load_file(DEMO / "model.safetensors"), json.loads((DEMO / "config.json").read_text())
    size = config["head_dim"]
    map_ = tensors[f"model.layers.2.self_attn.{part}.weight"]
    (map_ if part == "v_proj" else map_.T)[size : 2 * size] *= factor
    (folder / "config.json").write_bytes((DEMO / "config.json").read_bytes())
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(("part", "heads"), [("v_proj", [2, 3]), ("o_proj", [1])])
@pytest.mark.parametrize(
    ("factor", "flag"), [(0.0, "silent"), (1 / 64, "silent"), (1 / 4, None), (1.0, None), (math.nan, "nonfinite")]
)
def test_a_head_that_writes_nothing_is_silent(
    factor: float, flag: str | None, part: str, heads: list[int], tmp_path: Path
) -> None:
    folder = with_head_writing(factor, tmp_path, part)
    found, before = scan(folder, values=True), scan(DEMO, values=True)
    flagged = {(row.layer, row.head): row.flags for row in found.rows if row.flags}
    assert flagged == ({} if flag is None else {(2, head): (flag,) for head in heads})
    at = 8 + heads[0]
    assert found.verdicts[at].faults == (() if flag is None else (flag,))
    row, healthy = found.rows[at], before.rows[at]
    assert row.F == healthy.F, "numbers of queries and keys stay"
    if math.isnan(factor):
        assert row.written is row.written_share is None
    else:
        assert row.written == pytest.approx(factor * healthy.written, rel=1e-6)  # type: ignore[operator]
        typical = np.median([x.written for x in found.rows[8:12] if x.written])
        assert row.written_share == pytest.approx(row.written / typical)
    assert not any(x.flags for x in scan(folder).rows), "values were not read"
    assert found.without_values().rows == scan(folder).rows
    found.save(tmp_path / "x.json")
    again = Scan.load(tmp_path / "x.json")
    assert (again.rows, again.has_values) == (found.rows, True)


def test_values_from_the_command_line(run: Callable[..., Result], tmp_path: Path) -> None:
    folder = with_head_writing(0.0, tmp_path, "o_proj")
    shown = run("scan", folder, "--values").out
    assert "1 of 24 heads is silent: 2.1." in shown
    assert "Read: queries, keys, values, outputs and norms, 29.1 % of the numbers" in " ".join(shown.split())
    assert "writes" not in run("scan", folder).out
    failed = run("scan", folder, "--fail-on", "silent")
    assert (failed.status, "1 head is silent: 2.1 (writes 0 of the median of its layer)" in failed.err) == (1, True)
    assert run("scan", folder, "--fail-on", "written_share<0.1").status == 1, "read because it is asked for"
    assert run("scan", DEMO, "--fail-on", "silent, written_share<0.1").status == 0
    document = json.loads(run("scan", folder, "--values", "--json", "-").out)
    assert document["assumptions"]["values"] is True
    assert document["heads"][9]["written_share"] == 0
    plain = json.loads(run("scan", folder, "--json", "-").out)
    assert not {"written", "written_share"} & {*plain["heads"][9]}
    with pytest.raises(AssertionError, match="layer 2 head 1: silent: it writes nothing"):
        assert_heads(folder, no="silent")


@pytest.mark.parametrize("folder", MODELS)
def test_no_head_of_a_sound_model_is_silent(folder: Path) -> None:
    shares = [row.written_share for row in scan(folder, values=True).rows]
    assert min(x for x in shares if x is not None) > 0.7
    assert None not in shares
