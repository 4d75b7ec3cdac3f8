"""GGUF: the same heads as the model it was made from, judged by logits, since moments at offset 0 do not see the row
order.

The files are written here with the `gguf` package in the layout of its converter. That they are right is shown by an
independent reader, transformers' own: the model it loads from the file has the loss of the original.
"""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from locater import LocaterError, attention_layers, compare, scan
from locater.sources.open_source import open_source
from tests.families.decoders import GEMMA, GROUPED, make
from tests.parity import redraw

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "input_layernorm": "attn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
TINY = {**GROUPED, "intermediate_size": 64, "vocab_size": 64}
KINDS = {
    "llama": lambda: make("Llama", **TINY, head_dim=8),
    "qwen2": lambda: make("Qwen2", **TINY),
    "qwen3": lambda: make("Qwen3", **TINY, head_dim=8),
    "gemma3": lambda: make(
        "Gemma3", **{**TINY, **GEMMA, "num_hidden_layers": 6, "query_pre_attn_scalar": 8}, sliding_window=4
    ),
}


def pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from halves to neighbouring pairs, as llama files have them."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write(model: nn.Module, path: Path, architecture: str) -> None:
    c: Any = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_embedding_length(c.hidden_size)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_key_length(c.hidden_size // c.num_attention_heads)
    writer.add_rope_dimension_count(c.hidden_size // c.num_attention_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_vocab_size(c.vocab_size)
    rope = c.rope_parameters.get("full_attention", c.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if architecture == "gemma3":
        writer.add_sliding_window(c.sliding_window)
    for name, tensor in model.state_dict().items():
        data = tensor.float().numpy()
        if "layers." in name:
            number, rest = name.split("layers.")[1].split(".", 1)
            stem, kind = rest.rsplit(".", 1)
            if architecture == "llama" and stem.endswith(("q_proj", "k_proj")):
                data = pairs(data, c.num_attention_heads if "q_proj" in stem else c.num_key_value_heads)
            if architecture == "gemma3" and "norm" in stem:
                data = data + 1
            if stem not in NAMES:
                continue
            name = f"blk.{number}.{NAMES[stem]}.{kind}"
        elif name == "lm_head.weight":
            name = "output.weight"
        else:
            name = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]
        writer.add_tensor(name, data)
    finish(writer)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def copy_settings(source: Path, target: Path) -> tuple[gguf.GGUFReader, gguf.GGUFWriter]:
    """A writer that already holds the settings of `source`."""
    reader, writer = gguf.GGUFReader(source), gguf.GGUFWriter(target, "llama")
    for name, field in reader.fields.items():
        if name.startswith("llama."):
            writer.add_key_value(name, field.contents(), field.types[0])
    return reader, writer


@pytest.fixture(params=list(KINDS))
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[nn.Module, Path]:
    torch.manual_seed(0)
    model = KINDS[request.param]().eval()
    redraw(model)
    write(model, tmp_path / "model.gguf", request.param)
    return model, tmp_path / "model.gguf"


def test_a_gguf_file_compares_with_its_original(pair: tuple[nn.Module, Path], tmp_path: Path) -> None:
    model, path = pair
    model.save_pretrained(tmp_path / "original")
    found = compare(tmp_path / "original", path)
    assert found.weights is not None
    assert (found.weights.whole, found.weights.only_a, found.weights.only_b) == (False, [], [])
    assert "; only those of attention were read, as of any GGUF file." in found.verdict
    if "Gemma" in type(model).__name__:  # whose gains are stored plus 1, and rounded
        assert found.verdict.endswith("No head changed.")
    else:  # of equal rotary order, which is undone when the file is read
        assert found.verdict.startswith("Identical: all ")
    assert max(x or 0 for row in found.rows for x in (row.weights or {}).values()) < 1e-6


def tokens() -> Tensor:
    return torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def test_logits_and_output_are_those_of_the_original(pair: tuple[nn.Module, Path]) -> None:
    model, path = pair
    x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(0))
    for ours, original in zip(attention_layers(path), attention_layers(model), strict=True):
        for f in (lambda layer: layer.logits(x), lambda layer: layer.output(x)):
            exact = f(original)
            assert (f(ours) - exact).abs().max() < 1e-5 * exact.std()
        assert ours.window == original.window


@torch.no_grad()
def test_the_row_order_shows_in_logits_and_not_in_moments(tmp_path: Path) -> None:
    """Why moments cannot check this: with the rows left as stored, every trace agrees and every logit is wrong."""
    from dataclasses import replace

    from locater.layers import effective

    torch.manual_seed(0)
    model = KINDS["llama"]().eval()
    redraw(model)
    layer = attention_layers(model)[0]
    stored = [torch.from_numpy(pairs(p.weight().numpy(), n).copy()) for p, n in ((layer.query, 4), (layer.key, 2))]
    wrong = replace(
        layer, query=replace(layer.query, weight=lambda: stored[0]), key=replace(layer.key, weight=lambda: stored[1])
    )
    assert torch.allclose(effective(wrong).moments().trace, effective(layer).moments().trace, atol=1e-5)
    x = torch.randn(1, 12, 32)
    assert (wrong.logits(x) - layer.logits(x)).abs().max() > 0.1 * layer.logits(x).std()


@torch.no_grad()
def test_an_independent_reader_finds_the_original_in_the_file(tmp_path: Path) -> None:
    """transformers' own GGUF loader gives the original's logits, so the file that the other tests read is a genuine
    one.
    """
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    torch.manual_seed(0)
    model = KINDS["llama"]().eval()
    redraw(model)
    write(model, tmp_path / "model.gguf", "llama")
    held = load_gguf_checkpoint(str(tmp_path / "model.gguf"), return_tensors=True, model_to_load=model)["tensors"]
    twin = KINDS["llama"]().eval()
    missing = twin.load_state_dict(
        {k if k.startswith(("model.", "lm_head")) else f"model.{k}": v for k, v in held.items()}, strict=False
    )
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    if missing.missing_keys:
        twin.lm_head.weight.copy_(model.lm_head.weight)
    assert torch.allclose(twin(tokens()).logits, model(tokens()).logits, atol=1e-4)


@torch.no_grad()
def test_quantised_tensors_are_close(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = KINDS["llama"]().eval()
    redraw(model)
    write(model, tmp_path / "whole.gguf", "llama")
    reader, writer = copy_settings(tmp_path / "whole.gguf", tmp_path / "small.gguf")
    for tensor in reader.tensors:
        data = np.array(tensor.data)
        kind = gguf.GGMLQuantizationType.Q8_0 if "attn_q." in tensor.name or "attn_k." in tensor.name else None
        writer.add_tensor(tensor.name, gguf.quantize(data, kind) if kind else data, raw_dtype=kind)
    finish(writer)
    for a, b in zip(scan(tmp_path / "small.gguf").rows, scan(model).rows, strict=True):
        assert a.frobenius_sq == pytest.approx(b.frobenius_sq, rel=0.02)
        assert a.frobenius_sq != b.frobenius_sq
        assert (a.quantised, b.quantised) == ("q8_0", None)
    weights, _ = open_source(tmp_path / "small.gguf")
    for name in weights.names():  # rows of queries and keys are in another order in the file
        whole = weights.read(name)
        assert torch.equal(weights.read(name, [(3, 7), (0, 2)]), torch.cat([whole[3:7], whole[:2]]))


@pytest.mark.parametrize("length", [32, 1])
def test_length_extension_by_a_table(tmp_path: Path, length: int) -> None:
    """`rope_freqs.weight` divides frequencies, one by one. A context length of 1, which some write for want of another,
    is no fault.
    """
    torch.manual_seed(0)
    model = KINDS["llama"]().eval()
    model.config.max_position_embeddings = length
    write(model, tmp_path / "plain.gguf", "llama")
    reader, writer = copy_settings(tmp_path / "plain.gguf", tmp_path / "long.gguf")
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.add_tensor("rope_freqs.weight", np.array([1, 2, 4, 8], dtype=np.float32))
    finish(writer)
    plain, long = (attention_layers(tmp_path / name)[0].rotary for name in ("plain.gguf", "long.gguf"))
    assert torch.allclose(long.frequencies * torch.tensor([1.0, 2, 4, 8]), plain.frequencies)
    assert long.amplitude == 1


def test_bad_files(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF but not really")
    with pytest.raises(LocaterError, match="not a readable GGUF file"):
        scan(tmp_path / "x.gguf")
    with pytest.raises(LocaterError, match="contains GGUF files; name one"):
        scan(tmp_path)
    writer = gguf.GGUFWriter(tmp_path / "y.gguf", "rwkv6")
    writer.add_block_count(1)
    writer.add_tensor("a", np.zeros((2, 2), dtype=np.float32))
    finish(writer)
    with pytest.raises(LocaterError, match="architecture 'rwkv6' is not supported"):
        scan(tmp_path / "y.gguf")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write(KINDS["llama"](), path, "llama")
    return path.read_bytes()


def places(data: bytes) -> dict[str, int]:
    """Where the fields of interest lie in a file: counts, a key, the first array, the entry of the second tensor."""
    name = b"blk.0.attn_q.weight"
    at = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    own = {"length": at - 8 - len(name), "axes": at, "shape": at + 4, "type": at + 20, "offset": at + 24}
    return {"version": 4, "tensors": 8, "keys": 16, **own}


def number(data: bytes, at: int) -> int:
    return int(struct.unpack_from("<Q", data, at)[0])


GGUF_DAMAGE = {
    "unaligned": ("offset", lambda old: struct.pack("<Q", old + 4), "blk.0.attn_q.weight begins at byte"),
    "overlap": ("offset", lambda old: struct.pack("<Q", old - 32), "blk.0.attn_q.weight begins at byte"),
    "wraps around": ("offset", lambda old: struct.pack("<Q", 2**64 - 32), "blk.0.attn_q.weight begins at byte"),
    "beyond the file": ("offset", lambda old: struct.pack("<Q", 2**40), "blk.0.attn_q.weight begins at byte"),
    "shape that wraps around": ("shape", lambda old: struct.pack("<QQ", 2**60 + 2, 2**4), "blk.0.attn_q.weight"),
    "empty": ("shape", lambda old: struct.pack("<QQ", 32, 0), "blk.0.attn_q.weight has the shape (32, 0)"),
    "five axes": ("axes", lambda old: struct.pack("<I", 5), "blk.0.attn_q.weight has 5 axes"),
    "unknown type": ("type", lambda old: struct.pack("<I", 99), "blk.0.attn_q.weight is stored as type 99"),
    "a name that runs on": ("length", lambda old: struct.pack("<Q", old + 8), r"attn_q.weight\x02\x00"),
    "too many tensors": ("tensors", lambda old: struct.pack("<Q", 2**40), "1,099,511,627,776 tensors"),
    "too many keys": ("keys", lambda old: struct.pack("<Q", 2**62), "keys"),
    "a tensor more than there is": ("tensors", lambda old: struct.pack("<Q", old + 1), "GGUF"),
    "version 1": ("version", lambda old: struct.pack("<I", 1), "version 1"),
    "other byte order": ("version", lambda old: struct.pack(">I", 3), "other byte order"),
}  # fmt: skip


@pytest.mark.parametrize("damage", GGUF_DAMAGE)
def test_damaged_gguf_files_are_refused(small: bytes, tmp_path: Path, damage: str) -> None:
    place, change, says = GGUF_DAMAGE[damage]
    at = places(small)[place]
    new = change(number(small, at))
    path = tmp_path / "x.gguf"
    path.write_bytes(small[:at] + new + small[at + len(new) :])
    with pytest.raises(LocaterError) as error:
        scan(path)
    assert says in str(error.value)
    assert str(path) in str(error.value)
    assert str(error.value).isprintable(), "one line, whatever the file has"


def test_a_truncated_gguf_file_is_refused(small: bytes, tmp_path: Path) -> None:
    for kept in (0, 3, 20, 100, 1500, len(small) // 2, len(small) - 1000):
        (tmp_path / "x.gguf").write_bytes(small[:kept])
        with pytest.raises(LocaterError, match=r"x\.gguf: "):
            scan(tmp_path / "x.gguf")


def with_keys(small: bytes, keys: list[bytes]) -> bytes:
    """The file with more keys in front of its own; the data no longer begins where it did, which is not reached."""
    return small[:16] + struct.pack("<Q", number(small, 16) + len(keys)) + b"".join(keys) + small[24:]


def key(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (key("x", 9, struct.pack("<IQ", 0, 2**40)), "'x' has an array of 1,099,511,627,776"),
        (key("x", 9, struct.pack("<IQ", 8, 2**40)), "'x' has an array of 1,099,511,627,776"),
        (key("x", 9, struct.pack("<IQ", 9, 2**40)), "'x' has an array of 1,099,511,627,776"),
        (key("x", 9, struct.pack("<IQ", 9, 1) * 50), "'x' has arrays nested"),
        (key("x", 9, struct.pack("<IQ", 77, 1)), "'x' has a value of type 77"),
        (key("x", 8, struct.pack("<Q", 2**63)), "truncated"),
        (key("x", 8, struct.pack("<Q", 1) + b"\xff"), "UTF-8"),
        (key("x", 7, b"\2"), "'x' is neither true nor false"),
        (key("x", 0, b"\0") * 2, "'x' occurs twice"),
        (key("general.alignment", 4, struct.pack("<I", 24)), "alignment"),
        (key("general.alignment", 4, struct.pack("<I", 0)), "alignment"),
        (key("general.alignment", 5, struct.pack("<I", 32)), "alignment"),
        (key("general.alignment", 4, struct.pack("<I", 2**31)), "truncated"),
    ],
)
def test_damaged_gguf_keys_are_refused_at_once(small: bytes, tmp_path: Path, value: bytes, says: str) -> None:
    """A file of 13 kB with an array of 2^40 elements took all memory."""
    count = 2 if "twice" in says else 1
    path = tmp_path / "x.gguf"
    path.write_bytes(with_keys(small, [value] + [b""] * (count - 1)))
    with pytest.raises(LocaterError) as error:
        scan(path)
    assert says in str(error.value)


def test_many_gguf_keys_and_long_arrays_are_read_in_little_time(small: bytes, tmp_path: Path) -> None:
    """300,000 keys took more than twelve seconds. Padding keeps the data where the alignment wants it."""
    keys = [key(f"k{i:06}", 4, struct.pack("<I", i)) for i in range(100_000)]
    texts = b"".join(struct.pack("<Q", 5) + b"token" for _ in range(100_000))
    keys.append(key("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 100_000) + texts))
    added = sum(map(len, keys))
    keys.append(key("pad", 8, struct.pack("<Q", fill := -(added + 23) % 32) + b"-" * fill))
    path = tmp_path / "x.gguf"
    path.write_bytes(with_keys(small, keys))
    begun = time.process_time()
    rows = scan(path).rows
    assert time.process_time() - begun < 3
    (tmp_path / "y.gguf").write_bytes(small)
    assert [r.trace for r in rows] == [r.trace for r in scan(tmp_path / "y.gguf").rows]


def test_the_header_is_read_as_the_gguf_package_reads_it(pair: tuple[nn.Module, Path]) -> None:
    """Every tensor's bytes, shape and type, and every setting."""
    from locater.sources.gguf_file import read_header

    _, path = pair
    header, reader = read_header(path), gguf.GGUFReader(path)
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for theirs in reader.tensors:
        ours = header.tensors[theirs.name]
        assert (ours.shape, ours.kind) == (tuple(theirs.shape.tolist()), theirs.tensor_type)
        assert (ours.start, ours.size) == (theirs.data_offset, theirs.n_bytes)
    theirs = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert header.fields == theirs


def test_settings_of_the_wrong_kind_are_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    write(KINDS["llama"](), tmp_path / "x.gguf", "llama")
    for name, value, kind in (
        ("llama.attention.head_count_kv", [2, 2], gguf.GGUFValueType.ARRAY),
        ("llama.attention.head_count", "four", gguf.GGUFValueType.STRING),
        ("llama.attention.head_count", 0, gguf.GGUFValueType.UINT32),
        ("llama.rope.freq_base", float("nan"), gguf.GGUFValueType.FLOAT32),
        ("llama.rope.scaling.type", 3, gguf.GGUFValueType.UINT32),
    ):
        reader, writer = gguf.GGUFReader(tmp_path / "x.gguf"), gguf.GGUFWriter(tmp_path / "y.gguf", "llama")
        for other, field in reader.fields.items():
            if other.startswith("llama.") and other != name:
                writer.add_key_value(other, field.contents(), field.types[0])
        writer.add_key_value(name, value, kind, gguf.GGUFValueType.UINT32 if kind == gguf.GGUFValueType.ARRAY else None)
        for tensor in reader.tensors:
            writer.add_tensor(tensor.name, np.array(tensor.data))
        finish(writer)
        with pytest.raises(LocaterError, match=rf"{name} is .*: convert the model again"):
            scan(tmp_path / "y.gguf")


def test_types_that_are_no_floats_are_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    write(KINDS["llama"](), tmp_path / "x.gguf", "llama")
    reader, writer = copy_settings(tmp_path / "x.gguf", tmp_path / "y.gguf")
    for tensor in reader.tensors:
        data = np.array(tensor.data)
        writer.add_tensor(tensor.name, data.astype(np.int32) if "attn_q." in tensor.name else data)
    finish(writer)
    with pytest.raises(LocaterError, match=r"y\.gguf: blk\.0\.attn_q\.weight is stored as I32"):
        scan(tmp_path / "y.gguf")
