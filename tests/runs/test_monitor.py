"""The monitor in a loop of one's own, in transformers' Trainer and in Lightning: what it logs, when it warns, what it
leaves alone.
"""

from __future__ import annotations

import copy
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import locater
from locater import LocaterError, Monitor
from locater.calls.call_and_masks import Call
from locater.discovery import attention_layers, replayed_maps
from locater.findings import OF_FLAGS, Remedy, parse_conditions
from locater.kernels import Terms
from locater.layers import effective
from locater.observing import accumulate, observe
from locater.runs import head_table
from locater.runs.record_sinks import read_run
from locater.runs.run_monitor import controls_that_fit, warning_line
from tests.control.test_distributed import batch, shard
from tests.control.test_distributed import model_of as gemma
from tests.families import CASES
from tests.families.decoders import GROUPED, make
from tests.parity import model_of, redraw, tokens
from tests.processes import ranks

BATCH = tokens()


def llama(**changed: Any) -> Any:
    """Without a cache, which lays keys out otherwise in memory: checkpointing leaves it out, and sums round otherwise."""
    model = make("Llama", **{**GROUPED, "use_cache": False, **changed})
    redraw(model, 0.3)
    return model


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def train(model: Any, monitor: Monitor, steps: int, rate: float = 1e-3, evaluate: bool = False) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    model.train()
    for _ in range(steps):
        loss = model(**BATCH, labels=BATCH["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if evaluate:
            model.eval()
            with torch.no_grad():
                model(input_ids=BATCH["input_ids"])
            model.train()
        monitor.after_step(loss=loss)


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    model = llama()
    with observe(model) as seen, torch.no_grad():
        model(**BATCH)
    monitor = Monitor(tmp_path / "run.jsonl", every=4).attach(model)
    train(model, monitor, 10)
    monitor.detach()
    monitor.detach()
    run = read_run(tmp_path / "run.jsonl")
    assert run.ended
    assert [step["step"] for step in run.steps] == [1, 5, 9]
    assert [layer["name"] for layer in run.header["layers"]] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    found = run.steps[0]["heads"]  # before any update
    assert found["entropy"][1][2] == pytest.approx(seen.rows[6].entropy, rel=1e-6)
    assert found["spread"][0][0] > 0
    assert all(step["loss"] > 0 for step in run.steps)
    assert sorted(x["step"] for x in records(tmp_path / "run.jsonl") if x["kind"] == "loss") == [2, 3, 4, 6, 7, 8, 10]
    assert not any("locater" in name for module in model.modules() for name in vars(module))


def test_measuring_imports_nothing_that_controls() -> None:
    """Controls stand on what is measured, and not the other way round."""
    root = Path(head_table.__file__).parents[1]
    for path in (*(root / "monitor").glob("*.py"), *(root / "observing").rglob("*.py")):
        found = [
            line
            for line in path.read_text().splitlines()
            if re.match(r"\s*(from|import) locater\.(control|integrations)\b", line)
        ]
        assert found == [], path


def test_training_is_not_changed(tmp_path: Path) -> None:
    found = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = llama()
        monitor: Any = Monitor(tmp_path / "run.jsonl", every=2).attach(model) if watched else _Deaf()
        train(model, monitor, 5)
        monitor.detach()
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class _Deaf:
    def after_step(self, **_: Any) -> None:
        return

    def detach(self) -> None:
        return


def test_evaluation_between_steps_is_not_part_of_them(tmp_path: Path) -> None:
    alone, between = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for path, evaluate in ((alone, False), (between, True)):
        torch.manual_seed(0)
        monitor = Monitor(path, every=1).attach(llama())
        train(monitor.observation.model, monitor, 3, evaluate=evaluate)  # type: ignore[union-attr]
        monitor.detach()
    assert [x["heads"] for x in read_run(alone).steps] == [x["heads"] for x in read_run(between).steps]


# Passes that are not of the loss


def plain_gpt() -> Any:
    """A model without a record: its layers are found by their calls."""
    torch.manual_seed(0)
    return PlainGPT()


class PlainBlock(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(32)
        self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)
        torch.nn.init.normal_(self.qkv.weight, std=0.6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class PlainGPT(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64)
        self.blocks = torch.nn.ModuleList([PlainBlock(), PlainBlock()])
        self.reentrant: bool | None = None  # how it is checkpointed, if it is

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, bool]) -> None:
        self.reentrant = gradient_checkpointing_kwargs["use_reentrant"]

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **_: Any) -> Any:
        x = self.embed(input_ids)
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.reentrant)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), input_ids.flatten())


def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    out = model(**batch, labels=batch["input_ids"])
    return out if isinstance(out, Tensor) else out.loss


OTHERS = {name: x.flip(-1) for name, x in BATCH.items()}  # what other passes read


