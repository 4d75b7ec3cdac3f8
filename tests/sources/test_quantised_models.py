"""Quantised models through the front door: a scan of the files, of the live model, and of the same weights as floats."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import locater
from locater.discovery import attention_layers
from locater.errors import LocaterError
from locater.sources.open_source import open_source

pytest.importorskip("transformers")
SHAPE = dict(hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
MAPS = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("plain")
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, vocab_size=64))
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
    model.bfloat16().save_pretrained(folder)
    return folder


def loaded(folder: Path, **settings: Any) -> nn.Module:
    from transformers import LlamaForCausalLM

    model: nn.Module = LlamaForCausalLM.from_pretrained(folder, device_map="cpu", dtype=torch.bfloat16, **settings)
    return model


def maps(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in list(tensors.items()):
        if name.endswith(tuple(f"{part}.weight" for part in MAPS)):
            yield name, tensor


def written(plain: Path, folder: Path, change: Callable[[Tensor], dict[str, Tensor]], settings: dict[str, Any]) -> Path:
    """The checkpoint with every map of attention stored as `change` stores it."""
    folder.mkdir(exist_ok=True)
    tensors = load_file(plain / "model.safetensors")
    for name, weight in maps(dict(tensors)):
        del tensors[name]
        tensors |= {f"{name.removesuffix('weight')}{part}": x.contiguous() for part, x in change(weight).items()}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return folder


def fp8_blocks(weight: Tensor, size: int = 32) -> dict[str, Tensor]:
    blocks = weight.float().unflatten(0, (-1, size)).unflatten(2, (-1, size))
    scale = blocks.abs().amax((1, 3)) / 448
    return {
        "weight": (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1).to(torch.float8_e4m3fn),
        "weight_scale_inv": scale,
    }


FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic", "fmt": "e4m3"}


def same_rows(one: locater.Scan, other: locater.Scan) -> bool:
    return [(r.trace, r.F, r.key_bias, r.flags) for r in one.rows] == [
        (r.trace, r.F, r.key_bias, r.flags) for r in other.rows
    ]


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
def test_bitsandbytes_live_and_saved(kind: str, plain: Path, tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    from transformers import BitsAndBytesConfig

    four = dict(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=kind == "nf4")
    how = BitsAndBytesConfig(**(dict(load_in_8bit=True) if kind == "int8" else four))
    model = loaded(plain, quantization_config=how)
    model.save_pretrained(tmp_path)
    live, saved = locater.scan(model), locater.scan(tmp_path)
    assert same_rows(live, saved)
    assert {row.quantised for row in (*live.rows, *saved.rows)} == {kind}
    assert {layer["quantised"] for layer in saved.layers} == {kind}
    assert f"quantised weights ({kind}): the numbers describe the quantised model" in saved.assumptions["notes"]
    floats = loaded(plain)
    for name, module in model.named_modules():
        if name.endswith(MAPS):
            if kind == "int8":
                weight = functional.int8_vectorwise_dequant(module.weight.data, module.weight.SCB)
            else:
                weight = functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            floats.get_submodule(name).weight = nn.Parameter(weight)
    assert same_rows(live, locater.scan(floats))
    assert not same_rows(live, locater.scan(plain))


def test_fp8_live_and_saved(plain: Path, tmp_path: Path) -> None:
    """transformers builds its own FP8 layers from these files, and its own dequantised model."""
    from transformers import FineGrainedFP8Config

    folder = written(plain, tmp_path / "fp8", fp8_blocks, FP8)
    saved = locater.scan(folder)
    assert {row.quantised for row in saved.rows} == {"fp8"}
    from transformers.integrations.finegrained_fp8 import FP8Linear

    live = loaded(plain)
    for name, tensors in {n: fp8_blocks(w) for n, w in maps(load_file(plain / "model.safetensors"))}.items():
        weight = tensors["weight"]
        layer = FP8Linear(weight.shape[1], weight.shape[0], block_size=(32, 32))
        layer.weight, layer.weight_scale_inv = (nn.Parameter(x, requires_grad=False) for x in tensors.values())
        path, _, last = name.removesuffix(".weight").rpartition(".")
        setattr(live.get_submodule(path), last, layer)
    assert same_rows(locater.scan(live), saved)
    assert "weight_scale_inv" not in " ".join(open_source(live)[0].names())
    # the library rounds its dequantised weights to bfloat16
    rounded = loaded(folder, quantization_config=FineGrainedFP8Config(dequantize=True, weight_block_size=(32, 32)))
    for theirs, ours in zip(locater.scan(rounded).rows, saved.rows, strict=True):
        assert theirs.F == pytest.approx(ours.F, rel=1e-2)


def test_compressed_tensors_live_and_saved(plain: Path, tmp_path: Path) -> None:
    """Compressed by the library in a live model, saved, and decompressed by the library."""
    compressed_tensors = pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import compress_module, decompress_module
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    assert compressed_tensors
    model = loaded(plain)
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=32)
    )
    modules = [module for name, module in model.named_modules() if name.endswith(MAPS)]
    for module in modules:
        weight = module.weight.detach()
        module.quantization_scheme = scheme
        module.weight_scale = nn.Parameter(weight.unflatten(1, (-1, 32)).abs().amax(2) / 7.5, requires_grad=False)
        compress_module(module)
    assert not hasattr(modules[0], "weight")
    live = locater.scan(model)
    assert {row.quantised for row in live.rows} == {"int4"}
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    config = json.loads((plain / "config.json").read_text())
    settings = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    save_file(tensors, tmp_path / "model.safetensors")
    assert same_rows(locater.scan(tmp_path), live)
    for module in modules:
        decompress_module(module)
        del module.weight_scale
    assert same_rows(locater.scan(model), live)


def test_a_scale_that_is_nan_gives_flagged_heads(plain: Path, tmp_path: Path) -> None:
    folder = written(plain, tmp_path / "fp8", fp8_blocks, FP8)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.weight_scale_inv"][2] = torch.nan  # rows 64 to 95: head 2
    save_file(tensors, folder / "model.safetensors")
    rows = locater.scan(folder).rows
    assert [(row.layer, row.head) for row in rows if row.F is None] == [(1, 2)]
    assert [row.flags for row in rows if row.F is None] == [("nonfinite",)]


def test_documents_keep_what_they_say(plain: Path, tmp_path: Path) -> None:
    folder = written(plain, tmp_path / "fp8", fp8_blocks, FP8)
    scan, before = locater.scan(folder), locater.scan(plain)
    scan.save(tmp_path / "scan.json")
    again = locater.Scan.load(tmp_path / "scan.json")
    assert again.rows == scan.rows
    assert again.layers == scan.layers
    assert all("quantised" not in row for row in before.to_dict()["heads"])
    assert all("quantised" not in layer for layer in before.layers)
    locater.compare(plain, folder)
    document = json.loads((tmp_path / "scan.json").read_text())
    document["heads"][0]["quantised"] = 4
    (tmp_path / "scan.json").write_text(json.dumps(document))
    with pytest.raises(LocaterError, match="quantised"):
        locater.Scan.load(tmp_path / "scan.json")


def test_a_discovered_checkpoint_is_seen_through(tmp_path: Path) -> None:
    """A type without a family: discovery builds it from config.json, and reads its quantised maps by the same names."""
    from transformers import GemmaConfig, GemmaForCausalLM

    torch.manual_seed(0)
    model = GemmaForCausalLM(GemmaConfig(**SHAPE, head_dim=32, vocab_size=64))
    model.save_pretrained(tmp_path / "plain")
    folder = written(tmp_path / "plain", tmp_path / "fp8", fp8_blocks, FP8)
    scan = locater.scan(folder)
    assert {layer["provenance"] for layer in scan.layers} == {"discovered"}
    assert {row.quantised for row in scan.rows} == {"fp8"}
    weights = open_source(folder)[0]
    for name, parameter in model.named_parameters():
        if name.endswith(tuple(f"{part}.weight" for part in MAPS)):
            parameter.data = weights.read(name)
    assert same_rows(locater.scan(model), scan)


def test_an_adapter_on_a_quantised_base(plain: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = written(plain, tmp_path / "fp8", fp8_blocks, FP8)
    model = peft.get_peft_model(loaded(plain), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    model.save_pretrained(tmp_path / "adapter")
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter" / "adapter_config.json").write_text(
        json.dumps({**settings, "base_model_name_or_path": str(base)})
    )
    scan = locater.scan(tmp_path / "adapter")
    assert {row.quantised for row in scan.rows} == {"fp8"}
    layer = attention_layers(tmp_path / "adapter")[0]
    under = attention_layers(base)[0].query.weight()
    part = model.base_model.model.model.layers[0].self_attn.q_proj
    delta = part.lora_B["default"].weight @ part.lora_A["default"].weight * part.scaling["default"]
    torch.testing.assert_close(layer.query.weight(), under + delta.detach().float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_live_adapter_on_a_quantised_base(kind: str, plain: Path) -> None:
    """As in QLoRA: the layer adds the adapter's output to that of the quantised map."""
    peft, functional = pytest.importorskip("peft"), pytest.importorskip("bitsandbytes").functional
    from transformers import BitsAndBytesConfig

    how = dict(load_in_8bit=True) if kind == "int8" else dict(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    base = loaded(plain, quantization_config=BitsAndBytesConfig(**how))
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    part = model.base_model.model.model.layers[1].self_attn.q_proj
    stored = part.base_layer.weight
    if kind == "int8":
        under = functional.int8_vectorwise_dequant(stored.data, stored.SCB)
    else:
        under = functional.dequantize_4bit(stored.data, stored.quant_state)
    delta = part.lora_B["default"].weight @ part.lora_A["default"].weight * part.scaling["default"]
    layer = attention_layers(model)[1]
    assert layer.quantised == kind
    torch.testing.assert_close(layer.query.weight(), under.float() + delta.float())
    assert {row.quantised for row in locater.scan(model).rows} == {kind}


@pytest.mark.parametrize("control", ["LocAteR", "QKClip", "SigmaReparam"])
def test_controls_refuse_weights_that_are_not_trained(control: str, plain: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    model = loaded(plain, quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(LocaterError, match=r"maps is trained|nothing can be written|is quantised"):
        getattr(locater.control, control)().attach(model)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_probe_of_a_quantised_model_runs(plain: Path) -> None:
    """Predictions from quantised maps stand beside what the quantised model does."""
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    model = loaded(plain, quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"))
    before = locater.scan(model)
    batches = [{"input_ids": torch.arange(48).view(2, 24) % 64}]
    result = locater.probe(model, batches)
    assert len(result.rows) == 8
    layer, module = attention_layers(model)[0], model.get_submodule("model.layers.0.self_attn.q_proj")
    # a pass may pack the weights anew, with scales of fewer bits; the layer is read as it computes now
    computed = module(torch.eye(128, dtype=torch.bfloat16)).mT.float()
    torch.testing.assert_close(layer.query.weight().float(), computed, rtol=1e-2, atol=1e-3)
    for then, now in zip(before.rows, locater.scan(model).rows, strict=True):
        assert then.F == pytest.approx(now.F, rel=0.02)


def test_other_maps_may_be_of_any_format(plain: Path, tmp_path: Path) -> None:
    """As in gpt-oss: MXFP4 in the experts, attention in bfloat16."""
    folder = written(plain, tmp_path / "mixed", lambda weight: {"weight": weight}, {"quant_method": "mxfp4"})
    tensors = load_file(folder / "model.safetensors")
    up = "model.layers.0.mlp.up_proj"
    del tensors[f"{up}.weight"]
    tensors |= {
        f"{up}_blocks": torch.zeros(4, 2, 16, dtype=torch.uint8),
        f"{up}_scales": torch.zeros(4, 2).to(torch.uint8),
    }
    tensors["model.layers.1.mlp.up_proj.weight_scale_2"] = torch.ones(())
    save_file(tensors, folder / "model.safetensors")
    scan = locater.scan(folder)
    assert same_rows(scan, locater.scan(plain))
    assert {row.quantised for row in scan.rows} == {None}


def test_the_page_has_the_table_that_the_study_prints() -> None:
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("compressed_tensors")
    from locater_lab.studies import quantised_weights

    page = (Path(__file__).parents[2] / "docs" / "quantised.md").read_text()
    for line in quantised_weights.comparison_table():
        assert line in page, f"{line}: make study STUDY=quantised_weights"
