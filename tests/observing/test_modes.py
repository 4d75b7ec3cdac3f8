"""Observing in the ways models are really run: compiled, checkpointed, generating, in half precision, over ranks, now
and then.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from locater import LocaterError
from locater.observing import observe
from tests.families.decoders import GROUPED, SHAPE, make
from tests.parity import redraw, tokens
from tests.processes import ranks

BATCH = tokens()
ONE_LAYER = {"num_hidden_layers": 1}  # two are compiled in test_taps.py, and with the slow tests


def llama(**kw: Any) -> Any:
    model = make("Llama", **{**GROUPED, **kw})
    redraw(model)
    return model


def entropies(seen: Any) -> Tensor:
    return torch.tensor([row.entropy for row in seen.rows])


def plain(model: Any, **kw: Any) -> Tensor:
    with observe(model, **kw) as seen, torch.no_grad():
        model(**BATCH, use_cache=False)
    return entropies(seen)


# torch.compile


@pytest.fixture(autouse=True)
def _fresh_graphs() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
def test_compiled_graphs_stay_whole() -> None:
    """By the count of graphs. In the tests below a graph that breaks is an error, with checkpointing and without."""
    model = llama().train()
    with observe(model):
        found = torch._dynamo.explain(model)(**BATCH, labels=BATCH["input_ids"], use_cache=False)
    assert found.graph_break_count == 0
    assert found.graph_count == 1


@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.slow), True])
def test_compiled_training_is_counted_once_and_unchanged(checkpointing: bool) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    model = llama(**ONE_LAYER if checkpointing else {}).train()
    expected = plain(model)
    if checkpointing:
        model.gradient_checkpointing_enable()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=graphs, fullgraph=True)

    def step() -> tuple[float, list[Tensor]]:
        model.zero_grad()
        loss = compiled(**BATCH, labels=BATCH["input_ids"], use_cache=False).loss
        loss.backward()
        return float(loss.detach()), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    loss, grads = step()
    with observe(compiled, every=3) as seen:
        for _ in range(6):
            other, others = step()
            assert other == loss
            assert all(torch.equal(a, b) for a, b in zip(grads, others, strict=True))
    assert seen.rows[0].rows == 2 * int(BATCH["attention_mask"].sum())  # two of six steps
    torch.testing.assert_close(entropies(seen), expected, rtol=1e-5, atol=1e-5)
    assert graphs.frame_count <= 3  # never observed, observed, in between


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled_with_inductor_and_observed_again(whole: bool) -> None:
    """Kernels in C++ take a quarter of a minute from cold: the module of attention alone keeps PyTorch's own, in the graph
    that inductor makes.
    """
    from torch._inductor import config

    model: Any = llama().eval() if whole else nn.MultiheadAttention(16, 2, batch_first=True).eval()
    x = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0))
    inputs = dict(**BATCH, use_cache=False) if whole else dict(query=x, key=x, value=x, need_weights=False)
    with observe(model) as seen, torch.no_grad():
        model(**inputs)
    expected = entropies(seen)
    compiled = torch.compile(model)
    for _ in range(2):  # the second observation has other tensors to add to
        with config.patch(fallback_by_default=not whole), observe(compiled) as seen, torch.no_grad():
            compiled(**inputs)
        torch.testing.assert_close(entropies(seen), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("given", [pytest.param("inner", marks=pytest.mark.slow), "compiled"])
def test_a_monitor_follows_a_compiled_model(given: str, tmp_path: Path) -> None:
    """Trainers give the callback the model and run its compiled form; a loop by hand may give the compiled form
    itself.
    """
    from torch._dynamo.testing import CompileCounterWithBackend

    from locater import Monitor
    from locater.runs.record_sinks import read_run

    model = llama(**ONE_LAYER if given == "compiled" else {}).train()
    expected = plain(model)
    graphs = CompileCounterWithBackend("eager")  # what autograd makes of the graph is tested above
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    compiled(**BATCH, labels=BATCH["input_ids"], use_cache=False).loss.backward()
    monitor = Monitor(tmp_path / "run.jsonl", every=3).attach(model if given == "inner" else compiled)
    for _ in range(7):
        compiled(**BATCH, labels=BATCH["input_ids"], use_cache=False).loss.backward()
        monitor.after_step()
    monitor.detach()
    steps = read_run(tmp_path / "run.jsonl").steps
    assert [step["step"] for step in steps] == [1, 4, 7]
    for step in steps:
        torch.testing.assert_close(torch.tensor(step["heads"]["entropy"]).flatten(), expected, rtol=1e-5, atol=1e-5)
    assert graphs.frame_count <= 3


# Training


def test_a_copy_taken_meanwhile_is_not_observed() -> None:
    import copy

    model = llama().eval()
    with observe(model, hidden=True) as seen, torch.no_grad():
        twin = copy.deepcopy(model)
        a, b = model(**BATCH).logits, twin(**BATCH).logits
    assert torch.equal(a, b)
    assert seen.rows[0].rows == int(BATCH["attention_mask"].sum())
    assert torch.equal(twin(**BATCH).logits, a)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_counts_once(reentrant: bool) -> None:
    model = llama().train()
    expected = plain(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with observe(model) as seen:
        model(**BATCH, labels=BATCH["input_ids"], use_cache=False).loss.backward()
    assert seen.rows[0].rows == int(BATCH["attention_mask"].sum())
    torch.testing.assert_close(entropies(seen), expected)


def test_gradients_are_equal_to_the_bit() -> None:
    found = []
    for watched in (False, True):
        torch.manual_seed(3)
        model = llama(attention_dropout=0.3).train()
        if watched:
            with observe(model, rest=True, outputs=True, offsets=(1,)):
                model(**BATCH, labels=BATCH["input_ids"]).loss.backward()
        else:
            model(**BATCH, labels=BATCH["input_ids"]).loss.backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_autocast_keeps_statistics_in_float32() -> None:
    model = llama().eval()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        alone = model(**BATCH).logits
        with observe(model) as seen:
            watched = model(**BATCH).logits
    assert torch.equal(alone, watched)
    exact = plain(model)
    # what bfloat16 does to queries and keys; sums in bfloat16 would be worse
    assert (entropies(seen) - exact).abs().max() < 0.05
    assert all(row.row_mass == pytest.approx(1, abs=1e-6) for row in seen.rows)


def test_inference_mode() -> None:
    model = llama().eval()
    with torch.inference_mode(), observe(model) as seen:
        model(**BATCH, use_cache=False)
    torch.testing.assert_close(entropies(seen), plain(model))


# Generation


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_sees_what_one_pass_sees(cache: str) -> None:
    model = llama().eval()
    prompt = BATCH["input_ids"][:1]
    settings = dict(max_new_tokens=5, min_new_tokens=5, do_sample=False, pad_token_id=0)
    alone = model.generate(prompt, **settings, cache_implementation=cache)
    with observe(model, offsets=(1,)) as seen:
        made = model.generate(prompt, **settings, cache_implementation=cache)
    assert torch.equal(alone, made)
    with observe(model, offsets=(1,)) as whole, torch.no_grad():
        model(made[:, :-1])  # the last token was never fed
    for a, b in zip(seen.rows, whole.rows, strict=True):
        assert a.rows == b.rows == made.shape[1] - 1
        for column in ("entropy", "entropy_ratio", "max_logit", "sink", "distance", "self_mass", "participation"):
            assert a[column] == pytest.approx(b[column], rel=1e-4, abs=1e-5), column
        assert a.offsets[1] == pytest.approx(b.offsets[1], rel=1e-4, abs=1e-5)


def test_padded_generation() -> None:
    model = llama().eval()
    settings = dict(max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
    for cache in ("dynamic", "static"):
        alone = model.generate(**BATCH, **settings, cache_implementation=cache)
        with observe(model) as seen:
            made = model.generate(**BATCH, **settings, cache_implementation=cache)
        assert torch.equal(alone, made)
        assert seen.rows[0].rows == int(BATCH["attention_mask"].sum()) + 2 * 3  # two sequences, three tokens fed


# Over ranks


def half_of_the_batch(rank: int) -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(llama().train())
    half = {k: v[rank : rank + 1] for k, v in BATCH.items()}
    with observe(model.module) as seen:
        for _ in range(2):
            model(**half, labels=half["input_ids"]).loss.backward()
        seen.reduce()
    print(json.dumps([[r.rows, r.entropy, r.max_logit, r.sink] for r in seen.rows]), flush=True)


def test_ranks_add_up(tmp_path: Path) -> None:
    by_rank = [json.loads(text.splitlines()[-1]) for text in ranks(half_of_the_batch, tmp_path)]
    assert by_rank[0] == by_rank[1]
    with observe(llama()) as seen, torch.no_grad():
        seen.model(**BATCH)
    for (rows, entropy, top, sink), row in zip(by_rank[0], seen.rows, strict=True):
        assert rows == 2 * row.rows
        assert (entropy, top, sink) == pytest.approx((row.entropy, row.max_logit, row.sink), rel=1e-5)


# Samples


def test_every_third_pass() -> None:
    model = llama().eval()
    with observe(model, every=3, hidden=True) as seen, torch.no_grad():
        for _ in range(7):
            model(**BATCH)
    assert seen.rows[0].rows == 3 * int(BATCH["attention_mask"].sum())
    assert [row.sequences for row in seen.layers] == [6, 6, 6]


def test_a_sample_of_layers_and_heads_is_part_of_the_whole() -> None:
    model = llama().eval()
    with observe(model) as whole, torch.no_grad():
        model(**BATCH)
    with observe(model, layers=[1], heads=[0, 3]) as seen, torch.no_grad():
        model(**BATCH)
    assert [(row.layer, row.head, row.kv_head) for row in seen.rows] == [(1, 0, 0), (1, 3, 1)]
    everything = {(row.layer, row.head): row for row in whole.rows}
    for row in seen.rows:
        assert row.entropy == pytest.approx(everything[row.layer, row.head].entropy, rel=1e-6)
    with observe(model, heads=2) as seen, torch.no_grad():
        model(**BATCH)
    assert [row.head for row in seen.rows] == [1, 3, 1, 3]


def test_sampled_rows_estimate_and_say_so() -> None:
    model = make("Llama", **{**GROUPED, "max_position_embeddings": 256}).eval()
    redraw(model)
    ids = torch.randint(3, 64, (2, 200), generator=torch.Generator().manual_seed(0))
    with observe(model, rest=True, offsets=(1,)) as whole, torch.no_grad():
        model(ids)
    with observe(model, rows=200, rest=True, offsets=(1,)) as all_rows, torch.no_grad():
        model(ids)
    with observe(model, rows=40, rest=True, offsets=(1,)) as seen, torch.no_grad():
        model(ids)
    for a, b, c in zip(whole.rows, all_rows.rows, seen.rows, strict=True):
        assert a.entropy == b.entropy
        assert (a.how, c.how) == ("exact", "sampled")
        assert c.rows == 80
        for column in ("entropy", "entropy_ratio", "distance", "sink", "self_mass", "rest_entropy"):
            assert c[column] == pytest.approx(a[column], rel=0.25, abs=0.05), column
        assert c.offsets[1] == pytest.approx(a.offsets[1], abs=0.05)


# Order and disorder


def test_two_models_of_one_config_and_two_observations() -> None:
    model, other = llama().eval(), llama().eval()
    other.config = model.config
    with observe(model) as outer, torch.no_grad():
        model(**BATCH)
        with observe(model) as inner:
            model(**BATCH)
            other(**BATCH)
    assert outer.rows[0].rows == 2 * inner.rows[0].rows
    torch.testing.assert_close(entropies(outer), entropies(inner))


def test_everything_is_restored_after_an_exception() -> None:
    from transformers.modeling_utils import AttentionInterface

    before = dict(AttentionInterface._global_mapping)
    model = llama().eval()
    implementation = model.config._attn_implementation

    def fail() -> None:
        with observe(model):
            assert before != AttentionInterface._global_mapping
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert before == AttentionInterface._global_mapping
    assert model.config._attn_implementation == implementation
    assert not any("locater" in name for module in model.modules() for name in vars(module))
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_nothing_intercepted_is_an_error() -> None:
    class Hidden(nn.Module):
        """Runs a model's layers without its attention function."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = llama()
            self.config = self.inner.config

        def forward(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(LocaterError, match="nothing was observed"), observe(Hidden()) as seen:
        seen.model(torch.zeros(1))
    with observe(llama()) as seen:
        pass
    with pytest.raises(LocaterError, match="was not run inside the block"):
        _ = seen.rows


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (dict(every=0), "every=0"),
        (dict(rows=0), "rows=0"),
        (dict(layers=[7]), "there are 2, numbered from 0"),
        (dict(heads=0), "heads=0"),
        (dict(heads=[]), "there are 4"),
    ],
)
def test_bad_choices_are_named(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(LocaterError, match=said):
        observe(llama(), **wrong)


def test_overflow_is_flagged_and_not_averaged() -> None:
    model = llama().eval()
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[:8] = torch.nan  # head 0 of layer 1
        with observe(model) as seen:
            model(**BATCH)
    assert "nonfinite" in seen.rows[4].flags
    assert seen.rows[4].entropy is None
    assert "nonfinite" not in seen.rows[0].flags


def test_window_models_count_the_first_key_only_where_it_is_in_sight() -> None:
    model = make("Mistral", **GROUPED, sliding_window=4).eval()
    redraw(model)
    ids = {"input_ids": torch.randint(3, 64, (1, 12), generator=torch.Generator().manual_seed(0))}
    with observe(model) as seen, torch.no_grad():
        model(**ids)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = model(**ids, output_attentions=True).attentions
    for row in seen.rows:
        assert row.sink == pytest.approx(float(maps[row.layer][0, row.head, :4, 0].mean()), rel=1e-4)


assert SHAPE["num_hidden_layers"] == 2  # the numbers above rely on it


# what a call of attention may be asked for


class Asking(nn.Module):
    """Four heads on `memories` heads of keys, by PyTorch's function or written out."""

    def __init__(self, memories: int = 4, written: bool = False, repeated: str = "", **asked: Any) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 4 * heads) for heads in (4, memories, memories))
        self.written, self.repeated, self.asked = written, repeated, asked

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.query, self.key, self.value))
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        times = 4 // k.shape[1]
        if self.repeated == "copied":
            k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        if self.repeated == "expanded":
            k, v = (one[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2) for one in (k, v))
        if not self.written:
            return nn.functional.scaled_dot_product_attention(q, k, v, **self.asked)
        weights = (q @ k.mT * self.asked.get("scale", 0.5)).softmax(-1)
        return nn.functional.dropout(weights, self.asked.get("dropout_p", 0.0), self.training) @ v