def first_step(path: Path, model: Any, run: Any, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The heads of an observed step in the log, and its record."""
    monitor = Monitor(path, every=1, spectrum=False, **options).attach(model)
    run()
    monitor.after_step()
    monitor.detach()
    (step,) = read_run(path).steps
    return step["heads"], step


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("built", [llama, plain_gpt])
def test_passes_without_gradients_are_left_out(tmp_path: Path, built: Any, reentrant: bool | None) -> None:
    """A reference, a rollout or an evaluation in training mode; with each kind of gradient checkpointing."""
    alone, _ = first_step(tmp_path / "alone.jsonl", model := built().train(), lambda: loss_of(model, BATCH).backward())
    model = built().train()
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        getattr(model, "embed", None) or model.enable_input_require_grads()

    def passes() -> None:
        with torch.no_grad():
            loss_of(model, OTHERS)
        loss_of(model, BATCH).backward()
        with torch.inference_mode():
            loss_of(model, OTHERS)

    found, step = first_step(tmp_path / "between.jsonl", model, passes)
    assert step["passes_left_out"] == 2
    assert found == alone
    every, step = first_step(tmp_path / "all.jsonl", model, passes, passes="all")
    assert "passes_left_out" not in step
    assert every != alone


class Wrapped(torch.nn.Module):
    """As in Lightning: the trainer calls `training_step`, and not `forward`."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.inner = model

    def training_step(self, batch: Any) -> Tensor:
        return loss_of(self.inner, batch)


@pytest.mark.parametrize("built", [llama, plain_gpt])
def test_a_part_of_the_module_may_be_what_runs(tmp_path: Path, built: Any) -> None:
    alone, _ = first_step(tmp_path / "alone.jsonl", inner := built().train(), lambda: loss_of(inner, BATCH).backward())
    model = Wrapped(built()).train()
    model.inner.gradient_checkpointing_enable({"use_reentrant": True})
    if built is llama:
        model.inner.enable_input_require_grads()

    def passes() -> None:
        with torch.no_grad():
            model.training_step(OTHERS)
        model.training_step(BATCH).backward()

    found, step = first_step(tmp_path / "wrapped.jsonl", model, passes)
    assert (found, step["passes_left_out"]) == (alone, 1)


def test_an_adapter_that_generates_is_not_counted(tmp_path: Path) -> None:
    """generate() calls the model inside of the adapter."""
    peft = pytest.importorskip("peft")

    def built() -> Any:
        torch.manual_seed(0)
        return peft.get_peft_model(
            llama(), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        ).train()

    alone, _ = first_step(tmp_path / "alone.jsonl", model := built(), lambda: loss_of(model, BATCH).backward())

    def passes() -> None:
        with torch.no_grad():
            model.generate(OTHERS["input_ids"], max_new_tokens=3, do_sample=False, pad_token_id=0)
            with model.disable_adapter():
                loss_of(model, OTHERS)
        loss_of(model, BATCH).backward()

    model = built()
    found, step = first_step(tmp_path / "generates.jsonl", model, passes)
    assert (found, step["passes_left_out"]) == (alone, 4)


@pytest.mark.parametrize("when", ["before", "after", "in place"])
def test_a_compiled_model_counts_the_passes_of_its_loss(tmp_path: Path, when: str) -> None:
    one = {"num_hidden_layers": 1}
    model = llama(**one).train()
    alone, _ = first_step(tmp_path / "alone.jsonl", model, lambda: loss_of(model, BATCH).backward())
    torch._dynamo.reset()
    model = llama(**one).train()
    watched = compiled = torch.compile(model, backend="aot_eager")
    if when == "after":
        watched = model
    elif when == "in place":
        model.compile(backend="aot_eager")
        watched = compiled = model

    def passes() -> None:
        for _ in range(2):
            with torch.no_grad():
                loss_of(compiled, OTHERS)
        loss_of(compiled, BATCH).backward()

    found, step = first_step(tmp_path / "compiled.jsonl", watched, passes)
    torch._dynamo.reset()
    for name in alone:
        torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(alone[name]), rtol=1e-5, atol=1e-6)
    # inside of a graph passes are not numbered
    assert step.get("passes_left_out") == (None if when == "after" else 2)


def test_a_part_without_gradients_is_of_the_pass_around_it(tmp_path: Path) -> None:
    """A frozen half of the model that is run under no_grad; and a pass that ends in an error changes nothing."""
    model = plain_gpt().train()
    first = model.blocks[0]

    def frozen(x: Tensor) -> Tensor:
        with torch.no_grad():
            return PlainBlock.forward(first, x)

    alone, _ = first_step(tmp_path / "alone.jsonl", model, lambda: loss_of(model, BATCH).backward())
    first.forward = frozen

    def passes() -> None:
        with pytest.raises(IndexError), torch.no_grad():
            model(BATCH["input_ids"] + 1000)
        loss_of(model, BATCH).backward()

    assert first_step(tmp_path / "half.jsonl", model, passes)[0] == alone


def test_a_step_without_gradients_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = llama().train()

    def passes() -> None:
        with torch.no_grad():
            loss_of(model, BATCH)

    found, step = first_step(tmp_path / "run.jsonl", model, passes)
    assert step["passes_left_out"] == 1
    assert {x for layer in found["entropy"] for x in layer} == {None}
    assert "no pass had gradients, so none is counted (1 without)" in caplog.text
    assert 'Monitor(passes="all")' in caplog.text
    with pytest.raises(LocaterError, match="passes='none': choose loss or all"):
        Monitor(passes="none")  # type: ignore[arg-type]


def watch_in_two_processes(rank: int, folder: Path) -> None:
    """DistributedDataParallel around the model, before and after attaching, with a reference pass between."""
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    heads = []
    for name, around, reference in (("plain", False, False), ("outside", True, True), ("inside", False, True)):
        model = llama().train()
        parallel = DistributedDataParallel(model)
        monitor = Monitor(folder / f"{name}.jsonl", every=1).attach(parallel if around else model)
        if reference:
            with torch.no_grad():
                loss_of(parallel, OTHERS)
        loss_of(parallel, {key: x.roll(rank, 0) for key, x in BATCH.items()}).backward()
        monitor.after_step()
        monitor.detach()
        if rank == 0:
            heads.append(read_run(folder / f"{name}.jsonl").steps[0]["heads"])
    if rank == 0:
        assert heads[0] == heads[1] == heads[2]
        print("compared", flush=True)


