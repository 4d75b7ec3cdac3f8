"""What broke once: other people's wrappers and readers of `forward`, failures in the middle of a run, caches, packed
sequences.
"""

from __future__ import annotations

import copy
import gc
import inspect
import io
import json
import logging
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import locater
from locater.calls.attention_interface import eager_function
from locater.calls.call_and_masks import Call, call_of_interface
from locater.errors import LocaterError
from locater.kernels import Terms
from locater.observing import accumulate
from locater.runs.record_sinks import JsonlSink, read_run

transformers = pytest.importorskip("transformers")
NUMBERS = ("rows", "entropy", "max_logit", "sink", "rest_entropy", "distance", "self_mass")


def llama(how: str = "sdpa", layers: int = 2) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation=how).eval()


def tokens(*shape: int) -> Tensor:
    return torch.randint(1, 50, shape, generator=torch.Generator().manual_seed(1))


def left_behind(model: nn.Module) -> list[str]:
    return [name for part in model.modules() for name in part.__dict__ if name == "forward" or "locater" in name]


def same_numbers(a: Any, b: Any) -> None:
    for one, other in zip(a.rows, b.rows, strict=True):
        for name in NUMBERS:
            assert one[name] == (None if other[name] is None else pytest.approx(other[name], abs=1e-5)), (
                one.name,
                name,
            )


def test_generate_makes_the_same_mask_of_padding() -> None:
    # without a mask, generate() makes one only if forward's signature has a place for it
    model, ids = llama(), torch.tensor([[0, 0, 0, 5, 6, 7], [3, 4, 5, 6, 7, 8]])
    how = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    plain = model.generate(ids, **how)
    signature = inspect.signature(model.forward)
    with locater.observe(model) as seen:
        found = model.generate(ids, **how)
        assert inspect.signature(model.forward) == signature
    assert all(torch.equal(a, b) for a, b in zip(plain.logits, found.logits, strict=True))
    assert seen.rows[0].rows == 3 + 6 + 2 * 5


