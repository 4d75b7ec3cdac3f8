"""Bad input ends in one line that names the culprit and the way out, exit status 2, no traceback, nothing written."""

from __future__ import annotations

import inspect
import json
import math
import pickle
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from locater import LocaterError, scan
from locater.discovery import attention_layers
from tests import ROOT
from tests.conftest import Result
from tests.families import CASES
from tests.families.decoders import LLAMA3
from tests.parity import model_of
from tests.sources.test_readers import shard

Run = Callable[..., Result]


@pytest.fixture
def broken(saved_llama: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(saved_llama, tmp_path / "model"))


def refused(run: Run, tmp_path: Path, *args: object) -> str:
    """The one line of a refusal; also checks that the promised JSON was not left behind."""
    target = tmp_path / "out.json"
    result = run("scan", *args, "--json", target)
    assert result.status == 2, result
    assert not target.exists()
    assert result.out == ""
    lines = result.err.splitlines()
    assert len(lines) == 1, result.err
    assert lines[0].startswith("locater: ")
    return lines[0]


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_no_such_path(run: Run, tmp_path: Path) -> None:
    assert "no/such/folder/here: no such file or folder" in refused(run, tmp_path, "no/such/folder/here")


def test_not_on_the_hub_either(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "nobody/nothing: no such file or folder, and the hub did not return it" in refused(
        run, tmp_path, "nobody/nothing"
    )


def test_without_a_network(run: Run, tmp_path: Path, saved_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said at once and in one line, by every command that takes a hub id, and for a tokenizer."""
    import socket

    def nobody(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nobody)
    said = "nobody/nothing: no such file or folder, and the hub cannot be reached (is there a network?)"
    for args in (("scan", "nobody/nothing"), ("probe", "nobody/nothing"), ("compare", saved_llama, "nobody/nothing")):
        result = run(*args)
        assert (result.status, result.err.count("\n")) == (2, 1), result.err
        assert said in result.err
    (tmp_path / "words.txt").write_text("some words")
    result = run("probe", saved_llama, "--tokenizer", "nobody/nothing", "--text", tmp_path / "words.txt")
    assert (result.status, result.err.count("\n")) == (2, 1), result.err
    assert said in result.err
    assert "no tokenizer there" in result.err


def test_folder_without_weights(run: Run, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "notes.txt").write_text("hello")
    line = refused(run, tmp_path, empty)
    assert "no weights here" in line
    assert "notes.txt" in line


@pytest.mark.parametrize("kept", [4, 100, 3000, -1])
def test_truncated_file(run: Run, broken: Path, tmp_path: Path, kept: int) -> None:
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert "truncated" in refused(run, tmp_path, broken)


def test_header_that_is_not_a_header(run: Run, broken: Path, tmp_path: Path) -> None:
    (broken / "model.safetensors").write_bytes((16).to_bytes(8, "little") + b"not json at all!")
    assert "header is not readable" in refused(run, tmp_path, broken)


def test_index_names_a_missing_shard(run: Run, saved_llama: Path, tmp_path: Path) -> None:
    places = shard(load_file(saved_llama / "model.safetensors"), tmp_path, saved_llama)
    gone = sorted(set(places.values()))[1]
    (tmp_path / gone).unlink()
    assert f"names the shard {gone}, which is not there" in refused(run, tmp_path, tmp_path)


def test_index_names_a_missing_key(run: Run, saved_llama: Path, tmp_path: Path) -> None:
    places = shard(load_file(saved_llama / "model.safetensors"), tmp_path, saved_llama)
    places["model.layers.9.self_attn.q_proj.weight"] = sorted(set(places.values()))[0]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert "names the tensor model.layers.9.self_attn.q_proj.weight" in refused(run, tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_attention_heads": 8}, r"q_proj.weight has shape [32, 32] but the configuration says [64, 32]"),
        ({"num_key_value_heads": 4}, r"k_proj.weight has shape [16, 32] but the configuration says [32, 32]"),
        ({"hidden_size": 64}, r"q_proj.weight has shape [32, 32] but the configuration says [32, 64]"),
        ({"num_hidden_layers": 5}, "holds 3 attention layers but the configuration says 5"),
        ({"num_attention_heads": None}, "its configuration (model_type 'llama') has no num_attention_heads"),
    ],
)
def test_config_that_disagrees(run: Run, broken: Path, tmp_path: Path, change: dict[str, object], says: str) -> None:
    edit_config(broken, head_dim=8, **change)
    assert says in refused(run, tmp_path, broken)


def test_config_that_is_not_json(run: Run, broken: Path, tmp_path: Path) -> None:
    (broken / "config.json").write_text("{")
    assert "config.json: not readable as JSON" in refused(run, tmp_path, broken)


class Trap:
    """Runs code when unpickled; the reader must never get there."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (Path("sprung"),)


def test_pickle_that_is_not_weights_only(
    run: Run, broken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (broken / "model.safetensors").unlink()
    with open(broken / "pytorch_model.bin", "wb") as file:
        torch.save({"a": Trap()}, file, pickle_module=pickle)
    assert "refused" in refused(run, tmp_path, broken)
    assert not Path("sprung").exists()


def test_pickle_that_is_rubbish(run: Run, broken: Path, tmp_path: Path) -> None:
    (broken / "model.safetensors").unlink()
    (broken / "pytorch_model.bin").write_bytes(b"rubbish")
    assert "pytorch_model.bin" in refused(run, tmp_path, broken)


def test_model_without_attention(run: Run, tmp_path: Path) -> None:
    save_file({"0.weight": torch.zeros(4, 3), "0.bias": torch.zeros(4)}, tmp_path / "model.safetensors")
    assert "no attention found; it holds 0.weight [4, 3]" in refused(run, tmp_path, tmp_path)
    with pytest.raises(LocaterError, match="no attention found"):
        scan(nn.Sequential(nn.Linear(3, 4), nn.ReLU()))


def test_unknown_architecture(run: Run, broken: Path, tmp_path: Path) -> None:
    edit_config(broken, model_type="zebra")
    line = refused(run, tmp_path, broken)
    for part in (
        "model_type 'zebra'",
        "model.layers.*.self_attn.q_proj.weight [32, 32]",
        "--query",
        "--heads",
        "locater.register()",
    ):
        assert part in line


def test_tensors_can_be_named(run: Run, broken: Path, tmp_path: Path, saved_llama: Path) -> None:
    edit_config(broken, model_type="zebra")
    query, key = "model.layers.*.self_attn.q_proj.weight", "model.layers.*.self_attn.k_proj.weight"
    named = run("scan", broken, "--query", query, "--key", key, "--heads", 4, "--json", "-")
    assert named.status == 0, named.err
    found = json.loads(named.out)["heads"]
    stored = scan(saved_llama, raw=True).rows
    assert [h["trace"] for h in found] == [r.trace for r in stored]
    assert [h["kv_head"] for h in found] == [r.kv_head for r in stored]
    assert "which 5 heads do not divide" in refused(run, tmp_path, broken, "--query", query, "--key", key, "--heads", 5)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--query", "model.*"), "--query and --key go together"),
        (("--query", "q.*", "--key", "k.*", "--heads", 4), "no tensor matches --query 'q.*'"),
        (
            ("--query", "*.q_proj.weight", "--key", "*.k_proj.weight", "--heads", 5),
            "the model says num_attention_heads = 4",
        ),
        (("--query", "*.q_proj.weight", "--key", "*.input_layernorm.weight", "--heads", 4), "has no partner"),
        (
            ("--query", "*.self_attn.q_proj.weight", "--key", "*.mlp.up_proj.weight", "--heads", 4),
            "does not fit 4 query heads",
        ),
        (
            ("--query", "*.input_layernorm.weight", "--key", "*.input_layernorm.weight", "--heads", 4),
            "a query or key map has two axes",
        ),
        (("--fail-on", "shap"), "'shap': neither a flag"),
        (("--fail-on", "sink"), "needs a forward pass"),
        (("--fail-on", "max_logit>100"), "no column 'max_logit'"),
        (("--fail-on", "M<low"), "'low' is not a number"),
        (("--fail-on", " , "), "names nothing"),
        (("--length", 1), "length 1 is out of range"),
    ],
)
def test_bad_options(run: Run, saved_llama: Path, tmp_path: Path, args: tuple[object, ...], says: str) -> None:
    assert says in refused(run, tmp_path, saved_llama, *args)


def test_target_that_cannot_be_written(run: Run, saved_llama: Path, tmp_path: Path) -> None:
    for target, says in ((tmp_path / "no" / "out.json", "does not exist"), (tmp_path, "is a folder")):
        result = run("scan", saved_llama, "--json", target)
        assert (result.status, says in result.err, result.out) == (2, True, "")


def test_heads_are_asked_for_where_nothing_tells(run: Run, tmp_path: Path) -> None:
    save_file(
        {k: v.contiguous() for k, v in nn.MultiheadAttention(16, 2).state_dict().items()}, tmp_path / "m.safetensors"
    )
    assert "num_heads" in refused(run, tmp_path, tmp_path / "m.safetensors")
    assert run("scan", tmp_path / "m.safetensors", "--heads", 2).status == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nonfinite_head_is_flagged_and_the_rest_scanned(
    run: Run, broken: Path, saved_llama: Path, value: float
) -> None:
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.weight"][9, 3] = value  # query head 1 of 4
    save_file(tensors, broken / "model.safetensors")
    result = run("scan", broken, "--json", "-", "--eigenvalues")
    assert result.status == 0, result.err
    heads = json.loads(result.out)["heads"]
    bad = [(h["layer"], h["head"]) for h in heads if "nonfinite" in h["flags"]]
    assert bad == [(1, 1)]
    assert next(h for h in heads if h["flags"] == ["nonfinite"])["trace"] is None
    healthy = [r.trace for r in scan(saved_llama).rows if (r.layer, r.head) != (1, 1)]
    assert [h["trace"] for h in heads if (h["layer"], h["head"]) != (1, 1)] == healthy


def test_nonfinite_key_flags_its_whole_group(broken: Path) -> None:
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.2.self_attn.k_proj.weight"][15, 0] = float("nan")  # key head 1, used by query heads 2 and 3
    save_file(tensors, broken / "model.safetensors")
    assert [(r.layer, r.head) for r in scan(broken).rows if r.flags == ("nonfinite",)] == [(2, 2), (2, 3)]


def test_config_values_of_the_wrong_kind(run: Run, broken: Path, tmp_path: Path) -> None:
    """Whatever stands in config.json, the answer is one line and status 2."""
    original = (broken / "config.json").read_text()
    for change in (
        {"num_attention_heads": "4"}, {"num_attention_heads": 0}, {"num_attention_heads": True}, {"num_key_value_heads": 3},
        {"rope_parameters": {"rope_theta": None}}, {"rope_parameters": {"rope_type": "linear"}}, {"rope_parameters": "none"},
        {"model_type": ["llama"]}, {"head_dim": 7},
    ):  # fmt: skip
        (broken / "config.json").write_text(original)
        edit_config(broken, **change)
        refused(run, tmp_path, broken)


NOT_COUNTS = (0, -4, 2.5, "4", True, 10**30, [4], math.nan)
NOT_SIZES = (0, -1.0, math.nan, math.inf, -math.inf, 10**400, "1e4", True, [1.0])
BAD_SETTINGS: list[tuple[str, tuple[Any, ...]]] = [
    *((key, NOT_COUNTS) for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")),
    ("num_hidden_layers", (-1, 10**12, 2.5, "3", True, math.nan)),
    ("rope_theta", NOT_SIZES),
    ("rms_norm_eps", (-1e-6, math.nan, math.inf, "1e-6", None)),
    ("partial_rotary_factor", (0, -0.5, 1.5, math.nan, "half")),
]
BAD_ROPE: list[tuple[dict[str, Any], str]] = [
    *(({"rope_type": "linear", "factor": bad}, "factor") for bad in NOT_SIZES),
    *(({"rope_type": "default", "rope_theta": bad}, "rope_theta") for bad in (*NOT_SIZES, None)),
    ({"rope_type": "linear"}, "factor"),
    ({"rope_type": "yarn", "factor": None}, "factor"),
    (
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings",
    ),
    (LLAMA3 | {"high_freq_factor": 1.0}, "high_freq_factor"),
    (LLAMA3 | {"low_freq_factor": math.nan}, "low_freq_factor"),
    ({"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0}, "rope_theta"),
    ({"rope_type": "yarn", "factor": 4.0, "attention_factor": math.inf}, "attention_factor"),
    (
        {"rope_type": "longrope", "short_factor": [1.0, math.nan, 1.0, 1.0], "original_max_position_embeddings": 16},
        "short_factor",
    ),
    (
        {"rope_type": "longrope", "short_factor": [1.0] * 4, "original_max_position_embeddings": 1},
        "original_max_position_embeddings",
    ),
    ({"rope_type": "longrope", "original_max_position_embeddings": 16}, "short_factor"),
    ({"rope_type": "dynamic", "factor": 2.0}, "dynamic"),
]


def test_settings_that_no_model_can_have(broken: Path) -> None:
    """json reads NaN and Infinity, and what is computed from them would look like a result."""
    original = json.loads((broken / "config.json").read_text())
    changes = [({key: bad}, key) for key, values in BAD_SETTINGS for bad in values]
    for change, key in [*changes, *(({"rope_parameters": rope}, key) for rope, key in BAD_ROPE)]:
        (broken / "config.json").write_text(json.dumps({**original, **change}))
        with pytest.raises(LocaterError) as error:
            scan(broken)
        line = str(error.value)
        assert line.startswith(f"{broken}: "), (change, line)
        assert key in line, (change, line)
        assert "\n" not in line


@pytest.mark.parametrize(
    ("label", "change"),
    [
        ("gemma2", {"query_pre_attn_scalar": 0}),
        ("gemma2", {"attn_logit_softcapping": math.nan}),
        ("gemma2", {"attn_logit_softcapping": 0.0}),
        ("gemma2", {"sliding_window": 0}),
        ("gemma3-composite", {"text_config": {"query_pre_attn_scalar": -1}}),
        ("gemma3-composite", {"text_config": {"rope_parameters": {"sliding_attention": {"rope_theta": math.inf}}}}),
        ("gemma3-composite", {"vision_config": {"num_attention_heads": 0}}),
        ("granite", {"attention_multiplier": math.nan}),
        ("bert", {"layer_norm_eps": -1.0}),
        ("gpt_neox", {"rotary_pct": 0.0, "rope_parameters": None}),
        ("gptj", {"rotary_dim": "all"}),
        *(("mistral-window", {"sliding_window": bad}) for bad in (0, -4, 2.5, "4", True, [4])),
        *(("qwen2-window", {"layer_types": bad}) for bad in ("full", [1, 2, 3])),
        ("deepseek_v3", {"kv_lora_rank": 0}),
        ("qwen2-window", {"use_sliding_window": "false"}),
        ("t5", {"num_heads": 4.0}),
        ("albert", {"inner_group_num": 0}),
        ("torch-encoder-pre", {"layer_norm_eps": "small"}),
        ("timm", {"num_heads": True}),
    ],
)
def test_settings_of_other_families(label: str, change: dict[str, Any], tmp_path: Path) -> None:
    case = next(c for c in CASES if c.label == label)
    model = model_of(case)
    case.save(model, tmp_path) if case.save else model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    edit_config(tmp_path, **{k: {**config[k], **v} if isinstance(v, dict) else v for k, v in change.items()})
    with pytest.raises(LocaterError) as error:
        scan(tmp_path)
    key, value = next(iter(change.items()))
    while isinstance(value, dict):
        key, value = next(iter(value.items()))
    assert f"{key} = {value!r}" in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_a_list_of_layer_types_that_is_too_short(tmp_path: Path) -> None:
    model_of(next(c for c in CASES if c.label == "qwen2-window")).save_pretrained(tmp_path)
    edit_config(tmp_path, layer_types=["full_attention"])
    with pytest.raises(LocaterError, match="layer_types has 1 entries but num_hidden_layers is"):
        scan(tmp_path)


@pytest.mark.parametrize(
    ("label", "change"),
    [
        (
            "llama",
            {
                "rotary_dim": None,
                "partial_rotary_factor": None,
                "rope_theta": None,
                "max_window_layers": None,
                "head_dim": None,
            },
        ),
        (
            "llama",
            {
                "num_heads": [1, 2],
                "alibi": "none",
                "sliding_window": 0,
                "rotary_pct": 7,
                "layer_types": ["full_attention"],
            },
        ),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 0, "max_window_layers": None}),
        ("bloom", {"pretraining_tp": 0, "slow_but_exact": True}),
        ("bloom", {"pretraining_tp": None, "slow_but_exact": True}),
    ],
)
def test_null_and_settings_that_a_family_never_reads_refuse_nothing(
    label: str, change: dict[str, Any], tmp_path: Path
) -> None:
    model_of(next(c for c in CASES if c.label == label)).save_pretrained(tmp_path)
    expected = [row.trace for row in scan(tmp_path).rows]
    edit_config(tmp_path, **change)
    assert [row.trace for row in scan(tmp_path).rows] == expected


def test_null_channels_of_gptj_are_all(tmp_path: Path) -> None:
    """So says its model: the table of angles is as wide as a head (of one; it does not run with more)."""
    from transformers import GPTJConfig, GPTJModel

    config = GPTJConfig(n_layer=1, n_head=1, n_embd=16, rotary_dim=16, vocab_size=16, n_positions=8)
    vars(config)["rotary_dim"] = None  # which newer versions of the package no longer take
    model = GPTJModel(config)
    model.save_pretrained(tmp_path)
    edit_config(tmp_path, rotary_dim=None)
    model(torch.tensor([[1, 2, 3]]))
    turned = attention_layers(tmp_path)[0].rotary
    table = model.h[0].attn.embed_positions[1]  # sines and cosines at position 1
    assert turned is not None
    torch.testing.assert_close(turned.frequencies, torch.atan2(*table.chunk(2)))


def test_a_live_model_has_no_file_to_mend() -> None:
    model = model_of(next(c for c in CASES if c.label == "mistral-window"))
    model.config.sliding_window = -1
    with pytest.raises(LocaterError, match=r"sliding_window = -1, .*: correct model\.config$"):
        scan(model)


def test_heads_that_the_model_contradicts(run: Run, saved_llama: Path, tmp_path: Path) -> None:
    """An option that is not used is not passed over in silence."""
    assert "--heads 3 was given, but the model says 4" in refused(run, tmp_path, saved_llama, "--heads", 3)
    assert run("scan", saved_llama, "--heads", 4).status == 0
    named = ("--query", "*.q_proj.weight", "--key", "*.k_proj.weight")
    assert "--heads 8 was given, but the model says num_attention_heads = 4" in refused(
        run, tmp_path, saved_llama, *named, "--heads", 8
    )
    assert run("scan", saved_llama, *named, "--heads", 4).status == 0
    assert run("scan", saved_llama, *named).status == 0
    save_file(
        {k: v.contiguous() for k, v in nn.MultiheadAttention(16, 2).state_dict().items()},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "torch", "num_heads": 2}))
    assert "--heads 4 was given, but the model says num_heads = 2" in refused(run, tmp_path, tmp_path, "--heads", 4)
    with pytest.raises(LocaterError, match="--heads 4 was given, but the model says 2"):
        scan(nn.MultiheadAttention(16, 2), heads=4)
    for bad in (0, -1, 2.5, True):
        with pytest.raises(LocaterError, match="is not a positive whole number"):
            scan(saved_llama, heads=bad)
    with pytest.raises(LocaterError, match="kv_heads 4 was given, but the model says 2"):
        scan(saved_llama, kv_heads=4)


