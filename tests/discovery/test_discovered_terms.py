"""Discovered layers with more than products in their logits: position tables, sinks, runs of tokens, other streams."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import locater
from locater.discovery.layout_of_call import read_layout
from locater.discovery.redrawn_copy import RedrawnCopy
from locater.discovery.verified_search import verify_layout
from locater.errors import LocaterError
from locater.layers import AttentionLayer
from locater.layers.layout import AttentionLayout, TableLayout
from tests import parity
from tests.discovery.test_discovered import BASE, HEAD, build

T5 = dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=64, decoder_start_token_id=0)


def _layers(model: nn.Module, example: Any = None) -> dict[str, AttentionLayer]:
    discovered = locater.discover(model, example)
    assert discovered.whole
    assert all(layer.unknown_output is None for layer in discovered.layers)
    return {layer.name: layer for layer in discovered.layers}


def test_a_table_by_distance_is_that_of_the_record() -> None:
    """T5: the record knows the rule of its buckets, discovery the rows that the example's distances read."""
    model = build("T5", "ForConditionalGeneration", **T5).double()
    parity.redraw(model)
    ids = torch.arange(3, 12)[None]
    layers = _layers(model, {"input_ids": ids, "decoder_input_ids": ids})
    record = {layer.name: layer for layer in locater.attention_layers(model)}
    for name in ("encoder.block.0.layer.0.SelfAttention", "encoder.block.1.layer.0.SelfAttention"):
        x = torch.randn(1, 9, 32, dtype=torch.float64)
        theirs = next(layer for path, layer in record.items() if name.startswith(path))
        assert torch.allclose(layers[name].output(x), theirs.output(x), atol=1e-9)
        near = dict(query_positions=torch.arange(20, 29), key_positions=torch.arange(20, 29))
        assert torch.allclose(layers[name].logits(x, **near), theirs.logits(x, **near), atol=1e-9)
        with pytest.raises(LocaterError, match="known for 9 x 9 positions"):
            layers[name].logits(torch.randn(1, 10, 32, dtype=torch.float64))


def test_sinks_and_windows_are_those_of_the_record() -> None:
    settings = {**BASE, **HEAD, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 20}
    model = build("GptOss", **settings).double()
    parity.redraw(model)
    x = torch.randn(1, 30, 32, dtype=torch.float64)
    for ours, theirs in zip(_layers(model).values(), locater.attention_layers(model), strict=True):
        assert ours.sinks is not None
        assert ours.window == theirs.window
        assert torch.allclose(ours.output(x), theirs.output(x), atol=1e-6)  # angles of the record are float32


def test_queries_meet_rows_and_columns() -> None:
    """SAM: a query of patch (y, x) meets a vector for the rows and one for the columns between it and the key."""
    config = locater_transformers().SamVisionConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=20,
        patch_size=4,
        mlp_dim=16,
        window_size=0,
        global_attn_indexes=[0],
        output_channels=8,
    )
    torch.manual_seed(0)
    model = locater_transformers().SamVisionModel(config).double().eval()
    parity.redraw(model)
    (layer,) = _layers(model, {"pixel_values": torch.randn(2, 3, 20, 20)}).values()
    x = torch.randn(1, 25, 16, dtype=torch.float64)
    q, k = layer.queries(x), layer.keys(x)
    attention: Any = model.get_submodule(layer.name)
    at = torch.arange(25)
    rows, columns = at // 5, at % 5
    steps = [side[:, None] - side + 4 for side in (rows, columns)]
    met = torch.einsum("bhtc,tsc->bhts", q, attention.rel_pos_h[steps[0]] + attention.rel_pos_w[steps[1]])
    assert torch.allclose(layer.logits(x), 8**-0.5 * q @ k.mT + met, atol=1e-9)


def locater_transformers() -> Any:
    return pytest.importorskip("transformers")