def small(family: str, how: str) -> Any:
    """One layer with redrawn parameters."""
    sizes = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    kinds = {
        "llama": ("LlamaForCausalLM", "LlamaConfig", {**sizes, "num_key_value_heads": 2}),
        "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**sizes, "num_key_value_heads": 2, "head_dim": 8, "attn_logit_softcapping": 2.0}),
        "bert": ("BertModel", "BertConfig", sizes),
        "gptj": ("GPTJForCausalLM", "GPTJConfig", {"vocab_size": 50, "n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4, "bos_token_id": 1, "eos_token_id": 1}),
        "t5": ("T5EncoderModel", "T5Config", {"vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}),
    }  # fmt: skip
    model, config, options = kinds[family]
    made = getattr(transformers, model)._from_config(getattr(transformers, config)(**options), attn_implementation=how)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3 + (p.ndim == 1))
    return made.eval()


def masks(kind: str) -> Tensor:
    """Masks (B, 1, T, S) as a user may pass them; every row sees a key."""
    generator = torch.Generator().manual_seed(3)
    seen = (torch.rand(2, 1, 6, 6, generator=generator) > 0.4) | torch.eye(6, dtype=torch.bool)
    added = torch.randn(2, 1, 6, 6, generator=generator) * 2 if "added" in kind else torch.zeros(2, 1, 6, 6)
    hides = added.masked_fill(~seen, torch.finfo(torch.float32).min)
    return {"bool": seen, "int": seen.long(), "hides": hides, "added": added, "added and hides": hides}[kind]


@pytest.mark.parametrize("kind", ["bool", "int", "hides", "added", "added and hides"])
@pytest.mark.parametrize(
    ("family", "how"),
    [*((family, "eager") for family in ("llama", "gemma2", "bert", "gptj", "t5")), *((f, "sdpa") for f in ("llama", "bert", "t5"))],
)  # fmt: skip
def test_a_mask_of_any_kind_is_read_as_the_model_reads_it(family: str, how: str, kind: str) -> None:
    # eager attention adds its mask: True is +1, and hides nothing. The fused function hides by False
    model, ids, mask = small(family, how), tokens(2, 6), masks(kind)
    if how == "sdpa" and kind == "int" and family != "t5":
        pytest.skip("PyTorch's fused attention refuses a mask of whole numbers")
    if family == "gemma2" and kind != "hides":
        with pytest.raises(LocaterError, match="adds numbers to logits that were capped"), locater.observe(model):
            model(input_ids=ids, attention_mask=mask)
        return
    with locater.observe(model) as seen, torch.no_grad():
        model(input_ids=ids, attention_mask=mask)
    model.set_attn_implementation("eager")
    if how == "sdpa" and kind == "bool":
        mask = masks("hides")
    with torch.no_grad():
        maps = model(input_ids=ids, attention_mask=mask, output_attentions=True).attentions[0].double()
    wanted = -torch.special.xlogy(maps, maps).sum(-1).mean((0, 2))
    assert [row.entropy for row in seen.rows] == pytest.approx(wanted.tolist(), abs=1e-6)


def test_a_compiled_model_whose_mask_adds_to_capped_logits_has_no_entropy() -> None:
    model, ids = small("gemma2", "eager"), tokens(2, 6)
    compiled = torch.compile(model, backend="eager")
    for kind, known in (("hides", True), ("bool", False)):
        with locater.observe(compiled) as seen, torch.no_grad():
            compiled(input_ids=ids, attention_mask=masks(kind))
        assert all((row.entropy is not None) is known for row in seen.rows), kind
        if known:
            with locater.observe(model) as plain, torch.no_grad():
                model(input_ids=ids, attention_mask=masks(kind))
            same_numbers(seen, plain)
    torch._dynamo.reset()


def test_masks_without_a_batch_are_shared_and_unknown_ones_refused() -> None:
    q = torch.randn(2, 4, 3, 8, generator=torch.Generator().manual_seed(0))
    module, seen = nn.Module(), torch.ones(3, 3, dtype=torch.bool).tril()
    for mask in (seen, seen[None], seen[None, None]):
        call = call_of_interface(module, "sdpa", q, q, mask, {}, q)
        assert call.terms.mask is not None
        assert torch.equal(call.terms.mask, seen[None, None])
        assert call.terms.padding is None
        assert not call.terms.causal
    with pytest.raises(LocaterError, match="int64 may hide or be added, and which of them 'mine' attention does"):
        call_of_interface(module, "mine", q, q, seen[None, None].long(), {}, q)


def test_fused_attention_without_a_mask_has_no_window() -> None:
    # FlashAttention is told of a window; for the fused function it is in the mask alone
    q = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    module = nn.Module()
    assert call_of_interface(module, "sdpa", q, q, None, {"sliding_window": 2}, q).terms.window is None
    assert call_of_interface(module, "flash_attention_2", q, q, None, {"sliding_window": 2}, q).terms.window == 2
    assert not call_of_interface(module, "flex_attention", q, q, None, {}, q).terms.causal


def test_a_saved_model_knows_nothing_of_the_observation() -> None:
    model, ids, file = llama(), tokens(1, 4), io.BytesIO()
    with locater.observe(model, hidden=True) as seen:
        expected = model(ids).logits
        torch.save(model, file)
        copied = copy.deepcopy(model)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert b"locater." not in file.getvalue()
    for other in (loaded, copied):
        assert torch.equal(other(ids).logits, expected)
        with locater.observe(other) as again:
            other(ids)
        assert again.rows[0].rows == 4
    assert seen.rows[0].rows == 4


def test_observations_may_end_in_any_order() -> None:
    model, ids = llama(), tokens(1, 4)
    one, two = locater.observe(model, hidden=True), locater.observe(model, hidden=True)
    one.__enter__()
    two.__enter__()
    model(ids)
    one.close()
    model(ids)
    two.close()
    assert (one.rows[0].rows, two.rows[0].rows) == (4, 8)
    assert (one.passes, two.passes) == (1, 2)
    assert (one.layers[0].sequences, two.layers[0].sequences) == (1, 2)
    assert not left_behind(model)


def test_a_wrapper_put_on_meanwhile_stays() -> None:
    model, ids = llama(), tokens(1, 4)
    with locater.observe(model) as seen:
        inner = model.forward
        model.forward = lambda *args, **kw: inner(*args, **kw).logits  # as accelerate does for mixed precision
        model(ids)
    assert isinstance(model(ids), Tensor)
    assert seen.rows[0].rows == 4
    assert seen.passes == 1


def test_made_in_inference_mode_and_used_outside() -> None:
    model, ids = llama(), tokens(1, 4)
    with torch.inference_mode():
        seen = locater.observe(model)
    with seen:
        model(ids)
        seen.clear()
        model(ids)
    assert seen.rows[0].rows == 4


def test_the_table_is_restored_from_threads_and_not_over_others() -> None:
    from transformers.modeling_utils import AttentionInterface

    table = AttentionInterface._global_mapping
    before, rows = dict(table), set()

    def work() -> None:
        model = llama()
        for _ in range(10):
            with locater.observe(model) as seen:
                model(tokens(1, 4))
            rows.add(seen.rows[0].rows)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rows == {4}
    assert table == before
    original = table["sdpa"]
    with locater.observe(model := llama()):
        model(tokens(1, 4))
        table["sdpa"] = other = lambda *args, **kw: original(*args, **kw)
    assert table["sdpa"] is other
    table["sdpa"] = original


def plain_encoder() -> nn.Module:
    block = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
    return nn.Sequential(nn.Embedding(50, 32), nn.TransformerEncoder(block, 2, enable_nested_tensor=False)).eval()


class ByHand(nn.Module):
    """Attention that no record knows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.qkv = nn.Embedding(50, 32), nn.Linear(32, 96)

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (4, -1)).transpose(1, 2) for x in self.qkv(self.embedding(ids)).chunk(3, -1))
        return (q @ k.mT).softmax(-1) @ v


def bloom() -> Any:
    config = transformers.BloomConfig(vocab_size=50, hidden_size=32, n_layer=2, n_head=4)
    return transformers.BloomForCausalLM(config).eval()


@pytest.mark.parametrize(
    "kind", ["llama", "bloom", "encoder", "by hand", pytest.param("compiled", marks=pytest.mark.slow)]
)
def test_threads_that_observe_one_model_count_their_own_calls(kind: str) -> None:
    """Through the interface, by taps, in a graph, and by following what runs."""
    made = {"llama": llama, "compiled": llama, "bloom": bloom, "encoder": plain_encoder, "by hand": ByHand}
    model: Any = made[kind]()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8)
    if kind == "compiled":
        model = torch.compile(model, backend="eager")
    texts = [torch.randint(1, 50, (2, 9), generator=torch.Generator().manual_seed(i)) for i in range(4)]
    how = {"use_cache": False} if kind in ("llama", "compiled", "bloom") else {}
    before = left_behind(model)

    def entropies(text: Tensor, **options: Any) -> list[float | None]:
        with locater.observe(model, **options) as seen, torch.no_grad():
            model(text, **how)
        assert seen.passes == 1
        return [row.entropy for row in seen.rows]

    expected, found = [entropies(text) for text in texts], [[] for _ in texts]  # type: ignore[var-annotated]
    assert expected[0] != pytest.approx(expected[1], abs=1e-3)

    def work(number: int) -> None:
        for _ in range(1 if kind == "compiled" else 10):
            found[number].append(entropies(texts[number]))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert [len(rows) for rows in found] == [1 if kind == "compiled" else 10] * 4  # no thread failed
    for rows, wanted in zip(found, expected, strict=True):
        for row in rows:
            assert row == pytest.approx(wanted, abs=1e-5)
    assert left_behind(model) == before
    torch._dynamo.reset()


def test_passes_in_another_thread_are_named() -> None:
    model, ids = llama(), tokens(1, 4)
    with locater.observe(model) as seen:
        model(ids)
        for _ in range(2):
            (thread := threading.Thread(target=model, args=(ids,))).start()
            thread.join()
    assert {row.rows for row in seen.rows} == {4}
    assert seen.notes == ["not counted: 2 forward passes in other threads than the one that entered observe()"]
    thread = threading.Thread(target=model, args=(ids,))
    with (
        pytest.raises(LocaterError, match="ran in another thread, whose calls are not counted"),
        locater.observe(model),
    ):
        thread.start(), thread.join()


def test_a_monitor_follows_a_trainer_in_another_thread(tmp_path: Path) -> None:
    model, ids = llama(), tokens(1, 4)
    monitor = locater.Monitor(tmp_path / "run.jsonl", every=1).attach(model.train())

    def train() -> None:
        for _ in range(2):
            loss = model(ids, labels=ids).loss
            loss.backward()
            monitor.after_step(loss=loss)

    (thread := threading.Thread(target=train)).start()
    thread.join()
    monitor.detach()
    records = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "step"]
    assert len(steps) == 2
    assert all(None not in layer for step in steps for layer in step["heads"]["entropy"])


@pytest.mark.parametrize("make", [llama, bloom, ByHand])
@pytest.mark.parametrize("kept", [True, False])
def test_an_observation_that_is_never_left_ends_with_its_last_reference(make: Any, kept: bool) -> None:
    import torch.nn.attention.flex_attention as flex
    from transformers.modeling_utils import AttentionInterface

    table, function = dict(AttentionInterface._global_mapping), flex.flex_attention
    model, ids = make(), tokens(1, 3)
    before = left_behind(model)
    seen = locater.observe(model, hidden=make is llama).__enter__()
    model(ids)
    assert seen.rows
    assert AttentionInterface._global_mapping != table
    if not kept:
        del model
    del seen
    gc.collect()
    assert AttentionInterface._global_mapping == table
    assert flex.flex_attention is function
    if kept:
        assert left_behind(model) == before
        with locater.observe(model) as again:
            model(ids)
        assert {row.rows for row in again.rows} == {3}


def test_a_function_written_over_the_table_is_heard() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as TABLE

    original = TABLE["sdpa"]
    TABLE["sdpa"] = mine = lambda *args, **kw: original(*args, **kw)
    try:
        with locater.observe(model := llama()) as seen:
            model(tokens(1, 4))
        assert seen.rows[0].rows == 4
        assert TABLE["sdpa"] is mine
    finally:
        del TABLE["sdpa"]


def test_a_class_falls_back_on_the_function_it_names() -> None:
    from transformers.models.llama4 import modeling_llama4 as llama4

    assert eager_function(llama4.Llama4VisionAttention) is llama4.vision_eager_attention_forward
    assert eager_function(llama4.Llama4TextAttention) is llama4.eager_attention_forward


@pytest.mark.parametrize("how", ["whole", "in place", "blocks"])
def test_compiled_before_and_eager(how: str) -> None:
    torch._dynamo.reset()
    model: Any = llama("eager", layers=2 if how == "blocks" else 1)  # blocks share what was compiled
    ids = tokens(2, 6)
    for part in model.model.layers if how == "blocks" else [model] if how == "in place" else []:
        part.compile(backend="eager", fullgraph=True)
    called = torch.compile(model, backend="eager", fullgraph=True) if how == "whole" else model
    with torch.no_grad():
        plain = called(ids, use_cache=False).logits
        with locater.observe(called, every=2) as seen:
            for _ in range(4):
                found = called(ids, use_cache=False).logits
    assert torch.equal(plain, found)
    assert seen.rows[0].rows == 2 * 12
    assert not left_behind(model)


def test_a_mask_by_place_is_padding_of_the_stream_too() -> None:
    model, ids, mask = llama(), tokens(2, 8), torch.ones(2, 8, dtype=torch.long)
    mask[0, :4] = 0
    with locater.observe(model, hidden=True) as by_place:
        model(ids, mask)
    with locater.observe(model, hidden=True) as by_name:
        model(input_ids=ids, attention_mask=mask)
    assert by_place.layers == by_name.layers


@pytest.mark.parametrize("how", ["eager", "sdpa"])
@pytest.mark.parametrize("length", [3, 7])
@pytest.mark.parametrize("cache", [None, "static"])
def test_generating_beyond_a_window_is_one_pass(how: str, length: int, cache: str | None) -> None:
    # the cache holds the window: its oldest key is no sink once the first of the sequence has left
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        sliding_window=4, layer_types=["sliding_attention", "full_attention"], pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    model = transformers.Gemma3ForCausalLM._from_config(config, attn_implementation=how).eval()
    ids, mask = tokens(2, length), torch.ones(2, length, dtype=torch.long)
    mask[0, :2] = 0
    more = {} if cache is None else {"cache_implementation": cache, "disable_compile": True}
    with locater.observe(model, rest=True) as seen:
        out = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, **more)
    with torch.no_grad(), locater.observe(model, rest=True) as whole:
        model(out[:, :-1], attention_mask=torch.cat([mask, mask.new_ones(2, 5)], 1), use_cache=False)
    same_numbers(seen, whole)


def test_packed_documents_have_a_first_key_each() -> None:
    model, ids = llama(), tokens(1, 10)
    with torch.no_grad():
        with locater.observe(model, rest=True) as packed:
            model(ids, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]]), use_cache=False)
        with locater.observe(model, rest=True) as apart:
            model(ids[:, :4], use_cache=False)
            model(ids[:, 4:], use_cache=False)
    same_numbers(packed, apart)


@pytest.mark.parametrize("told", ["position_ids", "cu_seq_lens_k"])
def test_flash_attention_is_told_of_documents_without_a_mask(told: str) -> None:
    model, q = llama(), torch.randn(1, 4, 6, 8)
    site = locater.observe(model, rest=True).sites[0]
    kw = {
        "position_ids": torch.tensor([[0, 1, 0, 1, 2, 3]]),
        "cu_seq_lens_k": torch.tensor([0, 2, 6], dtype=torch.int32),
    }
    call = call_of_interface(
        site.module, "flash_attention_2", q, q[:, ::2], None, {"scaling": 1.0, told: kw[told]}, q.transpose(1, 2)
    )
    apart = locater.observe(model, rest=True)
    for rows in (slice(0, 2), slice(2, 6)):
        part = q[:, :, rows]
        apart.sites[0].receive(
            call_of_interface(
                site.module, "flash_attention_2", part, part[:, ::2], None, {"scaling": 1.0}, part.transpose(1, 2)
            )
        )
    site.receive(call)
    one, other = site.sums.clone(), apart.sites[0].sums.clone()
    one[:, 0] = other[:, 0] = 0  # calls
    assert torch.allclose(one, other, atol=1e-5)


def test_memories_of_both_sides_keep_positions() -> None:
    torch.manual_seed(0)
    config = transformers.XLNetConfig(vocab_size=50, d_model=32, n_layer=1, n_head=4, d_inner=48, mem_len=6)
    model = transformers.XLNetModel(config).eval()
    with torch.no_grad():
        memory = model(tokens(1, 4), use_mems=True).mems
        with locater.observe(model) as seen:
            weights = model(tokens(1, 5), mems=memory, output_attentions=True).attentions[0][0]
    T, S = weights.shape[-2:]
    distance = (torch.arange(S - T, S)[:, None] - torch.arange(S)).abs()
    for row in seen.rows:
        assert row.distance == pytest.approx(float((weights[row.head] * distance).sum(-1).mean()), abs=1e-4)


def test_an_empty_batch_adds_nothing() -> None:
    model = nn.MultiheadAttention(16, 2, batch_first=True)
    with locater.observe(model) as seen:
        model(*[torch.randn(1, 4, 16)] * 3)
        model(*[torch.randn(0, 4, 16)] * 3)
    assert seen.rows[0].rows == 4


def test_what_padding_holds_does_not_reach_the_outputs() -> None:
    q, output = torch.randn(1, 4, 6, 8), torch.randn(1, 6, 4, 8)
    padding = torch.ones(1, 6, dtype=torch.bool)
    padding[0, :2] = False
    grams = []
    for held in (0.0, torch.nan):
        site = locater.observe(llama(), outputs=True).sites[0]
        output[:, :2] = held
        site.receive(Call(q, q[:, ::2], Terms(1.0, causal=True, padding=padding), output))
        grams.append(site.gram)
    assert grams[0] is not None
    assert torch.equal(*grams)
    assert float(grams[0].abs().sum()) > 0


NUMBERS = (
    "entropy",
    "entropy_ratio",
    "max_probability",
    "row_mass",
    "participation",
    "distance",
    "self_mass",
    "sink",
    "rest_entropy",
)


def loud(dtype: torch.dtype, factor: float) -> Any:
    """A model whose second layer has logits beyond what half precision holds."""
    model = llama()
    with torch.no_grad():
        for part in (model.model.layers[1].self_attn.q_proj, model.model.layers[1].self_attn.k_proj):
            part.weight.mul_(factor)
    model.set_attn_implementation("eager")
    return model.to(dtype).eval()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("dtype", "factor"), [(torch.float16, 1e3), (torch.float16, 1e4), (torch.bfloat16, 1e20)])
def test_a_map_that_is_no_number_in_the_model_has_no_entropy(dtype: torch.dtype, factor: float, padded: bool) -> None:
    """Statistics are in float32, which does not overflow where float16 does: what acted is NaN, and not a one-hot
    row.
    """
    model, ids = loud(dtype, factor), tokens(2, 6)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0 if padded else 1
    with torch.no_grad(), locater.observe(model, rest=True, outputs=True, offsets=[1]) as seen:
        maps = model(ids, attention_mask=mask, output_attentions=True).attentions
    assert all(bool(held.isfinite().all()) for held in maps[:1])
    for row in seen.rows:
        whole = bool(maps[row.layer][:, row.head][mask.bool()].isfinite().all())
        assert ("nonfinite" in row.flags) == (not whole), row
        assert all((row[name] is None) == (not whole) for name in NUMBERS), row
        assert (row.offsets[1] is None) == (not whole)
    lost = [row for row in seen.rows if "nonfinite" in row.flags]
    assert lost
    assert not any(row.layer == 0 for row in lost)
    if dtype == torch.float16:  # of keys in view; a key out of sight spoils a row as well: inf - 65504 is inf
        assert all(row.max_logit is not None for row in lost)


def test_what_padding_holds_spoils_nothing() -> None:
    q, output = torch.randn(1, 4, 6, 8), torch.randn(1, 6, 4, 8)
    padding = torch.ones(1, 6, dtype=torch.bool)
    padding[0, :2] = False
    for row, spoiled in ((1, False), (2, True)):
        site = locater.observe(llama()).sites[0]
        made = output.clone()
        made[0, row, 3] = torch.inf
        site.receive(Call(q, q[:, ::2], Terms(1.0, causal=True, padding=padding), made))
        assert site.sums.isnan().any(1).tolist() == [False, False, False, spoiled]


@pytest.mark.parametrize(("factor", "lost"), [(1.0, False), (300.0, True)])
def test_heads_of_pytorchs_own_layers_too(factor: float, lost: bool) -> None:
    model = nn.MultiheadAttention(16, 2, batch_first=True).half().eval()
    with torch.no_grad():
        model.in_proj_weight[:32] *= factor
    x = 10 * torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(0)).half()
    with torch.no_grad(), locater.observe(model) as seen:
        out, _ = model(x, x, x)
    assert bool(out.isfinite().all()) != lost
    assert all((row.entropy is None) == ("nonfinite" in row.flags) == lost for row in seen.rows)
    assert all(row.max_logit is not None for row in seen.rows), "it says why"


def test_an_mlp_that_overflows_on_the_fast_path_is_no_fault_of_heads() -> None:
    """The fast path hands over the output of the whole layer, and attention is only a part of it."""
    block = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(block, 1, enable_nested_tensor=False).eval()
    with torch.no_grad():
        model.layers[0].linear2.weight.fill_(3e38)  # type: ignore[union-attr]
        with locater.observe(model) as seen:
            out = model(torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(0)))
    assert not bool(out.isfinite().all())
    assert all(row.entropy is not None and "nonfinite" not in row.flags for row in seen.rows)


def test_ranks_of_outputs_that_nobody_hands_over_are_not_known() -> None:
    with locater.observe(model := nn.MultiheadAttention(16, 2, batch_first=True), outputs=True) as seen:
        model(*[torch.randn(1, 4, 16)] * 3)
    for row in seen.rows:
        assert row.entropy is not None
        assert (row.output_stable_rank, row.output_effective_rank, row.output_singular_values) == (None, None, None)


# In a training run


def test_a_full_disk_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = llama().train()
    sink = JsonlSink(tmp_path / "run.jsonl")
    monitor = locater.Monitor(sink, every=1).attach(model)
    file = sink._file

    class Full:
        def write(self, line: Any) -> int:
            if len(line) > 40:
                return file.write(line[:40])  # some of it fits
            raise OSError(28, "No space left on device")

        def __getattr__(self, name: str) -> Any:
            return getattr(file, name)

    with caplog.at_level(logging.WARNING, "locater"):
        for step in range(5):
            sink._file = Full() if step in (1, 2) else file  # type: ignore[assignment]
            model(tokens(2, 6))
            monitor.after_step(loss=1.0)
    monitor.detach()
    assert [record["step"] for record in read_run(tmp_path / "run.jsonl").steps] == [1, 4, 5]
    assert sum("No space left" in record.message for record in caplog.records) == 1


def test_what_cannot_be_counted_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, original = llama().train(), accumulate.row_statistics

    def fails(*args: Any, **kw: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monitor = locater.Monitor(tmp_path / "run.jsonl", every=1).attach(model)
    with caplog.at_level(logging.WARNING, "locater"):
        for step in range(4):
            monkeypatch.setattr(accumulate, "row_statistics", fails if step in (1, 2) else original)
            model(tokens(2, 6))
            monitor.after_step()
    monitor.detach()
    held = [record["heads"]["entropy"][0][0] for record in read_run(tmp_path / "run.jsonl").steps]
    assert [x is None for x in held] == [False, True, True, False]
    assert sum("out of memory" in record.message for record in caplog.records) == 1
    monkeypatch.setattr(accumulate, "row_statistics", fails)
    # asked for by hand, it is told at once
    with pytest.raises(RuntimeError, match="out of memory"), locater.observe(model):
        model(tokens(2, 6))


def test_a_run_in_which_nothing_is_heard_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitor = locater.Monitor(tmp_path / "run.jsonl", every=1).attach(model := llama().eval())
    with caplog.at_level(logging.WARNING, "locater"):
        for _ in range(3):
            model(tokens(2, 6))
            monitor.after_step()
    monitor.detach()
    assert sum("not in training mode" in record.message for record in caplog.records) == 1


def test_parts_of_a_module_may_be_called_alone(tmp_path: Path) -> None:
    # as a LightningModule does: its training_step calls what it holds, never its own forward
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = llama()

    whole = Whole().train()
    monitor = locater.Monitor(tmp_path / "run.jsonl", every=2).attach(whole)
    assert monitor.observation is not None
    sums, calls = monitor.observation.sites[0].sums, []
    for _ in range(4):
        whole.inner(tokens(2, 6))
        whole.eval()
        whole.inner(tokens(2, 6))
        whole.train()
        calls.append(float(sums[0, 0]))
        monitor.after_step()
    monitor.detach()
    assert calls == [1, 0, 1, 0]


def test_losses_are_copied_and_must_be_numbers(tmp_path: Path) -> None:
    monitor = locater.Monitor(tmp_path / "run.jsonl", every=3).attach(llama().train())
    loss = torch.zeros(())
    for _ in range(4):
        monitor.after_step(loss=loss.add_(1))
    with pytest.raises(LocaterError, match=r"shape \[3\]"):
        monitor.after_step(loss=torch.ones(3))
    monitor.detach()
    assert read_run(tmp_path / "run.jsonl").losses == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_a_trainer_may_start_again_after_a_failure(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")

    class Fails(transformers.TrainerCallback):  # type: ignore[misc]
        steps = 0

        def on_step_end(self, *args: Any, **held: Any) -> None:
            self.steps += 1
            if self.steps == 2:
                raise RuntimeError("stop")

    model = llama()
    data = [{"input_ids": ids, "labels": ids} for ids in tokens(6, 8)]
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=2, num_train_epochs=1, report_to=[], use_cpu=True, disable_tqdm=True,
        save_strategy="no",
    )  # fmt: skip
    trainer = transformers.Trainer(model, args, train_dataset=data, callbacks=[locater.Monitor(every=1), Fails()])
    with pytest.raises(RuntimeError, match="stop"):
        trainer.train()
    trainer.train()
    assert not left_behind(model)
    assert [record["step"] for record in read_run(tmp_path / "locater.jsonl").steps] == [1, 2, 3]
