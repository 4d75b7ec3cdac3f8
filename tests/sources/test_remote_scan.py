"""A checkpoint elsewhere has the rows of the same checkpoint on this machine, and little more than its queries, keys and
norms is read for them.
"""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import struct
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import locater
from locater.commands.load_model import load_model
from locater.errors import LocaterError
from locater.families import llama
from locater.families.registry import BY_TYPE
from locater.sources.listing import remote_identity as identity
from locater.sources.open_source import open_source
from locater.sources.remote import Traffic
from locater.sources.remote.address import remote_address
from locater.sources.remote.open_remote import FIRST
from locater.sources.remote.prefetch import byte_ranges
from tests.range_server import RangeServer

transformers = pytest.importorskip("transformers")
TOKENS: dict[str, Any] = dict(vocab_size=512, pad_token_id=0, bos_token_id=1, eos_token_id=2)
SIZES: dict[str, Any] = dict(
    hidden_size=128, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256, **TOKENS
)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**SIZES, "num_key_value_heads": 2}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", dict(n_embd=128, n_layer=3, n_head=4, n_positions=64, **TOKENS)),
    "neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", SIZES),
    "t5": ("T5Config", "T5ForConditionalGeneration", dict(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, **TOKENS)),
    "albert": ("AlbertConfig", "AlbertModel", {**SIZES, "embedding_size": 32}),
    "gemma": ("Gemma2Config", "Gemma2ForCausalLM", {**SIZES, "num_key_value_heads": 2, "head_dim": 32}),
    "latent": ("DeepseekV3Config", "DeepseekV3ForCausalLM", {
        **SIZES, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
        "first_k_dense_replace": 3, "num_hidden_layers": 2, "num_key_value_heads": 4}),
    "discovered": ("SmolLM3Config", "SmolLM3ForCausalLM", {**SIZES, "num_key_value_heads": 2, "num_hidden_layers": 2}),
}  # fmt: skip


def saved(folder: Path, kind: str, shards: str | None = None) -> Path:
    """A random model with gains and biases away from 1 and 0."""
    config, model, settings = MODELS[kind]
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**settings))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    made.save_pretrained(folder, **({} if shards is None else {"max_shard_size": shards}))
    return folder


def rows(source: object, **options: Any) -> list[dict[str, Any]]:
    return json.loads(locater.scan(source, **options).to_json())["heads"]  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [*MODELS])
def test_rows_are_those_of_the_local_checkpoint(server: RangeServer, kind: str) -> None:
    folder, traffic = saved(server.root / kind, kind), Traffic()
    local = rows(folder)
    scan = locater.scan(f"{server.url}/files/{kind}", traffic=traffic)
    assert json.loads(scan.to_json())["heads"] == local
    assert len(local) == len(scan.rows) > 0
    assert (traffic.bytes, traffic.requests) == (server.sent, len([r for r in server.requests if r.method]))
    asked = server.data_requests()
    assert len(asked) == len({(r.path, r.range) for r in asked}), "no range is read twice"


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Ranges that were read without having been planned."""
    from locater.sources.remote.prefetch import Session

    unplanned: list[object] = []
    plain = Session.bytes

    def watched(self: Session, file: Any, start: int, stop: int) -> Any:
        if self._prefetcher is None or not self._prefetcher._covering_ranges(file, start, stop):
            unplanned.append((file.where, start, stop))
        return plain(self, file, start, stop)

    monkeypatch.setattr(Session, "bytes", watched)
    return unplanned


def test_a_scan_plans_all_that_it_reads(
    server: RangeServer, direct: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the planned blocks nothing is read directly, for any of the families."""
    for kind in MODELS:
        saved(server.root / kind, kind)
        locater.scan(f"{server.url}/files/{kind}")
    assert direct == []
    name = "model.embed_tokens.weight"

    def looks(weights: Any, config: Any) -> Any:
        """A reader that cannot be planned: it looks at numbers."""
        assert float(weights.read(name).abs().sum()) > 0
        yield from llama.FAMILY.layers(weights, config)

    monkeypatch.setitem(BY_TYPE._entries, "llama", dataclasses.replace(llama.FAMILY, layers=looks))
    assert rows(f"{server.url}/files/llama") == rows(server.root / "llama")
    assert direct, "read when it was needed"