def test_parallel_processes_count_the_passes_of_the_loss(tmp_path: Path) -> None:
    first, _ = ranks(lambda rank: watch_in_two_processes(rank, tmp_path), tmp_path)
    assert "compared" in first


def test_a_fault_is_reported_by_the_monitor_of_its_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of two models that run in turn, one has more heads in a call than its record says."""
    sound, faulty = llama().train(), llama().train()
    both = [Monitor(tmp_path / f"{at}.jsonl", every=1).attach(model) for at, model in enumerate((sound, faulty))]
    for site in both[1].observation.sites:  # type: ignore[union-attr]
        site.count += 1
    for model in (faulty, sound):
        loss_of(model, BATCH)
    told = []
    for monitor in both:
        caplog.clear()
        monitor.after_step()
        told.append([record.getMessage() for record in caplog.records if "left out" in record.getMessage()])
        monitor.detach()
    assert told[0] == []
    assert len(told[1]) == 1
    assert "4 query heads arrived, and 5 of 5 were expected" in told[1][0]


@pytest.mark.gpu
def test_unobserved_steps_do_not_wait_for_the_device(tmp_path: Path) -> None:
    """Their losses reach the log all the same, as soon as the device has them."""
    model = llama().cuda()
    monitor = Monitor(tmp_path / "run.jsonl", every=100).attach(model.train())
    model(**{name: x.cuda() for name, x in BATCH.items()})
    monitor.after_step(loss=torch.ones((), device="cuda"))  # observed
    loss = torch.ones((), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            torch.cuda._sleep(200_000_000)  # about 0.1 s each
            monitor.after_step(loss=loss.add_(1))
        written = len(records(tmp_path / "run.jsonl"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    monitor.after_step(loss=loss.add_(1))
    torch.cuda.synchronize()
    monitor.after_step(loss=loss.add_(1))
    held = [(x["step"], x["loss"]) for x in records(tmp_path / "run.jsonl") if x["kind"] == "loss"]
    monitor.detach()
    assert written < 7  # the device was still busy with the first of them
    # copied in time: the loop has written over the tensor
    assert held[:6] == [(step, float(step)) for step in range(2, 8)]


def test_unobserved_steps_compute_nothing(tmp_path: Path) -> None:
    monitor = Monitor(tmp_path / "run.jsonl", every=3).attach(model := llama())
    train(model, monitor, 1)  # observed
    loss = torch.tensor(1.0)
    with Counted() as seen:
        monitor.after_step(loss=loss)
    assert seen.count <= 1  # the number is read, which waits for nothing on the CPU
    assert records(tmp_path / "run.jsonl")[-1] == {"kind": "loss", "step": 2, "loss": 1.0}
    monitor.detach()


class Counted(TorchDispatchMode):
    """How many operations reach the device: views do not."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (func.is_view or func is torch.ops.aten.detach.default)
        return func(*args, **(kwargs or {}))


def after_step_of(layers: int, folder: Path) -> tuple[int, list[str]]:
    """Operations of an observed step's end, and what was read from tensors meanwhile."""
    model = make("Llama", **{**GROUPED, "num_hidden_layers": layers}).train()
    monitor = Monitor(folder / f"{layers}.jsonl", every=1).attach(model)
    reads: list[str] = []
    for _ in range(2):
        model(**BATCH)
        with Counted() as seen, pytest.MonkeyPatch.context() as patch:
            for name in ("item", "tolist", "__float__", "cpu"):
                original = getattr(Tensor, name)
                patch.setattr(
                    Tensor, name, lambda self, *a, _o=original, _n=name, **k: (reads.append(_n), _o(self, *a, **k))[1]
                )
            monitor.after_step(loss=torch.tensor(1.0), other=torch.tensor(2.0, dtype=torch.bfloat16))
    monitor.detach()
    return seen.count, reads


def test_an_observed_step_ends_in_few_operations_and_one_read(tmp_path: Path) -> None:
    few, reads = after_step_of(2, tmp_path)
    many, _ = after_step_of(6, tmp_path)
    assert reads == ["tolist"] * 2  # in two steps
    assert few <= 50
    assert many == few


def test_a_call_is_counted_in_few_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(2, 4, 6, 8)
    found = accumulate.row_statistics(q, q, Terms(causal=True))
    monkeypatch.setattr(accumulate, "row_statistics", lambda *args, **kw: found)
    for padding, most in ((None, 22), (torch.ones(2, 6, dtype=torch.bool), 70)):
        with Counted() as seen:
            counted(q, q, padding=padding)
        assert seen.count <= most


def counted(q: Tensor, k: Tensor, causal: bool = True, **more: Any) -> tuple[Tensor, Tensor]:
    """Sums and maxima of one call."""
    sums, maxima = (
        torch.zeros(q.shape[1], len(accumulate.COLUMNS), dtype=torch.float64),
        torch.full((q.shape[1], 1), -torch.inf),
    )
    pairs = torch.zeros(q.shape[1], 0, 2, dtype=torch.float64)
    call = Call(q, k, Terms(0.4, causal, **more))
    into = accumulate.Accumulators(sums, maxima, pairs, None)
    accumulate.add_call(call, into, accumulate.StatisticsOptions(), own=True, heads=None)
    return sums, maxima