def test_a_missing_gain_is_not_taken_for_one(run: Run, broken: Path, tmp_path: Path) -> None:
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.layers.1.input_layernorm.weight"]
    save_file(tensors, broken / "model.safetensors")
    assert "the gain model.layers.1.input_layernorm.weight is missing" in refused(run, tmp_path, broken)


def test_quantised_pickles_are_refused(run: Run, broken: Path, tmp_path: Path) -> None:
    tensors = load_file(broken / "model.safetensors")
    (broken / "model.safetensors").unlink()
    torch.save(
        {n: (t * 10).to(torch.int8) if "proj" in n else t for n, t in tensors.items()}, broken / "pytorch_model.bin"
    )
    assert "is stored as torch.int8 (quantised)" in refused(run, tmp_path, broken)


def test_quantised_weights_are_refused_however_they_are_named(broken: Path) -> None:
    """Named tensors and PyTorch's own attention read through the same door as the families."""
    tensors = {
        n: (t * 10).to(torch.int8) if "proj" in n else t for n, t in load_file(broken / "model.safetensors").items()
    }
    torch.save(tensors, broken / "weights.pt")
    with pytest.raises(LocaterError, match="quantised"):
        scan(broken / "weights.pt", query="*.q_proj.weight", key="*.k_proj.weight", heads=4)
    torch.save(
        {n: (t * 10).to(torch.int8) for n, t in nn.MultiheadAttention(16, 2).state_dict().items()}, broken / "own.pt"
    )
    (broken / "config.json").unlink()
    with pytest.raises(LocaterError, match="quantised"):
        scan(broken / "own.pt", heads=2)