@pytest.mark.parametrize("options", [{"raw": True}, {"shard": (2, 3)}, {"eigenvalues": True, "details": True}])
def test_options(server: RangeServer, options: dict[str, Any]) -> None:
    folder = saved(server.root / "llama", "llama")
    assert rows(f"{server.url}/files/llama", **options) == rows(folder, **options)
    if "shard" in options:
        size = (folder / "model.safetensors").stat().st_size
        assert server.sent < size / 5, "the layers of other parts are not read"


def test_only_queries_keys_and_norms_are_read(server: RangeServer) -> None:
    """Of a checkpoint that is larger than what is read at once: at most 1.15 times their bytes, and the first request."""
    sizes = {**SIZES, "hidden_size": 1024, "intermediate_size": 4096, "num_key_value_heads": 2, "num_hidden_layers": 2}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).bfloat16()
    model.save_pretrained(server.root / "x")
    needed = sum(
        p.numel() * 2
        for n, p in model.named_parameters()
        if n.split(".")[-2] in ("q_proj", "k_proj", "input_layernorm")
    )
    local = rows(server.root / "x")
    assert rows(f"{server.url}/files/x") == local
    assert server.sent <= 1.15 * needed + FIRST + 5_000
    assert len(server.data_requests()) <= 1 + 3 * 2