MORE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "its own key alone": {"window": 1},
    "window": {"window": 3},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi": torch.tensor([0.1, 0.2, 0.4, 0.8])},
    "sinks": {"sinks": torch.tensor([-1.0, 0.0, 1.0, 2.0])},
}


@pytest.mark.parametrize("stacked", [1, 1 << 25])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("queries", [6, 4, 1])
@pytest.mark.parametrize("more", list(MORE))
def test_a_call_without_masks_is_counted_as_one_with_empty_masks(
    stacked: int, causal: bool, queries: int, more: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(queries)
    q, k = torch.randn(3, 4, queries, 8, generator=generator), torch.randn(3, 2, 6, 8, generator=generator)
    short = counted(q, k, causal, **MORE[more])
    monkeypatch.setattr(accumulate, "STACKED", stacked)
    long = counted(q, k, causal, padding=torch.ones(3, 6, dtype=torch.bool), **MORE[more])
    torch.testing.assert_close(short, long, rtol=1e-5, atol=1e-5)


# M and spread


@pytest.mark.parametrize("stacked", [1, 1 << 26])
@pytest.mark.parametrize(
    "label", ["gpt2", "gemma3", "llama", "whisper", "bart", "deepseek_v3", "albert", "torch-transformer-post"]
)
def test_layers_folded_together_are_those_folded_apart(
    label: str, stacked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replayed_maps, "STACKED", stacked)
    model = model_of(next(case for case in CASES if case.label == label)).float()
    count = len(list(attention_layers(model)))
    stacks = replayed_maps.FoldedStacks(model, range(count))
    assert sorted(layer for stack in stacks.stacks for layer in stack.layers) == list(range(count))
    if stacked == 1:
        assert all(len(stack.layers) == 1 for stack in stacks.stacks)
    for _ in range(2):
        with torch.no_grad():
            layers = [effective(layer) for layer in attention_layers(model)]
        for part in stacks.spectra():
            for at, number in enumerate(part.layers):
                apart = replayed_maps.spectra_of(number, layers[number])
                assert apart.scales == [part.scales[at]]
                assert (part.trace is None) == (apart.trace is None) == layers[number].cross
                for a, b in zip(part.tensors, apart.tensors, strict=True):
                    torch.testing.assert_close(a[at], b[0].detach(), rtol=1e-5, atol=1e-5)
        with torch.no_grad():  # weights move on, gains too
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)


def test_layers_of_one_shape_are_one_stack() -> None:
    case = next(case for case in CASES if case.label == "bart")
    found = [stack.layers for stack in replayed_maps.FoldedStacks(model_of(case), range(6)).stacks]
    assert found == [[0, 1], [2, 4], [3, 5]]  # encoder; decoder, itself; decoder, memory


@pytest.mark.parametrize("label", ["llama", "deepseek_v3"])
def test_models_alike_share_what_was_recorded_and_no_numbers(label: str) -> None:
    case = next(case for case in CASES if case.label == label)
    with torch.inference_mode():  # constants made in this mode are not for training
        others = [replayed_maps.FoldedStacks(model_of(case), range(2))]
    first, second = model_of(case), model_of(case)
    redraw(second, 0.5, seed=1)
    both = [replayed_maps.FoldedStacks(model, range(2)) for model in (first, second)]
    assert [stack.fold for stack in both[0].stacks] == [stack.fold for stack in both[1].stacks]
    others.append(replayed_maps.FoldedStacks(model_of(case).float(), range(2)))
    assert not {stack.fold for other in others for stack in other.stacks} & {stack.fold for stack in both[0].stacks}
    for model, stacks in zip((first, second), both, strict=True):
        layers = list(attention_layers(model))
        for part, (query, _, _) in zip(stacks.stacks, stacks.maps(), strict=True):
            query.sum().backward()
            for at, number in enumerate(part.layers):
                torch.testing.assert_close(query[at], effective(layers[number]).query)
    moved = [sum(p.grad is not None for p in model.parameters()) for model in (first, second)]
    assert moved[0] == moved[1] > 0


def spectrum_of(model: Any, path: Path, meanwhile: Any = None) -> list[Any]:
    watch = Monitor(path, every=1).attach(model)
    model = model if meanwhile is None else meanwhile(model)
    model.train()
    watch.observation.model.train()  # type: ignore[union-attr]
    model(**BATCH)
    watch.after_step()
    watch.detach()
    return [read_run(path).steps[0]["heads"][name] for name in ("M", "spread")]