@pytest.mark.parametrize(
    ("memories", "asked"),
    [
        *((4, {**asked, "written": written}) for asked in ({"dropout_p": 0.3}, {"scale": 0.0}) for written in (True, False)),
        (4, {"scale": -0.7}),
        *((memories, {"repeated": how, "is_causal": True}) for memories in (1, 2) for how in ("copied", "expanded")),
        (2, {"enable_gqa": True}),
    ],
)  # fmt: skip
def test_a_call_may_ask_for_anything(memories: int, asked: dict[str, Any]) -> None:
    """Entropy and the largest logit of each head are those of the logits in float64, before dropout."""
    model, x = Asking(memories, **asked).train(), torch.randn(2, 9, 16)
    with observe(model) as seen:
        model(x)
    q, k, _ = (part.double() for part in model.split(x))
    logits = q @ k.repeat_interleave(4 // memories, 1).mT * asked.get("scale", 0.5)
    if asked.get("is_causal"):
        logits = logits.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    weights = logits.softmax(-1)
    entropy = torch.special.entr(weights).sum(-1).mean((0, 2))
    assert [row.entropy for row in seen.rows] == pytest.approx(entropy.tolist(), abs=1e-6)
    assert [row.max_logit for row in seen.rows] == pytest.approx(logits.amax((0, 2, 3)).tolist(), abs=1e-6)


def test_nested_tensors_are_refused_by_their_name() -> None:
    x = torch.nested.nested_tensor([torch.randn(5, 16), torch.randn(9, 16)], layout=torch.jagged)
    with pytest.raises(LocaterError, match="its queries are a nested tensor: pad them"), observe(model := Asking()):
        model(x)