class Windows(nn.Module):
    """Attention inside windows of four tokens, with a learned bias per pair; windows after the first hide the last key
    from the first query, with -100.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.table = nn.Parameter(torch.randn(7, 2))
        at = torch.arange(4)
        self.register_buffer("index", at[:, None] - at + 3)

    def forward(self, x: Tensor) -> Tensor:
        batch = self.norm(x).unflatten(1, (-1, 4)).flatten(0, 1)
        q, k, v = self.qkv(batch).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        index: Any = self.index
        mask = torch.zeros(len(batch), 1, 4, 4)
        mask[1:, :, 0, 3] = -100.0
        logits = q @ k.mT * 8**-0.5 + self.table[index].permute(2, 0, 1) + mask
        return x + self.proj((logits.softmax(-1) @ v).transpose(1, 2).flatten(2)).view(x.shape)


def test_windows_with_a_table_of_biases() -> None:
    model = Windows()
    (layer,) = _layers(model, {"x": torch.randn(2, 12, 16)}).values()
    assert "sequences are masked differently" in str(layer.unknown_mask)
    with pytest.raises(LocaterError, match="give mask="):
        layer.attention(torch.randn(1, 4, 16))
    x = torch.randn(1, 4, 16)
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    assert torch.allclose(layer.output(x, mask=mask), model(x) - x, atol=1e-5)
    assert "mask has to be given" in locater.discover(model, {"x": torch.randn(2, 12, 16)}).gaps[0]


class Positions(nn.Module):
    """As in DETR: queries and keys know positions, values do not."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 2, batch_first=True)
        self.places = nn.Parameter(torch.randn(9, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(x + self.places, x + self.places, x, need_weights=False)[0]


def test_values_of_another_stream() -> None:
    model = Positions()
    (layer,) = _layers(model, {"x": torch.randn(2, 9, 16)}).values()
    x = torch.randn(1, 9, 16)
    assert torch.allclose(layer.output(x + model.places, None, x), model(x) - x, atol=1e-5)
    with pytest.raises(LocaterError, match="give x_v"):
        layer.output(x)


def test_runs_of_tokens() -> None:
    settings = dict(attention_chunk_size=16, num_local_experts=2, intermediate_size_mlp=48, no_rope_layers=[1, 0])
    model = _llama4(**{**BASE, **HEAD, **settings})
    first, second = _layers(model).values()
    assert (first.chunk, second.chunk, first.causal, second.causal) == (16, None, True, True)
    seen = first.visible(40, 40)[0, 0]
    at = torch.arange(40)
    assert torch.equal(seen, (at[:, None] >= at) & (at[:, None] // 16 == at // 16))


def _llama4(**settings: Any) -> nn.Module:
    torch.manual_seed(0)
    library = locater_transformers()
    return library.Llama4ForCausalLM(library.Llama4TextConfig(**settings)).eval()


def test_padding_of_the_example_is_no_mask_of_the_layer() -> None:
    model = build("Gemma", **{**BASE, **HEAD})
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    for layer in _layers(model, {"input_ids": torch.arange(18).view(2, 9), "attention_mask": mask}).values():
        assert (layer.causal, layer.unknown_mask) == (True, None)


def test_a_mistake_in_a_table_or_a_sink_is_refused() -> None:
    copied = RedrawnCopy(Windows(), {"x": torch.randn(2, 12, 16)})
    first = copied.run(0)
    layout = read_layout(first.tape, first.calls[0])
    table = layout.logits.bias
    assert isinstance(table, TableLayout)
    second = copied.run(1)
    rows = [list(row) for row in table.rows]
    rows[2][1] = (rows[2][1] + 1) % 7
    wrong = replace(layout.logits, bias=TableLayout(table.name, tuple(map(tuple, rows)), table.axis))
    for how in (wrong, replace(layout.logits, bias=None)):
        result: AttentionLayout = verify_layout(replace(layout, logits=how), second, second.calls[0])
        assert "logits differ" in str(result.unknown_logits)
        assert result.unknown_scale is None  # the scale was verified


class Grid(Windows):
    """A table by place, which distance alone does not decide."""

    def __init__(self) -> None:
        super().__init__()
        self.index = torch.tensor([[0, 1, 2, 3], [4, 0, 5, 6], [1, 3, 0, 2], [6, 5, 4, 0]])


def test_a_table_of_places_is_refused_for_sequences_of_another_length() -> None:
    example = {"x": torch.randn(2, 12, 16)}
    (layer,) = _layers(Grid(), example).values()
    assert layer.logits(torch.randn(1, 4, 16)).shape == (1, 2, 4, 4)
    with pytest.raises(LocaterError, match="known for a sequence of 4 tokens, and not for one of 3"):
        layer.logits(torch.randn(1, 3, 16))
    (by_distance,) = _layers(Windows(), example).values()
    assert by_distance.logits(torch.randn(1, 3, 16)).shape == (1, 2, 3, 3)


def test_frequencies_do_not_follow_the_default_dtype() -> None:
    model = build("Gemma", **{**BASE, **HEAD})
    first = next(iter(_layers(model).values()))
    torch.set_default_dtype(torch.bfloat16)
    try:
        again, fresh = (next(iter(_layers(x).values())) for x in (model, build("Gemma", **{**BASE, **HEAD})))
    finally:
        torch.set_default_dtype(torch.float32)
    for layer in (again, fresh):
        assert layer.rotary is not None
        assert first.rotary is not None
        assert torch.equal(layer.rotary.frequencies, first.rotary.frequencies)


def test_norms_after_the_rotation_have_no_drive() -> None:
    """Gains act on channels that have turned: the drive of unturned gains is that of another model."""
    after = locater.scan(build("HunYuanDenseV1", **{**BASE, **HEAD}), details=True)
    before = locater.scan(build("Gemma", **{**BASE, **HEAD}), details=True)
    assert all(row.drive is None for row in after.rows)
    assert all(row.drive is not None for row in before.rows)
    assert any("moments are those at position 0" in note for note in after.assumptions["notes"])


def test_an_example_is_a_mapping() -> None:
    with pytest.raises(LocaterError, match="example is a Tensor: give a mapping"):
        locater.discover(Windows(), torch.randn(2, 12, 16))  # type: ignore[arg-type]


class AddedBiases(nn.Module):
    """Maps as Falcon writes them: a product, and then a bias; queries and keys turn after it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (
            (y @ part.weight.T + part.bias).unflatten(-1, (2, 8)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        angles = torch.arange(x.shape[1])[:, None] * 0.5 ** torch.arange(4)
        q, k = (
            torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)
            for a, b in (q.chunk(2, -1), k.chunk(2, -1))
        )
        mixed = (q @ k.mT * 8**-0.5).softmax(-1) @ v
        return x + (mixed.transpose(1, 2).flatten(2) @ self.o.weight.T + self.o.bias)


def test_biases_that_are_added_after_the_product_are_biases_of_the_maps() -> None:
    model, x = AddedBiases().double(), torch.randn(2, 9, 16, dtype=torch.float64)
    parity.redraw(model)
    (layer,) = _layers(model, {"x": x}).values()
    assert all(part is not None and part.bias is not None for part in (layer.query, layer.key, layer.value, layer.out))
    assert torch.allclose(layer.output(x), model(x) - x, atol=1e-6)


class SinkOfWholeRows(nn.Module):
    """ALiBi by the position of the key, which is that by distance but for a number per row: a sink sees it."""

    def __init__(self, by_key: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.sinks, self.by_key = nn.Parameter(torch.zeros(2)), by_key

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (2, 8)).transpose(1, 2) for part in (self.q, self.k, self.v))
        at = torch.arange(x.shape[1])
        away = at if self.by_key else at - at[:, None]
        logits = q @ k.mT * 8**-0.5 + 0.25 * away
        logits = logits.masked_fill(at > at[:, None], -torch.inf)
        sinks = self.sinks[:, None, None].expand(len(x), -1, len(at), 1)
        weights = torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]
        return x + self.o((weights @ v).transpose(1, 2).flatten(2))


def test_a_sink_sees_what_is_added_to_whole_rows() -> None:
    x = torch.randn(2, 9, 16)
    (layer,) = locater.discover(SinkOfWholeRows(False), {"x": x}).layers
    assert layer.unknown_logits is None
    (layer,) = locater.discover(SinkOfWholeRows(True), {"x": x}).layers
    assert "its logits differ" in str(layer.unknown_logits)
    with pytest.raises(LocaterError, match="logits differ"):
        layer.attention(x)