def test_what_cannot_be_recorded_is_read_layer_by_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And said so once, whether a monitor or a control reads it."""
    together = spectrum_of(llama(), tmp_path / "a.jsonl")

    def fails(*args: Any, **kw: Any) -> None:
        raise RuntimeError("not recorded")

    for when in ("at first", "after a change"):
        caplog.clear()
        model = llama()
        with monkeypatch.context() as patch:

            def stop_recording(model: Any) -> Any:
                patch.setattr(replayed_maps, "make_fx", fails)
                return model

            def replace_part(model: Any) -> Any:
                attention = model.model.layers[0].self_attn
                attention.q_proj = copy.deepcopy(attention.q_proj)
                return stop_recording(model)

            if when == "at first":
                stop_recording(model)
            apart = spectrum_of(model, tmp_path / f"{when}.jsonl", None if when == "at first" else replace_part)
            locater.LocAteR().attach(model).loss()
        assert [line for line in messages(caplog) if "layer by layer" in line] == [
            "the maps of LlamaForCausalLM are re-read layer by layer at each step, which is slower: they cannot be "
            "recorded (RuntimeError: not recorded)"
        ]
        for a, b in zip(together, apart, strict=True):
            torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=1e-5, atol=1e-6)


def test_adapters_and_parametrizations_that_come_later_count(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted(model: Any) -> Any:
        found = peft.get_peft_model(
            model, peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
        )
        _expect(model, wanted)
        return found

    def doubled(model: Any) -> Any:
        class Double(torch.nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return 2 * x

        torch.nn.utils.parametrize.register_parametrization(model.model.layers[1].self_attn.k_proj, "weight", Double())
        _expect(model, wanted)
        return model

    for name, change in (("adapted", adapted), ("doubled", doubled)):
        wanted: list[list[float]] = []
        M, _ = spectrum_of(llama(), tmp_path / f"{name}.jsonl", change)
        torch.testing.assert_close(torch.tensor(M), torch.tensor(wanted), rtol=1e-4, atol=1e-5)


def of_maps(query: Tensor, key: Tensor, scale: float, term: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """M and spread (H,) of maps (H, h, d) in float64, and of what the key alone adds (H, d)."""
    W = query.double().mT @ key.double() * scale
    more = 0 if term is None else (scale * term.double()).square().sum(-1)
    return W.diagonal(dim1=-2, dim2=-1).sum(-1), (W.square().sum((-2, -1)) + more).sqrt()


def llama_maps(model: Any) -> list[tuple[Tensor, Tensor]]:
    """Queries and keys of each head, behind the gain of the norm in front, as their modules compute them now."""
    maps = []
    for layer in model.model.layers:
        attention, gain = layer.self_attn, layer.input_layernorm.weight
        q, k = (
            (part.weight * gain).detach().unflatten(0, (-1, attention.head_dim))
            for part in (attention.q_proj, attention.k_proj)
        )
        maps.append((q, k.repeat_interleave(attention.num_key_value_groups, 0)))
    return maps


def heads_of(step: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return torch.tensor(step["heads"]["M"]), torch.tensor(step["heads"]["spread"])


def sigma_reparam(model: Any) -> None:
    locater.SigmaReparam(gamma=1.0).attach(model)


def spectral_norm(model: Any) -> None:
    for layer in model.model.layers:
        torch.nn.utils.parametrizations.spectral_norm(layer.self_attn.q_proj)


@pytest.mark.parametrize("parametrize", [sigma_reparam, spectral_norm])
def test_maps_are_those_of_the_next_pass(tmp_path: Path, parametrize: Any) -> None:
    """Their norm is one step of power iteration behind the weights; and asking does not take that step."""

    def run(watched: bool) -> tuple[list[list[tuple[Tensor, Tensor]]], list[Tensor]]:
        torch.manual_seed(0)
        model = llama().train()
        parametrize(model)
        monitor: Any = Monitor(tmp_path / "run.jsonl", every=1, warn_on="").attach(model) if watched else _Deaf()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
        found: list[list[tuple[Tensor, Tensor]]] = []
        model.model.norm.register_forward_hook(lambda *_: found.append(in_this_pass(model)))
        for _ in range(4):
            loss_of(model, BATCH).backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.after_step()
        monitor.detach()
        return found, [x.clone() for x in model.state_dict().values()]

    (passes, end), (_, alone) = run(True), run(False)
    assert all(torch.equal(a, b) for a, b in zip(end, alone, strict=True))
    for step, maps in zip(read_run(tmp_path / "run.jsonl").steps, passes[1:], strict=False):
        expected = [of_maps(q, k, 8**-0.5) for q, k in maps]
        for logged, wanted in zip(heads_of(step), zip(*expected, strict=True), strict=True):
            torch.testing.assert_close(logged, torch.stack(wanted).float(), rtol=1e-4, atol=1e-5)


def in_this_pass(model: Any) -> list[tuple[Tensor, Tensor]]:
    """Without the step that torch's spectral norm takes whenever its weight is asked for in training mode."""
    lists = [x for x in model.modules() if isinstance(x, torch.nn.utils.parametrize.ParametrizationList)]
    for part in lists:
        part.eval()
    try:
        return llama_maps(model)
    finally:
        for part in lists:
            part.train()


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_maps_are_those_under_controls_of_the_forward_pass(tmp_path: Path, family: str) -> None:
    """A temperature divides logits, and a norm on queries and keys bounds them; whichever comes after `attach`."""
    model = make(family, **{**GROUPED, "head_dim": 8})
    redraw(model, 0.3)
    monitor = Monitor(tmp_path / "run.jsonl", every=1).attach(model.train())

    def step() -> None:
        model(**BATCH)
        monitor.after_step()

    step()
    temperature = locater.Temperature(init=4.0).attach(model)
    with torch.no_grad():
        temperature.parameters()[0][1] = 0.0  # the head 0.1 is left as it is
    step()
    norm = locater.QKNorm(init=1.5).attach(model)
    step()
    norm.detach()
    temperature.detach()
    step()
    monitor.detach()
    plain, warm, both, after = (heads_of(record) for record in read_run(tmp_path / "run.jsonl").steps)
    share = torch.full((2, 4), 4.0)
    share[0, 1] = 1
    expected = []
    for number, (q, k) in enumerate(llama_maps(model)):
        if family == "Qwen3":  # its own norms come before that of the control
            attention = model.model.layers[number].self_attn
            q, k = unit(q) * attention.q_norm.weight[:, None], unit(k) * attention.k_norm.weight[:, None]
        expected.append(of_maps(1.5 * unit(q), 1.5 * unit(k), 8**-0.5))
    for before, under, normed, end, wanted in zip(plain, warm, both, after, zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(under, before / share)
        torch.testing.assert_close(normed, torch.stack(wanted).float() / share, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(end, before)


def unit(maps: Tensor) -> Tensor:
    """Divided by the root mean square of what they give for unit tokens."""
    return maps / (maps.square().sum((-2, -1), keepdim=True) / maps.shape[-2]).sqrt()


def _expect(model: Any, into: list[list[float]]) -> None:
    with torch.no_grad():
        maps = [effective(layer) for layer in attention_layers(model)]
        into[:] = [(x.scale * x.moments().trace).tolist() for x in maps]


def maps_by_hand(model: Any) -> tuple[list[list[float]], list[list[float]]]:
    """M and spread of a plain GPT's heads, in float64 from its weights alone: tokens z of unit size in every direction
    pass the gain and the bias of a LayerNorm, which has taken out their mean.
    """
    M, spread = [], []
    for block in model.blocks:
        gain, shift = block.norm.weight.double(), block.norm.bias.double()
        centred = torch.diag(gain) @ (torch.eye(32) - 1 / 32).double()
        weight, bias = block.qkv.weight.double(), block.qkv.bias.double()
        q, k = (weight[at : at + 32].unflatten(0, (4, 8)) for at in (0, 32))
        W = (q @ centred).mT @ (k @ centred) / 8**0.5  # (H, d, d)
        shifted = (q @ shift) + bias[:32].unflatten(0, (4, 8))  # the constant part of a query
        term = (shifted[:, None] @ (k @ centred))[:, 0] / 8**0.5
        M.append(W.diagonal(dim1=-2, dim2=-1).sum(-1).tolist())
        spread.append((W.square().sum((-2, -1)) + term.square().sum(-1)).sqrt().tolist())
    return M, spread


def trained_gpt() -> Any:
    """With gains and biases that are not 1 and 0, dropout, and a norm over the batch."""
    model = plain_gpt()
    for block in model.blocks:
        torch.nn.init.uniform_(block.norm.weight, 0.5, 2)
        torch.nn.init.normal_(block.norm.bias, std=0.3)
        torch.nn.init.normal_(block.qkv.bias, std=0.3)
    norm = torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 64), torch.nn.Unflatten(0, (1, -1))
    model.head = torch.nn.Sequential(torch.nn.Dropout(0.3), torch.nn.Flatten(0, 1), *norm)
    return model


class OfBatches(torch.nn.Module):
    """Inputs of such a forward cannot be guessed."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.blocks, self.inner = model.blocks, model

    def forward(self, batch: dict[str, Tensor], scale: float) -> Any:
        return self.inner(batch["tokens"]) * scale


LONG = torch.randint(64, (6, 40), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("passes", ["loss", "all"])
@pytest.mark.parametrize("kind", ["itself", "a dictionary", "a part"])
def test_a_loop_of_ones_own_has_the_maps(tmp_path: Path, kind: str, passes: Any, caplog: Any) -> None:
    """Discovered with the first batch, and read anew at each step."""
    inner = trained_gpt().train()
    model = {"itself": inner, "a dictionary": OfBatches(inner), "a part": Wrapped(inner)}[kind]
    arguments = {"itself": (LONG,), "a dictionary": ({"tokens": LONG}, 0.5), "a part": (LONG,)}[kind]
    run = inner if kind == "a part" else model.train()
    monitor = Monitor(tmp_path / "run.jsonl", every=2, passes=passes).attach(model)
    optimizer, expected = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(3):
        run(*arguments).backward()
        optimizer.step()
        if step != 1:
            expected.append(maps_by_hand(inner))
        monitor.after_step()
    monitor.detach()
    log = read_run(tmp_path / "run.jsonl")
    for step, (M, spread) in zip(log.steps, expected, strict=True):
        torch.testing.assert_close(torch.tensor(step["heads"]["M"]), torch.tensor(M), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(torch.tensor(step["heads"]["spread"]), torch.tensor(spread), rtol=1e-4, atol=1e-5)
    warned = {(w["layer"], w["head"]) for w in log.warnings if w["flag"] == "spread>5"}
    assert {(layer, head) for layer in (0, 1) for head in range(4) if expected[0][1][layer][head] > 5} <= warned
    assert warned
    assert not any("not known" in line or "without M" in line for line in messages(caplog))


def test_discovering_the_maps_disturbs_nothing(tmp_path: Path) -> None:
    """Weights, statistics of batches and random numbers are those of a run without a monitor, to the last bit."""
    ends = []
    for watched in (False, True):
        model = trained_gpt().train()
        torch.manual_seed(1)
        monitor: Any = Monitor(tmp_path / "run.jsonl", every=2).attach(model) if watched else _Deaf()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            model(LONG).backward()
            gradients = [p.grad.clone() for p in model.parameters()]
            optimizer.step()
            monitor.after_step()
            assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
            optimizer.zero_grad()
        monitor.detach()
        assert model.training
        ends.append([*(x.clone() for x in model.state_dict().values()), torch.rand(4)])
        assert not any("locater" in name for module in model.modules() for name in vars(module))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    assert read_run(tmp_path / "run.jsonl").steps[0]["heads"]["spread"][1][3] is not None


class TrainsAlone(PlainGPT):
    """A copy of it in evaluation mode does not run."""

    def forward(self, input_ids: Tensor) -> Any:  # type: ignore[override]
        if not self.training:
            raise RuntimeError("call train() first")
        return super().forward(input_ids)


def test_maps_that_cannot_be_discovered_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitor = Monitor(tmp_path / "run.jsonl", every=1).attach(model := TrainsAlone().train())
    for _ in range(3):
        model(LONG).backward()
        monitor.after_step()
    monitor.detach()
    said = [line for line in messages(caplog) if "M and spread" in line]
    assert len(said) == 1
    assert said[0].startswith("step 1: the run continues without M and spread: TrainsAlone: its forward pass ")
    assert "call train() first" in said[0]
    steps = read_run(tmp_path / "run.jsonl").steps
    assert len(steps) == 3
    assert all(step["heads"]["spread"][0] == [None] * 4 for step in steps)
    assert all(step["heads"]["entropy"][0][0] > 0 for step in steps)


def watch_sharded(rank: int, folder: Path) -> None:
    """The same model whole and sharded over two processes; the first compares what was logged of both."""
    logged = []
    for name, group in (("one", False), ("two", True)):
        if group:
            dist.init_process_group("gloo")
        model, path = gemma(), folder / (f"{name}.jsonl" if group else f"{name}-{rank}.jsonl")
        model = shard(model) if group else model
        monitor = Monitor(path, every=1).attach(model)
        model(batch().chunk(2)[rank] if group else batch())
        monitor.after_step()
        assert monitor._weights._stacks.stacks is not None
        monitor.detach()
        if rank == 0:
            logged.append(read_run(path).steps[0]["heads"])
    if rank == 0:
        for name in ("M", "spread", "entropy", "max_logit"):
            torch.testing.assert_close(*(torch.tensor(heads[name]) for heads in logged), rtol=1e-5, atol=1e-5)
        print("compared", flush=True)


def test_sharded_weights_are_gathered(tmp_path: Path) -> None:
    first, _ = ranks(lambda rank: watch_sharded(rank, tmp_path), tmp_path)
    assert "compared" in first


def test_one_warning_per_head_and_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = llama()
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[8:16] *= 3000  # head 1
    monitor = Monitor(tmp_path / "run.jsonl", every=1, warn_on="exploding, locked, max_logit>50").attach(model)
    with caplog.at_level(logging.WARNING, "locater"):
        train(model, monitor, 3)
    monitor.detach()
    warnings = read_run(tmp_path / "run.jsonl").warnings
    assert {(w["layer"], w["head"]) for w in warnings} == {(1, 1)}
    assert len(warnings) == len({w["flag"] for w in warnings})  # three steps, each reason once
    explode = next(w for w in warnings if w["flag"] == "exploding")
    assert explode["value"] > 200
    assert explode["message"].startswith("step 1: model.layers.1.self_attn head 1: exploding (max_logit")
    assert re.search(r"step 1: exploding \(max_logit \d+\.?\d*\) at 1\.1: logits beyond 200", caplog.text)
    assert next(w for w in warnings if w["flag"] == "max_logit>50")["threshold"] == 50


class Shared(torch.nn.Module):
    """One attention behind two norms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.LayerNorm(32), torch.nn.LayerNorm(32)
        self.attention = PlainBlock()
        self.attention.norm = torch.nn.Identity()
        torch.nn.init.normal_(self.second.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.attention(self.second(x))


def test_maps_behind_two_norms_are_those_of_no_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = plain_gpt()
    model.blocks.append(Shared())
    monitor = Monitor(tmp_path / "run.jsonl", every=1).attach(model.train())
    model(LONG).backward()
    monitor.after_step()
    monitor.detach()
    assert [
        line for line in messages(caplog) if "blocks.2.attention: it attends in several ways with the same maps" in line
    ]
    (step,) = read_run(tmp_path / "run.jsonl").steps
    assert [[x is None for x in layer] for layer in step["heads"]["spread"]] == [[False] * 4] * 2 + [[True] * 4]


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "locater"]


def test_a_line_for_each_step_and_reason_and_the_advice_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, path = llama(), tmp_path / "run.jsonl"
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 40
    monitor = Monitor(path, every=1, warn_on="spread>5, max_logit>1e9").attach(model)
    train(model, monitor, 2)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight *= 1e10
    train(model, monitor, 1)
    monitor.detach()
    written = read_run(path).warnings
    heads = [(w["layer"], w["head"]) for w in written if w["flag"] == "spread>5"]
    assert len(heads) == 8
    assert all(w["message"].startswith(f"step 1: model.layers.{w['layer']}.self_attn head ") for w in written[:8])
    said = messages(caplog)
    highest = max(w["value"] for w in written[:8])
    assert said[0] == (
        f"step 1: logit spread up to {highest:.2g} exceeds 5 at 0.0, 0.1, 0.2, 0.3, 1.0, 1.1, 1.2, 1.3: "
        "attention is close to one-hot"
    )
    controls = "locater.SigmaReparam()"
    assert said[1] == f"step 1: lower the learning rate, or attach {controls}; the log is {path} (locater watch {path})"
    assert said[2].startswith("step 3: largest logit up to ")  # and not the advice again
    assert said[3].startswith(f"the run has ended; the log is {path}")
    assert "Verdict   8 heads under stress since step 1" in said[3]
    assert len(said) == 4


def test_many_heads_are_counted_in_a_line() -> None:
    (condition,) = parse_conditions("entropy<1", {"entropy"}, [])
    records = [{"layer": 7, "head": head, "value": 0.1 * head} for head in range(40)]
    line = warning_line(3, condition, records)
    assert line.startswith("step 3: entropy down to 0 is below 1 at 7.0, 7.1, ")
    assert "7.11 and 28 more: attention is close to one-hot" in line


def test_advice_names_only_what_can_be_attached(tmp_path: Path) -> None:
    """By names that work: what is advised is attached as it stands there."""
    peft = pytest.importorskip("peft")
    normed = make("Qwen3", **GROUPED)
    adapted = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj"]))
    block = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
    plain = torch.nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
    sigma, others = "SigmaReparam()", ["QKNorm()", "LocAteR()", "EntropyPenalty(floor=0.2)"]
    expected = {
        llama(): [sigma, "QKClip()", *others],
        normed: [sigma, *others],
        adapted: [sigma, *others],
        plain: [sigma, "QKClip()", "LocAteR()"],
        plain_gpt(): [sigma, "QKClip()", "LocAteR()"],
    }
    for model, controls in expected.items():
        assert controls_that_fit(model, Remedy("any", (sigma, "QKClip()", *others))) == controls
        assert controls_that_fit(model, OF_FLAGS["locked"]) == [call for call in controls if call == sigma]
        for call in controls:
            control = eval(f"locater.{call}", {"locater": locater})
            control.attach(model)
            control.detach()


def test_the_state_has_the_step_and_what_was_warned_of(tmp_path: Path) -> None:
    model = llama()
    first = Monitor(tmp_path / "first.jsonl", every=2, warn_on="entropy_ratio<2").attach(model)
    train(model, first, 3)
    first.detach()
    state = json.loads(json.dumps(first.state_dict()))
    assert state["step"] == 3
    assert len(state["warned"]) == 8
    second = Monitor(tmp_path / "second.jsonl", every=2, warn_on="entropy_ratio<2")
    second.load_state_dict(state)
    train(model, second.attach(model), 2)
    second.detach()
    kinds = [(line["kind"], line.get("step")) for line in records(tmp_path / "second.jsonl")]
    assert kinds == [("run", None), ("loss", 4), ("step", 5), ("end", 5)], (
        "step 4 is not due, and no warning is repeated"
    )
    later = Monitor(tmp_path / "later.jsonl", every=2).attach(model)
    assert later.due
    later.load_state_dict(state)
    assert not later.due
    later.detach()
    with pytest.raises(LocaterError, match="this state holds warned, and step, warned was expected"):
        later.load_state_dict({"warned": []})
    with pytest.raises(LocaterError, match="this state holds nothing"):
        later.load_state_dict({})
    assert later.step == 3


def test_weights_that_are_not_finite_are_told(tmp_path: Path) -> None:
    model = llama()
    monitor = Monitor(tmp_path / "run.jsonl", every=1).attach(model)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[0, 0] = torch.nan
    found = []
    model.train()
    model(**BATCH, labels=BATCH["input_ids"])
    found = monitor.after_step()
    monitor.detach()
    # both queries of key head 0
    assert {(w["layer"], w["head"]) for w in found if w["flag"] == "nonfinite"} >= {(0, 0), (0, 1)}
    assert read_run(tmp_path / "run.jsonl").steps[0]["heads"]["entropy"][0][0] is None


def test_a_resumed_run_goes_on_in_its_file(tmp_path: Path) -> None:
    model = llama()
    for start in (0, 4):
        monitor = Monitor(tmp_path / "run.jsonl", every=2)
        monitor.step = start
        monitor.attach(model)
        train(model, monitor, 4)
        monitor.detach()
    assert [s["step"] for s in read_run(tmp_path / "run.jsonl").steps] == [1, 3, 5, 7]


def test_misuse_is_told(tmp_path: Path) -> None:
    with pytest.raises(LocaterError, match="every=0"):
        Monitor(every=0)
    with pytest.raises(LocaterError, match=r"^warn_on 'entropi<1': no column 'entropi'"):
        Monitor(warn_on="entropi<1")
    with pytest.raises(LocaterError, match="not attached"):
        Monitor().after_step()
    monitor = Monitor(tmp_path / "run.jsonl").attach(llama())
    with pytest.raises(LocaterError, match="already attached"):
        monitor.attach(llama())
    monitor.detach()


# Trainers


class Words(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        ids = torch.randint(3, 64, (8,), generator=torch.Generator().manual_seed(at))
        return {"input_ids": ids, "labels": ids}


def test_in_transformers_trainer(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    settings = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=2, num_train_epochs=1, logging_steps=1,
        eval_strategy="steps", eval_steps=2, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    model = llama()
    Trainer(model, settings, train_dataset=Words(), eval_dataset=Words(), callbacks=[Monitor(every=2)]).train()
    run = read_run(tmp_path / "locater.jsonl")
    assert run.ended
    assert [s["step"] for s in run.steps] == [1, 3, 5]
    assert len(run.losses) == 6
    assert not any("locater" in name for module in model.modules() for name in vars(module))


def test_in_lightning(tmp_path: Path) -> None:
    import lightning

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama()

        def training_step(self, batch: Any, at: int) -> Tensor:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    trainer = lightning.Trainer(
        max_epochs=1, accumulate_grad_batches=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, callbacks=[Monitor(every=2)],
    )  # fmt: skip
    trainer.fit(Lit(), torch.utils.data.DataLoader(Words(), batch_size=2))
    run = read_run(tmp_path / "locater.jsonl")
    assert run.ended
    assert [s["step"] for s in run.steps] == [1, 3, 5]
    assert run.header["layers"][0]["name"].endswith("layers.0.self_attn")