def test_two_checkpoints_in_one_folder_are_not_mixed(run: Run, broken: Path, tmp_path: Path) -> None:
    file = broken / "model.safetensors"
    shutil.copy(file, broken / "step-2.safetensors")
    file.rename(broken / "step-1.safetensors")
    assert "is in step-1.safetensors and in step-2.safetensors" in refused(run, tmp_path, broken)


def test_damaged_header_entries(run: Run, broken: Path, tmp_path: Path) -> None:
    file = broken / "model.safetensors"
    text = file.read_bytes()
    size = int.from_bytes(text[:8], "little")
    header = json.loads(text[8 : 8 + size])
    header["model.norm.weight"]["shape"] = [31]
    new = json.dumps(header).encode()
    file.write_bytes(len(new).to_bytes(8, "little") + new + text[8 + size :])
    assert "model.norm.weight has 128 bytes for shape [31]" in refused(run, tmp_path, broken)


def test_weights_that_overflow_are_flagged(broken: Path) -> None:
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight"][:8] *= 1e22
    save_file(tensors, broken / "model.safetensors")
    assert [(r.layer, r.head) for r in scan(broken).rows if "nonfinite" in r.flags] == [(0, 0)]


@pytest.mark.parametrize("unasked", [False, True])
@pytest.mark.parametrize("factor", [1e-14, 1e15])
def test_weights_of_any_size_are_read_right(
    broken: Path, saved_llama: Path, factor: float, unasked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F is of the fourth power of the weights: 1e-56 and 1e60 are no float32, and still no 0 and no infinity.

    On a GPU `moments` does not ask whether float32 is enough; the scan does, once the small matrices are on the CPU.
    """
    if unasked:
        monkeypatch.setattr("locater.spectrum._needs_double", lambda *args: False)
    tensors = load_file(broken / "model.safetensors")
    for name in ("q_proj", "k_proj"):
        tensors[f"model.layers.1.self_attn.{name}.weight"] *= factor
    save_file(tensors, broken / "model.safetensors")
    plain, scaled = (
        [row for row in scan(folder, details=True).rows if row.layer == 1] for folder in (saved_llama, broken)
    )
    for row, other in zip(plain, scaled, strict=True):
        for name in ("stable_rank", "concentration", "skew"):
            assert getattr(other, name) == pytest.approx(getattr(row, name), rel=1e-5, abs=1e-6)
        for name, power in (("M", 2), ("S", 4), ("F", 4), ("variance", 4), ("spectral_norm", 2)):
            assert getattr(other, name) == pytest.approx(
                factor**power * getattr(row, name), rel=1e-4, abs=1e-6 * row.F * factor**power
            )
        assert ("uniform" if factor < 1 else "sharp") in other.flags
        assert other.localization is not None
        assert other.residual_kept is not None


def test_files_that_may_not_be_read_or_written(
    run: Run, broken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*args: object, **kwargs: object) -> object:
        raise PermissionError(13, "Permission denied", str(broken / "model.safetensors"))

    with monkeypatch.context() as patch:
        patch.setattr("locater.sources.safetensors_file.safetensors_header", closed)
        assert "Permission denied" in refused(run, tmp_path, broken)
    assert run("scan", broken, "--json", tmp_path / "x", "--report", tmp_path / "x").status == 2
    assert run("scan", broken, "--report", "-").status == 2


def test_targets_that_are_no_plain_files(run: Run, broken: Path, tmp_path: Path) -> None:
    """A link is followed, a device is written into and stays a device."""
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    assert run("scan", broken, "--json", tmp_path / "link.json").status == 0
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "real.json").read_text())["schema"] == 2
    before = Path("/dev/null").stat()
    assert run("scan", broken, "--json", "/dev/null").status == 0
    assert Path("/dev/null").stat().st_rdev == before.st_rdev
    assert Path("/dev/null").is_char_device()


def test_only_scans_made_alike_are_compared(run: Run, broken: Path, tmp_path: Path) -> None:
    scan(broken, length=64).save(tmp_path / "a.json")
    result = run("compare", tmp_path / "a.json", broken)
    assert result.status == 2
    assert "length is 64 in the first and 256 in the second" in result.err
    document = json.loads((tmp_path / "a.json").read_text())
    for change in ({"schema": 99}, {"heads": [{**document["heads"][0], "M": "x"}]}):
        (tmp_path / "b.json").write_text(json.dumps({**document, **change}))
        assert run("compare", tmp_path / "b.json", broken).status == 2


def test_python_calls_name_what_they_were_given() -> None:
    """Not a shape error from within, and not an attribute that a string lacks."""
    import locater
    from locater.explain import decompose

    for call, said in (
        (lambda: locater.scan(3), "3 is not a model"),
        (lambda: locater.observe("folder"), "'folder' is no nn.Module"),
        (
            lambda: inspect.unwrap(locater.moments)(torch.ones(3, 8, 64), torch.ones(3, 8, 3)),
            "both end in (head size, width)",
        ),
        (lambda: decompose(nn.Linear(2, 2), "text"), "inputs are a str"),
    ):
        with pytest.raises(LocaterError) as error:
            call()
        assert said in str(error.value)


def test_other_files_in_the_place_of_a_scan_or_of_runs(run: Run, tmp_path: Path) -> None:
    """Each named with what it should have been."""
    other, empty = tmp_path / "other.json", tmp_path / "empty.jsonl"
    other.write_text('{"schema": 1}')
    empty.write_text("")
    result = run("compare", other, other)
    assert result.status == 2
    assert "other.json: not what `locater scan --json` writes (it lacks 'heads')" in result.err
    for path, said in ((other, "no training run in it"), (empty, "no training run in it")):
        result = run("reproduce", "zoo", "--claim", "f", "--quick", "--runs", path)
        assert (result.status, result.out) == (2, "")
        assert f"{path}: {said}" in result.err
    result = run(
        "reproduce",
        "zoo",
        "--claim",
        "f",
        "--quick",
        "--runs",
        ROOT / "docs/results/bao2024-runs.jsonl",
    )
    assert "training runs is one that these claims ask for" in result.err


def test_a_sweep_is_not_a_log(run: Run, tmp_path: Path) -> None:
    """Its runs are named."""
    (tmp_path / "sweep" / "seed=0").mkdir(parents=True)
    (tmp_path / "sweep" / "results.jsonl").write_text("{}\n")
    (tmp_path / "sweep" / "seed=0" / "locater.jsonl").write_text("")
    result = run("watch", tmp_path / "sweep", "--json", "-")
    assert result.status == 2
    assert f"a sweep; name one of its runs: {tmp_path / 'sweep' / 'seed=0'}" in result.err


def test_wrong_things_in_the_place_of_right_ones(
    run: Run, saved_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a newcomer may type, command by command: one line that names it, status 2, nothing written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("hello")
    (tmp_path / "noise.bin").write_bytes(bytes(range(7, 200)) * 9)
    (tmp_path / "empty").mkdir()
    for name, text in (("list.json", "[1, 2]"), ("object.json", "{}"), ("runs.jsonl", "")):
        (tmp_path / name).write_text(text)
    before = sorted(path.name for path in tmp_path.iterdir())
    cases = [
        ("scan noise.bin", "noise.bin: not a weights file: torch.save writes no such bytes"),
        (f"scan {saved_llama} --heads 3", "--heads 3 was given, but the model says 4"),
        (
            f"scan {saved_llama} --statistics words.txt",
            "not statistics that this version reads (no file of torch.save)",
        ),
        ("probe '' --text words.txt", "the name of the model is empty"),
        ("probe empty --text words.txt", "empty: no config.json in it"),
        (f"probe {saved_llama} --text ''", "--text: the name of the file is empty"),
        (f"probe {saved_llama} --text empty", "empty: is a folder: name a text file in it"),
        (f"compare {saved_llama} empty", "empty: no weights here"),
        ("compare list.json object.json", "list.json"),
        ("watch empty --json -", "empty: no run log there"),
        ("train --out '' --steps 1", "out='': give the run a folder"),
        ("train --out words.txt --steps 1", "words.txt is no folder"),
        ("train --plan list.json", "a plan is a JSON object of options, not a list"),
        ("reproduce ''", "no paper '': there are amsel2024"),
        ("reproduce zoo --from object.json", "object.json: not the JSON of locater reproduce zoo"),
        ("reproduce zoo --from list.json", "list.json: not the JSON of locater reproduce zoo"),
        ("reproduce zoo --from noise.bin", "noise.bin: not the JSON of locater reproduce zoo"),
        ("reproduce zoo --from empty", "empty: cannot be read (Is a directory)"),
        ("reproduce zoo --from list.json --report page.pdf", "--report page.pdf: a report is .md or .html"),
        ("reproduce zoo --claim f --runs empty", "empty: no such file"),
        ("demo --json empty", "empty: is a folder or empty"),
    ]
    for line, said in cases:
        result = run(*shlex.split(line))
        assert (result.status, result.out, result.err.count("\n")) == (2, "", 1), (line, result)
        assert said in result.err, line
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_arguments_of_a_timm_model(tmp_path: Path) -> None:
    """`model_args` may be anything; where the number of heads is null beside them, it is in them."""
    torch.manual_seed(0)
    save_file({"blocks.0.attn.qkv.weight": torch.randn(24, 8), "blocks.0.attn.proj.weight": torch.randn(8, 8),
               "blocks.0.norm1.weight": torch.ones(8), "blocks.0.norm1.bias": torch.zeros(8)}, tmp_path / "model.safetensors")  # fmt: skip
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"num_heads": None, "architecture": "vit_tiny", "model_args": {"num_heads": 2}}))
    assert len(scan(tmp_path).rows) == 2
    config.write_text(json.dumps({"architecture": "vit_tiny", "model_args": [1]}))
    assert len(scan(tmp_path, heads=2).rows) == 2
    with pytest.raises(LocaterError, match="add --heads N"):
        scan(tmp_path)
