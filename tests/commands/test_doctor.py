"""`doctor`: each fault has its cause, healthy models and harmless changes are not broken."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import locater
from locater import Diagnosis, LocaterError, doctor
from locater.commands.doctor import tensors as doctor_tensors
from locater.commands.doctor.on_text import Behaviour, findings_on_text
from locater.findings.causes import CAUSES
from locater_lab.studies.verdicts.checkpoint import Checkpoint
from locater_lab.studies.verdicts.writing import write
from tests.commands.planted import (
    DEMO,
    FAULTS,
    HEADS,
    LAYERS,
    MIDDLE,
    SIZE,
    Config,
    Fault,
    Tensors,
    demo,
    low_rank,
    merge,
    name,
    save,
    save_adapter,
    save_shards,
)
from tests.conftest import Result
from tests.families import CASES
from tests.parity import Case, model_of
from tests.range_server import served

Run = Callable[..., Result]


def found(diagnosis: Diagnosis) -> str:
    return "; ".join(f"{x.severity} {x.cause}: {x.where} {x.words}" for x in diagnosis.findings)


@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.label) for fault in FAULTS])
def test_each_fault_has_its_cause(fault: Fault, tmp_path: Path) -> None:
    tensors, config = demo()
    fault.plant(tensors, config)
    folder = save(tensors, config, tmp_path / "model")
    beside = doctor(folder, DEMO)
    assert fault.cause in beside.causes, found(beside)
    assert beside.broken == fault.broken, found(beside)
    faults = {x.cause for x in beside.findings if x.severity == "fault"}
    assert faults <= {fault.cause, "zero"}, found(beside)
    alone = doctor(folder)
    assert alone.broken == bool(fault.alone), found(alone)
    if fault.alone:
        assert (fault.cause if fault.alone is True else fault.alone) in alone.causes, found(alone)


def test_healthy_models_have_no_fault() -> None:
    for folder in (DEMO, DEMO / "twin"):
        assert not doctor(folder).broken
    assert doctor(DEMO).verdict == "no fault found in the file alone"
    assert doctor(DEMO, DEMO).verdict == "identical to BASE"


@pytest.mark.parametrize("case", [pytest.param(case, id=case.label) for case in CASES])
def test_models_of_every_family_have_no_fault(case: Case, tmp_path: Path) -> None:
    model = model_of(case)
    case.save(model, tmp_path) if case.save else model.save_pretrained(tmp_path)
    alone = doctor(tmp_path, **case.options)
    assert not alone.broken, found(alone)
    assert alone.read["tensors"] == alone.read["of"]
    beside = doctor(tmp_path, model, **case.options)
    assert not beside.changed, found(beside)


def test_where_a_fault_is_is_said(tmp_path: Path) -> None:
    tensors, config = demo()
    tensors[name("up", 2)][5, 11] = torch.nan
    (finding,) = doctor(save(tensors, config, tmp_path)).findings
    assert finding.where == name("up", 2)
    assert finding.evidence["nan"] == 1
    assert finding.words.startswith("has 1 NaN")
    assert finding.next


def test_a_scale_says_its_factor(tmp_path: Path) -> None:
    tensors, config = demo()
    for layer in range(LAYERS):
        tensors[name("q", layer)] *= SIZE**0.5
    (finding,) = doctor(save(tensors, config, tmp_path), DEMO).findings
    assert finding.where == "every layer"
    assert finding.evidence["factor"] == pytest.approx(SIZE**0.5, rel=1e-2)
    assert "square root of the head size" in finding.words


def test_heads_that_moved_are_numbered(tmp_path: Path) -> None:
    tensors, config = demo()
    q = tensors[name("q", 4)].clone().view(HEADS, SIZE, -1)
    tensors[name("q", 4)] = q[[0, 3, 2, 1]].reshape(HEADS * SIZE, -1)
    (finding,) = doctor(save(tensors, config, tmp_path), DEMO).findings
    assert finding.evidence["heads"] == [(4, 1), (4, 3)]
    assert finding.evidence["source"] == [3, 1]
    assert finding.where == "heads 4.1, 4.3"


def test_two_faults_are_two_findings(tmp_path: Path) -> None:
    tensors, config = demo()
    tensors[name("q", 1)][:SIZE] *= 50
    tensors[name("up", 4)][0, 0] = torch.inf
    assert {*doctor(save(tensors, config, tmp_path), DEMO).causes} == {"nonfinite", "scaled-head"}


def test_what_the_base_has_too_is_no_fault_of_the_model(tmp_path: Path) -> None:
    tensors, config = demo()
    tensors[name("o")][:, :SIZE] = 0
    base = save(tensors, config, tmp_path / "base")
    assert doctor(base).broken
    assert doctor(base, base).verdict == "identical to BASE"


# ---- files ----


def test_shards_are_the_same_model(tmp_path: Path) -> None:
    save_shards(*demo(), tmp_path)
    assert doctor(tmp_path, DEMO).causes == ["identical"]


def gguf_of(tensors: Tensors, config: Config, folder: Path) -> Path:
    return write(Checkpoint("demo", DEMO, tensors, config), folder, "gguf")


def pickle_of(tensors: Tensors, config: Config, folder: Path) -> Path:
    return write(Checkpoint("demo", DEMO, tensors, config), folder, "pickle")


def dcp_of(tensors: Tensors, config: Config, folder: Path) -> Path:
    import torch.distributed.checkpoint as dcp

    dcp.save(tensors, checkpoint_id=folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def remote_of(tensors: Tensors, config: Config, folder: Path) -> Path:
    save_shards(tensors, config, folder)
    return folder


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("make", [gguf_of, pickle_of, dcp_of, remote_of])
def test_files_of_any_format_that_a_scan_reads(make: Callable[..., Path], tmp_path: Path) -> None:
    """A copy of the base is one, and a NaN is found; alone and beside BASE, which is in another format."""
    same = {"identical", "dtype"}
    with served(tmp_path) as server:
        for label, value in (("copy", None), ("broken", torch.nan)):
            tensors, config = demo()
            if value is not None:
                tensors[name("up")][5, 11] = value
            path: Path | str = make(tensors, config, tmp_path / label)
            path = f"{server.url}/files/{label}" if make is remote_of else path
            alone, beside = doctor(path), doctor(path, DEMO)
            for one in (alone, beside):
                assert {x.cause for x in one.findings if x.severity == "fault"} == (
                    {"nonfinite"} if value else set()
                ), found(one)
                assert one.read["tensors"] == one.read["of"] == 56
            assert value or {*beside.causes} <= same, found(beside)


@pytest.mark.slow  # a gigabyte is read
def test_a_shard_of_a_large_model_is_read_in_little_memory(tmp_path: Path) -> None:
    """One layer of a model of 70 billion parameters, in a sparse file: zeros, but for a NaN in the last map."""
    width, between, keys = 8192, 28_672, 1024
    shapes = {"self_attn.q_proj": (width, width), "self_attn.k_proj": (keys, width), "self_attn.v_proj": (keys, width),
              "self_attn.o_proj": (width, width), "mlp.up_proj": (between, width), "mlp.down_proj": (width, between)}  # fmt: skip
    header, at = {}, 0
    for part, (rows, columns) in shapes.items():
        stop = at + 2 * rows * columns
        header[f"model.layers.0.{part}.weight"] = {
            "dtype": "BF16",
            "shape": [rows, columns],
            "data_offsets": [at, stop],
        }
        at = stop
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        start = file.tell()
        file.truncate(start + at)
        file.seek(start + at - 2)
        file.write(b"\xc0\x7f")
    config = {"model_type": "llama", "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": width,
              "num_hidden_layers": 1, "intermediate_size": between, "vocab_size": 128_256}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    doctor(DEMO)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = doctor(tmp_path)
    assert "nonfinite" in result.causes
    assert result.read["bytes"] == at > 10**9
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 700_000  # kB; float32 would be 2.7 GB


def test_a_truncated_file(tmp_path: Path) -> None:
    folder = save(*demo(), tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert doctor(folder).causes == ["truncated"]
    assert doctor(folder, DEMO).broken


def test_a_truncated_pickle(tmp_path: Path) -> None:
    tensors, config = demo()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert doctor(tmp_path, DEMO).causes == ["identical"]
    whole = (tmp_path / "pytorch_model.bin").read_bytes()
    (tmp_path / "pytorch_model.bin").write_bytes(whole[: len(whole) * 3 // 4])
    assert doctor(tmp_path).causes == ["truncated"]


def test_a_stale_index(tmp_path: Path) -> None:
    first, _ = save_shards(*demo(), tmp_path)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][first[0]] = "model-00002-of-00002.safetensors"
    path.write_text(json.dumps(index))
    assert doctor(tmp_path).causes == ["stale-index"]


def test_a_shard_that_is_not_there(tmp_path: Path) -> None:
    save_shards(*demo(), tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert doctor(tmp_path).causes == ["stale-index"]
    (tmp_path / "model.safetensors.index.json").unlink()
    assert doctor(tmp_path).causes == ["missing-layer"]


def test_names_in_two_shards(tmp_path: Path) -> None:
    first, _ = save_shards(*demo(), tmp_path, index=False)
    second = load_file(tmp_path / "model-00002-of-00002.safetensors")
    second[first[0]] = demo()[0][first[0]]
    save_file(second, tmp_path / "model-00002-of-00002.safetensors")
    assert doctor(tmp_path).causes == ["duplicate-names"]


def test_names_in_two_shards_of_an_index(tmp_path: Path) -> None:
    first, _ = save_shards(*demo(), tmp_path)
    second = load_file(tmp_path / "model-00002-of-00002.safetensors")
    second[first[0]] = demo()[0][first[0]]
    save_file(second, tmp_path / "model-00002-of-00002.safetensors")
    assert doctor(tmp_path).causes == ["duplicate-names"]


def test_an_index_that_leaves_tensors_out(tmp_path: Path) -> None:
    save_shards(*demo(), tmp_path)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"][name("up")]
    path.write_text(json.dumps(index))
    (finding,) = doctor(tmp_path).findings
    assert (finding.cause, finding.evidence["tensors"]) == ("stale-index", [name("up")])


def test_a_shard_of_another_step(tmp_path: Path) -> None:
    tensors, config = demo()
    for key in list(tensors)[len(tensors) // 2 :]:
        noise = torch.randn(tensors[key].shape) * tensors[key].float().std()
        tensors[key] = (tensors[key].float() + 0.1 * noise).bfloat16()
    save_shards(tensors, config, tmp_path)
    (finding,) = doctor(tmp_path, DEMO).findings
    assert (finding.cause, finding.where) == ("another-step", "model-00002-of-00002.safetensors")


# ---- adapters ----


def halved(t: Tensors) -> None:
    merge(t, dict(list(low_rank().items())[:LAYERS]))


def on_another_base(t: Tensors) -> None:
    for key in t:
        t[key] = (t[key].float() + 0.05 * t[key].float().std() * torch.randn(t[key].shape)).bfloat16()
    merge(t, low_rank())


MERGES: dict[str, tuple[str, Callable[[Tensors], None], bool]] = {
    "once": ("adapter", lambda t: merge(t, low_rank()), False),
    "not at all": ("not-merged", lambda t: None, True),
    "twice": ("wrong-dose", lambda t: merge(t, low_rank(), 2), True),
    "half the alpha": ("wrong-dose", lambda t: merge(t, low_rank(), 0.5), True),
    "subtracted": ("wrong-sign", lambda t: merge(t, low_rank(), -1), True),
    "in half of the layers": ("half-merged", halved, True),
    "into another base": ("wrong-base", on_another_base, True),
    "another adapter": ("unknown", lambda t: merge(t, low_rank(seed=7)), True),
}


@pytest.mark.parametrize("how", MERGES)
def test_merges(how: str, tmp_path: Path) -> None:
    cause, change, broken = MERGES[how]
    tensors, config = demo()
    change(tensors)
    folder, adapter = save(tensors, config, tmp_path / "model"), save_adapter(low_rank(), tmp_path / "adapter")
    result = doctor(folder, DEMO, str(adapter))
    assert result.causes[0] == cause, found(result)
    assert result.broken == broken
    if how in ("once", "twice"):
        assert result.findings[0].evidence["dose"] == pytest.approx({"once": 1, "twice": 2}[how], abs=0.02)


@pytest.mark.parametrize(("rank", "size", "parts"), [(8, 0.05, "qv"), (16, 0.01, "qkvo"), (4, 0.3, "up")])
def test_a_merge_shows_its_rank(rank: int, size: float, parts: str, tmp_path: Path) -> None:
    tensors, config = demo()
    merge(tensors, low_rank(size, [*parts] if parts != "up" else ["up"], rank))  # type: ignore[arg-type]
    (finding,) = doctor(save(tensors, config, tmp_path), DEMO).findings
    assert finding.cause == "low-rank"
    assert finding.evidence["ranks"] == [rank]


def test_an_adapter_needs_a_base(tmp_path: Path) -> None:
    adapter = save_adapter(low_rank(), tmp_path)
    with pytest.raises(LocaterError, match="give --base"):
        doctor(DEMO, adapter=str(adapter))


def test_an_adapter_in_its_own_folder_is_a_model(tmp_path: Path) -> None:
    adapter = save_adapter(low_rank(), tmp_path)
    assert not doctor(adapter).broken
    assert doctor(adapter, DEMO).causes == ["low-rank"]


# ---- sources ----


def test_a_live_module() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 3)
    assert doctor(model).causes == ["duplicated-layer"], "torch makes copies of the layer"
    assert not doctor(model).broken, "as before training"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    assert not doctor(model).causes
    with torch.no_grad():
        model.layers[1].linear1.weight[0, 0] = torch.nan
    diagnosis = doctor(model)
    assert diagnosis.causes == ["nonfinite"]
    assert diagnosis.findings[0].where == "layers.1.linear1.weight"


def test_a_file_beside_the_live_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DEMO)
    assert doctor(DEMO, model).causes == ["identical"]


def test_blocks_give_the_numbers_of_the_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tensors, config = demo()
    merge(tensors, low_rank())
    tensors[name("up")][100, 7] = torch.nan
    folder = save(tensors, config, tmp_path)
    whole = doctor(folder, DEMO)
    for limit in ("BLOCK", "HOLD_AT_ONCE"):
        monkeypatch.setattr(doctor_tensors, limit, 1000)
    parts = doctor(folder, DEMO)
    assert parts.causes == whole.causes
    for a, b in zip(parts.tensors, whole.tensors, strict=True):
        assert a["rms"] == pytest.approx(b["rms"], rel=1e-5)
        assert a["difference"] == pytest.approx(b["difference"], rel=1e-4, abs=1e-9)
        assert a["rank"] == b["rank"]


def test_every_tensor_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from locater.sources.safetensors_file import SafetensorsWeights

    counts: dict[str, int] = {}
    read = SafetensorsWeights.read

    def counted(self: SafetensorsWeights, key: str, rows: object = None) -> torch.Tensor:
        counts[key] = counts.get(key, 0) + 1
        return read(self, key, rows)  # type: ignore[arg-type]

    monkeypatch.setattr(SafetensorsWeights, "read", counted)
    doctor(DEMO)
    maps = {key: count for key, count in counts.items() if "norm" not in key}
    assert set(maps.values()) == {1}
    assert len(counts) == 56


# ---- documents and the command ----


def test_the_document_and_the_page(tmp_path: Path) -> None:
    tensors, config = demo()
    tensors[name("q")][:SIZE] *= 50
    result = doctor(save(tensors, config, tmp_path), DEMO)
    document = json.loads(result.to_json())
    assert document["verdict"] == "broken: 1 fault (scaled-head)"
    assert document["findings"][0]["evidence"]["factor"] == pytest.approx(50, rel=0.01)
    assert len(document["tensors"]) == 56
    assert len(document["heads"]) == 24
    row = next(x for x in document["heads"] if (x["layer"], x["head"]) == (3, 0))
    assert row["logits_difference"] == pytest.approx(49, rel=0.05)
    assert row["output_difference"] == 0
    page = result.page()
    assert "scaled-head" in page
    assert page.count("<svg") >= 2
    assert "scaled-head" in result._repr_html_()
    assert result.records()[0]["cause"] == "scaled-head"
    assert "broken" in repr(result)


def test_the_command(run: Run, tmp_path: Path) -> None:
    healthy = run("doctor", DEMO)
    assert healthy.status == 0
    assert healthy.out.startswith("Verdict")
    assert "56 of 56 tensors" in healthy.out
    tensors, config = demo()
    tensors[name("up")][5, 11] = torch.nan
    broken = run("doctor", save(tensors, config, tmp_path / "broken"), "--json", tmp_path / "out.json")
    assert broken.status == 1
    assert "broken: 1 fault (nonfinite)" in broken.out
    assert json.loads((tmp_path / "out.json").read_text())["broken"] is True
    assert run("doctor", tmp_path / "nothing").status == 2


def test_fail_on(run: Run, tmp_path: Path) -> None:
    tensors, config = demo()
    merge(tensors, low_rank())
    folder = save(tensors, config, tmp_path / "merged")
    assert run("doctor", folder, "--base", DEMO).status == 0
    for condition in ("changed", "low-rank", "dtype, low-rank"):
        assert run("doctor", folder, "--base", DEMO, "--fail-on", condition).status == 1
    assert run("doctor", folder, "--base", DEMO, "--fail-on", "quantised").status == 0
    wrong = run("doctor", folder, "--fail-on", "odd")
    assert wrong.status == 2
    assert "odd" in wrong.err


def test_one_screen(run: Run, tmp_path: Path) -> None:
    """However much is wrong."""
    tensors, config = demo()
    for layer in range(LAYERS):
        for part in ("q", "k", "v", "o", "up", "down"):
            w = tensors[name(part, layer)]
            w[layer, :] = torch.nan
            w[-1, layer + 1] = 1e30
    result = run("doctor", save(tensors, config, tmp_path), "--base", DEMO)
    assert result.status == 1
    assert len(result.out.splitlines()) <= 24


def test_causes_have_words() -> None:
    for cause in CAUSES.values():
        assert cause.meaning
        assert cause.severity == "note" or cause.next or cause.severity == "change"
    assert locater.doctor is doctor


def test_a_model_of_another_architecture(tmp_path: Path) -> None:
    torch.manual_seed(0)
    other = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 2)
    shutil.copytree(DEMO, tmp_path / "demo", ignore=shutil.ignore_patterns("twin"))
    assert doctor(tmp_path / "demo", other).causes == ["another-model"]


# ---- on a text ----

IDS = torch.randint(3, 200, (2, 48), generator=torch.Generator().manual_seed(0))


def test_a_text_shows_a_worse_loss_and_heads_that_attend_otherwise(tmp_path: Path) -> None:
    tensors, config = demo()
    tensors[name("q")][:SIZE] *= 30
    tensors[name("down")].mul_(-3)
    told = doctor(save(tensors, config, tmp_path / "model"), DEMO, text=topics["for"])
    of_text = {x.cause: x for x in told.findings if x.cause in ("worse-loss", "other-attention")}
    assert of_text["worse-loss"].severity == "fault"
    assert of_text["worse-loss"].evidence["difference"] > 0.5
    assert [MIDDLE, 0] in of_text["other-attention"].evidence["heads"]
    count = told.read["text"]["tokens"]
    assert count > 100
    assert f"run on {count} tokens" in told.page()
    row = next(x for x in told.heads if (x["layer"], x["head"]) == (MIDDLE, 0))
    assert {"entropy_ratio", "sink", "role", "base_role"} <= row.keys()


def test_heads_in_another_order_do_the_same_on_a_text(tmp_path: Path) -> None:
    tensors, config = demo()
    query, out = tensors[name("q")], tensors[name("o")]
    tensors[name("q")] = query.unflatten(0, (HEADS, -1))[[1, 0, 2, 3]].flatten(0, 1)
    tensors[name("o")] = out.unflatten(1, (HEADS, -1))[:, [1, 0, 2, 3]].flatten(1)
    told = doctor(save(tensors, config, tmp_path / "model"), DEMO, text=IDS)
    assert set(told.causes) == {"equivalent", "loss"}, found(told)
    assert not told.changed


def test_nan_on_a_text_is_said_of_the_output(tmp_path: Path) -> None:
    tensors, config = demo()
    tensors[name("up")][0, 0] = float("nan")
    told = doctor(save(tensors, config, tmp_path / "model"), text=IDS)
    assert [x.where for x in told.findings if x.cause == "nonfinite"] == [name("up"), "the output"]


def test_a_role_that_is_gone_is_lost() -> None:
    head = {"role": "previous-token", "previous": 0.9, "sink": 0.1, "entropy_ratio": 0.2}
    before = Behaviour(None, {(0, 0): head, (0, 1): {**head, "previous": 0.52}}, None)
    now = Behaviour(None, {(0, 0): {**head, "role": None, "previous": 0.3}, (0, 1): {**head, "previous": 0.48}}, None)
    (lost,) = [x for x in findings_on_text(now, before) if x.cause == "lost-role"]
    assert lost.evidence["heads"] == [[0, 0]]
    assert "1 of 2 previous-token (head 0.0)" in lost.words


def test_what_cannot_be_run_is_a_note_and_no_text_an_error(tmp_path: Path, run: Run) -> None:
    tensors, config = demo()
    file = save(tensors, config, tmp_path / "model") / "model.safetensors"
    alone = doctor(file, text=IDS)
    assert not alone.broken
    assert "MODEL was not run" in found(alone)
    nowhere = run("doctor", DEMO, "--text", tmp_path / "nowhere.txt")
    assert (nowhere.status, nowhere.err.count("\n")) == (2, 1)
    assert "nowhere.txt: no such file" in nowhere.err
    assert run("doctor", DEMO, "--tokenizer", DEMO).status == 2