@pytest.mark.parametrize("form", ["blocks of fp8", "rows of fp8"])
def test_quantised_weights(server: RangeServer, form: str) -> None:
    """Maps of few bits with their scales: the same rows, by ranges too."""
    folder = saved(server.root / "x", "llama")
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight"))]:
        weight = tensors[name]
        block = (1, weight.shape[1]) if form == "rows of fp8" else (128, 128)
        rows_of, columns = -(-weight.shape[0] // block[0]), -(-weight.shape[1] // block[1])
        scale = torch.rand(rows_of, columns) + 0.5
        spread = scale.repeat_interleave(block[0], 0)[: weight.shape[0]].repeat_interleave(block[1], 1)[
            :, : weight.shape[1]
        ]
        tensors[name] = (weight / spread).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale{'' if form == 'rows of fp8' else '_inv'}"] = scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    local = locater.scan(folder)
    remote = locater.scan(f"{server.url}/files/x")
    assert json.loads(remote.to_json())["heads"] == json.loads(local.to_json())["heads"]
    assert json.loads(remote.to_json())["layers"] == json.loads(local.to_json())["layers"]
    assert {row.quantised for row in remote.rows} == {"fp8"}


def test_shards_with_an_index(server: RangeServer) -> None:
    folder = saved(server.root / "x", "llama", shards="300KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    local = rows(folder)
    assert rows(f"{server.url}/files/x") == local
    assert rows(f"{server.url}/files/x/model.safetensors.index.json") == local
    shard = next(folder.glob("model-00002*")).name
    with pytest.raises(locater.LocaterError, match=r"x/model-00002.*: one of the \d+ shards of .*: give the folder"):
        locater.scan(f"{server.url}/files/x/{shard}")
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(locater.LocaterError, match=r"1 of the \d+ shards"):
        locater.scan(f"{server.url}/files/x/{shard}")


def test_one_file_beside_its_configuration(server: RangeServer) -> None:
    folder = saved(server.root / "x", "llama")
    assert rows(f"{server.url}/files/x/model.safetensors?signature=secret") == rows(folder)
    assert "secret" not in locater.scan(f"{server.url}/files/x/model.safetensors?signature=secret").to_json()


def test_a_proxy_and_a_user(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy of the environment is asked for the whole URL; user and password of a URL are sent, and not shown."""
    folder = saved(server.root / "x", "llama")
    local = rows(folder)
    monkeypatch.setenv("http_proxy", server.url.replace("//", "//one:two@"))
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    scan = locater.scan("http://me:secret@elsewhere.invalid/files/x")
    assert json.loads(scan.to_json())["heads"] == local
    assert "secret" not in scan.to_json()
    sent = server.requests[0].headers
    assert sent["host"] == "elsewhere.invalid"
    assert sent["authorization"] == "Basic " + b64encode(b"me:secret").decode()
    assert sent["proxy-authorization"] == "Basic " + b64encode(b"one:two").decode()


def test_a_header_longer_than_the_first_request(server: RangeServer) -> None:
    folder = saved(server.root / "x", "llama")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, folder / "model.safetensors", {"format": "pt", "note": "x" * FIRST})
    assert rows(f"{server.url}/files/x") == rows(folder)


def test_numbers_at_odd_places(server: RangeServer) -> None:
    """Tensors follow one another without padding; a tensor of floats has to begin where floats may."""
    from locater.sources.remote import session

    values = torch.arange(40_000.0)
    entries = {
        "odd": {"dtype": "I8", "shape": [3], "data_offsets": [0, 3]},
        "floats": {"dtype": "F32", "shape": [40_000], "data_offsets": [3, 160_003]},
    }
    header = json.dumps(entries).encode()
    data = struct.pack("<Q", len(header)) + header + b"123" + values.numpy().tobytes()
    (server.root / "x.safetensors").write_bytes(data)
    with session() as opened:
        weights, _ = open_source(f"{server.url}/files/x.safetensors")
        file, start, _ = weights._entries["floats"]  # type: ignore[attr-defined]
        opened.prefetch([[(file, start, start + 160_003)]])
        got = weights.read("floats")
    assert got.data_ptr() % 4 == 0
    assert torch.equal(got, values)


@pytest.mark.parametrize("revision", ["main", "step1"])
def test_the_hub(hub: RangeServer, revision: str) -> None:
    folder = saved(hub.root / "org" / "model" / revision, "llama", shards="300KB")
    if revision != "main":
        saved(hub.root / "org" / "model" / "main", "gpt2")
    local = rows(folder)
    assert rows(f"hf://org/model@{revision}") == local
    assert all("authorization" not in r.headers for r in hub.requests if r.path.startswith("/cdn/"))
    heads = [r.path for r in hub.requests if r.method == "HEAD" and r.path.endswith(".safetensors")]
    assert len(heads) == len(set(heads)), "one HEAD for each file"
    if revision == "main":
        assert rows("org/model") == local
        assert rows("hf://org/model") == local
    commits = {r.path.split("/")[4] for r in hub.requests if "/resolve/" in r.path}
    assert all(len(commit) == 40 for commit in commits), "one commit, whatever the branch does meanwhile"


def test_the_token_goes_to_the_hub_alone(hub: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(hub.root / "org" / "model" / "main", "llama")
    hub.gated["org/model"] = "hf_good"
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    assert rows("hf://org/model") == rows(folder)
    assert any(r.headers.get("authorization") == "Bearer hf_good" for r in hub.requests)
    assert not any("authorization" in r.headers for r in hub.requests if r.path.startswith("/cdn/"))


def test_what_the_cache_has_is_not_read_again(hub: RangeServer) -> None:
    folder = saved(hub.root / "org" / "model" / "main", "llama")
    local = rows(folder)
    assert rows("org/model", download=True) == local
    hub.reset()
    assert rows("org/model") == local
    assert not hub.data_requests()
    assert hub.sent == 0
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    folder.rename(folder.with_name("moved"))  # what the branch holds now is another commit
    shutil.copytree(saved(hub.root / "other", "gpt2"), hub.root / "org" / "model" / "main")
    hub.commits[hub.root / "org" / "model" / "main"] = "b" * 40
    assert rows("org/model") == rows(hub.root / "other"), "not the old one of the cache"
    assert hub.data_requests()


def test_a_cache_without_weights_is_not_the_model(hub: RangeServer) -> None:
    """Other tools may have fetched the configuration alone."""
    from huggingface_hub import snapshot_download

    folder = saved(hub.root / "org" / "model" / "main", "llama", shards="300KB")
    snapshot_download("org/model", allow_patterns=["*.json", "model-00001*"])
    assert rows("org/model") == rows(folder)


def test_an_adapter_on_the_hub(hub: RangeServer) -> None:
    peft = pytest.importorskip("peft")
    base = saved(hub.root / "org" / "base" / "main", "llama")
    model = transformers.LlamaForCausalLM.from_pretrained(base)
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    adapter = hub.root / "org" / "adapter" / "main"
    adapted = peft.get_peft_model(model, settings)
    adapted.save_pretrained(adapter)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "org/base"}))
    live = locater.scan(adapted)
    for got, want in zip(locater.scan("hf://org/adapter").rows, live.rows, strict=True):
        assert got.M == pytest.approx(want.M, rel=1e-5)
        assert got.F == pytest.approx(want.F, rel=1e-5)


@pytest.mark.parametrize("cached", [False, True])
def test_an_adapter_from_elsewhere_opens_nothing_here(
    hub: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    """Neither a folder of this machine, by its path or by a name like one of the hub, nor an address; also not when its
    own files lie in the hub's cache.
    """
    peft = pytest.importorskip("peft")
    from huggingface_hub import snapshot_download

    base = saved(tmp_path / "org" / "base", "llama")
    model = transformers.LlamaForCausalLM.from_pretrained(base)
    adapter = hub.root / "org" / "adapter" / "main"
    peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(adapter)
    config = json.loads((adapter / "adapter_config.json").read_text())
    monkeypatch.chdir(tmp_path)
    names = (str(base), "../base", "./org/base", f"{hub.url}/files/org/base/main", "s3://bucket/base", "org/base")
    for number, name in enumerate(names):
        place = Path(shutil.copytree(adapter, hub.root / "org" / f"adapter{number}" / "main"))
        (place / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": name}))
        if cached:
            snapshot_download(f"org/adapter{number}")
        hub.reset()
        said = "no such model on the hub" if name == "org/base" else "may name a model of the hub alone"
        for read in (locater.scan, identity):
            with pytest.raises(LocaterError, match=said):
                read(f"hf://org/adapter{number}")
        (place / "config.json").write_text(json.dumps({"model_type": "llama"}))
        with pytest.raises(LocaterError, match=r"which is not opened for it|may name a model of the hub alone"):
            load_model(f"org/adapter{number}")
        assert not [request for request in hub.requests if "/files/" in request.path]
    scanned = locater.scan("hf://org/adapter", base=str(base))
    assert scanned.assumptions["base"] == str(base)


def test_the_base_of_an_adapter_without_a_network(
    hub: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HF_HUB_OFFLINE: neither the hub nor an address is asked for the base of a local adapter."""
    peft = pytest.importorskip("peft")
    from huggingface_hub import constants

    base = saved(hub.root / "org" / "base" / "main", "llama")
    model = transformers.LlamaForCausalLM.from_pretrained(base)
    peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(path.read_text())
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.reset()
    for name, said in (
        ("org/base", "HF_HUB_OFFLINE is set"),
        (f"{hub.url}/files/org/base/main", "give it yourself with --base"),
    ):
        path.write_text(json.dumps({**config, "base_model_name_or_path": name}))
        with pytest.raises(LocaterError, match=said):
            locater.scan(tmp_path / "adapter")
    assert not hub.requests


@pytest.mark.parametrize("kind", ["hf", "https"])
def test_pickles_are_downloaded_and_it_is_said(hub: RangeServer, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = saved(hub.root / "org" / "model" / "main", "llama")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    source = "hf://org/model" if kind == "hf" else f"{hub.url}/files/org/model/main"
    assert rows(source) == rows(folder)
    assert [r.getMessage() for r in caplog.records if r.name == "locater"] == [
        f"{source}: pytorch_model.bin is no safetensors file, so all of it is downloaded"
    ]


def test_gguf_is_downloaded_and_it_is_said(hub: RangeServer, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("gguf")
    from tests.sources.test_gguf import KINDS, write

    place = hub.root / "org" / "model" / "main"
    place.mkdir(parents=True)
    write(KINDS["llama"](), place / "small.gguf", "llama")
    local = rows(place / "small.gguf")
    with pytest.raises(
        locater.LocaterError, match=r"contains GGUF files; name one of them: hf://org/model/small\.gguf"
    ):
        locater.scan("hf://org/model")
    for source in ("hf://org/model/small.gguf", f"{hub.url}/files/org/model/main/small.gguf"):
        caplog.clear()
        assert rows(source) == local
        assert [r.getMessage() for r in caplog.records if r.name == "locater"] == [
            f"{source}: only safetensors are read by ranges, so all of it is downloaded"
        ]


def test_downloads_of_a_server_without_ranges(server: RangeServer) -> None:
    from tests.range_server import Fault

    folder = saved(server.root / "x", "llama", shards="300KB")
    server.fault = lambda request: Fault(ranges=False)
    assert rows(f"{server.url}/files/x", download=True) == rows(folder)


def test_a_bucket(bucket: Any, tmp_path: Path) -> None:
    folder, traffic = saved(tmp_path / "x", "llama", shards="300KB"), Traffic()
    for path in folder.iterdir():
        bucket.upload_file(str(path), "runs", f"run/step-1/{path.name}")
    local = rows(folder)
    assert rows("s3://runs/run/step-1", traffic=traffic) == local
    assert traffic.requests > 3
    assert traffic.bytes < sum(path.stat().st_size for path in folder.iterdir())
    assert rows("s3://runs/run/step-1", download=True) == local


def test_compare_and_layers(server: RangeServer, direct: list[object]) -> None:
    folder = saved(server.root / "x", "llama")
    comparison = locater.compare(folder, f"{server.url}/files/x")
    assert comparison.aligned
    assert all(not any(change.difference.values()) for change in comparison.rows)
    layer = locater.attention_layers(f"{server.url}/files/x")[1]
    assert not direct, "gains of all layers are read at once"
    assert torch.equal(layer.query.weight(), locater.attention_layers(folder)[1].query.weight())


def test_reads_of_parts_and_of_more_than_a_block(server: RangeServer) -> None:
    """Whatever rows are asked for after a plan, they are the rows of the file."""
    from locater.sources.remote import prefetch, session

    folder = saved(server.root / "x", "llama")
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    with session() as opened:
        weights, _ = open_source(f"{server.url}/files/x")
        file, start, entry = weights._entries[name]  # type: ignore[attr-defined]
        begin, end = (start + x for x in entry["data_offsets"])
        old, prefetch.PIECE = prefetch.PIECE, 10_000
        try:
            opened.prefetch([[(file, begin, end)]])
        finally:
            prefetch.PIECE = old
        for chosen in (None, [(0, 3)], [(100, 128), (5, 90)]):
            want = stored[name] if chosen is None else torch.cat([stored[name][a:b] for a, b in chosen])
            assert torch.equal(weights.read(name, chosen), want)


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_reads_gives_the_bytes_of_the_file(
    server: RangeServer, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned or not, in any order, by several threads, with a budget that is too small: a plan cannot change bytes."""
    from locater.sources.remote import prefetch, session
    from locater.sources.remote.folders import folder_of

    monkeypatch.setattr(prefetch, "PIECE", 1000)
    monkeypatch.setattr(prefetch, "GAP", 300)
    monkeypatch.setattr(prefetch, "FREE_WASTE", 2000)
    monkeypatch.setattr(prefetch, "BUDGET", 5000)
    draw = random.Random(seed)
    content = draw.randbytes(50_000)
    (server.root / "x").write_bytes(content)
    address = remote_address(f"{server.url}/files")
    assert address is not None
    file = folder_of(address).file("x")

    def span() -> tuple[int, int]:
        start = draw.randrange(49_000)
        return start, min(start + draw.randrange(1, 4000), 50_000)

    plan = [[(file, *span()) for _ in range(draw.randrange(6))] for _ in range(8)]
    wanted = [(start, stop) for step in plan for _, start, stop in step] + [span() for _ in range(20)]
    with session() as opened, ThreadPoolExecutor(4) as pool:
        opened.files.append(file)
        opened.prefetch(plan)
        for start, stop in wanted[: len(wanted) // 2]:
            assert bytes(opened.bytes(file, start, stop)) == content[start:stop]
        draw.shuffle(wanted)
        got = list(pool.map(lambda pair: bytes(opened.bytes(file, *pair)), wanted))
    assert got == [content[start:stop] for start, stop in wanted]


class File:
    """A file to plan with."""

    where = name = "x"


def test_blocks_of_a_plan() -> None:
    file, other, mb = File(), File(), 1 << 20
    plan: Any = [[(file, 0, 10), (file, 20, 30)], [(file, 100 * mb, 140 * mb), (other, 0, 5)], [(file, 0, 10)]]
    blocks = [(b.file is file, b.start, b.stop, b.first, b.last) for b in byte_ranges(plan)]
    pieces = [(True, 100 * mb, 116 * mb, 1, 1), (True, 116 * mb, 132 * mb, 1, 1), (True, 132 * mb, 140 * mb, 1, 1)]
    assert sorted(blocks) == sorted([(True, 0, 30, 0, 2), *pieces, (False, 0, 5, 1, 1)]), (
        "read once, kept to the last use"
    )
    heads = [
        [(file, i * 3 * mb, i * 3 * mb + 2 * mb) for i in range(50)]
    ]  # two of three rows: fused queries, keys, values
    apart: Any = byte_ranges(heads)  # type: ignore[arg-type]
    assert sum(b.stop - b.start for b in apart) <= 1.1 * 100 * mb
