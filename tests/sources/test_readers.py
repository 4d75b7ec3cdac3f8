"""Reading: every way a checkpoint can lie on disk gives the same heads, and only the bytes of queries and keys are
touched.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from locater import LocaterError, scan
from locater.discovery import attention_layers
from locater.layers import effective
from locater.sources.open_source import open_source
from locater.sources.quantised import Dequantised


def rows(source: Path) -> list[tuple[float | None, ...]]:
    return [(r.trace, r.trace_of_square, r.frobenius_sq, r.spectral_norm) for r in scan(source).rows]


@pytest.fixture
def tensors(saved_llama: Path) -> dict[str, torch.Tensor]:
    return load_file(saved_llama / "model.safetensors")


def shard(
    tensors: dict[str, torch.Tensor], folder: Path, saved_llama: Path, suffix: str = "safetensors"
) -> dict[str, str]:
    """Two shards and their index, cut in the middle of a layer."""
    shutil.copy(saved_llama / "config.json", folder)
    names = sorted(tensors)
    places = {n: f"model-0000{1 + (i > len(names) // 2)}-of-00002.{suffix}" for i, n in enumerate(names)}
    for file in set(places.values()):
        part = {n: tensors[n] for n in names if places[n] == file}
        save_file(part, folder / file) if suffix == "safetensors" else torch.save(part, folder / file)
    stem = "model.safetensors" if suffix == "safetensors" else "pytorch_model.bin"
    (folder / f"{stem}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return places


def test_one_file_and_its_folder_agree(saved_llama: Path) -> None:
    assert rows(saved_llama / "model.safetensors") == rows(saved_llama)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_shards_agree_with_one_file(
    saved_llama: Path, tensors: dict[str, torch.Tensor], tmp_path: Path, suffix: str
) -> None:
    shard(tensors, tmp_path, saved_llama, suffix)
    assert rows(tmp_path) == rows(saved_llama)


@pytest.mark.parametrize("old_format", [False, True])
def test_pickled_weights_agree(
    saved_llama: Path, tensors: dict[str, torch.Tensor], tmp_path: Path, old_format: bool
) -> None:
    shutil.copy(saved_llama / "config.json", tmp_path)
    torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=not old_format)
    assert rows(tmp_path) == rows(saved_llama)


def test_live_model_agrees_with_its_checkpoint(saved_llama: Path) -> None:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(saved_llama)
    assert [r.trace for r in scan(model).rows] == [r.trace for r in scan(saved_llama).rows]


def test_only_queries_keys_and_gains_are_read(saved_llama: Path, tensors: dict[str, torch.Tensor]) -> None:
    weights, config = open_source(saved_llama)
    assert isinstance(weights, Dequantised)
    from locater.discovery import layers_of

    for layer in layers_of(weights, config):
        effective(layer)
    wanted = [t for n, t in tensors.items() if n.endswith(("q_proj.weight", "k_proj.weight", "input_layernorm.weight"))]
    assert weights.bytes_read == sum(t.numel() * t.element_size() for t in wanted)


def test_fused_rows_are_read_by_range(tmp_path: Path) -> None:
    """A map fused head by head: queries and keys come without the values between them."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    shape = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
    GPTNeoXForCausalLM(GPTNeoXConfig(**shape)).save_pretrained(tmp_path)
    weights, config = open_source(tmp_path)
    assert isinstance(weights, Dequantised)
    from locater.discovery import layers_of

    layers = list(layers_of(weights, config))
    before = weights.bytes_read
    layers[0].query.weight(), layers[0].key.weight()
    assert weights.bytes_read - before == 2 * 32 * 32 * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions(
    saved_llama: Path, tensors: dict[str, torch.Tensor], tmp_path: Path, dtype: torch.dtype
) -> None:
    shutil.copy(saved_llama / "config.json", tmp_path)
    save_file({n: t.to(dtype) for n, t in tensors.items()}, tmp_path / "model.safetensors")
    layer = attention_layers(tmp_path)[0]
    assert torch.equal(layer.query.weight(), tensors["model.layers.0.self_attn.q_proj.weight"].to(dtype))


def test_quantised_weights_are_named(saved_llama: Path, tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    shutil.copy(saved_llama / "config.json", tmp_path)
    save_file({n: (t * 10).to(torch.int8) for n, t in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(LocaterError, match=r"input_layernorm\.weight is stored as torch\.int8"):
        scan(tmp_path)


def test_cached_hub_model_is_found_offline(saved_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub client's own cache layout, filled by hand: no network is needed for a model that was fetched before."""
    import huggingface_hub.constants

    commit = "a" * 40
    snapshot = tmp_path / "models--someone--tiny" / "snapshots" / commit
    shutil.copytree(saved_llama, snapshot)
    (tmp_path / "models--someone--tiny" / "refs").mkdir()
    (tmp_path / "models--someone--tiny" / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert rows(Path("someone/tiny")) == rows(saved_llama)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("indexed", [True, False])
def test_one_shard_is_not_read_as_the_model(tmp_path: Path, suffix: str, indexed: bool) -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 4)
    places = {name: f"model-0000{1 + (name >= 'layers.2')}-of-00002.{suffix}" for name in model.state_dict()}
    for place in set(places.values()):
        part = {name: tensor for name, tensor in model.state_dict().items() if places[name] == place}
        (save_file if suffix == "safetensors" else torch.save)(part, tmp_path / place)
    stem = {"safetensors": "model.safetensors", "bin": "pytorch_model.bin"}[suffix]
    if indexed:
        (tmp_path / f"{stem}.index.json").write_text(json.dumps({"weight_map": places}))
        assert len(scan(tmp_path, heads=2).layers) == 4
    with pytest.raises(LocaterError, match=r"2 shards.*give the folder"):
        scan(tmp_path / f"model-00002-of-00002.{suffix}", heads=2)
    if suffix == "safetensors" and not indexed:
        assert len(scan(tmp_path, heads=2).layers) == 4
        (tmp_path / "model-00001-of-00002.safetensors").unlink()
        with pytest.raises(LocaterError, match="1 of the 2 shards"):
            scan(tmp_path, heads=2)


@pytest.mark.parametrize("raw", [False, True])
def test_queries_and_keys_in_different_precisions(
    saved_llama: Path, tensors: dict[str, torch.Tensor], tmp_path: Path, raw: bool
) -> None:
    shutil.copy(saved_llama / "config.json", tmp_path)
    save_file({n: t.double() if ".k_proj." in n else t for n, t in tensors.items()}, tmp_path / "model.safetensors")
    traces, expected = ([row.trace for row in scan(source, raw=raw).rows] for source in (tmp_path, saved_llama))
    assert traces == pytest.approx(expected, rel=1e-4, abs=1e-6)
